"""How close to the machine's limit: operations counted, the device's own peak measured, and the share achieved."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.speed.throughput import Row, Show, forget, quiet
from benchmarks.speed.timing import Running, cudnn_benchmark, seconds_of, turn_by_turn
from benchmarks.speed.workloads import Workload, workload
from gradleak.engine import Engine

MOST_FORWARD = {"cuda": 512, "cpu": 32}  # images of one forward pass: more would add nothing


def roofline(
    networks: Sequence[str],
    lanes: int,
    precisions: Sequence[str],
    seconds: float = 1.0,
    show: Show = quiet,
    device: str = "auto",
) -> list[Row]:
    """Of each network: operations of a forward pass and of a step, and the share of the peak that each achieves.

    The peak is the better of a large matrix product and a large convolution on the same device, in the same precision;
    the convolution in the better memory layout, which the row names, and by the algorithm that cuDNN finds fastest.
    Operations of a step are those of one eager lane with torch's own layers: what the method asks for, whichever way
    lanes compute it. Elementwise work (activations, norms, the optimiser) is not counted, as is usual.
    """
    rows: list[Row] = []
    for precision in precisions:
        engine = Engine(device, precision)
        peaks = peak(engine, seconds)
        best = max(peaks["matrix"], peaks["convolution"])
        row: Row = {"what": "peak", "precision": precision, **peaks}
        rows.append(row)
        show(row)
        for network in networks:
            work = workload(network)
            count = min(lanes, work.chunk(engine))
            forward, step = operations(work, engine)
            forget()
            passes = forward_rate(work, engine, min(lanes, MOST_FORWARD[engine.where.type]), seconds)
            steps = turn_by_turn([Running(work, count, engine)], seconds)[0].rate
            row = {
                "what": "network",
                "network": network,
                "precision": precision,
                "lanes": count,
                "forward_flops": forward,
                "step_flops": step,
                "forward_per_second": passes,
                "steps_per_second": steps,
                "forward_share": passes * forward / best,
                "step_share": steps * step / best,
            }
            rows.append(row)
            show(row)
    return rows


LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def peak(engine: Engine, seconds: float = 1.0) -> Row:
    """Operations per second of a large matrix product and of a large convolution: the best of several calls.

    The convolution is measured in both memory layouts (`convolutions`), and the better one is the peak (`layout`).
    """
    cuda = engine.where.type == "cuda"
    side, images = (8192, 256) if cuda else (2048, 16)
    plain = replace(engine, batched=False)  # torch's own layers, with nothing of ours around them
    with plain.settings(), cudnn_benchmark(True), torch.no_grad():
        sizes = ((side, side), (side, side), (images, 256, 32, 32), (256, 256, 3, 3))
        a, b, x, w = (torch.randn(size, device=engine.where, dtype=engine.dtype) for size in sizes)
        product = min(seconds_of(lambda: a @ b, cuda, seconds))
        spent = {}
        for name, layout in LAYOUTS.items():
            image, kernel = x.to(memory_format=layout), w.to(memory_format=layout)
            run = partial(torch.nn.functional.conv2d, image, kernel, padding=1)
            spent[name] = min(seconds_of(run, cuda, seconds))
    rates = {name: 2 * images * 32 * 32 * 256 * 256 * 9 / each for name, each in spent.items()}
    best = max(rates, key=lambda name: rates[name])
    return {"matrix": 2 * side**3 / product, "convolution": rates[best], "layout": best, "convolutions": rates}


def operations(work: Workload, engine: Engine) -> tuple[int, int]:
    """Multiplications and additions of one forward pass, and of one step of the attack, of one lane."""
    eager = Engine(engine.device, engine.precision, batched=False, graph=False)
    with eager.settings():
        scene = work.scenes(1, eager)[0]
        batch = {**scene.task.blank(work.examples), **scene.fields}
        with Counting() as forward, torch.no_grad():
            scene.task.loss(scene.weights, batch, scene.buffers)
        search = work.search(1, eager)
        with Counting() as step:
            search.tick()
    return forward.total, step.total


class Counting(TorchDispatchMode):
    """Counts the operations of products and convolutions by torch's own formulae.

    torch's FlopCounterMode also follows modules, with hooks that gradients of gradients do not allow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += int(count(*args, **(kwargs or {}), out_val=out))
        return out


def forward_rate(work: Workload, engine: Engine, lanes: int, seconds: float) -> float:
    """Forward passes of one lane's batch per second, `lanes` of them as one batch."""
    with engine.settings(), torch.no_grad():
        scene = work.scenes(1, engine)[0]
        blank = {**scene.task.blank(work.examples), **scene.fields}
        batch = {name: value.repeat_interleave(lanes, dim=0) for name, value in blank.items()}
        run = lambda: scene.task.loss(scene.weights, batch, scene.buffers)  # noqa: E731
        return lanes / statistics.median(seconds_of(run, engine.where.type == "cuda", seconds))
