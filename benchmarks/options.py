"""Options that the commands of `python -m benchmarks` share."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

PRECISIONS = ("fast", "strict", "double")


def parser(description: str | None, command: str = "") -> argparse.ArgumentParser:
    """A parser with the options of every command; the description is the first line of a docstring."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks {command}".strip())
    made.description = (description or "").split("\n", 1)[0]
    made.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    made.add_argument("--threads", type=int, help="threads of the CPU")
    made.add_argument("--out", "-o", type=Path, help="write the result as JSON")
    return made


def names(text: str, known: Collection[str], what: str) -> tuple[str, ...]:
    """Names separated by commas, all of them known."""
    from gradleak.core.registry import did_you_mean

    chosen = tuple(text.split(","))
    for name in chosen:
        if name not in known:
            raise ValueError(f"There is no {what} {name!r}.{did_you_mean(name, known)}")
    return chosen


def numbers(text: str) -> tuple[int, ...]:
    """Positive whole numbers separated by commas."""
    chosen = tuple(text.split(","))
    if not all(one.strip().isdigit() and int(one) for one in chosen):
        raise ValueError(f"--lanes takes positive whole numbers separated by commas; given {text!r}.")
    return tuple(map(int, chosen))


def case(text: str, lanes: str, steps: int) -> tuple[str, tuple[int, ...], int]:
    """NAME[:LANES[:STEPS]]; the shared lanes and steps apply where it names none of its own."""
    name, *own = text.split(":")
    return name, numbers(own[0] if own else lanes), int(own[1]) if len(own) > 1 else steps
