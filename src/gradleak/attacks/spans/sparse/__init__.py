"""Fully connected layers before a ReLU: whole batches exactly, SPEAR with a search of our own.

`layers` finds the layer, `directions` the sparse vectors of its gradient, `selection` those that are examples; `attack`
puts them together, and searches for the images behind features.
"""

from gradleak.attacks.spans.sparse.attack import SHOWN, SparseSpan

__all__ = ["SHOWN", "SparseSpan"]
