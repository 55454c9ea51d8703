"""FedSAM: every local step uses the gradient at the worst point of a small ball around the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.settings import at_least
from gradleak.scenario.defence import Client, Compute, Defence
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Batch, Task

PAPER = (
    "Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022; "
    "Caldarola, Caputo, Ciccone, Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022"
)
SAFE = 1e-12  # added to a norm: the derivative at a vanishing gradient stays finite


def ascent(gradient: Params, rho: float, scale: Params | None = None) -> Params:
    """rho T^2 g / ||T g||, the steepest ascent within ||T^-1 eps|| <= rho. T is diagonal; 1 unless given.

    The norm runs over all parameters together. Differentiable in g, with a finite derivative at g = 0.
    """
    if scale is None:
        return tree.scale(gradient, rho / (tree.norm(gradient) + SAFE))
    scaled = tree.multiply(scale, gradient)
    return tree.scale(tree.multiply(scale, scaled), rho / (tree.norm(scaled) + SAFE))


@named("fedsam", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class FedSAM(Defence):
    """Descend by the gradient at w + rho g / ||g||, g the gradient at w on the same batch, norm over all parameters.

    The aim of flat minima is accuracy; that they also hide the data is a later claim. After one step the server sees
    grad L(w + rho g / ||g||), not grad L(w): an attack that matches gradients at w looks in the wrong place (A0), one
    that knows rho does not. The map from images to update is deterministic, so A2 replays it and differentiates through
    g as well, at two to three times the cost of a step. `radius` is the length of the perturbation.

    Weight decay enters the descent step alone; BatchNorm's running statistics are those of the first pass. Differs:
    1e-12 is added to the norm, where released code has 1e-16 or 1e-12. rho = 0 is plain training, at twice the cost.

    Reference for the step: Foret et al., Sharpness-Aware Minimization, ICLR 2021.
    """

    rho: float = 0.2

    def __post_init__(self) -> None:
        at_least("rho", self.rho, 0.0)
        if not math.isfinite(self.rho):
            raise ValueError(f"rho must be finite; given {self.rho}.")

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        perturbed = tree.add(weights, self.perturbation(weights, compute(weights, batch)))
        return compute(self.point(weights, perturbed, client), batch, statistics=False)

    def perturbation(self, weights: Params, gradient: Params) -> Params:
        """epsilon: from the weights to the perturbed weights."""
        return ascent(gradient, self.rho)

    def point(self, weights: Params, perturbed: Params, client: Client) -> Params:
        """The point of the step's gradient, given the weights and the weights plus epsilon."""
        return perturbed

    def radius(self, task: Task, batch: Batch, weights: Params | None = None, buffers: Params | None = None) -> Tensor:
        """||epsilon|| of a step on this batch, over all parameters; rho for FedSAM, but not for its variants."""
        weights = task.weights() if weights is None else weights
        return tree.norm(self.perturbation(weights, task.gradient(weights, batch, buffers)))

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(reason="a gradient at other weights, which the server can compute, is released exactly")
