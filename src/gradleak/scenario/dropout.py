"""Dropout as clients train with it: masks from the client's own stream of random numbers.

A model in training mode draws its masks from torch's global generator: no run repeats, and vmap refuses or shares them.
Under `Dropping` a model in EVALUATION mode drops, with masks that depend on the client's key alone; the user still
chooses the mode of BatchNorm. An attacker's replay has no masks: they are the client's secret.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradleak.core.random import Draws

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def drops(module: nn.Module) -> bool:
    """Does this layer drop at random in the mode it is in? Recurrent layers do so between their layers."""
    if isinstance(module, nn.RNNBase):
        return module.training and module.dropout > 0 and module.num_layers > 1
    return isinstance(module, DROPOUT) and module.training and module.p > 0


class Dropping(TorchFunctionMode):
    """While active, every call of dropout drops, whatever mode the model is in, and each call has its own mask.

    Where gradients are taken example by example under an inner vmap (DP-SGD), the examples of a step share their masks.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws, self.calls = draws, 0

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        super().__exit__(kind, value, traceback)
        if kind is None and not self.calls:
            raise ValueError(
                "LocalTraining(dropout=True): the model never calls dropout in evaluation mode, so nothing would be "
                "dropped. Use dropout layers (nn.Dropout, nn.Dropout1d to 3d), or leave it out."
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hidden = _HIDDEN.get(func)
        if func in _UNKNOWN or (hidden is not None and hidden(*args, **kwargs) > 0):
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
    """Drops whole channels of (N, C, ...), or of (C, ...), with this many dimensions behind the channel."""

    def masked(draws: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        shape = tuple(input.shape[: input.dim() - dimensions])
        return _dropped(draws, input, p, (*shape, *[1] * dimensions))

    return masked


def _dropped(draws: Draws, input: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    mask = (draws.uniform(shape) >= p).to(input.dtype)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0)


def _of_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
) -> float:
    return dropout_p


def _of_heads(*args: Any, **named: Any) -> float:
    return float(named["dropout_p"] if "dropout_p" in named else args[10])


def _of_recurrence(*args: Any) -> float:
    """(input, hidden, weights, bias, layers, dropout, ...), or with the sizes of packed batches before the hidden."""
    return float(next((value for value in args[4:] if isinstance(value, float)), 0.0))


# Functions with dropout inside, and where its p is among their arguments.
_HIDDEN: dict[Any, Callable[..., float]] = {
    F.scaled_dot_product_attention: _of_attention,
    F.multi_head_attention_forward: _of_heads,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _of_recurrence),
}

_MASKED: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _entries,
    torch.dropout: _entries,
    F.dropout1d: _channels(1),
    F.dropout2d: _channels(2),
    F.dropout3d: _channels(3),
}
_UNKNOWN = (F.alpha_dropout, F.feature_alpha_dropout)
