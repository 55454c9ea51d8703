"""Where a run lives: a folder that survives being killed at any moment, or memory.

run.toml               the configuration, readable and, where everything in it has a name, enough to repeat the run
environment.json       commit, versions, hardware, time; later runs that resumed are listed in it
rows.jsonl             one line per cell and target (schema.py, docs/rows.md)
arrays/CELL.safetensors      reconstructions, truth, trace; written before the rows of their cell
arrays/gallery.safetensors   the images used for re-identification
workers.jsonl          of a run on several machines: which attempt at which cell ended how

The folder holds private images: treat it as the data itself. Nothing that is read from it is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from gradleak.results.configuration import from_toml
from gradleak.results.rows import REQUIRED, BadRun, Row, decode, encode, read_object

Arrays: TypeAlias = dict[str, Tensor]


class FolderInUse(ValueError):
    """A folder that already holds something else, or that another process is writing."""


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

    def log(self, told: Mapping[str, Any]) -> None:
        """What happened to workers, which nobody keeps without a folder."""

    def arrays(self, name: str) -> Arrays:
        if name not in self._arrays:
            raise BadRun(f"There are no arrays of cell {name}.")
        return self._arrays[name]


class Folder:
    """A run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

    def rows(self) -> list[Row]:
        """All rows of finished cells. A last line without its end, and a cell without all its rows, were in flight."""
        try:
            content = (self.path / "rows.jsonl").read_bytes()
        except FileNotFoundError:
            return []
        lines = content.split(b"\n")[:-1]  # what follows the last line end is torn, or nothing
        found = [decode(line, f"{self.path / 'rows.jsonl'}:{number}") for number, line in enumerate(lines, start=1)]
        cells: dict[str, list[Row]] = {}
        for row in found:
            cells.setdefault(row["cell"], []).append(row)
        return [row for rows in cells.values() if _whole(rows, self.path / "rows.jsonl") for row in rows]

    def lock(self) -> None:
        """One writer at a time. The system drops the lock when the process ends, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # Windows: two runs into one folder are then the user's to avoid
            return
        self._lock = open(self.path / ".lock", "ab")  # noqa: SIM115 (held for the run)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            told = f"Another process is writing into {self.path}: wait for it, or choose another folder."
            raise FolderInUse(told) from None

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def tidy(self, keep: Sequence[Row]) -> None:
        """Drop what was in flight, so that appending starts on a clean line."""
        replace_whole(self.path / "rows.jsonl", b"".join(map(encode, keep)))

    def add(self, key: str, rows: Sequence[Row], arrays: Arrays | None) -> None:
        if arrays is not None:
            self.put(key, arrays)
        with open(self.path / "rows.jsonl", "ab") as file:
            file.write(b"".join(map(encode, rows)))
            file.flush()
            os.fsync(file.fileno())

    def put(self, name: str, arrays: Arrays) -> None:
        from safetensors.torch import save

        (self.path / "arrays").mkdir(exist_ok=True)
        plain = {key: value.detach().cpu().contiguous().clone() for key, value in arrays.items()}
        replace_whole(self.path / "arrays" / f"{name}.safetensors", save(plain))

    def log(self, told: Mapping[str, Any]) -> None:
        """One line of workers.jsonl: which attempt at which cell ended how."""
        with open(self.path / "workers.jsonl", "ab") as file:
            file.write(json.dumps(told).encode() + b"\n")

    def arrays(self, name: str) -> Arrays:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / "arrays" / f"{name}.safetensors"
        try:
            return load_file(path)
        except FileNotFoundError:
            raise BadRun(f"{path} is missing: the rows are there, the images are not. Copy the whole folder.") from None
        except (SafetensorError, OSError, ValueError, KeyError, OverflowError) as problem:
            told = f"{path} cannot be read ({type(problem).__name__}: {problem}). It may be cut off; copy it again."
            raise BadRun(told) from None

    def write(self, name: str, text: str) -> None:
        replace_whole(self.path / name, text.encode())


def _whole(rows: Sequence[Row], path: Path) -> bool:
    """Are these all rows of their cell? Rows of one cell that contradict each other are no run of ours."""
    first = rows[0]
    if any(row[name] != first[name] for row in rows for name in REQUIRED):
        raise BadRun(f"{path}: the rows of cell {first['cell']} contradict each other.")
    return first["status"] == "failed" or sorted(row["target"] for row in rows) == list(range(first["targets"]))


def replace_whole(path: Path, content: bytes) -> None:
    """A reader, or a run that resumes, never meets half a file."""
    partial = path.with_name(path.name + ".part")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def prepare(
    folder: Folder, settings: dict[str, Any], toml: str, environment: dict[str, Any], resume: bool
) -> dict[str, Any]:
    """Make a folder ready for writing: new, or holding the same run. Returns the environment it records."""
    folder.lock()
    path = folder.path / "run.toml"
    if path.exists():
        _demand_same(folder.path, _settings(path), settings)
        before = folder.path / "environment.json"
        began = read_object(before.read_bytes(), str(before)) if before.exists() else {}
        environment = {**began, "resumed": [*began.get("resumed", []), environment]} if began else environment
    elif (folder.path / "rows.jsonl").exists() or (folder.path / "arrays").exists():
        raise FolderInUse(f"{folder.path} holds rows or arrays but no run.toml. Choose another folder.")
    done = [row for row in folder.rows() if row["status"] == "done"]  # failed cells are tried again
    if done and not resume:
        count = len({row["cell"] for row in done})
        raise FolderInUse(f"{folder.path} holds {count} finished cells. Resume, or choose another folder.")
    # In this order: whatever moment it is killed at, a folder with rows has its configuration.
    folder.write("environment.json", json.dumps(environment, indent=2, allow_nan=False) + "\n")
    folder.write("run.toml", toml)
    folder.tidy(done)
    return environment


def _settings(path: Path) -> dict[str, Any]:
    try:
        return from_toml(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise FolderInUse(
            f"{path} cannot be read ({problem}), so nothing can be resumed. Choose another folder."
        ) from None


_MEANING = {
    "fingerprint.task": "the task (layers, weights, fields, or the code of model or loss)",
    "fingerprint.gradient": "what model and loss compute: their gradient at fixed inputs is another",
    "fingerprint.data": "the data",
    "fingerprint.gallery": "the gallery",
    "fingerprint.attacks": "settings inside an attack, or its code",
    "fingerprint.defences": "settings inside a defence, or its code",
    "fingerprint.training": "the client's recipe, or its code",
}


def _demand_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Rows of two configurations must not mix. The device and the version of gradleak may change."""
    old, new = dict(by_name(there)), dict(by_name(here))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    names = [name for name in names if name not in ("gradleak", "engine.device") and not name.startswith("plan.")]
    if not names:
        return
    told = [
        _MEANING.get(name, f"{name} ({short(old.get(name))} there, {short(new.get(name))} now)")
        for name in sorted(names, key=lambda name: name.startswith("fingerprint."))
    ]
    raise FolderInUse(
        f"{path} holds a run with other settings. They differ in {'; '.join(told)}. Choose another folder for this "
        "run, or repeat the settings of its run.toml to resume that one."
    )


def by_name(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as `outer.inner` and value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from by_name(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def short(value: Any) -> str:
    """A setting as a message quotes it."""
    return "nothing" if value is None else f"{value!r:.80}"
