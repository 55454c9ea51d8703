"""Averages of the global models of several rounds: SWA and EMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.federation.partition import demand_number

PAPER = "Caldarola, Caputo, Ciccone, Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022"
DDPM = "Ho, Jain, Abbeel, Denoising Diffusion Probabilistic Models, NeurIPS 2020"


class Averaging(Protocol):
    """An average of models that is evaluated, saved and sampled from, and never sent."""

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def cycles(self) -> bool: ...

    def factor(self, round: int) -> float: ...

    def after(self, round: int, average: Tree, weights: Params, buffers: Params) -> Tree: ...


@named("swa", kind="averaging", paper=PAPER)
@dataclass(frozen=True)
class SWA:
    """From round `start` on, every `every` rounds: mean <- (n mean + theta) / (n + 1), theta the server's weights.

    The mean is for evaluation only. It is never broadcast and no client starts from it, so it cannot change what leaks
    in a round. The cycle of the clients' learning rate that goes with it can.

    start    rounds before the first model is averaged; the authors': 0.75 of all rounds
    lowest   within a cycle the clients' learning rate falls linearly to `lowest` times its value:
             (1 - t) + t lowest, t = ((round - start) mod every + 1) / every. 1, or every=1: no cycle

    Running statistics are averaged as weights are. Differs: the released code averages every model a round later, when
    the next cycle has begun.
    """

    start: int
    every: int = 10
    lowest: float = 0.01
    name: ClassVar[str] = "swa"

    def __post_init__(self) -> None:
        demand_number("start of swa", self.start, int, 0)
        demand_number("every of swa", self.every, int, 1)
        demand_number("lowest of swa", self.lowest, float, 1e-6, 1)

    @property
    def cycles(self) -> bool:
        """Whether the clients' learning rate depends on the round."""
        return self.every > 1 and self.lowest < 1

    def factor(self, round: int) -> float:
        """Factor on the clients' learning rate in a round; rounds count from 0."""
        if round < self.start or not self.cycles:
            return 1.0
        t = ((round - self.start) % self.every + 1) / self.every
        return (1 - t) + t * self.lowest

    def after(self, round: int, average: Tree, weights: Params, buffers: Params) -> Tree:
        """The average after this many rounds: {"weights", "buffers", "count"}; empty before `start`."""
        if round < self.start or (round - self.start) % self.every:
            return average
        if not average:
            return _first(weights, buffers)
        return _towards(average, weights, buffers, 1 / (average["count"] + 1))


@named("ema", kind="averaging", paper=DDPM)
@dataclass(frozen=True)
class EMA:
    """After every round: mean <- d mean + (1 - d) theta, theta the server's weights. Denoisers are sampled from it.

    decay    d, per round. Papers state it per step (0.9999): raise that to the number of local steps of a round
    start    rounds before the first model is averaged
    warm     d is at most (1 + n) / (10 + n) after n models, so that the untrained ones are soon forgotten

    No client starts from the mean, and their learning rate stays the same: it cannot change what leaks.
    """

    decay: float = 0.99
    start: int = 0
    warm: bool = True
    name: ClassVar[str] = "ema"

    def __post_init__(self) -> None:
        demand_number("decay of ema", self.decay, float, 0, 1)
        demand_number("start of ema", self.start, int, 0)

    @property
    def cycles(self) -> bool:
        return False

    def factor(self, round: int) -> float:
        return 1.0

    def after(self, round: int, average: Tree, weights: Params, buffers: Params) -> Tree:
        """The average after this many rounds: {"weights", "buffers", "count"}; empty before `start`."""
        if round < self.start:
            return average
        if not average:
            return _first(weights, buffers)
        count = average["count"]
        decay = torch.full_like(count, self.decay)
        if self.warm:
            decay = torch.minimum(decay, (1 + count) / (10 + count))
        return _towards(average, weights, buffers, 1 - decay)


def _first(weights: Params, buffers: Params) -> Tree:
    return {"weights": dict(weights), "buffers": dict(buffers), "count": tree.like(weights).new_ones(())}


def _towards(average: Tree, weights: Params, buffers: Params, share: Tensor) -> Tree:
    """The average, moved by this share of the way to a new model. Integers are taken from the new one."""

    def mean(old: Tensor, new: Tensor) -> Tensor:
        return old + share.to(new) * (new - old) if new.is_floating_point() else new

    return {
        "weights": tree.map(mean, average["weights"], weights),
        "buffers": tree.map(mean, average.get("buffers", {}), buffers),
        "count": average["count"] + 1,
    }
