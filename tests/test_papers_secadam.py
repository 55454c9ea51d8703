"""The reproduction of SecAdam: every kind of row runs on made-up images, and what its README says can be checked."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="needs the extra secure")

import gradleak as gl
from conftest import blobs, reproduction
from gradleak.cli.scales import PAPERS

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


def test_what_is_owed_is_every_row_once_and_the_command_line_has_the_same(paper: ModuleType) -> None:
    text = said()
    owed = text[text.index("## What is owed") : text.index("## What was found")]
    budget = re.search(r'run="python papers/secadam/run.py (.*)"', owed)
    assert budget
    lines = [re.split(r" +--out", line)[0] for line in owed.splitlines() if line.startswith("$run")]
    calls = [line.replace("$run", budget[1]) for line in lines]
    assert calls == list(PAPERS["secadam"].paper.runs)
    picked = [re.search("--only '(.*?)'", call) for call in calls]
    for name in paper.rows():
        assert sum(bool(found and re.search(found[1], name)) for found in picked) == 1, name


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


# --- what was measured ------------------------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    """Result files by name. Those of a run that is still going on (NAME.part.json) are none."""
    paths = sorted((FOLDER / "results").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths if not path.stem.endswith(".part")}


def said() -> str:
    return (FOLDER / "README.md").read_text()


def test_what_is_said_to_be_measured_was(paper: ModuleType) -> None:
    """Every result file is named in the README and every one named is there; made by this folder, and repeatable."""
    held, text = stored(), said()
    found = text[text.index("## What was found") :]
    assert set(re.findall(r"results/([\w-]+)\.json", found)) == held.keys()
    for name, result in held.items():
        environment, settings = result["environment"], result["settings"]
        assert re.match(r"python papers/secadam/run\.py --only '?\^", environment["command"]), name
        assert re.fullmatch("[0-9a-f]{40}", environment["git"]["commit"]), name
        assert environment["packages"]["torch"], name
        assert environment["processor"], name
        assert environment["cores"], name
        assert environment["gpus"] is not None, name
        assert settings.keys() >= {field.name for field in fields(paper.Effort)}, name  # the seed among them
        assert result["figures"].keys() <= paper.rows().keys(), name
        assert result["failed"] == [], name
        assert not re.search(r'[" ]/(work|home|root|tmp|mnt|Users)/', json.dumps(result)), name


def short(value: float, digits: int = 3) -> str:
    """As the README writes it: .867, -.011."""
    return f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.{digits}f}"


def pair(cell: dict[str, Any], psnr: str = "psnr", ssim: str = "ssim") -> str:
    return f"{cell[psnr]['mean']:.1f} / {short(cell[ssim]['mean'])}"


def lines_of_labels(held: dict[str, Any]) -> Iterator[str]:
    rows = [
        held["cpu-small-labels"]["figures"][f"labels {name}"]["cells"]
        for name in (
            "cifar10, lenet-zhu, untrained",
            "fashion-mnist, lenet, untrained",
            "fashion-mnist, lenet, trained",
        )
    ]
    for rule in ("SecAdam", "SecLion"):
        assert all(row[f"{rule}, one client, B 1"]["sign"] == 1 for row in rows)
    eight = [row["SecAdam, one client, B 8"] for row in rows]
    yield "| " + " | ".join(f"{100 * row['sign']:.0f} / {100 * row['row-minimum']:.0f} %" for row in eight) + " |"
    yield " | ".join(
        ", ".join(f"{100 * row[f'SecAdam, {size} clients, B 1']['ratio-counts']:.0f}" for size in (2, 4, 8, 16, 50))
        + " %"
        for row in rows
    )


def lines_of_clients(held: dict[str, Any]) -> Iterator[str]:
    cells = held["cpu-small-clients"]["figures"]["clients cifar10"]["cells"]
    for size in ("1", "2", "8", "50"):
        of = cells[size]["cosine_with_the_mean_gradient"]
        parts = (short(of["signs"]), short(of["ratio"]), short(of["masked sum"]), short(of["SecLion's ratio"]))
        yield f"| {size} | {' | '.join(parts)} |"
    for size in ("1", "2", "4"):
        plain, ratio = cells[size]["sum (secure aggregation)"], cells[size]["ratio (SecAdam)"]
        decibels = [
            f"{each['psnr']['mean']:.1f}"
            for each in (plain["idlg"], plain["sign-matching"], ratio["sign-matching"], ratio["idlg, A0"])
        ]
        right = f"{100 * ratio['sign-matching']['labels']:.0f} %"
        yield f"| {size} | {' / '.join(decibels[:2])} | {' / '.join(decibels[2:])} | {right} |"
    one = held["cpu-small-one-client"]["figures"]["clients cifar10"]["cells"]["1"]
    for words, view, attack in (
        ("the sum: iDLG", "sum (secure aggregation)", "idlg"),
        ("the sum: `sign-matching`", "sum (secure aggregation)", "sign-matching"),
        ("the ratio: `sign-matching`", "ratio (SecAdam)", "sign-matching"),
        ("the ratio: iDLG, A0", "ratio (SecAdam)", "idlg, A0"),
        ("r m: iDLG", "masked sum (what SecAdam's server holds)", "idlg"),
    ):
        cell = one[view][attack]
        yield f"| {words} | {pair(cell)} | {pair(cell['unrelated'])} |"


def lines_of_state(held: dict[str, Any]) -> Iterator[str]:
    sizes, name = ("n 1", "n 5", "n 20"), "tracked (v forgets by beta2)"
    one, eight = (held["cpu-small-state"]["figures"][f"state cifar10, B {size}"]["cells"] for size in (1, 8))

    def last(cells: Any, of: str) -> list[float]:
        return [cells[size]["100 rounds"][name][of] for size in sizes]

    errors = [", ".join(f"{100 * e:.1f}" for e in last(c, "median_error_of_sizes")) + " %" for c in (one, eight)]
    cosines = [", ".join(short(e, 4) for e in last(c, "cosine_with_the_gradient")) for c in (one, eight)]
    seen = [
        ", ".join(short(one[size]["100 rounds"]["cosines of what one round shows"][view], 2) for size in sizes)
        for view in ("r m, with the gradient", "ratio, with the gradient")
    ]
    yield f"| 100 | {errors[0]} ({errors[1]}) | {cosines[0]} ({cosines[1]}) | {seen[0]} | {seen[1]} |"
    for rounds in (10, 30):
        now = [one[size][f"{rounds} rounds"] for size in sizes]
        wrong = ", ".join(f"{100 * cell[name]['median_error_of_sizes']:.0f}" for cell in now)
        yield f"| {rounds} | {wrong} % | {', '.join(short(c[name]['cosine_with_the_gradient']) for c in now)} |"
    lion = [one[size]["SecLion, one round"] for size in sizes]
    yield "Sizes of c are known to {:.0f}, {:.0f} and {:.0f} %".format(
        *(100 * c["median_error_of_sizes"] for c in lion)
    )
    yield "cosine " + ", ".join(short(cell["cosine_with_c"]) for cell in lion)
    inverted = held["cpu-small-state-inverted"]["figures"]["state cifar10, inverted"]["cells"]
    for words, view in (
        ("the exact gradient, no SecAdam", "exact gradient"),
        ("tracked", "tracked"),
        ("r m of that round", "r m"),
        ("the ratio of that round", "ratio"),
    ):
        cell = inverted[view]
        right = f"{100 * cell['labels']:.0f} %"
        yield f"| {words} | {pair(cell)} | {pair(cell['unrelated'])} | {right} |"
    yield f"Grey has {pair(inverted['mid-grey'])}"


def lines_of_tables(held: dict[str, Any]) -> Iterator[str]:
    tables, own = held["cpu-small-tables"]["figures"], ("oracle_psnr", "oracle_ssim")
    inverted = tables["inversion FMNIST, lenet"]["cells"]
    started = held["cpu-small-class-start"]["figures"]["gradients FMNIST, lenet, from class images"]["cells"]
    for name in ("FedAVG", "SecAdam", "DP-FedAVG", "DP-SecAdam"):
        cell = inverted[name]
        printed = f"{cell['paper']['psnr']:.1f} / {short(cell['paper']['ssim'])}"
        yield f"| {name} | {pair(cell['s004_compat'], *own)} | {printed} | {pair(cell)} |"
        for attack in ("iDLG", "CPL"):
            uniform = tables["gradients FMNIST, lenet"]["cells"][f"{attack}, {name}"]["s004_compat"]
            of_class = started[f"{attack}, {name}"]["s004_compat"]
            yield f"| {pair(uniform, *own)} | {pair(of_class, *own)} |"
    small, large = (
        held[f"{name}-performance"]["figures"]["performance FMNIST, lenet"]["cells"] for name in ("cpu-small", "h200")
    )
    for words, name in (
        ("FedAVG, rate 0.001", "FedAVG"),
        ("SecAdam, rate 0.001", "SecAdam"),
        ("FedAVG, rate 0.1 (ours)", "FedAVG, lr 0.1"),
        ("SecLion (ours)", "SecLion"),
    ):
        cell, printed = large[name], large[name]["paper"]
        said = f" {printed['accuracy']:.1f}, {printed['loss']:.3f}" if printed else ""
        now = f"{cell['accuracy']:.1f} | {cell['loss']:.3f}"
        yield f"| {words} | {now} |{said} | {small[name]['accuracy']:.1f} |"
    colour = held["cpu-small-performance-colour"]["figures"]
    accuracy = {n: f"{c['accuracy']:.1f} %" for n, c in colour["performance CIFAR-10, convnext"]["cells"].items()}
    yield f"CIFAR-10: FedAVG {accuracy['FedAVG']}, SecAdam {accuracy['SecAdam']}"
    yield f"FedAVG with a rate of 0.1 {accuracy['FedAVG, lr 0.1']}, SecLion {accuracy['SecLion']}"
    assert {cell["accuracy"] for cell in colour["performance Tiny-ImageNet, convnext"]["cells"].values()} == {0.5}
    for name in ("DP-FedAVG", "DP-SecAdam"):
        for clip in (1, 5, 10):
            names = [f"{name}, clip {clip}, noise {noise}" for noise in (0.001, 0.005, 0.01)]
            few, all_ = (
                [held[f"{file}-grid"]["figures"][f"grid FMNIST, cnn, clip {clip}"]["cells"][each] for each in names]
                for file in ("cpu-small", "h200")
            )
            told = [
                f"{cell['accuracy']:.1f} ({cell['paper']['accuracy']:.1f}; {small['accuracy']:.1f})"
                for cell, small in zip(all_, few, strict=True)
            ]
            yield f"| {name}, C = {clip} | {' | '.join(told)} |"


def ablation_on_a_gpu() -> Iterator[tuple[str, str, str]]:
    """How a row is called in the README, its name, its file."""
    files = {"no pool": ("none", "none-more"), "max 3": ("max-3", "max-3"), "avg 3": ("avg-3", "avg-3")}
    files |= {"max 2": ("max-2", "max-2-single"), "avg 2": ("avg-2", "avg-2-single")}
    starts = {"uniform": "uniform", "mosaic-8": "repeated pattern", "red": "red"}
    for pool, (first, second) in files.items():
        for start, told in starts.items():
            for size in (8, 1):
                later = size == 1 or (pool == "no pool" and start != "uniform")
                words = f"{pool.replace('no pool', 'none').replace('avg', 'average')}, {told}, B {size}"
                yield words, f"{pool}, {start}, B {size}", f"h200-ablation-{second if later else first}"


def lines_of_the_ablation(held: dict[str, Any]) -> Iterator[str]:
    for words, row, file in (
        ("none, uniform, 8", "no pool, uniform, B 8", "cpu-small-ablation"),
        ("none, repeated pattern, 8", "no pool, mosaic-8, B 8", "cpu-small-ablation"),
        ("none, red, 8", "no pool, red, B 8", "cpu-small-ablation"),
        ("max 2, uniform, 8", "max 2, uniform, B 8", "cpu-small-ablation"),
        ("average 2, uniform, 8", "avg 2, uniform, B 8", "cpu-small-ablation"),
        ("average 2, repeated pattern, 8", "avg 2, mosaic-8, B 8", "cpu-small-ablation"),
        ("none, uniform, 1", "no pool, uniform, B 1", "cpu-small-ablation"),
        *ablation_on_a_gpu(),
    ):
        figures = held[file]["figures"][f"ablation {row}"]
        told = [
            " / ".join(
                short(figures["cells"][f"{kind}, {norm}"]["s004_compat"]["oracle_ssim"]["mean"], 2)
                for norm in ("none", "layer")
            )
            for kind in ("relu", "elu", "sigmoid", "leaky_relu", "tanh")
        ]
        yield f"| {words} | {' | '.join(told)} | {short(figures['correlation_of_ssim_and_psnr'], 2)} |"


def lines_of_the_longer_training(held: dict[str, Any]) -> Iterator[str]:
    figures = held["cpu-ablation-sigmoid"]["figures"]["ablation sigmoid, 30 epochs"]
    cells = [figures["cells"][f"sigmoid, {norm}"] for norm in ("none", "layer")]
    found = " / ".join(short(cell["s004_compat"]["oracle_ssim"]["mean"], 2) for cell in cells)
    right = " / ".join(f"{100 * cell['test_accuracy']:.0f}" for cell in cells)
    paper = figures["paper"]
    printed = short(paper["ssim"]["sigmoid, 30 epochs"], 2), f"{paper['accuracy']['sigmoid, 30 epochs']:.0f}"
    yield f"{found}, accuracy {right} % (the paper {printed[0]} and {printed[1]} %)"
    yield f"correlation {short(figures['correlation_of_ssim_and_psnr'], 2)}"


def lines_of_cohorts_on_a_gpu(held: dict[str, Any]) -> Iterator[str]:
    for file, row in (("h200-clients", "clients cifar10"), ("h200-clients-fmnist", "clients fashion-mnist")):
        for size in ("1", "2", "4", "8"):
            cell = held[file]["figures"][row]["cells"][size]
            plain, ratio = cell["sum (secure aggregation)"], cell["ratio (SecAdam)"]
            masked = cell["masked sum (what SecAdam's server holds)"]
            betrayed = cell.get("one traitor (first moments of the others)")
            yield (
                f"| {size} | {pair(plain['idlg'])}; {pair(plain['sign-matching'])} "
                f"| {pair(ratio['sign-matching'])}; {pair(ratio['idlg, A0'])} | {pair(masked['idlg'])} "
                f"|{'' if betrayed is None else ' ' + pair(betrayed['idlg'])} | {pair(cell['mid-grey'])} |"
            )
    inverted = held["h200-state"]["figures"]["state cifar10, inverted"]["cells"]
    told = [pair(inverted[view]) for view in ("exact gradient", "tracked", "r m", "ratio", "mid-grey")]
    yield (
        f"the exact gradient {told[0]}, tracked {told[1]}, r m {told[2]}, the ratio {told[3]}, mid-grey {told[4]}, "
        f"unrelated {pair(inverted['exact gradient']['unrelated'])}"
    )


def lines_of_tables_on_a_gpu(held: dict[str, Any]) -> Iterator[str]:
    own = ("oracle_psnr", "oracle_ssim")
    lenet, cnn = (
        held["h200-inversion"]["figures"][f"inversion FMNIST, {model}"]["cells"] for model in ("lenet", "cnn")
    )
    colour = [
        held[f"h200-inversion-{name.lower().replace('-', '')}"]["figures"][f"inversion {name}, convnext"]["cells"]
        for name in ("CIFAR-10", "CIFAR-100", "SVHN")
    ]
    others = [
        held[f"h200-inversion-{file}"]["figures"][f"inversion {row}"]
        for row, file in (
            ("Tiny-ImageNet, convnext", "tiny"),
            ("CIFAR-10, resnetv2", "cifar10-resnetv2"),
            ("CIFAR-100, resnetv2", "cifar100-resnetv2"),
            ("SVHN, resnetv2", "svhn-resnetv2"),
            ("Tiny-ImageNet, resnetv2", "tiny-resnetv2"),
        )
    ]

    def of(cell: Any) -> str:
        printed = cell["paper"]
        said = f" / {printed['psnr']:.1f} {short(printed['ssim'])}" if printed else ""
        return f"{pair(cell['s004_compat'], *own).replace(' /', '')}{said}; {pair(cell).replace(' /', '')}"

    yield "| mid-grey, one to one | " + " | ".join(pair(r["no update"]["mid-grey"]).replace(" /", "") for r in others)
    for name in ("FedAVG", "SecAdam", "DP-FedAVG", "DP-SecAdam"):
        first, second = lenet[name], cnn[name]
        printed = f"{first['paper']['psnr']:.1f} / {short(first['paper']['ssim'])}"
        yield (
            f"| {name} | {pair(first['s004_compat'], *own)} | {printed} | {pair(second['s004_compat'], *own)} "
            f"| {pair(first)} | {pair(second)} |"
        )
        yield f"| {name} | {' | '.join(of(cells[name]) for cells in colour)} |"
        yield f"| {name} | {' | '.join(of(row['cells'][name]) for row in others)} |"
        for file, model in (("h200-gradients", "cnn"), ("h200-gradients-lenet", "lenet")):
            found = held[file]["figures"]
            starts = [found[f"gradients FMNIST, {model}{start}"]["cells"] for start in ("", ", from class images")]
            for attack in ("iDLG", "CPL"):
                cells = [start[f"{attack}, {name}"] for start in starts]
                ours = " | ".join(pair(cell["s004_compat"], *own) for cell in cells)
                printed = f"{cells[0]['paper']['psnr']:.1f} / {short(cells[0]['paper']['ssim'])}"
                yield f"| {attack}, {name} | {ours} | {printed} |"


def lines_of_exactness_on_a_gpu(held: dict[str, Any]) -> Iterator[str]:
    cells = held["h200-exact"]["figures"]["exact cifar10"]["cells"]
    for clients in (1, 2, 3, 4, 8):
        views = [cells[f"{view}, n {clients}"] for view in ("sum", "ratio")]
        found = " | ".join(f"{cell['psnr']['mean']:.1f}, {cell['psnr']['lowest']:.1f}" for cell in views)
        exact = " and ".join(f"{8 * cell['all_exact']:.0f}" for cell in views)
        yield f"| {clients} | {found} | {exact} of 8 |"


@pytest.mark.parametrize(
    "lines",
    [
        lines_of_labels,
        lines_of_clients,
        lines_of_state,
        lines_of_tables,
        lines_of_the_ablation,
        lines_of_the_longer_training,
        lines_of_cohorts_on_a_gpu,
        lines_of_tables_on_a_gpu,
        lines_of_exactness_on_a_gpu,
    ],
)
def test_figures_of_the_readme_are_those_that_are_stored(lines: Callable[[dict[str, Any]], Iterator[str]]) -> None:
    text = said().replace("**", "")
    assert [line for line in lines(stored()) if line not in text] == []


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
