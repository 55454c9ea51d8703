"""What an audit will cost, measured on a few real steps before a long run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.attack import Composed
from gradleak.audit.store import Folder
from gradleak.core.durations import about

if TYPE_CHECKING:
    from gradleak.audit import Audit
    from gradleak.audit.cells import Cell


@dataclass(frozen=True)
class Estimate:
    """About how much work a run is. `seconds` is None where none of its attacks can be timed in part."""

    cells: int
    lanes: int  # of all cells together
    steps: int  # lanes times steps: gradient evaluations
    seconds: float | None
    where: str = "this machine"
    untimed: int = 0  # cells that are not in `seconds`
    kept: int = 0  # cells that the folder already holds; in none of the other numbers

    def __str__(self) -> str:
        kept = f" ({self.kept} more are kept from before)" if self.kept else ""
        cells = f"{self.cells} cell{'s' * (self.cells != 1)}"
        work = f"{cells}{kept}, {self.lanes} reconstructions, {self.steps:,} lane steps"
        if self.seconds is None:
            return f"{work}; the time cannot be told before."
        rest = f", and {self.untimed} cells whose time cannot be told before" if self.untimed else ""
        return f"{work}: {about(self.seconds)} on {self.where}, by a few timed steps{rest}."


def estimate(audit: Audit, out: str | Path | None = None) -> Estimate:
    """Time each attack for a few steps on real observations; defences and later rounds are taken to cost the same.

    Cells that the folder `out` already holds are left out. Training for later rounds is not in it.
    """
    done = set() if out is None else {row["cell"] for row in Folder(Path(out)).rows() if row["status"] == "done"}
    planned = audit.cells()
    cells = [cell for cell in planned if cell.key not in done]
    updates = audit.targets + audit.unrelated
    lanes = [updates * (getattr(cell.attack, "restarts", None) or 1) for cell in cells]  # None: as many as it takes
    steps = [_steps(cell.attack) * cell.repeats for cell in cells]  # every round is predicted in every step
    kinds = [(cell.attack_name, cell.federation.examples) for cell in cells]
    timed: dict[tuple[str, int | None], float | None] = {}
    for kind, cell in zip(kinds, cells, strict=True):
        if kind not in timed:
            ahead = sum(own for own, other in zip(steps, kinds, strict=True) if other == kind)
            timed[kind] = _per_step(audit, cell, ahead)
    per_step = [timed[kind] for kind in kinds]
    seconds = [own * step for own, step in zip(steps, per_step, strict=True) if step is not None]
    return Estimate(
        len(cells),
        sum(lanes),
        sum(own * count for own, count in zip(steps, lanes, strict=True)),
        sum(seconds) if seconds or not cells else None,
        str(audit.engine.where),
        len(cells) - len(seconds),
        len(planned) - len(cells),
    )


def _steps(attack: Any) -> int:
    """Gradient evaluations of a lane."""
    return attack.evaluations if isinstance(attack, Composed) else 0


def _per_step(audit: Audit, cell: Cell, ahead: int) -> float | None:
    """Seconds of one step of all lanes: the difference of two short runs, so that their preparation cancels.

    Each is the best of three, since whatever else a machine does only ever makes a run slower. A trial, and a run with
    no more steps `ahead` than that takes, is over sooner than that would be: there each is run once.
    """
    if not isinstance(cell.attack, Composed):
        return None
    # A captured graph pays off only after its warm-up, so a GPU is timed over more steps.
    short, long = (20, 60) if audit.engine.where.type == "cuda" else (2, 6)
    victims = audit.side.victims(cell.federation, None, 0, (0,), cell.seed)
    seen = [*victims.seen, *victims.unrelated]
    knows = replace(cell.knows, defence=None, given=victims.given(cell.given))
    taken = {short: float("inf"), long: float("inf")}
    for steps in (short, long) * (1 if audit.trial or ahead <= 3 * (short + long) else 3):
        attack = shortened(cell.attack, steps)
        began = time.perf_counter()
        attack.run(audit.task, seen, knows, engine=audit.engine)
        taken[steps] = min(taken[steps], time.perf_counter() - began)
    return max(0.0, taken[long] - taken[short]) / ((long - short) * len(cell.attack.stages))


def shortened(attack: Composed, steps: int) -> Composed:
    """The same attack with so many steps in each stage."""
    stages = [replace(stage, optimiser=replace(stage.optimiser, steps=steps)) for stage in attack.stages]  # type: ignore[type-var]
    return replace(attack, stages=tuple(stages))
