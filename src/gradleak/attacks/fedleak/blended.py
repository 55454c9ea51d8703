"""An optimiser that steers another one to flat places: it blends the gradient with the one a little uphill."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gradleak.core import tree
from gradleak.core.registry import did_you_mean
from gradleak.core.tree import Tree
from gradleak.parts.optimisers import FirstOrder
from gradleak.parts.protocols import LaneObjective, Optimiser, Scored, delegates
from gradleak.parts.view import Step

UNITS = ("norm", "rms")


@delegates("inner")
@dataclass(frozen=True)
class Blended(Optimiser):
    """(1 - lam) g(v) + lam g(v + phi) in place of the gradient g(v) of the objective, phi = gamma g / ||g||.

    To first order in gamma this is the gradient of objective + beta ||g||, beta = lam ||phi||, which would need one
    more order of derivatives: H g / ||g|| is (g(v + phi) - g(v)) / ||phi|| up to O(||phi||). phi is a constant. The
    first graph is freed before the second is built, so a step needs the memory of the inner optimiser's, and twice its
    time. lam = 1 is the step of sharpness-aware minimisation, lam = 0 the inner optimiser itself.

    inner   the optimiser that steps by the blended gradient: Adam and the like
    unit    of gamma. "norm": the length of phi; "rms": the root mean square of its entries, so that the length is
            gamma sqrt(entries), and one value fits images of any number and size
    of      the unknowns that phi moves, whose gradient is penalised. The blended gradient is that of all unknowns: the
            penalty depends on the others too

    The objective is the match with its priors. Nothing is clipped: v + phi may lie outside the box, and a gradient of
    zero makes a phi of zero.
    Reference: Fan, Wang, Chen, Zhou, USENIX Security 2025 (FEDLEAK).
    """

    inner: FirstOrder
    lam: float = 0.5
    gamma: float = 1.0
    unit: str = "norm"
    of: tuple[str, ...] = ("x",)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, FirstOrder):
            raise ValueError(
                f"A blended gradient is fed to a first-order optimiser, such as Adam; given {self.inner!r:.80}."
            )
        if not 0 <= self.lam <= 1:
            raise ValueError(f"lam must be in [0, 1]; given {self.lam}.")
        if not 0 < self.gamma < float("inf"):
            raise ValueError(f"gamma must be positive; given {self.gamma}. For no blending set lam=0.")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be 'norm' or 'rms'; given {self.unit!r}.{did_you_mean(str(self.unit), UNITS)}")
        if not self.of:
            raise ValueError("of is empty, so no unknown would move. For no blending set lam=0.")

    def sized(self, evaluations: int) -> Blended:
        return replace(self, inner=self.inner.sized(evaluations))  # type: ignore[arg-type]

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        for name in self.of:
            if name not in v:
                raise ValueError(
                    f"{type(self).__name__} moves {name!r}, which is not an unknown.{did_you_mean(name, v)}"
                )
        return self.inner.init(problem, v)

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        if self.lam == 0:
            return self.inner.step(problem, v, state, now)
        direction, scored = self.direction(problem, v)
        return self.inner.step(_Steered(problem, direction, scored), v, state, now)

    def direction(self, problem: LaneObjective, v: Tree) -> tuple[Tree, Scored]:
        """The blended gradient, and the score of the point itself."""
        here, scored = problem.value_and_grad(v)
        beside, _ = problem.value_and_grad({**v, **tree.add({name: v[name] for name in self.of}, self.shift(here))})
        return tree.map(lambda a, b: (1 - self.lam) * a + self.lam * b, here, beside), scored

    def shift(self, gradient: Tree) -> Tree:
        """phi, for the unknowns that it moves."""
        uphill = {name: gradient[name] for name in self.of}
        length = tree.norm(uphill)
        reach = self.gamma * (tree.size(uphill) ** 0.5 if self.unit == "rms" else 1.0)
        # `isnan`: a gradient that is not a number must not count as zero.
        nonzero = (length > 0) | length.isnan()
        return tree.scale(uphill, torch.where(nonzero, reach / torch.where(nonzero, length, 1.0), 0.0))


@delegates("problem")
@dataclass(frozen=True, eq=False)
class _Steered(LaneObjective):
    """A problem whose gradient at this point was computed elsewhere."""

    problem: LaneObjective
    gradient: Tree
    scored: Scored

    def value_and_grad(self, v: Tree) -> tuple[Tree, Scored]:
        return self.gradient, self.scored
