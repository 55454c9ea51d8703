"""GIFD: a generator's latent, then its features block by block, each held near where it began."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from gradleak.attack import Composed
from gradleak.attacks.generative.latent import Features, Generated, Latent
from gradleak.attacks.settings import SearchSettings
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Adam, RampedDecay
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import ImageNorm, TotalVariation
from gradleak.parts.stage import Stage

PAPER = "Fang et al., GIFD: A Generative Gradient Inversion Method with Feature Domain Optimization, ICCV 2023"


@dataclass(frozen=True, kw_only=True)
class GIFDSettings(SearchSettings):
    """Stages and their steps, the weights of the priors, and how far each feature may move."""

    steps: int = 1000
    features: int = 4
    lr: float = 0.1
    tv: float = 1e-4
    norm: float = 1e-6
    radius: float = 0.5
    radii: tuple[float, ...] = ()
    latent: str = "auto"
    beside: tuple[str, ...] = ("w", "noise")
    shift: int = 0
    _: KW_ONLY
    restarts: int = 4


@named("gifd", kind="attack", paper=PAPER)
@takes(GIFDSettings)
def gifd(settings: GIFDSettings) -> Composed:
    """Match the gradient's direction over a generator's latent, then over its features, block after block.

    min of 1 - cos(grad(x, y), observed) + tv * TV + norm * ||x|| / pixels. Stage 0: the latent, on the sphere where it
    began. Stage i = 1, ..., `features`: the input of block i, from where stage i - 1 ended, in an l1 ball around it,
    example by example. `steps` of Adam in each, the rate up over 5 % of them and down over the last 75 %. The result is
    the image whose gradient matches best over all stages and restarts.

    features   feature stages; a generator of K blocks has K (the last is what its picture is made of)
    radius     of each ball, as a share of the l1 norm of the feature at its centre
    radii      instead, one radius for each stage, absolute (the paper's BigGAN: 2000, 2500, 3000, ...)
    latent     as in `gias`
    beside     what of a style generator moves with every feature, on its sphere and in its ball
    shift      the generator gets label + shift, the wrong class: it measures what the right class is worth

    Differs: image and score come from the same restart and stage (the paper's code returns the last restart's image);
    the radius is a share, since the paper's are for one large generator, and 0.5 was chosen with a small DCGAN (with
    0.1 features hardly move: 11 against 25 dB on four images that are in no table); every stage starts from the best
    match of the stage before, not from its final iterate (keep="last"). Of a style generator all noise maps move from
    the first feature on, not a growing number of them; they start from its own maps, not from N(0, 1), and styles start
    from its mapping of a random z, not from a normal fit of them.
    """
    shift, of, relative, count = settings.shift, ("h", *settings.beside), not settings.radii, settings.features
    radii = settings.radii or (settings.radius,) * count
    if len(radii) != count:
        raise ValueError(f"radii must be one for each of the {count} feature stages; given {len(radii)}.")
    spaces: list[Generated] = [Latent(of=settings.latent, shift=shift, sphere=True)]
    spaces += [
        Features(shift=shift, stage=number, of=of, radius=radius, relative=relative, sphere=True)
        for number, radius in enumerate(radii, 1)
    ]
    priors = (TotalVariation(settings.tv), ImageNorm(settings.norm, per_pixel=True))
    optimiser = Adam(lr=settings.lr, steps=settings.steps, schedule=RampedDecay())
    stages = [Stage(space, Replay(), Cosine(), priors, optimiser) for space in spaces]
    return settings.attack("gifd", *stages, output="best_stage")
