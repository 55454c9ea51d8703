"""The order of tokens in a causal model: texts grow from their first token, place by place.

The row of a map behind the first attention depends on the tokens up to its place. A prefix of a client's text has its
row in the span of that map's gradient; nearly every other continuation is outside (Petrov et al., DAGER, 2024; the
output projection of the first attention is the first such map, and half a block is enough). What counts as inside is
set by what was accepted before: half the way, in logarithms, between its level and that of texts of noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak.attacks.spans.text.bag import Bag, likeliest
from gradleak.attacks.spans.text.readers import ZERO, Passes, Span
from gradleak.core import random as randomness
from gradleak.core.random import Draws

NOISE = 256  # texts of noise, for the level of what is not the client's
NOISE_PLACES = 8
HALF, THIRD = 0.5, 1 / 3
LEAST = 0.1  # of evidence: noise and the client's are not to be told apart below
LITTLE = 1.0  # evidence that a row needs at least
PROOF = math.log(1000)  # evidence at every place that counts as a proof
READ = 3  # maps behind the first attention that are asked


@dataclass(frozen=True, eq=False)
class Node:
    """A text from its first token on.

    evidence  summed over its places and over maps: log(outside of noise / outside)
    margin    the same at the place that has least of it, in the map that shows it best
    outside   the largest share of a row, in the map that shows it best
    ended     was no longer text accepted?
    """

    ids: Tensor
    evidence: float = 0.0
    margin: float = math.inf
    outside: float = 0.0
    ended: bool = False

    @property
    def proved(self) -> bool:
        """Is every row a thousand times nearer to a span than the median row of noise?

        One token again and again proves nothing: without places its rows do not tell how often it stands there.
        """
        return len(self.ids.unique()) > 1 and PROOF <= self.margin < math.inf

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Rows:
    """How far rows are outside of each map, and how far rounding alone takes a client's: both (maps, ...)."""

    outside: Tensor
    rounding: Tensor

    def __getitem__(self, rows: Tensor) -> Rows:
        """Some of the texts, where there is a row for each."""
        return Rows(self.outside[:, rows], self.rounding[:, rows])


@dataclass(frozen=True, eq=False)
class Judge:
    """What counts as inside of several maps.

    noise  of each map, the median of texts of noise
    level  of each map, of what was accepted so far
    """

    spans: tuple[Span, ...]
    noise: Tensor
    level: Tensor

    @staticmethod
    def of(spans: Sequence[Span], passes: Passes, bag: Bag, causal: bool) -> Judge:
        """With the maps, and their ranks, that part the likeliest first token best from noise, where texts grow."""
        texts = _noise(passes, bag)
        modules = [span.reader.module for span in spans]
        noisy = passes.rows(texts, modules, last=True)
        first = passes.rows(bag.at(0)[:, None], modules, last=True)
        chosen = list[tuple[float, Span, float]]()  # how well the first tokens stand out, the map, its level of noise
        for span in spans:
            able = [rank for rank in span.ranks if rank >= len(bag.distinct)] or [max(span.ranks)]
            medians = span.outside(noisy[span.reader.module][:, 0], able).median(1).values  # (ranks,)
            clear = (medians / span.outside(first[span.reader.module][:, 0], able).amin(1)).log()
            best = likeliest(clear.tolist()) if causal else 0
            chosen.append((float(clear[best]), replace(span, rank=able[best]), float(medians[best])))
        least = HALF * max(clear for clear, _, _ in chosen) if causal else -math.inf
        kept = [(span, noise) for clear, span, noise in chosen if clear >= least]
        noise = torch.tensor([noise for _, noise in kept])
        return Judge(tuple(span for span, _ in kept), noise, noise * bag.level[0] / bag.level[1])

    def rows(self, ids: Tensor, passes: Passes, only: slice = slice(None), last: bool = False) -> Rows:
        """(maps, texts, places), or of the last place alone (maps, texts)."""
        spans = self.spans[only]
        rows = passes.rows(ids, [span.reader.module for span in spans], last)
        each = [rows[span.reader.module][:, 0] if last else rows[span.reader.module] for span in spans]
        pairs = list(zip(spans, each, strict=True))
        return Rows(
            torch.stack([span.outside(part).float().cpu() for span, part in pairs]),
            torch.stack([span.rounding(part).float().cpu() for span, part in pairs]),
        )

    def evidence(self, rows: Rows) -> Tensor:
        """log(outside of noise / outside), summed over maps."""
        return self._logs(rows.outside).sum(0)

    def margin(self, rows: Rows) -> Tensor:
        """The same in the map that shows a row best."""
        return self._logs(rows.outside).amax(0)

    def share(self, rows: Rows, only: slice = slice(None), best: bool = False) -> Tensor:
        """The evidence as a share of what a client's rows have: about 1 for these and 0 for noise; `HALF` is enough.

        best   in the map that shows a row best: the others may be blind for it
        """
        logs, expected = self._logs(rows.outside, only), self._expected(rows, only)
        if best:
            return torch.where(expected > LEAST, logs / expected, 0.0).amax(0)
        return logs.sum(0) / expected.sum(0)

    def _logs(self, outside: Tensor, only: slice = slice(None)) -> Tensor:
        return (self._beside(self.noise[only], outside).log() - outside.log()).clamp_min(0)

    def _expected(self, rows: Rows, only: slice = slice(None)) -> Tensor:
        noise, level = (self._beside(side[only], rows.outside).log() for side in (self.noise, self.level))
        # Weak directions excuse a row in part: where they are many, they would excuse any.
        excused = torch.minimum(rows.rounding.log(), level + THIRD * (noise - level))
        return (noise - torch.maximum(level, excused)).clamp_min(LEAST)

    @staticmethod
    def _beside(values: Tensor, rows: Tensor) -> Tensor:
        return values.reshape(-1, *[1] * (rows.dim() - 1))

    def having(self, accepted: Rows, count: int) -> Judge:
        """With the level of rows that were accepted, in the maps that saw them inside: of the `count` nearest ones.

        There are no more texts. Others that were accepted by mistake would raise the level, and let in yet others.
        """
        inside = self._logs(accepted.outside) >= HALF * self._expected(accepted)
        seen = torch.where(inside, accepted.outside, torch.nan).sort(1).values[:, :count]  # NaN comes last
        level = seen.nanmedian(1).values.nan_to_num(0.0).clamp_min(ZERO)
        return replace(self, level=torch.minimum(torch.maximum(self.level, level), self.noise))


def _noise(passes: Passes, bag: Bag) -> Tensor:
    """Texts of random tokens that end with one of the bag: as near to the client's as noise can be."""
    vocabulary = passes.task.fields["x"].classes
    assert vocabulary is not None
    places = min(NOISE_PLACES, passes.length - passes.start)
    draws = Draws(randomness.key("texts of noise"))
    ids = (draws.uniform((NOISE, places)) * vocabulary).long()
    last = bag.at(places - 1)
    last = last if len(last) else bag.distinct
    ids[:, -1] = last[(draws.uniform((NOISE,), stream=1) * len(last)).long()]
    return ids


Watch = Callable[[float], None]


def grown(
    judge: Judge, passes: Passes, bag: Bag, most: tuple[int, int], progress: Watch = lambda share: None
) -> list[Node]:
    """Every text that was accepted, of any length; those with `ended` have no longer one.

    most  how many texts of a length are followed, the likeliest first, and how many there are
    """
    beam, count = most
    found: list[Node] = []
    open_nodes = [Node(torch.zeros(0, dtype=torch.long))]
    places = passes.length - passes.start
    for place in range(places):
        candidates = bag.at(place)
        parents = torch.stack([node.ids for node in open_nodes])  # (texts, places)
        repeated = _repeated(parents, candidates) & (len(bag.tokens) == 1)
        rows, columns = (~repeated).nonzero(as_tuple=True)
        if not len(rows):
            break
        ids = torch.cat([parents[rows], candidates[columns][:, None]], dim=1)
        accepted, kept = _accepted(judge, passes, ids, place)
        evidence, margins = judge.evidence(accepted), judge.margin(accepted)
        best = evidence.argsort(descending=True)[:beam]
        grown_from = set(rows[kept].tolist())
        found += [replace(node, ended=number not in grown_from) for number, node in enumerate(open_nodes) if len(node)]
        progress((place + 1) / places)
        if not len(best):
            return found
        judge = judge.having(accepted[best], count)
        nodes = []
        for row in best.tolist():
            parent = open_nodes[int(rows[kept[row]])]
            nodes.append(
                Node(
                    ids[kept[row]],
                    parent.evidence + float(evidence[row]),
                    min(parent.margin, float(margins[row])),
                    max(parent.outside, float(accepted.outside[:, row].min())),
                )
            )
        open_nodes = nodes
    return found + [replace(node, ended=True) for node in open_nodes if len(node)]


def _accepted(judge: Judge, passes: Passes, ids: Tensor, place: int) -> tuple[Rows, Tensor]:
    """Of texts with one new place: the rows that were accepted, and which.

    The first map is asked alone: it costs the least and refuses most. At the first place one map is enough, since
    queries and keys have no delta there.
    """
    every, first = torch.arange(len(ids)), slice(0, 1)
    if place and len(judge.spans) > 1:
        shares = judge.share(judge.rows(ids, passes, first, last=True), first)
        every = (shares >= HALF * HALF).nonzero()[:, 0]
        if not len(every):
            return Rows(*torch.zeros(2, len(judge.spans), 0)), every
    rows = judge.rows(ids[every], passes, last=True)
    inside = (judge.share(rows, best=not place) >= HALF) & (judge.evidence(rows) >= LITTLE)
    kept = inside.nonzero()[:, 0]
    return rows[kept], every[kept]


def _repeated(parents: Tensor, candidates: Tensor) -> Tensor:
    """Is it one token again and again? Without places its rows are those of the token alone, and tell no length."""
    same = (parents[:, None] == candidates[:, None]).all(-1)
    return same & (parents.shape[1] > 0)


def chosen(nodes: Sequence[Node], lengths: Sequence[int | None]) -> list[Node | None]:
    """A text for each example: by its length where that is public, else the likeliest that ended, by its weakest place.

    In most tasks the last token of a text has no loss behind it, and is no row of any map: then all texts are found
    without it. A text that is the beginning of another one did not end.
    """
    ended = sorted((node for node in nodes if node.ended), key=lambda node: (node.margin, node.evidence), reverse=True)
    if None in lengths:
        return [*ended, *[None] * len(lengths)][: len(lengths)]
    known = [length for length in lengths if length is not None]
    sizes = Counter(map(len, ended))
    missing = max((1, 0), key=lambda each: sum((Counter(length - each for length in known) & sizes).values()))
    left, picked = sorted(nodes, key=lambda node: (node.ended, node.margin), reverse=True), list[Node | None]()
    for length in known:
        node = next((node for node in left if len(node) == length - missing), None)
        left = [each for each in left if each is not node]
        picked.append(node)
    spare = [node for node in left if node.ended]
    for example in sorted(range(len(known)), key=lambda each: -known[each]):
        if picked[example] is None:
            picked[example] = next((node for node in spare if len(node) < known[example]), None)
            spare = [each for each in spare if each is not picked[example]]
    return picked
