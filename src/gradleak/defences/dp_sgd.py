"""DP-SGD in the client: every example's gradient is clipped, and every local step is noised."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak import tree
from gradleak.defence import Client, Compute, Defence, Noiseless, Upload
from gradleak.defences.clipping import clipped_mean
from gradleak.defences.noise import at_least, noised, only_update, own_draws
from gradleak.guarantee import Exposure, Guarantee, accounted
from gradleak.local import LocalTraining
from gradleak.registry import named
from gradleak.rules import SGD
from gradleak.scene import Scene
from gradleak.task import Batch, Task
from gradleak.tree import Params

PAPER = "Abadi et al., Deep Learning with Differential Privacy, CCS 2016"


@named("dp-sgd", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class DPSGD(Defence):
    """A local step uses (1/B) (sum_i g_i min(1, C / ||g_i||) + N(0, z^2 C^2)), g_i the gradient of example i.

    What is uploaded afterwards is post-processing; buffers are not sent. Layers that see the whole batch (BatchNorm in
    training mode) are refused. The objective must be a mean over examples.

    Differs: batches are shuffled passes of fixed size, as clients run them, and not Poisson samples. So no
    amplification is claimed: an example is counted in every pass of every round, and neighbours differ by one example's
    gradient being zero (sensitivity C). The layer-wise clip and noise of Fed-CDP (Wei et al. 2021) is another one,
    with sensitivity C sqrt(layers).
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
        examples = next(iter(batch.values())).shape[0]
        return noised(mean, self.noise_multiplier * self.clip / examples, own_draws(client, self.name))

    def upload(self, upload: Upload, client: Client) -> Upload:
        return only_update(upload, self.name)

    def assumed(self, scene: Scene, task: Task) -> Defence:
        return Noiseless(replace(self, noise_multiplier=0.0), self)

    def noise_variance(self, scene: Scene) -> Params:
        """sum_k (c_k z C / B_k)^2, c_k what the rule makes of one unit of gradient at step k by the end of training.

        Exact for one step of SGD. For more it leaves out that later gradients are taken at noised weights. A rule that
        is not linear in the gradient (Adam, Lion) has no c_k: there all of the observed update may be noise, and its
        mean square is the variance. Without a known recipe the update is taken for a gradient, as `Replay` does.
        """
        training = scene.knows.training or LocalTraining(lr=1.0)
        like = next(tree.leaves(scene.update))
        if not isinstance(training.optimiser, SGD):
            variance = tree.squared_norm(scene.update) / tree.size(scene.update)
            return tree.map(lambda u: torch.zeros_like(u) + variance * bool(self.noise_multiplier), scene.update)
        gains = _gains(training, scene.num_examples, like)
        sizes = [_examples(rows, scene.num_examples) for rows in training.order(scene.num_examples)]
        spread = torch.stack([gain / size for gain, size in zip(gains, sizes, strict=True)])
        variance = (self.noise_multiplier * self.clip * spread).square().sum()
        return tree.map(lambda u: torch.zeros_like(u) + variance, scene.update)

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


def _gains(training: LocalTraining, examples: int, like: Tensor) -> list[Tensor]:
    """By the end of training, how far one unit of gradient at each step has moved the weights; for a linear rule."""
    steps = len(training.order(examples))
    zero, one = {"unit": torch.zeros_like(like.sum())}, {"unit": torch.ones_like(like.sum())}
    gains = []
    for impulse in range(steps):
        state, moved = training.optimiser.init(zero), zero
        for step in range(steps):
            lr = training.lr * training.schedule(step, steps)
            decrease, state = training.optimiser.step(zero, one if step == impulse else zero, state, lr)
            moved = tree.add(moved, decrease)
        gains.append(moved["unit"])
    return gains


def _examples(rows: Tensor | slice | None, examples: int) -> int:
    if rows is None:
        return examples
    return len(rows) if isinstance(rows, Tensor) else len(range(examples)[rows])
