"""GIAS: the latent of a generator first, then the generator's own weights, one copy for every image."""

from __future__ import annotations

from gradleak.attack import Composed
from gradleak.attacks.generative.latent import Latent, Weights
from gradleak.core.registry import named
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Adam, StepDecay
from gradleak.parts.partial import Strongest
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import BatchNormStatistics, GroupConsistency, LatentNorm, TotalVariation
from gradleak.parts.protocols import Match, Prior
from gradleak.parts.stage import Stage

PAPER = "Jeon, Kim, Lee, Oh, Ok, Gradient Inversion with Generative Image Prior, NeurIPS 2021"


@named("gias", kind="attack", paper=PAPER)
def gias(
    *,
    steps: int = 1000,
    weight_steps: int = 8000,
    lr: float = 0.03,
    weight_lr: float = 1e-3,
    tv: float = 1e-6,
    norm: float = 0.0,
    batch_norm: float = 0.0,
    group: float = 0.0,
    left_out: float = 0.0,
    latent: str = "auto",
    shift: int = 0,
    jitter: float = 1e-3,
    restarts: int = 4,
    labels: str = "auto",
    keep: str = "best_match",
) -> Composed:
    """Match the gradient's direction over a generator's latent, then over its weights, one copy for every image.

    min of COS_r(grad(G(z; w), y), observed) + tv * TV + norm * ||z||, first over z of every restart with the weights
    as trained; then, from the latent that matches best, over w with z fixed. Adam, rates times 0.1 at 3/8, 5/8, 7/8.

    left_out      r of COS_r: per tensor, only the share 1 - r of largest entries of the observed update is compared
    latent        "z", "w" (the styles w+ of a style generator) or "auto": w where there is one
    weight_steps  0: the latent alone
    shift         the generator is told label + shift: the wrong class, to measure what the right one is worth
    jitter        restarts of the second stage begin at weights this far apart, in shares of each tensor's RMS: the
                  latent is the same for all of them
    batch_norm, group   weights of GI's priors, the consensus per pixel as in `gi-lazy`; group needs restarts

    Differs: the iterate with the best match is returned, not the last; r is a share of the entries that are not zero,
    rounded up; weights before the first block (a mapping network, a constant) stay fixed; the paper's restarts begin at
    the same weights; FFHQ and ImageNet generators, with sizes and rates of their own, are for users to bring.
    """
    match: Match = Strongest(Cosine(), share=1 - left_out) if left_out else Cosine()
    priors: list[Prior] = [TotalVariation(tv)]
    priors += [BatchNormStatistics(batch_norm)] if batch_norm else []
    priors += [GroupConsistency(group, per_pixel=True)] if group else []
    first = (*priors, LatentNorm(norm)) if norm else tuple(priors)
    decay = StepDecay()
    search = Stage(
        Latent(of=latent, shift=shift),
        Replay(),
        match,
        first,
        Adam(lr=lr, steps=steps, schedule=decay),
        carry="best_of_target",
    )
    stages = [search]
    if weight_steps:
        optimiser = Adam(lr=weight_lr, steps=weight_steps, schedule=decay)
        stages.append(Stage(Weights(shift=shift, jitter=jitter), Replay(), match, tuple(priors), optimiser))
    return Composed("gias", tuple(stages), Labels(label_rule(labels)), restarts=restarts, keep=keep)
