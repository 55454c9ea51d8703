"""The report as plain values: a table of sections, each made by a module beside this one and drawn by a template.

To add a section: write a function that takes the page and returns what the template draws, put the template into
sections/ANCHOR.html.j2 (it draws `content`), and add one line to `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gradleak import __version__
from gradleak.audit.assumptions import Assumption, ledger_of
from gradleak.core.durations import duration
from gradleak.report import repeat
from gradleak.report.checks import checks
from gradleak.report.defences import defences, utility
from gradleak.report.evidence import evidence
from gradleak.report.gallery import control, gallery
from gradleak.report.grid import plural
from gradleak.report.limits import untested
from gradleak.report.matrix import matrix
from gradleak.report.proofs import proofs
from gradleak.report.rounds import rounds
from gradleak.report.scores import baselines, results
from gradleak.report.spans import span_tables
from gradleak.report.strip import Banner, banner
from gradleak.report.threat import ledger, threat
from gradleak.report.words import Words

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult, Row, Summary
    from gradleak.curvature.result import StudyResult


@dataclass(frozen=True)
class Section:
    """One section. `anchor` is its address in the page and names its template, `title` is its entry in the menu.

    title     may name what the gallery shows: {gallery}, which is Pictures, or Recovered rows
    content   what the template draws, made from the page; None, or empty: this run has no such section
    """

    anchor: str
    title: str
    content: Callable[[Page], Any]


SECTIONS: tuple[Section, ...] = (
    Section("matrix", "Attacks and defences", lambda page: matrix(page.lines, page.void)),
    Section("gallery", "{gallery}", lambda page: gallery(page.result, page.rows)),
    Section("rounds", "Over rounds", lambda page: rounds(page.lines, page.rows, page.study)),
    Section("utility", "Privacy and utility", lambda page: utility(page.lines)),
    Section("proofs", "Identifiability", lambda page: tuple(proofs(page.rows, page.lines))),
    Section("spans", "What the layers told", lambda page: tuple(span_tables(page.rows, page.lines))),
    Section("defences", "Defences", lambda page: defences(page.lines)),
    Section("results", "All figures", lambda page: results(page.lines, page.words)),
    Section("baselines", "Without any gradient", lambda page: baselines(page.rows, page.words)),
    Section("control", "Positive control", lambda page: control(page.result)),
    Section("checks", "Checks", lambda page: checks(page.rows)),
    Section("assumptions", "Assumptions", lambda page: ledger(page.assumptions)),
    Section("untested", "Not tested", lambda page: page.untested),
    Section("repeat", "To repeat", lambda page: repeat.repetition(page.result)),
    Section("references", "References", lambda page: tuple(repeat.references(page.rows))),
    Section("evidence", "Evidence sheet", evidence),
)
"""In the order of the page."""


@dataclass(frozen=True, eq=False)
class Page:
    """What sections are made from, each value computed once. `study`: curvature of the same training."""

    result: AuditResult
    study: StudyResult | None = None

    @cached_property
    def sections(self) -> tuple[tuple[Section, Any], ...]:
        """The sections that this run has, in order, each with its content."""
        contents = ((section, section.content(self)) for section in SECTIONS)
        named = {
            section: replace(section, title=section.title.format(gallery=self.words.gallery)) for section in SECTIONS
        }
        return tuple((named[section], content) for section, content in contents if content)

    @cached_property
    def words(self) -> Words:
        """How to speak of the private data of this run."""
        return Words(self.result.kind)

    @property
    def lines(self) -> Sequence[Summary]:
        """The lines of the table of results."""
        return self.result.summaries

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the grid: all but those of a control that is not part of it."""
        return [row for row in self.result.rows if not row.get("control")]

    @property
    def void(self) -> bool:
        return not self.result.positive_control.passed

    @cached_property
    def verdict(self) -> Banner:
        return banner(self.result)

    @cached_property
    def assumptions(self) -> tuple[Assumption, ...]:
        return ledger_of(self.result.settings, self.rows)

    @cached_property
    def threat(self) -> str:
        return threat(self.rows)

    @cached_property
    def untested(self) -> tuple[str, ...]:
        return tuple(untested(self.rows, self.lines))

    @property
    def version(self) -> str:
        return __version__

    @property
    def title(self) -> str:
        return f"Gradient-leakage audit: {self.result.folder.name if self.result.folder is not None else 'audit'}"

    @property
    def subtitle(self) -> str:
        """What was run, how long it took, and when; first, what keeps it from counting."""
        attacks, against = {line.attack for line in self.lines}, {line.defence for line in self.lines} - {"none"}
        seconds = sum(float(row.get("seconds") or 0.0) for row in self.result.rows)
        when = str(self.result.environment.get("time", ""))[:16].replace("T", " ")  # ISO, in UTC
        parts = [
            "QUICK RUN: the numbers mean nothing" if self.result.settings.get("trial") else "",
            "" if self.result.complete else "INCOMPLETE: cells are missing",
            plural(len(attacks), "attack"),
            plural(len(against), "defence"),
            f"{duration(seconds)} of attacks",
            when and f"{when} UTC",
        ]
        return " · ".join(filter(None, parts))
