"""Attacks that search a generator's latent, features or weights: GGL, GIAS, GIFD."""

from gradleak.attacks.generative.ggl import ggl
from gradleak.attacks.generative.gias import gias
from gradleak.attacks.generative.gifd import gifd

__all__ = ["ggl", "gias", "gifd"]
