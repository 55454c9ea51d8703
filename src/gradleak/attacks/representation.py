"""Representation inversion: only the classifier's gradient is used, and no second derivative."""

from __future__ import annotations

from gradleak.attack import Attack, Composed
from gradleak.core.registry import named
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


@named(
    "representation-lewis", kind="attack", paper="Lewis, Varadharajan, Noman, representation inversion (SecAdam), 2024"
)
def representation_lewis(
    *,
    steps: int = 1000,
    lr: float = 0.1,
    decay: bool = True,
    weight_decay: float = 1e-3,
    first: float = 0.0,
    second: float = 1e-6,
    restarts: int = 1,
    labels: str = "row-minimum",
    keep: str = "last",
) -> Attack:
    """Representation inversion with |cos| and Lion, as published with SecAdam.

    The defaults are those of the authors' code; lr=0.01, decay=False, weight_decay=0 are those of their text. Differs:
    U[0, 1] start where their main script starts from a test image of the same class; the final clip to valid
    pixels happens where images are scored or written, not here.
    """
    optimiser = Lion(lr=lr, steps=steps, schedule=CosineDecay() if decay else constant, weight_decay=weight_decay)
    predict, match = Representation(signed=False), RowCosine(absolute=True)
    stage = Stage(Pixels(Uniform()), predict, match, (SummedVariation(first, second),), optimiser)
    return Composed("representation-lewis", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)
