"""The reproduction of the flat-minima paper, at a scale of seconds: its rows run, and its modes are what they say."""

from __future__ import annotations

import importlib
import importlib.util
import json
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gradleak as gl
from conftest import blobs, largest_difference, measured, reproduction
from gradleak.core import tree

FOLDER = Path(__file__).parents[1] / "papers" / "flat_minima"


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    return reproduction("flat_minima")


def part(paper: ModuleType, name: str) -> ModuleType:
    """A neighbour of run.py, which has put its folder on the path."""
    return importlib.import_module(f"flat_minima.{name}")


@pytest.fixture(scope="module")
def effort(paper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Eight pixels a side, made here: blobs in colours that tell the class."""
    home = tmp_path_factory.mktemp("flat")
    path = blobs(home / "blobs.npz", 8, 60)
    return paper.Effort(
        images=2,
        exact=1,
        steps=3,
        rounds=2,
        attacks="ig",
        curved=8,
        probes=2,
        lanczos=4,
        released=8,
        small=1,
        lpips=0,
        data=str(path),
        public=str(path),
        work=str(home / "work"),
        device="cpu",
    )


# --- what is expected -------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_paper_and_of_its_adaptive_test(paper: ModuleType) -> None:
    rows = paper.rows()
    for number in (0, 100, 200):
        assert {f"{kind}, round {number}" for kind in ("table", "exact", "rate 0.9", "information")} <= rows.keys()
    assert {f"{kind} {name}" for kind in ("train", "curve") for name in paper.METHODS} <= rows.keys()
    assert {f"rho {rho}" for rho in ("0", "0.05", "0.1", "0.15", "0.2")} <= rows.keys()
    assert {"batch 1", "batch 2", "batch 4", "init torch", "init uniform05", "long FedAvg"} <= rows.keys()
    assert list(rows["curve FedSAM"].numbers) == list(range(0, 201, 10))
    assert list(rows["long FedAvg"].numbers) == list(range(0, 1001, 100))
    method = part(paper, "training").method
    made = {name: method(name, paper.Effort(public="none")) for name in ("FedAvg", "FedSAM", "FedASAM", "FedGF")}
    assert made["FedAvg"] is None
    assert (made["FedSAM"].rho, made["FedASAM"].rho, made["FedGF"].rho, made["FedGF"].c) == (0.2, 0.3, 0.2, 0.1)
    assert (rows["eta 0.9"].eta, rows["rate 0.9, round 100"].rate, rows["batch 4"].examples) == (0.9, 0.9, 4)


def test_the_papers_table_is_whole(paper: ModuleType) -> None:
    held = paper.references()["table"]
    assert held.keys() == set(paper.METHODS)
    for rounds in held.values():
        assert rounds.keys() == {"0", "100", "200"}
        for attacks in rounds.values():
            assert attacks.keys() == {"idlg", "gi", "ig", "gias", "gifd"}
            for cell in attacks.values():
                assert cell.keys() == {"psnr", "ssim", "lpips", "mse_x100"}
                # A mean PSNR is not the PSNR of the mean error, but never below it.
                assert cell["psnr"] >= 10 * np.log10(100 / cell["mse_x100"]) - 0.1
    assert held["FedAvg"]["0"]["ig"]["psnr"] == 33.71
    assert held["FedSAI"]["200"]["gifd"] == {"psnr": 21.97, "ssim": 0.694, "lpips": 0.268, "mse_x100": 0.785}


def test_every_bound_names_a_row_and_a_figure_that_it_has(paper: ModuleType) -> None:
    rows = paper.rows()
    for name in json.loads((FOLDER / "expected.json").read_text())["figures"]:
        row, kind, who, what, *rest = name.split("/")
        assert row in rows, name
        if kind == "order":
            assert who in paper.Effort().attacks.split(","), name
            assert what in ("FedAvg over FedSAM", "FedSAM over FedASAM"), name
        else:
            assert kind == "adaptive", name
            assert who in rows[row].names, name
            assert what == "best", name
            assert rest in (["share_of_undefended"], ["share_of_plain"], ["exact"]), name


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_table_has_three_modes_and_says_what_they_show(paper: ModuleType, effort: Any, tmp_path: Path) -> None:
    out = tmp_path / "deeper" / "found.json"
    drawn = replace(effort, pictures=str(tmp_path / "pictures"))
    options = Namespace(only="^table, round 100$", budget=60, out=out, **asdict(drawn))
    figures = measured(paper, options)
    assert json.loads(out.with_suffix(".part.json").read_text()).keys() == figures.keys() == {"table, round 100"}
    row = figures["table, round 100"]
    assert (row["round"], row["targets"], row["lpips"]) == (1, 2, "not measured: switched off")
    for method in paper.METHODS:
        cells = row["cells"][method]["ig"]
        assert list(cells) == (["a"] if method == "FedAvg" else ["a", "b", "c"])
        for cell in cells.values():
            assert cell["psnr"]["images"] == len(cell["psnr_of_each"]) == 2
            assert {"ssim", "mse_x100", "ten", "label_accuracy", "psnr_of_another_image"} <= cell.keys()
    assert row["order"]["ig"].keys() == {"FedAvg over FedSAM", "FedSAM over FedASAM"}
    assert row["adaptive"]["FedGF"]["best"] == row["adaptive"]["FedGF"]["ig"]
    assert row["flatness"]["FedSAI"]["ig"]["count"] == 2
    radii = {method: held["radius"] for method, held in row["methods"].items()}
    assert radii["FedAvg"] == 0
    assert radii["FedSAM"] == pytest.approx(0.2, rel=1e-4)
    assert abs(radii["FedASAM"] - 0.3) > 0.01  # in a ball that is stretched by the weights it is not rho
    assert [(tmp_path / "pictures" / name).stat().st_size > 0 for name in row["pictures"]] == [True]
    json.dumps(figures, allow_nan=False)
    assert measured(paper, Namespace(**{**vars(options), "budget": -1})) == {}


def test_knowing_the_rule_gives_the_image_and_ignoring_it_does_not(paper: ModuleType, effort: Any) -> None:
    row = replace(paper.rows()["exact, round 0"], names=("FedAvg", "FedSAM"))
    found = row.measure(effort)
    psnr = {mode: cell["psnr"]["mean"] for mode, cell in found["cells"]["FedSAM"]["second-order"].items()}
    assert psnr["a"] == found["cells"]["FedAvg"]["second-order"]["a"]["psnr"]["mean"] > 60
    assert psnr["b"] < 40
    assert psnr["c"] > 60
    assert found["adaptive"]["FedSAM"]["best"]["exact"] == 1


def test_a_curve_has_curvature_beside_leakage(paper: ModuleType, effort: Any) -> None:
    found = paper.rows()["rho 0.1"].measure(effort)
    assert [point["round"] for point in found["points"]] == [0, 1, 2]
    for point in found["points"]:
        held = point["curvature"]
        assert held["log_determinant"]["value"] == pytest.approx(held["log_determinant"]["floor"] + held["excess"])
        assert held["excess"] > 0
        assert point["gradient_norm"] > 0
        assert list(point["cells"]["ig"]) == ["a", "b", "c"]
    assert "need at least 4 rounds" in found["associations"]["ig"]["c"]["excess"]["reason"]
    json.dumps(importlib.import_module("record").without_infinities(found), allow_nan=False)


def test_several_seeds_are_correlated_as_runs(paper: ModuleType) -> None:
    def point(number: int, seed: int) -> dict[str, Any]:
        wave = float(np.sin(3.0 * number + seed))
        return {
            "round": number,
            "gradient_norm": 1 + 0.3 * wave,
            "test_accuracy": 0.1 * number,
            "curvature": {
                "excess": 9.0 - number,
                "extremes": {"highest": wave},
                "trace": {"value": wave},
                "loss": 2.0 - 0.1 * number + 0.2 * wave,
            },
            "cells": {"ig": {"a": {"psnr": {"mean": 20.0 - number}}}},
        }

    runs = [[point(number, seed) for number in range(8)] for seed in range(3)]
    found = part(paper, "curves").associated(runs, "ig", "a")
    assert found["excess"]["plain"]["value"] == pytest.approx(1)
    assert found["excess"]["plain"]["count"] == 3
    # Both fall with the round, and with the round known nothing is left.
    assert found["excess"]["partial"] is None
    assert found["excess"]["reason"]


def test_the_printed_index_and_the_bounds_that_hold_are_computed(paper: ModuleType, effort: Any) -> None:
    row = replace(paper.rows()["information, round 100"], names=("FedGF",))
    found = importlib.import_module("record").without_infinities(row.measure(effort))
    held = found["methods"]["FedGF"]
    assert held["index"]["1"]["determinant"] > held["index"]["64"]["determinant"]
    assert held["channel"].keys() == {"plain", "sent"}
    assert held["channel"]["plain"]["nats"] != held["channel"]["sent"]["nats"]
    assert {mode: len(points) for mode, points in held["input"].items()} == {"a": 2, "c": 2}
    json.dumps(found, allow_nan=False)


# --- what the folder defines for itself -------------------------------------------------------------------------------


def test_before_training_plain_gradients_do_not_depend_on_the_method(paper: ModuleType, effort: Any) -> None:
    attacks, training = part(paper, "attacks"), part(paper, "training")
    truth = training.targets(effort, 2)
    seen = {
        name: {
            mode: attacks.observed(training.Course(name), effort, 0, truth, attacks.MODES[mode]) for mode in ("a", "c")
        }
        for name in paper.METHODS
    }
    plain = seen["FedAvg"]["a"][0]
    for name in ("FedSAM", "FedASAM", "FedGF"):
        assert largest_difference(seen[name]["a"][0].update, plain.update) == 0
        assert largest_difference(seen[name]["c"][0].update, plain.update) > 0
    assert largest_difference(seen["FedGF"]["c"][0].update, seen["FedSAM"]["c"][0].update) == 0
    assert largest_difference(seen["FedSAI"]["a"][0].weights, plain.weights) > 0  # it was trained beforehand
    task = training.task_of(effort)
    own = task.gradient(plain.weights, {name: value[0] for name, value in truth.items()})
    assert largest_difference(plain.update, own) < 1e-6


def test_later_fedgf_mixes_in_what_its_server_broadcast(paper: ModuleType, effort: Any) -> None:
    attacks, training = part(paper, "attacks"), part(paper, "training")
    course, truth = training.Course("FedGF"), training.targets(effort, 1)
    (seen,) = attacks.observed(course, effort, 1, truth, attacks.MODES["c"])
    sent = course.sent(effort, 1)
    assert seen.extras["fedgf_mixing"]["c"] == pytest.approx(0.1)
    away = tree.subtract(seen.extras["fedgf_perturbed"], sent.weights)
    assert float(tree.norm(away)) == pytest.approx(0.2, rel=1e-4)
    task, batch = training.task_of(effort), {name: value[0] for name, value in truth.items()}
    first = task.gradient(sent.weights, batch)
    point = tree.add(tree.add(sent.weights, first, 0.9 * 0.2 / tree.norm(first)), away, 0.1)
    assert largest_difference(seen.update, task.gradient(point, batch)) < 1e-5


def test_the_same_attack_on_the_same_updates_is_run_once(paper: ModuleType, effort: Any) -> None:
    attacks, training = part(paper, "attacks"), part(paper, "training")
    bench = attacks.Bench(effort, training.targets(effort, 1))
    bench.cells([(training.Course(name), 0) for name in ("FedAvg", "FedSAM", "FedGF")], ["ig"])
    # (a) of all three; (b) of the other two, whose steps are one before there was a round; (c) of each.
    assert len(bench.done) == 4
    assert len(bench.shown["ig"]) == 7


def test_a_training_is_kept_and_goes_on(paper: ModuleType, effort: Any, tmp_path: Path) -> None:
    training = part(paper, "training")
    own = replace(effort, work=str(tmp_path))
    course = training.Course("FedAvg")
    first = course.trained(own, 1)
    training.TRAINED.clear()  # as in a later process
    again = course.trained(own, 2)
    assert len(list(tmp_path.iterdir())) == 1
    assert [row["round"] for row in again.metrics] == [0, 1, 2]
    assert largest_difference(first.at(1).weights, again.at(1).weights) == 0
    training.TRAINED.clear()
    assert course.trained(own, 0).state.round == 2
    assert training.Course("rho 0", rho=0.0).trained(own, 0).folder == again.folder  # that is FedAvg


def test_rounds_of_the_paper_are_scaled(paper: ModuleType) -> None:
    short = paper.Effort(rounds=4)
    assert [short.at(number) for number in (0, 100, 200, 1000)] == [0, 2, 4, 20]
    assert short.every(10, 200) == [0, 1, 2, 3, 4]
    assert paper.Effort().every(10, 200) == list(range(0, 201, 10))


def test_targets_are_training_images_of_one_client(paper: ModuleType, effort: Any) -> None:
    training = part(paper, "training")
    course = training.Course("FedAvg")
    data = training.examples(effort, "train")
    share = course.federation(effort).partition(data)[0]
    truth = training.targets(effort, 99, 2)
    assert truth["x"].shape == (len(share) // 2, 2, 3, 8, 8)
    assert (
        largest_difference({"x": truth["x"].flatten(0, 1)}, {"x": data.batch(share)["x"][: 2 * len(truth["x"])]}) == 0
    )
    assert isinstance(course.federation(effort).training.optimiser, gl.rules.SGD)


def test_rows_beside_each_other_wait_for_a_training_that_another_one_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    from flat_minima.training import patiently

    from gradleak.core.folder import FolderInUse

    tries: list[int] = []
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def work() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise FolderInUse("another process")
        return "trained"

    assert patiently(work) == "trained"
    tries.clear()
    with pytest.raises(FolderInUse):
        patiently(work, seconds=-1)
