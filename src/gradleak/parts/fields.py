"""Fields read off the observation before the search: labels, by one of the rules of `parts.labels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gradleak.core import registry, tree
from gradleak.parts.predictions import gradient
from gradleak.parts.protocols import NOTHING, FieldRule, Needs
from gradleak.parts.view import TargetView
from gradleak.scenario.task import Batch, Task


class LabelRule(Protocol):
    """Reads the label counts off an observation: `counts(scene)` -> (classes,) whole numbers that sum to B."""

    @property
    def needs(self) -> Needs: ...

    def counts(self, scene: TargetView) -> Tensor: ...


class RuleDoesNotApply(ValueError):
    """A label rule was used outside its premises; the message names rules that apply."""


@dataclass(frozen=True)
class Nothing(FieldRule):
    """No field is read off: the space has them all."""

    def __call__(self, scene: TargetView) -> Batch:
        return {}


@dataclass(frozen=True)
class ReadBy(FieldRule):
    """Fields by a plain function of the scene."""

    function: Callable[[TargetView], Batch]

    def reads(self, task: Task) -> frozenset[str]:
        return frozenset(task.fields)  # it may read any of them

    def __call__(self, scene: TargetView) -> Batch:
        return self.function(scene)


@dataclass(frozen=True)
class Labels(FieldRule):
    """Labels by a rule, in ascending order; nothing if the threat model gives labels.

    Rules hold for a class index behind a linear layer. Any other target is left to the search.
    """

    rule: LabelRule

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    def reads(self, task: Task) -> frozenset[str]:
        trained = {name for name, p in task.model.named_parameters() if p.requires_grad}
        layer = task.last_layer if task.class_index else None
        return frozenset({"y"}) if layer is not None and layer.weight in trained else NOTHING

    def __call__(self, scene: TargetView) -> Batch:
        if "y" in scene.fields or not self.reads(scene.task):
            return {}
        counts = self.rule.counts(scene)
        return {"y": torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)}


def label_rule(name: str, **settings: Any) -> LabelRule:
    """The named label rule with these settings, from the registry."""
    rule: LabelRule = registry.get("labels", name, **settings)
    return rule


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The classifier, logits = W h + b, and its mean gradient, on the CPU in double precision: rules are small."""

    weight: Tensor  # W, (classes, features)
    rows: Tensor  # dL/dW
    bias: Tensor | None  # b, (classes,); None if the client trains none
    deltas: Tensor | None  # dL/db


def last_layer(scene: TargetView) -> LastLayer:
    """The classifier that was sent, and its mean gradient."""
    layer = scene.task.classifier
    if layer.weight not in scene.update:
        raise RuleDoesNotApply(
            f"The client does not train the classifier {layer.weight!r}, so labels cannot be read off its gradient: "
            "give them in Knowledge(given={'y': ...}), or use an attack that optimises them (dlg)."
        )
    names = [name for name in (layer.weight, layer.bias) if name in scene.update]
    observed = gradient(replace(scene, update={name: scene.update[name] for name in names}))
    sent = {name: scene.weights[name] for name in names}
    sent, observed = (tree.to(tree.detach(params), "cpu", torch.float64) for params in (sent, observed))
    weight, bias = names[0], names[-1] if len(names) > 1 else ""
    return LastLayer(sent[weight], observed[weight], sent.get(bias), observed.get(bias))
