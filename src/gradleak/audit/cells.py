"""The grid of an audit: one cell is one attack against one defence, in one form, at one round, with one seed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gradleak.attack import Attack
from gradleak.core import registry
from gradleak.federation import Federation
from gradleak.scenario.defence import Chain, Defence, overrides
from gradleak.scenario.forms import DEFENDED, AttackerForm, hides_entries
from gradleak.scenario.observation import Knowledge

Thing = TypeVar("Thing")

UNDEFENDED = AttackerForm.UNDEFENDED.value
FORMS = tuple(form.value for form in DEFENDED)  # what an attacker may know of a defence; the headline is the strongest

# Hooks through which an informed attacker predicts; a defence without them (say, only `initial`) has one form.
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
    repeats: int = 1  # rounds in which the attacker saw the same client train on the same examples
    given: tuple[str, ...] = ()  # fields that the threat model grants
    inputs: tuple[str, ...] = ()  # those of them that are public inputs
    generator: Any = None  # the attacker's prior
    withheld: tuple[str, ...] = ()  # capabilities that the threat model withholds: "recipe", "statistics"

    @property
    def knows(self) -> Knowledge:
        """The threat model: the client's recipe, and the defence as far as the form goes."""
        known = AttackerForm(self.form).known(self.defence)
        recipe = self.federation.training_at(self.round)
        # Only the names of granted fields are known here; their values are on the private side.
        given, inputs = dict.fromkeys(self.given, torch.empty(0)), frozenset(self.inputs)
        whole = Knowledge(given, recipe, known, self.generator, inputs=inputs)
        return whole.without("recipe") if "recipe" in self.withheld else whole

    def __str__(self) -> str:
        against = self.defence_name if self.form == UNDEFENDED else f"{self.defence_name} ({self.form})"
        start = "positive control: " if self.control else ""
        where = f"B = {self.federation.examples}, round {self.round}, seed {self.seed}"
        return f"{start}{self.attack_name} against {against}, {where}"


def forms_of(defence: Defence | None, wanted: Sequence[str], random: bool = False) -> list[str]:
    """The wanted forms that differ from one another for this defence; there is always one.

    `random`: the defence uploads something else for the same examples each time, so several rounds tell more than one.
    """
    if defence is None:
        return [UNDEFENDED]
    masked = hides_entries(defence)
    adaptive = masked or any(overrides(defence, hook) for hook in _PREDICTED)
    differs = dict(zip(FORMS, (True, masked, adaptive, random), strict=True))
    return [form for form in FORMS if form in wanted and differs[form]] or [AttackerForm.NAIVE.value]


def named_attacks(attacks: Iterable[str | Attack]) -> list[tuple[str, Attack]]:
    """Attacks with the names that rows use: the text that named them, or the name of the object."""
    return _distinct(
        (item, registry.parse("attack", item)) if isinstance(item, str) else (item.name, item) for item in attacks
    )


def named_defences(defences: Iterable[str | Defence | None]) -> list[tuple[str, Defence | None]]:
    """Defences with the names that rows use; "none" is none, "a + b" a chain, an object its settings."""
    return _distinct(
        (item.strip(), defence_of(item)) if isinstance(item, str) else ("none" if item is None else repr(item), item)
        for item in defences
    )


def defence_of(text: str) -> Defence | None:
    """`"none"`, `"pruning:keep=0.1"`, `"clipping + local-gaussian:sigma=1e+3"`."""
    parts = [part.strip() for part in re.split(r"\+(?=\s*[a-z])", text)]
    if parts == ["none"]:
        return None
    members = [registry.parse("defence", part) for part in parts]
    return members[0] if len(members) == 1 else Chain(*members)


def _distinct(named: Iterable[tuple[str, Thing]]) -> list[tuple[str, Thing]]:
    """Two objects may share a name, rows must not: the second becomes `ig #2`."""
    counts: dict[str, int] = {}
    result: list[Any] = []
    for name, thing in named:
        counts[name] = counts.get(name, 0) + 1
        result.append((name if counts[name] == 1 else f"{name} #{counts[name]}", thing))
    return result
