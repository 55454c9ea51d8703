"""Texts off the gradients of language models.

`readers` finds the maps that read tokens and what their gradients span, `bag` the tokens, `order` their order in causal
models, `exchange` in encoders, `words` labels and last tokens; `attack` puts them together.
"""

from gradleak.attacks.spans.text.attack import SpanText

__all__ = ["SpanText"]
