"""Distances between a predicted and the observed update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak import tree
from gradleak.attack import Match
from gradleak.tree import Params


@dataclass(frozen=True)
class SquaredError:
    """sum over all entries of (predicted - observed)^2; no mean, no weights."""

    squares: bool = True
    scale_free: bool = False

    def prepare(self, observed: Params) -> Params:
        return observed

    def residual(self, predicted: Params, observed: Params) -> Params:
        return tree.subtract(predicted, observed)

    def reduce(self, residual: Params) -> Tensor:
        return tree.squared_norm(residual)


@dataclass(frozen=True)
class LayerNorms:
    """sum over tensors of ||predicted - observed||_2, not squared (GradInversion)."""

    squares: bool = False
    scale_free: bool = False

    def prepare(self, observed: Params) -> Params:
        return observed

    def residual(self, predicted: Params, observed: Params) -> Params:
        return tree.subtract(predicted, observed)

    def reduce(self, residual: Params) -> Tensor:
        return torch.stack([tree.norm({"": value}) for value in tree.leaves(residual)]).sum()


def _unit(params: Params) -> Params:
    """Divided by the norm over all tensors; an all-zero tree stays zero."""
    length = tree.norm(params)
    return tree.scale(params, torch.where(length > 0, 1 / torch.where(length > 0, length, 1.0), 0.0))


@dataclass(frozen=True)
class Cosine:
    """1 - cos over the concatenation of all tensors, as half the squared distance of unit vectors.

    Equal to 1 - cos in exact arithmetic; in float32 it keeps its digits near zero, where 1 - cos has none left, and it
    is a sum of squares, so least-squares solvers can use it.
    """

    squares: bool = True
    scale_free: bool = True

    def prepare(self, observed: Params) -> Params:
        return _unit(observed)

    def residual(self, predicted: Params, observed: Params) -> Params:
        return tree.subtract(_unit(predicted), observed)

    def reduce(self, residual: Params) -> Tensor:
        return 0.5 * tree.squared_norm(residual)


@dataclass(frozen=True)
class RowCosine:
    """Mean over rows of 1 - cos (or 1 - |cos|), for `Representation`: one row per example."""

    absolute: bool = False
    squares: bool = False
    scale_free: bool = True

    def prepare(self, observed: Params) -> Params:
        return observed

    def residual(self, predicted: Params, observed: Params) -> Params:
        def rows(p: Tensor, o: Tensor) -> Tensor:
            lengths = tree.safe_sqrt(p.square().sum(-1)) * tree.safe_sqrt(o.square().sum(-1))
            cosine = (p * o).sum(-1) / lengths.clamp_min(1e-15)
            return 1 - (cosine.abs() if self.absolute else cosine)

        return tree.map(rows, predicted, observed)

    def reduce(self, residual: Params) -> Tensor:
        return tree.flatten(residual).mean()


@dataclass(frozen=True)
class Scaled:
    """Another match times a factor: the weight of the matching term against the priors."""

    match: Match
    factor: float

    @property
    def squares(self) -> bool:
        return self.match.squares

    @property
    def scale_free(self) -> bool:
        return self.match.scale_free

    def prepare(self, observed: Params) -> Params:
        return self.match.prepare(observed)

    def residual(self, predicted: Params, observed: Params) -> Params:
        return self.match.residual(predicted, observed)

    def reduce(self, residual: Params) -> Tensor:
        return self.factor * self.match.reduce(residual)
