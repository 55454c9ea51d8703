"""Every line of a run with its figures, and the scores of baselines without any gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gradleak.report.grid import Column, Line, Table, Value, interval, number, percent, plain, tone
from gradleak.report.words import Words

if TYPE_CHECKING:
    from gradleak.audit.result import Row, Summary
    from gradleak.scenario.kinds import Measure

EXPLAINED = {
    "mid-grey": "a grey image",
    "mean image": "the mean of other real images",
    "mean": "the mean of other real {many}",
    "marginal modes": "the most frequent category and the median number of every column, over other real {many}",
    "most frequent": "the most frequent {entries} of other real {many}",
    "nearest other": "the nearest of other real {many}, chosen with the truth",
    "next-token guess": "each token as the model guesses it from the private tokens before it, which it is told",
    "nearest of class": "the nearest of the same class, chosen with the truth",
}


def results(summaries: Sequence[Summary], words: Words) -> Table:
    """The table of results: the undefended first, then by recovered share."""
    varied = [name for name in ("round", "examples") if len({getattr(s, name) for s in summaries}) > 1]
    texts = {"attack", "defence", "verdict"}
    first, *others = (measure.label for measure in words.measures)
    names = ["attack", "defence", *varied, "verdict", "recovered", "above baseline", first, "95th", *others, "rank 1"]
    names += ["labels", "converged", "seconds"]
    order = sorted(summaries, key=lambda s: (s.defence != "none", s.defence, s.round, -_sortable(s.recovered.value)))
    return Table(
        "One line per attack, defence and attacker; all targets and seeds together.",
        tuple(Column(name, name not in texts) for name in names),
        tuple(_result(summary, varied, words.measures) for summary in order),
        sortable=True,
    )


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else -1.0


def _result(line: Summary, varied: Sequence[str], measures: Sequence[Measure]) -> Line:
    def score(measure: Measure) -> Value:
        clearest = plain(measure, line.worst.get(measure.name))
        return Value(plain(measure, line.means.get(measure.name)), note=f"clearest {clearest}")

    first, *others = measures
    rank, excess = line.rates.get("rank1"), line.excess.value
    name, _, settings = line.attack.partition(":")
    values = (
        Value(name, note=settings),
        Value(line.defence, note=line.form if line.defence != "none" else ""),
        *(Value(str(getattr(line, column))) for column in varied),
        Value("failed" if line.errors and not line.targets else line.word, tone(line.word)),
        Value(percent(line.recovered.value), note=interval(line.recovered)),
        Value(f"{100 * excess:+.0f} %" if math.isfinite(excess) else "-", note=interval(line.excess)),
        score(first),
        Value(plain(first, line.tail.get(first.name))),
        *map(score, others),
        Value(percent(rank.value), note=f"chance {number(100 * line.chance)} %") if rank else Value("-"),
        Value(percent(line.means.get("labels"))),
        Value(percent(line.converged)),
        Value(number(line.seconds, 0)),
    )
    return Line(values, hatched=line.word in ("inconclusive", "void") or bool(line.errors))


def baselines(grid: Sequence[Row], words: Words) -> Table | None:
    """The mean scores of each baseline; only that of the unrelated update depends on the attack."""
    gathered: dict[str, dict[str, list[float]]] = {}
    for row in grid:
        for baseline, scores in (row.get("baselines") or {}).items():
            if baseline == "unrelated update":
                baseline = f"{baseline}, {row['attack']}"
            for score in (measure.name for measure in words.measures):
                gathered.setdefault(baseline, {}).setdefault(score, []).extend(_numbers(scores.get(score)))
    if not gathered:
        return None
    rows = []
    for name, scores in sorted(gathered.items()):
        means = (Value(plain(measure, _mean(scores[measure.name]))) for measure in words.measures)
        explained = EXPLAINED.get(name, "the same attack on the update of an unrelated client")
        rows.append(Line((Value(name), *means, Value(explained.format(many=words.many, entries=words.entries)))))
    labels = (Column(measure.label) for measure in words.measures)
    columns = (Column("baseline", False), *labels, Column("what it is", False))
    return Table("Mean over all targets.", columns, tuple(rows))


def _numbers(values: Any) -> list[float]:
    values = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
