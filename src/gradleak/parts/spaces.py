"""Where the unknowns live: pixels from some start, soft labels, or several spaces together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.parts.priors import one_hot
from gradleak.parts.protocols import Space
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.task import Batch, Task

Start: TypeAlias = Callable[[TargetView, Draws, str], Tensor]
"""(scene, draws, field name) -> the first guess of a lane, in model-input space, (examples, ...)."""


def _shape(scene: TargetView, name: str) -> tuple[int, ...]:
    return (scene.num_examples, *scene.task.fields[name].shape)


def from_unit(scene: TargetView, name: str, picture: Tensor) -> Tensor:
    """A picture in [0, 1] in the field's model-input units."""
    low, high = scene.limits[name]
    return low + picture * (high - low)


def _own_stream(scene: TargetView, draws: Draws, name: str) -> Draws:
    """Every field draws from a source of its own, so that two unknowns never start alike."""
    return draws.child(list(scene.task.fields).index(name))


@dataclass(frozen=True)
class Normal:
    """N(mean, std^2): in model-input space, or on [0, 1] pixels (`unit`), there optionally clipped."""

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
class Uniform:
    """U[0, 1] pixels."""

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        return from_unit(scene, name, draws.uniform(_shape(scene, name), dtype=low.dtype))


@dataclass(frozen=True)
class Solid:
    """One colour, in [0, 1] per channel or one value for all: black 0, white 1, red (1, 0, 0)."""

    colour: float | tuple[float, ...] = 0.0

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        shape = _shape(scene, name)
        colours = self.colour if isinstance(self.colour, tuple) else (self.colour,) * shape[1]
        if len(colours) != shape[1]:
            raise ValueError(f"Solid has {len(colours)} colours for {shape[1]} channels.")
        planes = [torch.full(shape[:1] + shape[2:], value, device=low.device, dtype=low.dtype) for value in colours]
        return from_unit(scene, name, torch.stack(planes, dim=1))


@dataclass(frozen=True)
class Tiled:
    """A random tile repeated over the image, 1 / `fraction` of a side wide (CPL: 2), or `width` pixels where given.

    U[0, 1] pixels, or N(0, 1) in model-input space.
    """

    fraction: int = 2
    normal: bool = False
    width: int | None = None

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        examples, channels, height, width = _shape(scene, name)
        tile = [self.width or -(-side // self.fraction) for side in (height, width)]
        law = draws.normal if self.normal else draws.uniform
        small = law((examples, channels, *tile), dtype=low.dtype)
        whole = small.repeat(1, 1, -(-height // tile[0]), -(-width // tile[1]))[..., :height, :width]
        return whole if self.normal else from_unit(scene, name, whole)


@dataclass(frozen=True)
class Mosaic:
    """A coarse random image whose pixels are enlarged to `block` x `block` squares."""

    block: int = 8

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        examples, channels, height, width = _shape(scene, name)
        coarse = draws.uniform((examples, channels, -(-height // self.block), -(-width // self.block)), dtype=low.dtype)
        fine = coarse.repeat_interleave(self.block, dim=2).repeat_interleave(self.block, dim=3)
        return from_unit(scene, name, fine[..., :height, :width])


@dataclass(frozen=True, eq=False)
class Surrogate:
    """Images of the attacker's own, (examples, ...) in [0, 1]. Optimistic where they are of the true class: say so."""

    images: Tensor

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        if tuple(self.images.shape) != _shape(scene, name):
            raise ValueError(f"Surrogate images have shape {tuple(self.images.shape)}; wanted {_shape(scene, name)}.")
        return from_unit(scene, name, self.images.to(low.device, low.dtype))


@dataclass(frozen=True)
class Pixels:
    """The image itself, in model-input space. `boxed`: kept inside the field's bounds after every step."""

    start: Start = Normal()
    boxed: bool = False
    field: str = "x"

    def entries(self, task: Task) -> int:
        """Numbers that the start of a lane needs at its peak."""
        count = getattr(self.start, "entries", None)
        return 0 if count is None else int(count(task))

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if before is not None and self.field in before:
            return {self.field: before[self.field]}
        return {self.field: self.start(scene, _own_stream(scene, draws, self.field), self.field)}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {self.field: v[self.field]}

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        if not self.boxed:
            return v
        low, high = scene.limits[self.field]
        return {**v, self.field: v[self.field].clamp(low, high)}


@dataclass(frozen=True)
class _Categories:
    """A categorical field as unknowns, one for each class of each example.

    Where the threat model gives the field there is nothing to optimise, and the given one is used.
    """

    field: str = "y"

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if before is not None and self.field in before:
            return {self.field: before[self.field]}
        return {} if self.field in scene.knows.given else {self.field: self.start(scene, draws)}

    def start(self, scene: TargetView, draws: Draws) -> Tensor:
        raise NotImplementedError

    def shares(self, v: Tensor) -> Tensor:
        """What the loss is given: a share of every class."""
        raise NotImplementedError

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {} if self.field in scene.knows.given else {self.field: self.shares(v[self.field])}

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        return v

    def _classes(self, scene: TargetView) -> int:
        classes = scene.task.fields[self.field].classes
        assert classes is not None
        return classes


@dataclass(frozen=True)
class SoftCategories(_Categories):
    """A categorical field as free logits, decoded to a simplex by softmax (DLG's jointly optimised label)."""

    def start(self, scene: TargetView, draws: Draws) -> Tensor:
        shape = (scene.num_examples, *scene.task.fields[self.field].shape, self._classes(scene))
        dtype = next(iter(scene.weights.values())).dtype
        return _own_stream(scene, draws, self.field).normal(shape, dtype=dtype)

    def shares(self, v: Tensor) -> Tensor:
        return v.softmax(dim=-1)


@dataclass(frozen=True)
class FreeCategories(_Categories):
    """A categorical field as plain shares of the classes, neither positive nor summing to one.

    The gradient of cross-entropy is linear in them, so least squares finds a label as it finds a pixel; a softmax would
    have to reach infinity. Starts half at the label that was read off, half anywhere.
    """

    def start(self, scene: TargetView, draws: Draws) -> Tensor:
        classes = self._classes(scene)
        read = one_hot(scene.fields[self.field], classes, next(iter(scene.weights.values())).dtype)
        return 0.5 * read + 0.5 / classes

    def shares(self, v: Tensor) -> Tensor:
        return v


@dataclass(frozen=True)
class JointSpace:
    """Several spaces at once; each contributes its own variables and its own fields of the batch."""

    spaces: tuple[Space, ...]

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

    def decoding(self, scene: TargetView) -> int:
        """What decoding keeps for its derivatives, in those of the spaces that say so."""
        return sum(int(space.decoding(scene)) for space in self.spaces if hasattr(space, "decoding"))

    def left(self, v: Tree, scene: TargetView) -> Tree:
        """What the spaces leave to the next stage beside the unknowns."""
        leaving = [space.left(v, scene) for space in self.spaces if hasattr(space, "left")]
        return {name: value for each in leaving for name, value in each.items()}
