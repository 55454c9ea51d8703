"""Functions that torch cannot differentiate as attacks need it, replaced by plain forms with the same values.

Gradient matching takes a second derivative, for many lanes at once under vmap; certificates and second-order attacks
take it in forward mode. Some functions of torch lack one of the three, and fused recurrent layers lack most. While
`PlainForms` is active, the forms below replace them, whether a module calls them or the user does. Values and first
derivatives are torch's own, up to rounding. The user's model does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode

from gradleak.scenario.recurrence import BLOCK_FORMS, RECURRENT_FORMS

Forms: TypeAlias = dict[Any, Callable[..., Any]]
"""A function of torch, and the form that replaces it."""


@contextmanager
def double_backward_safe() -> Iterator[None]:
    """Plain forms, and plain attention: the fused kernels have no double backward and no forward mode."""
    from torch.backends import mha
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), PlainForms():
            yield
    finally:
        mha.set_fastpath_enabled(before)


class PlainForms(TorchFunctionMode):
    """While active, the forms below replace the functions of torch; no other number changes.

    Clients need it too: per-example gradients run under vmap, and with cuDNN an nn.LSTM has no gradient in torch.func.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


# --- activations and distances --------------------------------------------------------------------------------------


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    if inplace:
        return input.copy_(_hardsigmoid(input.clone()))  # a clone: backward needs what was here before
    return (F.hardtanh(input, -3.0, 3.0) + 3) / 6  # hardtanh has torch's slope at both kinks, a clamp does not


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    if training:  # random slopes
        return F.rrelu(input, lower, upper, training, inplace)
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _pdist(input: Tensor, p: float = 2.0) -> Tensor:
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[first] - input[second], p, -1)


# --- losses ---------------------------------------------------------------------------------------------------------


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda value: value, "mean": torch.mean, "sum": torch.sum}


def _reduced(each: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss with torch's arguments for the reduction, from the loss of each entry."""

    def run(
        *args: Any, reduction: str = "mean", size_average: bool | None = None, reduce: bool | None = None, **kwargs: Any
    ) -> Tensor:
        if size_average is not None or reduce is not None:  # torch's old words for it
            reduction = legacy_get_string(size_average, reduce, emit_warning=False)
        return _REDUCTIONS[reduction](each(*args, **kwargs))

    return run


def _mse_loss(input: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """Torch's own, to the last bit. Forward mode fails only where the target has no tangent: here it has zeros."""
    return F.mse_loss(input, target + 0 * input, **kwargs)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Torch's own but for class indices with weights and smoothing, whose mean selects rows and so rejects vmap."""
    if weight is None or not label_smoothing or target.is_floating_point():
        rest = (size_average, ignore_index, reduce, reduction, label_smoothing)
        return F.cross_entropy(input, target, weight, *rest)
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce, emit_warning=False)
    axis = 1 if input.dim() > 1 else 0
    scores, classes = input.log_softmax(axis).movedim(axis, -1), torch.arange(len(weight), device=input.device)
    shares = (target[..., None] == classes).to(input) * (1 - label_smoothing) + label_smoothing / len(weight)
    counted = target != ignore_index
    each = -(scores * shares * weight).sum(-1) * counted
    if reduction != "mean":
        return _REDUCTIONS[reduction](each)
    return each.sum() / (weight[target.where(counted, 0)] * counted).sum()


@_reduced
def _huber_loss(input: Tensor, target: Tensor, delta: float = 1.0, weight: Tensor | None = None) -> Tensor:
    each = delta * F.smooth_l1_loss(input, target, reduction="none", beta=delta)
    return each if weight is None else each * weight


@_reduced
def _soft_margin_loss(input: Tensor, target: Tensor) -> Tensor:
    return -F.logsigmoid(target * input)


@_reduced
def _multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    own = target[..., None] == torch.arange(input.shape[-1], device=input.device)
    above = F.relu(margin + input - (input * own).sum(-1, keepdim=True)) ** p * ~own
    return (above if weight is None else above * (weight * own).sum(-1, keepdim=True)).mean(-1)


@_reduced
def _multilabel_margin_loss(input: Tensor, target: Tensor) -> Tensor:
    """The classes of an example are those before the first -1."""
    classes = torch.arange(input.shape[-1], device=input.device)
    valid = (target >= 0).long().cumprod(-1).bool()
    own = ((target[..., None] == classes) & valid[..., None]).any(-2)
    above = F.relu(1 + input.unsqueeze(-2) - input.gather(-1, target.clamp(min=0)).unsqueeze(-1))
    return (above * (valid.unsqueeze(-1) & ~own.unsqueeze(-2))).sum((-2, -1)) / len(classes)


# --- which form replaces which --------------------------------------------------------------------------------------

# By what torch lacks (torch 2.13).
WITHOUT: dict[str, Forms] = {
    "second derivative": {
        F.hardsigmoid: _hardsigmoid,
        torch.cdist: _cdist,
        torch.pdist: _pdist,
        F.multi_margin_loss: _multi_margin_loss,
        F.multilabel_margin_loss: _multilabel_margin_loss,
    },
    "forward-mode derivative": {
        F.mse_loss: _mse_loss,
        F.huber_loss: _huber_loss,
        F.soft_margin_loss: _soft_margin_loss,
    },
    "rule for vmap": {F.rrelu: _rrelu},
}
_INSTEAD: Forms = {
    **{function: form for forms in WITHOUT.values() for function, form in forms.items()},
    F.cross_entropy: _cross_entropy,
    **RECURRENT_FORMS,
    **BLOCK_FORMS,
}
