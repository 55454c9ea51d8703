"""The layer that SPEAR reads: linear, it sees the input itself, and its output goes into a ReLU and nowhere else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradleak.attacks.analytic import input_layer
from gradleak.parts.view import TargetView
from gradleak.scenario.task import Task, TaskError

RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}


class _Uses(TorchFunctionMode):
    """Notes every function that makes a tensor of the output of one module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self.outputs: list[Tensor] = []
        self.handle = module.register_forward_hook(lambda _, args, output: self.outputs.append(output))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = any(value is output for value in (*args, *kwargs.values()) for output in self.outputs)
        result = func(*args, **kwargs)
        if used and isinstance(result, Tensor):
            self.functions.append(func)
            self.outputs = [output for output in self.outputs if output is not result]  # it was written in place
        return result


def relu_layer(task: Task) -> str:
    """The name, with its dot, of the linear layer that sees the input, if its output goes straight into a ReLU."""
    prefix = input_layer(task)
    uses = _Uses(task.model.get_submodule(prefix.removesuffix(".")))
    try:
        with torch.no_grad(), uses:
            task.loss(task.weights(), task.blank(2))
    finally:
        uses.handle.remove()
    if uses.functions and all(function in RELUS for function in uses.functions):
        return prefix
    names = ", ".join(sorted({function.__name__ for function in uses.functions})) or "nothing"
    raise TaskError(
        "it needs a first linear layer whose output goes straight into a ReLU, which makes exact zeros; here it "
        f"goes into {names}. Use 'second-order' or, for one example, 'analytic'."
    )


def by_class(scene: TargetView, prefix: str, examples: Tensor) -> Tensor:
    """dL/dZ of every example with each class as its label, in a batch of that label alone: (classes, examples, m)."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # the ReLU may work in place

    slopes = []
    handle = scene.task.model.get_submodule(prefix.removesuffix(".")).register_forward_hook(cut)
    try:
        for label in range(scene.task.fields["y"].classes or 0):
            y = torch.full((len(examples),), label, device=examples.device)
            with torch.enable_grad():
                loss, _ = scene.task.loss(scene.weights, {**scene.fields, "x": examples, "y": y}, scene.buffers)
                slopes.append(torch.autograd.grad(loss, leaves[-1])[0])
    finally:
        handle.remove()
    return torch.stack(slopes)
