"""Many rounds: metrics, checkpoints, and a folder from which an interrupted training goes on as if nothing had been."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradleak import __version__
from gradleak.core.configuration import digest, from_toml, to_toml
from gradleak.core.durations import Estimate, about
from gradleak.core.folder import Interrupted
from gradleak.engine import Engine
from gradleak.federation.checkpoints import VERSION, Checkpoints, TrainingFolder, recipe
from gradleak.federation.partition import FederationError
from gradleak.federation.rounds import Examples, Round, Rounds, Snapshot, State
from gradleak.federation.samples import Samples
from gradleak.federation.uploads import ExcludedClient
from gradleak.scenario.defence import Defence
from gradleak.scenario.task import Task

if TYPE_CHECKING:
    from gradleak.federation import Federation

LONG_ROUND = 5.0  # seconds, beside which what the first round prepares is little
KEEP_EVERY = 10.0  # seconds between two states on disk: what a killed process loses at most. Ctrl-C loses nothing.


@dataclass(frozen=True, eq=False)
class Trained:
    """What came of a training. `metrics`: one dict per round, as in metrics.jsonl."""

    state: State
    metrics: list[dict[str, Any]]
    kept: Mapping[int, Snapshot]  # checkpoints; empty where they are in `folder`
    folder: Path | None = None
    averages: Mapping[int, Snapshot] = field(default_factory=dict)  # of models, at the checkpoints; likewise

    def at(self, round: int) -> Snapshot:
        """What the server sends at a round that was kept."""
        if self.folder is not None:
            return Checkpoints(self.folder).at(round)
        if round not in self.kept:
            raise FederationError(f"Round {round} was not kept; there are: {', '.join(map(str, sorted(self.kept)))}.")
        return self.kept[round]

    def averaged_at(self, round: int) -> Snapshot | None:
        """The average of models (`swa.Averaging`) at a round that was kept; None: there is none, or not yet."""
        if self.folder is not None:
            return Checkpoints(self.folder).averaged_at(round)
        self.at(round)
        return self.averages.get(round)

    @property
    def checkpoints(self) -> list[int]:
        """The rounds that were kept."""
        return sorted(self.kept) if self.folder is None else Checkpoints(self.folder).rounds

    def rounds_to(self, accuracy: float) -> int | None:
        """The first round, of those that were tested, with this test accuracy (0 to 1) or more; None: never reached."""
        tested = {row["round"]: row["test_accuracy"] for row in self.metrics if row.get("test_accuracy") is not None}
        if not tested:
            raise FederationError("No round has a test accuracy: train with test=..., data of a classification.")
        return min((number for number, found in tested.items() if found >= accuracy), default=None)

    def table(self, lines: int = 10) -> str:
        """Some rounds, evenly spaced, and the last: loss, accuracy, who took part."""
        return table(self.metrics, lines)


def train(
    federation: Federation,
    task: Task,
    data: Examples,
    rounds: int,
    *,
    defence: Defence | None = None,
    test: Examples | None = None,
    every: int = 10,
    checkpoints: Sequence[int] = (),
    out: str | Path | None = None,
    engine: Engine | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
    origin: Mapping[str, Any] | None = None,
    samples: Samples | None = None,
) -> Trained:
    """Train until `rounds` rounds are done in all. The same call with the same folder goes on where that one stopped.

    test         measured before the first round, every `every` rounds and after the last
    checkpoints  rounds to keep; 0 (before training) and the last one are kept anyway
    out          a folder (checkpoints.py says what is in it); None: everything stays in memory
    progress     is given the metrics of every round
    origin       where the command line found task and data
    samples      of a denoiser: what it makes of fixed latents, drawn at every checkpoint; files of `out`

    A round's metrics: "round" (so many are done), "loss" (of the weights it began with, on the examples of this
    round), "clients" (whose uploads were taken), "excluded" (whose were not, and why), "skipped" (why the weights
    stayed), "seconds", and "test_loss" and, of a classification, "test_accuracy" of the weights it ended with, where
    due; "averaged_..." are
    those of the average of models, where the federation keeps one (`swa.Averaging`).

    A resumed training has the very weights of one that was not interrupted, where the device computes the same sums
    twice: a CPU with as many threads does; of CUDA's kernels some add in any order.
    """
    demand_rounds(rounds, every, checkpoints)
    if samples is not None:
        samples.demand(task)
    work = Rounds(federation, task, data, defence, engine)
    settings = settings_of(federation, task, data, defence, work, origin or {})
    wanted = {0, rounds, *checkpoints}
    keeper = _Memory() if out is None else _Disk(Path(out), settings)

    def kept(state: State) -> None:
        keeper.checkpoint(state)
        if samples is not None and out is not None:
            own = state.averaged
            drawn = {"sent": state.snapshot} | ({} if own is None else {"averaged": own.snapshot})
            keeper.write(f"samples/round-{state.round}.png", samples.sheet(work.task, drawn))

    try:
        state, metrics = keeper.begin(work)
        if state.round > rounds:
            raise FederationError(f"{out} is at round {state.round} already, beyond {rounds}. Ask for more rounds.")
        if missed := sorted(number for number in wanted - set(keeper.kept()) if number < state.round):
            raise FederationError(
                f"{out} is at round {state.round} and has no checkpoint of round {missed[0]}, which has passed: "
                "choose another folder."
            )
        try:
            if not metrics:
                metrics.append(_row(Round(0, None, (), {}), 0.0, _measured(work, state, test)))
                keeper.add(metrics[-1])
            if state.round in wanted:
                kept(state)
            while state.round < rounds:
                began = time.perf_counter()
                new, told = work.after(state)
                due = new.round % every == 0 or new.round == rounds
                row = _row(told, time.perf_counter() - began, _measured(work, new, test) if due else {})
                if new.round in wanted:
                    kept(new)
                keeper.add(row)
                metrics.append(row)
                state = new  # last: interrupted before this, the round is done again
                keeper.now_and_then(state)
                if progress is not None:
                    progress(row)
        except KeyboardInterrupt:
            keeper.keep(state)
            where = f"{state.round} of {rounds} rounds are kept in {out}; the same call goes on"
            raise Interrupted(
                f"Interrupted: {where if out is not None else 'nothing is kept without a folder'}."
            ) from None
        keeper.keep(state)
        keeper.write("curves.svg", curves(metrics))
        if samples is not None and out is not None:
            keeper.write("samples.png", samples.over_rounds(work.task, Checkpoints(Path(out))))
    finally:
        keeper.close()
    return Trained(state, metrics, keeper.snapshots(), None if out is None else Path(out), keeper.averages())


def demand_rounds(rounds: int, every: int, checkpoints: Sequence[int]) -> None:
    """Numbers that cannot be meant are said before anything is trained or timed."""
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
    """Time the second round, or the first where that is long enough to be told by; testing is not in it."""
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


def settings_of(
    federation: Federation,
    task: Task,
    data: Examples,
    defence: Defence | None,
    work: Rounds,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that determines the weights: by value, by name, or by a hash where it is a Python object."""
    settings = {
        "version": VERSION,
        "gradleak": __version__,
        "defence": "none" if defence is None else repr(defence),
        "precision": work.engine.precision,
        "origin": dict(origin),
        "federation": {**federation.settings(), "training": recipe(federation.training)},
        "partition": {"sizes": [len(share) for share in work.shares], "rows": digest(work.shares)},
        "fingerprint": {
            "task": digest(task),
            "data": fingerprint_of(data),
            "defence": digest(defence),
            "training": digest(federation.training),
        },
    }
    return from_toml(to_toml(settings))  # so that it compares equal to what is read back


def fingerprint_of(data: Examples) -> str:
    """A hash of the data: their own where they have one, else of 64 examples."""
    own = getattr(data, "fingerprint", None)
    if own is not None:
        return str(own)
    rows = torch.linspace(0, len(data) - 1, min(64, len(data))).long()
    return digest([len(data), data.batch(rows)])


def _measured(work: Rounds, state: State, test: Examples | None) -> dict[str, float]:
    if test is None or not len(test):
        return {}
    averaged = {} if state.averaged is None else work.evaluate(state.averaged, test)
    return {**work.evaluate(state, test), **{f"averaged_{name}": value for name, value in averaged.items()}}


def _row(told: Round, seconds: float, measured: Mapping[str, float]) -> dict[str, Any]:
    row = {
        "round": told.round,
        "loss": told.loss,
        "clients": list(told.clients),
        "excluded": {str(client): reason for client, reason in told.excluded.items()},
        "skipped": told.skipped,
        "seconds": round(seconds, 4),
        **measured,
    }
    # JSON has no NaN, and a diverged loss is one.
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


# --- where it is kept ------------------------------------------------------------------------------------------------


class _Memory:
    """A training without a folder."""

    def __init__(self) -> None:
        self._kept: dict[int, Snapshot] = {}
        self._averages: dict[int, Snapshot] = {}

    def begin(self, work: Rounds) -> tuple[State, list[dict[str, Any]]]:
        return work.first(), []

    def kept(self) -> list[int]:
        return list(self._kept)

    def checkpoint(self, state: State) -> None:
        self._kept[state.round] = state.snapshot
        if (own := state.averaged) is not None:
            self._averages[state.round] = own.snapshot

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
        found = self.folder.open(self.settings, toml)
        state = work.first() if found is None else work.restored(found)
        return state, self.folder.metrics(state.round if found is not None else -1)

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
    shown = [*tested[:-1:step], *tested[-1:]]

    def cell(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    # Of a classification its accuracy, of anything else its loss.
    judged, form = ("test_accuracy", "9.1%") if any("test_accuracy" in row for row in tested) else ("test_loss", "9.4f")
    averaged = any(f"averaged_{judged}" in row for row in tested)
    head = f"{'round':>6} {'loss':>9} {'test loss':>10} {'accuracy':>9} {'clients':>8} {'left out':>9}"
    head += f" {'averaged':>9}" * averaged
    body = [
        f"{row['round']:>6} {cell(row['loss'], '9.4f'):>9} {cell(row.get('test_loss'), '10.4f'):>10} "
        f"{cell(row.get('test_accuracy'), '9.1%'):>9} {len(row['clients']):>8} {len(row['excluded']):>9}"
        + f" {cell(row.get(f'averaged_{judged}'), form):>9}"
        * averaged
        for row in shown
    ]
    return "\n".join([head, *body])


def curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Loss and, where it was measured, test accuracy (else test loss) over the rounds, as an SVG of its own."""
    width, height, edge = 640, 240, 40
    last = max((row["round"] for row in metrics), default=0) or 1
    tested = "test_accuracy" if any("test_accuracy" in row for row in metrics) else "test_loss"
    panels = [("loss", "loss", "#b3391f"), (tested, tested.replace("_", " "), "#1f5fb3")]
    drawn = []
    for place, (name, title, colour) in enumerate(panels):
        points = [(row["round"], row[name]) for row in metrics if row.get(name) is not None]
        top = 1.0 if name == "test_accuracy" else max((value for _, value in points), default=0.0) or 1.0
        left = edge + place * width
        line = " ".join(
            f"{left + (width - 2 * edge) * number / last:.1f},{height - edge - (height - 2 * edge) * value / top:.1f}"
            for number, value in points
        )
        drawn.append(
            f'<text x="{left}" y="{edge - 12}">{title}, 0 to {top:.3g}</text>'
            f'<path d="M{left} {edge}V{height - edge}H{left + width - 2 * edge}" fill="none" stroke="#999"/>'
            f'<text x="{left + width - 2 * edge}" y="{height - edge + 18}" text-anchor="end">round {last}</text>'
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    size = f'width="{2 * width}" height="{height}" viewBox="0 0 {2 * width} {height}"'
    look = 'font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{"".join(drawn)}</svg>\n'
