"""What is proved about a defence, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradleak.local import LocalTraining


@dataclass(frozen=True, eq=False)
class Exposure:
    """How often, and how, a client takes part: what an accountant has to add up.

    sampling     how the clients of a round are chosen: "all", "fixed" (so many, without replacement) or "poisson"
    """

    rounds: int = 1
    clients: int = 1
    participation: float = 1.0  # the share of the clients in a round; for "poisson" each one's probability
    sampling: str = "all"
    examples: int = 1  # that a client holds
    training: LocalTraining | None = None
    delta: float = 1e-5


@dataclass(frozen=True)
class Guarantee:
    """What is proved about a defence: an (epsilon, delta), or that there is no formal guarantee and why."""

    epsilon: float | None = None
    delta: float | None = None
    reason: str = "it was not designed to give one"

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"no formal guarantee ({self.reason})"
        return f"({self.epsilon:.3g}, {self.delta:.1g})-differential privacy"
