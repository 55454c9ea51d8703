"""What an audit found: rows, table, verdict, images. Nothing here runs an attack; the schema of a row is in rows.py.

    result = AuditResult.load("runs/first")
    print(result.table()); print(result.verdict)

A result in a folder holds the private images beside what was made of them: treat the folder as the data itself.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradleak.configuration import from_toml
from gradleak.rows import FORMS, BadRun, Row, read_object
from gradleak.scoring import scores_of
from gradleak.store import Folder, Memory, Store
from gradleak.task import Field
from gradleak.verdict import Control, Rate, Summary, Verdict, control_of, overall, summaries_of, verdict_on

if TYPE_CHECKING:
    from gradleak.perceptual import LPIPS

__all__ = ["AuditResult", "BadRun", "Comparison", "Control", "Rate", "Row", "Summary", "Verdict"]


@dataclass(frozen=True, eq=False)
class AuditResult:
    """Rows and arrays of a run, finished or not. `settings` is what run.toml holds, `environment` environment.json."""

    rows: list[Row]
    settings: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    store: Store = field(default_factory=Memory)

    @staticmethod
    def load(folder: str | Path) -> AuditResult:
        """Read and check a folder that `Audit.run` wrote. Every defect is one BadRun that says where it is."""
        folder = Path(folder)
        path = folder / "run.toml"
        try:
            settings = from_toml(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadRun(f"{folder} is not the folder of a run: it has no run.toml.") from None
        except (OSError, ValueError, RecursionError) as problem:
            raise BadRun(f"{path} cannot be read: {problem}.") from None
        _check_settings(settings, path)
        try:
            environment = read_object((folder / "environment.json").read_bytes(), str(folder / "environment.json"))
        except FileNotFoundError:
            environment = {}
        store = Folder(folder)
        return AuditResult.of(store, settings, environment, folder)

    @staticmethod
    def of(store: Store, settings: dict[str, Any], environment: dict[str, Any], folder: Path | None = None) -> AuditResult:
        """The rows of a store in the order of the plan, however the run was interrupted and resumed."""
        place = {key: index for index, key in enumerate(settings["plan"]["cells"])}
        planned = [row for row in store.rows() if row["cell"] in place]
        rows = sorted(planned, key=lambda row: (place[row["cell"]], row.get("target") or 0))
        return AuditResult(rows, settings, environment, folder, store)

    # --- what it says ----------------------------------------------------------------------------------------------

    @cached_property
    def summaries(self) -> list[Summary]:
        """One per line of the table."""
        return summaries_of(self.rows)

    @property
    def positive_control(self) -> Control:
        return control_of(self.rows, self.settings["plan"]["control"])

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By the name of the defence; "none" is the undefended client."""
        planned = self.settings["plan"]["defences"]
        return {
            name: verdict_on([line for line in self.summaries if line.defence == name], planned.count(name))
            for name in dict.fromkeys(planned)
        }

    @property
    def verdict(self) -> Verdict:
        """The headline, by the rule of verdict.py."""
        return overall(self.verdicts, self.positive_control)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "failed"]

    @property
    def complete(self) -> bool:
        """Whether every planned cell has its rows."""
        return {row["cell"] for row in self.rows} == set(self.settings["plan"]["cells"])

    def table(self, format: str = "text") -> str:
        """One line per attack, defence and form: "text", "markdown" or, with plain numbers, "csv"."""
        if format not in FORMATS:
            raise ValueError(f"format is {format!r}; there are {', '.join(FORMATS)}.")
        return FORMATS[format](self.summaries)

    def compare(self, other: AuditResult) -> Comparison:
        """Line by line against another run: what leaks more, what leaks less."""
        return Comparison(self.summaries, other.summaries)

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML file. It shows private images."""
        from gradleak.report import render

        path = Path(path)
        path.write_text(render(self), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(show(line))}</td>' for show in COLUMNS.values())}</tr>" for line in self.summaries
        )
        return f"<p><b>{escape(self.verdict.word)}</b>. {escape(self.verdict.paragraph)}</p><table>{head}{body}</table>"

    # --- arrays ----------------------------------------------------------------------------------------------------

    def images(self, cell: str) -> dict[str, Tensor]:
        """"true" and "found", (targets, examples, C, H, W) in [0, 1], matched pair by pair as they were scored."""
        from gradleak.metrics import to_unit

        held, rows = self._cell(cell)
        unit = self.fields["x"].unit
        found = [picture[row["assignment"]] for picture, row in zip(held["found/x"], rows, strict=True)]
        import torch

        return {"true": to_unit(unit(held["truth/x"].double())), "found": to_unit(unit(torch.stack(found).double()))}

    def trace(self, cell: str) -> dict[str, Tensor]:
        """"step" (P,), "match" and "objective" (P, targets) of the chosen restart, along the search."""
        held, _ = self._cell(cell)
        return {name: held[f"trace/{name}"] for name in ("step", "match", "objective")}

    def rescore(self, *, lpips: LPIPS | None = None) -> AuditResult:
        """The same reconstructions under the scores of this version of gradleak; no attack is run, no file changed."""
        gallery = _group(self.store.arrays("gallery"), "gallery")
        rows = list(self.failed)
        for cell in dict.fromkeys(row["cell"] for row in self.rows if row["status"] == "done"):
            held, own = self._cell(cell)
            found, truth = _group(held, "found"), _group(held, "truth")
            scored = scores_of(
                found, truth, held.get("unrelated/x"), gallery, self.fields, held["diverged"], lpips
            )  # fmt: skip
            rows += [{**row, **new} for row, new in zip(own, scored, strict=True)]
        place = {key: index for index, key in enumerate(self.settings["plan"]["cells"])}
        return replace(self, rows=sorted(rows, key=lambda row: (place[row["cell"]], row.get("target") or 0)))

    @property
    def fields(self) -> dict[str, Field]:
        """The private fields of the task, as run.toml describes them."""
        tuples = lambda held: {name: tuple(v) if isinstance(v, list) else v for name, v in held.items()}  # noqa: E731
        return {name: Field(**tuples(held)) for name, held in self.settings["fields"].items()}

    def _cell(self, cell: str) -> tuple[dict[str, Tensor], list[Row]]:
        rows = [row for row in self.rows if row["cell"] == cell and row["status"] == "done"]
        if not rows:
            raise BadRun(f"There is no finished cell {cell!r} in this run.")
        held = self.store.arrays(cell)
        for name in ("found/x", "truth/x"):
            wanted = (len(rows), rows[0]["examples"], *self.fields["x"].shape)
            if name not in held or tuple(held[name].shape) != wanted:
                raise BadRun(f"The arrays of cell {cell} do not fit its rows: {name} should be {wanted}.")
        return held, rows


def _group(held: dict[str, Tensor], group: str) -> dict[str, Tensor]:
    return {name.partition("/")[2]: value for name, value in held.items() if name.startswith(f"{group}/")}


def _check_settings(settings: dict[str, Any], path: Path) -> None:
    """As far as a result relies on them."""
    plan, fields = settings.get("plan"), settings.get("fields")
    lists = [plan.get("cells"), plan.get("defences")] if isinstance(plan, dict) else [None]
    texts = all(isinstance(held, list) and all(isinstance(entry, str) for entry in held) for held in lists)
    if settings.get("version") != 1 or not texts or not isinstance(plan, dict) or not isinstance(plan.get("control"), str):
        raise BadRun(f"{path} is not a configuration that this gradleak wrote: version or [plan] is missing or odd.")
    try:
        AuditResult([], settings).fields["x"].shape[0]
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as problem:
        raise BadRun(f"{path}: [fields] does not describe the private tensors ({problem}).") from None


# --- tables -----------------------------------------------------------------------------------------------------------


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


def _number(values: dict[str, float], key: str, digits: int = 1) -> str:
    return f"{values[key]:.{digits}f}" if key in values and math.isfinite(values[key]) else "-"


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "attack": lambda line: line.attack,
    "defence": lambda line: line.defence,
    "form": lambda line: line.form,
    "round": lambda line: str(line.round),
    "B": lambda line: str(line.examples),
    "targets": lambda line: f"{line.targets}{f' x {line.seeds}' if line.seeds > 1 else ''}{' (small)' if line.small else ''}",
    "recovered [95 %]": lambda line: str(line.recovered) if line.targets else "-",
    "PSNR mean/median/worst": lambda line: "/".join(_number(v, "psnr") for v in (line.means, line.medians, line.worst)),
    "SSIM": lambda line: _number(line.means, "ssim", 2),
    "labels": lambda line: _share(line.means.get("labels", float("nan"))),
    "rank 1 (chance)": lambda line: f"{_share(line.rates['rank1'].value)} ({line.chance:.1%})" if line.targets else "-",
    "baseline": lambda line: f"{_share(line.baseline['recovered'])}, {_number(line.baseline, 'psnr')} dB",
    "match": lambda line: f"{line.match:.2g}" if line.targets else "-",
    "converged": lambda line: _share(line.converged),
    "seconds": lambda line: f"{line.seconds:.1f}",
    "verdict": lambda line: "failed" if line.errors and not line.targets else line.word,
}


def _cells_of(lines: Sequence[Summary]) -> list[list[str]]:
    return [list(COLUMNS), *([show(line) for show in COLUMNS.values()] for line in lines)]


def _text(lines: Sequence[Summary]) -> str:
    rows = _cells_of(lines)
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    told = ["  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([told[0], "  ".join("-" * width for width in widths), *told[1:]])


def _markdown(lines: Sequence[Summary]) -> str:
    rows = [[entry.replace("|", "\\|") for entry in row] for row in _cells_of(lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(COLUMNS), *rows[1:]])


def _csv(lines: Sequence[Summary]) -> str:
    text = io.StringIO()
    records = [_record(line) for line in lines]
    writer = csv.DictWriter(text, list(dict.fromkeys(name for record in records for name in record)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _record(line: Summary) -> dict[str, Any]:
    names = ("attack", "defence", "form", "round", "examples", "targets", "seeds", "word")
    record: dict[str, Any] = {name: getattr(line, name) for name in names}
    for name, rate in {"recovered": line.recovered, "excess": line.excess, **line.rates}.items():
        record |= {name: rate.value, f"{name} low": rate.low, f"{name} high": rate.high}
    for kind in ("means", "medians", "worst", "baseline"):
        record |= {f"{name} {kind.removesuffix('s')}": value for name, value in getattr(line, kind).items()}
    return record | {name: getattr(line, name) for name in ("chance", "match", "converged", "diverged", "seconds")}


FORMATS: dict[str, Callable[[Sequence[Summary]], str]] = {"text": _text, "markdown": _markdown, "csv": _csv}


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side, lines matched by attack, defence, form, round and batch size."""

    first: Sequence[Summary]
    second: Sequence[Summary]

    @property
    def pairs(self) -> list[tuple[Summary | None, Summary | None]]:
        """Lines of both, then those of the first only, then those of the second only."""
        name = lambda line: (line.attack, line.defence, line.form, line.round, line.examples)  # noqa: E731
        one, two = {name(line): line for line in self.first}, {name(line): line for line in self.second}
        both = [(line, two[key]) for key, line in one.items() if key in two]
        alone = [(line, None) for key, line in one.items() if key not in two]
        return [*both, *alone, *((None, line) for key, line in two.items() if key not in one)]

    def __str__(self) -> str:
        lines = []
        for a, b in self.pairs:
            line = a or b
            assert line is not None  # a pair has at least one side
            name = f"{line} against {line.defence}, B = {line.examples}, round {line.round}"
            if a is None or b is None:
                lines.append(f"{name}: only in the {'second' if a is None else 'first'} run ({line.word})")
                continue
            apart = a.recovered.high < b.recovered.low or b.recovered.high < a.recovered.low
            psnr = b.means.get("psnr", math.nan) - a.means.get("psnr", math.nan)
            lines.append(
                f"{name}: recovered {a.recovered} -> {b.recovered}{' (intervals apart)' if apart else ''}, "
                f"PSNR {psnr:+.1f} dB, {a.word if a.word == b.word else f'{a.word} -> {b.word}'}"
            )
        return "\n".join(lines)
