"""What the spans of an update tell: a certificate for each layer, without the truth.

    dL/dW = U S V^T,   rank = #{s_i > floor},   expected = rows of all examples (`identify.ledger`)
    outside = mean_p (1 - sum_i w_i (v_i . a_p)^2 / |a_p|^2),   w_i = s_i^2 / (s_i^2 + floor^2),   a_p: its rows

All directions above the floor and a gap behind them: the span is the whole span of the rows. An example whose rows lie
inside (outside = 0) belongs to it, up to the directions that the layers do not fix. The floor is the digits of the
observation (about 3e-7 of the largest singular value in float32, more where weights travel) and the noise of a known
defence. An example with a small loss has small delta: its directions sink below the floor, and it is told in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradleak.core import random as randomness
from gradleak.core.linear import jacobian as dense
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.identify.floors import along
from gradleak.identify.ledger import Entry, ledger
from gradleak.identify.rounding import rounding_of, spectral_spread
from gradleak.parts.predictions import assumed_in, gradient, noise_share
from gradleak.parts.row_space import plain, rows
from gradleak.parts.view import TargetView
from gradleak.scenario.derivatives import double_backward_safe
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.task import Batch, Task, TaskError, float32_products

ROUNDINGS = 2.5  # of the client's arithmetic: 3e-7 in float32
LEAST = 1e-13  # of the largest singular value: what a decomposition in float64 resolves
EXACT, PROBES, BLOCK = 4096, 256, 32  # entries of an example for all directions; random directions else; at a time


@dataclass(frozen=True)
class Told:
    """What one layer's gradient tells.

    expected   rows of all examples together: the rank if everything is told
    rank       singular values above the floor
    floor      share of the largest singular value that counts as zero
    gap        the `expected`-th singular value over the next; None where there is no next, or it is zero
    outside    for each example, share of its rows outside the span; 0: the layer agrees with it
    above      for each example, share of its rows' energy in directions above the floor
    fixed      for each example, directions in which no move leaves its rows in the span; at most `probed`
    probed     directions that were tried: all `unknowns`, or random ones of a large example
    """

    layer: str
    expected: int
    rank: int
    floor: float
    gap: float | None
    outside: tuple[float, ...] = ()
    above: tuple[float, ...] = ()
    fixed: tuple[int, ...] = ()
    probed: int = 0
    unknowns: int = 0

    @property
    def share(self) -> float:
        """Of the expected directions, above the floor."""
        return min(1.0, self.rank / self.expected) if self.expected else 0.0

    @property
    def whole(self) -> bool:
        """Is the span that of all rows?"""
        return self.rank == self.expected

    @property
    def determined(self) -> tuple[bool, ...]:
        """For each example: does this layer fix every direction, locally? Never by random directions."""
        return tuple(count == self.unknowns for count in self.fixed)

    def __str__(self) -> str:
        gap = "no gap to see" if self.gap is None else f"gap {self.gap:.1e}"
        text = f"{self.layer}: {self.rank} of {self.expected} directions above {self.floor:.0e}, {gap}"
        if self.outside:
            text += f"; outside {', '.join(f'{value:.1e}' for value in self.outside)}"
        if self.fixed:
            counts = ", ".join(("at least " if n == self.probed < self.unknowns else "") + str(n) for n in self.fixed)
            text += f"; fixed {counts} of {self.unknowns} directions"
        return text

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "share": self.share, "determined": self.determined}


@dataclass(frozen=True, eq=False)
class _Span:
    """The span that a layer's gradient gives: s (k,) as shares of the largest, v (k, inputs), and the floor."""

    entry: Entry
    values: Tensor
    directions: Tensor
    floor: float

    def rows(self, task: Task, inputs: Tensor) -> Tensor:
        """(examples, places, inputs), in double precision; centred where the gradient spans differences."""
        split = rows(task.model.get_submodule(self.entry.layers[0]), inputs).double()
        split = split.reshape(len(inputs), -1, split.shape[-1])
        over = {"": (), "batch": (0, 1), "example": (1,)}[self.entry.centred]
        return split - split.mean(over, keepdim=True) if over else split

    def inside(self, split: Tensor, soft: bool) -> Tensor:
        """(examples,): mean over rows of the share of energy inside."""
        power = (split @ self.directions.T).square()
        squares = self.values.square()
        weight = squares / (squares + self.floor**2) if soft else (self.values > self.floor).double()
        energy = split.square().sum(-1)
        return torch.where(energy > 0, (power * weight).sum(-1) / energy, 1.0).mean(-1)


def told(
    task: Task,
    seen: Observation,
    knows: Knowledge = Knowledge(),
    layers: Sequence[str] = (),
    batch: Batch | None = None,
    *,
    jacobian: bool = False,
) -> tuple[Told, ...]:
    """What each layer's span tells about the examples behind an update.

    layers     names of modules; none: every one that tells so many examples (`ledger`)
    batch      a reconstruction of all examples, to be tested against the spans
    jacobian   also count the directions of each example that the layer fixes

        for line in told(task, seen, knows, batch=reconstruction.target(0)):
            print(line)
    """
    work, scene, spans = _spans(task, seen, knows, layers)
    if batch is None:
        if jacobian:
            raise ValueError("jacobian=True needs a batch: it asks how an example can move. Pass batch=.")
        return tuple(_line(span, seen.num_examples) for span in spans)
    values = _checked(work, seen, batch)
    caught = _inputs(work, scene, spans, values)
    found = []
    for span in spans:
        split = span.rows(work, caught[span.entry.layers[0]])
        outside = (1 - span.inside(split, soft=True)).clamp(0, 1)
        line = replace(
            _line(span, seen.num_examples),
            outside=tuple(outside.tolist()),
            above=tuple(span.inside(split, soft=False).tolist()),
        )
        if jacobian:
            line = replace(line, **_fixed(work, scene, (span,), values, rounding_of(seen).rank))
        found.append(line)
    return tuple(found)


def fixed_directions(
    task: Task, seen: Observation, batch: Batch, knows: Knowledge = Knowledge(), layers: Sequence[str] = ()
) -> tuple[int, ...]:
    """For each example, directions that the spans of all these layers fix together.

    As many as it has numbers: determined, locally. Beyond 4,096 numbers only 256 random directions are tried, and 256
    means at least 256.
    """
    work, scene, spans = _spans(task, seen, knows, layers)
    return tuple(_fixed(work, scene, spans, _checked(work, seen, batch), rounding_of(seen).rank)["fixed"])


def _spans(
    task: Task, seen: Observation, knows: Knowledge, layers: Sequence[str]
) -> tuple[Task, TargetView, tuple[_Span, ...]]:
    fits(task, [seen])
    counted = ledger(task)
    chosen = [entry for entry in counted.entries if not layers or set(entry.layers) & set(layers)]
    if unknown := set(layers) - {name for entry in chosen for name in entry.layers}:
        known = ", ".join(name for entry in counted.entries for name in entry.layers)
        raise ValueError(f"No trained linear map is called {', '.join(sorted(unknown))}. There are: {known}.")
    able = [each for each in chosen if all(plain(task.model.get_submodule(name)) for name in each.layers)]
    if layers and (refused := [each.name for each in chosen if each not in able or each.reason]):
        raise TaskError(
            f"unsupported: {', '.join(refused)} give no rows to compare. Choose convolutions of one group with zero "
            "padding, or linear layers, that are trained and run once (`ledger` lists them)."
        )
    work = task.to(next(iter(seen.update.values())).device, torch.float64)
    scene = TargetView.of(work, seen, knows)
    kept = able if layers else [each for each in able if each.equations(seen.num_examples)]
    return work, scene, tuple(_span(each, seen, scene) for each in kept)


def _span(entry: Entry, seen: Observation, scene: TargetView) -> _Span:
    """The decomposition of one layer's gradient."""
    update = assumed_in(scene).visible(gradient(scene), scene)
    matrix = torch.cat([update[name].flatten(1) for name in entry.weights]).double()  # (outputs, inputs)
    _, values, directions = torch.linalg.svd(matrix, full_matrices=False)
    largest = float(values[0]) or 1.0
    noise = noise_share(scene, entry.weights)
    rounding = rounding_of(_only(seen, entry.weights))
    computed = min(rounding.wire, torch.finfo(torch.float32).eps)
    spread = spectral_spread(matrix, largest)
    floor = max(LEAST, ROUNDINGS * computed + (rounding.wire + noise) * spread)
    return _Span(entry, values / largest, directions, floor)


def _only(seen: Observation, names: Sequence[str]) -> Observation:
    """The observation of a few tensors, for their own digits."""
    pick: Params = {name: seen.update[name] for name in names}
    return replace(seen, update=pick, weights={name: seen.weights[name] for name in names})


def _line(span: _Span, examples: int) -> Told:
    expected, values = span.entry.rank(examples), span.values
    following = float(values[expected]) if expected < len(values) else 0.0
    gap = float(values[expected - 1]) / following if following and expected else None
    return Told(span.entry.name, expected, int((values > span.floor).sum()), span.floor, gap)


def _checked(work: Task, seen: Observation, batch: Batch) -> Batch:
    """The batch by the task's fields, in double precision."""
    like = next(iter(work.model.parameters()))
    blank = work.blank(seen.num_examples)
    if short := [name for name, value in batch.items() if len(value) != seen.num_examples]:
        raise TaskError(
            f"The batch has {len(batch[short[0]])} examples in {short[0]!r}; observation {seen.key!r} has "
            f"{seen.num_examples}. Pass one target, such as Reconstruction.target(index)."
        )
    given = {name: batch[name] for name in work.fields if name in batch}
    return blank | {n: v.to(like.device, like.dtype if v.is_floating_point() else v.dtype) for n, v in given.items()}


def _inputs(work: Task, scene: TargetView, spans: Sequence[_Span], batch: Batch) -> Batch:
    names = [span.entry.layers[0] for span in spans]
    with float32_products(), torch.no_grad():
        return work.inputs_of(names, scene.weights, batch, scene.buffers, whole=False)


def _fixed(work: Task, scene: TargetView, spans: Sequence[_Span], batch: Batch, tolerance: float) -> dict[str, Any]:
    """The rank of the derivative of what lies outside the spans, for each example alone, and the directions tried."""
    if any(span.entry.centred == "batch" for span in spans):
        raise TaskError(
            "unsupported: BatchNorm in training mode mixes the examples, so none moves alone. Ask without the Jacobian."
        )
    names = [name for name, field in work.fields.items() if field.continuous and name != work.target]
    if not names:
        raise TaskError("unsupported: no field of the task holds numbers that can move. Ask without the Jacobian.")
    name = "x" if "x" in names else names[0]
    modules = [span.entry.layers[0] for span in spans]
    found = []
    for index in range(len(batch[name])):
        example = {each: value[index : index + 1] for each, value in batch.items()}

        def residual(flat: Tensor, example: Batch = example) -> Tensor:
            moved = {**example, name: flat.reshape(example[name].shape)}
            caught = work.inputs_of(modules, scene.weights, moved, scene.buffers, whole=False)
            return torch.cat([_sketch(span, span.rows(work, caught[span.entry.layers[0]]), flat) for span in spans])

        point = example[name].flatten()
        with float32_products(), double_backward_safe(), torch.no_grad():
            if len(point) <= EXACT:
                slopes = dense(residual, point, BLOCK)
            else:
                drawn = Draws(randomness.key("told")).normal((PROBES, len(point)), dtype=point.dtype).to(point)
                slopes = along(residual, point, drawn, BLOCK)
        values = torch.linalg.svdvals(slopes)
        found.append(int((values > tolerance * values[0]).sum()))
    return {"fixed": tuple(found), "probed": len(slopes), "unknowns": len(point)}


def _sketch(span: _Span, split: Tensor, unknown: Tensor) -> Tensor:
    """What lies outside the span, relative to the rows, added up with random signs to twice as many as the unknowns."""
    known = span.directions[span.values > span.floor]
    outside = (split - (split @ known.T) @ known).flatten() / torch.linalg.vector_norm(split)
    buckets = 2 * min(unknown.numel(), EXACT)
    if outside.numel() <= buckets:
        return outside
    signs = randomness.signs("told", outside.numel(), outside.device, outside.dtype)
    padded = torch.nn.functional.pad(outside * signs, (0, -outside.numel() % buckets))
    return padded.reshape(-1, buckets).sum(0)
