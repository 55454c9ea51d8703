"""FEDLEAK: the largest entries only, and a gradient blended with the one a little uphill; float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import gradleak as gl
from conftest import largest_difference, moment, perceptron, private, scene_of, tiny
from gradleak.attacks.fedleak.blended import Blended
from gradleak.core import tree
from gradleak.core.random import Draws, key
from gradleak.core.tree import Params, Tree
from gradleak.engine import Engine
from gradleak.engine.search import StageObjective
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine, LayerNorms, Relative, SquaredError
from gradleak.parts.optimisers import Adam
from gradleak.parts.partial import Strongest, largest
from gradleak.parts.protocols import LaneObjective, Scored
from gradleak.parts.spaces import JointSpace
from gradleak.parts.stage import Stage
from gradleak.parts.surrogates import Line, Within
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Track
from test_engine import gate, searches
from test_surrogates import EPOCHS, SHORT, observed, of, run, same_path, with_stage


def drawn(seed: int = 0) -> Params:
    """An update of several tensors, one of them a single number, with zeros in it."""
    source = Draws(key("update", seed))
    shapes = {"conv": (4, 1, 3, 3), "weight": (3, 16), "bias": (3,), "scale": ()}
    full = {n: source.normal(s, stream=i, dtype=torch.float64) for i, (n, s) in enumerate(shapes.items())}
    full["weight"][:, ::3] = 0
    return full


# --- the entries that are compared ------------------------------------------------------------------------------------


def test_the_largest_are_kept_and_ties_go_to_the_first() -> None:
    values = torch.tensor([0.0, -3.0, 1.0, 3.0, 0.0, -2.0, 3.0, 0.5])
    assert largest(values, 0.5).tolist() == [0, -3, 0, 3, 0, 0, 3, 0]
    assert largest(values, 1 / 3).tolist() == [0, -3, 0, 3, 0, 0, 0, 0]
    assert largest(values, 1e-9).tolist() == [0, -3, 0, 0, 0, 0, 0, 0]  # never none
    assert torch.equal(largest(values, 1.0), values)
    assert not largest(torch.zeros(5), 0.5).any()
    assert largest(torch.ones(30), 0.1).sum() == 3  # and not 4: 0.1 * 30 is above 3 in floating point
    assert largest(torch.tensor([1.0, torch.nan, 2.0]), 0.1).isnan().any()


@pytest.mark.parametrize("share", [0.1, 0.37, 1.0])
@pytest.mark.parametrize("per", ["tensor", "all"])
def test_a_share_of_the_entries_that_are_not_zero(per: str, share: float) -> None:
    update = drawn()
    kept = Strongest(SquaredError(), share, per).prepare(update)
    groups = [[name] for name in update] if per == "tensor" else [list(update)]
    for group in groups:
        before, after = (tree.flatten({name: held[name] for name in group}) for held in (update, kept))
        wanted = -(-round(share * 100) * int(before.count_nonzero()) // 100)
        assert after.count_nonzero() == wanted
        assert torch.equal(after[after != 0], before[after != 0])
        left = before[after == 0].abs()
        if len(left):
            assert left.max() <= after[after != 0].abs().min()


def test_per_tensor_looks_everywhere_and_over_all_only_where_the_update_is_large() -> None:
    update = {"large": torch.arange(1.0, 11) * 100, "small": torch.arange(1.0, 11)}
    each, all_ = (Strongest(SquaredError(), 0.2, per).prepare(update) for per in ("tensor", "all"))
    assert each["large"].nonzero()[:, 0].tolist() == each["small"].nonzero()[:, 0].tolist() == [8, 9]
    assert all_["large"].nonzero()[:, 0].tolist() == [6, 7, 8, 9]
    assert not all_["small"].any()


@pytest.mark.parametrize("match", [Cosine(), SquaredError(), LayerNorms(), Relative()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("per", ["tensor", "all"])
def test_the_distance_is_that_of_the_chosen_entries_alone(match: Any, per: str) -> None:
    update, predicted = drawn(), drawn(1)
    made = Strongest(match, 0.3, per)
    seen = made.prepare(update)
    found = made.distance(predicted, seen)
    torch.testing.assert_close(found, made.reduce(made.residual(predicted, seen)))
    chosen = tree.map(lambda u: u != 0, Strongest(SquaredError(), 0.3, per).prepare(update))
    only = lambda held: tree.map(lambda value, mask: value[mask], held, chosen)  # noqa: E731
    if not isinstance(match, Relative):  # its units are those of whole tensors
        torch.testing.assert_close(found, match.distance(only(predicted), match.prepare(only(update))))
    other = tree.map(lambda p, mask: torch.where(mask, p, 1e6), predicted, chosen)
    torch.testing.assert_close(made.distance(other, seen), found)
    slope = grad(lambda p: made.distance(p, seen))(predicted)
    assert all(torch.equal(s != 0, mask) for s, mask in zip(tree.leaves(slope), tree.leaves(chosen)))
    assert (made.squares, made.scale_free) == (match.squares, match.scale_free)


def test_what_was_pruned_is_never_chosen() -> None:
    """Half of the update is zero; a share of 0.7 of all entries would have to take some of it."""
    task, batch = tiny(), private(3)
    for keep in (0.5, 0.05):
        seen = gl.observe(task, batch, EPOCHS, gl.defences.Pruning(keep=keep))
        for per in ("tensor", "all"):
            kept = Strongest(Cosine(), 0.7, per).prepare(seen.update)
            compared = sum(int(value.count_nonzero()) for value in kept.values())
            there = sum(int(value.count_nonzero()) for value in seen.update.values())
            assert 0.7 * there <= compared < 0.7 * there + len(kept)
            assert all(not kept[name][u == 0].any() for name, u in seen.update.items())


def test_a_prediction_that_is_not_finite_shows_wherever_it_is() -> None:
    made, update = Strongest(SquaredError(), 0.1), drawn()
    seen = made.prepare(update)
    hidden = (seen["weight"] == 0).nonzero()[0].tolist()
    predicted = tree.detach(update)
    predicted["weight"][tuple(hidden)] = torch.inf
    assert not made.distance(predicted, seen).isfinite()


def test_every_lane_has_entries_of_its_own() -> None:
    updates = [drawn(seed) for seed in range(3)]
    updates[2]["bias"] = torch.zeros(3, dtype=torch.float64)
    stacked = tree.map(lambda *each: torch.stack(each), *updates)
    for per in ("tensor", "all"):
        made = Strongest(Cosine(), 0.3, per)
        together = vmap(made.prepare)(stacked)
        for lane, update in enumerate(updates):
            alone = made.prepare(update)
            assert largest_difference(tree.map(lambda value, lane=lane: value[lane], together), alone) < 1e-15


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"share": 0.0}, "share"), ({"share": 1.5}, "share"), ({"per": "row"}, "'tensor' or 'all'")],
)
def test_impossible_shares_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Strongest(Cosine(), **settings)


# --- the blended gradient ---------------------------------------------------------------------------------------------


def problem_of(stage: Stage, **knows: Any) -> tuple[StageObjective, Tree]:
    """The lane's problem, and unknowns a little away from the client's images."""
    scene, batch = observed(**knows)
    seen = stage.match.prepare(stage.predict.target(scene))
    v = {"x": batch["x"] + 0.3 * Draws(key("off")).normal(tuple(batch["x"].shape), dtype=torch.float64)}
    return StageObjective(stage, scene, seen, moment()), v


def regularised(problem: StageObjective, v: Tree, beta: float | Tensor) -> Tree:
    """The gradient of match + beta ||d match / dx||, through one more order of derivatives; there are no priors.

    Of the residual's squares: the written derivative of a cosine's `distance` is right, and cannot be differentiated.
    """
    match, observed_ = problem.stage.match, problem.observed
    plain = lambda at: match.reduce(match.residual(problem.predicted(at), observed_))  # noqa: E731
    return grad(lambda at: plain(at) + beta * tree.norm({"x": grad(plain)(at)["x"]}))(v)


@pytest.mark.parametrize("distance", ["cosine", "squared"])
def test_the_blend_is_the_gradient_of_the_regularised_objective(distance: str) -> None:
    """(g(v + phi) - g(v)) / gamma is off by O(gamma): the error falls ten times when gamma does, with beta fixed."""
    stage = of("fedleak", distance=distance, share=0.5, tv=0.0).stages[0]
    problem, v = problem_of(stage, training=EPOCHS)
    plain, _ = problem.value_and_grad(v)
    beta = 1e-4
    wanted = regularised(problem, v, beta)
    added = tree.norm(tree.subtract(wanted, plain))  # what the penalty adds
    assert added > 0
    errors = []
    for gamma in (1e-2, 1e-3):
        found, scored = replace(stage.optimiser, lam=beta / gamma, gamma=gamma).direction(problem, v)
        errors.append(float(tree.norm(tree.subtract(found, wanted)) / added))
        assert scored.objective == problem.value(v).objective
        assert scored.at is v
    assert errors[0] < 0.1
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)


def test_the_penalty_on_one_unknown_moves_the_others_too() -> None:
    """SME's alpha: the length of the images' gradient depends on it, and phi does not move it."""
    base = of("fedleak", tv=0.0, share=0.5).stages[0]
    space = JointSpace((base.space, Within("alpha", 0.0, 1.0)))
    stage = replace(base, space=space, predict=Line(), optimiser=replace(base.optimiser, lam=0.1, gamma=1e-3))
    problem, v = problem_of(stage)
    v["alpha"] = torch.tensor([0.4], dtype=torch.float64)
    found, _ = stage.optimiser.direction(problem, v)
    plain, _ = problem.value_and_grad(v)
    wanted = regularised(problem, v, 1e-4)
    for name in ("x", "alpha"):
        ours, theirs = (tree.norm({"": each[name] - plain[name]}) for each in (found, wanted))
        assert theirs > 0
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0)
    assert stage.optimiser.shift(plain).keys() == {"x"}


def test_phi_has_the_length_it_is_given_and_none_where_there_is_no_slope() -> None:
    slope = {"x": torch.tensor([[3.0, 0.0], [0.0, -4.0]], dtype=torch.float64), "alpha": torch.ones(1)}
    for unit, length in (("norm", 0.2), ("rms", 0.4)):
        phi = Blended(Adam(), gamma=0.2, unit=unit).shift(slope)
        torch.testing.assert_close(phi["x"], slope["x"] / 5 * length)
    flat = {"x": torch.zeros(2, 2)}
    assert not Blended(Adam()).shift(flat)["x"].any()
    assert Blended(Adam()).shift({"x": torch.tensor([torch.nan, 1.0])})["x"].isnan().any()
    both = Blended(Adam(), of=("x", "alpha")).shift(slope)
    torch.testing.assert_close(tree.norm(both), torch.tensor(1.0, dtype=torch.float64))


class Bowl(LaneObjective):
    """1/2 sum c v^2, whose blended gradient is c v (1 + lam gamma c / ||c v|| ...) in closed form."""

    curvature = torch.tensor([1.0, 4.0], dtype=torch.float64)

    def __init__(self) -> None:
        self.asked: list[Tensor] = []

    def value(self, v: Tree) -> Scored:
        value = 0.5 * (self.curvature * v["x"].square()).sum()
        return Scored(v, value, value)

    def value_and_grad(self, v: Tree) -> tuple[Tree, Scored]:
        self.asked.append(v["x"])
        return {"x": self.curvature * v["x"]}, self.value(v)

    def residual(self, v: Tree) -> Tree:
        return {}

    def project(self, v: Tree) -> Tree:
        return v

    def single(self) -> Bowl:
        return self


def test_one_step_by_hand() -> None:
    """Nothing is clipped, two gradients are asked for, and the score is that of the point itself."""
    x = torch.tensor([1.0, 0.5], dtype=torch.float64)
    bowl, made = Bowl(), Blended(Adam(lr=0.1, steps=5), lam=0.3, gamma=7.0)
    phi = 7.0 * bowl.curvature * x / (bowl.curvature * x).norm()
    direction, scored = made.direction(bowl, {"x": x})
    torch.testing.assert_close(direction["x"], bowl.curvature * (x + 0.3 * phi))
    assert scored.objective == bowl.value({"x": x}).objective
    torch.testing.assert_close(bowl.asked[1], x + phi)
    assert len(bowl.asked) == 2
    v, state, _ = made.step(bowl, {"x": x}, made.init(bowl, {"x": x}), moment())
    inner = Adam(lr=0.1, steps=5)
    step, _ = inner.move(bowl.curvature * (x + 0.3 * phi), inner.memory(x), torch.tensor(1.0))
    torch.testing.assert_close(v["x"], x - 0.1 * step)
    assert state["memory"]["x"]["first"].abs().sum() > 0
    bowl.asked.clear()
    alone = replace(made, lam=0.0)
    alone.step(bowl, {"x": x}, alone.init(bowl, {"x": x}), moment())
    assert len(bowl.asked) == 1  # what would count for nothing is not computed


def test_the_inner_optimiser_keeps_its_word() -> None:
    inner = Adam(lr=0.3, steps=17, rates={"x": 0.1}, every={"x": 2}, graphable=False)
    made = Blended(inner)
    assert (made.steps, made.graphable, made.rates, made.every) == (17, False, {"x": 0.1}, {"x": 2})
    attack = of("fedleak", steps=2)
    with pytest.raises(ValueError, match="rates names 'z'"):
        run(with_stage(attack, optimiser=Blended(Adam(steps=2, rates={"z": 1.0}))))
    with pytest.raises(ValueError, match="'alpha', which is not an unknown"):
        run(with_stage(attack, optimiser=Blended(Adam(steps=2), of=("alpha",))))


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"lam": -0.1}, "lam"), ({"lam": 1.5}, "lam"), ({"gamma": 0.0}, "gamma"), ({"gamma": float("nan")}, "gamma"),
     ({"unit": "entry"}, "'norm' or 'rms'"), ({"of": ()}, "no unknown"), ({"inner": LBFGS(steps=3)}, "first-order")],
)  # fmt: skip
def test_impossible_blends_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Blended(**{"inner": Adam(), **settings})


# --- the attack -------------------------------------------------------------------------------------------------------


def test_all_entries_and_no_blending_is_ig_or_dlg_on_updates() -> None:
    """An update without zeros. On the way to it: half of it is something else."""
    plain = run(of("ig-ms", **SHORT))
    same_path(run(of("fedleak", share=1.0, lam=0.0, **SHORT)), plain)
    same_path(run(of("fedleak", share=1.0, lam=0.0, per="all", **SHORT)), plain)
    squared = run(of("dlg-ms", **SHORT), training=EPOCHS)
    same_path(run(of("fedleak", share=1.0, lam=0.0, distance="squared", tv=0.0, **SHORT), training=EPOCHS), squared)
    for other in ({"share": 0.5, "lam": 0.0}, {"share": 1.0, "lam": 0.5, "gamma": 0.3}):
        assert largest_difference(run(of("fedleak", **other, **SHORT)).candidates["x"], plain.candidates["x"]) > 1e-3


def test_a_vanishing_phi_is_no_blending() -> None:
    """The same steps as without, through both evaluations."""
    plain, blended = (run(of("fedleak", lam=lam, gamma=1e-9, **SHORT)) for lam in (0.0, 0.5))
    torch.testing.assert_close(plain.trace["match"], blended.trace["match"], rtol=1e-5, atol=0)


def test_settings_and_needs() -> None:
    assert gl.registry.entry("attack", "fedleak").status == "unverified"
    assert of("fedleak").needs == frozenset()
    assert of("fedleak", distance="squared").needs == {"training"}
    with pytest.raises(MissingKnowledge, match="training"):
        run(of("fedleak", distance="squared", steps=1))
    stage = of("fedleak").stages[0]
    assert (stage.match.share, stage.match.per) == (0.1, "tensor")
    assert (stage.optimiser.lam, stage.optimiser.inner.lr, stage.optimiser.steps) == (0.5, 1.0, 1000)
    assert (stage.optimiser.gamma, stage.optimiser.unit, stage.optimiser.of) == (1.0, "norm", ("x",))
    weights = [of("fedleak", distance=d).stages[0].priors[0].weight for d in ("cosine", "squared")]
    assert weights == [0.005, 5e-5]
    assert of("fedleak", tv=0.0).stages[0].priors == ()
    for settings, told in (({"distance": "l1"}, "distance"), ({"share": 2.0}, "share"), ({"unit": "x"}, "unit")):
        with pytest.raises(ValueError, match=told):
            of("fedleak", **settings)


def test_lanes_together_are_lanes_alone() -> None:
    task, engine = perceptron(), Engine(device="cpu", precision="double")
    batches = [private(2, seed=seed) for seed in (0, 1)]
    seen = [gl.observe(task, batch, EPOCHS, key=f"client {i}") for i, batch in enumerate(batches)]
    knows = Knowledge(given={"y": torch.stack([batch["y"] for batch in batches])})
    for per in ("tensor", "all"):
        attack = of("fedleak", steps=8, restarts=2, keep="last", lr=0.1, gamma=0.05, unit="rms", per=per)
        together = attack.run(task, seen, knows, engine=engine)
        one_by_one = attack.run(task, seen, knows, engine=replace(engine, batched=False))
        torch.testing.assert_close(together.candidates["x"], one_by_one.candidates["x"], rtol=0, atol=1e-9)
        alone = attack.run(task, seen[1], Knowledge(given={"y": batches[1]["y"]}), engine=engine)
        torch.testing.assert_close(together.candidates["x"][1], alone.candidates["x"][0], rtol=0, atol=1e-9)


def test_the_step_can_be_captured_over_several_rounds_and_behind_a_defence() -> None:
    task, batch, knows = tiny(), private(2), Knowledge(training=EPOCHS, defence=gl.defences.Pruning(keep=0.5))
    seen = gl.observe(task, batch, EPOCHS)
    track = Track((seen, replace(seen, round=1)))
    [search] = searches(of("fedleak", steps=9), task, track, knows, Engine(device="cpu", precision="double"))
    gate(search)


def test_one_step_is_matched_by_the_truth_whatever_is_compared() -> None:
    training = gl.LocalTraining(lr=0.3)
    scene, batch = observed(training, training=training)
    for distance in ("cosine", "squared"):
        for per in ("tensor", "all"):
            stage = of("fedleak", distance=distance, per=per).stages[0]
            seen = stage.match.prepare(stage.predict.target(scene))
            away = {**batch, "x": batch["x"] + 0.1}
            near, far = (stage.match.distance(stage.predict(b, {}, scene, moment()), seen) for b in (batch, away))
            assert near < 1e-28
            assert far > 1e-6


def test_the_level_of_known_noise_is_that_of_the_entries_that_are_compared() -> None:
    """At the truth the match is about what `Reconstruction.noise` says, though only a tenth of the update is seen."""
    task, batch = tiny(), private(3)
    training, defence = gl.LocalTraining(lr=1.0), gl.defences.LocalGaussian(sigma=3e-3)
    knows = gl.Knowledge(training=training, defence=defence, given={"y": batch["y"]})
    told, there = [], []
    for seed in range(6):
        seen = gl.observe(task, batch, training, defence, seed=seed)
        attack = gl.attacks.get("fedleak", steps=1)
        found = attack.run(task, seen, knows, engine=gl.Engine(device="cpu", precision="double"))
        told.append(float(found.noise))
        stage, scene = attack.stages[0], scene_of(task, seen, knows, y=batch["y"])
        predicted = stage.predict(batch, {}, scene, moment())
        there.append(float(stage.match.distance(predicted, stage.match.prepare(stage.predict.target(scene)))))
    ratio = sum(told) / sum(there)
    assert 0.5 < ratio < 2, (told, there)
