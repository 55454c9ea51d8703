"""The feature maps that a convolution saw, in closed form: its patches overlap, and few maps have them all in a span.

The row space S of dL/dW holds every patch of every example. A map f of which ALL patches lie in S is rare: neighbouring
patches share pixels, and patches at the border hold the zeros of the padding. These are linear equations in f, many
more than unknowns. For a convolution of stride 1 their solutions are the maps of the B examples and their mixtures, and
nothing else. (With a stride, a map that is shifted by it solves them too.) So the deepest layers of a network give
their inputs away by linear algebra, before any search. ReLU then parts the examples: no map is below zero, and each has
features on that all others have off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.core.random import Draws

SPARE = 4  # vectors beyond the wanted ones: they show the gap, and speed the iteration up
DEGREE, ROUNDS = 16, 12  # of the Chebyshev filter; of the subspace iteration at most
SETTLED = 1e-3  # change of a level, relative, at which the iteration stops
ROUNDING = 1e-12  # levels below it are equal
CLEAR = 20.0  # a level so many times as large as the one before may be the first that is no solution
FEW = 0.25  # of the rows: more missing directions would hold the patches of any map
COMPLETIONS, COMPLETE = 20, 1e-11  # rounds at most in which they are looked for; level of maps that need none
GAP = 5.0  # the next solution is at least so many times as far outside
CLEARLY_ON = (0.1, 0.01)  # of the longest: shorter points are rounding, or many maps have none that they alone have on
EDGE = 1e-3  # of the highest: lower points are too near the tip of the cone
CORRECTIONS, TAIL, ZEROS = 5, 4.0, 4  # steps; deviations of noise that a zero does not exceed; zeros for each example
SAME, NEW = 0.999, 0.05  # cosine of equal maps; share of a map outside of those before it
NEGATIVE = 1e-2  # energy of a map below zero, where ReLU came before

Operator = Callable[[Tensor], Tensor]
Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # kernel, dilation, padding, stride


@dataclass(frozen=True, eq=False)
class Maps:
    """The maps that have all patches in the span.

    basis    (K, features), orthonormal: K examples of the B, those whose loss is above the rounding of the gradient
    levels   (B + SPARE,) share of the patches' energy that does not fit together, ascending: the first K are rounding
    """

    basis: Tensor
    levels: Tensor

    @property
    def level(self) -> float:
        """Of the worst of the K solutions."""
        return float(self.levels[len(self.basis) - 1])

    @property
    def gap(self) -> float:
        """The level of the next one, which is no solution."""
        return float(self.levels[len(self.basis)])

    @property
    def examples(self) -> int:
        return len(self.basis)

    @property
    def determined(self) -> bool:
        """Is the next one clearly no solution?"""
        return self.gap > GAP * self.level


def solve_maps(
    layer: nn.Conv2d,
    span: Tensor,
    shape: tuple[int, ...],
    examples: int,
    draws: Draws,
    rows: int = 0,
    centred: bool = False,
) -> Maps:
    """The `examples` maps of this shape, (C, H, W), whose patches fit best into the span, (rank, inputs).

    Outputs that are dead make the rank less than the number of patches, `rows`. For one example the missing directions
    are then found with the map: those in which its patches lie outside, in turn with the map that fits best into all.

    centred   the span holds differences of patches only: those of a map lie in it less their mean
    """
    assert not isinstance(layer.padding, str)  # `plain` layers only
    best = _solved(layer, span, shape, examples, draws, centred)
    missing = rows - len(span)
    if centred or examples > 1 or not 0 < missing <= FEW * rows:
        return best
    for _ in range(COMPLETIONS):
        if best.level < COMPLETE:
            break
        positive = (best.basis * best.basis.sum().sign()).clamp_min(0).reshape(1, *shape)
        patches = F.unfold(positive, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0].T
        outside = patches - (patches @ span.T) @ span
        full = torch.cat([span, torch.linalg.svd(outside, full_matrices=False)[2][:missing]])
        best = _solved(layer, full, shape, examples, draws)
    return best


def _solved(
    layer: nn.Conv2d, span: Tensor, shape: tuple[int, ...], examples: int, draws: Draws, centred: bool = False
) -> Maps:
    """The maps for a complete span.

    Unknowns are the coordinates c_p of the patches in the span. The operator K puts the patches together, takes the
    mean where they overlap, and reads the coordinates of the new patches: its eigenvalue is 1 where they fit, and below
    1 elsewhere. Subspace iteration with a Chebyshev filter finds the largest. `centred`: the mean of the patches is
    free, so what the span misses of it is a coordinate too.
    """
    assert not isinstance(layer.padding, str)  # `plain` layers only
    window: Window = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    ones = F.unfold(torch.ones(1, *shape, dtype=span.dtype, device=span.device), *window)
    count, places = F.fold(ones, shape[1:], *window), ones.shape[-1]

    def patches(c: Tensor) -> Tensor:  # (block, coordinates) -> (block, places, inputs)
        inside = c[:, : places * len(span)].unflatten(1, (places, len(span))) @ span
        return inside + c[:, None, places * len(span) :] / places**0.5 if centred else inside

    def together(c: Tensor) -> Tensor:  # (block, coordinates) -> (block, C, H, W)
        return F.fold(patches(c).transpose(1, 2), shape[1:], *window) / count.clamp_min(1)

    def read(rows: Tensor) -> Tensor:
        inside = (rows @ span.T).flatten(1)
        if not centred:
            return inside
        mean = rows.mean(1) * places**0.5
        return torch.cat([inside, mean - (mean @ span.T) @ span], 1)

    def fitted(c: Tensor) -> Tensor:
        return read(F.unfold(together(c), *window).transpose(1, 2))

    size = examples + SPARE
    coordinates = places * len(span) + centred * span.shape[1]
    c = draws.normal((size, coordinates), dtype=span.dtype).to(span.device)
    c, values, levels = _rotated(c, fitted), None, torch.ones(size, dtype=span.dtype, device=span.device)
    for _ in range(ROUNDS):
        c = _filtered(c, fitted, float(values[-1]) if values is not None else 0.9)
        c, values = _ritz(c, fitted)
        before, levels = levels, _levels(patches(c), together(c), window)
        if float((levels[:examples] - before[:examples]).abs().max()) <= SETTLED * float(levels[examples]):
            break
    sizes = levels.clamp_min(ROUNDING)
    gaps = (sizes[1 : examples + 1] / sizes[:examples] > CLEAR).nonzero()[:, 0]
    solutions = (
        1 + int(gaps[-1]) if len(gaps) else examples
    )  # examples of a smaller loss come later, with more rounding
    maps = together(c[:solutions]).flatten(1)
    return Maps(torch.linalg.qr(maps.T)[0].T.contiguous(), levels.cpu())


def _filtered(c: Tensor, apply: Operator, edge: float) -> Tensor:
    """T_degree of the operator, scaled such that eigenvalues from 0 to `edge` stay between -1 and 1."""
    scale = 2 / min(max(edge, 0.1), 1 - 1e-4)
    last, now = c, scale * apply(c) - c
    for _ in range(DEGREE - 1):
        last, now = now, 2 * (scale * apply(now) - now) - last
    return now


def _rotated(c: Tensor, apply: Operator) -> Tensor:
    return torch.linalg.qr(apply(c).flatten(1).T)[0].T.reshape(c.shape)


def _ritz(c: Tensor, apply: Operator) -> tuple[Tensor, Tensor]:
    """Orthonormal Ritz vectors and their values, the largest first."""
    flat = torch.linalg.qr(c.flatten(1).T)[0].T
    values, turn = torch.linalg.eigh(flat @ apply(flat.reshape(c.shape)).flatten(1).T)
    return (turn.T.flip(0) @ flat).reshape(c.shape), values.flip(0)


def _levels(patches: Tensor, maps: Tensor, window: Window) -> Tensor:
    """The share of the patches' energy that the map does not have, without the rounding of 1 - value."""
    apart = patches - F.unfold(maps, *window).transpose(1, 2)
    return apart.square().sum((1, 2)) / patches.square().sum((1, 2))


def separated(basis: Tensor) -> Tensor:
    """The maps of single examples in the span of all, (found, features), of unit length.

    Each feature is a point of the coordinates: sum_b m_b e_b with m_b >= 0, so all lie in a cone, and its edges are
    features that one example alone has on. These give a direction for each example, and the features that are zero
    along it correct it. Of two sets of directions those that are less below zero are kept; fewer than the basis has
    rows where some cannot be told apart.
    """
    points = basis.T  # (features, K)
    directions = torch.cat([_corrected(points, _facing_edges(points, least)) for least in CLEARLY_ON])
    maps = _unit(directions @ basis)
    negative = maps.clamp(max=0).square().sum(1)
    chosen: list[Tensor] = []
    for index in negative.argsort().tolist():  # the map of an example is nowhere below zero, to rounding
        if float(negative[index]) > NEGATIVE or len(chosen) == len(basis):
            continue
        others = torch.linalg.qr(torch.stack(chosen).T)[0].T if chosen else maps[:0]
        if float((maps[index] - (maps[index] @ others.T) @ others).norm()) > NEW:
            chosen.append(maps[index])
    return torch.stack(chosen) if chosen else maps[:0]


def _facing_edges(points: Tensor, least: float) -> Tensor:
    """For each edge of the cone of the points the direction, (K,), that is zero on all the others: a map each, (K, K).

    On a plane across the cone the edges are corners: the farthest point is one, and without its part the next
    (successive projection: Araujo et al., Chemometrics and Intelligent Laboratory Systems, 2001).

    least   length of the points that count, as a share of the longest: rounding turns short ones
    """
    lengths = points.norm(dim=1)
    points = points[lengths > least * lengths.max()]
    heights = points @ (points.norm(dim=1) @ points)
    across = heights > EDGE * heights.max()
    points = points[across] / heights[across, None]
    rest, corners = points, list[Tensor]()
    for _ in range(points.shape[1]):
        farthest = rest.norm(dim=1).argmax()
        corners.append(points[farthest])
        edge = _unit(rest[farthest])
        rest = rest - (rest @ edge)[:, None] * edge
    return torch.linalg.pinv(torch.stack(corners)).T


def _corrected(points: Tensor, directions: Tensor) -> Tensor:
    """The directions, each fitted to the features that are zero along it: up to the error that is seen below zero."""
    for _ in range(CORRECTIONS):
        values = directions @ points.T  # (directions, features)
        values = values * values.sum(1, keepdim=True).sign()
        below = values.clamp(max=0).square().sum(1, keepdim=True) / (values < 0).sum(1, keepdim=True).clamp_min(1)
        least = ROUNDING**0.5 * values.abs().amax(1, keepdim=True)
        zero = (values.abs() <= TAIL * below.sqrt().maximum(least)).to(points)
        gram = torch.einsum("df,fi,fj->dij", zero, points, points)
        fitted = torch.linalg.eigh(gram)[1][:, :, 0]
        directions = torch.where(zero.sum(1, keepdim=True) < ZEROS * len(directions), directions, fitted)
    return directions * (directions @ points.T).sum(1, keepdim=True).sign()


def _unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-30)
