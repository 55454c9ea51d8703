"""How fast is the engine? Images x iterations per second of gradient matching, and lanes beside one at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradleak import attacks, draws, models
from gradleak.attack import Composed
from gradleak.engine import Engine, Search, lanes_of
from gradleak.local import LocalTraining, observe
from gradleak.observation import Knowledge
from gradleak.scene import Scene
from gradleak.task import Task

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: models.lenet_zhu(),
    "convnet64": lambda: models.convnet(norm="batch").eval(),
    "resnet18": lambda: models.resnet18(norm="group"),
}


def search(network: str, lanes: int, engine: Engine) -> Search:
    """IG on one random image of a network, in as many restarts as lanes, ready to tick. Its content costs no time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        batch = {"x": torch.rand(1, 3, 32, 32), "y": torch.randint(10, (1,))}
        task = Task.supervised(NETWORKS[network](), nn.functional.cross_entropy, like=(batch["x"], batch["y"]))
    seen = observe(task, batch, LocalTraining(lr=1.0))
    scene = replace(
        Scene.of(task.to(engine.where, engine.dtype), seen, Knowledge()), fields={"y": batch["y"].to(engine.where)}
    )
    template, lane = lanes_of([scene], [[draws.key("bench", i) for i in range(lanes)]])
    attack = attacks.get("ig", steps=10_000)
    assert isinstance(attack, Composed)
    return Search(attack.stages[0], template, lane, (1, lanes), engine, None)


def rate(network: str, lanes: int, engine: Engine, seconds: float = 2.0) -> dict[str, Any]:
    """Images x iterations per second: steps are timed in three equal parts, and the median part counts."""
    cuda = engine.where.type == "cuda"
    with engine.settings():
        held = search(network, lanes, engine)
        advance = held.captured() if cuda and engine.graph else held.tick

        def run(steps: int) -> float:
            began = time.perf_counter()
            for _ in range(steps):
                advance()
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        run(2)
        steps = max(2, int(seconds / 3 / (run(2) / 2)))
        spent = sorted(run(steps) for _ in range(3))
    return {
        "network": network,
        "lanes": lanes,
        "precision": engine.precision,
        "batched": engine.batched,
        "rate": lanes * steps / spent[1],
        "spread": spent[2] / spent[0] - 1,
        "gigabytes": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def engine(
    networks: Sequence[str] = tuple(NETWORKS),
    lanes: Sequence[int] = (1, 32, 128, 512),
    precisions: Sequence[str] = ("fast", "strict"),
    out: str | Path | None = None,
    seconds: float = 2.0,
    show: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Measure every network at every number of lanes and precision; rows are written as JSON where `out` is given."""
    rows: list[dict[str, Any]] = []
    for network in networks:
        for precision in precisions:
            # One lane, eager, without vmap: what a loop over restarts does. Ratios within one run are what counts.
            alone, one = (1, Engine(precision=precision, batched=False, graph=False)), 0.0
            for count, how in (alone, *((count, Engine(precision=precision)) for count in lanes)):
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                try:
                    row = rate(network, count, how, seconds)
                except torch.OutOfMemoryError:
                    row = {"network": network, "lanes": count, "precision": precision, "batched": True, "rate": None}
                if not how.batched:
                    one = row["rate"]
                row["times_one_at_a_time"] = row["rate"] / one if row["rate"] else None
                rows.append(row)
                show(row)
    if out is not None:
        from gradleak.environment import describe

        Path(out).write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")
    return rows
