"""The risk of fewer neighbours: how likely a round exposes a client, or fails."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import comb


@dataclass(frozen=True)
class Risk:
    """Upper bounds on probabilities for one round, over all its clients together.

    exposed    `threshold` holders of some honest client's shares collude with the server
    split      the honest survivors fall into groups without common masks, single clients included
    failed     too few holders of some client's shares remain, and there is no sum
    """

    exposed: float
    split: float
    failed: float


def risk(
    clients: int, neighbours: int | None = None, threshold: int | None = None, *, colluding: int = 0, dropping: int = 0
) -> Risk:
    """The risk with this many clients that collude with the server, and this many that drop out after sharing keys.

    They do not depend on the order of the circle, in which any k others are equally likely to be a client's neighbours.
    So the number of bad neighbours is hypergeometric, and the sum over clients bounds the probability that it happens
    to any. Honest survivors are split only if k / 2 in a row are missing, in two places. After the analysis of Bell et
    al. 2020, with this graph's exact counts.
    """
    if clients < 2 or min(colluding, dropping) < 0 or colluding + dropping > clients:
        raise ValueError(
            f"colluding and dropping clients must be at least 0 and together at most all {clients} (at least 2); given "
            f"{colluding} and {dropping}."
        )
    near = clients - 1 if neighbours is None else min(neighbours, clients - 1)
    needed = (near + 1) // 2 + 1 if threshold is None else threshold
    others, bad = clients - 1, colluding + dropping
    exposed = (clients - colluding) * _at_least(needed, near, colluding, others)
    failed = (clients - dropping) * _at_least(near + 2 - needed, near, dropping, others)
    if dropping:  # a client that dropped out cannot send its share of its own secret
        failed += dropping * _at_least(near + 1 - needed, near, dropping - 1, others)
    if near == others:
        split = Fraction(bad >= others and colluding < clients)
    else:
        pairs = Fraction(clients * (clients - near + 1), 2)  # of places for two rows that do not overlap
        split = pairs * Fraction(comb(clients - near, bad - near), comb(clients, bad)) if bad >= near else Fraction(0)
    return Risk(*(float(min(each, Fraction(1))) for each in (exposed, split, failed)))


def _at_least(count: int, drawn: int, bad: int, among: int) -> Fraction:
    """The probability of at least `count` bad ones among `drawn` of `among`."""
    ways = sum(comb(bad, hits) * comb(among - bad, drawn - hits) for hits in range(max(count, 0), min(drawn, bad) + 1))
    return Fraction(ways, comb(among, drawn))
