"""What rows keep of a defence's guarantee and of the training whose weights were attacked, and how they are read back.

guarantee   {"text": as it is printed, and the fields of `Guarantee`}: an epsilon only where the defence gave one
trained     {"rounds": of the training so far, "defence": that it ran with, "test_loss", "test_accuracy": of the model
            that was attacked, null where they were not measured}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gradleak.scenario.guarantee import Guarantee

_TEXTS = ("reason", "unit", "model", "covers", "accountant", "sampling", "neighbours")
_MEASURES = ("test_loss", "test_accuracy")


def record(guarantee: Guarantee) -> dict[str, Any]:
    """As a row keeps it. JSON has no infinities, and an infinite epsilon proves nothing."""
    if guarantee.epsilon is not None and not math.isfinite(guarantee.epsilon):
        guarantee = Guarantee(reason="its epsilon is infinite")
    return {"text": str(guarantee), **asdict(guarantee)}


def guarantee_of(held: Any) -> Guarantee:
    """Read back; ValueError says what is odd."""
    if not isinstance(held, Mapping):
        raise ValueError(f"guarantee should be an object or null; it is {held!r:.60}")
    given: dict[str, Any] = {entry.name: held.get(entry.name) for entry in fields(Guarantee)}
    caveats, bound, releases = given["caveats"], given["reconstruction"], given["releases"]
    if not all(isinstance(given[name], str) for name in _TEXTS) or not isinstance(held.get("text"), str):
        raise ValueError("guarantee should have the texts of its label")
    if not all(given[name] is None or _number(given[name]) for name in ("epsilon", "delta")):
        raise ValueError("guarantee should have a number or null for epsilon and delta")
    if type(releases) is not int or not isinstance(caveats, (list, tuple)) or not all(type(c) is str for c in caveats):
        raise ValueError("guarantee should count releases and list caveats")
    pair = bound is None or (isinstance(bound, (list, tuple)) and len(bound) == 2 and all(map(_number, bound)))
    if not pair or (given["epsilon"] is None) != held["text"].startswith("no formal guarantee ("):
        raise ValueError("guarantee says something else in its text than in its numbers")
    given |= {"caveats": tuple(caveats), "reconstruction": bound and tuple(bound)}
    return Guarantee(**given)


@dataclass(frozen=True)
class Trained:
    """The training whose weights were attacked, and how good the model was at that round."""

    rounds: int
    defence: str
    test_loss: float | None = None
    test_accuracy: float | None = None

    @staticmethod
    def of(held: Any) -> Trained:
        """Read back; ValueError says what is odd."""
        if not isinstance(held, Mapping) or type(held.get("rounds")) is not int or type(held.get("defence")) is not str:
            raise ValueError(f"trained should have rounds and defence; it is {held!r:.60}")
        if odd := [name for name in _MEASURES if held.get(name) is not None and not _number(held[name])]:
            raise ValueError(f"trained.{odd[0]} should be a number or null")
        return Trained(held["rounds"], held["defence"], *(held.get(name) for name in _MEASURES))

    def __str__(self) -> str:
        measured = {
            "test accuracy": None if self.test_accuracy is None else f"{self.test_accuracy:.1%}",
            "test loss": None if self.test_loss is None else f"{self.test_loss:.4g}",
        }
        told = ", ".join(f"{name} {value}" for name, value in measured.items() if value is not None)
        with_what = "without a defence" if self.defence == "none" else f"with {self.defence}"
        return f"{told or 'not tested'} (trained {with_what})"


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300
