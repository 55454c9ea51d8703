"""Gaussian noise that the client itself adds to its update."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.clipping import clip
from gradleak.defences.noise import full_variance, local_guarantee, noised, only_update, own_draws
from gradleak.defences.settings import at_least
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Noiseless, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee, heuristic
from gradleak.scenario.task import Task

PAPER = (
    "Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014: the Gaussian mechanism, used locally"
)


@named("local-gaussian", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class LocalGaussian(Defence):
    """The client clips its update to norm C and adds N(0, (z C)^2) to every coordinate before it leaves.

    clip, noise_multiplier   C and z (1 and 1 where nothing is given): local differential privacy of the client
    sigma                    instead: noise of this size on the update without a clip, which proves nothing

    Papers on leakage add this noise and cite Geyer et al. 2017, where the server adds it (`geyer`).
    Local differential privacy compares ANY two data sets of the client, whose clipped updates lie up to 2 C apart: the
    accountant is given z/2. Buffers are not sent, since they would leave without noise (with `sigma` they are).

    A2 replays the clip without the noise. Isotropic noise gives every coordinate the same weight, so an attacker who
    knows it gains only through priors, or by averaging rounds that release the same batch.
    """

    clip: float | None = None
    noise_multiplier: float | None = None
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.sigma is not None:
            if self.clip is not None or self.noise_multiplier is not None:
                raise ValueError("Give sigma alone, or clip and noise_multiplier (their product is then the noise).")
            at_least("sigma", self.sigma, 0.0)
            return
        for name in ("clip", "noise_multiplier"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, 1.0)
            at_least(name, getattr(self, name), 0.0, excluded=name == "clip")

    @property
    def std(self) -> float:
        """Of the noise on every coordinate."""
        return self.sigma if self.sigma is not None else (self.noise_multiplier or 0.0) * (self.clip or 0.0)

    def upload(self, upload: Upload, client: Client) -> Upload:
        if (bound := self.clip) is not None:
            upload = only_update(upload, self.name).map(lambda update: clip(update, bound))
        if self.std == 0:
            return upload
        draws = own_draws(client, self.name)
        trees = enumerate(upload.payload.items())
        return replace(upload, payload={k: noised(update, self.std, draws.child(n)) for n, (k, update) in trees})

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        quiet = replace(self, sigma=0.0) if self.sigma is not None else replace(self, noise_multiplier=0.0)
        return Noiseless(quiet, self)

    def noise_variance(self, scene: TargetView) -> Params:
        return full_variance(scene, self.std**2)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        if self.sigma is not None:
            return heuristic(self.sigma, exposure)
        return local_guarantee(exposure, self.noise_multiplier or 0.0)
