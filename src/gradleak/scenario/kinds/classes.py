"""What classifiers predict: a class, several labels at once, a class for every pixel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gradleak.scenario.kinds.base import Cell, Exhibit, Kind, Measure, Threshold, flat

if TYPE_CHECKING:
    from gradleak.scenario.fields import Field

_RIGHT = Threshold("every entry", "right", 1.0, strict=False)


@dataclass(frozen=True)
class Category(Kind):
    """One class index for an example, or probabilities of the classes. Searched for as logits."""

    name: ClassVar = "category"
    noun: ClassVar = ("label", "labels")
    continuous: ClassVar = False
    measures: ClassVar[tuple[Measure, ...]] = (Measure("right", "right", percent=True),)
    thresholds: ClassVar = (_RIGHT,)
    needed: ClassVar = ("every entry",)
    control: ClassVar = 0.9
    rule: ClassVar = "its class is right"

    def relaxed(self, field: Field) -> tuple[int, ...]:
        assert field.classes is not None
        return (*field.shape, field.classes)

    def decode(self, v: Tensor, field: Field) -> Tensor:
        return v.softmax(dim=-1)

    def allowed(self, value: Tensor, field: Field) -> str:
        assert field.classes is not None
        if value.is_floating_point() or not value.numel() or 0 <= int(value.min()) <= int(value.max()) < field.classes:
            return ""
        return f"it holds {int(value.min())} to {int(value.max())}; the classes are 0 to {field.classes - 1}"

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        if not value.is_floating_point():
            return value.long()
        return value.argmax(-1).masked_fill(value.isnan().any(-1), -1)

    def distance(self, first: Tensor, second: Tensor) -> Tensor:
        return (flat(first)[:, None] != flat(second)).double().mean(-1)

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        return {"right": flat(found == truth).double().mean(1)}

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        return {} if others is None else {"most frequent": others.mode(0).values.expand_as(truth)}

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        pairs = zip(true.flatten().tolist(), found.flatten().tolist(), strict=True)
        return Exhibit(cells=tuple(Cell(str(n), str(a), str(b), a == b) for n, (a, b) in enumerate(pairs) if a >= 0))


@dataclass(frozen=True)
class ClassMap(Category):
    """A class for every place of an example: a segmentation mask (height, width), or tags of a text (length,).

    ignored   the class index that the loss leaves out, such as 255 at borders or -100 at padding: it is never scored
    """

    ignored: int | None = None
    name: ClassVar = "class-map"
    noun: ClassVar = ("mask", "masks")
    entries: ClassVar = "place"
    measures: ClassVar = (Measure("right", "places right", percent=True), Measure("iou", "mean IoU"))
    thresholds: ClassVar = (Threshold("right>90%", "right", 0.9),)
    needed: ClassVar = ("right>90%",)
    rule: ClassVar = "more than 90 % of its places are right"

    def settings(self) -> dict[str, object]:
        return {name: value for name, value in super().settings().items() if value is not None}

    def allowed(self, value: Tensor, field: Field) -> str:
        return super().allowed(value if self.ignored is None else value[value != self.ignored], field)

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        classes = super().comparable(value, field, reference)
        return classes if self.ignored is None else classes.masked_fill(classes == self.ignored, -1)

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Over the places that have a class. A found place without one is wrong."""
        counted = flat(truth) >= 0
        right = (flat(found == truth) & counted).sum(1).double() / counted.sum(1).clamp_min(1)
        classes = 1 + max(int(found.max()), int(truth.max()), 0)
        guess, real = (
            one_hot(flat(value).clamp_min(0), classes).bool() & ((flat(value) >= 0) & counted)[..., None]
            for value in (found, truth)
        )
        union = (guess | real).sum(1)
        share = (guess & real).sum(1) / union.clamp_min(1)
        iou = (share * (union > 0)).sum(1) / (union > 0).sum(1).clamp_min(1)
        return {"right": right, "iou": iou.double()}

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        """The most frequent class of every place."""
        if others is None or not (others < 0).any():
            return super().guesses(truth, others)
        counts = torch.stack([(others == each).sum(0) for each in range(1 + max(int(others.max()), 0))])
        return {"most frequent": counts.argmax(0).expand_as(truth)}

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        """Pictures of a mask, with class 0 at places without a class; tags as cells without such places."""
        if true.dim() != 2:
            return super().exhibit(true, found, field)
        most = max((field.classes or 2) - 1, 1)
        first, second = (value[None].clamp_min(0).double() / most for value in (true, found))
        return Exhibit(pictures=(first, second))


@dataclass(frozen=True)
class Mask(ClassMap):
    """Which places of an example count: 1, and 0 for padding. A blank one counts them all."""

    name: ClassVar = "mask"

    def blank(self) -> int:
        return 1


@dataclass(frozen=True)
class MultiLabel(Kind):
    """Several labels at once, each 0 or 1, as binary cross-entropy takes them. Searched for as logits."""

    name: ClassVar = "multi-label"
    noun: ClassVar = ("label set", "label sets")
    measures: ClassVar = (Measure("right", "labels right", percent=True),)
    thresholds: ClassVar = (_RIGHT,)
    needed: ClassVar = ("every entry",)
    control: ClassVar = 0.9
    rule: ClassVar = "every label is right"

    def decode(self, v: Tensor, field: Field) -> Tensor:
        return v.sigmoid()

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        return (super().comparable(value, field) > 0.5).double()

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        return {"right": flat(found == truth).double().mean(1)}

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        return {} if others is None else {"most frequent": (others.mean(0) > 0.5).to(truth).expand_as(truth)}

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        pairs = zip(true.flatten().long().tolist(), found.flatten().long().tolist(), strict=True)
        return Exhibit(cells=tuple(Cell(str(n), str(a), str(b), a == b) for n, (a, b) in enumerate(pairs)))
