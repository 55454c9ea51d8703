"""How fast is the engine? Throughput, roofline, memory, time to a quality, costs of growth, and a peer beside it.

workloads.py: networks and targets     timing.py: turn by turn     speed.py     roofline.py     memory.py
quality.py: time to 20 and 30 dB       costs.py                    peer.py: breaching           regression.py
scaling.py: time of twice the lanes    suite.py: all of it
"""

from __future__ import annotations

from gradleak.bench.regression import Fallen, OtherMachine, compare, compared
from gradleak.bench.speed import LANES, engine, rate
from gradleak.bench.suite import SECTIONS, Plan, fallen, measure, told
from gradleak.bench.workloads import NETWORKS, Workload, workload

__all__ = ["LANES", "NETWORKS", "SECTIONS", "Fallen", "OtherMachine", "Plan", "Workload"]
__all__ += ["compare", "compared", "engine", "fallen", "measure", "rate", "told", "workload"]
