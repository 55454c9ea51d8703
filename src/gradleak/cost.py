"""What an audit will cost, measured on a few real steps before a long run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradleak.attack import Composed

if TYPE_CHECKING:
    from gradleak.audit import Audit
    from gradleak.cells import Cell


@dataclass(frozen=True)
class Estimate:
    """About how much work a run is. `seconds` is None where no attack of it can be timed in part."""

    cells: int
    lanes: int  # of all cells together
    steps: int  # lanes times steps: gradient evaluations
    seconds: float | None
    where: str = "this machine"

    def __str__(self) -> str:
        work = f"{self.cells} cells, {self.lanes} reconstructions, {self.steps:,} lane steps"
        if self.seconds is None:
            return f"{work}; the time cannot be told before."
        minutes = f"{self.seconds / 60:.0f} minutes" if self.seconds >= 120 else f"{self.seconds:.0f} seconds"
        return f"{work}: about {minutes} on {self.where}, by a few timed steps."


def estimate(audit: Audit) -> Estimate:
    """Time each attack for a few steps on real observations; defences and later rounds are taken to cost the same.

    Counts all cells, also those that a folder already holds. Training for later rounds is not in it.
    """
    cells = audit.cells()
    updates = audit.targets + audit.unrelated
    lanes = steps = 0
    seconds: float | None = 0.0
    per_step: dict[str, float | None] = {}
    for cell in cells:
        own = _steps(cell.attack)
        lanes += updates * getattr(cell.attack, "restarts", 1)
        steps += updates * getattr(cell.attack, "restarts", 1) * own
        name = f"{cell.attack_name} {cell.federation.examples}"
        if name not in per_step:
            per_step[name] = _per_step(audit, cell)
        step = per_step[name]
        seconds = None if seconds is None or step is None else seconds + own * step
    return Estimate(len(cells), lanes, steps, seconds, str(audit.engine.where))


def _steps(attack: Any) -> int:
    return sum(stage.optimiser.steps for stage in attack.stages) if isinstance(attack, Composed) else 0


def _per_step(audit: Audit, cell: Cell) -> float | None:
    """Seconds of one step of all lanes: the difference of two short runs, so that their preparation cancels."""
    if not isinstance(cell.attack, Composed):
        return None
    # A captured graph pays off only after its warm-up, so a GPU is timed over more steps.
    short, long = (20, 60) if audit.engine.where.type == "cuda" else (2, 6)
    victims = audit.side.victims(cell.federation, None, 0, (0,), cell.seed)
    seen, knows = [*victims.seen, *victims.unrelated], replace(cell.knows, defence=None)
    taken = []
    for steps in (short, long):
        attack = _shortened(cell.attack, steps)
        began = time.perf_counter()
        attack.run(audit.task, seen, knows, engine=audit.engine)
        taken.append(time.perf_counter() - began)
    return max(0.0, taken[1] - taken[0]) / ((long - short) * len(cell.attack.stages))


def _shortened(attack: Composed, steps: int) -> Composed:
    stages = [replace(stage, optimiser=replace(stage.optimiser, steps=steps)) for stage in attack.stages]  # type: ignore[type-var]
    return replace(attack, stages=tuple(stages))
