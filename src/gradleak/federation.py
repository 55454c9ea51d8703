"""Clients, their data and their rounds: who trains on what, and what the weights are at a given round.

Kept to the honest minimum: an even random split, every client in every round, one client after the other. Planned:
clients of a round vectorised, partial participation, label-skewed (Dirichlet) splits, checkpoints of long
trainings, and clients that carry a defence's memory into the round in which they are attacked.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradleak import draws as randomness
from gradleak import tree
from gradleak.defence import Defence
from gradleak.local import ClientState, LocalTraining, observe
from gradleak.observation import Observation
from gradleak.task import Batch, Task
from gradleak.tree import Params


class FederationError(ValueError):
    """The data do not reach for the clients, the examples or the targets that were asked for."""


class Examples(Protocol):
    """Data that clients can be given, in model-input space."""

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor) -> Batch: ...


class Snapshot(NamedTuple):
    """What the server sends at a round."""

    weights: Params
    buffers: Params


class Target(NamedTuple):
    """One attacked update: whose, and from which rows of the data. The rows are the auditor's, never the attacker's."""

    client: int
    rows: Tensor


@dataclass(frozen=True)
class Federation:
    """FedAvg over `clients` that hold equal shares of the data; in a round each trains on `examples` of its own.

    A client goes through its share in turn, `examples` per round. Targets are the same batches at every round, so that
    rounds can be compared: target t is the (t // clients)-th batch of client t % clients.
    """

    clients: int = 1
    training: LocalTraining = LocalTraining(lr=1.0)
    examples: int = 1
    seed: int = 0  # of the split and of the clients' shuffles
    wire: str = "update"  # or "weights": see `observe`

    def __post_init__(self) -> None:
        for name in ("clients", "examples"):
            if getattr(self, name) < 1:
                raise FederationError(f"{name} must be at least 1; given {getattr(self, name)}.")

    def partition(self, count: int) -> list[Tensor]:
        """The rows of each client: a random split into equal shares (sizes differ by at most one)."""
        if count < self.clients * self.examples:
            raise FederationError(
                f"{count} examples cannot give each of {self.clients} clients {self.examples}: "
                "fewer clients, fewer examples per round, or more data."
            )
        shuffled = torch.randperm(count, generator=self._generator("partition"))
        return [shuffled[client :: self.clients] for client in range(self.clients)]

    def target(self, count: int, index: int) -> Target:
        """The batch of target number `index` among `count` examples of data."""
        client, slot = index % self.clients, index // self.clients
        share = self.partition(count)[client]
        rows = share[slot * self.examples : (slot + 1) * self.examples]
        if len(rows) < self.examples:
            raise FederationError(
                f"Target {index} needs batch {slot + 1} of {self.examples} examples from client {client}, which holds "
                f"{len(share)} in all: fewer targets, more clients or more data."
            )
        return Target(client, rows)

    def weights_at(
        self, task: Task, data: Examples, rounds: Iterable[int], defence: Defence | None = None
    ) -> dict[int, Snapshot]:
        """Train, and keep what the server sends at each of these rounds (0: before any training)."""
        wanted = set(rounds)
        defence = defence or Defence()
        now = Snapshot(defence.initial(task.weights(), {}), task.buffers())
        kept = {}
        states = [ClientState() for _ in range(self.clients)]
        for number in range(max(wanted, default=-1) + 1):
            if number in wanted:
                kept[number] = now
            if number < max(wanted):
                now = self._round(task, data, number, defence, now, states)
        return kept

    def _round(
        self, task: Task, data: Examples, number: int, defence: Defence, now: Snapshot, states: list[ClientState]
    ) -> Snapshot:
        uploads = []
        extras = defence.broadcast(now.weights, {})
        for client, share in enumerate(self.partition(len(data))):
            # The optimiser starts afresh, the buffers are the server's; only a defence's memory stays with the client.
            key = randomness.key("federation", self.seed, client, number)
            state = ClientState(memory=states[client].memory, buffers=now.buffers, extras=extras, key=key)
            rows = share[(torch.arange(self.examples) + number * self.examples) % len(share)]
            order = self.training.order(self.examples, self._generator("order", client, number))
            upload, states[client] = self.training.run(task, now.weights, data.batch(rows), defence, state, order)
            uploads.append(upload)
        step = defence.aggregate(uploads, [upload.num_examples for upload in uploads], {})
        return Snapshot(
            tree.detach(tree.subtract(now.weights, step)),
            _mean([upload.buffers or now.buffers for upload in uploads]),
        )

    def observe(
        self, task: Task, batch: Batch, weights: Params, defence: Defence | None, *, key: str, round: int, seed: int
    ) -> Observation:
        """What the server sees of one client that trains on `batch` from these weights and the task's buffers."""
        seen = observe(task, batch, self.training, defence, weights=weights, key=key, seed=seed, wire=self.wire)
        return replace(seen, round=round)

    def _generator(self, *purpose: object) -> torch.Generator:
        return torch.Generator().manual_seed(int(randomness.key("federation", self.seed, *purpose)[0]))


def with_buffers(task: Task, buffers: Params) -> Task:
    """The task with these buffers in a model of its own; without any, the task itself."""
    if not buffers:
        return task
    model = copy.deepcopy(task.model)
    model.load_state_dict(buffers, strict=False)
    return replace(task, model=model)


def _mean(buffers: Sequence[Params]) -> Params:
    """Running statistics are averaged, as FedAvg does with a whole state_dict; counters are the first client's."""

    def mean(*values: Tensor) -> Tensor:
        return torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]

    return tree.detach(tree.map(mean, *buffers))
