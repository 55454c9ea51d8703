"""First-order optimisers for one lane, and their schedules. Everything that changes with the step is a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.parts.protocols import LaneObjective, Optimiser, Scored
from gradleak.parts.view import Step

Schedule: TypeAlias = Callable[[Step], "Tensor | float"]
Transform: TypeAlias = Callable[[Tensor, Step], Tensor]


def constant(now: Step) -> float:
    """A constant learning rate."""
    return 1.0


@dataclass(frozen=True)
class ExponentialDecay:
    """Times factor^(step / every), continuously."""

    factor: float
    every: int = 1

    def __call__(self, now: Step) -> Tensor:
        return torch.exp(now.step * (math.log(self.factor) / self.every))


@dataclass(frozen=True)
class StepDecay:
    """Times `factor` at each of the given fractions of the budget (IG: 3/8, 5/8, 7/8 as N / 2.667, 1.6, 1.142)."""

    divisors: tuple[float, ...] = (2.667, 1.6, 1.142)
    factor: float = 0.1

    def __call__(self, now: Step) -> Tensor:
        # `//`, as the authors' code has it: 4800 // 1.6 is 2999, floor(4800 / 1.6) is 3000.
        passed = sum((now.step >= now.total // divisor).to(now.step.dtype) for divisor in self.divisors)
        return torch.pow(self.factor, passed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class CosineDecay:
    """A linear warm-up over `warmup` steps, then half a cosine to zero."""

    warmup: int = 0

    def __call__(self, now: Step) -> Tensor:
        rest = max(1, now.total - self.warmup)
        fall = 0.5 * (1 + torch.cos(math.pi * ((now.step - self.warmup) / rest).clamp(0, 1)))
        return fall * ((now.step + 1) / self.warmup).clamp(max=1) if self.warmup else fall


@dataclass(frozen=True)
class RampedDecay:
    """Up linearly over the share `up` of the steps, down by half a cosine over the last `down` (GIFD: 0.05, 0.75).

    min(1, t / up) * (1 - cos(pi min(1, (1 - t) / down))) / 2 at t = step / total.
    """

    up: float = 0.05
    down: float = 0.75

    def __post_init__(self) -> None:
        require_positive(self, whole=(), real=("up", "down"))

    def __call__(self, now: Step) -> Tensor:
        rest = ((1 - now.fraction) / self.down).clamp(max=1)
        return (now.fraction / self.up).clamp(max=1) * 0.5 * (1 - torch.cos(math.pi * rest))


class Window(Protocol):
    """When an unknown moves: is it `due` at this step, and how often has it moved (`count`), this step included?"""

    def due(self, now: Step) -> Tensor: ...

    def count(self, now: Step) -> Tensor: ...


@dataclass(frozen=True)
class OddBlocks:
    """Blocks of `size` steps: at rest in the first, moving in the second, and so on (floor(step / size) is odd).

    Reference: Huang et al., ARES 2025, who keep the noise of a diffusion client near its law this way.
    """

    size: int = 50

    def __post_init__(self) -> None:
        require_positive(self, whole=("size",))

    def due(self, now: Step) -> Tensor:
        return torch.remainder(torch.floor(now.step / self.size), 2) == 1

    def count(self, now: Step) -> Tensor:
        pairs = torch.floor(now.step / (2 * self.size))
        return pairs * self.size + (now.step - (2 * pairs + 1) * self.size + 1).clamp(0, self.size)


def require_positive(owner: object, whole: tuple[str, ...], real: tuple[str, ...] = ()) -> None:
    """Refuse settings that are not positive."""
    for name in (*whole, *real):
        value = getattr(owner, name)
        kinds = int if name in whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            kind = "whole number" if name in whole else "number"
            raise ValueError(f"{name} must be a positive {kind}; given {value!r}.")


def _sign(value: Tensor) -> Tensor:
    """The sign, or NaN: torch.sign turns NaN into 0, which would hide a diverged lane."""
    return torch.where(value.isnan(), value, value.sign())


def plain(gradient: Tensor, now: Step) -> Tensor:
    """The gradient as it is."""
    return gradient


def sign(gradient: Tensor, now: Step) -> Tensor:
    """The signs of the gradient: every entry moves by the learning rate (IG)."""
    return _sign(gradient)


def soft_sign(gradient: Tensor, now: Step) -> Tensor:
    """tanh(g s) / s with s falling from 1 to 0: signs at first, the plain gradient at the end."""
    sharpness = (1 - now.fraction).clamp_min(1e-3)
    return torch.tanh(gradient * sharpness) / sharpness


@dataclass(frozen=True, kw_only=True)
class FirstOrder(Optimiser):
    """What all first-order methods share: schedule, settings of single unknowns, gradient transform, noise.

    rates       learning rate of a named unknown, if it differs from `lr`
    every       a named unknown moves only at every so many steps
    windows     a named unknown, and its memory, change only in its window. Names that are no unknown are ignored: the
                threat model may give the field
    transform   applied to the gradient first, such as its sign
    noise       Langevin noise: lr * noise * N(0, 1) is added to each move
    """

    lr: float
    steps: int
    schedule: Schedule = constant
    rates: Mapping[str, float] = field(default_factory=dict)
    every: Mapping[str, int] = field(default_factory=dict)
    windows: Mapping[str, Window] = field(default_factory=dict)
    transform: Transform = plain
    noise: float = 0.0
    weight_decay: float = 0.0
    graphable: bool = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps",), real=("lr",))
        if twice := self.every.keys() & self.windows.keys():
            raise ValueError(f"every and windows both name {', '.join(sorted(twice))}: keep one of them.")

    def memory(self, v: Tensor) -> Tree:
        raise NotImplementedError

    def move(self, gradient: Tensor, memory: Tree, count: Tensor, name: str = "") -> tuple[Tensor, Tree]:
        """The step of one tensor, without the learning rate.

        `count`: how often it has moved, this time included; `name`: of the unknown that the tensor belongs to.
        """
        raise NotImplementedError

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        return {"memory": tree.map(self.memory, v), "key": problem.key}

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        gradient, scored = problem.value_and_grad(v)
        factor = self.schedule(now)
        moved: Tree = {}
        memory: Tree = {}
        for position, name in enumerate(v):
            rate, interval = self.rates.get(name, self.lr) * factor, self.every.get(name, 1)
            window = self.windows.get(name)
            count = torch.floor(now.step / interval) + 1 if window is None else window.count(now).clamp_min(1)
            moved[name], memory[name] = self._move(
                name, v[name], gradient[name], state["memory"][name], rate, count, now, (state["key"], position)
            )
            if interval > 1 or window is not None:
                due = torch.remainder(now.step, interval) == 0 if window is None else window.due(now)
                moved[name] = _either(due, moved[name], v[name])
                memory[name] = _either(due, memory[name], state["memory"][name])
        return problem.project(moved), {"memory": memory, "key": state["key"]}, scored

    def _move(
        self,
        unknown: str,
        v: Any,
        gradient: Any,
        memory: Any,
        rate: Any,
        count: Tensor,
        now: Step,
        source: tuple[Tensor, int],
    ) -> tuple[Any, Any]:
        if isinstance(v, Mapping):  # nested unknowns, such as a control point by parameter name
            pairs = {
                name: self._move(
                    unknown, v[name], gradient[name], memory[name], rate, count, now, (source[0], source[1] + 16 * i)
                )
                for i, name in enumerate(v, start=1)
            }
            return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
        step, memory = self.move(self.transform(gradient, now), memory, count, unknown)
        if self.weight_decay:
            step = step + self.weight_decay * v
        if self.noise:
            key, stream = source
            drawn = Draws(key).normal(tuple(v.shape), stream=1000 + stream, step=now.step.long(), dtype=v.dtype)
            step = step + self.noise * drawn
        return v - rate * step, memory


@dataclass(frozen=True, kw_only=True)
class Adam(FirstOrder):
    """Adam. Reference: Kingma and Ba, ICLR 2015.

    eps         added to the root of the second moment: entries with a much smaller gradient hardly move
    epsilons    eps of a named unknown, if it differs
    """

    lr: float = 0.1
    steps: int = 1000
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    epsilons: Mapping[str, float] = field(default_factory=dict)

    def memory(self, v: Tensor) -> Tree:
        return {"first": torch.zeros_like(v), "second": torch.zeros_like(v)}

    def move(self, gradient: Tensor, memory: Tree, count: Tensor, name: str = "") -> tuple[Tensor, Tree]:
        b1, b2 = self.betas
        first = b1 * memory["first"] + (1 - b1) * gradient
        second = b2 * memory["second"] + (1 - b2) * gradient * gradient
        c1, c2 = 1 - torch.pow(b1, count.double()), 1 - torch.pow(b2, count.double())  # float32 would lose 5e-5 of c2
        eps = self.epsilons.get(name, self.eps)
        step = (first / c1.to(first.dtype)) / ((second / c2.to(second.dtype)).sqrt() + eps)
        return step, {"first": first, "second": second}


@dataclass(frozen=True, kw_only=True)
class SignedAdam(Adam):
    """Adam on the sign of the gradient (IG)."""

    transform: Transform = sign


@dataclass(frozen=True, kw_only=True)
class Lion(FirstOrder):
    """The sign of an interpolated momentum; weight decay is decoupled. Reference: Chen et al. 2023."""

    lr: float = 0.01
    steps: int = 1000
    betas: tuple[float, float] = (0.9, 0.99)

    def memory(self, v: Tensor) -> Tree:
        return {"momentum": torch.zeros_like(v)}

    def move(self, gradient: Tensor, memory: Tree, count: Tensor, name: str = "") -> tuple[Tensor, Tree]:
        b1, b2 = self.betas
        momentum = memory["momentum"]
        step = _sign(b1 * momentum + (1 - b1) * gradient)
        return step, {"momentum": b2 * momentum + (1 - b2) * gradient}


@dataclass(frozen=True)
class Still(Optimiser):
    """Evaluates the objective once and moves nothing: for controls and closed forms."""

    steps: int = 1
    graphable: bool = True

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        return v, state, problem.value(v)


def _either(condition: Tensor, a: Any, b: Any) -> Any:
    return tree.where(condition, a, b) if isinstance(a, Mapping) else torch.where(condition, a, b)
