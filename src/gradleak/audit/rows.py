"""A row: what one cell found out about one target. `rows.jsonl` has one per line; numbers are finite or null.

Here rows are checked when they are read, and `ROW` is their JSON Schema (draft 2020-12), from which docs/rows.md is
written. Two entries are objects of a class:

guarantee   {"text": as printed, and the fields of `Guarantee`}: an epsilon only if the defence proves one
trained     {"rounds": of the training so far, "defence": that it ran with, "test_loss", "test_accuracy": of the model
            that was attacked, null if not measured}

Version. New entries may come within a version: a reader must ignore entries that it does not know. An entry that goes
away or changes its meaning makes a new version, and a step in `UPGRADES` from the version before.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from gradleak.core.files import BadRun, Row, read_object
from gradleak.identify.span_certificate import SpanCertificate
from gradleak.scenario.forms import AttackerForm
from gradleak.scenario.guarantee import Guarantee
from gradleak.scenario.kinds import KINDS, Kind

ROW_VERSION = 2
FORMS = tuple(form.value for form in AttackerForm)  # from the least to the most informed
_KEY = re.compile(r"[0-9a-f]{16}")
RETIRED = {"tokens": "every token"}
"""By kind: a hit that only rows of former rules have. Their scores mean something else."""
OPTIONAL = ("lpips",)  # scores that an audit of images may ask for
# Of a certificate:
_COUNTS = ("unknowns", "equations", "rank", "null")
_MEASURES = ("tolerance", "residual", "rounding", "share", "shift", "largest", "smallest", "floor")
REQUIRED: dict[str, Any] = {
    "cell": str, "status": str, "control": bool, "attack": str, "defence": str, "form": str, "kind": str,
    "round": int, "seed": int, "examples": int, "targets": int,
}  # fmt: skip
SCORED: dict[str, Any] = {
    "target": int, "scores": dict, "gallery_size": list, "hits": dict, "labels": dict, "baselines": dict,
    "assignment": list, "diverged": bool, "converged": bool, "checks": list, "match": (float, int, type(None)),
    "seconds": (float, int),
}  # fmt: skip


UPGRADES: dict[int, Callable[[Row], Row]] = {
    1: lambda row: {**row, "kind": "image"},  # there were no others
}
"""By version: the function that turns a row of that version into one of the next."""


def _upgraded(row: Row, where: str) -> Row:
    """A row of any known version, in the current one."""
    written = row.get("version")
    if type(written) is not int or written < min([ROW_VERSION, *UPGRADES]):
        raise BadRun(f"{where} has version {written!r:.60}, which no gradleak wrote; versions end at {ROW_VERSION}.")
    if written > ROW_VERSION:
        raise BadRun(
            f"{where} has version {written}; this gradleak reads up to {ROW_VERSION}. Read it with the one that wrote "
            "it (run.toml names its version), or a newer one."
        )
    for version in range(written, ROW_VERSION):
        row = {**UPGRADES[version](row), "version": version + 1}
    return row


def decode(line: bytes, where: str) -> Row:
    """One line of rows.jsonl, checked for everything that tables and verdicts rely on."""
    row = _upgraded(read_object(line, where), where)
    if row.get("status") not in ("done", "failed"):
        raise BadRun(f"{where}: status should be 'done' or 'failed'; it is {row.get('status')!r:.60}.")
    required = REQUIRED | (SCORED if row.get("status") == "done" else {"error": str})
    for name, kind in required.items():
        if not isinstance(row.get(name), kind) or (kind is int and isinstance(row[name], bool)):
            raise BadRun(f"{where}: {name} is {row.get(name)!r:.60}, which is not of its kind.")
    if row["form"] not in FORMS:
        raise BadRun(f"{where}: form should be one of {', '.join(FORMS)}; it is {row['form']!r:.60}.")
    if row["kind"] not in KINDS:
        raise BadRun(f"{where}: kind should be one of {', '.join(KINDS)}; it is {row['kind']!r:.60}.")
    if not _KEY.fullmatch(row["cell"]):  # it becomes a file name
        raise BadRun(f"{where}: cell {row['cell']!r:.60} is not a key of 16 hexadecimal digits.")
    if row["status"] == "done":
        if RETIRED.get(row["kind"]) in row["hits"]:
            raise BadRun(
                f"{where} has the hit {RETIRED[row['kind']]!r}: an earlier gradleak scored these "
                f"{KINDS[row['kind']].noun[1]} by other rules (docs/rows.md). Run the audit again into another folder."
            )
        _check_scores(row, where)
        _check_certificate(row, where)
        _check_labels(row, where)
    return row


def _check_scores(row: Row, where: str) -> None:
    """One finite number or null, or one truth value, per example."""
    examples, kind = row["examples"], KINDS[row["kind"]]

    def check_list(name: str, values: Any, kinds: tuple[type, ...]) -> None:
        fits = isinstance(values, list) and len(values) == examples and all(type(v) in kinds for v in values)
        if not fits or not all(v is None or abs(v) < 1e300 for v in values):  # 1e999 is JSON, and infinite
            raise BadRun(f"{where}: {name} should list {examples} values; it is {values!r:.60}.")

    number = (int, float, type(None))
    for name in (*scores_required(kind), *(name for name in OPTIONAL if name in row["scores"])):
        check_list(f"scores.{name}", row["scores"].get(name), number)
    for name in hits_required(kind):
        check_list(f"hits.{name}", row["hits"].get(name), (bool,))
    check_list("gallery_size", row["gallery_size"], (int,))
    check_list("assignment", row["assignment"], (int,))
    if sorted(row["assignment"]) != list(range(examples)) or min(row["gallery_size"]) < 1 or examples < 1:
        raise BadRun(f"{where}: assignment or gallery_size holds impossible values.")
    for check in row["checks"]:
        texts = [check.get(name) for name in ("name", "severity", "text", "fix")] if isinstance(check, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise BadRun(f"{where}: a check should have name, severity, text and fix; it is {check!r:.60}.")
    for baseline, scores in row["baselines"].items():
        if not isinstance(scores, dict):
            raise BadRun(f"{where}: baselines.{baseline} should be an object of scores.")
        for name, values in scores.items():
            check_list(f"baselines.{baseline}.{name}", values, (*number, bool))
    for name, value in row["labels"].items():
        if type(value) not in number or (value is not None and not abs(value) < 1e300):
            raise BadRun(f"{where}: labels.{name} should be a number.")


def scores_required(kind: type[Kind]) -> list[str]:
    """Names of the scores that a row of this kind has."""
    return [*(measure.name for measure in kind.measures), "rank"]


def hits_required(kind: type[Kind]) -> list[str]:
    """Names of the thresholds that a row of this kind has."""
    return [*(threshold.name for threshold in kind.thresholds), "rank1", "recovered"]


def _check_labels(row: Row, where: str) -> None:
    for name, read in (("guarantee", guarantee_of), ("trained", Trained.of), ("spans", SpanCertificate.of)):
        if row.get(name) is not None:
            try:
                read(row[name])
            except ValueError as problem:
                raise BadRun(f"{where}: {str(problem).rstrip('.')}.") from None


def _check_certificate(row: Row, where: str) -> None:
    """Counts that add up, finite numbers or null, and words that say what the counts say."""
    certificate = row.get("certificate")
    if certificate is None:
        return
    if not isinstance(certificate, dict):
        raise BadRun(f"{where}: certificate should be an object or null; it is {certificate!r:.60}.")
    for name in _COUNTS:
        if type(count := certificate.get(name)) is not int or not 0 <= count < 2**63:
            raise BadRun(f"{where}: certificate.{name} should be a whole number; it is {count!r:.60}.")
    for name in _MEASURES:
        value = certificate.get(name, "missing")
        if value is not None and (type(value) not in (int, float) or not 0 <= value < 1e300):
            raise BadRun(f"{where}: certificate.{name} should be a number from 0 or null; it is {value!r:.60}.")
    null, rank, verdict = certificate["null"], certificate["rank"], certificate.get("verdict")
    words = ("determined", f"determined up to {null} dimensions", "not determined")
    if null != certificate["unknowns"] - rank or verdict not in words or (verdict == "determined" and null):
        raise BadRun(f"{where}: certificate says {verdict!r:.60}, which does not fit its rank of {rank}.")
    if not isinstance(reason := certificate.get("reason"), str):
        raise BadRun(f"{where}: certificate.reason should be text; it is {reason!r:.60}.")


# --- guarantee and training, as rows keep them

_TEXTS = ("reason", "unit", "model", "covers", "accountant", "sampling", "neighbours")
_TESTED = ("test_loss", "test_accuracy")


def guarantee_record(guarantee: Guarantee) -> dict[str, Any]:
    """A guarantee as a row keeps it. JSON has no infinities, and an infinite epsilon proves nothing."""
    if guarantee.epsilon is not None and not math.isfinite(guarantee.epsilon):
        guarantee = Guarantee(reason="its epsilon is infinite")
    return {"text": str(guarantee), **asdict(guarantee)}


def guarantee_of(record: Any) -> Guarantee:
    """A guarantee read back from a row; a ValueError says what is wrong with it."""
    if not isinstance(record, Mapping):
        raise ValueError(f"guarantee should be an object or null; it is {record!r:.60}")
    values: dict[str, Any] = {entry.name: record.get(entry.name) for entry in fields(Guarantee)}
    caveats, bound, releases = values["caveats"], values["reconstruction"], values["releases"]
    if not all(isinstance(values[name], str) for name in _TEXTS) or not isinstance(record.get("text"), str):
        raise ValueError("guarantee should have the texts of its label")
    if not all(values[name] is None or _is_number(values[name]) for name in ("epsilon", "delta")):
        raise ValueError("guarantee should have a number or null for epsilon and delta")
    if type(releases) is not int or not isinstance(caveats, (list, tuple)) or not all(type(c) is str for c in caveats):
        raise ValueError("guarantee should count releases and list caveats")
    pair = bound is None or (isinstance(bound, (list, tuple)) and len(bound) == 2 and all(map(_is_number, bound)))
    if not pair or (values["epsilon"] is None) != record["text"].startswith("no formal guarantee ("):
        raise ValueError("guarantee says something else in its text than in its numbers")
    values |= {"caveats": tuple(caveats), "reconstruction": bound and tuple(bound)}
    return Guarantee(**values)


@dataclass(frozen=True)
class Trained:
    """The training whose weights were attacked, and how good the model was at that round."""

    rounds: int
    defence: str
    test_loss: float | None = None
    test_accuracy: float | None = None

    @staticmethod
    def of(record: Any) -> Trained:
        """Read back from a row; a ValueError says what is wrong with it."""
        named = isinstance(record, Mapping) and type(record.get("defence")) is str
        if not named or type(record.get("rounds")) is not int:
            raise ValueError(f"trained should have rounds and defence; it is {record!r:.60}")
        if odd := [name for name in _TESTED if record.get(name) is not None and not _is_number(record[name])]:
            raise ValueError(f"trained.{odd[0]} should be a number or null")
        return Trained(record["rounds"], record["defence"], *(record.get(name) for name in _TESTED))

    def __str__(self) -> str:
        measured = {
            "test accuracy": None if self.test_accuracy is None else f"{self.test_accuracy:.1%}",
            "test loss": None if self.test_loss is None else f"{self.test_loss:.4g}",
        }
        text = ", ".join(f"{name} {value}" for name, value in measured.items() if value is not None)
        defence = "without a defence" if self.defence == "none" else f"with {self.defence}"
        return f"{text or 'not tested'} (trained {defence})"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300


# --- the schema

Schema = dict[str, Any]


def _kind(kind: str | list[str], text: str, **more: Any) -> Schema:
    return {"type": kind, "description": text, **more}


def _per_example(kind: str | list[str], text: str) -> Schema:
    return _kind("array", f"{text} One for each example.", items={"type": kind})


def _object(text: str, properties: dict[str, Schema] | None = None, others: Any = True, **more: Any) -> Schema:
    return _kind("object", text, properties=properties or {}, additionalProperties=others, **more)


NUMBER = ["number", "null"]
COUNT: Schema = {"type": "integer", "minimum": 0}


def _named(required: Callable[[type[Kind]], list[str]], more: Sequence[str] = ()) -> list[str]:
    """The names of all kinds, each once."""
    return list(dict.fromkeys([name for kind in KINDS.values() for name in required(kind)] + list(more)))


CELL: dict[str, Schema] = {
    "version": _kind("integer", "Version of this schema.", const=ROW_VERSION),
    "cell": _kind("string", "Key of the cell; names arrays/KEY.safetensors.", pattern="^[0-9a-f]{16}$"),
    "status": _kind("string", "A failed cell has one row, without scores.", enum=["done", "failed"]),
    "control": _kind("boolean", "True for a cell that is only the positive control, outside the grid."),
    "attack": _kind("string", "Name of the attack with its settings, as given."),
    "defence": _kind("string", 'Name of the defence with its settings, as given; "none" for none.'),
    "form": _kind("string", "What the attacker knows of the defence; undefended if there is none.", enum=list(FORMS)),
    "kind": _kind(
        "string", "Kind of the private data x: it decides which scores and hits there are.", enum=list(KINDS)
    ),
    "round": _kind("integer", "Rounds of training before the attacked one.", minimum=0),
    "seed": _kind("integer", "Seed of the attack's starts and of the clients' noise."),
    "examples": _kind("integer", "Examples in the attacked update.", minimum=1),
    "targets": _kind("integer", "Targets of the cell.", minimum=1),
}
TARGET: dict[str, Schema] = {
    "target": _kind(["integer", "null"], "Index of this target, from 0; null for a failed cell."),
    "observation": _kind("string", "Key of the target's observation."),
    "knows": _kind("string", 'The threat model, such as "C (training details)".'),
}
SCORES: dict[str, Schema] = {
    "scores": _object(
        "How close the reconstructions are, by the measures of the kind. lpips only if the audit asked for it.",
        {
            **{name: _per_example(NUMBER, "Null if it is not finite.") for name in _named(scores_required, OPTIONAL)},
            "rank": _per_example(NUMBER, "Rank of the private example in the gallery; 1 means re-identified."),
        },
        required=["rank"],
    ),
    "gallery_size": _per_example("integer", "The chance of rank 1 is one over it."),
    "hits": _object(
        "Which thresholds of the kind were passed; recovered: those that the kind asks for, and rank1, together.",
        {name: _per_example("boolean", "Passed?") for name in _named(hits_required)},
        required=["rank1", "recovered"],
    ),
    "assignment": _per_example("integer", "Which reconstruction was matched to each private example."),
    "labels": _object("Accuracy of the labels, such as multiset_accuracy; empty if there are none.",
                      others={"type": NUMBER}),
    "drawn": _object("Scores of further private fields by their kinds, such as a regression's y, a mask, or the step "
                     'and the noise that a client drew: {"t": {"right", "off_by"}, "noise": {"cosine"}}.'),
    "baselines": _object(
        "The same scores without the update: guesses of the kind (mid-grey, mean image), nearest other; and for the "
        "same attack on an unrelated update, with rank1 and recovered.",
        others={"type": "object", "additionalProperties": {"type": "array"}},
    ),
}  # fmt: skip
SEARCH: dict[str, Schema] = {
    "match": _kind(NUMBER, "Distance of the gradients at the end, for the chosen restart."),
    "match_start": _kind(NUMBER, "The same before the first step."),
    "objective": _kind(NUMBER, "Match plus priors, for the chosen restart."),
    "restart": _kind("integer", "Index of the chosen restart.", minimum=0),
    "diverged": _kind("boolean", "True if a value was not finite."),
    "converged": _kind(
        "boolean", "Did the search work as an optimiser (checks.py)? If not, its failure shows nothing."
    ),
    "checks": _kind(
        "array",
        "Findings of the checks.",
        items=_object(
            "One finding.",
            {
                **{name: {"type": "string"} for name in ("name", "text", "fix")},
                "severity": {"enum": ["error", "warning", "note"]},
            },
            required=["name", "severity", "text", "fix"],
        ),
    ),
    "tried": _kind(
        "array",
        "For `auto` only: its members, the form each assumed, and whether it ran, was left out, refused or stopped.",
        items=_object("One member.", {name: {"type": "string"} for name in ("member", "attack", "form", "outcome")}),
    ),
    "analyses": _object("Numbers about the target, by name.", others={"type": NUMBER}),
    "seconds": _kind("number", "Time of the cell divided by its targets.", minimum=0),
}
PROVED: dict[str, Schema] = {
    "certificate": {
        **_object(
            "What the update determines at the reconstruction, found without the truth: verdict, a reason, counts, and "
            "numbers or null.",
            {
                "verdict": _kind("string", "determined, determined up to k dimensions, or not determined."),
                "reason": _kind("string", "One sentence."),
                **dict.fromkeys(_COUNTS, COUNT),
                **{name: {"type": NUMBER} for name in _MEASURES},
            },
        ),
        "type": ["object", "null"],
    },
    "spans": {
        **_object(
            "For attacks that solve for what layers saw: what the layers tell, found without the truth "
            "(identify/span_certificate.py).",
            {
                "examples": _kind("integer", "In the update.", minimum=1),
                "layer": _kind("string", "Whose inputs tell the examples apart; empty if none does."),
                "outside": _kind(
                    "array",
                    "How far what was found is from what the layers tell. One for each example told apart.",
                    items={"type": NUMBER},
                ),
                "proved": _kind("integer", "Examples that agree with the layers to rounding.", minimum=0),
                "layers": _kind(
                    "array",
                    "In the order of the forward pass.",
                    items=_object(
                        "One layer.",
                        {
                            "layer": {"type": "string"},
                            **dict.fromkeys(("rank", "rows"), {"type": ["integer", "null"]}),
                            **dict.fromkeys(("unexplained", "gap"), {"type": NUMBER}),
                        },
                        required=["layer"],
                    ),
                ),
                "reason": _kind("string", "Why some are not proved; may be empty."),
            },
            required=["examples", "layer", "outside", "proved", "layers", "reason"],
        ),
        "type": ["object", "null"],
    },
    "guarantee": {
        **_object("What the defence proves for a client of this audit: text, and the fields of gl.Guarantee."),
        "type": ["object", "null"],
    },
    "trained": {
        **_object(
            "The training whose weights were attacked, and how good that model was.",
            {
                "rounds": COUNT,
                "defence": {"type": "string"},
                "test_loss": {"type": NUMBER},
                "test_accuracy": {"type": NUMBER},
            },
            required=["rounds", "defence"],
        ),
        "type": ["object", "null"],
    },
}
FAILED: dict[str, Schema] = {
    "error": _kind("string", "For a failed cell: the error in one line."),
    "traceback": _kind("string", "For a failed cell: where it was raised."),
}
PARTS: dict[str, dict[str, Schema]] = {
    "The cell": CELL,
    "The target": TARGET,
    "How close it came": SCORES,
    "How the search went": SEARCH,
    "What is known besides": PROVED,
    "A failed cell": FAILED,
}
ROW: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": f"A line of rows.jsonl, version {ROW_VERSION}",
    "type": "object",
    "properties": {name: entry for part in PARTS.values() for name, entry in part.items()},
    "required": ["version", *REQUIRED],
    "if": {"properties": {"status": {"const": "done"}}},
    "then": {"required": list(SCORED)},
    "else": {"required": ["error"]},
    "allOf": [
        {
            "if": {"properties": {"status": {"const": "done"}, "kind": {"const": name}}},
            "then": {
                "properties": {
                    "scores": {"required": scores_required(kind)},
                    "hits": {"required": hits_required(kind)},
                }
            },
        }
        for name, kind in KINDS.items()
    ],
}


def page() -> str:
    """The entries as Markdown tables, and the schema itself."""
    parts = []
    for title, part in PARTS.items():
        lines = [f"| `{name}` | {_in_words(entry)} | {entry['description'].replace('|', chr(92) + '|')} |"
                 for name, entry in part.items()]  # fmt: skip
        parts.append("\n".join([f"## {title}", "", "| entry | kind | |", "|---|---|---|", *lines]))
    kinds = [
        f"| `{name}` | {', '.join(scores_required(kind))} | {', '.join(hits_required(kind))} | {kind.rule} |"
        for name, kind in KINDS.items()
    ]
    head = ["## Scores of each kind", "", "| kind | scores | hits | recovered at rank 1 when |", "|---|---|---|---|"]
    parts.append("\n".join([*head, *kinds]))
    schema = f"## As JSON Schema\n\n```json\n{json.dumps(ROW, indent=1)}\n```"
    return "\n\n".join([*parts, schema]) + "\n"


def _in_words(entry: Schema) -> str:
    """The kind of an entry in words."""
    words = {"array": "list", "integer": "whole number", "string": "text", "boolean": "true or false"}
    kinds = [entry["type"]] if isinstance(entry["type"], str) else entry["type"]
    text = " or ".join(words.get(kind, kind) for kind in kinds)
    return f"{text}: {', '.join(map(str, entry['enum']))}" if "enum" in entry else text
