"""What Lanczos runs tell about a spectrum: estimates, each with its errors.

Everything here is computed from the nodes and weights of `lanczos.py`, which stand for the eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DAMPING = 1e-3  # lambda; in units of H it is its root, 0.03: an eigenvalue far below adds nothing to the excess
DIGITS = 1e-8  # of a value: a quadrature error below this needs no further steps, however small the other error is


@dataclass(frozen=True)
class SampleMean:
    """A mean over random vectors, and its standard error."""

    value: float
    standard_error: float

    @staticmethod
    def of(samples: Tensor) -> SampleMean:
        """From one value per random vector."""
        return SampleMean(float(samples.mean()), float(samples.std()) / math.sqrt(len(samples)))

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4g} +- {self.standard_error:.2g}"

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "standard_error": self.standard_error}


@dataclass(frozen=True)
class Counted(SampleMean):
    """An estimate by quadrature: its error has a second part, which more random vectors do not reduce."""

    quadrature_error: float = 0.0

    @property
    def error(self) -> float:
        """One standard deviation over random vectors, combined with the estimated bias; not a bound."""
        return math.hypot(self.standard_error, self.quadrature_error)

    def __str__(self) -> str:
        return f"{self.value:.4g} +- {self.error:.2g}"

    def to_json(self) -> dict[str, float]:
        return {**super().to_json(), "quadrature_error": self.quadrature_error, "error": self.error}


@dataclass(frozen=True, eq=False)
class Extremes:
    """Both ends of the spectrum, by algebraic value: of an indefinite matrix the lowest may be larger in magnitude.

    residuals   ||H y - t y|| of the two: an eigenvalue lies within this distance of t
    accepted    are both below `tolerance`, relative to t? An end near zero is compared with 1e-3 of the other
    vectors     (2, d): the eigenvectors of unit length, the largest entry in magnitude positive; None where not kept
    """

    lowest: float
    highest: float
    residuals: tuple[float, float]
    accepted: bool
    steps: int
    vectors: Tensor | None = field(default=None, repr=False)

    @property
    def largest(self) -> float:
        """Of the two, the one of largest magnitude, with its sign."""
        return max(self.lowest, self.highest, key=abs)

    @property
    def top(self) -> Tensor:
        """(d,): the eigenvector of the highest eigenvalue."""
        if self.vectors is None:
            raise ValueError("These extremes have no vectors: call extremes(operator), which keeps them.")
        return self.vectors[1]

    def to_json(self) -> dict[str, Any]:
        return {
            "lowest": self.lowest,
            "highest": self.highest,
            "residuals": list(self.residuals),
            "accepted": self.accepted,
            "steps": self.steps,
        }


@dataclass(frozen=True, eq=False)
class Density:
    """Share of eigenvalues per unit, on an even grid; `width` is the deviation of the Gaussian that smooths a node."""

    grid: Tensor
    values: Tensor
    width: float

    def to_json(self) -> dict[str, Any]:
        return {"grid": self.grid.tolist(), "values": self.values.tolist(), "width": self.width}


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What k runs of m steps tell about d eigenvalues: nodes (k, m), weights (k, m) that sum to one, residuals (k, m).

    earlier   the same runs after m/2 and after 3m/4 steps
    ended     (k,) runs that have reached their whole subspace: their quadrature is exact
    """

    size: int
    nodes: Tensor
    weights: Tensor
    residuals: Tensor
    earlier: tuple[Spectrum, ...] = field(default=(), repr=False)
    ended: Tensor | None = field(default=None, repr=False)

    @property
    def steps(self) -> int:
        return self.nodes.shape[1]

    def traces(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """(k,): one estimate of tr f(H) per random vector."""
        return self.size * (self.weights * function(self.nodes)).sum(1)

    def gaps(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """(2, k): how far `traces` has moved since m/2 and since 3m/4 steps. Runs that ended are exact, and have none.

        The larger mean of the two rows estimates the error of the quadrature.
        """
        if not self.earlier or self.ended is None:
            raise ValueError("This spectrum lacks the earlier steps that judge it: use Tridiagonal.spectrum.")
        moved = torch.stack([self.traces(function) - each.traces(function) for each in self.earlier])
        return torch.where(self.ended, 0.0, moved)

    def count(self, damping: float = DAMPING) -> Counted:
        """About how many eigenvalues are larger than sqrt(damping) in magnitude, with both errors.

        A step function is the hardest case for a quadrature: a node stands for many eigenvalues, and where it crosses
        the threshold the figure jumps, up in one run and down in another. So the gaps are averaged without their signs:
        with signs, on one of the tests' networks, they cancel after 80 steps and understate the error threefold.
        """
        beyond = lambda t: (t.abs() > math.sqrt(damping)).to(t.dtype)  # noqa: E731
        mean = SampleMean.of(self.traces(beyond))
        return Counted(mean.value, mean.standard_error, float(self.gaps(beyond).abs().mean(1).max()))

    def extremes(self, tolerance: float = 1e-3) -> Extremes:
        """The outermost nodes of all runs, which lie inside the spectrum."""
        low, high = int(self.nodes[:, 0].argmin()), int(self.nodes[:, -1].argmax())
        ends = float(self.nodes[low, 0]), float(self.nodes[high, -1])
        residuals = float(self.residuals[low, 0]), float(self.residuals[high, -1])
        least = 1e-3 * max(map(abs, ends))
        accepted = all(r <= tolerance * max(abs(t), least) for r, t in zip(residuals, ends))
        return Extremes(*ends, residuals, accepted, self.steps)

    def density(self, points: int = 256, width: float | None = None) -> Density:
        """Smoothed over `width`, by default a hundredth of the range; it integrates to one.

        Lin, Saad, Yang, "Approximating spectral densities of large matrices", SIAM Review 2016.
        """
        if points < 2 or (width is not None and not width > 0):
            raise ValueError(f"density needs at least 2 points and a positive width; given {points} and {width}.")
        low, high = float(self.nodes.min()), float(self.nodes.max())
        width = width or 0.01 * (high - low) or 0.01 * abs(high) or 1.0
        grid = torch.linspace(low - 5 * width, high + 5 * width, points, dtype=torch.float64)
        bells = torch.exp(-0.5 * ((grid[:, None, None] - self.nodes) / width).square())
        values = (bells * self.weights).sum(2).mean(1) / (width * math.sqrt(2 * math.pi))
        return Density(grid, values, width)


@dataclass(frozen=True, eq=False)
class LogDeterminant:
    """1/2 tr log(H^2 + damping), estimated.

    value              floor + excess; it cannot lie below the floor
    probe_error        standard error of the mean over random vectors
    quadrature_error   how far the estimates of m/2 and of 3m/4 steps are from that of m, the larger of the two; zero
                       for a run that ended, which is exact
    steps, probes      m, and how many random vectors
    excesses           one estimate of the excess per random vector
    count              about how many eigenvalues exceed sqrt(damping) in magnitude, with both errors of its own
    spectrum           the nodes, for other figures from the same runs
    """

    size: int
    damping: float
    excesses: tuple[float, ...]
    quadrature_error: float
    count: Counted
    spectrum: Spectrum = field(repr=False)

    @property
    def floor(self) -> float:
        """The value for H = 0."""
        return floor_of(self.size, self.damping)

    @property
    def excess(self) -> float:
        """1/2 sum log(1 + h^2 / damping): what is above the floor, and what to compare."""
        return sum(self.excesses) / len(self.excesses)

    @property
    def value(self) -> float:
        return self.floor + self.excess

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self.floor + each for each in self.excesses)

    @property
    def probe_error(self) -> float:
        return SampleMean.of(torch.tensor(self.excesses, dtype=torch.float64)).standard_error

    @property
    def error(self) -> float:
        """One standard deviation over random vectors, combined with the estimated bias of the quadrature; no bound.

        After few steps (below about twenty) the bias may be larger than its estimate.
        """
        return math.hypot(self.probe_error, self.quadrature_error)

    @property
    def converged(self) -> bool:
        """Is the quadrature error below that of the random vectors?"""
        return self.quadrature_error <= max(self.probe_error, DIGITS * self.excess)

    @property
    def steps(self) -> int:
        return self.spectrum.steps

    @property
    def probes(self) -> int:
        return len(self.excesses)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        note = "" if self.converged else ", NOT converged"
        return (
            f"{self.value:.1f} +- {self.error:.1f} (excess {self.excess:.1f}; {self.probes} vectors, "
            f"{self.steps} steps, quadrature {self.quadrature_error:.1f}{note})"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "floor": self.floor,
            "excess": self.excess,
            "error": self.error,
            "probe_error": self.probe_error,
            "quadrature_error": self.quadrature_error,
            "converged": self.converged,
            "damping": self.damping,
            "steps": self.steps,
            "probes": self.probes,
            "values": list(self.values),
            "count": self.count.to_json(),
        }


def excess_of(h: Tensor, damping: float) -> Tensor:
    """What each eigenvalue adds to the log-determinant above the floor: 1/2 log(1 + h^2 / damping)."""
    return 0.5 * torch.log1p(h.square() / damping)


def floor_of(size: int, damping: float) -> float:
    """The damped log-determinant of a Hessian of this size that is zero: 1/2 size log(damping)."""
    return 0.5 * size * math.log(damping)
