"""Surrogate models: one gradient in place of a whole local training, taken at a point that the search moves.

A client that makes T steps uploads u = w0 - wT. If its path is short and nearly straight, the gradient of ALL its
examples at some point near the segment from w0 to wT is about parallel to u, whatever the batches and their order were.
`GradientAtStart` takes it at w0, `Line` at a point of the segment (SME), `Bezier` at a point beside it (NL-SME);
`Rescaled` lets the search scale what they predict. All compare gradients, u / (lr x steps) if that is known, and go
through the known defence.

Unknowns of the predictions, by name:
alpha       (rounds,) where on the path, 0 at w0 and 1 at wT
control     by round and parameter: control point minus midpoint of the segment, in units of the update's RMS
scaling     (tensors,), or by parameter: factors on the predicted gradient; 1 to begin with
A later stage starts from the values of the last one under the same name. `Within` and `Reach` keep them in bounds:
spaces without unknowns of their own (join them by `JointSpace`). The priors `CentredControl` and `UnitScaling` pull
them back.

References: Zhu, Yao, Blaschko, ICML 2023 (SME); arXiv 2509.22082 (NL-SME).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.registry import did_you_mean
from gradleak.core.tree import Params, Tree
from gradleak.parts.predictions import Replay
from gradleak.parts.protocols import Footprint, Needs, Prediction, Prior, Space, delegates, resumed
from gradleak.parts.spaces import AnyStart, Start, entries_of
from gradleak.parts.stage import Stage
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch, Task

_OWN = 1 << 12  # the child of a lane's source that draws alpha: fields count from 0 and are far fewer

# --- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientAtStart(Prediction):
    """The gradient at the weights that were sent, as if the client had made one large step (IG and DLG on updates).

    `Replay` without a recipe is the same if the threat model knows none; otherwise that one replays every step.
    """

    @property
    def needs_for_scale(self) -> Needs:
        return frozenset({"training"})

    def target(self, scene: TargetView) -> Params:
        return tree.scale(Replay().target(scene), 1 / length(scene))

    def disturbed(self, scene: TargetView, draws: Draws) -> Params:
        return tree.scale(Replay().disturbed(scene, draws), 1 / length(scene))

    def points(self, v: Tree) -> Sequence[tuple[float, Tensor | float]]:
        """Where gradients are taken: (share, alpha) each, shares that sum to one."""
        return [(1.0, 0.0)]

    def weights(self, scene: TargetView, number: int, alpha: Tensor | float, v: Tree) -> Params:
        """The point `alpha` of the path of one round, the `number`-th of the target."""
        return scene.weights

    def seen_from(self, scene: TargetView, alpha: Tensor | float, v: Tree) -> TargetView:
        """The scene with every round's weights moved to the point `alpha` of its own path."""

        def moved(number: int, each: TargetView) -> TargetView:
            point = alpha[number] if isinstance(alpha, Tensor) else alpha
            return replace(each, weights=self.weights(each, number, point, v))

        *earlier, last = (moved(number, each) for number, each in enumerate(scene.rounds))
        return replace(last, earlier=tuple(earlier))

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        # A defence may clip, so it needs an update of the right length; without one, a pass is saved.
        lr = 1.0 if scene.knows.defence is None else length(scene)
        step = Replay(LocalTraining(lr=lr, optimiser=SGD(weight_decay=_rule(scene).weight_decay)))
        (first, alpha), *others = self.points(v)
        total = tree.scale(step(batch, v, self.seen_from(scene, alpha, v), now), first / lr)
        # Few nodes, one after another: with an inner vmap, models that vmap rejects could not run lane by lane.
        for share, alpha in others:
            total = tree.add(total, step(batch, v, self.seen_from(scene, alpha, v), now), share / lr)
        return total


@dataclass(frozen=True)
class Line(GradientAtStart):
    """The gradient at s(alpha) = (1 - alpha) w0 + alpha wT, alpha an unknown (SME).

    start, spread   alpha starts at start, or for each restart somewhere in start +- spread
    nodes           more than one: no alpha, but the mean gradient along the path by so many Gauss-Legendre nodes. This
                    is the principled form: an update is the sum of the gradients along the path

    At alpha = 0 this is `GradientAtStart`. The public code of SME assigns the weights and applies the chain rule by
    hand; here autograd does, d/dalpha = <d/ds, wT - w0>, the second order through the gradient included.
    """

    start: float = 0.5
    spread: float = 0.0
    nodes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start - abs(self.spread) <= self.start + abs(self.spread) <= 1:
            raise ValueError(f"alpha must begin in [0, 1]; given start {self.start} and spread {self.spread}.")
        if self.nodes < 1:
            raise ValueError(f"nodes must be at least 1; given {self.nodes}.")

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if self.nodes > 1:
            return {}
        like, shape = scene.like, (len(scene.rounds),)
        begin = torch.full(shape, self.start, device=like.device, dtype=like.dtype)
        if self.spread:
            begin = begin + self.spread * (2 * draws.child(_OWN).uniform(shape, dtype=like.dtype) - 1)
        return resumed({"alpha": begin}, before)

    def footprint(self, scene: TargetView) -> Footprint:
        return Footprint(passes=self.nodes, gradients=self.nodes)

    def points(self, v: Tree) -> Sequence[tuple[float, Tensor | float]]:
        return [(1.0, v["alpha"])] if self.nodes == 1 else gauss_legendre(self.nodes)

    def weights(self, scene: TargetView, number: int, alpha: Tensor | float, v: Tree) -> Params:
        return tree.add(scene.weights, scene.update, -alpha)  # wT = w0 - u


@dataclass(frozen=True)
class Bezier(Line):
    """The gradient at W = (1 - alpha)^2 w0 + 2 alpha (1 - alpha) c + alpha^2 wT, alpha and c unknowns (NL-SME).

    The unknown `control` is z in c = (w0 + wT) / 2 + r z, r the root mean square of the update: one learning rate then
    fits every model and every client (Adam moves each entry by about its rate). It starts at zero, which is the line.
    W = s(alpha) + 2 alpha (1 - alpha) r z: at alpha = 0 or 1 the control point has no influence and gets no gradient,
    so keep alpha inside (`Within`).
    """

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        control = {str(number): tree.zeros_like(each.update) for number, each in enumerate(scene.rounds)}
        return {**super().variables(scene, draws, before), **resumed({"control": control}, before)}

    def weights(self, scene: TargetView, number: int, alpha: Tensor | float, v: Tree) -> Params:
        bend = 2 * alpha * (1 - alpha) * unit_of_control(scene)
        return tree.add(super().weights(scene, number, alpha, v), v["control"][str(number)], bend)


@delegates("predict")
@dataclass(frozen=True)
class Rescaled(Prediction):
    """Another prediction times learned factors: one for each tensor, or for each entry of it (NL-SME's scaling).

    The observed update stays as it is. Factors of single entries can turn almost any gradient into the update: then the
    match says little about the images (see `diagnosis`).
    """

    predict: Prediction
    per: str = "tensor"

    def __post_init__(self) -> None:
        if self.per not in ("tensor", "element"):
            raise ValueError(f"per must be 'tensor' or 'element'; given {self.per!r}.")

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        target = self.predict.target(scene)
        ones = tree.map(torch.ones_like, target) if self.per == "element" else tree.like(target).new_ones(len(target))
        return {**self.predict.variables(scene, draws, before), **resumed({"scaling": ones}, before)}

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        predicted, factors = self.predict(batch, v, scene, now), v["scaling"]
        if self.per == "tensor":
            factors = dict(zip(predicted, factors.unbind(), strict=True))
        return tree.multiply(predicted, factors)


def unit_of_control(scene: TargetView) -> Tensor:
    """The unit of a round's control point: the root mean square of its update."""
    return tree.norm(scene.update) / tree.size(scene.update) ** 0.5


def length(scene: TargetView) -> float | Tensor:
    """How far the client's SGD moves along a constant gradient of length one; 1 if the recipe is not known.

    The sum of its learning rates if it has no momentum; the same for other rules, which have no such length. Only
    matches that see the scale, and defences that clip, depend on it.
    """
    training, rule = scene.knows.training, _rule(scene)
    if training is None:
        return 1.0
    return training.lr * rule.way(training.factors(scene.num_examples))


def _rule(scene: TargetView) -> SGD:
    """The client's rule if it is SGD, else plain SGD."""
    training = scene.knows.training
    return training.optimiser if training is not None and isinstance(training.optimiser, SGD) else SGD()


@lru_cache(maxsize=16)
def gauss_legendre(nodes: int) -> Sequence[tuple[float, float]]:
    """(weight, node) of the rule on [0, 1] that is exact for polynomials up to degree 2 nodes - 1."""
    at, weights = np.polynomial.legendre.leggauss(nodes)
    return tuple((float(w) / 2, (float(x) + 1) / 2) for x, w in zip(at, weights))


# --- what holds the unknowns of a prediction --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Holding(Space):
    """A space with no unknowns of its own: it bounds a named unknown after every step. Join it by `JointSpace`."""

    name: str

    def unknowns(self, scene: TargetView) -> int:
        return 0

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        if self.name not in v:
            raise ValueError(f"{self} holds {self.name!r}, which is not an unknown.{did_you_mean(self.name, v)}")
        return {**v, **self.bounded({self.name: v[self.name]})}  # a tree, for one tensor and for several by name

    def bounded(self, unknown: Tree) -> Tree:
        raise NotImplementedError


@dataclass(frozen=True)
class Within(_Holding):
    """Every entry of the named unknown stays in [low, high]."""

    low: float
    high: float

    def bounded(self, unknown: Tree) -> Tree:
        return tree.map(lambda value: value.clamp(self.low, self.high), unknown)


@dataclass(frozen=True)
class Reach(_Holding):
    """The named unknown stays in the ball of root mean square at most `most`.

    For a control point in its own units, with most = 1: ||c - (w0 + wT) / 2|| <= ||wT - w0||.
    """

    most: float

    def bounded(self, unknown: Tree) -> Tree:
        size = tree.norm(unknown) / tree.size(unknown) ** 0.5
        return tree.scale(unknown, torch.where(size > self.most, self.most / torch.where(size > 0, size, 1.0), 1.0))


@dataclass(frozen=True)
class Inside(Start):
    """Another start, clamped to the field's bounds."""

    start: AnyStart

    def entries(self, task: Task) -> int:
        return entries_of(self.start, task)

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, high = scene.limits[name]
        return self.start(scene, draws, name).clamp(low, high)


# --- priors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CentredControl(Prior):
    """weight * ||c - (w0 + wT) / 2||^2 / ||wT - w0||^2, which in the control point's own units is a mean square."""

    weight: float

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return self.weight / tree.size(v["control"]) * tree.squared_norm(v["control"])

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return (self.weight / tree.size(v["control"])) ** 0.5 * tree.flatten(v["control"])


@dataclass(frozen=True)
class UnitScaling(Prior):
    """weight * mean (d - 1)^2 over the factors d of `Rescaled`."""

    weight: float

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return self.terms(batch, v, scene, now).square().sum()

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        factors = tree.flatten({"scaling": v["scaling"]})
        return (self.weight / factors.shape[0]) ** 0.5 * (factors - 1)


@dataclass(frozen=True)
class SurrogateLoss(Prior):
    """weight * the client's objective on the guess, at the point where `path` takes its gradient.

    Most of it is in the match already, and it favours images that the network is sure of.
    """

    weight: float
    path: GradientAtStart

    @property
    def needs(self) -> Needs:
        return self.path.needs

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        total = scene.like.new_zeros(())
        for share, alpha in self.path.points(v):
            for each in self.path.seen_from(scene, alpha, v).rounds:
                total = total + share * scene.task.loss(each.weights, batch, each.buffers)[0]
        return self.weight / len(scene.rounds) * total


# --- what a low match is worth ----------------------------------------------------------------------------------------


def diagnosis(stage: Stage, v: Tree, scene: TargetView, now: Step) -> dict[str, Tensor]:
    """The state of a search in one lane, from what the attacker has.

    l_sim_obj       the match that is minimised, with the factors of `Rescaled`
    l_sim_raw       the match at the same point without them: compare attacks by this one
    alpha           mean over rounds
    bend            ||c - (w0 + wT) / 2|| / ||wT - w0||
    scaling_min, scaling_max

    A free control point and free factors lower the match for ANY images, noise included. Read l_sim_raw beside
    l_sim_obj, and both beside those of `frozen`; neither is a measure of what leaked.
    """
    batch = {**scene.fields, **stage.space.decode(v, scene, now)}
    observed = stage.match.prepare(stage.predict.target(scene))
    plain = stage.predict.predict if isinstance(stage.predict, Rescaled) else stage.predict
    numbers = {
        "l_sim_obj": stage.match.distance(stage.predict(batch, v, scene, now), observed),
        "l_sim_raw": stage.match.distance(plain(batch, v, scene, now), observed),
    }
    if "alpha" in v:
        numbers["alpha"] = v["alpha"].mean()
    if "control" in v:
        numbers["bend"] = tree.norm(v["control"]) / tree.size(v["control"]) ** 0.5
    if "scaling" in v:
        factors = tree.flatten({"scaling": v["scaling"]})
        numbers |= {"scaling_min": factors.min(), "scaling_max": factors.max()}
    return numbers


def performance_gap(reference: float, other: float) -> tuple[float, float]:
    """(100 (reference - other) / reference, reference / other): NL-SME's gap in % and error reduction.

    Of two matches, such as those of SME and NL-SME on one client. The paper derives them for another error; its tables
    follow from the match.
    """
    if not (reference > 0 and other > 0):
        raise ValueError(f"A gap compares two positive matches; given {reference} and {other}.")
    return 100 * (reference - other) / reference, reference / other
