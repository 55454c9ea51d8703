"""Coarse replay: a few large steps on all examples in place of a client's many small ones on batches of them.

A client that makes T steps follows a curved path, over batches in an order that the attacker does not know. `Coarse`
approximates it with K gradients of ALL examples:

    v_0 = w0,    v_{k+1} = v_k - what the client's rule makes of g(v_k; x) in T / K of its steps,    u = w0 - v_K.

For plain SGD that is v_k - (lr T / K) g(v_k; x). The order of the batches does not enter. If the recipe is known, the
images are the only unknowns. K = 1 is the gradient at w0 (`surrogates.GradientAtStart`); K = T is the client itself
(`predictions.Replay`) if it trains on full batches.

Adam divides by the size of its gradients, which includes how far those of single batches lie apart: with small batches
that is most of the denominator. `SpreadRule` therefore takes the K gradients in batches of the client's size. It also
makes the match smoother: without it, a step is close to the sign of a gradient, whose slope changes within a small
move. Lion takes the sign of every batch too, but is not treated this way.

If the recipe is not known, one number is learned for each round, the unknown `total` (rounds,): the log of the sum of
the client's learning rates, for plain SGD. It belongs to the space `Total`, which starts it by a small search. Later
stages keep it.

The method is gradleak's own. Dimitrov et al., TMLR 2022, replay one full-batch step for each epoch as a baseline, with
the gradient times the batches of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.recompute import recomputed
from gradleak.core.tree import Params, Tree
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Schedule, Window, require_positive
from gradleak.parts.predictions import Replay, all_rounds
from gradleak.parts.protocols import Footprint, Prediction, Space
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.rules import SGD, Adam, Rule
from gradleak.scenario.task import Batch, Task

FINE = 100  # local steps assumed per coarse step when the recipe is unknown

# --- a client's rule over several of its steps at once ----------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """Consecutive steps of a client: their factors on the learning rate, and how many steps came before."""

    factors: tuple[float, ...]
    before: int

    def __len__(self) -> int:
        return len(self.factors)


@dataclass(frozen=True)
class CoarseRule:
    """A client's rule in coarse steps: each makes all steps of an interval with one gradient. It is a `Rule` itself.

    SGD with momentum, dampening, Nesterov, weight decay and any schedule is linear in weights, velocity and gradient:
    the rule computes the factors once, and a coarse step costs as much as one step. The result is exactly that of all
    the steps with this gradient. For other rules see `over`.

    `extrapolate`: the gradient changes along the line through the last two. The error is then second order in the
    length of an interval, at no cost (the method of Adams and Bashforth; Hairer, Norsett, Wanner, Solving Ordinary
    Differential Equations I, III.1). In the first interval, and in one of a single step, the gradient is constant. Long
    intervals become unstable earlier.
    """

    rule: Rule
    plan: tuple[Interval, ...]
    extrapolate: bool = False

    def init(self, weights: Params) -> Tree:
        return {**self.rule.init(weights), "interval": 0}

    def step(self, weights: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]:
        number: int = state["interval"]
        steps, slope, last = self.plan[number], None, {}
        inner = {name: value for name, value in state.items() if name not in ("interval", "gradient")}
        if self.extrapolate:
            last = {"gradient": gradient}
            if number and len(steps) > 1:
                slope = tree.scale(tree.subtract(gradient, state["gradient"]), 1 / len(self.plan[number - 1]))
        decrease, inner = over(self.rule, weights, gradient, slope, inner, lr, steps)
        return decrease, {**inner, **last, "interval": number + 1}


@dataclass(frozen=True)
class SpreadRule:
    """A coarse rule that takes the examples batch by batch, all at the same weights. It is a `Rule` itself.

    After the last batch it makes the step with the mean gradient. The variance of the batches' gradients about the
    mean, entry by entry, is in the rule's state as `spread`. The attacker does not know which examples share a batch;
    the variance depends little on it.

    sizes   examples in each batch
    """

    rule: CoarseRule
    sizes: tuple[int, ...]

    def init(self, weights: Params) -> Tree:
        return {"rule": self.rule.init(weights), "batch": 0}

    def step(self, weights: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]:
        # One by one, as Welford does: a mean square less the square of the mean would lose its sign to rounding.
        number: int = state["batch"]
        share = self.sizes[number] / sum(self.sizes[: number + 1])
        mean, spread = gradient, None
        if number:
            apart = tree.subtract(gradient, state["mean"])
            mean = tree.add(state["mean"], apart, share)
            spread = tree.map(lambda d: share * (1 - share) * d * d, apart)
            if "spread" in state:
                spread = tree.add(spread, state["spread"], 1 - share)
        if number + 1 < len(self.sizes):
            more = {} if spread is None else {"spread": spread}
            return tree.zeros_like(weights), {"rule": state["rule"], "batch": number + 1, "mean": mean, **more}
        inner = state["rule"] if spread is None else {**state["rule"], "spread": spread}
        decrease, inner = self.rule.step(weights, mean, inner, lr)
        return decrease, {"rule": inner, "batch": 0}


@singledispatch
def sees_spread(rule: Any) -> bool:
    """Does `over` use a `spread` in the state of this rule? Register your own rules."""
    return False


@sees_spread.register
def _adam_sees(rule: Adam) -> bool:
    return True


@singledispatch
def over(
    rule: Any,
    weights: Params,
    gradient: Params,
    slope: Params | None,
    state: Tree,
    lr: float | Tensor,
    steps: Interval,
) -> tuple[Params, Tree]:
    """What a rule subtracts in the steps of an interval, and its state after them. Register your own rules.

    The gradient of the j-th step is gradient + j slope; without a slope it is constant.

    The default: one step of the rule, with the mean gradient and the sum of the learning rates. Its memory then covers
    coarse steps instead of fine ones. Exact for an interval of one step.
    """
    moved: tuple[Params, Tree] = rule.step(weights, _mean(gradient, slope, steps), state, lr * sum(steps.factors))
    return moved


@over.register
def _sgd(
    rule: SGD,
    weights: Params,
    gradient: Params,
    slope: Params | None,
    state: Tree,
    lr: float | Tensor,
    steps: Interval,
) -> tuple[Params, Tree]:
    """Exact for these gradients: one linear combination of them, the weights and the velocity."""
    started = "velocity" in state
    moved: Sequence[Any]
    velocity: Sequence[Any]
    if not rule.weight_decay:  # linear in the learning rate too, which then may be a tensor at no cost
        moved, velocity = _cached(rule, steps.factors, started)
        moved = [lr * factor if factor else 0.0 for factor in moved]
    elif isinstance(lr, Tensor):
        rows = torch.eye(4, dtype=lr.dtype, device=lr.device).unbind()
        moved, velocity = (row.unbind() for row in coefficients(rule, [lr * f for f in steps.factors], started, rows))
    else:
        moved, velocity = _cached(rule, tuple(lr * factor for factor in steps.factors), started)
    terms = (weights, state.get("velocity"), gradient, slope)
    return _combined(moved, terms), {"velocity": _combined(velocity, terms)} if rule.momentum else {}


@over.register
def _adam(
    rule: Adam,
    weights: Params,
    gradient: Params,
    slope: Params | None,
    state: Tree,
    lr: float | Tensor,
    steps: Interval,
) -> tuple[Params, Tree]:
    """Both moments after the steps, and the sum of the bias-corrected first moments, are exact for a constant gradient.

    With a `spread` in the state, the second moment is that of the gradients of single batches: E g^2 = (E g)^2 +
    spread. The first moment averages over several batches: it is that of their mean.

    Approximations: the steps share one denominator, from the mean of their bias-corrected second moments; an
    extrapolated gradient is replaced by its mean; weight decay uses the weights at the start of the interval.
    """
    gradient = _mean(gradient, slope, steps)
    if rule.weight_decay and not rule.decoupled:
        gradient = tree.add(gradient, weights, rule.weight_decay)
    (b1, b2), count = rule.betas, len(steps)
    old, new, old_square, new_square = _adam_factors(rule.betas, steps)
    square = tree.multiply(gradient, gradient)
    if "spread" in state:
        square = tree.add(square, state["spread"])

    def move(m: Tensor, v: Tensor, g: Tensor, gg: Tensor) -> Tensor:
        return lr * (old * m + new * g) / (tree.safe_sqrt(old_square * v + new_square * gg) + rule.eps)

    decrease = tree.map(move, state["first"], state["second"], gradient, square)
    if rule.weight_decay and rule.decoupled:
        decrease = tree.add(decrease, weights, lr * sum(steps.factors) * rule.weight_decay)
    return decrease, {
        "first": tree.map(lambda m, g: b1**count * m + (1 - b1**count) * g, state["first"], gradient),
        "second": tree.map(lambda v, gg: b2**count * v + (1 - b2**count) * gg, state["second"], square),
        "count": state["count"] + count,
    }


def coefficients(rule: SGD, rates: Sequence[Any], started: bool, rows: Sequence[Any]) -> tuple[Any, Any]:
    """(decrease, velocity) after steps of these rates, each as factors of (weights, velocity, gradient, slope).

    The rule makes the steps on the rows of a unit matrix (4, 4) in place of these four.
    """
    weights, velocity, gradient, slope = rows
    state: Tree = {"velocity": {"": velocity}} if started else {}
    total: Any = 0 * weights
    for number, rate in enumerate(rates):
        decrease, state = rule.step({"": weights}, {"": gradient + number * slope}, state, rate)
        total, weights = total + decrease[""], weights - decrease[""]
    return total, state["velocity"][""] if state else 0 * total


@lru_cache(maxsize=4096)
def _cached(rule: SGD, rates: tuple[float, ...], started: bool) -> tuple[list[float], list[float]]:
    # numpy: inside a step torch may be tracing, and would give tensors without values.
    moved, velocity = coefficients(rule, rates, started, list(np.eye(4)))
    return moved.tolist(), velocity.tolist()


@lru_cache(maxsize=4096)
def _adam_factors(betas: tuple[float, float], steps: Interval) -> tuple[float, float, float, float]:
    """Factors of first moment and gradient in the sum of the steps; of second moment and square in their mean."""
    j = np.arange(1, len(steps) + 1)
    rates = np.asarray(steps.factors)
    shares = rates / rates.sum() if rates.sum() else np.full(len(steps), 1 / len(steps))

    def pair(beta: float, weights: Any) -> tuple[float, float]:
        corrected = weights / (1 - beta ** (steps.before + j))
        return float((corrected * beta**j).sum()), float((corrected * (1 - beta**j)).sum())

    return (*pair(betas[0], rates), *pair(betas[1], shares))


def _mean(gradient: Params, slope: Params | None, steps: Interval) -> Params:
    return gradient if slope is None else tree.add(gradient, slope, (len(steps) - 1) / 2)


def _combined(factors: Sequence[Any], terms: Sequence[Params | None]) -> Params:
    """The sum of factor times term, without factors of zero: every term is a pass over the weights."""
    total: Params | None = None
    for factor, term in zip(factors, terms, strict=True):
        if term is not None and (isinstance(factor, Tensor) or factor):
            total = tree.scale(term, factor) if total is None else tree.add(total, term, factor)
    return tree.zeros_like(next(term for term in terms if term is not None)) if total is None else total


def coarsened(training: LocalTraining, examples: int, steps: int, extrapolate: bool = False) -> LocalTraining:
    """The recipe in so many coarse steps on all examples, at most as many as the client makes.

    If the rule uses the spread of batches, each coarse step is as many steps of the result as an epoch has batches.
    """
    fine = len(training.order(examples))
    steps = min(steps, fine)
    cuts = [number * fine // steps for number in range(steps + 1)]
    plan = tuple(
        Interval(tuple(training.schedule(step, fine) for step in range(begin, end)), begin)
        for begin, end in zip(cuts, cuts[1:])
    )
    rule, sizes = CoarseRule(training.optimiser, plan, extrapolate), batches(training, examples)
    if len(sizes) == 1:
        return LocalTraining(lr=training.lr, steps=steps, optimiser=rule)
    return LocalTraining(
        lr=training.lr, steps=steps * len(sizes), batch_size=sizes[0], optimiser=SpreadRule(rule, sizes)
    )


def batches(training: LocalTraining, examples: int) -> tuple[int, ...]:
    """Sizes of the batches of a coarse step: one of all examples, or the client's if its rule uses their spread."""
    size = examples
    if sees_spread(training.optimiser):
        size = min(training.batch_size or examples, examples)
    return tuple(min(size, examples - start) for start in range(0, examples, size))


# --- the prediction, and its unknown ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Coarse(Prediction):
    """The update of `steps` large steps on all examples, from the weights sent, by the client's own rule.

    steps           K, at most as many as the client makes
    training        a recipe; None: that of the threat model, or plain SGD of the length that `Total` learns
    extrapolate     as in `CoarseRule`: worth about twice the steps if these are short enough
    recompute       keep K points of the path instead of K graphs, and run each step again for its derivatives: the
                    memory of one graph, and about twice the time

    In units of the update, through the known defence, all rounds of a target together.
    """

    steps: int = 20
    training: LocalTraining | None = None
    extrapolate: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps",))

    def footprint(self, scene: TargetView) -> Footprint:
        known = self.training or scene.knows.training
        steps = self.steps if known is None else min(self.steps, len(known.order(scene.num_examples)))
        parts = 1 if known is None else len(batches(known, scene.num_examples))
        # With recompute: one graph at a time, and the points of the path, each with its adjoint.
        return Footprint(passes=1 / parts if self.recompute else steps, gradients=steps * parts)

    def target(self, scene: TargetView) -> Params:
        return Replay().target(scene)

    def disturbed(self, scene: TargetView, draws: Draws) -> Params:
        return Replay().disturbed(scene, draws)

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        if self.recompute:
            scene = replace(scene, task=_recomputing(scene.task))
        return all_rounds(
            [
                Replay(self.recipe(each, v, number))(batch, v, replace(each, earlier=()), now)
                for number, each in enumerate(scene.rounds)
            ]
        )

    def recipe(self, scene: TargetView, v: Tree, number: int) -> LocalTraining:
        """The recipe that is replayed for one round, the `number`-th of the target."""
        known = self.training or scene.knows.training
        if known is None:
            if "total" not in v:
                raise ValueError(
                    "Coarse needs to know how far the client goes: pass Knowledge(training=...), or let it be learned "
                    "by joining Total() to the space: JointSpace((Pixels(), Total()))."
                )
            fine = FINE * self.steps
            known = LocalTraining(lr=v["total"][number].exp() / fine, steps=fine)
        return coarsened(known, scene.num_examples, self.steps, self.extrapolate)


@dataclass(frozen=True)
class Total(Space):
    """The unknown `total` of `Coarse`, (rounds,): the log of the sum of the client's learning rates.

    Join it to another space by `JointSpace`. It starts where a flat image matches best by cosine, among `trials` totals
    up to `reach` times more or less than |update| / |gradient|, with `steps` coarse steps each. If the recipe is known,
    it has the known value and stays: nothing depends on it.
    """

    steps: int = 5
    trials: int = 17
    reach: float = 16.0
    extrapolate: bool = False

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "trials"), real=("reach",))

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if before is not None and "total" in before:
            return {"total": before["total"]}
        return {"total": torch.stack([self.start(replace(each, fields=scene.fields)) for each in scene.rounds])}

    def start(self, scene: TargetView) -> Tensor:
        """The total at the start of a round's search."""
        training, like = scene.knows.training, scene.like
        if training is not None:
            total = training.lr * sum(training.factors(scene.num_examples))
            return torch.as_tensor(total, dtype=like.dtype, device=like.device).log()
        alone, flat, now = replace(scene, earlier=()), flat_batch(scene), Step(like.new_zeros(()), 1)
        gradient = tree.norm(scene.task.gradient(scene.weights, flat, scene.buffers))
        tiny = torch.finfo(like.dtype).tiny
        middle = tree.norm(scene.update).clamp_min(tiny).log() - gradient.clamp_min(tiny).log()
        far = float(np.log(self.reach))
        trials = middle + torch.linspace(-far, far, self.trials, dtype=like.dtype, device=like.device)
        predict, match = Coarse(self.steps, extrapolate=self.extrapolate), Cosine()
        observed = match.prepare(predict.target(alone))
        # One after another: with an inner vmap, models that vmap rejects could not run lane by lane.
        distances = torch.stack(
            [match.distance(predict(flat, {"total": trial[None]}, alone, now), observed) for trial in trials.unbind()]
        )
        best = torch.where(distances.isfinite(), distances, torch.inf).argmin(keepdim=True)
        return trials.gather(0, best).squeeze(0)

    def unknowns(self, scene: TargetView) -> int:
        return 0  # one for each round: too few to count


def flat_batch(scene: TargetView) -> Batch:
    """Grey images, half way between the bounds, with the known labels, or equal shares of all classes."""
    like, blank = scene.like, scene.task.blank(scene.num_examples)
    for name, field in scene.task.fields.items():
        if field.classes is not None:
            shape = (scene.num_examples, *field.shape, field.classes)
            blank[name] = torch.full(shape, 1 / field.classes, dtype=like.dtype, device=like.device)
        else:
            blank[name] = blank[name].to(like.device, like.dtype)
    return {**blank, **scene.fields}


@dataclass(frozen=True)
class Onwards:
    """The part of a schedule over `total` steps that a stage sees after `done` of them."""

    schedule: Schedule
    done: int
    total: int

    def __call__(self, now: Step) -> Tensor | float:
        return self.schedule(Step(now.step + self.done, self.total))


@dataclass(frozen=True)
class OnwardsWindow:
    """The part of a window over a run that a stage sees after `done` steps; the counts start at zero."""

    window: Window
    done: int

    def due(self, now: Step) -> Tensor:
        return self.window.due(self._whole(now.step, now))

    def count(self, now: Step) -> Tensor:
        before = self.window.count(self._whole(torch.full_like(now.step, -1), now))
        return self.window.count(self._whole(now.step, now)) - before

    def _whole(self, step: Tensor, now: Step) -> Step:
        return Step(step + self.done, now.total + self.done)


@dataclass(frozen=True, eq=False)
class _Recomputing(Task):
    """A task whose gradient keeps its inputs and no graph."""

    def gradient_and_buffers(
        self, weights: Params, batch: Batch, buffers: Params | None = None
    ) -> tuple[Params, Params]:
        plain = Task(self.model, self.objective, self.fields)

        def step(weights: Params, batch: Batch, buffers: Params) -> tuple[Params, Params]:
            # Constants: BatchNorm has no derivative by its running statistics, and refuses to be asked for one.
            return plain.gradient_and_buffers(weights, batch, tree.map(Tensor.detach, buffers))

        result: tuple[Params, Params] = recomputed(step)(weights, batch, self.buffers() if buffers is None else buffers)
        return result


def _recomputing(task: Task) -> Task:
    return _Recomputing(task.model, task.objective, task.fields)
