"""This engine beside breaching 0.1.2, in one run: same network, pictures, starts, steps and settings of IG.

    python benchmarks/peers.py --network lenet,convnet64,resnet18 --steps 200 --out peers.json
    python benchmarks/peers.py --network lenet:1024:1000,resnet18:128:200 --precision fast --loops 1 --turns 1

A network may bring its own lanes and steps. Rows so far are written after every round (`unfinished`).

The peer comes with the extra `bench`, or from a folder on PYTHONPATH. It imports torchvision, for data sets and models
that are not used here; `--without-torchvision` puts an empty module in its place where torchvision does not work, and
the result says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PARTS = ("", ".utils", ".models", ".models.densenet", ".transforms", ".datasets", ".datasets.utils")


class Absent(ModuleType):
    """A module whose every name is a class without content: enough to be imported and inherited from."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def without_torchvision() -> None:
    """Let `import torchvision` give an empty module. Nothing that is measured calls it."""
    for part in PARTS:
        module = Absent(f"torchvision{part}")
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)


def of_case(case: str, lanes: str, steps: int) -> tuple[str, tuple[int, ...], int]:
    """NAME[:LANES[:STEPS]], with the lanes and steps of all where it has none of its own."""
    name, *own = case.split(":")
    return name, tuple(map(int, own[:1] or lanes.split(","))), int(own[1]) if len(own) > 1 else steps


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    words.add_argument("--network", default="lenet,convnet64,resnet18", help="NAME[:LANES[:STEPS]],...")
    words.add_argument("--lanes", default="32,128,512", help="more than the engine solves together: as many as it does")
    words.add_argument("--precision", default="strict,fast", help="ours; the peer has torch's defaults")
    words.add_argument("--steps", type=int, default=200)
    words.add_argument("--rounds", type=int, default=3, help="targets that the peer solves, one each")
    words.add_argument("--loops", type=int, help="rounds in which our loop runs, too; not given: all")
    words.add_argument("--turns", type=int, help="rounds in which our lanes run; not given: all")
    words.add_argument("--seconds", type=float, help="of the peer, of one network, on a GPU: fewer rounds where needed")
    words.add_argument("--device", default="auto")
    words.add_argument("--threads", type=int, help="of the CPU")
    words.add_argument("--out", type=Path)
    words.add_argument("--without-torchvision", action="store_true")
    told = words.parse_args()
    if told.without_torchvision:
        without_torchvision()

    import torch

    from gradleak.bench import peer, suite, timing
    from gradleak.core import environment
    from gradleak.engine import Engine

    if told.threads:
        torch.set_num_threads(told.threads)
    held: dict[str, Any] = {"environment": environment.describe(), "load": {"before": timing.load()}, "peer": []}
    held["torchvision"] = "an empty module in its place" if told.without_torchvision else "real"
    held["breaching"] = peer.VERSION
    held["clock"] = timing.clock(Engine(told.device).where.type == "cuda")

    def note(row: dict[str, Any]) -> None:
        held["peer"].append(row)
        held.pop("unfinished", None)
        print(suite.told("peer", row), flush=True)
        suite.write(held, told.out)

    def draft(rows: list[dict[str, Any]]) -> None:
        held["unfinished"] = rows
        suite.write(held, told.out)

    split = lambda text: tuple(text.split(","))  # noqa: E731
    for case in split(told.network):
        network, lanes, steps = of_case(case, told.lanes, told.steps)
        peer.peers(
            [network],
            lanes,
            steps,
            split(told.precision),
            told.rounds,
            note,
            told.device,
            loops=told.loops,
            turns=told.turns,
            seconds=told.seconds,
            draft=draft,
        )
    held["load"]["after"] = timing.load()
    suite.write(held, told.out)
    print(json.dumps(held["load"]))


if __name__ == "__main__":
    main()
