"""iDLG: the label is read off the last layer first, then only the image is optimised."""

from __future__ import annotations

from gradleak.attack import Attack, Composed
from gradleak.core.registry import named
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import SquaredError
from gradleak.parts.predictions import ReplayedGradient
from gradleak.parts.spaces import Normal, Pixels
from gradleak.parts.stage import Stage


@named(
    "idlg",
    kind="attack",
    paper="Zhao, Mopuri, Bilen, iDLG: Improved Deep Leakage from Gradients, 2020",
    status="verified",  # papers/idlg: labels 100 % as published
)
def idlg(
    *, steps: int = 6000, history: int = 100, restarts: int = 1, labels: str = "auto", keep: str = "best_match"
) -> Attack:
    """Read the label off the classifier's gradient, then match the gradient over the image.

    min over x of sum ||grad(x, y) - observed||^2 from N(0, 1), no prior and no box.

    Differs from the paper: L-BFGS with a line search per lane; `steps` counts gradient evaluations (6,000 is the
    ceiling of the code's 300 outer iterations of 20) and has no early stop; the best iterate by match is kept unless
    keep="last"; for more than one example the labels come from the count rules (the paper has one example only).
    Unknowns are in model-input space, which is the paper's [0, 1] pixels where the client does not normalise.
    """
    stage = Stage(Pixels(Normal()), ReplayedGradient(), SquaredError(), (), LBFGS(steps=steps, history=history))
    return Composed("idlg", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)
