"""The order of tokens in an encoder: texts are complete from the start, and tokens are exchanged at their places.

Attention looks both ways, so no text can be grown. But positions are added, so the bag has few tokens for each place,
and a row behind the first attention is the further outside, the more of the other tokens are wrong: tokens are
exchanged place by place for those that bring all rows of the text further inside, from many starts at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradleak.attacks.spans.text.bag import Bag
from gradleak.attacks.spans.text.order import HALF, Judge, Node
from gradleak.attacks.spans.text.readers import Passes
from gradleak.core.random import Draws
from gradleak.parts.embedded import embedding_of, name_of, unembedded

SURE, RATE, SHARP = 2.0, 0.15, 2.0  # logit of a start's token, rate of Adam, last over first sharpness of mixtures

Watch = Callable[[float], None]


@dataclass(frozen=True)
class Effort:
    """starts of a wave, waves at most, steps of mixtures, and sweeps over all places of a start at most."""

    starts: int = 32
    waves: int = 4
    steps: int = 200
    sweeps: int = 4


def exchanged(
    judge: Judge,
    passes: Passes,
    bag: Bag,
    wanted: tuple[int, int],
    draws: Draws,
    effort: Effort,
    progress: Watch = lambda share: None,
) -> list[Node]:
    """Texts whose rows are inside at every place. `wanted`: their length, and how many there are at most."""
    length, count = wanted
    candidates = [bag.at(place) for place in range(length)]
    if any(not len(each) for each in candidates):
        return []
    used = [torch.zeros(len(each)) for each in candidates]
    found: list[Node] = []
    single = math.prod(map(len, candidates)) == 1
    for wave in range(1 if single else effort.waves):
        source = draws.child(wave)
        picks = _starts(used, 1 if single else effort.starts, source)
        if not single:
            picks = _softened(judge, passes, candidates, picks, effort).unique(dim=0)
        texts = _settled(judge, passes, candidates, picks, source, effort)
        for text in texts:
            ids = torch.stack([each[number] for each, number in zip(candidates, text, strict=True)])
            rows = judge.rows(ids[None], passes)[torch.tensor(0)]  # (maps, places)
            inside = judge.share(rows, best=True) >= HALF
            if bool(inside.all()) and not any(torch.equal(node.ids, ids) for node in found):
                evidence, margin = float(judge.evidence(rows).sum()), float(judge.margin(rows).min())
                found.append(Node(ids, evidence, margin, float(rows.outside.amin(0).max()), ended=True))
                for place, number in enumerate(text.tolist()):
                    used[place][number] += 1
        progress((wave + 1) / effort.waves)
        if len(found) >= count:
            break
    return sorted(found, key=lambda node: -node.evidence)


def _softened(judge: Judge, passes: Passes, candidates: list[Tensor], picks: Tensor, effort: Effort) -> Tensor:
    """Starts moved as mixtures of the tokens of each place, by gradients, all places at once; then their largest parts.

    One step costs three passes and looks at every token of every place; an exchange costs a pass for each of them.
    """
    if unembedded(passes.task):
        return picks
    layer = embedding_of(passes.task)
    table = passes.state[name_of(passes.task, layer)]
    most = max(map(len, candidates))
    words = torch.stack([F.pad(each, (0, most - len(each)), value=int(each[0])) for each in candidates])
    open_ = torch.arange(most) < torch.tensor([len(each) for each in candidates])[:, None]  # (places, tokens)
    vectors = table[words.to(table.device)]  # (places, tokens, width)
    modules = [span.reader.module for span in judge.spans]
    known = [span.directions[: span.rank].to(table) for span in judge.spans]
    logits = F.one_hot(picks, most).to(table).mul_(SURE).requires_grad_()  # (starts, places, tokens)
    closed = torch.where(open_, 0.0, -torch.inf).to(table)
    optimiser = torch.optim.Adam([logits], lr=RATE)
    for step in range(effort.steps):
        sharp = 1 + (SHARP - 1) * step / effort.steps
        with torch.enable_grad():
            shares = (sharp * logits + closed).softmax(-1)
            rows = passes.of_vectors(torch.einsum("slt,ltw->slw", shares, vectors), layer, modules)
            far = torch.stack([_outside(rows[name], basis) for name, basis in zip(modules, known, strict=True)])
            optimiser.zero_grad()
            far.sum().backward(inputs=[logits])
        optimiser.step()
    return (logits.detach() + closed).argmax(-1).cpu()


def _outside(rows: Tensor, basis: Tensor) -> Tensor:
    """The mean share outside over places, (texts,)."""
    inside = (rows @ basis.T).square().sum(-1) / rows.square().sum(-1)
    return (1 - inside).clamp_min(1e-12).sqrt().mean(-1)


def _settled(
    judge: Judge, passes: Passes, candidates: list[Tensor], picks: Tensor, draws: Draws, effort: Effort
) -> Tensor:
    """The starts after sweeps over all places, each until nothing changes; every text once."""
    settled = list[Tensor]()
    for sweep in range(effort.sweeps):
        before = picks
        for place in draws.uniform((len(candidates),), stream=len(candidates) + sweep).argsort().tolist():
            picks = _improved(judge, passes, candidates, picks, place)
        same = (picks == before).all(1)
        settled.append(picks[same])
        picks = picks[~same].unique(dim=0)
        if not len(picks):
            break
    return torch.cat([*settled, picks]).unique(dim=0)


def _starts(used: list[Tensor], starts: int, draws: Draws) -> Tensor:
    """Tokens that no text has yet come first."""
    columns = []
    for place, counts in enumerate(used):
        noise = draws.uniform((starts, len(counts)), stream=place)
        columns.append((noise + 2 * counts.clamp_max(1)).argmin(1))
    return torch.stack(columns, dim=1)


def _improved(judge: Judge, passes: Passes, candidates: list[Tensor], picks: Tensor, place: int) -> Tensor:
    """Every start with the token at a place that brings its rows furthest inside, the others as they are."""
    count = len(candidates[place])
    if count == 1:
        return picks
    trials = picks[:, None].repeat(1, count, 1)  # (starts, tokens, length)
    trials[:, :, place] = torch.arange(count)
    ids = torch.stack([each[trials[..., number]] for number, each in enumerate(candidates)], dim=-1)
    outside = judge.rows(ids.flatten(0, 1), passes, slice(0, 1)).outside  # of the first map alone, (1, trials, places)
    best = outside.mean((0, 2)).reshape(len(picks), count).argmin(1)
    picks = picks.clone()
    picks[:, place] = best
    return picks
