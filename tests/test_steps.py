"""The step of a diffusion client: read off the time MLP's gradient, or an unknown that can be differentiated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

import gradleak as gl
from conftest import largest_difference, moment, scene_of, tiny
from conftest import private as labelled
from gradleak.core.random import Draws, key
from gradleak.defences.withholding import Withholding
from gradleak.diffusion import Schedule, denoising
from gradleak.parts.fields import RuleDoesNotApply
from gradleak.parts.optimisers import Adam, OddBlocks
from gradleak.parts.steps import Drawn, ReadSteps, SettledSteps, SoftSteps, StraightThrough, evidence
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge
from gradleak.scenario.task import Batch, Task, TaskError

T = 100
SCHEDULE = Schedule(T, first=1e-3, last=0.2)
TRAINING = LocalTraining(lr=0.5)


class Small(nn.Module):
    """Three convolutions, a norm that the step scales and shifts, and its MLP: 4,800 weights."""

    time_layer = "time.0"

    def __init__(self, *, width: int = 16, dim: int = 32, bias: bool = True, seed: int = 0) -> None:
        super().__init__()
        rates = torch.exp(-math.log(1e4) / (dim // 2 - 1) * torch.arange(dim // 2, dtype=torch.float64))
        angles = torch.arange(T, dtype=torch.float64)[:, None] * rates
        self.table = torch.cat([angles.sin(), angles.cos()], dim=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.time = nn.Sequential(nn.Linear(dim, dim, bias=bias), nn.GELU(), nn.Linear(dim, 2 * width))
            self.first = nn.Conv2d(1, width, 3, padding=1)
            self.norm = nn.GroupNorm(4, width)
            self.second = nn.Conv2d(width, width, 3, padding=1)
            self.last = nn.Conv2d(width, 1, 3, padding=1)
        self.double()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time((t if t.is_floating_point() else self.table[t]).to(x.dtype))
        scale, shift = time[:, :, None, None].chunk(2, dim=1)
        hidden = nn.functional.silu(self.norm(self.first(x)) * (1 + scale) + shift)
        return self.last(nn.functional.silu(self.second(hidden)))


def pictures(count: int = 1, seed: int = 0) -> Tensor:
    """Smooth images of 1 x 8 x 8 in [-1, 1]."""
    coarse = 2 * Draws(key("pictures", seed)).uniform((count, 1, 3, 3), dtype=torch.float64) - 1
    return nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear", align_corners=True)


def toy(*, target: str = "eps", reduction: str = "mean", **settings: Any) -> Task:
    return denoising(Small(**settings), like=pictures(), schedule=SCHEDULE, target=target, reduction=reduction)


def drawn(*steps: int, seed: int = 0) -> Batch:
    """What a client had: images, steps and noise."""
    x = pictures(len(steps), seed)
    return {"x": x, "t": torch.tensor(steps), "noise": Draws(key("noise", seed)).normal(tuple(x.shape)).double()}


def read(task: Task, batch: Batch, **knows: Any) -> list[int]:
    scene = scene_of(task, gl.observe(task, batch, knows.get("training", TRAINING)), Knowledge(**knows))
    return ReadSteps()(scene)["t"].tolist()


# --- read off ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_every_step_of_the_table_is_read_off_one_example(bias: bool) -> None:
    task = toy(bias=bias)
    assert [read(task, drawn(t, seed=t)) for t in range(T)] == [[t] for t in range(T)]


@pytest.mark.parametrize("steps", [(3, 40, 41), (0, 50, 99), (7, 8, 9)])
@pytest.mark.parametrize("bias", [True, False])
def test_three_distinct_steps_are_read_off_one_update(steps: tuple[int, ...], bias: bool) -> None:
    assert read(toy(bias=bias), drawn(*steps)) == list(steps)
    assert read(toy(bias=bias), drawn(*reversed(steps))) == list(steps)


def test_a_step_that_appears_twice_is_found_twice_and_no_other_is_invented() -> None:
    assert set(read(toy(), drawn(30, 30, 30, 60))) == {30, 60}


@pytest.mark.parametrize("lr", [1e-3, 7.0])
def test_the_learning_rate_does_not_matter(lr: float) -> None:
    task = toy()
    seen = gl.observe(task, drawn(42), LocalTraining(lr=lr))
    assert ReadSteps()(scene_of(task, seen))["t"].tolist() == [42]


def test_neither_the_target_nor_the_image_matters() -> None:
    assert read(toy(target="v", reduction="sum", seed=3), drawn(77, seed=5)) == [77]


def test_given_steps_are_kept() -> None:
    task = toy()
    assert ReadSteps()(scene_of(task, gl.observe(task, drawn(42), TRAINING), t=torch.tensor([5]))) == {}


def test_noise_leaves_candidates() -> None:
    """Noise a third as large as the gradient of the time MLP: the step is still among the ten best of 100."""
    task, hits = toy(), 0
    for t in range(5, T, 10):
        seen = gl.observe(task, drawn(t, seed=t), TRAINING)
        noised = {
            name: u + 0.3 * u.square().mean().sqrt() * Draws(key(name, t)).normal(tuple(u.shape)).double()
            for name, u in seen.update.items()
        }
        hits += t in evidence(scene_of(task, replace(seen, update=noised))).topk(10).indices.tolist()
    assert hits >= 9


def test_pruning_leaves_the_step() -> None:
    task = toy()
    for t in (3, 50, 90):
        seen = gl.observe(task, drawn(t), TRAINING, gl.defences.Pruning(keep=0.3))
        assert t in evidence(scene_of(task, seen)).topk(10).indices.tolist()


def test_withholding_the_first_layer_does_not_hide_the_step() -> None:
    """The second layer is told a function of the step, which the server can compute for every step."""
    task = toy()
    for t in (0, 3, 50, 99):
        seen = gl.observe(task, drawn(t), TRAINING, Withholding())
        assert not seen.update["time.0.weight"].any()
        assert seen.update["time.2.weight"].any()
        assert ReadSteps()(scene_of(task, seen))["t"].tolist() == [t]
        unseen = gl.observe(task, drawn(t), TRAINING, Withholding("time"))
        with pytest.raises(RuleDoesNotApply, match="withheld"):
            ReadSteps()(scene_of(task, unseen))


def test_what_cannot_be_read_off_is_refused_with_a_way_out() -> None:
    task = toy()
    seen = gl.observe(task, drawn(42), TRAINING)
    withheld = {name: torch.zeros_like(u) if name.startswith("time") else u for name, u in seen.update.items()}
    with pytest.raises(RuleDoesNotApply, match=r"every linear layer.*withheld.*t='soft'"):
        ReadSteps()(scene_of(task, replace(seen, update=withheld)))
    with pytest.raises(RuleDoesNotApply, match="several local steps"):
        ReadSteps()(scene_of(task, seen, Knowledge(training=LocalTraining(lr=0.1, steps=2))))
    with pytest.raises(RuleDoesNotApply, match="too many"):
        ReadSteps()(scene_of(task, replace(seen, num_examples=33)))
    with pytest.raises(RuleDoesNotApply, match="in their order"):
        ReadSteps()(scene_of(task, replace(seen, num_examples=2), noise=torch.zeros(2, 1, 8, 8)))
    supervised = tiny()
    with pytest.raises(TaskError, match="denoisers"):
        ReadSteps()(scene_of(supervised, gl.observe(supervised, labelled(1), TRAINING)))


# --- unknowns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["eps", "v"])
def test_shares_of_one_step_are_that_step(target: str) -> None:
    task, batch = toy(target=target), drawn(3, 60)
    hot = torch.zeros(2, T, dtype=torch.float64)
    hot[[0, 1], batch["t"]] = 1
    weights = task.weights()
    soft, hard = task.gradient(weights, {**batch, "t": hot}), task.gradient(weights, batch)
    assert largest_difference(soft, hard) < 1e-14


def test_scores_get_the_gradient_of_the_averages() -> None:
    """d/ds_j = p_j / tau * ((ab_j - ab) d/dab + <E_j - e, d/de>), against autograd."""
    task, batch = toy(), drawn(30)
    scores, tau = Draws(key("scores")).normal((1, T), dtype=torch.float64), 0.7
    objective: Any = task.objective
    ab_table, table = objective.schedule.alpha_bar, task.model.table

    def loss(kept: Tensor, embedding: Tensor) -> Tensor:
        x_t = kept.sqrt() * batch["x"] + (1 - kept).sqrt() * batch["noise"]
        return (task.model(x_t, embedding) - batch["noise"]).square().mean()

    p = (scores / tau).softmax(-1)
    kept, embedding = (p @ ab_table)[0], p @ table
    d_kept, d_embedding = grad(loss, argnums=(0, 1))(kept, embedding)
    by_hand = p / tau * ((ab_table - kept) * d_kept + (table - embedding) @ d_embedding[0])
    space = SoftSteps(speed=1.0, first=tau, last=tau)
    by_autograd = grad(lambda s: objective(task.model, {**batch, "t": space.chosen(s, moment())}))(scores)
    assert largest_difference(by_hand, by_autograd) < 1e-14
    assert float(by_autograd.detach().abs().max()) > 1e-6


def test_the_temperature_falls_geometrically() -> None:
    space, scores = SoftSteps(), torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    for step, temperature in ((0, 1.0), (5, math.sqrt(0.1)), (10, 0.1)):
        expected = (scores / temperature).softmax(-1)
        assert largest_difference(space.chosen(scores, moment(step, 10)), expected) < 1e-7


def test_scores_start_between_0_and_1_at_any_speed() -> None:
    """At temperature 1 the logarithms of the shares differ as the scores do: no step is preferred much at the start."""
    task = toy()
    scene = scene_of(task, gl.observe(task, drawn(42, 3), TRAINING))
    starts = []
    for speed in (1.0, 10.0, 50.0):
        space = SoftSteps(speed=speed)
        scores = space.decode(space.variables(scene, Draws(key("lane")), None), scene, moment())["t"].log()
        starts.append(scores - scores.amin(-1, keepdim=True))
        assert starts[-1].shape == (2, T)
        assert bool((starts[-1].amax(-1) < 1).all())
        assert bool((starts[-1].amax(-1) > 0.9).all())
    assert largest_difference(starts[1], starts[0]) < 1e-12
    assert largest_difference(starts[2], starts[0]) < 1e-12


def test_straight_through_goes_forward_as_the_step_and_back_as_the_shares() -> None:
    scores = Draws(key("scores")).normal((2, T), dtype=torch.float64)
    hard = StraightThrough().chosen(scores, moment())
    assert hard.sum(-1).tolist() == [1.0, 1.0]
    assert hard.argmax(-1).tolist() == scores.argmax(-1).tolist() == SettledSteps().chosen(scores, moment()).tolist()
    task, batch = toy(), drawn(3, 60)
    index = {**batch, "t": scores.argmax(-1)}
    assert (
        largest_difference(task.gradient(task.weights(), {**batch, "t": hard}), task.gradient(task.weights(), index))
        < 1e-14
    )
    weight = torch.arange(T, dtype=torch.float64)
    of = lambda kind: grad(lambda s: (kind().chosen(s, moment()) * weight).sum())(scores)  # noqa: E731
    assert largest_difference(of(StraightThrough), of(SoftSteps)) == 0


def test_what_is_drawn_is_kept_over_stages_and_differs_between_lanes() -> None:
    task = toy()
    seen = gl.observe(task, drawn(42), TRAINING)
    scene = scene_of(task, seen, t=torch.tensor([42]))
    for field in ("t", "noise"):
        first, again, other = (
            Drawn(field).constants(scene, Draws(key("lane", lane)), None)[field] for lane in (0, 0, 1)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        decoded = Drawn(field).decode({}, replace(scene, constants={field: first}), moment())
        assert torch.equal(decoded[field], first)  # not what is given


# --- windows ----------------------------------------------------------------------------------------------------------


def test_odd_blocks_count_their_own_steps() -> None:
    window = OddBlocks(3)
    due = [bool(window.due(moment(step))) for step in range(14)]
    assert due == [step // 3 % 2 == 1 for step in range(14)]
    assert [int(window.count(moment(step))) for step in range(14)] == [sum(due[: step + 1]) for step in range(14)]


def test_a_variable_with_a_window_and_an_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="both name noise"):
        Adam(windows={"noise": OddBlocks(3)}, every={"noise": 2})
