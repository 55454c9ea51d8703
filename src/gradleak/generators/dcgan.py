"""Generators of transposed convolutions, which train in minutes on a CPU: DCGAN and the one of WGAN-GP.

References: Radford, Metz, Chintala, ICLR 2016 (DCGAN; the 32 x 32 form is the one that GIAS, Jeon et al., NeurIPS 2021,
uses); Gulrajani et al., NeurIPS 2017 (WGAN-GP; the form of GGL, Li et al., CVPR 2022). BatchNorm works with its running
statistics in evaluation mode.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradleak.core.tree import Tree
from gradleak.generators.stages import Staged, doublings, normal


class _Transposed(Staged):
    """z, with an embedding of the class appended, through `stages`, then `last` and tanh."""

    stages: nn.ModuleList
    last: nn.Module

    def __init__(
        self, shape: tuple[int, int, int], classes: int | None, latent: int, embedded: int, seed: torch.Generator | None
    ) -> None:
        super().__init__()
        self.shape, self.classes, self.latent = (shape[0], shape[1], shape[2]), classes, latent
        self.inputs = latent + (embedded if classes else 0)
        self.embedded = embedded
        self.embed = normal(classes, embedded, generator=seed) if classes else None

    @property
    def settings(self) -> dict[str, Any]:
        names = ("shape", "classes", "latent", "width", "embedded")
        return {name: getattr(self, name) for name in names}

    def block(self, index: int, carried: Tree) -> Tree:
        return {**carried, "h": self.stages[index](carried["h"])}

    def picture(self, carried: Tree) -> Tensor:
        return (self.last(carried["h"]).tanh() + 1) / 2

    def _entering(self, z: Tensor, y: Tensor | None) -> Tensor:
        if self.embed is None:
            return z
        return torch.cat([z, self.shares(y, z) @ self.embed], -1)

    def _drawn(self, seed: torch.Generator | None) -> None:
        """Radford et al.: weights ~ N(0, 0.02^2), scales of BatchNorm ~ N(1, 0.02^2), biases 0."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.ConvTranspose2d)):
                module.weight = normal(*module.weight.shape, std=0.02, generator=seed)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.weight = normal(*module.weight.shape, std=0.02, mean=1.0, generator=seed)
        self.eval()


class DCGAN(_Transposed):
    """z (100) -> ConvT(512, 4) -> ConvT(256, 4, stride 2) -> ... -> ConvT(64, 4, stride 2) -> ConvT(C, 1), tanh.

    BatchNorm and ReLU after each but the last. The first kernel is as large as the smallest feature map (4 x 4 for
    32 x 32, 7 x 7 for 28 x 28); every further stage doubles the map. `width` is that of the last stage; each stage
    before is twice as wide, up to eight times. At 32 x 32: 512 x 4 x 4, 256 x 8 x 8, 128 x 16 x 16, 64 x 32 x 32.
    """

    architecture: ClassVar[str] = "dcgan"

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 32, 32),
        classes: int | None = None,
        latent: int = 100,
        width: int = 64,
        embedded: int = 32,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(shape, classes, latent, embedded, generator)
        start, times = doublings(self.shape)
        self.width, self.blocks = width, times + 1
        widths = [min(8, 2 ** (times - stage)) * width for stage in range(times + 1)]
        first = nn.ConvTranspose2d(self.inputs, widths[0], start, 1, 0, bias=False)
        doubling = [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False) for a, b in zip(widths, widths[1:])]
        self.stages = nn.ModuleList(
            nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()) for layer in [first, *doubling]
        )
        self.last = nn.ConvTranspose2d(widths[-1], self.shape[0], 1, 1, 0)
        self._drawn(generator)

    def begin(self, z: Tensor, y: Tensor | None = None) -> Tree:
        return {"h": self._entering(z, y)[..., None, None]}


class WGAN(_Transposed):
    """z (128) -> linear to 4w x 4 x 4 -> ConvT(2w, 2, stride 2) -> ConvT(w, 2, stride 2) -> ConvT(C, ...), tanh.

    BatchNorm and ReLU after each but the last. The last doubling makes the image, so 32 x 32 has three stages: 512 x
    4 x 4, 256 x 8 x 8, 128 x 16 x 16 for w = 128. BatchNorm of the linear layer is over all of its outputs.
    """

    architecture: ClassVar[str] = "wgan"

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 32, 32),
        classes: int | None = None,
        latent: int = 128,
        width: int = 128,
        embedded: int = 32,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(shape, classes, latent, embedded, generator)
        start, times = doublings(self.shape)
        self.width, self.blocks = width, times
        widths = [min(8, 2 ** (times - 1 - stage)) * width for stage in range(times)]
        entries = widths[0] * start[0] * start[1]
        first = (nn.Linear(self.inputs, entries), nn.BatchNorm1d(entries), nn.ReLU())
        stages = [nn.Sequential(*first, nn.Unflatten(1, (widths[0], *start)))]
        for a, b in zip(widths, widths[1:]):
            stages.append(nn.Sequential(nn.ConvTranspose2d(a, b, 2, 2), nn.BatchNorm2d(b), nn.ReLU()))
        self.stages = nn.ModuleList(stages)
        self.last = nn.ConvTranspose2d(widths[-1], self.shape[0], 2, 2)
        self._drawn(generator)

    def begin(self, z: Tensor, y: Tensor | None = None) -> Tree:
        return {"h": self._entering(z, y)}
