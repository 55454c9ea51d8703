"""Plain networks: fully connected ones, and stacks of convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Generator, nn

from gradleak.core.registry import named
from gradleak.models.pieces import (
    Activation,
    Init,
    Norm,
    Shape,
    activation_of,
    conv,
    linear,
    network,
    norm_of,
    num_features,
    pool_of,
)

AVERAGING = "Dimitrov et al., Data Leakage in Federated Averaging, TMLR 2022"
EXTENSION = "Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023"


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
    """Fully connected network, 784-300-10 by default; its first layer reveals a single input in closed form.

    iLRG's "DNN" is widths=(300, 300).
    """
    activate = activation_of(activation)
    sizes = [math.prod(shape), *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [linear(inputs, outputs), activate()]
    return network(layers, shape, classes, init, generator)


@named("mlp-sme", kind="model", paper=f"{EXTENSION}; FCN3 of its code")
def mlp_sme(
    *,
    shape: Sequence[int] = (1, 28, 28),
    classes: int = 62,
    activation: Activation = "relu",
    paper_quirks: bool = False,
    init: Init = "torch",
    generator: Generator | None = None,
) -> nn.Sequential:
    """The MLP of SME: 784-1000-1000-62 with ReLU, 1,848,062 parameters.

    paper_quirks: the logits pass the activation too, as in the authors' code. The network is then (features,
    classifier, output), examples whose true logit is cut off pull nothing, and no label rule's premises hold.
    """
    model = mlp(
        shape=shape, classes=classes, widths=(1000, 1000), activation=activation, init=init, generator=generator
    )
    if paper_quirks:
        model.add_module("output", activation_of(activation)())
    return model


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
    make_norm, activate = norm_of(norm), activation_of(activation)
    layers: list[nn.Module] = []
    channels = shape[0]
    for group in ((1, 2, 2, 4, 4, 4), (4, 4)):
        for multiple in group:
            outputs = multiple * width
            layers += [conv(channels, outputs, 3, padding=1), make_norm(outputs), activate()]
            channels = outputs
        layers.append(nn.MaxPool2d(3))
    return network([*layers, nn.Flatten()], shape, classes, init, generator)


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
    make_norm, activate, make_pool = norm_of(norm), activation_of(activation), pool_of(pool)
    layers: list[nn.Module] = []
    channels = shape[0]
    for outputs in (48, 32, 16):
        layers += [conv(channels, outputs, 3, padding=1), make_norm(outputs), activate(), make_pool(window)]
        channels = outputs
    return network([*layers, nn.Flatten()], shape, classes, init, generator)


@named("cnn-mnist", kind="model", paper=f"{AVERAGING}; {EXTENSION}")
def cnn_mnist(
    *,
    shape: Shape = (1, 28, 28),
    classes: int = 62,
    widths: Sequence[int] = (32, 64),
    hidden: int = 100,
    activation: Activation = "relu",
    init: Init = "torch",
    generator: Generator | None = None,
) -> nn.Sequential:
    """The FEMNIST network of DLFA and SME: two 3x3 convolutions, each with a 2x2 average pool, then 100-62.

    338,778 parameters with 62 classes; 335,142 with the 26 of the EMNIST letters. SME's code starts as torch does,
    DLFA's, in Flax, as init="lecun".
    """
    activate = activation_of(activation)
    layers: list[nn.Module] = []
    channels = shape[0]
    for outputs in widths:
        layers += [conv(channels, outputs, 3, padding=1), activate(), nn.AvgPool2d(2)]
        channels = outputs
    layers.append(nn.Flatten())
    head = [linear(num_features(layers, shape), hidden), activate()]
    return network([*layers, *head], shape, classes, init, generator)


@named("cnn-cifar", kind="model", paper=f"{AVERAGING}; {EXTENSION}")
def cnn_cifar(
    *,
    shape: Shape = (3, 32, 32),
    classes: int = 100,
    activation: Activation = "relu",
    init: Init = "torch",
    generator: Generator | None = None,
) -> nn.Sequential:
    """The CIFAR-100 network of DLFA and SME: cnn-mnist with 64 and 128 channels, then 200-100; 1,734,348 parameters."""
    wider = partial(cnn_mnist, widths=(64, 128), hidden=200)
    return wider(shape=shape, classes=classes, activation=activation, init=init, generator=generator)
