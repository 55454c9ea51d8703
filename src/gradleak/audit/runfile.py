"""run.toml: the configuration of an audit, for people to read and for repeating the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gradleak import __version__
from gradleak.audit.cells import Cell, named_attacks, named_defences
from gradleak.audit.private import AuditError, words_of
from gradleak.core.configuration import described, digest, from_toml, to_toml
from gradleak.core.registry import did_you_mean
from gradleak.engine import Engine
from gradleak.federation import Federation
from gradleak.federation.checkpoints import recipe, text
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import KINDS

if TYPE_CHECKING:
    from gradleak.audit.grid import Audit

VERSION = 1
PLAIN = (
    "attacks",
    "defences",
    "rounds",
    "targets",
    "seeds",
    "knowledge",
    "repeats",
    "unrelated",
    "trial",
    "given",
    "withheld",
)  # as Audit takes them
TABLES = ("federation", "engine", "origin")
WRITTEN = (
    "version",
    "gradleak",
    "lpips",
    "analyses",
    "fields",
    "fingerprint",
    "plan",
    "words",
)  # for readers and for resuming
Made = TypeVar("Made")


def settings_of(audit: Audit, cells: Sequence[Cell], control: str) -> dict[str, Any]:
    """Everything that determines the rows: by value, by name, or by a hash if it is a Python object."""
    attacks, defences = named_attacks(audit.attacks), named_defences(audit.defences)
    training = audit.federation.training
    settings = {
        "version": VERSION,
        "gradleak": __version__,
        "attacks": [name for name, _ in attacks],
        "defences": [name for name, _ in defences],
        "rounds": list(audit.rounds),
        "targets": audit.targets,
        "seeds": list(audit.seeds),
        "knowledge": list(audit.knowledge),
        "repeats": audit.repeats,
        "unrelated": audit.unrelated,
        "trial": audit.trial,
        **({"given": list(audit.given)} if audit.given else {}),
        **({"withheld": list(audit.withheld)} if audit.withheld else {}),
        "lpips": None if audit.lpips is None else audit.lpips.name,
        "analyses": [text(analysis) for analysis in audit.analyses],
        "origin": dict(audit.origin),
        "federation": {
            **audit.federation.settings(),
            "training": recipe(training),
        },
        "engine": asdict(audit.engine),
        **({"words": sorted(words)} if (words := words_of(audit.task, audit.data, audit.gallery)) else {}),
        "fields": {name: _described(field) for name, field in audit.task.fields.items()},
        "fingerprint": {
            **audit.fingerprint,
            **({} if audit.generator is None else {"generator": digest(audit.generator)}),
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
    return from_toml(to_toml(settings))  # as read back, so that the two compare equal


def _described(field: Field) -> dict[str, Any]:
    """A field as plain values: its kind by name, with the settings of the kind; `public` only if it is."""
    plain = {entry.name: getattr(field, entry.name) for entry in fields(field) if entry.name not in ("kind", "public")}
    settings = {name: value for name, value in field.kind.settings().items() if name != "words"}  # kept as arrays
    return {
        **plain,
        "kind": field.kind.name,
        **({"public": True} if field.public else {}),
        **({"settings": settings} if settings else {}),
    }


def field_of(entry: Mapping[str, Any]) -> Field:
    """The field that a table of the file describes; without a kind (older files), the natural one of its shape."""
    kind = KINDS[entry["kind"]].of(entry.get("settings", {})) if "kind" in entry else None
    bounds = entry["bounds"]
    return Field(
        tuple(entry["shape"]),
        tuple(map(tuple, bounds)) if isinstance(bounds[0], Sequence) else tuple(bounds),
        tuple(entry["mean"]),
        tuple(entry["std"]),
        entry.get("classes"),
        kind,  # type: ignore[arg-type]  # None: by shape and bounds
        entry.get("public", False),
    )


def toml_of(audit: Audit, settings: Mapping[str, Any]) -> str:
    """The file, with a comment: how to repeat the run, or why this file is not enough."""
    training = replace(audit.federation.training, lr=1.0, steps=None, epochs=None, batch_size=None)
    named = all(item is None or isinstance(item, str) for item in (*audit.attacks, *audit.defences))
    obstacles = {
        "its trained weights were given in Python": audit.trained is not None and "trained" not in audit.origin,
        "it attacks what was recorded (gradleak audit --observations)": "observations" in audit.origin,
        "its task or its data are Python objects": not {"task", "data"} <= audit.origin.keys(),
        "an attack or a defence is a Python object": not named,
        "the client's recipe is more than plain SGD": described(training) != described(LocalTraining(lr=1.0)),
        "it has analyses or LPIPS": bool(audit.analyses) or audit.lpips is not None,
        "the generator was given in Python": audit.generator is not None and "generator" not in audit.origin,
    }
    reasons = [reason for reason, holds in obstacles.items() if holds]
    how = (
        f"This file alone cannot repeat it, since {', and '.join(reasons)}; the script that built it can."
        if reasons
        else "Repeat it from the folder where it was started, since paths below are relative to that one:\n"
        "gradleak audit --config PATH/TO/THIS/run.toml -o ANOTHER_FOLDER"
    )
    return to_toml(settings, f"An audit by gradleak {__version__}.\n{how}")


def arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of Audit besides task, data and gallery, from a file that a person may have changed."""
    _demand_names(settings, (*PLAIN, *TABLES, *WRITTEN), "run.toml")
    if "attacks" not in settings:
        raise AuditError("run.toml names no attacks.")
    federation, beyond = federation_of(settings.get("federation", {}))
    beyond += [name for name in ("analyses", "lpips") if settings.get(name)]
    if beyond:
        raise AuditError(
            f"This run was built in Python: {', '.join(beyond)} cannot be made from run.toml. Use its script."
        )
    return {
        **{name: settings[name] for name in PLAIN if name in settings},
        "federation": federation,
        "engine": _made(Engine, settings.get("engine", {})),
        "origin": dict(settings.get("origin", {})),
    }


def federation_of(settings: Mapping[str, Any]) -> tuple[Federation, list[str]]:
    """The federation that a table of the file describes, and the parts of it that only Python can make."""
    plain = dict(settings)
    training = dict(plain.pop("training", {"lr": 1.0}))
    usual = recipe(LocalTraining(lr=1.0))
    named = ("optimiser", "schedule", "augmentation")
    beyond = [name for name in named if training.pop(name, usual[name]) != usual[name]]
    return _made(Federation, {**plain, "training": _made(LocalTraining, training)}), beyond


def _made(kind: Callable[..., Made], settings: Mapping[str, Any]) -> Made:
    """An object from a table of the file. An error names the setting that is unknown, missing or odd."""
    _demand_names(settings, [entry.name for entry in fields(kind)], kind.__name__)  # type: ignore[arg-type]
    try:
        return kind(**settings)
    except TypeError as problem:
        raise AuditError(f"The settings of {kind.__name__} do not fit: {problem}.") from None


def _demand_names(settings: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if odd := [name for name in settings if name not in known]:
        raise AuditError(f"{where} has no setting {odd[0]!r}.{did_you_mean(odd[0], known)}")
