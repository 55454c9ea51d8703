"""Arithmetic on nested dicts of tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, vmap

from gradleak.core import tree


def nested() -> tree.Tree:
    return {"w": torch.tensor([[1.0, -2.0], [3.0, 4.0]]), "deep": {"b": torch.tensor([5.0]), "s": torch.tensor(6.0)}}


def reordered(a: tree.Tree) -> tree.Tree:
    """The same tree with its names in the opposite order."""
    return {name: reordered(value) if isinstance(value, dict) else value for name, value in reversed(a.items())}


def equal(a: tree.Tree, b: tree.Tree) -> bool:
    return all(bool(same) for same in tree.leaves(tree.map(torch.equal, a, b)))


def test_addition_subtraction_and_scaling_undo_each_other() -> None:
    a, b = nested(), tree.scale(nested(), 3.0)
    assert equal(tree.subtract(tree.add(a, b, 2.0), tree.scale(b, 2.0)), a)
    assert equal(tree.add(a, a), tree.scale(a, 2.0))
    assert equal(tree.add(a, tree.scale(a, -1.0)), tree.zeros_like(a))
    assert equal(tree.multiply(a, a), tree.map(torch.square, a))


def test_products_and_norms_are_those_of_the_concatenation() -> None:
    a, b = nested(), tree.map(torch.cos, nested())
    flat_a, flat_b = tree.flatten(a), tree.flatten(b)
    assert flat_a.tolist() == [1, -2, 3, 4, 5, 6]
    assert tree.size(a) == 6
    torch.testing.assert_close(tree.dot(a, b), flat_a @ flat_b)
    torch.testing.assert_close(tree.squared_norm(a), flat_a.square().sum())
    torch.testing.assert_close(tree.norm(a), flat_a.norm())


def test_tensors_meet_by_name_and_not_by_position() -> None:
    """A file gives the names in another order than the model does."""
    a = {"first": torch.tensor([1.0, 2.0]), "second": torch.tensor([3.0, 4.0])}
    assert tree.dot(a, reordered(a)) == tree.squared_norm(a)
    assert tree.norm(tree.subtract(a, reordered(a))) == 0
    assert tree.norm(tree.subtract(nested(), reordered(nested()))) == 0


def test_flatten_and_unflatten_are_inverse() -> None:
    assert equal(tree.unflatten(tree.flatten(nested()), nested()), nested())


def test_names_that_differ_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="differ in their names: b, c"):
        tree.add({"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.zeros(1), "c": torch.zeros(1)})


def test_where_takes_whole_lanes() -> None:
    a, b = {"x": torch.ones(3, 2, 2), "y": torch.ones(3)}, {"x": torch.zeros(3, 2, 2), "y": torch.zeros(3)}
    chosen = tree.where(torch.tensor([True, False, True]), a, b)
    assert chosen["x"].sum(dim=(1, 2)).tolist() == [4, 0, 4]
    assert chosen["y"].tolist() == [1, 0, 1]


def test_where_keeps_what_is_not_finite_out() -> None:
    broken = {"x": torch.full((2, 2), torch.nan)}
    assert tree.finite(tree.where(torch.tensor([False, False]), broken, {"x": torch.zeros(2, 2)}))


def test_the_norm_has_a_finite_derivative_at_zero() -> None:
    at_zero = grad(lambda x: tree.norm({"x": x}))(torch.zeros(3))
    assert at_zero.tolist() == [0, 0, 0]
    twice = grad(lambda x: grad(lambda z: tree.norm({"z": z}))(x).sum())(torch.zeros(3))
    assert twice.isfinite().all()


def test_safe_sqrt_is_the_root_elsewhere() -> None:
    assert tree.safe_sqrt(torch.tensor(4.0)) == 2
    assert grad(tree.safe_sqrt)(torch.tensor(4.0)) == 0.25


def test_everything_works_for_many_lanes_at_once() -> None:
    lanes = tree.map(lambda value: torch.stack([value, 2 * value]), nested())
    torch.testing.assert_close(vmap(tree.norm)(lanes), torch.tensor([1.0, 2.0]) * math.sqrt(91))


def test_detach_copies() -> None:
    a = nested()
    copy = tree.detach(a)
    a["deep"]["b"].zero_()
    assert copy["deep"]["b"].item() == 5


def test_moving_changes_the_type_of_floating_point_tensors_only() -> None:
    moved = tree.to({"x": torch.ones(1), "n": torch.ones(1, dtype=torch.long)}, "cpu", torch.float64)
    assert moved["x"].dtype == torch.float64
    assert moved["n"].dtype == torch.long


def test_finite_sees_every_tensor() -> None:
    assert tree.finite(nested())
    assert not tree.finite({"fine": torch.ones(1), "deep": {"odd": torch.tensor([1.0, math.inf])}})


@pytest.mark.parametrize("sizes", [(3,), (2, 2, 2), (1, 2, 5)], ids=["one", "equal", "unequal"])
def test_the_mean_weighs_every_tree_by_its_size(sizes: tuple[int, ...]) -> None:
    trees = [tree.scale(nested(), number + 1.0) for number in range(len(sizes))]
    factor = sum((number + 1) * size for number, size in enumerate(sizes)) / sum(sizes)
    torch.testing.assert_close(tree.mean(trees, sizes), tree.scale(nested(), factor))


def test_a_mean_of_other_names_or_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in their names"):
        tree.mean([nested(), {"w": torch.ones(1)}], (1, 1))
    with pytest.raises(ValueError, match="longer"):
        tree.mean([nested(), nested()], (1, 1, 1))
