"""The server of one attempt at one round: collects, relays, and computes the sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradleak.secure import primitives, shamir
from gradleak.secure.client import KINDS, check_sender, commitment, own_mask_key, pair_mask_key, transcript_of
from gradleak.secure.errors import BelowThreshold, Rejected
from gradleak.secure.messages import (
    Advertisement,
    Delivery,
    Directory,
    MaskedInput,
    Request,
    Revealed,
    SealedSeed,
    SealedShares,
    Shares,
)
from gradleak.secure.plan import Graph, Plan, connected
from gradleak.secure.ring import add_streams, word
from gradleak.secure.stages import Stage

LEAVE_OUT = "There is no sum of this round: go on with the next, and a roster without it."


class Server:
    """Collects one stage after the other: `receive` every message, then `advance` to get what to send, per client.

    `receive` raises for a message that it does not accept, and ignores it. `advance` raises `BelowThreshold` if too few
    messages have come; more can still be received, or the round can be tried again with `plan.retry()` and new clients.
    After the last stage `sums` holds the result.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stage = plan, Stage.ADVERTISE
        self._advertised: dict[int, Advertisement] = {}
        self._shared: dict[int, Shares] = {}
        self._revealed: dict[int, Revealed] = {}
        self._transcript = b""
        self._graph: Graph = {}
        self._survivors: set[int] = set()
        self._total = np.zeros(plan.size, word(plan.ring_bits))
        self._sums: dict[str, NDArray[np.float64]] | None = None
        # (owner, holder) -> the commitments to the shares of key and own mask
        self._promises: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose values are in the sum."""
        return tuple(sorted(self._survivors))

    @property
    def sums(self) -> dict[str, NDArray[np.float64]]:
        """The sums of all parts, as float64 vectors."""
        if self._sums is None:
            raise BelowThreshold(f"There is no sum: the server is still at the stage '{self.stage.value}'.")
        return self._sums

    def receive(self, data: bytes) -> int:
        """Take in one client's message of the current stage; returns the client's number."""
        match self.stage:
            case Stage.ADVERTISE:
                return self._receive_advertisement(Advertisement.from_bytes(data))
            case Stage.SHARE:
                return self._receive_shares(Shares.from_bytes(data))
            case Stage.MASK:
                return self._receive_masked(MaskedInput.from_bytes(data))
            case Stage.UNMASK:
                return self._receive_revealed(Revealed.from_bytes(data))
            case _:
                raise Rejected(f"Round {self.plan.round} is over: no message is expected.")

    def advance(self) -> dict[int, bytes]:
        """End the current stage; what to send to each client now (nothing after the last)."""
        match self.stage:
            case Stage.ADVERTISE:
                return self._after_advertising()
            case Stage.SHARE:
                return self._after_sharing()
            case Stage.MASK:
                return self._after_masking()
            case Stage.UNMASK:
                return self._after_unmasking()
            case _:
                raise Rejected(f"Round {self.plan.round} is over; another needs another Server.")

    # --- advertise keys ----------------------------------------------------------------------------------------------

    def _receive_advertisement(self, message: Advertisement) -> int:
        check_sender(self.plan, message, self.plan.binding)
        self._first_of(message.sender, self._advertised)
        known = {key for other in self._advertised.values() for key in (other.channel_key, other.mask_key)}
        if known & {message.channel_key, message.mask_key} or message.channel_key == message.mask_key:
            raise Rejected(f"Client {message.sender} advertises a key that is already in use: keys must be fresh.")
        for key in (message.channel_key, message.mask_key):  # one that nobody can agree with would end the round later
            primitives.agree(primitives.fresh(), {message.sender: key})
        self._advertised[message.sender] = message
        return message.sender

    def _after_advertising(self) -> dict[int, bytes]:
        self._enough(len(self._advertised), "advertised keys")
        self._advertised = dict(sorted(self._advertised.items()))
        directory = Directory(self.plan.binding, 0, tuple(self._advertised.values()))
        self._transcript = transcript_of(self.plan, self._advertised)
        self._graph = self.plan.graph(self._advertised, self._transcript)
        self.stage = Stage.SHARE
        return dict.fromkeys(self._advertised, directory.to_bytes())

    # --- share keys --------------------------------------------------------------------------------------------------

    def _receive_shares(self, message: Shares) -> int:
        self._check(message, self._advertised, self._shared)
        holders = [box.other for box in message.shares]
        wanted = sorted({message.sender, *self._graph[message.sender]})
        if sorted(holders) != wanted:
            raise Rejected(
                f"Client {message.sender} must send shares to {wanted}, once each; it sent them to {holders}."
            )
        others = sorted(self._advertised.keys() - {message.sender}) if self.plan.factor_bits else []
        if sorted(box.other for box in message.seeds) != others:
            raise Rejected(f"Client {message.sender} must send its contribution to the seed once to each of {others}.")
        if len({box.commitment for box in message.seeds}) > 1:  # else clients would have different factors
            raise Rejected(f"Client {message.sender} must commit to one contribution to the seed, the same for all.")
        for box in message.shares:
            if bool(box.sealed) != (box.other != message.sender):
                raise Rejected(f"Client {message.sender} sent a box without shares to client {box.other}.")
        self._shared[message.sender] = message
        for box in message.shares:
            self._promises[message.sender, box.other] = (box.key_commitment, box.self_commitment)
        return message.sender

    def _after_sharing(self) -> dict[int, bytes]:
        self._enough(len(self._shared), "shared keys")
        shared = set(self._shared)
        for client in shared:
            self._enough_holders(client, len(self._graph[client] & shared) + 1)
        # Boxes name the receiver; when delivered they name the sender.
        shares: dict[int, list[SealedShares]] = {client: [] for client in shared}
        seeds: dict[int, list[SealedSeed]] = {client: [] for client in shared}
        for sender, message in sorted(self._shared.items()):
            for box in message.shares:
                if box.other in shared and box.other != sender:
                    to_holder = SealedShares(sender, box.key_commitment, box.self_commitment, box.sealed)
                    shares[box.other].append(to_holder)
            for seed in message.seeds:
                if seed.other in shared:
                    seeds[seed.other].append(SealedSeed(sender, seed.commitment, seed.sealed))
        everybody = tuple(sorted(shared))
        self.stage = Stage.MASK
        return {
            client: Delivery(self._transcript, 0, everybody, tuple(shares[client]), tuple(seeds[client])).to_bytes()
            for client in everybody
        }

    # --- masked input ------------------------------------------------------------------------------------------------

    def _receive_masked(self, message: MaskedInput) -> int:
        expected = self.plan.size * self._total.dtype.itemsize
        if len(message.words) != expected:
            raise Rejected(
                f"Masked values take {expected} bytes; given {len(message.words)} by client {message.sender}."
            )
        self._check(message, self._shared, self._survivors)
        self._total += np.frombuffer(message.words, self._total.dtype)
        self._survivors.add(message.sender)
        return message.sender

    def _after_masking(self) -> dict[int, bytes]:
        self._enough(len(self._survivors), "sent values")
        for client in self._shared:
            near = self._graph[client] & self._survivors
            if client in self._survivors or near:
                self._enough_holders(client, len(near) + (client in self._survivors))
        if not connected(self._graph, self._survivors):
            raise BelowThreshold(
                "The survivors fall into groups that share no masks, so no client would unmask. Use more neighbours."
            )
        self.stage = Stage.UNMASK
        return dict.fromkeys(self.survivors, Request(self._transcript, 0, self.survivors).to_bytes())

    # --- unmasking ---------------------------------------------------------------------------------------------------

    def _receive_revealed(self, message: Revealed) -> int:
        self._check(message, self._survivors, self._revealed)
        holder = message.sender
        owners_held = ({holder} | self._graph[holder]) & self._shared.keys()
        wanted = [owners_held - self._survivors, owners_held & self._survivors]
        for which, (revealed, owners) in enumerate(zip((message.key_shares, message.self_shares), wanted)):
            if sorted(owner for owner, _ in revealed) != sorted(owners):
                raise Rejected(f"Client {holder} did not reveal one {KINDS[which]} of each of {sorted(owners)}.")
            for owner, share in revealed:
                made = commitment(KINDS[which], self._transcript, owner, holder, shamir.to_bytes(share))
                if made != self._promises[owner, holder][which]:
                    raise Rejected(f"The {KINDS[which]} of client {owner} that client {holder} revealed was changed.")
        self._revealed[holder] = message
        return holder

    def _after_unmasking(self) -> dict[int, bytes]:
        shares: dict[tuple[int, int], dict[int, int]] = {}  # (which secret, owner) -> point -> share
        for holder, message in self._revealed.items():
            for which, revealed in enumerate((message.key_shares, message.self_shares)):
                for owner, share in revealed:
                    shares.setdefault((which, owner), {})[self.plan.roster.points[holder]] = share
        # A client that dropped out without a surviving neighbour left no mask in the sum.
        dropped = {client for client in self._shared.keys() - self._survivors if self._graph[client] & self._survivors}
        for which, owners in enumerate((dropped, self._survivors)):
            for owner in sorted(owners):
                if (count := len(shares.get((which, owner), {}))) < self.plan.needed:
                    raise BelowThreshold(
                        f"{count} shares of client {owner}'s secret came, {self.plan.needed} are needed: the sum stays "
                        "hidden. Wait for more clients, or go on with plan.next()."
                    )
        streams = [(self._recovered_own(owner, shares[1, owner]), False) for owner in self.survivors]
        for owner in sorted(dropped):
            streams += self._recovered_pairs(owner, shares[0, owner])
        total = self._total.copy()
        add_streams(total, streams)
        self._sums = self.plan.decode(total, len(self._survivors))
        self.stage = Stage.DONE
        return {}

    def _recovered_own(self, owner: int, shares: dict[int, int]) -> bytes:
        secret = shamir.combine(shares, self.plan.needed)
        promise = self._shared[owner].self_commitment
        if commitment("own mask", self._transcript, owner, owner, secret) != promise:
            raise Rejected(
                f"Client {owner} handed out shares of another secret than it committed itself to. {LEAVE_OUT}"
            )
        return own_mask_key(secret, self._transcript, owner)

    def _recovered_pairs(self, owner: int, shares: dict[int, int]) -> list[tuple[bytes, bool]]:
        """The masks between a client that dropped out and its surviving neighbours, with the sign that removes them."""
        secret = shamir.combine(shares, self.plan.needed)
        if primitives.agreement_public(secret) != self._advertised[owner].mask_key:
            raise Rejected(f"Client {owner} handed out shares of another key than it advertised. {LEAVE_OUT}")
        near = self._graph[owner] & self._survivors
        agreed = primitives.agree(secret, {other: self._advertised[other].mask_key for other in near})
        return [
            (pair_mask_key(shared, self._transcript, owner, other), owner < other) for other, shared in agreed.items()
        ]

    # --- checks of every stage ---------------------------------------------------------------------------------------

    def _check(
        self,
        message: Shares | MaskedInput | Revealed,
        expected: dict[int, Advertisement] | dict[int, Shares] | set[int],
        received: dict[int, Shares] | dict[int, Revealed] | set[int],
    ) -> None:
        check_sender(self.plan, message, self._transcript)
        if message.sender not in expected:
            raise Rejected(f"Client {message.sender} missed an earlier stage of this round; it can join the next one.")
        self._first_of(message.sender, received)

    def _first_of(
        self, client: int, received: dict[int, Advertisement] | dict[int, Shares] | dict[int, Revealed] | set[int]
    ) -> None:
        if client in received:
            raise Rejected(f"Client {client} has already sent its message of the stage '{self.stage.value}'.")

    def _enough(self, count: int, what: str) -> None:
        least = max(self.plan.minimum, self.plan.needed)
        if count < least:
            raise BelowThreshold(
                f"Only {count} clients {what}; minimum and threshold ask for {least}. Wait for more, or plan.retry()."
            )

    def _enough_holders(self, client: int, count: int) -> None:
        if count < self.plan.needed:
            raise BelowThreshold(
                f"Only {count} holders of client {client}'s shares are left, {self.plan.needed} are needed. Wait for "
                "more, or plan.retry()."
            )
