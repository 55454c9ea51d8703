"""What makes a batch likely: image smoothness, statistics, agreement of restarts, labels, features."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.core import tree
from gradleak.core.tree import Tree
from gradleak.parts.predictions import gradient
from gradleak.parts.protocols import Prior, needs_images
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.task import Batch, Task


def _differences(x: Tensor, axes: Iterable[int]) -> list[Tensor]:
    """Differences of neighbours along each axis that has any."""
    return [x.diff(dim=axis) for axis in axes if x.shape[axis] > 1]


def _sum(terms: Sequence[Tensor], scene: TargetView) -> Tensor:
    """The sum of scalars; zero for none, where no axis of the data has neighbours."""
    return sum(terms[1:], terms[0]) if terms else scene.like.new_zeros(())


def stacked(batch: Batch, scene: TargetView, field: str) -> Tensor:
    """All examples, those of all copies included, (rows, *shape)."""
    return batch[field].reshape(-1, *scene.task.fields[field].shape)


def _area(x: Tensor, scene: TargetView, field: str) -> int:
    """Places of an example along the axes that have neighbours: the pixels of an image."""
    return math.prod(x.shape[axis] for axis in scene.axes(field))


def _apart(batch: Batch, scene: TargetView, field: str) -> Tensor:
    """All differences of neighbours, in units of the field's width, as one vector; without any, from the middle."""
    low, high = scene.extent(field)
    apart = _differences(batch[field] / (high - low), scene.axes(field))
    if not apart:
        return ((batch[field] - (low + high) / 2) / (high - low)).flatten()
    return torch.cat([d.flatten() for d in apart])


@dataclass(frozen=True)
class TotalVariation(Prior):
    """weight * (mean |dx| + mean |dy|), anisotropic, means over batch, channels and positions (IG, GIAS, GIFD)."""

    weight: float
    field: str = "x"

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        apart = _differences(batch[self.field], scene.axes(self.field))
        return self.weight * _sum([d.abs().mean() for d in apart], scene)


class _Squares(Prior):
    """A quadratic prior: the sum of squares of its terms."""

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        return self.terms(batch, v, scene, now).square().sum()


@dataclass(frozen=True)
class Smoothness(_Squares):
    """weight * mean squared difference of neighbours. Its terms are differences: quadratic, for least squares."""

    weight: float = 1.0
    field: str = "x"

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        apart = _apart(batch, scene, self.field)
        return math.sqrt(self.weight / apart.shape[0]) * apart


CHROMA = 30.0  # variance of differences of neighbours: of brightness over that of colour differences


def roughness(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Terms whose sum of squares says how unlike photographs (B, C, ...) are: roughly -log of a Gaussian.

    `axes`: those along which neighbours resemble each other (`Kind.axes`).

    First differences and Laplacians along every spatial axis: of brightness and, with three channels, of two colour
    differences, `CHROMA` times as heavy. The power of photographs falls with the square of the frequency, faster at the
    end, and their colours change far less than their brightness. The constant is the ratio in the training images of
    CIFAR-10. Without a spatial axis: distances from the middle of the bounds.
    """
    if not axes:
        return (x - 0.5).flatten()
    if len(axes) == 2 and x.shape[1] == 3:
        red, green, blue = x.unbind(1)
        heavy = math.sqrt(CHROMA)
        opponent = [(red - blue) * (heavy / math.sqrt(2)), (red - 2 * green + blue) * (heavy / math.sqrt(6))]
        x = torch.stack([(red + green + blue) / math.sqrt(3), *opponent], dim=1)
    places = sorted(axis % x.dim() for axis in axes)
    apart = [x.diff(dim=axis) for axis in places]
    laplacian = torch.zeros_like(x)
    for axis, d in zip(places, apart, strict=True):
        edge = torch.zeros_like(x.narrow(axis, 0, 1))  # no difference across the border
        laplacian = laplacian + torch.cat([d, edge], dim=axis) - torch.cat([edge, d], dim=axis)
    return torch.cat([value.flatten() for value in (*apart, laplacian)])


@dataclass(frozen=True)
class NaturalImage(_Squares):
    """weight * mean square of the terms of `roughness`, pixels in [0, 1]: quadratic, for least squares."""

    weight: float = 1.0
    field: str = "x"

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        low, high = scene.extent(self.field)
        rough = roughness((batch[self.field] - low) / (high - low), scene.axes(self.field))
        return math.sqrt(self.weight / rough.shape[0]) * rough


@dataclass(frozen=True)
class ReweightedVariation(Prior):
    """weight * mean sqrt(d^2 + eps^2) over neighbours: total variation for least squares.

    Its terms are those of iteratively reweighted least squares, d / (2 sqrt(d0^2 + eps^2))^(1/2) with d0 the
    difference at the point of the derivative: |d| <= (d^2 / |d0| + |d0|) / 2, with equality at d0.
    """

    weight: float = 1.0
    eps: float = 1e-2
    field: str = "x"

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        apart = _apart(batch, scene, self.field)
        return self.weight * (apart.square() + self.eps**2).sqrt().mean()

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        apart = _apart(batch, scene, self.field)
        share = (apart.detach().square() + self.eps**2).pow(-0.25)
        return math.sqrt(0.5 * self.weight / apart.shape[0]) * apart * share


@dataclass(frozen=True)
class Box(_Squares):
    """weight * mean squared distance to the field's bounds, in units of their width; zero inside.

    `summed`: over the entries of an example, and the mean of examples (DLFA).
    """

    weight: float = 1.0
    field: str = "x"
    summed: bool = False

    def terms(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        x, (low, high), (least, most) = batch[self.field], scene.limits[self.field], scene.extent(self.field)
        outside = ((x - x.clamp(low, high)) / (most - least)).flatten()
        parts = outside.shape[0] / (math.prod(scene.task.fields[self.field].shape) if self.summed else 1)
        return math.sqrt(self.weight / parts) * outside


@dataclass(frozen=True)
class CircularVariation(Prior):
    """weight * mean over images of the sum over entries of dx^2 + dy^2 + 1e-7, around the edges (DLFA)."""

    weight: float
    field: str = "x"

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        x = stacked(batch, scene, self.field)
        squares = [(x.roll(-1, axis) - x).square() for axis in scene.axes(self.field)]
        return self.weight * (_sum(squares, scene) + 1e-7).sum() / x.shape[0]


@dataclass(frozen=True)
class OpponentVariation(Prior):
    """weight * mean sqrt(dx^2 + dy^2 + eps) over the colours AND their differences (R-G, R-B, G-B): isotropic."""

    weight: float
    field: str = "x"
    eps: float = 1e-8

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        x, axes = batch[self.field], scene.axes(self.field)
        if len(axes) == 2 and x.shape[-3] == 3:
            red, green, blue = x.unbind(-3)
            x = torch.cat([x, torch.stack([red - green, red - blue, green - blue], dim=-3)], dim=-3)
        apart = _differences(x, axes)
        if not apart:
            return scene.like.new_zeros(())
        least = [min(sides) for sides in zip(*(d.shape for d in apart), strict=True)]  # where all differences exist
        squares = [d[tuple(map(slice, least))].square() for d in apart]
        return self.weight * (_sum(squares, scene) + self.eps).sqrt().mean()


@dataclass(frozen=True)
class SummedVariation(Prior):
    """first * sum |d| + second * sum d^2 over the whole batch (representation inversion): sums, not means."""

    first: float = 0.0
    second: float = 0.0
    field: str = "x"

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        apart = _differences(batch[self.field], scene.axes(self.field))
        total = batch[self.field].new_zeros(())
        if self.first:
            total = total + self.first * _sum([d.abs().sum() for d in apart], scene)
        if self.second:
            total = total + self.second * _sum([d.square().sum() for d in apart], scene)
        return total


@dataclass(frozen=True)
class ImageNorm(Prior):
    """weight * sum over images of ||x||_2, divided by height * width where `per_pixel`."""

    weight: float
    per_pixel: bool = False
    field: str = "x"

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        x = batch[self.field]
        area = _area(x, scene, self.field) if self.per_pixel else 1
        return self.weight * tree.safe_sqrt(x.flatten(1).square().sum(1)).sum() / area


@dataclass(frozen=True)
class LatentNorm(Prior):
    """weight * sum over images of ||z||_2, over the unknowns in `names` that the search has (GIAS)."""

    weight: float
    names: tuple[str, ...] = ("z", "w")

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        norms = [tree.safe_sqrt(v[name].flatten(1).square().sum(1)).sum() for name in self.names if name in v]
        return self.weight * sum(norms, scene.like.new_zeros(()))


@dataclass(frozen=True)
class LatentNormality(Prior):
    """weight * KL(N(m, s^2) || N(0, 1)), m and s^2 the mean and variance of the entries of each latent (GGL).

    KL = -(1 + log(s^2 + 1e-10) - m^2 - s^2) / 2, summed over images.
    """

    weight: float
    name: str = "z"

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        z = v[self.name].flatten(1)
        mean, variance = z.mean(1), z.var(1, correction=0)
        return self.weight * (-0.5 * (1 + (variance + 1e-10).log() - mean.square() - variance)).sum()


@dataclass(frozen=True)
class BatchNormStatistics(Prior):
    """weight * sum over BatchNorm layers of ||mean - running mean||_2 + ||var - running var||_2 of their inputs.

    Compared with the running statistics that the server holds. `returned`: with those of the client's own batch, read
    off the buffers that it sends back after one step, returned = (1 - momentum) held + momentum batch (this assumes
    more). The first layer counts `first` times (DeepInversion: 10). Without BatchNorm the term is zero.
    """

    weight: float
    first: float = 1.0
    returned: bool = False

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        names = batch_norms(scene.task.model)
        total = scene.like.new_zeros(())
        if not names:
            return total
        inputs = scene.task.inputs_of(names, scene.weights, batch, scene.buffers)
        for position, name in enumerate(names):
            value = inputs[name].transpose(0, 1).flatten(1)  # (channels, batch * positions)
            mean, var = value.mean(1), value.var(1, correction=0)
            known = self._statistics(scene, name, value.shape[1])
            gap = {"mean": mean - known[0], "var": var - known[1]}
            total = total + (self.first if position == 0 else 1.0) * sum(tree.norm({"": d}) for d in gap.values())
        return self.weight * total

    def _statistics(self, scene: TargetView, name: str, count: int) -> tuple[Tensor, Tensor]:
        """Mean and biased variance to compare with; the client's are over `count` values per channel."""
        assert scene.buffers is not None
        sent = scene.buffers[f"{name}.running_mean"], scene.buffers[f"{name}.running_var"]
        if not self.returned:
            return sent
        momentum = getattr(scene.task.model.get_submodule(name), "momentum", None)
        training = scene.knows.training
        steps = 1 if training is None else len(training.order(scene.num_examples))
        if scene.returned_buffers is None or momentum is None or steps != 1:
            raise MissingKnowledge(
                "Statistics of the client's own batch can be read off the buffers it returned after ONE step with a "
                f"fixed BatchNorm momentum; here: returned {scene.returned_buffers is not None}, momentum {momentum}, "
                f"{steps} steps. Use returned=False, the statistics that the server holds."
            )
        back = (scene.returned_buffers[f"{name}.running_mean"], scene.returned_buffers[f"{name}.running_var"])
        mean, var = ((new - (1 - momentum) * old) / momentum for new, old in zip(back, sent, strict=True))
        return mean, var * (count - 1) / count  # torch keeps the unbiased variance


def batch_norms(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers that keep running statistics."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module.track_running_stats]


@dataclass(frozen=True)
class GroupConsistency(Prior):
    """weight * sum over images of ||x - E||_2 (/ height / width if `per_pixel`), E the consensus of the restarts.

    E is the mean of the restarts, computed at step `start` and every `interval` steps (the "lazy" form). `register`:
    each restart is first shifted to the mean by whole pixels, by phase correlation, if that brings it nearer (shifts
    wrap around). The published registration (RANSAC-flow) needs a trained network and is not used.
    """

    weight: float
    start: int = 500
    interval: int = 100
    register: bool = False
    per_pixel: bool = False
    field: str = "x"

    def refuses(self, task: Task) -> str:
        return needs_images(task, "it shifts images to their consensus") if self.register else ""

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        x = batch[self.field]
        area = _area(x, scene, self.field) if self.per_pixel else 1
        gap = tree.safe_sqrt((x - scene.shared["consensus"]).flatten(1).square().sum(1)).sum() / area
        return self.weight * gap * (now.step >= self.start).to(x.dtype) * scene.shared["several"]

    def due(self, step: int) -> bool:
        return step >= self.start and (step - self.start) % self.interval == 0

    def refresh(self, batch: Batch, groups: tuple[int, int]) -> Tree:
        """(lanes, B, C, H, W) -> the consensus of each target, for each of its lanes."""
        targets, restarts = groups
        x = batch[self.field]
        grouped = x.reshape(targets, restarts, *x.shape[1:])
        mean = grouped.mean(1, keepdim=True)
        if self.register:
            mean = _shifted_to(grouped, mean.expand_as(grouped)).mean(1, keepdim=True)
        several = x.new_full((x.shape[0],), float(restarts > 1))  # one restart has no consensus
        return {"consensus": mean.expand_as(grouped).reshape(x.shape), "several": several}


def _shifted_to(x: Tensor, reference: Tensor) -> Tensor:
    """Shift each image by whole pixels, as phase correlation finds, if that lowers the distance."""
    height, width = x.shape[-2:]
    cross = torch.fft.fft2(reference) * torch.fft.fft2(x).conj()
    peak = torch.fft.ifft2(cross / cross.abs().clamp_min(1e-12)).real.sum(-3).flatten(-2).argmax(-1)
    rows = (torch.arange(height, device=x.device) - (peak // width)[..., None]) % height
    columns = (torch.arange(width, device=x.device) - (peak % width)[..., None]) % width
    moved = x.gather(-2, rows[..., None, :, None].expand_as(x)).gather(-1, columns[..., None, None, :].expand_as(x))
    gain = (moved - reference).flatten(-3).square().sum(-1) < (x - reference).flatten(-3).square().sum(-1)
    return torch.where(gain[..., None, None, None], moved, x)


@dataclass(frozen=True)
class LabelDistance(Prior):
    """weight * sum over examples of ||softmax(F(x)) - onehot(y)||^2 (CPL; inferred label, never true logits).

    For a target that is no class index the term is zero.
    """

    weight: float

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        if not scene.task.class_index:
            return scene.like.new_zeros(())
        probabilities = scene.task.output(scene.weights, batch, scene.buffers).softmax(-1)
        y = batch["y"]
        wanted = y if y.is_floating_point() else one_hot(y, probabilities.shape[-1], probabilities.dtype)
        return self.weight * (probabilities - wanted).square().sum()


def one_hot(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """As F.one_hot, by a comparison: F.one_hot reads values on the host."""
    return (y[..., None] == torch.arange(classes, device=y.device)).to(dtype)


@dataclass(frozen=True)
class FeatureDistance(Prior):
    """weight * mean (h(x) - h)^2, h the classifier's input, read off the classifier's gradient (B = 1).

    h = sum_r d_r G_r / sum_r d_r^2 with G, d the gradients of weight and bias: exact for one example. For more, means
    over the batch are compared. Without a classifier that has a bias the term is zero.
    """

    weight: float

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        layer = scene.task.last_layer
        if layer is None or layer.bias is None:
            return scene.like.new_zeros(())
        observed = gradient(scene)
        rows, deltas = observed[layer.weight], observed[layer.bias]
        wanted = (deltas[:, None] * rows).sum(0) / deltas.square().sum().clamp_min(1e-30)
        features = scene.task.inputs_of([layer.module], scene.weights, batch, scene.buffers)[layer.module]
        return self.weight * F.mse_loss(features.mean(0), wanted)
