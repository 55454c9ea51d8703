"""LeNets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Generator, nn

from gradleak.core.registry import named
from gradleak.models.pieces import Activation, Init, Shape, activation_of, conv, linear, network, num_features, pool_of


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
    activate = activation_of(activation)
    layers: list[nn.Module] = []
    channels = shape[0]
    for stride in strides:
        layers += [conv(channels, width, 5, stride=stride, padding=2), activate()]
        channels = width
    return network([*layers, nn.Flatten()], shape, classes, init, generator)


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
    activate, make_pool = activation_of(activation), pool_of(pool)
    body: list[nn.Module] = []
    for inputs, outputs, margin in ((shape[0], 6, padding[0]), (6, 16, padding[1])):
        body += [conv(inputs, outputs, 5, padding=margin), activate(), make_pool(2)]
    body.append(nn.Flatten())
    head = [linear(num_features(body, shape), 120), activate(), linear(120, 84), activate()]
    return network([*body, *head], shape, classes, init, generator)
