"""Attacks in sequence, each on the targets that are not solved yet; and one attack in waves of more restarts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradleak.attack import Attack, Composed, Reconstruction, of_each
from gradleak.core.listeners import Share
from gradleak.parts.protocols import Needs
from gradleak.scenario.observation import Knowledge, Seen, as_targets
from gradleak.scenario.task import Task


@dataclass(frozen=True)
class EscalatingRestarts(Attack):
    """The same attack again, from new starts, on the targets that it has not solved.

    A search that either finds the image or is stuck needs many starts for few targets. Every wave has twice the starts
    of the one before: no more lanes if every wave solves half of the rest, and up to twice as many if it solves
    nothing. The starts of a target do not depend on other targets. The lowest match is kept, as among restarts.

    waves    at most, the first included
    solved   a target with a match below this is solved
    """

    attack: Composed
    waves: int
    solved: float

    def __post_init__(self) -> None:
        if self.waves < 1:
            raise ValueError(f"waves must be at least 1; given {self.waves}.")
        if not self.solved > 0:
            raise ValueError(f"solved must be above 0, a match that counts as solved; given {self.solved}.")

    @property
    def name(self) -> str:
        return self.attack.name

    @property
    def needs(self) -> Needs:
        return self.attack.needs

    @property
    def search_needs(self) -> Needs:
        return self.attack.search_needs

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        return self.attack.refuses(task, given)

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Any = None,
        progress: Share | None = None,
    ) -> Reconstruction:
        """Attack all targets, then those not solved. `settings["starts"]` says how many starts each target got."""
        targets = as_targets(seen)
        starts = [self.attack.restarts] * len(targets)
        best = self.attack.run(task, targets, knows, seed, engine=engine, progress=part(progress, 0, self.waves))
        for wave in range(1, self.waves):
            if not (rows := unsolved(best, self.solved)):
                break
            again = replace(self.attack, restarts=self.attack.restarts << wave)
            some, known = [targets[row] for row in rows], given_of(task, knows, rows, len(targets))
            # Far from every seed that a user may give, so that no wave repeats the first one of another run.
            other = seed + (wave << 40)
            result = again.run(task, some, known, other, engine=engine, progress=part(progress, wave, self.waves))
            best = taken(best, result, rows, matches(result) < matches(best)[rows])
            for row in rows:
                starts[row] += again.restarts
        if progress is not None:
            progress(1.0)
        return replace(best, settings={**best.settings, "attack": repr(self), "starts": starts})


def matches(result: Reconstruction) -> Tensor:
    """(targets,): the match of the chosen restart; infinite where it is no number."""
    return result.match[torch.arange(len(result.chosen)), result.chosen].nan_to_num(torch.inf)


def unsolved(result: Reconstruction, solved: float) -> list[int]:
    """Targets whose match is not below `solved`."""
    return torch.nonzero(matches(result) >= solved).flatten().tolist()


def part(progress: Share | None, done: int, parts: int) -> Share | None:
    """The progress within one of several equal parts."""
    return None if progress is None else lambda share: progress((done + share) / parts)


def taken(best: Reconstruction, result: Reconstruction, rows: Sequence[int], wins: Tensor) -> Reconstruction:
    """The earlier result, with the later one at those of its targets (`rows` of the earlier) where it `wins`."""
    into, take = torch.tensor(rows)[wins], torch.arange(len(rows))[wins]
    if not len(take):
        return replace(best, seconds=best.seconds + result.seconds, evaluations=best.evaluations + result.evaluations)
    ranked = result.match[take].nan_to_num(torch.inf).argsort(1)[:, : best.match.shape[1]]  # its best restarts

    def put(old: Tensor, new: Tensor) -> Tensor:
        old, values = old.clone(), torch.stack([each[order] for each, order in zip(new[take], ranked, strict=True)])
        if values.dim() > 2:  # some targets alone may have fewer examples: the rest stays blank
            old[into, :, : values.shape[2]] = values
        else:
            old[into] = values
        return old

    def curve(old: Tensor, new: Tensor) -> Tensor:
        """(points, targets, restarts): the shorter curve stays at its last value."""
        points = max(len(old), len(new))
        old, new = (torch.cat([v, v[-1:].expand(points - len(v), *v.shape[1:])]) for v in (old, new))
        return put(old.movedim(0, 2), new.movedim(0, 2)).movedim(2, 0)  # put takes (targets, restarts, points)

    def unknown(old: Tensor, new: Tensor | None) -> Tensor:
        """Blank where the later attack has no unknown of this name and shape."""
        if new is not None and new.shape[2:] == old.shape[2:]:
            return put(old, new)
        return old.index_fill(0, into, torch.nan if old.is_floating_point() else -1)

    steps = max(best.trace["step"], result.trace["step"], key=len)
    candidates = {name: put(value, result.candidates[name]) for name, value in best.candidates.items()}
    chosen = best.chosen.clone()
    chosen[into] = 0
    batch = {name: value.clone() for name, value in best.batch.items()}
    for name, value in batch.items():
        value[into] = candidates[name][into, 0]
    return replace(
        best,
        batch=batch,
        unknowns={name: unknown(value, result.unknowns.get(name)) for name, value in best.unknowns.items()},
        snapshots={
            name: value.index_copy(0, into, result.snapshots[name][take]) for name, value in best.snapshots.items()
        },
        candidates=candidates,
        objective=put(best.objective, result.objective),
        match=put(best.match, result.match),
        noise=None if best.noise is None or result.noise is None else put(best.noise, result.noise),
        chosen=chosen,
        diverged=put(best.diverged, result.diverged),
        trace={"step": steps, **{name: curve(best.trace[name], result.trace[name]) for name in ("objective", "match")}},
        seconds=best.seconds + result.seconds,
        evaluations=best.evaluations + result.evaluations,
    )


def given_of(task: Task, knows: Knowledge, rows: Sequence[int], targets: int) -> Knowledge:
    """The knowledge about some of the targets: of a field given for each target their rows, one given for all as it is.

    A name that is no field of the task stays: the attack refuses it.
    """

    def picked(name: str, value: Tensor) -> Tensor:
        each = name in task.fields and of_each(task.fields[name], value, targets)
        return value[list(rows)] if each else value

    return replace(knows, given={name: picked(name, value) for name, value in knows.given.items()})
