"""How curved the loss is along a training, and what that says about leakage: Hessians, information, the study."""

from gradleak.curvature.hessian import Curvature, Extremes, LogDeterminant, curvature, extremes, log_determinant
from gradleak.curvature.information import (
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

__all__ = ["Curvature", "Extremes", "LogDeterminant", "curvature", "extremes", "log_determinant"]
__all__ += ["ChannelCurve", "CovarianceTest", "CurvatureIndex", "InputInformation", "Releases", "Sharpness"]
__all__ += ["against_curvature", "channel_bound", "curvature_index", "input_information", "releases", "sharpness"]
