"""A whole local training inside the attack: the client's steps, simulated and differentiated, a copy of the data for
every epoch (DLFA).

The client shuffles its examples anew in each epoch, and nobody else knows how. With a copy of the data for every epoch
the order needs no guess: whatever image the client used at a place of an epoch can stand at that place of its copy. The
copies hold the same images in different orders, which `OrderInvariance` asks of them, and `settled` makes one batch
of them in the end.

A batch with copies holds x as (N, E, ...): the E copies of row n beside each other. One without holds it as (N, ...).

Reference: Dimitrov, Balunovic, Konstantinov, Vechev, "Data Leakage in Federated Averaging", TMLR 10/2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradleak.attacks.dlfa.checkpointed import held, trained
from gradleak.core import assignment, tree
from gradleak.core.random import Draws, key
from gradleak.core.recompute import recomputed
from gradleak.core.tree import Params, Tree
from gradleak.parts.optimisers import require_positive
from gradleak.parts.predictions import Replay, all_rounds
from gradleak.parts.priors import stacked
from gradleak.parts.protocols import FieldRule, Footprint, Needs, Prediction, Prior, delegates
from gradleak.parts.spaces import Pixels
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch, Field

# --- which step sees what ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One simulated step: the copy and the rows it trains on (None: all), and how far it goes, in learning rates."""

    copy: int
    rows: slice | None
    length: float


Plan = Callable[[LocalTraining, int], list[Turn]]
"""(the client's recipe, its number of examples) -> the steps that are simulated."""


def a_copy_an_epoch(training: LocalTraining, examples: int) -> list[Turn]:
    """The client's steps, each epoch on a copy of its own (DLFA's "full_many")."""
    turns, copy = [], -1
    for turn in one_copy(training, examples):
        copy += turn.rows is None or turn.rows.start == 0  # every epoch begins with the first rows
        turns.append(replace(turn, copy=copy))
    return turns


def one_copy(training: LocalTraining, examples: int) -> list[Turn]:
    """The client's steps, all epochs in one and the same order ("full")."""
    plan = training.order(examples)
    turns = []
    for step, rows in enumerate(plan):
        assert not isinstance(rows, Tensor)  # without a generator an order is one of slices
        turns.append(Turn(0, rows, training.schedule(step, len(plan))))
    return turns


def a_step_an_epoch(training: LocalTraining, examples: int) -> list[Turn]:
    """One step an epoch, on all examples, as long as all steps of the epoch together ("none_epoch").

    Momentum then reaches back over epochs instead of steps, and such a client is followed too short a way.
    """
    epochs: dict[int, float] = {}
    for turn in a_copy_an_epoch(training, examples):
        epochs[turn.copy] = epochs.get(turn.copy, 0.0) + turn.length
    return [Turn(0, None, length) for length in epochs.values()]


def one_step(training: LocalTraining, examples: int) -> list[Turn]:
    """One step on all examples at the weights sent, as long as all steps together ("none"): with momentum too."""
    factors, rule = training.factors(examples), training.optimiser
    # A single step has no velocity yet: what momentum makes of many has to be in its length.
    length = rule.way(factors) / rule.way([1.0]) if isinstance(rule, SGD) else sum(factors)
    return [Turn(0, None, length)]


def epochs(training: LocalTraining, examples: int) -> tuple[int, int]:
    """(begun, completed): the client's passes over its examples. The last one may be cut short by `steps`."""
    turns = a_copy_an_epoch(training, examples)
    last = turns[-1].rows
    begun = turns[-1].copy + 1
    return begun, begun if last is None or last.stop >= examples else begun - 1


# --- the space --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies(Pixels):
    """The image itself, once for every epoch of the client: (N, E, ...), each copy from a start of its own."""

    @property
    def needs(self) -> Needs:
        return frozenset({"training"})

    def unknowns(self, scene: TargetView) -> int:
        count, _ = epochs(_recipe(scene), scene.num_examples)
        return count * scene.num_examples * math.prod(scene.task.fields[self.field].shape)

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        count, _ = epochs(_recipe(scene), scene.num_examples)
        rank = 1 + len(scene.task.fields[self.field].shape)
        if before is not None and self.field in before:
            held = before[self.field]
            return {self.field: held if held.dim() > rank else held[:, None].repeat_interleave(count, dim=1)}
        many = replace(scene, num_examples=count * scene.num_examples)
        start = super().variables(many, draws, None)[self.field]
        return {self.field: start.unflatten(0, (count, scene.num_examples)).transpose(0, 1)}


@delegates("rule")
@dataclass(frozen=True)
class Mixed(FieldRule):
    """The fields that another rule reads off, their rows in an order that means nothing: the same for every target.

    Label rules name classes in ascending order. A simulated client would then train on one class after another, in
    every epoch, which no client that shuffles does: even with the true images 2 to 4 times as much of the update is
    left unexplained as in a random order, and 40 times at a high learning rate (small networks on smooth images).
    """

    rule: FieldRule

    def __call__(self, scene: TargetView) -> Batch:
        found = self.rule(scene)
        order = Draws(key("order of rows")).uniform((scene.num_examples,), dtype=torch.float64).argsort()
        return {name: value[order.to(value.device)] for name, value in found.items()}


def settled(copies: Tensor, field: Field, complete: int | None = None) -> Tensor:
    """One batch (N, ...) from the copies (N, E, ...): each is matched to the first, one to one, and the mean taken.

    By PSNR, as the paper does. Between copies only: the attacker has nothing else. Those beyond the first `complete`
    belong to an epoch that was cut short, in which some rows took no part: they are left out, unless there is no other.
    """
    parts = copies.unbind(1)
    parts = parts if complete is None else parts[: max(1, complete)]
    pictures = [torch.nan_to_num(field.unit(part.double())) for part in parts]
    total = parts[0]
    for part, picture in zip(parts[1:], pictures[1:], strict=True):
        total = total + part[assignment.match(assignment.cost_matrix(pictures[0], picture, distance=_minus_psnr))]
    return total / len(parts)


def _minus_psnr(first: Tensor, second: Tensor) -> Tensor:
    """-PSNR of every pair, pixels in [0, 1]; capped where two are equal."""
    return 10 * assignment.pairwise_mse(first, second).clamp_min(1e-12).log10()


# --- the prediction ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalSteps(Prediction):
    """The update of the client's local training, simulated step by step on the guess.

    Both it and the observed one are in units of the client's learning rate, and of the square root of the number of
    batches that the guess holds: a squared error is then DLFA's, ||u_s - u||^2 / lr^2 / batches.

    plan        which steps are simulated, and on which copy
    every       a checkpoint at every so many steps (`recompute.rollout`): memory grows with the weights there, and not
                with the steps' activations. 0: the graph of all steps is held
    most        the most steps to simulate. Time grows with them, in each iteration of the search
    """

    plan: Plan = a_copy_an_epoch
    every: int = 1
    most: int = 100

    def __post_init__(self) -> None:
        require_positive(self, whole=("most",))
        if self.every < 0:
            raise ValueError(f"A checkpoint comes at every so many steps, or never (0); given {self.every}.")

    @property
    def needs(self) -> Needs:
        return frozenset({"training"})

    def footprint(self, scene: TargetView) -> Footprint:
        examples = scene.num_examples
        rows = [examples if turn.rows is None else len(range(examples)[turn.rows]) for turn in self.turns(scene)]
        return held([each / examples for each in rows], self.every)

    def target(self, scene: TargetView) -> Params:
        return tree.scale(Replay().target(scene), 1 / self.unit(scene))

    def disturbed(self, scene: TargetView, draws: Draws) -> Params:
        return tree.scale(Replay().disturbed(scene, draws), 1 / self.unit(scene))

    def turns(self, scene: TargetView) -> list[Turn]:
        turns = self.plan(_recipe(scene), scene.num_examples)
        if len(turns) > self.most:
            raise ValueError(
                f"The client makes {len(turns)} local steps, and every iteration of this attack simulates and "
                f"differentiates them all: more than the {self.most} it takes on. Raise most_steps to pay for it (time "
                "grows with the steps, memory with the weights times the steps; checkpoint=10 lowers the latter), or "
                "use an attack whose cost does not grow with them, such as sme or nl-sme."
            )
        return turns

    def unit(self, scene: TargetView) -> float | Tensor:
        rows = (self.turns(scene)[-1].copy + 1) * scene.num_examples
        return _recipe(scene).lr * math.sqrt(-(-rows // _size(scene)))

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        turns = self.turns(scene)
        parts, first = turned(batch, scene, turns), {name: copy[0] for name, copy in copies_of(batch, scene).items()}
        lengths = [turn.length for turn in turns]
        simulated = [trained(_recipe(scene), each, parts, lengths, first, self.every) for each in scene.rounds]
        return tree.scale(all_rounds(simulated), 1 / self.unit(scene))


def copies_of(batch: Batch, scene: TargetView) -> dict[str, Sequence[Tensor]]:
    """Every field as its copies, each (N, ...); a field that has none, such as labels, is its own only copy."""

    def copies(name: str, value: Tensor) -> Sequence[Tensor]:
        known = scene.task.fields[name]
        rank = 1 + len(known.shape) + (known.classes is not None and value.is_floating_point())
        return value.unbind(1) if value.dim() > rank else (value,)

    return {name: copies(name, value) for name, value in batch.items()}


def turned(batch: Batch, scene: TargetView, turns: Sequence[Turn]) -> list[Batch]:
    """What every step trains on. Each copy is split once: a slice for every step would cost a pass over all of it."""
    size, fields = _size(scene), copies_of(batch, scene)
    pieces = {name: [copy.split(size) for copy in copies] for name, copies in fields.items()}

    def of(turn: Turn, name: str) -> Tensor:
        copy = turn.copy if len(fields[name]) > 1 else 0
        return fields[name][copy] if turn.rows is None else pieces[name][copy][turn.rows.start // size]

    return [{name: of(turn, name) for name in fields} for turn in turns]


def _size(scene: TargetView) -> int:
    """Examples in one of the client's batches."""
    return min(_recipe(scene).batch_size or scene.num_examples, scene.num_examples)


def _recipe(scene: TargetView) -> LocalTraining:
    training = scene.knows.training
    assert training is not None  # asked for by `needs`
    return training


# --- priors -----------------------------------------------------------------------------------------------------------


FEATURES = 96


@dataclass(frozen=True)
class OrderInvariance(Prior):
    """weight / E^2 * sum over pairs of epochs of mean |phi(X_a) - phi(X_b)|^power, phi blind to the order of images.

    over        "mean" or "max": phi is that over the images of an epoch
    of          "pixels", or "features": of `FEATURES` convolutions 3 x 3 with fixed random kernels
    power       2, or 1

    Zero where all copies hold the same images, in whatever orders; and for one copy. The paper does not give the law of
    the kernels: here N(0, 1 / (9 C)), so that features vary as pixels do, with zeros around the image and no bias.
    """

    weight: float
    over: str = "mean"
    of: str = "pixels"
    power: int = 2
    field: str = "x"

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[Any]] = {"over": tuple(_OVER), "of": tuple(_OF), "power": tuple(_POWER)}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                told = " or ".join(map(repr, known))
                raise ValueError(f"{name} must be {told}; given {getattr(self, name)!r}.")

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        shape = scene.task.fields[self.field].shape
        copies = stacked(batch, scene, self.field).reshape(scene.num_examples, -1, *shape).unbind(1)
        phi = torch.stack([_OF[self.of](_OVER[self.over])(copy).flatten() for copy in copies])  # (E, entries)
        return self.weight * _POWER[self.power](phi).mean()


def _squared_gaps(phi: Tensor) -> Tensor:
    """Mean over pairs of (a - b)^2: twice the variance. (E, entries) -> (entries,)"""
    return 2 * (phi - phi.mean(0)).square().mean(0)


def _gaps(phi: Tensor) -> Tensor:
    """Mean over pairs of |a - b|, from the sorted values: the k-th of E is above k others and below E - 1 - k."""
    count = phi.shape[0]
    above = 2 * torch.arange(count, device=phi.device, dtype=phi.dtype) - (count - 1)
    return 2 * (above[:, None] * phi.sort(0).values).sum(0) / count**2


def _of_features(over: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Features are a hundred times as many as pixels: those of one epoch at a time are held."""

    def reduced(images: Tensor) -> Tensor:
        return over(F.conv2d(images, kernels(images.shape[1], images.device, images.dtype), padding=1))

    return recomputed(reduced)


def _of_pixels(over: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return over


def _mean(images: Tensor) -> Tensor:
    return images.mean(0)


def _max(images: Tensor) -> Tensor:
    return images.amax(0)


@lru_cache(maxsize=8)
def kernels(channels: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The random convolutions of `OrderInvariance`, the same in every lane and every run."""

    def drawn() -> Tensor:
        normal = Draws(key("order invariance")).normal((FEATURES, channels, 3, 3), dtype=torch.float64)
        return (normal / math.sqrt(9 * channels)).to(device, dtype)

    # In a thread of its own: transforms, modes and inference are each thread's own, and what is kept outlives them.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(drawn).result()


_OVER = {"mean": _mean, "max": _max}
_OF = {"pixels": _of_pixels, "features": _of_features}
_POWER = {1: _gaps, 2: _squared_gaps}


# --- what changes with the iteration ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ramp:
    """A factor that goes from `first` to `last` geometrically over so many steps of the search, and stays there."""

    first: float
    last: float
    over: int = 200

    def __post_init__(self) -> None:
        require_positive(self, whole=("over",), real=("first", "last"))

    def __call__(self, now: Step) -> Tensor:
        return self.first * torch.exp((now.step / self.over).clamp(max=1) * math.log(self.last / self.first))


@dataclass(frozen=True)
class Times:
    """The gradient times a ramp, before the optimiser sees it.

    With every prior `Over` the same ramp, the search descends ramp * match + priors, while the match that is told, and
    by which iterates and restarts are chosen, is free of the ramp.
    """

    ramp: Ramp

    def __call__(self, gradient: Tensor, now: Step) -> Tensor:
        return gradient * self.ramp(now)


@delegates("prior")
@dataclass(frozen=True)
class Over(Prior):
    """A prior divided by a ramp; see `Times`."""

    prior: Prior
    ramp: Ramp

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return self.prior(batch, v, scene, now) / self.ramp(now)

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return self.prior.terms(batch, v, scene, now) / self.ramp(now).sqrt()
