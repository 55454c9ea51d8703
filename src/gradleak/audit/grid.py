"""The experiment: every attack against every defence, scored, with a positive control and a no-gradient baseline.

`data` is the only place where private data enters. Attacks get observations; metrics get the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from gradleak import data, models
from gradleak.attack import Attack, require
from gradleak.attacks.spans.layers import spanning_layers
from gradleak.audit.cells import FORMS, UNDEFENDED, Cell, forms_of, named_attacks, named_defences
from gradleak.audit.cost import Estimate, estimate
from gradleak.audit.execution import Analysis, Runner
from gradleak.audit.private import AuditError, PrivateSide, examples_of
from gradleak.audit.probe import NOT_RUN, gradient_of
from gradleak.audit.result import AuditResult
from gradleak.audit.runfile import arguments, settings_of, toml_of
from gradleak.audit.store import Arrays, Folder, Memory, prepare
from gradleak.core import registry
from gradleak.core.configuration import digest
from gradleak.core.environment import describe
from gradleak.core.files import Row
from gradleak.core.folder import FolderInUse, Interrupted
from gradleak.core.listeners import Progress, Silent
from gradleak.engine import Engine
from gradleak.federation import Federation, network_of
from gradleak.federation.checkpoints import Checkpoints
from gradleak.generators import load as load_generator
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Defence, overrides
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Task

if TYPE_CHECKING:
    from gradleak.metrics.perceptual import LPIPS

__all__ = ["Audit", "AuditError", "Cell", "Estimate", "FolderInUse", "Interrupted"]
__all__ += ["Workers"]
__all__ += ["FINAL", "builtin", "default_attacks", "estimate", "final_network", "from_settings"]

WITHHELD = ("recipe", "statistics")
FINAL = "the trained model"  # of run.toml: the attacker's generator is what came of the training that is attacked


class Workers(Protocol):
    """Runs cells elsewhere, several at a time, such as `distributed.RayWorkers`."""

    def run(
        self,
        runner: Runner,
        work: Sequence[tuple[Cell, tuple[int, ...]]],
        progress: Progress,
        log: Callable[[dict[str, Any]], None],
    ) -> Iterator[tuple[Cell, list[Row], Arrays | None]]:
        """The rows and arrays of each cell once, in any order. `log`: what happened to whom, for the record."""


@dataclass(frozen=True, eq=False)
class Audit:
    """A grid of cells: attacks x defences x forms x rounds x seeds.

    data         Images in [0, 1]; or, in model-input space, tensors {"x", "y"}, (x, y), or a Dataset of (x, y)
    attacks      names such as "ig:steps=100", or Attack objects; the first one also runs the positive control
    defences     names, Defence objects, None for none
    rounds       of training before the attacked round; 0 attacks the task's own weights
    targets      updates attacked in every cell; the same batches in all of them
    seeds        of the attack's starts and the clients' noise
    knowledge    what attackers know of a defence: "naive", "masked", "adaptive", and, of one that draws fresh noise for
                 every upload, "averaged" over several rounds; forms that do not differ run once
    repeats      rounds that the averaging attacker has seen, of the same examples at the same weights
    gallery      real images that are not the clients', for re-identification; None: the data that are no target
    analyses     functions (task, observation, batch) -> numbers, kept beside the scores
    unrelated    updates of other images attacked in every cell, as the no-gradient baseline
    origin       where the command line found task and data, for run.toml
    trained      checkpoints of a training (`Federation.train`), at whose weights every defence is attacked
    trial        a quick run that shows only that everything runs; verdict and report say so
    given        fields that the threat model grants the attacker, such as ("t", "noise") of a denoiser's clients
    generator    a prior of the attacker's own (`Knowledge.generator`), such as a trained denoiser
    withheld     what the attacker is not told although an audit grants it otherwise: "recipe", the client's training
                 (`Knowledge.training`), and "statistics", the buffers that clients return (see `ablation`)
    snapshots    images of every search kept on its way, which the report shows; they change no result
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
    repeats: int = 8
    engine: Engine = Engine()
    lpips: LPIPS | None = None
    gallery: Any = None
    analyses: Sequence[Analysis] = ()
    unrelated: int = 2
    origin: Mapping[str, str] = field(default_factory=dict)
    trained: Checkpoints | None = None
    trial: bool = False
    given: Sequence[str] = ()
    generator: Any = None
    withheld: Sequence[str] = ()
    snapshots: int = 8

    def __post_init__(self) -> None:
        if odd := [name for name in self.withheld if name not in WITHHELD]:
            raise AuditError(f"withheld names {odd[0]!r}.{registry.did_you_mean(odd[0], WITHHELD)}")
        for name in ("attacks", "defences", "rounds", "seeds", "knowledge"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Sequence) or not given:
                raise AuditError(f"{name} must be a list with at least one entry; given {given!r}.")
        if unknown := [form for form in self.knowledge if form not in FORMS]:
            raise AuditError(f"knowledge holds {unknown[0]!r}.{registry.did_you_mean(unknown[0], FORMS)}")
        counts: dict[str, Sequence[int]] = {"targets": [self.targets], "repeats": [self.repeats]}
        counts |= {"unrelated": [self.unrelated], "rounds": self.rounds, "seeds": self.seeds}
        for name, values in counts.items():
            least = 1 if name in ("targets", "repeats") else 0
            if not all(type(value) is int and value >= least for value in values):
                raise AuditError(f"{name} must be whole numbers of at least {least}; given {getattr(self, name)!r}.")
        if type(self.trial) is not bool:
            raise AuditError(f"trial must be true or false; given {self.trial!r}.")
        if odd := [name for name in self.given if name == "x" or name not in self.task.fields]:
            fields = ", ".join(name for name in self.task.fields if name != "x") or "none"
            raise AuditError(f"given names {odd[0]!r}; fields that can be granted are: {fields}.")
        image = self.task.fields.get("x")
        if image is None or len(image.shape) != 3:
            raise AuditError("An audit scores images: the task needs a field x of shape (channels, height, width).")

    # --- the plan --------------------------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """The grid in canonical order; the positive control comes first where it is not in the grid anyway."""
        attacks, defences = named_attacks(self.attacks), named_defences(self.defences)
        grid = [
            self._keyed(
                Cell(
                    *(attack, defence, form, number, seed, self.federation, name, against),
                    repeats=self.repeats if form == "averaged" else 1,
                    given=tuple(self.given),
                    generator=self.generator,
                    withheld=tuple(self.withheld),
                )
            )
            for against, defence in defences
            for form in forms_of(defence, self.knowledge, self._random(defence))
            for name, attack in attacks
            for number in dict.fromkeys(self.rounds)
            for seed in dict.fromkeys(self.seeds)
        ]
        control = self._control()
        apart = [] if control.key in {cell.key for cell in grid} else [replace(control, control=True)]
        return list({cell.key: cell for cell in (*apart, *grid)}.values())  # what was named twice runs once

    def _random(self, defence: Defence | None) -> bool:
        """Is it worth seeing a client of this defence several times?"""
        if defence is None or "averaged" not in self.knowledge or self.repeats == 1:
            return False
        try:
            return self.side.random(self.federation, defence)
        except ValueError:  # it cannot be used on this model: `run` says so, by its name, before the first cell
            return False

    def _control(self) -> Cell:
        """Undefended, one example, one plain step, before training: where an attack fails here it shows nothing."""
        plain = replace(self.federation, examples=1, training=LocalTraining(lr=self.federation.training.lr))
        name, attack = named_attacks(self.attacks[:1])[0]
        known = {"given": tuple(self.given), "generator": self.generator, "withheld": tuple(self.withheld)}
        return self._keyed(Cell(attack, None, UNDEFENDED, 0, self.seeds[0], plain, name, "none", **known))

    def _keyed(self, cell: Cell) -> Cell:
        """Named by a hash of everything that its result depends on."""
        what: list[Any] = [cell.attack, cell.defence, cell.form, cell.round, cell.seed, cell.federation]
        what += [cell.repeats] * (cell.repeats > 1)
        what += [{"given": sorted(cell.given)}] * bool(cell.given)
        what += [{"withheld": sorted(cell.withheld)}] * bool(cell.withheld)
        what += [{"generator": self._prior}] * (cell.generator is not None)
        return replace(cell, key=digest([what, self.targets, self.unrelated, self.fingerprint, self.engine.precision]))

    @cached_property
    def _prior(self) -> str:
        return digest(self.generator)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of the task, of what it computes, of the data and the gallery."""
        held = {"task": digest(self.task), "gradient": gradient_of(self.task), "data": self.side.data.fingerprint}
        gallery, trained = self.side.given_gallery, self.trained
        if trained is not None:
            self._demand_training(trained, held)
            held["trained"] = trained.fingerprint([0, *self.rounds])  # 0: where the positive control is
        held |= self._more_fingerprints()
        return held if gallery is None else {**held, "gallery": gallery.fingerprint}

    def _more_fingerprints(self) -> dict[str, str]:
        """Of what else the targets come from."""
        return {}

    def _demand_training(self, trained: Checkpoints, held: Mapping[str, str]) -> None:
        """The training must be one of this task on these data, and of a defence that steers it from the server."""
        there = trained.settings.get("fingerprint", {})
        for name in ("task", "data"):
            if there.get(name) != held[name]:
                raise AuditError(f"{trained.folder} is a training of another {name}: attack what was trained there.")
        for name, defence in named_defences(self.defences):
            steers = defence is not None and any(overrides(defence, hook) for hook in ("initial", "advance"))
            if steers and there.get("defence") != digest(defence):
                raise AuditError(
                    f"{name} changes the weights before training, or what the server sends along in a round, and "
                    f"{trained.folder} was trained without it: train with it, or audit it without checkpoints."
                )

    @cached_property
    def side(self) -> PrivateSide:
        """The private side: data, targets, uploads."""
        gallery = None if self.gallery is None else examples_of(self.gallery, self.task, "gallery")
        return self._side_of(
            {
                "task": self.task,
                "data": examples_of(self.data, self.task),
                "targets": self.targets,
                "unrelated": self.unrelated,
                "given_gallery": gallery,
                "trained": self.trained,
                "engine": self.engine,
            }
        )

    def _side_of(self, parts: dict[str, Any]) -> PrivateSide:
        return PrivateSide(**parts)

    def settings(self) -> dict[str, Any]:
        """What run.toml holds; `from_settings` makes an audit from it where every part has a name."""
        return settings_of(self, self.cells(), self._control().key)

    # --- running ---------------------------------------------------------------------------------------------------

    def run(
        self,
        out: str | Path | None = None,
        *,
        progress: Progress | None = None,
        resume: bool = True,
        workers: Workers | None = None,
    ) -> AuditResult:
        """Run every cell that `out` does not hold yet, here or by `workers`. Killed at any moment, it loses at most the
        cells in flight.

        The folder will hold the private images beside their reconstructions: treat it as the data itself.
        """
        progress = progress or Silent()
        cells, settings, environment = self.cells(), self.settings(), describe()
        for cell in cells:
            require(cell.attack, cell.knows)  # known before the first cell, so said before the first cell
        self._try_defences()
        self._demand_unseen(cells)
        gallery = self.side.gallery({cell.federation.examples: cell.federation for cell in cells}.values())
        engine = replace(self.engine, snapshots=self.snapshots)
        runner = Runner(self.side, gallery, engine, self.lpips, self.analyses)
        folder = None if out is None else Path(out)
        store = Memory() if folder is None else Folder(folder)
        try:
            if isinstance(store, Folder):
                environment = prepare(store, settings, toml_of(self, settings), environment, resume)
            store.put("gallery", {f"gallery/{name}": value for name, value in gallery.items()})
            progress.start(len(cells))
            if self.fingerprint["gradient"].startswith(NOT_RUN):
                progress.note(
                    f"The model does not run on the CPU ({self.fingerprint['gradient']}): whether a later run is the "
                    "same one is told by its code, weights and settings alone."
                )
            self._loop(cells, store, runner, progress, workers)
        except KeyboardInterrupt:
            kept = f"{len({row['cell'] for row in store.rows()})} of {len(cells)} cells are kept in {folder}"
            told = f"{kept}; the same command resumes" if folder else "nothing is kept without a folder"
            raise Interrupted(f"Interrupted: {told}.") from None
        finally:
            if isinstance(store, Folder):
                store.close()
        return AuditResult.of(store, settings, environment, folder)

    def _demand_unseen(self, cells: Sequence[Cell]) -> None:
        """A generator that has learnt the targets by heart would show them without any update."""
        card = getattr(self.generator, "card", None)
        if card is None or card.images is None:
            return
        for federation in {repr(cell.federation): cell.federation for cell in cells}.values():
            pictures = self.task.fields["x"].unit(self.side.truth(federation)["x"]).flatten(0, 1)
            if seen := len(card.seen(pictures)):
                raise AuditError(
                    f"The generator was trained on {seen} of the {len(pictures)} images that are to be attacked: what "
                    "it shows of them is no leakage. Attack others, or train it without them (gradleak prior train "
                    "--exclude)."
                )

    def _try_defences(self) -> None:
        for name, defence in named_defences(self.defences):
            if defence is not None:
                try:
                    self.side.try_out(self.federation, defence)
                except ValueError as problem:  # of TaskError too: the model lacks what the defence needs
                    raise AuditError(f"The defence {name} cannot be used here. {problem}") from problem

    def _loop(
        self,
        cells: Sequence[Cell],
        store: Memory | Folder,
        runner: Runner,
        progress: Progress,
        workers: Workers | None = None,
    ) -> None:
        held: dict[str, list[Row]] = {}
        for row in store.rows():
            held.setdefault(row["cell"], []).append(row)
        if workers is not None:
            for cell in (cell for cell in cells if cell.key in held):
                progress.finished(cell, held[cell.key])
            work = [(cell, self._rounds(cell)) for cell in cells if cell.key not in held]
            for cell, rows, arrays in workers.run(runner, work, progress, store.log):
                store.add(cell.key, rows, arrays)
                progress.finished(cell, rows)
            return
        for index, cell in enumerate(cells):
            if cell.key not in held:
                progress.cell(cell, index)
                rows, arrays = runner.attempt(cell, self._rounds(cell), progress.share)
                store.add(cell.key, rows, arrays)
                held[cell.key] = rows
            progress.finished(cell, held[cell.key])

    def _rounds(self, cell: Cell) -> tuple[int, ...]:
        """Of training, up to those that the cell's defence is attacked at."""
        return (0,) if cell.control else tuple(sorted(set(self.rounds)))


def from_settings(settings: Mapping[str, Any], *, task: Task, data: Any) -> Audit:
    """The audit that a run.toml describes, on this task and data. The gallery is loaded by name where it has one."""
    given = arguments(settings)
    names = given["origin"].get("gallery")
    gallery = None if names is None else _pictures(names, task)
    if "trained" in given["origin"]:
        given["trained"] = Checkpoints(Path(given["origin"]["trained"]))
    where = given["origin"].get("generator")
    if where is not None:
        given["generator"] = final_network(task, given["trained"]) if where == FINAL else load_generator(where)
    return Audit(task, data, gallery=gallery, **given)


def final_network(task: Task, trained: Checkpoints) -> nn.Module:
    """What came of a training: the average of its models where it kept one, else the last that was kept."""
    return network_of(task, trained.averaged or trained.at(trained.rounds[-1]))


def _pictures(names: str, task: Task) -> dict[str, Tensor]:
    """Images of several named sets as one gallery, without labels: their classes differ."""
    return {"x": task.fields["x"].model(torch.cat([data.load(name).x for name in names.split("+")]))}


# Attacks and steps were picked for two minutes on two cores, on twenty CIFAR-10 images with their scores in view.
DEFAULT_ATTACKS = ("cpl:steps=1000", "idlg:steps=1200", "ig:steps=1000")  # the first must pass the positive control
DEFAULT_ON_GPU = ("second-order",)  # exact, in half a second an image of 32 x 32 there; a minute on two cores


def default_attacks(
    engine: Engine, task: Task | None = None, examples: int | None = 1, training: LocalTraining | None = None
) -> tuple[str, ...]:
    """What an audit runs that names no attack, on this engine.

    task       of a classification where none is given
    examples   of an update; None: updates have different numbers of them
    training   the clients' recipe, one gradient where none is given
    """
    if task is not None and {"t", "noise"} <= task.drawn:
        return _default_of_denoisers(task, examples, training)
    return DEFAULT_ATTACKS + (DEFAULT_ON_GPU if engine.where.type == "cuda" else ())


def _default_of_denoisers(task: Task, examples: int | None, training: LocalTraining | None) -> tuple[str, ...]:
    """Granted fields are used, not searched for; steps of several gradients add up, and cannot be read off.

    Restarts, not waves, whose cost cannot be told beforehand; but for `span-dm`, whose starts are cheap.
    """
    single = training is None or len(training.order(examples or 1)) == 1
    plain_rule = training is None or isinstance(training.optimiser, SGD)
    t = "analytic" if single else "soft"
    plain = tuple(f"dlg-dm:noise=unknown,t={t},param={param},steps=1000,restarts=4" for param in ("x0_eps", "xt_q"))
    if not single:
        return plain
    spectral = (*plain, f"spectral-dm:noise=unknown,t={t},steps=800,restarts=4")
    return (*spectral, "span-dm") if examples and plain_rule and spanning_layers(task, examples) else spectral


# A demonstration, not a measurement: picked, with the scores in view, so that the exact attack fits some two minutes on
# two cores.
BUILTIN_DATA, BUILTIN_GALLERY = "fashion-mnist-samples", "fashion-mnist-samples+mnist-samples"
BUILTIN_ATTACKS = ("second-order", "cpl:steps=300")
BUILTIN_DEFENCES = (None, "fedsam")  # blurs what attackers find who do not know it, and nothing for one who does


def builtin(targets: int = 3, engine: Engine | None = None) -> Audit:
    """The audit that runs without any argument: real images, the LeNet of DLG, one example per update."""
    images = data.load(BUILTIN_DATA)
    colours, height, width = images.x.shape[1:]
    network = models.lenet_zhu(shape=(colours, height, width), generator=torch.Generator().manual_seed(0))
    task = Task.supervised(network, torch.nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]))
    origin = {"task": "builtin", "data": BUILTIN_DATA, "gallery": BUILTIN_GALLERY}
    return Audit(
        task,
        images,
        BUILTIN_ATTACKS,
        BUILTIN_DEFENCES,
        targets=targets,
        unrelated=1,
        engine=engine or Engine(),
        gallery=_pictures(BUILTIN_GALLERY, task),
        origin=origin,
    )
