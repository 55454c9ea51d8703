"""The defences of a run: what each attacker reached, what is proved, and what the attacked model was good for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradleak.report.grid import Column, Line, Table, Value, number, percent, tone
from gradleak.scenario.guarantee import Guarantee, rounded_up

if TYPE_CHECKING:
    from gradleak.audit.result import Summary

UNKNOWN = "not recorded"  # by the version that made the run


@dataclass(frozen=True)
class Label:
    """What one defence proves: in a word, in a sentence, and entry by entry."""

    name: str
    word: str
    tone: str
    text: str
    entries: tuple[tuple[str, str], ...]


def defences(summaries: Sequence[Summary]) -> Table | None:
    """Each defence by its strongest attack: the reference, every attacker, chance, and what is proved."""
    from gradleak.audit.headline import attackers_of, headlines_of

    found = headlines_of(summaries)
    if not found:
        return None
    rows, attacking = [], attackers_of(found)
    several = len({(held.round, held.examples) for held in found}) > 1
    for held in found:
        best, blind = held.strongest, held.strongest.baseline
        where = f"round {held.round}, B = {held.examples}" if several else ""
        attackers = (_level(held.forms.get(form), best) for form in attacking)
        chance = Value(percent(blind.get("recovered")), note=f"{number(blind.get('psnr'))} dB") if blind else Value("-")
        verdict = held.word
        cells = (Value(held.defence, note=where), Value(verdict, tone(verdict)), _level(held.undefended), *attackers)
        rows.append(Line((*cells, chance, Value(_briefly(held.guarantee))), hatched=verdict == "inconclusive"))
    words = ("defence", "verdict", "undefended", *attacking.values(), "no gradient", "formal guarantee")
    columns = tuple(Column(name, name not in ("defence", "verdict", "formal guarantee")) for name in words)
    caption = "Recovered, and the mean PSNR, by the strongest attack of each attacker. The headline is marked."
    return Table(caption, columns, tuple(rows))


def _level(line: Summary | None, best: Summary | None = None) -> Value:
    if line is None or not line.targets:
        return Value("-")
    name = line.attack.partition(":")[0]
    marked = "void" if line is best else ""
    return Value(percent(line.recovered.value), marked, f"{number(line.means.get('psnr'))} dB, {name}")


def _briefly(proved: Guarantee | None) -> str:
    return UNKNOWN if proved is None else "none" if proved.epsilon is None else _word(proved)


def labels(summaries: Sequence[Summary]) -> Iterator[Label]:
    """What every defence proves, each label once."""
    from gradleak.audit.headline import labelled

    for name, proved in labelled(summaries):
        yield Label(name, _word(proved), _tone(proved), str(proved).partition("\n")[0], tuple(_entries(proved)))


def _word(proved: Guarantee) -> str:
    if proved.epsilon is None:
        return "no formal guarantee"
    who = ", not against the server" if proved.model == "central" else ""
    return f"epsilon {rounded_up(proved.epsilon, 3):.3g} at delta {proved.delta:.1g}{who}"


def _tone(proved: Guarantee) -> str:
    """Only what holds against the server, and says something, is good."""
    if proved.epsilon is None:
        return "void"
    return "good" if proved.model == "local" and not proved.vacuous else "warn"


def _entries(proved: Guarantee) -> Iterator[tuple[str, str]]:
    if proved.epsilon is None:
        return
    yield "protects", f"one {proved.unit}"
    yield "holds against", proved.covers
    if proved.model == "central":
        yield "does not hold against", "the aggregating server, which sees every upload before the noise is added"
    yield "who adds the noise", proved.model
    yield "neighbours", proved.neighbours
    yield "accountant", f"{proved.accountant}, {proved.releases} release{'s' * (proved.releases != 1)}"
    yield "sampling", proved.sampling
    for caveat in proved.caveats:
        yield "provided that", caveat
    if proved.reconstruction is not None:
        prior, bound = proved.reconstruction
        yield (
            "reconstruction, in theory",
            f"a guess right with probability {prior:.1g} becomes one right with at most {rounded_up(bound, 2):.2g} "
            "(Balle et al. 2022)",
        )


def utility(summaries: Sequence[Summary]) -> Table | None:
    """Test accuracy and loss of the attacked models, round by round; None where no training was attacked."""
    found = {line.round: line.trained for line in summaries if line.trained is not None}
    rows = [
        Line(
            (
                Value(str(round)),
                Value("-" if held.test_accuracy is None else f"{held.test_accuracy:.1%}"),
                Value(number(held.test_loss, 4)),
                Value("none" if held.defence == "none" else held.defence),
            )
        )
        for round, held in sorted(found.items())
    ]
    if not rows:
        return None
    columns = (Column("round"), Column("test accuracy"), Column("test loss"), Column("trained with the defence", False))
    return Table("As the training measured them; - where it did not.", columns, tuple(rows))
