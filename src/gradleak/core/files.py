"""Rows of JSON, written and read back: files from outside are untrusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]


class BadRun(ValueError):
    """A folder that is not a run, or is damaged."""


def encode(row: Row) -> bytes:
    """A row as a line of JSON; a number that is not finite is an error."""
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def finite(value: Any) -> Any:
    """The same structure with null for every number that is not finite: JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(held) for held in value]
    return value


def read_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object from outside; every defect becomes one BadRun."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a finite number")

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        raise BadRun(f"{where} is not JSON as gradleak writes it: {problem}.") from None
    if not isinstance(value, dict):
        raise BadRun(f"{where} holds {type(value).__name__}, not an object.")
    return value
