"""What products with a symmetric matrix tell of its spectrum: log-determinant, trace, extremes, density.

    LD = 1/2 tr log(H^2 + damping) = floor + excess,   floor = d/2 log(damping),   excess = 1/2 sum log(1 + h^2/damping)

Stochastic Lanczos quadrature (Ubaru, Chen, Saad, SIAM J. Matrix Anal. Appl. 2017): a Lanczos run of m steps from a
random vector of signs turns into nodes t and weights tau with d * sum tau f(t) ~ v^T f(H) v, whose mean over vectors
is tr f(H). All runs advance together. There are two errors: that of the random vectors (a standard error), and that of
the quadrature (how far the estimates after a half and three quarters of the steps differ). The second is a bias, and
the one that misleads: the steps are doubled, which continues the same runs, until it is below the first. Estimates
oscillate about the truth as the steps grow, so the half alone can agree by chance: on the networks of the tests, of
1,408 weights and known spectra, it understated the error thirtyfold after 16 steps, and after 40 in two of six runs.

All in float64. Every new vector is made orthogonal to all earlier ones, twice: without that, copies of converged
eigenvalues come back and spoil the weights. This module does not know networks; see `hessian.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core.random import Draws, key
from gradleak.core.settings import takes
from gradleak.curvature.spectrum import (
    DAMPING,
    Density,
    Extremes,
    LogDeterminant,
    SampleMean,
    Spectrum,
    excess_of,
    floor_of,
)
from gradleak.engine import Engine, EngineError, memory_of

SHARE = 0.5  # of the memory of the device, for the vectors of all runs
ENDED = 1e-12  # of the largest entry so far: a smaller next entry means that the run has reached its whole subspace
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
        """From an explicit matrix."""
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"A symmetric matrix is square; given shape {tuple(matrix.shape)}.")
        exact = matrix.detach().to(torch.float64)
        return Operator(len(exact), exact.device, lambda vectors: vectors @ exact.T, block=len(exact))

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
        return float(excess_of(self.eigenvalues, damping).sum())

    def log_determinant(self, damping: float = DAMPING) -> float:
        return floor_of(len(self.eigenvalues), damping) + self.excess(damping)

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


class LanczosRun:
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
    """The result of k runs of m steps: diagonals (k, m), off-diagonals (k, m), and which runs have ended.

    The last off-diagonal entry leads out of the matrix.
    """

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
        """The spectrum after all steps, with those after a half and three quarters of them, to judge it by."""
        m = self.steps
        earlier = tuple(self._after(max(1, part)) for part in (m // 2, 3 * m // 4))
        return replace(self._after(m), earlier=earlier, ended=self.ended)

    def _after(self, m: int) -> Spectrum:
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
        self.groups = [LanczosRun(operator, starts) for starts in signs(operator, probes, seed).split(room)]

    def advance(self, steps: int) -> Tridiagonal:
        parts = []
        for group in self.groups:
            group.advance(min(steps, self.size))
            parts.append(group.tridiagonal)
            if len(self.groups) > 1:
                group.release()
        # Groups that ended early are shorter; zeros stand for the rest, as they do within a group.
        m = max(part.steps for part in parts)
        wide = lambda rows: torch.nn.functional.pad(rows, (0, m - rows.shape[1]))  # noqa: E731
        return Tridiagonal(
            self.size,
            torch.cat([wide(part.diagonal) for part in parts]),
            torch.cat([wide(part.off) for part in parts]),
            torch.cat([part.ended for part in parts]),
        )


def signs(operator: Operator, probes: int, seed: int) -> Tensor:
    """(probes, d) of +1 and -1. The i-th depends on the seed and on i alone, and is the same on every machine."""
    keys = torch.stack([key("probe", seed, number) for number in range(probes)]).to(operator.device)
    drawn: Tensor = vmap(lambda each: Draws(each).uniform((operator.size,)))(keys)
    return torch.where(drawn < 0.5, 1.0, -1.0).to(torch.float64)


# --- estimates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lanczos:
    """How eigenvalues are looked for: random vectors, steps of each, the most that doubling may lead to."""

    probes: int = 10
    steps: int = 100
    most_steps: int = 400
    damping: float = DAMPING
    seed: int = 0

    def __post_init__(self) -> None:
        _demand(self.probes, self.steps, self.most_steps)
        if not self.damping > 0:
            raise ValueError(
                f"damping must be above 0, or eigenvalues of zero have no logarithm; given {self.damping}."
            )


@takes(Lanczos)
def log_determinant(operator: Operator, *, lanczos: Lanczos) -> LogDeterminant:
    """1/2 tr log(H^2 + damping). The steps are doubled, up to `most_steps`, while the quadrature error is larger."""
    runs, steps = Runs(operator, lanczos.probes, lanczos.most_steps, lanczos.seed), lanczos.steps
    while True:
        estimate = _judged(runs.advance(steps), lanczos.damping)
        if estimate.converged or steps >= min(lanczos.most_steps, operator.size):
            return estimate
        steps = min(2 * steps, lanczos.most_steps)


def _judged(runs: Tridiagonal, damping: float) -> LogDeterminant:
    spectrum, excess = runs.spectrum(), lambda t: excess_of(t, damping)
    excesses = tuple(spectrum.traces(excess).tolist())
    moved = float(spectrum.gaps(excess).mean(1).abs().max())
    return LogDeterminant(runs.size, damping, excesses, moved, spectrum.count(damping), spectrum)


def extremes(
    operator: Operator, steps: int = 50, most_steps: int = 400, tolerance: float = 1e-3, seed: int = 0
) -> Extremes:
    """Both ends of the spectrum with their eigenvectors; the steps are doubled while a residual is too large.

    Lanczos, not power iteration: that finds the eigenvalue of largest magnitude, whichever end it is at.
    """
    _demand(2, steps, most_steps)
    run = LanczosRun(operator, signs(operator, 1, seed))
    while True:
        run.advance(min(steps, operator.size))
        ends = run.tridiagonal.spectrum().extremes(tolerance)
        if ends.accepted or steps >= min(most_steps, operator.size):
            break
        steps = min(2 * steps, most_steps)
    ritz = run.tridiagonal.solved()[1][0]  # (m, m)
    vectors = torch.cat([run.combined(ritz[None, :, 0]), run.combined(ritz[None, :, -1])])
    vectors = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return replace(ends, vectors=vectors * largest.sign())


def trace(operator: Operator, probes: int = 30, seed: int = 0) -> SampleMean:
    """tr H by random signs (Hutchinson, Commun. Stat. Simul. Comput. 1990). Its variance is 2 sum_(i != j) H_ij^2 / n.

    The number of vectors is fixed in advance: stopping once the mean has settled would bias it.
    """
    return traces(operator, probes, seed)[0]


def traces(operator: Operator, probes: int = 30, seed: int = 0) -> tuple[SampleMean, SampleMean]:
    """tr H and tr H^2, from the same products."""
    _demand(probes, 1, 1)
    vectors = signs(operator, probes, seed)
    products = operator(vectors)
    return SampleMean.of((vectors * products).sum(1)), SampleMean.of(products.square().sum(1))


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
