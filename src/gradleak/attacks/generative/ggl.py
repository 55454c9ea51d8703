"""GGL: a search of a generator's latent without derivatives of the objective; and its control, the prior alone."""

from __future__ import annotations

from dataclasses import dataclass

from gradleak.attack import Composed
from gradleak.attacks.generative.cma import CMAES, RandomSearch
from gradleak.attacks.generative.latent import Latent
from gradleak.attacks.settings import SearchSettings
from gradleak.core.registry import did_you_mean, named
from gradleak.core.settings import takes
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine, MeanSquaredError
from gradleak.parts.optimisers import Adam, RampedDecay, Still
from gradleak.parts.partial import AsObserved
from gradleak.parts.predictions import Replay, ReplayedGradient
from gradleak.parts.priors import LatentNormality
from gradleak.parts.protocols import Match, Optimiser
from gradleak.parts.stage import Stage

PAPER = "Li et al., Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage, CVPR 2022"
SEARCHES = ("cma", "random", "adam")


@dataclass(frozen=True, kw_only=True)
class GGLSettings(SearchSettings):
    """Which search and its budget, the weight of the KL term, and what is taken over from the observation."""

    search: str = "cma"
    steps: int | None = None
    population: int = 50
    sigma: float = 1.0
    lr: float = 0.1
    kl: float = 0.1
    estimate: bool = True
    shift: int = 0

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise ValueError(f"search cannot be {self.search!r}.{did_you_mean(self.search, SEARCHES)}")
        if self.search == "random" and self.keep == "last":
            raise ValueError("A random search has no last iterate that means anything: use keep='best_match'.")

    @property
    def optimiser(self) -> Optimiser:
        """The search by its name."""
        if self.search == "adam":
            return Adam(lr=self.lr, steps=self.steps or 2500, schedule=RampedDecay(up=0.05, down=0.25))
        if self.search == "random":
            return RandomSearch(steps=self.steps or 500, population=self.population)
        return CMAES(steps=self.steps or 500, population=self.population, sigma=self.sigma)


@named("ggl", kind="attack", paper=PAPER)
@takes(GGLSettings)
def ggl(settings: GGLSettings) -> Composed:
    """Search a generator's latent with CMA-ES, through the defence that the gradient shows. First order only.

    min over z of the mean over tensors of ||T(grad(G(z), y)) - observed||^2 + kl * KL(z), T the known defence
    (Knowledge.defence) as the adaptive attacker predicts it. For defended updates of one example: the result is an
    image of the prior, right in content but not in pixels.

    search      "cma": CMA-ES over tanh(z) from U[0, 1], without the KL term; "random": N(0, I), the best of all;
                "adam": by derivatives, 5 % warm-up, a cosine down over the last 25 %, with the KL term
    steps       500 populations of 50; 2,500 of Adam
    kl          weight of the KL term, against squares of gradients
    population, sigma   candidates a step, and the first step length of CMA-ES
    estimate    apply to predictions what the observation itself shows of a defence, known or not: its zero entries, and
                its length as an upper bound
    shift       the generator gets label + shift, the wrong class: it measures what the right class is worth

    Differs: the mask is that of the observation's zeros, where the paper's code prunes at the rate they show; the bound
    on the length also holds where no defence is declared (`estimate`); CMA-ES with a Cholesky factor; the best
    candidate by match is returned, not the mean; no Bayesian search (TuRBO).
    """
    match: Match = AsObserved(MeanSquaredError()) if settings.estimate else MeanSquaredError()
    priors = (LatentNormality(settings.kl),) if settings.kl and settings.search == "adam" else ()
    space = Latent(of="z", squash=settings.search == "cma", shift=settings.shift)
    return settings.attack("ggl", Stage(space, ReplayedGradient(), match, priors, settings.optimiser))


@named("prior-only", kind="attack", paper="no attack but a control: what the generator shows without the gradient")
def prior_only(*, shift: int = 0, labels: str = "auto") -> Composed:
    """A random image of the generator, of the label that was read off: what a prior is worth without the gradient.

    The floor for every attack with a generator: leakage is what lies above it. z ~ N(0, I), without any search or
    choice. The update gives the label alone, and nothing where the generator has no classes.
    """
    stage = Stage(Latent(of="z", shift=shift), Replay(), Cosine(), (), Still())
    return Composed("prior-only", (stage,), Labels(label_rule(labels)))
