"""Does twice the lanes take more than twice the time? From rows of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from benchmarks.speed.throughput import Row

FROM = 32  # lanes; with fewer a GPU is not full, and twice as many are nearly free
MOST = 2.1  # times the time for twice the lanes


def doubling(rows: Sequence[Row]) -> list[Row]:
    """Of each network and precision, between every two measured numbers of lanes: the time of twice the lanes.

    Where one number is not the double of the other: of one doubling on the way, all alike (the geometric mean). Rows
    that were too large for the device have no time and are left out, as are numbers of lanes that both run in chunks of
    one size: theirs is one measurement.
    """
    found: list[Row] = []
    measured = [row for row in rows if row["batched"] and row["rate"] and row["lanes"] >= FROM]
    for network, precision in dict.fromkeys((row["network"], row["precision"]) for row in measured):
        own = {row["lanes"]: row for row in measured if (row["network"], row["precision"]) == (network, precision)}
        for few, many in pairwise(sorted(own)):
            if own[few].get("chunk", few) == own[many].get("chunk", many):
                continue
            longer = (many / own[many]["rate"]) / (few / own[few]["rate"])
            times = longer ** (1 / math.log2(many / few))
            found.append({"network": network, "precision": precision, "from": few, "to": many, "times": times})
    return found


def judged(found: Sequence[Row], again: Callable[[Row], Sequence[Row]], most: float = MOST) -> list[Row]:
    """The same with `holds`. What does not hold is measured `again`, and the lower counts: a busy moment comes once."""
    told = []
    for row in found:
        times = row["times"]
        if times > most:
            times = min([times, *(other["times"] for other in doubling(again(row)))])
        told.append({**row, "times": times, "holds": times <= most})
    return told


def why(row: Row) -> str:
    """A row that does not hold, in words."""
    return (
        f"{row['network']} {row['precision']}: from {row['from']} to {row['to']} lanes twice the lanes take "
        f"{row['times']:.2f} times as long"
    )
