"""What all commands share: exit codes, errors as one message, environment variables.

Exit codes: 0 done; 1 a stated threshold was crossed, or a check found errors; 2 it could not run, and the message says
why; 70 a defect of gradleak itself; 130 interrupted.
"""

from __future__ import annotations

import inspect
import os
import traceback
from typing import Any, get_type_hints

import click
import typer
from typer.core import TyperGroup

CROSSED, REFUSED, INTERRUPTED = 1, 2, 130
DEFECT = 70  # EX_SOFTWARE of sysexits.h: must not be taken for a crossed threshold (1)

# What a message of the library asks for, and how it is said on the command line.
OPTIONS = {
    "Knowledge(training=": "--lr, with --steps or --epochs",
    "Knowledge(given={'y'": "--labels",
    "Engine(batched=False)": "--one-by-one",
}


class Commands(TyperGroup):
    """Turns every expected error into one message and exit code 2. GRADLEAK_DEBUG=1 shows where it was raised."""

    def make_context(self, *words: Any, **settings: Any) -> Any:
        for parameter in tidied(self).params:
            parameter.allow_from_autoenv = False  # GRADLEAK_VERSION may well be set, and mean something else
        return super().make_context(*words, **settings)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return tidied(super().get_command(ctx, cmd_name))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.exceptions.Abort, BrokenPipeError):
            raise  # typer knows: `--help` ends so, and so does `gradleak list | head`
        except KeyboardInterrupt as stop:
            from gradleak.cli.loading import command_line

            tell(f"{stop} Go on with: {command_line()}" if str(stop) else ctx.obj or "Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except (ValueError, LookupError, TypeError, OSError, RuntimeError, ImportError) as problem:
            if not _expected(problem):
                raise
            if os.environ.get("GRADLEAK_DEBUG"):
                traceback.print_exc()
            tell(f"gradleak: {_message(problem)}")
            raise typer.Exit(REFUSED) from None


def tidied(command: Any) -> Any:
    """A command whose help says what its arguments are, and nothing that is the same for all options.

    Every option can be set by an environment variable (`auto_envvar_prefix`): the manual says once how it is called.
    Where typer is older than click, the help of arguments gets lost between the two: here it is found again, and shown
    by typer alone.
    """
    callback = getattr(command, "callback", None)
    hints = get_type_hints(inspect.unwrap(callback), include_extras=True) if callback else {}
    if hasattr(command, "format_arguments"):
        command.format_arguments = lambda *_: None
    for parameter in getattr(command, "params", ()):
        if parameter.envvar is None:
            parameter.show_envvar = False
        if not getattr(parameter, "help", ""):
            notes = getattr(hints.get(parameter.name), "__metadata__", ())
            parameter.help = next((note.help for note in notes if getattr(note, "help", "")), None)
    for inner in getattr(command, "commands", {}).values():
        command.suggest_commands = not hasattr(click, "NoSuchCommand")  # which asks "Did you mean" itself
        tidied(inner)
    return command


def _expected(problem: Exception) -> bool:
    """Errors of what was given. The rest are ours: they keep their traceback."""
    from gradleak.core.registry import BadSetting, UnknownName
    from gradleak.engine import EngineError

    return isinstance(problem, (ValueError, OSError, UnknownName, BadSetting, EngineError, ModuleNotFoundError))


def _message(problem: Exception) -> str:
    from gradleak.cli.loading import sentence

    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}." if problem.filename else f"{problem.strerror}."
    if isinstance(problem, ModuleNotFoundError):
        return f"{sentence(problem)} Install it, or the extra of gradleak that brings it (see README.md)."
    told = str(problem)
    said = [option for asked, option in OPTIONS.items() if asked in told]
    return f"{sentence(told)} On the command line: {'; '.join(said)}." if said else told


def tell(text: str) -> None:
    """On standard error: results alone go to standard output."""
    typer.echo(text, err=True)
