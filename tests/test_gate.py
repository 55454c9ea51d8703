"""The client-side gate: it blocks what leaks, in doubt it blocks, and noise is attacked before it passes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

import gradleak as gl
from conftest import private, tiny
from gradleak.attack.checks import Checks
from gradleak.audit.gate import BadPolicy, Policy, check
from gradleak.cli import app
from gradleak.core import tree
from gradleak.defences import LocalGaussian, Pruning
from gradleak.identify.risk import risk
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.kinds import Column, Table
from gradleak.scenario.observation import Knowledge
from gradleak.scenario.task import Field, Supervised

ONE = LocalTraining(lr=0.5)
KNOWS = Knowledge(training=ONE)
CPU = gl.Engine(device="cpu")


def update(defence: Any = None, examples: int = 1) -> tuple[gl.Task, gl.Observation, dict[str, torch.Tensor]]:
    task, batch = tiny(), private(examples)
    return task, gl.observe(task, batch, ONE, defence), batch


def searched(residual: float) -> Any:
    """As `auto` answers after a search that converged with this residual, where there are no examples to compare."""
    tried = [{"member": "ig", "outcome": "ran"}]
    return SimpleNamespace(
        match=torch.tensor([[residual]]), settings={"winner": ["ig"], "tried": tried}, checks=Checks((), (True,))
    )


# --- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_batch", [True, False])
def test_an_update_that_can_be_inverted_is_blocked(with_batch: bool) -> None:
    task, seen, batch = update()
    found = check(task, seen, knows=KNOWS, batch=batch if with_batch else None, engine=CPU)
    assert found.action == "block"
    assert found.update is None
    assert ("come back" if with_batch else "reproduces the update") in found.reason


@pytest.mark.parametrize(("converged", "action"), [(True, "allow"), (False, "block")])
def test_what_withstood_working_attacks_is_allowed_and_what_met_none_is_not(
    converged: bool, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradleak.audit import gate

    noise = LocalGaussian(sigma=3.0)
    task, seen, batch = update(noise)
    knows = replace(KNOWS, defence=noise)
    blurred = gl.attacks.get("ig", steps=3).run(task, seen, knows, engine=CPU)

    class Searched:
        """As `auto` answers, with a search that went well or did not."""

        settings: ClassVar = {"winner": ["ig"], "tried": [{"member": "ig", "outcome": "ran"}]}
        checks = Checks((), (converged,))
        match, batch, fields, diverged = blurred.match, blurred.batch, blurred.fields, blurred.diverged
        chosen = blurred.chosen

    monkeypatch.setattr(gate.Auto, "run", lambda *given, **settings: Searched())
    found = check(task, seen, knows=knows, batch=batch, engine=CPU)
    assert found.figures["psnr"] < 18
    assert found.action == action
    assert (found.update is seen.update) is converged
    assert ("no proof of safety" if converged else "shows nothing") in found.reason


def test_noise_is_fresh_attacked_again_and_sent_only_if_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradleak.audit import gate

    task, seen, batch = update()
    asked: list[Knowledge] = []

    def finding(update: gate.Update, seconds: float) -> Any:
        asked.append(update.knows)
        return gate.Finding(len(asked) % 2 == 1, "Told.")

    monkeypatch.setattr(gate, "_finding", finding)
    first, second = (check(task, seen, Policy(on_leak="noise", noise=0.5), knows=KNOWS, batch=batch) for _ in range(2))
    assert (first.action, second.action) == ("noise", "noise")
    assert isinstance(asked[1].defence, LocalGaussian)  # whoever attacks the noised update knows the noise
    added = [tree.subtract(each.update, seen.update) for each in (first, second) if each.update is not None]
    share = float(tree.norm(added[0])) / float(tree.norm(seen.update))
    assert share == pytest.approx(0.5, rel=0.3)
    assert not torch.equal(tree.flatten(added[0]), tree.flatten(added[1]))
    monkeypatch.setattr(gate, "_finding", lambda *rest: gate.Finding(True, "Told."))
    assert check(task, seen, Policy(on_leak="noise"), knows=KNOWS, batch=batch).action == "block"


def test_noise_is_not_trusted_where_no_examples_can_judge_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise alone keeps an attack from explaining an update: without examples that looks like safety."""
    from gradleak.audit import gate

    task, seen, _ = update()
    answers = iter([True, False])
    monkeypatch.setattr(gate, "_finding", lambda *rest: gate.Finding(next(answers), "Told."))
    found = check(task, seen, Policy(on_leak="noise"), knows=KNOWS)
    assert (found.action, found.update) == ("block", None)
    assert "without the client's examples" in found.reason


# --- closed -----------------------------------------------------------------------------------------------------------


def test_whatever_goes_wrong_blocks() -> None:
    task, seen, batch = update()
    other = replace(seen, update=tree.zeros_like(seen.update))
    assert check(task, other, knows=KNOWS, engine=CPU).action == "block"
    foreign = gl.observe(gl.Task.supervised(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).double(),
        torch.nn.functional.cross_entropy, like=(batch["x"], batch["y"])), batch, ONE)  # fmt: skip
    broken = check(task, foreign, knows=KNOWS, engine=CPU)
    assert broken.action == "block"
    assert "could not be made" in broken.reason


def test_time_that_is_over_blocks() -> None:
    task, seen, batch = update(LocalGaussian(sigma=3.0))
    found = check(task, seen, knows=KNOWS, batch=batch, seconds=1e-3, engine=CPU)
    assert found.action == "block"
    assert found.seconds < 10


def test_an_attack_that_ends_late_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is looked at between steps: what ran over it is late, whatever each member says of itself."""
    from gradleak.audit import gate

    def late(*given: Any, **settings: Any) -> Any:
        time.sleep(0.2)
        return searched(0.5)

    task, seen, _ = update()
    monkeypatch.setattr(gate.Auto, "run", late)
    found = check(task, seen, knows=KNOWS, seconds=0.1, engine=CPU)
    assert found.action == "block"
    assert "ended later" in found.reason


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (lambda batch: {**batch, "x": batch["x"] * torch.nan}, "not finite"),
        (lambda batch: {**batch, "x": batch["x"] * 255}, "outside the task's bounds"),
        (lambda batch: {name: value.repeat_interleave(2, 0) for name, value in batch.items()}, "2 were given"),
        (lambda batch: {"y": batch["y"]}, "could not be made"),
        (lambda batch: {**batch, "x": batch["x"][..., :2]}, "could not be made"),
        (lambda batch: private(1, seed=7), "do not make this update"),
    ],
    ids=["nan", "range", "number", "fields", "shape", "another round's"],
)
def test_examples_that_are_not_those_of_the_update_do_not_open_the_gate(odd: Any, message: str) -> None:
    """Scores against other images would be low, and the update, which gives everything away, would pass."""
    task, seen, batch = update()
    found = check(task, seen, knows=KNOWS, batch=odd(batch), engine=CPU)
    assert found.action == "block"
    assert message in found.reason


@pytest.mark.parametrize(("residual", "action"), [(0.01, "block"), (0.5, "allow")])
def test_images_that_explain_nearly_all_of_an_update_close_the_gate_without_examples(
    residual: float, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First-order attacks never reach rounding, and show the image all the same."""
    from gradleak.audit import gate

    task, seen, _ = update()
    monkeypatch.setattr(gate.Auto, "run", lambda *given, **settings: searched(residual))
    assert check(task, seen, knows=KNOWS, engine=CPU).action == action
    assert check(task, seen, Policy(residual=1e-3), knows=KNOWS, engine=CPU).action == "allow"


def test_whoever_attacks_the_noised_update_still_knows_the_defence(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradleak.audit import gate

    pruning = Pruning(keep=0.5)
    task, seen, batch = update(pruning)
    asked: list[Knowledge] = []

    def finding(update: gate.Update, seconds: float) -> Any:
        asked.append(update.knows)
        return gate.Finding(len(asked) == 1, "Told.")

    monkeypatch.setattr(gate, "_finding", finding)
    check(task, seen, Policy(on_leak="noise"), knows=replace(KNOWS, defence=pruning), batch=batch)
    assert isinstance(asked[1].defence, gl.Chain)
    assert asked[1].defence.members[0] is pruning


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("residual = 1.5", "between 0 and 1"),
        ("ssim = 2.0", "between 0 and 1"),
        ("psnr = 1000.0", "between 0 and 60"),
        ('undecided = "allow"', "fails closed"),
        ('on_leak = "allow"', "fails closed"),
        ("noise = 0.0", "above 0"),
        ("psnr = nan", "finite"),
        ('preset = "quik"', "Did you mean 'quick'"),
        ("psrn = 3", "Did you mean 'psnr'"),
        ("psnr = ", "cannot be read"),
    ],
)
def test_a_policy_that_would_open_the_gate_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(BadPolicy, match=message):
        Policy.load(path)
    with pytest.raises(BadPolicy, match="cannot be read"):
        Policy.load(tmp_path / "missing.toml")


# --- the risk score ---------------------------------------------------------------------------------------------------


def test_the_risk_falls_with_noise_and_with_the_size_of_the_batch() -> None:
    task = tiny()
    noises = [LocalGaussian(sigma=sigma) for sigma in (1e-4, 1e-1)]
    quiet, loud = (
        risk(task, gl.observe(task, private(1), ONE, noise), replace(KNOWS, defence=noise), engine=CPU)
        for noise in noises
    )
    one, many = (risk(task, gl.observe(task, private(n), ONE), KNOWS, engine=CPU) for n in (1, 12))
    assert one.score > quiet.score > loud.score >= 0
    assert one.score > many.score  # 91 equations for 192 unknowns
    assert (one.unknowns, many.unknowns, one.directions) == (16, 192, 16)
    assert 0 < one.effective_rank <= 1


def test_the_effective_rank_is_that_of_the_derivative_under_equal_noise() -> None:
    """(sum s^2)^2 / sum s^4 over the number of pixels; J = dg/dx by autograd."""
    task, batch, noise = tiny(), private(1), LocalGaussian(sigma=0.1)
    seen = gl.observe(task, batch, ONE, noise)
    found = risk(task, seen, replace(KNOWS, defence=noise), batch=batch, engine=CPU)

    def of_pixels(x: torch.Tensor) -> torch.Tensor:
        return tree.flatten(task.gradient(task.weights(), {**batch, "x": x}))

    jacobian = torch.autograd.functional.jacobian(of_pixels, batch["x"]).flatten(1)  # (parameters, pixels)
    squares = torch.linalg.svdvals(jacobian).square()
    assert found.effective_rank == pytest.approx(float(squares.sum() ** 2 / squares.square().sum()) / 16, rel=1e-3)


def test_a_few_directions_stand_for_all() -> None:
    task, batch = tiny(), private(4)
    seen = gl.observe(task, batch, ONE)
    every, some = (risk(task, seen, KNOWS, directions=k, engine=CPU) for k in (64, 32))
    assert (every.directions, some.directions) == (64, 32)
    assert some.score == pytest.approx(every.score, rel=0.25)
    with pytest.raises(ValueError, match="directions must be"):
        risk(task, seen, KNOWS, directions=1)


def test_most_bits_block_before_any_attack() -> None:
    task, seen, _ = update()
    found = check(task, seen, Policy(most_bits=1.0), knows=KNOWS, engine=CPU)
    assert found.action == "block"
    assert "bits per pixel" in found.reason
    assert "winner" not in found.figures


# --- the command ------------------------------------------------------------------------------------------------------

TASK = """
import sys
sys.path.insert(0, {tests!r})
from conftest import private, tiny
task, batch = tiny(), private(1)
"""


def test_the_command_fails_closed(tmp_path: Path) -> None:
    task, seen, _ = update()
    (tmp_path / "train.py").write_text(TASK.format(tests=str(Path(__file__).parent)))
    file, policy = seen.save(tmp_path / "update.safetensors"), tmp_path / "policy.toml"
    policy.write_text('on_leak = "block"\nundecided = "block"\npsnr = 18.0\n')
    words = ["gate", str(file), "--task", f"{tmp_path}/train.py:task", "--lr", "0.5", "--max-seconds", "20"]
    out = tmp_path / "sent.safetensors"
    told = CliRunner().invoke(app, [*words, "--policy", str(policy), "--device", "cpu", "-o", str(out)])
    assert told.exit_code == 1, told.output
    assert told.output.startswith("BLOCK.")
    assert not out.exists()
    policy.write_text('undecided = "allow"\n')
    refused = CliRunner().invoke(app, [*words, "--policy", str(policy)])
    assert refused.exit_code == 2
    assert "fails closed" in refused.output
    own = CliRunner().invoke(app, [*words, "--data", f"{tmp_path}/train.py:batch", "--device", "cpu"])
    assert own.exit_code == 1
    assert "come back" in own.output


def test_what_is_allowed_is_written_with_the_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradleak.audit import gate

    _, seen, _ = update()
    (tmp_path / "train.py").write_text(TASK.format(tests=str(Path(__file__).parent)))
    file, out = seen.save(tmp_path / "update.safetensors"), tmp_path / "sent.safetensors"
    monkeypatch.setattr(gate, "_finding", lambda *rest: gate.Finding(False, "Told."))
    words = ["gate", str(file), "--task", f"{tmp_path}/train.py:task", "--device", "cpu", "-o", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert out.read_bytes() == file.read_bytes()
    assert json.loads(out.with_suffix(".json").read_text())["action"] == "allow"


# --- other kinds of data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("off", "action"), [(0.0, "block"), (0.2, "block"), (0.5, "allow")])
def test_a_row_of_a_table_comes_back_when_every_column_does(
    off: float, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thresholds are those of tables; the policy's PSNR and SSIM are of images. `off`: error of one column."""
    table = Table((Column("age"), Column("job", ("none", "full"))))
    fields = {"x": Field((3,), table.limits(), kind=table), "y": Field((), classes=2)}
    task = gl.Task(torch.nn.Linear(3, 2), Supervised(torch.nn.functional.cross_entropy), fields)
    batch = {"x": torch.tensor([[0.3, 0.0, 1.0]]), "y": torch.tensor([1])}
    guess = {"x": (batch["x"] + torch.tensor([off, 0.1, -0.2]))[None], "y": batch["y"][None]}
    answer = searched(0.5)
    answer.batch, answer.fields, answer.examples = guess, fields, (1,)
    monkeypatch.setattr("gradleak.audit.gate.Auto.run", lambda *_, **__: answer)
    found = check(task, gl.observe(task, batch, ONE), knows=KNOWS, batch=batch, engine=CPU)
    assert found.action == action
    assert found.figures["right"] == (1.0 if action == "block" else 0.5)
    told = {"block": "1 of 1 rows come back from this update, the clearest with 100% columns right.", "allow": "no row"}
    assert told[action] in found.reason
