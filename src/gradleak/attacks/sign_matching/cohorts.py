"""What a server would see of several clients' sums, or of their moments over rounds, as a function of all their images.

Where a defence lets the server see a ratio or a sign (SecAdam, SecLion), the prediction can be given a slope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core import tree
from gradleak.core.tree import Params, Tree
from gradleak.parts.predictions import Replay, all_rounds, assumed_in
from gradleak.parts.protocols import Match
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Chain, Defence, Upload
from gradleak.scenario.task import Batch


@runtime_checkable
class Soft(Protocol):
    """A defence that reveals something almost without a slope, and can say what it would be with one."""

    def soft(self, uploads: Sequence[Upload], sizes: Sequence[int], width: float | Tensor) -> Params: ...


@dataclass(frozen=True, eq=False)
class Sums(Replay):
    """Every client trains on its part of the guess, and the server's view of their uploads is what is compared.

    clients   among whom the examples are divided, in order, equally many each. The server knows how many there are
    width     of the slope that ratios and signs are given (`Soft`), in units of each tensor's RMS; 0: none. A ratio of
              one client's first moments is a sign: without a slope nothing can be searched for. Defences that reveal
              something smooth are left as they are
    tracked   of a target seen in several rounds: what clients remember from one is what they begin the next with, from
              the first on. Else every round begins anew, as `Replay` has it
    signs     predict mean first moments instead of what is made of them: their signs are those of the view, and they
              have a slope everywhere. For `SignHinge`; of defences that send an update, the view itself

    An update of one client, width 0 and not tracked, is `Replay`.
    """

    clients: int = 1
    width: float = 0.0
    tracked: bool = False
    signs: bool = False

    def __post_init__(self) -> None:
        if self.clients < 1 or self.width < 0:
            raise ValueError(f"clients must be at least 1 and width at least 0; given {self.clients}, {self.width}.")

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        if scene.num_examples % self.clients:
            raise ValueError(f"{scene.num_examples} examples cannot be divided equally among {self.clients} clients.")
        training = (self.training or scene.knows.training or LocalTraining(lr=1.0)).public
        memory: Tree = {}
        seen = []
        for each in scene.rounds:
            uploads, after = self._uploads(batch, each, training, memory)
            memory = after if self.tracked else {}
            sizes = [upload.num_examples for upload in uploads]
            defence = assumed_in(each)
            seen.append(defence.visible(self._view(defence, uploads, sizes), each))
        return all_rounds(seen)

    def _view(self, defence: Defence, uploads: Sequence[Upload], sizes: Sequence[int]) -> Params:
        if self.signs and "first" in uploads[0].payload:
            plain = [replace(upload, payload={"update": upload.payload["first"]}) for upload in uploads]
            return Defence().reveal(plain, sizes)
        return revealing(defence, self.width)(uploads, sizes)

    def _uploads(
        self, batch: Batch, scene: TargetView, training: LocalTraining, memory: Tree
    ) -> tuple[list[Upload], Tree]:
        """Of every client, and what they remember, stacked."""
        defence = assumed_in(scene)
        told: list[Upload] = []

        def one(own: Batch, memory: Tree) -> tuple[Tree, Tree]:
            state = ClientState(memory=memory, buffers=scene.buffers, extras=scene.extras)
            upload, after = training.run(scene.task, scene.weights, own, defence, state, self.order)
            told.append(upload)
            return upload.payload, after.memory

        if self.clients == 1:
            _, after = one(batch, memory)
            return told, after
        own = {name: value.unflatten(0, (self.clients, -1)) for name, value in batch.items()}
        sent, after = vmap(one)(own, memory)
        examples = told[0].num_examples
        return [Upload(tree.map(lambda x, i=i: x[i], sent), examples) for i in range(self.clients)], after


def revealing(defence: Defence, width: float) -> Callable[[Sequence[Upload], Sequence[int]], Params]:
    """What the server computes of the uploads, with a slope where the defence knows how and a width is given."""
    members = defence.members if isinstance(defence, Chain) else (defence,)
    for member in members:
        if width and isinstance(member, Soft):
            return lambda uploads, sizes: member.soft(uploads, sizes, width)
    return defence.reveal


@dataclass(frozen=True)
class SignHinge(Match):
    """Mean over entries of max(0, -s p / RMS(p))^2: only entries of the wrong sign count, the further off the more.

    s: the observed sign; entries that were seen as 0 count with their square. For predictions that have sizes (a plain
    gradient: A0 on signs). Blind to the scale of both. It is 0 wherever all signs agree: what is found then fits, and
    so may much else.
    """

    scale_free: ClassVar[bool] = True

    def prepare(self, observed: Params) -> Params:
        return tree.map(torch.sign, observed)

    def residual(self, predicted: Params, observed: Params) -> Params:
        entries = tree.size(observed)

        def wrong(p: Tensor, s: Tensor) -> Tensor:
            size = tree.safe_sqrt(p.square().mean())
            away = torch.where(s == 0, p, torch.relu(-s * p))
            return away * tree.safe_inverse(size) / entries**0.5

        return tree.map(wrong, predicted, observed)
