"""Information in releases: Gaussian channels known exactly, quadratics with a known maximum, and the printed index."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian, jacrev
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import CLASSES, Linear, normal, private, tiny
from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.curvature.information import (
    CurvatureIndex,
    Releases,
    Sharpness,
    against_curvature,
    channel_bound,
    curvature_index,
    input_information,
    releases,
    sharpness,
)
from gradleak.curvature.point import explained
from gradleak.engine import EngineError
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Compute
from gradleak.scenario.task import Batch, Field, TaskError

CPU = gl.Engine(device="cpu")


def linear(matrix: Tensor) -> gl.Task:
    held = Field((1, 1, matrix.shape[1]))
    return gl.Task(Linear(matrix), lambda call, batch: call(batch["x"]).mean(), {"x": held})


class Quadratic(nn.Module):
    """1/2 w^T Q w + <b, w>, whatever the data."""

    def __init__(self, matrix: Tensor, slope: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.register_buffer("slope", slope)
        self.weight = nn.Parameter(torch.zeros(len(slope), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.weight @ self.matrix @ self.weight + self.slope @ self.weight + 0 * x.sum()


def quadratic(matrix: Tensor, slope: Tensor) -> tuple[gl.Task, Batch]:
    task = gl.Task(Quadratic(matrix, slope), lambda call, batch: call(batch["x"]), {"x": Field((1, 1, 1))})
    return task, {"x": torch.zeros(1, 1, 1, 1, dtype=torch.float64)}


@dataclass(frozen=True)
class Sam(gl.Defence):
    """The gradient at the disturbed weights, as small as it gets."""

    rho: float = 0.2

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Any) -> Params:
        first = compute(weights, batch)
        return compute(tree.add(weights, first, self.rho / (tree.norm(first) + 1e-16)), batch)


# --- releases ---------------------------------------------------------------------------------------------------------


def explicit(task: gl.Task, batch: Batch, training: gl.LocalTraining, examples: int, **settings: Any) -> Tensor:
    """The releases themselves, client after client, (n, d)."""
    total = len(batch["y"])
    parts = [{name: v[i : i + examples] for name, v in batch.items()} for i in range(0, total, examples)]
    seen = [gl.observe(task, part, training, key=str(number), **settings) for number, part in enumerate(parts)]
    return torch.stack([tree.flatten(one.update) for one in seen])


@pytest.mark.parametrize("defence", [None, Sam()])
@pytest.mark.parametrize("norm", [None, "train"])
def test_releases_are_what_the_server_observes(defence: gl.Defence | None, norm: str | None) -> None:
    task, batch = tiny(norm=norm), private(12)
    training = gl.LocalTraining(lr=0.5, steps=2)
    found = releases(task, task.weights(), batch, defence, training=training, examples=3, engine=CPU)
    rows = explicit(task, batch, training, 3, defence=defence)
    assert (found.samples, found.examples, found.size) == (4, 3, rows.shape[1])
    assert torch.allclose(found.squares, rows.square().sum(1))
    assert found.mean_square == pytest.approx(float(rows.mean(0).square().sum()))
    assert torch.allclose(found.spectrum[:3], torch.linalg.eigvalsh(rows.T.cov()).flip(0)[:3])
    assert float(found.spectrum[3]) < 1e-12 * float(found.spectrum[0])


def test_what_sam_releases_is_not_the_gradient() -> None:
    task, batch = tiny(), private(12)
    plain, disturbed = (releases(task, task.weights(), batch, defence, engine=CPU) for defence in (None, Sam()))
    assert not torch.allclose(plain.spectrum, disturbed.spectrum, rtol=1e-2)
    assert torch.allclose(releases(task, task.weights(), batch, Sam(0.0), engine=CPU).spectrum, plain.spectrum)


@pytest.mark.parametrize("call", [releases, sharpness])
def test_weights_that_are_not_all_of_the_models_are_refused(call: Any) -> None:
    task, batch = tiny(), private(4)
    weights = task.weights()
    name = next(iter(weights))
    with pytest.raises(TaskError, match=f"weights are not of this model: they differ at {name}"):
        call(task, {other: value for other, value in weights.items() if other != name}, batch, engine=CPU)
    with pytest.raises(TaskError, match="The batch lacks y"):
        call(task, weights, {"x": batch["x"]}, engine=CPU)


@pytest.mark.parametrize("call", [releases, sharpness])
def test_dropout_is_refused_in_words_and_taken_in_evaluation_mode(call: Any) -> None:
    model = nn.Sequential(tiny().model, nn.Dropout(0.5))
    like = (torch.zeros(1, 1, *private(1)["x"].shape[2:]), torch.zeros(1, dtype=torch.long))
    task, batch = gl.Task.supervised(model, cross_entropy, like=like), private(4)
    with pytest.raises(EngineError, match=r"draws random numbers.*dropout.*model\.eval\(\)"):
        call(task, task.weights(), batch, engine=CPU)
    task.model.eval()
    call(task, task.weights(), batch, engine=CPU)


def test_out_of_memory_says_what_to_change_and_the_first_line_of_what_torch_says() -> None:
    with pytest.raises(EngineError, match=r"pass a smaller block.*\(Tried to allocate 2 GiB\.\)$"), explained():
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nAnd much more, over many lines.")


def test_what_torch_cannot_do_under_vmap_is_said_and_any_other_error_is_left_alone() -> None:
    with pytest.raises(EngineError, match=r"cannot run under vmap.*no Batching rule for aten::x$"), explained():
        raise RuntimeError("no Batching rule for aten::x\nover many lines")
    with pytest.raises(RuntimeError, match="^shapes do not fit$"), explained():
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(("block", "hold"), [(1, 1), (2, 3), (64, 5)])
def test_releases_do_not_depend_on_how_many_fit_at_once(block: int, hold: int) -> None:
    task, batch = tiny(), private(12)
    together = releases(task, task.weights(), batch, engine=CPU)
    apart = releases(task, task.weights(), batch, engine=CPU, block=block, hold=hold)
    assert torch.allclose(apart.spectrum, together.spectrum, rtol=1e-9, atol=1e-14)
    assert torch.allclose(apart.squares, together.squares)
    assert apart.mean_square == pytest.approx(together.mean_square)


def test_a_mean_that_dwarfs_the_differences_costs_no_digits() -> None:
    task, x = linear(torch.eye(4, dtype=torch.float64)), normal(20, 1, 1, 4)
    near, far = (releases(task, task.weights(), {"x": x + shift}, engine=CPU) for shift in (0.0, 1e6))
    assert torch.allclose(near.spectrum, far.spectrum, rtol=1e-8, atol=1e-8)
    assert far.mean_share == pytest.approx(1.0)


def test_a_defence_that_draws_gets_a_stream_of_its_own_for_every_client() -> None:
    task, batch = tiny(), private(2)
    same = {name: value[:1].repeat(6, *[1] * (value.dim() - 1)) for name, value in batch.items()}
    assert float(releases(task, task.weights(), same, engine=CPU).spectrum[0]) < 1e-20
    found = [releases(task, task.weights(), same, Jitter(), engine=CPU, seed=seed).spectrum for seed in (0, 0, 1)]
    assert float(found[0][4]) > 1e-3
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@dataclass(frozen=True)
class Jitter(gl.Defence):
    """Noise of standard deviation 0.1 on every entry."""

    def upload(self, upload: gl.Upload, client: Any) -> gl.Upload:
        def noisy(params: Params) -> Params:
            flat = tree.flatten(params)
            return tree.unflatten(flat + 0.1 * client.draws.normal(tuple(flat.shape), dtype=flat.dtype), params)

        return upload.map(noisy)


@pytest.mark.parametrize("examples", [0, 5, 7])
def test_examples_that_cannot_be_dealt_out_are_refused(examples: int) -> None:
    task = tiny()
    with pytest.raises(TaskError, match="cannot be divided among"):
        releases(task, task.weights(), private(12), examples=examples, engine=CPU)


def test_releases_without_any_signal_are_refused() -> None:
    task = linear(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="Every release is zero"):
        releases(task, task.weights(), {"x": normal(5, 1, 1, 4)}, engine=CPU)
    with pytest.raises(ValueError, match="not finite"):
        releases(task, task.weights(), {"x": torch.full((5, 1, 1, 4), math.inf)}, engine=CPU)


# --- the channel bound ------------------------------------------------------------------------------------------------


def mutual_information(matrix: Tensor, covariance: Tensor, sigma: float) -> float:
    """I(X; A X + Z) of Gaussians, from the entropies of the two and of both together."""
    seen = matrix @ covariance @ matrix.T + sigma**2 * torch.eye(len(matrix), dtype=torch.float64)
    both = torch.cat([torch.cat([covariance, covariance @ matrix.T], 1), torch.cat([matrix @ covariance, seen], 1)])
    return float(covariance.logdet() + seen.logdet() - both.logdet()) / 2


def test_for_a_linear_gaussian_client_the_bound_is_the_mutual_information() -> None:
    matrix, root = normal(6, 4), normal(4, 4, seed=1)
    covariance = root @ root.T
    eigenvalues = torch.linalg.eigvalsh(matrix @ covariance @ matrix.T).clamp_min(0)
    sigmas = torch.tensor([0.01, 0.3, 5.0], dtype=torch.float64)
    wanted = [mutual_information(matrix, covariance, float(sigma)) for sigma in sigmas]
    assert channel_bound(eigenvalues, sigmas).tolist() == pytest.approx(wanted)

    task = linear(matrix)
    x = (normal(1024, 4, seed=2) @ root.T).reshape(-1, 1, 1, 4)
    curve = releases(task, task.weights(), {"x": x}, engine=CPU, block=1024).curve(sigmas=sigmas.tolist())
    assert curve.nats[-1].tolist() == pytest.approx(wanted, rel=0.05)
    assert curve.growth is not None
    assert float(curve.growth.abs().max()) < 0.05  # four directions, a thousand samples: level


def test_a_mean_of_two_examples_says_less_than_one() -> None:
    task, x = linear(normal(6, 4)), normal(800, 1, 1, 4)
    alone, pairs = (releases(task, task.weights(), {"x": x}, examples=b, engine=CPU, block=800) for b in (1, 2))
    assert float(pairs.spectrum.sum()) == pytest.approx(float(alone.spectrum.sum()) / 2, rel=0.1)
    one, two = (seen.curve(sigmas=[0.1], counts=[400]).nats for seen in (alone, pairs))
    assert float(two) < float(one)


def test_the_curve_falls_with_noise_and_grows_with_samples() -> None:
    task = tiny()
    found = releases(task, task.weights(), private(256), engine=CPU)
    curve = found.curve(shares=(1e-3, 1e-2, 1e-1))
    assert curve.counts == (64, 128, 256)
    assert curve.nats.shape == curve.spread.shape == (3, 3)
    assert bool((curve.nats.diff(dim=0) > 0).all())
    assert bool((curve.nats.diff(dim=1) < 0).all())
    assert curve.sigmas == pytest.approx([found.level * share for share in (1e-3, 1e-2, 1e-1)])
    assert float(curve.spread[-1].max()) == 0.0  # all of them: one choice
    record = json.loads(json.dumps(curve.record()))
    assert "grows with their number" in record["label"]
    assert record["shares"] == pytest.approx([1e-3, 1e-2, 1e-1])


def test_all_samples_give_at_least_the_mean_of_those_that_leave_one_out() -> None:
    """The covariance of n is the mean of the n that leave one out, and log det is concave: why the curve grows."""
    found = releases(tiny(), tiny().weights(), private(9), engine=CPU)
    whole = found.curve(shares=(0.1,)).nats
    rows = torch.arange(9)
    fewer = []
    for left in range(9):
        kept = rows[rows != left]
        part = Releases(found.gram[kept][:, kept], found.size, 1, found.squares[kept], 0.0)
        fewer.append(part.curve(sigmas=[0.1 * found.level]).nats)
    assert float(whole) > float(torch.stack(fewer).mean())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"counts": [2, 13]}, "from 2 to the 12"),
        ({"counts": []}, "from 2 to the 12"),
        ({"sigmas": [0.1, 0.0]}, "without noise the information is infinite"),
        ({"sigmas": []}, "levels above 0"),
        ({"subsets": 0}, "subsets"),
    ],
)
def test_curves_out_of_range_are_refused(settings: dict[str, Any], told: str) -> None:
    found = releases(tiny(), tiny().weights(), private(12), engine=CPU)
    with pytest.raises(ValueError, match=told):
        found.curve(**settings)


# --- the input --------------------------------------------------------------------------------------------------------


def by_hand(jacobian: Tensor, sigma: float, prior: float = 0.25) -> tuple[float, float, float]:
    """Information, effective rank and error from the Fisher matrix itself; J is (d, n)."""
    n = jacobian.shape[1]
    eye = torch.eye(n, dtype=torch.float64)
    fisher = jacobian.T @ jacobian / sigma**2
    posterior = torch.linalg.inv(fisher + eye / prior**2)
    return (
        float((eye + prior**2 * fisher).logdet()) / 2,
        float((fisher @ posterior).trace()),
        float(posterior.trace()) / n,
    )


@pytest.mark.parametrize("defence", [None, Sam()])
def test_input_information_is_that_of_the_explicit_jacobian(defence: gl.Defence | None) -> None:
    task, batch = tiny(mean=0.4, std=0.3), private(1)
    training = gl.LocalTraining(lr=0.5)
    seen = gl.observe(task, batch, training, defence)
    shares = (1e-2, 1e-1)
    found = input_information(
        task, seen, batch, gl.Knowledge(training=training, defence=defence), shares=shares, engine=CPU
    )

    def released(pixels: Tensor) -> Tensor:
        x = (pixels.reshape(batch["x"].shape) - 0.4) / 0.3
        return tree.flatten(training.run(task, seen.weights, {**batch, "x": x}, defence)[0].payload["update"])

    jacobian = jacrev(released)((batch["x"] * 0.3 + 0.4).flatten())
    level = float(tree.flatten(seen.update).square().mean().sqrt())
    for each, share in zip(found, shares, strict=True):
        assert each.sigma == pytest.approx(share * level)
        wanted = by_hand(jacobian, each.sigma)
        told = (each.floor.information, each.floor.effective_rank, each.floor.mse)
        assert told == pytest.approx(wanted, rel=1e-6)
    assert found[0].floor.information > found[1].floor.information
    assert found[0].floor.mse < found[1].floor.mse
    assert set(found[0].record()) == {"share", "sigma", "information", "effective_rank", "mse", "psnr"}


@dataclass(frozen=True)
class Noise(gl.Defence):
    """Says that there is noise of this deviation, for the attacker's account of it."""

    std: float = 0.0

    def noise_variance(self, scene: TargetView) -> Params:
        return tree.map(lambda value: torch.full_like(value, self.std**2), scene.update)


def test_noise_of_the_defence_is_added_to_the_tolerance() -> None:
    task, batch = tiny(), private(1)
    training = gl.LocalTraining(lr=1.0)
    seen = gl.observe(task, batch, training)
    (plain,) = input_information(task, seen, batch, gl.Knowledge(training=training), shares=[0.05], engine=CPU)
    four_thirds = gl.Knowledge(training=training, defence=Noise(plain.sigma * 4 / 3))
    (both,) = input_information(task, seen, batch, four_thirds, shares=[0.05], engine=CPU)
    (wider,) = input_information(task, seen, batch, gl.Knowledge(training=training), shares=[0.05 * 5 / 3], engine=CPU)
    assert both.floor.information == pytest.approx(wider.floor.information)
    assert both.floor.mse == pytest.approx(wider.floor.mse)


def test_for_one_linear_gaussian_example_input_and_channel_agree() -> None:
    matrix = normal(6, 4)
    task, x = linear(matrix), torch.full((1, 1, 1, 4), 0.5, dtype=torch.float64)
    training = gl.LocalTraining(lr=1.0)
    seen = gl.observe(task, {"x": x}, training)
    (found,) = input_information(task, seen, {"x": x}, gl.Knowledge(training=training), shares=[0.1], engine=CPU)
    prior = 0.25**2 * torch.eye(4, dtype=torch.float64)
    assert found.floor.information == pytest.approx(mutual_information(matrix, prior, found.sigma))


def test_noise_levels_of_nothing_are_refused() -> None:
    task, batch = tiny(), private(1)
    seen = gl.observe(task, batch, gl.LocalTraining(lr=1.0))
    with pytest.raises(ValueError, match="without noise"):
        input_information(task, seen, batch, shares=[0.0], engine=CPU)


# --- sharpness --------------------------------------------------------------------------------------------------------


def largest_in_ball(matrix: Tensor, slope: Tensor, rho: float) -> float:
    """Max of <g, d> + 1/2 d^T Q d over ||d|| <= rho, by the secular equation: d = (m I - Q)^-1 g, ||d|| = rho."""
    values, vectors = torch.linalg.eigh(matrix)
    along = vectors.T @ slope
    low, high = float(values[-1]) + 1e-12, float(values[-1]) + float(slope.norm()) / rho + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((along / (middle - values)).norm()) > rho else (low, middle)
    step = along / (high - values)
    return float(along @ step + 0.5 * (values * step.square()).sum())


@pytest.mark.parametrize("seed", range(3))
def test_the_worst_loss_of_a_quadratic_is_found(seed: int) -> None:
    root = normal(8, 8, seed=seed)
    matrix, slope, rho = root @ root.T - torch.eye(8, dtype=torch.float64), normal(8, seed=seed + 10), 0.7
    task, batch = quadratic(matrix, slope)
    values, vectors = torch.linalg.eigh(matrix)
    found = sharpness(task, task.weights(), batch, rho, top=vectors[:, -1], engine=CPU)
    wanted = largest_in_ball(matrix, slope, rho)
    assert found.worst <= wanted + 1e-9
    assert found.sharpness == pytest.approx(wanted, rel=1e-3)
    assert found.loss == 0.0
    assert found.gradient_norm == pytest.approx(float(slope.norm()))
    assert found.one_step <= found.worst
    assert float(values[-1]) <= found.curvature_bound <= found.printed_bound
    assert len(found.found) == 5


def test_at_a_minimum_the_ball_measures_the_largest_eigenvalue() -> None:
    matrix = torch.diag(torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64))
    task, batch = quadratic(matrix, torch.zeros(3, dtype=torch.float64))
    top = torch.tensor([0.0, 0, 2.0], dtype=torch.float64)
    found = sharpness(task, task.weights(), batch, 0.1, top=top, engine=CPU)
    assert found.worst == pytest.approx(0.5 * 7 * 0.01)
    assert found.curvature_bound == found.printed_bound == pytest.approx(7.0)
    assert found.one_step == 0.0  # the usual step has nowhere to go: it sees no sharpness at all


def test_where_the_loss_only_falls_the_worst_is_here() -> None:
    task, batch = quadratic(-torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert sharpness(task, task.weights(), batch, engine=CPU).sharpness == 0.0


@pytest.mark.parametrize("norm", [None, "train"])
def test_of_a_network_it_is_the_loss_at_disturbed_weights(norm: str | None) -> None:
    task, batch, rho = tiny(norm=norm), private(6), 0.05
    weights = task.weights()
    gradient = task.gradient(weights, batch)
    one_step = task.loss(tree.add(weights, gradient, rho / tree.norm(gradient)), batch)[0]

    def flat(vector: Tensor) -> Tensor:
        return task.loss(tree.unflatten(vector, weights), batch)[0]

    values, vectors = torch.linalg.eigh(hessian(flat)(tree.flatten(weights)))
    found = sharpness(task, weights, batch, rho, top=vectors[:, -1], engine=CPU)
    assert found.one_step == pytest.approx(float(one_step))
    assert found.worst > found.one_step
    assert found.loss == pytest.approx(float(task.loss(weights, batch)[0]))
    assert found.gradient_norm == pytest.approx(float(tree.norm(gradient)))
    assert found.curvature_bound > float(values[-1])
    json.dumps(found.record())


def test_starts_that_do_not_fit_are_refused() -> None:
    task, batch = quadratic(torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    weights = task.weights()
    with pytest.raises(ValueError, match="vector of the 3 weights"):
        sharpness(task, weights, batch, top=torch.ones(4), engine=CPU)
    with pytest.raises(ValueError, match="at least the 3 that are given"):
        sharpness(task, weights, batch, top=torch.ones(3), starts=2, engine=CPU)
    with pytest.raises(ValueError, match="rho must be above 0"):
        sharpness(task, weights, batch, 0.0, engine=CPU)
    with pytest.raises(ValueError, match="not finite"):
        sharpness(task, {"weight": torch.full((3,), math.inf)}, batch, engine=CPU)


# --- the index, and the step it rests on ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_det", "examples", "wanted"), [(-54_093, 1, -4_590), (-54_093, 64, -37_500), (-54_661.07, 1, -4_874)]
)
def test_the_printed_index_of_a_lenet_is_negative(log_det: float, examples: int, wanted: float) -> None:
    found = curvature_index(15_826, examples, log_det=log_det)
    assert found.determinant == pytest.approx(wanted, abs=1)
    assert (found.ball, found.sharper) == (None, None)
    record = found.record()
    assert "not a bound on information" in record["label"]
    assert len(record["premises"]) == 7


def test_the_printed_index_of_a_ball_by_hand() -> None:
    ball = Sharpness(0.5, loss=1.0, worst=1.5, one_step=1.4, gradient_norm=2.0, found=(1.5,), parameters=4)
    assert ball.curvature_bound == pytest.approx(4.0)
    assert ball.printed_bound == pytest.approx(12.0)
    found = curvature_index(4, 2, sharpness=ball)
    assert found.ball == pytest.approx(2 * math.log(math.pi * math.e) + 2 * math.log(12))
    assert found.sharper == pytest.approx(2 * math.log(math.pi * math.e) + 2 * math.log(4))
    flat = Sharpness(0.5, loss=1.0, worst=1.0, one_step=1.0, gradient_norm=0.0, found=(1.0,), parameters=4)
    assert curvature_index(4, sharpness=flat).ball == -math.inf
    assert isinstance(found, CurvatureIndex)


def test_an_index_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="log_det, sharpness or both"):
        curvature_index(4)
    ball = Sharpness(0.5, loss=1.0, worst=1.5, one_step=1.4, gradient_norm=2.0, found=(1.5,), parameters=4)
    with pytest.raises(ValueError, match="that of 4 weights"):
        curvature_index(5, sharpness=ball)
    with pytest.raises(ValueError, match="at least 1"):
        curvature_index(0, log_det=1.0)


def softmax_regression() -> gl.Task:
    """No hidden layer and weights of zero: every class is equally likely, and the Hessian is the Fisher matrix."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES, bias=False)).to(torch.float64)
    nn.init.zeros_(model[1].weight)
    return gl.Task.supervised(model, cross_entropy, like=(torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.long)))


def curvature(task: gl.Task, batch: Batch) -> Tensor:
    like = task.weights()
    flat = lambda vector: task.loss(tree.unflatten(vector, like), batch)[0]  # noqa: E731
    return hessian(flat)(tree.flatten(like))


def test_with_labels_drawn_from_the_model_the_covariance_is_the_curvature() -> None:
    """Every image with every label, each as likely as the model thinks: what the step Sigma_G = H / B assumes."""
    task, x = softmax_regression(), private(10)["x"]
    batch = {"x": x.repeat(CLASSES, 1, 1, 1), "y": torch.arange(CLASSES).repeat_interleave(10)}
    matrix = curvature(task, batch)
    values = torch.linalg.eigvalsh(matrix).flip(0)
    log_det = 0.5 * float((values.square() + 1e-3).log().sum())
    seen = releases(task, task.weights(), batch, engine=CPU)
    found = against_curvature(seen, float(matrix.trace()), values[:5], log_det=log_det)
    unbiased = 30 / 29
    assert found.mean_share == pytest.approx(0.0, abs=1e-20)
    assert found.trace_ratio == pytest.approx(unbiased)
    assert found.top_ratios == pytest.approx([unbiased] * 5)
    assert found.excesses[0] == pytest.approx(found.excesses[1], rel=0.1)
    assert found.index == curvature_index(48, log_det=log_det).determinant
    covariance = unbiased * matrix + 1e-3 * torch.eye(48, dtype=torch.float64)
    assert found.entropy == pytest.approx(24 * math.log(2 * math.pi * math.e) + float(covariance.logdet()) / 2)
    assert json.loads(json.dumps(found.record()))["trace_ratio"] == pytest.approx(unbiased)


def test_with_labels_of_the_data_it_is_not() -> None:
    task, x = softmax_regression(), private(10)["x"]
    batch = {"x": x, "y": torch.zeros(10, dtype=torch.long)}
    matrix = curvature(task, batch)
    seen = releases(task, task.weights(), batch, engine=CPU)
    found = against_curvature(seen, float(matrix.trace()), torch.linalg.eigvalsh(matrix).flip(0)[:2])
    assert found.mean_share > 0.5
    assert found.trace_ratio < 0.5
    assert found.top_ratios[0] < 0.2
    assert (found.excesses[1], found.index) == (None, None)


def test_the_curvature_is_divided_by_the_examples() -> None:
    task, batch = tiny(), private(12)
    seen = releases(task, task.weights(), batch, examples=3, engine=CPU)
    found = against_curvature(seen, 6.0, torch.tensor([3.0, 1.5]))
    assert found.traces[1] == 2.0
    assert found.tops[1] == (1.0, 0.5)


def test_more_releases_than_weights_have_the_same_entropy_bound() -> None:
    task, x = linear(normal(3, 4)), normal(40, 1, 1, 4)
    found = against_curvature(releases(task, task.weights(), {"x": x}, engine=CPU), 1.0, torch.ones(1))
    rows = x.reshape(40, 4) @ normal(3, 4).T
    wanted = 1.5 * math.log(2 * math.pi * math.e)
    wanted += float((rows.T.cov() + 1e-3 * torch.eye(3, dtype=torch.float64)).logdet()) / 2
    assert found.entropy == pytest.approx(wanted)


@pytest.mark.parametrize("top", [torch.ones(12), torch.tensor([1.0, 2.0]), torch.ones(2, 2), torch.ones(0)])
def test_spectra_that_cannot_be_compared_are_refused(top: Tensor) -> None:
    seen = releases(tiny(), tiny().weights(), private(12), engine=CPU)
    with pytest.raises(ValueError, match="between 1 and 11 eigenvalues"):
        against_curvature(seen, 1.0, top)
    with pytest.raises(ValueError, match="damping"):
        against_curvature(seen, 1.0, torch.ones(1), damping=0.0)
