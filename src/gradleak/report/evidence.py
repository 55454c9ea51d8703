"""The evidence sheet: assumptions, tests, results and limits on a page or two, for a data-protection assessment.

An assessment under Article 35 of the GDPR describes a processing, its risks to people and the measures against them.
An audit is evidence on one of these risks, that updates reveal the data they were computed on, and on what defences do
about it. It is not the assessment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradleak.report import repeat
from gradleak.report.grid import labelled, percent, plural
from gradleak.report.words import Words

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult, Row
    from gradleak.report.page import Page

RECIPE = ("lr", "optimiser", "steps", "epochs", "batch_size")


@dataclass(frozen=True)
class Part:
    """A part of the sheet: terms, each with one or more texts."""

    name: str
    entries: tuple[tuple[str, tuple[str, ...]], ...]


def evidence(page: Page) -> tuple[Part, ...]:
    """What a reviewer needs, from the run: system, assumptions, tests, results, limits, provenance."""
    parts = {
        "System": _system(page.result),
        "Assumptions": _assumptions(page),
        "Tests": _tests(page.result, page.rows),
        "Results": _results(page.result),
        "Provenance": _provenance(page.result),
    }
    named = [Part(name, tuple((term, (text,)) for term, text in entries)) for name, entries in parts.items()]
    return (*named[:-1], Part("Limits", (("not tested", page.untested),)), named[-1])


def _system(result: AuditResult) -> Iterator[tuple[str, str]]:
    origin, federation = result.settings.get("origin") or {}, result.settings.get("federation") or {}
    for name in ("task", "data", "trained", "observations"):
        if name in origin:
            yield name, str(origin[name])
    recipe = federation.get("training") or {}
    clients = [f"{name} {federation[name]}" for name in ("clients", "examples") if name in federation]
    clients += [f"{name} {recipe[name]}" for name in RECIPE if recipe.get(name)]
    if clients:
        yield "clients", ", ".join(clients)
    models = {line.round: line.trained for line in result.summaries if line.trained is not None}
    for round, model in sorted(models.items()):
        yield f"model at round {round}", str(model)


def _assumptions(page: Page) -> Iterator[tuple[str, str]]:
    yield "threat model", page.threat
    for each in page.assumptions:
        yield each.capability, f"{each.word}. {each.text}"


def _tests(result: AuditResult, grid: Sequence[Row]) -> Iterator[tuple[str, str]]:
    def listed(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in grid))

    lines = result.summaries
    yield "attacks", listed("attack") or "none"
    yield "defences", listed("defence") or "none"
    yield "attackers", listed("form") or "none"
    sample = max(lines, key=lambda line: line.targets * line.seeds, default=None)
    if sample is not None:
        yield "sample", f"up to {plural(sample.targets, 'target')} x {plural(sample.seeds, 'seed')} for each line"
    converged = sum(line.optimised for line in lines)
    yield "searches", f"{converged} of {plural(len(lines), 'line')} converged on at least 80 % of the targets"
    yield "measure", Words(result.kind).recovered
    yield "control", result.positive_control.text
    if not result.complete:
        yield "incomplete", "some planned cells were not run"


def _results(result: AuditResult) -> Iterator[tuple[str, str]]:
    verdict = result.verdict
    yield "verdict", verdict.because or verdict.word
    for name, each in result.verdicts.items():
        guarantees = (line.guarantee for line in result.summaries if line.defence == name)
        proved = next((guarantee for guarantee in guarantees if guarantee is not None), None)
        text = f" Formal guarantee: {str(proved).partition(chr(10))[0]}." if proved is not None else ""
        yield "undefended" if name == "none" else name, f"{each.word}. {each.paragraph}{text}"
    worst = max((line for line in result.summaries if line.targets), key=lambda line: line.strength, default=None)
    if worst is not None:
        against = "undefended" if worst.defence == "none" else f"against {worst.defence}"
        clearest = labelled(measure := worst.kind.headline, worst.worst.get(measure.name))
        scored = f"{percent(worst.recovered.value)} recovered, clearest {worst.kind.noun[0]} {clearest}"
        yield "strongest line", f"{worst}, {against}, round {worst.round}, B = {worst.examples}: {scored}"


def _provenance(result: AuditResult) -> Iterator[tuple[str, str]]:
    environment: dict[str, Any] = result.environment
    git = environment.get("git")
    commit = git.get("commit") if isinstance(git, dict) else environment.get("commit")
    changed = " with changes that were not committed" if isinstance(git, dict) and git.get("dirty") else ""
    for name, value in (
        ("run", result.folder.name if result.folder is not None else None),
        ("time", environment.get("time")),
        ("gradleak", environment.get("gradleak")),
        ("commit", f"{commit}{changed}" if commit else None),
        ("to repeat", repeat.command(result)),
    ):
        if value:
            yield name, str(value)
