"""The experiment: every attack against every defence, scored, with a positive control and a no-gradient baseline.

`data` is the only place where private data enters. Attacks get observations; metrics get the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from gradleak import __version__, data, models, registry
from gradleak.attack import Attack, require
from gradleak.cells import FORMS, UNDEFENDED, Cell, forms_of, named_attacks, named_defences
from gradleak.configuration import described, digest, from_toml, to_toml
from gradleak.cost import Estimate, estimate
from gradleak.defence import Defence
from gradleak.engine import Engine
from gradleak.environment import describe
from gradleak.execution import Analysis, Runner
from gradleak.federation import Federation
from gradleak.local import LocalTraining
from gradleak.private import AuditError, PrivateSide, examples_of
from gradleak.progress import Progress
from gradleak.results import AuditResult
from gradleak.rows import Row
from gradleak.store import Folder, FolderInUse, Memory, prepare
from gradleak.task import Task

if TYPE_CHECKING:
    from gradleak.perceptual import LPIPS

__all__ = ["Audit", "AuditError", "Cell", "Estimate", "FolderInUse", "Interrupted", "Progress", "Silent"]
__all__ += ["builtin", "estimate", "from_settings"]


Made = TypeVar("Made")


class Silent:
    """The default progress: says nothing."""

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
        for name, least, most in (("targets", 1, 1), ("unrelated", 0, 1), ("rounds", 0, None), ("seeds", 0, None)):
            values = [getattr(self, name)] if most else getattr(self, name)
            if not all(type(value) is int and value >= least for value in values):
                raise AuditError(f"{name} must be whole numbers of at least {least}; given {getattr(self, name)!r}.")
        image = self.task.fields.get("x")
        if image is None or len(image.shape) != 3:
            raise AuditError("An audit scores images: the task needs a field x of shape (channels, height, width).")

    # --- the plan --------------------------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """The grid in canonical order; the positive control comes first where it is not in the grid anyway."""
        attacks, defences = named_attacks(self.attacks), named_defences(self.defences)
        grid = [
            self._keyed(Cell(attack, defence, form, number, seed, self.federation, name, against))
            for against, defence in defences
            for form in forms_of(defence, self.knowledge)
            for name, attack in attacks
            for number in dict.fromkeys(self.rounds)
            for seed in dict.fromkeys(self.seeds)
        ]
        control = self._control()
        apart = [] if control.key in {cell.key for cell in grid} else [replace(control, control=True)]
        return list({cell.key: cell for cell in (*apart, *grid)}.values())  # what was named twice runs once

    def _control(self) -> Cell:
        """Undefended, one example, one plain step, before training: where an attack fails here it shows nothing."""
        plain = replace(self.federation, examples=1, training=LocalTraining(lr=self.federation.training.lr))
        name, attack = named_attacks(self.attacks[:1])[0]
        return self._keyed(Cell(attack, None, UNDEFENDED, 0, self.seeds[0], plain, name, "none"))

    def _keyed(self, cell: Cell) -> Cell:
        """Named by a hash of everything that its result depends on."""
        what = [cell.attack, cell.defence, cell.form, cell.round, cell.seed, cell.federation]
        return replace(cell, key=digest([what, self.targets, self.unrelated, self._fingerprint, self.engine.precision]))

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        held = {"task": digest(self.task), "data": self.side.data.fingerprint}
        gallery = self.side.given_gallery
        return held if gallery is None else {**held, "gallery": gallery.fingerprint}

    @cached_property
    def side(self) -> PrivateSide:
        """The private side: data, targets, uploads."""
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
            "lpips": None if self.lpips is None else self.lpips.name,
            "analyses": [_text(analysis) for analysis in self.analyses],
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
                "training": digest(training),
            },
            "plan": {
                "control": control,
                "cells": [cell.key for cell in cells],
                "defences": [cell.defence_name for cell in cells if not cell.control],
            },
        }
        return from_toml(to_toml(settings))  # so that it compares equal to what is read back

    def _toml(self, settings: Mapping[str, Any]) -> str:
        training = replace(self.federation.training, lr=1.0, steps=None, epochs=None, batch_size=None)
        named = all(item is None or isinstance(item, str) for item in (*self.attacks, *self.defences))
        obstacles = {
            "its task or its data are Python objects": not {"task", "data"} <= self.origin.keys(),
            "an attack or a defence is a Python object": not named,
            "the client's recipe is more than plain SGD": described(training) != described(LocalTraining(lr=1.0)),
            "it has analyses or LPIPS": bool(self.analyses) or self.lpips is not None,
        }
        reasons = [reason for reason, holds in obstacles.items() if holds]
        how = (
            f"This file alone cannot repeat it, since {', and '.join(reasons)}; the script that built it can."
            if reasons
            else "Repeat it with: gradleak audit --config run.toml -o ANOTHER_FOLDER"
        )
        return to_toml(settings, f"An audit by gradleak {__version__}.\n{how}")

    # --- running ---------------------------------------------------------------------------------------------------

    def run(
        self, out: str | Path | None = None, *, progress: Progress | None = None, resume: bool = True
    ) -> AuditResult:
        """Run every cell that `out` does not hold yet. Killed at any moment, it loses at most the cell in flight.

        The folder will hold the private images beside their reconstructions: treat it as the data itself.
        """
        progress = progress or Silent()
        cells, settings, environment = self.cells(), self.settings(), describe()
        for cell in cells:
            require(cell.attack, cell.knows)  # known before the first cell, so said before the first cell
        gallery = self.side.gallery({cell.federation.examples: cell.federation for cell in cells}.values())
        runner = Runner(self.side, gallery, self.engine, self.lpips, self.analyses)
        folder = None if out is None else Path(out)
        store = Memory() if folder is None else Folder(folder)
        try:
            if isinstance(store, Folder):
                environment = prepare(store, settings, self._toml(settings), environment, resume)
            store.put("gallery", {f"gallery/{name}": value for name, value in gallery.items()})
            progress.start(len(cells))
            self._loop(cells, store, runner, progress)
        except KeyboardInterrupt:
            kept = f"{len({row['cell'] for row in store.rows()})} of {len(cells)} cells are kept in {folder}"
            told = f"{kept}; the same command resumes" if folder else "nothing is kept without a folder"
            raise Interrupted(f"Interrupted: {told}.") from None
        finally:
            if isinstance(store, Folder):
                store.unlock()
        return AuditResult.of(store, settings, environment, folder)

    def _loop(self, cells: Sequence[Cell], store: Memory | Folder, runner: Runner, progress: Progress) -> None:
        held: dict[str, list[Row]] = {}
        for row in store.rows():
            held.setdefault(row["cell"], []).append(row)
        for index, cell in enumerate(cells):
            if cell.key not in held:
                progress.cell(cell, index)
                rounds = (0,) if cell.control else tuple(sorted(set(self.rounds)))
                rows, arrays = runner.attempt(cell, rounds, progress.share)
                store.add(cell.key, rows, arrays)
                held[cell.key] = rows
            progress.finished(cell, held[cell.key])


def _text(value: Any) -> str | None:
    return None if value is None else getattr(value, "__name__", None) or repr(value)


_WRITTEN = ("version", "gradleak", "lpips", "analyses", "fields", "fingerprint", "plan")  # for readers and for resuming


def from_settings(settings: Mapping[str, Any], *, task: Task, data: Any, gallery: Any = None) -> Audit:
    """The audit that a run.toml describes, on this task and data. The gallery is loaded by name where it has one."""
    given = {name: value for name, value in settings.items() if name not in _WRITTEN}
    federation, engine, origin = (dict(given.pop(name, {})) for name in ("federation", "engine", "origin"))
    recipe = dict(federation.pop("training", {"lr": 1.0}))
    plain = {name: _text(getattr(LocalTraining(lr=1.0), name)) for name in ("optimiser", "schedule")}
    beyond = [name for name in plain if recipe.pop(name, plain[name]) != plain[name]]
    beyond += [name for name in ("analyses", "lpips") if settings.get(name)]
    if beyond or recipe.pop("augmentation", None):
        what = ", ".join(beyond) or "augmentation"
        raise AuditError(
            f"This run was built in Python: {what} cannot be made from its run.toml. Run its script again."
        )
    if gallery is None and "gallery" in origin:
        gallery = _pictures(origin["gallery"], task)
    _demand_names(given, Audit, "run.toml")
    held = _made(Federation, {**federation, "training": _made(LocalTraining, recipe)})
    return _made(
        Audit,
        {**given, "task": task, "data": data, "gallery": gallery, "origin": origin}
        | {"federation": held, "engine": _made(Engine, engine)},
    )


def _made(kind: Callable[..., Made], settings: Mapping[str, Any]) -> Made:
    """An object from a table of a file: an unknown or missing setting is an error that names it."""
    _demand_names(settings, kind, f"[{kind.__name__}]")
    try:
        return kind(**settings)
    except TypeError as problem:
        raise AuditError(f"The settings of {kind.__name__} do not fit: {problem}.") from None


def _demand_names(settings: Mapping[str, Any], kind: Any, where: str) -> None:
    known = [entry.name for entry in fields(kind)]
    if odd := [name for name in settings if name not in known]:
        raise AuditError(f"{where} has no setting {odd[0]!r}.{registry.did_you_mean(odd[0], known)}")


def _pictures(names: str, task: Task) -> dict[str, Tensor]:
    """Images of several named sets as one gallery, without labels: their classes differ."""
    return {"x": task.fields["x"].model(torch.cat([data.load(name).x for name in names.split("+")]))}


BUILTIN_ATTACKS = ("cpl:steps=1200", "ig:steps=1000", "idlg:steps=600")  # the first must pass the positive control
BUILTIN_GALLERY = "cifar10-samples+cifar100-samples"


def builtin(targets: int = 8) -> Audit:
    """The audit that runs without any argument: real CIFAR-10 images, the LeNet of DLG, one example per update."""
    images = data.load("cifar10-samples")
    network = models.lenet_zhu(generator=torch.Generator().manual_seed(0))
    task = Task.supervised(network, torch.nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]))
    origin = {"task": "builtin", "data": "cifar10-samples", "gallery": BUILTIN_GALLERY}
    gallery = _pictures(BUILTIN_GALLERY, task)
    return Audit(task, images, BUILTIN_ATTACKS, targets=targets, gallery=gallery, origin=origin)
