"""Audits of what was recorded elsewhere: with the auditor's own examples, and without any."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import gradleak as gl
from gradleak.audit.output import write
from gradleak.audit.private import AuditError
from gradleak.audit.recorded import Recorded, RecordedAudit, blind, read, replay_text, replays, reproduced, summary
from gradleak.audit.result import AuditResult
from gradleak.cli import app
from gradleak.scenario.fields import UNBOUNDED
from gradleak.scenario.task import Supervised
from test_audit import SHAPE, WORKS, comparable, private, task
from test_checks import reconstruction

TRAINING = gl.LocalTraining(lr=0.5)
ENGINE = gl.Engine(device="cpu")
FILE = """
import torch
from torch import nn
import gradleak as gl
from gradleak.core.random import Draws, key

generator = torch.Generator().manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, 3))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
task = gl.Task.supervised(
    model, nn.functional.cross_entropy, like=(torch.zeros(1, 1, 6, 6), torch.zeros(1, dtype=torch.long))
)
others = {"x": Draws(key("others")).uniform((12, 1, 6, 6)), "y": torch.arange(12) % 3}
"""


def others() -> dict[str, torch.Tensor]:
    from gradleak.core.random import Draws, key

    return {"x": Draws(key("others")).uniform((12, *SHAPE)), "y": torch.arange(12) % 3}


def recording(
    folder: Path, sizes: tuple[int, ...] = (1, 1), rounds: tuple[int, ...] = (1,), defence: Any = None, **training: Any
) -> tuple[Path, Path]:
    """Observations as a tap writes them, and what the clients trained on, in two folders."""
    seen, truth = folder / "seen", folder / "truth"
    seen.mkdir()
    truth.mkdir()
    (x, y), start = private(40), 0
    recipe = replace(TRAINING, **training)
    for number in rounds:
        for client, size in enumerate(sizes):
            batch = {"x": x[start : start + size], "y": y[start : start + size]}
            start += size
            name = f"round{number:04d}-node{client}"
            made = gl.observe(task(), batch, recipe, defence, key=name, wire="weights", seed=number)
            replace(made, round=number).save(seen / f"{name}.safetensors")
            save_file(batch, truth / f"{name}.safetensors")
    return seen, truth


def made(tmp_path: Path, attacks: tuple[str, ...] = (WORKS,), **changes: Any) -> RecordedAudit:
    seen, truth = recording(tmp_path, **changes)
    return RecordedAudit.of(task(), read(seen, task(), truth), attacks, TRAINING, others(), engine=ENGINE)


def test_canaries_are_scored_like_any_target(tmp_path: Path) -> None:
    """Two rounds of two clients: recovered, the control passes, the replay reproduces, and the folder reads back."""
    result = made(tmp_path, rounds=(1, 2)).run(tmp_path / "run")
    assert result.verdict.word == "leaks"
    assert result.positive_control.passed
    attacked = [row for row in result.rows if not row["control"]]
    assert {(row["round"], row["target"], row["targets"]) for row in attacked} == {
        (1, 0, 2), (1, 1, 2), (2, 0, 2), (2, 1, 2),
    }  # fmt: skip
    assert all(row["hits"]["recovered"] == [True] for row in attacked)
    assert {row["observation"] for row in attacked} == {f"round000{n}-node{c}" for n in (1, 2) for c in (0, 1)}
    assert all(row["analyses"]["replay_error"] < 1e-4 for row in attacked)
    assert all(row["baselines"]["unrelated update"]["recovered"] == [False] for row in attacked)
    again = AuditResult.load(tmp_path / "run")
    assert comparable(again.rows) == comparable(result.rows)
    assert "recorded" in (tmp_path / "run" / "run.toml").read_text()
    assert again.report(tmp_path / "report.html").exists()


def test_groups_of_different_sizes(tmp_path: Path) -> None:
    """Clients with one and with two examples are cells of their own; no target is lost."""
    result = made(tmp_path, sizes=(1, 2, 1)).run()
    attacked = [row for row in result.rows if not row["control"]]
    assert sorted((row["examples"], row["targets"]) for row in attacked) == [(1, 2), (1, 2), (2, 1)]


def test_the_truth_reaches_no_attack(tmp_path: Path) -> None:
    """Other examples beside the same observations: the same reconstructions, to the last bit."""
    seen, truth = recording(tmp_path)
    found = []
    for shift in (0.0, 0.3):
        known = [
            replace(one, truth={"x": (one.truth["x"] + shift) % 1, "y": (one.truth["y"] + (shift > 0)) % 3})
            for one in read(seen, task(), truth)
        ]
        audit = RecordedAudit.of(task(), known, (WORKS,), TRAINING, others(), engine=ENGINE, unrelated=0)
        result = audit.run()
        cell = next(row["cell"] for row in result.rows if not row["control"])
        found.append(result.store.arrays(cell)["found/x"])
    assert torch.equal(*found)


def test_it_resumes_and_other_observations_are_another_run(tmp_path: Path) -> None:
    audit = made(tmp_path)
    first = audit.run(tmp_path / "run")
    again = audit.run(tmp_path / "run")
    assert again.rows == first.rows  # the clock's entries too: nothing was run again

    def doubled(seen: gl.Observation) -> gl.Observation:
        return replace(seen, update={**seen.update, "3.bias": seen.update["3.bias"] * 2})

    changed = [replace(one, seen=doubled(one.seen)) for one in audit.recorded]
    other = RecordedAudit.of(task(), changed, (WORKS,), TRAINING, others(), engine=ENGINE)
    with pytest.raises(gl.audit.FolderInUse, match="observations"):
        other.run(tmp_path / "run")


def test_the_stated_defence_is_attacked_in_its_forms(tmp_path: Path) -> None:
    seen, truth = recording(tmp_path, defence=gl.defences.Pruning(keep=0.5))
    known = read(seen, task(), truth)
    audit = RecordedAudit.of(
        task(), known, (WORKS,), TRAINING, others(), defence="pruning:keep=0.5", engine=ENGINE, unrelated=0
    )
    forms = {row["form"] for row in audit.run().rows if not row["control"]}
    assert {"naive", "adaptive"} <= forms
    assert "averaged" not in forms
    errors = replays(task(), known, TRAINING, gl.defences.Pruning(keep=0.5))
    assert replay_text(errors, known, TRAINING).startswith("Replay check: the stated recipe reproduces 2 of 2")


# --- the replay check -------------------------------------------------------------------------------------------------


def test_a_wrong_recipe_is_found_out(tmp_path: Path) -> None:
    seen, truth = recording(tmp_path)
    known = read(seen, task(), truth)
    right, wrong = (replays(task(), known, gl.LocalTraining(lr=lr)) for lr in (0.5, 0.05))
    assert [reproduced(error, one.seen, TRAINING) for error, one in zip(right.values(), known)] == ["yes", "yes"]
    assert [reproduced(error, one.seen, TRAINING) for error, one in zip(wrong.values(), known)] == ["no", "no"]
    assert "reproduces 2 of 2 updates" in replay_text(right, known, TRAINING)
    assert "10 times as long as the replay's hints at another learning rate" in replay_text(wrong, known, TRAINING)


def test_shuffled_batches_are_nearly_reproduced(tmp_path: Path) -> None:
    seen, truth = recording(tmp_path, sizes=(8,), lr=0.05, epochs=1, batch_size=2)
    known = read(seen, task(), truth)
    recipe = gl.LocalTraining(lr=0.05, epochs=1, batch_size=2)
    error = replays(task(), known, recipe)
    assert reproduced(error["round0001-node0"], known[0].seen, recipe) == "nearly"
    assert "the order of batches" in replay_text(error, known, recipe)


# --- without the truth ------------------------------------------------------------------------------------------------


def test_without_the_truth_nothing_claims_to_know_it(tmp_path: Path) -> None:
    seen, _ = recording(tmp_path)
    knows = gl.Knowledge(training=TRAINING)
    attacks = ("second-order", "ig:steps=3")
    found = blind(task(), read(seen, task()), attacks, knows, tmp_path / "out", engine=ENGINE)
    words = {(row["attack"], row["observation"]): row["word"] for row in found}
    assert words["second-order", "round0001-node0"] == "determined"
    assert words["ig:steps=3", "round0001-node0"] == "inconclusive"
    best = next(row for row in found if row["attack"] == "second-order")
    assert best["labels"] == {"y": [0]}
    assert best["certificate"]["verdict"] == "determined"
    assert best["replay"]["error"] < 1e-3
    assert best["objective"] is not None
    assert not any(name in row for row in found for name in ("scores", "hits", "psnr"))
    assert (tmp_path / "out" / "second-order" / "reconstruction.png").stat().st_size > 100
    text = summary(found)
    assert "how close the pictures are; nothing here says that a client is safe" in text
    assert "says nothing about the client's safety" in text
    lines = (tmp_path / "out" / "findings.jsonl").read_text().splitlines()
    assert len(lines) == 4

    again = blind(task(), read(seen, task()), attacks, knows, tmp_path / "out", engine=ENGINE)
    assert again == found
    assert len((tmp_path / "out" / "findings.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "shape", "drawn"),
    [
        ("x", (1, 2, 2), True),
        ("x", (3, 2, 2), True),
        ("x", (5,), False),
        ("x", (2, 4, 4), False),
        ("z", (1, 2, 2), False),
    ],
)
def test_a_sheet_is_drawn_only_where_x_is_an_image(
    tmp_path: Path, name: str, shape: tuple[int, ...], drawn: bool
) -> None:
    values = torch.rand(2, 1, *shape, generator=torch.Generator().manual_seed(0))
    result = reconstruction(torch.ones(3, 2, 1), batch={name: values}, fields={name: gl.Field(shape)})
    files = write(result, tmp_path / "out")
    assert [file.name for file in files] == ["reconstruction.safetensors", *["reconstruction.png"] * drawn]
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    assert torch.equal(load_file(files[0])[name], values)


def test_what_is_no_picture_is_not_drawn_nor_called_one(tmp_path: Path) -> None:
    """Noise has the shape of a picture, but no bounds. Findings about vectors speak of reconstructions."""
    result = reconstruction(
        torch.ones(3, 2, 1), batch={"x": torch.randn(2, 1, 1, 2, 2)}, fields={"x": gl.Field((1, 2, 2), UNBOUNDED)}
    )
    assert [file.name for file in write(result, tmp_path / "noise")] == ["reconstruction.safetensors"]
    fields = {"x": gl.Field((4,), UNBOUNDED), "y": gl.Field((), classes=2)}
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    vectors = gl.Task(model, Supervised(nn.functional.cross_entropy), fields)
    batch = {"x": torch.ones(1, 4), "y": torch.tensor([1])}
    seen = gl.observe(vectors, batch, gl.LocalTraining(lr=0.1))
    knows = gl.Knowledge(training=gl.LocalTraining(lr=0.1))
    found = blind(vectors, [Recorded("one", seen)], ["idlg:steps=2"], knows, tmp_path / "out", engine=ENGINE)
    assert found[0]["kind"] == "vector"
    assert "how close the reconstructions are" in summary(found)
    assert "pictures" not in summary(found)


# --- what is in the folders -------------------------------------------------------------------------------------------


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="holds no observations"):
        read(tmp_path, task())
    seen, truth = recording(tmp_path)
    with pytest.raises(AuditError, match="none of them of round"):
        read(seen, task(), truth, rounds=[9])
    with pytest.raises(AuditError, match="There is no folder"):
        read(seen, task(), tmp_path / "none")
    save_file({"x": torch.zeros(2, *SHAPE), "y": torch.zeros(2)}, truth / "round0001-node0.safetensors")
    with pytest.raises(AuditError, match="the client said it trained on 1"):
        read(seen, task(), truth)
    save_file({"x": torch.zeros(1, *SHAPE)}, truth / "round0001-node0.safetensors")
    with pytest.raises(AuditError, match="lacks y"):
        read(seen, task(), truth)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(AuditError, match="None of the observations has its examples"):
        RecordedAudit.of(task(), read(seen, task(), empty), (WORKS,), TRAINING, others())


def test_examples_may_come_as_npz(tmp_path: Path) -> None:
    seen, truth = recording(tmp_path, sizes=(1,))
    x, y = private(1)
    (truth / "round0001-node0.safetensors").unlink()
    np.savez(truth / "round0001-node0.npz", x=x.numpy(), y=y.numpy())
    [one] = read(seen, task(), truth)
    assert one.truth is not None
    assert torch.equal(one.truth["x"], x)


# --- the command ------------------------------------------------------------------------------------------------------


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["audit", *words], catch_exceptions=False)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, truth = recording(tmp_path)
    (tmp_path / "app.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    common = ("--observations", str(seen), "--task", "app.py:task", "-a", WORKS, "--lr", "0.5", "--device", "cpu")
    told = {"wrapper": "SomeDP", "says": "noise", "guarantee": {"text": "no formal guarantee (central noise)"}}
    (seen / "recording.json").write_text(json.dumps({"privacy": [told]}))
    done = command(*common, "--truth", str(truth), "--data", "app.py:others", "-o", "out")
    assert done.exit_code == 0, done.output
    assert "2 observations in" in done.output
    assert "Privacy of the recorded strategy: SomeDP: noise. no formal guarantee (central noise)" in done.output
    assert "reproduces 2 of 2 updates" in done.output
    assert "leaks" in done.output
    assert (tmp_path / "out" / "report.html").exists()
    assert AuditResult.load(tmp_path / "out").complete
    crossed = command(*common, "--truth", str(truth), "--data", "app.py:others", "-o", "out", "--fail-above", "0.1")
    assert crossed.exit_code == 1

    for words in (("--ray", "auto"), ("--fail-above", "0.1")):
        refused = command(*common, "-o", "refused", *words)
        assert refused.exit_code == 2
        assert words[0] in refused.output + refused.stderr
    quiet = command(*common, "-o", "quiet")
    assert quiet.exit_code == 0
    assert "nothing here says that a client is safe" in quiet.output
    assert (tmp_path / "quiet" / "findings.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--observations", "seen"), "--task FILE.py:task"),
        (("--observations", "seen", "--task", "app.py:task", "--targets", "3"), "--targets is for audits"),
        (("--observations", "seen", "--task", "app.py:task", "--truth", "truth"), "--lr"),
        (("--observations", "seen", "--task", "app.py:task", "--truth", "truth", "--lr", "1"), "--data NAME"),
        (("--observations", "seen", "--task", "app.py:task", "-d", "fedsam,clipping"), "one defence"),
        (("--truth", "truth"), "--truth goes with --observations"),
        (("--ray-gpus", "1", "--data", "mnist-samples", "-a", WORKS), "--ray auto"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_said(
    words: tuple[str, ...], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recording(tmp_path)
    (tmp_path / "app.py").write_text(FILE)
    done = command(*words)
    assert done.exit_code == 2
    assert wanted in done.output
