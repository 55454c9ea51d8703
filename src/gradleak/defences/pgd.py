"""PGD adversarial training: each local step uses images moved inside a small box to raise the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Compute, Defence
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Batch, Task, TaskError

PAPER = (
    "Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, ICLR 2018; as in Lewis et al. 2024"
)


@named("pgd", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class PGD(Defence):
    """Train on images that were moved, by at most epsilon, to raise the loss.

    X_s = clip(X_{s-1} + step * sign(grad_X L), X - epsilon, X + epsilon), s = 1..steps, clipped to the valid range too.

    epsilon and step are in units of the pixels' range, [0, 1]; step is 2 epsilon / 3 unless given. No random start.
    It is here because training recipes contain it. It does not hide images: the gradient of X_steps is visible.

    A2 unrolls the three steps and reconstructs X (the sign has no slope, so a change of X passes straight through).
    The alternative is A0, which ignores them and reconstructs X_steps, within epsilon of X: at 4/255, 36.1 dB or more.

    Differs: passes that look for the worst image do not update BatchNorm's running statistics.
    """

    epsilon: float = 4 / 255
    step: float | None = None
    steps: int = 3

    def __post_init__(self) -> None:
        if not (self.epsilon >= 0 and (self.step is None or self.step >= 0) and self.steps >= 0):
            raise ValueError(
                f"epsilon, step and steps must be 0 or more; given {self.epsilon}, {self.step} and {self.steps}."
            )

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return compute(weights, self.worst(client.task, weights, batch))

    def worst(
        self,
        task: Task,
        weights: Params,
        batch: Batch,
        limits: tuple[Tensor, Tensor] | None = None,
        buffers: Params | None = None,
    ) -> Batch:
        """The batch with adversarial images. `limits`: the box of valid images in model-input space."""
        if "x" not in batch:
            raise TaskError(f"PGD moves the images, a field 'x'; the batch has {', '.join(sorted(batch))}.")
        x = batch["x"]
        low, high = task.fields["x"].limits(x) if limits is None else limits
        unit = high - low
        step = 2 * self.epsilon / 3 if self.step is None else self.step
        # Under vmap every lane needs its own copy: BatchNorm in training mode writes into them.
        buffers = task.buffers() if buffers is None else buffers
        copies = tree.map(lambda b: b + torch.zeros_like(x.sum()).to(b), buffers)
        rise = grad(lambda at: task.loss(weights, {**batch, "x": at}, copies)[0])
        least, most = torch.maximum(low, x - self.epsilon * unit), torch.minimum(high, x + self.epsilon * unit)
        moved = x
        for _ in range(self.steps):
            moved = torch.minimum(torch.maximum(moved + step * unit * rise(moved).sign(), least), most)
        return {**batch, "x": moved}

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return _Unrolled(self, scene.limits["x"], scene.buffers) if "x" in scene.limits else self

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(reason="adversarial training is no defence of the data")


@dataclass(frozen=True, eq=False)
class _Unrolled(Defence):
    """PGD with the buffers that were sent and with fixed limits: a captured step makes no new constants."""

    rule: PGD
    limits: tuple[Tensor, Tensor]
    buffers: Params | None

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return compute(weights, self.rule.worst(client.task, weights, batch, self.limits, self.buffers))
