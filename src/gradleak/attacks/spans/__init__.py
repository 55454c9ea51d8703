"""Attacks on the span of a layer's inputs, which its gradient gives (`parts.row_space`): one module a kind of model.

`denoisers` attacks diffusion models, `sparse` fully connected layers before a ReLU.
"""

from gradleak.attacks.spans.denoisers import SpanDM
from gradleak.attacks.spans.sparse import SparseSpan

__all__ = ["SpanDM", "SparseSpan"]
