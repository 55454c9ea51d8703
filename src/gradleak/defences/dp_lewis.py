"""The clip and the noise that SecAdam's authors call differential privacy: DP-FedAVG and DP-SecAdam as published."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.clipping import clip
from gradleak.defences.noise import noised, own_draws, variance_of_steps
from gradleak.defences.secadam import PAPER, SecAdam, WithoutNoise, all_may_be_noise
from gradleak.defences.settings import at_least
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Client, Compute, Defence, Noiseless
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Batch, Task


def _clipped_and_noised(
    compute: Compute, weights: Params, batch: Batch, client: Client, owner: DPFedAvgLewis | DPSecAdam
) -> Params:
    """g / max(1, ||g|| / C) of the batch's MEAN gradient, plus N(0, noise^2) in every coordinate."""
    gradient = clip(compute(weights, batch), owner.clip)
    if not owner.noise:
        return gradient
    if not owner.fixed_noise:
        return noised(gradient, owner.noise, own_draws(client, owner.name))
    where = tree.like(weights).device
    return noised(gradient, owner.noise, Draws(randomness.key("dp-lewis", 0).to(where)))


def _none(owner: DPFedAvgLewis | DPSecAdam) -> Guarantee:
    fixed = "; the noise comes from one public seed" if owner.fixed_noise else ""
    return Guarantee(
        reason=f"as published, noise/clip={owner.noise / owner.clip:.3g}: the mean of a batch is clipped, not what an "
        f"example or a client adds over all steps; the noise is not calibrated to the clip; rounds are not composed"
        f"{fixed}"
    )


def _check(owner: DPFedAvgLewis | DPSecAdam) -> None:
    at_least("clip", owner.clip, 0.0, excluded=True)
    at_least("noise", owner.noise, 0.0)


@named("dp-fedavg-lewis", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class DPFedAvgLewis(Defence):
    """DP-FedAVG as published with SecAdam: local steps use clip(g, C) + N(0, noise^2), g a batch's mean gradient.

    `noise` is an absolute deviation. The paper's text has C = 10 and 0.001, its grid C in {1, 5, 10} and noise in
    {0.001, 0.005, 0.01}, the released code 1e-5. No formal guarantee; the one of McMahan et al. is `dp-fedavg`.

    fixed_noise   as in the released code, where every client's generator has the same seed: all add the same noise,
                  which does not average out and which an attacker can draw too. Here it is also the same in every step
    """

    clip: float = 10.0
    noise: float = 1e-3
    fixed_noise: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return _clipped_and_noised(compute, weights, batch, client, self)

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return self if self.fixed_noise or not self.noise else Noiseless(replace(self, noise=0.0), self)

    def noise_variance(self, scene: TargetView) -> Params:
        """From `noise` in the gradient of every local step: see `variance_of_steps`."""
        if self.fixed_noise:
            return tree.zeros_like(scene.update)
        training = scene.knows.training or LocalTraining(lr=1.0)
        return variance_of_steps(scene, [self.noise] * len(training.order(scene.num_examples)))

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return _none(self)


@named("dp-secadam", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class DPSecAdam(SecAdam):
    """DP-SecAdam as published: the clip and noise of `dp-fedavg-lewis` on the gradient, then SecAdam.

    The noise also raises v, by its variance. No formal guarantee; `ldp-secadam` has one.
    """

    clip: float = 10.0
    noise: float = 1e-3
    fixed_noise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return _clipped_and_noised(compute, weights, batch, client, self)

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return self if self.fixed_noise or not self.noise else WithoutNoise(replace(self, noise=0.0), self)

    def noise_variance(self, scene: TargetView) -> Params:
        """Gradients smaller than the noise have lost their sign, and a ratio does not show which these are."""
        quiet = self.fixed_noise or not self.noise
        return tree.zeros_like(scene.update) if quiet else all_may_be_noise(scene.update)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return _none(self)
