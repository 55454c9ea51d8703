"""Secure aggregation, from below: the field of the shares, the ring of the values, key streams, shared factors."""

from __future__ import annotations

import itertools
import math
import random
import secrets
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra `secure`")

from gradleak import secure
from gradleak.secure import (
    BelowThreshold,
    FixedPoint,
    Oversize,
    Part,
    Plan,
    Rejected,
    Roster,
    SharedSeed,
    primitives,
    shamir,
)
from gradleak.secure.plan import connected
from gradleak.secure.ring import CHUNK, add_streams
from gradleak.secure.seed import combined

# --- shares -----------------------------------------------------------------------------------------------------------


def test_the_field_is_a_field_and_holds_every_secret() -> None:
    sympy = pytest.importorskip("sympy")
    assert sympy.isprime(shamir.PRIME)
    assert sympy.nextprime(2**256) == shamir.PRIME
    assert shamir.PRIME < 1 << 8 * shamir.SHARE


@pytest.mark.parametrize(("holders", "threshold"), [(2, 2), (3, 2), (5, 3), (9, 9), (12, 7)])
def test_shares_lie_on_a_polynomial_through_the_secret(holders: int, threshold: int) -> None:
    """Interpolated by sympy over the same field: degree below the threshold, secret at 0, and no lower degree."""
    sympy = pytest.importorskip("sympy")
    secret = secrets.token_bytes(32)
    points = random.Random(holders).sample(range(1, 200), holders)
    shares = shamir.split(secret, points, threshold)
    x = sympy.Symbol("x")
    field = sympy.GF(shamir.PRIME, symmetric=False)
    total = sympy.Poly(0, x, domain=field)
    for point in points:
        basis = sympy.Poly(shares[point], x, domain=field)
        for other in points:
            if other != point:
                slope = pow(point - other, -1, shamir.PRIME)
                basis *= sympy.Poly([slope, -other * slope], x, domain=field)
        total += basis
    assert total.degree() == threshold - 1
    assert int(total.eval(0)) == int.from_bytes(secret, "big")


@pytest.mark.parametrize(
    "secret",
    [bytes(32), b"\xff" * 32, bytes(31) + b"\x01", secrets.token_bytes(32)],
    ids=["zero", "largest", "one", "random"],
)
def test_every_subset_of_enough_shares_gives_the_secret(secret: bytes) -> None:
    shares = shamir.split(secret, range(1, 7), 4)
    for size in (4, 5, 6):
        for points in itertools.combinations(shares, size):
            assert shamir.combine({point: shares[point] for point in points}, 4) == secret
    with pytest.raises(BelowThreshold, match="3 shares cannot give a secret that needs 4"):
        shamir.combine({point: shares[point] for point in (1, 2, 3)}, 4)


def test_too_few_shares_fit_every_secret() -> None:
    """For any other secret there is a share that makes the three known ones give it: they say nothing."""
    secret, other = secrets.token_bytes(32), secrets.token_bytes(32)
    known = {point: share for point, share in shamir.split(secret, range(1, 5), 4).items() if point < 4}
    weights = dict(zip((1, 2, 3, 4), shamir._weights((1, 2, 3, 4))))
    rest = int.from_bytes(other, "big") - sum(weights[point] * share for point, share in known.items())
    last = rest * pow(weights[4], -1, shamir.PRIME) % shamir.PRIME
    assert shamir.combine({**known, 4: last}, 4) == other


def test_shares_are_fresh_and_bad_ones_are_refused() -> None:
    secret = secrets.token_bytes(32)
    one, two = (shamir.split(secret, range(1, 4), 2) for _ in range(2))
    assert not set(one.values()) & set(two.values())
    with pytest.raises(ValueError, match="32 bytes"):
        shamir.split(b"short", range(1, 4), 2)
    with pytest.raises(ValueError, match="between 1 and the 3 shares"):
        shamir.split(secret, range(1, 4), 4)
    with pytest.raises(ValueError, match="Points of shares"):
        shamir.split(secret, range(3), 2)  # the value at 0 is the secret itself
    with pytest.raises(ValueError, match="Points of shares"):
        shamir.split(secret, [1, 1, 2], 2)
    with pytest.raises(Rejected, match="below the field's prime"):
        shamir.from_bytes(shamir.PRIME.to_bytes(shamir.SHARE, "big"))
    assert shamir.from_bytes(shamir.to_bytes(shamir.PRIME - 1)) == shamir.PRIME - 1


# --- fixed point ------------------------------------------------------------------------------------------------------


def test_encoding_is_exact_to_half_a_unit() -> None:
    coding = FixedPoint(4.0, 20)
    values = np.random.default_rng(0).uniform(-4, 4, 10_000)
    assert np.abs(coding.decode(coding.encode(values)) - values).max() <= coding.unit / 2
    grid = np.arange(-50, 50) * coding.unit
    assert np.array_equal(coding.decode(coding.encode(grid)), grid)
    assert coding.encode(np.array([4.0, -4.0])).tolist() == [coding.bound, -coding.bound]


@pytest.mark.parametrize("value", [4.0001, -5.0, math.inf, -math.inf, math.nan])
def test_oversize_values_are_refused_not_clipped(value: float) -> None:
    with pytest.raises(Oversize, match="at most 4.0"):
        FixedPoint(4.0, 20).encode(np.array([0.0, value, 1.0]))


@pytest.mark.parametrize("ring_bits", [32, 64])
@pytest.mark.parametrize("clients", [2, 3, 100, 1000])
@pytest.mark.parametrize("clip", [1e-9, 0.3, 1.0, 1000.0])
def test_finest_is_the_finest(clients: int, clip: float, ring_bits: int) -> None:
    coding = FixedPoint.finest(clip, clients, ring_bits=ring_bits, factor_bits=3, headroom=4)
    room = 2 ** (ring_bits - 1 - 3 - 4)
    assert clients * coding.bound < room
    assert clients * FixedPoint(clip, coding.fraction_bits + 1).bound >= room


def test_plans_whose_sums_could_wrap_are_refused() -> None:
    roster = Roster.of({number: secrets.token_bytes(32) for number in range(4)})
    session = secrets.token_bytes(16)
    limit = FixedPoint(2.0**28, 0)  # 4 x 2^28 = 2^30 fits below 2^31
    Plan(roster, (Part("a", 1, limit),), session, ring_bits=32)
    with pytest.raises(Oversize, match="4 clients x 536870912, which does not fit into 32 bits"):
        Plan(roster, (Part("a", 1, FixedPoint(2.0**29, 0)),), session, ring_bits=32)
    Plan(roster, (Part("a", 1, FixedPoint(2.0**29, 0)),), session, ring_bits=64)
    with pytest.raises(Oversize, match="factor_bits"):
        Plan(roster, (Part("a", 1, FixedPoint(1.0, 30), factor=2),), session, factor_bits=16)
    with pytest.raises(Oversize, match="No fraction bit fits"):
        FixedPoint.finest(1.0, 1000, ring_bits=32, factor_bits=16)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_beyond_what_its_clients_can_send_is_refused_in_any_entry(sign: int) -> None:
    """The other entries, and the other part, whose bound is larger, are as they should be."""
    roster = Roster.of({number: secrets.token_bytes(32) for number in range(4)})
    parts = (Part("a", 3, FixedPoint(1.0, 4)), Part("b", 2, FixedPoint(8.0, 4)))
    plan = Plan(roster, parts, secrets.token_bytes(16), ring_bits=32)
    most = np.array([0, sign * 3 * 16, 5, sign * 3 * 128, 0], "<i4")  # of three clients
    sums = plan.decode(most.view("<u4"), 3)
    assert sums["a"].tolist() == [0, sign * 3.0, 5 / 16]
    assert sums["b"].tolist() == [sign * 24.0, 0]
    for place, name in ((1, "a"), (3, "b")):
        beyond = most.copy()
        beyond[place] += sign
        with pytest.raises(Oversize, match=f"part {name} lies outside what 3 clients can send"):
            plan.decode(beyond.view("<u4"), 3)


def test_a_retry_is_the_next_attempt_and_the_next_round_begins_with_attempt_0() -> None:
    plan = replace(plan_of(5, None), round=3)
    again = plan.retry()
    assert [(each.round, each.attempt) for each in (plan, again, again.retry(), again.next())] == [
        (3, 0),
        (3, 1),
        (3, 2),
        (4, 0),
    ]
    assert replace(again, attempt=0) == plan


def test_plans_that_hide_nothing_are_refused() -> None:
    keys = {number: secrets.token_bytes(32) for number in range(9)}
    roster, parts, session = Roster.of(keys), (Part("a", 1, FixedPoint(1.0)),), secrets.token_bytes(16)
    assert Plan(roster, parts, session).threshold == 5
    assert Plan(roster, parts, session, neighbours=4).threshold == 3
    for wrong, said in (
        ({"minimum": 1}, "at least 2"),
        ({"minimum": 10}, "at most the 9"),
        ({"threshold": 4}, "above half of the 9"),
        ({"threshold": 10}, "at most all"),
        ({"neighbours": 4, "threshold": 2}, "above half of the 5"),
        ({"neighbours": 3}, "even"),
        ({"session": b"short"}, "16 random bytes"),
        ({"round": -1}, "round"),
        ({"ring_bits": 48}, "32 or 64"),
        ({"parts": ()}, "at least one part"),
        ({"parts": (*parts, *parts)}, "different names"),
        ({"parts": (Part("a", 1, FixedPoint(1.0), factor=1),)}, "needs factor_bits"),
    ):
        with pytest.raises(ValueError, match=said):
            Plan(**{"roster": roster, "parts": parts, "session": session, **wrong})
    with pytest.raises(ValueError, match="same key"):
        Roster.of({**keys, 9: keys[0]})
    with pytest.raises(ValueError, match="same number"):
        Roster(((1, keys[0]), (1, keys[1])))


# --- key streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["<u2", "<u4", "<u8"])
def test_streams_are_aes_in_counter_mode_as_little_endian_words(kind: str) -> None:
    """Counter by counter with the block cipher itself, across the border of a chunk."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import ECB

    key, other = secrets.token_bytes(32), secrets.token_bytes(32)
    size = (CHUNK + 16 * 5) // np.dtype(kind).itemsize
    blocks = b"".join(count.to_bytes(16, "big") for count in range(CHUNK // 16 + 5))
    expected, subtracted = (
        np.frombuffer(Cipher(AES(each), ECB()).encryptor().update(blocks), kind)[:size] for each in (key, other)
    )
    total = np.ones(size, kind)
    add_streams(total, [(key, True), (other, False)])
    assert np.array_equal(total, expected - subtracted + np.ones(size, kind))
    add_streams(total, [(key, False), (other, True)])
    assert np.array_equal(total, np.ones(size, kind))


def test_both_ends_derive_the_same_and_everything_else_something_different() -> None:
    one, two = primitives.fresh(), primitives.fresh()
    shared = primitives.agree(one, {2: primitives.agreement_public(two)})[2]
    assert shared == primitives.agree(two, {1: primitives.agreement_public(one)})[1]
    derived = {
        primitives.derive(secret, binding=binding, purpose=purpose, clients=clients)
        for secret in (shared, one)
        for binding in (b"a" * 32, b"b" * 32)
        for purpose in ("pair mask", "own mask")
        for clients in ((1, 2), (2, 1), (1,), (12,))
    }
    assert len(derived) == 32
    with pytest.raises(Rejected, match="Client 2's public key is no usable X25519 key"):
        primitives.agree(one, {2: bytes(32)})  # of small order: the shared secret would be zero
    assert primitives.digest("a", b"bc") != primitives.digest("ab", b"c")


def test_sealed_boxes_open_unchanged_only() -> None:
    key = primitives.fresh()
    box = primitives.seal(key, b"text", b"with")
    assert primitives.unseal(key, box, b"with") == b"text"
    changed = bytes([box[0] ^ 1]) + box[1:]
    for wrong in ((key, changed, b"with"), (key, box, b"other"), (primitives.fresh(), box, b"with")):
        with pytest.raises(Rejected, match="does not open"):
            primitives.unseal(*wrong)


# --- shared factors ---------------------------------------------------------------------------------------------------


def test_factors_are_uniform_positive_and_of_one_round() -> None:
    stats = pytest.importorskip("scipy.stats")
    contributions = {number: secrets.token_bytes(32) for number in (5, 2, 9)}
    seed = combined(contributions, b"r" * 32)
    factors = seed.factors(64_000, 5)
    assert (factors.min(), factors.max()) == (1, 32)
    assert stats.chisquare(np.bincount(factors, minlength=33)[1:]).pvalue > 1e-6
    assert np.array_equal(factors[:10], seed.factors(10, 5))
    same = combined(dict(reversed(contributions.items())), b"r" * 32)
    assert np.array_equal(factors, same.factors(64_000, 5))
    for other in (
        combined(contributions, b"s" * 32),
        combined({**contributions, 2: secrets.token_bytes(32)}, b"r" * 32),
        combined({number: contributions[number] for number in (5, 2)}, b"r" * 32),
    ):
        assert (other.factors(64_000, 5) == factors).mean() < 0.05
    assert "secret" not in repr(seed)
    with pytest.raises(ValueError, match="between 1 and 16 bits"):
        SharedSeed(bytes(32), bytes(32)).factors(3, 17)


# --- graphs -----------------------------------------------------------------------------------------------------------


def plan_of(clients: int, neighbours: int | None) -> Plan:
    roster = Roster.of({number: secrets.token_bytes(32) for number in range(clients)})
    return Plan(roster, (Part("a", 1, FixedPoint(1.0)),), secrets.token_bytes(16), neighbours=neighbours)


@pytest.mark.parametrize(("clients", "neighbours"), [(5, 2), (10, 4), (11, 6), (40, 8)])
def test_graphs_are_regular_symmetric_and_connected(clients: int, neighbours: int) -> None:
    plan = plan_of(clients, neighbours)
    graph = plan.graph(range(clients), b"t" * 32)
    for client, near in graph.items():
        assert len(near) == neighbours
        assert client not in near
        assert all(client in graph[other] for other in near)
    assert connected(graph, range(clients))
    assert graph == plan.graph(list(reversed(range(clients))), b"t" * 32)
    if clients > 5:
        assert graph != plan.graph(range(clients), b"u" * 32), "neighbours hang on the keys of the round"
    lonely = set(range(clients)) - graph[0]
    assert not connected(graph, lonely)


def test_small_graphs_are_complete() -> None:
    complete = {client: frozenset(set(range(5)) - {client}) for client in range(5)}
    assert plan_of(5, None).graph(range(5), b"t") == plan_of(5, 4).graph(range(5), b"t") == complete
    assert plan_of(5, 64).graph(range(5), b"t") == complete


@pytest.mark.parametrize(
    ("clients", "neighbours", "threshold", "colluding", "dropping"),
    [(12, 4, 3, 3, 2), (12, 6, 4, 2, 3), (20, 4, 4, 7, 3), (9, None, 5, 2, 3), (9, None, 5, 5, 0), (9, None, 5, 0, 5)],
)
def test_risks_bound_what_happens_in_random_graphs(
    clients: int, neighbours: int | None, threshold: int, colluding: int, dropping: int
) -> None:
    """Counted over 400 graphs as rounds make them; the bounds hold, and are not empty where something can happen."""
    plan = replace(plan_of(clients, neighbours), threshold=threshold)
    bound = secure.risk(clients, neighbours, threshold, colluding=colluding, dropping=dropping)
    bad, gone = set(range(colluding)), set(range(colluding, colluding + dropping))
    honest = set(range(clients)) - bad - gone
    seen = np.zeros(3)
    for case in range(400):
        graph = plan.graph(range(clients), case.to_bytes(32, "big"))
        alive = set(range(clients)) - gone
        holders = {client: (graph[client] | {client}) & alive for client in graph}
        seen += (
            any(len(graph[client] & bad) >= threshold for client in set(graph) - bad),
            not connected(graph, honest),
            any(len(held) < threshold for held in holders.values()),
        )
    for found, most in zip(seen / 400, (bound.exposed, bound.split, bound.failed)):
        assert found <= most + 4 * math.sqrt(most * (1 - most) / 400)
        assert most == 0 or found > most / 20


def test_risks_of_all_neighbours_are_certainties() -> None:
    assert secure.risk(100, colluding=50, dropping=49) == secure.Risk(0.0, 1.0, 0.0)
    assert secure.risk(100, colluding=51) == secure.Risk(1.0, 0.0, 0.0)
    assert secure.risk(100, dropping=50) == secure.Risk(0.0, 0.0, 1.0)
    assert secure.risk(100, 16, colluding=10).exposed < secure.risk(100, 8, colluding=10).exposed
    with pytest.raises(ValueError, match="together at most all 10"):
        secure.risk(10, colluding=6, dropping=5)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gradleak\[secure\]'"):
        _ = secure.Identity.create().public
