"""Passes of a network in which ReLUs are pinned: everything behind known maps, and its derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradleak.attacks.spans.norms import Norm, normed_layers, norms_of
from gradleak.core.tree import Params
from gradleak.scenario.task import Batch, Task

BATCH_NORM = {F.batch_norm, torch.batch_norm}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
RELU = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}


class _Enough(Exception):
    """The pass has come as far as it is needed."""


class PinnedReLUs(TorchFunctionMode):
    """ReLUs return given maps; a derivative passes where the map is positive. Numbered in the order of the calls.

    until   stop after this one
    norms   those in training mode, by the identity of their weight: their derivative is that of the whole batch
    gates   derivatives pass these everywhere (True) or nowhere (False)
    """

    def __init__(
        self,
        pins: Mapping[int, Tensor],
        until: int | None = None,
        norms: Mapping[int, Norm] = MappingProxyType({}),
        gates: Mapping[int, bool] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.pins, self.until, self.norms, self.gates = pins, until, norms, gates
        self.unknown: list[Tensor] = []  # what convolutions make of maps before the pinned ones
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BATCH_NORM and (norm := self.norms.get(id(args[3] if len(args) > 3 else kwargs["weight"]))):
            return norm(args, kwargs or {}, not any(args[0] is each for each in self.unknown))
        if func in CONVOLUTIONS and self.norms:
            output = func(*args, **(kwargs or {}))
            if any(args[0] is each for each in self.outputs[: min(self.pins, default=0)]):
                self.unknown.append(output)
            return output
        if func not in RELU:
            return func(*args, **(kwargs or {}))
        values: Tensor = args[0] if args else kwargs["input"]
        pinned = self.pins.get(len(self.outputs))
        if pinned is None:
            output = values.clamp_min(0)
        else:
            gate = self.gates.get(len(self.outputs))
            passed = values * ((pinned > 0) if gate is None else gate)
            output = pinned + (passed - passed.detach())
        self.inputs.append(values)
        self.outputs.append(output)
        if self.until is not None and len(self.outputs) > self.until:
            raise _Enough
        return output


@dataclass(eq=False)
class Pass:
    """One pass of the objective: what convolutions see and give, what ReLUs see and give, and the classifier."""

    relus: PinnedReLUs
    seen: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)

    def made_by(self, name: str) -> int | None:
        """The ReLU whose output this layer sees."""
        return next((n for n, output in enumerate(self.relus.outputs) if output is self.seen[name]), None)


@dataclass(frozen=True, eq=False)
class Network:
    """A model at the weights that the client received, in double precision, with passes in which ReLUs are pinned.

    classifier   empty: the task has none, or its gradient was not sent; then no deltas follow
    """

    task: Task
    weights: Params
    buffers: Params
    layers: tuple[str, ...]
    classifier: str
    norms: Mapping[int, Norm] = field(default_factory=dict)
    normed: Mapping[str, str] = field(default_factory=dict)  # layers with one behind: their deltas add up to zero

    @classmethod
    def of(cls, task: Task, weights: Params, buffers: Params | None, layers: Sequence[str]) -> Network:
        task = task.to(next(iter(weights.values())).device, torch.float64)
        as_sent = task.buffers() if buffers is None else buffers
        buffers = {name: value.double() if value.is_floating_point() else value for name, value in as_sent.items()}
        weights = {name: value.double() for name, value in weights.items()}
        return cls(task, weights, buffers, tuple(layers), task.classifier.module if task.class_index else "")

    def with_norms(self, update: Params, names: Sequence[str], examples: int) -> Network:
        """The same for a client whose norms of these names were in training mode, in a batch of so many examples."""
        norms = norms_of(self.task, self.weights, update, names, examples)
        return replace(self, norms=norms, normed=normed_layers(self.task, names))

    def run(
        self,
        batch: Batch,
        pins: Mapping[int, Tensor],
        until: int | None = None,
        gates: Mapping[int, bool] = MappingProxyType({}),
    ) -> Pass:
        done = Pass(PinnedReLUs(pins, until, self.norms, gates))

        def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_: nn.Module, args: Any, output: Any) -> None:
                done.seen[name], done.given[name] = args[0], output

            return hook

        handles = [
            self.task.model.get_submodule(name).register_forward_hook(note(name))
            for name in (*self.layers, self.classifier)
            if name
        ]
        try:
            with done.relus:
                self.task.loss(self.weights, batch, self.buffers)
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return done

    def deltas(self, done: Pass, names: Sequence[str], update: Params) -> list[Tensor]:
        """dL/d output of the named layers. That of the classifier follows from its gradient and its known inputs."""
        logits, features = done.given[self.classifier], done.seen[self.classifier].detach()
        observed = update[f"{self.classifier}.weight"].double()  # (classes, features) = delta^T features
        delta = observed @ torch.linalg.pinv(features)
        outputs = [done.given[name] for name in names]
        return list(torch.autograd.grad(logits, outputs, delta.T.reshape(logits.shape)))

    def weighted(self, name: str) -> nn.Conv2d:
        """A convolution with the weights that were sent."""
        module: Any = copy.copy(self.task.model.get_submodule(name))
        module._parameters = {
            each: None if value is None else nn.Parameter(self.weights.get(f"{name}.{each}", value), False)
            for each, value in module._parameters.items()
        }
        return module

    def mean_of(self, name: str) -> Tensor:
        """The mean over the batch of what a layer before a norm in training mode gives."""
        return self.buffers[f"{self.normed[name]}.running_mean"]

    def balanced(self, names: Sequence[str], deltas: Sequence[Tensor]) -> list[Tensor]:
        """Deltas that add up to zero where a norm in training mode follows."""
        means = [delta.mean((0, 2, 3), keepdim=True) for delta in deltas]
        each = zip(names, deltas, means, strict=True)
        return [delta - mean if name in self.normed else delta for name, delta, mean in each]


@torch.no_grad()
def is_cut(network: Network, layer: str, shape: Sequence[int]) -> bool:
    """Does all that the classifier sees follow from the map that this layer sees?"""
    batch = network.task.blank(2)
    noise = torch.linspace(-1, 1, batch["x"].numel(), dtype=torch.float64, device=batch["x"].device)
    batch = {**batch, "x": batch["x"] + noise.reshape(batch["x"].shape)}
    number = network.run(batch, {}).made_by(layer)
    if number is None:
        return False
    features = network.run(batch, {number: noise.new_ones(2, *shape)}).seen[network.classifier]
    return torch.equal(features[0], features[1])
