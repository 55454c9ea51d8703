"""Clipping: bound the norm of an update, a layer or an example's gradient. Alone it proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.settings import at_least, one_of
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Compute, Defence, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Batch, Task, TaskError

PAPER = "clipping alone, as papers on leakage use it; of Abadi et al., Deep Learning with Differential Privacy, 2016"
TOUCHES = 1e-3
"""An observed norm this close below the bound, relatively, counts as clipped.

Wide enough for the rounding of float32 weights. A false alarm costs the attacker one number, the norm.
"""


def factor(norm: Tensor, bound: float) -> Tensor:
    """min(1, bound / norm), with a finite derivative at norm 0."""
    clipped = norm > bound
    return torch.where(clipped, bound / torch.where(clipped, norm, 1.0), 1.0)


def clip(params: Params, bound: float) -> Params:
    """The tree, scaled to norm `bound` where it is longer."""
    return tree.scale(params, factor(tree.norm(params), bound))


def gradients_of_examples(compute: Compute, weights: Params, batch: Batch, task: Task) -> Params:
    """The gradient of each example's loss: every tensor has the examples as its first axis."""
    _refuse_shared_statistics(task)

    def of_one(example: Batch) -> Params:
        return compute(weights, {name: value[None] for name, value in example.items()})

    return vmap(of_one)(batch)


def clipped_mean(compute: Compute, weights: Params, batch: Batch, task: Task, bound: float) -> Params:
    """(1/B) sum_i g_i min(1, bound / ||g_i||)"""
    each = gradients_of_examples(compute, weights, batch, task)
    squares = torch.stack([g.flatten(1).square().sum(1) for g in each.values()])  # (tensors, B)
    factors = factor(tree.safe_sqrt(squares.sum(0)), bound)
    return tree.map(lambda g: (g * factors.reshape(-1, *[1] * (g.dim() - 1))).mean(0), each)


def _refuse_shared_statistics(task: Task) -> None:
    """Examples have separate gradients only where no layer uses, or updates, statistics of the whole batch."""
    for name, module in task.model.named_modules():
        batch = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        running = isinstance(module, _InstanceNorm) and module.training and module.track_running_stats
        if batch or running:
            raise TaskError(
                f"Layer {name!r} ({type(module).__name__}) uses statistics of the whole batch, so an example has no "
                "gradient of its own to clip: put the model in evaluation mode (frozen statistics), or use GroupNorm."
            )


@named("clipping", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class Clipping(Defence):
    """Scale to norm at most `norm`: u min(1, norm / ||u||).

    per="update": the whole update; "layer": each tensor of it, to `norm` each; "example": every example's gradient, at
    each local step, before they are averaged.

    The direction stays, so attacks that compare directions are not affected. A2 sees whether the clip was active: an
    observed norm at the bound was clipped to it, and then every prediction is scaled to the observed norm, which has no
    kink (and fits even an update that came so close by chance); else nothing was clipped. Norms of single examples are
    not seen: there A2 replays the clip itself.
    """

    norm: float = 1.0
    per: Literal["update", "layer", "example"] = "update"

    def __post_init__(self) -> None:
        at_least("norm", self.norm, 0.0, excluded=True)
        one_of("per", self.per, "update", "layer", "example")

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        if self.per != "example":
            return compute(weights, batch)
        return clipped_mean(compute, weights, batch, client.task, self.norm)

    def upload(self, upload: Upload, client: Client) -> Upload:
        if self.per == "example":
            return upload
        return upload.map(lambda u: tree.map(lambda x, n: x * factor(n, self.norm), u, _NORMS[self.per](u)))

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        if self.per == "example":
            return self
        norms = _NORMS[self.per]
        observed = norms(scene.update)
        return Normalised(norms, observed, tree.map(lambda n: n >= (1 - TOUCHES) * self.norm, observed))

    def replayed(self, scene: TargetView, task: Task) -> Defence:
        return self

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(reason="clipping adds no noise")


def _norm_of_update(update: Params) -> Params:
    norm = tree.norm(update)
    return dict.fromkeys(update, norm)


def _norms_of_layers(update: Params) -> Params:
    return tree.map(lambda u: tree.safe_sqrt(u.square().sum()), update)


_NORMS: dict[str, Callable[[Params], Params]] = {"update": _norm_of_update, "layer": _norms_of_layers}


@dataclass(frozen=True, eq=False)
class Normalised(Defence):
    """The clip as an attacker re-runs it: every prediction has the observed norm where the observation was clipped."""

    norms: Callable[[Params], Params]
    observed: Params  # of each tensor, the norm it was clipped by
    active: Params  # and whether it was

    def upload(self, upload: Upload, client: Client) -> Upload:
        def scaled(value: Tensor, norm: Tensor, observed: Tensor, active: Tensor) -> Tensor:
            usable = active & (norm > 0)
            return value * torch.where(usable, observed / torch.where(usable, norm, 1.0), 1.0)

        return upload.map(lambda u: tree.map(scaled, u, self.norms(u), self.observed, self.active))
