"""Every registered attack: it searches, it answers in the right form, it refuses what it cannot use, it repeats."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

import gradleak as gl
from conftest import CLASSES, SHAPE, largest_difference, on_classifiers, perceptron, private, short, tiny
from gradleak.attack import Composed
from gradleak.attacks.generative.cma import CMAES
from gradleak.core.random import Draws, key
from gradleak.core.registry import BadSetting, UnknownName
from gradleak.engine import Engine
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine, LayerNorms, MeanSquaredError, RowCosine, Scaled, SquaredError
from gradleak.parts.optimisers import Adam, CosineDecay, Lion, RampedDecay, SignedAdam, StepDecay, soft_sign
from gradleak.parts.partial import AsObserved
from gradleak.parts.priors import (
    BatchNormStatistics,
    FeatureDistance,
    GroupConsistency,
    ImageNorm,
    LabelDistance,
    OpponentVariation,
    SummedVariation,
    TotalVariation,
)
from gradleak.parts.spaces import JointSpace, Normal, Pixels, SoftField, Surrogate, Tiled, Uniform
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge, MissingKnowledge

TRAINING = LocalTraining(lr=0.5)
KNOWS = Knowledge(training=TRAINING)
NAMES = gl.attacks.names()
TRIED = on_classifiers()
SEARCHES = [name for name, found in TRIED.items() if found.evaluations > 1]  # the others are closed forms
HARD_LABELS = [name for name, found in TRIED.items() if not found.batch["y"].is_floating_point()]
UNSOLVED = [name for name in SEARCHES if TRIED[name].match.shape[1] > 1 and not (TRIED[name].match < 1e-12).all()]
ALWAYS_DOUBLE = {"second-order", "auto"}  # whatever the engine says: least squares in float32 has no digits left


def attacked(name: str, examples: int = 1, *, seed: int = 0, engine: Engine | None = None, steps: int = 5):
    task = perceptron()
    attack = short(name, steps=steps)
    seen = gl.observe(task, private(examples), TRAINING)
    return attack.run(task, seen, KNOWS, seed=seed, engine=engine or Engine(device="cpu"))


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_tables_hold_the_attacks_on_classifiers() -> None:
    """Which attacks the tables run on is found by trying: it must be nearly all, and the published ones."""
    published = {"dlg", "idlg", "cpl", "ig", "gi", "representation"}
    assert published | {"second-order", "auto", "analytic"} <= set(TRIED)
    assert published <= set(SEARCHES)
    assert published - {"dlg"} <= set(HARD_LABELS)
    assert {"ig", "gi", "representation"} <= set(UNSOLVED)
    assert len(TRIED) > len(NAMES) / 2  # tests/test_bench_parity.py runs the others, each in a world of its own


def test_the_papers_attacks_are_registered() -> None:
    assert {"dlg", "idlg", "cpl", "ig", "gi", "representation"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_attack_says_what_it_does_and_where_it_comes_from(name: str) -> None:
    entry = gl.registry.entry("attack", name)
    assert len(entry.summary) > 20
    assert entry.paper
    assert entry.status in ("verified", "unverified")
    assert gl.attacks.get(name).name == name


BOXED, WARM = Pixels(Normal(), boxed=True), CosineDecay(warmup=50)
# Restarts; then of each stage: match, priors, optimiser. The papers', or their code's where it says otherwise.
PUBLISHED = {
    "dlg": (1, (SquaredError(), (), LBFGS(steps=6000, history=100))),
    "idlg": (1, (SquaredError(), (), LBFGS(steps=6000, history=100))),
    "cpl": (1, (SquaredError(), (LabelDistance(0.5),), LBFGS(steps=6000, history=100))),
    "ig": (1, (Cosine(), (TotalVariation(1e-6),), SignedAdam(lr=0.1, steps=4800, schedule=StepDecay()))),
    "ig-trained": (8, (Cosine(), (TotalVariation(1e-2),), SignedAdam(lr=0.1, steps=24000, schedule=StepDecay()))),
    "ig-modern": (
        1,
        (
            Cosine(),
            (OpponentVariation(0.1), FeatureDistance(0.1)),
            Adam(lr=0.1, steps=24000, schedule=WARM, transform=soft_sign),
        ),
    ),
    "gi": (
        4,
        (
            Scaled(LayerNorms(), 1e-3),
            (TotalVariation(1e-4), ImageNorm(1e-6), BatchNormStatistics(0.1), GroupConsistency(0.01, 500, 100)),
            Adam(lr=0.1, steps=20000, schedule=WARM, noise=0.2),
        ),
    ),
    "gi-lazy": (
        4,
        (
            SquaredError(),
            (TotalVariation(1e-4), ImageNorm(1e-6, per_pixel=True), GroupConsistency(0.01, 500, 100, per_pixel=True)),
            Adam(lr=0.1, steps=15000, schedule=StepDecay()),
        ),
    ),
    "gias": (
        4,
        (Cosine(), (TotalVariation(1e-6),), Adam(lr=0.03, steps=1000, schedule=StepDecay())),
        (Cosine(), (TotalVariation(1e-6),), Adam(lr=1e-3, steps=8000, schedule=StepDecay())),
    ),
    "ggl": (1, (AsObserved(MeanSquaredError()), (), CMAES(steps=500, population=50, sigma=1.0))),
    "gifd": (
        4,
        *[
            (
                Cosine(),
                (TotalVariation(1e-4), ImageNorm(1e-6, per_pixel=True)),
                Adam(lr=0.1, steps=1000, schedule=RampedDecay(0.05, 0.75)),
            )
        ]
        * 5,
    ),
    "representation": (5, (RowCosine(), (SummedVariation(0.0, 1e-6),), Adam(lr=0.1, steps=5000))),
    "representation-lewis": (
        1,
        (
            RowCosine(absolute=True),
            (SummedVariation(0.0, 1e-6),),
            Lion(lr=0.1, steps=1000, schedule=CosineDecay(), weight_decay=1e-3),
        ),
    ),
}
STARTS = {
    "dlg": JointSpace((Pixels(Normal()), SoftField())),
    "idlg": Pixels(Normal()),
    "cpl": Pixels(Tiled(2)),
    "ig": BOXED,
    "ig-trained": BOXED,
    "ig-modern": Pixels(Tiled(width=4, normal=True), boxed=True),
    "gi": BOXED,
    "gi-lazy": BOXED,
    "representation": Pixels(Normal(0.5, 0.5, unit=True, clip=True), boxed=True),
    "representation-lewis": Pixels(Uniform()),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones(name: str) -> None:
    """Weights, rates, schedules and budgets decide what an attack reaches: none of them changes unnoticed."""
    attack, (restarts, *stages) = gl.attacks.get(name), PUBLISHED[name]
    assert attack.restarts == restarts
    assert [(stage.match, stage.priors, stage.optimiser) for stage in attack.stages] == stages
    if name in STARTS:
        assert attack.stages[0].space == STARTS[name]


# The signs of this perceptron's gradient are the same for all images: tests/test_secadam.py has `sign-matching`.
@pytest.mark.parametrize("name", [name for name in SEARCHES if name != "sign-matching"])
def test_every_attack_lowers_its_objective(name: str, double: Engine) -> None:
    found = attacked(name, engine=double, steps=30)
    first, last = found.trace["objective"][[0, -1], 0]
    assert (last < first).all()
    # Priors have floors of their own (the label term of CPL is most of its objective): the match must fall clearly.
    assert (found.match < 0.85 * found.trace["match"][0]).all()
    assert not found.diverged.any()


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("examples", [1, 2])
def test_every_attack_answers_with_images_and_labels(name: str, examples: int) -> None:
    found = attacked(name, examples)
    restarts = found.match.shape[1]
    assert found.batch["x"].shape == (1, examples, *SHAPE)
    assert found.candidates["x"].shape == (1, restarts, examples, *SHAPE)
    assert found.batch["x"].dtype == (torch.float64 if name in ALWAYS_DOUBLE else torch.float32)
    assert found.batch["x"].isfinite().all()
    assert found.examples == (examples,)
    assert found.seconds > 0
    labels = found.batch["y"]
    if labels.is_floating_point():
        assert labels.shape == (1, examples, CLASSES)
        torch.testing.assert_close(labels.sum(-1), torch.ones(1, examples))
    else:
        assert labels.shape == (1, examples)
        assert labels.dtype == torch.int64
        assert ((labels >= 0) & (labels < CLASSES)).all()


@pytest.mark.parametrize("name", HARD_LABELS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_label_of_one_example_is_read_off(name: str, seed: int) -> None:
    """Attacks that optimise the label too have soft labels and need more than a few steps for it."""
    task, batch = perceptron(), private(1, seed=seed)
    attack = short(name, steps=1)
    found = attack.run(task, gl.observe(task, batch, TRAINING), KNOWS, engine=Engine(device="cpu"))
    assert found.batch["y"][0].tolist() == batch["y"].tolist()


@pytest.mark.parametrize("name", TRIED)
def test_given_labels_are_used_as_they_are(name: str) -> None:
    task, batch = perceptron(), private(2)
    attack = short(name, steps=2)
    y = torch.tensor([2, 0])
    found = attack.run(
        task, gl.observe(task, batch, TRAINING), replace(KNOWS, given={"y": y}), engine=Engine(device="cpu")
    )
    if not found.batch["y"].is_floating_point():
        assert sorted(found.batch["y"][0].tolist()) == [0, 2]


@pytest.mark.parametrize("name", TRIED)
def test_every_attack_repeats_by_seed(name: str) -> None:
    first, again, other = (attacked(name, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first.candidates["x"], again.candidates["x"])
    assert torch.equal(first.match, again.match)
    if (
        first.evaluations > 1 and not (first.match < 1e-12).all()
    ):  # there is one solution, and it owes nothing to chance
        assert not torch.equal(first.candidates["x"], other.candidates["x"])


@pytest.mark.parametrize("name", TRIED)
def test_every_attack_computes_the_same_lane_after_lane(name: str, double: Engine) -> None:
    batched, one_by_one = (attacked(name, 2, engine=replace(double, batched=flag)) for flag in (True, False))
    assert largest_difference(batched.candidates["x"], one_by_one.candidates["x"]) < 1e-6
    assert largest_difference(batched.objective, one_by_one.objective) < 1e-8


@pytest.mark.parametrize("name", ["dlg", "idlg", "cpl", "gi", "gi-lazy"])
def test_the_clients_learning_rate_changes_nothing(name: str, double: Engine) -> None:
    """The papers match gradients, and weigh their priors against those: an update is lr times one."""
    task, attack = tiny(), short(name, steps=20)
    found = []
    for lr in (1.0, 0.01):
        training = LocalTraining(lr=lr)
        seen = gl.observe(task, private(2), training)
        found.append(attack.run(task, seen, Knowledge(training=training), engine=double))
    first, other = found
    assert (first.match < first.trace["match"][0]).all()
    assert largest_difference(first.candidates["x"], other.candidates["x"]) < 1e-6
    torch.testing.assert_close(first.objective, other.objective, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", UNSOLVED)
def test_restarts_differ(name: str) -> None:
    found = attacked(name)
    assert largest_difference(found.candidates["x"][0, 0], found.candidates["x"][0, 1]) > 1e-3


@pytest.mark.parametrize("name", [name for name in TRIED if name != "analytic"])  # it needs a linear layer first
@pytest.mark.parametrize("norm", ["eval", "train"])
def test_every_attack_takes_batch_norm_in_either_mode(name: str, norm: str, double: Engine) -> None:
    attack = short(name, steps=3)
    task = tiny(norm=norm)
    found = attack.run(task, gl.observe(task, private(2), TRAINING), KNOWS, engine=double)
    assert found.match.isfinite().all()
    assert not found.diverged.any()


# --- the published loops ----------------------------------------------------------------------------------------------


LOOP = 30  # steps
START = Draws(key("start")).uniform((2, *SHAPE), dtype=torch.float64)


def variations(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]


class Written:
    """The loops as papers and their code have them, in plain torch: one client, its gradient, its classifier's rows."""

    def __init__(self) -> None:
        self.task = tiny(mean=0.3, std=0.4)
        field, truth = self.task.fields["x"], private(2)
        self.batch = {"x": field.model(truth["x"]), "y": truth["y"]}
        self.low, self.high = (float(each) for each in (field.model(torch.zeros(1)), field.model(torch.ones(1))))
        self.seen = [g.detach() for g in self.gradient(self.batch["x"])]
        self.rows = self.seen[-2][self.batch["y"]]

    def gradient(self, x: Tensor) -> tuple[Tensor, ...]:
        loss = cross_entropy(self.task.model(x), self.batch["y"])
        return torch.autograd.grad(loss, list(self.task.model.parameters()), create_graph=True)

    def cosine(self, x: Tensor) -> Tensor:
        mine, theirs = (torch.cat([g.flatten() for g in each]) for each in (self.gradient(x), self.seen))
        return 1 - cosine_similarity(mine, theirs, dim=0)

    def squares(self, x: Tensor) -> Tensor:
        return sum((mine - theirs).square().sum() for mine, theirs in zip(self.gradient(x), self.seen))

    def features(self, x: Tensor) -> Tensor:
        """The cosine of each image's features and the classifier's row of its label, (2,)."""
        return cosine_similarity(self.task.model[:-1](x), self.rows, dim=1)

    def adam(self, cost: Callable[[Tensor], Tensor], signed: bool = False, falling: bool = True) -> Tensor:
        x = self.task.fields["x"].model(START.clone()).requires_grad_()
        optimiser = torch.optim.Adam([x], lr=0.1)
        milestones = [int(LOOP // divisor) for divisor in (2.667, 1.6, 1.142)] if falling else []
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones, gamma=0.1)
        for _ in range(LOOP):
            [x.grad] = torch.autograd.grad(cost(x), x)
            if signed:
                x.grad.sign_()
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                x.clamp_(self.low, self.high)
        return x.detach()

    def lion(self, cost: Callable[[Tensor], Tensor]) -> Tensor:
        x, momentum = self.task.fields["x"].model(START.clone()), torch.zeros_like(START)
        for step in range(LOOP):
            rate = 0.1 * 0.5 * (1 + math.cos(math.pi * step / LOOP))
            here = x.clone().requires_grad_()
            [g] = torch.autograd.grad(cost(here), here)
            x = x - rate * ((0.9 * momentum + 0.1 * g).sign() + 1e-3 * x)
            momentum = 0.99 * momentum + 0.01 * g
        return x


def _ig(loop: Written) -> Tensor:
    return loop.adam(lambda x: loop.cosine(x) + 1e-2 * sum(d.abs().mean() for d in variations(x)), signed=True)


def _gi_lazy(loop: Written) -> Tensor:
    def priors(x: Tensor) -> Tensor:
        return 1e-4 * sum(d.abs().mean() for d in variations(x)) + 1e-6 * x.flatten(1).norm(dim=1).sum() / 16

    return loop.adam(lambda x: loop.squares(x) + priors(x))


def _representation(loop: Written) -> Tensor:
    def cost(x: Tensor) -> Tensor:
        return 1 + loop.features(x).mean() + 1e-3 * sum(d.square().sum() for d in variations(x))

    return loop.adam(cost, falling=False)


def _lewis(loop: Written) -> Tensor:
    def cost(x: Tensor) -> Tensor:
        rough = sum(1e-3 * d.abs().sum() + 1e-3 * d.square().sum() for d in variations(x))
        return 1 - loop.features(x).abs().mean() + rough

    return loop.lion(cost)


LOOPS = {
    "ig": (_ig, {"tv": 1e-2}),
    "gi-lazy": (_gi_lazy, {}),
    "representation": (_representation, {"second": 1e-3}),
    "representation-lewis": (_lewis, {"first": 1e-3, "second": 1e-3}),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("lr", [1.0, 0.1])
def test_an_attack_takes_the_steps_of_its_published_loop(name: str, lr: float, double: Engine) -> None:
    """Signs, units, schedule, box and total variation at once. The client's rate is no part of a published loop."""
    loop, (walk, settings) = Written(), LOOPS[name]
    training = LocalTraining(lr=lr)
    attack = gl.attacks.get(name, steps=LOOP, restarts=1, keep="last", **settings)
    stages = [replace(stage, space=replace(stage.space, start=Surrogate(START))) for stage in attack.stages]
    knows = Knowledge(training=training, given={"y": loop.batch["y"]})
    seen = gl.observe(loop.task, loop.batch, training)
    found = replace(attack, stages=tuple(stages)).run(loop.task, seen, knows, engine=double)
    wanted = walk(loop)
    assert largest_difference(found.batch["x"][0], wanted) < 1e-6
    assert largest_difference(wanted, loop.task.fields["x"].model(START)) > 0.1


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_name_nearly_right_is_offered() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'idlg'"):
        gl.attacks.get("iDLG")


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_nearly_right_is_offered(name: str) -> None:
    setting = next(iter(gl.registry.entry("attack", name).settings))
    with pytest.raises(BadSetting, match=rf"no setting '{setting}s'\. Did you mean .*'{setting}'"):
        gl.attacks.get(name, **{f"{setting}s": 1})


def test_the_command_lines_spelling_makes_the_same_attack() -> None:
    spelt = gl.registry.parse("attack", "ig:steps=7,tv=0.5,keep=last")
    assert repr(spelt) == repr(gl.attacks.get("ig", steps=7, tv=0.5, keep="last"))


def test_a_match_that_sees_the_scale_asks_for_the_recipe() -> None:
    task = tiny()
    seen = gl.observe(task, private(1), TRAINING)
    with pytest.raises(MissingKnowledge, match=r"idlg needs training.*LocalTraining\(lr="):
        gl.attacks.get("idlg", steps=1).run(task, seen)
    gl.attacks.get("ig", steps=1).run(task, seen)


def test_an_observation_of_another_model_is_refused() -> None:
    seen = gl.observe(perceptron(), private(1), TRAINING)
    with pytest.raises(MissingKnowledge, match="not of this model: they differ at 0.bias"):
        gl.attacks.get("ig", steps=1).run(tiny(), seen)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"y": torch.tensor([1])}, r"shape \(1,\); wanted \(2, ...\)"),
        ({"y": torch.zeros(2, 2, 2).long()}, r"shape \(2, 2, 2\)"),
        ({"z": torch.tensor([1, 1])}, "names 'z'; the task's fields are x, y"),
    ],
)
def test_given_fields_must_fit(given: dict, told: str) -> None:
    task = tiny()
    with pytest.raises(MissingKnowledge, match=told):
        gl.attacks.get("ig", steps=1).run(task, gl.observe(task, private(2), TRAINING), Knowledge(given=given))


def test_given_fields_may_be_one_for_all_targets_or_one_for_each() -> None:
    task = tiny()
    seen = [gl.observe(task, private(2, seed=s), TRAINING, key=f"t{s}") for s in range(3)]
    attack = gl.attacks.get("ig", steps=1)
    shared = attack.run(task, seen, Knowledge(given={"y": torch.tensor([2, 1])}))
    assert shared.batch["y"].tolist() == [[2, 1]] * 3
    each = torch.tensor([[0, 1], [1, 1], [2, 0]])
    assert attack.run(task, seen, Knowledge(given={"y": each})).batch["y"].tolist() == each.tolist()


@pytest.mark.parametrize(
    ("settings", "told"), [({"keep": "first"}, "keep must be"), ({"restarts": 0}, "restarts must be at least 1")]
)
def test_impossible_compositions_are_refused(settings: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gl.attacks.get("ig", **settings)


def test_an_unknown_start_is_offered_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Did you mean 'mosaic-8'"):
        gl.attacks.get("cpl", start="mosaic")


@pytest.mark.parametrize("name", TRIED)
def test_the_configuration_can_be_read_off_the_result(name: str) -> None:
    found = attacked(name, seed=3)
    assert found.settings["seed"] == 3
    if isinstance(short(name), Composed):
        assert found.settings["attack"] == re.sub(r" at 0x\w+", "", repr(short(name, steps=5)))
        assert "0x" not in found.settings["attack"]  # the same in every process
    assert "Engine(" in found.settings["engine"]


# --- as in the README -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "share"), [("ig", 0.8), ("idlg", 0.9)])
def test_a_real_size_attack_closes_in_on_the_image(name: str, share: float) -> None:
    """LeNet, one smooth 3 x 32 x 32 image, float32, few steps: the match falls, and the image comes nearer."""
    coarse = Draws(key("picture")).uniform((1, 3, 4, 4))
    x = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear").clamp(0, 1)
    y = torch.tensor([7])
    model = gl.models.lenet_zhu(generator=torch.Generator().manual_seed(0))
    task = gl.Task.supervised(model, cross_entropy, like=(x, y))
    training = LocalTraining(lr=1.0)
    seen = gl.observe(task, {"x": x, "y": y}, training)
    knows, engine = Knowledge(training=training), Engine(device="cpu")
    start, found = (gl.attacks.get(name, steps=steps).run(task, seen, knows, engine=engine) for steps in (1, 50))
    before, after = ((run.batch["x"][0].clamp(0, 1) - x).square().mean() for run in (start, found))
    assert found.batch["y"].item() == 7
    assert found.match < 0.3 * start.match
    assert after < share * before
    assert found.checks is not None
