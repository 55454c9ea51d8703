"""`gradleak reproduce`: the folders of `papers/`, each at three scales, and the papers' figures beside ours.

`papers/` belongs to the project's repository and not to the installed package: the command runs from a clone.
"""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


class ScaleName(str, Enum):
    """How much of a paper is run; `papers/runs.py` says what each of them is."""

    smoke = "smoke"
    small = "small"
    paper = "paper"


class CannotReproduce(ValueError):
    """What is missing, and what to do."""


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="[PAPER]", help="A folder of papers/: idlg, tip, ... (--list).")] = "",
    scale: Annotated[
        ScaleName,
        typer.Option(
            help="smoke: does it run, in a minute; small: minutes on a CPU; paper: the stored figures, a GPU."
        ),
    ] = ScaleName.smoke,
    listing: Annotated[
        bool, typer.Option("--list", help="The papers' figures beside ours; with PAPER: each of them. Runs nothing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run nothing.")] = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the results, one table (CSV) a command.")
    ] = Path("runs/reproduce"),
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="Passed on to run.py: -- --seed 1.")
    ] = None,
) -> None:
    """Run a paper's reproduction, or show the papers' figures beside ours. From a clone of the repository.

    Exit code 1: at --scale paper a bound of papers/PAPER/expected.json does not hold.
    """
    root = clone()
    if listing or not paper:
        typer.echo(listed(root, paper))
        return
    known = _named(root, paper)
    chosen = getattr(known, scale.value)
    if chosen is None:
        raise CannotReproduce(
            f"{paper} has no scale {scale.value}: none of its rows ends within a minute on one core. Try --scale small."
        )
    files = [_file(out, paper, scale, number, len(chosen.runs)) for number in range(1, len(chosen.runs) + 1)]
    calls = [
        [f"papers/{paper}/run.py", *shlex.split(run), *(more or ()), "--out", str(file.resolve())]
        for run, file in zip(chosen.runs, files, strict=True)
    ]
    typer.echo(f"{known.title}\nScale {scale.value}: {counted(calls)}, {chosen.cost}.")
    if dry_run:
        typer.echo("\n".join(shlex.join(["python", *call]) for call in calls))
        return
    _demand(chosen.needs)
    failed = []
    for call, file in zip(calls, files, strict=True):
        failed += run(root, call, file, verbose=scale is ScaleName.paper)
    if scale is not ScaleName.paper:
        typer.echo(
            f"It runs. Figures of this scale say nothing about the paper; they are in {out}. "
            f"What was measured: gradleak reproduce {paper} --list."
        )
    elif failed:
        typer.echo(f"Does not hold: {'; '.join(failed)}.", err=True)
        raise typer.Exit(1)


def clone() -> Path:
    """The repository's root: around the current folder, or around this file where it is installed from a clone."""
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if (folder / "papers" / "record.py").is_file() and (folder / "pyproject.toml").is_file():
                return folder
    raise CannotReproduce(
        "There is no folder papers/ here: reproductions belong to the repository, not to the installed package. "
        "Clone the repository, and run this command inside the clone."
    )


def beside(root: Path, name: str) -> Any:
    """A module of the clone's `papers/`: its runs, its figures."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"papers.{name}")


def listed(root: Path, paper: str) -> str:
    """The papers with their scales and how much is measured; of one paper every figure."""
    figures = beside(root, "figures")
    if paper:
        return f"{_named(root, paper).title}\n{figures.plain(figures.Claims(root / 'papers' / paper))}"
    lines = []
    for claims in figures.all_claims(root / "papers"):
        known = _named(root, claims.name)
        scales = [f"{name.value} ({scale.cost})" for name in ScaleName if (scale := getattr(known, name.value))]
        lines += [claims.name, f"    {known.title}", f"    {claims.counts()}", f"    scales: {', '.join(scales)}"]
    return "\n".join([*lines, "Every figure of one of them: gradleak reproduce PAPER --list"])


def run(root: Path, call: Sequence[str], file: Path, verbose: bool) -> list[str]:
    """One run.py; returns the bounds that do not hold. `verbose`: how each bound fared is printed too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # what is there afterwards is of this run
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(root / "src"), os.environ.get("PYTHONPATH", "")) if part
    )
    if folder := os.environ.get("GRADLEAK_DATA"):
        environment["GRADLEAK_DATA"] = str(Path(folder).resolve())
    process = subprocess.Popen(
        [sys.executable, *call], cwd=root, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    failed = []
    try:
        for line in process.stdout:
            failed += [line[len("FAILS") :].partition(" = ")[0].strip()] if line.startswith("FAILS") else []
            if verbose or not line.startswith(("holds ", "FAILS ", "absent ")):
                typer.echo(line.rstrip("\n"))
    finally:
        process.stdout.close()
        code = process.wait()
    # run.py ends with 1 where a bound fails, and so does a defect: only the former leaves its figures.
    if not file.is_file():
        raise CannotReproduce(
            f"{shlex.join(['python', *call])} ended with {code} before its figures were written; the lines above say "
            f"why. Rows that were finished are in {file.with_suffix('.part.json').name} beside, where there are any."
        )
    return failed


def counted(calls: Sequence[object]) -> str:
    """How many commands, in words."""
    return "one command" if len(calls) == 1 else f"{len(calls)} commands"


def _named(root: Path, paper: str) -> Any:
    from gradleak.core.registry import UnknownName, did_you_mean

    papers = beside(root, "runs").PAPERS
    if paper not in papers:
        raise UnknownName(f"Unknown paper {paper!r}.{did_you_mean(paper, papers)}")
    return papers[paper]


def _file(out: Path, paper: str, scale: ScaleName, number: int, of: int) -> Path:
    return out / (f"{paper}-{scale.value}.csv" if of == 1 else f"{paper}-{scale.value}-{number}.csv")


def _demand(needs: Sequence[str]) -> None:
    """Say at once which images are missing, and how to have them."""
    if not needs:
        return
    from gradleak.data import available

    missing = [
        f"{source.name}: {source.advice}" for source in available() if source.name in needs and not source.present
    ]
    if missing:
        raise CannotReproduce("It needs images that are not on this machine. " + ". ".join(missing) + ".")
