"""Names for methods: `@named("ig", kind="attack", paper=...)` puts a function in the list that users see.

A named method is a plain function with keyword-only hyper-parameters that returns a composition, or a frozen dataclass
whose fields are the hyper-parameters. Other packages add theirs through entry points, whose group is the home of the
kind (`gradleak.attacks`, `gradleak.defences`, ...): an entry point names a module, and importing it runs its `@named`
decorators.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import entry_points
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Make = TypeVar("Make", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """One registered method: how to make it, where it comes from, and whether its numbers were checked."""

    name: str
    kind: str
    make: Callable[..., Any]
    paper: str
    status: str  # "verified": checked against its paper's figures; "unverified": not yet; "": there are none to check

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.make) or "").split("\n", 1)[0]

    @property
    def settings(self) -> dict[str, Any]:
        """Hyper-parameters with their defaults, as the signature states them."""
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: None if p.default is p.empty else p.default for p in parameters}

    @property
    def required(self) -> list[str]:
        """Hyper-parameters without a default."""
        parameters = inspect.signature(self.make).parameters.values()
        return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    @property
    def types(self) -> dict[str, Any]:
        """The annotations of the hyper-parameters; empty where they name what only a type checker imports."""
        try:
            return get_type_hints(self.make)
        except (NameError, TypeError, AttributeError):
            return {}


_entries: dict[tuple[str, str], Entry] = {}
_former: dict[
    tuple[str, str], str
] = {}  # names of an earlier version -> names now; they work for one release, and warn
# Where each kind lives, imported on first use: `import gradleak` stays light. Kinds of the private side are not here,
# since attack code must not reach them: `gradleak.federation` registers its own, `gradleak.audit` adds a home.
_homes: dict[str, tuple[str, ...]] = {
    "aggregation": ("gradleak.secure.reveal",),
    "attack": ("gradleak.attacks", "gradleak.auto"),
    "defence": ("gradleak.defences",),
    "generator": ("gradleak.priors.recipes",),
    "labels": ("gradleak.parts.labels",),
    "model": ("gradleak.models",),
}
_GROUPS = {"generator": "gradleak.generators.recipes"}  # of entry points, where the home has moved since
_loaded: set[str] = set()


class UnknownName(LookupError):
    """A name that nothing is registered under; the message suggests the nearest ones."""


class BadSetting(TypeError):
    """A hyper-parameter that the method does not have, a value of the wrong type, or text that is no setting."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest names, then all names."""
    known = sorted(known)
    near = difflib.get_close_matches(given.lower(), known, n=3, cutoff=0.5)  # papers write iDLG, names are lower case
    hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    return f"{hint} Available: {', '.join(known) or 'nothing'}."


def named(
    name: str, *, kind: str, paper: str = "", status: str = "unverified", formerly: str = ""
) -> Callable[[Make], Make]:
    """Register a function under `name`. The function itself is returned unchanged.

    formerly   its name in an earlier version, which still finds it
    """

    def register(make: Make) -> Make:
        taken = _entries.get((kind, name))
        if taken is not None and taken.make.__module__ != make.__module__:
            raise ValueError(f"{kind} name {name!r} is taken by {taken.make.__module__}; choose another name.")
        _entries[kind, name] = Entry(name, kind, make, paper, status)
        if formerly:
            _former[kind, formerly] = name
        return make

    return register


def lives_in(kind: str, *modules: str) -> None:
    """Say which modules register a kind. Those that may see the truth are named by their own layer, not here."""
    _homes[kind] = modules


def _load(kind: str) -> None:
    if kind in _loaded:
        return
    if kind not in _homes:
        known = {*_homes, *(each for each, _ in _entries)}
        if kind not in known:
            raise UnknownName(f"Nothing is registered as a {kind!r}.{did_you_mean(kind, known)}")
        return
    for home in _homes[kind]:
        import_module(home)
    for point in entry_points(group=_GROUPS.get(kind, _homes[kind][0])):
        point.load()
    _loaded.add(kind)


def entries(kind: str) -> list[Entry]:
    """Every registered method of a kind, by name."""
    _load(kind)
    return sorted((entry for (each, _), entry in _entries.items() if each == kind), key=lambda entry: entry.name)


def entry(kind: str, name: str) -> Entry:
    """What is registered under this name, or an error that suggests one."""
    _load(kind)
    if now := _former.get((kind, name)):
        message = f"The {kind} {name!r} is {now!r} now. The old name goes with release 0.3."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = now
    try:
        return _entries[kind, name]
    except KeyError:
        known = [other.name for other in entries(kind)]
        raise UnknownName(f"Unknown {kind} {name!r}.{did_you_mean(name, known)}") from None


def get(kind: str, name: str, **settings: Any) -> Any:
    """Make the named method. An unknown hyper-parameter, or a value of another type than annotated, is an error."""
    method = entry(kind, name)
    unknown = [key for key in settings if key not in method.settings]
    if unknown:
        raise BadSetting(f"{kind} {name!r} has no setting {unknown[0]!r}.{did_you_mean(unknown[0], method.settings)}")
    if missing := [key for key in method.required if key not in settings]:
        raise BadSetting(f"{kind} {name!r} needs the setting {missing[0]!r}.")
    types = method.types
    for key, value in settings.items():
        if key in types and not _fits(value, types[key]):
            raise BadSetting(f"{kind} {name!r}: {key} must be {_wanted(types[key])}; given {value!r:.80}.")
    return method.make(**settings)


def parse(kind: str, text: str, **more: Any) -> Any:
    """Make a method from the command line's spelling, `name` or `name:setting=value,setting=value`.

    more   settings that the caller decides, whatever the text says
    """
    name, _, rest = text.strip().partition(":")
    settings: dict[str, Any] = {}
    types = entry(kind, name).types
    for item in pieces(rest):
        key, equals, value = item.partition("=")
        if not equals:
            raise BadSetting(f"In {text!r}, {item!r} is not a setting. Write {name}:setting=value,setting=value.")
        setting = key.strip().replace("-", "_")
        settings[setting] = _literal(value.strip(), types.get(setting, Any))
    try:
        return get(kind, name, **{**settings, **more})
    except ValueError as problem:  # the right type, but not an allowed value
        raise BadSetting(f"{kind} {name!r}: {problem}") from problem


def spelled(thing: Any) -> str:
    """The text that `parse` turns into an equal object: a dataclass with the name it is registered under."""
    settings = ",".join(f"{field.name}={getattr(thing, field.name)!r}" for field in fields(thing))
    return f"{thing.name}:{settings}" if settings else str(thing.name)


def pieces(text: str) -> list[str]:
    """Split at commas outside brackets; empty pieces are dropped."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


def _literal(text: str, hint: Any) -> Any:
    """The value that the text spells; the text itself where only that fits (`norm=none`, where norm is text)."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    return value if _fits(value, hint) or not _fits(text, hint) else text


def _fits(value: Any, hint: Any) -> bool:
    """Is this a value of that annotation? True for annotations that cannot be checked."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in inside)
    if origin is Literal:
        return value in inside
    if hint is None or hint is type(None):
        return value is None
    if hint in (int, float):  # True is an int to Python, and no number to a person
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    plain = origin or hint
    if plain in (tuple, list, Sequence):  # a file gives lists where a person writes tuples
        return isinstance(value, (tuple, list)) and _members_fit(value, plain, inside)
    if plain is Callable:
        return callable(value)
    try:
        return isinstance(value, plain)
    except TypeError:  # a protocol, a type variable, Any
        return True


def _members_fit(values: Sequence[Any], plain: Any, inside: tuple[Any, ...]) -> bool:
    if plain is tuple and inside and inside[-1] is not Ellipsis:
        return len(values) == len(inside) and all(map(_fits, values, inside))
    return not inside or all(_fits(value, inside[0]) for value in values)


_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    None: "none",
    type(None): "none",
}


def _wanted(hint: Any) -> str:
    """An annotation in words."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_wanted, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return _WORDS.get(hint) or inspect.formatannotation(hint)
