"""The peer beside us: breaching 0.1.2 and this engine on the same network, pictures, starts, steps and settings.

Everything is measured in one run, turn by turn. The peer is called as its users call it, one target after the other,
with its own configuration for Inverting Gradients. Where the methods still differ: its total variation sees a border of
zeros around the image, and it keeps the image after the step of its lowest objective where we keep the best match.
"""

from __future__ import annotations

import importlib
import logging
import statistics
import warnings
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.bench.quality import Course, course, scores
from gradleak.bench.speed import LANES, Row, Show, forget, quiet
from gradleak.bench.timing import now, synchronise
from gradleak.bench.workloads import Workload, workload
from gradleak.engine import Engine

VERSION = "0.1.2"
FULL = 4800  # steps of IG in its paper
TV, LR = 1e-6, 0.1  # of our `ig`, handed to the peer


class NoPeer(RuntimeError):
    """The peer cannot be imported."""


def load() -> Any:
    """The module `breaching`; it imports torchvision."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("breaching")
    except (ImportError, RuntimeError) as problem:
        raise NoPeer(
            f"breaching {VERSION} cannot be imported ({problem}). Install the extra `bench`; where torchvision does "
            "not work: python benchmarks/peers.py --without-torchvision."
        ) from problem


def configuration(breaching: Any, steps: int) -> Any:
    """Its own settings of IG, with our number of steps, rate and weight of total variation."""
    told = [f"optim.max_iterations={steps}", f"optim.step_size={LR}", f"regularization.total_variation.scale={TV}"]
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return breaching.get_attack_config("invertinggradients", overrides=told)


def run_peer(breaching: Any, settings: Any, work: Workload, target: int, start: Tensor, device: torch.device) -> Course:
    """The peer on one target from a given start, with torch's own defaults of precision."""
    seen, batch, field = work.seen[target], work.knows[target].given, work.task.fields["x"]
    model, setup = work.task.model, {"device": device, "dtype": torch.float32}
    logging.getLogger("breaching").setLevel(logging.WARNING)
    cuda = device.type == "cuda"
    synchronise(cuda)
    began = now(cuda)
    attacker = breaching.attacks.prepare_attack(model, nn.CrossEntropyLoss(), settings, setup)
    names = [name for name, _ in model.named_parameters()]
    payload = {
        "parameters": [seen.weights[name].to(device) for name in names],
        "buffers": [value.to(device) for value in model.buffers()],  # public: the model stays in evaluation mode
        "metadata": SimpleNamespace(shape=field.shape, modality="vision"),
    }
    shared = {
        "gradients": [seen.update[name].to(device) for name in names],
        "buffers": None,
        "metadata": {"num_data_points": seen.num_examples, "labels": batch["y"].to(device), "local_hyperparams": None},
    }
    found, _ = attacker.reconstruct([payload], [shared], server_secrets={}, initial_data=start.to(device))
    synchronise(cuda)
    spent = now(cuda) - began
    x = field.unit(found["data"].detach().cpu()).clamp(0, 1)[None]
    return Course(0.0, spent, settings.optim.max_iterations, x, start[None], [], [])


def peers(
    networks: Sequence[str] = ("lenet", "convnet64", "resnet18"),
    lanes: Sequence[int] = LANES[2:],
    steps: int = 200,
    precisions: Sequence[str] = ("strict", "fast"),
    rounds: int = 3,
    show: Show = quiet,
    device: str = "auto",
) -> list[Row]:
    """Rows of each network, number of lanes and precision, with the peer and our own eager loop beside them.

    In every round the peer solves one target from start to end, so does our loop without lanes (`batched=False`), and
    then all lanes are solved together, once for every number of lanes and precision. Ratios are of image x iterations
    per second within a round, the median over rounds. `times_peer` counts steps alone; `times_peer_whole` the whole
    call, our start and the capture of the graph included. PSNR is of the targets that both solved, from equal starts.
    """
    breaching = load()
    rows: list[Row] = []
    for network in networks:
        work = workload(network, steps=steps, targets=min(max(lanes), max(8, rounds)))
        engines = [Engine(device, precision) for precision in precisions]
        ways = list(dict.fromkeys((engine, min(count, work.chunk(engine))) for engine in engines for count in lanes))
        for row in _beside(breaching, work, ways, rounds):
            rows.append(row)
            show(row)
    return rows


def _beside(breaching: Any, work: Workload, ways: Sequence[tuple[Engine, int]], rounds: int) -> list[Row]:
    first = ways[0][0]
    eager = Engine(first.device, first.precision, batched=False, graph=False)
    with eager.settings():
        begin = work.search(rounds, eager)
        starts = begin.decode(begin.v)["x"].detach().cpu()
    settings = configuration(breaching, work.attack.stages[0].optimiser.steps)
    # A first call pays for libraries being loaded.
    run_peer(breaching, configuration(breaching, 2), work, 0, starts[0], eager.where)
    theirs: list[Course] = []
    loops: list[Course] = []
    ours: list[list[Course]] = [[] for _ in ways]
    for number in range(rounds):
        target = number % len(work.seen)
        theirs.append(run_peer(breaching, settings, work, target, starts[number], eager.where))
        loops.append(course(work, 1, eager, first=number))
        for (engine, lanes), own in zip(ways, ours, strict=True):
            forget()
            own.append(course(work, lanes, engine))
    return [_row(work, way, own, theirs, loops) for way, own in zip(ways, ours, strict=True)]


def _row(
    work: Workload, way: tuple[Engine, int], ours: Sequence[Course], theirs: Sequence[Course], loops: Sequence[Course]
) -> Row:
    engine, lanes = way
    both = min(lanes, len(theirs))
    of_peer = [float(scores(ran.found, work, number)) for number, ran in enumerate(theirs)][:both]
    of_loop = [float(scores(ran.found, work, number)) for number, ran in enumerate(loops)][:both]
    of_ours = scores(ours[0].found, work)
    rate, setup = _median(ran.rate for ran in ours), _median(ran.setup for ran in ours)
    return {
        "network": work.network,
        "lanes": lanes,
        "precision": engine.precision,
        "steps": ours[0].steps,
        "rate": rate,
        "peer_rate": _median(ran.rate for ran in theirs),
        "eager_rate": _median(ran.rate for ran in loops),
        "times_peer": _median(own.rate / its.rate for own, its in zip(ours, theirs, strict=True)),
        "times_peer_whole": _median(own.whole_rate / its.whole_rate for own, its in zip(ours, theirs, strict=True)),
        "times_peer_rounds": [own.rate / its.rate for own, its in zip(ours, theirs, strict=True)],
        "times_eager": _median(own.rate / its.rate for own, its in zip(ours, loops, strict=True)),
        "eager_times_peer": _median(own.rate / its.rate for own, its in zip(loops, theirs, strict=True)),
        "setup_seconds": setup,
        "images_per_hour": 3600 * lanes / (setup + FULL * lanes / rate),
        "psnr": of_ours.tolist()[:both],
        "peer_psnr": of_peer,
        "eager_psnr": of_loop,
        "psnr_difference": float(of_ours[:both].mean()) - statistics.mean(of_peer),
        "psnr_all": float(of_ours.mean()),
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))
