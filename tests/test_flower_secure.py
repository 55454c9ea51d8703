"""Secure aggregation over Flower's messages, in one process: every message is what a deployment would send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradleak as gl
from conftest import largest_difference, tiny
from gradleak.core import tree
from gradleak.federation import Federation

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from flwr.app import ArrayRecord, Context, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from gradleak import flower, secure  # noqa: E402
from gradleak.flower.secure import RECORD  # noqa: E402
from test_flower import clients_of, data, plain, recorded, statuses  # noqa: E402

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::gradleak.flower.SensitiveRecording")]

TRAINING = gl.LocalTraining(lr=0.1, steps=2)


class Watched(flower.InProcess):
    """A grid that keeps every reply, and nodes of which some are silent from a stage on."""

    def __init__(self, *args: Any, silent: dict[int, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.silent, self.replies = silent or {}, []  # type: dict[int, str], list[Message]

    def _answer(self, message: Message, context: Context) -> Message:
        reply = super()._answer(message, context)
        self.replies.append(reply)
        return reply

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        stages = {str(one.content.config_records[RECORD]["stage"]) for one in messages if RECORD in one.content}
        self.unreachable |= {node for node, stage in self.silent.items() if stage in stages}
        return super().push_messages(messages)


def federation_of(clients: int) -> Federation:
    return Federation(clients=clients, training=TRAINING, examples=None, weighting="uniform")


def parts(clients: int = 4, clip: float = 1.0, **settings: Any) -> tuple[gl.Task, Any, ClientApp]:
    """Task, agreement and app: one app serves all clients, by their partition."""
    task, held = tiny(), data(clients)
    identities = [secure.Identity.create() for _ in range(clients)]
    roster = secure.Roster.of({number: one.public for number, one in enumerate(identities)})
    agreement = flower.Agreement(roster, clip, **settings)

    def number(context: Context) -> int:
        return int(context.node_config["partition-id"])

    client = flower.SecureClient(agreement, task, number, lambda context: identities[number(context)])
    app = clients_of(task, federation_of(clients), held, mods=[client])
    app.query("secure")(client.answer)
    return task, agreement, app


def start(strategy: Any, grid: Any, task: gl.Task, rounds: int = 1) -> Any:
    return strategy.start(grid, ArrayRecord(dict(task.model.state_dict())), num_rounds=rounds, timeout=5)


def plainly(task: gl.Task, clients: int, who: list[int]) -> dict[str, torch.Tensor]:
    """The mean update of these clients, in the clear."""
    federation, held = federation_of(clients), data(clients)
    found = [
        gl.observe(task, held.batch(federation.partition(held)[client]), TRAINING, wire="weights").update
        for client in who
    ]
    return tree.scale({name: sum(update[name] for update in found) for name in found[0]}, 1 / len(who))


def test_the_server_gets_the_mean_and_nothing_else(tmp_path: Path) -> None:
    task, agreement, app = parts()
    strategy = flower.SecureAggregation(plain(), agreement, task)
    tap = flower.Tap(strategy, keep="aggregate", out=tmp_path / "seen", task=task)
    grid = Watched(app, 4)
    result = start(tap, grid, task, rounds=2)
    assert strategy.trouble == {1: [], 2: []}
    seen = recorded(tmp_path / "seen")
    assert list(seen) == ["round0001", "round0002"]
    assert (seen["round0001"].clients, seen["round0001"].num_examples) == (4, 16)
    assert largest_difference(seen["round0001"].update, plainly(task, 4, [0, 1, 2, 3])) < 1e-12
    assert result.train_metrics_clientapp[2]["num-examples"] == 16
    assert len(grid.replies) == 2 * 4 * 4
    for reply in grid.replies:  # no weights, no metrics, no loss: masked bytes and keys
        assert not reply.content.array_records
        assert not reply.content.metric_records
        assert list(reply.content.config_records) == [RECORD]


def test_masked_values_show_nothing_of_an_update() -> None:
    """The words that a client sends are spread over the whole ring; those of two rounds differ everywhere."""
    task, agreement, app = parts()
    grid = Watched(app, 4)
    start(flower.SecureAggregation(plain(), agreement, task), grid, task, rounds=1)
    size = (tree.size(task.weights()) + 1) * 8
    masked = [reply.content[RECORD]["content"] for reply in grid.replies]
    masked = [one for one in masked if len(one) > size]
    words = np.concatenate([np.frombuffer(one[-size - 64 : -64], "<u8") for one in masked if len(one) < 2 * size])
    assert len(words) >= 4 * 91
    high = (words >> np.uint64(63)).mean()
    assert 0.4 < high < 0.6
    plain_words = np.abs(secure.flat(plainly(task, 4, [0]))).max()
    assert plain_words < 1.0  # in the clear they would fill a small part of the ring, near both of its ends


@pytest.mark.parametrize("stage", ["SHARE", "MASK", "UNMASK"])
def test_a_client_that_drops_out_is_made_up_for(stage: str, tmp_path: Path) -> None:
    task, agreement, app = parts()
    strategy = flower.SecureAggregation(plain(), agreement, task)
    tap = flower.Tap(strategy, keep="aggregate", out=tmp_path / "seen", task=task)
    start(tap, Watched(app, 4, silent={2: stage}), task)
    [seen] = recorded(tmp_path / "seen").values()
    who = [0, 1, 2, 3] if stage == "UNMASK" else [0, 2, 3]  # node 2 is client 1; its values had arrived by then
    assert seen.clients == len(who)
    assert largest_difference(seen.update, plainly(task, 4, who)) < 1e-12
    if stage == "MASK":
        assert statuses(tap.folder)[1, 2] == "no reply"
    else:
        assert any("node 2 did not answer" in line for line in strategy.trouble[1])


def test_below_the_threshold_there_is_no_sum_and_the_model_stays(tmp_path: Path) -> None:
    task, agreement, app = parts()
    strategy = flower.SecureAggregation(plain(), agreement, task)
    tap = flower.Tap(strategy, keep="aggregate", out=tmp_path / "seen", task=task)
    result = start(tap, Watched(app, 4, silent={2: "MASK", 3: "MASK"}), task)
    assert not result.arrays
    assert strategy.aggregated is None
    assert any("ask for 3" in line for line in strategy.trouble[1])
    assert not recorded(tmp_path / "seen")
    assert [row["status"] for row in flower.rows_of(tap.folder) if row.get("node", 0) is None] == ["not aggregated"]


def test_an_update_beyond_the_clip_does_not_leave() -> None:
    """The client refuses, and drops out; the others' sum is theirs."""
    task, agreement, app = parts(clip=1e-6)
    strategy = flower.SecureAggregation(plain(), agreement, task)
    grid = Watched(app, 4)
    start(strategy, grid, task)
    assert any("clip" in line for line in strategy.trouble[1])
    assert not any(len(reply.content[RECORD]["content"]) > 728 for reply in grid.replies[8:] if reply.has_content())


def test_a_client_that_was_lost_joins_the_next_round() -> None:
    task, agreement, app = parts()
    grid = Watched(app, 4, silent={2: "MASK"})
    strategy = flower.SecureAggregation(plain(), agreement, task)
    start(strategy, grid, task)
    assert strategy.aggregated == (3, 12)
    grid.silent, grid.unreachable = {}, set()
    arrays = ArrayRecord(dict(task.model.state_dict()))
    from flwr.app import ConfigRecord

    messages = strategy.configure_train(2, arrays, ConfigRecord(), grid)
    strategy.aggregate_train(2, grid.send_and_receive(messages))
    assert strategy.aggregated == (4, 16)


def test_a_state_is_used_once() -> None:
    """A server that asks a client to unmask twice gets an error: two answers could show a client's values."""
    task, agreement, app = parts()
    grid = Watched(app, 4)
    strategy = flower.SecureAggregation(plain(), agreement, task)
    sent: list[Message] = []
    push = grid.push_messages

    def kept(messages: Any) -> Any:
        messages = list(messages)
        sent.extend(messages)
        return push(messages)

    grid.push_messages = kept  # type: ignore[method-assign]
    start(strategy, grid, task)
    again = list(grid.send_and_receive([sent[-1]]))
    assert again[0].has_error()
    assert "has not advertised keys" in again[0].error.reason
