"""The grid of an audit: one cell is one attack against one defence, in one form, at one round, with one seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gradleak.attack import Attack
from gradleak.core import registry
from gradleak.federation import Federation
from gradleak.scenario.defence import Chain, Defence, OnlyVisible, overrides
from gradleak.scenario.observation import Knowledge

Thing = TypeVar("Thing")

UNDEFENDED = "undefended"
FORMS: dict[str, Callable[[Defence], Defence | None]] = {
    "naive": lambda defence: None,  # A0: ignores the defence, as most papers report
    "masked": OnlyVisible,  # A1: predicts plainly, weighs out what was noised or dropped
    "adaptive": lambda defence: defence,  # A2: predicts through the defence
    "averaged": lambda defence: defence,  # A2 that has seen the same client in several rounds: fresh noise averages out
}
"""What the attacker knows of a defence; the headline is the strongest of them."""

# Hooks that change what an informed attacker does; one that overrides none of them (say, only `initial`) has one form.
_COMPARED = ("noise_variance", "visible")
_PREDICTED = ("gradient", "upload", "reveal", "assumed")


@dataclass(frozen=True, eq=False)
class Cell:
    """One entry of the grid. `key` is a hash of everything that determines its result."""

    attack: Attack
    defence: Defence | None
    form: str
    round: int
    seed: int
    federation: Federation
    attack_name: str
    defence_name: str
    key: str = ""
    control: bool = False  # only the positive control, not part of the grid
    repeats: int = 1  # rounds in which the attacker has seen the same client train on the same examples
    given: tuple[str, ...] = ()  # fields that the threat model grants
    generator: Any = None  # a prior of the attacker's own
    withheld: tuple[str, ...] = ()  # capabilities that the threat model takes away: "recipe", "statistics"

    @property
    def knows(self) -> Knowledge:
        """The threat model: the client's recipe, and the defence as far as the form goes."""
        known = None if self.defence is None else FORMS[self.form](self.defence)
        recipe = self.federation.training_at(self.round)
        # Which fields are granted is known here, what is in them only where the clients are.
        whole = Knowledge(dict.fromkeys(self.given, torch.empty(0)), recipe, known, self.generator)
        return whole.without("recipe") if "recipe" in self.withheld else whole

    def __str__(self) -> str:
        against = self.defence_name if self.form == UNDEFENDED else f"{self.defence_name} ({self.form})"
        start = "positive control: " if self.control else ""
        where = f"B = {self.federation.examples}, round {self.round}, seed {self.seed}"
        return f"{start}{self.attack_name} against {against}, {where}"


def forms_of(defence: Defence | None, wanted: Sequence[str], random: bool = False) -> list[str]:
    """The wanted forms that differ from one another for this defence; there is always one.

    `random`: it makes another upload of the same examples every time, so that several rounds tell more than one.
    """
    if defence is None:
        return [UNDEFENDED]
    compared = any(overrides(defence, hook) for hook in _COMPARED)
    predicted = any(overrides(defence, hook) for hook in _PREDICTED)
    differs = {"naive": True, "masked": compared, "adaptive": predicted or compared, "averaged": random}
    return [form for form in FORMS if form in wanted and differs[form]] or ["naive"]


def named_attacks(given: Iterable[str | Attack]) -> list[tuple[str, Attack]]:
    """Attacks with the names that rows use: the text they were asked for with, else their own name."""
    return _distinct(
        (item, registry.parse("attack", item)) if isinstance(item, str) else (item.name, item) for item in given
    )


def named_defences(given: Iterable[str | Defence | None]) -> list[tuple[str, Defence | None]]:
    """Defences with the names that rows use; "none" is none, "a + b" a chain."""
    return _distinct(
        (item.strip(), defence_of(item)) if isinstance(item, str) else (_told(item), item) for item in given
    )


def defence_of(text: str) -> Defence | None:
    """`"none"`, `"pruning:keep=0.1"`, `"clipping + local-gaussian:sigma=1e+3"`."""
    parts = [part.strip() for part in re.split(r"\+(?=\s*[a-z])", text)]
    if parts == ["none"]:
        return None
    made = [registry.parse("defence", part) for part in parts]
    return made[0] if len(made) == 1 else Chain(*made)


def _told(defence: Defence | None) -> str:
    """A defence object by its settings: `Pruning(keep=0.1)`."""
    return "none" if defence is None else repr(defence)


def _distinct(named: Iterable[tuple[str, Thing]]) -> list[tuple[str, Thing]]:
    """Two objects may share a name, rows must not: the second becomes `ig #2`."""
    seen: dict[str, int] = {}
    result: list[Any] = []
    for name, thing in named:
        seen[name] = seen.get(name, 0) + 1
        result.append((name if seen[name] == 1 else f"{name} #{seen[name]}", thing))
    return result
