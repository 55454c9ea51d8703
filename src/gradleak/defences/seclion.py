"""SecLion: clients send Lion's direction over random positive numbers, and the server takes its sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradleak.core import registry, tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.defences.noise import own_draws
from gradleak.defences.secadam import FIRST, HIDDEN, PAPER, SECOND, means, soft_ratio, sole_update
from gradleak.defences.settings import at_least, below_one, one_of
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Task


@named("seclion", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class SecLion(Defence):
    """The server steps by rate * (sign(mean_i c_i) + weight_decay * w), with c_i the direction of Lion of client i.

    A client keeps m, sends c = b1 m + (1 - b1) u and then sets m = b2 m + (1 - b2) u. Instead of a second moment it
    sends e ~ U(low, high), fresh for every coordinate. Both are under secure aggregation and under the same shared
    positive factor r: the server has r sum c and r sum e, and the sign of their ratio is that of sum c.

    sees      what the attacker uses. "signs": what the server is said to learn. "ratio": the HONEST view, mean c / mean
              e, which it computes from the same uploads in every round. e is known up to (low, high), and its mean over
              n clients the better the larger n: the SIZES of c are then visible too, with a relative error of about
              (high - low) / (high + low) / sqrt(3 n)
    form      "decoupled": decay outside the sign, as in Lion; "printed": sign(c / e + weight_decay * w), as the
              supplement prints it, where the random size of c / e decides the effect of the decay
    rate      the server's learning rate
    low, high the paper gives no numbers

    u is the update that the client would otherwise send: the gradient for one step of SGD with lr 1. For one client in
    its first round the sign is that of its gradient, as with SecAdam. Reference for the rule: Chen et al., Symbolic
    Discovery of Optimization Algorithms, 2023.
    """

    last: ClassVar[bool] = True  # moments are no update: nobody may change the upload after it
    rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    low: float = 0.5
    high: float = 1.5
    sees: Literal["signs", "ratio"] = "signs"
    form: Literal["decoupled", "printed"] = "decoupled"
    masks: Literal["cancelled", "ring"] = "cancelled"

    def __post_init__(self) -> None:
        for name in ("rate", "low"):
            at_least(name, getattr(self, name), 0.0, excluded=True)
        at_least("weight_decay", self.weight_decay, 0.0)
        if not self.high >= self.low:
            raise ValueError(f"high must be at least low; given {self.low} and {self.high}.")
        for name in ("beta1", "beta2"):
            below_one(name, getattr(self, name))
        one_of("sees", self.sees, "signs", "ratio")
        one_of("form", self.form, "decoupled", "printed")
        one_of("masks", self.masks, "cancelled", "ring")

    # --- the client -------------------------------------------------------------------------------------------------

    def upload(self, upload: Upload, client: Client) -> Upload:
        update = sole_update(upload, self.name)
        first = tree.map(lambda m, u: self.beta1 * m + (1 - self.beta1) * u, _momentum(update, client), update)
        return replace(upload, payload={FIRST: first, SECOND: self._denominators(update, client)}, buffers=None)

    def _denominators(self, update: Params, client: Client) -> Params:
        source, span = own_draws(client, self.name), self.high - self.low
        return {
            name: self.low + span * source.uniform(tuple(value.shape), stream=stream, dtype=value.dtype)
            for stream, (name, value) in enumerate(update.items())
        }

    def remember(self, before: Upload, after: Upload, client: Client) -> Tree:
        update = sole_update(before, self.name)
        momentum = _momentum(update, client)
        return {FIRST: tree.map(lambda m, u: self.beta2 * m + (1 - self.beta2) * u, momentum, update)}

    # --- the server -------------------------------------------------------------------------------------------------

    def reveal(self, uploads: Sequence[Upload], sizes: Sequence[int]) -> Params:
        first, second = means(uploads, sizes)
        view = tree.map(torch.sign, first) if self.sees == "signs" else tree.map(torch.div, first, second)
        return tree.scale(view, self.rate)

    def soft(self, uploads: Sequence[Upload], sizes: Sequence[int], width: float | Tensor) -> Params:
        """The revealed signs with a slope of this width, for attackers; 0: the signs themselves."""
        if self.sees == "ratio":
            return self.reveal(uploads, sizes)
        first, _ = means(uploads, sizes)
        return tree.scale(tree.map(lambda c: soft_ratio(c, c.square(), width), first), self.rate)

    def aggregate(self, uploads: Sequence[Upload], sizes: Sequence[int], server: Tree) -> Params:
        first, second = means(uploads, sizes)
        ratio = tree.map(torch.div, first, second)
        if self.masks == "ring":
            ring = registry.entry("aggregation", "ring").make
            sums = ring(uploads, sizes, round=int(server.get("round", 0)), powers=(1, 1), largest=self.high)
            ratio = tree.map(lambda value, c: value.to(c), sums.ratio(1), first)
        if not self.weight_decay:
            return tree.scale(tree.map(torch.sign, ratio), self.rate)
        if "weights" not in server:
            raise ValueError(f"{self.name} decays the weights that it sent: aggregate(..., server) needs them.")
        weights, decay = server["weights"], self.weight_decay
        if self.form == "printed":
            return tree.map(lambda c, w: self.rate * torch.sign(c + decay * w), ratio, weights)
        return tree.map(lambda c, w: self.rate * (torch.sign(c) + decay * w), ratio, weights)

    # --- the attacker -----------------------------------------------------------------------------------------------

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return _Expected(**vars(self))

    def noise_variance(self, scene: TargetView) -> Params:
        """For the ratio of one client: c / e has about the relative deviation of e. Signs are exact."""
        if self.sees == "signs":
            return tree.zeros_like(scene.update)
        relative = (self.high - self.low) ** 2 / (3 * (self.high + self.low) ** 2)
        return tree.map(lambda u: relative * u.square(), scene.update)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        hidden = HIDDEN.format(what="the sign of their sum")
        return Guarantee(reason=f"{hidden}, its sizes up to a factor of {self.high / self.low:.3g} (sees='ratio')")


@dataclass(frozen=True)
class _Expected(SecLion):
    """SecLion as an attacker replays it: denominators in the middle of their range."""

    def _denominators(self, update: Params, client: Client) -> Params:
        return tree.map(lambda u: torch.full_like(u, (self.low + self.high) / 2), update)

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return self


def _momentum(update: Params, client: Client) -> Params:
    momentum: Params = client.memory.get(FIRST) or tree.zeros_like(update)
    return momentum
