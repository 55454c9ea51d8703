"""Client optimisers against torch.optim, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.scenario import rules
from gradleak.scenario.rules import SGD, Adam, Lion, cosine_decay

STEPS = 5
Rules = [
    (SGD(), torch.optim.SGD, {}),
    (SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    (SGD(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD(momentum=0.8, dampening=0.3), torch.optim.SGD, {"momentum": 0.8, "dampening": 0.3}),
    (SGD(weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    (
        SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    (Adam(), torch.optim.Adam, {}),
    (
        Adam(betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1),
        torch.optim.Adam,
        {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    ),
    (Adam(weight_decay=0.1, decoupled=True), torch.optim.AdamW, {"weight_decay": 0.1}),
]


def objective(weights: dict[str, Tensor]) -> Tensor:
    """Curved in every direction, and different for every weight."""
    return (weights["w"] ** 4).sum() + (weights["w"][0] * weights["b"]).sum() + (weights["b"] - 2).square().sum()


def start(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"w": torch.tensor([[1.0, -0.5], [0.3, 2.0]], dtype=dtype), "b": torch.tensor([0.7, -1.2], dtype=dtype)}


def by_torch(
    make: Callable[..., torch.optim.Optimizer], settings: dict[str, Any], lr: float, dtype: torch.dtype
) -> Any:
    weights = {name: value.requires_grad_() for name, value in start(dtype).items()}
    optimiser = make(list(weights.values()), lr=lr, **settings)
    for _ in range(STEPS):
        optimiser.zero_grad()
        objective(weights).backward()
        optimiser.step()
    return tree.detach(weights)


def by_rule(rule: rules.Rule, lr: float | Tensor, dtype: torch.dtype) -> Any:
    weights = start(dtype)
    state = rule.init(weights)
    for _ in range(STEPS):
        gradient = torch.func.grad(objective)(weights)
        decrease, state = rule.step(weights, gradient, state, lr)
        weights = tree.subtract(weights, decrease)
    return weights


@pytest.mark.parametrize(
    ("rule", "make", "settings"), Rules, ids=lambda value: repr(value) if hasattr(value, "init") else ""
)
def test_a_rule_takes_the_steps_of_torch(rule: rules.Rule, make: Any, settings: dict[str, Any]) -> None:
    ours, theirs = by_rule(rule, 0.05, torch.float64), by_torch(make, settings, 0.05, torch.float64)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("rule", [Adam(), Adam(weight_decay=0.1, decoupled=True)])
def test_adam_keeps_its_digits_in_float32(rule: Adam) -> None:
    """1 - 0.999 in float32 is wrong in the fifth digit, which a replay of a real client would show."""
    make = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    settings = {"weight_decay": rule.weight_decay}
    ours, theirs = by_rule(rule, 0.05, torch.float32), by_torch(make, settings, 0.05, torch.float32)
    assert ours["w"].dtype == torch.float32
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_lion_by_hand() -> None:
    weights, rule = {"w": torch.tensor([2.0, -1.0])}, Lion(betas=(0.9, 0.99), weight_decay=0.1)
    first, state = rule.step(weights, {"w": torch.tensor([0.5, -3.0])}, rule.init(weights), 0.01)
    # sign(0.9 * 0 + 0.1 * g) = (1, -1), plus 0.1 * w
    torch.testing.assert_close(first["w"], 0.01 * torch.tensor([1 + 0.2, -1 - 0.1]))
    torch.testing.assert_close(state["momentum"]["w"], 0.01 * torch.tensor([0.5, -3.0]))
    # The second gradient is against the momentum, and weaker: 0.9 * 0.005 - 0.1 * 0.04 > 0
    second, _ = rule.step(weights, {"w": torch.tensor([-0.04, 3.0])}, state, 0.01)
    torch.testing.assert_close(second["w"], 0.01 * torch.tensor([1 + 0.2, 1 - 0.1]))


def test_a_rule_never_writes_into_its_arguments() -> None:
    weights = start(torch.float64)
    gradient = torch.func.grad(objective)(weights)
    for rule, _, _ in Rules:
        held = tree.detach({"weights": weights, "gradient": gradient})
        state = rule.init(weights)
        rule.step(weights, gradient, state, 0.1)
        rule.step(weights, gradient, state, 0.1)
        assert tree.norm(tree.subtract({"weights": weights, "gradient": gradient}, held)) == 0


@pytest.mark.parametrize("rule", [SGD(momentum=0.9, nesterov=True), Adam(), Lion()], ids=repr)
def test_the_learning_rate_may_be_a_tensor(rule: rules.Rule) -> None:
    ours = by_rule(rule, torch.tensor(0.05, dtype=torch.float64), torch.float64)
    torch.testing.assert_close(ours, by_rule(rule, 0.05, torch.float64))


def test_adam_is_differentiable_where_a_gradient_is_exactly_zero() -> None:
    def moved(g: Tensor) -> Tensor:
        rule = Adam()
        decrease, _ = rule.step({"w": g}, {"w": g}, rule.init({"w": g}), 1.0)
        return decrease["w"].sum()

    assert torch.func.grad(moved)(torch.tensor([0.0, 1.0], dtype=torch.float64)).isfinite().all()


def test_cosine_decay_falls_from_one_to_zero() -> None:
    assert cosine_decay(0, 8) == 1
    assert cosine_decay(4, 8) == pytest.approx(0.5)
    assert cosine_decay(8, 8) == pytest.approx(0)


@pytest.mark.parametrize(
    "rule", [SGD(), SGD(momentum=0.9), SGD(momentum=0.9, dampening=0.3), SGD(momentum=0.8, nesterov=True)]
)
def test_the_gain_of_a_step_is_what_one_unit_of_gradient_comes_to(rule: SGD) -> None:
    rates, zero = [0.5, 0.2, 0.7, 0.1], {"w": torch.zeros((), dtype=torch.float64)}
    gradients = {number: {"w": torch.tensor(float(number), dtype=torch.float64)} for number in (0, 1)}

    def end(units: set[int]) -> float:
        state, moved = rule.init(zero), 0.0
        for step, rate in enumerate(rates):
            decrease, state = rule.step(zero, gradients[step in units], state, rate)
            moved += float(decrease["w"])
        return moved

    assert rule.gains(rates) == pytest.approx([end({step}) for step in range(4)])
    assert rule.way(rates) == pytest.approx(end({0, 1, 2, 3}))


@pytest.mark.parametrize("rule", [SGD(momentum=0.9), Adam(), Lion()])
def test_names_decide_which_state_belongs_to_which_gradient(rule: rules.Rule) -> None:
    weights = start(torch.float64)
    gradient = {name: value.square() + 1 for name, value in weights.items()}
    turned = dict(reversed(gradient.items()))
    assert list(turned) != list(weights)
    state, other = rule.init(weights), rule.init(weights)
    for _ in range(3):
        decrease, state = rule.step(weights, gradient, state, 0.1)
        moved, other = rule.step(weights, turned, other, 0.1)
        for name, value in decrease.items():
            assert torch.equal(value, moved[name])
        gradient, turned = tree.scale(gradient, -0.5), tree.scale(turned, -0.5)
