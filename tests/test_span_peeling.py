"""Peeling: maps of earlier layers from those of a deep one, in spite of errors and of ReLUs that are taken wrongly."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, unfold

import gradleak as gl
from conftest import normal, uniform
from gradleak.attacks.spans.anchor import classified, rescaled, scaled_by_bias
from gradleak.attacks.spans.equations import Frontier, LeastSquares, System, equations, spoilt, wrong_relus
from gradleak.attacks.spans.passes import Network
from gradleak.attacks.spans.peeling import noise_of, peel, zeros_end
from gradleak.core.tree import Params
from gradleak.scenario.task import Batch, Task

GRADIENT = gl.LocalTraining(lr=1.0)
LAYERS = ("2", "4", "6")


@cache
def net() -> Task:
    """Four convolutions on 3 x 8 x 8: maps of 16, 48 and 48 channels on 4 x 4 places."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 48, 3, padding=1), nn.ReLU(),
            nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
            nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5),
        )  # fmt: skip
    like = (torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model.double().eval(), cross_entropy, like=like)


def pictures(examples: int) -> Batch:
    coarse = uniform(examples, 3, 4, 4, seed=3)
    return {"x": interpolate(coarse, size=(8, 8), mode="bicubic").clamp(0, 1), "y": torch.arange(examples)}


def update_of(batch: Batch) -> Params:
    return gl.observe(net(), batch, GRADIENT, key="target").update


def network() -> Network:
    return Network.of(net(), net().weights(), None, LAYERS)


def true_maps(batch: Batch) -> Params:
    return net().inputs_of(LAYERS, net().weights(), batch)


def off(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize("examples", [1, 2])
def test_maps_are_peeled_layer_by_layer(examples: int) -> None:
    batch = pictures(examples)
    true = true_maps(batch)
    found, _ = peel(network(), update_of(batch), "6", true["6"])
    assert [known.layers for known in found] == [("4",), ("2",)]
    assert max(off(known.maps, true[known.layers[0]]) for known in found) < 1e-8


@pytest.mark.parametrize("keep", [0.9, 0.3])
def test_entries_that_were_not_sent_are_no_equations(keep: float) -> None:
    batch = pictures(1)
    true, update = true_maps(batch), update_of(batch)
    sent = {name: uniform(*u.shape, seed=5) < keep for name, u in update.items()}
    part = classified(network(), {n: torch.where(sent[n], u, torch.nan) for n, u in update.items()}, "6", true["6"])
    found, _ = peel(network(), part, "6", true["6"])
    assert [known.layers for known in found] == [("4",), ("2",)]
    assert max(off(known.maps, true[known.layers[0]]) for known in found) < 1e-8


def test_with_too_few_entries_nothing_is_peeled() -> None:
    batch = pictures(1)
    maps, update = true_maps(batch)["6"], update_of(batch)
    few = {n: torch.where(uniform(*u.shape, seed=5) < 0.03, u, torch.nan) for n, u in update.items()}
    assert peel(network(), classified(network(), few, "6", maps), "6", maps) == ([], None)


@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("examples", [1, 2])
def test_known_maps_tell_the_classifiers_gradient(examples: int, keep: float) -> None:
    """By the entries that were sent, or by the gradient of the layer itself."""
    batch = pictures(examples)
    update, name = update_of(batch), f"{network().classifier}.weight"
    part = {**update, name: torch.where(uniform(*update[name].shape) < keep, update[name], torch.nan)}
    assert off(classified(network(), part, "6", true_maps(batch)["6"])[name], update[name]) < 1e-8
    assert classified(network(), update, "6", true_maps(batch)["6"]) is update


def test_no_more_maps_are_peeled_than_are_asked_for() -> None:
    batch = pictures(1)
    found, frontier = peel(network(), update_of(batch), "6", true_maps(batch)["6"], most=1)
    assert [known.layers for known in found] == [("4",)]
    assert frontier is None


def test_nothing_is_peeled_where_no_example_is_told() -> None:
    batch = pictures(1)
    assert peel(network(), update_of(batch), "6", torch.zeros_like(true_maps(batch)["6"])) == ([], None)


def test_a_lost_example_does_not_reach_the_others() -> None:
    """Its part of the gradient is noise: here it has none, since nothing of it was on."""
    batch = pictures(2)
    alone = {name: value[:1] for name, value in batch.items()}
    maps = torch.cat([true_maps(alone)["6"], torch.zeros_like(true_maps(alone)["6"])])
    found, _ = peel(network(), update_of(alone), "6", maps)
    assert off(found[0].maps[:1], true_maps(alone)["4"]) < 1e-8
    assert not found[0].maps[1].any()


@pytest.mark.parametrize("factor", [1 - 1e-3, 1 + 1e-4])
def test_the_maps_below_correct_the_scale(factor: float) -> None:
    batch = pictures(1)
    true = true_maps(batch)["6"]
    assert off(rescaled(network(), update_of(batch), "6", factor * true, {}), true) < 1e-2 * abs(factor - 1)


def test_a_scale_that_is_far_off_is_left_as_it_is() -> None:
    batch = pictures(1)
    wrong = 1.02 * true_maps(batch)["6"]
    torch.testing.assert_close(rescaled(network(), update_of(batch), "6", wrong, {}), wrong)


@pytest.mark.parametrize("factors", [(0.01,), (0.01, 300.0)])
def test_without_biases_behind_them_the_classifiers_bias_tells_the_scale(factors: tuple[float, ...]) -> None:
    """Spans are the same at every scale there, as in an untrained network."""
    task, batch = net().copied(), pictures(len(factors))
    for name in LAYERS:
        nn.init.zeros_(task.model.get_parameter(f"{name}.bias"))
    update = gl.observe(task, batch, GRADIENT, key="target").update
    true = task.inputs_of(LAYERS, task.weights(), batch)["4"]
    wrong = torch.tensor(factors).double().view(-1, 1, 1, 1) * true
    untrained = Network.of(task, task.weights(), None, LAYERS)
    assert off(scaled_by_bias(untrained, "4", wrong, update), true) < 1e-8
    unsent = {name: value for name, value in update.items() if name != f"{untrained.classifier}.bias"}
    torch.testing.assert_close(scaled_by_bias(untrained, "4", wrong, unsent), wrong)


def test_with_biases_behind_them_spans_tell_the_scale() -> None:
    wrong = 1.02 * true_maps(pictures(1))["4"]
    torch.testing.assert_close(scaled_by_bias(network(), "4", wrong, update_of(pictures(1))), wrong)


def test_zeros_end_before_the_largest_gap() -> None:
    zeros = torch.tensor([-1e-6, 1e-6, 2e-6, 4e-6])  # errors above zero are larger than those below
    values = torch.cat([zeros, torch.tensor([1e-4, 0.5, 1.0])]).view(1, -1, 1, 1)
    assert float(zeros_end(values)) == pytest.approx(4e-6)
    assert int((values > zeros_end(values)).sum()) == 3


def test_without_a_gap_zeros_end_with_the_largest_below_zero() -> None:
    values = torch.tensor([-1e-2, 2e-2, 4e-2, 8e-2, 0.16, 0.25, 1.0]).view(1, -1, 1, 1)
    assert float(zeros_end(values)) == pytest.approx(1e-2)


def test_noise_is_that_of_each_place() -> None:
    """Where a place is told badly, its zeros reach further."""
    noise = normal(1, 64, 2, 2, seed=7) * torch.tensor([[1e-4, 1e-4], [1e-4, 1e-2]])
    on = torch.rand(1, 64, 2, 2, generator=torch.Generator().manual_seed(8)) < 0.3
    values = noise + on
    measured = noise_of(values)
    assert float(measured[0, 0, 1, 1]) > 2 * float(measured[0, 0, 0, 0])
    assert torch.equal(values > zeros_end(values), on)


@pytest.mark.parametrize(("equations", "fixes"), [(479, False), (480, True)])
def test_a_frontier_is_used_where_it_has_more_equations_than_its_images_have_numbers(
    equations: int, fixes: bool
) -> None:
    """Two images of 3 x 8 x 8, seen through maps of fewer places: 1.25 equations for each of 384 numbers."""
    frontier = Frontier("2", torch.zeros(equations, 2, 16), torch.zeros(equations, 1), torch.ones(2))
    assert frontier.fixes(3 * 8 * 8) is fixes


# --- outputs with a wrong ReLU ----------------------------------------------------------------------------------------

OUTPUTS, TAPS, UNKNOWNS = 12, 9, 80


def system_of(wrong: tuple[int, ...], unknowns: int = UNKNOWNS, noise: float = 0.0) -> LeastSquares:
    """108 equations for 80 unknowns, in outputs of 9; those of some outputs are off."""
    matrix = normal(OUTPUTS * TAPS, unknowns, seed=0).double()
    right = matrix @ normal(unknowns, 4, seed=1).double() + noise * normal(OUTPUTS * TAPS, 4, seed=20).double()
    for output in wrong:
        right[output * TAPS : (output + 1) * TAPS] += normal(TAPS, 4, seed=2 + output).double()
    return LeastSquares.of(matrix, right, matrix.new_ones(len(matrix), 1))


@pytest.mark.parametrize("wrong", [(5,), (2, 9)])
def test_the_outputs_that_contradict_the_others_are_named(wrong: tuple[int, ...]) -> None:
    fit = system_of(wrong)
    assert sorted(spoilt(fit, [TAPS] * OUTPUTS).tolist()) == list(wrong)
    kept = torch.ones(OUTPUTS).double().index_fill(0, torch.tensor(wrong), 0.0).repeat_interleave(TAPS)[:, None]
    cleaned = LeastSquares.of(fit.matrix, fit.right, kept)
    assert off(cleaned.solution, normal(UNKNOWNS, 4, seed=1).double()) < 1e-8 < off(fit.solution, cleaned.solution)


def test_none_is_left_out_where_all_agree_or_too_many_do_not() -> None:
    assert not len(spoilt(system_of(()), [TAPS] * OUTPUTS))
    assert not len(spoilt(system_of((0, 2, 4, 6, 8)), [TAPS] * OUTPUTS))


@pytest.mark.parametrize(("unknowns", "taps"), [(80, TAPS), (81, TAPS), (80, 1)])
def test_noise_is_no_wrong_relu(unknowns: int, taps: int) -> None:
    """Though without some outputs there would be none: then the others have no equations to spare."""
    fit = system_of((), unknowns, noise=1e-4)
    assert not len(spoilt(fit, [taps] * (OUTPUTS * TAPS // taps)))


def test_layers_of_different_kernels_may_see_one_map() -> None:
    fit = system_of(())
    right = fit.right.clone()
    right[90:99] += normal(9, 4, seed=3).double()
    fit = LeastSquares.of(fit.matrix, right, fit.weights)
    assert spoilt(fit, [TAPS] * 11 + [1] * 9).tolist() == [10]


def test_scarce_equations_are_solved_without_what_a_wrong_relu_spoils() -> None:
    """16 x 9 equations for 121 unknowns: too few to weigh them, enough to leave one output out."""
    layer = nn.Conv2d(3, 16, 3, padding=1).double()
    delta, maps = normal(1, 16, 11, 11, seed=4).double(), uniform(1, 3, 11, 11, seed=5).double()
    patches = unfold(maps, 3, padding=1)[0]  # (3 x 9, places)
    gradient = (delta.flatten(2)[0] @ patches.T).reshape(layer.weight.shape)
    system = System([layer], [gradient], maps.shape)
    assert not system.overdetermined
    torch.testing.assert_close(equations(delta, layer, maps.shape) @ maps.flatten(2)[0].T, system._right)
    wrong = delta.clone()
    wrong[0, 7, 3, 3] += 1.0
    solved = system.solve([wrong])
    assert solved is not None
    assert not len(solved.free)
    assert off(solved.maps, maps) < 1e-6


def test_relus_of_neighbouring_places_are_found_together() -> None:
    """Their patches are nearly the same: one by one, the first to be turned over would be the wrong one."""
    layer = nn.Conv2d(24, 6, 3, padding=1).double()
    smooth = interpolate(uniform(1, 24, 2, 2, seed=9).double(), size=(6, 6), mode="bilinear", align_corners=True)
    maps = smooth + 1e-2 * normal(1, 24, 6, 6, seed=10).double()
    every, on = normal(1, 6, 6, 6, seed=11).double(), normal(1, 6, 6, 6, seed=12) > 0
    patches = unfold(maps, 3, padding=1)[0]
    gradient = ((every * on).flatten(2)[0] @ patches.T).reshape(layer.weight.shape)
    gradient = gradient + 1e-6 * normal(*gradient.shape, seed=13).double()
    wrong = torch.zeros_like(on)
    wrong[0, 2, 0, 1:4] = True
    taken, spare = on ^ wrong, torch.eye(9).double().expand(6, 9, 9)
    found = wrong_relus(layer, gradient, every * taken, (every, taken, torch.ones_like(on)), maps, spare)
    assert torch.equal(found, wrong)


def test_too_many_doubts_are_not_decided_at_once() -> None:
    """As many entries as the layer has numbers: any choice would explain the gradient."""
    layer = nn.Conv2d(2, 4, 3, padding=1).double()
    maps, every = uniform(1, 2, 8, 8, seed=14).double(), normal(1, 4, 8, 8, seed=15).double()
    on = normal(1, 4, 8, 8, seed=16) > 0
    gradient = ((every * on).flatten(2)[0] @ unfold(maps, 3, padding=1)[0].T).reshape(layer.weight.shape)
    taken = on.clone()
    taken[0, 1, 4, 4] ^= True
    spare = torch.eye(9).double().expand(4, 9, 9)
    found = wrong_relus(layer, gradient, every * taken, (every, taken, torch.ones_like(on)), maps, spare)
    assert torch.equal(found, on ^ taken)


@pytest.mark.parametrize(("examples", "share"), [(1, 1e-2), (2, 3e-3)])
def test_wrong_relus_are_found_while_maps_are_peeled(examples: int, share: float) -> None:
    """Noise makes some entries seem on or off: those of the maps below do not follow from it."""
    batch = pictures(examples)
    true = true_maps(batch)
    noise = normal(*true["6"].shape, seed=17).double() * true["6"].square().mean().sqrt() * share
    wrong = ((true["6"] + noise) > zeros_end(true["6"] + noise)) != (true["6"] > 0)
    assert bool(wrong.any())
    found, _ = peel(network(), update_of(batch), "6", true["6"] + noise, most=1)
    assert off(found[0].maps, true["4"]) < share
    assert found[0].unexplained < 1e-4
