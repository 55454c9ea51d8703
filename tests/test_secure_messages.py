"""Secure aggregation, message by message: what was changed, repeated, or made for another round is refused.

After every refusal the round goes on with the right message and ends with the right sum: nothing was spoilt.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs the extra `secure`")

from gradleak import secure
from gradleak.secure import (
    BelowThreshold,
    Client,
    FixedPoint,
    Identity,
    Member,
    Oversize,
    Part,
    Plan,
    Refused,
    Rejected,
    Roster,
    Server,
    Stage,
    messages,
    primitives,
    shamir,
)
from gradleak.secure.client import channel_key
from gradleak.secure.messages import Advertisement, Delivery, Directory, MaskedInput, Request, Revealed, Shares

CLIENTS = (3, 8, 11, 12, 20)
PART = Part("a", 6, FixedPoint(1.0, 20))


class Round:
    """A round that is taken forward message by message."""

    def __init__(self, members: dict[int, Member] | None = None, **settings: Any) -> None:
        self.members = members or {number: Member(number) for number in CLIENTS}
        roster = Roster.of({number: member.identity.public for number, member in self.members.items()})
        self.plan = settings.pop("plan", None) or Plan(roster, (PART,), secrets.token_bytes(16), **settings)
        self.server = Server(self.plan)
        self.clients: dict[int, Client] = {number: member.join(self.plan) for number, member in self.members.items()}
        self.values = {number: {"a": np.linspace(-1, 1, 6) * number / 20} for number in CLIENTS}
        self.answers: dict[int, bytes] = {}
        self.sent: dict[int, bytes] = {}

    def send(self, *numbers: int) -> None:
        """What these clients (or all) make of the server's last answer goes to the server."""
        for number in numbers or self.clients:
            self.sent[number] = self.message(number)
            self.server.receive(self.sent[number])

    def message(self, number: int) -> bytes:
        client = self.clients[number]
        if client.stage is Stage.ADVERTISE:
            return client.advertise()
        if client.stage is Stage.SHARE:
            return client.share(self.answers[number])
        if client.stage is Stage.MASK:
            client.accept(self.answers[number])
            return client.mask(self.values[number])
        return client.unmask(self.answers[number])

    def until(self, stage: Stage) -> Round:
        """Up to the point where clients have the server's answer that they need for this stage."""
        while self.server.stage is not stage:
            self.send()
            self.answers = self.server.advance()
        return self

    def finish(self) -> None:
        """The rest of the round, and the right sum."""
        while self.server.stage is not Stage.DONE:
            missing = [number for number in self.clients if number not in self.heard()]
            self.send(*missing) if missing else None
            self.answers = self.server.advance()
        expected = sum(np.rint(self.values[number]["a"] * 2.0**20) for number in self.server.survivors) / 2.0**20
        assert self.server.survivors == CLIENTS
        assert self.server.sums["a"].tolist() == expected.tolist()

    def heard(self) -> set[int]:
        server = self.server
        return set({Stage.ADVERTISE: server._advertised, Stage.SHARE: server._shared,
                    Stage.MASK: server._survivors, Stage.UNMASK: server._revealed}[server.stage])  # fmt: skip

    def signed_by(self, number: int, message: messages.Signed) -> bytes:
        """A message that a client itself signs, whatever it says."""
        return message.sign(self.members[number].identity.secret).to_bytes()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK)


# --- what any message must be -----------------------------------------------------------------------------------------


def test_messages_come_back_from_bytes_as_they_were() -> None:
    round = Round(factor_bits=4)
    kinds = {Stage.ADVERTISE: Advertisement, Stage.SHARE: Shares, Stage.MASK: MaskedInput, Stage.UNMASK: Revealed}
    answered = {Stage.SHARE: Directory, Stage.MASK: Delivery, Stage.UNMASK: Request}
    for stage in STAGES:
        round.until(stage)
        if stage in answered:
            answer = answered[stage].from_bytes(round.answers[3])
            assert answer.to_bytes() == round.answers[3]
        round.send(3)
        message = kinds[stage].from_bytes(round.sent[3])
        assert message.sender == 3
        assert message.to_bytes() == round.sent[3]
        assert message == kinds[stage].from_bytes(message.to_bytes())
        round.send(*CLIENTS[1:])
        round.answers = round.server.advance()
    assert round.server.stage is Stage.DONE


@pytest.mark.parametrize("stage", STAGES)
def test_no_bit_of_a_clients_message_can_be_changed(stage: Stage) -> None:
    """Every byte of the small ones, some of the large: head, body and signature."""
    round = Round().until(stage)
    good = round.message(3)
    places = range(len(good)) if len(good) < 300 else [*range(60), *range(60, len(good), 37), len(good) - 1]
    for place in places:
        with pytest.raises(Rejected):
            round.server.receive(flipped(good, place))
    for length in (0, 1, 40, 48, len(good) - 1):
        with pytest.raises(Rejected, match="ends early|longer|bytes"):
            round.server.receive(good[:length])
    with pytest.raises(Rejected, match="1 bytes longer than it says"):
        round.server.receive(good + b"\0")
    round.server.receive(good)
    round.finish()


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_is_heard_once_a_stage(stage: Stage) -> None:
    round = Round().until(stage)
    round.send(8)
    with pytest.raises(Rejected, match=f"Client 8 has already sent its message of the stage '{stage.value}'"):
        round.server.receive(round.sent[8])
    round.finish()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", ["round", "attempt", "session", "keys"])
def test_messages_of_another_round_are_refused(stage: Stage, change: str) -> None:
    """The same clients with the same identities: another round, attempt or training, or only other keys."""
    old = Round()
    plans = {
        "round": old.plan.next(),
        "attempt": old.plan.retry(),
        "session": replace(old.plan, session=secrets.token_bytes(16)),
        "keys": old.plan,
    }
    replayed = old.until(stage).message(11)
    for member in old.members.values():
        member.history.clear()  # as if the clients had lost their memory
    new = Round(old.members, plan=plans[change]).until(stage)
    if change == "keys" and stage is Stage.ADVERTISE:
        new.server.receive(replayed)  # its own advertisement of the same plan: then its keys are not in the directory
        new.sent = {number: new.message(number) for number in CLIENTS}
        for number in set(CLIENTS) - {11}:
            new.server.receive(new.sent[number])
        new.answers = new.server.advance()
        with pytest.raises(Rejected, match="does not hold the keys that client 11 advertised"):
            new.clients[11].share(new.answers[11])
        return
    with pytest.raises(Rejected, match="client 11 is not of round"):
        new.server.receive(replayed)
    new.finish()
    old.server.receive(replayed)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_answers_of_another_round_are_refused(stage: Stage) -> None:
    """The server's side: directory, delivery and request of an earlier round, given to a client of this one."""
    old = Round().until(stage)
    new = Round(old.members, plan=old.plan.next()).until(stage)
    right, new.answers[12] = new.answers[12], old.answers[12]
    with pytest.raises(Rejected, match="round 1, attempt 0"):
        new.message(12)
    new.answers[12] = right
    new.finish()


@pytest.mark.parametrize("stage", STAGES)
def test_messages_of_another_stage_are_refused(stage: Stage) -> None:
    round = Round().until(stage)
    early = Revealed if stage is Stage.ADVERTISE else Advertisement
    lists = ((), ()) if early is Revealed else (bytes(32), bytes(32))
    with pytest.raises(Rejected, match="Is it of another stage"):
        round.server.receive(round.signed_by(3, early(round.plan.binding, 3, *lists)))
    with pytest.raises(Rejected, match="something unknown"):
        round.server.receive(b"\xff" + bytes(200))
    round.finish()


def test_only_the_roster_takes_part() -> None:
    round = Round()
    stranger, thief = Identity.create(), Identity.create()
    keys = primitives.agreement_public(primitives.fresh()), primitives.agreement_public(primitives.fresh())
    with pytest.raises(Rejected, match="Client 99 is not in the roster"):
        round.server.receive(Advertisement(round.plan.binding, 99, *keys).sign(stranger.secret).to_bytes())
    with pytest.raises(Rejected, match="not that of client 3"):
        round.server.receive(Advertisement(round.plan.binding, 3, *keys).sign(thief.secret).to_bytes())
    with pytest.raises(Rejected, match="not that of client 3"):  # another member in its name
        round.server.receive(round.signed_by(8, Advertisement(round.plan.binding, 3, *keys)))
    round.finish()


def test_who_missed_a_stage_waits_for_the_next_round() -> None:
    round = Round().until(Stage.SHARE)
    late = round.message(20)
    round.send(3, 8, 11, 12)
    round.answers = round.server.advance()
    assert 20 not in round.answers
    with pytest.raises(Rejected, match="another stage"):
        round.server.receive(late)
    masked = MaskedInput(round.server._transcript, 20, bytes(8 * 6))
    with pytest.raises(Rejected, match="Client 20 missed an earlier stage"):
        round.server.receive(round.signed_by(20, masked))


# --- keys -------------------------------------------------------------------------------------------------------------


def test_directories_are_looked_through() -> None:
    round = Round().until(Stage.SHARE)
    client, good = round.clients[3], Directory.from_bytes(round.answers[3])
    entries = list(good.entries)
    forged = replace(entries[1], mask_key=primitives.agreement_public(primitives.fresh()))
    twin = replace(entries[1], channel_key=entries[2].channel_key)
    twin = twin.sign(round.members[entries[1].sender].identity.secret)
    cases: list[tuple[list[Advertisement], type[Exception], str]] = [
        ([entries[0], forged, *entries[2:]], Rejected, "not that of client 8"),
        ([*entries, entries[1]], Rejected, "Client 8 is listed twice"),
        (entries[1:], Rejected, "does not hold the keys that client 3 advertised"),
        ([entries[0], twin, *entries[2:]], Rejected, "Two keys of the directory are the same"),
        (entries[:2], Refused, "Only 2 clients take part; a sum needs at least 3"),
    ]
    for changed, error, said in cases:
        with pytest.raises(error, match=said):
            client.share(replace(good, entries=tuple(changed)).to_bytes())
    round.finish()


def test_a_split_directory_cannot_be_used() -> None:
    """A server that shows two clients different keys gets boxes that nobody can open, and no shares of either."""
    round = Round().until(Stage.SHARE)
    good = Directory.from_bytes(round.answers[3])
    less = replace(good, entries=good.entries[:4]).to_bytes()  # without client 20
    other = round.clients[3].share(less)
    with pytest.raises(Rejected, match="not of round 0, attempt 0 and its keys"):
        round.server.receive(other)


def test_keys_are_not_used_twice() -> None:
    round = Round()
    round.send(3)
    taken = Advertisement.from_bytes(round.sent[3])
    own = primitives.agreement_public(primitives.fresh())
    for pair in ((taken.channel_key, own), (own, taken.mask_key), (own, own)):
        with pytest.raises(Rejected, match="already in use"):
            round.server.receive(round.signed_by(8, Advertisement(round.plan.binding, 8, *pair)))
    round.finish()


@pytest.mark.parametrize("which", ["channel_key", "mask_key"])
def test_keys_that_nobody_can_agree_with_are_refused_at_once(which: str) -> None:
    """A point of small order would be noticed by the clients, when the round cannot go on without its owner."""
    round = Round()
    good = Advertisement.from_bytes(round.clients[8].advertise())
    bad = replace(good, **{which: bytes(32)})
    with pytest.raises(Rejected, match="Client 8's public key is no usable X25519 key"):
        round.server.receive(round.signed_by(8, bad))
    round.server.receive(good.to_bytes())
    round.finish()


# --- shares -----------------------------------------------------------------------------------------------------------


def test_shares_that_were_changed_on_their_way_are_refused() -> None:
    """By whoever relays them: box, commitment, sender, or the whole set."""
    round = Round(factor_bits=4).until(Stage.MASK)
    client, good = round.clients[3], Delivery.from_bytes(round.answers[3])
    first, *rest = good.shares

    def with_first(**changes: Any) -> Delivery:
        return replace(good, shares=(replace(first, **changes), *rest))

    seed, *seeds = good.seeds
    other = round.server._shared[8].shares[2]  # sealed by 8, but to client 11
    cases: list[tuple[Delivery, type[Exception], str]] = [
        (
            with_first(sealed=flipped(first.sealed, 5)),
            Rejected,
            "From client 8 to client 3: A sealed box does not open",
        ),
        (with_first(key_commitment=bytes(32)), Rejected, "does not open"),
        (with_first(sealed=other.sealed, key_commitment=other.key_commitment), Rejected, "does not open"),
        (with_first(sealed=rest[0].sealed), Rejected, "does not open"),
        (with_first(sealed=b""), Rejected, "does not open"),
        (with_first(other=11), Rejected, "once from each of the neighbours"),
        (replace(good, shares=tuple(rest)), Rejected, "once from each of the neighbours"),
        (replace(good, shares=(*good.shares, first)), Rejected, "once from each of the neighbours"),
        (replace(good, clients=(3, 8, 11, 12, 20, 99)), Rejected, "must be of this round"),
        (replace(good, clients=(3, 3, 8, 11, 12, 20)), Rejected, "each named once"),
        (replace(good, clients=(8, 11, 12, 20)), Rejected, "Client 3 is not among those"),
        (replace(good, clients=(3, 8)), Refused, "Only 2 clients shared keys"),
        (replace(good, seeds=(replace(seed, sealed=flipped(seed.sealed, 0)), *seeds)), Rejected, "does not open"),
        (replace(good, seeds=(seed, *good.seeds)), Rejected, "came twice"),
        (replace(good, seeds=tuple(seeds)), Rejected, r"missing from \[8\]"),
    ]
    for changed, error, said in cases:
        with pytest.raises(error, match=said):
            client.accept(changed.to_bytes())
    with pytest.raises(Rejected, match="must accept the server's delivery"):
        client.mask(round.values[3])
    client.accept(round.answers[3])
    with pytest.raises(Rejected, match="looks at no second one"):
        client.accept(round.answers[3])
    round.server.receive(client.mask(round.values[3]))
    round.finish()


def test_shares_that_their_owner_made_wrongly_are_refused() -> None:
    """A box whose text is not what the owner committed itself to: the holder sees it, and says whose it is."""
    round = Round().until(Stage.MASK)
    good = Delivery.from_bytes(round.answers[3])
    first, *rest = good.shares
    cheat = round.clients[first.other]
    key = channel_key(cheat._channels[3], cheat._transcript, "shares", first.other, 3)
    text = bytes(2 * shamir.SHARE)
    sealed = primitives.seal(key, text, first.key_commitment + first.self_commitment)
    with pytest.raises(Rejected, match="Client 8 committed itself to other shares than it sent"):
        round.clients[3].accept(replace(good, shares=(replace(first, sealed=sealed), *rest)).to_bytes())
    round.finish()


def test_contributions_that_their_owner_made_wrongly_are_refused() -> None:
    """One that tells clients different contributions would make their factors differ."""
    round = Round(factor_bits=3).until(Stage.MASK)
    good = Delivery.from_bytes(round.answers[3])
    first, *rest = good.seeds
    cheat = round.clients[first.other]
    key = channel_key(cheat._channels[3], cheat._transcript, "seed", first.other, 3)
    sealed = primitives.seal(key, secrets.token_bytes(32), first.commitment)
    with pytest.raises(Rejected, match="Client 8 committed itself to another contribution than it sent"):
        round.clients[3].accept(replace(good, seeds=(replace(first, sealed=sealed), *rest)).to_bytes())
    round.finish()


def test_clients_do_not_share_or_mask_below_the_threshold() -> None:
    round = Round(threshold=5).until(Stage.SHARE)
    directory = Directory.from_bytes(round.answers[3])
    with pytest.raises(Refused, match="4 clients would hold shares, but 5 are needed"):
        round.clients[3].share(replace(directory, entries=directory.entries[:4]).to_bytes())
    round.until(Stage.MASK)
    delivery = Delivery.from_bytes(round.answers[3])
    less = replace(delivery, clients=(3, 8, 11, 12), shares=delivery.shares[:3])
    with pytest.raises(Refused, match="4 clients hold shares, but 5 are needed"):
        round.clients[3].accept(less.to_bytes())
    round.finish()


def test_shares_must_go_to_all_holders_once() -> None:
    round = Round(factor_bits=2).until(Stage.SHARE)
    good = Shares.from_bytes(round.message(3))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"shares": good.shares[1:]}, "must send shares to"),
        ({"shares": (*good.shares, good.shares[0])}, "once each"),
        ({"shares": tuple(replace(box, sealed=b"") for box in good.shares)}, "without shares"),
        ({"seeds": good.seeds[1:]}, "contribution to the seed once to each"),
        ({"seeds": (replace(good.seeds[0], commitment=bytes(32)), *good.seeds[1:])}, "one contribution to the seed"),
    ]
    for changes, said in wrong:
        with pytest.raises(Rejected, match=said):
            round.server.receive(round.signed_by(3, replace(good, **changes)))
    round.server.receive(good.to_bytes())
    round.finish()


# --- values -----------------------------------------------------------------------------------------------------------


def test_oversize_values_are_refused_before_anything_is_sent() -> None:
    round = Round().until(Stage.MASK)
    client = round.clients[3]
    client.accept(round.answers[3])
    for wrong, error, said in (
        ({"a": np.full(6, 1.01)}, Oversize, "Part a: Values must be finite and at most 1.0"),
        ({"a": np.full(6, np.nan)}, Oversize, "finite"),
        ({"a": np.zeros(7)}, ValueError, "vector of 6 entries"),
        ({"b": np.zeros(6)}, ValueError, "parts a; given b"),
    ):
        with pytest.raises(error, match=said):
            client.mask(wrong)
    round.server.receive(client.mask(round.values[3]))
    round.finish()


def test_masked_values_of_another_length_are_refused() -> None:
    round = Round().until(Stage.MASK)
    for size in (0, 8 * 5, 8 * 7, 4 * 6):
        message = MaskedInput(round.server._transcript, 3, bytes(size))
        with pytest.raises(Rejected, match=f"take 48 bytes; given {size} by client 3"):
            round.server.receive(round.signed_by(3, message))
    round.finish()


def test_a_sum_that_nobody_can_have_sent_is_refused() -> None:
    """A client that sends something else than its masked values spoils the sum; it is not taken for one."""
    round = Round().until(Stage.MASK)
    round.send(*CLIENTS[1:])
    round.clients[3].accept(round.answers[3])
    round.clients[3].mask(round.values[3])
    junk = MaskedInput(round.server._transcript, 3, secrets.token_bytes(48))
    round.server.receive(round.signed_by(3, junk))
    round.answers = round.server.advance()
    round.send()
    with pytest.raises(Oversize, match="Somebody sent something else"):
        round.server.advance()
    with pytest.raises(BelowThreshold):
        _ = round.server.sums


# --- unmasking --------------------------------------------------------------------------------------------------------


def test_never_both_secrets_of_a_client() -> None:
    """A client answers one request, with one share per client: that of the own mask or that of the key."""
    round = Round().until(Stage.UNMASK)
    client = round.clients[3]
    held = dict(client._shares)
    less = Request(round.server._transcript, 0, (3, 8, 11, 12))
    answer = Revealed.from_bytes(client.unmask(less.to_bytes()))
    assert [owner for owner, _ in answer.self_shares] == [3, 8, 11, 12]
    assert [owner for owner, _ in answer.key_shares] == [20]
    assert dict(answer.self_shares) == {owner: held[owner][1] for owner in (3, 8, 11, 12)}
    assert dict(answer.key_shares) == {20: held[20][0]}
    for second in (round.answers[3], less.to_bytes()):
        with pytest.raises(Refused, match="stage 'done'"):
            client.unmask(second)
    assert not client._shares, "nothing is kept that could be asked for"
    # A server that had asked for the key of 20 now has an answer that does not fit what it knows.
    with pytest.raises(Rejected, match=r"did not reveal one key share of each of \[\]"):
        round.server.receive(answer.to_bytes())


def test_two_stories_do_not_give_both_secrets() -> None:
    """A server that tells some clients that 20 dropped out, and others that it did not, gets too few shares of each."""
    round = Round().until(Stage.UNMASK)
    own: dict[int, int] = {}
    key: dict[int, int] = {}
    for place, number in enumerate(CLIENTS):
        story = CLIENTS if place % 2 or number == 20 else CLIENTS[:-1]
        request = Request(round.server._transcript, 0, story).to_bytes()
        answer = Revealed.from_bytes(round.clients[number].unmask(request))
        point = round.plan.roster.points[number]
        for told, found in ((answer.self_shares, own), (answer.key_shares, key)):
            if 20 in dict(told):
                found[point] = dict(told)[20]
    assert len(own) + len(key) == len(CLIENTS)
    assert min(len(own), len(key)) < round.plan.needed
    with pytest.raises(BelowThreshold):
        shamir.combine(min(own, key, key=len), round.plan.needed)


def test_requests_are_looked_through() -> None:
    round = Round().until(Stage.UNMASK)
    transcript = round.server._transcript
    cases: list[tuple[tuple[int, ...], type[Exception], str]] = [
        ((3, 8), Refused, "Only 2 clients sent values; a sum needs at least 3"),
        ((8, 11, 12, 20), Rejected, "Client 3 is not among those that sent values"),
        ((3, 8, 11, 99), Rejected, "must be of this round"),
        ((3, 3, 8, 11), Rejected, "each named once"),
    ]
    for survivors, error, said in cases:
        with pytest.raises(error, match=said):
            round.clients[3].unmask(Request(transcript, 0, survivors).to_bytes())
    round.finish()


def test_a_request_below_the_threshold_is_refused() -> None:
    round = Round(threshold=5).until(Stage.UNMASK)
    with pytest.raises(Refused, match="4 of client 3's holders are left, but 5 are needed"):
        round.clients[3].unmask(Request(round.server._transcript, 0, (3, 8, 11, 12)).to_bytes())
    round.finish()


@pytest.mark.parametrize("which", ["self_shares", "key_shares"])
def test_tampered_shares_are_named_and_the_others_suffice(which: str) -> None:
    """A client that reveals a changed share is found out by its commitment; the threshold is met without it."""
    round = Round().until(Stage.MASK)
    round.send(*CLIENTS[1:])  # client 3 drops out
    round.answers = round.server.advance()
    good = Revealed.from_bytes(round.message(8))
    (owner, share), *rest = getattr(good, which)
    forged = replace(good, **{which: ((owner, (share + 1) % shamir.PRIME), *rest)})
    with pytest.raises(Rejected, match=rf"of client {owner} that client 8 revealed was changed"):
        round.server.receive(round.signed_by(8, forged))
    for changed, said in (
        (replace(good, **{which: tuple(rest)}), "did not reveal one"),
        (replace(good, **{which: (*getattr(good, which), (owner, share))}), "did not reveal one"),
        (replace(good, self_shares=(*good.self_shares, *good.key_shares)), "did not reveal one"),
    ):
        with pytest.raises(Rejected, match=said):
            round.server.receive(round.signed_by(8, changed))
    round.send(11, 12, 20)
    round.server.advance()
    expected = sum(np.rint(round.values[number]["a"] * 2.0**20) for number in CLIENTS[1:]) / 2.0**20
    assert round.server.sums["a"].tolist() == expected.tolist()


@pytest.mark.parametrize("victim", ["_own", "_key"])
def test_shares_of_another_secret_are_found_out(victim: str) -> None:
    """An owner whose shares and commitments agree, but are of another secret than the one it masked with."""
    round = Round().until(Stage.SHARE)
    cheat = round.clients[3]
    real = getattr(cheat, victim)
    said = cheat._advertisement()
    cheat._advertisement = lambda: said  # type: ignore[method-assign]
    setattr(cheat, victim, secrets.token_bytes(32))
    message = Shares.from_bytes(cheat.share(round.answers[3]))
    setattr(cheat, victim, real)
    promise = primitives.digest("own mask", message.binding, primitives.number(3), primitives.number(3), cheat._own)
    round.server.receive(round.signed_by(3, replace(message, self_commitment=promise)))
    round.send(*CLIENTS[1:])
    round.answers = round.server.advance()
    round.send(*(CLIENTS if victim == "_own" else CLIENTS[1:]))
    round.answers = round.server.advance()
    round.send(*CLIENTS[1:])
    with pytest.raises(Rejected, match="Client 3 handed out shares of another (secret|key)"):
        round.server.advance()


# --- trying again -----------------------------------------------------------------------------------------------------


def spoiled_share(round: Round) -> None:
    delivery = Delivery.from_bytes(round.until(Stage.MASK).answers[3])
    first, *rest = delivery.shares
    changed = replace(delivery, shares=(replace(first, sealed=flipped(first.sealed, 0)), *rest))
    round.clients[3].accept(changed.to_bytes())


def too_few(round: Round) -> None:
    round.until(Stage.MASK).send(3, 8)
    round.server.advance()


def oversize(round: Round) -> None:
    round.until(Stage.MASK).values[3]["a"][0] = 9.0
    round.send()


@pytest.mark.parametrize("accident", [spoiled_share, too_few, oversize])
def test_a_round_that_failed_can_be_tried_again(accident: Callable[[Round], None]) -> None:
    """With fresh keys under the next attempt; what was sent before fits nothing in it."""
    failed = Round()
    with pytest.raises(secure.SecureError):
        accident(failed)
    again = Round(failed.members, plan=failed.plan.retry())
    keys = [
        {client._channel for client in round.clients.values()} | {client._key for client in round.clients.values()}
        for round in (failed, again)
    ]
    assert not (keys[0] & keys[1]) - {bytes(32)}
    again.finish()


def test_two_attempts_are_not_both_unmasked() -> None:
    """All values came, and the server asks for another attempt without client 20, whose value would show."""
    first = Round().until(Stage.MASK)
    first.send()
    first.answers = first.server.advance()
    others = {number: first.members[number] for number in CLIENTS[:-1]}
    again = Round(others, plan=first.plan.retry())
    for number in others:
        with pytest.raises(Refused, match=f"Client {number} has left round 0, attempt 0"):
            first.message(number)
    while again.server.stage is not Stage.DONE:
        again.send()
        again.answers = again.server.advance()
    assert again.server.survivors == CLIENTS[:-1]
    with pytest.raises(Refused, match="has left round 0, attempt 0"):
        first.message(3)
    with pytest.raises(Refused, match="has revealed shares in round 0"):  # what the old one did was not noted instead
        first.members[3].join(again.plan.retry())


# --- one process per message ------------------------------------------------------------------------------------------


def test_a_client_can_live_in_another_process_for_every_message() -> None:
    """Suspended and resumed before every call; the object that was suspended can do nothing more."""
    round = Round(factor_bits=3)
    member = round.members[11]

    def moved() -> None:
        before = round.clients[11]
        state = before.suspend()
        assert before.stage is Stage.DONE
        round.clients[11] = Member(11, member.identity, member.history).resume(round.plan, state)

    moved()
    for stage in STAGES[1:]:
        round.until(stage)
        moved()
        if stage is Stage.MASK:
            round.clients[11].accept(round.answers[11])
            moved()
            seed = round.clients[11].seed
            round.server.receive(round.clients[11].mask(round.values[11]))
            round.send(*(set(CLIENTS) - {11}))
            round.answers = round.server.advance()
            assert np.array_equal(seed.factors(9, 3), round.clients[3].seed.factors(9, 3))
    round.finish()


@pytest.mark.parametrize("stage", [Stage.SHARE, Stage.MASK, Stage.UNMASK])
def test_a_state_that_is_resumed_twice_is_used_once(stage: Stage) -> None:
    """Two values under the same masks would show their difference."""
    round = Round().until(stage)
    state = round.clients[11].suspend()
    one, two = (round.members[11].resume(round.plan, state) for _ in range(2))
    round.clients[11] = one
    round.send(11)
    round.clients[11] = two
    with pytest.raises(Refused, match="an old state, whose masks and shares are used"):
        round.message(11)
    round.clients[11] = one
    round.finish()


def test_old_states_are_refused() -> None:
    round = Round()
    member = round.members[11]
    state = round.clients[11].suspend()
    with pytest.raises(Rejected, match="no message of round 0"):
        member.resume(replace(round.plan, minimum=4), state)
    member.join(round.plan.next())
    with pytest.raises(Refused, match="this state is an old one"):
        member.resume(round.plan, state)
    other = Round().until(Stage.UNMASK)
    client = other.clients[11]
    kept = client.suspend()
    client = other.clients[11] = other.members[11].resume(other.plan, kept)
    other.finish()
    with pytest.raises(Refused, match="has finished round 0"):
        other.members[11].resume(other.plan, kept)
