"""Random numbers of a lane: a pure function of (key, stream, step), whatever other lanes are computed with it.

`torch.randn` raises inside vmap or draws one stream for all lanes, so a lane in a batch would start elsewhere than the
same lane alone. Philox4x32-10 needs only integer products, so it runs inside vmap and inside a captured CUDA graph.

Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32. All arguments and results are int64 tensors that hold 32-bit words."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        # The int64 product wraps, which keeps all 64 bits; the shift is arithmetic, so mask after it.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (second >> 32 & _LOW) ^ b ^ k0,
            second & _LOW,
            (first >> 32 & _LOW) ^ d ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d


def key(*names: object) -> Tensor:
    """Two 32-bit words from any names (target key, restart, purpose): equal names, equal numbers, on every machine."""
    # Escaped: a name that holds the separator would otherwise read as two names, perhaps those of another key.
    escaped = (str(name).replace("\x1e", "\x1e0").replace("\x1f", "\x1e1") for name in names)
    digest = hashlib.blake2b("\x1f".join(escaped).encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")])


CLIENT = "client"  # what the keys of clients begin with: (CLIENT, key of the observation, seed)


def lane_key(target: str, seed: int, restart: int) -> Tensor:
    """The key of an attacker's lane: (target, seed, restart). Never a client's key, whatever the target's name."""
    return key(*(("lane",) if target == CLIENT else ()), target, seed, restart)


@lru_cache(maxsize=8)
def signs(name: str, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """+1 or -1 at random, the same in every lane and every run: for sketches and probes, not for starts."""

    def drawn() -> Tensor:
        signs = 1 - 2 * (Draws(key(name)).uniform((count,)) < 0.5).to(dtype)
        return signs.to(device)  # last, and the host waits: the caller may be on another stream

    # In a thread of its own: transforms and modes belong to a thread, and the cached tensor outlives them.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(drawn).result()


@dataclass(frozen=True, eq=False)
class Draws:
    """A source of random tensors. `key` is one lane's (2,) int64 tensor; batched under vmap."""

    key: Tensor

    def _words(self, count: int, stream: int, step: Tensor | int) -> tuple[Tensor, ...]:
        index = torch.arange(count, device=self.key.device)
        zero = torch.zeros_like(index)
        return philox((index, zero + step, zero + stream, zero), (self.key[0] + zero, self.key[1] + zero))

    def child(self, number: int) -> Draws:
        """An independent source, by number. The last counter word, 0 in draws, is 1 here."""
        zero = torch.zeros_like(self.key[0])
        words = philox((zero + number, zero, zero, zero + 1), (self.key[0], self.key[1]))
        return Draws(torch.stack(words[:2]))

    def uniform(
        self, shape: tuple[int, ...], *, stream: int = 0, step: Tensor | int = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """U(0, 1), open at both ends; 32 random bits in float64, 23 in float32."""
        count = math.prod(shape)
        words = torch.cat(self._words((count + 3) // 4, stream, step))[:count]
        if dtype == torch.float64:
            return ((words.to(dtype) + 0.5) / 2**32).reshape(shape)
        # 23 bits and the half fill the mantissa: with 24 the sum would round, at the upper end to 1.
        return (((words >> 9).to(torch.float32) + 0.5) / 2**23).to(dtype).reshape(shape)

    def normal(
        self, shape: tuple[int, ...], *, stream: int = 0, step: Tensor | int = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """N(0, 1) by Box and Muller."""
        count = math.prod(shape)
        half = (count + 1) // 2
        radius, angle = self.uniform((2, half), stream=stream, step=step, dtype=dtype)
        radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].reshape(shape)
