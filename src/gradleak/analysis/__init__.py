"""What an update says about the data before, or after, anybody attacks it, and how curved the loss is there.

`hessian` (matrices as products), `trajectory` (a client's path) and `association` (rank correlations; it needs results)
are modules of their own:
`gradleak.study` joins all of them over the checkpoints of a training.
"""

from gradleak.analysis.hessian import Curvature, Extremes, LogDeterminant, curvature, extremes, log_determinant
from gradleak.analysis.identifiability import Certificate, Identifiability, certify, noise_floor
from gradleak.analysis.information import (
    ChannelCurve,
    CovarianceTest,
    CurvatureIndex,
    InputInformation,
    Releases,
    Sharpness,
    against_curvature,
    channel_bound,
    curvature_index,
    input_information,
    releases,
    sharpness,
)
from gradleak.analysis.local import Floor
from gradleak.analysis.recipe import ReplayError, Way, linearity, recipes, replay_error, walk, way, way_on
from gradleak.analysis.rounding import Rounding, rounding_of

__all__ = ["Certificate", "Floor", "Identifiability", "Rounding", "certify", "noise_floor", "rounding_of"]
__all__ += ["Curvature", "Extremes", "LogDeterminant", "curvature", "extremes", "log_determinant"]
__all__ += ["ChannelCurve", "CovarianceTest", "CurvatureIndex", "InputInformation", "Releases", "Sharpness"]
__all__ += ["against_curvature", "channel_bound", "curvature_index", "input_information", "releases", "sharpness"]
__all__ += ["ReplayError", "Way", "linearity", "recipes", "replay_error", "walk", "way", "way_on"]
