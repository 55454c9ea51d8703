"""Tables of the report, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradleak.audit.result import Rate
    from gradleak.scenario.kinds import Measure

TONES = {"leaks": "bad", "leaks in part": "warn", "not shown to leak": "good", "inconclusive": "void", "void": "void"}


@dataclass(frozen=True)
class Value:
    """One table cell. With a tone it is drawn as a tag; a note is in small print below it."""

    text: str
    tone: str = ""
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A heading. `number`: its values are aligned and sorted as numbers."""

    name: str
    number: bool = True


@dataclass(frozen=True)
class Line:
    """A row of a table; `hatched`: it is drawn as void."""

    cells: tuple[Value, ...]
    hatched: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its caption. `sortable`: readers with scripts can sort its rows by any column."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Line, ...]
    sortable: bool = False


def tone(word: str) -> str:
    """The colour class of a verdict."""
    return TONES.get(word, "void")


def number(value: float | None, digits: int = 1) -> str:
    """A number with `digits` digits; a dash if there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a whole percentage; a dash if there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.0f}\N{NO-BREAK SPACE}%"


def plain(measure: Measure, value: float | None) -> str:
    """A score without its unit: 31.4, or 96 %."""
    return percent(value) if measure.percent else number(value, measure.digits)


def level(measure: Measure, value: float | None) -> str:
    """A score with its unit: 31.4 dB, or 96 %."""
    return f"{plain(measure, value)}{f' {measure.unit}' if measure.unit else ''}"


def labelled(measure: Measure, value: float | None) -> str:
    """A score that says what it is of: by its unit (31.4 dB), else by its label (96 % columns right)."""
    return level(measure, value) if measure.unit else f"{plain(measure, value)} {measure.label}"


def stated(measure: Measure, value: float | None) -> str:
    """A score with its label: PSNR 31.4 dB, or 96 % columns right."""
    text = level(measure, value)
    return f"{text} {measure.label}" if measure.percent else f"{measure.label} {text}"


def interval(rate: Rate) -> str:
    """The bounds of a rate in per cent; empty if there are none."""
    return f"[{100 * rate.low:.0f}, {100 * rate.high:.0f}]" if math.isfinite(rate.low) else ""


def plural(count: int, word: str) -> str:
    """A count with its noun."""
    return f"{count} {word}{'' if count == 1 else 's'}"
