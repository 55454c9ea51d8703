"""Attacks on the span of a layer's inputs, which its gradient gives (`parts.row_space`): one module a kind of model.

`classifiers` attacks convolutional networks with the closed form of `maps`, `denoisers` diffusion models, `sparse`
fully connected layers before a ReLU, `transformers` vision transformers: `patches` finds their first layers,
`completion` fills in what their equations leave open, `pairs` searches for two images. `text` attacks language models.
"""

from gradleak.attacks.spans.classifiers import Span
from gradleak.attacks.spans.denoisers import SpanDM
from gradleak.attacks.spans.sparse import SparseSpan
from gradleak.attacks.spans.text import SpanText
from gradleak.attacks.spans.transformers import ViT

__all__ = ["Span", "SpanDM", "SpanText", "SparseSpan", "ViT"]
