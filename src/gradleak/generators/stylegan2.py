"""StyleGAN2's generator of any size: a compact one that this package trains, and public ones from converted files.

References: Karras et al., "Analyzing and improving the image quality of StyleGAN", CVPR 2020 (modulation and
demodulation, skip connections of images); Karras et al., "Training generative adversarial networks with limited
data", NeurIPS 2020 (the names, shapes and gains are those of its networks, so that their weights fit).

Differs, without changing the image: styles scale the features before a convolution and the demodulation scales them
after it, instead of one kernel for every image, so that a batch, or a lane, shares one convolution; the filter
[1, 3, 3, 1] is three boxes of two. Noise maps are `carried`, and never drawn here.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradleak.core.tree import Tree
from gradleak.generators.stages import Staged, doublings, normal

FILTER = (1.0, 3.0, 3.0, 1.0)
SLOW = 0.01  # learning rate of the mapping network, relative to the rest: its weights are stored divided by it
EPSILON = 1e-8


class StyleGAN2(Staged):
    """z -> mapping network -> w for every layer; a constant -> blocks that double it, each layer scaled by its w.

    latent    entries of z
    style     entries of w
    layers    of the mapping network
    widths    channels at every size, from the smallest to that of the image
    clamp     features are clamped to +- this; the public networks do so for half precision

    The class embedding has `style` entries; `of` builds public networks with another number, `embedded`.

    `carried` holds "h"; "w", (B, layers, style): one for every convolution, and one for the last image; "noise": a map
    (B, 1, H, W) for every convolution, by name; "rgb": the image so far. A block first adds the image of its input to
    "rgb" and doubles it, so that all later images, its own too, depend only on the feature that leaves it.
    """

    architecture: ClassVar[str] = "stylegan2"

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 32, 32),
        classes: int | None = None,
        latent: int = 128,
        style: int = 256,
        layers: int = 2,
        widths: Sequence[int] = (256, 256, 256, 128),
        clamp: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.classes, self.latent = (shape[0], shape[1], shape[2]), classes, latent
        self.style, self.layers, self.widths, self.clamp = style, layers, tuple(widths), clamp
        start, times = doublings(self.shape)
        if len(self.widths) != times + 1:
            raise ValueError(
                f"{shape[1]} x {shape[2]} pixels have {times + 1} sizes of features; given {len(self.widths)} widths."
            )
        self.blocks = times + 1
        self._map(style, generator)
        self.synthesis = nn.Module()
        self.names: list[str] = []
        for number, width in enumerate(self.widths):
            size = (start[0] * 2**number, start[1] * 2**number)
            before = self.widths[number - 1] if number else None
            made = Block(before, width, style, size, self.shape[0], clamp, generator)
            self.names.append(f"b{size[0]}")
            self.synthesis.add_module(self.names[-1], made)
        self.eval()

    @classmethod
    def of(cls, settings: abc.Mapping[str, Any]) -> StyleGAN2:
        network = cls(**{name: value for name, value in settings.items() if name != "embedded"})
        if (embedded := settings.get("embedded")) is not None:
            network._map(embedded)
        return network

    def _map(self, embedded: int, generator: torch.Generator | None = None) -> None:
        self.embedded = embedded
        self.mapping = Mapping(self.latent, self.classes, embedded, self.style, self.layers, generator)

    @property
    def settings(self) -> dict[str, Any]:
        names = ("shape", "classes", "latent", "style", "layers", "widths", "clamp", "embedded")
        return {name: getattr(self, name) for name in names}

    @property
    def styles(self) -> int:
        """Number of w that an image needs."""
        return 2 * self.blocks

    def begin(self, z: Tensor, y: Tensor | None = None) -> Tree:
        w = self.mapping(z, None if self.classes is None else self.shares(y, z))
        count = z.shape[0]
        const = self._stage(0).const
        noise = {
            f"{name}_{layer}": made.noise_const.expand(count, 1, -1, -1)
            for name in self.names
            for layer, made in self._named(name).convolutions()
        }
        return {
            "h": const.expand(count, *const.shape),
            "w": w[:, None].expand(-1, self.styles, -1),
            "noise": noise,
            "rgb": const.new_zeros(()).expand(count, self.shape[0], *const.shape[1:]),
        }

    def block(self, index: int, carried: Tree) -> Tree:
        h, rgb = carried["h"], carried["rgb"]
        if index:
            rgb = doubled(self._shown(index - 1, carried))
        # Layer 0 is the only convolution of block 0; block i >= 1 has layers 2i - 1 and 2i.
        for place, (layer, made) in enumerate(self._stage(index).convolutions()):
            number = 2 * index - 1 + place if index else 0
            h = made(h, carried["w"][:, number], carried["noise"][f"{self.names[index]}_{layer}"])
        return {**carried, "h": h, "rgb": rgb}

    def picture(self, carried: Tree) -> Tensor:
        return (self._shown(self.blocks - 1, carried) + 1) / 2

    def noised(self, carried: Tree, generator: torch.Generator) -> Tree:
        def drawn(old: Tensor) -> Tensor:
            return torch.randn(old.shape, generator=generator, device=old.device, dtype=old.dtype)

        return {**carried, "noise": {name: drawn(old) for name, old in carried["noise"].items()}}

    def centre(self, count: int = 8192) -> None:
        """Set the mean of w, which the file stores, from this many latents."""
        like = self.mapping.w_avg
        draw = torch.Generator().manual_seed(0)
        z = torch.randn(count, self.latent, generator=draw).to(like)
        y = None
        if self.classes is not None:
            y = self.shares(torch.randint(self.classes, (count,), generator=draw).to(like.device), z)
        with torch.no_grad():
            like.copy_(self.mapping(z, y).mean(0))

    def _stage(self, index: int) -> Block:
        return self._named(self.names[index])

    def _named(self, name: str) -> Block:
        made = getattr(self.synthesis, name)
        assert isinstance(made, Block)
        return made

    def _shown(self, index: int, carried: Tree) -> Tensor:
        """The image so far plus that of block `index`; its w is that of the next layer."""
        return carried["rgb"] + self._stage(index).torgb(carried["h"], carried["w"][:, 2 * index + 1])


class Linear(nn.Module):
    """x W^T rate / sqrt(inputs) + b rate: weights of unit scale, gains at run time ("equalised learning rate")."""

    def __init__(
        self, inputs: int, outputs: int, rate: float = 1.0, bias: float = 0.0, seed: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.weight = normal(outputs, inputs, std=1 / rate, generator=seed)
        self.bias = nn.Parameter(torch.full((outputs,), bias / rate))
        self.gain, self.rate = rate / math.sqrt(inputs), rate

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.gain, self.bias * self.rate)


class Mapping(nn.Module):
    """z, and an embedding of the class, each of unit second moment -> w."""

    w_avg: Tensor

    def __init__(
        self, latent: int, classes: int | None, embedded: int, style: int, layers: int, seed: torch.Generator | None
    ) -> None:
        super().__init__()
        self.layers = layers
        if classes:
            self.embed = Linear(classes, embedded, seed=seed)
        sizes = [latent + (embedded if classes else 0)] + [style] * layers
        for number, (a, b) in enumerate(zip(sizes, sizes[1:])):
            self.add_module(f"fc{number}", Linear(a, b, rate=SLOW, seed=seed))
        self.register_buffer("w_avg", torch.zeros(style))

    def forward(self, z: Tensor, shares: Tensor | None = None) -> Tensor:
        x = unit(z)
        if shares is not None:
            x = torch.cat([x, unit(self.embed(shares))], 1)
        for number in range(self.layers):
            x = activated(getattr(self, f"fc{number}")(x))
        return x


class Convolution(nn.Module):
    """A 3 x 3 convolution with styles: they scale the features, and the result is scaled back to unit variance."""

    noise_const: Tensor
    resample_filter: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        style: int,
        size: tuple[int, int],
        doubles: bool,
        clamp: float | None,
        seed: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.doubles, self.clamp = doubles, clamp
        self.affine = Linear(style, inputs, bias=1.0, seed=seed)
        self.weight = normal(outputs, inputs, 3, 3, generator=seed)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.noise_strength = nn.Parameter(torch.zeros(()))
        self.register_buffer("noise_const", torch.randn(size, generator=seed))
        self.register_buffer("resample_filter", kernel())

    def forward(self, x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
        with exact(x):
            scale = self.affine(w)
            power = self.weight.square().sum((2, 3))
            demodulation = (functional.linear(scale.square(), power) + EPSILON).rsqrt()
        x = x * scale[..., None, None].to(x.dtype)
        if self.doubles:
            x = functional.conv_transpose2d(x, self.weight.transpose(0, 1), stride=2)
            x = boxes(functional.pad(x, (1, 1, 1, 1)), 3)
            demodulation = demodulation * 4  # of the filter: zeros between pixels take three quarters of the sum
        else:
            x = functional.conv2d(x, self.weight, padding=1)
        x = x * demodulation[..., None, None].to(x.dtype) + (noise * self.noise_strength).to(x.dtype)
        return activated(x + self.bias[:, None, None].to(x.dtype), self.clamp)


class Picture(nn.Module):
    """Features -> colours, by a 1 x 1 convolution with styles and without demodulation."""

    def __init__(self, inputs: int, channels: int, style: int, clamp: float | None, seed: torch.Generator | None):
        super().__init__()
        self.clamp, self.gain = clamp, 1 / math.sqrt(inputs)
        self.affine = Linear(style, inputs, bias=1.0, seed=seed)
        self.weight = normal(channels, inputs, 1, 1, generator=seed)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        with exact(x):  # the image too: a discriminator would recognise fakes by the rounding of bfloat16
            scale = self.affine(w) * self.gain
            x = functional.conv2d(x.to(scale.dtype) * scale[..., None, None], self.weight) + self.bias[:, None, None]
        return x if self.clamp is None else x.clamp(-self.clamp, self.clamp)


class Block(nn.Module):
    """One size of features: a constant, or a convolution that doubles; then one that does not; then a picture."""

    resample_filter: Tensor

    def __init__(
        self,
        before: int | None,
        width: int,
        style: int,
        size: tuple[int, int],
        channels: int,
        clamp: float | None,
        seed: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.register_buffer("resample_filter", kernel())
        self.first = before is None
        if before is None:
            self.const = normal(width, *size, generator=seed)
        else:
            self.conv0 = Convolution(before, width, style, size, True, clamp, seed)
        self.conv1 = Convolution(width, width, style, size, False, clamp, seed)
        self.torgb = Picture(width, channels, style, clamp, seed)

    def convolutions(self) -> list[tuple[str, Convolution]]:
        return [("conv1", self.conv1)] if self.first else [("conv0", self.conv0), ("conv1", self.conv1)]


def kernel() -> Tensor:
    """The filter, [1, 3, 3, 1] / 8 along both axes, which files of the public networks hold in every layer."""
    taps = torch.tensor(FILTER) / sum(FILTER)
    return taps[:, None] * taps


def unit(x: Tensor) -> Tensor:
    """Of unit second moment, row by row."""
    return x * (x.square().mean(1, keepdim=True) + EPSILON).rsqrt()


def activated(x: Tensor, clamp: float | None = None) -> Tensor:
    """Leaky ReLU (0.2) times sqrt(2), which keeps the variance near that of the input."""
    x = functional.leaky_relu(x, 0.2) * math.sqrt(2)
    return x if clamp is None else x.clamp(-clamp, clamp)


def boxes(x: Tensor, times: int) -> Tensor:
    """Repeated means over 2 x 2 pixels: three times is [1, 3, 3, 1] / 8 along both axes. Each removes one pixel."""
    if x.device.type == "cpu":  # pooling is ten times slower there than a convolution of every channel by itself
        taps = torch.tensor([math.comb(times, place) / 2**times for place in range(times + 1)], dtype=x.dtype)
        return functional.conv2d(x, (taps[:, None] * taps).expand(x.shape[1], 1, -1, -1), groups=x.shape[1])
    for _ in range(times):
        x = functional.avg_pool2d(x, 2, stride=1)
    return x


def doubled(x: Tensor) -> Tensor:
    """Double the size: zeros between pixels, then [1, 3, 3, 1] / 4. Copying pixels is the first of its three boxes."""
    count, channels, height, width = x.shape
    copied = x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).reshape(count, channels, 2 * height, 2 * width)
    return boxes(functional.pad(copied, (1, 1, 1, 1)), 2)


def exact(x: Tensor) -> AbstractContextManager[Any]:
    """No half precision (which only training uses) for styles: they are few and matter to every pixel."""
    if not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
