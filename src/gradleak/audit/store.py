"""Where a run lives: a folder that survives being killed at any moment, or memory.

run.toml               the configuration; if everything in it has a name, enough to repeat the run
environment.json       commit, versions, hardware, time; later runs that resumed are listed in it
rows.jsonl             one line per cell and target (rows.py, docs/rows.md)
arrays/CELL.safetensors      reconstructions, truth, trace; written before the rows of their cell
arrays/gallery.safetensors   the examples used for re-identification
arrays/words.safetensors     of texts: the text of each id, if it is known; run.toml says so
workers.jsonl          of a run on several machines: how each attempt at a cell ended

The folder holds private examples: treat it as the data itself. Reading it executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from gradleak.audit.rows import REQUIRED, decode
from gradleak.core.files import BadRun, Row, encode, whole_lines
from gradleak.core.folder import FolderInUse, ResumableFolder, with_resumption

Arrays: TypeAlias = dict[str, Tensor]


class Store(Protocol):
    """What an audit writes to and a result reads from."""

    def rows(self) -> list[Row]: ...

    def add(self, key: str, rows: Sequence[Row], arrays: Arrays | None) -> None: ...

    def put(self, name: str, arrays: Arrays) -> None: ...

    def arrays(self, name: str) -> Arrays: ...


class Memory:
    """A run without a folder."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._arrays: dict[str, Arrays] = {}

    def rows(self) -> list[Row]:
        return self._rows

    def add(self, key: str, rows: Sequence[Row], arrays: Arrays | None) -> None:
        if arrays is not None:
            self.put(key, arrays)
        self._rows += rows

    def put(self, name: str, arrays: Arrays) -> None:
        self._arrays[name] = arrays

    def log(self, event: Mapping[str, Any]) -> None:
        """Events of workers; nobody keeps them without a folder."""

    def arrays(self, name: str) -> Arrays:
        if name not in self._arrays:
            raise BadRun(f"There are no arrays of cell {name}.")
        return self._arrays[name]


class Folder(ResumableFolder):
    """A run on disk."""

    work = "run"
    config = "run.toml"
    free = ("gradleak", "engine.device", "plan.", "words")
    meaning: ClassVar[Mapping[str, str]] = {
        "fingerprint.task": "the task (layers, weights, fields, or the code of model or loss)",
        "fingerprint.gradient": "what model and loss compute: their gradient at fixed inputs is another",
        "fingerprint.data": "the data",
        "fingerprint.gallery": "the gallery",
        "fingerprint.attacks": "settings inside an attack, or its code",
        "fingerprint.defences": "settings inside a defence, or its code",
        "fingerprint.training": "the client's recipe, or its code",
    }

    def rows(self) -> list[Row]:
        """All rows of finished cells. An unfinished last line, or a cell without all its rows, was in flight."""
        path = self.path / "rows.jsonl"
        cells: dict[str, list[Row]] = {}
        for number, line in enumerate(whole_lines(path), start=1):
            row = decode(line, f"{path}:{number}")
            cells.setdefault(row["cell"], []).append(row)
        return [row for rows in cells.values() if _whole(rows, path) for row in rows]

    def tidy(self, keep: Sequence[Row]) -> None:
        """Drop what was in flight, so that appending starts on a clean line."""
        self.write("rows.jsonl", b"".join(map(encode, keep)))

    def add(self, key: str, rows: Sequence[Row], arrays: Arrays | None) -> None:
        if arrays is not None:
            self.put(key, arrays)
        self.append("rows.jsonl", rows, sync=True)

    def put(self, name: str, arrays: Arrays) -> None:
        from safetensors.torch import save

        plain = {key: value.detach().cpu().contiguous().clone() for key, value in arrays.items()}
        self.write(f"arrays/{name}.safetensors", save(plain))

    def log(self, event: Mapping[str, Any]) -> None:
        """One line of workers.jsonl: how an attempt at a cell ended."""
        self.append("workers.jsonl", [dict(event)])

    def arrays(self, name: str) -> Arrays:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / "arrays" / f"{name}.safetensors"
        try:
            return load_file(path)
        except FileNotFoundError:
            raise BadRun(f"{path} is missing: the rows are there, the images are not. Copy the whole folder.") from None
        except (SafetensorError, OSError, ValueError, KeyError, OverflowError) as problem:
            cause = f"{type(problem).__name__}: {problem}"
            raise BadRun(f"{path} cannot be read ({cause}). It may be cut off; copy it again.") from None


def packed_words(words: Sequence[str]) -> Tensor:
    """The text of each id as bytes of JSON."""
    return torch.frombuffer(bytearray(json.dumps(list(words)).encode()), dtype=torch.uint8)


def unpacked_words(packed: Tensor, where: str) -> tuple[str, ...]:
    """The same, read back and checked."""
    try:
        words = json.loads(packed.numpy().tobytes())
    except (ValueError, TypeError, RecursionError):
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BadRun(f"{where} does not hold the text of each id. Copy the whole folder again.")
    return tuple(words)


def _whole(rows: Sequence[Row], path: Path) -> bool:
    """Are these all rows of their cell? Rows of one cell that contradict each other are an error."""
    first = rows[0]
    if any(row[name] != first[name] for row in rows for name in REQUIRED):
        raise BadRun(f"{path}: the rows of cell {first['cell']} contradict each other.")
    return first["status"] == "failed" or sorted(row["target"] for row in rows) == list(range(first["targets"]))


def prepare(
    folder: Folder, settings: dict[str, Any], toml: str, environment: dict[str, Any], resume: bool
) -> dict[str, Any]:
    """Make a folder ready for writing: new, or with the same run in it. Returns the environment that it records."""
    folder.lock()
    if folder.holds(settings):
        environment = with_resumption(folder.path, environment)
    elif (folder.path / "rows.jsonl").exists() or (folder.path / "arrays").exists():
        raise FolderInUse(f"{folder.path} holds rows or arrays but no run.toml. Choose another folder.")
    done = [row for row in folder.rows() if row["status"] == "done"]  # failed cells are tried again
    if done and not resume:
        count = len({row["cell"] for row in done})
        raise FolderInUse(f"{folder.path} holds {count} finished cells. Resume, or choose another folder.")
    # In this order, so that after a kill at any moment a folder with rows has its configuration.
    folder.write("environment.json", json.dumps(environment, indent=2, allow_nan=False) + "\n")
    folder.write("run.toml", toml)
    folder.tidy(done)
    return environment
