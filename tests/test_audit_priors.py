"""Audits with a generator from a file, and never with one that saw the targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradleak as gl
from gradleak import generators
from gradleak.audit import AuditError
from gradleak.core.configuration import digest
from gradleak.generators import Card
from gradleak.generators.files import fingerprints
from test_federated_diffusion import command

TASK = """
import torch
import gradleak as gl
from gradleak.models import mlp

torch.manual_seed(0)
x, y = torch.rand(24, 1, 8, 8), torch.arange(24) % 3
network = mlp(shape=(1, 8, 8), classes=3, widths=(6,), activation="sigmoid")
task = gl.Task.supervised(network, torch.nn.functional.cross_entropy, like=(x[:1], y[:1]))
audit = gl.Audit(task, (x, y), attacks=["gifd:steps=3,features=1,restarts=1"], targets=2)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(TASK)
    return tmp_path


def written(images: torch.Tensor | None) -> Path:
    torch.manual_seed(1)
    network = generators.DCGAN(latent=4, width=2, shape=(1, 8, 8))
    card = Card(data="public images", images=None if images is None else fingerprints(images))
    return generators.save(network, Path("prior.safetensors"), card)


def test_an_audit_takes_a_generator_and_can_be_repeated_from_its_file(home: Path) -> None:
    written(torch.rand(5, 1, 8, 8))
    told = command("audit", "own.py:audit", "--generator", "prior.safetensors", "-o", "one", "--quick")
    assert "gifd" in told
    result = gl.AuditResult.load("one")
    assert {row["status"] for row in result.rows} == {"done"}
    space: dict[str, object] = {}
    exec(TASK, space)
    again = gl.audit.from_settings(result.settings, task=space["task"], data=(space["x"], space["y"]))  # type: ignore[arg-type]
    assert digest(again.generator) == digest(generators.load("prior.safetensors"))


def test_without_a_generator_it_says_what_is_missing(home: Path) -> None:
    assert "generator" in command("audit", "own.py:audit", "-o", "none", "--quick", code=2)


def test_a_generator_that_saw_the_targets_is_refused(home: Path) -> None:
    space: dict[str, object] = {}
    exec(TASK, space)
    audit, x = space["audit"], space["x"]
    assert isinstance(audit, gl.Audit)
    assert isinstance(x, torch.Tensor)
    from dataclasses import replace

    knowing = replace(audit, generator=generators.load(written(x)), trial=True)
    with pytest.raises(AuditError, match="trained on 2 of the 2 images"):
        knowing.run()
    replace(knowing, generator=generators.load(written(x.flip(-1)))).run()  # others: nothing to object
    replace(knowing, generator=generators.load(written(None))).run()  # it does not say
