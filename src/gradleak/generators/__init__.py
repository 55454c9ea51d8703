"""Image generators as priors: the protocol by which attacks search latents, features or weights of one.

stages.py           what our generators share
dcgan.py            DCGAN and the generator of WGAN-GP, for tiny budgets
stylegan2.py        a StyleGAN2 of any size; fits converted files of StyleGAN2-ADA too
files.py            safetensors with a card: what it is, what it was trained on, how good it is

`gradleak.priors` trains generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.func import functional_call

from gradleak.core.tree import Params, Tree
from gradleak.generators.dcgan import DCGAN, WGAN
from gradleak.generators.files import BadGenerator, Card, load, read, save
from gradleak.generators.stylegan2 import StyleGAN2

__all__ = ["DCGAN", "WGAN", "BadGenerator", "Card", "Generator", "StyleGAN2", "images_of", "load", "read", "save"]
__all__ += ["with_weights"]

Made = TypeVar("Made")


@runtime_checkable
class Generator(Protocol):
    """A trained network that turns a latent into images, block by block. An `nn.Module` in evaluation mode.

    G = picture . block(K-1) . ... . block(0) . begin. The dict `carried` passes between blocks: "h" is the feature that
    enters the next block, (B, ...); further entries, such as styles, a class embedding or noise maps, have names of the
    generator's choice. All of it is differentiable and runs under vmap: it draws no random numbers.

    latent      entries of z, which is N(0, I) in training
    classes     of a class-conditional generator, else None
    shape       of its images: (channels, height, width)
    blocks      K, the number of blocks
    """

    latent: int
    classes: int | None
    shape: tuple[int, int, int]
    blocks: int

    def begin(self, z: Tensor, y: Tensor | None = None) -> Tree:
        """(B, latent), and (B,) classes or (B, classes) shares of them -> what enters block 0.

        A generator without classes ignores them.
        """
        ...

    def block(self, index: int, carried: Tree) -> Tree:
        """What leaves a block: the same names, with a new "h" and whatever follows its size (a skip image)."""
        ...

    def picture(self, carried: Tree) -> Tensor:
        """What leaves the last block -> images, (B, C, H, W) in [0, 1].

        A generator whose last layer is linear may leave the interval a little. It is not clamped here, since a clamp
        stops gradients: clamp the final images.
        """
        ...


def images_of(generator: Generator, z: Tensor, y: Tensor | None = None) -> Tensor:
    """G(z, y)."""
    carried = generator.begin(z, y)
    for index in range(generator.blocks):
        carried = generator.block(index, carried)
    return generator.picture(carried)


class _Applied(nn.Module):
    """Any function of a module as a `forward`, for which `functional_call` can replace weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[Any], Made]) -> Made:
        return function(self.module)


def with_weights(generator: Generator, weights: Mapping[str, Tensor], function: Callable[[Any], Made]) -> Made:
    """function(generator) with some of its parameters replaced by these weights.

    Weights may be unknowns: it is differentiable and runs under vmap, with a copy of the weights in every lane.

        with_weights(G, changed, lambda g: g.picture(g.block(0, g.begin(z))))
    """
    if not isinstance(generator, nn.Module):
        raise TypeError(f"Weights of a {type(generator).__name__} cannot be replaced: it is not an nn.Module.")
    replaced: Params = {f"module.{name}": value for name, value in weights.items()}
    return functional_call(_Applied(generator), replaced, (function,))
