"""How long does `gradleak check` take? CPU seconds of a whole check, every attack asked.

    python benchmarks/check_time.py        # benchmarks/results/check-time.json; a minute on two cores

Each network runs `rounds` times in this process, after one check of a small network that loads what torch loads late.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradleak as gl
from gradleak.audit.preflight import preflight
from gradleak.core.environment import describe

NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "lenet-zhu, 32 px": lambda: (gl.models.lenet_zhu(), (3, 32, 32)),
    "resnet18, 64 px": lambda: (gl.registry.get("model", "resnet18", shape=(3, 64, 64), classes=10), (3, 64, 64)),
}


def seconds_of(name: str) -> dict[str, Any]:
    """CPU and wall seconds of one check, and what it says."""
    network, shape = NETWORKS[name]()
    like = (torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long))
    task = gl.Task.supervised(network.eval(), nn.functional.cross_entropy, like=like)
    wall, cpu = time.perf_counter(), time.process_time()
    result = preflight(task, batch={"x": torch.full((2, *shape), 0.5), "y": like[1]})
    spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    return {**spent, "attacks": len(result.lines), "passed": result.passed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "check-time.json")
    given = parser.parse_args()
    seconds_of("lenet-zhu, 32 px")
    runs = {name: [seconds_of(name) for _ in range(given.rounds)] for name in NETWORKS}
    figures = {
        name: {"median_cpu": sorted(r["cpu"] for r in each)[len(each) // 2], "runs": each}
        for name, each in runs.items()
    }
    print(json.dumps({name: each["median_cpu"] for name, each in figures.items()}, indent=1))
    given.out.write_text(json.dumps({"environment": describe(), **figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
