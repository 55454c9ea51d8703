"""What products with a symmetric matrix tell of its spectrum: log-determinant, trace, extremes, density.

    LD = 1/2 tr log(H^2 + damping) = floor + excess,   floor = d/2 log(damping),   excess = 1/2 sum log(1 + h^2/damping)

Stochastic Lanczos quadrature (Ubaru, Chen, Saad, SIAM J. Matrix Anal. Appl. 2017): a Lanczos run of m steps from a
random vector of signs turns into nodes t and weights tau with d * sum tau f(t) ~ v^T f(H) v, whose mean over vectors
is tr f(H). All runs advance together. Two errors are told apart: that of the random vectors (a standard error), and
that of the quadrature (how far the estimates of a half and of three quarters of the steps are away). The second is a
bias, and the one that misleads: it is driven below the first by doubling the steps, which continues the same runs.
Estimates swing about the truth as the steps grow, so the half alone can agree by chance: on the networks of the tests,
of 1,408 weights and known spectra, it understated the error thirtyfold after 16 steps, and after 40 in two of six runs.

Float64 throughout, and every new vector is made orthogonal to all earlier ones, twice: without that, copies of
eigenvalues that have converged come back and spoil the weights. Nothing here knows of networks; see `hessian.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from gradleak.draws import Draws, key
from gradleak.engine import Engine, EngineError, memory_of

DAMPING = 1e-3  # lambda; in units of H it is its root, 0.03: an eigenvalue far below adds nothing to the excess
SHARE = 0.5  # of the memory of the device, for the vectors of all runs
ENDED = 1e-12  # of the largest entry so far: a next entry as small means that the run has seen its whole subspace
DIGITS = 1e-8  # of a value: a quadrature error below needs no further steps, however small the other error is
ASYMMETRY = 1e-8  # of the largest entry: beyond this a matrix is not symmetric up to rounding


# --- operators --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Operator:
    """A symmetric linear map of float64 vectors. Calling it takes (k, d), or (d,), and multiplies every row.

    product   (k, d) -> (k, d), all rows at once
    block     rows handed to `product` together at most: what fits in memory
    """

    size: int
    device: torch.device
    product: Callable[[Tensor], Tensor]
    block: int = 64

    def __post_init__(self) -> None:
        if self.size < 1 or self.block < 1:
            raise ValueError(f"size and block must be at least 1; given size={self.size}, block={self.block}.")

    @staticmethod
    def of(matrix: Tensor) -> Operator:
        """A matrix that is at hand."""
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"A symmetric matrix is square; given shape {tuple(matrix.shape)}.")
        held = matrix.detach().to(torch.float64)
        return Operator(len(held), held.device, lambda vectors: vectors @ held.T, block=len(held))

    def __call__(self, vectors: Tensor) -> Tensor:
        if vectors.dim() not in (1, 2) or vectors.shape[-1] != self.size:
            raise ValueError(f"Vectors must be (k, {self.size}) or ({self.size},); given {tuple(vectors.shape)}.")
        if vectors.dtype != torch.float64:
            raise ValueError(
                f"Vectors must be float64, since logarithms are taken of the result; given {vectors.dtype}."
            )
        if vectors.dim() == 1:
            return self(vectors[None])[0]
        return torch.cat([self.product(rows) for rows in vectors.to(self.device).split(self.block)])


def dense(operator: Operator, block: int | None = None) -> Tensor:
    """The matrix itself, (d, d) and symmetrised; `block` columns at a time. For d up to some 20,000."""
    return _symmetrised(operator, block)[0]


@dataclass(frozen=True, eq=False)
class Exact:
    """All eigenvalues, ascending, and how far the matrix was from symmetric: max |H - H^T| / max |H|."""

    eigenvalues: Tensor
    asymmetry: float

    def excess(self, damping: float = DAMPING) -> float:
        return float(_excess(self.eigenvalues, damping).sum())

    def log_determinant(self, damping: float = DAMPING) -> float:
        return _floor(len(self.eigenvalues), damping) + self.excess(damping)

    def count(self, damping: float = DAMPING) -> int:
        """Eigenvalues larger than sqrt(damping) in magnitude."""
        return int((self.eigenvalues.abs() > math.sqrt(damping)).sum())


def exact(operator: Operator, block: int | None = None) -> Exact:
    """The whole spectrum of a small operator, from its dense matrix: d products, and about 4/3 d^3 operations."""
    matrix, asymmetry = _symmetrised(operator, block)
    return Exact(torch.linalg.eigvalsh(matrix).cpu(), asymmetry)


def _symmetrised(operator: Operator, block: int | None) -> tuple[Tensor, float]:
    d, block = operator.size, operator.block if block is None else block
    if block < 1:
        raise ValueError(f"block must be at least 1 column; given {block}.")
    needed, limit = 3 * 8.0 * d * d, SHARE * memory_of(Engine(device=str(operator.device)))
    if needed > limit:
        raise EngineError(
            f"The dense matrix of {d:,} rows needs {needed / 2**30:.1f} GB with its transpose; {limit / 2**30:.1f} GB "
            f"may be used on {operator.device}. Use log_determinant, extremes and trace, which need products only."
        )
    matrix = torch.empty(d, d, dtype=torch.float64, device=operator.device)
    columns = torch.arange(d, device=operator.device)
    for rows in columns.split(block):
        matrix[rows] = operator((rows[:, None] == columns).to(torch.float64))
    if not bool(matrix.isfinite().all()):
        raise EngineError("The matrix has entries that are not finite: the weights have diverged.")
    largest, gap = float(matrix.abs().max()), float((matrix - matrix.T).abs().max())
    asymmetry = gap / largest if largest else 0.0
    if asymmetry > ASYMMETRY:
        raise EngineError(
            f"The operator is not symmetric: max |H - H^T| is {asymmetry:.1e} of the largest entry, where rounding "
            f"leaves less than {ASYMMETRY:.0e}. Is its product deterministic, and in float64?"
        )
    return (matrix + matrix.T) / 2, asymmetry


# --- runs -------------------------------------------------------------------------------------------------------------


class Lanczos:
    """k runs that advance together from unit multiples of `starts` (k, d), and can be continued.

    A run that has reached an invariant subspace stands still: its later vectors are zero.
    """

    def __init__(self, operator: Operator, starts: Tensor) -> None:
        self.operator = operator
        self._first = starts / torch.linalg.vector_norm(starts, dim=1, keepdim=True)
        self._restart()

    def _restart(self) -> None:
        self._next = self._first
        self._blocks: list[Tensor] = []  # (k, steps, d) each
        self._diagonal: list[Tensor] = []  # (k,) each
        self._off: list[Tensor] = []
        self._scale = torch.zeros(len(self._first), dtype=torch.float64, device=self._first.device)
        self.ended = torch.zeros_like(self._scale, dtype=torch.bool)

    def advance(self, steps: int) -> None:
        """Up to `steps` in all, or until every run has ended."""
        if steps <= len(self._diagonal) or bool(self.ended.all()):
            return
        if not self._blocks:
            self._restart()
        done, (k, d) = len(self._diagonal), self._first.shape
        block = torch.zeros(k, steps - done, d, dtype=torch.float64, device=self._first.device)
        self._blocks.append(block)
        for row in range(steps - done):
            block[:, row] = self._next
            if self._step([*self._blocks[:-1], block[:, : row + 1]]):
                self._blocks[-1] = block[:, : row + 1].clone()
                return

    def _step(self, basis: list[Tensor]) -> bool:
        """One more product; have all runs ended?"""
        w = self.operator(self._next)
        diagonal = (self._next * w).sum(1)
        w = w[:, None]  # rows on the left: on a CPU the product with columns on the right is four times slower
        for _ in range(2):
            for block in basis:
                w = torch.baddbmm(w, w @ block.mT, block, alpha=-1)
        w = w[:, 0]
        off = torch.linalg.vector_norm(w, dim=1)
        if not bool((diagonal + off).isfinite().all()):
            raise EngineError(
                "A product with the operator is not finite: the weights have diverged, or the loss is not finite there."
            )
        self._scale = torch.maximum(self._scale, torch.maximum(diagonal.abs(), off))
        self.ended = self.ended | (off <= ENDED * self._scale)
        off = torch.where(self.ended, 0.0, off)
        self._next = torch.where(self.ended[:, None], 0.0, w / torch.where(self.ended, 1.0, off)[:, None])
        self._diagonal.append(diagonal)
        self._off.append(off)
        return bool(self.ended.all())

    def release(self) -> None:
        """Give the vectors back; the tridiagonal matrix stays. A later `advance` starts over."""
        self._blocks = []

    @property
    def tridiagonal(self) -> Tridiagonal:
        return Tridiagonal(
            self.operator.size,
            torch.stack(self._diagonal, 1).cpu(),
            torch.stack(self._off, 1).cpu(),
            self.ended.cpu(),
        )

    def combined(self, coefficients: Tensor) -> Tensor:
        """(k, d): the sum of each run's vectors, weighted by `coefficients` (k, steps)."""
        pieces = coefficients.to(self._first).split([block.shape[1] for block in self._blocks], dim=1)
        return torch.stack([(c[:, None] @ block)[:, 0] for c, block in zip(pieces, self._blocks)]).sum(0)


@dataclass(frozen=True, eq=False)
class Tridiagonal:
    """What k runs of m steps leave: diagonals (k, m), off-diagonals (k, m) whose last leads out, and who has ended."""

    size: int
    diagonal: Tensor
    off: Tensor
    ended: Tensor

    @property
    def steps(self) -> int:
        return self.diagonal.shape[1]

    def solved(self, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues (k, m), ascending, and eigenvectors (k, m, m) of the leading block."""
        m = self.steps if steps is None else steps
        # A run that ended has zeros: in their place a value within its range, which gets no weight and is no extreme.
        alive = torch.nn.functional.pad(self.off[:, : m - 1] != 0, (1, 0), value=True).long().cumprod(1) > 0
        matrix = torch.diag_embed(torch.where(alive, self.diagonal[:, :m], self.diagonal[:, :1]))
        beside = torch.diag_embed(self.off[:, : m - 1], offset=1)
        nodes, vectors = torch.linalg.eigh(matrix + beside + beside.mT)
        return nodes, vectors

    def spectrum(self) -> Spectrum:
        """What all steps see, and beside it what a half and three quarters of them do, to judge it by."""
        m = self.steps
        earlier = tuple(self._seen(max(1, part)) for part in (m // 2, 3 * m // 4))
        return replace(self._seen(m), earlier=earlier, ended=self.ended)

    def _seen(self, m: int) -> Spectrum:
        nodes, vectors = self.solved(m)
        residuals = (self.off[:, m - 1 : m] * vectors[:, -1]).abs()
        residuals = residuals.maximum(torch.finfo(nodes.dtype).eps * nodes.abs().amax(1, keepdim=True))  # its rounding
        return Spectrum(self.size, nodes, vectors[:, 0].square(), residuals)


class Runs:
    """Runs from random signs, in as many groups as memory asks for. Where all fit, more steps continue them."""

    def __init__(self, operator: Operator, probes: int, most_steps: int, seed: int) -> None:
        each = 8.0 * operator.size * (min(most_steps, operator.size) + 8)
        limit = SHARE * memory_of(Engine(device=str(operator.device)))
        room = int(min(limit // each, probes))
        if room < 1:
            raise EngineError(
                f"{most_steps} vectors of {operator.size:,} entries need {each / 2**30:.1f} GB; {limit / 2**30:.1f} GB "
                f"may be used on {operator.device}. Allow fewer steps (most_steps), and look at `converged`."
            )
        self.size = operator.size
        self.groups = [Lanczos(operator, starts) for starts in signs(operator, probes, seed).split(room)]

    def advance(self, steps: int) -> Tridiagonal:
        found = []
        for group in self.groups:
            group.advance(min(steps, self.size))
            found.append(group.tridiagonal)
            if len(self.groups) > 1:
                group.release()
        # Groups that ended early are shorter; zeros stand for the rest, as they do within a group.
        m = max(part.steps for part in found)
        wide = lambda rows: torch.nn.functional.pad(rows, (0, m - rows.shape[1]))  # noqa: E731
        return Tridiagonal(
            self.size,
            torch.cat([wide(part.diagonal) for part in found]),
            torch.cat([wide(part.off) for part in found]),
            torch.cat([part.ended for part in found]),
        )


def signs(operator: Operator, probes: int, seed: int) -> Tensor:
    """(probes, d) of +1 and -1. The i-th depends on the seed and on i alone, and is the same on every machine."""
    keys = torch.stack([key("probe", seed, number) for number in range(probes)]).to(operator.device)
    drawn: Tensor = vmap(lambda own: Draws(own).uniform((operator.size,)))(keys)
    return torch.where(drawn < 0.5, 1.0, -1.0).to(torch.float64)


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over random vectors, and its standard error."""

    value: float
    standard_error: float

    @staticmethod
    def of(samples: Tensor) -> Estimate:
        """From one value per random vector."""
        return Estimate(float(samples.mean()), float(samples.std()) / math.sqrt(len(samples)))

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4g} +- {self.standard_error:.2g}"

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "standard_error": self.standard_error}


@dataclass(frozen=True)
class Counted(Estimate):
    """An estimate by quadrature: its error has a second part, which no number of random vectors makes smaller."""

    quadrature_error: float = 0.0

    @property
    def error(self) -> float:
        """One standard deviation of the random vectors and the estimate of the bias together; not a bound."""
        return math.hypot(self.standard_error, self.quadrature_error)

    def __str__(self) -> str:
        return f"{self.value:.4g} +- {self.error:.2g}"

    def to_json(self) -> dict[str, float]:
        return {**super().to_json(), "quadrature_error": self.quadrature_error, "error": self.error}


@dataclass(frozen=True, eq=False)
class Extremes:
    """Both ends of the spectrum, by algebraic value: of an indefinite matrix the lowest may be larger in magnitude.

    residuals   ||H y - t y|| of the two: an eigenvalue lies as close to t
    accepted    are both below `tolerance`, relative to t; an end near zero is measured against 1e-3 of the other
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
            raise ValueError("These extremes came without vectors: call extremes(operator), which keeps them.")
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
    """What k runs of m steps see of d eigenvalues: nodes (k, m), weights (k, m) that sum to one, residuals (k, m).

    earlier   the same runs after m/2 and after 3m/4 steps
    ended     (k,) runs that have seen their whole subspace: their quadrature is exact
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
            raise ValueError("This spectrum came without its earlier steps, which judge it: take Tridiagonal.spectrum.")
        moved = torch.stack([self.traces(function) - each.traces(function) for each in self.earlier])
        return torch.where(self.ended, 0.0, moved)

    def count(self, damping: float = DAMPING) -> Counted:
        """About how many eigenvalues are larger than sqrt(damping) in magnitude, with both errors.

        A step function is the worst that a quadrature can be asked for: a node stands for many eigenvalues, and where
        it crosses the threshold the figure jumps, up in one run and down in another. So the gaps are averaged without
        their signs: with them, on one of the tests' networks, they cancel after 80 steps and understate it threefold.
        """
        beyond = lambda t: (t.abs() > math.sqrt(damping)).to(t.dtype)  # noqa: E731
        found = Estimate.of(self.traces(beyond))
        return Counted(found.value, found.standard_error, float(self.gaps(beyond).abs().mean(1).max()))

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
    spectrum           the nodes, for whatever else is wanted of the same runs
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
        return _floor(self.size, self.damping)

    @property
    def excess(self) -> float:
        """1/2 sum log(1 + h^2 / damping): what is above the floor, and what to compare."""
        return sum(self.excesses) / len(self.excesses)

    @property
    def value(self) -> float:
        return self.floor + self.excess

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self.floor + own for own in self.excesses)

    @property
    def probe_error(self) -> float:
        return Estimate.of(torch.tensor(self.excesses, dtype=torch.float64)).standard_error

    @property
    def error(self) -> float:
        """One standard deviation of the random vectors and the estimate of the quadrature's bias together; no bound.

        After few steps (below some twenty) that estimate may fall short of the bias.
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
        told = "" if self.converged else ", NOT converged"
        return (
            f"{self.value:.1f} +- {self.error:.1f} (excess {self.excess:.1f}; {self.probes} vectors, "
            f"{self.steps} steps, quadrature {self.quadrature_error:.1f}{told})"
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


def _excess(h: Tensor, damping: float) -> Tensor:
    return 0.5 * torch.log1p(h.square() / damping)


def _floor(size: int, damping: float) -> float:
    return 0.5 * size * math.log(damping)


# --- estimates --------------------------------------------------------------------------------------------------------


def log_determinant(
    operator: Operator,
    damping: float = DAMPING,
    probes: int = 10,
    steps: int = 100,
    most_steps: int = 400,
    seed: int = 0,
) -> LogDeterminant:
    """1/2 tr log(H^2 + damping). The steps are doubled, up to `most_steps`, while the quadrature error is larger."""
    _demand(probes, steps, most_steps)
    if not damping > 0:
        raise ValueError(f"damping must be above 0, or eigenvalues of zero have no logarithm; given {damping}.")
    runs = Runs(operator, probes, most_steps, seed)
    while True:
        found = _judged(runs.advance(steps), damping)
        if found.converged or steps >= min(most_steps, operator.size):
            return found
        steps = min(2 * steps, most_steps)


def _judged(seen: Tridiagonal, damping: float) -> LogDeterminant:
    spectrum, excess = seen.spectrum(), lambda t: _excess(t, damping)
    excesses = tuple(spectrum.traces(excess).tolist())
    moved = float(spectrum.gaps(excess).mean(1).abs().max())
    return LogDeterminant(seen.size, damping, excesses, moved, spectrum.count(damping), spectrum)


def extremes(
    operator: Operator, steps: int = 50, most_steps: int = 400, tolerance: float = 1e-3, seed: int = 0
) -> Extremes:
    """Both ends of the spectrum with their eigenvectors; the steps are doubled while a residual is too large.

    Lanczos, not power iteration: that finds the eigenvalue of largest magnitude, whichever end it is at.
    """
    _demand(2, steps, most_steps)
    run = Lanczos(operator, signs(operator, 1, seed))
    while True:
        run.advance(min(steps, operator.size))
        found = run.tridiagonal.spectrum().extremes(tolerance)
        if found.accepted or steps >= min(most_steps, operator.size):
            break
        steps = min(2 * steps, most_steps)
    ritz = run.tridiagonal.solved()[1][0]  # (m, m)
    vectors = torch.cat([run.combined(ritz[None, :, 0]), run.combined(ritz[None, :, -1])])
    vectors = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return Extremes(
        found.lowest, found.highest, found.residuals, found.accepted, found.steps, vectors=vectors * largest.sign()
    )


def trace(operator: Operator, probes: int = 30, seed: int = 0) -> Estimate:
    """tr H by random signs (Hutchinson, Commun. Stat. Simul. Comput. 1990). Its variance is 2 sum_(i != j) H_ij^2 / n.

    The number of vectors is fixed beforehand: stopping once the mean has settled would bias it.
    """
    return traces(operator, probes, seed)[0]


def traces(operator: Operator, probes: int = 30, seed: int = 0) -> tuple[Estimate, Estimate]:
    """tr H and tr H^2, from the same products."""
    _demand(probes, 1, 1)
    vectors = signs(operator, probes, seed)
    products = operator(vectors)
    return Estimate.of((vectors * products).sum(1)), Estimate.of(products.square().sum(1))


def density(
    operator: Operator,
    points: int = 256,
    width: float | None = None,
    probes: int = 10,
    steps: int = 100,
    seed: int = 0,
) -> Density:
    """The smoothed spectral density. `log_determinant(...).spectrum.density()` has it without further products."""
    _demand(probes, steps, steps)
    return Runs(operator, probes, steps, seed).advance(steps).spectrum().density(points, width)


def _demand(probes: int, steps: int, most_steps: int) -> None:
    if probes < 2:
        raise ValueError(f"An error estimate needs at least 2 random vectors; given probes={probes}.")
    if not 1 <= steps <= most_steps:
        raise ValueError(f"steps must be from 1 to most_steps ({most_steps}); given {steps}.")
