"""What the attacker was assumed to know: the ledger of a run, and what each capability is worth (`ablation`).

Attacks of the literature often assume more than they say: private labels, batch statistics, the client's recipe (Huang
et al., NeurIPS 2021). Here settings and rows give one entry for every capability, granted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradleak.attack import require, supported
from gradleak.audit.cells import named_attacks
from gradleak.audit.comparison import difference
from gradleak.audit.intervals import NAN, Rate
from gradleak.audit.ruling import VOID
from gradleak.audit.summary import Summary
from gradleak.audit.verdict import strongest_of
from gradleak.core.files import Row
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.forms import AttackerForm
from gradleak.scenario.kinds import Column, Table
from gradleak.scenario.observation import MissingKnowledge

if TYPE_CHECKING:
    from gradleak.audit.grid import Audit
    from gradleak.audit.result import AuditResult
    from gradleak.core.listeners import Progress


@dataclass(frozen=True)
class Assumption:
    """`granted`: True, False, or "in part" if some lines have it and others do not."""

    capability: str
    granted: bool | str
    text: str

    @property
    def word(self) -> str:
        return self.granted if isinstance(self.granted, str) else "granted" if self.granted else "not granted"

    def __str__(self) -> str:
        return f"{self.capability}: {self.word}. {self.text}"

    def record(self) -> dict[str, Any]:
        return asdict(self)


def ledger_of(settings: Mapping[str, Any], rows: Sequence[Row]) -> tuple[Assumption, ...]:
    """Every assumption of a run."""
    given, withheld = set(settings.get("given", ())), set(settings.get("withheld", ()))
    fields = settings.get("fields", {})
    recipe = dict(settings.get("federation", {}).get("training", {}))
    forms = {row["form"] for row in rows if row["defence"] != "none"}
    steps = ", ".join(f"{name} {recipe[name]}" for name in ("lr", "steps", "epochs", "batch_size") if recipe.get(name))
    generator = "generator" in settings.get("fingerprint", {})
    return (
        Assumption("model and loss", True, "The server sent the model itself. Without them the level would be A."),
        Assumption("number of examples", True, "As the client reports it, for weighting the average."),
        Assumption("labels", "y" in given, _labels("y" in given, "y" in fields)),
        *_columns(fields.get("x", {})),
        *(
            Assumption(name, True, "A public input: the server knows it.")
            if entry.get("public")
            else Assumption(name, name in given, f"A field of the private batch: {_field(name, name in given)}")
            for name, entry in fields.items()
            if name not in ("x", "y")
        ),
        Assumption(
            "recipe",
            "recipe" not in withheld,
            f"The client's {steps or 'local training'}; its shuffle and random numbers are never granted."
            if "recipe" not in withheld
            else "Learning rate, steps and optimiser are unknown: attacks that need them cannot run.",
        ),
        Assumption(
            "batch statistics",
            "statistics" not in withheld,
            "Buffers in the upload, if the model has BatchNorm and no defence withholds them.",
        ),
        _defence(forms),
        Assumption(
            "generator",
            generator,
            "A prior of the attacker's own, trained on other data than the clients'."
            if generator
            else "No prior beyond smoothness.",
        ),
        Assumption("public data", False, "None: settings are fixed, not tuned on proxy clients."),
        Assumption("private data", False, "Only the scores use the truth; attack code cannot import it."),
    )


def _columns(entry: Mapping[str, Any]) -> Iterator[Assumption]:
    """What encoded rows tell of a table: names, categories and moments always, bounds where they are finite."""
    columns = entry.get("settings", {}).get("columns")
    if not columns:
        return
    yield Assumption(
        "columns", True, f"Names and categories of {len(columns)} columns: the input pipeline of the server holds them."
    )
    numbers = [column for column in columns if not column.get("categories")]
    moments = any((column.get("mean", 0.0), column.get("std", 1.0)) != (0.0, 1.0) for column in numbers)
    text = "Of every numeric column, from the whole table." if moments else "Numbers are known in standard units only."
    yield Assumption("means and deviations", moments, text)
    bounded = sum("low" in column and "high" in column for column in numbers)
    granted = "in part" if 0 < bounded < len(numbers) else bounded > 0
    text = f"Known for {bounded} of {len(numbers)} numeric columns." if bounded else "No number has known bounds."
    yield Assumption("bounds", granted, text)


def _labels(granted: bool, there: bool) -> str:
    if not there:
        return "The task has none."
    return "Attacks use the true ones." if granted else "Each attack infers them; their accuracy is scored apart."


def _field(name: str, granted: bool) -> str:
    return "attacks use its true value." if granted else f"{name} is guessed, read off or searched for."


def _defence(forms: Iterable[str]) -> Assumption:
    """What attackers know of a defence: several forms run side by side, and the strongest is the headline."""
    naive = AttackerForm.NAIVE.value
    if not set(forms):
        return Assumption("defence", False, "No defence was audited.")
    if set(forms) <= {naive, AttackerForm.UNDEFENDED.value}:
        return Assumption("defence", False, "Attackers ignore it: no evidence against one who knows it.")
    text = f"Attacked in the forms {', '.join(sorted(forms))}; the strongest is the headline."
    return Assumption("defence", True if naive not in forms else "in part", text)


# --- ablation: the same audit without one capability at a time -------------------------------------------------------


@dataclass(frozen=True)
class Capability:
    """Something an audit may grant its attacker: whether it does, and the same audit without it."""

    granted: Callable[[Audit], bool]
    taken: Callable[[Audit], Audit]


def _without_generator(audit: Audit) -> Audit:
    origin = {name: where for name, where in audit.origin.items() if name != "generator"}
    return replace(audit, generator=None, origin=origin)


def _columns_with(audit: Audit, **changes: Any) -> Audit:
    """The same audit of a table whose numeric columns are known otherwise."""
    field_, kind = audit.task.fields["x"], audit.task.fields["x"].kind
    assert isinstance(kind, Table)
    table = Table(tuple(c if c.categories else replace(c, **changes) for c in kind.columns))
    fields = {**audit.task.fields, "x": replace(field_, bounds=table.limits(), kind=table)}
    return replace(audit, task=replace(audit.task, fields=fields))


def _numbers(audit: Audit) -> list[Column]:
    """The numeric columns of a table."""
    kind = audit.task.fields["x"].kind
    return [column for column in kind.columns if not column.categories] if isinstance(kind, Table) else []


UNBOUNDED = {"low": -inf, "high": inf}
CAPABILITIES: dict[str, Capability] = {
    "bounds": Capability(
        lambda audit: any(isfinite(c.low) or isfinite(c.high) for c in _numbers(audit)),
        lambda audit: _columns_with(audit, **UNBOUNDED),
    ),
    # Without them no bound and no whole number can be told in standard units.
    "moments": Capability(
        lambda audit: any((c.mean, c.std) != (0.0, 1.0) for c in _numbers(audit)),
        lambda audit: _columns_with(audit, mean=0.0, std=1.0, whole=False, **UNBOUNDED),
    ),
    "labels": Capability(
        lambda audit: "y" in audit.given,
        lambda audit: replace(audit, given=tuple(name for name in audit.given if name != "y")),
    ),
    "statistics": Capability(
        lambda audit: "statistics" not in audit.withheld and bool(dict(audit.task.model.named_buffers())),
        lambda audit: replace(audit, withheld=(*audit.withheld, "statistics")),
    ),
    "recipe": Capability(
        lambda audit: "recipe" not in audit.withheld,
        lambda audit: replace(audit, withheld=(*audit.withheld, "recipe")),
    ),
    "generator": Capability(
        lambda audit: audit.generator is not None,
        _without_generator,
    ),
    "defence": Capability(
        lambda audit: any(each not in (None, "none") for each in audit.defences) and set(audit.knowledge) != {"naive"},
        lambda audit: replace(audit, knowledge=("naive",)),
    ),
}


@dataclass(frozen=True, eq=False)
class Ablation:
    """The whole audit, and one without each capability that it granted; a text if no attack can do without it.

    `idle`: by capability, the attacks that need it and were left out of that audit.
    """

    whole: AuditResult
    without: dict[str, AuditResult | str]
    idle: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def table(self) -> str:
        """One line per defence and capability: recovered share, mean of the first measure, and the change of it.

        The word is that of the strongest line, or void if the positive control of that audit failed.
        """
        measure = self.whole.kind.headline
        lines = [("defence", "without", "recovered", measure.label, "change", "word")]
        for defence in dict.fromkeys(line.defence for line in self.whole.summaries):
            base = strongest_of(line for line in self.whole.summaries if line.defence == defence)
            reference = base.means.get(measure.name, NAN)
            level = measure.format(reference)
            lines.append((defence, "-", str(base.recovered), level, "", _word(self.whole, base)))
            for name, result in self.without.items():
                if isinstance(result, str):
                    lines.append(("", name, "-", "-", "", result))
                elif against := [line for line in result.summaries if line.defence == defence]:
                    best = strongest_of(against)
                    score, word = best.means.get(measure.name, NAN), _word(result, best)
                    if idle := self.idle.get(name):
                        word += f" (left out, since they need it: {', '.join(idle)})"
                    change = difference(Rate(score - reference, NAN, NAN, 0), measure)
                    lines.append(("", name, str(best.recovered), measure.format(score), change, word))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)


def _word(result: AuditResult, line: Summary) -> str:
    return line.word if result.positive_control.passed else VOID


def _able(audit: Audit) -> tuple[Audit | None, dict[str, str]]:
    """The audit with the attacks that can run in it (None: none can), and why the others cannot, by name."""
    idle: dict[str, str] = {}
    for cell in audit.cells():
        try:
            require(cell.attack, cell.knows)
            supported(cell.attack, audit.task, cell.knows)
        except (MissingKnowledge, UnsupportedTask) as problem:
            idle.setdefault(cell.attack_name, str(problem))
    names = [name for name, _ in named_attacks(audit.attacks)]
    able = [attack for attack, name in zip(audit.attacks, names, strict=True) if name not in idle]
    return (replace(audit, attacks=able) if able else None), idle


def ablation(
    audit: Audit,
    out: str | Path | None = None,
    *,
    whole: AuditResult | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """Run the audit, and again without each capability that it grants, in folders beside `out`.

    `whole`: the result of the audit itself, if it has been run already.
    """
    folder = None if out is None else Path(out)
    whole = audit.run(folder, progress=progress) if whole is None else whole
    without: dict[str, AuditResult | str] = {}
    idle: dict[str, tuple[str, ...]] = {}
    for name, capability in CAPABILITIES.items():
        if not capability.granted(audit):
            continue
        place = None if folder is None else folder.with_name(f"{folder.name}-without-{name}")
        less, unable = _able(capability.taken(audit))
        if less is None:
            without[name] = f"cannot run: {next(iter(unable.values()))}"
            continue
        idle |= {name: tuple(unable)} if unable else {}
        without[name] = less.run(place, progress=progress)
    return Ablation(whole, without, idle)
