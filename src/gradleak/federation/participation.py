"""Who takes part in a round: all clients, a fixed number without replacement, or each with a probability.

Privacy amplification by sampling holds for `Poisson`, not for `Fixed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from gradleak.core.registry import BadSetting, named
from gradleak.federation.partition import FederationError, demand_number


class Participation(Protocol):
    """Chooses the clients of one round; the generator is that round's own."""

    @property
    def name(self) -> str: ...

    def chosen(self, clients: int, generator: torch.Generator) -> list[int]: ...

    def fraction(self, clients: int) -> float:
        """The expected share of the clients in a round."""
        ...


@dataclass(frozen=True)
class Everyone:
    """All clients, in every round."""

    name: ClassVar[str] = "all"

    def chosen(self, clients: int, generator: torch.Generator) -> list[int]:
        return list(range(clients))

    def fraction(self, clients: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Fixed:
    """`number` clients per round, uniformly without replacement."""

    number: int
    name: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        demand_number("number of fixed", self.number, int, 1)

    def chosen(self, clients: int, generator: torch.Generator) -> list[int]:
        if self.number > clients:
            raise FederationError(f"{self.number} clients per round cannot be chosen from {clients}.")
        return sorted(torch.randperm(clients, generator=generator)[: self.number].tolist())

    def fraction(self, clients: int) -> float:
        return self.number / clients


@dataclass(frozen=True)
class Poisson:
    """Each client with probability `rate`, independently; a round may have none."""

    rate: float
    name: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        demand_number("rate of poisson", self.rate, float, 0, 1)
        if self.rate == 0:
            raise BadSetting("rate of poisson must be above 0: with 0 nobody ever takes part.")

    def chosen(self, clients: int, generator: torch.Generator) -> list[int]:
        drawn = torch.rand(clients, generator=generator, dtype=torch.float64) < self.rate
        return drawn.nonzero().flatten().tolist()

    def fraction(self, clients: int) -> float:
        return self.rate


for _kind in (Everyone, Fixed, Poisson):
    named(_kind.name, kind="participation", status="")(_kind)
