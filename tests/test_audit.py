"""Audits end to end on a network of a thousand weights: scores, control, baseline, resuming, failing, and no truth."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradleak as gl
from forks import forks
from gradleak import attacks
from gradleak.attack import Reconstruction
from gradleak.audit import Audit, AuditError, FolderInUse, Interrupted, builtin, estimate, from_settings
from gradleak.audit.cells import defence_of, forms_of
from gradleak.audit.result import AuditResult
from gradleak.audit.store import Folder
from gradleak.core import tree
from gradleak.core.configuration import digest
from gradleak.core.files import BadRun
from gradleak.core.listeners import Silent
from gradleak.core.random import Draws, key
from gradleak.data import Images
from gradleak.scenario.fields import UNBOUNDED, Field, UnsupportedTask
from gradleak.scenario.kinds import Column, Table, Tokens
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.probe import gradient_of
from gradleak.scenario.task import Supervised

SHAPE = (1, 6, 6)
WORKS = "idlg:steps=40"  # recovers this network's inputs exactly, in half a second


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def private(count: int = 20) -> tuple[Tensor, Tensor]:
    return Draws(key("private images")).uniform((count, *SHAPE)), torch.arange(count) % 3


def task(**settings: Any) -> gl.Task:
    x, y = private(1)
    return gl.Task.supervised(network(), nn.functional.cross_entropy, like=(x, y), **settings)


def audit(**changes: Any) -> Audit:
    standard: dict[str, Any] = {"attacks": [WORKS], "targets": 3, "engine": gl.Engine(device="cpu")}
    return Audit(task(), private(), **{**standard, **changes})


def comparable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what the clock wrote."""
    return [{name: value for name, value in row.items() if name not in ("seconds", "traceback")} for row in rows]


@dataclass(frozen=True)
class Halve(gl.Defence):
    def upload(self, upload: Any, client: Any) -> Any:
        return upload.map(lambda update: tree.scale(update, 0.5))


@dataclass(frozen=True)
class Noise(gl.Defence):
    scale: float = 0.1

    def upload(self, upload: Any, client: Any) -> Any:
        draw = lambda value: value + self.scale * client.draws.normal(tuple(value.shape), dtype=value.dtype)  # noqa: E731
        return upload.map(lambda update: tree.map(draw, update)) if client.draws else upload

    def noise_variance(self, scene: Any) -> Any:
        return tree.map(lambda value: torch.full_like(value, self.scale**2), scene.update)


@dataclass(frozen=True)
class Part(gl.Defence):
    def visible(self, update: Any, scene: Any) -> Any:
        return {name: value for name, value in update.items() if name.endswith("weight")}


@dataclass(frozen=True)
class Start(gl.Defence):
    def initial(self, weights: Any, server: Any) -> Any:
        return tree.scale(weights, 0.9)


# --- what an audit finds ----------------------------------------------------------------------------------------------


def test_an_undefended_client_leaks() -> None:
    result = audit().run()
    line = result.summaries[0]
    assert result.verdict.word == "leaks"
    assert result.positive_control.passed
    assert line.means["psnr"] > 40
    assert line.means["labels"] == 1.0
    assert line.baseline["recovered"] == 0.0
    assert line.baseline["psnr"] < 15
    assert line.chance == pytest.approx(1 / 18)
    assert len(result.rows) == 3
    assert {"mid-grey", "mean image", "nearest other", "unrelated update"} <= result.rows[0]["baselines"].keys()
    pictures = result.images(line.cells[0])
    assert (pictures["true"] - pictures["found"]).abs().max() < 0.05
    json.dumps(result.rows, allow_nan=False)


def test_an_attack_that_cannot_work_voids_the_run() -> None:
    result = audit(attacks=["ig:steps=3"]).run()
    assert result.verdict.word == "void"
    assert not result.positive_control.passed


def test_the_control_runs_apart_where_the_grid_does_not_hold_it() -> None:
    plan = audit(federation=gl.Federation(examples=2, clients=2)).cells()
    assert [cell.control for cell in plan] == [True, False]
    assert plan[0].federation.examples == 1
    assert [cell.control for cell in audit(defences=[Halve()]).cells()] == [True, False, False]
    assert [cell.control for cell in audit(defences=[None, Halve()]).cells()] == [False, False, False]
    result = audit(federation=gl.Federation(examples=2, clients=2), targets=2).run()
    assert result.positive_control.passed
    assert [line.examples for line in result.summaries] == [2], "the control is not a line"


@pytest.mark.parametrize(
    ("defence", "forms"),
    [
        (None, ["undefended"]),
        (Halve(), ["naive", "adaptive"]),
        (Noise(), ["naive", "masked", "adaptive"]),
        (Start(), ["naive"]),
        (Part(), ["naive", "masked", "adaptive"]),
        (gl.Chain(Halve(), Noise()), ["naive", "masked", "adaptive"]),
        (gl.Defence(), ["naive"]),
    ],
)
def test_forms_that_do_not_differ_run_once(defence: Any, forms: list[str]) -> None:
    assert forms_of(defence, ("naive", "masked", "adaptive")) == forms
    assert forms_of(defence, ("adaptive",)) == [forms[-1]]


def test_an_adaptive_attacker_sees_through_a_scaled_update() -> None:
    result = audit(defences=[Halve()], targets=2).run()
    naive, adaptive = (line for line in result.summaries if line.defence == "Halve()")
    assert (naive.form, adaptive.form) == ("naive", "adaptive")
    assert adaptive.recovered.value == 1.0
    assert adaptive.means["psnr"] > naive.means["psnr"] + 10
    assert result.verdict.word == "leaks"


# --- what is proved about a defence ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asking(gl.Defence):
    """Says what it was told about the client."""

    def guarantee(self, exposure: gl.Exposure) -> gl.Guarantee:
        told = (exposure.rounds, exposure.clients, exposure.sampling, exposure.examples, exposure.training is not None)
        return gl.Guarantee(reason=f"{told}, signal {exposure.signal:.6g}")


def test_every_row_of_a_defence_says_what_it_proves_for_this_client() -> None:
    planned = audit(
        attacks=["ig:steps=2"],
        defences=[None, Asking(), "local-gaussian", "dp-fedavg"],
        rounds=[0, 2],
        federation=gl.Federation(clients=4, examples=2, participation="fixed:number=2"),  # type: ignore[arg-type]
        targets=2,
    )
    result = planned.run()
    rows = [row for row in result.rows if not row["control"]]
    told = {(row["defence"], row["round"]): row["guarantee"] for row in rows if row["form"] != "averaged"}
    assert told["none", 0] is None
    # Who averages has seen the client eight times, and what is proved is proved of eight uploads.
    seen_often = {row["round"]: row["guarantee"]["releases"] for row in rows if row["form"] == "averaged"}
    assert seen_often == {0: 8, 2: 10}
    for number in (0, 2):
        plain = planned.side.victims(planned.federation, None, number, (0, 2), 0)
        squares = [tree.squared_norm(seen.update) / tree.size(seen.update) for seen in plain.seen]
        signal = float(torch.stack(squares).mean().sqrt())
        text = told["Asking()", number]["text"]
        assert text.startswith(f"no formal guarantee (({number + 1}, 4, 'fixed', 2, True), signal ")
        assert float(text.split()[-1].rstrip(")")) == pytest.approx(signal, rel=1e-4)
        proved = gl.defences.LocalGaussian().guarantee(planned.federation.exposure(number + 1, 20))
        assert told["local-gaussian", number]["epsilon"] == proved.epsilon
        assert told["local-gaussian", number]["releases"] == number + 1
        assert told["local-gaussian", number]["text"] == str(proved)
    assert "does not protect against the aggregating server" in told["dp-fedavg", 0]["text"]
    assert result.rescore().rows[-1]["guarantee"] == result.rows[-1]["guarantee"]


def test_at_a_trainings_weights_all_of_its_rounds_count_and_its_accuracy_is_told(tmp_path: Path) -> None:
    from gradleak.federation.checkpoints import Checkpoints

    held = audit().side.data
    for name, defence in (("plain", None), ("noised", gl.defences.LocalGaussian())):
        federation = gl.Federation(clients=2, examples=None)
        federation.train(task(), held, 4, defence=defence, test=held, every=2, checkpoints=[1, 2], out=tmp_path / name)
        planned = audit(
            attacks=["ig:steps=2"],
            defences=["local-gaussian"],
            rounds=[1, 2],
            targets=1,
            trained=Checkpoints(tmp_path / name),
        )
        early, late = (line for line in planned.run().summaries if line.form == "naive")
        assert early.guarantee is not None
        assert early.guarantee.releases == 4, "of the training, not up to the attacked round"
        caveats = "; ".join(early.guarantee.caveats)
        assert ("from a training without it" in caveats) == (defence is None)
        assert early.trained is not None
        assert early.trained.test_accuracy is None, "tested at every second round"
        assert late.trained is not None
        assert late.trained.test_accuracy == Checkpoints(tmp_path / name).metrics[2]["test_accuracy"]
        assert late.trained.defence == ("none" if defence is None else repr(defence))


def test_an_audit_that_trains_for_itself_measures_no_accuracy() -> None:
    assert audit(rounds=[1], targets=1).run().summaries[0].trained is None


def test_a_defence_that_the_model_cannot_have_is_refused_before_the_first_cell(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="The defence tip cannot be used here. .* no trained nn.Conv2d"):
        audit(defences=[None, "tip"]).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_chains_are_spelled_with_a_plus() -> None:
    clipping, noise = gl.defences.Clipping(0.5), gl.defences.LocalGaussian(sigma=1e3)
    assert defence_of("clipping:norm=0.5 + local-gaussian:sigma=1e+3") == gl.Chain(clipping, noise)
    assert defence_of("clipping:norm=0.5+local-gaussian:sigma=1e+3") == gl.Chain(clipping, noise)
    assert defence_of(" none ") is None


def test_later_rounds_attack_trained_weights() -> None:
    recipe = gl.Federation(clients=2, training=gl.LocalTraining(lr=0.5))
    result = audit(rounds=[0, 3], federation=recipe, targets=2).run()
    assert [row["observation"] for row in result.rows[2:]] == ["client0/round3/target0", "client1/round3/target1"]
    first, later = (result.store.arrays(line.cells[0]) for line in result.summaries)
    assert torch.equal(first["truth/x"], later["truth/x"]), "rounds are compared on the same images"


def test_seeds_change_starts_and_nothing_else() -> None:
    result = audit(seeds=[0, 1], attacks=["ig:steps=30"]).run()
    a, b = (result.store.arrays(cell) for cell in result.summaries[0].cells)
    assert torch.equal(a["truth/x"], b["truth/x"])
    assert not torch.equal(a["found/x"], b["found/x"])


def test_rescoring_gives_the_same_rows() -> None:
    result = audit(federation=gl.Federation(examples=2), targets=2).run()
    assert result.rescore().rows == result.rows


def test_analyses_stand_beside_the_scores() -> None:
    def norm(task: gl.Task, seen: gl.Observation, batch: Any) -> dict[str, float]:
        return {"norm": float(tree.norm(seen.update)), "brightness": float(batch["x"].mean())}

    result = audit(analyses=[norm], attacks=["ig:steps=3"]).run()
    assert all(row["analyses"].keys() == {"norm", "brightness"} for row in result.rows)


# --- data -------------------------------------------------------------------------------------------------------------


def test_images_and_datasets_and_tensors_are_the_same_data() -> None:
    x, y = private()
    mean, std = 0.4, 0.3
    normalised = task(mean=mean, std=std)
    images = Images(x, y, 3, ("a", "b", "c"), "test")
    forms = [images, {"x": (x - mean) / std, "y": y}, ((x - mean) / std, y), Pairs((x - mean) / std, y)]
    found = [Audit(normalised, form, ["ig:steps=3"], targets=2).run() for form in forms]
    scores = [[row["scores"]["psnr"][0] for row in result.rows] for result in found]
    assert all(other == pytest.approx(scores[0], abs=1e-3) for other in scores)
    pictures = found[0].images(found[0].summaries[0].cells[0])["true"]
    assert 0 <= float(pictures.min()) <= float(pictures.max()) <= 1


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.x[row], int(self.y[row])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": (2 * private()[0], private()[1])}, "outside the declared bounds"),
        ({"data": (private()[0], private()[1] + 1)}, "the classes are 0 to 2"),
        ({"data": (torch.rand(9, 3, 6, 6), torch.zeros(9).long())}, "the task wants"),
        ({"data": {"x": private()[0], "y": private()[1][:3]}}, "as many of every field"),
        ({"data": 3}, "give Images"),
        ({"data": [("a", 1)] * 9}, "from_dataset"),
        ({"data": private(3)}, "All 3 examples are targets"),
        ({"targets": 30}, "fewer targets"),
        ({"data": private(9), "federation": gl.Federation(examples=4), "targets": 2}, "baseline needs 4 images"),
        ({"attacks": []}, "at least one"),
        ({"attacks": "ig"}, "must be a list"),
        ({"knowledge": ["adaptiv"]}, "Did you mean 'adaptive'"),
        ({"attacks": ["igg"]}, "Unknown attack"),
    ],
)
def test_what_cannot_be_audited_is_said_at_once(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, LookupError), match=message):
        replace(audit(), **changes).run(tmp_path / "run")
    assert not list(tmp_path.rglob("rows.jsonl"))


def test_a_task_without_x_is_not_audited() -> None:
    flat = gl.Task(nn.Linear(4, 2), Supervised(nn.functional.cross_entropy), {"y": Field((), classes=2)})
    with pytest.raises(AuditError, match="attacks the field x; the task has y"):
        Audit(flat, (torch.zeros(9, 4), torch.zeros(9).long()), ["ig"])


def test_missing_knowledge_is_said_before_the_first_cell() -> None:
    @dataclass(frozen=True)
    class Needy(Spy):
        needs: frozenset[str] = frozenset({"generator"})

    with pytest.raises(MissingKnowledge, match="generator"):
        audit(attacks=[Needy()]).run()


def test_a_gallery_stands_in_where_all_data_are_targets() -> None:
    x, y = private(24)
    gallery = {"x": torch.cat([x[:3], x[20:]])}  # copies of the targets are not "other" images
    result = replace(audit(), data=(x[:3], y[:3]), gallery=gallery).run()
    assert result.rows[0]["gallery_size"] == [7]
    assert "unrelated update" in result.rows[0]["baselines"]
    x, y = private()
    without = replace(audit(), data=Pairs(x, y), unrelated=0).run()
    assert "unrelated update" not in without.rows[0]["baselines"]
    assert "no baseline was run" in without.verdict.paragraph


# --- the attacker's side ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spy:
    """An attack that keeps all it is given."""

    name: str = "spy"
    needs: frozenset[str] = frozenset()
    kept: list[Any] = field(default_factory=list)

    def run(self, task: Any, seen: Any, knows: Any = None, seed: int = 0, **rest: Any) -> Reconstruction:
        self.kept.append((task, seen, knows, seed, rest))
        return attacks.get("ig", steps=2).run(task, seen, knows, seed)


def tensors_in(value: Any, seen: set[int]) -> list[Tensor]:
    """Every tensor that can be reached from an object, closures and caches included."""
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type, type(sys))):
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for held in value.values() for found in tensors_in(held, seen)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [found for held in value for found in tensors_in(held, seen)]
    inside = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    inside += [getattr(value, "__self__", None), getattr(value, "__dict__", None)]
    return [found for held in inside if held is not None for found in tensors_in(held, seen)]


def test_no_truth_reaches_the_attacker() -> None:
    spy = Spy()
    x, _ = private()
    audit(attacks=[spy], defences=[None, Noise()], federation=gl.Federation(examples=2), targets=2).run()
    assert len(spy.kept) == 6  # control, none, and the noise met by naive, masked, adaptive and averaging attackers
    pixels = {float(value) for value in x.flatten()}
    for given in spy.kept:
        task_, seen, knows, seed, rest = given
        rest = {name: value for name, value in rest.items() if name != "progress"}  # the auditor's own bar
        reached = tensors_in((task_, seen, knows, seed, rest), set())
        assert len(reached) > 10, "the search itself must find the observations"
        shared = max(len(pixels & set(tensor.detach().flatten().tolist())) for tensor in reached)
        assert shared < 5, "private pixels are in the attacker's hands"
        assert [target.key.partition("/again")[0] for target in seen[:2]] == [
            "client0/round0/target0",
            "client0/round0/target1",
        ]
        assert knows.given == {}


def test_who_has_seen_a_client_several_times_averages_its_noise() -> None:
    """Only where every upload draws fresh noise, and it tells more than one round does."""
    noisy, still = gl.defences.LocalGaussian(sigma=3e-3), gl.defences.Pruning(keep=0.5)
    planned = audit(attacks=["second-order:certify=false"], defences=[noisy, still], targets=2, repeats=6)
    forms = {cell.defence_name.partition("(")[0]: set() for cell in planned.cells() if cell.defence is not None}
    for cell in planned.cells():
        if cell.defence is not None:
            forms[cell.defence_name.partition("(")[0]].add(cell.form)
    assert forms == {
        "LocalGaussian": {"naive", "masked", "adaptive", "averaged"},
        "Pruning": {"naive", "masked", "adaptive"},
    }
    assert "averaged" not in {cell.form for cell in replace(planned, repeats=1).cells()}
    assert {cell.key for cell in replace(planned, repeats=4).cells()} != {cell.key for cell in planned.cells()}
    run = replace(planned, defences=[noisy], knowledge=("adaptive", "averaged")).run()
    told = {line.form: line.means["psnr"] for line in run.summaries}
    assert told["averaged"] > told["adaptive"] + 3


# --- folders: killed, resumed, foreign, failing -----------------------------------------------------------------------

SCRIPT = """
import sys, torch
sys.path[:0] = [{tests!r}]
torch.set_num_threads(1)
from test_audit import grid
open("ready", "w").close()
grid().run("killed")
"""


def grid() -> Audit:
    """Six cells of a tenth of a second or more."""
    return audit(attacks=["ig:steps=40", WORKS, "ig:steps=20,restarts=2"], seeds=[0, 1], targets=2)


@pytest.mark.system
def test_killed_at_random_moments_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    whole = grid().run(tmp_path / "whole")
    folder, ready, moments = tmp_path / "killed", tmp_path / "ready", random.Random(0)
    kills = 0
    with forks(tmp_path) as server:
        for _ in range(4):
            process = server.start(SCRIPT.format(tests=str(Path(__file__).parent)), tmp_path)
            patience = time.monotonic() + 120
            while not ready.exists():
                assert time.monotonic() < patience, process.err
                time.sleep(0.01)
            time.sleep(moments.uniform(0.05, 0.6))  # a quiet machine runs the whole grid in a second and a half
            os.kill(process.pid, signal.SIGKILL)  # nobody has asked for its end: the id is its own
            kills += process.wait() == -signal.SIGKILL
            ready.unlink()
            if folder.exists() and (folder / "run.toml").exists():
                AuditResult.load(folder)  # readable at every moment
    assert kills
    seen = Counting()
    result = grid().run(folder, progress=seen)
    assert comparable(result.rows) == comparable(whole.rows)
    assert result.complete
    for cell in {row["cell"] for row in whole.rows}:
        a, b = whole.store.arrays(cell), result.store.arrays(cell)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert AuditResult.load(folder).rows == result.rows


class Killed(BaseException):
    """What a process that is killed cannot catch; here, at a chosen write."""


def test_killed_at_any_write_it_loses_one_cell_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small() -> Audit:
        return audit(attacks=["ig:steps=2"], seeds=[0, 1], targets=2)

    whole, left, count = small().run(tmp_path / "whole"), [10**9], 0

    def counted(real: Any) -> Any:
        def write(*given: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            real(*given)

        return write

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for count in range(100):
        folder, left[0] = tmp_path / str(count), count
        try:
            small().run(folder)
            break
        except Killed:
            left[0] = 10**9
        kept = {row["cell"] for row in Folder(folder).rows()}
        seen = Counting()
        assert comparable(small().run(folder, progress=seen).rows) == comparable(whole.rows)
        assert seen.ran == 2 - len(kept)
    assert 10 < count < 99, "every write of a run was interrupted once"


@dataclass
class Counting(Silent):
    ran: int = 0
    finishes: int = 0
    shares: list[float] = field(default_factory=list)

    def cell(self, cell: Any, index: int) -> None:
        self.ran += 1

    def share(self, fraction: float) -> None:
        self.shares.append(fraction)

    def finished(self, cell: Any, rows: Any) -> None:
        self.finishes += 1


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    result = audit().run(tmp_path / "run", progress=first)
    again = audit().run(tmp_path / "run", progress=second)
    assert (first.ran, first.finishes, second.ran, second.finishes) == (1, 1, 0, 1)
    assert first.shares
    assert max(first.shares) <= 1
    assert again.rows == result.rows == AuditResult.load(tmp_path / "run").rows
    assert len(again.environment["resumed"]) == 1
    with pytest.raises(FolderInUse, match="1 finished cells"):
        audit().run(tmp_path / "run", resume=False)


def test_a_torn_line_is_run_again(tmp_path: Path) -> None:
    whole = grid().run(tmp_path / "run")
    path = tmp_path / "run" / "rows.jsonl"
    content = path.read_bytes()
    for cut in (len(content) // 2, len(content) - 3):
        path.write_bytes(content[:cut])
        assert comparable(grid().run(tmp_path / "run").rows) == comparable(whole.rows)


def test_another_configuration_in_the_folder_is_refused(tmp_path: Path) -> None:
    audit(attacks=["ig:steps=3"]).run(tmp_path / "run")
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    with pytest.raises(FolderInUse, match=r"attacks \(\['ig:steps=3'\] there, \['ig:steps=4'\] now\)"):
        audit(attacks=["ig:steps=4"]).run(tmp_path / "run")
    with pytest.raises(FolderInUse, match=r"targets \(3 there, 2 now\).*Choose another folder"):
        audit(attacks=["ig:steps=3"], targets=2).run(tmp_path / "run")
    other = audit(attacks=["ig:steps=3"])
    with torch.no_grad():
        other.task.model[1].weight[0, 0] += 1  # type: ignore[index, union-attr, operator]
    with pytest.raises(FolderInUse, match="differ in the task"):
        other.run(tmp_path / "run")
    recipe = gl.Federation(training=gl.LocalTraining(lr=1.0, optimiser=gl.rules.SGD(momentum=0.9)))
    with pytest.raises(FolderInUse, match="momentum=0.9"):
        audit(attacks=["ig:steps=3"], federation=recipe).run(tmp_path / "run")
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before
    (tmp_path / "run" / "run.toml").write_text("[")
    with pytest.raises(FolderInUse, match="cannot be read"):
        audit(attacks=["ig:steps=3"]).run(tmp_path / "run")
    (tmp_path / "run" / "run.toml").unlink()
    with pytest.raises(FolderInUse, match="no run.toml"):
        audit(attacks=["ig:steps=3"]).run(tmp_path / "run")


USERS = """
import torch
from torch import nn
import gradleak as gl
from gradleak import tree

SCALE = 0.5
KINDS = {"in": "a", "out": "b"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(36, 24), nn.Linear(24, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).cos().reshape(parameter.shape) - 0.9)

    def forward(self, x):
        "Says nothing."
        if x.dim() in {1, 2, 3}:
            raise ValueError
        return self.second(torch.sigmoid(self.first(x.flatten(1))))


def loss(scores, y):
    return 1 * nn.functional.cross_entropy(scores, y)


def halved(update):
    return tree.scale(update, SCALE)


class Halve(gl.Defence):
    def upload(self, upload, client):
        return upload.map(lambda update: halved(update))


task = gl.Task.supervised(Net(), loss, like=(torch.zeros(1, 1, 6, 6), torch.zeros(1, dtype=torch.long)))
"""


def users(folder: Path, old: str = "", new: str = "") -> Audit:
    """The audit of a user's file, imported anew after an edit."""
    assert old in USERS
    names: dict[str, Any] = {"__name__": "users"}
    path = folder / "users.py"
    path.write_text(USERS.replace(old, new) if old else USERS)
    exec(compile(path.read_text(), str(path), "exec"), names)
    settings: dict[str, Any] = {"targets": 1, "unrelated": 0, "engine": gl.Engine(device="cpu"), "knowledge": ["naive"]}
    return Audit(names["task"], private(), ["ig:steps=2"], [names["Halve"]()], **settings)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("torch.sigmoid(", "torch.relu(", "what model and loss compute"),
        ("1 * nn", "7 * nn", "what model and loss compute"),
        ("halved(update))", "halved(halved(update)))", "a defence, or its code"),
        ("SCALE = 0.5", "SCALE = 0.25", "a defence, or its code"),
        ("tree.scale(update, SCALE)", "tree.scale(update, -SCALE)", "a defence, or its code"),
    ],
)
def test_edited_code_is_another_run(tmp_path: Path, old: str, new: str, message: str) -> None:
    users(tmp_path).run(tmp_path / "run")
    counting = Counting()
    users(tmp_path, '"Says nothing."', '"Says more."\n\n').run(tmp_path / "run", progress=counting)
    assert counting.ran == 0, "a docstring changes nothing"
    edited = users(tmp_path, old, new)
    with pytest.raises(FolderInUse, match=message):
        edited.run(tmp_path / "run")
    assert not {cell.key for cell in edited.cells()[1:]} & {cell.key for cell in users(tmp_path).cells()[1:]}


def test_code_alone_and_computation_alone_tell_runs_apart(tmp_path: Path) -> None:
    plain, same = users(tmp_path).fingerprint, users(tmp_path, "1 * nn", "1.0 * nn").fingerprint
    assert plain["gradient"] == same["gradient"]
    assert plain["task"] != same["task"]
    patched = users(tmp_path)
    patched.task.model.forward = lambda x: 2 * type(patched.task.model).forward(patched.task.model, x)  # type: ignore[method-assign]
    assert patched.fingerprint["gradient"] != plain["gradient"]


@pytest.mark.system
def test_unchanged_code_is_the_same_run_in_another_process(tmp_path: Path) -> None:
    here = users(tmp_path).settings()
    code = (
        f"import sys, json; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import pathlib, test_audit as t\n"
        f"print(json.dumps([t.users(pathlib.Path({str(tmp_path)!r})).settings(), t.digest(t.attacks.get('gi'))]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src"), "PYTHONHASHSEED": "7"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(told.stdout) == [json.loads(json.dumps(here)), digest(attacks.get("gi"))]


class OnlyFloat32(nn.Module):
    def __init__(self, works: bool) -> None:
        super().__init__()
        self.inner, self.works = network(), works

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or not self.works:
            raise RuntimeError("no")
        scores: Tensor = self.inner(x)
        return scores


def test_a_model_that_cannot_be_probed_is_told_by_its_code() -> None:
    fields = task().fields
    single = gl.Task(OnlyFloat32(True), task().objective, fields)
    assert len(gradient_of(single)) == 16
    assert gradient_of(single) == gradient_of(single)
    notes: list[str] = []

    class Noting(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    planned = replace(audit(), task=gl.Task(OnlyFloat32(False), task().objective, fields))
    assert planned.fingerprint["gradient"] == "not run: RuntimeError"
    with pytest.raises(UnsupportedTask, match="unsupported: the objective fails on a blank batch"):
        planned.run()
    elsewhere = audit()  # a model that runs on its own device only
    vars(elsewhere)["fingerprint"] = {**elsewhere.fingerprint, "gradient": "not run: RuntimeError"}
    elsewhere.run(progress=Noting())
    assert "does not run on the CPU" in notes[0]


def test_a_quick_run_says_so(tmp_path: Path) -> None:
    audit(attacks=["ig:steps=2"], trial=True).run(tmp_path / "run")
    result = AuditResult.load(tmp_path / "run")
    assert result.settings["trial"] is True
    assert result.verdict.paragraph.startswith("Quick run: shows that everything runs, nothing else.")
    assert from_settings(result.settings, task=task(), data=private()).trial
    assert "Quick run: shows that everything runs" in result.report(tmp_path / "report.html").read_text()
    with pytest.raises(FolderInUse, match="trial"):
        audit(attacks=["ig:steps=2"]).run(tmp_path / "run")


def test_two_writers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    other = Folder(tmp_path / "run")
    other.lock()
    with pytest.raises(FolderInUse, match="Another process"):
        audit(attacks=["ig:steps=3"]).run(tmp_path / "run")
    other.close()
    audit(attacks=["ig:steps=3"]).run(tmp_path / "run")


@dataclass(frozen=True)
class Breaks(Spy):
    name: str = "breaks"

    def run(self, *given: Any, **rest: Any) -> Reconstruction:
        raise RuntimeError("a bad day\nwith details")


def test_a_failed_cell_is_a_row_and_is_tried_again(tmp_path: Path) -> None:
    result = audit(attacks=[WORKS, Breaks()]).run(tmp_path / "run")
    assert [row["status"] for row in result.rows] == ["done"] * 3 + ["failed"]
    row = result.failed[0]
    assert row["error"] == "RuntimeError: a bad day"
    assert "with details" in row["traceback"]
    assert row["target"] is None
    assert result.verdict.word == "leaks"
    assert result.complete
    assert AuditResult.load(tmp_path / "run").rows == result.rows
    mended = Counting()
    again = audit(attacks=[WORKS, Breaks()]).run(tmp_path / "run", progress=mended)
    assert (mended.ran, mended.finishes) == (1, 2)
    assert comparable(again.rows) == comparable(result.rows)


def test_when_everything_fails_the_run_is_void() -> None:
    result = audit(attacks=[Breaks()]).run()
    assert result.verdict.word == "void"
    assert "a bad day" in result.verdict.paragraph


@dataclass(frozen=True)
class Stops(Spy):
    name: str = "stops"

    def run(self, *given: Any, **rest: Any) -> Reconstruction:
        raise KeyboardInterrupt


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match=r"1 of 2 cells are kept in .*run; the same command resumes"):
        audit(attacks=[WORKS, Stops()]).run(tmp_path / "run")
    found = AuditResult.load(tmp_path / "run")
    assert len(found.rows) == 3
    assert not found.complete
    assert found.verdict.word == "leaks"
    with pytest.raises(Interrupted, match="nothing is kept"):
        audit(attacks=[Stops()]).run()


# --- configuration ----------------------------------------------------------------------------------------------------


def test_keys_depend_on_every_setting_and_on_nothing_else() -> None:
    def key_of(**changes: Any) -> str:
        return audit(**changes).cells()[-1].key

    assert key_of() == key_of()
    assert key_of(engine=gl.Engine(device="cpu", chunk=2)) == key_of(), "how it is computed does not change the cell"
    changes: list[dict[str, Any]] = [
        {}, {"attacks": ["idlg:steps=41"]}, {"defences": [Halve()]}, {"knowledge": ["naive"], "defences": [Halve()]},
        {"rounds": [1]}, {"seeds": [1]}, {"targets": 2}, {"unrelated": 1}, {"engine": gl.Engine(precision="double")},
        {"federation": gl.Federation(training=gl.LocalTraining(lr=0.5))}, {"federation": gl.Federation(clients=2)},
        {"defences": [Noise(0.1)]}, {"defences": [Noise(0.2)]}, {"gallery": {"x": private()[0]}},
    ]  # fmt: skip
    keys = [key_of(**change) for change in changes]
    assert len(set(keys)) == len(keys)


def test_digests_name_functions_not_addresses() -> None:
    def make(factor: float) -> Any:
        return lambda value: value * factor

    assert digest(make(2.0)) == digest(make(2.0))
    assert digest(make(2.0)) != digest(make(3.0))
    assert digest(attacks.get("ig")) == digest(attacks.get("ig"))
    assert digest(torch.zeros(3)) != digest(torch.zeros(4))


def test_what_is_named_twice_runs_once() -> None:
    assert len(audit(attacks=[WORKS, WORKS], defences=[None, "none"], seeds=[0, 0]).cells()) == 1


def test_names_of_equal_attacks_are_told_apart() -> None:
    twice = [attacks.get("ig", steps=3), attacks.get("ig", steps=4)]
    assert [cell.attack_name for cell in audit(attacks=twice).cells()] == ["ig", "ig #2"]


def test_run_toml_repeats_the_run(tmp_path: Path) -> None:
    origin = {"task": "train.py:task", "data": "digits"}
    first = audit(
        origin=origin, federation=gl.Federation(clients=2, examples=2, training=gl.LocalTraining(lr=0.5, steps=2))
    )
    first = replace(first, attacks=["ig:steps=3"], targets=2)
    result = first.run(tmp_path / "run")
    text = (tmp_path / "run" / "run.toml").read_text()
    assert "from the folder where it was started" in text
    assert "gradleak audit --config PATH/TO/THIS/run.toml" in text
    again = from_settings(result.settings, task=task(), data=private())
    assert [cell.key for cell in again.cells()] == [cell.key for cell in first.cells()]
    assert again.settings() == result.settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atacks": ["ig"]}, "Did you mean 'attacks'"),
        ({"federation": {"client": 2}}, "Did you mean 'clients'"),
        ({"federation": {"training": {"learning": 2}}}, "no setting 'learning'"),
        ({"federation": {"training": {"steps": 2}}}, "lr"),
        ({"federation": {"training": {"lr": 1.0, "optimiser": "Adam()"}}}, "optimiser cannot be made"),
        ({"engine": {"precisoin": "fast"}}, "Did you mean 'precision'"),
        ({"analyses": ["norm"]}, "Use its script"),
        ({"targets": "8"}, "whole numbers"),
        ({"rounds": [0.5]}, "whole numbers"),
        ({"trial": "yes"}, "true or false"),
        ({"task": "x"}, "task"),
    ],
)
def test_a_mistake_in_run_toml_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError, match=message):
        from_settings({"attacks": ["ig"], **change}, task=task(), data=private())


def test_run_toml_says_when_it_cannot(tmp_path: Path) -> None:
    audit(attacks=[Spy()], defences=[None]).run(tmp_path / "run")
    text = (tmp_path / "run" / "run.toml").read_text()
    assert "cannot repeat it" in text
    assert "Python object" in text


def test_the_environment_is_recorded(tmp_path: Path) -> None:
    audit(attacks=["ig:steps=3"]).run(tmp_path / "run")
    held = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert {"gradleak", "git", "python", "packages", "threads", "time", "cores", "gpus"} <= held.keys()


def test_the_estimate_is_of_the_right_size(tmp_path: Path) -> None:
    planned = audit(attacks=["ig:steps=100"], seeds=[0, 1])
    told = estimate(planned)
    assert [told.counts[name] for name in ("cells", "lanes", "steps")] == [2, 10, 1000]
    assert told.seconds is not None
    assert "about" in str(told)
    began = time.perf_counter()
    planned.run()
    taken = time.perf_counter() - began
    assert told.seconds < 20 * taken
    assert estimate(audit(attacks=[Spy()])).seconds is None
    assert "1 cell, 3 reconstructions" in str(estimate(audit(attacks=["second-order"], targets=2, unrelated=1)))
    audit(attacks=["ig:steps=3"]).run(tmp_path / "run")
    rest = estimate(audit(attacks=["ig:steps=3"]), out=tmp_path / "run")
    assert (rest.counts["cells"], rest.counts["kept"], rest.seconds) == (0, 1, 0)
    assert "(1 more are kept from before)" in str(rest)
    assert "and 1 cells whose time" in str(estimate(audit(attacks=["ig:steps=9", Spy()])))


def test_the_built_in_audit_runs_on_real_images() -> None:
    made = replace(builtin(targets=2), attacks=["cpl:steps=20"])
    result = made.run()
    assert result.settings["origin"]["task"] == "builtin"
    assert result.rows[0]["gallery_size"] == [40], "twenty pieces of clothing and twenty digits, the target among them"
    again = from_settings(result.settings, task=made.task, data=made.data)
    assert [cell.key for cell in again.cells()] == [cell.key for cell in made.cells()]


# --- other kinds of data ----------------------------------------------------------------------------------------------

JOBS = Table(
    (Column("age", mean=40.0, std=12.0, low=17.0, whole=True), Column("job", ("none", "part", "full")), Column("pay"))
)
PEOPLE = 24


def flat_network(entries: int, outputs: int = 2) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(entries, 24), nn.Sigmoid(), nn.Linear(24, outputs))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(Draws(key("weights", name)).uniform(tuple(parameter.shape)) - 0.5)
    return model


def people() -> Tensor:
    """Rows of a table: two numbers, standardised, and a job."""
    numbers = Draws(key("numbers")).normal((PEOPLE, 2)).clamp(min=-1.9)
    jobs = torch.eye(3)[torch.arange(PEOPLE) * 7 % 3]
    return torch.cat([numbers[:, :1], jobs, numbers[:, 1:]], 1)


def waves() -> Tensor:
    phase, pitch = Draws(key("waves")).uniform((2, PEOPLE, 1, 1)) * 6
    return torch.sin(torch.linspace(0, 1, 12) * (2 + pitch) + phase)


KINDS_OF_X: dict[str, tuple[Field, Tensor]] = {
    "table": (Field((5,), JOBS.limits(), kind=JOBS), people()),
    "vector": (Field((6,), UNBOUNDED), Draws(key("vectors")).normal((PEOPLE, 6)) * torch.arange(1, 7)),
    "series": (Field((1, 12), (-1.0, 1.0)), waves()),
}


def numeric(kind: str, **changes: Any) -> Audit:
    """An audit of rows, vectors or series by an attack that solves this network."""
    field, x = KINDS_OF_X[kind]
    fields = {"x": field, "y": Field((), classes=2)}
    task = gl.Task(flat_network(x[0].numel()), Supervised(nn.functional.cross_entropy), fields)
    standard = {"attacks": ["idlg:steps=80"], "targets": 3, "engine": gl.Engine(device="cpu")}
    return Audit(task, (x, torch.arange(PEOPLE) % 2), **{**standard, **changes})


def assert_reads_back(result: AuditResult, folder: Path) -> None:
    """Loaded and scored again, the folder says the same; and no text speaks of images."""
    again = AuditResult.load(folder)
    assert again.fields == result.fields
    assert again.kind == result.kind
    assert comparable(again.rows) == comparable(result.rows)
    assert comparable(again.rescore().rows) == comparable(result.rows)
    assert str(again.verdict) == str(result.verdict)
    texts = [str(again.verdict), again.verdict.rule, again._repr_html_(), json.dumps(again.record())]
    for text in (*texts, *(again.table(format) for format in ("text", "csv", "markdown", "latex"))):
        assert "image" not in text.lower()
    cell = again.summaries[0].cells[0]
    arrays = again.store.arrays(cell)
    assert not [name for name in arrays if name.startswith(("snapshots/", "restarts/"))], "pictures of what is none"
    with pytest.raises(BadRun, match="no images"):
        again.images(cell)


@pytest.mark.parametrize("kind", KINDS_OF_X)
def test_numbers_that_leak_are_found_and_read_back(kind: str, tmp_path: Path) -> None:
    result = numeric(kind).run(tmp_path / "run")
    assert not result.failed, result.failed[0]["traceback"]
    line, first = result.summaries[0], result.kind.headline
    assert result.kind == KINDS_OF_X[kind][0].kind
    assert {row["kind"] for row in result.rows} == {kind}
    assert result.verdict.word == "leaks"
    assert result.positive_control.passed
    assert line.recovered.value == 1.0
    assert line.means[first.name] > 0.99
    assert line.means["labels"] == 1.0
    assert line.baseline["recovered"] == 0.0
    assert {"nearest other", "nearest of class", "unrelated update"} <= result.rows[0]["baselines"].keys()
    pairs = result.pairs(line.cells[0])
    assert pairs["true"].shape == (3, 1, *result.fields["x"].shape)
    assert (pairs["true"] - pairs["found"]).abs().max() < 0.05
    assert_reads_back(result, tmp_path / "run")
    in_memory = numeric(kind).run()
    assert comparable(in_memory.rows) == comparable(result.rows)
    torch.testing.assert_close(in_memory.pairs(line.cells[0]), pairs)


def test_an_attack_too_weak_for_a_table_voids_the_run() -> None:
    result = numeric("table", attacks=["idlg:steps=1"]).run()
    assert result.verdict.word == "void"
    assert "columns right, 90% are needed" in result.verdict.paragraph


def test_a_defended_table_has_a_table_of_defences() -> None:
    result = numeric("table", defences=[None, Halve()], federation=gl.Federation(examples=2, clients=2)).run()
    assert not result.failed, result.failed[0]["traceback"]
    told = result.table()
    assert "columns right mean/median/clearest" in told
    assert "recovered, mean columns right." in told
    assert len(result.rows[-1]["scores"]["right"]) == 2


@dataclass(frozen=True)
class Recites:
    """Says the same texts whatever it sees: those of the targets if `knows_them`, which only a test can arrange."""

    texts: tuple[tuple[int, ...], ...]
    name: str = "recites"
    needs: frozenset[str] = frozenset()

    def run(self, task: Any, seen: Any, knows: Any = None, seed: int = 0, **rest: Any) -> Reconstruction:
        told = torch.tensor([self.texts[n % len(self.texts)] for n in range(len(seen))])[:, None]
        flat = torch.zeros(len(seen), 1)
        trace = {
            "step": torch.tensor([0, 1]),
            "match": torch.stack([flat + 1, flat]),
            "objective": torch.stack([flat + 1, flat]),
        }
        return Reconstruction(
            {"x": told}, {"x": told[:, None]}, flat, flat, torch.zeros(len(seen), dtype=torch.long), flat.bool(), trace,
            task.fields, tuple(each.key for each in seen), (1,) * len(seen), 0.1, 1,
        )  # fmt: skip


WORDS = 20
TEXTS = 1 + torch.arange(PEOPLE * 5).reshape(PEOPLE, 5).mul(7) % 11 * torch.arange(1, PEOPLE + 1)[:, None] % (WORDS - 1)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).mean(1))


def texts(attack: Any, **changes: Any) -> Audit:
    torch.manual_seed(0)
    fields = {"x": Field((5,), classes=WORDS, kind=Tokens(padding=0)), "y": Field((), classes=2)}
    task = gl.Task(Reader(), Supervised(nn.functional.cross_entropy), fields)
    data = {"x": TEXTS, "y": torch.arange(PEOPLE) % 2}
    standard = {"targets": 3, "engine": gl.Engine(device="cpu")}
    return Audit(task, data, [attack], **{**standard, **changes})


def test_texts_that_leak_are_found_and_read_back(tmp_path: Path) -> None:
    """An attack that returns the ids of the three targets, and one that returns the same words in another order."""
    plan = texts(Recites(((1,) * 5,)))
    private = plan.side.truth(plan.federation)["x"][:, 0]
    assert len({tuple(text) for text in private.tolist()}) == 3
    result = texts(Recites(tuple(map(tuple, private.tolist())))).run(tmp_path / "run")
    assert not result.failed, result.failed[0]["traceback"]
    assert result.verdict.word in ("leaks", "leaks in part")  # the unrelated baseline recites them too
    assert result.summaries[0].recovered.value == 1.0
    assert result.summaries[0].means["bag"] == result.summaries[0].means["order"] == 1.0
    assert "3 of 3 texts" in result.verdict.paragraph
    assert "drawn" not in result.rows[0]
    pairs = result.pairs(result.summaries[0].cells[0])
    assert torch.equal(pairs["true"], pairs["found"])
    assert_reads_back(result, tmp_path / "run")
    turned = texts(Recites(tuple(tuple(reversed(text)) for text in private.tolist()))).run()
    assert turned.summaries[0].means["bag"] == 1.0
    assert turned.summaries[0].means["order"] < 1.0
    assert turned.summaries[0].rates["whole bag"].value == 1.0
    assert turned.summaries[0].recovered.value < 1.0


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = flat_network(8, 1)

    def forward(self, x: Tensor, month: Tensor) -> Tensor:
        return self.inner(torch.cat([x, month], 1))[:, 0]


@dataclass(frozen=True)
class Regression:
    """Squared error of a model with two inputs."""

    def __call__(self, call: Any, batch: Any) -> Tensor:
        return nn.functional.mse_loss(call(batch["x"], batch["month"]), batch["y"])

    def to(self, device: Any, dtype: Any) -> Any:
        return self


@dataclass(frozen=True)
class Given(Spy):
    """Repeats what it is given, and guesses zeros for the rest."""

    name: str = "given"

    def run(self, task: Any, seen: Any, knows: Any = None, seed: int = 0, **rest: Any) -> Reconstruction:
        self.kept.append(knows.given)
        flat, shape = torch.zeros(len(seen), 1), (len(seen), 1)
        batch = {name: torch.zeros(*shape, *field.shape) for name, field in task.fields.items()} | dict(knows.given)
        trace = {"step": torch.tensor([0]), "match": flat[None], "objective": flat[None]}
        return Reconstruction(
            batch, {name: value[:, None] for name, value in batch.items()}, flat, flat, torch.zeros(len(seen)).long(),
            flat.bool(), trace, task.fields, tuple(each.key for each in seen), (1,) * len(seen), 0.1, 1,
        )  # fmt: skip


def test_public_inputs_are_given_and_a_regression_is_scored_beside_x(tmp_path: Path) -> None:
    wide = Field((), UNBOUNDED)
    fields = {"x": Field((6,), UNBOUNDED), "month": Field((2,), UNBOUNDED, public=True), "y": wide}
    x, month = Draws(key("vectors")).normal((PEOPLE, 6)), Draws(key("months")).normal((PEOPLE, 2))
    spy = Given()
    task = gl.Task(TwoInputs(), Regression(), fields)
    data = {"x": x, "month": month, "y": x.sum(1)}
    plan = Audit(task, data, [spy], targets=3, engine=gl.Engine(device="cpu"))
    assert [cell.given for cell in plan.cells()] == [("month",)]
    result = plan.run(tmp_path / "run")
    assert not result.failed, result.failed[0]["traceback"]
    assert [set(given) for given in spy.kept] == [{"month"}]
    assert result.rows[0]["drawn"].keys() == {"y"}, "what the server knows is not scored"
    assert result.rows[0]["drawn"]["y"].keys() == {"right", "rmse"}
    assert result.rows[0]["labels"] == {}
    assert "granted" not in result.verdict.paragraph, "a public input is no concession"
    assert {each.capability: each.granted for each in result.ledger}["month"] is True
    assert AuditResult.load(tmp_path / "run").fields == fields


def test_kinds_are_in_the_file_by_name() -> None:
    settings = numeric("table").settings()
    entry = settings["fields"]["x"]
    assert entry["kind"] == "table"
    assert entry["settings"]["columns"][1] == {
        "name": "job",
        "categories": ["none", "part", "full"],
        "mean": 0.0,
        "std": 1.0,
    }
    assert settings["fields"]["y"]["kind"] == "category"
    assert audit().settings()["fields"]["x"] == {
        "shape": [1, 6, 6], "bounds": [0.0, 1.0], "mean": [0.0], "std": [1.0], "kind": "image",
    }  # fmt: skip


def test_a_card_of_images_says_nothing_about_rows() -> None:
    """A generator knows which images it was trained on. Rows of a table are not asked for."""

    class Card:
        images: Any = (1,)

        def seen(self, pictures: Tensor) -> Any:
            raise AssertionError("rows are no pictures")

    class Generator:
        card = Card()

    plan = numeric("table", generator=Generator())
    plan._demand_unseen(plan.cells())
    with pytest.raises(AssertionError, match="no pictures"):
        (images := audit(generator=Generator()))._demand_unseen(images.cells())
