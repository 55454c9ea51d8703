"""Flower's own wrappers and mods for differential privacy: how they change what a server sees, and what they prove.

An epsilon is stated only if it follows from what Flower does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.supercore.privacy_accounting import NeighboringRelation

from gradleak.defences import Clipping, LocalGaussian
from gradleak.scenario.defence import Defence
from gradleak.scenario.guarantee import Exposure, Guarantee, accounted

SERVER_SEES = "does not protect against the aggregating server (the GIA adversary)"


@dataclass(frozen=True)
class Recognised:
    """One wrapper or mod. `defence`: what it does to an upload before the server sees it; None: nothing."""

    name: str
    text: str
    defence: Defence | None
    guarantee: Guarantee


def recognised(thing: Any, exposure: Exposure | None = None) -> tuple[Recognised, ...]:
    """The known privacy wrappers in a strategy (and all that it wraps) or a client mod; none: an empty tuple.

    `exposure`: how often a client takes part, for accountants.
    """
    return tuple(_walk(thing, exposure or Exposure()))


def _walk(thing: Any, exposure: Exposure) -> Iterator[Recognised]:
    if isinstance(thing, LocalDpMod):
        yield _local(thing, exposure)
    for kind, describe in _KINDS.items():
        if isinstance(thing, kind):
            yield describe(thing, exposure)
    inner = getattr(thing, "strategy", None)
    if inner is not None:
        yield from _walk(inner, exposure)


def _fixed_server(strategy: Any, exposure: Exposure) -> Recognised:
    text = f"the server clips updates to {strategy.clipping_norm:g} and noises their mean, after it has seen them"
    return Recognised(type(strategy).__name__, text, None, _central(strategy, exposure))


def _fixed_client(strategy: Any, exposure: Exposure) -> Recognised:
    text = (
        f"clients are told to clip updates to {strategy.clipping_norm:g} (fixedclipping_mod: the server cannot see "
        "whether they do), and the server noises their mean"
    )
    return Recognised(type(strategy).__name__, text, Clipping(strategy.clipping_norm), _central(strategy, exposure))


def _adaptive_server(strategy: Any, exposure: Exposure) -> Recognised:
    text = "the server clips updates to a quantile of their norms and noises their mean, after it has seen them"
    return Recognised(type(strategy).__name__, text, None, _adaptive())


def _adaptive_client(strategy: Any, exposure: Exposure) -> Recognised:
    text = (
        f"clients are told to clip updates to a norm that follows theirs (now {strategy.clipping_norm:g}), and the "
        "server noises their mean"
    )
    return Recognised(type(strategy).__name__, text, Clipping(strategy.clipping_norm), _adaptive())


def _adaptive() -> Guarantee:
    return Guarantee(
        reason=f"central noise; {SERVER_SEES}; Flower keeps no account of adaptive clipping, and neither does gradleak"
    )


def _central(strategy: Any, exposure: Exposure) -> Guarantee:
    """Gaussian noise on the mean: proved only with Flower's accountant, which enforces what the proof needs.

    Flower's mean is weighted by examples and over the clients that answered; the noise is calibrated to equal weights
    and to the planned number. With an accountant Flower refuses rounds where either differs; without one it does not.
    """
    if strategy.accountant is None:
        return Guarantee(
            reason=f"central noise; {SERVER_SEES}; without a PrivacyAccountant Flower takes rounds with unequal "
            "weights or missing clients, which the noise is not calibrated to"
        )
    config, spent = strategy.accountant.config, strategy.accountant.get_privacy_spent()
    apart = 2.0 if config.neighboring_relation is NeighboringRelation.REPLACE_ONE else 1.0
    relation = "another client in its place" if apart == 2 else "one client's update or zero in its place"
    if not spent.num_releases:
        return Guarantee(reason="nothing has been released yet")
    return accounted(
        replace(exposure, delta=config.target_delta),
        noise_multiplier=strategy.noise_multiplier / apart,
        releases=spent.num_releases,
        unit="client",
        model="central",
        covers="other clients and whoever sees the model",
        neighbours=relation,
        sampling="as Flower accounts: not amplified, counted as if in every round",
        caveats=(
            f"Flower's own accountant says epsilon {spent.epsilon:.3g}",
            "metrics that clients send are not covered",
        ),
    )


def _local(mod: Any, exposure: Exposure) -> Recognised:
    """The mod's noise is sensitivity x sqrt(2 ln(1.25 / delta)) / epsilon; its proof follows from clip and noise.

    Two data sets of a client move a clipped update by up to twice the clip, whatever sensitivity was stated, and the
    formula holds below epsilon 1 only (Balle and Wang, ICML 2018). So the exact accountant computes epsilon.
    """
    std = mod.sensitivity * math.sqrt(2 * math.log(1.25 / mod.delta)) / mod.epsilon
    defence = LocalGaussian(clip=mod.clipping_norm, noise_multiplier=std / mod.clipping_norm)
    text = (
        f"clients clip updates to {mod.clipping_norm:g} and add noise of {std:.3g} (set to epsilon {mod.epsilon:g}, "
        f"delta {mod.delta:g}, sensitivity {mod.sensitivity:g})"
    )
    return Recognised("LocalDpMod", text, defence, defence.guarantee(exposure))


_KINDS = {
    DifferentialPrivacyServerSideFixedClipping: _fixed_server,
    DifferentialPrivacyClientSideFixedClipping: _fixed_client,
    DifferentialPrivacyServerSideAdaptiveClipping: _adaptive_server,
    DifferentialPrivacyClientSideAdaptiveClipping: _adaptive_client,
}
