"""Lanes: the protocols on hard cases, independence of company, frozen lanes, chunks, the gate for captured steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import jacfwd
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import gradleak as gl
from conftest import CLASSES, SHAPE, largest_difference, on_classifiers, perceptron, private, short, tiny
from gradleak.attack import Composed, Reconstruction, lowest_match
from gradleak.core import random as draws
from gradleak.core import registry, tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.defences import FedGF
from gradleak.engine import Engine, EngineError, Search, lanes
from gradleak.parts import levenberg
from gradleak.parts.fields import Nothing, ReadBy
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.optimisers import Adam, SignedAdam, Still
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import GroupConsistency, TotalVariation
from gradleak.parts.protocols import LaneObjective, Optimiser, Prediction, Prior, Scored, Space
from gradleak.parts.spaces import JointSpace, Normal, Pixels, SoftField, Surrogate, Uniform
from gradleak.parts.stage import Stage
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.task import Batch, TaskError

TRAINING = LocalTraining(lr=1.0)


def observed(
    examples: int = 1, *, seed: int = 0, task: gl.Task | None = None, key: str | None = None
) -> tuple[gl.Task, Observation, Batch]:
    task, batch = task or tiny(), private(examples, seed=seed)
    return task, gl.observe(task, batch, TRAINING, key=key or f"target {seed}"), batch


def knowing(batch: Batch, **more: Any) -> Knowledge:
    return Knowledge(given={"y": batch["y"]}, training=TRAINING, **more)


def attack_of(*stages: Stage, **settings: Any) -> Composed:
    return Composed("toy", stages, Nothing(), **settings)


def stage_of(**parts: Any) -> Stage:
    plain = {
        "space": Pixels(Uniform()),
        "predict": Replay(),
        "match": SquaredError(),
        "priors": (),
        "optimiser": Adam(),
    }
    return Stage(**{**plain, **parts})


def searches(attack: Composed, task: gl.Task, seen: Any, knows: Knowledge, engine_: Engine) -> list[Search]:
    """The searches of an attack, set up and not yet run."""
    caught: list[Search] = []

    def run(search: Search, progress: Any, moments: Any) -> list[Tensor]:
        caught.append(search)
        return []

    with patch.object(Search, "run", run):
        attack.run(task, seen, knows, engine=engine_)
    return caught


# --- lanes with weights of their own ----------------------------------------------------------------------------------


def of_rounds(task: gl.Task, defence: Any = None, count: int = 3) -> list[Observation]:
    """The same client at several models, two images each, with what the server of FedGF broadcasts beside them."""
    federation = gl.federation.Federation(2, LocalTraining(lr=0.1), examples=None, seed=3)
    examples = gl.audit.private.Stored(private(8, seed=4))
    trained = federation.train(task, examples, count, defence=defence, checkpoints=range(count))
    releasing = replace(federation, training=TRAINING)
    seen = []
    for number in range(count):
        sent = trained.at(number)
        remembered = gl.federation.Remembered(server=dict(sent.server) or None)
        for target in range(2):
            batch = private(1, seed=target)
            settings = {"key": f"target {target}, round {number}", "round": number, "seed": 0}
            seen.append(releasing.observe(task, batch, sent.weights, defence, remembered=remembered, **settings))
    return seen


@pytest.mark.parametrize("name", ["ig", "idlg", "gi", "second-order"])
@pytest.mark.parametrize("defence", [None, FedGF(0.2, c=0.3)], ids=["plain", "fedgf"])
def test_lanes_of_several_models_are_those_of_each(name: str, defence: Any) -> None:
    task, double = tiny(), Engine("cpu", precision="double", graph=False)
    seen = of_rounds(task, defence)
    knows = Knowledge(training=TRAINING, defence=defence)
    attack = short(name, steps=12)
    apart = attack.run(task, seen, knows, seed=1, engine=double)
    with (
        patch.dict(lanes.OWN_WEIGHTS, {"cpu": 10**6}),
        patch.object(lanes, "_solve_chunk", wraps=lanes._solve_chunk) as run,
    ):
        together = attack.run(task, seen, knows, seed=1, engine=double)
    assert run.call_count == 1
    assert largest_difference(apart.batch, together.batch) < 1e-6
    torch.testing.assert_close(apart.match, together.match, rtol=1e-6, atol=1e-9)


def test_lanes_of_large_models_wait_for_each_other() -> None:
    seen = [TargetView.of(tiny(), each, Knowledge()) for each in of_rounds(tiny())]
    assert lanes._buckets(seen, tree.size(seen[0].weights)) == [[0, 1, 2, 3, 4, 5]]
    assert lanes._buckets(seen, tree.size(seen[0].weights) - 1) == [[0, 1], [2, 3], [4, 5]]


# --- a residual solver beside the scalar ones -------------------------------------------------------------------------


@dataclass(frozen=True)
class LevenbergMarquardt(Optimiser):
    """A dense toy: (J^T J + damping I) step = J^T r, damping times ten or a tenth."""

    steps: int = 30
    graphable: bool = False

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        return {"damping": tree.flatten(v).new_ones(())}

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        x = tree.flatten(v)

        def residual(x: Tensor) -> Tensor:
            return tree.flatten(problem.residual(tree.unflatten(x, v)))

        r, jacobian = residual(x), jacfwd(residual)(x)
        normal = jacobian.T @ jacobian + state["damping"] * torch.eye(x.shape[0], dtype=x.dtype)
        move = torch.linalg.solve_ex(normal, jacobian.T @ r)[0]
        trial = problem.project(tree.unflatten(x - move, v))
        here, there = problem.value(v), problem.value(trial)
        better = there.match < here.match
        damping = torch.where(better, 0.1 * state["damping"], 10 * state["damping"])
        return tree.where(better, trial, v), {"damping": damping}, here


@pytest.mark.parametrize("match", [SquaredError(), Cosine()], ids=["squared", "cosine"])
def test_a_residual_solver_reaches_the_truth_where_first_order_does_not(match: Any, double: Engine) -> None:
    task, seen, batch = observed()
    found = attack_of(stage_of(match=match, optimiser=LevenbergMarquardt()), restarts=3).run(
        task, seen, knowing(batch), engine=double
    )
    first = attack_of(stage_of(match=match, optimiser=Adam(steps=30)), restarts=3).run(
        task, seen, knowing(batch), engine=double
    )
    assert found.match.min() < 1e-20
    assert found.match.min() < 1e-10 * first.match.min()
    assert largest_difference(found.batch["x"][0], batch["x"]) < 1e-6


# --- a prediction with unknowns of its own ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rescaled(Prediction):
    """The gradient times an unknown factor for each parameter: exp(scale[name])."""

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {"scale": {name: value.new_zeros(()) for name, value in scene.weights.items()}}

    def target(self, scene: TargetView) -> Params:
        return scene.update

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        gradient = scene.task.gradient(scene.weights, batch, scene.buffers)
        return {name: value * v["scale"][name].exp() for name, value in gradient.items()}


def test_a_prediction_brings_nested_unknowns_with_their_own_rate(double: Engine) -> None:
    task, seen, batch = observed()
    factors = {name: 0.5 + position for position, name in enumerate(seen.update)}
    rescaled = replace(seen, update={name: value * factors[name] for name, value in seen.update.items()})
    optimiser = Adam(lr=0.05, steps=300, rates={"x": 0.0})
    stage = stage_of(space=Pixels(Surrogate(batch["x"])), predict=Rescaled(), optimiser=optimiser)
    [search] = searches(attack_of(stage), task, rescaled, knowing(batch), double)
    for _ in range(300):
        search.tick()
    assert search.v["scale"].keys() == seen.weights.keys()
    for name, factor in factors.items():
        assert float(search.v["scale"][name][0].exp()) == pytest.approx(factor, rel=1e-3)
    assert largest_difference(search.v["x"][0], batch["x"]) == 0


@pytest.mark.parametrize("setting", ["rates", "every", "epsilons"])
def test_a_setting_of_an_unknown_that_is_not_there_is_refused(setting: str, double: Engine) -> None:
    task, seen, batch = observed()
    stage = stage_of(predict=Rescaled(), optimiser=Adam(steps=2, **{setting: {"scales": 1}}))
    with pytest.raises(ValueError, match=f"{setting} names 'scales', which is not an unknown.*scale"):
        attack_of(stage).run(task, seen, knowing(batch), engine=double)


def test_an_unknown_has_one_owner(double: Engine) -> None:
    task, seen, batch = observed()
    twice = JointSpace((Pixels(Uniform()), Pixels(Uniform(), field="scale")))
    with pytest.raises(ValueError, match="both name an unknown scale"):
        attack_of(stage_of(space=twice, predict=Rescaled())).run(
            replace(task, fields={**task.fields, "scale": task.fields["x"]}), seen, knowing(batch), engine=double
        )


def test_an_interval_holds_a_variable_back(double: Engine) -> None:
    task, seen, batch = observed()
    stage = stage_of(predict=Rescaled(), optimiser=Adam(lr=0.05, steps=6, every={"scale": 3}))
    [search] = searches(attack_of(stage), task, seen, knowing(batch), double)
    places: list[float] = []
    for _ in range(6):
        search.tick()
        places.append(float(search.v["scale"]["0.bias"][0]))
    assert places[0] == places[1] == places[2] != 0
    assert places[3] == places[4] == places[5] != places[0]


# --- two stages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latent(Space):
    """x = sigmoid(z): a space that the next stage leaves."""

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {"z": draws.normal((scene.num_examples, *SHAPE), dtype=torch.float64)}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {"x": v["z"].sigmoid()}

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        return v


@dataclass(frozen=True)
class Residual(Latent):
    """x = what the last stage found, fixed, plus an unknown change."""

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {"change": torch.zeros(scene.num_examples, *SHAPE, dtype=torch.float64)}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        assert before is not None
        return {"centre": before["z"].sigmoid()}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {"x": scene.constants["centre"] + v["change"]}


@pytest.mark.parametrize("carry", ["each", "best_of_target"])
def test_the_next_stage_starts_from_what_is_carried(carry: str, double: Engine) -> None:
    task, first, batch = observed()
    _, second, _ = observed(seed=1, task=task)
    knows = Knowledge(given={"y": torch.tensor([[0], [1]])}, training=TRAINING)
    start = stage_of(space=Latent(), optimiser=Adam(steps=5), carry=carry)
    alone = attack_of(start, restarts=3).run(task, [first, second], knows, engine=double)
    both = attack_of(start, stage_of(space=Residual(), optimiser=Still()), restarts=3)
    carried = both.run(task, [first, second], knows, engine=double)
    x = alone.candidates["x"]
    expected = x if carry == "each" else x[torch.arange(2), alone.match.argmin(1)][:, None].expand_as(x)
    assert largest_difference(carried.candidates["x"], expected) < 1e-12
    assert carried.evaluations == 6
    assert carried.trace["step"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_second_stage_improves_on_the_first(double: Engine) -> None:
    task, seen, batch = observed()
    first = stage_of(space=Latent(), optimiser=Adam(lr=0.3, steps=20))
    second = stage_of(space=Residual(), optimiser=Adam(lr=0.02, steps=40))
    alone = attack_of(first).run(task, seen, knowing(batch), engine=double)
    both = attack_of(first, second).run(task, seen, knowing(batch), engine=double)
    assert both.match < 0.2 * alone.match


def test_an_unknown_way_to_carry_is_refused() -> None:
    with pytest.raises(ValueError, match="carry must be"):
        stage_of(carry="all")


def test_a_view_changes_what_a_stage_sees_and_nothing_else(double: Engine) -> None:
    """The first stage sees other weights; the second the true ones again."""
    task, seen, batch = observed()
    view = stage_of(
        space=Pixels(Surrogate(batch["x"])),
        optimiser=Still(),
        view=lambda scene: replace(scene, weights=tree.scale(scene.weights, 0.5)),
    )
    blurred = attack_of(view).run(task, seen, knowing(batch), engine=double)
    clear = attack_of(view, stage_of(optimiser=Still())).run(task, seen, knowing(batch), engine=double)
    assert blurred.match > 1e-4
    assert clear.match < 1e-25


# --- priors across restarts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watcher(Prior):
    """Notes when it is refreshed, with what, and pulls nowhere."""

    calls: list = field(default_factory=list)

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return 0 * scene.shared["mean"].sum()

    def due(self, step: int) -> bool:
        return step in (2, 5)

    def refresh(self, batch: Batch, groups: tuple[int, int]) -> Tree:
        x = batch["x"].reshape(*groups, *batch["x"].shape[1:])
        self.calls.append((groups, batch["x"].clone()))
        return {"mean": x.mean(1, keepdim=True).expand_as(x).reshape(batch["x"].shape)}


def test_a_shared_prior_sees_all_restarts_when_it_is_due(double: Engine) -> None:
    task, seen, batch = observed()
    watcher = Watcher()
    optimiser = Adam(steps=7)
    attack_of(stage_of(priors=(watcher,), optimiser=optimiser), restarts=3).run(
        task, seen, knowing(batch), engine=double
    )
    assert [groups for groups, _ in watcher.calls] == [(1, 3)] * 3  # at the start, then at steps 2 and 5
    [search] = searches(attack_of(stage_of(optimiser=optimiser), restarts=3), task, seen, knowing(batch), double)
    places = [search.v["x"].clone()]
    for _ in range(7):
        search.tick()
        places.append(search.v["x"].clone())
    for (_, seen_x), step in zip(watcher.calls, (0, 2, 5)):
        assert largest_difference(seen_x, places[step]) < 1e-12


def test_consensus_draws_the_restarts_of_a_target_together_and_of_no_other(double: Engine) -> None:
    task, first, _ = observed()
    _, second, _ = observed(seed=1, task=task)
    knows = Knowledge(given={"y": torch.tensor([[0], [1]])}, training=TRAINING)

    def spread(weight: float) -> tuple[Tensor, Tensor]:
        stage = stage_of(optimiser=Adam(steps=40), priors=(GroupConsistency(weight, start=0, interval=1),))
        x = attack_of(stage, restarts=3, keep="last").run(task, [first, second], knows, engine=double).candidates["x"]
        return x.std(1).mean(), x.mean(1).std(0).mean()

    within_free, between_free = spread(0.0)
    within, between = spread(1.0)
    assert within < 0.5 * within_free
    assert between > 0.5 * between_free


# --- fields and buffers -----------------------------------------------------------------------------------------------


def test_a_soft_label_is_found_with_the_image(double: Engine) -> None:
    task, seen, batch = observed(seed=2)
    space = JointSpace((Pixels(Uniform()), SoftField()))
    found = attack_of(stage_of(space=space, optimiser=LevenbergMarquardt(steps=40)), restarts=4).run(
        task, seen, Knowledge(training=TRAINING), engine=double
    )
    assert found.batch["y"].shape == (1, 1, CLASSES)
    torch.testing.assert_close(found.batch["y"].sum(-1), torch.ones(1, 1, dtype=torch.float64))
    assert found.batch["y"].argmax(-1)[0].tolist() == batch["y"].tolist()


def test_a_given_field_goes_before_what_a_rule_reads(double: Engine) -> None:
    task, seen, batch = observed(2)
    stubborn = Composed("toy", (stage_of(optimiser=Still()),), ReadBy(lambda scene: {"y": torch.tensor([2, 2])}))
    assert stubborn.run(task, seen, Knowledge(training=TRAINING), engine=double).batch["y"].tolist() == [[2, 2]]
    assert stubborn.run(task, seen, knowing(batch), engine=double).batch["y"][0].tolist() == batch["y"].tolist()


@pytest.mark.parametrize("norm", ["eval", "train"])
def test_every_lane_has_running_statistics_of_its_own(norm: str, double: Engine) -> None:
    """Two targets of one model that hold different buffers, together and alone."""
    task, first, batch = observed(2, task=tiny(norm=norm))
    moved = {n: v + 0.3 if v.is_floating_point() else v for n, v in first.buffers.items()}
    trained, _ = TRAINING.run(task, first.weights, batch, client=gl.ClientState(buffers=moved))
    second = Observation(first.weights, tree.detach(trained.payload["update"]), 2, key="second", buffers=moved)
    second = replace(second, returned_buffers=tree.detach(trained.buffers))
    stage = stage_of(optimiser=Adam(steps=4))
    knows = Knowledge(given={"y": batch["y"]}, training=TRAINING)
    together = attack_of(stage).run(task, [first, second], knows, engine=double)
    assert together.settings["chunks"] == [2]
    for position, target in enumerate((first, second)):
        alone = attack_of(stage).run(task, target, knows, engine=double)
        assert largest_difference(together.batch["x"][position], alone.batch["x"][0]) < 1e-10
    truth = attack_of(stage_of(space=Pixels(Surrogate(batch["x"])), optimiser=Still()))
    assert truth.run(task, [first, second], knows, engine=double).match.max() < 1e-25


# --- lanes together, lanes alone --------------------------------------------------------------------------------------


def test_lanes_together_are_lanes_alone(double: Engine) -> None:
    task = tiny()
    targets = [observed(2, seed=seed, task=task)[1] for seed in range(3)]
    knows = [Knowledge(given={"y": private(2, seed=seed)["y"]}, training=TRAINING) for seed in range(3)]
    every = Knowledge(given={"y": torch.stack([know.given["y"] for know in knows])}, training=TRAINING)
    attack = attack_of(
        stage_of(match=Cosine(), priors=(TotalVariation(1e-2),), optimiser=SignedAdam(steps=5)), restarts=2
    )
    together = attack.run(task, targets, every, engine=double)
    for position, (target, know) in enumerate(zip(targets, knows)):
        alone = attack.run(task, target, know, engine=double)
        assert largest_difference(together.candidates["x"][position], alone.candidates["x"][0]) < 1e-12
        assert largest_difference(together.match[position], alone.match[0]) < 1e-12
    assert largest_difference(together.candidates["x"][:, 0], together.candidates["x"][:, 1]) > 0.1


@pytest.mark.parametrize("norm", [None, "train"])
def test_lane_after_lane_is_the_same_as_all_at_once(norm: str | None, double: Engine) -> None:
    task, seen, batch = observed(2, task=tiny(norm=norm))
    stage = stage_of(optimiser=Adam(steps=5), priors=(GroupConsistency(0.1, start=2, interval=1),))
    attack = attack_of(stage, restarts=2)
    batched = attack.run(task, seen, knowing(batch), engine=double)
    one_by_one = attack.run(task, seen, knowing(batch), engine=replace(double, batched=False))
    assert largest_difference(batched.candidates["x"], one_by_one.candidates["x"]) < 1e-10
    assert largest_difference(batched.objective, one_by_one.objective) < 1e-10


def test_the_seed_changes_the_lanes_and_the_key_does_too(double: Engine) -> None:
    task, seen, batch = observed()
    attack = attack_of(stage_of(optimiser=Still()))
    runs = [
        attack.run(task, seen, knowing(batch), engine=double),
        attack.run(task, seen, knowing(batch), seed=1, engine=double),
        attack.run(task, replace(seen, key="other"), knowing(batch), engine=double),
    ]
    again = attack.run(task, seen, knowing(batch), engine=double)
    assert torch.equal(runs[0].batch["x"], again.batch["x"])
    assert all(largest_difference(runs[0].batch["x"], run.batch["x"]) > 0.1 for run in runs[1:])


def test_weights_examples_and_order_of_the_targets_may_differ(double: Engine) -> None:
    """One, two, one and three examples, under two different models: solved in buckets, returned as given."""
    task = tiny()
    other = tree.scale(task.weights(), 0.9)
    sizes, sent = (1, 2, 1, 3), (None, None, other, None)
    targets = [
        gl.observe(task, private(n, seed=s), TRAINING, weights=w, key=f"t{s}")
        for s, (n, w) in enumerate(zip(sizes, sent))
    ]
    attack = gl.attacks.get("dlg", steps=4, restarts=2)
    knows = Knowledge(training=TRAINING)
    found = attack.run(task, targets, knows, engine=double)
    assert found.keys == ("t0", "t1", "t2", "t3")
    assert found.examples == sizes
    assert found.settings["chunks"] == [2, 2, 2, 2]
    assert found.batch["x"].shape == (4, 3, *SHAPE)
    for position, target in enumerate(targets):
        alone = attack.run(task, target, knows, engine=double)
        assert largest_difference(found.target(position)["x"], alone.batch["x"][0]) < 1e-9
        assert found.target(position)["x"].shape[0] == sizes[position]
    assert found.batch["x"][0, 1:].isnan().all()


def test_missing_labels_are_padded_with_minus_one(double: Engine) -> None:
    task = tiny()
    targets = [gl.observe(task, private(n, seed=n), TRAINING, key=f"t{n}") for n in (1, 2)]
    found = gl.attacks.get("ig", steps=2).run(task, targets, engine=double)
    assert found.batch["y"].dtype == torch.int64
    assert found.batch["y"][0, 1] == -1
    assert (found.batch["y"][1] >= 0).all()


def test_equal_weights_share_a_bucket_and_others_do_not(double: Engine) -> None:
    task = tiny()
    same = [observed(seed=seed, task=task)[1] for seed in range(2)]
    other = gl.observe(task, private(1), TRAINING, weights=tree.scale(task.weights(), 0.9), key="other")
    found = gl.attacks.get("ig", steps=1).run(task, [same[0], other, same[1]], engine=double)
    assert found.settings["chunks"] == [2, 1]


def test_chunks_change_nothing_and_are_recorded(double: Engine) -> None:
    task = tiny()
    targets = [observed(seed=seed, task=task)[1] for seed in range(5)]
    attack = gl.attacks.get("ig", steps=4, restarts=2)
    runs = {chunk: attack.run(task, targets, engine=replace(double, chunk=chunk)) for chunk in (None, 1, 2, 5)}
    recorded = {chunk: run.settings["chunks"] for chunk, run in runs.items()}
    assert recorded == {None: [10], 1: [2] * 5, 2: [2] * 5, 5: [4, 4, 2]}  # restarts of a target stay together
    for run in runs.values():
        assert largest_difference(run.candidates["x"], runs[None].candidates["x"]) < 1e-12
        assert largest_difference(run.trace["match"], runs[None].trace["match"]) < 1e-12


# --- frozen lanes and what is kept ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explodes(Prior):
    """Not a number from step 3 on, in the lanes whose own random number is small."""

    value: float = torch.nan

    def hit(self, draws: Draws) -> Tensor:
        return draws.uniform((), stream=77) < 0.5

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return torch.where(self.hit(scene.draws) & (now.step >= 3), self.value, 0.0)


@pytest.mark.parametrize("keep", ["best_match", "last"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_lane_that_is_not_finite_is_frozen_and_reported_while_others_go_on(
    value: float, keep: str, double: Engine
) -> None:
    task, seen, batch = observed()
    restarts = 6
    sound = attack_of(stage_of(optimiser=Adam(steps=10)), restarts=restarts, keep=keep)
    early = attack_of(stage_of(optimiser=Adam(steps=3)), restarts=restarts, keep=keep)
    broken = attack_of(stage_of(optimiser=Adam(steps=10), priors=(Explodes(value),)), restarts=restarts, keep=keep)
    sound, early, broken = (attack.run(task, seen, knowing(batch), engine=double) for attack in (sound, early, broken))
    hit = torch.stack([Explodes().hit(Draws(draws.key(seen.key, 0, r))) for r in range(restarts)])
    assert 0 < hit.sum() < restarts
    assert broken.diverged[0].tolist() == hit.tolist()
    assert not sound.diverged.any()
    x = broken.candidates["x"][0]
    assert x.isfinite().all()
    assert torch.equal(x[~hit], sound.candidates["x"][0][~hit])
    assert largest_difference(x[hit], early.candidates["x"][0][hit]) < 0.2  # where it stood, not where it would be
    assert broken.trace["objective"][-1, 0][hit].isfinite().logical_not().all()
    assert broken.match.isfinite().all()


def test_a_frozen_lane_stays_where_it_was(double: Engine) -> None:
    task, seen, batch = observed()
    attack = attack_of(stage_of(optimiser=Adam(steps=10), priors=(Explodes(),)), restarts=6)
    [search] = searches(attack, task, seen, knowing(batch), double)
    places = []
    for _ in range(6):
        search.tick()
        places.append(search.v["x"].clone())
    stood = (places[2] == places[5]).flatten(1).all(1)  # step 3 is the first that breaks
    assert stood.tolist() == search.alive.logical_not().tolist()
    assert 0 < stood.sum() < 6
    assert not (places[1] == places[2]).flatten(1).all(1).any()


@dataclass(frozen=True)
class Fragile(Replay):
    """A replay that is not a number outside a ball around grey."""

    radius: float = 0.5

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        inside = (batch["x"] - 0.5).square().sum() < self.radius**2
        return tree.scale(super().__call__(batch, v, scene, now), torch.where(inside, 1.0, torch.nan))


def test_a_trial_that_is_not_finite_does_not_end_a_lane_of_lbfgs(double: Engine) -> None:
    task, seen, batch = observed()
    start = Pixels(Normal(mean=0.5, std=0.01, unit=True))
    attack = attack_of(stage_of(space=start, predict=Fragile(), optimiser=LBFGS(steps=40)), restarts=3)
    found = attack.run(task, seen, knowing(batch), engine=double)
    assert not found.diverged.any()
    assert (found.match < 0.5 * found.trace["match"][0]).all()
    told = found.trace["match"]
    assert (told[1:] == told[:-1]).any()  # some trials did leave the region: the last sound point is reported again


@dataclass(frozen=True)
class Pull(Prior):
    """Towards grey, against any match."""

    weight: float = 100.0

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return self.weight * (batch["x"] - 0.5).square().sum()


def test_the_best_iterate_is_the_best_by_match_and_not_by_objective(double: Engine) -> None:
    """From the truth a strong prior lowers the objective and spoils the match: the truth is kept."""
    task, seen, batch = observed()
    stage = stage_of(space=Pixels(Surrogate(batch["x"])), priors=(Pull(),), optimiser=Adam(lr=0.05, steps=10))
    best = attack_of(stage).run(task, seen, knowing(batch), engine=double)
    last = attack_of(stage, keep="last").run(task, seen, knowing(batch), engine=double)
    assert torch.equal(best.batch["x"][0], batch["x"])
    assert best.match < 1e-25
    assert last.objective < best.objective
    assert last.match > best.match
    assert (last.batch["x"][0] - 0.5).abs().mean() < (batch["x"] - 0.5).abs().mean()


def test_the_last_iterate_is_scored_where_it_is(double: Engine) -> None:
    """Image and score belong to the same point, for either choice."""
    task, seen, batch = observed()
    for keep in ("best_match", "last"):
        found = attack_of(stage_of(optimiser=Adam(lr=0.5, steps=7)), keep=keep).run(
            task, seen, knowing(batch), engine=double
        )
        gap = tree.subtract(task.gradient(task.weights(), found.target(0)), seen.update)
        assert float(tree.squared_norm(gap)) == pytest.approx(float(found.match), rel=1e-9)


def test_the_restart_with_the_lowest_match_is_chosen() -> None:
    match = torch.tensor([[3.0, 1.0, torch.nan], [torch.nan, torch.inf, 5.0], [torch.nan, torch.nan, torch.nan]])
    assert lowest_match(match)[:2].tolist() == [1, 2]


def test_the_choice_among_restarts_is_by_match(double: Engine) -> None:
    task, seen, batch = observed()
    found = attack_of(stage_of(optimiser=Adam(steps=5)), restarts=5).run(task, seen, knowing(batch), engine=double)
    assert found.chosen[0] == found.match[0].argmin()
    assert torch.equal(found.batch["x"][0], found.candidates["x"][0, found.chosen[0]])


def test_the_trace_begins_at_the_start_and_covers_the_run(double: Engine) -> None:
    task, seen, batch = observed()
    start = attack_of(stage_of(optimiser=Still()), restarts=2).run(task, seen, knowing(batch), engine=double)
    found = attack_of(stage_of(optimiser=Adam(steps=250)), restarts=2).run(task, seen, knowing(batch), engine=double)
    assert found.trace["step"].tolist() == list(range(0, 250, 2))
    assert found.trace["match"].shape == (125, 1, 2)
    assert largest_difference(found.trace["match"][0], start.match) < 1e-15
    assert found.trace["match"][-1].max() < found.trace["match"][0].min()


def test_lanes_that_finish_begin_their_curve_at_the_start_and_never_leave_it_open(double: Engine) -> None:
    """One target starts at its solution and has nothing to do, the other does not: both curves are whole."""
    task, seen, batch = observed()
    far = replace(seen, update=tree.scale(seen.update, 1.5), key="far")
    stage = stage_of(space=Pixels(Surrogate(batch["x"])), optimiser=levenberg.LevenbergMarquardt(steps=8))
    found = attack_of(stage, keep="last").run(task, [seen, far], knowing(batch), engine=double)
    curves = found.trace["match"][:, :, 0]
    assert curves.isfinite().all()
    assert curves[:, 0].max() < 1e-26
    assert abs(curves[0, 1] - tree.squared_norm(tree.scale(seen.update, 0.5))) < 1e-12
    assert found.match[1, 0] <= curves[-1, 1] < curves[0, 1]


def test_progress_rises_to_one(double: Engine) -> None:
    task = tiny()
    targets = [observed(seed=seed, task=task)[1] for seed in range(2)]
    told: list[float] = []
    stages = (stage_of(optimiser=Still(202)), stage_of(optimiser=Still(7)))  # the first's trace has every second step
    knows = Knowledge(given={"y": torch.tensor([[0], [1]])}, training=TRAINING)
    attack_of(*stages).run(task, targets, knows, engine=replace(double, chunk=1), progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1
    assert 0 < told[0] < 0.05


# --- models that vmap rejects, settings -------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_model_that_vmap_rejects_is_an_error_with_advice_and_runs_lane_after_lane(double: Engine) -> None:
    like = (torch.zeros(1, *SHAPE), torch.zeros(1).long())
    task = gl.Task.supervised(Branch().double(), cross_entropy, like=like)
    seen = gl.observe(task, private(1), TRAINING)
    attack = attack_of(stage_of(optimiser=Adam(steps=3)), restarts=2)
    with pytest.raises(EngineError, match=r"vmap.*task\.check\(\).*batched=False"):
        attack.run(task, seen, knowing(private(1)), engine=double)
    found = attack.run(task, seen, knowing(private(1)), engine=replace(double, batched=False))
    assert found.match.isfinite().all()


@pytest.mark.parametrize("batched", [True, False])
def test_dropout_is_an_error_with_advice(batched: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, CLASSES)).double()
    task = gl.Task.supervised(model, nn.functional.cross_entropy, like=(torch.zeros(1, *SHAPE), torch.zeros(1).long()))
    seen = gl.observe(task, private(1), TRAINING)
    engine_ = Engine(device="cpu", precision="double", batched=batched)
    with pytest.raises(TaskError, match=r"Dropout is active \(1\).*model.eval\(\)"):
        gl.attacks.get("ig", steps=2).run(task, seen, engine=engine_)


def test_other_errors_are_not_dressed_up(double: Engine) -> None:
    class Wrong(Prior):
        def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
            raise RuntimeError("mine")

    task, seen, batch = observed()
    with pytest.raises(RuntimeError, match="^mine$"):
        attack_of(stage_of(priors=(Wrong(),))).run(task, seen, knowing(batch), engine=double)


@pytest.mark.parametrize(
    ("settings", "told"), [({"precision": "half"}, "precision must be"), ({"chunk": 0}, "chunk must")]
)
def test_impossible_engines_are_refused(settings: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Engine(**settings)


def test_the_users_settings_come_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with Engine(precision="fast").settings():
        assert torch.backends.cudnn.allow_tf32
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_the_chunk_is_sized_for_the_largest_batch(double: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(lanes, "chunk_size", lambda stages, scene, engine: sizes.append(scene.num_examples) or 4)
    task = tiny()
    targets = [gl.observe(task, private(n, seed=n), TRAINING, key=f"t{n}") for n in (1, 3, 2)]
    gl.attacks.get("ig", steps=1).run(task, targets, engine=double)
    assert sizes == [3]


def test_precision_is_that_of_the_engine_and_not_of_the_model() -> None:
    task, seen, batch = observed()
    for precision, dtype in (("strict", torch.float32), ("double", torch.float64)):
        attack = gl.attacks.get("ig", steps=2)
        assert attack.run(task, seen, engine=Engine(device="cpu", precision=precision)).batch["x"].dtype == dtype
    assert next(task.model.parameters()).dtype == torch.float64


# --- the gate: a step that can be captured ----------------------------------------------------------------------------


class NotCapturable(AssertionError):
    """The step reads a value on the host, makes a tensor from host data, or has a shape that depends on values."""


class Watch(TorchDispatchMode):
    """Looks at every operation for what a CUDA graph cannot hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "lift_fresh" in str(func):
            raise NotCapturable("a tensor is made from Python numbers inside the step: make it at the start")
        value = func(*args, **(kwargs or {}))
        symbols = [value] if not isinstance(value, Tensor) else value.shape
        if any(isinstance(symbol, (torch.SymInt, torch.SymFloat, torch.SymBool)) for symbol in symbols):
            raise NotCapturable(f"{func} reads a value on the host")
        return value


def gate(search: Search) -> None:
    """One tick with fake tensors, which have shapes and no values. Constants of the step may be real."""
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    search.moving, search.lane = (tree.map(fake.from_tensor, held) for held in (search.moving, search.lane))
    try:
        with fake, Watch():
            search.tick()
    except Exception as problem:
        raise NotCapturable(str(problem).splitlines()[0]) from problem


@pytest.mark.parametrize("name", [name for name, found in on_classifiers().items() if found.evaluations > 1])
@pytest.mark.parametrize("norm", [None, "train"])
def test_the_step_of_every_registered_attack_can_be_captured(name: str, norm: str | None, double: Engine) -> None:
    attack = short(name, steps=50)
    task, seen, _ = observed(2, task=tiny(norm=norm))
    for search in searches(attack, task, seen, Knowledge(training=TRAINING), double):
        if search.stage.optimiser.graphable:
            gate(search)


def test_a_step_over_several_rounds_can_be_captured(double: Engine) -> None:
    task, seen, _ = observed(2)
    track = gl.Track((seen, replace(seen, round=1)))
    knows = Knowledge(training=TRAINING, defence=gl.defences.Pruning(keep=0.5))
    for search in searches(short("ig", steps=50), task, track, knows, double):
        gate(search)


TABLE = torch.linspace(0, 1, 50)
BAD: dict[str, Callable[[Batch, Step], Any]] = {
    "branch on the step": lambda batch, now: 1.0 if now.step > 3 else 0.0,
    "branch on the image": lambda batch, now: 1.0 if batch["x"].sum() > 0 else 0.0,
    "item": lambda batch, now: now.step.item(),
    "index by the step": lambda batch, now: TABLE[now.step.long()],
    "slice by the step": lambda batch, now: batch["x"].flatten()[: now.step.long()].sum(),
    "boolean index": lambda batch, now: TABLE[now.step > TABLE].sum(),
    "tensor from numbers": lambda batch, now: torch.tensor([1.0, 2.0]).sum(),
    "one_hot": lambda batch, now: nn.functional.one_hot(batch["y"]).sum(),
}
GOOD: dict[str, Callable[[Batch, Step], Any]] = {
    "where on the step": lambda batch, now: torch.where(now.step > 3, 1.0, 0.0),
    "select by the step": lambda batch, now: TABLE.index_select(0, now.step.long().reshape(1)).sum(),
    "ramp": lambda batch, now: now.fraction,
}


@dataclass(frozen=True)
class Toy(Prior):
    """A prior that multiplies an innocent number by something."""

    factor: Callable[[Batch, Step], Any]

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return batch["x"].square().mean() * self.factor(batch, now)


def gated(factor: Callable[[Batch, Step], Any], double: Engine) -> None:
    task, seen, batch = observed()
    stage = stage_of(priors=(Toy(factor),), optimiser=Adam(steps=50))
    [search] = searches(attack_of(replace(stage, priors=())), task, seen, knowing(batch), double)
    search.stage = stage
    gate(search)


@pytest.mark.parametrize("name", BAD)
def test_the_gate_catches(name: str, double: Engine) -> None:
    with pytest.raises(NotCapturable):
        gated(BAD[name], double)


@pytest.mark.parametrize("name", GOOD)
def test_the_gate_lets_through(name: str, double: Engine) -> None:
    gated(GOOD[name], double)


def test_a_branch_on_the_step_would_run_unnoticed_without_the_gate(double: Engine) -> None:
    """vmap sees no batch in the step, so it does not object: this is what the gate is for."""
    task, seen, batch = observed()
    found = attack_of(stage_of(priors=(Toy(BAD["branch on the step"]),), optimiser=Adam(steps=5))).run(
        task, seen, knowing(batch), engine=double
    )
    assert isinstance(found, Reconstruction)


# --- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["ig:steps=20,restarts=2", "gi:steps=20", "second-order", "auto:preset=quick"])
def test_images_on_the_way_change_no_result_and_end_near_it(attack: str) -> None:
    """Of the chosen restart, target by target; later ones are closer to what is returned than the start is."""
    task, training = perceptron(), gl.LocalTraining(lr=0.5)
    batches = [private(1), private(2, seed=1)]
    seen = [gl.observe(task, batch, training, key=str(place)) for place, batch in enumerate(batches)]
    given = (task, seen, gl.Knowledge(training=training))
    found, plain = (
        registry.parse("attack", attack).run(*given, engine=Engine(device="cpu", precision="double", snapshots=count))
        for count in (6, 0)
    )
    assert torch.equal(found.batch["x"].nan_to_num(9), plain.batch["x"].nan_to_num(9))
    assert plain.snapshots == {}
    assert found.snapshots["x"].shape == (2, 6, 2, *SHAPE)
    steps = found.snapshots["step"]
    assert steps[:, 0].tolist() == [0, 0]
    assert (steps.diff() >= 0).all()
    for target, batch in enumerate(batches):
        images = found.snapshots["x"][target, :, : len(batch["x"])].double()
        assert images.isfinite().all()
        off = (images - found.target(target)["x"]).flatten(1).norm(dim=1)
        assert off[-1] < off[0] or off.max() < 1e-3  # a closed form shows the same at all moments, to half precision
