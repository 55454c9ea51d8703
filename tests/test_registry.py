"""Names and settings of methods: what is understood, and what is refused with which message."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_type_hints

import pytest

import gradleak.federation  # noqa: F401 (brings the kinds of the private side)
from gradleak.core import registry
from gradleak.core.registry import BadSetting, UnknownName, named
from gradleak.core.settings import takes

KINDS = ["attack", "defence", "labels", "model", "participation", "partition"]


class Start(Protocol):
    def begin(self) -> None: ...


@pytest.fixture(autouse=True)
def _method() -> Iterator[None]:
    @named("made-up", kind="attack")
    def made_up(
        *,
        steps: int = 3,
        lr: float = 0.1,
        fast: bool = False,
        labels: str = "auto",
        seed: int | None = None,
        start: str | Start = "tiled",
        mode: Literal["a", "b"] = "a",
        shape: tuple[int, int] = (1, 1),
        widths: Sequence[int] = (),
        call: Callable[[], int] | None = None,
        anything: Any = None,
    ) -> dict[str, Any]:
        return dict(locals())

    yield
    del registry._entries["attack", "made-up"]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("steps=10", "steps", 10),
        ("lr=1", "lr", 1),
        ("lr=1e-3", "lr", 1e-3),
        ("fast=true", "fast", True),
        ("labels=none", "labels", "none"),  # text is wanted, so the word stays one
        ("labels=7", "labels", "7"),
        ("seed=none", "seed", None),
        ("seed=4", "seed", 4),
        ("start=grey", "start", "grey"),
        ("mode=b", "mode", "b"),
        ("shape=(2,3),steps=1", "shape", (2, 3)),
        ("widths=[1,2,3]", "widths", [1, 2, 3]),
        ("anything=x", "anything", "x"),
    ],
)
def test_settings_are_read_by_their_annotations(text: str, name: str, value: Any) -> None:
    made = registry.parse("attack", f"made-up:{text}")
    assert made[name] == value
    assert type(made[name]) is type(value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("steps=abc", "attack 'made-up': steps must be a whole number; given 'abc'."),
        ("steps=1.5", "steps must be a whole number; given 1.5"),
        ("steps=true", "steps must be a whole number; given True"),
        ("steps=none", "steps must be a whole number; given None"),
        ("lr=fast", "lr must be a number; given 'fast'"),
        ("fast=1", "fast must be true or false; given 1"),
        ("seed=x", "seed must be a whole number or none; given 'x'"),
        ("mode=c", "mode must be 'a' or 'b'; given 'c'"),
        ("shape=(1,2,3)", "shape must be tuple[int, int]; given (1, 2, 3)"),
        ("widths=(1,x)", "widths must be"),
        ("call=3", "call must be"),
        ("stps=3", "has no setting 'stps'. Did you mean 'steps'"),
    ],
)
def test_values_of_another_type_are_refused(text: str, told: str) -> None:
    with pytest.raises(BadSetting) as refusal:
        registry.parse("attack", f"made-up:{text}")
    assert told in str(refusal.value)


def test_a_missing_setting_is_named() -> None:
    @named("demanding", kind="attack")
    def demanding(*, budget: float) -> float:
        return budget

    try:
        with pytest.raises(BadSetting, match="'demanding' needs the setting 'budget'"):
            registry.get("attack", "demanding")
        assert registry.get("attack", "demanding", budget=2) == 2
    finally:
        del registry._entries["attack", "demanding"]


def test_annotations_that_only_a_type_checker_knows_are_not_checked() -> None:
    def make(*, steps: NoSuchType = 1) -> int:  # type: ignore[name-defined]  # noqa: F821
        return steps

    assert registry.Entry("x", "attack", make, "", "unverified").types == {}


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_fits_its_own_annotation(kind: str) -> None:
    for entry in registry.entries(kind):
        for name, hint in entry.types.items():
            if name in entry.settings and name not in entry.required:
                assert registry._fits(entry.settings[name], hint), (entry.name, name, hint)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_nobody_has_is_answered_with_those_there_are(kind: str) -> None:
    with pytest.raises(UnknownName, match=f"Unknown {kind} 'zzz'. Available: {registry.entries(kind)[0].name}"):
        registry.parse(kind, "zzz:a=1")


def test_a_kind_that_nobody_has_is_answered_with_those_there_are() -> None:
    with pytest.raises(UnknownName, match="Nothing is registered as a 'partitin'. Did you mean 'partition'"):
        registry.entries("partitin")


@pytest.mark.parametrize("kind", ["defence", "participation", "partition"])
def test_what_is_a_dataclass_can_be_spelled_and_read_back(kind: str) -> None:
    for entry in registry.entries(kind):
        made = entry.make(**dict.fromkeys(entry.required, 1))
        settings = registry.spelled(made).partition(":")[2]
        assert registry.parse(kind, f"{entry.name}:{settings}") == made


@dataclass(frozen=True)
class Search:
    steps: int = 10
    rate: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1; given {self.steps}.")


@takes(Search)
def searched(search: Search) -> Search:
    return search


@takes(Search)
def found(target: str, scale: float = 1.0, *, search: Search) -> tuple[str, float, Search]:
    return target, scale, search


def test_settings_are_passed_as_keywords_or_whole() -> None:
    assert searched(steps=3) == searched(3) == searched(Search(3)) == Search(3)
    assert found("x", steps=3) == found("x", search=Search(3)) == found(target="x", steps=3) == ("x", 1.0, Search(3))
    assert found("x", 2.0, rate=0.5) == ("x", 2.0, Search(rate=0.5))
    with pytest.raises(ValueError, match="steps must be at least 1; given 0"):
        found("x", steps=0)
    with pytest.raises(TypeError, match="steeps"):
        found("x", steeps=3)
    with pytest.raises(TypeError, match="too many positional arguments"):
        found("x", 2.0, 3)
    with pytest.raises(TypeError, match="missing a required argument: 'target'"):
        found(steps=3)
    with pytest.raises(TypeError, match="needs a dataclass of settings"):
        takes(int)


def test_a_function_of_settings_shows_one_flat_signature() -> None:
    assert str(inspect.signature(searched)) == "(steps: int = 10, rate: float = 0.1) -> test_registry.Search"
    flat = inspect.signature(found).parameters
    assert list(flat) == ["target", "scale", "steps", "rate"]
    assert flat["steps"].kind is inspect.Parameter.KEYWORD_ONLY
    assert get_type_hints(found)["rate"] is float
