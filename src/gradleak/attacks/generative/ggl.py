"""GGL: a generator's latent is the only unknown, found without derivatives of the objective; and the prior alone."""

from __future__ import annotations

from gradleak.attack import Composed
from gradleak.attacks.generative.cma import CMAES, RandomSearch
from gradleak.attacks.generative.latent import Latent
from gradleak.core.registry import did_you_mean, named
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


@named("ggl", kind="attack", paper=PAPER)
def ggl(
    *,
    search: str = "cma",
    steps: int | None = None,
    population: int = 50,
    sigma: float = 1.0,
    lr: float = 0.1,
    kl: float = 0.1,
    estimate: bool = True,
    shift: int = 0,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Composed:
    """Search a generator's latent with CMA-ES for the gradient, through whatever defence shows in it. First order only.

    min over z of the mean over tensors of ||T(grad(G(z), y)) - observed||^2 + kl * KL(z), T the known defence
    (Knowledge.defence) as its adaptive attacker has it. For defended updates of one example: what comes out is an image
    of the prior, right in content and not in pixels.

    search      "cma": CMA-ES over tanh(z) from U[0, 1], without the KL term; "random": N(0, I), the best of all;
                "adam": by derivatives, 5 % warm-up, a cosine down over the last 25 %, with the KL term
    steps       500 populations of 50; 2,500 of Adam
    kl          weight of the KL term, against squares of gradients
    population, sigma   candidates a step, and the first step length of CMA-ES
    estimate    what the observation itself shows of a defence is taken over, whether one is known or not: entries that
                are zero, and a length that no prediction may exceed
    shift       the generator is told label + shift: the wrong class, to measure what the right one is worth

    Differs: the mask is that of the observation's zeros, where the paper's code prunes at the rate they show, and the
    bound on the length holds where no defence is declared, too (`estimate`); CMA-ES with a Cholesky factor; the best
    candidate by match is returned, not the mean; no Bayesian search (TuRBO).
    """
    if search not in SEARCHES:
        raise ValueError(f"search cannot be {search!r}.{did_you_mean(search, SEARCHES)}")
    if search == "random" and keep == "last":
        raise ValueError("A random search has no last iterate that means anything: use keep='best_match'.")
    optimiser: Optimiser
    if search == "adam":
        optimiser = Adam(lr=lr, steps=steps or 2500, schedule=RampedDecay(up=0.05, down=0.25))
    elif search == "random":
        optimiser = RandomSearch(steps=steps or 500, population=population)
    else:
        optimiser = CMAES(steps=steps or 500, population=population, sigma=sigma)
    match: Match = AsObserved(MeanSquaredError()) if estimate else MeanSquaredError()
    priors = (LatentNormality(kl),) if kl and search == "adam" else ()
    space = Latent(of="z", squash=search == "cma", shift=shift)
    stage = Stage(space, ReplayedGradient(), match, priors, optimiser)
    return Composed("ggl", (stage,), Labels(label_rule(labels)), restarts=restarts, keep=keep)


@named("prior-only", kind="attack", paper="no attack but a control: what the generator shows without the gradient")
def prior_only(*, shift: int = 0, labels: str = "auto") -> Composed:
    """A random image of the generator, of the label that was found: what a prior is worth without the gradient.

    The floor for every attack with a generator: leakage is what lies above it. z ~ N(0, I), nothing is searched, and
    nothing is chosen; the update is looked at for its label alone (and for none where the generator has no classes).
    """
    stage = Stage(Latent(of="z", shift=shift), Replay(), Cosine(), (), Still())
    return Composed("prior-only", (stage,), Labels(label_rule(labels)))
