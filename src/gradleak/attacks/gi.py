"""GradInversion: many restarts that pull towards their consensus, BatchNorm statistics as a prior, noise."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from gradleak.attack import Attack, Composed
from gradleak.attacks.settings import SearchSettings
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import LayerNorms, Scaled, SquaredError
from gradleak.parts.optimisers import Adam, CosineDecay, StepDecay
from gradleak.parts.predictions import ReplayedGradient
from gradleak.parts.priors import BatchNormStatistics, GroupConsistency, ImageNorm, TotalVariation
from gradleak.parts.spaces import Normal, Pixels
from gradleak.parts.stage import Stage

PAPER = "Yin et al., See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021"


@dataclass(frozen=True, kw_only=True)
class GISettings(SearchSettings):
    """Steps and rate, the weights of the objective's terms, the consensus of the restarts, and the noise."""

    steps: int = 20000
    lr: float = 0.1
    matching: float = 1e-3
    tv: float = 1e-4
    norm: float = 1e-6
    batch_norm: float = 0.1
    first_layer: float = 1.0
    returned: bool = False
    group: float = 0.01
    group_start: int = 500
    group_interval: int = 100
    register: bool = False
    noise: float = 0.2
    _: KW_ONLY
    restarts: int = 4
    labels: str = "row-minimum"


@named("gi", kind="attack", paper=PAPER)
@takes(GISettings)
def gi(settings: GISettings) -> Attack:
    """Match the gradient under BatchNorm statistics, image priors and the consensus of all restarts.

    matching * sum_l ||grad_l - observed_l||_2 + tv * TV + norm * ||x||_2 + batch_norm * R_BN + group * R_group,
    Adam with warm-up and cosine decay, lr * noise * N(0, 1) added to each move.

    `returned` compares with the client's own batch statistics, from the buffers it sent back. Differs: registration by
    translation only (the paper's needs a trained flow network); the best iterate by match of the best restart is
    returned, not the consensus; warm-up is at most a tenth of the steps; no official code exists, and several weights
    are those that later papers quote. Without BatchNorm the R_BN term is zero: plain matching with weak image priors.
    """
    priors = (
        TotalVariation(settings.tv),
        ImageNorm(settings.norm),
        BatchNormStatistics(settings.batch_norm, first=settings.first_layer, returned=settings.returned),
        GroupConsistency(
            settings.group,
            start=settings.group_start,
            interval=settings.group_interval,
            register=settings.register,
        ),
    )
    warmup = CosineDecay(warmup=min(50, settings.steps // 10))
    optimiser = Adam(lr=settings.lr, steps=settings.steps, schedule=warmup, noise=settings.noise)
    match = Scaled(LayerNorms(), settings.matching)
    return settings.attack("gi", Stage(Pixels(Normal(), boxed=True), ReplayedGradient(), match, priors, optimiser))


@named("gi-lazy", kind="attack", paper=f"{PAPER}; as re-used by Fang et al., GIFD, ICCV 2023")
def gi_lazy(
    *, steps: int = 15000, lr: float = 0.1, restarts: int = 4, labels: str = "row-minimum", keep: str = "best_match"
) -> Attack:
    """GI as later papers run it: squared error, lazy mean consensus, no BatchNorm term, no noise.

    Differs: the best iterate by match is returned, not the last (keep="last").
    """
    priors = (TotalVariation(1e-4), ImageNorm(1e-6, per_pixel=True), GroupConsistency(0.01, per_pixel=True))
    optimiser = Adam(lr=lr, steps=steps, schedule=StepDecay())
    stage = Stage(Pixels(Normal(), boxed=True), ReplayedGradient(), SquaredError(), priors, optimiser)
    return Composed("gi-lazy", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)
