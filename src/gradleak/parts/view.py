"""What a part of an attack may look at: one target (`TargetView`), and the number of the step (`Step`).

A part is written for ONE lane; the engine batches. Every part is given the step, so that ramps and annealing need no
branch.
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
    """The number of a step in its stage: a tensor, so that a captured step can be replayed."""

    step: Tensor  # 0-d, counts from 0
    total: int

    @property
    def fraction(self) -> Tensor:
        return self.step / self.total


@dataclass(frozen=True, eq=False)
class TargetView:
    """One target as one lane sees it: the tensors of the observation, the threat model, and fields read off it."""

    task: Task
    knows: Knowledge
    weights: Params
    update: Params
    num_examples: int
    buffers: Params | None = None
    returned_buffers: Params | None = None
    extras: dict[str, Params] = field(default_factory=dict)
    fields: Batch = field(default_factory=dict)  # given or read off: labels, counts, steps
    limits: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # bounds of each continuous field
    constants: Tree = field(default_factory=dict)  # fixed by the space at the start of the stage
    shared: Tree = field(default_factory=dict)  # computed by priors across restarts
    draws: Draws | None = None
    earlier: tuple[TargetView, ...] = ()  # other rounds in which the client trained on the same batch

    @staticmethod
    def of(task: Task, seen: Observation | Track, knows: Knowledge) -> TargetView:
        """The scene of one target, on the device and in the type of the task; of a track, its last round."""
        return TargetView.waiting(task, seen, knows).here()

    @staticmethod
    def waiting(task: Task, seen: Observation | Track, knows: Knowledge) -> TargetView:
        """The same without a copy: the tensors of the observation stay where they were recorded.

        A thousand targets of a large model do not fit on a device at once: they move there with their chunk.
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
        """The scene on the device and in the type of the task. `weights`: its weights, if they are there already."""
        like = _like(self.task)
        move = lambda params: tree.to(params, like.device, like.dtype)  # noqa: E731
        return replace(
            self,
            weights=move(self.weights) if weights is None else weights,
            update=move(self.update),
            # Copies: a forward pass may change buffers in place, and a waiting scene holds those of the model.
            buffers=None if self.buffers is None else tree.detach(move(self.buffers)),
            returned_buffers=None if self.returned_buffers is None else move(self.returned_buffers),
            extras={name: move(params) for name, params in self.extras.items()},
            fields=tree.to(self.fields, like.device, None),  # their type stays
            earlier=tuple(each.here() for each in self.earlier),
        )

    def to(self, dtype: torch.dtype) -> TargetView:
        """The same scene in another precision. The model stays: calls replace its parameters and buffers."""
        move = lambda values: tree.to(values, None, dtype)  # noqa: E731
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

    def extent(self, name: str) -> tuple[Tensor, Tensor]:
        """The box where values of a field are to be expected: its limits or, without them, two units of the input."""
        low, high = self.limits[name]
        if self.task.fields[name].bounded:
            return low, high
        return torch.where(low.isfinite(), low, -2.0), torch.where(high.isfinite(), high, 2.0)

    def axes(self, name: str) -> tuple[int, ...]:
        """The axes of a field, counted from the last, along which neighbours resemble each other."""
        field = self.task.fields[name]
        return field.kind.axes(field.shape)

    @property
    def like(self) -> Tensor:
        """A tensor of the device and the type that everything is computed in."""
        return tree.like(self.weights)

    @property
    def rounds(self) -> tuple[TargetView, ...]:
        """Every round of the target as a scene, this one last, all with the task and knowledge of this one."""
        return (*(replace(each, task=self.task, knows=self.knows) for each in self.earlier), self)


def in_turn(scenes: Iterable[TargetView]) -> Iterator[TargetView]:
    """Every scene `here`, one after the other. Weights that neighbours share move once."""
    last: Params = {}
    moved: Params = {}
    for scene in scenes:
        if last.keys() != scene.weights.keys() or any(
            last[name] is not weight for name, weight in scene.weights.items()
        ):
            like = _like(scene.task)
            last, moved = scene.weights, tree.to(scene.weights, like.device, like.dtype)
        yield scene.here(moved)


def _like(task: Task) -> Tensor:
    """A tensor on the device and in the type of the task."""
    return next(p.detach() for p in task.model.parameters() if p.requires_grad)
