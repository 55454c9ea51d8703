"""A match that looks only at the largest entries of the observed update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.registry import did_you_mean
from gradleak.core.tree import Params
from gradleak.parts.matches import Wrapped

PER = ("all", "tensor")


@dataclass(frozen=True)
class Partial(Wrapped):
    """Another match on what `compared` leaves of a prediction."""

    def residual(self, predicted: Params, observed: Params) -> Params:
        return self.match.residual(self.compared(predicted, observed), observed)

    def distance(self, predicted: Params, observed: Params) -> Tensor:
        return self.match.distance(self.compared(predicted, observed), observed)


@dataclass(frozen=True)
class Strongest(Partial):
    """Another match on a `share` of the entries: those of largest magnitude in the observed update (FEDLEAK).

    per     "tensor": the share of every tensor, of every round; "all": of the whole update at once

    The entries are chosen once, among those of the observation that are not zero: entries that a defence pruned, or
    that belong to dead units, never count, even with share = 1. Exactly k = ceil(share x non-zero entries) are taken,
    at least one if there is any; among equal ones the first. Under a known defence they are ranked after `visible`, so
    in units of its noise. NaN ranks first, so that it shows.

    The prepared update keeps its names and shapes, with zeros where nothing is compared: it is its own mask. This suits
    any match that prepares by scaling.
    Reference: Fan, Wang, Chen, Zhou, USENIX Security 2025; whether per tensor or over all is not verified.
    """

    share: float = 0.1
    per: str = "tensor"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1; given {self.share}.")
        if self.per not in PER:
            raise ValueError(f"per must be 'tensor' or 'all'; given {self.per!r}.{did_you_mean(str(self.per), PER)}")

    def prepare(self, observed: Params) -> Params:
        if self.per == "all":
            strongest = tree.unflatten(largest(tree.flatten(observed), self.share), observed)
        else:
            strongest = tree.map(lambda u: largest(u.reshape(-1), self.share).reshape(u.shape), observed)
        return self.match.prepare(strongest)

    def compared(self, update: Params, observed: Params) -> Params:
        """The chosen entries of an update; zeros elsewhere."""
        # A product, not `where`: a prediction that is not finite must show, wherever it is.
        return tree.map(lambda p, o: p * (o != 0).to(p.dtype), update, observed)


@dataclass(frozen=True)
class AsObserved(Partial):
    """Another match on predictions that are pruned and clipped as the observation is (GGL).

    Entries that are zero in the observation are zero in the prediction too (pruning, Soteria), and a prediction longer
    than the observation is scaled to its length (clipping). Without a defence both leave the true update as it is.
    Noise cannot be read off. This suits a match whose `prepare` leaves the observation as it is.
    Reference: Li et al., CVPR 2022, who estimate the rates and then prune and clip; here the mask itself is taken.
    """

    def compared(self, update: Params, observed: Params) -> Params:
        """The update with the observation's zeros, and no longer than it."""
        # A product, as above.
        masked = tree.map(lambda p, o: p * (o != 0).to(p.dtype), update, observed)
        length, bound = tree.norm(masked), tree.norm(observed)
        longer = length > bound
        return tree.scale(masked, torch.where(longer, bound / torch.where(longer, length, 1.0), 1.0))


def largest(values: Tensor, share: float) -> Tensor:
    """`values` (n,) with zeros in place of all but a share of the non-zero ones, the largest in magnitude.

    Their number depends on the values, so it is a tensor: vmap needs fixed shapes.
    """
    # The slack: 0.1 * 30 is above 3 in floating point, but 3 entries are meant.
    count = torch.ceil(share * (values != 0).sum().double() - 1e-6).clamp_min(1)
    order = values.abs().argsort(descending=True, stable=True)
    first = torch.arange(values.shape[0], device=values.device) < count
    return values * torch.zeros_like(values).scatter(0, order, first.to(values.dtype))
