"""The base class of label rules, their premises, and the ways from scores of classes to whole counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradleak.parts.fields import RuleDoesNotApply, last_layer
from gradleak.parts.protocols import Needs
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.rules import SGD


@dataclass(frozen=True, eq=False)
class Reading:
    """The counts that a rule reads off, and how clear they are.

    `margin`: 1 for clients that meet the premises of the rule, 0 for a toss-up. Label smoothing, mixup, noise, and
    clipping with noise lower it.
    """

    counts: Tensor  # (classes,), whole, sum B
    margin: Tensor  # 0-d, in [0, 1]


@dataclass(frozen=True)
class Rule:
    """A label rule: each implements `read`, from which `counts` (see `LabelRule`) and `margin` follow."""

    needs: ClassVar[Needs] = frozenset()

    def read(self, scene: TargetView) -> Reading:
        raise NotImplementedError

    def counts(self, scene: TargetView) -> Tensor:
        return self.read(scene).counts.to(scene.like.device)

    def margin(self, scene: TargetView) -> Tensor:
        return self.read(scene).margin


# --- premises ---------------------------------------------------------------------------------------------------------


def bias_gradient(scene: TargetView, rule: str) -> Tensor:
    """dL/db, (classes,), for a rule that reads nothing else."""
    deltas = last_layer(scene).deltas
    if deltas is None:
        raise RuleDoesNotApply(
            f"Label rule {rule!r} reads the gradient of the classifier's bias, and {scene.task.classifier.module!r} "
            "has none that is trained. Rules that do without: 'row-products' and 'row-sum' (one example), "
            "'row-minimum', 'llg', 'llg-star', 'llg-plus'; 'auto' picks one."
        )
    return deltas


def demand_one_example(scene: TargetView, rule: str) -> None:
    """Refuse batches, for a rule that holds for one example."""
    if scene.num_examples != 1:
        raise RuleDoesNotApply(
            f"Label rule {rule!r} holds for one example; this client has {scene.num_examples}. Rules for several: "
            "'ilrg', 'bias-counts', 'bias-corrected', 'bias-sign', 'llg', 'llg-star', 'llg-plus', 'row-minimum'; "
            "'auto' picks one."
        )


def demand_training(scene: TargetView, rule: str) -> LocalTraining:
    """The recipe, without which a rule that compares absolute values refuses to read."""
    if scene.knows.training is None:
        raise MissingKnowledge(
            f"Label rule {rule!r} compares absolute values, and an update is lr times a gradient: pass "
            "Knowledge(training=LocalTraining(lr=...)), or use 'bias-counts', 'bias-corrected' or 'llg'."
        )
    return scene.knows.training


def scale_is_known(scene: TargetView) -> bool:
    """Is `gradient(scene)` a mean gradient of the right length, as far as the attacker can tell?"""
    training = scene.knows.training
    if training is None or scene.knows.defence is not None or not isinstance(training.optimiser, SGD):
        return False
    return not training.optimiser.momentum or len(training.order(scene.num_examples)) == 1


# --- from scores to counts --------------------------------------------------------------------------------------------


def in_turn(scores: Tensor, candidates: int, examples: int) -> Reading:
    """One label for each of the `candidates` classes of lowest score, lowest first, and again from the start until B.

    Margin: from the last class named to the first not named, in units of the former; 1 if the latter is positive.
    """
    lowest, order = scores.sort(stable=True)
    counts = torch.zeros_like(order)
    counts[order[:candidates]] = examples // candidates
    counts[order[: examples % candidates]] += 1
    named = int((counts > 0).sum())
    if named == len(lowest):
        return Reading(counts, lowest.new_ones(()))
    last, following = lowest[named - 1], lowest[named]
    return Reading(counts, torch.where(last < 0, (following - last) / -last, 0.0).nan_to_num().clamp(0, 1))


def greedy(scores: Tensor, raw: Tensor, impact: Tensor, examples: int) -> Reading:
    """LLG's two steps: every class with raw < 0 once, most negative first; then, until B, always the lowest score.

    Each label raises the score of its class by -impact > 0, so the t-th label of class c has the score
    scores_c - t * impact, and taking the lowest score B times gives the B lowest entries of that table.
    Margin: from the last label named to the next one, in units of one example.
    """
    step = -impact.clamp(max=0)
    first = raw.argsort(stable=True)[: min(examples, int((raw < 0).sum()))]
    counts = torch.zeros_like(raw, dtype=torch.long)
    counts[first] = 1
    rest = examples - len(first)
    table = (scores + counts * step)[:, None] + torch.arange(rest + 1) * step  # (classes, rest + 1)
    values, entries = table.flatten().sort(stable=True)
    counts += torch.bincount(entries[:rest] // (rest + 1), minlength=len(raw))
    last = values[rest - 1] if rest else scores[first].max()
    return Reading(counts, torch.where(step > 0, (values[rest] - last) / step, 0.0).nan_to_num().clamp(0, 1))


def rounded_counts(real: Tensor, examples: int) -> Reading:
    """`whole_counts`. Margin: 1 if the real counts are whole, 0 if one is half a label or more away."""
    counts = whole_counts(real, examples)
    return Reading(counts, (1 - 2 * (real - counts).abs().max()).clamp(0, 1))


def whole_counts(real: Tensor, examples: int) -> Tensor:
    """iLRG's whole numbers: negatives are 0; round; more than B is 0; then repair the sum to B. (classes,)

    The repair takes units from the entries that were rounded up furthest, or gives units to those rounded down
    furthest: the t-th unit changes the error of an entry to rounded +- t - real, and the best units are moved.
    """
    rounded = real.clamp_min(0).round()
    rounded = torch.where(rounded > examples, 0.0, rounded)
    missing = examples - int(rounded.sum())
    error = (rounded - real)[:, None]
    units = torch.arange(max(missing, int(rounded.max()), 1))
    if missing > 0:
        cost, sign = error + units, 1
    else:
        cost, sign = torch.where(units < rounded[:, None], units - error, torch.inf), -1  # below 0 nothing is taken
    moved = cost.flatten().argsort(stable=True)[: abs(missing)] // len(units)
    return rounded.long() + sign * torch.bincount(moved, minlength=len(real))
