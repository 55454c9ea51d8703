"""A secret that all clients of a round share and the server does not know, and the positive factors derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradleak.secure import primitives
from gradleak.secure.ring import add_streams

FACTOR_BITS = 16  # most bits of a factor


@dataclass(frozen=True)
class SharedSeed:
    """One secret per round, derived from a random contribution of every client that shared its keys.

    Contributions travel sealed from client to client, so the server knows none. But a SINGLE client that shared its
    keys can tell the server the secret. `binding` names the round.
    """

    secret: bytes = field(repr=False)
    binding: bytes = field(repr=False)

    def factors(self, size: int, bits: int) -> NDArray[np.int64]:
        """Integers, uniform in 1 ... 2^bits, one per coordinate: the same at every client, different in every round.

        Shorter vectors are the beginnings of longer ones, so that parts of a round share a factor per coordinate.
        """
        if not 1 <= bits <= FACTOR_BITS:
            raise ValueError(f"Factors have between 1 and {FACTOR_BITS} bits; given {bits}.")
        words = np.zeros(size, "<u2")
        add_streams(words, [(primitives.derive(self.secret, binding=self.binding, purpose="shared factors"), True)])
        return (words >> (16 - bits)).astype(np.int64) + 1


def combined(contributions: dict[int, bytes], binding: bytes) -> SharedSeed:
    """The seed of these clients: every contribution enters, so one honest client suffices to make it random."""
    parts = [piece for client in sorted(contributions) for piece in (primitives.number(client), contributions[client])]
    return SharedSeed(primitives.digest("shared seed", binding, *parts), binding)
