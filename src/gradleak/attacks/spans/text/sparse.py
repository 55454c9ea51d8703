"""The bag from a part of a span: an adapter of rank r tells more tokens than r.

The gradient of a map with few outputs, such as A of a LoRA adapter, has r rows for N tokens, and r < N: these rows are
mixtures of the tokens' rows, and no token lies in their span. But each is a row of a known table, and few of them
explain all mixtures at once. This is sparse recovery from several measurements with one support. Tokens are picked one
after the other (rank-aware order recursive matching pursuit: Davies and Eldar, IEEE Trans. Inf. Theory, 2012), in
coordinates in which the table is white, until nothing is left:

    pick  argmax_v |U^T P a_v| / |P a_v|,     U: what is left of the span, P: off the tokens picked so far

Fewer tokens than the width that explain everything to rounding are the client's: others could not by chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITE = 1e-9  # of the largest eigenvalue of the table: smaller ones count as this
EXPLAINED = 1e-3  # of a direction: less that is left is rounding
OPEN = 1e-3  # share of a row off the tokens picked so far: a smaller one is picked already
SHARE = 0.9  # of the dimensions that may be used up: with as many tokens as dimensions anything is explained
KEPT = 65_536  # rows of the table, those nearest to the span, where it has more
NEEDED = 1e-4  # of the largest coefficient: a token with less is not needed


def picked(directions: Tensor, table: Tensor) -> Tensor:
    """Numbers of the rows of the table, (rows, width), that explain the directions, (k, width); none if none do."""
    far = (table @ directions.to(table).T).norm(dim=1) / table.norm(dim=1).clamp_min(1e-30)
    kept = far.topk(min(KEPT, len(far))).indices.sort().values
    rows = table[kept].double()
    whitening = _whitening(rows)
    white = torch.nn.functional.normalize(rows @ whitening, dim=1).float()
    left = torch.linalg.qr((directions @ whitening).T).Q.float()  # (width, k)
    chosen, most = list[int](), int(SHARE * (table.shape[1] - len(directions)))
    basis = left.new_zeros(len(left), 0)
    open_share = torch.ones(len(white), device=white.device)
    while len(chosen) < most:
        turned, sizes, _ = torch.linalg.svd(left, full_matrices=False)
        turned = turned[:, sizes > EXPLAINED]
        if not turned.shape[1]:
            break
        scores = (white @ turned).square().sum(1) / open_share
        scores[open_share < OPEN] = -1.0
        chosen.append(int(scores.argmax()))
        step = white[chosen[-1]]
        for _ in range(2):  # twice: once leaves rounding
            step = step - basis @ (basis.T @ step)
        step = step / step.norm()
        basis = torch.cat([basis, step[:, None]], dim=1)
        open_share = open_share - (white @ step).square()
        left = left - step[:, None] * (step @ left)
    else:
        return torch.zeros(0, dtype=torch.long)
    amounts = torch.linalg.lstsq(rows[chosen].T, directions.T).solution.norm(dim=1)  # (tokens,)
    found = torch.tensor(chosen)[(amounts > NEEDED * amounts.max()).cpu()]
    return kept.cpu()[found].sort().values


def _whitening(rows: Tensor) -> Tensor:
    """The inverse root of the second moments."""
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    return (vectors * values.clamp_min(WHITE * float(values[-1])).rsqrt()) @ vectors.T
