"""Stochastic weight averaging on the server: a mean of late global models, beside the one that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradleak import tree
from gradleak.federation.partition import demand_number
from gradleak.registry import named
from gradleak.tree import Params, Tree

PAPER = "Caldarola, Caputo, Ciccone, Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022"


@named("swa", kind="averaging", paper=PAPER)
@dataclass(frozen=True)
class SWA:
    """From round `start` on, every `every` rounds: mean <- (n mean + theta) / (n + 1), theta the server's weights.

    The mean is for evaluation only. It is never broadcast and no client starts from it, so it cannot change what leaks
    in a round; the cycle of the clients' learning rate, which goes with it, can.

    start    so many rounds are done before the first model is taken; the authors': 0.75 of all rounds
    lowest   in the last round of a cycle clients use `lowest` times their learning rate, in those before it more, on a
             straight line: (1 - t) + t lowest, t = ((round - start) mod every + 1) / every. 1, or every=1: no cycle

    Running statistics are averaged as weights are. Differs: released code takes every model a round later, when the
    next cycle has begun.
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
        """Does the clients' learning rate depend on the round?"""
        return self.every > 1 and self.lowest < 1

    def factor(self, round: int) -> float:
        """On the clients' learning rate in a round; rounds count from 0."""
        if round < self.start or not self.cycles:
            return 1.0
        t = ((round - self.start) % self.every + 1) / self.every
        return (1 - t) + t * self.lowest

    def after(self, round: int, average: Tree, weights: Params, buffers: Params) -> Tree:
        """The average once so many rounds are done: {"weights", "buffers", "count"}; empty before `start`."""
        if round < self.start or (round - self.start) % self.every:
            return average
        if not average:
            return {
                "weights": dict(weights),
                "buffers": dict(buffers),
                "count": next(tree.leaves(weights)).new_ones(()),
            }
        share = 1 / (average["count"] + 1)

        def mean(held: Tensor, new: Tensor) -> Tensor:
            return held + share.to(new) * (new - held) if new.is_floating_point() else new

        return {
            "weights": tree.map(mean, average["weights"], weights),
            "buffers": tree.map(mean, average.get("buffers", {}), buffers),
            "count": average["count"] + 1,
        }
