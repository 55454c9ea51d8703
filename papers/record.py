"""What every run.py does beside measuring: options, rows as they come, bounds, and the lines of `results.csv`."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from results import add, find, steps_of, tidy

from gradleak.core.environment import describe
from gradleak.generators import Card, Generator, read
from gradleak.metrics.perceptual import LPIPS, WeightsMissing

Row = TypeVar("Row")


def arguments(description: str, **settings: Any) -> argparse.Namespace:
    """A command line with one option per setting, of the type of its default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in settings.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--out", type=Path, help="table (CSV) that gets the figures: papers/NAME/results.csv")
    parser.add_argument("--name", default="mine", help="name of this run in the table")
    return parser.parse_args()


def row_by_row(
    options: argparse.Namespace,
    rows: Mapping[str, Row],
    measure: Callable[[Row], dict[str, Any]],
    told: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """The rows whose name `only` finds, until `budget` seconds are spent; each is told, and written, as it comes."""
    began, figures = time.perf_counter(), dict[str, Any]()
    for name, row in rows.items():
        if not re.search(options.only, name):
            continue
        started = time.perf_counter()
        if started - began > options.budget:
            print(f"Out of time before {name}.")
            break
        found = without_infinities(measure(row))
        figures[name] = {"seconds": time.perf_counter() - started, **found}  # a row may have seconds of its own
        print(f"[{time.perf_counter() - began:.0f}s] {name}: {told(figures[name])}", flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.with_suffix(".part.json").write_text(json.dumps(figures, indent=1))
    return figures


def effort_arguments(description: str, kind: Any) -> argparse.Namespace:
    """A command line for rows that are measured with an effort: its fields, which rows, and for how long."""
    return arguments(description, only="", budget=600, **{field.name: field.default for field in fields(kind)})


def with_effort(
    options: argparse.Namespace, kind: Any, rows: Mapping[str, Any], told: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """`row_by_row` for rows that have `measure(effort)`; the effort is made of the options, its device settled."""
    effort = kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
    effort = replace(effort, device=str(effort.engine.where))
    return row_by_row(options, rows, lambda row: row.measure(effort), told)


def reproduce(
    description: str,
    kind: Any,
    rows: Mapping[str, Any],
    told: Callable[[dict[str, Any]], str],
    expected: Path,
    small: Mapping[str, Any] | None = None,
) -> None:
    """What a paper's run.py does: read the options, measure the rows, record them.

    small: options that `--small` changes where nothing else was said.
    """
    options = effort_arguments(description, kind)
    if small is not None and options.small:
        for name, value in small.items():
            if getattr(options, name) == getattr(kind, name):
                setattr(options, name, value)
    record(options, expected, with_effort(options, kind, rows, told))


@cache
def _perceptual(device: str) -> LPIPS | str:
    """LPIPS-VGG, or why there is none."""
    try:
        return LPIPS("vgg").to(device)
    except WeightsMissing as problem:
        return str(problem).splitlines()[0]


def lpips_of(effort: Any) -> LPIPS | None:
    """LPIPS-VGG, where the effort asks for it and its weights are found."""
    found = _perceptual(str(effort.engine.where)) if effort.lpips else None
    return found if isinstance(found, LPIPS) else None


def lpips_note(effort: Any, height: int, width: int) -> str:
    """How LPIPS was measured on images of this size, or why it was not."""
    found = _perceptual(str(effort.engine.where)) if effort.lpips else "switched off"
    return found.note(height, width) if isinstance(found, LPIPS) else f"not measured: {found}"


@cache
def prior_of(path: str) -> tuple[Generator, Card]:
    """The generator of a file, and what it was trained on."""
    return read(path)


def without_infinities(value: Any) -> Any:
    """JSON has neither infinities nor NaN: they become none."""
    if isinstance(value, dict):
        return {name: without_infinities(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(values: torch.Tensor) -> dict[str, float]:
    """Of one number per image: mean, median, extremes, and how many there are."""
    values = values.double().flatten()
    return {
        "images": values.numel(),
        "mean": values.mean().item(),
        "std": values.std(correction=min(1, values.numel() - 1)).item(),
        "median": values.quantile(0.5).item(),
        "lowest": values.min().item(),
        "highest": values.max().item(),
    }


def record(options: argparse.Namespace, expected: Path, figures: dict[str, Any]) -> None:
    """Print the figures beside what is expected of them and write them down. Exits with 1 where one does not hold."""
    environment = describe()
    # A copy of the tree on another machine has no git: the commit can be handed over.
    environment["git"] = environment["git"] or {"commit": os.environ.get("GRADLEAK_COMMIT"), "dirty": None}
    environment["command"] = shlex.join(["python", f"papers/{expected.parent.name}/run.py", *sys.argv[1:]])
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "name")}
    stored = {"figures": without_infinities(figures), "settings": settings, "environment": environment}
    paper = expected.parent.name
    lines = tidy(paper, options.name, stored)
    failed = False
    for name, bound in json.loads(expected.read_text())["figures"].items():
        value = next((number for _, number in find(lines, paper, steps_of(name))), None)
        if value is None:  # a row left out, or out of time: neither holds nor fails
            print(f"absent {name}, wanted {bound}")
            continue
        holds = value >= bound["at_least"] if "at_least" in bound else value <= bound["at_most"]
        print(f"{'holds' if holds else 'FAILS'}  {name} = {value:.6g}, wanted {bound}")
        failed |= not holds
    if options.out is not None:
        add(options.out, lines)
        options.out.with_suffix(".part.json").unlink(missing_ok=True)  # what `row_by_row` kept in case it was cut short
    raise SystemExit(failed)
