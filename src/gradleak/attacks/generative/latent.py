"""Images that a trained generator can make: the unknown is its latent, a feature inside it, or its weights.

All use `gradleak.generators.Generator`: begin, blocks, picture. Its images in [0, 1] are resized to the task by area
and brought into model-input space. A class-conditional generator gets the label that was read off or given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vmap

from gradleak.attacks.generative.projections import l1_ball
from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.generators import Generator, with_weights
from gradleak.parts.frozen import State, aside, frozen, graph_entries, state_of
from gradleak.parts.protocols import Needs, Space, needs_images
from gradleak.parts.spaces import from_unit
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.task import Batch, Task

Trained: TypeAlias = Any  # an nn.Module that follows `Generator`; no type says both
CARRIED = "carried"  # in `before`: the input of a block, under the number of the block


@dataclass(frozen=True, kw_only=True)
class Generated(Space):
    """What all spaces of a generator share.

    shift   added to the label (modulo the classes) of a conditional generator. 0: the label that was read off or given;
            anything else is the wrong class, a condition to be measured
    """

    shift: int = 0
    field: str = "x"

    @property
    def needs(self) -> Needs:
        return frozenset({"generator"})

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({self.field})

    def refuses(self, task: Task) -> str:
        return needs_images(task, "a generator makes images")

    def generator(self, scene: TargetView) -> Trained:
        """The generator, frozen, on the device and in the type of the search."""
        generator = scene.knows.generator
        if not isinstance(generator, nn.Module) or not isinstance(generator, Generator):
            raise MissingKnowledge(
                "A search among the images of a generator needs Knowledge(generator=...), a network that has latent, "
                "classes, shape, blocks, begin, block and picture (gradleak.generators.Generator); given "
                f"{type(generator).__name__}."
            )
        shape = scene.task.fields[self.field].shape
        if len(shape) != 3 or generator.shape[0] != shape[0]:
            raise MissingKnowledge(
                f"The generator makes images of shape {tuple(generator.shape)} and the task's examples are {shape}: "
                "their colour channels must agree, sizes may differ. Train one on images like the client's."
            )
        return frozen(generator, scene.like)

    def classes(self, scene: TargetView, generator: Trained) -> Tensor | None:
        """The classes for a conditional generator: (B,), or (B, classes) shares of them."""
        if generator.classes is None:
            return None
        y, field = scene.fields.get("y"), scene.task.fields.get("y")
        if y is None or field is None:
            raise MissingKnowledge(
                "The generator is class-conditional and no label was found or given: use a label rule (labels='auto'), "
                "Knowledge(given={'y': ...}), or a generator without classes."
            )
        if field.classes != generator.classes:
            raise MissingKnowledge(
                f"The generator knows {generator.classes} classes and the task has {field.classes}: they must be the "
                "same ones, in the same order; otherwise use a generator without classes."
            )
        return y.roll(self.shift, -1) if y.is_floating_point() else (y + self.shift) % generator.classes

    def drawn(self, scene: TargetView, draws: Draws) -> Tensor:
        """z ~ N(0, I), (B, latent)."""
        like, generator = scene.like, self.generator(scene)
        return _own(scene, draws).normal((scene.num_examples, generator.latent), dtype=like.dtype)

    def entering(self, scene: TargetView, draws: Draws, before: Tree | None, stage: int) -> Tree:
        """The input of block `stage`, from the end of the last stage; from a random latent where there was none."""
        generator = self.generator(scene)
        if not 0 <= stage <= generator.blocks:
            raise ValueError(
                f"The generator has {generator.blocks} blocks; the features that enter block {stage} do not exist. "
                f"Search at most {generator.blocks} features."
            )
        number = 0
        if before is not None:
            if CARRIED not in before:
                raise ValueError(
                    f"The last stage left {', '.join(before)} and nothing that enters a block of the generator: search "
                    "its latent or its features first."
                )
            [(name, carried)] = before[CARRIED].items()
            number = int(name)
            if number > stage:
                raise ValueError(f"The last stage left what enters block {number}; block {stage} lies before it.")
        else:
            carried = generator.begin(self.drawn(scene, draws), self.classes(scene, generator))
        for index in range(number, stage):
            carried = generator.block(index, carried)
        return dict(carried)

    def unknowns(self, scene: TargetView) -> int:
        return tree.size(self.variables(scene, _anything(scene), None))

    def decoding(self, scene: TargetView) -> int:
        """Numbers that autograd holds for one pass through the whole generator."""
        return scene.num_examples * _graph(self.generator(scene))

    def batch(self, images: Tensor, scene: TargetView) -> Batch:
        """Images in [0, 1] -> the field, in the task's size and in model-input space."""
        _, height, width = scene.task.fields[self.field].shape
        return {self.field: from_unit(scene, self.field, resized(images, height, width))}


@dataclass(frozen=True, kw_only=True)
class Latent(Generated):
    """x = G(z): the unknown is the latent, from N(0, I).

    of        "z"; "w": the styles that `begin` makes of a random z, one for every layer (w+), where the generator
              carries "w"; "auto": the styles if there are any, else z
    squash    the generator gets tanh(z), and z starts from U[0, 1] (GGL with CMA-ES)
    sphere    after each step give every latent (every style) its first length back
    """

    of: str = "auto"
    squash: bool = False
    sphere: bool = False

    def __post_init__(self) -> None:
        if self.of not in ("auto", "z", "w"):
            raise ValueError(f"of must be 'auto', 'z' or 'w'; given {self.of!r}.")
        if self.squash and self.of != "z":
            raise ValueError(f"squash is for the latent itself: use it with of='z'; given {self.of!r}.")

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if styles := self._styles(scene):
            return styles.variables(scene, draws, before)
        if before is not None and "z" in before:
            return {"z": before["z"]}
        if not self.squash:
            return {"z": self.drawn(scene, draws)}
        like, generator = scene.like, self.generator(scene)
        return {"z": _own(scene, draws).uniform((scene.num_examples, generator.latent), dtype=like.dtype)}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if styles := self._styles(scene):
            return styles.constants(scene, draws, before)
        return {"lengths": tree.map(_length, self.variables(scene, draws, before))} if self.sphere else {}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        if styles := self._styles(scene):
            return styles.decode(v, scene, now)
        return self.batch(rest_of(self.generator(scene), self._begun(v, scene), 0), scene)

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        if styles := self._styles(scene):
            return styles.project(v, scene, now)
        return {**v, "z": _on_sphere(v["z"], scene.constants["lengths"]["z"])} if self.sphere else v

    def left(self, v: Tree, scene: TargetView) -> Tree:
        """The input of block 0."""
        if styles := self._styles(scene):
            return styles.left(v, scene)
        return {CARRIED: {"0": self._begun(v, scene)}}

    def _begun(self, v: Tree, scene: TargetView) -> Tree:
        generator = self.generator(scene)
        return dict(generator.begin(v["z"].tanh() if self.squash else v["z"], self.classes(scene, generator)))

    def _styles(self, scene: TargetView) -> Features | None:
        """The same search among styles, if `of` asks for it and the generator has them."""
        if self.of == "z":
            return None
        if "w" in _names(self.generator(scene)):
            return Features(shift=self.shift, field=self.field, of=("w",), sphere=self.sphere)
        if self.of == "w":
            names = ", ".join(sorted(_names(self.generator(scene))))
            raise ValueError(f"This generator carries no styles 'w', only {names}: search its latent, of='z'.")
        return None


@dataclass(frozen=True, kw_only=True)
class Features(Generated):
    """x = G_K ... G_stage(h): the unknown is the input of block `stage`, from the end of the last stage.

    of        the unknowns, by their names between blocks: "h" is the feature; others, such as styles "w", move with it
              where the generator has them
    radius    every unknown stays in the l1 ball around its start, example by example. The radius is this share of its
              l1 norm, or this number itself if not `relative`; None: no ball
    sphere    keep the length of every latent, style and noise map, but not of the feature
    """

    stage: int = 0
    of: tuple[str, ...] = ("h",)
    radius: float | None = None
    relative: bool = True
    sphere: bool = False

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        carried = self.entering(scene, draws, before, self.stage)
        unknowns = {name: carried[name] for name in self.of if name in carried}
        if not unknowns:
            raise ValueError(f"The generator carries {', '.join(sorted(carried))}; none of {', '.join(self.of)}.")
        return unknowns

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        carried = self.entering(scene, draws, before, self.stage)
        start = {name: value for name, value in carried.items() if name in self.of}
        constants: Tree = {CARRIED: {name: value for name, value in carried.items() if name not in start}}
        if self.radius is not None:
            constants["centre"] = start
        if self.sphere:
            constants["lengths"] = tree.map(_length, {name: value for name, value in start.items() if name != "h"})
        return constants

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return self.batch(rest_of(self.generator(scene), self._whole(v, scene), self.stage), scene)

    def project(self, v: Tree, scene: TargetView, now: Step) -> Tree:
        """Onto the sphere, then into the ball, as GIFD does."""
        unknowns = {name: v[name] for name in self.of if name in v}
        if self.sphere:
            lengths = scene.constants["lengths"]
            unknowns |= tree.map(_on_sphere, {name: unknowns[name] for name in unknowns if name != "h"}, lengths)
        if self.radius is not None:
            unknowns = tree.map(self._near, unknowns, scene.constants["centre"])
        return {**v, **unknowns}

    def left(self, v: Tree, scene: TargetView) -> Tree:
        """The input of this block, with the last values of the unknowns."""
        return {CARRIED: {str(self.stage): self._whole(v, scene)}}

    def _whole(self, v: Tree, scene: TargetView) -> Tree:
        return {**scene.constants[CARRIED], **{name: v[name] for name in self.of if name in v}}

    def _near(self, value: Tensor, centre: Tensor) -> Tensor:
        assert self.radius is not None
        share = centre.flatten(1).abs().sum(1) if self.relative else centre.new_ones(centre.shape[0])
        return centre + vmap(l1_ball)(value - centre, self.radius * share)


@dataclass(frozen=True, kw_only=True)
class Weights(Generated):
    """x_i = G(z_i; w_i): the unknown is a copy of the generator's weights for every image; z stays fixed.

    Only weights that the blocks and the picture use; weights before them (a mapping network) stay fixed. Unknown
    `generator`: {parameter name: (B, ...)}.

    jitter  add N(0, 1) times this share of a tensor's RMS to its weights at the start: otherwise restarts of a stage
            that begin at the same latent would be copies of each other
    """

    jitter: float = 0.0

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        generator, stage = self.generator(scene), self._stage(before)
        trained = dict(generator.named_parameters())
        source, weights = _own(scene, draws).child(1), Params()
        for stream, name in enumerate(moving(generator, stage)):
            value = trained[name].expand(scene.num_examples, *trained[name].shape)
            if self.jitter:
                size = trained[name].square().mean().sqrt()
                value = value + self.jitter * size * source.normal(tuple(value.shape), stream=stream, dtype=value.dtype)
            weights[name] = value.clone()
        return {"generator": weights}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        stage = self._stage(before)
        return {CARRIED: {str(stage): self.entering(scene, draws, before, stage)}}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        [(stage, carried)] = scene.constants[CARRIED].items()
        generator = self.generator(scene)

        def images(weights: Params, carried: Tree) -> Tensor:
            return with_weights(generator, weights, lambda replaced: rest_of(replaced, carried, int(stage)))

        if scene.num_examples == 1:  # no axis more than needed: convolutions with weights of their own are dear
            return self.batch(images({n: w[0] for n, w in v["generator"].items()}, carried), scene)
        one_by_one = vmap(lambda weights, inputs: images(weights, tree.map(lambda value: value[None], inputs))[0])
        return self.batch(one_by_one(v["generator"], carried), scene)

    def _stage(self, before: Tree | None) -> int:
        """The block at which the last stage's search began."""
        return 0 if before is None or CARRIED not in before else int(next(iter(before[CARRIED])))


# --- pieces -----------------------------------------------------------------------------------------------------------


def rest_of(generator: Trained, carried: Tree, stage: int) -> Tensor:
    """From the input of block `stage` to images in [0, 1]."""
    for index in range(stage, generator.blocks):
        carried = generator.block(index, carried)
    images: Tensor = generator.picture(carried)
    return images


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """(B, C, H, W) -> (B, C, height, width), each pixel the mean over the area it covers; exact for any ratio."""
    for axis, size in ((-2, height), (-1, width)):
        if images.shape[axis] != size:
            share = _overlap(images.shape[axis], size, images)
            images = (images.transpose(axis, -1) @ share.T).transpose(axis, -1)
    return images


def _overlap(old: int, new: int, like: Tensor) -> Tensor:
    """(new, old): which share of each new pixel lies in each old one, along one axis."""
    ratio = old / new
    left = ratio * torch.arange(new, device=like.device, dtype=like.dtype)[:, None]
    cell = torch.arange(old, device=like.device, dtype=like.dtype)
    return (torch.minimum(left + ratio, cell + 1) - torch.maximum(left, cell)).clamp_min(0) / ratio


def _own(scene: TargetView, draws: Draws) -> Draws:
    """A source of random numbers apart from those of the fields."""
    return draws.child(len(scene.task.fields))


def _anything(scene: TargetView) -> Draws:
    return Draws(randomness.key("count").to(scene.like.device))


def _axes(value: Tensor) -> tuple[int, ...]:
    """A latent or style is its last axis; a map its last three."""
    return (-1,) if value.dim() < 4 else (-3, -2, -1)


def _length(value: Tensor) -> Tensor:
    return tree.safe_sqrt(value.square().sum(_axes(value), keepdim=True))


def _on_sphere(value: Tensor, length: Tensor) -> Tensor:
    current = _length(value)
    return torch.where(current > 0, value * (length / torch.where(current > 0, current, 1.0)), value)


def moving(generator: Trained, stage: int = 0) -> tuple[str, ...]:
    """Names of the weights that the image depends on from block `stage` on."""
    return _moving(generator, state_of(generator), stage)


@lru_cache(maxsize=16)
def _moving(generator: Trained, state: State, stage: int) -> tuple[str, ...]:
    """By one backward pass of a single image: weights that it does not reach have no gradient at all."""

    def names() -> tuple[str, ...]:
        weights = {name: value.detach().clone().requires_grad_() for name, value in generator.named_parameters()}
        with torch.no_grad():
            carried = _sample(generator)
            for index in range(stage):
                carried = generator.block(index, carried)
        image = with_weights(generator, weights, lambda changed: rest_of(changed, carried, stage))
        slopes = torch.autograd.grad(image.sum(), list(weights.values()), allow_unused=True)
        return tuple(name for name, slope in zip(weights, slopes, strict=True) if slope is not None)

    return aside(names)


def _names(generator: Trained) -> frozenset[str]:
    """The names of what this generator carries between blocks."""
    return _carried_names(generator, state_of(generator))


@lru_cache(maxsize=8)
def _carried_names(generator: Trained, state: State) -> frozenset[str]:
    def names() -> frozenset[str]:
        with torch.no_grad():
            return frozenset(_sample(generator))

    return aside(names)


def _graph(generator: Trained) -> int:
    return _graph_of(generator, state_of(generator))


@lru_cache(maxsize=8)
def _graph_of(generator: Trained, state: State) -> int:
    def run() -> Tensor:
        return rest_of(generator, _sample(generator, slope=True), 0)

    return aside(lambda: graph_entries(run, generator))


def _sample(generator: Trained, *, slope: bool = False) -> Tree:
    """The input of block 0 for a latent of zero: for questions about shapes and names."""
    like = next(generator.parameters())
    z = torch.zeros(1, generator.latent, device=like.device, dtype=like.dtype, requires_grad=slope)
    y = None if generator.classes is None else torch.zeros(1, device=like.device, dtype=torch.long)
    return dict(generator.begin(z, y))
