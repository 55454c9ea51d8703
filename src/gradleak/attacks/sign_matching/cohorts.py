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
    """A defence whose revealed view has almost no slope, and that can make a view with one."""

    def soft(self, uploads: Sequence[Upload], sizes: Sequence[int], width: float | Tensor) -> Params: ...


@dataclass(frozen=True, eq=False)
class Sums(Replay):
    """Every client trains on its part of the guess; the prediction is the server's view of their uploads.

    clients   the number of clients, known to the server. Examples are divided among them in order, equally many each
    width     of the slope of ratios and signs (`Soft`), in units of each tensor's RMS; 0: none. The ratio of one
              client's first moments is a sign: without a slope there is nothing to search by. Smooth views stay the
              same
    tracked   for a target seen in several rounds: clients remember their state from round to round, from the first on.
              Otherwise every round starts afresh, as in `Replay`
    signs     predict mean first moments instead of the view: they have its signs, and a slope everywhere. For
              `SignHinge`; for defences that send an update, the view itself

    With one client, width 0 and not tracked, it is `Replay`.
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
        views = []
        for each in scene.rounds:
            uploads, after = self._uploads(batch, each, training, memory)
            memory = after if self.tracked else {}
            sizes = [upload.num_examples for upload in uploads]
            defence = assumed_in(each)
            views.append(defence.visible(self._view(defence, uploads, sizes), each))
        return all_rounds(views)

    def _view(self, defence: Defence, uploads: Sequence[Upload], sizes: Sequence[int]) -> Params:
        if self.signs and "first" in uploads[0].payload:
            plain = [replace(upload, payload={"update": upload.payload["first"]}) for upload in uploads]
            return Defence().reveal(plain, sizes)
        return revealing(defence, self.width)(uploads, sizes)

    def _uploads(
        self, batch: Batch, scene: TargetView, training: LocalTraining, memory: Tree
    ) -> tuple[list[Upload], Tree]:
        """The uploads of all clients, and their memories, stacked."""
        defence = assumed_in(scene)
        uploads: list[Upload] = []

        def one(batch: Batch, memory: Tree) -> tuple[Tree, Tree]:
            state = ClientState(memory=memory, buffers=scene.buffers, extras=scene.extras)
            upload, after = training.run(scene.task, scene.weights, batch, defence, state, self.order)
            uploads.append(upload)
            return upload.payload, after.memory

        if self.clients == 1:
            _, after = one(batch, memory)
            return uploads, after
        batches = {name: value.unflatten(0, (self.clients, -1)) for name, value in batch.items()}
        sent, after = vmap(one)(batches, memory)
        examples = uploads[0].num_examples
        return [Upload(tree.map(lambda x, i=i: x[i], sent), examples) for i in range(self.clients)], after


def revealing(defence: Defence, width: float) -> Callable[[Sequence[Upload], Sequence[int]], Params]:
    """The server's view of uploads, with a slope where the defence can make one and a width is given."""
    members = defence.members if isinstance(defence, Chain) else (defence,)
    for member in members:
        if width and isinstance(member, Soft):
            return lambda uploads, sizes: member.soft(uploads, sizes, width)
    return defence.reveal


@dataclass(frozen=True)
class SignHinge(Match):
    """Mean over entries of max(0, -s p / RMS(p))^2: only entries of the wrong sign count, the further off the more.

    s: the observed sign; entries observed as 0 count with their square. For predictions that have sizes (a plain
    gradient: A0 on signs). It does not depend on the scale of either. It is 0 wherever all signs agree, which may hold
    for many other images.
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
