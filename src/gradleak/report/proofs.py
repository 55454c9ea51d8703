"""What the updates determine: a line per attack and defence, and a sentence per target below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradleak.audit.result import Row, Summary

MOST = 32  # targets with a sentence each; the others are in rows.jsonl


@dataclass(frozen=True)
class Proof:
    """`tone` as for verdicts: a proved leak is bad, an open question says nothing."""

    name: str
    word: str
    tone: str
    text: str
    targets: tuple[str, ...]
    left_out: int


def proofs(grid: Sequence[Row], summaries: Sequence[Summary]) -> Iterator[Proof]:
    """One per line of the table whose attack makes certificates."""
    for line in summaries:
        if line.certified is None:
            continue
        rows = [row for row in grid if row["cell"] in line.cells and row.get("certificate")]
        certified = line.certified
        word, tone = ("in part", "warn") if certified.partly else ("open", "void")
        if certified.determined:
            word, tone = "proved", "bad"
        against = "" if line.defence == "none" else f" against {line.defence}"
        yield Proof(
            f"{line}{against}, B = {line.examples}, round {line.round}",
            word,
            tone,
            f"{certified}.",
            tuple(map(_sentence, rows[:MOST])),
            max(0, len(rows) - MOST),
        )


def _sentence(row: Row) -> str:
    proof = row["certificate"]
    text = f"{row.get('observation', row['target'])}: {proof['verdict']}. {proof['reason']}"
    if proof["tolerance"] is not None:
        text += f" Rank {proof['rank']:,}, at a tolerance of {proof['tolerance']:.0e} of the largest singular value."
    if proof["floor"] is not None:
        text += f" Under the assumed noise, no attacker gets below a mean squared error of {proof['floor']:.1e}."
    return text
