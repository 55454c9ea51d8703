"""A U-Net that predicts noise, for diffusion models.

Attention is written out (see transformers.py), no layer works in place and none keeps state, so it runs under vmap, in
forward mode, and its gradients can be differentiated.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn

from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.models.pieces import Shape, conv, draw, linear
from gradleak.models.transformers import Attention


def sinusoids(steps: int, dim: int) -> Tensor:
    """Embeddings of all steps, (T, dim): sines, then cosines, of frequencies from 1 down to 1e-4, in double precision.

    Reference: Vaswani et al., NeurIPS 2017, with the spacing of Ho et al., NeurIPS 2020.
    """
    half = dim // 2
    place = torch.arange(half, dtype=torch.float64, device="cpu") / (half - 1)
    angles = torch.arange(steps, dtype=torch.float64, device="cpu")[:, None] * torch.exp(-math.log(1e4) * place)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Steps(nn.Module):
    """Looks up the embedding of a step in `table`, (T, dim); floats are embeddings already.

    The table is neither a parameter nor a buffer: it is no part of an update, and casting the model does not round it.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table.detach().double()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Steps:
        super()._apply(fn, recurse)
        self.table = self.table.to(fn(torch.zeros((), device=self.table.device)).device)
        return self

    def forward(self, t: Tensor, like: Tensor) -> Tensor:
        if t.is_floating_point() and t.shape[-1] != self.table.shape[1]:
            raise ValueError(
                f"t must be steps (B,), whole numbers, or embeddings (B, {self.table.shape[1]}); given {t.dtype} of "
                f"shape {tuple(t.shape)}. A simplex of steps is averaged by the objective (gradleak.diffusion)."
            )
        return (t if t.is_floating_point() else self.table[t]).to(like.dtype)

    def extra_repr(self) -> str:
        return f"{self.table.shape[0]}, {self.table.shape[1]}"


class Residual(nn.Module):
    """Two 3x3 convolutions, each behind norm and SiLU; the embedding of the step scales and shifts between them."""

    def __init__(self, inputs: int, outputs: int, time: int, groups: int) -> None:
        super().__init__()
        self.before = nn.Sequential(_norm(groups, inputs), nn.SiLU(), conv(inputs, outputs, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), linear(time, 2 * outputs))
        self.norm = _norm(groups, outputs)
        self.after = nn.Sequential(nn.SiLU(), conv(outputs, outputs, 3, padding=1))
        self.skip = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        hidden = self.norm(self.before(x)) * (1 + scale) + shift
        return self.skip(x) + self.after(hidden)


class PixelAttention(nn.Module):
    """x + attention between all pixels, behind a norm."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm = _norm(groups, channels)
        self.attention = Attention(channels, heads, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)  # (batch, pixels, channels)
        return x + self.attention(tokens).transpose(1, 2).reshape(x.shape)


class LinearAttention(nn.Module):
    """x + attention whose cost is linear in the pixels: keys and values are summed before the queries are used.

    Reference: Shen, Zhang, Zhao, Yi, Li, "Efficient attention", WACV 2021.
    """

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = _norm(groups, channels)
        self.project = conv(channels, 3 * channels, 1, bias=False)
        self.out = conv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        each = (batch, 3, self.heads, channels // self.heads, height * width)
        q, k, v = self.project(self.norm(x)).reshape(each).unbind(1)  # (batch, heads, channels of a head, pixels)
        summed = k.softmax(-1) @ v.transpose(-2, -1)  # (batch, heads, channels of a head twice)
        attended = summed.transpose(-2, -1) @ (q.softmax(-2) * q.shape[-2] ** -0.5)
        return x + self.out(attended.reshape(batch, channels, height, width))


class Double(nn.Module):
    """Every pixel four times: (batch, channels, height, width) -> (batch, channels, 2 height, 2 width)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        spread = x[:, :, :, None, :, None].expand(batch, channels, height, 2, width, 2)
        return spread.reshape(batch, channels, 2 * height, 2 * width)


class Down(nn.Module):
    """The blocks of one resolution on the way down, attention, and the next smaller size."""

    def __init__(self, blocks: Sequence[nn.Module], attention: nn.Module, smaller: nn.Module) -> None:
        super().__init__()
        self.blocks, self.attention, self.smaller = nn.ModuleList(blocks), attention, smaller

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The input of the next level, and the output of each block for its partner on the way up."""
        features: list[Tensor] = []
        for block in self.blocks:
            x = block(x, time)
            features.append(x)
        return self.smaller(self.attention(x)), features


class Up(nn.Module):
    """The blocks of one resolution on the way up, attention, and the next larger size."""

    def __init__(self, blocks: Sequence[nn.Module], attention: nn.Module, larger: nn.Module) -> None:
        super().__init__()
        self.blocks, self.attention, self.larger = nn.ModuleList(blocks), attention, larger

    def forward(self, x: Tensor, time: Tensor, skips: Sequence[Tensor]) -> Tensor:
        for block, partner in zip(self.blocks, reversed(skips), strict=True):
            x = block(torch.cat([x, partner], dim=1), time)
        return self.larger(self.attention(x))


@dataclass(frozen=True, eq=False, kw_only=True)
class UNetOptions:
    """Options of `unet`, which describes them."""

    shape: Shape = (3, 32, 32)
    base: int = 64
    multipliers: Sequence[int] = (1, 2, 4)
    blocks: int = 2
    groups: int = 8
    heads: int = 4
    steps: int = 1000
    stem: int = 3
    linear_attention: bool = False
    generator: Generator | None = None

    def __post_init__(self) -> None:
        base, multipliers, shape = self.base, self.multipliers, self.shape
        if not multipliers or min(multipliers) < 1 or self.blocks < 1:
            levels = f"multipliers={tuple(multipliers)}, blocks={self.blocks}"
            raise ValueError(f"A U-Net needs levels and blocks; given {levels}.")
        if base < 4 or base % 2:
            raise ValueError(f"base must be even and at least 4: half of an embedding are sines; given {base}.")
        shrunk = 2 ** (len(multipliers) - 1)
        if shape[1] % shrunk or shape[2] % shrunk:
            raise ValueError(
                f"{len(multipliers)} levels halve sides {shape[1:]} to no whole number: give fewer levels."
            )
        if self.stem < 1 or self.stem % 2 == 0:
            raise ValueError(f"stem must be odd, so that the image keeps its size; given {self.stem}.")
        attended = self.widths if self.linear_attention else self.widths[-1:]
        if odd := [width for width in attended if width % self.heads]:
            raise ValueError(f"{self.heads} heads do not divide {odd[0]} channels: give a number that does.")

    @property
    def widths(self) -> list[int]:
        """Channels of every level, from the full resolution down."""
        return [self.base * each for each in self.multipliers]


class UNet(nn.Module):
    """A denoiser. `forward(x, t)`: t is the step, (B,) whole numbers, or its embedding, (B, dim) floats."""

    time_layer = "time.first"

    def __init__(self, options: UNetOptions) -> None:
        super().__init__()
        base, heads, groups, channels = options.base, options.heads, options.groups, options.shape[0]
        widths, time = options.widths, 4 * base
        lowest = len(widths) - 1
        upper = partial(LinearAttention, heads=heads, groups=groups) if options.linear_attention else nn.Identity

        def attention(level: int) -> nn.Module:
            return PixelAttention(widths[level], heads, groups) if level == lowest else upper(widths[level])

        def row(first: int, inputs: int, outputs: int) -> list[nn.Module]:
            return [Residual(inputs if block else first, outputs, time, groups) for block in range(options.blocks)]

        layers = {"first": linear(base, time), "activation": nn.GELU(), "second": linear(time, time)}
        self.steps = Steps(sinusoids(options.steps, base))
        self.time = nn.Sequential(OrderedDict(layers))
        self.stem = conv(channels, base, options.stem, padding=options.stem // 2)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, (before, width) in enumerate(zip([base, *widths], widths, strict=False)):
            smaller = nn.Identity() if level == lowest else conv(width, width, 3, stride=2, padding=1)
            self.down.append(Down(row(before, width, width), attention(level), smaller))
        deepest = widths[-1]
        self.before = Residual(deepest, deepest, time, groups)
        self.attention = PixelAttention(deepest, heads, groups)
        self.after = Residual(deepest, deepest, time, groups)
        for level in reversed(range(len(widths))):
            width = widths[level]
            larger = nn.Sequential(Double(), conv(width, widths[level - 1], 3, padding=1)) if level else nn.Identity()
            self.up.append(Up(row(2 * width, 2 * width, width), attention(level), larger))
        self.out = nn.Sequential(_norm(groups, widths[0]), nn.SiLU(), conv(widths[0], channels, 1))

    @property
    def table(self) -> Tensor:
        """(T, dim): the embedding of every step, in double precision."""
        return self.steps.table

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time, x = self.time(self.steps(t, x)), self.stem(x)
        skips: list[list[Tensor]] = []
        for level in self.down:
            x, features = level(x, time)
            skips.append(features)
        x = self.after(self.attention(self.before(x, time)), time)
        for level in self.up:
            x = level(x, time, skips.pop())
        return self.out(x)


def _norm(groups: int, channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(groups, channels), channels)


@named("unet", kind="model", paper="Ho, Jain, Abbeel, NeurIPS 2020", status="")
@takes(UNetOptions)
def unet(options: UNetOptions) -> UNet:
    """A U-Net that predicts noise: a denoiser for diffusion, not a classifier.

    shape             of an image; its sides halve from level to level
    base              channels of the first level, and the size of the step's embedding; must be even
    multipliers       of `base`, a level each, from the full resolution down
    blocks            residual blocks of a level, on the way down and on the way up
    groups            of GroupNorm; where they do not divide the channels, their greatest common divisor
    heads             of attention: between all pixels at the lowest level, and in the middle
    steps             T of the schedule
    stem              side of the first kernel, odd
    linear_attention  on the upper levels too, of the kind whose cost is linear in the pixels
    generator         that the weights are drawn from

    12,746,819 parameters by default. For 128x128: multipliers=(1, 2, 4, 8), stem=7, linear_attention=True.
    Weights start as in torch, and none at zero: behind a last layer of zeros no other would have a gradient. The step
    scales and shifts (Dhariwal and Nichol, NeurIPS 2021) by way of base -> 4 base -> 4 base, GELU between. No dropout.
    """
    model = UNet(options)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.to_empty(device="cpu")
    for layer in model.cpu().modules():
        draw(layer, "torch", options.generator)
    return model.to(torch.get_default_device())
