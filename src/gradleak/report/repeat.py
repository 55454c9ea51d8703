"""How to repeat a run: the command, its settings, the environment, and the papers behind its methods."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.core import registry
from gradleak.report.limits import members_run

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult, Row

HIDDEN = ("plan", "fields")  # bookkeeping of run.toml, of no use to a reader


@dataclass(frozen=True)
class Reference:
    """The source of a method that was run."""

    name: str
    status: str
    paper: str


@dataclass(frozen=True)
class Repetition:
    """The command that repeats a run, with its settings and environment as names and texts."""

    command: str
    settings: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]


def repetition(result: AuditResult) -> Repetition:
    """How to repeat this run."""
    settings = {name: value for name, value in result.settings.items() if name not in HIDDEN}
    return Repetition(command(result), tuple(_flat(settings)), tuple(_flat(result.environment)))


def command(result: AuditResult) -> str:
    """The command line, with a path relative to the current folder if the run is below it."""
    folder = result.folder or Path("run")
    if folder.is_absolute() and folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    again = folder.with_name(f"{folder.name}-again")
    return shlex.join(["gradleak", "audit", "--config", str(folder / "run.toml"), "--out", str(again)])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as `name.inner` and text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{name}", "none" if value is None else str(value)


def references(grid: Iterable[Row]) -> Iterator[Reference]:
    """The papers behind the attacks and defences that were run, and behind the threat levels."""
    grid = list(grid)
    used = {("attack", str(row["attack"])) for row in grid} | {("attack", name) for name in members_run(grid)}
    used |= {("defence", part) for row in grid for part in str(row["defence"]).split(" + ")}
    names = sorted({(kind, name.partition(":")[0]) for kind, name in used if name != "none"})
    for kind, name in names:
        known = next((entry for entry in registry.entries(kind) if entry.name == name), None)
        if known is not None:
            yield Reference(name, known.status, known.paper or known.summary)
    yield Reference(
        "threat levels",
        "taxonomy",
        "Carletti et al., SoK: Gradient Inversion Attacks in Federated Learning, USENIX Security 2025",
    )
