"""One gradient at a learned point in place of a local training: SME, NL-SME and their baselines, float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

import gradleak as gl
from conftest import clients, largest_difference, moment, perceptron, private, scene_of, tiny
from gradleak.attack import Composed
from gradleak.attacks.sme import frozen
from gradleak.core import tree
from gradleak.core.random import Draws, key
from gradleak.core.tree import Tree
from gradleak.engine import Engine, search
from gradleak.engine.search import StageObjective
from gradleak.parts.fields import Nothing
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.optimisers import Adam
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import TotalVariation
from gradleak.parts.spaces import JointSpace, Normal, Pixels
from gradleak.parts.stage import Stage
from gradleak.parts.surrogates import (
    Bezier,
    CentredControl,
    GradientAtStart,
    Inside,
    Line,
    Reach,
    Rescaled,
    SurrogateLoss,
    UnitScaling,
    Within,
    diagnosis,
    gauss_legendre,
    length,
    performance_gap,
    unit_of_control,
)
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Observation, Track
from gradleak.scenario.rules import SGD, cosine_decay
from gradleak.scenario.task import Batch, Field
from test_engine import gate, searches

EPOCHS = LocalTraining(lr=0.3, epochs=4, batch_size=1)
FAMILY = ("ig-ms", "dlg-ms", "sme", "nl-sme", "nl-sme-a", "nl-sme-b")


def observed(recipe: LocalTraining = EPOCHS, **knows: Any) -> tuple[TargetView, Batch]:
    """What a lane sees of a client of several epochs in batches of one, and what the client holds."""
    task, batch = tiny(), private(3)
    seen = gl.observe(task, batch, recipe)
    return scene_of(task, seen, Knowledge(**knows), y=batch["y"]), batch


def start_of(stage: Stage, scene: TargetView) -> Tree:
    source = scene.draws
    assert source is not None
    return {**stage.space.variables(scene, source, None), **stage.predict.variables(scene, source, None)}


def walked(stage: Stage, scene: TargetView, v: Tree | None = None) -> Tree:
    """The unknowns of one lane after all steps of the stage."""
    seen = stage.match.prepare(stage.predict.target(scene))
    v, total = v or start_of(stage, scene), stage.optimiser.steps
    at = lambda step: StageObjective(stage, scene, seen, moment(step, total))  # noqa: E731
    state = stage.optimiser.init(at(0), v)
    for step in range(total):
        v, state, _ = stage.optimiser.step(at(step), v, state, moment(step, total))
    return v


def bent(scene: TargetView, seed: int = 0) -> Tree:
    """A control point somewhere, in its own units."""
    source = Draws(key("bent", seed))
    pairs = enumerate(scene.update.items())
    return {"0": {n: source.normal(tuple(u.shape), stream=i, dtype=u.dtype) for i, (n, u) in pairs}}


def of(name: str, **settings: Any) -> Composed:
    made = gl.attacks.get(name, **settings)
    assert isinstance(made, Composed)
    return made


# --- the path ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_line_goes_from_the_weights_sent_to_those_returned(alpha: float) -> None:
    scene, _ = observed()
    returned = tree.subtract(scene.weights, scene.update)
    wanted = tree.add(tree.scale(scene.weights, 1 - alpha), returned, alpha)
    assert largest_difference(Line().weights(scene, 0, alpha, {}), wanted) < 1e-15


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_curve_is_the_quadratic_one_and_the_line_where_its_control_point_is_the_midpoint(alpha: float) -> None:
    scene, _ = observed()
    v = {"control": bent(scene)}
    returned = tree.subtract(scene.weights, scene.update)
    middle = tree.scale(tree.add(scene.weights, returned), 0.5)
    c = tree.add(middle, v["control"]["0"], unit_of_control(scene))
    wanted = tree.add(tree.scale(scene.weights, (1 - alpha) ** 2), c, 2 * alpha * (1 - alpha))
    wanted = tree.add(wanted, returned, alpha**2)
    found = Bezier().weights(scene, 0, alpha, v)
    line = Line().weights(scene, 0, alpha, {})
    assert largest_difference(found, wanted) < 1e-15
    apart = tree.scale(tree.subtract(c, middle), 2 * alpha * (1 - alpha))
    assert largest_difference(tree.subtract(found, line), apart) < 1e-15
    if alpha in (0, 1):
        assert largest_difference(found, line) == 0
    else:
        assert largest_difference(found, line) > 1e-3
    flat = {"control": {"0": tree.zeros_like(scene.update)}}
    assert largest_difference(Bezier().weights(scene, 0, alpha, flat), line) == 0


def test_the_curve_has_the_derivatives_of_the_formula() -> None:
    scene, _ = observed()
    control, alpha = bent(scene), torch.tensor(0.3, dtype=torch.float64)
    returned, r = tree.subtract(scene.weights, scene.update), unit_of_control(scene)
    c = tree.add(tree.scale(tree.add(scene.weights, returned), 0.5), control["0"], r)
    by_alpha = jacrev(lambda a: Bezier().weights(scene, 0, a, {"control": control}))(alpha)
    wanted = tree.scale(tree.subtract(c, scene.weights), 2 * (1 - 0.3))
    wanted = tree.add(wanted, tree.subtract(returned, c), 2 * 0.3)
    assert largest_difference(by_alpha, wanted) < 1e-14
    name = next(iter(scene.update))
    at = lambda z: Bezier().weights(scene, 0, alpha, {"control": {"0": {**control["0"], name: z}}})  # noqa: E731
    by_control = jacrev(at)(control["0"][name])
    size = scene.update[name].numel()
    diagonal = 2 * 0.3 * 0.7 * r * torch.eye(size, dtype=torch.float64)
    assert largest_difference(by_control[name].reshape(size, size), diagonal) < 1e-15
    assert all(not by_control[other].any() for other in by_control if other != name)


def loss_at(scene: TargetView, batch: Batch) -> Callable[[tree.Params], Tensor]:
    """The matching loss as a function of where the gradient is taken, with nothing of ours in it but the distance."""
    seen = Cosine().prepare(scene.update)
    return lambda w: Cosine().distance(scene.task.gradient(w, batch), seen)


def test_the_gradient_of_alpha_is_the_chain_rule_by_hand() -> None:
    """What SME's public code does: the derivative at the surrogate weights, times their derivative."""
    scene, _ = observed()
    guess = {"x": private(3, seed=5)["x"], "y": scene.fields["y"]}
    stage = of("sme", tv=0.0).stages[0]
    problem = StageObjective(stage, scene, stage.match.prepare(stage.predict.target(scene)), moment())
    v = {"x": guess["x"], "alpha": torch.tensor([0.4], dtype=torch.float64)}
    gradient, scored = problem.value_and_grad(v)
    down = grad(loss_at(scene, guess))(Line().weights(scene, 0, 0.4, {}))
    by_hand = -tree.dot(down, scene.update)  # wT - w0 = -u
    torch.testing.assert_close(gradient["alpha"][0], by_hand, rtol=1e-10, atol=0)
    assert by_hand.abs() > 1e-4
    slope = lambda a: loss_at(scene, guess)(Line().weights(scene, 0, a, {}))  # noqa: E731
    torch.testing.assert_close(by_hand, (slope(0.4 + 1e-5) - slope(0.4 - 1e-5)) / 2e-5, rtol=1e-6, atol=0)
    torch.testing.assert_close(scored.match, slope(0.4), rtol=1e-12, atol=0)


def test_the_gradient_of_the_control_point_is_the_papers() -> None:
    """dL/dc = 2 alpha (1 - alpha) dL/dW + 2 weight (c - m) / ||wT - w0||^2; here in units of r."""
    scene, _ = observed()
    stage = of("nl-sme", factors="off", tv=0.0, control=0.7).stages[0]
    problem = StageObjective(stage, scene, stage.match.prepare(stage.predict.target(scene)), moment())
    control, r = bent(scene), unit_of_control(scene)
    v = {"x": private(3, seed=5)["x"], "alpha": torch.tensor([0.4], dtype=torch.float64), "control": control}
    gradient, _ = problem.value_and_grad(v)
    batch = {"x": v["x"], "y": scene.fields["y"]}
    down = grad(loss_at(scene, batch))(Bezier().weights(scene, 0, 0.4, v))
    offset = tree.scale(control["0"], r)  # c - m
    by_hand = tree.scale(down, 2 * 0.4 * 0.6)
    by_hand = tree.add(by_hand, offset, 2 * 0.7 / tree.squared_norm(scene.update))
    assert largest_difference(gradient["control"]["0"], tree.scale(by_hand, r)) < 1e-14
    assert tree.norm(gradient["control"]) > 1e-3


# --- one inside the other, step for step ------------------------------------------------------------------------------


def run(attack: Composed, *, seed: int = 0, engine: Engine | None = None, **knows: Any) -> gl.Reconstruction:
    task, batch = tiny(mean=0.5, std=0.25), private(3)
    seen = gl.observe(task, {**batch, "x": task.fields["x"].model(batch["x"])}, EPOCHS)
    engine = engine or Engine(device="cpu", precision="double")
    return attack.run(task, seen, Knowledge(given={"y": batch["y"]}, **knows), seed, engine=engine)


def with_stage(attack: Composed, **parts: Any) -> Composed:
    return replace(attack, stages=(replace(attack.stages[0], **parts),))


def same_path(a: gl.Reconstruction, b: gl.Reconstruction) -> None:
    assert len(a.trace["step"]) == 12
    torch.testing.assert_close(a.trace["match"], b.trace["match"], rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(a.candidates["x"], b.candidates["x"], rtol=0, atol=1e-9)


SHORT = {"steps": 12, "keep": "last", "lr": 0.1}


def test_sme_with_alpha_zero_is_ig_on_updates() -> None:
    plain = run(of("ig-ms", **SHORT))
    same_path(run(of("sme", alpha=0.0, alpha_lr=0.0, **SHORT)), plain)
    assert largest_difference(run(of("sme", **SHORT)).candidates["x"], plain.candidates["x"]) > 1e-3


def test_ig_on_updates_is_one_gradient_and_never_replays() -> None:
    attack = of("ig-ms", **SHORT)
    plain = run(with_stage(attack, predict=Replay(LocalTraining(lr=1.0))))
    same_path(run(attack), plain)
    same_path(run(attack, training=EPOCHS), plain)


def test_nl_sme_with_a_frozen_curve_and_frozen_factors_is_sme() -> None:
    curved = of("nl-sme", control_lr=0.0, scaling_lr=0.0, **SHORT)
    line = run(of("sme", **SHORT))
    same_path(run(curved), line)
    assert largest_difference(run(of("nl-sme", **SHORT)).candidates["x"], line.candidates["x"]) > 1e-3


def test_nl_sme_frozen_at_the_weights_sent_is_ig_on_updates() -> None:
    curved = of("nl-sme", alpha=0.0, alpha_lr=0.0, control_lr=0.0, scaling_lr=0.0, **SHORT)
    pixels, *_ = curved.stages[0].space.spaces  # without the bounds, which keep alpha off zero
    same_path(run(with_stage(curved, space=pixels)), run(of("ig-ms", **SHORT)))


def test_the_ablations_are_nl_sme_with_parts_missing() -> None:
    same_path(run(of("nl-sme-a", **SHORT)), run(of("nl-sme", control=0.0, factors="off", **SHORT)))
    same_path(run(of("nl-sme-b", **SHORT)), run(of("nl-sme", curved=False, **SHORT)))
    kinds = {name: {type(prior) for prior in of(name).stages[0].priors} for name in FAMILY}
    assert CentredControl in kinds["nl-sme"]
    assert UnitScaling in kinds["nl-sme"]
    assert not {CentredControl, UnitScaling} & (kinds["nl-sme-a"] | kinds["sme"])
    assert CentredControl not in kinds["nl-sme-b"]
    assert UnitScaling in kinds["nl-sme-b"]


# --- factors, bounds, priors ------------------------------------------------------------------------------------------


def test_factors_have_the_shapes_and_the_gradient_they_should() -> None:
    scene, batch = observed()
    inner, now = Line(), moment()
    v = inner.variables(scene, Draws(key("a")), None)
    predicted = inner(batch, v, scene, now)
    weigh = {name: i + 1.0 for i, name in enumerate(predicted)}
    for per in ("tensor", "element"):
        made = Rescaled(inner, per)
        v = made.variables(scene, Draws(key("a")), None)
        start = {"scaling": v["scaling"]}
        shapes = [tuple(value.shape) for value in tree.leaves(start)]
        assert shapes == ([(len(predicted),)] if per == "tensor" else [tuple(u.shape) for u in scene.update.values()])
        assert all((value == 1).all() for value in tree.leaves(start))
        assert largest_difference(made(batch, v, scene, now), predicted) == 0
        assert largest_difference(made.target(scene), inner.target(scene)) == 0
        total = lambda d, made=made, v=v: sum(  # noqa: E731
            weigh[name] * value.sum() for name, value in made(batch, {**v, "scaling": d}, scene, now).items()
        )
        slope = grad(total)(v["scaling"])
        if per == "tensor":
            wanted = torch.stack([weigh[name] * value.sum() for name, value in predicted.items()])
            torch.testing.assert_close(slope, wanted)
        else:
            assert largest_difference(slope, {name: weigh[name] * value for name, value in predicted.items()}) < 1e-15
    with pytest.raises(ValueError, match="tensor"):
        Rescaled(inner, "row")


def test_regularisers_by_hand() -> None:
    scene, batch = observed()
    v = {"control": bent(scene), "scaling": torch.tensor([1.0, 3.0, 0.5, 1.0], dtype=torch.float64)}
    offset = tree.scale(v["control"]["0"], unit_of_control(scene))  # c - m
    wanted = 0.2 * tree.squared_norm(offset) / tree.squared_norm(scene.update)
    args = (batch, v, scene, moment())
    torch.testing.assert_close(CentredControl(0.2)(*args), wanted)
    torch.testing.assert_close(UnitScaling(0.2)(*args), torch.tensor(0.2 * (4 + 0.25) / 4, dtype=torch.float64))
    for prior in (CentredControl(0.2), UnitScaling(0.2)):
        torch.testing.assert_close(prior.terms(*args).square().sum(), prior(*args))
    parts = {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor([[0.0]])}
    assert UnitScaling(3.0)(batch, {"scaling": parts}, scene, moment()) == pytest.approx(2.0)


def test_the_loss_at_the_surrogate_by_hand() -> None:
    scene, batch = observed()
    v = {"alpha": torch.tensor([0.3], dtype=torch.float64), "control": bent(scene)}
    weights = Bezier().weights(scene, 0, 0.3, v)
    logits = scene.task.call(weights)(batch["x"])
    found = SurrogateLoss(0.1, Bezier())(batch, v, scene, moment())
    torch.testing.assert_close(found, 0.1 * F.cross_entropy(logits, batch["y"]))
    several = SurrogateLoss(1.0, Line(nodes=3))(batch, {}, scene, moment())
    each = [w * scene.task.loss(Line().weights(scene, 0, a, {}), batch)[0] for w, a in gauss_legendre(3)]
    torch.testing.assert_close(several, torch.stack(each).sum())
    task = of("nl-sme", classification=1e-3).stages[0]
    assert any(isinstance(prior, SurrogateLoss) for prior in task.priors)


def test_unknowns_are_held_in_their_bounds() -> None:
    scene, _ = observed()
    v = {"alpha": torch.tensor([-0.2, 0.4, 1.3]), "control": {"0": {"a": torch.tensor([3.0, -4.0, 0.0, 0.0])}}}
    held = Within("alpha", 0.05, 0.95).project(v, scene, moment())
    torch.testing.assert_close(held["alpha"], torch.tensor([0.05, 0.4, 0.95]))
    assert held["control"] is v["control"]
    near = Reach("control", 1.0).project(v, scene, moment())["control"]["0"]["a"]  # RMS 2.5
    torch.testing.assert_close(near, torch.tensor([1.2, -1.6, 0.0, 0.0]))
    assert torch.equal(Reach("control", 3.0).project(v, scene, moment())["control"]["0"]["a"], v["control"]["0"]["a"])
    zero = {"control": {"0": {"a": torch.zeros(2)}}}
    assert torch.equal(Reach("control", 1.0).project(zero, scene, moment())["control"]["0"]["a"], torch.zeros(2))
    with pytest.raises(ValueError, match="alpha"):
        Within("alhpa", 0.0, 1.0).project(v, scene, moment())
    together = JointSpace((Pixels(Normal()), Within("alpha", 0.0, 1.0)))
    assert start_of(Stage(together, Line(), Cosine(), (), Adam()), scene).keys() == {"x", "alpha"}


def test_bounds_hold_during_a_search() -> None:
    """At rates that would leave them at once."""
    settings = {"steps": 5, "alpha_lr": 1.0, "scaling_lr": 100.0, "control_lr": 50.0, "reach": 0.5}
    stage = of("nl-sme", **settings).stages[0]
    scene, _ = observed()
    v = walked(stage, scene)
    assert 0.05 <= float(v["alpha"]) <= 0.95
    assert float(v["alpha"]) != 0.5
    assert v["scaling"].min() >= 0.1
    assert v["scaling"].max() <= 10
    assert tree.norm(v["control"]) / tree.size(v["control"]) ** 0.5 <= 0.5 + 1e-12
    low, high = scene.limits["x"]
    assert ((v["x"] >= low) & (v["x"] <= high)).all()


def test_images_begin_inside_the_box() -> None:
    scene, _ = observed()
    source, (low, high) = Draws(key("x")), scene.limits["x"]
    inside, plain = Inside(Normal())(scene, source, "x"), Normal()(scene, source, "x")
    assert torch.equal(inside, plain.clamp(low, high))
    assert not torch.equal(inside, plain)


def test_restarts_may_begin_at_different_points() -> None:
    scene, _ = observed()
    starts = torch.cat([Line(0.5, 0.2).variables(scene, Draws(key("r", i)), None)["alpha"] for i in range(200)])
    assert starts.min() >= 0.3
    assert starts.max() <= 0.7
    assert starts.std() == pytest.approx(0.4 / 12**0.5, rel=0.15)
    assert Line(0.5).variables(scene, Draws(key("r")), None)["alpha"].tolist() == [0.5]


@pytest.mark.parametrize("make", [lambda: Line(1.2), lambda: Line(0.9, 0.2), lambda: Line(nodes=0)])
def test_impossible_points_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"alpha|nodes"):
        make()


# --- a quadratic, where everything is known ---------------------------------------------------------------------------


class Bowl(nn.Module):
    """Weights and nothing else: the objective is 1/2 (w - mean x)' H (w - mean x)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x.mean(0)


STEEP = torch.tensor([0.5, 1.0, 3.0, 6.0], dtype=torch.float64)


def bowl() -> gl.Task:
    return gl.Task(Bowl(4), lambda call, batch: 0.5 * (STEEP * call(batch["x"]).square()).sum(), {"x": Field((4,))})


def test_an_unknown_alpha_is_recovered() -> None:
    """With H (w0 - a u - x) = u / k the gradient is parallel to u at a; images are given, alpha starts elsewhere."""
    task, x = bowl(), torch.tensor([[0.2, 0.9, 0.4, 0.7]], dtype=torch.float64)
    w0 = task.weights()["w"]
    for true in (0.25, 0.8):
        k = 0.6
        u = k * STEEP * (w0 - x[0]) / (1 + k * true * STEEP)
        scene = scene_of(task, Observation(weights=task.weights(), update={"w": u}, num_examples=1))
        space = JointSpace((Pixels(lambda scene, draws, name: x), Within("alpha", 0.0, 1.0)))
        optimiser = Adam(lr=0.01, steps=300, rates={"x": 0.0})
        v = walked(Stage(space, Line(), Cosine(), (), optimiser), scene)
        assert float(v["alpha"]) == pytest.approx(true, abs=1e-3)
        assert torch.equal(v["x"], x)


def test_the_mean_gradient_along_a_curve_is_exact_for_a_quadratic() -> None:
    """The gradient is then linear in W, W quadratic in alpha: two nodes integrate it, w0/3 + c/3 + wT/3."""
    task, x = bowl(), torch.tensor([[0.2, 0.9, 0.4, 0.7]], dtype=torch.float64)
    update = {"w": torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)}
    scene = scene_of(task, Observation(weights=task.weights(), update=update, num_examples=1))
    control = {"0": {"w": torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)}}
    w0, r = scene.weights["w"], unit_of_control(scene)
    c = w0 - 0.5 * update["w"] + r * control["0"]["w"]
    mean = (w0 + c + (w0 - update["w"])) / 3
    for nodes in (2, 3, 7):
        made = Bezier(nodes=nodes)
        assert made.variables(scene, Draws(key("a")), None).keys() == {"control"}
        found = made({"x": x}, {"control": control}, scene, moment())
        torch.testing.assert_close(found["w"], STEEP * (mean - x[0]), rtol=1e-12, atol=1e-14)
    straight = Line(nodes=2)({"x": x}, {}, scene, moment())
    torch.testing.assert_close(straight["w"], STEEP * (w0 - update["w"] / 2 - x[0]), rtol=1e-12, atol=1e-14)


def test_gauss_legendre_integrates_polynomials() -> None:
    for nodes in (1, 2, 5):
        for power in range(2 * nodes):
            assert sum(w * x**power for w, x in gauss_legendre(nodes)) == pytest.approx(1 / (power + 1))


# --- scale, defences, rounds ------------------------------------------------------------------------------------------


RECIPES = {
    "plain": LocalTraining(lr=0.1, steps=5),
    "schedule": LocalTraining(lr=0.1, steps=5, schedule=cosine_decay),
    "momentum": LocalTraining(lr=0.1, steps=5, optimiser=SGD(momentum=0.9)),
    "dampened": LocalTraining(lr=0.1, steps=5, optimiser=SGD(momentum=0.9, dampening=0.4)),
    "nesterov": LocalTraining(lr=0.1, steps=5, optimiser=SGD(momentum=0.9, nesterov=True)),
    "epochs": LocalTraining(lr=0.1, epochs=3, batch_size=2),
}


@pytest.mark.parametrize("name", RECIPES)
def test_an_update_is_compared_in_units_of_the_gradient(name: str) -> None:
    """Where the gradient does not depend on the weights the update is its length times the gradient, exactly."""
    task = gl.Task(Bowl(4), lambda call, batch: (STEEP * call(batch["x"])).sum(), {"x": Field((4,))})
    batch = {"x": torch.zeros(3, 4, dtype=torch.float64)}
    seen = gl.observe(task, batch, RECIPES[name])
    scene = scene_of(task, seen, Knowledge(training=RECIPES[name]))
    torch.testing.assert_close(GradientAtStart().target(scene)["w"], STEEP)
    torch.testing.assert_close(GradientAtStart()(batch, {}, scene, moment())["w"], STEEP)
    assert length(replace(scene, knows=Knowledge())) == 1.0


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_step_is_matched_by_the_truth(decay: float) -> None:
    training = LocalTraining(lr=0.3, optimiser=SGD(weight_decay=decay))
    scene, batch = observed(training, training=training)
    v = {"alpha": torch.zeros(1, dtype=torch.float64)}
    for predict in (GradientAtStart(), Line(start=0.0)):
        for match in (Cosine(), SquaredError()):
            seen = match.prepare(predict.target(scene))
            assert match.distance(predict(batch, v, scene, moment()), seen) < 1e-28


def test_an_update_the_wrong_way_round_is_noticed() -> None:
    scene, batch = observed(LocalTraining(lr=0.05, epochs=3, batch_size=1))
    turned = replace(scene, update=tree.scale(scene.update, -1.0))
    match = Cosine()
    for predict, v in ((GradientAtStart(), {}), (Line(), {"alpha": torch.tensor([0.5], dtype=torch.float64)})):
        away, right = (
            match.distance(predict(batch, v, each, moment()), match.prepare(predict.target(each)))
            for each in (turned, scene)
        )
        assert right < 0.5
        assert away > 1
    # Both ends exchanged, as a server would that took one for the other.
    swapped = replace(turned, weights=tree.subtract(scene.weights, scene.update))
    for alpha in (0.0, 0.5, 1.0):
        point = {"alpha": torch.tensor([alpha], dtype=torch.float64)}
        assert match.distance(Line()(batch, point, swapped, moment()), match.prepare(Line().target(swapped))) > 1


def test_only_matches_that_see_the_scale_need_the_recipe() -> None:
    assert of("dlg-ms").needs == {"training"}
    assert all(of(name).needs == frozenset() for name in FAMILY if name != "dlg-ms")
    with pytest.raises(MissingKnowledge, match="training"):
        run(of("dlg-ms", steps=1))


@pytest.mark.parametrize(
    "defence",
    [gl.defences.Pruning(keep=0.5), gl.defences.Clipping(norm=0.05, per="layer"), gl.defences.FedSAM(rho=0.3)],
    ids=lambda defence: defence.name,
)
def test_the_truth_matches_through_a_known_defence(defence: gl.Defence) -> None:
    """One step, at the weights sent; factors and a control point that have not moved change nothing."""
    training, task, batch = LocalTraining(lr=0.3), tiny(), private(3)
    seen = gl.observe(task, batch, training, defence)
    scene = scene_of(task, seen, Knowledge(training=training, defence=defence), y=batch["y"])
    naive = scene_of(task, seen, Knowledge(training=training), y=batch["y"])
    match = SquaredError()
    for predict in (GradientAtStart(), Rescaled(Bezier(start=0.0))):
        v = predict.variables(scene, Draws(key("a")), None)
        known, unknown = (
            match.distance(predict(batch, v, each, moment()), predict.target(each)) for each in (scene, naive)
        )
        assert known < 1e-25
        assert unknown > 1e-8


def test_the_noise_of_a_defence_is_told_in_the_same_units() -> None:
    noise, training = gl.defences.LocalGaussian(sigma=1e-2), LocalTraining(lr=0.3, epochs=4, batch_size=1)
    scene, batch = observed(training, training=training, defence=noise)
    clean = Replay()
    factor = float(length(scene))
    assert factor == pytest.approx(0.3 * 12)
    for predict in (GradientAtStart(), Rescaled(Line())):
        source = Draws(key("noise"))
        assert (
            largest_difference(tree.scale(predict.disturbed(scene, source), factor), clean.disturbed(scene, source))
            < 1e-15
        )
        assert largest_difference(tree.scale(predict.target(scene), factor), clean.target(scene)) < 1e-15
    found = of("sme", steps=3).run(
        tiny(), gl.observe(tiny(), batch, training, noise), Knowledge(given={"y": batch["y"]}, defence=noise)
    )
    assert found.noise is not None
    assert (found.noise > 0).all()


def test_rounds_have_points_of_their_own_and_repeated_ones_change_nothing() -> None:
    task, batch = tiny(), private(2)
    first = gl.observe(task, batch, EPOCHS)
    other = gl.observe(task, batch, EPOCHS, weights=tiny(seed=3).weights())
    scene = scene_of(task, Track((first, replace(other, round=1))), y=batch["y"])  # type: ignore[arg-type]
    made = Rescaled(Bezier())
    v = made.variables(scene, Draws(key("a")), None)
    assert v["alpha"].shape == (2,)
    assert v["control"].keys() == {"0", "1"}
    v["alpha"] = torch.tensor([0.2, 0.9], dtype=torch.float64)
    predicted = made(batch, v, scene, moment())
    assert predicted.keys() == made.target(scene).keys()
    for number, (seen, alpha) in enumerate(((first, 0.2), (other, 0.9))):
        alone = scene_of(task, seen, y=batch["y"])
        wanted = task.gradient(Line().weights(alone, 0, alpha, {}), batch)
        assert max(largest_difference(predicted[f"{number}/{name}"], value) for name, value in wanted.items()) < 1e-15
    engine, knows = Engine(device="cpu", precision="double"), Knowledge(given={"y": batch["y"]})
    thrice = Track(tuple(replace(first, round=number) for number in range(3)))
    alone, repeated = (
        of("sme", steps=6, keep="last").run(task, seen, knows, engine=engine) for seen in (first, thrice)
    )
    torch.testing.assert_close(alone.match, repeated.match, rtol=1e-9, atol=0)


# --- what is found besides the images, and what a later stage makes of it ---------------------------------------------


def cosd(gradient: Tree, update: Tree) -> float:
    return float(1 - tree.dot(gradient, update) / (tree.norm(gradient) * tree.norm(update)))


@pytest.mark.parametrize("keep", ["best_match", "last"])
def test_the_point_that_is_told_is_the_one_that_was_scored(keep: str) -> None:
    """Of two clients, two restarts each: the match follows from images and unknowns as the result has them."""
    task, engine = tiny(), Engine(device="cpu", precision="double")
    batches = [private(2, seed=seed) for seed in (0, 1)]
    seen = [gl.observe(task, batch, EPOCHS, key=f"client {i}") for i, batch in enumerate(batches)]
    knows = Knowledge(given={"y": torch.stack([batch["y"] for batch in batches])})
    attack = of("nl-sme", steps=9, restarts=2, keep=keep, lr=0.5, alpha_lr=0.05, spread=0.2)
    found = attack.run(task, seen, knows, engine=engine)
    assert found.unknowns["alpha"].shape == (2, 2, 1)
    assert found.unknowns["scaling"].shape == (2, 2, 4)
    assert found.unknowns["control/0/0.weight"].shape == (2, 2, 4, 1, 3, 3)
    assert len(found.unknowns) == 2 + 4
    for target, restart in ((0, 0), (0, 1), (1, 0), (1, 1)):
        scene = scene_of(task, seen[target])
        own = {name: value[target, restart] for name, value in found.unknowns.items()}
        v = {"control": {"0": {name: own[f"control/0/{name}"] for name in scene.update}}}
        batch = {"x": found.candidates["x"][target, restart], "y": batches[target]["y"]}
        gradient = task.gradient(Bezier().weights(scene, 0, own["alpha"][0], v), batch)
        scaled = dict(zip(gradient, (d * g for d, g in zip(own["scaling"], gradient.values()))))
        assert cosd(scaled, scene.update) == pytest.approx(float(found.match[target, restart]), rel=1e-9)


def test_of_a_large_unknown_only_its_size_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = of("nl-sme", **SHORT)
    whole = run(attack).unknowns
    monkeypatch.setattr(search, "MOST_KEPT", 90)  # the network has 91 parameters
    told = run(attack).unknowns
    assert told.keys() == {"alpha", "scaling", "control_rms"}
    control = torch.cat([value.flatten(2) for name, value in whole.items() if name.startswith("control/")], dim=2)
    torch.testing.assert_close(told["control_rms"], control.square().mean(-1).sqrt())
    assert (told["control_rms"] > 0).all()


def test_rounds_that_a_target_does_not_have_are_padded() -> None:
    task, batch = tiny(), private(2)
    seen = gl.observe(task, batch, EPOCHS)
    twice = Track((replace(seen, key="t", round=0), replace(seen, key="t", round=1)))
    knows, engine = Knowledge(given={"y": batch["y"]}), Engine(device="cpu", precision="double")
    found = of("sme", steps=3, restarts=2).run(task, [seen, twice], knows, engine=engine)
    alpha = found.unknowns["alpha"]
    assert alpha.shape == (2, 2, 2)
    assert alpha.isnan().tolist() == [[[False, True]] * 2, [[False, False]] * 2]
    assert run(of("ig-ms", steps=2)).unknowns == {}


def test_a_later_stage_goes_on_with_the_unknowns_of_the_last() -> None:
    first = of("nl-sme", restarts=2, alpha_lr=0.05, scaling_lr=0.05, **SHORT)
    [stage] = first.stages
    still = replace(
        stage, optimiser=Adam(steps=1, lr=0.1, rates=dict.fromkeys(("x", "alpha", "control", "scaling"), 0.0))
    )
    found, on = run(first), run(replace(first, stages=(stage, still)))
    assert found.unknowns.keys() == on.unknowns.keys()
    for name, value in found.unknowns.items():
        torch.testing.assert_close(on.unknowns[name], value, rtol=0, atol=1e-14)
    torch.testing.assert_close(on.match, found.match, rtol=1e-9, atol=0)
    assert (found.unknowns["alpha"] - 0.5).abs().min() > 0.01
    best = run(replace(first, stages=(replace(stage, carry="best_of_target"), still)))
    assert largest_difference(best.unknowns["alpha"][:, 0], best.unknowns["alpha"][:, 1]) == 0
    other = with_stage(of("nl-sme", factors="element", **SHORT)).stages
    with pytest.raises(ValueError, match="'scaling' has other shapes"):
        run(replace(first, stages=(stage, *other)))


# --- whole attacks ----------------------------------------------------------------------------------------------------


VARIANTS: dict[str, dict[str, Any]] = {
    "element": {"factors": "element"},
    "nodes": {"nodes": 3, "reach": 0.5},
    "classification": {"classification": 1e-3, "spread": 0.2},
    "line": {"curved": False, "nodes": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lanes_together_are_lanes_alone(variant: str) -> None:
    task, engine = perceptron(), Engine(device="cpu", precision="double")
    batches = [private(2, seed=seed) for seed in (0, 1)]
    seen = [gl.observe(task, batch, EPOCHS, key=f"client {i}") for i, batch in enumerate(batches)]
    knows = Knowledge(given={"y": torch.stack([batch["y"] for batch in batches])})
    attack = of("nl-sme", steps=8, restarts=2, keep="last", lr=0.1, **VARIANTS[variant])
    together = attack.run(task, seen, knows, engine=engine)
    one_by_one = attack.run(task, seen, knows, engine=replace(engine, batched=False))
    torch.testing.assert_close(together.candidates["x"], one_by_one.candidates["x"], rtol=0, atol=1e-9)
    torch.testing.assert_close(together.match, one_by_one.match, rtol=1e-9, atol=0)
    alone = attack.run(task, seen[1], Knowledge(given={"y": batches[1]["y"]}), engine=engine)
    torch.testing.assert_close(together.candidates["x"][1], alone.candidates["x"][0], rtol=0, atol=1e-9)
    assert not torch.equal(together.candidates["x"][0, 0], together.candidates["x"][0, 1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_form_of_the_step_can_be_captured(variant: str) -> None:
    task, batch, knows = tiny(), private(2), Knowledge(training=EPOCHS, defence=gl.defences.Pruning(keep=0.5))
    seen = gl.observe(task, batch, EPOCHS)
    track = Track((seen, replace(seen, round=1)))
    [search] = searches(
        of("nl-sme", steps=9, **VARIANTS[variant]), task, track, knows, Engine(device="cpu", precision="double")
    )
    gate(search)


def client() -> tuple[gl.Task, list[Observation], Batch]:
    """Two clients of 20 epochs in batches of five."""
    return clients(LocalTraining(lr=0.1, epochs=20, batch_size=5), 8, 2)


ATTACKED_ONCE = pytest.mark.xdist_group("clients of surrogates")


@cache
def attacked(name: str, still: bool = False) -> tuple[gl.Reconstruction, float]:
    """The clients attacked, 80 steps of any of the family, and the mean PSNR."""
    task, seen, truth = client()
    attack = of(name, steps=80, lr=0.1, tv=1e-3)
    attack = frozen(attack) if still else attack
    found = attack.run(task, seen, Knowledge(given={"y": truth["y"]}), engine=Engine(device="cpu"))
    return found, float(gl.metrics.compare(found, truth).psnr.mean())


@ATTACKED_ONCE
def test_a_learned_point_explains_a_real_update_better() -> None:
    """Client by client in the match; SME in the images as well, from 40 steps in an order it does not know."""
    (plain, blurred), (line, sharper), (curve, bent_) = (attacked(name) for name in ("ig-ms", "sme", "nl-sme"))
    assert (line.match < 0.5 * plain.match).all()
    assert (curve.match < 0.8 * line.match).all()
    assert sharper > blurred + 2
    assert bent_ > blurred + 2


@ATTACKED_ONCE
def test_freedom_alone_lowers_the_match() -> None:
    """The control: images stay the noise they began as, and NL-SME's match falls all the same."""
    (line, score), (curve, same) = (attacked(name, still=True) for name in ("sme", "nl-sme"))
    assert torch.equal(line.candidates["x"], curve.candidates["x"])
    assert score == same
    assert (curve.match < 0.9 * line.match).all()
    assert (curve.match > 2 * attacked("nl-sme")[0].match).all()


def test_a_diagnosis_tells_the_match_with_and_without_factors() -> None:
    scene, _ = observed()
    stage = of("nl-sme", steps=30, scaling_lr=0.05, lr=0.1).stages[0]
    v = walked(stage, scene)
    told = diagnosis(stage, v, scene, moment())
    batch = {"x": v["x"], "y": scene.fields["y"]}
    weights = Bezier().weights(scene, 0, v["alpha"][0], v)
    plain = scene.task.gradient(weights, batch)
    cosd = lambda g: 1 - tree.dot(g, scene.update) / (tree.norm(g) * tree.norm(scene.update))  # noqa: E731
    torch.testing.assert_close(told["l_sim_raw"], cosd(plain))
    scaled = dict(zip(plain, (d * g for d, g in zip(v["scaling"], plain.values()))))
    torch.testing.assert_close(told["l_sim_obj"], cosd(scaled))
    assert told["l_sim_obj"] < told["l_sim_raw"]
    apart = tree.norm(tree.scale(v["control"]["0"], unit_of_control(scene)))
    torch.testing.assert_close(told["bend"], apart / tree.norm(scene.update))
    assert told["scaling_min"] < 1 < told["scaling_max"]
    torch.testing.assert_close(told["alpha"], v["alpha"][0])
    lanes = vmap(lambda v: diagnosis(stage, v, scene, moment()))(tree.map(lambda a: torch.stack([a, a]), v))
    torch.testing.assert_close(lanes["l_sim_raw"], torch.stack([told["l_sim_raw"]] * 2))
    line = of("ig-ms").stages[0]
    told = diagnosis(line, start_of(line, scene), scene, moment())
    assert told.keys() == {"l_sim_obj", "l_sim_raw"}
    assert told["l_sim_obj"] == told["l_sim_raw"]


def test_only_first_order_stages_can_be_frozen() -> None:
    stage = replace(of("sme").stages[0], optimiser=LBFGS(steps=3))
    with pytest.raises(ValueError, match="first-order"):
        frozen(Composed("toy", (stage,), Nothing()))


@pytest.mark.parametrize(
    ("sme", "nl_sme", "gap", "reduction"),
    [(0.0326, 0.0009, 97.24, 36.2), (0.0398, 0.0022, 94.47, 18.1), (0.0734, 0.0023, 96.87, 31.9),
     (0.1074, 0.0017, 98.42, 63.2)],
)  # fmt: skip
def test_the_papers_gaps_follow_from_its_matches(sme: float, nl_sme: float, gap: float, reduction: float) -> None:
    found = performance_gap(sme, nl_sme)
    assert found == (pytest.approx(gap, abs=5e-3), pytest.approx(reduction, abs=5e-2))
    with pytest.raises(ValueError, match="positive"):
        performance_gap(sme, 0.0)


def test_settings_are_the_papers_or_those_of_the_public_code() -> None:
    for name in FAMILY:
        optimiser = of(name).stages[0].optimiser
        assert (optimiser.lr, optimiser.steps) == (1.0, 1000)
        factors = torch.stack([optimiser.schedule(Step(torch.tensor(float(s)), 1000)) for s in (373, 374, 624, 875)])
        torch.testing.assert_close(factors, torch.tensor([1, 0.1, 0.01, 0.001]))
    assert of("sme").stages[0].optimiser.rates == {"alpha": 1e-3}
    assert of("nl-sme").stages[0].optimiser.rates == {"alpha": 1e-3, "control": 0.02, "scaling": 1e-3}
    assert of("nl-sme").stages[0].optimiser.epsilons == {"control": 1e-12}
    assert of("nl-sme-b").stages[0].optimiser.epsilons == {}
    images, inside = Pixels(Inside(Normal()), boxed=True), Within("alpha", 0.05, 0.95)
    factors_, smooth = Within("scaling", 0.1, 10.0), TotalVariation(0.005)  # half of 0.01: its two means are summed
    assert of("ig-ms").stages[0].space == images
    assert of("sme").stages[0].space == JointSpace((images, Within("alpha", 0.0, 1.0)))
    assert of("nl-sme").stages[0].space == JointSpace((images, inside, factors_))
    assert {name: of(name).stages[0].priors for name in FAMILY} == {
        "ig-ms": (smooth,),
        "dlg-ms": (),
        "sme": (smooth,),
        "nl-sme": (smooth, CentredControl(0.01), UnitScaling(0.01)),
        "nl-sme-a": (smooth,),
        "nl-sme-b": (smooth, UnitScaling(0.01)),
    }
    assert of("sme").stages[0].predict == Line(start=0.5)
    assert of("nl-sme").stages[0].predict == Rescaled(Bezier(start=0.5), "tensor")
    with pytest.raises(gl.registry.BadSetting, match="factors"):
        of("nl-sme", factors="row")
