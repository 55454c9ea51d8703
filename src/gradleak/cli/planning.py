"""From the options of `gradleak audit` to the Audit that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gradleak import audit, generators
from gradleak.attack import Attack, Composed
from gradleak.audit import FINAL, Audit, final_network
from gradleak.audit.cells import named_attacks
from gradleak.audit.cost import shortened
from gradleak.audit.runfile import federation_of
from gradleak.cli.audit import AuditOptions
from gradleak.cli.formatting import sentence
from gradleak.cli.loading import (
    DATA_FORMS,
    as_task,
    fitted,
    methods,
    optional_numbers,
    task_for,
    training_data,
    usable,
)
from gradleak.cli.options import DataOptions
from gradleak.cli.references import BUILTIN, is_reference, load_object
from gradleak.cli.root import LoadError
from gradleak.core import registry
from gradleak.core.configuration import from_toml
from gradleak.engine import Engine
from gradleak.federation.checkpoints import Checkpoints
from gradleak.scenario.task import Task

QUICK_STEPS = 2


def plan_audit(options: AuditOptions) -> Audit:
    """The audit that the options name, with every other stated option put in."""
    if options.truth is not None:
        raise LoadError("--truth goes with --observations: an audit of its own updates knows the truth.")
    # Parsed before task and data are loaded, so that a slip in an option is told at once.
    federation = {"clients": options.clients, "examples": options.examples, "training": options.recipe.training()}
    batched = False if options.engine.one_by_one else None
    engine = {"device": options.engine.device, "precision": options.engine.precision, "batched": batched}
    settings = {
        "attacks": methods(options.attack or ()),
        "defences": methods(options.defence or ()),
        "rounds": optional_numbers(options.rounds, "--rounds"),
        "seeds": optional_numbers(options.seeds, "--seeds"),
        "targets": options.targets,
        "repeats": options.repeats,
        "given": options.known_fields,
    }
    base = _named_audit(options)
    planned = replace(
        base,
        federation=replace(base.federation, **_stated(federation)),
        engine=usable(replace(base.engine, **_stated(engine))),
        **_stated(settings),
    )
    planned = _with_generator(planned, options.generator)
    return _quick(planned) if options.quick else planned


def _named_audit(options: AuditOptions) -> Audit:
    """The audit of a configuration, of a training, of a file or the built-in one."""
    if options.config is not None and options.trained is not None:
        raise LoadError("--from and --config both say what is attacked: give one of them.")
    if options.config is not None:
        return _from_config(options, options.config)
    if options.trained is not None:
        return _from_training(options, options.trained)
    return _from_reference(options)


def _stated(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value not in (None, (), "")}


def _from_reference(options: AuditOptions) -> Audit:
    """The audit of a reference or of a model's name, with the data of --data; neither: the built-in one."""
    data = options.data
    if not options.model and not data.data:
        return audit.builtin(engine=_engine(options))
    if not is_reference(options.model):
        name = options.model or BUILTIN
        if not data.data:
            raise LoadError(f"Say which data {name} is trained on: {DATA_FORMS}.")
        examples = data.load()
        return _default_audit(options, task_for(name, examples), examples)
    value = load_object(options.model, "task")
    if isinstance(value, Audit):
        return replace(value, data=fitted(data.load(), value.task), gallery=None) if data.data else value
    task = as_task(value, options.model)
    if not data.data:
        raise LoadError(
            f"{options.model} is a Task, which holds no data. Say which examples its clients hold: {DATA_FORMS}."
        )
    return _default_audit(options, task, fitted(data.load(), task))


def _default_audit(options: AuditOptions, task: Task, examples: Any) -> Audit:
    origin = {"task": options.model or BUILTIN, **options.data.stated}
    attacks = audit.default_attacks(_engine(options), task, options.examples or 1, options.recipe.training())
    return Audit(task, examples, attacks, origin=origin)


def _engine(options: AuditOptions) -> Engine:
    """Where the audit will run: the default attacks depend on it."""
    return usable(Engine(device=options.engine.device) if options.engine.device else Engine())


def _from_training(options: AuditOptions, folder: Path) -> Audit:
    """The audit of a training's checkpoints: its task, data, clients and, unless one is stated, their recipe."""
    trained = Checkpoints(folder)
    origin: dict[str, Any] = trained.settings.get("origin") or {}
    if options.clients is not None:
        raise LoadError(f"--from takes the clients that {folder} was trained with: leave --clients out.")
    if options.data.stated:
        name = next(iter(options.data.stated))
        raise LoadError(f"--from takes the data that {folder} was trained on: leave --{name} out.")
    reference = options.model or origin.get("task", "")
    if not reference or "data" not in origin:
        raise LoadError(
            f"{folder} does not say where its task and data are found: the training was started from Python. "
            "Attack it from there: Audit(task, data, attacks, trained=Checkpoints(folder))."
        )
    examples, _ = training_data(origin)
    federation, unknown = federation_of({**trained.settings["federation"], "examples": 1})
    training = options.recipe.training()
    if unknown and training is None:
        raise LoadError(
            f"The clients' {', '.join(unknown)} is not plain SGD: say --lr, and --steps or --epochs. (--lr 1 alone "
            "attacks single gradients.)"
        )
    task = task_for(reference, examples)
    return Audit(
        task,
        fitted(examples, task),
        audit.default_attacks(_engine(options), task, options.examples or 1, training or federation.training),
        federation=federation,
        rounds=tuple(trained.rounds),
        trained=trained,
        origin={"task": reference, **DataOptions.of(origin).stated, "trained": str(folder)},
    )


def _from_config(options: AuditOptions, path: Path) -> Audit:
    """The audit of a run.toml; task and data are those that it names, or those of the options."""
    try:
        settings = from_toml(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise LoadError(f"{path} is not TOML: {sentence(problem)}") from None
    origin: dict[str, str] = settings.get("origin") or {}
    if not isinstance(origin, dict) or not all(isinstance(text, str) for text in origin.values()):
        raise LoadError(f"{path}: [origin] should name task and data; it is {origin!r:.80}.")
    reference = options.model or origin.get("task", "")
    data = options.data if options.data.data else DataOptions.of({**origin, **options.data.stated})
    if not reference or not data.data:
        raise LoadError(
            f"{path} does not say where its {'data are' if reference else 'task is'} found: the run was started "
            "from Python. Give them: gradleak audit FILE.py:task --data NAME --config ..."
        )
    examples = data.load()
    if "trained" in origin and not options.data.data:
        examples, _ = training_data(Checkpoints(Path(origin["trained"])).settings.get("origin") or data.stated)
    if options.data.data:
        others = {"gallery", *DataOptions.of(origin).stated}
        origin = {name: value for name, value in origin.items() if name not in others}
    task = task_for(reference, examples)
    examples = fitted(examples, task)
    try:
        planned = audit.from_settings({**settings, "origin": origin}, task=task, data=examples)
    except (TypeError, AttributeError, ValueError) as problem:  # written by hand, with unknown entries
        raise LoadError(f"{path} is not the configuration of an audit: {problem}") from None
    return replace(planned, origin={**origin, "task": reference, **data.stated})


def _with_generator(planned: Audit, path: Path | None) -> Audit:
    """The audit with the generator of a file or, for attacks on a denoiser's training, with its final model.

    The server has the final model in the end: this is the threat model of GIDM.
    """
    if path is not None:
        origin = {**planned.origin, "generator": str(path)}
        return replace(planned, generator=generators.load(path), origin=origin)
    needed = any("generator" in attack.needs for _, attack in named_attacks(planned.attacks))
    if not needed or planned.generator is not None or planned.trained is None or not planned.task.drawn:
        return planned
    origin = {**planned.origin, "generator": FINAL}
    return replace(planned, generator=final_network(planned.task, planned.trained), origin=origin)


def _quick(planned: Audit) -> Audit:
    """Every cell with two steps on one target: does everything run? The numbers mean nothing."""
    attacks = [_quick_method(each) if isinstance(each, str) else _quick_attack(each) for each in planned.attacks]
    return replace(planned, attacks=attacks, targets=1, seeds=tuple(planned.seeds)[:1], trial=True)


def _quick_attack(attack: Attack) -> Attack:
    """An attack that was made in Python, with fewer steps; one without steps stays as it is."""
    if isinstance(attack, Composed):
        return shortened(attack, QUICK_STEPS)
    has_steps = is_dataclass(attack) and any(field.name == "steps" for field in fields(attack))
    return replace(attack, steps=QUICK_STEPS) if has_steps else attack  # type: ignore[type-var]


def _quick_method(method: str) -> str:
    """`ig:steps=4800,lr=1` with fewer steps; a method without steps stays as it is."""
    name, _, settings = method.partition(":")
    counts = [count for count in ("steps", "fine_steps") if count in registry.entry("attack", name).settings]
    if not counts:
        return method
    others = [piece for piece in registry.pieces(settings) if piece.partition("=")[0].strip() not in counts]
    return f"{name}:{','.join([*(f'{count}={QUICK_STEPS}' for count in counts), *others])}"
