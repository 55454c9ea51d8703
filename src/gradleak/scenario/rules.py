"""Client optimisers as pure rules: `step(weights, gradient, state, lr) -> (decrease, state)`, differentiable.

A rule returns what is SUBTRACTED from the weights, so that the update is summed without the rounding of the weights.
`observe(wire="weights")` adds the rounding of a float32 client that returns weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.tree import Params, Tree

Schedule: TypeAlias = Callable[[int, int], float]
"""(step, total steps) -> factor on the learning rate."""


def constant(step: int, total: int) -> float:
    """The same rate in every step."""
    return 1.0


def cosine_decay(step: int, total: int) -> float:
    """Half a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / total))


class Rule(Protocol):
    """A client's optimiser, pure: state is passed and returned; `step` returns what is SUBTRACTED from the weights."""

    def init(self, weights: Params) -> Tree: ...

    def step(self, weights: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]: ...


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent as torch.optim.SGD defines it, with momentum, dampening, Nesterov, weight decay."""

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def init(self, weights: Params) -> Tree:
        return {}

    def step(self, weights: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]:
        if self.weight_decay:
            gradient = tree.add(gradient, weights, self.weight_decay)
        if self.momentum:
            # torch starts the buffer at the first gradient itself, undampened.
            started = "velocity" in state
            velocity = (
                tree.add(tree.scale(state["velocity"], self.momentum), gradient, 1 - self.dampening)
                if started
                else gradient
            )
            state = {"velocity": velocity}
            gradient = tree.add(gradient, velocity, self.momentum) if self.nesterov else velocity
        return tree.scale(gradient, lr), state

    def gains(self, rates: Sequence[float | Tensor]) -> list[float | Tensor]:
        """How far one unit of gradient in each step moves the weights by the last step, without weight decay."""
        gains, ahead = list[float | Tensor](), 0.0 * rates[0]  # ahead: how far one unit of velocity still goes
        for number, rate in reversed(list(enumerate(rates))):
            ahead = rate + self.momentum * ahead
            entered = ahead if number == 0 or not self.momentum else (1 - self.dampening) * ahead
            gains.append(rate + self.momentum * entered if self.nesterov else entered)
        return gains[::-1]

    def way(self, rates: Sequence[float]) -> float:
        """How far steps of these rates go along a constant gradient of length one, without weight decay."""
        return float(sum(self.gains(rates)))


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam; `decoupled=True` is AdamW. Reference: Kingma and Ba, ICLR 2015; Loshchilov and Hutter, ICLR 2019."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def init(self, weights: Params) -> Tree:
        count = torch.zeros((), dtype=tree.like(weights).dtype, device=tree.like(weights).device)
        return {"first": tree.zeros_like(weights), "second": tree.zeros_like(weights), "count": count}

    def step(self, weights: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]:
        if self.weight_decay and not self.decoupled:
            gradient = tree.add(gradient, weights, self.weight_decay)
        b1, b2 = self.betas
        count = state["count"] + 1
        # In float64: 1 - 0.999 ** count in float32 is off by 5e-5 at the first step, and torch.optim's is not.
        c1, c2 = 1 - b1 ** count.double(), 1 - b2 ** count.double()
        # All tensors in one row: a deep network has hundreds, and Adam on each launches two dozen kernels.
        in_order = [{name: each[name] for name in gradient} for each in (gradient, state["first"], state["second"])]
        g, m, v = (tree.flatten(each) for each in in_order)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        # safe_sqrt: a coordinate whose gradient is exactly zero must not make the replay's derivative infinite.
        move = lr * (m / c1.to(m.dtype)) / (tree.safe_sqrt(v / c2.to(v.dtype)) + self.eps)
        decrease, first, second = (tree.unflatten(row, gradient) for row in (move, m, v))
        if self.weight_decay and self.decoupled:
            decrease = tree.add(decrease, weights, lr * self.weight_decay)
        return decrease, {"first": first, "second": second, "count": count}


@dataclass(frozen=True, kw_only=True)
class Lion:
    """Sign of an interpolated momentum. Reference: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def init(self, weights: Params) -> Tree:
        return {"momentum": tree.zeros_like(weights)}

    def step(self, weights: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]:
        b1, b2 = self.betas
        momentum = state["momentum"]
        decrease = tree.map(lambda m, g: lr * torch.sign(b1 * m + (1 - b1) * g), momentum, gradient)
        if self.weight_decay:
            decrease = tree.add(decrease, weights, lr * self.weight_decay)
        return decrease, {"momentum": tree.map(lambda m, g: b2 * m + (1 - b2) * g, momentum, gradient)}
