"""Times in words, and what a run will cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Estimate:
    """What a run will cost, before it starts.

    text      the work and the time, as one sentence
    seconds   about how long it takes; None if nothing of it can be timed
    counts    the amounts of work, by name: "cells", "rounds", "steps", ...
    """

    text: str
    seconds: float | None
    counts: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def duration(seconds: float) -> str:
    """Seconds in words: 0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def about(seconds: float) -> str:
    """An estimated time in words."""
    if seconds < 1.5:
        return "about a second, or less,"
    return f"about {seconds:.0f} seconds" if seconds < 120 else f"about {seconds / 60:.0f} minutes"
