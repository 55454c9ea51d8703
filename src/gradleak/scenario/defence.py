"""Defences: hooks around the client rule and the server, each with the identity of plain FedAvg as its default.

State is passed and returned, never mutated: what a client must remember between rounds is what `remember` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.tree import Params, Tree
from gradleak.scenario.guarantee import Exposure, Guarantee

if TYPE_CHECKING:
    from gradleak.core.random import Draws
    from gradleak.parts.view import TargetView
    from gradleak.scenario.task import Batch, Task


class Compute(Protocol):
    """The gradient at these weights on this batch: the rest of the chain.

    A pass with `statistics=False` does not change BatchNorm's running statistics: for a step that computes several
    gradients and counts as one.
    """

    def __call__(self, weights: Params, batch: Batch, /, *, statistics: bool = True) -> Params: ...


@dataclass(frozen=True, eq=False)
class Upload:
    """What leaves a client: one or more trees by name ({"update": ...}; an optimiser may send its moments instead)."""

    payload: dict[str, Params]
    num_examples: int
    buffers: Params | None = None

    def map(self, function: Callable[[Params], Params]) -> Upload:
        """Apply a function to every tree of the payload."""
        return replace(self, payload={name: function(params) for name, params in self.payload.items()})


@dataclass(frozen=True, eq=False)
class Client:
    """All that a client-side hook may look at. `moved` (start minus end) is empty until local training is done."""

    task: Task
    start: Params
    moved: Params
    batch: Batch
    optimiser: Tree
    extras: dict[str, Params]
    memory: Tree
    draws: Draws | None

    @property
    def end(self) -> Params:
        return tree.subtract(self.start, self.moved)


@dataclass(frozen=True)
class Defence:
    """Every hook defaults to plain FedAvg. Override the phases that the defence changes."""

    last: ClassVar[bool] = False  # it sends something other than an update: no later member may change the upload

    @property
    def name(self) -> str:
        """The name in tables and errors."""
        return type(self).__name__

    def demand(self, task: Task, server: Tree) -> None:
        """Raise ValueError if the model, or public data (server["load"]), do not fit what `initial` needs. Cheap."""

    def initial(self, weights: Params, server: Tree) -> Params:
        """The weights before round 0, and by name any buffers that changed with them.

        Here `server` has two more entries: "task", and "load", which is `gradleak.data.load` (public images by name).
        """
        return weights

    def broadcast(self, weights: Params, server: Tree) -> dict[str, Params]:
        """Extra tensors for the clients of this round; the server made them, so the attacker has them too."""
        return {}

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        """The gradient a local step uses. `compute(weights, batch)` is the rest of the chain."""
        return compute(weights, batch)

    def upload(self, upload: Upload, client: Client) -> Upload:
        """What leaves the client, given what its training produced."""
        return upload

    def remember(self, before: Upload, after: Upload, client: Client) -> Tree:
        """What this client keeps for its next round, such as the part of the update that was not sent."""
        return {}

    def reveal(self, uploads: Sequence[Upload], sizes: Sequence[int]) -> Params:
        """What the server can compute from the uploads; server and attacker share it. Default: the weighted mean."""
        return tree.mean([upload.payload["update"] for upload in uploads], sizes)

    def aggregate(self, uploads: Sequence[Upload], sizes: Sequence[int], server: Tree) -> Params:
        """The step the server takes (subtracted from the weights)."""
        return self.reveal(uploads, sizes)

    def idle(self, server: Tree) -> Params | None:
        """The step after a round without uploads; None: no step. Central noise hides that the round was empty."""
        return None

    def advance(self, before: Params, after: Params, uploads: Sequence[Upload], server: Tree) -> Tree:
        """The server's memory for its next round, as tensors: `broadcast`, `aggregate`, `idle` and the next call of
        this hook find it in server["memory"]. Nothing is mutated.

        `before` and `after`: the weights that were sent, and those that the round ended with. Called once before round
        0 as for a round without uploads, with an empty memory and `after` the weights themselves; then in every round.
        """
        return {}

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        """The attacker's version: noise off, data-dependent masks frozen from the observation. Runs inside a lane."""
        return self

    def replayed(self, scene: TargetView, task: Task) -> Defence:
        """The attacker's version when other members follow in a chain: the observation then shows THEIR output.

        Override it if `assumed` reads something off the update, and return a version that computes it instead.
        """
        return self.assumed(scene, task)

    def reconsidered(self, scene: TargetView, predicted: Params) -> Defence:
        """The attacker's version once a candidate predicts this update, without noise and in all coordinates.

        Override it if `assumed` guesses which coordinates are noisy: the residual of a candidate shows them better than
        the update does. The result guesses nothing any more.
        """
        return self

    def noise_variance(self, scene: TargetView) -> Params:
        """Per coordinate of the update: 0 exact, inf dropped."""
        return tree.zeros_like(scene.update)

    def visible(self, update: Params, scene: TargetView) -> Params:
        """What the attacker compares: a linear map of the observed update, and the same map of a predicted one.

        By default a coordinate has the weight s / sqrt(s^2 + variance), with s^2 the mean square of the observed
        update: exact ones have weight 1, dropped ones (infinite variance) 0. Attackers call it on the defence that
        `assumed` returned.
        """
        if not overrides(self, "noise_variance"):
            return update
        signal = tree.squared_norm(scene.update) / tree.size(scene.update)

        def weigh(value: Tensor, variance: Tensor) -> Tensor:
            return value * torch.where(variance > 0, (signal / (signal + variance)).sqrt(), 1.0)

        return tree.map(weigh, update, self.noise_variance(scene))

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """What is proved about a client that takes part as `exposure` says."""
        return Guarantee()


@dataclass(frozen=True)
class Chain(Defence):
    """Several defences, in the order of the data flow.

    `gradient` hooks nest: the first is outermost. `upload` hooks run left to right: Chain(Clip(), Noise()) clips, then
    adds noise. At most one member may decide what the server can reveal, and at most one how it aggregates.
    """

    members: tuple[Defence, ...] = field(default=())

    def __init__(self, *members: Defence) -> None:
        object.__setattr__(self, "members", members)
        for hook in ("reveal", "aggregate"):
            owners = [member.name for member in members if overrides(member, hook)]
            if len(owners) > 1:
                raise ValueError(f"{' and '.join(owners)} each define `{hook}`; a chain can hold one of them.")
        for position, member in enumerate(members):
            for later in members[position + 1 :] if member.last else ():
                if overrides(later, "upload"):
                    raise ValueError(f"{member.name} does not send an update, so {later.name} must come before it.")

    @property
    def name(self) -> str:
        """The names of all members."""
        return " + ".join(member.name for member in self.members) or "Defence"

    def _owner(self, hook: str) -> Defence:
        return next((member for member in self.members if overrides(member, hook)), Defence())

    def demand(self, task: Task, server: Tree) -> None:
        for member in self.members:
            member.demand(task, server)

    def initial(self, weights: Params, server: Tree) -> Params:
        state = dict(weights)
        for member in self.members:
            state |= member.initial({name: state[name] for name in weights}, server)
        return state

    def broadcast(self, weights: Params, server: Tree) -> dict[str, Params]:
        extras: dict[str, Params] = {}
        for position, member in enumerate(self.members):
            sent = member.broadcast(weights, _for_member(server, position))
            if twice := extras.keys() & sent.keys():
                raise ValueError(f"Two members of {self.name} broadcast {', '.join(sorted(twice))}: chain it once.")
            extras |= sent
        return extras

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        for position, member in reversed(list(enumerate(self.members))):
            compute = _nested(member, compute, _inside(client, position))
        return compute(weights, batch)

    def upload(self, upload: Upload, client: Client) -> Upload:
        """One member after the other."""
        for position, member in enumerate(self.members):
            upload = member.upload(upload, _inside(client, position))
        return upload

    def remember(self, before: Upload, after: Upload, client: Client) -> Tree:
        memory: Tree = {}
        upload = before
        for position, member in enumerate(self.members):
            sent = member.upload(upload, _inside(client, position))
            memory[str(position)] = member.remember(upload, sent, _inside(client, position))
            upload = sent
        return memory

    def reveal(self, uploads: Sequence[Upload], sizes: Sequence[int]) -> Params:
        return self._owner("reveal").reveal(uploads, sizes)

    def aggregate(self, uploads: Sequence[Upload], sizes: Sequence[int], server: Tree) -> Params:
        for position, member in enumerate(self.members):
            if overrides(member, "aggregate"):
                return member.aggregate(uploads, sizes, _for_member(server, position))
        return self.reveal(uploads, sizes)

    def idle(self, server: Tree) -> Params | None:
        for position, member in enumerate(self.members):
            if overrides(member, "idle"):
                return member.idle(_for_member(server, position))
        return None

    def advance(self, before: Params, after: Params, uploads: Sequence[Upload], server: Tree) -> Tree:
        memories = {
            str(position): member.advance(before, after, uploads, _for_member(server, position))
            for position, member in enumerate(self.members)
        }
        return {position: memory for position, memory in memories.items() if memory}

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        sending = [position for position, member in enumerate(self.members) if overrides(member, "upload")]
        last = sending[-1] if sending else len(self.members)
        return Chain(
            *(
                member.replayed(scene, task) if position < last else member.assumed(scene, task)
                for position, member in enumerate(self.members)
            )
        )

    def replayed(self, scene: TargetView, task: Task) -> Defence:
        return Chain(*(member.replayed(scene, task) for member in self.members))

    def reconsidered(self, scene: TargetView, predicted: Params) -> Defence:
        """Only the last member that changes the upload can be read off the observation."""
        sending = [position for position, member in enumerate(self.members) if overrides(member, "upload")]
        last = sending[-1] if sending else None
        return Chain(
            *(
                member.reconsidered(scene, predicted) if position == last else member
                for position, member in enumerate(self.members)
            )
        )

    def visible(self, update: Params, scene: TargetView) -> Params:
        for member in self.members:
            update = member.visible(update, scene)
        return update

    def noise_variance(self, scene: TargetView) -> Params:
        variance = tree.zeros_like(scene.update)
        for member in self.members:
            variance = tree.add(variance, member.noise_variance(scene))
        return variance

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """The epsilon of the last member, unless another member could break its proof; then none is claimed.

        Other members see the raw update, batch and state. One that computes more gradients uses the data more often
        than was counted. If the proof is about the gradients, another member's change of the upload may show the data.
        """
        if not self.members:
            return Guarantee()
        *others, last = self.members
        proved = last.guarantee(exposure)
        if proved.epsilon is None:
            return proved
        for hook, what in {"gradient": "changes the gradients", "upload": "changes the upload"}.items():
            if any(overrides(member, hook) for member in others) and (
                hook == "gradient" or overrides(last, "gradient")
            ):
                return Guarantee(reason=f"{last.name} is combined with a member that {what}")
        return proved


@dataclass(frozen=True)
class OnlyVisible(Defence):
    """The half-informed attacker (A1): predicts without the defence, but knows which entries it noised or dropped."""

    defence: Defence = field(default_factory=Defence)

    def reconsidered(self, scene: TargetView, predicted: Params) -> Defence:
        return OnlyVisible(self.defence.reconsidered(scene, predicted))

    def noise_variance(self, scene: TargetView) -> Params:
        return self.defence.noise_variance(scene)

    def visible(self, update: Params, scene: TargetView) -> Params:
        return self.defence.visible(update, scene)


@dataclass(frozen=True)
class Noiseless(Defence):
    """A noisy defence as an attacker replays it: `quiet` does all but the noise, `noisy` tells how large it was."""

    quiet: Defence = field(default_factory=Defence)
    noisy: Defence = field(default_factory=Defence)

    @property
    def name(self) -> str:
        """The defence's name, marked as noiseless."""
        return f"{self.noisy.name} without noise"

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return self.quiet.gradient(compute, weights, batch, client)

    def upload(self, upload: Upload, client: Client) -> Upload:
        """The defence's upload without its noise."""
        return self.quiet.upload(upload, client)

    def noise_variance(self, scene: TargetView) -> Params:
        return self.noisy.noise_variance(scene)


def overrides(defence: Defence, hook: str) -> bool:
    """Does this defence, or a member of this chain, change the hook?"""
    if isinstance(defence, Chain):
        return any(overrides(member, hook) for member in defence.members)
    if isinstance(defence, OnlyVisible) and hook == "reconsidered":
        return overrides(defence.defence, hook)
    return getattr(type(defence), hook) is not getattr(Defence, hook)


def _inside(client: Client, position: int) -> Client:
    """The client as one member of a chain sees it: its own memory, its own random stream."""
    draws = None if client.draws is None else client.draws.child(position)
    return replace(client, memory=client.memory.get(str(position), {}), draws=draws)


def _for_member(server: Tree, position: int) -> Tree:
    """The server as one member of a chain sees it: with that member's memory."""
    return {**server, "memory": server["memory"].get(str(position), {})} if "memory" in server else server


def _nested(member: Defence, compute: Compute, client: Client) -> Compute:
    def nested(weights: Params, batch: Batch, *, statistics: bool = True) -> Params:
        inner = compute if statistics else partial(compute, statistics=False)
        return member.gradient(inner, weights, batch, client)

    return nested
