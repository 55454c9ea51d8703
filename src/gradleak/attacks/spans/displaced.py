"""Clients that take their gradient at other weights than they received, as with FedSAM: weights and images in turn.

The known defence says where, given the client's gradient on the way. That is about the observed one; behind images that
were found it is theirs, and the more exact these are the more exact are the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.parts.predictions import assumed_in, gradient
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Chain, Client, Compute, Defence
from gradleak.scenario.observation import Knowledge, Track
from gradleak.scenario.task import Batch, Task

MOVED = 1e-6  # relative distance of weights that are the same but for rounding


@dataclass(frozen=True)
class Noting(Defence):
    """Behind a defence: notes the weights at which it asks for gradients, and may answer with a given one."""

    answer: Params | None = None
    noted: list[Params] = field(default_factory=list)

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        self.noted.append(weights)
        return compute(weights, batch) if self.answer is None else self.answer


def displaces(task: Task, target: Track, knows: Knowledge) -> bool:
    """Does the known defence take the gradient of a single step at other weights than the client received?"""
    training, scene = knows.training or LocalTraining(lr=1.0), TargetView.of(task, target, knows)
    if knows.defence is None or len(training.order(target.num_examples)) > 1 or len(target.observations) > 1:
        return False
    moved = _last_weights(scene, scene.task.blank(target.num_examples))
    distance = tree.norm(tree.subtract(moved, scene.weights))
    return float(distance) > MOVED * float(tree.norm(scene.weights))


def displaced(task: Task, target: Track, knows: Knowledge, batch: Batch | None = None) -> Track:
    """The target as if it had received the weights of its gradient: for these examples, or by the observed gradient."""
    scene = TargetView.of(task, target, knows)
    if batch is None:
        moved = _last_weights(scene, task.blank(target.num_examples), gradient(scene))
    else:
        moved = _last_weights(scene, {name: value.to(scene.like.device) for name, value in batch.items()})
    weights = {name: moved[name].detach().to(value) for name, value in target.last.weights.items()}
    return Track((replace(target.last, weights=weights),))


def _last_weights(scene: TargetView, batch: Batch, answer: Params | None = None) -> Params:
    training, noting = (scene.knows.training or LocalTraining(lr=1.0)).public, Noting(answer)
    client = ClientState(buffers=scene.buffers, extras=scene.extras)
    with torch.no_grad() if answer is not None else torch.enable_grad():
        training.run(scene.task, scene.weights, batch, Chain(assumed_in(scene), noting), client)
    return noting.noted[-1]
