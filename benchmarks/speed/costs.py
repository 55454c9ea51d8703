"""What a step costs as the problem grows: images of a batch, their side, local steps, parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.speed.throughput import Row, Show, forget, gigabytes, quiet
from benchmarks.speed.timing import Running, turn_by_turn
from benchmarks.speed.workloads import Workload, workload
from gradleak import models
from gradleak.engine import Engine


def _wide(width: int) -> Workload:
    return workload("convnet", build=lambda shape: models.convnet(shape=shape, width=width, norm="batch").eval())


# What grows, the network that shows it, its sizes (the first is the measure of the others), and how each is made.
GROWTH: dict[str, tuple[str, tuple[int, ...], Callable[[int], Workload]]] = {
    "batch": ("lenet", (1, 2, 4, 8, 16), lambda size: workload("lenet", examples=size)),
    "side": ("lenet", (16, 32, 64), lambda size: workload("lenet", side=size)),
    "local_steps": ("lenet", (1, 2, 4, 8), lambda size: workload("lenet", examples=4, local_steps=size)),
    "width": ("convnet", (8, 16, 32, 64), _wide),
}


def costs(
    lanes: int = 8,
    precision: str = "strict",
    seconds: float = 1.0,
    show: Show = quiet,
    device: str = "auto",
    growing: Sequence[str] = tuple(GROWTH),
) -> list[Row]:
    """Seconds of a step of all lanes at every size, beside the smallest one in the same round: `times` that."""
    rows: list[Row] = []
    engine = Engine(device, precision)
    for name in growing:
        network, sizes, make = GROWTH[name]
        first = make(sizes[0])
        least = Running(first, lanes, engine)
        for size in sizes:
            work = first if size == sizes[0] else make(size)
            forget()
            if work is first:
                small = own = turn_by_turn([least], seconds)[0]
            else:
                small, own = turn_by_turn([least, Running(work, lanes, engine)], seconds)
            row: Row = {"growing": name, "size": size, "network": network, "parameters": work.parameters}
            row |= {"lanes": lanes, "precision": precision, "seconds_per_step": lanes / own.rate}
            row |= {"times": small.over(own), "gigabytes": gigabytes()}
            rows.append(row)
            show(row)
    return rows
