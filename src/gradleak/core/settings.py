"""Functions of one settings object that are called with plain keywords.

    @dataclass(frozen=True)
    class Search:
        steps: int = 1000
        lr: float = 0.1

    @takes(Search)
    def attack(search: Search) -> Composed: ...

    attack(steps=20)

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


def takes(settings: type[Settings]) -> Callable[[Callable[[Settings], Result]], Callable[..., Result]]:
    """Decorate a function of `settings`: it is then called with the fields of that dataclass, or with one instance."""
    if not is_dataclass(settings):
        raise TypeError(f"takes() needs a dataclass of settings; given {settings!r}.")

    def decorate(function: Callable[[Settings], Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Result:
            if len(values) == 1 and not named and isinstance(values[0], settings):
                return function(values[0])
            return function(settings(*values, **named))

        result = get_type_hints(function).get("return", Any)
        hints = get_type_hints(settings, include_extras=True)
        flat = [
            parameter.replace(annotation=hints.get(name, Any))
            for name, parameter in inspect.signature(settings).parameters.items()
        ]
        call.__signature__ = inspect.Signature(flat, return_annotation=result)  # type: ignore[attr-defined]
        call.__annotations__ = {**{each.name: each.annotation for each in flat}, "return": result}
        return call

    return decorate
