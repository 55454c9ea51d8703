"""`gradleak check`: can this model be attacked as it stands, and by which attacks?"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.formatting import counted
from gradleak.cli.options import DataOptions
from gradleak.cli.root import CROSSED
from gradleak.core.settings import takes

if TYPE_CHECKING:
    from gradleak.audit.preflight import Preflight
    from gradleak.identify.ledger import Entry
    from gradleak.scenario.task import Task

ROWS, WIDTH = 8, 110  # of the table of layers; of its sentence


@dataclass(frozen=True)
class CheckOptions:
    """The options of `gradleak check`."""

    reference: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A Task or a model's name; FILE.py alone means FILE.py:task.")
    ]
    data: DataOptions = DataOptions()
    examples: Annotated[int, typer.Option(min=1, help="Examples of a client in a round, as audit takes them.")] = 1
    layers: Annotated[bool, typer.Option("--layers", help="Every linear map, not only the first that tell.")] = False


@takes(CheckOptions)
def check(options: CheckOptions) -> None:
    """Can this model be attacked as it stands? Every problem with a fix, and every attack; exit code 1 if refused."""
    from gradleak.audit.preflight import preflight
    from gradleak.cli import loading

    examples = options.data.load() if options.data.data else None
    task = loading.task(options.reference) if examples is None else loading.task_for(options.reference, examples)
    batch = None if examples is None else loading.few_examples(task, examples)
    result = preflight(task, batch=batch, examples=options.examples)
    for line in (*_fields(task), "", *_problems(result), *_spans(result, options), *_attacks(result)):
        typer.echo(line)
    errors, findings = len(result.errors), len(result.examination.problems)
    summary = f"{counted(findings, 'finding')}, {counted(errors, 'error')}"
    typer.echo(f"{options.reference}: {summary if findings else 'no problems found'}.")
    if not result.passed:
        raise typer.Exit(CROSSED)


def _fields(task: Task) -> list[str]:
    """What clients hold, a line for each field."""
    lines, width = [], max(map(len, task.fields), default=0) + 2
    for name, field in task.fields.items():
        values = f"{field.classes} values" if field.classes is not None else _bounds(field.bounds, field.bounded)
        known = ", known to the server" if field.public else ""
        lines.append(f"{name:<{width}}{field.kind.name} {field.shape or 'of one number'}, {values}{known}")
    return lines


def _bounds(bounds: tuple[Any, ...], bounded: bool) -> str:
    return f"bounds {bounds}" if bounded and len(bounds) == 2 else "bounds by column" if bounded else "unbounded"


def _problems(result: Preflight) -> list[str]:
    return [f"{each.severity:8}{each.what}\n{'':8}-> {each.fix}" for each in result.examination.problems]


def _spans(result: Preflight, options: CheckOptions) -> list[str]:
    """What layers tell of their inputs: a sentence, and a table with those that tell most examples first."""
    if result.spans is None:
        return []
    most = _tokens if result.spans.tokens else _examples
    telling = sorted((each for each in result.spans.entries if most(each)), key=lambda each: -most(each))
    silent = [each for each in result.spans.entries if not most(each)]
    shown = [*telling, *silent] if options.layers else telling[:ROWS]
    lines = ["", *textwrap.wrap(result.spans.headline, WIDTH)]
    if not shown:
        return lines
    width = max(len(each.name) for each in shown) + 2
    head = f"{'layer':<{width}}{'places':>8}{'outputs':>9}{'inputs':>8}{'equations':>11}  tells"
    table = []
    for each in shown:
        sizes = f"{each.places:>8}{each.outputs:>9}{each.inputs:>8}{each.equations(options.examples):>11}"
        table.append(f"{each.name:<{width}}{sizes}  {_tells(each, most(each), result.spans.tokens)}")
    left = len(result.spans.entries) - len(shown)
    return [*lines, "", head, *table, *([f"and {counted(left, 'more layer')} (--layers)"] if left else [])]


def _examples(entry: Entry) -> int:
    """The most examples that it tells."""
    return entry.most


def _tokens(entry: Entry) -> int:
    """The most tokens that it tells, in texts of any length."""
    return 0 if entry.kind == "embedding" else entry.limit


def _tells(entry: Entry, most: int, tokens: int | None) -> str:
    """How many examples, or tokens of texts of so many, or why none."""
    if most:
        unit = "" if tokens is None else " tokens" if entry.places >= tokens else " rows of whole texts"
        return f"up to {most}{unit}" + (f", differences within the {entry.centred}" if entry.centred else "")
    if entry.kind == "embedding" and not entry.reason:
        return "which values occur"
    return f"none: {entry.reason or 'too many rows'}"


def _attacks(result: Preflight) -> list[str]:
    """A line for each attack, those that run first."""
    if not result.lines:
        return []
    order = sorted(result.lines, key=lambda line: ("runs", "needs", "unsupported").index(line.status))
    width = max(len(line.attack) for line in order) + 2
    return ["", *(f"{line.attack:<{width}}{line}" for line in order), ""]
