"""What an update determines, before anybody attacks it: certificates, noise floors, spans, recipes, risk."""

from gradleak.identify.certificates import Certificate, Identifiability, certify, noise_floor
from gradleak.identify.floors import Floor
from gradleak.identify.recipe import ReplayError, Way, linearity, recipes, replay_error, walk, way, way_on
from gradleak.identify.rounding import Rounding, rounding_of

__all__ = ["Certificate", "Floor", "Identifiability", "Rounding", "certify", "noise_floor", "rounding_of"]
__all__ += ["ReplayError", "Way", "linearity", "recipes", "replay_error", "walk", "way", "way_on"]
