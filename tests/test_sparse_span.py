"""Whole batches from a linear layer before a ReLU: exactness, what is reported of the rest, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import normal, seeded
from gradleak import (
    Audit,
    Engine,
    Federation,
    Knowledge,
    LocalTraining,
    Reconstruction,
    TargetView,
    Task,
    attacks,
    observe,
)
from gradleak.attacks.spans.sparse import SparseSpan
from gradleak.attacks.spans.sparse.directions import Layer, factorise, without
from gradleak.attacks.spans.sparse.selection import agreement, recover
from gradleak.core.random import Draws, key
from gradleak.identify.span_certificate import LayerCertificate, SpanCertificate
from gradleak.models import lenet_zhu
from gradleak.scenario.rules import SGD, Adam
from gradleak.scenario.task import Field, TaskError

ONE_STEP = LocalTraining(lr=0.1)
UNBOUNDED = (-math.inf, math.inf)


def network(inputs: int, width: int, classes: int, hidden: int = 2, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(hidden):
        layers += [nn.Linear(inputs, width), activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(width, classes))


def table(name: str, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of one of scikit-learn's tables, standardised, and their labels."""
    datasets = pytest.importorskip("sklearn.datasets")
    whole = getattr(datasets, f"load_{name}")()
    x, y = torch.tensor(whole.data), torch.tensor(whole.target)
    x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x), generator=seeded(seed))[:rows]
    return x[order].float(), y[order]


def attacked(
    model: nn.Module, x: Tensor, y: Tensor, training: LocalTraining = ONE_STEP, **settings: Any
) -> Reconstruction:
    task = Task.supervised(model, F.cross_entropy, like=(x, y), bounds=UNBOUNDED)
    seen = observe(task, {"x": x, "y": y}, training)
    return attacks.get("sparse-span", **settings).run(task, seen, Knowledge(training=training))


def certificate(found: Reconstruction) -> SpanCertificate:
    [record] = found.settings["spans"]
    return SpanCertificate.of(record)


def demand_exact(found: Reconstruction, x: Tensor, y: Tensor, within: float = 1e-4) -> None:
    """Every example beside its label, in any order."""
    gaps = torch.cdist(found.batch["x"][0].flatten(1).double(), x.flatten(1).double())
    nearest = gaps.argmin(1)
    assert sorted(nearest.tolist()) == list(range(len(x)))
    assert gaps.min(1).values.max() < within * x.flatten(1).norm(dim=1).max()
    assert found.batch["y"][0].tolist() == y[nearest].tolist()


@pytest.mark.parametrize(
    ("name", "examples", "width"),
    [("breast_cancer", 8, 100), ("breast_cancer", 16, 512), ("digits", 8, 100), ("digits", 8, 300), ("wine", 4, 100)],
)
def test_real_rows_are_exact_in_float32(name: str, examples: int, width: int) -> None:
    x, y = table(name, examples)
    found = attacked(network(x.shape[1], width, 10), x, y)
    demand_exact(found, x, y)
    assert found.settings["rank"] == found.settings["certain"] == [examples]
    assert found.settings["padded"] == [0]
    assert found.settings["residual"][0] < 1e-5
    layer = LayerCertificate("1", examples, examples, unexplained=found.settings["residual"][0])
    assert certificate(found) == SpanCertificate(examples, "1", (0.0,) * examples, examples, (layer,))
    assert found.unknowns["agreement"].tolist() == found.unknowns["certain"].tolist() == [[[1.0] * examples]]
    assert found.match.item() < 1e-9
    assert found.checks.ok


@pytest.mark.parametrize("hidden", [1, 2, 3])
def test_random_images_through_any_depth(hidden: int) -> None:
    x, y = normal(12, 3, 8, 8).float(), torch.arange(12) % 10
    found = attacked(network(192, 256, 10, hidden), x, y)
    demand_exact(found, x, y)
    assert found.batch["x"].shape == (1, 12, 3, 8, 8)


def test_one_example_is_a_closed_form() -> None:
    x, y = normal(1, 20).float(), torch.tensor([1])
    found = attacked(network(20, 30, 3), x, y)
    demand_exact(found, x, y, within=1e-5)
    assert found.settings["waves"] == [0]
    assert found.settings["certain"] == [1]


def test_the_factors_are_those_of_the_gradient_and_the_truth_agrees() -> None:
    weight, bias, x = normal(60, 20), normal(60, seed=1), normal(5, 20, seed=2)
    inputs = weight @ x.T + bias[:, None]
    derivatives = normal(60, 5, seed=3) * (inputs > 0)
    layer = Layer(weight, bias, derivatives @ x, derivatives.sum(1), torch.zeros(20).double())
    factors = factorise(layer, 7, Draws(key("factors")))
    assert factors.rank == 5
    torch.testing.assert_close(factors.left @ factors.right, layer.rows)
    torch.testing.assert_close(factors.left @ factors.right_bias, layer.deltas)
    directions = torch.linalg.lstsq(factors.left, derivatives).solution.T
    directions = directions / directions.norm(dim=1, keepdim=True)
    assert agreement(factors, directions, inputs.T).tolist() == [1.0] * 5
    assert (agreement(factors, directions, -inputs.T) < 0.1).all()
    basis, _ = recover(factors, Draws(key("search")), 5)
    assert basis.complete
    assert torch.cdist(basis.points @ factors.right, x).min(0).values.max() < 1e-8


def test_equal_examples_are_found_once_and_the_rest_is_blank() -> None:
    x, y = normal(5, 30).float(), torch.tensor([0, 1, 2, 0, 1])
    x[3] = x[0]
    found = attacked(network(30, 200, 3), x, y)
    assert found.settings["rank"] == found.settings["certain"] == [4]
    assert found.settings["padded"] == [1]
    gaps = torch.cdist(x, found.batch["x"][0])
    assert gaps.min(1).values.max() < 1e-4
    assert int((found.batch["x"][0] == 0).all(1).sum()) == 1
    assert (found.unknowns["agreement"] == 0).sum() == 1
    assert [check.name for check in found.checks.found] == ["not all found"]
    assert (certificate(found).apart, certificate(found).proved) == (4, 4)
    assert "The others are open. 1 of 5 were not found, and are blank." in str(certificate(found))


def test_examples_below_the_rounding_of_the_others_are_not_claimed() -> None:
    """After training the gradient of a well-classified example vanishes; here its weight in the loss does."""
    x, y = normal(4, 30).float(), torch.tensor([0, 1, 2, 0])
    model = network(30, 200, 3)
    fields = {"x": Field((30,), UNBOUNDED), "y": Field((), classes=3)}

    def objective(call: Any, batch: Any) -> Tensor:
        weights = torch.tensor([1.0, 1.0, 1.0, 1e-12])[: len(batch["y"])]
        return (weights * F.cross_entropy(call(batch["x"]), batch["y"], reduction="none")).mean()

    task = Task(model, objective, fields)
    found = attacks.get("sparse-span").run(
        task, observe(task, {"x": x, "y": y}, ONE_STEP), Knowledge(training=ONE_STEP)
    )
    assert found.settings["rank"] == found.settings["certain"] == [3]
    assert found.settings["padded"] == [1]


def test_too_few_outputs_for_the_batch_show_in_the_record() -> None:
    x, y = normal(16, 40).float(), torch.arange(16) % 3
    found = attacked(network(40, 24, 3), x, y, waves=2)
    assert found.settings["certain"][0] + found.settings["padded"][0] <= 16
    assert found.settings["certain"] == [int(found.unknowns["certain"].sum())]
    right = torch.cdist(x, found.batch["x"][0]).min(0).values < 1e-3
    assert int(right.sum()) >= found.settings["certain"][0]
    assert not found.checks.ok


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(lr=0.05, steps=5),
        LocalTraining(lr=0.05, epochs=2, batch_size=4),
        LocalTraining(lr=0.01, steps=10, optimiser=SGD(momentum=0.9)),
    ],
)
def test_several_local_steps_are_a_sum_of_the_same_rank(training: LocalTraining) -> None:
    x, y = table("breast_cancer", 8)
    found = attacked(network(30, 200, 2), x, y, training)
    gaps = torch.cdist(found.batch["x"][0], x)
    assert found.settings["rank"] == [8]
    assert gaps.min(0).values.max() < 1e-3
    assert found.unknowns["agreement"].min() > 0.95


def test_an_example_near_the_noise_is_shown_and_not_called_certain() -> None:
    x, y = normal(4, 30).float(), torch.tensor([0, 1, 2, 0])
    task = Task.supervised(network(30, 200, 3), F.cross_entropy, like=(x, y), bounds=UNBOUNDED)
    seen = observe(task, {"x": x, "y": y}, ONE_STEP)
    noise = 1e-2 * seen.update["1.weight"].std() * normal(200, 30, seed=5).float()
    noisy = {**seen.update, "1.weight": seen.update["1.weight"] + noise}
    found = attacks.get("sparse-span").run(task, replace(seen, update=noisy), Knowledge(training=ONE_STEP))
    errors = torch.cdist(found.batch["x"][0], x).min(1).values / x.norm(dim=1).mean()
    assert found.settings["certain"] == [int((found.unknowns["rounding"] < 1e-3).sum())]
    assert found.settings["certain"][0] < 4
    assert found.settings["padded"] == [0]
    assert (errors < 0.05).all()
    assert (found.unknowns["rounding"][0, 0] > errors / 10).all()


def test_targets_of_unequal_size_and_given_labels() -> None:
    x, y = table("breast_cancer", 6)
    task = Task.supervised(network(30, 200, 2), F.cross_entropy, like=(x, y), bounds=UNBOUNDED)
    seen = [
        observe(task, {"x": x[:2], "y": y[:2]}, ONE_STEP, key="two"),
        observe(task, {"x": x[2:], "y": y[2:]}, ONE_STEP, key="four"),
    ]
    found = attacks.get("sparse-span").run(task, seen)
    assert found.settings["certain"] == [2, 4]
    assert found.unknowns["agreement"].shape == (2, 1, 4)
    assert found.unknowns["agreement"][0, 0, 2:].isnan().all()
    assert found.checks.ok
    order = y[2:].argsort(stable=True)
    given = attacks.get("sparse-span").run(task, seen[1], Knowledge(given={"y": y[2:][order]}))
    assert given.batch["y"][0].tolist() == y[2:][order].tolist()
    for label in (0, 1):
        ours, theirs = given.batch["x"][0][y[2:][order] == label], x[2:][y[2:] == label]
        assert len(ours) == 0 or torch.cdist(ours, theirs).min(1).values.max() < 1e-4


def test_a_task_without_labels() -> None:
    x, model = normal(6, 15).float(), network(15, 120, 4)
    task = Task(model, lambda call, batch: call(batch["x"]).square().mean(), {"x": Field((15,), UNBOUNDED)})
    found = attacks.get("sparse-span").run(task, observe(task, {"x": x}, ONE_STEP))
    assert torch.cdist(x, found.batch["x"][0]).min(1).values.max() < 1e-4
    assert found.match.item() < 1e-9


class Functional(nn.Module):
    """A ReLU by function, and perhaps something between."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(9, 60), nn.Linear(60, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x.flatten(1))
        inner: dict[str, Any] = {
            "function": torch.relu,
            "in place": lambda z: F.relu(z, inplace=True),
            "scaled": lambda z: F.relu(2 * z),
            "skipped": lambda z: z + F.relu(z),
        }
        return self.last(inner[self.way](z))


@pytest.mark.parametrize("way", ["function", "in place"])
def test_the_relu_may_be_a_function(way: str) -> None:
    x, y = normal(3, 1, 3, 3).float(), torch.tensor([0, 2, 1])
    demand_exact(attacked(Functional(way), x, y), x, y)


@pytest.mark.parametrize(
    ("model", "shape", "told"),
    [
        (network(9, 20, 3, activation=nn.Tanh), (9,), "straight into a ReLU.*goes into tanh"),
        (network(9, 20, 3, activation=nn.LeakyReLU), (9,), "goes into leaky_relu"),
        (nn.Sequential(nn.Linear(9, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3)), (9,), "batch_norm"),
        (Functional("scaled"), (9,), "goes into mul"),
        (Functional("skipped"), (9,), "goes into add, relu"),
        (nn.Sequential(nn.Linear(9, 3)), (9,), "straight into a ReLU"),
        (
            nn.Sequential(nn.Linear(9, 20, bias=False), nn.ReLU(), nn.Linear(20, 3)),
            (9,),
            "needs .* with a bias",
        ),
        (lenet_zhu(shape=(1, 12, 12)), (1, 12, 12), "straight into a ReLU.*goes into cross_entropy"),
    ],
)
def test_other_networks_are_refused(model: nn.Module, shape: tuple[int, ...], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        attacked(model, normal(2, *shape).float(), torch.tensor([0, 1]))


def test_other_clients_and_batches_are_refused() -> None:
    x, y = normal(8, 5).float(), torch.arange(8) % 3
    with pytest.raises(TaskError, match="unsupported: sparse-span .* what Adam makes of them"):
        attacked(network(5, 60, 3), x[:2], y[:2], LocalTraining(lr=0.1, optimiser=Adam()))
    many = attacked(network(5, 60, 3), x, y)  # eight examples of five inputs: no gradient tells them apart
    assert many.settings["padded"] == [8]
    assert many.settings["certain"] == [0]
    with pytest.raises(ValueError, match="waves"):
        attacks.get("sparse-span", waves=0)


def test_nothing_is_claimed_of_an_update_of_zeros() -> None:
    x, y = normal(2, 9).float(), torch.tensor([0, 1])
    model = network(9, 20, 3)
    with torch.no_grad():
        model[1].bias.fill_(-100.0)  # no output is ever on
    found = attacked(model, x, y)
    assert found.settings["rank"] == found.settings["certain"] == [0]
    assert found.settings["padded"] == [2]
    assert (certificate(found).apart, certificate(found).proved, certificate(found).solved) == (0, 0, ())


def convolutional(activation: type[nn.Module] = nn.ReLU, norm: type[nn.Module] = nn.Identity) -> nn.Module:
    """A convolution before two connected layers: the first of these sees 64 features of 64 pixels."""
    torch.manual_seed(0)
    stem = (nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten())
    with torch.no_grad():
        stem[0].weight.mul_(4)  # features that differ from image to image
    return nn.Sequential(*stem, nn.Linear(64, 80), norm(80), activation(), nn.Linear(80, 3)).double()


def behind(model: nn.Module, examples: int, **settings: Any) -> tuple[Reconstruction, Tensor]:
    x, y = torch.rand(examples, 1, 8, 8, generator=seeded(1)).double(), torch.arange(examples) % 3
    task = Task.supervised(model, F.cross_entropy, like=(x, y))
    seen = observe(task, {"x": x, "y": y}, ONE_STEP)
    options = {"steps": 40, "fine_steps": 0, "restarts": 1, **settings}
    attack = attacks.get("sparse-span", **options)
    return attack.run(task, seen, Knowledge(training=ONE_STEP), engine=Engine(precision="double")), x


@pytest.mark.parametrize("examples", [1, 4])
def test_features_behind_a_convolution_are_exact(examples: int) -> None:
    model = convolutional()
    x, y = torch.rand(examples, 1, 8, 8, generator=seeded(1)).double(), torch.arange(examples) % 3
    task = Task.supervised(model, F.cross_entropy, like=(x, y))
    view = TargetView.of(task, observe(task, {"x": x, "y": y}, ONE_STEP), Knowledge(training=ONE_STEP))
    reading = SparseSpan().recovered(view)
    features = model[:3](x).detach()
    assert torch.cdist(features, reading.rows).min(1).values.max() < 1e-6 * features.norm(dim=1).min()
    assert reading.record["certain"] == examples
    assert reading.record["residual"] < 1e-6


def test_the_search_behind_features_lowers_their_error_and_the_last_one_the_match() -> None:
    short, x = behind(convolutional(), 3, steps=2)
    longer, _ = behind(convolutional(), 3)
    assert longer.settings["layer"] == "3"
    assert (longer.unknowns["feature_error"] < short.unknowns["feature_error"]).all()
    assert longer.batch["x"].shape == (1, *x.shape)
    assert sorted(longer.batch["y"][0].tolist()) == [0, 1, 2]
    last, _ = behind(convolutional(), 3, fine_steps=40)
    assert last.match.item() < longer.match.item()
    told = certificate(longer)
    assert set(told.outside) == set(longer.unknowns["feature_error"].flatten().tolist())
    assert (told.apart, told.proved) == (3, 0), "certain are features; the images were searched for"
    assert "3 of its inputs for certain" in told.reason


def test_one_example_needs_no_relu() -> None:
    found, x = behind(convolutional(nn.Tanh), 1, relu=False, steps=200, tv=0.0)
    assert found.settings["certain"] == [1]
    assert found.unknowns["feature_error"].item() < 1e-2
    with pytest.raises(TaskError, match="clients of one example; given 2. Leave relu=true"):
        behind(convolutional(nn.Tanh), 2, relu=False)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (convolutional(nn.LeakyReLU), "straight into a ReLU.*goes into leaky_relu"),
        (convolutional(norm=nn.LayerNorm), "goes into layer_norm"),
        (
            nn.Sequential(nn.BatchNorm2d(1), convolutional()).double(),
            "one row for each example and nothing of the other",
        ),
    ],
)
def test_other_heads_are_refused(model: nn.Module, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        behind(model, 2)


def test_features_of_a_series_are_refused() -> None:
    x, y = normal(2, 3, 16).float(), torch.tensor([0, 1])
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(56, 20), nn.ReLU(), nn.Linear(20, 3))
    with pytest.raises(TaskError, match="cosine coefficients of images, and x holds series"):
        attacked(model, x, y)


def test_what_is_taken_out_leaves_the_same_problem() -> None:
    weight, bias, x = normal(60, 20), normal(60, seed=1), normal(5, 20, seed=2)
    derivatives = normal(60, 5, seed=3) * (weight @ x.T + bias[:, None] > 0)
    factors = factorise(Layer(weight, bias, derivatives @ x, derivatives.sum(1), x.mean(0)), 5, Draws(key("factors")))
    basis, _ = recover(factors, Draws(key("search")), 5)
    rest, lift = without(factors, basis.directions[:2], basis.points[:2])
    own = torch.linalg.inv(basis.points)[:, :2]  # the derivatives of the two, in their own scale
    taken = factors.left @ own @ basis.points[:2] @ factors.right
    assert rest.rank == 3
    torch.testing.assert_close(rest.left @ rest.right, factors.left @ factors.right - taken)
    torch.testing.assert_close(rest.left, factors.left @ lift.T)


def test_images_that_have_much_in_common() -> None:
    """A bright common part switches most outputs alike; windows of outputs that are mostly off still tell."""
    x = (0.5 + 0.25 * normal(24, 300)).float().clamp(0, 1)
    y = torch.arange(24) % 10
    task = Task.supervised(network(300, 500, 10), F.cross_entropy, like=(x, y), bounds=(0.0, 1.0))
    found = attacks.get("sparse-span").run(task, observe(task, {"x": x, "y": y}, ONE_STEP))
    assert found.settings["certain"] == [24]
    assert torch.cdist(x, found.batch["x"][0]).min(1).values.max() < 1e-3


def test_the_former_name_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="'spear' is 'sparse-span' now"):
        assert attacks.get("spear") == SparseSpan()


def test_the_certificate_reaches_rows_and_the_report(tmp_path: Path) -> None:
    x, y = torch.rand(12, 1, 4, 4, generator=seeded(1)), torch.arange(12) % 3
    task = Task.supervised(network(16, 60, 3), F.cross_entropy, like=(x, y))
    clients = Federation(clients=3, examples=2, training=ONE_STEP)
    result = Audit(task, (x, y), attacks=["sparse-span", "analytic"], federation=clients, targets=2).run(tmp_path / "a")
    told = [SpanCertificate.of(row["spans"]) for row in result.rows if "spans" in row and not row["control"]]
    assert [each.proved for each in told] == [2, 2]
    assert not any("spans" in row for row in result.rows if row["attack"] == "analytic")
    text = result.report(tmp_path / "report.html").read_text()
    section = text.split('id="spans"')[1].split("</section>")[0]
    assert section.count("<table") == 1
    assert section.count("2 of 2 examples are told by layer 1: this is proved without the truth.") == 2


def test_auto_takes_it_where_a_relu_follows() -> None:
    x, y = table("breast_cancer", 6)
    task = Task.supervised(network(30, 100, 2), F.cross_entropy, like=(x, y), bounds=(-20.0, 20.0))
    seen = observe(task, {"x": x, "y": y}, ONE_STEP)
    found = attacks.get("auto", preset="quick", steps=2).run(task, seen, Knowledge(training=ONE_STEP))
    assert found.settings["winner"] == ["sparse-span"]
    assert certificate(found).proved == 6
    assert torch.cdist(x.double(), found.batch["x"][0].double()).min(1).values.max() < 1e-4
