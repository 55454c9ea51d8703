"""The experiment. SKELETON: the interface holds; bodies follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gradleak.attack import Attack
from gradleak.defence import Defence
from gradleak.engine import Engine
from gradleak.federation import Federation
from gradleak.results import AuditResult, Row
from gradleak.task import Task


class Progress(Protocol):
    """What an audit tells while it runs. Subclass `Silent` and override what you show."""

    def start(self, total_cells: int) -> None: ...
    def cell(self, cell: Cell, index: int) -> None: ...  # index counts from 0; finished cells of an earlier run come as finished()
    def share(self, fraction: float) -> None: ...  # of the cell that runs
    def finished(self, cell: Cell, rows: Sequence[Row]) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    def start(self, total_cells: int) -> None: ...
    def cell(self, cell: Cell, index: int) -> None: ...
    def share(self, fraction: float) -> None: ...
    def finished(self, cell: Cell, rows: Sequence[Row]) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True, eq=False)
class Cell:
    attack: Attack
    defence: Defence | None
    form: str
    round: int
    seed: int
    federation: Federation
    attack_name: str
    defence_name: str
    key: str
    control: bool = False  # only the positive control, not part of the grid


@dataclass(frozen=True)
class Estimate:
    """What a run will cost, about. str() is one readable line or two."""

    cells: int
    lanes: int
    steps: int
    seconds: float | None  # None: cannot be told before


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; the message says what is kept and how to resume."""


@dataclass(frozen=True, eq=False)
class Audit:
    task: Task
    data: Any
    attacks: Sequence[str | Attack]
    defences: Sequence[str | Defence | None] = (None,)
    federation: Federation = Federation()
    rounds: Sequence[int] = (0,)
    targets: int = 8
    seeds: Sequence[int] = (0,)
    knowledge: Sequence[str] = ("naive", "masked", "adaptive")
    engine: Engine = Engine()
    lpips: Any = None
    gallery: Any = None
    analyses: Sequence[Any] = ()
    unrelated: int = 2  # updates of other examples attacked beside the targets: the no-gradient baseline
    origin: Mapping[str, str] = field(default_factory=dict)  # where the CLI found task and data: goes into run.toml [origin]

    def cells(self) -> list[Cell]: raise NotImplementedError
    def settings(self) -> dict[str, Any]: raise NotImplementedError  # what run.toml holds
    def run(self, out: str | Path | None = None, *, progress: Progress | None = None, resume: bool = True) -> AuditResult: raise NotImplementedError


def estimate(audit: Audit) -> Estimate: raise NotImplementedError
def builtin(targets: int = 8) -> Audit: raise NotImplementedError
def from_settings(settings: Mapping[str, Any], *, task: Task, data: Any, gallery: Any = None) -> Audit: raise NotImplementedError  # from run.toml
# errors a command line should print as they stand: store.FolderInUse, store.BadRun, AuditError (all ValueError)
