"""Can this task be attacked, and by which attacks? One answer for `gradleak check` and for every audit.

An audit refuses what the check refuses, in the same words and before any work. A line is one of

    runs                  with a cost: closed form, seconds, minutes or hours for one target
    needs ...             knowledge that the threat model does not grant
    unsupported: ...      why this attack cannot attack this task
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gradleak.attack import Attack, no_gradients, too_many
from gradleak.core import registry
from gradleak.identify.ledger import Ledger, ledger
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.inspection import Examination, inspect
from gradleak.scenario.task import Batch, Problem, Task

RUNS, NEEDS, UNSUPPORTED = "runs", "needs", "unsupported"
CLOSED, UNKNOWN = "closed form", "cost not known beforehand"
COSTS = ((60.0, "seconds"), (3600.0, "minutes"), (float("inf"), "hours"))
WORDS = {"training": "the client's recipe", "public": "public data", "y": "labels"}


@dataclass(frozen=True)
class Line:
    """What one attack can do: a status, why or how, and its cost."""

    attack: str
    status: str
    text: str = ""

    def __str__(self) -> str:
        if self.status == UNSUPPORTED:
            return f"{UNSUPPORTED}: {self.text}"
        return f"{self.status} {self.text}" if self.status == NEEDS else f"{self.status} ({self.text})"


@dataclass(frozen=True)
class Preflight:
    """The findings about the task, a line for every attack, and what the spans of its layers tell (None: errors)."""

    examination: Examination
    lines: tuple[Line, ...]
    spans: Ledger | None = None

    @property
    def errors(self) -> tuple[Problem, ...]:
        """What no attack can cope with."""
        return self.examination.errors

    @property
    def passed(self) -> bool:
        """Can any attack run?"""
        return not self.errors and any(line.status != UNSUPPORTED for line in self.lines)

    @property
    def refusal(self) -> str:
        """Why nothing, or not all of these attacks, can run; empty if they can. The same words everywhere."""
        if self.errors:
            return "; ".join(f"{UNSUPPORTED}: {error.what} -> {error.fix}" for error in self.errors)
        refused = [line for line in self.lines if line.status == UNSUPPORTED]
        return "; ".join(f"{UNSUPPORTED}: {line.attack} cannot attack this task: {line.text}" for line in refused)

    def demand(self) -> None:
        """Refuse before any work."""
        if reason := self.refusal:
            raise UnsupportedTask(f"{reason}.{_advice(self)}")


def preflight(
    task: Task,
    attacks: Iterable[tuple[str, Attack]] | None = None,
    *,
    batch: Batch | None = None,
    granted: Collection[str] = ("training",),
    examples: int | None = 1,
    training: LocalTraining | None = None,
) -> Preflight:
    """Examine the task, and ask every attack.

    attacks   (name, attack); None: every registered one
    batch     examples of the auditor's own, checked against the fields
    granted   what the threat model grants: "training", "generator", "public" and names of fields
    examples  in an update; None: any number
    training  the clients' recipe; None: any
    """
    known = {*granted, *(name for name, field in task.fields.items() if field.public)}
    examination = inspect(task, batch, fewest=examples)
    if attacks is None:
        attacks = [(entry.name, registry.get("attack", entry.name)) for entry in registry.entries("attack")]
    if examination.errors:  # an attack could only repeat them
        return Preflight(examination, ())

    def refusal(attack: Attack) -> str:
        reason = attack.refuses(task, known) or no_gradients(attack, training)
        return reason or too_many(attack, examples, task, training)

    lines = [
        _line(name, refusal(attack), attack.needs_on(examples) - known, (examination, attack.work_on(examples)))
        if isinstance(attack, Attack)
        else Line(name, RUNS, UNKNOWN)  # anything else with a name, needs and run is taken at its word
        for name, attack in attacks
    ]
    return Preflight(examination, tuple(lines), ledger(task))


def _line(name: str, reason: str, missing: Collection[str], cost: tuple[Examination, int | None]) -> Line:
    if reason:
        return Line(name, UNSUPPORTED, reason)
    if missing:
        return Line(name, NEEDS, " and ".join(WORDS.get(each, f"a {each}") for each in sorted(missing)))
    examination, work = cost
    if work == 0:
        return Line(name, RUNS, CLOSED)
    if work is None or examination.seconds is None:
        return Line(name, RUNS, UNKNOWN)
    return Line(name, RUNS, next(word for most, word in COSTS if work * examination.seconds < most))


def _advice(result: Preflight) -> str:
    able = [line.attack for line in result.lines if line.status == RUNS]
    if result.errors:
        return ""
    return f" Attacks that can: {', '.join(able)}." if able else " `gradleak check` lists every attack."
