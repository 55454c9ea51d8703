"""What the generators of this package share: forward through the stages, classes as shares, sizes by doubling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradleak.core.tree import Tree

START = (4, 14)  # least and most pixels of a side of the smallest feature map


class Staged(nn.Module):
    """A generator of this package: a `Generator` with settings that a file can store."""

    architecture: ClassVar[str]
    latent: int
    classes: int | None
    shape: tuple[int, int, int]
    blocks: int
    card: Any = None  # of the file that it was read from

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values from which `of` builds it again."""
        raise NotImplementedError

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Staged:
        """A network with these `settings`."""
        return cls(**settings)

    def begin(self, z: Tensor, y: Tensor | None = None) -> Tree:
        raise NotImplementedError

    def block(self, index: int, carried: Tree) -> Tree:
        raise NotImplementedError

    def picture(self, carried: Tree) -> Tensor:
        raise NotImplementedError

    def noised(self, carried: Tree, generator: torch.Generator) -> Tree:
        """`carried` with drawn noise in the place of fixed noise maps, for training; unchanged if there are none."""
        return carried

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        return self.finished(self.begin(z, y))

    def finished(self, carried: Tree, first: int = 0) -> Tensor:
        """The image from what enters block `first`."""
        for index in range(first, self.blocks):
            carried = self.block(index, carried)
        return self.picture(carried)

    def shares(self, y: Tensor | None, like: Tensor) -> Tensor:
        """(B,) classes or (B, classes) shares -> shares."""
        assert self.classes is not None
        if y is None:
            raise ValueError(f"This generator has {self.classes} classes and no class was given: pass y of shape (B,).")
        if y.is_floating_point():
            if y.shape[-1] != self.classes:
                raise ValueError(f"Class shares y must have shape (B, {self.classes}); given {tuple(y.shape)}.")
            return y.to(like.dtype)
        # Not F.one_hot, which reads values back to the host.
        return (y[..., None] == torch.arange(self.classes, device=y.device)).to(like.dtype)


def doublings(shape: tuple[int, int, int]) -> tuple[tuple[int, int], int]:
    """The smallest feature map and the number of doublings: 32 x 32 -> (4, 4), 3; 28 x 28 -> (7, 7), 2."""
    height, width = shape[1:]
    times = 0
    while min(height, width) >= 2 * START[0] and not (height % 2 or width % 2):
        height, width, times = height // 2, width // 2, times + 1
    if not times or max(height, width) > START[1] or min(height, width) < START[0]:
        raise ValueError(
            f"Generators make images by doubling {START[0]} to {START[1]} pixels at least once (8, 28, 32, 64, ...); "
            f"given {shape[1]} x {shape[2]}. Resize them (--size 32)."
        )
    return (height, width), times


def normal(*shape: int, std: float = 1.0, mean: float = 0.0, generator: torch.Generator | None = None) -> nn.Parameter:
    """A parameter ~ N(mean, std^2), drawn on the CPU so that a seed gives the same on every machine."""
    return nn.Parameter(torch.randn(shape, generator=generator) * std + mean)
