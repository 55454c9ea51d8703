"""How much do a client's releases say about its data? Bounds in nats, and a published index that is no bound.

    channel.py   I(X; G + Z) <= 1/2 log det(I + Sigma_G / sigma^2), Z ~ N(0, sigma^2 I) independent of everything
    here         1/2 log det(I + s_x^2 J^T J / sigma^2), J = derivative of the release by the pixels, at one point
    index.py     the quantities that the flat-minima paper prints as bounds on I(X; G) (its Theorems 3.1 and 3.2)
    ball.py      the worst loss in a ball, which the second of these uses

The first holds for every distribution of releases G with covariance Sigma_G. The second is the same statement for a
Gaussian prior of pixels and a release that is linear near the point. Both need noise: without it, the releases of a
deterministic client have infinite information about continuous data. sigma is real noise (differential privacy,
rounding) or what an attacker tolerates, in units of the release.

A release is what leaves the client, its defence included: for SAM the gradient at the perturbed weights. Logarithms are
natural; all is computed in float64. A model with BatchNorm keeps its mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from gradleak.core import tree
from gradleak.core.settings import takes
from gradleak.core.tree import Params
from gradleak.curvature.ball import Sharpness, sharpness
from gradleak.curvature.channel import SHARES, ChannelCurve, Releases, channel_bound, noise_levels, releases
from gradleak.curvature.index import PREMISES, CovarianceTest, CurvatureIndex, against_curvature, curvature_index
from gradleak.identify.floors import Floor, Linearisation, Local
from gradleak.identify.rounding import rounding_of
from gradleak.scenario.defence import Chain, Defence
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.task import Batch, Task

if TYPE_CHECKING:
    from gradleak.parts.view import TargetView

__all__ = ["PREMISES", "SHARES", "ChannelCurve", "CovarianceTest", "CurvatureIndex", "InputInformation", "Releases"]
__all__ += ["Sharpness", "against_curvature", "channel_bound", "curvature_index", "input_information", "releases"]
__all__ += ["sharpness"]


@dataclass(frozen=True)
class InputInformation:
    """What one release says about its own input, to first order, under isotropic noise and a Gaussian prior of pixels.

    share, sigma   of the noise: in root mean squares of the update, and in its units
    floor          information in nats, effective rank, and the Bayesian Cramer-Rao bound of the mean squared error
    """

    share: float
    sigma: float
    floor: Floor

    def record(self) -> dict[str, float]:
        names = ("information", "effective_rank", "mse", "psnr")
        return {"share": self.share, "sigma": self.sigma, **{name: getattr(self.floor, name) for name in names}}


@takes(Linearisation)
def input_information(
    task: Task,
    seen: Observation,
    batch: Batch,
    knows: Knowledge = Knowledge(),
    *,
    shares: Sequence[float] = SHARES,
    how: Linearisation,
) -> tuple[InputInformation, ...]:
    """Fisher information of the pixels in the release at `batch`, one Jacobian for all noise levels.

    As `noise_floor`, but with noise of one sigma in every entry, as in the channel bound, so that the two compare.
    `knows` holds the client's recipe and defence; what noise the defence adds is added. Noise below the digits of the
    observation is not assumed (`Rounding.rank`). The other keywords are the fields of `Linearisation`.
    """
    local = Local.at(task, seen, batch, knows, how)
    if not local.finite:
        raise ValueError("The batch, or the update the client would send for it, is not finite: there is no bound.")
    level = float(tree.norm(local.scene.update)) / math.sqrt(tree.size(local.scene.update))
    if not level > 0:
        raise ValueError("The update is zero everywhere, so a noise level cannot be a share of it.")
    sigmas = (level * noise_levels(shares, local.residual)).tolist()
    rounding, results = rounding_of(seen), []
    for share, sigma in zip(shares, sigmas, strict=True):
        noisy = Chain(*filter(None, [knows.defence]), _Tolerance(sigma))
        at = replace(local, scene=replace(local.scene, knows=replace(knows, defence=noisy)))
        results.append(InputInformation(share, sigma, replace(at.floor(0.0, None, how.prior, rounding), noise=share)))
    return tuple(results)


@dataclass(frozen=True)
class _Tolerance(Defence):
    """Noise that changes no weights: it only says how precisely the release is known."""

    sigma: float = 0.0

    def noise_variance(self, scene: TargetView) -> Params:
        return tree.map(lambda value: torch.full_like(value, self.sigma**2), scene.update)

    def visible(self, update: Params, scene: TargetView) -> Params:
        return update
