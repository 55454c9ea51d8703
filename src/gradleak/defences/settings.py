"""Checks of a defence's settings: what is wrong, what was given."""

from __future__ import annotations

from typing import TypeVar

Number = TypeVar("Number", int, float)


def at_least(name: str, value: Number, least: Number, *, excluded: bool = False, whole: bool = False) -> None:
    """Refuse a setting below `least`, or at it where that is `excluded`; `whole`: it must be an int."""
    if whole and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{name} must be a whole number; given {value}.")
    if not (value > least if excluded else value >= least):
        raise ValueError(f"{name} must be {'above' if excluded else 'at least'} {least}; given {value}.")


def one_of(name: str, value: object, *known: str) -> None:
    """Refuse a setting that is none of the known ones."""
    if value not in known:
        *first, last = map(repr, known)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}; given {value!r}.")


def below_one(name: str, value: float) -> None:
    """Refuse the decay of a running mean outside of [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1; given {value}.")
