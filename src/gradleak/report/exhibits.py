"""One private example beside its reconstruction, ready to be drawn: pictures, a table, a text or curves.

A kind fills an `Exhibit`; `drawn` makes the view of it that a macro of sections/exhibits.html.j2 draws, by `form`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor

from gradleak.core import pictures
from gradleak.report.grid import stated
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import Cell, Exhibit

COLUMNS = 64  # of a table that a card shows
TOKENS = 512  # of a text
OPEN = 96  # of them that are not folded
CHANNELS = 6  # of a series
POINTS = 160  # of a curve
WIDTH, HEIGHT = 200, 40  # of a curve's box
BRIEF = 8  # entries of a further field that a line of text lists


@dataclass(frozen=True)
class Pictures:
    """Two pictures as data URIs, and their shape."""

    form: ClassVar = "pictures"
    reading: ClassVar = "Difference: black where the two agree."
    true: str
    found: str
    width: int
    height: int

    @property
    def size(self) -> int:
        return len(self.true) + len(self.found)


@dataclass(frozen=True)
class Cells:
    """The entries of an example, one below the other; `left_out`: how many more there are."""

    form: ClassVar = "cells"
    reading: ClassVar = "Every entry is marked right or wrong."
    cells: tuple[Cell, ...]
    left_out: int
    unit: str

    @property
    def size(self) -> int:
        return sum(120 + len(cell.name) + len(cell.true) + len(cell.found) for cell in self.cells)


@dataclass(frozen=True)
class Text:
    """The tokens of a private text in order, with those marked that were recovered. `joined`: what is between them."""

    form: ClassVar = "text"
    reading: ClassVar = "Bold tokens were recovered in their places, dotted ones elsewhere, the others not at all."
    cells: tuple[Cell, ...]
    left_out: int
    joined: str = " "

    @property
    def first(self) -> tuple[Cell, ...]:
        return self.cells[:OPEN]

    @property
    def more(self) -> tuple[Cell, ...]:
        """Those that are folded."""
        return self.cells[OPEN:]

    @property
    def size(self) -> int:
        return sum(30 + len(cell.true) + len(cell.found) for cell in self.cells)

    @property
    def summary(self) -> str:
        """The marks in words, for those who do not see them."""
        right, elsewhere = (sum(marks) for marks in zip(*((cell.right, cell.elsewhere) for cell in self.cells)))
        missing = [cell.true.strip() for cell in self.cells if not cell.right and not cell.elsewhere]
        text = f"{right} of {len(self.cells)} tokens in place"
        text += f", {elsewhere} found elsewhere" if elsewhere else ""
        return f"{text}; missing: {' '.join(missing)}" if missing else text


@dataclass(frozen=True)
class Curves:
    """A path for each channel, true and recovered, in a box of `width` x `height`."""

    form: ClassVar = "curves"
    reading: ClassVar = "Solid: the private curve. Dashed: the recovered one."
    width: ClassVar = WIDTH
    height: ClassVar = HEIGHT
    paths: tuple[tuple[str, str], ...]
    left_out: int
    unit: str

    @property
    def size(self) -> int:
        return sum(250 + len(true) + len(found) for true, found in self.paths)


View: TypeAlias = Pictures | Cells | Text | Curves


def drawn(exhibit: Exhibit) -> View | None:
    """What the exhibit has, ready for its macro; None if it has nothing that can be drawn."""
    if exhibit.pictures is not None:
        true, found = exhibit.pictures
        if not pictures.drawable(true.shape):
            return None
        return Pictures(pictures.data_uri(true), pictures.data_uri(found), true.shape[-1], true.shape[-2])
    if exhibit.curves is not None:
        true, found = exhibit.curves
        paths = tuple(map(_paths, true[:CHANNELS], found[:CHANNELS]))
        return Curves(paths, max(0, len(true) - CHANNELS), exhibit.unit)
    most = TOKENS if exhibit.running else COLUMNS
    cells, left_out = exhibit.cells[:most], exhibit.left_out + max(0, len(exhibit.cells) - most)
    if not cells:
        return None
    return Text(cells, left_out, exhibit.joined) if exhibit.running else Cells(cells, left_out, exhibit.unit)


def _paths(true: Tensor, found: Tensor) -> tuple[str, str]:
    """One channel of both, (time,). The private one sets the scale: what is far off stays at the edge of the box."""
    count = min(len(true), POINTS)
    places = [round(place * (len(true) - 1) / max(1, count - 1)) for place in range(count)]
    first, second = true[places].tolist(), found[places].tolist()
    low, span = min(first), (max(first) - min(first)) or 1.0
    return _path(first, low, span), _path(second, low, span)


def _path(values: Sequence[float], low: float, span: float) -> str:
    """The curve in the box, with a quarter of the span free above and below."""
    across = WIDTH / max(1, len(values) - 1)
    levels = [min(max((value - low) / span, -0.25), 1.25) for value in values]
    points = (f"{place * across:.1f} {HEIGHT * (1.25 - level) / 1.5:.1f}" for place, level in enumerate(levels))
    return "M" + "L".join(points)


# --- further fields --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Further:
    """Another field of the same example: a line of text, and what is drawn beside it, such as a mask."""

    name: str
    text: str
    view: View | None = None


def further(name: str, true: Tensor, found: Tensor, field: Field) -> Further:
    """A field of one example, both comparable. The target goes by the noun of its kind."""
    exhibit, kind = field.kind.exhibit(true, found, field), field.kind
    title = kind.noun[0] if name == "y" else name
    if not exhibit.cells or exhibit.running or len(exhibit.cells) > BRIEF or exhibit.left_out:
        score = stated(kind.headline, float(kind.scores(found[None], true[None])[kind.headline.name]))
        view = drawn(exhibit)
        return Further(title, score, None if isinstance(view, Cells) else view)
    pairs = ((cell.true, cell.found) for cell in exhibit.cells)
    first, second = (" ".join(values) for values in zip(*pairs, strict=True))
    unit = f" {exhibit.unit}" if exhibit.unit else ""
    mark = "right" if all(cell.right for cell in exhibit.cells) else "wrong"
    return Further(title, f"true {first}, recovered {second}{unit} ({mark})")
