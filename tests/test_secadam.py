"""SecAdam, its noised forms, what they let a server see, and the attacks that follow them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import largest_difference, moment, private, scene_of, tiny
from gradleak.attacks.sign_matching.cohorts import SignHinge, Soft, Sums
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.defences.secadam import FIRST, SECOND, means, sole_update
from gradleak.parts.fields import RuleDoesNotApply
from gradleak.parts.matches import SquaredError
from gradleak.parts.predictions import Replay
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Upload
from gradleak.scenario.observation import Track
from gradleak.scenario.rules import SGD, Adam

TRAINING = LocalTraining(lr=1.0)
PLAIN = gl.defences.SecAdam(rate=1.0)


def gradient(seed: int = 0, examples: int = 2) -> Params:
    return gl.observe(tiny(), private(examples, seed=seed), TRAINING).update


def uploads_of(count: int, defence: gl.Defence = PLAIN) -> list[Upload]:
    task = tiny()
    return [TRAINING.run(task, task.weights(), private(2, seed=seed), defence)[0] for seed in range(count)]


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_the_first_round_of_one_client_shows_the_sign_of_its_gradient() -> None:
    seen = gl.observe(tiny(), private(2), TRAINING, PLAIN).update
    exact = gradient()
    assert largest_difference(seen, tree.map(lambda g: g / (g.square() + 1e-16).sqrt(), exact)) < 1e-12
    smallest = min(float(g.abs().min()) for g in exact.values())
    assert largest_difference(seen, tree.map(torch.sign, exact)) < max(1e-9, (1e-8 / smallest) ** 2)
    other = gl.observe(tiny(), private(2), replace(TRAINING, lr=0.01), PLAIN).update
    assert largest_difference(seen, other) < 0.01  # whatever its size, but for what comes near eps


def test_several_rounds_of_one_client_are_adam() -> None:
    """With lr 1 and a rate of its own, the server walks as torch.optim.Adam does (its eps is beside the root)."""
    task, defence = tiny(), gl.defences.SecAdam(rate=0.01, eps=1e-12)
    walked = task.weights()
    memory: Tree = {}
    weights = {name: value.clone().requires_grad_() for name, value in task.weights().items()}
    reference = torch.optim.Adam(list(weights.values()), lr=0.01, eps=1e-12)
    for number in range(4):
        batch = private(2, seed=number)
        sent, after = TRAINING.run(task, walked, batch, defence, ClientState(memory=memory))
        memory = after.memory
        walked = tree.subtract(walked, defence.reveal([sent], [2]))
        for name, value in task.gradient(tree.detach(weights), batch).items():
            weights[name].grad = value
        reference.step()
    assert float(memory["count"]) == 4
    assert largest_difference(walked, tree.detach(weights)) < 1e-8


def test_a_training_with_secadam_is_adam_on_averaged_moments() -> None:
    """The oracle of the released code: mean of m over clients by the root of the mean of v + eps^2, state kept."""
    task = tiny()
    data = {"x": private(6)["x"], "y": private(6)["y"]}
    federation = gl.Federation(clients=3, training=TRAINING, examples=2, weighting="uniform", split="in_order")
    defence = gl.defences.SecAdam(rate=0.05)
    stored = gl.audit.private.Stored(data)
    after = federation.weights_at(task, stored, [3], defence)[3]
    weights = task.weights()
    held: list[tuple[Params, Params]] = [(tree.zeros_like(weights), tree.zeros_like(weights))] * 3
    shares = federation.partition(stored)
    for number in range(3):
        firsts, seconds = [], []
        for client in range(3):
            g = task.gradient(weights, stored.batch(shares[client]))
            m, v = held[client]
            m = tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
            v = tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
            held[client] = (m, v)
            firsts.append(tree.scale(m, 1 / (1 - 0.9 ** (number + 1)) / 3))
            left = 1 - 0.999 ** (number + 1)
            seconds.append(tree.map(lambda a, left=left: (a / left + 1e-16) / 3, v))
        first, second = (tree.add(tree.add(each[0], each[1]), each[2]) for each in (firsts, seconds))
        weights = tree.map(lambda w, m, v: w - 0.05 * m / v.sqrt(), weights, first, second)
    assert largest_difference(after.weights, weights) < 1e-9
    assert len(after.memories) == 3


def test_moments_of_the_clients_own_adam_can_be_sent() -> None:
    task, batch = tiny(), private(2)
    own = gl.defences.SecAdam(rate=1.0, moments="rule")
    one = LocalTraining(lr=0.1, optimiser=Adam())
    assert (
        largest_difference(gl.observe(task, batch, one, own).update, gl.observe(task, batch, TRAINING, PLAIN).update)
        < 1e-6
    )
    several = replace(one, steps=3)
    sent, after = several.run(task, task.weights(), batch, own)
    assert after.memory == {}
    assert after.optimiser is not None
    assert largest_difference(sent.payload[FIRST], tree.scale(after.optimiser["first"], 1 / (1 - 0.9**3))) < 1e-12
    with pytest.raises(ValueError, match=r"keeps none.*LocalTraining\(optimiser=Adam\(\)\)"):
        TRAINING.run(task, task.weights(), batch, own)


def test_sums_are_weighted_as_the_federation_weighs() -> None:
    sent = uploads_of(2)
    first, second = means(sent, [1, 3])
    name = next(iter(first))
    expected = 0.25 * sent[0].payload[FIRST][name] + 0.75 * sent[1].payload[FIRST][name]
    assert torch.allclose(first[name], expected)
    assert largest_difference(PLAIN.reveal(sent, [1, 3]), tree.map(lambda m, v: m / v.sqrt(), first, second)) < 1e-14


def test_the_ratio_of_n_clients_measures_agreement() -> None:
    alike = uploads_of(1) * 5
    assert largest_difference(PLAIN.reveal(alike, [2] * 5), PLAIN.reveal(alike[:1], [2])) < 1e-12
    apart = PLAIN.reveal(uploads_of(8), [2] * 8)
    largest = max(float(value.abs().max()) for value in apart.values())
    assert largest <= 1 + 1e-9
    assert float(tree.squared_norm(apart)) < 0.99 * tree.size(apart)


def test_buffers_stay_at_home_and_other_trees_are_refused() -> None:
    task = tiny(norm="eval")
    sent, _ = TRAINING.run(task, task.weights(), private(2), PLAIN)
    assert sent.buffers is None
    assert sent.payload.keys() == {FIRST, SECOND}
    two = Upload({"update": task.weights(), "mask": {}}, 2)
    with pytest.raises(ValueError, match="SecAdam makes moments of one update; the upload holds mask, update"):
        sole_update(two, "SecAdam")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "rate must be above 0"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"beta1": 1.0}, "beta1 must be at least 0 and below 1"),
        ({"moments": "both"}, "moments must be 'update' or 'rule'"),
        ({"masks": "real"}, "masks must be 'cancelled' or 'ring'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gl.defences.SecAdam(**settings)


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [gl.defences.DPFedAvgLewis, gl.defences.DPSecAdam])
def test_the_published_noise_is_added_to_a_clipped_mean_gradient(kind: Any) -> None:
    caught: list[Params] = []

    class Caught(SGD):
        def step(self, weights: Any, gradient: Params, state: Any, lr: Any) -> Any:
            caught.append(gradient)
            return super().step(weights, gradient, state, lr)

    task, batch = tiny(), private(2)
    training, bound = LocalTraining(lr=1.0, optimiser=Caught()), 0.5 * float(tree.norm(gradient()))
    for noise in (0.0, 0.02):
        state = ClientState(key=draws.key("client"))
        training.run(task, task.weights(), batch, kind(clip=bound, noise=noise), state)
    clipped, noisy = caught
    assert float(tree.norm(clipped)) == pytest.approx(bound)
    spread = tree.flatten(tree.subtract(noisy, clipped)).std()
    assert 0.015 < float(spread) < 0.025  # an absolute deviation: not times the clip


@pytest.mark.parametrize("name", ["dp-fedavg-lewis", "dp-secadam"])
def test_the_published_forms_claim_nothing(name: str) -> None:
    exposure = gl.Federation(clients=10, training=TRAINING).exposure(3, 40)
    told = str(gl.registry.get("defence", name).guarantee(exposure))
    assert told.startswith("no formal guarantee (as published, noise/clip=0.0001:")
    assert "seed" not in told
    assert "one public seed" in str(gl.registry.get("defence", name, fixed_noise=True).guarantee(exposure))
    plain = str(gl.defences.SecAdam().guarantee(exposure))
    assert plain == (
        "no formal guarantee (secure aggregation hides single clients from the server, and the ratio of their sums is "
        "released exactly)"
    )


@pytest.mark.parametrize("kind", [gl.defences.DPFedAvgLewis, gl.defences.DPSecAdam])
def test_noise_of_a_public_seed_is_replayed_by_whoever_knows_it(kind: Any) -> None:
    task, batch = tiny(), private(2)
    for fixed, zero in ((True, True), (False, False)):
        defence = kind(noise=0.05, fixed_noise=fixed)
        seen = gl.observe(task, batch, TRAINING, defence, key="client")
        scene = scene_of(task, seen, gl.Knowledge(training=TRAINING, defence=defence))
        gap = float(SquaredError().distance(Replay()(batch, {}, scene, moment()), Replay().target(scene)))
        assert (gap < 1e-20) is zero


def test_whoever_draws_from_the_public_seed_takes_the_noise_off() -> None:
    task, batch, public = tiny(), private(2), Draws(draws.key("dp-lewis", 0))
    quiet, noisy = (gl.defences.DPFedAvgLewis(noise=0.05 * on, fixed_noise=True) for on in (0, 1))
    noise = {
        name: 0.05 * public.normal(tuple(value.shape), stream=stream, dtype=value.dtype)
        for stream, (name, value) in enumerate(gradient().items())
    }
    for client in ("one", "another"):
        plain, seen = (gl.observe(task, batch, TRAINING, defence, key=client).update for defence in (quiet, noisy))
        assert largest_difference(tree.subtract(seen, plain), tree.scale(noise, TRAINING.lr)) < 1e-14


def test_the_form_with_a_guarantee_noises_before_anything_is_made_of_the_update() -> None:
    task, batch = tiny(), private(2)
    defence = gl.defences.LocalDPSecAdam(clip=0.1, noise_multiplier=2.0)
    key = draws.key("client")
    sent, after = TRAINING.run(task, task.weights(), batch, defence, ClientState(key=key))
    noise = {
        name: 0.2 * Draws(key).normal(tuple(value.shape), stream=stream, dtype=value.dtype)
        for stream, (name, value) in enumerate(gradient().items())
    }
    private_update = tree.add(tree.scale(gradient(), 0.1 / tree.norm(gradient())), noise)
    assert largest_difference(sent.payload[FIRST], private_update) < 1e-12
    assert largest_difference(after.memory[FIRST], tree.scale(private_update, 0.1)) < 1e-12  # what was noised, once
    other, _ = TRAINING.run(task, task.weights(), batch, defence, ClientState(key=draws.key("another client")))
    assert largest_difference(sent.payload[FIRST], other.payload[FIRST]) > 0.1  # independent


def test_the_guarantee_is_that_of_local_noise() -> None:
    exposure = gl.Federation(clients=10, training=TRAINING).exposure(5, 40)
    ours = gl.defences.LocalDPSecAdam(clip=1.0, noise_multiplier=4.0).guarantee(exposure)
    theirs = gl.defences.LocalGaussian(clip=1.0, noise_multiplier=4.0).guarantee(exposure)
    assert ours.epsilon is not None
    assert ours == theirs
    assert ours.releases == 5
    silent = gl.defences.LocalDPSecAdam(noise_multiplier=0.0).guarantee(exposure)
    assert str(silent) == "no formal guarantee (no noise is added)"
    with pytest.raises(ValueError, match="moments='update' only"):
        gl.defences.LocalDPSecAdam(moments="rule")


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sign", "auto", "bias-minimum"])
def test_the_label_of_one_example_is_read_off_signs(name: str) -> None:
    rule = gl.registry.get("labels", name)
    for seed in range(40):
        task, batch = tiny(seed=seed % 5), private(1, seed=seed)
        for defence in (PLAIN, gl.defences.SecLion()):
            seen = gl.observe(task, batch, TRAINING, defence, key=f"{seed}")
            counts = rule.counts(scene_of(task, seen, gl.Knowledge(training=TRAINING, defence=defence)))
            assert counts.argmax() == batch["y"][0]


def test_the_sign_rule_names_present_classes_and_does_without_a_bias() -> None:
    rule = gl.registry.get("labels", "sign")
    task, batch = tiny(), {"x": private(4)["x"], "y": torch.tensor([0, 0, 2, 2])}
    counts = rule.counts(scene_of(task, gl.observe(task, batch, TRAINING, PLAIN)))
    assert counts.tolist() == [2, 0, 2]
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 3, bias=False)
    ).double()
    bare = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(batch["x"][:1], batch["y"][:1]))
    one = {"x": batch["x"][:1], "y": batch["y"][2:3]}
    assert rule.counts(scene_of(bare, gl.observe(bare, one, TRAINING, PLAIN))).tolist() == [0, 0, 1]
    with pytest.raises(RuleDoesNotApply, match="reads the bias"):
        gl.registry.get("labels", "ratio-counts").counts(scene_of(bare, gl.observe(bare, one, TRAINING, PLAIN)))


class Negative(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.sigmoid(x)


def classified(activation: torch.nn.Module, *, bias: bool, classes: int = 4) -> gl.Task:
    linear = torch.nn.utils.skip_init
    model = torch.nn.Sequential(
        torch.nn.Flatten(), linear(torch.nn.Linear, 16, 8), activation, linear(torch.nn.Linear, 8, classes, bias=bias)
    ).double()
    generator = torch.Generator().manual_seed(0)
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.3, generator=generator)
    batch = private(1)
    return gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(batch["x"], batch["y"]))


def test_of_two_classes_without_a_bias_the_signs_of_positive_features_tell() -> None:
    """Two rows disagree with each other alike: there the sign of a row itself has to be read."""
    task, rule = classified(torch.nn.Sigmoid(), bias=False, classes=2), gl.registry.get("labels", "sign")
    for label in (0, 1):
        batch = {"x": private(1)["x"], "y": torch.tensor([label])}
        assert rule.counts(scene_of(task, gl.observe(task, batch, TRAINING, PLAIN))).argmax() == label


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [torch.nn.Tanh(), Negative(), torch.nn.Sigmoid()])
def test_the_label_of_one_example_does_not_hang_on_the_signs_of_features(
    activation: torch.nn.Module, bias: bool
) -> None:
    task, rule = classified(activation, bias=bias), gl.registry.get("labels", "sign")
    for seed in range(12):
        batch = {"x": private(1, seed=seed)["x"], "y": torch.tensor([seed % 4])}
        assert rule.counts(scene_of(task, gl.observe(task, batch, TRAINING, PLAIN))).argmax() == seed % 4


def test_every_class_with_a_negative_bias_is_named_whatever_its_row() -> None:
    task, rule = classified(Negative(), bias=True), gl.registry.get("labels", "sign")
    batch = {"x": private(4)["x"], "y": torch.tensor([0, 0, 2, 2])}
    assert rule.counts(scene_of(task, gl.observe(task, batch, TRAINING, PLAIN))).tolist() == [2, 0, 2, 0]


def test_label_counts_survive_a_class_that_the_network_rules_out() -> None:
    pytest.importorskip("cryptography", reason="needs the extra secure")
    from gradleak.secure import reveal

    task = classified(torch.nn.Sigmoid(), bias=True)
    with torch.no_grad():
        task.model[3].bias[0] = -2000.0  # its probability is 0, and so is every gradient of its bias
    batches = [{"x": private(1, seed=seed)["x"], "y": torch.tensor([1 + seed % 2])} for seed in range(4)]
    seen = reveal.observed(task, batches, TRAINING, PLAIN)
    counts = gl.registry.get("labels", "ratio-counts").counts(scene_of(task, seen, gl.Knowledge(defence=PLAIN)))
    assert counts.tolist() == [0, 2, 2, 0]


# --- attackers --------------------------------------------------------------------------------------------------------


def test_a_width_gives_the_ratio_a_slope_and_none_leaves_it() -> None:
    task, batch = tiny(), private(2)
    knows = gl.Knowledge(training=TRAINING, defence=PLAIN)
    scene = scene_of(task, gl.observe(task, batch, TRAINING, PLAIN), knows)

    def slope(predict: Replay) -> float:
        x = private(2, seed=3)["x"].requires_grad_()
        distance = SquaredError().distance(
            predict({"x": x, "y": batch["y"]}, {}, scene, moment()), predict.target(scene)
        )
        [found] = torch.autograd.grad(distance, x)
        return float(found.norm())

    assert slope(Sums(width=1.0)) > 1e3 * slope(Replay())
    exact = Sums()(batch, {}, scene, moment())
    assert largest_difference(exact, Replay()(batch, {}, scene, moment())) == 0
    assert isinstance(PLAIN, Soft)
    soft = Sums(width=0.5)(batch, {}, scene, moment())
    expected = tree.map(lambda g: g / (g.square() + 0.25 * g.square().mean()).sqrt(), gradient())
    assert largest_difference(soft, expected) < 1e-6


def test_a_chain_with_secadam_keeps_its_slope() -> None:
    chain = gl.Chain(gl.defences.Clipping(0.01), PLAIN)
    task, batch = tiny(), private(2)
    scene = scene_of(task, gl.observe(task, batch, TRAINING, chain), gl.Knowledge(training=TRAINING, defence=chain))
    predicted = Sums(width=1.0)(batch, {}, scene, moment())
    assert 0.1 < max(float(value.abs().max()) for value in predicted.values()) < 0.999


def test_state_is_tracked_over_rounds() -> None:
    """A client that trains on the same images: each round's ratio depends on all before it, and so does the replay."""
    task, batch = tiny(), private(2)
    memory: Tree = {}
    weights, seen = task.weights(), []
    for number in range(3):
        sent, after = TRAINING.run(task, weights, batch, PLAIN, ClientState(memory=memory))
        update = PLAIN.reveal([sent], [2])
        seen.append(gl.Observation(weights, update, 2, round=number))
        memory, weights = after.memory, tree.subtract(weights, tree.scale(update, 0.3))
    scene = replace(
        gl.TargetView.of(task, Track(tuple(seen)), gl.Knowledge(training=TRAINING, defence=PLAIN)),
        fields={"y": batch["y"]},
    )

    def gap(predict: Replay) -> float:
        return float(SquaredError().distance(predict(batch, {}, scene, moment()), predict.target(scene)))

    assert gap(Sums(tracked=True)) < 1e-20
    assert gap(Sums()) > 1e-3  # every round as if it were the first


def test_the_hinge_is_zero_where_all_signs_agree_and_counts_only_wrong_ones() -> None:
    match = SignHinge()
    seen = match.prepare({"a": torch.tensor([0.3, -0.1, 0.0])})
    assert float(match.distance({"a": torch.tensor([5.0, -1e-3, 0.0])}, seen)) == 0
    wrong = {"a": torch.tensor([3.0, 4.0, 0.0])}
    assert float(match.distance(wrong, seen)) == pytest.approx(16 / (25 / 3) / 3)
    assert float(match.distance(tree.scale(wrong, 7.0), seen)) == pytest.approx(16 / (25 / 3) / 3)
    moved = {"a": torch.tensor([3.0, -4.0, 5.0])}
    assert float(match.distance(moved, seen)) == pytest.approx(25 / (50 / 3) / 3)


def test_signs_alone_are_enough_to_find_tiny_images_roughly(double: gl.Engine) -> None:
    """A2 through the client's optimiser, against the level of images that have nothing to do with the client."""
    task, batch = tiny(), private(1)
    seen = gl.observe(task, batch, TRAINING, PLAIN)
    attack = gl.attacks.get("sign-matching", steps=300, restarts=4)
    found = attack.run(task, seen, gl.Knowledge(training=TRAINING, defence=PLAIN), engine=double)
    assert found.batch["y"].tolist() == [batch["y"].tolist()]
    error = float((found.batch["x"][0] - batch["x"]).square().mean())
    chance = float((private(1, seed=9)["x"] - batch["x"]).square().mean())
    assert error < 0.7 * chance


@pytest.mark.parametrize("match", ["soft", "both"])
def test_soft_signs_are_followed_downhill(match: str, double: gl.Engine) -> None:
    task, batch = tiny(), private(1)
    seen, knows = gl.observe(task, batch, TRAINING, PLAIN), gl.Knowledge(training=TRAINING, defence=PLAIN)
    ends = [
        float(gl.attacks.get("sign-matching", steps=steps, match=match).run(task, seen, knows, engine=double).match[0])
        for steps in (4, 200)
    ]
    assert ends[1] < 0.7 * ends[0]


def test_a_naive_attacker_can_use_the_hinge_and_gets_the_same_signs(double: gl.Engine) -> None:
    task, batch = tiny(), private(1)
    seen = gl.observe(task, batch, TRAINING, PLAIN)
    attack = gl.attacks.get("sign-matching", steps=100)
    naive, informed = (
        attack.run(task, seen, gl.Knowledge(training=TRAINING, defence=defence), engine=double).batch["x"]
        for defence in (None, PLAIN)
    )
    assert largest_difference(naive, informed) < 1e-9  # in the first round of one client there is no more to know


def test_second_order_finds_all_images_in_the_ratio_of_three_clients(double: gl.Engine) -> None:
    """A ratio over several clients has sizes: 91 of them determine 48 pixels to the last digit."""
    pytest.importorskip("cryptography", reason="needs the extra secure")
    from gradleak.secure import reveal

    task, batches = tiny(), [private(1, seed=seed) for seed in range(3)]
    seen = reveal.observed(task, batches, TRAINING, PLAIN)
    given = {"y": torch.cat([batch["y"] for batch in batches])}
    knows = gl.Knowledge(given=given, training=TRAINING, defence=PLAIN)
    found = gl.attacks.get("ratio-second-order", clients=3, steps=25).run(task, seen, knows, engine=double)
    truth = torch.cat([batch["x"] for batch in batches])
    assert largest_difference(found.batch["x"][0], truth) < 1e-9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"match": "hing"}, "match 'hing'.*mean 'hinge'"),
        ({"match": "soft", "widths": ()}, "widths must be at least one"),
        ({"clients": 0}, "clients must be at least 1"),
    ],
)
def test_attack_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gl.attacks.get("sign-matching", **settings)
