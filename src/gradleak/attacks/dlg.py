"""Deep leakage from gradients: image and label together, by matching the gradient."""

from __future__ import annotations

from gradleak.attack import Attack, Composed
from gradleak.core.registry import named
from gradleak.parts.fields import Nothing
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import SquaredError
from gradleak.parts.predictions import ReplayedGradient
from gradleak.parts.spaces import JointSpace, Normal, Pixels, SoftField
from gradleak.parts.stage import Stage


@named("dlg", kind="attack", paper="Zhu, Liu, Han, Deep Leakage from Gradients, NeurIPS 2019")
def dlg(*, steps: int = 6000, history: int = 100, restarts: int = 1, keep: str = "best_match") -> Attack:
    """Optimise image and soft label jointly until the gradient matches.

    min over x, q of sum ||grad(x, softmax(q)) - observed||^2, x and q from N(0, 1), no prior and no box. Labels are the
    argmax of q.

    Differs from the paper: L-BFGS with a line search per lane instead of torch's without; `steps` counts gradient
    evaluations (6,000 is the ceiling of the code's 300 outer iterations of 20); the best iterate by
    match is kept unless keep="last"; no restart rule by cost; all examples of a batch move together. Unknowns are in
    model-input space, which is the paper's [0, 1] pixels where the client does not normalise.
    """
    space = JointSpace((Pixels(Normal()), SoftField()))
    stage = Stage(space, ReplayedGradient(), SquaredError(), (), LBFGS(steps=steps, history=history))
    return Composed("dlg", (stage,), Nothing(), restarts=restarts, keep=keep)
