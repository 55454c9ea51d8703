"""Convex quadratic programs for one lane: a primal-dual interior point with a fixed number of steps.

    minimise 1/2 x'Hx + f'x   subject to   C x <= limit, for every constraint C

Mehrotra's predictor and corrector (SIAM J. Optim. 2, 1992). The host reads no value, so it runs under vmap; a lane that
has converged, or whose factorisation fails, keeps its last iterate. It needs float64: the condition of the factorised
matrix worsens as the gap closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradleak.core.linear import solved

STEPS = 25
SHORTEN = 0.995  # of the step to the nearest boundary


class Constraint(Protocol):
    """C x <= limit. An infinite limit is no constraint, so that lanes with different constraints have one shape."""

    @property
    def limit(self) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor:
        """C x"""
        ...

    def transpose(self, y: Tensor) -> Tensor:
        """C' y"""
        ...

    def add(self, matrix: Tensor, weights: Tensor) -> Tensor:
        """matrix + C' diag(weights) C"""
        ...


@dataclass(frozen=True, eq=False)
class AtLeast:
    """x >= lower"""

    lower: Tensor  # (n,)

    @property
    def limit(self) -> Tensor:
        return -self.lower

    def __call__(self, x: Tensor) -> Tensor:
        return -x

    def transpose(self, y: Tensor) -> Tensor:
        return -y

    def add(self, matrix: Tensor, weights: Tensor) -> Tensor:
        return matrix + torch.diag_embed(weights)


@dataclass(frozen=True, eq=False)
class AtMost:
    """x <= upper"""

    upper: Tensor  # (n,)

    @property
    def limit(self) -> Tensor:
        return self.upper

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def transpose(self, y: Tensor) -> Tensor:
        return y

    def add(self, matrix: Tensor, weights: Tensor) -> Tensor:
        return matrix + torch.diag_embed(weights)


@dataclass(frozen=True, eq=False)
class Rows:
    """G x <= limit"""

    matrix: Tensor  # (m, n)
    limit: Tensor  # (m,)

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix @ x

    def transpose(self, y: Tensor) -> Tensor:
        return self.matrix.T @ y

    def add(self, matrix: Tensor, weights: Tensor) -> Tensor:
        return matrix + self.matrix.T @ (weights[:, None] * self.matrix)


@dataclass(frozen=True, eq=False)
class Over:
    """matrix x / scale - a <= limit, for unknowns (x, a)."""

    matrix: Tensor  # (m, n)
    scale: Tensor
    limit: Tensor  # (m,)

    def __call__(self, x: Tensor) -> Tensor:
        n = self.matrix.shape[1]
        return self.matrix @ x[:n] / self.scale - x[n:]

    def transpose(self, y: Tensor) -> Tensor:
        return torch.cat([self.matrix.T @ y / self.scale, -y])

    def add(self, matrix: Tensor, weights: Tensor) -> Tensor:
        weighted = (weights / self.scale)[:, None] * self.matrix
        side = torch.cat([self.matrix.T @ weighted / self.scale, -weighted.T], dim=1)
        return matrix + torch.cat([side, torch.cat([-weighted, torch.diag_embed(weights)], dim=1)])


@dataclass(frozen=True, eq=False)
class Solution:
    """The point and, per constraint, its multiplier: above zero where the constraint is active."""

    x: Tensor
    multipliers: tuple[Tensor, ...]


def minimise(hessian: Tensor, linear: Tensor, constraints: Sequence[Constraint], x: Tensor | None = None) -> Solution:
    """The minimum. `x` is a guess that need not be feasible. The hessian must be positive semidefinite."""
    if x is None:
        x = torch.zeros_like(linear)
    tiny = torch.finfo(linear.dtype).eps
    scale = hessian.diagonal().abs().mean() + tiny
    if not constraints:
        return Solution(x + solved(_factor(hessian, tiny * scale)[0], -linear - hessian @ x), ())
    # All constraints as one vector; those that are off always have slack 1 and multiplier 0.
    sizes = [constraint.limit.shape[0] for constraint in constraints]
    limit = torch.cat([constraint.limit for constraint in constraints])
    on = torch.isfinite(limit)
    limit = torch.where(on, limit, 0.0)
    count = on.sum().clamp_min(1)

    def forward(at: Tensor) -> Tensor:
        return torch.where(on, torch.cat([constraint(at) for constraint in constraints]), 0.0)

    def backward(y: Tensor) -> Tensor:
        parts = zip(constraints, y.split(sizes), strict=True)
        return torch.stack([constraint.transpose(part) for constraint, part in parts]).sum(0)

    slack = torch.where(on, (limit - forward(x)).abs().clamp_min(1e-2), 1.0)
    multiplier = torch.where(on, linear.abs().max().clamp_min(1e-8), 0.0)
    running = torch.isfinite(linear).all()
    gap = (slack * multiplier).sum() / count
    for _ in range(STEPS):
        dual = hessian @ x + linear + backward(multiplier)
        primal = torch.where(on, forward(x) + slack - limit, 0.0)
        matrix = hessian
        for constraint, weights in zip(constraints, (multiplier / slack).split(sizes), strict=True):
            matrix = constraint.add(matrix, weights)
        factor, good = _factor(matrix, 4 * tiny * scale)

        def direction(complement: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            right = -dual - backward((multiplier * primal - complement) / slack)  # noqa: B023
            dx = solved(factor, right)  # noqa: B023
            ds = torch.where(on, -primal - forward(dx), 0.0)  # noqa: B023
            return dx, ds, torch.where(on, (-complement - multiplier * ds) / slack, 0.0)  # noqa: B023

        _, ds, dm = direction(slack * multiplier)
        ahead = ((slack + _longest(slack, ds) * ds) * (multiplier + _longest(multiplier, dm) * dm)).sum() / count
        centre = (ahead / gap.clamp_min(torch.finfo(gap.dtype).tiny)).clamp(0, 1) ** 3 * gap
        dx, ds, dm = direction(torch.where(on, slack * multiplier + ds * dm - centre, 0.0))
        along, dual_along = _longest(slack, ds), _longest(multiplier, dm)
        new = x + along * dx, slack + along * ds, multiplier + dual_along * dm
        new_gap = (new[1] * new[2]).sum() / count
        finite = torch.stack([torch.isfinite(value).all() for value in new]).all()
        running = running & good & finite & (gap > tiny * tiny)
        keep = running.clone()
        x, slack, multiplier = (torch.where(keep, b, a) for a, b in zip((x, slack, multiplier), new, strict=True))
        gap = torch.where(keep, new_gap, gap)
    return Solution(x, tuple(multiplier.split(sizes)))


def _factor(matrix: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor of the matrix with a small ridge, and whether there is one; else the identity."""
    diagonal = matrix.diagonal()
    tiny = torch.finfo(matrix.dtype).eps
    factor, info = torch.linalg.cholesky_ex(matrix + torch.diag_embed(tiny * diagonal + ridge))
    good = (info == 0) & torch.isfinite(factor).all()
    return torch.where(good, factor, torch.diag_embed(torch.ones_like(diagonal))), good


def _longest(value: Tensor, change: Tensor) -> Tensor:
    """The largest step, 1 at most, that keeps value + step * change positive."""
    falling = change < 0
    ratio = torch.where(falling, -value / torch.where(falling, change, -1.0), torch.inf)
    return (SHORTEN * ratio.min()).clamp(max=1.0)
