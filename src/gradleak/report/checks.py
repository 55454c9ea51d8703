"""Findings about the searches and the observations: failed cells first, then the gravest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradleak.report.grid import Column, Line, Table, Value, plural

if TYPE_CHECKING:
    from gradleak.audit.result import Row

TONES = {"error": "bad", "warning": "warn", "note": "void"}
RANKS = {name: rank for rank, name in enumerate(TONES)}
PLACES = 4  # lines of the table that a finding names
RETRY = "see the traceback in rows.jsonl; the same command retries it"


def checks(grid: Sequence[Row]) -> Table | None:
    """Every finding once, with the number of its targets and the lines of the table that it is about."""
    findings: dict[tuple[str, str, str], list[tuple[str, str]]] = {}  # severity, name, fix: where, text
    for row in grid:
        where = f"{row['attack']} / {row['defence']} / {row['form']} / round {row['round']}"
        if row.get("status") == "failed":
            findings.setdefault(("error", "failed", RETRY), []).append((where, str(row.get("error") or "no message")))
        for check in row.get("checks") or ():
            key = (str(check["severity"]), str(check["name"]), str(check["fix"]))
            findings.setdefault(key, []).append((where, str(check["text"])))
    if not findings:
        return None
    order = sorted(
        findings.items(), key=lambda item: (RANKS.get(item[0][0], len(RANKS)), item[0][1] != "failed", item[0])
    )
    columns = ("check", "severity", "targets", "finding, for the first of them", "what to do", "where")
    return Table(
        "Findings about the attacks and the observations; none of them uses the private data.",
        tuple(Column(name, name == "targets") for name in columns),
        tuple(_line(*key, places) for key, places in order),
    )


def _line(severity: str, name: str, fix: str, findings: Sequence[tuple[str, str]]) -> Line:
    places = list(dict.fromkeys(where for where, _ in findings))
    more = len(places) - PLACES
    where = "; ".join(places[:PLACES]) + (f"; and {plural(more, 'line')} more" if more > 0 else "")
    texts = list(dict.fromkeys(text for _, text in findings)) if name == "failed" else [findings[0][1]]
    tag, count = Value(severity, TONES.get(severity, "void")), Value(str(len(findings)))
    return Line((Value(name), tag, count, Value("; ".join(texts)), Value(fix), Value("", note=where)))
