"""The verdict, in words that can be defended.

Rule. An image is recovered when SSIM > 0.5, PSNR > 18 dB and it is re-identified at rank 1 among other real images.
Shares have 95 % intervals over targets (intervals.py): Jeffreys' or, where all targets agree, the exact binomial ones
(Clopper and Pearson). What the same attack reaches on an unrelated update is taken off. One attack against one defence

leaks                 when at least half of the images are recovered, with the interval of the excess above zero;
leaks in part         when any image is recovered, or re-identification at rank 1 exceeds both chance and the
                      unrelated update's, by their intervals;
is not shown to leak  when neither holds although the attack converged on at least 80 % of the targets;
is inconclusive       when neither holds and it diverged, did not converge, failed or was not run.

A defence has the word of its strongest line (by word, then recovered share, then PSNR), whatever that attacker knew;
"not shown to leak" asks that every attack converged in its most informed form. The headline is the worst word of a
defence, or of the undefended client where no defence was audited. A run whose positive control (undefended, one
example, the first attack) stays below a median PSNR of 18 dB is void.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradleak.audit.rows import FORMS
from gradleak.audit.summary import INCONCLUSIVE, LEAKS, NAN, NOT_SHOWN, PART, VOID, WORDS, Summary
from gradleak.core.files import Row, finite

CONTROL_PSNR = 18.0
TRIAL = "Quick run: shows that everything runs, nothing else."
RULE = (__doc__ or "").partition("Rule. ")[2].strip()


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
    psnr: float  # median over its targets; NaN where there are none
    text: str
    cell: str


def control_of(rows: Sequence[Row], cell: str) -> Control:
    """What the rows of the control's cell say."""
    own = [row for row in rows if row["cell"] == cell]
    values = [value for row in own if row["status"] == "done" for value in row["scores"]["psnr"] if value is not None]
    middle = median(values) if values else NAN
    setting = f"{own[0]['attack'] if own else 'the first attack'} on updates of one undefended example"
    reached = f"{setting} reaches a median PSNR of {middle:.1f} dB, {CONTROL_PSNR:.0f} are needed"
    if middle >= CONTROL_PSNR:
        return Control(True, middle, f"Positive control passed: {reached}.", cell)
    if values:
        fix = "Give the first attack more steps or restarts, or put one first that works on this model."
        return Control(False, middle, f"Positive control failed: {reached}. The run shows nothing. {fix}", cell)
    error = next((row["error"] for row in own if row["status"] == "failed"), "it was not run")
    return Control(False, middle, f"Positive control failed: {setting} gave no result ({error}).", cell)


def word_on(lines: Sequence[Summary], missing: int = 0) -> str:
    """The word for one defence from its lines; so many of its cells were not run."""
    if lines and (leak := strongest_of(lines).word) in (LEAKS, PART):
        return leak
    optimised = lines and all(line.optimised for line in _most_informed(lines))
    return NOT_SHOWN if optimised and not missing else INCONCLUSIVE


def strongest_of(lines: Iterable[Summary]) -> Summary:
    """Whatever that attacker knew: an attacker is free to ignore what it knows."""
    return max(lines, key=lambda line: line.strength)


def verdict_on(lines: Sequence[Summary], planned: int) -> Verdict:
    """The verdict on one defence from its lines; `planned` cells were to be run for it."""
    missing = planned - sum(len(line.cells) for line in lines)
    word = word_on(lines, missing)
    if word in (LEAKS, PART):
        return Verdict(word, _leak(strongest_of(lines)), because=str(strongest_of(lines).ruling))
    if word == NOT_SHOWN:
        return Verdict(word, _nothing(strongest_of(lines), lines), because=str(strongest_of(lines).ruling))
    reasons = [
        f"{line} failed ({line.errors[0]})"
        if line.errors
        else f"{line} converged on {line.converged:.0%} of its targets"
        for line in _most_informed(lines)
        if not line.optimised
    ]
    if missing:
        reasons.append(f"{missing} of {planned} cells were not run")
    text = f"No image was recovered, but that shows nothing: {'; '.join(reasons)}."
    because = f"{word}: no attack worked in every form that was planned ({'; '.join(reasons)})"
    return Verdict(word, f"{text} More steps or restarts may change it.", because=because)


def overall(verdicts: Mapping[str, Verdict], control: Control) -> Verdict:
    """Void without a working control, else the worst word among the defended, or of the undefended; a line for each."""
    if not control.passed:
        return Verdict(
            VOID, control.text, because=f"{VOID}: the positive control failed, so nothing here shows anything"
        )
    defended = [verdict for name, verdict in verdicts.items() if name != "none"] or list(verdicts.values())
    worst = min(defended, key=lambda verdict: WORDS.index(verdict.word))
    told = [f"{'Undefended' if name == 'none' else name}: {v.word}. {v.paragraph}" for name, v in verdicts.items()]
    return Verdict(worst.word, "\n".join([*told, control.text]), because=worst.because)


def _most_informed(lines: Iterable[Summary]) -> list[Summary]:
    """For every attack, round and batch size, the line whose attacker knew most."""
    best: dict[tuple[object, ...], Summary] = {}
    for line in sorted(lines, key=lambda line: FORMS.index(line.form)):
        best[line.attack, line.round, line.examples] = line
    return list(best.values())


def _leak(line: Summary) -> str:
    total = line.targets * line.seeds * line.examples
    share = line.recovered
    blind = f"{line.baseline['recovered']:.0%} from an unrelated update" if line.baseline else "no baseline was run"
    text = (
        f"{line} recovered {round(share.value * total)} of {total} images ({share.value:.0%}, 95 % interval "
        f"{share.low:.0%} to {share.high:.0%}; {blind}). PSNR {line.medians['psnr']:.1f} dB in the median, "
        f"{line.tail.get('psnr', NAN):.1f} dB for one image in twenty, {line.worst['psnr']:.1f} dB for the clearest."
    )
    if line.paired is not None:
        text += f" {str(line.paired)[:1].upper()}{str(line.paired)[1:]}."
    if not share.value:
        rank = line.rates["rank1"].value
        text += f" What it shows still picks out the right image in {rank:.0%} of cases (chance {line.chance:.1%})."
    if "labels" in line.means:
        text += f" Labels: {line.means['labels']:.0%} right."
    if line.certified is not None and line.certified.determined:
        proved = f"{line.certified.determined} of {line.certified.count} updates"
        text += f" Proved, without the truth: {proved} fix every pixel; no other images near those found give the same."
    return text + _sample(line)


def _nothing(nearest: Summary, lines: Sequence[Summary]) -> str:
    attacks = len({line.attack for line in lines})
    bound = max(line.recovered.high for line in lines)
    return (
        f"{attacks} {'attack' if attacks == 1 else 'attacks'} recovered no image of {nearest.targets} targets; nearest "
        f"came {nearest} with a PSNR of {nearest.means['psnr']:.1f} dB (mean; {nearest.worst['psnr']:.1f} at most). "
        f"So few targets do not exclude that {bound:.0%} of images can be recovered, and stronger attacks may exist."
        f"{_sample(nearest)}"
    )


def _sample(line: Summary) -> str:
    return f" Small sample: {line.targets} {'target' if line.targets == 1 else 'targets'}." if line.small else ""


def card_of(line: Summary, control: Control) -> dict[str, Any]:
    """Everything that is said of a line, as JSON holds it: the report card of one attack against one defence."""
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
            "rates": {name: held.record() for name, held in line.rates.items()},
            "re-identification": {**line.ranks, "chance of rank 1": line.chance, "excess": line.identified.record()},
            "paired": line.paired and line.paired.record(),
            "means": line.means,
            "medians": line.medians,
            "95th percentile": line.tail,
            "worst case": line.worst,
            "labels": line.means.get("labels"),
            "no gradient": line.baseline,
            "identifiability": certified and {"text": str(certified), **asdict(certified)},
            "control": {"passed": control.passed, "psnr": control.psnr},
            "converged": line.converged,
            "diverged": line.diverged,
            "errors": list(line.errors),
            "utility": line.trained and asdict(line.trained),
            "guarantee": line.guarantee and str(line.guarantee),
            "epsilon": line.guarantee and line.guarantee.epsilon,
            "seconds": line.seconds,
        }
    )
