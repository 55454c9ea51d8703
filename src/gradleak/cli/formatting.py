"""Numbers and texts as people read them."""

from __future__ import annotations

import shlex
import sys


def sentence(text: object) -> str:
    """The text with one full stop at its end."""
    trimmed = str(text).rstrip()
    return trimmed if trimmed.endswith((".", "!", "?")) else f"{trimmed}."


def counted(number: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def command_line() -> str:
    """The command as it was typed, ready to be typed again."""
    return shlex.join(["gradleak", *sys.argv[1:]])
