"""The public names: each is documented, and shown in an example that runs (tests/test_readme.py runs docs/api.md)."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import gradleak as gl

EXAMPLES = "".join(
    re.findall(r"^```python\n(.*?)^```", (Path(__file__).parents[1] / "docs" / "api.md").read_text(), re.S | re.M)
)


@pytest.mark.parametrize("name", gl.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    assert re.search(rf"\bgl\.{name}\b", EXAMPLES)


@pytest.mark.parametrize("name", gl.__all__)
def test_every_public_name_and_what_it_offers_is_documented(name: str) -> None:
    thing = getattr(gl, name)
    if name == "Batch":  # a name for dict[str, Tensor]
        return
    assert inspect.getdoc(thing)
    silent = [own for own, function in _offered(thing) if not inspect.getdoc(function)]
    assert not silent


def _offered(thing: Any) -> list[tuple[str, Any]]:
    """Methods and properties of a class; functions and classes that a module lists."""
    if inspect.isclass(thing):
        held = {own: value for own, value in vars(thing).items() if not own.startswith("_")}
        wanted = (property, staticmethod, classmethod)
        return [(own, value) for own, value in held.items() if isinstance(value, wanted) or inspect.isfunction(value)]
    if inspect.ismodule(thing):
        listed = {own: getattr(thing, own) for own in getattr(thing, "__all__", ())}
        return [(own, value) for own, value in listed.items() if inspect.isfunction(value) or inspect.isclass(value)]
    return []
