"""Does the update determine the data? A certificate from the singular values of one Jacobian.

    r(p) = W (f(p) - u),   f = what the client would upload for the images p in [0, 1] (its rule, defence included),
                           u = the update seen,   W = 1 / ||u_l|| per tensor,   J = dr/dp

Where r is zero up to rounding and J has full column rank, no other images nearby give this update: the leak is proved.
Where k singular values are zero the images lie on a k-dimensional set, and everything orthogonal to it is known.
`certify` asks at a reconstruction, which needs no truth, or, for an auditor, at the truth: could any attack succeed?

What counts as zero depends on the digits of the observation (`rounding_of`). The statement has two limits: it is local
(a second solution far away is possible), and it is about continuous fields that are not given (labels count as known).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.settings import takes
from gradleak.core.tree import Params
from gradleak.engine import Engine
from gradleak.identify.floors import CorrelatedPrior, Floor, Local, triangle
from gradleak.identify.rounding import rounding_of
from gradleak.scenario.client import Order
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.task import Batch, Task

HALF = 0.5  # of the directions: below, "determined up to k dimensions" would sound like more than it is


@dataclass(frozen=True, eq=False)
class Certificate:
    """What the update determines near one point.

    unknowns, equations   n values of the batch in [0, 1] against d entries of the update
    rank                  singular values above `tolerance` times the largest
    singular_values       (n,) float64, descending; relative change of the update per unit of pixels
    residual              sqrt(mean over tensors of ||f_l - u_l||^2 / ||u_l||^2); `rounding` is what it may be
    share                 of the images' variance about each image's own mean, in determined directions
    shift                 root mean square of the Gauss-Newton step from here, in pixels: how far off the solution is
    """

    unknowns: int
    equations: int
    rank: int
    tolerance: float
    singular_values: Tensor
    residual: float
    rounding: float
    share: float
    shift: float
    floor: Floor | None = None

    @property
    def null(self) -> int:
        """Dimensions along which the update does not change."""
        return self.unknowns - self.rank

    @property
    def solved(self) -> bool:
        """Does the point reproduce the update up to rounding?"""
        return self.residual <= self.rounding

    @property
    def largest(self) -> float:
        return float(self.singular_values[0])

    @property
    def smallest(self) -> float:
        return float(self.singular_values[-1])

    @property
    def verdict(self) -> str:
        if not self.solved or self.rank < HALF * self.unknowns:
            return "not determined"
        return f"determined up to {self.null} dimensions" if self.null else "determined"

    @property
    def reason(self) -> str:
        if not math.isfinite(self.residual):
            return "The point, or what the client would upload for it, is not finite, so nothing is certified."
        if not self.solved:
            return (
                f"The point is no solution: the update is reproduced to {self.residual:.1e} only, where rounding "
                f"explains {self.rounding:.0e}, so nothing is certified. The search has not arrived, the update is "
                "noisy, or Knowledge is not the client's recipe."
            )
        if not self.null:
            return (
                f"The update fixes all {self.unknowns:,} values: it is reproduced to {self.residual:.1e}, and no other "
                f"images nearby give it (smallest singular value {self.smallest:.1e}, largest {self.largest:.1e})."
            )
        fixed = (
            f"{self.rank:,} of {self.unknowns:,} directions are fixed; along the other {self.null:,} the images can "
            f"change and the update stays the same. {self.share:.0%} of the images' variance is fixed."
        )
        return fixed if self.rank >= HALF * self.unknowns else f"Fewer than half are fixed: {fixed}"

    def __str__(self) -> str:
        text = (
            f"{self.verdict}. {self.reason} Rank {self.rank:,} of {self.unknowns:,} unknowns in {self.equations:,} "
            f"equations, at a tolerance of {self.tolerance:.0e} of the largest singular value."
        )
        if self.floor is None:
            return text
        return (
            f"{text} Under noise of {self.floor.noise:.0e} of each tensor's root mean square no attacker gets below a "
            f"mean squared error of {self.floor.mse:.1e}, to first order."
        )

    def record(self) -> dict[str, int | float | str | None]:
        """As a row of a run holds it."""
        names = ("unknowns", "equations", "rank", "null", "tolerance", "residual", "rounding", "share", "shift")
        figures = {name: getattr(self, name) for name in (*names, "largest", "smallest", "verdict", "reason")}
        return {**figures, "floor": None if self.floor is None else self.floor.mse}


@takes(CorrelatedPrior)
def certify(
    task: Task,
    seen: Observation,
    batch: Batch,
    knows: Knowledge = Knowledge(),
    *,
    tolerance: float | None = None,
    noise: float | None = None,
    order: Order | None = None,
    how: CorrelatedPrior,
) -> Certificate:
    """What `seen` determines at `batch`: a reconstruction of that target, or the truth.

    tolerance   relative rank tolerance; None takes what the digits of the observation allow
    noise       also compute the floor of `noise_floor`
    order       rows of each of the client's minibatches; None: in order

    The other keywords are the fields of `CorrelatedPrior`: `prior`, `precision`, `block` and `engine`.
    """
    if tolerance is not None and not 0 <= tolerance < 1:
        raise ValueError(f"tolerance is a share of the largest singular value, from 0 to below 1; given {tolerance}.")
    rounding = rounding_of(seen)
    tolerance = rounding.rank if tolerance is None else tolerance
    local = Local.at(task, seen, batch, knows, how, order)
    unknowns, equations = local.rows.shape
    if not local.finite:
        nothing = torch.zeros(unknowns, dtype=torch.float64)
        return Certificate(
            unknowns, equations, 0, tolerance, nothing, math.inf, rounding.residual, share=0.0, shift=math.inf
        )
    # Singular values of J from those of its triangular factor: J^T J would square the condition number.
    _, values, directions = torch.linalg.svd(triangle(local.rows), full_matrices=False)
    values = torch.cat([values, values.new_zeros(unknowns - len(values))])
    rank = int((values > tolerance * values[0]).sum())
    fixed = directions[:rank]  # (rank, n)
    step = (fixed @ (local.rows @ local.residual)) / values[:rank].square()
    return Certificate(
        unknowns,
        equations,
        rank,
        tolerance,
        singular_values=values.cpu(),
        residual=float(local.residual.norm()) / math.sqrt(len(local.scene.update)),
        rounding=rounding.residual,
        share=_share(local.pixels, fixed),
        shift=float(step.norm()) / math.sqrt(unknowns),
        floor=None if noise is None else local.floor(noise, how.precision, how.prior, rounding),
    )


@takes(CorrelatedPrior)
def noise_floor(
    task: Task,
    seen: Observation,
    batch: Batch,
    knows: Knowledge = Knowledge(),
    *,
    noise: float = 0.0,
    how: CorrelatedPrior,
) -> Floor:
    """The least mean squared error under noise of std `noise` x RMS of each tensor, and what the defence itself adds.

    The other keywords are the fields of `CorrelatedPrior`. Entries without any noise are known up to `Rounding.rank`. A
    tensor of zeros takes the RMS of the whole update.
    """
    if not noise >= 0:
        raise ValueError(f"noise is a share of each tensor's root mean square, at least 0; given {noise}.")
    local = Local.at(task, seen, batch, knows, how)
    if not local.finite:
        raise ValueError("The batch, or the update the client would send for it, is not finite: there is no floor.")
    return local.floor(noise, how.precision, how.prior, rounding_of(seen))


@dataclass(frozen=True, eq=False)
class Identifiability:
    """For `Audit(analyses=[...])`: the certificate at the TRUTH. Could any attack with this knowledge succeed?

    `knows` holds the client's recipe and its defence, if it has one. `noise` adds the floor of the error.
    """

    knows: Knowledge = Knowledge()
    tolerance: float | None = None
    noise: float | None = None
    block: int = 64
    engine: Engine = Engine()

    def __call__(self, task: Task, seen: Observation, batch: Batch) -> Mapping[str, float]:
        how = CorrelatedPrior(block=self.block, engine=self.engine)
        certificate = certify(task, seen, batch, self.knows, tolerance=self.tolerance, noise=self.noise, how=how)
        names = ("unknowns", "rank", "null", "share", "residual", "tolerance", "largest", "smallest")
        figures = {name: float(getattr(certificate, name)) for name in names}
        return figures if certificate.floor is None else {**figures, "floor": certificate.floor.mse}

    def __repr__(self) -> str:
        # Run files contain this text: it must be the same in every process, so without addresses of functions.
        known = re.sub(r" at 0x[0-9a-f]+", "", repr(self.knows))
        return f"Identifiability({known}, tolerance={self.tolerance}, noise={self.noise})"


def _share(pixels: Params, fixed: Tensor) -> float:
    """Share of the variance about each image's own mean that lies in the span of `fixed` (rank, n)."""
    rows = {name: value.reshape(len(value), -1) for name, value in pixels.items()}
    about = tree.flatten(tree.map(lambda p: p - p.mean(1, keepdim=True), rows))
    total = float(about.square().sum())
    if total == 0:  # constant images have no variance: take the share of directions
        return fixed.shape[0] / fixed.shape[1]
    return min(1.0, float((fixed @ about).square().sum()) / total)
