"""Images of trained, deep networks, in batches, without labels: the maps that layers saw, then an image for each."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradleak.attack import Composed, ReadOff, Reconstruction, missing_fields, require, scenes_of, supported
from gradleak.attack.cascade import given_of, matches, part, taken
from gradleak.attacks.spans.displaced import displaced, displaces
from gradleak.attacks.spans.inversion import HISTORY, Inversion
from gradleak.attacks.spans.norms import in_evaluation, training_norms, unreadable, with_batch_statistics
from gradleak.attacks.spans.telling import PRECISE, Told, layers_of, told_by
from gradleak.attacks.spans.unsent import by_rows
from gradleak.attacks.spectral import Spectral
from gradleak.core import assignment
from gradleak.core import random as randomness
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.engine import Engine
from gradleak.identify.rounding import rounding_of
from gradleak.identify.span_certificate import LayerCertificate, SpanCertificate
from gradleak.parts.fields import Labels, ReadBy, label_rule, last_layer
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Still, require_positive
from gradleak.parts.predictions import Replay, sent_entries
from gradleak.parts.priors import one_hot
from gradleak.parts.row_space import Layer
from gradleak.parts.spaces import Pixels, as_given
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, Seen, Track, as_targets
from gradleak.scenario.task import Batch, Task

LOOKS = 6  # at weights behind images that were found, for clients that take their gradient elsewhere
UNEXPLAINED = 1e-2  # cosine distance of the whole update: images with the right maps, and yet not the right ones
ROUNDING = 1e-9  # share of a gradient that true maps leave in float32, beside examples of a small loss


@dataclass(frozen=True, eq=False)
class Found:
    """Images with their labels, what layers told of each target, and how far each image is outside of it."""

    result: Reconstruction
    told: list[Told]
    outside: list[Tensor]

    def improved(self, other: Found, rows: list[int], better: Tensor) -> Found:
        """The same with what another search found of these rows, where that is better."""
        told, outside = list(self.told), list(self.outside)
        for number, row in enumerate(rows):
            if better[number]:
                told[row], outside[row] = other.told[number], other.outside[number]
        return Found(taken(self.result, other.result, rows, better), told, outside)


@named("span", kind="attack", paper="gradleak's own")
@dataclass(frozen=True)
class Span(ReadOff):
    """Each image of a batch from the maps that deep layers saw: no labels, no second derivative, no replay.

    The gradient of a convolution with no more places than outputs gives the span of its input patches. For stride 1
    the patches overlap so much that the maps themselves follow in closed form, and ReLU parts the examples
    (`spans.maps`). Behind known maps every gradient is linear in the map before it: maps of earlier layers are peeled
    off one by one (`spans.peeling`). What the earliest gradients say of all maps together is searched with first (the
    frontier); an image that does not fit it is searched for alone, from its own maps (`spans.inversion`). Labels are
    read last: behind known images dL/dW of the classifier is linear in its deltas. Where this does not find the image,
    the whole update is matched as well (`spectral`), and the lower match of the whole update wins.

    BatchNorm in training mode is taken apart by the statistics that came back (`spans.norms`). Entries that a known
    defence did not send are completed (`spans.unsent`). Where it takes the gradient at other weights, as FedSAM does,
    weights and images are found in turn (`spans.displaced`).

    `settings` of the result hold, per target: "told", for each layer its rank and rows, "level", the share of patches
    that does not fit together, and "gap", that of the next solution; "apart", the number of examples that were told
    apart (the others have too small a loss, and are blank); "peeled", for each layer the share of its gradient that
    its maps do not explain; "outside", for each example how far its maps are from what was told, in units of a grey
    image; "matched": gradient matching won, and "outside" is of images that were not returned; "spans", the
    certificate.

    steps        evaluations of the first search, in all three stages; a repair has two thirds of them
    repairs      at most, for images with more than `solved` outside
    fine_steps   evaluations of gradient matching, where spans leave more than `solved` outside, or images have the
                 maps but do not explain the update; 0: none
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
        if reason := unreadable(task.model):
            return f"{reason}; use 'ig' or 'gi'"
        return "" if layers_of(task, 1) else "no convolution of it has as few places as outputs, even for one image"

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
        there = task.to(engine.where, engine.dtype)
        with engine.settings():
            moving = [row for row, target in enumerate(targets) if displaces(there, target, knows)]
            points = [displaced(there, each, knows) if row in moving else each for row, each in enumerate(targets)]
        found = self._found(task, (targets, points), knows, (seed, engine, part(progress, 0, 2)))
        for look in range(LOOKS):
            moving = [row for row in moving if ROUNDING < float(matches(found.result)[row]) < math.inf]
            if not moving:
                break
            batches = [
                {name: value[row, : targets[row].num_examples] for name, value in found.result.batch.items()}
                for row in moving
            ]
            some, known = [targets[row] for row in moving], given_of(task, knows, moving, len(targets))
            with engine.settings():
                points = [displaced(there, *each) for each in zip(some, [knows] * len(some), batches, strict=True)]
            again = self._found(task, (some, points), known, (seed, engine, part(part(progress, 1, 2), look, LOOKS)))
            better = matches(again.result) < matches(found.result)[moving]
            found = found.improved(again, moving, better)
            moving = [row for row, good in zip(moving, better.tolist(), strict=True) if good]
        told, outside = found.told, found.outside
        result = spans = found.result
        doubtful = (matches(spans) > UNEXPLAINED).tolist()
        rows = [row for row, each in enumerate(outside) if float(each.max()) > self.solved or doubtful[row]]
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
        counts, matched = [target.num_examples for target in targets], settings["matched"]
        each = zip(told, outside, matched, counts, strict=True)
        settings["spans"] = [certificate(*one, self.solved).record() for one in each]
        return replace(result, settings={**result.settings, **settings})

    def _found(
        self,
        task: Task,
        targets: tuple[Sequence[Track], Sequence[Track]],
        knows: Knowledge,
        how: tuple[int, Engine, Share | None],
    ) -> Found:
        """What spans tell of each target, and its images with their labels.

        targets   as they were observed, and with the weights at which the client took its gradient
        """
        (observed, points), (seed, engine, progress) = targets, how
        alone, single = in_evaluation(task), [with_batch_statistics(task, target, knows) for target in points]
        floors = [rounding_of(target.last).rank for target in observed]
        told = self._told(alone, single, knows, (seed, engine, training_norms(task.model), floors))
        images, outside = self._images(alone, single, told, (seed, engine, progress))
        there = alone.to(engine.where, engine.dtype)
        views = iter([TargetView.of(there, target, knows) for target in single])
        waiting = iter(images)

        def read(scene: TargetView) -> Batch:
            low, high = scene.limits["x"]
            x = next(waiting).to(low).clamp(low, high)
            view = next(views)  # its features are those of each image alone
            alone_scene = replace(scene, task=view.task, buffers=view.buffers, weights=view.weights)
            y, order = labelled(alone_scene, x, Labels(label_rule(self.labels)))
            x = torch.cat([x, scene.task.blank(scene.num_examples)["x"].to(x)[len(x) :]])
            return {"x": x[order.to(x.device)], **y}

        still = Stage(Pixels(as_given), Replay(), Cosine(), (), Still())
        result = Composed(self.name, (still,), ReadBy(read)).run(task, observed, knows, seed, engine=engine)
        return Found(result, told, outside)

    def _told(
        self,
        task: Task,
        targets: Sequence[Track],
        knows: Knowledge,
        how: tuple[int, Engine, Sequence[str], Sequence[float]],
    ) -> list[Told]:
        solved, (seed, engine, norms, own_floors) = list[Told](), how
        floors = iter(own_floors)

        def read(scene: TargetView) -> Batch:
            solved.append(told_by(scene, self.layers, next(floors), Draws(randomness.key("span", seed)), norms))
            return {}

        with engine.settings():
            scenes_of(task.to(engine.where, engine.dtype), targets, knows, ReadBy(read))
        return solved

    def _images(
        self, task: Task, targets: Sequence[Track], told: Sequence[Told], how: tuple[int, Engine, Share | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The images of each target that were told apart, and how far each is outside of the spans."""
        seed, engine, progress = how
        search = Inversion(self.name, self.steps, self.repairs, self.solved, self.tv, self.restarts)
        images: list[Tensor] = [torch.empty(0)] * len(targets)
        outside: list[Tensor] = [torch.empty(0)] * len(targets)
        fronts: dict[tuple[str, int], list[int]] = {}
        for row, each in enumerate(told):
            if each.frontier is not None and each.frontier.fixes(math.prod(task.fields["x"].shape)):
                fronts.setdefault((each.frontier.layer, each.found), []).append(row)
        for rows in fronts.values():
            some, known = [targets[row] for row in rows], [told[row] for row in rows]
            result = search.together(task, some, known, (seed, engine, part(progress, 0, 2)))
            for number, row in enumerate(rows):
                images[row], outside[row] = result.batch["x"][number], matches(result)[number].repeat(told[row].found)
        groups: dict[tuple[Layer, ...], list[int]] = {}
        peeled = dict.fromkeys(layer for each in told if each.errors for layer in each.layers)
        for row, each in enumerate(told):  # targets with maps of their own are searched for together
            if not len(outside[row]) or float(outside[row].max()) > self.solved:
                groups.setdefault(tuple(peeled) if each.errors else each.layers, []).append(row)
        for done, (layers, rows) in enumerate(groups.items()):
            counts = {row: told[row].found or targets[row].num_examples for row in rows}
            lanes = [(row, example) for row in rows for example in range(counts[row])]
            single = [example for row in rows for example in targets[row].one_by_one()[: counts[row]]]
            blank = {layer: flat for row in rows for layer in layers for flat in told[row].flat_of(layer)}
            fields = [told[row].of_example(example, blank) for row, example in lanes]
            share = part(part(progress, 1, 2), done, len(groups))
            result = search.each(task, single, (tuple(blank), fields), (seed, engine, share))
            for row in rows:
                mine = [number for number, lane in enumerate(lanes) if lane[0] == row]
                apart = matches(result)[mine]
                if not len(outside[row]) or float(apart.mean()) < float(outside[row].mean()):
                    images[row], outside[row] = result.batch["x"][mine, 0], apart
        return images, outside

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


def certificate(told: Told, outside: Tensor, matched: bool, examples: int, solved: float) -> SpanCertificate:
    """What is proved of one update without the truth: maps that explain a gradient to rounding, and images with them.

    It is no proof of the pixels: an untrained network has nearly the same maps for different images.
    """
    ranks = {line["layer"]: line for line in told.record}
    names = [name for name in told.own if name not in ranks] + list(ranks)
    lines = {name: ranks.get(name, {}) for name in names}
    layers = tuple(
        LayerCertificate(
            name, line.get("rank"), line.get("rows"), told.peeled.get(name, line.get("level")), line.get("gap")
        )
        for name, line in lines.items()
    )
    apart = outside[: told.found].tolist()
    # The deepest maps were not peeled, and mixtures may pass for them: another layer has to be explained to rounding.
    exact = any(share < ROUNDING for share in list(told.peeled.values())[:-1])
    sure = [
        exact and value <= solved and any(float(errors[row]) < PRECISE for errors in told.errors.values())
        for row, value in enumerate(apart)
    ]
    proved = 0 if matched else sum(sure)
    reason = (
        "Proved are inputs of layers, not every pixel: different images may have nearly the same." if proved else ""
    )
    if matched:
        reason = "Matching the whole update explained it better, and that was returned."
    elif proved < len(apart):
        reason += " Some searches ended where the maps do not fit, or their maps are not exact."
    return SpanCertificate(
        examples, list(told.own)[-1] if told.found else "", tuple(apart), proved, layers, reason.strip()
    )


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
    observed, features = last_layer(scene).rows, caught[module].detach().cpu().double()
    sent = sent_entries(scene)[scene.task.classifier.weight].cpu()
    if not bool(sent.all()):
        observed = by_rows(torch.where(sent, observed, torch.nan), features)
    deltas = observed @ torch.linalg.pinv(features)  # (classes, images)
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
