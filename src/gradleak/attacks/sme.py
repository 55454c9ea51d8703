"""SME: the gradient of all examples at a learned point between the weights sent and returned, and its baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradleak.attack import Attack, Composed
from gradleak.core.registry import named
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.optimisers import Adam, FirstOrder, StepDecay, constant
from gradleak.parts.priors import TotalVariation
from gradleak.parts.protocols import Match, Prediction, Prior, Space
from gradleak.parts.spaces import JointSpace, Normal, Pixels
from gradleak.parts.stage import Stage
from gradleak.parts.surrogates import GradientAtStart, Inside, Line, Within

PAPER = "Zhu, Yao, Blaschko, Surrogate Model Extension (SME), ICML 2023"

PIXELS, COSINE = Pixels(Inside(Normal()), boxed=True), Cosine()


def stage_on_updates(
    predict: Prediction,
    *,
    steps: int,
    lr: float,
    decay: bool,
    tv: float = 0.0,
    match: Match = COSINE,
    priors: Sequence[Prior] = (),
    bounds: Sequence[Space] = (),
    rates: Mapping[str, float] | None = None,
    epsilons: Mapping[str, float] | None = None,
) -> Stage:
    """The stage that attacks on updates share, SME's: boxed pixels from clamped noise, total variation, Adam.

    They differ in what they predict: in its unknowns (`rates`, `epsilons`), and what holds these (`bounds`, `priors`).
    All rates are times 0.1 at 3/8, 5/8 and 7/8 of the steps where `decay` is set.
    """
    schedule = StepDecay() if decay else constant
    # Half: SME takes the mean of the two directions, TotalVariation their sum.
    smooth = (TotalVariation(tv / 2),) if tv else ()
    return Stage(
        JointSpace((PIXELS, *bounds)) if bounds else PIXELS,
        predict,
        match,
        (*smooth, *priors),
        Adam(lr=lr, steps=steps, schedule=schedule, rates=rates or {}, epsilons=epsilons or {}),
    )


@named("sme", kind="attack", paper=PAPER)
def sme(
    *,
    steps: int = 1000,
    lr: float = 1.0,
    alpha_lr: float = 1e-3,
    tv: float = 0.01,
    alpha: float = 0.5,
    spread: float = 0.0,
    nodes: int = 1,
    decay: bool = True,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """Match an update of many local steps by one gradient, at a learned point between the two ends of the training.

    min over x, alpha of 1 - cos(update, grad(x) at (1 - alpha) w0 + alpha wT) + tv * TV(x), Adam, x and alpha held in
    their boxes, all rates times 0.1 at 3/8, 5/8 and 7/8 of the steps. Needs no learning rate, batch size or number of
    steps of the client, and a step costs what one of IG does.

    `lr` is meant for images normalised by mean and std (for plain [0, 1] pixels a quarter of it); transformers:
    lr=0.1, decay=False. alpha moves slowly: `spread` lets every restart begin at another one. `nodes` above 1 takes the
    mean gradient along the segment instead (ours). Differs: the paper gives the attack the true labels and returns the
    last iterate (keep="last").
    """
    moving = nodes == 1
    stage = stage_on_updates(
        Line(start=alpha, spread=spread, nodes=nodes),
        steps=steps,
        lr=lr,
        decay=decay,
        tv=tv,
        bounds=[Within("alpha", 0.0, 1.0)] if moving else [],
        rates={"alpha": alpha_lr} if moving else {},
    )
    return Composed("sme", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)


@named("ig-ms", kind="attack", paper=f"Geiping et al., NeurIPS 2020; as run on updates in {PAPER}")
def ig_ms(
    *,
    steps: int = 1000,
    lr: float = 1.0,
    tv: float = 0.01,
    decay: bool = True,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """Match an update of many local steps as if it were one gradient at the weights sent: SME with alpha = 0.

    The lower bound that attacks on updates are measured against. Differs from `ig`: it never replays the client's
    steps, even where they are known; Adam on the plain gradient, with SME's rates and weights. `lr` as in `sme`.
    """
    stage = stage_on_updates(GradientAtStart(), steps=steps, lr=lr, decay=decay, tv=tv)
    return Composed("ig-ms", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)


@named("dlg-ms", kind="attack", paper=f"Zhu, Liu, Han, NeurIPS 2019; as run on updates in {PAPER}")
def dlg_ms(
    *,
    steps: int = 1000,
    lr: float = 1.0,
    decay: bool = True,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """Match an update of many local steps in squared error, as if all of them were the gradient at the weights sent.

    min over x of ||update / (lr T) - grad(x) at w0||^2, T the client's steps: both numbers must be known.
    Differs from `dlg`: it never replays the steps, takes labels as they were read off or given, and uses SME's Adam and
    box. `lr` as in `sme`.
    """
    stage = stage_on_updates(GradientAtStart(), steps=steps, lr=lr, decay=decay, match=SquaredError())
    return Composed("dlg-ms", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)


def frozen(attack: Composed, field: str = "x") -> Composed:
    """The control: the same attack with its images left as they begin. What it still matches, freedom has matched."""

    def still(stage: Stage) -> Stage:
        if not isinstance(stage.optimiser, FirstOrder):
            raise ValueError(f"Only first-order stages have a learning rate to set to zero; given {stage.optimiser}.")
        return replace(stage, optimiser=replace(stage.optimiser, rates={**stage.optimiser.rates, field: 0.0}))

    return replace(attack, name=f"{attack.name} (frozen {field})", stages=tuple(map(still, attack.stages)))
