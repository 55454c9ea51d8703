"""Matching the signs and ratios that SecAdam and SecLion let a server see: a soft sign first, then a sharp one."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from gradleak.attack import Attack, Composed
from gradleak.attacks.settings import SearchSettings
from gradleak.attacks.sign_matching.cohorts import SignHinge, Sums
from gradleak.core.registry import did_you_mean, named
from gradleak.core.settings import takes
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.levenberg import Homotopy, LevenbergMarquardt
from gradleak.parts.matches import Cosine, Relative
from gradleak.parts.optimisers import CosineDecay, SignedAdam
from gradleak.parts.priors import NaturalImage, TotalVariation
from gradleak.parts.protocols import Match
from gradleak.parts.spaces import Normal, Pixels
from gradleak.parts.stage import Stage

WAYS = ("hinge", "soft", "both")
WIDTHS = (1.0, 0.3, 0.1)


@dataclass(frozen=True, kw_only=True)
class SignMatchingSettings(SearchSettings):
    """Steps, rate and prior; how signs are matched; and the cohort behind the server's view."""

    steps: int = 4800
    lr: float = 0.1
    tv: float = 1e-3
    match: str = "hinge"
    widths: tuple[float, ...] = WIDTHS
    clients: int = 1
    tracked: bool = False
    _: KW_ONLY
    keep: str = "last"

    def __post_init__(self) -> None:
        if self.match not in WAYS:
            raise ValueError(f"Unknown match {self.match!r}.{did_you_mean(self.match, WAYS)}")
        if self.match != "hinge" and (not self.widths or any(width < 0 for width in self.widths)):
            raise ValueError(f"widths must be at least one number, none below 0; given {self.widths}.")

    @property
    def ways(self) -> list[tuple[Sums, Match]]:
        """Prediction and match of every stage."""
        sums = Sums(clients=self.clients, tracked=self.tracked)
        hinge: list[tuple[Sums, Match]] = [(replace(sums, signs=True), SignHinge())] if self.match != "soft" else []
        return hinge + [(replace(sums, width=width), Cosine()) for width in self.widths if self.match != "hinge"]


@named("sign-matching", kind="attack", paper="gradleak's own; Boufounos and Baraniuk, 1-bit compressive sensing, 2008")
@takes(SignMatchingSettings)
def sign_matching(settings: SignMatchingSettings) -> Attack:
    """Find images whose gradient has the signs, or the ratios, that an optimiser like Adam or Lion lets through.

    match     "hinge": min over u of mean_j max(0, -sign_j g_j(u) / RMS of g's tensor)^2 + tv * TV(u), which asks for
              the right signs and for no sizes; `tv` then chooses among the many images that have them. "soft": 1 - cos
              of g / sqrt(g^2 + width^2) and what was seen, the widest sign first, one stage for every width.
              "both": the hinge, then the soft stages from its result, for ratios that have sizes (several clients)
    steps     of all stages together: signed Adam in the box of valid images, its rate falling in every stage
    clients, tracked     see `cohorts.Sums`

    With the defence known (A2) its clip, moments and cohort are replayed. Without it (A0) g is the plain gradient, and
    "soft" is only a gradient match. The last iterate is kept: once all signs are right no match tells images apart.
    """
    ways = settings.ways
    steps = max(1, settings.steps // len(ways))
    stages = (
        Stage(
            Pixels(Normal(0.5, 0.25, unit=True), boxed=True),
            predict,
            match,
            (TotalVariation(settings.tv),),
            SignedAdam(lr=settings.lr * 0.5**number, steps=steps, schedule=CosineDecay()),
        )
        for number, (predict, match) in enumerate(ways)
    )
    return settings.attack("sign-matching", *stages)


@named("ratio-second-order", kind="attack", paper="gradleak's own; Levenberg 1944, Marquardt 1963")
def ratio_second_order(
    *,
    steps: int = 60,
    widths: tuple[float, ...] = (),
    clients: int = 1,
    tracked: bool = True,
    prior: float = 1.0,
    restarts: int = 1,
    labels: str = "auto",
) -> Attack:
    """Second-order steps on the server's view of sums: a ratio of several clients, or of one over rounds, is smooth.

    min over x of mean_j ((f_j(x) - seen_j) / RMS of seen)^2 + mu * roughness of x, f the view of the clients' moments,
    mu falling to the level of the noise (`Homotopy`), in float64 (`Engine(precision="double")`) from a grey image with
    a little noise; at the end without the prior. `widths`: slopes of stages before the exact one, for views that are
    nearly signs.
    """
    dense = LevenbergMarquardt(steps=steps, homotopy=Homotopy(prior))
    stages = [
        Stage(
            Pixels(Normal(0.5, 0.05, unit=True)),
            Sums(clients=clients, width=width, tracked=tracked),
            Relative(whole=True),
            (NaturalImage(),),
            dense,
        )
        for width in (*widths, 0.0)
    ]
    polish = replace(stages[-1], priors=(), optimiser=replace(dense, homotopy=None, damping=1e-4))
    return Composed("ratio-second-order", (*stages, polish), Labels(label_rule(labels)), restarts=restarts)
