"""Coarse replay: the client's whole training in a few large steps on all examples (gradleak's own)."""

from __future__ import annotations

from dataclasses import dataclass

from gradleak.attack import Attack
from gradleak.attacks.settings import UpdateSettings
from gradleak.attacks.sme import PIXELS
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.parts.coarse import Coarse, Onwards, Total
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Adam, StepDecay, constant
from gradleak.parts.priors import TotalVariation
from gradleak.parts.spaces import JointSpace
from gradleak.parts.stage import Stage


@dataclass(frozen=True, kw_only=True)
class CoarseReplaySettings(UpdateSettings):
    """The rate of the total way, the weight of the total variation, and how the replay is made coarse."""

    total_lr: float = 1e-2
    tv: float = 0.005
    coarse: int = 20
    path: tuple[int, ...] = ()
    early: float = 0.2
    extrapolate: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        if list(self.path) != sorted(set(self.path)) or any(number < 1 for number in self.path):
            raise ValueError(f"path must be growing numbers of coarse steps, at least 1 each; given {self.path}.")
        if not 0 <= self.early < 1:
            raise ValueError(f"early must be a share of the steps in [0, 1); given {self.early}.")
        if self.coarse < 1:
            raise ValueError(f"coarse must be at least 1; given {self.coarse}.")

    @property
    def phases(self) -> list[tuple[int, int]]:
        """(coarse steps, steps of the search) of every stage, from the coarsest on."""
        before = [number for number in self.path if number < self.coarse]
        counts = [int(self.early * self.steps) // max(1, len(before))] * len(before)
        pairs = zip((*before, self.coarse), (*counts, self.steps - sum(counts)), strict=True)
        return [(number, count) for number, count in pairs if count]


@named("coarse-replay", kind="attack", paper="gradleak's own")
@takes(CoarseReplaySettings)
def coarse_replay(settings: CoarseReplaySettings) -> Attack:
    """Match an update of many local steps by a replay of them in `coarse` large ones, each on all examples.

    min over x of 1 - cos(update, w0 - v_K) + tv * TV(x) with v_{k+1} = v_k - (lr T / K) grad(x) at v_k, v_0 = w0, or
    the client's own rule (momentum, weight decay, a schedule, Adam); Adam, box and rates of `sme`, and half of its
    total variation (chosen on a client that is in no table). With the client's recipe in Knowledge(training=...)
    nothing else is learned. Without it the total way lr T is learned, at the rate `total_lr` of its logarithm, as for
    plain SGD. The order of the client's batches is not needed. A step costs K gradients. For an Adam client these are
    taken in batches of the client's size, whose spread is most of Adam's denominator (`parts.coarse.SpreadRule`): as
    many examples, more passes over the weights.

    path, early     the share `early` of the steps goes to coarser replays of these K, equally many steps for each.
                    Every stage starts from the one before, and the rates fall over the whole run. This saves time, but
                    a path that is too coarse or too long misleads: images then explain what the replay leaves out
    extrapolate     extend the gradients linearly between the coarse steps (`parts.coarse.CoarseRule`), worth about
                    twice the steps. For small `lr` only: far from the truth it is unstable, and lanes are lost
    recompute       hold K points of the path instead of K graphs, for about twice the time: for clients too large
                    for the device (K = 20 of CNNcifar on 50 images: 3.9 GiB a lane with graphs, 1.1 without)

    coarse=1 is `ig-ms`, with the same `tv`. `lr`, `decay`, labels and `keep` as in `sme`.
    """
    stages: list[Stage] = []
    done, extrapolate = 0, settings.extrapolate
    for number, count in settings.phases:
        schedule = Onwards(StepDecay(), done, settings.steps) if settings.decay else constant
        stages.append(
            Stage(
                JointSpace((PIXELS, Total(min(number, 5), extrapolate=extrapolate))),
                Coarse(number, extrapolate=extrapolate, recompute=settings.recompute),
                Cosine(),
                (TotalVariation(settings.tv / 2),),  # half, as in `sme`
                Adam(lr=settings.lr, steps=count, schedule=schedule, rates={"total": settings.total_lr}),
            )
        )
        done += count
    return settings.attack("coarse-replay", *stages)
