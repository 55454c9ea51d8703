"""Projections onto sets that unknowns are held in, besides the box of `Pixels`."""

from __future__ import annotations

import torch
from torch import Tensor


def l1_ball(value: Tensor, radius: float | Tensor) -> Tensor:
    """The nearest point with sum |entries| <= radius, for one lane: all axes together.

    With the magnitudes sorted, u_1 >= u_2 >= ..., rho = max{j : j u_j > sum_{k<=j} u_k - radius} and
    tau = (sum_{k<=rho} u_k - radius) / rho, entries shrink to sign(v) max(|v| - tau, 0). A point inside stays.

    Reference: Duchi, Shalev-Shwartz, Singer, Chandra, ICML 2008. GIFD holds intermediate features in such balls.
    """
    sizes = value.abs().flatten()
    ordered = sizes.sort(descending=True).values
    sums = ordered.cumsum(0) - radius
    counts = torch.arange(1, ordered.shape[0] + 1, device=value.device, dtype=value.dtype)
    rho = (counts * ordered > sums).sum().clamp_min(1)
    tau = sums.index_select(0, rho.reshape(1) - 1)[0] / rho
    shrunk = value.sign() * (value.abs() - tau).clamp_min(0)
    return torch.where(sizes.sum() > radius, shrunk, value)
