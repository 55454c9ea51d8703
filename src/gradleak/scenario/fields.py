"""A private field: the shape of one example, the values it can take, and the kind of data it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradleak.scenario.kinds import Kind, natural_kind

Bounds: TypeAlias = tuple[float, float] | tuple[tuple[float, float], ...]
"""(low, high) of all values, or one pair for each channel."""

UNBOUNDED = (-math.inf, math.inf)


class TaskError(ValueError):
    """The model, the shapes or the bounds do not fit together."""


class UnsupportedTask(TaskError):
    """No attack, or not this one, can attack the task. The message starts with "unsupported: "."""


@dataclass(frozen=True)
class Field:
    """One private tensor: its shape without the batch axis, the values it can take, and its kind.

    A continuous field lives in model-input space, u = (p - mean) / std, with p in `bounds`; a categorical one has
    `classes`. `unit` is the only place that maps model-input space to [0, 1] pictures. A field that is no picture, such
    as noise, has infinite bounds and no [0, 1] to be mapped to.

    kind     what sort of data it is (`scenario.kinds`); None: by shape and bounds
    public   the server knows it: attacks are given it, and it is not scored
    """

    shape: tuple[int, ...]
    bounds: Bounds = (0.0, 1.0)
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    classes: int | None = None
    kind: Kind = None  # type: ignore[assignment]  # never None after __post_init__
    public: bool = False

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "kind", natural_kind(self.shape, self.classes, self._finite))
        if reason := self.kind.misfit(self.shape):
            raise TaskError(reason)
        if self.classes is not None:
            return
        channels = self.shape[0] if self.shape else 1
        if not all(low < high for low, high in self._pairs):
            raise TaskError(f"bounds must be (low, high) with low < high; given {self.bounds}.")
        if min(self.std) <= 0:
            raise TaskError(f"std must be positive in every channel; given {self.std}.")
        for name, values in (("bounds", self._pairs), ("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise TaskError(f"{name} needs one value or one per channel ({channels}); given {len(values)}.")

    @property
    def _pairs(self) -> tuple[tuple[float, float], ...]:
        """The bounds of every channel, or of all in one pair."""
        return self.bounds if isinstance(self.bounds[0], tuple) else (self.bounds,)

    @property
    def _finite(self) -> bool:
        return all(math.isfinite(side) for pair in self._pairs for side in pair)

    @property
    def bounded(self) -> bool:
        """Do its values have finite bounds?"""
        return self.classes is None and self._finite

    @property
    def continuous(self) -> bool:
        """Are its values numbers that a search moves directly?"""
        return self.classes is None and self.kind.continuous

    def _channels(self, values: Sequence[float], like: Tensor) -> Tensor:
        return torch.tensor(values, device=like.device, dtype=like.dtype).reshape(-1, *[1] * (len(self.shape) - 1))

    def limits(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The box in model-input space, broadcastable to an example, on the device and in the type of `like`."""
        mean, std = self._channels(self.mean, like), self._channels(self.std, like)
        low, high = ([pair[side] for pair in self._pairs] for side in (0, 1))
        return (self._channels(low, like) - mean) / std, (self._channels(high, like) - mean) / std

    def extent(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The box where values are to be expected: the limits, and two units of the model's input without one."""
        low, high = self.limits(like)
        return torch.where(low.isfinite(), low, -2.0), torch.where(high.isfinite(), high, 2.0)

    def relative(self, x: Tensor) -> Tensor:
        """Model-input space in units of the extent: [0, 1] for a bounded field (not clamped)."""
        low, high = self.extent(x)
        return (x - low) / (high - low)

    def unit(self, x: Tensor) -> Tensor:
        """Model-input space to [0, 1] (not clamped)."""
        low, high = self._box(x)
        return (x - low) / (high - low)

    def model(self, picture: Tensor) -> Tensor:
        """[0, 1] to model-input space."""
        low, high = self._box(picture)
        return low + picture * (high - low)

    def _box(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if not self.bounded:
            raise TaskError(
                f"A field with bounds {str(self.bounds):.60} is not a picture: it cannot be mapped to [0, 1]."
            )
        return self.limits(like)
