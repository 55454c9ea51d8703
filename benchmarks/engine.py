"""Images x iterations per second of gradient matching, over networks, lanes and precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import options
from benchmarks.speed import throughput
from benchmarks.speed.networks import NETWORKS
from benchmarks.speed.suite import Plan


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print a line for every network, number of lanes and precision."""
    accepted = options.parser(__doc__, "engine")
    accepted.add_argument("--networks", help=f"some of {','.join(NETWORKS)}; not given: all of them")
    accepted.add_argument("--lanes", help="reconstructions solved together; not given: 1,8,32,128,512")
    accepted.add_argument("--precision", help="fast, strict, double; not given: fast,strict, on a CPU strict")
    accepted.add_argument("--seconds", type=float, default=2.0, help="how long to measure each (default: 2)")
    given = accepted.parse_args(words)
    if given.threads:
        torch.set_num_threads(given.threads)
    plan = Plan.of(given.device)
    try:
        networks = options.names(given.networks or ",".join(plan.networks), NETWORKS, "network")
        lanes = plan.lanes if given.lanes is None else options.numbers(given.lanes)
        precisions = options.names(given.precision or ",".join(plan.precisions), options.PRECISIONS, "precision")
    except ValueError as problem:
        accepted.error(str(problem))
    show = lambda row: print(throughput.format_rate(row), flush=True)  # noqa: E731
    throughput.engine(networks, lanes, precisions, given.out, given.seconds, show, given.device)
    return 0
