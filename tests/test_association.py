"""Curves over rounds: rank correlations known by hand and from scipy, and intervals that hold what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from gradleak.curvature.association import (
    IntervalEstimate,
    NoAssociation,
    associations,
    paired_difference,
    partial_spearman,
    spearman,
)


def curves(count: int, rounds: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, rounds))


# --- the figures ------------------------------------------------------------------------------------------------------


def test_a_correlation_by_hand() -> None:
    # ranks 1 2 3 4 5 against 2 1 4 3 5: sum of squared differences 4, so 1 - 6 * 4 / (5 * 24) = 0.8
    assert spearman([1, 2, 3, 4, 5], [20.0, 10, 40, 30, 50]).value == pytest.approx(0.8)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_scipys_with_ties_as_well(seed: int) -> None:
    x, y = np.random.default_rng(seed).integers(6, size=(2, 30)).astype(float)
    assert spearman(x, y).value == pytest.approx(stats.spearmanr(x, y).statistic)


@pytest.mark.parametrize("ties", [False, True])
def test_a_partial_correlation_is_that_of_residuals_of_ranks(ties: bool) -> None:
    rng = np.random.default_rng(1)
    held = rng.integers(8, size=(4, 40)).astype(float) if ties else curves(4, 40, seed=1)
    held[0] += held[2] + 0.5 * held[3]
    held[1] += held[2]
    ranks = np.apply_along_axis(stats.rankdata, 1, held)
    plane = np.column_stack([np.ones(40), ranks[2], ranks[3]])
    x, y = (values - plane @ np.linalg.lstsq(plane, values, rcond=None)[0] for values in ranks[:2])
    found = partial_spearman(held[0], held[1], [held[2], held[3]])
    assert found.value == pytest.approx(float(np.corrcoef(x, y)[0, 1]))
    assert found.low <= found.value <= found.high


def test_a_partial_correlation_by_hand() -> None:
    x, y, z = curves(3, 12, seed=3)
    a, b, c = (stats.spearmanr(*pair).statistic for pair in ((x, y), (x, z), (y, z)))
    assert partial_spearman(x, y, [z]).value == pytest.approx((a - b * c) / math.sqrt((1 - b * b) * (1 - c * c)))


def test_a_control_that_says_the_same_twice_changes_nothing() -> None:
    x, y, z = curves(3, 20)
    assert partial_spearman(x, y, [z, 3 * z]).value == pytest.approx(partial_spearman(x, y, [z]).value)


def test_two_curves_that_only_fall_with_training_are_told_from_two_that_belong_together() -> None:
    rounds = np.arange(60.0)
    noise = 12 * curves(4, 60, seed=2)
    apart = {"round": rounds, "trace": noise[0] - rounds, "psnr": noise[1] - rounds}
    joined = {"round": rounds, "trace": noise[2] - rounds, "psnr": noise[2] + noise[3] / 3 - rounds}
    first, second = (associations(held, controls=("round",))["trace"] for held in (apart, joined))
    assert first.plain is not None
    assert first.partial is not None
    assert second.partial is not None
    assert first.plain.low > 0
    assert first.partial.low < 0 < first.partial.high
    assert second.partial.low > 0.5


def test_of_several_runs_each_counts_by_itself() -> None:
    """A run that lies higher in both curves is no movement over rounds."""
    x, y = curves(2, 3 * 10).reshape(2, 3, 10)
    lifted = spearman(x + 100 * np.arange(3)[:, None], y + 100 * np.arange(3)[:, None])
    assert lifted.value == pytest.approx(np.mean([stats.spearmanr(a, b).statistic for a, b in zip(x, y)]))
    assert (lifted.count, lifted.small) == (3, True)
    assert "runs of 10 rounds" in lifted.unit


def test_a_paired_difference_by_hand() -> None:
    found = paired_difference([3.0, 5, 4], [1.0, 2, 3])
    assert found.value == pytest.approx(2.0)
    assert 1.0 <= found.low < 2.0 < found.high <= 3.0
    assert (found.count, found.small) == (3, True)


def test_repeats_of_a_target_stay_together() -> None:
    first = curves(12, 1).repeat(5, axis=1)  # (targets, repeats), all repeats alike
    alone = paired_difference(first[:, 0], np.zeros(12))
    together = paired_difference(first, np.zeros((12, 5)))
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high))
    assert together.count == 12


def test_pairing_takes_out_what_targets_share() -> None:
    hardness, noise = 10 * curves(1, 40)[0], curves(2, 40, seed=1)
    found = paired_difference(hardness + 1 + 0.1 * noise[0], hardness + 0.1 * noise[1])
    assert found.low > 0.9
    assert found.high < 1.1


# --- the intervals ----------------------------------------------------------------------------------------------------


def test_intervals_are_the_same_every_time_and_those_of_another_seed_are_not() -> None:
    x, y = curves(2, 25)
    assert spearman(x, y) == spearman(x, y)
    assert spearman(x, y, seed=1) != spearman(x, y)


def test_the_bootstrap_is_the_loop_that_it_stands_for() -> None:
    x, y = curves(2, 9)
    begins = np.random.default_rng(5).integers(7, size=(40, 3, 1))  # three blocks of 3 that begin at 0 to 6
    drawn = (begins + np.arange(3)).reshape(40, 9)
    one_by_one = [stats.spearmanr(x[rows], y[rows]).statistic for rows in drawn]
    found = spearman(x, y, block=3, resamples=40, seed=5)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(one_by_one, [0.025, 0.975])))
    assert found.unit == "rounds in blocks of 3"


def test_intervals_of_a_mean_cover_it_about_as_often_as_they_say() -> None:
    hits = 0
    for seed in range(300):
        found = paired_difference(curves(1, 30, seed=seed)[0] + 1, np.zeros(30), resamples=300)
        hits += found.low <= 1 <= found.high
    assert 0.89 < hits / 300 < 0.98


def test_intervals_of_a_correlation_cover_it_about_as_often_as_they_say() -> None:
    pearson = 0.6
    truth = 6 / math.pi * math.asin(pearson / 2)  # Spearman's of two normal variables
    hits = 0
    for seed in range(200):
        a, b = curves(2, 40, seed=seed)
        found = spearman(a, pearson * a + math.sqrt(1 - pearson**2) * b, block=1, resamples=300)
        hits += found.low <= truth <= found.high
    assert 0.87 < hits / 200 < 0.99


def test_blocks_widen_the_interval_of_curves_with_a_memory() -> None:
    """Neighbouring rounds of a slow curve say the same thing: taken as independent they would claim too much."""

    def width(seed: int, block: int) -> float:
        smooth = np.apply_along_axis(lambda v: np.convolve(v, np.ones(12), "valid"), 1, curves(2, 131, seed=seed))
        found = spearman(*smooth, block=block, resamples=300)
        return found.high - found.low

    assert np.mean([width(seed, 12) for seed in range(10)]) > 1.5 * np.mean([width(seed, 1) for seed in range(10)])


def test_a_perfect_order_is_no_certainty_and_says_so() -> None:
    found = spearman(np.arange(8), np.arange(8) ** 3)
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1))
    assert found.degenerate
    assert "without any spread" in str(found)
    assert found.record()["degenerate"] is True


def test_resamples_without_an_order_are_counted() -> None:
    mostly = [0.0] * 9 + [1.0]
    found = spearman(mostly, np.arange(10), block=1)
    assert found.undefined == pytest.approx(0.9**10, abs=0.05)


def test_a_small_sample_is_called_small() -> None:
    assert "a small sample" in str(spearman(*curves(2, 19)))
    assert "small" not in str(spearman(*curves(2, 20)))
    assert isinstance(spearman(*curves(2, 20)), IntervalEstimate)


def test_tensors_and_lists_are_read_alike() -> None:
    x, y = curves(2, 15)
    assert spearman(torch.tensor(x), torch.tensor(y)) == spearman(list(x), list(y)) == spearman(x, y)


# --- what has no answer -----------------------------------------------------------------------------------------------


def test_a_constant_curve_has_no_order() -> None:
    with pytest.raises(NoAssociation, match="Curve 2 is constant"):
        spearman(np.arange(6), np.ones(6))
    with pytest.raises(NoAssociation, match="constant"):  # in one run of two
        spearman(curves(2, 6), np.stack([np.arange(6), np.zeros(6)]))


def test_a_curve_that_the_controls_fix_leaves_nothing() -> None:
    rounds = np.arange(20.0)
    with pytest.raises(NoAssociation, match="nothing is left"):
        partial_spearman(-(rounds**2), curves(1, 20)[0], [rounds])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (([1, 2, 3], [1, 2, 3]), "at least 4 rounds"),
        (([1, 2, 3, 4], [1, 2, 3, 4, 5]), "the same shape"),
        (([1, 2, 3, math.nan], [1, 2, 3, 4]), "not finite"),
    ],
)
def test_curves_that_do_not_fit_are_refused(given: tuple[list[float], list[float]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        spearman(*given)


def test_settings_out_of_range_are_refused() -> None:
    x, y = curves(2, 10)
    with pytest.raises(ValueError, match="from 1 to half of the 10 rounds"):
        spearman(x, y, block=6)
    with pytest.raises(ValueError, match="whole runs are resampled"):
        spearman(curves(3, 10), curves(3, 10, seed=1), block=2)
    with pytest.raises(ValueError, match="resamples"):
        spearman(x, y, resamples=0)
    with pytest.raises(ValueError, match="or use `spearman`"):
        partial_spearman(x, y, [])
    with pytest.raises(ValueError, match="two or more"):
        paired_difference([1.0], [2.0])


def test_a_study_goes_on_where_one_curve_has_no_answer() -> None:
    held = curves(3, 12)
    table = {"round": np.arange(12), "gradient_norm": held[0], "psnr": held[1], "trace": held[2], "flat": np.ones(12)}
    found = associations({**table, "loss": -np.arange(12.0)})
    assert set(found) == {"round", "gradient_norm", "trace", "flat", "loss"}
    assert found["trace"].plain is not None
    assert found["trace"].partial is not None
    assert (found["flat"].plain, found["flat"].partial) == (None, None)
    assert "constant" in found["flat"].reason
    assert found["loss"].plain is not None
    assert found["loss"].partial is None
    assert "nothing is left" in found["loss"].reason
    assert found["loss"].record()["partial"] is None
    with pytest.raises(ValueError, match="no curve psnr"):
        associations({"trace": held[0]}, controls=())
