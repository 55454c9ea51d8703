"""What an update says about the data before, or after, anybody attacks it."""

from gradleak.analysis.identifiability import Certificate, Identifiability, certify, noise_floor
from gradleak.analysis.local import Floor
from gradleak.analysis.rounding import Rounding, rounding_of

__all__ = ["Certificate", "Floor", "Identifiability", "Rounding", "certify", "noise_floor", "rounding_of"]
