"""What an audit says of one defence: A0, A1 and A2, the undefended reference, the verdict and what is proved."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from gradleak.audit.rows import FORMS
from gradleak.audit.summary import Summary
from gradleak.audit.verdict import strongest_of, word_on
from gradleak.scenario.guarantee import Guarantee

ATTACKERS = {"naive": "A0 naive", "masked": "A1 masked", "adaptive": "A2 adaptive", "averaged": "A2, rounds averaged"}
"""By what they know of the defence: the columns in which a defence is shown."""


@dataclass(frozen=True)
class Headline:
    """One defence at one round and batch size, by its lines; `undefended` is the strongest without any defence."""

    defence: str
    round: int
    examples: int
    lines: tuple[Summary, ...]
    undefended: Summary | None = None

    @cached_property
    def forms(self) -> dict[str, Summary]:
        """The strongest attack of each attacker, from the least to the most informed."""
        found = {form: [line for line in self.lines if line.form == form] for form in FORMS}
        return {form: strongest_of(lines) for form, lines in found.items() if lines}

    @property
    def strongest(self) -> Summary:
        return strongest_of(self.lines)

    def placed(self, varied: Collection[str]) -> str:
        """Its name, with what tells it apart from others of that name."""
        where = {"round": f", round {self.round}", "examples": f", B = {self.examples}"}
        return self.defence + "".join(told for name, told in where.items() if name in varied)

    @property
    def word(self) -> str:
        """The verdict over what was run."""
        return word_on(self.lines)

    @property
    def guarantee(self) -> Guarantee | None:
        """That of the strongest line: who has seen a client more often faces a weaker one."""
        own = self.strongest.guarantee
        return own or next((line.guarantee for line in self.lines if line.guarantee is not None), None)


def attackers_of(found: Iterable[Headline]) -> dict[str, str]:
    """The columns: the three that every defence faces, and who saw several rounds where one was tried."""
    tried = {form for held in found for form in held.forms}
    return {form: name for form, name in ATTACKERS.items() if form != "averaged" or form in tried}


def headlines_of(lines: Iterable[Summary]) -> list[Headline]:
    """One for each defence, round and batch size, in the order of the lines; the undefended client is none."""
    groups: dict[tuple[str, int, int], list[Summary]] = {}
    for line in lines:
        groups.setdefault((line.defence, line.round, line.examples), []).append(line)
    return [
        Headline(
            defence,
            number,
            examples,
            tuple(held),
            strongest_of(plain) if (plain := groups.get(("none", number, examples))) else None,
        )
        for (defence, number, examples), held in groups.items()
        if defence != "none"
    ]


def labelled(lines: Iterable[Summary]) -> list[tuple[str, Guarantee]]:
    """What every defence proves, each label once; one of several has its round and batch size."""
    found: dict[str, dict[Guarantee, Headline]] = {}
    for held in headlines_of(lines):
        if held.guarantee is not None:
            found.setdefault(held.defence, {}).setdefault(held.guarantee, held)
    return [
        (held.placed(("round", "examples") if len(labels) > 1 else ()), label)
        for labels in found.values()
        for label, held in labels.items()
    ]
