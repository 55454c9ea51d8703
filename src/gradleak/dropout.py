"""Dropout as clients train with it: masks from the client's own stream of random numbers.

A model in training mode draws its masks from torch's global generator: no run repeats, and vmap refuses or shares them.
Under `Dropping` a model in EVALUATION mode drops, with masks that are a function of the client's key alone; the mode
of its BatchNorm is left to the user. What an attacker replays has no masks: they are the client's secret.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradleak.draws import Draws


class Dropping(TorchFunctionMode):
    """While active, every call of dropout drops, whatever mode the model is in: each with a mask of its own.

    Where gradients are taken example by example under an inner vmap (DP-SGD), the examples of a step share their masks.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws, self.calls = draws, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNKNOWN:
            raise NotImplementedError(
                f"LocalTraining(dropout=True) cannot draw masks for {func.__name__}: it knows dropout, and dropout1d "
                "to dropout3d. Train without it, or with one of these."
            )
        masked = _MASKED.get(func)
        if masked is None:
            return func(*args, **kwargs)
        self.calls += 1
        return masked(self.draws.child(self.calls), *args, **kwargs)


def _entries(draws: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _dropped(draws, input, p, tuple(input.shape))


def _channels(dimensions: int) -> Callable[..., Tensor]:
    """Whole channels of (N, C, ...), or of (C, ...), with so many dimensions behind the channel."""

    def masked(draws: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        shape = tuple(input.shape[: input.dim() - dimensions])
        return _dropped(draws, input, p, (*shape, *[1] * dimensions))

    return masked


def _dropped(draws: Draws, input: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    kept = (draws.uniform(shape) >= p).to(input.dtype)
    return input * kept * (1 / (1 - p) if p < 1 else 0.0)


_MASKED: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _entries,
    F.dropout1d: _channels(1),
    F.dropout2d: _channels(2),
    F.dropout3d: _channels(3),
}
_UNKNOWN = (F.alpha_dropout, F.feature_alpha_dropout)
