"""`gradleak report` and `gradleak compare`: finished runs. Neither runs an attack."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.root import CROSSED, log


class Format(str, Enum):
    """Formats of a table."""

    text, markdown, latex, csv = "text", "markdown", "latex", "csv"


class FailOn(str, Enum):
    """What makes a comparison fail."""

    nothing, worse, changed = "nothing", "worse", "changed"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The HTML file; default: report.html in the folder.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Folder of `gradleak analyse`: its curvature beside the leakage over rounds.")
    ] = None,
) -> None:
    """Write a run's report again. Runs no attack."""
    from gradleak.audit.result import AuditResult
    from gradleak.curvature.study import StudyResult

    curvature = None if study is None else StudyResult.load(study)
    typer.echo(AuditResult.load(run).report(out or run / "report.html", curvature))


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of another.")],
    format: Annotated[Format, typer.Option(help="How to write the table.")] = Format.text,
    fail_on: Annotated[
        FailOn,
        typer.Option(help="Exit 1 if the second run leaks more (worse), or if any verdict or line differs (changed)."),
    ] = FailOn.nothing,
) -> None:
    """What changed from one run to another, line by line: changed verdicts first, differences with their intervals."""
    from gradleak.audit.result import AuditResult

    comparison = AuditResult.load(first).compare(AuditResult.load(second))
    typer.echo(comparison.table(format.value))
    reasons = {FailOn.nothing: (), FailOn.worse: comparison.worse, FailOn.changed: comparison.changed}[fail_on]
    if reasons:
        log(f"gradleak: {reasons[0]}{f' And {len(reasons) - 1} more.' if len(reasons) > 1 else ''}")
        raise typer.Exit(CROSSED)
