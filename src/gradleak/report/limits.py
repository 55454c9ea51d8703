"""What was not tested. An audit that does not say this misleads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gradleak.auto import MEMBERS
from gradleak.core import registry
from gradleak.report.grid import plural

if TYPE_CHECKING:
    from gradleak.audit.result import Row, Summary

FLOOR = 150  # targets times seeds that a published claim needs


def untested(grid: Sequence[Row], summaries: Sequence[Summary]) -> Iterator[str]:
    """What a reader might believe to be covered and is not."""
    rounds = sorted({int(row["round"]) for row in grid})
    sizes = sorted({int(row["examples"]) for row in grid})
    yield "Active servers, which change weights, plant traps in the model or pick clients: they see more."
    yield "Other leakage than reconstruction, such as who took part (membership) or properties of the data as a whole."
    yield from _idle(grid)
    if not any(row["defence"] != "none" for row in grid):
        yield "Any defence."
    elif not any(row["defence"] == "none" for row in grid):
        yield "The same client without a defence, as the reference: add none to the defences."
    informed = {row["form"] for row in grid if row["defence"] != "none"}
    if informed and "adaptive" not in informed:
        yield "Attackers who know the defence: a defence that only stops those who do not know it does not protect."
    if rounds == [0]:
        yield "Trained models: only round 0 was attacked, and leakage changes with training."
    if sizes:
        yield f"Batches of other sizes than {', '.join(map(str, sizes))}."
    if not any(str(row.get("knows", "")).startswith(("D", "E")) for row in grid):
        yield "Attackers with data or generators like the clients' (levels D and E): they recover more."
    if not any(line.trained is not None and line.trained.test_accuracy is not None for line in summaries):
        yield "Utility: the quality of the attacked model was not measured, so the cost of a defence is unknown."
    count = max((summary.targets * summary.seeds for summary in summaries), default=0)
    if count < FLOOR:
        yield f"Enough targets for a published claim: this run has {count} per line; use 50 targets x 3 seeds."
    yield "A longer search: more steps, more restarts or a better attack may find more."


def _idle(grid: Sequence[Row]) -> Iterator[str]:
    """Attacks of this version that did not run. Members of `auto` ran if its rows say so."""
    used = {_name(row) for row in grid} | members_run(grid)
    silent = {str(row["attack"]) for row in grid if _name(row) == "auto" and not row.get("tried")}
    perhaps = set(_members(silent)) - used
    known = [entry.name for entry in registry.entries("attack")]
    if idle := [name for name in known if name not in used | perhaps]:
        yield f"{plural(len(idle), 'attack')} that this version has: {', '.join(idle)}."
    if listed := [name for name in known if name in perhaps]:
        yield (
            "Those members of auto that do not apply to this set-up. It chooses among "
            f"{', '.join(listed)}; which of them it ran is not recorded in this run."
        )


def members_run(grid: Iterable[Row]) -> set[str]:
    """Attacks that `auto` ran, by the optional entry `tried` of its rows: [{"attack", "outcome", ...}]."""
    members = [each for row in grid for each in row.get("tried") or () if isinstance(each, Mapping)]
    return {str(each.get("attack")) for each in members if each.get("outcome") == "ran"}


def _name(row: Row) -> str:
    return str(row["attack"]).partition(":")[0]


def _members(attacks: Iterable[str]) -> Iterator[str]:
    """What `auto` may run with the preset in its name."""
    for attack in attacks:
        stated = re.search(r"\bpreset=['\"]?(\w+)", attack)
        preset = stated[1] if stated else registry.entry("attack", "auto").settings["preset"]
        yield from (member.attack for member in MEMBERS if preset in member.presets)
