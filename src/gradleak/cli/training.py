"""What `gradleak train` was asked for, and the training that it makes of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradleak.audit.cells import defence_of
from gradleak.audit.private import Read, Stored, examples_of
from gradleak.cli.loading import LoadError, is_reference, kept_in, training_data
from gradleak.cli.request import BUILTIN, task_of
from gradleak.core.durations import Estimate
from gradleak.core.listeners import Progress
from gradleak.diffusion import Denoising, SharedDraws
from gradleak.engine import Engine
from gradleak.federation import ExcludedClient, Federation
from gradleak.federation.checkpoints import Checkpoints
from gradleak.federation.samples import Samples
from gradleak.federation.training import Trained, demand_rounds, estimate, train
from gradleak.scenario.defence import Defence
from gradleak.scenario.task import Task

BUILTIN_DATA = "digits"  # the only embedded set with enough images for a network to learn from
HOLDOUT = 0.1  # of the data, for the test accuracy, where no test data are named


@dataclass(frozen=True, eq=False)
class Planned:
    """A training, ready to run."""

    task: Task
    data: Stored | Read
    test: Stored | Read | None
    federation: Federation
    defence: Defence | None
    engine: Engine
    rounds: int
    checkpoints: tuple[int, ...]
    every: int
    origin: dict[str, Any]
    samples: Samples | None = None

    def estimate(self, folder: Path) -> Estimate:
        """How long what is left will take; rounds that the folder holds are not counted."""
        done = Checkpoints(folder).done if (folder / "training.toml").exists() else 0
        left = max(0, self.rounds - done)
        return estimate(self.federation, self.task, self.data, left, self.defence, self.engine)

    def run(self, folder: Path, progress: Progress) -> Trained:
        """Train into the folder, telling how far it is and who was left out."""

        def told(row: dict[str, Any]) -> None:
            progress.share(row["round"] / self.rounds)

        with _noted(progress):
            return train(
                self.federation,
                self.task,
                self.data,
                self.rounds,
                defence=self.defence,
                test=self.test,
                every=self.every,
                checkpoints=self.checkpoints,
                out=folder,
                engine=self.engine,
                progress=told,
                origin=self.origin,
                samples=self.samples,
            )


@dataclass(frozen=True)
class TrainingRequest:
    """The options of `gradleak train`."""

    federation: Federation
    reference: str = ""  # FILE.py:name, the name of a model, or nothing
    data: str = ""
    test_data: str = ""
    holdout: float | None = None
    size: int | None = None  # images are cropped and resized to
    shared: bool = False  # the server draws the steps and noise of a denoiser's clients
    samples: int = 8  # pictures of a denoiser at every checkpoint
    rounds: int = 20
    checkpoints: tuple[int, ...] = ()
    every: int = 1
    defence: str = "none"
    engine: Engine = Engine()

    def planned(self) -> Planned:
        if self.test_data and self.holdout:
            raise LoadError("--test-data and --holdout both say what is tested on: give one of them.")
        if self.reference and not self.data:
            raise LoadError(
                f"Say which images {self.reference} is trained on: --data NAME, a folder, an .npz file or FILE.py:name "
                "(gradleak data list shows the names)."
            )
        demand_rounds(self.rounds, self.every, self.checkpoints)
        holdout = 0.0 if self.test_data else HOLDOUT if self.holdout is None else self.holdout
        origin: dict[str, Any] = {"task": self.reference or BUILTIN, "data": self.data or BUILTIN_DATA}
        origin |= {"test": self.test_data} if self.test_data else {"holdout": holdout}
        origin |= {} if self.size is None else {"size": self.size}
        held, tested = training_data(origin)
        task = task_of(origin["task"], held)
        denoiser = isinstance(task.objective, Denoising)
        if self.shared and (not denoiser or self.defence != "none"):
            raise LoadError("--shared-draws is for denoisers, and without --defence: the server hands out their noise.")
        return Planned(
            task,
            examples_of(held, task),
            None if tested is None else examples_of(tested, task, "test data"),
            self.federation,
            SharedDraws(self.federation.seed) if self.shared else defence_of(self.defence),
            self.engine,
            self.rounds,
            self.checkpoints,
            self.every,
            origin,
            Samples(self.samples) if denoiser and self.samples else None,
        )

    def run(self, planned: Planned, out: Path | None, progress: Progress) -> Trained:
        """Train into `out`; without it into the folder of these words or, if that holds another one, the next."""
        return kept_in(out, self.folder, lambda folder: planned.run(folder, progress), "training", progress)

    @property
    def folder(self) -> Path:
        """Where the training is kept when nothing was said: the same words find, and resume, the same one."""
        place = self.reference.rpartition(":")[0] if is_reference(self.reference) else self.reference.partition(":")[0]
        return Path("runs") / f"train-{Path(place or self.reference or BUILTIN).stem}"


@contextmanager
def _noted(progress: Progress) -> Iterator[None]:
    """Warnings, such as of a client that was left out, as notes of the progress display."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", ExcludedClient)
        warnings.showwarning = lambda message, *_, **__: progress.note(str(message))
        yield
