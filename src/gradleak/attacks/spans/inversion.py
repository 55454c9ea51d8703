"""From what layers told to images: a search for each example by itself, then for all of an update together.

    min over x of sum_l w_l |f_l(x) - its part in the span of layer l|^2 / |f_l(x)|^2 + tv * total variation + box

by L-BFGS on weighted cosine coefficients, with passes through the first layers alone. A search that is stuck is stuck
somewhere: the places whose rows lie outside are blurred and drawn anew, the rest stays, and the lower match is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.attack import Composed, Reconstruction
from gradleak.attack.cascade import matches, part, taken
from gradleak.attacks.spans.equations import Frontier
from gradleak.attacks.spans.telling import Told
from gradleak.attacks.spectral import Spectral
from gradleak.core import random as randomness
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.engine import Engine
from gradleak.parts.fields import ReadBy
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import SquaredError
from gradleak.parts.priors import Box, TotalVariation
from gradleak.parts.protocols import Match, Prediction
from gradleak.parts.row_space import Layer, Outside, Spans
from gradleak.parts.stage import Stage
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.observation import Knowledge, Track
from gradleak.scenario.task import Batch, Task

STAGES = 3
HISTORY = 100  # pairs of L-BFGS
START, POWER = 0.01, 1.0  # of `Spectral`: near grey, since what the layers do not see stays as it began
COARSE, FINE = 5.0, 0.01  # total variation of first stages, and of the last one where maps are exact, in units of `tv`
FEW = 0.25  # of the rows of an example: more missing directions are those of other examples, with a small loss
DOUBTFUL = 4.0  # a place whose rows lie so many times as far outside as the median is drawn anew
BLUR, LOW = 9, 0.25  # pixels of the mean that fills it, and the size of the smooth noise on top, in units of the range


WEIGHT = "weight "  # fields and entries of these names hold the weights of the layers


@dataclass(frozen=True)
class ToldSpans(Spans):
    """`Spans`, with the flats solved for before the search, and weights: fields of the scene."""

    def target(self, scene: TargetView) -> Params:
        flats = {layer.name: scene.fields[f"span {layer.name}"][0] for layer in self.layers}
        return {**flats, **self._weights(scene)}

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        return {**super().__call__(batch, v, scene, now), **self._weights(scene)}

    def _weights(self, scene: TargetView) -> Params:
        names = [WEIGHT + layer.name for layer in self.layers]
        return {name: scene.fields[name][0] for name in names}


@dataclass(frozen=True)
class WeightedOutside(Outside):
    """`Outside`, each layer times its weight."""

    def residual(self, predicted: Params, observed: Params) -> Params:
        rows = {name: value for name, value in predicted.items() if not name.startswith(WEIGHT)}
        return {name: observed[WEIGHT + name] * rest for name, rest in super().residual(rows, observed).items()}


@dataclass(frozen=True)
class AtFrontier(Prediction):
    """How far the maps of all examples of an update are from what the frontier says of them.

    Scene fields: "frontier directions", "frontier values" and "frontier units", as in `Frontier`.
    """

    layer: str

    def target(self, scene: TargetView) -> Params:
        return {self.layer: torch.zeros_like(scene.fields["frontier values"])}

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        caught = scene.task.inputs_of([self.layer], scene.weights, batch, scene.buffers, whole=False)[self.layer]
        told = (scene.fields[f"frontier {each}"] for each in ("directions", "values", "units"))
        return {self.layer: Frontier(self.layer, *told).residual(caught) / scene.fields["frontier size"][0]}


def grey_inputs(scene: TargetView, layers: Sequence[str], examples: int) -> Batch:
    """What these layers see of images in the middle of the range."""
    low, high = scene.extent("x")
    batch = scene.task.blank(examples)
    with torch.no_grad():
        x = torch.zeros_like(batch["x"]) + (low + high) / 2
        return scene.task.inputs_of(layers, scene.weights, {**batch, "x": x}, scene.buffers)


def in_units_of_grey(scene: TargetView, layers: Sequence[Layer], fields: Batch) -> Batch:
    """The fields with weights such that every layer is as far outside at a grey image.

    The maps of an untrained network are nearly the same for all images: without a unit, any image would seem found.
    """
    seen = grey_inputs(scene, [layer.name for layer in layers], 1)
    rows = {layer.name: layer.rows_of(scene.task.model.get_submodule(layer.name), seen[layer.name]) for layer in layers}
    flats = {layer.name: fields[f"span {layer.name}"][0] for layer in layers}
    outside = {name: rest.norm() for name, rest in Outside().residual(rows, flats).items()}
    units = {name: torch.where(size.isfinite(), size, 1.0).clamp_min(1e-12) for name, size in outside.items()}
    return {**fields, **{WEIGHT + name: fields[WEIGHT + name] / unit for name, unit in units.items()}}


@dataclass(frozen=True)
class Inversion:
    """The search for images; settings as in `Span`."""

    name: str
    steps: int
    repairs: int
    solved: float
    tv: float
    restarts: int

    def each(
        self,
        task: Task,
        single: list[Track],
        told: tuple[tuple[Layer, ...], list[dict[str, Tensor]]],
        how: tuple[int, Engine, Share | None],
    ) -> Reconstruction:
        """The image of each single target, searched for, and repaired where it is stuck.

        told   the layers, and the scene fields of every target (`Told.of_example`)
        """
        (layers, told_fields), (seed, engine, progress) = told, how
        full, parts = dict(enumerate(told_fields)), 1 + self.repairs

        def search(rows: Sequence[int], stages: tuple[Stage, ...], number: int, **begin: Any) -> Reconstruction:
            waiting = iter([full[row] for row in rows])

            def read(scene: TargetView) -> Batch:
                fields = {name: value.to(scene.like)[None] for name, value in next(waiting).items()}
                return {**scene.task.blank(1), **in_units_of_grey(scene, layers, fields)}

            attack = Composed(self.name, stages, ReadBy(read), restarts=1 if begin else self.restarts)
            some, share = [single[row] for row in rows], part(progress, number, parts)
            return attack.run(task, some, Knowledge(), seed, engine=engine, progress=share, **begin)

        stages = self._stages(task, layers)
        best = search(range(len(single)), stages, 0)
        for number in range(1, parts):
            rows = torch.nonzero(matches(best) > self.solved).flatten().tolist()
            if not rows:
                break
            draws = [Draws(randomness.lane_key(single[row].key, seed, number)) for row in rows]
            with engine.settings():
                there = task.to(engine.where, engine.dtype)
                scenes = {row: TargetView.of(there, single[row], Knowledge()) for row in rows}
                found = {row: best.batch["x"][row] for row in rows}
                full |= {row: completed(scenes[row], layers, told_fields[row], found[row]) for row in rows}
                images = [
                    repaired(scenes[row], lasting(layers), full[row], found[row], own)
                    for row, own in zip(rows, draws, strict=True)
                ]
            result = search(rows, stages[1:], number, begin={"x": torch.stack(images)})
            best = taken(best, result, rows, matches(result) < matches(best)[rows])
        return best

    def together(
        self, task: Task, targets: Sequence[Track], told: Sequence[Told], how: tuple[int, Engine, Share | None]
    ) -> Reconstruction:
        """All images of each update at once, from its frontier: the same layer, and as many examples, for all."""
        seed, engine, progress = how
        frontiers = [each.frontier for each in told if each.frontier is not None]
        most, found = max(len(each.values) for each in frontiers), told[0].found
        waiting = iter(frontiers)

        def read(scene: TargetView) -> Batch:
            each = next(waiting).padded(most)
            fields = {"directions": each.directions, "values": each.values, "units": each.units}
            named = {f"frontier {name}": value.to(scene.like) for name, value in fields.items()}
            size = each.distance(grey_inputs(scene, [each.layer], found)[each.layer])
            named["frontier size"] = size.to(scene.like).expand(found)  # one for all
            return {**scene.task.blank(found), **named}

        some = [Track((replace(each.last, num_examples=found, key=f"{each.last.key}, together"),)) for each in targets]
        plan = [factor * self._variation(task) for factor in (COARSE, 1.0, FINE)]
        stages = self._plan(AtFrontier(frontiers[0].layer), SquaredError(), plan)
        attack = Composed(self.name, stages, ReadBy(read), restarts=self.restarts)
        return attack.run(task, some, Knowledge(), seed, engine=engine, progress=progress)

    def _plan(self, predict: Prediction, match: Match, plan: Sequence[float]) -> tuple[Stage, ...]:
        lbfgs = LBFGS(steps=max(1, self.steps // STAGES), history=HISTORY)
        space = Spectral(START, POWER)
        return tuple(Stage(space, predict, match, (TotalVariation(tv), Box()), lbfgs) for tv in plan)

    def _variation(self, task: Task) -> float:
        low, high = task.fields["x"].limits(torch.zeros(()))
        return self.tv / float((high - low).mean())  # total variation is of the model's input

    def _stages(self, task: Task, layers: tuple[Layer, ...]) -> tuple[Stage, ...]:
        """The maps, then all layers, then all with less total variation."""
        weight = self._variation(task)
        maps = tuple(layer for layer in layers if layer.whole) or layers
        first = self._plan(ToldSpans(maps), WeightedOutside(), [COARSE * weight])
        return first + self._plan(ToldSpans(lasting(layers)), WeightedOutside(), [COARSE * weight, weight])


def lasting(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Those that count to the end of a search."""
    return tuple(layer for layer in layers if not layer.start)


def repaired(
    scene: TargetView, layers: tuple[Layer, ...], fields: dict[str, Tensor], x: Tensor, draws: Draws
) -> Tensor:
    """The image, (1, C, H, W), blurred and drawn anew at the places whose rows lie outside; the rest as it is."""
    low, high = scene.limits["x"]
    x, scene = x.to(low), replace(scene, fields={name: value.to(low)[None] for name, value in fields.items()})
    predict = ToldSpans(layers)
    with torch.no_grad():
        predicted = predict({**scene.task.blank(1), "x": x}, {}, scene, Step(torch.zeros(()), 1))
        outside = WeightedOutside().residual(predicted, predict.target(scene))
        shares = [_places(layer, outside[layer.name], scene).expand_as(x[:, :1]) for layer in layers]
        share = torch.stack(shares).sum(0)
        mask = (share > DOUBTFUL * share.median()).to(x)
        soft = F.avg_pool2d(mask, 5, 1, 2)
        side = min(BLUR, 2 * (min(x.shape[-2:]) // 2) - 1)
        blurred = F.avg_pool2d(F.pad(x, [side // 2] * 4, mode="reflect"), side, 1)
        noise = Spectral(power=2.0).image(draws.normal(tuple(x.shape), dtype=low.dtype).to(x.device))
        return x * (1 - soft) + soft * (blurred + LOW * (high - low) * noise)


def completed(scene: TargetView, layers: tuple[Layer, ...], fields: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The fields, with the directions that the rank of the gradient misses: those of the rows of x that lie outside."""
    like = scene.like
    batch = {**scene.task.blank(1), "x": x.to(like)}
    with torch.no_grad():
        caught = scene.task.inputs_of([layer.name for layer in layers], scene.weights, batch, scene.buffers)
    full = dict(fields)
    for layer in layers:
        flat = fields[f"span {layer.name}"]
        known = flat[1:]
        missing = 0 if layer.whole else int((~known.any(1)).sum())
        rows = layer.rows_of(scene.task.model.get_submodule(layer.name), caught[layer.name]).to(known)
        if 0 < missing <= FEW * len(rows):  # more would hold the rows of any image
            outside = rows - (rows @ known.T) @ known
            directions = torch.linalg.svd(outside, full_matrices=False)[2][:missing]
            full[f"span {layer.name}"] = torch.cat([flat[:1], known[: len(known) - missing], directions])
    return full


def _places(layer: Layer, outside: Tensor, scene: TargetView) -> Tensor:
    """The energy outside at every place, as an image of one channel."""
    size, module = scene.task.fields["x"].shape[-2:], scene.task.model.get_submodule(layer.name)
    assert isinstance(module, nn.Conv2d)
    energy = outside.square()
    planes = energy.reshape(module.in_channels, -1).sum(0) if layer.whole else energy.sum(1)
    height = max(1, round((len(planes) * size[0] / size[1]) ** 0.5))
    grid = planes[: height * (len(planes) // height)].reshape(1, 1, height, -1)
    return F.interpolate(grid / grid.mean().clamp_min(1e-30), size=tuple(size), mode="bilinear")
