"""AGP: Gaussian noise everywhere except in the channels that explain a decision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences import gradcam
from gradleak.defences.clipping import clip
from gradleak.defences.noise import own_draws
from gradleak.defences.settings import one_of
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Compute, Defence, Noiseless, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee, heuristic
from gradleak.scenario.task import Batch, Task, TaskError

PAPER = "Li et al., Balancing Privacy Protection and Interpretability in Federated Learning, arXiv:2302.08044; TMC 2024"
DOUBT = 1e-3  # the chance that a noised channel is taken for an exact one


@named("agp", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class AGP(Defence):
    """Clip every batch gradient, then add noise once to all parameters except important channels of some layers.

    Local steps use g * min(1, clip / ||g||); N(0, sigma^2) is added to the trained weights, except in the target
    layers, where only some channels get noise (weight and bias), chosen by their Grad-CAM importance (`gradcam`, one
    random example of each class):
      reading="noised"      the share `noised` of least importance gets noise, the rest is released exactly
      reading="important"   the share `noised` of most importance is released exactly, the rest gets noise
    Sources agree on the number, 25 %, but not on what it counts; hence two readings.

    sigma     the default is that of the attack runs of the TIP paper (`tip.scale_of(5, steps=4, lr=1e-3)`)
    layers    the target layers, the last convolution of each residual block: those whose name ends in this, or fits it
              as a pattern ("conv2" in torchvision's ResNets, "body.3" in `gradleak.models.resnet`)
    absolute, repo_single_guidance   how importance is averaged, and over which examples: as in `tip`

    The attacker knows sigma and how many channels are exact, and guesses that the noised ones have the most energy in
    the observed update. That is sure where all others have less energy than noise alone would give (`sure`). Beside
    exact coordinates noised ones have no weight, so A1 and A2 then drop all of them. Where the noise is the smaller
    part, energy does not show which channels are exact: such a layer counts as noised in all its channels, and where no
    layer is sure, every coordinate has the variance sigma^2. A2 also replays the clipping.

    Differs: the full text of the journal version was not available; this is the method as the TIP paper describes and
    uses it.
    """

    sigma: float = 0.019379
    clip: float = 5.0
    noised: float = 0.25
    reading: Literal["noised", "important"] = "noised"
    layers: str = "conv2"
    absolute: bool = False
    repo_single_guidance: bool = False

    def __post_init__(self) -> None:
        if not (self.sigma >= 0 and self.clip > 0):
            raise ValueError(f"sigma must be 0 or more and clip above 0; given {self.sigma} and {self.clip}.")
        if not 0 < self.noised <= 1:
            raise ValueError(f"noised is a share of the channels, above 0 and at most 1; given {self.noised}.")
        one_of("reading", self.reading, "noised", "important")

    def count(self, channels: int) -> int:
        """How many channels of a target layer get noise."""
        share = max(1, math.floor(self.noised * channels + 1e-9))
        return share if self.reading == "noised" else channels - share

    def targets(self, task: Task) -> list[str]:
        """The convolutions that keep channels without noise."""
        known = list(gradcam.convolutions(task))
        fits = lambda name: f".{name}".endswith(f".{self.layers}") or fnmatchcase(name, self.layers)  # noqa: E731
        targets = [name for name in known if fits(name)]
        if not targets:
            raise TaskError(
                f"AGP finds no convolution named {self.layers!r}, and needs the last one of each residual block. "
                f"Set layers to the end of their names or to a pattern, as agp:layers={(known or ['conv2'])[-1]}; the "
                f"model has {', '.join(known) or 'none'}."
            )
        return targets

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return clip(compute(weights, batch), self.clip)

    def upload(self, upload: Upload, client: Client) -> Upload:
        if not self.sigma:
            return upload
        source = own_draws(client, self.name)
        chosen = gradcam.guidance(client.batch, source, single=self.repo_single_guidance)
        importance = gradcam.channel_importance(
            client.task, client.end, client.batch, chosen, upload.buffers, absolute=self.absolute
        )
        least = {layer: -importance[layer] for layer in self.targets(client.task)}
        update = upload.payload["update"]
        mask = self._mask(update, least)
        noisy = {}
        for stream, (name, value) in enumerate(update.items(), start=1):  # stream 0 chose the guidance
            noise = source.normal(tuple(value.shape), stream=stream, dtype=value.dtype)
            noisy[name] = value - self.sigma * mask[name] * noise  # the weights are the start minus the update
        return replace(upload, payload={**upload.payload, "update": noisy})

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return Noiseless(replace(self, sigma=0.0), self)

    def noise_variance(self, scene: TargetView) -> Params:
        if not self.sigma:
            return tree.zeros_like(scene.update)
        names = self.targets(scene.task)
        kernels = {layer: scene.update[f"{layer}.weight"].flatten(1) for layer in names}
        sure = {layer: self.sure(kernel) for layer, kernel in kernels.items()}
        mask = self._mask(scene.update, {layer: kernel.square().sum(1) for layer, kernel in kernels.items()})
        for layer, name in ((layer, f"{layer}.{part}") for layer in names for part in ("weight", "bias")):
            if name in mask:
                mask[name] = torch.where(sure[layer], mask[name], 1.0)
        unusable = torch.where(torch.stack(list(sure.values())).any(), torch.inf, self.sigma**2)
        return tree.map(lambda noisy: torch.where(noisy > 0, unusable.to(noisy), 0.0), mask)

    def sure(self, kernels: Tensor) -> Tensor:
        """Does energy show which channels of this layer are exact? (channels, entries) of an update -> a bool.

        Noise of d entries, with or without a signal, has less energy than sigma^2 q with probability `DOUBT` at most,
        q the `DOUBT` quantile of the chi-square distribution with d degrees of freedom. Channels below it are exact.
        """
        from scipy.special import gammaincinv

        channels, entries = kernels.shape
        noised = self.count(channels)
        if noised == channels:
            return torch.zeros((), dtype=torch.bool, device=kernels.device)
        least = self.sigma**2 * 2 * float(gammaincinv(entries / 2, DOUBT))
        return kernels.square().sum(1).topk(noised + 1).values[-1] < least

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return heuristic(self.sigma, exposure)  # and some channels have none at all

    def _mask(self, update: Params, scores: dict[str, Tensor]) -> Params:
        """1 where there is noise: the channels of the largest scores in target layers, and all of every other layer."""
        mask = tree.map(torch.ones_like, update)
        for layer, score in scores.items():
            noisy = gradcam.largest(score, self.count(len(score)))
            for name in (f"{layer}.weight", f"{layer}.bias"):
                if name in update:
                    mask[name] = gradcam.along_channels(noisy, update[name]).expand(update[name].shape)
        return mask
