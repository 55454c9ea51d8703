"""Gradient sparsification: only the largest entries of an update are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.defences.noise import unsent_variance
from gradleak.defences.settings import one_of
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Task


@named("pruning", kind="defence", paper="Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017")
@dataclass(frozen=True)
class Pruning(Defence):
    """Send the entries |u_j| >= tau and zeros elsewhere, tau such that the share `keep` of them is sent.

    per="layer": a threshold for each tensor, as papers on leakage use it; "update": one for all. `residual`: unsent
    entries are added to the client's next update. The paper: keep=0.01, per="update", residual=True.

    The zeros of the observation are the mask. A1 weighs them out. A2 freezes the mask (top-k of the guess would be
    another one) and uses the bound on each dropped entry: at most tau, the smallest entry that was sent. A prediction f
    there becomes sign(f) max(|f| - tau, 0), to be compared with 0. With `residual` a dropped entry says nothing, and a
    sent one includes unsent parts of earlier rounds: A2 is exact in a client's first round only.

    Differs: at least one entry of each tensor (or update) is sent; entries equal to the threshold are all sent.
    """

    keep: float = 0.1
    per: Literal["layer", "update"] = "layer"
    residual: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep is the share of entries that is sent, above 0 and at most 1; given {self.keep}.")
        one_of("per", self.per, "layer", "update")

    def upload(self, upload: Upload, client: Client) -> Upload:
        whole = self._whole(upload, client)
        threshold = self._each(self._threshold, whole)
        sent = tree.map(lambda u, tau: torch.where(u.abs() >= tau, u, 0.0), whole, threshold)
        return replace(upload, payload={**upload.payload, "update": sent})

    def remember(self, before: Upload, after: Upload, client: Client) -> Tree:
        if not self.residual:
            return {}
        return {"unsent": tree.subtract(self._whole(before, client), after.payload["update"])}

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        if self.keep == 1 and not self.residual:
            return Defence()
        sent = tree.map(lambda u: u != 0, scene.update)
        return _Frozen(sent, None if self.residual else self._each(_least, scene.update))

    def replayed(self, scene: TargetView, task: Task) -> Defence:
        return self

    def noise_variance(self, scene: TargetView) -> Params:
        return unsent_variance(scene.update)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(reason="small entries are dropped, large ones are released exactly")

    def _whole(self, upload: Upload, client: Client) -> Params:
        update, unsent = upload.payload["update"], client.memory.get("unsent")
        return update if unsent is None else tree.add(update, unsent)

    def _threshold(self, values: Tensor) -> Tensor:
        """The smallest magnitude of a vector that is still sent."""
        count = max(1, round(self.keep * len(values)))
        return values.abs().kthvalue(len(values) - count + 1).values

    def _each(self, function: Callable[[Tensor], Tensor], update: Params) -> Params:
        """A number for each tensor: from its entries, or from those of the whole update."""
        if self.per == "layer":
            return tree.map(lambda u: function(u.flatten()), update)
        number = function(tree.flatten(update))
        return tree.map(lambda u: number.to(u), update)


@dataclass(frozen=True, eq=False)
class _Frozen(Defence):
    """The mask of an observation; a dropped entry is at most `least` in magnitude, or unknown where that is None."""

    sent: Params
    least: Params | None

    def upload(self, upload: Upload, client: Client) -> Upload:
        update = upload.payload["update"]
        beyond = tree.zeros_like(update) if self.least is None else tree.map(_beyond, update, self.least)
        pruned = tree.map(torch.where, self.sent, update, beyond)
        return replace(upload, payload={**upload.payload, "update": pruned})

    def noise_variance(self, scene: TargetView) -> Params:
        if self.least is not None:
            return tree.zeros_like(scene.update)
        return tree.map(lambda sent, u: torch.where(sent, 0.0, torch.inf).to(u), self.sent, scene.update)


def _beyond(value: Tensor, least: Tensor) -> Tensor:
    """sign(value) max(|value| - least, 0)"""
    return value - torch.minimum(torch.maximum(value, -least), least)


def _least(sent: Tensor) -> Tensor:
    """The smallest magnitude that is not zero; zero where all are: a larger one would have been sent."""
    least = torch.where(sent != 0, sent.abs(), torch.inf).amin()
    return torch.where(least.isinf(), 0.0, least)
