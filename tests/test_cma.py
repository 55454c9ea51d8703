"""CMA-ES on functions whose minimum is known, beside pycma; lanes together are lanes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from conftest import largest_difference
from gradleak.attacks.generative.cma import CMAES, RandomSearch, Strategy
from gradleak.core import tree
from gradleak.core.random import Draws, key
from gradleak.core.tree import Tree
from gradleak.parts.protocols import LaneObjective, Scored
from gradleak.parts.view import Step

Function = Callable[[Tensor], Tensor]


def sphere(x: Tensor) -> Tensor:
    return x.square().sum()


def ellipsoid(x: Tensor) -> Tensor:
    """Axes from 1 to 1000: a condition of 1e6."""
    return (10 ** (6 * torch.arange(x.shape[0], dtype=x.dtype) / (x.shape[0] - 1)) * x.square()).sum()


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()


FUNCTIONS: dict[str, Function] = {"sphere": sphere, "ellipsoid": ellipsoid, "rosenbrock": rosenbrock}
POPULATION, SIZE, TARGET = 10, 8, 1e-9


@dataclass(frozen=True, eq=False)
class Problem(LaneObjective):
    """A function in the place of an attack's objective."""

    function: Function
    scene: Any

    @property
    def key(self) -> Tensor:
        return self.scene.draws.key

    def value(self, v: Tree) -> Scored:
        objective = self.function(tree.flatten(v))
        return Scored(v, objective, objective)

    def project(self, v: Tree) -> Tree:
        return v


def searched(function: Function, seeds: list[int], steps: int, *, together: bool = True, **settings: Any) -> Tree:
    """The lowest value after each step, (steps, lanes), and the last state, of runs from x = 1/2 in two tensors."""
    optimiser = CMAES(steps=steps, population=POPULATION, **{"sigma": 0.5, **settings})
    start = {"a": torch.full((SIZE - 3,), 0.5, dtype=torch.float64), "b": torch.full((3, 1), 0.5, dtype=torch.float64)}
    keys = torch.stack([key("cma", seed) for seed in seeds])

    def problem(own: Tensor) -> Problem:
        return Problem(function, SimpleNamespace(draws=Draws(own)))

    def begin(own: Tensor) -> Tree:
        return {"v": start, "state": optimiser.init(problem(own), start)}

    def advance(own: Tensor, held: Tree, step: Tensor) -> tuple[Tree, Tensor]:
        v, state, scored = optimiser.step(problem(own), held["v"], held["state"], Step(step, steps))
        return {"v": v, "state": state}, scored.objective

    rows = [keys] if together else list(keys[:, None])
    found = []
    for own in rows:
        held, values = vmap(begin)(own), []
        for number in range(steps):
            held, value = vmap(advance, in_dims=(0, 0, None))(own, held, torch.tensor(float(number)))
            values.append(value)
        found.append({"values": torch.stack(values), "state": held["state"]})
    joined = {"values": torch.cat([each["values"] for each in found], dim=1)}
    return {**joined, "state": tree.map(lambda *parts: torch.cat(parts), *(each["state"] for each in found))}


def generations(values: Tensor) -> Tensor:
    """The first step below the target, of each lane; infinite where there is none."""
    reached = values.cummin(0).values < TARGET
    return torch.where(reached.any(0), reached.double().argmax(0).double(), torch.inf)


# Steps that 11 runs of pycma 4.5 take at the median, with the same start, step length and population.
KNOWN = {"sphere": 116, "ellipsoid": 283, "rosenbrock": 349}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_many_generations_as_pycma(name: str) -> None:
    found = searched(FUNCTIONS[name], list(range(11)), int(1.25 * KNOWN[name]))
    steps = generations(found["values"]).median().item()
    assert 0.8 * KNOWN[name] < steps < 1.2 * KNOWN[name], steps


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_numbers_of_pycma_are_pycmas(name: str) -> None:
    cma = pytest.importorskip("cma", reason="the extra `search` is not installed")
    import numpy

    function, taken = vmap(FUNCTIONS[name]), []
    for seed in range(1, 12):
        settings = {"popsize": POPULATION, "seed": seed, "verbose": -9, "ftarget": TARGET, "maxiter": 1000}
        run = cma.CMAEvolutionStrategy(SIZE * [0.5], 0.5, settings)
        while not run.stop():
            points = run.ask()
            run.tell(points, function(torch.from_numpy(numpy.array(points))).tolist())
        taken.append(run.countiter)
    assert sorted(taken)[5] == pytest.approx(KNOWN[name], rel=0.1)


def test_the_covariance_learns_the_axes() -> None:
    """Of the ellipsoid the long axis is the first: C becomes the inverse of its curvature, up to a factor."""
    found = searched(ellipsoid, [0], 600)
    spread = torch.linalg.eigvalsh(found["state"]["covariance"][0])
    assert spread[-1] / spread[0] > 1e5
    diagonal = found["state"]["covariance"][0].diagonal()
    assert (diagonal[:-1] > diagonal[1:]).all()
    factor = found["state"]["factor"][0]
    torch.testing.assert_close(factor @ factor.T, found["state"]["covariance"][0])


def test_bad_candidates_count_against_their_directions() -> None:
    active, passive = (
        generations(searched(ellipsoid, list(range(7)), 480, active=flag)["values"]).median() for flag in (True, False)
    )
    assert active < passive < torch.inf


def test_lanes_together_are_lanes_alone() -> None:
    together, alone = (searched(rosenbrock, [0, 1, 2], 60, together=flag) for flag in (True, False))
    assert largest_difference(together["values"][:20], alone["values"][:20]) < 1e-9
    assert largest_difference(together["state"], alone["state"]) < 1e-6
    assert not torch.equal(together["values"][:, 0], together["values"][:, 1])


def test_candidates_in_blocks_are_candidates_at_once() -> None:
    whole, blocks = (searched(rosenbrock, [0], 20, block=block) for block in (None, 3))
    assert largest_difference(whole["values"], blocks["values"]) < 1e-12


def test_values_that_are_not_finite_are_the_worst() -> None:
    """Half of the space has no value: the search goes on in the other half, and ends at its edge."""
    half = lambda x: torch.where(x[0] > 0.1, x.square().sum(), torch.nan)  # noqa: E731
    found = searched(half, [0, 1, 2], 150)
    assert found["values"].isfinite().all()
    assert (found["values"][-1] < 0.0101).all()
    assert tree.finite(found["state"])


def test_nowhere_a_value_moves_nothing() -> None:
    found = searched(lambda x: x.sum() * torch.nan, [0], 3)
    assert torch.equal(found["state"]["mean"], torch.full((1, SIZE), 0.5, dtype=torch.float64))
    assert found["values"].isinf().all()


def test_the_constants_are_those_of_the_tutorial() -> None:
    """n = 10, population 10, from the tutorial's table by hand."""
    plan = Strategy.of(10, 10, active=True)
    raw = torch.tensor(5.5).log() - torch.arange(1, 11).log()
    good = raw[raw > 0]
    mu = (good.sum() ** 2 / good.square().sum()).item()
    assert plan.c_sigma == pytest.approx((mu + 2) / (10 + mu + 5))
    assert plan.c_1 == pytest.approx(2 / (11.3**2 + mu))
    assert plan.c_mu == pytest.approx(2 * (0.25 + mu + 1 / mu - 2) / (144 + mu))
    assert plan.expected == pytest.approx(3.0847, abs=1e-3)


def test_a_step_counts_all_of_its_evaluations() -> None:
    assert CMAES(steps=7, population=9).evaluations == RandomSearch(steps=7, population=9).evaluations == 63
    assert CMAES(population=50).sized(8).block == 8
    assert CMAES(population=50, block=3).sized(8).block == 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"population": 3}, "at least 4 candidates"),
        ({"sigma": 0.0}, "sigma must be a positive number"),
        ({"steps": 0}, "steps must be a positive whole number"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        CMAES(**settings)


def test_random_search_draws_anew_and_tells_the_best() -> None:
    optimiser = RandomSearch(steps=3, population=40)
    problem = Problem(sphere, SimpleNamespace(draws=Draws(key("random"))))
    v = {"z": torch.zeros(1, 4, dtype=torch.float64)}
    state, values = optimiser.init(problem, v), []
    for number in range(3):
        at, state, scored = optimiser.step(problem, v, state, Step(torch.tensor(float(number)), 3))
        assert torch.equal(at["z"], v["z"])
        assert sphere(scored.at["z"].flatten()) == scored.match
        values.append(scored.match.item())
    assert len(set(values)) == 3
    assert max(values) < 2.0
