"""Small settings by name, as files and the command line spell them: `dir_class:alpha=0.5`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from gradleak.registry import BadSetting, UnknownName, did_you_mean, pieces

Thing = TypeVar("Thing")


def read(known: Mapping[str, type[Thing]], text: str, what: str) -> Thing:
    """The object that `name` or `name:setting=value,setting=value` spells, among the known ones."""
    name, _, rest = text.strip().partition(":")
    if name not in known:
        raise UnknownName(f"Unknown {what} {name!r}.{did_you_mean(name, known)}")
    kind: Any = known[name]
    settings = {entry.name for entry in fields(kind)}
    given: dict[str, Any] = {}
    for piece in pieces(rest):
        setting, equals, value = (part.strip() for part in piece.partition("="))
        setting = setting.replace("-", "_")
        if not equals:
            raise BadSetting(f"In {text!r}, {piece!r} is not a setting. Write {name}:setting=value.")
        if setting not in settings:
            raise BadSetting(f"{what} {name!r} has no setting {setting!r}.{did_you_mean(setting, settings)}")
        try:
            given[setting] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise BadSetting(f"{what} {name!r}: {setting} must be a number; given {value!r}.") from None
    try:
        return kind(**given)
    except BadSetting:
        raise
    except TypeError:
        missing = ", ".join(sorted(settings - given.keys()))
        raise BadSetting(f"{what} {name!r} needs settings: {missing}.") from None


def write(thing: Any) -> str:
    """The text that `read` turns into an equal object."""
    settings = ",".join(f"{entry.name}={getattr(thing, entry.name)!r}" for entry in fields(thing))
    return f"{thing.name}:{settings}" if settings else str(thing.name)


def demand_number(what: str, value: Any, kind: type, least: float, most: float | None = None) -> None:
    """A whole number, or any, within bounds; else an error that says which."""
    right = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not right or not value >= least or (most is not None and not value <= most):
        word = "a whole number" if kind is int else "a number"
        bounds = f"of at least {least:g}" if most is None else f"from {least:g} to {most:g}"
        raise BadSetting(f"{what} must be {word} {bounds}; given {value!r}.")
