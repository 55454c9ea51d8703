"""Scores against known values, against torchmetrics and scikit-image, and the comparison as a whole."""

import json
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import uniform
from gradleak import metrics
from gradleak.scenario.kinds import Column, Series, Table, Tokens, Value
from gradleak.scenario.task import Field


@dataclass
class Found:
    """What `compare` needs of a reconstruction."""

    batch: dict[str, Tensor]
    fields: dict[str, Any] = field(default_factory=dict)
    diverged: Tensor | None = None
    chosen: Tensor | None = None

    def __post_init__(self) -> None:
        self.examples = (self.batch["x"].shape[1],) * self.batch["x"].shape[0]


NORMALISED = Field((3, 16, 16), mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
FIELDS = {"x": NORMALISED, "y": Field((), classes=10)}


# --- image scores ----------------------------------------------------------------------------------------------------


def test_psnr_of_a_tenth_is_twenty() -> None:
    x = 0.9 * uniform(4, 3, 8, 8)
    torch.testing.assert_close(metrics.psnr(x + 0.1, x), torch.full((4,), 20.0, dtype=torch.float64))
    torch.testing.assert_close(metrics.psnr_ggl(x + 0.1, x), metrics.psnr(x + 0.1, x) - 20 * math.log10(2))


def test_psnr_is_capped_and_the_cap_is_counted() -> None:
    x = 0.5 * uniform(3, 1, 8, 8)
    found = torch.stack([x[0], x[1] + 1e-7, x[2] + 1e-5])
    assert metrics.psnr(found, x).tolist() == pytest.approx([120, 120, 100])
    assert metrics.capped(found, x).tolist() == [True, True, False]


def test_mean_psnr_exceeds_psnr_of_the_mean_mse() -> None:
    x = torch.zeros(2, 1, 8, 8)
    found = torch.stack([x[0] + 0.1, x[1] + 0.01])  # 20 and 40 dB
    assert metrics.psnr(found, x).mean().item() == pytest.approx(30, abs=1e-4)
    assert -10 * metrics.mse(found, x).mean().log10().item() == pytest.approx(22.967, abs=1e-3)
    assert -10 * math.log10(0.00696) == pytest.approx(21.57, abs=5e-3)  # a paper prints this MSE beside a PSNR of 22.58


def test_scores_are_clamped_and_differ_per_image() -> None:
    x = torch.ones(2, 1, 8, 8)
    found = torch.stack([x[0] * 7, x[1] * -3])
    assert metrics.mse(found, x).tolist() == [0, 1]


@pytest.mark.parametrize("score", [metrics.ssim, metrics.ssim_zero_pad_gauss, metrics.ssim_skimage])
def test_ssim_of_itself_is_one_and_of_others_less(score: Any) -> None:
    x, y = uniform(3, 3, 16, 16), uniform(3, 3, 16, 16, seed=1)
    torch.testing.assert_close(score(x, x), torch.ones(3, dtype=torch.float64))
    assert (score(x, y) < 0.9).all()
    torch.testing.assert_close(score(x, y), score(y, x))


@pytest.mark.parametrize("side", [1, 2, 5, 8, 10])
def test_small_images_use_the_window_that_fits(side: int) -> None:
    x, y = uniform(2, 3, side, side + 1), uniform(2, 3, side, side + 1, seed=1)
    torch.testing.assert_close(metrics.ssim(x, x), torch.ones(2, dtype=torch.float64))
    assert torch.isfinite(torch.stack([metrics.ssim(x, y), metrics.ssim_skimage(x, y)])).all()


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="equal shape"):
        metrics.mse(uniform(2, 3, 8, 8), uniform(1, 3, 8, 8))


@pytest.mark.parametrize("shape", [(4, 3, 32, 32), (2, 1, 28, 40)])
def test_agreement_with_torchmetrics(shape: tuple[int, ...]) -> None:
    image = pytest.importorskip("torchmetrics.functional.image")
    x = uniform(*shape)
    y = (x + 0.2 * uniform(*shape, seed=1)).clamp(0, 1)
    # Its mean includes a reflected border of 5 pixels; the map without it is ours.
    full = image.structural_similarity_index_measure(y, x, data_range=1.0, reduction="none", return_full_image=True)[1]
    torch.testing.assert_close(metrics.ssim(y, x), full[..., 5:-5, 5:-5].flatten(1).mean(1))
    expected = image.peak_signal_noise_ratio(y, x, data_range=1.0, reduction="none", dim=(1, 2, 3))
    torch.testing.assert_close(metrics.psnr(y, x), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_agreement_with_skimage(channels: int) -> None:
    reference = pytest.importorskip("skimage.metrics").structural_similarity
    from skimage.color import rgb2gray

    x = uniform(3, channels, 20, 24)
    y = (x + 0.2 * uniform(3, channels, 20, 24, seed=1)).clamp(0, 1)
    plain = lambda t: rgb2gray(t.permute(1, 2, 0).numpy()) if channels == 3 else t[0].numpy()  # noqa: E731
    expected = [reference(plain(a), plain(b), data_range=1.0) for a, b in zip(x, y)]
    assert metrics.ssim_skimage(y, x).tolist() == pytest.approx(expected, abs=1e-12)
    if channels == 1:  # and the default is its Gaussian mode, cropped to the windows inside
        options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "full": True}
        maps = [reference(plain(a), plain(b), data_range=1.0, **options)[1] for a, b in zip(x, y)]
        expected = [full[5:-5, 5:-5].mean() for full in maps]
        assert metrics.ssim(y, x).tolist() == pytest.approx(expected, abs=1e-12)


def test_zero_padding_against_a_plain_convolution() -> None:
    x, y = uniform(2, 3, 16, 12), uniform(2, 3, 16, 12, seed=1)
    line = torch.exp(-((torch.arange(11, dtype=torch.float64) - 5) ** 2) / 4.5)
    window = torch.outer(line, line)[None, None] / line.sum() ** 2
    blur = lambda t: torch.nn.functional.conv2d(t.reshape(6, 1, 16, 12), window, padding=5)  # noqa: E731
    mx, my, c1, c2 = blur(x), blur(y), 1e-4, 9e-4
    vx, vy, cov = blur(x * x) - mx**2, blur(y * y) - my**2, blur(x * y) - mx * my
    expected = (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    torch.testing.assert_close(metrics.ssim_zero_pad_gauss(x, y), expected.reshape(2, -1).mean(1))


def test_all_pairs_agree_with_the_aligned_score_across_blocks() -> None:
    first, second = uniform(2, 3, 96, 96), uniform(40, 3, 96, 96, seed=1)  # two blocks
    expected = torch.stack([1 - metrics.ssim(x.expand_as(second), second) for x in first])
    torch.testing.assert_close(metrics.pairwise_ssim_distance(first, second), expected)


def test_s004_scoring_takes_the_best_of_all_pairs_from_different_pairs() -> None:
    skimage = pytest.importorskip("skimage.metrics")
    from skimage.color import rgb2gray

    x = 0.5 * uniform(3, 3, 16, 16)
    y = torch.stack([x[2] * 0.6, x[0] + 0.03, uniform(3, 16, 16, seed=4)])

    def reference(guess: np.ndarray) -> list[float]:
        pairs = [(rgb2gray(a), rgb2gray(b)) for a in x.permute(0, 2, 3, 1).numpy() for b in guess]
        best_psnr = max(skimage.peak_signal_noise_ratio(a, b, data_range=1.0) for a, b in pairs)
        return [best_psnr, max(skimage.structural_similarity(a, b, data_range=1.0) for a, b in pairs)]

    guess = y.permute(0, 2, 3, 1).numpy()
    plain = reference(guess)
    assert list(metrics.s004_compat(y, x).values()) == pytest.approx(plain, abs=1e-9)  # tuning does not help here
    # A faint copy of sparse marks on a grey ground: here the tuning raises both, and is accepted.
    marks = (uniform(3, 3, 16, 16, seed=5) > 0.97).double()
    x, dark = 0.4 + 0.4 * marks, 0.05 * marks
    scaled = dark.numpy() * float(x.std(correction=0) / dark.std(correction=0))
    tuned = np.clip(scaled + float(x.mean()) + scaled.mean(), 0, 1).transpose(0, 2, 3, 1)
    both = reference(dark.permute(0, 2, 3, 1).numpy()), reference(tuned)
    assert all(after > before for before, after in zip(*both))
    assert list(metrics.s004_compat(dark, x).values()) == pytest.approx(both[1], abs=1e-9)


# --- labels ----------------------------------------------------------------------------------------------------------


def test_label_scores_by_hand() -> None:
    truth = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 3]])
    found = torch.tensor([[0, 1, 1, 4], [3, 3, 3, 3]])
    # Counts of the first row: true (2, 1, 1, 0, 0), found (1, 2, 0, 0, 1).
    scores = metrics.label_scores(found, truth, classes=5)
    assert scores["multiset_accuracy"].tolist() == scores["irec"].tolist() == [0.5, 1.0]
    assert scores["leacc"].tolist() == pytest.approx([3 / 5, 1.0])
    assert scores["lnacc"].tolist() == pytest.approx([1 / 5, 1.0])
    assert scores["lnacc_present"].tolist() == pytest.approx([0.0, 1.0])


def test_label_scores_ignore_order_and_read_a_simplex() -> None:
    truth = torch.tensor([2, 0, 1])
    simplex = torch.eye(3)[torch.tensor([0, 1, 2])] * 0.8 + 0.1
    scores = metrics.label_scores(simplex, truth)
    assert scores.pop("misplaced") == 0
    assert all(float(value) == 1 for value in scores.values())


def test_misplaced_labels_are_counted() -> None:
    scores = metrics.label_scores(
        torch.tensor([[0, 0, 1, 2], [3, 3, 3, 3]]), torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3]])
    )
    assert scores["misplaced"].tolist() == [2.0, 3.0]


# --- baselines -------------------------------------------------------------------------------------------------------


def test_baselines() -> None:
    truth, others = uniform(2, 1, 8, 8), uniform(6, 1, 8, 8, seed=1)
    near = (truth[:1] + 0.05).clamp(0, 1)
    gallery = torch.cat([truth, others, near])  # copies of the truth must not count as other images
    labels = torch.tensor([7, 8]), torch.tensor([7, 8, 7, 0, 0, 0, 0, 0, 0])
    scores = metrics.baselines(truth, gallery, labels=labels)
    assert list(scores) == ["mid-grey", "mean image", "nearest other", "nearest of class"]
    torch.testing.assert_close(scores["mid-grey"]["mse"], (truth - 0.5).square().flatten(1).mean(1))
    torch.testing.assert_close(scores["mean image"]["mse"], (truth - gallery.mean(0)).square().flatten(1).mean(1))
    torch.testing.assert_close(scores["nearest other"]["mse"][:1], metrics.mse(near, truth[:1]))
    torch.testing.assert_close(scores["nearest of class"]["mse"][:1], metrics.mse(others[:1], truth[:1]))
    assert scores["nearest of class"]["ssim"][1].isnan()  # no other image of class 8
    assert list(metrics.baselines(truth)) == ["mid-grey"]


# --- the comparison --------------------------------------------------------------------------------------------------


def scene(targets: int = 2, examples: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures, labels, and an order per target."""
    order = torch.stack([torch.randperm(examples, generator=torch.Generator().manual_seed(t)) for t in range(targets)])
    return (
        0.9 * uniform(targets, examples, 3, 16, 16),
        torch.arange(targets * examples).reshape(targets, examples),
        order,
    )


def test_compare_matches_per_target_and_scores_in_pixel_space() -> None:
    pictures, labels, order = scene()
    row = torch.arange(2)[:, None]
    shown = (pictures + 0.1)[row, order]
    found = Found({"x": NORMALISED.model(shown), "y": labels[row, order]}, FIELDS)
    scores = metrics.compare(found, {"x": NORMALISED.model(pictures), "y": labels})
    torch.testing.assert_close(scores.psnr, torch.full((2, 3), 20.0, dtype=torch.float64))
    torch.testing.assert_close(scores.assignment, order.argsort(1))
    assert {name: value.tolist() for name, value in scores.labels.items()} == {
        **{name: [1.0, 1.0] for name in ("multiset_accuracy", "leacc", "lnacc", "lnacc_present", "irec", "matched")},
        "misplaced": [0.0, 0.0],
    }
    assert not scores.diverged.any()
    assert scores.finite.all()


def test_without_numbers_of_examples_every_target_is_matched_in_full() -> None:
    truth = uniform(3, 2, 3, 16, 16)
    batch = {"x": truth.flip(1)}  # both images of each target, in the other order
    scores = metrics.compare(SimpleNamespace(batch=batch), {"x": truth}, fields={"x": Field((3, 16, 16))})
    assert scores.present.tolist() == [[True, True]] * 3
    assert scores.assignment.tolist() == [[1, 0]] * 3
    assert scores.psnr.tolist() == [[120.0, 120.0]] * 3


def test_compare_reads_one_truth_for_all_targets_and_simplex_labels() -> None:
    pictures, labels, _ = scene(1, 3)
    found = Found({"x": pictures.repeat(4, 1, 1, 1, 1).float(), "y": torch.eye(10)[labels].repeat(4, 1, 1)})
    fields = {"x": Field((3, 16, 16)), "y": FIELDS["y"]}
    scores = metrics.compare(found, {"x": pictures[0].float(), "y": labels[0]}, fields=fields)
    assert scores.psnr.tolist() == [[120.0] * 3] * 4
    summary = scores.summary()
    assert summary["capped"] == 12
    assert summary["labels"]["matched"] == 1
    wrong = metrics.compare(found, {"x": pictures[0].float(), "y": labels[0].roll(1)}, fields=fields)
    assert wrong.summary()["labels"]["multiset_accuracy"] == 1  # the same set,
    assert wrong.summary()["labels"]["matched"] == 0  # on the wrong images


def test_compare_with_a_gallery() -> None:
    pictures, labels, _ = scene(1, 3)
    found = Found({"x": pictures.clone(), "y": labels}, {"x": Field((3, 16, 16)), "y": FIELDS["y"]})
    found.batch["x"][0, 2] = uniform(3, 16, 16, seed=9)  # one image is not recovered
    gallery = {"x": 0.9 * uniform(30, 3, 16, 16, seed=5), "y": torch.arange(30) % 10}
    scores = metrics.compare(found, {"x": pictures, "y": labels}, gallery=gallery)
    assert scores.rank is not None
    assert scores.rank[0, :2].tolist() == [1, 1]
    summary = scores.summary()
    assert summary["chance"] == pytest.approx(1 / 31)
    assert summary["rates"]["recovered"] == pytest.approx(2 / 3)
    assert set(summary["baselines"]) == {"mid-grey", "mean image", "nearest other", "nearest of class"}
    json.dumps(summary)
    text = str(scores)
    assert "nearest of class" in text
    assert "rank 1 by chance 3.2%" in text


def test_rates_by_hand() -> None:
    values = torch.tensor([[17.0, 19.0, 21.0, 25.0]])
    similar = torch.tensor([[0.4, 0.6, 0.4, 0.9]])
    yes = torch.ones(1, 4, dtype=torch.bool)
    rank = torch.tensor([[1.0, 1.0, 1.0, 2.0]])
    measured = {"mse": 10 ** (-values / 10), "psnr": values, "ssim": similar}
    scores = metrics.Scores(measured, torch.arange(4)[None], yes, ~yes[:, 0], rank=rank, gallery_size=rank + 9)
    rates = {"ssim>0.5": 0.5, "psnr>18": 0.75, "psnr>20": 0.5, "rank1": 0.75, "recovered": 0.25}
    assert scores.summary()["rates"] == rates
    assert scores.summary()["psnr"] == pytest.approx({"mean": 20.5, "std": np.std([17, 19, 21, 25]), "median": 20.0})


def test_diverged_reconstructions_are_scored_and_flagged() -> None:
    dark = 0.01 * uniform(3, 2, 1, 16, 16)  # so dark that a black image scores well
    shown = dark.clone()
    shown[1, 0] = torch.nan
    shown[1, 1, 0, 0, 0] = torch.inf
    found = Found({"x": shown}, {"x": Field((1, 16, 16))}, diverged=torch.tensor([False, False, True]))
    scores = metrics.compare(found, {"x": dark})
    assert scores.diverged.tolist() == [False, True, True]
    assert scores.finite.tolist() == [[True, True], [False, False], [True, True]]
    assert torch.isfinite(scores.psnr).all()
    assert torch.isfinite(scores.ssim).all()
    assert scores.psnr[1, 0] > 20  # the black image,
    assert not scores.hits()["psnr>20"][1].any()  # which is not a success
    assert scores.summary()["diverged"] == pytest.approx(2 / 3)
    assert scores.summary()["rates"]["psnr>20"] == pytest.approx(2 / 3)
    assert scores.labels == {}
    assert "labels" not in str(scores)


def test_targets_with_different_numbers_of_examples() -> None:
    pictures, labels, _ = scene()
    shown, guessed = (pictures + 0.1).flip(1), labels.flip(1).clone()
    shown[1] = shown[1].roll(2, 0)  # target 1 has two examples: its last row is padding
    guessed[1] = guessed[1].roll(2, 0)
    private, true = pictures.clone(), labels.clone()
    shown[1, 2], guessed[1, 2] = torch.nan, -1
    private[1, 2], true[1, 2] = torch.nan, -1
    found = Found({"x": shown, "y": guessed}, {"x": Field((3, 16, 16)), "y": FIELDS["y"]})
    found.examples = (3, 2)
    found.diverged, found.chosen = torch.tensor([[True, False], [True, False]]), torch.tensor([1, 0])
    gallery = {"x": uniform(9, 3, 16, 16, seed=3), "y": torch.arange(9)}
    scores = metrics.compare(found, {"x": private, "y": true}, gallery=gallery)
    assert scores.present.tolist() == [[True] * 3, [True, True, False]]
    assert scores.psnr[scores.present].tolist() == pytest.approx([20.0] * 5)
    assert scores.psnr[1, 2].isnan()
    assert scores.diverged.tolist() == [False, True]  # of the chosen restart; padding is no divergence
    summary = scores.summary()
    assert summary["psnr"]["mean"] == pytest.approx(20)
    assert summary["rates"]["rank1"] == 1
    assert summary["chance"] == pytest.approx(0.1)
    assert summary["labels"]["multiset_accuracy"] == summary["labels"]["matched"] == 1
    assert all(np.isfinite(value) for value in summary["baselines"]["mid-grey"].values())


def test_matching_by_another_distance_and_wrong_requests() -> None:
    pictures, _, order = scene()
    found = Found({"x": pictures[torch.arange(2)[:, None], order]}, {"x": Field((3, 16, 16))})
    scores = metrics.compare(found, {"x": pictures}, matching="ssim")
    torch.testing.assert_close(scores.assignment, order.argsort(1))
    with pytest.raises(ValueError, match="lpips needs"):
        metrics.compare(found, {"x": pictures}, matching="lpips")
    with pytest.raises(ValueError, match="but the truth"):
        metrics.compare(found, {"x": pictures[:, :2]})
    with pytest.raises(ValueError, match="takes images"):
        metrics.compare(Found({"x": uniform(2, 3, 5)}, found.fields), {"x": uniform(2, 3, 5)})


# --- other kinds of data ---------------------------------------------------------------------------------------------

COLUMNS = (
    Column("age", mean=40.0, std=10.0),
    Column("work", ("none", "part", "full")),
    Column("income", low=-2, high=2),
)
ROWS = torch.tensor([[0.5, 1, 0, 0, 1.0], [-1.0, 0, 1, 0, -1.5], [2.0, 0, 0, 1, 0.0]])
ROW = Field((5,), Table(COLUMNS).limits(), kind=Table(COLUMNS))


def shuffled(values: Tensor, order: list[int]) -> Tensor:
    return values[order][None].clone()


def test_rows_of_a_table_are_scored_by_column() -> None:
    found = shuffled(ROWS, [2, 0, 1])  # found example 1 is private row 0
    found[0, 1, 0] += 0.2  # within the tolerance
    found[0, 2, 4] += 1.0  # beyond it
    found[0, 0, 1:4] = torch.tensor([0.2, 0.3, 0.4])  # the largest entry is the category
    labels = torch.tensor([0, 1, 1])
    fields = {"x": ROW, "y": Field((), classes=2)}
    gallery = {"x": torch.cat([ROWS[:1], torch.tensor([[9.0, 0, 1, 0, 2.0]]).repeat(4, 1)]), "y": torch.zeros(5).long()}
    scores = metrics.compare(
        Found({"x": found, "y": labels[[2, 0, 1]][None]}, fields), {"x": ROWS[None], "y": labels[None]}, gallery=gallery
    )
    assert scores.kind == ROW.kind
    assert scores.assignment.tolist() == [[1, 2, 0]]
    assert list(scores.values) == ["right", "categorical", "numeric", "rmse"]
    assert scores.values["right"].tolist() == [[1.0, pytest.approx(2 / 3), 1.0]]
    assert scores.values["categorical"].tolist() == [[1.0, 1.0, 1.0]]
    assert scores.values["numeric"].tolist() == [[1.0, 0.5, 1.0]]
    assert scores.values["rmse"][0, 0] == pytest.approx(0.2 / math.sqrt(2), abs=1e-6)
    hits = {name: value.tolist() for name, value in scores.hits().items()}
    assert hits["exact row"] == hits["recovered"] == [[True, False, True]]
    assert scores.gallery_size is not None
    assert scores.gallery_size.tolist() == [[5, 6, 6]]  # a copy of the first row is not another row
    assert list(scores.baselines) == ["marginal modes", "nearest other", "nearest of class"]
    assert scores.baselines["nearest of class"]["right"].isnan().tolist() == [[False, True, True]]
    assert scores.labels["matched"].tolist() == [1.0]
    assert "categorical" in str(scores)
    assert "120 dB" not in str(scores)


def test_numbers_are_compared_in_the_spread_of_other_people() -> None:
    wide = Field((2,), (-math.inf, math.inf))
    truth = torch.zeros(1, 1, 2)
    found = Found({"x": torch.tensor([[[3.0, 0.003]]])}, {"x": wide})
    spread = torch.tensor([[-10.0, -0.01], [10.0, 0.01]])  # standard deviations 10 and 0.01
    with_others = metrics.compare(found, {"x": truth}, gallery={"x": spread})
    assert with_others.values["right"].tolist() == [[1.0]]
    assert with_others.values["rmse"].tolist() == [[pytest.approx(0.3)]]
    alone = metrics.compare(found, {"x": truth})
    assert alone.values["right"].tolist() == [[0.5]]  # without others: in the unit of the model's input
    assert "recovered" not in alone.hits()


def test_what_is_not_finite_is_never_recovered() -> None:
    field = Field((2,), (-math.inf, math.inf))
    found = Found({"x": torch.tensor([[[math.nan, 0.0], [1.0, 1.0]]])}, {"x": field})
    truth = torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])  # NaN is scored as 0, which is right here
    gallery = {"x": torch.tensor([[5.0, 5.0], [7.0, 8.0]])}
    scores = metrics.compare(found, {"x": truth}, gallery=gallery)
    assert scores.values["right"].tolist() == [[1.0, 1.0]]
    assert scores.hits()["recovered"].tolist() == [[False, True]]
    assert scores.diverged.tolist() == [True]


def test_series_are_scored_by_their_correlation() -> None:
    time = torch.linspace(0, 6, 50)
    waves = torch.stack([torch.sin(time), torch.cos(3 * time)])[:, None]  # (2, 1, 50)
    field = Field((1, 50), (-1.0, 1.0), kind=Series())
    found = Found({"x": 0.5 * waves.flip(0)[None]}, {"x": field})
    others = torch.stack([torch.sin(k * time) for k in (2, 5, -2, -5)])[:, None]  # their mean is zero
    scores = metrics.compare(found, {"x": waves[None]}, gallery={"x": others})
    assert scores.assignment.tolist() == [[1, 0]]
    assert scores.hits()["correlation>0.9"].all()
    torch.testing.assert_close(scores.values["correlation"], torch.ones(1, 2, dtype=torch.float64), atol=0.1, rtol=0)


def test_a_course_that_all_series_share_is_no_correlation() -> None:
    trend, draws = torch.linspace(-9, 9, 50), torch.Generator().manual_seed(0)
    series = trend + torch.randn(6, 1, 50, generator=draws)
    field = Field((1, 50), (-math.inf, math.inf), kind=Series())
    found = Found({"x": (trend + torch.randn(1, 1, 50, generator=draws))[None]}, {"x": field})
    scores = metrics.compare(found, {"x": series[:1][None]}, gallery={"x": series[1:]})
    assert float(scores.values["correlation"]) < 0.7


def test_texts_of_different_numbers_of_examples() -> None:
    """Target 0 has two texts, target 1 one: the rest is padded with -1."""
    texts = Field((4,), classes=9, kind=Tokens(padding=0))
    truth = torch.tensor([[[1, 2, 3, 0], [4, 4, 5, 6]], [[7, 8, 1, 2], [-1, -1, -1, -1]]])
    found = Found({"x": torch.tensor([[[4, 5, 4, 6], [1, 2, 3, 0]], [[7, 8, 1, 3], [-1] * 4]])}, {"x": texts})
    found.examples = (2, 1)
    gallery = {"x": torch.tensor([[1, 1, 1, 1], [8, 2, 3, 4], [7, 8, 1, 2]])}
    scores = metrics.compare(found, {"x": truth}, gallery=gallery)
    assert scores.present.tolist() == [[True, True], [True, False]]
    assert scores.assignment.tolist() == [[1, 0], [0, 1]]
    assert scores.values["bag"][scores.present].tolist() == [1.0, 1.0, 0.75]
    assert scores.values["order"][scores.present].tolist() == [1.0, 0.5, 0.75]
    assert scores.hits()["exact"].tolist() == [[True, False], [False, False]]
    assert scores.hits()["exact but the last"].tolist() == [[True, False], [True, False]]
    assert scores.hits()["recovered"].tolist() == [[True, False], [False, False]]
    assert scores.gallery_size is not None
    assert scores.gallery_size[scores.present].tolist() == [4, 4, 3]
    assert list(scores.baselines) == ["most frequent", "nearest other"]
    assert json.loads(json.dumps(scores.summary()))["rates"]["whole bag"] == pytest.approx(2 / 3)


def test_further_private_fields_are_scored_by_their_kinds_in_the_order_of_x() -> None:
    truth = {
        "x": ROWS[None],
        "y": torch.tensor([[10.0, 20.0, 30.0]]),
        "mask": torch.tensor([[[0, 1], [1, 1], [2, 2]]]),
        "season": torch.tensor([[1.0, 2.0, 3.0]]),
    }
    fields = {
        "x": ROW,
        "y": Field((), (0.0, 100.0), kind=Value()),
        "mask": Field((2,), classes=3),
        "season": Field((), (0.0, 4.0), public=True),
    }
    order = [1, 2, 0]
    found = {name: value[:, order].clone() for name, value in truth.items()}
    found["y"][0, 0] += 40  # of private row 1
    found["mask"] = torch.eye(3)[found["mask"]]  # as probabilities
    scores = metrics.compare(Found(found, fields), truth)
    assert scores.labels == {}
    assert scores.further.keys() == {"y", "mask"}  # the server knows the season
    assert scores.further["y"]["right"].tolist() == [[1.0, 0.0, 1.0]]
    assert scores.further["mask"]["right"].tolist() == [[1.0, 1.0, 1.0]]
    assert scores.summary()["further"]["y"]["right"] == pytest.approx(2 / 3)
    assert "mask: right 1, iou 1" in str(scores)
    with pytest.raises(ValueError, match="y of the reconstruction is"):
        metrics.compare(Found({**found, "y": torch.zeros(1, 3, 2)}, fields), truth)


def test_only_images_have_lpips_and_named_distances() -> None:
    found = Found({"x": ROWS[None]}, {"x": ROW})
    with pytest.raises(ValueError, match="LPIPS compares images; x is of kind 'table'"):
        metrics.compare(found, {"x": ROWS[None]}, lpips=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Named distances compare images"):
        metrics.compare(found, {"x": ROWS[None]}, matching="ssim")
    with pytest.raises(ValueError, match=r"takes rows, batch\[\"x\"\] \(targets, examples, 5\)"):
        metrics.compare(Found({"x": ROWS}, {"x": ROW}), {"x": ROWS})
    last = metrics.compare(found, {"x": ROWS[None]}, matching=lambda first, second: -torch.cdist(first, second))
    assert last.assignment.tolist() != [[0, 1, 2]]  # a distance of one's own is used, even a perverse one
