"""The defences of a run: what each attacker reached, what is proved, and how good the attacked model was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradleak.audit.verdict import attackers_of, headlines_of, labelled
from gradleak.report.curves import Chart
from gradleak.report.grid import Column, Line, Table, Value, level, number, percent, tone
from gradleak.report.rounds import scatter
from gradleak.report.words import Words
from gradleak.scenario.guarantee import Guarantee, rounded_up

if TYPE_CHECKING:
    from gradleak.audit.result import Summary

UNKNOWN = "not recorded"  # by the version that made the run


@dataclass(frozen=True)
class Label:
    """What one defence proves: a word, a sentence, and the entries of its label."""

    name: str
    word: str
    tone: str
    text: str
    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Defences:
    """The table of defences, and the label of each."""

    table: Table
    labels: tuple[Label, ...]


def defences(summaries: Sequence[Summary]) -> Defences | None:
    """Each defence by its strongest attack: the reference, every attacker, chance, and what is proved."""
    headlines = headlines_of(summaries)
    if not headlines:
        return None
    rows, attackers = [], attackers_of(headlines)
    several = len({(each.round, each.examples) for each in headlines}) > 1
    for headline in headlines:
        best, blind, word = headline.strongest, headline.strongest.baseline, headline.word
        measure = best.kind.headline
        where = f"round {headline.round}, B = {headline.examples}" if several else ""
        levels = (_level(headline.forms.get(form), best) for form in attackers)
        scored = level(measure, blind.get(measure.name))
        chance = Value(percent(blind.get("recovered")), note=scored) if blind else Value("-")
        cells = (Value(headline.defence, note=where), Value(word, tone(word)), _level(headline.undefended), *levels)
        rows.append(Line((*cells, chance, Value(_briefly(headline.guarantee))), hatched=word == "inconclusive"))
    names = ("defence", "verdict", "undefended", *attackers.values(), "no gradient", "formal guarantee")
    columns = tuple(Column(name, name not in ("defence", "verdict", "formal guarantee")) for name in names)
    mean = Words(summaries[0].kind).mean
    caption = f"Recovered share and {mean} of each attacker's strongest attack. The headline is marked."
    return Defences(Table(caption, columns, tuple(rows)), tuple(_labels(summaries)))


def _level(line: Summary | None, best: Summary | None = None) -> Value:
    if line is None or not line.targets:
        return Value("-")
    name = line.attack.partition(":")[0]
    marked, measure = "void" if line is best else "", line.kind.headline
    return Value(percent(line.recovered.value), marked, f"{level(measure, line.means.get(measure.name))}, {name}")


def _briefly(proved: Guarantee | None) -> str:
    return UNKNOWN if proved is None else "none" if proved.epsilon is None else _word(proved)


def _labels(summaries: Sequence[Summary]) -> Iterator[Label]:
    """What every defence proves, each label once."""
    for name, proved in labelled(summaries):
        yield Label(name, _word(proved), _tone(proved), str(proved).partition("\n")[0], tuple(_entries(proved)))


def _word(proved: Guarantee) -> str:
    if proved.epsilon is None:
        return "no formal guarantee"
    who = ", not against the server" if proved.model == "central" else ""
    return f"epsilon {rounded_up(proved.epsilon, 3):.3g} at delta {proved.delta:.1g}{who}"


def _tone(proved: Guarantee) -> str:
    """Good: a guarantee that holds against the server and says something."""
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


@dataclass(frozen=True)
class Utility:
    """How good the attacked models were, and a chart of leakage over accuracy if there are several points."""

    table: Table
    scatter: Chart | None


def utility(summaries: Sequence[Summary]) -> Utility | None:
    """Test accuracy and loss of the attacked models, round by round; None if no training was attacked."""
    models = {line.round: line.trained for line in summaries if line.trained is not None}
    rows = [
        Line(
            (
                Value(str(round)),
                Value("-" if model.test_accuracy is None else f"{model.test_accuracy:.1%}"),
                Value(number(model.test_loss, 4)),
                Value(model.defence),
            )
        )
        for round, model in sorted(models.items())
    ]
    if not rows:
        return None
    columns = (Column("round"), Column("test accuracy"), Column("test loss"), Column("trained with the defence", False))
    caption = "As the training measured them; - if it did not."
    return Utility(Table(caption, columns, tuple(rows)), scatter(summaries))
