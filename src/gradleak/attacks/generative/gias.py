"""GIAS: the latent of a generator first, then the generator's own weights, one copy for every image."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from gradleak.attack import Composed
from gradleak.attacks.generative.latent import Generated, Latent, Weights
from gradleak.attacks.settings import SearchSettings
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Adam, StepDecay
from gradleak.parts.partial import Strongest
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import BatchNormStatistics, GroupConsistency, LatentNorm, TotalVariation
from gradleak.parts.protocols import Match, Prior
from gradleak.parts.stage import Stage

PAPER = "Jeon, Kim, Lee, Oh, Ok, Gradient Inversion with Generative Image Prior, NeurIPS 2021"


@dataclass(frozen=True, kw_only=True)
class GIASSettings(SearchSettings):
    """Steps and rates of both stages, the weights of the priors, which latent, and where the second stage begins."""

    steps: int = 1000
    weight_steps: int = 8000
    lr: float = 0.03
    weight_lr: float = 1e-3
    tv: float = 1e-6
    norm: float = 0.0
    batch_norm: float = 0.0
    group: float = 0.0
    left_out: float = 0.0
    latent: str = "auto"
    shift: int = 0
    jitter: float = 1e-3
    _: KW_ONLY
    restarts: int = 4


@named("gias", kind="attack", paper=PAPER)
@takes(GIASSettings)
def gias(settings: GIASSettings) -> Composed:
    """Match the gradient's direction over a generator's latent, then over its weights, one copy for every image.

    min of COS_r(grad(G(z; w), y), observed) + tv * TV + norm * ||z||, first over z of every restart with the weights
    as trained; then, from the latent that matches best, over w with z fixed. Adam, rates times 0.1 at 3/8, 5/8, 7/8.

    left_out      r of COS_r: per tensor, only the share 1 - r of largest entries of the observed update is compared
    latent        "z", "w" (the styles w+ of a style generator) or "auto": w where there is one
    weight_steps  0: the latent alone
    shift         the generator gets label + shift, the wrong class: it measures what the right class is worth
    jitter        restarts of the second stage share one latent; their weights begin this far apart, in shares of each
                  tensor's RMS
    batch_norm, group   weights of GI's priors, the consensus per pixel as in `gi-lazy`; group needs restarts

    Differs: the iterate with the best match is returned, not the last; r is a share of the nonzero entries, rounded up;
    weights before the first block (a mapping network, a constant) stay fixed; the paper's restarts begin at the same
    weights. FFHQ and ImageNet generators need sizes and rates of their own; users bring them.
    """
    left_out, shift, decay = settings.left_out, settings.shift, StepDecay()
    match: Match = Strongest(Cosine(), share=1 - left_out) if left_out else Cosine()
    priors: list[Prior] = [TotalVariation(settings.tv)]
    priors += [BatchNormStatistics(settings.batch_norm)] if settings.batch_norm else []
    priors += [GroupConsistency(settings.group, per_pixel=True)] if settings.group else []
    norm = (LatentNorm(settings.norm),) if settings.norm else ()
    optimiser = Adam(lr=settings.lr, steps=settings.steps, schedule=decay)
    space: Generated = Latent(of=settings.latent, shift=shift)
    stages = [Stage(space, Replay(), match, (*priors, *norm), optimiser, carry="best_of_target")]
    if settings.weight_steps:
        optimiser = Adam(lr=settings.weight_lr, steps=settings.weight_steps, schedule=decay)
        space = Weights(shift=shift, jitter=settings.jitter)
        stages.append(Stage(space, Replay(), match, tuple(priors), optimiser))
    return settings.attack("gias", *stages)
