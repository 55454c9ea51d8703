"""Sparse vectors of a column space: the derivatives of single examples by the outputs of a ReLU layer.

[dL/dW, dL/db] = D [X, 1] has the rank of the batch, and an SVD gives L R for it. The columns of D = L Q are zero where
a ReLU is off: about half of each. So the directions q with many zeros in L q are looked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak.core.random import Draws

ABOVE_NOISE = 4.0  # times the largest singular value of the noise: a smaller one is not told from it
ROUNDINGS = 6.0  # standard deviations of an entry's noise: a smaller entry is a zero
EPS, ROUNDING = 1e-15, 1e-7  # of the largest singular value: of float64; of float32, where none shows the noise
SPARE = 64  # random directions beyond the rank, by which the range of the gradient is found
STEPS = 50  # of reweighted least squares
SHRINKS = 300  # steps of alternating directions
EMPTY = 1e-9  # of the largest eigenvalue: a smaller one belongs to an example that is off at all outputs of a window
SAME = 0.999  # |cos| of two directions that are one
MOST = 2000  # candidates at most


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer before a ReLU, as it was sent, and its gradient: m outputs, n inputs."""

    weight: Tensor  # W, (m, n)
    bias: Tensor  # (m,)
    rows: Tensor  # dL/dW
    deltas: Tensor  # dL/db
    middle: Tensor  # (n,), what it sees of an example in the middle of the bounds


@dataclass(frozen=True, eq=False)
class Factors:
    """[dL/dW, dL/db] = left [right, right_bias] of rank b, left with orthogonal columns of mean square one.

    For a direction q of R^b, left q is a vector of the column space; for a p with p right_bias = 1, p right is a point
    of the flat through the examples, and p weights + bias its pre-activations.
    """

    left: Tensor  # L, (m, b)
    right: Tensor  # R, (b, n)
    right_bias: Tensor  # (b,)
    weights: Tensor  # W R^T, (m, b)
    bias: Tensor  # (m,)
    noise: Tensor  # (b,), of an entry of each column of L
    right_noise: float  # of an entry of R
    alive: Tensor  # numbers of the outputs that are on for some example
    middle: Tensor  # (m,), pre-activations of an example in the middle of the bounds

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    def tolerance(self, directions: Tensor) -> Tensor:
        """Entries of L q below this are zeros, (..., b) -> (..., 1)."""
        return (ROUNDINGS * (directions * self.noise).norm(dim=-1, keepdim=True)).clamp(1e-7, 1e-2)

    def zeros(self, directions: Tensor) -> Tensor:
        """How many entries of L q are zero, among outputs that are on for some example."""
        entries = directions @ self.left[self.alive].T
        return (entries.abs() < self.tolerance(directions)).sum(-1)

    def gram(self, weights: Tensor) -> Tensor:
        """L^T diag(w) L for each row of `weights`, (starts, m) -> (starts, b, b)."""
        return (self.left.T * weights[:, None]) @ self.left


def without(factors: Factors, directions: Tensor, points: Tensor) -> tuple[Factors, Tensor]:
    """The factors of the gradient less some examples, (examples, b) each, and a map of its directions to those of all.

    D X less the product of these examples is L U (V^T U)^-1 V^T R: other directions are orthogonal to their points, and
    U spans those; other points are orthogonal to their directions, and V spans those.
    """
    rest = slice(len(points), None)
    lift, across = (torch.linalg.svd(each)[2][rest] for each in (points, directions))  # U^T and V^T
    inner = torch.linalg.solve(across @ lift.T, across)
    reduced = replace(
        factors,
        left=factors.left @ lift.T,
        right=inner @ factors.right,
        right_bias=inner @ factors.right_bias,
        weights=factors.weights @ inner.T,
        noise=(lift.square() @ factors.noise.square()).sqrt(),
    )
    return reduced, lift


def factorise(layer: Layer, examples: int, draws: Draws) -> Factors:
    """The factors of a gradient with as many columns as examples can be told from its noise."""
    outputs, inputs = layer.rows.shape
    unit = layer.rows.norm() / (layer.deltas.norm() * math.sqrt(inputs))  # dL/db counts as a column of dL/dW
    joined = torch.cat([layer.rows, unit * layer.deltas[:, None]], 1)
    probes = draws.normal((inputs + 1, min(examples + SPARE, inputs + 1)), dtype=joined.dtype)
    span = torch.linalg.qr(joined @ probes)[0]  # (m, examples + spare), or fewer
    span = torch.linalg.qr(joined @ (joined.T @ span))[0]
    inner, values, right = torch.linalg.svd(span.T @ joined, full_matrices=False)
    shows_noise = len(values) > examples
    floor = max(float(values[examples]), EPS * float(values[0])) if shows_noise else ROUNDING * float(values[0])
    rank = int((values[:examples] > ABOVE_NOISE * floor).sum())
    values, right = values[:rank], right[:rank]
    size = math.sqrt(outputs)
    entry = floor / (size + math.sqrt(inputs))  # noise of an entry of the gradient: floor is the norm of the whole
    scaled = values[:, None] * right / size
    return Factors(
        left=size * (span @ inner[:, :rank]),
        right=scaled[:, :-1],
        right_bias=scaled[:, -1] / unit,
        weights=layer.weight @ scaled[:, :-1].T,
        bias=layer.bias,
        noise=size * entry / values,
        right_noise=entry / size,
        alive=joined.any(1).nonzero()[:, 0],
        middle=layer.weight @ layer.middle + layer.bias,
    )


# --- starts -----------------------------------------------------------------------------------------------------------


def null_starts(factors: Factors, count: int, draws: Draws) -> Tensor:
    """Directions that are zero at b - 1 random outputs: a column of D if it is zero at all of them, 2^(1 - b)."""
    rank = factors.rank
    rows = factors.left[_picked(factors, count, rank - 1, draws)]
    last = draws.normal((count, 1, rank), stream=1, dtype=rows.dtype)
    wanted = torch.zeros(count, rank, 1, dtype=rows.dtype)
    wanted[:, -1] = 1
    directions, info = torch.linalg.solve_ex(torch.cat([rows, last], 1), wanted)
    directions = directions[(info == 0) & directions[..., 0].isfinite().all(1)][..., 0]
    directions = _unit(directions)
    return directions[factors.zeros(directions) > rank]


def pattern_starts(factors: Factors, points: Tensor) -> Tensor:
    """For points p, (points, b): the direction that is nearest to zero where the point would leave the ReLU off."""
    points = points / (points @ factors.right_bias)[:, None]
    off = (points @ factors.weights.T + factors.bias < 0).to(points)
    return torch.linalg.eigh(factors.gram(off))[1][..., 0]


def _picked(factors: Factors, count: int, rows: int, draws: Draws) -> Tensor:
    """Numbers of different outputs at random, (count, rows), among those that are on for some example."""
    order = draws.uniform((count, len(factors.alive)), stream=2).argsort(1)
    return factors.alive[order[:, :rows]]


def _unit(directions: Tensor) -> Tensor:
    return directions / directions.norm(dim=1, keepdim=True)


# --- search -----------------------------------------------------------------------------------------------------------


def window(factors: Factors, likely: Tensor, share: float) -> Tensor:
    """Numbers of the outputs that are on least often, (outputs,), by how `likely`, (m,), each one is on.

    Examples that have much in common, as all photographs do, switch the same outputs on: those have no zeros and tell
    nothing. Of the others more are zero than the half of all.
    """
    order = factors.alive[likely[factors.alive].argsort()]
    return order[: max(int(share * len(order)), 4 * factors.rank)]


def shrunk(factors: Factors, outputs: Tensor, count: int, threshold: float, draws: Draws) -> Tensor:
    """Directions that are sparse at these outputs, from `count` of their rows: alternating directions, in float32.

    With L whitened over the outputs: q <- L^T s(L q) at length one, s(y) = sign(y) max(|y| - threshold, 0). A step is
    two products with L for all starts at once (Qu, Sun, Wright, "Finding a sparse vector in a subspace", NeurIPS 2014).
    An example that is off at all of the outputs is the direction of an eigenvalue of zero.
    """
    rows = factors.left[outputs]
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    full = values > EMPTY * values[-1]
    whitening = vectors[:, full] / values[full].sqrt()
    white = (rows @ whitening).float()
    directions = _unit(white[(draws.uniform((count,)) * len(white)).long().clamp(max=len(white) - 1)])
    for _ in range(SHRINKS):
        directions = _unit(torch.nn.functional.softshrink(directions @ white.T, threshold) @ white)
    sparse = _unit(directions[directions.isfinite().all(1)].double() @ whitening.T)
    return torch.cat([_distinct(sparse), vectors[:, ~full].T])


def refined(factors: Factors, starts: Tensor, wide: float = 0.1) -> Tensor:
    """Directions of the smallest L1 norm of L q near each start: reweighted least squares, in float32.

    w = 1 / sqrt((L q)^2 + e^2), q <- (L^T diag(w) L)^-1 q at length one, e from `wide` to 1e-3.
    """
    directions, left = starts.float(), factors.left.float()
    for width in torch.logspace(math.log10(wide), -3, STEPS).tolist():
        weights = ((directions @ left.T).square() + width**2).rsqrt()
        directions = _unit(torch.linalg.solve_ex((left.T * weights[:, None]) @ left, directions)[0])
    return directions[directions.isfinite().all(1)].double()


def polished(factors: Factors, directions: Tensor) -> Tensor:
    """The directions, solved for anew from their zeros; those with as few zeros as any may have are left out."""
    for size in (1e-2, 1e-3, 1e-4):
        near = factors.tolerance(directions).clamp(min=size)
        zeros = ((directions @ factors.left.T).abs() < near).to(directions)
        directions = torch.linalg.eigh(factors.gram(zeros))[1][..., 0]
    return directions[factors.zeros(directions) > factors.rank + 1]


def merged(factors: Factors, directions: Tensor) -> Tensor:
    """Different directions, those with most zeros first."""
    order = factors.zeros(directions).argsort(descending=True, stable=True)
    return _distinct(directions[order])[:MOST]


def _distinct(directions: Tensor) -> Tensor:
    """The directions without those that repeat an earlier one."""
    return directions[~((directions @ directions.T).abs() > SAME).tril(-1).any(1)]
