"""What an audit will cost, measured on a few real steps before a long run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.attack import Composed
from gradleak.audit.store import Folder
from gradleak.core.durations import Estimate, about

if TYPE_CHECKING:
    from gradleak.audit.cells import Cell
    from gradleak.audit.grid import Audit


def estimate(audit: Audit, out: str | Path | None = None) -> Estimate:
    """Time each attack for a few steps on real observations; defences and later rounds are assumed to cost the same.

    Cells that the folder `out` already holds are left out, and so is training for later rounds. `counts` has the cells
    to run, their lanes, lane steps (gradient evaluations), the cells without a time, and those kept in the folder.
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
            ahead = sum(number for number, other in zip(steps, kinds, strict=True) if other == kind)
            timed[kind] = _per_step(audit, cell, ahead)
    per_step = [timed[kind] for kind in kinds]
    parts = [number * step for number, step in zip(steps, per_step, strict=True) if step is not None]
    seconds = sum(parts) if parts or not cells else None
    counts = {
        "cells": len(cells),
        "lanes": sum(lanes),
        "steps": sum(number * count for number, count in zip(steps, lanes, strict=True)),
        "untimed": len(cells) - len(parts),
        "kept": len(planned) - len(cells),
    }
    return Estimate(_in_words(counts, seconds, str(audit.engine.where)), seconds, counts)


def _in_words(counts: dict[str, int], seconds: float | None, where: str) -> str:
    earlier = f" ({counts['kept']} more are kept from before)" if counts["kept"] else ""
    cells = f"{counts['cells']} cell{'s' * (counts['cells'] != 1)}"
    work = f"{cells}{earlier}, {counts['lanes']} reconstructions, {counts['steps']:,} lane steps"
    if seconds is None:
        return f"{work}; the time cannot be estimated."
    rest = f", and {counts['untimed']} cells whose time cannot be estimated" if counts["untimed"] else ""
    return f"{work}: {about(seconds)} on {where}, by a few timed steps{rest}."


def _steps(attack: Any) -> int:
    """Gradient evaluations of a lane."""
    return attack.evaluations if isinstance(attack, Composed) else 0


def _per_step(audit: Audit, cell: Cell, ahead: int) -> float | None:
    """Seconds of one step of all lanes: the difference of two short runs, so that their preparation cancels.

    Each is the best of three, since other work of the machine only makes a run slower. In a trial, or with no more
    steps `ahead` than that takes, each runs once.
    """
    if not isinstance(cell.attack, Composed):
        return None
    # A captured graph pays off only after its warm-up, so a GPU is timed over more steps.
    short, long = (20, 60) if audit.engine.where.type == "cuda" else (2, 6)
    victims = audit.side.victims(cell.federation, None, 0, (0,), cell.seed)
    observations = [*victims.seen, *victims.unrelated]
    knows = replace(cell.knows, defence=None, given=victims.given(cell.given))
    engine = replace(audit.engine, batched=audit.engine.batched and audit.preflight().batched)
    best = {short: float("inf"), long: float("inf")}
    for steps in (short, long) * (1 if audit.trial or ahead <= 3 * (short + long) else 3):
        attack = shortened(cell.attack, steps)
        began = time.perf_counter()
        attack.run(audit.task, observations, knows, engine=engine)
        best[steps] = min(best[steps], time.perf_counter() - began)
    return max(0.0, best[long] - best[short]) / ((long - short) * len(cell.attack.stages))


def shortened(attack: Composed, steps: int) -> Composed:
    """The same attack with `steps` steps in each stage."""
    stages = [replace(stage, optimiser=replace(stage.optimiser, steps=steps)) for stage in attack.stages]  # type: ignore[type-var]
    return replace(attack, stages=tuple(stages))
