"""`auto` against single attacks: the rule of the comparison, and what was stored of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gradleak as gl
from conftest import script

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results" / "auto-comparison-small.json"
SCRIPT = "benchmarks/auto_comparison.py"


def card(attack: str, form: str, psnr: float, determined: int | None = None) -> dict[str, Any]:
    held = None if determined is None else {"determined": determined, "count": 2}
    told: dict[str, Any] = {"attack": attack, "defence": "pruning", "form": form, "targets": 2, "errors": []}
    return told | {"means": {"psnr": psnr}, "identifiability": held, "converged": 1.0, "seconds": 1.0}


@pytest.mark.parametrize(
    ("auto", "single", "determined", "others", "holds"),
    [
        (30.0, 30.2, 2, None, True),  # within 0.3 dB
        (30.0, 30.4, 2, None, False),
        (90.0, 120.0, 2, None, True),  # both are exact
        (59.0, 120.0, 2, None, False),
        (30.0, 40.0, 1, None, None),  # one of the two is not determined: nothing is claimed
        (30.0, 40.0, None, None, None),
        (30.0, 120.0, None, 2, False),  # what the best single attack found is certified: `auto` has missed it
        (120.0, 120.0, 1, 2, True),
        (30.0, 120.0, 1, 1, None),
    ],
)
def test_only_what_is_certified_is_claimed(
    auto: float, single: float, determined: int | None, others: int | None, holds: Any
) -> None:
    alone = [card("cpl", "adaptive", 5.0, 2), card("ig", "naive", single, others)]  # the weaker one's does not count
    [row] = script(SCRIPT).compared([card("auto", "adaptive", auto, determined)], alone)
    assert row["holds"] is holds
    assert row["certified"] is (holds is not None)
    assert row["certified_by"] == [name for name, held in (("auto", determined), ("ig (naive)", others)) if held == 2]
    assert row["by"] == "ig (naive)"
    assert row["gap"] == pytest.approx(auto - single)


def test_a_defence_that_failed_is_told() -> None:
    broken = {**card("auto", "adaptive", 0.0), "targets": 0, "errors": ["out of memory"]}
    [row] = script(SCRIPT).compared([broken], [card("ig", "naive", 9.0)])
    assert row == {"defence": "pruning", "form": "adaptive", "failed": "out of memory"}


def test_it_is_about_every_defence_and_says_what_is_missing_and_that_it_is_small() -> None:
    compare, stored = script(SCRIPT), json.loads(STORED.read_text())
    told = [row["defence"] for row in stored["rows"]] + stored["not_run"]
    assert sorted(told) == sorted(compare.defences(compare.SCALES["small"]))
    assert {entry.name for entry in gl.registry.entries("defence")} <= {name.partition(":")[0] for name in told}
    assert stored["setting"]["text"].startswith("small")
    assert all(row["git"]["commit"] for row in stored["rows"])


def test_a_comparison_is_completed_defence_by_defence(tmp_path: Path) -> None:
    compare, path = script(SCRIPT), tmp_path / "held.json"
    small = compare.SCALES["small"]
    assert compare.stored(path, small) == {}
    told = {"version": compare.VERSION, "setting": compare.as_json(small), "rows": [{"defence": "none"}]}
    path.write_text(json.dumps(told))
    assert compare.stored(path, small) == {"none": {"defence": "none"}}
    assert compare.stored(path, compare.SCALES["cifar"]) == {}  # of other settings: begin anew


def test_wherever_it_is_certified_auto_was_as_strong_as_every_single_attack() -> None:
    rows = json.loads(STORED.read_text())["rows"]
    certified = [row for row in rows if row.get("certified")]
    assert len(certified) >= 5
    for row in certified:
        assert row["holds"] is True, row["defence"]
        assert script(SCRIPT).as_strong(row["auto"], max(row["single"].values())), row["defence"]


def test_the_page_tells_the_stored_gaps() -> None:
    rows, page = json.loads(STORED.read_text())["rows"], (ROOT / "docs" / "auto.md").read_text()
    open_rows = [row for row in rows if not row["certified"]]
    assert f"In {len(rows) - len(open_rows)} of {len(rows)} rows" in page
    for row in open_rows:
        attack, _, form = row["by"].partition(" ")
        told = f"| {row['auto']:.1f} dB | {row['best']:.1f} dB, `{attack.partition(':')[0]}` {form} |"
        assert told in page, row["defence"]
