"""Resumable folders, which audits, trainings, priors and studies write.

One process writes at a time. A TOML file holds the settings, which a resumed run must repeat. Rows are appended; other
files are replaced as a whole. A folder survives a kill at any moment, and nothing read from it is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradleak.core.configuration import from_toml
from gradleak.core.files import Row, encode, read_object, replace_whole, whole_lines


class FolderInUse(ValueError):
    """A folder that already holds something else, or that another process is writing."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. The message says what was saved and how to resume."""


class ResumableFolder:
    """The writing side.

    work      what the folder holds, in a word
    config    its file of settings
    free      prefixes of the settings that may differ when a run is resumed
    meaning   what a setting that is a hash stands for
    """

    work: ClassVar[str]
    config: ClassVar[str]
    free: ClassVar[tuple[str, ...]]
    meaning: ClassVar[Mapping[str, str]] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

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
            message = f"Another process is writing into {self.path}: wait for it, or choose another folder."
            raise FolderInUse(message) from None

    def close(self) -> None:
        """Let others write."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether there is work of these settings; other settings are refused."""
        path = self.path / self.config
        if not path.exists():
            return False
        try:
            stored = from_toml(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            message = f"{path} cannot be read ({problem}), so nothing can be resumed. Choose another folder."
            raise FolderInUse(message) from None
        self._demand_same(stored, settings)
        return True

    def demand_empty(self) -> None:
        """Refuse a folder that holds other files: new work must not mix with them."""
        if others := [entry.name for entry in self.path.iterdir() if entry.name != ".lock"]:
            raise FolderInUse(f"{self.path} holds {others[0]} and no {self.work}. Choose another folder.")

    def write(self, name: str, content: str | bytes) -> None:
        """Replace a file as a whole; its folder is made."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        replace_whole(path, content.encode() if isinstance(content, str) else content)

    def append(self, name: str, rows: Iterable[Row], *, sync: bool = False) -> None:
        """Add lines to a file of rows. `sync`: return only once they are on disk, for rows that cost much."""
        with open(self.path / name, "ab") as file:
            file.write(b"".join(map(encode, rows)))
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def trimmed(self, name: str, keep: Callable[[Row], bool]) -> list[Row]:
        """The rows of a file that `keep` accepts; the others leave the file, since they will be written again."""
        rows = [row for row in map(json.loads, whole_lines(self.path / name)) if keep(row)]
        if (self.path / name).exists():
            self.write(name, b"".join(map(encode, rows)))
        return rows

    def _demand_same(self, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        old, new = dict(by_name(stored)), dict(by_name(settings))
        odd = [name for name in {**old, **new} if old.get(name) != new.get(name) and not name.startswith(self.free)]
        if not odd:
            return
        odd.sort(key=lambda name: name.startswith("fingerprint."))  # names first: they say more than hashes
        differences = (
            self.meaning.get(name, f"{name} ({short(old.get(name))} there, {short(new.get(name))} now)") for name in odd
        )
        article = "an" if self.work[0] in "aeiou" else "a"
        raise FolderInUse(
            f"{self.path} holds {article} {self.work} with other settings. They differ in {'; '.join(differences)}. "
            f"Choose another folder, or repeat the settings of its {self.config} to go on with that one."
            f"{made_by_another_version(stored)}"
        )


def made_by_another_version(stored: Mapping[str, Any]) -> str:
    """A sentence that ends an error about work that does not fit; empty if this version of gradleak made it."""
    from gradleak import __version__

    version = stored.get("gradleak")
    if version in (None, __version__):
        return ""
    return (
        f" gradleak {version!s:.20} made it, and this is {__version__}: only the version that began it can resume it."
    )


def with_resumption(path: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """The content of environment.json: the first run, and the runs that resumed it, this one last."""
    first = environment_in(path)
    return {**first, "resumed": [*first.get("resumed", []), environment]} if first else environment


def environment_in(path: Path) -> dict[str, Any]:
    """environment.json of a folder; empty if the file is missing."""
    try:
        return read_object((path / "environment.json").read_bytes(), str(path / "environment.json"))
    except FileNotFoundError:
        return {}


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
