"""Fields read off the observation before anything is optimised: labels and their counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradleak import registry
from gradleak.attack import Needs, Scene
from gradleak.parts.predictions import gradient
from gradleak.registry import named
from gradleak.task import Batch


class LabelRule(Protocol):
    """A rule that reads the label counts off an observation: `counts(scene)` -> (classes,) whole numbers that sum to B."""

    needs: Needs

    def counts(self, scene: Scene) -> Tensor: ...


@dataclass(frozen=True)
class Nothing:
    """No field is read off; the space supplies them all."""

    def __call__(self, scene: Scene) -> Batch:
        return {}


@dataclass(frozen=True)
class Labels:
    """Labels by a rule, in ascending order; where the threat model gives them, the given ones."""

    rule: LabelRule

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    def __call__(self, scene: Scene) -> Batch:
        if "y" in scene.fields:
            return {}
        counts = self.rule.counts(scene)
        return {"y": torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)}


def label_rule(name: str) -> LabelRule:
    """The named label rule, from the registry."""
    rule: LabelRule = registry.get("labels", name)
    return rule


@named("auto", kind="labels", paper="")
def auto() -> LabelRule:
    """The strongest rule that applies."""
    return BiasMinimum()


@dataclass(frozen=True)
class BiasMinimum:
    """Rule A: y = argmin of the classifier's bias gradient. Exact for one example with a hard label."""

    needs: Needs = frozenset()

    def counts(self, scene: Scene) -> Tensor:
        bias = gradient(scene)[scene.task.classifier.bias]
        counts = torch.zeros(bias.shape[0], dtype=torch.long, device=bias.device)
        counts[bias.argmin()] = scene.num_examples
        return counts


@named("row-minimum", kind="labels", paper="")
def row_minimum() -> LabelRule:
    """Stub."""
    return BiasMinimum()
