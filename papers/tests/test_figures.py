"""The papers' figures beside ours, and the scales at which each paper is run."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from gradleak.data import SOURCES

sys.path.insert(0, str(Path(__file__).parents[2]))
from papers.figures import FEW, NOT_MEASURED, PRINTED, Bound, Claims, Printed, all_claims, markdown, plain
from papers.results import Figure, find, kept, steps_of, write
from papers.runs import PAPERS

PAPERS_FOLDER = Path(__file__).parents[1]
EMBEDDED = ("cifar10-samples", "cifar100-samples", "mnist-samples", "photographs", "digits")
SCALES = ("smoke", "small", "paper")
CALLS = [
    (name, scale, options)
    for name, paper in PAPERS.items()
    for scale in SCALES
    if (found := getattr(paper, scale)) is not None
    for options in found.runs
]


def rows(name: str) -> Any:
    return importlib.import_module(f"papers.{name}.run").rows()


# --- scales -----------------------------------------------------------------------------------------------------------


def test_every_folder_of_papers_has_its_scales() -> None:
    assert set(PAPERS) == {path.parent.name for path in PAPERS_FOLDER.glob("*/run.py")}
    assert list(PAPERS) == sorted(PAPERS)
    for name, paper in PAPERS.items():
        for scale in SCALES:
            found = getattr(paper, scale)
            assert found is None or set(found.needs) <= set(SOURCES), name
            if found is not None and scale == "smoke":
                assert not set(found.needs) - set(EMBEDDED), f"{name}: smoke needs images that have to be downloaded"


class Parsed(Exception):
    """The options were understood."""


@pytest.mark.parametrize(("name", "scale", "options"), CALLS, ids=[f"{name}-{scale}" for name, scale, _ in CALLS])
def test_flags_and_rows_of_a_scale_exist(name: str, scale: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own parser takes the flags, and `--only` finds at least one of its rows."""
    script = importlib.import_module(f"papers.{name}.run")
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


def test_at_the_papers_scale_every_row_of_secadam_is_run_once() -> None:
    picked = [re.search("--only '(.*?)'", call) for call in PAPERS["secadam"].paper.runs]
    for name in rows("secadam"):
        assert sum(bool(found and re.search(found[1], name)) for found in picked) == 1, name


# --- figures ----------------------------------------------------------------------------------------------------------


def line(run: str, row: str, value: float, **more: Any) -> Figure:
    return Figure(row, run, "", "", "", "psnr", value, hardware="GPU", **more)


def claims(folder: Path, expected: dict[str, Any], *lines: Figure) -> Claims:
    (folder / "expected.json").write_text(json.dumps({"about": "A paper.", **expected}))
    write(folder / "results.csv", lines)
    return Claims(folder)


def test_every_stored_figure_is_shown_as_it_is_stored() -> None:
    """A bound's outcome is that of the line which is shown, and of no other."""
    seen = 0
    for each in all_claims(PAPERS_FOLDER):
        for bound in each.bounds:
            held = [number for _, number in find(each.figures, each.name, steps_of(bound.wanted.what))]
            if bound.figure is None:
                assert held == []
                assert bound.ours == NOT_MEASURED
                continue
            seen += 1
            assert bound.value in held
            if not bound.figure.small:
                assert (bound.outcome == "fails") == (not bound.wanted.holds(bound.value))
    assert seen > 50


# What did not hold when it was measured: it stays in the tables.
FAILED = {
    "flat_minima": [
        "table, round 0/order/idlg/FedSAM over FedASAM",
        "table, round 0/order/ig/FedAvg over FedSAM",
        "table, round 0/order/ig/FedSAM over FedASAM",
    ],
    "gidm": [
        f"known, cifar10 32, trained, t {t}/phases/gidm over {other}"
        for t in (50, 200)
        for other in ("dlg-dm", "invg-dm")
    ],
    "second_order": ["resnet18, gelu, matrix-free/gain"],
    "tip": ["table lenet/A2/beta 0.1/share_of_undefended"],
}


def test_bounds_that_did_not_hold_are_still_said_not_to() -> None:
    for each in all_claims(PAPERS_FOLDER):
        failed = [bound.wanted.what for bound in each.bounds if bound.outcome == "fails"]
        assert failed == FAILED.get(each.name, []), each.name


def test_a_run_writes_down_every_figure_that_is_asked_for() -> None:
    """A bound, or a printed figure, whose metric the table does not keep would stay 'not measured yet' for ever."""
    for each in all_claims(PAPERS_FOLDER):
        for figure in (*each.bounds, *each.printed):
            if figure.wanted.steps:
                assert kept(each.name, figure.wanted.steps), figure.wanted.what


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
        absent = {
            figure.wanted.steps[0] for figure in Claims(PAPERS_FOLDER / name).printed if figure.wanted.steps
        } - set(rows(name))
        # The paper's heat maps of Tiny-ImageNet: that pack has two images a class, nothing to train on.
        assert absent <= {"maps tiny-imagenet, local"}, (name, absent)


def test_of_several_results_the_larger_one_is_shown_whatever_its_outcome(tmp_path: Path) -> None:
    held = claims(
        tmp_path,
        {"figures": {"row/psnr/mean": {"at_least": 20.0}}},
        line("cut", "row", 50.0, n=500, command="run.py --small 1"),
        line("many", "row", 10.0, n=64, seed="3"),
        line("few", "row", 40.0, n=4),
    )
    [figure] = held.bounds
    assert figure.figure is not None
    assert figure.figure.run == "many"
    assert figure.cells()[2:] == ("10", "fails", "64", "3", "GPU", "many")
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
        line("few", "a", 2.0, n=FEW - 1),
        line("cut", "b", 0.0, n=99, command="run.py --small 1"),
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


def test_a_paper_without_a_table_has_measured_nothing(tmp_path: Path) -> None:
    (tmp_path / "expected.json").write_text(json.dumps({"about": "", "figures": {"row/x": {"at_least": 0.0}}}))
    assert Claims(tmp_path).figures == []
    assert Claims(tmp_path).bounds[0].ours == NOT_MEASURED


def test_bounds_are_met_on_the_right_side() -> None:
    assert Bound("a", ("a",), at_least=1.0).holds(1.0)
    assert not Bound("a", ("a",), at_least=1.0).holds(0.5)
    assert Bound("a", ("a",), at_most=1.0).holds(0.5)
    assert not Bound("a", ("a",), at_most=0.0).holds(0.5)
    assert Printed("a", 1.0).steps == ()
