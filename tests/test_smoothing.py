"""A smoothed view tends to the network it stands for, has the derivatives it claims, and leaves the model alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import gradleak as gl
from conftest import scene_of
from gradleak import models
from gradleak.attacks.second_order.smoothing import SmoothActivations, Smoothed, SmoothObjective, kinked
from gradleak.core import tree
from gradleak.engine.layers import LaneLayers
from gradleak.scenario.task import Batch


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def effect(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What a call in place leaves behind, where the caller drops the result."""

    def run(x: Tensor) -> Tensor:
        x = x.clone()
        function(x)
        return x

    return run


LEAKY, PRELU = nn.LeakyReLU(0.2), nn.PReLU(3).double()
with torch.no_grad():
    PRELU.weight.copy_(torch.tensor([0.1, 0.3, -0.5]))

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    # the call, and the largest error in units of log(2) / beta
    "nn.ReLU": (nn.ReLU(), 1),
    "nn.ReLU in place": (lambda x: nn.ReLU(inplace=True)(x.clone()), 1),
    "nn.ReLU for its effect": (effect(nn.ReLU(inplace=True)), 1),
    "F.relu": (F.relu, 1),
    "F.relu in place by position": (effect(lambda x: F.relu(x, True)), 1),
    "F.relu_": (effect(F.relu_), 1),
    "torch.relu": (torch.relu, 1),
    "torch.relu_": (effect(torch.relu_), 1),
    "Tensor.relu": (lambda x: x.relu(), 1),
    "Tensor.relu_": (effect(lambda x: x.relu_()), 1),
    "torch.clamp": (lambda x: torch.clamp(x, min=0), 1),
    "Tensor.clamp by position": (lambda x: x.clamp(0), 1),
    "Tensor.clip": (lambda x: x.clip(min=0.0), 1),
    "Tensor.clamp_min_": (effect(lambda x: x.clamp_min_(0)), 1),
    "nn.LeakyReLU": (LEAKY, 0.8),
    "nn.LeakyReLU in place": (effect(nn.LeakyReLU(0.2, inplace=True)), 0.8),
    "F.leaky_relu": (F.leaky_relu, 1),
    "F.leaky_relu_": (effect(lambda x: F.leaky_relu_(x, 0.2)), 0.8),
    "nn.PReLU": (PRELU, 1.5),
    "nn.ReLU6": (nn.ReLU6(), 1),
    "F.relu6": (F.relu6, 1),
    "nn.Hardtanh": (nn.Hardtanh(-0.5, 2.0), 1),
    "F.hardtanh_": (effect(F.hardtanh_), 1),
    "nn.Hardsigmoid": (nn.Hardsigmoid(), 1 / 6),
    "nn.Hardswish": (nn.Hardswish(), 1 / 2),
}
POOLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    # the call, and the entries of its largest window
    "nn.MaxPool2d": (nn.MaxPool2d(2), 4),
    "kernel 3": (nn.MaxPool2d(3), 9),
    "overlapping": (nn.MaxPool2d(3, stride=2), 9),
    "padded": (nn.MaxPool2d(3, stride=2, padding=1), 9),
    "padded blocks": (nn.MaxPool2d(3, padding=1), 9),
    "ceil": (nn.MaxPool2d(2, ceil_mode=True), 4),
    "ceil, a window too many": (nn.MaxPool2d(2, stride=3, padding=1, ceil_mode=True), 4),
    "ceil and padded": (nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), 9),
    "wide padding": (nn.MaxPool2d(5, stride=1, padding=2), 25),
    "dilated": (nn.MaxPool2d(2, stride=1, dilation=3), 4),
    "dilated, all at once": (nn.MaxPool2d((3, 2), (1, 2), (1, 0), (2, 3), ceil_mode=True), 6),
    "gaps": (nn.MaxPool2d(2, stride=3), 4),
    "F.max_pool2d": (lambda x: F.max_pool2d(x, 2, padding=1), 4),
    "torch.max_pool2d": (lambda x: torch.max_pool2d(x, 3, stride=2), 9),
    "no batch axis": (lambda x: F.max_pool2d(x[0], 2), 4),
    "nn.MaxPool1d": (lambda x: nn.MaxPool1d(3, stride=2, padding=1)(x[0]), 3),
    "nn.MaxPool3d": (lambda x: nn.MaxPool3d(2, stride=(1, 2, 3))(x[None]), 8),
    "nn.AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d(1), 110),
    "adaptive, uneven": (nn.AdaptiveMaxPool2d((4, None)), 4),
    "nn.AdaptiveMaxPool1d": (lambda x: nn.AdaptiveMaxPool1d(5)(x[0]), 2),
}


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_within_its_bound_and_tends_to_the_exact_one(name: str) -> None:
    call, share = ACTIVATIONS[name]
    x = torch.linspace(-8, 8, 1025, dtype=torch.float64).repeat(1, 3, 1)  # in steps of 1/64: the kinks are among them
    exact = call(x)
    for beta in (2.0, 16.0, 1024.0):
        with SmoothActivations(beta):
            off = (call(x) - exact).abs().max().item()
        assert 0.9 * share * math.log(2) / beta < off <= share * math.log(2) / beta + 1e-12


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_is_within_its_bound_and_tends_to_the_exact_one(name: str) -> None:
    call, entries = POOLS[name]
    x = draw(2, 3, 11, 10)
    exact = call(x)
    for beta in (1.0, 16.0, 1024.0):
        with SmoothActivations(beta):
            low = exact - call(x)
        assert low.shape == exact.shape
        assert low.min() > -1e-12
        assert 0 < low.max() <= math.log(entries) / beta + 1e-12


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_keeps_a_constant_image_and_counts_no_padding(name: str) -> None:
    call, _ = POOLS[name]
    x = torch.full((2, 3, 11, 10), -3.0, dtype=torch.float64)
    with SmoothActivations(0.5):
        torch.testing.assert_close(call(x), call(x).new_full(call(x).shape, -3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_arguments_and_sharpness_stay_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([-1e3, -1.0, 0.0, 1e-3, 1.0, 1e3], dtype=dtype)
    for function in (F.relu, lambda x: F.max_pool1d(x[None], 2, padding=1)[0]):
        total = lambda x, function=function: function(x).sum()  # noqa: E731
        with SmoothActivations(1024.0):
            for value in (function(x), grad(total)(x), grad(lambda x: grad(total)(x).square().sum())(x)):  # noqa: B023
                assert value.isfinite().all()
    with SmoothActivations(1024.0):
        assert F.relu(x)[-1] == 1e3
        assert F.relu(x)[0] == 0
        assert grad(lambda x: F.relu(x).sum())(x)[-1] == 1


def test_softplus_has_no_seam_where_it_becomes_linear() -> None:
    seam = torch.tensor([40 - 1e-9, 40 + 1e-9], dtype=torch.float64) / 7
    with SmoothActivations(7.0):
        first, second = F.relu(seam) - seam, grad(lambda x: F.relu(x).sum())(seam)
    assert first.abs().max() <= 1e-15
    assert (second == 1).all()


def test_other_functions_are_left_alone() -> None:
    x, index = draw(2, 3, 4, 4), torch.tensor([-2, 0, 3])
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.sigmoid(x),
        lambda: F.gelu(x),
        lambda: F.avg_pool2d(x, 2),
        lambda: x.clamp(min=1e-3),  # guards a division
        lambda: x.clamp(0, 1),
        lambda: x.clamp(min=torch.zeros(())),
        lambda: index.clamp(min=0),
        lambda: F.relu(index),
        lambda: F.normalize(x),
    ]
    for call in calls:
        exact = call()
        with SmoothActivations(1.0):
            assert torch.equal(call(), exact)


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2, return_indices=True), nn.AdaptiveMaxPool2d(1, return_indices=True)])
def test_indices_are_refused_with_a_reason(layer: nn.Module) -> None:
    with SmoothActivations(1.0), pytest.raises(NotImplementedError, match="no indices"):
        layer(draw(1, 1, 4, 4))


@pytest.mark.parametrize("sharpness", [0.0, -1.0, math.inf, math.nan])
def test_a_sharpness_that_is_none_is_refused(sharpness: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Smoothed(sharpness)


# --- derivatives ----------------------------------------------------------------------------------------------------

CURVED = ("F.relu", "nn.ReLU for its effect", "nn.LeakyReLU", "nn.PReLU", "nn.Hardtanh", "nn.Hardswish")
POOLED = ("nn.MaxPool2d", "padded", "wide padding", "dilated, all at once", "adaptive, uneven")
DERIVED = {name: {**ACTIVATIONS, **POOLS}[name][0] for name in (*CURVED, *POOLED)}


@pytest.mark.parametrize("name", DERIVED)
def test_three_derivatives_are_those_of_finite_differences(name: str) -> None:
    call, x, along, step = DERIVED[name], draw(1, 3, 11, 10), draw(1, 3, 11, 10, seed=1), 1e-5

    def value(x: Tensor) -> Tensor:
        with SmoothActivations(4.0):
            return call(x).sin().sum()

    first = lambda x: (grad(value)(x) * along).sum()  # noqa: E731
    second = lambda x: (grad(first)(x) * along).sum()  # noqa: E731
    for function in (value, first, second):
        forward = jvp(function, (x,), (along,))[1]
        backward = (grad(function)(x) * along).sum()
        difference = (function(x + step * along) - function(x - step * along)) / (2 * step)
        torch.testing.assert_close(forward, backward, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(forward, difference, rtol=1e-5, atol=1e-5)


class Mixed(nn.Module):
    """Every way to meet a kink, in one small network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.pool, self.leaky = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1), nn.LeakyReLU(0.1)
        self.classifier = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.relu(x)  # for its effect
        x = self.leaky(self.second(self.pool(x)))
        return self.classifier(F.relu(F.max_pool2d(x, 2)).flatten(1))


def mixed(dtype: torch.dtype = torch.float64) -> gl.Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mixed().to(dtype)
    return gl.Task.supervised(model, F.cross_entropy, like=(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long)))


def smoothed(task: gl.Task, sharpness: float) -> gl.Task:
    return gl.Task(task.model, SmoothObjective(task.objective, sharpness), task.fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jvp_of_the_gradient_under_lanes_and_tangents_is_its_finite_difference(dtype: torch.dtype) -> None:
    task = smoothed(mixed(dtype), 8.0)
    weights, y = task.weights(), torch.tensor([0, 2])
    x, along = draw(3, 2, 1, 8, 8, dtype=dtype), draw(3, 4, 2, 1, 8, 8, seed=1, dtype=dtype)  # lanes, tangents

    def gradient(x: Tensor) -> Tensor:
        return torch.cat([value.flatten() for value in task.gradient(weights, {"x": x, "y": y}).values()])

    def products(x: Tensor, along: Tensor) -> Tensor:
        return vmap(lambda tangent: jvp(gradient, (x,), (tangent,))[1])(along)

    found = vmap(products)(x, along)
    step = 1e-5 if dtype == torch.float64 else 1e-2
    tolerance = 1e-7 if dtype == torch.float64 else 2e-2
    for lane in range(3):
        for tangent in range(4):
            ahead, behind = (gradient(x[lane] + sign * step * along[lane, tangent]) for sign in (1, -1))
            torch.testing.assert_close(
                found[lane, tangent], (ahead - behind) / (2 * step), rtol=tolerance, atol=tolerance
            )
    backward = vmap(grad(lambda x: gradient(x).square().sum()))(x)  # reverse over reverse, as a first-order attack has
    alone = torch.stack([grad(lambda x: gradient(x).square().sum())(each) for each in x])
    torch.testing.assert_close(backward, alone)


@pytest.mark.parametrize("name", DERIVED)
def test_a_captured_step_can_hold_it(name: str) -> None:
    """Traced with fake tensors, which have no values to read: no branch on one, and no tensor made of host numbers."""

    def value(x: Tensor) -> Tensor:
        with SmoothActivations(4.0):
            return DERIVED[name](x).square().sum()

    traced = make_fx(
        vmap(grad(lambda x: grad(value)(x).square().sum())), tracing_mode="fake", _allow_non_fake_inputs=True
    )(draw(2, 1, 3, 11, 10))
    assert not [node for node in traced.graph.nodes if "lift_fresh" in str(node.target)]


# --- with others ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("lanes", "smooth"), ("smooth", "lanes")])
def test_lane_convolutions_and_smoothing_both_act_in_either_order(order: tuple[str, str]) -> None:
    task, x, y = mixed(), draw(3, 2, 1, 8, 8), torch.tensor([0, 2])
    modes: dict[str, Callable[[], Any]] = {"lanes": LaneLayers, "smooth": lambda: SmoothActivations(8.0)}
    weights, layer = task.weights(), nn.Conv2d(1, 1, 3, bias=False).double()

    def under(*names: str) -> tuple[str, Tensor, Tensor]:
        """What computed a convolution, the network's output, and a second derivative in every lane."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(modes[name]())
            matching = grad(lambda x: tree.squared_norm(task.gradient(weights, {"x": x, "y": y})))
            return type(layer(x[0]).grad_fn).__name__, task.model(x[0]), vmap(matching)(x)

    convolution, output, derivative = under(*order)
    assert convolution == under("lanes")[0] != under()[0]
    assert (output - under()[1]).abs().max() > 1e-3
    torch.testing.assert_close(output, under("smooth")[1])
    torch.testing.assert_close(derivative, under("smooth")[2], rtol=1e-9, atol=1e-10)


def test_a_view_changes_the_objective_and_nothing_else() -> None:
    task = mixed()
    batch: Batch = {"x": draw(2, 1, 8, 8), "y": torch.tensor([0, 1])}
    scene = scene_of(task, gl.observe(task, batch, gl.LocalTraining(lr=1.0)))
    view = Smoothed(4.0)(scene)
    assert view.task.model is task.model
    assert view.weights is scene.weights
    assert view.task.classifier == task.classifier
    with SmoothActivations(4.0):
        expected = task.loss(scene.weights, batch)[0]
    assert view.task.loss(scene.weights, batch)[0] == expected != task.loss(scene.weights, batch)[0]
    features = view.task.inputs_of(["classifier"], scene.weights, batch)["classifier"]
    exact = task.inputs_of(["classifier"], scene.weights, batch)["classifier"]
    assert 1e-3 < (features - exact).abs().max() < 1
    moved = view.task.to("cpu", torch.float32)
    assert moved.loss(moved.weights(), {"x": batch["x"].float(), "y": batch["y"]})[0].item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_a_sharp_view_predicts_the_gradient_of_the_network() -> None:
    task = mixed()
    batch: Batch = {"x": draw(2, 1, 8, 8), "y": torch.tensor([0, 1])}
    exact = task.gradient(task.weights(), batch)
    off = [
        float(tree.norm(tree.subtract(smoothed(task, beta).gradient(task.weights(), batch), exact)))
        for beta in (4.0, 64.0, 1e3, 1e6)
    ]
    assert off == sorted(off, reverse=True)
    assert off[-1] < 1e-3


def test_the_users_model_is_untouched() -> None:
    task, x = mixed(), draw(2, 1, 8, 8)
    model = task.model
    before, state = model(x), copy.deepcopy(model.state_dict())
    smoothed(task, 2.0).gradient(task.weights(), {"x": x, "y": torch.tensor([0, 1])})
    kinked(task)
    with SmoothActivations(2.0):
        functional_call(model, task.weights(), (x,))
    assert torch.equal(model(x), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert type(model.relu) is nn.ReLU
    assert model.relu.inplace


# --- does a network have kinks? -------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.out = function, nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(x).flatten(1))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: models.lenet_zhu(activation="relu"), True),
        (lambda: models.lenet_zhu(activation="leaky_relu"), True),
        (lambda: models.convnet(width=4), True),
        (lambda: models.lenet5(), True),
        (lambda: models.lenet5(activation="tanh"), True),  # its pools
        (lambda: models.resnet18(), True),
        (lambda: Functional(F.relu), True),
        (lambda: Functional(lambda x: x.clamp(min=0)), True),
        (lambda: models.lenet_zhu(), False),
        (lambda: models.lenet_zhu(activation="gelu"), False),
        (lambda: models.lenet5(activation="tanh", pool="avg"), False),
        (lambda: Functional(lambda x: x.clamp(min=1e-6).log()), False),
    ],
)
def test_kinked_says_whether_there_is_anything_to_smooth(make: Callable[[], nn.Module], expected: bool) -> None:
    like = (torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))
    task = gl.Task.supervised(make(), F.cross_entropy, like=like)
    state = copy.deepcopy(task.model.state_dict())
    assert kinked(task) is expected
    assert all(torch.equal(value, state[name]) for name, value in task.model.state_dict().items())  # BatchNorm too


def test_kinked_sees_a_layer_that_has_a_fused_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    like = (torch.zeros(1, 5, 8), torch.zeros(1, dtype=torch.long))
    task = gl.Task.supervised(nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3)), F.cross_entropy, like=like)
    assert kinked(task)
