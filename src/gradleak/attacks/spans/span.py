"""Where a layer's gradient tells which inputs it had: few rows of input, many outputs.

A layer that sees rows a_p (the places of a convolution, the tokens of a linear layer) has dL/dW = sum_p delta_p a_p^T
and dL/db = sum_p delta_p. With no more rows than outputs and independent delta_p, the rows of dL/dW span what the a_p
span, whatever the delta_p are: whatever the loss, the labels, or the noise of a denoiser. An image is then sought whose
own rows lie there, by passes through the part of the network before that layer alone. The rows of several examples lie
in one span, and each of them can be sought there by itself.

For tokens of language models: Petrov et al., "DAGER", NeurIPS 2024. The same of a denoiser's steps: `steps.ReadSteps`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradleak.core import random as randomness
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.parts.predictions import assumed_in, gradient
from gradleak.parts.protocols import Match, Prediction
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.task import Batch, Task

ROUNDING = 1e-6  # a share of a gradient below this is the rounding of float32


@dataclass(frozen=True)
class Layer:
    """A layer whose gradient tells the span of its inputs.

    rows   of the inputs of all examples together
    bias   does it have one whose gradient is known?
    """

    name: str
    rows: int
    bias: bool


def telling(
    task: Task, examples: int, weights: Params | None = None, buffers: Params | None = None
) -> tuple[Layer, ...]:
    """The layers whose gradient tells the span of their inputs, in the order of the forward pass.

    Convolutions (one group, padded with zeros) and linear layers, trained, with a weight of their own, run once, whose
    input moves with the image, with at most as many rows as outputs: else the span is only a part of that of the
    inputs. With an input of no fewer numbers than the image has, and as many equations: rows may move in a flat, and
    only what is outside of that is told. (Both are necessary; patches that overlap make equations depend on others.)

    weights, buffers   those that were sent, where they are not the task's own
    """
    entries = math.prod(task.fields["x"].shape)
    first, second = (_inputs(task, examples, number, weights, buffers) for number in (0, 1))
    holders = Counter(id(held) for _, held in task.model.named_parameters(remove_duplicate=False))

    found = []
    for name, own in first.items():
        layer: Any = task.model.get_submodule(name)
        if len(own) > 1 or not _plain(layer) or torch.equal(own[0], second[name][0]):
            continue
        if not layer.weight.requires_grad or holders[id(layer.weight)] > 1 or own[0].numel() < examples * entries:
            continue
        bias = layer.bias is not None and layer.bias.requires_grad and holders[id(layer.bias)] == 1
        count, inputs = rows(layer, own[0]).shape
        equations = count // examples * (inputs - (count - bias))
        if count <= layer.weight.shape[0] and equations >= entries:
            found.append(Layer(name, count, bias))
    return tuple(found)


def shown(layer: Layer, updates: Sequence[Params]) -> Layer | None:
    """The layer as it is told by these updates: without its bias where that was not sent; None: it is not told.

    Where a norm of each channel follows, the delta_p add up to zero: dL/db is rounding, and the rows of dL/dW span no
    more than differences of inputs.
    """
    weights = [update[f"{layer.name}.weight"] for update in updates]
    if not all(bool(weight.any()) for weight in weights):
        return None
    if layer.bias and all(bool(update[f"{layer.name}.bias"].any()) for update in updates):
        pairs = zip(weights, (update[f"{layer.name}.bias"] for update in updates), strict=True)
        return layer if all(float(bias.norm()) > ROUNDING * float(weight.norm()) for weight, bias in pairs) else None
    spread = [torch.linalg.svdvals(weight.flatten(1).double()) for weight in weights]
    full = all(float(values[layer.rows - 1]) > ROUNDING * float(values[0]) for values in spread)
    return replace(layer, bias=False) if full else None


def _inputs(
    task: Task, examples: int, number: int, weights: Params | None, buffers: Params | None
) -> dict[str, list[Tensor]]:
    """What every convolution and linear layer is given in one pass over images of noise, in the order of the calls."""
    names = {module: name for name, module in task.model.named_modules()}
    caught: dict[str, list[Tensor]] = {}

    def note(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear) and module in names and args:
            caught.setdefault(names[module], []).append(args[0])

    batch = task.blank(examples)
    moved = Draws(randomness.key("spans", number).to(batch["x"].device)).normal(tuple(batch["x"].shape))
    handle = register_module_forward_pre_hook(note)
    try:
        with torch.no_grad():
            task.loss(weights or task.weights(), {**batch, "x": batch["x"] + moved.to(batch["x"].dtype)}, buffers)
    finally:
        handle.remove()
    return caught


def _plain(layer: nn.Module) -> bool:
    """Is it a linear layer, or a convolution whose rows are patches as `unfold` cuts them, with a weight of its own?"""
    if type(layer).forward not in (nn.Conv2d.forward, nn.Linear.forward) or "weight" not in layer._parameters:
        return False  # a weight that is made of others, or used in another way, has another gradient
    if not isinstance(layer, nn.Conv2d):
        return True
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def rows(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What the outputs of a layer are made from, (rows, inputs): patches of a convolution, tokens of a linear layer."""
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return inputs.flatten(0, -2)


@dataclass(frozen=True)
class Spans(Prediction):
    """The rows that layers see, to be compared with where their observed gradients say that these lie (`Outside`).

    Of a layer with a bias not only the span is known but the flat through the a_p: rows of dL/dW in combinations for
    which dL/db vanishes span the differences of the a_p, and dL/dW^T dL/db / |dL/db|^2 is a point of the flat.
    """

    layers: tuple[Layer, ...]

    def target(self, scene: TargetView) -> Params:
        """For each layer (1 + rows, inputs): a point, and orthonormal directions from it, at right angles to it.

        Without a bias the point is zero; with one there is one direction fewer, and the last is zero.
        """
        update = assumed_in(scene).visible(gradient(scene), scene)
        return {layer.name: _flat(layer, update) for layer in self.layers}

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        names = [layer.name for layer in self.layers]
        caught = scene.task.inputs_of(names, scene.weights, batch, scene.buffers, whole=False)
        return {name: rows(scene.task.model.get_submodule(name), inputs) for name, inputs in caught.items()}


def _flat(layer: Layer, update: Params) -> Tensor:
    weight = update[f"{layer.name}.weight"]
    by_input = weight.flatten(1).double()  # (outputs, inputs); in float32 the smallest directions would be lost
    if not layer.bias:
        directions = torch.linalg.svd(by_input, full_matrices=False)[2][: layer.rows]
        return torch.cat([torch.zeros_like(directions[:1]), directions]).to(weight.dtype)
    bias = update[f"{layer.name}.bias"].double()
    to_bias = bias / torch.linalg.vector_norm(bias).square()
    point = to_bias @ by_input
    differences = by_input - torch.outer(bias, point)
    directions = torch.linalg.svd(differences, full_matrices=False)[2][: layer.rows - 1]
    point = point - (point @ directions.T) @ directions
    return torch.cat([point[None], directions, torch.zeros_like(point)[None]]).to(weight.dtype)


@dataclass(frozen=True)
class Outside(Match):
    """sum over layers of the share of the rows' energy that lies outside of where their gradient says they are."""

    scale_free: ClassVar[bool] = True

    def residual(self, predicted: Params, observed: Params) -> Params:
        def outside(seen: Tensor, flat: Tensor) -> Tensor:
            point, directions = flat[:1], flat[1:]
            beside = seen - (seen @ directions.T) @ directions - point
            return beside / torch.linalg.vector_norm(seen)

        return {name: outside(seen, observed[name]) for name, seen in predicted.items()}
