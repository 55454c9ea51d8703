"""tools/house.py counts what it says, on a small tree made here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import script

FILES = {
    "src/gradleak/__init__.py": "from gradleak import a, b\n",  # no unit
    "src/gradleak/a.py": '"""Two lines\nof a docstring."""\n\nfrom gradleak import b  # an edge\n\n\ndef late():\n'
    '    """Says."""\n    from gradleak.c.one import x\n\n    return x\n',
    "src/gradleak/b.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import gradleak.a\n",
    "src/gradleak/c/__init__.py": "",
    "src/gradleak/c/one.py": "import gradleak.a\nx = getattr(stage.match, 'rows', 0)\n",
    "src/gradleak/d.py": "class D:\n    def nine(self, a, b, c, d, e, f, g, h, *, i):\n        return 1\n\n"
    "    def eight(self, a, b, c, d, e, f, g, h):\n        return 1\n\n\n"
    "def long():\n" + "    x = 1\n" * 50 + "\n\ndef short():\n" + "    x = 1\n" * 49,
    "README.md": "five words are in here\n",
    "docs/design.md": "two words\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    return tmp_path


def test_figures_of_a_small_tree(tree: Path) -> None:
    figures = script("tools/house.py").figures_of(tree, audit=False)
    assert (figures["units"], figures["edges"], figures["knots"]) == (4, 3, [2])  # a -> b, a -> c, c -> a
    assert figures["functions"] == 5
    assert (figures["functions over 50 lines"], figures["functions over 8 parameters"]) == (1, 1)
    assert figures["probes of parts"] == 1
    assert (figures["README words"], figures["design.md words"]) == (5, 2)
    assert figures["total lines"] == sum(len(FILES[name].splitlines()) for name in FILES if name.endswith(".py"))
    # __init__ 1; a: 2 imports, def, return; b 3; c 2; d: 5 in the class, 1 + 50, 1 + 49
    assert figures["code lines"] == 1 + 4 + 3 + 2 + 5 + 51 + 50
    assert figures["tracked MB"] == round(sum(map(len, FILES.values())) / 1e6, 2)


def test_before_and_after_stand_beside_each_other(tree: Path, tmp_path: Path) -> None:
    before, out = tmp_path / "before.json", tmp_path / "out.json"
    junit = '<testsuites><testsuite tests="7" skipped="2" time="90"/></testsuites>'
    (tmp_path / "junit.xml").write_text(junit)
    before.write_text(json.dumps({"units": 9, "edges": 50}))
    words = ["--root", tree, "--no-audit", "--before", before, "--tests", tmp_path / "junit.xml", "--out", out]
    command = [sys.executable, Path(__file__).parents[1] / "tools" / "house.py", *words]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert ["units", "9", "4", "at", "most", "30"] in [line.split() for line in shown.splitlines()]
    held = json.loads(out.read_text())
    assert (held["before"]["edges"], held["after"]["edges"]) == (50, 3)
    assert (held["after"]["tests"], held["after"]["skips"], held["after"]["test minutes"]) == (7, 2, 1.5)


def test_the_output_of_pytest_tells_tests_and_minutes(tmp_path: Path) -> None:
    house = script("tools/house.py")
    log = tmp_path / "log.txt"
    log.write_text("...\n===== 2 failed, 97 passed, 3 skipped, 139 deselected, 3 warnings in 120.00s (0:02:00) =====\n")
    assert house.tests_of(log) == {"tests": 102, "skips": 3, "test minutes": 2.0}
    log.write_text("97 passed in 3.00s\n")
    assert house.tests_of(log)["tests"] == 97
    log.write_text("nothing of the kind\n")
    with pytest.raises(SystemExit, match="neither a JUnit file"):
        house.tests_of(log)


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no checkout of this project"):
        script("tools/house.py").figures_of(tmp_path, audit=False)
