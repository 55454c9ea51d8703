"""Numbers: vectors, series (audio among them), and the values of a regression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gradleak.scenario.kinds.base import TOLERANCE, Cell, Exhibit, Kind, Measure, Threshold, flat

if TYPE_CHECKING:
    from gradleak.scenario.fields import Field

RMSE = Measure("rmse", "RMSE (SD)", digits=3, higher=False)
SHOWN = 64  # entries of a vector in a report
UNIT = "standard deviations"


@dataclass(frozen=True)
class Numbers(Kind):
    """Numbers, compared in units of their standard deviation over real examples that are not the client's.

    Without such examples: of a uniform variable on the bounds; without bounds: the unit of the model's input.
    """

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        value = super().comparable(value, field)
        if field.bounded:
            value = value.clamp(*field.limits(value))
        return value / self._spread(value, field, reference)

    def _spread(self, like: Tensor, field: Field, reference: Tensor | None) -> Tensor:
        if reference is not None and len(reference) > 1:
            spread = reference.to(like).std(0, correction=0)
            return torch.where(spread > 1e-9, spread, 1.0)
        if not field.bounded:
            return like.new_ones(())
        low, high = field.limits(like)
        return (high - low) / math.sqrt(12)

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        apart = flat(found - truth)
        return {
            "right": (apart.abs() < TOLERANCE).double().mean(1),
            "rmse": apart.square().mean(1).sqrt(),
        }

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        return {} if others is None else {"mean": others.mean(0).expand_as(truth)}


@dataclass(frozen=True)
class Vector(Numbers):
    """A vector of numbers. An entry is right within 0.319 standard deviations; recovered when every entry is."""

    name: ClassVar = "vector"
    noun: ClassVar = ("vector", "vectors")
    measures: ClassVar = (Measure("right", "entries right", percent=True), RMSE)
    thresholds: ClassVar = (Threshold("every entry", "right", 1.0, strict=False), Threshold("right>90%", "right", 0.9))
    needed: ClassVar = ("every entry",)
    control: ClassVar = 0.9
    rule: ClassVar = "every entry is within 0.319 standard deviations"

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        pairs = zip(true.flatten()[:SHOWN].tolist(), found.flatten()[:SHOWN].tolist(), strict=True)
        cells = (Cell(str(n), f"{a:.3g}", f"{b:.3g}", abs(a - b) < TOLERANCE) for n, (a, b) in enumerate(pairs))
        return Exhibit(cells=tuple(cells), left_out=max(0, true.numel() - SHOWN), unit=UNIT)


@dataclass(frozen=True)
class Value(Vector):
    """What a regression predicts: one number or several."""

    name: ClassVar = "value"
    noun: ClassVar = ("value", "values")


@dataclass(frozen=True)
class Series(Numbers):
    """A series (channels, time), audio among them; time_first: (time, channels).

    Recovered when the correlation with the private series is above 0.9, at rank 1. Compared as deviations from the mean
    of other people's series: a course that all share is no leakage.
    """

    time_first: bool = False
    name: ClassVar = "series"
    noun: ClassVar = ("series", "series")
    entries: ClassVar = "sample"
    measures: ClassVar = (Measure("correlation", "correlation"), Measure("right", "samples right", percent=True), RMSE)
    thresholds: ClassVar = (Threshold("correlation>0.9", "correlation", 0.9),)
    needed: ClassVar = ("correlation>0.9",)
    control: ClassVar = 0.9
    rule: ClassVar = "its correlation is above 0.9"

    def axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (-2,) if self.time_first and len(shape) > 1 else (-1,)

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        value = super().comparable(value, field, reference)
        if reference is None or len(reference) < 2:
            return value
        return value - super().comparable(reference.to(value), field, reference).mean(0)

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        guess, real = (flat(value) - flat(value).mean(1, keepdim=True) for value in (found, truth))
        return {"correlation": torch.cosine_similarity(guess, real), **super().scores(found, truth)}

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        rows = [value.reshape(-1, value.shape[-1]) for value in (true, found)]
        true, found = (value.mT for value in rows) if self.time_first else rows
        return Exhibit(curves=(true, found), unit=UNIT)
