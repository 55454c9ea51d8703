"""One measure for the results of all members, so that attacks with different objectives can be compared.

    residual = ||visible(replay(candidate)) - visible(observed)|| / ||visible(observed)||

The replay is the client's own rule, through the defence as far as it is known, in float64; `visible` is what that
defence leaves to compare (`Defence.visible`). Of several possible orders of a client's minibatches the best counts.
Where there are too many to try, all steps are made on all examples, for every candidate alike. Where the recipe is not
granted, the scale of an update means nothing: the prediction is then scaled by the factor (from 0) that fits best.

Noise. Where the known defence adds noise, the truth itself has a residual of about `noise`: a lower residual fits the
noise. Candidates within 5 % of that level explain the update equally well, and the least rough of them is taken (the
discrepancy principle of Morozov, 1966, with the choice left to a prior of images). None of it needs the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak.attack import Composed
from gradleak.auto.traits import Case
from gradleak.engine import Engine
from gradleak.parts.matches import Cosine, Relative
from gradleak.parts.optimisers import Still
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import one_hot
from gradleak.parts.protocols import FieldRule, Match, Space
from gradleak.parts.spaces import Pixels, as_given
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining, Order
from gradleak.scenario.kinds import Tokens
from gradleak.scenario.task import Batch, Field, Task

WITHIN = 1.05  # times the noise: as good as the truth
SOLVED = 3e-7  # a residual at the rounding of float32: nothing is left to explain
NAMED = 1e-5  # the same for ids: a wrong one leaves far more, and deep models of texts round more


@dataclass(frozen=True)
class Residual:
    """The residual of one candidate.

    noise     about that of the truth
    order     the order that explains it best
    rounding  at most this is rounding: the target is solved
    """

    value: float
    noise: float
    roughness: float
    order: Order | None = None
    rounding: float = SOLVED

    @property
    def counted(self) -> float:
        """The value to compare: nothing is better than the noise."""
        return max(self.value, WITHIN * self.noise)

    @property
    def rank(self) -> tuple[float, float]:
        """The smaller the better."""
        return (self.counted, self.roughness if self.value <= WITHIN * self.noise else 0.0)

    @property
    def solved(self) -> bool:
        return self.value <= self.rounding


def residuals(case: Case, rows: Sequence[int], batches: Sequence[Batch]) -> list[Residual]:
    """One for each of these targets and candidates; infinite for a candidate that is not finite."""
    values: dict[int, Residual] = {}
    sizes = {case.targets[row].num_examples for row in rows}
    for size in sizes:  # how many steps a client makes depends on its examples
        places = [place for place, row in enumerate(rows) if case.targets[row].num_examples == size]
        measured = _of_size(case, [rows[place] for place in places], [batches[place] for place in places])
        values |= zip(places, measured, strict=True)
    return [values[place] for place in range(len(rows))]


def _of_size(case: Case, rows: Sequence[int], batches: Sequence[Batch]) -> list[Residual]:
    match: Match = Cosine() if case.knows.training is None else Relative(whole=True)
    best: list[Residual] = []
    continuous = case.task.fields["x"].continuous
    space, rounding = (Pixels(as_given), SOLVED) if continuous else (Space(), NAMED)  # ids are no unknowns
    sane = [{n: filled(value.nan_to_num(), case.task.fields[n]) for n, value in batch.items()} for batch in batches]
    finite = [all(bool(value.isfinite().all()) for value in batch.values()) for batch in batches]
    for replay in _replays(case, case.targets[rows[0]].num_examples):
        stage = Stage(space, replay, match, (), Still())
        result = Composed("residual", (stage,), Given(sane), keep="last").run(
            case.task, [case.targets[row] for row in rows], case.about(rows), engine=exactly(case)
        )
        noise = result.noise if result.noise is not None else torch.zeros_like(result.match)
        values = zip(_length(result.match[:, 0], match).tolist(), _length(noise[:, 0], match).tolist(), strict=True)
        now = [
            Residual(value if good else float("inf"), level, roughness(batch["x"], case.task), replay.order, rounding)
            for (value, level), good, batch in zip(values, finite, sane, strict=True)
        ]
        best = [min(pair, key=lambda each: each.value) for pair in zip(best, now, strict=True)] if best else now
    return best


def _length(match: Tensor, kind: Match) -> Tensor:
    """The relative length of the residual: for m = 1 - cos it is sin = sqrt(m (2 - m)), 1 from a right angle on."""
    match = match.double().nan_to_num(torch.inf)
    return torch.where(match < 1, (match * (2 - match)).clamp_min(0).sqrt(), 1.0) if kind.scale_free else match.sqrt()


def _replays(case: Case, examples: int) -> list[Replay]:
    training = case.knows.training
    if training is None or training.batch_size is None or training.batch_size >= examples:
        return [Replay()]
    if len(case.orders) > 1:
        return [Replay(order=order) for order in case.orders]
    return [Replay(training=in_whole_steps(training, examples))]


def in_whole_steps(training: LocalTraining, examples: int) -> LocalTraining:
    """As many steps, each on all examples: the recipe of a client whose order cannot be known."""
    return replace(training.public, steps=len(training.order(examples)), epochs=None, batch_size=None)


def exactly(case: Case) -> Engine:
    """The engine in float64: in float32 differences of nearly equal updates have no digits."""
    return replace(case.engine, precision="double")


def filled(value: Tensor, field: Field) -> Tensor:
    """Ids of texts with padding, or a blank token, at places where none was found (-1)."""
    kind = field.kind
    if not isinstance(kind, Tokens) or kind.ignored == -1:
        return value
    return value.masked_fill(value == -1, kind.blank() if kind.padding is None else kind.padding)


class Given(FieldRule):
    """A field rule that gives the batches of the targets, one after the other."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = iter(alike(batches))

    def reads(self, task: Task) -> frozenset[str]:
        return frozenset(task.fields)

    def __call__(self, scene: TargetView) -> Batch:
        like = scene.like
        return {
            name: value.to(like.device, like.dtype if value.is_floating_point() else None)
            for name, value in next(self.batches).items()
        }


def alike(batches: Sequence[Batch]) -> list[Batch]:
    """The same batches; if some have soft labels and others whole ones, all get soft ones."""
    soft = {n: v for batch in batches for n, v in batch.items() if n in ("y", "t") and v.is_floating_point()}

    def one(batch: Batch) -> Batch:
        return {
            name: one_hot(value, soft[name].shape[-1], soft[name].dtype)
            if name in soft and not value.is_floating_point()
            else value
            for name, value in batch.items()
        }

    return [one(batch) for batch in batches]


def roughness(x: Tensor, task: Task) -> float:
    """Mean absolute difference of neighbours, in units of the field's extent; 0 where no axis has neighbours."""
    field = task.fields["x"]
    unit = field.relative(x.double().cpu())
    steps = [unit.diff(dim=axis).abs().mean() for axis in field.kind.axes(field.shape) if unit.shape[axis] > 1]
    return float(torch.stack(steps).mean()) if steps else 0.0
