"""Functions of one settings object that are called with plain keywords.

    @dataclass(frozen=True)
    class Search:
        steps: int = 1000
        lr: float = 0.1

    @takes(Search)
    def attack(search: Search) -> Composed: ...

    attack(steps=20)

    @takes(Search)
    def reconstruct(task: Task, update: Params, *, search: Search) -> Batch: ...

    reconstruct(task, update, lr=0.01)
    reconstruct(task, update, search=Search(steps=20))

A method with many settings keeps them in a dataclass, which can check them, be passed on whole, and share fields with
others: by inheritance, or as a field that is a `Group`. Registry, command line and documentation still see one flat
signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

Settings = TypeVar("Settings")
Result = TypeVar("Result")


class Group:
    """Base of a dataclass of settings that stands flat inside others, at the place of its field."""


def takes(settings: type[Settings]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a function whose last parameter is `settings`: callers pass its fields as keywords, or one instance."""
    if not is_dataclass(settings):
        raise TypeError(f"takes() needs a dataclass of settings; given {settings!r}.")
    flat = list(_parameters(settings))
    names = {parameter.name for parameter in flat}
    made = {field.name for field in fields(settings) if field.default_factory is not MISSING}  # anew for every call
    defaults = {each.name: each.default for each in flat if each.default is not each.empty and each.name not in made}
    grouped = any(_is_group(hint) for hint in get_type_hints(settings).values())

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        *others, last = inspect.signature(function).parameters.values()
        try:
            hints = get_type_hints(function)
        except NameError:  # a method that returns its own class, which is still being defined
            hints = dict(function.__annotations__)
        # The place of a setting means nothing to a reader where groups are flattened or other arguments come first.
        kind = last.KEYWORD_ONLY if grouped or last.kind is last.KEYWORD_ONLY else None
        parameters = [
            *(each.replace(annotation=hints.get(each.name, Any)) for each in others),
            *(each if kind is None else each.replace(kind=kind) for each in flat),
        ]
        parameters.sort(key=lambda each: each.kind)  # positional ones first
        signature = inspect.Signature(parameters, return_annotation=hints.get("return", Any))

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Result:
            if last.name in named or (len(values) == 1 and not named and isinstance(values[0], settings)):
                return function(*values, **named)
            bound = signature.bind(*values, **named)
            rest = {name: value for name, value in bound.arguments.items() if name not in names}
            named = {**defaults, **bound.arguments}
            return function(**rest, **{last.name: _build(settings, named)})

        call.__signature__ = signature  # type: ignore[attr-defined]
        annotations = {each.name: each.annotation for each in parameters}
        call.__annotations__ = {**annotations, "return": signature.return_annotation}
        return call

    return decorate


def _parameters(settings: Any, group: Any = None) -> Iterator[inspect.Parameter]:
    """The flat parameters. `group`: the instance that gives a nested class its defaults."""
    hints = get_type_hints(settings, include_extras=True)
    for field in (each for each in fields(settings) if each.init):
        default = _default(field) if group is None else getattr(group, field.name)
        if _is_group(hints[field.name]):
            yield from _parameters(hints[field.name], None if default is MISSING else default)
            continue
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY if field.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=hints[field.name],
        )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Group)


def _build(settings: Any, values: Mapping[str, Any]) -> Any:
    """The settings object of flat values, groups included."""
    hints = get_type_hints(settings)
    named = {field.name: hints[field.name] for field in fields(settings) if field.init}
    groups = {name: _build(hint, values) for name, hint in named.items() if _is_group(hint)}
    return settings(**groups, **{name: values[name] for name in named if name not in groups and name in values})
