"""The reproduction of TIP, at a scale of seconds: every kind of row runs, and its own definitions are what they say."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gradleak as gl
from conftest import blobs, largest_difference, measured, reproduction
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.defences import TIP
from gradleak.scenario.client import ClientState

FOLDER = Path(__file__).parents[1] / "papers" / "tip"


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    return reproduction("tip", "run")


@pytest.fixture(scope="module")
def effort(paper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Sixteen pixels a side, made here: blobs in colours that tell the class."""
    path = blobs(tmp_path_factory.mktemp("tip") / "blobs.npz", 16, 48)
    return paper.Effort(
        images=2, steps=3, rounds=1, trained=2, noises=1, small=1, data=str(path), precision="strict", device="cpu"
    )


def upload(paper: ModuleType, effort: Any, defence: gl.Defence | None) -> dict[str, torch.Tensor]:
    """What one client returns under a defence, its noise always of the same key."""
    network = paper.Network()
    task, images = network.task(effort), network.images(effort, "test", 3)
    batch = {"x": task.fields["x"].model(images.x), "y": images.y}
    state = ClientState(key=draws.key("one client"))
    sent, _ = gl.LocalTraining(lr=1e-3).run(task, task.weights(), batch, defence, state)
    return sent.payload["update"]


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table cifar10", "sweep ablation"])
def test_a_row_of_attacks_scores_every_defence_and_attacker(paper: ModuleType, effort: Any, name: str) -> None:
    row = paper.rows()[name]
    figures = row.measure(effort)
    for level in row.attackers:
        informed = paper.ATTACKERS[level].informed
        wanted = {label for label, held in row.defences.items() if not (informed and held is None)}
        wanted -= {label for attacker, label in row.skips if attacker == level}
        assert figures[level].keys() == wanted
        assert all(cell["psnr"]["images"] == 2 and cell["psnr"]["lowest"] > 0 for cell in figures[level].values())
    assert figures["A0"]["No DP"]["share_of_undefended"] == 1
    assert figures["update_against_gradient"]["lowest"] > 0.9
    ratios = [held["beta_over_std_of_weights"]["median"] for held in figures["defences"].values() if "beta" in held]
    assert ratios
    assert min(ratios) > 0
    json.dumps(figures, allow_nan=False)


def test_the_second_order_row_runs_where_its_attack_unrolls_the_client(paper: ModuleType, effort: Any) -> None:
    figures = paper.rows()["table lenet, second order"].measure(replace(effort, images=1))
    assert set(figures["A1"]) == set(figures["A2"]) == {"beta 0.0057", "beta 0.1"}


def test_maps_and_accuracy_share_one_training_and_no_noise_is_perfect_fidelity(paper: ModuleType, effort: Any) -> None:
    rows = paper.rows()
    curve = rows["accuracy cifar10, pretrained"].measure(effort)
    local = rows["maps cifar10, local"].measure(effort)
    whole = rows["maps cifar10, whole training"].measure(effort)
    beta = rows["maps cifar10, beta"].measure(effort)
    assert paper.federated.cache_info().misses == 4  # one training for each column, however many rows look at it
    for figures in (local, whole):
        assert figures["No DP"]["mse"] == 0
        assert figures["No DP"]["ssim"] == pytest.approx(1)
        assert figures["TIP"]["mse"] > 0
    errors = [beta[f"beta {held:g}"]["mse"] for held in paper.BETAS]
    assert errors[0] < errors[-1]
    assert all(len(curve[label]["test_accuracy"]) == 2 for label in ("No DP", "DP", "AGP", "TIP"))
    json.dumps([curve, local, whole, beta], allow_nan=False)


def test_rows_are_written_as_they_come_and_none_after_the_budget(
    paper: ModuleType, effort: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deeper" / "found.json"
    options = Namespace(only="table lenet$", budget=60, out=out, **asdict(effort))
    figures = measured(paper, options)
    assert list(figures) == ["table lenet"]
    assert json.loads(out.with_suffix(".part.json").read_text()).keys() == figures.keys()
    assert measured(paper, Namespace(**{**vars(options), "budget": -1})) == {}
    capsys.readouterr()


# --- what the run file defines for itself -----------------------------------------------------------------------------


def test_an_upload_of_the_run_file_is_what_observe_sees(paper: ModuleType, effort: Any) -> None:
    row = paper.rows()["table cifar10"]
    task, images = row.network.task(effort), row.network.images(effort, "test", 1)
    batch = {"x": task.fields["x"].model(images.x), "y": images.y}
    for label in ("DP", "AGP", "TIP"):
        ours = paper.uploaded(task, batch, row, label, task.weights(), "target", 3)
        theirs = gl.observe(task, batch, row.training, row.defences[label], seed=3, wire="weights")
        assert largest_difference(ours.update, theirs.update) < 1e-6


def test_the_ablation_of_top_channels_and_high_frequencies_is_tip(paper: ModuleType, effort: Any) -> None:
    ours, theirs = (upload(paper, effort, kind(beta=0.5)) for kind in (paper.AblatedTIP, TIP))
    assert largest_difference(ours, theirs) < 1e-6
    other = upload(paper, effort, paper.AblatedTIP(beta=0.5, channels="bottom"))
    assert largest_difference(ours, other) > 0.1


def test_high_and_low_frequencies_add_up_to_all_of_them(paper: ModuleType, effort: Any) -> None:
    clear = upload(paper, effort, None)
    high, low, every = (
        tree.subtract(upload(paper, effort, paper.AblatedTIP(beta=0.5, frequencies=band)), clear)
        for band in ("high", "low", "all")
    )
    assert largest_difference(tree.add(high, low), every) < 1e-6
    name = "features.0.weight"
    assert torch.allclose(high[name].mean((-2, -1)), torch.zeros(()), atol=1e-6)
    assert low[name].abs().max() > 0.01


def test_the_released_argument_evaluates_gradients_at_the_weights_that_came_back(
    paper: ModuleType, effort: Any
) -> None:
    row = paper.rows()["table cifar10"]
    task, images = row.network.task(effort), row.network.images(effort, "test", 1)
    batch = {"x": task.fields["x"].model(images.x), "y": images.y}
    seen = gl.observe(task, batch, row.training, row.defences["TIP"])
    scene = gl.TargetView.of(task, seen, gl.Knowledge())
    came_back = tree.subtract(seen.weights, seen.update)
    assert largest_difference(paper.at_returned_weights(scene).weights, came_back) == 0
    assert largest_difference(came_back, seen.weights) > 0.01


def test_attackers_that_know_the_same_of_several_settings_attack_them_together(paper: ModuleType) -> None:
    families = paper.sweeps()
    assert len({paper.told(held) for held in families["beta"].values()} - {None}) == 1
    assert len({paper.told(held) for held in families["r"].values()} - {None}) == 4
    assert len({paper.told(held) for held in families["ablation"].values()} - {None}) == 3


def test_the_noise_of_the_attack_runs_is_the_papers(paper: ModuleType) -> None:
    held = paper.attacked()
    assert held["DP"].sigma == held["AGP"].sigma == pytest.approx(0.019379, rel=1e-4)
    assert held["TIP"].beta == pytest.approx(0.0969, rel=1e-3)
    federated = paper.defended(epochs=2, batches=16, batch_size=32, beta=0.1)
    assert federated["DP"].sigma == pytest.approx(0.0048448, rel=1e-4)


def test_every_bound_names_a_row_and_every_reference_is_a_table_of_the_paper(paper: ModuleType) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    rows = paper.rows()
    for name in expected["figures"]:
        row, level, label = name.split("/")[:3]
        assert row in rows, name
        assert level in (*rows[row].attackers, "channels_found"), name
        assert label in rows[row].defences, name
    used = {row.paper for row in rows.values() if getattr(row, "paper", "")}
    assert used == expected["reference"]["attacks"].keys()
    assert used - {"tiny-imagenet"} <= expected["reference"]["heat maps"].keys()


def test_a_network_is_in_evaluation_mode_and_federated_clients_train_a_copy(paper: ModuleType, effort: Any) -> None:
    network = paper.Network()
    task = network.task(effort)
    before = {name: value.clone() for name, value in task.buffers().items()}
    paper.federated(network, None, effort)
    assert not task.model.training
    assert largest_difference(task.buffers(), before) == 0
    images = network.images(effort, "test")
    logits = task.model(task.fields["x"].model(images.x))
    right = (logits.argmax(1) == images.y).double().mean().item()
    assert paper.accuracy(task, None, images) == pytest.approx(right)
    assert F.cross_entropy(logits, images.y).isfinite()
