"""Levenberg-Marquardt with a dense Jacobian per lane, and a homotopy in the weight of the priors.

Matching is nonlinear least squares: r(x) is the residual between the predicted and the observed update, and every step
solves (J^T J + mu P^T P + lambda D) dx = -(J^T r + mu P^T p), with p the terms of the priors, P their derivative, D the
diagonal of J^T J + mu P^T P. J comes from forward-mode products, in blocks of entries of x. It converges quadratically
if the update determines the data. It needs float64, since J^T J squares the condition number.

References: Levenberg 1944; Marquardt 1963; discrepancy and evidence as in MacKay, Neural Computation 4, 1992.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.linear import gram, jacobian, solved
from gradleak.core.random import signs
from gradleak.core.tree import Tree
from gradleak.parts.optimisers import require_positive
from gradleak.parts.protocols import LaneObjective, Optimiser, Scored
from gradleak.parts.view import Step

MOST_DAMPING = 1e11  # steps are then too short to matter
STILL = 1e-3  # of the objective: a step that lowers it by less, at the final weight, counts towards the end
PROBES = 8  # for a trace of thousands of terms


@dataclass(frozen=True)
class Homotopy:
    """The weight of the priors: high at first, then as low as the data allow.

    It starts at `start` in units of trace(J^T J) / trace(P^T P). With every accepted step it falls by `fall`, or with
    the match if that falls faster, but not below the level of discrepancy, where the prior would have to explain noise:
    mu >= match g / ((m - g) R), with m equations, g directions that the data determine at this weight, and the value R
    of the prior. That is the most likely weight for a Gaussian prior of unknown scale and noise of unknown size. On
    exact data it vanishes with the match, so the limit is the smoothest of all exact solutions.
    """

    start: float = 1.0
    fall: float = 0.1

    def __post_init__(self) -> None:
        if not (self.start > 0 and 0 < self.fall <= 1):
            raise ValueError(f"A homotopy needs start > 0 and 0 < fall <= 1; given {self}.")

    def floor(self, match: Tensor, prior: Tensor, determined: Tensor, equations: int) -> Tensor:
        # With fewer equations than twice the unknowns little is left to tell noise by: stay on the side of the data.
        spare = torch.maximum(equations - determined, determined).clamp_min(1.0)
        return match * determined / (spare * prior.clamp_min(1e-30))


@dataclass(frozen=True, kw_only=True)
class LevenbergMarquardt(Optimiser):
    """Damped Gauss-Newton steps; acceptance, damping and the weight of the priors are per lane.

    damping     first lambda; divided by `ease` after an accepted step, times `stiffen` after a rejected trial
    tries       trials with one Jacobian
    chords      further steps with the Jacobian and the factor of an accepted one: each costs one evaluation
    single      compute the Jacobian in float32: a few more chords per step, but far less time on a GPU
    block       columns of the Jacobian computed at once; None: as many as the engine has room for
    solved      a lane with a match below this is finished
    homotopy    the weight of the stage's priors; None: always 1
    only_if_solved   return the start if the match stays above this: a start that is nearly right is worth more than
                a lower match at a wrong place
    """

    steps: int = 60
    damping: float = 1e-2
    ease: float = 5.0
    stiffen: float = 4.0
    tries: int = 4
    chords: int = 3
    single: bool = False
    block: int | None = None
    solved: float = 1e-26
    homotopy: Homotopy | None = None
    only_if_solved: float | None = None
    graphable: bool = False  # finished lanes leave the chunk, which needs a host read

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "tries"), real=("damping", "ease", "stiffen"))

    def sized(self, evaluations: int) -> LevenbergMarquardt:
        return self if self.block is not None else replace(self, block=evaluations)

    def entries(self, unknowns: int, equations: int) -> int:
        """Numbers that a lane holds at the peak of a step: the Jacobian, its blocks, and the normal matrix."""
        priors = 3 * unknowns  # rows of the priors' terms, about
        return unknowns * (2 * (equations + priors) + 5 * unknowns)

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        scored = problem.value(v)
        zero = torch.zeros_like(scored.match)
        return {
            "damping": zero + self.damping,
            "weight": zero + torch.inf,  # of the priors; infinite until the first Jacobian tells the units
            "determined": zero,  # directions that the data determine, at the last weight
            "fell": zero + 1,  # the match, by the last step, as a factor
            "match": scored.match,
            "prior": scored.objective - scored.match,
            "still": zero,  # steps in a row that led nowhere
            "accepted": zero > 0,
            "start": tree.flatten(v) if self.only_if_solved is not None else zero,
        }

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        x = tree.flatten(v)
        n = x.shape[0]

        def residual(x: Tensor) -> tuple[Tensor, Tensor]:
            parts = problem.residual(tree.unflatten(x, v))
            priors = tree.flatten(parts["priors"]) if parts["priors"] else x.new_zeros(0)
            return tree.flatten(parts["match"]), priors

        match, prior = residual(x)
        m = match.shape[0]
        rows = self._rows(problem, v, x)  # (n, m + p)
        ours, theirs = rows[:, :m], rows[:, m:]
        normal = gram(ours)
        weight = torch.ones_like(state["weight"])
        if prior.shape[0]:
            curvature = gram(theirs)
            weight = self._weight(state, normal, curvature, m)
            normal = normal + weight * curvature
        diagonal = normal.diagonal()
        diagonal = diagonal + 1e-9 * diagonal.max()

        def scored(at: Tensor) -> Tree:
            trial = problem.project(tree.unflatten(at, v))
            value = problem.value(trial)
            return {"x": tree.flatten(trial), "match": value.match, "prior": value.objective - value.match}

        def slope(match: Tensor, prior: Tensor) -> Tensor:
            return ours @ match + weight * (theirs @ prior)

        before = state["match"] + weight * state["prior"]
        damping, taken = state["damping"], torch.zeros_like(before, dtype=torch.bool)
        point = {"x": x, "match": state["match"], "prior": state["prior"]}
        downhill = slope(match, prior)
        cholesky = torch.zeros_like(normal)
        for _ in range(self.tries):
            factor, _ = torch.linalg.cholesky_ex(normal + torch.diag_embed(damping * diagonal))
            trial = scored(x - solved(factor, downhill))
            better = ~taken & (trial["match"] + weight * trial["prior"] < before)  # false where anything is NaN
            point = tree.where(better, trial, point)
            cholesky = torch.where(taken, cholesky, factor)
            taken = taken | better
            damping = torch.where(better, damping / self.ease, torch.where(taken, damping, damping * self.stiffen))
        for _ in range(self.chords):
            trial = scored(point["x"] - solved(cholesky, slope(*residual(point["x"]))))
            lower = trial["match"] + weight * trial["prior"] < point["match"] + weight * point["prior"]
            point = tree.where(taken & lower, trial, point)
        damping = damping.clamp(1e-15, MOST_DAMPING)
        determined = n - weight * _trace(cholesky, theirs) if prior.shape[0] else torch.zeros_like(before)

        after = point["match"] + weight * point["prior"]
        small = (before - after) < STILL * before
        settled = weight > 0.5 * state["weight"]  # the weight of the priors falls no further
        state = {
            "damping": damping,
            "weight": weight,
            "determined": determined.nan_to_num(0.0).clamp(0.0, float(n)),  # NaN where nothing could be factorised
            "fell": point["match"] / state["match"],
            "match": point["match"],
            "prior": point["prior"],
            "still": torch.where((small | ~taken) & settled, state["still"] + 1, 0.0),
            "accepted": taken,
            "start": state["start"],
        }
        here = tree.unflatten(point["x"], v)
        return here, state, Scored(here, point["match"] + point["prior"], point["match"])

    def _rows(self, problem: LaneObjective, v: Tree, x: Tensor) -> Tensor:
        """The derivative of all terms, in float32 if `single`."""
        if self.single:
            problem, v = problem.single(), tree.to(v, None, torch.float32)

        def terms(x: Tensor) -> Tensor:
            parts = problem.residual(tree.unflatten(x, v))
            return torch.cat([tree.flatten(parts["match"]), *tree.leaves(parts["priors"])])

        return jacobian(terms, tree.flatten(v), self.block or x.shape[0]).to(x.dtype)

    def _weight(self, state: Tree, normal: Tensor, curvature: Tensor, equations: int) -> Tensor:
        """The weight of the priors in this step: lower than in the last one, if that was accepted."""
        if self.homotopy is None:
            return torch.ones_like(state["weight"])
        start = self.homotopy.start * normal.diagonal().sum() / curvature.diagonal().sum().clamp_min(1e-300)
        # If the match falls faster than the schedule, the prior would only slow it down.
        factor = state["fell"].clamp(max=self.homotopy.fall)
        fallen = torch.where(state["accepted"], factor * state["weight"], state["weight"])
        floor = self.homotopy.floor(state["match"], state["prior"], state["determined"], equations)
        return torch.minimum(torch.maximum(fallen, floor), torch.minimum(start, state["weight"]))

    def final(self, v: Tree, state: Tree) -> Tree:
        if self.only_if_solved is None:
            return v
        return tree.where(state["match"] < self.only_if_solved, v, tree.unflatten(state["start"], v))

    def finished(self, state: Tree) -> Tensor:
        """Solved, or two steps in a row at the final weight without progress."""
        return (state["match"] < self.solved) | (state["still"] >= 2)


def _trace(factor: Tensor, rows: Tensor) -> Tensor:
    """trace(R^T (L L^T)^-1 R) from a few probes with random signs; its relative error falls with the size."""
    drawn = signs("trace", PROBES * rows.shape[1], rows.device, rows.dtype)
    probes = rows @ drawn.reshape(rows.shape[1], PROBES)  # (n, probes)
    return torch.linalg.solve_triangular(factor, probes, upper=False).square().sum() / PROBES
