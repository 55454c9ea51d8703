"""Entries of a gradient that the client did not send, from those that it sent: NaN marks an unknown entry.

The gradient of a layer with few rows has a low rank: few of its entries tell the others (matrix completion, by
alternating least squares). Behind known maps each gradient is linear in few unknowns, and so are its unknown entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradleak.core.random import Draws
from gradleak.core.tree import Params

SURPLUS = 1.5  # entries that were sent, for each number of a matrix of such a rank
SPARE = 4  # entries of a row or column beyond the rank, at least: fewer leave it open
HELD_BACK, TESTED = 0.03, 20  # share of the entries that were sent on which the others are tested; at least so many
TRUE = 1e-5  # relative error of all of those but a hundredth
ROUNDS, SHRINKS, RIDGE = 300, 0.3, 1e-13  # of alternating least squares; what is left of its ridge; the last one
SETTLED = 3e-9  # relative change of a matrix in a round
EXPECTED = 16.0  # entries in a row or column of a layer: if none was sent, it is zero and not left out
OPEN = 1e-4  # share of a direction's equations that were sent, up to which it is open


def unknown(update: Params, sent: Params) -> Params:
    """The update with NaN for what was not sent.

    The zeros of an update are often all that shows its mask. Where entries were dropped one by one, a row or column of
    a convolution without any is zero in fact: nothing reached it.
    """
    return {name: torch.where(_sent_or_zero(sent[name], value), value, torch.nan) for name, value in update.items()}


def _sent_or_zero(sent: Tensor, update: Tensor) -> Tensor:
    if sent.dim() < 3 or not bool(sent.any()):
        return sent
    flat, zero = sent.flatten(1), update.flatten(1) == 0
    live = flat.any(1)
    share = float(flat[live].double().mean())
    if share == 1.0:  # whole outputs were dropped
        return sent
    columns, rows = ~flat.any(0), ~live[:, None]
    if int(live.sum()) * share > EXPECTED:
        flat = flat | (zero & columns)
    if flat.shape[1] * share > EXPECTED:
        flat = flat | (zero & rows)
    return flat.view_as(sent)


def completed(matrix: Tensor, rank: int, draws: Draws) -> Tensor | None:
    """A matrix of at most this rank from the entries that are not NaN; None where they do not tell the others.

    Columns with too few entries stay NaN, and rows with too few are zero: they say nothing of the row space.
    """
    seen = ~matrix.isnan()
    live = seen & (matrix != 0)
    rows, columns = live.sum(1) >= rank + SPARE, live.sum(0) >= rank + SPARE
    part, there = matrix[rows][:, columns].nan_to_num(0.0), seen[rows][:, columns]
    if min(part.shape) <= rank or int(there.sum()) < SURPLUS * rank * (sum(part.shape) - rank):
        return None
    test = there & (draws.uniform(tuple(part.shape)).to(part.device) < HELD_BACK)
    if int(test.sum()) < TESTED:
        return None
    guess = _alternating(part, there & ~test, rank)
    errors = (guess - part)[test].abs()
    if not float(errors.quantile(0.99)) < TRUE * float(part[test].square().mean().sqrt()):
        return None
    whole = torch.full_like(matrix, torch.nan)
    whole[:, (seen & (matrix == 0)).all(0)] = 0.0
    whole[~rows] = 0.0
    whole[rows.nonzero(), columns.nonzero().T] = guess
    return whole


def _alternating(values: Tensor, there: Tensor, rank: int) -> Tensor:
    """The matrix of this rank that fits the entries that are there, with a ridge that falls to nothing."""
    weights = there.to(values)
    values = values * weights
    left, sizes, _ = torch.linalg.svd(values / weights.mean(), full_matrices=False)
    left, ridge = left[:, :rank] * sizes[:rank].sqrt(), float(sizes[0] * weights.mean())
    last = torch.zeros_like(values)
    for _ in range(ROUNDS):
        right = _fitted(left, values, weights, ridge)
        left = _fitted(right, values.T, weights.T, ridge)
        # Factors of equal size: the ridge holds both, and the equations are no worse than need be.
        (q, r), (other_q, other_r) = torch.linalg.qr(left), torch.linalg.qr(right)
        turn, sizes, other_turn = torch.linalg.svd(r @ other_r.T)
        left, right = (q @ turn) * sizes.sqrt(), (other_q @ other_turn.T) * sizes.sqrt()
        matrix, least = left @ right.T, RIDGE * float(sizes[0])
        if ridge <= least and float((matrix - last).norm()) < SETTLED * float(last.norm()):
            break
        last, ridge = matrix, max(SHRINKS * ridge, least)
    return matrix


def _fitted(factor: Tensor, values: Tensor, weights: Tensor, ridge: float) -> Tensor:
    """(n, rank): for each column of the values, (m, n), its coordinates in the factor, (m, rank)."""
    rank = factor.shape[1]
    first, second = torch.tril_indices(rank, rank, device=factor.device)
    gram = factor.new_zeros(values.shape[1], rank, rank)
    gram[:, first, second] = weights.T @ (factor[:, first] * factor[:, second])  # Cholesky reads the lower half
    gram.diagonal(dim1=1, dim2=2).add_(ridge)
    return torch.cholesky_solve((values.T @ factor)[..., None], torch.linalg.cholesky(gram))[..., 0]


def by_rows(matrix: Tensor, inputs: Tensor) -> Tensor:
    """A matrix, (m, n), whose rows are mixtures of known inputs, (k, n), from its entries that are not NaN."""
    whole = matrix.clone()
    for row, seen in zip(whole, ~matrix.isnan(), strict=True):
        row[~seen] = (torch.linalg.pinv(inputs[:, seen]).T @ row[seen]) @ inputs[:, ~seen]
    return whole


def by_columns(right: Tensor, hat: Tensor) -> Tensor | None:
    """The right side of equations, (equations, channels), where it is NaN, if it can be fitted but for rounding.

    None where most channels have too few. Directions of a channel that its equations leave open are zero.

    hat   (equations, rank), orthonormal: what can be fitted
    """
    seen, rank = ~right.isnan(), hat.shape[1]
    if float(seen.sum(0).double().median()) < SURPLUS * rank:
        return None
    whole = right.nan_to_num(0.0)
    for channel, there in enumerate(seen.T):
        if not bool(there.all()):
            part = hat[there]
            values, turn = torch.linalg.eigh(part.T @ part)
            turn = turn[:, values > OPEN]
            step = turn @ ((turn.T @ (part.T @ right[there, channel])) / values[values > OPEN])
            whole[~there, channel] = hat[~there] @ step
    return whole
