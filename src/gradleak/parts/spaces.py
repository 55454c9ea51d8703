"""Where the unknowns live: the example from some start, other fields by their kind, or several spaces at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.parts.priors import one_hot
from gradleak.parts.protocols import NOTHING, Needs, Space, needs_numbers
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.inspection.subject import hard_targets
from gradleak.scenario.task import Batch, Task


class Start:
    """The first guess of a lane, in model-input space, (examples, ...): a function of scene, draws and field name."""

    def entries(self, task: Task) -> int:
        """Numbers that it holds at its peak."""
        return 0

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        raise NotImplementedError


AnyStart: TypeAlias = Start | Callable[[TargetView, Draws, str], Tensor]


def entries_of(start: AnyStart, task: Task) -> int:
    """Numbers that a start holds at its peak; a plain function counts as none."""
    return start.entries(task) if isinstance(start, Start) else 0


def as_given(scene: TargetView, draws: Draws, name: str) -> Tensor:
    """A start: the field as it was given or read off."""
    return scene.fields[name]


def unknowns_of(task: Task, examples: int, given: Collection[str] = ()) -> int:
    """Entries of all continuous fields of a batch but those that are given."""
    wanted = (field for name, field in task.fields.items() if field.continuous and name not in given)
    return examples * sum(math.prod(field.shape) for field in wanted)


def _shape(scene: TargetView, name: str) -> tuple[int, ...]:
    return (scene.num_examples, *scene.task.fields[name].shape)


def from_unit(scene: TargetView, name: str, picture: Tensor) -> Tensor:
    """A picture in [0, 1], in the units of the field's model input."""
    low, high = scene.extent(name)
    return low + picture * (high - low)


def _own_stream(scene: TargetView, draws: Draws, name: str) -> Draws:
    """The random source of one field: two fields never start from the same numbers."""
    return draws.child(list(scene.task.fields).index(name))


@dataclass(frozen=True)
class Normal(Start):
    """N(mean, std^2), in model-input space or on [0, 1] pixels (`unit`), clipped there if `clip`."""

    mean: float = 0.0
    std: float = 1.0
    unit: bool = False
    clip: bool = False

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        value = self.mean + self.std * draws.normal(_shape(scene, name), dtype=low.dtype)
        if self.clip:
            value = value.clamp(0, 1)
        return from_unit(scene, name, value) if self.unit else value


@dataclass(frozen=True)
class Uniform(Start):
    """U[0, 1] pixels."""

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        return from_unit(scene, name, draws.uniform(_shape(scene, name), dtype=low.dtype))


@dataclass(frozen=True)
class Solid(Start):
    """One colour, in [0, 1] per channel or one value for all: black 0, white 1, red (1, 0, 0)."""

    colour: float | tuple[float, ...] = 0.0

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        shape = _shape(scene, name)
        if not isinstance(self.colour, tuple):
            return from_unit(scene, name, torch.full(shape, self.colour, device=low.device, dtype=low.dtype))
        if len(self.colour) != shape[1]:
            raise ValueError(f"Solid has {len(self.colour)} colours for {shape[1]} channels.")
        planes = [torch.full(shape[:1] + shape[2:], value, device=low.device, dtype=low.dtype) for value in self.colour]
        return from_unit(scene, name, torch.stack(planes, dim=1))


@dataclass(frozen=True)
class Tiled(Start):
    """A random tile repeated over the image. Its side: 1 / `fraction` of the image's (CPL: 2), or `width` pixels.

    U[0, 1] pixels, or N(0, 1) in model-input space (`normal`). A series is tiled along time; where no axis has
    neighbours, as in a table, the start is random.
    """

    fraction: int = 2
    normal: bool = False
    width: int | None = None

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        shape, tile = _shape(scene, name), list(_shape(scene, name))
        for axis in scene.axes(name):
            tile[axis] = self.width or -(-shape[axis] // self.fraction)
        law = draws.normal if self.normal else draws.uniform
        copies = [-(-side // small) for side, small in zip(shape, tile, strict=True)]
        whole = law(tuple(tile), dtype=low.dtype).repeat(copies)[tuple(map(slice, shape))]
        return whole if self.normal else from_unit(scene, name, whole)


@dataclass(frozen=True)
class Mosaic(Start):
    """A coarse random image whose pixels are enlarged to `block` x `block` squares."""

    block: int = 8

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        shape, coarse = _shape(scene, name), list(_shape(scene, name))
        for axis in scene.axes(name):
            coarse[axis] = -(-shape[axis] // self.block)
        fine = draws.uniform(tuple(coarse), dtype=low.dtype)
        for axis in scene.axes(name):
            fine = fine.repeat_interleave(self.block, dim=axis)
        return from_unit(scene, name, fine[tuple(map(slice, shape))])


@dataclass(frozen=True, eq=False)
class Surrogate(Start):
    """Images that the attacker has, (examples, ...) in [0, 1]. Optimistic if they are of the true class: say so."""

    images: Tensor

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        if tuple(self.images.shape) != _shape(scene, name):
            raise ValueError(f"Surrogate images have shape {tuple(self.images.shape)}; wanted {_shape(scene, name)}.")
        return from_unit(scene, name, self.images.to(low.device, low.dtype))


@dataclass(frozen=True)
class Pixels(Space):
    """The example itself, in model-input space. `boxed`: clamped to the field's bounds after every step."""

    start: AnyStart = Normal()
    boxed: bool = False
    field: str = "x"

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({self.field})

    def refuses(self, task: Task) -> str:
        return needs_numbers(task, self.field)

    def entries(self, task: Task) -> int:
        return entries_of(self.start, task)

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if before is not None and self.field in before:
            return {self.field: before[self.field]}
        return {self.field: self.start(scene, _own_stream(scene, draws, self.field), self.field)}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {self.field: v[self.field]}

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        if not self.boxed:
            return v
        low, high = scene.limits[self.field]
        return {**v, self.field: v[self.field].clamp(low, high)}


@dataclass(frozen=True)
class _Unknown(Space):
    """One field as unknowns, in the form that its kind gives. If the threat model gives the field, there are none."""

    field: str = "y"

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({self.field})

    def refuses(self, task: Task) -> str:
        field = task.fields.get(self.field)
        if field is None or field.continuous or field.public:
            return ""
        kind = field.kind
        return hard_targets(task) if kind.soft else f"{self.field} holds {kind.noun[1]}: no gradient moves discrete ids"

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if before is not None and self.field in before:
            return {self.field: before[self.field]}
        return {} if self._unneeded(scene) else {self.field: self.start(scene, draws)}

    def start(self, scene: TargetView, draws: Draws) -> Tensor:
        raise NotImplementedError

    def value(self, v: Tensor, scene: TargetView) -> Tensor:
        """What the loss takes."""
        raise NotImplementedError

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {} if self._unneeded(scene) else {self.field: self.value(v[self.field], scene)}

    def _unneeded(self, scene: TargetView) -> bool:
        return self.field in scene.knows.given or self.field not in scene.task.fields

    def _relaxed(self, scene: TargetView) -> tuple[int, ...]:
        """The shape of the unknowns, examples first."""
        field = scene.task.fields[self.field]
        return (scene.num_examples, *field.kind.relaxed(field))


@dataclass(frozen=True)
class SoftField(_Unknown):
    """A field in the free form of its kind, from N(0, 1): numbers as they are, classes as logits.

    For a class this is DLG's jointly optimised label, the softmax of the logits.
    """

    def start(self, scene: TargetView, draws: Draws) -> Tensor:
        return _own_stream(scene, draws, self.field).normal(self._relaxed(scene), dtype=scene.like.dtype)

    def value(self, v: Tensor, scene: TargetView) -> Tensor:
        field = scene.task.fields[self.field]
        return field.kind.decode(v, field)


@dataclass(frozen=True)
class FreeField(_Unknown):
    """A field as the numbers that the loss takes: free values, or free shares of classes, positive or not.

    The gradient of cross-entropy, and of squared error, is linear in them, so least squares finds a label as easily as
    a pixel; a softmax would have to reach infinity. Classes start at the mean of the label that was read off, where
    one was, and equal shares; anything else at random: a value that starts on the wrong side of the prediction has to
    pass a gradient of zero, and only another restart finds it.
    """

    def start(self, scene: TargetView, draws: Draws) -> Tensor:
        classes, like = scene.task.fields[self.field].classes, scene.like
        if classes is None:
            source = _own_stream(scene, draws, self.field)
            return from_unit(scene, self.field, source.uniform(self._relaxed(scene), dtype=like.dtype))
        if self.field not in scene.fields:
            return torch.full(self._relaxed(scene), 1 / classes, device=like.device, dtype=like.dtype)
        label = one_hot(scene.fields[self.field], classes, like.dtype)
        return 0.5 * label + 0.5 / classes

    def value(self, v: Tensor, scene: TargetView) -> Tensor:
        return v


@dataclass(frozen=True)
class JointSpace(Space):
    """Several spaces at once: each adds its variables and its fields of the batch."""

    spaces: tuple[Space, ...]

    @property
    def decoded(self) -> frozenset[str]:
        return NOTHING.union(*(space.decoded for space in self.spaces))

    def refuses(self, task: Task) -> str:
        return next((reason for space in self.spaces if (reason := space.refuses(task))), "")

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {name: v for space in self.spaces for name, v in space.variables(scene, draws, before).items()}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {name: c for space in self.spaces for name, c in space.constants(scene, draws, before).items()}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {name: value for space in self.spaces for name, value in space.decode(v, scene, now).items()}

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        for space in self.spaces:
            v = space.project(v, scene, now)
        return v

    @property
    def needs(self) -> Needs:
        return NOTHING.union(*(space.needs for space in self.spaces))

    def left(self, v: Tree, scene: TargetView) -> Tree:
        return {name: value for space in self.spaces for name, value in space.left(v, scene).items()}

    def unknowns(self, scene: TargetView) -> int | None:
        counts = [space.unknowns(scene) for space in self.spaces]
        stated = [count for count in counts if count is not None]
        if not stated:
            return None
        # The fields of the others are among those of the batch, whose entries are an upper bound.
        return sum(stated) + (0 if len(stated) == len(counts) else unknowns_of(scene.task, scene.num_examples))

    def entries(self, task: Task) -> int:
        return max((space.entries(task) for space in self.spaces), default=0)

    def decoding(self, scene: TargetView) -> int:
        return sum(space.decoding(scene) for space in self.spaces)
