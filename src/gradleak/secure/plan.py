"""What the clients of a round agree on before it begins: who they are, what is summed, and the security settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradleak.secure import primitives
from gradleak.secure.errors import Oversize
from gradleak.secure.primitives import KEY, number
from gradleak.secure.ring import Part, Words, blurred, word
from gradleak.secure.seed import FACTOR_BITS, SharedSeed

Graph: TypeAlias = dict[int, frozenset[int]]  # client -> the clients it shares masks and secrets with


@dataclass(frozen=True)
class Roster:
    """The clients that may take part, by number, and the Ed25519 public key of each.

    It must reach every client through a channel that the server cannot change: whoever writes the roster can invent
    clients, and if all but one are invented, the sum is that one's update.
    """

    members: tuple[tuple[int, bytes], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(sorted((int(client), bytes(key)) for client, key in self.members)))
        for client, key in self.members:
            if not 0 <= client < 1 << 64:
                raise ValueError(f"A client's number must be at least 0 and fit into 64 bits; given {client}.")
            if len(key) != KEY:
                raise ValueError(f"An Ed25519 public key has {KEY} bytes; that of client {client} has {len(key)}.")
        for what, distinct in (("number", {c for c, _ in self.members}), ("key", {k for _, k in self.members})):
            if len(distinct) < len(self.members):
                raise ValueError(f"Two clients of the roster have the same {what}: each may be listed once.")

    @classmethod
    def of(cls, keys: Mapping[int, bytes]) -> Roster:
        return cls(tuple(keys.items()))

    @cached_property
    def keys(self) -> dict[int, bytes]:
        return dict(self.members)

    @cached_property
    def points(self) -> dict[int, int]:
        """The point of the polynomials for each client's shares: its place in the roster, from 1."""
        return {client: place for place, (client, _) in enumerate(self.members, start=1)}

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, client: object) -> bool:
        return client in self.keys


@dataclass(frozen=True)
class Plan:
    """One attempt at one round. Every client and the server hold the same plan; all keys and messages are bound to it.

    session       names a training: at least 16 random bytes, never used for another
    round         counts up; a client never rejoins a round that it helped to finish
    attempt       counts up when a round is tried again (`retry`)
    minimum       number of clients in a sum: a sum of fewer is not revealed
    threshold     number of shares that recover a secret; None: more than half of the holders. A smaller one is refused:
                  with more than half, a server that sends clients different messages cannot get both secrets of a
                  client (with c colluding holders: more than half of holders + c)
    neighbours    number of others with whom a client shares masks and secrets; None: all (Bonawitz et al. 2017). An
                  even number is cheaper and hides less (Bell et al. 2020): a server that colludes with a client's
                  neighbours reads its values, without all others; `risk` says how likely that is
    factor_bits   above 0: clients agree on a shared mask of integers in 1 ... 2^factor_bits, see `Part.factor`
    ring_bits     32 or 64

    A client's holders are itself and its neighbours.

    References: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017;
    Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020.
    """

    roster: Roster
    parts: tuple[Part, ...]
    session: bytes
    round: int = 0
    attempt: int = 0
    minimum: int = 3
    threshold: int | None = None
    neighbours: int | None = None
    factor_bits: int = 0
    ring_bits: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        clients = len(self.roster)
        word(self.ring_bits)
        if len(self.session) < 16:
            raise ValueError(f"session must be at least 16 random bytes; given {len(self.session)}.")
        for name in ("round", "attempt"):
            if not 0 <= getattr(self, name) < 1 << 63:
                raise ValueError(f"{name} must be at least 0; given {getattr(self, name)}.")
        if not 2 <= self.minimum <= clients:
            raise ValueError(
                f"minimum must be at least 2 (a sum of one is that one's value) and at most the {clients} clients of "
                f"the roster; given {self.minimum}."
            )
        if self.neighbours is not None and (self.neighbours < 2 or self.neighbours % 2):
            raise ValueError(f"neighbours must be an even number from 2 on, or None for all; given {self.neighbours}.")
        if self.threshold is None:
            object.__setattr__(self, "threshold", self.holders // 2 + 1)
        if not self.holders < 2 * self.needed <= 2 * self.holders:
            raise ValueError(
                f"threshold must be above half of the {self.holders} holders of a client's shares, and at most all of "
                f"them; given {self.threshold}."
            )
        if not self.parts or len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError("A plan needs at least one part, and parts need different names.")
        if not 0 <= self.factor_bits <= FACTOR_BITS:
            raise ValueError(f"factor_bits must lie between 0 and {FACTOR_BITS}; given {self.factor_bits}.")
        for part in self.parts:
            if part.factor and not self.factor_bits:
                raise ValueError(f"Part {part.name} has a factor, so the plan needs factor_bits.")
            if clients * part.bound(self.factor_bits) >= 1 << (self.ring_bits - 1):
                raise Oversize(
                    f"The sum of part {part.name} can reach {clients} clients x {part.bound(self.factor_bits)}, which "
                    f"does not fit into {self.ring_bits} bits: use fewer fraction_bits or factor_bits, a smaller clip, "
                    "or ring_bits=64. FixedPoint.finest finds the most fraction bits."
                )

    @property
    def holders(self) -> int:
        """Number of holders of one client's shares, if nobody is missing."""
        return len(self.roster) if self.neighbours is None else min(self.neighbours + 1, len(self.roster))

    @property
    def needed(self) -> int:
        """`threshold`, which is not None after construction."""
        assert self.threshold is not None
        return self.threshold

    @cached_property
    def size(self) -> int:
        """Ring elements that a client sends."""
        return sum(part.size for part in self.parts)

    @cached_property
    def binding(self) -> bytes:
        """A digest of all fields: no message fits two different plans."""
        settings = (self.round, self.attempt, self.minimum, self.needed, self.neighbours or 0)
        pieces = [self.session, *(number(value) for value in (*settings, self.factor_bits, self.ring_bits))]
        pieces += [piece for client, key in self.roster.members for piece in (number(client), key)]
        pieces += [
            primitives.joined(
                part.name.encode(),
                number(part.size),
                part.coding.clip.hex().encode(),
                str(part.coding.fraction_bits).encode(),
                number(part.factor),
            )
            for part in self.parts
        ]
        return primitives.digest("plan", *pieces)

    def retry(self) -> Plan:
        """The same round again, with fresh keys and masks: for clients that have not revealed shares in it."""
        return replace(self, attempt=self.attempt + 1)

    def next(self) -> Plan:
        return replace(self, round=self.round + 1, attempt=0)

    # --- who shares with whom ----------------------------------------------------------------------------------------

    def graph(self, clients: Collection[int], transcript: bytes) -> Graph:
        """The neighbours of each of these clients.

        With k neighbours: clients stand in a circle, in an order that depends on all keys of the round, and each is
        joined to the k / 2 before and behind it (the graph of Bell et al. 2020, section 3).
        """
        if self.neighbours is None or self.neighbours >= len(clients) - 1:
            return {client: frozenset(other for other in clients if other != client) for client in clients}
        order = sorted(clients, key=lambda client: primitives.digest("place", transcript, number(client)))
        reach = range(1, self.neighbours // 2 + 1)
        count = len(order)
        return {
            client: frozenset(order[(place + way * step) % count] for step in reach for way in (1, -1))
            for place, client in enumerate(order)
        }

    # --- values and words --------------------------------------------------------------------------------------------

    def encode(self, values: Mapping[str, NDArray[Any]], seed: SharedSeed | None = None) -> Words:
        """A client's values as ring elements, times the shared factors for parts with a factor."""
        if values.keys() != {part.name for part in self.parts}:
            raise ValueError(
                f"Values must be given for the parts {', '.join(part.name for part in self.parts)}; "
                f"given {', '.join(values)}."
            )
        pieces = []
        for part in self.parts:
            vector = np.asarray(values[part.name], np.float64)
            if vector.shape != (part.size,):
                raise ValueError(f"Part {part.name} must be a vector of {part.size} entries; given {vector.shape}.")
            try:
                coded = part.coding.encode(vector)
            except Oversize as error:
                raise Oversize(f"Part {part.name}: {error}") from None
            if part.factor:
                assert seed is not None
                coded = blurred(coded, seed.factors(part.size, self.factor_bits) ** part.factor)
            pieces.append(coded)
        return np.concatenate(pieces).astype(word(self.ring_bits))

    def decode(self, total: Words, clients: int) -> dict[str, NDArray[np.float64]]:
        """The sums of this many clients, part by part; still multiplied by the factors."""
        signed = total.view(f"<i{self.ring_bits // 8}").astype(np.int64)
        sums, start = {}, 0
        for part in self.parts:
            piece = signed[start : start + part.size]
            start += part.size
            bound = clients * part.bound(self.factor_bits)
            if int(piece.max()) > bound or int(piece.min()) < -bound:
                raise Oversize(
                    f"The sum of part {part.name} lies outside what {clients} clients can send. Somebody sent "
                    "something else than the plan asks for; nothing of this sum can be used. Go on with plan.next(); "
                    "where it happens again, with fewer clients in the roster."
                )
            sums[part.name] = part.coding.decode(piece)
        return sums


def connected(graph: Graph, clients: Collection[int]) -> bool:
    """Whether these clients form one group in the graph; otherwise the server could see the sum of each group."""
    unvisited = set(clients)
    waiting = [unvisited.pop()] if unvisited else []
    while waiting:
        reached = graph[waiting.pop()] & unvisited
        unvisited -= reached
        waiting += reached
    return not unvisited
