"""The verdict strip: the word, why, and a few figures to remember."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradleak.audit.verdict import strongest_of
from gradleak.report.grid import interval, labelled, level, percent, plural, tone

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult, Summary


@dataclass(frozen=True)
class Fact:
    """One figure of the strip under the verdict, with what it means."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Banner:
    """`lines`: a sentence for each defence, then the control; `because`: the rule that gave the word, with figures."""

    word: str
    tone: str
    because: str
    lines: tuple[str, ...]
    rule: str
    facts: tuple[Fact, ...]


def banner(result: AuditResult) -> Banner:
    """The verdict in its words, and the figures that it rests on."""
    verdict = result.verdict
    lines = tuple(line for line in verdict.paragraph.split("\n") if line)
    # The word is above it already.
    because = verdict.because.removeprefix(f"{verdict.word}: ")
    return Banner(verdict.word, tone(verdict.word), because, lines, verdict.rule, tuple(_facts(result)))


def _facts(result: AuditResult) -> Iterator[Fact]:
    line = _headline(result.summaries)
    if line is not None:
        against = "undefended" if line.defence == "none" else f"against {line.defence}"
        seeds = "" if line.seeds == 1 else f" x {line.seeds} seeds"
        yield Fact("recovered", percent(line.recovered.value), f"95 % interval {interval(line.recovered)}, {against}")
        measure, (one, many) = line.kind.headline, line.kind.noun
        mean = f"mean {labelled(measure, line.means.get(measure.name))}"
        yield Fact(f"clearest {one}", level(measure, line.worst.get(measure.name)), mean)
        if math.isfinite(line.means.get("labels", math.nan)):
            yield Fact("labels right", percent(line.means["labels"]), f"scored apart from the {many}")
        size = f"{plural(line.examples, 'example')} each{', a small sample' if line.small else ''}"
        yield Fact("sample", f"{plural(line.targets, 'target')}{seeds}", size)
    converged, every = sum(each.optimised for each in result.summaries), len(result.summaries)
    rest = "the others are lower bounds" if converged < every else "on at least 80 % of their targets"
    yield Fact("converged", f"{converged} of {plural(every, 'attack')}", rest)
    control = result.positive_control
    yield Fact("positive control", "passed" if control.passed else "failed", control.level)


def _headline(summaries: Sequence[Summary]) -> Summary | None:
    """The line behind the word: the strongest against any defence, or on the undefended client without one."""
    scored = [line for line in summaries if line.targets]
    lines = [line for line in scored if line.defence != "none"] or scored
    return strongest_of(lines) if lines else None
