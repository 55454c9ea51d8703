"""`takes`: a function of one settings object has one flat signature, for Python, typer and the registry."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from gradleak.core.settings import Group, takes


@dataclass(frozen=True)
class Look(Group):
    colour: Annotated[str, typer.Option(help="A colour.")] = "red"
    weight: Annotated[int | None, typer.Option(min=1)] = None


@dataclass(frozen=True)
class Flat:
    name: Annotated[str, typer.Argument()]
    group: Look = Look(colour="blue")
    last: Annotated[bool, typer.Option("--last")] = False


@dataclass(frozen=True)
class Twice:
    group: Look = Look()
    colour: Annotated[str, typer.Option()] = ""


def test_a_command_gets_one_object_and_typer_a_flat_list() -> None:
    received: list[Flat] = []

    @takes(Flat)
    def command(options: Flat) -> None:
        """What it does."""
        received.append(options)

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["name", "colour", "weight", "last"], "groups at their place"
    assert parameters["name"].default is inspect.Parameter.empty
    assert parameters["colour"].default == "blue", "of the group as the command has it"
    small = typer.Typer()
    small.command()(command)
    assert "What it does." in CliRunner().invoke(small, ["--help"]).stdout
    assert CliRunner().invoke(small, []).exit_code == 2
    assert CliRunner().invoke(small, ["--weight", "0", "one"]).exit_code == 2
    assert CliRunner().invoke(small, ["one", "--weight", "3", "--last"]).exit_code == 0
    assert CliRunner().invoke(small, ["two", "--colour", "green"]).exit_code == 0
    assert received == [Flat("one", Look("blue", 3), last=True), Flat("two", Look("green"))]


def test_two_options_of_one_name_are_refused() -> None:
    def command(options: Twice) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'colour'"):
        takes(Twice)(command)


@dataclass(frozen=True)
class Search:
    steps: int = 10
    lr: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1; given {self.steps}.")


@takes(Search)
def search(settings: Search) -> tuple[int, float]:
    """Search."""
    return settings.steps, settings.lr


def test_plain_keywords_places_and_a_whole_object() -> None:
    assert search(steps=3) == (3, 0.1)
    assert search(3, 0.5) == search(Search(3, 0.5)) == (3, 0.5)
    assert search() == (10, 0.1)
    assert search.__doc__ == "Search."
    assert {name: p.default for name, p in inspect.signature(search).parameters.items()} == {"steps": 10, "lr": 0.1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        search(step=3)
    with pytest.raises(ValueError, match="at least 1; given 0"):
        search(steps=0)


def test_settings_are_a_dataclass() -> None:
    with pytest.raises(TypeError, match="needs a dataclass of settings; given"):
        takes(int)


@dataclass(frozen=True)
class Split:
    first: int
    _: KW_ONLY
    second: int = 2


def test_keyword_only_settings_stay_so() -> None:
    both = takes(Split)(lambda settings: (settings.first, settings.second))
    assert both(1, second=3) == (1, 3)
    with pytest.raises(TypeError, match="positional"):
        both(1, 3)
