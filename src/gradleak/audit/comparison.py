"""Two runs side by side: what leaks more, what leaks less, and how sure that is.

Lines are matched by attack, defence, form, round and batch size; differences are second minus first. If both runs
attack the same examples (data, clients and seed of the split are equal), differences are taken target by target, with
Student's t. Otherwise the runs are independent: a difference of shares gets the interval that follows from those of the
two (Newcombe, Statistics in Medicine 17, 1998, method 10, with the intervals of intervals.py); the first measure of the
kind, such as PSNR, gets Welch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

from gradleak.audit.formats import DRAWN, Grid, csv_of
from gradleak.audit.intervals import NAN, Rate
from gradleak.audit.ruling import INCONCLUSIVE, VOID, WORDS
from gradleak.audit.summary import Name, Summary, name_of
from gradleak.core.files import Row
from gradleak.scenario.kinds import Measure

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult

SAME_TARGETS = ("clients", "examples", "seed", "split")  # of the federation: they fix the examples of a target


@dataclass(frozen=True)
class Change:
    """One line of the table in both runs, or in one of them (then the differences are NaN)."""

    first: Summary | None
    second: Summary | None
    recovered: Rate  # difference of the recovered shares
    score: Rate  # difference of the mean of the kind's first measure, such as PSNR in dB

    @property
    def line(self) -> Summary:
        line = self.second or self.first
        assert line is not None  # a pair has at least one side
        return line

    @property
    def both(self) -> bool:
        return self.first is not None and self.second is not None

    @property
    def words(self) -> str:
        """`leaks -> not shown to leak`, or one word if both have it, or which run has the line if only one does."""
        if self.first is None or self.second is None:
            return f"only in the {'second' if self.first is None else 'first'} run: {self.line.word}"
        return self.second.word if not self.changed else f"{self.first.word} -> {self.second.word}"

    @property
    def changed(self) -> bool:
        """Does the word differ, or does only one run have the line?"""
        return self.first is None or self.second is None or self.first.word != self.second.word

    @property
    def worse(self) -> bool:
        """Does the second run leak more: by a worse word, or by a difference whose interval lies above zero?"""
        if self.first is None or self.second is None:
            return False
        return _rank(self.second.word) < _rank(self.first.word) or self.recovered.low > 0

    def __str__(self) -> str:
        line = self.line
        name = f"{line} against {line.defence}, B = {line.examples}, round {line.round}"
        if not self.both:
            return f"{name}: {self.words}."
        measure = line.kind.headline
        change = f"{measure.label} {difference(self.score, measure)}"
        return f"{name}: recovered {points(self.recovered)}, {change}, {self.words}."


@dataclass(frozen=True, eq=False)
class Comparison:
    """What changed from the first run to the second."""

    first: AuditResult
    second: AuditResult

    def __post_init__(self) -> None:
        one, two = (run.kind for run in (self.first, self.second))
        if one.name != two.name:
            raise ValueError(
                f"The first run is of {one.noun[1]} and the second of {two.noun[1]}: compare like with like."
            )

    @cached_property
    def paired(self) -> bool:
        """Do both attack the same examples?"""
        one, two = (_examples(run.settings) for run in (self.first, self.second))
        return one is not None and one == two

    @cached_property
    def changes(self) -> list[Change]:
        """Changed words first, those that leak more before those that leak less; then by the size of the difference."""
        one, two = ({line.name: line for line in run.summaries} for run in (self.first, self.second))
        names = [*one, *(name for name in two if name not in one)]
        before, after = (_by_line(run.rows) for run in (self.first, self.second))
        changes = [
            _change(one.get(name), two.get(name), before.get(name, []), after.get(name, []), self.paired)
            for name in names
        ]
        return sorted(changes, key=_place)

    @property
    def worse(self) -> tuple[str, ...]:
        """Reasons why the second run is worse than the first; empty if it is not shown to be."""
        before, after = self.first.verdict.word, self.second.verdict.word
        reasons = []
        if after == VOID != before:
            reasons.append("The second run is void, so it shows nothing that the first did.")
        elif _rank(after) < _rank(before):
            reasons.append(f"The verdict is worse: {before} -> {after}.")
        return (*reasons, *(f"It leaks more: {change}" for change in self.changes if change.worse))

    @property
    def changed(self) -> tuple[str, ...]:
        """Everything that has another word or is in one run only."""
        before, after = self.first.verdict.word, self.second.verdict.word
        verdict = (f"The verdict changed: {before} -> {after}.",) if before != after else ()
        return (*verdict, *(f"It changed: {change}" for change in self.changes if change.changed))

    def table(self, format: str = "text") -> str:
        """In "text", "markdown" or "latex", with the verdicts above and the method below; in "csv" numbers only."""
        if format == "csv":
            return csv_of([_record(change) for change in self.changes])
        if format not in DRAWN:
            raise ValueError(f"format is {format!r}; there are {', '.join([*DRAWN, 'csv'])}.")
        draw, write = DRAWN[format]
        if not self.changes:
            return write("Neither run has a line.")
        before, after = self.first.verdict.word, self.second.verdict.word
        verdict = f"Verdict: {before}, as before." if before == after else f"Verdict: {before} -> {after}."
        how = "the same examples, target by target" if self.paired else "two sets of examples, as independent"
        below = f"Second run minus first, with 95 % intervals; compared as {how}."
        return "\n\n".join([write(verdict), draw(_entries(self.changes)), write(below)])

    def __str__(self) -> str:
        return self.table()


def _rank(word: str) -> int:
    """Smaller is worse; a void run shows as little as an inconclusive one."""
    return WORDS.index(INCONCLUSIVE if word == VOID else word)


def points(difference: Rate) -> str:
    """A difference of shares in percentage points: `-12 points [-30, +6]`."""
    if math.isnan(difference.value):
        return "-"
    interval = "" if math.isnan(difference.low) else f" [{100 * difference.low:+.0f}, {100 * difference.high:+.0f}]"
    return f"{100 * difference.value:+.0f} points{interval}"


def difference(change: Rate, measure: Measure) -> str:
    """A change of a measure: `-2.1 dB [-3.0, -1.2]`, or in points; one target has no interval."""
    if measure.percent or math.isnan(change.value):
        return points(change)
    digits, unit = measure.digits, f" {measure.unit}" if measure.unit else ""
    interval = "" if math.isnan(change.low) else f" [{change.low:+.{digits}f}, {change.high:+.{digits}f}]"
    return f"{change.value:+.{digits}f}{unit}{interval}"


def _change(
    first: Summary | None, second: Summary | None, one: Sequence[Row], two: Sequence[Row], paired: bool
) -> Change:
    if first is None or second is None or not first.targets or not second.targets:
        return Change(first, second, Rate(NAN, NAN, NAN, 0), Rate(NAN, NAN, NAN, 0))
    hits = [_per_target(rows, lambda row: [float(hit) for hit in row["hits"]["recovered"]]) for rows in (one, two)]
    name = first.kind.headline.name
    scores = [_per_target(rows, lambda row: row["scores"][name]) for rows in (one, two)]
    if paired and hits[0].keys() == hits[1].keys():
        return Change(first, second, _within(hits[0], hits[1], 1.0), _within(scores[0], scores[1]))
    return Change(first, second, _newcombe(first.recovered, second.recovered), _welch(scores[0], scores[1]))


def _within(one: Mapping[int, float], two: Mapping[int, float], most: float = math.inf) -> Rate:
    """The mean difference over targets, with Student's t; a difference cannot be larger than `most`."""
    differences = [two[target] - one[target] for target in one if target in two]
    number, bounded = len(differences), most < math.inf
    if not number:
        return Rate(NAN, NAN, NAN, 0)
    value = fmean(differences)
    if number == 1:
        return Rate(value, -most if bounded else NAN, most if bounded else NAN, 1)
    reach = _student(number - 1) * math.sqrt(variance(differences) / number)
    if bounded and not reach:  # no spread is no certainty: the exact bound, as for shares that all agree
        reach = 1 - 0.025 ** (1 / number)
    return Rate(value, max(-most, value - reach), min(most, value + reach), number)


def _newcombe(one: Rate, two: Rate) -> Rate:
    value = two.value - one.value
    low = value - math.hypot(two.value - two.low, one.high - one.value)
    high = value + math.hypot(two.high - two.value, one.value - one.low)
    return Rate(value, low, high, min(one.count, two.count))


def _welch(one: Mapping[int, float], two: Mapping[int, float]) -> Rate:
    sides = [list(one.values()), list(two.values())]
    if not all(sides):
        return Rate(NAN, NAN, NAN, 0)
    value, number = fmean(sides[1]) - fmean(sides[0]), min(map(len, sides))
    if number < 2:
        return Rate(value, NAN, NAN, number)
    errors = [variance(side) / len(side) for side in sides]
    if not sum(errors):
        return Rate(value, value, value, number)
    free = sum(errors) ** 2 / sum(error**2 / (len(side) - 1) for error, side in zip(errors, sides, strict=True))
    reach = _student(free) * math.sqrt(sum(errors))
    return Rate(value, value - reach, value + reach, number)


def _student(free: float) -> float:
    """The 97.5 % point of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(free, 0.975))


def _per_target(rows: Sequence[Row], take: Any) -> dict[int, float]:
    """The mean over all seeds and examples of a target."""
    targets: dict[int, list[float]] = {}
    for row in rows:
        targets.setdefault(row["target"], []).extend(value for value in take(row) if value is not None)
    return {target: fmean(values) for target, values in targets.items() if values}


def _by_line(rows: Sequence[Row]) -> dict[Name, list[Row]]:
    lines: dict[Name, list[Row]] = {}
    for row in rows:
        if row["status"] == "done" and not row["control"]:
            lines.setdefault(name_of(row), []).append(row)
    return lines


def _examples(settings: Mapping[str, Any]) -> Any:
    """What identifies the attacked examples; None if a run does not say."""
    data, clients = settings.get("fingerprint", {}).get("data"), settings.get("federation", {})
    observed = settings.get("fingerprint", {}).get("observations")
    return None if data is None else (data, observed, *(clients.get(name) for name in SAME_TARGETS))


def _place(change: Change) -> tuple[int, float]:
    """Sorts by worse, otherwise changed, same, in one run only; within each the largest difference first."""
    group = 3 if not change.both else 0 if change.changed and change.worse else 1 if change.changed else 2
    size = change.recovered.value
    return group, 0.0 if math.isnan(size) else -abs(size)


def _entries(changes: Sequence[Change]) -> Grid:
    measure = changes[0].line.kind.headline
    head = ["attack", "defence", "form", "round", "B", "recovered", "change [95 %]", f"{measure.label} change [95 %]"]

    def shares(change: Change) -> str:
        sides = (change.first, change.second)
        return " -> ".join("-" if side is None or not side.targets else f"{side.recovered.value:.0%}" for side in sides)

    return [
        [*head, "verdict"],
        *(
            [
                *map(str, change.line.name),
                shares(change),
                points(change.recovered),
                difference(change.score, measure),
                change.words + (" (leaks more)" if change.worse else ""),
            ]
            for change in changes
        ),
    ]


def _record(change: Change) -> dict[str, Any]:
    """Plain numbers."""
    score = change.line.kind.headline.name
    record: dict[str, Any] = dict(zip(("attack", "defence", "form", "round", "examples"), change.line.name))
    for name, side in (("first", change.first), ("second", change.second)):
        record |= {f"{name} word": side and side.word, f"{name} recovered": side and side.recovered.value}
        record |= {f"{name} {score}": side and side.means.get(score)}
    for name, rate in (("recovered", change.recovered), (score, change.score)):
        record |= {f"{name} change": rate.value, f"{name} change low": rate.low, f"{name} change high": rate.high}
    return {**record, "changed": change.changed, "worse": change.worse}
