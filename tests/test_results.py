"""Rows to rates, words and tables; and what a damaged or hostile folder gives: one clear error."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import gradleak as gl
from gradleak.audit import comparison
from gradleak.audit import rows as schema
from gradleak.audit.formats import text_of
from gradleak.audit.intervals import rate
from gradleak.audit.result import AuditResult
from gradleak.audit.rows import ROW, Trained, guarantee_of, guarantee_record, page
from gradleak.audit.store import Folder, Memory
from gradleak.audit.summary import summaries_of
from gradleak.audit.verdict import RULE, headlines_of
from gradleak.core.configuration import from_toml, to_toml
from gradleak.core.files import BadRun, encode, finite
from gradleak.defences import DPFedAvg, LocalGaussian
from gradleak.identify.span_certificate import SpanCertificate
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.kinds import KINDS, Column, Image, Kind, Series, Table, Tokens

CELL = "0123456789abcdef"


def key(index: int) -> str:
    return f"{index:016x}"


def row(cell: int = 1, target: int = 0, **changes: Any) -> dict[str, Any]:
    """A target of one example; `hit`, `blind`, `rank1` and `blind_rank1` say whether it, or its baseline, was hit."""
    hit, blind = changes.pop("hit", False), changes.pop("blind", False)
    rank1, blind_rank1 = changes.pop("rank1", hit), changes.pop("blind_rank1", blind)
    psnr = changes.pop("psnr", 30.0 if hit else 9.0)
    standard: dict[str, Any] = {
        "version": 2, "cell": key(cell), "status": "done", "control": False, "attack": "ig", "defence": "none",
        "form": "undefended", "kind": "image", "round": 0, "seed": 0, "examples": 1, "targets": 4, "target": target,
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


SETTINGS: dict[str, dict[str, Any]] = {
    "table": {"columns": [{"name": "a"}, {"name": "b", "categories": ["u", "v", "w"]}]}
}


def row_of(kind: str, cell: int = 1, target: int = 0, hit: bool = False, **changes: Any) -> dict[str, Any]:
    """The same for any kind: every measure at its best if it was hit, at its worst else."""
    made, chosen = row(cell, target, hit=hit, **changes), KINDS[kind]
    scores = {each.name: [0.99 if each.higher == hit else 0.01] for each in chosen.measures}
    passed = {each.name: [hit] for each in chosen.thresholds}
    blind = {each.name: [0.01 if each.higher else 0.99] for each in chosen.measures}
    return {
        **made,
        "kind": kind,
        "scores": {**scores, "rank": made["scores"]["rank"]},
        "hits": {**passed, "rank1": [hit], "recovered": [hit]},
        "baselines": {"unrelated update": {**blind, "rank1": [False], "recovered": [False]}},
    }


def result_of(kind: str, hits: list[bool]) -> AuditResult:
    """A run on x of this kind, with a control that passed."""
    rows = [row_of(kind, 0, target, hit=True, control=True, targets=2) for target in range(2)]
    rows += [row_of(kind, 1, target, hit=hit, targets=len(hits)) for target, hit in enumerate(hits)]
    run = result(rows)
    fields = {"x": {"shape": [4], "bounds": [0.0, 1.0], "mean": [0.0], "std": [1.0], "kind": kind}}
    fields["x"]["settings"] = SETTINGS.get(kind, {})
    return AuditResult.of(run.store, {**run.settings, "fields": fields}, {})


NO_IMAGES = [name for name in KINDS if not KINDS[name].pictures]


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
    keep = ("version", "cell", "control", "attack", "defence", "form", "kind", "round", "seed", "examples", "targets")
    base = {name: value for name, value in row(cell).items() if name in keep}
    return [{**base, "status": "failed", "target": None, "error": "ValueError: no", "traceback": "...", **changes}]


def test_a_line_that_cannot_be_scored_is_the_weakest() -> None:
    """Scores that are no numbers must not make an attack the strongest one."""
    unscored = [{**held, "scores": dict.fromkeys(held["scores"], [None])} for held in rows_of(NONE, 2, attack="dlg")]
    scored, none = summaries_of(rows_of(NONE, psnr=1.0) + unscored)
    assert "psnr" not in none.means
    assert none.strength < scored.strength


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
    assert found.positive_control.value == pytest.approx(psnr)


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
        rows_of(own, first + place, defence=defence, form=form, psnr=psnr, guarantee=guarantee_record(proved))
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
    rows = [rows_of(NONE, 2 + n, defence="dp", form="naive", round=49 * n, guarantee=guarantee_record(proved))
            for n, proved in enumerate((early, late))]  # fmt: skip
    told = result(rows_of(ALL), *rows).table()
    assert f"- dp, round 0, B = 1: {str(early).splitlines()[0]}" in told
    assert f"- dp, round 49, B = 1: {str(late).splitlines()[0]}" in told


def test_guarantees_are_read_back_as_they_were() -> None:
    for proved in (CENTRAL, LOCAL, NOTHING_PROVED):
        assert guarantee_of(json.loads(json.dumps(guarantee_record(proved)))) == proved
    infinite = guarantee_record(LocalGaussian(noise_multiplier=1e-300).guarantee(Exposure()))
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
    with pytest.raises(ValueError, match="text, markdown, latex, csv"):
        found.table("pdf")


def test_latex_escapes_whatever_a_name_holds() -> None:
    name = r"a_b & 50% $#{}~^\<|>["
    found = result(rows_of(ALL, attack=name), rows_of(NONE, 2, defence="pruning:keep=0.1", form="naive"))
    text = found.table("latex")
    assert r"a\_b \& 50\% \$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in text
    tables = text.split(r"\begin{tabular}")[1:]
    assert len(tables) == 2, "the lines, and what they say of each defence"
    for table in tables:
        columns = re.match(r"\{(l+)\}", table)
        assert columns is not None
        rows = [line for line in table.splitlines() if line.endswith(r" \\")]
        assert len(rows) > 1
        assert {len(re.findall(r"(?<!\\) & ", row)) + 1 for row in rows} == {len(columns[1])}
    bare = re.sub(r"\\([&%$#_{}]|text\w+\{\}|\w+\{\w+\})", "", text)
    assert not re.search(r"[$#_~^<>|]", bare)


def test_a_rule_as_wide_as_each_column_stands_below_the_head() -> None:
    rows = [["attack", "n"], ["ig", "1000"], ["second-order", "7"]]
    assert text_of(rows).splitlines() == [
        "attack        n",
        "------------  ----",
        "ig            1000",
        "second-order  7",
    ]


def test_a_notebook_shows_the_verdict_and_a_compact_table() -> None:
    page = result(
        rows_of(ALL, attack="<script>"), rows_of(NONE, 2, converged=False), failed(3, attack="dlg")
    )._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for outside in ("http", "src=", "url(", "@import", "onclick"):
        assert outside not in page, "one piece, nothing from outside"
    assert page.index('class="w"') < page.index("<table>"), "the verdict first"
    assert "100% [54%, 100%]" in page
    assert page.count("class=h") == 2, "hatched where the attack did not work, which is not the same as safe"
    assert "failed: ValueError: no" in page
    assert "labels: not granted" in page
    ElementTree.fromstring(page.replace("class=n", 'class="n"').replace("class=h", 'class="h"'))  # balanced


def test_a_notebook_calls_a_line_failed_only_where_nothing_of_it_was_done() -> None:
    one_seed_failed = result(rows_of(ALL), failed(2))._repr_html_()
    assert ">leaks<" in one_seed_failed[one_seed_failed.index("<table>") :]
    assert "failed:" not in one_seed_failed


def test_a_notebook_of_a_void_run_calls_no_line_anything_else() -> None:
    page = result(control(3.0), rows_of(ALL))._repr_html_()
    assert page.count(">void<") == 2
    assert ">leaks<" not in page


def test_a_notebook_shows_the_strongest_of_many_lines() -> None:
    many = [rows_of([index == 35] * 2, index + 1, attack=f"attack-{index}") for index in range(40)]
    page = result(*many)._repr_html_()
    assert page.count("<tr>") == 31
    assert "10 weaker lines are left out" in page
    assert page.index("attack-35") < page.index("attack-1<")


# --- two runs ---------------------------------------------------------------------------------------------------------


def same_examples(found: AuditResult, data: str = "abc") -> AuditResult:
    clients = {"clients": 1, "examples": 1, "seed": 0, "split": "iid"}
    settings = {**found.settings, "fingerprint": {"data": data}, "federation": clients}
    return AuditResult.of(found.store, settings, {})


def test_comparison_of_independent_runs() -> None:
    many = [True] * 20
    found = result(rows_of(many), rows_of(ALL, 2, attack="dlg")).compare(result(rows_of([False] * 20)))
    assert not found.paired
    first, second = found.changes
    assert (first.words, second.words) == ("leaks -> not shown to leak", "only in the first run: leaks")
    # Newcombe's from the exact bounds of 20 of 20 and of 0 of 20, each 1 - 0.025^(1/20) = 0.1684 wide
    assert first.recovered.value == -1.0
    assert first.recovered.high == pytest.approx(-1 + 0.16843 * 2**0.5, abs=1e-4)
    assert str(first).endswith(
        ": recovered -100 points [-100, -76], PSNR -21.0 dB [-21.0, -21.0], leaks -> not shown to leak."
    )
    text = found.table()
    assert text.startswith("Verdict: leaks -> not shown to leak.")
    assert text.index("ig ") < text.index("dlg ")
    assert "two sets of examples" in text
    assert found.worse == ()
    assert len(found.changed) == 3


def test_comparison_by_target_where_the_examples_are_the_same() -> None:
    """Every target is 1 dB clearer: surely so by pairs, lost in the spread between targets without them."""
    levels = [10.0, 20.0, 30.0, 40.0]

    def run(more: float) -> AuditResult:
        rows = [row(1, target, psnr=level + more * (1 + target / 10)) for target, level in enumerate(levels)]
        return result(rows)

    paired = same_examples(run(0.0)).compare(same_examples(run(1.0)))
    assert paired.paired
    [change] = paired.changes
    assert change.score.value == pytest.approx(1.15)
    assert change.score.low > 0.9
    assert (change.recovered.value, change.recovered.low, change.recovered.high) == pytest.approx(
        (0, -0.6024, 0.6024), abs=1e-4
    )
    [apart] = same_examples(run(0.0)).compare(same_examples(run(1.0), "other data")).changes
    assert apart.score.value == pytest.approx(1.15)
    assert apart.score.low < -15


def test_intervals_of_differences_cover_the_truth() -> None:
    """Of 300 pairs of runs of 30 targets with true shares 0.5 and 0.3, about 95 % of the intervals hold -0.2."""
    draw = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        one, two = (rate([[float(hit)] for hit in draw.random(30) < share]) for share in (0.5, 0.3))
        found = comparison._newcombe(one, two)
        covered += found.low <= -0.2 <= found.high
    assert 0.91 <= covered / 300 <= 0.985


@pytest.mark.parametrize("how", [comparison._within, comparison._welch])
def test_intervals_of_differences_in_decibels_cover_the_truth_in_any_unit(how: Any) -> None:
    """Of 1000 pairs of runs of six targets whose true difference is 1 dB, about 95 % of the intervals hold it."""
    draw = np.random.default_rng(4)
    for spread in (0.1, 10.0):
        covered = 0
        for _ in range(1000):
            one, two = (dict(enumerate(mean + spread * draw.standard_normal(6))) for mean in (20.0, 21.0))
            found = how(one, two)
            covered += found.low <= 1.0 <= found.high
        assert 0.93 <= covered / 1000 <= 0.975


@pytest.mark.parametrize("how", [comparison._within, comparison._welch])
def test_no_target_in_common_is_no_difference_and_one_has_no_interval(how: Any) -> None:
    none, alone = how({}, {}), how({0: 10.0}, {0: 12.5})
    assert (comparison.difference(none, Image().headline), none.count) == ("-", 0)
    assert (comparison.difference(alone, Image().headline), alone.count) == ("+2.5 dB", 1)


def test_what_is_worse() -> None:
    clean, leaky = rows_of(NONE), rows_of(ALL)
    verdict, line = result(clean).compare(result(leaky)).worse
    assert verdict == "The verdict is worse: not shown to leak -> leaks."
    assert "It leaks more: ig against none" in line
    [new] = result(clean).compare(result(clean, rows_of(ALL, 2, attack="dlg"))).worse
    assert "The verdict is worse" in new, "a line that only the second run has is in its verdict"
    assert result(leaky).compare(result(clean)).worse == ()
    assert result(clean).compare(result(clean)).changed == ()
    void = result(control(3.0), leaky)
    assert "void" in result(leaky).compare(void).worse[0]
    half, more = [True] * 12 + [False] * 8, [True] * 20
    same_word = result(rows_of(half)).compare(result(rows_of(more)))
    assert same_word.changes[0].words == "leaks"
    assert same_word.changes[0].worse, "the interval of the difference lies above zero"
    assert same_word.table().count("(leaks more)") == 1


@pytest.mark.parametrize("format", ["text", "markdown", "latex", "csv"])
def test_comparisons_in_every_format(format: str) -> None:
    found = result(rows_of(ALL), failed(2, attack="a_b")).compare(result(rows_of(NONE)))
    text = found.table(format)
    assert "nan" not in text
    assert ("a\\_b" if format == "latex" else "a_b") in text
    if format == "csv":
        records = list(csv.DictReader(io.StringIO(text)))
        assert [record["changed"] for record in records] == ["True", "True"]
        assert float(records[0]["recovered change"]) == -1.0
        assert records[1]["second word"] == ""
    with pytest.raises(ValueError, match="text, markdown, latex, csv"):
        found.table("pdf")


# --- JUnit ------------------------------------------------------------------------------------------------------------


def cases(found: AuditResult, fail_above: float | None = None, reason: str = "") -> dict[str, str]:
    """What became of each test case: the word of JUnit, or passed."""
    suite = ElementTree.fromstring(found.junit(fail_above, reason))[0]
    words = [next((child.tag for child in case if child.tag != "system-out"), "passed") for case in suite]
    assert suite.get("tests") == str(len(words))
    for name, word in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.get(name) == str(words.count(word))
    return {case.get("name", ""): word for case, word in zip(suite, words)}


def test_junit_has_a_case_for_each_cell() -> None:
    unsure = rows_of(NONE, 3, attack="slow", converged=False)
    rows = [rows_of(ALL), rows_of(NONE, 2, attack="weak"), unsure, failed(4, attack="broken")]
    told = list(cases(result(*rows), 0.5, "too much").values())
    assert told == ["passed", "failure", "passed", "skipped", "error", "failure"]
    told = list(cases(result(*rows)).values())
    assert told == ["passed", "passed", "passed", "skipped", "error", "passed"], "no threshold was stated"


def test_junit_of_a_run_that_is_void_or_unfinished() -> None:
    void = result(control(3.0), rows_of(NONE))
    assert list(cases(void, 0.5, "void").values()) == ["failure", "passed", "failure"]
    assert list(cases(void).values()) == ["skipped", "passed", "skipped"]
    part = result(rows_of(ALL))
    cells = [*part.settings["plan"]["cells"], key(7)]
    part = AuditResult.of(part.store, {**part.settings, "plan": {**part.settings["plan"], "cells": cells}}, {})
    assert cases(part)[f"cell {key(7)}"] == "skipped"


def test_junit_is_xml_whatever_an_error_says() -> None:
    trace = "\x1b[31m<&>\x00 \ud800 ]]> \N{SNOWMAN}"
    text = result(rows_of(ALL), failed(2, error=trace, traceback=trace)).junit()
    [error] = ElementTree.fromstring(text.encode()).iter("error")
    assert error.text == "?[31m<&>? ? ]]> \N{SNOWMAN}"


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


SPANS: dict[str, Any] = {
    "examples": 2, "layer": "4", "outside": [1e-9, None], "proved": 1, "reason": "One is open.",
    "layers": [{"layer": "2", "rank": None, "rows": None, "unexplained": 1e-8, "gap": None}, {"layer": "4"}],
}  # fmt: skip


def damaged(**changes: Any) -> dict[str, Any]:
    return {"certificate": {**CERTIFICATE, **changes}}


def misread(**changes: Any) -> dict[str, Any]:
    return {"spans": {**SPANS, **changes}}


def forged(**changes: Any) -> dict[str, Any]:
    return {"guarantee": {**guarantee_record(NOTHING_PROVED), **changes}}


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
    ({"spans": 3}, "spans should be an object"),
    (misread(examples=0), "proved <= told apart <= examples"),
    (misread(examples=1), "proved <= told apart <= examples"),
    (misread(proved=3), "proved <= told apart <= examples"),
    (misread(proved=True), "whole numbers for examples and proved"),
    (misread(layer=None), "texts for layer and reason"),
    (misread(outside=["private"]), r"spans\.outside"),
    (misread(outside=[10**400]), r"spans\.outside"),
    (misread(layers={}), r"spans\.layers should be a list"),
    (misread(layers=["4"]), "objects with a layer"),
    (misread(layers=[{"layer": "4", "rank": -1}]), "rank and rows"),
    (misread(layers=[{"layer": "4", "gap": "wide"}]), "unexplained and gap"),
    (b"not json\n", "not JSON"),
    (b"[1]\n", "holds list"),
    (b'{"version": 3}\n', "version 3"),
    ({"kind": "smell"}, "kind should be one of image"),
    ({"kind": ["image"]}, "kind is"),
    ({"kind": "table"}, r"scores\.right"),
    ({"kind": "tokens"}, r"scores\.order"),
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


# --- the schema of a row ----------------------------------------------------------------------------------------------


def test_rows_are_what_the_schema_says() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    held = [
        *rows_of(SOME),
        *failed(),
        {**row(), "certificate": CERTIFICATE, "guarantee": guarantee_record(NOTHING_PROVED)},
    ]
    held.append({**row(), "spans": SPANS})
    held.append({**row(), "trained": {"rounds": 3, "defence": "none", "test_loss": None, "test_accuracy": 0.9}})
    jsonschema.Draft202012Validator.check_schema(ROW)
    for entry in held:
        jsonschema.validate(json.loads(encode(entry)), ROW)
    wrong = [
        {"status": "fine"},
        {"form": "secret"},
        {"cell": "x"},
        {"round": "0"},
        {"hits": {}},
        {"version": 3},
        {"kind": "table"},
    ]
    for change in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**row(), **change}, ROW)


def test_a_span_certificate_is_read_back_from_a_row() -> None:
    found = SpanCertificate.of(SPANS)
    assert SpanCertificate.of(json.loads(json.dumps(found.record()))) == found
    assert found.apart == 2
    assert [layer.layer for layer in found.solved] == ["2"]


def test_what_is_checked_and_what_is_described_are_the_same_entries() -> None:
    assert ROW["required"] == ["version", *schema.REQUIRED]
    assert ROW["then"]["required"] == list(schema.SCORED)
    assert row().keys() <= ROW["properties"].keys()
    assert failed()[0].keys() <= ROW["properties"].keys()


def test_an_audit_writes_what_the_schema_describes() -> None:
    """Every entry of a real row is described, and every described one but the optional ones is there."""
    jsonschema = pytest.importorskip("jsonschema")
    model = gl.models.lenet_zhu(shape=(1, 8, 8), classes=4, generator=torch.Generator().manual_seed(0))
    like = (torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=like)
    x = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    images = gl.data.Images(x, torch.arange(12) % 4, 4, tuple("abcd"), "made up")
    engine = gl.Engine(device="cpu")
    found = gl.Audit(task, images, ["ig:steps=2"], ["pruning"], targets=1, unrelated=1, engine=engine).run()
    for entry in found.rows:
        jsonschema.validate(entry, ROW)
        assert ROW["properties"].keys() - entry.keys() == {"drawn", "error", "spans", "traceback", "tried"}
        assert entry.keys() <= ROW["properties"].keys()


def test_older_rows_are_brought_up_to_date(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were another version, in which attacks are written in capitals."""
    monkeypatch.setattr(schema, "ROW_VERSION", 3)
    monkeypatch.setitem(schema.UPGRADES, 2, lambda old: {**old, "attack": old["attack"].upper()})
    found = AuditResult.load(folder)
    assert {entry["attack"] for entry in found.rows} == {"IG"}
    assert {entry["version"] for entry in found.rows} == {3}


def test_rows_of_the_first_version_are_of_images(folder: Path) -> None:
    """Version 1 knew no kinds: the same folder, as it was written then."""
    now, path = AuditResult.load(folder), folder / "rows.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    old = [{name: value for name, value in line.items() if name != "kind"} | {"version": 1} for line in lines]
    path.write_bytes(b"".join(map(encode, old)))
    before = AuditResult.load(folder)
    assert before.rows == now.rows
    assert before.table() == now.table()
    assert str(before.verdict) == str(now.verdict)


@pytest.mark.parametrize("version", [3, 0, -1, "1", True, None, 1.5])
def test_other_versions_say_what_to_do(version: Any) -> None:
    line = json.dumps({**row(), "version": version}).encode()
    with pytest.raises(BadRun, match="Read it with the one that wrote it" if version == 3 else "no gradleak wrote"):
        schema.decode(line, "rows.jsonl:1")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_need_its_scores_and_hits(kind: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    whole = row(hit=True) if kind == "image" else row_of(kind, hit=True)
    assert schema.decode(encode(whole), "rows.jsonl:1") == whole
    jsonschema.validate(whole, ROW)
    for part in ("scores", "hits"):
        for name in whole[part]:
            less = {**whole, part: {key: value for key, value in whole[part].items() if key != name}}
            with pytest.raises(BadRun, match=re.escape(f"{part}.{name} should list 1 values")):
                schema.decode(encode(less), "rows.jsonl:1")
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(less, ROW)


def test_a_score_that_not_all_rows_have_is_checked_too() -> None:
    odd = {**row(), "scores": {**row()["scores"], "lpips": ["near"]}}
    with pytest.raises(BadRun, match=r"scores\.lpips"):
        schema.decode(encode(odd), "rows.jsonl:1")


def test_a_run_has_one_kind_of_data(folder: Path) -> None:
    with open(folder / "rows.jsonl", "ab") as file:
        file.write(encode(row_of("table", 0, 1, control=True, targets=2)))
    with pytest.raises(BadRun, match="contradict|of kind"):
        AuditResult.load(folder)
    path = folder / "run.toml"
    path.write_text(path.read_text().replace("[fields.x]", '[fields.x]\nkind = "vector"'))
    (folder / "rows.jsonl").write_bytes(b"".join(map(encode, result(rows_of(ALL)).rows)))
    with pytest.raises(BadRun, match="is a run of kind 'vector'; a row of it is of kind 'image'"):
        AuditResult.load(folder)


FORGED = [
    ('kind = "smell"', "smell"),
    ("kind = 3", "fields"),
    ('kind = "table"\nsettings = {columns = 3}', "fields"),
    ('kind = "table"\nsettings = {columns = [{name = "a", odd = 1}]}', "odd"),
    ('kind = "table"\nsettings = {columns = [{name = "a", std = 0.0, low = 0.0}]}', "fields"),
    ('kind = "table"\nsettings = {columns = [{name = "a"}]}', "take 1 entries"),
    ('kind = "image"', "channels, height, width"),
    ('kind = "vector"\nsettings = {a = 1}', "fields"),
]


@pytest.mark.parametrize(("entry", "message"), FORGED)
def test_a_kind_that_cannot_be_made_is_one_clear_error(folder: Path, entry: str, message: str) -> None:
    path = folder / "run.toml"
    path.write_text(path.read_text().replace("shape = [1, 2, 2]", f"shape = [4]\n{entry}"))
    with pytest.raises(BadRun, match=message) as caught:
        AuditResult.load(folder)
    assert "run.toml" in str(caught.value)


@pytest.mark.parametrize("kind", NO_IMAGES)
@pytest.mark.parametrize("hits", [ALL, SOME, NONE])
def test_no_text_of_another_kind_speaks_of_images(kind: str, hits: list[bool]) -> None:
    run = result_of(kind, hits)
    texts = [str(run.verdict), run.verdict.rule, run.verdict.because, run.positive_control.text, run._repr_html_()]
    texts += [run.table(format) for format in ("text", "markdown", "latex", "csv")]
    texts += [str(line.ruling) for line in run.summaries] + [json.dumps(run.cards), run.junit(0.5)]
    for text in texts:
        assert not re.search(r"image|pixel|psnr|ssim|\bdB\b", text, re.IGNORECASE), text
    assert run.verdict.word == {6: "leaks", 1: "leaks in part", 0: "not shown to leak"}[sum(hits)]
    assert KINDS[kind].rule in run.verdict.rule
    assert KINDS[kind].noun[sum(hits) > 0] in run.verdict.paragraph


@pytest.mark.parametrize("kind", NO_IMAGES)
def test_figures_of_every_kind(kind: str) -> None:
    run = result_of(kind, SOME)
    line, measures = run.summaries[0], KINDS[kind].measures
    assert line.kind.name == kind
    assert set(line.rates) == {*(each.name for each in KINDS[kind].thresholds), "rank1"}
    for each in measures:
        assert line.worst[each.name] == (0.99 if each.higher else 0.01), "the clearest example"
        assert f"{each.label} mean" in run.table() or each.label in run.table() or not each.column
        assert f"{each.name} mean" in run.table("csv")
    assert line.paired is not None
    scale = 100 if measures[0].percent else 1
    assert line.paired.difference == pytest.approx(scale * (0.99 - 0.01) / 6)
    assert run.positive_control.passed
    assert run.cards[0]["control"] == {"passed": True, line.kind.control_measure.name: 0.99}


def test_texts_of_former_rules_are_refused_with_a_word() -> None:
    former = row_of("tokens", hit=True)
    former["scores"] = {name: former["scores"][name] for name in ("bag", "order", "rank")}
    former["hits"] = {
        "every token": [True],
        "whole bag": [True],
        "bag>90%": [True],
        "rank1": [True],
        "recovered": [True],
    }
    with pytest.raises(BadRun, match="earlier gradleak scored these texts by other rules.*Run the audit again"):
        schema.decode(encode(former), "rows.jsonl:1")


def test_a_bag_without_an_order_passes_the_control_and_is_told() -> None:
    """Texts whose tokens are found and whose places are not: no void run, and the bag is in the verdict."""
    run = result_of("tokens", NONE)
    for each in run.rows:
        each["scores"]["bag"], each["scores"]["order"] = [0.99], [0.1]
    assert run.positive_control.passed
    assert "50% tokens found" in run.verdict.rule
    assert "Mean 99% tokens found." in run.verdict.paragraph
    assert run.verdict.word == "not shown to leak"


def test_lines_of_other_kinds_are_sorted_by_their_first_measure() -> None:
    weak, strong = (
        [{**row_of("series", cell, attack=name), "hits": row_of("series")["hits"]} for cell in (number,)]
        for number, name in ((1, "dlg"), (2, "ig"))
    )
    strong[0]["scores"]["correlation"] = [0.5]
    lines = summaries_of([*weak, *strong])
    assert max(lines, key=lambda line: line.strength).attack == "ig"


def test_runs_of_two_kinds_are_not_compared() -> None:
    table = result_of("table", ALL)
    assert "columns right" in table.compare(result_of("table", SOME)).table()
    assert "-83 points" in table.compare(result_of("table", SOME)).table()
    assert "correlation -0.8" in str(result_of("series", ALL).compare(result_of("series", SOME)).changes[0])
    with pytest.raises(ValueError, match="first run is of rows and the second of images"):
        table.compare(result(rows_of(ALL)))


def test_a_run_of_a_newer_gradleak_says_what_to_do(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text(path.read_text().replace("version = 1", 'version = 2\ngradleak = "7.0"'))
    with pytest.raises(BadRun, match="has version 2; this gradleak reads 1. Read it with gradleak 7.0"):
        AuditResult.load(folder)


PAGE = Path(__file__).parents[1] / "docs" / "rows.md"
ABOUT = """# The rows of a run

`rows.jsonl` in the folder of a run has one JSON object per line: what one cell (one attack against one defence, in one
form, at one round, with one seed) found out about one target. Tables, verdict and report are computed from it; read it
with any tool, or with `gl.AuditResult.load(folder).rows`, which checks every line. Numbers are finite or null.

Every row has a `version`. Within a version entries may be added, never changed or taken away: ignore those that you do
not know. Rows of an older version are brought up to date when they are read; those of a newer one are refused with a
message that says so. `run.toml` (what was configured), `environment.json` (where) and `verdict.json` (what is said of
it) carry versions of their own. Written by `python tests/test_results.py` from `gradleak.audit.rows`; a test checks
that it is current, and that an audit writes what it says.

```python
import torch

import gradleak as gl

model = gl.models.lenet_zhu(shape=(1, 28, 28))
images = gl.data.load("fashion-mnist-samples")
task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]))
result = gl.Audit(task, images, ["ig:steps=2"], targets=1).run()
for row in result.rows:
    print(row["attack"], row["defence"], row["target"], row["scores"]["psnr"], row["hits"]["recovered"])
print(result.table("csv"))
```

"""


def test_the_page_about_rows_is_current() -> None:
    assert PAGE.read_text() == ABOUT + page(), "write it anew: python tests/test_results.py"


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
        file.write(encode(row(1, 9, targets=6, attack="dlg")))
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


def test_only_runs_on_images_have_images(folder: Path) -> None:
    with pytest.raises(BadRun, match="is of rows, which are no images"):
        result_of("table", ALL).images(key(1))


KINDS_WITH_SETTINGS = [
    Table((Column("age", low=0.0, high=99.0, whole=True), Column("sex", ("f", "m")), Column("pay", mean=0.0, std=0.5))),
    Tokens(padding=0, ignored=-100),
    Tokens(words=("", "\x00", "\n", " a", "\x85", "\ud7ff")),
    Tokens(),
    Series(time_first=True),
    *(kind() for kind in KINDS.values() if kind is not Table),
]


@pytest.mark.parametrize("kind", KINDS_WITH_SETTINGS, ids=repr)
def test_kinds_are_read_back_as_they_were_written(kind: Kind) -> None:
    text = to_toml({"fields": {"x": {"kind": kind.name, "settings": kind.settings()}}})
    entry = from_toml(text)["fields"]["x"]
    assert KINDS[entry["kind"]].of(entry["settings"]) == kind


def test_toml_round_trip() -> None:
    settings = {
        "text": 'quotes " and \\ and \n and \x7f and é', "flag": True, "number": -3, "real": 1e-12, "list": [1, 2],
        "texts": ["a", "b"], "table": {"inner": {"x": 1.5}, "y": "z", "odd.name": {"a b": 1}}, "empty": [],
        "tables": [{"name": "a b", "odd.name": 1, "of": ["x"]}, {}], "bounds": [[-np.inf, 1.0], [0.0, np.inf]],
    }  # fmt: skip
    assert from_toml(to_toml({**settings, "nothing": None}, "a comment\nof two lines")) == settings


def test_rows_have_no_infinite_numbers() -> None:
    cleaned = finite({"a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": (-float("inf"),)}, "e": "text"})
    assert cleaned == {"a": None, "b": [None, 1.0], "c": {"d": [None]}, "e": "text"}


if __name__ == "__main__":
    PAGE.write_text(ABOUT + page())
