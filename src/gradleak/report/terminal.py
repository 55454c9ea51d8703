"""What a terminal shows of an audit: the plan before it starts, and afterwards tables that fit its width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, TypeAlias

from gradleak.audit.formats import Grid, about_overview, entries, notes, overview, text_of
from gradleak.report.grid import plural

if TYPE_CHECKING:
    from gradleak.audit import Audit
    from gradleak.audit.cells import Cell
    from gradleak.audit.result import AuditResult

FIRST, LAST = (
    ("seconds", "match", "round", "B", "baseline", "labels"),
    ("converged", "rank 1 (chance)", "targets", "form"),
)
"""Columns that a narrow terminal leaves out; between the two, all measures but the headline."""


Branch: TypeAlias = "tuple[str, str | Callable[[], str], list[Branch]]"
"""A name, its text (or a function that gives it), and branches below it."""


def plan(audit: Audit, folder: Path, cost: Callable[[], str]) -> Iterator[str]:
    """The plan of an audit as a tree, line by line; the cost, which takes a while to measure, comes last."""
    yield "Audit (a trial: its findings do not count)" if audit.trial else "Audit"
    cells = audit.cells()
    control = ", one of them only the positive control" if any(cell.control for cell in cells) else ""
    yield from drawn(
        [
            ("threat model", _threat(audit, cells), []),
            ("federation", _federation(audit), []),
            ("grid", f"{plural(len(cells), 'cell')}{control}", _grid(audit, cells)),
            ("into", f"{folder}; Ctrl-C is safe: the same command resumes", []),
            ("cost", cost, []),
        ]
    )


def drawn(branches: Sequence[Branch], indent: str = "") -> Iterator[str]:
    """A tree in plain ASCII."""
    width = max((len(name) for name, _, _ in branches), default=0) + 2
    for place, (name, text, inner) in enumerate(branches):
        last = place == len(branches) - 1
        yield f"{indent}{'`' if last else '|'}- {name:<{width}}{text() if callable(text) else text}"
        yield from drawn(inner, indent + ("   " if last else "|  "))


def _threat(audit: Audit, cells: Sequence[Cell]) -> str:
    """The level, what the attacker knows, and what not."""
    further = {name: field for name, field in audit.task.fields.items() if name != "x"}
    fields = {"y": further["y"].kind.noun[1]} if "y" in further else {}
    fields |= {name: name for name in further if name != "y"}
    known = ["model", "loss", "number of examples", *(fields[name] for name in fields if name in audit.granted)]
    known += ([] if "recipe" in audit.withheld else ["recipe"]) + ([] if audit.generator is None else ["a generator"])
    hidden = ["data", *(word for name, word in fields.items() if name not in audit.granted)]
    level = " and ".join(sorted({cell.knows.level for cell in cells}))
    return f"a passive server, level {level}; knows {', '.join(known)}; not {', '.join(hidden)}"


def _federation(audit: Audit) -> str:
    federation, recipe = audit.federation, audit.federation.training
    examples = "all examples" if federation.examples is None else plural(federation.examples, "example")
    local = plural(recipe.epochs or recipe.steps or 1, "local epoch" if recipe.epochs else "local step")
    size = f" in batches of {recipe.batch_size}" if recipe.batch_size else ""
    rule = f"{type(recipe.optimiser).__name__}, learning rate {float(recipe.lr):g}"
    return f"{plural(federation.clients, 'client')}, {examples} of each in a round; {local}{size}, {rule}"


def _grid(audit: Audit, cells: Sequence[Cell]) -> list[Branch]:
    """The axes of the grid, from its cells."""
    inside = [cell for cell in cells if not cell.control]
    forms: dict[str, dict[str, None]] = {}
    for cell in inside:
        forms.setdefault(cell.defence_name, {})[cell.form] = None
    axes = {
        "attacks": [cell.attack_name for cell in inside],
        "defences": [name if name == "none" else f"{name} ({', '.join(known)})" for name, known in forms.items()],
        "rounds": [str(cell.round) for cell in inside],
        "seeds": [str(cell.seed) for cell in inside],
        "targets": [f"{audit.targets} in each cell, and {audit.unrelated} unrelated for comparison"],
    }
    return [(name, ", ".join(dict.fromkeys(values)), []) for name, values in axes.items()]


def fitted(result: AuditResult, width: int | None) -> str:
    """The table, without the columns that do not fit into `width` (None: a pipe), and a line that says so."""
    if width is None:
        return result.table()
    further = [measure.label for measure in result.kind.measures[1:] if measure.column]
    rows, left_out = _narrowed(entries(result.summaries), width, (*FIRST, *reversed(further), *LAST))
    parts = [text_of(rows)]
    if left_out:
        parts[0] += f"\n({left_out} more columns in a wider terminal, in a pipe and in the report)"
    if per_defence := overview(result.summaries):
        table = text_of(per_defence) if _width(per_defence) <= width else _listed(per_defence, width)
        parts += [table, fill(about_overview(result.summaries), width)]
    return "\n\n".join([*parts, *notes(result.summaries)])


def _narrowed(rows: Grid, width: int, dispensable: Sequence[str]) -> tuple[Grid, int]:
    """The table without as many dispensable columns as it takes, and their number."""
    left_out = 0
    for name in (each for each in dispensable if each in rows[0]):
        if _width(rows) <= width:
            break
        column = rows[0].index(name)
        rows = [[*row[:column], *row[column + 1 :]] for row in rows]
        left_out += 1
    return rows, left_out


def _listed(rows: Grid, width: int) -> str:
    """A paragraph for each line, if no column may be left out."""
    head, *lines = rows
    paragraphs = (f"{line[0]}: " + "; ".join(map("{} {}".format, head[1:], line[1:])) for line in lines)
    return "\n".join(fill(paragraph, width, subsequent_indent="    ") for paragraph in paragraphs)


def _width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2
