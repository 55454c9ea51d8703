"""Which sparse directions are examples: those whose inputs would switch the ReLU as the zeros say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.attacks.spans.sparse.directions import (
    Factors,
    merged,
    null_starts,
    pattern_starts,
    polished,
    refined,
    shrunk,
    window,
    without,
)
from gradleak.core.random import Draws

NEW = 0.02  # share of a direction outside of those taken before: with less it is a mixture of them
UNCLEAR = 1e-4  # of the root mean square of the pre-activations: nearer to zero their sign means nothing
ENOUGH = 0.99  # agreement
WORK = 2**31  # products of one exchange
ENTRIES = 2**20  # numbers that one comparison of candidates holds
FEW = 16  # examples up to which b - 1 random outputs are off for one of them often enough
STARTS = 256  # of a window at least; four for each example
POINTS = 32  # on the flat through the examples not found, times the number of the wave, as far as memory allows
WINDOWS = ((1.0, "middle"), (0.6, "middle"), (0.4, "middle"), (0.4, "length"))  # of a wave: share and order of outputs
THRESHOLDS = (0.06, 0.1, 0.03)  # of alternating directions, wave after wave
PATIENCE = 3  # waves without a gain, where the agreement is enough
ROUNDS = 8  # exchanges of a wave at most
NULLS = 4096  # null starts of a wave at most


@dataclass(frozen=True, eq=False)
class Basis:
    """b directions, found or filled up, and what they say of the examples.

    directions   Q^T up to the length of its rows, (b, b); the first `found` are sparse, the others only fill the space
    points       Q^-1, (b, b): example i is points[i] right
    agreement    (b,) share of outputs that are on for the example exactly where its direction is not zero
    """

    directions: Tensor
    found: int
    points: Tensor
    agreement: Tensor

    @property
    def complete(self) -> bool:
        return self.found == len(self.directions)


def recover(factors: Factors, draws: Draws, waves: int) -> tuple[Basis, int]:
    """The basis that agrees best, and how many waves of starts it took."""
    if factors.rank == 1:
        return basis_of(factors, torch.ones(1, 1, dtype=factors.left.dtype), 1), 0
    pool = torch.zeros(0, factors.rank, dtype=factors.left.dtype)
    best, wave, idle = select(factors, pool), 0, 0
    for wave in range(1, waves + 1):
        before = _worth(best)
        for source in range(len(WINDOWS) + 2):
            candidates = _candidates(factors, best, wave, source, draws.child(wave).child(source))
            pool = merged(factors, torch.cat([pool, candidates]))
            basis, pool = completed(factors, pool, best)
            best = max(best, basis, key=_worth)
            if _worth(best)[1] == 1:
                return best, wave
        best = max(best, exchange(factors, best, pool), key=_worth)
        idle = 0 if _worth(best) > before else idle + 1
        if _worth(best)[1] == 1 or (_worth(best)[1] > ENOUGH and idle == PATIENCE):
            break
    return best, wave


def _worth(basis: Basis) -> tuple[int, float]:
    """More directions first, then their agreement."""
    return basis.found, float(basis.agreement.mean()) if basis.complete else 0.0


def _candidates(factors: Factors, best: Basis, wave: int, source: int, draws: Draws) -> Tensor:
    """Sparse directions: of a window of outputs, of random zeros, or of the flat that the examples found leave open.

    How likely an output is on is told by an example in the middle of the bounds, or by the length of its row of L. In a
    complete basis, examples that agree everywhere are taken out first: the rest is a smaller problem of the same kind.
    """
    done = best.agreement == 1 if best.complete else torch.zeros(factors.rank, dtype=torch.bool)
    rest, lift = without(factors, best.directions[done], best.points[done])
    rank = rest.rank
    if source < len(WINDOWS):
        share, order = WINDOWS[source]
        likely = rest.middle if order == "middle" else rest.left.norm(dim=1)
        threshold = THRESHOLDS[(wave - 1) % len(THRESHOLDS)]
        found = shrunk(rest, window(rest, likely, share), max(STARTS, 4 * rank), threshold, draws)
    elif source == len(WINDOWS):
        found = null_starts(rest, min(NULLS, 16 * 2**rank) if rank > 1 and factors.rank <= FEW else 0, draws)
    else:
        points = best.points[~done] @ lift.T
        left_open = torch.linalg.svd(best.directions[: 0 if best.complete else best.found] @ lift.T)[2]
        left_open = left_open[0 if best.complete else best.found :]
        count = min(POINTS * wave, max(rank, ENTRIES // rest.left.numel()))
        drawn = draws.normal((count, len(left_open)), dtype=points.dtype) @ left_open
        found = refined(rest, pattern_starts(rest, torch.cat([drawn, points])))
    return polished(rest, found) @ lift


# --- selection --------------------------------------------------------------------------------------------------------


def basis_of(factors: Factors, directions: Tensor, found: int) -> Basis:
    """The basis of these directions: the points are the rows of their inverse, scaled by the bias."""
    points = torch.linalg.inv(directions.T)
    points = points / (points @ factors.right_bias)[:, None]
    inputs = points @ factors.weights.T + factors.bias
    return Basis(directions, found, points, agreement(factors, directions, inputs))


def agreement(factors: Factors, directions: Tensor, inputs: Tensor) -> Tensor:
    """Share of outputs that are on, by their pre-activation, exactly where L q is not zero: (..., m) -> (...).

    Where one of the two is within rounding of its limit they do not disagree.
    """
    sizes, tolerance = (directions @ factors.left.T).abs(), factors.tolerance(directions)
    unclear = UNCLEAR * inputs.square().mean(-1, keepdim=True).sqrt()
    wrong = ((sizes > 10 * tolerance) & (inputs < -unclear)) | ((sizes < tolerance / 3) & (inputs > unclear))
    return 1 - wrong.to(inputs).mean(-1)


def select(factors: Factors, pool: Tensor) -> Basis:
    """The directions with most zeros that are no mixtures of earlier ones, filled up to a basis."""
    rank = factors.rank
    taken, span = list[Tensor](), pool.new_zeros(0, rank)
    for direction in pool:
        outside = direction - (direction @ span.T) @ span
        if float(outside.norm()) > NEW and len(taken) < rank:
            taken.append(direction)
            span = torch.linalg.qr(torch.stack(taken).T)[0].T
    filling = torch.linalg.svd(torch.cat([span, span.new_zeros(1, rank)]))[2][len(taken) :]
    return basis_of(factors, torch.cat([*(each[None] for each in taken), filling]), len(taken))


def completed(factors: Factors, pool: Tensor, best: Basis) -> tuple[Basis, Tensor]:
    """The basis with most zeros, and the pool with the directions that its points imply, while these are new.

    Directions of `best` that agree everywhere are kept. A mixture of two examples in place of one leaves its own point
    right: the zeros of that point give the direction.
    """
    basis = select(factors, torch.cat([_agreeing(best), pool]))
    for _ in range(ROUNDS if basis.complete else 0):
        doubtful = basis.agreement < 1
        if not doubtful.any():
            break
        implied = pattern_starts(factors, basis.points[doubtful])  # exact where the point is
        pool = merged(factors, torch.cat([pool, implied, polished(factors, implied)]))
        better = select(factors, torch.cat([_agreeing(max(best, basis, key=_worth)), pool]))
        if not _worth(better) > _worth(basis):
            break
        basis = better
    return basis, pool


def _agreeing(basis: Basis) -> Tensor:
    return basis.directions[basis.agreement == 1] if basis.complete else basis.directions[:0]


def exchange(factors: Factors, basis: Basis, pool: Tensor) -> Basis:
    """Replace one direction at a time by the candidate that raises the agreement most, while one does.

    With one missing, its point is known, since it is orthogonal to all that were found: its zeros give the direction.
    """
    rank = factors.rank
    if basis.found < rank - 1:
        return basis
    for _ in range(ROUNDS):
        doubtful = (basis.agreement < 1).nonzero()[:, 0].tolist()
        implied = pattern_starts(factors, basis.points[doubtful])
        tried = torch.cat([implied, polished(factors, implied), pool])
        most = WORK // (rank * factors.left.numel() * max(len(doubtful), 1))
        if not doubtful or most < rank:
            break
        tried = tried[:most]
        parts = tried.split(max(rank, ENTRIES // factors.left.numel()))
        scores = torch.stack([torch.cat([_exchanged(factors, basis, k, each) for each in parts]) for k in doubtful])
        row, candidate = divmod(int(scores.argmax()), len(tried))
        place, directions = doubtful[row], basis.directions.clone()
        directions[place] = tried[candidate]
        found = max(basis.found, rank if place >= basis.found else 0)
        better = basis_of(factors, directions, found)
        if not float(better.agreement.mean()) > float(basis.agreement.mean()):
            break
        basis = better
    return basis


def _exchanged(factors: Factors, basis: Basis, place: int, pool: Tensor) -> Tensor:
    """The mean agreement with each candidate at a place of the basis, (pool,): all inverses are updates of one."""
    points = torch.linalg.inv(basis.directions.T)
    shares = pool @ points.T  # (pool, b)
    own = shares[:, place, None]
    shifts = shares / own
    shifts[:, place] = 1 - 1 / own[:, 0]
    moved = points - shifts[..., None] * points[place]  # (pool, b, b)
    moved = moved / (moved @ factors.right_bias)[..., None]
    inputs = moved @ factors.weights.T + factors.bias
    directions = basis.directions.expand(len(pool), -1, -1).clone()
    directions[:, place] = pool
    outside = own[:, 0].abs() / points[place].norm()  # of the span of the others
    return torch.where(outside > NEW, agreement(factors, directions, inputs).mean(-1), 0.0)
