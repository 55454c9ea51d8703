"""Soteria: the features that reveal most of the image are cut out of one layer's update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vjp, vmap

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Batch, Task, TaskError

CHUNK = 64  # features whose derivatives are in memory at once, each as large as the batch


@named(
    "soteria",
    kind="defence",
    paper="Sun et al., Soteria: Provable Defense against Privacy Leakage in Federated Learning from Representation "
    "Perspective, CVPR 2021",
)
@dataclass(frozen=True)
class Soteria(Defence):
    """Set to zero the columns of the classifier's weight update that belong to the features with the lowest scores.

    score_i = sum over the examples of ||d r_i / d x||_2 / (|r_i| + offset), r the classifier's input; the `rate` per
    cent of lowest score are cut. These approximate the features of largest ||r_i (d r_i / d x)^-1||, without which a
    reconstruction from the representation is worst. The bias and all other layers are released unchanged.

    rate      1 in the authors' DLG demonstration, 60 in their IG one, up to 80 in the literature
    offset    0.1 in their IG demonstration, 0 in the DLG one, 1e-10 in GGL

    It cuts the upload once, by the features of all the client's examples at the weights that were sent. For one local
    step that is the published method; for more, which it was not made for, the update is cut like a gradient.

    The zero columns show the mask. A1 drops them, A2 replays the cut: on convolutional networks the other layers are
    all that an attack needs (Balunovic et al., Bayesian Framework for Gradient Leakage, ICLR 2022).

    Differs: the released code divides by the signed r_i and compares magnitudes; here |r_i| is in the denominator.
    """

    rate: float = 60.0
    offset: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 100:
            raise ValueError(f"rate is a percentage of the features, at least 0 and below 100; given {self.rate}.")
        if not self.offset >= 0:
            raise ValueError(f"offset must be 0 or more; given {self.offset}.")

    def upload(self, upload: Upload, client: Client) -> Upload:
        score = self.scores(client.task, client.start, client.batch, upload.buffers)
        cut = math.ceil(self.rate / 100 * (len(score) - 1) - 1e-9)  # so many lie below the percentile
        return _cut(upload, client.task, score >= score.kthvalue(cut + 1).values)

    def scores(self, task: Task, weights: Params, batch: Batch, buffers: Params | None = None) -> Tensor:
        """The score of each feature, in vectorised backward passes."""
        layer = task.classifier.module
        private = {name: batch[name] for name, field in task.fields.items() if field.classes is None}

        def represent(inputs: Batch) -> Tensor:
            return task.inputs_of([layer], weights, {**batch, **inputs}, buffers)[layer]

        features, backward = vjp(represent, private)[:2]
        if features.dim() != 2:
            raise TaskError(
                f"Soteria needs a classifier that receives (examples, features); {layer!r} receives "
                f"{tuple(features.shape)}."
            )

        def slopes(direction: Tensor) -> Tensor:
            """||d r_i / d x|| of every example; examples do not mix, so one pass serves the batch."""
            [by_input] = backward(direction.expand_as(features))
            return tree.safe_sqrt(torch.stack([s.flatten(1).square().sum(1) for s in tree.leaves(by_input)]).sum(0))

        units = torch.eye(features.shape[1], dtype=features.dtype, device=features.device)
        slope = vmap(slopes, chunk_size=CHUNK)(units)  # (features, examples)
        return (slope.T / (features.abs() + self.offset)).nan_to_num(0.0, posinf=torch.inf).sum(0)

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return _Frozen(_columns(scene))

    def replayed(self, scene: TargetView, task: Task) -> Defence:
        return self

    def noise_variance(self, scene: TargetView) -> Params:
        variance, name = tree.zeros_like(scene.update), scene.task.classifier.weight
        dropped = torch.where(_columns(scene), 0.0, torch.inf).to(variance[name])
        return {**variance, name: dropped.expand_as(variance[name])}

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(reason="columns of one layer are cut, everything else is released exactly")


@dataclass(frozen=True, eq=False)
class _Frozen(Defence):
    """The cut of an observation: the columns that were sent, (features,)."""

    sent: Tensor

    def upload(self, upload: Upload, client: Client) -> Upload:
        return _cut(upload, client.task, self.sent)


def _columns(scene: TargetView) -> Tensor:
    """Which columns of the classifier's weight update were not cut, (features,)."""
    return (scene.update[scene.task.classifier.weight] != 0).any(0)


def _cut(upload: Upload, task: Task, sent: Tensor) -> Upload:
    update, name = upload.payload["update"], task.classifier.weight
    cut = {**update, name: torch.where(sent, update[name], 0.0)}
    return replace(upload, payload={**upload.payload, "update": cut})
