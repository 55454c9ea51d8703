"""Federated denoisers: clients hold images alone and draw steps and noise; trained, kept, sampled and audited."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import gradleak as gl
from conftest import blobs, largest_difference, tiny
from gradleak.audit import AuditError
from gradleak.audit.private import Stored, examples_of
from gradleak.cli import app
from gradleak.cli.audit import AuditOptions
from gradleak.cli.planning import plan_audit
from gradleak.core import random as draws
from gradleak.core import registry, tree
from gradleak.core.configuration import from_toml
from gradleak.core.registry import BadSetting
from gradleak.data import DataError, load
from gradleak.diffusion import Schedule, SharedDraws, denoising
from gradleak.federation import EMA, Federation, FederationError, Rounds, network_of
from gradleak.federation.checkpoints import Checkpoints
from gradleak.federation.rounds import Snapshot
from gradleak.federation.samples import Samples
from gradleak.federation.training import curves
from gradleak.models import unet
from gradleak.scenario.rules import Adam
from gradleak.scenario.task import Batch, Task

STEPS = 20
TINY = "base=4,multipliers=[1],blocks=1,groups=2,heads=1,steps=100"


def denoiser(dtype: torch.dtype = torch.float64, target: str = "eps", seed: int = 0) -> Task:
    """A U-Net of 8,000 weights on grey images of 4 x 4, and 20 steps of noise."""
    generator = torch.Generator().manual_seed(seed)
    model = unet(
        shape=(1, 4, 4), base=4, multipliers=(1,), blocks=1, groups=2, heads=1, steps=STEPS, generator=generator
    )
    schedule = Schedule(STEPS, first=5e-3, last=0.4)
    return denoising(model.to(dtype), like=torch.zeros(1, 1, 4, 4), schedule=schedule, target=target)


def pictures(count: int = 24, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two bars each, in [-1, 1]: something that can be learnt."""
    rows = torch.arange(count)
    x = torch.full((count, 1, 4, 4), -1.0, dtype=dtype)
    x[rows, 0, rows % 4] = 1.0
    x[rows, 0, :, rows // 4 % 4] = 1.0
    return x


def held(count: int = 24) -> Stored:
    return Stored({"x": pictures(count)})


def federation(**changes: Any) -> Federation:
    recipe = gl.LocalTraining(5e-3, steps=3, batch_size=4, optimiser=Adam())
    settings: dict[str, Any] = {"clients": 3, "training": recipe, "examples": None, "averaging": EMA(0.9)}
    return Federation(**{**settings, **changes})


# --- training ---------------------------------------------------------------------------------------------------------


def test_clients_that_hold_images_alone_learn_to_denoise() -> None:
    plain = gl.LocalTraining(1e-2, steps=8, batch_size=8, optimiser=Adam())
    done = federation(training=plain).train(denoiser(), held(), 12, test=held(8), every=4)
    tested = [row for row in done.metrics if "test_loss" in row]
    assert [row["round"] for row in tested] == [0, 4, 8, 12]
    assert tested[-1]["test_loss"] < 0.75 * tested[0]["test_loss"]
    assert not any("accuracy" in name for row in done.metrics for name in row)


def test_what_is_told_of_a_training_without_labels() -> None:
    done = federation().train(denoiser(), held(), 2, test=held(8), every=1)
    head, *lines = done.table().splitlines()
    assert head.split()[-1] == "averaged"
    last = done.metrics[-1]
    assert lines[-1].split() == ["2", f"{last['loss']:.4f}", f"{last['test_loss']:.4f}", "-", "3", "0"] + [
        f"{last['averaged_test_loss']:.4f}"
    ]
    assert "test loss" in curves(done.metrics)
    assert "accuracy" not in curves(done.metrics)


def test_clients_together_draw_what_each_draws_alone() -> None:
    task = denoiser()
    together, alone = (
        federation().train(task, held(), 2, engine=gl.Engine(device="cpu", precision="double", batched=batched))
        for batched in (True, False)
    )
    assert largest_difference(together.state.weights, alone.state.weights) < 1e-10  # Adam divides by small numbers


def test_draws_differ_between_clients_and_rounds_unless_the_server_makes_them() -> None:
    """Clients with the same images: their updates differ by what they drew, and by nothing else."""
    task, same = denoiser(), Stored({"x": pictures(1).expand(2, -1, -1, -1)})
    own = federation(clients=2, training=gl.LocalTraining(lr=1e-3), averaging=None)

    def updates(defence: gl.Defence | None) -> list[Any]:
        work = Rounds(own, task, same, defence)
        state, sent = work.first(), []
        for number in range(2):
            state = replace(state, round=number)
            todo = [work._work(client, state) for client in range(2)]
            extras = work.defence.broadcast(state.weights, work._server("broadcast", number, state))
            done = work.clients.run(todo, state.weights, state.buffers, extras)
            sent.append([done[client].upload.payload["update"] for client in range(2)])  # type: ignore[union-attr]
        return sent

    drawn = updates(None)
    assert largest_difference(drawn[0][0], drawn[0][1]) > 1e-6
    assert largest_difference(drawn[0][0], drawn[1][0]) > 1e-6
    shared = updates(SharedDraws())
    assert largest_difference(shared[0][0], shared[0][1]) < 1e-15
    assert largest_difference(shared[0][0], shared[1][0]) > 1e-6


def test_the_test_loss_is_a_function_of_the_weights() -> None:
    """The same steps and noise in every round: what changes is the model."""
    work = Rounds(federation(), denoiser(), held())
    first = work.first()
    loss = work.evaluate(first, held(8))
    assert loss == work.evaluate(replace(first, round=7), held(8))
    assert loss.keys() == {"test_loss"}
    other = work.evaluate(replace(first, weights=tree.scale(first.weights, 0.9)), held(8))
    assert other["test_loss"] != loss["test_loss"]


def test_a_resumed_training_is_an_uninterrupted_one_average_included(tmp_path: Path) -> None:
    task = denoiser()

    def train(folder: str, rounds: int) -> None:
        federation().train(task, held(), rounds, test=held(8), checkpoints=[1], out=tmp_path / folder)

    train("whole", 4)
    train("parts", 2)
    train("parts", 4)
    whole, parts = (Checkpoints(tmp_path / name) for name in ("whole", "parts"))
    assert largest_difference(whole.at(4).weights, parts.at(4).weights) == 0
    for one, other in ((whole.averaged, parts.averaged), (whole.averaged_at(1), parts.averaged_at(1))):
        assert one is not None
        assert other is not None
        assert largest_difference(one.weights, other.weights) == 0
    assert whole.averaged is not None
    assert largest_difference(whole.averaged.weights, whole.at(4).weights) > 0
    assert largest_difference(whole.averaged.weights, whole.averaged_at(4).weights) == 0  # type: ignore[union-attr]


def test_labels_beside_the_images_serve_the_split_alone() -> None:
    task = denoiser()
    y = torch.arange(24) % 3
    data = examples_of({"x": pictures(), "y": y}, task)
    assert isinstance(data, Stored)
    assert data.tensors.keys() == {"x"}
    shares = Federation(clients=3, examples=None, split="dir_client:alpha=0").partition(data)  # type: ignore[arg-type]
    assert all(len(set(y[share].tolist())) == 1 for share in shares)
    done = federation(split="dir_client:alpha=0").train(task, data, 1)
    assert len(done.metrics) == 2


def test_images_are_mapped_to_the_bounds_of_a_denoiser(tmp_path: Path) -> None:
    images = load(blobs(tmp_path / "blobs.npz", 4, 12))
    grey = replace(images, x=images.x.mean(1, keepdim=True))
    data = examples_of(grey, denoiser())
    assert isinstance(data, Stored)
    assert torch.allclose(data.tensors["x"], grey.x.double() * 2 - 1)
    assert data.labels is not None
    assert torch.equal(data.labels, images.y)
    assert data.to("cpu", torch.float32).labels is not None


@pytest.mark.parametrize("labelled", [True, False])
def test_a_dataset_may_give_pairs_or_images_alone(labelled: bool) -> None:
    x = pictures(6, torch.float32)
    given = [(image, 0) for image in x] if labelled else list(x)

    class Plain:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, row: int) -> Any:
            return given[row]

    batch = examples_of(Plain(), denoiser()).batch(torch.tensor([4, 1]))
    assert batch.keys() == {"x"}
    assert torch.equal(batch["x"], x[[4, 1]].double())


# --- averages ---------------------------------------------------------------------------------------------------------


def test_an_exponential_average_follows_its_formula() -> None:
    weights: Batch = {"w": torch.tensor([1.0], dtype=torch.float64)}
    average = EMA(decay=0.8, warm=False).after(0, {}, weights, {})
    for value in (2.0, 5.0):
        average = EMA(decay=0.8, warm=False).after(1, average, {"w": torch.full((1,), value).double()}, {})
    assert float(average["weights"]["w"]) == pytest.approx(0.8 * (0.8 * 1 + 0.2 * 2) + 0.2 * 5)
    warm = EMA(decay=0.8).after(1, EMA(decay=0.8).after(0, {}, weights, {}), {"w": torch.full((1,), 2.0).double()}, {})
    assert float(warm["weights"]["w"]) == pytest.approx(2 / 11 * 1 + 9 / 11 * 2)
    assert EMA(0.8, start=3).after(2, {}, weights, {}) == {}


def test_an_average_is_spelled_and_never_sent() -> None:
    assert registry.spelled(registry.parse("averaging", "ema:decay=0.5")) == "ema:decay=0.5,start=0,warm=True"
    with pytest.raises(BadSetting, match="decay of ema must be a number from 0 to 1"):
        registry.parse("averaging", "ema:decay=1.5")
    task = denoiser()
    with_it, without = (federation(averaging=own).train(task, held(), 2) for own in (EMA(0.5), None))
    assert largest_difference(with_it.state.weights, without.state.weights) == 0
    assert with_it.averaged_at(2) is not None
    assert without.averaged_at(2) is None


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_come_from_the_same_latents(tmp_path: Path) -> None:
    task = denoiser(torch.float32)
    few = Samples(count=3, steps=4)
    done = federation().train(task, held(), 2, checkpoints=[1], out=tmp_path / "run", samples=few)
    again = few.of(task, done.at(2))
    assert again.shape == (3, 1, 4, 4)
    assert again.min() == 0  # a network that has learnt nothing leaves the range of pictures, and is cut off there
    assert again.max() == 1
    assert torch.equal(again, few.of(task, done.at(2)))
    assert not torch.equal(again, few.of(task, done.at(0)))
    assert not torch.equal(again, Samples(3, 4, seed=1).of(task, done.at(2)))
    sizes = {number: Image.open(tmp_path / f"run/samples/round-{number}.png").size for number in (0, 1, 2)}
    assert len(set(sizes.values())) == 1
    assert Image.open(tmp_path / "run/samples.png").size[1] > sizes[0][1]  # three rounds against sent and averaged
    assert few.over_rounds(task, Checkpoints(tmp_path / "run")) == (tmp_path / "run/samples.png").read_bytes()


def test_samples_are_of_denoisers_only() -> None:
    with pytest.raises(FederationError, match="Samples are of denoisers; the objective is Supervised"):
        Federation(training=gl.LocalTraining(lr=0.1)).train(tiny(), held(), 1, samples=Samples())
    with pytest.raises(BadSetting, match="count of samples must be a whole number"):
        Samples(count=0)


def test_one_sample_in_one_step_is_enough() -> None:
    task = denoiser()
    assert Samples(count=1, steps=1).of(task, Snapshot(task.weights(), task.buffers())).shape == (1, 1, 4, 4)


def test_a_network_of_a_checkpoint_is_a_model_of_its_own() -> None:
    task = denoiser()
    done = federation().train(task, held(), 1)
    model = network_of(task, done.at(1))
    batch = task.completed({"x": pictures(2)}, draws.Draws(draws.key("one")))
    sent = task.call(done.at(1).weights)
    assert torch.equal(model(batch["x"], batch["t"]), sent(batch["x"], batch["t"]))
    assert not torch.equal(model(batch["x"], batch["t"]), task.model(batch["x"], batch["t"]))


# --- audits -----------------------------------------------------------------------------------------------------------


def audit(**changes: Any) -> gl.Audit:
    settings: dict[str, Any] = {
        "task": denoiser(),
        "data": {"x": pictures()},
        "attacks": ["dlg-dm:steps=40,lr=0.05"],
        "targets": 2,
        "given": ("t", "noise"),
        "engine": gl.Engine(device="cpu", precision="double"),
    }
    return gl.Audit(**{**settings, **changes})


def test_an_audit_grants_what_it_says_and_scores_what_the_client_drew() -> None:
    early = {"x": pictures(), "t": torch.full((24,), 2)}
    result = audit(data=early, attacks=["dlg-dm:steps=25,lr=0.1"]).run()
    assert not result.failed, result.failed[0]["traceback"]
    for row in result.rows:
        assert row["drawn"]["t"] == {"right": 1.0, "off_by": 0.0}
        assert row["drawn"]["noise"]["cosine"] == pytest.approx(1)
        assert row["labels"] == {}
        assert row["match"] < 0.5 * row["match_start"]
    assert "The attacker was granted t and noise of every example." in str(result.verdict)
    assert result.rescore().rows[0]["drawn"] == result.rows[0]["drawn"]


def test_an_attacker_that_is_granted_nothing_reads_the_step_and_not_the_noise() -> None:
    planned = audit(given=(), attacks=["dlg-dm:steps=3,noise=unknown,t=analytic"])
    assert all(not cell.knows.given for cell in planned.cells())
    result = planned.run()
    assert not result.failed, result.failed[0]["traceback"]
    assert all(row["drawn"]["t"]["right"] == 1 for row in result.rows)
    assert all(abs(row["drawn"]["noise"]["cosine"]) < 0.9 for row in result.rows)
    assert "granted" not in str(result.verdict)
    assert {cell.key for cell in planned.cells()}.isdisjoint(
        cell.key for cell in replace(planned, given=("t",)).cells()
    )


def test_sealed_draws_are_those_that_the_client_used() -> None:
    side = audit().side
    victims = side.victims(Federation(), None, 0, (0,), 0)
    assert victims.truth.keys() == {"x", "t", "noise"}
    for row, seen in enumerate(victims.seen):
        task = side.task
        gradient = task.gradient(task.weights(), {name: value[row] for name, value in victims.truth.items()})
        assert largest_difference(gradient, seen.update) < 1e-12
    assert not torch.equal(victims.truth["noise"][0], victims.truth["noise"][1])
    assert victims.given(["noise"])["noise"].shape[0] == len(victims.seen) + len(victims.unrelated)
    fixed = audit(data={"x": pictures(), "t": torch.full((24,), 7)}).side.truth(Federation())
    assert fixed["t"].tolist() == [[7], [7]]


def test_a_client_of_several_steps_draws_anew_and_nobody_can_grant_it() -> None:
    several = Federation(training=gl.LocalTraining(lr=0.1, steps=2))
    planned = audit(federation=several, attacks=["dlg-dm:steps=2"])
    assert planned.side.truth(several).keys() == {"x"}
    result = planned.run()
    assert all("cannot be granted" in row["error"] for row in result.failed)
    assert {row["control"] for row in result.failed} == {False}  # the control takes one step


@pytest.mark.parametrize("given", [("x",), ("labels",)])
def test_a_field_that_cannot_be_granted_is_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(AuditError, match="fields that can be granted are: t, noise"):
        audit(given=given)


def test_shared_draws_are_audited_by_granting_them() -> None:
    with pytest.raises(AuditError, match=r"an attacker that knows them is Audit\(given=\('t', 'noise'\)\)"):
        audit(defences=[SharedDraws()]).run()


def test_an_audit_of_a_denoiser_is_repeated_from_its_file(tmp_path: Path) -> None:
    planned = audit(attacks=["dlg-dm:steps=2"], unrelated=1)
    planned.run(tmp_path / "run")
    settings = from_toml((tmp_path / "run/run.toml").read_text())
    assert settings["given"] == ["t", "noise"]
    again = gl.audit.from_settings(settings, task=planned.task, data=planned.data)
    assert [cell.key for cell in again.cells()] == [cell.key for cell in planned.cells()]
    assert gl.AuditResult.load(tmp_path / "run").report(tmp_path / "report.html").exists()


# --- images from folders ----------------------------------------------------------------------------------------------


def photograph(path: Path, colour: int, size: tuple[int, int] = (10, 14)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 0, 0)).save(path)


def test_celeba_as_its_authors_give_it(tmp_path: Path) -> None:
    for number in range(1, 7):
        photograph(tmp_path / f"img_align_celeba/{number:06}.jpg", 40 * number)
    without = load(tmp_path, size=8)
    assert (tuple(without.x.shape), without.names) == ((6, 3, 8, 8), ("face",))
    parts = [0, 0, 0, 1, 2, 2]
    lines = [f"{number:06}.jpg {part}" for number, part in enumerate(parts, start=1)]
    (tmp_path / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    assert [len(load(tmp_path, split=split, size=8)) for split in ("train", "test", None)] == [3, 2, 3]
    red = load(tmp_path, split="test", size=8).x[:, 0].mean((1, 2)) * 255
    assert torch.allclose(red, torch.tensor([200.0, 240.0]), atol=3)
    (tmp_path / "list_eval_partition.txt").write_text("000001.jpg\n")
    with pytest.raises(DataError, match="should have lines such as"):
        load(tmp_path, size=8)


def test_lsun_as_it_is_exported(tmp_path: Path) -> None:
    for name in ("a/b/c/abc1", "a/b/d/abd2", "e/f/g/efg3"):
        photograph(tmp_path / f"bedroom_train/{name}.webp", 90)
    photograph(tmp_path / "bedroom_val/a/b/c/abc4.webp", 200)
    train, test = (load(tmp_path, split=split, size=(4, 6)) for split in ("train", "test"))
    assert (tuple(train.x.shape), train.names, len(test)) == ((3, 3, 4, 6), ("bedroom",), 1)
    assert len(load(tmp_path / "bedroom_train", size=4)) == 3  # images at any depth, one class
    photograph(tmp_path / "church_train/x.png", 10)
    photograph(tmp_path / "church_val/x.png", 10)
    with pytest.raises(DataError, match=r"several categories \(bedroom, church\)"):
        load(tmp_path, size=4)


def test_a_database_of_lsun_is_told_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "bedroom_train_lmdb").mkdir()
    (tmp_path / "bedroom_train_lmdb/data.mdb").write_bytes(b"")
    for folder in (tmp_path, tmp_path / "bedroom_train_lmdb"):
        with pytest.raises(DataError, match="LMDB database, as LSUN is downloaded. Export its images"):
            load(folder, size=8)


def test_pictures_without_pillow_are_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photograph(tmp_path / "one.png", 3)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(DataError, match="Pillow, which reads those, is not installed: pip install pillow"):
        load(tmp_path)


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    blobs(tmp_path / "blobs.npz", 8, 24)
    return tmp_path


def command(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output + result.stderr
    return re.sub(r"[\s│]+", " ", result.stdout + result.stderr)


TRAIN = ("train", "--task", f"ddpm:{TINY}", "--data", "blobs.npz", "--size", 4, "--clients", 3, "--steps", 2)
TRAIN += ("--batch-size", 4, "--samples", 2)


def test_a_denoiser_is_trained_kept_and_attacked_from_the_command_line(home: Path) -> None:
    told = command(*TRAIN, "--rounds", 1, "--checkpoints", 1, "-o", "run")
    assert "Samples over rounds: run/samples.png" in told
    command(*TRAIN, "--rounds", 2, "--checkpoints", 1, "-o", "run")
    settings = from_toml(Path("run/training.toml").read_text())
    assert settings["origin"] == {"task": f"ddpm:{TINY}", "data": "blobs.npz", "holdout": 0.1, "size": 4}
    assert settings["federation"]["averaging"] == "ema:decay=0.99,start=0,warm=True"
    assert settings["federation"]["training"]["optimiser"].startswith("Adam(")
    assert settings["federation"]["training"]["lr"] == 2e-4
    assert {path.name for path in Path("run/samples").iterdir()} == {f"round-{number}.png" for number in (0, 1, 2)}
    attacked = ("audit", "--from", "run", "--rounds", 2, "--targets", 1, "--quick")
    attacked += ("--attack", "gidm:restarts=1,sampler_steps=2,recompute=false")
    assert "The clients' optimiser is not plain SGD: say --lr" in command(*attacked, code=2)
    command(*attacked, "--lr", 1, "--given", "t", "-o", "attacked")
    rows = [json.loads(line) for line in Path("attacked/rows.jsonl").read_text().splitlines()]
    assert all(row["status"] == "done" for row in rows), rows[0].get("traceback")
    assert rows[-1]["trained"]["test_accuracy"] is None
    found = from_toml(Path("attacked/run.toml").read_text())
    assert (found["given"], found["origin"]["generator"]) == (["t"], "the trained model")
    again = plan_audit(AuditOptions(config=Path("attacked/run.toml")))
    assert [cell.key for cell in again.cells()] == [row["cell"] for row in rows]


def test_mistakes_in_a_training_of_a_denoiser(home: Path) -> None:
    short = (*TRAIN, "--rounds", 1)
    assert "both say what is trained" in command(*short, "lenet5", code=2)
    assert "Unknown optimiser 'adamm'. Did you mean 'adam'" in command(*short, "--optimiser", "adamm", code=2)
    assert "--shared-draws is for denoisers" in command("train", "mlp", "--data", "blobs.npz", "--shared-draws", code=2)
    assert "no setting 'bas'" in command("train", "--task", "ddpm:bas=4", "--data", "blobs.npz", code=2)
    assert "ddpm" in command("list", "tasks")


def test_the_server_may_draw_for_all_from_the_command_line(home: Path) -> None:
    command(*TRAIN, "--rounds", 1, "--shared-draws", "--averaging", "none", "-o", "run")
    settings = from_toml(Path("run/training.toml").read_text())
    assert settings["defence"].startswith("SharedDraws")
    assert "averaging" not in settings["federation"]


def test_the_curvature_of_a_denoiser_is_analysed_round_by_round(home: Path) -> None:
    """Steps and noise are drawn once, so that rounds differ by their weights alone."""
    command(*TRAIN, "--rounds", 2, "--checkpoints", 1, "-o", "run")
    words = ("analyse", "--from", "run", "--examples", 4, "--probes", 2, "--steps", 4, "--most-steps", 4)
    for place in ("one", "two"):
        command(*words, "-o", place)
    one, two = (
        [json.loads(line)["curvature"]["loss"] for line in (home / place / "analysis.jsonl").read_text().splitlines()]
        for place in ("one", "two")
    )
    assert one == two
    assert len(set(one)) == 3
