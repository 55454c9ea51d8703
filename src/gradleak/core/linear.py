"""Linear algebra of one lane, all of which runs under vmap: dense Jacobians, and solving with a Cholesky factor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import jvp, vmap


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor, block: int = 64) -> Tensor:
    """(inputs, outputs): row i is the derivative along the i-th entry of x, forward mode, `block` at a time.

    An update has far more entries than a batch has pixels: n products forward cost less than d backward. It runs under
    an outer vmap, and reads no value on the host.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1; given {block}.")
    n = x.numel()

    def along(direction: Tensor) -> Tensor:
        return jvp(function, (x,), (direction.reshape(x.shape),))[1].flatten()

    columns = torch.arange(n, device=x.device)
    pieces = []
    for start in range(0, n, block):  # a block of the identity at a time: all n rows would be n x n
        rows = columns[start : start + block, None]
        pieces.append(vmap(along)((rows == columns).to(x.dtype)))  # (block, outputs)
    return torch.cat(pieces)


def gram(rows: Tensor) -> Tensor:
    """rows @ rows.T, (n, m) -> (n, n): only the blocks on and below the diagonal are multiplied, the rest is copied."""
    starts = range(0, rows.shape[0], max(256, -(-rows.shape[0] // 8)))
    edges = [*starts, rows.shape[0]]
    columns = [
        torch.cat([rows.new_zeros(begin, end - begin), rows[begin:] @ rows[begin:end].T])
        for begin, end in pairwise(edges)
    ]
    lower = torch.cat(columns, dim=1).tril()
    return lower + lower.tril(-1).T


def solved(factor: Tensor, right: Tensor) -> Tensor:
    """(L L^T)^-1 right, for a lower factor L (n, n) and right (n,).

    Two triangular solves: torch.cholesky_solve fails on CUDA for batches of matrices with thousands of rows.
    """
    half = torch.linalg.solve_triangular(factor, right[:, None], upper=False)
    return torch.linalg.solve_triangular(factor.T, half, upper=True)[:, 0]
