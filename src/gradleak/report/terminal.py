"""The table of a result as wide as the terminal: columns that say least are left out first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradleak.results import AuditResult

DISPENSABLE = (
    *("seconds", "match", "round", "B", "baseline", "labels", "SSIM", "converged"),
    *("rank 1 (chance)", "targets", "form"),
)


def fitted(result: AuditResult, width: int | None) -> str:
    """The whole table, or, where it is wider than `width`, what fits of it, with a line that says so. None: a pipe."""
    from gradleak.results.tables import entries

    rows = entries(result.summaries)
    left_out: list[str] = []
    for name in DISPENSABLE:
        if width is None or _width(rows) <= width:
            break
        column = rows[0].index(name)
        rows = [[*row[:column], *row[column + 1 :]] for row in rows]
        left_out.append(name)
    if not left_out:
        return result.table()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(entry.ljust(wide) for entry, wide in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * wide for wide in widths))
    return "\n".join([*lines, f"({len(left_out)} more columns in a wider terminal, in a pipe and in the report)"])


def _width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2
