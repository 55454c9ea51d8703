"""The reproduction of GIDM, at a scale of seconds: its rows run, and say what was granted and what was not."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from conftest import blobs, largest_difference, measured, reproduction

FOLDER = Path(__file__).parents[1] / "papers" / "gidm"


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    return reproduction("gidm")


@pytest.fixture(scope="module")
def effort(paper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Eight pixels a side, made here."""
    home = tmp_path_factory.mktemp("gidm")
    path = blobs(home / "blobs.npz", 8, 60)
    return paper.Effort(
        small=1,
        device="cpu",
        data=str(path),
        work=str(home / "work"),
        **{**paper.SMALL, "rounds": 1, "generative": 2, "fine": 3},
    )


def test_the_rows_are_those_that_were_asked_for(paper: ModuleType) -> None:
    rows = paper.rows()
    for data in ("cifar10 32", "celeba64 32", "celeba64 64", "houses64 32", "houses64 64"):
        assert f"train {data}" in rows
        assert f"modes, {data}, trained" in rows
        for victim in ("r0", "trained"):
            for t in (1, 10, 50, 200, 500, 900):
                known, unknown = rows[f"known, {data}, {victim}, t {t}"], rows[f"unknown, {data}, {victim}, t {t}"]
                assert (known.controlled, unknown.controlled) == (False, True)
    assert rows["unknown, houses64 64, 4 levels, trained, t 50"].setting.levels == 4
    assert {"defended, cifar10 32, r0, t 50", "train celeba64 64, 4 levels"} <= rows.keys()
    assert rows["batch, cifar10 32, trained, 2 images"].examples == 2
    assert rows["known, cifar10 32, v, r0, t 900"].setting.target == "v"
    assert {"cost, gidm, 32 lanes", "cost, 128 x 128", "budget, cifar10 32"} <= rows.keys()
    modes = rows["modes, cifar10 32, trained"]
    assert modes.steps == (10, 200, 500)
    attacks = paper.MODES
    assert {"known-both", "unknown-t", "unknown-eps", "unknown-both", "no-t-opt", "no-eps-opt"} <= attacks.keys()
    assert {label: each.given for label, each in attacks.items() if each.given} == {
        "known-both": ("t", "noise"),
        "unknown-t": ("noise",),
        "unknown-t, read": ("noise",),
        "unknown-eps": ("t",),
    }
    assert not any(each.given for each in paper.UNKNOWN.values())


def test_every_bound_names_a_row(paper: ModuleType) -> None:
    rows, held = paper.rows(), json.loads((FOLDER / "expected.json").read_text())
    assert held["figures"]
    for name, bound in held["figures"].items():
        assert name.split("/")[0] in rows, name
        assert bound.keys() in ({"at_least"}, {"at_most"})
    assert held["reference"]["settings"]["generative"] == 5000


def test_baselines_get_as_many_forward_passes_as_both_phases(paper: ModuleType) -> None:
    full = paper.Effort()
    assert full.budget == 500 * (4 * 16 + 7) + 1500 * 7
    assert 0 <= full.baseline * full.per_pixel_step - full.budget < full.per_pixel_step
    assert [full.at(t) for t in (1, 900)] == [1, 900]
    for label in ("dlg-dm", "invg-dm"):
        passes = paper.KNOWN[label].passes(full)
        assert passes == pytest.approx(paper.KNOWN["gidm"].passes(full), rel=1e-3)
        assert paper.KNOWN[label].settings(full)["steps"] == full.baseline


def test_the_client_uses_the_noise_that_the_scorer_keeps(paper: ModuleType, effort: Any) -> None:
    setting = paper.CIFAR
    truth = setting.truth(effort, [3])
    assert truth["t"].tolist() == [[3], [3]]
    task = setting.task(effort)
    seen = setting.observed(effort, "r0", truth)
    for row, each in enumerate(seen):
        gradient = task.gradient(task.weights(), {name: value[row] for name, value in truth.items()})
        assert largest_difference(gradient, each.update) < 1e-6
    assert float(truth["x"].min()) >= -1
    assert float(truth["x"].max()) <= 1


def test_a_known_row_compares_methods_and_a_training_is_found_again(
    paper: ModuleType, effort: Any, tmp_path: Path
) -> None:
    own = replace(effort, methods="dlg-dm;gidm", pictures=str(tmp_path / "pictures"))
    options = Namespace(
        only="^(train cifar10 32|known, cifar10 32, trained, t 200)$", budget=60, out=tmp_path / "found.json"
    )
    figures = measured(paper, Namespace(**vars(options), **asdict(own)))
    trained, row = figures["train cifar10 32"], figures["known, cifar10 32, trained, t 200"]
    assert trained["rounds"] == 1
    assert Path(trained["samples"]).is_file()
    assert row["test_loss"] == pytest.approx(trained["final_test_loss"])
    assert (row["t"], row["targets"], row["lpips"]) == (20, 2, "not measured: switched off")
    assert row["cells"].keys() == {"dlg-dm", "gidm"}
    for cell in row["cells"].values():
        assert cell["granted"] == ["t", "noise"]
        assert cell["t"]["right"] == 1
        assert cell["psnr"]["images"] == 2
    assert row["best"]["method"] in row["cells"]
    assert row["phases"].keys() == {"gidm over dlg-dm"}
    assert Image.open(tmp_path / "pictures" / row["picture"]).size[0] > 0
    assert json.loads((tmp_path / "found.part.json").read_text()).keys() == figures.keys()


def test_an_unknown_row_stands_beside_the_prior_alone(paper: ModuleType, effort: Any) -> None:
    own = replace(effort, methods="dlg-dm")
    row = paper.rows()["unknown, cifar10 32, r0, t 10"].measure(own)
    assert row["cells"].keys() == {"dlg-dm", "prior only", "mid-grey", "x_t itself"}
    assert row["cells"]["dlg-dm"]["granted"] == []
    assert row["cells"]["dlg-dm"]["t"]["right"] == 1
    assert abs(row["cells"]["dlg-dm"]["noise_cosine"]) < 0.9
    assert row["above_prior"]["best"] == row["above_prior"]["dlg-dm"]
    assert row["cells"]["x_t itself"]["psnr"]["mean"] > row["cells"]["prior only"]["psnr"]["mean"]


def test_steps_are_read_alone_and_by_threes(paper: ModuleType, effort: Any) -> None:
    row = paper.rows()["steps, cifar10 32, r0"].measure(effort)
    assert row["batch 1"]["right"] == row["batch 3"]["right"] == 1
    assert row["batch 1"]["off_by"] == 0
    wrong = {"t": torch.tensor([[1, 2, 3]])}
    assert paper._as_sets(torch.tensor([[3, 1, 2]]), wrong) == 1
    assert paper._as_sets(torch.tensor([[3, 1, 4]]), wrong) == 0


def test_a_method_that_is_not_there_or_does_not_apply_says_so(paper: ModuleType, effort: Any) -> None:
    bench = paper.Bench(paper.CIFAR, "r0", effort, paper.CIFAR.truth(effort, [3]))
    missing = paper.Method("gidm-2", lambda effort: {})
    labelled = paper.Method("idlg", lambda effort: {"steps": 2})
    bench.run({"gone": missing, "labels": labelled})
    assert bench.cells["gone"] == {"skipped": "no attack is registered as gidm-2"}
    assert bench.cells["labels"]["skipped"].startswith(("UnsupportedTask", "RuleDoesNotApply", "MissingKnowledge"))
    assert bench.best == {}


def test_costs_are_measured_on_an_untrained_network(paper: ModuleType, effort: Any) -> None:
    row = paper.rows()["cost, 128 x 128"].measure(effort)
    assert row["seconds"] > 0
    assert row["size"] == 8
    assert "extrapolated_from" not in row
    short = paper.rows()["cost, gidm, 32 lanes"].measure(effort)
    assert short["iterations"]["generative"] == 500
    assert short["extrapolated_from"] == effort.generative < 500
