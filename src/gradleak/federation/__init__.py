"""Clients, their data and their rounds: who trains on what, and what the weights are at a given round.

partition.py       who holds which examples        participation.py   who takes part in a round
clients.py         the clients of a round, together uploads.py        which uploads a server takes
rounds.py          one round                       training.py        many, with metrics, checkpoints and resuming
swa.py             averages of models, for evaluation samples.py        pictures that a denoiser makes, over rounds
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gradleak.core import random as randomness
from gradleak.core import registry, tree
from gradleak.core.tree import Params, Tree
from gradleak.federation.participation import Everyone, Fixed, Participation, Poisson
from gradleak.federation.partition import (
    IID,
    BalancedIID,
    ClassDirichlet,
    ClientDirichlet,
    FederationError,
    Partition,
)
from gradleak.federation.rounds import Examples, Round, Rounds, Snapshot, State, moved
from gradleak.federation.swa import EMA, SWA, Averaging
from gradleak.federation.uploads import Accepted, DroppedOut, ExcludedClient, accepted
from gradleak.scenario.client import LocalTraining, observe
from gradleak.scenario.defence import Defence
from gradleak.scenario.guarantee import Exposure
from gradleak.scenario.observation import Observation
from gradleak.scenario.task import Batch, Task

if TYPE_CHECKING:
    from gradleak.engine import Engine
    from gradleak.federation.samples import Samples
    from gradleak.federation.training import Trained

__all__ = [
    "EMA",
    "IID",
    "SWA",
    "Accepted",
    "Averaging",
    "BalancedIID",
    "ClassDirichlet",
    "ClientDirichlet",
    "DroppedOut",
    "Everyone",
    "Examples",
]
__all__ += ["ExcludedClient", "Federation", "FederationError", "Fixed", "Participation", "Partition", "Poisson"]
__all__ += ["Round", "Rounds", "Snapshot", "State", "Target", "accepted", "network_of", "with_buffers"]


class Target(NamedTuple):
    """One attacked update: whose, and from which rows of the data. The rows are the auditor's, never the attacker's."""

    client: int
    rows: Tensor


@dataclass(frozen=True)
class Federation:
    """FedAvg: clients train from theta, the server takes theta - server_lr * sum_i p_i (theta - theta_i).

    clients        among whom the data are divided
    training       what a client does in a round; `LocalTraining(lr)`, one full-batch step, is FedSGD
    examples       of its share, that a client trains on in a round, in turn; None: all of it, in every round
    seed           of the split, of who takes part, and of the clients' shuffles and noise
    wire           "update" or "weights": see `observe`
    split          who holds what: iid, iid_balanced, dir_class:alpha=0.5,min_size=10, dir_client:alpha=0.5, in_order
    participation  who takes part in a round: all, fixed:number=5 (without replacement), poisson:rate=0.1
    server_lr      1 is FedAvg
    weighting      p_i of a client: "examples", its share of the round's examples; "uniform", one over the clients
    averaging      None, or an average of models for evaluation: swa:start=75,every=10, ema:decay=0.99

    Targets of an audit are the same batches of `examples` at every round, so that rounds can be compared: target t is
    the (t // clients)-th batch of client t % clients.

    Server-side hooks of a defence (`initial`, `broadcast`, `aggregate`, `idle`) are given the dict `server` with the
    entries "key" (2 words for `draws.Draws`, different for every round and hook), "round" (from 0), "clients" (in the
    federation, not in the round) and "participation" (the fraction of them that a round is expected to have);
    `aggregate` and `idle` also find the "weights" that were sent, all but `initial` the "memory" that `advance`
    returned last (it is first called before round 0, as of round -1), and `initial` what it may train with ("task",
    "load").

    References: McMahan et al., AISTATS 2017 (FedSGD, FedAvg); Reddi et al., ICLR 2021 (the server's learning rate).
    """

    clients: int = 1
    training: LocalTraining = LocalTraining(lr=1.0)
    examples: int | None = 1
    seed: int = 0
    wire: str = "update"
    split: Partition = IID()
    participation: Participation = Everyone()
    server_lr: float = 1.0
    weighting: str = "examples"
    averaging: Averaging | None = None

    def __post_init__(self) -> None:
        for name, kind in (("split", "partition"), ("participation", "participation"), ("averaging", "averaging")):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, registry.parse(kind, given))
        for name in ("clients", "examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FederationError(f"{name} must be at least 1; given {value}.")
        if not self.server_lr > 0:
            raise FederationError(f"server_lr must be positive; given {self.server_lr}.")
        if self.weighting not in ("examples", "uniform"):
            raise FederationError(f"weighting must be 'examples' or 'uniform'; given {self.weighting!r}.")
        if isinstance(self.participation, Fixed) and self.participation.number > self.clients:
            raise FederationError(
                f"{self.participation.number} clients per round cannot be chosen from {self.clients}."
            )

    # --- who holds what ----------------------------------------------------------------------------------------------

    def partition(self, data: int | Examples) -> list[Tensor]:
        """The rows of each client, of these data or, for a split that asks for no labels, of so many examples."""
        count = data if isinstance(data, int) else len(data)
        if count < self.clients * (self.examples or 1):
            raise FederationError(
                f"{count} examples cannot give each of {self.clients} clients {self.examples or 1}: "
                "fewer clients, fewer examples per round, or more data."
            )
        return self.split.shares(count, self.clients, _labels(data, self.split), self.generator("partition"))

    def target(self, data: int | Examples, index: int) -> Target:
        """The batch of target number `index`."""
        shares = self.partition(data)
        client, slot = index % self.clients, index // self.clients
        share = shares[client]
        size = len(share) if self.examples is None else self.examples
        rows = share[slot * size : (slot + 1) * size]
        if len(rows) < size or not size:
            raise FederationError(
                f"Target {index} needs batch {slot + 1} of {size} examples from client {client}, which holds "
                f"{len(share)} in all: fewer targets, more clients or more data."
            )
        return Target(client, rows)

    # --- training ----------------------------------------------------------------------------------------------------

    def weights_at(
        self,
        task: Task,
        data: Examples,
        rounds: Iterable[int],
        defence: Defence | None = None,
        engine: Engine | None = None,
    ) -> dict[int, Snapshot]:
        """Train, and keep what the server sends at each of these rounds (0: before any training)."""
        wanted = set(rounds)
        work = Rounds(self, task, data, defence, engine, measure=False)
        home = partial(moved, like=task.weights())  # the engine may have trained elsewhere
        like = next(tree.leaves(task.weights()))
        state, kept = work.first(), {}
        for number in range(max(wanted, default=-1) + 1):
            if number in wanted:
                sent = state.snapshot
                memories = {client: tree.to(held, like.device, like.dtype) for client, held in sent.memories.items()}
                kept[number] = Snapshot(home(sent.weights), home(sent.buffers), memories, home(sent.server))
            if number < max(wanted):
                state, _ = work.after(state)
        return kept

    def train(
        self,
        task: Task,
        data: Examples,
        rounds: int,
        *,
        defence: Defence | None = None,
        test: Examples | None = None,
        every: int = 10,
        checkpoints: Sequence[int] = (),
        out: str | Path | None = None,
        engine: Engine | None = None,
        progress: Callable[[dict[str, Any]], None] | None = None,
        samples: Samples | None = None,
    ) -> Trained:
        """Train for so many rounds in all, measure, and keep checkpoints: see `training.train`."""
        from gradleak.federation.training import train

        return train(
            self,
            task,
            data,
            rounds,
            defence=defence,
            test=test,
            every=every,
            checkpoints=checkpoints,
            out=out,
            engine=engine,
            progress=progress,
            samples=samples,
        )

    def observe(
        self,
        task: Task,
        batch: Batch,
        weights: Params,
        defence: Defence | None,
        *,
        key: str,
        round: int,
        seed: int,
        memory: Tree | None = None,
        held: Tree | None = None,
    ) -> Observation:
        """What the server sees of one client that trains on `batch` from these weights and the task's buffers.

        `memory`: what the client kept (`Snapshot.memories`). `held`: what the server did (`Snapshot.server`).
        """
        seen = observe(
            task,
            batch,
            self.training_at(round),
            defence,
            weights=weights,
            key=key,
            seed=seed,
            wire=self.wire,
            memory=memory,
            server=self.server("broadcast", round, held),
        )
        return replace(seen, round=round)

    def training_at(self, round: int) -> LocalTraining:
        """The clients' recipe in a round: `training`, with the learning rate where `averaging` has it go in cycles."""
        lr = self.lr_at(round)
        return self.training if lr is None else replace(self.training, lr=lr)

    def lr_at(self, round: int) -> float | Tensor | None:
        """The clients' learning rate in a round; None: always the recipe's."""
        if self.averaging is None or not self.averaging.cycles:
            return None
        return self.training.lr * self.averaging.factor(round)

    def server(self, hook: str, round: int, held: Tree | None = None) -> Tree:
        """What a hook on the server's side is told: see the head of the class. `held`: what the server remembers."""
        return {
            **({} if held is None else {"memory": held}),
            "key": randomness.key("federation", self.seed, "server", hook, round),
            "round": round,
            "clients": self.clients,
            "participation": self.participation.fraction(self.clients),
        }

    # --- in other words ----------------------------------------------------------------------------------------------

    def exposure(self, rounds: int, data: int | Examples, delta: float = 1e-5) -> Exposure:
        """How often and how a client takes part in so many rounds: what `Defence.guarantee` asks for.

        `examples` is the smallest share: the client that is least protected by the others of its own.
        """
        smallest = min(len(share) for share in self.partition(data))
        return Exposure(
            rounds=rounds,
            clients=self.clients,
            participation=self.participation.fraction(self.clients),
            sampling=self.participation.name,
            examples=smallest if self.examples is None else min(self.examples, smallest),
            training=self.training,
            delta=delta,
        )

    def settings(self) -> dict[str, Any]:
        """Everything but the client's recipe as plain values, for files; `Federation(**settings)` reads it back."""
        plain = ("clients", "examples", "seed", "wire", "server_lr", "weighting")
        spelled = {name: registry.spelled(getattr(self, name)) for name in ("split", "participation")}
        averaging = None if self.averaging is None else registry.spelled(self.averaging)
        return {**{name: getattr(self, name) for name in plain}, **spelled, "averaging": averaging}

    def generator(self, *purpose: object) -> torch.Generator:
        """The source of random numbers for a purpose, of this federation's seed."""
        return torch.Generator().manual_seed(int(randomness.key("federation", self.seed, *purpose)[0]))


def with_buffers(task: Task, buffers: Params) -> Task:
    """The task with these buffers in a model of its own; without any, the task itself."""
    if not buffers:
        return task
    model = copy.deepcopy(task.model)
    model.load_state_dict(buffers, strict=False)
    return replace(task, model=model)


def network_of(task: Task, sent: Snapshot) -> nn.Module:
    """The task's network with these weights: one of its own, in evaluation mode."""
    model = copy.deepcopy(task.model).eval()
    model.load_state_dict({**sent.weights, **sent.buffers}, strict=False)
    return model


def _labels(data: int | Examples, split: Partition) -> Callable[[], Tensor]:
    """The class of every example, read when a split asks for it."""

    def labels() -> Tensor:
        if isinstance(data, int):
            raise FederationError(f"The split {split.name} looks at labels: give the data, not their number.")
        held: Tensor | None = getattr(data, "labels", None)  # data that know them without reading every example
        if held is None:
            parts = [data.batch(rows).get("y") for rows in torch.arange(len(data)).split(1024)]
            held = torch.cat([part.cpu() for part in parts if part is not None]) if parts[0] is not None else None
        if held is None or held.dim() != 1:
            raise FederationError(f"The split {split.name} needs one label y per example. Use split='iid'.")
        return held.cpu()

    return labels
