"""Do two curves over rounds move together, and is there more to it than training? Rank correlations with intervals.

While a network trains nearly everything falls: loss, gradient norm, curvature, and the quality of reconstructions. Two
falling curves have a rank correlation near one whatever the reason, so Spearman's correlation alone is no evidence that
curvature protects. The partial correlation asks what remains once gradient norm and round are known.

What is resampled, since rounds of one training are not independent:
    several runs (runs, rounds)   each run has its own coefficient, and whole runs are resampled: only these are
                                  independent, and differences between runs do not pass for movement over rounds
    one run (rounds,)             moving blocks of consecutive rounds (Kuensch, Annals of Statistics 17, 1989), by
                                  default ceil(n^(1/3)) long, the order of Hall, Horowitz and Jing (Biometrika 82,
                                  1995). Blocks preserve short correlations; a trend is longer than any block, so the
                                  interval then says how much the figure depends on the recorded rounds, not how
                                  another training would turn out
Intervals are percentiles at 95 %; the seed fixes them. With few runs or targets they are too narrow.

`gradleak.curvature` itself does not import this module, which needs results and metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradleak.audit.intervals import RESAMPLES
from gradleak.audit.summary import SMALL
from gradleak.curvature.gradcam import rank_correlation

Series: TypeAlias = "Sequence[float] | Sequence[Sequence[float]] | np.ndarray[Any, Any] | Tensor"
LEFT = 1e-8  # of a curve's variance in ranks: if the controls leave less, it is rounding
FEWEST = 4  # values: three can be ordered in six ways only


class NoAssociation(ValueError):
    """The curves leave nothing to correlate: one is constant, too short, or fixed by the controls."""


@dataclass(frozen=True)
class IntervalEstimate:
    """A figure with its 95 % interval.

    statistic   its name
    count       number of independent units that were resampled: runs, targets, or rounds of a single run
    unit        their name; for one run also the length of the blocks
    undefined   share of resamples without a value (a constant curve); the interval does not count them
    """

    statistic: str
    value: float
    low: float
    high: float
    count: int
    unit: str
    undefined: float = 0.0

    @property
    def small(self) -> bool:
        """Are there few units, by the rule of an audit's tables?"""
        return self.count < SMALL

    @property
    def degenerate(self) -> bool:
        """Do all resamples agree? That is no certainty: a perfect order stays perfect in every resample."""
        return self.low == self.high

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "small": self.small, "degenerate": self.degenerate}

    def __str__(self) -> str:
        text = f"{self.statistic} {self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}], {self.count} {self.unit}"
        text += ", a small sample" if self.small else ""
        return text + (", without any spread among resamples" if self.degenerate else "")


def spearman(
    first: Series, second: Series, *, block: int | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> IntervalEstimate:
    """Spearman's correlation of two curves, (rounds,) or (runs, rounds); ties share their mean rank.

    `block`: rounds in a block, for one run; 1 takes rounds as independent. Of several runs it is the mean of each run's
    own correlation.
    """
    return _estimate("Spearman correlation", [first, second], block, resamples, seed)


def partial_spearman(
    first: Series,
    second: Series,
    controls: Sequence[Series],
    *,
    block: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> IntervalEstimate:
    """The partial correlation of the ranks: the correlation that remains once the controls are known.

    Ranks of each curve minus their best linear prediction from the ranks of the controls, correlated. Pass at least
    gradient norm and round.
    """
    if not controls:
        raise ValueError("Pass at least one curve to control for, or use `spearman`, which has no controls.")
    return _estimate("partial Spearman correlation", [first, second, *controls], block, resamples, seed)


def paired_difference(first: Series, second: Series, *, resamples: int = RESAMPLES, seed: int = 0) -> IntervalEstimate:
    """Mean of first minus second over the same targets, (targets,) or (targets, repeats), with whole targets resampled.

    As in an audit, seeds and examples of one target stay together: they are not independent.
    """
    pair = _curves([first, second])
    gaps = (pair[0] - pair[1]).mean(1) if np.ndim(first) == 2 else (pair[0] - pair[1])[0]
    if len(gaps) < 2:
        raise ValueError(f"One target has no interval: pass two or more; given {len(gaps)}.")
    low, high = _quantiles(gaps[_drawn(len(gaps), 1, resamples, seed)].mean(1))
    return IntervalEstimate("mean difference", float(gaps.mean()), low, high, len(gaps), "targets")


@dataclass(frozen=True)
class Association:
    """One curve against the outcome, plain and given the controls. None: not defined; `reason` says why."""

    plain: IntervalEstimate | None
    partial: IntervalEstimate | None
    reason: str = ""

    def record(self) -> dict[str, Any]:
        both = {"plain": self.plain, "partial": self.partial}
        return {**{name: value and value.record() for name, value in both.items()}, "reason": self.reason}


def associations(
    curves: Mapping[str, Series],
    outcome: str = "psnr",
    controls: Sequence[str] = ("gradient_norm", "round"),
    *,
    block: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Association]:
    """Every other curve of a study against `outcome`: log det, lambda_max, trace, loss and the like.

    Each control is correlated with the outcome too, given the other controls.
    """
    if missing := [name for name in (outcome, *controls) if name not in curves]:
        raise ValueError(f"There is no curve {', '.join(missing)}; there are {', '.join(curves)}.")
    settings: dict[str, Any] = {"block": block, "resamples": resamples, "seed": seed}

    def against(name: str) -> Association:
        others = [curves[other] for other in controls if other not in (name, outcome)]
        reasons: list[str] = []

        def tried(compute: Callable[[], IntervalEstimate]) -> IntervalEstimate | None:
            try:
                return compute()
            except NoAssociation as problem:
                reasons.append(str(problem))
                return None

        plain = tried(lambda: spearman(curves[name], curves[outcome], **settings))
        partial = (
            tried(lambda: partial_spearman(curves[name], curves[outcome], others, **settings))
            if others and plain is not None
            else None
        )
        return Association(plain, partial, " ".join(reasons))

    return {name: against(name) for name in curves if name != outcome}


# --- helpers ----------------------------------------------------------------------------------------------------------


def _estimate(
    statistic: str, series: Sequence[Series], block: int | None, resamples: int, seed: int
) -> IntervalEstimate:
    curves = _curves(series)  # (curves, runs, rounds)
    _, runs, rounds = curves.shape
    if rounds < (fewest := max(FEWEST, len(curves) + 2)):
        raise NoAssociation(f"{len(curves)} curves need at least {fewest} rounds to be correlated; given {rounds}.")
    for position, curve in enumerate(curves):
        if bool((curve == curve[:, :1]).all(1).any()):
            raise NoAssociation(f"Curve {position + 1} is constant (in a run): it has no order to correlate.")
    coefficients = _coefficients(curves)  # (runs,)
    if bool(coefficients.isnan().any()):
        raise NoAssociation(
            "The controls fix the order of one of the two curves (as where both only fall with the round), so nothing "
            "is left to correlate. Take away a control, or record rounds in which they part."
        )
    value = float(coefficients.mean())
    if runs > 1:
        if block is not None:
            raise ValueError(f"block is for a single run; with {runs} runs, whole runs are resampled. Leave block out.")
        low, high = _quantiles(coefficients[_drawn(runs, 1, resamples, seed)].mean(1))
        return IntervalEstimate(statistic, value, low, high, runs, f"runs of {rounds} rounds")
    length = math.ceil(rounds ** (1 / 3)) if block is None else block
    if not 1 <= length <= rounds // 2:
        raise ValueError(f"block must be from 1 to half of the {rounds} rounds; given {length}.")
    redrawn = _coefficients(curves[:, 0][:, _drawn(rounds, length, resamples, seed)])  # (resamples,)
    valid = redrawn[~redrawn.isnan()]
    if len(valid) < resamples / 2:
        raise NoAssociation(
            f"Only {len(valid)} of {resamples} resamples have a correlation, the curves being constant or fixed by the "
            "controls in the others: there is no interval. Record more rounds."
        )
    low, high = _quantiles(valid)
    unit = "rounds" if length == 1 else f"rounds in blocks of {length}"
    return IntervalEstimate(statistic, value, low, high, rounds, unit, undefined=1 - len(valid) / resamples)


def _curves(series: Sequence[Series]) -> Tensor:
    """(curves, runs, n) float64; one run where they have one axis."""
    tensors = [torch.as_tensor(np.asarray(one, dtype=np.float64)) for one in series]
    shapes = {tuple(one.shape) for one in tensors}
    if len(shapes) > 1 or tensors[0].dim() not in (1, 2) or not tensors[0].numel():
        listed = ", ".join(str(tuple(one.shape)) for one in tensors)
        raise ValueError(f"All curves must have the same shape, (n,) or (runs, n), with n at least 1; given {listed}.")
    curves = torch.stack(tensors)
    if not bool(curves.isfinite().all()):
        raise ValueError("A curve holds values that are not finite: leave those rounds out of all of them.")
    return curves if curves.dim() == 3 else curves[:, None]


def _coefficients(curves: Tensor) -> Tensor:
    """(curves, k, n) -> (k,): the correlation of the first two in ranks, given the rest; not a number if undefined."""
    count, rows, _ = curves.shape
    matrix = torch.eye(count, dtype=torch.float64).repeat(rows, 1, 1)
    for i in range(count):
        for j in range(i):
            matrix[:, i, j] = matrix[:, j, i] = rank_correlation(curves[i], curves[j])
    if count == 2:
        return matrix[:, 0, 1]
    coefficients = torch.full((rows,), torch.nan, dtype=torch.float64)
    defined = matrix.isfinite().all(2).all(1)
    whole = matrix[defined]
    # The controls explain C_2c C_cc^-1 C_c2 of the two; a pseudo-inverse, since controls may say the same thing.
    across = whole[:, :2, 2:]
    rest = whole[:, :2, :2] - across @ torch.linalg.pinv(whole[:, 2:, 2:], rtol=LEFT, hermitian=True) @ across.mT
    variances = rest.diagonal(dim1=1, dim2=2)
    partial = rest[:, 0, 1] / variances.clamp_min(LEFT).prod(1).sqrt()
    coefficients[defined] = torch.where((variances > LEFT).all(1), partial.clamp(-1.0, 1.0), torch.nan)
    return coefficients


def _drawn(count: int, length: int, resamples: int, seed: int) -> Tensor:
    """(resamples, count) positions: blocks of `length` in a row that begin anywhere, cut to `count`."""
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1; given {resamples}.")
    blocks = -(-count // length)
    begins = np.random.default_rng(seed).integers(count - length + 1, size=(resamples, blocks, 1))
    return torch.from_numpy((begins + np.arange(length)).reshape(resamples, -1)[:, :count].copy())


def _quantiles(values: Tensor) -> tuple[float, float]:
    low, high = np.quantile(values.numpy(), [0.025, 0.975])
    return float(low), float(high)
