"""The reproduction of NL-SME, at a scale of seconds: its rows run, and a watched search is the search itself."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import blobs, largest_difference, measured, reproduction
from gradleak.core import tree

FOLDER = Path(__file__).parents[1] / "papers" / "nl_sme"


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    return reproduction("nl_sme")


def part(paper: ModuleType, name: str) -> ModuleType:
    """A neighbour of run.py, which has put its folder on the path."""
    return importlib.import_module(f"nl_sme.{name}")


@pytest.fixture(scope="module")
def effort(paper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Eight pixels a side, made here: blobs in colours that tell the class."""
    path = str(blobs(tmp_path_factory.mktemp("nl_sme") / "blobs.npz", 8, 160))
    return paper.Effort(clients=2, steps=3, small=1, data=path, letters=path, device="cpu")


def registered(label: str, paper: ModuleType) -> bool:
    return not part(paper, "attacks").absent(part(paper, "attacks").METHODS[label])


# --- what is expected -------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_paper_and_of_our_own_questions(paper: ModuleType) -> None:
    rows = paper.rows()
    for data in ("cifar100", "letters"):
        for kind in ("table", "coarse"):
            assert {f"{kind} {data}, E {epochs}, B {size}" for epochs in (20, 50) for size in (10, 20)} <= rows.keys()
        assert {
            f"ablation {data}",
            f"frozen noise {data}",
            f"labels {data}",
            f"trajectory {data}, E 50, B 10",
        } <= rows.keys()
    assert {f"{kind}, E {epochs}, B 10" for kind in ("original", "enhanced") for epochs in (20, 50)} <= rows.keys()
    assert {f"scale {count}" for count in (10, 20, 50, 100, 200)} <= rows.keys()
    assert {f"architecture {name}" for name in ("cnn-mnist", "mlp-sme", "resnet8", "vit-sme")} <= rows.keys()
    assert {f"real client, {rule}" for rule in ("momentum", "adam", "weight decay")} <= rows.keys()
    assert {"lanes cifar100, sme", "dlfa cifar100, E 10, B 5", "tune nl-sme"} <= rows.keys()
    # The most important first: it is what a budget leaves.
    assert next(iter(rows)) == "table cifar100, E 20, B 10"


def test_clients_are_those_of_the_public_code(paper: ModuleType) -> None:
    """Plain SGD, 0.004; N = 50 in batches of 10 is T = 100 and 250, in batches of 20 T = 60 and 150."""
    rows, effort = paper.rows(), paper.Effort()
    steps = {name: rows[f"table cifar100, {name}"].setting.steps(effort) for name in ("E 20, B 10", "E 50, B 20")}
    assert steps == {"E 20, B 10": 100, "E 50, B 20": 150}
    recipe = rows["table letters, E 50, B 10"].setting.recipe(effort)
    assert (recipe.lr, recipe.epochs, recipe.batch_size, recipe.optimiser) == (0.004, 50, 10, gl.rules.SGD())
    assert rows["scale 200"].setting.examples == 200
    assert isinstance(rows["real client, adam"].setting.recipe(effort).optimiser, gl.rules.Adam)


def test_bounds_name_rows_and_figures_that_there_are(paper: ModuleType) -> None:
    rows, held = paper.rows(), json.loads((FOLDER / "expected.json").read_text())
    for name in held["figures"]:
        row, kind, *rest = name.split("/")
        assert row in rows, name
        if kind == "cells":
            assert rest[0] in rows[row].methods, name
            assert rest[1:] in (["psnr_from_the_paper"], ["psnr", "mean"]), name
        elif kind == "paired":
            assert set(rest[0].split(" over ")) <= set(rows[row].methods), name
            assert rest[1:] == ["psnr", "low"], name
        else:
            assert (kind, rest) in (("share", []), ("memory_gib", ["dlfa"])), name
    table = held["reference"]["table"]
    assert len(table) == 12
    assert table["cifar100, E 20, B 10"]["nl-sme"] == {"l_sim": 0.0029, "psnr": 26.42, "ssim": 0.878}
    assert table["enhanced, E 50, B 10"]["ig-ms"] == {"l_sim": 0.1576, "psnr": 17.36, "ssim": 0.629}
    # The paper's gaps follow from its matches, so that the two tables are copied rightly.
    for name, gap in held["reference"]["gap_percent"].items():
        found = part(paper, "attacks").performance_gap(*(table[name][method]["l_sim"] for method in ("sme", "nl-sme")))
        assert found[0] == pytest.approx(gap, abs=5e-3)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_table_scores_every_method_client_by_client(paper: ModuleType, effort: Any, tmp_path: Path) -> None:
    out = tmp_path / "deeper" / "found.json"
    drawn = replace(effort, pictures=str(tmp_path / "pictures"), methods="ig-ms;sme;nl-sme")
    options = Namespace(only="^table cifar100, E 20, B 10$", budget=60, out=out, **asdict(drawn))
    figures = measured(paper, options)
    assert json.loads(out.with_suffix(".part.json").read_text()).keys() == figures.keys()
    row = figures["table cifar100, E 20, B 10"]
    assert (row["clients"], row["examples"], row["local_steps"]) == (2, 10, 50)
    assert list(row["cells"]) == ["ig-ms", "sme", "nl-sme"]
    for cell in row["cells"].values():
        assert cell["psnr"]["clients"] == len(cell["psnr_of_each"]) == 2
        assert cell["psnr"]["mean"] == pytest.approx(sum(cell["psnr_of_each"]) / 2)
        assert cell["curve"]["step"] == [1, 2, 3]
        assert cell["memory_gib"] is None
        assert cell["psnr_from_the_paper"] == pytest.approx(abs(cell["psnr"]["mean"] - cell["paper"]["psnr"]))
    # The same starts, and so the same images, before the first step was made.
    assert len({round(cell["curve"]["psnr"][0], 9) for cell in row["cells"].values()}) == 1
    assert row["cells"]["sme"]["l_sim_obj"] == row["cells"]["sme"]["l_sim_raw"]
    assert row["cells"]["nl-sme"]["l_sim_obj"] != row["cells"]["nl-sme"]["l_sim_raw"]
    assert row["paired"].keys() == {"sme over ig-ms", "nl-sme over ig-ms", "nl-sme over sme"}
    assert row["paired"]["nl-sme over sme"]["psnr"]["count"] == 2
    assert row["gap"].keys() == {"nl-sme"}
    assert (tmp_path / "pictures" / row["picture"]).stat().st_size > 0
    json.dumps(figures, allow_nan=False)
    assert measured(paper, Namespace(**{**vars(options), "budget": -1})) == {}


def test_what_is_not_registered_is_skipped_and_said(paper: ModuleType, effort: Any) -> None:
    attacks = part(paper, "attacks")
    bench = attacks.Bench(paper.CIFAR, effort)
    bench.run({"sme": attacks.METHODS["sme"], "of the future": attacks.Method("of-the-future")})
    assert "of-the-future" in bench.cells["of the future"]["skipped"]
    assert list(bench.measured) == ["sme"]


@pytest.mark.parametrize("label", ["fedleak", "coarse-replay", "dlfa"])
def test_methods_of_other_papers_run_on_the_same_clients(paper: ModuleType, effort: Any, label: str) -> None:
    if not registered(label, paper):
        pytest.skip(f"no attack {label!r} is registered")
    row = paper.Table(replace(paper.LETTERS, epochs=4), (label,))
    cell = row.measure(replace(effort, clients=1, steps=6))["cells"][label]
    assert cell["psnr"]["mean"] > 0
    assert cell["diverged"] == 0


def test_frozen_images_stay_and_the_match_falls_all_the_same(paper: ModuleType, effort: Any) -> None:
    row = replace(paper.rows()["frozen noise cifar100"], methods=("sme, frozen", "nl-sme, element, frozen"))
    found = row.measure(replace(effort, steps=20))
    cells = found["cells"]
    assert found["gap"]["nl-sme, element, frozen"]["l_sim_obj"]["gap_percent"] > 0  # and nothing was found
    assert cells["sme, frozen"]["psnr_of_each"] == cells["nl-sme, element, frozen"]["psnr_of_each"]
    assert cells["nl-sme, element, frozen"]["l_sim_obj"]["mean"] < cells["sme, frozen"]["l_sim_obj"]["mean"]


def test_lanes_find_what_single_runs_find(paper: ModuleType, effort: Any) -> None:
    found = paper.rows()["lanes cifar100, sme"].measure(effort)
    assert found["psnr"]["lanes"]["mean"] == pytest.approx(found["psnr"]["one by one"]["mean"], abs=0.02)
    assert found["share"] == pytest.approx(found["seconds_of_lanes"] / found["seconds_one_by_one"])
    assert "graph=False" in found["engines"]["one by one"]


def test_label_rules_are_compared_by_labels_in_the_wrong_place(paper: ModuleType, effort: Any) -> None:
    row = replace(paper.rows()["labels letters"], rules=("path-bias", "path-rows", "lowest-sums"))
    found = importlib.import_module("record").without_infinities(row.measure(replace(effort, clients=1)))
    for rules in found["epochs_of"].values():
        assert rules["path-bias"]["of"] == 10
        assert 0 <= rules["path-bias"]["wrong"]["mean"] <= 10
        assert rules["lowest-sums"].keys() & {"skipped", "wrong"}  # four classes are fewer than ten examples
    assert found["cells"].keys() == {"sme", "sme, labels by path-bias"}


def test_the_theory_is_measured_on_the_clients_own_paths(paper: ModuleType, effort: Any) -> None:
    found = paper.rows()["trajectory cifar100, E 20, B 10"].measure(effort)
    assert found["lengths"] == [10, 25, 50]
    assert found["end"]["bezier"]["rms"] < found["end"]["line"]["rms"]
    assert found["end"]["mismatch"]["line"] < found["end"]["mismatch"]["start"]
    assert found["clients_where"]["bezier_bound_holds"] == 2
    assert found["end"]["mismatch"]["replays"].keys() == {"1", "2", "5", "10", "20"}
    json.dumps(found, allow_nan=False)
    # The path is that of the client that is attacked.
    setting = paper.CIFAR
    seen = setting.observed(effort)[1]
    path = paper.trajectory.recorded(
        setting.task(effort), setting.batches(effort)[1], setting.recipe(effort), key=seen.key, seed=effort.seed
    )
    assert largest_difference(tree.to(path.update, None, torch.float32), seen.update) < 1e-5


def test_dlfa_is_left_out_where_it_would_unroll_too_much(paper: ModuleType, effort: Any) -> None:
    row = paper.Unrolled(replace(paper.LETTERS, epochs=10, batch_size=1))
    assert row.setting.steps(paper.Effort()) == 500
    found = replace(row, setting=replace(row.setting, epochs=30)).measure(replace(effort, methods="ig-ms", clients=1))
    assert "150 local steps" in found["cells"]["dlfa"]["skipped"]


# --- what the folder defines for itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["sme", "nl-sme", "fedleak", "coarse-replay"])
def test_a_watched_search_is_the_attack_itself(paper: ModuleType, effort: Any, label: str) -> None:
    if not registered(label, paper):
        pytest.skip(f"no attack {label!r} is registered")
    attacks, setting = part(paper, "attacks"), replace(paper.CIFAR, epochs=4)
    method = attacks.METHODS[label]
    known = method.knowledge(setting, effort, setting.truth(effort)["y"])
    # More coarse steps than its path begins with, in chunks of one client: several stages and several pieces.
    attack = replace(method, settings=(("coarse", 6),) if label == "coarse-replay" else ()).attack(
        setting, replace(effort, steps=5)
    )
    things = (setting.task(effort), setting.observed(effort), known)
    engine = gl.Engine(device="cpu", chunk=1)
    found = attacks.watched(attack, *things, 5, engine)
    direct = attack.run(*things, seed=5, engine=engine)
    assert torch.equal(found.batch["x"], direct.batch["x"])
    torch.testing.assert_close(found.match, direct.match[:, 0])
    torch.testing.assert_close(found.diagnosis["l_sim_obj"], direct.match[:, 0], rtol=1e-3, atol=1e-5)
    assert found.steps[-1] == 5
    assert not torch.equal(found.way[0], found.way[-1])
    with pytest.raises(ValueError, match="given labels"):
        attacks.watched(attack, *things[:2], gl.Knowledge(), 5, engine)


def test_clients_share_nothing_and_those_for_tuning_are_apart(paper: ModuleType, effort: Any) -> None:
    clients = part(paper, "clients")
    own = paper.CIFAR.clients(replace(effort, clients=12))
    tuned = paper.CIFAR.clients(clients.apart(effort))
    assert len(tuned) == 1
    assert torch.equal(tuned[0].x, own[10].x)
    everything = torch.cat([each.x for each in own]).flatten(1)
    assert len(torch.unique(everything, dim=0)) == len(everything) == 120
    assert paper.rows()["tune nl-sme"].apart
    with pytest.raises(gl.data.DataError, match="no client 99"):
        paper.CIFAR.clients(replace(effort, first=99))


def test_original_clients_are_pseudo_writers_and_enhanced_ones_are_pooled(paper: ModuleType, effort: Any) -> None:
    settings = {name: paper.rows()[f"{name}, E 20, B 10"].setting for name in ("original", "enhanced")}
    held = {name: setting.clients(effort) for name, setting in settings.items()}
    assert all("pseudo-writers (made up" in each.source for own in held.values() for each in own)
    assert all(len(each) == 10 for own in held.values() for each in own)
    for own in held.values():
        everything = torch.cat([each.x for each in own]).flatten(1)
        assert len(everything.unique(dim=0)) == len(everything)  # no image belongs to two clients


def test_the_letters_have_the_papers_network_with_their_own_classes(paper: ModuleType, monkeypatch: Any) -> None:
    """335,142 parameters with 26 classes, 1,734,348 for CIFAR-100; both in evaluation mode, on the sets' own scales."""
    clients = part(paper, "clients")
    sets = {"cifar100": (3, 32, 100), "emnist-letters": (1, 28, 26)}

    def images(name: str) -> gl.data.Images:
        channels, side, classes = sets[name]
        x = torch.rand(60, channels, side, side, generator=torch.Generator().manual_seed(0))
        return gl.data.Images(x, torch.arange(60) % classes, classes, tuple(map(str, range(classes))), name)

    monkeypatch.setattr(clients, "images", images)
    clients._task.cache_clear()
    own = paper.Effort(device="cpu", data="cifar100")
    colour, letters = paper.CIFAR.task(own), paper.LETTERS.task(own)
    assert (tree.size(colour.weights()), tree.size(letters.weights())) == (1_734_348, 335_142)
    assert not colour.model.training
    assert colour.fields["x"].mean == pytest.approx((0.5071, 0.4866, 0.4409))
    assert letters.fields["x"].mean == pytest.approx((images("emnist-letters").x.mean().item(),))
    clients._task.cache_clear()


def test_the_folder_brings_no_names_that_hide_others(paper: ModuleType) -> None:
    assert sys.modules["nl_sme.attacks"].__file__ == str(FOLDER / "attacks.py")
