"""Matrix-free Levenberg-Marquardt for one lane, on problems with known solutions, and many lanes at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from conftest import largest_difference, perceptron, private
from gradleak.attacks.second_order.krylov import GaussNewtonKrylov
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.tree import Tree
from gradleak.engine import Engine
from gradleak.engine.layers import LaneLayers
from gradleak.parts.protocols import LaneObjective, Scored
from gradleak.parts.view import Step
from test_engine import Fragile, attack_of, gate, knowing, observed, searches, stage_of


@dataclass(frozen=True)
class LeastSquares(LaneObjective):
    """The sum of squares of `of`, of the terms of `priors`, inside of a box."""

    of: Callable[[Tree], Tensor]
    priors: dict[str, Callable[[Tree], Tensor]] = field(default_factory=dict)
    box: tuple[float, float] | None = None

    def residual(self, v: Tree) -> Tree:
        return {"match": {"all": self.of(v)}, "prior": {name: prior(v) for name, prior in self.priors.items()}}

    def value(self, v: Tree) -> Scored:
        terms = self.residual(v)
        match = tree.squared_norm(terms["match"])
        return Scored(v, match + sum(term.square().sum() for term in terms["prior"].values()), match)

    def value_and_grad(self, v: Tree) -> tuple[Tree, Scored]:
        raise NotImplementedError

    def project(self, v: Tree) -> Tree:
        return v if self.box is None else tree.map(lambda value: value.clamp(*self.box), v)


def walk(optimiser: Any, problem: Any, start: Tree, steps: int) -> list[dict[str, Any]]:
    """Every step of one lane: the next trial, the state after, and what was told."""
    v, state, path = start, optimiser.init(problem, start), []
    for step in range(steps):
        v, state, told = optimiser.step(problem, v, state, Step(torch.tensor(float(step)), steps))
        path.append({"v": v, "state": state, "told": told})
    return path


def solve(optimiser: Any, problem: Any, start: Tree, steps: int | None = None) -> tuple[Tree, Tensor]:
    """The last accepted point and its objective."""
    last = walk(optimiser, problem, start, steps or optimiser.steps)[-1]
    return optimiser.final(last["v"], last["state"]), last["state"]["value"]


def normal(*shape: int, stream: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return draws.Draws(draws.key("krylov")).normal(shape, stream=stream, dtype=dtype)


def linear(rows: int = 20, columns: int = 8, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A matrix of condition 100 and a right side that it cannot reach."""
    left, right = torch.linalg.qr(normal(rows, columns))[0], torch.linalg.qr(normal(columns, columns, stream=1))[0]
    matrix = left @ torch.diag(torch.logspace(0, -2, columns, dtype=torch.float64)) @ right
    return scale * matrix, scale * normal(rows, stream=2)


def rosenbrock(v: Tree) -> Tensor:
    x = v["x"]
    return torch.cat([10 * (x[1:] - x[:-1].square()), 1 - x[:-1]])


def matching(dtype: torch.dtype = torch.float64) -> tuple[LeastSquares, Tensor]:
    """The gradient of one example in a small sigmoid net, every tensor weighed by its length; and the example."""
    task, batch = perceptron(dtype=dtype), private(1, dtype=dtype)
    weights = task.weights()
    seen = task.gradient(weights, batch)

    def residual(v: Tree) -> Tensor:
        found = task.gradient(weights, {"x": v["x"], "y": batch["y"]})
        return torch.cat([((found[name] - u) / u.norm()).flatten() for name, u in seen.items()])

    return LeastSquares(residual), batch["x"]


# --- the linear problem -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e5])
def test_the_step_of_a_whole_space_is_the_dense_damped_step(damping: float, scale: float) -> None:
    """And lambda is relative: neither the unit of the residual nor that of the unknowns changes the step."""
    matrix, right = linear(scale=scale)
    problem, n = LeastSquares(lambda v: matrix @ v["x"] - right), matrix.shape[1]
    start = {"x": normal(n, stream=3)}
    optimiser = GaussNewtonKrylov(vectors=n, damping=damping, forcing=1e-30)
    end = walk(optimiser, problem, start, n)[-1]
    state = end["state"]
    assert int(state["held"]) == n
    torch.testing.assert_close(state["right"] @ state["right"].T, torch.eye(n, dtype=torch.float64), atol=1e-13, rtol=0)
    ritz = torch.linalg.eigvalsh(matrix.T @ matrix)[-1]
    bidiagonal = torch.diag(state["diagonal"]) + torch.diag(state["below"][:-1], -1)
    bidiagonal = torch.cat([bidiagonal, torch.eye(n, dtype=torch.float64)[-1:] * state["below"][-1]])
    tridiagonal = bidiagonal.T @ bidiagonal
    torch.testing.assert_close(torch.linalg.eigvalsh(tridiagonal)[-1], ritz)  # every direction is in the space
    unit = tridiagonal.abs().sum(1).max()
    assert ritz <= unit * (1 + 1e-12)
    assert unit <= 3**0.5 * ritz
    dense = matrix.T @ matrix + damping * unit * torch.eye(n, dtype=torch.float64)
    expected = start["x"] - torch.linalg.solve(dense, matrix.T @ (matrix @ start["x"] - right))
    torch.testing.assert_close(end["v"]["x"], expected, rtol=1e-9, atol=1e-9)


def test_least_squares_is_solved_to_rounding_by_a_whole_space() -> None:
    """To the last digit of the objective, which is 8 digits of x; where the objective can be zero, of x too."""
    matrix, right = linear()
    start = {"x": torch.zeros(8, dtype=torch.float64)}
    optimiser = GaussNewtonKrylov(vectors=8, damping=1e-13, forcing=1e-30)
    found, value = solve(optimiser, LeastSquares(lambda v: matrix @ v["x"] - right), start, 9)
    best = torch.linalg.lstsq(matrix, right[:, None]).solution[:, 0]
    assert largest_difference(found["x"], best) < 1e-8 * best.norm()
    assert float(value) == pytest.approx(float((matrix @ best - right).square().sum()), rel=1e-14)
    reachable = LeastSquares(lambda v: matrix @ (v["x"] - best))
    assert largest_difference(solve(optimiser, reachable, start, 17)[0]["x"], best) < 1e-12 * best.norm()


def test_a_wide_problem_is_solved_by_as_many_vectors_as_it_has_rows() -> None:
    """The space ends by itself: after the last row no direction is left, and the lane tries at once."""
    matrix = normal(3, 10)
    problem = LeastSquares(lambda v: matrix @ v["x"] - 1)
    path = walk(
        GaussNewtonKrylov(damping=1e-13, forcing=1e-30), problem, {"x": torch.zeros(10, dtype=torch.float64)}, 6
    )
    assert max(int(at["state"]["held"]) for at in path) <= 4
    assert path[-1]["state"]["value"] < 1e-24
    assert path[-1]["state"]["right"].shape == (10, 10)  # never more vectors than unknowns


def test_priors_are_more_rows() -> None:
    matrix, right = linear()
    problem = LeastSquares(lambda v: matrix @ v["x"] - right, {"small": lambda v: 0.3 * v["x"]})
    found, _ = solve(
        GaussNewtonKrylov(damping=1e-13, forcing=1e-30), problem, {"x": torch.zeros(8, dtype=torch.float64)}, 9
    )
    dense = matrix.T @ matrix + 0.09 * torch.eye(8, dtype=torch.float64)
    assert largest_difference(found["x"], torch.linalg.solve(dense, matrix.T @ right)) < 1e-10


def test_the_forcing_term_is_met_by_the_vector_before_the_last() -> None:
    """Few vectors where the damping is large: the first space that solves its normal equations well enough is tried."""
    matrix, right = linear(60, 40)
    problem, start = LeastSquares(lambda v: matrix @ v["x"] - right), torch.zeros(40, dtype=torch.float64)
    gradient = matrix.T @ -right
    needed = []
    for damping in (1.0, 1e-2, 1e-4):
        optimiser = GaussNewtonKrylov(damping=damping, forcing=0.1)
        path = walk(optimiser, problem, {"x": start}, 30)
        ready = next(step for step, at in enumerate(path) if at["state"]["ready"])
        shares = []
        for at in path[: ready + 1]:
            a, b = at["state"]["diagonal"], at["state"]["below"]
            product = a[1:] * b[:-1]
            unit = torch.stack([a**2 + b**2, torch.cat([product, a[:1] * 0]), torch.cat([a[:1] * 0, product])])
            move = at["v"]["x"] - start
            share = gradient + matrix.T @ (matrix @ move) + damping * unit.sum(0).max() * move
            shares.append(float(share.norm() / gradient.norm()))
        assert shares[ready - 1] <= 0.1
        assert all(share > 0.1 for share in shares[: ready - 1])
        needed.append(ready + 1)
    assert needed == sorted(needed)
    assert needed[0] <= 4
    assert needed[-1] > 2 * needed[0]


# --- nonlinear problems -----------------------------------------------------------------------------------------------


def test_rosenbrock_is_solved_in_every_lane_at_once() -> None:
    optimiser, problem = GaussNewtonKrylov(steps=250), LeastSquares(rosenbrock)
    found, values = vmap(lambda x: solve(optimiser, problem, {"x": x}))(normal(5, 6))
    assert largest_difference(found["x"], torch.ones(5, 6, dtype=torch.float64)) < 1e-9
    assert values[values.isfinite()].max() < 1e-20  # infinite: out of tries at the minimum, to be evaluated anew


@pytest.mark.parametrize("vectors", [1, 5, 100])
def test_the_objective_never_rises(vectors: int) -> None:
    path = walk(GaussNewtonKrylov(vectors=vectors), LeastSquares(rosenbrock), {"x": normal(6, stream=4)}, 60)
    values = torch.stack([at["state"]["value"] for at in path if at["state"]["value"].isfinite()])
    assert (values[1:] <= values[:-1]).all()
    assert values[-1] < 0.1 * values[0]


def test_an_outer_iteration_takes_as_many_steps_as_vectors() -> None:
    path = walk(GaussNewtonKrylov(steps=40), LeastSquares(rosenbrock), {"x": normal(6, stream=4)}, 40)
    held = [int(at["state"]["held"]) for at in path]
    assert held[0] == 1
    assert all(after in (1, before, before + 1) for before, after in zip(held, held[1:]))
    accepted = [i for i in range(1, 40) if path[i]["state"]["value"] < path[i - 1]["state"]["value"]]
    assert all(held[i] == 1 for i in accepted)  # the first vector of the next space comes with the acceptance
    assert len(accepted) > 3


def test_a_gradient_is_matched_to_rounding() -> None:
    problem, truth = matching()
    start = {"x": 0.5 + 0.02 * normal(*truth.shape)}
    found, value = solve(GaussNewtonKrylov(steps=100), problem, start)
    assert value < 1e-24
    assert largest_difference(found["x"], truth) < 1e-9


def test_float32_goes_as_far_as_float32_goes() -> None:
    problem, truth = matching(torch.float32)
    start = {"x": 0.5 + 0.02 * normal(*truth.shape, dtype=torch.float32)}
    path = walk(GaussNewtonKrylov(steps=100), problem, start, 100)
    assert path[-1]["v"]["x"].dtype == torch.float32
    assert path[-1]["state"]["value"] < 1e-9
    assert largest_difference(path[-1]["state"]["x"].reshape(truth.shape), truth) < 1e-2


def test_unknowns_stay_in_their_box() -> None:
    matrix, right = linear()
    problem = LeastSquares(lambda v: matrix @ v["x"] - right, box=(-0.5, 0.5))
    path = walk(GaussNewtonKrylov(), problem, {"x": torch.zeros(8, dtype=torch.float64)}, 80)
    assert all(at["v"]["x"].abs().max() <= 0.5 for at in path)
    found = path[-1]["state"]["x"]
    slope = matrix.T @ (matrix @ found - right)
    assert path[-1]["state"]["value"] < 0.99 * right.square().sum()
    assert largest_difference((found - slope).clamp(-0.5, 0.5), found) < 0.2  # near the minimum of the box


def test_nested_unknowns() -> None:
    v = {"a": {"x": torch.full((2, 2), 3.0, dtype=torch.float64)}, "b": torch.tensor(-1.0, dtype=torch.float64)}
    problem = LeastSquares(lambda v: torch.cat([v["a"]["x"].flatten() - 1, (v["b"] - v["a"]["x"].mean())[None]]))
    found, value = solve(GaussNewtonKrylov(), problem, v, 30)
    assert value < 1e-20
    assert found["a"]["x"].shape == (2, 2)


# --- lanes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rosenbrock", "matching"])
def test_a_lane_walks_as_it_does_alone(kind: str) -> None:
    """Lanes differ in their spaces, dampings and trials; none waits for another."""
    problem, shape = (LeastSquares(rosenbrock), (6,)) if kind == "rosenbrock" else (matching()[0], (1, 1, 4, 4))
    starts = normal(4, *shape)
    optimiser, steps = GaussNewtonKrylov(), 16  # at the minimum rounding decides

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        path = walk(optimiser, problem, {"x": x}, steps)
        return torch.stack([at["state"]["value"] for at in path]), torch.stack([at["state"]["held"] for at in path])

    values, held = vmap(run)(starts)
    for lane, start in enumerate(starts):
        alone, spaces = run(start)
        assert torch.equal(held[lane], spaces)
        torch.testing.assert_close(values[lane], alone, rtol=1e-6, atol=1e-20)
    assert not all(torch.equal(held[0], other) for other in held[1:])


def test_lanes_do_not_mix() -> None:
    """The company changes, the lane does not: to the last bit, where the batch is of the same size."""
    problem, optimiser = LeastSquares(rosenbrock), GaussNewtonKrylov(steps=25)
    starts = normal(4, 6)
    run = vmap(lambda x: solve(optimiser, problem, {"x": x}, 25))
    others = torch.cat([starts[:1], 3 * starts[1:].flip(0)])
    assert torch.equal(run(starts)[0]["x"][0], run(others)[0]["x"][0])


# --- what is not finite, and the end ----------------------------------------------------------------------------------


def test_a_trial_that_is_not_finite_is_rejected() -> None:
    """log(x) beyond zero: a trial there is not the end of the lane, and never told."""
    problem = LeastSquares(lambda v: v["x"].log() * torch.tensor([1.0, 3.0], dtype=torch.float64))
    start = {"x": torch.tensor([8.0, 0.01], dtype=torch.float64)}
    path = walk(GaussNewtonKrylov(damping=1e-6), problem, start, 60)
    trials = torch.stack([at["v"]["x"] for at in path])
    assert (trials < 0).any()
    assert trials.isfinite().all()
    assert all(at["told"].objective.isfinite() and (at["told"].at["x"] > 0).all() for at in path)
    assert path[-1]["state"]["value"] < 1e-20


def test_a_jacobian_that_is_not_finite_leaves_the_lane_where_it_is() -> None:
    problem = LeastSquares(lambda v: torch.where(v["x"] > 0, v["x"], 0.0).sqrt() + 1)
    path = walk(GaussNewtonKrylov(tries=2), problem, {"x": torch.zeros(3, dtype=torch.float64)}, 8)
    assert all(at["v"]["x"].eq(0).all() and at["told"].objective == 3 for at in path)


def test_a_start_that_is_not_finite_is_a_diverged_lane() -> None:
    problem = LeastSquares(lambda v: v["x"].log())
    [only] = walk(GaussNewtonKrylov(), problem, {"x": -torch.ones(2, dtype=torch.float64)}, 1)
    assert not only["told"].objective.isfinite()


def test_the_minimum_is_not_left() -> None:
    matrix, _ = linear()
    start = {"x": torch.ones(8, dtype=torch.float64)}
    path = walk(GaussNewtonKrylov(tries=2), LeastSquares(lambda v: matrix @ v["x"] - matrix.sum(1)), start, 20)
    assert path[-1]["told"].objective < 1e-28
    assert largest_difference(path[-1]["state"]["x"], start["x"]) < 1e-12


def test_damping_rises_with_every_rejection_falls_with_every_step_and_starts_over() -> None:
    """Worse in every direction, whatever the Jacobian at zero promises; and a step that always helps."""
    optimiser = GaussNewtonKrylov(tries=3, rise=4, damping=0.1)
    worse = LeastSquares(lambda v: torch.where(v["x"] == 0, 1 + v["x"], 2.0))
    path = walk(optimiser, worse, {"x": torch.zeros(1, dtype=torch.float64)}, 6)
    assert [round(float(at["state"]["damping"]), 6) for at in path] == [0.1, 0.4, 1.6, 0.1, 0.1, 0.4]
    assert [bool(at["state"]["value"].isinf()) for at in path] == [False, False, False, True, False, False]
    assert path[3]["v"]["x"].item() == 0  # evaluated anew
    assert [float(at["told"].objective) for at in path] == [1, 4, 4, 4, 1, 4]
    easy = walk(optimiser, LeastSquares(lambda v: v["x"] - 1), {"x": torch.zeros(1, dtype=torch.float64)}, 4)
    assert [round(float(at["state"]["damping"]), 6) for at in easy] == [0.1, 0.02, 0.004, 0.0008]


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"vectors": 0}, "vectors must be"), ({"forcing": 0}, "forcing must be"), ({"steps": 1.5}, "steps must be")],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GaussNewtonKrylov(**settings)


# --- in the engine ----------------------------------------------------------------------------------------------------


def test_the_engine_reaches_the_truth(double: Engine) -> None:
    task, seen, batch = observed()
    attack = attack_of(stage_of(optimiser=GaussNewtonKrylov(steps=60)), restarts=3)
    found = attack.run(task, seen, knowing(batch), engine=double)
    assert found.match.max() < 1e-20
    assert largest_difference(found.batch["x"][0], batch["x"]) < 1e-6


def test_a_trial_that_is_not_finite_does_not_end_a_lane_of_the_engine(double: Engine) -> None:
    task, seen, batch = observed()
    attack = attack_of(stage_of(predict=Fragile(radius=2.0), optimiser=GaussNewtonKrylov(steps=60)), restarts=3)
    found = attack.run(task, seen, knowing(batch), engine=double)
    assert not found.diverged.any()


def test_memory_is_that_of_the_space_and_of_a_few_residuals() -> None:
    few, many = GaussNewtonKrylov(vectors=10), GaussNewtonKrylov(vectors=100)
    assert many.entries(10**6, 0) > 200 * 10**6
    assert few.entries(10**6, 0) < 0.2 * many.entries(10**6, 0)
    assert 2 * 10**7 <= few.entries(0, 10**7) < 5 * 10**7


@pytest.mark.parametrize("lanes", [False, True], ids=["torch", "lane convolutions"])
def test_a_step_can_be_captured(lanes: bool, double: Engine) -> None:
    task, seen, batch = observed()
    attack = attack_of(stage_of(optimiser=GaussNewtonKrylov(steps=30, vectors=6)), restarts=2)
    [search] = searches(attack, task, seen, knowing(batch), double)
    if not lanes:
        return gate(search)
    with LaneLayers():
        gate(search)


def test_lane_convolutions_change_nothing(double: Engine) -> None:
    task, seen, batch = observed()
    attack = attack_of(stage_of(optimiser=GaussNewtonKrylov(steps=20)), restarts=2)
    plain = attack.run(task, seen, knowing(batch), engine=double)
    with LaneLayers():
        lanes = attack.run(task, seen, knowing(batch), engine=double)
    assert largest_difference(plain.match, lanes.match) < 1e-10
