"""Secure aggregation: the server learns the sum of the clients' updates and not the updates.

In one process, with any clients dropping out:

    gl.secure.aggregate({0: update, 1: update, ...}, clip=1.0)

As messages: a `Plan` that all agree on, a `Member` per client, a `Server`, and bytes between them (see `Client`).
docs/secure-aggregation.md says what is assumed, what is hidden and what is not.

Double masking of Bonawitz et al. (CCS 2017) in fixed-point arithmetic, among all clients or, for cost, among k
neighbours (Bell et al., CCS 2020). Needs the extra `secure`.
"""

from __future__ import annotations

from gradleak.secure.client import Client, Identity, Member
from gradleak.secure.errors import BelowThreshold, Oversize, Refused, Rejected, SecureError
from gradleak.secure.plan import Plan, Roster
from gradleak.secure.ring import FixedPoint, Part
from gradleak.secure.risk import Risk, risk
from gradleak.secure.seed import SharedSeed
from gradleak.secure.server import Server
from gradleak.secure.simulation import Aggregated, Cost, Costs, Outcome, aggregate, flat, restored, simulate
from gradleak.secure.stages import Stage

__all__ = [
    # one round in one process
    "aggregate", "Aggregated", "simulate", "Outcome", "Cost", "Costs", "flat", "restored",
    # what is agreed on
    "Plan", "Roster", "Part", "FixedPoint", "Stage", "risk", "Risk",
    # who talks
    "Identity", "Member", "Client", "Server", "SharedSeed",
    # what can go wrong
    "SecureError", "Rejected", "Refused", "BelowThreshold", "Oversize",
]  # fmt: skip
