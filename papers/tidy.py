"""Results of elsewhere into a paper's table: `python papers/tidy.py PAPER FILE ...`.

FILE is a table (CSV) that run.py wrote on another machine, or raw results (JSON) of the history, which run.py wrote
before there were tables: `git show f3580f4:papers/idlg/results/h200.json > h200.json`; the run has the file's name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import add, read, tidy

PAPERS = Path(__file__).resolve().parent


def defaults(paper: str) -> dict[str, Any]:
    """The options of a run.py that nobody gave."""
    spec = importlib.util.spec_from_file_location(f"{paper}_run", PAPERS / paper / "run.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    options: dict[str, Any] = {}

    class Parsed(Exception):
        """The options are known: nothing is run."""

    def stop(parser: argparse.ArgumentParser, *given: Any) -> Any:
        options.update(vars(parse(parser, [])))
        raise Parsed

    parse = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = stop  # type: ignore[method-assign]
    try:
        script.main()
    except Parsed:
        return options
    finally:
        argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]
    raise RuntimeError(f"papers/{paper}/run.py read no options.")


def command(paper: str, stored: dict[str, Any], usual: dict[str, Any]) -> str:
    """As it was recorded, without options at their defaults."""
    words = (stored.get("environment") or {}).get("command") or ""
    words = words if isinstance(words, str) else "python benchmarks/" + shlex.join(words)
    if not stored.get("settings") or not words.startswith("python papers/"):
        return words
    given = {name: value for name, value in stored["settings"].items() if str(value) and value != usual.get(name)}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(["python", f"papers/{paper}/run.py", *flags])


def main() -> None:
    paper, files = sys.argv[1], [Path(name) for name in sys.argv[2:]]
    table = PAPERS / paper / "results.csv"
    for file in files:
        if file.suffix == ".csv":
            add(table, read(file))
    raw = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.suffix == ".json"}
    usual = defaults(paper) if raw else {}
    time = lambda run: (str((raw[run].get("environment") or {}).get("time") or ""), run)  # noqa: E731
    for run in sorted(raw, key=time):  # later runs stand below earlier ones
        environment = {**(raw[run].get("environment") or {}), "command": command(paper, raw[run], usual)}
        add(table, tidy(paper, run, {**raw[run], "environment": environment}))


if __name__ == "__main__":
    main()
