"""The folder of a study: it survives being killed at any moment, and the same call goes on.

analysis.toml      the configuration, for people and for the check that a resumed study is the same
environment.json   commit, versions, hardware, time; later runs that resumed are listed in it
analysis.jsonl     one line per round (measure.py)
analysis.json      all of it with PSNR and associations, analysis.html the page: written anew at the end of every run
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradleak import __version__
from gradleak.results.configuration import from_toml, to_toml
from gradleak.results.rows import BadRun, encode, read_object
from gradleak.results.store import Folder, FolderInUse, by_name, replace_whole, short
from gradleak.study.measure import VERSION, Row

FREE = ("gradleak", "engine.device", "origin.", "plan.")  # may differ between a run and the one that resumes it
MEANING = {
    "fingerprint.task": "the task (layers, weights, fields, or the code of model or loss)",
    "fingerprint.data": "the data",
    "fingerprint.defence": "settings inside the defence, or its code",
}


class StudyFolder:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        self.path, self._folder = path, Folder(path)

    def open(self, settings: dict[str, Any], environment: dict[str, Any]) -> tuple[list[Row], dict[str, Any]]:
        """Make the folder ready: new, or holding the same study. Returns its rows, and the environment it records."""
        self._folder.lock()
        try:
            if (self.path / "analysis.toml").exists():
                _demand_same(self.path, settings_in(self.path), settings)
                began = environment_in(self.path)
                environment = {**began, "resumed": [*began.get("resumed", []), environment]} if began else environment
            elif others := [entry.name for entry in self.path.iterdir() if entry.name != ".lock"]:
                raise FolderInUse(f"{self.path} holds {others[0]} and no analysis. Choose another folder.")
            rows = rows_in(self.path)
            self.write("environment.json", json.dumps(environment, indent=2, allow_nan=False) + "\n")
            self.write("analysis.toml", to_toml(settings, f"An analysis by gradleak {__version__}."))
            # Without what was in flight, so that appending starts on a clean line.
            replace_whole(self.path / "analysis.jsonl", b"".join(map(encode, rows)))
            return rows, environment
        except BaseException:
            self.close()
            raise

    def add(self, row: Row) -> None:
        with open(self.path / "analysis.jsonl", "ab") as file:
            file.write(encode(row))
            file.flush()
            os.fsync(file.fileno())

    def write(self, name: str, text: str) -> None:
        self._folder.write(name, text)

    def close(self) -> None:
        self._folder.unlock()


def rows_in(path: Path) -> list[Row]:
    """The lines of analysis.jsonl; a last one without its end was in flight."""
    try:
        lines = (path / "analysis.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    rows = [read_object(line, f"{path / 'analysis.jsonl'}:{number}") for number, line in enumerate(lines, start=1)]
    for number, row in enumerate(rows, start=1):
        if row.get("version") != VERSION or type(row.get("round")) is not int or "curvature" not in row:
            raise BadRun(
                f"{path / 'analysis.jsonl'}:{number} is not a row that this gradleak wrote. Choose another folder."
            )
    return rows


def settings_in(path: Path) -> dict[str, Any]:
    place = path / "analysis.toml"
    try:
        return from_toml(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRun(f"{path} is not the folder of an analysis: it has no analysis.toml.") from None
    except ValueError as problem:
        raise BadRun(f"{place} cannot be read: {problem}.") from None


def environment_in(path: Path) -> dict[str, Any]:
    try:
        return read_object((path / "environment.json").read_bytes(), str(path / "environment.json"))
    except FileNotFoundError:
        return {}


def _demand_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    old, new = dict(by_name(there)), dict(by_name(here))
    odd = [name for name in {**old, **new} if old.get(name) != new.get(name) and not name.startswith(FREE)]
    if odd:
        odd.sort(key=lambda name: name.startswith("fingerprint."))
        told = (
            MEANING.get(name, f"{name} ({short(old.get(name))} there, {short(new.get(name))} now)") for name in odd[:4]
        )
        raise FolderInUse(
            f"{path} holds an analysis with other settings. They differ in {'; '.join(told)}. Choose another folder, "
            "or repeat the settings of its analysis.toml to go on with that one."
        )
