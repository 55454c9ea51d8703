"""What a part of an attack may look at, and the six small protocols that parts follow.

A part is written for ONE lane; the engine batches. `Scene` is all that it may look at, and `Now` reaches every part, so
that ramps, annealing and homotopies need no branch. `v` is a nested dict of unknowns, named across parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from gradleak import tree
from gradleak.draws import Draws
from gradleak.observation import Knowledge, Observation, Track
from gradleak.task import Batch, Task
from gradleak.tree import Params, Tree

Needs: TypeAlias = frozenset[str]


@dataclass(frozen=True, eq=False)
class Now:
    """Where in a stage a step stands, as a tensor, so that a captured step can be replayed."""

    step: Tensor  # 0-d, counts from 0
    total: int

    @property
    def fraction(self) -> Tensor:
        return self.step / self.total


@dataclass(frozen=True, eq=False)
class Scene:
    """One target as one lane sees it: the observation's tensors, the threat model, and what was read off before."""

    task: Task
    knows: Knowledge
    weights: Params
    update: Params
    num_examples: int
    buffers: Params | None = None
    returned_buffers: Params | None = None
    extras: dict[str, Params] = field(default_factory=dict)
    fields: Batch = field(default_factory=dict)  # given or recovered: labels, counts, steps
    limits: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # box of each continuous field
    constants: Tree = field(default_factory=dict)  # what the space fixed at the start of the stage
    shared: Tree = field(default_factory=dict)  # what priors computed across restarts
    draws: Draws | None = None
    earlier: tuple[Scene, ...] = ()  # other rounds in which the client trained on the same batch

    @staticmethod
    def of(task: Task, seen: Observation | Track, knows: Knowledge) -> Scene:
        """The scene of one target, in the task's own device and type; of a track, that of its last round."""
        return Scene.waiting(task, seen, knows).here()

    @staticmethod
    def waiting(task: Task, seen: Observation | Track, knows: Knowledge) -> Scene:
        """The same with the observation's tensors where they were recorded, and nothing copied.

        A thousand targets of a large model do not fit a device at once: they wait like this until their chunk's turn.
        """
        if isinstance(seen, Track):
            *earlier, last = (Scene.waiting(task, each, knows) for each in seen.observations)
            return replace(last, earlier=tuple(earlier))
        like = _like(task)
        frozen = {name: p.detach() for name, p in task.model.named_parameters() if not p.requires_grad}
        return Scene(
            task,
            knows,
            weights=seen.weights,
            update={name: seen.update[name] for name in seen.weights},  # one order of names everywhere
            num_examples=seen.num_examples,
            buffers={**frozen, **dict(task.model.named_buffers()), **(seen.buffers or {})},
            returned_buffers=seen.returned_buffers,
            extras=seen.extras,
            limits={name: f.limits(like) for name, f in task.fields.items() if f.classes is None},
        )

    def here(self, weights: Params | None = None) -> Scene:
        """The scene in the task's own device and type. `weights`: its own, where they are there already."""
        like = _like(self.task)
        move = lambda params: tree.to(params, like.device, like.dtype)  # noqa: E731
        return replace(
            self,
            weights=move(self.weights) if weights is None else weights,
            update=move(self.update),
            # Copies: a forward pass may change buffers in place, and those of a waiting scene are the model's own.
            buffers=None if self.buffers is None else tree.detach(move(self.buffers)),
            returned_buffers=None if self.returned_buffers is None else move(self.returned_buffers),
            extras={name: move(params) for name, params in self.extras.items()},
            fields=tree.to(self.fields, like.device, None),  # in the type that they were read in
            earlier=tuple(each.here() for each in self.earlier),
        )

    def to(self, dtype: torch.dtype) -> Scene:
        """The same scene in another precision. The model itself stays: its parameters and buffers are swapped in."""
        move = lambda held: tree.to(held, None, dtype)  # noqa: E731
        objective = self.task.objective
        if hasattr(objective, "to"):
            objective = objective.to(next(tree.leaves(self.weights)).device, dtype)
        return replace(
            self,
            task=replace(self.task, objective=objective),
            weights=move(self.weights),
            update=move(self.update),
            buffers=None if self.buffers is None else move(self.buffers),
            returned_buffers=None if self.returned_buffers is None else move(self.returned_buffers),
            extras={name: move(params) for name, params in self.extras.items()},
            fields=move(self.fields),
            limits={name: (low.to(dtype), high.to(dtype)) for name, (low, high) in self.limits.items()},
            constants=move(self.constants),
            shared=move(self.shared),
            earlier=tuple(each.to(dtype) for each in self.earlier),
        )

    @property
    def rounds(self) -> tuple[Scene, ...]:
        """Every round of the target as a scene of its own, this one last; all see this one's task and knowledge."""
        return (*(replace(each, task=self.task, knows=self.knows) for each in self.earlier), self)


def in_turn(scenes: Iterable[Scene]) -> Iterator[Scene]:
    """Every scene `here`, one after the other; weights that one holds after the other are moved once."""
    last: Params = {}
    there: Params = {}
    for scene in scenes:
        if last.keys() != scene.weights.keys() or any(last[name] is not own for name, own in scene.weights.items()):
            like = _like(scene.task)
            last, there = scene.weights, tree.to(scene.weights, like.device, like.dtype)
        yield scene.here(there)


def _like(task: Task) -> Tensor:
    """A tensor of the task's device and type, without a copy of all its weights."""
    return next(p.detach() for p in task.model.parameters() if p.requires_grad)


# --- the six protocols ----------------------------------------------------------------------------------------------


class Space(Protocol):
    """Where the unknowns live, and how they become a batch.

    `before`: all unknowns that the last stage ended with; None in the first. Optional: `unknowns(scene)`, how many
    there are, where that is not the number of entries of the batch; `entries(task)`, the numbers that the start of a
    lane needs at its peak; `decoding(scene)`, the numbers that decoding a batch keeps for its derivative, where they
    are many, as in a generator; `left(v, scene)`, what the next stage finds in `before` beside the unknowns.
    """

    def variables(self, scene: Scene, draws: Draws, before: Tree | None) -> Tree: ...

    def constants(self, scene: Scene, draws: Draws, before: Tree | None) -> Tree: ...

    def decode(self, v: Tree, scene: Scene, now: Now) -> Batch: ...

    def project(self, v: Tree, scene: Scene, now: Now) -> Tree: ...


class Prediction(Protocol):
    """What the client would have uploaded for a batch; `target` says what of the observation to compare it with.

    `variables` are unknowns of its own, such as a place between two models; `before` as for a `Space`: a later stage
    goes on with what an earlier one found (`resumed`). Optional: `footprint(scene)`, where an evaluation is more than
    one gradient of the whole batch.
    """

    def variables(self, scene: Scene, draws: Draws, before: Tree | None) -> Tree: ...

    def target(self, scene: Scene) -> Params: ...

    def __call__(self, batch: Batch, v: Tree, scene: Scene, now: Now) -> Params: ...


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

    def __call__(self, batch: Batch, v: Tree, scene: Scene, now: Now) -> Tensor: ...


@runtime_checkable
class QuadraticPrior(Protocol):
    """A prior that least-squares solvers can use: terms whose sum of squares has the prior's gradient at this point.

    For a quadratic prior that sum is the prior itself; else it is the quadratic that lies above the prior and touches
    it here (majorisation: what is iteratively reweighted must be constant in the derivative, `detach`).
    """

    def __call__(self, batch: Batch, v: Tree, scene: Scene, now: Now) -> Tensor: ...

    def terms(self, batch: Batch, v: Tree, scene: Scene, now: Now) -> Tensor: ...


@runtime_checkable
class SharedPrior(Protocol):
    """A prior that looks at all restarts of a target. `refresh` runs outside vmap, between two steps, when `due`."""

    def due(self, step: int) -> bool: ...

    def refresh(self, batch: Batch, groups: tuple[int, int]) -> Tree: ...


class FieldRule(Protocol):
    """Reads fields off the observation, once per target, such as labels."""

    def __call__(self, scene: Scene) -> Batch: ...


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

    def step(self, problem: Problem, v: Tree, state: Tree, now: Now) -> tuple[Tree, Tree, Scored]: ...
