"""Rows of a table: numeric columns, standardised, and categorical ones as one-hot blocks, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gradleak.scenario.kinds.base import TOLERANCE, Cell, Exhibit, Kind, Measure, Threshold
from gradleak.scenario.kinds.classes import Category

if TYPE_CHECKING:
    from gradleak.scenario.fields import Field


@dataclass(frozen=True)
class Column:
    """One column. With `categories` it is a one-hot block; without, a number that enters the model as (v - mean) / std.

    low, high   bounds of the raw number, if they are known
    whole       the raw number is a whole number
    """

    name: str
    categories: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0
    low: float = -inf
    high: float = inf
    whole: bool = False

    @property
    def width(self) -> int:
        """Entries of an encoded row that it takes."""
        return len(self.categories) or 1

    def category(self, code: int) -> str:
        """The text of a code; the code itself where there is none."""
        return self.categories[code] if 0 <= code < len(self.categories) else str(code)

    def raw(self, value: float) -> float:
        """The number as it stands in the table."""
        number = value * self.std + self.mean
        return float(round(number)) if self.whole else number


@dataclass(frozen=True)
class Table(Kind):
    """A row of a table. Recovered when every column is: a category exactly, a number within 0.319 of its std.

    A row enters the model as one vector: columns in order, a categorical one as its one-hot block.
    """

    columns: tuple[Column, ...] = ()
    name: ClassVar = "table"
    noun: ClassVar = ("row", "rows")
    entries: ClassVar = "entry"
    measures: ClassVar = (
        Measure("right", "columns right", percent=True),
        Measure("categorical", "categorical right", percent=True),
        Measure("numeric", "numeric right", percent=True),
        Measure("rmse", "RMSE (SD)", digits=3, higher=False),
    )
    thresholds: ClassVar = (Threshold("exact row", "right", 1.0, strict=False), Threshold("right>90%", "right", 0.9))
    needed: ClassVar = ("exact row",)
    control: ClassVar = 0.9
    rule: ClassVar = "every column is right (categories exactly, numbers within 0.319 standard deviations)"

    def settings(self) -> dict[str, Any]:
        columns = [{**asdict(each), "categories": list(each.categories)} for each in self.columns]
        return {"columns": [{key: value for key, value in each.items() if _stated(value)} for each in columns]}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Table:
        columns = ({**each, "categories": tuple(each.get("categories", ()))} for each in settings.get("columns", ()))
        return Table(tuple(Column(**each) for each in columns))

    def misfit(self, shape: tuple[int, ...]) -> str:
        if shape == (self.width,):
            return ""
        return (
            f"The columns of the table take {self.width} entries, but an example has shape {shape}. Give one-hot "
            "blocks as many categories as they have entries."
        )

    @property
    def width(self) -> int:
        """Entries of an encoded row."""
        return sum(column.width for column in self.columns)

    @cached_property
    def places(self) -> tuple[tuple[Column, slice], ...]:
        """Every column with its entries in an encoded row."""
        ends = torch.tensor([column.width for column in self.columns]).cumsum(0).tolist()
        return tuple((c, slice(end - c.width, end)) for c, end in zip(self.columns, ends, strict=True))

    @property
    def blocks(self) -> tuple[slice, ...]:
        """The one-hot blocks."""
        return tuple(place for column, place in self.places if column.categories)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Entries that are numbers."""
        return tuple(place.start for column, place in self.places if not column.categories)

    def limits(self) -> tuple[tuple[float, float], ...]:
        """Bounds of every entry of an encoded row."""
        of_column = (
            ((0.0, 1.0),) * c.width if c.categories else (((c.low - c.mean) / c.std, (c.high - c.mean) / c.std),)
            for c in self.columns
        )
        return tuple(pair for pairs in of_column for pair in pairs)

    def allowed(self, value: Tensor, field: Field) -> str:
        for column, place in self.places:
            block = value[..., place]
            if column.categories and not bool(((block == 0) | (block == 1)).all() & (block.sum(-1) == 1).all()):
                return f"column {column.name!r} is not one-hot"
        return ""

    def hardened(self, row: Tensor) -> Tensor:
        """The nearest valid rows: the largest entry of each block becomes 1, the others 0."""
        parts = [
            one_hot(row[..., place].argmax(-1), column.width).to(row) if column.categories else row[..., place]
            for column, place in self.places
        ]
        return torch.cat(parts, -1)

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        low, high = (torch.tensor(side, dtype=torch.float64) for side in zip(*self.limits(), strict=True))
        value = super().comparable(value, field)
        return self.hardened(value.clamp(low.to(value), high.to(value)))

    def wrong(self, found: Tensor, truth: Tensor) -> Tensor:
        """Which columns are wrong, (..., columns); arguments broadcast."""
        apart = (found - truth).abs()
        each = [apart[..., place].amax(-1) >= (0.5 if c.categories else TOLERANCE) for c, place in self.places]
        return torch.stack(each, -1)

    def distance(self, first: Tensor, second: Tensor) -> Tensor:
        """The share of wrong columns; how far the numbers are apart decides between equal ones."""

        def block(some: Tensor) -> Tensor:
            wrong = self.wrong(some[:, None], second).double().mean(-1)
            apart = (some[:, None] - second).abs().clamp(max=4).mean(-1)
            return wrong + 1e-3 * apart / len(self.columns)

        return torch.cat([block(some) for some in first.split(16)])  # a gallery may hold many rows

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        right = (~self.wrong(found, truth)).double()
        is_category = torch.tensor([bool(column.categories) for column in self.columns], device=right.device)
        apart = (found - truth)[:, list(self.numbers)]
        return {
            "right": right.mean(1),
            "categorical": right[:, is_category].mean(1),
            "numeric": right[:, ~is_category].mean(1),
            "rmse": apart.square().mean(1).sqrt(),
        }

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        """The most frequent category and the median of every column: what marginals alone give."""
        if others is None:
            return {}
        middle = others.median(0).values
        for place in self.blocks:
            middle[place] = one_hot(others[:, place].sum(0).argmax(), place.stop - place.start).to(middle)
        return {"marginal modes": middle.expand_as(truth)}

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        wrong = self.wrong(found, true).tolist()
        cells = (
            Cell(column.name, _text(column, true[place]), _text(column, found[place]), not bad)
            for (column, place), bad in zip(self.places, wrong, strict=True)
        )
        return Exhibit(cells=tuple(cells))


@dataclass(frozen=True)
class Codes(Category):
    """Categorical columns as ids that the model embeds, (columns,). `Field.classes`: the most categories of a column.

    No gradient moves an id; the rows of the embeddings that an update changes name it (`parts.embeddings`).
    """

    columns: tuple[Column, ...] = ()
    name: ClassVar = "codes"
    noun: ClassVar = ("row", "rows")
    soft: ClassVar = False
    embedded: ClassVar = True
    measures: ClassVar[tuple[Measure, ...]] = (Measure("right", "columns right", percent=True),)
    thresholds: ClassVar = (Threshold("exact row", "right", 1.0, strict=False),)
    needed: ClassVar = ("exact row",)
    rule: ClassVar = "every column has the right category"

    def settings(self) -> dict[str, Any]:
        return Table(self.columns).settings()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Codes:
        return Codes(Table.of(settings).columns)

    def allowed(self, value: Tensor, field: Field) -> str:
        for place, column in enumerate(self.columns):
            ids = value[..., place]
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < column.width:
                return f"column {column.name!r} holds {int(ids.min())} to {int(ids.max())} of {column.width} categories"
        return "" if self.columns else super().allowed(value, field)

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        pairs = enumerate(zip(true.tolist(), found.tolist(), strict=True))
        named = ((self.columns[place] if self.columns else Column(str(place)), a, b) for place, (a, b) in pairs)
        return Exhibit(cells=tuple(Cell(c.name, c.category(a), c.category(b), a == b) for c, a, b in named))


def _text(column: Column, entries: Tensor) -> str:
    if column.categories:
        return column.categories[int(entries.argmax())]
    return f"{column.raw(float(entries)):.6g}"


def _stated(value: Any) -> bool:
    """Is it more than the default? A bound of 0.0 is: it equals False, but says something."""
    return value != [] and value is not False and (not isinstance(value, float) or isfinite(value))
