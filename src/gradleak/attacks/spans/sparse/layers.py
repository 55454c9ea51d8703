"""The layer that is read: linear, it sees one row for each example, and its output goes into a ReLU only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradleak.core import random as randomness
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.parts.protocols import Prediction
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.task import Batch, Task, TaskError

RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
FEATURES = "features"  # the field of a scene that holds what the layer saw


@dataclass(frozen=True)
class Place:
    """A linear layer by its name, and whether it sees the flattened example itself or features of it."""

    name: str
    first: bool

    def parameter(self, part: str) -> str:
        """The name of its weight or bias."""
        return f"{self.name}.{part}" if self.name else part


class _Uses(TorchFunctionMode):
    """Notes every function that makes a tensor of the output of one module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.runs = 0
        self.functions: list[Any] = []
        self.outputs: list[Tensor] = []
        self.handle = module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.runs += 1
        self.outputs.append(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = any(value is output for value in (*args, *kwargs.values()) for output in self.outputs)
        result = func(*args, **kwargs)
        if used and isinstance(result, Tensor):
            self.functions.append(func)
            self.outputs = [output for output in self.outputs if output is not result]  # it was written in place
        return result


def row_layers(task: Task) -> list[Place]:
    """Trained linear layers with a bias that see one row for each example, a function of it alone; the first first."""
    model, weights = task.model, task.weights()
    linear = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each.bias is not None]
    sent = [name for name in linear if {Place(name, True).parameter(part) for part in ("weight", "bias")} <= {*weights}]
    blank, draws = task.blank(2), Draws(randomness.key("analytic"))
    noise = draws.uniform((3, *blank["x"].shape[1:])).to(blank["x"])
    batches = [{**blank, "x": blank["x"] + noise[[0, other]]} for other in (1, 2)]  # the same first example
    with torch.no_grad():
        one, two = (task.inputs_of(sent, weights, batch) if sent else {} for batch in batches)
    flat = batches[0]["x"].flatten(1)
    places = []
    for name, rows in one.items():
        alone = rows.dim() == 2 and len(rows) == 2 and torch.equal(rows[0], two[name][0])
        if alone and not torch.equal(rows[1], two[name][1]):
            places.append(Place(name, torch.equal(rows, flat)))
    return places


def sparse_layer(task: Task, relu: bool = True) -> Place:
    """The first of the `row_layers` whose output goes straight into a ReLU; with `relu` false, the first of all."""
    places = row_layers(task)
    if not places:
        kinds = [module for module in task.model.modules() if any(True for _ in module.parameters(recurse=False))]
        raise TaskError(
            "it needs a trained nn.Linear with a bias that sees one row for each example and nothing of the others; "
            f"this model begins with {kinds[0] if kinds else 'no layer'}. Use 'ig' or 'second-order'."
        )
    if not relu:
        return places[0]
    follow = [_followers(task, place) for place in places]
    for place, functions in zip(places, follow, strict=True):
        if functions and all(function in RELUS for function in functions):
            return place
    names = ", ".join(sorted({function.__name__ for function in follow[0]})) or "nothing"
    raise TaskError(
        "it needs a linear layer with a bias whose output goes straight into a ReLU, which makes exact zeros; here "
        f"it goes into {names}. Use 'second-order' or, for clients of one example, 'sparse-span:relu=false'."
    )


def _followers(task: Task, place: Place) -> list[Any]:
    """The functions that take the layer's output; none if it runs more than once."""
    uses = _Uses(task.model.get_submodule(place.name))
    try:
        with torch.no_grad(), uses:
            task.loss(task.weights(), task.blank(2))
    finally:
        uses.handle.remove()
    return uses.functions if uses.runs == 1 else []


@dataclass(frozen=True)
class LayerInput(Prediction):
    """What a layer sees of the guess, to be compared with what its gradient says that it saw: the field `FEATURES`."""

    name: str

    def target(self, scene: TargetView) -> Params:
        return {FEATURES: scene.fields[FEATURES]}

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        return {FEATURES: seen_by(self.name, scene, batch)}


def seen_by(name: str, scene: TargetView, batch: Batch) -> Tensor:
    """The input of a layer, (examples, inputs)."""
    inputs: Tensor = scene.task.inputs_of([name], scene.weights, batch, scene.buffers, whole=False)[name]
    return inputs


def by_class(scene: TargetView, place: Place, rows: Tensor) -> Tensor:
    """dL/dZ of every row with each class as its label, in a batch of that label alone: (classes, rows, m)."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: Sequence[Tensor], output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # the ReLU may work in place

    slopes, blank = [], {**scene.task.blank(len(rows)), **scene.fields}
    module = scene.task.model.get_submodule(place.name)
    handles = [module.register_forward_pre_hook(lambda _, args: (rows.to(args[0]),)), module.register_forward_hook(cut)]
    try:
        for label in range(scene.task.fields["y"].classes or 0):
            y = torch.full((len(rows),), label, device=scene.like.device)
            with torch.enable_grad():
                loss, _ = scene.task.loss(scene.weights, {**blank, "y": y}, scene.buffers)
                slopes.append(torch.autograd.grad(loss, leaves[-1])[0])
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(slopes)
