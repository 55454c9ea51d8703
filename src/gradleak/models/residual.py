"""Residual networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Generator, Tensor, nn

from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.models.pieces import (
    Activation,
    ImageClassifier,
    Init,
    Norm,
    Shape,
    activation_of,
    conv,
    linear,
    network,
    norm_of,
    num_features,
    pick,
)


class BasicBlock(nn.Module):
    """y = activation(body(x) + shortcut(x)); the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: Norm, activation: Activation) -> None:
        super().__init__()
        make_norm, activate, bias = norm_of(norm), activation_of(activation), norm == "none"
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, stride=stride, padding=1, bias=bias),
            make_norm(outputs),
            activate(),
            conv(outputs, outputs, 3, padding=1, bias=bias),
            make_norm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride=stride, bias=bias), make_norm(outputs))
        self.activation = activate()

    def forward(self, x: Tensor) -> Tensor:
        total = self.body(x) + self.shortcut(x)  # (batch, outputs, height / stride, width / stride)
        return self.activation(total)


@dataclass(frozen=True, eq=False)
class ResidualNetwork(ImageClassifier):
    """What residual networks share: `blocks[i]` blocks in stage i, `width` channels in the first, and a stem."""

    blocks: Sequence[int] = (2, 2, 2, 2)
    width: int = 64
    stem: str = field(default="cifar", kw_only=True)
    norm: Norm = field(default="batch", kw_only=True)
    init: Init = field(default="kaiming", kw_only=True)

    def stem_layers(self) -> tuple[nn.Module, list[nn.Module]]:
        """The first convolution, and what pools behind it."""
        pool: list[nn.Module] = [nn.MaxPool2d(3, 2, padding=1)]
        kernel, step, pooling = pick("stem", self.stem, {"cifar": (3, 1, []), "imagenet": (7, 2, pool)})
        bias = self.norm == "none"
        return conv(self.shape[0], self.width, kernel, stride=step, padding=kernel // 2, bias=bias), pooling


@dataclass(frozen=True, eq=False)
class ResNet(ResidualNetwork):
    """Options of `resnet`."""

    stride: int = field(default=2, kw_only=True)


@named("resnet", kind="model", paper="He et al., CVPR 2016")
@takes(ResNet)
def resnet(options: ResNet) -> nn.Sequential:
    """Residual network of basic blocks: `blocks[i]` of them with `width` * 2^i channels, average pool, linear layer.

    stem="cifar" is a 3x3 convolution; "imagenet" a 7x7 one with stride 2 and a 3x3 max-pool with stride 2. Every stage
    but the first begins with `stride`. Convolutions have a bias only with norm="none", where nothing else shifts them.
    IG's ResNet32-10 is blocks=(5, 5, 5), width=160. DLG's smooth ResNet-56 is blocks=(9, 9, 9), width=16, stride=1,
    activation="sigmoid", init="uniform05" (its shortcuts are not stated).
    """
    norm, activation, channels = options.norm, options.activation, options.width
    first, pool = options.stem_layers()
    layers = [first, norm_of(norm)(channels), activation_of(activation)(), *pool]
    for stage, count in enumerate(options.blocks):
        for block in range(count):
            stride, outputs = options.stride if stage and not block else 1, options.width * 2**stage
            layers.append(BasicBlock(channels, outputs, stride=stride, norm=norm, activation=activation))
            channels = outputs
    return options.network([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()])


@named("resnet18", kind="model", paper="He et al., CVPR 2016", status="verified")
def resnet18(
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 10,
    stem: str = "cifar",
    norm: Norm = "batch",
    activation: Activation = "relu",
    init: Init = "kaiming",
    generator: Generator | None = None,
) -> nn.Sequential:
    """ResNet-18, with the stem for small images by default; stem="imagenet" is the original."""
    make = partial(resnet, (2, 2, 2, 2), 64, stem=stem, norm=norm)
    return make(shape=shape, classes=classes, activation=activation, init=init, generator=generator)


@named("resnet20-4", kind="model", paper="Geiping et al., NeurIPS 2020")
def resnet20_4(
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 10,
    norm: Norm = "batch",
    activation: Activation = "relu",
    init: Init = "kaiming",
    generator: Generator | None = None,
) -> nn.Sequential:
    """ResNet20-4 of IG: three stages of three basic blocks, four times as wide (64) as the CIFAR ResNet-20."""
    make = partial(resnet, (3, 3, 3), 64, norm=norm)
    return make(shape=shape, classes=classes, activation=activation, init=init, generator=generator)


@named("resnet8", kind="model", paper="Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023")
def resnet8(
    *,
    shape: Shape = (1, 28, 28),
    classes: int = 62,
    norm: Norm = "batch",
    activation: Activation = "relu",
    paper_quirks: bool = True,
    init: Init = "torch",
    generator: Generator | None = None,
) -> nn.Sequential:
    """ResNet8 of SME: one basic block each of 32, 64 and 128 channels, a padded 2x2 average pool, 1000-62.

    2,417,846 parameters. The pool takes 7x7 to 4x4: its border is averaged with zeros. SME's clients train it in
    evaluation mode, so call `.eval()`: BatchNorm then normalises by its buffers, which start at 0 and 1.
    paper_quirks: nothing between the last two linear layers, which together are one of rank 62; else an activation.
    """
    activate = activation_of(activation)
    layers = [conv(shape[0], 32, 3, padding=1, bias=norm == "none"), norm_of(norm)(32), activate()]
    for inputs, outputs, stride in ((32, 32, 1), (32, 64, 2), (64, 128, 2)):
        layers.append(BasicBlock(inputs, outputs, stride=stride, norm=norm, activation=activation))
    layers += [nn.AvgPool2d(2, padding=1), nn.Flatten()]
    layers.append(linear(num_features(layers, shape), 1000))
    layers += [] if paper_quirks else [activate()]
    return network(layers, shape, classes, init, generator)
