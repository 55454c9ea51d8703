"""How close generated images are to real ones: the Frechet distance between two clouds of features.

    d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1^1/2 C2 C1^1/2)^1/2)

is the distance between normal distributions with their means and covariances (Frechet 1957; Dowson, Landau 1982; as a
score of generators: Heusel et al., NeurIPS 2017). FID uses a particular Inception network, which is not available here.
Values compare only if features and number of images are the same, so they carry the name of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradleak.scenario.task import float32_products

CHUNK = 256
RANDOM_SEED = 0


@dataclass(frozen=True, eq=False)
class Features:
    """A fixed map from images, (N, C, H, W) in [0, 1], to features, with the name of its score."""

    name: str
    network: Callable[[Tensor], Tensor]

    @property
    def score(self) -> str:
        return f"Frechet distance, {self.name}"

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """(N, features), float64, on the CPU."""
        return torch.cat([self.network(piece).double().cpu() for piece in images.split(CHUNK)])


def found_features(device: torch.device) -> Features:
    """VGG16's if the weights of LPIPS are on this machine, else those of a random network."""
    from gradleak.metrics.perceptual import WeightsMissing

    try:
        return vgg_features(device)
    except WeightsMissing:
        return random_features(device)


def vgg_features(device: torch.device) -> Features:
    """Means over the image of the last layer of VGG16's trunk (512), with the weights and inputs of LPIPS."""
    from gradleak.metrics.perceptual import TRUNKS, find_weights

    (state, _), _ = find_weights("vgg")
    trunk = TRUNKS["vgg"]
    layers = trunk.build()
    layers.load_state_dict(state)
    layers.to(device).eval().requires_grad_(False)
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).reshape(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225], device=device).reshape(3, 1, 1)

    def network(images: Tensor) -> Tensor:
        x = images.to(mean).clamp(0, 1).expand(-1, 3, -1, -1)
        if min(x.shape[-2:]) < trunk.fits:
            x = functional.interpolate(x, (trunk.size, trunk.size), mode="bilinear", align_corners=False)
        return layers((x - mean) / deviation).mean((2, 3))

    return Features("VGG16 features", network)


def random_features(device: torch.device) -> Features:
    """Means and deviations over the image of an untrained convolutional network (2 x 128)."""
    draw = torch.Generator().manual_seed(RANDOM_SEED)
    widths, layers = (3, 32, 64, 128), []
    for a, b in zip(widths, widths[1:]):
        layer = nn.Conv2d(a, b, 3, stride=1 if a == 3 else 2, padding=1, bias=False)
        layer.weight = nn.Parameter(torch.randn(layer.weight.shape, generator=draw) * (2 / (9 * a)) ** 0.5)
        layers += [layer, nn.ReLU()]
    untrained = nn.Sequential(*layers).to(device).eval().requires_grad_(False)

    def network(images: Tensor) -> Tensor:
        x = untrained(2 * images.to(device, torch.float32).clamp(0, 1).expand(-1, 3, -1, -1) - 1)
        return torch.cat([x.mean((2, 3)), x.std((2, 3), correction=0)], 1)

    return Features(f"random convolutional features (seed {RANDOM_SEED})", network)


@dataclass(frozen=True, eq=False)
class Cloud:
    """Mean and covariance of the features of `count` images."""

    mean: Tensor
    covariance: Tensor
    count: int

    @staticmethod
    def of(features: Tensor) -> Cloud:
        if len(features) < 2:
            raise ValueError(f"A covariance needs at least two images; given {len(features)}.")
        features = features.double()
        return Cloud(features.mean(0), torch.atleast_2d(torch.cov(features.T)), len(features))


def frechet(first: Cloud, second: Cloud) -> float:
    """The squared distance, in float64."""
    root = _root(first.covariance)
    cross = torch.linalg.eigvalsh(root @ second.covariance @ root).clamp(min=0).sqrt().sum()
    shift = (first.mean - second.mean).square().sum()
    return float(shift + first.covariance.trace() + second.covariance.trace() - 2 * cross)


def _root(covariance: Tensor) -> Tensor:
    """The symmetric square root; eigenvalues below zero are rounding errors."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores against the training images, whose features are computed once."""

    features: Features
    real: Cloud
    count: int
    floor: float

    @staticmethod
    def of(features: Features, x: Tensor, count: int) -> Scored:
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:10_000]
        with float32_products():
            real = features(x[rows.to(x.device)])
        halves = real.chunk(2)
        floor = frechet(Cloud.of(halves[0]), Cloud.of(halves[1])) if len(real) >= 4 else math.nan
        return Scored(features, Cloud.of(real), count, floor)

    @property
    def description(self) -> dict[str, Any]:
        """Features, numbers of images, and the score between two halves of the real images."""
        plain = {"name": self.features.score, "made": self.count, "real": self.real.count}
        return plain | ({"between_halves_of_real": round(self.floor, 4)} if math.isfinite(self.floor) else {})

    def __call__(self, made: Tensor) -> float:
        """The score of `count` generated images."""
        with float32_products():
            return round(frechet(self.real, Cloud.of(self.features(made))), 6)
