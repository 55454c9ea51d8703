"""What the layers told: a table of targets for each line of results whose attack makes certificates by spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from gradleak.identify.span_certificate import LayerCertificate, SpanCertificate
from gradleak.report.grid import Column, Line, Table, Value

if TYPE_CHECKING:
    from gradleak.audit.result import Row, Summary

MOST = 32  # targets with a line each; the others are in rows.jsonl
NAMED = 4  # layers of a target that are described
COLUMNS = (
    Column("target", False),
    Column("told apart"),
    Column("proved", False),
    Column("outside, worst"),
    Column("outside, median"),
    Column("inputs solved for", False),
    Column("in words", False),
)


def span_tables(grid: Sequence[Row], summaries: Sequence[Summary]) -> Iterator[Table]:
    """One table per line of results with certificates by spans."""
    for line in summaries:
        rows = [row for row in grid if row["cell"] in line.cells and row.get("spans")]
        if not rows:
            continue
        against = "" if line.defence == "none" else f" against {line.defence}"
        more = f"; {len(rows) - MOST} more targets in rows.jsonl" if len(rows) > MOST else ""
        caption = f"{line}{against}, B = {line.examples}, round {line.round}{more}."
        yield Table(caption, COLUMNS, tuple(map(_line, rows[:MOST])))


def _line(row: Row) -> Line:
    found = SpanCertificate.of(row["spans"])
    outside = [value for value in found.outside if value is not None]
    known = len(outside) == found.apart > 0  # one that is not finite is the worst
    tone = "bad" if found.proved == found.examples else "warn" if found.proved else "void"
    solved = [layer.layer for layer in found.solved]
    cells = (
        Value(str(row.get("observation", row["target"]))),
        Value(f"{found.apart} of {found.examples}"),
        Value(f"{found.proved} of {found.examples}", tone),
        Value(_share(max(outside)) if known else "-"),
        Value(_share(median(outside)) if outside else "-"),
        Value(" to ".join(dict.fromkeys((solved[0], solved[-1]))) if solved else "none", note=_described(found.layers)),
        Value(str(found)),
    )
    return Line(cells)


def _described(layers: Sequence[LayerCertificate]) -> str:
    more = f"; {len(layers) - NAMED} more in rows.jsonl" if len(layers) > NAMED else ""
    return "; ".join(map(_layer, layers[:NAMED])) + more


def _layer(layer: LayerCertificate) -> str:
    rank = "" if layer.rank is None else f"rank {layer.rank}"
    figures = (
        rank and (rank if layer.rows is None else f"{rank} of {layer.rows}"),
        f"unexplained {_share(layer.unexplained)}" if layer.unexplained is not None else "",
        f"next solution {_share(layer.gap)}" if layer.gap is not None else "",
    )
    return f"{layer.layer}: {', '.join(filter(None, figures)) or 'no figures'}"


def _share(value: float) -> str:
    return f"{value:.1e}" if value else "0"
