"""Layers for lanes on a GPU: the same values, with short first and second derivatives.

Gradient matching differentiates a network twice. For a GroupNorm torch then runs 146 kernels, for a SiLU 28; the
functions here run 61 and 15. `LaneLayers` replaces the functions of torch.nn.functional while it is active, whether a
module calls them or the user does. The user's model does not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradleak.engine.convolution import conv2d


class LaneLayers(TorchFunctionMode):
    """While active, the functions below replace those of torch; all others stay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


# --- normalisation ----------------------------------------------------------------------------------------------------


class Normalised(torch.autograd.Function):
    """Rows (..., N) -> (n, r): each less its mean, times r = 1 / sqrt(variance + eps)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        n, _, r = torch.native_layer_norm(rows, rows.shape[-1:], None, None, eps)
        return n, r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, to_n: Tensor | None, to_r: Tensor | None) -> Any:
        n, r = ctx.saved_tensors
        parts = []
        if to_n is not None:
            parts.append(r * Projected.apply(to_n, n))
        if to_r is not None:
            parts.append((to_r * r * r / -n.shape[-1]) * n)
        return (sum(parts[1:], parts[0]) if parts else None), None

    @staticmethod
    def jvp(ctx: Any, of_rows: Tensor, _: None) -> Any:
        n, r = ctx.saved_tensors
        return r * Projected.apply(of_rows, n), -r * r * (of_rows * n).mean(-1, keepdim=True)


class Projected(torch.autograd.Function):
    """g - mean(g) - n mean(g n): the part of g that changes normalised rows. Linear and symmetric in g."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, n: Tensor) -> Tensor:
        return torch.addcmul(g - g.mean(-1, keepdim=True), n, (g * n).mean(-1, keepdim=True), value=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, to: Tensor) -> Any:
        g, n = ctx.saved_tensors
        to_g = Projected.apply(to, n) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_g, None
        inner, outer = (g * n).mean(-1, keepdim=True), (to * n).mean(-1, keepdim=True)
        return to_g, -torch.addcmul(to * inner, g, outer)

    @staticmethod
    def jvp(ctx: Any, of_g: Tensor | None, of_n: Tensor | None) -> Any:
        g, n = ctx.saved_tensors
        parts = []
        if of_g is not None:
            parts.append(Projected.apply(of_g, n))
        if of_n is not None:
            inner, outer = (g * n).mean(-1, keepdim=True), (g * of_n).mean(-1, keepdim=True)
            parts.append(-(of_n * inner + n * outer))
        return sum(parts[1:], parts[0])


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    rows = input.reshape(input.shape[0], num_groups, -1)
    each = Normalised.apply(rows, eps)[0].reshape(input.shape)
    shape = (-1, *[1] * (input.dim() - 2))  # one number a channel
    return _scaled(each, *(None if each is None else each.reshape(shape) for each in (weight, bias)))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    rows = input.reshape(*input.shape[: input.dim() - len(normalized_shape)], math.prod(normalized_shape))
    return _scaled(Normalised.apply(rows, eps)[0].reshape(input.shape), weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """In evaluation mode BatchNorm is one scale and one shift per channel, whose second derivative is short."""
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = (-1, *[1] * (input.dim() - 2))
    return input * scale.reshape(shape) + shift.reshape(shape)


def _scaled(value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    value = value if weight is None else value * weight
    return value if bias is None else value + bias


# --- SiLU -------------------------------------------------------------------------------------------------------------


class SiLU(torch.autograd.Function):
    """x sigmoid(x)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.silu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Slope.apply(grad, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return Slope.apply(tangent, *ctx.saved_tensors)


class Slope(torch.autograd.Function):
    """g times the derivative of SiLU at x, in one kernel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, x: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward(g, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        g, x = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return Slope.apply(grad, x) if wanted[0] else None, _bend(g * grad, x) if wanted[1] else None

    @staticmethod
    def jvp(ctx: Any, of_g: Tensor | None, of_x: Tensor | None) -> Any:
        g, x = ctx.saved_tensors
        parts = []
        if of_g is not None:
            parts.append(Slope.apply(of_g, x))
        if of_x is not None:
            parts.append(_bend(g * of_x, x))
        return sum(parts[1:], parts[0])


def _bend(g: Tensor, x: Tensor) -> Tensor:
    """g times the second derivative, s (1 - s) (2 + x (1 - 2 s)) with s = sigmoid(x)."""
    s = torch.sigmoid(x)
    return g * (s * (1 - s)) * (2 + x * (1 - 2 * s))


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    if inplace:
        return F.silu(input, inplace=True)
    result: Tensor = SiLU.apply(input)
    return result


_INSTEAD: dict[Any, Any] = {
    F.conv2d: conv2d,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.silu: _silu,
}
