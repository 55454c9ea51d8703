"""Random numbers that belong to a lane: known answers, laws, and independence of who else is computed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, vmap

from gradleak.core.random import Draws, key, philox, signs

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ONES = (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2


@pytest.mark.parametrize(
    ("counter", "keys", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (*ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: tuple, keys: tuple, answer: tuple) -> None:
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, keys)))
    assert tuple(int(word) for word in words) == answer


def test_a_lane_draws_the_same_alone_and_in_company() -> None:
    keys = torch.stack([key("target", restart) for restart in range(5)])
    for law in ("uniform", "normal"):
        together = vmap(lambda lane, law=law: getattr(Draws(lane), law)((3, 2), stream=1, step=7))(keys)
        alone = [getattr(Draws(lane), law)((3, 2), stream=1, step=7) for lane in keys]
        assert torch.equal(together, torch.stack(alone))


def test_the_step_may_be_a_tensor() -> None:
    source = Draws(key("x"))
    assert torch.equal(source.normal((5,), step=torch.tensor(3)), source.normal((5,), step=3))


def test_a_longer_draw_is_as_random_as_a_short_one() -> None:
    """Odd counts are cut, not repeated."""
    values = Draws(key("odd")).normal((7,))
    assert values.unique().numel() == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_has_the_moments_of_its_law(dtype: torch.dtype) -> None:
    u = Draws(key("moments")).uniform((200, 1000), dtype=dtype).double()
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / u.numel())
    assert abs(u.var() - 1 / 12) < 1e-3
    assert abs((u < 0.1).double().mean() - 0.1) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_has_the_moments_of_its_law(dtype: torch.dtype) -> None:
    z = Draws(key("moments")).normal((200, 1000), dtype=dtype).double()
    assert z.isfinite().all()
    assert abs(z.mean()) < 5 / math.sqrt(z.numel())
    assert abs(z.var() - 1) < 0.02
    assert abs(z.pow(4).mean() - 3) < 0.1
    assert abs((z.abs() < 1.96).double().mean() - 0.95) < 5e-3


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_open_at_both_ends(monkeypatch: pytest.MonkeyPatch, word: int, dtype: torch.dtype) -> None:
    """The smallest and the largest word: neither 0 (its logarithm is infinite) nor 1."""
    monkeypatch.setattr("gradleak.core.random.philox", lambda counter, keys: (torch.full_like(counter[0], word),) * 4)
    value = Draws(key("ends")).uniform((1,), dtype=dtype)
    assert 0 < value.item() < 1


def test_streams_steps_keys_and_children_do_not_resemble_each_other() -> None:
    source = Draws(key("a"))
    draws = [
        source.normal((4000,)),
        source.normal((4000,), stream=1),
        source.normal((4000,), step=1),
        Draws(key("b")).normal((4000,)),
        source.child(0).normal((4000,)),
        source.child(1).normal((4000,)),
        source.child(0).child(1).normal((4000,)),
        source.child(1).child(0).normal((4000,)),
    ]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 5 / math.sqrt(4000)


def test_children_are_the_same_alone_and_in_company() -> None:
    keys = torch.stack([key(name) for name in "abc"])
    together = vmap(lambda lane: Draws(lane).child(2).uniform((3,)))(keys)
    assert torch.equal(together, torch.stack([Draws(lane).child(2).uniform((3,)) for lane in keys]))


def test_a_childs_key_is_no_number_that_its_parent_draws() -> None:
    """Otherwise whoever sees a parent's noise would know the key of a child's."""
    source = Draws(key("parent"))
    drawn = {int(word) for words in source._words(8, 0, 0) for word in words}
    assert not drawn & {int(word) for number in range(8) for word in source.child(number).key}


def test_keys_depend_on_every_name_and_on_their_bounds() -> None:
    keys = [key("a", 1), key("a", 2), key("b", 1), key("a1"), key("a", "1", ""), key(1, "a")]
    assert len({tuple(pair.tolist()) for pair in keys}) == len(keys)
    assert torch.equal(key("a", 1), key("a", "1"))


def test_keys_are_the_same_on_every_machine() -> None:
    assert key("target", 0, 0).tolist() == [1453972300, 3763412952]


def test_a_lane_and_its_child_draw_the_same_in_every_version() -> None:
    """Words of Philox at counter (0, step, stream, 0), and a child's key at (number, 0, 0, 1), from a program apart."""
    source = Draws(key("target", 0, 0))
    assert source.child(3).key.tolist() == [1993202696, 3328363467]
    for lane, words in (
        (source, [2954372101, 1177729098, 3670434657]),
        (source.child(3), [3023242867, 2309959923, 1771778714]),
    ):
        drawn = lane.uniform((3,), stream=2, step=7, dtype=torch.float64)
        assert drawn.tolist() == [(word + 0.5) / 2**32 for word in words]


def test_signs_that_are_kept_belong_to_no_transform_mode_or_inference() -> None:
    """A wrapped tensor that outlives its transform breaks the next one: 'level <= current_level INTERNAL ASSERT'."""

    def signed(x: Tensor) -> Tensor:
        return (x * signs("test", 5, x.device, x.dtype)).square().sum()

    x = torch.ones(2, 5)
    for first in (lambda: vmap(hessian(signed))(x), lambda: torch.inference_mode()(signed)(x)):
        signs.cache_clear()
        first()
        torch.testing.assert_close(vmap(grad(signed))(x), 2 * x)
        own = x.clone().requires_grad_()
        signed(own).backward()
        torch.testing.assert_close(own.grad, 2 * x)
