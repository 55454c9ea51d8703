"""Has it become slower? By ratio, against a stored result of the same machine.

Seconds depend on what else the machine does; how many times faster lanes are than one at a time, in the same run, far
less. A ratio that fell by more than a share is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.speed.throughput import Row

FALL = 0.15
# Of each section: what tells its rows apart, and the ratio that must not fall.
RATIOS: dict[str, tuple[tuple[str, ...], str]] = {
    "rows": (("network", "lanes", "precision", "batched"), "times_one_at_a_time"),
    "peer": (("network", "lanes", "precision"), "times_peer"),
}
MACHINE = ("processor", "cores", "threads", "gpus")


class OtherMachine(ValueError):
    """The stored result is of another machine: its ratios say nothing about this one."""


@dataclass(frozen=True)
class Fallen:
    """A ratio that is lower than it was."""

    section: str
    key: tuple[Any, ...]
    then: float
    now: float

    def __str__(self) -> str:
        what = " ".join(str(part) for part in self.key if not isinstance(part, bool))
        return f"{what}: x{self.now:,.1f}, was x{self.then:,.1f} ({self.now / self.then - 1:+.0%})"


def compare(now: Mapping[str, Any], then: Mapping[str, Any], fall: float = FALL) -> list[Fallen]:
    """Every ratio of both results that fell by more than `fall`."""
    same_machine(now["environment"], then["environment"])
    found = []
    for section, (names, ratio) in RATIOS.items():
        before = ratios(then.get(section, ()), names, ratio)
        for key, value in ratios(now.get(section, ()), names, ratio).items():
            if key in before and value < (1 - fall) * before[key]:
                found.append(Fallen(section, key, before[key], value))
    return found


def compared(now: Mapping[str, Any], then: Mapping[str, Any]) -> int:
    """How many ratios are in both."""
    return sum(
        len(ratios(now.get(section, ()), *told).keys() & ratios(then.get(section, ()), *told).keys())
        for section, told in RATIOS.items()
    )


def ratios(rows: Sequence[Row], names: tuple[str, ...], ratio: str) -> dict[tuple[Any, ...], float]:
    """By what tells the rows apart; rows that were too large, or never measured, have none."""
    return {tuple(row.get(name) for name in names): row[ratio] for row in rows if row.get(ratio) is not None}


def same_machine(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Refuse to compare machines."""
    for name in MACHINE:
        if now.get(name) != then.get(name):
            raise OtherMachine(
                f"The stored result is of another machine ({name}: {then.get(name)}; here: {now.get(name)}). Ratios of "
                "two machines say nothing about the code; store a result of this one with --out, and compare with that."
            )


def confirmed(fallen: Sequence[Fallen], again: Callable[[Fallen], float | None], fall: float = FALL) -> list[Fallen]:
    """Those that fell in a second measurement too: a busy moment falls once."""
    kept = []
    for one in fallen:
        value = again(one)
        if value is None or value < (1 - fall) * one.then:
            kept.append(one if value is None else Fallen(one.section, one.key, one.then, max(one.now, value)))
    return kept
