"""What the client would have uploaded for a batch, as a differentiable function of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.parts.protocols import NOTHING, Footprint, Needs, Prediction
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import ClientState, LocalTraining, Order
from gradleak.scenario.defence import Defence
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch


@dataclass(frozen=True, eq=False)
class Replay(Prediction):
    """Run the client rule on the guess: `LocalTraining.run`, through the defence as far as the attacker knows it.

    With neither a recipe of its own nor one in Knowledge it is the plain gradient, whose scale is then meaningless.
    Of a target seen in several rounds all are predicted, each from the weights it began with, and compared together.
    """

    training: LocalTraining | None = None
    order: Order | None = None

    @property
    def needs_for_scale(self) -> Needs:
        return NOTHING if self.training is not None else frozenset({"training"})

    def footprint(self, scene: TargetView) -> Footprint:
        training, examples = self.training or scene.knows.training or LocalTraining(lr=1.0), scene.num_examples
        plan = training.order(examples) if self.order is None else self.order
        whole = range(examples)
        rows = [examples if own is None else len(whole[own] if isinstance(own, slice) else own) for own in plan]
        return Footprint(passes=sum(rows) / examples, gradients=len(plan))

    def target(self, scene: TargetView) -> Params:
        return all_rounds([assumed_in(each).visible(each.update, each) for each in scene.rounds])

    def disturbed(self, scene: TargetView, draws: Draws) -> Params:
        """The target with the noise of the known defence drawn anew: about as far from it as the truth itself is."""

        def of_round(number: int, scene: TargetView) -> Params:
            defence, own = assumed_in(scene), draws.child(number)
            variance = defence.noise_variance(scene)
            noisy = {
                name: value
                + torch.where(variance[name].isfinite(), variance[name], 0.0).sqrt()
                * own.normal(tuple(value.shape), stream=stream, dtype=value.dtype)
                for stream, (name, value) in enumerate(scene.update.items())
            }
            return defence.visible(noisy, scene)

        return all_rounds([of_round(number, each) for number, each in enumerate(scene.rounds)])

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        # The client's augmentations and masks are not known: the replay trains on the images as they are.
        training = (self.training or scene.knows.training or LocalTraining(lr=1.0)).public

        def of_round(scene: TargetView) -> Params:
            defence = assumed_in(scene)
            client = ClientState(buffers=scene.buffers, extras=scene.extras)
            upload, _ = training.run(scene.task, scene.weights, batch, defence, client, self.order)
            return defence.visible(defence.reveal([upload], [upload.num_examples]), scene)

        return all_rounds([of_round(each) for each in scene.rounds])


@dataclass(frozen=True, eq=False)
class ReplayedGradient(Replay):
    """`Replay` in the unit of a gradient: prediction and target over the learning rates of the client's steps.

    An update is lr times a gradient, and papers weigh their priors against gradients. Against updates a client with
    lr = 0.1 would make a squared error 100 times lighter, every prior 100 times as heavy, and a search that takes its
    first step by the size of the slope that much slower.
    """

    def target(self, scene: TargetView) -> Params:
        return tree.scale(super().target(scene), 1 / self._rate(scene))

    def disturbed(self, scene: TargetView, draws: Draws) -> Params:
        return tree.scale(super().disturbed(scene, draws), 1 / self._rate(scene))

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        return tree.scale(super().__call__(batch, v, scene, now), 1 / self._rate(scene))

    def _rate(self, scene: TargetView) -> float | Tensor:
        """How far the client goes along a gradient of length one that stays the same; of Adam, the sum of its rates."""
        training = self.training or scene.knows.training
        if training is None:
            return 1.0
        factors, rule = training.factors(scene.num_examples), training.optimiser
        return training.lr * (rule.way(factors) if isinstance(rule, SGD) else sum(factors))


def all_rounds(rounds: Sequence[Params]) -> Params:
    """The updates of several rounds as one; a single one keeps its names."""
    if len(rounds) == 1:
        return rounds[0]
    return {f"{number}/{name}": value for number, update in enumerate(rounds) for name, value in update.items()}


def assumed_in(scene: TargetView) -> Defence:
    """The defence as the attacker believes it. Inside the lane: masks read off the observation are this lane's own."""
    known = scene.knows.defence
    return Defence() if known is None else known.assumed(scene, scene.task)


@dataclass(frozen=True)
class Representation(Prediction):
    """The classifier's input h(x_k), to be compared with the row of the classifier's gradient that belongs to label k.

    For mean cross-entropy that row is -((1 - p_k) / B) h_k plus a small mixture, so its NEGATIVE is the target.
    Reference: Zhang et al. 2022; Lewis et al. 2024 compare |cos| with the row itself, which `signed=False` keeps.
    """

    signed: bool = True

    def target(self, scene: TargetView) -> Params:
        y = scene.fields["y"]
        labels = y.argmax(-1) if y.is_floating_point() else y
        rows = gradient(scene)[scene.task.classifier.weight].index_select(0, labels)  # (B, features)
        return {"features": -rows if self.signed else rows}

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        module = scene.task.classifier.module
        caught = scene.task.inputs_of([module], scene.weights, batch, scene.buffers)
        return {"features": caught[module]}  # (B, features)


def gradient(scene: TargetView) -> Params:
    """The observed update as a mean gradient: divided by the learning rates of the client's steps, where known.

    Exact for one step of SGD, whose weight decay and Nesterov factor are taken off; for more steps it is the average of
    the gradients along the way, for other rules whatever they make of them.
    """
    training = scene.knows.training
    if training is None:
        return scene.update
    factors = training.factors(scene.num_examples)
    mean = tree.scale(scene.update, 1 / (training.lr * sum(factors)))
    rule = training.optimiser
    if len(factors) > 1 or not isinstance(rule, SGD):
        return mean
    if rule.momentum and rule.nesterov:
        mean = tree.scale(mean, 1 / (1 + rule.momentum))
    return tree.add(mean, scene.weights, -rule.weight_decay) if rule.weight_decay else mean
