"""Unknowns of a diffusion client besides the step: image and noise, or noised image and residual.

The gradient is J(x_t)^T q up to a factor, J the Jacobian of the network's output by its weights, q = output - target.
It depends on the image x and the noise only through x_t and q, is linear in q, and the map between the two pairs is one
to one. For a network that predicts the noise, errors of x_t reach the image multiplied by 1 / sqrt(alpha-bar), so an
image noised to a late step cannot be found this way; for a network that predicts v there is no such factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.diffusion import Denoising
from gradleak.parts.protocols import NOTHING, Needs, Prior, Space, delegates
from gradleak.parts.spaces import Normal, Pixels
from gradleak.parts.steps import SettledSteps, denoising
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.task import Batch


@dataclass(frozen=True)
class FreeNoise(Pixels):
    """The client's noise as an unknown, from N(0, I). If the threat model gives the noise, there are no unknowns."""

    start: Normal = Normal()
    field: str = "noise"

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {} if self.field in scene.fields else super().variables(scene, draws, before)

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return super().decode(v, scene, now) if self.field in v else {}


@dataclass(frozen=True)
class NoiseShell(Prior):
    """weight * mean over examples of (||noise||^2 / m - 1)^2, m values each: where almost all of N(0, I) lies."""

    weight: float = 1e-2
    field: str = "noise"

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return self.weight * (batch[self.field].flatten(1).square().mean(1) - 1).square().mean()


@delegates("steps")
@dataclass(frozen=True)
class NoisedResidual(Space):
    """Unknowns x_t and q instead of image and noise: better conditioned if both are unknown and the noise is weak.

    Decoded to image and noise (`image_and_noise`) at the weights that were sent. The prediction keeps that noise fixed,
    as the client does: if the loss computed it anew, q would be a constant and its gradient zero.

    steps   the space of the step, which may be an unknown too
    begin   the space of image and noise of the last stage: this one starts from its result
    """

    steps: Space = SettledSteps()
    begin: Space | None = None

    @property
    def decoded(self) -> frozenset[str]:
        return self.steps.decoded | {"x", "noise"}

    @property
    def needs(self) -> Needs:
        return self.steps.needs | (NOTHING if self.begin is None else self.begin.needs)

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        steps = self.steps.variables(scene, draws, before)
        if before is not None and "x_t" in before:
            return {**steps, "x_t": before["x_t"], "q": before["q"]}
        if before is not None and self.begin is not None:
            end = Step(torch.ones(()), 1)
            batch = {**scene.fields, **self.begin.decode(before, scene, end)}
            x_t, q = noised_and_residual(batch, scene)
            return {**steps, "x_t": x_t.detach(), "q": q.detach()}
        like, shape = scene.like, (scene.num_examples, *scene.task.fields["x"].shape)
        drawn = (draws.child(number).normal(shape, dtype=like.dtype) for number in (1 << 8, 1 << 9))
        return {**steps, **dict(zip(("x_t", "q"), drawn, strict=True))}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        steps = self.steps.decode(v, scene, now)
        return {**steps, **image_and_noise(v["x_t"], v["q"], {**scene.fields, **steps}["t"], scene)}


def noised_and_residual(batch: Batch, scene: TargetView) -> tuple[Tensor, Tensor]:
    """x_t and q = output - target of an image, a noise and a step."""
    objective = denoising(scene.task)
    x_t = objective.noised(batch)
    return x_t, _output(objective, x_t, batch["t"], scene) - objective.wanted(batch)


def image_and_noise(x_t: Tensor, q: Tensor, t: Tensor, scene: TargetView) -> Batch:
    """The image and the noise that x_t and q stand for: both follow from x_t and the target, output - q.

    eps: x = (x_t - sqrt(1 - ab) eps) / sqrt(ab). v: x = sqrt(ab) x_t - sqrt(1 - ab) v.
    """
    objective = denoising(scene.task)
    target = _output(objective, x_t, t, scene) - q
    image, noise = objective.schedule.scales(t, x_t)
    if objective.target == "eps":
        return {"x": (x_t - noise * target) / image, "noise": target}
    return {"x": image * x_t - noise * target, "noise": noise * x_t + image * target}


def _output(objective: Denoising, x_t: Tensor, t: Tensor, scene: TargetView) -> Tensor:
    output: Tensor = scene.task.call(scene.weights, scene.buffers)(x_t, objective.when(t, x_t))
    return output
