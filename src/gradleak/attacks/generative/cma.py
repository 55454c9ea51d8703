"""Searches without derivatives of the objective: every step evaluates a population of candidates at once.

An evaluation takes the client's gradient, but does not differentiate it again: no second order, and a generator is only
run forward. All candidates of all lanes are one tensor program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.parts.optimisers import require_positive
from gradleak.parts.protocols import LaneObjective, Optimiser, Scored
from gradleak.parts.view import Step

STREAM = 2000  # of the lane's random numbers, apart from those of other parts


@dataclass(frozen=True, kw_only=True)
class _Population(Optimiser):
    """What both methods share: they evaluate candidates together and report the best match to the engine."""

    steps: int = 500
    population: int = 50
    block: int | None = None  # candidates at once; None: as many as there is room for
    graphable: bool = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "population"))

    @property
    def evaluations(self) -> int:
        """The number of gradients of the client's loss that a lane takes."""
        return self.steps * self.population

    def sized(self, evaluations: int) -> Any:
        """The same, for a lane that may make this many evaluations at once."""
        return self if self.block is not None else replace(self, block=min(evaluations, self.population))

    def _evaluated(self, problem: LaneObjective, points: Tensor, like: Tree) -> tuple[Tensor, Tensor, Scored]:
        """Objective and match of (candidates, n), and the best match among those that are finite."""

        def one(point: Tensor) -> tuple[Tensor, Tensor]:
            scored = problem.value(problem.project(_shaped(point, like)))
            return scored.objective, scored.match

        objective, match = vmap(one, chunk_size=self.block)(points)
        sound = objective.isfinite() & match.isfinite()
        objective, match = (torch.where(sound, each, torch.inf) for each in (objective, match))
        best = match.argmin().reshape(1)
        point = points.index_select(0, best)[0]
        at = problem.project(_shaped(point, like))
        return objective, match, Scored(at, objective.index_select(0, best)[0], match.index_select(0, best)[0])


@dataclass(frozen=True, kw_only=True)
class RandomSearch(_Population):
    """Candidates from N(0, I), new ones in every step; nothing is learned. v itself never moves."""

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        return {"key": problem.key}

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        like = tree.flatten(v)
        points = _normal(state["key"], (self.population, like.shape[0]), now)
        _, _, scored = self._evaluated(problem, points, v)
        return v, state, scored


@dataclass(frozen=True, kw_only=True)
class CMAES(_Population):
    """Covariance matrix adaptation: the candidates' law N(m, sigma^2 C) moves to where the objective is low.

    sigma       the first step length, in units of the unknowns
    population  None in pycma is 4 + 3 log n; here it is given
    active      bad candidates count against their directions, as in pycma

    Constants, weights and updates are those of Hansen, The CMA Evolution Strategy: A Tutorial, 2016 (arXiv:1604.00772).
    Differs from it, and from pycma: candidates are m + sigma A z with the Cholesky factor of C instead of its symmetric
    root, and the path of the step length sums z instead of C^-1/2 (m' - m): Krause, Arbones, Igel, NIPS 2016. That
    needs no eigenvectors, and lanes factor together. No restarts, no bounds, no stopping.
    v is the mean; the state is kept in float64, since C may be ill-conditioned.
    """

    sigma: float = 1.0
    active: bool = True
    # Steps are few and heavy: capturing them would gain nothing, and factorisations may not be capturable.
    graphable: bool = False

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "population"), real=("sigma",))
        if self.population < 4:
            raise ValueError(f"A population needs at least 4 candidates; given {self.population}.")

    def entries(self, unknowns: int, equations: int) -> int:
        """Peak memory of a lane's step in numbers: matrices in float64, and the candidates."""
        return 10 * unknowns * unknowns + 8 * self.population * unknowns

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        mean = tree.flatten(v).double()
        eye = torch.eye(mean.shape[0], dtype=torch.float64, device=mean.device)
        zeros = torch.zeros_like(mean)
        return {
            "key": problem.key,
            "mean": mean,
            "sigma": torch.full_like(mean[0], self.sigma),
            "covariance": eye,
            "factor": eye.clone(),  # A A^T = C, lower triangular
            "path_length": zeros,  # of the step length, in z
            "path": zeros.clone(),  # of the mean, in units of sigma
        }

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        n = state["mean"].shape[0]
        plan = Strategy.of(n, self.population, self.active)
        z = _normal(state["key"], (self.population, n), now)  # (candidates, n)
        y = z @ state["factor"].T
        objective, _, scored = self._evaluated(problem, state["mean"] + state["sigma"] * y, v)
        order = objective.argsort(stable=True)  # those that are not finite come last
        z, y = z.index_select(0, order), y.index_select(0, order)
        usable = objective.isfinite().any()

        weights = _ramp(plan, z)
        good = weights.clamp_min(0)
        step, step_z = good @ y, good @ z
        mean = state["mean"] + state["sigma"] * step
        path_length = (1 - plan.c_sigma) * state["path_length"] + plan.into_sigma * step_z
        length = torch.linalg.vector_norm(path_length)
        settled = (1 - torch.pow(1 - plan.c_sigma, 2 * (now.step.double() + 1))).sqrt()
        short = (length / settled < (1.4 + 2 / (n + 1)) * plan.expected).to(mean.dtype)  # h_sigma
        path = (1 - plan.c_c) * state["path"] + short * plan.into_path * step
        # A bad candidate counts by its direction only, whatever its length (tutorial, equation 46).
        lengths = z.square().sum(1)
        balanced = torch.where(weights < 0, weights * n / lengths.clamp_min(1e-30), weights)
        decay = 1 + plan.c_1 * (1 - short) * plan.c_c * (2 - plan.c_c) - plan.c_1 - plan.c_mu * weights.sum()
        covariance = decay * state["covariance"] + plan.c_1 * torch.outer(path, path) + plan.c_mu * (y.T * balanced) @ y
        covariance = 0.5 * (covariance + covariance.T)
        growth = (plan.c_sigma / plan.d_sigma) * (length / plan.expected - 1)
        sigma = state["sigma"] * growth.clamp(max=1.0).exp()  # at most by e at once, as pycma has it
        factor, failed = torch.linalg.cholesky_ex(covariance)
        # A population without a finite value changes nothing; a covariance that is not definite is not used.
        moved: Tree = {"mean": mean, "sigma": sigma, "path_length": path_length, "path": path}
        shape: Tree = {"covariance": covariance, "factor": factor}
        moved = tree.where(usable, moved, {name: state[name] for name in moved})
        moved |= tree.where(usable & (failed == 0), shape, {name: state[name] for name in shape})
        moved["key"] = state["key"]
        return problem.project(_shaped(moved["mean"], v)), moved, scored


@dataclass(frozen=True)
class Strategy:
    """The constants of CMA-ES for n unknowns and a population (tutorial, table 1)."""

    ranks: tuple[float, float]  # factors of positive and negative raw weights
    c_sigma: float
    d_sigma: float
    c_c: float
    c_1: float
    c_mu: float
    into_sigma: float  # sqrt(c_sigma (2 - c_sigma) mu_eff)
    into_path: float  # sqrt(c_c (2 - c_c) mu_eff)
    expected: float  # E ||N(0, I)||

    @staticmethod
    def of(n: int, population: int, active: bool) -> Strategy:
        raw = [math.log((population + 1) / 2) - math.log(i) for i in range(1, population + 1)]
        good, bad = [w for w in raw if w > 0], [w for w in raw if w <= 0]
        mu = sum(good) ** 2 / sum(w * w for w in good)
        mu_bad = sum(bad) ** 2 / max(sum(w * w for w in bad), 1e-30)
        c_sigma = (mu + 2) / (n + mu + 5)
        c_c = (4 + mu / n) / (n + 4 + 2 * mu / n)
        c_1 = 2 / ((n + 1.3) ** 2 + mu)
        c_mu = min(1 - c_1, 2 * (0.25 + mu + 1 / mu - 2) / ((n + 2) ** 2 + mu))
        most = min(1 + c_1 / c_mu, 1 + 2 * mu_bad / (mu + 2), (1 - c_1 - c_mu) / (n * c_mu))
        return Strategy(
            ranks=(1 / sum(good), most / -sum(bad) if active and sum(bad) < 0 else 0.0),
            c_sigma=c_sigma,
            d_sigma=1 + 2 * max(0.0, math.sqrt((mu - 1) / (n + 1)) - 1) + c_sigma,
            c_c=c_c,
            c_1=c_1,
            c_mu=c_mu,
            into_sigma=math.sqrt(c_sigma * (2 - c_sigma) * mu),
            into_path=math.sqrt(c_c * (2 - c_c) * mu),
            expected=math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n)),
        )


def _ramp(plan: Strategy, z: Tensor) -> Tensor:
    """The weights of the ranks, best first, (candidates,): made from a range, which a captured step can do."""
    count = z.shape[0]
    raw = math.log((count + 1) / 2) - torch.arange(1, count + 1, device=z.device, dtype=z.dtype).log()
    return torch.where(raw > 0, plan.ranks[0] * raw, plan.ranks[1] * raw)


def _shaped(point: Tensor, like: Tree) -> Tree:
    first = tree.like(like)
    return tree.unflatten(point.to(first.dtype), like)


def _normal(key: Tensor, shape: tuple[int, ...], now: Step) -> Tensor:
    return Draws(key).normal(shape, stream=STREAM, step=now.step.long(), dtype=torch.float64)
