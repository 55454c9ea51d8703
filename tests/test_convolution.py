"""Lane convolutions are ordinary convolutions, to the last derivative that gradient matching takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jacfwd, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from gradleak.engine import convolution
from gradleak.engine.convolution import Fold, Patches, Window
from gradleak.engine.layers import LaneLayers

VIEWS = {"view", "reshape", "transpose", "t", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "alias"}
VIEWS |= {"detach", "_unsafe_view", "as_strided", "unfold", "movedim", "split", "unbind", "chunk", "_reshape_alias"}


class Counted(TorchDispatchMode):
    """Counts what would be kernels on a GPU: operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += str(func.overloadpacket).rpartition(".")[2] not in VIEWS
        return func(*args, **(kwargs or {}))


CASES = [
    # examples, channels in, out, side, kernel, stride, padding
    (1, 3, 4, 8, 3, 1, 1),
    (2, 3, 4, 8, 3, 1, 1),
    (1, 3, 4, 9, 5, 2, 2),
    (2, 2, 3, 8, 3, 2, 1),  # the last column is never reached
    (1, 2, 3, 7, 2, 3, 0),
    (1, 4, 5, 6, 1, 1, 0),
    (2, 4, 5, 6, 1, 2, 0),
    (1, 2, 3, 6, 3, 1, 0),  # the adjoint's walk begins outside
    (1, 2, 3, 4, 1, 1, 1),  # an edge of nothing but padding: no walk of a mirrored kernel
]


@pytest.fixture(params=["patches", "in turn"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of a GPU with lanes, of few examples and of many, whatever the device."""
    monkeypatch.setattr(convolution, "in_turn", lambda value, lanes=None: request.param == "in turn")


def matching(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, stride: int, padding: int) -> Tensor:
    """A gradient-matching loss of one lane: it holds a gradient by the weights, and is differentiated by x."""

    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(F.conv2d(x, weight, bias, stride, padding)).pow(2).sum()

    to_weight, to_bias = grad(loss, argnums=(0, 1))(weight, bias)
    return (to_weight - target).square().sum() + to_bias.square().sum()


@pytest.mark.parametrize(("examples", "channels", "out", "side", "kernel", "stride", "padding"), CASES)
def test_the_second_derivative_of_every_lane_is_that_of_torch(
    examples: int, channels: int, out: int, side: int, kernel: int, stride: int, padding: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, weight, bias = draw(3, examples, channels, side, side), draw(out, channels, kernel, kernel), draw(out)
    target = draw(3, *weight.shape)

    def run() -> Tensor:
        return vmap(grad(lambda x, target: matching(x, weight, bias, target, stride, padding)))(x, target)

    plain = run()
    with LaneLayers():
        lanes = run()
    torch.testing.assert_close(lanes, plain, rtol=1e-10, atol=1e-12)


def gradient(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(F.conv2d(x, weight, bias, stride, padding)).pow(2).sum()

    return grad(loss, argnums=(0, 1))(weight, bias)


def two_steps(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """The weights of the second gradient depend on x too."""
    to_weight, to_bias = gradient(x, weight, bias, stride, padding)
    return gradient(x, weight - 0.1 * to_weight, bias - 0.1 * to_bias, stride, padding)


def each_example(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """One gradient per example: a vmap inside of what is differentiated."""
    return vmap(lambda one: gradient(one[None], weight, bias, stride, padding))(x)


@pytest.mark.parametrize("upload", [gradient, two_steps, each_example])
@pytest.mark.parametrize(("examples", "channels", "out", "side", "kernel", "stride", "padding"), CASES)
def test_products_with_the_jacobian_of_an_upload_are_those_of_torch(
    examples: int,
    channels: int,
    out: int,
    side: int,
    kernel: int,
    stride: int,
    padding: int,
    upload: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    lanes, directions = 3, 2
    x, weight, bias = draw(lanes, examples, channels, side, side), draw(out, channels, kernel, kernel), draw(out)
    tangents = draw(lanes, directions, *x.shape[1:])
    function = lambda x: upload(x, weight, bias, stride, padding)  # noqa: E731
    cotangents = tuple(draw(lanes, *part.shape) for part in function(x[0]))
    forward = lambda x, t: jvp(function, (x,), (t,))  # noqa: E731
    backward = lambda x, c: vjp(function, x)[1](c)[0]  # noqa: E731
    backward_over_forward = lambda x, t: grad(lambda x: forward(x, t)[1][0].square().sum())(x)  # noqa: E731

    def run() -> dict[str, object]:
        return {
            "one": forward(x[0], tangents[0, 0]),
            "directions": vmap(forward, in_dims=(None, 0))(x[0], tangents[0]),
            "lanes and directions": vmap(vmap(forward, in_dims=(None, 0)))(x, tangents),
            "transpose": vmap(backward)(x, cotangents),
            "a derivative of the product": vmap(backward_over_forward)(x, tangents[:, 0]),
        }

    plain = run()
    with LaneLayers():
        lane = run()
    torch.testing.assert_close(lane, plain, rtol=1e-10, atol=1e-12)


def test_the_jacobian_by_the_weights_is_that_of_torch() -> None:
    """Here the weights have a tangent and the image has none."""
    x, weight = torch.randn(2, 2, 5, 5, dtype=torch.float64), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    run = lambda: jacfwd(lambda w: F.conv2d(x, w, padding=1).sigmoid().sum((2, 3)))(weight)  # noqa: E731
    plain = run()
    with LaneLayers():
        torch.testing.assert_close(run(), plain)


def test_fold_is_the_transpose_of_patches() -> None:
    window = Window(7, 6, (3, 2), (2, 1), (1, 0))
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    columns = torch.randn_like(Patches.apply(x, window))
    left, right = (Patches.apply(x, window) * columns).sum(), (x * Fold.apply(columns, window)).sum()
    torch.testing.assert_close(left, right)
    for function, at in ((Patches, x), (Fold, columns)):  # linear: the derivative is the function
        _, along = jvp(lambda a, function=function: function.apply(a, window), (at,), (at,))
        torch.testing.assert_close(along, function.apply(at, window))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, (3, 1), stride=(2, 1), padding=(1, 0)),
        nn.BatchNorm2d(4).eval(),
        nn.BatchNorm2d(4, affine=False).eval(),
        nn.BatchNorm2d(4).train(),
        nn.BatchNorm2d(4, track_running_stats=False),
    ],
    ids=str,
)
def test_every_kind_of_layer_keeps_its_output(layer: nn.Module) -> None:
    layer = layer.double()
    for name, buffer in layer.named_buffers():
        if name.startswith("running"):
            buffer.uniform_(0.5, 1.5)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    plain = layer(x)
    layer.load_state_dict(state)
    with LaneLayers():
        torch.testing.assert_close(layer(x), plain)


def test_a_call_with_keywords_and_without_bias_is_caught_too() -> None:
    x, weight = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    plain = F.conv2d(x, weight, padding=1)
    with LaneLayers():
        torch.testing.assert_close(F.conv2d(input=x, weight=weight, padding=(1, 1)), plain)
        torch.testing.assert_close(F.conv2d(x, weight, padding=1), plain)


def test_only_what_is_asked_for_is_convolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching by fixed weights needs no derivative by them the second time: five maps, not seven."""
    calls: list[str] = []

    def counted(name: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(a: Tensor, b: Tensor, window: Window) -> Tensor:
            calls.append(name)
            return plain(a, b, window)

        return run

    for kind in (convolution.Convolved, convolution.Spread, convolution.Correlated):
        monkeypatch.setattr(kind, "forward", staticmethod(counted(kind.__name__, kind.forward)))
    x, weight = torch.randn(2, 2, 5, 5), torch.randn(3, 2, 3, 3)
    with LaneLayers():
        grad(lambda x: matching(x, weight, torch.zeros(3), torch.zeros_like(weight), 1, 1))(x)
    assert sorted(calls) == ["Convolved", "Convolved", "Correlated", "Spread", "Spread"]
