"""Settings of a generator's training: networks by name (`stylegan2:width=256`), with discriminators and rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from gradleak.core.registry import named, spelled
from gradleak.generators.dcgan import DCGAN, WGAN
from gradleak.generators.stages import Staged, doublings
from gradleak.generators.stylegan2 import StyleGAN2
from gradleak.priors.augmentation import AUGMENTATIONS, demand
from gradleak.priors.discriminators import Plain, Residual

Shape = tuple[int, int, int]
PRECISIONS = ("strict", "fast", "half")


class PriorError(ValueError):
    """A training with impossible settings, or one that diverged."""


class Recipe(Protocol):
    """A frozen dataclass whose fields are settings of the network.

    lr, betas    of Adam; `PriorTraining.lr` overrides the first
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
    """The generator of GGL, from WGAN-GP. It is trained like the others: logistic loss, R1."""

    latent: int = 128
    width: int = 128
    name: ClassVar[str] = "wgan"
    lr: ClassVar[float] = 2e-4
    betas: ClassVar[tuple[float, float]] = (0.5, 0.999)

    def generator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> Staged:
        return WGAN(shape, classes, self.latent, self.width, generator=seed)

    def discriminator(self, shape: Shape, classes: int | None, seed: torch.Generator) -> nn.Module:
        return Plain(shape, classes, self.width // 2, seed)


@dataclass(frozen=True)
class PriorTraining:
    """How a generator is trained.

    recipe       the networks
    conditional  on the classes of the images
    batch        real images per step, and as many generated ones
    lr           of Adam for both networks; None: the recipe's
    r1           gamma, at every `r1_every`-th step, with `r1_every` times its weight
    augment      names of augmentations
    mirror       flip half of the images left to right
    average      images after which a weight counts half in the average
    seed         of the weights and of every draw
    precision    "strict" float32; "fast" TF32 allowed; "half" bfloat16 products, on CUDA only
    """

    recipe: Recipe
    conditional: bool = False
    batch: int = 64
    lr: float | None = None
    r1: float = 0.1
    r1_every: int = 16
    augment: Sequence[str] = tuple(AUGMENTATIONS)
    mirror: bool = False
    average: int = 50_000
    seed: int = 0
    precision: str = "strict"

    def __post_init__(self) -> None:
        demand(self.augment)
        if self.batch < 2 or self.r1_every < 1 or self.average < 1:
            raise PriorError("batch must be at least 2, r1_every and average at least 1.")
        if not (math.isfinite(self.r1) and self.r1 >= 0) or (self.lr is not None and not 0 < self.lr < math.inf):
            raise PriorError(f"r1 must be at least 0 and lr above 0; given {self.r1} and {self.lr}.")
        if self.precision not in PRECISIONS:
            raise PriorError(f"precision must be {', '.join(PRECISIONS)}; given {self.precision!r}.")

    @property
    def settings(self) -> dict[str, Any]:
        names = ("conditional", "batch", "r1", "r1_every", "mirror", "average", "seed", "precision")
        plain = {name: getattr(self, name) for name in names}
        rate = self.recipe.lr if self.lr is None else self.lr
        return {"generator": spelled(self.recipe), "lr": rate, "augment": list(self.augment), **plain}
