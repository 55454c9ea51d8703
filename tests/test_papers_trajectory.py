"""The path of a client's weights: constants of the theory on known paths, and the real client's own path, float64."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

import gradleak as gl
from conftest import largest_difference, private, reproduction, tiny
from gradleak.core import tree
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.rules import SGD, Adam, cosine_decay
from gradleak.scenario.task import Batch

path_of = reproduction("nl_sme", "trajectory")
CLIENT = LocalTraining(lr=0.3, epochs=6, batch_size=1)


def walk(points: Tensor) -> Tensor:
    """The Gram matrix of a path (T + 1, n)."""
    return path_of.gram_of([{"w": point} for point in points])


def double_integral(acceleration: Tensor) -> Tensor:
    """A path (T + 1, n) whose second differences in unit time are these (T - 1, n)."""
    steps = len(acceleration) + 1
    still = acceleration.new_zeros(2, acceleration.shape[1])
    return (
        torch.cat([still, acceleration.cumsum(0).cumsum(0) / steps**2])
        + torch.linspace(0, 1, steps + 1, dtype=torch.float64)[:, None]
    )


# --- paths that are known ---------------------------------------------------------------------------------------------


def test_constant_acceleration_has_the_line_error_of_the_theory_and_no_bezier_error() -> None:
    """w(t) = t v + t^2 a / 2: E^2 = |a|^2 / 120, and the curve is itself quadratic."""
    velocity, acceleration = torch.tensor([1.0, 0.5, -2.0]).double(), torch.tensor([0.4, -0.8, 0.1]).double()
    time = torch.linspace(0, 1, 401, dtype=torch.float64)[:, None]
    found = path_of.shape(walk(3.0 + time * velocity + time**2 * acceleration / 2), stride=10)
    length = (velocity + acceleration / 2).norm()
    kappa = float(acceleration.norm() / length)
    assert found.length == pytest.approx(float(length))
    assert found.line.squared == pytest.approx(kappa**2 / 120, rel=1e-6)
    assert found.line.rms == pytest.approx(math.sqrt(kappa**2 / 120), rel=1e-6)
    assert found.line_bound == pytest.approx(found.line.squared, rel=1e-6)
    assert found.bezier.squared < 1e-14
    assert found.bend == pytest.approx(kappa / 4)  # 2 t (1 - t) (c - m) = t (t - 1) a / 2
    assert found.curvature == pytest.approx([kappa] * 39, rel=1e-6)
    assert found.line.mean == pytest.approx(kappa / 12, rel=1e-4)  # and not the root of E^2, which is kappa / 10.95
    assert found.line.largest == pytest.approx(kappa / 8)


def test_a_turn_half_way_has_the_error_that_no_control_point_takes_away() -> None:
    """w'' = +1, then -1: both errors are 1 / 1920, within 1 / 480; the gain is none at all."""
    steps = 400
    turn = torch.where(torch.arange(1, steps) < steps / 2, 1.0, -1.0).double()[:, None]
    turn[steps // 2 - 1] = 0.0
    points = double_integral(turn)
    found = path_of.shape(walk(points))
    square = found.length**2
    assert found.line.squared * square == pytest.approx(1 / 1920, rel=1e-3)
    assert found.bezier.squared == pytest.approx(found.line.squared, rel=1e-9)
    assert found.gain == pytest.approx(1)
    assert found.bezier_bound is not None
    assert found.bezier_bound * square == pytest.approx(1 / 480, rel=1e-3)


def test_the_bezier_bound_holds_for_any_bounded_acceleration() -> None:
    source = torch.Generator().manual_seed(0)
    for smooth in (1, 5, 20, 60):
        raw = torch.randn(200 + smooth, 4, generator=source, dtype=torch.float64)
        found = path_of.shape(walk(double_integral(raw.unfold(0, smooth, 1).mean(-1)[:199])))
        assert found.bezier_bound is not None
        assert found.bezier.squared <= found.bezier_bound
        assert found.bezier.squared <= found.line.squared


def test_the_line_bound_needs_an_acceleration_that_keeps_its_direction() -> None:
    """Curved everywhere, and within 0.7 % of its chord: the theory's lower bound says 16 %."""
    angle = 12 * math.pi * torch.linspace(0, 1, 601, dtype=torch.float64)
    found = path_of.shape(walk(torch.stack([angle / angle[-1], angle.sin() / 200, angle.cos() / 200], 1)))
    assert found.line_bound is not None
    assert found.line.squared < found.line_bound / 100
    assert found.bezier_bound is not None
    assert found.bezier.squared <= found.bezier_bound


def test_the_control_point_is_the_least_squares_one() -> None:
    task, batch = tiny(), private(3)
    path = path_of.recorded(task, batch, CLIENT)
    flat = torch.stack([tree.flatten(point) for point in path.points])
    time = torch.linspace(0, 1, path.steps + 1, dtype=torch.float64)
    weights = torch.full_like(time, 1 / path.steps)
    weights[[0, -1]] /= 2
    chord = (1 - time)[:, None] * flat[0] + time[:, None] * flat[-1]
    basis = (weights.sqrt() * 2 * time * (1 - time))[:, None]
    wanted = torch.linalg.lstsq(basis, weights.sqrt()[:, None] * (flat - chord)).solution[0]
    torch.testing.assert_close(tree.flatten(path_of.control(path)), wanted)
    found, length = path_of.shape(path.gram), float((flat[-1] - flat[0]).norm())
    away = weights.sqrt()[:, None] * (flat - chord) - basis * wanted
    assert found.bezier.squared == pytest.approx(float(away.square().sum()) / length**2)
    assert found.line.squared == pytest.approx(float((weights[:, None] * (flat - chord).square()).sum()) / length**2)
    assert found.bend == pytest.approx(float(wanted.norm()) / length)
    assert found.detour == pytest.approx(float(flat.diff(dim=0).norm(dim=1).sum()) / length)


# --- the client's own path --------------------------------------------------------------------------------------------

CLIENTS: dict[str, LocalTraining] = {
    "sgd": CLIENT,
    "momentum and decay": LocalTraining(lr=0.1, epochs=3, batch_size=2, optimiser=SGD(momentum=0.9, weight_decay=1e-2)),
    "adam": LocalTraining(lr=0.01, epochs=3, batch_size=2, optimiser=Adam(), schedule=cosine_decay),
    "augmented": LocalTraining(
        lr=0.1, epochs=2, batch_size=1, augmentation=lambda batch, draws, step: _noisy(batch, draws, step)
    ),
}


def _noisy(batch: Batch, draws: gl.core.random.Draws, step: int) -> Batch:
    x = batch["x"]
    return {**batch, "x": x + 0.1 * draws.normal(tuple(x.shape), stream=step, dtype=x.dtype)}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_path_is_the_one_that_the_observed_client_took(name: str) -> None:
    task, batch, training = tiny(), private(3), CLIENTS[name]
    path = path_of.recorded(task, batch, training, key="somebody", seed=3)
    seen = gl.observe(task, batch, training, key="somebody", seed=3)
    assert largest_difference(path.update, seen.update) < 1e-14
    assert path.steps == len(training.order(3))
    assert path.epoch == -(-3 // (training.batch_size or 3))
    # Every step is one of the client's own: for plain SGD the gradient of a batch of one, in a shuffle of each epoch.
    if name == "sgd":
        moved = tree.scale(tree.subtract(path.points[4], path.points[5]), 1 / 0.3)
        each = [task.gradient(path.points[4], {k: v[row : row + 1] for k, v in batch.items()}) for row in range(3)]
        assert min(largest_difference(moved, gradient) for gradient in each) < 1e-13


def test_a_full_batch_step_along_the_path_matches_itself() -> None:
    """With K = T full-batch steps the replay is the client; one step of two is IG's gradient at the weights sent."""
    task, batch = tiny(), private(3)
    training = LocalTraining(lr=0.1, epochs=8)
    path = path_of.recorded(task, batch, training)
    found = path_of.mismatch(path, training=training, replays=(1, 2, 8))
    assert found.replays[8] < 1e-14
    assert found.replays[1] == pytest.approx(found.start, rel=1e-9)
    assert found.replays[1] > found.replays[2] > found.replays[8]
    direct = task.gradient(path.points[0], batch)
    cosine = tree.dot(direct, path.update) / (tree.norm(direct) * tree.norm(path.update))
    assert found.start == pytest.approx(float(1 - cosine))
    half = tree.add(path.points[0], path.update, -0.5)
    direct = task.gradient(half, batch)
    cosine = tree.dot(direct, path.update) / (tree.norm(direct) * tree.norm(path.update))
    assert found.midpoint == pytest.approx(float(1 - cosine))
    assert found.line <= min(found.midpoint, found.start)
    assert 0 < found.line_at < 1


def test_the_mean_gradient_along_the_path_is_the_update() -> None:
    """Where the client's batches are all its examples the update IS a sum over the path."""
    path = path_of.recorded(tiny(), private(3), LocalTraining(lr=0.05, epochs=40))
    found = path_of.mismatch(path)
    assert found.along_path < 1e-14 < found.along_bezier
    assert found.along_bezier < found.along_line < found.start


def test_prefixes_are_shorter_clients() -> None:
    task, batch = tiny(), private(3)
    path = path_of.recorded(task, batch, CLIENT)
    short = path_of.recorded(task, batch, LocalTraining(lr=0.3, steps=9, batch_size=1))
    assert largest_difference(path.until(9).gram, short.gram) < 1e-14
    lengths = (6, 12, 18)
    grown = path_of.growth(path, lengths, training=CLIENT, replays=(2,))
    assert [each.shape.steps for each in grown] == list(lengths)
    assert grown[-1].shape == path_of.trajectory(path).shape
    assert [each.shape.stride for each in grown] == [3, 3, 3]
    told = grown[-1].record()
    assert told["bezier_bound_holds"] is True
    assert told["mismatch"]["replays"].keys() == {"2"}
    assert len(told["curvature_along"]) == 5
    assert told["curvature_of_steps"]["highest"] > told["curvature"]["highest"]  # mini-batches turn at every step
    json.dumps(told, allow_nan=False)
    assert asdict(grown[0].mismatch).keys() == {*asdict(grown[1].mismatch)}


def test_of_a_smooth_path_the_line_error_grows_like_steps_and_the_beziers_faster() -> None:
    path = path_of.recorded(tiny(), private(3), LocalTraining(lr=0.02, epochs=48))
    lengths = (6, 12, 24, 48)
    shapes = [each.shape for each in path_of.growth(path, lengths)]
    assert path_of.order(lengths, [each.line.rms for each in shapes]) == pytest.approx(1, abs=0.15)
    assert path_of.order(lengths, [each.bezier.rms for each in shapes]) == pytest.approx(2, abs=0.4)
    assert path_of.order([1.0], [1.0]) is None
    assert path_of.order([1.0, 2.0], [0.0, 1.0]) is None


def test_paths_that_say_nothing_are_refused() -> None:
    task, batch = tiny(), private(3)
    with pytest.raises(ValueError, match="two steps or more"):
        path_of.recorded(task, batch, LocalTraining(lr=0.1))
    path = path_of.recorded(task, batch, CLIENT)
    for steps in (1, 99):
        with pytest.raises(ValueError, match="from 2 to the 18"):
            path.until(steps)
    recipes: list[Any] = [None, LocalTraining(lr=0.1, epochs=2, optimiser=SGD(momentum=0.5))]
    for training in recipes:
        with pytest.raises(ValueError, match="plain SGD"):
            path_of.mismatch(path, training=training, replays=(2,))
    still = [{"w": torch.zeros(2).double()}] * 3
    with pytest.raises(ValueError, match="ends where it began"):
        path_of.Path(task, batch, tuple(still), path_of.gram_of(still))
