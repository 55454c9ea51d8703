"""Optimisers for one lane, on problems with known solutions, and many lanes at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from conftest import largest_difference, moment
from gradleak.core import random as draws
from gradleak.core.tree import Tree
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.optimisers import Adam, CosineDecay, FirstOrder, Lion, SignedAdam, StepDecay, constant, soft_sign
from gradleak.parts.protocols import LaneObjective, Scored
from gradleak.parts.view import Step


@dataclass(frozen=True)
class Function(LaneObjective):
    """A problem that is a plain function of the unknowns."""

    of: Callable[[Tree], Tensor]

    def value(self, v: Tree) -> Scored:
        value = self.of(v)
        return Scored(v, value, value)

    def value_and_grad(self, v: Tree) -> tuple[Tree, Scored]:
        gradient, value = grad_and_value(self.of)(v)
        return gradient, Scored(v, value, value)

    def residual(self, v: Tree) -> Tree:
        raise NotImplementedError

    def project(self, v: Tree) -> Tree:
        return v


def solve(optimiser: object, problem: Function, start: Tree, steps: int | None = None) -> tuple[Tree, Tensor]:
    """One lane by itself; returns the best point and its value."""
    steps = optimiser.steps if steps is None else steps
    v, state = start, optimiser.init(problem, start)
    best, lowest = start, torch.tensor(torch.inf, dtype=torch.float64)
    for step in range(steps):
        v, state, scored = optimiser.step(problem, v, state, Step(torch.tensor(float(step)), steps))
        better = scored.match < lowest
        lowest = torch.where(better, scored.match, lowest)
        best = {name: torch.where(better, scored.at[name], best[name]) for name in best}
    return best, lowest


def rosenbrock(v: Tree) -> Tensor:
    x = v["x"]
    return (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()


def quadratic(v: Tree) -> Tensor:
    """Condition 1e4, minimum zero at ones."""
    scales = torch.logspace(0, 4, 10, dtype=torch.float64)
    return 0.5 * (scales * (v["x"] - 1).square()).sum()


def starts(lanes: int, size: int) -> Tensor:
    return torch.stack([draws.Draws(draws.key(lane)).normal((size,), dtype=torch.float64) for lane in range(lanes)])


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "milestones"),
    [(4800, (1799, 2999, 4203)), (24000, (8998, 14999, 21015)), (1000, (374, 624, 875))],
)
def test_step_decay_falls_where_the_authors_code_does(total: int, milestones: tuple[int, int, int]) -> None:
    schedule = StepDecay()
    for passed, milestone in enumerate(milestones):
        assert float(schedule(moment(milestone - 1, total))) == pytest.approx(0.1**passed)
        assert float(schedule(moment(milestone, total))) == pytest.approx(0.1 ** (passed + 1))


def test_cosine_decay_warms_up_and_ends_at_zero() -> None:
    schedule = CosineDecay(warmup=4)
    rates = [float(schedule(moment(step, 24))) for step in range(25)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[14] == pytest.approx(0.5)
    assert rates[24] == pytest.approx(0, abs=1e-6)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert float(CosineDecay()(moment(0, 10))) == 1


def test_the_soft_sign_begins_as_a_tanh_and_ends_as_the_gradient() -> None:
    g = torch.tensor([-3.0, 0.001, 5.0])
    torch.testing.assert_close(soft_sign(g, moment(0, 10)), torch.tanh(g))
    torch.testing.assert_close(soft_sign(g, moment(10, 10)), g, rtol=1e-4, atol=0)


# --- first order ------------------------------------------------------------------------------------------------------


def walked(optimiser: FirstOrder, steps: int) -> Tensor:
    return walk(optimiser, {"x": torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)}, steps)["x"]


def walk(optimiser: FirstOrder, v: Tree, steps: int, of: Callable[[Tree], Tensor] = rosenbrock) -> Tree:
    problem = Function(of)
    state = optimiser.init(problem, v)
    for step in range(steps):
        v, state, _ = optimiser.step(problem, v, state, Step(torch.tensor(float(step)), steps))
    return v


def walked_by_torch(steps: int, signed: bool) -> Tensor:
    x = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([x], lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        rosenbrock({"x": x}).backward()
        if signed:
            x.grad.sign_()
        optimiser.step()
    return x.detach()


def test_adam_takes_the_steps_of_torch() -> None:
    assert largest_difference(walked(Adam(lr=0.1, steps=10), 10), walked_by_torch(10, signed=False)) < 1e-10


def test_signed_adam_sees_signs_only() -> None:
    assert largest_difference(walked(SignedAdam(lr=0.1, steps=10), 10), walked_by_torch(10, signed=True)) < 1e-10


def test_lion_moves_by_its_rate_in_every_coordinate() -> None:
    start = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close((walked(Lion(lr=0.01, steps=1), 1) - start).abs(), torch.full_like(start, 0.01))
    decayed = walked(Lion(lr=0.01, steps=1, weight_decay=0.5), 1) - walked(Lion(lr=0.01, steps=1), 1)
    torch.testing.assert_close(decayed, -0.01 * 0.5 * start)


def test_lion_takes_the_published_steps() -> None:
    """c = b1 m + (1 - b1) g; x <- x - lr (sign(c) + decay x); m <- b2 m + (1 - b2) g: two betas, in this order."""
    x, momentum = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    turned = 0
    for _ in range(40):
        g = grad_and_value(lambda x: rosenbrock({"x": x}))(x)[0]
        mixed = 0.9 * momentum + 0.1 * g
        turned += int((mixed.sign() != g.sign()).any())
        x = x - 0.1 * (mixed.sign() + 0.5 * x)
        momentum = 0.99 * momentum + 0.01 * g
    assert turned > 5  # the momentum matters here
    assert largest_difference(walked(Lion(lr=0.1, steps=40, weight_decay=0.5), 40), x) < 1e-12


def test_each_variable_has_its_own_rate_and_interval() -> None:
    v = {name: torch.zeros((), dtype=torch.float64) for name in ("fast", "slow", "rare")}
    optimiser = Lion(lr=1.0, steps=7, rates={"slow": 0.1}, every={"rare": 3})
    end = walk(optimiser, v, 7, of=lambda v: -sum(v.values()))
    assert {name: round(float(value), 6) for name, value in end.items()} == {"fast": 7, "slow": 0.7, "rare": 3}


def test_adam_counts_the_moves_of_a_rare_variable_and_not_the_steps() -> None:
    """Moved every third step, it is where Adam is after a third of the steps."""
    start = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
    rare = walk(Adam(lr=0.1, steps=9, every={"x": 3}), {"x": start}, 9)["x"]
    assert largest_difference(rare, walked(Adam(lr=0.1, steps=3), 3)) < 1e-12


def test_nested_variables_take_the_rate_of_their_name() -> None:
    v = {"scale": {"a": torch.ones(2), "b": torch.ones(())}, "x": torch.ones(1)}
    end = walk(Lion(lr=1.0, steps=2, rates={"scale": 0.25}), v, 2, of=lambda v: v["x"].sum() + v["scale"]["a"].sum())
    assert end["scale"]["a"].tolist() == [0.5, 0.5]
    assert end["x"].item() == -1
    assert end["scale"]["b"].item() == 1  # no gradient, no move


def test_adam_has_an_eps_for_each_variable() -> None:
    """Gradients of 1e-10 are lost beside the usual eps, and move a variable whose eps is smaller by its rate."""
    v = {"control": {"a": torch.zeros(2).double()}, "x": torch.zeros(2).double()}
    adam = Adam(lr=0.1, steps=1, epsilons={"control": 1e-14})
    end = walk(adam, v, 1, of=lambda v: 1e-10 * (v["x"].sum() + v["control"]["a"].sum()))
    torch.testing.assert_close(end["control"]["a"], torch.full((2,), -0.1).double(), rtol=1e-3, atol=0)
    torch.testing.assert_close(end["x"], torch.full((2,), -0.1 / 101).double(), rtol=1e-3, atol=0)


def test_noise_has_the_size_of_the_move_and_differs_by_step_and_variable() -> None:
    flat = Function(lambda v: 0 * (v["x"].sum() + v["z"].sum()))
    v = {"x": torch.zeros(4000, dtype=torch.float64), "z": torch.zeros(4000, dtype=torch.float64)}
    optimiser = Adam(lr=0.1, steps=2, noise=0.2)
    state = optimiser.init(flat, v)
    first, state, _ = optimiser.step(flat, v, state, moment(0, 2))
    second, _, _ = optimiser.step(flat, first, state, moment(1, 2))
    moves = torch.stack([first["x"], first["z"], second["x"] - first["x"]])
    torch.testing.assert_close(moves.std(1), torch.full((3,), 0.1 * 0.2, dtype=torch.float64), rtol=0.05, atol=0)
    assert (torch.corrcoef(moves) - torch.eye(3)).abs().max() < 0.1


# --- L-BFGS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "size"), [(quadratic, 10), (rosenbrock, 4)], ids=["condition 1e4", "rosenbrock"])
def test_lbfgs_reaches_the_minimum_in_every_lane_at_once(of: Callable[[Tree], Tensor], size: int) -> None:
    optimiser, problem, x = LBFGS(steps=250), Function(of), starts(5, size)
    together, values = vmap(lambda x: solve(optimiser, problem, {"x": x}))(x)
    assert values.max() < 1e-12
    assert (together["x"] - 1).abs().max() < 1e-5


@pytest.mark.parametrize(("of", "size"), [(quadratic, 10), (rosenbrock, 4)], ids=["condition 1e4", "rosenbrock"])
def test_a_lane_of_lbfgs_walks_as_it_does_alone(of: Callable[[Tree], Tensor], size: int) -> None:
    """Lanes differ in their line searches from the first step on; none waits for another."""
    optimiser, problem, x = LBFGS(steps=30), Function(of), starts(4, size)
    together, _ = vmap(lambda x: solve(optimiser, problem, {"x": x}))(x)
    alone = torch.stack([solve(optimiser, problem, {"x": lane})[0]["x"] for lane in x])
    assert largest_difference(together["x"], alone) < 1e-6


def test_lbfgs_needs_far_fewer_steps_than_first_order() -> None:
    problem, start = Function(quadratic), {"x": starts(1, 10)[0]}
    assert solve(LBFGS(steps=120), problem, start)[1] < 1e-6 * solve(Adam(lr=0.1, steps=120), problem, start)[1]


@pytest.mark.parametrize(("of", "size"), [(quadratic, 10), (rosenbrock, 8)], ids=["condition 1e4", "rosenbrock"])
def test_lbfgs_reaches_in_ninety_evaluations_what_scipys_does_in_sixty(of: Callable[[Tree], Tensor], size: int) -> None:
    from scipy.optimize import minimize

    def value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
        slope, value = grad_and_value(lambda x: of({"x": x}))(torch.from_numpy(x))
        return float(value), slope.numpy()

    ours, theirs = [], []
    for start in starts(5, size):
        options = {"maxcor": 20, "maxfun": 60, "ftol": 0, "gtol": 0}
        theirs.append(minimize(value_and_slope, start.numpy(), jac=True, method="L-BFGS-B", options=options).fun)
        ours.append(float(solve(LBFGS(steps=90), Function(of), {"x": start})[1]))
    assert np.median(ours) < np.median(theirs)


def test_lbfgs_backs_out_of_a_region_that_is_not_finite() -> None:
    """log(x) beyond zero: a trial there is not the end of the lane."""
    problem = Function(lambda v: (v["x"] - v["x"].log()).sum())
    best, value = solve(LBFGS(steps=60), problem, {"x": torch.tensor([5.0, 0.01], dtype=torch.float64)})
    assert value == pytest.approx(2, abs=1e-9)
    assert largest_difference(best["x"], torch.ones(2, dtype=torch.float64)) < 1e-4


def test_lbfgs_works_on_nested_unknowns() -> None:
    v = {"a": {"x": torch.full((2, 2), 3.0, dtype=torch.float64)}, "b": torch.tensor(-1.0, dtype=torch.float64)}
    problem = Function(lambda v: (v["a"]["x"] - 1).square().sum() + 10 * (v["b"] - v["a"]["x"].mean()).square())
    optimiser = LBFGS(steps=40)
    state = optimiser.init(problem, v)
    for step in range(40):
        v, state, scored = optimiser.step(problem, v, state, moment(step, 40))
    assert scored.match < 1e-15


def valley(v: Tree) -> Tensor:
    """A quadratic whose two variables are of very different sizes."""
    return (v["x"] - 1).square().sum() + 1e-8 * (v["y"] - 1000).square().sum()


def test_lbfgs_measures_a_variable_in_its_unit() -> None:
    start = {"x": torch.zeros(3, dtype=torch.float64), "y": torch.zeros(2, dtype=torch.float64)}
    _, plain = solve(LBFGS(steps=4), Function(valley), start)
    _, scaled = solve(LBFGS(steps=4, rates={"y": 1e4}), Function(valley), start)
    assert scaled < 1e-6 * plain


def test_lbfgs_moves_a_variable_only_in_every_so_many_searches() -> None:
    problem, optimiser = Function(valley), LBFGS(steps=30, every={"y": 3}, rates={"y": 1e4})
    v = {"x": torch.zeros(3, dtype=torch.float64), "y": torch.zeros(2, dtype=torch.float64)}
    state = optimiser.init(problem, v)
    moved = []
    for step in range(30):
        before, search = state["x"], int(state["searches"])
        v, state, scored = optimiser.step(problem, v, state, moment(step, 30))
        if not torch.equal(before, state["x"]):  # a point was accepted: it belongs to the search that began before
            moved.append(((search - 1) % 3 == 0, bool((before[3:] != state["x"][3:]).any())))
    assert all(due or not went for due, went in moved)
    assert any(went for _, went in moved)
    assert scored.match < 1e-10


def test_lbfgs_schedules_the_first_trial_of_a_search() -> None:
    problem, start = Function(quadratic), {"x": torch.zeros(10, dtype=torch.float64)}
    for lr, schedule, factor in ((1.0, constant, 1.0), (0.5, constant, 0.5), (1.0, lambda now: 0.25, 0.25)):
        optimiser = LBFGS(steps=5, lr=lr, schedule=schedule)
        _, state, _ = optimiser.step(problem, start, optimiser.init(problem, start), moment(0, 5))
        reference = LBFGS(steps=5)
        _, plain, _ = reference.step(problem, start, reference.init(problem, start), moment(0, 5))
        assert float(state["length"] / plain["length"]) == pytest.approx(factor)


def test_lbfgs_stays_at_a_minimum() -> None:
    problem, start = Function(quadratic), {"x": torch.ones(10, dtype=torch.float64)}
    best, value = solve(LBFGS(steps=10), problem, start)
    assert value == 0
    assert torch.equal(best["x"], start["x"])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_pairs_almost_without_curvature_are_not_kept(sign: float) -> None:
    """Relative to the lengths of both, so it neither matters how long they are nor where they point."""
    optimiser, yes, no = LBFGS(history=5), torch.tensor(True), torch.tensor(False)
    state = optimiser.init(Function(quadratic), {"x": torch.zeros(2, dtype=torch.float64)})
    for size in (1e-3, 1.0, 1e3):
        for along, kept in ((1e-12, 0), (1e-8, 1)):
            s = torch.tensor([size, 0.0], dtype=torch.float64)
            y = torch.tensor([along * size, sign * size], dtype=torch.float64)
            pairs, *_ = optimiser._remember(state, state["x"] + s, state["gradient"] + y, yes, no, y)
            assert int(pairs["held"]) == kept


@pytest.mark.parametrize("count", [3, 8])  # some of the five slots still empty; the ring gone round
def test_the_direction_is_that_of_the_two_loop_recursion(count: int) -> None:
    """The compact form against Nocedal and Wright, algorithm 7.4, over the pairs that the history still holds."""
    source = draws.Draws(draws.key("pairs"))
    moves = source.normal((count, 6), dtype=torch.float64)
    curvature = torch.diag(torch.linspace(1, 5, 6, dtype=torch.float64))
    turns, g = moves @ curvature, source.normal((6,), stream=1, dtype=torch.float64)
    optimiser, yes, no = LBFGS(history=5), torch.tensor(True), torch.tensor(False)
    state = optimiser.init(Function(quadratic), {"x": torch.zeros(6, dtype=torch.float64)})
    for s, y in zip(moves, turns):
        pairs, along, across = optimiser._remember(state, state["x"] + s, state["gradient"] + y, yes, no, g)
        state |= pairs
    moves, turns = moves[-5:], turns[-5:]
    q, alphas = g.clone(), []
    for s, y in reversed(list(zip(moves, turns))):
        alphas.append((s @ q) / (s @ y))
        q = q - alphas[-1] * y
    r = q * (moves[-1] @ turns[-1]) / (turns[-1] @ turns[-1])
    for s, y, alpha in zip(moves, turns, reversed(alphas)):
        r = r + s * (alpha - (y @ r) / (s @ y))
    assert largest_difference(optimiser._direction(g, state, along, across), -r) < 1e-12
