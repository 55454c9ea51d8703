"""Which sparse directions are examples: those whose inputs would switch the ReLU as the zeros say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.attacks.spear.directions import (
    Factors,
    merged,
    null_starts,
    pattern_starts,
    polished,
    row_starts,
    sparse,
)
from gradleak.core.random import Draws

NEW = 0.02  # share of a direction outside of those taken before: with less it is a mixture of them
UNCLEAR = 1e-4  # of the root mean square of the pre-activations: nearer to zero their sign means nothing
ENOUGH = 0.99  # agreement
ENTRIES = 2**20  # numbers that one comparison of candidates holds
FEW = 16  # examples up to which b - 1 random outputs are off for one of them often enough
STARTS = 32  # of a kind, times the number of the wave, as far as memory allows
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
        pool = merged(factors, torch.cat([pool, *_candidates(factors, best, wave, draws.child(wave))]))
        basis = exchange(factors, best if best.complete else select(factors, pool), pool)
        better = _worth(basis) > _worth(best)
        best, idle = (basis, 0) if better else (best, idle + 1)
        if _worth(best)[1] == 1 or (_worth(best)[1] > ENOUGH and idle == PATIENCE):
            break
    return best, wave


def _worth(basis: Basis) -> tuple[int, float]:
    """More directions first, then their agreement."""
    return basis.found, float(basis.agreement.mean()) if basis.complete else 0.0


def _candidates(factors: Factors, best: Basis, wave: int, draws: Draws) -> list[Tensor]:
    """Sparse directions from rows of L, from random zeros, and from the flat that the examples found leave open."""
    rank = factors.rank
    count = max(rank, min(STARTS * wave, ENTRIES // factors.left.numel()))
    candidates = [sparse(factors, row_starts(factors, count, draws.child(0)))]
    if rank <= FEW:
        candidates.append(polished(factors, null_starts(factors, min(NULLS, 16 * 2**rank), draws.child(1))))
    certain = best.agreement > ENOUGH if best.complete else torch.arange(rank) < best.found
    left_open = torch.linalg.svd(best.directions[certain])[2][int(certain.sum()) :]
    points = draws.child(2).normal((count, len(left_open)), dtype=factors.left.dtype) @ left_open
    candidates.append(sparse(factors, pattern_starts(factors, torch.cat([points, best.points])), wide=0.1))
    return candidates


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


def exchange(factors: Factors, basis: Basis, pool: Tensor) -> Basis:
    """Replace one direction at a time by the candidate that raises the agreement most, while one does.

    With one missing, its point is known, since it is orthogonal to all that were found: its zeros give the direction.
    """
    rank = factors.rank
    if basis.found < rank - 1:
        return basis
    for _ in range(ROUNDS):
        doubtful = (basis.agreement < 1).nonzero()[:, 0].tolist()
        implied = polished(factors, pattern_starts(factors, basis.points[doubtful]))
        tried = torch.cat([implied, pool])[: max(rank, ENTRIES // factors.left.numel())]
        if not doubtful or not len(tried):
            break
        scores = torch.stack([_exchanged(factors, basis, place, tried) for place in doubtful])
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
