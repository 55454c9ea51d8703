"""Flower in one process: the same strategy, ClientApp and mods as in a deployment, without its processes."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import largest_difference, private, tiny
from gradleak.audit.private import Stored
from gradleak.audit.recorded import read
from gradleak.core import tree
from gradleak.defences import DPSGD, TIP, Clipping, DPFedAvg, FedGF, FedSAM, LocalGaussian, Pruning, Soteria
from gradleak.federation import Federation
from gradleak.federation.rounds import Rounds

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod  # noqa: E402
from flwr.serverapp.strategy import (  # noqa: E402
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    Result,
)
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod  # noqa: E402
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant  # noqa: E402

from gradleak import flower  # noqa: E402
from gradleak.flower.recording import _view, entries_of  # noqa: E402

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::gradleak.flower.SensitiveRecording")]

TRAINING = gl.LocalTraining(lr=0.1, epochs=2, batch_size=2)


def data(clients: int = 3, each: int = 4) -> Stored:
    return Stored(private(clients * each))


def clients_of(
    task: gl.Task,
    federation: Federation,
    held: Stored,
    defence: gl.Defence | None = None,
    mods: list[Any] | None = None,
    before: Callable[[Message, Context], None] = lambda message, context: None,
    truth: Path | None = None,
) -> ClientApp:
    """Clients that train as those of the simulated federation do: the same rows, shuffles and noise."""
    app = ClientApp()
    shares = federation.partition(held)

    @app.train(mods=mods or [])
    def train(message: Message, context: Context) -> Message:
        before(message, context)
        number = int(message.content["config"]["server-round"]) - 1
        share = shares[context.node_config["partition-id"]]
        size = len(share) if federation.examples is None else federation.examples
        batch = held.batch(share[(torch.arange(size) + number * size) % len(share)])
        if truth is not None:
            flower.keep_truth(truth, message, context, batch)
        return flower.train(message, context, task, batch, federation.training, defence, seed=federation.seed)

    return app


def start(strategy: Any, app: ClientApp, task: gl.Task, nodes: int, rounds: int = 2, **grid: Any) -> Result:
    arrays = ArrayRecord(dict(task.model.state_dict()))
    return strategy.start(flower.InProcess(app, nodes, **grid), arrays, num_rounds=rounds, timeout=5)


def plain(**settings: Any) -> FedAvg:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FedAvg(**{"fraction_evaluate": 0.0, **settings})


def recorded(folder: Path) -> dict[str, gl.Observation]:
    return {path.stem: gl.Observation.load(path) for path in sorted(folder.glob("*.safetensors"))}


def statuses(folder: Path) -> dict[tuple[int, int], str]:
    rows = flower.rows_of(folder)
    return {(row["round"], row["node"]): row["status"] for row in rows if row.get("node") is not None}


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, "train"])
@pytest.mark.parametrize(
    "defence", [None, FedSAM(rho=0.05), LocalGaussian(clip=1.0, noise_multiplier=0.1)], ids=lambda d: type(d).__name__
)
def test_flower_is_the_simulation(tmp_path: Path, norm: str | None, defence: gl.Defence | None) -> None:
    """Losses, weights and observations of a Flower run are those of the simulated federation, to rounding."""
    task, held = tiny(norm=norm), data()
    federation = Federation(clients=3, training=TRAINING, examples=None, seed=7, wire="weights")
    tap = flower.Tap(plain(), out=tmp_path / "seen", task=task)
    result = start(tap, clients_of(task, federation, held, defence), task, nodes=3)

    work = Rounds(federation, task, held, defence, gl.Engine(device="cpu", batched=False))
    state, losses = work.first(), []
    sent = [state.weights]
    for _ in range(2):
        state, told = work.after(state)
        losses.append(told.loss)
        sent.append(state.weights)
    found = [result.train_metrics_clientapp[number]["train_loss"] for number in (1, 2)]
    assert found == pytest.approx(losses, rel=1e-12)
    final = dict(result.arrays.to_torch_state_dict())
    assert largest_difference({name: final[name] for name in state.weights}, state.weights) < 1e-12
    if norm == "train":
        assert largest_difference({name: final[name] for name in state.buffers}, state.buffers) < 1e-12

    seen = recorded(tmp_path / "seen")
    assert len(seen) == 6
    for client in range(3):
        batch = held.batch(federation.partition(held)[client])
        own = work._work(client, work.first())
        done = work.clients.run([own], work.first().weights, work.first().buffers, {})[client]
        assert done.upload is not None
        mine = seen[f"round0001-node{client + 1}"]
        assert largest_difference(mine.weights, sent[0]) == 0
        assert largest_difference(mine.update, done.upload.payload["update"]) < 1e-12
        assert mine.num_examples == len(batch["x"])
        assert mine.round == 1
        if norm == "train":
            assert mine.buffers is not None
            assert mine.returned_buffers is not None
            assert done.upload.buffers is not None or defence is not None
            assert largest_difference(mine.returned_buffers, done.upload.buffers or work.first().buffers) < 1e-12


def test_server_hooks_are_those_of_the_simulation(tmp_path: Path) -> None:
    """FedGF broadcasts a perturbed model from round to round: `Defended` and the simulation agree, extras are seen."""
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None, seed=3)
    defence = FedGF()
    strategy = flower.Defended(plain(), task, defence, federation)
    tap = flower.Tap(strategy, out=tmp_path / "seen", task=task, clients=1)
    result = start(tap, clients_of(task, federation, held, defence), task, nodes=3, rounds=3)
    work = Rounds(federation, task, held, defence, gl.Engine(device="cpu", batched=False))
    state = work.first()
    for _ in range(3):
        state, _ = work.after(state)
    assert largest_difference(dict(result.arrays.to_torch_state_dict()), state.weights) < 1e-12
    seen = recorded(tmp_path / "seen")
    assert sorted(seen) == ["round0001-node1", "round0002-node1", "round0003-node1"]
    assert seen["round0003-node1"].extras
    assert strategy.excluded == {1: {}, 2: {}, 3: {}}


def test_central_noise_of_a_defence_runs_on_the_server() -> None:
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None, seed=3)
    defence = DPFedAvg(clip=0.1, noise_multiplier=0.5)
    strategy = flower.Defended(plain(), task, defence, federation)
    result = start(strategy, clients_of(task, federation, held, defence), task, nodes=3, rounds=2)
    work = Rounds(federation, task, held, defence, gl.Engine(device="cpu", batched=False))
    state = work.first()
    for _ in range(2):
        state, _ = work.after(state)
    assert largest_difference(dict(result.arrays.to_torch_state_dict()), state.weights) < 1e-12


def test_memory_of_a_client_lasts_from_round_to_round() -> None:
    """A defence that remembers finds in round 2 what it kept in round 1; nodes do not share it."""

    @dataclass(frozen=True)
    class Counting(gl.Defence):
        def upload(self, upload: gl.Upload, client: Any) -> gl.Upload:
            times = client.memory.get("inner", {}).get("times", torch.zeros(()))
            return upload.map(lambda update: tree.scale(update, 1 / (1 + times)))

        def remember(self, before: gl.Upload, after: gl.Upload, client: Any) -> dict[str, Any]:
            return {"inner": {"times": client.memory.get("inner", {}).get("times", torch.zeros(())) + 1}}

    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    grid = flower.InProcess(clients_of(task, federation, held, Counting()), 3)
    plain().start(grid, ArrayRecord(dict(task.model.state_dict())), num_rounds=3)
    for context in grid.contexts.values():
        kept = context.state.array_records["gradleak.memory"]
        assert kept["inner/times"].numpy() == 3


# --- the tap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [plain, lambda: FedAdam(fraction_evaluate=0.0)], ids=["FedAvg", "FedAdam"])
def test_a_tap_changes_nothing(tmp_path: Path, strategy: Callable[[], Any]) -> None:
    task, held = tiny(dtype=torch.float32), Stored(private(12, dtype=torch.float32))
    federation = Federation(clients=3, training=TRAINING, examples=None)
    app = clients_of(task, federation, held)
    random.seed(0)  # the order in which Flower samples nodes is that in which it adds them up
    bare = start(strategy(), app, task, nodes=3)
    random.seed(0)
    tapped = start(flower.Tap(strategy(), out=tmp_path / "seen"), app, task, nodes=3)
    one, other = (dict(result.arrays.to_torch_state_dict()) for result in (bare, tapped))
    assert largest_difference(one, other) == 0
    assert str(bare.train_metrics_clientapp) == str(tapped.train_metrics_clientapp)


def test_rounds_and_clients_that_were_asked_for_are_recorded_and_no_others(tmp_path: Path) -> None:
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    tap = flower.Tap(plain(), rounds=[2, 4], clients=[2, 3], out=tmp_path / "seen")
    start(tap, clients_of(task, federation, held), task, nodes=3, rounds=4)
    names = {f"round000{number}-node{node}" for number in (2, 4) for node in (2, 3)}
    assert recorded(tmp_path / "seen").keys() == names
    assert statuses(tap.folder)[2, 1] == "answered"
    assert tap.fraction_train == 1.0  # the rest of a strategy is the strategy's


def test_what_was_seen_before_privacy_wrappers_is_recorded(tmp_path: Path) -> None:
    """Clipping on the server comes after the server has seen the update: the raw one is what it could attack."""
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None, seed=1)
    dp = DifferentialPrivacyServerSideFixedClipping(plain(), 0.1, 1e-3, 3)
    start(flower.Tap(dp, out=tmp_path / "seen"), clients_of(task, federation, held), task, nodes=3, rounds=1)
    lengths = [float(tree.norm(seen.update)) for seen in recorded(tmp_path / "seen").values()]
    assert len(lengths) == 3
    assert min(lengths) > 1e-2


def test_the_warning_comes_once_and_the_folder_is_its_owners(tmp_path: Path) -> None:
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    tap = flower.Tap(plain(), out=tmp_path / "seen")
    with pytest.warns(flower.SensitiveRecording, match="as sensitive as the clients' data") as caught:
        start(tap, clients_of(task, federation, held), task, nodes=3, rounds=3)
    assert sum(issubclass(one.category, flower.SensitiveRecording) for one in caught) == 1
    assert (tmp_path / "seen").stat().st_mode & 0o077 == 0
    assert "sensitive" in json.loads((tmp_path / "seen" / "recording.json").read_text())


def test_a_second_run_does_not_mix_with_the_first(tmp_path: Path) -> None:
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    for _ in range(2):
        tap = flower.Tap(plain(), out=tmp_path / "seen")
        start(tap, clients_of(task, federation, held), task, nodes=3, rounds=1)
    assert tap.folder == tmp_path / "seen-2"
    assert len(recorded(tmp_path / "seen")) == len(recorded(tmp_path / "seen-2")) == 3


def test_failures_and_silence_are_lines_of_the_record(tmp_path: Path) -> None:
    """Clients that raise, never answer, diverge or send what is no model: the round goes on, the record tells."""
    task, held = tiny(), data(8)
    federation = Federation(clients=8, training=TRAINING, examples=None)

    def trouble(message: Message, context: Context) -> None:
        if context.node_id == 2:
            raise RuntimeError("no power")

    def diverges(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if context.node_id == 4:
            bad = {name: array.numpy() * np.nan for name, array in reply.content["arrays"].items()}
            reply.content["arrays"] = ArrayRecord({name: Array(value) for name, value in bad.items()})
        if context.node_id == 5:
            reply.content["arrays"] = ArrayRecord({"other": Array(np.zeros(3))})
        if context.node_id in (6, 7):
            data, kind = (b"no array", "numpy.ndarray") if context.node_id == 6 else (b"", "of another kind")
            held = reply.content["arrays"].items()
            reply.content["arrays"] = ArrayRecord({n: Array(a.dtype, a.shape, kind, data) for n, a in held})
        if context.node_id == 8:
            reply.content["metrics"] = MetricRecord({"num-examples": float("nan")})
        return reply

    class Tolerant(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            sound = [reply for reply in replies if reply.metadata.src_node_id in (1, 2)]
            return super().aggregate_train(server_round, sound)

    tap = flower.Tap(Tolerant(fraction_evaluate=0.0), out=tmp_path / "seen")
    app = clients_of(task, federation, held, before=trouble, mods=[diverges])
    result = start(tap, app, task, nodes=8, rounds=1, unreachable=[3])
    assert result.arrays is not None
    found = statuses(tap.folder)
    assert found == {
        (1, 1): "recorded", (1, 2): "error", (1, 3): "no reply", (1, 4): "unusable", (1, 5): "unusable",
        (1, 6): "unusable", (1, 7): "unusable", (1, 8): "unusable",
    }  # fmt: skip
    reasons = {row["node"]: row.get("reason", "") for row in flower.rows_of(tap.folder) if "node" in row}
    assert "no power" in reasons[2]
    assert "NaN" in reasons[4]
    assert "lacks" in reasons[5]
    assert "whole number" in reasons[8]
    assert list(recorded(tap.folder)) == ["round0001-node1"]
    assert not list(tap.folder.glob("*.part"))


def test_a_strategy_with_a_loop_of_its_own_is_watched_too(tmp_path: Path) -> None:
    class Own(FedAvg):
        def start(self, grid: Any, initial_arrays: ArrayRecord, num_rounds: int = 1, **_: Any) -> Result:
            result = Result()
            for number in range(1, num_rounds + 1):
                settings = {"arrays": initial_arrays, "config": ConfigRecord(), "grid": grid}
                messages = self.configure_train(server_round=number, **settings)
                replies = grid.send_and_receive(messages)
                result.arrays, _metrics = self.aggregate_train(server_round=number, replies=replies)
            return result

    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    inner = Own(fraction_evaluate=0.0)
    tap = flower.Tap(inner, out=tmp_path / "seen")
    assert start(tap, clients_of(task, federation, held), task, nodes=3, rounds=1).arrays
    assert len(recorded(tap.folder)) == 3
    assert "configure_train" not in vars(inner)


def test_a_strategy_that_fails_leaves_the_record_of_its_round(tmp_path: Path) -> None:
    class Failing(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            raise RuntimeError("no sum")

    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    tap = flower.Tap(Failing(fraction_evaluate=0.0), out=tmp_path / "seen")
    with pytest.raises(RuntimeError, match="no sum"):
        start(tap, clients_of(task, federation, held), task, nodes=3, rounds=1)
    assert set(statuses(tap.folder).values()) == {"recorded"}
    [whole] = [row for row in flower.rows_of(tap.folder) if row["node"] is None]
    assert (whole["status"], whole["reason"]) == ("error", "RuntimeError: no sum")


def test_files_are_their_owners_in_any_folder_and_a_server_that_died_early_has_taken_it(tmp_path: Path) -> None:
    seen, truth = tmp_path / "seen", tmp_path / "truth"
    for folder in (seen, truth):
        folder.mkdir(mode=0o755)
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    app = clients_of(task, federation, held, truth=truth)
    start(flower.Tap(plain(), out=seen), app, task, nodes=3, rounds=1)
    files = [*seen.iterdir(), *truth.iterdir()]
    assert len(files) == 3 + 2 + 3
    assert not [path.name for path in files if path.stat().st_mode & 0o077]

    model = ArrayRecord(dict(task.model.state_dict()))
    first = flower.Recording(tmp_path / "early")
    first.write("round0001-node1", {}, entries_of(model, model, {}))  # and no line: it died in its first round
    assert flower.Recording(tmp_path / "early").folder == tmp_path / "early-2"


def test_what_is_recorded_is_what_the_server_reads() -> None:
    """Bytes after an array are nobody's: NumPy does not read them, so a record must not either."""
    sound = Array(np.arange(6.0).reshape(2, 3))
    longer = Array(sound.dtype, sound.shape, sound.stype, sound.data + np.ones(6).tobytes())
    for array in (sound, longer, Array(np.asfortranarray(sound.numpy()))):
        assert np.array_equal(_view(array), array.numpy())
    with pytest.raises(flower.FlowerError, match="was announced"):
        _view(Array(sound.dtype, (3, 2), sound.stype, sound.data))


def test_the_aggregate_alone(tmp_path: Path) -> None:
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    app = clients_of(task, federation, held)
    start(flower.Tap(plain(), keep="aggregate", out=tmp_path / "sum", task=task), app, task, nodes=3, rounds=1)
    start(flower.Tap(plain(), out=tmp_path / "each", task=task), app, task, nodes=3, rounds=1)
    [whole], each = recorded(tmp_path / "sum").values(), recorded(tmp_path / "each").values()
    assert (whole.clients, whole.num_examples, whole.key) == (3, 12, "round1")
    mean = tree.scale({n: sum(seen.update[n] for seen in each) for n in whole.update}, 1 / 3)
    assert largest_difference(whole.update, mean) < 1e-12
    start(flower.Tap(plain(), keep="summary", out=tmp_path / "none"), app, task, nodes=3, rounds=1)
    assert not recorded(tmp_path / "none")
    assert set(statuses(tmp_path / "none").values()) == {"answered"}


def test_large_models_stream_to_disk(tmp_path: Path) -> None:
    """ResNet-18, eleven million parameters: beside the disk the tap takes under 5 % of a round in which each client
    does one step on eight images, and it holds less than two observations beyond what the server holds anyway. (It
    holds a tensor at a time.)"""
    like = (torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))
    model = gl.models.resnet18(shape=(3, 32, 32), classes=10, generator=torch.Generator().manual_seed(0))
    task = gl.Task.supervised(model.eval(), cross_entropy, like=like)
    size = tree.size(task.weights())
    assert size > 11e6
    batch = {"x": torch.rand(8, *like[0].shape[1:]), "y": torch.arange(8) % 10}
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return flower.train(message, context, task, batch, gl.LocalTraining(lr=0.1))

    class Measured(flower.Tap):
        """What Python and NumPy allocate while replies are recorded."""

        peak = 0

        def _of_clients(self, *given: Any) -> Any:
            tracemalloc.start()
            try:
                return super()._of_clients(*given)
            finally:
                self.peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()

    measured = Measured(plain(), out=tmp_path / "measured")
    start(measured, app, task, nodes=2, rounds=1)
    assert measured.peak < 2 * (2 * 4 * size)  # an observation is weights and update in float32

    tap = flower.Tap(plain(), out=tmp_path / "seen")
    began, asked = [], tap.configure_train
    tap.configure_train = lambda *given: (began.append(time.perf_counter()), asked(*given))[1]  # type: ignore[method-assign]
    start(tap, app, task, nodes=2, rounds=2)
    rounds = [after - before for before, after in zip(began, [*began[1:], time.perf_counter()])]
    told = [row for row in flower.rows_of(tap.folder) if "tap_seconds" in row]
    shares = [row["tap_seconds"] / (spent - row["disk_seconds"]) for row, spent in zip(told, rounds)]
    assert min(shares) < 0.05  # the quietest round: others on the machine only ever add
    seen = gl.Observation.load(tap.folder / "round0001-node1.safetensors")
    assert tree.size(seen.update) == size


# --- upload defences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("defence", [Clipping(norm=0.05), Pruning(keep=0.3), LocalGaussian(clip=1.0)])
def test_a_mod_does_what_the_client_rule_does(tmp_path: Path, defence: gl.Defence) -> None:
    """The same defence as a mod around plain training, and inside `train`: the same observation."""
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None, seed=5)
    mod = flower.UploadDefence(defence, task, seed=5)
    for name, app in {
        "mod": clients_of(task, federation, held, mods=[mod]),
        "rule": clients_of(task, federation, held, defence),
    }.items():
        start(flower.Tap(plain(), out=tmp_path / name, task=task), app, task, nodes=3, rounds=1)
    one, other = recorded(tmp_path / "mod"), recorded(tmp_path / "rule")
    for key, seen in one.items():
        assert largest_difference(seen.update, other[key].update) < 1e-12


@pytest.mark.parametrize(
    "defence", [FedSAM(), DPSGD(), Clipping(per="example"), gl.Chain(FedSAM(), Clipping())], ids=lambda d: d.name
)
def test_a_mod_refuses_defences_of_gradients(defence: gl.Defence) -> None:
    with pytest.raises(flower.FlowerError, match=r"flower\.train\("):
        flower.UploadDefence(defence)


@pytest.mark.parametrize("defence", [Soteria(), TIP()], ids=lambda d: d.name)
def test_a_mod_refuses_defences_that_look_at_examples(defence: gl.Defence) -> None:
    with pytest.raises(flower.FlowerError, match=r"examples, which a mod never sees: use flower\.train"):
        flower.UploadDefence(defence, tiny())


def test_a_mod_says_what_else_is_needed() -> None:
    with pytest.raises(flower.FlowerError, match="does nothing to an upload"):
        flower.UploadDefence(gl.Defence())
    with pytest.warns(UserWarning, match="also acts on the server"):
        flower.UploadDefence(DPFedAvg())


def test_withheld_statistics_go_back_as_they_were_sent(tmp_path: Path) -> None:
    task, held = tiny(norm="train"), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    app = clients_of(task, federation, held, LocalGaussian(clip=1.0))
    start(flower.Tap(plain(), out=tmp_path / "seen", task=task), app, task, nodes=3, rounds=1)
    for seen in recorded(tmp_path / "seen").values():
        assert seen.buffers is not None
        assert seen.returned_buffers is not None
        assert largest_difference(seen.buffers, seen.returned_buffers) == 0


# --- privacy wrappers -------------------------------------------------------------------------------------------------


def test_differential_privacy_of_flower_is_recognised_and_labelled(tmp_path: Path) -> None:
    task, held = tiny(), data()
    federation = Federation(clients=3, training=TRAINING, examples=None)
    loose = DifferentialPrivacyClientSideFixedClipping(plain(), 1.0, 0.5, 3)
    tap = flower.Tap(loose, out=tmp_path / "loose")
    app = clients_of(task, federation, held, mods=[fixedclipping_mod])
    start(tap, app, task, nodes=3, rounds=2)
    [told] = json.loads((tap.folder / "recording.json").read_text())["privacy"]
    assert told["wrapper"] == "DifferentialPrivacyClientSideFixedClipping"
    assert told["guarantee"]["text"].startswith("no formal guarantee (central noise; does not protect against the agg")
    assert max(float(tree.norm(seen.update)) for seen in recorded(tap.folder).values()) < 0.5 + 1e-6
    [known] = flower.recognised(loose)
    assert known.defence == Clipping(0.5)

    config = PrivacyConfig(1e-5, 3, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    strict = DifferentialPrivacyServerSideFixedClipping(plain(), 2.0, 0.5, 3, accountant=RdpAccountant(config))
    tap = flower.Tap(strict, out=tmp_path / "strict")
    start(tap, clients_of(task, federation, held), task, nodes=3, rounds=2)
    [told] = json.loads((tap.folder / "recording.json").read_text())["privacy"]
    label = told["guarantee"]
    assert label["releases"] == 2
    assert label["unit"] == "client"
    assert 0 < label["epsilon"] <= strict.privacy_spent().epsilon
    assert "does not protect against the aggregating server" in label["text"]
    [known] = flower.recognised(strict)
    assert known.defence is None  # the server has seen the raw updates


def test_local_noise_of_flower_is_accounted_for_by_what_it_does() -> None:
    """The mod's own epsilon supposes the sensitivity it was told; two data sets lie up to twice the clip apart."""
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=0.5, delta=1e-5)
    [known] = flower.recognised(mod)
    assert isinstance(known.defence, LocalGaussian)
    assert known.defence.std == pytest.approx(np.sqrt(2 * np.log(1.25e5)) / 0.5)
    assert known.guarantee.epsilon is not None
    assert known.guarantee.epsilon > 0.5
    assert known.guarantee.model == "local"
    assert flower.recognised(plain()) == ()


def test_messages_without_what_is_needed_are_told_what_is_missing() -> None:
    task = tiny()
    flower.InProcess(ClientApp(), 1)  # names this process
    empty = Message(RecordDict({"metrics": MetricRecord({"a": 1})}), dst_node_id=1, message_type="train")
    with pytest.raises(flower.FlowerError, match="array record 'arrays'"):
        flower.train(empty, Context(1, 1, {}, RecordDict(), {}), task, private(), TRAINING)


def test_errors_that_travel_to_the_server_name_no_labels() -> None:
    task = tiny()
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return flower.train(message, context, task, {**private(2), "y": torch.tensor([0, 717])}, TRAINING)

    grid = flower.InProcess(app, 1)
    content = RecordDict({"arrays": ArrayRecord(dict(task.model.state_dict()))})
    [reply] = grid.send_and_receive([Message(content, dst_node_id=1, message_type="train")])
    assert "see this node's log" in reply.error.reason
    assert "717" not in reply.error.reason


# --- the example ------------------------------------------------------------------------------------------------------


def test_a_usual_app_is_audited_by_four_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/flower-quickstart: a client in plain PyTorch, with BatchNorm and shuffled batches; a tap without a task.
    What it recorded is sorted by the task of line 2, and the recipe, in the client's own order, reproduces it."""
    home = Path(__file__).parents[1] / "examples" / "flower-quickstart"
    source = "".join(path.read_text() for path in sorted((home / "quickstart").glob("*.py")))
    assert [number for number in range(1, 9) if f"# {number}" in source] == [1, 2, 3, 4]
    monkeypatch.syspath_prepend(str(home))
    from quickstart.client_app import app  # type: ignore[import-not-found]
    from quickstart.task import Net, load_data, task  # type: ignore[import-not-found]

    torch.manual_seed(0)
    tap = flower.Tap(plain(), rounds=[1], out=tmp_path / "seen")
    grid = flower.InProcess(app, 2, run_config={"local-epochs": 1, "lr": 0.05})
    tap.start(grid, ArrayRecord(Net().state_dict()), num_rounds=2)
    found = read(tmp_path / "seen", task)
    assert [one.name for one in found] == ["round0001-node1", "round0001-node2"]
    for client, one in enumerate(found):
        assert one.seen.weights.keys() == task.weights().keys()
        assert one.seen.returned_buffers is not None
        assert one.seen.returned_buffers.keys() == task.buffers().keys()
        torch.manual_seed(client)  # as the client shuffles
        x, y = (torch.cat(part) for part in zip(*load_data(client, 2)))
        recipe = gl.LocalTraining(lr=0.05, epochs=1, batch_size=4)
        assert gl.identify.replay_error(task, one.seen, {"x": x, "y": y}, recipe).relative < 1e-4
