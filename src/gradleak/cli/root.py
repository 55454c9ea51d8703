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

from gradleak.cli.formatting import command_line, sentence
from gradleak.core.registry import BadSetting, UnknownName

CROSSED, REFUSED, INTERRUPTED = 1, 2, 130
DEFECT = 70  # EX_SOFTWARE of sysexits.h: must not be taken for a crossed threshold (1)
BUSY = 0.5  # mean number of other programs that want a core; a machine with fewer counts as idle

# What a message of the library asks for, and the option that gives it.
OPTION_HINTS = {
    "Knowledge(training=": "--lr, with --steps or --epochs",
    "Knowledge(given={'y'": "--labels",
    "Engine(batched=False)": "--one-by-one",
}


class LoadError(ValueError):
    """A word on the command line (a reference, a file, a number) that cannot be used; the message says what to do."""


class Commands(TyperGroup):
    """Turns every expected error into one message and exit code 2. GRADLEAK_DEBUG=1 shows where it was raised."""

    def make_context(self, *args: Any, **settings: Any) -> Any:
        for parameter in tidy(self).params:
            parameter.allow_from_autoenv = False  # GRADLEAK_VERSION may be set by a build, with another meaning
        return super().make_context(*args, **settings)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return tidy(super().get_command(ctx, cmd_name))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.exceptions.Abort, BrokenPipeError):
            raise  # typer handles these: the end of `--help`, and of `gradleak list | head`
        except KeyboardInterrupt as stop:
            log(f"{stop} Go on with: {command_line()}" if str(stop) else ctx.obj or "Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except (ValueError, LookupError, TypeError, OSError, RuntimeError, ImportError) as problem:
            if not _is_expected(problem):
                raise
            if os.environ.get("GRADLEAK_DEBUG"):
                traceback.print_exc()
            log(f"gradleak: {_message(problem)}")
            raise typer.Exit(REFUSED) from None


def tidy(command: Any) -> Any:
    """Show the help of arguments once, and hide what is the same for all options.

    Every option can be set by an environment variable (`auto_envvar_prefix`); only the manual says how it is named.
    A typer that is older than click loses the help of arguments, so it is read from the type hints again.
    """
    callback = getattr(command, "callback", None)
    hints = get_type_hints(inspect.unwrap(callback), include_extras=True) if callback else {}
    if hasattr(command, "format_arguments"):
        command.format_arguments = lambda *_: None
    for parameter in getattr(command, "params", ()):
        if parameter.envvar is None:
            parameter.show_envvar = False
        if not getattr(parameter, "help", ""):
            metadata = getattr(hints.get(parameter.name), "__metadata__", ())
            parameter.help = next((note.help for note in metadata if getattr(note, "help", "")), None)
    for subcommand in getattr(command, "commands", {}).values():
        command.suggest_commands = not hasattr(click, "NoSuchCommand")  # such a click asks "Did you mean" itself
        tidy(subcommand)
    return command


def _is_expected(problem: Exception) -> bool:
    """Errors of the user's input. All others are defects of gradleak, and keep their traceback."""
    from gradleak.engine import EngineError

    return isinstance(problem, (ValueError, OSError, UnknownName, BadSetting, EngineError, ModuleNotFoundError))


def _message(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}." if problem.filename else f"{problem.strerror}."
    if isinstance(problem, ModuleNotFoundError):
        return f"{sentence(problem)} Install it, or the extra of gradleak that brings it (see README.md)."
    text = str(problem)
    options = [option for hint, option in OPTION_HINTS.items() if hint in text]
    return f"{sentence(text)} On the command line: {'; '.join(options)}." if options else text


def log(text: str) -> None:
    """Print to standard error: only results go to standard output."""
    typer.echo(text, err=True)


def on_interrupt(message: str) -> None:
    """The message of Ctrl-C, for as long as the run itself has none."""
    click.get_current_context().find_root().obj = message


def spare_a_core() -> None:
    """On a busy machine use one thread fewer than torch would, unless OMP_NUM_THREADS is set.

    Steps are many and small, and all threads wait for the slowest after each, so a core that another program uses
    delays all of them. On a shared machine of two cores `estimate` of the built-in audit was 5 to 26 times higher with
    two threads than with one (four pairs); on an idle one its second-order cells took 20 s with two and 26 to 28 s
    with one.
    """
    import torch

    idle = hasattr(os, "getloadavg") and os.getloadavg()[0] < BUSY  # Windows has no load average
    if "OMP_NUM_THREADS" not in os.environ and not idle:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
