"""What the report shows, as plain values: read off an AuditResult by the modules beside this one, laid out by the
templates in `sections`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradleak.core.durations import duration
from gradleak.report import repeat
from gradleak.report.certificate import Proof, proofs
from gradleak.report.checks import checks
from gradleak.report.curves import Chart
from gradleak.report.defences import Label, defences, labels, utility
from gradleak.report.evidence import Part, evidence
from gradleak.report.gallery import Control, Gallery, control, gallery
from gradleak.report.grid import Table, plural
from gradleak.report.limits import untested
from gradleak.report.matrix import Matrix, matrix
from gradleak.report.repeat import Reference
from gradleak.report.rounds import Rounds, rounds, scatter
from gradleak.report.scores import baselines, results
from gradleak.report.strip import Banner, banner
from gradleak.report.threat import ledger, threat

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult, Summary
    from gradleak.curvature.result import StudyResult


@dataclass(frozen=True)
class Page:
    """All that the template draws, gathered before any of it is drawn."""

    title: str
    subtitle: str
    version: str
    verdict: Banner
    threat: str
    matrix: Matrix | None
    results: Table
    gallery: Gallery | None
    control: Control
    baselines: Table | None
    checks: Table | None
    ledger: Table
    untested: tuple[str, ...]
    command: str
    settings: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    evidence: tuple[Part, ...]
    references: tuple[Reference, ...] = field(default=())
    proofs: tuple[Proof, ...] = field(default=())
    defences: Table | None = None
    labels: tuple[Label, ...] = field(default=())
    rounds: Rounds | None = None
    utility: Table | None = None
    scatter: Chart | None = None

    @staticmethod
    def of(result: AuditResult, study: StudyResult | None = None) -> Page:
        from gradleak import __version__
        from gradleak.audit.ledger import ledger_of

        summaries = result.summaries
        grid = [row for row in result.rows if not row.get("control")]
        name = result.folder.name if result.folder is not None else "audit"
        assumptions, told = ledger_of(result.settings, grid), threat(grid)
        missing, command = tuple(untested(grid, summaries)), repeat.command(result)
        return Page(
            title=f"Gradient-leakage audit: {name}",
            subtitle=_subtitle(summaries, result),
            version=__version__,
            verdict=banner(result),
            threat=told,
            matrix=matrix(summaries, void=not result.positive_control.passed),
            results=results(summaries),
            gallery=gallery(result, grid),
            control=control(result),
            baselines=baselines(grid),
            checks=checks(grid),
            ledger=ledger(assumptions),
            untested=missing,
            command=command,
            settings=repeat.settings(result),
            environment=tuple(repeat.flat(result.environment)),
            evidence=evidence(result, grid, assumptions, told, missing, command),
            references=tuple(repeat.references(grid)),
            proofs=tuple(proofs(grid, summaries)),
            defences=defences(summaries),
            labels=tuple(labels(summaries)),
            rounds=rounds(summaries, grid, study),
            utility=utility(summaries),
            scatter=scatter(summaries),
        )

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Anchor and name of each section that is there, in order."""
        every = (
            ("matrix", "Attacks and defences", self.matrix),
            ("gallery", "Pictures", self.gallery),
            ("rounds", "Over rounds", self.rounds),
            ("utility", "Privacy and utility", self.utility),
            ("proofs", "Identifiability", self.proofs),
            ("defences", "Defences", self.defences),
            ("results", "All figures", True),
            ("baselines", "Without any gradient", self.baselines),
            ("control", "Positive control", True),
            ("checks", "Checks", self.checks),
            ("assumptions", "Assumptions", True),
            ("untested", "Not tested", True),
            ("repeat", "To repeat", True),
            ("references", "References", self.references),
            ("evidence", "Evidence sheet", True),
        )
        return tuple((anchor, name) for anchor, name, there in every if there)


def _subtitle(summaries: Sequence[Summary], result: AuditResult) -> str:
    attacks, against = {s.attack for s in summaries}, {s.defence for s in summaries if s.defence != "none"}
    spent = sum(float(row.get("seconds") or 0.0) for row in result.rows)
    when = str(result.environment.get("time", ""))[:16].replace("T", " ")  # ISO, in UTC
    parts = [
        plural(len(attacks), "attack"),
        plural(len(against), "defence"),
        f"{duration(spent)} of attacks",
        when and f"{when} UTC",
    ]
    if not result.complete:
        parts.insert(0, "INCOMPLETE: cells are missing")
    if result.settings.get("trial"):
        parts.insert(0, "QUICK RUN: the numbers mean nothing")
    return " · ".join(filter(None, parts))
