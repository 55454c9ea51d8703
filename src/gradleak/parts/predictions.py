"""What the client would have uploaded for a batch, as a differentiable function of it."""

from __future__ import annotations

import math
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
from gradleak.scenario.defence import Defence, OnlyVisible
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch, Task


@dataclass(frozen=True, eq=False)
class Replay(Prediction):
    """Run the client's training on the guess: `LocalTraining.run`, through the defence that the attacker knows.

    Without a recipe, here or in Knowledge, it is the plain gradient, whose scale then means nothing. If a target was
    seen in several rounds, it predicts all of them, each from the weights of that round.
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
        rows = [examples if part is None else len(whole[part] if isinstance(part, slice) else part) for part in plan]
        return Footprint(passes=sum(rows) / examples, gradients=len(plan))

    def target(self, scene: TargetView) -> Params:
        return all_rounds([assumed_in(each).visible(each.update, each) for each in scene.rounds])

    def disturbed(self, scene: TargetView, draws: Draws) -> Params:
        """The target plus new noise of the known defence: about as far from the target as the truth is."""

        def of_round(number: int, scene: TargetView) -> Params:
            defence, source = assumed_in(scene), draws.child(number)
            variance = defence.noise_variance(scene)
            noisy = {
                name: value
                + torch.where(variance[name].isfinite(), variance[name], 0.0).sqrt()
                * source.normal(tuple(value.shape), stream=stream, dtype=value.dtype)
                for stream, (name, value) in enumerate(scene.update.items())
            }
            return defence.visible(noisy, scene)

        return all_rounds([of_round(number, each) for number, each in enumerate(scene.rounds)])

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        # The client's augmentations and masks are private: the replay trains on the images as they are.
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

    An update is lr times a gradient, and papers weigh their priors against gradients. With updates and lr = 0.1 the
    squared error is 100 times smaller: every prior weighs 100 times as much, and a search whose first step depends on
    the slope is slower by the same factor.
    """

    def target(self, scene: TargetView) -> Params:
        return tree.scale(super().target(scene), 1 / self._rate(scene))

    def disturbed(self, scene: TargetView, draws: Draws) -> Params:
        return tree.scale(super().disturbed(scene, draws), 1 / self._rate(scene))

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        return tree.scale(super().__call__(batch, v, scene, now), 1 / self._rate(scene))

    def _rate(self, scene: TargetView) -> float | Tensor:
        """How far the client moves along a constant gradient of length one; for other rules the sum of the rates."""
        training = self.training or scene.knows.training
        if training is None:
            return 1.0
        factors, rule = training.factors(scene.num_examples), training.optimiser
        return training.lr * (rule.way(factors) if isinstance(rule, SGD) else sum(factors))


def all_rounds(rounds: Sequence[Params]) -> Params:
    """The updates of several rounds as one tree; a single round keeps its names."""
    if len(rounds) == 1:
        return rounds[0]
    return {f"{number}/{name}": value for number, update in enumerate(rounds) for name, value in update.items()}


def assumed_in(scene: TargetView) -> Defence:
    """The defence as the attacker assumes it, made in the lane: masks are read off the lane's observation."""
    known = scene.knows.defence
    return Defence() if known is None else known.assumed(scene, scene.task)


def sent_entries(scene: TargetView) -> Params:
    """Which entries of the update the client sent, as far as the attacker knows: all, if the defence is unknown.

    An attacker who replays a defence may compare entries that were dropped, as those that pruning bounds. So these are
    the entries that one who only weighs out compares.
    """
    if scene.knows.defence is None:
        return tree.map(lambda u: torch.ones_like(u, dtype=torch.bool), scene.update)
    ones = tree.map(torch.ones_like, scene.update)
    return tree.map(lambda weight: weight != 0, OnlyVisible(scene.knows.defence).visible(ones, scene))


def noise_share(scene: TargetView, names: Sequence[str], dropped: float = math.inf) -> float:
    """The norm of a known defence's noise in these tensors, as a share of theirs.

    dropped   the variance of entries that were not sent
    """
    if scene.knows.defence is None:
        return 0.0
    variance = assumed_in(scene).noise_variance(scene)
    energy = sum(float(scene.update[name].double().square().sum()) for name in names)
    noise = sum(float(variance[name].double().nan_to_num(posinf=dropped).sum()) for name in names)
    return math.sqrt(noise / max(energy, 1e-300))


@dataclass(frozen=True)
class Representation(Prediction):
    """The classifier's input h(x_k), compared with the row of the classifier's gradient that belongs to label k.

    For mean cross-entropy that row is -((1 - p_k) / B) h_k plus a small mixture, so its NEGATIVE is the target.
    Reference: Zhang et al. 2022; Lewis et al. 2024 compare |cos| with the row itself, which `signed=False` keeps.
    """

    signed: bool = True

    def refuses(self, task: Task) -> str:
        if task.class_index and task.last_layer is not None:
            return ""
        return "it reads features off the rows of a classifier, and no linear layer of this model predicts a class"

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
    """The observed update as a mean gradient: divided by the sum of the client's learning rates, if known.

    Exact for one step of SGD, without weight decay and Nesterov factor. For more steps it is the mean of the gradients
    along the way; other rules transform these gradients first.
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
    sent = {name: scene.weights[name] for name in mean}  # a scene may hold a part of the update
    return tree.add(mean, sent, -rule.weight_decay) if rule.weight_decay else mean
