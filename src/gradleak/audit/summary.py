"""From rows to the lines of the table: rates with their intervals, spreads, baselines and certificates.

Figures come first; the word of a line follows from them by the rules of ruling.py, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any, TypeAlias

import numpy as np

from gradleak.audit.intervals import NAN, Paired, Rate, paired, rate
from gradleak.audit.rows import FORMS, Trained, guarantee_of
from gradleak.audit.ruling import CONVERGED, LEAKS, PART, Ruling, ruling_of
from gradleak.audit.scoring import UNRELATED
from gradleak.core.files import Row
from gradleak.scenario.guarantee import Guarantee
from gradleak.scenario.kinds import KINDS, Image, Kind, Measure

BESIDES = (Measure("lpips", "LPIPS", digits=3, higher=False), Measure("labels", "labels", percent=True))
"""Measures that rows may have besides those of their kind."""
SMALL = 20  # targets; below, tables and texts call the sample small
DETERMINED, OPEN = "determined", "not determined"  # verdicts of a certificate
Name: TypeAlias = tuple[str, str, str, int, int]
"""What tells lines apart: attack, defence, form, round, examples."""


@dataclass(frozen=True)
class Certified:
    """The certificates of one line together, one per target and seed: for how many does the update fix the examples?

    A number is None if no certificate has it.
    """

    count: int
    determined: int
    partly: int  # determined up to some dimensions
    dimensions: int  # the most of those
    share: float | None  # of the examples' variance that these fix, on average
    residual: float | None  # the largest of all that certify something
    smallest: float | None  # singular value of the determined
    relative: float | None  # the same, divided by the largest singular value of its target
    kind: Kind = Image()

    @staticmethod
    def of(rows: Iterable[Row], kind: Kind) -> Certified | None:
        """None if no row has a certificate."""
        certificates = [row["certificate"] for row in rows if row.get("certificate")]
        if not certificates:
            return None
        whole = [each for each in certificates if each["verdict"] == DETERMINED]
        partly = [each for each in certificates if each["verdict"] not in (DETERMINED, OPEN)]
        shares = [each["share"] for each in partly if each["share"] is not None]
        residuals = [each["residual"] for each in (*whole, *partly) if each["residual"] is not None]
        values = [(each["smallest"], each["largest"]) for each in whole if each["smallest"] and each["largest"]]
        return Certified(
            count=len(certificates),
            determined=len(whole),
            partly=len(partly),
            dimensions=max((each["null"] for each in partly), default=0),
            share=fmean(shares) if shares else None,
            residual=max(residuals, default=None),
            smallest=min((small for small, _ in values), default=None),
            relative=min((small / large for small, large in values), default=None),
            kind=kind,
        )

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {"text": str(self), **{name: value for name, value in asdict(self).items() if name != "kind"}}

    def __str__(self) -> str:
        parts = []
        if self.determined:
            parts.append(f"{self.determined} of {self.count} determined: the update fixes every {self.kind.entries}")
        if self.partly:
            fixed = "" if self.share is None else f", {self.share:.0%} of the {self.kind.noun[1]}' variance fixed"
            parts.append(f"{self.partly} of {self.count} determined up to {self.dimensions:,} dimensions{fixed}")
        if rest := self.count - self.determined - self.partly:
            parts.append(f"{rest} of {self.count} not determined: no exact solution was found, or most is left open")
        if self.residual is not None:
            parts.append(f"residual {self.residual:.0e}")
        if self.smallest is not None:
            parts.append(f"smallest singular value {self.smallest:.0e} ({self.relative:.0e} of the largest)")
        return "; ".join(parts)


@dataclass(frozen=True)
class Summary:
    """One line of the table: one attack against one defence in one form, all targets and seeds together."""

    attack: str
    defence: str
    form: str
    round: int
    examples: int
    cells: tuple[str, ...]  # keys, one per seed
    targets: int
    seeds: int
    recovered: Rate
    excess: Rate  # recovered minus the unrelated update's
    identified: Rate  # rank 1 minus the unrelated update's
    rates: dict[str, Rate]  # the thresholds of the kind, such as "psnr>18", and "rank1"
    chance: float  # of rank 1
    means: dict[str, float]  # of the measures of the kind (psnr, ssim, mse), lpips and labels
    medians: dict[str, float]
    worst: dict[str, float]  # of the clearest example: the worst case for a client
    baseline: dict[str, float]  # means of the unrelated update: measures, rank1, recovered; empty without one
    match: float  # median
    converged: float  # share of targets
    diverged: float
    seconds: float
    errors: tuple[str, ...] = ()  # of failed cells
    certified: Certified | None = None  # if the attack says what the update determines
    guarantee: Guarantee | None = None  # what the defence proves; None: there is no defence, or no row says
    trained: Trained | None = None  # the training whose weights were attacked, if there was one
    tail: dict[str, float] = field(default_factory=dict)  # the 95th percentile, towards the private example
    ranks: dict[str, float] = field(default_factory=dict)  # of re-identification: median, and the median by chance
    paired: Paired | None = None  # the first measure against the unrelated update's; None without one
    kind: Kind = Image()  # of x, without its settings

    @cached_property
    def ruling(self) -> Ruling:
        """The word with the rule that produced it (ruling.py)."""
        return ruling_of(self)

    @property
    def word(self) -> str:
        """The verdict for this line alone."""
        return self.ruling.word

    @property
    def optimised(self) -> bool:
        """Did the attack work as an optimiser? Only then does finding nothing mean something."""
        return not self.errors and self.targets > 0 and self.converged >= CONVERGED

    @property
    def strength(self) -> tuple[int, float, float]:
        """Sorts lines by how much they show of the data: by word, then recovered share, then the first measure."""
        recovered, measure = self.recovered.value if self.targets else -1.0, self.kind.headline
        near = measure.sign * self.means.get(measure.name, -measure.sign * math.inf)
        return ({LEAKS: 2, PART: 1}.get(self.word, 0), recovered, near)

    @property
    def small(self) -> bool:
        return self.targets < SMALL

    @property
    def name(self) -> Name:
        return (self.attack, self.defence, self.form, self.round, self.examples)

    def __str__(self) -> str:
        return self.attack if self.form == FORMS[0] else f"{self.attack} ({self.form})"


def name_of(row: Row) -> Name:
    """The line that a row belongs to."""
    return (row["attack"], row["defence"], row["form"], row["round"], row["examples"])


def summaries_of(rows: Iterable[Row]) -> list[Summary]:
    """The lines in the order of the rows. A control that is not part of the grid is not a line."""
    lines: dict[Name, list[Row]] = {}
    for row in rows:
        if not row["control"]:
            lines.setdefault(name_of(row), []).append(row)
    return [_summary(name, of_line) for name, of_line in lines.items()]


def _summary(name: Name, rows: Sequence[Row]) -> Summary:
    done = [row for row in rows if row["status"] == "done"]
    kind = KINDS[rows[0]["kind"]]()
    columns = _columns(done, kind)
    unrelated = [row["baselines"].get(UNRELATED, {}) for row in done]
    names = (*(measure.name for measure in kind.measures if measure.column), "rank1", "recovered")
    baseline = {key: _numbers(each.get(key) for each in unrelated) for key in names}
    attack, defence, form, number, examples = name
    return Summary(
        attack,
        defence,
        form,
        number,
        examples,
        cells=tuple(dict.fromkeys(row["cell"] for row in rows)),
        targets=len({row["target"] for row in done}),
        seeds=len({row["seed"] for row in done}),
        recovered=_rate(done, lambda row: row["hits"]["recovered"]),
        excess=_rate(done, lambda row: _beyond(row, "recovered"), difference=True),
        identified=_rate(done, lambda row: _beyond(row, "rank1"), difference=True),
        rates={
            hit: _rate(done, lambda row, hit=hit: row["hits"][hit])  # type: ignore[misc]
            for hit in (*(threshold.name for threshold in kind.thresholds), "rank1")
        },
        chance=_mean([1 / size for row in done for size in row["gallery_size"]]),
        means={measure.name: fmean(values) for measure, values in columns.items()},
        medians={measure.name: median(values) for measure, values in columns.items()},
        worst={measure.name: (max if measure.higher else min)(values) for measure, values in columns.items()},
        baseline={key: fmean(values) for key, values in baseline.items() if values},
        match=median(_numbers([row["match"]] for row in done) or [NAN]),
        converged=_mean([row["converged"] for row in done]),
        diverged=_mean([row["diverged"] for row in done]),
        seconds=sum(row["seconds"] for row in done),
        errors=tuple(row["error"] for row in rows if row["status"] == "failed"),
        certified=Certified.of(done, kind),
        guarantee=next((guarantee_of(row["guarantee"]) for row in done if row.get("guarantee")), None),
        trained=next((Trained.of(row["trained"]) for row in done if row.get("trained")), None),
        tail={measure.name: _tail(values, not measure.higher) for measure, values in columns.items()},
        ranks=_ranks(done),
        paired=_paired(done, kind.headline),
        kind=kind,
    )


def _columns(rows: Sequence[Row], kind: Kind) -> dict[Measure, list[float]]:
    """Every measure with its values over all examples (of labels: over all targets), if there are any."""
    scores = [{**row["scores"], "labels": [row["labels"].get("multiset_accuracy")]} for row in rows]
    columns = {each: _numbers(values.get(each.name) for values in scores) for each in (*kind.measures, *BESIDES)}
    return {measure: values for measure, values in columns.items() if values}


def _rate(rows: Sequence[Row], take: Callable[[Row], Sequence[Any]], *, difference: bool = False) -> Rate:
    """All seeds and examples of a target stay together, since they are not independent."""
    targets: dict[int, list[float]] = {}
    for row in rows:
        targets.setdefault(row["target"], []).extend(take(row))
    return rate(list(targets.values()), difference=difference)


def _tail(values: Sequence[float], small: bool) -> float:
    """The 95th percentile towards the private example, which averages hide. `small`: smaller values are nearer."""
    return float(np.quantile(values, 0.05 if small else 0.95))


def _ranks(rows: Sequence[Row]) -> dict[str, float]:
    """The median rank of the private example in its gallery, and what the median would be by chance."""
    ranks = _numbers(row["scores"]["rank"] for row in rows)
    sizes = [size for row in rows for size in row["gallery_size"]]
    return {"median": float(median(ranks)), "by chance": (median(sizes) + 1) / 2} if ranks else {}


def _paired(rows: Sequence[Row], measure: Measure) -> Paired | None:
    """Per target: the mean of a measure minus that of the same attack on an unrelated update. Shares in points."""
    scale = measure.sign * (100 if measure.percent else 1)
    targets: dict[int, list[float]] = {}
    for row in rows:
        blind = row["baselines"].get(UNRELATED, {}).get(measure.name) or ()
        pairs = zip(row["scores"][measure.name], blind, strict=False)
        differences = [scale * (value - other) for value, other in pairs if value is not None and other is not None]
        targets.setdefault(row["target"], []).extend(differences)
    means = [fmean(differences) for differences in targets.values() if differences]
    if measure.percent:
        return paired(means, "points", 0)
    return paired(means, measure.unit or measure.label, measure.digits)


def _beyond(row: Row, hit: str) -> list[int]:
    """Per example: hit by the attack, minus hit by the same attack on an unrelated update."""
    blind = row["baselines"].get(UNRELATED, {}).get(hit) or [0] * row["examples"]
    return [int(hits) - int(other or 0) for hits, other in zip(row["hits"][hit], blind, strict=True)]


def _numbers(lists: Iterable[Sequence[Any] | None]) -> list[float]:
    return [value for values in lists for value in values or () if value is not None]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else NAN
