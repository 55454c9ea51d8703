"""Figures of the source tree: how many parts, how they depend on each other, how large they are.

    python tools/house.py                                     this checkout, as a table
    python tools/house.py --root OTHER --json                 another checkout, as JSON
    python tools/house.py --before OTHER --tests junit.xml    two checkouts beside each other
    python tools/house.py --before benchmarks/results/house.json --out benchmarks/results/house.json

A unit is a file or folder directly under src/gradleak. An edge is an import of one unit by another, function-level
imports counted, those for type checkers only not. A knot is a set of units that import each other in a circle. A probe
is a line with `getattr` on a part of an attack. The tiny audit attacks two targets with three steps and writes its
report. --before takes a checkout or a file that --json or --out wrote.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PACKAGE = "gradleak"
MOST_LINES, MOST_PARAMETERS = 50, 8
PROBE = r"getattr\((self\.)?(stage|space|predict|prediction|match|prior|optimiser|part)"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMMAND = "python tools/house.py --before CHECKOUT --tests BEFORE.xml AFTER.xml --out benchmarks/results/house.json"

TARGETS = {
    "units": "at most 30",
    "edges": "under 110",
    "knots": "none",
    "functions over 8 parameters": "0",
    "probes of parts": "0",
    "README words": "under 900",
    "design.md words": "at most 2,500",
    "tracked MB": "at most 8",
    "skips": "at most 40",
    "test minutes": "at most 6",
}


# --- imports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    unit: str
    text: str
    tree: ast.Module


def modules_of(package: Path) -> list[Module]:
    """Every Python file, whether git knows it or not."""
    made = []
    for folder, _, names in os.walk(package):
        for file in (Path(folder, name) for name in names if name.endswith(".py")):
            parts, text = file.relative_to(package).parts, file.read_text(encoding="utf-8")
            made.append(Module(parts[0].removesuffix(".py"), text, ast.parse(text)))
    return made


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules of the package that a file imports anywhere, but under `if TYPE_CHECKING:`."""
    typing_only: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_only.update(id(inner) for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            whole = node.module != PACKAGE
            yield from [node.module] if whole else [f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(f"{PACKAGE}."))


def edges_of(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Of every unit: the units that it imports. `__init__` and `__main__` of the package are no units."""
    edges: dict[str, set[str]] = {module.unit: set() for module in modules}
    for name in ("__init__", "__main__"):
        edges.pop(name, None)
    for module in modules:
        if module.unit in edges:
            others = {name.split(".")[1] for name in imported(module.tree) if "." in name}
            edges[module.unit] |= {other for other in others if other in edges and other != module.unit}
    return edges


def knots_of(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components of more than one unit, the largest first."""
    reached = {unit: _reached(edges, unit) for unit in edges}
    circles = {
        frozenset(other for other in reached[unit] if unit in reached[other]) for unit in edges if unit in reached[unit]
    }
    return sorted((sorted(circle) for circle in circles), key=lambda circle: (-len(circle), circle))


def _reached(edges: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """All units on a path of at least one edge from `start`."""
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        unit = waiting.pop()
        if unit not in found:
            found.add(unit)
            waiting.extend(edges[unit])
    return found


# --- size -------------------------------------------------------------------------------------------------------------


def code_lines(module: Module) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in quiet:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters, `self` and `cls` left out."""
    named = function.args
    own = bool(named.args) and named.args[0].arg in ("self", "cls")
    return len(named.posonlyargs) + len(named.args) + len(named.kwonlyargs) - own


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


# --- what git knows ---------------------------------------------------------------------------------------------------


def git(root: Path, *words: str) -> str:
    """What a git command prints; exit code 1 of `git grep` means that nothing was found."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{root} must be a git checkout: git {words[0]} says {done.stderr.strip()!r}")
    return done.stdout


def probes(root: Path) -> int:
    """Lines with `getattr` on a part."""
    return sum(int(line.rpartition(":")[2]) for line in git(root, "grep", "-cE", PROBE, "--", "src").splitlines())


def tracked_megabytes(root: Path) -> float:
    """Of all files that git tracks and that are there."""
    files = [root / name for name in git(root, "ls-files", "-z").split("\0") if name]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def words_of(file: Path) -> int | None:
    """Words of a text; None where there is none."""
    return len(file.read_text(encoding="utf-8").split()) if file.is_file() else None


# --- a tiny audit -----------------------------------------------------------------------------------------------------

# Two targets, one attack of three steps, on a CPU, from the task to the report; notes which functions are called.
AUDIT = """
import inspect, json, os, sys, threading
from pathlib import Path
import torch
import gradleak as gl

package, folder = str(Path(gl.__file__).resolve().parent) + os.sep, Path(sys.argv[1])
called = set()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
        if os.path.abspath(code.co_filename).startswith(package):
            called.add((code.co_filename, code.co_name, code.co_firstlineno))

torch.set_num_threads(1)
model = gl.models.lenet_zhu(shape=(3, 8, 8), classes=4, generator=torch.Generator().manual_seed(0))
like = (torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=like)
pixels = torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
images = gl.data.Images(pixels, torch.arange(24) % 4, 4, tuple("abcd"), "made up")
threading.setprofile(note)
sys.setprofile(note)
audit = gl.Audit(task, images, ["ig:steps=3"], targets=2, engine=gl.Engine(device="cpu"))
audit.run(folder / "run").report(folder / "report.html")
sys.setprofile(None)
print(json.dumps({"package": package, "files": len({file for file, _, _ in called}), "functions": len(called)}))
"""


def touched(root: Path) -> dict[str, int]:
    """Files and functions of the package that a tiny audit calls, lambdas and module bodies left out."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", AUDIT, folder]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"The tiny audit of {root} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if Path(found.pop("package")) != (root / "src" / PACKAGE).resolve():
        raise SystemExit(f"The tiny audit used another package than that of {root}.")
    return {f"{name} touched by a tiny audit": count for name, count in found.items()}


# --- tests ------------------------------------------------------------------------------------------------------------


def tests_of(file: Path) -> dict[str, float]:
    """Tests, skips and minutes of one run of pytest, from its JUnit file or the last line that it printed."""
    text = file.read_text(encoding="utf-8")
    if text.lstrip().startswith("<"):
        suites = list(ElementTree.fromstring(text).iter("testsuite"))
        total = lambda name: sum(float(suite.get(name, 0)) for suite in suites)  # noqa: E731
        return {"tests": int(total("tests")), "skips": int(total("skipped")), "test minutes": total("time") / 60}
    ends = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*) in ([\d.]+)s", text, re.MULTILINE)
    if not ends:
        raise SystemExit(f"{file} is neither a JUnit file nor the output of pytest with its last line.")
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", ends[-1][0])}
    run = sum(counts.get(what, 0) for what in ("passed", "failed", "skipped", "error", "errors", "xfailed", "xpassed"))
    return {"tests": run, "skips": counts.get("skipped", 0), "test minutes": float(ends[-1][1]) / 60}


# --- all of it --------------------------------------------------------------------------------------------------------


def figures_of(root: Path, *, audit: bool = True, tests: Path | None = None) -> dict[str, Any]:
    """All figures of one checkout, by name."""
    package = root / "src" / PACKAGE
    if not package.is_dir():
        raise SystemExit(f"{root} is no checkout of this project: it has no folder src/{PACKAGE}.")
    modules = modules_of(package)
    edges = edges_of(modules)
    functions = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, FUNCTIONS)]
    figures: dict[str, Any] = {
        "commit": git(root, "rev-parse", "HEAD").strip()[:12],
        "units": len(edges),
        "edges": sum(len(others) for others in edges.values()),
        "knots": [len(knot) for knot in knots_of(edges)],
        "code lines": sum(code_lines(module) for module in modules),
        "total lines": sum(len(module.text.splitlines()) for module in modules),
        "functions": len(functions),
        "functions over 50 lines": sum(length(function) > MOST_LINES for function in functions),
        "functions over 8 parameters": sum(parameters(function) > MOST_PARAMETERS for function in functions),
        "probes of parts": probes(root),
    }
    figures |= touched(root) if audit else {}
    figures |= {"README words": words_of(root / "README.md"), "design.md words": words_of(root / "docs" / "design.md")}
    figures["tracked MB"] = round(tracked_megabytes(root), 2)
    return figures | ({} if tests is None else tests_of(tests))


def table(figures: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """A line for every figure: before where there is one, now, and what is wanted."""
    names = list(dict.fromkeys([*(before or {}), *figures]))
    columns = [("before", before)] if before is not None else []
    columns += [("now", figures)]
    lines = [f"{'':<34}" + "".join(f"{title:>16}" for title, _ in columns) + "  wanted"]
    for name in names:
        cells = "".join(f"{_text(values.get(name)):>16}" for _, values in columns if values is not None)
        lines.append(f"{name:<34}{cells}  {TARGETS.get(name, '')}".rstrip())
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def stored(file: Path) -> dict[str, Any]:
    """The figures before, from a file that --json or --out wrote."""
    held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    found: dict[str, Any] = held.get("before", held)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=here, help="the checkout (default: this one)")
    parser.add_argument("--before", type=Path, help="another checkout, or its figures as JSON")
    parser.add_argument("--tests", type=Path, nargs="+", help="JUnit file or output of pytest; two: before and now")
    parser.add_argument("--no-audit", action="store_true", help="leave the tiny audit out (it needs torch)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write before and now as JSON")
    given = parser.parse_args()
    runs: list[Path] = given.tests or []
    if len(runs) > 1 + (given.before is not None):
        parser.error(f"--tests takes a file for each checkout, two at most with --before; given {len(runs)}.")
    audit = not given.no_audit
    before = None
    if given.before is not None:
        tests = runs[0] if len(runs) == 2 else None
        if given.before.is_dir():
            before = figures_of(given.before.resolve(), audit=audit, tests=tests)
        else:
            before = stored(given.before) | ({} if tests is None else tests_of(tests))
    figures = figures_of(given.root.resolve(), audit=audit, tests=runs[-1] if runs else None)
    whole = {"command": COMMAND, "before": before, "after": figures}
    if given.out is not None:
        given.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if given.json:
        print(json.dumps(figures if before is None else whole, indent=1))
    else:
        print(table(figures, before))


if __name__ == "__main__":
    main()
