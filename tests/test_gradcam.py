"""Grad-CAM: which tensor is a feature map, how channels are weighed, and when two explanations are alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import CLASSES, SHAPE, largest_difference, network, perceptron, private, tiny
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.curvature import gradcam as fidelity
from gradleak.defences import gradcam
from gradleak.scenario.task import Batch, Task, TaskError


def task_of(model: nn.Module, shape: tuple[int, ...] = SHAPE) -> Task:
    like = (torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))
    return Task.supervised(model.double(), cross_entropy, like=like)


def source(*names: object) -> Draws:
    return Draws(draws.key("gradcam", *names))


def by_hand(task: Task, batch: Batch) -> tuple[Tensor, Tensor]:
    """alpha and feature maps of the tiny network, example by example with plain autograd."""
    convolution, *between, flatten, linear = task.model.eval()
    alphas, maps = [], []
    for x, y in zip(batch["x"], batch["y"], strict=True):
        held = convolution(x[None])
        for module in between:
            held = module(held)
        [slope] = torch.autograd.grad(linear(flatten(held))[0, y], held)
        alphas.append(slope[0].mean((-2, -1)))
        maps.append(held[0].detach())
    return torch.stack(alphas), torch.stack(maps)


# --- feature maps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "module"), [(None, "1"), ("eval", "2"), ("train", "2")])
def test_a_feature_map_is_what_normalisation_and_activation_leave_of_it(norm: str | None, module: str) -> None:
    assert gradcam.features(tiny(norm=norm)) == {"0": gradcam.Feature(module, 0, (4, 2, 2))}


def test_in_a_residual_block_the_last_map_is_the_one_before_the_addition() -> None:
    model = gl.models.resnet((1,), 8, shape=(1, 8, 8), classes=CLASSES, generator=torch.Generator().manual_seed(0))
    found = gradcam.features(task_of(model, (1, 8, 8)))
    assert {name: feature.module for name, feature in found.items()} == {
        "features.0": "features.2",  # convolution, BatchNorm, ReLU
        "features.3.body.0": "features.3.body.2",
        "features.3.body.3": "features.3.body.4",  # BatchNorm: what follows is no module
    }


class Shared(nn.Module):
    """One activation module in two places, in place, and a function where a third would be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(i, 2, 3, padding=1) for i in (1, 2, 2))
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.first(x))
        h = self.activation(self.second(h))
        return self.head(F.relu(self.third(h)).flatten(1))


def test_a_module_used_twice_gives_two_maps_and_a_function_none() -> None:
    found = gradcam.features(task_of(Shared()))
    assert [(feature.module, feature.call) for feature in found.values()] == [
        ("activation", 0),
        ("activation", 1),
        ("third", 0),
    ]


def test_frozen_convolutions_are_left_out() -> None:
    model = Shared()
    model.second.requires_grad_(False)
    assert set(gradcam.features(task_of(model))) == {"first", "third"}


def test_a_network_without_convolutions_is_told_so() -> None:
    with pytest.raises(TaskError, match=r"no trained nn\.Conv2d"):
        gradcam.heat_maps(perceptron(), perceptron().weights(), private(1))


# --- channels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, "eval"])
@pytest.mark.parametrize("absolute", [False, True])
def test_the_importance_of_a_channel_is_the_mean_slope_of_the_own_logit(norm: str | None, absolute: bool) -> None:
    task, batch = tiny(norm=norm), private(3)
    alphas, _ = by_hand(task, batch)
    expected = (alphas.abs() if absolute else alphas).mean(0)
    found = gradcam.channel_importance(task, task.weights(), batch, torch.ones(3), absolute=absolute)
    assert largest_difference(found["0"], expected) < 1e-15


def test_examples_that_were_not_chosen_do_not_count() -> None:
    task, batch = tiny(), private(5)
    chosen = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    alphas, _ = by_hand(task, batch)
    found = gradcam.channel_importance(task, task.weights(), batch, chosen)
    assert largest_difference(found["0"], alphas[[1, 4]].mean(0)) < 1e-15


def test_every_layer_comes_out_of_one_pass_under_a_shared_activation() -> None:
    """Against slopes with respect to a constant shift of each map, by differences."""
    model = Shared()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.uniform_(parameter, 0.01, 0.3)  # all positive: no kink near
    task, batch = task_of(model), private(1)
    found = gradcam.channel_importance(task, task.weights(), batch, torch.ones(1))
    step = 1e-5
    for name, importance in found.items():
        for channel in range(2):
            shift = torch.zeros(2).double()
            shift[channel] = step
            # Before a ReLU that passes everything a shift of the bias is a shift of the map.
            weights = task.weights()
            weights[f"{name}.bias"] = weights[f"{name}.bias"] + shift
            rise = task.call(weights)(batch["x"])[0, 0] - task.call(task.weights())(batch["x"])[0, 0]
            assert float(rise) / step / 16 == pytest.approx(float(importance[channel]), rel=1e-6)


def test_one_example_of_every_class_that_is_present_guides() -> None:
    y = torch.tensor([2, 0, 2, 2, 0])
    seen = set()
    for number in range(30):
        chosen = gradcam.guidance({"y": y}, source(number))
        assert sorted(y[chosen > 0].tolist()) == [0, 2]
        seen |= set(chosen.nonzero().flatten().tolist())
    assert seen == {0, 1, 2, 3, 4}  # any of them may


def test_the_released_codes_guidance_is_a_single_example() -> None:
    assert all(gradcam.guidance({"y": torch.tensor([2, 0, 1])}, source(n), single=True).sum() == 1 for n in range(10))


def test_label_distributions_count_as_their_largest_class() -> None:
    soft = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert gradcam.guidance({"y": soft}, source()).tolist() == [1, 1]


def test_clients_together_are_clients_alone() -> None:
    task = tiny(norm="eval")
    batches = [private(4, seed=seed) for seed in range(3)]
    weights = [tree.scale(task.weights(), factor) for factor in (1.0, 0.5, 2.0)]
    keys = torch.stack([draws.key("lane", number) for number in range(3)])

    def one(weights: tree.Params, batch: Batch, key: Tensor) -> Tensor:
        chosen = gradcam.guidance(batch, Draws(key))
        return gradcam.channel_importance(task, weights, batch, chosen)["0"]

    stacked = lambda trees: tree.map(lambda *leaves: torch.stack(leaves), *trees)  # noqa: E731
    together = vmap(one)(stacked(weights), stacked(batches), keys)
    alone = torch.stack([one(w, b, k) for w, b, k in zip(weights, batches, keys, strict=True)])
    assert largest_difference(together, alone) < 1e-15


def test_the_model_is_left_as_it_was() -> None:
    task, batch = tiny(norm="train"), private(3)
    before = tree.detach(dict(task.model.state_dict()))
    gradcam.channel_importance(task, task.weights(), batch, torch.ones(3))
    gradcam.heat_maps(task, task.weights(), batch)
    assert all(module.training for module in task.model.modules())
    assert not any(module._forward_hooks for module in task.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())


def test_a_task_without_labels_is_told_so() -> None:
    with pytest.raises(TaskError, match="needs labels"):
        gradcam.guidance({"x": torch.zeros(1)}, source())


# --- maps -------------------------------------------------------------------------------------------------------------


def test_a_heat_map_is_the_rectified_sum_enlarged_and_divided_by_its_largest_value() -> None:
    task, batch = tiny(), private(3)
    alphas, maps = by_hand(task, batch)
    raw = (alphas[:, :, None, None] * maps).sum(1, keepdim=True).clamp_min(0)
    full = F.interpolate(raw, size=(4, 4), mode="bilinear", align_corners=False)[:, 0]
    found = gradcam.heat_maps(task, task.weights(), batch)
    assert (raw.flatten(1).amax(1) > 0).any()
    for one, expected in zip(found, full, strict=True):
        assert largest_difference(one, expected / expected.max() if expected.max() > 0 else expected) < 1e-14


def test_a_network_in_training_mode_is_explained_in_evaluation_mode() -> None:
    """With its running statistics, or those that are given."""
    batch, quiet, trained = private(3), tiny(norm="eval"), tiny(norm="train")
    weights = {**quiet.weights(), "4.weight": quiet.weights()["4.weight"].abs()}  # every channel speaks for all classes
    maps = gradcam.heat_maps(trained, weights, batch)
    assert maps.flatten(1).amax(1).tolist() == [1, 1, 1]
    assert largest_difference(maps, gradcam.heat_maps(quiet, weights, batch)) == 0
    other = {**trained.buffers(), "1.running_mean": trained.buffers()["1.running_mean"] + 1}
    assert largest_difference(maps, gradcam.heat_maps(trained, weights, batch, buffers=other)) > 1e-3


def test_a_map_of_zeros_stays_zero() -> None:
    task, batch = tiny(), private(2)
    weights = {**task.weights(), "3.weight": -task.weights()["3.weight"].abs()}  # no channel speaks for any class
    found = gradcam.heat_maps(task, weights, batch)
    assert found.shape == (2, 4, 4)
    assert torch.equal(found, torch.zeros_like(found))


def test_the_class_to_explain_can_be_given() -> None:
    task, batch = tiny(), private(3)
    other = (batch["y"] + 1) % CLASSES
    given = gradcam.heat_maps(task, task.weights(), batch, target=other)
    assert largest_difference(given, gradcam.heat_maps(task, task.weights(), {**batch, "y": other})) == 0
    assert largest_difference(given, gradcam.heat_maps(task, task.weights(), batch)) > 1e-3


def test_an_unknown_layer_is_answered_with_the_known_ones() -> None:
    with pytest.raises(TaskError, match="Available: 0"):
        gradcam.heat_maps(tiny(), tiny().weights(), private(1), layer="conv9")


# --- fidelity ---------------------------------------------------------------------------------------------------------


def test_a_model_explains_itself_perfectly() -> None:
    task, batch = tiny(), private(3)
    same = fidelity.fidelity(task, task.weights(), task.weights(), batch).means()
    assert same["mse"] == same["overlay_mse"] == 0
    assert same["psnr"] == same["overlay_psnr"] == 120
    assert same["ssim"] == same["top_overlap"] == pytest.approx(1)
    assert same["rank_correlation"] == pytest.approx(1)


def test_another_model_explains_otherwise() -> None:
    task, batch = tiny(), private(3)
    found = fidelity.fidelity(task, task.weights(), tiny(seed=1).weights(), batch).means()
    assert found["mse"] > 0.01
    assert found["rank_correlation"] < 0.9


def test_the_photograph_beneath_makes_unlike_maps_look_alike() -> None:
    first, second = source("maps").uniform((2, 4, 16, 16), dtype=torch.float64)
    photographs = source("photographs").uniform((4, 3, 16, 16), dtype=torch.float64)
    found = fidelity.compare(first, second, photographs)
    assert (found.overlay_ssim > found.ssim + 0.05).all()
    expected = 10 * (255**2 / found.overlay_mse).log10()
    assert largest_difference(found.overlay_psnr, expected) < 1e-12


def test_both_models_explain_the_same_class() -> None:
    """The defended model's own decision does not enter: only its weights do."""
    task, batch = tiny(), private(3)
    target = torch.tensor([2, 2, 2])
    whole = fidelity.fidelity(task, task.weights(), tiny(seed=1).weights(), batch, target=target)
    maps = [
        gradcam.heat_maps(task, weights, batch, target=target) for weights in (tiny(seed=1).weights(), task.weights())
    ]
    assert largest_difference(whole.mse, (maps[0] - maps[1]).square().mean((-2, -1))) < 1e-15


def test_rank_correlation_is_spearmans_with_ties() -> None:
    values = source("ranks").uniform((2, 3, 40), dtype=torch.float64)
    first, second = (values * 8).round().unbind()  # many ties
    second[0] = first[0].square()  # a monotone map keeps every rank
    found = fidelity.rank_correlation(first, second)
    expected = [spearmanr(a, b).statistic for a, b in zip(first.numpy(), second.numpy(), strict=True)]
    assert found.tolist() == pytest.approx(expected)
    assert found[0] == pytest.approx(1)


def test_a_constant_map_has_no_rank_correlation() -> None:
    assert fidelity.rank_correlation(torch.zeros(1, 5), torch.arange(5.0)[None]).isnan().all()


def test_the_top_fifth_of_the_pixels_overlap_by_how_many_they_share() -> None:
    rising = torch.arange(1.0, 11.0)[None]  # top two: the last two places
    shifted = rising.roll(1)  # top two: the first and the last place
    assert fidelity.top_overlap(rising, shifted).item() == pytest.approx(1 / 3)
    nothing = torch.zeros(1, 10)
    assert fidelity.top_overlap(rising, nothing).item() == 0
    assert fidelity.top_overlap(nothing, nothing).item() == 1


def test_an_overlay_is_eight_bits_blue_where_the_map_is_low_and_red_where_it_is_high() -> None:
    black, maps = torch.zeros(1, 1, 1, 2), torch.tensor([[[0.0, 1.0]]])
    picture = fidelity.overlay(black, maps)
    assert picture.dtype == torch.uint8
    assert picture[0, :, 0, 0].tolist() == [0, 0, 255]
    assert picture[0, :, 0, 1].tolist() == [255, 0, 0]


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"given \(1, 4, 4\), \(1, 4, 4\), \(1, 3, 5, 4\)"):
        fidelity.compare(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), torch.zeros(1, 3, 5, 4))
    with pytest.raises(ValueError, match="1 or 3 channels"):
        fidelity.overlay(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4))


def test_networks_of_tests_are_what_the_hand_computation_assumes() -> None:
    assert [type(module).__name__ for module in network()] == ["Conv2d", "Sigmoid", "Flatten", "Linear"]
