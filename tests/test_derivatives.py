"""Every layer in common use has the derivatives that attacks take, with torch's own values."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import gradleak as gl
from gradleak.core import tree
from gradleak.engine import Engine
from gradleak.engine.layers import LaneLayers
from gradleak.scenario.derivatives import WITHOUT, PlainForms, double_backward_safe
from gradleak.scenario.recurrence import RECURRENT_FORMS

Function = Callable[[Tensor], Tensor]
ROWS, MAPS, LOGITS = (2, 4, 3), (2, 4, 6, 6), (2, 5)


def draw(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Applied(nn.Module):
    """A function of a scaled and shifted input: weights in front of it make its second derivative count."""

    def __init__(self, function: Function, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.scale, self.shift = nn.Parameter(1 + 0.3 * draw(*shape, seed=1)), nn.Parameter(0.3 * draw(*shape, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale + self.shift)


def upload_of(model: nn.Module) -> Callable[[Tensor], tree.Params]:
    """The gradient of a generic loss with respect to the weights, as a function of the input."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    weights = {name: state.pop(name) for name, _ in model.named_parameters()}

    def loss(weights: tree.Params, x: Tensor) -> Tensor:
        output = functional_call(model, {**state, **weights}, (x,))
        ramp = torch.arange(1.0, output.numel() + 1, dtype=output.dtype).reshape(output.shape)
        return (output.sin() * ramp).sum()

    return lambda x: grad(loss)(weights, x)


def demand_derivatives(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Backward over backward, alone and in lanes, and forward over backward, against differences of the gradient."""
    x, along, step = draw(2, *shape, seed=3), draw(*shape, seed=4), 1e-6
    upload = upload_of(model.double())
    match: Function = lambda x: tree.squared_norm(upload(x))  # noqa: E731
    with double_backward_safe():
        lanes = vmap(grad(match))(x)
        tangents: Tensor = vmap(lambda x: tree.flatten(jvp(upload, (x,), (along,))[1]))(x)
        for at, second, tangent in zip(x, lanes, tangents, strict=True):
            torch.testing.assert_close(grad(match)(at), second, rtol=1e-9, atol=1e-9)
            above, below = at + step * along, at - step * along
            demand_close((second * along).sum(), (match(above) - match(below)) / (2 * step))
            demand_close(tangent, (tree.flatten(upload(above)) - tree.flatten(upload(below))) / (2 * step))


def demand_close(value: Tensor, difference: Tensor) -> None:
    size = 1 + float(difference.abs().max())
    torch.testing.assert_close(value / size, difference / size, rtol=1e-5, atol=1e-5)


# --- functions --------------------------------------------------------------------------------------------------------

LABELS, PIXELS = torch.tensor([1, 3]), torch.arange(18).reshape(2, 3, 3) % 5
WEIGHT = torch.tensor([0.2, 0.9, 0.4, 0.7, 0.5], dtype=torch.float64)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
SEVERAL = torch.tensor([[1, 3, -1, 0, 0], [0, -1, 1, 1, 1]])

# Torch lacks a derivative of these: each as torch's own call, and the shape of its input.
REPLACED: dict[str, tuple[Function, tuple[int, ...]]] = {
    "hardsigmoid": (lambda x: F.hardsigmoid(4 * x), ROWS),
    "hardsigmoid in place": (lambda x: F.hardsigmoid(4 * x, inplace=True), ROWS),
    "rrelu": (F.rrelu, ROWS),
    "rrelu in place": (lambda x: F.rrelu(1 * x, 0.1, 0.3, inplace=True), ROWS),
    "cdist": (lambda x: torch.cdist(x, 2 * x + 1), ROWS),
    "cdist, p = 1": (lambda x: torch.cdist(x, 2 * x + 1, 1.0), ROWS),
    "pdist": (F.pdist, (4, 3)),
    "mse": (lambda x: F.mse_loss(x, WEIGHT.expand(2, 5)), LOGITS),
    "mse, sum": (lambda x: F.mse_loss(x, WEIGHT.expand(2, 5), reduction="sum"), LOGITS),
    "huber": (lambda x: F.huber_loss(x, WEIGHT.expand(2, 5)), LOGITS),
    "huber, delta": (lambda x: F.huber_loss(3 * x, WEIGHT.expand(2, 5), delta=0.5, reduction="sum"), LOGITS),
    "huber, weights": (lambda x: F.huber_loss(x, torch.zeros_like(x), "none", 0.7, WEIGHT.expand(2, 5)), LOGITS),
    "soft margin": (lambda x: F.soft_margin_loss(x, SIGNS.expand(2, 5)), LOGITS),
    "soft margin, old words": (lambda x: F.soft_margin_loss(x, SIGNS.expand(2, 5), size_average=False), LOGITS),
    "multi margin": (lambda x: F.multi_margin_loss(x, LABELS), LOGITS),
    "multi margin, squared": (lambda x: F.multi_margin_loss(x, LABELS, p=2, margin=0.7, weight=WEIGHT), LOGITS),
    "multilabel margin": (lambda x: F.multilabel_margin_loss(x, SEVERAL), LOGITS),
    "multilabel margin, none": (lambda x: F.multilabel_margin_loss(x, SEVERAL, reduction="none"), LOGITS),
    **{
        f"weighted and smoothed cross entropy, {reduction}": (
            lambda x, reduction=reduction: F.cross_entropy(x, LABELS, WEIGHT, reduction=reduction, label_smoothing=0.1),
            LOGITS,
        )
        for reduction in ("mean", "sum", "none")
    },
    "weighted and smoothed cross entropy, old words": (
        lambda x: F.cross_entropy(x, LABELS, WEIGHT, size_average=False, label_smoothing=0.1),
        LOGITS,
    ),
    "weighted and smoothed cross entropy of one": (
        lambda x: F.cross_entropy(x, LABELS[0], WEIGHT, label_smoothing=0.1),
        (5,),
    ),
    "weighted and smoothed cross entropy of pixels": (
        lambda x: F.cross_entropy(x, PIXELS, WEIGHT, ignore_index=2, label_smoothing=0.1),
        (2, 5, 3, 3),
    ),
}

# Torch has every derivative of these: they stay as they are.
NATIVE: dict[str, tuple[Function, tuple[int, ...]]] = {
    **{
        name: (getattr(F, name), ROWS)
        for name in (
            *("relu", "relu6", "hardtanh", "hardswish", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish"),
            *("softplus", "softsign", "logsigmoid", "tanhshrink", "hardshrink", "softshrink", "sigmoid", "tanh"),
        )
    },
    **{
        f"{name} in place": (lambda x, name=name: getattr(F, name)(1 * x, inplace=True), ROWS)
        for name in ("relu", "relu6", "hardtanh", "hardswish", "leaky_relu", "elu", "selu", "celu", "silu", "mish")
    },
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), ROWS),
    "threshold": (lambda x: F.threshold(x, 0.1, 0.2), ROWS),
    "prelu": (lambda x: F.prelu(x, WEIGHT[:4]), ROWS),
    "glu": (lambda x: F.glu(x, 1), ROWS),
    "softmax": (lambda x: F.softmax(x, 1), ROWS),
    "log_softmax": (lambda x: F.log_softmax(x, 1), ROWS),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), MAPS),
    "group_norm": (lambda x: F.group_norm(x, 2), MAPS),
    "instance_norm": (F.instance_norm, MAPS),
    "rms_norm": (lambda x: F.rms_norm(x, (6,)), MAPS),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), MAPS),
    "batch_norm by averages": (lambda x: F.batch_norm(x, WEIGHT[:4], WEIGHT[1:]), MAPS),
    "dropout, off": (lambda x: F.dropout(x, 0.5, training=False), MAPS),
    "attention": (lambda x: F.scaled_dot_product_attention(x, 2 * x, 3 * x), MAPS),
    "causal attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), MAPS),
    "conv1d": (lambda x: F.conv1d(x, 2 * x[:, :, :3]), (2, 4, 6)),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(x, x.transpose(0, 1)[:, :, :2, :2], stride=2), MAPS),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 4), (2, 4, 6)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 4), MAPS),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 4), MAPS),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (2, 4, 6)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), MAPS),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (2, 4, 6)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), MAPS),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), MAPS),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), MAPS),
    "roll": (lambda x: x.roll((1, 2), (2, 3)), MAPS),
    **{
        f"interpolate {mode}": (lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode), MAPS)
        for mode in ("nearest", "bilinear", "bicubic", "area")
    },
    **{
        f"pad {mode}": (lambda x, mode=mode: F.pad(x, (1, 1, 1, 1), mode=mode), MAPS)
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "l1": (lambda x: F.l1_loss(x, WEIGHT.expand(2, 5)), LOGITS),
    "smooth_l1": (lambda x: F.smooth_l1_loss(3 * x, WEIGHT.expand(2, 5)), LOGITS),
    "bce": (lambda x: F.binary_cross_entropy_with_logits(x, WEIGHT.expand(2, 5), WEIGHT, pos_weight=WEIGHT), LOGITS),
    "nll": (lambda x: F.nll_loss(F.log_softmax(x, 1), LABELS, WEIGHT), LOGITS),
    "cross entropy": (lambda x: F.cross_entropy(x, LABELS), LOGITS),
    "cross entropy, weights": (lambda x: F.cross_entropy(x, LABELS, WEIGHT), LOGITS),
    "cross entropy, smoothed": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), LOGITS),
    "cross entropy, ignored": (lambda x: F.cross_entropy(x, LABELS, ignore_index=1), LOGITS),
    "cross entropy of pixels": (lambda x: F.cross_entropy(x, PIXELS, WEIGHT, ignore_index=2), (2, 5, 3, 3)),
}


@pytest.mark.parametrize("name", [*REPLACED, *NATIVE])
def test_every_function_has_the_derivatives_that_attacks_take(name: str) -> None:
    function, shape = {**REPLACED, **NATIVE}[name]
    demand_derivatives(Applied(function, shape), shape)


@pytest.mark.parametrize("name", REPLACED)
def test_a_formula_has_the_value_and_the_first_derivative_of_torch(name: str) -> None:
    function, shape = REPLACED[name]
    x = draw(*shape, seed=5)
    run = lambda: (function(x), grad(lambda x: function(x).sin().sum())(x))  # noqa: E731
    expected = run()
    # Torch's slope of hardsigmoid is 1/6 as float32 rounds it, in float64 too.
    tolerance = 1e-7 if "hardsigmoid" in name else 1e-12
    with PlainForms():
        torch.testing.assert_close(run(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("settings", [{"weight": WEIGHT}, {"label_smoothing": 0.1}, {"ignore_index": 3}])
def test_lanes_have_labels_of_their_own(settings: dict[str, Any]) -> None:
    """Attacks that read labels give every lane others."""
    loss = lambda x, y: F.cross_entropy(x, y, **{"weight": WEIGHT, "label_smoothing": 0.2, **settings})  # noqa: E731
    x, y = draw(3, *LOGITS), torch.tensor([[1, 3], [0, 4], [2, 2]])
    with double_backward_safe():
        together = vmap(grad(loss))(x, y)
    for each, labels, lane in zip(x, y, together, strict=True):
        torch.testing.assert_close(lane, grad(loss)(each, labels), rtol=1e-12, atol=1e-12)


def test_every_formula_is_tested() -> None:
    called: set[str] = set()

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.__name__)
            return func(*args, **(kwargs or {}))

    with Names():
        for function, shape in REPLACED.values():
            function(draw(*shape))
    assert {function.__name__ for forms in WITHOUT.values() for function in forms} <= called


@pytest.mark.parametrize("name", NATIVE)
def test_other_functions_stay_as_they_are(name: str) -> None:
    function, shape = NATIVE[name]
    x = draw(*shape, seed=5)
    expected = function(x)
    with PlainForms():
        assert torch.equal(function(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hardsigmoid_is_exact_at_its_kinks(dtype: torch.dtype) -> None:
    middle = torch.tensor([-3.0, 3.0], dtype=dtype)
    x = torch.stack([middle, middle.nextafter(torch.zeros(())), middle.nextafter(2 * middle)]).flatten()
    slope = grad(lambda x: F.hardsigmoid(x).sum())
    expected = F.hardsigmoid(x), slope(x)
    with PlainForms():
        assert torch.equal(F.hardsigmoid(x), expected[0])
        torch.testing.assert_close(slope(x), expected[1], rtol=1e-7, atol=0)


def test_in_place_means_in_place() -> None:
    x = draw(5)
    expected = F.hardsigmoid(x)
    with PlainForms():
        result = F.hardsigmoid(x, inplace=True)
    assert result is x
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_errors_keep_every_bit(dtype: torch.dtype) -> None:
    x, target, weight = draw(4, 5).to(dtype), draw(4, 5, seed=1).to(dtype), draw(5, seed=2).to(dtype)
    upload: Function = lambda x: grad(lambda w: 0.7 * F.mse_loss((x * w).tanh(), target))(weight)  # noqa: E731
    run = lambda: (upload(x), grad(lambda x: upload(x).square().sum())(x))  # noqa: E731
    expected = run()
    with PlainForms():
        assert all(map(torch.equal, run(), expected))


# --- recurrent layers -------------------------------------------------------------------------------------------------


class First(nn.Module):
    """The outputs of a recurrent layer, and its last state behind them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs, last = self.layer(x)
        states = (last,) if isinstance(last, Tensor) else last
        return torch.cat([outputs.flatten(), *(state.flatten() for state in states)])


class Unrolled(nn.Module):
    """A cell, applied to each moment."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        return torch.cat(state, -1) if isinstance(state, tuple) else state


KINDS: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu rnn": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "both directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "everything": {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
}
RECURRENT: dict[str, Callable[[], nn.Module]] = {
    **{
        f"{kind}, {variant}": lambda make=make, options=options: First(make(4, 5, **options))
        for kind, make in KINDS.items()
        for variant, options in VARIANTS.items()
    },
    "lstm, projected": lambda: First(nn.LSTM(4, 5, num_layers=2, bidirectional=True, proj_size=3)),
    "lstm, projected without bias": lambda: First(nn.LSTM(4, 5, bias=False, proj_size=3)),
    "lstm cell": lambda: Unrolled(nn.LSTMCell(4, 5)),
    "gru cell": lambda: Unrolled(nn.GRUCell(4, 5)),
    "rnn cell": lambda: Unrolled(nn.RNNCell(4, 5, bias=False)),
    "relu rnn cell": lambda: Unrolled(nn.RNNCell(4, 5, nonlinearity="relu")),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_has_the_values_and_gradients_of_torch(name: str) -> None:
    model, x = RECURRENT[name]().double(), draw(2, 3, 4)
    upload = upload_of(model)
    expected = model(x), upload(x), grad(lambda x: model(x).sin().sum())(x)
    with PlainForms():
        found = model(x), upload(x), grad(lambda x: model(x).sin().sum())(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_has_the_derivatives_that_attacks_take(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        demand_derivatives(RECURRENT[name](), (2, 3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_state_and_a_lone_sequence_are_those_of_torch(kind: str) -> None:
    layer, x, state = KINDS[kind](4, 5).double(), draw(3, 4), draw(1, 5, seed=1)
    given = (state, 2 * state) if kind == "lstm" else state
    expected = layer(x, given)
    with PlainForms():
        torch.testing.assert_close(layer(x, given), expected, rtol=1e-12, atol=1e-12)


def test_weights_of_torch_func_are_not_moved_into_one_block() -> None:
    """As nn.RNNBase.flatten_parameters asks with cuDNN."""
    addresses: list[int] = []
    with PlainForms():
        grad(lambda x: addresses.append(x.data_ptr()) or x.sum())(draw(3))
    assert addresses == [0]
    x = draw(3)
    with PlainForms():
        assert x.data_ptr() != 0


def test_packed_sequences_are_refused() -> None:
    layer = nn.GRU(4, 5).double()
    packed = nn.utils.rnn.pack_padded_sequence(draw(3, 2, 4), torch.tensor([3, 2]))
    with PlainForms(), pytest.raises(NotImplementedError, match="Packed sequences are unsupported.*padded tensor"):
        layer(packed)


# --- whole blocks -----------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int, inner: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)
        self.inner, self.gate = inner, gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(self.inner(self.down(x.mean((2, 3), keepdim=True)))))


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.scale = nn.LayerNorm(channels), nn.Parameter(torch.full((channels,), 0.5))
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


class SwinBlock(nn.Module):
    """Attention in shifted windows of 2 x 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(channels),
            nn.Linear(channels, 3 * channels),
            nn.Linear(channels, 4),
        )
        self.bias = nn.Parameter(torch.zeros(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = self.norm(x.permute(0, 2, 3, 1)).roll((-1, -1), (1, 2))
        windows = y.reshape(n, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
        q, k, v = self.qkv(windows).reshape(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        mixed = self.out(F.scaled_dot_product_attention(q, k, v, self.bias).transpose(1, 2).reshape(-1, 4, c))
        y = mixed.reshape(n, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(n, h, w, c)
        return x + y.roll((1, 1), (1, 2)).permute(0, 3, 1, 2)


def depthwise(channels: int, activation: nn.Module, gated: nn.Module) -> nn.Module:
    """The inverted bottleneck of MobileNetV3 and EfficientNet."""
    wide = 2 * channels
    return nn.Sequential(
        *(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), activation),
        *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), activation),
        *(gated, nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)),
    ).eval()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "MobileNetV3": lambda: depthwise(
        4, nn.Hardswish(inplace=True), Gated(8, nn.ReLU(inplace=True), nn.Hardsigmoid(inplace=True))
    ),
    "EfficientNet": lambda: depthwise(4, nn.SiLU(inplace=True), Gated(8, nn.SiLU(inplace=True), nn.Sigmoid())),
    "MobileNetV2": lambda: depthwise(4, nn.ReLU6(inplace=True), nn.Identity()),
    "ConvNeXt": lambda: ConvNeXtBlock(4),
    "Swin": lambda: SwinBlock(4),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_modern_networks_have_the_derivatives_that_attacks_take(name: str) -> None:
    demand_derivatives(BLOCKS[name](), (1, 4, 4, 4))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_layers_of_a_gpu_give_the_same_second_derivative(name: str) -> None:
    upload, x = upload_of(BLOCKS[name]().double()), draw(2, 1, 4, 4, 4)
    second = vmap(grad(lambda x: tree.squared_norm(upload(x))))
    with double_backward_safe():
        expected = second(x)
        with LaneLayers():
            torch.testing.assert_close(second(x), expected, rtol=1e-8, atol=1e-8)


# --- audits -----------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A classifier of sequences."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.squeeze(1))[0][:, -1])


def task_of(model: nn.Module) -> gl.Task:
    like = (torch.zeros(1, 1, 4, 4), torch.zeros(1).long())
    return gl.Task.supervised(model, F.cross_entropy, like=like)


@pytest.mark.parametrize("kind", KINDS)
def test_attacks_and_private_clients_take_recurrent_layers(kind: str, double: Engine) -> None:
    task = task_of(Reader(KINDS[kind](4, 5, batch_first=True)).double())
    batch = {"x": draw(2, 1, 4, 4).sigmoid(), "y": torch.tensor([0, 2])}
    defence = gl.defences.get("dp-sgd", clip=1.0, noise_multiplier=1e-6)
    for client in (None, defence):  # dp-sgd takes the gradient of every example under vmap
        seen = gl.observe(task, batch, gl.LocalTraining(lr=0.1), client)
        found = gl.attacks.get("ig", steps=2).run(task, seen, engine=double)
        assert found.match.isfinite().all()


@pytest.mark.parametrize("name", ["lstm", "gru", "hardsigmoid", "mse"])
def test_the_check_names_the_layer_and_what_is_done(name: str) -> None:
    gated = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Hardsigmoid(), nn.Linear(5, 3))
    tasks = {
        "lstm": lambda: task_of(Reader(nn.LSTM(4, 5, batch_first=True))),
        "gru": lambda: task_of(Reader(nn.GRU(4, 5, batch_first=True))),
        "hardsigmoid": lambda: task_of(gated),
        "mse": lambda: gl.Task(
            gated, lambda call, batch: F.mse_loss(call(batch["x"]), torch.ones(2, 3)), {"x": gl.Field((1, 4, 4))}
        ),
    }
    expected = {
        "lstm": r"recurrent layers \(layer \(LSTM\)\).*plain form, step by step: slower on CUDA",
        "gru": r"recurrent layers \(layer \(GRU\)\).*plain form",
        "hardsigmoid": r"hardsigmoid in 2 \(Hardsigmoid\): torch has no second derivative of it.*exact formula",
        "mse": "mse_loss: torch has no forward-mode derivative of it.*exact formula",
    }
    problems = tasks[name]().check()
    assert [p.severity for p in problems if re.search(expected[name], p.what)] == ["note"]
    assert not [p for p in problems if p.severity == "error"]


def test_the_check_sees_dropout_between_recurrent_layers() -> None:
    task = task_of(Reader(nn.GRU(4, 5, num_layers=2, dropout=0.5, batch_first=True)))
    assert [p for p in task.check() if p.severity == "error" and "dropout is active (layer (GRU))" in p.what]
    task.model.eval()
    assert not [p for p in task.check() if p.severity == "error"]


def test_every_recurrent_function_of_torch_has_a_form() -> None:
    names = {function.__name__ for function in RECURRENT_FORMS}
    assert names == {f"{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")}
