"""The experiment: every attack against every defence, scored, with a positive control and a no-gradient baseline.

Private data enter only through `data`. Attacks get observations; metrics get the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from gradleak import data
from gradleak.attack import Attack, require
from gradleak.audit.cells import FORMS, UNDEFENDED, Cell, forms_of, named_attacks, named_defences
from gradleak.audit.execution import Analysis, Runner
from gradleak.audit.preflight import preflight
from gradleak.audit.private import AuditError, PrivateSide, examples_of, few_of, words_of
from gradleak.audit.result import AuditResult
from gradleak.audit.runfile import arguments, settings_of, toml_of
from gradleak.audit.store import Arrays, Folder, Memory, packed_words, prepare
from gradleak.core import registry
from gradleak.core.configuration import digest
from gradleak.core.environment import describe
from gradleak.core.files import Row
from gradleak.core.folder import Interrupted, made_by_another_version
from gradleak.core.listeners import Progress, Silent
from gradleak.engine import Engine
from gradleak.federation import Federation, network_of
from gradleak.federation.checkpoints import Checkpoints
from gradleak.generators import load as load_generator
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Defence, overrides
from gradleak.scenario.inspection import Examination
from gradleak.scenario.inspection.subject import fewest_examples
from gradleak.scenario.probe import NOT_RUN, gradient_of
from gradleak.scenario.task import Task

if TYPE_CHECKING:
    from gradleak.metrics.perceptual import LPIPS

WITHHELD = ("recipe", "statistics")
FINAL = "the trained model"  # in run.toml: the attacker's generator is the final model of the attacked training


class Workers(Protocol):
    """Runs cells elsewhere, several at a time, such as `ray.RayWorkers`."""

    def run(
        self,
        runner: Runner,
        work: Sequence[tuple[Cell, tuple[int, ...]]],
        progress: Progress,
        log: Callable[[dict[str, Any]], None],
    ) -> Iterator[tuple[Cell, list[Row], Arrays | None]]:
        """Yield rows and arrays of each cell once, in any order. `log` records what happened to each attempt."""


@dataclass(frozen=True, eq=False)
class Audit:
    """A grid of cells: attacks x defences x forms x rounds x seeds.

    data         Images in [0, 1]; or, in model-input space, tensors {"x", "y"}, (x, y), or a Dataset of (x, y)
    attacks      names such as "ig:steps=100", or Attack objects; the first one also runs the positive control
    defences     names, Defence objects, None for none
    rounds       of training before the attacked round; 0 attacks the task's own weights
    targets      updates attacked in every cell; the same batches in all of them
    seeds        of the attack's starts and the clients' noise
    knowledge    what attackers know of a defence: "naive", "masked", "adaptive" and, if it draws fresh noise for every
                 upload, "averaged" over several rounds; forms that do not differ run once
    repeats      rounds that the averaging attacker saw, of the same examples at the same weights
    gallery      real examples that are not the clients', for re-identification; None: the data that are no target
    analyses     functions (task, observation, batch) -> numbers, kept beside the scores
    unrelated    updates of other examples attacked in every cell, as the no-gradient baseline
    origin       where the command line found task and data, for run.toml
    trained      checkpoints of a training (`Federation.train`); every defence is attacked at their weights
    trial        a quick run that shows only that everything runs; verdict and report say so
    given        private fields that the threat model grants the attacker, such as ("t", "noise") of a denoiser's
                 clients; fields that are public (`Field.public`) need not be named
    generator    the attacker's prior (`Knowledge.generator`), such as a trained denoiser
    withheld     what this audit does not grant although audits usually do: "recipe", the client's training
                 (`Knowledge.training`), and "statistics", the buffers that clients return (see `ablation`)
    snapshots    how many pictures of every search the report shows; they change no result
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
            entries = getattr(self, name)
            if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
                raise AuditError(f"{name} must be a list with at least one entry; given {entries!r}.")
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
        if "x" not in self.task.fields:
            raise AuditError(
                f"An audit attacks the field x; the task has {', '.join(self.task.fields) or 'no fields'}."
            )

    # --- the plan --------------------------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """The grid in canonical order, after the positive control if that is not in the grid."""
        attacks, defences = named_attacks(self.attacks), named_defences(self.defences)
        grid = [
            self._keyed(
                Cell(
                    *(attack, defence, form, number, seed, self.federation, name, against),
                    repeats=self.repeats if form == "averaged" else 1,
                    given=self.granted,
                    inputs=self._inputs,
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

    @property
    def granted(self) -> tuple[str, ...]:
        """What attackers are given: the granted fields, and those that are public anyway."""
        return tuple(dict.fromkeys([*self.given, *self._inputs]))

    @property
    def _inputs(self) -> tuple[str, ...]:
        return tuple(name for name, each in self.task.fields.items() if each.public)

    def _random(self, defence: Defence | None) -> bool:
        """Does it help to see a client of this defence several times?"""
        if defence is None or "averaged" not in self.knowledge or self.repeats == 1:
            return False
        try:
            return self.side.random(self.federation, defence)
        except ValueError:  # it cannot be used on this model: `run` says so before the first cell
            return False

    def _control(self) -> Cell:
        """Undefended, one example, one plain step, before training: an attack that fails here shows nothing.

        Two examples where the model takes no single one.
        """
        recipe = LocalTraining(lr=self.federation.training.lr)
        plain = replace(self.federation, examples=self._fewest, training=recipe)
        name, attack = named_attacks(self.attacks[:1])[0]
        known = {
            "given": self.granted,
            "inputs": self._inputs,
            "generator": self.generator,
            "withheld": tuple(self.withheld),
        }
        return self._keyed(Cell(attack, None, UNDEFENDED, 0, self.seeds[0], plain, name, "none", **known))

    @cached_property
    def _fewest(self) -> int:
        return fewest_examples(self.task)

    def _keyed(self, cell: Cell) -> Cell:
        """The cell, with a key that hashes everything its result depends on."""
        parts: list[Any] = [cell.attack, cell.defence, cell.form, cell.round, cell.seed, cell.federation]
        parts += [cell.repeats] * (cell.repeats > 1)
        parts += [{"given": sorted(cell.given)}] * bool(cell.given)
        parts += [{"withheld": sorted(cell.withheld)}] * bool(cell.withheld)
        parts += [{"generator": self._prior}] * (cell.generator is not None)
        return replace(cell, key=digest([parts, self.targets, self.unrelated, self.fingerprint, self.engine.precision]))

    @cached_property
    def _prior(self) -> str:
        return digest(self.generator)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of the task, of what it computes, of the data and the gallery."""
        hashes = {"task": digest(self.task), "gradient": gradient_of(self.task), "data": self.side.data.fingerprint}
        gallery, trained = self.side.given_gallery, self.trained
        if trained is not None:
            self._demand_training(trained, hashes)
            hashes["trained"] = trained.fingerprint([0, *self.rounds])  # 0: where the positive control is
        hashes |= self._more_fingerprints()
        return hashes if gallery is None else {**hashes, "gallery": gallery.fingerprint}

    def _more_fingerprints(self) -> dict[str, str]:
        """Hashes of other sources of the targets."""
        return {}

    def _demand_training(self, trained: Checkpoints, hashes: Mapping[str, str]) -> None:
        """The checkpoints must be of this task, these data, and any defence that changes what the server sends."""
        there = trained.settings.get("fingerprint", {})
        for name in ("task", "data"):
            if there.get(name) != hashes[name]:
                hint = made_by_another_version(trained.settings)
                raise AuditError(
                    f"{trained.folder} is a training of another {name}: attack what was trained there.{hint}"
                )
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
        """The content of run.toml; `from_settings` makes an audit from it if every part has a name."""
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
        """Run every cell that `out` does not hold yet, here or on `workers`. A kill loses at most the cells in flight.

        The folder will hold the private examples beside their reconstructions: treat it as the data itself.
        """
        progress = progress or Silent()
        solver = self.solver  # refuses what cannot be attacked, before any work
        cells, settings, environment = self.cells(), self.settings(), describe()
        for cell in cells:
            require(cell.attack, cell.knows)  # before the first cell, not hours later
        self._try_defences()
        self._demand_unseen(cells)
        gallery = self.side.gallery({cell.federation.examples: cell.federation for cell in cells}.values())
        engine = replace(solver, snapshots=self.snapshots)
        runner = Runner(self.side, gallery, engine, self.lpips, self.analyses)
        folder = None if out is None else Path(out)
        store = Memory() if folder is None else Folder(folder)
        try:
            if isinstance(store, Folder):
                environment = prepare(store, settings, toml_of(self, settings), environment, resume)
            store.put("gallery", {f"gallery/{name}": value for name, value in gallery.items()})
            if words := words_of(self.task, self.data, self.gallery):
                store.put("words", {name: packed_words(each) for name, each in words.items()})
            progress.start(len(cells))
            if self.fingerprint["gradient"].startswith(NOT_RUN):
                progress.note(
                    f"The model does not run on the CPU ({self.fingerprint['gradient']}): only its code, weights and "
                    "settings tell whether a later run is the same one."
                )
            self._loop(cells, store, runner, progress, workers)
        except KeyboardInterrupt:
            done = f"{len({row['cell'] for row in store.rows()})} of {len(cells)} cells are kept in {folder}"
            message = f"{done}; the same command resumes" if folder else "nothing is kept without a folder"
            raise Interrupted(f"Interrupted: {message}.") from None
        finally:
            if isinstance(store, Folder):
                store.close()
        return AuditResult.of(store, settings, environment, folder)

    @cached_property
    def examined(self) -> Examination:
        """What `gradleak check` finds of this task and these attacks; refuses in its words what it refuses."""
        granted = {*self.given, *(() if "recipe" in self.withheld else ("training",))}
        granted |= set() if self.generator is None else {"generator"}
        checked = preflight(
            self.task,
            named_attacks(self.attacks),
            batch=few_of(self.side.data),
            granted=granted,
            examples=self.federation.examples,
            training=self.federation.training,
        )
        checked.demand()
        return checked.examination

    @property
    def solver(self) -> Engine:
        """The engine, which takes lane after lane where the model cannot run as lanes."""
        return replace(self.engine, batched=self.engine.batched and self.examined.batched)

    def _demand_unseen(self, cells: Sequence[Cell]) -> None:
        """A generator trained on the targets would show them without any update. Cards know images only."""
        card = getattr(self.generator, "card", None)
        if card is None or card.images is None or not self.task.fields["x"].kind.pictures:
            return
        for federation in {repr(cell.federation): cell.federation for cell in cells}.values():
            pictures = self.task.fields["x"].unit(self.side.truth(federation)["x"]).flatten(0, 1)
            if known := len(card.seen(pictures)):
                raise AuditError(
                    f"The generator was trained on {known} of the {len(pictures)} images that are to be attacked: what "
                    "it shows of them is no leakage. Attack others, or train it without them (gradleak prior train "
                    "--exclude)."
                )

    def _try_defences(self) -> None:
        for name, defence in named_defences(self.defences):
            if defence is not None:
                try:
                    self.side.try_out(self.federation, defence)
                except ValueError as problem:  # TaskError too: the model lacks what the defence needs
                    raise AuditError(f"The defence {name} cannot be used here. {problem}") from problem

    def _loop(
        self,
        cells: Sequence[Cell],
        store: Memory | Folder,
        runner: Runner,
        progress: Progress,
        workers: Workers | None = None,
    ) -> None:
        done: dict[str, list[Row]] = {}
        for row in store.rows():
            done.setdefault(row["cell"], []).append(row)
        if workers is not None:
            for cell in (cell for cell in cells if cell.key in done):
                progress.finished(cell, done[cell.key])
            work = [(cell, self._rounds(cell)) for cell in cells if cell.key not in done]
            for cell, rows, arrays in workers.run(runner, work, progress, store.log):
                store.add(cell.key, rows, arrays)
                progress.finished(cell, rows)
            return
        for index, cell in enumerate(cells):
            if cell.key not in done:
                progress.cell(cell, index)
                rows, arrays = runner.attempt(cell, self._rounds(cell), progress.share)
                store.add(cell.key, rows, arrays)
                done[cell.key] = rows
            progress.finished(cell, done[cell.key])

    def _rounds(self, cell: Cell) -> tuple[int, ...]:
        """All rounds at which the cell's defence is attacked: one training reaches them."""
        return (0,) if cell.control else tuple(sorted(set(self.rounds)))


def from_settings(settings: Mapping[str, Any], *, task: Task, data: Any) -> Audit:
    """The audit that a run.toml describes, on this task and data. Gallery and generator are loaded by their names."""
    options = arguments(settings)
    names = options["origin"].get("gallery")
    gallery = None if names is None else _pictures(names, task)
    if "trained" in options["origin"]:
        options["trained"] = Checkpoints(Path(options["origin"]["trained"]))
    where = options["origin"].get("generator")
    if where is not None:
        options["generator"] = final_network(task, options["trained"]) if where == FINAL else load_generator(where)
    return Audit(task, data, gallery=gallery, **options)


def final_network(task: Task, trained: Checkpoints) -> nn.Module:
    """The final model of a training: the average of its models if it kept one, else the last kept."""
    return network_of(task, trained.averaged or trained.at(trained.rounds[-1]))


def _pictures(names: str, task: Task) -> dict[str, Tensor]:
    """Images of several named sets as one gallery, without labels: their classes differ."""
    return {"x": task.fields["x"].model(torch.cat([data.load(name).x for name in names.split("+")]))}


# A demonstration, not a measurement: chosen, with the scores in view, to fit the exact attack into two minutes on two
# cores.
BUILTIN_DATA, BUILTIN_GALLERY = "fashion-mnist-samples", "fashion-mnist-samples+mnist-samples"
BUILTIN_ATTACKS = ("second-order", "cpl:steps=300")
BUILTIN_DEFENCES = (None, "fedsam")  # blurs what naive attackers find, and changes nothing for informed ones


def builtin(targets: int = 3, engine: Engine | None = None) -> Audit:
    """The audit that runs without any argument: real images, the LeNet of DLG, one example per update."""
    images = data.load_images(BUILTIN_DATA)
    colours, height, width = images.x.shape[1:]
    network = registry.get(
        "model", "lenet-zhu", shape=(colours, height, width), generator=torch.Generator().manual_seed(0)
    )
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
