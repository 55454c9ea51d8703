"""The labels of clients, read off the signs and ratios that SecAdam and SecLion show a server.

For mean cross-entropy dL/db_c = mean_i p_ic - n_c / B: only classes that are present can be negative, and of one
example the true class is the only one. A sign keeps that. A ratio over n clients with one example each,

    mean_i g_ic / sqrt(mean_i g_ic^2),   g_ic = p_c - 1 for the k clients of class c, p_c for the others,

falls with k, so k can be read off it: the sums are hidden, the counts of labels are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.core import random as randomness
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.parts.fields import RuleDoesNotApply, last_layer
from gradleak.parts.labels.readings import Reading, Rule, in_turn
from gradleak.parts.view import TargetView


@named("sign", kind="labels", paper="ours; Zhao, Mopuri, Bilen, iDLG, 2020, on signs")
@dataclass(frozen=True)
class Sign(Rule):
    """Classes whose bias was seen as negative; without a bias those whose rows are more often negative than positive.

    One example: the only negative class, always right for a hard label. Without a bias its row is the only one whose
    signs are opposite to those of all the others, whatever signs the features have (from three classes on). Several:
    every negative class once, most negative row first, and again in turn until B: a sign shows that a class is there,
    not how often. If fewer than B are negative, a class may be there without a negative sign, below its mean
    prediction. Several examples without a bias need features that are not negative (ReLU, sigmoid).

    Margin: of the share of negative entries, from the last class named to the first not named.
    """

    def read(self, scene: TargetView) -> Reading:
        layer, examples = last_layer(scene), scene.num_examples
        rows, deltas = layer.rows.sign(), layer.deltas
        share = (rows < 0).double().mean(1)  # rows are sign(delta_c h): for h >= 0 all negative or 0, or none
        if deltas is not None:
            negative = deltas < 0
            score = torch.where(negative, -1 - share, torch.where(deltas > 0, 1 - share, -share))
        elif examples == 1 and len(rows) > 2:
            alike = rows @ rows.sum(0) - rows.square().sum(1)  # with all other rows together: below 0 for one of them
            score = alike / alike.abs().amax().clamp_min(1.0)
            negative = score < 0
        else:
            score = rows.mean(1)
            negative = score < 0
        counts = in_turn(score, min(max(1, int(negative.sum())), examples), examples).counts
        lowest, named_ = score.sort(stable=True).values, int((counts > 0).sum())
        gap = lowest[named_] - lowest[named_ - 1] if named_ < len(lowest) else lowest.new_ones(())
        return Reading(counts, gap.clamp(0, 1))


@named("ratio-counts", kind="labels", paper="ours")
@dataclass(frozen=True)
class RatioCounts(Rule):
    """How many of n clients, with one example each, have each class: SecAdam's ratio of the bias, solved for k.

    With a prediction p_c that all share, ratio(k) = (p_c - k/n) / sqrt((k/n) (1 - p_c)^2 + (1 - k/n) p_c^2 + eps^2).
    The counts add up to n with the least sum of squared differences. p_c is the mean over `dummies` images of noise at
    the weights that were sent: good for untrained networks. First rounds only: later moments are those of several
    batches. The unit of the ratio is the rate of a known defence, else the largest entry of the update; eps is that of
    a known defence in units of the gradient, else 1e-8. A class that the network rules out counts as 0.
    """

    dummies: int = 100

    def read(self, scene: TargetView) -> Reading:
        name = scene.task.classifier.bias
        if name is None or name not in scene.update:
            raise RuleDoesNotApply(
                "Label rule 'ratio-counts' reads the bias of the classifier, and none is trained: use 'sign'."
            )
        n = scene.num_examples
        known, training = scene.knows.defence, scene.knows.training
        unit = getattr(known, "rate", None) or max(float(u.abs().max()) for u in scene.update.values())
        eps = getattr(known, "eps", 1e-8) / (1.0 if training is None else training.lr)
        observed = scene.update[name].detach().to("cpu", torch.float64) / unit
        p, k = self._predicted(scene)[:, None], torch.arange(n + 1).double() / n
        ratio = (p - k) / (k * (1 - p) ** 2 + (1 - k) * p**2 + eps**2).sqrt()  # (classes, n + 1): 1 at k = 0, -1 at n
        cost = (observed[:, None] - ratio).square()
        counts, total = _cheapest(cost, n)
        second = cost.topk(2, dim=1, largest=False).values[:, 1].sum()
        return Reading(counts, (1 - total / second.clamp_min(1e-30)).clamp(0, 1))

    @torch.no_grad()
    def _predicted(self, scene: TargetView) -> Tensor:
        """The mean prediction for noise, (classes,)."""
        layer, batch = scene.task.classifier, scene.task.blank(self.dummies)
        like = scene.like
        for number, (name, (low, high)) in enumerate(scene.limits.items()):
            source = Draws(randomness.key("ratio counts", number).to(like.device))
            batch[name] = low + source.uniform(tuple(batch[name].shape), dtype=like.dtype) * (high - low)
        features = scene.task.inputs_of([layer.module], scene.weights, batch, scene.buffers)[layer.module]
        assert layer.bias is not None
        logits = torch.nn.functional.linear(features, scene.weights[layer.weight], scene.weights[layer.bias])
        return logits.to("cpu", torch.float64).softmax(-1).mean(0)


def _cheapest(cost: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Whole counts that sum to n with the least total cost (classes, n + 1): by dynamic programming over classes."""
    best = torch.full((n + 1,), torch.inf, dtype=cost.dtype)
    best[0] = 0
    chosen = []
    place = torch.arange(n + 1)
    for row in cost:
        before = place[:, None] - place  # (sum so far, count of this class) -> sum before
        tried = torch.where(before >= 0, best[before.clamp_min(0)] + row, torch.inf)
        best, count = tried.min(1)
        chosen.append(count)
    rest, counts = n, torch.zeros(len(cost), dtype=torch.long)
    for number in range(len(cost) - 1, -1, -1):
        counts[number] = chosen[number][rest]
        rest -= int(counts[number])
    return counts, best[n]
