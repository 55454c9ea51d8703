"""README.md and docs: every Python block runs, every command exists, tables and links are current.

`python tests/test_readme.py` writes the table of attacks into docs/attacks.md. tests/test_guides.py follows the guides.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer.main
from typer.testing import CliRunner

from forks import Forks, forks
from gradleak.cli import app
from gradleak.cli.listing import describe_defence
from gradleak.cli.reproduce import beside
from gradleak.core import registry
from gradleak.core.pictures import picture, png
from test_defences_table import GUARANTEED, RANDOM
from test_guides import GUIDES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ATTACKS, DEFENCES, INSTALL = (ROOT / "docs" / name for name in ("attacks.md", "defences.md", "install.md"))
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
SKETCHES = ("design.md",)  # signatures, not programs
LONGEST = 10.0  # seconds for one block, once torch is loaded

# Runs the blocks of one page in one namespace and an empty folder, each on the clock. In a process of its own, since
# pages register methods and classes that other tests must not meet.
RUN_BLOCKS = """
import json, sys, time
blocks, namespace, spent = json.load(sys.stdin), {"__name__": "page"}, []
for number, block in enumerate(blocks, start=1):
    began = time.process_time()
    exec(compile(block, f"block {number}", "exec"), namespace)
    spent.append(time.process_time() - began)
print(json.dumps(spent))
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


RUNNING = [page for page in PAGES if blocks(page, "python") and page.name not in SKETCHES and page not in GUIDES]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_python_blocks_run_and_are_quick(page: Path, tmp_path: Path, started: Forks) -> None:
    process = started.start(RUN_BLOCKS, tmp_path, given=json.dumps(blocks(page, "python")))
    assert process.wait() == 0, process.err
    spent = json.loads(process.out.splitlines()[-1])
    assert max(spent) < LONGEST, spent


def commands(page: Path) -> list[list[str]]:
    """Every command line of the page's shell blocks, as words; comments and continued lines are understood."""
    lines = [line for block in blocks(page, "(?:sh|bash|console)") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def known(words: list[str]) -> None:
    """A gradleak command must parse: known commands, known options, as many arguments as it takes."""
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        if command.invoke_without_command and (not rest or rest[0].startswith("-")):
            break  # a family that is a command too
        assert rest, f"{' '.join(words)} names no command"
        assert rest[0] in command.commands, f"{' '.join(words)}: there is no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    try:
        command.make_context(words[1], rest)
    except click.BadParameter as problem:
        if "does not exist" not in str(problem):  # a file that an earlier line of the page would have made
            raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for words in commands(page):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "gradleak":
            known(words)
        elif words[0] == "pip":
            assert words[1] == "install"
            named = re.search(r"\[(.*)\]", words[-1])
            assert set(named[1].split(",") if named else []) <= extras, words
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).exists(), words
            options = [word for word in words[2:] if word.startswith("--")]
            assert all(option in (ROOT / words[1]).read_text() for option in options), words
        elif words[0] == "python":
            assert words[2] in ("mkdocs", "pytest", "benchmarks"), words
        else:
            pytest.fail(f"{page.name}: nobody checks the command {words[0]!r}")


TRAIN = """
import torch
import gradleak as gl

model = gl.models.lenet_zhu(shape=(3, 8, 8), classes=4, generator=torch.Generator().manual_seed(0))
like = (torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=like)
"""


def test_the_commands_for_ones_own_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As README.md writes them, in a folder with a train.py and pictures; the audit with --quick added."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(TRAIN)
    images = torch.rand(4, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for label, own in enumerate(images):
        folder = tmp_path / "path/to/images" / f"class{label}"
        folder.mkdir(parents=True)
        for number, pixels in enumerate(own):
            (folder / f"{number}.png").write_bytes(png(picture(pixels)))
    check, audit, compare = (
        next(words for words in commands(README) if words[:2] == ["gradleak", name])
        for name in ("check", "audit", "compare")
    )
    try:
        for words in (check, [*audit, "--quick"], [*audit[:-1], "runs/builtin", "--quick"], compare):
            answer = CliRunner().invoke(app, words[1:])
            assert answer.exit_code == 0, (words, answer.output, answer.exception)
    finally:
        sys.modules.pop("gradleak_user_train", None)
    assert (tmp_path / "runs/mine/report.html").is_file()
    assert "ig" in answer.stdout


def test_verified_attacks_have_results_that_hold() -> None:
    verified = [entry.name for entry in registry.entries("attack") if entry.status == "verified"]
    assert verified
    text = ATTACKS.read_text()
    for name in verified:
        bounds = beside(ROOT, "figures").Claims(ROOT / "papers" / name).bounds
        assert bounds, f"{name} is called verified, but nothing was to hold in papers/{name}"
        assert [bound.outcome for bound in bounds] == ["holds"] * len(bounds), name
        assert f"- `{name}`: " in text, f"{ATTACKS.name} does not say what verified means for {name}"


def test_inline_commands_exist() -> None:
    names = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for page in PAGES:
        for first in re.findall(r"`gradleak ([a-z]+)", page.read_text()):
            assert first in names, f"{page.name}: gradleak {first}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_two_commands_come_first() -> None:
    assert commands(README)[:2] == [["make", "audit"], ["make", "test"]]


def test_the_readme_and_the_design_stay_short() -> None:
    assert len(README.read_text().split()) < 900
    assert len((ROOT / "docs" / "design.md").read_text().split()) <= 2500


def attacks_table(shown: str) -> str:
    """Of the attacks that are in the table; a new one need not be."""
    entries = [entry for entry in registry.entries("attack") if f"| `{entry.name}` |" in shown]
    return "".join(f"| `{entry.name}` | {entry.summary} | {entry.paper} | {entry.status} |\n" for entry in entries)


TABLE = re.compile(r"(\| name \| idea \| paper \| status \|\n\|---\|---\|---\|---\|\n)((?:\|.*\n|<!-- attacks -->\n)*)")


def test_the_table_of_attacks_is_current() -> None:
    found = TABLE.search(ATTACKS.read_text())
    assert found is not None
    assert found[2] == attacks_table(found[2]), "write it anew: python tests/test_readme.py"
    verified = [entry.name for entry in registry.entries("attack") if entry.status == "verified"]
    assert all(f"| `{name}` |" in found[2] for name in verified)


def rows_of(head: str) -> list[list[str]]:
    """The rows of the table of defences whose head begins like this."""
    table = DEFENCES.read_text().split(head, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[entry.strip() for entry in row.strip("|").split("|")] for row in table]


def test_the_table_of_defences_says_what_the_defences_do() -> None:
    """Names, places, chance and guarantees are asked of the defences; only the last column is prose."""
    rows = {row[0].strip("`"): row[1:] for row in rows_of("| name | where it sits ")}
    assert list(rows) == [entry.name for entry in registry.entries("defence") if entry.name in rows]
    assert set(GUARANTEED) <= set(rows)
    for name, (place, deterministic, proved, how) in rows.items():
        assert place == describe_defence(registry.get("defence", name))[0], name
        assert (deterministic == "no") == (name in RANDOM), name
        assert proved.startswith("epsilon") == (GUARANTEED.get(name) == "local"), name
        assert proved.startswith(("epsilon, one ", "none")), name
        assert how
    assert all(entry.status == "unverified" for entry in registry.entries("defence")), (
        "docs/defences.md says that all are"
    )


def test_every_extra_is_explained() -> None:
    text = INSTALL.read_text()
    section = (
        (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("[project.scripts]")[0]
    )
    for extra in re.findall(r"^([a-z-]+) = \[", section, re.MULTILINE):
        assert f"`{extra}`" in text, extra


if __name__ == "__main__":
    ATTACKS.write_text(TABLE.sub(lambda found: found[1] + attacks_table(found[2]), ATTACKS.read_text()))
