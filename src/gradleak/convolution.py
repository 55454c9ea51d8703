"""Convolutions whose weight gradient is one batched matrix product for all lanes.

Gradient matching needs every lane's OWN weight gradient. Under vmap, torch computes it, and the two derivatives that a
second backward takes of it, as grouped convolutions with one group a lane, which the libraries run slowly. Written with
patches (im2col) they are batched matrix products. Forward and input gradient share the weights between lanes, so those
stay ordinary convolutions over lanes x examples.

`LaneConvolutions` swaps F.conv2d while it is active, whether it is called by nn.Conv2d or directly; the user's model is
not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Window:
    """A kernel's walk over an image."""

    # Not a tuple: torch takes tuples apart, and asks forward mode under vmap for a tangent of every number.
    height: int
    width: int
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def sides(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def outputs(self) -> tuple[int, int]:
        rows = (self.height + 2 * self.padding[0] - self.size[0]) // self.stride[0] + 1
        return rows, (self.width + 2 * self.padding[1] - self.size[1]) // self.stride[1] + 1


class Patches(torch.autograd.Function):
    """(B, C, H, W) -> (B, C * kernel area, positions). Its transpose is `Fold`: each is the other's backward."""

    @staticmethod
    def forward(x: Tensor, window: Window) -> Tensor:
        (kh, kw), (ph, pw) = window.size, window.padding
        if (kh, kw) == (1, 1) and (ph, pw) == (0, 0):
            return x[..., :: window.stride[0], :: window.stride[1]].flatten(2)
        x = F.pad(x, (pw, pw, ph, ph))
        views = x.unfold(2, kh, window.stride[0]).unfold(3, kw, window.stride[1])  # (B, C, Ho, Wo, kh, kw)
        return views.permute(0, 1, 4, 5, 2, 3).reshape(x.shape[0], x.shape[1] * kh * kw, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Window], output: Tensor) -> None:
        ctx.window = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Fold.apply(grad, ctx.window), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return Patches.apply(tangent, ctx.window)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, window: Window) -> tuple[Tensor, int]:
        return _lanes_into_batch(Patches, in_dims[0], x, window), 0


class Fold(torch.autograd.Function):
    """(B, C * kernel area, positions) -> (B, C, H, W): overlapping patches are summed."""

    @staticmethod
    def forward(columns: Tensor, window: Window) -> Tensor:
        return F.fold(columns, window.sides, window.size, 1, window.padding, window.stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Window], output: Tensor) -> None:
        ctx.window = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Patches.apply(grad, ctx.window), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return Fold.apply(tangent, ctx.window)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], columns: Tensor, window: Window) -> tuple[Tensor, int]:
        return _lanes_into_batch(Fold, in_dims[0], columns, window), 0


def _lanes_into_batch(function: Any, lane_axis: int, value: Tensor, window: Window) -> Tensor:
    value = value.movedim(lane_axis, 0)
    result = function.apply(value.flatten(0, 1), window)
    return result.unflatten(0, value.shape[:2])


class _Convolution(torch.autograd.Function):
    """conv2d without bias, with the weight gradient by patches. Differentiable any number of times."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, window: Window) -> Tensor:
        return F.conv2d(x, weight, None, window.stride, window.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Window], output: Tensor) -> None:
        x, weight, ctx.window = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.set_materialize_grads(False)  # a weight that does not move must not cost a convolution with zeros

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        window: Window = ctx.window
        rest = [  # rows and columns that the last window did not reach
            side + 2 * pad - size - (count - 1) * stride
            for side, pad, size, stride, count in zip(
                window.sides, window.padding, window.size, window.stride, window.outputs, strict=True
            )
        ]
        to_input = F.conv_transpose2d(grad, weight, None, window.stride, window.padding, tuple(rest))
        rows, columns = grad.flatten(2), Patches.apply(x, window)  # (B, O, P), (B, K, P)
        # One example is the common case, and a sum over one row would still be a pass.
        one = rows.shape[0] == 1
        to_weight = rows[0] @ columns[0].T if one else (rows @ columns.transpose(1, 2)).sum(0)
        return to_input, to_weight.reshape(weight.shape), None

    @staticmethod
    def jvp(ctx: Any, of_input: Tensor | None, of_weight: Tensor | None, _: None) -> Any:
        x, weight = ctx.saved_tensors
        window: Window = ctx.window
        if of_weight is None:
            return _Convolution.apply(of_input, weight, window)
        along = _Convolution.apply(x, of_weight, window)
        return along if of_input is None else along + _Convolution.apply(of_input, weight, window)


class LaneConvolutions(TorchFunctionMode):
    """While active, ordinary two-dimensional convolutions are computed as above; all others are left alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: str | int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str) or groups != 1 or _pair(dilation) != (1, 1) or input.dim() != 4:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    sides = input.shape[2], input.shape[3]
    window = Window(*sides, (weight.shape[2], weight.shape[3]), _pair(stride), _pair(padding))
    out: Tensor = _Convolution.apply(input, weight, window)
    return out if bias is None else out + bias[:, None, None]


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


_INSTEAD: dict[Any, Any] = {F.conv2d: _conv2d, F.batch_norm: _batch_norm}


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else (value * 2)[:2] if len(value) == 1 else value
    return first, second
