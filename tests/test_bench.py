"""Measurements: same work under every engine, ratios that hold still, a check that notices, a peer on equal terms."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gradleak import bench, models
from gradleak.bench import costs, memory, peer, quality, regression, roofline, speed, suite, timing
from gradleak.bench.workloads import pictures, workload
from gradleak.engine import Engine

STRICT, DOUBLE = Engine("cpu"), Engine("cpu", "double")
ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """A file of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", bench.NETWORKS)
def test_lanes_of_every_network_compute_what_the_loop_does(network: str) -> None:
    work = workload(network, targets=2, side=16, steps=10)
    found = []
    for engine in (DOUBLE, replace(DOUBLE, batched=False)):
        search = work.search(2, engine)
        for _ in range(2):
            search.tick()
        found.append((search.v["x"], search.moving["last"]["objective"]))
    (x, objective), (other_x, other) = found
    torch.testing.assert_close(objective, other, rtol=1e-9, atol=1e-12)
    assert (x - other_x).abs().max() < 1e-6
    assert objective[0] != objective[1]  # two targets


def test_a_lane_starts_alike_wherever_it_runs() -> None:
    work = workload("lenet", targets=3)
    together, alone = work.search(3, STRICT), work.search(1, replace(STRICT, batched=False), first=2)
    assert torch.equal(together.v["x"][2], alone.v["x"][0])
    assert torch.equal(together.lane["fields"]["y"][2], alone.lane["fields"]["y"][0])


def test_pictures_are_pictures() -> None:
    x = pictures(3, 32)
    assert x.shape == (3, 3, 32, 32)
    assert 0 <= x.min() < 0.2
    assert 0.8 < x.max() <= 1
    assert (x[..., 1:] - x[..., :-1]).abs().mean() < 0.1  # smooth
    assert torch.equal(x, pictures(3, 32))
    assert not torch.equal(x[0], x[1])


def test_attacks_without_a_fixed_number_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="not one search"):
        workload("lenet", attack="second-order")


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'lenet'"):
        workload("lennet")


# --- timing -----------------------------------------------------------------------------------------------------------


class Clock:
    """A search that takes a known time a step, and more while the machine is busy."""

    def __init__(self, lanes: int, step: float, busy: list[float]) -> None:
        self.lanes, self.step, self.busy = lanes, step, busy

    def seconds(self, steps: int) -> float:
        return steps * self.step * self.busy[0]


def test_what_disturbs_a_round_leaves_ratios_alone() -> None:
    busy = [1.0]

    class Last(Clock):
        def seconds(self, steps: int) -> float:
            spent = super().seconds(steps)
            busy[0] *= 3  # from round to round the machine slows down
            return spent

    one, many = timing.turn_by_turn([Clock(1, 0.1, busy), Last(8, 0.2, busy)], seconds=1.0)  # type: ignore[list-item]
    assert many.over(one) == pytest.approx(4.0)
    assert one.spread == pytest.approx(8.0)


def test_rows_of_the_engine() -> None:
    rows = speed.engine(["lenet"], [1, 2, 400], ["strict"], seconds=0.01, device="cpu")
    assert [(row["lanes"], row["batched"]) for row in rows] == [(1, False), (1, True), (2, True), (400, True)]
    assert rows[0]["times_one_at_a_time"] == 1.0
    assert all(row["rate"] > 0 for row in rows)
    assert rows[-1]["chunk"] == workload("lenet").chunk(STRICT) < 400


# --- roofline and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["vit", "unet"])
def test_operations_of_networks_with_attention_are_counted(network: str) -> None:
    forward, step = roofline.operations(workload(network, side=16), STRICT)
    assert 5 * forward < step < 9 * forward


def test_operations_of_lenet_are_those_one_counts_by_hand() -> None:
    forward, step = roofline.operations(workload("lenet"), STRICT)
    layers = (16 * 16 * 12 * 3 * 25, 8 * 8 * 12 * 12 * 25, 8 * 8 * 12 * 12 * 25, 768 * 10)
    assert forward == 2 * sum(layers)
    assert 5 * forward < step < 9 * forward  # forward, backward, and backward of both


def test_shares_are_of_the_peak() -> None:
    peak, row = roofline.roofline(["lenet"], 2, ["strict"], seconds=0.01, device="cpu")
    best = max(peak["matrix"], peak["convolution"])
    assert row["step_share"] == pytest.approx(row["step_flops"] * row["steps_per_second"] / best)
    assert 0 < row["step_share"] < 1


def test_a_straight_line() -> None:
    found = memory.line([1, 2, 4, 8], [13, 16, 22, 34])
    assert found == pytest.approx({"per_lane": 3.0, "constant": 10.0, "worst_off": 0.0}, abs=1e-9)
    assert memory.line([1, 2, 4, 8], [1, 4, 16, 64])["worst_off"] > 0.05


def test_memory_of_lenet_is_linear() -> None:
    (row,) = memory.memory(["lenet"], (2, 4, 8), device="cpu")
    gradient = workload("lenet").parameters * 4 / 2**20
    assert row["per_lane"] > 2 * gradient  # what was observed and what is predicted, at least
    assert row["worst_off"] < 0.05


# --- quality and cost -------------------------------------------------------------------------------------------------


def test_a_course_never_sees_the_truth() -> None:
    work = workload("lenet", steps=4, targets=2)
    other = replace(work, truth=tuple({**batch, "x": 1 - batch["x"]} for batch in work.truth))
    first, second = quality.course(work, 2, STRICT, 3), quality.course(other, 2, STRICT, 3)
    assert torch.equal(first.found, second.found)
    assert not torch.equal(quality.scores(first.found, work), quality.scores(second.found, other))
    assert len(first.images) == 3
    torch.testing.assert_close(first.images[0], first.start.clamp(0, 1), atol=1e-3, rtol=0)  # kept in half precision


def test_when_a_level_was_reached() -> None:
    blank = torch.zeros(3, 1, 1, 1, 1)
    ran = quality.Course(1.0, 10.0, 100, blank, blank, [0, 10, 50], [])
    curve = torch.tensor([[5.0, 5.0, 5.0], [21.0, 5.0, 5.0], [25.0, 19.0, 5.0]])
    found = quality._reached(ran, curve, torch.tensor([26.0, 20.5, 6.0]), 20.0)
    assert found["reached_20_db"] == 2
    assert found["steps_to_20_db"] == 55  # the first at 10, the second at the end only
    assert found["seconds_to_20_db"] == pytest.approx(1 + 5.5)


def test_scores_know_which_target_a_lane_attacked() -> None:
    work = workload("lenet", targets=2)
    right = torch.stack([work.truth[lane % 2]["x"] for lane in range(1, 4)])
    assert (quality.scores(right, work, first=1) > 100).all()
    assert (quality.scores(right, work, first=0) < 30).all()


def test_quality_and_chunks_run() -> None:
    (row,) = quality.quality([("lenet", "ig")], 2, 5, device="cpu")
    assert len(row["psnr"]) == 2
    (row,) = quality.chunks("lenet", 2, 2, steps=2, precision="strict", device="cpu")
    assert (row["lanes"], row["finite"], sum(row["chunks"])) == (4, 4, 4)


def test_costs_are_told_beside_the_smallest() -> None:
    rows = costs.costs(2, seconds=0.01, device="cpu", growing=("batch",))
    assert [row["size"] for row in rows] == [1, 2, 4, 8, 16]
    assert rows[0]["times"] == 1.0
    assert rows[-1]["times"] > 1.5


def test_what_grows_does_grow() -> None:
    make = {name: told[2] for name, told in costs.GROWTH.items()}
    assert make["batch"](4).examples == 4
    assert make["side"](16).task.fields["x"].shape == (3, 16, 16)
    training = make["local_steps"](4).knows[0].training
    assert training is not None
    assert training.steps == 4
    assert make["width"](8).parameters == sum(p.numel() for p in models.convnet(width=8).parameters())


# --- regression -------------------------------------------------------------------------------------------------------

HERE = {"processor": "some", "cores": 2, "threads": 1, "gpus": []}


def result(ratio: float, **where: Any) -> dict[str, Any]:
    row = {"network": "lenet", "lanes": 32, "precision": "strict", "batched": True, "times_one_at_a_time": ratio}
    large = {**row, "lanes": 512, "times_one_at_a_time": None}
    return {"environment": {**HERE, **where}, "rows": [row, large]}


def test_a_ratio_that_fell_is_found() -> None:
    assert regression.compare(result(8.6), result(10.0)) == []
    assert regression.compare(result(12.0), result(10.0)) == []
    (one,) = regression.compare(result(8.4), result(10.0))
    assert (one.then, one.now) == (10.0, 8.4)
    assert "lenet 32 strict: x8.4, was x10.0 (-16%)" in str(one)
    assert regression.compared(result(1.0), result(2.0)) == 1


@pytest.mark.parametrize("name", regression.MACHINE)
def test_other_machines_are_not_compared(name: str) -> None:
    with pytest.raises(regression.OtherMachine, match=name):
        regression.compare(result(1.0), result(1.0, **{name: ["another"]}))


def test_a_busy_moment_is_forgiven() -> None:
    fallen = regression.compare(result(5.0), result(10.0))
    assert regression.confirmed(fallen, lambda one: 9.0) == []
    (kept,) = regression.confirmed(fallen, lambda one: 6.0)
    assert kept.now == 6.0
    assert regression.confirmed(fallen, lambda one: None) == fallen


# --- the peer ---------------------------------------------------------------------------------------------------------


class Library:
    """Something with the peer's outside: it returns where it started, and keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.attacks = SimpleNamespace(
            prepare_attack=lambda model, loss, cfg, setup: SimpleNamespace(cfg=cfg, reconstruct=self.run)
        )

    def get_attack_config(self, name: str, overrides: list[str]) -> Any:
        assert name == "invertinggradients"
        steps = next(int(text.split("=")[1]) for text in overrides if text.startswith("optim.max_iterations"))
        return SimpleNamespace(optim=SimpleNamespace(max_iterations=steps))

    def run(self, payload: Any, shared: Any, server_secrets: Any, initial_data: Tensor) -> Any:
        self.given.append({**payload[0], **shared[0], "start": initial_data})
        return {"data": initial_data}, {}


def test_the_peer_gets_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(peer, "load", lambda: library)
    (row,) = peer.peers(["lenet"], [2], steps=2, precisions=["strict"], rounds=2, device="cpu")
    work = workload("lenet", steps=2, targets=2)
    start = work.search(2, STRICT)
    for number, given in enumerate(library.given[1:]):  # the first warms up
        gradient = torch.autograd.grad(
            torch.nn.functional.cross_entropy(work.task.model(work.truth[number]["x"]), work.truth[number]["y"]),
            list(work.task.model.parameters()),
        )
        for own, its in zip(gradient, given["gradients"], strict=True):
            torch.testing.assert_close(own, its)
        assert torch.equal(given["metadata"]["labels"], work.truth[number]["y"])
        assert torch.equal(given["start"], start.v["x"][number])
    assert row["peer_psnr"] == pytest.approx(
        [float(quality.scores(start.v["x"][i : i + 1].clamp(0, 1), work, i)) for i in range(2)]
    )
    assert row["psnr"] == pytest.approx(row["eager_psnr"], abs=1e-3)
    assert row["times_peer"] > 0
    assert row["psnr_difference"] == pytest.approx(sum(row["psnr"]) / 2 - sum(row["peer_psnr"]) / 2, abs=1e-4)


def test_without_the_peer_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "breaching", None)
    held = suite.measure(suite.Plan.of("cpu", quick=True), ["peer"])
    assert "peer" not in held
    assert "extra `bench`" in held["left_out"]["peer"]


def test_the_stand_in_for_torchvision_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("peers")
    for part in module.PARTS:
        monkeypatch.setitem(sys.modules, f"torchvision{part}", None)
    module.without_torchvision()
    found = importlib.import_module("torchvision.models.densenet")
    assert isinstance(type("Own", (found._DenseLayer,), {}), type)
    assert sys.modules["torchvision"].models.densenet is found


def test_breaching_itself_agrees() -> None:
    pytest.importorskip("breaching", reason="the peer is not installed: extra `bench`", exc_type=Exception)
    (row,) = peer.peers(["lenet"], [2], steps=20, precisions=["strict"], rounds=2, device="cpu")
    assert abs(row["psnr_difference"]) < 0.5


# --- the command and the tables ---------------------------------------------------------------------------------------


def called(*words: object) -> Any:
    from gradleak.cli import app

    return CliRunner().invoke(app, ["bench", *map(str, words)])


def test_the_command_measures_stores_and_notices(tmp_path: Path) -> None:
    file = tmp_path / "stored.json"
    words = ("--quick", "--only", "engine", "--lanes", "1,2", "--seconds", 0.02, "--device", "cpu")
    answer = called(*words, "--out", file)
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.count("engine: network lenet") == 3
    held = json.loads(file.read_text())
    assert held["environment"]["processor"]
    assert held["load"]["after"] is None or len(held["load"]["after"]) == 3

    def again(factor: float, **where: Any) -> Any:
        rows = [{**row, "times_one_at_a_time": factor * row["times_one_at_a_time"]} for row in held["rows"]]
        file.write_text(json.dumps({"environment": {**held["environment"], **where}, "rows": rows}))
        return called(*words, "--against", file)

    assert again(1e-3).exit_code == 0
    answer = again(1e3)
    assert answer.exit_code == 1
    assert "slower: lenet 2 strict" in answer.stdout
    assert again(1.0, processor="another").exit_code == 2


def test_a_section_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Any, show: Any) -> list[Any]:
        raise RuntimeError("out of order")

    monkeypatch.setitem(suite.SECTIONS, "roofline", broken)
    held = suite.measure(suite.Plan.of("cpu", quick=True), ["roofline", "chunks"])
    assert held["failed"] == {"roofline": "RuntimeError: out of order"}
    assert held["chunks"]
    answer = called("--quick", "--only", "roofline", "--device", "cpu")
    assert answer.exit_code == 2
    assert "out of order" in answer.stderr


def test_the_command_refuses_unknown_sections() -> None:
    assert called("--only", "engin").exit_code == 2
    with pytest.raises(ValueError, match="Did you mean 'engine'"):
        suite.measure(suite.Plan.of("cpu", quick=True), ["engin"])


def test_a_run_that_is_cut_short_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Any, show: Any) -> list[Any]:
        show({"network": "lenet"})
        raise KeyboardInterrupt

    monkeypatch.setitem(suite.SECTIONS, "cost", broken)
    with pytest.raises(KeyboardInterrupt):
        suite.measure(suite.Plan.of("cpu", quick=True), ["cost"], tmp_path / "part.json")
    assert json.loads((tmp_path / "part.json").read_text())["cost"] == [{"network": "lenet"}]


def test_tables_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script("tables")
    names = ("engine", "roofline", "memory", "quality", "cost", "chunks")
    suite.measure(suite.Plan.of("cpu", quick=True), names, tmp_path / "cpu-one-thread.json")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name, made in tables.TABLES.items():
        text = made()
        if name.endswith("-cpu") and not name.startswith("peers"):
            assert tables.MISSING not in text, name
            assert text.startswith(("|", "- Peak", "<svg")), name
        else:
            assert text == tables.MISSING, name
    picture = tables.TABLES["lanes-cpu"]()
    assert "\n" not in picture  # Markdown ends a block of HTML at an empty line
    assert "lenet, strict" in picture
    assert ">8</text>" in picture  # a number of lanes, not its logarithm
