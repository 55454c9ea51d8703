"""Differentiable augmentation of a discriminator's inputs, so that it cannot memorise few images.

Reference: Zhao, Liu, Lin, Zhu, Han, "Differentiable augmentation for data-efficient GAN training", NeurIPS 2020:
colour, translation by up to an eighth, a cut-out square of half the side. Images are in [-1, 1]; pixels that are
shifted in or cut out are 0, grey. Each image has its own draws, and nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

Draw = Callable[[int], Tensor]  # n -> n numbers ~ U(0, 1) for every image: (B, n)
SHIFT, CUT = 0.125, 0.5


def augmented(x: Tensor, names: Iterable[str], generator: torch.Generator) -> Tensor:
    """The images after each of these augmentations."""

    def draw(count: int) -> Tensor:
        return torch.rand(len(x), count, generator=generator, device=x.device)

    for name in names:
        x = AUGMENTATIONS[name](x, draw)
    return x


def colour(x: Tensor, draw: Draw) -> Tensor:
    """Brightness by +- 1/2, saturation by a factor 0 to 2, contrast by 1/2 to 3/2."""
    bright, saturated, contrast = draw(3)[:, :, None, None, None].to(x.dtype).unbind(1)
    x = x + (bright - 0.5)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * (2 * saturated)
    middle = x.mean((1, 2, 3), keepdim=True)
    return middle + (x - middle) * (contrast + 0.5)


def translation(x: Tensor, draw: Draw) -> Tensor:
    """Shift by whole pixels, up to an eighth of each side."""
    _, channels, height, width = x.shape
    share = draw(2)
    rows = _shifted(height, share[:, 0])[:, None, :, None].expand(-1, channels, -1, width + 2)
    columns = _shifted(width, share[:, 1])[:, None, None, :].expand(-1, channels, height, -1)
    return functional.pad(x, (1, 1, 1, 1)).gather(2, rows).gather(3, columns)


def _shifted(size: int, share: Tensor) -> Tensor:
    """Places to read from, along an axis with one pixel of padding at either end: (B, size)."""
    most = int(size * SHIFT + 0.5)
    shift = (share * (2 * most + 1)).floor().long() - most
    return (torch.arange(size, device=share.device) + shift[:, None] + 1).clamp(0, size + 1)


def cutout(x: Tensor, draw: Draw) -> Tensor:
    """Cut out a square of half the side anywhere, also across the edge."""
    _, _, height, width = x.shape
    share = draw(2)
    rows, columns = _within(height, share[:, 0]), _within(width, share[:, 1])
    inside = rows[:, None, :, None] & columns[:, None, None, :]
    return x * (~inside).to(x.dtype)


def _within(size: int, share: Tensor) -> Tensor:
    cut = int(size * CUT + 0.5)
    first = (share * (size + 1 - cut % 2)).floor() - cut // 2
    place = torch.arange(size, device=share.device)
    return (place >= first[:, None]) & (place < first[:, None] + cut)


AUGMENTATIONS: Mapping[str, Callable[[Tensor, Draw], Tensor]] = {
    "colour": colour,
    "translation": translation,
    "cutout": cutout,
}


def demand(names: Iterable[str]) -> tuple[str, ...]:
    """These names, after a check that each is known."""
    known = tuple(names)
    if odd := [name for name in known if name not in AUGMENTATIONS]:
        raise ValueError(f"Unknown augmentation {odd[0]!r}. Available: {', '.join(AUGMENTATIONS)}; or none.")
    return known
