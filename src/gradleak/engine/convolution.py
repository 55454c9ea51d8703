"""Convolutions whose weight gradient is one batched matrix product for all lanes.

Gradient matching needs every lane's OWN weight gradient. Under vmap, torch computes it, and the two derivatives that a
second backward takes of it, as grouped convolutions with one group a lane, which the libraries run slowly. Written with
patches (im2col) they are batched matrix products. Forward and input gradient share the weights between lanes, so those
stay ordinary convolutions over lanes x examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

Dims: TypeAlias = tuple[int | None, int | None, None]
IN_TURN = 8  # examples of a lane, on a GPU


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

    @property
    def mirrored(self) -> Window | None:
        """The adjoint as a walk of the mirrored kernel over the outputs; None where steps are longer than one."""
        around = tuple(size - 1 - padding for size, padding in zip(self.size, self.padding, strict=True))
        if self.stride != (1, 1) or min(around) < 0:
            return None
        return Window(*self.outputs, self.size, (1, 1), (around[0], around[1]))


class _Linear(torch.autograd.Function):
    """A linear map of one tensor: its own tangent, and lanes are more examples."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Window], output: Tensor) -> None:
        ctx.window = inputs[1]

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, _: None) -> Any:
        return cls.apply(tangent, ctx.window)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int, None], value: Tensor, window: Window) -> tuple[Tensor, int]:
        return _lanes_into_batch(cls, in_dims[0], value, window), 0


class Patches(_Linear):
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
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Fold.apply(grad, ctx.window), None


class Fold(_Linear):
    """(B, C * kernel area, positions) -> (B, C, H, W): overlapping patches are summed."""

    @staticmethod
    def forward(columns: Tensor, window: Window) -> Tensor:
        return F.fold(columns, window.sides, window.size, 1, window.padding, window.stride)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Patches.apply(grad, ctx.window), None


# --- three maps, each the derivative of another -----------------------------------------------------------------------


class _Bilinear(torch.autograd.Function):
    """A map that is linear in each of two tensors. The second is a weight, unless the map says otherwise."""

    @staticmethod
    def by_patches(value: Tensor, weight: Tensor, window: Window, /) -> Tensor:
        """The same as `forward`, by a matrix product."""
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Window], output: Tensor) -> None:
        first, second, ctx.window = inputs
        ctx.save_for_backward(first, second)
        ctx.save_for_forward(first, second)
        ctx.set_materialize_grads(False)  # a weight that does not move must not cost a convolution with zeros

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        first, second = ctx.saved_tensors
        parts = []
        if tangents[0] is not None:
            parts.append(cls.apply(tangents[0], second, ctx.window))
        if tangents[1] is not None:
            parts.append(cls.apply(first, tangents[1], ctx.window))
        return sum(parts[1:], parts[0])

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, value: Tensor, weight: Tensor, window: Window) -> tuple[Tensor, int]:
        """Lanes that share a weight are more examples; with weights of their own: in turn, or by patches.

        Not as the groups of one convolution: on an H200 in TF32, with 208 lanes of 3 x 3 kernels at 32 x 32, groups did
        26 and patches 71 TFLOP/s of 128 -> 256 channels (128 and 74 of 256 -> 256), adjoints 32 and 39.
        """
        if in_dims[1] is None:
            assert in_dims[0] is not None
            return _lanes_into_batch(cls, in_dims[0], value, weight, window), 0
        if in_dims[0] is not None and in_turn(value, in_dims[0]):
            return _one_lane_after_another(cls, in_dims, value, weight, window), 0
        return torch.vmap(cls.by_patches, in_dims=in_dims, out_dims=0)(value, weight, window), 0


class Convolved(_Bilinear):
    """y = conv2d(x, weight) without bias. Differentiable any number of times, as are its two adjoints below."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, window: Window) -> Tensor:
        return F.conv2d(x, weight, None, window.stride, window.padding)

    @staticmethod
    def by_patches(x: Tensor, weight: Tensor, window: Window) -> Tensor:
        return (weight.flatten(1) @ Patches.apply(x, window)).unflatten(2, window.outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return _asked(ctx, lambda w: Spread.apply(grad, weight, w), lambda w: Correlated.apply(x, grad, w))


class Spread(_Bilinear):
    """The adjoint in x: an output y and a weight -> an image."""

    @staticmethod
    def forward(y: Tensor, weight: Tensor, window: Window) -> Tensor:
        rest = [  # rows and columns that the last window did not reach
            side + 2 * pad - size - (count - 1) * stride
            for side, pad, size, stride, count in zip(
                window.sides, window.padding, window.size, window.stride, window.outputs, strict=True
            )
        ]
        return F.conv_transpose2d(y, weight, None, window.stride, window.padding, tuple(rest))

    @staticmethod
    def by_patches(y: Tensor, weight: Tensor, window: Window) -> Tensor:
        mirror = window.mirrored
        if mirror is not None:  # patches are cheaper to take apart than to add up
            return Convolved.by_patches(y, weight.flip(2, 3).transpose(0, 1), mirror)
        image: Tensor = Fold.apply(weight.flatten(1).T @ y.flatten(2), window)
        return image

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, weight = ctx.saved_tensors
        return _asked(ctx, lambda w: Convolved.apply(grad, weight, w), lambda w: Correlated.apply(grad, y, w))


class Correlated(_Bilinear):
    """The adjoint in the weight: images and outputs -> a weight, summed over examples."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, window: Window) -> Tensor:
        if in_turn(x):
            shape = (y.shape[1], x.shape[1], *window.size)
            return conv2d_weight(x, shape, y, window.stride, window.padding)
        rows, columns = y.flatten(2), Patches.apply(x, window)  # (B, O, P), (B, K, P)
        # One example is the common case, and a sum over one row would still be a pass.
        one = rows.shape[0] == 1
        flat = rows[0] @ columns[0].T if one else (rows @ columns.transpose(1, 2)).sum(0)
        return flat.reshape(y.shape[1], x.shape[1], *window.size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return _asked(ctx, lambda w: Spread.apply(y, grad, w), lambda w: Convolved.apply(x, grad, w))

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, x: Tensor, y: Tensor, window: Window) -> tuple[Tensor, int]:
        if in_turn(x, in_dims[0]):
            return _one_lane_after_another(cls, in_dims, x, y, window), 0
        # Lanes of patches: one batched product for all of them.
        return torch.vmap(cls.forward, in_dims=in_dims, out_dims=0)(x, y, window), 0


def in_turn(value: Tensor, lanes: int | None = None) -> bool:
    """Are lanes large enough to be convolved one after another, each by the library's own convolution?

    A few examples leave a GPU idle, and lanes are better joined in one product of patches; many fill it, and patches,
    as large as the kernel times the image, are all that it would be waiting for.
    """
    return value.is_cuda and value.shape[0 if lanes is None or lanes != 0 else 1] >= IN_TURN


def _asked(ctx: Any, first: Callable[[Window], Tensor], second: Callable[[Window], Tensor]) -> Any:
    """The derivatives that somebody asked for."""
    wanted = ctx.needs_input_grad
    return first(ctx.window) if wanted[0] else None, second(ctx.window) if wanted[1] else None, None


def _lanes_into_batch(function: Any, lane_axis: int, value: Tensor, *others: Any) -> Tensor:
    value = value.movedim(lane_axis, 0)
    result = function.apply(value.flatten(0, 1), *others)
    return result.unflatten(0, value.shape[:2])


def _one_lane_after_another(function: Any, in_dims: Dims, first: Tensor, second: Tensor, window: Window) -> Tensor:
    count = next(value.shape[axis] for value, axis in zip((first, second), in_dims, strict=False) if axis is not None)
    each = [
        [value] * count if axis is None else value.unbind(axis)
        for value, axis in zip((first, second), in_dims, strict=False)
    ]
    return torch.stack([function.apply(one, other, window) for one, other in zip(*each, strict=True)])


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: str | int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """Ordinary two-dimensional convolutions by the maps above; torch's own for all others."""
    if isinstance(padding, str) or groups != 1 or _pair(dilation) != (1, 1) or input.dim() != 4:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    sides = input.shape[2], input.shape[3]
    window = Window(*sides, (weight.shape[2], weight.shape[3]), _pair(stride), _pair(padding))
    out: Tensor = Convolved.apply(input, weight, window)
    return out if bias is None else out + bias[:, None, None]


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else (value * 2)[:2] if len(value) == 1 else value
    return first, second
