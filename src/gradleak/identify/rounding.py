"""The digits of an observation: below which size a residual or a singular value counts as zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.scenario.observation import Observation


@dataclass(frozen=True)
class Rounding:
    """The digits of an observation, relative to each tensor's norm.

    wire       one rounding on the way to the server
    residual   up to here a residual is rounding: wire + 50 roundings of the client's arithmetic, at least 1e-9
    rank       singular values below this share of the largest are zero: wire + 10 roundings, at least 1e-10
    whole      as `residual`, for the update as one vector: a tensor that hardly moved, such as LoRA's first factor,
               counts for little

    One step in float32 differs from the same step in float64 by 3 to 10 roundings (LeNet, ConvNet, ResNet-20). A client
    that rounds its weights between several steps may differ by more; then nothing is certified.
    """

    wire: float
    residual: float
    rank: float
    whole: float


def rounding_of(seen: Observation) -> Rounding:
    """Read off the update: the coarsest type that can hold it, and whether it is a difference of rounded weights.

    If weights travelled, w - (w - u) = u in every entry, and the error is a rounding of the weights, not of the update.
    An update that travelled as such passes this test in few entries only.
    """
    update, weights = seen.update, {name: seen.weights[name] for name in seen.update}
    eps = _coarsest(update)
    wire = whole = eps
    returned = tree.map(lambda w, u: w - u.to(w.dtype), weights, update)
    if all(torch.equal(w - r, u.to(w.dtype)) for w, r, u in zip(*map(tree.leaves, (weights, returned, update)))):
        lengths = [(float(r.double().norm()), float(u.double().norm())) for r, u in _pairs(returned, update)]
        ratios = [(r / u) ** 2 for r, u in lengths if u > 0]
        if ratios:
            coarsest = _coarsest(returned)
            total = math.sqrt(sum(r**2 for r, _ in lengths) / sum(u**2 for _, u in lengths))
            wire = max(eps, coarsest * math.sqrt(sum(ratios) / len(ratios)))
            whole = max(eps, coarsest * total)
    # A client that sends half precision has computed in float32, not in half.
    computed = min(eps, torch.finfo(torch.float32).eps)
    residual, rank, whole = wire + 50 * computed, wire + 10 * computed, whole + 50 * computed
    return Rounding(wire, max(1e-9, residual), max(1e-10, rank), max(1e-9, whole))


def spectral_spread(matrix: Tensor, largest: float) -> float:
    """What independent errors of the matrix's norm add to singular values, as a share of the largest.

    Errors of norm e in all entries of an (m, n) matrix have a spectral norm of e (1/sqrt(m) + 1/sqrt(n)).
    """
    return float(matrix.norm()) / largest * sum(side**-0.5 for side in matrix.shape)


def _pairs(a: Params, b: Params) -> zip[tuple[Tensor, Tensor]]:
    return zip(tree.leaves(a), tree.leaves(b))


def _coarsest(values: Params) -> float:
    """The rounding of the coarsest type that holds every entry exactly: a cast to a wider type adds no digits."""
    eps = max((torch.finfo(value.dtype).eps for value in tree.leaves(values)), default=1.0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if all(torch.equal(value.to(dtype).to(value.dtype), value) for value in tree.leaves(values)):
            return max(eps, torch.finfo(dtype).eps) if any(bool(v.any()) for v in tree.leaves(values)) else eps
    return eps
