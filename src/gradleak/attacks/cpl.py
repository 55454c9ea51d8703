"""CPL: a structured start, the inferred label, and a term that holds the prediction to that label."""

from __future__ import annotations

from gradleak.attack import Attack, Composed
from gradleak.core.registry import did_you_mean, named
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import SquaredError
from gradleak.parts.predictions import ReplayedGradient
from gradleak.parts.priors import LabelDistance
from gradleak.parts.spaces import Mosaic, Normal, Pixels, Solid, Start, Tiled, Uniform
from gradleak.parts.stage import Stage

STARTS: dict[str, Start] = {
    "tiled-2": Tiled(2),  # the paper's default: a tile of a quarter image
    "tiled-4": Tiled(4),
    "tiled-8": Tiled(8),
    "normal": Normal(),
    "uniform": Uniform(),
    "black": Solid(0.0),
    "white": Solid(1.0),
    "red": Solid((1.0, 0.0, 0.0)),
    "green": Solid((0.0, 1.0, 0.0)),
    "blue": Solid((0.0, 0.0, 1.0)),
    "mosaic-8": Mosaic(8),  # what Lewis et al. call a repeated pattern: a coarse image with enlarged pixels
}


@named("cpl", kind="attack", paper="Wei et al., A Framework for Evaluating Client Privacy Leakages in FL, ESORICS 2020")
def cpl(
    *,
    steps: int = 6000,
    alpha: float = 0.5,
    start: str | Start = "tiled-2",
    history: int = 100,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """Match the gradient from a tiled start while the prediction is held to the inferred label.

    min over x of sum ||grad(x, y) - observed||^2 + alpha * ||softmax(F(x)) - onehot(y)||^2.

    `start` names one of the published initialisations, or is one (`Surrogate(images)`: the attacker's own images).
    Differs: the paper gives no alpha, 0.5 is our choice; the term uses the inferred label, never the client's logits;
    L-BFGS has a line search per lane, `steps` counts gradient evaluations, and the best iterate by match is returned.
    Unknowns are in model-input space, which is the paper's [0, 1] pixels where the client does not normalise.
    """
    if isinstance(start, str):
        if start not in STARTS:
            raise ValueError(f"Unknown start {start!r}.{did_you_mean(start, STARTS)}")
        start = STARTS[start]
    stage = Stage(
        Pixels(start), ReplayedGradient(), SquaredError(), (LabelDistance(alpha),), LBFGS(steps=steps, history=history)
    )
    return Composed("cpl", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)
