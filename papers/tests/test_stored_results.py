"""The tables of results: whole, made by the rows that are there, and what the READMEs show."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from papers import readme, results

PAPERS = Path(__file__).parents[1]
NAMES = sorted(path.parent.name for path in PAPERS.glob("*/run.py"))
TABLES = {name: results.read(PAPERS / name / "results.csv") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_where_it_comes_from_and_stands_there_once(name: str) -> None:
    places = set()
    for figure in TABLES[name]:
        assert figure.run, figure
        assert figure.metric, figure
        assert (figure.low is None) == (figure.high is None), figure
        assert figure.low is None or figure.low <= figure.high, figure
        assert re.fullmatch("[0-9a-f]{7}|", figure.commit), figure
        assert figure.hardware, figure
        assert not re.search(r"[ '\"]/(work|home|root|tmp|mnt|Users)/", figure.command), figure
        places.add((figure.run, *figure.key))
    assert len(places) == len(TABLES[name]) > 0
    with (PAPERS / name / "results.csv").open(encoding="utf-8") as stream:
        assert next(csv.reader(stream)) == [
            *("row", "setting", "attack", "defence", "form", "metric", "value", "low", "high"),
            *("n", "seed", "commit", "hardware", "command"),
        ]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in results.WITHOUT_ROWS])
def test_rows_of_the_table_are_rows_of_the_run_file(name: str) -> None:
    rows = importlib.import_module(f"papers.{name}.run").rows()
    # Trials and trainings beside run.py: their commands say what they are.
    trials = ["h200-tune", "cpu-spectral-tuning", "h200-generator", "h200-generator-blobs"]
    trials += ["cpu-small-uniform05"]  # of the days when 0.9 was the eta of all rows and 0.2 a row
    assert {figure.row for figure in TABLES[name] if figure.run not in trials} <= set(rows)


@pytest.mark.parametrize("name", [path.parent.name for path in sorted(PAPERS.glob("*/tables.py"))])
def test_a_readme_names_every_run_and_shows_the_tables_of_now(name: str) -> None:
    text = (PAPERS / name / "README.md").read_text(encoding="utf-8")
    assert [run for run in sorted({figure.run for figure in TABLES[name]}) if f"`{run}`" not in text] == []
    tables = importlib.import_module(f"papers.{name}.tables").tables(readme.Results(PAPERS / name))
    assert set(tables) == {found[2] for found in readme.MARKED.finditer(text)}
    assert readme.filled(text, tables) == text, "stale: run `python papers/readme.py`"


def test_a_stale_table_is_noticed() -> None:
    text = "before\n<!-- table: a -->\n| x |\n|---|\n| 1 |\n<!-- end -->\nafter\n"
    assert readme.filled(text, {"a": lambda: [["x"], ["1"]]}) == text
    assert "| 2 |" in readme.filled(text, {"a": lambda: [["x"], ["2"]]})
    with pytest.raises(ValueError, match="its head 1"):
        readme.filled(text, {"a": lambda: [["x"], ["1", "2"]]})
    with pytest.raises(ValueError, match="Nothing of the line 'SME'"):
        readme.filled(text, {"a": lambda: [["", "PSNR"], ["SME", ""]]})


def test_numbers_are_written_as_templates_say() -> None:
    figure = results.Figure("row", "run; round 1", "ig", "", "", "psnr", 0.0575, 0.04, 0.1, 12)
    shown = readme.Shown(figure)
    assert f"{shown:.2f}, {shown:s3}, {shown:%1}, {shown:n}" == "0.06, .058, 5.8, 12"
    assert f"{shown:to.2}; {shown:in.2}" == "0.06 (0.04 to 0.10); 0.06 [0.04, 0.10]"
    assert readme.number(-0.0001, "s2") == ".00"
    with pytest.raises(ValueError, match="has none"):
        format(readme.Shown(results.Figure("row", "run", "", "", "", "psnr", 1.0)), "to.1")


# --- the format -------------------------------------------------------------------------------------------------------


STORED: dict[str, Any] = {
    "settings": {"seed": 3, "small": 1},
    "environment": {
        "command": "python papers/nl_sme/run.py --only '^a row$' --small 1 --budget 60 --out x.csv --name mine",
        "git": {"commit": "0123456789"},
        "threads": 1,
    },
    "figures": {
        "table a": {
            "clients": 4,
            "cells": {"sme": {"psnr": {"clients": 4, "mean": 20.5, "lowest": 18.0, "highest": 23.0}}},
            "paired": {"nl-sme over sme": {"psnr": {"value": 1.0, "low": 0.5, "high": 1.5, "count": 4}}},
            "paper": {"psnr": 21.0},
        }
    },
}


def test_nested_figures_become_lines_and_are_found_by_their_path(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    results.add(file, results.tidy("nl_sme", "mine", STORED))
    lines = results.read(file)
    assert [(line.attack, line.metric, line.value, line.low, line.high) for line in lines] == [
        ("sme", "psnr", 20.5, None, None),
        ("nl-sme over sme", "paired psnr", 1.0, 0.5, 1.5),
    ]
    assert {(line.row, line.run, line.n, line.seed, line.commit, line.hardware) for line in lines} == {
        ("table a", "mine", 4, "3", "0123456", "CPU, 1 thread")
    }
    assert lines[0].command == "run.py --small 1"
    assert lines[0].small
    path = results.steps_of("table a/paired/nl-sme over sme/psnr/low")
    assert [number for _, number in results.find(lines, "nl_sme", path)] == [0.5]
    assert list(results.find(lines, "nl_sme", ("table a", "cells", "ig", "psnr", "mean"))) == []


def test_a_run_replaces_its_own_rows_and_leaves_others(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    for run in ("first", "second", "first"):
        results.add(file, results.tidy("nl_sme", run, STORED))
    assert [line.run for line in results.read(file)] == ["second", "second", "first", "first"]


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("row,value\na,1\n")
    with pytest.raises(ValueError, match="a table of results has"):
        results.read(tmp_path / "results.csv")


def test_numbers_keep_what_tables_round() -> None:
    for value in (0.28750000000000003, 14.1499995, 1 / 3, 120.0, 1.2345e-9):
        text = results._cell(value)
        assert all(f"{float(text):.{digits}f}" == f"{value:.{digits}f}" for digits in range(5))
    assert results._cell(1 / 3) == "0.3333333"


def test_a_run_writes_its_lines_and_says_how_bounds_fare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.path.insert(0, str(PAPERS))
    record = importlib.import_module("record")
    folder, out = tmp_path / "nl_sme", tmp_path / "table.csv"
    folder.mkdir()
    bounds = {"table a/cells/sme/psnr/mean": {"at_least": 21.0}, "table b/cells/sme/psnr/mean": {"at_least": 1.0}}
    (folder / "expected.json").write_text(json.dumps({"figures": bounds}))
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "^table a$", "--steps", "5", "--out", str(out)])
    options = argparse.Namespace(out=out, name="mine", seed=0)
    with pytest.raises(SystemExit) as ended:
        record.record(options, folder / "expected.json", STORED["figures"])
    assert ended.value.code == 1
    told = capsys.readouterr().out
    assert "FAILS  table a/cells/sme/psnr/mean = 20.5" in told
    assert "absent table b" in told
    lines = results.read(out)
    assert {(line.run, line.command) for line in lines} == {("mine", "run.py --steps 5")}


def test_what_secadams_readme_says_of_all_rows_alike() -> None:
    """One client with one example gives its label away everywhere; nothing is learnt on Tiny-ImageNet at this size."""
    figures = results.read(PAPERS / "secadam" / "results.csv")
    alone = [each.value for each in figures if each.metric == "sign" and "one client, B 1" in each.setting]
    assert len(alone) >= 8
    assert set(alone) == {1}
    tiny = [each for each in figures if each.row == "performance Tiny-ImageNet, convnext" and each.metric == "accuracy"]
    assert {each.value for each in tiny if each.setting == "cpu-small-performance-colour"} == {0.5}
