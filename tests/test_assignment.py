"""Matching is one-to-one, undoes any permutation, and ranks are honest about ties and copies."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradleak.core.assignment import cost_matrix, identification_rank, match, pairwise_mse
from gradleak.metrics import mse


def images(count: int, seed: int = 0, channels: int = 3, side: int = 6) -> torch.Tensor:
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(order=st.integers(1, 12).flatmap(lambda n: st.permutations(range(n))), seed=st.integers(0, 1000))
def test_matching_recovers_any_permutation(order: list[int], seed: int) -> None:
    private = images(len(order), seed)
    noisy = (private + 0.01 * images(len(order), seed + 1))[torch.tensor(order)]
    assert match(cost_matrix(noisy, private)).tolist() == list(order)


def test_matching_is_one_to_one_where_the_nearest_is_not() -> None:
    # Both reconstructions are nearest to image 0; the assignment gives it to the one that gains more.
    assert match(torch.tensor([[0.1, 0.2], [0.1, 0.9]])).tolist() == [1, 0]


def test_matching_of_unequal_numbers_and_of_one() -> None:
    assert match(torch.tensor([[3.0, 1.0, 2.0], [1.0, 9.0, 9.0]])).tolist() == [1, 0]
    assert match(torch.tensor([[3.0, 5.0], [1.0, 9.0], [2.0, 2.0]])).tolist() == [-1, 0, 1]
    assert match(torch.tensor([[3.0], [1.0], [2.0]])).tolist() == [-1, 0, -1]
    assert match(torch.tensor([[3.0, 1.0, 2.0]])).tolist() == [1]


def test_matching_without_scipy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="pip install 'scipy"):
        match(torch.eye(2))
    assert match(torch.eye(1)).tolist() == [0]  # a single image needs none


def test_matching_refuses_what_it_cannot_order() -> None:
    with pytest.raises(ValueError, match="non-finite"):
        match(torch.tensor([[torch.nan, 1.0], [1.0, 1.0]]))
    with pytest.raises(ValueError, match="one matrix"):
        match(torch.zeros(2, 2, 2))


def test_same_label_restricts_and_yields_only_where_it_must() -> None:
    private = images(3)
    found = private.flip(0)
    labels = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2])
    assert match(cost_matrix(found, private)).tolist() == [2, 1, 0]
    assert match(cost_matrix(found, private, same_label=labels)).tolist() == [0, 1, 2]
    wrong = torch.tensor([0, 0, 2]), torch.tensor([0, 1, 2])  # one 0 too many: only that one crosses
    assert match(cost_matrix(found, private, same_label=wrong))[2] == 2


def test_pairwise_mse_agrees_with_the_aligned_score() -> None:
    first, second = images(3, 1), images(5, 2)
    torch.testing.assert_close(
        pairwise_mse(first, second), torch.stack([mse(x.expand_as(second), second) for x in first])
    )


def test_pairwise_mse_keeps_the_digits_of_near_copies() -> None:
    image = images(1).float()
    shifted = image + 1e-4  # through inner products float32 would return noise here
    assert pairwise_mse(image, shifted).item() == pytest.approx(1e-8, rel=1e-2)


def test_rank_counts_the_gallery_and_ignores_copies_of_the_truth() -> None:
    private, others = images(2, 1), images(20, 2)
    gallery = torch.cat([others, private[:1]])  # a copy of the first private image is among the "others"
    rank, size = identification_rank(private + 1e-3, private, gallery)
    assert rank.tolist() == [1, 1]
    assert size.tolist() == [21, 22]


def test_an_output_equally_far_from_everything_identifies_nobody() -> None:
    private, others = images(1, 1), images(9, 2)
    constant = lambda first, second: torch.ones(len(first), len(second))  # noqa: E731
    rank, size = identification_rank(private, private, others, distance=constant)
    assert rank.item() == size.item() == 10


def test_ranks_of_more_images_than_a_block() -> None:
    private, others = images(40, 1), images(10, 2)
    found = others.repeat(4, 1, 1, 1)  # each shows somebody else
    rank, _ = identification_rank(found, private, others)
    assert (rank > 1).all()
