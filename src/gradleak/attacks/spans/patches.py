"""Where a vision transformer cuts its patches, adds positions and first reads the tokens: found by running it.

No name is asked for. An image of numbers shows which pixel each entry of a patch is; two images of noise show which
token each patch becomes; one backward pass from the tokens shows which weights are added to them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradleak.core import random as randomness
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.parts.row_space import plain, rows
from gradleak.scenario.task import Batch, Task, TaskError

AGREE = 1e-3  # relative distance of rows that are the same up to rounding


@dataclass(frozen=True, eq=False)
class Positions:
    """A weight that is added to the tokens: one row for each, along the other axes than `axis`."""

    name: str
    axis: int
    rows: Tensor  # (patches,), the row of each patch

    def of(self, update: Params) -> Tensor:
        """The rows of the patches in this tree, (patches, width)."""
        return _as_rows(update[self.name], self.axis)[self.rows]


@dataclass(frozen=True, eq=False)
class PatchEmbedding:
    """tokens_p = W patch_p + constant_p, with W the weight of `layer`.

    places      (patches, inputs), where each entry of each patch is in the flattened image
    first       the layer that reads the tokens first
    rows        (patches,), which token each patch is
    tokens      how many there are, with those that are no patches
    width       the numbers of a token
    positions   learned positions that are trained; None: there are none
    norm        `first`, if it is a LayerNorm; else ""
    readers     linear layers that read its output
    """

    layer: str
    places: Tensor
    first: str
    rows: Tensor
    tokens: int
    width: int
    positions: Positions | None
    norm: str
    readers: tuple[str, ...]

    def constants(self, task: Task, weights: Params, buffers: Params | None = None) -> Tensor:
        """Biases and positions, (patches, width): what these weights add to the patches."""
        task, batch = without_dropout(task), task.blank(1)
        weight = {**(buffers or {}), **weights}[f"{self.layer}.weight"].flatten(1)
        with torch.no_grad():
            tokens = task.inputs_of([self.first], weights, batch, buffers, whole=False)[self.first][0]
        return tokens[self.rows] - batch["x"].flatten()[self.places] @ weight.T


@dataclass(frozen=True, eq=False)
class PatchEquations:
    """dL/dW = sum_p delta_p patch_p^T, with delta_p = dL/dposition_p: linear equations in the patches of one image.

    deltas   (outputs, patches)
    sums     (outputs, inputs), dL/dW
    """

    deltas: Tensor
    sums: Tensor

    @staticmethod
    def of(update: Params, embedding: PatchEmbedding) -> PatchEquations:
        assert embedding.positions is not None
        return PatchEquations(embedding.positions.of(update).T, update[f"{embedding.layer}.weight"].flatten(1))

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The deltas by their singular values: (outputs, outputs), (k,), (patches, patches)."""
        left, values, right = torch.linalg.svd(self.deltas)
        return left, values, right

    def rank(self, cut: float) -> int:
        """Singular values above this share of the largest, at least one."""
        values = self.factors[1]
        return max(1, int((values > cut * values[0]).sum()))

    def patches(self, rank: int) -> Tensor:
        """The patches, (patches, inputs), by least squares, from so many singular values."""
        left, values, right = self.factors
        return right[:rank].T @ (left[:, :rank].T @ self.sums / values[:rank, None])


class _Enough(BaseException):  # noqa: N818  (not an error; a BaseException, so that no model catches it)
    """Ends a forward pass early."""


@dataclass
class _Walk:
    """What a pass over an image of numbers meets: the layer that cuts patches, the first reader, and what follows."""

    names: dict[nn.Module, str]
    entries: int
    layer: str = ""
    places: Tensor | None = None
    first: str = ""
    norm: str = ""
    readers: list[str] = field(default_factory=list)
    normed: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        value = args[0] if args else None
        if module not in self.names or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        if self.places is None:
            self._cuts(module, value)
        elif not self.first:
            self._reads(module, value)
        elif isinstance(module, nn.Linear):
            if self.normed is None or value.shape != self.normed.shape or not torch.equal(value, self.normed):
                raise _Enough
            self.readers.append(self.names[module])

    def _cuts(self, module: nn.Module, value: Tensor) -> None:
        if not isinstance(module, nn.Conv2d | nn.Linear) or not plain(module) or value.dim() < 3:
            return
        numbers = rows(module, value).round().long() - 1
        seen = numbers.unique()
        if len(seen) == numbers.numel() and int(seen[0]) >= 0 and int(seen[-1]) < self.entries:
            self.layer, self.places = self.names[module], numbers

    def _reads(self, module: nn.Module, value: Tensor) -> None:
        assert self.places is not None
        layer = next(module for module, name in self.names.items() if name == self.layer)
        weighted = any(True for _ in module.parameters(recurse=False))
        if not weighted or value.dim() != 3 or value.shape[-1] != _width(layer) or value.shape[1] < len(self.places):
            return
        self.first = self.names[module]
        if isinstance(module, nn.LayerNorm):
            self.norm = self.first
            self.normed = F.layer_norm(value, module.normalized_shape, module.weight, module.bias, module.eps)


def patch_embedding(task: Task) -> PatchEmbedding:
    """The patch embedding of this model; a TaskError says why there is none that can be read."""
    task = without_dropout(task)
    walk = _walked(task)
    if walk.places is None:
        raise TaskError(
            "it needs a trained convolution or linear layer that sees each pixel of the image in one patch, before any "
            "other layer (kernel = stride, no padding). Use 'ig' or 'spectral'. If the model normalises its input "
            "itself, do that before the model and pass mean= and std= to Task.supervised"
        )
    if not walk.first:
        raise TaskError(f"no layer reads the outputs of {walk.layer} as tokens (examples, patches, width)")
    weights = task.weights()
    if f"{walk.layer}.weight" not in weights:
        raise TaskError(f"the patch embedding {walk.layer} is not trained: its gradient is not sent")
    weight = weights[f"{walk.layer}.weight"].flatten(1)
    images = [_noise(task, number) for number in (0, 1)]
    patches = [image["x"].flatten()[walk.places] @ weight.T for image in images]
    tokens = [task.inputs_of([walk.first], weights, image, whole=False)[walk.first][0].detach() for image in images]
    places = _same_rows(tokens[0] - tokens[1], patches[0] - patches[1])
    if places is None:
        raise TaskError(
            f"what {walk.first} reads is not W patch + position: something stands between the patch embedding "
            f"{walk.layer} and the tokens, or positions come in later (as in Swin). Use 'ig' or 'spectral'"
        )
    return PatchEmbedding(
        walk.layer,
        walk.places,
        walk.first,
        rows=places,
        tokens=len(tokens[0]),
        width=len(weight),
        positions=_positions(task, walk.first, places, images[0]),
        norm=walk.norm,
        readers=tuple(walk.readers),
    )


def _walked(task: Task) -> _Walk:
    batch = task.blank(1)
    entries = batch["x"].numel()
    walk = _Walk({module: name for name, module in task.model.named_modules()}, entries)
    if batch["x"].dim() != 4 or entries > 2**24:
        return walk
    batch["x"] = torch.arange(1, entries + 1, device=batch["x"].device).to(batch["x"]).view_as(batch["x"])
    handle = register_module_forward_pre_hook(walk)
    try:
        with suppress(_Enough), torch.no_grad():
            task.loss(task.weights(), batch)
    finally:
        handle.remove()
    return walk


def _positions(task: Task, reader: str, places: Tensor, batch: Batch) -> Positions | None:
    """The weight whose gradient is, row by row, that of the tokens, for any loss of the tokens."""
    weights = {name: value.requires_grad_() for name, value in task.weights().items()}
    with torch.enable_grad():
        tokens = task.inputs_of([reader], weights, batch, whole=False)[reader]
        slopes = Draws(randomness.key("patches", 2).to(tokens.device)).normal(tuple(tokens.shape)).to(tokens)
        gradients = torch.autograd.grad((tokens * slopes).sum(), list(weights.values()), allow_unused=True)
    for name, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
        for axis, size in enumerate(gradient.shape):
            if size == slopes.shape[-1] and gradient.numel() >= size * len(places):
                found = _same_rows(_as_rows(gradient, axis), slopes[0, places])
                if found is not None:
                    return Positions(name, axis, found)
    return None


def _same_rows(among: Tensor, wanted: Tensor) -> Tensor | None:
    """For each wanted row the number of the same row among others; None if one is missing."""
    among, wanted = among.detach().double(), wanted.detach().double()
    gaps, found = torch.cdist(wanted, among, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    return found if bool((gaps <= AGREE * wanted.norm(dim=1)).all()) and len(found.unique()) == len(found) else None


def _as_rows(value: Tensor, axis: int) -> Tensor:
    return value.movedim(axis, -1).flatten(0, -2)


def _width(layer: nn.Module) -> int:
    weight: Any = layer.weight
    return int(weight.shape[0])


def _noise(task: Task, number: int) -> Batch:
    batch = task.blank(1)
    noise = Draws(randomness.key("patches", number).to(batch["x"].device)).normal(tuple(batch["x"].shape))
    return {**batch, "x": batch["x"] + noise.to(batch["x"])}


def without_dropout(task: Task) -> Task:
    """The task itself, or a copy that drops nothing: masks hide which token is which patch."""
    if not any(module.training and "Drop" in type(module).__name__ for module in task.model.modules()):
        return task
    copied = task.copied()
    copied.model.eval()
    return copied
