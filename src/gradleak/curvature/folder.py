"""The folder of a study: it survives a kill at any moment, and the same call resumes.

analysis.toml      the configuration, for people and for the check that a resumed study is the same
environment.json   commit, versions, hardware, time; later runs that resumed are listed in it
analysis.jsonl     one line per round (measure.py)
analysis.json      all rows with PSNR and associations; analysis.html the page: both rewritten at the end of every run
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from gradleak import __version__
from gradleak.core.configuration import from_toml, to_toml
from gradleak.core.files import BadRun, encode, read_object, whole_lines
from gradleak.core.folder import ResumableFolder, with_resumption
from gradleak.curvature.measure import VERSION, Row


class StudyFolder(ResumableFolder):
    """The writing side."""

    work = "analysis"
    config = "analysis.toml"
    free = ("gradleak", "engine.device", "origin.", "plan.")
    meaning: ClassVar[Mapping[str, str]] = {
        "fingerprint.task": "the task (layers, weights, fields, or the code of model or loss)",
        "fingerprint.data": "the data",
        "fingerprint.defence": "settings inside the defence, or its code",
    }

    def open(self, settings: dict[str, Any], environment: dict[str, Any]) -> tuple[list[Row], dict[str, Any]]:
        """Prepare the folder, new or of the same study. Returns its rows and the environment to record."""
        self.lock()
        try:
            if self.holds(settings):
                environment = with_resumption(self.path, environment)
            else:
                self.demand_empty()
            rows = rows_in(self.path)
            self.write("environment.json", json.dumps(environment, indent=2, allow_nan=False) + "\n")
            self.write("analysis.toml", to_toml(settings, f"An analysis by gradleak {__version__}."))
            # Without a half-written last line, so that appending starts on a new one.
            self.write("analysis.jsonl", b"".join(map(encode, rows)))
            return rows, environment
        except BaseException:
            self.close()
            raise

    def add(self, row: Row) -> None:
        """A line of analysis.jsonl."""
        self.append("analysis.jsonl", [row], sync=True)


def rows_in(path: Path) -> list[Row]:
    """The rows of analysis.jsonl; a half-written last line does not count."""
    place = path / "analysis.jsonl"
    rows = [read_object(line, f"{place}:{number}") for number, line in enumerate(whole_lines(place), start=1)]
    for number, row in enumerate(rows, start=1):
        if row.get("version") != VERSION or type(row.get("round")) is not int or "curvature" not in row:
            raise BadRun(f"{place}:{number} is not a row that this gradleak wrote. Choose another folder.")
    return rows


def settings_in(path: Path) -> dict[str, Any]:
    """The settings of an analysis, from its folder."""
    place = path / "analysis.toml"
    try:
        return from_toml(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRun(f"{path} is not the folder of an analysis: it has no analysis.toml.") from None
    except ValueError as problem:
        raise BadRun(f"{place} cannot be read: {problem}.") from None
