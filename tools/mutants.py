"""Break the code on purpose, and count how often the tests notice.

    python tools/mutants.py map                        once: which tests run which line (a run of the whole suite)
    python tools/mutants.py run --sample 112 --jobs 2  break 112 places, as many in every area, two at a time
    python tools/mutants.py run --minutes 20           stop after 20 minutes; the next run goes on
    python tools/mutants.py again --also TESTS         break the places again that nobody noticed, with these tests too
    python tools/mutants.py show                       what was not noticed

Each mutant changes one expression of one file in a copy of the tree: a sign, a factor, an axis, a projection, a bound,
a comparison. Then the tests that run its line are run, those of its own file and the quickest first, until one fails. A
mutant that no test runs, or that all of them pass, survives. A test notices only what it passes without: those that
fail in the map are left out, and those that noticed something are run once more on the tree as it is. What `map` and
`run` learn is kept in .mutants/, and a run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gradleak"
HOME = ROOT / ".mutants"
# Modules and folders of the package. One that has moved is found by the end of its path, if only one ends so.
AREAS = {
    "engine": ["engine", "attack", "scenario/client", "scenario/rules", "scenario/task", "core"],
    "parts": ["parts"],
    "attacks": ["attacks"],
    "defences": ["defences", "scenario/defence", "scenario/accounting", "scenario/guarantee"],
    "metrics": ["metrics", "audit"],
    "analysis": ["identify", "curvature"],
    "secure": ["secure"],
    "federation": ["federation", "diffusion"],
}
MOST_TESTS, MOST_SECONDS = 150, 120.0  # for one mutant, by what the tests took in the map
PATIENCE = 4  # a mutant hangs when its tests take this many times as long as in the map, and a minute

# Mutants that change nothing a caller could see, by module and broken line, with the reason. They are counted apart.
EQUIVALENT = {
    (
        "secure/client",
        "directory = Directory(self.plan.binding, (1), tuple(self._directory.values())) if self._directory else None",
    ): "who sent the directory within a client's own state: nobody reads it, its entries are signed each by itself",
    (
        "parts/frozen",
        "with ThreadPoolExecutor((2)) as thread:",
    ): "one piece of work is handed to it, so a second thread never starts",
    (
        "scenario/accounting",
        "low, high = (NormalDist().inv_cdf(delta) + 1), 1 / (2 * z)",
    ): "the first end of a bracket, which the loop after it moves below the root: the same root up to rounding",
    (
        "core/recompute",
        "(torch.ones_like(leaf)) if tangent is None else tangent",
    ): "torch hands zeros for inputs that do not move, so this is never reached",
    (
        "identify/risk",
        "blank[name] = field.model(((0.5 - PIXEL_STD * noise)).clamp(0, 1).to(blank[name]))",
    ): "normal noise with its sign turned: another draw of the same law, at a point that belongs to nobody",
    (
        "defences/gradcam",
        "raw = F.relu(((alphas[name][..., None, None] * maps[name]).mean(1, keepdim=True)))  # (B, 1, h, w)",
    ): "the sum over a fixed number of channels; each map is divided by its largest value: the same up to rounding",
    (
        "parts/partial",
        "return values * (torch.ones_like(values)).scatter(0, order, first.to(values.dtype))",
    ): "the order names every place, so each one is written over",
}


# --- where it is ------------------------------------------------------------------------------------------------------


def located(name: str) -> Path:
    """The file or folder of a module of the package, such as `search` or `secure/client`, wherever it is now."""
    for path in (PACKAGE / name, PACKAGE / f"{name}.py"):
        if path.exists():
            return path
    end = Path(name).parts
    everything = [path for path in PACKAGE.rglob("*") if path.suffix == ".py" or path.is_dir()]
    found = [path for path in everything if path.relative_to(PACKAGE).with_suffix("").parts[-len(end) :] == end]
    if len(found) != 1:
        others = " and ".join(sorted(path.relative_to(ROOT).as_posix() for path in found)) or "no file or folder"
        raise SystemExit(
            f"tools/mutants.py names the module {name!r}; {others} has that name under src/gradleak. Name it in AREAS "
            "or EQUIVALENT by its path from there, without .py."
        )
    return found[0]


def files_of(area: str) -> list[Path]:
    """The Python files of an area, each once."""
    paths = [located(name) for name in AREAS[area]]
    return list(
        dict.fromkeys(file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path]))
    )


# --- what can be broken -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` at these places (line from 1, column from 0) of a file."""

    area: str
    file: str
    line: int
    start: int
    end: int
    kind: str
    old: str
    new: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.start} {self.kind}"

    def applied(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1].encode()  # columns of ast are bytes
        lines[self.line - 1] = (text[: self.start] + self.new.encode() + text[self.end :]).decode()
        return "".join(lines)


def swapped_sign(node: ast.AST) -> ast.expr | None:
    text = any(
        isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in ast.walk(node)
    )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and not text:
        return ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        return node.operand
    return None


def dropped_factor(node: ast.AST) -> ast.expr | None:
    return node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.Pow) else None


def other_axis(node: ast.AST) -> ast.expr | None:
    if not isinstance(node, ast.Call):
        return None
    for place, keyword in enumerate(node.keywords):
        value = keyword.value
        if keyword.arg == "dim" and isinstance(value, ast.Constant) and isinstance(value.value, int):
            other = ast.keyword("dim", ast.Constant(0 if value.value else 1))
            return ast.Call(node.func, node.args, [*node.keywords[:place], other, *node.keywords[place + 1 :]])
    return None


SKIPPED = {"clamp", "clamp_min", "clamp_max", "project", "abs", "sign", "sqrt", "square", "nan_to_num"}


def skipped_call(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SKIPPED:
        of_module = isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "tree", "math", "np")
        if of_module or node.func.attr == "project":
            return node.args[0] if node.args else None
        return node.func.value
    return None


def off_by_one(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 10:
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        close = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
        if type(node.ops[0]) in close:
            return ast.Compare(node.left, [close[type(node.ops[0])]()], node.comparators)
    return None


def turned_round(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        turned = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.NotEq,
                  ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
        if type(node.ops[0]) in turned:
            return ast.Compare(node.left, [turned[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    return None


OTHERS = {"min": "max", "max": "min", "argmin": "argmax", "argmax": "argmin", "mean": "sum", "sum": "mean"}
OTHERS |= {"zeros_like": "ones_like", "ones_like": "zeros_like", "exp": "log", "minimum": "maximum", "cos": "sin"}


def other_function(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OTHERS:
        return ast.Call(ast.Attribute(node.func.value, OTHERS[node.func.attr], ast.Load()), node.args, node.keywords)
    return None


KINDS: dict[str, Callable[[ast.AST], ast.expr | None]] = {
    "sign": swapped_sign,
    "factor": dropped_factor,
    "axis": other_axis,
    "skip": skipped_call,
    "off by one": off_by_one,
    "turned": turned_round,
    "function": other_function,
}


def sites(area: str, path: Path) -> Iterator[Mutant]:
    """Everything in a file that can be broken: expressions on one line, in code that computes."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in _computing(ast.parse(source)):
        if getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:  # type: ignore[attr-defined]
            continue
        for kind, change in KINDS.items():
            changed = change(node)
            if changed is None:
                continue
            start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
            old = lines[node.lineno - 1].encode()[start:end].decode()  # type: ignore[attr-defined]
            new = f"({ast.unparse(ast.fix_missing_locations(changed))})"
            if re.sub(r"[\s()]", "", old) != re.sub(r"[\s()]", "", new):
                file = path.relative_to(ROOT).as_posix()
                yield Mutant(area, file, node.lineno, start, end, kind, old, new)  # type: ignore[attr-defined]


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but types, defaults, decorators, messages of errors and of checks, and how things are shown."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef) and (node.name in ("__repr__", "__str__") or "Protocol" in node.name):
        return
    yield node
    if isinstance(node, ast.FunctionDef):
        children: list[ast.AST] = list(node.body)
    elif isinstance(node, ast.AnnAssign):
        children = []
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _computing(child)


def chosen(each: int, seed: int) -> list[Mutant]:
    """The same number from every area, of all kinds and files alike: kind first, then file, then place.

    Areas take turns, so that a run that stops early has seen all of them.
    """
    found: list[list[Mutant]] = []
    for area in AREAS:
        source = random.Random(f"{seed} {area}")
        everything = [mutant for file in files_of(area) for mutant in sites(area, file)]
        taken: dict[str, Mutant] = {}
        while len(taken) < min(each, len(everything)):
            kind = source.choice(sorted({mutant.kind for mutant in everything}))
            of_kind = [mutant for mutant in everything if mutant.kind == kind and mutant.key not in taken]
            if of_kind:
                file = source.choice(sorted({mutant.file for mutant in of_kind}))
                mutant = source.choice([mutant for mutant in of_kind if mutant.file == file])
                taken[mutant.key] = mutant
        found.append(list(taken.values()))
    return [mutant for turn in itertools.zip_longest(*found) for mutant in turn if mutant is not None]


# --- which tests run a line -------------------------------------------------------------------------------------------


def make_map(shuffle: str | None) -> None:
    """Run the suite once, noting for every line the tests that ran it, and how long each took.

    With `shuffle`, in the order of that seed: the run that makes the map then also says whether any order will do.
    """
    HOME.mkdir(exist_ok=True)
    workers = ["-n", "2", "--dist", "loadgroup"]
    command = [sys.executable, "-m", "pytest", *workers, "--cov=src/gradleak", "--cov-context=test", "--cov-report="]
    command += ["--durations=0", "--durations-min=0.001", "-p", "no:cacheprovider"]
    command += [] if shuffle is None else ["--shuffle", shuffle]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(HOME / "coverage")}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, check=False)
    (HOME / "durations.txt").write_text(done.stdout, encoding="utf-8")
    print(done.stdout[-300:])


def without_group(name: str) -> str:
    """The id of a test as pytest takes it: xdist writes the name of a group behind it."""
    return re.sub(r"@[^\[\]]+$", "", name)


def tests_of(mutant: Mutant, durations: dict[str, float], database: sqlite3.Connection) -> list[str]:
    """Tests that run the line: those of its own file first, then the quickest."""
    from coverage.numbits import numbits_to_nums

    rows = database.execute(
        "select context.context, line_bits.numbits from line_bits join file on file.id = line_bits.file_id "
        "join context on context.id = line_bits.context_id where file.path like ?",
        (f"%/{mutant.file}",),
    )
    held = [(without_group(name.partition("|")[0]), mutant.line in numbits_to_nums(bits)) for name, bits in rows]
    names = {name for name, own in held if name and own}
    if not names and ("", True) in held:  # it runs when the module is imported, so all that use the module may notice
        names = {name for name, _ in held if name}
    own = f"test_{Path(mutant.file).stem}"
    found = sorted(
        names - failed_in_map(), key=lambda name: (own not in name.partition("::")[0], durations.get(name, 1.0))
    )
    taken = itertools.accumulate(durations.get(name, 1.0) for name in found)
    return [name for name, seconds in zip(found, taken, strict=True) if seconds < MOST_SECONDS][:MOST_TESTS]


@cache
def failed_in_map() -> frozenset[str]:
    told = (HOME / "durations.txt").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", told, re.MULTILINE))


def measured() -> dict[str, float]:
    """Seconds of each test, from what `map` printed."""
    told = (HOME / "durations.txt").read_text(encoding="utf-8")
    lines = re.findall(r"^([\d.]+)s call +(\S.*)$", told, re.MULTILINE)
    return {without_group(name.strip()): float(seconds) for seconds, name in lines}


# --- breaking ---------------------------------------------------------------------------------------------------------


def tested(tree: Path, tests: list[str], limit: float, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *tests],
        cwd=tree,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )


def broken(mutant: Mutant, tests: list[str], limit: float, tree: Path) -> dict[str, object]:
    """Run the tests on a tree with this mutant in it."""
    if not tests:
        return {**asdict(mutant), "outcome": "survived", "why": "no test runs this line", "seconds": 0.0}
    place = tree / mutant.file
    whole = place.read_text(encoding="utf-8")
    place.write_text(changed := mutant.applied(whole), encoding="utf-8")
    line = changed.splitlines()[mutant.line - 1].strip()
    began = time.perf_counter()
    try:
        done = tested(tree, tests, limit, "-x")
        code, told = done.returncode, done.stdout
        outcome, by = ("survived", "") if code == 0 else ("noticed", _failure(told, tests))
    except subprocess.TimeoutExpired:
        code, told, outcome, by = 1, "", "hangs", f"more than {limit:.0f} s"
    finally:
        place.write_text(whole, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(place))).unlink(missing_ok=True)
    if code > 1 and tested(tree, tests, limit, "--collect-only").returncode:  # else: the mutant cannot be imported
        raise SystemExit(f"The map is older than the tests of {mutant.key}:\n{told[-2000:]}")
    seconds = round(time.perf_counter() - began, 1)
    return {**asdict(mutant), "broken": line, "outcome": outcome, "by": by, "tests": len(tests), "seconds": seconds}


def _failure(told: str, tests: list[str]) -> str:
    """The test that failed, or the file of an error; names may have spaces, so the longest that is known is taken."""
    line = next(iter(re.findall(r"^(?:FAILED|ERROR) (.+)$", told, re.MULTILINE)), "")
    known = [name for name in tests if "::" in name and line.startswith(name)]
    return max(known, key=len, default=line.partition(" - ")[0])


def copy_of_tree(number: int) -> Path:
    """What git knows or would take, so that no output of earlier runs comes with it."""
    tree = HOME / f"tree{number}"
    shutil.rmtree(tree, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def run(todo: list[Mutant], also: list[str], jobs: int, minutes: float | None) -> None:
    """Break one place after the other in `jobs` copies of the tree; after `minutes` no other place is begun."""
    durations, trees = measured(), [copy_of_tree(number) for number in range(jobs)]
    end = None if minutes is None else time.monotonic() + 60 * minutes
    waiting, lock = iter(todo), Lock()

    def following() -> Mutant | None:
        with lock:
            return None if end is not None and time.monotonic() > end else next(waiting, None)

    def work(tree: Path) -> int:
        """Take mutants until none is left or time is up; how many there were."""
        database, count = sqlite3.connect(HOME / "coverage"), 0
        while (mutant := following()) is not None:
            tests = [*also, *tests_of(mutant, durations, database)]
            limit = 60 + PATIENCE * sum(durations.get(name, 10.0) for name in tests)
            row = broken(mutant, tests, limit, tree)
            with lock:
                keep({"key": mutant.key, **row})
                print(f"{row['outcome']:<9} {mutant.key}: {mutant.old} -> {mutant.new}", flush=True)
            count += 1
        return count

    with ThreadPoolExecutor(jobs) as pool:
        done = sum(pool.map(work, trees))
    print(f"{done} of {len(todo)} places were broken{'' if done == len(todo) else '; run again to go on'}.")
    unsound(trees[0])
    show()


def keep(row: dict[str, object]) -> None:
    with (HOME / "mutants.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def unsound(tree: Path) -> None:
    """Mutants that were noticed by a test which fails without them too are not noticed."""
    by = sorted({row["by"] for row in rows() if row["outcome"] == "noticed"})
    if by:
        done = tested(tree, by, 3600)
        print(f"{len(by)} tests noticed something; on the tree as it is: {done.stdout.strip().splitlines()[-1]}")
        failing = [name for name in by if re.search(rf"^(?:FAILED|ERROR) {re.escape(name)}", done.stdout, re.MULTILINE)]
        for row in rows():
            if row["outcome"] == "noticed" and row["by"] in failing:
                keep({**row, "outcome": "survived", "why": f"{row['by']} fails without it"})


def rows() -> list[dict[str, str]]:
    """The latest word on every mutant."""
    kept = HOME / "mutants.jsonl"
    held = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    return list({row["key"]: row for row in held}.values())


def show() -> None:
    held = rows()
    reasons = {(located(name).relative_to(ROOT).as_posix(), line): why for (name, line), why in EQUIVALENT.items()}
    equivalent = [row for row in held if (row["file"], row.get("broken", "")) in reasons]
    counted = [row for row in held if row not in equivalent]
    for area in [*AREAS, "all"]:
        own = [row for row in counted if area in (row["area"], "all")]
        apart = sum(area in (row["area"], "all") for row in equivalent)
        noticed = sum(row["outcome"] != "survived" for row in own)
        print(f"{area:<12} {noticed} of {len(own)} noticed, {apart} equivalent")
    for row in counted:
        if row["outcome"] == "survived":
            print(f"  {row['key']}: {row['old']} -> {row['new']}  ({row.get('why') or row.get('tests')})")
    for row in equivalent:
        print(f"  equivalent: {row['key']}: {reasons[row['file'], row['broken']]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["map", "run", "again", "show", "list"])
    parser.add_argument("--each", type=int, default=14, help="mutants in every area")
    parser.add_argument("--sample", type=int, help="mutants in all, as many in every area; instead of --each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle", metavar="SEED", help="of `map`: run the tests in an order of their own")
    parser.add_argument("--also", nargs="+", default=[], help="tests younger than the map, run first for every mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--minutes", type=float, help="begin no other mutant after so long")
    given = parser.parse_args()
    if given.what == "map":
        make_map(given.shuffle)
    elif given.what == "show":
        show()
    else:
        outcome = {row["key"]: row["outcome"] for row in rows()}
        again = "survived" if given.what == "again" else None
        if given.sample is None:
            mutants = chosen(given.each, given.seed)
        else:
            mutants = chosen(-(-given.sample // len(AREAS)), given.seed)[: given.sample]
        if given.what == "list":
            for mutant in mutants:
                print(f"{mutant.key}: {mutant.old} -> {mutant.new}")
        else:
            todo = [mutant for mutant in mutants if outcome.get(mutant.key) == again]
            run(todo, given.also, max(1, given.jobs), given.minutes)


if __name__ == "__main__":
    main()
