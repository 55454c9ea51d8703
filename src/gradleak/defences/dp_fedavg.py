"""DP-FedAvg: federated averaging that hides whether a client took part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.defences.clipping import Clipping, clip
from gradleak.defences.noise import full_variance, noised, only_update, own_draws, server_draws
from gradleak.defences.settings import at_least, one_of
from gradleak.parts.view import TargetView
from gradleak.scenario import accounting
from gradleak.scenario.defence import Client, Defence, Noiseless, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee, accounted, rounded_up
from gradleak.scenario.task import Task

PAPER = "McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018"


@named("dp-fedavg", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class DPFedAvg(Defence):
    """Clients are drawn with probability q and clip to C; the server's step is (sum_k u_k + N(0, z^2 C^2)) / (q N).

    model="central": the server adds the noise, after it has seen every update. model="distributed": each client adds
    N(0, z^2 C^2 / threshold), which sums to the same noise over at least `threshold` clients. It protects from the
    server only where secure aggregation shows it nothing but that sum. Rounds with fewer uploads are dropped.

    The denominator q N is a constant, so that one client changes the step by at most C / (q N): the fixed-denominator
    estimator of the paper with all weights 1. Buffers are not sent. The attacker sees a single client's upload, which
    has no noise in the central model: A2 is that of clipping. Differs: flat clipping only, no server momentum; real
    distributed noise is rounded (discrete Gaussian), here it is not.
    """

    clip: float = 1.0
    noise_multiplier: float = 1.0
    model: Literal["central", "distributed"] = "central"
    threshold: int = 1

    def __post_init__(self) -> None:
        at_least("clip", self.clip, 0.0, excluded=True)
        at_least("noise_multiplier", self.noise_multiplier, 0.0)
        at_least("threshold", self.threshold, 1)
        one_of("model", self.model, "central", "distributed")
        if self.model == "central" and self.threshold != 1:
            raise ValueError("threshold is the number of clients that add noise together: model='distributed' only.")

    @property
    def std(self) -> float:
        """The standard deviation of the noise that a client adds to its upload."""
        total = self.noise_multiplier * self.clip
        return 0.0 if self.model == "central" else total / math.sqrt(self.threshold)

    def upload(self, upload: Upload, client: Client) -> Upload:
        upload = only_update(upload, self.name).map(lambda update: clip(update, self.clip))
        if self.std == 0:
            return upload
        draws = own_draws(client, self.name)
        return upload.map(lambda update: noised(update, self.std, draws))

    def aggregate(self, uploads: Sequence[Upload], sizes: Sequence[int], server: Tree) -> Params:
        if missing := [name for name in ("clients", "participation") if name not in server]:
            raise ValueError(
                f"{self.name} divides by the expected number of clients: aggregate(..., server) needs "
                f"{' and '.join(f'server[{name!r}]' for name in missing)}."
            )
        if self.model == "distributed" and len(uploads) < self.threshold:
            return tree.zeros_like(uploads[0].payload["update"])  # too little noise in the sum: the round is dropped
        total = tree.scale(self.reveal(uploads, [1] * len(uploads)), float(len(uploads)))
        return self._step(total, server)

    def idle(self, server: Tree) -> Params | None:
        """An empty round shows the same noise: whether anybody took part is part of the secret."""
        return self._step(tree.zeros_like(server["weights"]), server) if self.model == "central" else None

    def _step(self, total: Params, server: Tree) -> Params:
        if self.model == "central" and self.noise_multiplier:
            total = noised(total, self.noise_multiplier * self.clip, server_draws(server, self.name))
        return tree.scale(total, 1 / (server["participation"] * server["clients"]))

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        if self.std == 0:
            return Clipping(self.clip).assumed(scene, task)
        return Noiseless(replace(self, noise_multiplier=0.0), self)

    def replayed(self, scene: TargetView, task: Task) -> Defence:
        return Clipping(self.clip) if self.std == 0 else self.assumed(scene, task)

    def noise_variance(self, scene: TargetView) -> Params:
        return full_variance(scene, self.std**2)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        if self.model == "distributed":
            return self._distributed(exposure)
        sampled = exposure.sampling == "poisson"
        return accounted(
            exposure,
            noise_multiplier=self.noise_multiplier,
            releases=exposure.rounds,
            unit="client",
            model="central",
            covers="other clients and whoever sees the model",
            neighbours="one client more or less" if sampled else "one client's update or zero in its place",
            amplified=True,
        )

    def _distributed(self, exposure: Exposure) -> Guarantee:
        cohort = exposure.participation * exposure.clients
        short = f"{cohort:g} clients in a round, fewer than the {self.threshold} whose noise makes up the total"
        caveats: tuple[str, ...] = ("rounds with fewer honest clients than the threshold must be dropped",)
        if self.std:
            alone = accounting.gaussian_epsilon(exposure.delta, self.std / (2 * self.clip), exposure.rounds)
            caveats = (
                f"without secure aggregation each upload alone has epsilon {rounded_up(alone, 3):.3g} (local model)",
                *caveats,
            )
        return accounted(
            exposure,
            noise_multiplier=self.noise_multiplier,
            releases=exposure.rounds,
            unit="client",
            model="distributed",
            covers=f"a server that sees only sums over at least {self.threshold} clients, by secure aggregation",
            neighbours="one client's update or zero in its place",
            sampling="the server knows who takes part: not amplified, counted as if in every round",
            caveats=caveats,
            lacks=[short] if cohort < self.threshold else [],
        )
