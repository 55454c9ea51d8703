"""What a part of an attack may look at: one target, and where in the search a step stands.

A part is written for ONE lane; the engine batches. `TargetView` is all that a part may look at. `Step` reaches every
part, so that ramps, annealing and homotopies need no branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.scenario.observation import Knowledge, Observation, Track
from gradleak.scenario.task import Batch, Task


@dataclass(frozen=True, eq=False)
class Step:
    """Where in a stage a step stands, as a tensor, so that a captured step can be replayed."""

    step: Tensor  # 0-d, counts from 0
    total: int

    @property
    def fraction(self) -> Tensor:
        return self.step / self.total


@dataclass(frozen=True, eq=False)
class TargetView:
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
    earlier: tuple[TargetView, ...] = ()  # other rounds in which the client trained on the same batch

    @staticmethod
    def of(task: Task, seen: Observation | Track, knows: Knowledge) -> TargetView:
        """The scene of one target, in the task's own device and type; of a track, that of its last round."""
        return TargetView.waiting(task, seen, knows).here()

    @staticmethod
    def waiting(task: Task, seen: Observation | Track, knows: Knowledge) -> TargetView:
        """The same with the observation's tensors where they were recorded, and nothing copied.

        A thousand targets of a large model do not fit a device at once: they wait like this until their chunk's turn.
        """
        if isinstance(seen, Track):
            *earlier, last = (TargetView.waiting(task, each, knows) for each in seen.observations)
            return replace(last, earlier=tuple(earlier))
        like = _like(task)
        frozen = {name: p.detach() for name, p in task.model.named_parameters() if not p.requires_grad}
        return TargetView(
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

    def here(self, weights: Params | None = None) -> TargetView:
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

    def to(self, dtype: torch.dtype) -> TargetView:
        """The same scene in another precision. The model itself stays: its parameters and buffers are swapped in."""
        move = lambda held: tree.to(held, None, dtype)  # noqa: E731
        objective = self.task.objective
        if hasattr(objective, "to"):
            objective = objective.to(self.like.device, dtype)
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
    def like(self) -> Tensor:
        """A tensor of the device and the type that everything is computed in."""
        return tree.like(self.weights)

    @property
    def rounds(self) -> tuple[TargetView, ...]:
        """Every round of the target as a scene of its own, this one last; all see this one's task and knowledge."""
        return (*(replace(each, task=self.task, knows=self.knows) for each in self.earlier), self)


def in_turn(scenes: Iterable[TargetView]) -> Iterator[TargetView]:
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
