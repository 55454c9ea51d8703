"""The gate as a Flower mod: nothing leaves that gives images away, and the server is not told why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import private, tiny
from gradleak.audit import gate as gates
from gradleak.audit.gate import Decision, Policy
from gradleak.core import tree

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from gradleak import flower  # noqa: E402
from gradleak.flower.gate import HELD_BACK  # noqa: E402
from test_flower import plain, recorded, start, statuses  # noqa: E402

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::gradleak.flower.SensitiveRecording")]

TRAINING = gl.LocalTraining(lr=0.5)
KNOWS = gl.Knowledge(training=TRAINING)


def batch_of(message: Message, context: Context) -> Any:
    return private(1, seed=int(context.node_config["partition-id"]))


def clients(task: gl.Task, gate: Any) -> ClientApp:
    app = ClientApp()

    @app.train(mods=[gate])
    def train(message: Message, context: Context) -> Message:
        return flower.train(message, context, task, batch_of(message, context), TRAINING)

    return app


def run(task: gl.Task, gate: Any, folder: Path, nodes: int = 2) -> Any:
    tap = flower.Tap(plain(min_train_nodes=1, min_available_nodes=1), out=folder, task=task)
    return start(tap, clients(task, gate), task, nodes=nodes, rounds=1)


def test_what_can_be_inverted_stays_on_the_client_and_the_server_is_not_told_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = tiny()
    gate = flower.Gate(task, knows=KNOWS, batch=batch_of, engine=gl.Engine(device="cpu"))
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.INFO):
        run(task, gate, tmp_path / "seen")
    assert set(statuses(tmp_path / "seen").values()) == {"error"}
    assert recorded(tmp_path / "seen") == {}
    told = (tmp_path / "seen" / "record.jsonl").read_text()
    assert HELD_BACK in told
    assert "dB" not in told
    assert any("BLOCK" in line and "dB" in line for line in caplog.messages)  # the client's own log has the reason


@pytest.mark.parametrize("norm", [None, "train"])
@pytest.mark.parametrize(("action", "shift"), [("allow", 0.0), ("noise", 1.0)])
def test_what_is_allowed_leaves_as_it_was_and_what_is_noised_leaves_noised(
    action: str, shift: float, norm: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tiny(norm=norm)
    judged: list[gl.Observation] = []

    def decide(task: Any, seen: gl.Observation, policy: Policy, **given: Any) -> Decision:
        judged.append(seen)
        return Decision(action, "Told.", tree.map(lambda value: value + shift, seen.update), 0.0)

    monkeypatch.setattr("gradleak.flower.gate.check", decide)
    run(task, flower.Gate(task, knows=KNOWS), tmp_path / "seen", nodes=1)
    [seen], [mine] = recorded(tmp_path / "seen").values(), judged
    off = tree.flatten(tree.subtract(seen.update, mine.update))
    assert torch.allclose(off, torch.full_like(off, shift), atol=1e-9)
    if norm == "train":
        assert seen.returned_buffers is not None
        assert seen.buffers is not None
        kept = [torch.equal(seen.returned_buffers[name], seen.buffers[name]) for name in seen.buffers]
        assert all(kept) is (action == "noise")  # noise is on the update alone: the server gets its own statistics back


@pytest.mark.parametrize("broken", ["check", "batch", "reply"])
def test_whatever_goes_wrong_blocks(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tiny()

    def fail(*given: Any, **settings: Any) -> Any:
        raise RuntimeError("private figure 31.4")

    if broken == "check":
        monkeypatch.setattr(gates, "_finding", fail)
    gate = flower.Gate(task, knows=KNOWS, batch=fail if broken == "batch" else None)
    app = ClientApp()

    @app.train(mods=[gate])
    def train(message: Message, context: Context) -> Message:
        reply = flower.train(message, context, task, batch_of(message, context), TRAINING)
        if broken == "reply":  # no num-examples, and half a model
            arrays = reply.content["arrays"]
            half = ArrayRecord(dict(list(arrays.items())[:1]))
            return Message(RecordDict({"arrays": half, "metrics": MetricRecord({})}), reply_to=message)
        return reply

    tap = flower.Tap(plain(min_train_nodes=1, min_available_nodes=1), out=tmp_path / "seen", task=task)
    start(tap, app, task, nodes=1, rounds=1)
    assert set(statuses(tmp_path / "seen").values()) == {"error"}
    told = (tmp_path / "seen" / "record.jsonl").read_text()
    assert HELD_BACK in told
    assert "31.4" not in told
