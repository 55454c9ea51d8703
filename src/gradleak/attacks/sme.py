"""SME: the gradient of all examples at a learned point between the weights sent and returned, and its baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradleak.attack import Attack, Composed
from gradleak.attacks.settings import UpdateSettings
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.optimisers import Adam, FirstOrder
from gradleak.parts.priors import TotalVariation
from gradleak.parts.protocols import Match, Prediction, Prior, Space
from gradleak.parts.spaces import JointSpace, Normal, Pixels
from gradleak.parts.stage import Stage
from gradleak.parts.surrogates import GradientAtStart, Inside, Line, Within

PAPER = "Zhu, Yao, Blaschko, Surrogate Model Extension (SME), ICML 2023"

PIXELS, COSINE = Pixels(Inside(Normal()), boxed=True), Cosine()


def stage_on_updates(
    settings: UpdateSettings,
    predict: Prediction,
    *,
    tv: float = 0.0,
    match: Match = COSINE,
    priors: Sequence[Prior] = (),
    bounds: Sequence[Space] = (),
    rates: Mapping[str, float] | None = None,
    epsilons: Mapping[str, float] | None = None,
) -> Stage:
    """The stage that attacks on updates share, SME's: boxed pixels from clamped noise, total variation, Adam.

    They differ in what they predict: its unknowns (`rates`, `epsilons`) and what holds these (`bounds`, `priors`).
    """
    rates, epsilons = rates or {}, epsilons or {}
    return Stage(
        JointSpace((PIXELS, *bounds)) if bounds else PIXELS,
        predict,
        match,
        (*variation(tv), *priors),
        Adam(lr=settings.lr, steps=settings.steps, schedule=settings.schedule, rates=rates, epsilons=epsilons),
    )


def variation(weight: float) -> tuple[TotalVariation, ...]:
    """SME's total variation. Half the weight: SME takes the mean of the two directions, TotalVariation their sum."""
    return (TotalVariation(weight / 2),) if weight else ()


@dataclass(frozen=True, kw_only=True)
class SMESettings(UpdateSettings):
    """The rate of alpha, the weight of the total variation, and where on the segment the search begins."""

    alpha_lr: float = 1e-3
    tv: float = 0.01
    alpha: float = 0.5
    spread: float = 0.0
    nodes: int = 1


@named("sme", kind="attack", paper=PAPER)
@takes(SMESettings)
def sme(settings: SMESettings) -> Attack:
    """Match an update of many local steps by one gradient, at a learned point between the two ends of the training.

    min over x, alpha of 1 - cos(update, grad(x) at (1 - alpha) w0 + alpha wT) + tv * TV(x), Adam, x and alpha held in
    their boxes, all rates times 0.1 at 3/8, 5/8 and 7/8 of the steps. Needs no learning rate, batch size or number of
    steps of the client. A step costs as much as one of IG.

    `lr` is for images normalised by mean and std; for plain [0, 1] pixels use a quarter of it, for transformers lr=0.1
    and decay=False. alpha moves slowly: with `spread` every restart begins at another one. `nodes` above 1 takes the
    mean gradient along the segment instead (ours). Differs: the paper gives the attack the true labels and returns the
    last iterate (keep="last").
    """
    moving = settings.nodes == 1
    stage = stage_on_updates(
        settings,
        Line(start=settings.alpha, spread=settings.spread, nodes=settings.nodes),
        tv=settings.tv,
        bounds=[Within("alpha", 0.0, 1.0)] if moving else [],
        rates={"alpha": settings.alpha_lr} if moving else {},
    )
    return settings.attack("sme", stage)


@dataclass(frozen=True, kw_only=True)
class OneGradientSettings(UpdateSettings):
    """As `UpdateSettings`, and the weight of the total variation."""

    tv: float = 0.01


@named("ig-ms", kind="attack", paper=f"Geiping et al., NeurIPS 2020; as run on updates in {PAPER}")
@takes(OneGradientSettings)
def ig_ms(settings: OneGradientSettings) -> Attack:
    """Match an update of many local steps as if it were one gradient at the weights sent: SME with alpha = 0.

    The lower bound that attacks on updates are measured against. Differs from `ig`: it never replays the client's
    steps, even where they are known; Adam on the plain gradient, with SME's rates and weights. `lr` as in `sme`.
    """
    return settings.attack("ig-ms", stage_on_updates(settings, GradientAtStart(), tv=settings.tv))


@named("dlg-ms", kind="attack", paper=f"Zhu, Liu, Han, NeurIPS 2019; as run on updates in {PAPER}")
@takes(UpdateSettings)
def dlg_ms(settings: UpdateSettings) -> Attack:
    """Match an update of many local steps in squared error, as if all of them were the gradient at the weights sent.

    min over x of ||update / (lr T) - grad(x) at w0||^2, T the client's steps: both numbers must be known.
    Differs from `dlg`: it never replays the steps, takes the labels as read off or given, and uses SME's Adam and box.
    `lr` as in `sme`.
    """
    return settings.attack("dlg-ms", stage_on_updates(settings, GradientAtStart(), match=SquaredError()))


def frozen(attack: Composed, field: str = "x") -> Composed:
    """The control: the same attack with images that never move. What it still matches is due to the other unknowns."""

    def still(stage: Stage) -> Stage:
        if not isinstance(stage.optimiser, FirstOrder):
            raise ValueError(f"Only first-order stages have a learning rate to set to zero; given {stage.optimiser}.")
        return replace(stage, optimiser=replace(stage.optimiser, rates={**stage.optimiser.rates, field: 0.0}))

    return replace(attack, name=f"{attack.name} (frozen {field})", stages=tuple(map(still, attack.stages)))
