"""What an attack is: stages of parts solved over lanes (`composed`), attacks in sequence (`cascade`), and `checks`."""

from gradleak.attack.composed import (
    Attack,
    Composed,
    Reconstruction,
    lowest_match,
    missing_fields,
    of_each,
    require,
    scenes_of,
    supported,
)

__all__ = ["Attack", "Composed", "Reconstruction", "lowest_match", "missing_fields", "of_each", "require", "scenes_of"]
__all__ += ["supported"]
