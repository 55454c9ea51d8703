"""The command `gradleak`. Commands are thin: they turn options into objects, call the library and print the result.

One file per command or family; `audit` has two more, `planning` (its own updates) and `recorded` (recorded ones).
Shared: `root` (exit codes, errors), `options`, `references` and `loading` (text to objects), `progress`, `formatting`.
Everything that needs torch is imported inside the commands, so that `--help` and completion in a shell answer at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer
import typer.core

from gradleak.cli import analyse, attack, audit, check, gate, listing, priors, reproduce, runs, train
from gradleak.cli.root import DEFECT, Commands, log

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "audit": (audit.audit, "Attack a training set-up, and say what leaks."),
    "check": (check.check, "Can this model be attacked as it stands?"),
    "list": (listing.list_methods, "Attacks, defences, models, ... by name."),
    "attack": (attack.attack, "Attack updates recorded anywhere."),
    "gate": (gate.gate, "May this update be sent? Allow, noise or block."),
    "train": (train.train, "Train with simulated clients, and store checkpoints."),
    "analyse": (analyse.analyse, "Curvature over training, beside what leaks."),
    "report": (runs.report, "Write a run's report again."),
    "compare": (runs.compare, "What changed from one run to another."),
    "reproduce": (reproduce.reproduce, "A paper's figures, run again beside ours."),
}
FAMILIES: dict[str, tuple[typer.Typer, str]] = {
    "data": (listing.app, "Real images: what there is, and how to get the full sets."),
    "prior": (priors.app, "Generators as priors of attacks: train, show, check."),
}
"""The tree of commands, with the line of each in the help of `gradleak` itself."""

app = typer.Typer(
    name="gradleak",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help, without loading rich
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "GRADLEAK"},
    help="What can a federated-learning server see of its clients' data?",
    epilog="Audit only models, data and clients that you are authorised to audit.",
)
for name, (command, line) in COMMANDS.items():
    app.command(name, short_help=line)(command)
for name, (family, line) in FAMILIES.items():
    app.add_typer(family, name=name, short_help=line)


def _print_version(requested: bool) -> None:
    if requested:
        from gradleak import __version__

        typer.echo(f"gradleak {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """The entry point. An error that the commands let through is a defect of gradleak, with an exit code of its own."""
    typer.core.HAS_RICH = False  # else typer loads rich to escape brackets in plain help: half of its time
    try:
        app()
    except Exception:
        traceback.print_exc()
        log("gradleak: this is a defect of gradleak, not of your model. Please report it with the lines above.")
        sys.exit(DEFECT)
