"""Noise by a trusted server, at the level of clients; the clip is the median of the clients' norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.defences.clipping import clip
from gradleak.defences.noise import noised, server_draws
from gradleak.defences.settings import at_least
from gradleak.scenario.defence import Defence, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee

PAPER = "Geyer, Klein, Nabi, Differentially Private Federated Learning: A Client Level Perspective, 2017"


@named("geyer", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class Geyer(Defence):
    """The server's step is (1/s) (sum_k u_k / max(1, ||u_k|| / S) + N(0, sigma^2 S^2)), S the median of the s norms.

    All of it happens on the server, after the uploads: the attacker sees raw updates. The median is a statistic of the
    clients that nothing hides, so the paper's epsilon does not hold (`dp-fedavg` with a fixed clip has one that does,
    except against the server). Differs: no adaptive sigma and no stop at a budget.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        at_least("sigma", self.sigma, 0.0)

    def aggregate(self, uploads: Sequence[Upload], sizes: Sequence[int], server: Tree) -> Params:
        updates = [self.reveal([upload], [1]) for upload in uploads]
        bound = float(torch.stack([tree.norm(update) for update in updates]).quantile(0.5))
        if bound == 0:  # most clients sent nothing: there is no scale to clip or to noise to
            return tree.zeros_like(updates[0])
        total = clip(updates[0], bound)
        for update in updates[1:]:
            total = tree.add(total, clip(update, bound))
        if self.sigma:
            total = noised(total, self.sigma * bound, server_draws(server, self.name))
        return tree.scale(total, 1 / len(updates))

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(
            reason="central noise; does not protect against the aggregating server (the GIA adversary); the clip is "
            "the median of the clients' norms, which nothing hides"
        )
