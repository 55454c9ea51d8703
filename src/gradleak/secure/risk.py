"""What fewer neighbours give up: how likely a round exposes a client, or fails."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import comb


@dataclass(frozen=True)
class Risk:
    """Upper bounds on probabilities for one round, over all its clients together.

    exposed    somewhere `threshold` holders of an honest client's shares are on the server's side
    split      the honest survivors fall into groups without common masks, a single client included
    failed     somewhere too few holders are left, and there is no sum
    """

    exposed: float
    split: float
    failed: float


def risk(
    clients: int, neighbours: int | None = None, threshold: int | None = None, *, colluding: int = 0, dropping: int = 0
) -> Risk:
    """For so many clients that tell the server all they know, and so many that drop out after sharing their keys.

    Who that is does not hang on the order of the circle, in which a client's neighbours are k of the others, all
    equally likely: the count of bad ones among them is hypergeometric, and the sum over clients bounds the
    probability that it happens to any. Honest survivors are split only where k / 2 in a row are missing, in two
    places. After the analysis of Bell et al. 2020, with this graph's exact counts.
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
    if dropping:  # one that dropped out holds no share of its own any more
        failed += dropping * _at_least(near + 1 - needed, near, dropping - 1, others)
    if near == others:
        split = Fraction(bad >= others and colluding < clients)
    else:
        pairs = Fraction(clients * (clients - near + 1), 2)  # of places for two rows that do not overlap
        split = pairs * Fraction(comb(clients - near, bad - near), comb(clients, bad)) if bad >= near else Fraction(0)
    return Risk(*(float(min(each, Fraction(1))) for each in (exposed, split, failed)))


def _at_least(count: int, drawn: int, bad: int, among: int) -> Fraction:
    """The probability of `count` bad ones or more among `drawn` that are drawn from `among`."""
    ways = sum(comb(bad, hits) * comb(among - bad, drawn - hits) for hits in range(max(count, 0), min(drawn, bad) + 1))
    return Fraction(ways, comb(among, drawn))
