"""Label leakage from gradients: row sums, and how much one example adds to them, assumed or measured.

Reference: Wainakh et al., PoPETs 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradleak.core import random as randomness
from gradleak.core.random import Draws
from gradleak.core.registry import did_you_mean, named
from gradleak.parts.fields import last_layer
from gradleak.parts.labels.readings import Reading, Rule, bias_gradient, demand_training, greedy
from gradleak.parts.protocols import Needs
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.task import Batch

LEAKAGE = "Wainakh et al., User-Level Label Leakage from Gradients in Federated Learning, PoPETs 2022"


@named("llg", kind="labels", paper=LEAKAGE)
@dataclass(frozen=True)
class LLG(Rule):
    """Label leakage from gradients: row sums s_c = sum_m dL/dW_cm, each example of a class worth the impact m.

    m = 1/B (1 + 1/C) sum_{c: s_c < 0} s_c. Every class with s_c < 0 is named once and s_c <- s_c - m; then, until B,
    the class of the lowest s_c is named and s_c <- s_c - m. Assumes sum_m h_m > 0; blind to the scale of the update.
    """

    def read(self, scene: TargetView) -> Reading:
        sums = last_layer(scene).rows.sum(1)
        impact = sums.clamp(max=0).sum() / scene.num_examples * (1 + 1 / len(sums))
        return greedy(sums, sums, impact, scene.num_examples)


@named("bias-corrected", kind="labels", paper=f"{LEAKAGE}; on the bias, as in the breaching library")
@dataclass(frozen=True)
class BiasCorrected(Rule):
    """LLG on the bias: scores dL/db_c, impact sum_{c: dL/db_c < 0} dL/db_c / B. Blind to the scale of the update."""

    def read(self, scene: TargetView) -> Reading:
        deltas = bias_gradient(scene, "bias-corrected")
        impact = deltas.clamp(max=0).sum() / scene.num_examples
        return greedy(deltas, deltas, impact, scene.num_examples)


DUMMIES: dict[str, Callable[[tuple[int, ...], Draws], Tensor]] = {
    "zeros": lambda shape, draws: torch.zeros(shape),
    "ones": lambda shape, draws: torch.ones(shape),
    "random": lambda shape, draws: draws.uniform(shape),
}


@named("llg-star", kind="labels", paper=LEAKAGE)
@dataclass(frozen=True)
class LLGStar(Rule):
    """LLG*: impact and offset measured on the client's model with dummy images, a batch of B for every class.

    `dummy`: "zeros", "ones" or "random" images. Differs: the same dummies carry each label in turn, so that one forward
    pass serves all classes.
    """

    needs: ClassVar[Needs] = frozenset({"training"})
    dummy: str = "random"
    repeats: int = 10

    def __post_init__(self) -> None:
        if self.dummy not in DUMMIES:
            raise ValueError(f"Unknown dummy {self.dummy!r}.{did_you_mean(self.dummy, DUMMIES)}")

    def read(self, scene: TargetView) -> Reading:
        demand_training(scene, "llg-star")
        weight = scene.weights[scene.task.classifier.weight]
        labels = torch.arange(weight.shape[0], device=weight.device)
        at_once = max(1, 2**25 // weight.numel())  # labels: each has a gradient of the classifier's size
        total = weight.new_zeros(())
        for repeat in range(self.repeats):
            batch = self._images(scene, Draws(randomness.key("llg-star", repeat)))
            alike = lambda y, batch=batch: _row_sums(scene, {**batch, "y": y.expand(scene.num_examples)})  # noqa: E731
            total = total + vmap(alike, chunk_size=at_once)(labels)  # (classes, classes): label, s_c
        return _calibrated(scene, labels, total / self.repeats)

    def _images(self, scene: TargetView, source: Draws) -> Batch:
        batch = scene.task.blank(scene.num_examples)
        for name, (low, high) in scene.limits.items():
            batch[name] = low + DUMMIES[self.dummy](tuple(batch[name].shape), source).to(low) * (high - low)
        return batch


@named("llg-plus", kind="labels", paper=LEAKAGE)
@dataclass(frozen=True)
class LLGPlus(Rule):
    """LLG+: impact and offset measured on labelled images of the attacker's own, `Knowledge(public=...)`.

    `public` has `x` (N, ...) in [0, 1] and `y` (N,), as `gradleak.data.load` gives them. Differs: not the mean over
    repeated draws of B images of a class, but what it estimates, the mean over up to `examples` of them.
    """

    needs: ClassVar[Needs] = frozenset({"training", "public"})
    examples: int = 64

    def read(self, scene: TargetView) -> Reading:
        demand_training(scene, "llg-plus")
        public: Any = scene.knows.public
        if not (hasattr(public, "x") and hasattr(public, "y")):
            raise MissingKnowledge(
                "Label rule 'llg-plus' needs labelled images of the attacker's own: Knowledge(public=...) with x "
                f"(N, ...) in [0, 1] and y (N,), as gradleak.data.load gives them; given {type(public).__name__}."
            )
        labels, (low, high) = public.y.unique(), scene.limits["x"]
        sums = []
        for label in labels:
            images = public.x[public.y == label][: self.examples].to(low)
            y = torch.full((len(images),), int(label), device=low.device)
            sums.append(_row_sums(scene, {"x": low + images * (high - low), "y": y}))
        return _calibrated(scene, labels, torch.stack(sums))


def _row_sums(scene: TargetView, batch: Batch) -> Tensor:
    """s_c of the gradient that this batch would give, (classes,)."""
    name = scene.task.classifier.weight
    loss = lambda weight: scene.task.loss({**scene.weights, name: weight}, batch, scene.buffers)[0]  # noqa: E731
    return grad(loss)(scene.weights[name]).sum(1)


def _calibrated(scene: TargetView, labels: Tensor, sums: Tensor) -> Reading:
    """LLG with impact and offset measured by the attacker; sums (labels, classes), one row per batch of one label.

    m = (1 + 1/C) mean_c s_c(batch of c) / B and o_c = mean of s_c over the batches of other labels. Scores are s - o;
    the first step still looks at the sign of s. m and o are absolute: the client's scale must be known.
    """
    observed = last_layer(scene).rows.sum(1)
    sums = sums.to("cpu", torch.float64)
    same = labels.cpu()[:, None] == torch.arange(len(observed))
    impact = sums[same].mean() / scene.num_examples * (1 + 1 / len(observed))
    offset = sums.masked_fill(same, 0).sum(0) / (~same).sum(0).clamp_min(1)
    return greedy(observed - offset, observed, impact, scene.num_examples)
