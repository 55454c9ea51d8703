"""The verdict, in words that can be defended: `rule_of` says how they are reached.

Shares have 95 % intervals over targets (intervals.py). What the same attack reaches on an unrelated update is
subtracted. One attack against one defence has the word of its line (ruling.py), a defence that of its strongest line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from gradleak.audit.intervals import NAN
from gradleak.audit.rows import FORMS
from gradleak.audit.ruling import INCONCLUSIVE, LEAKS, NOT_SHOWN, PART, VOID, WORDS
from gradleak.audit.summary import Summary
from gradleak.core.files import Row, finite
from gradleak.scenario.forms import DEFENDED, AttackerForm
from gradleak.scenario.guarantee import Guarantee
from gradleak.scenario.kinds import Image, Kind, Measure

TRIAL = "Quick run: shows that everything runs, nothing else."
_RULE = """\
{a} {one} is recovered when {rule} and it is re-identified at rank 1 among other real {many}.
Shares have 95 % intervals over targets (intervals.py): Jeffreys' or, if all targets agree, the exact binomial ones
(Clopper and Pearson). What the same attack reaches on an unrelated update is subtracted. One attack against one defence

leaks                 when at least half of the {many} are recovered, with the interval of the excess above zero;
leaks in part         when any {one} is recovered, or re-identification at rank 1 exceeds both chance and the
                      unrelated update's, by their intervals;
is not shown to leak  when neither holds although the attack converged on at least 80 % of the targets;
is inconclusive       when neither holds and it diverged, did not converge, failed or was not run.

A defence has the word of its strongest line (by word, then recovered share, then {label}), whatever that attacker knew.
"Not shown to leak" requires that every attack converged in its most informed form. The headline is the worst word of a
defence, or of the undefended client if no defence was audited. A run whose positive control (undefended, one example,
the first attack) stays below a median {level} is void."""


def rule_of(kind: Kind) -> str:
    """How the words of a run are reached, for private data of this kind."""
    measure, (one, many) = kind.control_measure, kind.noun
    level = _reached(measure, needed_of(kind) + (f" {measure.unit}" if measure.unit else ""))
    a = "An" if one[0] in "aeiou" else "A"
    return _RULE.format(a=a, one=one, many=many, rule=kind.rule, label=kind.headline.label, level=level)


def needed_of(kind: Kind) -> str:
    """What the positive control must reach, without its unit: 18, or 90%."""
    return f"{kind.control:.0%}" if kind.control_measure.percent else f"{kind.control:g}"


def _reached(measure: Measure, level: str) -> str:
    """After "a median": PSNR of 18 dB, or of 90% columns right."""
    return f"of {level} {measure.label}" if measure.percent else f"{measure.label} of {level}"


RULE = rule_of(Image())


@dataclass(frozen=True)
class Verdict:
    """`word`: leaks, leaks in part, not shown to leak, inconclusive or void; `rule` says how words are reached.

    `because`: the rule that produced this one, with its figures.
    """

    word: str
    paragraph: str
    rule: str = RULE
    because: str = ""

    def __str__(self) -> str:
        return f"{self.word.upper()}. {self.paragraph}"


@dataclass(frozen=True)
class Control:
    """The positive control. If it fails, the run shows nothing."""

    passed: bool
    value: float  # of the kind's control measure, median over its targets; NaN if there are none
    text: str
    cell: str
    kind: Kind = Image()

    @property
    def level(self) -> str:
        """What it reached, and what it needed: 31.0 dB; 18 are needed."""
        measure = self.kind.control_measure
        unit = f" {measure.unit}" if measure.unit else ""
        return f"{measure.plain(self.value)}{unit}; {needed_of(self.kind)} are needed"


def control_of(rows: Sequence[Row], cell: str, kind: Kind) -> Control:
    """The positive control of a run, from the rows of its cell."""
    measure = kind.control_measure
    rows = [row for row in rows if row["cell"] == cell]
    scores = [row["scores"][measure.name] for row in rows if row["status"] == "done"]
    values = [value for each in scores for value in each if value is not None]
    middle = median(values) if values else NAN
    one = not rows or rows[0]["examples"] == 1
    clients = "one undefended example" if one else f"{rows[0]['examples']} undefended examples"
    setting = f"{rows[0]['attack'] if rows else 'the first attack'} on updates of {clients}"
    level = _reached(measure, measure.format(middle))
    reached = f"{setting} reaches a median {level}, {needed_of(kind)} are needed"
    if values and measure.sign * middle >= measure.sign * kind.control:
        return Control(True, middle, f"Positive control passed: {reached}.", cell, kind)
    if values:
        fix = "Give the first attack more steps or restarts, or put one first that works on this model."
        return Control(False, middle, f"Positive control failed: {reached}. The run shows nothing. {fix}", cell, kind)
    error = next((row["error"] for row in rows if row["status"] == "failed"), "it was not run")
    return Control(False, middle, f"Positive control failed: {setting} gave no result ({error}).", cell, kind)


def word_on(lines: Sequence[Summary], missing: int = 0) -> str:
    """The word for one defence from its lines. `missing`: how many of its cells were not run."""
    if lines and (leak := strongest_of(lines).word) in (LEAKS, PART):
        return leak
    optimised = lines and all(line.optimised for line in _most_informed(lines))
    return NOT_SHOWN if optimised and not missing else INCONCLUSIVE


def strongest_of(lines: Iterable[Summary]) -> Summary:
    """The line that shows most, whatever its attacker knew: an attacker may ignore what it knows."""
    return max(lines, key=lambda line: line.strength)


def verdict_on(lines: Sequence[Summary], planned: int, kind: Kind) -> Verdict:
    """The verdict on one defence from its lines. `planned`: how many cells the plan has for it."""
    missing, rule = planned - sum(len(line.cells) for line in lines), rule_of(kind)
    word = word_on(lines, missing)
    if word in (LEAKS, PART):
        return Verdict(word, _leak(strongest_of(lines)), rule, str(strongest_of(lines).ruling))
    if word == NOT_SHOWN:
        return Verdict(word, _nothing(strongest_of(lines), lines), rule, str(strongest_of(lines).ruling))
    reasons = [
        f"{line} failed ({line.errors[0]})"
        if line.errors
        else f"{line} converged on {line.converged:.0%} of its targets"
        for line in _most_informed(lines)
        if not line.optimised
    ]
    if missing:
        reasons.append(f"{missing} of {planned} cells were not run")
    text = f"No {kind.noun[0]} was recovered, but that shows nothing: {'; '.join(reasons)}."
    because = f"{word}: no attack worked in every form that was planned ({'; '.join(reasons)})"
    return Verdict(word, f"{text} More steps or restarts may change it.", rule, because)


def overall(verdicts: Mapping[str, Verdict], control: Control) -> Verdict:
    """Void if the control failed, else the worst word of a defence or, without one, of the undefended client."""
    rule = rule_of(control.kind)
    if not control.passed:
        return Verdict(VOID, control.text, rule, f"{VOID}: the positive control failed, so nothing here shows anything")
    defended = [verdict for name, verdict in verdicts.items() if name != "none"] or list(verdicts.values())
    worst = min(defended, key=lambda verdict: WORDS.index(verdict.word))
    lines = [f"{'Undefended' if name == 'none' else name}: {v.word}. {v.paragraph}" for name, v in verdicts.items()]
    return Verdict(worst.word, "\n".join([*lines, control.text]), rule, worst.because)


def _most_informed(lines: Iterable[Summary]) -> list[Summary]:
    """The line whose attacker knew most, for every attack, round and batch size."""
    best: dict[tuple[object, ...], Summary] = {}
    for line in sorted(lines, key=lambda line: FORMS.index(line.form)):
        best[line.attack, line.round, line.examples] = line
    return list(best.values())


def _leak(line: Summary) -> str:
    total = line.targets * line.seeds * line.examples
    share, measure, (one, many) = line.recovered, line.kind.headline, line.kind.noun
    blind = f"{line.baseline['recovered']:.0%} from an unrelated update" if line.baseline else "no baseline was run"
    middle, high, best = (values.get(measure.name) for values in (line.medians, line.tail, line.worst))
    text = (
        f"{line} recovered {round(share.value * total)} of {total} {many} ({share.value:.0%}, 95 % interval "
        f"{share.low:.0%} to {share.high:.0%}; {blind}). Median {measure.stated(middle)}, 95th percentile "
        f"{measure.format(high)}, clearest {one} {measure.format(best)}.{_besides(line)}"
    )
    if line.paired is not None:
        text += f" {str(line.paired)[:1].upper()}{str(line.paired)[1:]}."
    if not share.value:
        rank = line.rates["rank1"].value
        text += (
            f" The reconstruction still picks out the right {one} in {rank:.0%} of cases (chance {line.chance:.1%})."
        )
    if "labels" in line.means:
        text += f" Labels: {line.means['labels']:.0%} right."
    if line.certified is not None and line.certified.determined:
        proved = f"{line.certified.determined} of {line.certified.count} updates"
        fixed = f"{proved} fix every {line.kind.entries}; no other {many} nearby give the same update"
        text += f" Proved, without the truth: {fixed}."
    return text + _guaranteed(line) + _sample(line)


def _nothing(nearest: Summary, lines: Sequence[Summary]) -> str:
    attacks = len({line.attack for line in lines})
    bound = max(line.recovered.high for line in lines)
    measure, (one, many) = nearest.kind.headline, nearest.kind.noun
    return (
        f"{attacks} {'attack' if attacks == 1 else 'attacks'} recovered no {one} of {nearest.targets} targets. The "
        f"nearest is {nearest}: mean {measure.stated(nearest.means[measure.name])}, clearest {one} "
        f"{measure.format(nearest.worst[measure.name])}.{_besides(nearest)} So few targets do not exclude "
        f"that {bound:.0%} of {many} can be recovered, and stronger attacks may exist.{_guaranteed(nearest)}"
        f"{_sample(nearest)}"
    )


def _guaranteed(line: Summary) -> str:
    """What the defence proves, where it proves an epsilon."""
    if line.guarantee is None or line.guarantee.epsilon is None:
        return ""
    return f" Guarantee: {str(line.guarantee).partition(chr(10))[0]}."


def _besides(line: Summary) -> str:
    """The measure of the positive control, where it is not the first one: the bag of a text whose order is unknown."""
    measure = line.kind.control_measure
    if measure is line.kind.headline:
        return ""
    return f" Mean {measure.stated(line.means.get(measure.name))}."


def _sample(line: Summary) -> str:
    return f" Small sample: {line.targets} {'target' if line.targets == 1 else 'targets'}." if line.small else ""


def card_of(line: Summary, control: Control) -> dict[str, Any]:
    """The report card of one attack against one defence: every figure and word of a line, as JSON."""
    ruling = line.ruling
    word, text = (ruling.word, ruling.text) if control.passed else (VOID, "the positive control failed")
    certified = line.certified
    return finite(
        {
            **{name: getattr(line, name) for name in ("attack", "defence", "form", "round", "examples")},
            "word": word,
            "rule": ruling.rule if control.passed else "control failed",
            "because": f"{text} ({ruling.because})" if control.passed else control.text,
            "targets": line.targets,
            "seeds": line.seeds,
            "recovered": line.recovered.record(),
            "excess": line.excess.record(),
            "rates": {name: rate.record() for name, rate in line.rates.items()},
            "re-identification": {**line.ranks, "chance of rank 1": line.chance, "excess": line.identified.record()},
            "paired": line.paired and line.paired.record(),
            "means": line.means,
            "medians": line.medians,
            "95th percentile": line.tail,
            "worst case": line.worst,
            "labels": line.means.get("labels"),
            "no gradient": line.baseline,
            "identifiability": certified and certified.record(),
            "control": {"passed": control.passed, control.kind.control_measure.name: control.value},
            "converged": line.converged,
            "diverged": line.diverged,
            "errors": list(line.errors),
            "utility": line.trained and asdict(line.trained),
            "guarantee": line.guarantee and str(line.guarantee),
            "epsilon": line.guarantee and line.guarantee.epsilon,
            "seconds": line.seconds,
        }
    )


# --- one defence: its attackers, the undefended reference, what it proves --------------------------------------------


@dataclass(frozen=True)
class Headline:
    """The lines of one defence at one round and batch size. `undefended`: the strongest line without a defence."""

    defence: str
    round: int
    examples: int
    lines: tuple[Summary, ...]
    undefended: Summary | None = None

    @cached_property
    def forms(self) -> dict[str, Summary]:
        """The strongest attack of each attacker, from the least to the most informed."""
        by_form = {form: [line for line in self.lines if line.form == form] for form in FORMS}
        return {form: strongest_of(lines) for form, lines in by_form.items() if lines}

    @cached_property
    def strongest(self) -> Summary:
        return strongest_of(self.lines)

    def placed(self, varied: Collection[str]) -> str:
        """Its name, followed by the round or batch size if that is `varied` between headlines."""
        where = {"round": f", round {self.round}", "examples": f", B = {self.examples}"}
        return self.defence + "".join(text for name, text in where.items() if name in varied)

    @property
    def word(self) -> str:
        """The verdict over the cells that were run."""
        return word_on(self.lines)

    @property
    def guarantee(self) -> Guarantee | None:
        """That of the strongest line: an attacker who saw a client more often faces a weaker guarantee."""
        first = self.strongest.guarantee
        return first or next((line.guarantee for line in self.lines if line.guarantee is not None), None)


def attackers_of(headlines: Iterable[Headline]) -> dict[str, str]:
    """Columns of a table of defences, form to label; "averaged" only if some defence was attacked so."""
    tried = {form for headline in headlines for form in headline.forms}
    return {form.value: form.label for form in DEFENDED if form is not AttackerForm.AVERAGED or form in tried}


def headlines_of(lines: Iterable[Summary]) -> list[Headline]:
    """One for each defence, round and batch size, in the order of the lines; none for the undefended client."""
    groups: dict[tuple[str, int, int], list[Summary]] = {}
    for line in lines:
        groups.setdefault((line.defence, line.round, line.examples), []).append(line)
    return [
        Headline(
            defence,
            number,
            examples,
            tuple(group),
            strongest_of(plain) if (plain := groups.get(("none", number, examples))) else None,
        )
        for (defence, number, examples), group in groups.items()
        if defence != "none"
    ]


def labelled(lines: Iterable[Summary]) -> list[tuple[str, Guarantee]]:
    """The guarantees of every defence, each once; a defence with several is named with round and batch size."""
    by_defence: dict[str, dict[Guarantee, Headline]] = {}
    for headline in headlines_of(lines):
        if headline.guarantee is not None:
            by_defence.setdefault(headline.defence, {}).setdefault(headline.guarantee, headline)
    return [
        (headline.placed(("round", "examples") if len(guarantees) > 1 else ()), guarantee)
        for guarantees in by_defence.values()
        for guarantee, headline in guarantees.items()
    ]
