"""The verdict strip: the word, why, and the few figures that a reader takes away."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradleak.report.grid import interval, number, percent, plural, tone

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
    # The word stands above it already.
    because = verdict.because.removeprefix(f"{verdict.word}: ")
    return Banner(verdict.word, tone(verdict.word), because, lines, verdict.rule, tuple(_facts(result)))


def _facts(result: AuditResult) -> Iterator[Fact]:
    from gradleak.audit.verdict import CONTROL_PSNR

    held = headline_of(result.summaries)
    if held is not None:
        against = "undefended" if held.defence == "none" else f"against {held.defence}"
        seeds = "" if held.seeds == 1 else f" x {held.seeds} seeds"
        yield Fact("recovered", percent(held.recovered.value), f"95 % interval {interval(held.recovered)}, {against}")
        mean = f"mean {number(held.means.get('psnr'))} dB"
        yield Fact("clearest image", f"{number(held.worst.get('psnr'))} dB", mean)
        if math.isfinite(held.means.get("labels", math.nan)):
            yield Fact("labels right", percent(held.means["labels"]), "scored apart from the images")
        size = f"{plural(held.examples, 'example')} each{', a small sample' if held.small else ''}"
        yield Fact("sample", f"{plural(held.targets, 'target')}{seeds}", size)
    worked, every = sum(line.optimised for line in result.summaries), len(result.summaries)
    yield Fact("searches that ended well", f"{worked} of {every}", "lines; the others are lower bounds")
    control = result.positive_control
    level = f"{number(control.psnr)} dB; {CONTROL_PSNR:.0f} are needed"
    yield Fact("positive control", "passed" if control.passed else "failed", level)


def headline_of(summaries: Sequence[Summary]) -> Summary | None:
    """The line behind the word: the strongest against any defence, or on the undefended client where there is none."""
    from gradleak.audit.verdict import strongest_of

    scored = [line for line in summaries if line.targets]
    lines = [line for line in scored if line.defence != "none"] or scored
    return strongest_of(lines) if lines else None
