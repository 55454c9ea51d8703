"""Images x iterations per second of lanes, through public names only: the same file measures any commit's package.

    PYTHONPATH=SRC python -m benchmarks.speed.lanes --cases lenet:1024,resnet18:164 --precision fast

One target with as many restarts as lanes, all in one chunk, by the public call of an attack. The clock runs between
reports of progress, so building the target, starting the search and capturing a CUDA graph are left out. Prints a JSON
object a line: the source tree first, then a row for every case.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradleak as gl
from benchmarks.speed.networks import CLASSES, NETWORKS, pictures
from benchmarks.speed.timing import clock, now, synchronise

TRIAL = 20  # steps that say how long a step takes; enough for the engine to capture a CUDA graph
PARTS = 5  # of a run, each with its own rate


class Stopwatch:
    """Notes the time whenever another fifth of the steps is done. The first note is taken after the first step."""

    def __init__(self, steps: int, cuda: bool) -> None:
        self.steps, self.cuda = steps, cuda
        self.notes: list[tuple[int, float]] = []  # steps done, seconds

    def __call__(self, share: float) -> None:
        done = round(share * self.steps)
        if not self.notes or done == self.steps or done - self.notes[-1][0] >= self.steps / PARTS:
            if self.notes and done == self.notes[-1][0]:
                return  # the last step is reported twice
            synchronise(self.cuda)
            self.notes.append((done, now(self.cuda)))

    @property
    def rates(self) -> list[float]:
        """Steps per second between two notes."""
        return [(b - a) / (later - earlier) for (a, earlier), (b, later) in zip(self.notes, self.notes[1:])]


class Case:
    """An attack on one network, ready to run with any number of steps."""

    def __init__(self, network: str, lanes: int, engine: gl.Engine, side: int = 32) -> None:
        self.network, self.lanes, self.engine = network, lanes, engine
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = NETWORKS[network]((3, side, side))
            y = torch.randint(CLASSES, (1,))
        x, training = pictures(1, side), gl.LocalTraining(lr=1.0, steps=1)
        self.task = gl.Task.supervised(model, nn.functional.cross_entropy, like=(x, y))
        self.observation = gl.observe(self.task, {"x": x, "y": y}, training, key="target 0")
        self.knowledge = gl.Knowledge(training=training, given={"y": y[None]})  # (targets, examples)

    def rates(self, steps: int) -> list[float]:
        """Lane steps per second in every part of one run."""
        watch = Stopwatch(steps, self.engine.where.type == "cuda")
        attack = gl.attacks.get("ig", steps=steps, restarts=self.lanes)
        attack.run(self.task, self.observation, self.knowledge, engine=self.engine, progress=watch)
        return [self.lanes * rate for rate in watch.rates]


def row_of(case: Case, steps: int | None, seconds: float) -> dict[str, Any]:
    """The rate of one case; a short trial comes first, and chooses the number of steps where none is given."""
    trial = statistics.median(case.rates(TRIAL)) / case.lanes
    steps = steps or max(TRIAL, int(seconds * trial))
    rates = case.rates(steps)
    row: dict[str, Any] = {"network": case.network, "lanes": case.lanes, "precision": case.engine.precision}
    return row | {"steps": steps, "rate": statistics.median(rates), "spread": max(rates) / min(rates) - 1}


def main(words: Sequence[str] | None = None) -> None:
    """Measure all cases one after the other."""
    accepted = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    accepted.add_argument("--cases", required=True, help="NAME:LANES[:STEPS],...")
    accepted.add_argument("--precision", default="strict")
    accepted.add_argument("--device", default="auto")
    accepted.add_argument("--seconds", type=float, default=5.0, help="of one run, where a case has no steps")
    accepted.add_argument("--threads", type=int)
    given = accepted.parse_args(words)
    if given.threads:
        torch.set_num_threads(given.threads)
    where = gl.Engine(device=given.device).where
    device = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    about = {"package": str(Path(gl.__file__).resolve().parent), "torch": torch.__version__, "device": device}
    print(json.dumps({**about, "clock": clock(where.type == "cuda")}), flush=True)
    for text in given.cases.split(","):
        name, lanes, *steps = text.split(":")
        engine = gl.Engine(device=given.device, precision=given.precision, chunk=int(lanes))
        case = Case(name, int(lanes), engine)
        print(json.dumps(row_of(case, int(steps[0]) if steps else None, given.seconds)), flush=True)
        del case
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
