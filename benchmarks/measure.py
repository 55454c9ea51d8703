"""Measure the speed of the engine on this machine: everything, or the sections that --only names.

Sections are measured in the order in which `--only` names them, networks and lanes in that of their options. Rows are
written as they come, so that a run that is stopped keeps what it has. Exit code 1: a ratio fell; 2: it could not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import options
from benchmarks.speed import regression, suite
from benchmarks.speed.networks import NETWORKS


def parser() -> argparse.ArgumentParser:
    """The options of `measure`."""
    words = options.parser(__doc__)
    words.epilog = "Other commands: engine, peers, compare; each has --help."
    words.add_argument("--only", help=f"some of {','.join(suite.SECTIONS)}; not given: all of them")
    words.add_argument("--networks", help=f"some of {','.join(NETWORKS)}; not given: all of them")
    words.add_argument("--lanes", help="reconstructions solved together; not given: 1,8,32,128,512")
    words.add_argument("--precision", help="fast, strict, double; not given: fast,strict, on a CPU strict")
    words.add_argument("--seconds", type=float, help="how long to measure each")
    words.add_argument("--steps", type=int, help="steps of an attack that is run to its end (quality)")
    words.add_argument("--quick", action="store_true", help="LeNet alone, and briefly: does it run?")
    words.add_argument("--add", action="store_true", help="keep what is in --out; rows measured again are replaced")
    words.add_argument("--against", type=Path, help="a stored result of this machine: exit code 1 where a ratio fell")
    return words


def plan_of(given: argparse.Namespace) -> suite.Plan:
    """The device's plan, with what the options change."""
    plan = suite.Plan.of(given.device, quick=given.quick)
    if given.networks is not None:
        chosen = options.names(given.networks, NETWORKS, "network")
        classifiers = tuple(name for name in chosen if name != "unet")
        planned = tuple(case for case in plan.searched if case[0] in chosen)
        others = tuple((name, "ig") for name in classifiers if name not in dict(planned))
        plan = replace(plan, networks=chosen, searched=planned + others, peer_networks=classifiers)
    if given.lanes is not None:
        lanes = options.numbers(given.lanes)
        plan = replace(plan, lanes=lanes, peer_lanes=lanes)
    if given.precision is not None:
        plan = replace(plan, precisions=options.names(given.precision, options.PRECISIONS, "precision"))
    return replace(plan, seconds=given.seconds or plan.seconds, steps=given.steps or plan.steps)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a line for every row, and return the exit code."""
    accepted = parser()
    given = accepted.parse_args(words)
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        plan = plan_of(given)
        only = () if given.only is None else options.names(given.only, suite.SECTIONS, "section")
    except ValueError as problem:
        accepted.error(str(problem))
    stored = None if given.against is None else json.loads(given.against.read_text(encoding="utf-8"))
    before = None
    if given.add and given.out is not None and given.out.is_file():
        before = json.loads(given.out.read_text(encoding="utf-8"))
    show = lambda section, row: print(suite.format_row(section, row), flush=True)  # noqa: E731
    result = suite.measure(plan, only, given.out, show, before)
    for section, why in result["left_out"].items():
        print(f"{section}: left out. {why}", file=sys.stderr)
    if result["failed"]:
        print("; ".join(f"{section}: {why}" for section, why in result["failed"].items()), file=sys.stderr)
        return 2
    return 0 if stored is None else judged(result, stored, plan)


def judged(result: dict[str, Any], stored: dict[str, Any], plan: suite.Plan) -> int:
    """Print the ratios that fell; the exit code."""
    try:
        slower = suite.fallen(result, stored, plan)
    except regression.OtherMachine as problem:
        print(problem, file=sys.stderr)
        return 2
    for one in slower:
        print(f"slower: {one}")
    count = regression.compared(result, stored)
    if not count:
        print("The stored result shares no measurement with this run: choose the same networks and lanes.")
        return 2
    print(f"{count} ratios compared, {len(slower)} fell by more than 15 % twice.")
    return int(bool(slower))
