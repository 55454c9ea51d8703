"""ConvNeXt, and residual networks with pre-activation: what the SecAdam paper attacks on colour images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.models.pieces import (
    Activation,
    ChannelLayerNorm,
    ImageClassifier,
    Init,
    Norm,
    activation_of,
    conv,
    norm_of,
)
from gradleak.models.residual import ResidualNetwork

LEWIS = "Lewis et al., ICDCS 2024"


class PixelMean(nn.Module):
    """(batch, channels, height, width) -> (batch, channels, 1, 1). Adaptive pooling of one pixel is slow under vmap."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True)


class LayerScale(nn.Module):
    """One factor per channel, small at the start, so that a deep stack begins near the identity."""

    def __init__(self, channels: int, start: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((channels, 1, 1), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class ConvNeXtBlock(nn.Module):
    """x + scale * mlp(norm(depthwise 7x7(x))); the mlp, four times as wide, is two 1x1 convolutions."""

    def __init__(self, channels: int, *, scale: float, activation: Activation) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels, device="meta"),
            ChannelLayerNorm(channels),
            conv(channels, 4 * channels, 1),
            activation_of(activation)(),
            conv(4 * channels, channels, 1),
            LayerScale(channels, scale),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


@dataclass(frozen=True, eq=False)
class ConvNeXt(ImageClassifier):
    """Options of `convnext`."""

    depths: Sequence[int] = (3, 3, 27, 3)
    widths: Sequence[int] = (128, 256, 512, 1024)
    patch: int = field(default=4, kw_only=True)
    scale: float = field(default=1e-6, kw_only=True)
    activation: Activation = field(default="gelu", kw_only=True)
    init: Init = field(default="lecun", kw_only=True)


@named("convnext", kind="model", paper=f"Liu et al., A ConvNet for the 2020s, CVPR 2022; {LEWIS}")
@takes(ConvNeXt)
def convnext(options: ConvNeXt) -> nn.Sequential:
    """ConvNeXt-Base: a stem of 4x4 patches, four stages of blocks, LayerNorm and a 2x2 convolution between them.

    88,591,464 parameters with 1,000 classes. The average over pixels passes a LayerNorm before the classifier: the
    classifier's input, which representation inversion compares, is behind it (Lewis et al. look before it). Images of
    32 x 32 have become a single pixel by the last stage. Small ones: depths=(1, 1), widths=(16, 32).
    """
    channels, patch = options.widths[0], options.patch
    layers: list[nn.Module] = [conv(options.shape[0], channels, patch, stride=patch), ChannelLayerNorm(channels)]
    for stage, (depth, width) in enumerate(zip(options.depths, options.widths, strict=True)):
        if stage:
            layers += [ChannelLayerNorm(channels), conv(channels, width, 2, stride=2)]
        channels = width
        block = partial(ConvNeXtBlock, channels, scale=options.scale, activation=options.activation)
        layers += [block() for _ in range(depth)]
    return options.network([*layers, PixelMean(), ChannelLayerNorm(channels), nn.Flatten()])


class PreActivationBlock(nn.Module):
    """shortcut(a) + body(a), a = activation(norm(x)): bottleneck 1x1, 3x3 (stride), 1x1, each norm before its layer.

    The shortcut is x itself, or a 1x1 convolution of a where the shape changes.
    """

    def __init__(self, inputs: int, width: int, *, stride: int, norm: Norm, activation: Activation) -> None:
        super().__init__()
        make_norm, activate, outputs = norm_of(norm), activation_of(activation), 4 * width
        bias = norm == "none"
        self.before = nn.Sequential(make_norm(inputs), activate())
        self.body = nn.Sequential(
            conv(inputs, width, 1, bias=bias),
            make_norm(width),
            activate(),
            conv(width, width, 3, stride=stride, padding=1, bias=bias),
            make_norm(width),
            activate(),
            conv(width, outputs, 1, bias=bias),
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = conv(inputs, outputs, 1, stride=stride, bias=bias) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.before(x)
        past = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = past + self.body(active)
        return out


@dataclass(frozen=True, eq=False)
class ResNetV2(ResidualNetwork):
    """Options of `resnetv2`."""

    blocks: Sequence[int] = (3, 4, 6, 3)
    norm: Norm = field(default="layer", kw_only=True)
    init: Init = field(default="lecun", kw_only=True)


@named("resnetv2", kind="model", paper=f"He et al., Identity Mappings in Deep Residual Networks, ECCV 2016; {LEWIS}")
@takes(ResNetV2)
def resnetv2(options: ResNetV2) -> nn.Sequential:
    """ResNetV2-50 with LayerNorm in the place of BatchNorm: bottlenecks with pre-activation.

    25,549,352 parameters with stem="imagenet" and 1,000 classes, as with BatchNorm. Which stem Lewis et al. use on
    images of 32 x 32 is not known to us: "cifar" is a 3x3 convolution, "imagenet" a 7x7 one with stride 2 and a 3x3
    max-pool with stride 2.
    """
    norm, activation, channels = options.norm, options.activation, options.width
    first, pool = options.stem_layers()
    layers: list[nn.Module] = [first, *pool]
    for stage, count in enumerate(options.blocks):
        for block in range(count):
            stride, width = 2 if stage and not block else 1, options.width * 2**stage
            layers.append(PreActivationBlock(channels, width, stride=stride, norm=norm, activation=activation))
            channels = 4 * width
    return options.network([*layers, norm_of(norm)(channels), activation_of(activation)(), PixelMean(), nn.Flatten()])
