"""The tables of a result as wide as the terminal: columns that say least are left out first."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradleak.results import AuditResult
    from gradleak.results.tables import Grid

DISPENSABLE = (
    *("seconds", "match", "round", "B", "baseline", "labels", "SSIM", "converged"),
    *("rank 1 (chance)", "targets", "form"),
)


def fitted(result: AuditResult, width: int | None) -> str:
    """All that `table` says, or, where that is wider than `width`, what fits of it, and a line that says so.

    None: a pipe.
    """
    from gradleak.results.tables import OVERVIEW, entries, notes, overview, text_of

    if width is None:
        return result.table()
    rows, left_out = _narrowed(entries(result.summaries), width)
    parts = [text_of(rows)]
    if left_out:
        parts[0] += f"\n({left_out} more columns in a wider terminal, in a pipe and in the report)"
    if per_defence := overview(result.summaries):
        table = text_of(per_defence) if _width(per_defence) <= width else _listed(per_defence, width)
        parts += [table, fill(OVERVIEW, width)]
    return "\n\n".join([*parts, *notes(result.summaries)])


def _narrowed(rows: Grid, width: int) -> tuple[Grid, int]:
    """Without as many of the dispensable columns as it takes, and their number."""
    left_out = 0
    for name in DISPENSABLE:
        if _width(rows) <= width:
            break
        column = rows[0].index(name)
        rows = [[*row[:column], *row[column + 1 :]] for row in rows]
        left_out += 1
    return rows, left_out


def _listed(rows: Grid, width: int) -> str:
    """A paragraph for each line, where no column may be left out."""
    head, *lines = rows
    told = (f"{line[0]}: " + "; ".join(map("{} {}".format, head[1:], line[1:])) for line in lines)
    return "\n".join(fill(paragraph, width, subsequent_indent="    ") for paragraph in told)


def _width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2
