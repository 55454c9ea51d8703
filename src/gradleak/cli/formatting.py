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


def duration(seconds: float) -> str:
    """Seconds in the usual units: 0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def command_line() -> str:
    """The command as it was typed, ready to be typed again."""
    return shlex.join(["gradleak", *sys.argv[1:]])
