"""Settings that many attacks share, as dataclasses to inherit from."""

from __future__ import annotations

from dataclasses import dataclass

from gradleak.attack import Composed
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.optimisers import Schedule, StepDecay, constant
from gradleak.parts.stage import Stage


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Every search: the number of starts, the rule for the labels, and the iterate to return."""

    restarts: int = 1
    labels: str = "auto"
    keep: str = "best_match"

    def attack(self, name: str, *stages: Stage, output: str = "last_stage") -> Composed:
        """The attack of these stages."""
        fields = Labels(label_rule(self.labels))
        return Composed(name, stages, fields, restarts=self.restarts, keep=self.keep, output=output)


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(SearchSettings):
    """A search that matches an update of many local steps: Adam, with SME's rate and schedule."""

    steps: int = 1000
    lr: float = 1.0
    decay: bool = True

    @property
    def schedule(self) -> Schedule:
        """With `decay`, rates are times 0.1 at 3/8, 5/8 and 7/8 of the steps."""
        return StepDecay() if self.decay else constant
