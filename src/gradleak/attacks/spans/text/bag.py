"""The bag: which tokens, at which places, have rows in the spans of the first maps.

A row of a first map depends on one token, and on its place where positions are added. So every token of the vocabulary
can be tested by itself:

    outside(v, i) = |h - V V^T h| / |h|,     h = the row of token v at place i

The client's tokens are inside up to rounding, all others are not. Where the rank ends, and how far inside is inside,
follows from the largest gap among the tokens' distances: nothing is a fixed tolerance. What is measured is evidence,
log(median outside / outside) in the best of the maps: a map tells nothing of tokens whose delta vanishes there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak.attacks.spans.text.readers import Passes, Span

PLACES_AT_ONCE = 256  # of a text, while a vocabulary is tested
CLEAR = math.log(1.5)  # the least gap in evidence between the last token inside and the first one outside


@dataclass(frozen=True, eq=False)
class Bag:
    """Tokens by place: `tokens[i]` for place i, or one entry for all places where rows do not depend on them.

    evidence  of each token, as in `tokens`
    gap       in evidence, between the last token inside and the first one outside; 0: none was told
    level     the share outside of tokens that are inside, by median, with that of all tokens: (inside, all)
    spans     of the first maps, with the ranks that part the tokens best
    """

    tokens: tuple[Tensor, ...]
    evidence: tuple[Tensor, ...]
    gap: float
    level: tuple[float, float]
    spans: tuple[Span, ...]

    def at(self, place: int) -> Tensor:
        return self.tokens[place if len(self.tokens) > 1 else 0]

    @property
    def told(self) -> bool:
        return self.gap > 0

    @property
    def distinct(self) -> Tensor:
        """All tokens, each once."""
        return torch.cat(self.tokens).unique() if self.tokens else torch.zeros(0, dtype=torch.long)


def bag_of(spans: Sequence[Span], passes: Passes, most: int, placed: bool) -> Bag:
    """The tokens in these spans. `most`: of all places together, at the most.

    Where positions are added to tokens, so are rows: a token at a place may lie in the span by those of the same token
    at other places, and of other tokens at this one. Then more pairs are inside than the client has.
    """
    if placed:
        most *= passes.length - passes.start
    tested = [_tested(span, passes, placed) for span in spans]  # each (ranks, places, vocabulary)
    chosen, outside = list[Span](), list[Tensor]()
    for span, table in zip(spans, tested, strict=True):
        best = max(range(len(span.ranks)), key=lambda row: _gap(_evidence(table[row]), most)[0])
        chosen.append(replace(span, rank=span.ranks[best]))
        outside.append(table[best])
    evidence = torch.stack([_evidence(each) for each in outside]).amax(0)  # (places, vocabulary)
    gap, least = _gap(evidence, most)
    inside = evidence >= least
    tokens = tuple(row.nonzero()[:, 0] for row in inside)
    if gap < CLEAR:
        return Bag((), (), 0.0, (1.0, 1.0), tuple(chosen))
    best_span = max(outside, key=lambda table: float(_evidence(table)[inside].median()))
    level = float(best_span[inside].median()), float(best_span.median())
    found = tuple(row[ids] for row, ids in zip(evidence, tokens, strict=True))
    return Bag(tokens, found, gap, level, tuple(chosen))


def _tested(span: Span, passes: Passes, placed: bool) -> Tensor:
    """The share outside of every token at every place, (ranks, places, vocabulary)."""
    vocabulary = passes.task.fields["x"].classes
    assert vocabulary is not None
    places = passes.length - passes.start if placed else 1
    module = span.reader.module
    pieces = []
    for ids in torch.arange(vocabulary).split(max(1, 8 * PLACES_AT_ONCE // places)):
        rows = passes.rows(ids[:, None].expand(-1, places), [module])[module]
        pieces.append(span.outside(rows, span.ranks).cpu())  # (ranks, tokens, places)
    return torch.cat(pieces, dim=1).transpose(1, 2)


def _evidence(outside: Tensor) -> Tensor:
    return (outside.median().log() - outside.log()).float()


def _gap(evidence: Tensor, most: int) -> tuple[float, float]:
    """The largest drop among the `most` + 1 largest, and the least evidence before it."""
    values = evidence.flatten().topk(min(most, evidence.numel() // 2) + 1).values
    if len(values) < 2:
        return 0.0, math.inf
    drops = values[:-1] - values[1:]
    place = int(drops.argmax())
    return float(drops[place]), float(values[place])
