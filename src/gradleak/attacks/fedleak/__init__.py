"""FEDLEAK: match the largest part of a gradient, on a way that keeps to flat places."""

from __future__ import annotations

from gradleak.attack import Attack, Composed
from gradleak.attacks.fedleak.blended import Blended
from gradleak.attacks.sme import PIXELS
from gradleak.core.registry import did_you_mean, named
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.optimisers import Adam, StepDecay, constant
from gradleak.parts.partial import Strongest
from gradleak.parts.priors import TotalVariation
from gradleak.parts.protocols import Match
from gradleak.parts.stage import Stage
from gradleak.parts.surrogates import GradientAtStart

PAPER = "Fan, Wang, Chen, Zhou, Boosting Gradient Leakage Attacks (FEDLEAK), USENIX Security 2025"

# The match, and the weight of the total variation that suits its size: SME's, and that of a third-party copy.
DISTANCES: dict[str, tuple[Match, float]] = {"cosine": (Cosine(), 0.01), "squared": (SquaredError(), 1e-4)}


@named("fedleak", kind="attack", paper=PAPER)
def fedleak(
    *,
    steps: int = 1000,
    lr: float = 1.0,
    share: float = 0.1,
    per: str = "tensor",
    lam: float = 0.5,
    gamma: float = 1.0,
    unit: str = "norm",
    distance: str = "cosine",
    tv: float | None = None,
    decay: bool = True,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """Match the largest entries of the update only, along gradients that are blended with the one a little uphill.

    D(x) compares the `share` of largest entries, chosen once from the update (`Strongest`). Adam follows
    (1 - lam) grad D(x) + lam grad D(x + phi), phi = gamma grad D / ||grad D||, which to first order is the gradient of
    D + lam gamma ||grad D||: it avoids steep places (`Blended`). An update of many steps is taken for one gradient at
    the weights sent, as `ig-ms` and `dlg-ms` do; with share = 1 and lam = 0 it is those, for updates without zeros.
    A step costs twice theirs, in the same memory.

    distance    "cosine", which needs no learning rate; "squared": of update / (lr T), which must be known
    tv          weight of the total variation, part of D where phi is concerned; None: 0.01 with the cosine, as in SME,
                1e-4 with squared error
    unit        of gamma: "norm", the length of phi; "rms", the root mean square of its entries

    Unverified: the paper's text was not at hand. share, lam, gamma and the squared error are those of a third-party
    copy; that copy clamps phi, and takes 300 steps with lr 0.1, which is not done here: rates, box and schedule are
    SME's, so that attacks on updates can be compared. `lr` as in `sme`. Its labels, where no class can appear twice,
    are `labels="lowest-sums"`.
    """
    if distance not in DISTANCES:
        raise ValueError(
            f"distance must be 'cosine' or 'squared'; given {distance!r}.{did_you_mean(distance, DISTANCES)}"
        )
    match, usual = DISTANCES[distance]
    weight = usual if tv is None else tv
    optimiser = Adam(lr=lr, steps=steps, schedule=StepDecay() if decay else constant)
    stage = Stage(
        PIXELS,
        GradientAtStart(),
        Strongest(match, share, per),
        # Half: SME takes the mean of the two directions, TotalVariation their sum.
        (TotalVariation(weight / 2),) if weight else (),
        Blended(optimiser, lam, gamma, unit),
    )
    return Composed("fedleak", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)
