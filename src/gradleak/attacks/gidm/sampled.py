"""Images that a trained diffusion model can produce: the unknown is the noise that its sampler starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.diffusion import ddim
from gradleak.parts.frozen import State, aside, frozen, graph_entries, state_of
from gradleak.parts.protocols import Needs, Space
from gradleak.parts.spaces import Pixels, Uniform
from gradleak.parts.steps import denoising
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.task import Batch


@dataclass(frozen=True)
class Sampled(Space):
    """x = D(z): DDIM from z ~ N(0, I) through the denoiser in `Knowledge.generator`, under the client's own schedule.

    steps       of the sampler
    recompute   hold each step's input instead of its graph: the memory of one step, for 4 evaluations each instead of 3
    start       where the chain begins, as a share of the schedule. Below 1 the sampler is shorter than the model's and
                z stands for an image noised to that step; with steps=1 x is the one-step estimate. This prior is
                cheaper and weaker
    last        differentiate the network only in this many last steps (`ddim`); None: in all
    """

    steps: int = 16
    recompute: bool = True
    start: float = 1.0
    last: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.start <= 1:
            raise ValueError(f"start must be a share of the schedule, above 0 and up to 1; given {self.start}.")
        if self.steps < 1:
            raise ValueError(f"A sampler needs at least one step; given {self.steps}.")

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({"x"})

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        _prior(scene)
        if before is not None and "z" in before:
            return {"z": before["z"]}
        like = scene.like
        shape = (scene.num_examples, *scene.task.fields["x"].shape)
        return {"z": draws.child(len(scene.task.fields)).normal(shape, dtype=like.dtype)}

    def decoding(self, scene: TargetView) -> int:
        """Numbers that the backward pass holds: the graph of every step, or of one step and all points between."""
        shape = scene.task.fields["x"].shape
        one, image = _graph(_prior(scene), tuple(shape)), math.prod(shape)
        steps = self.steps if self.last is None else min(self.last, self.steps)
        return scene.num_examples * (one + steps * image if self.recompute else steps * one)

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        objective = denoising(scene.task)
        image = ddim(
            _prior(scene),
            v["z"],
            objective.schedule,
            self.steps,
            objective.target,
            recompute=self.recompute,
            start=self.start,
            last=self.last,
        )
        return {"x": image}


@dataclass(frozen=True)
class Refined(Pixels):
    """Pixels that begin at the image of the last stage's sampler; at `start` where there was none."""

    start: Any = Uniform()
    boxed: bool = True
    sampler: Sampled = Sampled()

    @property
    def needs(self) -> Needs:
        return self.sampler.needs

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if before is None or "z" not in before:
            return super().variables(scene, draws, before)
        low, high = scene.limits[self.field]
        image = self.sampler.decode(before, scene, Step(torch.zeros(()), 1))["x"].detach()
        return {self.field: image.clamp(low, high) if self.boxed else image}


def _prior(scene: TargetView) -> nn.Module:
    """The trained denoiser, frozen, on the device and in the type of the search."""
    generator = scene.knows.generator
    denoising(scene.task)
    if not isinstance(generator, nn.Module):
        raise MissingKnowledge(
            "A search among the images of a diffusion model needs Knowledge(generator=denoiser), a trained network "
            f"called as denoiser(x, t); given {type(generator).__name__}."
        )
    return frozen(generator, scene.like)


def _graph(denoiser: nn.Module, shape: tuple[int, ...]) -> int:
    return _graph_of(denoiser, state_of(denoiser), shape)


@lru_cache(maxsize=8)
def _graph_of(denoiser: nn.Module, state: State, shape: tuple[int, ...]) -> int:
    """Numbers that autograd holds for one evaluation of one image."""

    def entries() -> int:
        like = next(denoiser.parameters())
        image = torch.zeros(1, *shape, device=like.device, dtype=like.dtype, requires_grad=True)
        return graph_entries(lambda: denoiser(image, torch.zeros(1, dtype=torch.long, device=like.device)), denoiser)

    return aside(entries)
