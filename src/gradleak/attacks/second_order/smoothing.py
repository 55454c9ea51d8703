"""The attacker's smoothed view of a network with kinks: the start of a continuation.

The gradient of a ReLU network jumps wherever a unit switches, and a second-order step is valid only up to the next
jump. As the sharpness beta grows, log(1 + exp(beta a)) / beta tends to max(a, 0), and log(mean exp(beta a)) / beta over
a window to its maximum; both have all derivatives. Stages with smoothed networks, then sharper ones, then the real one,
follow the solution.

`SmoothActivations` swaps functions while it is active, whether modules or the user's own code call them. It does not
change the model. ELU and similar functions are not swapped: at alpha = 1 their first derivative has no jump.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradleak.parts.view import TargetView
from gradleak.scenario.task import Batch, Objective, Task

Smooth: TypeAlias = Callable[..., Tensor]
"""(sharpness, and the arguments of the function it replaces) -> the smooth value."""

LINEAR_FROM = 40.0  # softplus(z) = z there, to the last digit of float64 (exp(-40) < 2^-57); exp(40) fits float32


@dataclass(frozen=True)
class Smoothed:
    """A view for `Stage.view`: the same scene, with the kinks of the network rounded off over a width of 1 / sharpness.

    A ReLU is off by at most log(2) / sharpness, at its kink, and exponentially little away from it.
    """

    sharpness: float  # beta

    def __post_init__(self) -> None:
        if not 0 < self.sharpness < math.inf:
            raise ValueError(f"sharpness must be positive and finite; given {self.sharpness}. No view is the limit.")

    def __call__(self, scene: TargetView) -> TargetView:
        return replace(scene, task=replace(scene.task, objective=SmoothObjective(scene.task.objective, self.sharpness)))


@dataclass(frozen=True, eq=False)
class SmoothObjective:
    """An objective, run under `SmoothActivations`. Derivatives are taken outside: only the forward pass is swapped."""

    objective: Objective
    sharpness: float

    def to(self, device: torch.device | str, dtype: torch.dtype) -> SmoothObjective:
        return replace(self, objective=self.objective.to(device, dtype)) if hasattr(self.objective, "to") else self

    def __call__(self, call: Callable[..., Any], batch: Batch) -> Tensor:
        with SmoothActivations(self.sharpness):
            return self.objective(call, batch)


class SmoothActivations(TorchFunctionMode):
    """While active, smooth functions replace those with kinks; no other function changes."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        smooth = _instead(func, args, kwargs)
        return func(*args, **kwargs) if smooth is None else smooth(self.sharpness, *args, **kwargs)


class _Watch(TorchFunctionMode):
    """Notes whether `SmoothActivations` would replace a function, and replaces none."""

    met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.met = self.met or _instead(func, args, kwargs) is not None
        return func(*args, **kwargs)


def kinked(task: Task) -> bool:
    """Does a forward pass of the objective meet a function that `SmoothActivations` replaces?"""
    with torch.no_grad(), _Watch() as watch:
        task.loss(task.weights(), task.blank(2))  # two examples: BatchNorm refuses a lone value per channel
    return watch.met


# --- activations ----------------------------------------------------------------------------------------------------


def _relu(beta: float, input: Tensor) -> Tensor:
    return F.softplus(input, beta, LINEAR_FROM)


def _leaky_relu(beta: float, input: Tensor, negative_slope: float = 0.01) -> Tensor:
    return negative_slope * input + (1 - negative_slope) * _relu(beta, input)


def _prelu(beta: float, input: Tensor, weight: Tensor) -> Tensor:
    slope = weight.reshape(-1, *[1] * max(input.dim() - 2, 0))  # one, or one per channel
    return slope * input + (1 - slope) * _relu(beta, input)


def _hardtanh(beta: float, input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return min_val + _relu(beta, input - min_val) - _relu(beta, input - max_val)


def _relu6(beta: float, input: Tensor) -> Tensor:
    return _hardtanh(beta, input, 0.0, 6.0)


def _hardsigmoid(beta: float, input: Tensor) -> Tensor:
    return _relu6(beta, input + 3) / 6


def _hardswish(beta: float, input: Tensor) -> Tensor:
    return input * _hardsigmoid(beta, input)


def _clamp(beta: float, input: Tensor, min: float = 0, max: None = None) -> Tensor:
    return _relu(beta, input)


def _from_zero(input: Tensor, min: Any = None, max: Any = None) -> bool:
    return max is None and isinstance(min, int | float) and min == 0


def _new(smooth: Smooth) -> Smooth:
    """The function with torch's argument `inplace`."""

    def run(beta: float, input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        return (_written(smooth) if inplace else smooth)(beta, input, *args, **kwargs)

    return run


def _written(smooth: Smooth) -> Smooth:
    """The function in place: a model may call it only for this effect."""

    def run(beta: float, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.copy_(smooth(beta, input.clone(), *args, **kwargs))  # a clone: backward needs what was here before

    return run


# --- pools ----------------------------------------------------------------------------------------------------------
# A mean over the entries of a window, not a sum. Both tend to the maximum, a mean from below, a sum from above, by at
# most log(size) / beta; but a mean does not change equal entries, and becomes an average pool for small beta. A sum's
# shift adds up over layers: at beta = 1 the error of the gradient of a CNN with three 2x2 pools (`cnn-lewis`) is 11
# times its norm, with a mean 2 times; from beta = 16 on they agree. Sums of exponentials are separable, so windows are
# processed axis by axis.


@dataclass(frozen=True)
class _MaxPool:
    """A smooth max-pool over the last `axes` axes, called as torch's own."""

    axes: int

    def __call__(
        self,
        beta: float,
        input: Tensor,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor:
        sizes, strides = _each(kernel_size, self.axes), _each(stride or kernel_size, self.axes)
        paddings, dilations = _each(padding, self.axes), _each(dilation, self.axes)

        def log_sums(value: Tensor) -> Tensor:
            for axis in range(-self.axes, 0):
                value = _pool_axis(value, axis, sizes[axis], strides[axis], paddings[axis], dilations[axis], ceil_mode)
            return value

        entries = log_sums(input.new_zeros(input.shape[-self.axes :]))  # log of the entries; fewer at a border
        return (log_sums(beta * input) - entries) / beta


def _pool_axis(value: Tensor, axis: int, size: int, stride: int, padding: int, dilation: int, ceil: bool) -> Tensor:
    side, reach = value.shape[axis], dilation * (size - 1) + 1
    outputs = (side + 2 * padding - reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (outputs - 1) * stride >= side + padding:  # no window may begin behind the image
        outputs -= 1
    span = (outputs - 1) * stride + 1  # from the first to the last window's beginning
    behind = max(span - 1 + reach - side - padding, 0)
    if padding or behind:
        value = F.pad(value, (*[0, 0] * (-axis - 1), padding, behind), value=-torch.inf)  # exp(-inf) = 0: absent
    if stride == size and dilation == 1:
        return value.narrow(axis, 0, outputs * size).unflatten(axis, (outputs, size)).logsumexp(axis)
    last = value.movedim(axis, -1)
    entries = [last[..., at : at + span : stride] for at in range(0, reach, dilation)]
    return torch.stack(entries).logsumexp(0).movedim(-1, axis)


def _adaptive_max_pool(axes: int, beta: float, input: Tensor, output_size: Any, return_indices: bool = False) -> Tensor:
    value = beta * input
    for axis, wanted in zip(range(-axes, 0), _each(output_size, axes), strict=True):
        side = value.shape[axis]
        outputs = side if wanted is None else wanted
        bounds = [(at * side // outputs, -(-(at + 1) * side // outputs)) for at in range(outputs)]
        value = torch.stack([value.narrow(axis, a, b - a).logsumexp(axis) - math.log(b - a) for a, b in bounds], axis)
    return value / beta


def _with_indices(*args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError(
        "A smoothed max-pool has no indices: every entry of a window counts. Pool without return_indices=True, or "
        "attack without continuation."
    )


def _each(value: Any, axes: int) -> tuple[Any, ...]:
    several = tuple(value) if isinstance(value, Sequence) else (value,)
    return several * axes if len(several) == 1 else several


# --- which function replaces which ----------------------------------------------------------------------------------

_CLAMPS = (torch.clamp, torch.clip, torch.clamp_min, Tensor.clamp, Tensor.clip, Tensor.clamp_min)
_CLAMPS_ = (torch.clamp_, torch.clip_, torch.clamp_min_, Tensor.clamp_, Tensor.clip_, Tensor.clamp_min_)

_NEW: dict[Smooth, tuple[Any, ...]] = {
    _relu: (F.relu, torch.relu, Tensor.relu),
    _leaky_relu: (F.leaky_relu,),
    _prelu: (F.prelu, Tensor.prelu),
    _hardtanh: (F.hardtanh,),
    _relu6: (F.relu6,),
    _hardsigmoid: (F.hardsigmoid,),
    _hardswish: (F.hardswish,),
    _clamp: _CLAMPS,
}
_IN_PLACE: dict[Smooth, tuple[Any, ...]] = {
    _relu: (torch.relu_, Tensor.relu_),
    _leaky_relu: (F.leaky_relu_,),
    _hardtanh: (F.hardtanh_,),
    _clamp: _CLAMPS_,
}
# F.max_pool2d calls one of two functions, depending on return_indices; each has its own name.
_POOLS: dict[Any, Smooth] = {
    F.max_pool1d: _MaxPool(1),
    F.max_pool2d: _MaxPool(2),
    F.max_pool3d: _MaxPool(3),
    torch.max_pool1d: _MaxPool(1),
    torch.max_pool2d: _MaxPool(2),
    torch.max_pool3d: _MaxPool(3),
    F.adaptive_max_pool1d: partial(_adaptive_max_pool, 1),
    F.adaptive_max_pool2d: partial(_adaptive_max_pool, 2),
    F.adaptive_max_pool3d: partial(_adaptive_max_pool, 3),
    F.max_pool1d_with_indices: _with_indices,
    F.max_pool2d_with_indices: _with_indices,
    F.max_pool3d_with_indices: _with_indices,
    F.adaptive_max_pool1d_with_indices: _with_indices,
    F.adaptive_max_pool2d_with_indices: _with_indices,
    F.adaptive_max_pool3d_with_indices: _with_indices,
}
_INSTEAD: dict[Any, Smooth] = {
    **{function: _new(smooth) for smooth, functions in _NEW.items() for function in functions},
    **{function: _written(smooth) for smooth, functions in _IN_PLACE.items() for function in functions},
    **_POOLS,
}
_ONLY_FROM_ZERO = frozenset(chain(_CLAMPS, _CLAMPS_))


def _instead(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Smooth | None:
    """The smooth function for this call, or None. A clamp at zero is a ReLU; others guard divisions or indices."""
    smooth = _INSTEAD.get(func)
    if smooth is None or (func in _ONLY_FROM_ZERO and not _from_zero(*args, **kwargs)):
        return None
    input = args[0] if args else kwargs["input"]
    return smooth if input.is_floating_point() else None
