"""Rows of a table, encoded as a model takes them: `Records`, and how raw columns become them.

A numeric column enters as (v - mean) / std, a categorical one as a one-hot block. Moments, categories and (if wanted)
bounds are those of the data that are loaded. An auditor has them; whether a server does is part of the threat model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradleak.core.registry import did_you_mean, pieces
from gradleak.data.fetch import DataError
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import Column, Table

MISSING = frozenset(("", "?", "NA", "N/A", "NaN", "nan", "null"))
"""Cells that hold no value."""

UNKNOWN = "?"  # the category of missing values
MOST_CATEGORIES = 100
MOST_CLASSES = 20  # different whole numbers in a target that is taken for classes
REGRESSION = "regression"

Cells = list[str] | NDArray[np.float64]
"""A column as it was read: text, or numbers with NaN where a value is missing."""


@dataclass(frozen=True)
class TableSpec:
    """How the columns of a table are read. Nothing has to be stated.

    target    the column that is predicted; default: the last one
    columns   kinds of columns, `"age:number,sex:category,id:drop"` or `{"age": "number"}`; others by their values
    classes   a number of classes, or "regression"; default: by the values of the target
    missing   "category": missing values are a category of their own, and an error in columns of numbers;
              "drop": rows with a missing value are left out
    bounds    True: the least and the largest value of every numeric column are known, as `Column.low` and `high`. A
              share q below 0.5: the quantiles q and 1 - q are, and values beyond them are cut off. Default: unbounded
    """

    target: str = ""
    columns: str | Mapping[str, str] = ""
    classes: int | str | None = None
    missing: str = "category"
    bounds: bool | float = False

    def __post_init__(self) -> None:
        if self.missing not in ("category", "drop"):
            raise DataError(f"missing is {self.missing!r}. Give 'category' or 'drop'.")
        if not 0 <= self.bounds < 0.5 and self.bounds is not True:
            raise DataError(f"bounds is {self.bounds!r}. Give True, False or a share below 0.5, such as 0.01.")
        _classes_of(self.classes)

    @property
    def count(self) -> int | None:
        """The number of classes that is stated."""
        return _classes_of(self.classes)

    @property
    def regression(self) -> bool:
        return self.classes == REGRESSION

    def kinds(self) -> dict[str, str]:
        """The stated kind of each named column."""
        columns = self.columns
        stated = dict(map(_kind_of, pieces(columns))) if isinstance(columns, str) else dict(columns)
        for name, kind in stated.items():
            if kind not in _KINDS:
                raise DataError(f"Column {name!r} is to be {kind!r}.{did_you_mean(str(kind), _KINDS)}")
        return stated


def _classes_of(classes: int | str | None) -> int | None:
    """The stated number of classes, from a number or from text."""
    if classes in (None, "", REGRESSION):
        return None
    text = str(classes)
    if isinstance(classes, bool) or not text.isdecimal() or int(text) < 1:
        raise DataError(f"classes is {classes!r}. Give a number of classes, or {REGRESSION!r}.")
    return int(text)


def _kind_of(text: str) -> tuple[str, str]:
    name, colon, kind = text.rpartition(":")
    if not colon or not name.strip():
        raise DataError(f"{text!r} says no kind of column. Write name:number, name:category or name:drop.")
    return name.strip(), kind.strip()


@dataclass(frozen=True, eq=False)
class Records:
    """Labelled rows of a table: `x` float32 (N, width) encoded, `y` int64 (N,) or, for regression, float32 (N,).

    `columns` say which entries of `x` are which column, and what the entries mean. The values of a regression are
    standardised too: `target.raw(value)` is the number of the table.
    """

    x: Tensor
    y: Tensor
    columns: tuple[Column, ...]
    target: Column
    source: str  # their origin, for people

    def __post_init__(self) -> None:
        def demand(holds: bool, message: str) -> None:
            if not holds:
                raise DataError(f"Rows from {self.source}: {message}")

        x, y = self.x, self.y
        wanted = torch.float32 if self.classes is None else torch.int64
        shape = (len(x), self.kind.width)
        demand(x.dtype == torch.float32 and x.shape == shape, f"x must be float32 {shape}, not {x.dtype} {_shape(x)}.")
        demand(
            y.dtype == wanted and y.shape == x.shape[:1],
            f"y must be {str(wanted).removeprefix('torch.')} ({len(x)},), not {y.dtype} {_shape(y)}.",
        )
        demand(bool(x.isfinite().all()), "x holds values that are not finite numbers.")
        wrong = self.kind.allowed(x, self.field)
        demand(not wrong, f"{wrong}.")
        if self.classes is not None and y.numel():
            demand(0 <= int(y.min()) <= int(y.max()) < self.classes, f"labels lie outside 0 .. {self.classes - 1}.")

    def __repr__(self) -> str:  # never the values: they are private
        kind = "regression" if self.classes is None else f"{self.classes} classes"
        return f"Records({len(self)} rows, {len(self.columns)} columns, {self.target.name!r}: {kind}, {self.source!r})"

    @property
    def kind(self) -> Table:
        """The kind of `x`."""
        return Table(self.columns)

    @property
    def classes(self) -> int | None:
        """The number of classes of the target; None: it is a number."""
        return len(self.target.categories) or None

    @property
    def names(self) -> tuple[str, ...]:
        """The classes in words; none for a regression."""
        return self.target.categories

    @property
    def field(self) -> Field:
        """What a task says about `x`: one-hot blocks in [0, 1], and the bounds of the columns where they are known."""
        return Field((self.kind.width,), bounds=self.kind.limits(), kind=self.kind)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> Records:
        """Some of the rows, as `Records`; one index gives one row, still with its leading dimension."""
        chosen = selected(rows, self.x.device)
        return replace(self, x=self.x[chosen], y=self.y[chosen])

    def batch(self, indices: int | slice | Sequence[int] | Tensor) -> dict[str, Tensor]:
        """The private tensors of one client: `{"x": ..., "y": ...}`."""
        chosen = self[indices]
        return {"x": chosen.x, "y": chosen.y}

    def decoded(self, x: Tensor) -> dict[str, list[str] | list[float]]:
        """Encoded rows (n, width) as values of the table, by column; a block counts as its largest entry."""
        return {column.name: _raw_values(column, x[:, place]) for column, place in self.kind.places}


def selected(rows: int | slice | Sequence[int] | Tensor, device: torch.device) -> slice | Tensor:
    """What a tensor is indexed with to get these rows, with the leading axis kept."""
    chosen = rows if isinstance(rows, slice) else torch.as_tensor(rows, device=device).reshape(-1)
    if isinstance(chosen, Tensor) and not chosen.numel():
        return chosen.long()  # torch makes an empty list a float tensor
    return chosen


def _shape(value: Tensor) -> tuple[int, ...]:
    return tuple(value.shape)


def _raw_values(column: Column, entries: Tensor) -> list[str] | list[float]:
    if column.categories:
        return [column.categories[index] for index in entries.argmax(-1).tolist()]
    return [column.raw(value) for value in entries.squeeze(-1).tolist()]


# --- from raw columns to Records ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table as it was read.

    target       the column that is predicted unless the caller names one; empty: the last
    categories   of columns whose source names them, in its order; the cells are these names
    test         which rows are the test part, if the source has parts
    """

    columns: Mapping[str, Cells]
    target: str = ""
    categories: Mapping[str, tuple[str, ...]] = dataclass_field(default_factory=dict)
    test: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class _Reading:
    """One column: what it holds, and its cells as tensors (N, width)."""

    column: Column
    encoded: Tensor


def encode(raw: RawTable, spec: TableSpec, source: str, split: str | None = None) -> Records:
    """The rows of a table, or of one part of it. All rows are encoded, so that the parts are encoded alike."""
    kinds, target = _resolved(raw, spec, source)
    columns = {name: cells for name, cells in raw.columns.items() if kinds.get(name) != "drop"}
    if len(columns) < 2:
        raise DataError(f"{source}: a table needs the target {target!r} and at least one other column.")
    test = raw.test
    if spec.missing == "drop":
        complete = ~np.any([_is_missing(cells) for cells in columns.values()], axis=0)
        columns = {name: _rows(cells, complete) for name, cells in columns.items()}
        test = None if test is None else test[complete]
    if not len(columns[target]):
        raise DataError(f"{source} holds no rows{' without a missing value' if spec.missing == 'drop' else ''}.")
    known = raw.categories
    readings = []
    for name, cells in columns.items():
        if name != target:
            kind = kinds.get(name) or ("category" if name in known else _natural_kind(cells))
            readings.append(_ENCODERS[kind](name, cells, spec, known.get(name, ()), f"{source}: column {name!r}"))
    label, y = _target(target, columns[target], spec, known.get(target, ()), f"{source}: the target {target!r}")
    x = torch.cat([reading.encoded for reading in readings], 1)
    whole = Records(x, y, tuple(reading.column for reading in readings), label, source)
    return whole if split is None and test is None else whole[_part(len(whole), test, split)]


def _part(count: int, test: NDArray[np.bool_] | None, split: str | None) -> Tensor:
    """Rows of a part; without parts of its own every fifth row of a table is "test"."""
    rows = torch.arange(count)
    in_test = rows % 5 == 4 if test is None else torch.from_numpy(test)
    return rows[in_test == (split == "test")]


def _resolved(raw: RawTable, spec: TableSpec, source: str) -> tuple[dict[str, str], str]:
    """The stated kinds and the target, both checked against the columns that there are."""
    kinds = spec.kinds()
    for name in (*kinds, *([spec.target] if spec.target else [])):
        if name not in raw.columns:
            raise DataError(f"{source} has no column {name!r}.{did_you_mean(name, raw.columns)}")
    target = spec.target or raw.target or list(raw.columns)[-1]
    if kinds.get(target) == "drop":
        raise DataError(f"{source}: the target {target!r} cannot be dropped. Name another column as the target.")
    return kinds, target


def _target(name: str, cells: Cells, spec: TableSpec, known: tuple[str, ...], place: str) -> tuple[Column, Tensor]:
    """The target's column and y."""
    absent = int(_is_missing(cells).sum())
    if absent:
        raise DataError(f"{place} lacks {absent} of {len(cells)} values. {_DROP}")
    if spec.regression or not (spec.count or known or spec.kinds().get(name) == "category" or _is_class(cells)):
        reading = _number(name, cells, replace(spec, bounds=False), (), place)
        return reading.column, reading.encoded.squeeze(1)
    labels = known or _class_names(cells, spec.count, place)
    most = spec.count or (len(known) if known else MOST_CATEGORIES)
    if len(labels) > most:
        raise DataError(
            f"{place} has {len(labels)} different values, more than {most} classes. Give classes={len(labels)}, "
            f"classes={REGRESSION!r} if it is a number, or another target."
        )
    labels = (*labels, *(f"class {number}" for number in range(len(labels), spec.count or 0)))
    index = {label: number for number, label in enumerate(labels)}
    return Column(name, labels), torch.tensor([index[text] for text in _text(cells)], dtype=torch.int64)


def _class_names(cells: Cells, count: int | None, place: str) -> tuple[str, ...]:
    """The different values in order; with a stated number of classes 0 .. count - 1 if the values are among them."""
    names = _distinct(_text(cells))
    if count and all(name.isdecimal() and int(name) < count for name in names):
        return tuple(str(number) for number in range(count))
    return names


def _is_class(cells: Cells) -> bool:
    """Is a target of such values a class? Text is, and so are a few whole numbers."""
    values = _numbers(cells)
    return values is None or (bool((values % 1 == 0).all()) and len(np.unique(values)) <= MOST_CLASSES)


def _natural_kind(cells: Cells) -> str:
    return "category" if _numbers(cells) is None else "number"


_DROP = (
    "Leave these rows out with missing='drop' (--missing drop), or the column with name:drop in columns (--columns)."
)


def _number(name: str, cells: Cells, spec: TableSpec, known: tuple[str, ...], place: str) -> _Reading:
    """A column of numbers, standardised."""
    values = _numbers(cells)
    if values is None:
        row = next(row for row, text in enumerate(cells) if parsed(str(text)) is None) + 1
        raise DataError(f"{place} should hold numbers, but row {row} is none. Make it a category, or drop it.")
    absent = int(np.isnan(values).sum())
    if absent:
        raise DataError(f"{place} lacks {absent} of {len(values)} numbers. {_DROP}")
    if not np.isfinite(values).all():
        raise DataError(f"{place} holds {int(np.isinf(values).sum())} infinite numbers. Remove those rows or drop it.")
    low, high = -math.inf, math.inf
    if spec.bounds:
        low, high = (float(side) for side in np.quantile(values, _quantiles(spec.bounds)))
        values = values.clip(low, high)
        low, high = (low, high) if low < high else (low - 1, high + 1)
    mean, std = float(values.mean()), float(values.std())
    std = std if std > 1e-9 * max(1.0, abs(mean)) else 1.0  # a constant column
    column = Column(name, (), mean, std, low, high, bool((values % 1 == 0).all()))
    return _Reading(column, torch.from_numpy((values - mean) / std).float()[:, None])


def _quantiles(bounds: bool | float) -> tuple[float, float]:
    share = 0.0 if bounds is True else float(bounds)
    return share, 1 - share


def _category(name: str, cells: Cells, spec: TableSpec, known: tuple[str, ...], place: str) -> _Reading:
    """A column of categories, one-hot; missing values are a category of their own."""
    texts = [UNKNOWN if text in MISSING else text for text in _text(cells)]
    names = known or _distinct(texts)
    if known and UNKNOWN in set(texts) - set(known):
        names = (*known, UNKNOWN)
    if not known and len(names) > MOST_CATEGORIES:
        raise DataError(
            f"{place} has {len(names)} different values, more than {MOST_CATEGORIES} categories. Drop it with "
            f"{name}:drop in columns (--columns), or, if it is a number, find the cells that are none. Text has to be "
            "tokenised first."
        )
    index = {label: number for number, label in enumerate(names)}
    encoded = torch.zeros(len(texts), len(names))
    encoded[torch.arange(len(texts)), torch.tensor([index[text] for text in texts])] = 1
    return _Reading(Column(name, names), encoded)


_ENCODERS: dict[str, Callable[[str, Cells, TableSpec, tuple[str, ...], str], _Reading]] = {
    "number": _number,
    "category": _category,
}
_KINDS = (*_ENCODERS, "drop")


# --- cells -----------------------------------------------------------------------------------------------------------


def parsed(text: str) -> float | None:
    """The number that a cell spells, NaN for a missing one; None: no number."""
    if text in MISSING:
        return math.nan
    try:
        return None if "_" in text else float(text)  # float("1_000") is 1000
    except ValueError:
        return None


def _numbers(cells: Cells) -> NDArray[np.float64] | None:
    """The column as numbers, NaN where one is missing; None if a cell is no number, or all are missing."""
    if isinstance(cells, np.ndarray):
        return cells
    values: list[float] = []
    for text in cells:
        value = parsed(text)
        if value is None:
            return None
        values.append(value)
    return np.asarray(values) if not all(map(math.isnan, values)) else None


def _text(cells: Cells) -> list[str]:
    """The column as text; whole numbers without a decimal point."""
    if isinstance(cells, list):
        return cells
    return ["" if value != value else str(int(value)) if value % 1 == 0 else str(value) for value in cells.tolist()]


def _distinct(texts: Sequence[str]) -> tuple[str, ...]:
    """The different texts: by value if they are numbers, else in alphabetical order."""
    names = list(Counter(texts))
    values = {name: parsed(name) for name in names}
    if any(value is None or math.isnan(value) for value in values.values()):
        return tuple(sorted(names))
    return tuple(sorted(names, key=lambda name: (values[name], name)))


def _is_missing(cells: Cells) -> NDArray[np.bool_]:
    if isinstance(cells, np.ndarray):
        return np.isnan(cells)
    return np.fromiter((text in MISSING for text in cells), dtype=bool, count=len(cells))


def _rows(cells: Cells, chosen: NDArray[np.bool_]) -> Any:
    if isinstance(cells, np.ndarray):
        return cells[chosen]
    return [text for text, wanted in zip(cells, chosen.tolist(), strict=True) if wanted]
