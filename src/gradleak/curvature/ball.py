"""Sharpness: the worst loss that a search finds in a ball around the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.settings import takes
from gradleak.core.tree import Params
from gradleak.curvature.point import Point, explained
from gradleak.engine import Engine
from gradleak.scenario.task import Batch, Task


@dataclass(frozen=True)
class Sharpness:
    """F and F_SAM = max over ||delta|| <= rho of F(theta + delta), as far as a search finds it.

    loss            F
    worst           the largest value found; F_SAM is at least this
    one_step        F(theta + rho G / ||G||), what SAM itself uses: at most `worst`
    gradient_norm   ||G||
    found           the best of each start: those given first, random ones last
    """

    rho: float
    loss: float
    worst: float
    one_step: float
    gradient_norm: float
    found: tuple[float, ...]
    parameters: int

    @property
    def sharpness(self) -> float:
        return self.worst - self.loss

    @property
    def curvature_bound(self) -> float:
        """lambda_max <= 2 / rho^2 (F_SAM - F), up to terms of order rho^2.

        The larger of F(theta +- rho v) is at least their mean, F + rho^2 lambda_max / 2 + O(rho^4): odd orders cancel.
        If v_max was among the starts, it holds for the value found, however good the search was.
        """
        return 2 / self.rho**2 * self.sharpness

    @property
    def printed_bound(self) -> float:
        """As printed: 2 / rho^2 (F_SAM - F + rho ||G||). The last term is not needed."""
        return 2 / self.rho**2 * (self.sharpness + self.rho * self.gradient_norm)

    def record(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("sharpness", "curvature_bound", "printed_bound")}
        return {**asdict(self), "found": list(self.found), **derived}


@dataclass(frozen=True, eq=False, kw_only=True)
class Ascent:
    """Projected gradient ascent in a ball of radius rho, all starts together.

    steps    of length rho / 5
    starts   how many: rho G / ||G||, +- rho v where `top` is given, random points of the sphere for the rest
    top      the eigenvector v of the largest eigenvalue of the Hessian, (d,) in the order of the weights
    """

    top: Tensor | None = None
    steps: int = 20
    starts: int = 5
    seed: int = 0


@takes(Ascent)
def sharpness(
    task: Task,
    weights: Params,
    batch: Batch,
    rho: float = 0.2,
    *,
    buffers: Params | None = None,
    engine: Engine | None = None,
    ascent: Ascent,
) -> Sharpness:
    """The worst loss within `rho` of the weights; the other keywords are the fields of `Ascent`."""
    top, starts = ascent.top, ascent.starts
    if not rho > 0 or ascent.steps < 1:
        raise ValueError(f"rho must be above 0 and steps at least 1; given {rho} and {ascent.steps}.")
    engine = engine or Engine()
    at = Point.at(task, weights, batch, buffers, engine)
    size = at.size
    if top is not None and (tuple(top.shape) != (size,) or not float(top.norm()) > 0):
        raise ValueError(f"top must be a non-zero vector of the {size:,} weights; given shape {tuple(top.shape)}.")

    def value(delta: Tensor, statistics: Params) -> Tensor:
        moved = tree.add(at.weights, tree.unflatten(delta, at.weights))
        return at.task.loss(moved, at.batch, {**at.shared, **statistics})[0]

    with torch.no_grad(), engine.settings(), explained():
        slope, loss = grad_and_value(value)(torch.zeros(size, dtype=torch.float64, device=engine.where), at.statistics)
        if not bool(loss.isfinite()) or not bool(slope.isfinite().all()):
            raise ValueError("The loss or its gradient is not finite here, so there is no sharpness.")
        directions = [slope] if top is None else [slope, top.to(slope), -top.to(slope)]
        if starts < len(directions):
            raise ValueError(f"starts must be at least the {len(directions)} that are given; given {starts}.")
        source = Draws(randomness.key("sharpness", ascent.seed))
        drawn = source.normal((starts - len(directions), size), dtype=torch.float64).to(slope)
        deltas = rho * _unit(torch.cat([torch.stack(directions), drawn]))
        statistics = at.lanes(starts)
        climb: Callable[[Tensor, Params], tuple[Tensor, Tensor]] = vmap(grad_and_value(value))
        best = one_step = loss.expand(starts)
        for step in range(ascent.steps + 1):
            slopes, values = climb(deltas, statistics)
            one_step = values if step == 0 else one_step
            best = torch.maximum(best, values)
            deltas = deltas + rho / 5 * _unit(slopes)
            deltas = deltas / (deltas.norm(dim=1, keepdim=True) / rho).clamp_min(1.0)
    if not bool(best.isfinite().all()):
        raise ValueError(f"The loss is not finite within {rho} of the weights: take a smaller rho.")
    return Sharpness(
        rho=rho,
        loss=float(loss),
        worst=float(best.max()),
        one_step=float(one_step[0]),
        gradient_norm=float(slope.norm()),
        found=tuple(best.tolist()),
        parameters=size,
    )


def _unit(rows: Tensor) -> Tensor:
    """Each row at length one; a row of zeros stays."""
    lengths = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(lengths > 0, lengths, 1.0)
