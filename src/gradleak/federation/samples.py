"""Images that a denoiser makes from the same latents after some rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.pictures import png, sheet
from gradleak.diffusion import Denoising, ddim
from gradleak.federation.clients import evaluating
from gradleak.federation.partition import FederationError, demand_number
from gradleak.federation.rounds import Snapshot, moved
from gradleak.scenario.task import Task, float32_products

if TYPE_CHECKING:
    from gradleak.federation.checkpoints import Checkpoints


@dataclass(frozen=True)
class Samples:
    """Pictures by DDIM (Song, Meng, Ermon, ICLR 2021; eta 0) from latents that are the same in every round.

    count    of pictures
    steps    of the sampler
    seed     of the latents
    """

    count: int = 8
    steps: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "steps"):
            demand_number(f"{name} of samples", getattr(self, name), int, 1)

    def demand(self, task: Task) -> Denoising:
        """The task's objective; raises unless it is a denoiser's."""
        if not isinstance(task.objective, Denoising):
            raise FederationError(
                f"Samples are of denoisers; the objective is {type(task.objective).__name__}. Leave samples out."
            )
        return task.objective

    def of(self, task: Task, sent: Snapshot) -> Tensor:
        """The images of these weights, (count, C, H, W) in [0, 1]."""
        objective, weights = self.demand(task), sent.weights
        like = tree.like(weights)
        shape = (self.count, *task.fields["x"].shape)
        latents = randomness.Draws(randomness.key("samples", self.seed)).normal(shape, dtype=torch.float64)
        with torch.no_grad(), float32_products():
            call = evaluating(task).call(weights, dict(sent.buffers))
            images = ddim(call, latents.to(like), objective.schedule, steps=self.steps, target=objective.target)
        return task.fields["x"].unit(images).clamp(0, 1).cpu()

    def sheet(self, task: Task, rows: Mapping[str, Snapshot]) -> bytes:
        """A PNG with a row of images for each of these snapshots."""
        return png(sheet([(name, list(self.of(task, sent))) for name, sent in rows.items()]))

    def over_rounds(self, task: Task, checkpoints: Checkpoints) -> bytes:
        """A row for each checkpoint of a training: of its average if there is one, else of what was sent."""
        like, rows = task.weights(), {}
        for number in checkpoints.rounds:
            snapshot = checkpoints.averaged_at(number) or checkpoints.at(number)
            rows[f"round {number}"] = Snapshot(moved(snapshot.weights, like), moved(snapshot.buffers, like))
        return self.sheet(task, rows)
