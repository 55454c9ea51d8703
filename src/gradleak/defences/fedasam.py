"""FedASAM: FedSAM in a ball that is stretched by the size of each weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.fedsam import FedSAM, ascent
from gradleak.defences.settings import at_least, one_of

PAPER = (
    "Caldarola, Caputo, Ciccone, Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022; "
    "the step: Kwon et al., ASAM: Adaptive Sharpness-Aware Minimization, ICML 2021"
)


@named("fedasam", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class FedASAM(FedSAM):
    """Descend by the gradient at w + rho T^2 g / ||T g||, T = |w| + eta for weights and 1 for biases.

    scaled   "weights": T as above, for parameters whose name contains "weight" (normalisation layers' too), as in the
             released code; "all": T = |w| + eta for every parameter, as in a widely used package with eta = 0; "none":
             T = 1, FedSAM
    eta      for CIFAR-10 the released code sets rho = 0.7 and eta = 0.2; 0.01 is that code's default

    ||epsilon|| is not rho: it depends on the weights, and `radius` gives it. The server knows T, so A2 replays the step
    as for FedSAM. The authors also average the server's weights late in training: see `federation.SWA`.
    """

    rho: float = 0.3
    eta: float = 0.2
    scaled: Literal["weights", "all", "none"] = "weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("eta", self.eta, 0.0)
        one_of("scaled", self.scaled, "weights", "all", "none")

    def perturbation(self, weights: Params, gradient: Params) -> Params:
        part = {"weights": "weight", "all": ""}.get(self.scaled)  # in the names of the parameters to scale
        scale = {
            name: value.abs() + self.eta if part is not None and part in name else torch.ones_like(value)
            for name, value in weights.items()
        }
        return ascent(gradient, self.rho, scale)
