"""Attacks on the span of a layer's inputs, which its gradient gives: a module for each kind of model.

`layers` finds the layers and their spans; `denoisers` attacks diffusion models.
"""

from gradleak.attacks.spans.denoisers import SpanDM

__all__ = ["SpanDM"]
