"""Memory of a lane: peaks at several numbers of lanes, and the straight line through them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.throughput import Row, Show, forget, gigabytes, out_of_memory, quiet
from benchmarks.speed.timing import Running
from benchmarks.speed.workloads import workload
from gradleak.engine import Engine


def memory(
    networks: Sequence[str], lanes: Sequence[int], precision: str = "strict", show: Show = quiet, device: str = "auto"
) -> list[Row]:
    """Of each network: megabytes at every number of lanes, those of one more lane, and how straight the line is.

    What tensors held at most, while a search was made and took two steps. A CUDA graph's memory is in it.
    """
    rows: list[Row] = []
    engine = Engine(device, precision)
    for network in networks:
        chunk = workload(network).chunk(engine)
        counts = [count for count in lanes if count <= chunk]
        held = [_on_device(network, count, engine) for count in counts]
        known = [(count, used) for count, used in zip(counts, held, strict=True) if used is not None]
        row: Row = {"network": network, "precision": precision, "device": engine.where.type, "chunk": chunk}
        row |= {"lanes": [count for count, _ in known], "megabytes": [used for _, used in known]}
        if len(known) > 2:
            row |= line([count for count, _ in known], [used for _, used in known])
        rows.append(row)
        show(row)
    return rows


def line(lanes: Sequence[float], megabytes: Sequence[float]) -> dict[str, float]:
    """Least squares: what a lane adds, what is there without any, and how far the worst point is off, as a share."""
    x, y = torch.tensor(lanes, dtype=torch.float64), torch.tensor(megabytes, dtype=torch.float64)
    slope, constant = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), y[:, None]).solution[:, 0]
    off = (slope * x + constant - y).abs().max() / y.max()
    return {"per_lane": float(slope), "constant": float(constant), "worst_off": float(off)}


def _on_device(network: str, lanes: int, engine: Engine) -> float | None:
    if engine.where.type != "cuda":
        return _of_tensors(network, lanes, engine)
    forget()
    try:
        Running(workload(network), lanes, engine).seconds(2)
    except RuntimeError as problem:
        if not out_of_memory(problem):
            raise
        return None
    used = gigabytes()
    return None if used is None else used * 1024


def _of_tensors(network: str, lanes: int, engine: Engine) -> float:
    """The most megabytes of tensors on the CPU at any moment, from torch's profiler."""
    work = workload(network)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        Running(work, lanes, engine).seconds(2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return float(max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")) / 2**20
