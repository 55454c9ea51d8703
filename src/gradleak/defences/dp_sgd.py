"""DP-SGD in the client: every example's gradient is clipped, and every local step is noised."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.defences.clipping import clipped_mean
from gradleak.defences.noise import noised, only_update, own_draws, variance_of_steps
from gradleak.defences.settings import at_least
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Client, Compute, Defence, Noiseless, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee, accounted
from gradleak.scenario.task import Batch, Task

PAPER = "Abadi et al., Deep Learning with Differential Privacy, CCS 2016"


@named("dp-sgd", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class DPSGD(Defence):
    """A local step uses (1/B) (sum_i g_i min(1, C / ||g_i||) + N(0, z^2 C^2)), g_i the gradient of example i.

    The upload is post-processing of these steps; buffers are not sent. Layers that see the whole batch (BatchNorm in
    training mode) are refused. The objective must be a mean over examples.

    Differs: batches are shuffled passes of fixed size, as clients run them, not Poisson samples. So no amplification is
    claimed: an example is counted in every pass of every round, and in a neighbour one example's gradient is zero
    (sensitivity C). Fed-CDP (Wei et al. 2021) is another method: it clips and noises by layer, with sensitivity
    C sqrt(layers).
    """

    clip: float = 1.0
    noise_multiplier: float = 1.0

    def __post_init__(self) -> None:
        at_least("clip", self.clip, 0.0, excluded=True)
        at_least("noise_multiplier", self.noise_multiplier, 0.0)

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        mean = clipped_mean(compute, weights, batch, client.task, self.clip)
        if not self.noise_multiplier:
            return mean
        examples = tree.length(batch)
        return noised(mean, self.noise_multiplier * self.clip / examples, own_draws(client, self.name))

    def upload(self, upload: Upload, client: Client) -> Upload:
        return only_update(upload, self.name)

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return Noiseless(replace(self, noise_multiplier=0.0), self)

    def noise_variance(self, scene: TargetView) -> Params:
        """From noise z C / B_k in step k: see `variance_of_steps`."""
        training = scene.knows.training or LocalTraining(lr=1.0)
        sizes = [_examples(rows, scene.num_examples) for rows in training.order(scene.num_examples)]
        return variance_of_steps(scene, [self.noise_multiplier * self.clip / size for size in sizes])

    def guarantee(self, exposure: Exposure) -> Guarantee:
        passes = exposure.passes
        return accounted(
            exposure,
            noise_multiplier=self.noise_multiplier,
            releases=None if passes is None else passes * exposure.rounds,
            unit="example",
            model="local",
            covers="the server and everybody else",
            neighbours="one example's gradient or zero in its place",
            sampling="shuffled batches of fixed size: not amplified, counted in every pass of every round",
        )


def _examples(rows: Tensor | slice | None, examples: int) -> int:
    if rows is None:
        return examples
    return len(rows) if isinstance(rows, Tensor) else len(range(examples)[rows])
