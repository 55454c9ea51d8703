"""The bag: which tokens, at which places, have rows in the spans of the first maps.

A row of a first map depends on one token, and on its place where positions are added. So every token of the vocabulary
can be tested by itself:

    outside(v, i) = |h - V V^T h| / |h|,     h = the row of token v at place i

The client's tokens are inside up to rounding, all others are not. Where the rank ends, and how far inside is inside,
follows from the largest gap among the tokens' distances. What is measured is evidence,
log(median outside / outside) in the best of the maps: a map tells nothing of tokens whose delta vanishes there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak.attacks.spans.text.readers import AT_ONCE, ZERO, Passes, Span
from gradleak.attacks.spans.text.sparse import picked

DIGITS = 1e-4  # the floor of a part of a span, at most, from which tokens are picked
MUCH = 0.7  # evidence: a factor of two
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
    def ratio(self) -> float | None:
        """How many times nearer the last token inside is than the first one outside; None: all was explained."""
        return math.exp(self.gap) if math.isfinite(self.gap) else None

    @property
    def told(self) -> bool:
        return self.gap > 0

    @property
    def distinct(self) -> Tensor:
        """All tokens, each once."""
        return torch.cat(self.tokens).unique() if self.tokens else torch.zeros(0, dtype=torch.long)


EMPTY = Bag((), (), 0.0, (1.0, 1.0), ())


def bag_of(spans: Sequence[Span], passes: Passes, most: int, placed: bool) -> Bag:
    """The tokens in these spans. `most`: of all places together, at the most.

    Where positions are added to tokens, so are rows: a token at a place may lie in the span by those of the same token
    at other places, and of other tokens at this one. Then more pairs are inside than the client has.
    """
    if placed:
        most *= passes.length - passes.start
    parts = [span for span in spans if span.filled and span.floor < DIGITS]
    for span in sorted(parts, key=lambda each: -len(each.values))[:1]:
        if (bag := _explaining(span, passes, placed)).told:
            return bag
    whole = [span for span in spans if span.whole]
    return _inside(whole, [_tested(span, passes, placed) for span in whole], most) if whole else EMPTY


def _inside(spans: Sequence[Span], tested: Sequence[Tensor], most: int) -> Bag:
    """The tokens whose rows are inside. `tested`: each (ranks, places, vocabulary)."""
    chosen, outside = list[Span](), list[Tensor]()
    for span, table in zip(spans, tested, strict=True):
        best = likeliest([_gap(_evidence(rows), most)[0] for rows in table])
        chosen.append(replace(span, rank=span.ranks[best]))
        outside.append(table[best])
    evidence = torch.stack([_evidence(each) for each in outside]).amax(0)  # (places, vocabulary)
    gap, least = _gap(evidence, most)
    if gap < CLEAR:
        return EMPTY
    inside = evidence >= least
    tokens = tuple(row.nonzero()[:, 0] for row in inside)
    found = tuple(row[ids] for row, ids in zip(evidence, tokens, strict=True))
    nearest = max(outside, key=lambda table: float(_evidence(table)[inside].median()))
    level = float(nearest[inside].median()), float(nearest.median())
    return Bag(tokens, found, gap, level, tuple(chosen))


def likeliest(scores: Sequence[float]) -> int:
    """The place of the first score that no later one exceeds by much."""
    return next(place for place, score in enumerate(scores) if score + MUCH >= max(scores[place:]))


def _explaining(span: Span, passes: Passes, placed: bool) -> Bag:
    """The few tokens that explain a part of their span."""
    table = torch.cat([rows.float() for rows in _rows(span, passes, placed)])  # (vocabulary, places, width)
    ids = picked(span.directions, table.flatten(0, 1).to(span.directions.device))
    if not len(ids):
        return EMPTY
    places = table.shape[1]
    tokens = tuple(ids[ids % places == place] // places for place in range(places))
    evidence = tuple(torch.zeros(len(each)) for each in tokens)
    return Bag(tokens, evidence, math.inf, (ZERO, 1.0), (span,))


def _tested(span: Span, passes: Passes, placed: bool) -> Tensor:
    """The share outside of every token at every place, (ranks, places, vocabulary)."""
    pieces = [span.outside(rows, span.ranks).cpu() for rows in _rows(span, passes, placed)]  # (ranks, tokens, places)
    return torch.cat(pieces, dim=1).transpose(1, 2)


def _rows(span: Span, passes: Passes, placed: bool) -> Iterator[Tensor]:
    """The rows of the vocabulary at every place, (tokens, places, width), in pieces."""
    vocabulary = passes.task.fields["x"].classes
    assert vocabulary is not None
    places = passes.length - passes.start if placed else 1
    for ids in torch.arange(vocabulary).split(max(1, AT_ONCE // places)):
        yield passes.rows(ids[:, None].expand(-1, places), [span.reader.module])[span.reader.module]


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
