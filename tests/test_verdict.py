"""Words with their rules, report cards, what was assumed, and what each assumption is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradleak as gl
from conftest import private, tiny
from gradleak.audit.assumptions import CAPABILITIES, Ablation, ablation, ledger_of
from gradleak.audit.intervals import paired
from gradleak.audit.ruling import RULES, WORDS
from gradleak.audit.summary import summaries_of
from gradleak.audit.verdict import RULE, control_of, rule_of
from gradleak.defences import Pruning
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.kinds import Series, Table
from gradleak.scenario.observation import ACTIVE, LEVELS, Knowledge
from test_results import ALL, NONE, SOME, control, result, row, row_of, rows_of

# --- each word by its rule --------------------------------------------------------------------------------------------

CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "half recovered": (rows_of(ALL), "leaks"),
    "some recovered": (rows_of(SOME), "leaks in part"),
    "re-identified": (rows_of(NONE, rank1=True), "leaks in part"),
    "searched in vain": (rows_of(NONE), "not shown to leak"),
    "no working attack": (rows_of(NONE, converged=False), "inconclusive"),
}


@pytest.mark.parametrize("rule", CASES)
def test_every_word_names_the_rule_that_produced_it(rule: str) -> None:
    rows, word = CASES[rule]
    ruling = summaries_of(rows)[0].ruling
    assert (ruling.word, ruling.rule) == (word, rule)
    assert result(rows).verdict.because.startswith(f"{word}: ")
    assert ruling.because.partition(" of ")[0] in result(rows).verdict.because


def test_there_is_a_case_for_every_rule_and_a_rule_for_every_word() -> None:
    assert [rule.name for rule in RULES] == list(CASES)
    assert {rule.word for rule in RULES} == set(WORDS)
    assert RULES[-1].holds(summaries_of(rows_of(ALL))[0])  # the last one always holds


def test_figures_stand_beside_the_rule() -> None:
    told = summaries_of(rows_of(SOME))[0].ruling.because
    assert told.startswith("recovered 17% [")
    assert "over an unrelated update" in told
    assert "converged on 0% of 6 targets" in summaries_of(CASES["no working attack"][0])[0].ruling.because


def test_without_an_unrelated_update_nothing_is_said_to_exceed_it() -> None:
    rows = [{**entry, "baselines": {}} for entry in rows_of(ALL)]
    told = summaries_of(rows)[0].ruling.because
    assert "no unrelated update was attacked" in told
    assert "over an unrelated update" not in told


def test_a_void_run_says_so_on_every_card() -> None:
    run = result(control(psnr=5.0), rows_of(ALL))
    assert run.verdict.because.startswith("void: the positive control failed")
    assert {card["word"] for card in run.cards} == {"void"}
    assert result(rows_of(ALL)).cards[0]["word"] == "leaks"


# --- a card -----------------------------------------------------------------------------------------------------------


def test_a_card_holds_what_an_auditor_signs(tmp_path: Path) -> None:
    rows = [row(1, n, hit=n < 15, targets=20, psnr=30.0 + n if n < 15 else 9.0) for n in range(20)]
    run = result(rows)
    [card] = run.cards
    wanted = {"word", "rule", "because", "recovered", "excess", "re-identification", "paired", "worst case"}
    wanted |= {"95th percentile", "labels", "identifiability", "control", "converged", "utility", "epsilon"}
    assert wanted <= card.keys()
    assert card["re-identification"] == {
        "median": 1.0, "by chance": 25.5, "chance of rank 1": 0.02, "excess": card["excess"],
    }  # fmt: skip
    assert card["worst case"]["psnr"] == 44.0
    assert card["95th percentile"]["psnr"] == pytest.approx(43.05)
    assert card["paired"]["difference"] == pytest.approx(np.mean([entry["scores"]["psnr"][0] for entry in rows]) - 8)
    held = json.loads(run.write_verdict(tmp_path / "verdict.json").read_text())
    assert held["word"] == "leaks"
    assert held["lines"] == run.cards
    assert {each["capability"] for each in held["assumptions"]} >= {"labels", "recipe", "defence", "private data"}


def test_numbers_that_are_not_finite_are_null_on_a_card() -> None:
    [card] = result([{**row(), "status": "failed", "error": "a bad day", "target": None}]).cards
    assert card["recovered"]["value"] is None
    json.dumps(card, allow_nan=False)


# --- by the kind of data ----------------------------------------------------------------------------------------------


def test_the_rule_of_images_is_as_it_was() -> None:
    assert RULE.startswith(
        "An image is recovered when SSIM > 0.5, PSNR > 18 dB and it is re-identified at rank 1 among other real "
        "images.\nShares have 95 % intervals"
    )
    assert "(by word, then recovered share, then PSNR)" in RULE
    assert RULE.endswith("stays below a median PSNR of 18 dB is void.")


def test_rules_of_other_kinds_are_sentences() -> None:
    assert rule_of(Table()).startswith("A row is recovered when every column is right (categories exactly, numbers")
    assert rule_of(Table()).endswith("stays below a median of 90% columns right is void.")
    assert rule_of(Series()).startswith(
        "A series is recovered when its correlation is above 0.9 and it is re-identified"
    )
    assert rule_of(Series()).endswith("stays below a median correlation of 0.9 is void.")


@pytest.mark.parametrize(("value", "passed"), [(0.95, True), (0.9, True), (0.89, False)])
def test_the_control_of_a_table_needs_nine_tenths_of_the_columns(value: float, passed: bool) -> None:
    rows = [row_of("table", 0, control=True)]
    rows[0]["scores"]["right"] = [value]
    told = control_of(rows, rows[0]["cell"], Table())
    assert told.passed is passed
    assert told.value == value
    assert f"reaches a median of {value:.0%} columns right, 90% are needed" in told.text
    assert told.level == f"{value:.0%}; 90% are needed"


def test_inputs_that_are_public_are_in_the_ledger() -> None:
    fields = {"x": {}, "y": {}, "month": {"public": True}, "place": {}}
    told = {each.capability: each for each in ledger_of({"fields": fields}, [])}
    assert (told["month"].granted, told["place"].granted) == (True, False)
    assert "the server knows it" in told["month"].text


# --- the paired test --------------------------------------------------------------------------------------------------


def test_sign_flips_are_exact_for_few_and_honest_about_it() -> None:
    all_better, mixed = paired([1.0, 2.0, 3.0]), paired([1.0, -1.0])
    assert all_better is not None
    assert mixed is not None
    assert all_better.p == 1 / 8 == all_better.least
    assert "smallest that 3 can give" in str(all_better)
    assert mixed.p == 0.75  # three of four sums are at least 0
    assert paired([]) is None


def test_sign_flips_hold_their_level() -> None:
    """Without an effect p falls below 5 % in about 5 % of cases; with one, nearly always."""
    source = np.random.default_rng(0)
    for shift, low, high in ((0.0, 0.01, 0.10), (1.0, 0.95, 1.0)):
        found = [paired((source.normal(size=20) + shift).tolist()) for _ in range(100)]
        assert low <= np.mean([each is not None and each.p < 0.05 for each in found]) <= high


# --- levels -----------------------------------------------------------------------------------------------------------

RECIPE = LocalTraining(lr=0.5)


def test_levels_are_named_and_hold_what_they_grant() -> None:
    assert list(LEVELS) == list("ABCDE")
    assert Knowledge.at("A").grants == Knowledge.at("b").grants == frozenset()
    assert Knowledge.at("C", training=RECIPE).level == "C (training details)"
    assert Knowledge.at("D", training=RECIPE, public=object()).level == "D (surrogate data)"
    assert Knowledge.at("E", given={"t": torch.zeros(1)}).level == "E (client distribution)"


@pytest.mark.parametrize("letter", ACTIVE)
def test_active_servers_are_refused_by_name_with_the_reason(letter: str) -> None:
    with pytest.raises(ValueError, match=f"Level {letter} is out of scope: an active server"):
        Knowledge.at(letter)


def test_a_level_grants_no_more_and_no_less_than_it_says() -> None:
    with pytest.raises(ValueError, match="does not grant training"):
        Knowledge.at("B", training=RECIPE)
    with pytest.raises(ValueError, match="needs public; without it the level is C"):
        Knowledge.at("D", training=RECIPE)
    with pytest.raises(ValueError, match="There is no level 'Z'"):
        Knowledge.at("Z")


def test_capabilities_can_be_taken_away() -> None:
    y = torch.zeros(1, dtype=torch.long)
    knows = Knowledge(given={"y": y, "t": y}, training=RECIPE, defence=Pruning(), generator=1, public=2)
    assert knows.without("labels", "recipe").grants == {"t", "defence", "generator", "public"}
    assert knows.without().grants == knows.grants
    with pytest.raises(ValueError, match="'data' is not a capability"):
        knows.without("data")


# --- ledger and ablation ----------------------------------------------------------------------------------------------


def small(**changes: Any) -> gl.Audit:
    data = {name: value.float() if name == "x" else value for name, value in private(24).items()}
    task = tiny(norm="eval", dtype=torch.float32)
    settings: dict[str, Any] = {"attacks": ["ig:steps=4"], "targets": 1, "unrelated": 0, "given": ("y",)}
    settings |= {
        "defences": [Pruning(keep=0.5)],
        "knowledge": ("naive", "adaptive"),
        "engine": gl.Engine(device="cpu"),
        **changes,
    }
    return gl.Audit(task, data, **settings)


@pytest.mark.parametrize(
    ("fields", "given", "text"),
    [
        (("x", "y"), ("y",), "Attacks use the true ones."),
        (("x", "y"), (), "Each attack infers them; their accuracy is scored apart."),
        (("x",), (), "The task has none."),
    ],
)
def test_the_ledger_says_where_labels_come_from(fields: tuple[str, ...], given: tuple[str, ...], text: str) -> None:
    settings = {"fields": dict.fromkeys(fields, {}), "given": given}
    labels = next(each for each in ledger_of(settings, ()) if each.capability == "labels")
    assert (labels.granted, labels.text) == (bool(given), text)


def test_one_call_takes_the_capabilities_away_one_by_one(tmp_path: Path) -> None:
    found = ablation(small(), tmp_path / "run")
    assert set(found.without) == {"labels", "statistics", "recipe", "defence"}
    assert all(isinstance(each, gl.AuditResult) for each in found.without.values())
    ledgers = {name: {a.capability: a.granted for a in each.ledger} for name, each in found.without.items()}
    assert {a.capability: a.granted for a in found.whole.ledger}["labels"] is True
    assert ledgers["labels"]["labels"] is False
    assert ledgers["recipe"]["recipe"] is False
    assert ledgers["statistics"]["batch statistics"] is False
    assert ledgers["defence"]["defence"] is False
    recipe = found.without["recipe"]
    assert isinstance(recipe, gl.AuditResult)
    assert all(each["knows"] in ("B (basic knowledge)", "C (training details)") for each in recipe.rows)
    assert (tmp_path / "run-without-recipe" / "run.toml").exists()
    assert "withheld" in (tmp_path / "run-without-recipe" / "run.toml").read_text()
    table = found.table()
    assert len(table.splitlines()) == 1 + 1 + len(found.without)
    assert not {"generator"} & set(found.without)  # it was not granted
    assert set(CAPABILITIES) == {"bounds", "moments", "labels", "statistics", "recipe", "generator", "defence"}


def test_an_attack_that_cannot_do_without_says_so() -> None:
    found = ablation(small(attacks=["idlg:steps=2"], defences=[None], given=()))
    assert isinstance(found.without["recipe"], str)
    assert "needs training" in found.without["recipe"]
    assert "cannot run" in found.table()


def test_attacks_that_can_do_without_are_run_and_the_others_named() -> None:
    """One attack that needs the recipe must not hide what another reaches without it."""
    found = ablation(small(attacks=["ig:steps=3", "idlg:steps=2"], defences=[None], given=()))
    recipe = found.without["recipe"]
    assert isinstance(recipe, gl.AuditResult)
    assert {line.attack for line in recipe.summaries} == {"ig:steps=3"}
    assert found.idle == {"recipe": ("idlg:steps=2",)}
    assert "left out, since they need it: idlg:steps=2" in found.table()


def test_an_ablation_whose_control_failed_says_void() -> None:
    whole, bad = result(rows_of(ALL)), result(control(psnr=5.0), rows_of(NONE))
    lines = Ablation(whole, {"labels": bad}).table().splitlines()
    assert lines[1].endswith("  leaks")
    assert lines[2].endswith("  void")  # and not "not shown to leak", which an attack that works alone may say


def test_what_can_be_withheld_is_named() -> None:
    with pytest.raises(ValueError, match="withheld names 'labels'"):
        small(withheld=("labels",))


# --- measured, and stored ---------------------------------------------------------------------------------------------

STORED = Path(__file__).parents[1] / "benchmarks" / "results"


def test_the_stored_figures_of_false_alarms_keep_to_their_bounds() -> None:
    held = json.loads((STORED / "false-alarms.json").read_text())
    unrelated, undefended = held["unrelated, 1 per cell"], held["undefended, 1 per cell"]
    assert unrelated["cases"] == undefended["cases"] == 200
    assert unrelated["leaks"] <= 0.05
    assert undefended["leaks"] >= 0.99
    assert held["unrelated, 8 per cell"]["leaks"] <= 0.05
    assert held["environment"]["git"]["commit"]
    assert held["seeds"]


def test_the_stored_risk_score_orders_settings_as_attacks_do() -> None:
    held = json.loads((STORED / "risk-score.json").read_text())
    assert len(held["rows"]) >= 15
    assert held["spearman"]["score"] > 0.7
    ranks = [np.argsort(np.argsort([row[name] for row in held["rows"]])) for name in ("score", "psnr")]
    assert np.corrcoef(*ranks)[0, 1] == pytest.approx(held["spearman"]["score"], abs=0.05)  # ties apart


def test_the_knowledge_of_a_table_is_in_the_ledger_and_has_a_price(tmp_path: Path) -> None:
    records = gl.data.load("wine", bounds=True)
    model = torch.nn.Sequential(torch.nn.Linear(records.x.shape[1], 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(records.x, records.y), kind=records.kind)
    clients = gl.Federation(training=gl.LocalTraining(lr=0.1))
    audit = gl.Audit(task, records, ["ig:steps=5"], targets=1, unrelated=1, federation=clients)
    found = ablation(audit, tmp_path / "run")
    assert {"bounds", "moments", "recipe"} <= set(found.without)
    ledger = {a.capability: a.granted for a in found.whole.ledger}
    assert ledger["columns"] is ledger["bounds"] is ledger["means and deviations"] is True
    for name, capability in (("bounds", "bounds"), ("moments", "means and deviations")):
        less = found.without[name]
        assert isinstance(less, gl.AuditResult)
        assert not less.failed
        assert {a.capability: a.granted for a in less.ledger}[capability] is False
