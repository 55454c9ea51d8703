"""Compare the speed of two source trees: images x iterations per second of lanes, turn by turn in one run.

    python -m benchmarks compare --before OTHER/src --after src --workloads lenet,convnet64,resnet18 --out speed.json

Every turn is a fresh process with the PYTHONPATH of its tree; which tree comes first alternates. The ratio is the
median over repeats of after / before within a repeat. Exit code 1: slower than --within allows; 2: it could not run.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.speed import timing

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("before", "after")
LANES = {
    "cuda": {"lenet": 1024, "convnet64": 208, "resnet18": 164},
    "cpu": {"lenet": 32, "convnet64": 4, "resnet18": 1},
}


class TurnFailed(RuntimeError):
    """A tree could not be measured."""


@dataclass(frozen=True)
class Turn:
    """What every process is told."""

    device: str
    precision: str
    seconds: float
    threads: int | None

    def run(self, source: Path, cases: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Measure one tree in a process of its own: what it says of itself, and a row for every case."""
        command = [sys.executable, "-m", "benchmarks.speed.lanes", "--cases", ",".join(cases)]
        command += ["--device", self.device, "--precision", self.precision, "--seconds", str(self.seconds)]
        command += [] if self.threads is None else ["--threads", str(self.threads)]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
        if done.returncode:
            raise TurnFailed(f"The lanes of {source} could not be measured:\n{done.stderr[-2000:]}")
        about, *rows = (json.loads(line) for line in done.stdout.splitlines())
        if Path(about["package"]).parent != source:
            raise TurnFailed(f"{source} was to be measured, but the package came from {about['package']}.")
        return about, rows


def commit_of(source: Path) -> str | None:
    """The commit of a tree, with a plus sign where files differ from it; None outside a repository or without git."""
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(source), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    done = subprocess.run(git, text=True, capture_output=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def cases_of(text: str, device: str) -> list[str]:
    """NAME[:LANES[:STEPS]],... with the lanes of the device where a workload names none."""
    from benchmarks.speed.networks import NETWORKS

    cases = []
    for case in text.split(","):
        name, *own = case.split(":")
        options.names(name, [network for network in NETWORKS if network != "unet"], "workload")
        cases.append(":".join([name, *(own or [str(LANES[device].get(name, 8))])]))
    return cases


def summary(turns: Mapping[str, Sequence[Mapping[str, Any]]], within: float) -> dict[str, Any]:
    """One workload: medians of both trees, the ratio after / before, and whether it is within the bound."""
    before, after = ([row["rate"] for row in turns[name]] for name in NAMES)
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    ratio = statistics.median(ratios)
    row = {name: turns["before"][0][name] for name in ("network", "lanes", "precision", "steps")}
    row |= {"before": statistics.median(before), "after": statistics.median(after), "ratio": ratio, "ratios": ratios}
    return row | {"rates": {"before": before, "after": after}, "holds": ratio >= 1 - within}


def measure(sources: Mapping[str, Path], cases: Sequence[str], turn: Turn, repeats: int) -> dict[str, Any]:
    """All turns: `about` the trees, and the rows of every case and tree in the order of repeats."""
    rows: list[dict[str, list[dict[str, Any]]]] = [{name: [] for name in NAMES} for _ in cases]
    about: dict[str, dict[str, Any]] = {}
    for number in range(repeats):
        for name in NAMES if number % 2 == 0 else reversed(NAMES):
            about[name], measured = turn.run(sources[name], cases)
            for case, row in zip(rows, measured, strict=True):
                case[name].append(row)
            # All later turns take as many steps as the first one chose.
            cases = [f"{row['network']}:{row['lanes']}:{row['steps']}" for row in measured]
            rates = ", ".join(f"{row['network']} {row['rate']:,.1f}" for row in measured)
            print(f"repeat {number + 1} of {repeats}, {name}: {rates}", file=sys.stderr, flush=True)
    return {"about": about, "rows": rows}


def main(words: Sequence[str] | None = None) -> int:
    """Measure both trees, print the result as JSON, and return the exit code."""
    accepted = options.parser(__doc__, "compare")
    add = accepted.add_argument
    add("--before", type=Path, required=True, help="folder that holds the package `gradleak` of another commit")
    add("--after", type=Path, default=ROOT / "src", help="the same of the tree to judge (default: src)")
    add("--workloads", default="lenet,convnet64,resnet18", help="NAME[:LANES[:STEPS]],...")
    add("--precision", help="fast, strict or double; not given: fast, on a CPU strict")
    add("--repeats", type=int, default=3, help="turns of each tree (default: 3)")
    add("--seconds", type=float, default=5.0, help="of one workload in one turn (default: 5)")
    add("--within", type=float, default=0.03, help="a ratio below 1 minus this is a failure (default: 0.03)")
    given = accepted.parse_args(words)
    sources = {"before": given.before.resolve(), "after": given.after.resolve()}
    for name, source in sources.items():
        if not (source / "gradleak" / "__init__.py").is_file():
            accepted.error(f"--{name} must be a folder with the package gradleak, such as PATH/src; given {source}.")
    if given.repeats < 1:
        accepted.error(f"--repeats must be at least 1; given {given.repeats}.")
    import gradleak as gl

    device = gl.Engine(device=given.device).where.type
    precision = given.precision or ("fast" if device == "cuda" else "strict")
    load = {"before": timing.load()}
    try:
        cases = cases_of(given.workloads, device)
        turn = Turn(given.device, precision, given.seconds, given.threads)
        measured = measure(sources, cases, turn, given.repeats)
    except (ValueError, TurnFailed) as problem:
        accepted.error(str(problem))
    rows = [summary(turns, given.within) for turns in measured["rows"]]
    about = {name: measured["about"][name] for name in NAMES}
    result = {
        "machine": {name: about["after"][name] for name in ("device", "torch", "clock")},
        "commits": {name: commit_of(source) for name, source in sources.items()},
        "load": {**load, "after": timing.load()},
        "within": given.within,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not all(row["holds"] for row in rows))
