"""Resumable training of a generator on public images, in a folder. trainer.py defines a step.

The folder: prior.toml, metrics.jsonl, state.safetensors, samples/step-1000.png, samples.png, generator.safetensors.
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradleak import __version__
from gradleak.core.configuration import from_toml, to_toml
from gradleak.core.files import load_state, save_state
from gradleak.core.folder import Interrupted, ResumableFolder
from gradleak.core.settings import takes
from gradleak.core.tree import Params
from gradleak.generators.files import Card, fingerprints, parameters, save
from gradleak.generators.stages import Staged
from gradleak.generators.stylegan2 import StyleGAN2
from gradleak.priors.recipes import PriorError, PriorTraining
from gradleak.priors.score import Features, Scored, found_features
from gradleak.priors.trainer import GANTrainer

VERSION = 2  # version 1 trained wrongly in half precision (steps used casts of the first weights): it is not continued
KEEP_EVERY = 60.0  # seconds between two states on disk: what a killed process loses at most. Ctrl-C loses nothing.


@dataclass(frozen=True, eq=False)
class TrainedPrior:
    """The result of a training. `metrics`: one dict per line of metrics.jsonl; `step`: that of the chosen average."""

    generator: Staged
    card: Card
    metrics: list[dict[str, Any]]
    folder: Path
    path: Path
    step: int

    def table(self) -> str:
        """The lines with a score; the chosen one is marked."""
        name = str(self.card.score.get("name", ""))
        rows = [row for row in self.metrics if row.get("score") is not None]
        lines = [f"{'step':>9}{'images':>12}   {name or 'no score was asked for'}"]
        for row in rows:
            mark = "   kept" if row["step"] == self.step else ""
            lines.append(f"{row['step']:>9,}{row['images']:>12,}   {row['score']:.2f}{mark}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class PriorRun:
    """What a generator is trained on, for how long, and what is measured and stored.

    x, y          public images, (N, C, H, W) in [0, 1], and their classes if `training.conditional`
    steps         to do in all; the same call with the same folder continues where that one stopped
    most_seconds  of this call, which may end before `steps`, with sheet, score and file; None: no limit
    every         steps between two sample sheets and scores; the last step always has both
    report        steps between two lines of metrics.jsonl
    score_images  generated for a score; 0: no score
    features      of the score; None: `score.found_features`
    half          store the generator in half precision
    card          the data's part of the file's card; `train` fills in fingerprints, training and score
    origin        how the command line found the data
    """

    training: PriorTraining
    x: Tensor
    y: Tensor | None = None
    _: KW_ONLY
    classes: int | None = None
    steps: int
    most_seconds: float | None = None
    out: str | Path
    every: int = 1000
    report: int = 100
    score_images: int = 2048
    features: Features | None = None
    device: torch.device | str = "cpu"
    half: bool = True
    card: Card = field(default_factory=Card)
    origin: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.every < 1 or self.report < 1 or self.score_images < 0 or self.score_images == 1:
            raise PriorError("steps, every and report must be at least 1; score_images 0, or at least 2.")


@takes(PriorRun)
def train(run: PriorRun) -> TrainedPrior:
    """Train until `steps` steps are done in all. The same call with the same folder continues an interrupted one.

    The file gets the average of weights with the lowest score, of every `every`-th step and the last: a training on
    few images can get worse, and one that ends by time ends anywhere. Scores use the training images only. Without
    scores it gets the last average. `PriorRun` lists the arguments.
    """
    trainer = GANTrainer(run.training, run.x, run.y, run.classes, torch.device(run.device))
    features = None if not run.score_images else run.features or found_features(trainer.device)
    folder, path = _PriorFolder(Path(run.out)), Path(run.out) / "generator.safetensors"
    settings = _settings(run, trainer, features)
    card = replace(run.card, images=fingerprints(run.x))
    rows: list[dict[str, Any]] = []
    try:
        state = folder.open(settings)
        if state is not None:
            trainer.restore(*state)
        if trainer.step > run.steps:
            raise PriorError(f"{run.out} is at step {trainer.step} already, beyond {run.steps}. Ask for more steps.")
        rows = folder.trimmed("metrics.jsonl", lambda row: row["step"] <= trainer.step)
        scored = None if features is None else Scored.of(features, trainer.x, run.score_images)
        began, saved_at = time.perf_counter(), time.monotonic()
        spent = rows[-1]["seconds"] if rows else 0.0

        def line(due: bool) -> None:
            row = {"step": trainer.step, "images": trainer.step * run.training.batch, **trainer.means()}
            if broken := [name for name, value in row.items() if value is None]:
                raise PriorError(
                    f"The training diverged before step {trainer.step}: {broken[0]} is not finite. Begin again in "
                    "another folder with a lower --lr or a larger --r1."
                )
            if due:
                row["score"] = scored(trainer.samples(run.score_images, "score")) if scored else None
                # Not where a call ends by time: an uninterrupted training has no score there.
                if row["score"] is not None and trainer.step % run.every == 0:
                    trainer.remember(row["score"])
                trainer.show()
                folder.write(f"samples/step-{trainer.step}.png", trainer.sheet())
                folder.write("samples.png", trainer.history())
            row["seconds"] = round(spent + time.perf_counter() - began, 3)
            folder.append("metrics.jsonl", [row])
            rows.append(row)
            if run.progress is not None:
                run.progress(row)

        with _deferred() as stop, trainer.settled():
            try:
                ended = trainer.step == run.steps
                while not ended:
                    trainer.advance()
                    late = run.most_seconds is not None and time.perf_counter() - began >= run.most_seconds
                    ended = trainer.step == run.steps or late
                    due = trainer.step % run.every == 0 or ended
                    if due or trainer.step % run.report == 0:
                        line(due)
                    if time.monotonic() - saved_at >= KEEP_EVERY:
                        folder.keep(trainer)
                        saved_at = time.monotonic()
                    if stop():
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                if trainer.whole:  # else weights are between two steps, and the last state on disk has to do
                    folder.keep(trainer)
                where = f"{folder.step()} of {run.steps:,} steps are kept in {run.out}; the same call goes on"
                raise Interrupted(f"Interrupted: {where}.") from None
            folder.keep(trainer)
        step, value = trainer.step, next((row.get("score") for row in rows if row["step"] == trainer.step), None)
        if trainer.best is not None and (value is None or trainer.best.score < value):
            step, value = trainer.best.step, trainer.best.score
            trainer.average.load_state_dict(trainer.best.weights)
        if isinstance(trainer.average, StyleGAN2):
            trainer.average.centre()
        score: dict[str, Any] = {}
        if scored is not None and value is not None:
            score = {"value": round(value, 4), "step": step, **scored.description}
        about = {**run.training.settings, "steps": trainer.step, "images": trainer.step * run.training.batch}
        about |= {"seconds": rows[-1]["seconds"] if rows else 0.0, "weights": parameters(trainer.average)}
        card = replace(card, training={**about, "gradleak": __version__, "device": trainer.where}, score=score)
        save(trainer.average, path, card, half=run.half)
    finally:
        folder.close()
    return TrainedPrior(trainer.average, card, rows, Path(run.out), path, step)


def _settings(run: PriorRun, trainer: GANTrainer, features: Features | None) -> dict[str, Any]:
    """Everything that determines the weights."""
    x, y = trainer.x, trainer.y
    pixels = hashlib.sha256(fingerprints(x).numpy().tobytes()).hexdigest()[:16]
    labels = hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest()[:16] if y is not None else None
    shape = list(x.shape[1:])
    settings = {
        "version": VERSION,
        "gradleak": __version__,
        "origin": dict(run.origin),
        "training": run.training.settings,
        "data": {"count": len(x), "shape": shape, "classes": trainer.classes, "pixels": pixels, "labels": labels},
        "score": {} if features is None else {"name": features.score, "made": run.score_images},
    }
    return from_toml(to_toml(settings))  # so that it compares equal to what is read back


class _PriorFolder(ResumableFolder):
    """prior.toml, metrics.jsonl, state.safetensors and the images."""

    work = "training of a generator"
    config = "prior.toml"
    free = ("gradleak", "origin.")

    def open(self, settings: dict[str, Any]) -> tuple[dict[str, Any], Params] | None:
        """Lock a folder that is new or holds the same training. Returns the state to continue from, if any."""
        self.lock()
        if not self.holds(settings):
            self.demand_empty()
        self.write("prior.toml", to_toml(settings, f"A generator trained by gradleak {__version__}."))
        return load_state(self.state, PriorError) if self.state.exists() else None

    @property
    def state(self) -> Path:
        return self.path / "state.safetensors"

    def step(self) -> int:
        """Number of steps of the state on disk."""
        return int(load_state(self.state, PriorError)[0]["step"]) if self.state.exists() else 0

    def keep(self, trainer: GANTrainer) -> None:
        save_state(self.state, *trainer.state())


@contextmanager
def _deferred() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of a step, whose halves belong together. Gives a function: was it pressed?

    Pressed twice, it raises at once. Outside the main thread signals cannot be caught, and nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
