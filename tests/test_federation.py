"""Clients, shares and rounds: the split is fair and repeatable, one client is plain training, many are their mean."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import gradleak as gl
from conftest import CLASSES, largest_difference, private, tiny
from gradleak.audit import from_settings
from gradleak.audit.private import Stored
from gradleak.core import registry, tree
from gradleak.core.folder import FolderInUse
from gradleak.core.random import Draws
from gradleak.core.registry import BadSetting, UnknownName
from gradleak.federation import (
    DroppedOut,
    ExcludedClient,
    Federation,
    FederationError,
    Rounds,
    accepted,
    participation,
    partition,
    with_buffers,
)
from gradleak.federation.checkpoints import Checkpoints
from gradleak.federation.clients import Clients, Work, flat, unflat
from gradleak.federation.graphs import Graphs
from gradleak.federation.training import Interrupted, estimate, fingerprint_of
from gradleak.scenario.rules import SGD


def data(count: int = 12) -> Stored:
    return Stored(private(count))


def test_every_example_belongs_to_one_client() -> None:
    shares = Federation(clients=5).partition(23)
    assert sorted(torch.cat(shares).tolist()) == list(range(23))
    assert {len(share) for share in shares} == {4, 5}


def test_the_split_repeats_and_depends_on_the_seed() -> None:
    assert all(map(torch.equal, Federation(clients=3).partition(20), Federation(clients=3).partition(20)))
    assert not all(map(torch.equal, Federation(clients=3).partition(20), Federation(clients=3, seed=1).partition(20)))


def test_targets_share_no_example() -> None:
    federation = Federation(clients=3, examples=2)
    rows = torch.cat([federation.target(24, index).rows for index in range(12)])
    assert sorted(rows.tolist()) == list(range(24))
    assert [federation.target(24, index).client for index in range(4)] == [0, 1, 2, 0]


def test_too_little_data_is_said() -> None:
    with pytest.raises(FederationError, match="cannot give each of 4 clients 2"):
        Federation(clients=4, examples=2).partition(7)
    with pytest.raises(FederationError, match="which holds 4 in all"):
        Federation(clients=2, examples=4).target(8, 2)
    with pytest.raises(FederationError, match="clients must be at least 1; given 0"):
        Federation(clients=0)


def test_one_client_is_plain_training() -> None:
    task, held = tiny(), data()
    federation = Federation(training=gl.LocalTraining(lr=0.3), examples=4)
    weights = task.weights()
    share = federation.partition(12)[0]
    for number in range(3):
        batch = held.batch(share[4 * number : 4 * number + 4])
        weights = tree.subtract(weights, tree.scale(task.gradient(weights, batch), 0.3))
    trained = federation.weights_at(task, held, [3])
    assert list(trained) == [3]
    assert largest_difference(trained[3].weights, weights) < 1e-12


def test_clients_are_averaged() -> None:
    """One step of all clients is one step on all their examples, since shares are equal."""
    task, held = tiny(), data()
    many = Federation(clients=4, training=gl.LocalTraining(lr=0.5), examples=3)
    whole = tree.subtract(task.weights(), tree.scale(task.gradient(task.weights(), held.tensors), 0.5))
    assert largest_difference(many.weights_at(task, held, [1])[1].weights, whole) < 1e-12


def test_rounds_do_not_depend_on_which_are_kept() -> None:
    task, held = tiny(), data()
    federation = Federation(clients=2, training=gl.LocalTraining(lr=0.5, epochs=2, batch_size=1), examples=3)
    several, one = federation.weights_at(task, held, [0, 2, 4]), federation.weights_at(task, held, [2])
    assert list(several) == [0, 2, 4]
    assert largest_difference(several[0].weights, task.weights()) == 0
    assert largest_difference(several[2].weights, one[2].weights) == 0


@dataclass(frozen=True)
class Counting(gl.Defence):
    """Doubles the start, takes half a step, and remembers how often a client was asked."""

    def initial(self, weights: Any, server: Any) -> Any:
        return tree.scale(weights, 2.0)

    def aggregate(self, uploads: Any, sizes: Any, server: Any) -> Any:
        return tree.scale(self.reveal(uploads, sizes), 0.5)

    def upload(self, upload: Any, client: Any) -> Any:
        return upload.map(lambda update: tree.scale(update, 1.0 + client.memory.get("asked", 0)))

    def remember(self, before: Any, after: Any, client: Any) -> Any:
        return {"asked": client.memory.get("asked", 0) + 1}


def test_defence_hooks_of_server_and_client_are_used() -> None:
    task, held = tiny(), data(4)
    federation = Federation(training=gl.LocalTraining(lr=0.1), examples=4)
    weights = tree.scale(task.weights(), 2.0)
    for number in range(2):  # the second round sends twice the update, because the client remembers the first
        factor = 0.1 * 0.5 * (1 + number)
        weights = tree.subtract(weights, tree.scale(task.gradient(weights, held.tensors), factor))
    assert largest_difference(federation.weights_at(task, held, [2], Counting())[2].weights, weights) < 1e-12


def test_buffers_of_a_later_round_are_the_mean_of_the_clients() -> None:
    task, held = tiny(norm="train"), data()
    federation = Federation(clients=2, training=gl.LocalTraining(lr=0.1), examples=6)
    after = federation.weights_at(task, held, [1])[1]
    own = [task.loss(task.weights(), held.batch(share))[1] for share in federation.partition(12)]
    name = "1.running_mean"
    assert torch.allclose(after.buffers[name], torch.stack([buffers[name] for buffers in own]).mean(0))
    sent = with_buffers(task, after.buffers)
    assert torch.equal(sent.buffers()[name], after.buffers[name])
    assert not torch.equal(task.buffers()[name], after.buffers[name]), "the user's model was touched"


def test_an_observation_is_of_its_round_and_names_no_data() -> None:
    task, held = tiny(), data()
    federation = Federation(training=gl.LocalTraining(lr=0.1, optimiser=SGD(momentum=0.9), steps=2), examples=2)
    weights = federation.weights_at(task, held, [1])[1].weights
    batch = held.batch(federation.target(12, 0).rows)
    seen = federation.observe(task, batch, weights, None, key="client0/round1/target0", round=1, seed=0)
    assert (seen.round, seen.num_examples, seen.key) == (1, 2, "client0/round1/target0")
    assert largest_difference(seen.weights, weights) == 0
    assert replace(federation, wire="weights").wire == "weights"


# --- who holds what --------------------------------------------------------------------------------------------------


def labelled(count: int = 600, classes: int = 5) -> Stored:
    """Examples of which only the labels matter."""
    return Stored({"x": torch.zeros(count, 1), "y": torch.arange(count) % classes})


def counts(shares: list[Tensor], held: Stored) -> Tensor:
    """(clients, classes)"""
    classes = int(held.tensors["y"].max()) + 1
    return torch.stack([torch.bincount(held.tensors["y"][share], minlength=classes) for share in shares])


@pytest.mark.parametrize(
    "split", ["iid", "iid_balanced", "dir_class", "dir_class:alpha=5", "dir_client:alpha=0.3", "dir_client:alpha=0"]
)
def test_every_split_deals_each_example_once_and_repeats(split: str) -> None:
    held = labelled()
    first, again, other = (Federation(clients=7, seed=seed, split=split).partition(held) for seed in (0, 0, 1))  # type: ignore[arg-type]
    assert sorted(torch.cat(first).tolist()) == list(range(600))
    assert all(map(torch.equal, first, again))
    assert not all(len(a) == len(b) and torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_balanced_split_gives_every_client_as_many_of_each_class() -> None:
    found = counts(Federation(clients=7, split=partition.BalancedIID()).partition(held := labelled()), held)
    assert int((found.amax(0) - found.amin(0)).max()) <= 1
    assert int(found.sum(1).max() - found.sum(1).min()) <= 1


def test_a_class_wise_dirichlet_split_varies_the_sizes_and_keeps_the_least() -> None:
    held = labelled()
    sizes = counts(Federation(clients=6, split=partition.ClassDirichlet(alpha=0.5)).partition(held), held).sum(1)
    assert int(sizes.min()) >= 10
    assert len(set(sizes.tolist())) > 1
    with pytest.raises(FederationError, match="each of 6 clients holds 101"):
        Federation(clients=6, split=partition.ClassDirichlet(alpha=0.5, min_size=101)).partition(held)


def test_class_wise_proportions_have_the_moments_of_a_dirichlet() -> None:
    """The variance of a share is (1/N)(1 - 1/N) / (N alpha + 1)."""
    held, clients, alpha = labelled(4000, 200), 4, 2.0
    found = counts(Federation(clients=clients, split=partition.ClassDirichlet(alpha)).partition(held), held) / 20
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert float(found.mean()) == pytest.approx(1 / clients)
    assert float(found.var()) == pytest.approx(expected, rel=0.2)


def test_a_client_wise_dirichlet_split_keeps_the_sizes_and_varies_the_classes() -> None:
    held = labelled(602)
    found = counts(Federation(clients=5, split=partition.ClientDirichlet(alpha=0.3)).partition(held), held)
    assert found.sum(1).tolist() == [121, 121, 120, 120, 120]
    assert float((found / found.sum(1, keepdim=True)).amax(1).mean()) > 0.4  # 0.2 would be even
    one_class = counts(
        Federation(clients=10, split=partition.ClientDirichlet(alpha=0)).partition(labelled()), labelled()
    )
    assert ((one_class > 0).sum(1) == 1).all()


def test_splits_are_spelled_and_read_back() -> None:
    for text in ("iid", "iid_balanced", "dir_class:alpha=0.3,min_size=2", "dir_client:alpha=0.0"):
        assert registry.spelled(registry.parse("partition", text)) == text
    for text in ("all", "fixed:number=3", "poisson:rate=0.25"):
        assert registry.spelled(registry.parse("participation", text)) == text
    federation = Federation(clients=4, split="dir_class:alpha=0.3", participation="fixed:number=3", server_lr=0.5)  # type: ignore[arg-type]
    assert Federation(**federation.settings()) == federation


@pytest.mark.parametrize(
    ("given", "problem", "told"),
    [
        ({"split": "dir_clas"}, UnknownName, "Did you mean 'dir_class'"),
        ({"split": "dir_class:beta=2"}, BadSetting, "has no setting 'beta'"),
        ({"split": "dir_class:alpha=-1"}, BadSetting, "alpha of dir_class must be a number of at least"),
        ({"split": "dir_class:alpha=much"}, BadSetting, "alpha must be a number"),
        ({"participation": "fixed"}, BadSetting, "needs the setting 'number'"),
        ({"participation": "fixed:number=9"}, FederationError, "9 clients per round cannot be chosen from 4"),
        ({"participation": "poisson:rate=1.5"}, BadSetting, "from 0 to 1"),
        ({"weighting": "size"}, FederationError, "'examples' or 'uniform'"),
        ({"server_lr": 0.0}, FederationError, "server_lr must be positive"),
    ],
)
def test_a_mistake_in_a_federation_is_named(given: dict[str, Any], problem: type[Exception], told: str) -> None:
    with pytest.raises(problem, match=told):
        Federation(clients=4, **given)


def test_a_split_by_labels_needs_the_data() -> None:
    with pytest.raises(FederationError, match="looks at labels: give the data"):
        Federation(clients=2, split=partition.BalancedIID()).partition(10)


# --- who takes part --------------------------------------------------------------------------------------------------


def test_a_fixed_number_is_drawn_anew_each_round_and_without_replacement() -> None:
    federation = Federation(clients=10, participation=participation.Fixed(4))
    rounds = [federation.participation.chosen(10, federation.generator("participation", n)) for n in range(50)]
    assert all(len(set(chosen)) == 4 for chosen in rounds)
    assert len({tuple(chosen) for chosen in rounds}) > 30
    assert {client for chosen in rounds for client in chosen} == set(range(10))


def test_poisson_takes_each_client_with_its_probability() -> None:
    federation = Federation(clients=10, participation=participation.Poisson(0.3))
    rounds = [federation.participation.chosen(10, federation.generator("participation", n)) for n in range(400)]
    assert sum(map(len, rounds)) / 4000 == pytest.approx(0.3, abs=0.03)
    assert any(not chosen for chosen in rounds)


def test_a_round_without_clients_is_skipped_and_recorded() -> None:
    task = tiny()
    federation = Federation(clients=4, participation=participation.Poisson(1e-12))
    done = federation.train(task, data(), 2)
    assert largest_difference(done.state.weights, task.weights()) == 0
    assert [row["skipped"] for row in done.metrics[1:]] == ["no client was drawn"] * 2


def test_central_noise_hides_that_a_round_was_empty() -> None:
    task = tiny()
    private_ = gl.defences.DPFedAvg(clip=1.0, noise_multiplier=0.5)
    server = {**Federation(clients=4, participation=participation.Poisson(0.5)).server("aggregate", 0)}
    alone = private_.idle({**server, "weights": task.weights()})
    assert alone is not None
    spread = tree.flatten(alone).square().mean().sqrt()
    assert float(spread) == pytest.approx(0.5 * 1.0 / (0.5 * 4), rel=0.2)
    assert gl.Chain(gl.Defence(), private_).idle({**server, "weights": task.weights()}) is not None
    assert gl.defences.Clipping(1.0).idle(server) is None


# --- the server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weighting", "shares"), [("examples", (5 / 8, 3 / 8)), ("uniform", (1 / 2, 1 / 2))])
def test_the_server_weighs_clients_and_takes_its_own_step(weighting: str, shares: tuple[float, float]) -> None:
    task, held = tiny(norm="train"), data(8)

    @dataclass(frozen=True)
    class Uneven:
        name: str = "uneven"

        def shares(self, count: int, clients: int, labels: Any, generator: Any) -> list[Tensor]:
            return [torch.arange(5), torch.arange(5, 8)]

    federation = Federation(
        2, gl.LocalTraining(lr=0.2), examples=None, split=Uneven(), server_lr=0.5, weighting=weighting
    )
    expected, mean = task.weights(), torch.zeros(4)
    for share, rows in zip(shares, federation.partition(held), strict=True):
        gradient, buffers = task.gradient_and_buffers(task.weights(), held.batch(rows))
        expected = tree.subtract(expected, tree.scale(gradient, 0.5 * 0.2 * share))
        mean = mean + share * buffers["1.running_mean"]
    sent = federation.weights_at(task, held, [1])[1]
    assert largest_difference(sent.weights, expected) < 1e-12
    assert largest_difference(sent.buffers["1.running_mean"], mean) < 1e-12  # statistics are averaged, not stepped


def test_a_client_trains_on_its_whole_share_where_no_number_is_given() -> None:
    task, held = tiny(), data(6)
    trained = Federation(training=gl.LocalTraining(lr=0.3), examples=None).weights_at(task, held, [1])[1].weights
    plain = tree.subtract(task.weights(), tree.scale(task.gradient(task.weights(), held.tensors), 0.3))
    assert largest_difference(trained, plain) < 1e-12
    assert len(Federation(clients=2, examples=None).target(6, 1).rows) == 3


@dataclass(frozen=True)
class Watching(gl.Defence):
    """Keeps what the server's hooks are given."""

    seen: Any = None

    def initial(self, weights: Any, server: Any) -> Any:
        self.seen.append(("initial", server))
        return weights

    def broadcast(self, weights: Any, server: Any) -> Any:
        self.seen.append(("broadcast", server))
        return {}

    def aggregate(self, uploads: Any, sizes: Any, server: Any) -> Any:
        self.seen.append(("aggregate", server))
        noise = Draws(server["key"]).normal((1,))
        assert noise.isfinite().all()
        return self.reveal(uploads, sizes)


def test_the_servers_hooks_are_told_round_clients_participation_and_a_key() -> None:
    seen: list[Any] = []
    federation = Federation(clients=4, participation=participation.Fixed(2))
    federation.weights_at(tiny(), data(), [2], Watching(seen))
    assert [hook for hook, _ in seen] == ["initial", *["broadcast", "aggregate"] * 2]
    assert [server["round"] for _, server in seen] == [0, 0, 0, 1, 1]
    assert {(server["clients"], server["participation"]) for _, server in seen} == {(4, 0.5)}
    keys = {tuple(server["key"].tolist()) for _, server in seen}
    assert len(keys) == 5
    assert all(server["key"].dtype == torch.int64 and server["key"].shape == (2,) for _, server in seen)


@dataclass(frozen=True)
class Keeping(gl.Defence):
    """The server counts its rounds and uploads, and tells the clients."""

    def broadcast(self, weights: Any, server: Any) -> Any:
        return {"rounds": {"done": server["memory"]["rounds"]}}

    def advance(self, before: Any, after: Any, uploads: Any, server: Any) -> Any:
        held = server["memory"] or {"rounds": -1, "uploads": 0, "way": tree.zeros_like(before)}
        way = tree.add(held["way"], tree.subtract(after, before))
        return {"rounds": held["rounds"] + 1, "uploads": held["uploads"] + len(uploads), "way": way}

    def aggregate(self, uploads: Any, sizes: Any, server: Any) -> Any:
        assert int(server["memory"]["rounds"]) == server["round"]
        return self.reveal(uploads, sizes)


def test_what_the_server_keeps_comes_back_in_the_next_round_and_from_a_folder(tmp_path: Path) -> None:
    task, federation = tiny(), Federation(clients=4, participation=participation.Fixed(3))
    done = federation.train(task, data(), 3, defence=Keeping(), out=tmp_path / "run", checkpoints=[1])
    kept = Checkpoints(tmp_path / "run")
    for number, uploads in ((0, 0), (1, 3), (3, 9)):
        held = kept.at(number)
        assert (int(held.server["rounds"]), int(held.server["uploads"])) == (number, uploads)
        assert largest_difference(held.server["way"], tree.subtract(held.weights, task.weights())) < 1e-12
    assert largest_difference(unflat(done.state.server)["way"], kept.at(3).server["way"]) == 0
    chained = federation.weights_at(task, data(), [2], gl.Chain(gl.Defence(), Keeping()))[2]
    assert chained.server.keys() == {"1"}
    assert int(chained.server["1"]["rounds"]) == 2
    empty = replace(federation, participation=participation.Poisson(1e-12)).weights_at(task, data(), [2], Keeping())[2]
    assert (int(empty.server["rounds"]), int(empty.server["uploads"])) == (2, 0)


@dataclass(frozen=True)
class Prepared(gl.Defence):
    """Starts from weights and statistics of its own."""

    def initial(self, weights: Any, server: Any) -> Any:
        assert callable(server["load"])
        statistics = {"1.running_mean": server["task"].buffers()["1.running_mean"] + 1}
        return {**tree.scale(weights, 0.5), **statistics}


@pytest.mark.parametrize("defence", [Prepared(), gl.Chain(gl.Defence(), Prepared(), gl.Defence())])
def test_a_defence_may_start_from_other_weights_and_statistics(defence: gl.Defence) -> None:
    task = tiny(norm="train")
    sent = Federation(clients=4).weights_at(task, data(), [0], defence)[0]
    assert largest_difference(sent.weights, tree.scale(task.weights(), 0.5)) == 0
    assert largest_difference(sent.buffers["1.running_mean"], task.buffers()["1.running_mean"] + 1) == 0
    assert largest_difference(sent.buffers["1.running_var"], task.buffers()["1.running_var"]) == 0


def test_exposure_says_how_clients_take_part() -> None:
    federation = Federation(clients=4, participation=participation.Poisson(0.25), examples=None)
    exposure = federation.exposure(100, 14)
    assert (exposure.rounds, exposure.clients, exposure.participation, exposure.sampling) == (100, 4, 0.25, "poisson")
    assert exposure.examples == 3


# --- clients together ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoisyFeedback(gl.Defence):
    """Sends the larger half of (update + what was not sent before) plus noise, and remembers the rest and a count."""

    def broadcast(self, weights: Any, server: Any) -> Any:
        return {"centre": tree.scale(weights, 0.1)}

    def gradient(self, compute: Any, weights: Any, batch: Any, client: Any) -> Any:
        return tree.add(compute(weights, batch), client.extras["centre"], 0.01)

    def upload(self, upload: Any, client: Any) -> Any:
        held = client.memory.get("rest", tree.zeros_like(upload.payload["update"]))
        full = tree.add(upload.payload["update"], held)
        position = iter(range(len(full)))

        def keep(value: Tensor) -> Tensor:
            noise = client.draws.normal(tuple(value.shape), stream=next(position), dtype=value.dtype)
            return torch.where(value.abs() >= value.abs().median(), value, 0.0) + 1e-3 * noise

        return upload.map(lambda _: tree.map(keep, full))

    def remember(self, before: Any, after: Any, client: Any) -> Any:
        rest = tree.subtract(before.payload["update"], after.payload["update"])
        return {"rest": rest, "count": client.memory.get("count", 0) + 1}


ROUGH = gl.LocalTraining(lr=0.2, epochs=2, batch_size=2, optimiser=SGD(momentum=0.9, weight_decay=0.01))


@pytest.mark.parametrize("norm", [None, "train"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_clients_trained_together_are_clients_trained_one_by_one(norm: str | None, chunk: int | None) -> None:
    """With momentum, shuffles, noise, memory, broadcasts and running statistics; some clients miss some rounds."""
    task, held = tiny(norm=norm), data(25)
    federation = Federation(5, ROUGH, examples=None, participation=participation.Fixed(4))
    defence = gl.Chain(NoisyFeedback(), gl.Defence())
    together, alone = (
        federation.train(task, held, 4, defence=defence, engine=engine)
        for engine in (gl.Engine("cpu", chunk=chunk), gl.Engine("cpu", batched=False))
    )
    assert largest_difference(together.state.weights, task.weights()) > 1e-2
    assert largest_difference(together.state.weights, alone.state.weights) < 1e-12
    if norm:
        assert largest_difference(together.state.buffers, alone.state.buffers) < 1e-12
    assert together.state.memories.keys() == alone.state.memories.keys() == set(range(5))
    for client, memory in together.state.memories.items():
        assert largest_difference(memory, alone.state.memories[client]) < 1e-12


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 4}, {"steps": 7}])
def test_clients_go_through_their_shuffled_batches_as_the_client_rule_says(length: dict[str, int]) -> None:
    task, held = tiny(), data(10)
    training = gl.LocalTraining(lr=0.2, batch_size=2, **length)
    federation = Federation(clients=2, training=training, examples=None)
    expected = task.weights()
    for client, share in enumerate(federation.partition(held)):
        order = training.order(5, federation.generator("order", client, 0))
        sent, _ = training.run(task, task.weights(), held.batch(share), order=order)
        expected = tree.subtract(expected, tree.scale(sent.payload["update"], 0.5))
    assert largest_difference(federation.weights_at(task, held, [1])[1].weights, expected) < 1e-12


@pytest.mark.parametrize("batched", [True, False])
def test_frozen_parameters_stay_as_they_are_to_the_last_bit(batched: bool) -> None:
    task = tiny(norm="train")
    next(task.model.parameters()).requires_grad_(False)
    federation = Federation(clients=3, training=ROUGH, examples=None)
    sent = federation.weights_at(task, data(), [2], engine=gl.Engine("cpu", batched=batched))[2]
    assert "0.weight" not in sent.weights
    assert torch.equal(sent.buffers["0.weight"], task.buffers()["0.weight"])
    assert not torch.equal(sent.buffers["1.running_mean"], task.buffers()["1.running_mean"])


def test_clients_of_equal_size_are_one_call_of_the_client_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = gl.LocalTraining.run

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return run(self, *arguments, **named)

    monkeypatch.setattr(gl.LocalTraining, "run", counted)
    federation = Federation(clients=5, training=ROUGH, examples=None)
    federation.weights_at(tiny(), data(25), [1])
    assert len(calls) == 1
    federation.weights_at(tiny(), data(26), [1])  # one client holds 6, four hold 5
    assert len(calls) == 3
    federation.weights_at(tiny(), data(25), [1], engine=gl.Engine("cpu", batched=False))
    assert len(calls) == 8


def test_what_a_group_cannot_hold_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    work = [Work(i, private(2, seed=i), {}, gl.federation.randomness.key(i), None) for i in range(5)]
    clients = Clients(tiny(), gl.LocalTraining(lr=0.1), gl.Defence(), gl.Engine("cpu"))
    assert [len(group) for group in clients._groups(work)] == [5]
    monkeypatch.setattr("gradleak.federation.clients.SMALL_STEP", 10)  # a CPU gains nothing from large steps
    clients = Clients(tiny(), gl.LocalTraining(lr=0.1), gl.Defence(), gl.Engine("cpu"))
    assert [len(group) for group in clients._groups(work)] == [1] * 5
    clients = Clients(tiny(), gl.LocalTraining(lr=0.1), gl.Defence(), gl.Engine("cpu", chunk=2))
    assert [len(group) for group in clients._groups(work)] == [2, 2, 1]


def test_a_model_that_vmap_rejects_is_told_how_to_go_on() -> None:
    @dataclass(frozen=True)
    class Reading(gl.Defence):
        def upload(self, upload: Any, client: Any) -> Any:
            return upload.map(lambda update: tree.scale(update, float(next(tree.leaves(update)).sum().item())))

    federation = Federation(clients=2, examples=2)
    with pytest.raises(gl.engine.EngineError, match="batched=False"):
        federation.weights_at(tiny(), data(), [1], Reading())
    assert federation.weights_at(tiny(), data(), [1], Reading(), gl.Engine("cpu", batched=False))


def test_graphs_are_captured_at_the_second_meeting_and_give_way_when_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy, with a stand-in for CUDA's graphs (the real ones are tested below, where there is a GPU)."""
    made: list[Any] = []

    class Graph:
        def __init__(self, run: Any, inputs: Any) -> None:
            made.append(inputs["form"])
            self.run = run

        def __call__(self, inputs: Any) -> Any:
            return self.run(inputs)

    monkeypatch.setattr("gradleak.federation.graphs.Graph", Graph)
    graphs = Graphs(room=10.0)

    def ask(form: str, size: float = 4.0) -> Any:
        graphs.round += 1
        return graphs.results(form, lambda inputs: {"of": inputs["form"]}, {"form": form}, size)

    assert ask("a") is None
    assert ask("a") == {"of": "a"}
    assert (ask("b"), ask("b")) == (None, {"of": "b"})
    assert (ask("c"), ask("c")) == (None, None)  # no room beside two that are in use
    for _ in range(25):
        assert ask("a") == {"of": "a"}
    assert ask("c") == {"of": "c"}  # b was not used for long
    assert made == ["a", "b", "c"]
    assert (ask("huge", 11.0), ask("huge", 11.0)) == (None, None)


def test_what_cannot_be_captured_runs_step_by_step_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(run: Any, inputs: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("gradleak.federation.graphs.Graph", impossible)
    graphs = Graphs(room=10.0)
    assert graphs.results("a", dict, {}, 1.0) is None
    with pytest.warns(UserWarning, match="No CUDA graph .*not permitted.* step by step instead"):
        assert graphs.results("a", dict, {}, 1.0) is None
    assert graphs.results("a", dict, {}, 1.0) is None  # and once is enough


@pytest.mark.parametrize("norm", [None, "train"])
def test_local_training_can_be_captured(norm: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced with fake tensors, which have no values to read; and no tensor may be made from Python numbers."""
    traced: list[Any] = []

    class Graph:
        def __init__(self, run: Any, inputs: Any) -> None:
            traced.append(make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(inputs))
            self.run = run

        def __call__(self, inputs: Any) -> Any:
            return self.run(inputs)

    monkeypatch.setattr("gradleak.federation.graphs.Graph", Graph)
    federation = Federation(3, ROUGH, examples=None)
    work = Rounds(federation, tiny(norm=norm), data(15), NoisyFeedback())
    work.clients._graphs = Graphs(room=1e12)
    state = work.first()
    for _ in range(3):
        state, _told = work.after(state)
    assert traced  # round 2 has the form of round 3: clients that remember
    assert not [node for graph in traced for node in graph.graph.nodes if "lift_fresh" in str(node.target)]
    assert (
        largest_difference(
            state.weights, federation.weights_at(tiny(norm=norm), data(15), [3], NoisyFeedback())[3].weights
        )
        == 0
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("norm", [None, "train"])
def test_captured_clients_are_eager_clients_and_those_of_a_cpu(norm: str | None) -> None:
    """Six rounds of four clients: step by step at first, by a graph from the second round of a form on."""
    federation = Federation(5, ROUGH, examples=None, participation=participation.Fixed(4))
    states = []
    for engine in (gl.Engine("cuda"), gl.Engine("cuda", graph=False), gl.Engine("cpu")):
        work = Rounds(federation, tiny(norm=norm), data(25), NoisyFeedback(), engine)
        state = work.first()
        for _ in range(12):
            state, _told = work.after(state)
        if engine.where.type == "cuda" and engine.graph:
            assert work.clients._graphs is not None
            assert work.clients._graphs.possible
            assert work.clients._graphs._graphs
        states.append(tree.to(state.weights, "cpu", None))
    assert largest_difference(states[0], states[1]) < 1e-10
    assert largest_difference(states[0], states[2]) < 1e-10


def test_nested_names_survive_being_flat() -> None:
    nested = {"a/b": {"%2F": torch.ones(1)}, "empty": {}, "c": torch.zeros(2)}
    held = flat(nested)
    assert list(held) == ["a%2Fb/%252F", "c"]
    assert unflat(held).keys() == {"a/b", "c"}
    assert torch.equal(unflat(held)["a/b"]["%2F"], torch.ones(1))


# --- faulty clients --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faulty(gl.Defence):
    """Clients that saw a label `marked` first in their batch fail in some way."""

    how: str = "nan"
    marked: float = 9.0

    def upload(self, upload: Any, client: Any) -> Any:
        marked = client.batch["x"].amax() > self.marked
        return FAULTS[self.how](upload, marked)


def _raising(upload: Any, marked: Tensor) -> Any:
    if torch._C._functorch.is_batchedtensor(marked) or bool(marked):  # together, nobody can tell who it is
        raise DroppedOut
    return upload


FAULTS: dict[str, Any] = {
    "nan": lambda upload, marked: upload.map(lambda u: tree.map(lambda v: torch.where(marked, torch.nan, v), u)),
    "infinite": lambda upload, marked: upload.map(lambda u: tree.map(lambda v: v / (1.0 - marked.to(v.dtype)), u)),
    "buffers": lambda upload, marked: replace(
        upload, buffers=upload.buffers | {"1.running_var": upload.buffers["1.running_var"] / (~marked).double()}
    ),
    "dropped": _raising,
}  # fmt: skip


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("nan", "its upload holds values that are not finite (NaN or infinity)"),
        ("infinite", "its upload holds values that are not finite (NaN or infinity)"),
        ("buffers", "its upload holds values that are not finite (NaN or infinity)"),
        ("dropped", "it dropped out: no upload"),
    ],
)
def test_a_faulty_client_is_left_out_named_and_the_round_goes_on(how: str, reason: str) -> None:
    task, held = tiny(norm="train"), data(12)
    federation = Federation(clients=3, training=gl.LocalTraining(lr=0.1), examples=None)
    bad = federation.partition(12)[1]
    held.tensors["x"][bad[0]] = 10.0
    told = re.escape(f"Client 1 is left out of round 1: {reason}.")
    with pytest.warns(ExcludedClient, match=told):
        done = federation.train(task, held, 1, defence=Faulty(how))
    assert done.metrics[1]["clients"] == [0, 2]
    assert done.metrics[1]["excluded"] == {"1": reason}
    assert done.metrics[1]["skipped"] == ""
    expected = task.weights()
    for client in (0, 2):
        gradient = task.gradient(task.weights(), held.batch(federation.partition(12)[client]))
        expected = tree.subtract(expected, tree.scale(gradient, 0.1 / 2))
    assert largest_difference(done.state.weights, expected) < 1e-12
    assert tree.finite(done.state.buffers)


def test_where_every_client_fails_the_weights_stay_and_it_is_recorded() -> None:
    task = tiny(norm="train")
    with pytest.warns(ExcludedClient):
        done = Federation(clients=3, examples=2).train(task, data(), 2, defence=Faulty("nan", marked=-1.0))
    assert largest_difference(done.state.weights, task.weights()) == 0
    assert [row["skipped"] for row in done.metrics[1:]] == ["every client was left out"] * 2
    assert done.metrics[1]["clients"] == []


def test_a_client_that_is_left_out_keeps_what_it_remembered() -> None:
    @dataclass(frozen=True)
    class Counted(Faulty):
        def remember(self, before: Any, after: Any, client: Any) -> Any:
            return {"times": client.memory.get("times", 0) + 1}

    held = data(12)
    federation = Federation(clients=3, examples=2)  # the marked example is the third of its share: the second round's
    held.tensors["x"][federation.partition(12)[1][2]] = 10.0
    with pytest.warns(ExcludedClient, match="Client 1 is left out of round 2"):
        state = federation.train(tiny(norm="train"), held, 2, defence=Counted("nan")).state
    assert {client: int(memory["times"]) for client, memory in state.memories.items()} == {0: 2, 1: 1, 2: 2}


def test_only_uploads_of_the_right_form_are_accepted() -> None:
    weights = {"a": torch.zeros(2), "b": torch.zeros(3)}
    sound = gl.Upload({"update": {"a": torch.ones(2), "b": torch.ones(3)}}, 4)

    def with_update(**update: Tensor) -> gl.Upload:
        return replace(sound, payload={"update": dict(update)})

    uploads: dict[int, gl.Upload | None] = {
        0: sound,
        1: None,
        2: with_update(a=torch.ones(2)),
        3: with_update(a=torch.ones(2), b=torch.ones(3), c=torch.ones(1)),
        4: with_update(a=torch.ones(2), b=torch.ones(1, 3)),
        5: replace(sound, num_examples=5),
        6: replace(sound, num_examples=0),
        7: with_update(a=torch.tensor([1.0, torch.inf]), b=torch.ones(3)),
        8: replace(sound, payload={**sound.payload, "moments": weights}),
        9: gl.Upload({}, 4),
        10: sound,
        11: with_update(a=torch.tensor([1.0, -torch.inf]), b=torch.ones(3)),
    }
    found = accepted(uploads, weights, dict.fromkeys(uploads, 4))
    assert list(found.uploads) == [0, 10]
    assert found.excluded == {
        1: "it dropped out: no upload",
        2: "its update lacks 'b'",
        3: "its update has unknown 'c'",
        4: "its update has 'b' of shape (1, 3) where the weights have (3,)",
        5: "it says it has 5 examples, and has 4",
        6: "it says it has 0 examples, and has 4",
        7: "its upload holds values that are not finite (NaN or infinity)",
        8: "its upload has other tensors than those of most clients",
        9: "its upload is empty",
        11: "its upload holds values that are not finite (NaN or infinity)",
    }
    assert list(accepted({0: sound, 5: replace(sound, num_examples=5)}, weights).uploads) == [0, 5]


def test_payloads_other_than_updates_are_compared_with_each_other() -> None:
    moments = [gl.Upload({"moments": {"m": torch.full((size,), 1.0)}}, 1) for size in (2, 2, 3)]
    found = accepted(dict(enumerate(moments)), {"a": torch.zeros(1)})
    assert list(found.uploads) == [0, 1]


# --- before a training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("took", "a_round"),
    [((4.0, 1.5), 1.5), ((60.0,), 60.0)],  # what the first prepares is not in the second; a long one is told by itself
)
def test_a_training_is_estimated_by_one_timed_round(
    monkeypatch: pytest.MonkeyPatch, took: tuple[float, ...], a_round: float
) -> None:
    readings = iter([100 * number + at for number, length in enumerate(took) for at in (0.0, length)])
    monkeypatch.setattr("gradleak.federation.training.time", SimpleNamespace(perf_counter=lambda: next(readings)))
    told = estimate(LONG, tiny(), data(20), rounds=7)
    assert told.seconds == pytest.approx(7 * a_round)
    # Three of five clients, each with four examples in minibatches of two, twice.
    assert told.counts == {"rounds": 7, "steps": 3 * 2 * 2}
    assert not list(readings)


def test_data_without_a_fingerprint_get_one_from_examples_all_over_them() -> None:
    class Plain:
        """Examples of somebody's own: a length and batches."""

        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __len__(self) -> int:
            return len(self.x)

        def batch(self, rows: Tensor) -> dict[str, Tensor]:
            return {"x": self.x[rows]}

    x = torch.arange(200.0)
    last = x.clone()
    last[-1] += 1
    assert fingerprint_of(Plain(x)) == fingerprint_of(Plain(x.clone()))
    assert len({fingerprint_of(Plain(other)) for other in (x, x[:-1], x[:1], last, x + 1)}) == 5


# --- training, kept and resumed --------------------------------------------------------------------------------------

LONG = Federation(5, ROUGH, examples=None, participation=participation.Fixed(3))


def trained(out: Path | None, rounds: int = 6, **changes: Any) -> Any:
    settings = {"defence": NoisyFeedback(), "test": data(9), "every": 2, "checkpoints": [2, 3], **changes}
    return LONG.train(tiny(norm="train"), data(25), rounds, out=out, **settings)


def same_state(a: Any, b: Any) -> bool:
    """To the last bit."""
    if (a.round, a.memories.keys()) != (b.round, b.memories.keys()):
        return False
    pairs = [(a.weights, b.weights), (a.buffers, b.buffers), *((a.memories[c], b.memories[c]) for c in a.memories)]
    return all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in pairs)


def test_training_learns_and_says_so() -> None:
    rows = torch.arange(60) % CLASSES
    x = torch.zeros(60, 1, 4, 4, dtype=torch.float64) + (rows / CLASSES).reshape(-1, 1, 1, 1)
    held = Stored({"x": x, "y": rows})
    federation = Federation(4, gl.LocalTraining(lr=1.0, epochs=2, batch_size=5), examples=None)
    done = federation.train(tiny(), held, 30, test=held, every=10)
    assert [row["round"] for row in done.metrics if "test_accuracy" in row] == [0, 10, 20, 30]
    assert done.metrics[-1]["test_accuracy"] > 0.9
    assert done.metrics[-1]["loss"] < 0.7 * done.metrics[1]["loss"]
    weights = done.at(0).weights
    assert done.metrics[1]["loss"] == pytest.approx(float(tiny().loss(weights, held.tensors)[0]), rel=1e-6)
    assert re.search(r"^ +30 .* 4 +0$", done.table(), re.MULTILINE)


def test_the_rounds_to_an_accuracy_are_those_of_the_first_test_that_reached_it() -> None:
    curve = {0: 0.1, 2: 0.5, 4: 0.4, 6: 0.7}
    metrics = [{"round": n, **({"test_accuracy": curve[n]} if n in curve else {})} for n in range(7)]
    done = replace(Federation().train(tiny(), data(1), 0), metrics=metrics)
    assert [done.rounds_to(accuracy) for accuracy in (0.0, 0.1, 0.45, 0.5, 0.6, 0.8)] == [0, 0, 2, 2, 6, None]
    with pytest.raises(FederationError, match="train with test="):
        replace(done, metrics=[{"round": 0, "test_loss": 1.0}]).rounds_to(0.5)


def test_a_folder_holds_checkpoints_metrics_and_the_state(tmp_path: Path) -> None:
    done = trained(tmp_path / "run")
    kept = Checkpoints(tmp_path / "run")
    assert kept.rounds == [0, 2, 3, 6]
    in_memory = trained(None)
    for number in kept.rounds:
        assert largest_difference(kept.at(number).weights, in_memory.at(number).weights) == 0
        assert largest_difference(kept.at(number).buffers, in_memory.at(number).buffers) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == done.metrics
    assert [row["round"] for row in rows] == list(range(7))
    assert all(len(row["clients"]) == 3 for row in rows[1:])
    assert kept.settings["partition"]["sizes"] == [5] * 5
    assert kept.settings["federation"]["split"] == "iid"
    assert "<polyline" in (tmp_path / "run" / "curves.svg").read_text()
    with pytest.raises(FederationError, match="no checkpoint of round 4; there are: 0, 2, 3, 6"):
        kept.at(4)
    assert not list((tmp_path / "run").rglob("*.part"))


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ctrl-C in the middle of the rounds that are listed."""
    stops: list[int] = []
    after = Rounds.after

    def interrupted(self: Any, state: Any) -> Any:
        found = after(self, state)
        if state.round in stops:
            stops.remove(state.round)
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Rounds, "after", interrupted)
    return stops


def test_an_interrupted_training_goes_on_to_the_very_same_weights(tmp_path: Path, interrupting: list[int]) -> None:
    whole = trained(None)
    interrupting += [2, 4]
    for _ in range(2):
        with pytest.raises(Interrupted, match=r"[24] of 6 rounds are kept in .*the same call goes on"):
            trained(tmp_path / "run")
    done = trained(tmp_path / "run")
    assert same_state(done.state, whole.state)
    timeless = lambda rows: [{name: row[name] for name in row if name != "seconds"} for row in rows]  # noqa: E731
    assert timeless(done.metrics) == timeless(whole.metrics)
    again = trained(tmp_path / "run")  # nothing left to do
    assert same_state(again.state, whole.state)


def test_a_killed_training_goes_on_from_the_last_state_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives no warning: rounds after the state come again, and their lines do not stay twice."""
    whole = trained(None)
    monkeypatch.setattr("gradleak.federation.training.KEEP_EVERY", 0.0)
    trained(tmp_path / "run", rounds=3)
    monkeypatch.undo()

    class Killed(BaseException): ...

    def kill(row: dict[str, Any]) -> None:
        if row["round"] == 5:
            raise Killed

    with pytest.raises(Killed):
        trained(tmp_path / "run", progress=kill)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert len(metrics.read_text().splitlines()) == 6
    metrics.write_text(metrics.read_text() + '{"round": 6, "lo')
    done = trained(tmp_path / "run")
    assert same_state(done.state, whole.state)
    assert [json.loads(line)["round"] for line in metrics.read_text().splitlines()] == list(range(7))


def test_more_rounds_go_on_where_fewer_ended(tmp_path: Path) -> None:
    trained(tmp_path / "run", rounds=3)
    assert same_state(trained(tmp_path / "run").state, trained(None).state)
    with pytest.raises(FederationError, match="has no checkpoint of round 4, which has passed"):
        trained(tmp_path / "run", checkpoints=[4])
    with pytest.raises(FederationError, match="is at round 6 already, beyond 5"):
        trained(tmp_path / "run", rounds=5, checkpoints=[])
    with pytest.raises(FederationError, match="Checkpoint 9 lies outside"):
        trained(tmp_path / "run", checkpoints=[9])


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run", rounds=1, checkpoints=[])
    for changes, told in [
        ({"defence": None}, "They differ in defence .*NoisyFeedback.* there, 'none' now"),
        ({"engine": gl.Engine("cpu", precision="fast")}, "precision"),
    ]:
        with pytest.raises(FolderInUse, match=told):
            trained(tmp_path / "run", rounds=1, checkpoints=[], **changes)
    with pytest.raises(FolderInUse, match=r"federation.server_lr \(1.0 there, 0.5 now\)"):
        replace(LONG, server_lr=0.5).train(
            tiny(norm="train"), data(25), 1, defence=NoisyFeedback(), out=tmp_path / "run"
        )
    with pytest.raises(FolderInUse, match="fingerprint.data"):
        LONG.train(tiny(norm="train"), data(26), 1, defence=NoisyFeedback(), out=tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FolderInUse, match=r"holds notes.txt and no training"):
        trained(tmp_path / "other")
    with pytest.raises(FederationError, match="holds no training"):
        Checkpoints(tmp_path / "other")


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    trained(tmp_path / "run", rounds=1, checkpoints=[])
    path = tmp_path / "run" / "checkpoints" / "round-1.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FederationError, match=r"round-1.safetensors cannot be read"):
        Checkpoints(tmp_path / "run").at(1)


# --- audits ----------------------------------------------------------------------------------------------------------


def test_every_setting_of_a_federation_is_in_the_key_of_a_cell_and_in_run_toml() -> None:
    def planned(**changes: Any) -> gl.Audit:
        federation = replace(Federation(clients=4, examples=2), **changes)
        return gl.Audit(tiny(), private(25), ["ig:steps=2"], federation=federation, targets=1, unrelated=0, rounds=[1])

    changes: list[dict[str, Any]] = [
        {"split": "iid_balanced"}, {"split": "dir_client:alpha=1.0"}, {"split": "dir_client:alpha=2.0"},
        {"participation": "fixed:number=2"}, {"participation": "poisson:rate=0.5"}, {"server_lr": 0.5},
        {"weighting": "uniform"}, {"seed": 1},
    ]  # fmt: skip
    keys = {planned(**change).cells()[-1].key for change in ({}, *changes)}
    assert len(keys) == len(changes) + 1
    for change in changes:
        again = from_settings(planned(**change).settings(), task=tiny(), data=private(25))
        assert [cell.key for cell in again.cells()] == [cell.key for cell in planned(**change).cells()]


# --- an audit at the weights of a training ---------------------------------------------------------------------------


def audit(folder: Path, **changes: Any) -> gl.Audit:
    settings = {"attacks": ["ig:steps=2"], "targets": 1, "unrelated": 0, "engine": gl.Engine("cpu"), **changes}
    return gl.Audit(tiny(norm="train"), private(25), trained=Checkpoints(folder), **settings)


def test_an_audit_attacks_the_checkpoints_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "run")
    monkeypatch.setattr(Rounds, "after", None)  # it must not train anew
    planned = audit(tmp_path / "run", rounds=[0, 3], federation=replace(LONG, examples=2))
    seen = planned.side.victims(planned.federation, None, 3, (0, 3), 0).seen[0]
    sent = Checkpoints(tmp_path / "run").at(3)
    assert largest_difference(seen.weights, sent.weights) == 0
    assert seen.buffers is not None
    assert largest_difference(seen.buffers, sent.buffers) == 0
    assert len({cell.key for cell in planned.cells()}) == len(planned.cells())
    assert "trained" in planned.settings()["fingerprint"]
    with pytest.raises(FederationError, match="no checkpoint of round 1; there are: 0, 2, 3, 6"):
        audit(tmp_path / "run", rounds=[1]).cells()


def test_what_a_client_remembers_comes_into_the_round_in_which_it_is_attacked(tmp_path: Path) -> None:
    """Error feedback: what was pruned in earlier rounds is in the update of the attacked one."""
    pruning = gl.defences.Pruning(keep=0.3, residual=True)
    held, federation = data(12), Federation(clients=2, examples=2, training=gl.LocalTraining(lr=0.5))
    task, rounds = tiny(), (0, 3)
    planned = gl.Audit(
        task,
        held.tensors,
        ["ig:steps=2"],
        defences=[pruning],
        federation=federation,
        rounds=rounds,
        targets=2,
        unrelated=0,
    )
    snapshot = federation.weights_at(task, held, rounds, pruning)[3]
    assert snapshot.memories.keys() == {0, 1}
    seen = planned.side.victims(federation, pruning, 3, rounds, 0).seen[0]
    target = federation.target(held, 0)
    batch = held.batch(target.rows)
    with_, without = (
        gl.observe(task, batch, federation.training, pruning, weights=snapshot.weights, memory=memory).update
        for memory in (snapshot.memories[0], None)
    )
    assert largest_difference(seen.update, with_) < 1e-12
    assert largest_difference(seen.update, without) > 1e-4
    federation.train(task, held, 3, defence=pruning, out=tmp_path / "run")
    kept = Checkpoints(tmp_path / "run").at(3).memories
    assert largest_difference(kept[0]["unsent"], snapshot.memories[0]["unsent"]) < 1e-12


def test_an_audit_refuses_a_training_of_something_else(tmp_path: Path) -> None:
    trained(tmp_path / "run", rounds=1, checkpoints=[])
    with pytest.raises(gl.audit.AuditError, match="training of another task"):
        replace(audit(tmp_path / "run"), task=tiny()).cells()
    with pytest.raises(gl.audit.AuditError, match="training of another data"):
        replace(audit(tmp_path / "run"), data=private(24)).cells()
    with pytest.raises(gl.audit.AuditError, match="changes the weights before training"):
        audit(tmp_path / "run", defences=[Counting()]).cells()
    with pytest.raises(gl.audit.AuditError, match="batches of a stated size"):
        gl.Audit(tiny(), private(25), ["ig:steps=2"], federation=replace(LONG, examples=None)).run()


def test_nothing_is_warned_of_in_a_sound_training() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(None)
