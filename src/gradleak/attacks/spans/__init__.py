"""Attacks on the span of a layer's inputs, which its gradient gives (`parts.row_space`): one module a kind of model.

`denoisers` attacks diffusion models.
"""

from gradleak.attacks.spans.denoisers import SpanDM

__all__ = ["SpanDM"]
