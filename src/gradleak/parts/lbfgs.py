"""L-BFGS with a line search per lane.

One engine step is ONE evaluation of the objective and its gradient, for every lane. Each lane then either accepts its
trial point and takes a new direction, or moves its bracket. No lane waits for another, and the number of gradient
evaluations is exactly the number of steps.

Direction: the compact form of the inverse BFGS matrix, H g = gamma g + [S, gamma Y] M [S, gamma Y]^T g: small
triangular systems instead of two loops over the history. Line search: bisection on the weak Wolfe conditions.

References: Byrd, Nocedal, Schnabel, Mathematical Programming 63, 1994; Lewis and Overton, Mathematical Programming
141, 2013. Differs from torch.optim.LBFGS, which the code of the DLG family uses with lr 1 and no line search: that one
has a single step length for all tensors of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.tree import Tree
from gradleak.parts.optimisers import Schedule, constant, require_positive
from gradleak.parts.protocols import LaneObjective, Optimiser, Scored
from gradleak.parts.view import Step
from gradleak.scenario.task import float32_products


@dataclass(frozen=True, kw_only=True)
class LBFGS(Optimiser):
    """Quasi-Newton search with a line search per lane.

    history     pairs kept
    tries       trial points per line search before it starts over without history
    lr          length of a search's first trial, in units of the quasi-Newton step; `schedule` multiplies it
    rates       unit of a named unknown: with 10 it moves as if its gradient were 100 times as large
    every       a named unknown moves only in every so many line searches
    """

    steps: int = 300
    history: int = 20
    armijo: float = 1e-4
    wolfe: float = 0.9
    tries: int = 20
    lr: float = 1.0
    schedule: Schedule = constant
    rates: Mapping[str, float] = field(default_factory=dict)
    every: Mapping[str, int] = field(default_factory=dict)
    graphable: bool = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "history", "tries"), real=("lr",))

    def entries(self, unknowns: int, equations: int) -> int:
        """Numbers that a lane holds at the peak of a step: the pairs, old and new."""
        return 6 * self.history * unknowns

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        x = tree.flatten(v) / self._units(v)
        scalar, square = x.new_zeros(()), x.new_zeros((self.history, self.history))
        return {
            "x": x,  # the last accepted point, (n,)
            "value": scalar + torch.inf,
            "match": scalar + torch.inf,
            "gradient": torch.zeros_like(x),
            "direction": torch.zeros_like(x),
            "slope": scalar,  # gradient . direction
            "length": scalar,
            "low": scalar,
            "high": scalar + torch.inf,
            "tries": scalar,
            "searches": scalar,
            # The pairs (s, y), in a ring: `head` is the slot written next, `held` how many slots count. The products
            # between them are kept, so that a step reads the two long tables once and never multiplies them.
            "moves": x.new_zeros((self.history, x.shape[0])),  # S
            "turns": x.new_zeros((self.history, x.shape[0])),  # Y
            "overlap": square,  # s_i . y_j
            "gram": square.clone(),  # y_i . y_j
            "head": torch.zeros((), dtype=torch.long, device=x.device),
            "held": torch.zeros((), dtype=torch.long, device=x.device),
        }

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        units = self._units(v)
        trial = tree.flatten(v) / units
        gradient_tree, scored = problem.value_and_grad(v)
        value, gradient = scored.objective, tree.flatten(gradient_tree) * units
        length, slope = state["length"], state["slope"]
        first = torch.isinf(state["value"])  # the very first evaluation has nothing to compare with
        sound = value.isfinite() & gradient.isfinite().all()
        value_or_worst = torch.where(sound, value, torch.inf)
        safe_gradient = torch.where(sound, gradient, 0.0)

        too_far = ~first & ~(value_or_worst <= state["value"] + self.armijo * length * slope)
        too_near = ~first & ~too_far & ((safe_gradient * state["direction"]).sum() < self.wolfe * slope)
        exhausted = ~first & (too_far | too_near) & (state["tries"] + 1 >= self.tries)
        # Out of tries: a point that descends is accepted, otherwise the search starts over from the last point.
        accept = first | ~(too_far | too_near) | (exhausted & ~too_far)
        restart = exhausted & ~accept

        x = torch.where(accept, trial, state["x"])
        last_value = torch.where(accept, value_or_worst, state["value"])
        last_match = torch.where(accept, scored.match, state["match"])
        last_gradient = torch.where(accept, safe_gradient, state["gradient"])

        with float32_products():  # curvature is a difference of gradients: TF32 would round it away
            pairs, along, across = self._remember(state, trial, safe_gradient, accept & ~first, restart, last_gradient)
            turned = self._direction(last_gradient, pairs, along, across)
        fresh = accept | restart
        searches = state["searches"] + fresh.to(x.dtype)
        moving = self._moving(v, searches - 1)
        turned = turned * moving
        downhill = (turned * last_gradient).sum() < 0
        turned = torch.where(downhill & turned.isfinite().all(), turned, -last_gradient * moving)
        # Without curvature the first step has length one in the norm; after a failed search, much less.
        size = tree.safe_sqrt(last_gradient.square().sum()).clamp_min(1e-20)
        unit = torch.where(restart, 1e-3, 1.0) * torch.minimum(1 / size, torch.ones_like(size))

        low = torch.where(fresh, 0.0, torch.where(too_near, length, state["low"]))
        high = torch.where(fresh, torch.inf, torch.where(too_far, length, state["high"]))
        within = torch.where(high.isinf(), 2 * length, 0.5 * (low + torch.where(high.isinf(), low, high)))
        direction = torch.where(fresh, turned, state["direction"])
        begin = torch.where(pairs["held"] == 0, unit, torch.ones_like(unit)) * (self.lr * self.schedule(now))
        begin = begin.clamp_min(1e-12)  # a bracket that starts at zero could never widen
        length = torch.where(fresh, begin, within)
        state = {
            "x": x,
            "value": last_value,
            "match": last_match,
            "gradient": last_gradient,
            "direction": direction,
            "slope": (last_gradient * direction).sum(),
            "length": length,
            "low": low,
            "high": high,
            "tries": torch.where(fresh, 0.0, state["tries"] + 1),
            "searches": searches,
            **pairs,
        }
        # A trial point that is not finite is no diverged lane: report the last sound value.
        reported = Scored(
            tree.where(sound, v, tree.unflatten(x * units, v)),
            torch.where(sound, scored.objective, last_value),
            torch.where(sound, scored.match, last_match),
        )
        return problem.project(tree.unflatten((x + length * direction) * units, v)), state, reported

    def final(self, v: Tree, state: Tree) -> Tree:
        """The last accepted point: v is the next trial point."""
        return tree.unflatten(state["x"] * self._units(v), v)

    def _units(self, v: Tree) -> Tensor | float:
        """The unit of every entry: the search runs in v / unit, so that all unknowns have about the same size."""
        return self._spread(v, self.rates) if self.rates else 1.0

    def _moving(self, v: Tree, search: Tensor) -> Tensor | float:
        """1 for entries that move in this line search, else 0."""
        due = {name: (torch.remainder(search, interval) == 0).to(search.dtype) for name, interval in self.every.items()}
        return self._spread(v, due) if due else 1.0

    def _spread(self, v: Tree, values: Mapping[str, Any]) -> Tensor:
        """One number per named variable (1 for the others) as one per entry, in the order of `tree.flatten`."""
        return torch.cat([torch.ones_like(tree.flatten({name: v[name]})) * values.get(name, 1.0) for name in v])

    def _remember(
        self, state: Tree, trial: Tensor, gradient: Tensor, accept: Tensor, restart: Tensor, last_gradient: Tensor
    ) -> tuple[Tree, Tensor, Tensor]:
        """Write the pair (s, y) over the oldest, where it has positive curvature. A restart forgets all pairs.

        Returns the pairs, and the products of S and Y with the last gradient: each table is read once.
        """
        s, y = trial - state["x"], gradient - state["gradient"]
        curved = (s * y).sum() > 1e-10 * tree.safe_sqrt(s.square().sum()) * tree.safe_sqrt(y.square().sum())
        keep = accept & curved
        head = state["head"]
        here = (torch.arange(self.history, device=s.device) == head) & keep  # one slot, or none
        moves = torch.where(here[:, None], s, state["moves"])
        turns = torch.where(here[:, None], y, state["turns"])
        with_moves = moves @ torch.stack([y, last_gradient], dim=1)  # (m, 2)
        with_turns = turns @ torch.stack([s, y, last_gradient], dim=1)  # (m, 3)
        here_row, column = here[:, None], with_moves[:, :1]
        count = torch.where(keep, (state["held"] + 1).clamp(max=self.history), state["held"])
        pairs = {
            "moves": moves,
            "turns": turns,
            "overlap": torch.where(here_row, with_turns[:, 0], torch.where(here, column, state["overlap"])),
            "gram": torch.where(here_row, with_turns[:, 1], torch.where(here, with_turns[:, 1:2], state["gram"])),
            "head": torch.where(keep, (head + 1) % self.history, head),
            "held": torch.where(restart, 0, count),
        }
        return pairs, with_moves[:, 1], with_turns[:, 2]

    def _direction(self, gradient: Tensor, pairs: Tree, along: Tensor, across: Tensor) -> Tensor:
        """-H g, with S^T g and Y^T g given. Small systems are solved in the order of time; unused slots add nothing."""
        moves, turns, head = pairs["moves"], pairs["turns"], pairs["head"]
        slots = torch.arange(self.history, device=gradient.device)
        order = (head + slots) % self.history  # oldest first
        used = slots >= self.history - pairs["held"]
        square = used[:, None] & used
        overlap = torch.where(square, _permuted(pairs["overlap"], order), 0.0)
        gram = torch.where(square, _permuted(pairs["gram"], order), 0.0)
        along = torch.where(used, along.index_select(0, order), 0.0)
        across = torch.where(used, across.index_select(0, order), 0.0)
        diagonal = overlap.diagonal()
        upper = overlap.triu() + torch.diag_embed((~used).to(overlap.dtype))
        newest = gram[-1, -1]
        gamma = torch.where(newest > 0, diagonal[-1] / torch.where(newest > 0, newest, 1.0), 1.0)
        p = torch.linalg.solve_triangular(upper, along[:, None], upper=True)[:, 0]  # R^-1 S^T g
        weights = diagonal * p + gamma * (gram @ p) - gamma * across
        q = torch.linalg.solve_triangular(upper.T, weights[:, None], upper=False)[:, 0]
        back = (slots - head) % self.history  # from the order of time to the slots
        p, q = p.index_select(0, back), q.index_select(0, back)
        return -(gamma * gradient + q @ moves - gamma * (p @ turns))


def _permuted(table: Tensor, order: Tensor) -> Tensor:
    return table.index_select(0, order).index_select(1, order)
