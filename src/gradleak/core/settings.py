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

A method with many hyper-parameters keeps them in a dataclass, which can check them, be passed on whole, and share
fields with others by inheritance. Registry, command line and documentation still see one flat signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_type_hints

Settings = TypeVar("Settings")
Result = TypeVar("Result")


def takes(settings: type[Settings]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a function whose last parameter is `settings`: callers pass its fields as keywords, or one instance."""
    if not is_dataclass(settings):
        raise TypeError(f"takes() needs a dataclass of settings; given {settings!r}.")

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        *others, last = inspect.signature(function).parameters.values()
        fields = inspect.signature(settings).parameters
        hints = {**get_type_hints(function), **get_type_hints(settings, include_extras=True)}
        result = hints.pop("return", Any)
        flat = [each.replace(annotation=hints.get(each.name, Any)) for each in (*others, *fields.values())]
        if last.kind is last.KEYWORD_ONLY:
            flat = [each.replace(kind=last.kind) if each.name in fields else each for each in flat]
        flat.sort(key=lambda each: each.kind)  # positional ones first
        signature = inspect.Signature(flat, return_annotation=result)

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Result:
            if last.name in named or (len(values) == 1 and not named and isinstance(values[0], settings)):
                return function(*values, **named)
            if not others:
                return function(settings(*values, **named))
            arguments = signature.bind(*values, **named).arguments
            options = settings(**{name: arguments.pop(name) for name in list(arguments) if name in fields})
            return function(**arguments, **{last.name: options})

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {**{each.name: each.annotation for each in flat}, "return": result}
        return call

    return decorate
