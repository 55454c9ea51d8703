"""SecLion: signs of sums, and what the random numbers in their denominators do not hide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import largest_difference, moment, private, scene_of, tiny
from gradleak.attacks.sign_matching.cohorts import Sums
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.tree import Tree
from gradleak.defences.secadam import FIRST, SECOND, means
from gradleak.parts.matches import SquaredError
from gradleak.parts.predictions import Replay
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Upload
from gradleak.scenario.rules import Lion

TRAINING = LocalTraining(lr=1.0)


def uploads_of(count: int, defence: gl.Defence, memory: Tree | None = None) -> list[Upload]:
    task = tiny()
    states = [ClientState(key=draws.key("client", seed), memory=memory or {}) for seed in range(count)]
    return [
        TRAINING.run(task, task.weights(), private(2, seed=seed), defence, state)[0]
        for seed, state in enumerate(states)
    ]


def test_a_server_of_one_client_walks_as_lion_does() -> None:
    task, defence = tiny(), gl.defences.SecLion(rate=0.01, weight_decay=0.1)
    rule, walked, expected = Lion(weight_decay=0.1), task.weights(), task.weights()
    memory: Tree = {}
    state = rule.init(expected)
    for number in range(4):
        batch = private(2, seed=number)
        client = ClientState(memory=memory, key=draws.key("client", number))
        sent, after = TRAINING.run(task, walked, batch, defence, client)
        memory = after.memory
        walked = tree.subtract(walked, defence.aggregate([sent], [2], {"weights": walked}))
        decrease, state = rule.step(expected, task.gradient(expected, batch), state, 0.01)
        expected = tree.subtract(expected, decrease)
    assert largest_difference(walked, expected) < 1e-12


def test_denominators_are_positive_random_and_each_clients_own() -> None:
    defence = gl.defences.SecLion(low=0.2, high=0.9)
    one, other = uploads_of(2, defence)
    values = tree.flatten(one.payload[SECOND])
    assert 0.2 <= float(values.min()) < 0.3
    assert 0.8 < float(values.max()) <= 0.9
    assert largest_difference(one.payload[SECOND], other.payload[SECOND]) > 0.1
    with pytest.raises(ValueError, match="SecLion draws random numbers"):
        TRAINING.run(tiny(), tiny().weights(), private(2), defence)


def test_signs_do_not_depend_on_the_denominators() -> None:
    sent = uploads_of(3, gl.defences.SecLion(rate=1.0))
    others = uploads_of(3, gl.defences.SecLion(rate=1.0, low=0.01, high=50.0))
    first, _ = means(sent, [2] * 3)
    for uploads in (sent, others):
        assert (
            largest_difference(gl.defences.SecLion(rate=1.0).reveal(uploads, [2] * 3), tree.map(torch.sign, first)) == 0
        )


def test_decay_is_outside_the_sign_and_the_printed_form_has_it_inside() -> None:
    weights = tiny().weights()
    sent = uploads_of(3, gl.defences.SecLion())
    first, second = means(sent, [2] * 3)
    settings: dict[str, Any] = {"rate": 1.0, "weight_decay": 0.3}
    outside = gl.defences.SecLion(**settings).aggregate(sent, [2] * 3, {"weights": weights})
    assert largest_difference(outside, tree.map(lambda c, w: c.sign() + 0.3 * w, first, weights)) < 1e-12
    inside = gl.defences.SecLion(**settings, form="printed").aggregate(sent, [2] * 3, {"weights": weights})
    expected = tree.map(lambda c, e, w: (c / e + 0.3 * w).sign(), first, second, weights)
    assert largest_difference(inside, expected) == 0
    assert largest_difference(tree.map(torch.sign, inside), tree.map(torch.sign, first)) > 0  # decay flips signs there
    with pytest.raises(ValueError, match="decays the weights that it sent"):
        gl.defences.SecLion(**settings).aggregate(sent, [2] * 3, {})


def test_sizes_are_seen_the_better_the_more_clients_there_are() -> None:
    """c / e with e the mean of n uniform numbers: the server's error of |c| falls as 1 / sqrt(n)."""
    defence = gl.defences.SecLion(rate=1.0, sees="ratio")
    errors = {}
    for count in (1, 4, 64):
        sent = uploads_of(4, defence)[:1] * count if count == 1 else uploads_of(count, defence)
        first, _ = means(sent, [2] * count)
        seen = tree.flatten(defence.reveal(sent, [2] * count))
        errors[count] = float((tree.flatten(first) / seen - 1).std())  # the mean of (0.5, 1.5) is 1
    assert errors[1] == pytest.approx(12**-0.5, rel=0.3)
    assert errors[64] == pytest.approx(12**-0.5 / 8, rel=0.3)
    assert errors[64] < errors[4] < errors[1]


def test_the_variance_of_a_ratio_is_that_of_its_denominator() -> None:
    """e is uniform in [low, high]: its relative variance is (high - low)^2 / 12 over the square of their mean."""
    task, defence = tiny(), gl.defences.SecLion(sees="ratio", low=0.5, high=1.5)
    scene = scene_of(task, gl.observe(task, private(1), gl.LocalTraining(lr=1.0), defence))
    for name, variance in defence.noise_variance(scene).items():
        # No absolute tolerance: squares of updates are far below the default one.
        torch.testing.assert_close(variance, scene.update[name].square() / 12, rtol=1e-12, atol=0)


def test_the_attacker_of_signs_is_exact_and_that_of_ratios_weighs_what_it_cannot_know() -> None:
    task, batch = tiny(), private(2)
    for sees, exact in (("signs", True), ("ratio", False)):
        defence = gl.defences.SecLion(sees=sees)
        seen = gl.observe(task, batch, TRAINING, defence, key="client")
        scene = scene_of(task, seen, gl.Knowledge(training=TRAINING, defence=defence))
        gap = float(SquaredError().distance(Replay()(batch, {}, scene, moment()), Replay().target(scene)))
        assert (gap == 0) is exact
        variance = defence.noise_variance(scene)
        assert (float(tree.squared_norm(variance)) == 0) is exact
    soft = Sums(width=1.0)(batch, {}, scene, moment())  # a ratio has a slope of its own
    assert largest_difference(soft, Replay()(batch, {}, scene, moment())) == 0


def test_a_soft_sign_of_lion_is_that_of_secadam_in_the_first_round() -> None:
    task, batch = tiny(), private(2)
    found = []
    for defence in (gl.defences.SecLion(rate=1.0), gl.defences.SecAdam(rate=1.0)):
        seen = gl.observe(task, batch, TRAINING, defence, key="client")
        scene = scene_of(task, seen, gl.Knowledge(training=TRAINING, defence=defence))
        found.append(Sums(width=0.3)(batch, {}, scene, moment()))
    assert largest_difference(*found) < 1e-8


def test_it_claims_no_guarantee_and_refuses_what_cannot_be() -> None:
    told = str(gl.defences.SecLion().guarantee(gl.Exposure(training=TRAINING)))
    assert told.startswith("no formal guarantee (secure aggregation hides single clients")
    for settings, message in (
        ({"low": 0.0}, "low must be above 0"),
        ({"low": 2.0}, "high must be at least low"),
        ({"form": "inside"}, "form must be 'decoupled' or 'printed'"),
        ({"sees": "all"}, "sees must be 'signs' or 'ratio'"),
        ({"beta2": 1.0}, "beta2 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            gl.defences.SecLion(**settings)


def test_first_moments_follow_lions_two_decays() -> None:
    defence = gl.defences.SecLion(beta1=0.5, beta2=0.8)
    task, batch = tiny(), private(2)
    g = task.gradient(task.weights(), batch)
    held: Tree = {}
    for expected in (0.5, 0.5 * 0.2 + 0.5):
        client = ClientState(memory=held, key=draws.key("client"))
        sent, after = TRAINING.run(task, task.weights(), batch, defence, client)
        assert largest_difference(sent.payload[FIRST], tree.scale(g, expected)) < 1e-12
        held = after.memory
    assert largest_difference(held[FIRST], tree.scale(g, 0.2 * 0.8 + 0.2)) < 1e-12


def test_clients_of_unequal_size_fit_into_the_ring() -> None:
    """A share above 1 lifts a client's denominators above `high`, and they must not be refused for that."""
    pytest.importorskip("cryptography", reason="needs the extra secure")
    sent = uploads_of(3, gl.defences.SecLion())
    plain, ring = (gl.defences.SecLion(masks=masks).aggregate(sent, [1, 2, 9], {}) for masks in ("cancelled", "ring"))
    assert largest_difference(plain, ring) == 0
