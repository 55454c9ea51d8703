"""The words of a line, and the rule behind each: the first rule that holds gives the word.

A rule is a sentence, a test of the figures of a line, and those figures in words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradleak.audit.intervals import Rate
    from gradleak.audit.summary import Summary

LEAKS, PART, NOT_SHOWN, INCONCLUSIVE, VOID = "leaks", "leaks in part", "not shown to leak", "inconclusive", "void"
WORDS = (LEAKS, PART, INCONCLUSIVE, NOT_SHOWN)
"""From the worst to the best. Inconclusive is worse than not shown to leak: such a line may still leak."""

HALF = 0.5  # of the examples
CONVERGED = 0.8  # share of targets on which an attack must converge before finding nothing means anything


@dataclass(frozen=True)
class Rule:
    """`name` for records, `text` as a person reads it, with {one} and {many} for what was attacked (image, images)."""

    word: str
    name: str
    text: str
    holds: Callable[[Summary], bool]
    because: Callable[[Summary], str]


@dataclass(frozen=True)
class Ruling:
    """The word of a line, the rule that produced it, and the figures that made it hold."""

    word: str
    rule: str
    text: str
    because: str

    def __str__(self) -> str:
        return f"{self.word}: {self.text} ({self.because})"


def _over(line: Summary, more: Rate) -> str:
    """What exceeds the unrelated update, or that none was attacked."""
    if not line.baseline:
        return "no unrelated update was attacked, so nothing is subtracted"
    return f"{more.value:+.0%} [{more.low:+.0%}, {more.high:+.0%}] over an unrelated update"


def _shares(line: Summary) -> str:
    return f"recovered {line.recovered}, {_over(line, line.excess)}"


def _ranks(line: Summary) -> str:
    return f"rank 1 in {line.rates['rank1']}, chance {line.chance:.1%}, {_over(line, line.identified)}"


def _searched(line: Summary) -> str:
    if line.errors:
        return f"a cell failed: {line.errors[0]}"
    return f"converged on {line.converged:.0%} of {line.targets} targets" if line.targets else "it was not run"


def _identified(line: Summary) -> bool:
    rank = line.rates.get("rank1")
    return rank is not None and line.identified.low > 0 and rank.low > line.chance


RULES: tuple[Rule, ...] = (
    Rule(
        LEAKS,
        "half recovered",
        "at least half of the {many} are recovered, and the interval of what exceeds an unrelated update lies above 0",
        lambda line: line.recovered.value >= HALF and line.excess.low > 0,
        _shares,
    ),
    Rule(
        PART,
        "some recovered",
        "any {one} is recovered, but fewer than half, or not surely more than from an unrelated update",
        lambda line: line.recovered.value > 0,
        _shares,
    ),
    Rule(
        PART,
        "re-identified",
        "no {one} is recovered, but re-identification at rank 1 exceeds chance and an unrelated update's, by intervals",
        _identified,
        _ranks,
    ),
    Rule(
        NOT_SHOWN,
        "searched in vain",
        f"nothing was recovered or re-identified, although the attack converged on {CONVERGED:.0%} of the targets",
        lambda line: line.optimised,
        _searched,
    ),
    Rule(
        INCONCLUSIVE,
        "no working attack",
        "nothing was recovered, and the attack diverged, did not converge, failed or was not run: that shows nothing",
        lambda line: True,
        _searched,
    ),
)


def ruling_of(line: Summary) -> Ruling:
    """The first rule that holds."""
    rule = next(rule for rule in RULES if rule.holds(line))
    one, many = line.kind.noun
    return Ruling(rule.word, rule.name, rule.text.format(one=one, many=many), rule.because(line))
