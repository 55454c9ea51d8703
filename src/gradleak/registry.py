"""Names for methods: `@named("ig", kind="attack", paper=...)` puts a function in the list that users see.

A named method is a plain function with keyword-only hyper-parameters that returns a composition. Other packages add
theirs through the entry-point groups `gradleak.attacks`, `gradleak.defences` and `gradleak.models`: an entry point
names a module, and importing it runs its `@named` decorators.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

Make = TypeVar("Make", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """One registered method: how to make it, where it comes from, and whether its numbers were checked."""

    name: str
    kind: str
    make: Callable[..., Any]
    paper: str
    status: str  # "verified": checked against its paper's figures; "unverified": not yet

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.make) or "").split("\n", 1)[0]

    @property
    def settings(self) -> dict[str, Any]:
        """Hyper-parameters with their defaults, as the signature states them."""
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: None if p.default is p.empty else p.default for p in parameters}


_entries: dict[tuple[str, str], Entry] = {}
# Where each kind lives. Imported on first use, so `import gradleak` stays light.
_homes = {
    "attack": "gradleak.attacks",
    "defence": "gradleak.defences",
    "labels": "gradleak.parts.labels",
    "model": "gradleak.models",
}
_loaded: set[str] = set()


class UnknownName(LookupError):
    """A name nothing is registered under; the message offers the nearest ones."""


class BadSetting(TypeError):
    """A hyper-parameter that the named method does not take, or text that does not spell one."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence to end an error message with: the near misses, then everything there is."""
    known = sorted(known)
    near = difflib.get_close_matches(given.lower(), known, n=3, cutoff=0.5)  # papers write iDLG, names are lower case
    hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    return f"{hint} Available: {', '.join(known) or 'nothing'}."


def named(name: str, *, kind: str, paper: str = "", status: str = "unverified") -> Callable[[Make], Make]:
    """Register a function under `name`. The function itself is returned unchanged."""

    def register(make: Make) -> Make:
        held = _entries.get((kind, name))
        if held is not None and held.make.__module__ != make.__module__:
            raise ValueError(f"{kind} name {name!r} is taken by {held.make.__module__}; choose another name.")
        _entries[kind, name] = Entry(name, kind, make, paper, status)
        return make

    return register


def _load(kind: str) -> None:
    if kind in _loaded:
        return
    if kind not in _homes:
        raise UnknownName(f"Nothing is registered as a {kind!r}.{did_you_mean(kind, _homes)}")
    import_module(_homes[kind])
    for point in entry_points(group=f"{_homes[kind]}"):
        point.load()
    _loaded.add(kind)


def entries(kind: str) -> list[Entry]:
    """Every registered method of a kind, by name."""
    _load(kind)
    return sorted((entry for (held, _), entry in _entries.items() if held == kind), key=lambda entry: entry.name)


def entry(kind: str, name: str) -> Entry:
    _load(kind)
    try:
        return _entries[kind, name]
    except KeyError:
        known = [other.name for other in entries(kind)]
        raise UnknownName(f"Unknown {kind} {name!r}.{did_you_mean(name, known)}") from None


def get(kind: str, name: str, **settings: Any) -> Any:
    """Make the named method with these hyper-parameters; an unknown one is an error that lists the known ones."""
    found = entry(kind, name)
    unknown = [key for key in settings if key not in found.settings]
    if unknown:
        raise BadSetting(f"{kind} {name!r} has no setting {unknown[0]!r}.{did_you_mean(unknown[0], found.settings)}")
    return found.make(**settings)


def parse(kind: str, text: str) -> Any:
    """Make a method from the command line's spelling, `name` or `name:setting=value,setting=value`."""
    name, _, rest = text.strip().partition(":")
    settings: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise BadSetting(f"In {text!r}, {item!r} is not a setting. Write {name}:setting=value,setting=value.")
        settings[key.strip().replace("-", "_")] = _literal(value.strip())
    return get(kind, name, **settings)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
