"""The guides of "Extend", followed step by step in a copy of the repository.

A guide is read from top to bottom, and every block is a step:

    <!-- new file: PATH -->    the block after it becomes this file, of the repository if it begins with src/, else of
                               the folder that the reader works in
    <!-- edit: PATH -->        the diff after it is applied: its old lines must be in the file, exactly once
    ```python                  is run; blocks share their names until the next file, edit or command
    ```sh                      every line is run: gradleak, or python -m pytest
    ```text, ```toml           is shown only
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from forks import Forks, forks

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs").glob("add-a*.md"))
COPIED, LINKED = ("src", "tests"), ("pyproject.toml", "tools", "benchmarks", "papers", "docs", "README.md")
SHOWN = ("text", "toml")
BLOCK = re.compile(r"(?:^<!-- (new file|edit): (\S+) -->\n)?^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)

# A fork that has imported the package of the repository forgets it, and finds the one of the copy.
HERE = """
import json, os, sys
clone = {clone!r}
for name in [name for name in sys.modules if name.partition(".")[0] == "gradleak"]:
    del sys.modules[name]
sys.path[:] = [clone + "/src", os.getcwd(), *(place for place in sys.path if not place.endswith("/src"))]
os.environ["PYTHONPATH"] = clone + "/src"
"""
SESSION = """
namespace = {"__name__": "guide"}
for number, block in enumerate(json.load(sys.stdin), start=1):
    exec(compile(block, f"block {number}", "exec"), namespace)
import gradleak
assert gradleak.__file__.startswith(clone), gradleak.__file__
"""
COMMAND = """
sys.argv = json.load(sys.stdin)
from gradleak.cli import main
try:
    main()
except SystemExit as ended:
    if ended.code:
        raise RuntimeError(f"exit code {ended.code}") from ended
"""
TESTS = """
os.chdir(clone)
import pytest
ended = pytest.main(["-p", "no:cacheprovider", "-n", "0", *json.load(sys.stdin)])
if ended:
    raise RuntimeError(f"pytest: {ended!r}")
"""


@dataclass(frozen=True)
class Step:
    """One block. `kind`: "new file", "edit", or the language of a block that is run."""

    kind: str
    path: str
    text: str


def steps(guide: Path) -> list[Step]:
    """Every block of the guide, in order; those that are only shown are left out."""
    found = BLOCK.findall(guide.read_text(encoding="utf-8"))
    return [Step(kind or language, path, text) for kind, path, language, text in found if language not in SHOWN]


def sessions(guide: Path) -> Iterator[Step]:
    """The steps, with neighbouring Python blocks as one: JSON of a list of them."""
    for kind, group in groupby(steps(guide), key=lambda step: step.kind):
        if kind == "python":
            yield Step(kind, "", json.dumps([step.text for step in group]))
        else:
            yield from group


def edited(text: str, diff: str) -> str:
    """The text after the diff. Lines of the diff begin with a space, - or +; what is not +, must be there once."""
    lines = diff.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"in the file {text.count(old)} times:\n{old}"
    return text.replace(old, new)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the repository that a guide may change, without its history."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    return folder


def follow(step: Step, clone: Path, work: Path, started: Forks) -> None:
    if step.kind == "new file":
        place = (clone if step.path.startswith("src/") else work) / step.path
        assert not place.exists(), f"{step.path} is there already"
        place.write_text(step.text, encoding="utf-8")
    elif step.kind == "edit":
        (clone / step.path).write_text(edited((clone / step.path).read_text(encoding="utf-8"), step.text))
    elif step.kind == "python":
        run(SESSION, step.text, clone, work, started)
    elif step.kind == "sh":
        for line in step.text.splitlines():
            words = shlex.split(line, comments=True)
            if words[0] == "gradleak":
                run(COMMAND, json.dumps(words), clone, work, started)
            else:
                assert words[:3] == ["python", "-m", "pytest"], f"nobody runs {line!r}"
                run(TESTS, json.dumps(words[3:]), clone, work, started)
    else:
        pytest.fail(f"a block of {step.kind} is no step of a guide; shown only are {', '.join(SHOWN)}")


def run(code: str, given: str, clone: Path, work: Path, started: Forks) -> None:
    process = started.start(HERE.format(clone=str(clone)) + code, work, given=given)
    assert process.wait() == 0, process.out + process.err


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_a_guide_can_be_followed(guide: Path, clone: Path, tmp_path: Path, started: Forks) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for step in sessions(guide):
        follow(step, clone, work, started)


def test_there_is_a_guide_for_everything_that_is_added_often() -> None:
    things = {"attack", "defence", "metric", "report-section", "task", "kind"}
    assert {guide.stem.removeprefix("add-").removeprefix("an-").removeprefix("a-") for guide in GUIDES} == things


@pytest.mark.parametrize("diff", ["+new\n", " missing\n+new\n", " twice\n+new\n"])
def test_an_edit_that_does_not_say_where_is_refused(diff: str) -> None:
    with pytest.raises(AssertionError, match="times"):
        edited("once\ntwice\ntwice\n", diff)


def test_an_edit_replaces_lines_and_keeps_the_rest() -> None:
    assert edited("a\nb\nc\n", " a\n-b\n+B\n") == "a\nB\nc\n"
