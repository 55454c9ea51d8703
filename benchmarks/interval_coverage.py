"""How often do the 95 % intervals of recovered shares hold the true rate?

    python benchmarks/interval_coverage.py            # benchmarks/results/interval-coverage.json, some minutes

For every true rate from 0.1 to 0.9, so many simulated audits each: targets with one result, and targets whose several
seeds and images resemble each other (a beta-binomial with the intraclass correlation below). `single` and `clustered`
is what a verdict says of recovered images, `difference` what it says of the excess over an unrelated update that
recovers some as well.

Where a target has one result, the coverage is also summed over all outcomes, which leaves nothing to chance (`exact`).
A simulated figure has an error of its own: of 1,000 audits three standard errors are 2.1 %, as wide as the band from 93
to 97 % that is asked for, and of 81 cells some fall out of it by chance. Of 10,000 they are 0.7 %. One seed for all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from math import exp, lgamma, log
from pathlib import Path
from typing import Any

import numpy as np

from gradleak.audit.intervals import Rate, rate
from gradleak.core.environment import describe

RATES = tuple(round(0.1 * number, 1) for number in range(1, 10))
BLIND = 0.1  # what the unrelated update recovers, in `difference`
SEED = 0
ROUNDING = 1e-12  # 0.3 - 0.1 is no round number
Draw = Callable[[np.random.Generator, float, int], list[list[float]]]
Chances = Callable[[float], dict[float, float]]


def single(source: np.random.Generator, share: float, targets: int) -> list[list[float]]:
    return [[float(value)] for value in source.random(targets) < share]


def clustered(source: np.random.Generator, share: float, targets: int, results: int = 6, alike: float = 0.5) -> Any:
    """`results` of each target (say 3 seeds x 2 images), with intraclass correlation `alike`."""
    weight = (1 - alike) / alike
    own = source.beta(share * weight, (1 - share) * weight, size=(targets, 1))
    return (source.random((targets, results)) < own).astype(float).tolist()


def difference(source: np.random.Generator, share: float, targets: int) -> list[list[float]]:
    own, blind = source.random(targets) < share, source.random(targets) < BLIND
    return [[float(a) - float(b)] for a, b in zip(own, blind, strict=True)]


CASES: dict[str, tuple[Draw, float]] = {"single": (single, 0.0), "clustered": (clustered, 0.0)}
CASES |= {"difference": (difference, BLIND)}

CHANCES: dict[str, Chances] = {  # of one target's result; `clustered` has too many outcomes to sum over
    "single": lambda share: {1.0: share, 0.0: 1 - share},
    "difference": lambda share: {
        1.0: share * (1 - BLIND),
        0.0: share * BLIND + (1 - share) * (1 - BLIND),
        -1.0: (1 - share) * BLIND,
    },
}


def holds(found: Rate, truth: float) -> bool:
    return found.low - ROUNDING <= truth <= found.high + ROUNDING


def coverage(
    draw: Draw, share: float, targets: int, simulations: int, seed: int, less: float = 0.0
) -> dict[str, float]:
    """The share of simulated intervals that hold the truth, and their mean width."""
    source = np.random.default_rng([seed, round(1000 * share), targets])
    found = [rate(draw(source, share, targets)) for _ in range(simulations)]
    held = sum(holds(own, share - less) for own in found)
    return {"coverage": held / simulations, "width": sum(own.high - own.low for own in found) / simulations}


def exact(chances: Chances, targets: int, less: float = 0.0) -> dict[float, float]:
    """For each rate, the probability of all outcomes whose interval holds it. An outcome is how often each value."""
    values = list(chances(RATES[0]))
    total = dict.fromkeys(RATES, 0.0)
    for counts in _counts(targets, len(values)):
        results = [[value] for value, count in zip(values, counts, strict=True) for _ in range(count)]
        found = rate(results)
        ways = lgamma(targets + 1) - sum(lgamma(count + 1) for count in counts)
        for share in RATES:
            if holds(found, share - less):
                chance = zip(counts, chances(share).values(), strict=True)
                total[share] += exp(ways + sum(count * log(each) for count, each in chance))
    return total


def _counts(whole: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as so many counts, in order."""
    if parts == 1:
        yield (whole,)
        return
    for first in range(whole + 1):
        for rest in _counts(whole - first, parts - 1):
            yield (first, *rest)


def measure(targets: tuple[int, ...], simulations: int, seed: int = SEED) -> list[dict[str, Any]]:
    rows = []
    for name, (draw, less) in CASES.items():
        for count in targets:
            summed = exact(CHANCES[name], count, less) if name in CHANCES else {}
            rows += [
                {
                    "case": name,
                    "targets": count,
                    "rate": share,
                    **coverage(draw, share, count, simulations, seed, less),
                    "exact": summed.get(share),
                }
                for share in RATES
            ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", default=[50, 60, 100])
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "interval-coverage.json")
    given = parser.parse_args()
    rows = measure(tuple(given.targets), given.simulations)
    for row in rows:
        summed = "" if row["exact"] is None else f"  exactly {row['exact']:.1%}"
        print(f"{row['case']:<12}{row['targets']:>4} targets  rate {row['rate']:.1f}  {row['coverage']:.1%}{summed}")
    told = {"environment": describe(), "simulations": given.simulations, "seeds": [SEED], "rows": rows}
    given.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
