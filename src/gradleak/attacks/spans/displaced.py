"""Clients that take their gradient at other weights than they received, as with FedSAM: weights and images in turn.

The known defence computes these weights from the client's first gradient. The observed gradient is an estimate of it,
and the gradient of images that were found is a better one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from gradleak.attacks.spans.norms import training_norms
from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.parts.predictions import assumed_in, gradient
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Chain, Client, Compute, Defence
from gradleak.scenario.observation import Knowledge, Track
from gradleak.scenario.rules import SGD
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
    """Does the known defence take the gradient of a single step at other weights than the client received?

    BatchNorm in training mode is left out: the statistics that come back are of the first pass.
    """
    training, scene = knows.training or LocalTraining(lr=1.0), TargetView.of(task, target, knows)
    if knows.defence is None or len(training.order(target.num_examples)) > 1 or len(target.observations) > 1:
        return False
    if training_norms(task.model):
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
    seen, training = target.last, knows.training or LocalTraining(lr=1.0)
    weights = {name: moved[name].detach().to(value) for name, value in seen.weights.items()}
    update, rule = seen.update, training.optimiser
    if isinstance(rule, SGD) and rule.weight_decay:  # the client's decay is of the weights that it received
        step = training.lr * sum(training.factors(seen.num_examples)) * (1 + rule.momentum * rule.nesterov)
        moves = {name: weights[name] - seen.weights[name] for name in update}
        update = tree.add(update, moves, step * rule.weight_decay)
    return Track((replace(seen, weights=weights, update=update),))


def _last_weights(scene: TargetView, batch: Batch, answer: Params | None = None) -> Params:
    training, noting = (scene.knows.training or LocalTraining(lr=1.0)).public, Noting(answer)
    client = ClientState(buffers=scene.buffers, extras=scene.extras)
    with torch.no_grad() if answer is not None else torch.enable_grad():
        training.run(scene.task, scene.weights, batch, Chain(assumed_in(scene), noting), client)
    return noting.noted[-1]
