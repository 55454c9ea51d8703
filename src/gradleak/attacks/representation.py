"""Representation inversion: only the classifier's gradient is used, and no second derivative."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from gradleak.attack import Attack, Composed
from gradleak.attacks.settings import SearchSettings
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import RowCosine
from gradleak.parts.optimisers import Adam, CosineDecay, Lion, constant
from gradleak.parts.predictions import Representation
from gradleak.parts.priors import SummedVariation
from gradleak.parts.spaces import Normal, Pixels, Uniform
from gradleak.parts.stage import Stage


@named("representation", kind="attack", paper="Zhang et al., representation inversion of robust networks, 2022")
def representation(
    *,
    steps: int = 5000,
    lr: float = 0.1,
    first: float = 0.0,
    second: float = 1e-6,
    restarts: int = 5,
    labels: str = "row-minimum",
    keep: str = "best_match",
) -> Attack:
    """Find images whose features point along the negative classifier-gradient rows of the inferred labels.

    min over X of 1 - mean_k cos(h(x_k), -row_k) + first * sum |d| + second * sum d^2, clamped after every step. Each
    image comes from the restart in which its own cosine is best. Unknowns are in model-input space: where the client
    normalises, weights and rates mean other things than on the paper's [0, 1] pixels.
    """
    space = Pixels(Normal(mean=0.5, std=0.5, unit=True, clip=True), boxed=True)
    stage = Stage(space, Representation(), RowCosine(), (SummedVariation(first, second),), Adam(lr=lr, steps=steps))
    return Composed("representation", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)


@dataclass(frozen=True, kw_only=True)
class LewisSettings(SearchSettings):
    """Lion's steps, rate, schedule and weight decay, and the weights of the two image priors."""

    steps: int = 1000
    lr: float = 0.1
    decay: bool = True
    weight_decay: float = 1e-3
    first: float = 0.0
    second: float = 1e-6
    _: KW_ONLY
    labels: str = "row-minimum"
    keep: str = "last"


@named(
    "representation-lewis", kind="attack", paper="Lewis, Varadharajan, Noman, representation inversion (SecAdam), 2024"
)
@takes(LewisSettings)
def representation_lewis(settings: LewisSettings) -> Attack:
    """Representation inversion with |cos| and Lion, as published with SecAdam.

    The defaults are those of the authors' code; lr=0.01, decay=False, weight_decay=0 are those of their text. Differs:
    U[0, 1] start where their main script starts from a test image of the same class; the final clip to valid
    pixels happens where images are scored or written, not here.
    """
    schedule = CosineDecay() if settings.decay else constant
    optimiser = Lion(lr=settings.lr, steps=settings.steps, schedule=schedule, weight_decay=settings.weight_decay)
    predict, match = Representation(signed=False), RowCosine(absolute=True)
    prior = SummedVariation(settings.first, settings.second)
    return settings.attack("representation-lewis", Stage(Pixels(Uniform()), predict, match, (prior,), optimiser))
