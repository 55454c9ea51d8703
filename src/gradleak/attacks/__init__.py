"""One paper per file: each attack is a function that returns a composition of parts.

`get("ig", steps=2000)` makes one by name, `names()` lists them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from gradleak.attack import Attack
from gradleak.core import registry

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def get(name: str, **settings: Any) -> Attack:
    """The named attack with these hyper-parameters; an unknown name or setting is an error with the nearest ones."""
    attack: Attack = registry.get("attack", name, **settings)
    return attack


def names() -> list[str]:
    """Of every registered attack."""
    return [entry.name for entry in registry.entries("attack")]
