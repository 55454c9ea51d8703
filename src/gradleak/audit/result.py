"""What an audit found: rows, table, verdict, examples. Nothing here runs an attack; rows.py says what a row is.

    result = AuditResult.load("runs/first")
    print(result.table()); print(result.verdict)

A folder holds the private examples beside their reconstructions: treat it as the data itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradleak.audit.assumptions import Assumption, ledger_of
from gradleak.audit.comparison import Change, Comparison
from gradleak.audit.formats import FORMATS, junit_of, notebook_of
from gradleak.audit.intervals import Rate
from gradleak.audit.runfile import field_of
from gradleak.audit.scoring import scores_of
from gradleak.audit.store import Arrays, Folder, Memory, Store, unpacked_words
from gradleak.audit.summary import Summary, summaries_of
from gradleak.audit.verdict import (
    TRIAL,
    Control,
    Headline,
    Verdict,
    card_of,
    control_of,
    headlines_of,
    overall,
    verdict_on,
)
from gradleak.core import registry
from gradleak.core.configuration import from_toml
from gradleak.core.files import BadRun, Row, read_object
from gradleak.core.registry import did_you_mean
from gradleak.scenario.kinds import Kind, Tokens
from gradleak.scenario.task import Field

if TYPE_CHECKING:
    from gradleak.curvature.result import StudyResult
    from gradleak.metrics.perceptual import LPIPS

__all__ = ["Assumption", "AuditResult", "BadRun", "Change", "Comparison", "Control", "Headline", "Rate", "Row"]
__all__ += ["Summary", "Verdict"]


registry.lives_in("report", "gradleak.report")  # drawn by a later layer


@dataclass(frozen=True, eq=False)
class AuditResult:
    """Rows and arrays of a run, finished or not. `settings`: from run.toml, `environment`: from environment.json."""

    rows: list[Row]
    settings: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    store: Store = field(default_factory=Memory)

    @staticmethod
    def load(folder: str | Path) -> AuditResult:
        """Read and check a folder that `Audit.run` wrote. A defect raises BadRun, which says where it is."""
        folder = Path(folder)
        path = folder / "run.toml"
        try:
            settings = from_toml(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadRun(f"{folder} is not the folder of a run: it has no run.toml.{_near(folder)}") from None
        except (OSError, ValueError, RecursionError) as problem:
            raise BadRun(f"{path} cannot be read: {problem}.") from None
        _check_settings(settings, path)
        try:
            environment = read_object((folder / "environment.json").read_bytes(), str(folder / "environment.json"))
        except FileNotFoundError:
            environment = {}
        result = AuditResult.of(Folder(folder), settings, environment, folder)
        if odd := next((row["kind"] for row in result.rows if row["kind"] != result.kind.name), None):
            raise BadRun(f"{folder} is a run of kind {result.kind.name!r}; a row of it is of kind {odd!r}.")
        return result

    @staticmethod
    def of(
        store: Store, settings: dict[str, Any], environment: dict[str, Any], folder: Path | None = None
    ) -> AuditResult:
        """The rows of a store in the order of the plan, however the run was interrupted and resumed."""
        return AuditResult(_in_order(store.rows(), settings), settings, environment, folder, store)

    # --- what it says ----------------------------------------------------------------------------------------------

    @cached_property
    def summaries(self) -> list[Summary]:
        """One per line of the table."""
        return summaries_of(self.rows)

    @cached_property
    def headlines(self) -> list[Headline]:
        """One per defence, round and batch size: its attackers, the undefended reference, what it proves."""
        return headlines_of(self.summaries)

    @cached_property
    def positive_control(self) -> Control:
        """Did the first attack recover an undefended example? If not, the run is void."""
        return control_of(self.rows, self.settings["plan"]["control"], self.kind)

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """By the name of the defence; "none" is the undefended client."""
        planned = self.settings["plan"]["defences"]
        return {
            name: verdict_on([line for line in self.summaries if line.defence == name], planned.count(name), self.kind)
            for name in dict.fromkeys(planned)
        }

    @cached_property
    def verdict(self) -> Verdict:
        """The headline, by the rule of verdict.py; its paragraph starts with the caveats."""
        whole, total = overall(self.verdicts, self.positive_control), len(set(self.settings["plan"]["cells"]))
        run = len({row["cell"] for row in self.rows})
        caveats = [] if self.complete else [f"Incomplete: {run} of {total} cells."]
        caveats += [TRIAL] if self.trial else []
        granted = " and ".join(map(str, self.settings.get("given", ())))
        caveats += [f"The attacker was granted {granted} of every example."] if granted else []
        return replace(whole, paragraph=" ".join([*caveats, whole.paragraph]))

    @cached_property
    def ledger(self) -> tuple[Assumption, ...]:
        """What the attacker was assumed to know, capability by capability."""
        return ledger_of(self.settings, [row for row in self.rows if not row["control"]])

    @property
    def cards(self) -> list[dict[str, Any]]:
        """Figures and words of each line of the table, as JSON."""
        return [card_of(line, self.positive_control) for line in self.summaries]

    def record(self) -> dict[str, Any]:
        """The verdict as JSON: the headline, every line with the rule behind its word, and the assumptions."""
        verdict = self.verdict
        return {
            "version": 1,
            "word": verdict.word,
            "because": verdict.because,
            "paragraph": verdict.paragraph,
            "rule": verdict.rule,
            "complete": self.complete,
            "trial": self.trial,
            "control": self.positive_control.text,
            "lines": self.cards,
            "assumptions": [each.record() for each in self.ledger],
        }

    @property
    def trial(self) -> bool:
        """Whether the run only shows that everything runs."""
        return bool(self.settings.get("trial"))

    @property
    def failed(self) -> list[Row]:
        """Rows of cells that ended in an error."""
        return [row for row in self.rows if row["status"] == "failed"]

    @property
    def complete(self) -> bool:
        """Whether every planned cell has its rows."""
        return {row["cell"] for row in self.rows} == set(self.settings["plan"]["cells"])

    def table(self, format: str = "text") -> str:
        """One line per attack, defence and form; below it, but in "csv", what each defence is worth and proves.

        Formats: "text", "markdown", "latex" (with booktabs), "csv" (plain numbers, no rounding).
        """
        if format not in FORMATS:
            raise ValueError(f"format is {format!r}; there are {', '.join(FORMATS)}.")
        return FORMATS[format](self.summaries)

    def compare(self, other: AuditResult) -> Comparison:
        """Line by line against a later run: what leaks more there, what leaks less, with intervals."""
        return Comparison(self, other)

    def junit(self, fail_above: float | None = None, reason: str = "") -> str:
        """The run as JUnit XML: a test case for each planned cell, and one for the run (see formats.py)."""
        return junit_of(self, fail_above, reason)

    def report(self, path: str | Path, study: StudyResult | None = None) -> Path:
        """Write one self-contained HTML file. It shows private examples. `study`: curvature of the same training."""
        path, render = Path(path), registry.entry("report", "html").make
        path.write_text(render(self, study), encoding="utf-8")
        return path

    def write_verdict(self, path: str | Path) -> Path:
        """Write `record` as JSON. It holds figures and words, no images."""
        path = Path(path)
        path.write_text(json.dumps(self.record(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict and a compact table. It holds no images."""
        return notebook_of(self)

    # --- arrays ----------------------------------------------------------------------------------------------------

    def pairs(self, cell: str, name: str = "x") -> dict[str, Tensor]:
        """`true` and `found` of a field, each (targets, examples, ...), comparable and paired as x was scored."""
        arrays, rows = self._cell(cell)
        field, lead = self.fields[name], (len(rows), rows[0]["examples"])
        kind, shapes = field.kind, ((*lead, *field.shape), (*lead, *field.shape, field.classes))
        for key in (f"found/{name}", f"truth/{name}"):
            if key not in arrays or tuple(arrays[key].shape) not in shapes:
                raise BadRun(f"The arrays of cell {cell} do not fit its rows: {key} should be {shapes[0]}.")
        reference = None if kind.pictures else _group(self.store.arrays("gallery"), "gallery").get(name)
        values = arrays[f"found/{name}"]
        reconstructions = torch.stack([values[target][row["assignment"]] for target, row in enumerate(rows)])
        return {
            "true": kind.comparable(arrays[f"truth/{name}"], field, reference),
            "found": kind.comparable(reconstructions, field, reference),
        }

    def images(self, cell: str) -> dict[str, Tensor]:
        """`pairs` of a run on images: (targets, examples, C, H, W) in [0, 1]."""
        if not self.kind.pictures:
            raise BadRun(f"This run is of {self.kind.noun[1]}, which are no images: AuditResult.pairs has them.")
        return self.pairs(cell)

    def trace(self, cell: str) -> dict[str, Tensor]:
        """`step` (P,), `match` and `objective` (P, targets) of the chosen restarts, along the search."""
        arrays, _ = self._cell(cell)
        return {name: arrays[f"trace/{name}"] for name in ("step", "match", "objective")}

    def rescore(self, *, lpips: LPIPS | None = None) -> AuditResult:
        """The same reconstructions with the scores of this version; no attack runs and no file changes."""
        gallery = _group(self.store.arrays("gallery"), "gallery")
        rows = list(self.failed)
        for cell in dict.fromkeys(row["cell"] for row in self.rows if row["status"] == "done"):
            arrays, before = self._cell(cell)
            reconstructions, truth, unrelated = (
                _group(arrays, "found"),
                _group(arrays, "truth"),
                arrays.get("unrelated/x"),
            )
            diverged, guess = arrays["diverged"], arrays.get("guess/x")
            scores = scores_of(reconstructions, truth, unrelated, gallery, self.fields, diverged, lpips, guess)
            rows += [{**row, **scored} for row, scored in zip(before, scores, strict=True)]
        return replace(self, rows=_in_order(rows, self.settings))

    @cached_property
    def fields(self) -> dict[str, Field]:
        """The private fields of the task; tokens with their words, where the run keeps those."""
        named = self.settings.get("words", ())
        return {name: self._worded(name, each) if name in named else each for name, each in self._described.items()}

    @cached_property
    def _described(self) -> dict[str, Field]:
        """The same as run.toml describes them."""
        return {name: field_of(entry) for name, entry in self.settings["fields"].items()}

    def _worded(self, name: str, field: Field) -> Field:
        kept = self.store.arrays("words").get(name)
        if kept is None or not isinstance(field.kind, Tokens):
            raise BadRun(f"run.toml says that the words of {name} are kept, and they are not. Copy the whole folder.")
        words = unpacked_words(kept, f"arrays/words.safetensors, {name},")
        return replace(field, kind=replace(field.kind, words=words))

    @property
    def kind(self) -> Kind:
        """What kind of data was attacked: that of x."""
        return self._described["x"].kind

    def _cell(self, cell: str) -> tuple[Arrays, list[Row]]:
        rows = [row for row in self.rows if row["cell"] == cell and row["status"] == "done"]
        if not rows:
            raise BadRun(f"There is no finished cell {cell!r} in this run.")
        arrays = self.store.arrays(cell)
        shape = (len(rows), rows[0]["examples"], *self.fields["x"].shape)
        for name in ("found/x", "truth/x"):
            if name not in arrays or tuple(arrays[name].shape) != shape:
                raise BadRun(f"The arrays of cell {cell} do not fit its rows: {name} should be {shape}.")
        if missing := {"diverged", "trace/step", "trace/match", "trace/objective"} - arrays.keys():
            raise BadRun(f"The arrays of cell {cell} lack {', '.join(sorted(missing))}.")
        return arrays, rows


def _near(folder: Path) -> str:
    """The runs beside it, if there are some, and what to do."""
    beside = [path.parent.name for path in folder.absolute().parent.glob("*/run.toml")]
    if not beside:
        return " `gradleak audit -o FOLDER` makes one."
    return f" Beside it:{did_you_mean(folder.absolute().name, beside)}"


def _in_order(rows: list[Row], settings: dict[str, Any]) -> list[Row]:
    place = {key: index for index, key in enumerate(settings["plan"]["cells"])}
    planned = [row for row in rows if row["cell"] in place]
    return sorted(planned, key=lambda row: (place[row["cell"]], row.get("target") or 0))


def _group(arrays: Arrays, group: str) -> Arrays:
    return {name.partition("/")[2]: value for name, value in arrays.items() if name.startswith(f"{group}/")}


def _check_settings(settings: dict[str, Any], path: Path) -> None:
    """Check the settings that a result relies on."""
    version = settings.get("version")
    if type(version) is int and version > 1:
        writer = f"gradleak {settings.get('gradleak', 'that is newer')}, which wrote it"
        raise BadRun(f"{path} has version {version}; this gradleak reads 1. Read it with {writer}.")
    plan = settings.get("plan")
    lists = [plan.get("cells"), plan.get("defences")] if isinstance(plan, dict) else [None]
    texts = all(isinstance(each, list) and all(isinstance(entry, str) for entry in each) for each in lists)
    if version != 1 or not isinstance(plan, dict) or not texts or plan.get("control") not in plan["cells"]:
        raise BadRun(f"{path} is not a configuration that this gradleak wrote: version or [plan] is missing or odd.")
    try:
        private = AuditResult([], settings)._described["x"]
        sized = all(type(side) is int and 0 < side < 2**31 for side in private.shape)
        fits = sized and (len(private.shape) == 3 or not private.kind.pictures)
        if fits:  # on no example at all, whatever the shape: are the settings of field and kind usable?
            private.kind.comparable(torch.zeros(0, *private.shape), private)
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, ArithmeticError, RuntimeError) as problem:
        raise BadRun(f"{path}: [fields] does not describe the private tensors ({problem}).") from None
    if not fits:
        sizes = "three positive sizes" if private.kind.pictures else "positive sizes"
        raise BadRun(f"{path}: [fields.x] should have a shape of {sizes}; it has {private.shape}.")
