"""Tasks by name, made to fit the images that are given: what `gradleak train ddpm --data celeba64` trains."""

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
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.rules import SGD, Adam, Rule
from gradleak.scenario.task import Task

RULES: dict[str, Rule] = {"sgd": SGD(), "adam": Adam()}


@dataclass(frozen=True)
class Usual:
    """What a training of a task is, where nothing else is said."""

    lr: float = 0.1
    optimiser: str = "sgd"
    averaging: str = ""

    def recipe(
        self, lr: float | None, optimiser: str, steps: int | None, epochs: int | None, batch_size: int | None
    ) -> LocalTraining:
        """The clients', with what was said put in."""
        rule = optimiser or self.optimiser
        if rule not in RULES:
            raise registry.UnknownName(f"Unknown optimiser {rule!r}.{registry.did_you_mean(rule, RULES)}")
        return LocalTraining(self.lr if lr is None else lr, steps, epochs, batch_size, RULES[rule])


@named("ddpm", kind="task", paper="Ho, Jain, Abbeel, Denoising Diffusion Probabilistic Models, NeurIPS 2020", status="")
@dataclass(frozen=True)
class DDPM:
    """A U-Net that learns to tell the noise from noised images; x in [-1, 1].

    target      "eps": the noise; "v"
    schedule    linear, cosine or sigmoid, of so many `steps`; linear betas grow as steps become fewer
    the rest    of the network: `gradleak.models.unet`
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
    # Of the spec's recipe: the mean over rounds of some ten local steps each, as 0.999 is over steps.
    usual: ClassVar[Usual] = Usual(lr=2e-4, optimiser="adam", averaging="ema:decay=0.99")

    def of(self, images: Images) -> Task:
        """For images of this size, untrained; the same weights every time."""
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
    """Does this name a task, with or without settings?"""
    return text.partition(":")[0].strip() in {entry.name for entry in registry.entries("task")}


def usual(text: str) -> Usual:
    """Of a task that this names; of anything else, such as a model, plain SGD."""
    if not is_task(text):
        return Usual()
    found: Usual = registry.entry("task", text.partition(":")[0].strip()).make.usual  # type: ignore[attr-defined]
    return found
