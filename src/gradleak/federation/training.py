"""Resumable training with metrics and checkpoints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradleak import __version__
from gradleak.core.configuration import digest, from_toml, to_toml
from gradleak.core.durations import Estimate, about
from gradleak.core.folder import Interrupted
from gradleak.core.settings import takes
from gradleak.engine import Engine
from gradleak.federation import Federation
from gradleak.federation.checkpoints import VERSION, Checkpoints, TrainingFolder, recipe
from gradleak.federation.partition import FederationError
from gradleak.federation.rounds import Examples, Round, Rounds, Snapshot, State
from gradleak.federation.samples import Samples
from gradleak.federation.uploads import ExcludedClient
from gradleak.scenario.defence import Defence
from gradleak.scenario.task import Task

LONG_ROUND = 5.0  # seconds: a first round of this length is timed well enough in spite of its start-up costs
KEEP_EVERY = 10.0  # seconds between two states on disk: what a killed process loses at most. Ctrl-C loses nothing.


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of a training. `metrics`: one dict per round, as in metrics.jsonl."""

    state: State
    metrics: list[dict[str, Any]]
    kept: Mapping[int, Snapshot]  # checkpoints; empty if they are in `folder`
    folder: Path | None = None
    averages: Mapping[int, Snapshot] = field(default_factory=dict)  # of models at the checkpoints; likewise

    def at(self, round: int) -> Snapshot:
        """What the server sends at this checkpoint."""
        if self.folder is not None:
            return Checkpoints(self.folder).at(round)
        if round not in self.kept:
            raise FederationError(f"Round {round} was not kept; there are: {', '.join(map(str, sorted(self.kept)))}.")
        return self.kept[round]

    def averaged_at(self, round: int) -> Snapshot | None:
        """The average of models (`swa.Averaging`) at this checkpoint; None: there is none, or not yet."""
        if self.folder is not None:
            return Checkpoints(self.folder).averaged_at(round)
        self.at(round)
        return self.averages.get(round)

    @property
    def checkpoints(self) -> list[int]:
        """The rounds with a checkpoint."""
        return sorted(self.kept) if self.folder is None else Checkpoints(self.folder).rounds

    def rounds_to(self, accuracy: float) -> int | None:
        """The first tested round with at least this test accuracy (0 to 1); None: never reached."""
        tested = {row["round"]: row["test_accuracy"] for row in self.metrics if row.get("test_accuracy") is not None}
        if not tested:
            raise FederationError("No round has a test accuracy: train with test=..., data of a classification.")
        return min((number for number, reached in tested.items() if reached >= accuracy), default=None)

    def table(self, lines: int = 10) -> str:
        """Some rounds, evenly spaced, and the last: loss, accuracy, who took part."""
        return table(self.metrics, lines)


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """Who trains what, for how long, and what is measured and kept.

    rounds       to do in all; the same call with the same folder continues where that one stopped
    test         measured before the first round, every `every` rounds and after the last
    checkpoints  rounds to keep; 0 (before training) and the last one are always kept
    out          a folder, see checkpoints.py; None: everything stays in memory
    progress     called with the metrics of every round
    origin       where the command line found task and data
    samples      for a denoiser: images from fixed latents, made at every checkpoint; files of `out`
    """

    federation: Federation
    task: Task
    data: Examples
    rounds: int
    _: KW_ONLY
    defence: Defence | None = None
    test: Examples | None = None
    every: int = 10
    checkpoints: Sequence[int] = ()
    out: str | Path | None = None
    engine: Engine | None = None
    progress: Callable[[dict[str, Any]], None] | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    samples: Samples | None = None

    def __post_init__(self) -> None:
        demand_rounds(self.rounds, self.every, self.checkpoints)
        if self.samples is not None:
            self.samples.demand(self.task)

    @property
    def folder(self) -> Path | None:
        return None if self.out is None else Path(self.out)

    @property
    def checkpointed(self) -> set[int]:
        """All rounds that get a checkpoint."""
        return {0, self.rounds, *self.checkpoints}

    def demand_reachable(self, state: State, existing: Sequence[int]) -> None:
        """Refuse a folder that is past the last round, or past a checkpoint it lacks."""
        if state.round > self.rounds:
            raise FederationError(
                f"{self.out} is at round {state.round} already, beyond {self.rounds}. Ask for more rounds."
            )
        if missed := sorted(number for number in self.checkpointed - set(existing) if number < state.round):
            raise FederationError(
                f"{self.out} is at round {state.round} and has no checkpoint of round {missed[0]}, which has passed: "
                "choose another folder."
            )


@takes(TrainingRun)
def train(run: TrainingRun) -> Trained:
    """Train until `rounds` rounds are done in all. The same call with the same folder continues an interrupted one.

    `TrainingRun` lists the arguments. A round's metrics: "round" (how many are done), "loss" (of the weights at its
    start, on its examples), "clients" (whose uploads were aggregated), "excluded" (whose were not, and why), "skipped"
    (why the weights stayed), "seconds"; when due, "test_loss" and, for a classification, "test_accuracy" of the new
    weights. "averaged_..." are those of the average of models, if the federation has one (`swa.Averaging`).

    A resumed training ends with exactly the weights of an uninterrupted one if the device computes the same sums twice:
    a CPU with the same number of threads does; some CUDA kernels add in any order.
    """
    work = Rounds(run.federation, run.task, run.data, run.defence, run.engine)
    settings, samples, folder = settings_of(run, work), run.samples, run.folder
    store = _Memory() if folder is None else _Disk(folder, settings)

    def checkpoint(state: State) -> None:
        store.checkpoint(state)
        if samples is not None and folder is not None:
            averaged = state.averaged
            drawn = {"sent": state.snapshot} | ({} if averaged is None else {"averaged": averaged.snapshot})
            store.write(f"samples/round-{state.round}.png", samples.sheet(work.task, drawn))

    try:
        state, metrics = store.begin(work)
        run.demand_reachable(state, store.kept())
        try:
            if not metrics:
                metrics.append(_row(Round(0, None, (), {}), 0.0, _measured(work, state, run.test)))
                store.add(metrics[-1])
            if state.round in run.checkpointed:
                checkpoint(state)
            while state.round < run.rounds:
                began = time.perf_counter()
                new, outcome = work.after(state)
                due = new.round % run.every == 0 or new.round == run.rounds
                row = _row(outcome, time.perf_counter() - began, _measured(work, new, run.test) if due else {})
                if new.round in run.checkpointed:
                    checkpoint(new)
                store.add(row)
                metrics.append(row)
                state = new  # last: interrupted before this, the round is done again
                store.now_and_then(state)
                if run.progress is not None:
                    run.progress(row)
        except KeyboardInterrupt:
            store.keep(state)
            where = f"{state.round} of {run.rounds} rounds are kept in {run.out}; the same call goes on"
            raise Interrupted(
                f"Interrupted: {where if folder is not None else 'nothing is kept without a folder'}."
            ) from None
        store.keep(state)
        store.write("curves.svg", curves(metrics))
        if samples is not None and folder is not None:
            store.write("samples.png", samples.over_rounds(work.task, Checkpoints(folder)))
    finally:
        store.close()
    return Trained(state, metrics, store.snapshots(), folder, store.averages())


def demand_rounds(rounds: int, every: int, checkpoints: Sequence[int]) -> None:
    """Refuse impossible numbers before anything is trained or timed."""
    if rounds < 0 or every < 1:
        raise FederationError(f"rounds must be at least 0 and every at least 1; given {rounds} and {every}.")
    if late := [number for number in checkpoints if not 0 <= number <= rounds]:
        raise FederationError(f"Checkpoint {late[0]} lies outside the rounds 0 to {rounds} of this training.")


def estimate(
    federation: Federation,
    task: Task,
    data: Examples,
    rounds: int,
    defence: Defence | None = None,
    engine: Engine | None = None,
) -> Estimate:
    """Time the second round, or the first if it is long; testing is not included."""
    work = Rounds(federation, task, data, defence, engine)
    state, spent = work.unprepared(), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExcludedClient)  # the training itself will say it
        for _ in range(2):
            if rounds and spent < LONG_ROUND:
                began = time.perf_counter()
                state, _ = work.after(state)
                if work.engine.where.type == "cuda":
                    torch.cuda.synchronize()
                spent = time.perf_counter() - began
    seconds = spent * rounds
    whole = [len(share) for share in work.shares]
    sizes = whole if federation.examples is None else [min(federation.examples, size) for size in whole]
    steps = sum(len(federation.training.order(size)) for size in sizes if size)
    share = federation.participation.fraction(federation.clients)
    steps = round(steps * share)
    text = f"{rounds} round{'s' * (rounds != 1)} of about {steps} local steps: {about(seconds)} on {work.engine.where}"
    return Estimate(f"{text}, by one timed round.", seconds, {"rounds": rounds, "steps": steps})


def settings_of(run: TrainingRun, work: Rounds) -> dict[str, Any]:
    """Everything that determines the weights: by value, by name, or by a hash for a Python object."""
    training = run.federation.training
    settings = {
        "version": VERSION,
        "gradleak": __version__,
        "defence": "none" if run.defence is None else repr(run.defence),
        "precision": work.engine.precision,
        "origin": dict(run.origin),
        "federation": {**run.federation.settings(), "training": recipe(training)},
        "partition": {"sizes": [len(share) for share in work.shares], "rows": digest(work.shares)},
        "fingerprint": {
            "task": digest(run.task),
            "data": fingerprint_of(run.data),
            "defence": digest(run.defence),
            "training": digest(training),
        },
    }
    return from_toml(to_toml(settings))  # so that it compares equal to what is read back


def fingerprint_of(data: Examples) -> str:
    """A hash of the data: `data.fingerprint` if there is one, else of 64 examples."""
    known = getattr(data, "fingerprint", None)
    if known is not None:
        return str(known)
    rows = torch.linspace(0, len(data) - 1, min(64, len(data))).long()
    return digest([len(data), data.batch(rows)])


def _measured(work: Rounds, state: State, test: Examples | None) -> dict[str, float]:
    if test is None or not len(test):
        return {}
    averaged = {} if state.averaged is None else work.evaluate(state.averaged, test)
    return {**work.evaluate(state, test), **{f"averaged_{name}": value for name, value in averaged.items()}}


def _row(outcome: Round, seconds: float, measured: Mapping[str, float]) -> dict[str, Any]:
    row = {
        "round": outcome.round,
        "loss": outcome.loss,
        "clients": list(outcome.clients),
        "excluded": {str(client): reason for client, reason in outcome.excluded.items()},
        "skipped": outcome.skipped,
        "seconds": round(seconds, 4),
        **measured,
    }
    # JSON has no NaN, and a diverged loss is one.
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


# --- storage ---------------------------------------------------------------------------------------------------------


class _Memory:
    """A training without a folder: checkpoints stay in memory."""

    def __init__(self) -> None:
        self._kept: dict[int, Snapshot] = {}
        self._averages: dict[int, Snapshot] = {}

    def begin(self, work: Rounds) -> tuple[State, list[dict[str, Any]]]:
        return work.first(), []

    def kept(self) -> list[int]:
        return list(self._kept)

    def checkpoint(self, state: State) -> None:
        self._kept[state.round] = state.snapshot
        if (averaged := state.averaged) is not None:
            self._averages[state.round] = averaged.snapshot

    def snapshots(self) -> Mapping[int, Snapshot]:
        return self._kept

    def averages(self) -> Mapping[int, Snapshot]:
        return self._averages

    def add(self, row: dict[str, Any]) -> None: ...

    def keep(self, state: State) -> None: ...

    def now_and_then(self, state: State) -> None: ...

    def write(self, name: str, content: str | bytes) -> None: ...

    def close(self) -> None: ...


class _Disk(_Memory):
    """A training in a folder."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        super().__init__()
        self.folder, self.settings, self.last = TrainingFolder(path), settings, time.monotonic()

    def begin(self, work: Rounds) -> tuple[State, list[dict[str, Any]]]:
        toml = to_toml(self.settings, f"A federated training by gradleak {__version__}.")
        saved = self.folder.open(self.settings, toml)
        state = work.first() if saved is None else work.restored(saved)
        return state, self.folder.metrics(state.round if saved is not None else -1)

    def kept(self) -> list[int]:
        return self.folder.checkpoints

    def checkpoint(self, state: State) -> None:
        self.folder.checkpoint(state)

    def add(self, row: dict[str, Any]) -> None:
        self.folder.add(row)

    def keep(self, state: State) -> None:
        self.folder.keep(state)
        self.last = time.monotonic()

    def now_and_then(self, state: State) -> None:
        if time.monotonic() - self.last >= KEEP_EVERY:
            self.keep(state)

    def write(self, name: str, content: str | bytes) -> None:
        self.folder.write(name, content)

    def close(self) -> None:
        self.folder.close()


# --- for people ------------------------------------------------------------------------------------------------------


def table(metrics: Sequence[Mapping[str, Any]], lines: int = 10) -> str:
    """Some of the rounds as text."""
    tested = [row for row in metrics if "test_accuracy" in row or "test_loss" in row] or list(metrics)
    step = max(1, -(-len(tested) // lines))
    sampled = [*tested[:-1:step], *tested[-1:]]

    def cell(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    # The metric of a classification is its accuracy, of anything else its loss.
    metric, form = ("test_accuracy", "9.1%") if any("test_accuracy" in row for row in tested) else ("test_loss", "9.4f")
    averaged = any(f"averaged_{metric}" in row for row in tested)
    head = f"{'round':>6} {'loss':>9} {'test loss':>10} {'accuracy':>9} {'clients':>8} {'left out':>9}"
    head += f" {'averaged':>9}" * averaged
    body = [
        f"{row['round']:>6} {cell(row['loss'], '9.4f'):>9} {cell(row.get('test_loss'), '10.4f'):>10} "
        f"{cell(row.get('test_accuracy'), '9.1%'):>9} {len(row['clients']):>8} {len(row['excluded']):>9}"
        + f" {cell(row.get(f'averaged_{metric}'), form):>9}"
        * averaged
        for row in sampled
    ]
    return "\n".join([head, *body])


def curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Loss and test accuracy (or test loss, if there is none) over the rounds, as an SVG file."""
    width, height, edge = 640, 240, 40
    last = max((row["round"] for row in metrics), default=0) or 1
    tested = "test_accuracy" if any("test_accuracy" in row for row in metrics) else "test_loss"
    panels = [("loss", "loss", "#b3391f"), (tested, tested.replace("_", " "), "#1f5fb3")]
    parts = []
    for place, (name, title, colour) in enumerate(panels):
        points = [(row["round"], row[name]) for row in metrics if row.get(name) is not None]
        top = 1.0 if name == "test_accuracy" else max((value for _, value in points), default=0.0) or 1.0
        left = edge + place * width
        line = " ".join(
            f"{left + (width - 2 * edge) * number / last:.1f},{height - edge - (height - 2 * edge) * value / top:.1f}"
            for number, value in points
        )
        parts.append(
            f'<text x="{left}" y="{edge - 12}">{title}, 0 to {top:.3g}</text>'
            f'<path d="M{left} {edge}V{height - edge}H{left + width - 2 * edge}" fill="none" stroke="#999"/>'
            f'<text x="{left + width - 2 * edge}" y="{height - edge + 18}" text-anchor="end">round {last}</text>'
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    size = f'width="{2 * width}" height="{height}" viewBox="0 0 {2 * width} {height}"'
    look = 'font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{"".join(parts)}</svg>\n'
