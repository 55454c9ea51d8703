"""`gradleak audit --observations`: updates that were recorded, with or without their examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradleak.audit import default_attacks
from gradleak.audit.cells import defence_of
from gradleak.audit.recorded import Recorded, RecordedAudit, blind, privacy_of, read, replay_text, replays, unmasked
from gradleak.cli import loading
from gradleak.cli.audit import AuditOptions
from gradleak.cli.formatting import counted
from gradleak.cli.root import LoadError
from gradleak.core.listeners import Progress
from gradleak.engine import Engine
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge
from gradleak.scenario.task import Task


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """Recorded observations, the model that they are of, and what the attacker knows."""

    options: AuditOptions
    folder: Path  # of the observations
    task: Task
    recorded: Sequence[Recorded]
    attacks: tuple[str, ...]
    seeds: tuple[int, ...]
    training: LocalTraining | None
    defence: str | None
    engine: Engine

    @classmethod
    def load(cls, options: AuditOptions) -> RecordedRun:
        """Check the options, then read task and observations. Without --attack: the default attacks for them."""
        assert options.observations is not None
        _check(options)
        attacks, defences = loading.methods(options.attack or ()), loading.methods(options.defence or ())
        rounds = loading.optional_numbers(options.rounds, "--rounds")
        seeds = loading.optional_numbers(options.seeds, "--seeds") or (0,)
        if len(defences) > 1:
            raise LoadError(f"Clients used one defence when they were recorded; given {', '.join(defences)}.")
        training, engine = options.recipe.training(), options.engine.engine()
        task = loading.task(options.model)
        recorded = read(options.observations, task, options.truth, rounds)
        if not attacks:
            sizes = {one.seen.num_examples for one in recorded}
            attacks = default_attacks(engine, task, sizes.pop() if len(sizes) == 1 else None, training)
        defence = defences[0] if defences else None
        return cls(options, options.observations, task, recorded, attacks, seeds, training, defence, engine)

    def heading(self) -> list[str]:
        """What is known before anything is attacked."""
        known = sum(one.truth is not None for one in self.recorded)
        lines = [f"{counted(len(self.recorded), 'observation')} in {self.folder}, {known} with their examples."]
        lines += [f"Privacy of the recorded strategy: {line}" for line in privacy_of(self.folder)]
        if self.training is not None and known:
            errors = replays(self.task, self.recorded, self.training, defence_of(self.defence or "none"))
            lines.append(replay_text(errors, self.recorded, self.training))
        if not known and (masks := unmasked(self.task)[1]):
            lines.append(f"The recording holds no {', '.join(masks)}: nothing counts as padded.")
        return lines

    def audit(self) -> RecordedAudit:
        """The audit of the observations whose examples are known."""
        assert self.training is not None
        gallery = self.options.data.load()
        planned = RecordedAudit.of(
            self.task, self.recorded, self.attacks, self.training, gallery, defence=self.defence, engine=self.engine
        )
        origin = {"task": self.options.model, "observations": str(self.folder), "gallery": self.options.data.data}
        return replace(planned, seeds=self.seeds, given=self.options.known_fields, origin=origin)

    def attack_without_truth(self, folder: Path, progress: Progress) -> Sequence[dict[str, Any]]:
        """Attack observations whose examples nobody knows: one finding for each, stored in the folder."""
        knowledge = Knowledge(training=self.training, defence=defence_of(self.defence or "none"))
        return blind(
            self.task,
            self.recorded,
            self.attacks,
            knowledge,
            folder,
            seed=self.seeds[0],
            engine=self.engine,
            progress=progress,
        )


def _check(options: AuditOptions) -> None:
    """Refuse options that do not go with --observations, or that need others."""
    own_updates = "is for audits that make their own updates; --observations takes recorded ones."
    without_truth = "needs scores, and so --truth: without it nothing is scored."
    refusals: dict[str, tuple[object, str]] = {
        "--config": (options.config, own_updates),
        "--from": (options.trained, own_updates),
        "--targets": (options.targets, own_updates),
        "--repeats": (options.repeats, own_updates),
        "--clients": (options.clients, own_updates),
        "--examples": (options.examples, own_updates),
        "--generator": (options.generator, own_updates),
    }
    if options.truth is None:
        refusals["--ray"] = (options.cluster.ray or None, without_truth)
        refusals["--fail-above"] = (options.fail_above, without_truth)
        refusals["--junit"] = (options.junit, without_truth)
    for option, (value, reason) in refusals.items():
        if value is not None:
            raise LoadError(f"{option} {reason}")
    if not options.model:
        raise LoadError("--observations needs the task of the model that was sent: --task FILE.py:task.")
    if options.quick:
        raise LoadError("--quick is for audits that make their own updates; here give attacks few steps instead.")
    if options.truth is not None and options.recipe.lr is None:
        raise LoadError("--truth needs the clients' recipe, for the replay check and the positive control: --lr.")
    if options.truth is not None and not options.data.data:
        raise LoadError(
            "--truth needs real images that are no client's, among which reconstructions are looked up: "
            f"{loading.DATA_FORMS}."
        )
