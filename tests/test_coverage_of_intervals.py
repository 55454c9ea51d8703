"""95 % intervals hold the truth in 95 % of cases: exactly where that can be summed, by simulation elsewhere."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path

import pytest

from conftest import script
from gradleak.audit.intervals import rate

HERE = Path(__file__).parents[1] / "benchmarks"
RATES = [round(0.1 * number, 1) for number in range(1, 10)]


@pytest.mark.parametrize("targets", [50, 60, 80, 100])
def test_shares_of_targets_are_covered_exactly(targets: int) -> None:
    """One result per target: the sum over all outcomes of the binomial, no chance involved."""
    found = [rate([[1.0]] * hits + [[0.0]] * (targets - hits)) for hits in range(targets + 1)]
    for share in RATES:
        weights = [comb(targets, k) * share**k * (1 - share) ** (targets - k) for k in range(targets + 1)]
        covered = sum(w for w, own in zip(weights, found, strict=True) if own.low <= share <= own.high)
        assert 0.93 <= covered <= 0.97, (targets, share, covered)


def test_the_stored_simulations_cover() -> None:
    """Simulated audits for each rate, also of targets with several seeds, and of differences: 93 to 97 %, every cell.

    So many that their own error does not decide: of 10,000, three standard errors are 0.7 %.
    """
    stored = json.loads((HERE / "results" / "interval-coverage.json").read_text())
    assert stored["simulations"] >= 10_000
    assert stored["environment"]["git"]["commit"]
    rows = stored["rows"]
    assert {row["case"] for row in rows} == {"single", "clustered", "difference"}
    assert {row["rate"] for row in rows} == set(RATES)
    assert min(row["targets"] for row in rows) >= 50
    assert len(rows) == 81
    for row in rows:
        assert 0.93 <= row["coverage"] <= 0.97, row
        if row["case"] != "clustered":  # simulations and sums agree, but for the error of the former
            assert 0.93 <= row["exact"] <= 0.97, row
            assert abs(row["coverage"] - row["exact"]) < 4 * (0.05 / stored["simulations"]) ** 0.5, row


@pytest.mark.parametrize("case", ["single", "difference"])
def test_the_stored_sums_are_those_of_the_code(case: str) -> None:
    module = script("benchmarks/interval_coverage.py")
    stored = json.loads((HERE / "results" / "interval-coverage.json").read_text())
    held = {r["rate"]: r["exact"] for r in stored["rows"] if (r["case"], r["targets"]) == (case, 50)}
    assert module.exact(module.CHANCES[case], 50, module.CASES[case][1]) == pytest.approx(held, abs=1e-9)


@pytest.mark.parametrize("case", ["clustered", "difference"])
def test_the_stored_figures_are_those_of_the_code(case: str) -> None:
    module = script("benchmarks/interval_coverage.py")
    stored = json.loads((HERE / "results" / "interval-coverage.json").read_text())
    [row] = [r for r in stored["rows"] if (r["case"], r["targets"], r["rate"]) == (case, 50, 0.3)]
    draw, less = module.CASES[case]
    again = module.coverage(draw, 0.3, 50, stored["simulations"], 0, less)
    assert again["coverage"] == pytest.approx(row["coverage"], abs=1e-9)


def test_seeds_of_a_target_that_agree_add_nothing_and_those_that_differ_something() -> None:
    once = rate([[1.0]] * 20 + [[0.0]] * 30)
    agree = rate([[1.0] * 4] * 20 + [[0.0] * 4] * 30)
    differ = rate([[1.0, 0.0, 1.0, 0.0]] * 25 + [[0.0, 1.0, 0.0, 0.0]] * 25)
    assert (agree.low, agree.high) == pytest.approx((once.low, once.high))
    assert differ.high - differ.low < once.high - once.low
    assert 0 <= differ.low < differ.value < differ.high <= 1


def test_a_difference_that_all_targets_agree_on_is_open_on_both_sides() -> None:
    """None of eight above the unrelated update: it may lie below as well. And no spread is not certainty."""
    share, none = rate([[0.0]] * 8), rate([[0.0]] * 8, difference=True)
    slack = 1 - 0.025 ** (1 / 8)
    assert (share.low, share.high) == (0.0, pytest.approx(slack))
    assert (none.low, none.high) == (pytest.approx(-slack), pytest.approx(slack))
    alike = rate([[1.0, 1.0, -1.0]] * 8)  # of three images two are gained and one is lost, for each of the targets
    assert alike.high - alike.low == pytest.approx(2 * slack)
    every = rate([[1.0]] * 8, difference=True)
    assert (every.low, every.high) == (pytest.approx(1 - slack), 1.0)
