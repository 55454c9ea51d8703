"""Audit cells as Ray tasks: the same rows as without Ray, and a worker that dies loses nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gradleak as gl
from gradleak.audit.result import AuditResult
from gradleak.cli import app
from gradleak.ray import NoCluster, RayWorkers
from sockets import descendants, open_to_others
from test_audit import WORKS, audit

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.flower, pytest.mark.system, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers on this machine, bound to the loopback interface, gone when the tests are."""
    options = {"num_cpus": 2, "include_dashboard": False, "logging_level": "ERROR", "object_store_memory": 100 * 2**20}
    with RayWorkers(options=options):
        yield


def grid(**changes: Any) -> gl.Audit:
    return audit(**{"attacks": [WORKS, "ig:steps=20"], "defences": [None, "fedsam:rho=0.05"], "targets": 2, **changes})


def numbers(rows: list[dict[str, Any]]) -> list[float]:
    return [value for row in rows for name in ("psnr", "ssim", "mse") for value in row["scores"][name]]


class Noted(gl.audit.Silent):
    """What a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self, cell: Any, rows: Any) -> None:
        self.done.append(cell.key)


class DiesOnce:
    """An analysis that kills its worker, without a word, the first time it is asked: in the middle of a cell."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = str(folder), times

    def __call__(self, task: gl.Task, seen: gl.Observation, truth: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        for number in range(self.times):
            marker = Path(self.folder) / f"died-{number}"
            if seen.key.endswith("target1") and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return {"one": 1.0}

    def __repr__(self) -> str:
        return "DiesOnce()"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere"])
def test_an_address_where_nobody_is(address: str) -> None:
    assert not ray.is_initialized()  # the first test of the module: the fixture has not been asked for
    with pytest.raises(NoCluster, match="Nobody answers"):
        RayWorkers(address).__enter__()


@pytest.mark.usefixtures("cluster")
@pytest.mark.skipif(sys.platform != "linux", reason="looks for sockets in /proc")
def test_a_cluster_of_its_own_listens_on_loopback_alone() -> None:
    own = descendants(os.getpid())
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in own]
    assert {"gcs_server", "raylet"} <= set(names)
    assert open_to_others(own) == set()


@pytest.mark.usefixtures("cluster")
def test_the_rows_are_those_of_a_run_without_ray(tmp_path: Path) -> None:
    alone = grid().run(tmp_path / "alone")
    progress = Noted()
    with RayWorkers() as workers:
        together = grid().run(tmp_path / "together", workers=workers, progress=progress)
    assert together.complete
    assert numbers(together.rows) == pytest.approx(numbers(alone.rows), rel=1e-4)
    plain = [[{k: row[k] for k in ("cell", "target", "status", "form", "observation")} for row in result.rows]
             for result in (alone, together)]  # fmt: skip
    assert plain[0] == plain[1]
    assert sorted(progress.done) == sorted(together.settings["plan"]["cells"])
    told = [json.loads(line) for line in (tmp_path / "together" / "workers.jsonl").read_text().splitlines()]
    assert {row["status"] for row in told} == {"done"}
    assert os.getpid() not in {row["pid"] for row in told}
    assert AuditResult.load(tmp_path / "together").verdict.word == alone.verdict.word
    with RayWorkers() as workers:  # resumes: nothing is left to do
        again = grid().run(tmp_path / "together", workers=workers)
    assert again.rows == together.rows


@pytest.mark.usefixtures("cluster")
def test_a_worker_killed_in_a_cell_loses_and_doubles_nothing(tmp_path: Path) -> None:
    doomed = grid(attacks=[WORKS], analyses=[DiesOnce(tmp_path, 1)])
    progress = Noted()
    with RayWorkers() as workers:
        result = doomed.run(tmp_path / "run", workers=workers, progress=progress)
    assert (tmp_path / "died-0").exists()
    assert result.complete
    assert not result.failed
    keys = [(row["cell"], row["target"]) for row in result.rows]
    assert len(keys) == len(set(keys))
    lines = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    assert len(lines) == len(keys)
    told = [json.loads(line) for line in (tmp_path / "run" / "workers.jsonl").read_text().splitlines()]
    died = [row for row in told if row["status"] == "worker died"]
    assert [row["attempt"] for row in died] == [1]
    assert {(row["cell"], row["attempt"]) for row in told if row["status"] == "done"} >= {(died[0]["cell"], 2)}
    assert any("its worker died; attempt 2 of 4" in note for note in progress.notes)
    alone = grid(attacks=[WORKS]).run()
    assert numbers(result.rows) == pytest.approx(numbers(alone.rows), rel=1e-4)


@pytest.mark.usefixtures("cluster")
def test_a_cell_that_kills_every_worker_is_a_failed_row(tmp_path: Path) -> None:
    doomed = audit(attacks=[WORKS], targets=2, unrelated=0, analyses=[DiesOnce(tmp_path, 5)])
    with RayWorkers(retries=1) as workers:
        result = doomed.run(tmp_path / "run", workers=workers)
    assert result.complete
    [row] = result.failed
    assert "WorkerCrashed" in row["error"]
    assert result.verdict.word in ("void", "inconclusive")


@pytest.mark.usefixtures("cluster")
def test_requests_that_no_worker_can_meet_are_said() -> None:
    with RayWorkers(gpus=0.5) as workers, pytest.raises(NoCluster, match="0.5 GPUs"):
        audit(targets=2).run(workers=workers)
    with pytest.raises(ValueError, match="cpus above 0"):
        RayWorkers(cpus=0)


@pytest.mark.usefixtures("cluster")
def test_the_command_sends_files_of_the_user_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is a class of the user's file, which no worker can import."""
    (tmp_path / "mine.py").write_text(
        "import torch, gradleak as gl\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        "        self.a, self.b = torch.nn.Linear(784, 8), torch.nn.Linear(8, 10)\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x.flatten(1)).sigmoid())\n"
        "like = (torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.long))\n"
        "task = gl.Task.supervised(Net(), torch.nn.functional.cross_entropy, like=like)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["audit", "mine.py:task", "--data", "mnist-samples", "-a", "analytic", "--targets", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, "--ray", "auto", "-o", "run"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert AuditResult.load(tmp_path / "run").complete
    assert (tmp_path / "run" / "workers.jsonl").exists()
