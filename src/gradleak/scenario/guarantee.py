"""What is proved about a defence, and nothing more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradleak.core.settings import takes
from gradleak.scenario import accounting

if TYPE_CHECKING:
    from gradleak.scenario.client import LocalTraining

VACUOUS = 20.0
"""Above this epsilon the label also says that it is vacuous in practice."""

_SAMPLING = {
    "all": "every client in every round: no amplification",
    "fixed": "a fixed number of clients without replacement: not amplified, counted as if in every round",
    "poisson": "Poisson sampling of clients",
}
ALWAYS_ASSUMED = (
    "assumes secret fresh randomness in exact arithmetic, public example counts, no losses or other metrics sent, "
    "settings not tuned on private data"
)


@dataclass(frozen=True, eq=False)
class Exposure:
    """How often, and how, a client takes part: the input of an accountant.

    sampling     how the clients of a round are chosen: "all", "fixed" (a number, without replacement) or "poisson"
    signal       root mean square of an undefended update's coordinates, with which heuristic noise is compared
    prior        how likely a reconstruction is before anything is released, for the bound of Balle et al. 2022
    """

    rounds: int = 1
    clients: int = 1
    participation: float = 1.0  # the share of the clients in a round; for "poisson" each one's probability
    sampling: str = "all"
    examples: int = 1  # of a client
    training: LocalTraining | None = None
    delta: float = 1e-5
    signal: float | None = None
    prior: float = 1e-6

    def __post_init__(self) -> None:
        if self.sampling not in _SAMPLING:
            raise ValueError(f"sampling must be {', '.join(map(repr, _SAMPLING))}; given {self.sampling!r}.")
        for name in ("rounds", "clients", "examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; given {getattr(self, name)}.")
        if not 0 < self.participation <= 1:
            raise ValueError(f"participation must be above 0 and at most 1; given {self.participation}.")
        if self.sampling == "all" and self.participation != 1:
            raise ValueError(
                f"With participation {self.participation}, say how the clients of a round are chosen: "
                "sampling='fixed' or 'poisson'."
            )
        for name in ("delta", "prior"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, both excluded; given {getattr(self, name)}.")

    @property
    def passes(self) -> int | None:
        """How often one example is used in one round of local training, at most; None if the recipe is unknown."""
        if self.training is None:
            return None
        plan = self.training.order(self.examples)  # the first batch comes first in every pass
        return sum(rows is None or (isinstance(rows, slice) and rows.start == 0) for rows in plan)


_LABEL = ("unit", "model", "covers", "accountant", "sampling", "releases", "neighbours")


@dataclass(frozen=True)
class Guarantee:
    """What is proved about a defence: an (epsilon, delta), or that there is no formal guarantee and why.

    An epsilon means nothing without the rest of its label, which is given whole or not at all. `accounted` fills it.

    unit         what is protected: "example" or "client"
    model        who adds the noise: "central" (the server), "local" (each client) or "distributed" (clients together)
    covers       the adversary that it protects against
    accountant   how epsilon was computed
    sampling     what is assumed about it
    releases     number of releases that epsilon covers
    neighbours   the data sets that cannot be told apart
    caveats      what else must hold
    reconstruction   (prior, bound): if a guess is right with probability `prior`, a reconstruction is with `bound`
    """

    epsilon: float | None = None
    delta: float | None = None
    reason: str = "it was not designed to give one"
    unit: str = ""
    model: str = ""
    covers: str = ""
    accountant: str = ""
    sampling: str = ""
    releases: int = 0
    neighbours: str = ""
    caveats: tuple[str, ...] = ()
    reconstruction: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.epsilon is not None and not (self.epsilon >= 0 and self.delta is not None and 0 <= self.delta < 1):
            raise ValueError(f"An epsilon is at least 0 and has a delta below 1; given {self.epsilon}, {self.delta}.")
        absent = [name for name in _LABEL if not getattr(self, name)]
        if absent and len(absent) < len(_LABEL):
            raise ValueError(f"A label is given whole or not at all; this one lacks {', '.join(absent)}.")

    @property
    def vacuous(self) -> bool:
        """An epsilon so large that it is vacuous in practice."""
        return self.epsilon is not None and self.epsilon > VACUOUS

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"no formal guarantee ({self.reason})"
        delta = rounded_up(self.delta or 0.0, 2)
        head = [f"({rounded_up(self.epsilon, 3):.3g}, {delta:.2g})-differential privacy"]
        if self.unit:
            head[0] += f" of one {self.unit} ({self.model} model, against {self.covers})"
        if self.model == "central":
            head += ["does not protect against the aggregating server (the GIA adversary)"]
        if self.vacuous:
            head += ["vacuous in practice"]
        if not self.unit:
            return "; ".join(head)
        count = f"{self.releases} release{'' if self.releases == 1 else 's'}"
        tail = [f"{self.accountant} over {count}", self.sampling, f"neighbours: {self.neighbours}", *self.caveats]
        if self.reconstruction is not None:
            prior, bound = self.reconstruction
            tail += [
                f"theory: a guess right with probability {prior:.2g} becomes a reconstruction right with at most "
                f"{rounded_up(bound, 2):.2g} (Balle et al. 2022)"
            ]
        return "; ".join(head) + "\n" + "; ".join(tail)


@dataclass(frozen=True, kw_only=True)
class GaussianReleases:
    """What a defence with Gaussian noise releases, and to whom.

    noise_multiplier   standard deviation over the L2 SENSITIVITY to the neighbours named, not over the clip
    releases           number of releases that one unit takes part in; None: cannot be counted
    amplified          the adversary does not learn who was sampled, so that Poisson sampling of clients counts
    lacks              requirements that the defence does not meet
    """

    noise_multiplier: float
    releases: int | None
    unit: str
    model: str
    covers: str
    neighbours: str
    sampling: str = ""
    amplified: bool = False
    caveats: Sequence[str] = ()
    lacks: Sequence[str] = ()


@takes(GaussianReleases)
def accounted(exposure: Exposure, *, noisy: GaussianReleases) -> Guarantee:
    """The label of Gaussian releases; the keywords are the fields of `GaussianReleases`.

    No epsilon is stated if the defence lacks a requirement, adds no noise, cannot count its releases, or if the
    accountant that the sampling needs is not installed.
    """
    lacks, releases, noise_multiplier = list(noisy.lacks), noisy.releases, noisy.noise_multiplier
    if noise_multiplier == 0:
        lacks += ["no noise is added"]
    if releases is None:
        lacks += ["the client's local training is not known, so its steps cannot be counted"]
    if lacks or releases is None:
        return Guarantee(reason="; ".join(lacks))
    q = exposure.participation if noisy.amplified and exposure.sampling == "poisson" else 1.0
    try:
        epsilon = accounting.poisson_epsilon(exposure.delta, noise_multiplier, q, releases)
    except accounting.MissingAccountant as missing:
        return Guarantee(reason=f"not accounted for: {missing}".removesuffix("."))
    if q == 1:
        bound = accounting.reconstruction_bound(exposure.prior, gaussian=math.sqrt(releases) / noise_multiplier)
    else:
        curve = accounting.renyi_curve(noise_multiplier, q, releases)
        bound = accounting.reconstruction_bound(exposure.prior, renyi=curve)
    return Guarantee(
        epsilon=epsilon,
        delta=exposure.delta,
        unit=noisy.unit,
        model=noisy.model,
        covers=noisy.covers,
        accountant="exact Gaussian composition" if q == 1 else "PLD (dp-accounting), checked against RDP (Opacus)",
        sampling=noisy.sampling or _SAMPLING[exposure.sampling] + (f" with probability {q:g}" if q < 1 else ""),
        releases=releases,
        neighbours=noisy.neighbours,
        caveats=(*noisy.caveats, ALWAYS_ASSUMED),
        reconstruction=(exposure.prior, bound),
    )


def heuristic(sigma: float, exposure: Exposure) -> Guarantee:
    """The label of uncalibrated noise: its size relative to the signal, where that was measured."""
    ratio = "not measured" if exposure.signal is None else f"{sigma / exposure.signal:.3g}"
    return Guarantee(reason=f"heuristic noise, sigma={sigma:.3g}, noise/signal={ratio}")


def rounded_up(value: float, digits: int) -> float:
    """Rounded up to this many digits: a label never claims more than was proved."""
    if value == 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return math.ceil(value / unit - 1e-6) * unit  # 1e-6 of the last digit: 3.0 stays 3
