"""The decoder of our own: causal, tied or not, and differentiable twice."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import seeded
from gradleak.models.language import Positions, decoder, turned

POSITIONS: tuple[Positions, ...] = ("learned", "rotary")


@pytest.mark.parametrize("positions", POSITIONS)
def test_no_place_sees_a_later_one(positions: Positions) -> None:
    model = decoder(vocabulary=50, width=16, heads=2, positions=positions, generator=seeded()).double()
    ids = torch.randint(50, (3, 9), generator=seeded(1))
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 50
    before, after = model(ids), model(other)
    assert torch.equal(before[:, :5], after[:, :5])
    assert ((before - after)[:, 5:].abs().amax(-1) > 0).all()
    torch.testing.assert_close(model(ids[:, :4]), before[:, :4])


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("tied", [True, False])
def test_it_is_read_as_a_language_model(positions: Positions, tied: bool) -> None:
    model = decoder(vocabulary=50, width=16, heads=2, length=9, positions=positions, tied=tied, generator=seeded())
    ids = torch.randint(50, (2, 9), generator=seeded(1))
    task = gl.Task.supervised(model, cross_entropy, like=(ids,))
    assert list(task.fields) == ["x"]
    assert not task.check()
    assert (model.head.weight is model.embedding.weight) is tied
    logits = model(ids)[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    grown = torch.autograd.grad(loss, list(model.parameters()))
    assert all(value.isfinite().all() for value in grown)
    found = task.gradient(task.weights(), {"x": ids})
    for (name, _), value in zip(model.named_parameters(), grown, strict=True):
        torch.testing.assert_close(found[name], value)


def test_rotated_vectors_keep_their_length_and_products_depend_on_distance() -> None:
    x = torch.randn(1, 8, generator=seeded()).expand(6, 8).double()
    rotated = turned(x)
    torch.testing.assert_close(rotated.norm(dim=1), x.norm(dim=1))
    products = rotated @ rotated.T
    torch.testing.assert_close(products[0, 2], products[3, 5])
    assert abs(products[0, 1] - products[0, 3]) > 1e-3


def test_odd_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        decoder(width=20, heads=4)
