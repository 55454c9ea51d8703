"""The reproduction of SecAdam: every kind of row runs on made-up images."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="needs the extra secure")

import gradleak as gl
from conftest import blobs, reproduction

FOLDER = Path(__file__).parents[1] / "papers" / "secadam"


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    return reproduction("secadam")


@pytest.fixture(scope="module")
def effort(paper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    data = blobs(tmp_path_factory.mktemp("images") / "blobs.npz", side=16, train=80, test=24)
    yield paper.Effort(
        runs=2, steps=3, trained=2, rounds=2, clients=2, small=1, data=str(data), device="cpu", precision="strict"
    )
    settings = sys.modules["secadam.settings"]
    settings._task.cache_clear()
    settings.images.cache_clear()


def one_of_each(paper: ModuleType) -> dict[str, Any]:
    """The first row of every kind, and both kinds of training."""
    found: dict[str, Any] = {}
    for name, row in paper.rows().items():
        found.setdefault(name.split()[0], (name, row))
    return dict(found.values())


@pytest.mark.parametrize("kind", ["exact", "rounds", "labels", "inversion", "gradients", "performance"])
def test_a_row_of_every_kind_runs(paper: ModuleType, effort: Any, kind: str) -> None:
    row = next(row for name, row in one_of_each(paper).items() if name.split()[0] == kind)
    shorter: dict[str, Any] = {"exact": {"sizes": (2,)}, "rounds": {"rounds": (1, 2)}}
    row, effort = replace(row, **shorter.get(kind, {})), replace(effort, runs=1 if kind == "exact" else effort.runs)
    found = sys.modules["record"].without_infinities(row.measure(effort))
    json.dumps(found, allow_nan=False)
    assert found["cells"]
    assert paper.told_in_a_line(found)
    assert "blobs" in found["data"]


def test_a_server_that_keeps_its_sums_knows_more_with_every_round(paper: ModuleType, effort: Any) -> None:
    row = replace(paper.rows()["state cifar10, B 1"], sizes=(1, 3), rounds=(1, 12))
    found = sys.modules["record"].without_infinities(row.measure(effort))
    json.dumps(found, allow_nan=False)
    assert "n 3, 12 rounds: sizes to" in paper.told_in_a_line(found)
    name = "tracked (v forgets by beta2)"
    for size in ("n 1", "n 3"):
        first, last = (found["cells"][size][f"{count} rounds"][name] for count in (1, 12))
        assert last["median_error_of_sizes"] < 0.6 * first["median_error_of_sizes"]
        assert last["cosine_with_m"] > first["cosine_with_m"]
        assert last["cosine_with_the_gradient"] > 0.75
        assert first["cosine_with_m"] == pytest.approx(
            found["cells"][size]["1 rounds"]["cosines of what one round shows"]["r m, with m"], abs=1e-6
        )  # after one round there is only r m
    assert found["cells"]["n 1"]["12 rounds"][name]["largest_excess"] < 1e-6  # a bound
    lions = [found["cells"][size]["SecLion, one round"]["median_error_of_sizes"] for size in ("n 1", "n 3")]
    assert 0.05 < lions[1] < lions[0] < 0.35


def test_what_a_server_tracked_is_attacked_beside_the_exact_gradient(paper: ModuleType, effort: Any) -> None:
    row = replace(paper.rows()["state cifar10, inverted"], rounds=(2,))
    found = sys.modules["record"].without_infinities(row.measure(effort))
    json.dumps(found, allow_nan=False)
    assert found["cells"].keys() == {"mid-grey", "exact gradient", "tracked", "r m", "ratio"}
    assert found["cells"]["exact gradient"]["labels"] == 1
    assert paper.told_in_a_line(found)


def test_every_table_of_the_supplement_has_its_rows(paper: ModuleType) -> None:
    names = paper.rows().keys()
    colour = ("CIFAR-10", "CIFAR-100", "SVHN", "Tiny-ImageNet")
    wanted = [f"inversion FMNIST, {net}" for net in ("lenet", "cnn")]
    wanted += [f"inversion {data}, {net}" for data in colour for net in ("convnext", "resnetv2")]
    wanted += [f"gradients FMNIST, {net}" for net in ("lenet", "cnn")] + [f"gradients {c}, resnetv2" for c in colour]
    wanted += ["performance FMNIST, lenet", *(f"performance {data}, convnext" for data in colour)]
    grids = ["grid FMNIST, cnn", *(f"grid {data}, resnetv2" for data in colour)]
    wanted += [f"{name}, clip {clip}" for name in grids for clip in (1, 5, 10)]
    pools, starts = ("no pool", "max 2", "max 3", "avg 2", "avg 3"), ("uniform", "mosaic-8", "red")
    wanted += [f"ablation {pool}, {start}, B {size}" for pool in pools for start in starts for size in (8, 1)]
    wanted += ["ablation sigmoid, 30 epochs"]
    assert set(wanted) <= names


def test_starts_of_the_class_reach_the_attacks_on_gradients(paper: ModuleType, effort: Any) -> None:
    row = paper.rows()["gradients FMNIST, lenet, from class images"]
    methods = sys.modules["secadam.attacks"].gradient_methods(effort, row.start)
    made = methods["CPL"].attack(row.network, effort)
    assert type(made.stages[0].space.start).__name__ == "OfClass"
    plain = sys.modules["secadam.attacks"].gradient_methods(effort)["CPL"].attack(row.network, effort)
    assert type(plain.stages[0].space.start).__name__ == "Uniform"


def test_the_grid_and_the_ablation_run(paper: ModuleType, effort: Any) -> None:
    rows = paper.rows()
    row = rows["grid FMNIST, cnn, clip 10"]
    one = {name: held for name, held in row.algorithms.items() if "clip 10, noise 0.001" in name}
    found = replace(row, algorithms=one).measure(effort)
    assert found["cells"].keys() == {"DP-FedAVG, clip 10, noise 0.001", "DP-SecAdam, clip 10, noise 0.001"}
    assert found["cells"]["DP-SecAdam, clip 10, noise 0.001"]["paper"]["accuracy"] == 77.942
    assert all(cell["guarantee"].startswith("no formal guarantee (") for cell in found["cells"].values())
    ablated = replace(rows["ablation avg 2, mosaic-8, B 8"], activations=("elu",)).measure(effort)
    assert ablated["cells"].keys() == {"elu, none", "elu, layer"}
    assert -1 <= ablated["correlation_of_ssim_and_psnr"] <= 1


def test_two_images_a_class_can_be_divided_among_ten_clients(paper: ModuleType) -> None:
    """Our Tiny-ImageNet: Dirichlet class by class finds no split of it."""
    labels = torch.arange(200).repeat(2)
    shares = paper.divided(400, 200).shares(400, 10, lambda: labels, torch.Generator().manual_seed(0))
    assert [len(share) for share in shares] == [40] * 10
    assert len(torch.cat(shares).unique()) == 400
    assert paper.divided(10_000, 10) == gl.federation.ClassDirichlet(alpha=0.5, min_size=10)


def test_cells_have_the_papers_figures_beside_ours(paper: ModuleType, effort: Any) -> None:
    rows = paper.rows()
    cell = rows["inversion FMNIST, lenet"].measure(effort)["cells"]["SecAdam"]
    assert cell["paper"]["psnr"] == pytest.approx(12.416, abs=1e-3)
    assert cell["s004_compat"]["oracle_psnr"]["mean"] >= cell["psnr"]["mean"]  # the best of all pairs, and grey
    for name, row in rows.items():
        if isinstance(row, paper.Inversion) and row.paper:
            wanted = {"dataset": row.dataset.replace("Tiny-ImageNet", "Tiny-Imagenet"), "algorithm": "SecAdam"}
            assert paper.printed("inversion", **wanted), name
        if isinstance(row, paper.Training):
            assert all(row._printed(cell) for cell in row.algorithms if cell in ("FedAVG", "SecAdam") or "clip" in cell)


def test_a_traitor_is_worth_as_much_as_no_factor(paper: ModuleType, effort: Any) -> None:
    row = sys.modules["record"].without_infinities(paper.rows()["clients cifar10"].measure(effort))
    json.dumps(row, allow_nan=False)
    assert "n 2: sum/idlg" in paper.told_in_a_line(row)
    found = row["cells"]["2"]
    assert found["one traitor (first moments of the others)"]["largest_error"] < 1e-6
    cosines = found["cosine_with_the_mean_gradient"]
    assert cosines["masked sum"] == pytest.approx(0.75**0.5, abs=0.03)
    assert cosines["ratio"] < cosines["masked sum"]


def test_images_of_the_class_are_starts_of_the_inferred_labels(paper: ModuleType, effort: Any) -> None:
    network = paper.Network("cifar10", "lenet-zhu", trained=False)
    attacks = sys.modules["secadam.attacks"]
    public = network.images(effort, "test")
    start = attacks.OfClass(public.x, public.y)
    task = network.task(effort)
    truth = network.victims(effort, 3)
    seen = attacks.observed(task, truth, None, effort)[0]
    scene = replace(gl.TargetView.of(task, seen, gl.Knowledge()), fields={"y": torch.tensor([0, 2, 2])})
    drawn = start(scene, gl.core.random.Draws(gl.core.random.key("lane")), "x")
    which = (drawn[:, None] - public.x).flatten(2).abs().amax(-1).argmin(1)
    assert public.y[which].tolist() == [0, 2, 2]
    assert torch.equal(drawn, public.x[which])


def test_victims_are_the_same_for_every_algorithm_and_drawn_with_replacement(paper: ModuleType, effort: Any) -> None:
    network = paper.Network("cifar10", "lenet-zhu", trained=False)
    once, again = network.victims(effort, 4), network.victims(effort, 4)
    assert torch.equal(once["x"], again["x"])
    many = network.victims(replace(effort, runs=50), 8)["x"].flatten(0, 1).flatten(1)
    assert len(many.unique(dim=0)) < len(many)
    assert not torch.equal(network.victims(replace(effort, seed=1), 4)["x"], once["x"])


def test_rows_are_written_as_they_come(
    paper: ModuleType, effort: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deeper" / "found.json"
    options = Namespace(only="labels cifar10, lenet-zhu, untrained", budget=60, out=out, **asdict(effort))
    figures = paper.run(options)
    assert list(figures) == ["labels cifar10, lenet-zhu, untrained"]
    assert figures["labels cifar10, lenet-zhu, untrained"]["cells"]["SecAdam, one client, B 1"]["sign"] == 1
    assert json.loads(out.with_suffix(".part.json").read_text()).keys() == figures.keys()
    capsys.readouterr()


def test_every_bound_names_a_row(paper: ModuleType) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    rows = paper.rows()
    assert all(name.split("/")[0] in rows for name in expected["figures"])
    printed = json.loads((FOLDER / "expected.json").read_text())["reference"]
    assert {table: len(held) for table, held in printed.items() if isinstance(held, list)} == {
        "inversion": 20,
        "performance": 10,
        "dp_fedavg": 45,
        "dp_secadam": 45,
    }


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "parameters"),
    [
        # ConvNeXt-Tiny: Base, 88,591,464, is the same function of its widths, and three times as long to draw.
        (
            gl.models.convnext,
            {"depths": (3, 3, 9, 3), "widths": (96, 192, 384, 768), "shape": (3, 32, 32), "classes": 1000},
            28_589_128,
        ),
        (gl.models.resnetv2, {"shape": (3, 224, 224), "classes": 1000, "stem": "imagenet"}, 25_549_352),
        (gl.models.cnn_lewis, {}, 183_674),
    ],
)
def test_networks_have_the_published_number_of_parameters(make: Any, settings: Any, parameters: int) -> None:
    assert sum(p.numel() for p in make(**settings).parameters()) == parameters


@pytest.mark.parametrize("make", [gl.models.convnext, gl.models.resnetv2])
def test_small_ones_run_in_lanes_and_have_features_before_their_classifier(make: Any) -> None:
    sizes: dict[str, Any] = (
        {"depths": (1, 1), "widths": (8, 16)} if make is gl.models.convnext else {"blocks": (1, 1), "width": 4}
    )
    model = make(**sizes, shape=(3, 8, 8), classes=3, generator=torch.Generator().manual_seed(0)).double()
    again = make(**sizes, shape=(3, 8, 8), classes=3, generator=torch.Generator().manual_seed(0)).double()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 2])
    assert torch.equal(model(x), again(x))
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(x[:1], y[:1]))
    assert task.classifier.module == "classifier"
    seen = gl.observe(task, {"x": x, "y": y}, gl.LocalTraining(lr=1.0))
    found = gl.attacks.get("ig", steps=20, restarts=2).run(
        task, seen, gl.Knowledge(given={"y": y}), engine=gl.Engine(device="cpu", precision="double")
    )
    assert (found.trace["objective"][-1] < found.trace["objective"][0]).all()  # both restarts got closer


def test_convnext_begins_near_the_identity() -> None:
    model = gl.models.convnext((2,), (8,), shape=(3, 8, 8))
    block = next(module for module in model.modules() if isinstance(module, gl.models.ConvNeXtBlock))
    x = torch.rand(1, 8, 4, 4)
    assert torch.allclose(block(x), x, atol=1e-4)
    assert not torch.equal(block(x), x)
