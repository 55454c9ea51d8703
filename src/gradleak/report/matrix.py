"""Attacks against defences, coloured by the recovered share; hatched if the attack did not converge.

A square shows the strongest of its lines, over attackers, rounds and batch sizes; the table of results has them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradleak.audit.ruling import INCONCLUSIVE, PART
from gradleak.audit.verdict import strongest_of, word_on
from gradleak.report.grid import interval, labelled, percent

if TYPE_CHECKING:
    from gradleak.audit.result import Summary

SHADES = 4  # above 0: one for each quarter of the examples


@dataclass(frozen=True)
class Square:
    """`shade`: 0 to 4, by the recovered share; -1 if nothing is known. `hatched`: must not be read as safe."""

    text: str
    note: str
    word: str
    shade: int
    hatched: bool


@dataclass(frozen=True)
class Attacked:
    """One row: an attack against every defence."""

    name: str
    settings: str
    squares: tuple[Square, ...]


@dataclass(frozen=True)
class Matrix:
    """Attacks against defences: a row for each attack, a square for each defence."""

    defences: tuple[str, ...]
    rows: tuple[Attacked, ...]


NOT_RUN = Square("not run", "", "", -1, True)


def matrix(summaries: Sequence[Summary], void: bool) -> Matrix | None:
    """`void`: the positive control failed, so no square shows anything."""
    if not summaries:
        return None
    defences = sorted({line.defence for line in summaries}, key=lambda name: (name != "none", name))
    rows = []
    for attack in dict.fromkeys(line.attack for line in summaries):
        lines = [[line for line in summaries if (line.attack, line.defence) == (attack, name)] for name in defences]
        name, _, settings = attack.partition(":")
        rows.append(Attacked(name, settings, tuple(_square(each, void, _varied(summaries)) for each in lines)))
    return Matrix(tuple(defences), tuple(rows))


def _varied(summaries: Sequence[Summary]) -> tuple[str, ...]:
    return tuple(name for name in ("round", "examples") if len({getattr(line, name) for line in summaries}) > 1)


def _square(lines: Sequence[Summary], void: bool, varied: Sequence[str]) -> Square:
    if not lines:
        return NOT_RUN
    best, word = strongest_of(lines), word_on(lines)
    if not best.targets:
        return Square("failed", best.errors[0] if best.errors else "", word, -1, True)
    share = best.recovered.value
    where = {"round": f"round {best.round}", "examples": f"B = {best.examples}"}
    measure = best.kind.headline
    notes = [f"{interval(best.recovered)}, {labelled(measure, best.means.get(measure.name))}"]
    notes += [best.form] if best.form != "undefended" else []
    notes += [where[name] for name in varied]
    notes += [f"converged on {percent(best.converged)}"] if not best.optimised else []
    shade = math.ceil(SHADES * share) or int(word == PART)
    if word == INCONCLUSIVE or (word == PART and not share):  # 0 % alone would look safe
        notes[0] = f"{percent(share)} {notes[0]}"
        text = word if word == INCONCLUSIVE else "re-identified"
        hatched = void or word == INCONCLUSIVE or not best.optimised
        return Square(text, ", ".join(notes), word, shade if word == PART else -1, hatched)
    return Square(percent(share), ", ".join(notes), word, shade, void or not best.optimised)
