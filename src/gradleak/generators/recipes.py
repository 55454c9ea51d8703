"""Generators by name, each with the discriminator and the rates that it is trained with: `stylegan2:width=256`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn

from gradleak.generators.dcgan import DCGAN, WGAN
from gradleak.generators.discriminators import Plain, Residual
from gradleak.generators.stages import Staged, doublings
from gradleak.generators.stylegan2 import StyleGAN2
from gradleak.registry import named

Shape = tuple[int, int, int]


class Recipe(Protocol):
    """A frozen dataclass whose fields are settings of the network.

    lr, betas    of Adam, unless others are asked for
    """

    @property
    def name(self) -> str: ...

    @property
    def lr(self) -> float: ...

    @property
    def betas(self) -> tuple[float, float]: ...

    def generator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> Staged: ...

    def discriminator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> nn.Module: ...


@named("stylegan2", kind="generator", paper="Karras et al., CVPR 2020 and NeurIPS 2020", status="")
@dataclass(frozen=True)
class StyleGAN2Recipe:
    """A compact StyleGAN2: mapping network, modulated convolutions, noise, skips. 4 million weights at 32 x 32.

    A map of H pixels a side has min(width, base / H) channels, in the discriminator too.
    """

    latent: int = 128
    style: int = 256
    layers: int = 2
    width: int = 256
    base: int = 4096
    name: ClassVar[str] = "stylegan2"
    lr: ClassVar[float] = 0.0025
    betas: ClassVar[tuple[float, float]] = (0.0, 0.99)

    def widths(self, shape: Shape) -> tuple[int, ...]:
        start, times = doublings(shape)
        sides = [max(start) * 2**number for number in range(times + 1)]
        return tuple(max(1, min(self.width, self.base // side)) for side in sides)

    def generator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> Staged:
        return StyleGAN2(shape, classes, self.latent, self.style, self.layers, self.widths(shape), generator=seed)

    def discriminator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> nn.Module:
        return Residual(shape, classes, self.widths(shape), seed=seed)


@named("dcgan", kind="generator", paper="Radford, Metz, Chintala, ICLR 2016", status="")
@dataclass(frozen=True)
class DCGANRecipe:
    """Transposed convolutions with BatchNorm, for tiny budgets: the 32 x 32 network of GIAS."""

    latent: int = 100
    width: int = 64
    name: ClassVar[str] = "dcgan"
    lr: ClassVar[float] = 2e-4
    betas: ClassVar[tuple[float, float]] = (0.5, 0.999)

    def generator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> Staged:
        return DCGAN(shape, classes, self.latent, self.width, generator=seed)

    def discriminator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> nn.Module:
        return Plain(shape, classes, self.width, seed)


@named("wgan", kind="generator", paper="Gulrajani et al., NeurIPS 2017", status="")
@dataclass(frozen=True)
class WGANRecipe:
    """The generator of GGL, from WGAN-GP. It is trained here as the others are: logistic loss, R1."""

    latent: int = 128
    width: int = 128
    name: ClassVar[str] = "wgan"
    lr: ClassVar[float] = 2e-4
    betas: ClassVar[tuple[float, float]] = (0.5, 0.999)

    def generator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> Staged:
        return WGAN(shape, classes, self.latent, self.width, generator=seed)

    def discriminator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> nn.Module:
        return Plain(shape, classes, self.width // 2, seed)
