"""The threat model in one sentence, and the ledger of what the attacker was granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradleak.report.grid import Column, Line, Table, Value
from gradleak.scenario.forms import AttackerForm

if TYPE_CHECKING:
    from gradleak.audit.result import Assumption, Row

FORMS = {
    AttackerForm.NAIVE: "by attackers who ignore it",
    AttackerForm.MASKED: "by attackers who weigh out what it noised or dropped",
    AttackerForm.ADAPTIVE: "by attackers who know it and predict through it",
    AttackerForm.AVERAGED: "by attackers who know it and have seen the client several times on the same examples",
}


def threat(grid: Sequence[Row]) -> str:
    """Who sees what, what else is granted, and how defences are met."""
    sizes = sorted({int(row["examples"]) for row in grid if row.get("examples")})
    levels = sorted({str(row["knows"]) for row in grid if row.get("knows")})
    forms = [text for form, text in FORMS.items() if any(row.get("form") == form for row in grid)]
    sentence = (
        "a passive, honest-but-curious server sees the model it sent and one client's update, computed on "
        f"{' or '.join(map(str, sizes)) or '?'} private example{'' if sizes == [1] else 's'}, and changes nothing"
    )
    if levels:
        sentence += f"; it is also granted level {' or '.join(levels)} of Carletti et al. (USENIX Security 2025)"
    if forms:
        sentence += f"; each defence is attacked {', '.join(forms[:-1])}{' and ' * (len(forms) > 1)}{forms[-1]}"
    return f"{sentence}."


def ledger(assumptions: Sequence[Assumption]) -> Table:
    """Every capability, and whether the attacker had it: a reader's own case may differ."""
    rows = [Line((Value(each.capability), _granted(each.granted), Value(each.text))) for each in assumptions]
    columns = (Column("capability", False), Column("granted", False), Column("what that means here", False))
    return Table("Every assumption of this run, read off its settings.", columns, tuple(rows))


def _granted(value: Any) -> Value:
    return Value(value, "warn") if isinstance(value, str) else Value("yes", "warn") if value else Value("no", "void")
