"""Token ids: text, or categorical columns that a model embeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gradleak.core.sequences import common, pairwise_common, pairwise_edits, rouge, rouge_l
from gradleak.scenario.kinds.base import Cell, Exhibit, Kind, Measure, Threshold

if TYPE_CHECKING:
    from gradleak.scenario.fields import Field

TIE = 1e-6  # weight of what only decides between equal distances


UNKNOWN = "\ufffd"  # stands for a place without a token in running text


@dataclass(frozen=True)
class Tokens(Kind):
    """Token ids (length,) of a vocabulary: `Field.classes` is its size.

    padding   the id that fills short texts: it is public, and never scored
    ignored   the id that a loss leaves out, such as -100 in targets of masked language modelling
    words     the text of each id, for the report

    Measures, each a share:

    order     places that are right
    head      the same without the last token of the text: in a causal model no loss stands behind it
    bag       private tokens that were found, in whatever place
    rouge1, rouge2, rougel   F1 of common tokens, of common pairs of neighbours, of the longest common subsequence.
              They count ids of the tokenizer; published figures often count words

    A text is recovered with 90 % of its tokens in place. The positive control looks at the bag: it is at least as
    large as the share in place, so that it passes for every attack that orders tokens, and it passes too for one that
    names tokens without their places (token-rows). Such an attack works, and what it shows is no void run: the bag has
    a column, and texts are looked up by their bags, so that it can be "leaks in part".
    """

    padding: int | None = None
    ignored: int | None = None
    words: tuple[str, ...] = dataclass_field(default=(), repr=False)
    name: ClassVar = "tokens"
    noun: ClassVar = ("text", "texts")
    entries: ClassVar = "token"
    continuous: ClassVar = False
    soft: ClassVar = False
    embedded: ClassVar = True
    measures: ClassVar = (
        Measure("order", "tokens in place", percent=True),
        Measure("bag", "tokens found", percent=True),
        Measure("head", "tokens in place before the last", percent=True, column=False),
        Measure("rouge1", "ROUGE-1", percent=True, column=False),
        Measure("rouge2", "ROUGE-2", percent=True, column=False),
        Measure("rougel", "ROUGE-L", percent=True),
    )
    thresholds: ClassVar = (
        Threshold("exact", "order", 1.0, strict=False),
        Threshold("exact but the last", "head", 1.0, strict=False),
        Threshold("in place>=90%", "order", 0.9, strict=False),
        Threshold("whole bag", "bag", 1.0, strict=False),
        Threshold("bag>90%", "bag", 0.9),
    )
    needed: ClassVar = ("in place>=90%",)
    controlled: ClassVar = "bag"
    control: ClassVar = 0.5  # rows of an embedding name a token once, however often it stands in a text
    rule: ClassVar = "at least 90 % of its tokens are in their places"

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
        """Edits as a share of the longer text; common tokens in whatever order decide between equal ones."""
        lengths = [(ids >= 0).sum(-1) for ids in (first, second)]
        longer = torch.maximum(lengths[0][:, None], lengths[1]).clamp_min(1)
        return pairwise_edits(first, second) / longer.double() + TIE * _apart(first, second)

    def look_up(self, first: Tensor, second: Tensor) -> Tensor:
        """1 - the share of common tokens; places decide between equal bags. A bag alone can name a text."""
        placed = ((first[:, None] == second) & (second >= 0)).sum(-1) / first.shape[-1]
        return _apart(first, second) - TIE * placed.double()

    def same(self, first: Tensor, second: Tensor) -> Tensor:
        return (first[:, None] == second).all(-1)

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        return {
            "order": _order(found, truth),
            "bag": common(found, truth) / (truth >= 0).sum(-1).clamp_min(1).double(),
            "head": _order(found, _without_last(truth)),
            "rouge1": rouge(found, truth, 1),
            "rouge2": rouge(found, truth, 2),
            "rougel": rouge_l(found, truth),
        }

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        """The most frequent tokens of other texts."""
        if others is None or not (others >= 0).any():
            return {}
        ids, counts = others[others >= 0].unique(return_counts=True)
        frequent = ids[counts.argsort(descending=True)][: truth.shape[-1]]
        padded = torch.nn.functional.pad(frequent, (0, truth.shape[-1] - len(frequent)), value=-1)
        return {"most frequent": padded.expand_as(truth)}

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        """The private text: tokens in their places, tokens that were found elsewhere, and tokens that were not."""
        left = found[(found >= 0) & (found != true)].tolist()
        cells = []
        for place, token in enumerate(true.tolist()):
            if token < 0:
                continue
            right = token == int(found[place])
            elsewhere = not right and token in left
            if elsewhere:
                left.remove(token)
            cells.append(Cell(str(place), self._word(token), self._word(int(found[place])), right, elsewhere))
        return Exhibit(cells=tuple(cells), running=True, joined=self._between)

    def text(self, value: Tensor) -> str:
        """The words of an example, UNKNOWN where there is none; padding and unknown places at the end are left out.

        Words are separated by spaces unless some word of the vocabulary holds a space itself, as bytes do.
        """
        ids = [-1 if token == self.padding else token for token in value.tolist()]
        while ids and ids[-1] < 0:
            ids.pop()
        words = (UNKNOWN if token < 0 else self._word(token) for token in ids)
        return self._between.join(words).replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")

    @property
    def _between(self) -> str:
        return "" if any(" " in word for word in self.words) else " "

    def _word(self, token: int) -> str:
        if token < 0:
            return UNKNOWN if self.words else "-"
        return self.words[token] if token < len(self.words) else str(token)


def _order(found: Tensor, truth: Tensor) -> Tensor:
    """Share of the places with a token that are right, (N,)."""
    counted = truth >= 0
    return ((found == truth) & counted).sum(-1).double() / counted.sum(-1).clamp_min(1)


def _without_last(ids: Tensor) -> Tensor:
    """Texts without their last token; a text of one token keeps it, since nothing else would be left."""
    place = torch.arange(1, ids.shape[-1] + 1, device=ids.device) * (ids >= 0)
    last = place == place.amax(-1, keepdim=True)
    return ids.masked_fill(last & ((ids >= 0).sum(-1, keepdim=True) > 1), -1)


def _apart(first: Tensor, second: Tensor) -> Tensor:
    """1 - twice the common tokens over those of both, (n, m)."""
    both = (first >= 0).sum(-1)[:, None] + (second >= 0).sum(-1)
    return 1 - 2 * pairwise_common(first, second).double() / both.clamp_min(1)
