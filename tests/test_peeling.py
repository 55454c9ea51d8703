"""One example comes off a chain network exactly, lane by lane, and off nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import gradleak as gl
from conftest import scene_of
from gradleak import models
from gradleak.attacks.second_order.peeling import Peeled, applies, chain_of
from gradleak.attacks.second_order.quadratic import AtLeast, AtMost, Constraint, Rows, minimise
from gradleak.parts.spaces import Solid
from gradleak.parts.view import TargetView
from gradleak.scenario.rules import SGD, Adam

SHAPE = (2, 8, 8)
GREY = Solid(0.5)


def task_of(model: nn.Module, shape: tuple[int, ...] = SHAPE, **settings: Any) -> gl.Task:
    like = (torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model.double(), F.cross_entropy, like=like, **settings)


def lenet(activation: str, *, shape: tuple[int, int, int] = SHAPE, width: int = 8, seed: int = 0) -> gl.Task:
    generator = torch.Generator().manual_seed(seed)
    model = models.lenet_zhu(shape=shape, width=width, activation=activation, init="torch", generator=generator)
    return task_of(model, shape)


def picture(task: gl.Task, seed: int = 0) -> Tensor:
    """A smooth picture in the task's model-input space."""
    field = task.fields["x"]
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, field.shape[0], 3, 3, generator=generator, dtype=torch.float64)
    return field.model(F.interpolate(coarse, size=field.shape[1:], mode="bilinear", align_corners=True))


def seen(task: gl.Task, x: Tensor, training: gl.LocalTraining | None = None) -> TargetView:
    training = training or gl.LocalTraining(lr=0.1)
    y = torch.arange(len(x))
    return scene_of(task, gl.observe(task, {"x": x, "y": y}, training), gl.Knowledge(training=training))


def start(scene: TargetView, peeled: Peeled | None = None) -> Tensor:
    assert scene.draws is not None
    return (peeled or Peeled(GREY))(scene, scene.draws, "x")


# --- recovery -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "softplus", "elu", "leaky_relu", "gelu", "silu"])
def test_an_invertible_network_gives_its_input_away_to_all_digits(activation: str) -> None:
    task = lenet(activation, width=6)
    x = picture(task)
    torch.testing.assert_close(start(seen(task, x)), x, rtol=0, atol=1e-7)


def test_an_activation_that_folds_is_unfolded() -> None:
    generator = torch.Generator().manual_seed(0)
    task = task_of(models.lenet_zhu(shape=SHAPE, width=6, activation="silu", generator=generator))  # wide weights
    x = picture(task)
    torch.testing.assert_close(start(seen(task, x)), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_relus_are_peeled_off_exactly_where_the_update_determines_the_input(seed: int) -> None:
    task = lenet("relu", seed=seed, width=12)
    x = picture(task, seed)
    torch.testing.assert_close(start(seen(task, x)), x, rtol=0, atol=1e-6)


def test_a_perceptron_and_a_network_of_one_block() -> None:
    for widths in ((40,), (40, 30)):
        task = task_of(models.mlp(shape=SHAPE, widths=widths, generator=torch.Generator().manual_seed(0)))
        x = picture(task)
        torch.testing.assert_close(start(seen(task, x)), x, rtol=0, atol=1e-6)


def test_normalised_images_batch_norm_and_pooling() -> None:
    torch.manual_seed(0)
    first = [nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12), nn.Tanh()]
    second = [nn.Conv2d(12, 32, 3, stride=2, padding=1), nn.AvgPool2d(1), nn.Sigmoid()]
    model = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 5)).double().eval()
    model[1].running_mean.uniform_(-0.2, 0.2)  # type: ignore[operator]
    model[1].running_var.uniform_(0.5, 1.5)  # type: ignore[operator]
    task = task_of(model, mean=(0.4, 0.5), std=(0.2, 0.3))
    x = picture(task)
    torch.testing.assert_close(start(seen(task, x)), x, rtol=0, atol=1e-6)


def test_what_pooling_hides_is_chosen_and_never_worse_than_the_other_start() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)]
    task = task_of(nn.Sequential(*layers))
    x = picture(task)
    found = start(seen(task, x))
    assert torch.isfinite(found).all()
    assert (found - x).square().mean() < (x - 0.5).square().mean()


def test_the_scale_of_the_update_does_not_matter() -> None:
    task = lenet("tanh")
    x = picture(task)
    scene = replace(seen(task, x, gl.LocalTraining(lr=1e-3)), knows=gl.Knowledge())
    torch.testing.assert_close(start(scene), x, rtol=0, atol=1e-7)


def test_weight_decay_is_taken_off() -> None:
    task = lenet("tanh")
    x = picture(task)
    training = gl.LocalTraining(lr=0.1, optimiser=SGD(weight_decay=1e-2))
    torch.testing.assert_close(start(seen(task, x, training)), x, rtol=0, atol=1e-7)


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_lanes_together_are_lanes_alone(activation: str) -> None:
    task = lenet(activation, width=6)
    scenes = [seen(task, picture(task, seed)) for seed in (0, 1)]
    alone = [start(scene) for scene in scenes]
    updates = {name: torch.stack([scene.update[name] for scene in scenes]) for name in scenes[0].update}
    together = vmap(lambda update: start(replace(scenes[0], update=update)))(updates)
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-6)


# --- where it does not apply ----------------------------------------------------------------------------------------


class Functional(nn.Module):
    """A chain to the eye, but with an activation that no hook can see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, 20), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x.flatten(1))))


CHAINS: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "lenet": (models.lenet_zhu(shape=SHAPE), SHAPE, True),
    "perceptron": (models.mlp(shape=SHAPE), SHAPE, True),
    "pooled by averages": (models.lenet5(pool="avg"), (3, 32, 32), True),
    "pooled by maxima": (models.lenet5(pool="max"), (3, 32, 32), False),
    "residual": (models.resnet18(), (3, 32, 32), False),
    "max-pool behind BatchNorm": (models.convnet(width=8).eval(), (3, 32, 32), False),
    "BatchNorm that trains": (models.cnn_lewis(norm="batch").train(), (3, 32, 32), False),
    "BatchNorm that does not": (models.cnn_lewis(norm="batch").eval(), (3, 32, 32), True),
    "GroupNorm": (models.cnn_lewis(norm="group"), (3, 32, 32), False),
    "dropout that is off": (
        nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(128, 9), nn.Tanh(), nn.Linear(9, 4)).eval(),
        SHAPE,
        True,
    ),
    "dropout": (nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(128, 9), nn.Tanh(), nn.Linear(9, 4)), SHAPE, False),
    "functional": (Functional(), SHAPE, False),
    "no bias": (nn.Sequential(nn.Flatten(), nn.Linear(128, 9), nn.ReLU(), nn.Linear(9, 4, bias=False)), SHAPE, False),
    "the same layer twice": (
        nn.Sequential(nn.Flatten(), *[same := nn.Linear(128, 128), nn.ReLU(), same], nn.ReLU(), nn.Linear(128, 4)),
        SHAPE,
        False,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_a_chain(name: str) -> None:
    model, shape, expected = CHAINS[name]
    assert (chain_of(task_of(model, shape)) is not None) == expected


def test_where_it_does_not_apply_the_start_is_the_other_one() -> None:
    lone, task = picture(lenet("sigmoid")), lenet("sigmoid")
    two = torch.cat([lone, lone.flip(-1)])
    cases = {
        "two examples": seen(task, two),
        "two steps": seen(task, lone, gl.LocalTraining(lr=0.1, steps=2)),
        "not SGD": seen(task, lone, gl.LocalTraining(lr=0.1, optimiser=Adam())),
        "a defence": replace(seen(task, lone), knows=gl.Knowledge(defence=gl.Defence())),
        "no chain": seen(task_of(Functional()), lone),
    }
    for name, scene in cases.items():
        assert not applies(scene.task, scene.knows, scene.num_examples), name
        assert scene.draws is not None
        assert torch.equal(start(scene), GREY(scene, scene.draws, "x")), name
    scene = seen(task, lone)
    assert applies(task, scene.knows, 1)
    assert torch.equal(start(scene, Peeled(GREY, largest=100)), torch.full_like(lone, 0.5))


def test_an_update_of_nothing_and_one_that_is_not_finite_fall_back() -> None:
    for activation in ("sigmoid", "relu"):
        task = lenet(activation, width=3)
        scene = seen(task, picture(task))
        for factor in (0.0, torch.nan):
            broken = replace(scene, update={name: value * factor for name, value in scene.update.items()})
            assert torch.equal(start(broken), torch.full_like(picture(task), 0.5))


def test_the_memory_it_asks_for_follows_the_largest_system() -> None:
    task = lenet("sigmoid", width=6)
    sigmoid, relu = (Peeled(GREY).entries(lenet(name, width=6)) for name in ("sigmoid", "relu"))
    assert sigmoid == Peeled(GREY).entries(task) >= 128**2
    assert relu > sigmoid


# --- quadratic programs ---------------------------------------------------------------------------------------------


def programme(seed: int, n: int = 10, rank: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    root = draw(rank, n)
    return root.T @ root, draw(n), draw(5, n), draw(5).abs()


@pytest.mark.parametrize("seed", range(4))
def test_a_quadratic_program_meets_its_optimality_conditions(seed: int) -> None:
    hessian, linear, matrix, limit = programme(seed)
    low, high = torch.full_like(linear, -1.0), torch.full_like(linear, 0.5)
    low[0], limit[0] = -torch.inf, torch.inf
    high[1] = torch.inf
    constraints: list[Constraint] = [AtLeast(low), AtMost(high), Rows(matrix, limit)]
    found = minimise(hessian, linear, constraints)
    stationary = hessian @ found.x + linear
    for constraint, multiplier in zip(constraints, found.multipliers, strict=True):
        violation = constraint(found.x) - constraint.limit
        stationary = stationary + constraint.transpose(multiplier)
        assert violation.max() < 1e-9
        assert multiplier.min() >= 0
        bound = torch.isfinite(constraint.limit)
        assert (violation * multiplier)[bound].abs().max() < 1e-9
        assert not multiplier[~bound].any()
    assert stationary.abs().max() < 1e-8


def test_quadratic_programs_agree_with_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    hessian, linear, _, _ = programme(3, rank=12)
    root = torch.linalg.cholesky(hessian)
    found = minimise(hessian, linear, [AtLeast(torch.zeros_like(linear))])
    expected = optimize.nnls(root.T.numpy(), -torch.linalg.solve(root, linear).numpy())[0]
    torch.testing.assert_close(found.x, torch.from_numpy(expected), rtol=0, atol=1e-7)


def test_quadratic_programs_run_in_lanes_and_survive_one_that_is_broken() -> None:
    problems = [programme(seed) for seed in range(3)]
    hessian, linear = (torch.stack([problem[k] for problem in problems]) for k in (0, 1))
    linear[1] = torch.nan

    def box(like: Tensor) -> list[Constraint]:
        return [AtLeast(torch.full_like(like, -1.0)), AtMost(torch.ones_like(like))]

    together = vmap(lambda h, f: minimise(h, f, box(f)).x)(hessian, linear)
    assert torch.isfinite(together).all()
    for lane in (0, 2):
        alone = minimise(hessian[lane], linear[lane], box(linear[lane])).x
        torch.testing.assert_close(together[lane], alone, rtol=0, atol=1e-8)


def test_without_constraints_it_is_one_linear_solve() -> None:
    hessian, linear, _, _ = programme(0, rank=12)
    torch.testing.assert_close(hessian @ minimise(hessian, linear, []).x, -linear)
