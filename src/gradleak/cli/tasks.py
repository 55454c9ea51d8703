"""Tasks by name, built to fit the images that are given: what `gradleak train ddpm --data celeba64` trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradleak import models
from gradleak.core import registry
from gradleak.core.registry import named
from gradleak.data import Images
from gradleak.diffusion import Schedule, denoising
from gradleak.scenario.task import Task


@dataclass(frozen=True)
class TrainingDefaults:
    """How a task is trained unless the options say otherwise."""

    lr: float = 0.1
    optimiser: str = "sgd"
    averaging: str = ""


@named("ddpm", kind="task", paper="Ho, Jain, Abbeel, Denoising Diffusion Probabilistic Models, NeurIPS 2020", status="")
@dataclass(frozen=True)
class DDPM:
    """A U-Net that predicts the noise of noised images; x in [-1, 1].

    target      "eps": the noise; "v"
    schedule    linear, cosine or sigmoid, of so many `steps`; linear betas grow as steps become fewer
    others      settings of the network: `gradleak.models.unet`
    """

    base: int = 64
    multipliers: Sequence[int] = (1, 2, 4)
    blocks: int = 2
    groups: int = 8
    heads: int = 4
    steps: int = 1000
    schedule: str = "linear"
    target: str = "eps"
    name: ClassVar[str] = "ddpm"
    # The average runs over rounds of about ten local steps each: 0.99 per round is 0.999 per step.
    defaults: ClassVar[TrainingDefaults] = TrainingDefaults(lr=2e-4, optimiser="adam", averaging="ema:decay=0.99")

    def of(self, images: Images) -> Task:
        """The untrained task for images of this size; always the same weights."""
        colours, height, width = images.x.shape[1:]
        network = models.unet(
            shape=(colours, height, width),
            base=self.base,
            multipliers=tuple(self.multipliers),
            blocks=self.blocks,
            groups=self.groups,
            heads=self.heads,
            steps=self.steps,
            generator=torch.Generator().manual_seed(0),
        )
        scale = 1000 / self.steps
        schedule = Schedule(self.steps, self.schedule, 1e-4 * scale, 0.02 * scale)
        return denoising(network, like=images.x[:1], schedule=schedule, target=self.target)


def is_task(text: str) -> bool:
    """Does this name a registered task, with or without settings?"""
    return _name(text) in {entry.name for entry in registry.entries("task")}


def training_defaults(text: str) -> TrainingDefaults:
    """The defaults of the task that the text names; plain SGD for anything else, such as a model."""
    if not is_task(text):
        return TrainingDefaults()
    defaults: TrainingDefaults = registry.entry("task", _name(text)).make.defaults  # type: ignore[attr-defined]
    return defaults


def _name(text: str) -> str:
    return text.partition(":")[0].strip()
