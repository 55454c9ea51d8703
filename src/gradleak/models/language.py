"""A small causal language model that needs torch alone.

Attention is written out, as in `transformers.py`: products and a softmax have second derivatives everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradleak.models.pieces import Learned, linear

Positions = Literal["learned", "rotary"]
BASE = 10_000.0  # of the rotation angles


class CausalAttention(nn.Module):
    """Softmax(q k^T / sqrt(d)) v over a token and those before it. `rotary`: q and k are turned by their place."""

    def __init__(self, width: int, heads: int, *, rotary: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.query, self.key, self.value, self.out = (linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (layer(x).reshape(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if self.rotary:
            q, k = turned(q), turned(k)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5  # (batch, heads, length, length)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


def turned(x: Tensor) -> Tensor:
    """Rotary positions (Su et al., RoFormer, 2021): halves of (..., length, d) span planes that turn with the place."""
    half = x.shape[-1] // 2
    rates = BASE ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * rates
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), without biases (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = linear(width, inner, bias=False), linear(width, inner, bias=False)
        self.down = linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, *, rotary: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if rotary else nn.LayerNorm
        self.before, self.between = norm(width), norm(width)
        self.attention = CausalAttention(width, heads, rotary=rotary, bias=not rotary)
        self.mlp: nn.Module = (
            GatedMLP(width, 8 * width // 3)
            if rotary
            else nn.Sequential(linear(width, 4 * width), nn.GELU(), linear(4 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """Token ids (batch, length) to scores of the next token at every place (batch, length, vocabulary)."""

    def __init__(
        self, vocabulary: int, width: int, heads: int, depth: int, *, length: int, positions: Positions
    ) -> None:
        super().__init__()
        rotary = positions == "rotary"
        self.embedding = nn.Embedding(vocabulary, width, device="meta")
        self.position = None if rotary else Learned(length, width, deviation=0.02)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads, rotary=rotary) for _ in range(depth)))
        self.norm: nn.Module = nn.RMSNorm(width) if rotary else nn.LayerNorm(width)
        self.head = linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if self.position is not None:
            x = x + self.position()[: input_ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def decoder(
    *,
    vocabulary: int = 257,
    width: int = 64,
    heads: int = 4,
    depth: int = 2,
    length: int = 64,
    positions: Positions = "learned",
    tied: bool = False,
    generator: Generator | None = None,
) -> Decoder:
    """A decoder shaped like GPT-2 (`positions="learned"`) or like LLaMA ("rotary", RMSNorm, gated MLP, no biases).

    Weights are normal of deviation 0.02 cut at two, biases zero. The default vocabulary is that of bytes, with 0 for
    padding. Places attend to padding like to any token: pad on the right, where nothing is predicted.
    """
    if heads < 1 or width % (2 * heads):
        raise ValueError(f"{heads} heads need a width of a multiple of {2 * heads}; given {width}.")
    model = Decoder(vocabulary, width, heads, depth, length=length, positions=positions)
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) for p in m.parameters()}
    model.to_empty(device="cpu")
    if tied:  # only now: `to_empty` gives every module a parameter of its own
        model.head.weight = model.embedding.weight
    for name, value in model.named_parameters():
        if id(value) in norms:
            nn.init.constant_(value, float(not name.endswith("bias")))
        elif name.endswith("bias"):
            nn.init.zeros_(value)
        else:
            nn.init.trunc_normal_(value, std=0.02, a=-0.04, b=0.04, generator=generator)
    return model.eval()
