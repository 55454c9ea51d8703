"""Raw results of the history into the tables: `python papers/tidy.py PAPER FILE.json ...`.

run.py wrote one such file a run until the tables were there. Get them by
`git show f3580f4:papers/idlg/results/h200.json > h200.json`. A run has its file's name.
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
from results import add, tidy

PAPERS = Path(__file__).resolve().parent


def defaults(paper: str) -> dict[str, Any]:
    """The options of a run.py that nobody gave."""
    spec = importlib.util.spec_from_file_location(f"{paper}_run", PAPERS / paper / "run.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    found: dict[str, Any] = {}

    class Parsed(Exception):
        """The options are known: nothing is run."""

    def stop(parser: argparse.ArgumentParser, *given: Any) -> Any:
        found.update(vars(parse(parser, [])))
        raise Parsed

    parse = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = stop  # type: ignore[method-assign]
    try:
        script.main()
    except Parsed:
        return found
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
    usual = defaults(paper)
    held = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    time = lambda name: (str((held[name].get("environment") or {}).get("time") or ""), name)  # noqa: E731
    for run in sorted(held, key=time):  # later runs stand below earlier ones
        stored = held[run]
        stored["environment"] = {**(stored.get("environment") or {}), "command": command(paper, stored, usual)}
        add(PAPERS / paper / "results.csv", tidy(paper, run, stored))


if __name__ == "__main__":
    main()
