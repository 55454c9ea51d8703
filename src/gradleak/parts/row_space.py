"""Layers whose gradient gives the span of their inputs: few rows of input, many outputs.

A layer that sees rows a_p (the places of a convolution, the tokens of a linear layer) has dL/dW = sum_p delta_p a_p^T
and dL/db = sum_p delta_p. With no more rows than outputs and independent delta_p, the rows of dL/dW span the same space
as the a_p, whatever the delta_p are: for any loss, any labels, any noise of a denoiser. An attack then searches for an
image whose rows lie in that space, with passes through the network up to that layer only. The rows of several examples
lie in one span, and each example can be searched for by itself.

For tokens of language models: Petrov et al., "DAGER", NeurIPS 2024. The same for a denoiser's steps: `steps.ReadSteps`.
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
from torch.nn.modules.module import register_module_forward_hook

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
    """A layer whose gradient gives the span of its inputs.

    rows    number of input rows of all examples together
    bias    has it a bias with a known gradient?
    whole   the map that it sees counts as one row (`attacks.spans.maps`), not each patch
    centred rows less the mean of their example: all that the gradient tells before a BatchNorm in training mode
    start   a search begins with it, and goes on without it
    """

    name: str
    rows: int
    bias: bool
    whole: bool = False
    centred: bool = False
    start: bool = False

    def rows_of(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """(rows, width)"""
        if self.whole:
            return inputs.flatten(1)
        table = rows(module, inputs)
        if self.centred:
            by_example = table.unflatten(0, (len(inputs), -1))
            table = (by_example - by_example.mean(1, keepdim=True)).flatten(0, 1)
        return table


def spanning_layers(
    task: Task, examples: int, weights: Params | None = None, buffers: Params | None = None, alone: bool = True
) -> tuple[Layer, ...]:
    """The layers whose gradient gives the span of their inputs, in the order of the forward pass.

    These are trained convolutions (one group, zero padding) and linear layers with a weight of their own that run once,
    whose input depends on the image. They have at most as many rows as outputs: with more rows, the gradient spans only
    a part of the inputs' span. Their input has no fewer numbers than the image, and so do the equations: rows may move
    within the span, and only what lies outside of it is measured. (Both conditions are necessary, not sufficient:
    equations of overlapping patches depend on each other.)

    weights, buffers   those that were sent, where they are not the task's own
    alone              False: layers too that see less than the image: several may tell it together
    """
    entries = math.prod(task.fields["x"].shape)
    first, second = (_inputs(task, examples, number, weights, buffers) for number in (0, 1))
    uses = Counter(id(value) for _, value in task.model.named_parameters(remove_duplicate=False))

    layers = []
    for name, inputs in first.items():
        layer: Any = task.model.get_submodule(name)
        if len(inputs) > 1 or not plain(layer) or torch.equal(inputs[0], second[name][0]):
            continue
        if not layer.weight.requires_grad or uses[id(layer.weight)] > 1:
            continue
        if alone and inputs[0].numel() < examples * entries:
            continue
        bias = layer.bias is not None and layer.bias.requires_grad and uses[id(layer.bias)] == 1
        count, width = rows(layer, inputs[0]).shape
        equations = count // examples * (width - (count - bias))
        enough = equations >= entries if alone else count < width
        if count <= layer.weight.shape[0] and enough:
            layers.append(Layer(name, count, bias))
    return tuple(layers)


def as_sent(layer: Layer, updates: Sequence[Params]) -> Layer | None:
    """The layer as these updates show it: without its bias where that was not sent; None: they do not give its span.

    Where a norm of each channel follows, the delta_p add up to zero: dL/db is rounding, and the rows of dL/dW span only
    differences of inputs.
    """
    weights = [update[f"{layer.name}.weight"] for update in updates]
    if not all(bool(weight.any()) for weight in weights):
        return None
    if layer.bias and all(bool(update[f"{layer.name}.bias"].any()) for update in updates):
        pairs = zip(weights, (update[f"{layer.name}.bias"] for update in updates), strict=True)
        return layer if all(float(bias.norm()) > ROUNDING * float(weight.norm()) for weight, bias in pairs) else None
    spectra = [torch.linalg.svdvals(weight.flatten(1).double()) for weight in weights]
    full = all(float(values[layer.rows - 1]) > ROUNDING * float(values[0]) for values in spectra)
    return replace(layer, bias=False) if full else None


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its positional inputs, its output, and the version of the output at that time."""

    name: str
    inputs: tuple[Any, ...]
    output: Any
    version: int  # an in-place function raises the version of a tensor


def module_calls(
    task: Task, batch: Batch, weights: Params | None = None, buffers: Params | None = None
) -> tuple[Call, ...]:
    """The calls of all modules in one pass of the objective without derivatives, in the order in which they end."""
    names = {module: name for name, module in task.model.named_modules()}
    calls: list[Call] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if module in names and args:
            calls.append(Call(names[module], args, output, output._version if isinstance(output, Tensor) else 0))

    handle = register_module_forward_hook(note)
    try:
        with torch.no_grad():
            task.loss(weights or task.weights(), batch, buffers)
    finally:
        handle.remove()
    return tuple(calls)


def _inputs(
    task: Task, examples: int, number: int, weights: Params | None, buffers: Params | None
) -> dict[str, list[Tensor]]:
    """The inputs of every convolution and linear layer in one pass over images of noise, in the order of the calls."""
    batch = task.blank(examples)
    noise = Draws(randomness.key("spans", number).to(batch["x"].device)).normal(tuple(batch["x"].shape))
    caught: dict[str, list[Tensor]] = {}
    for call in module_calls(task, {**batch, "x": batch["x"] + noise.to(batch["x"].dtype)}, weights, buffers):
        if isinstance(task.model.get_submodule(call.name), nn.Conv2d | nn.Linear):
            caught.setdefault(call.name, []).append(call.inputs[0])
    return caught


def own_weight(layer: nn.Module) -> bool:
    """Is it a linear layer or a convolution whose weight is a parameter of its own, used as torch does?"""
    forwards = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward, nn.Linear.forward)
    return type(layer).forward in forwards and "weight" in layer._parameters  # else it has another gradient


def plain(layer: nn.Module) -> bool:
    """Is it a linear layer, or a convolution whose rows are the patches of `unfold`, with a weight of its own?"""
    if not own_weight(layer) or isinstance(layer, nn.Conv3d):
        return False
    if not isinstance(layer, nn.Conv1d | nn.Conv2d):
        return True
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def rows(layer: nn.Module, inputs: Tensor) -> Tensor:
    """The inputs of a layer as rows, (rows, inputs): patches of a convolution, tokens of a linear layer."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        assert not isinstance(layer.padding, str)
        kernel, dilation, stride, padding = layer.kernel_size, layer.dilation, layer.stride, layer.padding
        if isinstance(layer, nn.Conv1d):  # an image of height one
            inputs, padding = inputs[:, :, None], (0, *padding)
            kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
        patches = F.unfold(inputs, kernel, dilation, padding, stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return inputs.flatten(0, -2)


@dataclass(frozen=True)
class Spans(Prediction):
    """The input rows of some layers, to be compared with the spans that the observed gradients give (`Outside`).

    For a layer with a bias the flat (affine space) through the a_p is known, not only their span: combinations of rows
    of dL/dW for which dL/db vanishes span the differences of the a_p, and dL/dW^T dL/db / |dL/db|^2 is a point of it.
    """

    layers: tuple[Layer, ...]

    def target(self, scene: TargetView) -> Params:
        """For each layer (1 + rows, inputs): a point, and orthonormal directions from it, orthogonal to it.

        Without a bias the point is zero. With one there is one direction fewer, and the last row is zero.
        """
        update = assumed_in(scene).visible(gradient(scene), scene)
        return {layer.name: _flat(layer, update) for layer in self.layers}

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        names, model = [layer.name for layer in self.layers], scene.task.model
        caught = scene.task.inputs_of(names, scene.weights, batch, scene.buffers, whole=False)
        return {layer.name: layer.rows_of(model.get_submodule(layer.name), caught[layer.name]) for layer in self.layers}


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
    """sum over layers of the share of the rows' energy outside of the flat that the layer's gradient gives."""

    scale_free: ClassVar[bool] = True

    def residual(self, predicted: Params, observed: Params) -> Params:
        def outside(rows: Tensor, flat: Tensor) -> Tensor:
            point, directions = flat[:1], flat[1:]
            distances = rows - (rows @ directions.T) @ directions - point
            return distances / torch.linalg.vector_norm(rows)

        return {name: outside(rows, observed[name]) for name, rows in predicted.items()}
