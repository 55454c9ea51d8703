"""Token ids: text, or categorical columns that a model embeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gradleak.scenario.kinds.base import Cell, Exhibit, Kind, Measure, Threshold

if TYPE_CHECKING:
    from gradleak.scenario.fields import Field


UNKNOWN = "\ufffd"  # stands for a place without a token in running text


@dataclass(frozen=True)
class Tokens(Kind):
    """Token ids (length,) of a vocabulary: `Field.classes` is its size.

    padding   the id that fills short texts: it is public, and never scored
    ignored   the id that a loss leaves out, such as -100 in targets of masked language modelling
    words     the text of each id, for the report

    `bag`: share of the private tokens that were found, in whatever order. `order`: share of places that are right.
    """

    padding: int | None = None
    ignored: int | None = None
    words: tuple[str, ...] = ()
    name: ClassVar = "tokens"
    noun: ClassVar = ("text", "texts")
    entries: ClassVar = "token"
    continuous: ClassVar = False
    soft: ClassVar = False
    embedded: ClassVar = True
    measures: ClassVar = (
        Measure("bag", "tokens found", percent=True),
        Measure("order", "in place", percent=True),
    )
    thresholds: ClassVar = (
        Threshold("every token", "order", 1.0, strict=False),
        Threshold("whole bag", "bag", 1.0, strict=False),
        Threshold("bag>90%", "bag", 0.9),
    )
    needed: ClassVar = ("every token",)
    control: ClassVar = 0.5  # rows of an embedding name a token once, however often it stands in a text
    rule: ClassVar = "every token is in its place"

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings().items() if value is not None and value != ()}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Tokens:
        return cls(**{**settings, "words": tuple(settings.get("words", ()))})

    def blank(self) -> int:
        return 1 if self.padding == 0 else 0

    def allowed(self, value: Tensor, field: Field) -> str:
        assert field.classes is not None
        ids = value if self.ignored is None else value[value != self.ignored]
        if ids.is_floating_point():
            return f"it is {value.dtype}; token ids are whole numbers"
        if not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < field.classes:
            return ""
        return f"it holds ids {int(ids.min())} to {int(ids.max())}; the vocabulary has {field.classes}"

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        ids = value.long()
        for filler in (self.padding, self.ignored):
            ids = ids if filler is None else ids.masked_fill(ids == filler, -1)
        return ids

    def distance(self, first: Tensor, second: Tensor) -> Tensor:
        """1 - the share of common tokens; the places decide between equal bags."""
        rows = []
        for text in first:
            pairs = second, text.expand_as(second)
            rows.append(2 - _bag(pairs[1], pairs[0]) - _bag(*pairs) + 1e-3 * (1 - _order(*pairs)))
        return torch.stack(rows)

    def same(self, first: Tensor, second: Tensor) -> Tensor:
        return (first[:, None] == second).all(-1)

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        return {"bag": _bag(found, truth), "order": _order(found, truth)}

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        """The most frequent tokens of other texts."""
        if others is None or not (others >= 0).any():
            return {}
        ids, counts = others[others >= 0].unique(return_counts=True)
        frequent = ids[counts.argsort(descending=True)][: truth.shape[-1]]
        padded = torch.nn.functional.pad(frequent, (0, truth.shape[-1] - len(frequent)), value=-1)
        return {"most frequent": padded.expand_as(truth)}

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        """The private text, with the tokens marked that were found anywhere in the text."""
        left = found[found >= 0].tolist()
        cells = []
        for place, token in enumerate(true.tolist()):
            if token < 0:
                continue
            right = token in left
            if right:
                left.remove(token)
            cells.append(Cell(str(place), self._word(token), self._word(int(found[place])), right))
        return Exhibit(cells=tuple(cells), running=True)

    def text(self, value: Tensor) -> str:
        """The words of an example, UNKNOWN where there is none; padding and unknown places at the end are left out.

        Words are separated by spaces unless some word of the vocabulary holds a space itself, as bytes do.
        """
        ids = [-1 if token == self.padding else token for token in value.tolist()]
        while ids and ids[-1] < 0:
            ids.pop()
        between = "" if any(" " in word for word in self.words) else " "
        words = (UNKNOWN if token < 0 else self._word(token) for token in ids)
        return between.join(words).replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")

    def _word(self, token: int) -> str:
        return self.words[token] if 0 <= token < len(self.words) else "-" if token < 0 else str(token)


def _order(found: Tensor, truth: Tensor) -> Tensor:
    """Share of the places with a token that are right, (N,)."""
    counted = truth >= 0
    return ((found == truth) & counted).sum(-1).double() / counted.sum(-1).clamp_min(1)


def _bag(found: Tensor, truth: Tensor) -> Tensor:
    """Share of the tokens of each text that were found, each as often as it was found, (N,)."""
    # A token counts when its number of earlier equals in the text is below how often it was found.
    equal = (truth[:, :, None] == truth[:, None, :]) & (truth >= 0)[:, :, None]
    earlier = equal.tril(-1).sum(-1)  # (N, L)
    copies = (truth[:, :, None] == found[:, None, :]).sum(-1)
    counted = truth >= 0
    return ((earlier < copies) & counted).sum(-1).double() / counted.sum(-1).clamp_min(1)
