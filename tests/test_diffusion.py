"""Diffusion: schedules, the objective of a denoiser, what a client draws and who learns of it, and the sampler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import gradleak as gl
from conftest import largest_difference
from gradleak import models
from gradleak.attack import Composed
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.similarity import psnr
from gradleak.diffusion import (
    Denoising,
    FromDiffusers,
    Schedule,
    SharedDraws,
    ddim,
    denoising,
    handed_out,
    schedule_of,
    target_of,
)
from gradleak.models.unets import sinusoids
from gradleak.parts.fields import Nothing
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.levenberg import LevenbergMarquardt
from gradleak.parts.matches import Relative, SquaredError
from gradleak.parts.predictions import Replay
from gradleak.parts.spaces import Normal, Pixels
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState
from gradleak.scenario.observation import BadObservation
from gradleak.scenario.task import Batch, Field, TaskError

SHAPE, STEPS = (1, 8, 8), 100
SHORT = Schedule(STEPS, first=1e-3, last=0.2)  # the betas of 1000 steps, ten times as large
KINDS = ["linear", "cosine", "sigmoid"]
TARGETS = ["eps", "v"]


def network(*, seed: int = 0, **settings: Any) -> models.UNet:
    made = {"shape": SHAPE, "base": 4, "multipliers": (1, 2), "blocks": 1, "groups": 2, "heads": 2, "steps": STEPS}
    return models.unet(**{**made, **settings}, generator=torch.Generator().manual_seed(seed)).double()


def tiny(**settings: Any) -> gl.Task:
    return denoising(network(), like=torch.zeros(1, *SHAPE), **{"schedule": SHORT, **settings})


def images(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(count, *SHAPE, dtype=torch.float64, generator=generator) - 1


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + seed))


def private(steps: list[int], seed: int = 0) -> Batch:
    count = len(steps)
    return {"x": images(count, seed), "t": torch.tensor(steps), "noise": noise(count, seed)}


def one_hot(t: Tensor) -> Tensor:
    return (t[:, None] == torch.arange(STEPS)).double()


def relative(a: gl.Params, b: gl.Params) -> float:
    return float(tree.squared_norm(tree.subtract(a, b)) / tree.squared_norm(b))


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [16, 1000])
def test_alpha_bar_falls_from_nearly_one_towards_nothing(kind: str, steps: int) -> None:
    schedule = Schedule(steps, kind, first=0.1 / steps, last=20 / max(steps, 25))
    kept = schedule.alpha_bar
    assert kept.shape == (steps,)
    assert kept.dtype == torch.float64
    assert (kept[1:] < kept[:-1]).all()
    assert 0 < kept[-1] < 1e-2
    assert kept[0] > 0.9
    torch.testing.assert_close(kept, (1 - schedule.betas).cumprod(0))


def test_the_linear_schedule_ends_in_noise() -> None:
    kept = Schedule().alpha_bar
    assert kept[0].item() == pytest.approx(1 - 1e-4)
    assert kept[1].item() == pytest.approx((1 - 1e-4) * (1 - 1e-4 - 0.0199 / 999))
    assert kept[999] < 1e-4


def test_cosine_and_sigmoid_state_alpha_bar_itself() -> None:
    place = (torch.arange(1000, dtype=torch.float64) + 1) / 1000
    law = lambda p: ((p + 0.008) / 1.008 * math.pi / 2).cos() ** 2  # noqa: E731
    expected = law(place) / law(torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(Schedule(1000, "cosine").alpha_bar[:-1], expected[:-1])  # the last beta is held to 0.999
    fall = (6 * place - 3).sigmoid()
    low, high = torch.tensor([-3.0, 3.0], dtype=torch.float64).sigmoid()
    torch.testing.assert_close(Schedule(1000, "sigmoid").alpha_bar[:-1], ((high - fall) / (high - low))[:-1])
    # GIDM's released code attacks step 1 of 16: almost no noise.
    assert Schedule(16, "sigmoid").alpha_bar[1].item() == pytest.approx(0.95, abs=0.02)


def test_the_scales_are_roots_of_one_average() -> None:
    shares = torch.rand(3, STEPS, dtype=torch.float64).softmax(-1)
    image, rest = SHORT.scales(shares, images(3))
    assert image.shape == rest.shape == (3, 1, 1, 1)
    torch.testing.assert_close(image**2 + rest**2, torch.ones(3, 1, 1, 1, dtype=torch.float64))
    torch.testing.assert_close(image.flatten() ** 2, shares @ SHORT.alpha_bar)
    assert not torch.allclose(image.flatten(), shares @ SHORT.alpha_bar.sqrt(), rtol=1e-3)


def test_the_first_steps_keep_their_digits_in_single_precision() -> None:
    t = torch.tensor([0])
    exact = (1 - Schedule().alpha_bar[0]).sqrt()
    found = Schedule().scales(t, torch.zeros(1, 1, 1, 1))[1]
    assert found.dtype == torch.float32
    assert abs(found.item() / exact.item() - 1) < 1e-7  # 1 - ab taken in float32 is off by 3e-4
    assert abs((1 - Schedule().alpha_bar[0].float()).sqrt().item() / exact.item() - 1) > 1e-5


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Schedule(0), "at least one step"),
        (lambda: Schedule(10, "linar"), "Unknown schedule 'linar'.*'linear'"),
        (lambda: Schedule(10, first=0.3, last=0.2), "0 < first <= last < 1"),
        (lambda: SHORT.at(torch.ones(2, 7)), "needs 100 probabilities"),
        (lambda: SHORT.spaced(101), "from 1 to 100, the steps up to start=1;"),
        (lambda: SHORT.spaced(12, 0.1), "from 1 to 11, the steps up to start=0.1;"),
        (lambda: Denoising(target="x"), "target must be one of eps, v"),
        (lambda: Denoising(reduction="none"), "reduction must be one of mean, sum"),
        (lambda: ddim(network(), noise(1), SHORT, steps=[3, 3]), "steps of a chain must decrease"),
        (lambda: SHORT.spaced(4, 1.5), "start must be a share"),
        (lambda: ddim(network(), noise(1), SHORT, steps=[100, 3]), "between 0 and 99"),
        (lambda: ddim(network(), noise(1), SHORT, steps=[]), "between 0 and 99"),
        (lambda: ddim(network(), noise(1), SHORT, last=0), "at least one step"),
        (lambda: ddim(network(), noise(1), SHORT, target="x"), "target must be"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_spaced_steps_fall_evenly_to_the_first() -> None:
    assert SHORT.spaced(1) == (99,)
    assert SHORT.spaced(4) == (99, 66, 33, 0)
    assert SHORT.spaced(100) == tuple(reversed(range(100)))
    assert SHORT.spaced(3, start=0.6)[0] == 59


# --- the objective ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_objective_is_the_formula(target: str, reduction: str) -> None:
    task, batch = tiny(target=target, reduction=reduction), private([2, 60])
    each = []
    for x, t, eps in zip(batch["x"], batch["t"], batch["noise"], strict=True):
        kept = SHORT.alpha_bar[t]
        out = task.model((kept.sqrt() * x + (1 - kept).sqrt() * eps)[None], t[None])[0]
        wanted = eps if target == "eps" else kept.sqrt() * eps - (1 - kept).sqrt() * x
        snr = kept / (1 - kept)
        weight = 1.0 if target == "eps" else snr / (snr + 1)
        each.append(weight * (out - wanted).square().sum() / (x.numel() if reduction == "mean" else 1))
    torch.testing.assert_close(task.loss(task.weights(), batch)[0], torch.stack(each).mean())


def test_v_can_be_left_unweighted() -> None:
    batch = private([30])
    losses = [tiny(target="v", weighted=weighted).loss(network_weights(), batch)[0] for weighted in (True, False)]
    torch.testing.assert_close(losses[0] / losses[1], SHORT.alpha_bar[30])


def network_weights() -> gl.Params:
    return {name: value.detach() for name, value in network().named_parameters()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_one_hot_simplex_is_the_step_exactly(target: str, dtype: torch.dtype) -> None:
    task = tiny(target=target).to("cpu", dtype)
    batch = tree.to(private([0, 17, 99]), None, dtype)
    soft = {**batch, "t": one_hot(batch["t"]).to(dtype)}
    weights = task.weights()
    assert torch.equal(task.loss(weights, batch)[0], task.loss(weights, soft)[0])
    assert largest_difference(task.gradient(weights, soft), task.gradient(weights, batch)) == 0


@pytest.mark.parametrize("target", TARGETS)
def test_the_gradient_of_the_scores_is_the_formula(target: str) -> None:
    """d/ds_j = (p_j / tau) [(ab_j - ab) d/d ab + <E_j - e, d/d e>] of a matching loss that knows ab and e alone."""
    task, truth, tau = tiny(target=target), private([12]), 0.7
    weights, batch = task.weights(), private([0], seed=1)
    seen = task.gradient(weights, truth)
    scores = torch.rand(1, STEPS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def distance(gradient: gl.Params) -> Tensor:
        return tree.squared_norm(tree.subtract(gradient, seen)) / tree.squared_norm(seen)

    def of_scores(scores: Tensor) -> Tensor:
        return distance(task.gradient(weights, {**batch, "t": (scores / tau).softmax(-1)}))

    def of_averages(kept: Tensor, embedding: Tensor) -> Tensor:
        a, b = kept.sqrt(), (1 - kept).sqrt()
        x, eps = batch["x"], batch["noise"]

        def loss(own: gl.Params) -> Tensor:
            out = functional_call(task.model, own, (a * x + b * eps, embedding))
            error = out - (eps if target == "eps" else a * eps - b * x)
            return (1 if target == "eps" else kept) * error.square().mean()

        return distance(grad(loss)(weights))

    shares, table, steps = (scores / tau).softmax(-1), task.model.table, SHORT.alpha_bar
    kept, embedding = (shares @ steps)[0], shares @ table
    by_kept, by_embedding = grad(of_averages, argnums=(0, 1))(kept, embedding)
    formula = shares[0] / tau * ((steps - kept) * by_kept + (table - embedding) @ by_embedding[0])
    torch.testing.assert_close(grad(of_scores)(scores)[0], formula, rtol=1e-8, atol=1e-12)
    assert formula.abs().max() > 1e-4


def test_a_simplex_needs_the_embeddings() -> None:
    batch = {**private([3]), "t": one_hot(torch.tensor([3]))}
    with pytest.raises(ValueError, match="make the task with denoising"):
        Denoising(SHORT)(network(), batch)


# --- the task ---------------------------------------------------------------------------------------------------------


def test_the_fields_of_a_denoiser() -> None:
    task = tiny()
    assert list(task.fields) == ["x", "t", "noise"]
    assert task.drawn == {"t", "noise"}
    assert task.fields["x"].bounds == (-1, 1)
    assert task.fields["t"].classes == STEPS
    assert not task.fields["noise"].bounded
    assert task.fields["x"].bounded
    assert task.weights().keys() == dict(task.model.named_parameters()).keys()
    assert not task.buffers()
    blank = task.blank(2)
    assert (blank["x"].shape, blank["t"].shape, blank["noise"].shape) == ((2, *SHAPE), (2,), (2, *SHAPE))
    assert not blank["noise"].any()
    assert task.loss(task.weights(), blank)[0].isfinite()


def test_noise_is_in_no_box_and_is_no_picture() -> None:
    task = tiny()
    seen = gl.observe(task, private([3]), gl.LocalTraining(lr=1.0))
    scene = TargetView.of(task, seen, gl.Knowledge())
    low, high = scene.limits["noise"]
    assert torch.equal(noise(1).clamp(low, high), noise(1))
    for change in (task.fields["noise"].unit, task.fields["noise"].model):
        with pytest.raises(TaskError, match="is not a picture"):
            change(noise(1))


def test_images_are_scored_on_zero_to_one_and_identical_ones_at_the_cap() -> None:
    unit = tiny().fields["x"].unit(images(3))
    assert unit.min() >= 0
    assert unit.max() <= 1
    assert psnr(unit, unit).tolist() == [120.0] * 3
    worse = tiny().fields["x"].unit(images(3) * 0.9)
    assert (psnr(worse, unit) < 60).all()  # a peak of 255 would report 48 dB more


def test_the_check_finds_nothing_wrong_with_a_denoiser() -> None:
    task = tiny()
    assert task.check() == []
    assert task.check({"x": images(2)}) == []
    assert task.check(private([3, 4])) == []


def test_the_check_still_finds_what_is_wrong() -> None:
    task = tiny()
    assert "outside the declared bounds" in str(task.check({"x": 3 * images(2)}))
    assert "has fields t" in str(task.check({"t": torch.tensor([1])}))
    assert "holds 3 to 100" in str(task.check(private([3, 100])))


@pytest.mark.parametrize("steps", [16, STEPS])
def test_a_denoiser_has_no_classifier(steps: int) -> None:
    """Not even where its time MLP happens to be as wide as there are steps: 4 x 4 = 16."""
    schedule = Schedule(steps, first=1e-3, last=0.2)
    task = denoising(network(steps=steps), like=torch.zeros(1, *SHAPE), schedule=schedule)
    with pytest.raises(TaskError, match="no labels, and so no classifier: its fields are x, t, noise"):
        _ = task.classifier
    seen = gl.observe(task, {"x": images(1)}, gl.LocalTraining(lr=1.0))
    with pytest.raises(TaskError, match="unsupported: idlg cannot attack this task: the client draws noise and t"):
        gl.attacks.get("idlg", steps=2).run(task, seen, gl.Knowledge(training=gl.LocalTraining(lr=1.0)))


def test_a_task_needs_a_denoiser_that_fits_its_schedule() -> None:
    with pytest.raises(TaskError, match="has no table and no time_layer.*FromDiffusers"):
        denoising(nn.Conv2d(1, 1, 1), like=torch.zeros(1, *SHAPE), schedule=SHORT)
    with pytest.raises(TaskError, match="embeds 100 steps, the schedule has 1000"):
        denoising(network(), like=torch.zeros(1, *SHAPE))
    with pytest.raises(TaskError, match=r"like must be images"):
        denoising(network(), like=torch.zeros(8, 8), schedule=SHORT)


def test_a_task_moves_with_its_tables() -> None:
    task = tiny().to("cpu", torch.float32)
    objective = task.objective
    assert isinstance(objective, Denoising)
    assert objective.table is not None
    assert torch.equal(objective.table, network().table)  # cast after the average, not before
    assert task.gradient(task.weights(), tree.to(private([3]), None, torch.float32))["time.first.weight"].any()


def test_a_field_may_have_one_open_side() -> None:
    assert not Field((1,), bounds=(0.0, math.inf)).bounded
    assert not Field((), classes=3).bounded


# --- what a client draws ----------------------------------------------------------------------------------------------


def source(name: object) -> Draws:
    return Draws(draws.key("test", name))


def test_steps_are_drawn_uniformly_and_noise_normally() -> None:
    drawn = tiny().completed({"x": torch.zeros(4000, *SHAPE)}, source("law"))
    counts = drawn["t"].bincount(minlength=STEPS)
    assert (drawn["t"].min(), drawn["t"].max()) == (0, STEPS - 1)
    assert ((counts - 40) ** 2 / 40).sum() < 160  # chi-square of 99 degrees of freedom: beyond it once in 10,000
    assert abs(drawn["noise"].mean().item()) < 4 / math.sqrt(4000 * 64)
    assert abs(drawn["noise"].var().item() - 1) < 4 * math.sqrt(2 / (4000 * 64))


def test_what_is_there_is_not_drawn_again() -> None:
    task, batch = tiny(), private([5])
    assert task.completed(batch, source(0)) is batch
    drawn = task.completed({"x": batch["x"], "t": batch["t"]}, source(0))
    assert torch.equal(drawn["t"], batch["t"])
    assert torch.equal(drawn["noise"], task.completed({"x": batch["x"]}, source(0))["noise"])


def test_a_key_means_the_same_draws_in_every_precision() -> None:
    exact, single = (
        tiny().completed({"x": images(2).to(dtype)}, source(1)) for dtype in (torch.float64, torch.float32)
    )
    assert torch.equal(single["noise"], exact["noise"].float())
    assert torch.equal(single["t"], exact["t"])


def test_lanes_draw_as_they_would_alone() -> None:
    task, keys = tiny(), torch.stack([draws.key("lane", number) for number in range(3)])
    x = images(2)
    together = vmap(lambda key: task.completed({"x": x}, Draws(key)), out_dims={"x": None, "t": 0, "noise": 0})(keys)
    for number, key in enumerate(keys):
        alone = task.completed({"x": x}, Draws(key))
        assert all(torch.equal(together[name][number], alone[name]) for name in ("t", "noise"))


def test_a_client_draws_from_its_own_key_for_every_step() -> None:
    task, x, training = tiny(), images(2), gl.LocalTraining(lr=0.1, steps=3)
    met: list[Batch] = []

    class Spy(gl.Defence):
        def gradient(self, compute: Any, weights: gl.Params, batch: Batch, client: Any) -> gl.Params:
            met.append(batch)
            return compute(weights, batch)

    seen = [gl.observe(task, {"x": x}, training, Spy(), key=key) for key in ("a", "a", "b")]
    assert largest_difference(seen[0].update, seen[1].update) == 0
    assert relative(seen[0].update, seen[2].update) > 1e-3
    assert all(batch.keys() == task.fields.keys() and torch.equal(batch["x"], x) for batch in met)
    noises = [batch["noise"] for batch in (*met[:3], met[6])]
    assert all(not torch.equal(noises[i], noises[j]) for i in range(4) for j in range(i))


def test_steps_of_a_batch_draw_for_the_rows_they_use() -> None:
    task, batch = tiny(), {"x": images(4), "noise": noise(4)}
    training = gl.LocalTraining(lr=0.1, epochs=1, batch_size=2)
    upload, _ = training.run(task, task.weights(), batch, client=ClientState(key=draws.key("rows")))
    assert tree.finite(upload.payload["update"])


def test_the_distance_at_the_truth_is_zero() -> None:
    task = tiny()
    for batch in (private([3]), private([0, 50, 99])):
        seen = gl.observe(task, batch, gl.LocalTraining(lr=1.0))
        upload, _ = gl.LocalTraining(lr=1.0).run(task, seen.weights, batch)
        assert relative(upload.payload["update"], seen.update) < 1e-24
        assert relative(task.gradient(seen.weights, {**batch, "t": one_hot(batch["t"])}), seen.update) < 1e-24
        other = {**batch, "t": (batch["t"] + 1) % STEPS}
        assert relative(task.gradient(seen.weights, other), seen.update) > 1e-6


def test_an_observation_holds_nothing_that_the_client_drew() -> None:
    task, batch = tiny(), private([42])
    seen = gl.observe(task, batch, gl.LocalTraining(lr=1.0))
    held = [*seen.weights.values(), *seen.update.values()]
    assert not seen.extras
    assert not seen.buffers
    assert not seen.returned_buffers
    for secret in (batch["noise"], batch["x"]):
        assert not any(
            value.numel() == secret.numel() and torch.equal(value.flatten(), secret.flatten()) for value in held
        )
    assert gl.Knowledge().grants == frozenset()
    assert gl.Knowledge(given={"t": batch["t"]}).grants == {"t"}


def test_a_replay_without_step_and_noise_does_not_make_them_up() -> None:
    task = tiny()
    with pytest.raises(ValueError, match=r"lacks noise and t.*An attacker has no such key"):
        gl.LocalTraining(lr=1.0).run(task, task.weights(), {"x": images(1)})
    seen = gl.observe(task, private([3]), gl.LocalTraining(lr=1.0))
    stage = Stage(Pixels(Normal()), Replay(), SquaredError(), (), LBFGS(steps=2))
    with pytest.raises(ValueError, match="unsupported: blind cannot attack this task: the client draws noise and t"):
        Composed("blind", (stage,), Nothing()).run(task, seen, gl.Knowledge(training=gl.LocalTraining(lr=1.0)))


def test_a_batch_without_images_is_refused() -> None:
    task = tiny()
    with pytest.raises(TaskError, match="batch has fields noise, t"):
        gl.observe(task, {"t": torch.tensor([1]), "noise": noise(1)}, gl.LocalTraining(lr=1.0))
    with pytest.raises(TaskError, match="holds 3 to 100"):
        gl.observe(task, private([3, 100]), gl.LocalTraining(lr=1.0))


class Toy(nn.Module):
    """Three convolutions, the step scaling and shifting behind the first: the least that a denoiser is."""

    time_layer = "time"

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second, self.third = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 1, 3, padding=3)
            self.time = nn.Linear(8, 16)
        self.table = sinusoids(STEPS, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        given = (t if t.is_floating_point() else self.table[t]).to(x.dtype)
        scale, shift = self.time(given)[:, :, None, None].chunk(2, dim=1)
        return self.third(F.silu(self.second(F.silu(self.first(x) * (1 + scale) + shift))))


@pytest.mark.parametrize("t", [3, 30])
def test_an_image_is_found_where_step_and_noise_are_given(t: int) -> None:
    """The whole way: a client, its observation, an attack in lanes in the known setting."""
    task = denoising(Toy(), like=torch.zeros(1, *SHAPE), schedule=SHORT).to("cpu", torch.float64)
    batch, training = private([t]), gl.LocalTraining(lr=1.0)
    knows = gl.Knowledge(given={"t": batch["t"], "noise": batch["noise"]}, training=training)
    stage = Stage(Pixels(Normal()), Replay(), Relative(), (), LevenbergMarquardt(steps=20))
    attack, engine = Composed("known", (stage,), Nothing(), restarts=2), gl.Engine(precision="double")
    found = attack.run(task, gl.observe(task, batch, training), knows, engine=engine)
    unit = task.fields["x"].unit
    assert psnr(unit(found.batch["x"][0]), unit(batch["x"])).item() > 60


# --- draws from the server --------------------------------------------------------------------------------------------


def test_what_the_server_hands_out_is_everybodys_and_the_server_knows_it() -> None:
    task, training = tiny(), gl.LocalTraining(lr=1.0)
    seen = [gl.observe(task, {"x": images(2, seed)}, training, SharedDraws(), key=f"client {seed}") for seed in (1, 2)]
    for number, one in enumerate(seen, start=1):
        given = handed_out(task, one)
        assert given.keys() == {"t", "noise"}
        assert largest_difference(given, handed_out(task, seen[0])) == 0
        truth = {"x": images(2, number), **given}
        assert relative(task.gradient(one.weights, truth), one.update) < 1e-24
    other = gl.observe(task, {"x": images(2, 1)}, training, SharedDraws(), server={"round": 1})
    assert not torch.equal(handed_out(task, other)["noise"], handed_out(task, seen[0])["noise"])


def test_what_was_handed_out_survives_a_file(tmp_path: Any) -> None:
    task = tiny()
    seen = gl.observe(task, {"x": images(1)}, gl.LocalTraining(lr=1.0), SharedDraws(seed=4))
    back = gl.Observation.load(seen.save(tmp_path / "seen.safetensors"))
    assert largest_difference(handed_out(task, back), handed_out(task, seen)) == 0


def test_of_a_client_that_drew_for_itself_nothing_was_handed_out() -> None:
    task = tiny()
    with pytest.raises(BadObservation, match="the client drew these fields itself"):
        handed_out(task, gl.observe(task, {"x": images(1)}, gl.LocalTraining(lr=1.0)))


# --- the sampler ------------------------------------------------------------------------------------------------------


def ideal(spread: float, schedule: Schedule) -> Any:
    """The best denoiser of pixels ~ N(0, spread^2), in closed form."""

    def call(x: Tensor, t: Tensor) -> Tensor:
        kept = schedule.at(t, x).reshape(-1, 1, 1, 1)
        return (1 - kept).sqrt() * x / (kept * spread**2 + 1 - kept)

    return call


def test_the_sampler_turns_noise_into_the_data_it_was_made_for() -> None:
    """For normal pixels the flow is linear, z -> spread * z; a chain of K steps is off by about 4 / K."""
    z, spread, wrong = noise(3), 0.3, {}
    for steps in (100, 1000):
        ratio = ddim(ideal(spread, Schedule()), z, Schedule(), steps=steps) / z
        assert ratio.std() < 1e-9
        wrong[steps] = abs(ratio.mean().item() / spread - 1)
    assert wrong[1000] < 0.006
    assert wrong[100] / wrong[1000] == pytest.approx(10, rel=0.2)


def test_predicting_v_or_the_noise_makes_the_same_images() -> None:
    noisy = ideal(0.3, SHORT)

    def of_v(x: Tensor, t: Tensor) -> Tensor:
        image, rest = SHORT.scales(t, x)
        eps = noisy(x, t)
        return image * eps - rest * (x - rest * eps) / image

    made = [ddim(call, noise(2), SHORT, steps=10, target=target) for call, target in ((noisy, "eps"), (of_v, "v"))]
    torch.testing.assert_close(made[1], made[0])


def test_one_step_from_a_noised_image_is_the_estimate_of_tweedie() -> None:
    batch, task = private([59]), tiny()
    shown = task.objective.noised(batch)  # type: ignore[attr-defined]
    image, rest = SHORT.scales(batch["t"], shown)
    expected = (shown - rest * task.model(shown, batch["t"])) / image
    torch.testing.assert_close(ddim(task.model, shown, SHORT, steps=1, start=0.6), expected)


def test_every_step_of_the_schedule_can_be_taken_and_is_reproducible() -> None:
    schedule = Schedule(12, first=0.01, last=0.4)
    model = network(steps=12)
    with torch.no_grad():
        one, other = ddim(model, noise(2), schedule, steps=12), ddim(model, noise(2), schedule, steps=range(11, -1, -1))
        alone = ddim(model, noise(2)[:1], schedule, steps=12)
    assert torch.equal(one, other)
    assert one.isfinite().all()
    torch.testing.assert_close(one[:1], alone)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("last", [None, 2])
def test_the_gradient_with_and_without_recomputation_is_equal(target: str, last: int | None) -> None:
    model, along = network().requires_grad_(False), noise(2, seed=1)

    def of(z: Tensor, recompute: bool) -> Tensor:
        return (ddim(model, z, SHORT, 5, target, recompute, last=last) * along).sum()

    plain, again = (grad(of)(noise(2), recompute) for recompute in (False, True))
    assert plain.any()
    torch.testing.assert_close(again, plain, rtol=1e-10, atol=1e-12)
    leaf = noise(2).requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(of(leaf, True), leaf)[0], plain, rtol=1e-10, atol=1e-12)
    lanes = vmap(grad(lambda z: of(z, True)))(torch.stack([noise(2), noise(2, seed=2)]))
    torch.testing.assert_close(lanes[0], plain, rtol=1e-9, atol=1e-11)
    forwards = jvp(lambda z: of(z, True), (noise(2),), (along,))[1]
    torch.testing.assert_close(forwards, (plain * along).sum(), rtol=1e-9, atol=1e-11)


def test_recomputation_holds_one_step_at_a_time() -> None:
    """What autograd keeps for the way back: with recomputation the latents, without it all activations."""
    model = network().requires_grad_(False)
    kept = {}
    for recompute in (False, True):
        sizes: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t)
        with hooks:
            ddim(model, noise(1).requires_grad_(), SHORT, 4, recompute=recompute)
        kept[recompute] = sum(sizes)
    assert kept[True] <= 4 * noise(1).numel()
    assert kept[False] > 50 * kept[True]


@pytest.mark.parametrize("target", TARGETS)
def test_a_truncated_chain_passes_the_derivative_of_its_end_on(target: str) -> None:
    """Before the end the network is a constant: the gradient is that of the last steps, times one number."""
    model, chain, z, weigh = network().requires_grad_(False), SHORT.spaced(6), noise(1), noise(1, seed=1)

    def made(z: Tensor, last: int | None) -> Tensor:
        return (ddim(model, z, SHORT, chain, target, last=last) * weigh).sum()

    assert made(z, 2) == made(z, None)  # the same image
    seen: list[Tensor] = []
    ddim(lambda x, t: (seen.append(x), model(x, t))[1], z, SHORT, chain, target)
    end = grad(lambda x: (ddim(model, x, SHORT, chain[4:], target) * weigh).sum())(seen[4])
    factor = 1.0
    for above, below in zip(chain[:4], chain[1:5], strict=True):
        kept = SHORT.alpha_bar[[above, below]]
        turned = (kept[0] * kept[1]).sqrt() + ((1 - kept[0]) * (1 - kept[1])).sqrt()  # cosine of the angle between them
        factor *= float((kept[1] / kept[0]).sqrt() if target == "eps" else turned)
    torch.testing.assert_close(grad(made)(z, 2), factor * end, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad(made)(z, 6), grad(made)(z, None))
    assert not torch.allclose(grad(made)(z, 2), grad(made)(z, None), rtol=1e-2)


# --- diffusers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def diffusers() -> Any:
    return pytest.importorskip("diffusers", reason="needs the extra `diffusion`")


def theirs(diffusers: Any, **settings: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return diffusers.UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            **settings,
        ).eval()


@pytest.mark.parametrize(("name", "kind"), [("linear", "linear"), ("squaredcos_cap_v2", "cosine")])
def test_schedules_are_those_of_diffusers(diffusers: Any, name: str, kind: str) -> None:
    scheduler = diffusers.DDPMScheduler(beta_schedule=name)
    schedule = schedule_of(scheduler)
    assert schedule == Schedule(1000, kind)
    torch.testing.assert_close(schedule.alpha_bar.float(), scheduler.alphas_cumprod, rtol=1e-4, atol=1e-8)
    batch = {"x": images(3), "t": torch.tensor([0, 400, 999]), "noise": noise(3)}
    noised = scheduler.add_noise(batch["x"], batch["noise"], batch["t"])
    torch.testing.assert_close(Denoising(schedule).noised(batch), noised, rtol=1e-4, atol=1e-5)
    wanted = scheduler.get_velocity(batch["x"], batch["noise"], batch["t"])
    torch.testing.assert_close(Denoising(schedule, "v").wanted(batch), wanted, rtol=1e-4, atol=1e-5)


def test_schedulers_without_a_counterpart_are_refused(diffusers: Any) -> None:
    for settings in ({"beta_schedule": "sigmoid"}, {"trained_betas": [0.1] * 1000}):
        with pytest.raises(TaskError, match="has no counterpart here"):
            schedule_of(diffusers.DDPMScheduler(**settings))
    assert target_of(diffusers.DDIMScheduler(prediction_type="v_prediction")) == "v"
    with pytest.raises(TaskError, match="'sample' is not supported"):
        target_of(diffusers.DDIMScheduler(prediction_type="sample"))


@pytest.mark.parametrize(("theirs_", "target"), [("epsilon", "eps"), ("v_prediction", "v")])
@pytest.mark.parametrize("steps", [5, 1000])
def test_ddim_is_that_of_diffusers(diffusers: Any, theirs_: str, target: str, steps: int) -> None:
    scheduler = diffusers.DDIMScheduler(clip_sample=False, prediction_type=theirs_)
    scheduler.set_timesteps(steps)
    schedule, x = schedule_of(scheduler), noise(2)
    call = ideal(0.3, schedule)  # whatever it predicts, both must do the same with it
    for t in scheduler.timesteps:
        x = scheduler.step(call(x, t.expand(2)), t, x).prev_sample
    found = ddim(call, noise(2), schedule, steps=scheduler.timesteps.tolist(), target=target)
    torch.testing.assert_close(found, x, rtol=1e-3, atol=1e-4)  # their scales are in single precision


def test_a_network_of_diffusers_is_a_denoiser(diffusers: Any) -> None:
    plain = theirs(diffusers)
    model, x, t = FromDiffusers(plain), images(3).float(), torch.tensor([3, 500, 999])
    torch.testing.assert_close(model(x, t), plain(x, t).sample, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(x, t), model(x, model.table[t].float()))
    as_ours = FromDiffusers(theirs(diffusers, flip_sin_to_cos=False, freq_shift=1)).table
    torch.testing.assert_close(as_ours, sinusoids(1000, 8), rtol=0, atol=1e-4)
    task = denoising(model, like=x)
    assert task.check() == []  # takes a second derivative in lanes
    assert not task.buffers()
    task, batch = task.to("cpu", torch.float64), {"x": images(1), "t": t[:1], "noise": noise(1)}
    update = task.gradient(task.weights(), batch)
    rows, deltas = (update[f"{model.time_layer}.{name}"] for name in ("weight", "bias"))
    torch.testing.assert_close(deltas @ rows / deltas.square().sum(), model.table[t[0]])  # so t can be read off
    assert isinstance(jvp(lambda x: task.model(x, t[:1]), (images(1),), (noise(1),))[1], Tensor)


def test_image_and_noise_of_a_client_of_diffusers_are_found(diffusers: Any) -> None:
    task = denoising(FromDiffusers(theirs(diffusers)).double(), like=images(1).float())
    batch = {"x": images(1), "t": torch.tensor([300]), "noise": noise(1)}
    training = gl.LocalTraining(lr=1.0)
    attack = gl.attacks.get("span-dm", steps=300, fine_steps=100, restarts=1)
    engine = gl.Engine("cpu", precision="double")
    found = attack.run(task, gl.observe(task, batch, training), gl.Knowledge(training=training), engine=engine)
    assert found.batch["t"].flatten().tolist() == [300]
    assert float(gl.metrics.compare(found, {name: value[None] for name, value in batch.items()}).psnr) > 60


def test_networks_of_diffusers_that_are_no_plain_denoisers_are_refused(diffusers: Any) -> None:
    with pytest.raises(TaskError, match="embeds steps as 'fourier'"):
        FromDiffusers(theirs(diffusers, time_embedding_type="fourier"))
    with pytest.raises(TaskError, match="conditioned on classes"):
        FromDiffusers(theirs(diffusers, num_class_embeds=10))
