"""Images of trained, deep networks, in batches, without labels: the maps that layers saw, then an image for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.attack import Composed, ReadOff, Reconstruction, missing_fields, require, scenes_of, supported
from gradleak.attack.cascade import given_of, matches, part, taken
from gradleak.attacks.spans.anchor import anchored
from gradleak.attacks.spans.maps import Maps, separated, solve_maps
from gradleak.attacks.spans.peeling import Known, Network
from gradleak.attacks.spectral import Spectral
from gradleak.core import assignment
from gradleak.core import random as randomness
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.engine import Engine
from gradleak.identify.rounding import rounding_of
from gradleak.parts.fields import Labels, ReadBy, label_rule, last_layer
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Still, require_positive
from gradleak.parts.predictions import Replay, assumed_in, gradient
from gradleak.parts.priors import Box, TotalVariation, one_hot
from gradleak.parts.row_space import Layer, Outside, Spans, spanning_layers
from gradleak.parts.spaces import Pixels, as_given
from gradleak.parts.stage import Stage
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, Seen, Track, as_targets
from gradleak.scenario.task import Batch, Task, TaskError

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
HISTORY = 100  # pairs of L-BFGS
START, POWER = 0.01, 1.0  # of `Spectral`: near grey, since what the layers do not see stays as it began
COARSE = 5.0  # all stages but the last have so many times its total variation
FEW = 0.25  # of the rows of an example: more missing directions are those of other examples, with a small loss
EXACT = 1e-6  # level of maps that are solved for to rounding
DOUBTFUL = 4.0  # a place whose rows lie so many times as far outside as the median is drawn anew
BLUR, LOW = 9, 0.25  # pixels of the mean that fills it, and the size of the smooth noise on top, in units of the range


@dataclass(frozen=True, eq=False)
class Told:
    """What the layers of one target tell.

    layers   those that tell, in the order of the forward pass
    flats    by layer, as `Outside` takes them: a point and directions
    own      by layer, (found, features): the maps of single examples, of unit length
    found    examples that were told apart
    record   for each layer its rank, rows, level and gap
    peeled   for each layer whose maps followed from a deeper one, the share of its gradient that they do not explain
    """

    layers: tuple[Layer, ...]
    flats: dict[str, Tensor]
    own: dict[str, Tensor]
    record: list[dict[str, Any]] = field(default_factory=list)
    peeled: dict[str, float] = field(default_factory=dict)

    @property
    def found(self) -> int:
        return max((len(maps) for maps in self.own.values()), default=0)

    def of_example(self, example: int) -> dict[str, Tensor]:
        """The flats as the search for one example takes them: its own map, where it was told apart."""
        flats = dict(self.flats)
        for name, maps in self.own.items():
            if example < len(maps):
                flats[name] = torch.zeros_like(flats[name])
                flats[name][1] = maps[example]
        return flats


@dataclass(frozen=True)
class ToldSpans(Spans):
    """`Spans`, with the flats solved for before the search: fields of the scene."""

    def target(self, scene: TargetView) -> Params:
        return {layer.name: scene.fields[f"span {layer.name}"][0] for layer in self.layers}


@named("span", kind="attack", paper="gradleak's own")
@dataclass(frozen=True)
class Span(ReadOff):
    """Each image of a batch from the maps that deep layers saw: no labels, no second derivative, no replay.

    The gradient of a convolution with no more places than outputs gives the span of its input patches. For stride 1
    the patches overlap so much that the maps themselves follow in closed form, and ReLU parts the examples
    (`spans.maps`). Each image is then searched for alone, with passes up to those layers:

        min over x of sum_l |f_l(x) - its part in the span of layer l|^2 / |f_l(x)|^2 + tv * total variation + box

    by L-BFGS on weighted cosine coefficients: first the maps, then with them the spans of strided layers, then with
    less total variation. A search that is stuck is stuck somewhere: the places whose rows lie outside are blurred and
    drawn anew, the rest stays, and the lower match is kept (`repairs`). Outputs that are dead make the rank of a layer
    less than its rows: the missing directions are then those in which the rows of the image found so far lie outside
    (`completed`). Labels are read last: behind known images dL/dW of the classifier is linear in its deltas.
    Where spans do not find the image, as on an untrained network, whose maps are nearly collinear, the whole update is
    matched as well (`spectral`), and the lower match of the whole update wins.

    `settings` of the result hold, per target: "told", for each layer its rank and rows, "level", the share of patches
    that does not fit together, and "gap", that of the next solution; "apart", the number of examples that were told
    apart (the others have too small a loss, and are blank); and "outside", for each of them, the share of its rows
    outside of the spans: 0 at the truth, to rounding. "matched": gradient matching won, and "outside" is of images that
    were not returned.

    steps        evaluations of the first search, in all three stages; a repair has two thirds of them
    repairs      at most, for images with more than `solved` outside
    fine_steps   evaluations of gradient matching, where spans leave more than `solved` outside; 0: none
    layers       how many of the layers that tell are used, from the first on: deeper ones add kinks, and little else
    tv           weight of total variation in the last stage, for pixels from 0 to 1
    restarts     starts of the first search
    """

    steps: int = 600
    fine_steps: int = 300
    layers: int = 5
    tv: float = 2e-4
    restarts: int = 1
    repairs: int = 3
    solved: float = 1e-4

    gradients_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "layers", "restarts"), real=("solved",))
        if min(self.fine_steps, self.repairs) < 0 or not self.tv >= 0:
            raise ValueError(
                f"fine_steps, repairs and tv must not be negative; given {self.fine_steps}, {self.repairs}, {self.tv}."
            )

    @property
    def name(self) -> str:
        return "span"

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        if reason := Spectral().refuses(task):
            return reason
        if unread := missing_fields(task, {"x", "y", *given}):
            return f"it finds x and reads labels y; this task also has {', '.join(unread)}"
        if "y" in task.fields and not task.class_index and "y" not in given:
            return "it reads the label of a class, and y is none; give it"
        if any(isinstance(module, NORMS) and module.training for module in task.model.modules()):
            return (
                "BatchNorm in training mode mixes the examples, and it searches for each alone; use 'ig' or 'gi' or, "
                "only if the clients train in evaluation mode, use model.eval()"
            )
        return "" if _layers(task, 1) else "no convolution of it has as few places as outputs, even for one image"

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Share | None = None,
    ) -> Reconstruction:
        """Solve for the maps of every target, search for each image, then read labels and replay the client."""
        supported(self, task, knows)
        require(self, knows)
        engine, targets = engine or Engine(), as_targets(seen)
        fits(task, [observation for target in targets for observation in target.observations])
        told = self._told(task, targets, knows, seed, engine)
        images, outside = self._images(task, targets, told, (seed, engine, part(progress, 0, 2)))
        waiting = iter(images)

        def read(scene: TargetView) -> Batch:
            low, high = scene.limits["x"]
            x = next(waiting).to(low).clamp(low, high)
            y, order = labelled(scene, x, Labels(label_rule(self.labels)))
            x = torch.cat([x, scene.task.blank(scene.num_examples)["x"].to(x)[len(x) :]])
            return {"x": x[order.to(x.device)], **y}

        still = Stage(Pixels(as_given), Replay(), Cosine(), (), Still())
        result = spans = Composed(self.name, (still,), ReadBy(read)).run(task, targets, knows, seed, engine=engine)
        rows = [row for row, each in enumerate(outside) if float(each.max()) > self.solved]
        if rows and self.fine_steps:
            result = self._matched(task, targets, knows, result, rows, seed, engine)
        if progress is not None:
            progress(1.0)
        settings = {
            "attack": repr(self),
            "told": [each.record for each in told],
            "apart": [each.found for each in told],
            "peeled": [each.peeled for each in told],
            "outside": [each.tolist() for each in outside],
            "matched": (matches(result) < matches(spans)).tolist(),
        }
        return replace(result, settings={**result.settings, **settings})

    def _told(self, task: Task, targets: Sequence[Track], knows: Knowledge, seed: int, engine: Engine) -> list[Told]:
        solved: list[Told] = []
        floors = iter([rounding_of(target.last).rank for target in targets])

        def read(scene: TargetView) -> Batch:
            solved.append(told_by(scene, self.layers, next(floors), Draws(randomness.key("span", seed))))
            return {}

        with engine.settings():
            scenes_of(task.to(engine.where, engine.dtype), targets, knows, ReadBy(read))
        return solved

    def _images(
        self, task: Task, targets: Sequence[Track], told: Sequence[Told], how: tuple[int, Engine, Share | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The images of each target that were told apart, and how far each is outside of the spans."""
        seed, engine, progress = how
        images: list[Tensor] = [torch.empty(0)] * len(targets)
        outside: list[Tensor] = [torch.empty(0)] * len(targets)
        groups: dict[tuple[Layer, ...], list[int]] = {}
        for row, each in enumerate(told):
            groups.setdefault(each.layers, []).append(row)
        for done, (layers, rows) in enumerate(groups.items()):
            counts = {row: told[row].found or targets[row].num_examples for row in rows}
            lanes = [(row, example) for row in rows for example in range(counts[row])]
            single = [example for row in rows for example in targets[row].one_by_one()[: counts[row]]]
            flats = [told[row].of_example(example) for row, example in lanes]
            result = self._one_by_one(task, single, (layers, flats), seed, engine, part(progress, done, len(groups)))
            apart = matches(result)
            for row in rows:
                mine = [number for number, lane in enumerate(lanes) if lane[0] == row]
                images[row], outside[row] = result.batch["x"][mine, 0], apart[mine]
        return images, outside

    def _one_by_one(
        self,
        task: Task,
        single: list[Track],
        told: tuple[tuple[Layer, ...], list[dict[str, Tensor]]],
        seed: int,
        engine: Engine,
        progress: Share | None,
    ) -> Reconstruction:
        """The image of each single target, searched for, and repaired where it is stuck."""
        layers, flats = told
        full, parts = dict(enumerate(flats)), 1 + self.repairs

        def search(rows: Sequence[int], stages: tuple[Stage, ...], number: int, **begin: Any) -> Reconstruction:
            waiting = iter([full[row] for row in rows])

            def read(scene: TargetView) -> Batch:
                fields = {f"span {name}": flat.to(scene.like)[None] for name, flat in next(waiting).items()}
                return {**scene.task.blank(1), **fields}

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
                full |= {row: completed(scenes[row], layers, flats[row], found[row]) for row in rows}
                images = [
                    repaired(scenes[row], layers, full[row], found[row], own)
                    for row, own in zip(rows, draws, strict=True)
                ]
            result = search(rows, stages[1:], number, begin={"x": torch.stack(images)})
            best = taken(best, result, rows, matches(result) < matches(best)[rows])
        return best

    def _stages(self, task: Task, layers: tuple[Layer, ...]) -> tuple[Stage, ...]:
        """The maps, then all layers, then all with less total variation."""
        low, high = task.fields["x"].limits(torch.zeros(()))
        weight = self.tv / float((high - low).mean())  # total variation is of the model's input
        maps = tuple(layer for layer in layers if layer.whole) or layers
        plan = ((maps, COARSE * weight), (layers, COARSE * weight), (layers, weight))
        lbfgs = LBFGS(steps=max(1, self.steps // len(plan)), history=HISTORY)
        return tuple(
            Stage(Spectral(START, POWER), ToldSpans(which), Outside(), (TotalVariation(variation), Box()), lbfgs)
            for which, variation in plan
        )

    def _matched(
        self,
        task: Task,
        targets: Sequence[Track],
        knows: Knowledge,
        best: Reconstruction,
        rows: list[int],
        seed: int,
        engine: Engine,
    ) -> Reconstruction:
        """The result, with gradient matching at those targets where it explains the whole update better."""
        stage = Stage(Spectral(), Replay(), Cosine(), (), LBFGS(steps=self.fine_steps, history=HISTORY))
        attack = Composed(self.name, (stage,), Labels(label_rule(self.labels)))
        some, known = [targets[row] for row in rows], given_of(task, knows, rows, len(targets))
        result = attack.run(task, some, known, seed, engine=engine)
        return taken(best, result, rows, matches(result) < matches(best)[rows])


def _layers(
    task: Task, examples: int, weights: Params | None = None, buffers: Params | None = None
) -> tuple[Layer, ...]:
    """Convolutions that tell, alone or together. Linear layers behind the average of a map tell nothing of places."""
    layers = spanning_layers(task, examples, weights, buffers, alone=False)
    return tuple(layer for layer in layers if isinstance(task.model.get_submodule(layer.name), nn.Conv2d))


def tells(task: Task, examples: int) -> bool:
    """Does a convolution behind others give the span of its patches for so many examples in an update?

    One that sees the image itself leaves at least its scale open, and total variation shrinks it to zero.
    """
    channels = task.fields["x"].shape[0]
    modules: list[Any] = [task.model.get_submodule(layer.name) for layer in _layers(task, examples)]
    return any(module.in_channels != channels for module in modules)


def told_by(scene: TargetView, most: int, floor: float, draws: Draws) -> Told:
    """What the layers of one target tell: maps where they are determined, else the span of the patches."""
    task, examples = scene.task, scene.num_examples
    candidates = _layers(task, examples, scene.weights, scene.buffers)
    update = assumed_in(scene).visible(gradient(scene), scene)
    telling = [layer for layer in candidates if bool(update[f"{layer.name}.weight"].any())]
    if not telling:
        raise TaskError(
            f"No layer of this network tells its inputs for {examples} examples in an update: all have more places "
            "than outputs, or their gradient was not sent. `gradleak check` lists up to how many each tells. Use 'ig'."
        )
    spans = {layer.name: _span(update[f"{layer.name}.weight"], layer.rows, floor) for layer in telling}
    record = [{"layer": layer.name, "rank": len(spans[layer.name]), "rows": layer.rows} for layer in telling]
    if (known := _peeled(scene, update, telling, spans, draws))[1:]:
        return _of_maps(known[-most:], record)
    sent, record = telling[:most], record[:most]
    with torch.no_grad():
        shapes = task.inputs_of([layer.name for layer in sent], scene.weights, task.blank(1), scene.buffers)
    solutions = dict[str, Maps]()
    for layer, line in zip(sent, record, strict=True):
        module: Any = task.model.get_submodule(layer.name)
        span = spans[layer.name]
        if max(module.stride) == 1 and max(module.kernel_size) > 1:
            maps = solve_maps(module, span, tuple(shapes[layer.name].shape[1:]), examples, draws)
            line |= {"level": maps.level, "gap": maps.gap}
            if maps.determined:
                solutions[layer.name] = maps
    own, anchor = torch.zeros(0), ""
    for name, maps in solutions.items():
        apart = separated(maps.basis, draws.child(1))
        if len(apart) > len(own):
            own, anchor = apart, name
        if len(own) == examples:
            break
    # A layer of less rank has maps of less precision: its patches tell more, once the rank is completed.
    exact = {name for name, maps in solutions.items() if maps.level < EXACT}
    whole = exact | {anchor} if exact else solutions.keys()
    layers = tuple(replace(layer, bias=False, whole=layer.name in whole) for layer in sent)
    flats = {
        layer.name: _flat(solutions[layer.name].basis if layer.whole else spans[layer.name], _rows(layer, examples))
        for layer in layers
    }
    return Told(layers, flats, {anchor: own} if anchor else {}, record)


def _peeled(
    scene: TargetView, update: Params, telling: list[Layer], spans: dict[str, Tensor], draws: Draws
) -> list[Known]:
    """Maps of a deep layer and of those before it; empty where the network has no classifier or no ReLU."""
    task = scene.task
    if not task.class_index or not bool(update[f"{task.classifier.module}.weight"].any()):
        return []
    names = [name for name, module in task.model.named_modules() if isinstance(module, nn.Conv2d)]
    network = Network.of(task, scene.weights, scene.buffers, names)
    return anchored(network, update, tuple(telling), spans, draws)


def _of_maps(known: Sequence[Known], record: list[dict[str, Any]]) -> Told:
    """What is told where the maps of single examples are known: these alone, in the order of the forward pass."""
    maps = {each.layers[0]: each.maps.flatten(1) for each in reversed(known)}
    own = {name: rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30) for name, rows in maps.items()}
    layers = tuple(Layer(name, len(rows), bias=False, whole=True) for name, rows in own.items())
    flats = {name: _flat(rows[:0], 1) for name, rows in own.items()}
    peeled = {each.layers[0]: each.unexplained for each in reversed(known)}
    return Told(layers, flats, own, record, peeled)


def _rows(layer: Layer, examples: int) -> int:
    return examples if layer.whole else layer.rows


def _flat(directions: Tensor, rows: int) -> Tensor:
    """As `Outside` takes them: the point zero, and directions, filled up with zeros to the number of rows."""
    missing = directions.new_zeros(1 + rows - len(directions), directions.shape[1])
    return torch.cat([missing[:1], directions, missing[1:]])


def repaired(scene: TargetView, layers: tuple[Layer, ...], flats: dict[str, Tensor], x: Tensor, draws: Draws) -> Tensor:
    """The image, (1, C, H, W), blurred and drawn anew at the places whose rows lie outside; the rest as it is."""
    low, high = scene.limits["x"]
    x, scene = x.to(low), replace(scene, fields={f"span {name}": flat.to(low)[None] for name, flat in flats.items()})
    predict = ToldSpans(layers)
    with torch.no_grad():
        predicted = predict({**scene.task.blank(1), "x": x}, {}, scene, Step(torch.zeros(()), 1))
        outside = Outside().residual(predicted, predict.target(scene))
        shares = [_places(layer, outside[layer.name], scene).expand_as(x[:, :1]) for layer in layers]
        share = torch.stack(shares).sum(0)
        mask = (share > DOUBTFUL * share.median()).to(x)
        soft = F.avg_pool2d(mask, 5, 1, 2)
        side = min(BLUR, 2 * (min(x.shape[-2:]) // 2) - 1)
        blurred = F.avg_pool2d(F.pad(x, [side // 2] * 4, mode="reflect"), side, 1)
        noise = Spectral(power=2.0).image(draws.normal(tuple(x.shape), dtype=low.dtype).to(x.device))
        return x * (1 - soft) + soft * (blurred + LOW * (high - low) * noise)


def completed(scene: TargetView, layers: tuple[Layer, ...], flats: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The flats, with the directions that the rank of the gradient misses: those of the rows of x that lie outside."""
    like = scene.like
    batch = {**scene.task.blank(1), "x": x.to(like)}
    with torch.no_grad():
        caught = scene.task.inputs_of([layer.name for layer in layers], scene.weights, batch, scene.buffers)
    full = dict(flats)
    for layer in layers:
        known = flats[layer.name][1:]
        missing = 0 if layer.whole else int((~known.any(1)).sum())
        rows = layer.rows_of(scene.task.model.get_submodule(layer.name), caught[layer.name]).to(known)
        if 0 < missing <= FEW * len(rows):  # more would hold the rows of any image
            outside = rows - (rows @ known.T) @ known
            directions = torch.linalg.svd(outside, full_matrices=False)[2][:missing]
            blank = flats[layer.name][:1]
            full[layer.name] = torch.cat([blank, known[: len(known) - missing], directions])
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


def _span(weight: Tensor, rows: int, floor: float) -> Tensor:
    """The directions of dL/dW above its rounding, (rank, inputs), in double precision."""
    matrix = weight.flatten(1).double()
    squares, left = torch.linalg.eigh(matrix @ matrix.T)  # a few times faster than an SVD of so wide a matrix
    values = squares.clamp_min(0).sqrt()
    kept = (values > floor * values[-1]).nonzero()[:, 0].flip(0)[:rows]
    return torch.linalg.qr((left[:, kept].T @ matrix).T)[0].T.contiguous()


def labelled(scene: TargetView, x: Tensor, rule: Labels) -> tuple[Batch, Tensor]:
    """Labels of all examples, these images first, and the order in which images belong to given labels.

    dL/dW of the classifier is sum_b delta_b h_b^T with known h_b: least squares gives the delta_b, and only the entry
    of the label is negative.
    """
    count = scene.num_examples
    if not scene.task.class_index:
        return {}, torch.arange(count)
    with torch.no_grad():
        module = scene.task.classifier.module
        caught = scene.task.inputs_of([module], scene.weights, {**scene.task.blank(len(x)), "x": x}, scene.buffers)
    observed = last_layer(scene).rows  # (classes, features)
    deltas = observed @ torch.linalg.pinv(caught[module].detach().cpu().double())  # (classes, images)
    deltas = deltas / deltas.norm(dim=0).clamp_min(1e-30)
    if "y" in scene.fields:
        y = scene.fields["y"]
        wanted = y.cpu().double() if y.is_floating_point() else one_hot(y.cpu(), len(deltas), deltas.dtype)
        blank = deltas.new_zeros(len(deltas), count - len(x))
        return {"y": y}, assignment.match(wanted @ torch.cat([deltas, blank], 1))  # (labels, examples)
    labels = deltas.argmin(0).tolist()
    if len(labels) < count:  # those of blank images: what the rule reads and no other image has
        left = rule(scene)["y"].tolist()
        for label in labels:
            if label in left:
                left.remove(label)
        labels += left[: count - len(labels)]
    return {"y": torch.tensor(labels, device=scene.like.device)}, torch.arange(count)
