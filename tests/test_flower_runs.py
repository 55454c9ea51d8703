"""Flower with its processes: a simulation through a SuperLink, and a deployment with two SuperNodes, on loopback.

The apps are those of examples/. Every process is started here, bound to 127.0.0.1 and ended by its id; whatever it has
started itself is known by the folder in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import gradleak as gl
from conftest import largest_difference
from gradleak.audit.recorded import read, replay_text, replays
from gradleak.audit.result import AuditResult
from gradleak.cli import app
from gradleak.core import tree
from sockets import open_to_others

pytest.importorskip("flwr")
pytest.importorskip("sklearn")  # the example's images

from gradleak import flower  # noqa: E402

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.flower,
    pytest.mark.system,
    pytest.mark.xdist_group("flower runs"),
    pytest.mark.skipif(not (BIN / "flower-superlink").exists(), reason="flower-superlink is not beside this Python"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds the processes that it has to end in /proc"),
]
PATIENCE = 150.0  # seconds for any run


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Processes:
    """Starts processes with a folder of their own in the environment, and ends them and all that they have started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.reachable: set[str] = set()  # addresses that others than this machine could have reached

    def environment(self, home: str) -> dict[str, str]:
        place = self.folder / home
        place.mkdir(parents=True, exist_ok=True)
        return {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(place),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray of the simulation engine: on 127.0.0.1 alone
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "src"),
        }

    def start(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            self.started[name] = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                env=self.environment(name),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )

    def kill(self, name: str) -> None:
        """At once, with all that it has started: as when a machine loses its power."""
        self._signal(self._descended(name), signal.SIGKILL)
        self.started.pop(name).wait(30)

    def _descended(self, name: str) -> list[int]:
        """The process and all that carry its folder in their environment."""
        mark = f"FLWR_HOME={self.folder / name}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    @staticmethod
    def _signal(pids: list[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """Everything: those started here by their ids, then what they have started."""
        for process in reversed(self.started.values()):
            process.terminate()
        for process in self.started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        end = time.monotonic() + 20
        while (left := self.left()) and time.monotonic() < end:
            self._signal(left, signal.SIGKILL)
            time.sleep(0.1)
        for process in self.started.values():
            process.wait(10)
        self.started.clear()

    def look(self) -> None:
        """Where do they listen just now?"""
        self.reachable |= open_to_others(self.left())

    def left(self) -> list[int]:
        return [pid for place in self.folder.iterdir() if place.is_dir() for pid in self._descended(place.name)]

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


def superlink(processes: Processes, *words: str) -> str:
    """Start a SuperLink and wait until it answers; its address."""
    port = free_port()
    processes.start(
        "link", "flower-superlink", "--insecure", "--disable-runtime-dependency-installation",
        "--host", "127.0.0.1", "--port", str(port), *words,
    )  # fmt: skip
    until(lambda: _answers(port), "the SuperLink answers", processes)
    (processes.folder / "user").mkdir(exist_ok=True)
    (processes.folder / "user" / "config.toml").write_text(
        f'[superlink]\ndefault = "loop"\n[superlink.loop]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    return f"127.0.0.1:{port}"


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def until(holds: Any, what: str, processes: Processes, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"It did not come about that {what}:\n{processes.logs()}")
        time.sleep(0.2)


def begun(processes: Processes, folder: Path, settings: dict[str, Any], *words: str) -> subprocess.Popen[bytes]:
    """`flwr run`, which goes on until the run is over."""
    told = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    with open(processes.folder / "run.log", "ab") as log:
        return subprocess.Popen(
            [str(BIN / "flwr"), "run", str(folder), "loop", "--stream", "--run-config", told, *words],
            env=processes.environment("user"), stdout=log, stderr=subprocess.STDOUT, cwd=folder,
        )  # fmt: skip


def run(processes: Processes, folder: Path, settings: dict[str, Any], *words: str) -> str:
    """A run until it is over; how it ended. Not by its exit code, which is 0 for runs that failed too."""
    going = begun(processes, folder, settings, *words)
    try:
        until(lambda: processes.look() or going.poll() is not None, "the run is over", processes)
    finally:
        going.kill()
        going.wait(30)
    return statuses(processes)[0]


def statuses(processes: Processes) -> list[str]:
    listed = subprocess.run(
        [str(BIN / "flwr"), "list", "loop", "--format", "json"],
        env=processes.environment("user"), capture_output=True, text=True, timeout=60, cwd=processes.folder,
    )  # fmt: skip
    runs = json.loads(listed.stdout)["runs"]
    return [one["status"] for one in sorted(runs, key=lambda one: one["pending-at"], reverse=True)]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path / "processes")
    found.folder.mkdir()
    try:
        yield found
        assert not found.reachable
    finally:
        found.stop()
        assert not found.left()


def copied(example: str, folder: Path) -> Path:
    """An example, where nobody else writes into it."""
    return Path(shutil.copytree(ROOT / "examples" / example, folder / example, ignore=shutil.ignore_patterns("__pyc*")))


def recorded(folder: Path) -> dict[str, gl.Observation]:
    return {path.stem: gl.Observation.load(path) for path in sorted(folder.glob("*.safetensors"))}


def task_of(example: Path, package: str = "audited") -> gl.Task:
    from gradleak.cli.loading import task

    return task(f"{example / package / 'task.py'}:task")


def test_a_simulation_through_a_superlink(processes: Processes, tmp_path: Path) -> None:
    """`flwr run` on Flower's simulation engine: the tap wrote what the client rule makes of the same examples."""
    pytest.importorskip("ray")
    superlink(processes, "--simulation")
    example = copied("flower", tmp_path)
    seen, truth = tmp_path / "seen", tmp_path / "truth"
    settings = {"out": str(seen), "truth": str(truth), "num-server-rounds": 2, "examples": 2}
    federation = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"
    ended = run(processes, example, settings, "--federation-config", federation)
    assert ended == "finished:completed", processes.logs()
    task, found = task_of(example), recorded(seen)
    assert len(found) == 4
    for name, one in found.items():
        batch = load_file(truth / f"{name}.safetensors")
        expected = gl.observe(task, batch, gl.LocalTraining(lr=0.01), weights=one.weights, wire="weights")
        assert one.num_examples == 2
        # One rounding of the weights: another process may add up a convolution in another order.
        assert largest_difference(one.update, expected.update) < 4 * torch.finfo(torch.float32).eps
        assert float(tree.norm(one.update)) > 1e-3
    first = [one.weights for name, one in found.items() if name.startswith("round0001")]
    assert largest_difference(first[0], task.weights()) == 0


def test_adapters_of_a_language_model_through_a_superlink(processes: Processes, tmp_path: Path) -> None:
    """examples/flower-lora with its processes: only adapters travel, and each update is what the client rule makes."""
    for needed in ("ray", "transformers", "peft"):
        pytest.importorskip(needed)
    superlink(processes, "--simulation")
    example = copied("flower-lora", tmp_path)
    seen, truth = tmp_path / "seen", tmp_path / "truth"
    settings = {"out": str(seen), "truth": str(truth), "num-server-rounds": 2}
    federation = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"
    ended = run(processes, example, settings, "--federation-config", federation)
    assert ended == "finished:completed", processes.logs()
    task, training = task_of(example, "tuned"), gl.LocalTraining(lr=0.1)
    found = read(seen, task, truth)
    assert len(found) == 4
    assert all("lora_" in name for one in recorded(seen).values() for name in one.weights)
    assert "reproduces 4 of 4 updates" in replay_text(replays(task, found, training), found, training)


LOST = """
import time
from pathlib import Path
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from audited import client_app, server_app

client = ClientApp()
server = ServerApp()

@client.train()
def train(message: Message, context: Context) -> Message:
    if int(message.content["config"]["server-round"]) == 2 and context.node_config["partition-id"] == 1:
        Path(str(context.run_config["out"]) + ".training").write_text(str(context.node_id))
        time.sleep(600)  # until somebody pulls the plug
    return client_app.app(message, context)

@server.main()
def main(grid: Grid, context: Context) -> None:
    killed, usual = Path(str(context.run_config["out"]) + ".killed"), grid.send_and_receive

    def until_nobody_else_can_answer(messages, *, timeout=None):
        messages = list(messages)
        if not messages or int(messages[0].content["config"]["server-round"]) < 2:
            return usual(messages, timeout=timeout)
        waiting, replies, end = set(grid.push_messages(messages)), [], time.monotonic() + 120
        while waiting and time.monotonic() < end:
            replies += grid.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            if replies and killed.exists():
                end = min(end, time.monotonic() + 3)
            time.sleep(0.2)
        return replies

    grid.send_and_receive = until_nobody_else_can_answer  # a timeout that is right for every machine is a long one
    server_app.app(grid, context)
"""


def test_a_deployment_is_recorded_and_inverted_and_survives_a_lost_node(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example with two SuperNodes, one of which loses its power in the middle of the second round. The updates
    of the first give the clients' images back; the run ends well, and the record says what happened."""
    address = superlink(processes)
    for index in range(2):
        processes.start(
            f"node{index}", "flower-supernode", "--insecure", "--superlink", address, "--host", "127.0.0.1",
            "--port", str(free_port()), "--node-config", f"partition-id={index} num-partitions=2",
        )  # fmt: skip
    example = copied("flower", tmp_path)
    (example / "audited" / "lost.py").write_text(LOST)
    project = example / "pyproject.toml"
    text = project.read_text().replace("audited.server_app:app", "audited.lost:server")
    project.write_text(text.replace("audited.client_app:app", "audited.lost:client"))
    seen, truth = tmp_path / "seen", tmp_path / "truth"
    going = begun(processes, example, {"out": str(seen), "truth": str(truth), "num-server-rounds": 2})
    try:
        marker = Path(f"{seen}.training")
        over = lambda: processes.look() or marker.exists() or going.poll() is not None  # noqa: E731
        until(over, "the second node trains in round 2", processes)
        assert marker.exists(), processes.logs()
        processes.kill("node1")
        gone = int(marker.read_text())
        first = tmp_path / "first"
        first.mkdir()
        for path in seen.glob("round0001*.safetensors"):
            shutil.copy(path, first)
        Path(f"{seen}.killed").touch()
        assert len(recorded(first)) == 2

        # The audit of the first round goes on beside the rest of the second.
        monkeypatch.chdir(tmp_path)
        words = ["--observations", str(first), "--truth", str(truth), "--task", str(example / "audited/task.py:task")]
        words += ["--data", str(example / "audited/task.py:others"), "--lr", "0.01", "-a", "second-order"]
        words += ["--device", "cpu", "-o", "run"]
        done = CliRunner().invoke(app, ["audit", *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        result = AuditResult.load(tmp_path / "run")
        assert result.positive_control.passed
        assert result.verdict.word == "leaks"
        attacked = [row for row in result.rows if not row["control"]]
        assert [row["hits"]["recovered"] for row in attacked] == [[True], [True]]
        assert "reproduces 2 of 2 updates" in done.output

        going.wait(PATIENCE)
    finally:
        going.kill()
        going.wait(30)
    assert statuses(processes) == ["finished:completed"], processes.logs()
    rows = [row for row in flower.rows_of(seen) if row.get("node") is not None]
    of_round = {number: {row["node"]: row["status"] for row in rows if row["round"] == number} for number in (1, 2)}
    assert sorted(of_round[1].values()) == ["recorded", "recorded"]
    [other] = set(of_round[1]) - {gone}
    assert of_round[2][other] == "recorded"
    assert of_round[2][gone] in ("no reply", "error")
    names = [row["file"] for row in rows if row["status"] == "recorded"]
    assert sorted(names) == sorted(f"{name}.safetensors" for name in recorded(seen))
    assert len(names) == len(set(names)) == 3
    whole = [row for row in flower.rows_of(seen) if row.get("status") == "aggregated"]
    assert [(row["round"], row["clients"]) for row in whole] == [(1, 2), (2, 1)]


SECURE = """
import hashlib
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from audited.task import examples, network, recipe, task
from gradleak import flower, secure

identities = [secure.Identity(hashlib.sha256(bytes([number])).digest()) for number in range(3)]  # for a test alone
agreement = flower.Agreement(secure.Roster.of({n: one.public for n, one in enumerate(identities)}), clip=1.0)

def number(context: Context) -> int:
    return int(context.node_config["partition-id"])

masking = flower.SecureClient(agreement, task(), number, lambda context: identities[number(context)])
client = ClientApp()
server = ServerApp()
client.query("secure")(masking.answer)

@client.train(mods=[masking])
def train(message: Message, context: Context) -> Message:
    batch = examples(number(context), 3, 2, int(message.content["config"]["server-round"]))
    return flower.train(message, context, task(), batch, recipe(0.01))

@server.main()
def main(grid: Grid, context: Context) -> None:
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    strategy = flower.SecureAggregation(inner, agreement, task(), timeout=100)
    tap = flower.Tap(strategy, keep="aggregate", out=str(context.run_config["out"]), task=task())
    tap.start(grid, ArrayRecord(network().state_dict()), num_rounds=2, timeout=100)
"""


@pytest.mark.slow
def test_secure_aggregation_through_a_superlink(processes: Processes, tmp_path: Path) -> None:
    """Four stages a round as messages of a real run: what a client knows lasts in its context between them."""
    pytest.importorskip("ray")
    pytest.importorskip("cryptography")
    superlink(processes, "--simulation")
    example, seen = copied("flower", tmp_path), tmp_path / "seen"
    (example / "audited" / "masked.py").write_text(SECURE)
    project = example / "pyproject.toml"
    text = project.read_text().replace("audited.server_app:app", "audited.masked:server")
    project.write_text(text.replace("audited.client_app:app", "audited.masked:client"))
    federation = "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"
    ended = run(processes, example, {"out": str(seen)}, "--federation-config", federation)
    assert ended == "finished:completed", processes.logs()
    task, found = task_of(example), recorded(seen)
    assert [(one.clients, one.num_examples) for one in found.values()] == [(3, 6), (3, 6)]
    images = gl.data.load("digits")
    batches = [{"x": images.x[rows], "y": images.y[rows]} for rows in (torch.arange(n, 1500, 3)[:2] for n in range(3))]
    each = [gl.observe(task, batch, gl.LocalTraining(lr=0.01), wire="weights").update for batch in batches]
    mean = tree.scale({name: sum(update[name] for update in each) for name in each[0]}, 1 / 3)
    assert largest_difference(found["round0001"].update, mean) < 1e-6
