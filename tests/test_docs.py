"""The documentation site builds strictly and offline, and every command in docs/ is run, or says why it is not.

Before a shell block with commands of gradleak stands one of

    <!-- run -->                            every line is run, in a folder like a user's
    <!-- run with: OPTIONS; OPTIONS -->     the same with options added to each line in turn, so that it is quick
    <!-- not run: REASON -->                it only has to parse (tests/test_readme.py)

Guides need no such line: tests/test_guides.py runs all of their commands. `python tests/test_docs.py` writes the tables
of kinds into docs/verdict.md and docs/attacks.md.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import groupby, takewhile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import gradleak as gl
from conftest import blobs
from gradleak.audit.preflight import preflight
from gradleak.cli import app
from gradleak.core import registry
from gradleak.core.pictures import picture, png
from gradleak.scenario.kinds import KINDS
from test_guides import GUIDES
from test_kinds import COLUMNS, EXAMPLES

ROOT = Path(__file__).parents[1]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in GUIDES]
SHELL = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(?:sh|bash|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)

# --- commands ---------------------------------------------------------------------------------------------------------


def blocks(page: Path) -> list[tuple[str, list[list[str]]]]:
    """Every shell block: what is said about it, and its command lines as words."""
    found = []
    for said, text in SHELL.findall(page.read_text(encoding="utf-8")):
        lines = text.replace("\\\n", " ").splitlines()
        found.append((said, [words for line in lines if (words := shlex.split(line, comments=True))]))
    return found


def runs(page: Path) -> list[list[str]]:
    """The command lines of a page that are to be run, with their additional options."""
    found = []
    for said, commands in blocks(page):
        kind, _, rest = said.partition(":")
        if kind == "run":
            found += commands
        elif kind == "run with":
            added = [shlex.split(part) for part in rest.split(";")]
            assert len(added) == len(commands), f"{page.name}: options for {len(added)} of {len(commands)} commands"
            found += [[*words, *more] for words, more in zip(commands, added)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_shell_block_says_whether_it_is_run(page: Path) -> None:
    for said, commands in blocks(page):
        if any(words[0] in ("gradleak", "make") for words in commands):
            kind, _, rest = said.partition(":")
            assert kind in ("run", "run with", "not run"), f"{page.name}: {shlex.join(commands[0])} has no marker"
            assert kind != "not run" or rest.strip(), f"{page.name}: not run, but why?"


TRAIN = """
import torch
import gradleak as gl

model = gl.models.lenet_zhu(shape=(3, 8, 8), classes=4, generator=torch.Generator().manual_seed(0))
like = (torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=like)
"""


@pytest.fixture
def folder_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages take for granted: a train.py, pictures by class, a table, a recorded update, data by name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("GRADLEAK_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    blobs(tmp_path / "data" / "cifar10.npz", 8, 40, 20)
    (tmp_path / "train.py").write_text(TRAIN)
    people = (f"{n},{20 + 7 * n % 50},{8001 + n % 3},{('low', 'high')[n % 5 > 1]}" for n in range(60))
    (tmp_path / "people.csv").write_text("\n".join(["id,age,zip,income", *people, "60,,8001,low"]))
    images = gl.data.load(tmp_path / "data" / "cifar10.npz", split="train")
    for folder in ("images", "path/to/images"):
        for number, (pixels, label) in enumerate(zip(images.x, images.y.tolist())):
            place = tmp_path / folder / f"class{label}" / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(png(picture(pixels)))
    model = gl.models.lenet_zhu(shape=(3, 8, 8), classes=4, generator=torch.Generator().manual_seed(0))
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]))
    seen = gl.observe(task, images.batch([0]), gl.LocalTraining(lr=0.1), key="client-3")
    for name in ("client-3", "seen"):
        seen.save(tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, folder_of_a_user: Path) -> None:
    try:
        for words in runs(page):
            answer = CliRunner().invoke(app, words[1:])
            assert answer.exit_code == 0, (shlex.join(words), answer.output, answer.exception)
    finally:
        sys.modules.pop("gradleak_user_train", None)


# --- tables of kinds --------------------------------------------------------------------------------------------------

VERDICT, ATTACKS = ROOT / "docs" / "verdict.md", ROOT / "docs" / "attacks.md"


def rows_under(page: Path, head: str) -> str:
    """The rows of the table with this head; empty if it has none yet."""
    _, _, after = page.read_text(encoding="utf-8").partition(f"{head}\n|{'---|' * (head.count('|') - 1)}\n")
    return "".join(takewhile(lambda line: line.startswith("|"), after.splitlines(keepends=True)))


KIND_HEAD = "| kind | first measure | recovered at rank 1 when | control needs | guess without the update |"


def kind_rows() -> str:
    """What each kind says of itself."""
    lines = []
    for name, kind in KINDS.items():
        field, values = EXAMPLES[name]
        others = field.kind.comparable(values, field)
        guesses = ", ".join(field.kind.guesses(others, others)) or "-"
        first = field.kind.headline
        control = field.kind.control_measure
        level = f"{control.format(kind.control)}{f' {control.label}' * (control is not first)}"
        lines.append(f"| {name} | {first.label} | {kind.rule} | {level} | {guesses} |\n")
    return "".join(lines)


ATTACK_HEAD = "| attacks | images | tables | vectors | series | text |"
STATUS = {"runs": "yes", "needs": "with a generator", "unsupported": "-"}


class Bag(nn.Module):
    """A text classifier: the mean of the embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).mean(1))


def classifiers() -> list[gl.Task]:
    """One task for each column of the table of attacks."""
    labels = torch.zeros(2, dtype=torch.long)
    shapes = [((1, 8, 8), None), ((6,), gl.kinds.Table(COLUMNS)), ((6,), None), ((2, 8), None)]
    tasks = []
    for shape, kind in shapes:
        entries = torch.Size(shape).numel()
        model = nn.Sequential(nn.Flatten(), nn.Linear(entries, 8), nn.ReLU(), nn.Linear(8, 3))
        tasks.append(gl.Task.supervised(model, F.cross_entropy, like=(torch.zeros(2, *shape), labels), kind=kind))
    ids = torch.zeros(2, 5, dtype=torch.long)
    return [*tasks, gl.Task.supervised(Bag(), F.cross_entropy, like=(ids, labels))]


def attack_rows() -> str:
    """The attacks that run on the same kinds in one row; those for denoisers are left out."""
    results = [{line.attack: STATUS[line.status] for line in preflight(task).lines} for task in classifiers()]
    cells = {name: tuple(result[name] for result in results) for name in results[0]}
    kept = {name: row for name, row in cells.items() if set(row) != {"-"}}
    order = sorted(kept, key=lambda name: ([cell == "-" for cell in kept[name]], kept[name], name))
    grouped = groupby(order, key=kept.__getitem__)
    return "".join(f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(row)} |\n" for row, names in grouped)


TABLES = [(VERDICT, KIND_HEAD, kind_rows), (ATTACKS, ATTACK_HEAD, attack_rows)]


@pytest.mark.parametrize(("page", "head", "rows"), TABLES, ids=["kinds", "attacks"])
def test_tables_of_kinds_say_what_the_code_says(page: Path, head: str, rows: Callable[[], str]) -> None:
    assert rows_under(page, head) == rows(), f"{page.name}: write it anew: python tests/test_docs.py"


# --- the site ---------------------------------------------------------------------------------------------------------

# The build in a process of its own, in which a connection to anywhere is an error.
BUILD = """
import socket, sys

def refuse(*_):
    raise OSError("the build of the documentation asked for the network")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli

cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]
    if missing:
        pytest.skip(f"the site needs {', '.join(missing)}: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    answer = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"},
        timeout=280,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder


@pytest.mark.system
@pytest.mark.xdist_group("site")  # built once
def test_every_attack_and_defence_has_a_page_from_its_entry(site: Path) -> None:
    for kind, folder in (("attack", "attacks"), ("defence", "defences")):
        overview = (site / folder / "index.md").read_text(encoding="utf-8")
        for entry in registry.entries(kind):
            page = (site / folder / f"{entry.name}.md").read_text(encoding="utf-8")
            assert f"({entry.name}.md)" in overview
            assert (site / folder / f"{entry.name}.html").is_file()
            plain = page.replace("\\", "").replace("&lt;", "<")
            assert entry.summary in plain, entry.name
            assert entry.paper in plain, entry.name
            for name in entry.settings:
                assert f"| `{name}` |" in page, (entry.name, name)


@pytest.mark.system
@pytest.mark.xdist_group("site")  # built once
def test_a_reader_asks_nobody_else(site: Path) -> None:
    """No script, style, font or picture from elsewhere; links to follow are another matter."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        asked = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?((?:https?:)?//[^\"\s>]+)", text)
        asked += re.findall(r"<link(?![^>]*rel=\"?canonical)[^>]*href=\"?((?:https?:)?//[^\"\s>]+)", text)
        assert not asked, (path.name, asked)
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path.name
    assert json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]


@pytest.mark.system
@pytest.mark.xdist_group("site")  # built once
def test_llms_txt_names_every_page(site: Path) -> None:
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html"}
    assert {name.removesuffix(".md") + ".html" for name in listed} == built
    assert all((site / name).is_file() for name in listed)


@pytest.mark.system
@pytest.mark.xdist_group("site")  # built once
def test_nothing_is_left_to_fill_in(site: Path) -> None:
    for path in site.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<!-- table:|\bTODO\b|\bTBD\b|lorem ipsum", text, re.IGNORECASE), path.name


@pytest.mark.system
@pytest.mark.xdist_group("site")  # built once
def test_tables_of_speed_are_the_stored_ones(site: Path) -> None:
    page = (site / "performance.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())["rows"]
    for row in rows:
        assert f"| {row['network']} | {row['lanes']} | {row['precision']} |" in page
        assert f"| {row['rate']:,.0f} |" in page
    assert "NVIDIA H200" in page


@pytest.mark.system
@pytest.mark.xdist_group("site")  # built once
def test_figures_are_those_of_the_folders(site: Path) -> None:
    page = (site / "figures.md").read_text(encoding="utf-8")
    for file in (ROOT / "papers").glob("*/expected.json"):
        assert f"{{#{file.parent.name}}}" in page
        for name in json.loads(file.read_text())["figures"]:
            assert f"| {name} |".replace("|", "|") in page, name
    lines = csv.DictReader((ROOT / "papers/idlg/results.csv").read_text(encoding="utf-8").splitlines())
    [median] = [float(line["value"]) for line in lines if line["metric"] == "psnr median"]
    assert f"| {median:.4g} | holds |" in page


# --- files at the root ------------------------------------------------------------------------------------------------


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    held = dict(re.findall(r"^([a-z-]+): (.+)$", text, re.MULTILINE))
    assert held["cff-version"] == "1.2.0"
    assert held["version"] == gl.__version__
    assert held["license"] == "Apache-2.0"
    assert "authors:\n  - name: " in text
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{held["version"]}"' in project
    assert 'license = "Apache-2.0"' in project
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_root_files_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), f"{name} links to {target}"


if __name__ == "__main__":
    for page, head, rows in TABLES:
        rule = f"{head}\n|{'---|' * (head.count('|') - 1)}\n"
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(rule + rows_under(page, head), rule + rows()), encoding="utf-8")
