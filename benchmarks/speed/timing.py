"""Steps per second: of one search, or of several turn by turn, so that what disturbs one disturbs all.

On a CPU with one thread, seconds are those of this process: on an idle machine the same as those on the wall, and on a
busy one without the time that other programs had. With more threads, or a GPU, seconds are those on the wall.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # the package may be that of another commit, where these have another home
    from benchmarks.speed.workloads import Workload
    from gradleak.engine import Engine

ROUNDS = 3


class Running:
    """A search under way: `seconds(steps)` takes so many steps of all lanes and says how long they took."""

    def __init__(self, work: Workload, lanes: int, engine: Engine) -> None:
        self.lanes, self.engine, self.cuda = lanes, engine, engine.where.type == "cuda"
        with engine.settings():
            self.search = work.search(lanes, engine)
            graph = self.cuda and engine.batched and engine.graph
            self.advance: Callable[[], None] = self.search.captured() if graph else self.search.tick

    def seconds(self, steps: int) -> float:
        with self.engine.settings():
            synchronise(self.cuda)
            began = now(self.cuda)
            for _ in range(steps):
                self.advance()
            synchronise(self.cuda)
            return now(self.cuda) - began


@dataclass(frozen=True)
class Timed:
    """Lane steps per second in every round."""

    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """By how much the best round was above the worst."""
        return max(self.rates) / min(self.rates) - 1

    def over(self, other: Timed) -> float:
        """How many times the other's rate: the median over rounds, each held against its own."""
        return statistics.median(own / its for own, its in zip(self.rates, other.rates, strict=True))


def turn_by_turn(runs: Sequence[Running], seconds: float, rounds: int = ROUNDS) -> list[Timed]:
    """Every search gets a turn in every round; all turns of a search together take about `seconds`."""
    steps = []
    for run in runs:
        run.seconds(1)
        steps.append(max(1, int(seconds / rounds / max(run.seconds(1), 1e-9))))
    rates: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, count, own in zip(runs, steps, rates, strict=True):
            own.append(run.lanes * count / run.seconds(count))
    return [Timed(tuple(own)) for own in rates]


def seconds_of(function: Callable[[], object], cuda: bool, seconds: float) -> list[float]:
    """Of every call in about so many seconds; the first two do not count."""
    function()
    spent: list[float] = []
    while len(spent) < 4 or (sum(spent) < seconds and len(spent) < 10_000):
        synchronise(cuda)
        began = now(cuda)
        function()
        synchronise(cuda)
        spent.append(now(cuda) - began)
    return spent[1:]


@contextmanager
def cudnn_benchmark(on: bool) -> Iterator[None]:
    """Let cuDNN try its algorithms at the first call of a shape and keep the fastest; torch's default is not to."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def now(cuda: bool) -> float:
    """Seconds, by the clock that fits."""
    return time.process_time() if clock(cuda) == "process" else time.perf_counter()


def clock(cuda: bool) -> str:
    """Which clock that is."""
    return "process" if not cuda and torch.get_num_threads() == 1 else "wall"


def synchronise(cuda: bool) -> None:
    """Wait for the GPU, where there is one."""
    if cuda:
        torch.cuda.synchronize()


def load() -> list[float] | None:
    """How busy the machine is: the mean number of runnable processes over 1, 5 and 15 minutes, this one included."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None
