"""Networks that the gradient-leakage papers attack, built exactly; their parameter counts are tests.

Every function returns `nn.Sequential(features, classifier)`: `features` maps images (batch, channels, height, width) to
the classifier's input (batch, features), `classifier` is the last linear layer, the output is logits. No layer works in
place and only BatchNorm keeps state, so all run under `torch.func` (vmap, gradients of gradients). In training mode
BatchNorm needs its own copy of the buffers in every lane.

Common options
  shape        (channels, height, width) of one image.
  activation   "sigmoid", "relu", "tanh", "elu", "gelu", "softplus", "leaky_relu", "silu"; or a function of no arguments
               that makes a module.
  norm         "batch", "group" (8 groups; gcd(8, channels) where 8 does not divide them), "layer" (over the channels of
               each pixel), "none"; or a function of the number of channels that makes a module.
  init         "torch": torch's default, weights and biases ~ U(-k, k) with k = 1 / sqrt(fan_in).
               "kaiming": weights of convolutions ~ N(0, 2 / fan_out), the rest as "torch". torchvision's ResNets.
               "lecun": weights ~ truncated normal of variance 1 / fan_in, biases zero. Flax's default.
               "uniform05": EVERY weight and bias ~ U(-0.5, 0.5), those of normalisation layers too. A number b: +-b.
  generator    the CPU generator that every random parameter is drawn from, layer by layer in the order of
               `model.named_parameters()`, weight before bias; None: torch's global one. With a generator the global one
               is not touched. Draws happen on the CPU, so a seed means the same weights on every machine. Except under
               a uniform `init`, normalisation layers start at 1 and 0 and draw nothing.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

from gradleak.registry import did_you_mean, named

Shape = tuple[int, int, int]  # channels, height, width
Activation = str | Callable[[], nn.Module]
Norm = str | Callable[[int], nn.Module]
Init = str | float
Choice = TypeVar("Choice")

__all__ = ["cnn_lewis", "convnet", "lenet5", "lenet_cpl", "lenet_zhu", "mlp", "resnet", "resnet18", "resnet20_4"]


# --- LeNets ---------------------------------------------------------------------------------------------------------


@named("lenet-zhu", kind="model", paper="Zhu, Liu, Han, NeurIPS 2019", status="verified")
def lenet_zhu(
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 10,
    strides: Sequence[int] = (2, 2, 1),
    width: int = 12,
    activation: Activation = "sigmoid",
    init: Init = "uniform05",
    generator: Generator | None = None,
) -> nn.Sequential:
    """The LeNet of DLG, iDLG and IG: three 5x5 convolutions of 12 channels (strides 2, 2, 1), one linear layer.

    No pooling, no normalisation. The wide initialisation is that of the authors' code; leakage depends strongly on it,
    and later papers that say "randomly initialised LeNet" may mean init="torch".
    """
    activate = _activation(activation)
    layers: list[nn.Module] = []
    channels = shape[0]
    for stride in strides:
        layers += [_conv(channels, width, 5, stride=stride, padding=2), activate()]
        channels = width
    return _network([*layers, nn.Flatten()], shape, classes, init, generator)


@named("lenet-cpl", kind="model", paper="Wei et al., ESORICS 2020")
def lenet_cpl(
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 106,
    width: int = 12,
    activation: Activation = "sigmoid",
    init: Init = "uniform05",
    generator: Generator | None = None,
) -> nn.Sequential:
    """LeNet-Zhu with a fourth 5x5 convolution. 106 classes: the people with at least 14 photographs in LFW.

    The authors' other notebooks: activation="relu" or "tanh" with init=0.05; 128x128 images with width=256, init=0.1.
    """
    deeper = partial(lenet_zhu, strides=(2, 2, 1, 1), width=width)
    return deeper(shape=shape, classes=classes, activation=activation, init=init, generator=generator)


@named("lenet5", kind="model", paper="LeCun et al., Proc. IEEE 1998, in the form of iLRG (ICLR 2023)")
def lenet5(
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 10,
    activation: Activation = "relu",
    pool: str = "max",
    padding: tuple[int, int] = (0, 0),
    init: Init = "kaiming",
    generator: Generator | None = None,
) -> nn.Sequential:
    """LeNet-5: 5x5 convolutions of 6 and 16 channels, each with an activation and a 2x2 pool, then 120-84-classes.

    Differs from 1998 as iLRG does: every connection is present, pooling has no weights, the output is linear. The
    FMNIST LeNet of Lewis et al. is shape=(1, 28, 28), pool="avg", padding=(0, 2), init="lecun".
    """
    activate, make_pool = _activation(activation), _pool(pool)
    body: list[nn.Module] = []
    for inputs, outputs, margin in ((shape[0], 6, padding[0]), (6, 16, padding[1])):
        body += [_conv(inputs, outputs, 5, padding=margin), activate(), make_pool(2)]
    body.append(nn.Flatten())
    head = [_linear(_num_features(body, shape), 120), activate(), _linear(120, 84), activate()]
    return _network([*body, *head], shape, classes, init, generator)


# --- Plain networks -------------------------------------------------------------------------------------------------


@named("mlp", kind="model")
def mlp(
    *,
    shape: Sequence[int] = (1, 28, 28),
    classes: int = 10,
    widths: Sequence[int] = (300,),
    activation: Activation = "relu",
    init: Init = "torch",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Fully connected network, 784-300-10 by default; its first layer gives a lone input away in closed form.

    iLRG's "DNN" is widths=(300, 300).
    """
    activate = _activation(activation)
    sizes = [math.prod(shape), *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [_linear(inputs, outputs), activate()]
    return _network(layers, shape, classes, init, generator)


@named("convnet", kind="model", paper="Geiping et al., NeurIPS 2020")
def convnet(
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 10,
    width: int = 64,
    norm: Norm = "batch",
    activation: Activation = "relu",
    init: Init = "torch",
    generator: Generator | None = None,
) -> nn.Sequential:
    """ConvNet-w of IG: 3x3 convolutions of w, 2w, 2w, 4w, 4w, 4w channels, max-pool 3, then 4w, 4w, max-pool 3.

    The authors' source lists a ninth convolution under a repeated key, which replaces its namesake: the network they
    ran has eight, as here. Convolutions keep their bias beside the normalisation.
    """
    make_norm, activate = _norm(norm), _activation(activation)
    layers: list[nn.Module] = []
    channels = shape[0]
    for group in ((1, 2, 2, 4, 4, 4), (4, 4)):
        for multiple in group:
            outputs = multiple * width
            layers += [_conv(channels, outputs, 3, padding=1), make_norm(outputs), activate()]
            channels = outputs
        layers.append(nn.MaxPool2d(3))
    return _network([*layers, nn.Flatten()], shape, classes, init, generator)


@named("cnn-lewis", kind="model", paper="Lewis et al., ICDCS 2024", status="verified")
def cnn_lewis(
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 10,
    activation: Activation = "relu",
    norm: Norm = "none",
    pool: str = "none",
    window: int = 2,
    init: Init = "lecun",
    generator: Generator | None = None,
) -> nn.Sequential:
    """The ablation CNN of Lewis et al.: 3x3 convolutions of 48, 32 and 16 channels; each: norm, activation, pool.

    `pool` is "none", "max" or "avg" with `window` = stride = 2 ("small") or 3 ("large"); the paper's norms are "none"
    and "layer". Differs: logits, where the authors' network ends in a softmax; features are flattened channel first.
    """
    make_norm, activate, make_pool = _norm(norm), _activation(activation), _pool(pool)
    layers: list[nn.Module] = []
    channels = shape[0]
    for outputs in (48, 32, 16):
        layers += [_conv(channels, outputs, 3, padding=1), make_norm(outputs), activate(), make_pool(window)]
        channels = outputs
    return _network([*layers, nn.Flatten()], shape, classes, init, generator)


# --- Residual networks ----------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """y = activation(body(x) + shortcut(x)); the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: Norm, activation: Activation) -> None:
        super().__init__()
        make_norm, activate, bias = _norm(norm), _activation(activation), norm == "none"
        self.body = nn.Sequential(
            _conv(inputs, outputs, 3, stride=stride, padding=1, bias=bias),
            make_norm(outputs),
            activate(),
            _conv(outputs, outputs, 3, padding=1, bias=bias),
            make_norm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride=stride, bias=bias), make_norm(outputs))
        self.activation = activate()

    def forward(self, x: Tensor) -> Tensor:
        total = self.body(x) + self.shortcut(x)  # (batch, outputs, height / stride, width / stride)
        return self.activation(total)


@named("resnet", kind="model", paper="He et al., CVPR 2016")
def resnet(
    blocks: Sequence[int] = (2, 2, 2, 2),
    width: int = 64,
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 10,
    stem: str = "cifar",
    stride: int = 2,
    norm: Norm = "batch",
    activation: Activation = "relu",
    init: Init = "kaiming",
    generator: Generator | None = None,
) -> nn.Sequential:
    """Residual network of basic blocks: `blocks[i]` of them with `width` * 2^i channels, average pool, linear layer.

    stem="cifar" is a 3x3 convolution; "imagenet" a 7x7 one with stride 2 and a 3x3 max-pool with stride 2. Every stage
    but the first begins with `stride`. Convolutions have a bias only with norm="none", where nothing else shifts them.
    IG's ResNet32-10 is blocks=(5, 5, 5), width=160. DLG's smooth ResNet-56 is blocks=(9, 9, 9), width=16, stride=1,
    activation="sigmoid", init="uniform05" (its shortcuts are not stated).
    """
    kernel, step, pool = _pick("stem", stem, {"cifar": (3, 1, []), "imagenet": (7, 2, [nn.MaxPool2d(3, 2, padding=1)])})
    first = _conv(shape[0], width, kernel, stride=step, padding=kernel // 2, bias=norm == "none")
    layers = [first, _norm(norm)(width), _activation(activation)(), *pool]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            step, outputs = stride if stage and not block else 1, width * 2**stage
            layers.append(BasicBlock(channels, outputs, stride=step, norm=norm, activation=activation))
            channels = outputs
    return _network([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], shape, classes, init, generator)


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


# --- Pieces ---------------------------------------------------------------------------------------------------------


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel, as Flax applies it to images; its epsilon too."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)  # (batch, channels, height, width)


def _pick(what: str, name: str, options: Mapping[str, Choice]) -> Choice:
    if name not in options:
        raise ValueError(f"Unknown {what} {name!r}.{did_you_mean(str(name), options)}")
    return options[name]


def _activation(choice: Activation) -> Callable[[], nn.Module]:
    smooth = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "gelu": nn.GELU, "softplus": nn.Softplus, "silu": nn.SiLU}
    kinked = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU}
    return choice if callable(choice) else _pick("activation", choice, {**smooth, **kinked})


def _norm(choice: Norm) -> Callable[[int], nn.Module]:
    norms: dict[str, Callable[[int], nn.Module]] = {
        "none": nn.Identity,
        "batch": nn.BatchNorm2d,
        # From width 64 on, 8 or more channels to a group: never a lone value, even where an image has shrunk to 1x1.
        "group": lambda channels: nn.GroupNorm(math.gcd(8, channels), channels),
        "layer": ChannelLayerNorm,
    }
    return choice if callable(choice) else _pick("norm", choice, norms)


def _pool(choice: str) -> Callable[[int], nn.Module]:
    return _pick("pool", choice, {"none": nn.Identity, "max": nn.MaxPool2d, "avg": nn.AvgPool2d})


# Layers with random weights begin on the meta device, without storage, so that building them draws no random numbers;
# `_network` gives them storage and values.
def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, bias: bool = True) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias, device="meta")


def _linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, device="meta")


def _num_features(layers: Sequence[nn.Module], shape: Sequence[int]) -> int:
    trial = copy.deepcopy(nn.Sequential(*layers)).to("meta")  # a copy: BatchNorm would count this as a batch
    try:
        # Two images: BatchNorm refuses a lone value per channel.
        return trial(torch.empty(2, *shape, device="meta")).shape[1]
    except RuntimeError as error:
        raise ValueError(f"Images of shape {shape} do not fit this network ({error}). Give larger ones.") from error


def _network(
    layers: Sequence[nn.Module], shape: Sequence[int], classes: int, init: Init, generator: Generator | None
) -> nn.Sequential:
    """Put the classifier behind the feature layers, and give every parameter its first value."""
    laws: dict[str, Init] = {"uniform05": 0.5, "torch": "torch", "kaiming": "kaiming", "lecun": "lecun"}
    law = _pick("init", init, laws) if isinstance(init, str) else init
    classifier = _linear(_num_features(layers, shape), classes)
    model = nn.Sequential(OrderedDict(features=nn.Sequential(*layers), classifier=classifier))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.to_empty(device="cpu")
    for layer in model.cpu().modules():
        _draw(layer, law, generator)
    return model.to(torch.get_default_device())


def _draw(layer: nn.Module, law: Init, generator: Generator | None) -> None:
    if not isinstance(law, str):
        for parameter in layer.parameters(recurse=False):
            nn.init.uniform_(parameter, -law, law, generator=generator)
    elif isinstance(layer, nn.Conv2d | nn.Linear):
        bound = layer.weight[0].numel() ** -0.5  # 1 / sqrt(fan_in)
        if law == "lecun":
            deviation = bound / 0.87962566103423978  # cutting at two deviations leaves this share of a normal's own
            nn.init.trunc_normal_(layer.weight, 0, deviation, -2 * deviation, 2 * deviation, generator=generator)
        elif law == "kaiming" and isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        else:
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
        if layer.bias is not None and law == "lecun":
            nn.init.zeros_(layer.bias)
        elif layer.bias is not None:
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
