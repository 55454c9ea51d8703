"""Secure aggregation, whole rounds: the sum is right, whoever drops out; and all that is seen besides it is noise."""

from __future__ import annotations

import copy
import pickle
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="needs the extra `secure`")

from conftest import tiny
from gradleak import secure
from gradleak.core import tree
from gradleak.secure import BelowThreshold, FixedPoint, Member, Oversize, Part, Plan, Refused, Roster, Server, Stage
from gradleak.secure.messages import MaskedInput, Request
from gradleak.secure.plan import connected

STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK)
CHANCE = 1e-9  # bound on p-values: some 200 of them are looked at in a run
PARTS = (Part("a", 5, FixedPoint(2.0, 20)), Part("b", 3, FixedPoint(50.0, 12)))


def members_of(clients: int) -> list[Member]:
    """Numbers far apart and in no order, as a deployment gives them."""
    return [Member((7919 * place + 2**40) % 10_007) for place in range(clients)]


def plan_for(members: Sequence[Member], parts: tuple[Part, ...] = PARTS, **settings: Any) -> Plan:
    roster = Roster.of({member.number: member.identity.public for member in members})
    return Plan(roster, parts, secrets.token_bytes(16), **settings)


def drawn(plan: Plan, seed: int = 0) -> dict[int, dict[str, np.ndarray]]:
    source = np.random.default_rng(seed)
    return {
        client: {part.name: source.uniform(-part.coding.clip, part.coding.clip, part.size) for part in plan.parts}
        for client in plan.roster.keys
    }


def in_integers(plan: Plan, values: Mapping[int, Mapping[str, np.ndarray]], clients: Sequence[int]) -> dict[str, Any]:
    """The sums as Python adds whole numbers, without any ring."""
    return {
        part.name: [
            sum(round(values[client][part.name][entry] * 2**part.coding.fraction_bits) for client in clients)
            / 2**part.coding.fraction_bits
            for entry in range(part.size)
        ]
        for part in plan.parts
    }


# --- the sum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring_bits", [32, 64])
@pytest.mark.parametrize("neighbours", [None, 4])
def test_masked_equals_unmasked(neighbours: int | None, ring_bits: int) -> None:
    members = members_of(9)
    plan = plan_for(members, neighbours=neighbours, ring_bits=ring_bits)
    values = drawn(plan)
    done = secure.simulate(plan, members, values)
    assert done.survivors == tuple(sorted(plan.roster.keys))
    for name, exact in in_integers(plan, values, done.survivors).items():
        assert done.sums[name].tolist() == exact, "bit by bit"


def test_updates_are_summed_to_rounding() -> None:
    """Trees of tensors of any floating type: within 1e-6 of the sum in float64, with fraction bits that fit."""
    weights = tiny().weights()
    source = torch.Generator().manual_seed(0)
    values = {
        client: {
            name: torch.randn(leaf.shape, generator=source, dtype=dtype).clamp(-4, 4) for name, leaf in weights.items()
        }
        for client, dtype in enumerate([torch.float64, torch.float32, torch.float64, torch.float16])
    }
    done = secure.aggregate(values, clip=4.0)
    assert list(done.sum) == list(weights)
    for name, leaf in weights.items():
        exact = torch.stack([update[name].double() for update in values.values()]).sum(0)
        assert done.sum[name].dtype == torch.float64
        assert done.sum[name].shape == leaf.shape
        torch.testing.assert_close(done.sum[name], exact, rtol=0, atol=1e-12)
        torch.testing.assert_close(done.mean[name], exact / 4, rtol=0, atol=1e-12)
    coarse = secure.aggregate(values, clip=4.0, fraction_bits=10, ring_bits=32)
    assert 1e-6 < float(tree.norm(tree.subtract(coarse.sum, done.sum))) < 91**0.5 * 4 * 2**-11


def test_nested_trees_and_dropouts() -> None:
    values = {
        client: {"encoder": {"w": torch.full((2, 2), float(client))}, "head": torch.ones(1)} for client in range(6)
    }
    done = secure.aggregate(values, clip=8.0, dropouts={2: Stage.MASK, 5: Stage.UNMASK})
    assert done.survivors == (0, 1, 3, 4, 5)
    assert torch.equal(done.sum["encoder"]["w"], torch.full((2, 2), 13.0, dtype=torch.float64))
    assert torch.equal(done.mean["head"], torch.ones(1, dtype=torch.float64))


def test_values_that_cannot_be_summed_are_refused() -> None:
    good = {client: {"w": torch.ones(2)} for client in range(4)}
    with pytest.raises(Oversize, match="at most 0.5 in magnitude; given 1"):
        secure.aggregate(good, clip=0.5)
    with pytest.raises(Oversize, match="finite"):
        secure.aggregate({**good, 2: {"w": torch.tensor([0.0, torch.nan])}}, clip=2.0)
    with pytest.raises(ValueError, match="same shapes"):
        secure.aggregate({**good, 2: {"w": torch.ones(3)}}, clip=2.0)
    with pytest.raises(ValueError, match="differ in their names"):
        secure.aggregate({**good, 2: {"v": torch.ones(2)}}, clip=2.0)
    with pytest.raises(ValueError, match="floating point"):
        secure.aggregate({**good, 2: {"w": torch.ones(2, dtype=torch.long)}}, clip=2.0)
    with pytest.raises(ValueError, match="nothing to sum"):
        secure.aggregate({}, clip=1.0)
    with pytest.raises(ValueError, match="at least 2"):
        secure.aggregate(dict(list(good.items())[:1]), clip=2.0, minimum=1)
    with pytest.raises(ValueError, match="cannot drop out"):
        secure.aggregate(good, clip=2.0, dropouts={9: Stage.MASK})


# --- whoever drops out ------------------------------------------------------------------------------------------------


def expected_survivors(plan: Plan, gone: Mapping[int, Stage]) -> list[int] | None:
    """For the complete graph: whose values are in the sum, or None where there must be none."""
    least = max(plan.minimum, plan.needed)
    left = [
        [client for client in sorted(plan.roster.keys) if gone.get(client) not in STAGES[: place + 1]]
        for place in range(len(STAGES))
    ]
    if any(len(each) < least for each in left[:3]) or len(left[3]) < plan.needed:
        return None
    return left[2]


def test_random_dropouts_at_random_stages() -> None:
    """500 rounds: the exact sum of those whose values came, where enough are left; else no sum and a clear error."""
    source = random.Random(1)
    outcomes = {"sum": 0, "none": 0}
    parts = (Part("a", 2, FixedPoint(2.0, 20)),)
    crowd = {clients: members_of(clients) for clients in range(3, 8)}
    for case in range(500):
        clients = source.randint(3, 7)
        members = crowd[clients]
        threshold = source.randint(clients // 2 + 1, clients)
        plan = plan_for(members, parts, threshold=threshold, minimum=source.randint(2, 3))
        rate = source.choice([0.1, 0.3, 0.5])
        gone = {member.number: source.choice(STAGES) for member in members if source.random() < rate}
        values = drawn(plan, case)
        survivors = expected_survivors(plan, gone)
        if survivors is None:
            with pytest.raises(BelowThreshold, match=r"needed|ask for"):
                secure.simulate(plan, members, values, gone)
            outcomes["none"] += 1
        else:
            done = secure.simulate(plan, members, values, gone)
            assert list(done.survivors) == survivors, (case, gone)
            assert done.sums["a"].tolist() == in_integers(plan, values, survivors)["a"], (case, gone)
            outcomes["sum"] += 1
    assert min(outcomes.values()) > 100, outcomes


def test_random_dropouts_among_neighbours() -> None:
    """With few neighbours a round can fail above the threshold of all; where it does not, the sum is exact."""
    source = random.Random(2)
    members = members_of(12)
    finished = 0
    for case in range(40):
        plan = plan_for(members, neighbours=6)
        gone = {member.number: source.choice(STAGES) for member in members if source.random() < 0.15}
        values = drawn(plan, case)
        try:
            done = secure.simulate(plan, members, values, gone)
        except BelowThreshold:
            continue
        finished += 1
        assert set(done.survivors) == {c for c in plan.roster.keys if gone.get(c) not in STAGES[:3]}
        for name, exact in in_integers(plan, values, done.survivors).items():
            assert done.sums[name].tolist() == exact
    assert finished > 20


def test_every_client_needs_enough_of_its_own_holders() -> None:
    """Two of the four neighbours of one client are late, in every stage: ten others are not enough without them."""
    members = members_of(12)
    plan = plan_for(members, neighbours=4, threshold=4)
    values = drawn(plan)
    server = Server(plan)
    clients = {member.number: member.join(plan) for member in members}
    for client in clients.values():
        server.receive(client.advertise())
    answers = server.advance()
    late = sorted(server._graph[members[0].number])[:2]

    def collected(send: Callable[[int], bytes], said: str) -> dict[int, bytes]:
        for number in clients.keys() - late:
            server.receive(send(number))
        with pytest.raises(BelowThreshold, match=said):
            server.advance()
        for number in late:
            server.receive(send(number))
        return server.advance()

    answers = collected(
        lambda number: clients[number].share(answers[number]), r"Only \d holders of client \d+'s shares"
    )
    for number, delivery in answers.items():
        clients[number].accept(delivery)
    answers = collected(lambda number: clients[number].mask(values[number]), r"Only \d holders of client")
    collected(lambda number: clients[number].unmask(answers[number]), r"\d shares of client \d+'s secret came, 4 are")
    assert server.sums["a"].tolist() == in_integers(plan, values, server.survivors)["a"]


def test_below_the_threshold_there_is_nothing() -> None:
    """One share too few, and the server's numbers are still noise; one more, and they are the sum."""
    members = members_of(6)
    plan = plan_for(members, threshold=5)
    values = drawn(plan)
    server, clients = at_unmasking(plan, members, values)
    answers = server.advance()
    messages = [clients[number].unmask(answers[number]) for number in answers]
    for message in messages[:4]:
        server.receive(message)
    with pytest.raises(BelowThreshold, match=r"4 shares of client \d+'s secret came, 5 are needed"):
        server.advance()
    with pytest.raises(BelowThreshold, match="no sum"):
        _ = server.sums
    with pytest.raises(Oversize, match="outside what 6 clients can send"):
        plan.decode(server._total, 6)  # what the server holds so far
    server.receive(messages[4])
    server.advance()
    assert server.sums["a"].tolist() == in_integers(plan, values, server.survivors)["a"]


def test_groups_without_common_masks_are_not_unmasked() -> None:
    """In a ring of eight two gaps leave two groups, whose sums could be told apart: nobody helps with that."""
    members = members_of(8)
    plan = plan_for(members, neighbours=2, threshold=2, minimum=2)
    server, clients = at_masking(plan, members)
    ring = [members[0].number]
    while len(ring) < 8:
        ring.append(next(other for other in sorted(server._graph[ring[-1]]) if other not in ring))
    left = tuple(sorted(set(ring) - {ring[0], ring[4]}))
    assert not connected(server._graph, left)
    values = drawn(plan)
    for number in left:
        server.receive(clients[number].mask(values[number]))
    with pytest.raises(BelowThreshold, match="groups that share no masks"):
        server.advance()
    with pytest.raises(Refused, match="the sum of each group would be seen"):
        clients[ring[2]].unmask(Request(server._transcript, 0, left).to_bytes())
    server.receive(clients[ring[4]].mask(values[ring[4]]))  # it was only late
    for number, request in server.advance().items():
        server.receive(clients[number].unmask(request))
    server.advance()
    assert server.sums["a"].tolist() == in_integers(plan, values, server.survivors)["a"]


def at_masking(plan: Plan, members: Sequence[Member]) -> tuple[Server, dict[int, secure.Client]]:
    """A round up to the point where all clients can mask their values."""
    server = Server(plan)
    clients = {member.number: member.join(plan) for member in members}
    for client in clients.values():
        server.receive(client.advertise())
    for number, directory in server.advance().items():
        server.receive(clients[number].share(directory))
    for number, delivery in server.advance().items():
        clients[number].accept(delivery)
    return server, clients


def at_unmasking(
    plan: Plan, members: Sequence[Member], values: Mapping[int, Mapping[str, np.ndarray]]
) -> tuple[Server, dict[int, secure.Client]]:
    """A round up to the point where all masked values have come."""
    server, clients = at_masking(plan, members)
    for number, client in clients.items():
        server.receive(client.mask(values[number]))
    return server, clients


# --- what is seen besides ---------------------------------------------------------------------------------------------


def masked_words(
    plan: Plan, members: Sequence[Member], values: Mapping[int, Mapping[str, np.ndarray]]
) -> dict[int, bytes]:
    """The masked values of every client, as the server receives them."""
    _, clients = at_masking(plan, members)
    return {number: MaskedInput.from_bytes(client.mask(values[number])).words for number, client in clients.items()}


@pytest.mark.parametrize("neighbours", [None, 2])
@pytest.mark.parametrize("ring_bits", [32, 64])
def test_a_changed_input_cannot_be_told_from_the_transcript(ring_bits: int, neighbours: int | None) -> None:
    """Bytes of the masked values: uniform, and the same whether one client sends zeros or its largest values.

    The bound on p is so low that chance fails once in a million runs; without masks the same tests fail at once.
    """
    stats = pytest.importorskip("scipy.stats")
    size = 50_000
    members = members_of(4)
    part = (Part("a", size, FixedPoint(1.0, 20)),)
    plan = plan_for(members, part, ring_bits=ring_bits, neighbours=neighbours)
    first = members[0].number
    ramp = np.linspace(-1, 1, size)
    inputs = [{member.number: {"a": ramp} for member in members} for _ in range(2)]
    inputs[1][first] = {"a": np.ones(size)}

    def histogram(words: bytes) -> np.ndarray:
        return np.bincount(np.frombuffer(words, np.uint8), minlength=256)

    seen = [masked_words(each, members, given) for each, given in zip((plan, plan.next()), inputs)]
    for client in plan.roster.keys:
        counts = [histogram(words[client]) for words in seen]
        assert all(stats.chisquare(each).pvalue > CHANCE for each in counts), client
        assert stats.chi2_contingency(np.stack(counts)).pvalue > CHANCE, client
    # By place in the word, and as differences between the two transcripts: no place, no difference stands out.
    before, after = (np.frombuffer(words[first], f"<u{ring_bits // 8}") for words in seen)
    for words in (before, after, after - before):
        for place in words.view(np.uint8).reshape(size, -1).T:
            assert stats.chisquare(np.bincount(place, minlength=256)).pvalue > CHANCE
    plain = [histogram(plan.encode(given[first]).tobytes()) for given in inputs]
    assert all(stats.chisquare(each).pvalue < CHANCE for each in plain), "the test must see what is not masked"


def test_all_but_one_masked_values_say_nothing_about_the_sum() -> None:
    """Masked values of all clients together still carry their own masks: even their sum is noise until unmasking."""
    stats = pytest.importorskip("scipy.stats")
    members = members_of(3)
    plan = plan_for(members, (Part("a", 50_000, FixedPoint(1.0, 20)),))
    words = masked_words(plan, members, {member.number: {"a": np.zeros(50_000)} for member in members})
    total = sum(np.frombuffer(each, "<u8") for each in words.values())
    assert stats.chisquare(np.bincount(total.view(np.uint8), minlength=256)).pvalue > CHANCE


def test_masks_of_two_rounds_have_nothing_in_common() -> None:
    """The same clients and values in two rounds, in two attempts, and in two sessions: no word agrees but by chance."""
    members = members_of(3)
    size = 2_000
    plan = plan_for(members, (Part("a", size, FixedPoint(1.0, 20)),), ring_bits=64)
    values = {member.number: {"a": np.zeros(size)} for member in members}
    plans = [plan, plan.retry(), plan.next(), replace(plan, session=secrets.token_bytes(16))]
    assert len({each.binding for each in plans}) == 4
    seen = [masked_words(each, members, values) for each in plans]
    for client in plan.roster.keys:
        words = [set(np.frombuffer(each[client], "<u8").tolist()) for each in seen]
        assert len(set.union(*words)) == 4 * size


def test_the_binding_hangs_on_everything() -> None:
    members = members_of(5)
    plan = plan_for(members)
    less = FixedPoint(2.0, 19)
    others = [
        replace(plan, session=secrets.token_bytes(16)),
        plan.next(),
        plan.retry(),
        replace(plan, minimum=4),
        replace(plan, threshold=4),
        replace(plan, neighbours=4),
        replace(plan, ring_bits=32),
        replace(plan, factor_bits=2),
        replace(plan, roster=Roster(plan.roster.members[1:])),
        replace(plan, roster=Roster.of({**plan.roster.keys, members[0].number: secrets.token_bytes(32)})),
        replace(plan, parts=PARTS[:1]),
        replace(plan, parts=PARTS[::-1]),
        replace(plan, parts=(replace(PARTS[0], coding=less), PARTS[1])),
        replace(plan, parts=(replace(PARTS[0], size=6), PARTS[1])),
        replace(plan, parts=(replace(PARTS[0], name="c"), PARTS[1])),
    ]
    assert len({plan.binding, *(other.binding for other in others)}) == len(others) + 1
    assert replace(plan).binding == plan.binding


def test_clients_are_used_once() -> None:
    members = members_of(3)
    plan = plan_for(members)
    values = drawn(plan)
    server, clients = at_unmasking(plan, members, values)
    one = clients[members[0].number]
    with pytest.raises(Refused, match="stage 'unmasking' and does not do 'masked input' now"):
        one.mask(values[one.number])
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="two would use the same masks"):
            attempt(one)
    answers = server.advance()
    for number, request in answers.items():
        server.receive(clients[number].unmask(request))
    with pytest.raises(Refused, match="stage 'done'"):
        one.unmask(answers[one.number])
    with pytest.raises(Refused, match="Every stage is done once"):
        one.advertise()
    server.advance()
    with pytest.raises(secure.Rejected, match="over"):
        server.advance()


def test_members_never_join_a_round_twice() -> None:
    members = members_of(3)
    one = members[0]
    plan = plan_for(members, round=4)
    one.join(plan)
    for old in (plan, replace(plan, round=3), replace(plan, round=3, attempt=9)):
        with pytest.raises(Refused, match="joins only later ones"):
            one.join(old)
    one.join(plan.retry())
    with pytest.raises(Refused, match="joins only later ones"):
        one.join(plan)
    one.join(replace(plan, session=secrets.token_bytes(16)))  # another training
    stranger = Member(one.number)
    with pytest.raises(Refused, match="not in the roster under its own key"):
        stranger.join(plan.next())
    # Having helped to unmask a round, a member does not give a second sum of the same values.
    later = replace(plan, round=9)
    secure.simulate(later, members, drawn(later))
    with pytest.raises(Refused, match="would show a difference"):
        one.join(later.retry())
    secure.simulate(later.next(), members, drawn(later))
    remembered = Member(one.number, one.identity, dict(one.history))
    with pytest.raises(Refused, match="joins only later ones"):
        remembered.join(later.next())


# --- shared factors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [None, 4])
def test_the_server_sees_sums_under_a_factor_that_it_does_not_know(neighbours: int | None) -> None:
    """SecAdam: r * m and r^2 * v, of which only m / sqrt(v) is known; r is the same at all clients."""
    members = members_of(8)
    coding = FixedPoint(1.0, 16), FixedPoint(1.0, 24)
    parts = (Part("m", 400, coding[0], factor=1), Part("v", 400, coding[1], factor=2), Part("plain", 7, coding[0]))
    plan = plan_for(members, parts, factor_bits=8, neighbours=neighbours)
    source = np.random.default_rng(0)
    values = {
        member.number: {"m": source.uniform(-1, 1, 400), "v": source.uniform(1e-3, 1, 400), "plain": np.ones(7)}
        for member in members
    }
    server = Server(plan)
    clients = {member.number: member.join(plan) for member in members}
    with pytest.raises(Refused, match="no shared seed: call `accept` first"):
        _ = clients[members[0].number].seed
    for client in clients.values():
        server.receive(client.advertise())
    answers = server.advance()
    for number in list(answers)[1:]:  # one drops out before it shares: its contribution does not count
        server.receive(clients[number].share(answers[number]))
    answers = server.advance()
    for number, delivery in answers.items():
        clients[number].accept(delivery)
    factors = [clients[number].seed.factors(400, 8) for number in answers]
    assert len({each.tobytes() for each in factors}) == 1
    assert factors[0].min() >= 1
    assert factors[0].max() <= 256
    assert len(np.unique(factors[0])) > 150
    for number in list(answers)[1:]:  # and one after it
        server.receive(clients[number].mask(values[number]))
    for number, request in server.advance().items():
        server.receive(clients[number].unmask(request))
    server.advance()
    exact = {
        name: sum(np.rint(values[number][name] * 2.0**bits) for number in server.survivors) / 2.0**bits
        for name, bits in (("m", 16), ("v", 24))
    }
    assert len(server.survivors) == 6
    for name, bits, power in (("m", 16, 1), ("v", 24, 2)):  # six clients, each off by half a unit at most
        off = server.sums[name] / factors[0].astype(float) ** power - exact[name]
        assert 0 < np.abs(off).max() <= 3 * 2.0**-bits
    assert np.array_equal(server.sums["plain"], np.full(7, 6.0))
    ratio = server.sums["m"] / np.sqrt(server.sums["v"])
    np.testing.assert_allclose(ratio, exact["m"] / np.sqrt(exact["v"]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("kind", "powers", "least"), [("f4", (1, 2), 0.2), ("f8", (1, 2), 0.8), ("f8", (1, 1), 0.6)])
def test_factors_are_not_found_by_division(kind: str, powers: tuple[int, int], least: float) -> None:
    """The largest factor that divides both sums as the real one would: of exact products it nearly always is that."""
    members, size, bits = members_of(4), 300, 6
    parts = tuple(
        Part(name, size, FixedPoint(1.0, 30), factor=power) for name, power in zip(("m", "v"), powers, strict=True)
    )
    plan = plan_for(members, parts, factor_bits=bits)
    source = np.random.default_rng(0)
    values = [[source.uniform(low, 1, size).astype(kind) for low in (-1.0, 1e-3)] for _ in members]
    server, clients = at_masking(plan, members)
    factors = clients[members[0].number].seed.factors(size, bits)
    for member, (m, v) in zip(members, values, strict=True):
        server.receive(clients[member.number].mask({"m": m, "v": v}))
    for number, request in server.advance().items():
        server.receive(clients[number].unmask(request))
    server.advance()
    candidates = np.arange(1, 2**bits + 1)

    def found(first: np.ndarray, second: np.ndarray) -> float:
        divides = [each[:, None] % candidates**power == 0 for each, power in zip((first, second), powers, strict=True)]
        return float((np.where(divides[0] & divides[1], candidates, 1).max(1) == factors).mean())

    seen = [np.rint(server.sums[name] * 2.0**30).astype(np.int64) for name in ("m", "v")]
    exact = [
        sum(np.rint(value[place].astype(float) * 2.0**30).astype(np.int64) for value in values) * factors**power
        for place, power in enumerate(powers)
    ]
    assert found(*seen) < 0.1
    assert found(*exact) > least, "the test must see what is not blurred"


def test_zeros_under_a_factor_stay_zeros() -> None:
    """Of a dead unit all moments are 0, and a sum of 0 must not get a sign."""
    members = members_of(3)
    plan = plan_for(members, (Part("m", 50, FixedPoint(1.0, 20), factor=1),), factor_bits=8)
    done = secure.simulate(plan, members, {member.number: {"m": np.zeros(50)} for member in members})
    assert not done.sums["m"].any()
    largest = {member.number: {"m": np.ones(50)} for member in members}
    assert (secure.simulate(plan.next(), members, largest).sums["m"] > 0).all(), "nor does the bound refuse them"


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_costs_are_what_was_sent() -> None:
    members = members_of(6)
    size = 1000
    plan = plan_for(members, (Part("a", size, FixedPoint(1.0, 20)),))
    values = drawn(plan)
    done = secure.simulate(plan, members, values, {members[0].number: Stage.SHARE})
    costs = done.costs
    everyone = [costs.client(member.number) for member in members]
    assert sum(each.sent for each in everyone) == costs.total.received
    mean = costs.client()
    assert mean.seconds == pytest.approx(sum(each.seconds for each in everyone) / 6)
    assert mean.sent == sum(each.sent for each in everyone) // 6
    assert mean.received == sum(each.received for each in everyone) // 6
    gone = costs.client(members[0].number)
    assert 0 < gone.sent < 200
    assert gone.received == 0, "it never looked at what came"
    one = costs.clients[members[1].number]
    assert one[Stage.MASK].sent == 8 * size + 49 + 64
    assert one[Stage.ADVERTISE].sent == 64 + 49 + 64
    assert all(cost.seconds > 0 for stages in list(costs.clients.values())[1:] for cost in stages.values())
    assert costs.seconds > costs.total.seconds > 0
    half = secure.simulate(replace(plan, round=1, ring_bits=32), members, values).costs
    assert half.clients[members[1].number][Stage.MASK].sent == 4 * size + 49 + 64
    few = secure.simulate(replace(plan, round=2, neighbours=2, threshold=2), members, values).costs
    assert few.client().sent < half.client().sent + 4 * size
    assert few.clients[members[1].number][Stage.SHARE].sent < one[Stage.SHARE].sent


@pytest.mark.slow
def test_a_hundred_clients_with_a_million_parameters_take_less_than_a_minute() -> None:
    members = [Member(number) for number in range(100)]
    plan = plan_for(members, (Part("a", 1_000_000, FixedPoint.finest(1.0, 100)),))
    values = np.random.default_rng(0).uniform(-1, 1, 1_000_000)
    began = time.perf_counter()
    gone = {3: Stage.SHARE, 50: Stage.MASK, 51: Stage.UNMASK}
    done = secure.simulate(plan, members, {number: {"a": values} for number in range(100)}, gone)
    assert time.perf_counter() - began < 60
    np.testing.assert_allclose(done.sums["a"], 98 * values, rtol=0, atol=1e-6)
