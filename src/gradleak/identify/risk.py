"""A cheap look before any attack: how much could this update say about the images?

    score = mean over directions of 1/2 log2(1 + s_x^2 s_i^2)       bits per pixel

s_i are singular values of the derivative of the update by the pixels, in units of the noise on the update (the known
defence's, and the rounding that is always there), s_x the spread of a pixel. To first order, and for a Gaussian prior,
it is what one update tells about a pixel (`curvature.information`, "input"); it is zero where noise covers everything.
In a large batch the mean over random directions stands for all. The point is a picture of noise or, for a client that
looks at its own update, its batch. It needs no search and no truth.

Tokens are no numbers that an update could be derived by: for texts the spans of the layers are counted (`TextRisk`).

It ranks settings; it is no verdict. What a search would find is another question: a rough landscape can hide much.
`benchmarks/risk_score.py` compares it with the PSNR of attacks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.settings import takes
from gradleak.engine import unknowns_of
from gradleak.identify.floors import PIXEL_STD, Linearisation, Local
from gradleak.identify.ledger import ledger
from gradleak.identify.rounding import rounding_of
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.predictions import gradient
from gradleak.parts.view import TargetView
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import Tokens
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.task import Batch, Task

DIRECTIONS = 128


@dataclass(frozen=True)
class Risk:
    """First-order figures of an update at one point.

    score            bits per pixel, as above
    effective_rank   (sum s_i^2)^2 / sum s_i^4 over the number of directions: 1 where all are seen equally well
    log_det          sum of log(s_x^2 s_i^2) / 2 over the directions, in nats, of those that are not zero
    gradient_norm    of the mean gradient, as the recipe gives it
    ratio            equations per unknown
    directions       number of directions used, of `unknowns`
    examples         in this update
    told_up_to       the most examples in an update that the layers' spans tell, by count (`identify.ledger`)
    """

    score: float
    effective_rank: float
    log_det: float
    gradient_norm: float
    ratio: float
    directions: int
    unknowns: int
    examples: int = 1
    told_up_to: int = 0

    @property
    def told(self) -> bool:
        """Has this update few enough examples for the spans of its layers to tell them?"""
        return self.examples <= self.told_up_to

    def __str__(self) -> str:
        return (
            f"{self.score:.1f} bits per pixel to first order, {self.ratio:.1f} equations per unknown, effective rank "
            f"{self.effective_rank:.0%} of {self.directions} directions, gradient norm {self.gradient_norm:.2g}; "
            f"spans tell up to {self.told_up_to} examples, this update has {self.examples}"
        )

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "told": self.told}


@dataclass(frozen=True)
class TextRisk:
    """What an update of texts tells by count (`identify.ledger`), before any attack.

    tokens         different rows of tokens in this update at most: (token, place), of all its texts
    tokens_up_to   so many are told by the spans of its layers
    tokens_later   so many in later steps, where B of a LoRA is still zero; 0: the same
    named          do the rows of an embedding name the tokens, however many there are?
    vocabulary     ids that a token may have
    examples       in this update
    """

    tokens: int
    tokens_up_to: int
    tokens_later: int
    named: bool
    vocabulary: int
    examples: int = 1

    @property
    def told(self) -> bool:
        """Has this update few enough tokens for the spans of its layers to tell them?"""
        return 0 < self.tokens <= self.tokens_up_to

    @property
    def score(self) -> float:
        """Bits per token: all of them where tokens are told or named, none by count elsewhere."""
        return math.log2(self.vocabulary) if self.told or self.named else 0.0

    def __str__(self) -> str:
        later = f" ({self.tokens_later} in later steps)" if self.tokens_later else ""
        told = f"spans tell everything up to {self.tokens_up_to} tokens{later}, this update has at most {self.tokens}"
        named = "; the rows of an embedding name its tokens" if self.named else ""
        return f"{self.score:.1f} bits per token by count; {told}{named}"

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "told": self.told, "score": self.score}


@takes(Linearisation)
def risk(
    task: Task,
    seen: Observation,
    knows: Knowledge = Knowledge(),
    *,
    batch: Batch | None = None,
    directions: int = DIRECTIONS,
    seed: int = 0,
    how: Linearisation,
) -> Risk | TextRisk:
    """The risk that this update bears; the other keywords are the fields of `Linearisation`. Of texts: by count.

    batch        the client's own, where the client asks; None: a picture of noise
    directions   random directions to look at, where there are more unknowns
    """
    if directions < 2 or not how.prior > 0:
        raise ValueError(f"directions must be at least 2 and prior above 0; given {directions} and {how.prior}.")
    if isinstance(task.fields["x"].kind, Tokens) and not any(map(_moves, task.fields.values())):
        return _of_texts(task, seen.num_examples, batch)
    point = _point(task, seen, knows, seed) if batch is None else batch
    count = unknowns_of(task, seen.num_examples) - sum(
        value.numel() for name, value in knows.given.items() if task.fields[name].classes is None
    )
    drawn = None
    if directions < count:
        noise = Draws(randomness.key("risk", seed)).normal((count, directions), dtype=torch.float64)
        drawn = torch.linalg.qr(noise).Q.T.contiguous()  # (k, n), orthonormal
    local = Local.at(task, seen, point, knows, how, directions=drawn)
    if not local.finite:
        raise ValueError(
            "The client's update at this point is not finite, so it has no risk score. Check the point and the weights."
        )
    units = local.whitening(0.0, rounding_of(seen))
    values = torch.linalg.svdvals(local.rows * units).double()  # (k,)
    power = (how.prior * values).square()
    positive = power[power > 0]
    squares = float(power.square().sum())
    return Risk(
        score=float(torch.log2(1 + power).mean()) / 2,
        effective_rank=float(power.sum()) ** 2 / squares / len(power) if squares > 0 else 0.0,
        log_det=float(positive.log().sum()) / 2 if len(positive) else -math.inf,
        gradient_norm=float(tree.norm(gradient(local.scene))),
        ratio=tree.size(seen.update) / count,
        directions=len(power),
        unknowns=count,
        examples=seen.num_examples,
        told_up_to=ledger(task).told_up_to,
    )


def _moves(field: Field) -> bool:
    """Is it private, and made of numbers?"""
    return field.continuous and not field.public


def _of_texts(task: Task, examples: int, batch: Batch | None) -> TextRisk:
    """By count. The client's own batch says how many tokens there are; else texts are taken to be full."""
    counted, field = ledger(task), task.fields["x"]
    if counted.problem:
        raise ValueError(f"The risk of texts is counted from the layers: {counted.problem}")
    tokens = examples * math.prod(field.shape)
    if batch is not None:
        ids = field.kind.comparable(batch["x"], field).flatten(1)  # (examples, places), -1 for padding
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        tokens = len(torch.stack([ids, places], -1)[ids >= 0].unique(dim=0))
    return TextRisk(
        tokens=tokens,
        tokens_up_to=counted.tokens_up_to,
        tokens_later=counted.tokens_later,
        named=bool(counted.bag),
        vocabulary=field.classes or 1,
        examples=examples,
    )


def _point(task: Task, observation: Observation, knows: Knowledge, seed: int) -> Batch:
    """A random batch: pixels drawn from the prior, labels read off the update."""
    blank = task.blank(observation.num_examples)
    source = Draws(randomness.key("risk point", seed))
    for stream, (name, field) in enumerate(task.fields.items()):
        if field.classes is None and field.bounded:
            noise = source.child(stream).normal(tuple(blank[name].shape), dtype=torch.float64)
            blank[name] = field.model((0.5 + PIXEL_STD * noise).clamp(0, 1).to(blank[name]))
    scene = TargetView.of(task, observation, knows)
    known = {name: value.to(blank[name].device) for name, value in knows.given.items()}
    scene = replace(scene, fields=known)
    labels = Labels(label_rule("auto"))(scene) if "y" in task.fields else {}
    return {**blank, **labels, **known}
