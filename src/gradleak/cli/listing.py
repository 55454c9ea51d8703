"""`gradleak list` and `gradleak data`: names of methods and of data."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.options import Plain
from gradleak.cli.root import on_interrupt
from gradleak.core.registry import Entry, UnknownName, did_you_mean, entries

if TYPE_CHECKING:
    from gradleak.scenario.defence import Defence

KINDS = {"attacks": "attack", "defences": "defence", "models": "model", "tasks": "task", "labels": "labels"}
KINDS |= {"generators": "generator"}
KINDS |= {"partitions": "partition", "participation": "participation", "averaging": "averaging"}
"""What `gradleak list` takes, and the registry's word for it."""

HOOKS = {"initial": "before training", "broadcast": "broadcast", "gradient": "local step", "upload": "upload"}
HOOKS |= {"aggregate": "server"}
"""The methods of a Defence, and where they act."""

app = typer.Typer(no_args_is_help=True, help="Real images and tables: what there is, and how to get the full sets.")


def _kinds() -> list[str]:
    return [*KINDS, "data"]


def list_methods(
    kind: Annotated[str, typer.Argument(autocompletion=_kinds, help=f"{', '.join(KINDS)} or data; nothing: all.")] = "",
    pattern: Annotated[str, typer.Argument(help="Only names that match, such as 'ig*'.")] = "*",
) -> None:
    """What there is by name: its paper, whether its figures were checked, its settings."""
    from gradleak import federation  # noqa: F401 (registers partitions, participation and averaging)
    from gradleak.cli import tasks  # noqa: F401 (registers tasks)

    if not kind:
        for plural, singular in KINDS.items():
            typer.echo(f"{plural + ':':15}{', '.join(entry.name for entry in entries(singular)) or 'none'}")
        typer.echo("\nMore about each: gradleak list attacks, gradleak list defences, ...; data: gradleak list data")
        return
    if kind == "data":
        list_data(pattern)
        return
    matching = [entry for entry in entries(_registered(kind)) if fnmatch.fnmatch(entry.name, pattern)]
    for entry in matching:
        typer.echo(_describe(entry))
    if not matching:
        typer.echo(f"No {kind} {f'match {pattern!r}' if pattern != '*' else 'are registered'}.")


def _registered(plural: str) -> str:
    """`attacks` -> the registry's word `attack`; the singular is understood too."""
    if plural in KINDS.values():
        return plural
    if plural not in KINDS:
        raise UnknownName(f"Nothing to list under {plural!r}.{did_you_mean(plural, _kinds())}")
    return KINDS[plural]


def _describe(entry: Entry) -> str:
    """Name and status of a method; below them what it does, its paper and its settings."""
    settings = ", ".join(f"{name}={value!r}" for name, value in entry.settings.items() if name != "generator")
    lines = [entry.summary, entry.paper, settings]
    if entry.kind == "defence" and not entry.required:
        place, guarantee = describe_defence(entry.make())
        lines += [f"sits in: {place}", f"with these settings, in one round: {guarantee}"]
    return "\n    ".join([f"{entry.name}  [{entry.status}]" if entry.status else entry.name, *filter(None, lines)])


def describe_defence(defence: Defence) -> tuple[str, str]:
    """Where a defence acts, and what it guarantees for a client that takes one plain step on one example."""
    from gradleak.scenario.client import LocalTraining
    from gradleak.scenario.defence import overrides
    from gradleak.scenario.guarantee import Exposure

    places = ", ".join(place for hook, place in HOOKS.items() if overrides(defence, hook)) or "nowhere"
    guarantee = defence.guarantee(Exposure(training=LocalTraining(lr=1.0)))
    return places, str(guarantee).partition("\n")[0]


@app.command("list")
def list_data(pattern: Annotated[str, typer.Argument(help="Only names that match.")] = "*") -> None:
    """Every name that --data takes, whether it is on this machine and, if not, what to do."""
    from gradleak.data import available

    for entry in available():
        if fnmatch.fnmatch(entry.name, pattern):
            advice = f"to have it: {entry.advice}" if entry.advice else ""
            typer.echo(f"{entry.name}  [{'present' if entry.present else 'absent'}]")
            for line in filter(None, (entry.description, f"terms: {entry.licence}", advice)):
                typer.echo(f"    {line}")


@app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(help="cifar10 or mnist.")],
    into: Annotated[Path | None, typer.Option(help="Folder to store it in; default: the cache folder.")] = None,
    plain: Plain = False,
) -> None:
    """Fetch a full public data set once, checked by SHA-256; running it again resumes or does nothing."""
    from gradleak.cli.progress import single_job
    from gradleak.data import get

    on_interrupt(f"Interrupted; what has arrived is kept. Go on with: gradleak data get {name}")
    with single_job(f"fetching {name}", plain) as progress:
        path = get(name, into, lambda received, size: progress.share(received / size))
    typer.echo(f"{name} is at {path}")
