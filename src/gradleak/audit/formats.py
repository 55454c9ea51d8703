"""A result in the formats that people and tools read: text, Markdown, LaTeX and CSV tables, JUnit XML, notebook HTML.

JUnit, which continuous integration shows as test results, has a case for each planned cell and a last one for the run:

error     the cell failed: its message and traceback
failure   a cell recovered more than the stated share; the control did not reach its level; the run crossed a stated
          threshold. Nothing fails if no threshold was stated
skipped   the cell was not run, or is inconclusive: the attack did not work, which shows nothing
passed    otherwise

The last case fails exactly where `gradleak audit --fail-above` exits with 1. The HTML of a notebook holds no images and
no scripts; text from a run is escaped, and it reads on light and dark pages.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias
from xml.etree import ElementTree

from gradleak.audit.intervals import NAN
from gradleak.audit.ruling import INCONCLUSIVE, LEAKS, NOT_SHOWN, PART, VOID
from gradleak.audit.summary import Summary, summaries_of
from gradleak.audit.verdict import Headline, attackers_of, headlines_of, labelled
from gradleak.core.files import Row, without_values
from gradleak.scenario.kinds import Image, Kind, Measure

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult

Grid: TypeAlias = list[list[str]]
"""The header and the lines of a table, as text."""


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


def _plain(values: Mapping[str, float], measure: Measure) -> str:
    """A score without its unit; a dash if there is none."""
    value = values.get(measure.name, NAN)
    return measure.plain(value if math.isfinite(value) else None)


def _level(values: Mapping[str, float], measure: Measure) -> str:
    return f"{_plain(values, measure)}{f' {measure.unit}' if measure.unit else ''}"


def _kind(lines: Sequence[Summary]) -> Kind:
    """A run has one kind of private data."""
    return lines[0].kind if lines else Image()


def _targets(line: Summary) -> str:
    return f"{line.targets}{f' x {line.seeds}' if line.seeds > 1 else ''}{' (small)' if line.small else ''}"


Columns: TypeAlias = "dict[str, Callable[[Summary], str]]"
"""The columns of a table: their heads, and what they show of a line."""

SETTING: Columns = {
    "attack": lambda line: line.attack,
    "defence": lambda line: line.defence,
    "form": lambda line: line.form,
    "round": lambda line: str(line.round),
    "B": lambda line: str(line.examples),
    "targets": _targets,
    "recovered [95 %]": lambda line: str(line.recovered) if line.targets else "-",
}
OUTCOME: Columns = {
    "labels": lambda line: _share(line.means.get("labels", NAN)),
    "rank 1 (chance)": lambda line: f"{_share(line.rates['rank1'].value)} ({line.chance:.1%})" if line.targets else "-",
    "baseline": lambda line: scored(line.baseline.get("recovered", NAN), line.baseline, line.kind),
    "match": lambda line: f"{line.match:.2g}" if line.targets else "-",
    "converged": lambda line: _share(line.converged),
    "seconds": lambda line: f"{line.seconds:.1f}",
    "verdict": lambda line: "failed" if line.errors and not line.targets else line.word,
}
"""Baseline: the same attack on an unrelated update."""


def columns_of(kind: Kind) -> Columns:
    """The columns for data of this kind. Clearest: the best recovered example, a client's worst case."""
    first, *others = (measure for measure in kind.measures if measure.column)

    def spread(line: Summary) -> str:
        return "/".join(_plain(values, first) for values in (line.means, line.medians, line.worst))

    def mean(line: Summary, measure: Measure) -> str:
        return _plain(line.means, measure)

    further = {measure.label: partial(mean, measure=measure) for measure in others}
    return {**SETTING, f"{first.label} mean/median/clearest": spread, **further, **OUTCOME}


def entries(lines: Sequence[Summary]) -> Grid:
    """The table of these lines."""
    columns = columns_of(_kind(lines))
    return [list(columns), *([show(line) for show in columns.values()] for line in lines)]


# --- what the lines say of each defence ------------------------------------------------------------------------------


def about_overview(lines: Sequence[Summary]) -> str:
    """How to read the table of defences."""
    return (
        f"Each defence by its strongest attack: recovered, mean {_kind(lines).headline.label}. *: the headline, the "
        "strongest of these attackers; -: the same attacker as the one before, or not run. No gradient: the headline's "
        "attack on an unrelated update."
    )


def overview(lines: Sequence[Summary]) -> Grid:
    """Per defence: the undefended reference, every attacker, the level of chance. Empty if there is no defence."""
    headlines = headlines_of(lines)
    attackers = attackers_of(headlines)
    head = ["defence", "undefended", *attackers.values(), "no gradient", "verdict"]
    varied = [name for name in ("round", "examples") if len({getattr(each, name) for each in headlines}) > 1]
    return [head, *(_overview_line(each, varied, attackers) for each in headlines)] if headlines else []


def _overview_line(headline: Headline, varied: Sequence[str], forms: Iterable[str]) -> list[str]:
    def level(line: Summary | None) -> str:
        star = " *" if line is headline.strongest else ""
        return (
            "-" if line is None or not line.targets else f"{scored(line.recovered.value, line.means, line.kind)}{star}"
        )

    blind, kind = headline.strongest.baseline, headline.strongest.kind
    chance = scored(blind.get("recovered", NAN), blind, kind) if blind else "-"
    attackers = [level(headline.forms.get(form)) for form in forms]
    return [headline.placed(varied), level(headline.undefended), *attackers, chance, headline.word]


def notes(lines: Sequence[Summary]) -> list[str]:
    """Paragraphs below the tables: what defences prove, how good the attacked model was, what was not run."""
    models = {f"round {line.round}": line.trained for line in lines}
    parts = {
        "Guarantees (whole labels: in the report)": [
            f"{name}: {str(guarantee).partition(chr(10))[0]}" for name, guarantee in labelled(lines)
        ],
        "The attacked model": [f"{name}: {trained}" for name, trained in models.items() if trained],
    }
    if any(headline.undefended is None for headline in headlines_of(lines)):
        parts["Not run"] = ["the same client without a defence, as the reference: add none to the defences"]
    return ["\n".join([f"{name}:", *(f"- {item}" for item in items)]) for name, items in parts.items() if items]


def scored(share: float, scores: Mapping[str, float], kind: Kind) -> str:
    """The recovered share and the first measure: `12%, 23.4 dB`."""
    return f"{_share(share)}, {_level(scores, kind.headline)}"


# --- formats ---------------------------------------------------------------------------------------------------------


def text_of(rows: Grid) -> str:
    """Columns as wide as their widest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _markdown_of(rows: Grid) -> str:
    rows = [[entry.replace("|", "\\|") for entry in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}


def latex(text: str) -> str:
    """Text escaped for LaTeX. A bracket too: after the end of a row it would be read as the row's height."""
    return "".join(LATEX.get(mark, mark) for mark in text)


def _latex_of(rows: Grid) -> str:
    """A tabular with the rules of booktabs."""
    head, *body = [" & ".join(map(latex, row)) + r" \\" for row in rows]
    begin = rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}"
    lines = [r"% \usepackage{booktabs}", begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}"])


DRAWN: dict[str, tuple[Callable[[Grid], str], Callable[[str], str]]] = {
    "text": (text_of, str),
    "markdown": (_markdown_of, str),
    "latex": (_latex_of, latex),
}
"""By format: how to draw a table, and how to write a sentence beside it."""


def _tables(lines: Sequence[Summary], draw: Callable[[Grid], str], write: Callable[[str], str]) -> str:
    per_defence = overview(lines)
    parts = [draw(per_defence), write(about_overview(lines))] if per_defence else []
    return "\n\n".join([draw(entries(lines)), *parts, *map(write, notes(lines))])


def _csv(lines: Sequence[Summary]) -> str:
    return csv_of([_record(line) for line in lines])


def csv_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Plain numbers, one line each; NaN and None become empty entries."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({name: "" if value is None or value != value else value for name, value in record.items()})
    return text.getvalue()


def _record(line: Summary) -> dict[str, Any]:
    """Plain numbers."""
    names = ("attack", "defence", "form", "round", "examples", "targets", "seeds", "word")
    record: dict[str, Any] = {name: getattr(line, name) for name in names}
    for name, rate in {"recovered": line.recovered, "excess": line.excess, **line.rates}.items():
        record |= {name: rate.value, f"{name} low": rate.low, f"{name} high": rate.high}
    for kind in ("means", "medians", "worst", "baseline"):
        record |= {f"{name} {kind.removesuffix('s')}": value for name, value in getattr(line, kind).items()}
    record |= {name: getattr(line, name) for name in ("chance", "match", "converged", "diverged", "seconds")}
    if line.certified is not None:
        record |= {"certificates": line.certified.count, "determined": line.certified.determined}
    if line.guarantee is not None:
        record |= {"epsilon": line.guarantee.epsilon, "delta": line.guarantee.delta}
        record |= {"guarantee": str(line.guarantee).replace("\n", "; ")}
    if line.trained is not None:
        record |= {"test accuracy": line.trained.test_accuracy, "test loss": line.trained.test_loss}
    return record


FORMATS: dict[str, Callable[[Sequence[Summary]], str]] = {
    **{name: partial(_tables, draw=draw, write=write) for name, (draw, write) in DRAWN.items()},
    "csv": _csv,
}


# --- JUnit -----------------------------------------------------------------------------------------------------------

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 cannot write


def junit_of(result: AuditResult, fail_above: float | None = None, reason: str = "") -> str:
    """`fail_above`: the stated share; `reason`: why the run as a whole crosses it, empty if it does not."""
    cases = [_cell_case(result, key, fail_above) for key in dict.fromkeys(result.settings["plan"]["cells"])]
    cases.append(_run_case(result, reason))
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


def _cell_case(result: AuditResult, key: str, fail_above: float | None) -> ElementTree.Element:
    rows = [row for row in result.rows if row["cell"] == key]
    if not rows:
        return _case(f"cell {key}", "not run", 0.0, "skipped", "The cell was not run: run the same command again.")
    first, seconds = rows[0], sum(row.get("seconds") or 0.0 for row in rows)
    form = "" if first["defence"] == "none" else f" ({first['form']})"
    where = f"B = {first['examples']}, round {first['round']}, seed {first['seed']}"
    name = f"{'positive control: ' * first['control']}{first['attack']} against {first['defence']}{form}, {where}"
    group = f"gradleak.{first['defence']}"
    if first["status"] == "failed":
        return _case(name, group, seconds, "error", first["error"], without_values(str(first.get("traceback") or "")))
    [line] = summaries_of({**row, "control": False} for row in rows)
    outcome = _outcome(result, first, line, fail_above)
    return _case(name, group, seconds, *outcome, out=f"{line.word}: {line.ruling.because}")


def _outcome(result: AuditResult, row: Row, line: Summary, fail_above: float | None) -> tuple[str, str]:
    """How a cell that ran ended: the word of JUnit, empty if it passed, and why."""
    if row["control"]:
        control = result.positive_control
        return ("", "") if control.passed else ("skipped" if fail_above is None else "failure", control.text)
    if fail_above is not None and line.recovered.value > fail_above:
        return "failure", f"Recovered {line.recovered}, which is above the stated {fail_above:.0%}."
    if line.word == INCONCLUSIVE:
        return "skipped", f"Inconclusive: {line.ruling.because}."
    return "", ""


def _run_case(result: AuditResult, reason: str) -> ElementTree.Element:
    verdict = result.verdict
    unsure = verdict.word in (VOID, INCONCLUSIVE)
    kind, why = ("failure", reason) if reason else ("skipped", f"The run is {verdict.word}.") if unsure else ("", "")
    return _case("the run as a whole", "gradleak.verdict", 0.0, kind, why, out=str(verdict))


def _case(
    name: str, group: str, seconds: float, kind: str = "", message: str = "", text: str = "", out: str = ""
) -> ElementTree.Element:
    names = {"name": _as_xml(name), "classname": _as_xml(group), "time": f"{seconds:.3f}"}
    case = ElementTree.Element("testcase", names)
    if kind:
        ElementTree.SubElement(case, kind, {"message": _as_xml(message)}).text = _as_xml(text) or None
    if out:
        ElementTree.SubElement(case, "system-out").text = _as_xml(out)
    return case


def _as_xml(text: str) -> str:
    return _NOT_XML.sub("?", text)


# --- notebooks -------------------------------------------------------------------------------------------------------

MOST_LINES = 30  # the strongest are shown
COLOURS = {LEAKS: "#c62828", PART: "#d98200", NOT_SHOWN: "#2e7d32", INCONCLUSIVE: "#757575", VOID: "#757575"}
STYLE = """
.gradleak {font: 0.9em/1.45 system-ui, sans-serif; max-width: 72em}
.gradleak table {border-collapse: collapse; margin: 0.6em 0; color: inherit; font-size: inherit}
.gradleak th, .gradleak td {text-align: left; padding: 0.2em 0.7em; border-bottom: 1px solid #8884; background: none}
.gradleak td.n {text-align: right; font-variant-numeric: tabular-nums}
.gradleak .w {border-left: 0.5em solid; padding-left: 0.5em; font-weight: 600}
.gradleak .h {background: repeating-linear-gradient(45deg, #8883 0 4px, #0000 4px 8px)}
.gradleak p {margin: 0.4em 0}
"""


NOTEBOOK: Columns = {
    "attack": lambda line: line.attack,
    "defence": lambda line: line.defence if line.defence == "none" else f"{line.defence} ({line.form})",
    "round": lambda line: str(line.round),
    "B": lambda line: str(line.examples),
    "targets": lambda line: str(line.targets),
    "recovered [95 %]": lambda line: str(line.recovered) if line.targets else "-",
}
WORDS = ("attack", "defence", "recovered [95 %]")  # columns that are no numbers


def _notebook_columns(kind: Kind) -> Columns:
    measure = kind.headline

    def mean(line: Summary) -> str:
        value = line.means.get(measure.name, NAN)
        return measure.format(value if math.isfinite(value) else None)

    return {**NOTEBOOK, measure.label: mean}


def notebook_of(result: AuditResult) -> str:
    """What a notebook shows of a result: the verdict, a compact table and the assumptions, as one piece of HTML."""
    verdict, lines = result.verdict, result.summaries
    columns = _notebook_columns(_kind(lines))
    ordered = sorted(lines, key=lambda line: line.strength, reverse=True) if len(lines) > MOST_LINES else lines
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in (*columns, "verdict"))
    counts = result.positive_control.passed
    body = "".join(_notebook_row(line, columns, line.word if counts else VOID) for line in ordered[:MOST_LINES])
    paragraphs = "".join(f"<p>{escape(part)}</p>" for part in verdict.paragraph.splitlines())
    more = len(lines) - MOST_LINES
    left_out = f"<p>{more} weaker lines are left out: result.table() has all.</p>" if more > 0 else ""
    known = "".join(f"<li>{escape(str(entry))}</li>" for entry in result.ledger)
    return (
        f'<div class="gradleak"><style>{STYLE}</style>{_coloured(verdict.word, "p")}{paragraphs}'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{left_out}"
        f"<details><summary>What the attacker was assumed to know</summary><ul>{known}</ul></details></div>"
    )


def _notebook_row(line: Summary, columns: Columns, word: str) -> str:
    """`word`: that of the line, or void if the control failed: then no line counts."""
    cells = "".join(
        f"<td{'' if name in WORDS else ' class=n'}>{escape(show(line))}</td>" for name, show in columns.items()
    )
    failed = line.errors and not line.targets
    text = _coloured(word, "span", f"failed: {line.errors[0]}" if failed else word)
    return f"<tr>{cells}<td{'' if line.optimised and word != VOID else ' class=h'}>{text}</td></tr>"


def _coloured(word: str, tag: str, text: str = "") -> str:
    """A word with its colour beside it: the colour says nothing that the word does not."""
    return f'<{tag} class="w" style="border-color: {COLOURS[word]}">{escape(text or word)}</{tag}>'
