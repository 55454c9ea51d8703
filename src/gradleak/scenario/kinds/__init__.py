"""Kinds of private data: images, numbers, tables, series, text, and what clients are trained to predict.

A kind is one small class. It says how a field of that kind is searched for (unknowns, decoding, neighbours), how two
examples are compared, when one counts as recovered, what a guess without the update is worth, and what a report shows.
Attacks, metrics, audits and reports ask the kind, and never the rank of a tensor.
"""

from __future__ import annotations

from gradleak.scenario.kinds.base import TOLERANCE, Cell, Exhibit, Kind, Measure, Threshold
from gradleak.scenario.kinds.classes import Category, ClassMap, Mask, MultiLabel
from gradleak.scenario.kinds.images import Image
from gradleak.scenario.kinds.numbers import Series, Value, Vector
from gradleak.scenario.kinds.tables import Codes, Column, Table
from gradleak.scenario.kinds.tokens import Tokens

__all__ = [
    "KINDS",
    "TOLERANCE",
    "Category",
    "Cell",
    "ClassMap",
    "Column",
    "Exhibit",
    "Image",
    "Kind",
    "Mask",
    "Measure",
]
__all__ += ["MultiLabel", "Series", "Table", "Threshold", "Tokens", "Value", "Vector", "natural_kind"]

KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (Image, Vector, Table, Codes, Series, Tokens, Category, MultiLabel, ClassMap, Mask, Value)
}
"""By the names that files and options use."""


def natural_kind(shape: tuple[int, ...], classes: int | None, bounded: bool) -> Kind:
    """The kind of a field that is declared by its shape alone."""
    if classes is not None:
        return ClassMap() if shape else Category()
    if len(shape) == 3 and bounded:
        return Image()
    return {0: Value(), 2: Series()}.get(len(shape), Vector())
