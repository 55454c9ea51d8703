"""One-to-one matching of reconstructions and private images.

A batch has no order, so a reconstruction may show any of the private images. The matching is the linear assignment

    min over one-to-one maps p of  sum_i cost[i, p(i)]            (Kuhn 1955; here scipy's shortest augmenting path)

with one cost for all attacks of a report. Taking the best of all pairs, or the best private image for each
reconstruction, would let one good image count several times, and is not offered here (`metrics.s004_compat` reproduces
a paper that did).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Distance: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""All distances between two sets of images, (n, C, H, W) and (m, C, H, W) -> (n, m); smaller is more alike."""


def pairwise_mse(first: Tensor, second: Tensor) -> Tensor:
    """Mean squared error of every pair, (n, m)."""
    rows, columns = first.flatten(1), second.flatten(1)
    # Not through inner products: their rounding would hide which of two near-identical images is nearer.
    distance = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.square() / rows.shape[1]


def cost_matrix(
    first: Tensor, second: Tensor, *, distance: Distance = pairwise_mse, same_label: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The cost (n, m) of every pair; `distance` is `pairwise_mse` or, for instance, `LPIPS("vgg").pairwise`.

    `same_label=((n,), (m,))` restricts the matching to equal labels: other pairs get an entry so large that the
    assignment has as few of them as possible (some are unavoidable where the two sets of labels differ).
    """
    cost = distance(first, second)
    if same_label is None:
        return cost
    large = (cost.max() + 1) * (max(cost.shape) + 1)  # more than any sum of allowed entries
    return torch.where(same_label[0][:, None] == same_label[1][None, :], cost, cost + large)


def match(cost: Tensor) -> Tensor:
    """For each row of `cost` (n, m) its matched column, (n,); -1 for the rows without a match where n > m."""
    if cost.dim() != 2:
        raise ValueError(f"The cost is one matrix (rows, columns); given shape {tuple(cost.shape)}.")
    if not bool(torch.isfinite(cost).all()):
        raise ValueError("The cost has non-finite entries: clean the images first (metrics.to_unit does).")
    matched = torch.full((cost.shape[0],), -1, dtype=torch.long)
    if min(cost.shape) == 1:  # nothing to assign: a single image needs no scipy
        at = int(cost.argmin())
        matched[at // cost.shape[1]] = at % cost.shape[1]
        return matched.to(cost.device)
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as problem:
        raise ImportError("Matching needs scipy (linear_sum_assignment): pip install 'scipy>=1.11'.") from problem
    rows, columns = linear_sum_assignment(cost.detach().cpu().double().numpy())
    matched[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return matched.to(cost.device)


def identification_rank(
    found: Tensor,
    truth: Tensor,
    others: Tensor,
    *,
    distance: Distance = pairwise_mse,
    same: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rank of the true image, (N,), and size of the gallery, (N,): each reconstruction is looked up among real images.

    The gallery of image i is its truth and all `others` but copies of it. Rank 1 means re-identified; a random guess
    gets it with probability 1 / size. Ties count against the attack: an output equally far from all identifies nobody.
    `same` says which pairs are copies, (N, M); None: those whose mean squared error is below 1e-12.
    """
    # The distances of aligned pairs: the diagonals of small blocks.
    blocks = zip(found.split(16), truth.split(16), strict=True)
    true = torch.cat([distance(a, b).diagonal() for a, b in blocks])
    different = pairwise_mse(truth, others) >= 1e-12 if same is None else ~same(truth, others)  # (N, M)
    ahead = (distance(found, others) <= true[:, None]) & different.to(true.device)
    return 1 + ahead.sum(1), 1 + different.sum(1).to(true.device)
