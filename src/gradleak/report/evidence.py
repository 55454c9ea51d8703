"""The evidence sheet: assumptions, tests, results and limits on a page or two, for a data-protection assessment.

An assessment by Article 35 of the GDPR describes a processing, its risks to people and the measures against them. An
audit is evidence on one of these risks, that updates reveal the data they were computed on, and on what defences do
about it; it is not the assessment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradleak.report.grid import number, percent, plural

if TYPE_CHECKING:
    from gradleak.audit.result import Assumption, AuditResult, Row

RECOVERED = (
    "an image counts as recovered when SSIM is above 0.5, PSNR above 18 dB, and it is the nearest of a gallery of "
    "other real images to what was found"
)
RECIPE = ("lr", "optimiser", "steps", "epochs", "batch_size")


@dataclass(frozen=True)
class Part:
    """Terms, each with what is to be said of it."""

    name: str
    entries: tuple[tuple[str, tuple[str, ...]], ...]


def evidence(
    result: AuditResult,
    grid: Sequence[Row],
    assumptions: Sequence[Assumption],
    threat: str,
    untested: Sequence[str],
    command: str,
) -> tuple[Part, ...]:
    """What a reviewer asks for, gathered from the run: system, assumptions, tests, results, provenance."""
    parts = {
        "System": _system(result),
        "Assumptions": _assumptions(threat, assumptions),
        "Tests": _tests(result, grid),
        "Results": _results(result),
        "Provenance": _provenance(result, command),
    }
    told = [Part(name, tuple((term, (text,)) for term, text in entries)) for name, entries in parts.items()]
    return (*told[:-1], Part("Limits", (("not tested", tuple(untested)),)), told[-1])


def _system(result: AuditResult) -> Iterator[tuple[str, str]]:
    origin, federation = result.settings.get("origin") or {}, result.settings.get("federation") or {}
    for name in ("task", "data", "trained", "observations"):
        if name in origin:
            yield name, str(origin[name])
    recipe = federation.get("training") or {}
    told = [f"{name} {federation[name]}" for name in ("clients", "examples") if name in federation]
    told += [f"{name} {recipe[name]}" for name in RECIPE if recipe.get(name)]
    if told:
        yield "clients", ", ".join(told)
    trained = {line.round: line.trained for line in result.summaries if line.trained is not None}
    for round, held in sorted(trained.items()):
        yield f"model at round {round}", str(held)


def _assumptions(threat: str, assumptions: Sequence[Assumption]) -> Iterator[tuple[str, str]]:
    yield "threat model", threat
    for each in assumptions:
        word = each.granted if isinstance(each.granted, str) else "granted" if each.granted else "not granted"
        yield each.capability, f"{word}. {each.text}"


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
    worked = sum(line.optimised for line in lines)
    yield "searches", f"{worked} of {plural(len(lines), 'line')} ended well on 80 % of their targets or more"
    yield "measure", RECOVERED
    yield "control", result.positive_control.text
    if not result.complete:
        yield "incomplete", "some planned cells were not run"


def _results(result: AuditResult) -> Iterator[tuple[str, str]]:
    verdict = result.verdict
    yield "verdict", verdict.because or verdict.word
    for name, held in result.verdicts.items():
        own = [line for line in result.summaries if line.defence == name]
        proved = next((line.guarantee for line in own if line.guarantee is not None), None)
        told = f" Formal guarantee: {str(proved).partition(chr(10))[0]}." if proved is not None else ""
        yield "undefended" if name == "none" else name, f"{held.word}. {held.paragraph}{told}"
    worst = max((line for line in result.summaries if line.targets), key=lambda line: line.strength, default=None)
    if worst is not None:
        against = "undefended" if worst.defence == "none" else f"against {worst.defence}"
        clear = f"{number(worst.worst.get('psnr'))} dB at most, {percent(worst.recovered.value)} recovered"
        yield "strongest line", f"{worst}, {against}, round {worst.round}, B = {worst.examples}: {clear}"


def _provenance(result: AuditResult, command: str) -> Iterator[tuple[str, str]]:
    environment: dict[str, Any] = result.environment
    git = environment.get("git")
    commit = git.get("commit") if isinstance(git, dict) else environment.get("commit")
    changed = " with changes that were not committed" if isinstance(git, dict) and git.get("dirty") else ""
    for name, value in (
        ("run", result.folder.name if result.folder is not None else None),
        ("time", environment.get("time")),
        ("gradleak", environment.get("gradleak")),
        ("commit", f"{commit}{changed}" if commit else None),
        ("to repeat", command),
    ):
        if value:
            yield name, str(value)
