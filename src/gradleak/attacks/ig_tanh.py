"""Inverting Gradients in squashed variables: the box of valid images without a projection."""

from __future__ import annotations

from dataclasses import dataclass

from gradleak.attack import Attack, Composed
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.tree import Tree
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Adam, StepDecay
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import TotalVariation
from gradleak.parts.protocols import Space, needs_numbers
from gradleak.parts.spaces import Normal
from gradleak.parts.stage import Stage
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.task import Batch, Task


@dataclass(frozen=True)
class Squashed(Space):
    """x = middle + half the range * tanh(w), pixel by pixel: w is free, x stays inside the field's bounds."""

    start: Normal = Normal()

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({"x"})

    def refuses(self, task: Task) -> str:
        return needs_numbers(task, "x")

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {"w": self.start(scene, draws, "x")} if before is None or "w" not in before else {"w": before["w"]}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        low, high = scene.extent("x")
        return {"x": (low + high) / 2 + (high - low) / 2 * v["w"].tanh()}


PAPER = "Geiping et al., Inverting Gradients, NeurIPS 2020, in the variables of Carlini and Wagner, S&P 2017"


@named("ig-tanh", kind="attack", paper=PAPER)
def ig_tanh(*, steps: int = 4800, lr: float = 0.1, tv: float = 1e-6, restarts: int = 1, labels: str = "auto") -> Attack:
    """Match the direction of the gradient with plain Adam on w, where the image is a tanh of w.

    As `ig` but for the space: no clamping, and no signed steps, which would push every w to infinity alike. Differs
    from both papers in that they are combined; nothing to compare its figures with.
    """
    stage = Stage(Squashed(), Replay(), Cosine(), (TotalVariation(tv),), Adam(lr=lr, steps=steps, schedule=StepDecay()))
    return Composed("ig-tanh", (stage,), Labels(label_rule(labels)), restarts=restarts)
