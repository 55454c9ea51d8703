"""How long does a round of secure aggregation take, and how does it grow with the number of neighbours?

A whole round, all clients and the server with their messages as bytes, for each number of neighbours; "all" is the
complete graph of Bonawitz et al. Every client's values are the same random vector, so that the sum is known; some
clients drop out after they shared their keys, which is the dearest moment for the server.
Goal: 100 clients with 1,000,000 parameters in at most 60 s on two CPU cores, and a time per client that grows linearly.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gradleak import secure
from gradleak.core.environment import describe
from gradleak.secure import Stage


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--neighbours", default="4,8,16,32,64,all")
    parser.add_argument("--dropouts", type=int, default=5, help="clients that vanish before they send their values")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def timed(given: argparse.Namespace, neighbours: int | None, dropouts: int = 0, ring_bits: int = 64) -> dict[str, Any]:
    """One round: wall time of all of it, and what it cost a client and the server."""
    members = [secure.Member(number) for number in range(given.clients)]
    coding = secure.FixedPoint.finest(1.0, given.clients, ring_bits=ring_bits)
    plan = secure.Plan(
        secure.Roster.of({member.number: member.identity.public for member in members}),
        (secure.Part("update", given.parameters, coding),),
        secrets.token_bytes(16),
        neighbours=neighbours,
        ring_bits=ring_bits,
    )
    values = np.random.default_rng(0).uniform(-1, 1, given.parameters)
    # Every so-many-th client: neighbours are chosen by chance anyway.
    gone = {members[place * given.clients // max(dropouts, 1)].number: Stage.MASK for place in range(dropouts)}
    began = time.perf_counter()
    done = secure.simulate(plan, members, {member.number: {"update": values} for member in members}, gone)
    seconds = time.perf_counter() - began
    error = float(np.abs(done.sums["update"] - len(done.survivors) * values).max())
    assert error <= len(done.survivors) * coding.unit, error
    survivor = next(member.number for member in members if member.number in done.survivors)
    each = [done.costs.client(number) for number in done.survivors]
    row: dict[str, Any] = {
        "neighbours": neighbours if neighbours is not None else given.clients - 1,
        "complete": neighbours is None,
        "threshold": plan.threshold,
        "dropouts": dropouts,
        "ring_bits": ring_bits,
        "seconds": seconds,
        "seconds_per_client": float(np.median([cost.seconds for cost in each])),
        "seconds_by_stage_of_a_client": {
            stage.value: float(np.median([done.costs.clients[number][stage].seconds for number in done.survivors]))
            for stage in done.costs.server
        },
        "seconds_of_server": done.costs.total.seconds,
        "bytes_sent_per_client": done.costs.client(survivor).sent,
        "bytes_received_per_client": done.costs.client(survivor).received,
        "largest_error": error,
    }
    print(
        f"{row['neighbours']:>3} neighbours, {dropouts} dropouts, {ring_bits} bits: {seconds:6.1f} s in all, "
        f"{1000 * row['seconds_per_client']:7.1f} ms a client, server {row['seconds_of_server']:5.2f} s, "
        f"sent {row['bytes_sent_per_client'] / 1e6:.2f} MB",
        flush=True,
    )
    return row


def line(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The straight line through (neighbours, seconds of a client), and how much of the variation it explains."""
    x = np.array([row["neighbours"] for row in rows], np.float64)
    y = np.array([row["seconds_per_client"] for row in rows])
    slope, constant = np.polyfit(x, y, 1)
    left = y - (slope * x + constant)
    return {
        "milliseconds_per_neighbour": 1000 * float(slope),
        "milliseconds_without": 1000 * float(constant),
        "r_squared": float(1 - (left**2).sum() / ((y - y.mean()) ** 2).sum()),
    }


def main() -> None:
    given = options()
    counts = [None if count == "all" else int(count) for count in given.neighbours.split(",")]
    rows = [timed(given, count) for count in counts]
    fit = line(rows)
    print(
        f"{fit['milliseconds_per_neighbour']:.2f} ms a neighbour + {fit['milliseconds_without']:.1f} ms, "
        f"r^2 = {fit['r_squared']:.4f}"
    )
    if given.dropouts:
        rows.append(timed(given, None, given.dropouts))
    rows.append(timed(given, None, ring_bits=32))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(given).items() if name != "out"}
        environment = describe()
        environment["packages"]["cryptography"] = version("cryptography")
        written = {"environment": environment, "settings": settings, "rows": rows, "line": fit}
        given.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
