"""The peer beside us: breaching 0.1.2 and this engine on the same network, pictures, starts, steps and settings.

Everything is measured in one run, turn by turn. The peer is called as its users call it, one target after the other,
with its own configuration for Inverting Gradients. Where the methods still differ: its total variation sees a border of
zeros around the image, and it keeps the image after the step of its lowest objective where we keep the best match.
Of torch's settings it has the defaults, but for `cudnn.benchmark`: on or off, whichever makes it faster.
"""

from __future__ import annotations

import importlib
import logging
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.quality import Course, course, scores
from benchmarks.speed.throughput import LANES, Row, Show, forget, quiet
from benchmarks.speed.timing import cudnn_benchmark, now, synchronise
from benchmarks.speed.workloads import Workload, workload
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
            "not work: python -m benchmarks peers --without-torchvision."
        ) from problem


def configuration(breaching: Any, steps: int) -> Any:
    """Its own settings of IG, with our number of steps, rate and weight of total variation."""
    settings = [f"optim.max_iterations={steps}", f"optim.step_size={LR}", f"regularization.total_variation.scale={TV}"]
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return breaching.get_attack_config("invertinggradients", overrides=settings)


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


def settings_of_cudnn(
    breaching: Any, work: Workload, start: Tensor, steps: int, device: torch.device
) -> tuple[bool, dict[str, float]]:
    """The peer's rate in a short call with `torch.backends.cudnn.benchmark` off (torch's default) and on; the faster.

    A call before each pays for libraries being loaded, and for cuDNN's search. Without cuDNN there is nothing to try.
    """
    warm, short = configuration(breaching, 3), configuration(breaching, steps)
    if device.type != "cuda":
        run_peer(breaching, warm, work, 0, start, device)
        return False, {}
    rates: dict[bool, float] = {}
    for on in (False, True):
        with cudnn_benchmark(on):
            run_peer(breaching, warm, work, 0, start, device)
            rates[on] = run_peer(breaching, short, work, 0, start, device).rate
    return rates[True] > rates[False], {"off": rates[False], "on": rates[True]}


@dataclass(frozen=True)
class Effort:
    """How long to measure. On a machine that is rented by the minute, fewer `loops`, `turns` or `seconds`.

    steps      of every search
    rounds     targets that the peer solves, one in each round
    loops      rounds in which our loop runs; None: all
    turns      rounds in which our lanes run; later rounds are compared with these again; None: all
    seconds    on a GPU: as many rounds as the peer can do in that time, by its rate in the trial, at least one
    """

    steps: int = 200
    rounds: int = 3
    loops: int | None = None
    turns: int | None = None
    seconds: float | None = None

    def rounds_at(self, rates: Iterable[float]) -> int:
        """Rounds that fit into `seconds`, where the peer's rates in steps per second are known."""
        best = max(rates, default=None)
        if self.seconds is None or best is None:
            return self.rounds
        return max(1, min(self.rounds, int(self.seconds * best / self.steps)))


EFFORT = Effort()


def peers(
    networks: Sequence[str] = ("lenet", "convnet64", "resnet18"),
    lanes: Sequence[int] = LANES[2:],
    effort: Effort = EFFORT,
    precisions: Sequence[str] = ("strict", "fast"),
    show: Show = quiet,
    device: str = "auto",
    draft: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Rows of each network, number of lanes and precision, with the peer and our own eager loop beside them.

    In every round the peer solves one target from start to end, so does our loop without lanes (`batched=False`), and
    then all lanes are solved together, once for every number of lanes and precision. Ratios are of image x iterations
    per second within a round, the median over rounds. `times_peer` counts steps alone; `times_peer_whole` the whole
    call, our start and the capture of the graph included. PSNR is of the targets that both solved, from equal starts.
    The peer has the setting of cuDNN that is the faster for it (`peer_cudnn_benchmark`, `peer_trial_rates`).
    `draft` gets the rows of a network after every round.
    """
    breaching = load()
    rows: list[Row] = []
    for network in networks:
        work = workload(network, steps=effort.steps, targets=min(max(lanes), max(8, effort.rounds)))
        engines = [Engine(device, precision) for precision in precisions]
        ways = list(dict.fromkeys((engine, min(count, work.chunk(engine))) for engine in engines for count in lanes))
        of_network: list[Row] = []
        for of_network in _beside(breaching, work, ways, effort):
            draft(of_network)
        for row in of_network:
            rows.append(row)
            show(row)
    return rows


def _beside(breaching: Any, work: Workload, ways: Sequence[tuple[Engine, int]], effort: Effort) -> Iterator[list[Row]]:
    """After every round: a row for each of the `ways`, from all rounds so far."""
    first = ways[0][0]
    eager = Engine(first.device, first.precision, batched=False, graph=False)
    with eager.settings():
        begin = work.search(effort.rounds, eager)
        starts = begin.decode(begin.v)["x"].detach().cpu()
    settings = configuration(breaching, effort.steps)
    search, trials = settings_of_cudnn(breaching, work, starts[0], max(1, effort.steps // 5), eager.where)
    rounds = effort.rounds_at(trials.values())
    cudnn: Row = {"peer_cudnn_benchmark": "on" if search else "off", "peer_trial_rates": trials} if trials else {}
    theirs: list[Course] = []
    looped: list[Course] = []
    ours: list[list[Course]] = [[] for _ in ways]
    for number in range(rounds):
        with cudnn_benchmark(search):
            theirs.append(run_peer(breaching, settings, work, number % len(work.seen), starts[number], eager.where))
        if number < (effort.loops or rounds):
            looped.append(course(work, 1, eager, first=number))
        if number < (effort.turns or rounds):
            for (engine, lanes), own in zip(ways, ours, strict=True):
                forget()
                own.append(course(work, lanes, engine))
        yield [{**_row(work, way, own, theirs, looped), **cudnn} for way, own in zip(ways, ours, strict=True)]


def _row(
    work: Workload, way: tuple[Engine, int], ours: Sequence[Course], theirs: Sequence[Course], loops: Sequence[Course]
) -> Row:
    engine, lanes = way
    both = min(lanes, len(theirs))
    of_peer = [float(scores(ran.found, work, number)) for number, ran in enumerate(theirs)][:both]
    of_loop = [float(scores(ran.found, work, number)) for number, ran in enumerate(loops)][:both]
    of_ours = scores(ours[0].found, work)
    rate, setup = _median(ran.rate for ran in ours), _median(ran.setup for ran in ours)
    beside = list(zip(cycle(ours), theirs))  # a round in which lanes did not run is held against an earlier one
    return {
        "network": work.network,
        "lanes": lanes,
        "precision": engine.precision,
        "steps": ours[0].steps,
        "rounds": len(theirs),
        "rate": rate,
        "peer_rate": _median(ran.rate for ran in theirs),
        "eager_rate": _median(ran.rate for ran in loops),
        "times_peer": _median(own.rate / its.rate for own, its in beside),
        "times_peer_whole": _median(own.whole_rate / its.whole_rate for own, its in beside),
        "times_peer_rounds": [own.rate / its.rate for own, its in beside],
        "times_eager": _median(own.rate / its.rate for own, its in zip(cycle(ours), loops)),
        "eager_times_peer": _median(own.rate / its.rate for own, its in zip(loops, theirs)),
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
