"""What `gradleak analyse` was asked for, and the study that it makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.audit.cells import defence_of
from gradleak.cli.loading import LoadError, images, is_reference, kept_in, numbers, training_data
from gradleak.cli.request import BUILTIN, task_of
from gradleak.cli.training import BUILTIN_DATA
from gradleak.core.listeners import Progress
from gradleak.curvature.study import Information, Lanczos, Study, StudyResult
from gradleak.engine import Engine
from gradleak.federation.checkpoints import Checkpoints

RHO, RELEASES = Information.rho, Information.releases  # where nothing was said


@dataclass(frozen=True)
class StudyRequest:
    """The options of `gradleak analyse`."""

    reference: str = ""  # FILE.py:name, the name of a model, or nothing
    data: str = ""
    trained: Path | None = None  # the folder of a training, whose checkpoints are analysed
    rounds: str = ""
    audits: tuple[Path, ...] = ()
    examples: int = 100
    lanczos: Lanczos = Lanczos()
    gauss_newton: bool = False
    information: bool = False
    defence: str = "none"
    rho: float = RHO
    releases: int = RELEASES
    engine: Engine = Engine()

    def study(self) -> Study:
        if self.defence != "none" and not self.information:
            raise LoadError("--defence says what clients release, which only --information looks at: give both.")
        for option, given, usual in (("--rho", self.rho, RHO), ("--releases", self.releases, RELEASES)):
            if given != usual and not self.information:
                raise LoadError(f"{option} {given} is a setting of --information, which was not asked for: give both.")
        asked = Information(defence_of(self.defence), self.rho, self.releases) if self.information else None
        trained, origin, held = self._found()
        return Study(
            task_of(origin["task"], held),
            held,
            trained,
            () if self.rounds in ("", "all") else numbers(self.rounds, "--rounds"),
            self.examples,
            self.lanczos,
            self.gauss_newton,
            asked,
            self.engine,
            origin,
        )

    def run(self, planned: Study, out: Path | None, progress: Progress) -> StudyResult:
        """Run into `out`; without it into the folder of these words or, if that holds another one, the next."""

        def run(folder: Path) -> StudyResult:
            return planned.run(folder, audits=self.audits, progress=progress)

        return kept_in(out, self.folder, run, "analysis", progress)

    @property
    def folder(self) -> Path:
        """Where the analysis is kept when nothing was said: the same words find, and resume, the same one."""
        if self.trained is not None:
            return Path("runs") / f"analysis-{self.trained.name}"
        place = self.reference.rpartition(":")[0] if is_reference(self.reference) else self.reference
        return Path("runs") / f"analysis-{Path(place or self.reference or BUILTIN).stem}"

    def _found(self) -> tuple[Checkpoints | None, dict[str, Any], Any]:
        """The checkpoints, where task and data are found, and the data."""
        if self.trained is None:
            if self.reference and not self.data:
                raise LoadError(
                    f"Say on which images {self.reference} is analysed: --data NAME, a folder, an .npz file or "
                    "FILE.py:name (gradleak data list shows the names); or name a training with --from."
                )
            origin = {"task": self.reference or BUILTIN, "data": self.data or BUILTIN_DATA}
            return None, origin, images(origin["data"])
        trained = Checkpoints(self.trained)
        there: dict[str, Any] = trained.settings.get("origin") or {}
        if "data" in there and self.data:
            raise LoadError(f"--from takes the data that {self.trained} was trained on: leave --data out.")
        reference, data = self.reference or there.get("task", ""), there.get("data") or self.data
        if not reference or not data:
            raise LoadError(
                f"{self.trained} does not say where its task and data are found: the training was started from Python. "
                "Name them: gradleak analyse FILE.py:task --data FILE.py:data --from ..."
            )
        held = training_data(there)[0] if "data" in there else images(data)
        return trained, {**there, "task": reference, "data": data, "trained": str(self.trained)}, held
