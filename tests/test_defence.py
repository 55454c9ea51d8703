"""Hooks around the client: their order in a chain, their memory, what the server can see, what an attacker assumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import gradleak as gl
from conftest import largest_difference, moment, private, scene_of, tiny
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.tree import Params, Tree
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.predictions import Replay
from gradleak.parts.protocols import Match
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Client, Compute, Defence, Guarantee, overrides
from gradleak.scenario.rules import Adam
from gradleak.scenario.task import Batch, Task

# --- toy defences -----------------------------------------------------------------------------------------------------


class Halve(gl.Defence):
    """The example of the design page."""

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        return upload.map(lambda update: gl.tree.scale(update, 0.5))


@dataclass(frozen=True)
class Times(Defence):
    factor: float = 2.0

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return tree.scale(compute(weights, batch), self.factor)

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        return upload.map(lambda update: tree.scale(update, self.factor))


@dataclass(frozen=True)
class Plus(Defence):
    amount: float = 1.0

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return tree.map(lambda g: g + self.amount, compute(weights, batch))

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        return upload.map(lambda update: tree.map(lambda u: u + self.amount, update))


@dataclass(frozen=True)
class Sharpness(Defence):
    """The gradient at weights + rho * gradient / ||gradient||."""

    rho: float = 0.1

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        ascent = compute(weights, batch)
        return compute(tree.add(weights, ascent, self.rho / tree.norm(ascent)), batch)


@dataclass(frozen=True)
class Clip(Defence):
    bound: float = 0.1

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        return upload.map(lambda u: tree.scale(u, torch.clamp(self.bound / tree.norm(u), max=1.0)))


@dataclass(frozen=True, eq=False)
class Largest(Defence):
    """Sends only entries above the median of their tensor, and keeps the rest for the next round."""

    mask: Params | None = None

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        kept = client.memory.get("kept")
        update = upload.payload["update"]
        whole = update if kept is None else tree.add(update, kept)
        mask = self.mask or tree.map(lambda u: (u.abs() >= u.abs().median()).to(u.dtype), whole)
        return replace(upload, payload={"update": tree.multiply(whole, mask)})

    def remember(self, before: gl.Upload, after: gl.Upload, client: Client) -> Tree:
        return {"kept": tree.subtract(before.payload["update"], after.payload["update"])}

    def assumed(self, seen: TargetView, task: Task) -> Defence:
        return Largest(tree.map(lambda u: (u != 0).to(u.dtype), seen.update))

    def noise_variance(self, scene: TargetView) -> Params:
        return tree.map(lambda u: torch.where(u != 0, 0.0, torch.inf).to(u.dtype), scene.update)


class Halves(Defence):
    """Uploads two trees that mean nothing alone, and says how the server puts them together."""

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        update = upload.payload["update"]
        return replace(upload, payload={"sum": tree.scale(update, 3.0), "rest": tree.scale(update, 2.0)})

    def reveal(self, uploads: Sequence[gl.Upload], sizes: Sequence[int]) -> Params:
        merged = [replace(u, payload={"update": tree.subtract(u.payload["sum"], u.payload["rest"])}) for u in uploads]
        return Defence().reveal(merged, sizes)


@dataclass(frozen=True)
class Noise(Defence):
    std: float = 0.1

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        if not self.std:
            return upload
        source = client.draws
        assert source is not None
        noisy = {
            name: value + self.std * source.normal(tuple(value.shape), stream=stream, dtype=value.dtype)
            for stream, (name, value) in enumerate(upload.payload["update"].items())
        }
        return replace(upload, payload={"update": noisy})

    def assumed(self, seen: TargetView, task: Task) -> Defence:
        return gl.Noiseless(Noise(0.0), self)

    def noise_variance(self, scene: TargetView) -> Params:
        return tree.map(lambda u: torch.full_like(u, self.std**2), scene.update)


@dataclass(frozen=True)
class Count(Defence):
    """Remembers in how many rounds it took part."""

    def remember(self, before: gl.Upload, after: gl.Upload, client: Client) -> Tree:
        return {"rounds": client.memory.get("rounds", torch.zeros(())) + 1}


def uploaded(defence: Defence, lr: float = 1.0, **settings: object) -> Params:
    task = tiny()
    sent, _ = LocalTraining(lr=lr, **settings).run(
        task, task.weights(), private(2), defence, ClientState(key=draws.key("client"))
    )
    return defence.reveal([sent], [2])


def plain() -> Params:
    task = tiny()
    return task.gradient(task.weights(), private(2))


# --- order ------------------------------------------------------------------------------------------------------------


def test_no_defence_is_the_plain_update() -> None:
    assert largest_difference(uploaded(Defence()), plain()) == 0
    assert largest_difference(uploaded(gl.Chain()), plain()) == 0


def test_the_defence_of_the_design_page_halves() -> None:
    assert largest_difference(uploaded(Halve()), tree.scale(plain(), 0.5)) == 0
    assert Halve().name == "Halve"


class OnlyGradient(Defence):
    """The gradient hook of another defence, without its upload hook."""

    def __init__(self, inner: Defence) -> None:
        object.__setattr__(self, "inner", inner)

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return self.inner.gradient(compute, weights, batch, client)


def test_gradient_hooks_nest_with_the_first_outermost() -> None:
    twice, more = OnlyGradient(Times(2.0)), OnlyGradient(Plus(1.0))
    expected = tree.map(lambda g: 2 * (g + 1), plain())
    assert largest_difference(uploaded(gl.Chain(twice, more)), expected) < 1e-15
    expected = tree.map(lambda g: 2 * g + 1, plain())
    assert largest_difference(uploaded(gl.Chain(more, twice)), expected) < 1e-15


class OnlyUpload(OnlyGradient):
    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return compute(weights, batch)

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        return self.inner.upload(upload, client)


def test_upload_hooks_run_left_to_right() -> None:
    twice, more = OnlyUpload(Times(2.0)), OnlyUpload(Plus(1.0))
    assert largest_difference(uploaded(gl.Chain(twice, more)), tree.map(lambda g: 2 * g + 1, plain())) < 1e-15
    assert largest_difference(uploaded(gl.Chain(more, twice)), tree.map(lambda g: 2 * (g + 1), plain())) < 1e-15


def test_a_chain_of_chains_is_the_flat_chain() -> None:
    flat = uploaded(gl.Chain(Times(2.0), Plus(1.0), Halve()))
    assert largest_difference(uploaded(gl.Chain(gl.Chain(Times(2.0), Plus(1.0)), Halve())), flat) == 0


def test_a_chain_is_named_after_its_members() -> None:
    assert gl.Chain(Clip(), Noise()).name == "Clip + Noise"


# --- memory and randomness --------------------------------------------------------------------------------------------


def test_a_member_remembers_for_itself_alone() -> None:
    task, training, chain = tiny(), LocalTraining(lr=1.0), gl.Chain(Count(), Largest(), Count())
    client = ClientState()
    for _ in range(2):
        _, client = training.run(task, task.weights(), private(2), chain, client)
    assert client.memory["0"]["rounds"] == client.memory["2"]["rounds"] == 2
    assert "kept" in client.memory["1"]
    assert "rounds" not in client.memory["1"]


def test_what_was_not_sent_is_what_a_member_saw_minus_what_it_passed_on() -> None:
    """Behind a defence that doubles, the rest is that of the doubled update."""
    task, training = tiny(), LocalTraining(lr=1.0)
    sent, client = training.run(task, task.weights(), private(2), gl.Chain(OnlyUpload(Times(2.0)), Largest()))
    whole = tree.scale(plain(), 2.0)
    assert largest_difference(tree.add(client.memory["1"]["kept"], sent.payload["update"]), whole) < 1e-15


def test_members_of_a_chain_draw_independent_noise_however_nested() -> None:
    def noise(defence: Defence) -> Tensor:
        return tree.flatten(tree.subtract(uploaded(defence), plain()))

    one, nothing = Noise(1.0), Defence()
    draws_ = torch.stack(
        [
            noise(one),
            noise(gl.Chain(one)),
            noise(gl.Chain(nothing, one)),
            noise(gl.Chain(gl.Chain(nothing, one), nothing)),
            noise(gl.Chain(nothing, gl.Chain(one, nothing))),
        ]
    )
    correlation = torch.corrcoef(draws_) - torch.eye(len(draws_))
    assert correlation.abs().max() < 0.5  # 91 numbers each


# --- what the server sees ---------------------------------------------------------------------------------------------


def test_the_default_reveals_the_mean_weighted_by_examples() -> None:
    uploads = [gl.Upload({"update": {"w": torch.tensor([value])}}, n) for value, n in ((1.0, 1), (5.0, 3))]
    assert Defence().reveal(uploads, [1, 3])["w"].item() == 4
    assert Defence().aggregate(uploads, [1, 3], {})["w"].item() == 4


def test_two_uploaded_trees_are_put_together_by_their_owner() -> None:
    assert largest_difference(uploaded(Halves()), plain()) < 1e-15
    chain = gl.Chain(OnlyUpload(Times(2.0)), Halves())
    assert largest_difference(uploaded(chain), tree.scale(plain(), 2.0)) < 1e-15


def test_upload_map_reaches_every_tree() -> None:
    assert largest_difference(uploaded(gl.Chain(Halves(), Halve())), tree.scale(plain(), 0.5)) < 1e-15


def test_a_chain_has_one_owner_of_what_is_revealed() -> None:
    with pytest.raises(ValueError, match="Halves and Halves each define `reveal`"):
        gl.Chain(Halves(), Halve(), gl.Chain(Halves()))


def test_aggregation_follows_the_owner_of_reveal() -> None:
    upload = Halves().upload(gl.Upload({"update": plain()}, 2), None)
    chain = gl.Chain(Halves(), Count())
    assert largest_difference(chain.aggregate([upload], [2], {}), plain()) < 1e-15


def test_overrides_looks_into_chains() -> None:
    assert overrides(gl.Chain(Count(), gl.Chain(Halves())), "reveal")
    assert not overrides(gl.Chain(Count(), Halve()), "reveal")


def test_broadcasts_reach_the_client_and_the_observation() -> None:
    class Beacon(Defence):
        def broadcast(self, weights: Params, server: Tree) -> dict[str, Params]:
            return {"beacon": tree.scale(weights, 3.0)}

        def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
            return client.extras["beacon"]

    task = tiny()
    seen = gl.observe(task, private(2), LocalTraining(lr=1.0), gl.Chain(Beacon(), Count()))
    assert largest_difference(seen.extras["beacon"], tree.scale(task.weights(), 3.0)) == 0
    assert largest_difference(seen.update, seen.extras["beacon"]) == 0


def test_only_a_proof_prints_an_epsilon() -> None:
    class Proved(Defence):
        def guarantee(self, exposure: gl.Exposure) -> Guarantee:
            return Guarantee(3.0, 1e-5)

    assert str(Defence().guarantee(gl.Exposure())) == "no formal guarantee (it was not designed to give one)"
    assert str(gl.Chain(Halve(), Proved()).guarantee(gl.Exposure())) == "(3, 1e-05)-differential privacy"


# --- what an attacker assumes -----------------------------------------------------------------------------------------

DETERMINISTIC = {
    "none": Defence(),
    "halve": Halve(),
    "sharpness": Sharpness(),
    "clip": Clip(),
    "largest": Largest(),
    "two trees": Halves(),
    "chain": gl.Chain(Sharpness(), Clip(), Largest()),
    "chain of chains": gl.Chain(gl.Chain(Sharpness(), Times(2.0)), Halves(), Halve()),
}
RECIPES = {
    "one step": LocalTraining(lr=0.7),
    "epochs": LocalTraining(lr=0.3, epochs=2, batch_size=2),
    "adam": LocalTraining(lr=0.05, steps=3, optimiser=Adam()),
}


def recorded(task: Task, batch: Batch, training: LocalTraining, defence: Defence) -> tuple[gl.Observation, list]:
    """An observation together with the private order, which no attacker has."""
    examples = batch["y"].shape[0]
    order = training.order(examples, torch.Generator().manual_seed(5))
    buffers = task.buffers()
    upload, _ = training.run(task, task.weights(), batch, defence, ClientState(buffers=buffers), order)
    update = tree.detach(defence.reveal([upload], [examples]))
    return gl.Observation(task.weights(), update, examples, buffers=buffers or None), order


def match_at(scene: TargetView, match: Match, batch: Batch, predict: Replay) -> float:
    observed = match.prepare(predict.target(scene))
    return float(match.reduce(match.residual(predict(batch, {}, scene, moment()), observed)))


@pytest.mark.parametrize("match", [SquaredError(), Cosine()], ids=["squared", "cosine"])
@pytest.mark.parametrize("norm", [None, "eval", "train"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_match_is_zero_at_the_truth_and_not_beside_it(
    name: str, recipe: str, norm: str | None, match: Match
) -> None:
    """The adaptive attacker replays the client through the defence; with the client's order nothing is left."""
    task, batch, training, defence = tiny(norm=norm), private(4), RECIPES[recipe], DETERMINISTIC[name]
    seen, order = recorded(task, batch, training, defence)
    scene = scene_of(task, seen, gl.Knowledge(training=training, defence=defence))
    predict = Replay(order=order)
    assert match_at(scene, match, batch, predict) < 1e-24
    beside = {**batch, "x": batch["x"] + 0.1 * private(4, seed=1)["x"]}
    assert match_at(scene, match, beside, predict) > 1e-12


def test_an_attacker_who_ignores_the_defence_does_not_match() -> None:
    task, batch, training = tiny(), private(2), LocalTraining(lr=1.0)
    seen, order = recorded(task, batch, training, Sharpness(0.5))
    naive, adaptive = (
        match_at(scene_of(task, seen, gl.Knowledge(training=training, defence=d)), Cosine(), batch, Replay(order=order))
        for d in (None, Sharpness(0.5))
    )
    assert adaptive < 1e-24
    assert naive > 1e-5


def test_noise_is_switched_off_in_the_replay_and_weighed_in_the_match() -> None:
    task, batch, training = tiny(), private(2), LocalTraining(lr=1.0)
    seen = gl.observe(task, batch, training, Noise(0.1))
    knows = gl.Knowledge(training=training, defence=Noise(0.1))
    scene = scene_of(task, seen, knows)
    signal = tree.squared_norm(seen.update) / tree.size(seen.update)
    weight = torch.sqrt(signal / (signal + 0.01))
    assert largest_difference(Replay().target(scene), tree.scale(seen.update, weight)) < 1e-15
    assert largest_difference(Replay()(batch, {}, scene, moment()), tree.scale(plain(), weight)) < 1e-15


def test_dropped_coordinates_are_weighed_out_and_exact_ones_kept() -> None:
    task, batch, training = tiny(), private(2), LocalTraining(lr=1.0)
    seen, order = recorded(task, batch, training, Largest())
    scene = scene_of(task, seen, gl.Knowledge(training=training, defence=gl.OnlyVisible(Largest())))
    predicted = Replay(order=order)(batch, {}, scene, moment())
    dropped = tree.flatten(seen.update) == 0
    assert dropped.any()
    assert tree.flatten(predicted)[dropped].abs().max() == 0
    assert largest_difference(tree.flatten(predicted), tree.flatten(seen.update)) < 1e-16


def test_an_update_of_zeros_is_weighed_without_dividing_by_it() -> None:
    task = tiny()
    nothing = gl.Observation(task.weights(), tree.zeros_like(task.weights()), 2)
    scene = scene_of(task, nothing, gl.Knowledge(defence=gl.OnlyVisible(Noise(0.0))))
    assert tree.finite(Replay()(private(2), {}, scene, moment()))


def test_the_half_informed_attacker_predicts_plainly() -> None:
    """OnlyVisible takes the weights of the coordinates from a defence, and none of its hooks."""
    task, batch, training = tiny(), private(2), LocalTraining(lr=1.0)
    seen, order = recorded(task, batch, training, Clip())
    scene = scene_of(task, seen, gl.Knowledge(training=training, defence=gl.OnlyVisible(Clip())))
    assert largest_difference(Replay(order=order)(batch, {}, scene, moment()), plain()) < 1e-16
    assert uploaded(gl.OnlyVisible(Halve()))["0.bias"].equal(plain()["0.bias"])


def test_the_variances_of_a_chain_add() -> None:
    task = tiny()
    seen = gl.observe(task, private(2), LocalTraining(lr=1.0), Largest())
    scene = scene_of(task, seen)
    variance = gl.Chain(Largest(), Noise(0.2), Noise(0.1)).noise_variance(scene)
    flat, kept = tree.flatten(variance), tree.flatten(seen.update) != 0
    assert flat[~kept].isinf().all()
    torch.testing.assert_close(flat[kept], torch.full_like(flat[kept], 0.05))


@pytest.mark.parametrize("name", ["largest", "chain"])
def test_masks_are_read_off_each_lanes_own_observation(name: str, double: gl.Engine) -> None:
    """Two targets with different masks, attacked together: each ends where it ends alone."""
    task, training, defence = tiny(), LocalTraining(lr=1.0), DETERMINISTIC[name]
    seen = [gl.observe(task, private(1, seed=s), training, defence, key=f"t{s}") for s in range(2)]
    knows = gl.Knowledge(training=training, defence=defence, given={"y": torch.tensor([[0], [1]])})
    attack = gl.attacks.get("ig", steps=6)
    together = attack.run(task, seen, knows, engine=double)
    for position, target in enumerate(seen):
        own = replace(knows, given={"y": knows.given["y"][position]})
        alone = attack.run(task, target, own, engine=double)
        assert largest_difference(together.batch["x"][position], alone.batch["x"][0]) < 1e-9
