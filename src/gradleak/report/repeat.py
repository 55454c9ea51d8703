"""How to repeat a run: the command, its exact settings, the environment, and where the methods come from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.report.limits import members_run

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult, Row

HIDDEN = ("plan", "fields")  # bookkeeping of run.toml that tells a reader nothing


@dataclass(frozen=True)
class Reference:
    """Where a method that was run comes from."""

    name: str
    status: str
    paper: str


def command(result: AuditResult) -> str:
    """With the path of the run as it was given, below the current folder where it can be."""
    folder = result.folder or Path("run")
    if folder.is_absolute() and folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    again = folder.with_name(f"{folder.name}-again")
    return shlex.join(["gradleak", "audit", "--config", str(folder / "run.toml"), "--out", str(again)])


def settings(result: AuditResult) -> tuple[tuple[str, str], ...]:
    """The settings of the run, flat, without the bookkeeping that tells a reader nothing."""
    return tuple(flat({name: held for name, held in result.settings.items() if name not in HIDDEN}))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as `name.inner` and text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{name}", "none" if value is None else str(value)


def references(grid: Iterable[Row]) -> Iterator[Reference]:
    """The papers behind the attacks and defences that were run, and behind the threat levels."""
    from gradleak.core import registry

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
