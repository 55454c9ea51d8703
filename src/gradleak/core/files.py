"""Single files: rows of JSON and named tensors, read from outside without trust and replaced as a whole."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

Row: TypeAlias = dict[str, Any]
STATE_VERSION = 1


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
        return {name: finite(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(member) for member in value]
    return value


_NUMBERS = re.compile(r"\[[-+\d\s.,e\[\]]+")
SHAPE = 5  # numbers in brackets that a message may have: as many as a shape


def without_values(text: str) -> str:
    """A message without its longer lists of numbers: those of somebody's model may be private values."""

    def kept(found: re.Match[str]) -> str:
        short = len(re.findall(r"\d+", found[0].replace(".", ""))) <= SHAPE
        return found[0] if short else f"[...]{' ' * found[0].endswith(' ')}"

    return _NUMBERS.sub(kept, text)


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


def whole_lines(path: Path) -> list[bytes]:
    """The complete lines of a file, which may be missing. A last line without its end was still being written."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """A file to write beside `path`, which replaces it when the block ends: readers never meet half a file.

    `private`: only its owner can read it, from the first byte on.
    """
    partial = path.with_name(path.name + ".part")
    if private:
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    yield partial
    os.replace(partial, path)


def replace_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a run that resumes, never meets half of it."""
    with replacing(path) as partial, open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def save_state(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Tensors by name, in their order, with a header of plain values."""
    from safetensors.torch import save

    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    # safetensors sorts by name, and what flattens a tree (a sketch, a random stream per tensor) goes by its order.
    metadata = {"version": STATE_VERSION, **header, "names": list(copies)}
    replace_whole(path, save(copies, metadata={"gradleak": json.dumps(metadata)}))


def load_state(path: Path, error: type[ValueError]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_state` wrote, as (header, tensors); every defect becomes one `error`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["gradleak"])
            tensors = {name: file.get_tensor(name) for name in header["names"]}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as problem:
        raise error(f"{path} cannot be read ({type(problem).__name__}: {problem}); copy it again.") from None
    if not isinstance(header, dict) or header.get("version") != STATE_VERSION:
        raise error(f"{path} is not of a training that this version of gradleak can read.")
    return header, tensors
