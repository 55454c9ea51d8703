"""Every line of a run with its figures, and the scores of baselines without any gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gradleak.report.grid import Column, Line, Table, Value, interval, number, percent, tone

if TYPE_CHECKING:
    from gradleak.audit.result import Row, Summary

EXPLAINED = {
    "mid-grey": "a grey image",
    "mean image": "the mean of other real images",
    "nearest other": "the nearest of other real images, chosen with the truth",
    "nearest of class": "the nearest of the same class, chosen with the truth",
}


def results(summaries: Sequence[Summary]) -> Table:
    """The table of results: the undefended first, then by recovered share."""
    varied = [name for name in ("round", "examples") if len({getattr(s, name) for s in summaries}) > 1]
    words = {"attack", "defence", "verdict"}
    names = ["attack", "defence", *varied, "verdict", "recovered", "above baseline", "PSNR", "95th", "SSIM", "rank 1"]
    names += ["labels", "converged", "seconds"]
    order = sorted(summaries, key=lambda s: (s.defence != "none", s.defence, s.round, -_sortable(s.recovered.value)))
    return Table(
        "One line per attack, defence and attacker; all targets and seeds together.",
        tuple(Column(name, name not in words) for name in names),
        tuple(_result(summary, varied) for summary in order),
        sortable=True,
    )


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else -1.0


def _result(line: Summary, varied: Sequence[str]) -> Line:
    def score(name: str, digits: int) -> Value:
        return Value(number(line.means.get(name), digits), note=f"clearest {number(line.worst.get(name), digits)}")

    rank, excess = line.rates.get("rank1"), line.excess.value
    name, _, settings = line.attack.partition(":")
    values = (
        Value(name, note=settings),
        Value(line.defence, note=line.form if line.defence != "none" else ""),
        *(Value(str(getattr(line, column))) for column in varied),
        Value("failed" if line.errors and not line.targets else line.word, tone(line.word)),
        Value(percent(line.recovered.value), note=interval(line.recovered)),
        Value(f"{100 * excess:+.0f} %" if math.isfinite(excess) else "-", note=interval(line.excess)),
        score("psnr", 1),
        Value(number(line.tail.get("psnr"), 1)),
        score("ssim", 2),
        Value(percent(rank.value), note=f"chance {number(100 * line.chance)} %") if rank else Value("-"),
        Value(percent(line.means.get("labels"))),
        Value(percent(line.converged)),
        Value(number(line.seconds, 0)),
    )
    return Line(values, hatched=line.word in ("inconclusive", "void") or bool(line.errors))


def baselines(grid: Sequence[Row]) -> Table | None:
    """The mean scores of each baseline; only that of the unrelated update depends on the attack."""
    gathered: dict[str, dict[str, list[float]]] = {}
    for row in grid:
        for baseline, scores in (row.get("baselines") or {}).items():
            if baseline == "unrelated update":
                baseline = f"{baseline}, {row['attack']}"
            for score in ("psnr", "ssim"):
                gathered.setdefault(baseline, {}).setdefault(score, []).extend(_numbers(scores.get(score)))
    if not gathered:
        return None
    rows = [
        Line((Value(name), *(Value(number(_mean(scores["psnr"]), 1)), Value(number(_mean(scores["ssim"]), 2))),
              Value(EXPLAINED.get(name, "the same attack on the update of an unrelated client"))))
        for name, scores in sorted(gathered.items())
    ]  # fmt: skip
    columns = (Column("baseline", False), Column("PSNR"), Column("SSIM"), Column("what it is", False))
    return Table("Mean over all targets.", columns, tuple(rows))


def _numbers(values: Any) -> list[float]:
    values = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
