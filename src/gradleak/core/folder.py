"""A folder that work is kept in and goes on from: what audits, trainings, priors and studies have in common.

One writer at a time; a TOML file of settings that whoever goes on has to repeat; lines that are added; files that are
replaced as a whole. It survives being killed at any moment, and nothing that is read from it is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from gradleak.core.configuration import from_toml
from gradleak.core.files import Row, encode, read_object

STATE_VERSION = 1


class FolderInUse(ValueError):
    """A folder that already holds something else, or that another process is writing."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. The message says what is kept and how to go on."""


class ResumableFolder:
    """The writing side.

    work      what the folder holds, in a word
    config    its file of settings
    free      names of settings, or beginnings of names, that may differ between a run and the one that goes on with it
    meaning   what stands behind a setting that is a hash
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
            told = f"Another process is writing into {self.path}: wait for it, or choose another folder."
            raise FolderInUse(told) from None

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
            there = from_toml(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            told = f"{path} cannot be read ({problem}), so nothing can be resumed. Choose another folder."
            raise FolderInUse(told) from None
        self._demand_same(there, settings)
        return True

    def demand_empty(self) -> None:
        """Work that begins must not mix with what somebody else left here."""
        if others := [entry.name for entry in self.path.iterdir() if entry.name != ".lock"]:
            raise FolderInUse(f"{self.path} holds {others[0]} and no {self.work}. Choose another folder.")

    def write(self, name: str, content: str | bytes) -> None:
        """Replace a file as a whole; its folder is made."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        replace_whole(path, content.encode() if isinstance(content, str) else content)

    def append(self, name: str, rows: Iterable[Row], *, sync: bool = False) -> None:
        """Add lines to a file of rows. `sync`: return once they are on disk, where each is dear."""
        with open(self.path / name, "ab") as file:
            file.write(b"".join(map(encode, rows)))
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def trimmed(self, name: str, keep: Callable[[Row], bool]) -> list[Row]:
        """The rows of a file that `keep` accepts; the others are dropped from it, since they come again."""
        rows = [row for row in map(json.loads, whole_lines(self.path / name)) if keep(row)]
        if (self.path / name).exists():
            self.write(name, b"".join(map(encode, rows)))
        return rows

    def _demand_same(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        old, new = dict(by_name(there)), dict(by_name(here))
        odd = [name for name in {**old, **new} if old.get(name) != new.get(name) and not name.startswith(self.free)]
        if not odd:
            return
        odd.sort(key=lambda name: name.startswith("fingerprint."))  # what has a name says more than a hash of it
        told = (
            self.meaning.get(name, f"{name} ({short(old.get(name))} there, {short(new.get(name))} now)") for name in odd
        )
        article = "an" if self.work[0] in "aeiou" else "a"
        raise FolderInUse(
            f"{self.path} holds {article} {self.work} with other settings. They differ in {'; '.join(told)}. Choose "
            f"another folder, or repeat the settings of its {self.config} to go on with that one."
        )


def with_resumption(path: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """What environment.json should say: the run that began, and those that went on, this one last."""
    began = environment_in(path)
    return {**began, "resumed": [*began.get("resumed", []), environment]} if began else environment


def environment_in(path: Path) -> dict[str, Any]:
    """environment.json of a folder; empty where there is none."""
    try:
        return read_object((path / "environment.json").read_bytes(), str(path / "environment.json"))
    except FileNotFoundError:
        return {}


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that may not exist; what follows the last line end was in flight, or is nothing."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def replace_whole(path: Path, content: bytes) -> None:
    """A reader, or a run that resumes, never meets half a file."""
    partial = path.with_name(path.name + ".part")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def save_state(path: Path, header: Mapping[str, Any], held: Mapping[str, Tensor]) -> None:
    """Tensors by name, in their order, with a header of plain values."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in held.items()}
    # safetensors sorts by name, and what flattens a tree (a sketch, a random stream per tensor) goes by its order.
    told = {"version": STATE_VERSION, **header, "names": list(tensors)}
    replace_whole(path, save(tensors, metadata={"gradleak": json.dumps(told)}))


def load_state(path: Path, error: type[ValueError]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_state` wrote, as (header, tensors); every defect becomes one `error`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["gradleak"])
            held = {name: file.get_tensor(name) for name in header["names"]}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as problem:
        raise error(f"{path} cannot be read ({type(problem).__name__}: {problem}); copy it again.") from None
    if not isinstance(header, dict) or header.get("version") != STATE_VERSION:
        raise error(f"{path} is not of a training that this version of gradleak can read.")
    return header, held


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
