"""What an update says about the data before, or after, anybody attacks it."""

from gradleak.analysis.identifiability import (
    Certificate,
    Floor,
    Identifiability,
    Rounding,
    certify,
    noise_floor,
    rounding_of,
)

__all__ = ["Certificate", "Floor", "Identifiability", "Rounding", "certify", "noise_floor", "rounding_of"]
