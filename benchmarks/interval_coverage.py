"""How often do the 95 % intervals of recovered shares hold the true rate?

    python benchmarks/interval_coverage.py            # benchmarks/results/interval-coverage.json, about a minute

For every true rate from 0.1 to 0.9, so many simulated audits each: targets with one result, and targets whose several
seeds and images resemble each other (a beta-binomial with the intraclass correlation below). `shares` is what a verdict
says of recovered images, `differences` what it says of the excess over an unrelated update that recovers some as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gradleak.environment import describe
from gradleak.results.intervals import rate

RATES = tuple(round(0.1 * number, 1) for number in range(1, 10))
BLIND = 0.1  # what the unrelated update recovers, in `differences`
Draw = Callable[[np.random.Generator, float, int], list[list[float]]]


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


def coverage(
    draw: Draw, share: float, targets: int, simulations: int, seed: int, less: float = 0.0
) -> dict[str, float]:
    """The share of simulated intervals that hold the truth, and their mean width."""
    source = np.random.default_rng([seed, round(1000 * share), targets])
    held, width = 0, 0.0
    for _ in range(simulations):
        found = rate(draw(source, share, targets))
        held += found.low - 1e-12 <= share - less <= found.high + 1e-12  # 0.3 - 0.1 is no round number
        width += found.high - found.low
    return {"coverage": held / simulations, "width": width / simulations}


def measure(targets: tuple[int, ...], simulations: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"case": name, "targets": count, "rate": share, **coverage(draw, share, count, simulations, seed, less)}
        for name, (draw, less) in CASES.items()
        for count in targets
        for share in RATES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", default=[50, 60, 100])
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "interval-coverage.json")
    given = parser.parse_args()
    rows = measure(tuple(given.targets), given.simulations)
    for row in rows:
        print(f"{row['case']:<12}{row['targets']:>4} targets  rate {row['rate']:.1f}  {row['coverage']:.1%}")
    told = {"environment": describe(), "simulations": given.simulations, "rows": rows}
    given.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
