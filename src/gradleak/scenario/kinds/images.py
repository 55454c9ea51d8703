"""Images: (channels, height, width), with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gradleak.core.similarity import mse, pairwise_ssim_distance, precise, psnr, ssim, to_unit
from gradleak.scenario.kinds.base import Exhibit, Kind, Measure, Threshold

if TYPE_CHECKING:
    from gradleak.scenario.fields import Field


@dataclass(frozen=True)
class Image(Kind):
    """A picture. Compared in [0, 1]; recovered at SSIM > 0.5, PSNR > 18 dB and rank 1 among other real images."""

    name: ClassVar = "image"
    noun: ClassVar = ("image", "images")
    entries: ClassVar = "pixel"
    pictures: ClassVar = True
    measures: ClassVar = (
        Measure("psnr", "PSNR", "dB", 1),
        Measure("ssim", "SSIM"),
        Measure("mse", "MSE", digits=4, higher=False, column=False),
    )
    thresholds: ClassVar = (
        Threshold("ssim>0.5", "ssim", 0.5),
        Threshold("psnr>18", "psnr", 18),
        Threshold("psnr>20", "psnr", 20),
    )
    needed: ClassVar = ("ssim>0.5", "psnr>18")
    control: ClassVar = 18.0
    rule: ClassVar = "SSIM > 0.5, PSNR > 18 dB"

    def misfit(self, shape: tuple[int, ...]) -> str:
        return "" if len(shape) == 3 else f"An image has the shape (channels, height, width); given {shape}."

    def axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (-1, -2)

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        return to_unit(field.unit(precise(value)))  # in double precision the conversion costs no digits

    def look_up(self, first: Tensor, second: Tensor) -> Tensor:
        return pairwise_ssim_distance(first, second)

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        return {"mse": mse(found, truth), "psnr": psnr(found, truth), "ssim": ssim(found, truth)}

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        guesses = {"mid-grey": torch.full_like(truth, 0.5)}
        return guesses if others is None else {**guesses, "mean image": others.mean(0).expand_as(truth)}

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        return Exhibit(pictures=(true, found))
