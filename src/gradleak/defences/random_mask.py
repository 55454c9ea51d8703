"""Sketched updates: a random part of the entries is sent, scaled to the right mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.noise import unsent_variance
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.task import Task


@named("random-mask", kind="defence", paper="Konecny et al., Strategies for Improving Communication Efficiency, 2016")
@dataclass(frozen=True)
class RandomMask(Defence):
    """Send each entry with probability `keep`, divided by `keep`, and zero otherwise: unbiased, and cheap to send.

    The mask is fresh in every upload, so several rounds show more of an update that does not change. The zeros of an
    observation are its mask: an attacker who knows the defence compares only the entries that were sent.
    Differs: entries are drawn one by one, where the paper fixes their number.
    """

    keep: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep is the probability that an entry is sent, above 0, at most 1; given {self.keep}.")

    def upload(self, upload: Upload, client: Client) -> Upload:
        draws = client.draws
        if draws is None or self.keep == 1:
            return upload
        shapes = enumerate(upload.payload["update"].items())
        sent = {name: draws.uniform(tuple(u.shape), stream=i).to(u.device) < self.keep for i, (name, u) in shapes}
        return upload.map(lambda update: self._masked(update, sent))

    def _masked(self, update: Params, sent: Params) -> Params:
        return tree.map(lambda u, mask: torch.where(mask, u / self.keep, 0.0), update, sent)

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return _Sent(self.keep, tree.map(lambda u: u != 0, scene.update))

    def noise_variance(self, scene: TargetView) -> Params:
        return unsent_variance(scene.update)


@dataclass(frozen=True, eq=False)
class _Sent(RandomMask):
    """The defence with the mask of an observation, which `assumed` fills in."""

    sent: Params | None = None

    def upload(self, upload: Upload, client: Client) -> Upload:
        return upload if self.sent is None else upload.map(lambda update: self._masked(update, self.sent or {}))
