"""Federated training: who holds and trains on what, and the weights at each round.

partition.py       who holds which examples          participation.py   who takes part in a round
clients.py         training the clients of a round   uploads.py         which uploads the server accepts
rounds.py          one round                         training.py        many, with metrics, checkpoints and resuming
swa.py             averages of models                samples.py         images from a denoiser, over rounds
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gradleak.core import random as randomness
from gradleak.core import registry
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
from gradleak.federation.rounds import Examples, Remembered, Round, Rounds, Snapshot, State, moved
from gradleak.federation.swa import EMA, SWA, Averaging
from gradleak.federation.uploads import Accepted, DroppedOut, ExcludedClient, accepted
from gradleak.scenario.client import LocalTraining, observe
from gradleak.scenario.defence import Defence
from gradleak.scenario.guarantee import Exposure
from gradleak.scenario.observation import Observation
from gradleak.scenario.task import Batch, Task

if TYPE_CHECKING:
    from gradleak.engine import Engine
    from gradleak.federation.training import Trained

__all__ = ["EMA", "IID", "SWA", "Accepted", "Averaging", "BalancedIID", "ClassDirichlet", "ClientDirichlet"]
__all__ += ["DroppedOut", "Everyone", "Examples", "ExcludedClient", "Federation", "FederationError", "Fixed"]
__all__ += ["Participation", "Partition", "Poisson"]
__all__ += ["Remembered", "Round", "Rounds", "Snapshot", "State", "Target", "accepted", "network_of", "with_buffers"]


class Target(NamedTuple):
    """One attacked update: its client and its rows of the data. Only the auditor knows the rows, never the attacker."""

    client: int
    rows: Tensor


@dataclass(frozen=True)
class Federation:
    """FedAvg: clients train from theta, the server takes theta - server_lr * sum_i p_i (theta - theta_i).

    clients        number of clients that share the data
    training       what a client does in a round; `LocalTraining(lr)`, one full-batch step, is FedSGD
    examples       number of its examples that a client trains on per round, taken in turn; None: all, in every round
    seed           of the split, the participation, and the clients' shuffles and noise
    wire           "update" or "weights": see `observe`
    split          who holds what: iid, iid_balanced, dir_class:alpha=0.5,min_size=10, dir_client:alpha=0.5, in_order
    participation  who takes part in a round: all, fixed:number=5 (without replacement), poisson:rate=0.1
    server_lr      1 is FedAvg
    weighting      p_i of a client: "examples", its share of the round's examples; "uniform", one over the clients
    averaging      None, or an average of models for evaluation: swa:start=75,every=10, ema:decay=0.99

    An audit attacks the same batches of `examples` at every round, so that rounds can be compared: target t is the
    (t // clients)-th batch of client t % clients.

    Server-side hooks of a defence (`initial`, `broadcast`, `aggregate`, `idle`) get the dict `server`:
        key            2 words for `random.Draws`, different for every round and hook
        round          from 0
        clients        in the federation, not in the round
        participation  the expected fraction of clients per round
        weights        that were sent (`aggregate` and `idle` only)
        memory         what `advance` returned last (not for `initial`); `advance` is first called for round -1
        task, load     what `initial` may train with (`initial` only)

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
            if isinstance(spelling := getattr(self, name), str):
                object.__setattr__(self, name, registry.parse(kind, spelling))
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
        """The rows of each client. A split that needs no labels takes the number of examples instead of the data."""
        count = data if isinstance(data, int) else len(data)
        if count < self.clients * (self.examples or 1):
            raise FederationError(
                f"{count} examples cannot give each of {self.clients} clients {self.examples or 1}: "
                "use fewer clients, fewer examples per round, or more data."
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
                f"{len(share)} in all: use fewer targets, more clients or more data."
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
        """Train, and return what the server sends at each of these rounds (0: before any training)."""
        wanted = set(rounds)
        work = Rounds(self, task, data, defence, engine, measure=False)
        home = partial(moved, like=task.weights())  # the engine may have trained on another device
        state, snapshots = work.first(), {}
        for number in range(max(wanted, default=-1) + 1):
            if number in wanted:
                sent = state.snapshot
                memories = {client: home(memory) for client, memory in sent.memories.items()}
                snapshots[number] = Snapshot(home(sent.weights), home(sent.buffers), memories, home(sent.server))
            if number < max(wanted):
                state, _ = work.after(state)
        return snapshots

    @property
    def train(self) -> Callable[..., Trained]:
        """federation.train(task, data, rounds, ...): `training.train` of this federation, with its keywords."""
        from gradleak.federation.training import train

        return partial(train, self)

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
        remembered: Remembered | None = None,
    ) -> Observation:
        """What the server sees of one client that trains on `batch` from these weights and the task's buffers."""
        memories = remembered or Remembered()
        observation = observe(
            task,
            batch,
            self.training_at(round),
            defence,
            weights=weights,
            key=key,
            seed=seed,
            wire=self.wire,
            memory=memories.client,
            server=self.server("broadcast", round, memories.server),
        )
        return replace(observation, round=round)

    def training_at(self, round: int) -> LocalTraining:
        """The clients' recipe in a round: `training`, with the round's learning rate if `averaging` varies it."""
        lr = self.lr_at(round)
        return self.training if lr is None else replace(self.training, lr=lr)

    def lr_at(self, round: int) -> float | Tensor | None:
        """The clients' learning rate in a round; None: always the recipe's."""
        if self.averaging is None or not self.averaging.cycles:
            return None
        return self.training.lr * self.averaging.factor(round)

    def server(self, hook: str, round: int, memory: Tree | None = None) -> Tree:
        """The dict `server` of a server-side hook: see the docstring of the class."""
        return {
            **({} if memory is None else {"memory": memory}),
            "key": randomness.key("federation", self.seed, "server", hook, round),
            "round": round,
            "clients": self.clients,
            "participation": self.participation.fraction(self.clients),
        }

    # --- descriptions ------------------------------------------------------------------------------------------------

    def exposure(self, rounds: int, data: int | Examples, delta: float = 1e-5) -> Exposure:
        """How often a client takes part in this many rounds: the argument of `Defence.guarantee`.

        `examples` is the smallest share: an example is least protected where a client has few others.
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
        """All fields but `training` as plain values, for files; `Federation(**settings)` reads them back."""
        plain = ("clients", "examples", "seed", "wire", "server_lr", "weighting")
        spelled = {name: registry.spelled(getattr(self, name)) for name in ("split", "participation")}
        averaging = None if self.averaging is None else registry.spelled(self.averaging)
        return {**{name: getattr(self, name) for name in plain}, **spelled, "averaging": averaging}

    def generator(self, *purpose: object) -> torch.Generator:
        """Random numbers for one purpose, from this federation's seed."""
        return torch.Generator().manual_seed(int(randomness.key("federation", self.seed, *purpose)[0]))


def with_buffers(task: Task, buffers: Params) -> Task:
    """The task with these buffers in a copy of its model; without buffers, the task itself."""
    if not buffers:
        return task
    model = copy.deepcopy(task.model)
    model.load_state_dict(buffers, strict=False)
    return replace(task, model=model)


def network_of(task: Task, sent: Snapshot) -> nn.Module:
    """A copy of the task's network with these weights, in evaluation mode."""
    model = copy.deepcopy(task.model).eval()
    model.load_state_dict({**sent.weights, **sent.buffers}, strict=False)
    return model


def _labels(data: int | Examples, split: Partition) -> Callable[[], Tensor]:
    """A function that reads the class of every example; only some splits call it."""

    def labels() -> Tensor:
        if isinstance(data, int):
            raise FederationError(f"The split {split.name} looks at labels: give the data, not their number.")
        y: Tensor | None = getattr(data, "labels", None)  # data that know them without reading every example
        if y is None:
            parts = [data.batch(rows).get("y") for rows in torch.arange(len(data)).split(1024)]
            y = torch.cat([part.cpu() for part in parts if part is not None]) if parts[0] is not None else None
        if y is None or y.dim() != 1 or y.is_floating_point():
            raise FederationError(f"The split {split.name} needs one class index y per example. Use split='iid'.")
        return y.cpu()

    return labels
