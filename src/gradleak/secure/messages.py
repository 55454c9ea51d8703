"""The messages between clients and server: dataclasses, and their bytes with explicit sizes.

    kind 1 byte | binding 32 | sender 8 | length of the body 8 | body | signature 64 (clients only)

`binding` is the digest of the plan in the first stage and, from then on, of the plan and all keys of the round. It
reveals messages of another round, attempt or set of keys. Clients sign every message with their long-term key. Numbers
are big-endian; masked values are little-endian words of the ring.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from gradleak.secure import primitives, shamir
from gradleak.secure.errors import Rejected
from gradleak.secure.primitives import KEY, SIGNATURE, TAG

_HEAD = struct.Struct(f">B{KEY}sQQ")
M = TypeVar("M", bound="Message")


class Reader:
    """Reads fields of stated sizes from bytes, one after the other."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise Rejected(f"A message ends early: {count} more bytes were announced than are there.")
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def number(self, size: int = 8) -> int:
        return int.from_bytes(self.take(size), "big")

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        if self._at != len(self._data):
            raise Rejected(f"A message is {len(self._data) - self._at} bytes longer than it says.")


def _numbers(values: tuple[int, ...]) -> bytes:
    return struct.pack(f">I{len(values)}Q", len(values), *values)


def _read_numbers(reader: Reader) -> tuple[int, ...]:
    count = reader.number(4)
    return struct.unpack(f">{count}Q", reader.take(8 * count))


@dataclass(frozen=True)
class Message:
    """A message between a client and the server, bound to a round."""

    kind: ClassVar[int]

    binding: bytes
    sender: int  # 0 for the server, which does not sign

    def body(self) -> bytes:
        raise NotImplementedError

    @classmethod
    def read(cls: type[M], binding: bytes, sender: int, reader: Reader) -> M:
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        body = self.body()
        signature = self.signature if isinstance(self, Signed) else b""
        return b"".join((_HEAD.pack(self.kind, self.binding, self.sender, len(body)), body, signature))

    @classmethod
    def from_bytes(cls: type[M], data: bytes) -> M:
        """Read a message of this kind; `Rejected` for anything else. Signatures are not checked here."""
        reader = Reader(data)
        kind, binding, sender, length = _HEAD.unpack(reader.take(_HEAD.size))
        if kind != cls.kind:
            other = _names.get(kind, "something unknown")
            raise Rejected(f"Expected a message {cls.__name__}; given {other}. Is it of another stage?")
        body = Reader(reader.take(length))
        message = cls.read(binding, sender, body)
        body.end()
        if isinstance(message, Signed):
            message = replace(message, signature=reader.take(SIGNATURE))
        reader.end()
        return message


@dataclass(frozen=True)
class Signed(Message):
    """A client's message, with its signature over everything else."""

    signature: bytes = field(default=b"", kw_only=True, repr=False)

    def text(self) -> bytes:
        body = hashlib.sha256(self.body()).digest()
        return primitives.digest("message", bytes([self.kind]), self.binding, primitives.number(self.sender), body)

    def sign(self: S, secret: bytes) -> S:
        return replace(self, signature=primitives.sign(secret, self.text()))

    def check(self, public: bytes) -> None:
        if not primitives.signed(public, self.signature, self.text()):
            raise Rejected(
                f"The signature under a message {type(self).__name__} is not that of client {self.sender}: the message "
                "was changed on its way, or somebody else sent it."
            )


S = TypeVar("S", bound=Signed)


# --- 1. advertise keys ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advertisement(Signed):
    """A client's two public X25519 keys of this round: one to seal shares to it, one to agree on masks."""

    kind = 1

    channel_key: bytes
    mask_key: bytes

    def body(self) -> bytes:
        return self.channel_key + self.mask_key

    @classmethod
    def read(cls, binding: bytes, sender: int, reader: Reader) -> Advertisement:
        return cls(binding, sender, reader.take(KEY), reader.take(KEY))


@dataclass(frozen=True)
class Directory(Message):
    """Server to clients: the signed advertisements of all that take part."""

    kind = 2

    entries: tuple[Advertisement, ...]

    def body(self) -> bytes:
        return len(self.entries).to_bytes(4, "big") + b"".join(entry.to_bytes() for entry in self.entries)

    @classmethod
    def read(cls, binding: bytes, sender: int, reader: Reader) -> Directory:
        size = _HEAD.size + 2 * KEY + SIGNATURE
        count = reader.number(4)
        return cls(binding, sender, tuple(Advertisement.from_bytes(reader.take(size)) for _ in range(count)))


# --- 2. share keys ----------------------------------------------------------------------------------------------------

_SEALED = 2 * shamir.SHARE + TAG


@dataclass(frozen=True)
class SealedShares:
    """One holder's shares of a client's two secrets, sealed to the holder.

    The two commitments are digests of the shares: with them holder and server recognise a share that was changed.
    In a client's own message `other` is the holder; in the server's delivery it is the owner. A client's shares of its
    own secrets never travel: that box is empty.
    """

    other: int
    key_commitment: bytes
    self_commitment: bytes
    sealed: bytes

    def to_bytes(self) -> bytes:
        size = len(self.sealed).to_bytes(2, "big")
        return primitives.number(self.other) + self.key_commitment + self.self_commitment + size + self.sealed

    @classmethod
    def read(cls, reader: Reader) -> SealedShares:
        other, key_commitment, self_commitment = reader.number(), reader.take(KEY), reader.take(KEY)
        sealed = reader.take(reader.number(2))
        if len(sealed) not in (0, _SEALED):
            raise Rejected(f"Sealed shares have {_SEALED} bytes; given {len(sealed)}.")
        return cls(other, key_commitment, self_commitment, sealed)


@dataclass(frozen=True)
class SealedSeed:
    """A client's contribution to the shared seed, sealed to one other client. `other` as in `SealedShares`."""

    other: int
    commitment: bytes
    sealed: bytes

    def to_bytes(self) -> bytes:
        return primitives.number(self.other) + self.commitment + self.sealed

    @classmethod
    def read(cls, reader: Reader) -> SealedSeed:
        return cls(reader.number(), reader.take(KEY), reader.take(KEY + TAG))


def _boxes(shares: tuple[SealedShares, ...], seeds: tuple[SealedSeed, ...]) -> bytes:
    counts = struct.pack(">II", len(shares), len(seeds))
    return b"".join((counts, *(box.to_bytes() for box in shares), *(box.to_bytes() for box in seeds)))


def _read_boxes(reader: Reader) -> tuple[tuple[SealedShares, ...], tuple[SealedSeed, ...]]:
    shares, seeds = reader.number(4), reader.number(4)
    return tuple(SealedShares.read(reader) for _ in range(shares)), tuple(SealedSeed.read(reader) for _ in range(seeds))


@dataclass(frozen=True)
class Shares(Signed):
    """Shares of a client's secrets, one box for every holder; and its contribution to the seed, for every client."""

    kind = 3

    self_commitment: bytes  # to the secret of its own mask
    shares: tuple[SealedShares, ...]
    seeds: tuple[SealedSeed, ...] = ()

    def body(self) -> bytes:
        return self.self_commitment + _boxes(self.shares, self.seeds)

    @classmethod
    def read(cls, binding: bytes, sender: int, reader: Reader) -> Shares:
        return cls(binding, sender, reader.take(KEY), *_read_boxes(reader))


@dataclass(frozen=True)
class Delivery(Message):
    """Server to one client: who shared (`clients`), and the boxes for this client."""

    kind = 4

    clients: tuple[int, ...]
    shares: tuple[SealedShares, ...]
    seeds: tuple[SealedSeed, ...] = ()

    def body(self) -> bytes:
        return _numbers(self.clients) + _boxes(self.shares, self.seeds)

    @classmethod
    def read(cls, binding: bytes, sender: int, reader: Reader) -> Delivery:
        return cls(binding, sender, _read_numbers(reader), *_read_boxes(reader))


# --- 3. masked input --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedInput(Signed):
    """A client's values under its masks: words of the ring."""

    kind = 5

    words: bytes

    def body(self) -> bytes:
        return self.words

    @classmethod
    def read(cls, binding: bytes, sender: int, reader: Reader) -> MaskedInput:
        return cls(binding, sender, reader.rest())


@dataclass(frozen=True)
class Request(Message):
    """Server to clients: whose values arrived. It asks for shares of their own masks, and of the others' keys."""

    kind = 6

    survivors: tuple[int, ...]

    def body(self) -> bytes:
        return _numbers(self.survivors)

    @classmethod
    def read(cls, binding: bytes, sender: int, reader: Reader) -> Request:
        return cls(binding, sender, _read_numbers(reader))


# --- 4. unmasking -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Revealed(Signed):
    """The shares that a client reveals: of other clients' own masks, or of their keys; never both of one."""

    kind = 7

    self_shares: tuple[tuple[int, int], ...]  # owner, share
    key_shares: tuple[tuple[int, int], ...]

    def body(self) -> bytes:
        counts = struct.pack(">II", len(self.self_shares), len(self.key_shares))
        both = (*self.self_shares, *self.key_shares)
        return counts + b"".join(primitives.number(owner) + shamir.to_bytes(share) for owner, share in both)

    @classmethod
    def read(cls, binding: bytes, sender: int, reader: Reader) -> Revealed:
        counts = reader.number(4), reader.number(4)
        lists = (
            tuple((reader.number(), shamir.from_bytes(reader.take(shamir.SHARE))) for _ in range(count))
            for count in counts
        )
        return cls(binding, sender, *lists)


_names = {
    kind.kind: kind.__name__ for kind in (Advertisement, Directory, Shares, Delivery, MaskedInput, Request, Revealed)
}
