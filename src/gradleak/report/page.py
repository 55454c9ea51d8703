"""What the report shows, as plain values: read off an AuditResult here, laid out by the template."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradleak.cli.progress import duration
from gradleak.report import pictures
from gradleak.report.certificate import Proof, proofs
from gradleak.report.defences import Label, defences, labels, utility
from gradleak.report.grid import Column, Line, Table, Value, number, percent, tone

if TYPE_CHECKING:
    from gradleak.results import AuditResult, Rate, Row, Summary

SHOWN = 6  # pictures of each defence at once; the others fold away
MOST = 24  # pictures of each defence in all, so that the file stays small enough to send
HIDDEN = ("plan", "fields")  # bookkeeping of run.toml that tells a reader nothing
FORMS = {
    "undefended": "undefended",
    "naive": "by attackers who ignore it",
    "masked": "by attackers who weigh out what it noised or dropped",
    "adaptive": "by attackers who know it and predict through it",
    "averaged": "by attackers who know it and have seen the client several times on the same examples",
}


@dataclass(frozen=True)
class Panel:
    name: str
    alt: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class Shot:
    """A private image, what was recovered of it, and the difference."""

    title: str
    detail: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Group:
    """The pictures of one defence, best recovered first."""

    name: str
    verdict: Value
    text: str
    shots: tuple[Shot, ...]
    more: tuple[Shot, ...]
    left_out: int


@dataclass(frozen=True)
class Banner:
    word: str
    tone: str
    paragraph: str
    rule: str


@dataclass(frozen=True)
class Control:
    word: str
    tone: str
    text: str
    shots: tuple[Shot, ...]


@dataclass(frozen=True)
class Reference:
    name: str
    status: str
    paper: str


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    version: str
    verdict: Banner
    threat: str
    assumed: tuple[str, ...]
    results: Table
    gallery: tuple[Group, ...]
    control: Control
    baselines: Table | None
    checks: Table | None
    untested: tuple[str, ...]
    command: str
    settings: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    references: tuple[Reference, ...] = field(default=())
    proofs: tuple[Proof, ...] = field(default=())
    defences: Table | None = None
    labels: tuple[Label, ...] = field(default=())
    utility: Table | None = None

    @staticmethod
    def of(result: AuditResult) -> Page:
        from gradleak import __version__
        from gradleak.results.ledger import ledger_of

        verdict, summaries = result.verdict, result.summaries
        grid = [row for row in result.rows if not row.get("control")]
        name = result.folder.name if result.folder is not None else "audit"
        return Page(
            title=f"Gradient-leakage audit: {name}",
            subtitle=_subtitle(summaries, result),
            version=__version__,
            verdict=Banner(verdict.word, tone(verdict.word), verdict.paragraph, verdict.rule),
            threat=_threat(grid, result.settings),
            assumed=tuple(map(str, ledger_of(result.settings, grid))),
            results=_results(summaries),
            gallery=tuple(_gallery(result, grid)),
            control=_control(result),
            baselines=_baselines(grid),
            checks=_checks(grid),
            untested=tuple(_untested(grid, summaries)),
            command=_command(result),
            settings=tuple(_flat({name: held for name, held in result.settings.items() if name not in HIDDEN})),
            environment=tuple(_flat(result.environment)),
            references=tuple(_references(grid)),
            proofs=tuple(proofs(grid, summaries)),
            defences=defences(summaries),
            labels=tuple(labels(summaries)),
            utility=utility(summaries),
        )

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Anchor and name of each section that is there, in order."""
        every = (
            ("defences", "Defences", self.defences),
            ("results", "Results", True),
            ("utility", "Utility", self.utility),
            ("proofs", "Proofs", self.proofs),
            ("gallery", "Pictures", self.gallery),
            ("control", "Positive control", True),
            ("baselines", "Without any gradient", self.baselines),
            ("checks", "Checks", self.checks),
            ("untested", "Not tested", True),
            ("repeat", "To repeat", True),
            ("references", "References", self.references),
        )
        return tuple((anchor, name) for anchor, name, there in every if there)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _subtitle(summaries: Sequence[Summary], result: AuditResult) -> str:
    attacks, defences = {s.attack for s in summaries}, {s.defence for s in summaries if s.defence != "none"}
    spent = sum(float(row.get("seconds") or 0.0) for row in result.rows)
    when = str(result.environment.get("time", ""))[:16].replace("T", " ")  # ISO, in UTC
    parts = [
        _plural(len(attacks), "attack"),
        _plural(len(defences), "defence"),
        f"{duration(spent)} of attacks",
        when and f"{when} UTC",
    ]
    if not result.complete:
        parts.insert(0, "INCOMPLETE: cells are missing")
    if result.settings.get("trial"):
        parts.insert(0, "QUICK RUN: the numbers mean nothing")
    return " · ".join(filter(None, parts))


def _threat(grid: Sequence[Row], settings: Mapping[str, Any]) -> str:
    sizes = sorted({int(row["examples"]) for row in grid if row.get("examples")})
    levels = sorted({str(row["knows"]) for row in grid if row.get("knows")})
    forms = [FORMS[form] for form in FORMS if form != "undefended" and any(row.get("form") == form for row in grid)]
    counted = " or ".join(map(str, sizes)) or "?"
    sentence = (
        "A passive, honest-but-curious server sees the model it sent and one client's update, computed on "
        f"{counted} private example{'' if sizes == [1] else 's'}, and changes nothing."
    )
    if levels:
        sentence += f" What else it is granted: level {' or '.join(levels)} of Carletti et al. (USENIX Security 2025)."
    if forms:
        sentence += f" Defences are attacked {'; '.join(forms)}."
    return sentence


# --- tables ----------------------------------------------------------------------------------------------------------


def _results(summaries: Sequence[Summary]) -> Table:
    varied = [name for name in ("round", "examples") if len({getattr(s, name) for s in summaries}) > 1]
    words = {"attack", "defence", "verdict"}
    names = ["attack", "defence", *varied, "verdict", "recovered", "above baseline", "PSNR", "SSIM", "rank 1", "labels"]
    names.append("converged")
    order = sorted(summaries, key=lambda s: (s.defence != "none", s.defence, s.round, -_sortable(s.recovered.value)))
    return Table(
        "One line per attack, defence and attacker; all targets and seeds together.",
        tuple(Column(name, name not in words) for name in names),
        tuple(_result(summary, varied) for summary in order),
    )


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else -1.0


def _result(line: Summary, varied: Sequence[str]) -> Line:
    def score(name: str, digits: int) -> Value:
        return Value(number(line.means.get(name), digits), note=f"clearest {number(line.worst.get(name), digits)}")

    rank, excess = line.rates.get("rank1"), line.excess.value
    name, _, settings = line.attack.partition(":")
    values = (
        Value(name, note=settings),
        Value(line.defence, note=line.form if line.defence != "none" else ""),
        *(Value(str(getattr(line, column))) for column in varied),
        Value("failed" if line.errors and not line.targets else line.word, tone(line.word)),
        Value(percent(line.recovered.value), note=_interval(line.recovered)),
        Value(f"{100 * excess:+.0f} %" if math.isfinite(excess) else "-", note=_interval(line.excess)),
        score("psnr", 1),
        score("ssim", 2),
        Value(percent(rank.value), note=f"chance {number(100 * line.chance)} %") if rank else Value("-"),
        Value(percent(line.means.get("labels"))),
        Value(percent(line.converged)),
    )
    return Line(values, hatched=line.word in ("inconclusive", "void") or bool(line.errors))


def _interval(rate: Rate) -> str:
    return f"[{100 * rate.low:.0f}, {100 * rate.high:.0f}]" if math.isfinite(rate.low) else ""


def _baselines(grid: Sequence[Row]) -> Table | None:
    """Per baseline, its mean scores; these do not depend on the attack, but for the unrelated update."""
    gathered: dict[str, dict[str, list[float]]] = {}
    for row in grid:
        for baseline, scores in (row.get("baselines") or {}).items():
            if baseline == "unrelated update":
                baseline = f"{baseline}, {row['attack']}"
            for score in ("psnr", "ssim"):
                gathered.setdefault(baseline, {}).setdefault(score, []).extend(_numbers(scores.get(score)))
    if not gathered:
        return None
    explained = {
        "mid-grey": "a grey image",
        "mean image": "the mean of other real images",
        "nearest other": "the nearest of other real images, chosen with the truth",
        "nearest of class": "the nearest of the same class, chosen with the truth",
    }
    rows = [
        Line((Value(name), *(Value(number(_mean(scores["psnr"]), 1)), Value(number(_mean(scores["ssim"]), 2))),
              Value(explained.get(name, "the same attack on the update of somebody else"))))
        for name, scores in sorted(gathered.items())
    ]  # fmt: skip
    columns = (Column("baseline", False), Column("PSNR"), Column("SSIM"), Column("what it is", False))
    return Table("Mean over all targets.", columns, tuple(rows))


def _numbers(values: Any) -> list[float]:
    values = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _checks(grid: Sequence[Row]) -> Table | None:
    """Every finding once per cell, with the number of its targets; failed cells first."""
    found: dict[tuple[str, str, str, str], tuple[int, str, str]] = {}
    for row in grid:
        where = f"{row['attack']} / {row['defence']} / {row['form']} / round {row['round']}"
        if row.get("status") == "failed":
            text = str(row.get("error") or "no message")
            found[where, "failed", "error", text] = (
                1,
                text,
                "see the traceback in rows.jsonl; the same command retries it",
            )
            continue
        for check in row.get("checks") or ():
            key = (where, str(check["name"]), str(check["severity"]), "")
            count, text, fix = found.get(key, (0, str(check["text"]), str(check["fix"])))
            found[key] = (count + 1, text, fix)
    if not found:
        return None
    tones = {"error": "bad", "warning": "warn", "note": "void"}
    order = sorted(
        found.items(), key=lambda item: (list(tones).index(item[0][2]) if item[0][2] in tones else 9, item[0])
    )
    rows = [
        Line(
            (
                Value(where),
                Value(severity, tones.get(severity, "void")),
                Value(name),
                Value(str(count)),
                Value(text),
                Value(fix),
            )
        )
        for (where, name, severity, _), (count, text, fix) in order
    ]
    names = (("cell", False), ("", False), ("check", False), ("targets", True), ("what, for the first of them", False))
    columns = tuple(Column(*name) for name in (*names, ("what to do", False)))
    return Table(
        "Findings about the attacks and the observations; none of them uses the private data.", columns, tuple(rows)
    )


# --- pictures --------------------------------------------------------------------------------------------------------


def _gallery(result: AuditResult, grid: Sequence[Row]) -> Iterator[Group]:
    """Per defence: each private image once, as the strongest attack recovered it, best recovered first."""
    read = _reader(result)
    best: dict[str, dict[tuple[Any, ...], tuple[float, Row, int]]] = {}
    for row in grid:
        for example, psnr in enumerate((row.get("scores") or {}).get("psnr") or ()):
            image = (row["round"], row["seed"], row["observation"], example)
            held = best.setdefault(str(row["defence"]), {})
            if psnr is not None and (image not in held or psnr > held[image][0]):
                held[image] = (psnr, row, example)
    for defence in sorted(best, key=lambda name: (name != "none", name)):
        order = sorted(best[defence].values(), key=lambda entry: -entry[0])
        shots = [shot for _, row, example in order[:MOST] if (shot := _shot(read, row, example)) is not None]
        if not shots:
            continue
        verdict = result.verdicts.get(defence)
        yield Group(
            "Undefended" if defence == "none" else f"Defence: {defence}",
            Value(verdict.word, tone(verdict.word)) if verdict else Value(""),
            verdict.paragraph if verdict and len(best) > 1 else "",
            tuple(shots[:SHOWN]),
            tuple(shots[SHOWN:]),
            max(0, len(order) - MOST),
        )


def _reader(result: AuditResult) -> Callable[[str], dict[str, Tensor] | None]:
    """The images of a cell, read once; None where there are none."""
    from gradleak.results.rows import BadRun

    @cache
    def images(cell: str) -> dict[str, Tensor] | None:
        try:
            return result.images(cell)
        except BadRun:
            return None  # the arrays were deleted, which is a sensible thing to do with private images

    return images


def _shot(read: Callable[[str], dict[str, Tensor] | None], row: Row, example: int) -> Shot | None:
    images = read(row["cell"])
    if images is None or not pictures.drawable(images["true"].shape[2:]):
        return None
    target = int(row["target"])
    true, found = images["true"][target, example], images["found"][target, example]
    scores = {name: values[example] for name, values in row["scores"].items() if values}
    hits = row.get("hits") or {}
    recovered = hits["recovered"][example] if hits.get("recovered") else None
    told = f"PSNR {number(scores.get('psnr'), 1)} dB, SSIM {number(scores.get('ssim'), 2)}"
    detail = told + {True: ", recovered", False: ", not recovered", None: ""}[recovered]
    if row.get("converged") is False and not recovered:
        detail += ", and the attack did not converge"
    attacker = "" if row["form"] == "undefended" else f" ({row['form']})"
    what = f"example {example + 1} of target {row['observation']}"
    panels = (
        ("true", f"private image, {what}", true),
        ("recovered", f"what {row['attack']} recovered of {what}: {told}", found),
        ("difference", f"absolute difference of the two, {what}", pictures.difference(true, found)),
    )
    height, width = true.shape[-2:]
    return Shot(
        f"{row['attack']}{attacker}",
        f"{detail}; {row['observation']}" + (f", round {row['round']}" if row["round"] else ""),
        tuple(Panel(name, alt, pictures.data_uri(image), width, height) for name, alt, image in panels),
    )


def _control(result: AuditResult) -> Control:
    control = result.positive_control
    rows = [row for row in result.rows if row.get("cell") == control.cell and row.get("status") != "failed"]
    read = _reader(result)
    shots = [shot for row in rows[:3] if (shot := _shot(read, row, 0)) is not None]
    word, tone = ("passed", "good") if control.passed else ("failed: this run shows nothing", "bad")
    return Control(word, tone, control.text.partition(": ")[2] or control.text, tuple(shots))


# --- text ------------------------------------------------------------------------------------------------------------


def _untested(grid: Sequence[Row], summaries: Sequence[Summary]) -> Iterator[str]:
    """What a reader might take for covered and is not. An audit that does not say this misleads."""
    from gradleak import registry

    used = {str(row["attack"]).partition(":")[0] for row in grid}
    idle = [entry.name for entry in registry.entries("attack") if entry.name not in used]
    rounds = sorted({int(row["round"]) for row in grid})
    sizes = sorted({int(row["examples"]) for row in grid})
    yield "Active servers, which change weights, plant traps in the model or pick clients: they see more."
    yield "Other leakage than reconstruction, such as who took part (membership) or properties of the data as a whole."
    if idle:
        yield f"{_plural(len(idle), 'attack')} that this version has: {', '.join(idle)}."
    if not any(row["defence"] != "none" for row in grid):
        yield "Any defence."
    elif not any(row["defence"] == "none" for row in grid):
        yield "The same client without a defence, as the reference: add none to the defences."
    informed = {row["form"] for row in grid if row["defence"] != "none"}
    if informed and "adaptive" not in informed:
        yield "Attackers who know the defence: a defence that only stops those who do not know it does not protect."
    if rounds == [0]:
        yield "Trained models: only round 0 was attacked, and leakage changes with training."
    if sizes:
        yield f"Batches of other sizes than {', '.join(map(str, sizes))}."
    if not any(str(row.get("knows", "")).startswith(("D", "E")) for row in grid):
        yield "Attackers with data or generators like the clients' (levels D and E): they recover more."
    count = max((summary.targets * summary.seeds for summary in summaries), default=0)
    if count < 150:
        yield f"Enough targets for a published claim: this run has {count} per line; 50 targets x 3 seeds are a floor."
    yield "A longer search: what was not found may be found with more steps, more restarts or a better attack."


def _command(result: AuditResult) -> str:
    """With the path of the run as it was given, below the current folder where it can be."""
    folder = result.folder or Path("run")
    if folder.is_absolute() and folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    again = folder.with_name(f"{folder.name}-again")
    return shlex.join(["gradleak", "audit", "--config", str(folder / "run.toml"), "--out", str(again)])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as `name.inner` and text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{name}", "none" if value is None else str(value)


def _references(grid: Iterable[Row]) -> Iterator[Reference]:
    from gradleak import registry

    used = {("attack", str(row["attack"])) for row in grid} | {("defence", str(row["defence"])) for row in grid}
    names = sorted({(kind, name.partition(":")[0]) for kind, name in used if name != "none"})
    for kind, name in names:
        known = next((entry for entry in registry.entries(kind) if entry.name == name), None)
        if known is not None:
            yield Reference(name, known.status, known.paper or known.summary)
    yield Reference(
        "threat levels",
        "taxonomy",
        "Carletti et al., SoK: Gradient Inversion Attacks in Federated Learning, USENIX Security 2025",
    )
