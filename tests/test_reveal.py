"""What the server of SecAdam has in the end: masked sums, in fixed point and in floats, and with a traitor's help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("cryptography", reason="needs the extra secure")

import gradleak as gl
from conftest import largest_difference, moment, normal, private, scene_of, tiny
from gradleak.attacks.sign_matching.cohorts import Sums
from gradleak.core import tree
from gradleak.core.tree import Tree
from gradleak.defences.secadam import FIRST, SECOND, means
from gradleak.parts.matches import SquaredError
from gradleak.scenario.client import LocalTraining
from gradleak.secure import Member, Oversize, Part, Stage, reveal
from gradleak.secure.simulation import flat

TRAINING = LocalTraining(lr=1.0)
PLAIN = gl.defences.SecAdam(rate=1.0)


def cohort(clients: int, defence: gl.Defence | None = PLAIN, examples: int = 2) -> reveal.Cohort:
    return reveal.cohort(tiny(), [private(examples, seed=seed) for seed in range(clients)], TRAINING, defence)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [2, 5, 12])
def test_the_ratio_under_float_masks_is_the_ratio_without(clients: int) -> None:
    group = cohort(clients)
    plain = PLAIN.reveal(group.uploads, group.sizes)
    masked = reveal.in_floats(reveal.weighted(group.uploads, group.sizes), seed=clients)
    assert largest_difference(masked.ratio(2), plain) < 1e-6
    assert largest_difference(masked.first, tree.scale(means(group.uploads, group.sizes)[0], clients)) > 1


def test_float_masks_that_do_not_cancel_are_refused() -> None:
    """In so large masks the last digits of the values are lost, in some coordinates more than in others."""
    group = cohort(3)
    with pytest.raises(ArithmeticError, match="use a smaller spread"):
        reveal.in_floats(reveal.weighted(group.uploads, group.sizes), spread=1e10)


def coded(values: Mapping[int, Tree], part: Part) -> NDArray[np.int64]:
    """The sum of all clients' fixed-point numbers, without masks and factors."""
    least = part.coding.unit if part.name == SECOND else -np.inf
    each = [part.coding.encode(np.maximum(flat(held[part.name]), least)) for held in values.values()]
    return np.sum(each, axis=0, dtype=np.int64)


def test_sums_in_the_ring_are_those_without_masks_to_the_last_bit() -> None:
    group = cohort(5)
    values = reveal.weighted(group.uploads, group.sizes)
    # So few bits after the point that sums of them are exact in float64 as well.
    masked = reveal.in_ring(values, clip=2.0**30, largest=2.0**26, powers=(0, 0), factor_bits=0)
    assert masked.plan is not None
    plain = [part.coding.decode(coded(values, part)) for part in masked.plan.parts]
    assert np.array_equal(flat(masked.first), plain[0])
    assert np.array_equal(flat(masked.second), plain[1])
    assert np.allclose(flat(masked.ratio(2)), (plain[0] / 5) / (plain[1] / 5) ** 0.5, rtol=1e-14, atol=0)


def test_under_the_factor_sums_are_right_to_half_a_unit_a_client_and_the_ratio_is_that_without() -> None:
    group = cohort(5)
    values = reveal.weighted(group.uploads, group.sizes)
    traitor = reveal.Traitor(0)
    masked = reveal.in_ring(values, members=[traitor, *(Member(number) for number in range(1, 5))])
    assert masked.plan is not None
    assert traitor.learned is not None
    for part, total in zip(masked.plan.parts, (masked.first, masked.second)):
        r = traitor.learned.factors(part.size, masked.plan.factor_bits).astype(float) ** part.factor
        off = np.abs(flat(total) / r - part.coding.decode(coded(values, part)))
        assert off.max() <= 5 * 0.51 * part.coding.unit
    plain = PLAIN.reveal(group.uploads, group.sizes)
    assert largest_difference(masked.ratio(2), plain) < 1e-6
    assert (
        reveal.cosine(masked.first, means(group.uploads, group.sizes)[0]) < 0.97
    )  # what the server has is not the sum


def test_survivors_are_enough_and_small_second_moments_are_raised_to_the_unit() -> None:
    group = cohort(5)
    values = reveal.weighted(group.uploads, group.sizes)
    masked = reveal.in_ring(values, dropouts={3: Stage.MASK})
    assert masked.survivors == (0, 1, 2, 4)
    left = [group.uploads[number] for number in masked.survivors]
    assert largest_difference(masked.ratio(2), PLAIN.reveal(left, [1] * 4)) < 1e-6
    dead = {
        number: {FIRST: tree.scale(held[FIRST], 0.0), SECOND: tree.scale(held[SECOND], 0.0)}
        for number, held in values.items()
    }
    quiet = reveal.in_ring(dead, clip=1.0, largest=1.0)
    assert largest_difference(quiet.ratio(2), tree.zeros_like(quiet.first)) == 0  # zeros are seen as zeros, not as 0/0
    with pytest.raises(Oversize, match="Part first"):
        reveal.in_ring(values, clip=1e-6)


def test_means_after_dropouts_are_of_who_is_left_also_where_clients_are_unequal() -> None:
    group, sizes = cohort(5), [1, 2, 3, 4, 10]
    values = reveal.weighted(group.uploads, sizes)
    masked = reveal.in_ring(values, dropouts={4: Stage.MASK}, sizes=sizes)
    assert masked.total == pytest.approx(5 * 10 / 20)
    assert largest_difference(masked.ratio(2), PLAIN.reveal(group.uploads[:4], sizes[:4])) < 1e-6


def test_a_traitor_of_many_examples_takes_its_own_share_out() -> None:
    group, sizes = cohort(4), [1, 2, 3, 6]
    values = reveal.weighted(group.uploads, sizes)
    traitor = reveal.Traitor(3)
    masked = reveal.in_ring(values, members=[*(Member(number) for number in range(3)), traitor], sizes=sizes)
    assert traitor.learned is not None
    first, second = reveal.uncovered(masked, traitor.learned, values[3], share=reveal.shares(sizes)[3])
    expected = means(group.uploads[:3], sizes[:3])
    assert largest_difference(first, expected[0]) < 1e-8
    assert largest_difference(second, expected[1]) < 1e-8


def test_a_training_can_run_over_the_real_protocol() -> None:
    task, data = tiny(), gl.audit.private.Stored(private(8))
    federation = gl.Federation(clients=4, training=TRAINING, examples=2)
    ends = [
        federation.weights_at(task, data, [2], gl.defences.SecAdam(rate=0.01, masks=masks))[2].weights
        for masks in ("cancelled", "ring")
    ]
    assert 0 < largest_difference(*ends) < 1e-6
    lion = [
        federation.weights_at(task, data, [2], gl.defences.SecLion(rate=0.01, masks=masks))[2].weights
        for masks in ("cancelled", "ring")
    ]
    assert largest_difference(*lion) < 1e-12  # signs are signs


def test_the_protocol_runs_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    group, run, rounds = cohort(3), reveal.in_ring, []

    def noted(values: Mapping[int, Tree], *, round: int, **settings: Any) -> reveal.Masked:
        rounds.append(round)
        return run(values, round=round, **settings)

    monkeypatch.setattr(reveal, "in_ring", noted)
    plain = PLAIN.aggregate(group.uploads, group.sizes, {"round": 7})
    assert rounds == []
    assert largest_difference(plain, PLAIN.reveal(group.uploads, group.sizes)) == 0
    replace(PLAIN, masks="ring").aggregate(group.uploads, group.sizes, {"round": 7})
    assert rounds == [7]


# --- what it hides ----------------------------------------------------------------------------------------------------


def test_uniform_factors_hide_sizes_badly() -> None:
    """r uniform in 1 ... 256: r m points along m with a cosine of sqrt(3/4), and has its signs; the ratio has not."""
    group = cohort(1, examples=1)
    exact = means(group.uploads, group.sizes)[0]
    seen = [reveal.cosine(reveal.masked_first(group, seed=seed), exact) for seed in range(20)]
    assert sum(seen) / 20 == pytest.approx(0.75**0.5, abs=0.04)
    ratio = reveal.cosine(group.observed().update, exact)
    assert ratio < min(seen)
    masked = reveal.masked_first(group)
    assert largest_difference(tree.map(torch.sign, masked), tree.map(torch.sign, exact)) == 0


def test_the_masked_mean_is_the_mean_times_the_factor_over_its_expectation() -> None:
    """r uniform in 1 ... 4 has the expectation 2.5, so r m / 2.5 is right on average."""
    group = cohort(3)
    exact = tree.flatten(means(group.uploads, group.sizes)[0])
    seen = torch.stack([tree.flatten(reveal.masked_first(group, factor_bits=2, seed=seed)) for seed in range(20)])
    r = (2.5 * seen / exact)[:, exact.abs() > 1e-6]
    assert float((r - r.round()).abs().max()) < 1e-6
    assert set(r.round().flatten().tolist()) == {1, 2, 3, 4}
    assert float(r.mean()) / 2.5 == pytest.approx(1, abs=0.04)


def test_a_traitor_takes_the_factor_off_for_all_and_its_own_share_out() -> None:
    group = cohort(4)
    values = reveal.weighted(group.uploads, group.sizes)
    traitor = reveal.Traitor(2)
    masked = reveal.in_ring(values, members=[Member(0), Member(1), traitor, Member(3)])
    seed = traitor.learned
    assert seed is not None
    others = [upload for number, upload in enumerate(group.uploads) if number != 2]
    first, second = reveal.uncovered(masked, seed, values[2])
    expected = means(others, [2] * 3)
    assert largest_difference(first, expected[0]) < 1e-8
    assert largest_difference(second, expected[1]) < 1e-8
    whole, _ = reveal.uncovered(masked, seed)
    assert largest_difference(whole, means(group.uploads, group.sizes)[0]) < 1e-8


def test_a_client_that_is_no_traitor_keeps_nothing() -> None:
    group = cohort(3)
    members = [Member(number) for number in range(3)]
    reveal.in_ring(reveal.weighted(group.uploads, group.sizes), members=members)
    assert all(not hasattr(member, "learned") for member in members)


# --- many rounds ------------------------------------------------------------------------------------------------------


def rounds_of(clients: int, rounds: int, *, still: bool = False) -> tuple[list[reveal.Cohort], list[reveal.Masked]]:
    """A training with SecAdam, and the sums that its server has; `still`: the same images, and hardly a step."""
    task, defence = tiny(), gl.defences.SecAdam(rate=1e-6 if still else 1e-3)
    weights, memories, groups = task.weights(), None, []
    for number in range(rounds):
        batches = [private(2, seed=client + (0 if still else 100 * number)) for client in range(clients)]
        made = reveal.cohort(task, batches, TRAINING, defence, weights=weights, memories=memories, round=number)
        weights, memories = tree.subtract(weights, made.observed().update), made.memories
        groups.append(made)
    seen = [reveal.in_floats(reveal.weighted(g.uploads, g.sizes), seed=number) for number, g in enumerate(groups)]
    return groups, seen


def off(found: Tree, exact: Tree) -> torch.Tensor:
    """How far sizes are off, of every coordinate."""
    return (tree.flatten(found) / tree.flatten(exact)).sqrt() - 1


@pytest.mark.parametrize("clients", [1, 4])
def test_the_largest_of_many_rounds_gives_second_moments_away(clients: int) -> None:
    groups, seen = rounds_of(clients, 60, still=True)
    exact = means(groups[-1].uploads, groups[-1].sizes)[1]
    errors = {count: float(off(reveal.second_over_rounds(seen[-count:]), exact).abs().median()) for count in (1, 8, 60)}
    assert errors[1] > 0.2
    assert errors[60] < 0.03 < errors[8] < errors[1]


@pytest.mark.parametrize("rounds", [1, 3])
def test_sizes_from_the_largest_of_few_rounds_are_right_on_average(rounds: int) -> None:
    """The largest of T uniform numbers is T / (T + 1) on average."""
    group = cohort(2)
    values, exact = reveal.weighted(group.uploads, group.sizes), means(group.uploads, group.sizes)[1]
    seen = [reveal.in_floats(values, seed=seed) for seed in range(24)]
    trials = [seen[start : start + rounds] for start in range(0, 24, rounds)]
    errors = torch.stack([off(reveal.second_over_rounds(trial), exact) for trial in trials])
    assert float(errors.mean()) == pytest.approx(0, abs=0.05)


def test_with_the_decay_known_it_is_a_bound_that_no_client_goes_below() -> None:
    groups, seen = rounds_of(3, 40)
    exact = means(groups[-1].uploads, groups[-1].sizes)[1]
    bound = off(reveal.second_over_rounds(seen, beta2=0.999), exact)
    assert float(bound.max()) <= 1e-9
    assert float(bound.median()) > -0.3
    fewer = off(reveal.second_over_rounds(seen[:1], beta2=0.999), means(groups[0].uploads, groups[0].sizes)[1])
    assert float(fewer.max()) <= 1e-9
    assert float(fewer.median()) < float(bound.median())


def test_mean_gradients_come_out_of_two_rounds_and_the_second_moments() -> None:
    groups, seen = rounds_of(4, 40)
    sent = [means(group.uploads, group.sizes) for group in groups]
    pooled = {name: torch.cat([private(2, seed=client + 3900)[name] for client in range(4)]) for name in ("x", "y")}
    exact = tiny().gradient(groups[-1].weights, pooled)
    known = [reveal.first_over_rounds(each, second) for each, (_, second) in zip(seen[-2:], sent[-2:])]
    assert largest_difference(known[1], sent[-1][0]) < 1e-7  # with the right sizes the first moments are exact
    guessed = reveal.second_over_rounds(seen[20:])
    found = reveal.gradient_over_rounds(seen[-2], seen[-1], guessed, round=40, beta1=0.9)
    blind = reveal.masked_first(groups[-1], seed=39)
    assert reveal.cosine(found, exact) > 0.95
    assert reveal.cosine(blind, exact) < reveal.cosine(found, exact)


def test_the_gradient_of_a_second_round_is_exact_where_its_moments_are() -> None:
    """Early on the corrections 1 - beta1^t matter: M_1 = (1 - beta1) g_1, M_2 = beta1 M_1 + (1 - beta1) g_2."""
    beta1, v = 0.9, {"w": torch.full((5,), 4.0, dtype=torch.float64)}
    first, second = normal(5, seed=1), normal(5, seed=2)
    later = (beta1 * (1 - beta1) * first + (1 - beta1) * second) / (1 - beta1**2)
    before, last = (reveal.Masked({"w": 3 * m}, tree.scale(v, 9.0), 1, (0,)) for m in (first, later))
    found = reveal.gradient_over_rounds(before, last, v, round=2, beta1=beta1)
    torch.testing.assert_close(found["w"], second)


# --- observations of cohorts ------------------------------------------------------------------------------------------


def test_without_a_defence_a_cohort_shows_its_mean_gradient() -> None:
    group = cohort(4, None)
    seen = group.observed()
    pooled = {name: torch.cat([private(2, seed=seed)[name] for seed in range(4)]) for name in ("x", "y")}
    task = tiny()
    assert largest_difference(seen.update, task.gradient(task.weights(), pooled)) < 1e-12
    assert (seen.clients, seen.num_examples) == (4, 8)


@pytest.mark.parametrize("clients", [1, 3, 8])
@pytest.mark.parametrize("name", ["none", "secadam", "seclion", "dp-fedavg"])
def test_the_replay_of_a_cohort_is_exact_at_the_truth(name: str, clients: int) -> None:
    """Whatever is revealed of n clients, `Sums` predicts it from all their images."""
    defence = None if name == "none" else gl.registry.get("defence", name)
    task, batches = tiny(), [private(2, seed=seed) for seed in range(clients)]
    seen = reveal.observed(task, batches, TRAINING, defence)
    truth = {name: torch.cat([batch[name] for batch in batches]) for name in ("x", "y")}
    known = gl.defences.Clipping(1.0) if name == "dp-fedavg" else defence
    scene = scene_of(task, seen, gl.Knowledge(training=TRAINING, defence=known))
    predict = Sums(clients=clients)
    if name == "dp-fedavg" and clients > 1:
        return  # its clip is read off one client's norm, which a sum does not show
    assert float(SquaredError().distance(predict(truth, {}, scene, moment()), predict.target(scene))) < 1e-20
    other = {**truth, "x": 1 - truth["x"]}
    assert float(SquaredError().distance(predict(other, {}, scene, moment()), predict.target(scene))) > 1e-9


def test_what_clients_remember_goes_into_the_next_round() -> None:
    task, batches = tiny(), [private(2, seed=seed) for seed in range(3)]
    first = reveal.cohort(task, batches, TRAINING, PLAIN)
    second = reveal.cohort(task, batches, TRAINING, PLAIN, memories=first.memories, round=1)
    assert float(second.memories[1]["count"]) == 2
    assert (
        largest_difference(second.uploads[0].payload[FIRST], first.uploads[0].payload[FIRST]) < 1e-12
    )  # bias taken off
    assert second.observed().round == 1


@pytest.mark.parametrize("clients", [1, 4, 12, 50])
def test_label_counts_are_read_off_the_ratio_of_n_clients(clients: int) -> None:
    """One example each, an untrained network: the sums are hidden, how many clients have a class is not."""
    task = tiny(seed=1)
    classes = torch.randint(3, (clients,), generator=torch.Generator().manual_seed(clients))
    batches = [{"x": private(1, seed=seed)["x"], "y": classes[seed : seed + 1]} for seed in range(clients)]
    seen = reveal.observed(task, batches, TRAINING, PLAIN)
    found = gl.registry.get("labels", "ratio-counts").counts(scene_of(task, seen, gl.Knowledge(defence=PLAIN)))
    wrong = (found - torch.bincount(classes, minlength=3)).abs().sum() / 2
    assert int(wrong) <= clients // 8
    assert int(found.sum()) == clients


def test_unequal_clients_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many examples"):
        reveal.cohort(tiny(), [private(1), private(2)], TRAINING)
    scene = scene_of(tiny(), reveal.observed(tiny(), [private(3)], TRAINING))
    with pytest.raises(ValueError, match="3 examples cannot be divided equally among 2 clients"):
        Sums(clients=2)(private(3), {}, scene, moment())


def test_the_server_of_a_cohort_knows_the_running_statistics_it_sent() -> None:
    task = tiny(norm="eval")
    seen = reveal.observed(task, [private(2, seed=seed) for seed in range(2)], TRAINING)
    assert seen.buffers is not None
    assert largest_difference(seen.buffers, task.buffers()) == 0
    assert cohort(2).observed().buffers is None  # a network without any


def test_part_of_a_cohort_and_other_updates_can_be_observed() -> None:
    group = cohort(3)
    some = group.observed(clients=[0, 2])
    assert (some.clients, some.num_examples) == (2, 4)
    assert largest_difference(some.update, PLAIN.reveal([group.uploads[0], group.uploads[2]], [2, 2])) == 0
    masked = reveal.with_update(group.observed(), reveal.masked_first(group))
    assert largest_difference(masked.update, replace(masked).update) == 0
    assert largest_difference(masked.update, group.observed().update) > 0
