"""Inverting Gradients: cosine matching, total variation, signed Adam, a box."""

from __future__ import annotations

from gradleak.attack import Attack, Composed
from gradleak.core.registry import named
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Adam, CosineDecay, SignedAdam, StepDecay, soft_sign
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import FeatureDistance, OpponentVariation, TotalVariation
from gradleak.parts.spaces import Normal, Pixels, Tiled
from gradleak.parts.stage import Stage

PAPER = "Geiping, Bauermeister, Droege, Moeller, Inverting Gradients, NeurIPS 2020"


@named("ig", kind="attack", paper=PAPER, status="verified")  # papers/ig: the cosine cost of the authors' notebook
def ig(
    *,
    steps: int = 4800,
    lr: float = 0.1,
    tv: float = 1e-6,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Composed:
    """Match the direction of the gradient with signed Adam inside the box of valid images; for untrained networks.

    min over u of 1 - cos(grad(u, y), observed) + tv * TV(u), u the normalised image from N(0, 1), clamped after every
    step; learning rate times 0.1 at 3/8, 5/8 and 7/8 of the steps.

    `tv` bounds what can be reached: 1e-6 to 1e-4 for untrained networks, 1e-2 to 1e-1 for trained ones (`ig-trained`).
    Differs from the paper's code: the iterate with the best match is returned, not the last (keep="last"); its
    options (median filter, other starts, a tolerance) are not offered.
    """
    optimiser = SignedAdam(lr=lr, steps=steps, schedule=StepDecay())
    stage = Stage(Pixels(Normal(), boxed=True), Replay(), Cosine(), (TotalVariation(tv),), optimiser)
    return Composed("ig", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)


@named("ig-trained", kind="attack", paper=PAPER)
def ig_trained(
    *,
    steps: int = 24000,
    lr: float = 0.1,
    tv: float = 1e-2,
    restarts: int = 8,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """IG with the settings its authors use for trained networks: a stronger image prior, more steps and restarts.

    tv 1e-2 is their CIFAR setting, 1e-1 their ImageNet one. Differs as `ig` does.
    """
    stages = ig(steps=steps, lr=lr, tv=tv).stages
    return Composed("ig-trained", stages, Labels(label_rule(labels)), restarts=restarts, keep=keep)


@named("ig-modern", kind="attack", paper=f"{PAPER}; settings of the breaching library")
def ig_modern(
    *,
    steps: int = 24000,
    lr: float = 0.1,
    tv: float = 0.1,
    features: float = 0.1,
    restarts: int = 1,
    labels: str = "auto",
) -> Attack:
    """IG with a soft sign, warm-up and cosine decay, a tiled start, colour-opponent variation and a feature term.

    The feature term pulls the classifier's input towards the one its own gradient gives away; exact for one example,
    for more it compares means over the batch. Differs: no zero padding in the variation; warm-up is at most a tenth of
    the steps; the best iterate by match is returned.
    """
    optimiser = Adam(lr=lr, steps=steps, schedule=CosineDecay(warmup=min(50, steps // 10)), transform=soft_sign)
    priors = (OpponentVariation(tv), FeatureDistance(features))
    stage = Stage(Pixels(Tiled(width=4, normal=True), boxed=True), Replay(), Cosine(), priors, optimiser)
    return Composed("ig-modern", (stage,), Labels(label_rule(labels)), restarts=restarts)
