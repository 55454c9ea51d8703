"""What the updates determine, in plain words: a line per attack and defence, and a sentence per target below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradleak.audit.result import Row, Summary

MOST = 32  # targets told one by one; the others are in rows.jsonl


@dataclass(frozen=True)
class Proof:
    """`tone` as of the verdicts: what is proved to leak is bad, what is left open says nothing."""

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
        found = line.certified
        word, tone = (
            ("proved", "bad") if found.determined else ("in part", "warn") if found.partly else ("open", "void")
        )
        against = "" if line.defence == "none" else f" against {line.defence}"
        yield Proof(
            f"{line}{against}, B = {line.examples}, round {line.round}",
            word,
            tone,
            f"{found}.",
            tuple(map(_told, rows[:MOST])),
            max(0, len(rows) - MOST),
        )


def _told(row: Row) -> str:
    held = row["certificate"]
    text = f"{row.get('observation', row['target'])}: {held['verdict']}. {held['reason']}"
    if held["tolerance"] is not None:
        text += f" Rank {held['rank']:,}, at a tolerance of {held['tolerance']:.0e} of the largest singular value."
    if held["floor"] is not None:
        text += f" Under the noise assumed, no attacker gets below a mean squared error of {held['floor']:.1e}."
    return text
