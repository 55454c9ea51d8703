"""What an attack is: stages of parts solved over lanes (`composed`), attacks in sequence (`cascade`), and `checks`."""

from gradleak.attack.composed import (
    Attack,
    Composed,
    ReadOff,
    Reconstruction,
    lowest_match,
    missing_fields,
    no_gradients,
    of_each,
    require,
    scenes_of,
    supported,
    too_many,
)

__all__ = ["Attack", "Composed", "ReadOff", "Reconstruction", "lowest_match", "missing_fields", "no_gradients"]
__all__ += ["of_each", "require", "scenes_of", "supported", "too_many"]
