"""A network as a chain of affine blocks and elementwise activations, and the way back through an activation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.scenario.task import Supervised, Task

AFFINE: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Flatten, nn.Unflatten, nn.Identity),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Dropout, nn.ZeroPad2d),
)
LIVELY = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Dropout)
RANGES: dict[type[nn.Module], tuple[float, float]] = {  # the possible outputs of an activation
    nn.ReLU: (0.0, math.inf),
    nn.Sigmoid: (0.0, 1.0),
    nn.Softplus: (0.0, math.inf),
    nn.Tanh: (-1.0, 1.0),
    nn.LeakyReLU: (-math.inf, math.inf),
    nn.ELU: (-math.inf, math.inf),
    nn.GELU: (-0.171, math.inf),
    nn.SiLU: (-0.279, math.inf),
}
FOLDED = (nn.GELU, nn.SiLU)  # these fall before they rise: two inputs for one output
FARTHEST = 64.0  # preactivations are searched for in +-FARTHEST
BISECTIONS = 80
OFF = 1e-6  # a ReLU is off below this share of the layer's largest value


@dataclass(frozen=True, eq=False)
class Block:
    """Affine layers, then an activation. Works on one example as a flat vector."""

    layers: tuple[tuple[str, nn.Module], ...]
    activation: nn.Module | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __call__(self, state: Params, a: Tensor) -> Tensor:
        value = a.reshape(1, *self.inputs)
        for name, layer in self.layers:
            value = functional_call(layer, _tensors_of(state, name), (value,))
        return value.flatten()

    def weights(self, weights: Params) -> Params:
        """The trained tensors of this block, by their names in the model."""
        names = [name for name, _ in self.layers]
        return {key: weights[key] for name in names for key in weights if key.rpartition(".")[0] == name}

    @property
    def size(self) -> int:
        return math.prod(self.inputs)


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks in the order of the forward pass, and the names of the classifier's parameters."""

    blocks: tuple[Block, ...]  # from the image up; the last one's activation feeds the classifier
    weight: str
    bias: str


def chain_of(task: Task) -> Chain | None:
    """The model as a chain of blocks that ends in a linear classifier with bias, or None if it is no such chain.

    One run shows it: every layer must receive the very tensor that the layer before returned.
    """
    if not isinstance(task.objective, Supervised) or task.fields.keys() != {"x", "y"} or not task.class_index:
        return None
    names = {module: name for name, module in task.model.named_modules()}
    calls: list[tuple[str, nn.Module, Tensor, Any]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.append((names[module], module, args[0], output))

    leaves = [module for module in names if not any(module.children())]
    handles = [module.register_forward_hook(note) for module in leaves]
    x = task.blank()["x"]
    try:
        with torch.no_grad():
            output = task.call(task.weights(), tree.detach(task.buffers()))(x)
    finally:
        for handle in handles:
            handle.remove()
    if not all(type(module) in (*AFFINE, *RANGES) for _, module, _, _ in calls):
        return None
    if not calls or any(_lively(module) for _, module, _, _ in calls):
        return None
    values = [x, *(after for _, _, _, after in calls)]
    if any(value is not call[2] for value, call in zip(values[:-1], calls, strict=True)) or output is not values[-1]:
        return None
    parametric = [name for name, module, _, _ in calls if any(True for _ in module.parameters())]
    name, last, _, _ = calls[-1]
    trained = task.weights()
    prefix = f"{name}." if name else ""
    weight, bias = f"{prefix}weight", f"{prefix}bias"
    if not isinstance(last, nn.Linear) or last.bias is None or {weight, bias} - trained.keys():
        return None
    if len(set(parametric)) < len(parametric) or output.dim() != 2:
        return None
    blocks: list[Block] = []
    layers: list[tuple[str, nn.Module]] = []
    shape = tuple(x.shape[1:])
    for name, module, _, after in calls[:-1]:
        if type(module) in RANGES:
            outputs = tuple(after.shape[1:])
            blocks.append(Block(tuple(layers), module, shape, outputs))
            layers, shape = [], outputs
        else:
            layers.append((name, module))
    if not all(isinstance(module, nn.Flatten | nn.Identity) for _, module in layers):
        blocks.append(Block(tuple(layers), None, shape, tuple(calls[-1][2].shape[1:])))  # pooled before the classifier
    return Chain(tuple(blocks), weight, bias) if blocks else None


def _lively(module: nn.Module) -> bool:
    """BatchNorm and dropout are affine in evaluation mode only, BatchNorm only with running statistics."""
    return isinstance(module, LIVELY) and (module.training or getattr(module, "running_mean", module) is None)


def _tensors_of(state: Params, name: str) -> Params:
    return {key.rpartition(".")[2]: value for key, value in state.items() if key.rpartition(".")[0] == name}


# --- back through an activation ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Above:
    """What is known of a block's output: the value, the trust in it, and the cotangent.

    `trust` is the slope of the activation: an error e of its output is an error e / slope of its input, and where a
    ReLU is off, or a sigmoid saturated, nothing is known.
    """

    z: Tensor
    trust: Tensor
    cotangent: Tensor


def through(activation: nn.Module | None, h: Tensor, cotangent: Tensor, falling: Tensor | None = None) -> Above:
    """Back through an activation whose output is h: its input, and the cotangent there.

    Where the activation folds, two inputs have this output; `falling` takes the lower one, before the minimum.
    """
    if activation is None:
        return Above(h, torch.ones_like(h), cotangent)
    if isinstance(activation, nn.ReLU):
        on = (h > OFF * h.max()).to(h.dtype)
        return Above(h, on, on * cotangent)
    falling = torch.zeros_like(h, dtype=torch.bool) if falling is None else falling
    minimum = torch.full_like(h, bottom(activation))
    low, high = torch.where(falling, -FARTHEST, minimum), torch.where(falling, minimum, FARTHEST)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        over = (activated(activation, middle) > h) ^ falling
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    z = (low + high) / 2
    pull = vjp(lambda z: activated(activation, z), z)[1]
    return Above(z, pull(torch.ones_like(z))[0].abs(), pull(cotangent)[0])


def activated(activation: nn.Module | None, z: Tensor) -> Tensor:
    """The activation of z, or z itself where a block has none."""
    return z if activation is None else activation(z.clone())  # it may work in place


def bottom(activation: nn.Module) -> float:
    """Where the activation begins to rise: its minimum (GELU, SiLU), or the lowest value that is searched."""
    one = torch.ones((), dtype=torch.float64)
    slope = lambda at: vjp(lambda z: activated(activation, z), at * one)[1](one)[0]  # noqa: E731
    low, high = -3.0, 0.0
    if float(slope(low)) >= 0:
        return -FARTHEST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(slope(middle)) < 0 else (low, middle)
    return high
