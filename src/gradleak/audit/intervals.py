"""Intervals and tests over targets: what a few clients allow us to say of all.

A target with its seeds and examples is one draw: results of the same client are not independent, so whole targets are
resampled or counted, never single images. The random numbers are fixed, so every figure repeats.

share         Jeffreys' interval, Beta(k + 1/2, n - k + 1/2) (Brown, Cai and DasGupta, Statistical Science 16, 2001),
              with n the number of independent results that the spread between targets amounts to, p (1 - p) / variance
              of p, less a little if that variance is estimated, and k = p n (Korn and Graubard, Survey Methodology
              24, 1998). If all agree on 0 or 1, the exact bound (Clopper and Pearson, Biometrika 26, 1934): 0 of n
              still allows 1 - 0.025^(1/n)
difference    Student's t over targets
paired        sign-flip test of paired differences: under no effect each target's difference is as likely negative

Why no percentile bootstrap: with 60 targets and a true rate of 0.3 its 95 % interval of a share covers the rate in
92.4 % of cases (Wilson's in 97.0 % at 0.1 and 50 targets). Jeffreys' stays between 93.5 % and 95.7 % from 0.1 to 0.9
for 50, 60, 80, 100 and 200 targets, by exact sums over the binomial. For differences BCa (Efron, JASA 82, 1987) fell
to 92.1 % in a trial. `benchmarks/interval_coverage.py` measures this code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

RESAMPLES = 2000  # for intervals without such a formula (curvature/association.py)
NORMAL = 1.959963984540054  # the 97.5 % point
FLIPS = 10_000  # random signs, if there are too many to try all
EXACT = 14  # targets up to which all signs are tried
NAN = float("nan")


@dataclass(frozen=True)
class Rate:
    """A share or mean with its 95 % interval over targets (see `rate`), and the number of targets."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.0%} [{self.low:.0%}, {self.high:.0%}]"

    def record(self) -> dict[str, Any]:
        return asdict(self)


def rate(targets: Sequence[Sequence[float]], *, difference: bool = False) -> Rate:
    """The mean over all values in [-1, 1]: a share if all lie in [0, 1], else a difference.

    `difference`: the true value may lie below zero even if no value here does. If all targets agree there is no spread;
    the interval then reaches `slack` to both sides, the share of targets that may still differ.
    """
    if not targets:
        return Rate(NAN, NAN, NAN, 0)
    sums = np.array([sum(values) for values in targets], dtype=float)
    counts = np.array([len(values) for values in targets], dtype=float)
    value, number = float(sums.sum() / counts.sum()), len(targets)
    signed = difference or min(map(min, targets)) < 0
    whole = value in (-1.0, 0.0, 1.0)
    if bool(np.isclose(sums, value * counts, rtol=0, atol=1e-12).all()) and (whole or min(map(min, targets)) < 0):
        slack = 1 - 0.025 ** (1 / number)
        return Rate(value, max(-1.0 if signed else 0.0, value - slack), min(1.0, value + slack), number)
    low, high = _share(sums, counts) if min(map(min, targets)) >= 0 else _difference(sums, counts)
    return Rate(value, low, high, number)


def _share(sums: Any, counts: Any) -> tuple[float, float]:
    """Jeffreys' interval with the effective number of results."""
    from scipy.special import betaincinv, stdtrit

    value, variance = sums.sum() / counts.sum(), _variance(sums, counts)
    results = float(counts.sum()) if variance == 0 else min(float(counts.sum()), value * (1 - value) / variance)
    if bool(((sums > 0) & (sums < counts)).any()):  # a variance that is not a function of the share alone is estimated
        number = len(sums)
        results *= (NORMAL / float(stdtrit(max(1, number - 1), 0.975))) ** 2 * max(1, number - 1) / number
    hits = value * results
    low, high = (float(betaincinv(hits + 0.5, results - hits + 0.5, level)) for level in (0.025, 0.975))
    return low, high


def _difference(sums: Any, counts: Any) -> tuple[float, float]:
    """Student's t over targets, within what a difference of shares can be."""
    from scipy.special import stdtrit

    value, number = float(sums.sum() / counts.sum()), len(sums)
    if number == 1:
        return -1.0, 1.0
    error = math.sqrt(_variance(sums, counts) * number / (number - 1))
    reach = float(stdtrit(number - 1, 0.975)) * error
    return max(-1.0, value - reach), min(1.0, value + reach)


def _variance(sums: Any, counts: Any) -> float:
    """Of the mean over everything, from the spread between targets."""
    value = sums.sum() / counts.sum()
    return float(((counts / counts.sum() * (sums / counts - value)) ** 2).sum())


@dataclass(frozen=True)
class Paired:
    """A paired test over targets. `p`: one-sided, for a mean difference above zero; `least`: the smallest it can be."""

    difference: float
    p: float
    least: float
    count: int
    unit: str = "dB"
    digits: int = 1

    def __str__(self) -> str:
        change = f"{self.difference:+.{self.digits}f} {self.unit}"
        text = f"{change} against an unrelated update (p = {self.p:.2g}, sign flips, "
        few = f", which is the smallest that {self.count} can give" if self.p <= self.least else ""
        return f"{text}{self.count} {'target' if self.count == 1 else 'targets'}{few})"

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "digits"}


def paired(differences: Sequence[float], unit: str = "dB", digits: int = 1) -> Paired | None:
    """The sign-flip test of these differences, one per target; None if there are none."""
    values = np.array(differences, dtype=float)
    number = len(values)
    if not number:
        return None
    if number <= EXACT:
        signs = np.array(list(product((1.0, -1.0), repeat=number)))
        p = float((signs @ values >= values.sum() - 1e-12 * np.abs(values).sum()).mean())
        return Paired(float(values.mean()), p, 2.0**-number, number, unit, digits)
    signs = 2.0 * np.random.default_rng(0).integers(2, size=(FLIPS, number)) - 1.0
    as_far = int((signs @ values >= values.sum() - 1e-12 * np.abs(values).sum()).sum())
    return Paired(float(values.mean()), (as_far + 1) / (FLIPS + 1), 1 / (FLIPS + 1), number, unit, digits)
