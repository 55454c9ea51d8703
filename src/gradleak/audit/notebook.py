"""What a notebook shows of a result: the verdict, a compact table, what was assumed. One piece of HTML with its style.

It holds no images and no scripts, everything that comes from a run is escaped, and colours are mixed with the page's
own, so that it reads on light and dark pages alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from gradleak.audit.ruling import INCONCLUSIVE, LEAKS, NOT_SHOWN, PART, VOID
from gradleak.audit.summary import Summary

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult

MOST = 30  # lines; the strongest are shown
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


def _mean(line: Summary) -> str:
    value = line.means.get("psnr", math.nan)
    return f"{value:.1f} dB" if math.isfinite(value) else "-"


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "attack": lambda line: line.attack,
    "defence": lambda line: line.defence if line.defence == "none" else f"{line.defence} ({line.form})",
    "round": lambda line: str(line.round),
    "B": lambda line: str(line.examples),
    "targets": lambda line: str(line.targets),
    "recovered [95 %]": lambda line: str(line.recovered) if line.targets else "-",
    "PSNR": _mean,
}
NUMBERS = ("round", "B", "targets", "PSNR")


def shown(result: AuditResult) -> str:
    """The whole piece."""
    verdict, lines = result.verdict, result.summaries
    ordered = sorted(lines, key=lambda line: line.strength, reverse=True) if len(lines) > MOST else lines
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in (*COLUMNS, "verdict"))
    counts = result.positive_control.passed
    body = "".join(_row(line, line.word if counts else VOID) for line in ordered[:MOST])
    paragraphs = "".join(f"<p>{escape(part)}</p>" for part in verdict.paragraph.splitlines())
    more = len(lines) - MOST
    left_out = f"<p>{more} weaker lines are left out: result.table() has all.</p>" if more > 0 else ""
    known = "".join(f"<li>{escape(str(entry))}</li>" for entry in result.ledger)
    return (
        f'<div class="gradleak"><style>{STYLE}</style>{_word(verdict.word, "p")}{paragraphs}'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{left_out}"
        f"<details><summary>What the attacker was assumed to know</summary><ul>{known}</ul></details></div>"
    )


def _row(line: Summary, word: str) -> str:
    """`word`: of the line or, where the control failed, void: then no line counts."""
    cells = "".join(
        f"<td{' class=n' if name in NUMBERS else ''}>{escape(show(line))}</td>" for name, show in COLUMNS.items()
    )
    failed = line.errors and not line.targets
    told = _word(word, "span", f"failed: {line.errors[0]}" if failed else word)
    return f"<tr>{cells}<td{'' if line.optimised and word != VOID else ' class=h'}>{told}</td></tr>"


def _word(word: str, tag: str, text: str = "") -> str:
    """A word with its colour beside it: the colour says nothing that the word does not."""
    return f'<{tag} class="w" style="border-color: {COLOURS[word]}">{escape(text or word)}</{tag}>'
