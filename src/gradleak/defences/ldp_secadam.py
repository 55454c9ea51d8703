"""SecAdam on updates that every client has clipped and noised itself: the variant with a guarantee."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.defences.clipping import clip
from gradleak.defences.noise import local_guarantee, noised, own_draws
from gradleak.defences.secadam import SecAdam, WithoutNoise, all_may_be_noise, sole_update
from gradleak.defences.settings import at_least
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Task


@named("ldp-secadam", kind="defence", paper="ours; Dwork and Roth 2014 (the Gaussian mechanism) before SecAdam")
@dataclass(frozen=True)
class LocalDPSecAdam(SecAdam):
    """A client clips its update to norm C, adds N(0, (z C)^2), and makes moments of the result.

    Moments, masks and sums are post-processing, in this round and later ones, so the guarantee is that of the noised
    update: local differential privacy of the client, any two of whose updates lie up to 2 C apart (the accountant is
    given z/2), over all rounds that it takes part in. It does not rest on secure aggregation.

    The cheaper noise of `dp-fedavg` with model="distributed", a share from each client, is not enough: it protects the
    sum of updates, and the sum of their SQUARES is no function of that sum. A server that makes Adam's moments itself,
    from a noised sum, needs no SecAdam.
    """

    clip: float = 1.0
    noise_multiplier: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("clip", self.clip, 0.0, excluded=True)
        at_least("noise_multiplier", self.noise_multiplier, 0.0)
        if self.moments != "update":
            raise ValueError("The guarantee is that of the noised update: moments='update' only.")

    def upload(self, upload: Upload, client: Client) -> Upload:
        return super().upload(self._private(upload, client), client)

    def remember(self, before: Upload, after: Upload, client: Client) -> Tree:
        return super().remember(self._private(before, client), after, client)  # the same draws: the same noise

    def _private(self, upload: Upload, client: Client) -> Upload:
        update = clip(sole_update(upload, self.name), self.clip)
        if self.noise_multiplier:
            update = noised(update, self.noise_multiplier * self.clip, own_draws(client, self.name))
        return replace(upload, payload={"update": update})

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return WithoutNoise(replace(self, noise_multiplier=0.0), self)

    def noise_variance(self, scene: TargetView) -> Params:
        return all_may_be_noise(scene.update) if self.noise_multiplier else tree.zeros_like(scene.update)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return local_guarantee(exposure, self.noise_multiplier)
