"""Both images of an update off a vision transformer with learned positions: a search for one, equations for the other.

1. The rows of each image lie in the spans of the first MLP of the network: of what its first linear layer reads, behind
   a LayerNorm, and its second, behind the nonlinearity, which mixtures of two images leave. L-BFGS finds an image whose
   rows lie there, up to some of its patches.
2. Less the gradient of that image, the update is about one of a single image: `PatchEquations` give it. Which of their
   small singular values are told is not known, so several cuts are tried.
3. A short search in the same spans repairs the images of the best cuts. The image stays that explains the whole update
   best, together with the first.
4. The same for the first image, given the second, and so on in turn.

The whole update decides at every step, and says at the end whether the images were found: what it leaves unexplained is
rounding, ten times as much where some patches are wrong, and a thousand times where the search is stuck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gradleak.attack import Composed, scenes_of
from gradleak.attack.cascade import matches, part
from gradleak.attacks.spans.inversion import WEIGHT, ToldSpans, WeightedOutside, in_units_of_grey
from gradleak.attacks.spans.patches import PatchEmbedding, PatchEquations, without_dropout
from gradleak.attacks.spectral import Spectral
from gradleak.core import random as randomness
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.engine import Engine
from gradleak.identify import rounding_of
from gradleak.parts.fields import Labels, ReadBy, label_rule
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.predictions import gradient
from gradleak.parts.priors import Box
from gradleak.parts.protocols import Space
from gradleak.parts.row_space import Layer, Spans, spanning_layers
from gradleak.parts.spaces import Pixels
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge, Observation, Track
from gradleak.scenario.task import Batch, Task

CUTS = (0.1, 0.03, 0.01, 0.003, 0.001, 1e-4)  # of singular values, as shares of the largest
REPAIRED = 4  # candidates that are searched on, of all cuts
FIRST, SHORT, LONG = 240, 70, 180  # evaluations: of the first image, of a candidate, of the best one
START, POWER = 0.1, 1.0  # of `Spectral`
BOX, HISTORY = 20.0, 100
CYCLES, PATIENCE, GAIN = 12, 3, 0.9  # cycles at most, and without a gain: a residual below this share of the last
SOLVED = 5e-3  # residual of the update, as a share: a search that ends above it begins again
PRECISE, COARSE = 1e-5, 1e-4  # a residual that L-BFGS reaches in double precision, and the most that is rounding
SMALL = 1e-3  # of the root mean square of the gradient: tensors that are smaller do not count more


@dataclass(frozen=True)
class Plan:
    """How updates of two images are searched: the rule for labels, and at most so many starts."""

    labels: str
    restarts: int

    def run(
        self,
        task: Task,
        targets: Sequence[Track],
        knows: Knowledge,
        embedding: PatchEmbedding,
        how: tuple[int, Engine, Share | None],
    ) -> list[Pair]:
        """The images of every target, which must hold two each."""
        seed, engine, progress = how
        engine = replace(engine, precision="double", snapshots=0)  # what is subtracted leaves few digits of float32
        with engine.settings():
            work = without_dropout(task).to(engine.where, engine.dtype)
            scenes = [scene.here() for scene in scenes_of(work, targets, knows, Labels(label_rule(self.labels)))]
        found = list[Pair]()
        for number, (target, scene) in enumerate(zip(targets, scenes, strict=True)):
            search, floor = PairSearch(work, target, scene, embedding, engine), rounding(target.last)
            found.append(search.run(seed, self.restarts, floor, part(progress, number, len(targets))))
        return found


def rounding(seen: Observation) -> float:
    """A residual of the whole update that counts as rounding: ten times that of the observation.

    Searches end up to ten roundings above it. A coarse type on the wire hides more than a wrong patch does: then none
    counts.
    """
    limit = 10 * rounding_of(seen).residual
    return max(PRECISE, limit) if limit <= COARSE else 0.0


def unpaired(task: Task, embedding: PatchEmbedding, training: LocalTraining | None) -> str:
    """Why two images of an update cannot be searched for; empty if they can."""
    if embedding.positions is None:
        return "Two images need positions that are trained."
    if not task.class_index:
        return "Two images need class labels."
    if training is not None and len(training.order(2)) > 1:
        return "Two images need a single local step: the gradient of one is subtracted at the weights that were sent."
    if not pair_layers(task, embedding):
        return (
            f"Two images need an MLP whose gradient holds the spans of their {2 * embedding.tokens} tokens: more than "
            f"so many numbers in a token (here {embedding.width}), and as many equations as an image has numbers."
        )
    return ""


@dataclass(frozen=True, eq=False)
class Pair:
    """Two images, (2, ...) in model-input space, in the order of the labels.

    residual   of the whole update, as a share: the root mean square over its tensors, each in its own unit
    outside    of each image, the distance from the spans in units of a grey image
    starts     searches that were made
    layers     those whose spans were searched
    y          the labels
    """

    x: Tensor
    residual: float
    outside: tuple[float, ...]
    starts: int
    layers: tuple[Layer, ...]
    y: Tensor


def pair_layers(task: Task, embedding: PatchEmbedding, weights: Params | None = None) -> tuple[Layer, ...]:
    """The first MLP whose gradient gives the spans of the tokens of two images; empty: none tells as much as an image.

    Two linear layers in a row, from the width of a token to more and back.
    """
    layers = spanning_layers(task, 2, weights, alone=False)
    state = dict(task.model.named_parameters())
    sizes = [tuple(state[f"{layer.name}.weight"].flatten(1).shape) for layer in layers]
    width = embedding.width
    for number, ((hidden, inputs), after) in enumerate(zip(sizes, sizes[1:], strict=False)):
        if inputs == width < hidden and after == (width, hidden):
            mlp = layers[number : number + 2]
            told = zip(mlp, (inputs, hidden), strict=True)
            equations = sum(layer.rows // 2 * (each - (layer.rows - layer.bias)) for layer, each in told)
            return mlp if equations >= math.prod(task.fields["x"].shape) else ()
    return ()


@dataclass(frozen=True, eq=False)
class PairSearch:
    """The search in one update of two images. It never sees the truth: the whole update decides.

    task     in double precision, without dropout
    target   the update
    scene    its view, with labels
    """

    task: Task
    target: Track
    scene: TargetView
    embedding: PatchEmbedding
    engine: Engine

    def run(self, seed: int, restarts: int, floor: float, progress: Share | None) -> Pair:
        """The best of several starts. `floor`: a residual that is rounding."""
        found = list[Pair]()
        while len(found) < restarts and not any(pair.residual <= SOLVED for pair in found):
            start = len(found)  # far from every seed that a user may give
            found.append(self._from(seed + (start << 40), floor, part(progress, start, restarts)))
        return replace(min(found, key=lambda pair: pair.residual), starts=len(found))

    def _from(self, seed: int, floor: float, progress: Share | None) -> Pair:
        images = self._search(None, FIRST, seed)[0].repeat(2, 1, 1, 1)
        gradients = [self._gradient(images[slot], slot) for slot in (0, 1)]
        known: tuple[int, ...] = (0, 1)  # the first image may have either label
        residual, idle = math.inf, 0
        for cycle in range(CYCLES):
            share, slot, image = self._step(images, gradients, known, residual)
            idle = idle + 1 if share > GAIN * residual else 0
            if share < residual:
                images[slot], residual = image, share
                gradients[slot] = self._gradient(image, slot)
            if progress is not None:
                progress((cycle + 1) / CYCLES)
            if residual <= floor or idle == PATIENCE:
                break
            known = (slot,)
        images, residual, outside = self._finished(images, gradients, residual)
        return Pair(images, residual, outside, 1, self.layers, self.scene.fields["y"])

    def _finished(
        self, images: Tensor, gradients: Sequence[Params], residual: float
    ) -> tuple[Tensor, float, tuple[float, ...]]:
        """Both images searched on, if that explains the update better; the residual; how far outside they are."""
        ended, outside = self._search(images, LONG)
        share = self._left(ended[0], 0, [self._gradient(image, slot) for slot, image in enumerate(ended)])
        if share < residual:
            return ended, share, tuple(outside.tolist())
        return images, residual, tuple(self._search(images, 1)[1].tolist())

    def _step(
        self, images: Tensor, gradients: Sequence[Params], known: Sequence[int], residual: float
    ) -> tuple[float, int, Tensor]:
        """One image from the update less the gradient of the other: what both leave over, which, and the image."""
        tried = list[tuple[float, int, Tensor]]()
        for given in known:
            rest = {name: value - gradients[given][name] for name, value in self.observed.items()}
            slot, equations = 1 - given, PatchEquations.of(rest, self.embedding)
            for rank in dict.fromkeys(map(equations.rank, CUTS)):
                image = self._placed(equations.patches(rank))
                tried.append((self._left(image, slot, gradients), slot, image))
            if math.isfinite(residual):
                tried.append((residual, slot, images[slot]))
        some = sorted(tried, key=lambda each: each[0])[:REPAIRED]
        repaired, _ = self._search(torch.stack([image for _, _, image in some]), SHORT)
        for (_, slot, _), image in zip(some, repaired, strict=True):
            tried.append((self._left(image, slot, gradients), slot, image))
        share, slot, image = min(tried, key=lambda each: each[0])
        longer = self._search(image[None], LONG)[0][0]
        return min((share, slot, image), (self._left(longer, slot, gradients), slot, longer), key=lambda each: each[0])

    def _left(self, image: Tensor, slot: int, gradients: Sequence[Params]) -> float:
        """What this image and the other one leave of the whole update."""
        mine, other = self._gradient(image, slot), gradients[1 - slot]
        shares = [
            (mine[name] + other[name] - value).square().mean() / self.units[name].square()
            for name, value in self.observed.items()
        ]
        return float(torch.stack(shares).mean().sqrt().nan_to_num(torch.inf))

    def _gradient(self, image: Tensor, slot: int) -> Params:
        """What one image adds to the gradient of the batch."""
        batch = {"x": image[None], "y": self.scene.fields["y"][slot : slot + 1]}
        sent = self.task.gradient(self.scene.weights, batch, self.scene.buffers)
        return {name: self.share * value.detach() for name, value in sent.items()}

    @cached_property
    def observed(self) -> Params:
        return {name: value.detach() for name, value in gradient(self.scene).items()}

    @cached_property
    def units(self) -> Params:
        """The root mean square of each tensor, but no less than a share of that of the whole gradient."""
        squares = {name: value.square().mean() for name, value in self.observed.items()}
        entries = {name: value.numel() for name, value in self.observed.items()}
        whole = float(sum(squares[name] * entries[name] for name in squares)) / sum(entries.values())
        return {name: square.clamp_min(SMALL**2 * whole).sqrt() for name, square in squares.items()}

    @cached_property
    def share(self) -> float:
        """The weight of one image in the objective of two: a half for a mean, one for a sum."""
        one, two = (self.task.gradient(self.scene.weights, self._noise(count), self.scene.buffers) for count in (1, 2))
        inner = sum((one[name] * two[name]).sum() for name in one)
        return float(inner / sum(value.square().sum() for value in one.values())) / 2

    def _noise(self, examples: int) -> Batch:
        """The same image of noise, so many times."""
        batch = self.task.blank(1)
        noise = Draws(randomness.key("pairs", 0)).normal(tuple(batch["x"].shape), dtype=batch["x"].dtype)
        batch["x"] = batch["x"] + noise.to(batch["x"].device)
        return {name: torch.cat([value] * examples) for name, value in batch.items()}

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return pair_layers(self.task, self.embedding, self.scene.weights)

    @cached_property
    def flats(self) -> Params:
        return Spans(self.layers).target(self.scene)

    def _placed(self, patches: Tensor) -> Tensor:
        """The image of these patches."""
        low, high = self.scene.limits["x"]
        x = self.task.blank(1)["x"][0]
        x.view(-1)[self.embedding.places] = patches.to(x)
        return x.clamp(low, high)

    def _search(self, begin: Tensor | None, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Images, (starts, ...), whose rows are searched into the spans, and how far outside they are.

        begin   where each search starts; None: one start near grey, over cosine coefficients
        """
        fields = {f"span {name}": flat[None] for name, flat in self.flats.items()}
        fields |= {WEIGHT + name: flat.new_ones(1) for name, flat in self.flats.items()}

        def read(scene: TargetView) -> Batch:
            return {**scene.task.blank(1), **in_units_of_grey(scene, self.layers, fields)}

        space: Space = Spectral(START, POWER) if begin is None else Pixels()
        lbfgs = LBFGS(steps=steps, history=HISTORY)
        stage = Stage(space, ToldSpans(self.layers), WeightedOutside(), (Box(BOX),), lbfgs)
        attack = Composed("vit", (stage,), ReadBy(read))
        seen = self.target.last
        count = 1 if begin is None else len(begin)
        starts = [replace(seen, num_examples=1, key=f"{seen.key}, start {number}") for number in range(count)]
        given = None if begin is None else {"x": begin[:, None]}
        found = attack.run(self.task, starts, Knowledge(), seed, engine=self.engine, begin=given)
        low, high = self.scene.limits["x"]
        return found.batch["x"][:, 0].to(low).clamp(low, high), matches(found)
