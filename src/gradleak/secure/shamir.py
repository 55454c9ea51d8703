"""Shamir's secret sharing of 32-byte secrets: any `threshold` shares give the secret, fewer reveal nothing about it.

Shamir, "How to share a secret", Communications of the ACM, 1979. The field is the integers modulo the smallest prime
above 2^256, so that every 32-byte secret is an element of it and a share takes 33 bytes. Arithmetic is on Python's
integers: exact, but its time depends on the numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from gradleak.secure.errors import BelowThreshold, Rejected
from gradleak.secure.primitives import KEY

PRIME = 2**256 + 297
SHARE = 33  # bytes


def split(secret: bytes, points: Sequence[int], threshold: int) -> dict[int, int]:
    """The values, at these points, of a random polynomial of degree threshold - 1 whose value at 0 is the secret."""
    if len(secret) != KEY:
        raise ValueError(f"A secret has {KEY} bytes; given {len(secret)}.")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold must lie between 1 and the {len(points)} shares; given {threshold}.")
    if len(set(points)) < len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError("Points of shares must be different and between 0 and the prime, both excluded.")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    constant = int.from_bytes(secret, "big")
    shares = {}
    for point in points:
        value = 0
        for coefficient in coefficients:  # Horner's rule, the constant last
            value = (value + coefficient) * point % PRIME
        shares[point] = (value + constant) % PRIME
    return shares


def combine(shares: Mapping[int, int], threshold: int) -> bytes:
    """The secret, from the first `threshold` of these shares (point -> value)."""
    if len(shares) < threshold:
        raise BelowThreshold(f"{len(shares)} shares cannot give a secret that needs {threshold}.")
    points = tuple(sorted(shares)[:threshold])
    secret = sum(weight * shares[point] for weight, point in zip(_weights(points), points)) % PRIME
    if secret >= 1 << 8 * KEY:
        raise Rejected("These shares are not of one secret: they give a number that no secret has.")
    return secret.to_bytes(KEY, "big")


@lru_cache(maxsize=4096)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights at 0: the product over other points q of q / (q - p). Most secrets of a round share them."""
    return tuple(_ratio(others=(q for q in points if q != p), point=p) for p in points)


def _ratio(others: Iterable[int], point: int) -> int:
    above, below = 1, 1
    for other in others:
        above = above * other % PRIME
        below = below * (other - point) % PRIME
    return above * pow(below, -1, PRIME) % PRIME


def to_bytes(share: int) -> bytes:
    """A share in a fixed number of bytes."""
    return share.to_bytes(SHARE, "big")


def from_bytes(share: bytes) -> int:
    """The inverse of `to_bytes`; another length, or a number outside the field, is refused."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE or value >= PRIME:
        raise Rejected(f"A share is {SHARE} bytes of a number below the field's prime; this is not one.")
    return value
