"""A whole round in one process, with all its messages as bytes: its sums and its costs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gradleak.core import tree
from gradleak.core.settings import takes
from gradleak.core.tree import Tree
from gradleak.secure.client import Client, Member
from gradleak.secure.plan import Plan, Roster
from gradleak.secure.ring import FixedPoint, Part
from gradleak.secure.server import Server
from gradleak.secure.stages import Stage

T = TypeVar("T")
STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK)


@dataclass
class Cost:
    """Bytes sent and received, and seconds of work, of one client or of the server."""

    sent: int = 0
    received: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.sent + other.sent, self.received + other.received, self.seconds + other.seconds)


@dataclass
class Costs:
    """Costs of a round by stage. Clients and server take turns on one core: seconds are of work, not of waiting."""

    clients: dict[int, dict[Stage, Cost]] = field(default_factory=dict)
    server: dict[Stage, Cost] = field(default_factory=lambda: {stage: Cost() for stage in STAGES})

    def client(self, number: int | None = None) -> Cost:
        """Cost of the whole round for one client; None: the mean over all that sent anything."""
        if number is not None:
            return sum(self.clients[number].values(), Cost())
        each = [self.client(one) for one in self.clients]
        total, count = sum(each, Cost()), max(len(each), 1)
        return Cost(total.sent // count, total.received // count, total.seconds / count)

    @property
    def total(self) -> Cost:
        """Cost of the whole round for the server."""
        return sum(self.server.values(), Cost())

    @property
    def seconds(self) -> float:
        """Seconds of work of all clients and the server together."""
        return self.total.seconds + sum(self.client(one).seconds for one in self.clients)


@dataclass(frozen=True)
class Outcome:
    """What the server has at the end of a round."""

    sums: dict[str, NDArray[np.float64]]
    survivors: tuple[int, ...]  # whose values are in the sums
    costs: Costs


class _Post:
    """Carries messages between clients and server, and counts their costs."""

    def __init__(self, server: Server) -> None:
        self.server, self.costs = server, Costs()

    def client(self, number: int, stage: Stage, work: Callable[..., bytes | None], *args: Any) -> None:
        """Call a client's method and carry the message that it returns to the server."""
        cost = self.costs.clients.setdefault(number, {each: Cost() for each in STAGES})[stage]
        began = time.perf_counter()
        answer = work(*args)
        cost.seconds += time.perf_counter() - began
        cost.received += sum(len(value) for value in args if isinstance(value, bytes))
        if answer is not None:
            cost.sent += len(answer)
            self.at_server(stage, lambda: self.server.receive(answer), received=len(answer))

    def at_server(self, stage: Stage, work: Callable[[], T], received: int = 0) -> T:
        cost = self.costs.server[stage]
        began = time.perf_counter()
        result = work()
        cost.seconds += time.perf_counter() - began
        cost.received += received
        return result

    def advance(self) -> dict[int, bytes]:
        """End the stage: what the server sends, which counts for this stage."""
        stage = self.server.stage
        answers = self.at_server(stage, self.server.advance)
        self.costs.server[stage].sent += sum(map(len, answers.values()))
        return answers


def simulate(
    plan: Plan,
    members: Sequence[Member],
    values: Mapping[int, Mapping[str, NDArray[Any]]],
    dropouts: Mapping[int, Stage] | None = None,
) -> Outcome:
    """Run one round.

    values      client -> part -> vector
    dropouts    client -> the first stage in which it sends nothing
    """
    gone = dropouts or {}
    if unknown := gone.keys() - {member.number for member in members}:
        raise ValueError(f"Clients {sorted(unknown)} cannot drop out: they are not among the members.")
    server = Server(plan)
    post = _Post(server)
    clients = [member.join(plan) for member in members]

    def present(stage: Stage, heard: Container[int]) -> list[Client]:
        """The clients that send something in this stage: in the last one too, and not dropped out."""
        over = STAGES[: STAGES.index(stage) + 1]
        return [client for client in clients if client.number in heard and gone.get(client.number) not in over]

    for client in present(Stage.ADVERTISE, plan.roster):
        post.client(client.number, Stage.ADVERTISE, client.advertise)
    answers = post.advance()
    for client in present(Stage.SHARE, answers):
        post.client(client.number, Stage.SHARE, client.share, answers[client.number])
    answers = post.advance()
    for client in present(Stage.MASK, answers):
        post.client(client.number, Stage.MASK, client.accept, answers[client.number])
        post.client(client.number, Stage.MASK, client.mask, values[client.number])
    answers = post.advance()
    for client in present(Stage.UNMASK, answers):
        post.client(client.number, Stage.UNMASK, client.unmask, answers[client.number])
    post.advance()
    return Outcome(server.sums, server.survivors, post.costs)


@dataclass(frozen=True)
class Aggregated:
    """The sum of the survivors' values, as a tree of float64 tensors, with its costs and plan."""

    sum: Tree
    survivors: tuple[int, ...]
    costs: Costs
    plan: Plan

    @property
    def mean(self) -> Tree:
        """The mean over the survivors, each counted once."""
        return tree.scale(self.sum, 1 / len(self.survivors))


@dataclass(frozen=True, eq=False)
class RoundSettings:
    """The values of one round by client, and how it runs.

    dropouts    client -> the first stage in which it sends nothing
    members     the clients, if they live over several rounds; None: new ones for this round
    session     of the training; None: a new one

    The other settings are those of `Plan`.
    """

    values: Mapping[int, Mapping[str, Any]]
    _: KW_ONLY
    ring_bits: int = 64
    minimum: int = 3
    threshold: int | None = None
    neighbours: int | None = None
    dropouts: Mapping[int, Stage] | None = None
    members: Sequence[Member] | None = None
    session: bytes | None = None
    round: int = 0

    def run(
        self, parts: tuple[Part, ...], vectors: Mapping[int, Mapping[str, NDArray[Any]]], factor_bits: int = 0
    ) -> tuple[Plan, Outcome]:
        """Run the real protocol on these vectors, client -> part -> vector."""
        members = [Member(client) for client in self.values] if self.members is None else self.members
        if {member.number for member in members} != self.values.keys():
            raise ValueError("Every member needs values, and every client with values must be a member.")
        plan = Plan(
            Roster.of({member.number: member.identity.public for member in members}),
            parts,
            self.session or secrets.token_bytes(16),
            self.round,
            minimum=self.minimum,
            threshold=self.threshold,
            neighbours=self.neighbours,
            factor_bits=factor_bits,
            ring_bits=self.ring_bits,
        )
        return plan, simulate(plan, members, vectors, self.dropouts)


@dataclass(frozen=True, eq=False, kw_only=True)
class UpdateRound(RoundSettings):
    """A round that sums updates, dicts of tensors.

    clip            the largest magnitude of an entry; larger ones are refused
    fraction_bits   None: as many as fit the ring
    """

    clip: float
    fraction_bits: int | None = None


@takes(UpdateRound)
def aggregate(settings: UpdateRound) -> Aggregated:
    """Securely sum updates, dicts of tensors by client, in one process: a round of the real protocol.

    `UpdateRound` and `RoundSettings` list the settings.
    """
    values, clip = settings.values, settings.clip
    like = next(iter(values.values()), None)
    if like is None:
        raise ValueError("There is nothing to sum: give the values of at least two clients.")
    for client, update in values.items():
        tree.map(_same_shape, like, update)
        if not all(leaf.is_floating_point() for leaf in tree.leaves(update)):
            raise ValueError(f"All tensors must be of floating point; client {client} has others. Leave them out.")
    coding = (
        FixedPoint.finest(clip, len(values), ring_bits=settings.ring_bits)
        if settings.fraction_bits is None
        else FixedPoint(clip, settings.fraction_bits)
    )
    vectors = {client: {"update": flat(update)} for client, update in values.items()}
    plan, done = settings.run((Part("update", tree.size(like), coding),), vectors)
    return Aggregated(restored(done.sums["update"], like), done.survivors, done.costs, plan)


def flat(update: Mapping[str, Any]) -> NDArray[np.float64]:
    """All entries of an update as one float64 vector on the CPU."""
    return tree.flatten(tree.map(lambda leaf: leaf.detach().to("cpu", torch.float64), update)).numpy()


def restored(vector: NDArray[np.float64], like: Mapping[str, Any]) -> Tree:
    """The inverse of `flat`: float64 tensors with the names and shapes of `like`."""
    return tree.unflatten(torch.from_numpy(vector), like)


def _same_shape(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.shape != other.shape:
        raise ValueError(f"All clients must send the same shapes; given {tuple(one.shape)} and {tuple(other.shape)}.")
