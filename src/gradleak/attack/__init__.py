"""What an attack is: stages of parts solved over lanes (`composed`), attacks in sequence (`cascade`), and `checks`."""

from gradleak.attack.composed import Attack, Composed, Reconstruction, lowest_match, of_each, require, scenes_of

__all__ = ["Attack", "Composed", "Reconstruction", "lowest_match", "of_each", "require", "scenes_of"]
