"""TIP: noise in the spectrum of the kernels of the channels that Grad-CAM calls important."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences import gradcam
from gradleak.defences.noise import own_draws
from gradleak.defences.settings import one_of
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee, heuristic
from gradleak.scenario.task import Task

PAPER = "Wang and Su, TIP: Resisting Gradient Inversion via Targeted Interpretable Perturbation, arXiv:2602.11633, 2026"


def mask(
    height: int, width: int, radius: float = 0.5, center: str = "int", device: str | torch.device = "cpu"
) -> Tensor:
    """1 at the frequencies of a shifted spectrum that get noise: (u - u0)^2 + (v - v0)^2 >= radius^2, (height, width).

    center="int": u0 = height // 2, where the mean of the kernel is. "real": u0 = height / 2, as printed, which for
    small odd kernels and radius 0.5 excludes nothing: white noise.
    """
    rows, columns = (
        torch.arange(side, device=device) - (side // 2 if center == "int" else side / 2) for side in (height, width)
    )
    return rows[:, None].square() + columns.square() >= _square(radius)


def spectral(kernels: Tensor, radius: float = 0.5, center: str = "int") -> Tensor:
    """Re ifft2(ifftshift(M * fftshift(fft2(kernels)))) over the last two axes, M = `mask`: the reach of the noise."""
    axes = (-2, -1)
    passing = mask(kernels.shape[-2], kernels.shape[-1], radius, center, kernels.device)
    spectrum = passing * torch.fft.fftshift(torch.fft.fft2(kernels), dim=axes)
    return torch.fft.ifft2(torch.fft.ifftshift(spectrum, dim=axes)).real


def filtered(kernels: Tensor, radius: float = 0.5, center: str = "int") -> Tensor:
    """`spectral`, without a transform where the mask passes all, nothing, or all but the mean.

    An attacker filters every layer at every step, and a transform takes many passes over it.
    """
    middle = [side // 2 if center == "int" else side / 2 for side in kernels.shape[-2:]]
    places = itertools.product(*map(range, kernels.shape[-2:]))  # Python numbers: a captured step reads no value
    stopped = sum(math.dist(place, middle) ** 2 < _square(radius) for place in places)
    if stopped == 0:
        return kernels
    if stopped == math.prod(kernels.shape[-2:]):
        return torch.zeros_like(kernels)
    if stopped == 1 and center == "int":
        return kernels - kernels.mean((-2, -1), keepdim=True)
    return spectral(kernels, radius, center)


def _square(radius: float) -> float:
    return radius**2 - 1e-9  # sqrt(2) squared is a little more than 2


def scale_of(
    epsilon: float,
    delta: float = 1e-5,
    *,
    steps: int,
    lr: float,
    clip: float = 5.0,
    batch_size: int = 1,
    layers: int = 1,
) -> float:
    """The beta that the authors derive from an epsilon: sqrt(2 ln(1.25 / delta)) steps lr clip / (batch_size epsilon).

    The released code does not divide by the number of convolutions, the paper does (`layers`). This epsilon only names
    a noise scale: most coordinates are released exactly, and batch gradients have no such sensitivity.
    """
    if not (epsilon > 0 and 0 < delta < 1):
        raise ValueError(f"epsilon must be above 0 and delta between 0 and 1; given {epsilon} and {delta}.")
    return math.sqrt(2 * math.log(1.25 / delta)) * steps * lr * clip / (batch_size * epsilon) / layers


@named("tip", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class TIP(Defence):
    """After local training, add noise to the kernels of each convolution's most important channels, not to their means.

    For every input channel i of the floor(proportion * channels), at least one, most important output channels o:
    F(w[o, i]) + beta * M * F(n), n ~ N(0, 1) in every entry, F the shifted Fourier transform and M = `mask`. With
    center="int", radius <= 1 and kernels larger than 1 x 1 that is w[o, i] + beta * (n - mean n): the paper's high
    frequencies are all but the mean, and kernels of 1 x 1 do not change. All else is released exactly.

    Importance: the mean Grad-CAM weight at the trained weights over one random example of each class that the client
    has (`absolute`: of its magnitude; `repo_single_guidance`: one example in all, an error of the released code).

    The attacker knows how many channels of a layer are noised, and guesses that these have the most energy in the part
    of the observed update that the noise can reach: right while the noise is the larger part of it (a likelihood ratio
    that uses beta was no better). A1 drops them. A2 keeps the part of them that the noise cannot reach: the mean of
    every kernel slice for center="int", nothing for "real". Gradients are those at the weights that were sent, never at
    the noised ones. An attacker with a candidate guesses again (`reconsidered`): the noise is in the part of the update
    that the candidate does not explain, also where it is the smaller part.

    Differs: the paper's listing takes the real part of the spectrum, its text and code the inverse transform, as here;
    it does not say how importance is averaged over examples; `scale_of` gives beta from its privacy parameters.
    """

    beta: float = 0.1
    proportion: float = 0.1
    radius: float = 0.5
    center: Literal["int", "real"] = "int"
    absolute: bool = False
    repo_single_guidance: bool = False

    def __post_init__(self) -> None:
        if not self.beta >= 0:
            raise ValueError(f"beta is a standard deviation, 0 or more; given {self.beta}.")
        if not 0 < self.proportion <= 1:
            raise ValueError(f"proportion is a share of the channels, above 0 and at most 1; given {self.proportion}.")
        one_of("center", self.center, "int", "real")

    def count(self, channels: int) -> int:
        """How many channels of a layer get noise."""
        return max(1, math.floor(self.proportion * channels + 1e-9))

    def upload(self, upload: Upload, client: Client) -> Upload:
        if not self.beta:
            return upload
        source = own_draws(client, self.name)
        chosen = gradcam.guidance(client.batch, source, single=self.repo_single_guidance)
        important = gradcam.channel_importance(
            client.task, client.end, client.batch, chosen, upload.buffers, absolute=self.absolute
        )
        update = dict(upload.payload["update"])
        for stream, (layer, importance) in enumerate(important.items(), start=1):  # stream 0 chose the guidance
            name = f"{layer}.weight"
            kernels = update[name]
            noise = source.normal(tuple(kernels.shape), stream=stream, dtype=kernels.dtype)
            noise = spectral(self.beta * noise, self.radius, self.center)
            # The weights are the start minus the update.
            noised = gradcam.largest(importance, self.count(len(importance)))
            update[name] = kernels - gradcam.along_channels(noised, kernels) * noise
        return replace(upload, payload={**upload.payload, "update": update})

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return _Exact(self, self._noised(scene)) if self.beta else self

    def noise_variance(self, scene: TargetView) -> Params:
        noised = self._noised(scene) if self.beta else {}
        return tree.zeros_like(scene.update) | tree.map(lambda n: torch.where(n > 0, torch.inf, 0.0).to(n), noised)

    def reconsidered(self, scene: TargetView, predicted: Params) -> Defence:
        if not self.beta:
            return self
        unexplained = replace(scene, update=tree.subtract(scene.update, predicted))
        settings = {item.name: getattr(self, item.name) for item in fields(TIP)}
        return _Reconsidered(**settings, noised=TIP._noised(self, unexplained))

    def ratios(self, task: Task) -> dict[str, float]:
        """beta over the standard deviation of the weights, for each convolution: is the noise small?"""
        weights = task.weights()
        return {name: self.beta / float(weights[f"{name}.weight"].std()) for name in gradcam.convolutions(task)}

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return heuristic(self.beta, exposure)  # most coordinates do not even have that

    def _filtered(self, kernels: Tensor) -> Tensor:
        return filtered(kernels, self.radius, self.center)

    def _noised(self, scene: TargetView) -> Params:
        """1 at the kernels whose observed update shows noise, else 0; of every convolution."""

        def mask(update: Tensor) -> Tensor:
            energy = self._filtered(update).square().sum((1, 2, 3))
            # Kernels that no noise can enter, such as 1 x 1 around their mean, have none of that energy.
            noised = gradcam.largest(energy, self.count(len(energy))) * (energy > 0)
            return gradcam.along_channels(noised, update).expand(update.shape)

        names = (f"{layer}.weight" for layer in gradcam.convolutions(scene.task))
        return {name: mask(scene.update[name]) for name in names}


@dataclass(frozen=True, eq=False)
class _Reconsidered(TIP):
    """TIP with a given guess of the noised channels."""

    noised: Params = field(default_factory=dict)

    def _noised(self, scene: TargetView) -> Params:
        return {name: mask.to(scene.update[name]) for name, mask in self.noised.items()}


@dataclass(frozen=True, eq=False)
class _Exact(Defence):
    """What A2 compares: everything except the part of noised channels that the noise can reach."""

    rule: TIP
    noised: Params

    def visible(self, update: Params, scene: TargetView) -> Params:
        return {
            name: u - self.noised[name] * self.rule._filtered(u) if name in self.noised else u
            for name, u in update.items()
        }
