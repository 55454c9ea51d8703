"""Vision transformers.

Attention is written out. The fused kernels behind `scaled_dot_product_attention` have no double backward and no forward
mode, and which of them runs depends on the machine; products and a softmax have both, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn

from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.models.pieces import Activation, ImageClassifier, Init, Learned, Shape, activation_of, linear, network


class Patches(nn.Module):
    """Images (batch, channels, height, width) to their square patches (batch, patches, pixels of a patch)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        side = self.side
        tiles = x.reshape(batch, channels, height // side, side, width // side, side)
        return tiles.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, side * side * channels)

    def extra_repr(self) -> str:
        return str(self.side)


class Tokens(nn.Module):
    """Put the class token before the patches and add to each its position: (batch, 1 + patches, width)."""

    def __init__(self, patches: int, width: int, *, deviation: float) -> None:
        super().__init__()
        self.first = Learned(1, 1, width)
        self.position = Learned(1, 1 + patches, width, deviation=deviation)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first().expand(x.shape[0], -1, -1)
        return torch.cat([first, x], dim=1) + self.position()


class FirstToken(nn.Module):
    """(batch, tokens, width) -> (batch, width): the class token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class Attention(nn.Module):
    """Softmax(q k^T / sqrt(d)) v in `heads` heads of d = width / heads, and a linear layer behind them."""

    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.project = linear(width, 3 * width, bias=bias)
        self.out = linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.project(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5  # (batch, heads, tokens, tokens)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `bare`: attention(x) alone, without norm and without residual."""

    def __init__(
        self, width: int, heads: int, ratio: int, *, activation: Activation, bias: bool = True, bare: bool = False
    ) -> None:
        super().__init__()
        self.bare = bare
        self.before: nn.Module = nn.Identity() if bare else nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias=bias)
        self.body = nn.Sequential(
            nn.LayerNorm(width),
            linear(width, ratio * width),
            activation_of(activation)(),
            linear(ratio * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.before(x))
        x = attended if self.bare else x + attended
        return x + self.body(x)

    def extra_repr(self) -> str:
        return f"bare={self.bare}"


def _embedding(shape: Shape, patch: int, width: int, heads: int, *, deviation: float) -> list[nn.Module]:
    """From images to tokens, with the sizes checked."""
    channels, height, sides = shape
    if patch < 1 or height % patch or sides % patch:
        raise ValueError(f"Patches of {patch}x{patch} do not tile images of shape {shape}: give a divisor of both.")
    if heads < 1 or width % heads:
        raise ValueError(f"{heads} heads do not divide a width of {width}: give a number that does.")
    patches = (height // patch) * (sides // patch)
    return [Patches(patch), linear(patch**2 * channels, width), Tokens(patches, width, deviation=deviation)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ViT(ImageClassifier):
    """Options of `vit`."""

    patch: int = 4
    width: int = 128
    heads: int = 4
    depth: int = 4
    ratio: int = 2
    activation: Activation = "gelu"


@named("vit", kind="model", paper="Dosovitskiy et al., ICLR 2021")
@takes(ViT)
def vit(options: ViT) -> nn.Sequential:
    """A vision transformer, small by default: 4x4 patches, width 128, four blocks; the class token is classified.

    ViT-Tiny for 224x224 images is patch=16, width=192, heads=3, depth=12, ratio=4. Positions start as a normal of
    deviation 0.02 cut at two, the class token at zero, linear layers by `init`. No dropout.
    """
    width, heads = options.width, options.heads
    layers = _embedding(options.shape, options.patch, width, heads, deviation=0.02)
    block = partial(TransformerBlock, width, heads, options.ratio, activation=options.activation)
    layers += [block() for _ in range(options.depth)]
    return options.network([*layers, FirstToken(), nn.LayerNorm(width)])


@named("vit-sme", kind="model", paper="Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023")
def vit_sme(
    *,
    shape: Shape = (1, 28, 28),
    classes: int = 62,
    patch: int | None = None,
    activation: Activation = "gelu",
    paper_quirks: bool = True,
    init: Init = "torch",
    generator: Generator | None = None,
) -> nn.Sequential:
    """The ViT of SME: width 384, four heads, four blocks, ratio 2, no bias in q, k, v; head 384-768-62.

    5,376,830 parameters. Class token and positions start at zero.
    paper_quirks: the patch is the whole image, so that attention sees one linear map of it, and the first block has
    neither norm before attention nor a residual around it: an easy target. Else `patch` is 7, and all blocks are alike.
    """
    width, heads, depth, ratio = 384, 4, 4, 2
    patch = patch or (shape[1] if paper_quirks else 7)
    layers = _embedding(shape, patch, width, heads, deviation=0.0)
    for block in range(depth):
        bare = paper_quirks and block == 0
        layers.append(TransformerBlock(width, heads, ratio, activation=activation, bias=False, bare=bare))
    layers += [FirstToken(), nn.LayerNorm(width), linear(width, ratio * width), activation_of(activation)()]
    return network(layers, shape, classes, init, generator)
