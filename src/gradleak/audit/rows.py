"""A row: what one cell found out about one target. `rows.jsonl` has one per line; numbers are finite or null.

What each entry is stands in schema.py, and for people in docs/rows.md. Here rows are written, read and checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gradleak.audit.labels import Trained, guarantee_of
from gradleak.core.files import BadRun, Row, read_object

ROW_VERSION = 1
FORMS = ("undefended", "naive", "masked", "adaptive", "averaged")  # from the least to the most informed
_KEY = re.compile(r"[0-9a-f]{16}")
_COUNTS = ("unknowns", "equations", "rank", "null")
_MEASURES = ("tolerance", "residual", "rounding", "share", "shift", "largest", "smallest", "floor")
REQUIRED: dict[str, Any] = {
    "cell": str, "status": str, "control": bool, "attack": str, "defence": str, "form": str,
    "round": int, "seed": int, "examples": int, "targets": int,
}  # fmt: skip
SCORED: dict[str, Any] = {
    "target": int, "scores": dict, "gallery_size": list, "hits": dict, "labels": dict, "baselines": dict,
    "assignment": list, "diverged": bool, "converged": bool, "checks": list, "match": (float, int, type(None)),
    "seconds": (float, int),
}  # fmt: skip


UPGRADES: dict[int, Callable[[Row], Row]] = {}
"""From a version to the next: a row of that version, as the next has it. There has been one version so far."""


def _upgraded(row: Row, where: str) -> Row:
    """A row of any version that some gradleak wrote, as this one has them."""
    given = row.get("version")
    if type(given) is not int or given < min([ROW_VERSION, *UPGRADES]):
        raise BadRun(f"{where} has version {given!r:.60}, which no gradleak wrote; versions end at {ROW_VERSION}.")
    if given > ROW_VERSION:
        raise BadRun(
            f"{where} has version {given}; this gradleak reads up to {ROW_VERSION}. Read it with the one that wrote it "
            "(run.toml names its version), or a newer one."
        )
    for version in range(given, ROW_VERSION):
        row = {**UPGRADES[version](row), "version": version + 1}
    return row


def decode(line: bytes, where: str) -> Row:
    """One line, checked so far that no table or verdict can stumble over it."""
    row = _upgraded(read_object(line, where), where)
    if row.get("status") not in ("done", "failed"):
        raise BadRun(f"{where}: status should be 'done' or 'failed'; it is {row.get('status')!r:.60}.")
    wanted = REQUIRED | (SCORED if row.get("status") == "done" else {"error": str})
    for name, kind in wanted.items():
        if not isinstance(row.get(name), kind) or (kind is int and isinstance(row[name], bool)):
            raise BadRun(f"{where}: {name} is {row.get(name)!r:.60}, which is not of its kind.")
    if row["form"] not in FORMS:
        raise BadRun(f"{where}: form should be one of {', '.join(FORMS)}; it is {row['form']!r:.60}.")
    if not _KEY.fullmatch(row["cell"]):  # it becomes a file name
        raise BadRun(f"{where}: cell {row['cell']!r:.60} is not a key of 16 hexadecimal digits.")
    if row["status"] == "done":
        _check_scores(row, where)
        _check_certificate(row, where)
        _check_labels(row, where)
    return row


def _check_scores(row: Row, where: str) -> None:
    """One finite number or null, or one truth value, per example."""
    examples = row["examples"]

    def listed(name: str, values: Any, kinds: tuple[type, ...]) -> None:
        fit = isinstance(values, list) and len(values) == examples and all(type(v) in kinds for v in values)
        if not fit or not all(v is None or abs(v) < 1e300 for v in values):  # 1e999 is JSON, and infinite
            raise BadRun(f"{where}: {name} should list {examples} values; it is {values!r:.60}.")

    number = (int, float, type(None))
    for name in ("psnr", "ssim", "mse", "rank"):
        listed(f"scores.{name}", row["scores"].get(name), number)
    for name in ("ssim>0.5", "psnr>18", "psnr>20", "rank1", "recovered"):
        listed(f"hits.{name}", row["hits"].get(name), (bool,))
    listed("gallery_size", row["gallery_size"], (int,))
    listed("assignment", row["assignment"], (int,))
    if sorted(row["assignment"]) != list(range(examples)) or min(row["gallery_size"]) < 1 or examples < 1:
        raise BadRun(f"{where}: assignment or gallery_size holds impossible values.")
    for check in row["checks"]:
        texts = [check.get(name) for name in ("name", "severity", "text", "fix")] if isinstance(check, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise BadRun(f"{where}: a check should have name, severity, text and fix; it is {check!r:.60}.")
    for baseline, scores in row["baselines"].items():
        if not isinstance(scores, dict):
            raise BadRun(f"{where}: baselines.{baseline} should be an object of scores.")
        for name, values in scores.items():
            listed(f"baselines.{baseline}.{name}", values, (*number, bool))
    for name, value in row["labels"].items():
        if type(value) not in number or (value is not None and not abs(value) < 1e300):
            raise BadRun(f"{where}: labels.{name} should be a number.")


def _check_labels(row: Row, where: str) -> None:
    for name, read in (("guarantee", guarantee_of), ("trained", Trained.of)):
        if row.get(name) is not None:
            try:
                read(row[name])
            except ValueError as problem:
                raise BadRun(f"{where}: {str(problem).rstrip('.')}.") from None


def _check_certificate(row: Row, where: str) -> None:
    """Counts that add up, finite numbers or null, and words that say what the counts say."""
    held = row.get("certificate")
    if held is None:
        return
    if not isinstance(held, dict):
        raise BadRun(f"{where}: certificate should be an object or null; it is {held!r:.60}.")
    for name in _COUNTS:
        if type(held.get(name)) is not int or not 0 <= held[name] < 2**63:
            raise BadRun(f"{where}: certificate.{name} should be a whole number; it is {held.get(name)!r:.60}.")
    for name in _MEASURES:
        value = held.get(name, "missing")
        if value is not None and (type(value) not in (int, float) or not 0 <= value < 1e300):
            raise BadRun(f"{where}: certificate.{name} should be a number from 0 or null; it is {value!r:.60}.")
    null, words = held["null"], ("determined", f"determined up to {held['null']} dimensions", "not determined")
    told = held.get("verdict")
    if null != held["unknowns"] - held["rank"] or told not in words or (told == "determined" and null):
        raise BadRun(f"{where}: certificate says {told!r:.60}, which does not fit its rank of {held['rank']}.")
    if not isinstance(held.get("reason"), str):
        raise BadRun(f"{where}: certificate.reason should be text; it is {held.get('reason')!r:.60}.")
