"""Projections against brute force."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from gradleak.attacks.generative.projections import l1_ball
from gradleak.core.random import Draws, key


def brute_force(v: Tensor, radius: float) -> Tensor:
    """Solve the quadratic programme for every support: on it all entries shrink by the same amount."""
    if v.abs().sum() <= radius:
        return v
    best, found = torch.inf, v
    for support in product([0.0, 1.0], repeat=len(v)):
        mask = torch.tensor(support, dtype=v.dtype)
        if not mask.any():
            continue
        shrink = ((v.abs() * mask).sum() - radius) / mask.sum()
        x = v.sign() * (v.abs() - shrink) * mask
        feasible = ((v.abs() - shrink) * mask >= -1e-12).all() and x.abs().sum() <= radius + 1e-9
        if feasible and (x - v).norm() < best:
            best, found = (x - v).norm(), x
    return found


@pytest.mark.parametrize("radius", [0.1, 1.0, 3.0, 50.0])
def test_the_nearest_point_of_the_l1_ball_is_that_of_brute_force(radius: float) -> None:
    points = 2 * Draws(key("l1")).normal((20, 5), dtype=torch.float64)
    nearest = vmap(lambda v: l1_ball(v, radius))(points)
    for point, found in zip(points, nearest):
        torch.testing.assert_close(found, brute_force(point, radius), rtol=1e-9, atol=1e-12)
        outside = point.abs().sum() > radius
        assert float(found.abs().sum()) == pytest.approx(radius if outside else float(point.abs().sum()))


def test_shapes_are_kept() -> None:
    v = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(l1_ball(v, 2.0), l1_ball(v.flatten(), 2.0).reshape(v.shape))
    assert torch.equal(l1_ball(torch.zeros(3), 1.0), torch.zeros(3))
