"""What `gradleak audit --observations` was asked for, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.audit import default_attacks
from gradleak.audit.cells import defence_of
from gradleak.audit.recorded import Recorded, RecordedAudit, blind, privacy_of, read, replay_text, replays
from gradleak.cli.loading import LoadError, counted, images, kept_in, task
from gradleak.core.listeners import Progress
from gradleak.engine import Engine
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge

if TYPE_CHECKING:
    from gradleak.scenario.task import Task


@dataclass(frozen=True)
class RecordedRequest:
    """The options of `gradleak audit --observations`."""

    observations: Path
    reference: str  # FILE.py:task
    truth: Path | None = None
    attacks: tuple[str, ...] = ()
    defences: tuple[str, ...] = ()
    rounds: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    data: str = ""  # images that are no client's
    given: tuple[str, ...] = ()
    training: LocalTraining | None = None
    engine: Engine = Engine()
    quick: bool = False

    def __post_init__(self) -> None:
        if not self.reference:
            raise LoadError("--observations needs the task of the model that was sent: --task FILE.py:task.")
        if len(self.defences) > 1:
            raise LoadError(f"Clients used one defence when they were recorded; given {', '.join(self.defences)}.")
        if self.quick:
            raise LoadError("--quick is for audits that make their own updates; here give attacks few steps instead.")
        if self.truth is not None and self.training is None:
            raise LoadError("--truth needs the clients' recipe, for the replay check and the positive control: --lr.")
        if self.truth is not None and not self.data:
            raise LoadError(
                "--truth needs real images that are no client's, among which reconstructions are looked up: --data "
                "NAME, a folder, an .npz file or FILE.py:name."
            )

    @property
    def task(self) -> Task:
        return task(self.reference)

    @property
    def folder(self) -> Path:
        """Where the run is kept when nothing was said."""
        return Path("runs") / f"audit-{self.observations.resolve().name}"

    def heading(self, task: Task, recorded: Sequence[Recorded]) -> list[str]:
        """What is known before anything is attacked."""
        known = sum(one.truth is not None for one in recorded)
        lines = [f"{counted(len(recorded), 'observation')} in {self.observations}, {known} with their examples."]
        lines += [f"Privacy of the recorded strategy: {line}" for line in privacy_of(self.observations)]
        if self.training is not None and known:
            lines.append(replay_text(replays(task, recorded, self.training, self._defence), recorded, self.training))
        return lines

    @property
    def _defence(self) -> Any:
        return defence_of(self.defences[0]) if self.defences else None

    def read(self, task: Task) -> list[Recorded]:
        return read(self.observations, task, self.truth, self.rounds)

    def methods(self, task: Task, recorded: Sequence[Recorded]) -> tuple[str, ...]:
        sizes = {one.seen.num_examples for one in recorded}
        examples = sizes.pop() if len(sizes) == 1 else None
        return self.attacks or default_attacks(self.engine, task, examples, self.training)

    def audit(self, task: Task, recorded: Sequence[Recorded]) -> RecordedAudit:
        """Of the observations whose examples are known."""
        assert self.training is not None
        planned = RecordedAudit.of(
            task,
            recorded,
            self.methods(task, recorded),
            self.training,
            images(self.data),
            defence=self.defences[0] if self.defences else None,
            engine=self.engine,
        )
        origin = {"task": self.reference, "observations": str(self.observations), "gallery": self.data}
        return replace(planned, seeds=self.seeds or (0,), given=self.given, origin=origin)

    def blind(self, task: Task, recorded: Sequence[Recorded], out: Path | None, progress: Progress) -> Any:
        """Of observations without examples: findings, and the folder they are in."""
        knows = Knowledge(training=self.training, defence=self._defence)
        home = out or self.folder
        seed = self.seeds[0] if self.seeds else 0
        return blind(
            task, recorded, self.methods(task, recorded), knows, home, seed=seed, engine=self.engine, progress=progress
        ), home

    def run(self, planned: RecordedAudit, out: Path | None, progress: Progress, **how: Any) -> Any:
        return kept_in(out, self.folder, lambda place: planned.run(place, progress=progress, **how), "run", progress)
