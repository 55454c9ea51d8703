"""Parts of the networks: layers by name, layers without weights yet, and initial values."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

from gradleak.core.registry import did_you_mean

Shape = tuple[int, int, int]  # channels, height, width
Activation = str | Callable[[], nn.Module]
Norm = str | Callable[[int], nn.Module]
Init = str | float
Choice = TypeVar("Choice")


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel, as Flax applies it to images; its epsilon too."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)  # (batch, channels, height, width)


class Learned(nn.Module):
    """A trained tensor: zero at the start, or a truncated normal of this `deviation`."""

    def __init__(self, *shape: int, deviation: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(shape))
        self.deviation = deviation

    def forward(self) -> Tensor:
        return self.value

    def extra_repr(self) -> str:
        return f"{tuple(self.value.shape)}, deviation={self.deviation:g}"


def pick(what: str, name: str, options: Mapping[str, Choice]) -> Choice:
    """The option of this name, or an error that suggests one."""
    if name not in options:
        raise ValueError(f"Unknown {what} {name!r}.{did_you_mean(str(name), options)}")
    return options[name]


def activation_of(choice: Activation) -> Callable[[], nn.Module]:
    """A function that makes an activation, by name or as given."""
    smooth = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "gelu": nn.GELU, "softplus": nn.Softplus, "silu": nn.SiLU}
    kinked = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU}
    return choice if callable(choice) else pick("activation", choice, {**smooth, **kinked})


def norm_of(choice: Norm) -> Callable[[int], nn.Module]:
    """A function that makes a normalisation from its number of channels, by name or as given."""
    norms: dict[str, Callable[[int], nn.Module]] = {
        "none": nn.Identity,
        "batch": nn.BatchNorm2d,
        # From width 64 on, 8 or more channels to a group: never a lone value, even where an image has shrunk to 1x1.
        "group": lambda channels: nn.GroupNorm(math.gcd(8, channels), channels),
        "layer": ChannelLayerNorm,
    }
    return choice if callable(choice) else pick("norm", choice, norms)


def pool_of(choice: str) -> Callable[[int], nn.Module]:
    """A function that makes a pooling from its size, by name."""
    return pick("pool", choice, {"none": nn.Identity, "max": nn.MaxPool2d, "avg": nn.AvgPool2d})


# Layers with random weights begin on the meta device, without storage, so that building them draws no random numbers;
# `network` gives them storage and values.
def conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, bias: bool = True) -> nn.Module:
    """A convolution without weights yet."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias, device="meta")


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
    """A linear layer without weights yet."""
    return nn.Linear(inputs, outputs, bias=bias, device="meta")


def num_features(layers: Sequence[nn.Module], shape: Sequence[int]) -> int:
    """The number of features that the layers give for images of this shape (channels, height, width)."""
    trial = copy.deepcopy(nn.Sequential(*layers)).to("meta")  # a copy: BatchNorm would count this as a batch
    try:
        # Two images: BatchNorm refuses a lone value per channel.
        return trial(torch.empty(2, *shape, device="meta")).shape[1]
    except RuntimeError as error:
        raise ValueError(f"Images of shape {shape} do not fit this network ({error}). Give larger ones.") from error


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageClassifier:
    """Options that the larger networks share; `gradleak.models` describes them."""

    shape: Shape = (3, 32, 32)
    classes: int = 10
    activation: Activation = "relu"
    init: Init = "torch"
    generator: Generator | None = None

    def network(self, layers: Sequence[nn.Module]) -> nn.Sequential:
        """These feature layers with the classifier behind them."""
        return network(layers, self.shape, self.classes, self.init, self.generator)


def network(
    layers: Sequence[nn.Module], shape: Sequence[int], classes: int, init: Init, generator: Generator | None
) -> nn.Sequential:
    """Put the classifier behind the feature layers, and give every parameter its initial value."""
    laws: dict[str, Init] = {"uniform05": 0.5, "torch": "torch", "kaiming": "kaiming", "lecun": "lecun"}
    law = pick("init", init, laws) if isinstance(init, str) else init
    classifier = linear(num_features(layers, shape), classes)
    model = nn.Sequential(OrderedDict(features=nn.Sequential(*layers), classifier=classifier))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.to_empty(device="cpu")
    for layer in model.cpu().modules():
        draw(layer, law, generator)
    return model.to(torch.get_default_device())


def draw(layer: nn.Module, law: Init, generator: Generator | None) -> None:
    """Give the parameters of one layer their initial values, by the law of that name."""
    if not isinstance(law, str):
        for parameter in layer.parameters(recurse=False):
            nn.init.uniform_(parameter, -law, law, generator=generator)
    elif isinstance(layer, Learned) and layer.deviation:
        cut = 2 * layer.deviation
        nn.init.trunc_normal_(layer.value, 0, layer.deviation, -cut, cut, generator=generator)
    elif isinstance(layer, nn.Conv2d | nn.Linear):
        bound = layer.weight[0].numel() ** -0.5  # 1 / sqrt(fan_in)
        if law == "lecun":
            deviation = bound / 0.87962566103423978  # a normal cut at two deviations has this share of its deviation
            nn.init.trunc_normal_(layer.weight, 0, deviation, -2 * deviation, 2 * deviation, generator=generator)
        elif law == "kaiming" and isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        else:
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
        if layer.bias is not None and law == "lecun":
            nn.init.zeros_(layer.bias)
        elif layer.bias is not None:
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
