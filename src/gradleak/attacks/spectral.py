"""Search over cosine coefficients, scaled as in photographs: gradleak's own, for classifiers and denoisers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.attack import Attack, Composed
from gradleak.attack.cascade import EscalatingRestarts
from gradleak.attacks.gidm import Plan
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.core.tree import Tree
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine, Relative
from gradleak.parts.predictions import Replay
from gradleak.parts.protocols import Match, Space, delegates, needs_images, resumed
from gradleak.parts.stage import Stage
from gradleak.parts.steps import SettledSteps, denoising
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.task import Batch, Task, TaskError


@dataclass(frozen=True)
class Spectral(Space):
    """x = middle + half the range * C^T D^T (s z) D: D takes cosine coefficients, C opponent colours, s are units.

    The unknown z has about the same size at every frequency, unlike the coefficients of an image. So a search does not
    spend its steps on the many fine coefficients before the few coarse ones are right.

    start    standard deviation of the first z
    power    s falls with frequency to this power
    chroma   s of the two colour differences, relative to that of the brightness

    No box: a search by curvature would lose its memory at every wall.
    """

    start: float = 0.1
    power: float = 0.5
    chroma: float = 0.6

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({"x"})

    def refuses(self, task: Task) -> str:
        return needs_images(task, "its unknowns are the cosine coefficients of images")

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        low, _ = scene.limits["x"]
        if reason := self.refuses(scene.task):
            raise TaskError(f"unsupported: {reason}.")
        if before is not None and "x" in before:
            return {"z": self.encoded(before["x"], scene)}
        shape = (scene.num_examples, *scene.task.fields["x"].shape)
        return resumed({"z": self.start * draws.normal(shape, dtype=low.dtype)}, before)

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        low, high = scene.limits["x"]
        return {"x": (low + high) / 2 + (high - low) / 2 * self.image(v["z"])}

    def encoded(self, x: Tensor, scene: TargetView) -> Tensor:
        """The z of these images."""
        low, high = scene.limits["x"]
        return coefficients((x - (low + high) / 2) * 2 / (high - low)) / self.units(x)

    def image(self, z: Tensor) -> Tensor:
        """(..., C, H, W) -> the same, in units of half the range."""
        return pixels(self.units(z) * z)

    def units(self, like: Tensor) -> Tensor:
        """s, (C, H, W), scaled such that z = 1 everywhere makes pixels with a root mean square of one half."""
        channels, height, width = like.shape[-3:]
        s = frequencies(like).pow(-self.power)
        s = s * (0.5 * math.sqrt(height * width) / torch.linalg.vector_norm(s))
        colours = [1.0, self.chroma, self.chroma] if channels == 3 else [1.0] * channels
        length = math.sqrt(sum(colour * colour for colour in colours) / channels)
        return torch.stack([s * (colour / length) for colour in colours])


def pixels(coefficients: Tensor) -> Tensor:
    """Cosine coefficients to pixels, (..., C, H, W). Three channels are opponent colours. Both maps are rotations."""
    height, width = (
        torch.arange(side, dtype=coefficients.dtype, device=coefficients.device) for side in coefficients.shape[-2:]
    )
    planes = cosines(height).T @ coefficients @ cosines(width)
    if planes.shape[-3] != 3:
        return planes
    grey, first, second = planes.unbind(-3)
    grey, first, second = grey / math.sqrt(3), first / math.sqrt(2), second / math.sqrt(6)
    return torch.stack([grey + first + second, grey - 2 * second, grey - first + second], dim=-3)


def frequencies(like: Tensor) -> Tensor:
    """The frequency of each coefficient, (H, W); that of the mean counts as 1."""
    down, across = (torch.arange(side, dtype=like.dtype, device=like.device) for side in like.shape[-2:])
    return (down[:, None].square() + across.square()).clamp_min(1.0).sqrt()


def coefficients(image: Tensor) -> Tensor:
    """The inverse of `pixels`."""
    height, width = (torch.arange(side, dtype=image.dtype, device=image.device) for side in image.shape[-2:])
    planes = cosines(height) @ image @ cosines(width).T
    if planes.shape[-3] != 3:
        return planes
    red, green, blue = planes.unbind(-3)
    grey, first, second = red + green + blue, red - blue, red - 2 * green + blue
    return torch.stack([grey / math.sqrt(3), first / math.sqrt(2), second / math.sqrt(6)], dim=-3)


def cosines(places: Tensor) -> Tensor:
    """The orthonormal cosine transform (DCT-II) of a row of pixels: rows are frequencies."""
    count = len(places)
    waves = (math.pi / count * places[:, None] * (places + 0.5)).cos() * math.sqrt(2 / count)
    return torch.where(places[:, None] == 0, math.sqrt(1 / count), waves)


@delegates("image")
@dataclass(frozen=True)
class SpectralPair(Space):
    """A denoiser's image and noise by their coefficients, rotated such that z alone makes x_t.

    With a = sqrt(alpha-bar), b = sqrt(1 - alpha-bar), s the units of an image, sigma^2 = (a s)^2 + b^2, frequency by
    frequency: image / s = (a s z + b w) / sigma and noise = (b z - a s w) / sigma, a rotation, so that x_t = sigma z.
    If images were Gaussian with deviations s, z and w would be independent and of unit size: z is what the network
    sees, w what remains unknown once x_t is known. That is little of the image where x_t shows it, and little of the
    noise where x_t is mostly noise. w begins at 0, the best guess. This holds for images from -1 to 1; for another
    range z and w are no longer exactly independent, but serve as well.

    Where the threat model gives the noise there is no w, and the coefficients are the image's own.
    """

    image: Spectral = Spectral()

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({"x", "noise"})

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if before is not None and "x" in before:
            return self._rotated(before, scene)
        unknowns = self.image.variables(scene, draws, before)
        if "noise" in scene.fields:
            return unknowns
        return {**unknowns, **resumed({"w": torch.zeros_like(unknowns["z"])}, before)}

    def _rotated(self, batch: Tree, scene: TargetView) -> Tree:
        """The unknowns of this image and noise."""
        s, image = self.image.units(batch["x"]), self.image.encoded(batch["x"], scene)
        if "noise" in scene.fields:
            return {"z": image}
        a, b = denoising(scene.task).schedule.scales(scene.fields["t"], image)
        noise, sigma = coefficients(batch["noise"]), (a.square() * s.square() + b.square()).sqrt()
        return {"z": (a * s * image + b * noise) / sigma, "w": (b * image - a * s * noise) / sigma}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        if "w" not in v:
            return self.image.decode(v, scene, now)
        z, w, s = v["z"], v["w"], self.image.units(v["z"])
        a, b = denoising(scene.task).schedule.scales(scene.fields["t"], z)
        sigma = (a.square() * s.square() + b.square()).sqrt()
        batch = self.image.decode({"z": (a * s * z + b * w) / sigma}, scene, now)
        return {**batch, "noise": pixels((b * z - a * s * w) / sigma)}


@named("spectral", kind="attack", paper="gradleak's own")
def spectral(
    *,
    steps: int = 800,
    history: int = 100,
    start: float = 0.1,
    power: float = 0.5,
    chroma: float = 0.6,
    restarts: int = 2,
    labels: str = "auto",
) -> Attack:
    """Match the direction of the gradient by L-BFGS on weighted cosine coefficients; the best of several starts.

    min over z of 1 - cos(grad(x(z)), observed): no prior except the units of z, no box. `steps` count evaluations. On
    classifiers it has been run on toys only; `spectral-dm` has been measured (papers/gidm).
    """
    stage = Stage(Spectral(start, power, chroma), Replay(), Cosine(), (), LBFGS(steps=steps, history=history))
    return Composed("spectral", (stage,), Labels(label_rule(labels)), restarts=restarts)


@dataclass(frozen=True, kw_only=True)
class SpectralDMSettings:
    """L-BFGS, the unknowns (`Spectral`), what is known of noise and step, and when to search from more starts."""

    steps: int = 800
    history: int = 100
    start: float = 0.1
    power: float = 0.5
    chroma: float = 0.6
    noise: str = "given"
    t: str = "given"
    restarts: int = 2
    waves: int = 1
    solved: float = 1e-5


@named("spectral-dm", kind="attack", paper="gradleak's own")
@takes(SpectralDMSettings)
def spectral_dm(settings: SpectralDMSettings) -> Attack:
    """`spectral` on a denoiser, at a step that is given or read off (t="analytic"); the noise given, or unknown.

    noise="given" (Knowledge.given): the objective of `invg-dm` without total variation. Adam on pixels is slow in the
    coarse coefficients where the known noise gives little to start from. The settings were chosen on a thin U-Net and
    four images that are in no table.

    noise="unknown": min over image and noise of ||grad - observed||^2 / ||observed||^2, both by coefficients, rotated
    such that half of the unknowns are x_t (`SpectralPair`). The gradient depends on them through x_t and the residual,
    two images' worth of numbers; a network has far more weights, so it can determine both. A start either converges or
    is stuck: use waves. Noise that Knowledge grants is used, not searched for.

    waves, solved   where no match is below `solved`, search again from twice as many starts (`EscalatingRestarts`)
    """
    noise, t = settings.noise, settings.t
    if t not in ("given", "analytic"):
        raise ValueError(f"t must be 'given', or 'analytic' to read the step off the update; given {t!r}.")
    if noise not in ("given", "unknown"):
        raise ValueError(f"noise must be 'given', or 'unknown' to search for it; given {noise!r}.")
    plan, image = Plan(noise, t), Spectral(settings.start, settings.power, settings.chroma)
    space: Space = SpectralPair(image) if noise == "unknown" else plan.space(image, SettledSteps())
    # The size of the gradient says how large the residual is; its direction alone does not.
    match: Match = Relative(whole=True) if noise == "unknown" else Cosine()
    stage = Stage(space, Replay(), match, (), LBFGS(steps=settings.steps, history=settings.history))
    once = Composed("spectral-dm", (stage,), plan.fields(), restarts=settings.restarts)
    several = EscalatingRestarts(once, settings.waves, settings.solved)  # refuses settings that make no sense
    return several if settings.waves > 1 else once
