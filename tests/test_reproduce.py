"""`gradleak reproduce`: every folder of papers/ has scales whose rows and flags exist; figures are the stored ones."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import reproduction
from gradleak.cli import app
from gradleak.cli import reproduce as command
from gradleak.cli.claims import FEW, NOT_MEASURED, PRINTED, Bound, Claims, Printed, Result, all_claims, markdown, plain
from gradleak.cli.scales import PAPERS, ScaleName
from gradleak.data import SOURCES

ROOT = Path(__file__).parents[1]
PAPERS_FOLDER = ROOT / "papers"
EMBEDDED = ("cifar10-samples", "cifar100-samples", "mnist-samples", "photographs", "digits")
CALLS = [
    (name, scale.value, options)
    for name, paper in PAPERS.items()
    for scale in ScaleName
    if (found := paper.at(scale)) is not None
    for options in found.runs
]


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *words])


# --- the table of scales ----------------------------------------------------------------------------------------------


def test_every_folder_of_papers_has_its_scales() -> None:
    assert set(PAPERS) == {path.parent.name for path in PAPERS_FOLDER.glob("*/run.py")}
    assert list(PAPERS) == sorted(PAPERS)
    for name, paper in PAPERS.items():
        for scale in ScaleName:
            found = paper.at(scale)
            assert found is None or set(found.needs) <= set(SOURCES), name
            if found is not None and scale is ScaleName.smoke:
                assert not set(found.needs) - set(EMBEDDED), f"{name}: smoke needs images that have to be downloaded"


class Parsed(Exception):
    """The options were understood."""


@pytest.mark.parametrize(("name", "scale", "options"), CALLS, ids=[f"{name}-{scale}" for name, scale, _ in CALLS])
def test_flags_and_rows_of_a_scale_exist(name: str, scale: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own parser takes the flags, and `--only` finds at least one of its rows."""
    script = reproduction(name)
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any) -> Any:
        raise Parsed(parse(parser, *given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", ["run.py", *shlex.split(options)])
    with pytest.raises(Parsed) as parsed:
        script.main()
    settings = parsed.value.args[0]
    if hasattr(script, "rows"):
        assert settings.only, f"{name}, {scale}: every row would be run"
        assert any(re.search(settings.only, row) for row in script.rows()), settings.only


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
    written = json.loads((tmp_path / f"{name}-smoke.json").read_text())
    assert written["settings"][more[0].lstrip("-")] == int(more[1])
    assert written["environment"]["command"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, paper in PAPERS.items() if paper.smoke is not None])
def test_every_smoke_run_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADLEAK_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    answer = call(name, "--out", str(tmp_path))
    assert answer.exit_code == 0, (answer.output, answer.exception)


FAKE = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
print("a row")
print("FAILS  a bound")
if "{kind}" != "defect":
    out.write_text(json.dumps({{"figures": {{}}, "failed": ["a bound"]}}))
sys.exit(1)
"""


@pytest.fixture
def fake_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A clone whose ilrg is a stand-in; the parameter says whether it fails a bound or has a defect."""
    (tmp_path / "papers" / "ilrg").mkdir(parents=True)
    (tmp_path / "papers" / "record.py").touch()
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
    assert (fake_clone / "runs" / "reproduce" / "ilrg-small.json").is_file()


@pytest.mark.parametrize("fake_clone", ["defect"], indirect=True)
def test_a_defect_is_not_taken_for_a_bound_that_fails(fake_clone: Path) -> None:
    stale = fake_clone / "runs" / "reproduce" / "ilrg-paper.json"
    stale.parent.mkdir(parents=True)
    stale.write_text('{"failed": []}')  # of an earlier run: must not be read for this one's
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
    lines = [shlex.split(line) for line in answer.stdout.splitlines() if line.startswith("python ")]
    assert len(lines) == len(PAPERS["tip"].paper.runs)
    for line, options in zip(lines, PAPERS["tip"].paper.runs, strict=True):
        assert line[1] == "papers/tip/run.py"
        assert line[2:-4] == shlex.split(options)
        assert line[-4:-2] == ["--seed", "1"]


# --- the papers' figures beside ours ----------------------------------------------------------------------------------


def result(file: str, figures: dict[str, Any], time: str = "2026-01-01", **settings: Any) -> Result:
    return Result(file, {"figures": figures, "settings": settings, "environment": {"time": time, "gpus": ["GPU"]}})


def claims(tmp_path: Path, expected: dict[str, Any], *results: Result) -> Claims:
    (tmp_path / "results").mkdir()
    (tmp_path / "expected.json").write_text(json.dumps({"about": "A paper.", **expected}))
    for each in results:
        (tmp_path / "results" / each.file).write_text(json.dumps(each.stored))
    return Claims(tmp_path)


def test_every_stored_figure_is_shown_as_it_is_stored() -> None:
    """Every bound that a result says it failed, fails here too, unless another result is shown in its place."""
    seen = 0
    for each in all_claims(PAPERS_FOLDER):
        for figure in each.bounds:
            if figure.result is None:
                assert figure.ours == NOT_MEASURED
                continue
            seen += 1
            assert figure.value == figure.result.value(figure.wanted.steps)
            if not figure.result.small and "failed" in figure.result.stored:
                assert (figure.outcome == "fails") == (figure.wanted.what in figure.result.stored["failed"])
    assert seen > 50


def test_printed_figures_are_the_papers_own() -> None:
    """Each number stands in expected.json (or, of the three without a reference, in its text), and none is left out."""
    for each in all_claims(PAPERS_FOLDER):
        reference = each.expected.get("reference")
        for figure in each.printed:
            text = json.dumps(reference) if reference else each.expected["about"]
            wanted = figure.wanted.value
            assert re.search(rf"(?<![\d.]){re.escape(f'{wanted:g}')}", text) or str(wanted) in text, figure.wanted.what
        assert len({figure.wanted.what for figure in each.printed}) == len(each.printed), "one line twice"
    assert set(PRINTED) <= set(PAPERS)


def test_steps_to_our_figures_lead_to_rows_that_exist() -> None:
    """A figure that no row could ever have would be 'not measured yet' for ever."""
    for name in ("flat_minima", "nl_sme", "secadam", "tip"):
        rows = set(reproduction(name).rows())
        absent = {
            figure.wanted.steps[0] for figure in Claims(PAPERS_FOLDER / name).printed if figure.wanted.steps
        } - rows
        # The paper's heat maps of Tiny-ImageNet: that pack has two images a class, nothing to train on.
        assert absent <= {"maps tiny-imagenet, local"}, (name, absent)


def test_of_several_results_the_larger_one_is_shown_whatever_its_outcome(tmp_path: Path) -> None:
    held = claims(
        tmp_path,
        {"figures": {"row/psnr/mean": {"at_least": 20.0}}},
        result("cut.json", {"row": {"psnr": {"images": 500, "mean": 50.0}}}, small=1),
        result("few.json", {"row": {"psnr": {"images": 4, "mean": 40.0}}}, time="2026-05-01"),
        result("many.json", {"row": {"psnr": {"images": 64, "mean": 10.0}}}, seed=3),
    )
    [figure] = held.bounds
    assert figure.result is not None
    assert figure.result.file == "many.json"
    assert figure.cells()[2:] == ("10", "fails", "64", "3", "GPU", "many.json")
    assert held.counts() == "no printed figures; of 1 bounds 1 fail"


def test_small_samples_and_cut_runs_are_called_so(tmp_path: Path) -> None:
    held = claims(
        tmp_path,
        {
            "figures": {
                "a/psnr/mean": {"at_least": 1.0},
                "b/psnr/mean": {"at_most": 1.0},
                "c/psnr/mean": {"at_least": 1.0},
            }
        },
        result("few.json", {"a": {"psnr": {"images": FEW - 1, "mean": 2.0}}}),
        result("cut.json", {"b": {"psnr": {"images": 99, "mean": 0.0}}}, small=1),
    )
    few, cut, absent = held.bounds
    assert few.size == f"{FEW - 1} (small)"
    assert few.outcome == "holds"
    assert cut.size == "99, cut short: no reproduction"
    assert cut.outcome == "not decided"
    assert absent.ours == NOT_MEASURED
    assert absent.outcome == ""
    assert NOT_MEASURED in plain(held)
    assert "cut short" in markdown([held], {held.name: "A paper"})


def test_a_run_that_goes_on_is_no_result(tmp_path: Path) -> None:
    held = claims(tmp_path, {"figures": {"row/x": {"at_least": 0.0}}})
    (tmp_path / "results" / "now.part.json").write_text(json.dumps({"row": {"x": 1.0}}))
    assert held.results == []


def test_bounds_are_met_on_the_right_side() -> None:
    assert Bound("a", ("a",), at_least=1.0).holds(1.0)
    assert not Bound("a", ("a",), at_least=1.0).holds(0.5)
    assert Bound("a", ("a",), at_most=1.0).holds(0.5)
    assert not Bound("a", ("a",), at_most=0.0).holds(0.5)
    assert Printed("a", 1.0).steps == ()


def test_the_list_names_every_paper_and_one_paper_every_figure() -> None:
    answer = call("--list")
    assert answer.exit_code == 0
    for each in all_claims(PAPERS_FOLDER):
        assert f"{each.name}\n    {PAPERS[each.name].title}\n    {each.counts()}" in answer.stdout
    answer = call("nl_sme", "--list")
    for figure in (*Claims(PAPERS_FOLDER / "nl_sme").printed, *Claims(PAPERS_FOLDER / "nl_sme").bounds):
        assert figure.wanted.what in answer.stdout
