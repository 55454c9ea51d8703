"""`span` against clients whose BatchNorm is in training mode: every example alone, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import normal
from gradleak.attacks.spans import maps
from gradleak.attacks.spans.classifiers import Span
from gradleak.attacks.spans.maps import solve_maps
from gradleak.attacks.spans.norms import in_evaluation, normed_layers, training_norms, with_batch_statistics
from gradleak.attacks.spans.passes import Network
from gradleak.attacks.spans.peeling import peel
from gradleak.attacks.spans.telling import layers_of, span_of, told_by
from gradleak.core.random import Draws, key
from gradleak.parts.predictions import gradient
from gradleak.parts.view import TargetView
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.observation import Observation, Track
from gradleak.scenario.task import Batch, Task, TaskError

KNOWS = gl.Knowledge(training=gl.LocalTraining(lr=0.5))
CLASSES, WIDTH, EXAMPLES = 5, 64, 3
LAYERS = ("0", "3", "6", "9")


@cache
def net(momentum: float | None = 0.1, affine: bool = True, stride: int = 1) -> Task:
    """Four convolutions on 3 x 8 x 8, each with BatchNorm and ReLU; all but the first see maps of 4 x 4."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)

        def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
            norm = nn.BatchNorm2d(outputs, momentum=momentum, affine=affine)
            norm.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
            norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            if affine:
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.uniform_(norm.bias, -0.5, 0.3)
            return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), norm, nn.ReLU()]

        model = nn.Sequential(
            *block(3, 16, 2), *block(16, WIDTH, stride), *block(WIDTH, WIDTH, 1), *block(WIDTH, WIDTH, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip
    like = (torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    return gl.Task.supervised(model.double().train(), cross_entropy, like=like)


def private() -> Batch:
    return {"x": 3 * normal(EXAMPLES, 3, 8, 8), "y": torch.tensor([0, 1, 3])}


def seen(task: Task) -> Observation:
    assert KNOWS.training is not None
    return gl.observe(task, private(), KNOWS.training, key="target")


def alone(task: Task) -> TargetView:
    """The target in evaluation mode, with the statistics of its batch."""
    return TargetView.of(in_evaluation(task), with_batch_statistics(task, Track((seen(task),)), KNOWS), KNOWS)


def network(task: Task, layers: tuple[str, ...] = LAYERS) -> Network:
    scene = alone(task)
    network = Network.of(scene.task, scene.weights, scene.buffers, layers)
    return network.with_norms(gradient(scene), training_norms(task.model), EXAMPLES)


def true_maps(task: Task) -> dict[str, Tensor]:
    caught = task.inputs_of(LAYERS, task.weights(), private())
    return {name: value.detach() for name, value in caught.items()}


def error(found: Tensor, true: Tensor) -> float:
    """Of the worst of these maps, relative; in any order."""
    return float((torch.cdist(found.flatten(1), true.flatten(1)) / true.flatten(1).norm(dim=1)).min(0).values.max())


def test_every_example_alone_gives_what_the_batch_gave() -> None:
    task, scene, batch = net(), alone(net()), private()
    truth = true_maps(task)
    for row in range(EXAMPLES):
        single = {name: value[row : row + 1] for name, value in batch.items()}
        caught = scene.task.inputs_of(LAYERS, scene.weights, single, scene.buffers)
        for name, true in truth.items():
            torch.testing.assert_close(caught[name], true[row : row + 1])


def test_the_model_itself_stays_in_training_mode() -> None:
    task = net()
    before = task.buffers()
    alone(task)
    assert training_norms(task.model) == ("1", "4", "7", "10")
    for name, value in task.buffers().items():
        torch.testing.assert_close(value, before[name])


def test_deltas_are_those_of_the_whole_batch() -> None:
    task, batch, outputs = net(), private(), dict[str, Tensor]()
    handles = [
        task.model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
        for name in LAYERS
    ]
    weights = {name: value.requires_grad_() for name, value in task.weights().items()}
    true = torch.autograd.grad(task.loss(weights, batch)[0], [outputs[name] for name in LAYERS])
    for handle in handles:
        handle.remove()
    one = network(task)
    done = one.run({**batch, "x": batch["x"].requires_grad_()}, {})
    for delta, expected in zip(one.deltas(done, LAYERS, gradient(alone(task))), true, strict=True):
        torch.testing.assert_close(delta, expected)


def test_convolutions_before_a_norm_are_found() -> None:
    assert normed_layers(in_evaluation(net()), ("4", "10")) == {"3": "4", "9": "10"}


@pytest.mark.parametrize("name", LAYERS[1:])
def test_the_maps_follow_from_differences_of_patches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "SETTLED", 0.0)
    task, scene = net(), alone(net())
    layer = scene.task.model.get_submodule(name)
    assert isinstance(layer, nn.Conv2d)
    rows, shape = EXAMPLES * 16 - 1, tuple(true_maps(task)[name].shape[1:])
    span = span_of(gradient(scene)[f"{name}.weight"], rows, 1e-12)
    assert len(span) == rows
    found = solve_maps(layer, span, shape, EXAMPLES, Draws(key("maps")), rows, centred=True)
    assert found.determined
    true = true_maps(task)[name].flatten(1)
    assert float((true - (true @ found.basis.T) @ found.basis).norm() / true.norm()) < 1e-8
    plain = solve_maps(layer, span, shape, EXAMPLES, Draws(key("maps")))
    assert plain.examples < EXAMPLES  # the mean of the patches does not lie in the span: differences of maps alone do


def test_maps_are_peeled_layer_by_layer() -> None:
    task, one = net(), network(net())
    found, frontier = peel(one, gradient(alone(task)), "9", true_maps(task)["9"])
    assert [known.layers for known in found] == [("6",), ("3",)]
    assert frontier is None
    for known in found:
        assert error(known.maps, true_maps(task)[known.layers[0]]) < 1e-6
        assert known.unexplained < 1e-12


def test_told_by_an_update_alone() -> None:
    told = told_by(alone(net()), 5, 1e-12, Draws(key("")), training_norms(net().model))
    assert all(line["rank"] == line["rows"] == EXAMPLES * 16 - 1 for line in told.record)
    assert {"6", "9"} <= set(told.own)
    for name, own in told.own.items():
        assert error(own, true_maps(net())[name]) < 1e-4


def test_statistics_that_did_not_come_back() -> None:
    task = net()
    with pytest.raises(TaskError, match="did not come back"):
        Span(steps=3).run(task, replace(seen(task), returned_buffers=None), KNOWS)


def test_a_client_of_several_steps() -> None:
    training = gl.LocalTraining(lr=0.5, steps=2)
    target = gl.observe(net(), private(), training)
    with pytest.raises(TaskError, match="made 2 steps"):
        Span(steps=3).run(net(), target, gl.Knowledge(training=training))


@pytest.mark.parametrize(
    ("task", "why"), [(net(momentum=None), "fixed momentum"), (net(affine=False), "scale and shift")]
)
def test_norms_that_tell_no_statistics(task: Task, why: str) -> None:
    with pytest.raises(UnsupportedTask, match=why):
        Span(steps=3).run(task, seen(task), KNOWS)


def test_images_are_searched_for_and_the_client_is_replayed_in_training_mode() -> None:
    task = net()
    found = Span(steps=30, repairs=0, fine_steps=0).run(task, seen(task), KNOWS)
    assert found.settings["apart"] == [EXAMPLES]
    assert found.batch["x"].shape == (1, EXAMPLES, 3, 8, 8)
    assert bool(found.match.isfinite().all())
    assert training_norms(task.model)
    assert layers_of(task, EXAMPLES)
