"""Lines of a result as text, Markdown, LaTeX or CSV, and what they say of each defence."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from gradleak.audit.headline import Headline, attackers_of, headlines_of, labelled
from gradleak.audit.summary import NAN, Summary

Grid: TypeAlias = list[list[str]]
"""The head and every line of a table, as text."""


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


def _number(values: Mapping[str, float], key: str, digits: int = 1) -> str:
    return f"{values[key]:.{digits}f}" if math.isfinite(values.get(key, NAN)) else "-"


def _targets(line: Summary) -> str:
    return f"{line.targets}{f' x {line.seeds}' if line.seeds > 1 else ''}{' (small)' if line.small else ''}"


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "attack": lambda line: line.attack,
    "defence": lambda line: line.defence,
    "form": lambda line: line.form,
    "round": lambda line: str(line.round),
    "B": lambda line: str(line.examples),
    "targets": _targets,
    "recovered [95 %]": lambda line: str(line.recovered) if line.targets else "-",
    "PSNR mean/median/clearest": lambda line: "/".join(
        _number(values, "psnr") for values in (line.means, line.medians, line.worst)
    ),
    "SSIM": lambda line: _number(line.means, "ssim", 2),
    "labels": lambda line: _share(line.means.get("labels", NAN)),
    "rank 1 (chance)": lambda line: f"{_share(line.rates['rank1'].value)} ({line.chance:.1%})" if line.targets else "-",
    "baseline": lambda line: f"{_share(line.baseline.get('recovered', NAN))}, {_number(line.baseline, 'psnr')} dB",
    "match": lambda line: f"{line.match:.2g}" if line.targets else "-",
    "converged": lambda line: _share(line.converged),
    "seconds": lambda line: f"{line.seconds:.1f}",
    "verdict": lambda line: "failed" if line.errors and not line.targets else line.word,
}
"""Clearest is the best recovered image, a client's worst case. Baseline: the same attack on an unrelated update."""


def entries(lines: Sequence[Summary]) -> Grid:
    """A line of the table for each of these."""
    return [list(COLUMNS), *([show(line) for show in COLUMNS.values()] for line in lines)]


# --- what the lines say of each defence ------------------------------------------------------------------------------

OVERVIEW = (
    "Each defence by its strongest attack: recovered, mean PSNR. *: the headline, the strongest of these attackers; "
    "-: the same attacker as the one before, or not run. No gradient: the headline's attack on an unrelated update."
)


def overview(lines: Sequence[Summary]) -> Grid:
    """Per defence: the undefended reference, every attacker, the level of chance. Empty where there is no defence."""
    found = headlines_of(lines)
    attackers = attackers_of(found)
    head = ["defence", "undefended", *attackers.values(), "no gradient", "verdict"]
    return [head, *(_headline(line, _varied(found), attackers) for line in found)] if found else []


def guarantees(lines: Sequence[Summary]) -> list[str]:
    """What every defence proves, without the small print."""
    return [f"{name}: {str(proved).partition(chr(10))[0]}" for name, proved in labelled(lines)]


def trained(lines: Sequence[Summary]) -> list[str]:
    """How good the attacked model was at each round of its training."""
    return [f"{name}: {told}" for name, told in {f"round {line.round}": line.trained for line in lines}.items() if told]


def notes(lines: Sequence[Summary]) -> list[str]:
    """What stands below the tables, as paragraphs."""
    parts = {"Guarantees (whole labels: in the report)": guarantees(lines), "The attacked model": trained(lines)}
    if any(held.undefended is None for held in headlines_of(lines)):
        parts["Not run"] = ["the same client without a defence, as the reference: add none to the defences"]
    return ["\n".join([f"{name}:", *(f"- {line}" for line in told)]) for name, told in parts.items() if told]


def _varied(found: Sequence[Headline]) -> list[str]:
    return [name for name in ("round", "examples") if len({getattr(held, name) for held in found}) > 1]


def _headline(held: Headline, varied: Sequence[str], forms: Iterable[str]) -> list[str]:
    def level(line: Summary | None) -> str:
        star = " *" if line is held.strongest else ""
        return "-" if line is None or not line.targets else f"{scored(line.recovered.value, line.means)}{star}"

    blind = held.strongest.baseline
    chance = scored(blind.get("recovered", NAN), blind) if blind else "-"
    attackers = [level(held.forms.get(form)) for form in forms]
    return [held.placed(varied), level(held.undefended), *attackers, chance, held.word]


def scored(share: float, scores: Mapping[str, float]) -> str:
    """`12%, 23.4 dB`"""
    return f"{_share(share)}, {_number(scores, 'psnr')} dB"


# --- formats ---------------------------------------------------------------------------------------------------------


def text_of(rows: Grid) -> str:
    """Columns as wide as their widest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    told = ["  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([told[0], "  ".join("-" * width for width in widths), *told[1:]])


def _markdown_of(rows: Grid) -> str:
    rows = [[entry.replace("|", "\\|") for entry in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}


def latex(text: str) -> str:
    """Text as LaTeX prints it, whatever a name holds; a bracket after the end of a row would be read as its height."""
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
"""By format: how a table is drawn, and how a sentence beside it is written."""


def _whole(lines: Sequence[Summary], drawn: Callable[[Grid], str], said: Callable[[str], str]) -> str:
    per_defence = overview(lines)
    parts = [drawn(per_defence), said(OVERVIEW)] if per_defence else []
    return "\n\n".join([drawn(entries(lines)), *parts, *map(said, notes(lines))])


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
    **{name: partial(_whole, drawn=drawn, said=said) for name, (drawn, said) in DRAWN.items()},
    "csv": _csv,
}
