"""`gradleak list` and `gradleak data`: what there is by name."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.options import Plain

KINDS = {"attacks": "attack", "defences": "defence", "models": "model", "tasks": "task", "labels": "labels"}
KINDS |= {"generators": "generator"}
KINDS |= {"partitions": "partition", "participation": "participation", "averaging": "averaging"}
"""What `gradleak list` takes, and the registry's word for it."""

app = typer.Typer(no_args_is_help=True, help="Real images: what there is, and how to get the full sets.")


def _kinds() -> list[str]:
    return [*KINDS, "data"]


def list_methods(
    kind: Annotated[str, typer.Argument(autocompletion=_kinds, help=f"{', '.join(KINDS)} or data; nothing: all.")] = "",
    pattern: Annotated[str, typer.Argument(help="Only names that match, such as 'ig*'.")] = "*",
) -> None:
    """What there is by name: its paper, whether its figures were checked, its settings."""
    from gradleak.cli import loading
    from gradleak.core import registry

    if not kind:
        for plural, singular in KINDS.items():
            typer.echo(f"{plural + ':':15}{', '.join(entry.name for entry in registry.entries(singular)) or 'none'}")
        typer.echo("\nMore about each: gradleak list attacks, gradleak list defences, ...; images: gradleak list data")
        return
    if kind == "data":
        data(pattern)
        return
    found = [entry for entry in registry.entries(registered(kind)) if fnmatch.fnmatch(entry.name, pattern)]
    for entry in found:
        settings = ", ".join(f"{name}={value!r}" for name, value in entry.settings.items() if name != "generator")
        typer.echo(f"{entry.name}  [{entry.status}]" if entry.status else entry.name)
        told = [entry.summary, entry.paper, settings]
        if entry.kind == "defence" and not entry.required:
            place, proved = loading.about(entry.make())
            told += [f"sits in: {place}", f"with these settings, in one round: {proved}"]
        for line in filter(None, told):
            typer.echo(f"    {line}")
    if not found:
        typer.echo(f"No {kind} {f'match {pattern!r}' if pattern != '*' else 'are registered'}.")


def registered(plural: str) -> str:
    """`attacks` -> the registry's word `attack`; the singular is understood too."""
    from gradleak.core.registry import UnknownName, did_you_mean

    if plural in KINDS.values():
        return plural
    if plural not in KINDS:
        raise UnknownName(f"Nothing to list under {plural!r}.{did_you_mean(plural, _kinds())}")
    return KINDS[plural]


@app.command("list")
def data(pattern: Annotated[str, typer.Argument(help="Only names that match.")] = "*") -> None:
    """Every name that --data takes, whether it is on this machine and, if not, what to do."""
    from gradleak.data import available

    for entry in available():
        if fnmatch.fnmatch(entry.name, pattern):
            typer.echo(f"{entry.name}  [{'present' if entry.present else 'absent'}]")
            advice = f"to have it: {entry.advice}" if entry.advice else ""
            for line in filter(None, (entry.description, f"terms: {entry.licence}", advice)):
                typer.echo(f"    {line}")


@app.command("get")
def get(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="cifar10 or mnist.")],
    into: Annotated[Path | None, typer.Option(help="Folder to keep it in; default: the cache folder.")] = None,
    plain: Plain = False,
) -> None:
    """Fetch a full public data set once, checked by SHA-256; running it again resumes or does nothing."""
    from gradleak.cli.progress import shown
    from gradleak.data import get as fetch

    context.find_root().obj = f"Interrupted; what has arrived is kept. Go on with: gradleak data get {name}"
    with shown(plain) as progress:
        progress.start(1)
        progress.cell(f"fetching {name}", 0)
        path = fetch(name, into, lambda have, size: progress.share(have / size))
    typer.echo(f"{name} is at {path}")
