"""Processes that find torch loaded: forks of one that has imported it, and the package, and has done nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# torch._dynamo: what the first gradient of any process imports, for seconds.
SERVER = """
import json, os, signal, sys, traceback
import torch, torch._dynamo
import gradleak

def child(code, given, folder, seconds):
    signal.alarm(seconds)
    os.chdir(folder)
    for descriptor, name, mode in (0, "in", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY):
        os.dup2(os.open(os.path.join(given, name), mode), descriptor)
    ended = 1
    try:
        exec(compile(code, "<fork>", "exec"), {"__name__": "__main__"})
        ended = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)

for line in sys.stdin:
    told = json.loads(line)
    if "code" in told:
        answer = os.fork()
        if not answer:
            child(**told)
    else:
        answer = os.waitstatus_to_exitcode(os.waitpid(told["wait"], 0)[1])
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Fork:
    """A process, and the folder with what it says."""

    server: Forks
    pid: int
    given: Path

    @property
    def out(self) -> str:
        return (self.given / "out").read_text()

    @property
    def err(self) -> str:
        return (self.given / "err").read_text()

    def wait(self) -> int:
        """Its exit code, or less than 0 for the signal that has ended it; to be asked once."""
        return int(self.server.ask({"wait": self.pid}))


class Forks:
    """The process that is forked."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder, self.count = process, folder, 0

    def ask(self, told: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, code: str, folder: Path, given: str = "", seconds: int = 240) -> Fork:
        """Run `code` in `folder`, with `given` on its standard input; killed after so many seconds."""
        self.count += 1
        place = self.folder / str(self.count)
        place.mkdir()
        for name, text in (("in", given), ("out", ""), ("err", "")):
            (place / name).write_text(text)
        told = {"code": code, "given": str(place), "folder": str(folder), "seconds": seconds}
        return Fork(self, int(self.ask(told)), place)


@contextmanager
def forks(folder: Path) -> Iterator[Forks]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    with process:
        yield Forks(process, folder)
