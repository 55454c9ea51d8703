"""Closed form: the gradient of a biased linear layer that sees the input reveals it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import jvp

from gradleak.attack import Composed, ReadOff, Reconstruction, require, supported
from gradleak.core import assignment
from gradleak.core import random as randomness
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.engine import Engine
from gradleak.parts.fields import Labels, ReadBy, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Still
from gradleak.parts.predictions import Replay, gradient
from gradleak.parts.priors import one_hot
from gradleak.parts.spaces import Pixels, as_given
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import Knowledge, Seen
from gradleak.scenario.task import Batch, Task, TaskError


@named("analytic", kind="attack", paper="Phong et al., IEEE TIFS 2018; Geiping et al., NeurIPS 2020, proposition 3.1")
@dataclass(frozen=True)
class Analytic(ReadOff):
    """Read the input off the first layer, if it is linear with a bias: no optimisation, exact for one example.

    With d_ir the derivative by pre-activation r of example i, dL/dW_r = sum_i d_ir x_i and dL/db_r = sum_i d_ir. One
    example is x = sum_r dL/db_r dL/dW_r / sum_r (dL/db_r)^2, least squares over the rows (others average the ratios).
    For several, row r gives a mixture, sum_i d_ir x_i / sum_i d_ir: an example itself where only it activates neuron r.
    Ratios within the bounds are candidates, ranked by how many rows `agree` on them (mixtures differ from row to row)
    and then by |dL/db_r|, none within `distinct` of an earlier one; mid-grey images fill the rest. Both distances are
    root mean squares of [0, 1] pixels. An example is "exact" if three rows agree on it, and most of the rows around it:
    mixtures of a few examples may lie close to each other too, but evenly spread.

    `settings` of the result say, per target, how many examples are "exact" and how many are "padded" with grey.
    """

    agree: float = 1e-4
    distinct: float = 0.02

    @property
    def name(self) -> str:
        return "analytic"

    @property
    def work(self) -> int | None:
        return 0

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        if reason := Pixels().refuses(task):
            return reason
        try:
            input_layer(task)
        except TaskError as problem:
            return str(problem).removesuffix(".")
        return ""

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
        """Read every target, then replay the client on it: `match` is the cosine distance that other attacks report."""
        supported(self, task, knows)
        require(self, knows)
        labels, counts = Labels(label_rule(self.labels)), {"exact": list[int](), "padded": list[int]()}

        def read(scene: TargetView) -> Batch:
            images, exact = self.images(scene)
            counts["exact"].append(exact)
            counts["padded"].append(scene.num_examples - len(images))
            images = torch.cat([images, scene.task.blank(scene.num_examples)["x"][len(images) :]])
            read = {**labels(scene), **scene.fields}
            return {**read, "x": _by_label(read["y"], images, scene) if scene.task.class_index else images}

        attack = Composed(self.name, (Stage(Pixels(as_given), Replay(), Cosine(), (), Still()),), ReadBy(read))
        result = attack.run(task, seen, knows, seed, engine=engine, progress=progress)
        return replace(result, settings={**result.settings, "attack": repr(self), **counts})

    def images(self, scene: TargetView) -> tuple[Tensor, int]:
        """At most B examples, (examples, ...) in model-input space, and how many of them are exact."""
        layer, field, examples = input_layer(scene.task), scene.task.fields["x"], scene.num_examples
        observed = gradient(scene)  # free of weight decay, which would shift every row
        rows, deltas = (observed[f"{layer}{name}"].detach().cpu().double() for name in ("weight", "bias"))
        rows, deltas = rows[deltas != 0], deltas[deltas != 0, None]  # (rows, inputs), (rows, 1)
        if examples == 1 and len(deltas):
            images = (deltas * rows).sum(0, keepdim=True) / deltas.square().sum()
            exact = (rows - deltas * images).norm() < self.agree * rows.norm()
        else:
            values = (rows / deltas).unflatten(1, field.shape)
            (low, high), (least, most) = field.limits(values), field.extent(values)
            slack = self.agree * (most - least)
            inside = ((values > low - slack) & (values < high + slack)).flatten(1).all(1)
            pixels = ((values - least) / (most - least)).flatten(1)
            order = deltas[inside, 0].abs().argsort(descending=True)
            images, pixels = (rows / deltas)[inside][order], pixels[inside][order]
            distances = torch.cdist(pixels, pixels) / pixels.shape[1] ** 0.5
            close = distances < self.distinct
            agreeing, around = (distances < self.agree).sum(1), close.sum(1)
            order = agreeing.argsort(descending=True, stable=True)
            order = order[~close[order][:, order].tril(-1).any(1)][:examples]
            images, exact = images[order], ((agreeing > 2) & (2 * agreeing > around))[order].sum()
        low, high = scene.limits["x"]
        return images.unflatten(1, field.shape).to(low).clamp(low, high), int(exact)


def input_layer(task: Task) -> str:
    """The name, with its dot, of a trained linear layer with a bias whose input is the flattened example."""
    modules, weights = dict(task.model.named_modules()), task.weights()
    entries = math.prod(task.fields["x"].shape)
    linear = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and module.bias is not None and module.in_features == entries
    ]
    batch = task.blank(2)
    batch["x"] = batch["x"] + Draws(randomness.key("analytic")).uniform(tuple(batch["x"].shape)).to(batch["x"])
    for name, inputs in (task.inputs_of(linear, weights, batch) if linear else {}).items():
        prefix = f"{name}." if name else ""
        if {f"{prefix}weight", f"{prefix}bias"} <= weights.keys() and torch.equal(inputs, batch["x"].flatten(1)):
            return prefix
    first = next((module for module in modules.values() if any(True for _ in module.parameters(recurse=False))), None)
    raise TaskError(
        f"it needs a trained nn.Linear with a bias that sees the flattened input before any other layer; this "
        f"model begins with {first}. Use an attack that optimises, such as 'ig' or 'idlg'. If the model normalises its "
        "input itself, do that before the model and pass mean= and std= to Task.supervised."
    )


def _by_label(y: Tensor, images: Tensor, scene: TargetView) -> Tensor:
    """The images in the order of the labels: a step along the update lowers the logit of an image's label most."""
    if len(images) == 1:
        return images
    batch = {**scene.task.blank(len(images)), **scene.fields, "x": images}
    logits = lambda weights: scene.task.output(weights, batch, scene.buffers)  # noqa: E731
    slopes = jvp(logits, (scene.weights,), (scene.update,))[1]
    wanted = y if y.is_floating_point() else one_hot(y, slopes.shape[1], slopes.dtype)
    return images[assignment.match(wanted @ slopes.T)]  # (labels, images)
