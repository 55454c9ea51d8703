"""From rows to words: rates with intervals, one summary per line of the table, and the verdict.

Rule. An image is `recovered` when SSIM > 0.5, PSNR > 18 and it is re-identified at rank 1 in a gallery of other real
images. Shares have 95 % intervals by bootstrap over targets (all seeds and examples of a target stay together), and the
share that the same attack reaches on an unrelated update is taken off. Per line of the table:

leaks               at least half of the images are recovered, and the interval of the excess lies above zero
leaks in part       some image is recovered, or re-identification exceeds the unrelated update's, interval above zero
not shown to leak   neither, and the attack converged on at least 80 % of the targets
inconclusive        neither, but the attack diverged, did not converge or failed, or the cell was not run

A defence gets the word of its strongest line, whatever the attacker knew. "Not shown to leak" also asks that every
attack converged in its most informed form. A run whose positive control failed is void. With a defence in the audit, the
headline is the worst defended word, and the undefended lines are its reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from gradleak.rows import FORMS, Row
from gradleak.scoring import UNRELATED

LEAKS, PART, NOT_SHOWN, INCONCLUSIVE, VOID = "leaks", "leaks in part", "not shown to leak", "inconclusive", "void"
# From the worst to the best: an inconclusive line is worse than one that shows nothing, since it may yet leak.
WORDS = (LEAKS, PART, INCONCLUSIVE, NOT_SHOWN)
CONVERGED = 0.8  # share of targets on which an attack must have converged before its failure means anything
SMALL = 20  # targets; below, the text says that the sample is small
CONTROL_PSNR = 18.0
RESAMPLES = 2000


class Rate(NamedTuple):
    """A share or mean with its 95 % interval by bootstrap over targets, and the number of targets."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.0%} [{self.low:.0%}, {self.high:.0%}]"


def rate(targets: Sequence[Sequence[float]]) -> Rate:
    """The mean over everything, with a percentile interval by resampling whole targets; deterministic.

    Where all targets agree on 0, 1 or -1, resampling would claim certainty. Then the exact (Clopper-Pearson) bound for
    that many equal results is used: none of n still allows 1 - 0.025^(1/n).
    """
    if not targets:
        return Rate(float("nan"), float("nan"), float("nan"), 0)
    sums = np.array([sum(values) for values in targets], dtype=float)
    counts = np.array([len(values) for values in targets], dtype=float)
    value, number = float(sums.sum() / counts.sum()), len(targets)
    if bool((sums == value * counts).all()) and value in (-1.0, 0.0, 1.0):
        slack = 1 - 0.025 ** (1 / number)
        return Rate(value, max(-1.0, value - slack) if value else 0.0, min(1.0, value + slack) if value < 1 else 1.0, number)
    rows = np.random.default_rng(0).integers(number, size=(RESAMPLES, number))
    means = sums[rows].sum(1) / counts[rows].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Rate(value, float(low), float(high), number)


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
    rates: dict[str, Rate]  # "ssim>0.5", "psnr>18", "psnr>20", "rank1"
    chance: float  # of rank 1
    means: dict[str, float]  # of psnr, ssim, mse, lpips, labels
    medians: dict[str, float]
    worst: dict[str, float]  # of the best recovered image: the worst case for a client
    baseline: dict[str, float]  # of the unrelated update: psnr, ssim, rank1, recovered, as means
    match: float  # median
    converged: float  # share of targets
    diverged: float
    seconds: float
    errors: tuple[str, ...] = ()  # of failed cells

    @property
    def word(self) -> str:
        """The rule of this module for one line."""
        if self.recovered.value >= 0.5 and self.excess.low > 0:
            return LEAKS
        if self.recovered.value > 0 or self.identified.low > 0:
            return PART
        return NOT_SHOWN if self.optimised else INCONCLUSIVE

    @property
    def optimised(self) -> bool:
        """Did the attack work as an optimiser, so that its failure would mean something?"""
        return not self.errors and self.targets > 0 and self.converged >= CONVERGED

    @property
    def small(self) -> bool:
        return self.targets < SMALL

    def __str__(self) -> str:
        return self.attack if self.form == "undefended" else f"{self.attack} ({self.form})"


def summaries_of(rows: Iterable[Row]) -> list[Summary]:
    """One per attack, defence, form, round and batch size, in the order of the rows; the extra control is not a line."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if not row["control"]:
            name = tuple(row[key] for key in ("attack", "defence", "form", "round", "examples"))
            lines.setdefault(name, []).append(row)
    return [_summary(name, held) for name, held in lines.items()]


def _summary(name: tuple[Any, ...], rows: list[Row]) -> Summary:
    done = [row for row in rows if row["status"] == "done"]
    targets: dict[int, list[Row]] = {}
    for row in done:
        targets.setdefault(row["target"], []).append(row)

    def over_targets(take: Any) -> Rate:
        return rate([[value for row in held for value in take(row)] for held in targets.values()])

    def excess(hit: str) -> Rate:
        return over_targets(lambda row: [a - b for a, b in zip(row["hits"][hit], _unrelated(row, hit), strict=True)])

    columns = {
        key: [value for row in done for value in row["scores"].get(key, []) if value is not None]
        for key in ("psnr", "ssim", "mse", "lpips")
    }
    columns["labels"] = [v for row in done if (v := row["labels"].get("multiset_accuracy")) is not None]
    columns = {key: values for key, values in columns.items() if values}
    worse = {"psnr": max, "ssim": max, "labels": max, "mse": min, "lpips": min}
    without = {
        key: [value for row in done for value in _unrelated(row, key) if value is not None]
        for key in ("psnr", "ssim", "rank1", "recovered")
    }
    return Summary(
        *name,
        cells=tuple(dict.fromkeys(row["cell"] for row in rows)),
        targets=len(targets),
        seeds=len({row["seed"] for row in rows}),
        recovered=over_targets(lambda row: row["hits"]["recovered"]),
        excess=excess("recovered"),
        identified=excess("rank1"),
        rates={key: over_targets(lambda row, key=key: row["hits"][key]) for key in ("ssim>0.5", "psnr>18", "psnr>20", "rank1")},
        chance=_mean([1 / size for row in done for size in row["gallery_size"]]),
        means={key: fmean(values) for key, values in columns.items()},
        medians={key: median(values) for key, values in columns.items()},
        worst={key: worse[key](values) for key, values in columns.items()},
        baseline={key: _mean(values) for key, values in without.items()},
        match=median([row["match"] for row in done if row["match"] is not None] or [float("nan")]),
        converged=_mean([row["converged"] for row in done]),
        diverged=_mean([row["diverged"] for row in done]),
        seconds=sum(row["seconds"] for row in done),
        errors=tuple(row["error"] for row in rows if row["status"] == "failed"),
    )


def _unrelated(row: Row, key: str) -> list[Any]:
    held: list[Any] = row["baselines"].get(UNRELATED, {}).get(key, [0] * row["examples"])
    return held


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


def informed(lines: Iterable[Summary]) -> list[Summary]:
    """Of every attack, round and batch size, the line whose attacker knew most."""
    best: dict[tuple[Any, ...], Summary] = {}
    for line in sorted(lines, key=lambda line: FORMS.index(line.form)):
        best[line.attack, line.round, line.examples] = line
    return list(best.values())


@dataclass(frozen=True)
class Verdict:
    """`word` is one of WORDS or "void"; `rule` says how it is reached, whatever it is."""

    word: str
    paragraph: str
    rule: str = (__doc__ or "").split("Rule. ", 1)[-1].strip()

    def __str__(self) -> str:
        return f"{self.word.upper()}. {self.paragraph}"


@dataclass(frozen=True)
class Control:
    """The positive control: undefended, one example, the first attack. If it fails, the run shows nothing."""

    passed: bool
    psnr: float  # median over its targets; NaN where there are none
    text: str
    cell: str


def control_of(rows: Sequence[Row], cell: str) -> Control:
    own = [row for row in rows if row["cell"] == cell]
    values = [value for row in own if row["status"] == "done" for value in row["scores"]["psnr"] if value is not None]
    middle = median(values) if values else float("nan")
    passed = middle >= CONTROL_PSNR
    failed = next((row["error"] for row in own if row["status"] == "failed"), "it was not run")
    attack = own[0]["attack"] if own else "the first attack"
    setting = f"{attack} on one undefended example per update"
    if passed:
        text = f"Positive control passed: {setting} reaches a median PSNR of {middle:.1f} dB ({CONTROL_PSNR:.0f} needed)."
    elif values:
        text = (
            f"Positive control failed: {setting} reaches a median PSNR of {middle:.1f} dB only ({CONTROL_PSNR:.0f} needed), "
            "so this run says nothing about any defence. Give the first attack more steps or restarts, or put one first "
            "that works on this model."
        )
    else:
        text = f"Positive control failed: {setting} gave no result ({failed})."
    return Control(passed, middle, text, cell)


def verdict_on(lines: Sequence[Summary], planned: int) -> Verdict:
    """The word for one defence from its lines; `planned` cells were to be run in all."""
    missing = planned - sum(len(line.cells) for line in lines)
    strongest = min(lines, key=_strength) if lines else None
    if strongest is not None and strongest.word in (LEAKS, PART):
        return Verdict(strongest.word, _leak(strongest))
    idle = [line for line in informed(lines) if not line.optimised]
    if missing or idle or not lines:
        return Verdict(INCONCLUSIVE, _inconclusive(idle, missing))
    shares = max(line.recovered.high for line in lines)
    most = max(lines, key=lambda line: line.means.get("psnr", float("-inf")))
    return Verdict(
        NOT_SHOWN,
        f"{len({line.attack for line in lines})} attack(s), each as informed as it can be, recovered none of the images of "
        f"{most.targets} targets (nearest: {most}, PSNR {most.means['psnr']:.1f} dB on average, {most.worst['psnr']:.1f} at "
        f"worst). A share of up to {shares:.0%} is not excluded by so many targets, and stronger attacks may exist."
        + _sample(most),
    )


def _strength(line: Summary) -> tuple[float, ...]:
    """Smaller is more leakage: the word, then the share recovered beyond the baseline, then the picture."""
    excess = line.excess.value if line.targets else -1.0
    return (WORDS.index(line.word), -excess, -line.means.get("psnr", float("-inf")))


def _leak(line: Summary) -> str:
    images = round(line.recovered.value * line.targets * line.seeds * line.examples)
    total = line.targets * line.seeds * line.examples
    text = (
        f"{line} recovered {images} of {total} images ({line.recovered.value:.0%}, 95 % interval {line.recovered.low:.0%} to "
        f"{line.recovered.high:.0%}; {line.baseline['recovered']:.0%} from an unrelated update), PSNR {line.medians['psnr']:.1f} "
        f"dB in the median and {line.worst['psnr']:.1f} dB for the clearest image."
    )
    if not images:
        text += f" Reconstructions still pick out their image at rank 1 in {line.rates['rank1'].value:.0%} (chance {line.chance:.1%})."
    if "labels" in line.means:
        text += f" Labels: {line.means['labels']:.0%} right."
    return text + _sample(line)


def _sample(line: Summary) -> str:
    return f" Small sample: {line.targets} targets." if line.small else ""


def _inconclusive(idle: Sequence[Summary], missing: int) -> str:
    reasons = [
        f"{line} failed ({line.errors[0]})" if line.errors else f"{line} converged on {line.converged:.0%} of the targets only"
        for line in idle
    ]
    if missing:
        reasons.append(f"{missing} cell(s) were not run")
    return f"No image was recovered, but that shows nothing: {'; '.join(reasons)}. More steps or restarts may change it."


def overall(verdicts: dict[str, Verdict], control: Control) -> Verdict:
    """The headline: void without a working control, else the worst word among the defended, or of the undefended."""
    told = " ".join(f"{name if name != 'none' else 'Undefended'}: {v.word}. {v.paragraph}" for name, v in verdicts.items())
    if not control.passed:
        return Verdict(VOID, control.text)
    defended = [verdict for name, verdict in verdicts.items() if name != "none"] or list(verdicts.values())
    worst = min(defended, key=lambda verdict: WORDS.index(verdict.word))
    return Verdict(worst.word, f"{told} {control.text}")
