"""Rollouts that keep checkpoints and no graphs: the same numbers as autograd, in float64, and what they hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, grad_and_value, jacfwd, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import largest_difference, normal
from gradleak.core import tree
from gradleak.core.recompute import recomputed, rollout
from gradleak.core.tree import Params, Tree
from gradleak.scenario.derivatives import PlainForms

LANES, STEPS, BATCH = 3, 7, 5
EVERY = (1, 3, 7, 100)


def loss(weights: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(x @ weights["first"]) @ weights["second"], y)


def step(carry: Tree, own: Tree, common: Tree) -> tuple[Tree, Tree]:
    """SGD with momentum: the velocity appears with the first step."""
    gradient = grad(loss)(carry["weights"], own["x"], common["y"])
    velocity = tree.add(gradient, carry["velocity"], 0.9) if "velocity" in carry else gradient
    decrease = tree.scale(velocity, own["rate"])
    return {"weights": tree.subtract(carry["weights"], decrease), "velocity": velocity}, decrease


def problem() -> tuple[Tensor, Tensor, Params, Tensor]:
    source = torch.Generator().manual_seed(0)
    drawn = partial(torch.randn, generator=source, dtype=torch.float64)
    y = torch.randint(0, 3, (LANES, BATCH), generator=source)
    weights = {"first": drawn(4, 6), "second": drawn(6, 3)}
    return drawn(LANES, STEPS, BATCH, 4), y, weights, drawn(LANES, STEPS, BATCH, 4)


def scored(x: Tensor, y: Tensor, weights: Params, every: int) -> Tensor:
    each = [{"x": part, "rate": 0.3 / (1 + k)} for k, part in enumerate(x.unbind(0))]  # a tensor and a number
    end, moved = rollout(step, {"weights": weights}, each, {"y": y}, every=every)
    return tree.squared_norm(moved) + tree.flatten(end["weights"]).pow(3).sum()


@pytest.mark.parametrize("every", EVERY)
def test_values_and_gradients_are_those_of_the_plain_graph(every: int) -> None:
    x, y, weights, _ = problem()
    both = vmap(grad_and_value(scored, argnums=(0, 2)), (0, 0, None, None))
    (dx, dw), value = both(x, y, weights, every)
    (plain_dx, plain_dw), plain = both(x, y, weights, 0)
    assert plain_dx.abs().max() > 1e-3  # there is something to compare
    assert largest_difference(value, plain) < 1e-12
    assert largest_difference(dx, plain_dx) < 1e-12
    assert largest_difference(dw, plain_dw) < 1e-12


@pytest.mark.parametrize("every", [1, 3])
def test_every_order_of_transforms(every: int) -> None:
    x, y, weights, along = problem()
    of = lambda every: lambda x, y: scored(x, y, weights, every)  # noqa: E731
    slope = vmap(grad(of(0)))(x, y)

    # Lanes inside the derivative, and autograd proper.
    assert largest_difference(grad(lambda x: vmap(of(every))(x, y).sum())(x), slope) < 1e-12
    leaf = x.clone().requires_grad_()
    vmap(of(every))(leaf, y).sum().backward()
    assert leaf.grad is not None
    assert largest_difference(leaf.grad, slope) < 1e-12

    # Forward mode, dense and in one direction.
    assert largest_difference(jacfwd(of(every))(x[0], y[0]), slope[0]) < 1e-12
    forward = vmap(lambda x, y, t: jvp(lambda x: of(every)(x, y), (x,), (t,))[1])(x, y, along)
    assert largest_difference(forward, (slope * along).flatten(1).sum(1)) < 1e-12

    # Second derivatives: forward over reverse, reverse over reverse.
    def hessian_forward(every: int) -> Tensor:
        product = lambda x, y, t: jvp(lambda x: grad(of(every))(x, y), (x,), (t,))[1]  # noqa: E731
        result: Tensor = vmap(product)(x, y, along)
        return result

    plain = hessian_forward(0)
    assert largest_difference(hessian_forward(every), plain) < 1e-11
    twice = vmap(grad(lambda x, y, t: (grad(of(every))(x, y) * t).sum()))(x, y, along)
    assert largest_difference(twice, plain) < 1e-11


def test_what_a_step_hands_on_unchanged_and_what_has_no_derivative() -> None:
    def counted(carry: Tree, own: Tree, common: Tree) -> tuple[Tree, Tree]:
        moved = {"value": carry["value"] * own["x"], "kept": carry["kept"], "count": carry["count"] + 1, "name": "same"}
        return moved, {"value": moved["value"], "kept": carry["kept"]}

    def total(x: Tensor, every: int) -> tuple[Tensor, Tree]:
        start = {"value": x[0], "kept": x[1], "count": torch.zeros((), dtype=torch.long), "name": "first"}
        end, given = rollout(counted, start, [{"x": part} for part in x], every=every)
        return (given["value"] * given["kept"]).sum() + end["kept"].sum(), {"count": end["count"]}

    x = problem()[0][0].unsqueeze(1)  # (steps, 1, ...): one lane more would change nothing
    plain, told = grad(total, has_aux=True)(x, 0)
    for every in EVERY:
        found, again = grad(total, has_aux=True)(x, every)
        assert largest_difference(found, plain) < 1e-12
        assert int(again["count"]) == int(told["count"]) == STEPS
        leaf = x.clone().requires_grad_()
        total(leaf, every)[0].backward()
        assert leaf.grad is not None
        assert largest_difference(leaf.grad, plain) < 1e-12


@dataclass(frozen=True)
class Holder:
    held: Tree


class Weighing:
    """An object of a class of its own, which is called."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __call__(self, z: Tensor) -> Tensor:
        return (z * self.x).sum()


def test_tensors_that_a_derivative_could_not_reach_are_refused() -> None:
    x = problem()[0][0]

    def hidden(x: Tensor) -> Tensor:
        return recomputed(lambda z: (z * x).sum())(x)  # type: ignore[no-any-return]

    def deeper(x: Tensor) -> Tensor:
        holder = Holder({"inside": [x]})
        return recomputed(partial(lambda holder, z: (z * holder.held["inside"][0]).sum(), holder))(x)  # type: ignore[no-any-return]

    def beside(x: Tensor) -> Tensor:
        return recomputed(Weighing(x))(x)  # type: ignore[no-any-return]

    for function in (hidden, deeper, beside):
        for transformed in (grad(function), vmap(function), vmap(grad(function))):
            with pytest.raises(ValueError, match="pass it as an argument"):
                transformed(x)
        with pytest.raises(ValueError, match="pass it as an argument"):
            function(x.clone().requires_grad_())
    with pytest.raises(ValueError, match="x"):
        grad(lambda x: rollout(lambda c, o, _: (c, {"": x}), {"": x}, [{}])[1][""].sum())(x)
    constant = torch.full_like(x, 3.0)  # nobody's: allowed
    assert largest_difference(vmap(grad(lambda x: recomputed(lambda z: (z * 3).sum())(x)))(x), constant) == 0
    assert recomputed(lambda z: (z * constant).sum())(x) == (3 * x).sum()


def test_errors() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        rollout(step, {}, [])
    with pytest.raises(ValueError, match="given -1"):
        rollout(step, {}, [{}], every=-1)


# --- memory -----------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of all tensors that were made and not yet given back, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()  # the same object as long as the memory lives
                if id(storage) not in self.known:
                    self._add(id(storage), storage, storage.nbytes())
        return result

    def _add(self, name: int, storage: Any, size: int) -> None:
        def gone(_: Any) -> None:
            del self.known[name]
            self.now -= size

        self.known[name] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def most_held(function: Callable[[], Any]) -> int:
    with Live() as live:
        function()
    return live.peak


def wide(steps: int, every: int, *, examples: int = 64, width: int = 64) -> int:
    """The most that one gradient through a rollout holds, in numbers: (2 + 3) x 64 weights, 64 x 64 activations."""

    def objective(weights: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(torch.tanh(x @ weights["first"]).sin()) @ weights["second"], y)

    def step(carry: Tree, own: Tree, common: Tree) -> tuple[Tree, Tree]:
        gradient = grad(objective)(carry, common["x"], common["y"])
        return tree.add(carry, gradient, -0.1), gradient

    def score(x: Tensor, y: Tensor) -> Tensor:
        start = {
            "first": torch.ones(2, width, dtype=torch.float64),
            "second": torch.ones(width, 3, dtype=torch.float64),
        }
        _, moved = rollout(step, start, [{}] * steps, {"x": x, "y": y}, every=every)
        return tree.squared_norm(moved)

    x, y = torch.ones(2, examples, 2, dtype=torch.float64), torch.zeros(2, examples, dtype=torch.long)
    return most_held(lambda: vmap(grad(score))(x, y)) // 8 // 2  # two lanes, float64


def test_a_step_more_holds_its_weights_and_not_its_activations() -> None:
    weights, activations = 5 * 64, 64 * 64
    plain, lean = ((wide(20, every) - wide(10, every)) / 10 for every in (0, 1))
    assert plain > 3 * activations  # the measurement sees a graph where there is one
    assert lean < 6 * weights < activations  # checkpoint, adjoint and what moved them; nothing of 64 x 64


def test_blocks_hold_fewer_checkpoints() -> None:
    each, blocks = ((wide(40, every) - wide(16, every)) / 24 for every in (1, 8))
    assert blocks < each / 3


def test_what_is_computed_again_sees_the_same_functions() -> None:
    """A backward pass runs without the modes of its caller; torch has no second derivative of hardsigmoid."""
    x = normal(4, seed=1)

    def second(function: Callable[[Tensor], Tensor]) -> Tensor:
        first = grad(lambda x: function(x).square().sum())
        return grad(lambda x: first(x).sin().sum())(x)

    with PlainForms():
        again = second(recomputed(F.hardsigmoid))
    torch.testing.assert_close(again, second(lambda x: (x.clamp(-3, 3) + 3) / 6))
