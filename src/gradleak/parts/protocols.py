"""The six small protocols that the parts of an attack follow.

A part is written for ONE lane; the engine batches. `v` is a nested dict of unknowns, named across parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.task import Batch

Needs: TypeAlias = frozenset[str]


class Space(Protocol):
    """Where the unknowns live, and how they become a batch.

    `before`: all unknowns that the last stage ended with; None in the first. Optional: `unknowns(scene)`, how many
    there are, where that is not the number of entries of the batch; `entries(task)`, the numbers that the start of a
    lane needs at its peak; `decoding(scene)`, the numbers that decoding a batch keeps for its derivative, where they
    are many, as in a generator; `left(v, scene)`, what the next stage finds in `before` beside the unknowns.
    """

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree: ...

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree: ...

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch: ...

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree: ...


class Prediction(Protocol):
    """What the client would have uploaded for a batch; `target` says what of the observation to compare it with.

    `variables` are unknowns of its own, such as a place between two models; `before` as for a `Space`: a later stage
    goes on with what an earlier one found (`resumed`). Optional: `footprint(scene)`, where an evaluation is more than
    one gradient of the whole batch.
    """

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree: ...

    def target(self, scene: TargetView) -> Params: ...

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params: ...


@dataclass(frozen=True)
class Footprint:
    """How much an evaluation of a prediction holds at once: a replay of T steps has T graphs. Chunks are sized by it.

    passes      over all examples, with their activations: E epochs in small batches are E passes
    gradients   with the weights each is taken at: T steps are T of them
    """

    passes: float = 1.0
    gradients: float = 1.0


def resumed(begin: Tree, before: Tree | None) -> Tree:
    """The unknowns of `begin`, each with the value that the last stage left under its name, where it left one."""
    left = {name: value for name, value in (before or {}).items() if name in begin}
    for name, value in left.items():
        if tree.shapes(value) != tree.shapes(begin[name]):
            raise ValueError(
                f"The last stage left an unknown {name!r} of other shapes than this one has: rename one of them."
            )
    return {**begin, **left}


class Match(Protocol):
    """A distance. `squares`: reduce is the residual's sum of squares. `scale_free`: blind to the scale.

    Optional: `compared(update, observed)`, where it looks at a part of an update only.
    """

    @property
    def squares(self) -> bool: ...

    @property
    def scale_free(self) -> bool: ...

    def prepare(self, observed: Params) -> Params: ...

    def residual(self, predicted: Params, observed: Params) -> Params: ...

    def reduce(self, residual: Params) -> Tensor: ...

    def distance(self, predicted: Params, observed: Params) -> Tensor:
        """reduce(residual(predicted, observed)); a match may compute it in fewer passes."""
        ...


class Prior(Protocol):
    """A scalar that says how unlikely a batch is. One that looks across restarts also has `refresh` and `due`."""

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor: ...


@runtime_checkable
class QuadraticPrior(Protocol):
    """A prior that least-squares solvers can use: terms whose sum of squares has the prior's gradient at this point.

    For a quadratic prior that sum is the prior itself; else it is the quadratic that lies above the prior and touches
    it here (majorisation: what is iteratively reweighted must be constant in the derivative, `detach`).
    """

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor: ...

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor: ...


@runtime_checkable
class SharedPrior(Protocol):
    """A prior that looks at all restarts of a target. `refresh` runs outside vmap, between two steps, when `due`."""

    def due(self, step: int) -> bool: ...

    def refresh(self, batch: Batch, groups: tuple[int, int]) -> Tree: ...


class FieldRule(Protocol):
    """Reads fields off the observation, once per target, such as labels."""

    def __call__(self, scene: TargetView) -> Batch: ...


@dataclass(frozen=True, eq=False)
class Scored:
    """A point that was evaluated: the unknowns, the objective, and the match alone (no priors)."""

    at: Tree
    objective: Tensor
    match: Tensor


class Problem(Protocol):
    """What an optimiser may ask of one lane at one moment."""

    def value(self, v: Tree) -> Scored: ...

    def value_and_grad(self, v: Tree) -> tuple[Tree, Scored]: ...

    def residual(self, v: Tree) -> Tree:
        """{"match": the match's residual, "priors": the terms of each prior}: least squares."""
        ...

    def project(self, v: Tree) -> Tree: ...

    def single(self) -> Problem:
        """The same problem in float32."""
        ...


class Optimiser(Protocol):
    """Moves the unknowns of one lane. `graphable`: a step reads no value on the host, so it can be captured.

    Optional: `final(v, state)`, where v is a trial point and not yet an iterate; `finished(state)`, true once a lane
    has nothing left to do (its lanes are then left out of further steps; not for captured steps);
    `entries(unknowns, equations)`, the numbers a lane holds at the peak of a step, by which chunks are sized;
    `sized(evaluations)`, the same method for a lane that may make so many evaluations at once; `evaluations`, how many
    gradients a lane takes in all steps, where that is not one a step.
    """

    @property
    def steps(self) -> int: ...

    @property
    def graphable(self) -> bool: ...

    def init(self, problem: Problem, v: Tree) -> Tree: ...

    def step(self, problem: Problem, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]: ...
