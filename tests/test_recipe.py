"""Clients as they really train: what a replay knows of them, and what their updates say about the recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from conftest import private, tiny
from gradleak.core import tree
from gradleak.core.random import Draws, key
from gradleak.engine import Engine
from gradleak.identify.recipe import Apart, Way, linearity, ranked, recipes, replay_error, walk, way, way_of, way_on
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.rules import SGD, Adam, Lion, Rule, cosine_decay
from gradleak.scenario.task import Batch, TaskError

EXAMPLES, CLASSES = 20, 10


def network(*, bias: bool = True, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """A small convolutional network as the papers have them: ReLU, pooling, two linear layers; in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(32, CLASSES, bias=bias),
        ).eval()  # fmt: skip


def task_of(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> gl.Task:
    like = (torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model, loss, like=like, mean=0.5, std=0.25)


def images(seed: int = 0, classes: int = CLASSES) -> Batch:
    """Smooth pictures in model-input space, of the first `classes` classes."""
    make = torch.Generator().manual_seed(seed)
    pictures = F.interpolate(torch.rand(EXAMPLES, 1, 4, 4, generator=make), size=(8, 8), mode="bicubic").clamp(0, 1)
    return {"x": (pictures - 0.5) / 0.25, "y": torch.randint(0, classes, (EXAMPLES,), generator=make)}


def counts_of(batch: Batch) -> Tensor:
    return torch.bincount(batch["y"], minlength=CLASSES)


def shuffled(training: LocalTraining, examples: int, seed: int = 0) -> list[Any]:
    return training.order(examples, torch.Generator().manual_seed(seed))


# --- replays ----------------------------------------------------------------------------------------------------------

RULES: dict[str, tuple[Rule, Any]] = {
    "momentum": (SGD(momentum=0.9), None),
    "nesterov": (SGD(momentum=0.9, nesterov=True), None),
    "weight decay": (SGD(weight_decay=0.01), None),
    "adam": (Adam(), None),
    "adamw": (Adam(weight_decay=0.05, decoupled=True), None),
    "lion": (Lion(weight_decay=0.01), None),
    "schedule": (SGD(momentum=0.5), cosine_decay),
}


@pytest.mark.parametrize("name", RULES)
def test_a_known_recipe_in_a_known_order_is_replayed_exactly(name: str) -> None:
    rule, schedule = RULES[name]
    settings = {} if schedule is None else {"schedule": schedule}
    training = LocalTraining(lr=0.02, epochs=3, batch_size=2, optimiser=rule, **settings)
    task, batch = tiny(), private(5)
    order = shuffled(training, 5)
    upload, _ = training.run(task, task.weights(), batch, order=order)
    seen = Observation(task.weights(), tree.detach(upload.payload["update"]), 5)
    known = replay_error(task, seen, batch, training, order=order)
    assert known.relative < 1e-12
    assert known.cosine == pytest.approx(1)
    assert known.tensors.keys() == seen.update.keys()
    assert replay_error(task, seen, batch, training).relative > 1e-3  # in the order of the rows
    plain = LocalTraining(lr=0.02, epochs=3, batch_size=2)
    assert replay_error(task, seen, batch, plain, order=order).relative > 1e-2  # as if it had been plain SGD


def test_the_error_is_told_of_all_tensors_and_of_each() -> None:
    task, batch = tiny(), private(3)
    seen = gl.observe(task, batch, LocalTraining(lr=0.1))
    twice = replay_error(task, seen, batch, LocalTraining(lr=0.2))
    for told in (twice.total, *twice.tensors.values()):
        assert (told.relative, told.cosine, told.scale) == pytest.approx((1, 1, 2))
    name = next(iter(seen.update))
    turned = replace(seen, update={**seen.update, name: -seen.update[name]})
    found = replay_error(task, turned, batch, LocalTraining(lr=0.1))
    assert found.worst == name
    assert found.tensors[name].relative == pytest.approx(2)
    assert found.tensors[name].cosine == pytest.approx(-1)
    share = tree.squared_norm({name: seen.update[name]}) / tree.squared_norm(seen.update)
    assert found.relative == pytest.approx(2 * math.sqrt(share))
    assert name in str(found)
    still = replace(seen, update={**seen.update, name: torch.zeros_like(seen.update[name])})
    assert replay_error(task, still, batch, LocalTraining(lr=0.1)).tensors[name].relative == math.inf
    assert isinstance(found.total, Apart)


def test_a_known_defence_is_part_of_the_replay() -> None:
    task, batch, training = tiny(), private(3), LocalTraining(lr=0.1, steps=3)
    pruned = gl.defences.Pruning(keep=0.3)
    seen = gl.observe(task, batch, training, pruned)
    assert replay_error(task, seen, batch, training, defence=pruned).relative < 1e-12
    assert replay_error(task, seen, batch, training).relative > 0.1


def test_batches_that_do_not_fit_are_refused() -> None:
    task, batch = tiny(), private(3)
    seen = gl.observe(task, batch, LocalTraining(lr=0.1))
    with pytest.raises(TaskError, match="had 3 examples"):
        replay_error(task, seen, private(2), LocalTraining(lr=0.1))
    with pytest.raises(TaskError, match="lacks y"):
        replay_error(task, seen, {"x": batch["x"]}, LocalTraining(lr=0.1))


def shaken(strength: float) -> Callable[[Batch, Draws, int], Batch]:
    """An augmentation: noise on the pixels, anew at every step."""

    def augment(batch: Batch, draws: Draws, step: int) -> Batch:
        return {**batch, "x": batch["x"] + strength * draws.normal(tuple(batch["x"].shape), step=step).to(batch["x"])}

    return augment


def test_the_error_says_how_much_augmentation_hides() -> None:
    task, batch = task_of(network()), images()
    plain = LocalTraining(lr=0.02, steps=5)
    errors = []
    for strength in (0.0, 0.1, 0.5):
        seen = gl.observe(task, batch, replace(plain, augmentation=shaken(strength)))
        known = replace(plain, augmentation=shaken(strength))
        errors.append(replay_error(task, seen, batch, known).relative)  # its random numbers are not known
    assert errors[0] < 1e-5
    assert 0.01 < errors[1] < 0.5 * errors[2]
    assert errors[2] < 1


def test_the_error_says_how_much_dropout_hides() -> None:
    """The client trains with masks, in training mode; the attacker replays without, in evaluation mode."""
    batch, training = images(), LocalTraining(lr=0.02, steps=5)
    errors = []
    for share in (0.0, 0.2, 0.5):
        model = network(dropout=share)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            seen = gl.observe(task_of(model.train()), batch, training)
        if share:
            with pytest.raises(TaskError, match="Dropout is active"):
                replay_error(task_of(model), seen, batch, training)
        errors.append(replay_error(task_of(model.eval()), seen, batch, training).relative)
        assert linearity(task_of(model), seen).linear  # masks or not
    assert errors[0] < 1e-5
    assert 0.05 < errors[1] < errors[2] < 1.5


# --- sums of gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.003])
def test_a_sum_of_gradients_is_known_by_its_sums_over_the_classes(momentum: float, decay: float) -> None:
    """Momentum or not; and weight decay is read off to the digits that a float32 update has."""
    task, batch = task_of(network()), images()
    rule = SGD(momentum=momentum, weight_decay=decay)
    training = LocalTraining(lr=0.05, epochs=4, batch_size=5, optimiser=rule)
    found = linearity(task, gl.observe(task, batch, training))
    assert found.linear
    assert found.left < 1e-5
    if not decay:
        assert abs(found.shrunk) < 1e-7
        assert "no weight decay" in str(found)
        return
    steps = len(training.order(EXAMPLES))
    # What the rule does to a weight of 1 that has no gradient.
    one = {"": torch.ones((), dtype=torch.float64)}
    left, state = dict(one), rule.init(one)
    for _ in range(steps):
        decrease, state = rule.step(left, {"": torch.zeros((), dtype=torch.float64)}, state, 0.05)
        left = tree.subtract(left, decrease)
    assert found.shrunk == pytest.approx(1 - float(left[""]), rel=1e-3)
    if not momentum:
        assert found.decay / way_of(training, EXAMPLES) == pytest.approx(decay, rel=1e-3)


@pytest.mark.parametrize("rule", [Adam(), Adam(weight_decay=0.01, decoupled=True), Lion()], ids=str)
def test_other_rules_are_known_not_to_be_sums_of_gradients(rule: Rule) -> None:
    task = task_of(network())
    for settings in ({"steps": 1}, {"epochs": 5, "batch_size": 5}):
        found = linearity(task, gl.observe(task, images(), LocalTraining(lr=1e-3, optimiser=rule, **settings)))
        assert not found.linear
        assert found.left > 0.03
        assert math.isnan(found.decay)
        assert "no sum" in str(found)


def test_weights_on_the_wire_leave_fewer_digits_to_judge_by() -> None:
    task = task_of(network())
    seen = gl.observe(task, images(), LocalTraining(lr=1e-6), wire="weights")
    found = linearity(task, seen)
    assert found.left > 1e-3  # rounding of the weights, and no more than that
    assert found.linear


def test_noise_is_no_sum_of_gradients_either() -> None:
    task, training = task_of(network()), LocalTraining(lr=0.05, steps=3)
    seen = gl.observe(task, images(), training, gl.defences.LocalGaussian(sigma=1e-3))
    assert not linearity(task, seen).linear


def test_nothing_is_told_where_classes_may_move_together() -> None:
    squares = task_of(network(), lambda z, y: (z - F.one_hot(y, CLASSES)).square().mean())
    with pytest.raises(TaskError, match="cross-entropy"):
        linearity(squares, gl.observe(squares, images(), LocalTraining(lr=0.05)))
    task = task_of(network())
    seen = gl.observe(task, images(), LocalTraining(lr=0.05))
    name = task.classifier.weight
    with pytest.raises(TaskError, match="zero"):
        linearity(task, replace(seen, update={**seen.update, name: torch.zeros_like(seen.update[name])}))
    fixed = network()
    fixed[-1].weight.requires_grad_(False)
    with pytest.raises(TaskError, match="does not train"):
        linearity(task_of(fixed), gl.observe(task_of(fixed), images(), LocalTraining(lr=0.05)))


# --- the way ----------------------------------------------------------------------------------------------------------

CLIENTS = {
    "one step": (LocalTraining(lr=0.1), CLASSES),
    "batches": (LocalTraining(lr=0.02, epochs=5, batch_size=5), CLASSES),
    "long": (LocalTraining(lr=0.02, epochs=20, batch_size=5), CLASSES),
    "four classes": (LocalTraining(lr=0.01, epochs=5, batch_size=4), 4),
    "momentum": (LocalTraining(lr=0.005, epochs=5, batch_size=5, optimiser=SGD(momentum=0.9)), CLASSES),
    "schedule": (LocalTraining(lr=0.04, epochs=5, batch_size=5, schedule=cosine_decay), CLASSES),
}


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_way_of_a_client_shows_in_its_classifier(name: str, bias: bool) -> None:
    """Within 20 % with nothing but both models, the number of examples and the label counts; rows: within 35 %."""
    training, classes = CLIENTS[name]
    task = task_of(network(bias=bias))
    truth = way_of(training, EXAMPLES)
    for seed in range(3):
        batch = images(seed, classes)
        seen = gl.observe(task, batch, training, key=f"client {seed}")
        found = way(task, seen, counts_of(batch))
        assert found.by == ("bias" if bias else "rows")
        assert found.known
        assert found.estimate == pytest.approx(truth, rel=0.2 if bias else 0.35)
        assert found.low < found.estimate < found.high
        if bias:
            assert 0.5 * truth < found.low < 1.05 * truth
        assert f"{found.estimate:.3g}" in str(found)


def test_of_a_client_that_has_fitted_only_a_lower_bound_is_told() -> None:
    task, batch, training = task_of(network()), images(0, 3), LocalTraining(lr=0.2, epochs=40, batch_size=5)
    found = way(task, gl.observe(task, batch, training), counts_of(batch))
    assert not found.known
    assert found.high == math.inf
    assert 0 < found.low < way_of(training, EXAMPLES)
    assert "at least" in str(found)
    with pytest.raises(ValueError, match="No recipe follows"):
        recipes(found, EXAMPLES)


def test_images_of_the_attackers_own_can_stand_for_the_dummies() -> None:
    task, batch = task_of(network()), images()
    training = LocalTraining(lr=0.02, epochs=20, batch_size=5)
    seen = gl.observe(task, batch, training)
    own = way(task, seen, counts_of(batch), images=images(9)["x"])
    assert own.estimate == pytest.approx(way_of(training, EXAMPLES), rel=0.2)
    assert own.estimate != way(task, seen, counts_of(batch)).estimate


def test_counts_must_be_those_of_the_client() -> None:
    task, batch = task_of(network()), images()
    seen = gl.observe(task, batch, LocalTraining(lr=0.1))
    for wrong in (torch.ones(CLASSES), torch.full((3,), EXAMPLES / 3), counts_of(batch) - torch.eye(CLASSES)[0] * 50):
        with pytest.raises(ValueError, match="counts"):
            way(task, seen, wrong)


def test_a_walk_counts_the_steps_of_any_rule() -> None:
    """Full batches: nothing is unknown but the number of steps."""
    task, batch = task_of(network()), images()
    for rule in (SGD(momentum=0.9), SGD(weight_decay=0.01), Adam(), SGD()):
        training = LocalTraining(lr=0.005, steps=7, optimiser=rule)
        seen = gl.observe(task, batch, training)
        found = walk(task, seen, batch, replace(training, steps=12))
        assert found.steps == 7
        assert found.error < 1e-4
        assert found.relative[5] > 0.01
        assert found.cosine[6] == pytest.approx(1)
        torch.testing.assert_close(found.ways, 0.005 * torch.arange(1, 13).double())
    falling = replace(training, schedule=lambda step, total: max(0.0, 1 - step / 4))
    found = walk(task, gl.observe(task, batch, falling), batch, falling)
    assert found.error < 1e-5
    assert found.ways[-1] == pytest.approx(0.005 * 2.5)


@pytest.mark.parametrize("name", ["batches", "long", "four classes"])
def test_images_tell_the_way_and_so_do_bad_ones(name: str) -> None:
    """The truth within 5 %; with noise of half their own deviation within 20 %."""
    training, classes = CLIENTS[name]
    task, batch = task_of(network()), images(0, classes)
    seen, truth = gl.observe(task, batch, training), way_of(training, EXAMPLES)
    first = way(task, seen, counts_of(batch)).low
    noise = 0.5 * batch["x"].std() * Draws(key("noise")).normal(tuple(batch["x"].shape))
    for off, within in ((0.0, 0.05), (1.0, 0.2)):
        found = way_on(task, seen, {**batch, "x": batch["x"] + off * noise}, start=first)
        assert found.estimate == pytest.approx(truth, rel=within)
        assert found.low < found.estimate < found.high
        assert found.by == "images"
    strangers = {"x": Draws(key("other")).normal((EXAMPLES, 1, 8, 8)), "y": (batch["y"] + 1) % CLASSES}
    assert not way_on(task, seen, strangers, start=first).known
    with pytest.raises(ValueError, match="start"):
        way_on(task, seen, batch, start=0.0)
    with pytest.raises(ValueError, match="fine"):
        way_on(task, seen, batch, start=1.0, steps=5, fine=5)


@cache
def attacked() -> tuple[gl.Task, Observation, Batch, LocalTraining]:
    task, truth = task_of(network()), images()
    training = LocalTraining(lr=0.02, epochs=20, batch_size=5)
    seen = gl.observe(task, truth, training)
    attack = gl.attacks.get("sme", steps=150, lr=0.1, tv=1e-3)
    found = attack.run(task, seen, Knowledge(given={"y": truth["y"]}), engine=Engine(device="cpu"))
    return task, seen, found.target(0), training


def test_an_attack_without_the_recipe_finds_it_out() -> None:
    """SME needs no learning rate; on its images the way is told, and a recipe made of it explains the update."""
    task, seen, batch, training = attacked()
    found = way_on(task, seen, batch, start=way(task, seen, counts_of(batch)).low)
    assert found.estimate == pytest.approx(way_of(training, EXAMPLES), rel=0.25)
    coarse = LocalTraining(lr=found.estimate / 10, steps=10)
    error, wrong = (
        replay_error(task, seen, batch, replace(coarse, lr=factor * coarse.lr)).relative for factor in (1, 3)
    )
    assert error < 0.6
    assert wrong > 1.5 * error


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_the_way_of_a_recipe() -> None:
    assert way_of(LocalTraining(lr=0.1, epochs=2, batch_size=2), 5) == pytest.approx(0.6)
    assert way_of(LocalTraining(lr=0.1, steps=2, optimiser=SGD(momentum=0.5)), 5) == pytest.approx(0.25)
    assert way_of(LocalTraining(lr=0.1, steps=2, optimiser=SGD(weight_decay=9.0)), 5) == pytest.approx(0.2)
    falling = LocalTraining(lr=0.1, steps=4, schedule=cosine_decay)
    assert way_of(falling, 5) == pytest.approx(0.1 * sum(cosine_decay(step, 4) for step in range(4)))
    with pytest.raises(ValueError, match="Adam"):
        way_of(LocalTraining(lr=0.1, optimiser=Adam()), 5)


def test_recipes_follow_from_a_way_and_from_what_is_known() -> None:
    found = Way(0.4, 0.37, 0.43, "bias")
    known = recipes(found, 50, lr=0.004)
    assert {(each.epochs, each.batch_size) for each in known} >= {(20, 10), (100, 50), (2, 1)}
    assert all(0.37 <= way_of(each, 50) <= 0.43 for each in known)
    away = [abs(way_of(each, 50) - 0.4) for each in known]
    assert away == pytest.approx(sorted(away))
    [one] = recipes(found, 50, epochs=20, batch_size=10)
    assert one.lr == pytest.approx(0.004)
    [heavy] = recipes(found, 50, epochs=20, batch_size=10, optimiser=SGD(momentum=0.9))
    assert 0.0004 < heavy.lr < 0.00045
    assert way_of(heavy, 50) == pytest.approx(0.4)
    nothing = recipes(found, 50)
    assert all(way_of(each, 50) == pytest.approx(0.4) for each in nothing)
    assert len({each.lr for each in nothing}) > 10
    assert recipes(found, 50, lr=1.0) == []  # one step alone would be too far
    assert [each.batch_size for each in recipes(found, 50, lr=0.004, epochs=20)] == [10]


def test_recipes_of_one_way_can_hardly_be_told_apart() -> None:
    """On the client's own images: other batches of the same way explain the update nearly as well as its own do."""
    task, batch = task_of(network()), images()
    training = LocalTraining(lr=0.02, epochs=5, batch_size=5)
    seen = gl.observe(task, batch, training)
    same = [LocalTraining(lr=0.4 / steps, steps=steps) for steps in (5, 20)]
    other = [replace(same[0], lr=factor * same[0].lr) for factor in (0.5, 2)]
    order = ranked(task, seen, batch, [*other, *same, training])
    errors = {id(each): error.relative for each, error in order}
    assert [id(each) for each, _ in order[-2:]] == [id(each) for each in sorted(other, key=lambda o: errors[id(o)])]
    assert max(errors[id(each)] for each in (*same, training)) < 0.1
    assert min(errors[id(each)] for each in other) > 0.3
