"""The base classes of the six kinds of part that an attack is made of.

A part is written for ONE lane; the engine batches. `v` is a nested dict of unknowns, named across parts. Every member
that the engine asks for has a default here, so a part overrides only what it changes. `delegates` makes a part around
another one: the inner part answers for every member that the outer one does not override.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.kinds import Image
from gradleak.scenario.task import Batch, Task

Needs: TypeAlias = frozenset[str]
NOTHING: Needs = frozenset()


class Part:
    """What all parts share. `needs`: the knowledge it cannot do without, in the words of `Knowledge.grants`."""

    @property
    def needs(self) -> Needs:
        return NOTHING

    def refuses(self, task: Task) -> str:
        """Why it cannot be used on this task, in words that follow "unsupported: "; empty if it can."""
        return ""


def needs_images(task: Task, why: str) -> str:
    """Why a part that is made for images refuses a task of something else; empty if its examples are images."""
    field = task.fields.get("x")
    return "" if field is None or isinstance(field.kind, Image) else f"{why}, and x holds {field.kind.noun[1]}"


def needs_numbers(task: Task, name: str) -> str:
    """Why a part that moves a field by a gradient refuses a task in which it holds ids; empty if it holds numbers."""
    field = task.fields.get(name)
    if field is None or field.continuous:
        return ""
    return f"it moves numbers, and {name} holds {field.kind.noun[1]} of {field.classes} discrete values"


class Space(Part):
    """Where the unknowns live, and how they become fields of a batch.

    `before`: the unknowns at the end of the last stage, and what its space left; None in the first stage.
    """

    @property
    def decoded(self) -> frozenset[str]:
        """The names of the fields that `decode` gives."""
        return NOTHING

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        """The unknowns at the start of a lane."""
        return {}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        """What is fixed at the start of a stage; parts find it in `scene.constants`."""
        return {}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        """The fields of the batch that the unknowns stand for."""
        return {}

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        """The unknowns back in their bounds, after a step."""
        return v

    def left(self, v: Tree, scene: TargetView) -> Tree:
        """What the next stage finds in `before` beside the unknowns."""
        return {}

    def unknowns(self, scene: TargetView) -> int | None:
        """How many unknowns there are; None: as many as the continuous fields of the batch have entries."""
        return None

    def entries(self, task: Task) -> int:
        """Numbers that the start of a lane holds at its peak."""
        return 0

    def decoding(self, scene: TargetView) -> int:
        """Numbers that `decode` keeps for its derivative, where they are many, as in a generator."""
        return 0


@dataclass(frozen=True)
class Footprint:
    """What one evaluation of a prediction holds at once: a replay of T steps holds T graphs. Chunks are sized by it.

    passes      over all examples, with their activations: E epochs in small batches are E passes
    gradients   with the weights each is taken at: T steps are T of them
    """

    passes: float = 1.0
    gradients: float = 1.0


class Prediction(Part):
    """What the client would have uploaded for a batch.

    `needs_for_scale`: the further knowledge that it needs when the match sees the scale of an update.
    """

    @property
    def needs_for_scale(self) -> Needs:
        return NOTHING

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        """Unknowns of the prediction itself, such as a place between two models; see `resumed` for `before`."""
        return {}

    def target(self, scene: TargetView) -> Params:
        """What of the observation to compare it with."""
        raise NotImplementedError

    def disturbed(self, scene: TargetView, draws: Draws) -> Params | None:
        """The target with the noise of the known defence drawn anew; None: the prediction cannot tell."""
        return None

    def footprint(self, scene: TargetView) -> Footprint:
        """What one evaluation holds; here one gradient of the whole batch."""
        return Footprint()

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        raise NotImplementedError


def resumed(begin: Tree, before: Tree | None) -> Tree:
    """The unknowns of `begin`, each with the value that the last stage left under its name, where it left one."""
    values = {name: value for name, value in (before or {}).items() if name in begin}
    for name, value in values.items():
        if tree.shapes(value) != tree.shapes(begin[name]):
            raise ValueError(f"The unknown {name!r} has other shapes here than in the last stage: rename one of them.")
    return {**begin, **values}


class Match(Part):
    """A distance between a predicted and the observed update; here the sum of squares of their difference.

    squares       `reduce` is the sum of squares of the residual, so least-squares solvers can use it
    scale_free    blind to the length of an update
    per_example   the residual has one entry for each example, and each example may come from another restart
    """

    squares: ClassVar[bool] = True
    scale_free: ClassVar[bool] = False
    per_example: ClassVar[bool] = False

    def prepare(self, observed: Params) -> Params:
        """The observation as the other methods take it, computed once for each lane."""
        return observed

    def residual(self, predicted: Params, observed: Params) -> Params:
        return tree.subtract(predicted, observed)

    def reduce(self, residual: Params) -> Tensor:
        return tree.squared_norm(residual)

    def distance(self, predicted: Params, observed: Params) -> Tensor:
        """reduce(residual(predicted, observed)); a match may compute it in fewer passes."""
        return self.reduce(self.residual(predicted, observed))

    def compared(self, update: Params, observed: Params) -> Params:
        """The part of an update that is compared; `observed` is prepared."""
        return update

    def equations(self, entries: int) -> int:
        """Numbers in the residual of an update with so many entries."""
        return entries


class Prior(Part):
    """A scalar that says how unlikely a batch is.

    A prior across all restarts of a target defines `refresh(batch, groups)`, groups = (targets, restarts): its result
    is in `scene.shared`. It runs outside vmap, at the start and before every step that is `due`.
    """

    refresh: Callable[[Batch, tuple[int, int]], Tree] | None = None

    def due(self, step: int) -> bool:
        return False

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        """For least squares: terms whose sum of squares has the prior's gradient at this point.

        For a quadratic prior that sum is the prior itself; else it is the quadratic that lies above the prior and
        touches it here (majorisation: what is iteratively reweighted must be constant in the derivative, `detach`).
        """
        raise ValueError(f"A least-squares optimiser needs priors with terms; {self} has none.")

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        raise NotImplementedError


class FieldRule(Part):
    """Reads fields off the observation, such as labels, once for each target."""

    def reads(self, task: Task) -> frozenset[str]:
        """The names of the fields that it can read off updates of this task."""
        return NOTHING

    def __call__(self, scene: TargetView) -> Batch:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Scored:
    """A point that was evaluated: the unknowns, the objective, and the match alone (no priors)."""

    at: Tree
    objective: Tensor
    match: Tensor


class LaneObjective:
    """What an optimiser may ask of one lane at one moment. `key`: the lane's random key."""

    @property
    def key(self) -> Tensor:
        return torch.zeros(2, dtype=torch.long)

    def value(self, v: Tree) -> Scored:
        raise NotImplementedError

    def value_and_grad(self, v: Tree) -> tuple[Tree, Scored]:
        raise NotImplementedError

    def residual(self, v: Tree) -> Tree:
        """For least squares: {"match": the match's residual, "priors": the terms of each prior}."""
        raise NotImplementedError

    def project(self, v: Tree) -> Tree:
        return v

    def single(self) -> LaneObjective:
        """The same objective in float32."""
        raise NotImplementedError


class Optimiser(Part):
    """Moves the unknowns of one lane.

    steps       how many
    graphable   a step reads no value on the host, so it can be captured as a CUDA graph
    rates, every, epsilons   settings of single unknowns, by name
    finished    finished(state) is true once a lane has nothing left to do: it takes no further steps then. None: every
                lane makes all steps. Not for captured steps
    """

    steps: int
    graphable: bool = False
    rates: Mapping[str, float] = {}
    every: Mapping[str, int] = {}
    epsilons: Mapping[str, float] = {}
    finished: Callable[[Tree], Tensor] | None = None

    @property
    def evaluations(self) -> int:
        """Gradients of the client's loss that a lane takes in all steps."""
        return self.steps

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        """The state before the first step."""
        return {}

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        """The unknowns and the state after a step, and a point that it evaluated."""
        raise NotImplementedError

    def final(self, v: Tree, state: Tree) -> Tree:
        """The last iterate, where v is a trial point."""
        return v

    def entries(self, unknowns: int, equations: int) -> int:
        """Numbers that a lane holds at the peak of a step; here those of a first-order method."""
        return 4 * unknowns

    def sized(self, evaluations: int) -> Optimiser:
        """The same method for a lane that has room for so many evaluations at once."""
        return self


BASES: tuple[type, ...] = (Space, Prediction, Match, Prior, FieldRule, Optimiser, LaneObjective)
Wrapper = TypeVar("Wrapper", bound=type)


def members(base: type) -> list[str]:
    """The names that a base class defines, those of `Part` included."""
    classes = [each for each in base.__mro__ if each is not object]
    named = [name for each in classes for name in (*each.__annotations__, *vars(each))]
    return [name for name in dict.fromkeys(named) if name == "__call__" or not name.startswith("_")]


def base_of(part: type) -> type:
    """Which of the base classes a part has."""
    return next(base for base in BASES if issubclass(part, base))


def defines(part: type, member: str) -> bool:
    """Does the part define this member, itself or in a class between it and its base?"""
    above = base_of(part).__mro__
    return any(member in vars(each) for each in part.__mro__ if each not in above)


def delegates(field: str) -> Callable[[Wrapper], Wrapper]:
    """Class decorator for a part around another one, held in `field`.

    The inner part answers for every member that the class does not override. Made from the members of the base class,
    so a wrapper cannot drop one that is added later.
    """

    def decorate(part: Wrapper) -> Wrapper:
        for name in members(base_of(part)):
            if not defines(part, name):
                setattr(part, name, property(attrgetter(f"{field}.{name}")))  # a method is read bound
        return part

    return decorate
