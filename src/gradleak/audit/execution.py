"""One cell, from the clients' uploads to its rows and arrays."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from gradleak.attack import Reconstruction
from gradleak.attack.checks import Check, Checks, observation_checks
from gradleak.audit.cells import Cell
from gradleak.audit.private import PrivateSide, Victims
from gradleak.audit.rows import ROW_VERSION, guarantee_record
from gradleak.audit.scoring import next_tokens, scores_of
from gradleak.audit.store import Arrays
from gradleak.core.files import Row, finite, without_values
from gradleak.core.listeners import Share
from gradleak.engine import Engine
from gradleak.scenario.observation import Observation, Track, as_targets
from gradleak.scenario.task import Batch, Field, Task

if TYPE_CHECKING:
    from gradleak.metrics.perceptual import LPIPS

Analysis: TypeAlias = Callable[[Task, Observation, Batch], Mapping[str, float]]
"""Numbers about a target, kept beside its scores. They belong to the auditor, so they may look at the truth."""


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs cells of one audit."""

    side: PrivateSide
    gallery: Batch
    engine: Engine
    lpips: LPIPS | None = None
    analyses: Sequence[Analysis] = ()

    def prepare(self, cell: Cell, rounds: tuple[int, ...]) -> None:
        """Train the weights that the cell's clients start from, so that copies of this runner need not."""
        self.side._snapshots(cell.federation, cell.defence, rounds)

    def attempt(self, cell: Cell, rounds: tuple[int, ...], share: Share) -> tuple[list[Row], Arrays | None]:
        """The rows and arrays of a cell, or one row that says why there are none."""
        try:
            return self._run(cell, self._row(cell), rounds, share)
        except Exception as problem:
            # The one place that catches every error: one cell must not lose hours of others. An error never becomes a
            # score: the row says failed and has the traceback, and the verdict calls the line inconclusive.
            return self.failed(cell, problem), None

    def failed(self, cell: Cell, problem: BaseException) -> list[Row]:
        """The one row of a cell that raised this."""
        first, trace = str(problem).partition("\n")[0], "".join(traceback.format_exception(problem))
        error = {"target": None, "error": f"{type(problem).__name__}: {without_values(first)}", "traceback": trace}
        return [{**self._row(cell), "status": "failed", **error}]

    def _row(self, cell: Cell) -> Row:
        return {
            "version": ROW_VERSION,
            "cell": cell.key,
            "status": "done",
            "control": cell.control,
            "attack": cell.attack_name,
            "defence": cell.defence_name,
            "form": cell.form,
            "kind": self.side.task.fields["x"].kind.name,
            "round": cell.round,
            "seed": cell.seed,
            "examples": cell.federation.examples,
            "targets": self.side.count(cell.federation),
        }

    def _run(self, cell: Cell, row: Row, rounds: tuple[int, ...], share: Share) -> tuple[list[Row], Arrays]:
        began = time.perf_counter()
        row = {**row, **self._labels(cell, rounds)}
        victims = self.side.victims(cell.federation, cell.defence, cell.round, rounds, cell.seed, cell.repeats)
        # Unrelated updates run in the same lanes as the targets: same prior, same budget. The truth stays here.
        observations = [*victims.seen, *victims.unrelated]
        if "statistics" in cell.withheld:
            observations = [_without_statistics(each) for each in observations]
        task, knows = self.side.task, replace(cell.knows, given=victims.given(cell.given))
        result = cell.attack.run(task, observations, knows, seed=cell.seed, engine=self.engine, progress=share)
        arrays = _arrays(result, victims)
        batch = {name: value[: len(victims.seen)] for name, value in result.batch.items()}
        if (guess := _guess(task, victims)) is not None:
            arrays["guess/x"] = guess
        scores = scores_of(
            batch,
            victims.truth,
            arrays.get("unrelated/x"),
            self.gallery,
            task.fields,
            arrays["diverged"],
            self.lpips,
            arrays.get("guess/x"),
        )
        checks = result.checks
        searches = [self._search(cell, result, checks, victims, target) for target in range(len(victims.seen))]
        seconds = round((time.perf_counter() - began) / len(searches), 3)
        rows = [
            finite({**row, "target": target, **scored, **search, "seconds": seconds})
            for target, (scored, search) in enumerate(zip(scores, searches, strict=True))
        ]
        return rows, arrays

    def _labels(self, cell: Cell, rounds: tuple[int, ...]) -> dict[str, Any]:
        """What the defence proves, and how good the attacked model is."""
        proved = cell.defence and self.side.guarantee(cell.federation, cell.defence, cell.round, rounds, cell.repeats)
        trained = self.side.utility(cell.round)
        return {"guarantee": proved and guarantee_record(proved), "trained": trained and asdict(trained)}

    def _search(
        self, cell: Cell, result: Reconstruction, checks: Checks, victims: Victims, target: int
    ) -> dict[str, Any]:
        """How the search of one target went."""
        [track], restart = as_targets(victims.seen[target]), int(result.chosen[target])
        observation = track.last
        curve = result.trace["match"][:, target, restart]
        truth = {name: value[target].clone() for name, value in victims.truth.items()}
        # On copies: an analysis that sees the truth cannot leave it in the task that the next attack gets.
        measured = [analysis(self.side.task.copied(), observation, truth) for analysis in self.analyses]
        return {
            "observation": observation.key,
            "knows": cell.knows.level,
            "match": float(result.match[target, restart]),
            "match_start": float(curve[0]) if len(curve) else None,
            "objective": float(result.objective[target, restart]),
            "restart": restart,
            "converged": checks.converged[target],
            "checks": [
                _record(check) for check in (*observation_checks(observation, self.side.task), *checks.of(target))
            ],
            "analyses": {name: float(value) for numbers in measured for name, value in numbers.items()},
            "certificate": None if result.certificates is None else result.certificates[target].record(),
            **({"spans": result.settings["spans"][target]} if "spans" in result.settings else {}),
            **({"tried": _tried(result.settings["tried"], target)} if "tried" in result.settings else {}),
        }


def _tried(members: Sequence[Mapping[str, Any]], target: int) -> list[dict[str, str]]:
    """What `auto` did with one target: its members, the form each assumed, and the outcome."""
    those = [member for member in members if target in member["targets"] or not member["targets"]]
    return [{name: str(member[name]) for name in ("member", "attack", "form", "outcome")} for member in those]


def _guess(task: Task, victims: Victims) -> torch.Tensor | None:
    """What the language models that were sent guess of their clients' texts; None: they are none."""
    guesses = []
    for target, seen in enumerate(victims.seen):
        [track] = as_targets(seen)
        texts = {name: value[target] for name, value in victims.truth.items()}
        buffers = {**task.buffers(), **(track.last.buffers or {})}
        guesses.append(next_tokens(task, track.last.weights, buffers, texts))
    known = [each for each in guesses if each is not None]
    return torch.stack(known) if known else None


def _arrays(result: Reconstruction, victims: Victims) -> Arrays:
    targets = len(victims.seen)
    every, chosen = torch.arange(targets), result.chosen[:targets]
    return {
        **{f"found/{name}": value[:targets] for name, value in result.batch.items()},
        **{f"truth/{name}": value for name, value in victims.truth.items()},
        **({"unrelated/x": result.batch["x"][targets:]} if victims.unrelated else {}),
        "trace/step": result.trace["step"],
        **{f"trace/{name}": result.trace[name][:, every, chosen] for name in ("match", "objective")},
        **_pictures(result, targets),
        "diverged": result.diverged[every, chosen],
    }


THUMBNAIL = 64  # pixels a side of pictures for the report


def _pictures(result: Reconstruction, targets: int) -> Arrays:
    """Where x is a picture: images on the way, and the end of each restart, for the report (report/frames.py)."""
    field, pictures = result.fields["x"], Arrays()
    if not field.kind.pictures:
        return pictures
    if result.snapshots:
        pictures["snapshots/step"] = result.snapshots["step"][:targets]
        pictures["snapshots/x"] = _thumbnails(result.snapshots["x"][:targets], field).transpose(0, 1)
    if result.match.shape[1] > 1:
        pictures["restarts/x"] = _thumbnails(result.candidates["x"][:targets], field)
        pictures["restarts/match"] = result.match[:targets]
    return pictures


def _thumbnails(images: torch.Tensor, field: Field) -> torch.Tensor:
    """(..., C, H, W) in model-input space as small pictures, 0 to 255. Values that are not finite are black."""
    unit = field.unit(images.float()).clamp(0, 1).nan_to_num(0.0)
    flat = unit.reshape(-1, *unit.shape[-3:])
    size = [min(THUMBNAIL, side) for side in flat.shape[-2:]]
    small = torch.nn.functional.interpolate(flat, size, mode="area") if size != list(flat.shape[-2:]) else flat
    return small.mul(255).round().byte().reshape(*unit.shape[:-2], *size)


def _without_statistics(observation: Observation | Track) -> Observation | Track:
    """The observation of a server whose clients do not send their buffers."""
    if isinstance(observation, Track):
        return Track(tuple(replace(each, returned_buffers=None) for each in observation.observations))
    return replace(observation, returned_buffers=None)


def _record(check: Check) -> dict[str, str]:
    return {name: getattr(check, name) for name in ("name", "severity", "text", "fix")}
