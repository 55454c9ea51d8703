"""Everything that `gradleak bench` measures, with torch and numpy alone: for machines without the command line.

    PYTHONPATH=src python3 benchmarks/speed.py --out h200.json
    PYTHONPATH=src python3 benchmarks/speed.py --only engine,roofline --quick
    PYTHONPATH=src python3 benchmarks/speed.py --only memory,quality --steps 1000 --add --out h200.json

Sections are measured in the order in which `--only` names them, networks and lanes in that of their options. Rows are
written as they come, so that a run that is stopped keeps what it has. `benchmarks/peers.py` has the peer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from gradleak import bench


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    words.add_argument("--only", help=f"some of {','.join(bench.SECTIONS)}; not given: all but peer")
    words.add_argument("--networks", help=",".join(bench.NETWORKS))
    words.add_argument("--lanes")
    words.add_argument("--precision")
    words.add_argument("--seconds", type=float)
    words.add_argument("--device", default="auto")
    words.add_argument("--threads", type=int, help="of the CPU")
    words.add_argument("--quick", action="store_true")
    words.add_argument("--steps", type=int, help="of an attack that is run to its end (quality)")
    words.add_argument("--out", type=Path)
    words.add_argument("--add", action="store_true", help="keep what is in --out; rows that are measured are replaced")
    words.add_argument("--against", type=Path, help="a stored result of this machine; exit code 1 where a ratio fell")
    told = words.parse_args()
    if told.threads:
        torch.set_num_threads(told.threads)
    plan = bench.Plan.of(told.device, quick=told.quick)
    split = lambda text: tuple(text.split(","))  # noqa: E731
    if told.networks:
        chosen = split(told.networks)
        plan = replace(plan, networks=chosen, searched=tuple(one for one in plan.searched if one[0] in chosen))
    if told.lanes:
        plan = replace(plan, lanes=tuple(map(int, split(told.lanes))))
    if told.precision:
        plan = replace(plan, precisions=split(told.precision))
    if told.seconds:
        plan = replace(plan, seconds=told.seconds)
    if told.steps:
        plan = replace(plan, steps=told.steps)
    before = None
    if told.add and told.out is not None and told.out.is_file():
        before = json.loads(told.out.read_text(encoding="utf-8"))
    only = split(told.only) if told.only else tuple(name for name in bench.SECTIONS if name != "peer")
    show = lambda section, row: print(bench.told(section, row), flush=True)  # noqa: E731
    held = bench.measure(plan, only, told.out, show, before)
    print(json.dumps({"seconds": held["seconds"], "load": held["load"], "failed": held["failed"]}))
    if held["failed"]:
        sys.exit(2)
    if told.against:
        stored = json.loads(told.against.read_text(encoding="utf-8"))
        slower = bench.fallen(held, stored, plan)
        print(*(f"slower: {one}" for one in slower), f"{bench.compared(held, stored)} ratios compared.", sep="\n")
        sys.exit(bool(slower))


if __name__ == "__main__":
    main()
