"""Rows to rates, words and tables; and what a damaged or hostile folder gives: one clear error."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradleak.defences import DPFedAvg, LocalGaussian
from gradleak.guarantee import Exposure, Guarantee
from gradleak.results import AuditResult, BadRun
from gradleak.results import rows as schema
from gradleak.results.configuration import from_toml, to_toml
from gradleak.results.headline import headlines_of
from gradleak.results.labels import Trained, guarantee_of, record
from gradleak.results.store import Folder, Memory
from gradleak.results.summary import rate, summaries_of
from gradleak.results.verdict import RULE

CELL = "0123456789abcdef"


def key(index: int) -> str:
    return f"{index:016x}"


def row(cell: int = 1, target: int = 0, **changes: Any) -> dict[str, Any]:
    """A target of one example; `hit`, `blind`, `rank1` and `blind_rank1` say whether it, or its baseline, was hit."""
    hit, blind = changes.pop("hit", False), changes.pop("blind", False)
    rank1, blind_rank1 = changes.pop("rank1", hit), changes.pop("blind_rank1", blind)
    psnr = changes.pop("psnr", 30.0 if hit else 9.0)
    standard: dict[str, Any] = {
        "version": 1, "cell": key(cell), "status": "done", "control": False, "attack": "ig", "defence": "none",
        "form": "undefended", "round": 0, "seed": 0, "examples": 1, "targets": 4, "target": target,
        "observation": f"client0/round0/target{target}", "knows": "C (training details)",
        "scores": {
            "psnr": [psnr], "ssim": [0.9 if hit else 0.1], "mse": [10 ** (-psnr / 10)], "rank": [1 if rank1 else 7],
        },
        "gallery_size": [50], "assignment": [0], "labels": {"multiset_accuracy": 1.0},
        "hits": {"ssim>0.5": [hit], "psnr>18": [hit], "psnr>20": [hit], "rank1": [rank1], "recovered": [hit]},
        "baselines": {
            "mid-grey": {"psnr": [12.0], "ssim": [0.1], "mse": [0.06]},
            "unrelated update": {"psnr": [8.0], "ssim": [0.0], "rank1": [blind_rank1], "recovered": [blind]},
        },
        "match": 1e-3, "match_start": 1.0, "objective": 1e-3, "restart": 0, "diverged": False, "converged": True,
        "checks": [], "analyses": {}, "seconds": 0.5,
    }  # fmt: skip
    return {**standard, **changes}


def rows_of(hits: list[bool], cell: int = 1, **changes: Any) -> list[dict[str, Any]]:
    return [row(cell, target, hit=hit, targets=len(hits), **changes) for target, hit in enumerate(hits)]


def control(psnr: float = 40.0) -> list[dict[str, Any]]:
    return [row(0, target, control=True, targets=2, psnr=psnr) for target in range(2)]


def result(*rows: list[dict[str, Any]], planned: list[str] | None = None) -> AuditResult:
    """A result of these rows; the plan holds exactly their cells, and a control that passed unless one is given."""
    held = [entry for part in rows for entry in part]
    if not any(entry["control"] for entry in held):
        held = control() + held
    grid = {entry["cell"]: entry["defence"] for entry in held if not entry["control"]}
    cells = list(dict.fromkeys(entry["cell"] for entry in held))
    plan = {"control": key(0), "cells": cells, "defences": planned or list(grid.values())}
    store = Memory()
    store.add("", held, None)
    fields = {"x": {"shape": [1, 2, 2], "bounds": [0.0, 1.0], "mean": [0.0], "std": [1.0]}}
    return AuditResult.of(store, {"version": 1, "plan": plan, "fields": fields}, {})


# --- intervals --------------------------------------------------------------------------------------------------------


def test_intervals_cover_the_truth() -> None:
    """Of 400 samples of 40 targets with a true share of 0.3, about 95 % of the intervals hold it."""
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        found = rate([[float(value)] for value in draw.random(40) < 0.3])
        covered += found.low <= 0.3 <= found.high
    assert 0.90 <= covered / 400 <= 0.98


def test_intervals_resample_targets_not_seeds() -> None:
    """Ten equal seeds of a target add nothing: the interval is that of one."""
    once = rate([[1.0], [0.0], [1.0], [0.0], [1.0], [1.0]])
    often = rate([[1.0] * 10, [0.0] * 10, [1.0] * 10, [0.0] * 10, [1.0] * 10, [1.0] * 10])
    assert (once.value, once.low, once.high) == (often.value, often.low, often.high)
    assert once == rate([[1.0], [0.0], [1.0], [0.0], [1.0], [1.0]]), "the interval must repeat"


@pytest.mark.parametrize(
    ("value", "low", "high"), [(0.0, 0.0, 1 - 0.025 ** (1 / 8)), (1.0, 0.025 ** (1 / 8), 1.0), (-1.0, -1.0, -0.63)]
)
def test_equal_results_are_not_certainty(value: float, low: float, high: float) -> None:
    found = rate([[value]] * 8)
    assert (found.value, found.count) == (value, 8)
    assert found.low == pytest.approx(low, abs=5e-3)
    assert found.high == pytest.approx(high, abs=5e-3)


def test_no_targets_no_rate() -> None:
    assert rate([]).count == 0
    assert np.isnan(rate([]).value)


# --- verdicts ---------------------------------------------------------------------------------------------------------

ALL, NONE, SOME = [True] * 6, [False] * 6, [True, False, False, False, False, False]


def test_leaks() -> None:
    verdict = result(rows_of(ALL)).verdict
    assert verdict.word == "leaks"
    assert "6 of 6 images" in verdict.paragraph
    assert "Small sample: 6 targets" in verdict.paragraph
    assert "Positive control passed" in verdict.paragraph
    assert verdict.rule == RULE
    assert "80 %" in RULE


def test_one_victim_is_a_leak_in_part() -> None:
    assert result(rows_of(SOME)).verdict.word == "leaks in part"


def test_re_identification_alone_is_a_leak_in_part() -> None:
    verdict = result(rows_of(NONE, rank1=True)).verdict
    assert verdict.word == "leaks in part"
    assert "picks out the right image in 100%" in verdict.paragraph


def test_what_the_unrelated_update_reaches_is_taken_off() -> None:
    """An attack that shows the same pretty prior whatever it sees has not leaked a share."""
    line = summaries_of(rows_of(ALL, blind=True))[0]
    assert (line.recovered.value, line.excess.value, line.word) == (1.0, 0.0, "leaks in part")
    assert result(rows_of(NONE, rank1=True, blind_rank1=True)).verdict.word == "not shown to leak"


def test_not_shown_to_leak_says_what_it_does_not_exclude() -> None:
    verdict = result(rows_of(NONE)).verdict
    assert verdict.word == "not shown to leak"
    assert "46%" in verdict.paragraph  # 1 - 0.025^(1/6)
    assert "stronger attacks may exist" in verdict.paragraph


@pytest.mark.parametrize("changes", [{"converged": False}, {"converged": False, "diverged": True}])
def test_an_attack_that_did_not_work_is_inconclusive(changes: dict[str, Any]) -> None:
    verdict = result(rows_of(NONE, **changes)).verdict
    assert verdict.word == "inconclusive"
    assert "converged on 0% of its targets" in verdict.paragraph


def test_an_attack_that_leaks_need_not_converge() -> None:
    assert result(rows_of(ALL, converged=False)).verdict.word == "leaks"


def failed(cell: int = 2, **changes: Any) -> list[dict[str, Any]]:
    keep = ("version", "cell", "control", "attack", "defence", "form", "round", "seed", "examples", "targets")
    base = {name: value for name, value in row(cell).items() if name in keep}
    return [{**base, "status": "failed", "target": None, "error": "ValueError: no", "traceback": "...", **changes}]


def test_a_failed_cell_is_inconclusive_but_does_not_hide_a_leak() -> None:
    verdict = result(rows_of(NONE), failed(attack="dlg")).verdict
    assert verdict.word == "inconclusive"
    assert "dlg failed (ValueError: no)" in verdict.paragraph
    assert result(rows_of(ALL), failed(attack="dlg")).verdict.word == "leaks"


def test_a_cell_that_was_not_run_is_inconclusive() -> None:
    verdict = result(rows_of(NONE), planned=["none", "none"]).verdict
    assert verdict.word == "inconclusive"
    assert "1 of 2 cells were not run" in verdict.paragraph


def test_an_unfinished_run_says_so_first() -> None:
    part = result(rows_of(ALL))
    cells = [*part.settings["plan"]["cells"], key(7), key(8), key(9)]
    part = AuditResult.of(part.store, {**part.settings, "plan": {**part.settings["plan"], "cells": cells}}, {})
    assert part.verdict.paragraph.startswith("Incomplete: 2 of 5 cells. ")
    trial = AuditResult.of(part.store, {**part.settings, "trial": True}, {})
    assert trial.verdict.paragraph.startswith("Incomplete: 2 of 5 cells. Quick run: shows that everything runs")
    assert result(rows_of(ALL)).verdict.paragraph.startswith("Undefended")


def test_the_rule_names_both_intervals() -> None:
    assert "Jeffreys" in RULE
    assert "exact binomial" in RULE


@pytest.mark.parametrize("psnr", [17.9, 3.0])
def test_a_failed_control_voids_everything(psnr: float) -> None:
    found = result(control(psnr), rows_of(ALL))
    assert found.verdict.word == "void"
    assert not found.positive_control.passed
    assert found.positive_control.psnr == pytest.approx(psnr)


def test_a_control_that_did_not_run_voids_everything() -> None:
    found = result(failed(0, control=True), rows_of(ALL))
    assert found.verdict.word == "void"
    assert "ValueError: no" in found.verdict.paragraph


def test_the_strongest_form_is_the_headline_and_the_informed_one_must_converge() -> None:
    naive = {"defence": "noise", "form": "naive"}
    adaptive = {"defence": "noise", "form": "adaptive"}
    leaky = result(rows_of(ALL), rows_of(NONE, 2, **naive), rows_of(ALL, 3, **adaptive))
    assert leaky.verdict.word == "leaks"
    assert "ig (adaptive)" in leaky.verdicts["noise"].paragraph
    good = result(rows_of(ALL), rows_of(NONE, 2, converged=False, **naive), rows_of(NONE, 3, **adaptive))
    assert good.verdict.word == "not shown to leak", "the headline is the defence's, the undefended its reference"
    assert good.verdicts["none"].word == "leaks"
    lazy = result(rows_of(ALL), rows_of(NONE, 2, **naive), rows_of(NONE, 3, converged=False, **adaptive))
    assert lazy.verdict.word == "inconclusive"


# --- defences ---------------------------------------------------------------------------------------------------------

CENTRAL = DPFedAvg().guarantee(Exposure(rounds=3))
LOCAL = LocalGaussian(noise_multiplier=4.0).guarantee(Exposure(rounds=3))
NOTHING_PROVED = Guarantee(reason="small entries are dropped")


def attacked(defence: str, proved: Guarantee, hits: dict[str, tuple[list[bool], float]], first: int) -> AuditResult:
    """Every form with its own hits and PSNR, beside an undefended client that leaks."""
    parts = [
        rows_of(own, first + place, defence=defence, form=form, psnr=psnr, guarantee=record(proved))
        for place, (form, (own, psnr)) in enumerate(hits.items())
    ]
    return result(rows_of(ALL, psnr=40.0), *parts)


@pytest.mark.parametrize(
    ("naive", "masked", "adaptive", "headline"),
    [
        ((NONE, 9.0), (NONE, 9.0), (ALL, 30.0), "adaptive"),
        ((ALL, 35.0), (ALL, 30.0), (ALL, 31.0), "naive"),  # as much recovered: then by PSNR
        ((SOME, 30.0), (ALL, 20.0), (NONE, 9.0), "masked"),  # by what is recovered before PSNR
        ((NONE, 9.0), (NONE, 11.0), (NONE, 10.0), "masked"),
    ],
)
def test_the_headline_of_a_defence_is_the_strongest_of_three_attackers(
    naive: Any, masked: Any, adaptive: Any, headline: str
) -> None:
    levels = {"naive": naive, "masked": masked, "adaptive": adaptive}
    found = attacked("pruning", NOTHING_PROVED, levels, 2)
    [held] = found.headlines
    assert held.strongest.form == headline
    assert list(held.forms) == list(levels)
    assert held.undefended is not None
    assert held.undefended.means["psnr"] == 40.0
    line = next(line for line in found.table().splitlines() if line.startswith("pruning  "))
    assert line.count("*") == 1
    at = list(levels).index(headline)
    assert re.split(r"\s{2,}", line)[2 + at].endswith(" dB *")
    assert re.split(r"\s{2,}", line)[1] == "100%, 40.0 dB"
    assert re.split(r"\s{2,}", line)[5] == "0%, 8.0 dB", "the level of chance"
    assert headline in found.verdicts["pruning"].paragraph
    assert held.word == found.verdicts["pruning"].word


def test_an_attacker_that_does_not_differ_is_a_dash_and_a_missing_reference_is_told() -> None:
    rows = rows_of(NONE, 2, defence="geyer", form="naive")
    alone = result(rows).table()
    assert re.search(r"^geyer +- +0%, 9.0 dB \* +- +- +0%, 8.0 dB", alone, re.MULTILINE)
    assert "add none to the defences" in alone
    assert "add none" not in result(rows_of(ALL), rows).table()
    assert "A0 naive" not in result(rows_of(ALL)).table(), "no defence, no second table"


def test_an_inconclusive_defence_is_not_called_safe_in_the_overview() -> None:
    parts = (
        rows_of(NONE, 2, defence="noise", form="naive"),
        rows_of(NONE, 3, defence="noise", form="adaptive", converged=False),
    )
    [held] = headlines_of(result(rows_of(ALL), *parts).summaries)
    assert held.word == "inconclusive"


def test_only_an_epsilon_that_was_given_is_printed() -> None:
    levels = {"naive": (NONE, 9.0), "adaptive": (NONE, 9.0)}
    for proved, told in ((CENTRAL, str(CENTRAL)), (LOCAL, str(LOCAL)), (NOTHING_PROVED, str(NOTHING_PROVED))):
        found = attacked("dp", proved, levels, 2)
        for format in ("text", "markdown"):
            assert f"- dp: {told.splitlines()[0]}" in found.table(format)
        defended = list(csv.DictReader(io.StringIO(found.table("csv"))))[1]
        assert defended["guarantee"] == told.replace("\n", "; ")
        assert defended["epsilon"] == ("" if proved.epsilon is None else str(proved.epsilon))
    assert "does not protect against the aggregating server" in attacked("dp", CENTRAL, levels, 2).table()
    plain = result(rows_of(ALL), rows_of(NONE, 2, defence="dp", form="naive"))  # rows of an older version
    assert "Guarantees" not in plain.table()
    assert "differential privacy" not in plain.table()


def test_labels_that_change_with_the_round_are_all_listed() -> None:
    early, late = (LocalGaussian(noise_multiplier=4.0).guarantee(Exposure(rounds=rounds)) for rounds in (1, 50))
    rows = [rows_of(NONE, 2 + n, defence="dp", form="naive", round=49 * n, guarantee=record(proved))
            for n, proved in enumerate((early, late))]  # fmt: skip
    told = result(rows_of(ALL), *rows).table()
    assert f"- dp, round 0, B = 1: {str(early).splitlines()[0]}" in told
    assert f"- dp, round 49, B = 1: {str(late).splitlines()[0]}" in told


def test_guarantees_are_read_back_as_they_were() -> None:
    for proved in (CENTRAL, LOCAL, NOTHING_PROVED):
        assert guarantee_of(json.loads(json.dumps(record(proved)))) == proved
    infinite = record(LocalGaussian(noise_multiplier=1e-300).guarantee(Exposure()))
    assert infinite["text"] == "no formal guarantee (its epsilon is infinite)"
    assert infinite["epsilon"] is None


def test_the_attacked_model_is_told_beside_the_attacks() -> None:
    tested = {"rounds": 20, "defence": "none", "test_loss": 0.21, "test_accuracy": 0.931}
    untested = {"rounds": 20, "defence": "X()", "test_loss": None, "test_accuracy": None}
    found = result(rows_of(ALL, round=20, trained=tested), rows_of(NONE, 2, round=0, trained=untested))
    assert "- round 20: test accuracy 93.1%, test loss 0.21 (trained without a defence)" in found.table()
    assert "- round 0: not tested (trained with X())" in found.table()
    assert found.summaries[0].trained == Trained(20, "none", 0.21, 0.931)
    assert list(csv.DictReader(io.StringIO(found.table("csv"))))[0]["test accuracy"] == "0.931"


def test_seeds_are_one_line() -> None:
    lines = summaries_of(rows_of(ALL, 1) + rows_of(NONE, 2, seed=1))
    assert len(lines) == 1
    assert (lines[0].seeds, lines[0].targets, lines[0].recovered.value) == (2, 6, 0.5)
    assert lines[0].cells == (key(1), key(2))


def test_nothing_at_all() -> None:
    found = result(failed(1))
    assert found.verdict.word == "inconclusive"
    assert found.table().splitlines()[2].endswith("failed")
    assert found.table("csv")


def test_certificates_are_counted_and_cited_but_decide_nothing() -> None:
    held = [CERTIFICATE, CERTIFICATE, PARTLY, PARTLY, NEITHER, None]
    rows = [{**entry, "certificate": made} for entry, made in zip(rows_of(ALL), held)]
    found = result(rows)
    certified = found.summaries[0].certified
    assert certified is not None
    assert (certified.count, certified.determined, certified.partly) == (5, 2, 2)
    assert str(certified) == (
        "2 of 5 determined: the update fixes every pixel; 2 of 5 determined up to 1 dimensions, 75% of the images' "
        "variance fixed; 1 of 5 not determined: no exact solution was found, or most is left open; residual 3e-13; "
        "smallest singular value 1e-02 (5e-03 of the largest)"
    )
    assert "Proved, without the truth: 2 of 5 updates fix every pixel" in found.verdict.paragraph
    assert found.verdict.word == result(rows_of(ALL)).verdict.word
    assert list(csv.DictReader(io.StringIO(found.table("csv"))))[0]["determined"] == "2"
    assert result(rows_of(ALL)).summaries[0].certified is None, "rows of older runs have no such key"
    alone = result([{**entry, "certificate": NEITHER} for entry in rows_of(NONE)])
    assert "Proved" not in alone.verdict.paragraph


# --- tables -----------------------------------------------------------------------------------------------------------


def test_tables() -> None:
    found = result(rows_of(ALL), rows_of(NONE, 2, attack="a|b"))
    text = found.table().splitlines()
    assert len(text) == 4
    assert "100% [54%, 100%]" in text[2]
    assert "6 (small)" in text[2]
    assert found.table("markdown").splitlines()[3].startswith("| a\\|b |")
    records = list(csv.DictReader(io.StringIO(found.table("csv"))))
    assert [float(record["recovered"]) for record in records] == [1.0, 0.0]
    assert float(records[0]["psnr baseline"]) == 8.0
    with pytest.raises(ValueError, match="text, markdown, csv"):
        found.table("pdf")


def test_html_escapes_names() -> None:
    page = result(rows_of(ALL, attack="<script>"))._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_comparison() -> None:
    many = [True] * 20
    text = str(result(rows_of(many), rows_of(ALL, 2, attack="dlg")).compare(result(rows_of([False] * 20))))
    first, second = text.splitlines()
    assert "(intervals apart)" in first
    assert "leaks -> not shown to leak" in first
    assert "PSNR -21.0 dB" in first
    assert second.endswith("only in the first run (leaks)")


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = result(rows_of(ALL))
    store = Folder(tmp_path / "run")
    store.path.mkdir()
    store.write("run.toml", to_toml(found.settings))
    store.add("", found.rows, None)
    images = torch.rand(6, 1, 1, 2, 2)
    arrays = {"found/x": images, "truth/x": images, "diverged": torch.zeros(6, dtype=torch.bool)}
    trace = {f"trace/{name}": torch.zeros(3, 6) for name in ("match", "objective")}
    store.put(key(1), {**arrays, **trace, "trace/step": torch.arange(3)})
    return store.path


def test_load(folder: Path) -> None:
    found = AuditResult.load(folder)
    assert found.rows == result(rows_of(ALL)).rows
    assert found.complete
    assert found.verdict.word == "leaks"
    pictures = found.images(key(1))
    assert torch.equal(pictures["true"], pictures["found"])
    assert found.trace(key(1))["match"].shape == (3, 6)


def test_certificates_are_read_back(folder: Path) -> None:
    store = Folder(folder)
    rows = [
        {**entry, "certificate": made} for entry, made in zip(store.rows(), [CERTIFICATE, PARTLY, NEITHER, None] * 2)
    ]
    store.tidy(rows)
    assert store.rows() == rows


def test_the_last_line_may_be_torn(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    found = AuditResult.load(folder)
    assert {entry["cell"] for entry in found.rows} == {key(0)}, "a cell without all of its rows was in flight"
    assert not found.complete
    path.write_bytes(path.read_bytes() + b'{"version": 1, "ce')
    assert AuditResult.load(folder).rows == found.rows


CERTIFICATE: dict[str, Any] = {
    "verdict": "determined", "reason": "The update fixes all 4 values.", "unknowns": 4, "equations": 9, "rank": 4,
    "null": 0, "tolerance": 1e-10, "residual": 3e-13, "rounding": 1e-9, "share": 1.0, "shift": 1e-9, "largest": 2.0,
    "smallest": 0.01, "floor": None,
}  # fmt: skip
PARTLY = {**CERTIFICATE, "verdict": "determined up to 1 dimensions", "rank": 3, "null": 1, "share": 0.75}
NEITHER = {**CERTIFICATE, "verdict": "not determined", "residual": None, "shift": None}


def damaged(**changes: Any) -> dict[str, Any]:
    return {"certificate": {**CERTIFICATE, **changes}}


def forged(**changes: Any) -> dict[str, Any]:
    return {"guarantee": {**record(NOTHING_PROVED), **changes}}


BROKEN: list[tuple[Any, str]] = [
    ({"guarantee": "private"}, "guarantee should be an object"),
    (forged(epsilon=0.1), "something else in its text than in its numbers"),
    (forged(epsilon=0.1, text="(0.1, 1e-05)-differential privacy"), "has a delta below 1"),
    (forged(epsilon=-1.0), "epsilon and delta"),
    (forged(epsilon=10**400), "epsilon and delta"),
    (forged(unit="client"), "label is given whole or not at all"),
    (forged(reason=None), "texts of its label"),
    (forged(caveats=[3]), "list caveats"),
    (forged(reconstruction=[1]), "something else"),
    ({"trained": {"rounds": "3"}}, "trained should have rounds"),
    ({"trained": {"rounds": 3, "defence": "none", "test_accuracy": "high"}}, r"trained\.test_accuracy"),
    ({"certificate": 3}, "certificate should be an object"),
    ({"certificate": {}}, r"certificate\.unknowns"),
    (damaged(rank=True), r"certificate\.rank"),
    (damaged(rank=-1), r"certificate\.rank"),
    (damaged(null=10**30), r"certificate\.null"),
    (damaged(null=1), "does not fit its rank"),
    (damaged(rank=3, null=1), "does not fit its rank"),
    (damaged(verdict="safe"), "does not fit its rank"),
    (damaged(verdict=["determined"]), "does not fit its rank"),
    (damaged(verdict="determined up to 7 dimensions", rank=3, null=1), "does not fit its rank"),
    (damaged(residual="none"), r"certificate\.residual"),
    (damaged(smallest=-1.0), r"certificate\.smallest"),
    (damaged(largest=10**400), r"certificate\.largest"),
    (damaged(reason=None), r"certificate\.reason"),
    ({"certificate": {k: v for k, v in CERTIFICATE.items() if k != "share"}}, r"certificate\.share"),
    (b"not json\n", "not JSON"),
    (b"[1]\n", "holds list"),
    (b'{"version": 2}\n', "version 2"),
    (b"[" * 100_000 + b"\n", "not JSON"),
    (b"\xff\xfe\n", "not JSON"),
    ({"status": "fine"}, "status"),
    ({"cell": "../../etc/passwd"}, "16 hexadecimal"),
    ({"form": "secret"}, "form"),
    ({"target": True}, "target"),
    ({"scores": {"psnr": ["a"], "ssim": [0], "mse": [0], "rank": [1]}}, r"scores\.psnr"),
    ({"scores": {"psnr": [1, 2], "ssim": [0], "mse": [0], "rank": [1]}}, r"scores\.psnr"),
    ({"hits": {}}, r"hits\.ssim"),
    ({"assignment": [5]}, "impossible"),
    ({"gallery_size": [0]}, "impossible"),
    ({"checks": [{"name": 1}]}, "check"),
    ({"baselines": {"mid-grey": 3}}, "baselines"),
    ({"labels": {"a": "b"}}, "labels"),
    ({"examples": 0}, "should list 0"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_broken_rows_are_one_clear_error(folder: Path, change: Any, message: str) -> None:
    line = change if isinstance(change, bytes) else json.dumps({**row(7), **change}).encode() + b"\n"
    with open(folder / "rows.jsonl", "ab") as file:
        file.write(line)
    with pytest.raises(BadRun, match=message) as caught:
        AuditResult.load(folder)
    assert "rows.jsonl:9" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_infinite_numbers_are_refused(folder: Path) -> None:
    for number in ("1e999", "NaN", "-Infinity"):
        text = json.dumps(row(7, psnr=123.25)).replace("123.25", number)
        path = folder / "rows.jsonl"
        before = path.read_bytes()
        path.write_bytes(before + text.encode() + b"\n")
        with pytest.raises(BadRun):
            AuditResult.load(folder)
        path.write_bytes(before)


def test_rows_of_a_cell_must_agree(folder: Path) -> None:
    with open(folder / "rows.jsonl", "ab") as file:
        file.write(schema.encode(row(1, 9, targets=6, attack="dlg")))
    with pytest.raises(BadRun, match="contradict"):
        AuditResult.load(folder)


@pytest.mark.parametrize(
    "text",
    ["", "version = 1", "version = [", "version = 1\nplan = 3", "version = 1\n[plan]\ncells = [1]\ndefences = []\n",
     "version = 1\n[plan]\ncontrol = 'a'\ncells = ['a']\ndefences = []\n[fields.x]\nshape = [1]\n"],
)  # fmt: skip
def test_broken_settings_are_one_clear_error(folder: Path, text: str) -> None:
    (folder / "run.toml").write_text(text)
    with pytest.raises(BadRun, match="run.toml"):
        AuditResult.load(folder)


def test_missing_or_broken_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRun, match="not the folder of a run"):
        AuditResult.load(tmp_path)
    found = AuditResult.load(folder)
    arrays = folder / "arrays" / f"{key(1)}.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:50])
    with pytest.raises(BadRun, match="cut off"):
        found.images(key(1))
    arrays.unlink()
    with pytest.raises(BadRun, match="is missing"):
        found.images(key(1))
    with pytest.raises(BadRun, match="no finished cell"):
        found.images("nothing")
    found.store.put(key(1), {"found/x": torch.zeros(1), "truth/x": torch.zeros(1)})
    with pytest.raises(BadRun, match="do not fit"):
        found.images(key(1))


def test_toml_round_trip() -> None:
    settings = {
        "text": 'quotes " and \\ and \n and \x7f and é', "flag": True, "number": -3, "real": 1e-12, "list": [1, 2],
        "texts": ["a", "b"], "table": {"inner": {"x": 1.5}, "y": "z", "odd.name": {"a b": 1}}, "empty": [],
    }  # fmt: skip
    assert from_toml(to_toml({**settings, "nothing": None}, "a comment\nof two lines")) == settings


def test_rows_have_no_infinite_numbers() -> None:
    cleaned = schema.finite({"a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": (-float("inf"),)}, "e": "text"})
    assert cleaned == {"a": None, "b": [None, 1.0], "c": {"d": [None]}, "e": "text"}
