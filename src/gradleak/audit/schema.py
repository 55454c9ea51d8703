"""The schema of a line of `rows.jsonl` (JSON Schema, draft 2020-12), from which docs/rows.md is written.

Version. Entries may be added within a version: whoever reads rows must not mind ones that it does not know. An entry
that goes away or means something else makes a new version, and a step in `rows.UPGRADES` from the one before.
"""

from __future__ import annotations

from typing import Any

from gradleak.audit.rows import FORMS, REQUIRED, ROW_VERSION, SCORED

Schema = dict[str, Any]


def _kind(kind: str | list[str], told: str, **more: Any) -> Schema:
    return {"type": kind, "description": told, **more}


def _per_example(kind: str | list[str], told: str) -> Schema:
    return _kind("array", f"{told} One for each example.", items={"type": kind})


def _object(told: str, properties: dict[str, Schema] | None = None, others: Any = True, **more: Any) -> Schema:
    return _kind("object", told, properties=properties or {}, additionalProperties=others, **more)


NUMBER = ["number", "null"]
COUNT: Schema = {"type": "integer", "minimum": 0}
MEASURES = ("psnr", "ssim", "mse")
HITS = ("ssim>0.5", "psnr>18", "psnr>20", "rank1", "recovered")

CELL: dict[str, Schema] = {
    "version": _kind("integer", "Of this schema.", const=ROW_VERSION),
    "cell": _kind("string", "Key of the cell; names arrays/KEY.safetensors.", pattern="^[0-9a-f]{16}$"),
    "status": _kind("string", "A failed cell has one row, without scores.", enum=["done", "failed"]),
    "control": _kind("boolean", "Is the cell only the positive control, and not part of the grid?"),
    "attack": _kind("string", "As it was asked for, with its settings."),
    "defence": _kind("string", 'As it was asked for; "none" for none.'),
    "form": _kind("string", "What the attacker knows of the defence; without one, undefended.", enum=list(FORMS)),
    "round": _kind("integer", "Of training, before the attacked one.", minimum=0),
    "seed": _kind("integer", "Of the attack's starts and of the clients' noise."),
    "examples": _kind("integer", "In the attacked update.", minimum=1),
    "targets": _kind("integer", "That the cell has.", minimum=1),
}
TARGET: dict[str, Schema] = {
    "target": _kind(["integer", "null"], "The number of this one, from 0; null of a failed cell."),
    "observation": _kind("string", "Key of its observation."),
    "knows": _kind("string", 'The threat model, such as "C (training details)".'),
}
SCORES: dict[str, Schema] = {
    "scores": _object(
        "How close the reconstructions are. lpips where it was asked for.",
        {
            **{name: _per_example(NUMBER, "Null where it is not finite.") for name in (*MEASURES, "lpips")},
            "rank": _per_example(NUMBER, "Of the private image in the gallery, by likeness; 1 is re-identified."),
        },
        required=[*MEASURES, "rank"],
    ),
    "gallery_size": _per_example("integer", "The chance of rank 1 is one over it."),
    "hits": _object(
        "Which thresholds were passed; recovered is ssim>0.5, psnr>18 and rank1 together.",
        {name: _per_example("boolean", "Passed?") for name in HITS},
        required=list(HITS),
    ),
    "assignment": _per_example("integer", "Which reconstruction was matched to each private example."),
    "labels": _object("Accuracy of the labels, such as multiset_accuracy; empty where there are none.",
                      others={"type": NUMBER}),
    "drawn": _object('Of fields that a client drew: {"t": {"right", "off_by"}, "noise": {"cosine"}}.'),
    "baselines": _object(
        "The same scores without the update: mid-grey, mean image, nearest other; and of an unrelated update by the "
        "same attack, with rank1 and recovered.",
        others={"type": "object", "additionalProperties": {"type": "array"}},
    ),
}  # fmt: skip
SEARCH: dict[str, Schema] = {
    "match": _kind(NUMBER, "Distance of the gradients, of the chosen restart."),
    "match_start": _kind(NUMBER, "The same before the first step."),
    "objective": _kind(NUMBER, "With the priors, of the chosen restart."),
    "restart": _kind("integer", "The chosen one.", minimum=0),
    "diverged": _kind("boolean", "Was something not finite?"),
    "converged": _kind("boolean", "Did it work as an optimiser (checks.py)? If not, its failure shows nothing."),
    "checks": _kind(
        "array",
        "What was odd.",
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
        "Of `auto` alone: its members, what each took the defence for, and whether it ran, was left out, refused or "
        "stopped.",
        items=_object("One member.", {name: {"type": "string"} for name in ("member", "attack", "form", "outcome")}),
    ),
    "analyses": _object("Numbers about the target, by name.", others={"type": NUMBER}),
    "seconds": _kind("number", "Of the cell, divided by its targets.", minimum=0),
}
PROVED: dict[str, Schema] = {
    "certificate": {
        **_object(
            "What the update determines at the reconstruction, found without the truth: verdict, a reason, counts, and "
            "numbers or null.",
            {
                "verdict": _kind("string", "determined, determined up to k dimensions, or not determined."),
                "reason": _kind("string", "One sentence."),
                **dict.fromkeys(("unknowns", "equations", "rank", "null"), COUNT),
                **{
                    name: {"type": NUMBER}
                    for name in ("tolerance", "residual", "rounding", "share", "shift", "largest", "smallest", "floor")
                },
            },
        ),
        "type": ["object", "null"],
    },
    "guarantee": {
        **_object("What is proved of the defence for a client of this audit: text, and the fields of gl.Guarantee."),
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
    "error": _kind("string", "Of a failed cell: what was raised, in one line."),
    "traceback": _kind("string", "Of a failed cell: where."),
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
    "properties": {name: held for part in PARTS.values() for name, held in part.items()},
    "required": ["version", *REQUIRED],
    "if": {"properties": {"status": {"const": "done"}}},
    "then": {"required": list(SCORED)},
    "else": {"required": ["error"]},
}


def page() -> str:
    """The entries as Markdown tables, and the schema itself."""
    import json

    parts = []
    for title, part in PARTS.items():
        lines = [f"| `{name}` | {_named(held)} | {held['description'].replace('|', chr(92) + '|')} |"
                 for name, held in part.items()]  # fmt: skip
        parts.append("\n".join([f"## {title}", "", "| entry | kind | |", "|---|---|---|", *lines]))
    told = f"## As JSON Schema\n\n```json\n{json.dumps(ROW, indent=1)}\n```"
    return "\n\n".join([*parts, told]) + "\n"


def _named(held: Schema) -> str:
    """A kind in words."""
    words = {"array": "list", "integer": "whole number", "string": "text", "boolean": "true or false"}
    kinds = [held["type"]] if isinstance(held["type"], str) else held["type"]
    told = " or ".join(words.get(kind, kind) for kind in kinds)
    return f"{told}: {', '.join(map(str, held['enum']))}" if "enum" in held else told
