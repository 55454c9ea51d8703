"""Attacks against defences, coloured by what was recovered; hatched where the attack did not work as an optimiser.

A square is the strongest of its lines, over attackers, rounds and batch sizes; the table of results has them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradleak.report.grid import interval, number, percent

if TYPE_CHECKING:
    from gradleak.audit.result import Summary

SHADES = 4  # above 0: for each quarter of the images one


@dataclass(frozen=True)
class Square:
    """`shade` 0 to 4, by the recovered share; -1 where nothing is known. `hatched`: it must not be taken for safe."""

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
    """`void`: the positive control failed, so that no square shows anything."""
    if not summaries:
        return None
    defences = sorted({line.defence for line in summaries}, key=lambda name: (name != "none", name))
    rows = []
    for attack in dict.fromkeys(line.attack for line in summaries):
        own = [[line for line in summaries if (line.attack, line.defence) == (attack, name)] for name in defences]
        name, _, settings = attack.partition(":")
        rows.append(Attacked(name, settings, tuple(_square(lines, void, _varied(summaries)) for lines in own)))
    return Matrix(tuple(defences), tuple(rows))


def _varied(summaries: Sequence[Summary]) -> tuple[str, ...]:
    return tuple(name for name in ("round", "examples") if len({getattr(line, name) for line in summaries}) > 1)


def _square(lines: Sequence[Summary], void: bool, varied: Sequence[str]) -> Square:
    from gradleak.audit.ruling import INCONCLUSIVE, PART
    from gradleak.audit.verdict import strongest_of, word_on

    if not lines:
        return NOT_RUN
    best, word = strongest_of(lines), word_on(lines)
    if not best.targets:
        return Square("failed", best.errors[0] if best.errors else "", word, -1, True)
    share = best.recovered.value
    where = {"round": f"round {best.round}", "examples": f"B = {best.examples}"}
    told = [f"{interval(best.recovered)}, {number(best.means.get('psnr'))} dB"]
    told += [best.form] if best.form != "undefended" else []
    told += [where[name] for name in varied]
    told += [f"ended well on {percent(best.converged)}"] if not best.optimised else []
    shade = math.ceil(SHADES * share) or int(word == PART)
    if word == INCONCLUSIVE or (word == PART and not share):  # a number that reads as nothing found would look safe
        told[0] = f"{percent(share)} {told[0]}"
        text = word if word == INCONCLUSIVE else "re-identified"
        hatched = void or word == INCONCLUSIVE or not best.optimised
        return Square(text, ", ".join(told), word, shade if word == PART else -1, hatched)
    return Square(percent(share), ", ".join(told), word, shade, void or not best.optimised)
