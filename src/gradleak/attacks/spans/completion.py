"""What the equations leave open of an image: the smoothest choice, and the only one of whole grey levels.

The patches are known up to K N, with K (patches, k) orthonormal and N (k, inputs) free. `smoothest` chooses N by the
differences between neighbours. An image of 8 bits has whole levels 0, ..., 255 at all its places: for each column of N
these are as many conditions as there are patches, on k unknowns, and `whole` finds the one N that meets them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHROMA = 2.0  # weight of differences between channels: colours vary less than brightness
EDGE = 1.0  # grey levels: smaller differences between neighbours cost their square, larger ones their size
ROUNDS, ITERATIONS = 8, 40  # of reweighted least squares, and of conjugate gradients in each
SPREADS = (6.0, 18.0, 6.0, 18.0)  # grey levels: expected distance of N from its smoothest choice, in turn
BEAM = 128  # hypotheses of a column
SURE = 0.25  # deviation of a pixel, in levels, that rounds it without a doubt
WHOLE = 0.1  # root mean square distance from whole levels below which a column is one of them; by chance it is 0.29
NOISE = 0.02  # levels: error of a pixel besides that along K
LEVELS = 255
FINALISTS = 8  # hypotheses that are rounded everywhere
REPEATS = 3  # of that rounding
ALIKE = 0.1  # sums of squared distances, in levels: one pixel that is rounded wrongly makes about 1
MOST_OPEN = 12  # mixtures of patches that a beam can follow
BY_CHANCE = 1e-6  # probability that a column that is not whole passes for it


@dataclass(frozen=True, eq=False)
class Open:
    """An image in grey levels, and what is not known of it.

    image    (channels, height, width), any image that meets the equations
    places   (patches, inputs), where each entry of each patch is in the flattened image
    basis    K, (patches, k): orthonormal mixtures of patches that are open, or known badly
    errors   (k,), expected error of the image along each, in levels; infinite for those that are open
    """

    image: Tensor
    places: Tensor
    basis: Tensor
    errors: Tensor

    @property
    def free(self) -> Tensor:
        return self.errors.isinf()

    @property
    def patches(self) -> Tensor:
        return self.image.flatten()[self.places]

    def moved(self, by: Tensor) -> Tensor:
        """The image after N moved."""
        flat = self.image.flatten().clone()
        flat[self.places] += self.basis @ by
        return flat.view_as(self.image)


def smoothest(case: Open, columns: Tensor | None = None) -> Tensor:
    """The N whose image has the least sum of absolute differences between neighbours, by reweighted least squares.

    Only the open mixtures move.

    columns   (inputs,) bool: the columns of N that may move
    """
    step = case.basis.new_zeros(case.basis.shape[1], case.places.shape[1])
    mask = case.free[:, None].to(step).expand_as(step)
    mask = mask if columns is None else mask * columns
    blank = torch.zeros_like(case.image)

    def out(direction: Tensor) -> Tensor:
        blank.view(-1)[case.places] = case.basis @ (mask * direction)
        return _differences(blank)

    def back(differences: Tensor) -> Tensor:
        return mask * (case.basis.T @ _adjoint(differences, case.image).flatten()[case.places])

    start = _differences(case.image)
    for number in range(ROUNDS):
        rest = start + out(step)
        weights = (rest.square() + EDGE**2).rsqrt() if number else torch.ones_like(rest)
        step = step + _solved(lambda v, w: back(w * out(v)), weights, -back(weights * rest))
    return step


def _differences(image: Tensor) -> Tensor:
    """Differences between neighbours, along both axes, of the channels and of the differences between channels."""
    planes = image
    if len(image) > 1:
        planes = torch.cat([image, CHROMA * (image - image.roll(1, 0))])
    return torch.cat([planes.diff(dim=1).flatten(), planes.diff(dim=2).flatten()])


def _adjoint(differences: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_differences`."""
    channels, height, width = like.shape
    count = channels if channels == 1 else 2 * channels
    down, right = differences.split([count * (height - 1) * width, count * height * (width - 1)])
    planes = like.new_zeros(count, height, width)
    planes[:, 1:] += down.view(count, height - 1, width)
    planes[:, :-1] -= down.view(count, height - 1, width)
    planes[:, :, 1:] += right.view(count, height, width - 1)
    planes[:, :, :-1] -= right.view(count, height, width - 1)
    if channels == 1:
        return planes
    colours = CHROMA * planes[channels:]
    return planes[:channels] + colours - colours.roll(-1, 0)


def _solved(product: Callable[[Tensor, Tensor], Tensor], weights: Tensor, right: Tensor) -> Tensor:
    """The v with product(v, weights) = right, by conjugate gradients from zero."""
    found, rest = torch.zeros_like(right), right.clone()
    direction, size = rest.clone(), rest.square().sum()
    least = 1e-10 * size
    for _ in range(ITERATIONS):
        if size <= least:
            break
        image = product(direction, weights)
        length = size / (direction * image).sum()
        found += length * direction
        rest -= length * image
        size, before = rest.square().sum(), size
        direction = rest + size / before * direction
    return found


def provable(case: Open) -> bool:
    """Are there so few open mixtures that they can be searched, and so many pixels that none fits by chance?"""
    known = len(case.basis) - case.basis.shape[1]
    trials = BEAM * len(SPREADS) * case.places.shape[1]
    return int(case.free.sum()) <= MOST_OPEN and trials * (4 * WHOLE) ** known < BY_CHANCE


def whole(case: Open) -> tuple[Tensor, Tensor]:
    """N, and which of its columns (inputs,) are settled: all their pixels lie at whole levels.

    Columns are settled one pass after the other: a settled one makes its neighbours' smoothest choice better.
    """
    found = smoothest(case)
    settled = torch.zeros(case.places.shape[1], dtype=torch.bool, device=found.device)
    for spread in SPREADS:
        columns = (~settled).nonzero()[:, 0]
        patches = replace(case, image=case.moved(found)).patches[:, columns]
        step, distances = _nearest_whole(patches, case.basis, case.errors.clamp(max=spread))
        sure = distances < WHOLE
        found[:, columns[sure]] += step[:, sure]
        settled[columns[sure]] = True
        if settled.all() or not settled.any():  # these are no pictures of 8 bits
            break
        found += smoothest(replace(case, image=case.moved(found)), ~settled)
    return found, settled


def _nearest_whole(patches: Tensor, basis: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """For each column of patches the step (k,) that brings it to whole levels; and how far from them it ends.

    A beam search over pixels. A hypothesis has rounded some pixels of the column, and so knows the mean of the step;
    the covariance is the same for all. The next pixel is the one that tells most of those that round without a doubt,
    else the one with the fewest values to try.
    """
    columns, count = patches.shape[1], basis.shape[1]
    means, costs = patches.new_zeros(columns, 1, count), patches.new_zeros(columns, 1)
    covariance = errors.square().diag()
    left = torch.ones(len(basis), dtype=torch.bool, device=basis.device)
    while left.any():
        deviations = ((basis @ covariance) * basis).sum(1).clamp_min(0).sqrt() * left
        if deviations.max() < NOISE:
            break
        pixel = _next_pixel(deviations)
        left[pixel] = False
        row = basis[pixel]
        variance = row @ covariance @ row + NOISE**2
        gain = covariance @ row / variance
        values = patches[pixel, :, None] + means @ row  # (columns, hypotheses)
        reach = max(1, math.ceil(2.5 * float(variance) ** 0.5))
        tried = values.round()[..., None] + torch.arange(-reach, reach + 1, device=values.device)
        gaps = (tried - values[..., None]).flatten(1)
        outside = ((tried < 0) | (tried > LEVELS)).flatten(1)
        scores = costs.repeat_interleave(2 * reach + 1, 1) + gaps.square() / variance + 1e6 * outside
        costs, best = scores.topk(min(BEAM, scores.shape[1]), largest=False)
        means = means.gather(1, (best // (2 * reach + 1))[..., None].expand(-1, -1, count))
        means = means + gaps.gather(1, best)[..., None] * gain
        covariance = covariance - torch.outer(gain, gain) * variance
    return _refined(patches, basis, means[:, :FINALISTS])


def _next_pixel(deviations: Tensor) -> int:
    clear = (deviations > NOISE) & (deviations <= SURE)
    if clear.any():
        return int((deviations * clear).argmax())
    return int(torch.where(deviations > SURE, deviations, torch.inf).argmin())


def _refined(patches: Tensor, basis: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Every pixel rounded, and the step fitted to all of them; of several hypotheses the nearest to whole levels.

    Where two different ones are whole the column is not settled: its distance is infinite. So it is where a patch has
    no derivative at all.
    """
    values, steps = patches.T[:, None], means  # (columns, 1, patches), (columns, hypotheses, k)
    for _ in range(REPEATS):  # a pixel that was rounded wrongly stands out from the fit to all
        targets = (values + steps @ basis.T).round().clamp(0, LEVELS)
        steps = (targets - values) @ basis
    squares = (targets - values - steps @ basis.T).square().sum(-1)
    least, best = squares.min(1)
    row = torch.arange(len(best), device=best.device)
    others = (targets != targets[row, best][:, None]).any(-1)
    rivals = (others & (squares < least[:, None] + ALIKE)).any(1)
    return steps[row, best].T, torch.where(rivals, torch.inf, (least / len(basis)).sqrt())
