"""Throughput of the engine: images x iterations per second, and lanes beside one at a time in the same run."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.speed.networks import NETWORKS
from benchmarks.speed.timing import Running, turn_by_turn
from benchmarks.speed.workloads import Workload, workload
from gradleak.engine import Engine

Row: TypeAlias = dict[str, Any]
Show: TypeAlias = Callable[[Row], None]
LANES = (1, 8, 32, 128, 512)


def quiet(row: Row) -> None:
    """Shows nothing."""


def rate(network: str | Workload, lanes: int, engine: Engine, seconds: float = 2.0) -> Row:
    """Images x iterations per second of one search, without anything beside it."""
    work = workload(network) if isinstance(network, str) else network
    forget()
    timed = turn_by_turn([Running(work, lanes, engine)], seconds)[0]
    return {
        "network": work.network,
        "lanes": lanes,
        "precision": engine.precision,
        "batched": engine.batched,
        "rate": timed.rate * work.examples,
        "spread": timed.spread,
        "gigabytes": gigabytes(),
    }


def engine(
    networks: Sequence[str] = tuple(NETWORKS),
    lanes: Sequence[int] = LANES,
    precisions: Sequence[str] = ("fast", "strict"),
    out: str | Path | None = None,
    seconds: float = 2.0,
    show: Show = quiet,
    device: str = "auto",
) -> list[Row]:
    """Measure every network at every number of lanes and precision; rows are written as JSON where `out` is given.

    One lane, eager, without vmap is what a loop over restarts does. It is measured again beside every number of lanes,
    turn by turn: `times_one_at_a_time` is the median of ratios within a round. More lanes than a chunk run as chunks,
    so a chunk's rate is theirs.
    """
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        show(row)

    for precision in precisions:  # outermost: a run that is cut short has every network in the first
        for network in networks:
            for row in _beside_one(workload(network), lanes, Engine(device, precision), seconds):
                add(row)
    if out is not None:
        from gradleak.core.environment import describe

        Path(out).write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")
    return rows


def format_rate(row: Row) -> str:
    """A row of `engine` as a line for people: the rate, and how many times that of one lane after the other."""
    how = f"{row['lanes']:>4} lanes" if row["batched"] else "one at a time"
    what = f"{row['network']:<12}{how:>14}  {row['precision']:<7}"
    if row["rate"] is None:
        return f"{what} too large for this device"
    return f"{what}{row['rate']:>12,.0f} a second  x{row['times_one_at_a_time']:,.1f}"


def _beside_one(work: Workload, lanes: Sequence[int], how: Engine, seconds: float) -> Iterator[Row]:
    eager = Engine(how.device, how.precision, batched=False, graph=False)
    alone, chunk = Running(work, 1, eager), work.chunk(how)
    common = {"network": work.network, "parameters": work.parameters, "precision": how.precision}
    known: dict[int, Row] = {}
    for count in lanes:
        held = min(count, chunk)
        if held not in known:
            forget()
            try:
                one, many = turn_by_turn([alone, Running(work, held, how)], seconds)
            except RuntimeError as problem:
                if not out_of_memory(problem):
                    raise
                known[held] = {"rate": None, "times_one_at_a_time": None}
                forget()
            else:
                if not any(row["rate"] for row in known.values()):
                    first = {"lanes": 1, "batched": False, "rate": one.rate, "spread": one.spread}
                    yield {**common, **first, "gigabytes": None, "times_one_at_a_time": 1.0}
                known[held] = {
                    "rate": many.rate,
                    "spread": many.spread,
                    "gigabytes": gigabytes(),
                    "times_one_at_a_time": many.over(one),
                }
        yield {**common, "lanes": count, "chunk": held, "batched": True, **known[held]}


def out_of_memory(problem: BaseException | None) -> bool:
    """Was the device too small? The engine tells so in words of its own, with torch's error as their cause."""
    return problem is not None and (isinstance(problem, torch.OutOfMemoryError) or out_of_memory(problem.__cause__))


def forget() -> None:
    """Let go of what searches before held on the device, and begin to count its memory anew."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def gigabytes() -> float | None:
    """The most that tensors held on the device since `forget`; None without one."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
