"""Arithmetic on nested dicts of tensors: weights, gradients, updates (keyed by parameter name), and unknowns.

Every function works for one lane and, under vmap, for many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
Tree: TypeAlias = dict[str, Any]  # Params, or dicts of them


def map(function: Callable[..., Any], first: Mapping[str, Any], *rest: Mapping[str, Any]) -> Tree:
    """Apply `function` to the tensors of equal name; the names must agree."""
    for other in rest:
        if other.keys() != first.keys():
            odd = sorted(other.keys() ^ first.keys())
            raise ValueError(f"Trees differ in their names: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}.")
    return {
        name: map(function, value, *(other[name] for other in rest))
        if isinstance(value, Mapping)
        else function(value, *(other[name] for other in rest))
        for name, value in first.items()
    }


def leaves(a: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors, depth first, in the order of the names."""
    for value in a.values():
        if isinstance(value, Mapping):
            yield from leaves(value)
        else:
            yield value


def length(batch: Tree) -> int:
    """How many examples a batch has: the size of the first axis, which all its tensors share."""
    return like(batch).shape[0]


def like(a: Mapping[str, Any]) -> Tensor:
    """The first tensor: one of the device and the type of all."""
    return next(leaves(a))


def add(a: Mapping[str, Any], b: Mapping[str, Any], scale: float | Tensor = 1.0) -> Tree:
    """a + scale * b"""
    if not isinstance(scale, Tensor) and scale == 1:
        return map(lambda x, y: x + y, a, b)
    return map(lambda x, y: x + scale * y, a, b)


def subtract(a: Mapping[str, Any], b: Mapping[str, Any]) -> Tree:
    """a - b"""
    return map(torch.sub, a, b)


def multiply(a: Mapping[str, Any], b: Mapping[str, Any]) -> Tree:
    """a * b, entry by entry"""
    return map(torch.mul, a, b)


def scale(a: Mapping[str, Any], factor: float | Tensor) -> Tree:
    """factor * a"""
    if not isinstance(factor, Tensor) and factor == 1:
        return dict(a)  # saves a pass over every lane's parameters

    def scaled(x: Any) -> Any:
        # In forward mode `x * 0.1` makes the number a tensor with a zero tangent, which takes torch about 1 ms. Rules
        # of client optimisers are also run on arrays of NumPy.
        plain = isinstance(x, Tensor) and not isinstance(factor, Tensor)
        return torch.ops.aten.mul.Scalar(x, factor) if plain else x * factor

    return map(scaled, a)


def mean(trees: Sequence[Mapping[str, Any]], sizes: Sequence[float]) -> Tree:
    """The mean, weighted by `sizes`. With equal sizes all trees are averaged at once, not one after the other."""
    total = sum(sizes)
    if len(trees) == len(sizes) > 1 and len(set(sizes)) == 1:
        return map(lambda *values: torch.stack(values).mean(0), *trees)
    result, *rest = (scale(each, size / total) for each, size in zip(trees, sizes, strict=True))
    for part in rest:
        result = add(result, part)
    return result


def where(condition: Tensor, a: Mapping[str, Any], b: Mapping[str, Any]) -> Tree:
    """a where the condition holds, else b; `condition` has the leading axes of every tensor (none inside a lane)."""

    def choose(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition.reshape(condition.shape + (1,) * (x.dim() - condition.dim())), x, y)

    return map(choose, a, b)


def zeros_like(a: Mapping[str, Any]) -> Tree:
    """Zeros of the same names and shapes."""
    return map(torch.zeros_like, a)


def dot(a: Mapping[str, Any], b: Mapping[str, Any]) -> Tensor:
    """Inner product over the concatenation of all tensors."""
    # Not a matrix product: under vmap that could run in TF32 and lose the digits that matching lives on.
    return torch.stack(list(leaves(map(lambda x, y: (x * y).sum(), a, b)))).sum()


def squared_norm(a: Mapping[str, Any]) -> Tensor:
    """The sum of squares of all entries."""
    return torch.stack([x.square().sum() for x in leaves(a)]).sum()


def safe_sqrt(square: Tensor) -> Tensor:
    """Square root whose derivative at zero is zero, where autograd's is infinite."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def safe_inverse(length: Tensor) -> Tensor:
    """1 / length, and 0 where the length is 0; the derivative there is 0 too."""
    positive = length > 0
    return torch.where(positive, 1 / torch.where(positive, length, 1.0), 0.0)


def norm(a: Mapping[str, Any]) -> Tensor:
    """Euclidean norm over all tensors."""
    return safe_sqrt(squared_norm(a))


def flatten(a: Mapping[str, Any]) -> Tensor:
    """All entries as one vector, in the order of `leaves`."""
    return torch.cat([value.reshape(-1) for value in leaves(a)])


def unflatten(vector: Tensor, like: Mapping[str, Any]) -> Tree:
    """The inverse of `flatten`, with the shapes of `like`."""
    pieces = iter(vector.split([leaf.numel() for leaf in leaves(like)]))
    return map(lambda leaf: next(pieces).reshape(leaf.shape), like)


def size(a: Mapping[str, Any]) -> int:
    """Number of scalar entries."""
    return sum(math.prod(value.shape) for value in leaves(a))


def detach(a: Mapping[str, Any]) -> Tree:
    """A copy without history."""
    return map(lambda value: value.detach().clone(), a)


def to(a: Mapping[str, Any], device: torch.device | str | None, dtype: torch.dtype | None) -> Tree:
    """Move; only floating-point tensors change their type."""
    return map(lambda v: v.to(device=device, dtype=dtype if v.is_floating_point() else None), a)


def finite(a: Mapping[str, Any]) -> bool:
    """Is every floating-point entry finite?"""
    return all(bool(torch.isfinite(value).all()) for value in leaves(a) if value.is_floating_point())


def shapes(a: Tensor | Mapping[str, Any]) -> object:
    """The shape of every entry, by name; of a tensor its own."""
    return {name: shapes(value) for name, value in a.items()} if isinstance(a, Mapping) else tuple(a.shape)
