"""Clients, shares and rounds: the split is fair and repeatable, one client is plain training, many are their mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import largest_difference, private, tiny
from gradleak import tree
from gradleak.audit.private import Stored
from gradleak.federation import Federation, FederationError, with_buffers
from gradleak.rules import SGD


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
