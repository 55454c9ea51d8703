"""Fixed-point numbers in Z_(2^32) or Z_(2^64), and masks there.

A sum that leaves the ring wraps round silently, so the bound of every sum is checked before a round begins, the bound
of every value before it is sent, and the bound of the sum when it is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradleak.secure import primitives
from gradleak.secure.errors import Oversize

Words: TypeAlias = NDArray[Any]  # little-endian unsigned words of the ring

RING_BITS = (32, 64)
CHUNK = 1 << 18  # bytes of key stream at a time: it stays in the cache, where adding it costs little
HEADROOM = 8  # bits above the largest sum: all but one in 256 entries of garbage lie beyond them


@dataclass(frozen=True)
class FixedPoint:
    """Reals x with |x| <= clip as the integers round(x * 2^fraction_bits).

    fraction_bits may be negative, for values so large that whole numbers are too fine.
    """

    clip: float
    fraction_bits: int = 24

    def __post_init__(self) -> None:
        _check_clip(self.clip)
        if not -512 <= self.fraction_bits <= 512:
            raise ValueError(f"fraction_bits must lie between -512 and 512; given {self.fraction_bits}.")
        if math.ldexp(self.clip, self.fraction_bits) < 1:
            raise ValueError(
                f"With {self.fraction_bits} fraction bits every value up to {self.clip} becomes 0 or 1 unit: "
                "use more fraction bits."
            )

    @classmethod
    def finest(
        cls, clip: float, clients: int, *, ring_bits: int = 64, factor_bits: int = 0, headroom: int = HEADROOM
    ) -> FixedPoint:
        """The most fraction bits with which the sum of this many clients fits into the ring, less `headroom` bits.

        `factor_bits`: number of bits that a shared factor adds to every value, its power included.
        """
        room, spare = ring_bits - 1 - headroom - factor_bits, bool(factor_bits)  # see `Part.bound`
        _check_clip(clip)
        bits = min(room - math.floor(math.log2(clip)) - math.floor(math.log2(clients)), 512)
        while bits > -512 and clients * (math.ceil(math.ldexp(clip, bits)) + spare) >= 1 << max(room, 0):
            bits -= 1
        try:
            return cls(clip, bits)
        except ValueError as error:
            raise Oversize(
                f"No fraction bit fits: {clients} clients with values up to {clip} and factors of {factor_bits} bits "
                f"in a ring of {ring_bits} bits. Use 64 bits, fewer factor bits or a smaller clip."
            ) from error

    @property
    def bound(self) -> int:
        """The largest magnitude of an encoded value."""
        return math.ceil(math.ldexp(self.clip, self.fraction_bits))

    @property
    def unit(self) -> float:
        """The distance between neighbouring values; encoding is exact to half of it."""
        return math.ldexp(1.0, -self.fraction_bits)

    def encode(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Values as integers. Raises if one is not finite or beyond the clip: clipping is the caller's choice."""
        largest = float(np.abs(values).max(initial=0.0))
        if not largest <= self.clip:  # also if it is NaN
            raise Oversize(
                f"Values must be finite and at most {self.clip} in magnitude; given {largest:.6g}. "
                "Clip or scale them first, or raise the clip for all clients."
            )
        return np.rint(np.ldexp(values, self.fraction_bits)).astype(np.int64)

    def decode(self, values: NDArray[Any]) -> NDArray[np.float64]:
        return np.ldexp(values.astype(np.float64), -self.fraction_bits)


def _check_clip(clip: float) -> None:
    if not (math.isfinite(clip) and clip > 0):
        raise ValueError(f"clip must be positive and finite; given {clip}.")


@dataclass(frozen=True)
class Part:
    """One of the vectors that are summed in a round.

    factor    power of the round's shared positive mask that multiplies its entries before they are summed; 0: none.
              SecAdam sends m with power 1 and v with power 2, so that m / sqrt(v) does not change.
    """

    name: str
    size: int
    coding: FixedPoint
    factor: int = 0

    def __post_init__(self) -> None:
        if not self.name or self.size < 1 or self.factor < 0:
            raise ValueError(
                f"A part has a name, at least one entry and a factor of 0 or more; given {self.name!r}, {self.size}, "
                f"{self.factor}."
            )

    def bound(self, factor_bits: int) -> int:
        """The largest magnitude that one client can send: 2^factor_bits is the largest shared factor.

        With a factor one unit more, for the error that `blurred` adds.
        """
        return (self.coding.bound + bool(self.factor)) << (self.factor * factor_bits)


def word(ring_bits: int) -> np.dtype[Any]:
    """The dtype of a ring element, in memory and on the wire."""
    if ring_bits not in RING_BITS:
        raise ValueError(f"ring_bits must be 32 or 64; given {ring_bits}.")
    return np.dtype(f"<u{ring_bits // 8}")


def blurred(coded: NDArray[np.int64], factors: NDArray[np.int64]) -> NDArray[np.int64]:
    """Encoded values times the shared factors, plus a random error of up to half a factor, so half a unit.

    Exact products would reveal the factors: the server has r a and r^b c as integers, and the largest r that divides
    both is nearly always the factor. Each client draws its own error, which nobody else knows. Zeros stay zeros: they
    are visible anyway, and 0 / v must be 0.
    """
    words = np.zeros(coded.size, "<u8")
    add_streams(words, [(primitives.fresh(), True)])
    error = (words % factors.astype("<u8")).astype(np.int64) - factors // 2
    return np.where(coded == 0, 0, coded * factors + error)


def add_streams(total: Words, streams: Iterable[tuple[bytes, bool]]) -> None:
    """Add to `total`, in place, the key stream of every key with True; subtract the others."""
    opened = [(primitives.stream(key), np.add if plus else np.subtract) for key, plus in streams]
    width = total.dtype.itemsize
    zeros, block = memoryview(bytes(CHUNK)), bytearray(CHUNK + 16)
    step = CHUNK // width
    for start in range(0, total.size, step):
        piece = total[start : start + step]
        words = np.frombuffer(block, total.dtype, piece.size)
        for cipher, combine in opened:
            cipher.update_into(zeros[: piece.size * width], block)
            combine(piece, words, out=piece)
