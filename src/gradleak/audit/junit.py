"""A run as JUnit XML, which continuous integration shows as test results.

One test case for each planned cell, and a last one for the run as a whole:

error     the cell failed: its message and traceback
failure   more than the stated share was recovered; of the control, that it did not reach what it must; of the run,
          that a stated threshold was crossed. Nothing fails where no threshold was stated
skipped   the cell was not run, or is inconclusive: the attack did not work, which shows nothing
passed    otherwise

The last case fails exactly where `gradleak audit --fail-above` exits with 1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from gradleak.audit.summary import INCONCLUSIVE, Summary, summaries_of
from gradleak.audit.verdict import VOID
from gradleak.core.files import Row

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 has no way to write


def junit_of(result: AuditResult, fail_above: float | None = None, reason: str = "") -> str:
    """`fail_above`: the stated share; `reason`: why the run as a whole crosses it, empty where it does not."""
    cases = [_cell(result, key, fail_above) for key in dict.fromkeys(result.settings["plan"]["cells"])]
    cases.append(_run(result, reason))
    suite = ElementTree.Element("testsuite", {"name": "gradleak audit", "tests": str(len(cases))})
    for kind in ("failure", "error", "skipped"):
        number = sum(case.find(kind) is not None for case in cases)
        suite.set({"failure": "failures", "error": "errors"}.get(kind, kind), str(number))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
    suite.extend(cases)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _cell(result: AuditResult, key: str, fail_above: float | None) -> ElementTree.Element:
    rows = [row for row in result.rows if row["cell"] == key]
    if not rows:
        return _case(f"cell {key}", "not run", 0.0, "skipped", "The cell was not run: run the same command again.")
    first, spent = rows[0], sum(row.get("seconds") or 0.0 for row in rows)
    name, home = _named(first), f"gradleak.{first['defence']}"
    if first["status"] == "failed":
        return _case(name, home, spent, "error", first["error"], str(first.get("traceback") or ""))
    [line] = summaries_of({**row, "control": False} for row in rows)
    told = f"{line.word}: {line.ruling.because}"
    return _case(name, home, spent, *_outcome(result, first, line, fail_above), out=told)


def _outcome(result: AuditResult, row: Row, line: Summary, fail_above: float | None) -> tuple[str, str]:
    """How a cell that ran ended: the word of JUnit, empty where it passed, and why."""
    if row["control"]:
        control = result.positive_control
        return ("", "") if control.passed else ("skipped" if fail_above is None else "failure", control.text)
    if fail_above is not None and line.recovered.value > fail_above:
        return "failure", f"Recovered {line.recovered}, which is above the stated {fail_above:.0%}."
    if line.word == INCONCLUSIVE:
        return "skipped", f"Inconclusive: {line.ruling.because}."
    return "", ""


def _run(result: AuditResult, reason: str) -> ElementTree.Element:
    verdict = result.verdict
    unsure = verdict.word in (VOID, INCONCLUSIVE)
    kind, why = ("failure", reason) if reason else ("skipped", f"The run is {verdict.word}.") if unsure else ("", "")
    return _case("the run as a whole", "gradleak.verdict", 0.0, kind, why, out=str(verdict))


def _named(row: Row) -> str:
    form = "" if row["defence"] == "none" else f" ({row['form']})"
    where = f"B = {row['examples']}, round {row['round']}, seed {row['seed']}"
    return f"{'positive control: ' * row['control']}{row['attack']} against {row['defence']}{form}, {where}"


def _case(
    name: str, home: str, seconds: float, kind: str = "", message: str = "", text: str = "", out: str = ""
) -> ElementTree.Element:
    case = ElementTree.Element("testcase", {"name": _sound(name), "classname": _sound(home), "time": f"{seconds:.3f}"})
    if kind:
        ElementTree.SubElement(case, kind, {"message": _sound(message)}).text = _sound(text) or None
    if out:
        ElementTree.SubElement(case, "system-out").text = _sound(out)
    return case


def _sound(text: str) -> str:
    return _NO_XML.sub("?", text)
