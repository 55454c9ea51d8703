"""Levenberg-Marquardt against closed forms: one step for a quadratic, the evidence for the weight of a prior."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core.linear import gram, jacobian
from gradleak.core.random import Draws, key
from gradleak.core.tree import Tree
from gradleak.parts import levenberg
from gradleak.parts.levenberg import Homotopy, LevenbergMarquardt
from gradleak.parts.protocols import LaneObjective, Scored
from gradleak.parts.view import Step

NOW = Step(torch.zeros(()), 10)


def drawn(name: str, *shape: int) -> Tensor:
    return Draws(key(name)).normal(shape, dtype=torch.float64)


@dataclass(frozen=True)
class Quadratic(LaneObjective):
    """|A x - b|^2 + |P x|^2: the optimiser may ask what a lane's problem answers."""

    a: Tensor
    b: Tensor
    p: Tensor | None = None

    def residual(self, v: Tree) -> Tree:
        return {"match": {"r": self.a @ v["x"] - self.b}, "priors": {} if self.p is None else {"0": self.p @ v["x"]}}

    def value(self, v: Tree) -> Scored:
        parts = self.residual(v)
        match = parts["match"]["r"].square().sum()
        prior = parts["priors"]["0"].square().sum() if parts["priors"] else torch.zeros_like(match)
        return Scored(v, match + prior, match)

    def value_and_grad(self, v: Tree) -> tuple[Tree, Scored]:
        raise AssertionError("a least-squares method asks for residuals")

    def project(self, v: Tree) -> Tree:
        return v


def run(problem: Quadratic, optimiser: LevenbergMarquardt, x: Tensor, steps: int) -> tuple[Tensor, Tree]:
    v: Tree = {"x": x}
    state = optimiser.init(problem, v)
    for _ in range(steps):
        v, state, _ = optimiser.step(problem, v, state, NOW)
    return v["x"], state


def test_a_quadratic_is_solved_in_one_step() -> None:
    a, b = drawn("a", 30, 7), drawn("b", 30)
    x, state = run(Quadratic(a, b), LevenbergMarquardt(damping=1e-15), torch.zeros(7, dtype=torch.float64), 1)
    torch.testing.assert_close(x, torch.linalg.lstsq(a, b[:, None]).solution[:, 0], rtol=1e-9, atol=1e-9)
    assert state["accepted"]


def test_a_fixed_prior_is_the_ridge_solution() -> None:
    a, b, p = drawn("a", 30, 7), drawn("b", 30), drawn("p", 9, 7)
    x, _ = run(Quadratic(a, b, p), LevenbergMarquardt(damping=1e-15), torch.zeros(7, dtype=torch.float64), 1)
    torch.testing.assert_close(x, torch.linalg.solve(a.T @ a + p.T @ p, a.T @ b), rtol=1e-9, atol=1e-9)


def test_every_lane_has_its_own_damping_and_acceptance() -> None:
    a, b = drawn("a", 2, 30, 7), drawn("b", 2, 30)
    start = torch.zeros(2, 7, dtype=torch.float64)
    optimiser = LevenbergMarquardt()

    def once(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x, state = run(Quadratic(a, b), optimiser, x, 3)
        return x, state["damping"]

    together = vmap(once)(a, b, start)
    for lane in range(2):
        alone = once(a[lane], b[lane], start[lane])
        torch.testing.assert_close(together[0][lane], alone[0])
        torch.testing.assert_close(together[1][lane], alone[1])


def test_the_damping_stays_in_its_bounds() -> None:
    """At the solution no step is better, and the damping would grow for ever; far from it, it would fall for ever."""
    a, b = drawn("a", 30, 7), drawn("b", 30)
    solution = torch.linalg.lstsq(a, b[:, None]).solution[:, 0]
    _, stuck = run(Quadratic(a, b), LevenbergMarquardt(), solution, 60)
    assert stuck["damping"] == levenberg.MOST_DAMPING
    _, easy = run(Quadratic(a, b), LevenbergMarquardt(damping=1e-15), torch.zeros(7, dtype=torch.float64), 1)
    assert easy["damping"] == 1e-15


def test_a_point_that_is_not_finite_is_never_taken() -> None:
    @dataclass(frozen=True)
    class Cliff(Quadratic):
        def value(self, v: Tree) -> Scored:
            scored = super().value(v)
            bad = torch.where(v["x"].abs().max() > 0.1, torch.nan, 0.0)
            return Scored(v, scored.objective + bad, scored.match + bad)

    a, b = drawn("a", 30, 7), 10 * drawn("b", 30)
    x, state = run(Cliff(a, b), LevenbergMarquardt(), torch.zeros(7, dtype=torch.float64), 12)
    assert x.isfinite().all()
    assert 0 < x.abs().max() <= 0.1
    assert state["match"].isfinite()


def test_a_lane_is_finished_when_it_is_solved_or_can_move_no_more() -> None:
    a = drawn("a", 30, 7)
    optimiser = LevenbergMarquardt()
    _, state = run(Quadratic(a, a @ drawn("x", 7)), optimiser, torch.zeros(7, dtype=torch.float64), 12)
    assert optimiser.finished(state)  # a solution
    assert state["match"] < optimiser.solved
    _, state = run(Quadratic(a, drawn("b", 30)), optimiser, torch.zeros(7, dtype=torch.float64), 25)
    assert optimiser.finished(state)  # a minimum that is none
    assert state["match"] > 1


@pytest.mark.parametrize("noise", [1e-3, 1e-1, 1.0])
def test_the_weight_of_the_prior_is_the_ratio_of_noise_to_signal(noise: float) -> None:
    """x ~ N(0, 1), b = A x + noise: the ridge weight that minimises the expected error is noise^2."""
    n, m = 200, 400
    a, x = drawn("A", m, n), drawn("x", n)
    b = a @ x + noise * drawn("e", m)
    problem = Quadratic(a, b, torch.eye(n, dtype=torch.float64))
    optimiser = LevenbergMarquardt(homotopy=Homotopy(start=1.0, fall=0.3))
    found, state = run(problem, optimiser, torch.zeros(n, dtype=torch.float64), 30)
    assert float(state["weight"]) == pytest.approx(noise**2, rel=0.4)
    best = min(
        float((torch.linalg.solve(a.T @ a + weight * torch.eye(n), a.T @ b) - x).square().mean())
        for weight in torch.logspace(-8, 2, 60, dtype=torch.float64)
    )
    assert float((found - x).square().mean()) < 1.1 * best


def test_on_exact_data_the_prior_fades_and_chooses_among_solutions() -> None:
    """Fewer equations than unknowns: the limit is the solution of least norm."""
    a, truth = drawn("A", 20, 30), drawn("x", 30)
    problem = Quadratic(a, a @ truth, torch.eye(30, dtype=torch.float64))
    start = drawn("start", 30)
    found, state = run(problem, LevenbergMarquardt(homotopy=Homotopy()), start, 20)
    assert state["match"] < 1e-20
    torch.testing.assert_close(found, torch.linalg.pinv(a) @ (a @ truth), rtol=1e-5, atol=1e-5)


def test_noise_is_told_by_no_less_than_one_equation() -> None:
    """A single equation that determines half a direction leaves half of one; match g / R is then the most."""
    match, prior, half = (torch.tensor(value, dtype=torch.float64) for value in (0.3, 2.0, 0.5))
    assert float(Homotopy().floor(match, prior, half, equations=1)) == pytest.approx(0.3 * 0.5 / 2.0)
    assert float(Homotopy().floor(match, prior, 4 * half, equations=7)) == pytest.approx(0.3 * 2.0 / (5 * 2.0))


@pytest.mark.parametrize("n", [1, 7, 256, 700])
def test_the_gram_matrix_is_the_product(n: int) -> None:
    rows = drawn("rows", n, 40)
    torch.testing.assert_close(gram(rows), rows @ rows.T)
    torch.testing.assert_close(vmap(gram)(rows[None]), (rows @ rows.T)[None])


def test_the_jacobian_is_that_of_finite_differences() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cat([torch.sin(x.flatten()) * x.sum(), x.flatten().square()])

    x = drawn("x", 2, 3)
    rows = jacobian(function, x, block=4)
    step = 1e-6
    for i in range(6):
        e = torch.zeros(6, dtype=torch.float64)
        e[i] = step
        e = e.reshape(x.shape)
        torch.testing.assert_close(rows[i], (function(x + e) - function(x - e)) / (2 * step), rtol=1e-7, atol=1e-8)
