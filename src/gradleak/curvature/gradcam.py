"""Does a defended model still explain itself? Grad-CAM maps of two models on the same images, compared.

Published comparisons score 8-bit pictures in which a coloured map lies over the photograph. The photograph is the same
in both, which raises every score, SSIM most of all. Here the plain names score the map itself, and the names with
`overlay` score the pictures. Both models explain the SAME class: explaining the label for one and the
predicted class for the other measures a difference of decisions, not of explanations.

`gradleak.curvature` itself does not import this module: scores come from `gradleak.metrics`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gradleak.core.similarity import mse, psnr, ssim, to_unit
from gradleak.core.tree import Params
from gradleak.defences.gradcam import channel_importance, features, guidance, heat_maps
from gradleak.scenario.task import Batch, Task

__all__ = ["Fidelity", "channel_importance", "compare", "features", "fidelity", "guidance", "heat_maps", "overlay"]
TOP = 0.2  # of the pixels: where a map points to


@dataclass(frozen=True, eq=False)
class Fidelity:
    """How alike two sets of maps are, one value for each image, (N,).

    mse, psnr, ssim                 of the maps in [0, 1], no colours and no photograph
    rank_correlation                Spearman's, ties sharing their mean rank; not a number where a map is constant
    top_overlap                     intersection over union of the 20 % of pixels where each map is largest
    overlay_mse, _psnr, _ssim       of the 8-bit pictures; the MSE is in squared grey levels, 0 to 255^2
    """

    mse: Tensor
    psnr: Tensor
    ssim: Tensor
    rank_correlation: Tensor
    top_overlap: Tensor
    overlay_mse: Tensor
    overlay_psnr: Tensor
    overlay_ssim: Tensor

    def means(self) -> dict[str, float]:
        """Means over the images; images without a rank correlation do not count in its mean."""
        return {field.name: float(getattr(self, field.name).nanmean()) for field in fields(self)}


def fidelity(
    task: Task,
    weights: Params,
    defended: Params,
    batch: Batch,
    *,
    layer: str | None = None,
    target: Tensor | None = None,
    buffers: Params | None = None,
    defended_buffers: Params | None = None,
) -> Fidelity:
    """Compare the maps of an undefended and a defended model at one convolution (the last), for one class (the label).

    `defended_buffers` are those of `buffers` unless given.
    """
    other_buffers = buffers if defended_buffers is None else defended_buffers
    plain = heat_maps(task, weights, batch, layer=layer, target=target, buffers=buffers)
    other = heat_maps(task, defended, batch, layer=layer, target=target, buffers=other_buffers)
    return compare(other, plain, task.fields["x"].unit(batch["x"]))


def compare(maps: Tensor, reference: Tensor, images: Tensor) -> Fidelity:
    """Maps (N, H, W) in [0, 1] against those of the reference, over photographs (N, C, H, W) in [0, 1]."""
    if maps.shape != reference.shape or images.shape[:1] + images.shape[2:] != maps.shape:
        shapes = ", ".join(str(tuple(value.shape)) for value in (maps, reference, images))
        raise ValueError(f"Maps are (N, H, W) and images (N, C, H, W) with equal N, H and W; given {shapes}.")
    one, two = maps[:, None], reference[:, None]
    picture, expected = (overlay(images, each).to(torch.float64) / 255 for each in (maps, reference))
    return Fidelity(
        mse=mse(one, two),
        psnr=psnr(one, two),
        ssim=ssim(one, two),
        rank_correlation=rank_correlation(maps.flatten(1), reference.flatten(1)),
        top_overlap=top_overlap(maps.flatten(1), reference.flatten(1)),
        overlay_mse=255**2 * mse(picture, expected),
        overlay_psnr=psnr(picture, expected),
        overlay_ssim=ssim(picture, expected),
    )


def overlay(images: Tensor, maps: Tensor) -> Tensor:
    """8-bit RGB pictures (N, 3, H, W): half photograph, half map in the colours "jet", the largest value at 255."""
    if images.shape[1] not in (1, 3):
        raise ValueError(f"A picture has 1 or 3 channels; given {images.shape[1]}.")
    value = to_unit(maps)[:, None]
    jet = torch.cat([(1.5 - (4 * value - peak).abs()).clamp(0, 1) for peak in (3, 2, 1)], 1)  # red, green, blue
    both = (to_unit(images).expand(-1, 3, -1, -1) + jet) / 2
    top = both.amax((1, 2, 3), keepdim=True)
    return (255 * both / torch.where(top > 0, top, 1.0)).round().to(torch.uint8)


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's correlation of rows, (N,): Pearson's of the ranks, equal values sharing the mean of theirs."""

    def ranks(values: Tensor) -> Tensor:
        ordered = values.sort(1).values.contiguous()
        below, upto = (torch.searchsorted(ordered, values.contiguous(), right=right) for right in (False, True))
        rank = (below + upto).to(torch.float64) / 2
        return rank - rank.mean(1, keepdim=True)

    a, b = ranks(first), ranks(second)
    return (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt()


def top_overlap(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of where each row is among its largest `TOP` and above zero, (N,); 1 for two blanks."""
    count = math.ceil(TOP * first.shape[1])

    def top(values: Tensor) -> Tensor:
        return (values >= values.topk(count, 1).values[:, -1:]) & (values > 0)

    a, b = top(first), top(second)
    union = (a | b).sum(1)
    return torch.where(union > 0, (a & b).sum(1) / union.clamp_min(1), 1.0)
