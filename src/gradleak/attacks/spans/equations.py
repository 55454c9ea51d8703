"""The linear equations that gradients are in the maps before them: solved, and asked which ReLUs were wrong.

A wrong ReLU spoils the equations of one output only. Without that output the others fit, and what they leave of its
gradient names the ReLU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.attacks.spans.unsent import by_columns

WEAK = 1e-4  # singular values below this share of the largest: rounding of float32 is a percent of such directions
WELL = 1e-2  # singular values from this share on tell a direction in spite of noise
ODD = 5.0  # residuals of an output, in units of the median, from which on it holds a wrong ReLU
SPARE = 1.4  # equations for each unknown from which on some may be left out
REWEIGHTINGS = 10  # rounds of least squares in which such outputs lose weight
CLOSE = 1e-2  # relative: two passes at slightly different maps
TOP = 0.05  # share of the best of a round: weaker ones may follow from stronger ones
EVIDENCE = 100.0  # squared deviations of noise that a wrong ReLU explains at least
MOST_ODD = 32  # outputs in each round whose ReLUs are decided all at once
LEAST_SPARE = 0.1  # share of a change that is left of it at least
CERTAIN = 3.0  # deviations of noise
TOLD_APART = 0.5  # doubtful entries for each number of an output's gradient, up to which they are told apart
FLIPS = 3  # of an output in each round of looking for wrong ones
FITS = 1e-3  # of the energy that was left: so much less, and the outputs that were left out were the wrong ones
LEFT_TO_SPARE = 0.15  # of the equations to spare, at least: fewer would fit by chance
ROUNDING = 1e-12  # of the energy of gradients: no wrong ReLU leaves so little
NONE_LEFT = 1e-6  # of a change in some equations, that a fit to all of them leaves
RIDGE = 1e-9  # of Gram matrices of unit vectors
FRONTIER_EQUATIONS = 1.25  # of a frontier for each number of its images: with fewer a wrong image may fit


@dataclass(frozen=True, eq=False)
class Frontier:
    """What equations say of the maps before the earliest known ones: coordinates in some directions, no more.

    layer        the first convolution that sees them
    directions   (k, examples, H x W), orthonormal rows up to `units`
    values       (k, C): the maps' coordinates
    units        (examples,): maps are multiplied by them first: an example of a small loss says little
    """

    layer: str
    directions: Tensor
    values: Tensor
    units: Tensor

    def fixes(self, numbers: int) -> bool:
        """Are there more equations than numbers of its images, with so many in each?"""
        return self.values.numel() >= FRONTIER_EQUATIONS * self.directions.shape[1] * numbers

    def padded(self, most: int) -> Frontier:
        """With empty equations, up to so many directions."""
        more = most - len(self.values)
        wide = [torch.cat([each, each.new_zeros(more, *each.shape[1:])]) for each in (self.directions, self.values)]
        return replace(self, directions=wide[0], values=wide[1])

    def residual(self, maps: Tensor) -> Tensor:
        """(k, C) of maps (examples, C, H, W)."""
        flat = (maps * self.units.view(-1, 1, 1, 1)).flatten(2)
        return torch.einsum("kbp,bcp->kc", self.directions, flat) - self.values

    def distance(self, maps: Tensor) -> Tensor:
        return self.residual(maps.to(self.values)).norm()


@dataclass(frozen=True, eq=False)
class Solution:
    """Maps, and the directions (k, examples x H x W) of each channel that the equations leave open.

    units, well, values   as in `Frontier`: what is seen well
    spare   by layer (outputs, taps, taps): what is left of a change in the equations of an output
    inverse   from the right side of the equations to maps
    """

    maps: Tensor
    free: Tensor
    spare: list[Tensor]
    units: Tensor
    well: Tensor
    values: Tensor
    inverse: Callable[[Tensor], Tensor]

    def step(self, rest: Tensor) -> Tensor:
        """The maps that explain such a rest of the equations."""
        return self.inverse(rest).reshape(len(self.maps), *self.maps.shape[2:], -1).permute(0, 3, 1, 2)

    def frontier(self, layer: str, alive: Tensor) -> Frontier:
        directions = self.well.new_zeros(len(self.well), len(alive), self.well.shape[1] // len(self.maps))
        directions[:, alive] = self.well.unflatten(1, (len(self.maps), -1))
        units = self.units.new_zeros(len(alive))
        units[alive] = self.units
        return Frontier(layer, directions, self.values, units)


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """Weighted least squares by the eigenvectors of the normal equations: faster than an SVD of the matrix."""

    matrix: Tensor
    right: Tensor
    weights: Tensor
    values: Tensor
    directions: Tensor

    @classmethod
    def of(cls, matrix: Tensor, right: Tensor, weights: Tensor) -> LeastSquares:
        return cls(matrix, right, weights, *torch.linalg.eigh((weights * matrix).T @ matrix))

    @property
    def clear(self) -> Tensor:
        """Directions that the equations see."""
        return self.values > WEAK**2 * self.values[-1]

    @property
    def hat(self) -> Tensor:
        """(equations, rank), orthonormal: what can be fitted of the weighted right side."""
        return (self.weights.sqrt() * self.matrix) @ (self.directions / self.values.sqrt())[:, self.clear]

    def solve(self, right: Tensor) -> Tensor:
        seen = self.directions[:, self.clear]
        return seen @ ((seen.T @ (self.matrix.T @ (self.weights * right))) / self.values[self.clear, None])

    @cached_property
    def solution(self) -> Tensor:  # (examples x places, C)
        return self.solve(self.right)

    @property
    def rest(self) -> Tensor:
        return self.right - self.matrix @ self.solution


def spoilt(fit: LeastSquares, taps: Sequence[int]) -> Tensor:
    """The few outputs without whose equations the others fit to rounding; none if there are no such.

    With P = 1 - hat hat^T and r = P right, leaving the equations D out lowers the rest by r_D^T P_DD^-1 r_D. Noise
    falls with the equations that are left to spare; only what a wrong ReLU makes falls faster.

    taps   equations of each output
    """
    hat, rest, left_out = fit.hat, fit.rest, list[int]()
    project = torch.eye(len(hat)).to(hat) - hat @ hat.T
    before = float(rest.square().sum())
    to_spare, most = len(hat) - hat.shape[1], max(taps)
    none = torch.zeros(0, dtype=torch.long, device=hat.device)
    if before < ROUNDING * float(fit.right.square().sum()):
        return none
    starts = [0, *torch.tensor(taps).cumsum(0).tolist()]
    spans = [slice(*ends) for ends in itertools.pairwise(starts)]
    steps = torch.arange(most, device=hat.device)
    inside = steps < torch.tensor(taps, device=hat.device)[:, None]
    places = (torch.tensor(starts[:-1], device=hat.device)[:, None] + steps) * inside
    for number in range(1, 1 + int((1 - LEFT_TO_SPARE) * to_spare) // most):
        blocks = project[places[:, :, None], places[:, None, :]] * inside[:, :, None] * inside[:, None, :]
        inverse = torch.linalg.pinv(blocks, atol=NONE_LEFT, rtol=0.0, hermitian=True)
        own = rest[places] * inside[..., None]  # (outputs, taps, channels)
        worst = int((own * (inverse @ own)).sum((1, 2)).argmax())
        gain = project[:, spans[worst]] @ inverse[worst, : taps[worst], : taps[worst]]
        rest, project = rest - gain @ rest[spans[worst]], project - gain @ project[spans[worst]]
        left_out.append(worst)
        if float(rest.square().sum()) / (to_spare - number * most) < FITS * before / to_spare:
            return torch.tensor(left_out, device=hat.device)
    return none


@dataclass(frozen=True, eq=False)
class System:
    """The linear equations of the layers that see one map, for given deltas.

    gradients   NaN where an entry was not sent (`filled`)
    """

    modules: Sequence[Any]
    gradients: Sequence[Tensor]
    shape: Sequence[int]

    @cached_property
    def whole(self) -> bool:
        """Was every entry sent?"""
        return not any(bool(gradient.isnan().any()) for gradient in self.gradients)

    def filled(self, deltas: Sequence[Tensor]) -> System | None:
        """With the entries that were not sent as the others say, at these deltas; None where they say too little."""
        if self.whole:
            return self
        matrix, right = self._matrix(deltas), self._right
        if not bool(matrix.isfinite().all()):
            return None
        sizes = matrix.square().sum(0).reshape(self.shape[0], -1).mean(1).sqrt().clamp_min(1e-300)
        matrix = matrix / sizes.repeat_interleave(matrix.shape[1] // self.shape[0])
        whole = by_columns(right, LeastSquares.of(matrix, right, matrix.new_ones(len(matrix), 1)).hat)
        if whole is None:
            return None
        parts = zip(whole.split(self._equations), self.gradients, strict=True)
        gradients = [part.reshape(len(g), *g.shape[2:], -1).permute(0, 3, 1, 2) for part, g in parts]
        return replace(self, gradients=gradients)

    def _matrix(self, deltas: Sequence[Tensor]) -> Tensor:
        return torch.cat([equations(*each, self.shape) for each in zip(deltas, self.modules, strict=True)])

    @property
    def _right(self) -> Tensor:
        return torch.cat([gradient.permute(0, 2, 3, 1).flatten(0, 2) for gradient in self.gradients])

    def solve(self, deltas: Sequence[Tensor]) -> Solution | None:
        """The maps, as far as the equations tell; None where these are not finite.

        Outputs whose equations a wrong ReLU spoils count for less (reweighted least squares), or are left out where
        equations are scarce.
        """
        matrix, right, shape = self._matrix(deltas), self._right, self.shape
        if not bool(matrix.isfinite().all()):
            return None
        # Each example in units of its own delta: a small loss is no reason to leave a direction open.
        sizes = matrix.square().sum(0).reshape(shape[0], -1).mean(1).sqrt().clamp_min(1e-300)
        units = sizes.repeat_interleave(matrix.shape[1] // shape[0])
        matrix = matrix / units
        taps = torch.cat([torch.full((len(g),), g[0, 0].numel()) for g in self.gradients]).to(matrix.device)
        weights = matrix.new_ones(len(matrix), 1)
        fit = LeastSquares.of(matrix, right, weights)
        if self.overdetermined:
            energies = self._by_output(right.square().sum(1)).clamp_min(1e-300)
            for _ in range(REWEIGHTINGS - 1):
                outputs = self._by_output(fit.rest.square().sum(1))
                share = (outputs / energies).median()  # rounding grows with the gradient of an output
                spread = outputs / (ODD**2 * (outputs.median() + share * energies)).clamp_min(1e-300)
                fit = LeastSquares.of(matrix, right, (1 / (1 + spread).square()).repeat_interleave(taps)[:, None])
        elif len(left_out := spoilt(fit, taps.tolist())):
            # With few equations to spare, reweighting would fit a part of them and drop the rest.
            kept = matrix.new_ones(len(taps)).index_fill(0, left_out, 0.0)
            fit = LeastSquares.of(matrix, right, kept.repeat_interleave(taps)[:, None])
        flat = fit.solution
        maps = (flat / units[:, None]).reshape(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
        well = fit.directions[:, fit.values > WELL**2 * fit.values[-1]]
        spare = []
        for part, gradient in zip(fit.hat.split(self._equations), self.gradients, strict=True):
            each = part.unflatten(0, (len(gradient), -1))  # (outputs, taps, unknowns)
            spare.append(torch.eye(each.shape[1]).to(each) - each @ each.transpose(1, 2))
        free = (fit.directions[:, ~fit.clear] / units[:, None]).T
        return Solution(maps, free, spare, sizes, well.T, well.T @ flat, lambda rest: fit.solve(rest) / units[:, None])

    @property
    def overdetermined(self) -> bool:
        """Are there clearly more equations than unknowns?"""
        return sum(self._equations) >= SPARE * self.shape[0] * self.shape[2] * self.shape[3]

    @property
    def _equations(self) -> list[int]:
        return [gradient.shape[0] * gradient[0, 0].numel() for gradient in self.gradients]

    def _by_output(self, rows: Tensor) -> Tensor:
        """Means over the taps of each output."""
        parts = zip(rows.split(self._equations), self.gradients, strict=True)
        return torch.cat([part.reshape(len(gradient), -1).mean(1) for part, gradient in parts])

    def rest(self, deltas: Sequence[Tensor], maps: Tensor) -> Tensor:
        """What these maps leave of the right side of the equations."""
        return self._right - self._matrix(deltas) @ maps.permute(0, 2, 3, 1).reshape(-1, self.shape[1])

    def unexplained(self, deltas: Sequence[Tensor], maps: Tensor) -> float:
        """The share of the gradients' energy that these maps do not explain, in the entries that were sent."""
        rest, right = self.rest(deltas, maps), self._right
        if not self.whole:
            rest, right = rest[~right.isnan()], right[~right.isnan()]
        return float(rest.square().sum() / right.square().sum())


def equations(delta: Tensor, module: nn.Conv2d, shape: Sequence[int]) -> Tensor:
    """The matrix (outputs x taps, examples x H x W) from one channel of the input to its part of dL/dW.

    delta   (examples, outputs, h, w)
    """
    assert not isinstance(module.padding, str)
    height, width = shape[2:]
    down, right = delta.shape[2:]
    (kernel_h, kernel_w), (stride_h, stride_w) = module.kernel_size, module.stride
    (pad_h, pad_w), (apart_h, apart_w) = module.padding, module.dilation
    taps = []
    for i in range(kernel_h):
        for j in range(kernel_w):
            top, start = i * apart_h, j * apart_w
            plane = delta.new_zeros(*delta.shape[:2], height + 2 * pad_h, width + 2 * pad_w)
            plane[:, :, top : top + stride_h * down : stride_h, start : start + stride_w * right : stride_w] = delta
            taps.append(plane[:, :, pad_h : pad_h + height, pad_w : pad_w + width])
    return torch.stack(taps).permute(2, 0, 1, 3, 4).reshape(delta.shape[1] * len(taps), -1)


def acts_by_entry(delta: Tensor, expected: Tensor) -> bool:
    """Does each ReLU reach only its own entry?"""
    return float((delta - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def wrong_relus(
    module: nn.Conv2d,
    gradient: Tensor,
    delta: Tensor,
    relus: tuple[Tensor, Tensor, Tensor],
    maps: Tensor,
    spare: Tensor,
) -> Tensor:
    """ReLUs, (examples, outputs, h, w), that were taken for on or off and are not: the ones that explain what is left.

    With R = dL/dW[o] - sum over p of delta[o, p] a_p: entry p is wrong if R is about +-delta[o, p] a_p, less what the
    solution has made of it.

    relus   delta of all if they are on; which are; which may be wrong
    spare   (outputs, taps, taps): what the solution leaves of a change in the equations of an output
    """
    assert not isinstance(module.padding, str)
    window = (module.kernel_size, module.dilation, module.padding, module.stride)
    patches = F.unfold(maps, *window).transpose(1, 2).flatten(0, 1)  # (examples x places, C x taps)
    every, on, doubt = (each.transpose(0, 1).flatten(1) for each in relus)  # (outputs, examples x places)
    rest = gradient.flatten(1) - delta.transpose(0, 1).flatten(1) @ patches
    by_tap = patches.unflatten(1, (-1, spare.shape[-1]))
    squares = spare.flatten(1) @ (by_tap.transpose(1, 2) @ by_tap).flatten(1).T
    noise = rest.square().sum(1).median() / rest.shape[1]
    change = torch.where(on, -every, every)
    products, gram = rest @ patches.T, patches @ patches.T
    flips = torch.zeros_like(on)
    for _ in range(FLIPS):  # the best of each output, one after the other
        alone = change.square() * squares
        gain = ((2 * change * products - alone) * doubt).masked_fill(flips, 0.0)
        best = gain.argmax(1, keepdim=True)
        gain, alone = gain.gather(1, best), alone.gather(1, best)
        good = (
            (gain > torch.where(on.gather(1, best), 0.0, 0.5) * alone)
            & (gain > EVIDENCE * noise)
            & (gain > TOP * gain.max())
        )
        if not bool(good.any()):
            break
        flips.scatter_(1, best, good | flips.gather(1, best))
        products = products - change.gather(1, best) * good * gram[best[:, 0]]
    energy = rest.square().sum(1)
    odd = energy.topk(min(len(energy), MOST_ODD)).indices
    odd = odd[energy[odd] > ODD**2 * energy.median()]
    for output in odd.tolist():
        share = float(spare[output].diagonal().mean().clamp_min(LEAST_SPARE))
        relus_here = every[output], on[output], doubt[output]
        together = _wrong_together(rest[output] / share, patches, gram, relus_here, noise)
        if bool(together.any()):
            flips[output] = together
    shape = delta.shape
    return flips.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)


def _wrong_together(
    rest: Tensor, patches: Tensor, gram: Tensor, relus: tuple[Tensor, Tensor, Tensor], noise: Tensor
) -> Tensor:
    """The wrong ReLUs of an output that stands out: neighbouring patches are alike, so all that may be wrong at once.

    None where they are too many to be told from the rest, (C x taps,). relus are (examples x places,).
    """
    every, on, doubt = relus
    wrong = torch.zeros_like(on)
    index = (doubt & (every != 0)).nonzero()[:, 0]
    if not 0 < len(index) <= TOLD_APART * len(rest):
        return wrong
    size = gram.diagonal()[index].clamp_min(1e-300).sqrt()
    unit = gram[index][:, index] / size[:, None] / size
    inverse = torch.linalg.inv(unit + RIDGE * torch.eye(len(index)).to(unit))
    step = inverse @ (patches[index] @ rest / size) / size
    left = rest - step @ patches[index]
    deviation = (inverse.diagonal() * torch.maximum(noise, left.square().mean())).sqrt() / size
    whole, now = every[index], on[index]
    margin = (now * whole + step - whole / 2) * whole.sign()  # above zero: on
    wrong[index] = ((margin > 0) != now) & (margin.abs() > CERTAIN * deviation)
    return wrong
