"""The experiment: every attack against every defence, scored, with a positive control and a no-gradient baseline.

`data` is the only place where private data enters. Attacks get observations; metrics get the truth.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradleak import __version__, data, models, registry
from gradleak.attack import Attack, Reconstruction
from gradleak.cells import FORMS, UNDEFENDED, Cell, forms_of, named_attacks, named_defences
from gradleak.checks import Check, observation_checks
from gradleak.configuration import described, digest, from_toml, to_toml
from gradleak.cost import Estimate, estimate
from gradleak.defence import Defence
from gradleak.engine import Engine
from gradleak.environment import describe
from gradleak.federation import Federation
from gradleak.local import LocalTraining
from gradleak.observation import Observation
from gradleak.private import AuditError, PrivateSide, examples_of
from gradleak.results import AuditResult
from gradleak.rows import ROW_VERSION, Row, finite
from gradleak.scoring import scores_of
from gradleak.store import Arrays, Folder, FolderInUse, Memory, prepare
from gradleak.task import Batch, Task

if TYPE_CHECKING:
    from gradleak.perceptual import LPIPS

__all__ = ["Audit", "AuditError", "Cell", "Estimate", "FolderInUse", "Interrupted", "Progress", "Silent", "builtin", "estimate"]
__all__ += ["from_settings"]

Analysis = Callable[[Task, Observation, Batch], Mapping[str, float]]
"""Numbers about a target, beside its scores. The auditor's: it may look at the truth."""


class Progress(Protocol):
    """What an audit tells while it runs. Cells that an earlier run finished come as `finished` alone."""

    def start(self, total_cells: int) -> None: ...

    def cell(self, cell: Cell, index: int) -> None: ...

    def share(self, fraction: float) -> None: ...

    def finished(self, cell: Cell, rows: Sequence[Row]) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """The default."""

    def start(self, total_cells: int) -> None: ...

    def cell(self, cell: Cell, index: int) -> None: ...

    def share(self, fraction: float) -> None: ...

    def finished(self, cell: Cell, rows: Sequence[Row]) -> None: ...

    def note(self, text: str) -> None: ...


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. The message says what is kept and how to go on."""


@dataclass(frozen=True, eq=False)
class Audit:
    """A grid of cells: attacks x defences x forms x rounds x seeds.

    data         Images in [0, 1]; or, in model-input space, tensors {"x", "y"}, (x, y), or a Dataset of (x, y)
    attacks      names such as "ig:steps=100", or Attack objects; the first one also runs the positive control
    defences     names, Defence objects, None for none
    rounds       of training before the attacked round; 0 attacks the task's own weights
    targets      updates attacked in every cell; the same batches in all of them
    seeds        of the attack's starts and the clients' noise
    knowledge    what attackers know of a defence: "naive", "masked", "adaptive"; forms that do not differ run once
    gallery      real images that are not the clients', for re-identification; None: the data that are no target
    analyses     functions (task, observation, batch) -> numbers, kept beside the scores
    unrelated    updates of other images attacked in every cell, as the no-gradient baseline
    origin       where the command line found task and data, for run.toml
    """

    task: Task
    data: Any
    attacks: Sequence[str | Attack]
    defences: Sequence[str | Defence | None] = (None,)
    federation: Federation = Federation()
    rounds: Sequence[int] = (0,)
    targets: int = 8
    seeds: Sequence[int] = (0,)
    knowledge: Sequence[str] = tuple(FORMS)
    engine: Engine = Engine()
    lpips: LPIPS | None = None
    gallery: Any = None
    analyses: Sequence[Analysis] = ()
    unrelated: int = 2
    origin: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("attacks", "defences", "rounds", "seeds", "knowledge"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Sequence) or not given:
                raise AuditError(f"{name} must be a list with at least one entry; given {given!r}.")
        if unknown := [form for form in self.knowledge if form not in FORMS]:
            raise AuditError(f"knowledge holds {unknown[0]!r}.{registry.did_you_mean(unknown[0], FORMS)}")
        if self.targets < 1 or self.unrelated < 0 or min(self.rounds) < 0:
            raise AuditError("targets must be at least 1, unrelated and rounds at least 0.")
        image = self.task.fields.get("x")
        if image is None or len(image.shape) != 3:
            raise AuditError("An audit scores images: the task needs a field x of shape (channels, height, width).")

    # --- the plan --------------------------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """The grid in canonical order; the positive control comes first where it is not in the grid anyway."""
        attacks, defences = named_attacks(self.attacks), named_defences(self.defences)
        grid = [
            self._cell(Cell(attack, defence, form, number, seed, self.federation, name, against))
            for against, defence in defences
            for form in forms_of(defence, self.knowledge)
            for name, attack in attacks
            for number in self.rounds
            for seed in self.seeds
        ]
        control = self._control()
        return grid if control.key in {cell.key for cell in grid} else [replace(control, control=True), *grid]

    def _control(self) -> Cell:
        """Undefended, one example, one plain step, before training: if this attack fails here, nothing can be learnt."""
        plain = replace(self.federation, examples=1, training=LocalTraining(lr=self.federation.training.lr))
        name, attack = named_attacks(self.attacks[:1])[0]
        return self._cell(Cell(attack, None, UNDEFENDED, 0, self.seeds[0], plain, name, "none"))

    def _cell(self, cell: Cell) -> Cell:
        """Named by a hash of everything that its result depends on."""
        what = [cell.attack, cell.defence, cell.form, cell.round, cell.seed, cell.federation]
        return replace(cell, key=digest([what, self.targets, self.unrelated, self._fingerprint, self.engine.precision]))

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        held = {"task": digest(self.task), "data": self._side.data.fingerprint}
        gallery = self._side.given_gallery
        return held if gallery is None else {**held, "gallery": gallery.fingerprint}

    @cached_property
    def _side(self) -> PrivateSide:
        gallery = None if self.gallery is None else examples_of(self.gallery, self.task, "gallery")
        return PrivateSide(self.task, examples_of(self.data, self.task), self.targets, self.unrelated, gallery)

    def settings(self) -> dict[str, Any]:
        """What run.toml holds; `from_settings` makes an audit from it where every part has a name."""
        cells, control = self.cells(), self._control().key
        attacks, defences = named_attacks(self.attacks), named_defences(self.defences)
        training = self.federation.training
        settings = {
            "version": 1,
            "gradleak": __version__,
            "attacks": [name for name, _ in attacks],
            "defences": [name for name, _ in defences],
            "rounds": list(self.rounds),
            "targets": self.targets,
            "seeds": list(self.seeds),
            "knowledge": list(self.knowledge),
            "unrelated": self.unrelated,
            "lpips": None if self.lpips is None else str(getattr(self.lpips, "net", "yes")),
            "analyses": [analysis.__name__ for analysis in self.analyses],
            "origin": dict(self.origin),
            "federation": {
                **{name: getattr(self.federation, name) for name in ("clients", "examples", "seed", "wire")},
                "training": {
                    "lr": float(training.lr),
                    **{name: getattr(training, name) for name in ("steps", "epochs", "batch_size")},
                    # Only as text: recipes beyond plain SGD are built in Python.
                    **{name: _text(getattr(training, name)) for name in ("optimiser", "schedule", "augmentation")},
                },
            },
            "engine": asdict(self.engine),
            "fields": {name: asdict(held) for name, held in self.task.fields.items()},
            "fingerprint": {
                **self._fingerprint,
                "attacks": [digest(attack) for _, attack in attacks],
                "defences": [digest(defence) for _, defence in defences],
            },
            "plan": {
                "control": control,
                "cells": [cell.key for cell in cells],
                "defences": [cell.defence_name for cell in cells if not cell.control],
            },
        }
        return from_toml(to_toml(settings))  # so that it compares equal to what is read back

    def _toml(self, settings: Mapping[str, Any]) -> str:
        plain = LocalTraining(lr=1.0)
        training = replace(self.federation.training, lr=1.0, steps=None, epochs=None, batch_size=None)
        unnamed = {
            "its task or data are Python objects": not {"task", "data"} <= self.origin.keys(),
            "an attack or defence is a Python object": not all(
                item is None or isinstance(item, str) for item in (*self.attacks, *self.defences)
            ),
            "the client's recipe is more than plain SGD": described(training) != described(plain),
            "it has analyses or LPIPS": bool(self.analyses) or self.lpips is not None,
        }
        reasons = [reason for reason, holds in unnamed.items() if holds]
        how = (
            f"Built in Python; this file alone cannot repeat it: {', '.join(reasons)}. The same script resumes it."
            if reasons
            else "Repeat with: gradleak audit --config run.toml -o ANOTHER_FOLDER"
        )
        return to_toml(settings, f"An audit of gradleak {__version__}. {how}")

    # --- running ---------------------------------------------------------------------------------------------------

    def run(
        self, out: str | Path | None = None, *, progress: Progress | None = None, resume: bool = True
    ) -> AuditResult:
        """Run every cell that `out` does not hold yet. With `out`, killing it at any moment loses the cell in flight only.

        The folder will hold the private images beside their reconstructions: treat it as the data itself.
        """
        progress = progress or Silent()
        cells, settings, environment = self.cells(), self.settings(), describe()
        gallery = self._side.gallery(*{id(cell.federation): cell.federation for cell in cells}.values())
        folder = None if out is None else Path(out)
        store = Memory() if folder is None else Folder(folder)
        try:
            if isinstance(store, Folder):
                environment = prepare(store, settings, self._toml(settings), environment, resume)
            store.put("gallery", {f"gallery/{name}": value for name, value in gallery.items()})
            progress.start(len(cells))
            self._loop(cells, store, gallery, progress)
        except KeyboardInterrupt:
            kept = len({row["cell"] for row in store.rows()})
            where = f"{kept} of {len(cells)} cells are kept in {folder}; the same command resumes" if folder else "nothing is kept"
            raise Interrupted(f"Interrupted: {where}.") from None
        finally:
            if isinstance(store, Folder):
                store.unlock()
        return AuditResult.of(store, settings, environment, folder)

    def _loop(self, cells: Sequence[Cell], store: Memory | Folder, gallery: Batch, progress: Progress) -> None:
        held: dict[str, list[Row]] = {}
        for row in store.rows():
            held.setdefault(row["cell"], []).append(row)
        for index, cell in enumerate(cells):
            if cell.key not in held:
                progress.cell(cell, index)
                rows, arrays = self._attempt(cell, gallery, progress)
                store.add(cell.key, rows, arrays)
                held[cell.key] = rows
            progress.finished(cell, held[cell.key])

    def _attempt(self, cell: Cell, gallery: Batch, progress: Progress) -> tuple[list[Row], Arrays | None]:
        names = {"attack": cell.attack_name, "defence": cell.defence_name, "form": cell.form, "round": cell.round}
        row = {"version": ROW_VERSION, "cell": cell.key, "status": "done", "control": cell.control, **names}
        row |= {"seed": cell.seed, "examples": cell.federation.examples, "targets": self.targets}
        try:
            return self._attack(cell, row, gallery, progress)
        except Exception as problem:
            # The one place where every error is caught: a grid of hours must not be lost to one cell. It never becomes a
            # score: the row says failed, carries the traceback, and the verdict calls the cell inconclusive.
            error = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
            failed = {"status": "failed", "target": None, "error": error, "traceback": traceback.format_exc()}
            return [{**row, **failed}], None

    def _attack(self, cell: Cell, row: Row, gallery: Batch, progress: Progress) -> tuple[list[Row], Arrays]:
        began = time.perf_counter()
        rounds = tuple(sorted({0} if cell.control else set(self.rounds)))
        victims = self._side.victims(cell.federation, cell.defence, cell.round, rounds, cell.seed)
        # Unrelated updates run in the same lanes as the targets: same prior, same budget, no truth anywhere.
        found = cell.attack.run(
            self.task,
            [*victims.seen, *victims.unrelated],
            cell.knows,
            seed=cell.seed,
            engine=self.engine,
            progress=progress.share,
        )
        arrays = _arrays(found, victims.truth)
        targets = range(self.targets)
        scored = scores_of(
            {name: value[: self.targets] for name, value in found.batch.items()},
            victims.truth,
            arrays.get("unrelated/x"),
            gallery,
            self.task.fields,
            arrays["diverged"],
            self.lpips,
        )
        checks = found.checks
        seconds = time.perf_counter() - began
        rows = []
        for target in targets:
            seen, restart = victims.seen[target], int(found.chosen[target])
            truth = {name: value[target] for name, value in victims.truth.items()}
            raised = [*observation_checks(seen, self.task), *checks.of(target)]
            rows.append(
                finite(
                    {
                        **row,
                        "target": target,
                        "observation": seen.key,
                        "knows": cell.knows.level,
                        **scored[target],
                        "match": float(found.match[target, restart]),
                        "match_start": float(arrays["trace/match"][0, target]) if len(arrays["trace/match"]) else None,
                        "objective": float(found.objective[target, restart]),
                        "restart": restart,
                        "converged": checks.converged[target],
                        "checks": [_told(check) for check in raised],
                        "analyses": {
                            name: float(value)
                            for analysis in self.analyses
                            for name, value in analysis(self.task, seen, truth).items()
                        },
                        "seconds": round(seconds / self.targets, 3),
                    }
                )
            )
        return rows, arrays


def _arrays(found: Reconstruction, truth: Batch) -> Arrays:
    targets = len(truth["x"])
    every = torch.arange(targets)
    chosen = found.chosen[:targets]
    return {
        **{f"found/{name}": value[:targets] for name, value in found.batch.items()},
        **{f"truth/{name}": value for name, value in truth.items()},
        **({"unrelated/x": found.batch["x"][targets:]} if len(found.keys) > targets else {}),
        "trace/step": found.trace["step"],
        **{f"trace/{name}": found.trace[name][:, every, chosen] for name in ("match", "objective")},
        "diverged": found.diverged[every, chosen],
    }


def _told(check: Check) -> dict[str, str]:
    return {name: getattr(check, name) for name in ("name", "severity", "text", "fix")}


def _text(value: Any) -> str | None:
    return None if value is None else getattr(value, "__name__", None) or repr(value)


def from_settings(settings: Mapping[str, Any], *, task: Task, data: Any, gallery: Any = None) -> Audit:
    """The audit that a run.toml describes, on this task and data. The gallery is loaded by name where it has one."""
    federation = dict(settings.get("federation", {}))
    training = {k: v for k, v in federation.pop("training", {"lr": 1.0}).items() if k in ("lr", "steps", "epochs", "batch_size")}
    origin = settings.get("origin", {})
    names = ("attacks", "defences", "rounds", "targets", "seeds", "knowledge", "unrelated")
    return Audit(
        task,
        data,
        **{name: settings[name] for name in names if name in settings},
        federation=Federation(training=LocalTraining(**training), **federation),
        engine=Engine(**settings.get("engine", {})),
        gallery=_pictures(origin["gallery"]) if gallery is None and "gallery" in origin else gallery,
        origin=origin,
    )


def _pictures(names: str) -> dict[str, torch.Tensor]:
    """Images of several named sets as one gallery, without labels: they are of different classes."""
    return {"x": torch.cat([data.load(name).x for name in names.split("+")])}


BUILTIN_ATTACKS = ("ig:steps=1000", "cpl:steps=400")  # about 90 s on two cores; the lead tunes these
BUILTIN_GALLERY = "cifar10-samples+cifar100-samples"


def builtin(targets: int = 8) -> Audit:
    """The audit that runs without any argument: real CIFAR-10 images, the LeNet of DLG, one example per update."""
    images = data.load("cifar10-samples")
    network = models.lenet_zhu(generator=torch.Generator().manual_seed(0))
    task = Task.supervised(network, torch.nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]))
    origin = {"task": "builtin", "data": "cifar10-samples", "gallery": BUILTIN_GALLERY}
    return Audit(task, images, BUILTIN_ATTACKS, targets=targets, gallery=_pictures(BUILTIN_GALLERY), origin=origin)
