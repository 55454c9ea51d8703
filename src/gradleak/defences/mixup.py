"""MixUp: the client trains on random mixtures of pairs of its images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.noise import own_draws
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Compute, Defence
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Batch, Task

PAPER = "Zhang, Cisse, Dauphin, Lopez-Paz, mixup: Beyond Empirical Risk Minimization, ICLR 2018"
PROPOSALS = 32  # a gamma variate of shape >= 1 accepts 95 % of them: all are refused once in 1e41 draws


@named("mixup", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class MixUp(Defence):
    """Train on lambda x_i + (1 - lambda) x_j and the same mixture of one-hot labels, j a random permutation of i.

    lambda ~ Beta(alpha, alpha), one for the batch of a step. The loss must take label distributions, as cross-entropy
    does. A client with one example trains on that example.

    Pairs and lambda are the client's secret, so A2 predicts plainly: it reconstructs the MIXED images, two photographs
    in one, and must find mixed labels too. No attack here separates them (Carlini et al., Is Private Learning Possible
    with Instance Encoding?, 2021): scores against the original images understate the leak.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0; given {self.alpha}.")

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return compute(weights, self.mixed(batch, client.task, own_draws(client, self.name)))

    def mixed(self, batch: Batch, task: Task, draws: Draws) -> Batch:
        """The batch that the step trains on."""
        share = beta(self.alpha, draws)
        examples = tree.length(batch)
        partner = draws.uniform((examples,), stream=0).argsort()
        mixed: Batch = {}
        for name, value in batch.items():
            classes = task.fields[name].classes
            if classes is not None and not value.is_floating_point():
                value = (value[..., None] == torch.arange(classes, device=value.device)).to(_float(batch))
            mixed[name] = share.to(value) * value + (1 - share).to(value) * value.index_select(0, partner)
        return mixed

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return Defence()

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(reason="images are mixed, and the gradient of the mixture is released exactly")


def beta(alpha: float, draws: Draws) -> Tensor:
    """A number ~ Beta(alpha, alpha) as G / (G + G'), by logarithms since gamma variates of small shape underflow."""
    return torch.sigmoid(_log_gamma_variate(alpha, draws, 1) - _log_gamma_variate(alpha, draws, 4))


def _log_gamma_variate(shape: float, draws: Draws, stream: int) -> Tensor:
    """log G, G ~ Gamma(shape): Marsaglia and Tsang 2000, the first of many proposals that is accepted, without a loop.

    For shape a the proposals are of shape a + 1, times U^(1 / a).
    """
    d = shape + 1 - 1 / 3
    normal = draws.normal((PROPOSALS,), stream=stream, dtype=torch.float64)
    lot = draws.uniform((PROPOSALS,), stream=stream + 1, dtype=torch.float64)
    cube = (1 + normal / math.sqrt(9 * d)).clamp_min(1e-300) ** 3
    accepted = lot.log() < normal.square() / 2 + d * (1 - cube + cube.log())
    first = accepted & (accepted.cumsum(0) == 1)
    value = torch.where(first, cube, 0.0).sum().log() + math.log(d)
    return value + draws.uniform((), stream=stream + 2, dtype=torch.float64).log() / shape


def _float(batch: Batch) -> torch.dtype:
    """The type of the continuous fields."""
    return next((value.dtype for value in batch.values() if value.is_floating_point()), torch.get_default_dtype())
