"""`gradleak reproduce`: runs what papers/runs.py says, from a clone, and lists the stored figures."""

from __future__ import annotations

import shutil
import sys
from csv import DictReader
from pathlib import Path
from shlex import split
from typing import Any

import pytest
from typer.testing import CliRunner

from gradleak.cli import app
from gradleak.cli import reproduce as command

ROOT = Path(__file__).parents[1]
PAPERS = command.beside(ROOT, "runs").PAPERS
FIGURES = command.beside(ROOT, "figures")


@pytest.fixture(autouse=True)
def other_clones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts the root of its clone on the path; tests make small clones of their own."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *words])


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["idlg", "ilrg"])
def test_a_smoke_run_ends_with_its_figures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADLEAK_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    more = ("--steps", "3") if name == "idlg" else ("--trials", "2")
    answer = call(name, "--out", str(tmp_path), "--", *more)
    assert answer.exit_code == 0, (answer.output, answer.exception)  # bounds do not count at this scale
    assert "It runs." in answer.stdout
    assert "FAILS" not in answer.stdout
    assert "holds" not in answer.stdout
    lines = list(DictReader((tmp_path / f"{name}-smoke.csv").read_text().splitlines()))
    assert lines
    assert all(" ".join(more) in line["command"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, paper in PAPERS.items() if paper.smoke is not None])
def test_every_smoke_run_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADLEAK_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    answer = call(name, "--out", str(tmp_path))
    assert answer.exit_code == 0, (answer.output, answer.exception)


FAKE = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
print("a row")
print("FAILS  a bound = 1, wanted 2")
if "{kind}" != "defect":
    out.write_text("a table")
sys.exit(1)
"""


@pytest.fixture
def fake_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A clone whose ilrg is a stand-in; the parameter says whether it fails a bound or has a defect."""
    (tmp_path / "papers" / "ilrg").mkdir(parents=True)
    (tmp_path / "papers" / "record.py").touch()
    shutil.copy(ROOT / "papers" / "runs.py", tmp_path / "papers" / "runs.py")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "papers" / "ilrg" / "run.py").write_text(FAKE.format(kind=request.param))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_demand", lambda needs: None)
    return tmp_path


@pytest.mark.parametrize("fake_clone", ["bound"], indirect=True)
def test_bounds_count_at_the_papers_scale_alone(fake_clone: Path) -> None:
    answer = call("ilrg", "--scale", "paper")
    assert answer.exit_code == 1
    assert "FAILS  a bound" in answer.stdout
    assert "Does not hold: a bound" in answer.stderr
    answer = call("ilrg", "--scale", "small")
    assert answer.exit_code == 0
    assert "a row" in answer.stdout
    assert "FAILS" not in answer.stdout
    assert (fake_clone / "runs" / "reproduce" / "ilrg-small.csv").is_file()


@pytest.mark.parametrize("fake_clone", ["defect"], indirect=True)
def test_a_defect_is_not_taken_for_a_bound_that_fails(fake_clone: Path) -> None:
    stale = fake_clone / "runs" / "reproduce" / "ilrg-paper.csv"
    stale.parent.mkdir(parents=True)
    stale.write_text("a table")  # of an earlier run: must not be read for this one's
    answer = call("ilrg", "--scale", "paper")
    assert answer.exit_code == 2
    assert "before its figures were written" in answer.stderr


def test_outside_a_clone_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "__file__", str(tmp_path / "site-packages" / "reproduce.py"))
    answer = call("idlg")
    assert answer.exit_code == 2
    assert "Clone the repository" in answer.stderr


def test_missing_images_are_named_with_a_way_to_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADLEAK_DATA", "/nonexistent")
    answer = call("second_order", "--scale", "small")
    assert answer.exit_code == 2
    assert "cifar10-mini" in answer.stderr
    assert "GRADLEAK_DATA" in answer.stderr


def test_an_unknown_name_is_told_the_nearest() -> None:
    answer = call("idgl")
    assert answer.exit_code == 2
    assert "Did you mean 'idlg'" in answer.stderr


def test_a_dry_run_prints_what_would_be_run() -> None:
    answer = call("tip", "--scale", "paper", "--dry-run", "--", "--seed", "1")
    assert answer.exit_code == 0
    lines = [split(line) for line in answer.stdout.splitlines() if line.startswith("python ")]
    assert len(lines) == len(PAPERS["tip"].paper.runs)
    for line, options in zip(lines, PAPERS["tip"].paper.runs, strict=True):
        assert line[1] == "papers/tip/run.py"
        assert line[2:-4] == split(options)
        assert line[-4:-2] == ["--seed", "1"]


def test_the_list_names_every_paper_and_one_paper_every_figure() -> None:
    answer = call("--list")
    assert answer.exit_code == 0
    for each in FIGURES.all_claims(ROOT / "papers"):
        assert f"{each.name}\n    {PAPERS[each.name].title}\n    {each.counts()}" in answer.stdout
    answer = call("nl_sme", "--list")
    claims = FIGURES.Claims(ROOT / "papers" / "nl_sme")
    for figure in (*claims.printed, *claims.bounds):
        assert figure.wanted.what in answer.stdout
