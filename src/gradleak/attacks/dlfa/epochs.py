"""The client's whole training, simulated and differentiated, on a copy of the data for every epoch (DLFA).

The client shuffles its examples in each epoch, in an order that only it knows. With a copy of the data for every epoch
the order needs no guess: the image that the client used at a place of an epoch can stand at that place of the copy. The
copies hold the same images in different orders: `OrderInvariance` demands that, and `settled` makes one batch of them
at the end.

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

from gradleak.attacks.dlfa.checkpointed import footprint, trained
from gradleak.core import assignment, tree
from gradleak.core.random import Draws, key
from gradleak.core.recompute import recomputed
from gradleak.core.tree import Params, Tree
from gradleak.parts.optimisers import require_positive
from gradleak.parts.predictions import Replay, all_rounds
from gradleak.parts.priors import stacked
from gradleak.parts.protocols import FieldRule, Footprint, Needs, Prediction, Prior, delegates, needs_images
from gradleak.parts.spaces import Pixels
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch, Field, Task

# --- the simulated steps --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One simulated step: its copy and rows (None: all), and its length in learning rates."""

    copy: int
    rows: slice | None
    length: float


Plan = Callable[[LocalTraining, int], list[Turn]]
"""(the client's recipe, its number of examples) -> the steps to simulate."""


def a_copy_an_epoch(training: LocalTraining, examples: int) -> list[Turn]:
    """The client's steps, each epoch on its own copy (DLFA's "full_many")."""
    turns, copy = [], -1
    for turn in one_copy(training, examples):
        copy += turn.rows is None or turn.rows.start == 0  # every epoch begins with the first rows
        turns.append(replace(turn, copy=copy))
    return turns


def one_copy(training: LocalTraining, examples: int) -> list[Turn]:
    """The client's steps, all epochs in the same order ("full")."""
    plan = training.order(examples)
    turns = []
    for step, rows in enumerate(plan):
        assert not isinstance(rows, Tensor)  # without a generator an order consists of slices
        turns.append(Turn(0, rows, training.schedule(step, len(plan))))
    return turns


def a_step_an_epoch(training: LocalTraining, examples: int) -> list[Turn]:
    """One step an epoch, on all examples, as long as all steps of the epoch together ("none_epoch").

    Momentum then acts over epochs instead of steps, so the simulated client moves too short a way.
    """
    epochs: dict[int, float] = {}
    for turn in a_copy_an_epoch(training, examples):
        epochs[turn.copy] = epochs.get(turn.copy, 0.0) + turn.length
    return [Turn(0, None, length) for length in epochs.values()]


def one_step(training: LocalTraining, examples: int) -> list[Turn]:
    """One step on all examples at the weights sent, as long as all steps together, also with momentum ("none")."""
    factors, rule = training.factors(examples), training.optimiser
    # A single step has no velocity yet: its length must include the effect of momentum.
    length = rule.way(factors) / rule.way([1.0]) if isinstance(rule, SGD) else sum(factors)
    return [Turn(0, None, length)]


def epochs(training: LocalTraining, examples: int) -> tuple[int, int]:
    """(begun, completed) passes of the client over its examples. `steps` may cut the last one short."""
    turns = a_copy_an_epoch(training, examples)
    last = turns[-1].rows
    begun = turns[-1].copy + 1
    return begun, begun if last is None or last.stop >= examples else begun - 1


# --- the space ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies(Pixels):
    """The image itself, once for every epoch of the client: (N, E, ...), each copy with its own start."""

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
            images = before[self.field]
            return {self.field: images if images.dim() > rank else images[:, None].repeat_interleave(count, dim=1)}
        many = replace(scene, num_examples=count * scene.num_examples)
        start = super().variables(many, draws, None)[self.field]
        return {self.field: start.unflatten(0, (count, scene.num_examples)).transpose(0, 1)}


@delegates("rule")
@dataclass(frozen=True)
class Mixed(FieldRule):
    """The fields of another rule with their rows in a random order, the same for every target.

    Label rules name classes in ascending order. A simulated client would then train on one class after another in every
    epoch, unlike a client that shuffles: even with the true images the unexplained part of the update is 2 to 4 times
    as large as in a random order, and 40 times at a high learning rate (small networks on smooth images).
    """

    rule: FieldRule

    def __call__(self, scene: TargetView) -> Batch:
        fields = self.rule(scene)
        order = Draws(key("order of rows")).uniform((scene.num_examples,), dtype=torch.float64).argsort()
        return {name: value[order.to(value.device)] for name, value in fields.items()}


def settled(copies: Tensor, field: Field, complete: int | None = None) -> Tensor:
    """One batch (N, ...) from the copies (N, E, ...): the mean after matching each copy to the first, one to one.

    Matched by PSNR, as in the paper, between copies only: the attacker has nothing else. Copies beyond the first
    `complete` belong to an epoch that was cut short and did not use some rows: they are ignored, unless there is no
    other.
    """
    parts = copies.unbind(1)
    parts = parts if complete is None else parts[: max(1, complete)]
    pictures = [torch.nan_to_num(field.relative(part.double())) for part in parts]
    total = parts[0]
    for part, picture in zip(parts[1:], pictures[1:], strict=True):
        total = total + part[assignment.match(assignment.cost_matrix(pictures[0], picture, distance=_minus_psnr))]
    return total / len(parts)


def _minus_psnr(first: Tensor, second: Tensor) -> Tensor:
    """-PSNR of every pair, pixels in [0, 1]; capped for equal images."""
    return 10 * assignment.pairwise_mse(first, second).clamp_min(1e-12).log10()


# --- the prediction -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalSteps(Prediction):
    """The update of the client's local training, simulated step by step on the guess.

    Simulated and observed update are divided by the client's learning rate, and by the square root of the number of
    batches in the guess: their squared error is then DLFA's, ||u_s - u||^2 / lr^2 / batches.

    plan        which steps are simulated, and on which copy
    every       a checkpoint at every so many steps (`recompute.rollout`): memory grows with the weights at checkpoints,
                not with the activations of all steps. 0: hold the graph of all steps
    most        the most steps to simulate. Each iteration of the search takes time in proportion
    """

    plan: Plan = a_copy_an_epoch
    every: int = 1
    most: int = 100

    def __post_init__(self) -> None:
        require_positive(self, whole=("most",))
        if self.every < 0:
            raise ValueError(f"every must be a number of steps between checkpoints, or 0 for none; given {self.every}.")

    @property
    def needs(self) -> Needs:
        return frozenset({"training"})

    def footprint(self, scene: TargetView) -> Footprint:
        examples = scene.num_examples
        rows = [examples if turn.rows is None else len(range(examples)[turn.rows]) for turn in self.turns(scene)]
        return footprint([each / examples for each in rows], self.every)

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
    """Every field as its copies, each (N, ...); a field without copies, such as labels, has itself as the only one."""

    def copies(name: str, value: Tensor) -> Sequence[Tensor]:
        field = scene.task.fields[name]
        rank = 1 + len(field.shape) + (field.classes is not None and value.is_floating_point())
        return value.unbind(1) if value.dim() > rank else (value,)

    return {name: copies(name, value) for name, value in batch.items()}


def turned(batch: Batch, scene: TargetView, turns: Sequence[Turn]) -> list[Batch]:
    """The batch of every step. Each copy is split once: a slice for every step would cost a pass over the copy."""
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
    assert training is not None  # `needs` demands it
    return training


# --- priors ---------------------------------------------------------------------------------------------------------


FEATURES = 96


@dataclass(frozen=True)
class OrderInvariance(Prior):
    """weight / E^2 * sum over pairs of epochs of mean |phi(X_a) - phi(X_b)|^power, phi blind to the order of images.

    over        phi is the "mean" or "max" over the images of an epoch
    of          "pixels", or "features" of `FEATURES` convolutions 3 x 3 with fixed random kernels
    power       2, or 1

    Zero where all copies hold the same images, in any order; and for one copy. The paper does not give the distribution
    of the kernels: here N(0, 1 / (9 C)), so that features vary as pixels do, with zero padding and no bias.
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
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))}; given {getattr(self, name)!r}.")

    def refuses(self, task: Task) -> str:
        return needs_images(task, "its prior convolves images; of='pixels' does not") if self.of == "features" else ""

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
    """There are a hundred times as many features as pixels: memory holds those of one epoch at a time."""

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

    # In a separate thread: transforms and modes belong to a thread, and the cached kernels outlive them.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(drawn).result()


_OVER = {"mean": _mean, "max": _max}
_OF = {"pixels": _of_pixels, "features": _of_features}
_POWER = {1: _gaps, 2: _squared_gaps}


# --- ramps over the iterations --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ramp:
    """A factor that goes from `first` to `last` geometrically over the first `over` steps, and stays there."""

    first: float
    last: float
    over: int = 200

    def __post_init__(self) -> None:
        require_positive(self, whole=("over",), real=("first", "last"))

    def __call__(self, now: Step) -> Tensor:
        return self.first * torch.exp((now.step / self.over).clamp(max=1) * math.log(self.last / self.first))


@dataclass(frozen=True)
class Times:
    """The gradient times a ramp, as the optimiser's input.

    With every prior `Over` the same ramp, the search descends ramp * match + priors, while the reported match, which
    chooses iterates and restarts, has no ramp.
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
