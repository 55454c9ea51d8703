"""This engine beside breaching 0.1.2, in one run: same network, pictures, starts, steps and settings of IG.

    python -m benchmarks peers --network lenet,convnet64,resnet18 --steps 200 --out peers.json
    python -m benchmarks peers --network lenet:1024:1000,resnet18:128:200 --precision fast --loops 1 --turns 1

A network may bring its own lanes and steps. Rows so far are written after every round (`unfinished`).

The peer comes with the extra `bench`, or from a folder on PYTHONPATH. It imports torchvision, for data sets and models
that are not used here; `--without-torchvision` puts an empty module in its place where torchvision does not work, and
the result says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from benchmarks import options

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


def main(words: Sequence[str] | None = None) -> int:
    """Measure both, and print a line for every row."""
    accepted = options.parser(__doc__, "peers")
    add = accepted.add_argument
    add("--network", default="lenet,convnet64,resnet18", help="NAME[:LANES[:STEPS]],...")
    add("--lanes", default="32,128,512", help="more than the engine solves together: as many as it does")
    add("--precision", default="strict,fast", help="ours; the peer has torch's defaults")
    add("--steps", type=int, default=200)
    add("--rounds", type=int, default=3, help="targets that the peer solves, one each")
    add("--loops", type=int, help="rounds in which our loop runs, too; not given: all")
    add("--turns", type=int, help="rounds in which our lanes run; not given: all")
    add("--seconds", type=float, help="of the peer, of one network, on a GPU: fewer rounds where needed")
    add("--without-torchvision", action="store_true", help="an empty module in its place")
    given = accepted.parse_args(words)
    if given.without_torchvision:
        without_torchvision()

    import torch

    from benchmarks.speed import peer, suite, timing
    from gradleak.core import environment
    from gradleak.engine import Engine

    if given.threads:
        torch.set_num_threads(given.threads)
    result: dict[str, Any] = {"environment": environment.describe(), "load": {"before": timing.load()}, "peer": []}
    result["torchvision"] = "an empty module in its place" if given.without_torchvision else "real"
    result["breaching"] = peer.VERSION
    result["clock"] = timing.clock(Engine(given.device).where.type == "cuda")

    def note(row: dict[str, Any]) -> None:
        result["peer"].append(row)
        result.pop("unfinished", None)
        print(suite.format_row("peer", row), flush=True)
        suite.write(result, given.out)

    def draft(rows: list[dict[str, Any]]) -> None:
        result["unfinished"] = rows
        suite.write(result, given.out)

    precisions = options.names(given.precision, options.PRECISIONS, "precision")
    for text in given.network.split(","):
        network, lanes, steps = options.case(text, given.lanes, given.steps)
        effort = peer.Effort(steps, given.rounds, given.loops, given.turns, given.seconds)
        peer.peers([network], lanes, effort, precisions, note, given.device, draft)
    result["load"]["after"] = timing.load()
    suite.write(result, given.out)
    print(json.dumps(result["load"]))
    return 0
