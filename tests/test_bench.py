"""Measurements: same work under every engine, ratios that hold still, a check that notices, a peer on equal terms."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks import compare, options, peers, tables
from benchmarks.speed import costs, memory, peer, quality, regression, roofline, scaling, suite, throughput, timing
from benchmarks.speed.lanes import Stopwatch
from benchmarks.speed.networks import NETWORKS, pictures
from benchmarks.speed.workloads import Workload, workload
from conftest import script
from gradleak import attacks, models
from gradleak.attack import Composed
from gradleak.engine import Engine, EngineError, lanes_of
from gradleak.engine import lanes as engine
from gradleak.engine.lanes import _buckets
from gradleak.parts.view import TargetView, in_turn
from gradleak.scenario.observation import Knowledge

STRICT, DOUBLE = Engine("cpu"), Engine("cpu", "double")


# --- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
def test_lanes_of_every_network_compute_what_the_loop_does(network: str) -> None:
    work = workload(network, targets=2, side=16, steps=10)
    found = []
    for lanes in (DOUBLE, replace(DOUBLE, batched=False)):
        search = work.search(2, lanes)
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


# --- targets that wait for their chunk --------------------------------------------------------------------------------


def waiting(work: Workload, engine: Engine) -> list[TargetView]:
    task = work.task.to(engine.where, engine.dtype)
    return [
        replace(TargetView.waiting(task, seen, knows), fields=dict(knows.given))
        for seen, knows in zip(work.seen, work.knows, strict=True)
    ]


def test_a_target_that_waits_holds_nothing_of_its_own() -> None:
    work = workload("convnet64", targets=2, side=16, build=lambda shape: models.convnet(shape=shape, width=4).eval())
    for scene, seen in zip(waiting(work, DOUBLE), work.seen, strict=True):
        assert all(scene.weights[name] is value for name, value in seen.weights.items())
        assert all(scene.update[name] is value for name, value in seen.update.items())
        assert scene.buffers is not None
        assert scene.buffers  # the statistics of BatchNorm
        own = {**dict(scene.task.model.named_buffers()), **(seen.buffers or {})}
        assert all(value is own[name] for name, value in scene.buffers.items())
        there = scene.here()
        assert there.buffers is not None
        assert all(value is not own[name] for name, value in there.buffers.items())  # a forward pass may change them
        assert {value.dtype for value in (*there.weights.values(), *there.update.values())} == {torch.float64}


def test_lanes_of_targets_that_wait_are_those_of_targets_that_do_not() -> None:
    work = workload("lenet", targets=3)
    keys = [[torch.tensor([1, target]), torch.tensor([2, target])] for target in range(3)]
    held, moved = waiting(work, DOUBLE), work.scenes(3, DOUBLE)
    assert _buckets(held) == _buckets(moved) == [[0, 1, 2]]
    (template, lane), (other_template, other) = lanes_of(held, keys), lanes_of(moved, keys)
    for name, value in template.weights.items():
        assert torch.equal(value, other_template.weights[name])
    for part in ("update", "fields"):
        assert lane[part].keys() == other[part].keys()
        for name, value in lane[part].items():
            assert value.shape[0] == 6
            assert value.dtype == other[part][name].dtype
            assert torch.equal(value, other[part][name])
    assert lane["fields"]["y"].dtype == torch.long


def test_weights_that_targets_share_are_moved_once() -> None:
    held = waiting(workload("lenet", targets=3), DOUBLE)
    copied = {name: value.clone() for name, value in held[2].weights.items()}
    first, second, third = in_turn([*held[:2], replace(held[2], weights=copied)])
    assert all(value is first.weights[name] for name, value in second.weights.items())
    assert all(value is not first.weights[name] for name, value in third.weights.items())
    assert not torch.equal(next(iter(first.update.values())), next(iter(second.update.values())))


def test_an_attack_holds_the_targets_of_its_chunk_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload("lenet", targets=5)
    shape = work.seen[0].update["features.0.weight"].shape
    assert sum(value.shape == shape for value in work.seen[0].update.values()) == 1
    met: list[int] = []
    solve = engine._solve_chunk

    def noted(*arguments: Any) -> Any:
        gc.collect()
        held = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.dtype == torch.float64]
        met.append(sum(each.shape == shape and not isinstance(each, torch.nn.Parameter) for each in held))
        return solve(*arguments)

    monkeypatch.setattr(engine, "_solve_chunk", noted)
    given = {"y": torch.stack([batch["y"] for batch in work.truth])}
    attack = attacks.get("ig", steps=1)
    # The observations are float32, so what was made ready for the engine is what is in double.
    attack.run(work.task, list(work.seen), Knowledge(given=given), engine=replace(DOUBLE, chunk=2))
    assert met == [0, 0, 0]


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
    rows = throughput.engine(["lenet"], [1, 2, 400], ["strict"], seconds=0.01, device="cpu")
    assert [(row["lanes"], row["batched"]) for row in rows] == [(1, False), (1, True), (2, True), (400, True)]
    assert rows[0]["times_one_at_a_time"] == 1.0
    assert all(row["rate"] > 0 for row in rows)
    assert rows[-1]["chunk"] == workload("lenet").chunk(STRICT) < 400


def too_large(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds so many lanes; the engine explains what torch says, as a search does."""

    class Small(timing.Running):
        def __init__(self, work: Any, lanes: int, engine: Engine) -> None:
            if lanes > fits:
                raise EngineError("Out of memory") from torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(work, lanes, engine)

    monkeypatch.setattr(throughput, "Running", Small)


def test_what_does_not_fit_is_a_row_without_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    too_large(2, monkeypatch)
    rows = throughput.engine(["lenet"], [2, 4], ["strict"], seconds=0.01, device="cpu")
    assert [(row["lanes"], row["rate"] is None) for row in rows] == [(1, False), (2, False), (4, True)]
    assert not throughput.out_of_memory(EngineError("something else"))


def test_every_network_comes_in_the_first_precision_before_any_comes_in_the_second() -> None:
    rows = throughput.engine(["lenet", "vit"], [1], ["strict", "double"], seconds=0.01, device="cpu")
    met = dict.fromkeys((row["precision"], row["network"]) for row in rows)
    assert list(met) == [(p, n) for p in ("strict", "double") for n in ("lenet", "vit")]


# --- twice the lanes --------------------------------------------------------------------------------------------------


def rows_of(*seconds: tuple[int, float | None], network: str = "lenet") -> list[dict[str, Any]]:
    """Rows of the engine: lanes, and the seconds that a step of all of them takes."""
    common = {"network": network, "precision": "fast", "batched": True}
    return [
        {**common, "lanes": n, "rate": None if s is None else n / s, "times_one_at_a_time": 1.0} for n, s in seconds
    ]


def test_what_twice_the_lanes_cost() -> None:
    found = scaling.doubling(rows_of((8, 1.0), (512, 18.0), (32, 1.0), (64, 2.0), (128, 4.5)))
    assert [(row["from"], row["to"]) for row in found] == [(32, 64), (64, 128), (128, 512)]  # 8 are too few
    assert [row["times"] for row in found] == pytest.approx([2.0, 2.25, 2.0])  # 128 to 512: four times for two
    assert [row["from"] for row in scaling.doubling(rows_of((32, 1.0), (64, None), (128, 9.0)))] == [32]
    assert scaling.doubling(rows_of((32, 1.0)) + rows_of((64, 9.0), network="vit")) == []
    in_chunks = [{**row, "chunk": min(row["lanes"], 40)} for row in rows_of((32, 1.0), (64, 2.0), (128, 4.0))]
    assert [(row["from"], row["to"]) for row in scaling.doubling(in_chunks)] == [(32, 64)]


def test_a_doubling_that_costs_too_much_is_measured_again() -> None:
    found = scaling.doubling(rows_of((32, 1.0), (64, 2.3), (128, 4.6)))
    met: list[int] = []

    def again(second: float) -> Any:
        return lambda row: met.append(row["from"]) or rows_of((row["from"], 1.0), (row["to"], second))

    assert [row["holds"] for row in scaling.judged(found, again(2.05))] == [True, True]
    broken, fine = scaling.judged(found, again(2.2))
    assert (broken["holds"], broken["times"], fine["holds"]) == (False, pytest.approx(2.2), True)
    assert met == [32, 32]
    assert scaling.why(broken) == "lenet fast: from 32 to 64 lanes twice the lanes take 2.20 times as long"


def test_lanes_that_do_not_scale_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = rows_of((32, 1.0), (64, 3.0))
    monkeypatch.setitem(suite.SECTIONS, "engine", lambda plan, show: [show(row) for row in slow])
    monkeypatch.setattr(suite, "engine", lambda *args, **settings: slow)
    plan = suite.Plan.of("cpu", quick=True)
    told = suite.measure(plan, ["engine"])  # on a CPU it is told
    assert told["failed"] == {}
    assert told["doubling"][0]["times"] == pytest.approx(3.0)
    held = suite.measure(replace(plan, most_doubling=2.1), ["engine"])
    assert "from 32 to 64 lanes twice the lanes take 3.00 times as long" in held["failed"]["doubling"]
    assert held["doubling"][0]["holds"] is False
    slow[1]["rate"] *= 1.5
    assert suite.measure(replace(plan, most_doubling=2.1), ["engine"], before=held)["failed"] == {}


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
    before = torch.backends.cudnn.benchmark
    peak, row = roofline.roofline(["lenet"], 2, ["strict"], seconds=0.01, device="cpu")
    assert torch.backends.cudnn.benchmark == before
    assert peak["convolutions"].keys() == {"contiguous", "channels_last"}
    assert peak["convolution"] == peak["convolutions"][peak["layout"]] == max(peak["convolutions"].values())
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


def test_chunks_are_of_targets_with_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "DIFFERENT", 2)
    met: list[Any] = []
    run = Composed.run

    def noted(self: Composed, task: Any, seen: Any, *rest: Any, **settings: Any) -> Any:
        met.extend(seen)
        return run(self, task, seen, *rest, **settings)

    monkeypatch.setattr(Composed, "run", noted)
    quality.chunks("lenet", 3, 1, steps=1, precision="strict", device="cpu")
    assert [seen.key for seen in met] == ["target 0", "target 1", "target 2"]
    assert met[2].update is met[0].update
    assert met[1].update is not met[0].update


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


# --- two source trees -------------------------------------------------------------------------------------------------


def test_trees_take_turns_and_ratios_are_within_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[str, list[str]]] = []
    speed = {"old": 10.0, "new": 9.0}

    def run(self: compare.Turn, source: Path, cases: list[str]) -> Any:
        met.append((source.name, list(cases)))
        rate = speed[source.name] * len(met)  # the machine gets faster: only neighbours are compared
        return {}, [{"network": "lenet", "lanes": 8, "precision": "strict", "steps": 50, "rate": rate}]

    monkeypatch.setattr(compare.Turn, "run", run)
    turn = compare.Turn("cpu", "strict", 1.0, 1)
    found = compare.measure({"before": Path("old"), "after": Path("new")}, ["lenet:8"], turn, 3)
    assert [name for name, _ in met] == ["old", "new", "new", "old", "old", "new"]
    assert [cases for _, cases in met] == [["lenet:8"], *([["lenet:8:50"]] * 5)]
    row = compare.summary(found["rows"][0], 0.03)
    assert row["ratios"] == pytest.approx([0.9 * 2 / 1, 0.9 * 3 / 4, 0.9 * 6 / 5])
    assert (row["ratio"], row["holds"]) == (pytest.approx(1.08), True)
    assert (row["before"], row["after"]) == (40.0, 27.0)
    rates = {"before": [{**row, "rate": 100.0}], "after": [{**row, "rate": 96.9}]}
    assert compare.summary(rates, 0.03)["holds"] is False


def test_a_stopwatch_leaves_out_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 104.0, 108.0, 112.0, 116.0, 119.0])
    monkeypatch.setattr("benchmarks.speed.lanes.now", lambda cuda: next(clock))
    watch = Stopwatch(20, cuda=False)
    for step in range(20):
        watch((step + 1) / 20)
    watch(1.0)  # the end is reported once more
    assert [done for done, _ in watch.notes] == [1, 5, 9, 13, 17, 20]
    assert watch.rates == pytest.approx([1.0] * 5)


def test_two_trees_are_compared_in_processes_of_their_own(tmp_path: Path) -> None:
    source, out = Path(models.__file__).parents[2], tmp_path / "speed.json"
    words = ("--workloads", "lenet:1:20", "--repeats", 1, "--device", "cpu", "--threads", 1, "--within", 1, "-o", out)
    answer = called("compare", "--before", source, "--after", source, *words)
    assert answer.exit_code == 0, answer.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["network"], row["lanes"], row["steps"], row["precision"]) == ("lenet", 1, 20, "strict")
    assert row["ratio"] == pytest.approx(row["after"] / row["before"])
    refused = called("compare", "--before", tmp_path)
    assert refused.exit_code == 2
    assert "must be a folder with the package gradleak" in refused.stderr
    assert "Did you mean 'lenet'" in called("compare", "--before", source, "--workloads", "lennet").stderr


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
    (row,) = peer.peers(["lenet"], [2], peer.Effort(steps=2, rounds=2), ["strict"], device="cpu")
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


def test_the_peer_has_the_better_setting_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[bool, int]] = []
    rates = {False: 10.0, True: 15.0}

    def ran(breaching: Any, settings: Any, *rest: Any) -> quality.Course:
        on, steps = torch.backends.cudnn.benchmark, settings.optim.max_iterations
        met.append((on, steps))
        return quality.Course(0.0, steps / rates[on], steps, torch.zeros(1), torch.zeros(1), [], [])

    monkeypatch.setattr(peer, "run_peer", ran)
    work, start, before = workload("lenet"), torch.zeros(1), torch.backends.cudnn.benchmark
    choose = lambda device: peer.settings_of_cudnn(Library(), work, start, 20, torch.device(device))  # noqa: E731
    assert choose("cuda") == (True, {"off": pytest.approx(10.0), "on": pytest.approx(15.0)})
    assert met == [(False, 3), (False, 20), (True, 3), (True, 20)]
    rates[True] = 5.0
    assert choose("cuda")[0] is False
    assert choose("cpu") == (False, {})
    assert torch.backends.cudnn.benchmark == before


def test_rounds_of_the_peer_fit_the_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(peer, "load", lambda: library)
    monkeypatch.setattr(peer, "settings_of_cudnn", lambda *args: (True, {"off": 3.0, "on": 4.0}))
    drafts: list[list[Any]] = []
    effort = peer.Effort(steps=2, rounds=3, loops=1, turns=1, seconds=1.0)
    (row,) = peer.peers(["lenet"], [3], effort, ["strict"], device="cpu", draft=drafts.append)
    assert row["rounds"] == len(library.given) == 2  # 4 steps a second are two targets of 2 steps
    assert [len(row[name]) for name in ("psnr", "peer_psnr", "eager_psnr", "times_peer_rounds")] == [2, 2, 1, 2]
    assert (row["peer_cudnn_benchmark"], row["peer_trial_rates"]["off"]) == ("on", 3.0)
    assert [rows[0]["rounds"] for rows in drafts] == [1, 2]
    (row,) = peer.peers(["lenet"], [3], replace(effort, seconds=0.1), ["strict"], device="cpu")
    assert row["rounds"] == 1


def test_a_case_may_bring_lanes_and_steps() -> None:
    assert options.case("lenet", "32,128", 200) == ("lenet", (32, 128), 200)
    assert options.case("lenet:1024", "32", 200) == ("lenet", (1024,), 200)
    assert options.case("vit:8:50", "32", 200) == ("vit", (8,), 50)


def test_without_the_peer_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "breaching", None)
    held = suite.measure(suite.Plan.of("cpu", quick=True), ["peer"])
    assert "peer" not in held
    assert "extra `bench`" in held["left_out"]["peer"]


def test_the_stand_in_for_torchvision_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in peers.PARTS:
        monkeypatch.setitem(sys.modules, f"torchvision{part}", None)
    peers.without_torchvision()
    found = importlib.import_module("torchvision.models.densenet")
    assert isinstance(type("Own", (found._DenseLayer,), {}), type)
    assert sys.modules["torchvision"].models.densenet is found


def test_breaching_itself_agrees() -> None:
    pytest.importorskip("breaching", reason="the peer is not installed: extra `bench`", exc_type=Exception)
    (row,) = peer.peers(["lenet"], [2], peer.Effort(steps=20, rounds=2), ["strict"], device="cpu")
    assert abs(row["psnr_difference"]) < 0.5


# --- the command and the tables ---------------------------------------------------------------------------------------


def called(*words: object) -> SimpleNamespace:
    """`python -m benchmarks WORDS`: what it printed and its exit code."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = command.main([str(word) for word in words])
        except SystemExit as stop:  # argparse refuses so
            code = stop.code
    return SimpleNamespace(exit_code=code, stdout=out.getvalue(), stderr=err.getvalue())


def test_the_command_measures_stores_and_notices(tmp_path: Path) -> None:
    file = tmp_path / "stored.json"
    words = ("--quick", "--only", "engine", "--lanes", "1,2", "--seconds", 0.02, "--device", "cpu")
    answer = called(*words, "--out", file)
    assert answer.exit_code == 0, answer.stderr
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


def test_bench_shows_a_line_per_measurement() -> None:
    answer = called(
        "engine", "--networks", "lenet", "--lanes", "1,2", "--precision", "strict", "--seconds", 0.01, "--device", "cpu"
    )
    assert answer.exit_code == 0, answer
    assert len(re.findall(r"^lenet +\d lanes +strict +[\d,]+ a second +x[\d,.]+$", answer.stdout, re.MULTILINE)) == 2
    assert re.search(r"^lenet +one at a time +strict +[\d,]+ a second +x1\.0$", answer.stdout, re.MULTILINE)
    refused = called("engine", "--networks", "lennet")
    assert refused.exit_code == 2
    assert "Did you mean 'lenet'" in refused.stderr


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


def test_sections_come_in_the_order_they_are_asked_for_and_add_to_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    for name, value in (("cost", 1), ("memory", 2)):

        def section(plan: Any, show: Any, name: str = name, value: int = value) -> list[Any]:
            met.append(name)
            for network in ("lenet", "vit")[: len(met)]:
                show({"network": network, "value": value * len(met)})
            return []

        monkeypatch.setitem(suite.SECTIONS, name, section)
    plan = suite.Plan.of("cpu", quick=True)
    first = suite.measure(plan, ["memory", "cost"])
    assert met == ["memory", "cost"]
    again = suite.measure(plan, ["memory"], before=first)
    assert again["memory"] == [{"network": "lenet", "value": 6}, {"network": "vit", "value": 6}]
    assert again["cost"] == first["cost"]
    other = {**first, "environment": {**first["environment"], "processor": "another"}}
    with pytest.raises(regression.OtherMachine):
        suite.measure(plan, ["memory"], before=other)


def test_rows_that_did_not_fit_are_told_on_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="the site's builder is not installed: extra `docs`")
    pages = script("docs/site_pages.py")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    rows = rows_of((32, 1.0), (64, None))
    rows[1]["times_one_at_a_time"] = None
    where = {**HERE, "packages": {"torch": "2"}, "time": "2026-01-01"}
    file = tmp_path / "benchmarks" / "results" / "some.json"
    file.write_text(json.dumps({"environment": where, "rows": rows}))
    assert "| lenet | 64 | fast | yes | out of memory | - |" in pages.engine("some.json")


def test_the_table_names_the_dearest_doubling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    where = {**HERE, "packages": {"torch": "2"}, "time": "2026-01-01"}
    rows = rows_of((32, 1.0), (64, 2.0), (128, 4.4)) + rows_of((32, 1.0), (64, 1.5), network="vit")
    (tmp_path / "h200.json").write_text(json.dumps({"environment": where, "rows": rows}))
    text = tables.TABLES["doubling-h200"]()
    assert "| lenet | fast | 32 to 128 | 2.20: more than 2.1 | 64 and 128 |" in text
    assert "| vit | fast | 32 to 64 | 1.50 | 32 and 64 |" in text


def test_tables_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("engine", "roofline", "memory", "quality", "cost", "chunks")
    plan = replace(suite.Plan.of("cpu", quick=True), lanes=(64, 32, 1, 8), seconds=0.02)
    suite.measure(plan, names, tmp_path / "cpu-one-thread.json")
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
