"""The networks that are measured, and made-up pictures. Public names of the package alone: runs with any commit's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradleak import models

CLASSES = 10
Build: TypeAlias = Callable[[tuple[int, int, int]], nn.Module]  # from the shape of an image, (C, H, W)

NETWORKS: dict[str, Build] = {
    "lenet": lambda shape: models.lenet_zhu(shape=shape),
    "convnet64": lambda shape: models.convnet(shape=shape, norm="batch").eval(),
    "resnet18": lambda shape: models.resnet18(shape=shape, norm="group"),
    "vit": lambda shape: models.vit(shape=shape),
    "unet": lambda shape: models.unet(shape=shape, base=32),
}
"""Untrained, for images of a shape. The U-Net is a denoiser (3.2 million parameters); all others classify."""


def pictures(count: int, side: int, seed: int = 0) -> Tensor:
    """Smooth made-up colour pictures in [0, 1], (count, 3, side, side): coarse noise, enlarged."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((count, 3, 6, 6), generator=generator)
    return nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)
