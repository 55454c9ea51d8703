"""SecAdam: clients send their moments under secure aggregation, and the server computes only Adam's ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradleak.core import registry, tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.defences.settings import at_least, below_one, one_of
from gradleak.scenario.defence import Client, Defence, Noiseless, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee

PAPER = "Lewis, Varadharajan, Noman, SecAdam, ICDCS 2024"
FIRST, SECOND = "first", "second"  # what an upload holds instead of an update
HIDDEN = "secure aggregation hides single clients from the server, and {what} is released exactly"


def sole_update(upload: Upload, name: str) -> Params:
    """The update that the moments are made of. Anything else would leave the client without a mask."""
    if upload.payload.keys() != {"update"}:
        raise ValueError(
            f"{name} makes moments of one update; the upload holds {', '.join(sorted(upload.payload))}. In a chain it "
            "comes after whatever changes the update, and there can be one of its kind."
        )
    return upload.payload["update"]


def means(uploads: Sequence[Upload], sizes: Sequence[int]) -> tuple[Params, Params]:
    """The weighted means of both trees over the clients."""
    first, second = (tree.mean([upload.payload[name] for upload in uploads], sizes) for name in (FIRST, SECOND))
    return first, second


def soft_ratio(first: Tensor, second: Tensor, width: float | Tensor) -> Tensor:
    """first / sqrt(second + width^2 mean(second)): the ratio with a slope, also where it is nearly a sign.

    `width` is in units of the tensor's RMS, so that like the ratio it does not depend on the gradient's scale.
    """
    return first / tree.safe_sqrt(second + width**2 * second.mean())


@named("secadam", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class SecAdam(Defence):
    """The server sees rate * mean_i(m_i) / sqrt(mean_i(v_i + eps^2)), with m_i, v_i the moments of client i.

    A client keeps m = b1 m + (1 - b1) u and v = b2 v + (1 - b2) u^2 from round to round, sends both with their bias
    taken off, m / (1 - b1^t) and v / (1 - b2^t) + eps^2, and steps from the weights that it was sent. Both travel under
    secure aggregation and under a positive factor r that the clients share: the server has r sum m and r^2 sum v, and
    takes the step of Adam on the averaged moments. eps is inside the root, since nobody can add it under the factor.

    rate      Adam's learning rate, by which the server multiplies the ratio
    eps       in units of u
    moments   "update": of u, the update that the client would otherwise send: the gradient for one step of SGD with
              lr 1; the paper's experiments take one step in a round. "rule": those of the client's own Adam after its
              last step, which start from zero in every round
    masks     "cancelled": the sums after all masks have cancelled; "ring": every round of a training runs the real
              protocol (`gradleak.secure.reveal`) in fixed point, with three clients or more

    For one client in its first round the ratio is sign(u), for any size of u: `soft` gives attacks a slope. The server
    is said to learn only this. Its data tell more, over rounds nearly the sums themselves (docs/secure-optimisers.md):
    see `secure.reveal`. Buffers are not sent: they would leave without a mask.

    The paper's text was not available: v's factor is squared by algebra, its additive masks need a sign to cancel. Sums
    are weighted by numbers of examples if the federation's are; the paper's are not (weighting="uniform").
    """

    last: ClassVar[bool] = True  # moments are no update: nobody may change the upload after it
    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    moments: Literal["update", "rule"] = "update"
    masks: Literal["cancelled", "ring"] = "cancelled"

    def __post_init__(self) -> None:
        for name in ("rate", "eps"):
            at_least(name, getattr(self, name), 0.0, excluded=True)
        for name in ("beta1", "beta2"):
            below_one(name, getattr(self, name))
        one_of("moments", self.moments, "update", "rule")
        one_of("masks", self.masks, "cancelled", "ring")

    # --- the client -------------------------------------------------------------------------------------------------

    def upload(self, upload: Upload, client: Client) -> Upload:
        state = self._moments(sole_update(upload, self.name), client)
        count = state["count"].double()
        corrections = (1 - self.beta1**count, 1 - self.beta2**count)  # in float64, as in `rules.Adam`
        first = tree.map(lambda m: m / corrections[0].to(m.dtype), state[FIRST])
        second = tree.map(lambda v: v / corrections[1].to(v.dtype) + self.eps**2, state[SECOND])
        return replace(upload, payload={FIRST: first, SECOND: second}, buffers=None)

    def remember(self, before: Upload, after: Upload, client: Client) -> Tree:
        return {} if self.moments == "rule" else self._moments(sole_update(before, self.name), client)

    def _moments(self, update: Params, client: Client) -> Tree:
        """Both moments after this round, with their bias, and the number of updates in them."""
        if self.moments == "rule":
            if not {FIRST, SECOND, "count"} <= client.optimiser.keys():
                raise ValueError(
                    f"{self.name}(moments='rule') sends the moments of the client's own optimiser, and this one keeps "
                    "none: use LocalTraining(optimiser=Adam()), or moments='update'."
                )
            return client.optimiser
        memory = client.memory or {FIRST: tree.zeros_like(update), SECOND: tree.zeros_like(update), "count": None}
        count = tree.like(update).new_zeros(()) if memory["count"] is None else memory["count"]
        return {
            FIRST: tree.map(lambda m, u: self.beta1 * m + (1 - self.beta1) * u, memory[FIRST], update),
            SECOND: tree.map(lambda v, u: self.beta2 * v + (1 - self.beta2) * u * u, memory[SECOND], update),
            "count": count + 1,
        }

    # --- the server -------------------------------------------------------------------------------------------------

    def reveal(self, uploads: Sequence[Upload], sizes: Sequence[int]) -> Params:
        return self.soft(uploads, sizes, 0.0)

    def soft(self, uploads: Sequence[Upload], sizes: Sequence[int], width: float | Tensor) -> Params:
        """The revealed ratio with a slope of this width, for attackers; 0: the ratio itself."""
        first, second = means(uploads, sizes)
        return tree.scale(tree.map(lambda m, v: soft_ratio(m, v, width), first, second), self.rate)

    def aggregate(self, uploads: Sequence[Upload], sizes: Sequence[int], server: Tree) -> Params:
        if self.masks == "cancelled":
            return self.reveal(uploads, sizes)
        sums = registry.entry("aggregation", "ring").make(uploads, sizes, round=int(server.get("round", 0)))
        like = uploads[0].payload[FIRST]
        return tree.map(lambda ratio, m: self.rate * ratio.to(m), sums.ratio(2), like)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(reason=HIDDEN.format(what="the ratio of their sums"))


@dataclass(frozen=True)
class WithoutNoise(Noiseless):
    """A noisy defence of moments as an attacker replays it: `quiet` also decides what is remembered and revealed."""

    def remember(self, before: Upload, after: Upload, client: Client) -> Tree:
        return self.quiet.remember(before, after, client)

    def reveal(self, uploads: Sequence[Upload], sizes: Sequence[int]) -> Params:
        return self.quiet.reveal(uploads, sizes)

    def soft(self, uploads: Sequence[Upload], sizes: Sequence[int], width: float | Tensor) -> Params:
        assert isinstance(self.quiet, SecAdam)
        return self.quiet.soft(uploads, sizes, width)


def all_may_be_noise(update: Params) -> Params:
    """The variance of a ratio of noised gradients: nothing is linear here, so all of the update may be noise."""
    variance = tree.squared_norm(update) / tree.size(update)
    return tree.map(lambda u: torch.zeros_like(u) + variance, update)
