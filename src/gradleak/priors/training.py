"""Training a generator on public images, in a folder that it goes on from. What a step does stands in game.py.

The folder: prior.toml, metrics.jsonl, state.safetensors, samples/step-1000.png, samples.png, generator.safetensors.
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradleak import __version__
from gradleak.core.configuration import from_toml, to_toml
from gradleak.core.files import load_state, save_state
from gradleak.core.folder import Interrupted, ResumableFolder
from gradleak.core.tree import Params
from gradleak.generators.files import Card, fingerprints, parameters, save
from gradleak.generators.stages import Staged
from gradleak.generators.stylegan2 import StyleGAN2
from gradleak.priors.recipes import PriorError, PriorTraining
from gradleak.priors.score import Features, Scored, found_features
from gradleak.priors.trainer import GANTrainer

VERSION = 2  # 1: in half precision, steps went by casts of the first weights; nothing goes on from that
KEEP_EVERY = 60.0  # seconds between two states on disk: what a killed process loses at most. Ctrl-C loses nothing.


@dataclass(frozen=True, eq=False)
class TrainedPrior:
    """What came of it. `metrics`: one dict per line of metrics.jsonl; `step`: the one whose average was kept."""

    generator: Staged
    card: Card
    metrics: list[dict[str, Any]]
    folder: Path
    path: Path
    step: int

    def table(self) -> str:
        """The lines with a score, and which of them was kept."""
        name = str(self.card.score.get("name", ""))
        rows = [row for row in self.metrics if row.get("score") is not None]
        lines = [f"{'step':>9}{'images':>12}   {name or 'no score was asked for'}"]
        for row in rows:
            kept = "   kept" if row["step"] == self.step else ""
            lines.append(f"{row['step']:>9,}{row['images']:>12,}   {row['score']:.2f}{kept}")
        return "\n".join(lines)


def train(
    training: PriorTraining,
    x: Tensor,
    y: Tensor | None = None,
    *,
    classes: int | None = None,
    steps: int,
    most_seconds: float | None = None,
    out: str | Path,
    every: int = 1000,
    report: int = 100,
    score_images: int = 2048,
    features: Features | None = None,
    device: torch.device | str = "cpu",
    half: bool = True,
    card: Card | None = None,
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> TrainedPrior:
    """Train until `steps` steps are done in all. The same call with the same folder goes on where that one stopped.

    What is kept is the average of weights with the lowest score, of every `every`-th step and the last: a training on
    few images can get worse, and one that ends by time ends anywhere. Scores know the training images only. Without
    scores it is the last.

    x, y          public images, (N, C, H, W) in [0, 1], and their classes where `training.conditional`
    most_seconds  of this call: then it ends before `steps`, with all that a last step has; None: no limit
    every         steps between two sample sheets and scores; the last step has both anyway
    report        steps between two lines of metrics.jsonl
    score_images  made for a score; 0: none
    features      of the score; None: those that are found (`score.found_features`)
    half          keep the generator in half precision
    card          what the file says of the data; its fingerprints, training and score are filled in here
    origin        how the command line found the data
    """
    if steps < 1 or every < 1 or report < 1 or score_images < 0 or score_images == 1:
        raise PriorError("steps, every and report must be at least 1; score_images 0, or at least 2.")
    game = GANTrainer(training, x, y, classes, torch.device(device))
    features = None if not score_images else features or found_features(game.device)
    score = {} if features is None else {"name": features.score, "made": score_images}
    folder, path = _PriorFolder(Path(out)), Path(out) / "generator.safetensors"
    settings = _settings(training, game, score, origin or {})
    card = replace(card or Card(), images=fingerprints(x))
    rows: list[dict[str, Any]] = []
    try:
        held = folder.open(settings)
        if held is not None:
            game.restore(*held)
        if game.step > steps:
            raise PriorError(f"{out} is at step {game.step} already, beyond {steps}. Ask for more steps.")
        rows = folder.trimmed("metrics.jsonl", lambda row: row["step"] <= game.step)
        scored = None if features is None else Scored.of(features, game.x, score_images)
        began, kept_at = time.perf_counter(), time.monotonic()
        spent = rows[-1]["seconds"] if rows else 0.0

        def line(due: bool) -> None:
            row = {"step": game.step, "images": game.step * training.batch, **game.means()}
            if broken := [name for name, value in row.items() if value is None]:
                raise PriorError(
                    f"The training diverged before step {game.step}: {broken[0]} is not finite. Begin again in another "
                    "folder with a lower --lr or a larger --r1."
                )
            if due:
                row["score"] = scored(game.samples(score_images, "score")) if scored else None
                if row["score"] is not None and game.step % every == 0:  # not the end of a part: a whole has none there
                    game.remember(row["score"])
                game.show()
                folder.write(f"samples/step-{game.step}.png", game.sheet())
                folder.write("samples.png", game.history())
            row["seconds"] = round(spent + time.perf_counter() - began, 3)
            folder.append("metrics.jsonl", [row])
            rows.append(row)
            if progress is not None:
                progress(row)

        with _deferred() as stop, game.settled():
            try:
                ended = game.step == steps
                while not ended:
                    game.advance()
                    late = most_seconds is not None and time.perf_counter() - began >= most_seconds
                    ended = game.step == steps or late
                    due = game.step % every == 0 or ended
                    if due or game.step % report == 0:
                        line(due)
                    if time.monotonic() - kept_at >= KEEP_EVERY:
                        folder.keep(game)
                        kept_at = time.monotonic()
                    if stop():
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                if game.whole:  # else weights are between two steps, and the last state on disk is what there is
                    folder.keep(game)
                where = f"{folder.step()} of {steps:,} steps are kept in {out}; the same call goes on"
                raise Interrupted(f"Interrupted: {where}.") from None
            folder.keep(game)
        step, value = game.step, next((row.get("score") for row in rows if row["step"] == game.step), None)
        if game.best is not None and (value is None or game.best.score < value):
            step, value = game.best.step, game.best.score
            game.average.load_state_dict(game.best.weights)
        if isinstance(game.average, StyleGAN2):
            game.average.centre()
        told = {} if scored is None or value is None else {"value": round(value, 4), "step": step, **scored.told}
        about = {**training.settings, "steps": game.step, "images": game.step * training.batch}
        about |= {"seconds": rows[-1]["seconds"] if rows else 0.0, "weights": parameters(game.average)}
        card = replace(card, training={**about, "gradleak": __version__, "device": game.where}, score=told)
        save(game.average, path, card, half=half)
    finally:
        folder.close()
    return TrainedPrior(game.average, card, rows, Path(out), path, step)


def _settings(
    training: PriorTraining, game: GANTrainer, score: Mapping[str, Any], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that determines the weights."""
    pixels = hashlib.sha256(fingerprints(game.x).numpy().tobytes()).hexdigest()[:16]
    labels = hashlib.sha256(game.y.cpu().numpy().tobytes()).hexdigest()[:16] if game.y is not None else None
    shape = list(game.x.shape[1:])
    data = {"count": len(game.x), "shape": shape, "classes": game.classes, "pixels": pixels, "labels": labels}
    told = {
        "version": VERSION,
        "gradleak": __version__,
        "origin": dict(origin),
        "training": training.settings,
        "data": data,
        "score": dict(score),
    }
    return from_toml(to_toml(told))  # so that it compares equal to what is read back


class _PriorFolder(ResumableFolder):
    """prior.toml, metrics.jsonl, state.safetensors and the pictures."""

    work = "training of a generator"
    config = "prior.toml"
    free = ("gradleak", "origin.")

    def open(self, settings: dict[str, Any]) -> tuple[dict[str, Any], Params] | None:
        """Make the folder ready: new, or holding the same training. Returns the state to go on from, if any."""
        self.lock()
        if not self.holds(settings):
            self.demand_empty()
        self.write("prior.toml", to_toml(settings, f"A generator trained by gradleak {__version__}."))
        return load_state(self.state, PriorError) if self.state.exists() else None

    @property
    def state(self) -> Path:
        return self.path / "state.safetensors"

    def step(self) -> int:
        """How many steps the state on disk has behind it."""
        return int(load_state(self.state, PriorError)[0]["step"]) if self.state.exists() else 0

    def keep(self, game: GANTrainer) -> None:
        save_state(self.state, *game.state())


@contextmanager
def _deferred() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of a step, whose halves belong together. Returns whether it was pressed.

    Pressed twice it is raised at once. Outside the main thread signals cannot be caught, and nothing changes.
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
