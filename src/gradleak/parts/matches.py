"""Distances between a predicted and the observed update.

An update has as many entries as the network has parameters, so a step costs passes over it. `distance` is
`reduce(residual(...))` in few passes, with its derivative written out; least-squares solvers take `residual`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gradleak.core import tree
from gradleak.core.random import signs
from gradleak.core.tree import Params
from gradleak.parts.protocols import Match, delegates


@dataclass(frozen=True)
class SquaredError(Match):
    """sum over all entries of (predicted - observed)^2; no mean, no weights."""

    def distance(self, predicted: Params, observed: Params) -> Tensor:
        return _squared_distances(predicted, observed).sum()


@dataclass(frozen=True)
class MeanSquaredError(Match):
    """The mean over tensors of ||predicted - observed||^2, each a sum over its entries (GGL)."""

    def residual(self, predicted: Params, observed: Params) -> Params:
        return tree.scale(tree.subtract(predicted, observed), 1 / math.sqrt(len(observed)))


@dataclass(frozen=True)
class Relative(Match):
    """Mean over all entries of ((predicted - observed) / RMS of the observed tensor)^2: every tensor in its own unit.

    Noise of relative size c gives c^2. The unit of a tensor is at least `floor` times the RMS of the whole update: a
    tensor of zeros counts too, since the prediction must be small there. `whole`: the RMS of the whole update is the
    unit of all tensors, which is right if all carry the same noise.
    """

    floor: float = 1e-6
    whole: bool = False

    def residual(self, predicted: Params, observed: Params) -> Params:
        return tree.map(lambda p, o, each: (p - o) * each, predicted, observed, self.factors(observed))

    def distance(self, predicted: Params, observed: Params) -> Tensor:
        factors = self.factors(observed)
        row = torch.stack([factors[name] for name in predicted])
        return (_squared_distances(predicted, observed) * row.square()).sum()

    def factors(self, observed: Params) -> Params:
        """One over the unit of each tensor, and over the root of all entries: 0-d, constants."""
        lengths = [torch.linalg.vector_norm(o.detach()) for o in observed.values()]
        entries = tree.size(observed)
        unit = torch.linalg.vector_norm(torch.stack(lengths)) / math.sqrt(entries)
        if not self.whole:
            units = [length / math.sqrt(o.numel()) for length, o in zip(lengths, observed.values())]
            unit = torch.maximum(torch.stack(units), self.floor * unit)
        row = tree.safe_inverse(unit) / math.sqrt(entries)  # all tensors at once: every operation costs the host
        return dict(zip(observed, row.expand(len(observed)).unbind()))


@dataclass(frozen=True)
class LayerWeighted(Match):
    """sum over layers l = 1, 2, ... of exp(-(l - 1) fall) ||predicted - observed||^2: the first layer counts most.

    A layer's weight and bias share their factor. Layers are in the order of the model's parameters, which is that of
    the forward pass if the model builds its modules in this order.
    """

    fall: float = 1.0

    def residual(self, predicted: Params, observed: Params) -> Params:
        layers = layers_of(predicted)
        return {
            name: math.exp(-0.5 * self.fall * layers[name]) * (value - observed[name])
            for name, value in predicted.items()
        }


def layers_of(params: Params) -> dict[str, int]:
    """The number of the layer of each parameter, from 0 in every round."""
    order: dict[str, dict[str, int]] = {}
    numbers = {}
    for name in params:
        a_round, _, parameter = name.rpartition("/")
        layers = order.setdefault(a_round, {})
        numbers[name] = layers.setdefault(parameter.rpartition(".")[0], len(layers))
    return numbers


@dataclass(frozen=True)
class LayerNorms(Match):
    """sum over tensors of ||predicted - observed||_2, not squared (GradInversion)."""

    squares: ClassVar[bool] = False

    def reduce(self, residual: Params) -> Tensor:
        return torch.stack([tree.norm({"": value}) for value in tree.leaves(residual)]).sum()


@dataclass(frozen=True)
class Cosine(Match):
    """1 - cos over the concatenation of all tensors, as half the squared distance of unit vectors.

    Equal to 1 - cos in exact arithmetic. In float32 it is accurate near zero, where 1 - cos has no digits left. It is a
    sum of squares, so least-squares solvers can use it.
    """

    scale_free: ClassVar[bool] = True

    def prepare(self, observed: Params) -> Params:
        return tree.scale(observed, tree.safe_inverse(tree.norm(observed)))

    def residual(self, predicted: Params, observed: Params) -> Params:
        return tree.scale(tree.subtract(self.prepare(predicted), observed), math.sqrt(0.5))

    def distance(self, predicted: Params, observed: Params) -> Tensor:
        result: Tensor = _CosineDistance.apply(*predicted.values(), *(observed[name] for name in predicted))[0]
        return result


@dataclass(frozen=True)
class RowCosine(Match):
    """Mean over rows of 1 - cos (or 1 - |cos|), for `Representation`: one row, and one residual, per example."""

    absolute: bool = False
    squares: ClassVar[bool] = False
    scale_free: ClassVar[bool] = True
    per_example: ClassVar[bool] = True

    def prepare(self, observed: Params) -> Params:
        return tree.map(lambda o: o * tree.safe_inverse(tree.safe_sqrt(o.square().sum(-1, keepdim=True))), observed)

    def residual(self, predicted: Params, observed: Params) -> Params:
        def rows(p: Tensor, o: Tensor) -> Tensor:
            cosine = (p * o).sum(-1) / tree.safe_sqrt(p.square().sum(-1)).clamp_min(1e-15)
            return 1 - (cosine.abs() if self.absolute else cosine)

        return tree.map(rows, predicted, observed)

    def reduce(self, residual: Params) -> Tensor:
        return tree.flatten(residual).mean()


@delegates("match")
@dataclass(frozen=True)
class Wrapped(Match):
    """A match around another one: the inner match answers for all that a subclass does not override."""

    match: Match


@dataclass(frozen=True)
class Scaled(Wrapped):
    """Another match times a factor: the weight of the matching term against the priors."""

    factor: float

    def residual(self, predicted: Params, observed: Params) -> Params:
        residual = self.match.residual(predicted, observed)
        return tree.scale(residual, math.sqrt(self.factor)) if self.squares else residual

    def reduce(self, residual: Params) -> Tensor:
        return self.match.reduce(residual) if self.squares else self.factor * self.match.reduce(residual)

    def distance(self, predicted: Params, observed: Params) -> Tensor:
        return self.factor * self.match.distance(predicted, observed)


@dataclass(frozen=True)
class Sketched(Wrapped):
    """Another match whose residual is reduced to `rows` sums of entries with random signs.

    Each row sums every `rows`-th entry, so a Jacobian has `rows` rows for a network of any size. The sum of squares is
    right on average, and zero where the residual is zero: a solution of the match solves the sketch.
    """

    rows: int
    per_example: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.match.squares or self.rows < 1:
            raise ValueError(f"A sketch needs a match that squares and at least one row; given {self}.")

    def residual(self, predicted: Params, observed: Params) -> Params:
        entries = tree.flatten(self.match.residual(predicted, observed))
        signed = entries * signs("sketch", entries.shape[0], entries.device, entries.dtype)
        folded = F.pad(signed, (0, -entries.shape[0] % self.rows)).reshape(-1, self.rows)
        return {"rows": folded.sum(0)}

    def equations(self, entries: int) -> int:
        return self.rows

    def reduce(self, residual: Params) -> Tensor:
        return tree.squared_norm(residual)

    def distance(self, predicted: Params, observed: Params) -> Tensor:
        return self.reduce(self.residual(predicted, observed))


class _SquaredDistances(torch.autograd.Function):
    """sum (p - o)^2 of each of several tensors, as one row; the o are constant.

    One function for all of them: under vmap every call costs milliseconds on the host.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        half = len(tensors) // 2
        apart = [p - o for p, o in zip(tensors[:half], tensors[half:])]
        return torch.stack([torch.linalg.vector_norm(each).square() for each in apart]), *apart

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        apart = ctx.saved_tensors
        return (*[each * slope for each, slope in zip(apart, (2 * grad).unbind())], *[None] * len(apart))


def _squared_distances(predicted: Params, observed: Params) -> Tensor:
    """(tensors,): in the order of the prediction's names."""
    row: Tensor = _SquaredDistances.apply(*predicted.values(), *(observed[name] for name in predicted))[0]
    return row


class _CosineDistance(torch.autograd.Function):
    """1/2 ||p/|p| - o||^2 over several tensors; the o are constant and together of length one.

    With u = p/|p| and d the distance, du-ward: d/dp = ((1 - <u, u - o>) u - o) / |p|, and <u, u - o> = d for unit o.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        predicted, observed = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        lengths = torch.stack([torch.linalg.vector_norm(p) for p in predicted])
        inverse = tree.safe_inverse(torch.linalg.vector_norm(lengths))
        apart = [torch.linalg.vector_norm(torch.addcmul(o, p, inverse, value=-1)) for p, o in zip(predicted, observed)]
        # A prediction of zero has no direction: it counts as orthogonal, not as half-way there.
        return torch.where(inverse > 0, 0.5 * torch.stack(apart).square().sum(), 1.0), inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        *tensors, distance, inverse = ctx.saved_tensors
        half = len(tensors) // 2
        along, across = (1 - distance) * inverse.square() * grad, -inverse * grad
        down = [torch.addcmul(o * across, p, along) for p, o in zip(tensors[:half], tensors[half:])]
        return (*down, *[None] * half)
