"""A client of secure aggregation: its identity over many rounds (`Member`), and its part in one (`Client`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from gradleak.secure import primitives, shamir
from gradleak.secure.errors import Refused, Rejected
from gradleak.secure.messages import (
    Advertisement,
    Delivery,
    Directory,
    MaskedInput,
    Reader,
    Request,
    Revealed,
    SealedSeed,
    SealedShares,
    Shares,
)
from gradleak.secure.plan import Graph, Plan, connected
from gradleak.secure.primitives import KEY, number
from gradleak.secure.ring import add_streams
from gradleak.secure.seed import SharedSeed, combined
from gradleak.secure.stages import Stage


@dataclass(frozen=True)
class Identity:
    """The long-term Ed25519 key of a client, whose public half is in the roster."""

    secret: bytes = field(repr=False)

    @classmethod
    def create(cls) -> Identity:
        return cls(primitives.fresh())

    @cached_property
    def public(self) -> bytes:
        return primitives.signing_public(self.secret)


@dataclass
class Member:
    """A client over many rounds. It remembers the rounds that it joined, and joins none of them again.

    history    per session: the last round, its attempt, and its next stage (done: shares were revealed). It must
               outlive the process: store it with the identity.
    """

    number: int
    identity: Identity = field(default_factory=Identity.create)
    history: dict[bytes, tuple[int, int, Stage]] = field(default_factory=dict)

    def join(self, plan: Plan) -> Client:
        """Begin a round, with fresh keys.

        A round can be tried again with a higher `attempt`, until this client has revealed shares in it. After that the
        server may know a sum with this client's value, and a second sum over other clients would reveal the difference.
        """
        if plan.roster.keys.get(self.number) != self.identity.public:
            raise Refused(f"Client {self.number} is not in the roster under its own key: ask for the right roster.")
        last = self.history.get(plan.session)
        if last is not None:
            round_, attempt, stage = last
            if (plan.round, plan.attempt) <= (round_, attempt):
                raise Refused(
                    f"Client {self.number} has joined round {round_}, attempt {attempt} of this session and joins only "
                    f"later ones; given round {plan.round}, attempt {plan.attempt}. Use plan.retry() or plan.next()."
                )
            if stage is Stage.DONE and plan.round == round_:
                raise Refused(
                    f"Client {self.number} has revealed shares in round {round_}: its sum may be known, and another "
                    "with other survivors would show a difference of few values. Use plan.next() and fresh values."
                )
        self.history[plan.session] = (plan.round, plan.attempt, Stage.ADVERTISE)
        return Client(plan, self)

    def resume(self, plan: Plan, state: bytes) -> Client:
        """Continue from what `Client.suspend` returned. A state can be used once."""
        known = self.history.get(plan.session)
        if known is None or known[:2] != (plan.round, plan.attempt):
            raise Refused(
                f"Client {self.number} is not in round {plan.round}, attempt {plan.attempt} of this session now, so "
                "this state is an old one."
            )
        if known[2] is Stage.DONE:
            raise Refused(f"Client {self.number} has finished round {plan.round}: this state is an old one.")
        client = Client(plan, self)
        client._restore(state)
        return client

    def reach(self, plan: Plan, stage: Stage) -> None:
        """Record that this stage comes next; refused in a round that was left, or if it was reached before.

        Without this a server could unmask two attempts at a round whose survivors differ in one client, and a state
        that was resumed twice would use its masks for two values.
        """
        known = self.history.get(plan.session)
        if known is None or known[:2] != (plan.round, plan.attempt):
            raise Refused(
                f"Client {self.number} has left round {plan.round}, attempt {plan.attempt} of this session and does "
                "nothing more in it: two sums of the same values would show a difference of few. Go on with the round "
                "that it joined last."
            )
        if ORDER.index(known[2]) >= ORDER.index(stage):
            raise Refused(
                f"Client {self.number} has come to the stage '{known[2].value}' of round {plan.round}: what was "
                "resumed here is an old state, whose masks and shares are used."
            )
        self.history[plan.session] = (plan.round, plan.attempt, stage)


class Client:
    """One client in one attempt at one round: every method once, in this order.

        advertise() -> bytes        share(directory) -> bytes        accept(delivery)
        mask(values) -> bytes       unmask(request) -> bytes

    A method that raises has changed nothing and sent nothing: it can be called again with the right message.
    `Member.join` makes it; it cannot be copied, since two copies would use the same masks for two values.
    """

    def __init__(self, plan: Plan, member: Member) -> None:
        self.plan, self.number, self._member = plan, member.number, member
        self.stage = Stage.ADVERTISE
        self._channel, self._key, self._own = primitives.fresh(), primitives.fresh(), primitives.fresh()
        self._contribution = primitives.fresh()
        self._directory: dict[int, Advertisement] = {}
        self._graph: Graph = {}
        self._transcript = b""
        self._channels: dict[int, bytes] = {}  # secrets shared with each other client, to seal and open boxes
        self._shares: dict[int, tuple[int, int]] = {}  # owner -> shares of its key and of its own mask
        self._clients: frozenset[int] = frozenset()  # who shared; empty until `accept`
        self._seed: SharedSeed | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A Client cannot be copied or pickled: two would use the same masks. See Client.suspend.")

    # --- 1 and 2: keys, and their shares -----------------------------------------------------------------------------

    def advertise(self) -> bytes:
        """This round's public keys, signed."""
        self._at(Stage.ADVERTISE)
        message = self._advertisement()
        self.stage = Stage.SHARE
        return message.sign(self._member.identity.secret).to_bytes()

    def share(self, directory: bytes) -> bytes:
        """Shares of both secrets for every holder, sealed; and the contribution to the seed, for everybody."""
        self._at(Stage.SHARE)
        entries, transcript = checked_directory(self.plan, Directory.from_bytes(directory))
        mine = entries.get(self.number)
        if mine is None or mine.body() != self._advertisement().body():
            raise Rejected(f"The directory does not hold the keys that client {self.number} advertised.")
        graph = self.plan.graph(entries, transcript)
        holders = sorted({self.number, *graph[self.number]})
        if len(holders) < self.plan.needed:
            raise Refused(f"{len(holders)} clients would hold shares, but {self.plan.needed} are needed to recover.")
        points = self.plan.roster.points
        places = [points[holder] for holder in holders]
        of_key, of_own = (shamir.split(secret, places, self.plan.needed) for secret in (self._key, self._own))
        channels = self._agreed(entries, graph)
        boxes = []
        for holder in holders:
            pair = shamir.to_bytes(of_key[points[holder]]), shamir.to_bytes(of_own[points[holder]])
            key_promise, own_promise = (
                commitment(kind, transcript, self.number, holder, share) for kind, share in zip(KINDS, pair)
            )
            sealed = b""
            if holder != self.number:
                key = channel_key(channels[holder], transcript, "shares", self.number, holder)
                sealed = primitives.seal(key, b"".join(pair), key_promise + own_promise)
            boxes.append(SealedShares(holder, key_promise, own_promise, sealed))
        seeds = []
        if self.plan.factor_bits:
            promise = commitment("seed", transcript, self.number, self.number, self._contribution)
            for other in sorted(entries.keys() - {self.number}):
                key = channel_key(channels[other], transcript, "seed", self.number, other)
                seeds.append(SealedSeed(other, promise, primitives.seal(key, self._contribution, promise)))
        promised_mask = commitment("own mask", transcript, self.number, self.number, self._own)
        message = Shares(transcript, self.number, promised_mask, tuple(boxes), tuple(seeds))
        self._member.reach(self.plan, Stage.MASK)
        self._directory, self._transcript, self._graph, self._channels = entries, transcript, graph, channels
        self._shares = {self.number: (of_key[points[self.number]], of_own[points[self.number]])}
        self.stage = Stage.MASK
        return message.sign(self._member.identity.secret).to_bytes()

    def accept(self, delivery: bytes) -> None:
        """Open the boxes of the neighbours. This fixes with whom masks are shared."""
        self._at(Stage.MASK)
        if self._clients:
            raise Rejected(f"Client {self.number} has accepted a delivery in this round and looks at no second one.")
        message = Delivery.from_bytes(delivery)
        self._bound(message.binding)
        clients = self._known(message.clients, self._directory, "shared keys")
        near = self._graph[self.number] & clients
        senders = [box.other for box in message.shares]
        if len(set(senders)) < len(senders) or set(senders) != near:
            raise Rejected(f"Shares must come once from each of the neighbours {sorted(near)}; given {senders}.")
        if len(near) + 1 < self.plan.needed:
            raise Refused(f"{len(near) + 1} clients hold shares, but {self.plan.needed} are needed to recover.")
        shares = {}
        for box in message.shares:
            key = channel_key(self._channels[box.other], self._transcript, "shares", box.other, self.number)
            promises = box.key_commitment, box.self_commitment
            text = self._opened(key, box.sealed, b"".join(promises), box.other)
            pair = text[: shamir.SHARE], text[shamir.SHARE :]
            for kind, share, promise in zip(KINDS, pair, promises):
                if commitment(kind, self._transcript, box.other, self.number, share) != promise:
                    raise Rejected(f"Client {box.other} committed itself to other shares than it sent.")
            shares[box.other] = (shamir.from_bytes(pair[0]), shamir.from_bytes(pair[1]))
        seed = self._combined(message.seeds, clients) if self.plan.factor_bits else None
        self._shares.update(shares)
        self._clients, self._seed = clients, seed

    def _combined(self, seeds: tuple[SealedSeed, ...], clients: frozenset[int]) -> SharedSeed:
        contributions = {self.number: self._contribution}
        for box in seeds:
            if box.other in contributions or box.other not in clients:
                raise Rejected(
                    f"A contribution to the seed came twice, or from a client that is not in this round: {box.other}."
                )
            key = channel_key(self._channels[box.other], self._transcript, "seed", box.other, self.number)
            text = self._opened(key, box.sealed, box.commitment, box.other)
            if commitment("seed", self._transcript, box.other, box.other, text) != box.commitment:
                raise Rejected(f"Client {box.other} committed itself to another contribution than it sent.")
            contributions[box.other] = text
        if missing := clients - contributions.keys():
            raise Rejected(f"Contributions to the seed are missing from {sorted(missing)}.")
        return combined(contributions, self._transcript)

    @property
    def seed(self) -> SharedSeed:
        """The secret that all clients of this round share and the server does not know; after `accept`."""
        if self._seed is None:
            raise Refused("There is no shared seed: call `accept` first, with a plan whose factor_bits is above 0.")
        return self._seed

    # --- 3 and 4: values, and what removes the masks ------------------------------------------------------------------

    def mask(self, values: Mapping[str, NDArray[Any]]) -> bytes:
        """The values of every part, under this client's own mask and one for each neighbour."""
        self._at(Stage.MASK)
        if not self._clients:
            raise Rejected(f"Client {self.number} must accept the server's delivery before it masks values.")
        words = self.plan.encode(values, self._seed)
        near = self._graph[self.number] & self._clients
        streams = [(own_mask_key(self._own, self._transcript, self.number), True)]
        for other, shared in primitives.agree(self._key, {n: self._directory[n].mask_key for n in near}).items():
            streams.append((pair_mask_key(shared, self._transcript, self.number, other), self.number < other))
        add_streams(words, streams)
        self._member.reach(self.plan, Stage.UNMASK)
        self.stage = Stage.UNMASK
        self._erase()
        message = MaskedInput(self._transcript, self.number, words.tobytes())
        return message.sign(self._member.identity.secret).to_bytes()

    def unmask(self, request: bytes) -> bytes:
        """Shares that remove the masks from the SUM: of survivors' own masks, and of the keys of dropped-out clients.

        Both secrets of a client together reveal its value. So this answers once, with one of the two for each.
        """
        self._at(Stage.UNMASK)
        message = Request.from_bytes(request)
        self._bound(message.binding)
        survivors = self._known(message.survivors, self._clients, "sent values")
        near = self._graph[self.number]
        remaining = len(near & survivors) + 1
        if remaining < self.plan.needed:
            raise Refused(f"{remaining} of client {self.number}'s holders are left, but {self.plan.needed} are needed.")
        if not connected(self._graph, survivors):
            raise Refused(
                "The survivors fall into groups that share no masks, so the sum of each group would be seen. Use more "
                "neighbours."
            )
        of_own = tuple((owner, share) for owner, (_, share) in sorted(self._shares.items()) if owner in survivors)
        of_key = tuple((owner, key) for owner, (key, _) in sorted(self._shares.items()) if owner not in survivors)
        answer = Revealed(self._transcript, self.number, of_own, of_key)
        self._member.reach(self.plan, Stage.DONE)
        self._forget()
        return answer.sign(self._member.identity.secret).to_bytes()

    # --- between two messages, in another process --------------------------------------------------------------------

    def suspend(self) -> bytes:
        """The whole state of this client, secrets included, for `Member.resume`; this object cannot be used any more.

        For deployments that start a process for every message. Store it like the identity, with the history: by the
        history a state is refused when it is used twice, which could mask two values with the same masks.
        """
        directory = Directory(self.plan.binding, 0, tuple(self._directory.values())) if self._directory else None
        shares = b"".join(
            number(owner) + b"".join(map(shamir.to_bytes, pair)) for owner, pair in sorted(self._shares.items())
        )
        fields = (
            self.plan.binding,
            self.stage.name.encode(),
            *(self._channel, self._key, self._own, self._contribution),
            directory.to_bytes() if directory else b"",
            shares,
            b"".join(number(client) for client in sorted(self._clients)),
            self._seed.secret if self._seed else b"",
        )
        self._forget()
        return primitives.joined(*fields)

    def _restore(self, state: bytes) -> None:
        reader = Reader(state)
        binding, stage, channel, key, mask, contribution, directory, shares, clients, seed = (
            reader.take(reader.number()) for _ in range(10)
        )
        reader.end()
        self._bound_to(binding, self.plan.binding)
        self.stage = Stage[stage.decode()]
        self._channel, self._key, self._own, self._contribution = channel, key, mask, contribution
        if directory:
            self._directory, self._transcript = checked_directory(self.plan, Directory.from_bytes(directory))
            self._graph = self.plan.graph(self._directory, self._transcript)
            if self.stage is Stage.MASK:
                self._channels = self._agreed(self._directory, self._graph)
        size = 8 + 2 * shamir.SHARE
        rows = [Reader(shares[start : start + size]) for start in range(0, len(shares), size)]
        self._shares = {
            row.number(): (shamir.from_bytes(row.take(shamir.SHARE)), shamir.from_bytes(row.take(shamir.SHARE)))
            for row in rows
        }
        self._clients = frozenset(int.from_bytes(clients[at : at + 8], "big") for at in range(0, len(clients), 8))
        self._seed = SharedSeed(seed, self._transcript) if seed else None

    # --- checks of every stage ---------------------------------------------------------------------------------------

    def _at(self, stage: Stage) -> None:
        if self.stage is not stage:
            raise Refused(
                f"Client {self.number} is at the stage '{self.stage.value}' and does not do '{stage.value}' now. Every "
                "stage is done once; another round needs another client: Member.join."
            )

    def _bound(self, binding: bytes) -> None:
        self._bound_to(binding, self._transcript)

    def _bound_to(self, binding: bytes, expected: bytes) -> None:
        if binding != expected:
            raise Rejected(f"This is no message of round {self.plan.round}, attempt {self.plan.attempt} and its keys.")

    def _known(self, clients: tuple[int, ...], among: Collection[int], what: str) -> frozenset[int]:
        """The set of clients that the server names, after checks."""
        named = frozenset(clients)
        if len(named) < len(clients) or not named <= set(among):
            raise Rejected(f"Clients that {what} must be of this round, each named once; given {sorted(clients)}.")
        if self.number not in named:
            raise Rejected(f"Client {self.number} is not among those that {what}, although it did.")
        if len(named) < self.plan.minimum:
            raise Refused(f"Only {len(named)} clients {what}; a sum needs at least {self.plan.minimum}.")
        return named

    def _advertisement(self) -> Advertisement:
        public = primitives.agreement_public
        return Advertisement(self.plan.binding, self.number, public(self._channel), public(self._key))

    def _agreed(self, entries: Mapping[int, Advertisement], graph: Graph) -> dict[int, bytes]:
        """The secrets shared with every receiver of a sealed box: neighbours or, with a seed, all."""
        others = entries.keys() - {self.number} if self.plan.factor_bits else graph[self.number]
        return primitives.agree(self._channel, {other: entries[other].channel_key for other in others})

    def _opened(self, key: bytes, sealed: bytes, associated: bytes, sender: int) -> bytes:
        try:
            return primitives.unseal(key, sealed, associated)
        except Rejected as error:
            raise Rejected(f"From client {sender} to client {self.number}: {error}") from None

    def _forget(self) -> None:
        self.stage = Stage.DONE
        self._erase()
        self._shares, self._seed = {}, None

    def _erase(self) -> None:
        self._channel = self._key = self._own = self._contribution = bytes(KEY)
        self._channels = {}


KINDS = ("key share", "own mask share")
ORDER = tuple(Stage)


def commitment(kind: str, transcript: bytes, owner: int, holder: int, secret: bytes) -> bytes:
    """A digest that ties a client to a random secret without showing it."""
    return primitives.digest(kind, transcript, number(owner), number(holder), secret)


def channel_key(shared: bytes, transcript: bytes, purpose: str, sender: int, receiver: int) -> bytes:
    """The key of one box from one client to another."""
    return primitives.derive(shared, binding=transcript, purpose=purpose, clients=(sender, receiver))


def own_mask_key(secret: bytes, transcript: bytes, client: int) -> bytes:
    """The key of a client's own mask, bound to the transcript."""
    return primitives.derive(secret, binding=transcript, purpose="own mask", clients=(client,))


def pair_mask_key(shared: bytes, transcript: bytes, one: int, other: int) -> bytes:
    """The key of a mask that two clients share: the one with the lower number adds it, the other subtracts it."""
    pair = (min(one, other), max(one, other))
    return primitives.derive(shared, binding=transcript, purpose="pair mask", clients=pair)


def checked_directory(plan: Plan, directory: Directory) -> tuple[dict[int, Advertisement], bytes]:
    """The keys of a round by client, and the digest to which all later messages are bound."""
    if directory.binding != plan.binding:
        raise Rejected(f"This directory is not of round {plan.round}, attempt {plan.attempt} as planned.")
    entries: dict[int, Advertisement] = {}
    for entry in directory.entries:
        check_sender(plan, entry, plan.binding)
        if entry.sender in entries:
            raise Rejected(f"Client {entry.sender} is listed twice.")
        entries[entry.sender] = entry
    keys = [key for entry in entries.values() for key in (entry.channel_key, entry.mask_key)]
    if len(set(keys)) < len(keys):
        raise Rejected("Two keys of the directory are the same: every client makes two fresh ones.")
    if len(entries) < plan.minimum:
        raise Refused(f"Only {len(entries)} clients take part; a sum needs at least {plan.minimum}.")
    return dict(sorted(entries.items())), transcript_of(plan, entries)


def transcript_of(plan: Plan, entries: Mapping[int, Advertisement]) -> bytes:
    """A digest of the plan and of all keys of the round, in the order of the clients."""
    rows = [piece for client, entry in sorted(entries.items()) for piece in (number(client), entry.body())]
    return primitives.digest("transcript", plan.binding, *rows)


def check_sender(plan: Plan, message: Advertisement | Shares | MaskedInput | Revealed, binding: bytes) -> None:
    """Raise unless the message is of this round, from a client of the roster, and signed by it."""
    if message.binding != binding:
        raise Rejected(
            f"A message from client {message.sender} is not of round {plan.round}, attempt {plan.attempt} and its "
            "keys: it was made for another round, or is an old one sent again."
        )
    if message.sender not in plan.roster:
        raise Rejected(f"Client {message.sender} is not in the roster.")
    message.check(plan.roster.keys[message.sender])
