"""BatchNorm in training mode, example by example: the statistics of the batch and two sums part the examples.

Forward, with the mean and the biased variance of the client's batch as running statistics, evaluation mode computes
what training mode did. They are read off the buffers that came back after one step:

    returned = (1 - momentum) sent + momentum batch        (torch keeps the unbiased variance)

Backward, the gradient of the input of a norm is, for d that of its output and n values of each channel,

    gamma / sigma (d - dbeta / n - xhat dgamma / n)

where dbeta and dgamma are the norm's own gradients: sums over the batch, and a part of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.core.tree import Params
from gradleak.parts.row_space import module_calls
from gradleak.scenario.observation import Knowledge, Observation, Track
from gradleak.scenario.task import Task, TaskError

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def training_norms(model: nn.Module) -> tuple[str, ...]:
    """The BatchNorm layers that use the statistics of the batch."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, NORMS) and _by_batch(module))


def _by_batch(module: Any) -> bool:
    return module.training or module.running_mean is None


def unreadable(model: nn.Module) -> str:
    """Why the statistics of a batch cannot be read, whatever comes back; empty if they can."""
    for name in training_norms(model):
        module: Any = model.get_submodule(name)
        if module.running_mean is None or module.momentum is None:
            return f"BatchNorm {name!r} in training mode keeps no running statistics with a fixed momentum"
        if module.weight is None or not (module.weight.requires_grad and module.bias.requires_grad):
            return f"BatchNorm {name!r} in training mode has no trained scale and shift, whose gradients it reads"
    return ""


def in_evaluation(task: Task) -> Task:
    """A copy whose norms use their running statistics; the task itself if they do already."""
    names = training_norms(task.model)
    if names:
        task = task.copied()
        for name in names:
            task.model.get_submodule(name).eval()
    return task


def with_batch_statistics(task: Task, target: Track, knows: Knowledge) -> Track:
    """The target as if its norms had run in evaluation mode with the statistics of its batch."""
    names = training_norms(task.model)
    if not names:
        return target
    return Track(tuple(_with_batch_statistics(task, each, knows, names) for each in target.observations))


def _with_batch_statistics(task: Task, seen: Observation, knows: Knowledge, names: Sequence[str]) -> Observation:
    steps = 1 if knows.training is None else len(knows.training.order(seen.num_examples))
    sent, back = {**task.buffers(), **(seen.buffers or {})}, seen.returned_buffers or {}
    if steps != 1:
        raise TaskError(
            f"unsupported: BatchNorm in training mode mixes the examples of a step, and this client made {steps} "
            "steps, whose statistics cannot be told apart. Use 'gi' or 'ig'."
        )
    if missing := [name for name in names if f"{name}.running_mean" not in back]:
        raise TaskError(
            "unsupported: BatchNorm in training mode mixes the examples; their statistics are read off the client's "
            f"running statistics, and those of {missing[0]!r} did not come back. Record them "
            "(Observation.returned_buffers), or use 'gi' or 'ig'."
        )
    known = {**(seen.buffers or {})}
    counts = values_of_norms(in_evaluation(task), names, seen.num_examples)
    for name in names:
        momentum, count = getattr(task.model.get_submodule(name), "momentum"), counts[name]  # noqa: B009
        for kind in ("running_mean", "running_var"):
            new, old = back[f"{name}.{kind}"].double(), sent[f"{name}.{kind}"].to(back[f"{name}.{kind}"]).double()
            known[f"{name}.{kind}"] = (new - (1 - momentum) * old) / momentum
        known[f"{name}.running_var"] = known[f"{name}.running_var"].clamp_min(0) * ((count - 1) / count)
    return replace(seen, buffers=known, returned_buffers=None)


def values_of_norms(task: Task, names: Sequence[str], examples: int) -> dict[str, int]:
    """How many values of each channel a norm sees in a batch of so many examples."""
    with torch.no_grad():
        seen = task.inputs_of(list(names), task.weights(), task.blank(1))
    return {name: examples * seen[name][:, 0].numel() for name in names}


def normed_layers(task: Task, names: Sequence[str]) -> dict[str, str]:
    """The layers whose output goes into one of these norms, and which.

    Of their rows the gradient tells only differences.
    """
    calls = module_calls(task, task.blank(1))
    norms = {id(call.inputs[0]): call.name for call in calls if call.name in names}
    return {call.name: norms[id(call.output)] for call in calls if id(call.output) in norms}


def levelled(maps: Tensor, free: Tensor, layers: Sequence[tuple[Any, Tensor]]) -> Tensor | None:
    """Maps (examples, C, H, W), moved along directions (k, examples, H x W) of each channel to the means of layers.

    layers   convolutions, and the mean of each output over the batch. None: they have fewer outputs than unknowns
    """
    unknowns, directions = len(free) * maps.shape[1], free.unflatten(2, maps.shape[2:])
    if sum(len(means) for _, means in layers) < unknowns:
        return None
    columns, missing = [], []
    for module, means in layers:
        window = (module.kernel_size, module.dilation, module.padding, module.stride)
        taps = torch.stack([F.unfold(each[:, None], *window).mean((0, 2)) for each in directions])  # (k, taps)
        weight = module.weight.detach().to(maps).flatten(2)  # (outputs, C, taps)
        columns.append(torch.einsum("oct,kt->okc", weight, taps).flatten(1))
        bias = None if module.bias is None else module.bias.detach().to(maps)
        missing.append(means - F.conv2d(maps, module.weight.detach().to(maps), bias, module.stride, module.padding,
                                        module.dilation).mean((0, 2, 3)))  # fmt: skip
    steps = torch.linalg.lstsq(torch.cat(columns), torch.cat(missing)[:, None]).solution
    return maps + torch.einsum("kc,kbhw->bchw", steps.reshape(len(free), -1), directions)


@dataclass(frozen=True, eq=False)
class Norm:
    """What reaches every example from the whole batch, in the backward pass of a norm: dgamma / n and dbeta / n."""

    scale: Tensor
    shift: Tensor

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], inputs_known: bool) -> Tensor:
        """In place of `batch_norm(input, mean, variance, weight, bias, training, momentum, eps)`."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        x, mean, var, weight, bias = (given[name] for name in names[:5])
        deviation = (var + given.get("eps", 1e-5)).sqrt()
        scale = self.scale if inputs_known else torch.zeros_like(self.scale)
        output: Tensor = _Normed.apply(x, mean, deviation, weight, bias, scale, self.shift)
        return output


def norms_of(task: Task, weights: Params, update: Params, names: Sequence[str], examples: int) -> dict[int, Norm]:
    """The norms in training mode, by the identity of their weight."""
    counts = values_of_norms(task, names, examples) if names else {}
    return {
        id(weights[f"{name}.weight"]): Norm(
            update[f"{name}.weight"].double() / count, update[f"{name}.bias"].double() / count
        )
        for name, count in counts.items()
    }


class _Normed(torch.autograd.Function):
    """A norm with known statistics, and the derivative of training mode: affine in the gradient of the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor
    ) -> Tensor:
        along = (-1, *[1] * (x.dim() - 2))
        unit = (x - mean.view(along)) / deviation.view(along)
        ctx.save_for_backward(unit, (weight / deviation).view(along), scale.view(along), shift.view(along))
        return unit * weight.view(along) + bias.view(along)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unit, slope, scale, shift = ctx.saved_tensors
        return slope * (grads[0] - shift - unit * scale), *[None] * 6
