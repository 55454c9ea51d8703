"""The second-order attack: exact where the update determines the data, also through defences and several steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from conftest import largest_difference
from gradleak.attack.cascade import matches, taken
from gradleak.attacks.second_order import SOLVED, SecondOrder
from gradleak.attacks.second_order.krylov import GaussNewtonKrylov
from gradleak.core import tree
from gradleak.core.linear import jacobian
from gradleak.defences import FedSAM
from gradleak.engine import Engine
from gradleak.parts.levenberg import LevenbergMarquardt
from gradleak.parts.matches import Relative, Sketched, SquaredError
from gradleak.parts.priors import Box, NaturalImage, ReweightedVariation, Smoothness, roughness
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Defence
from gradleak.scenario.observation import Knowledge

SHAPE = (3, 8, 8)
ONE_STEP = LocalTraining(lr=0.1)
CPU = Engine(device="cpu")


def task_of(activation: str = "sigmoid", width: int = 6, seed: int = 0, colours: int = 3) -> gl.Task:
    shape = (colours, *SHAPE[1:])
    model = gl.models.lenet_zhu(
        shape=shape, classes=5, width=width, activation=activation, generator=torch.Generator().manual_seed(seed)
    )
    like = torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long)
    return gl.Task.supervised(model.double(), F.cross_entropy, like=like)


def private(examples: int = 1, seed: int = 0, colours: int = 3) -> dict[str, Tensor]:
    """Images that are smooth, as photographs are: random 4 x 4 ones, enlarged."""
    coarse = torch.rand(examples, colours, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = F.interpolate(coarse, size=SHAPE[1:], mode="bilinear")
    return {"x": x, "y": torch.randint(5, (examples,), generator=torch.Generator().manual_seed(seed))}


def attacked(
    task: gl.Task,
    batch: dict[str, Tensor],
    training: LocalTraining = ONE_STEP,
    defence: Defence | None = None,
    **settings: Any,
) -> tuple[gl.Reconstruction, Tensor]:
    seen = gl.observe(task, batch, training, defence)
    attack = SecondOrder(**{"certify": False, **settings})
    found = attack.run(task, seen, Knowledge(training=training, defence=defence), engine=CPU)
    return found, gl.metrics.compare(found, {name: value[None] for name, value in batch.items()}).psnr.flatten()


# --- exact recovery -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_one_image_is_recovered_exactly(seed: int) -> None:
    found, psnr = attacked(task_of(seed=seed), private(seed=seed))
    assert psnr.min() > 100
    assert found.match.max() < 1e-18


@pytest.mark.parametrize("activation", ["tanh", "gelu", "softplus", "elu"])
def test_every_smooth_activation_gives_the_image_away(activation: str) -> None:
    assert attacked(task_of(activation), private())[1].min() > 100


def test_a_defence_that_the_attacker_can_simulate_does_not_hide_the_image() -> None:
    assert attacked(task_of(), private(), defence=FedSAM())[1].min() > 100


def test_a_client_that_shuffles_its_minibatches_is_replayed_in_every_order() -> None:
    """Two images, one a step, one and a half epochs: of four orders the client's secret one is the last."""
    training = LocalTraining(lr=0.1, steps=3, batch_size=1)
    batch = {"x": private(2, colours=1)["x"], "y": torch.tensor([3, 1])}
    assert attacked(task_of(width=4, colours=1), batch, training, steps=8)[1].min() > 100


def test_a_float32_client_is_recovered_to_its_rounding() -> None:
    task = task_of()
    task = replace(task, model=task.model.float())
    batch = {"x": private()["x"].float(), "y": private()["y"]}
    seen = gl.observe(task, batch, ONE_STEP, wire="weights")
    found = SecondOrder(certify=False).run(task, seen, Knowledge(training=ONE_STEP), engine=CPU)
    assert gl.metrics.compare(found, {name: value[None] for name, value in batch.items()}).psnr.min() > 70


def test_several_targets_are_lanes_of_their_own() -> None:
    task = task_of()
    batches = [private(seed=seed) for seed in range(3)]
    weights = task.weights()
    seen = [gl.observe(task, batch, ONE_STEP, weights=weights, key=str(i)) for i, batch in enumerate(batches)]
    attack, knows = SecondOrder(certify=False), Knowledge(training=ONE_STEP)
    together = attack.run(task, seen, knows, engine=CPU)
    for row, each in enumerate(seen):
        alone = attack.run(task, each, knows, engine=CPU)
        torch.testing.assert_close(together.batch["x"][row], alone.batch["x"][0], rtol=0, atol=1e-7)


# --- what the update does not determine -----------------------------------------------------------------------------


class Blind(nn.Module):
    """Never looks at the last column."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(torch.cat([x[..., :-1], torch.zeros_like(x[..., -1:])], dim=-1))


def test_what_is_not_determined_is_filled_by_the_prior_and_certified_as_such() -> None:
    task, batch = task_of(), private()
    task = replace(task, model=Blind(task.model))
    found, _ = attacked(task, batch, certify=True)
    assert found.match.max() < 1e-18
    assert found.certificates is not None
    [certificate] = found.certificates
    assert certificate.null == 3 * SHAPE[1]
    assert certificate.verdict == f"determined up to {3 * SHAPE[1]} dimensions"
    x = found.batch["x"][0]
    assert largest_difference(x[..., :-1], batch["x"][..., :-1]) < 1e-6
    # The likeliest continuation: least squares of the roughness, given all other pixels.
    rough = lambda flat: roughness(flat.reshape(x.shape), (-1, -2))  # noqa: E731
    terms = jacobian(rough, torch.zeros_like(x).flatten())  # (n, terms)
    last = torch.zeros_like(x, dtype=torch.bool)
    last[..., -1] = True
    known = terms[~last.flatten()].T @ x[~last]
    likeliest = torch.linalg.lstsq(terms[last.flatten()].T, -known[:, None]).solution[:, 0]
    assert largest_difference(x[last], likeliest) < 1e-3


def test_without_an_axis_of_space_rough_is_what_lies_far_from_the_middle() -> None:
    assert roughness(torch.tensor([[0.5, 0.0], [1.0, 0.75]]), ()).tolist() == [0.0, -0.5, 0.5, 0.25]


def test_one_image_is_certified() -> None:
    found, _ = attacked(task_of(), private(), certify=True)
    assert found.certificates is not None
    assert found.certificates[0].verdict == "determined"


def test_two_images_of_a_narrow_network_are_not_determined() -> None:
    """Solved to rounding, and yet not the private images: the certificate counts what the update leaves open."""
    found, psnr = attacked(task_of(width=3), private(2, seed=1), certify=True)
    assert found.match.max() < 1e-18
    assert psnr.max() < 60
    assert found.certificates is not None
    assert found.certificates[0].null == 72  # of 384 unknowns; of one image, 192 of 192 are determined
    assert "determined up to" in found.certificates[0].verdict


def test_noise_is_met_by_the_prior_and_not_fitted() -> None:
    task, batch, noise = task_of(), private(), 0.05
    seen = gl.observe(task, batch, ONE_STEP)
    draw = torch.Generator().manual_seed(0)

    def noisy(u: Tensor) -> Tensor:
        return u + noise * u.square().mean().sqrt() * torch.randn(u.shape, generator=draw, dtype=u.dtype)

    seen = replace(seen, update=tree.map(noisy, seen.update))
    truth = {name: value[None] for name, value in batch.items()}
    knows = Knowledge(training=ONE_STEP)
    weighed, fitted = (
        gl.metrics.compare(
            SecondOrder(certify=False, steps=20, prior=prior).run(task, seen, knows, engine=CPU), truth
        ).psnr
        for prior in (1.0, 1e-12)
    )
    assert weighed.mean() > fitted.mean() + 1


# --- other forms ------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """ReLUs called as functions, and a shortcut: no chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.last = nn.Linear(6 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.first(x))
        return self.last((a + F.relu(self.second(a))).flatten(1))


def branching() -> gl.Task:
    torch.manual_seed(0)
    like = torch.zeros(1, 1, *SHAPE[1:]), torch.zeros(1, dtype=torch.long)
    return gl.Task.supervised(Branching().double(), F.cross_entropy, like=like)


def test_a_network_with_kinks_is_followed_from_smoothed_ones() -> None:
    task, batch = branching(), private(colours=1)
    seen = gl.observe(task, batch, ONE_STEP)
    [attack] = SecondOrder().ways(task, Knowledge(training=ONE_STEP), [gl.Track((seen,))], CPU)
    assert [stage.view is None for stage in attack.stages] == [False] * 5 + [True] * 2
    before = task.model(batch["x"]).detach()
    found, _ = attacked(task, batch, steps=12)
    assert torch.equal(task.model(batch["x"]).detach(), before)
    assert found.match.max() < 0.5 * found.trace["match"][0].min()


@pytest.mark.slow
def test_a_wide_residual_network_of_relus_is_solved_exactly() -> None:
    """104 equations a pixel: along smoothed networks some of the restarts arrive."""
    make = torch.Generator().manual_seed(0)
    model = gl.models.resnet((1, 1), 16, shape=SHAPE, norm="group", activation="relu", generator=make)
    images = gl.data.load("cifar10-samples", limit=2)
    x = F.avg_pool2d(images.x, 4).double()
    task = gl.Task.supervised(model.double(), F.cross_entropy, like=(x, images.y))
    found = [attacked(task, {"x": x[i : i + 1], "y": images.y[i : i + 1]})[1] for i in range(2)]
    assert torch.cat(found).max() > 100


def test_the_matrix_free_form_needs_no_jacobian() -> None:
    task, batch = task_of(colours=1), private(colours=1)
    seen, knows = gl.observe(task, batch, ONE_STEP), Knowledge(training=ONE_STEP)
    [attack] = SecondOrder(method="krylov").ways(task, knows, [gl.Track((seen,))], CPU)
    assert all(isinstance(stage.optimiser, GaussNewtonKrylov) for stage in attack.stages)
    _, psnr = attacked(task, batch, method="krylov", steps=4, vectors=24)
    assert psnr.min() > 40


def test_a_wide_network_is_sketched() -> None:
    task, batch = task_of(width=24, colours=1), private(colours=1)
    seen, knows = gl.observe(task, batch, ONE_STEP), Knowledge(training=ONE_STEP)
    attack, *_ = SecondOrder().ways(task, knows, [gl.Track((seen,))], CPU)
    assert isinstance(attack.stages[-1].match, Sketched)
    assert isinstance(attack.stages[-1].optimiser, LevenbergMarquardt)
    assert attacked(task, batch)[1].min() > 100


def test_a_sketch_keeps_the_squared_error_of_entries_that_agree_in_sign() -> None:
    """Random signs keep a sum of 64 ones at 64 when squared, on average; without them it would be 64^2."""
    rows, entries = 64, 4096
    sketch = Sketched(SquaredError(), rows)
    observed = {"w": torch.zeros(40, 100, dtype=torch.float64), "b": torch.zeros(96, dtype=torch.float64)}
    predicted = {name: torch.ones_like(value) for name, value in observed.items()}
    assert sketch.residual(predicted, observed)["rows"].shape == (rows,)
    exact = float(SquaredError().distance(predicted, observed))
    spread = exact * math.sqrt(2 * (1 - rows / entries) / rows)  # variance of a row's square: 2 m (m - 1) for m signs
    assert abs(float(sketch.distance(predicted, observed)) - exact) < 3 * spread
    assert float(sketch.distance(predicted, predicted)) == 0


def test_a_first_order_result_is_polished_and_never_spoiled() -> None:
    task, batch = task_of(), private()
    _, rough = attacked_by("ig:steps=60", task, batch)
    polished, fine = attacked(task, batch, after="ig:steps=60")
    assert fine.min() > 100 > rough.max()
    kinked = branching()
    grey = private(colours=1)
    rough_match, _ = attacked_by("ig:steps=60", kinked, grey, match=Relative())
    stuck, _ = attacked(kinked, grey, after="ig:steps=60")
    assert stuck.match.max() <= rough_match * (1 + 1e-9)


def attacked_by(name: str, task: gl.Task, batch: dict[str, Tensor], match: Relative | None = None) -> Any:
    seen = gl.observe(task, batch, ONE_STEP)
    attack = gl.registry.parse("attack", name)
    found = attack.run(task, seen, Knowledge(training=ONE_STEP), engine=Engine(device="cpu", precision="double"))
    psnr = gl.metrics.compare(found, {key: value[None] for key, value in batch.items()}).psnr
    if match is None:
        return found, psnr
    predicted = tree.scale(task.gradient(task.weights(), found.target(0)), 0.1)
    return float(match.distance(predicted, match.prepare(seen.update))), psnr


def test_after_must_name_an_attack_of_stages() -> None:
    with pytest.raises(ValueError, match="made of stages"):
        SecondOrder(after="analytic")
    with pytest.raises(ValueError, match="method"):
        SecondOrder(method="exact")


def test_what_a_later_way_solves_takes_the_place_of_what_an_earlier_one_found() -> None:
    """Curves of other lengths, more restarts: the solved target is replaced, the other stays."""
    early, late = (told(points, restarts, value) for points, restarts, value in ((5, 1, 0.3), (7, 4, 0.2)))
    late.match[0, 2] = 1e-20  # only its first target, in its third restart
    late.chosen[0] = 2
    late.trace["match"][:, 0, 2] = torch.linspace(1, 0, 7, dtype=torch.float64)
    late.candidates["x"][0, 2] = 1.0
    both = taken(early, late, [1, 0], matches(late) < SOLVED)
    assert both.match[:, 0].tolist() == [0.3, 1e-20]
    assert both.chosen.tolist() == [0, 0]
    assert both.trace["match"].shape == (7, 2, 1)
    assert both.trace["match"][:, 1, 0].tolist() == pytest.approx(torch.linspace(1, 0, 7).tolist())
    assert both.trace["match"][:, 0, 0].tolist() == [0.3] * 7
    assert (both.batch["x"][1] == 1).all()
    assert torch.equal(both.batch["x"][0], early.batch["x"][0])


def told(points: int, restarts: int, value: float) -> gl.Reconstruction:
    x = torch.full((2, restarts, 1, 3, 2, 2), value, dtype=torch.float64)
    number = torch.full((2, restarts), value, dtype=torch.float64)
    curve = torch.full((points, 2, restarts), value, dtype=torch.float64)
    return gl.Reconstruction(
        batch={"x": x[:, 0]},
        candidates={"x": x},
        objective=number,
        match=number.clone(),
        chosen=torch.zeros(2, dtype=torch.long),
        diverged=torch.zeros(2, restarts, dtype=torch.bool),
        trace={"step": torch.arange(points), "objective": curve, "match": curve.clone()},
        fields={},
        keys=("a", "b"),
        examples=(1, 1),
        seconds=1.0,
        evaluations=points,
    )


@pytest.mark.parametrize("settings", [{"fall": 2.0}, {"prior": 0.0}, {"steps": 0}, {"labels": "nope"}], ids=str)
def test_settings_that_no_search_can_run_with_are_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises((ValueError, gl.registry.UnknownName)):
        SecondOrder(**settings)


# --- priors as residuals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prior", [NaturalImage(0.3), Smoothness(0.3), ReweightedVariation(0.3), Box(0.3)], ids=lambda p: type(p).__name__
)
def test_the_terms_of_a_prior_have_its_gradient(prior: Any) -> None:
    task = task_of()
    scene = TargetView.of(task, gl.observe(task, private(), ONE_STEP), Knowledge())
    now = Step(torch.zeros(()), 1)
    x = 1.4 * private(2)["x"] - 0.2

    def value(x: Tensor) -> Tensor:
        return prior({"x": x}, {}, scene, now)

    def squares(x: Tensor) -> Tensor:
        return prior.terms({"x": x}, {}, scene, now).square().sum()

    torch.testing.assert_close(torch.func.grad(squares)(x), torch.func.grad(value)(x), rtol=1e-9, atol=1e-12)


def test_the_reweighted_variation_lies_below_its_quadratic() -> None:
    """Majorisation: the quadratic of one point is never below the variation of another, up to their common constant."""
    task = task_of()
    scene = TargetView.of(task, gl.observe(task, private(), ONE_STEP), Knowledge())
    now, prior = Step(torch.zeros(()), 1), ReweightedVariation(1.0)
    here, there = private(1, seed=1)["x"], private(1, seed=2)["x"]
    terms, tangent = torch.func.jvp(lambda x: prior.terms({"x": x}, {}, scene, now), (here,), (there - here,))
    model = (terms + tangent).square().sum() - terms.square().sum() + prior({"x": here}, {}, scene, now)
    assert prior({"x": there}, {}, scene, now) <= model + 1e-12
