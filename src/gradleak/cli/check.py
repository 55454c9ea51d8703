"""`gradleak check`: can this model be attacked as it stands?"""

from __future__ import annotations

from typing import Annotated

import typer

from gradleak.cli.formatting import counted
from gradleak.cli.root import CROSSED


def check(
    reference: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="A Task; FILE.py alone means FILE.py:task.")],
    data: Annotated[str, typer.Option(help="Check these too: images by name, an .npz, a folder or FILE.py:NAME.")] = "",
) -> None:
    """Can this model be attacked as it stands? Every problem at once, each with a fix; exit code 1 on errors."""
    from gradleak.cli import loading

    task = loading.task(reference)
    problems = task.check(loading.few_examples(task, data) if data else None)
    for problem in problems:
        typer.echo(f"{problem.severity:8}{problem.what}\n{'':8}-> {problem.fix}")
    errors = sum(problem.severity == "error" for problem in problems)
    summary = f"{counted(len(problems), 'finding')}, {counted(errors, 'error')}"
    typer.echo(f"{reference}: {summary if problems else 'no problems found'}.")
    if errors:
        raise typer.Exit(CROSSED)
