"""tools/mutants.py finds its areas, wherever their files are, and takes as many places from each."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import script


@pytest.fixture
def mutants() -> ModuleType:
    return script("tools/mutants.py")


def test_every_area_and_every_equivalent_mutant_has_its_file(mutants: ModuleType) -> None:
    for area in mutants.AREAS:
        assert mutants.files_of(area)
    for name, _ in mutants.EQUIVALENT:
        assert mutants.located(name).is_file()


def test_a_module_that_moved_is_found_and_one_that_is_gone_is_named(
    mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path / "src" / "gradleak")
    for name in ("engine/search.py", "checks.py", "report/checks.py", "report/rows.py", "audit/rows.py"):
        (mutants.PACKAGE / name).parent.mkdir(parents=True, exist_ok=True)
        (mutants.PACKAGE / name).touch()
    assert mutants.located("search") == mutants.PACKAGE / "engine" / "search.py"  # it moved
    assert mutants.located("checks") == mutants.PACKAGE / "checks.py"  # the path itself comes first
    assert mutants.located("engine").is_dir()
    with pytest.raises(SystemExit, match="names the module 'local'; no file or folder has that name"):
        mutants.located("local")
    with pytest.raises(SystemExit, match="src/gradleak/audit/rows.py and src/gradleak/report/rows.py"):
        mutants.located("rows")
    monkeypatch.setattr(mutants, "AREAS", {"both": ["engine", "search"]})
    assert mutants.files_of("both") == [mutants.PACKAGE / "engine" / "search.py"]


def test_areas_take_turns(mutants: ModuleType) -> None:
    found = mutants.chosen(2, seed=3)
    assert [mutant.area for mutant in found] == [*mutants.AREAS] * 2
    assert found == mutants.chosen(2, seed=3)
    assert found != mutants.chosen(2, seed=4)


@pytest.mark.parametrize(("minutes", "met"), [(None, 5), (-1.0, 0)])
def test_workers_share_the_places_and_stop_in_time(
    mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None, met: int
) -> None:
    monkeypatch.setattr(mutants, "HOME", tmp_path)
    (tmp_path / "durations.txt").write_text("")
    sqlite3.connect(tmp_path / "coverage").close()
    monkeypatch.setattr(mutants, "copy_of_tree", lambda number: tmp_path / f"tree{number}")
    monkeypatch.setattr(mutants, "tests_of", lambda *given: [])
    trees: list[Path] = []

    def broken(mutant: Any, tests: list[str], limit: float, tree: Path) -> dict[str, object]:
        trees.append(tree)
        return {"area": mutant.area, "file": mutant.file, "old": "", "new": "", "outcome": "survived", "tests": 0}

    monkeypatch.setattr(mutants, "broken", broken)
    todo = mutants.chosen(1, seed=0)[:5]
    mutants.run(todo, [], 2, minutes)
    kept = tmp_path / "mutants.jsonl"
    keys = [json.loads(line)["key"] for line in kept.read_text().splitlines()] if kept.exists() else []
    assert sorted(keys) == sorted(mutant.key for mutant in todo[:met])
    assert len(trees) == met
    assert set(trees) <= {tmp_path / "tree0", tmp_path / "tree1"}


def test_the_group_of_a_test_is_no_part_of_its_id(mutants: ModuleType) -> None:
    assert mutants.without_group("tests/test_analyse.py::test_a@analyse") == "tests/test_analyse.py::test_a"
    assert mutants.without_group("tests/test_x.py::test_a[b@c]@flower runs") == "tests/test_x.py::test_a[b@c]"
    assert mutants.without_group("tests/test_x.py::test_a[b@c]") == "tests/test_x.py::test_a[b@c]"
