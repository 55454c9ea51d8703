"""The baseline called DP in the paper on TIP: batch gradients clipped, weights noised once at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.clipping import clip
from gradleak.defences.noise import full_variance, noised, own_draws
from gradleak.defences.settings import at_least
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Compute, Defence, Noiseless, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Batch, Task

PAPER = "baseline in Wang and Su, TIP: Resisting Gradient Inversion via Targeted Interpretable Perturbation, 2026"


@named("tip-dp-baseline", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class TIPBaseline(Defence):
    """Each step's BATCH gradient is clipped to C; at the end every weight gets N(0, sigma^2).

    sigma = epochs * batches * lr * (C / batch_size) * sqrt(2 ln(1.25 / delta)) / epsilon.

    The formula is that of the authors' code. Their `epsilon` only names a noise scale: nothing is proved. The defaults
    are those of their convergence run (sigma 0.0048448); their attack run has epochs=1, batches=4, batch_size=1
    (0.019379). The recipe is part of the settings, since a client's hooks do not know it; give what the client runs.
    """

    epsilon: float = 5.0
    delta: float = 1e-5
    clip: float = 5.0
    epochs: int = 2
    batches: int = 16
    lr: float = 1e-3
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name in ("epsilon", "clip", "lr"):
            at_least(name, getattr(self, name), 0.0, excluded=True)
        for name in ("epochs", "batches", "batch_size"):
            at_least(name, getattr(self, name), 1)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, both excluded; given {self.delta}.")

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise on every weight."""
        sensitivity = self.epochs * self.batches * self.lr * self.clip / self.batch_size
        return sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return clip(compute(weights, batch), self.clip)

    def upload(self, upload: Upload, client: Client) -> Upload:
        if self.sigma == 0:
            return upload
        # The noise is added to the weights, which are the start minus the update.
        draws = own_draws(client, self.name)
        return upload.map(lambda update: noised(update, -self.sigma, draws))

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return Noiseless(replace(self, epsilon=math.inf), self)

    def noise_variance(self, scene: TargetView) -> Params:
        return full_variance(scene, self.sigma**2)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(
            reason=f"as published, sigma={self.sigma:.3g}: (i) clipping the mean of a batch bounds what an example "
            "changes by 2 x clip a step, not by clip / batch size; (ii) the rule for sigma is proved for epsilon < 1 "
            "only; (iii) rounds are not composed"
        )
