"""The objective of a denoiser, and its task: the client's image is private, and so are its step and its noise.

Reference: Ho, Jain, Abbeel, "Denoising diffusion probabilistic models", NeurIPS 2020; v: Salimans and Ho, ICLR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradleak.core.random import Draws
from gradleak.diffusion.schedule import Schedule
from gradleak.scenario.task import Batch, Field, Task, TaskError

TARGETS = ("eps", "v")
REDUCTIONS = ("mean", "sum")
STANDARD = Schedule()


class Denoiser(Protocol):
    """A network `model(x, t)` that predicts the noise in x, or v.

    t as whole numbers (B,) is the step; as floats (B, dim) it is the input embedding of the time MLP.
    """

    table: Tensor  # (T, dim): the embedding of every step
    time_layer: str  # the dotted name of the time MLP's first linear layer

    def __call__(self, x: Tensor, t: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Denoising:
    """Squared error of a denoiser at one step of each example.

    schedule    how much noise a step has
    target      "eps": the network predicts the noise. "v": it predicts sqrt(ab) noise - sqrt(1 - ab) x
    reduction   over the values of an example: "mean", or "sum" as in the formulae. Over examples always the mean
    table       embeddings of all steps, (T, dim), which a simplex of steps averages. `denoising` takes the model's
    weighted    the error of v has the weight snr / (snr + 1) = ab; the error of the noise always has weight 1

    A batch has x (B, C, H, W), noise like x, and t: a step each (B,), or a simplex (B, T). A simplex averages alpha-bar
    and the embedding, and everything that depends on t uses these averages; one-hot, it is the step itself.
    """

    schedule: Schedule = STANDARD
    target: str = "eps"
    reduction: str = "mean"
    table: Tensor | None = None
    weighted: bool = True

    def __post_init__(self) -> None:
        for name, options in (("target", TARGETS), ("reduction", REDUCTIONS)):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}; given {getattr(self, name)!r}.")

    @property
    def drawn(self) -> frozenset[str]:
        """The fields that a client draws itself in every step of its training."""
        return frozenset({"t", "noise"})

    def complete(self, batch: Batch, draws: Draws) -> Batch:
        """The batch with a uniform step and normal noise for each example, where they are missing.

        Drawn in double precision and then cast, so that a key gives the same noise in every precision.
        """
        x = batch["x"]
        drawn = dict(batch)
        if "t" not in batch:
            place = draws.uniform((x.shape[0],), stream=0, dtype=torch.float64)
            drawn["t"] = (place * self.schedule.steps).long()
        if "noise" not in batch:
            drawn["noise"] = draws.normal(tuple(x.shape), stream=1, dtype=torch.float64).to(x.dtype)
        return drawn

    def noised(self, batch: Batch) -> Tensor:
        """x_t: the input of the network. A batch may hold it, as in searches with a known x_t."""
        if "x_t" in batch:
            return batch["x_t"]
        image, noise = self.schedule.scales(batch["t"], batch["x"])
        return image * batch["x"] + noise * batch["noise"]

    def wanted(self, batch: Batch) -> Tensor:
        """What the network should predict: the noise, or v."""
        if self.target == "eps":
            return batch["noise"]
        image, noise = self.schedule.scales(batch["t"], batch["x"])
        return image * batch["noise"] - noise * batch["x"]

    def weight(self, batch: Batch) -> Tensor:
        """The weight of each example's error, (B,)."""
        x = batch["x"]
        plain = self.target == "eps" or not self.weighted
        return x.new_ones(x.shape[0]) if plain else self.schedule.at(batch["t"], x)

    def when(self, t: Tensor, like: Tensor) -> Tensor:
        """t as the network takes it: the step, or the average embedding of a simplex, in the type of `like`."""
        if not t.is_floating_point():
            return t
        if self.table is None:
            raise ValueError(
                "A simplex of steps needs the embeddings that it averages: make the task with denoising(model, ...), "
                "or pass Denoising(table=model.table)."
            )
        return (t.double() @ self.table.to(t.device, torch.float64)).to(like.dtype)

    def __call__(self, call: Callable[..., Any], batch: Batch) -> Tensor:
        error = call(self.noised(batch), self.when(batch["t"], batch["x"])) - self.wanted(batch)
        squares = error.square().flatten(1)
        each = squares.mean(1) if self.reduction == "mean" else squares.sum(1)
        return (self.weight(batch) * each).mean()

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Denoising:
        """On another device. The tables stay in double precision: they are cast after the average is taken."""
        return self if self.table is None else replace(self, table=self.table.to(device))


def denoising(
    model: nn.Module,
    *,
    like: Tensor,
    schedule: Schedule = STANDARD,
    target: str = "eps",
    reduction: str = "mean",
    weighted: bool = True,
) -> Task:
    """The task of a denoiser: x in [-1, 1], the step t, and noise without bounds.

    model   a `Denoiser`: `gradleak.models.unet`, or a network of diffusers in `FromDiffusers`
    like    images with a batch axis; gives SHAPES, nothing else

    The other arguments are those of `Denoising`.
    """
    if like.dim() != 4:
        raise TaskError(f"like must be images (batch, channels, height, width); given shape {tuple(like.shape)}.")
    missing = [name for name in ("table", "time_layer") if not hasattr(model, name)]
    if missing:
        raise TaskError(
            f"{type(model).__name__} has no {' and no '.join(missing)}: a denoiser offers model(x, t), `table` (steps, "
            "dim) of step embeddings and `time_layer`. Use gradleak.models.unet, or wrap diffusers' UNet2DModel in "
            "gradleak.diffusion.FromDiffusers."
        )
    table: Tensor = model.table  # type: ignore[assignment]
    if table.shape[0] != schedule.steps:
        raise TaskError(f"The model embeds {table.shape[0]} steps, the schedule has {schedule.steps}: make them equal.")
    shape = tuple(like.shape[1:])
    fields = {
        "x": Field(shape, bounds=(-1.0, 1.0)),
        "t": Field((), classes=schedule.steps),
        "noise": Field(shape, bounds=(-math.inf, math.inf)),
    }
    return Task(model, Denoising(schedule, target, reduction, table.detach(), weighted), fields)
