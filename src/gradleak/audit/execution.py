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
from gradleak.audit.labels import record
from gradleak.audit.private import PrivateSide, Victims
from gradleak.audit.rows import ROW_VERSION
from gradleak.audit.scoring import scores_of
from gradleak.audit.store import Arrays
from gradleak.core.files import Row, finite
from gradleak.core.listeners import Share
from gradleak.engine import Engine
from gradleak.scenario.observation import Observation, Track, as_targets
from gradleak.scenario.task import Batch, Field, Task

if TYPE_CHECKING:
    from gradleak.metrics.perceptual import LPIPS

Analysis: TypeAlias = Callable[[Task, Observation, Batch], Mapping[str, float]]
"""Numbers about a target, beside its scores. They are the auditor's: they may look at the truth."""


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs cells of one audit."""

    side: PrivateSide
    gallery: Batch
    engine: Engine
    lpips: LPIPS | None = None
    analyses: Sequence[Analysis] = ()

    def prepare(self, cell: Cell, rounds: tuple[int, ...]) -> None:
        """Train what the cell's clients start from, so that a copy of this runner need not."""
        self.side._snapshots(cell.federation, cell.defence, rounds)

    def attempt(self, cell: Cell, rounds: tuple[int, ...], share: Share) -> tuple[list[Row], Arrays | None]:
        """The rows and arrays of a cell, or the one row that says why there are none."""
        try:
            return self._run(cell, self._row(cell), rounds, share)
        except Exception as problem:
            # The one place where every error is caught: hours of other cells must not be lost to one. It never becomes
            # a score: the row says failed and carries the traceback, and the verdict calls the line inconclusive.
            return self.failed(cell, problem), None

    def failed(self, cell: Cell, problem: BaseException) -> list[Row]:
        """The one row of a cell that raised this."""
        first, trace = str(problem).partition("\n")[0], "".join(traceback.format_exception(problem))
        told = {"target": None, "error": f"{type(problem).__name__}: {first}", "traceback": trace}
        return [{**self._row(cell), "status": "failed", **told}]

    def _row(self, cell: Cell) -> Row:
        return {
            "version": ROW_VERSION,
            "cell": cell.key,
            "status": "done",
            "control": cell.control,
            "attack": cell.attack_name,
            "defence": cell.defence_name,
            "form": cell.form,
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
        seen = [*victims.seen, *victims.unrelated]
        if "statistics" in cell.withheld:
            seen = [_without_statistics(each) for each in seen]
        task, knows = self.side.task, replace(cell.knows, given=victims.given(cell.given))
        found = cell.attack.run(task, seen, knows, seed=cell.seed, engine=self.engine, progress=share)
        arrays = _arrays(found, victims)
        told = {name: value[: len(victims.seen)] for name, value in found.batch.items()}
        unrelated, diverged = arrays.get("unrelated/x"), arrays["diverged"]
        scored = scores_of(told, victims.truth, unrelated, self.gallery, task.fields, diverged, self.lpips)
        checks = found.checks
        searched = [self._search(cell, found, checks, victims, target) for target in range(len(victims.seen))]
        seconds = round((time.perf_counter() - began) / len(searched), 3)
        rows = [
            finite({**row, "target": target, **scores, **search, "seconds": seconds})
            for target, (scores, search) in enumerate(zip(scored, searched, strict=True))
        ]
        return rows, arrays

    def _labels(self, cell: Cell, rounds: tuple[int, ...]) -> dict[str, Any]:
        """What the defence proves, and what the attacked model is good for."""
        proved = cell.defence and self.side.guarantee(cell.federation, cell.defence, cell.round, rounds, cell.repeats)
        trained = self.side.utility(cell.round)
        return {"guarantee": proved and record(proved), "trained": trained and asdict(trained)}

    def _search(
        self, cell: Cell, found: Reconstruction, checks: Checks, victims: Victims, target: int
    ) -> dict[str, Any]:
        """How the search of one target went."""
        [track], restart = as_targets(victims.seen[target]), int(found.chosen[target])
        seen = track.last
        curve = found.trace["match"][:, target, restart]
        truth = {name: value[target].clone() for name, value in victims.truth.items()}
        # On copies: what an analysis does with the truth stays out of the task that the next attack is given.
        measured = [analysis(self.side.task.copied(), seen, truth) for analysis in self.analyses]
        return {
            "observation": seen.key,
            "knows": cell.knows.level,
            "match": float(found.match[target, restart]),
            "match_start": float(curve[0]) if len(curve) else None,
            "objective": float(found.objective[target, restart]),
            "restart": restart,
            "converged": checks.converged[target],
            "checks": [_told(check) for check in (*observation_checks(seen, self.side.task), *checks.of(target))],
            "analyses": {name: float(value) for held in measured for name, value in held.items()},
            "certificate": None if found.certificates is None else found.certificates[target].record(),
            **({"tried": _tried(found.settings["tried"], target)} if "tried" in found.settings else {}),
        }


def _tried(members: Sequence[Mapping[str, Any]], target: int) -> list[dict[str, str]]:
    """What `auto` did with one target: its members, what each took the defence for, and what came of it."""
    own = [member for member in members if target in member["targets"] or not member["targets"]]
    return [{name: str(member[name]) for name in ("member", "attack", "form", "outcome")} for member in own]


def _arrays(found: Reconstruction, victims: Victims) -> Arrays:
    targets = len(victims.seen)
    every, chosen = torch.arange(targets), found.chosen[:targets]
    return {
        **{f"found/{name}": value[:targets] for name, value in found.batch.items()},
        **{f"truth/{name}": value for name, value in victims.truth.items()},
        **({"unrelated/x": found.batch["x"][targets:]} if victims.unrelated else {}),
        "trace/step": found.trace["step"],
        **{f"trace/{name}": found.trace[name][:, every, chosen] for name in ("match", "objective")},
        **_pictures(found, targets),
        "diverged": found.diverged[every, chosen],
    }


THUMBNAIL = 64  # pixels a side of pictures that are only looked at


def _pictures(found: Reconstruction, targets: int) -> Arrays:
    """What a report shows of the search: images on the way, and what each restart ended with (report/frames.py)."""
    field, told = found.fields["x"], Arrays()
    if len(field.shape) != 3:
        return told
    if found.snapshots:
        told["snapshots/step"] = found.snapshots["step"][:targets]
        told["snapshots/x"] = _seen_by_eye(found.snapshots["x"][:targets], field).transpose(0, 1)
    if found.match.shape[1] > 1:
        told["restarts/x"] = _seen_by_eye(found.candidates["x"][:targets], field)
        told["restarts/match"] = found.match[:targets]
    return told


def _seen_by_eye(images: torch.Tensor, field: Field) -> torch.Tensor:
    """(..., C, H, W) in model-input space as small pictures, 0 to 255. What is not finite is black."""
    shown = field.unit(images.float()).clamp(0, 1).nan_to_num(0.0)
    flat = shown.reshape(-1, *shown.shape[-3:])
    size = [min(THUMBNAIL, side) for side in flat.shape[-2:]]
    small = torch.nn.functional.interpolate(flat, size, mode="area") if size != list(flat.shape[-2:]) else flat
    return small.mul(255).round().byte().reshape(*shown.shape[:-2], *size)


def _without_statistics(seen: Observation | Track) -> Observation | Track:
    """As a server sees it whose clients keep their buffers to themselves."""
    if isinstance(seen, Track):
        return Track(tuple(replace(each, returned_buffers=None) for each in seen.observations))
    return replace(seen, returned_buffers=None)


def _told(check: Check) -> dict[str, str]:
    return {name: getattr(check, name) for name in ("name", "severity", "text", "fix")}
