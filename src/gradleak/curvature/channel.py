"""The channel bound: how much a noisy release says about its data, from the covariance of many releases.

    I(X; G + Z) <= 1/2 log det(I + Sigma_G / sigma^2),   Z ~ N(0, sigma^2 I) independent of everything

It holds for every distribution of releases G with covariance Sigma_G: of all with that covariance the Gaussian has the
largest entropy (Cover and Thomas, Elements of Information Theory, 2006, theorem 8.6.5 and chapter 9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.linear import gram
from gradleak.core.settings import takes
from gradleak.core.tree import Params, Tree
from gradleak.curvature.point import Point, explained
from gradleak.engine import Engine, memory_of
from gradleak.identify.floors import SHARE
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Defence
from gradleak.scenario.task import Batch, Task, TaskError

SHARES = (1e-4, 1e-3, 1e-2)  # noise levels, as shares of the root mean square of a release
SMALLEST = 64  # releases at which a curve begins


@dataclass(frozen=True, eq=False)
class Releases:
    """n releases of d entries each, stored as the inner products that their covariance needs.

    gram           (n, n) float64, of the releases minus a common point near their mean
    size           d
    examples       B, in each release
    squares        (n,) ||G_i||^2
    mean_square    ||mean of G||^2
    """

    gram: Tensor
    size: int
    examples: int
    squares: Tensor
    mean_square: float

    @property
    def samples(self) -> int:
        return len(self.squares)

    @property
    def level(self) -> float:
        """Root mean square of an entry of a release, ||G|| / sqrt(d): the unit of the noise."""
        return math.sqrt(float(self.squares.mean()) / self.size)

    @property
    def mean_share(self) -> float:
        """||E G||^2 / E ||G||^2: 0 where gradients have mean zero, 1 where all are equal."""
        return self.mean_square / float(self.squares.mean())

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues of the sample covariance, (n,) descending; at least one is zero. The other d - n are zero too."""
        return _spectra(self.gram[None])[0]

    def curve(
        self,
        *,
        sigmas: Sequence[float] | None = None,
        shares: Sequence[float] = SHARES,
        counts: Sequence[int] | None = None,
        subsets: int = 4,
        seed: int = 0,
    ) -> ChannelCurve:
        """The channel bound against the number of releases that the covariance is estimated from.

        `sigmas`: of the noise, in units of a release; None: `shares` of `level`. `counts`: None doubles from 64 up to
        all. Of every count `subsets` random choices are averaged; of all releases there is only one.
        """
        counts = self._counts() if counts is None else tuple(counts)
        if not counts or min(counts) < 2 or max(counts) > self.samples:
            raise ValueError(f"counts must be from 2 to the {self.samples} releases; given {counts}.")
        if subsets < 1:
            raise ValueError(f"subsets must be at least 1; given {subsets}.")
        noise = tuple(share * self.level for share in shares) if sigmas is None else tuple(sigmas)
        source = torch.Generator().manual_seed(seed)
        orders = torch.stack([torch.randperm(self.samples, generator=source) for _ in range(subsets)])
        points = []
        for count in counts:
            rows = orders[: 1 if count == self.samples else subsets, :count].to(self.gram.device)
            spectra = _spectra(self.gram[rows[:, :, None], rows[:, None, :]])  # (subsets, count)
            points.append(channel_bound(spectra[:, None, :], noise_levels(noise, spectra)))  # (subsets, sigmas)
        return ChannelCurve(
            counts=counts,
            sigmas=noise,
            nats=torch.stack([point.mean(0) for point in points]).cpu(),
            spread=torch.stack([point.std(0, correction=0) for point in points]).cpu(),
            level=self.level,
            size=self.size,
            examples=self.examples,
        )

    def _counts(self) -> tuple[int, ...]:
        doubled = [SMALLEST << step for step in range(32) if SMALLEST << step < self.samples]
        return (*doubled, self.samples)


@dataclass(frozen=True, eq=False, kw_only=True)
class Clients:
    """The clients that release, and how many are computed together.

    training   their recipe; None: one step of SGD at rate 1, so that a release is a gradient
    examples   of each client
    server     what a defence's `broadcast` looks at
    block      clients at a time under vmap
    hold       releases kept at once; None: what half the device holds, twice over. Where that is not all of them, the
               others are computed again for every block held: p blocks cost (p + 1) / 2 times the gradients
    """

    training: LocalTraining | None = None
    examples: int = 1
    server: Tree | None = None
    seed: int = 0
    block: int = 64
    hold: int | None = None

    def __post_init__(self) -> None:
        if self.block < 1 or (self.hold is not None and self.hold < 1):
            raise ValueError(f"block and hold must be at least 1; given {self.block} and {self.hold}.")


@takes(Clients)
def releases(
    task: Task,
    weights: Params,
    batch: Batch,
    defence: Defence | None = None,
    *,
    buffers: Params | None = None,
    engine: Engine | None = None,
    clients: Clients,
) -> Releases:
    """Let clients release what `LocalTraining.run` makes of their examples, defence included.

    The other keywords are the fields of `Clients`. The clients get the examples of `batch` in order.

    A defence that adds noise is run with its noise, which then counts as signal. The bound still holds, but is loose:
    pass the defence without its noise, and the noise as sigma.
    """
    engine, defence = engine or Engine(), defence or Defence()
    examples, block = clients.examples, clients.block
    at = Point.at(task, weights, batch, buffers, engine)
    broadcast = defence.broadcast(weights, clients.server or {})
    extras = {name: tree.to(params, engine.where, torch.float64) for name, params in broadcast.items()}
    total = tree.length(at.batch)
    if examples < 1 or total % examples or total < 2 * examples:
        raise TaskError(
            f"{total} examples cannot be divided among two or more clients with {examples} each: pass a multiple."
        )
    count, size = total // examples, at.size
    training = clients.training or LocalTraining(lr=1.0)
    dealt = tree.map(lambda value: value.reshape(count, examples, *value.shape[1:]), at.batch)
    keys = torch.stack([randomness.key("releases", clients.seed, number) for number in range(count)]).to(engine.where)

    def release(batch: Batch, key: Tensor, statistics: Params) -> Tensor:
        state = ClientState(buffers={**at.shared, **statistics}, extras=extras, key=key)
        upload, _ = training.run(at.task, at.weights, batch, defence, state)
        update = defence.reveal([upload], [upload.num_examples])
        return tree.flatten({name: update[name] for name in at.weights})

    def rows(begin: int, end: int) -> Tensor:
        """(end - begin, d)"""
        pieces = [slice(start, min(start + block, end)) for start in range(begin, end, block)]
        return torch.cat(
            [
                vmap(release)(tree.map(lambda v, p=piece: v[p], dealt), keys[piece], at.lanes(len(keys[piece])))
                for piece in pieces
            ]
        )

    hold = clients.hold or max(1, int(min(count, SHARE * memory_of(engine) / (16.0 * size))))
    edges = [(begin, min(begin + hold, count)) for begin in range(0, count, hold)]
    products = torch.zeros(count, count, dtype=torch.float64, device=engine.where)
    squares = torch.zeros(count, dtype=torch.float64, device=engine.where)
    sums = torch.zeros(size, dtype=torch.float64, device=engine.where)
    centre = sums
    with torch.no_grad(), engine.settings(), explained():
        for i, (begin, end) in enumerate(edges):
            block_rows = rows(begin, end)
            if i == 0:
                centre = block_rows.mean(0)  # so that centring the products loses no digits
                squares[begin:end], sums = block_rows.square().sum(1), block_rows.sum(0)
            block_rows -= centre
            products[begin:end, begin:end] = gram(block_rows)
            for start, stop in edges[i + 1 :]:
                other = rows(start, stop)
                if i == 0:
                    squares[start:stop], sums = other.square().sum(1), sums + other.sum(0)
                products[begin:end, start:stop] = block_rows @ (other - centre).T
                products[start:stop, begin:end] = products[begin:end, start:stop].T
    if not bool(products.isfinite().all()):
        raise ValueError("A release is not finite: the weights, the batch or the client's rule overflow.")
    if not float(squares.max()) > 0:
        raise ValueError("Every release is zero: the loss does not depend on the weights here, or all was pruned.")
    return Releases(products, size, examples, squares, float((sums / count).square().sum()))


def channel_bound(eigenvalues: Tensor, sigma: Tensor) -> Tensor:
    """1/2 sum_i log(1 + k_i / sigma^2) over the last axis of the covariance's eigenvalues; a tensor of sigma's shape.

    Exact, the mutual information itself, where releases are Gaussian and a deterministic function of the data.
    """
    return 0.5 * (eigenvalues / sigma.unsqueeze(-1).square()).log1p().sum(-1)


@dataclass(frozen=True, eq=False)
class ChannelCurve:
    """The channel bound for the covariance of `counts` releases under noise of `sigmas`, in nats.

    nats     (counts, sigmas), mean over random choices of the releases; `spread` their standard deviation
    level    root mean square of an entry of a release

    It GROWS with the count: n releases span n - 1 directions. The covariance of n is the mean of those that leave one
    out and log det is concave, so the expectation never falls and stays below the value of the true covariance. It
    bounds the data's distribution only where the curve is level: read `growth` first.
    """

    counts: tuple[int, ...]
    sigmas: tuple[float, ...]
    nats: Tensor
    spread: Tensor
    level: float
    size: int
    examples: int

    @property
    def growth(self) -> Tensor | None:
        """(sigmas,): share of the last value gained since half as many releases; None where there is no half."""
        half = [row for row, count in enumerate(self.counts) if 2 * count <= self.counts[-1]]
        return 1 - self.nats[half[-1]] / self.nats[-1] if half else None

    def record(self) -> dict[str, Any]:
        """As a row of a run holds it."""
        growth = self.growth
        return {
            "label": "Gaussian channel bound for the covariance of this many releases; it grows with their number",
            "counts": list(self.counts),
            "sigmas": list(self.sigmas),
            "shares": [sigma / self.level for sigma in self.sigmas],
            "nats": self.nats.tolist(),
            "spread": self.spread.tolist(),
            "growth": None if growth is None else growth.tolist(),
            "parameters": self.size,
            "examples": self.examples,
        }


def _spectra(products: Tensor) -> Tensor:
    """Eigenvalues of sample covariances, (k, n) descending, from inner products (k, n, n) about any common point."""
    rows = products - products.mean(1, keepdim=True)
    centred = rows - rows.mean(2, keepdim=True)
    centred = (centred + centred.transpose(1, 2)) / 2
    return torch.linalg.eigvalsh(centred).flip(1).clamp_min(0.0) / (products.shape[1] - 1)


def noise_levels(values: Sequence[float], like: Tensor) -> Tensor:
    """Standard deviations of the noise as a tensor, all above zero."""
    if not values or min(values) <= 0:
        raise ValueError(f"Noise needs levels above 0: without noise the information is infinite. Given {values}.")
    return torch.tensor(tuple(values), dtype=like.dtype, device=like.device)
