"""NL-SME: SME with a curved path, whose control point is learned, and learned factors on the gradient."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from gradleak.attack import Attack, Composed
from gradleak.attacks.settings import SearchSettings, UpdateSettings
from gradleak.attacks.sme import stage_on_updates
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.protocols import Prediction, Prior, Space
from gradleak.parts.surrogates import (
    Bezier,
    CentredControl,
    Line,
    Reach,
    Rescaled,
    SurrogateLoss,
    UnitScaling,
    Within,
)

# Adam's eps for the control point, whose million entries have gradients down to 1e-10; elsewhere it is 1e-8.
EPS = 1e-12

PAPER = "Non-Linear Surrogate Model Extension (NL-SME), arXiv 2509.22082"


@dataclass(frozen=True, kw_only=True)
class NLSMESettings(UpdateSettings):
    """Rates of alpha, factors and control point; weights of the terms; the freedom of path and factors; the start."""

    alpha_lr: float = 1e-3
    scaling_lr: float = 1e-3
    control_lr: float = 0.02
    tv: float = 0.01
    control: float = 1e-2
    scaling: float = 1e-2
    classification: float = 0.0
    factors: Literal["tensor", "element", "off"] = "tensor"
    curved: bool = True
    alpha: float = 0.5
    spread: float = 0.0
    reach: float | None = None
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.factors not in ("tensor", "element", "off"):
            raise ValueError(f"factors must be 'tensor', 'element' or 'off'; given {self.factors!r}.")


@named("nl-sme", kind="attack", paper=PAPER)
@takes(NLSMESettings)
def nl_sme(settings: NLSMESettings) -> Composed:
    """SME on a quadratic Bezier curve with a learned control point, and a learned factor for every tensor.

    min over x, alpha, c, d of 1 - cos(update, d * grad(x) at W) + tv * TV(x) + control * ||c - m||^2 / ||wT - w0||^2
    + scaling * mean (d - 1)^2, with W = (1 - alpha)^2 w0 + 2 alpha (1 - alpha) c + alpha^2 wT and m = (w0 + wT) / 2.
    Adam with four rates, that of c in units of the update's RMS; alpha held in [0.05, 0.95], d in [0.1, 10].

    `factors`: one for each tensor, for each entry, or none. `curved=False`: SME's line. `reach`: holds ||c - m|| to so
    many ||wT - w0||. `classification`: weight of the client's loss at W. `nodes` above 1: the mean gradient along the
    curve, without alpha. `alpha`, `spread`, `lr`, `decay` as in `sme`.

    Choices of ours: the paper's rates, weights, bounds, initial values and the shape of d are not readable; all norms
    are relative, so that one weight fits every model. A low match is no measure of leakage here: with all this freedom
    even frozen noise is matched (`sme.frozen`, `surrogates.diagnosis`). Labels and `keep` as in `sme`.
    """
    line = Bezier if settings.curved else Line
    path = line(start=settings.alpha, spread=settings.spread, nodes=settings.nodes)
    predict: Prediction = path
    bounds: list[Space] = []
    priors: list[Prior] = []
    rates: dict[str, float] = {}
    if settings.nodes == 1:
        rates["alpha"] = settings.alpha_lr
        bounds.append(Within("alpha", 0.05, 0.95) if settings.curved else Within("alpha", 0.0, 1.0))
    if settings.curved:
        rates["control"] = settings.control_lr
        priors += [CentredControl(settings.control)] if settings.control else []
        bounds += [Reach("control", settings.reach)] if settings.reach is not None else []
    if settings.factors != "off":
        predict = Rescaled(path, per=settings.factors)
        rates["scaling"] = settings.scaling_lr
        priors += [UnitScaling(settings.scaling)] if settings.scaling else []
        bounds.append(Within("scaling", 0.1, 10.0))
    if settings.classification:
        priors.append(SurrogateLoss(settings.classification, path))
    stage = stage_on_updates(
        settings,
        predict,
        tv=settings.tv,
        priors=priors,
        bounds=bounds,
        rates=rates,
        epsilons={"control": EPS} if settings.curved else {},
    )
    return settings.attack("nl-sme", stage)


@named("nl-sme-a", kind="attack", paper=f"{PAPER}; its ablation A")
def nl_sme_a(
    *,
    steps: int = 1000,
    lr: float = 1.0,
    alpha_lr: float = 1e-3,
    control_lr: float = 0.02,
    tv: float = 0.01,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """NL-SME's ablation A: the curve alone, with a free control point and no factors.

    A control point that moves too fast runs away: the paper reports this variant below SME on CIFAR-100.
    """
    rates = {"lr": lr, "alpha_lr": alpha_lr, "control_lr": control_lr}
    stages = nl_sme(steps=steps, **rates, tv=tv, control=0.0, factors="off").stages
    return Composed("nl-sme-a", stages, Labels(label_rule(labels)), restarts=restarts, keep=keep)


@dataclass(frozen=True, kw_only=True)
class FactorSettings(SearchSettings):
    """Of NL-SME, what its ablation B has."""

    steps: int = 1000
    lr: float = 1.0
    alpha_lr: float = 1e-3
    scaling_lr: float = 1e-3
    tv: float = 0.01
    scaling: float = 1e-2


@named("nl-sme-b", kind="attack", paper=f"{PAPER}; its ablation B")
@takes(FactorSettings)
def nl_sme_b(settings: FactorSettings) -> Attack:
    """NL-SME's ablation B: SME's line with a learned factor for every tensor, held near one."""
    return replace(nl_sme(curved=False, **asdict(settings)), name="nl-sme-b")
