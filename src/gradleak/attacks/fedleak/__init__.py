"""FEDLEAK: match the largest part of a gradient, on a path through flat places."""

from __future__ import annotations

from dataclasses import dataclass

from gradleak.attack import Attack
from gradleak.attacks.fedleak.blended import Blended
from gradleak.attacks.settings import UpdateSettings
from gradleak.attacks.sme import PIXELS, variation
from gradleak.core.registry import did_you_mean, named
from gradleak.core.settings import takes
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.optimisers import Adam
from gradleak.parts.partial import Strongest
from gradleak.parts.protocols import Match
from gradleak.parts.stage import Stage
from gradleak.parts.surrogates import GradientAtStart

PAPER = "Fan, Wang, Chen, Zhou, Boosting Gradient Leakage Attacks (FEDLEAK), USENIX Security 2025"

# The match, and the weight of the total variation that suits its size: SME's, and that of a third-party copy.
DISTANCES: dict[str, tuple[Match, float]] = {"cosine": (Cosine(), 0.01), "squared": (SquaredError(), 1e-4)}


@dataclass(frozen=True, kw_only=True)
class FedLeakSettings(UpdateSettings):
    """Which entries are compared and how, and the blend of gradients."""

    share: float = 0.1
    per: str = "tensor"
    lam: float = 0.5
    gamma: float = 1.0
    unit: str = "norm"
    distance: str = "cosine"
    tv: float | None = None

    def __post_init__(self) -> None:
        if self.distance not in DISTANCES:
            hint = did_you_mean(self.distance, DISTANCES)
            raise ValueError(f"distance must be 'cosine' or 'squared'; given {self.distance!r}.{hint}")


@named("fedleak", kind="attack", paper=PAPER)
@takes(FedLeakSettings)
def fedleak(settings: FedLeakSettings) -> Attack:
    """Match the largest entries of the update only, along gradients that are blended with the one a little uphill.

    D(x) compares the `share` of largest entries, chosen once from the update (`Strongest`). Adam follows
    (1 - lam) grad D(x) + lam grad D(x + phi), phi = gamma grad D / ||grad D||. To first order this is the gradient of
    D + lam gamma ||grad D||, which avoids steep places (`Blended`). An update of many steps is taken for one gradient
    at the weights sent, as in `ig-ms` and `dlg-ms`; share = 1 and lam = 0 give those, for updates without zeros.
    A step costs twice theirs, in the same memory.

    distance    "cosine", which needs no learning rate; "squared": of update / (lr T), which must be known
    tv          weight of the total variation, which counts as part of D for phi; None: 0.01 with the cosine, as in
                SME, 1e-4 with the squared error
    unit        of gamma: "norm", the length of phi; "rms", the root mean square of its entries

    Unverified: the paper's text was not available. share, lam, gamma and the squared error are those of a third-party
    copy. That copy also clamps phi and takes 300 steps with lr 0.1. Here rates, box and schedule are SME's, so that
    attacks on updates can be compared. `lr` as in `sme`. The paper's labels, where no class can appear twice, are
    `labels="lowest-sums"`.
    """
    match, usual = DISTANCES[settings.distance]
    optimiser = Adam(lr=settings.lr, steps=settings.steps, schedule=settings.schedule)
    stage = Stage(
        PIXELS,
        GradientAtStart(),
        Strongest(match, settings.share, settings.per),
        variation(usual if settings.tv is None else settings.tv),
        Blended(optimiser, settings.lam, settings.gamma, settings.unit),
    )
    return settings.attack("fedleak", stage)
