"""Levenberg-Marquardt for large inputs and networks: without a Jacobian matrix, for independent lanes.

At a point x, Golub-Kahan bidiagonalisation of the Jacobian J of the residual r gives J V_k = U_{k+1} B_k with
orthonormal V_k, U_{k+1} and r = beta_1 u_1, at the cost of one product with J and one with J^T for every vector. B_k
does not depend on the damping, so for ANY lambda the damped step is the small problem

    dx = -V_k y,   y = argmin ||beta_1 e_1 - B_k y||^2 + lambda ||B_k||^2 ||y||^2

and a rejected step costs no new product. lambda is relative to the (bound on the) largest Ritz value of J^T J, so it
does not depend on the scale of the residual or of the unknowns.

One engine step is ONE vector (both products) and ONE evaluation of the objective, for every lane. Each lane expands its
own space until the damped normal equations are solved to the forcing term, ||J^T (r + J dx) + lambda dx|| <= forcing
||J^T r||, or the space is full; then it tries. A trial that lowers the objective is the next x, whose first vector
comes in the same step: an outer iteration with k vectors takes k steps. A rejected one raises lambda.

References: Golub and Kahan, SIAM J. Numerical Analysis B 2, 1965; Paige and Saunders (LSQR), ACM TOMS 8, 1982; Simon
and Zha (why only V is reorthogonalised), SIAM J. Scientific Computing 21, 2000; Dembo, Eisenstat, Steihaug (forcing),
SIAM J. Numerical Analysis 19, 1982.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vjp

from gradleak.core import tree
from gradleak.core.tree import Tree
from gradleak.parts.optimisers import require_positive
from gradleak.parts.protocols import LaneObjective, Optimiser, Scored
from gradleak.parts.view import Step
from gradleak.scenario.task import float32_products

LEAST_DAMPING = 1e-13  # relative: below it the small normal equations have no digits left in float64


@dataclass(frozen=True, kw_only=True)
class GaussNewtonKrylov(Optimiser):
    """Matrix-free Levenberg-Marquardt with a Krylov space per lane. The objective must not change during the stage.

    steps       vectors, and evaluations, in total
    vectors     the most vectors of one space
    damping     lambda at the start, relative to the largest Ritz value
    fall, rise  lambda is divided by `fall` after an accepted step, multiplied by `rise` after a rejected one
    tries       rejected steps from one point before lambda and the space start over
    forcing     a space is large enough when the linear problem is solved to this share of the gradient
    """

    steps: int = 300
    vectors: int = 100
    damping: float = 1e-2
    fall: float = 5.0
    rise: float = 4.0
    tries: int = 10
    forcing: float = 0.1
    graphable: bool = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "vectors", "tries"), real=("damping", "fall", "rise", "forcing"))

    def entries(self, unknowns: int, equations: int) -> int:
        """Peak memory of a lane's step in numbers: the space and the left vector, old and new."""
        small = 12 * self.vectors**2  # matrices in float64
        return (3 * self.vectors + 10) * unknowns + 4 * equations + small

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        x = tree.flatten(v)
        count, scalar = min(self.vectors, x.shape[0]), x.new_zeros(())
        no = torch.zeros((), dtype=torch.bool, device=x.device)
        return {
            "x": x,  # the last accepted point, (n,)
            "value": scalar + torch.inf,
            "match": scalar + torch.inf,
            "damping": scalar + self.damping,
            "tries": scalar,
            "ready": no,  # v is the step of a space that is large enough
            "rest": scalar + torch.inf,  # beta_{k+1} |y_k|
            "full": no.clone(),  # no further vector: the most are there, or no direction remains
            # The space of J at x: V, the last u, and B. Slots from `held` on are empty, whatever their values.
            "held": torch.zeros((), dtype=torch.long, device=x.device),
            "right": x.new_zeros((count, x.shape[0])),  # V
            "left": tree.zeros_like(problem.residual(v)),  # u_{k+1}
            "first": scalar.clone(),  # beta_1
            "diagonal": x.new_zeros(count),  # alpha_1 ... alpha_k
            "below": x.new_zeros(count),  # beta_2 ... beta_{k+1}
        }

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        trial, scored = tree.flatten(v), problem.value(v)
        sound = scored.objective.isfinite() & scored.match.isfinite()
        begin = torch.isinf(state["value"])  # there is nothing to compare with yet
        lower = sound & (scored.objective < state["value"])
        accept = lower & (state["ready"] | begin)
        reject = state["ready"] & ~lower & ~begin
        tries = torch.where(accept, 0.0, state["tries"] + reject.to(trial.dtype))
        exhausted = reject & (tries >= self.tries)

        x = torch.where(accept, trial, state["x"])
        value = torch.where(accept, scored.objective, state["value"])
        match = torch.where(accept, scored.match, state["match"])
        eased = torch.where(accept & ~begin, state["damping"] / self.fall, state["damping"])
        damping = torch.where(reject, self.rise * eased, eased).clamp_min(LEAST_DAMPING)
        damping = torch.where(exhausted, self.damping, damping)

        space = self._expanded(problem, v, x, state, accept)
        move, rest = self._damped(space, damping)
        # After the last vector the residual of the normal equations is alpha_{k+1} beta_{k+1} |y_k|, which only this
        # vector shows: the space was large enough. Having tried once, a lane tries again at every step.
        remains, gradient = _newest(space, "diagonal") * state["rest"], space["first"] * space["diagonal"][0]
        solved = ~accept & (state["ready"] | (remains <= self.forcing * gradient))
        # A step that is not finite becomes the last point itself: rejected like any other, and no diverged lane.
        # Out of tries, the last point is evaluated again as a new beginning.
        stay = exhausted | ~move.isfinite().all()
        state = {
            "x": x,
            "value": torch.where(exhausted, torch.inf, value),
            "match": match,
            "damping": damping,
            "tries": torch.where(exhausted, 0.0, tries),
            "ready": solved | space["full"],
            "rest": rest,
            **space,
        }
        reported = Scored(
            tree.where(sound, v, tree.unflatten(x, v)),
            torch.where(sound, scored.objective, value),
            torch.where(sound, scored.match, match),
        )
        return problem.project(tree.unflatten(torch.where(stay, x, x + move), v)), state, reported

    def final(self, v: Tree, state: Tree) -> Tree:
        """The last accepted point: v is the next trial."""
        return tree.unflatten(state["x"], v)

    def _expanded(self, problem: LaneObjective, like: Tree, x: Tensor, state: Tree, fresh: Tensor) -> Tree:
        """The space with one more vector if there is room; a new space at a fresh point."""

        def residual(x: Tensor) -> Tree:
            return problem.residual(tree.unflatten(x, like))

        count = torch.where(fresh, 0, state["held"])
        right, slots = state["right"], torch.arange(state["right"].shape[0], device=x.device)
        used = slots < count
        diagonal, below = (torch.where(used, state[name], 0.0) for name in ("diagonal", "below"))

        at, pull = vjp(residual, x)[:2]
        first = _norm(at)
        left_vector = tree.where(count == 0, tree.scale(at, tree.safe_inverse(first)), state["left"])
        w = pull(left_vector)[0]
        with float32_products():
            for _ in range(2):  # the second pass removes rounding; beta_k v_{k-1} goes with the rest
                w = w - torch.where(used, right @ w, 0.0) @ right
        alpha = _norm({"": w})
        w = w * tree.safe_inverse(alpha)
        turned = tree.add(jvp(residual, (x,), (w,))[1], left_vector, -alpha)
        beta = _norm(turned)

        least = 10 * torch.finfo(x.dtype).eps * torch.maximum(diagonal, below).amax()
        grow = ~(state["full"] & ~fresh) & (alpha > least) & alpha.isfinite() & beta.isfinite()
        here = (slots == count) & grow
        count = count + grow.to(count.dtype)
        return {
            "held": count,
            "right": torch.where(here[:, None], w, right),
            "left": tree.where(grow, tree.scale(turned, tree.safe_inverse(beta)), left_vector),
            "first": torch.where(fresh, first, state["first"]),
            "diagonal": torch.where(here, alpha, diagonal),
            "below": torch.where(here, beta, below),
            "full": ~grow | (count >= slots.shape[0]) | ~(beta > least),
        }

    def _damped(self, space: Tree, damping: Tensor) -> tuple[Tensor, Tensor]:
        """The damped step in the space, and beta_{k+1} |y_k|.

        (B^T B + lambda I) y = alpha_1 beta_1 e_1, in float64 and with one step of refinement on the residual of the
        least-squares problem. B^T B is tridiagonal: its largest row sum is at most sqrt(3) times its largest value.
        """
        a, b, first = (space[name].double() for name in ("diagonal", "below", "first"))
        count, zero = a.shape[0], a.new_zeros(1)
        used = torch.arange(count, device=a.device) < space["held"]
        square, beside = a.square() + b.square(), a[1:] * b[:-1]  # the three diagonals of B^T B
        largest = (square + torch.cat([beside, zero]) + torch.cat([zero, beside])).amax()
        largest = torch.where(largest > 0, largest, 1.0)
        shift = damping.double() * largest
        normal = torch.diag_embed(torch.where(used, square + shift, largest))
        normal = normal + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
        factor = torch.linalg.cholesky_ex(normal)[0]

        def solve(side: Tensor) -> Tensor:
            half = torch.linalg.solve_triangular(factor, side[:, None], upper=False)
            return torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, 0]

        start = torch.cat([first[None], a.new_zeros(count)])  # beta_1 e_1
        y = solve(a * start[:-1])
        residual = start - torch.cat([a * y, zero]) - torch.cat([zero, b * y])
        y = y + solve(a * residual[:-1] + b * residual[1:] - shift * y)
        y = y.to(space["right"].dtype)
        with float32_products():
            move = -(y @ space["right"])
        return move, (_newest(space, "below") * _newest({**space, "y": y}, "y")).abs()


def _newest(space: Tree, name: str) -> Tensor:
    """The entry of the last vector held; 0 where there is none."""
    values: Tensor = space[name]
    return torch.where(torch.arange(values.shape[0], device=values.device) == space["held"] - 1, values, 0.0).sum()


def _norm(a: Tree) -> Tensor:
    """NaN where an entry is NaN, unlike `tree.norm`, which is made to be differentiated."""
    return tree.squared_norm(a).sqrt()
