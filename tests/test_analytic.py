"""Closed-form recovery from a first linear layer: exactness, batches, bounds, and what it says when it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradleak import Engine, Knowledge, LocalTraining, Observation, Reconstruction, Task, attacks, observe
from gradleak.core import registry
from gradleak.metrics import compare
from gradleak.models import lenet_zhu, mlp
from gradleak.parts.matches import Cosine
from gradleak.parts.predictions import Replay
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.task import TaskError

MNIST = {"mean": 0.1307, "std": 0.3081}
ONE_STEP = LocalTraining(lr=0.1)


def pictures(count: int, shape: tuple[int, int, int] = (1, 28, 28), seed: int = 0) -> Tensor:
    return torch.rand((count, *shape), generator=Generator().manual_seed(seed))


def attacked(
    model: nn.Module, x: Tensor, y: Tensor, training: LocalTraining = ONE_STEP, given: bool = False, **settings: Any
) -> tuple[Task, Observation, Reconstruction]:
    """Pictures in [0, 1] are normalised as MNIST is, observed and attacked."""
    task = Task.supervised(model, F.cross_entropy, like=(x, y), **MNIST)
    seen = observe(task, {"x": task.fields["x"].model(x), "y": y}, training)
    knows = Knowledge(training=training, given={"y": y} if given else {})
    return task, seen, attacks.get("analytic", **settings).run(task, seen, knows)


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "tanh"])
def test_one_example_is_exact_in_float32(activation: str) -> None:
    for seed in range(5):
        x, y = pictures(1, seed=seed), torch.tensor([seed])
        model = mlp(activation=activation, generator=Generator().manual_seed(seed))
        task, _, found = attacked(model, x, y)
        wanted = task.fields["x"].model(x)
        assert (found.batch["x"][0] - wanted).norm() / wanted.norm() < 1e-5
        assert found.batch["y"][0].tolist() == [seed]
        assert found.settings["exact"] == [1]
        assert found.settings["padded"] == [0]
        assert found.match.item() < 1e-9


def test_several_steps_on_one_example_are_exact_too() -> None:
    x, y = pictures(1), torch.tensor([3])
    _, _, found = attacked(mlp(generator=Generator().manual_seed(0)), x, y, LocalTraining(lr=0.05, steps=7))
    assert compare(found, {"x": (x - 0.1307) / 0.3081, "y": y}).psnr.item() > 100


@pytest.mark.parametrize("examples", [2, 4, 8])
def test_a_batch_through_rectifiers(examples: int) -> None:
    x, y = pictures(examples), torch.arange(examples)[torch.randperm(examples, generator=Generator().manual_seed(1))]
    model = mlp(widths=(2000,), generator=Generator().manual_seed(examples))
    _, _, found = attacked(model, x, y)
    scores = compare(found, {"x": (x - 0.1307) / 0.3081, "y": y})
    assert scores.psnr.min() > 60
    assert scores.labels["matched"].item() == 1  # every image beside its own label, and so ...
    assert found.match.item() < 1e-6  # ... the replay agrees
    assert found.settings["exact"] == [examples]


def test_pixels_at_the_ends_of_the_range_count_as_inside() -> None:
    """Rounding puts black and white a little outside; such pictures are no mixtures."""
    x, y = pictures(2).round(), torch.tensor([0, 1])
    _, _, found = attacked(mlp(widths=(2000,), generator=Generator().manual_seed(2)), x, y)
    assert found.settings["exact"] == [2]
    assert found.settings["padded"] == [0]


def test_mixtures_are_not_called_exact() -> None:
    """A sigmoid is never off, so every row of a batch is a mixture."""
    model = mlp(widths=(1000,), activation="sigmoid", generator=Generator().manual_seed(0))
    for examples in (2, 4):
        _, _, found = attacked(model, pictures(examples), torch.arange(examples))
        assert found.settings["exact"] == [0]
        assert found.match.item() > 1e-3


def test_the_match_is_that_of_the_replay() -> None:
    task, seen, found = attacked(mlp(generator=Generator().manual_seed(0)), pictures(3), torch.tensor([1, 1, 2]))
    scene = TargetView.of(task, seen, Knowledge(training=ONE_STEP))
    replay, cosine = Replay(), Cosine()
    predicted = replay({name: value[0] for name, value in found.batch.items()}, {}, scene, Step(torch.zeros(()), 1))
    expected = cosine.reduce(cosine.residual(predicted, cosine.prepare(replay.target(scene))))
    assert found.match.item() == pytest.approx(float(expected), rel=1e-3, abs=1e-9)


def test_what_is_missing_is_grey_and_said_to_be() -> None:
    """Two neurons cannot tell five examples apart."""
    model = mlp(widths=(2,), activation="sigmoid", generator=Generator().manual_seed(0))
    task, _, found = attacked(model, pictures(5), torch.arange(5))
    missing = found.settings["padded"][0]
    grey = (found.batch["x"][0] == task.blank()["x"][0]).flatten(1).all(1)
    assert 3 <= missing == int(grey.sum())
    assert found.match.isfinite().all()


def test_no_active_neuron_gives_grey() -> None:
    model = mlp(generator=Generator().manual_seed(0))
    with torch.no_grad():
        model.features[1].bias.fill_(-100)
    _, _, found = attacked(model, pictures(1), torch.tensor([2]))
    assert found.settings["exact"] == [0]
    assert found.settings["padded"] == [1]
    assert found.batch["y"].tolist() == [[2]]  # the last layer still tells


def test_images_stay_within_the_bounds_of_the_model_s_input() -> None:
    task, seen, _ = attacked(mlp(generator=Generator().manual_seed(0)), pictures(1).round(), torch.tensor([4]))
    noise = 1e-3 * torch.randn((300, 784), generator=Generator().manual_seed(0))
    noisy = {**seen.update, "features.1.weight": seen.update["features.1.weight"] + noise}
    found = attacks.get("analytic").run(task, replace(seen, update=noisy))
    assert found.settings["exact"] == [0]
    low, high = task.fields["x"].limits(found.batch["x"])
    assert (found.batch["x"] >= low).all()
    assert (found.batch["x"] <= high).all()


def test_targets_of_unequal_size() -> None:
    x, y = pictures(4), torch.tensor([7, 0, 3, 3])
    task = Task.supervised(mlp(widths=(1000,), generator=Generator().manual_seed(0)), F.cross_entropy, like=(x, y))
    seen = [
        observe(task, {"x": x[:1], "y": y[:1]}, ONE_STEP, key="one"),
        observe(task, {"x": x[1:], "y": y[1:]}, ONE_STEP, key="three"),
    ]
    found = attacks.get("analytic").run(task, seen, engine=Engine(device="cpu", batched=False))
    assert found.settings["exact"] == [1, 3]
    assert found.target(0)["x"].shape == (1, 1, 28, 28)
    assert found.target(1)["y"].tolist() == [0, 3, 3]
    torch.testing.assert_close(found.target(0)["x"], x[:1], rtol=0, atol=1e-5)


def test_given_labels_win_and_keep_their_order() -> None:
    x, y = pictures(3), torch.tensor([7, 0, 3])
    _, _, found = attacked(mlp(widths=(1000,), generator=Generator().manual_seed(0)), x, y, given=True)
    assert found.batch["y"].tolist() == [[7, 0, 3]]
    torch.testing.assert_close(found.batch["x"][0], (x - 0.1307) / 0.3081, rtol=0, atol=1e-4)


class Functional(nn.Module):
    """Flattens by hand, and could do something to its input before."""

    def __init__(self, scale: float = 1.0, bias: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.last = nn.Linear(20, 4)  # defined first, used last
        self.first = nn.Linear(9, 20, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first((self.scale * x).reshape(len(x), -1))))


def test_the_layer_is_found_by_what_it_sees() -> None:
    torch.manual_seed(0)
    x, y = pictures(1, (1, 3, 3)), torch.tensor([2])
    _, _, found = attacked(Functional(), x, y)
    torch.testing.assert_close(found.batch["x"][0], (x - 0.1307) / 0.3081, rtol=1e-5, atol=1e-5)
    found = attacked(nn.Sequential(nn.Flatten(), nn.Linear(9, 4)), x, y)[2]  # first and last layer at once
    torch.testing.assert_close(found.batch["x"][0], (x - 0.1307) / 0.3081, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "begins"),
    [
        (lenet_zhu(shape=(1, 28, 28)), "Conv2d"),
        (Functional(scale=2.0), "Linear"),  # its own normalisation
        (Functional(bias=False), "Linear"),
    ],
)
def test_models_without_such_a_layer_are_told_what_to_do(model: nn.Module, begins: str) -> None:
    shape = (1, 28, 28) if begins == "Conv2d" else (1, 3, 3)
    with pytest.raises(TaskError, match=f"begins with {begins}.*'ig'.*mean= and std="):
        attacked(model, pictures(1, shape), torch.tensor([1]))


def test_it_needs_what_its_label_rule_needs() -> None:
    assert attacks.get("analytic").needs == frozenset()
    assert attacks.get("analytic", labels="ilrg").needs == {"training"}
    x, y = pictures(1), torch.tensor([1])
    task = Task.supervised(mlp(), F.cross_entropy, like=(x, y))
    with pytest.raises(MissingKnowledge, match="analytic needs training"):
        attacks.get("analytic", labels="ilrg").run(task, observe(task, {"x": x, "y": y}, ONE_STEP))


def test_the_registry_knows_it() -> None:
    entry = registry.entry("attack", "analytic")
    assert entry.settings.keys() == {"labels", "agree", "distinct"}
    assert entry.make().name == "analytic"
    assert "Analytic(labels='auto'" in attacked(mlp(), pictures(1), torch.tensor([0]))[2].settings["attack"]
