"""What `gradleak audit` was asked for, and the audit that it makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradleak import audit, generators
from gradleak.attack import Attack, Composed
from gradleak.audit import FINAL, Audit, Workers, final_network
from gradleak.audit.cells import named_attacks
from gradleak.audit.cost import shortened
from gradleak.audit.result import AuditResult
from gradleak.audit.runfile import federation_of
from gradleak.cli.loading import LoadError, a_task, images, is_reference, kept_in, named_object, sentence, training_data
from gradleak.cli.tasks import is_task
from gradleak.core import registry
from gradleak.core.configuration import from_toml
from gradleak.core.listeners import Progress
from gradleak.data import Images
from gradleak.engine import Engine
from gradleak.federation.checkpoints import Checkpoints
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.task import Task

BUILTIN = "builtin"  # the task of the audit that runs without any argument, as run.toml names it
BUILTIN_MODEL = "lenet-zhu"


@dataclass(frozen=True)
class Request:
    """The options of `gradleak audit`. None, or empty: not said, so the configuration's or the default holds."""

    reference: str = ""  # FILE.py:name, the name of a model, or nothing
    config: Path | None = None
    trained: Path | None = None  # the folder of a training, whose checkpoints are attacked
    attacks: tuple[str, ...] = ()
    defences: tuple[str, ...] = ()
    rounds: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    targets: int | None = None
    repeats: int | None = None
    given: tuple[str, ...] = ()
    generator: Path | None = None  # a file of `gradleak prior train`, or converted
    data: str = ""
    clients: int | None = None
    examples: int | None = None
    training: LocalTraining | None = None
    device: str = ""
    precision: str = ""
    one_by_one: bool = False
    quick: bool = False

    def audit(self) -> Audit:
        """A file's audit, a configuration's or the built-in one, with all that was said put in."""
        if self.config is not None and self.trained is not None:
            raise LoadError("--from and --config both say what is attacked: give one of them.")
        if self.config is not None:
            made = self._from_config(self.config)
        else:
            made = self._from_words() if self.trained is None else self._from_training(self.trained)
        federation = _said({"clients": self.clients, "examples": self.examples, "training": self.training})
        batched = False if self.one_by_one else None
        engine = _said({"device": self.device, "precision": self.precision, "batched": batched})
        names = ("attacks", "defences", "rounds", "seeds", "targets", "repeats", "given")
        made = replace(
            made,
            federation=replace(made.federation, **federation),
            engine=_usable(replace(made.engine, **engine)),
            **_said({name: getattr(self, name) for name in names}),
        )
        if self.generator is not None:
            origin = {**made.origin, "generator": str(self.generator)}
            made = replace(made, generator=generators.load(self.generator), origin=origin)
        return _quick(_with_prior(made)) if self.quick else _with_prior(made)

    def run(self, planned: Audit, out: Path | None, progress: Progress, workers: Workers | None = None) -> AuditResult:
        """Run into `out`; without it into the folder of these words or, if that holds another run, the next one."""

        def into(folder: Path) -> AuditResult:
            return planned.run(folder, progress=progress, workers=workers)

        return kept_in(out, self.folder, into, "run", progress)

    @property
    def folder(self) -> Path:
        """Where the run is kept when nothing was said: the same words find, and resume, the same run."""
        if self.config is not None:
            return self.config.parent if self.config.name == "run.toml" else Path("runs") / self.config.stem
        if self.trained is not None:
            return Path("runs") / (f"audit-{self.trained.name}" + ("-quick" if self.quick else ""))
        place = self.reference.rpartition(":")[0] or self.reference
        return Path("runs") / ((Path(place).stem if place else BUILTIN) + ("-quick" if self.quick else ""))

    def _from_words(self) -> Audit:
        if not self.reference and not self.data:
            return audit.builtin(engine=self._engine())
        if not is_reference(self.reference):  # the name of a model, or none: then the built-in one, for these data
            return self._of_model(self.reference or BUILTIN)
        found = named_object(self.reference, "task")
        if isinstance(found, Audit):
            return replace(found, data=images(self.data), gallery=None) if self.data else found
        task = a_task(found, self.reference)
        if not self.data:
            raise LoadError(
                f"{self.reference} is a Task, which holds no data. Say which examples its clients hold: --data NAME, a "
                "folder, an .npz file or FILE.py:name (gradleak data list shows the names)."
            )
        return self._plain(task, images(self.data))

    def _of_model(self, name: str) -> Audit:
        if not self.data:
            raise LoadError(f"Say which images {name} is trained on: --data NAME (gradleak data list shows the names).")
        held = images(self.data)
        return self._plain(fitting(name, held), held)

    def _plain(self, task: Task, data: Any) -> Audit:
        origin = {"task": self.reference or BUILTIN, "data": self.data}
        attacks = audit.default_attacks(self._engine(), task, self.examples or 1, self.training)
        return Audit(task, data, attacks, origin=origin)

    def _engine(self) -> Engine:
        """Where it will run: the default attacks depend on it."""
        return _usable(Engine(device=self.device) if self.device else Engine())

    def _from_training(self, folder: Path) -> Audit:
        """At the weights of a training: its task, its data, its clients, and their recipe unless another is given."""
        trained = Checkpoints(folder)
        origin: dict[str, Any] = trained.settings.get("origin") or {}
        if self.clients is not None:
            raise LoadError(f"--from takes the clients that {folder} was trained with: leave --clients out.")
        if self.data:
            raise LoadError(f"--from takes the data that {folder} was trained on: leave --data out.")
        reference = self.reference or origin.get("task", "")
        if not reference or "data" not in origin:
            raise LoadError(
                f"{folder} does not say where its task and data are found: the training was started from Python. "
                "Attack it from there: Audit(task, data, attacks, trained=Checkpoints(folder))."
            )
        held, _ = training_data(origin)
        federation, beyond = federation_of({**trained.settings["federation"], "examples": 1})
        if beyond and self.training is None:
            raise LoadError(
                f"The clients' {', '.join(beyond)} is not plain SGD: say --lr, and --steps or --epochs. (--lr 1 alone "
                "attacks single gradients.)"
            )
        found = {"task": reference, "data": origin["data"], "trained": str(folder)}
        task = task_of(reference, held)
        recipe = self.training or federation.training
        attacks = audit.default_attacks(self._engine(), task, self.examples or 1, recipe)
        rounds = self.rounds or tuple(trained.rounds)
        return Audit(task, held, attacks, federation=federation, rounds=rounds, trained=trained, origin=found)

    def _from_config(self, path: Path) -> Audit:
        """From a run.toml; the task and the data are those it names, or those given beside it."""
        try:
            settings = from_toml(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise LoadError(f"{path} is not TOML: {sentence(problem)}") from None
        origin: dict[str, str] = settings.get("origin") or {}
        if not isinstance(origin, dict) or not all(isinstance(text, str) for text in origin.values()):
            raise LoadError(f"{path}: [origin] should name task and data; it is {origin!r:.80}.")
        reference, data = self.reference or origin.get("task", ""), self.data or origin.get("data", "")
        if not reference or not data:
            raise LoadError(
                f"{path} does not say where its {'data are' if reference else 'task is'} found: the run was started "
                "from Python. Give them: gradleak audit FILE.py:task --data NAME --config ..."
            )
        held = images(data)
        if "trained" in origin and not self.data:
            held, _ = training_data(Checkpoints(Path(origin["trained"])).settings.get("origin") or {"data": data})
        task = task_of(reference, held)
        kept = {name: value for name, value in origin.items() if name != "gallery" or not self.data}
        try:
            made = audit.from_settings({**settings, "origin": kept}, task=task, data=held)
        except (TypeError, AttributeError, ValueError) as problem:  # written by hand, with entries that nobody knows
            raise LoadError(f"{path} is not the configuration of an audit: {problem}") from None
        return replace(made, origin={**kept, "task": reference, "data": data})


def task_of(reference: str, data: Any) -> Task:
    """The Task that a reference names, or a task or model of the registry made to fit these data."""
    if is_reference(reference):
        return a_task(named_object(reference, "task"), reference)
    return fitting(reference, data)


def fitting(name: str, data: Any) -> Task:
    """A task by name, or a model of the registry as a classifier, for these images; untrained, and always the same."""
    if not isinstance(data, Images):
        raise LoadError(
            f"The model {name} is built to fit images; --data gives {type(data).__name__}. Name a set of images."
        )
    if is_task(name):
        made: Task = registry.parse("task", name).of(data)
        return made
    seed = torch.Generator().manual_seed(0)
    shape = tuple(data.x.shape[1:])
    known = BUILTIN_MODEL if name == BUILTIN else name
    network = registry.get("model", known, shape=shape, classes=data.classes, generator=seed)
    return Task.supervised(network, torch.nn.functional.cross_entropy, like=(data.x[:1], data.y[:1]))


def _with_prior(planned: Audit) -> Audit:
    """Where an attack searches among the images of a generator, and a training is attacked: what came of that training.

    The server has that model in the end: it is the threat model of GIDM.
    """
    asks = any("generator" in attack.needs for _, attack in named_attacks(planned.attacks))
    if not asks or planned.generator is not None or planned.trained is None or not planned.task.drawn:
        return planned
    origin = {**planned.origin, "generator": FINAL}
    return replace(planned, generator=final_network(planned.task, planned.trained), origin=origin)


def _said(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value not in (None, (), "")}


def _usable(engine: Engine) -> Engine:
    from gradleak.cli.loading import engine as checked

    checked(engine.device, engine.precision)
    return engine


def _quick(planned: Audit) -> Audit:
    """Every cell with two steps on one target: does everything run? The numbers mean nothing."""
    attacks = [_with_steps(each, 2) if isinstance(each, str) else _shortened(each, 2) for each in planned.attacks]
    return replace(planned, attacks=attacks, targets=1, seeds=tuple(planned.seeds)[:1], trial=True)


def _shortened(attack: Attack, steps: int) -> Attack:
    """The same for an attack that was made in Python."""
    if isinstance(attack, Composed):
        return shortened(attack, steps)
    has_steps = is_dataclass(attack) and any(held.name == "steps" for held in fields(attack))
    return replace(attack, steps=steps) if has_steps else attack  # type: ignore[type-var]


def _with_steps(method: str, steps: int) -> str:
    """`ig:steps=4800,lr=1` with fewer steps; a method without steps stays as it is."""
    name, _, settings = method.partition(":")
    counts = [count for count in ("steps", "fine_steps") if count in registry.entry("attack", name).settings]
    if not counts:
        return method
    others = [piece for piece in registry.pieces(settings) if piece.partition("=")[0].strip() not in counts]
    return f"{name}:{','.join([*(f'{count}={steps}' for count in counts), *others])}"
