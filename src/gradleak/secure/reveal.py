"""What the server of SecAdam or SecLion learns: two masked sums, and what it can compute from them.

Clients send first and second moments (`defences.SecAdam`). The server gets r * sum_i m_i and r^2 * sum_i v_i, with r a
positive integer per coordinate that all clients share (`SharedSeed`), and computes sum m / sqrt(n sum v).

    in_ring     the real protocol, in fixed point
    in_floats   the same sums with masks in float64: a simulation for audits, which protects nobody
    observed    what the server sees of a cohort of clients, as an `Observation` for attacks
    second_over_rounds   mean second moments, computed from the sums of many rounds; `first_over_rounds` the first ones
    Traitor     a client that tells the server the shared seed; `uncovered` is what the server then knows
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.core.tree import Params, Tree
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Defence, Upload
from gradleak.scenario.derivatives import PlainForms
from gradleak.scenario.observation import Observation, stack
from gradleak.scenario.task import Batch, Task, float32_products
from gradleak.secure.client import Client, Member
from gradleak.secure.plan import Plan
from gradleak.secure.ring import FixedPoint, Part
from gradleak.secure.seed import SharedSeed
from gradleak.secure.simulation import RoundSettings, flat, restored

FIRST, SECOND = "first", "second"  # the trees of an upload of moments
FACTOR_BITS = 8


@dataclass(frozen=True, eq=False)
class Masked:
    """The server's sums in float64: r^a * sum of the first, r^b * sum of the second moments."""

    first: Params
    second: Params
    clients: int
    survivors: tuple[int, ...]
    plan: Plan | None = None
    costs: Any = None
    weight: float = 0.0  # sum of the shares of the survivors; 0: their number

    @property
    def total(self) -> float:
        """Divisor of the sums: after dropouts of unequal clients this is not their number."""
        return self.weight or float(self.clients)

    def ratio(self, root: int) -> Params:
        """mean(first) / mean(second)^(1/root): root 2 for SecAdam, 1 for SecLion. The factor cancels."""

        def divided(first: Tensor, second: Tensor) -> Tensor:
            return (first / self.total) / (second / self.total) ** (1 / root)

        return tree.map(divided, self.first, self.second)


def shares(sizes: Sequence[int]) -> list[float]:
    """Weight of every client in the sums: 1 if all have as many examples, and 1 on average. The server knows them."""
    return [len(sizes) * size / sum(sizes) for size in sizes]


def weighted(uploads: Sequence[Upload], sizes: Sequence[int]) -> dict[int, Tree]:
    """The clients' inputs by number: their moments times their share, so that sums over n clients are n means."""
    return {
        number: {name: tree.scale(moment, share) for name, moment in upload.payload.items()}
        for number, (upload, share) in enumerate(zip(uploads, shares(sizes), strict=True))
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class MomentRound(RoundSettings):
    """A round that sums moments, {client: {"first": ..., "second": ...}}.

    clip       largest entry of first moments, `largest` of second ones: larger entries are refused. None: the largest
               entry there is, which real clients would have to agree on beforehand
    powers     of the shared factor: (1, 2) for SecAdam, (1, 1) for SecLion; (0, 0) without one
    sizes      that values were `weighted` with, in their order; None: equal ones. Means after dropouts are over the
               survivors
    """

    clip: float | None = None
    largest: float | None = None
    powers: tuple[int, int] = (1, 2)
    factor_bits: int = FACTOR_BITS
    sizes: Sequence[int] | None = None


@takes(MomentRound)
def in_ring(settings: MomentRound) -> Masked:
    """One round of secure aggregation of moments by the real protocol; `MomentRound` lists the settings.

    Sums are exact without a factor. With one, each client adds an error of up to half a unit, which hides the factor:
    exact multiples would reveal it (`ring.blurred`).

    Second moments below the unit of their fixed-point numbers are raised to it: v is a square, a 64-bit ring with
    factors of 8 bits leaves about 30 binary digits after the point, and a sum that is rounded to 0 cannot be divided
    by. Gradients below about 1e-5 of the largest then count less than they would in floating point.
    """
    values, powers, bits = settings.values, settings.powers, settings.factor_bits
    numbers = list(values)
    like = values[numbers[0]][FIRST]
    vectors = {client: {name: flat(moments[name]) for name in (FIRST, SECOND)} for client, moments in values.items()}
    bounds = [
        limit or max(float(np.abs(parts[name]).max()) for parts in vectors.values()) or 1.0
        for name, limit in ((FIRST, settings.clip), (SECOND, settings.largest))
    ]
    codings = [
        FixedPoint.finest(bound, len(values), ring_bits=settings.ring_bits, factor_bits=power * bits)
        for bound, power in zip(bounds, powers)
    ]
    for parts in vectors.values():
        parts[SECOND] = np.maximum(parts[SECOND], codings[1].unit)
    planned = tuple(Part(n, tree.size(like), c, factor=p) for n, c, p in zip((FIRST, SECOND), codings, powers))
    plan, done = settings.run(planned, vectors, bits)
    first, second = (restored(done.sums[name], like) for name in (FIRST, SECOND))
    sizes = [1] * len(numbers) if settings.sizes is None else settings.sizes
    share = dict(zip(numbers, shares(sizes), strict=True))
    weight = math.fsum(share[number] for number in done.survivors)
    return Masked(first, second, len(done.survivors), done.survivors, plan, done.costs, weight)


@named("ring", kind="aggregation", status="")
def server_sums(
    uploads: Sequence[Upload],
    sizes: Sequence[int],
    *,
    round: int = 0,
    powers: tuple[int, int] = (1, 2),
    largest: float | None = None,
) -> Masked:
    """The server's sums of these uploads after one round of `in_ring`.

    largest   entry of the second moments of a client with the mean number of examples; None: taken from the uploads
    """
    most = None if largest is None else largest * max(shares(sizes))  # a client with many examples sends more
    return in_ring(weighted(uploads, sizes), powers=powers, largest=most, round=round)


def in_floats(
    values: Mapping[int, Tree],
    *,
    powers: tuple[int, int] = (1, 2),
    factor_bits: int = FACTOR_BITS,
    seed: int = 0,
    spread: float = 100.0,
) -> Masked:
    """The same sums in float64, for simulations: pairwise masks U(-spread, spread) that cancel up to rounding.

    Such masks hide imperfectly and the generator is no cipher: this protects nobody. Raises if the masks do not cancel
    to 1e-6.
    """
    numbers = list(values)
    like = values[numbers[0]][FIRST]
    size = tree.size(like)
    factor = factors(size, factor_bits, seed)
    sums = {}
    for place, (name, power) in enumerate(zip((FIRST, SECOND), powers)):
        plain = {client: torch.from_numpy(flat(values[client][name])) for client in numbers}
        sent = {client: value * factor**power for client, value in plain.items()}
        for one in range(len(numbers)):
            for other in range(one + 1, len(numbers)):
                pair = Draws(randomness.key("pair", seed, place, one, other))
                mask = spread * (2 * pair.uniform((size,), dtype=torch.float64) - 1)
                sent[numbers[one]] = sent[numbers[one]] + mask
                sent[numbers[other]] = sent[numbers[other]] - mask
        total = torch.stack(list(sent.values())).sum(0)
        residue = total - torch.stack([value * factor**power for value in plain.values()]).sum(0)
        if not float(residue.abs().max()) < 1e-6:
            raise ArithmeticError(f"Masks left {float(residue.abs().max()):.1e} behind: use a smaller spread.")
        sums[name] = tree.unflatten(total, like)
    return Masked(sums[FIRST], sums[SECOND], len(numbers), tuple(numbers))


def factors(size: int, bits: int, seed: int) -> Tensor:
    """Shared factors like those of `SharedSeed`, uniform in 1 ... 2^bits, from a seed for simulations; float64."""
    uniform = Draws(randomness.key("shared factors", seed)).uniform((size,), dtype=torch.float64)
    return (uniform * 2**bits).floor() + 1


# --- a client on the server's side ------------------------------------------------------------------------------------


class Traitor(Member):
    """A client that follows the protocol and keeps the shared seed of the last round, `learned`, for the server."""

    learned: SharedSeed | None = None

    def join(self, plan: Plan) -> Client:
        super().join(plan)
        return _Talking(plan, self)


class _Talking(Client):
    def accept(self, delivery: bytes) -> None:
        super().accept(delivery)
        assert isinstance(self._member, Traitor)
        self._member.learned = self.seed


def uncovered(sums: Masked, seed: SharedSeed, own: Tree | None = None, *, share: float = 1.0) -> tuple[Params, Params]:
    """Mean first and second moments of the OTHER clients, which the shared seed and a traitor's own values reveal.

    own: the traitor's input, {"first": ..., "second": ...}; None: it stays in the means. With two clients these are the
    other one's moments; with n they are means over n - 1, as plain secure aggregation would reveal.
    share: the traitor's own (`shares`), if clients are not equal.
    """
    assert sums.plan is not None, "only a round of the real protocol has a seed"
    means = []
    for part, total in zip(sums.plan.parts, (sums.first, sums.second)):
        r = torch.from_numpy(seed.factors(part.size, sums.plan.factor_bits).astype(np.float64))
        plain = tree.flatten(total) / r**part.factor
        if own is not None:
            plain = plain - torch.from_numpy(flat(own[part.name]))
        means.append(tree.unflatten(plain / (sums.total - (share if own is not None else 0.0)), total))
    return means[0], means[1]


# --- many rounds ------------------------------------------------------------------------------------------------------


def second_over_rounds(sums: Sequence[Masked], *, factor_bits: int = FACTOR_BITS, beta2: float | None = None) -> Params:
    """Mean second moments in the LAST of these rounds, as a server estimates them from all sums r_t^2 v_t; float64.

    r_t is fresh in every round and at most 2^bits; v_t is a mean over about 1 / (1 - beta2) rounds and hardly moves.
    Without beta2: the largest (r_t / 2^bits)^2 v_t, as if v were constant, times ((T + 1) / T)^2, which corrects the
    expected maximum of T uniform numbers. The first rounds move v most: leave them out. With beta2: a LOWER bound of
    v_T for any data, since v forgets no faster than beta2^t; `sums` must then begin with the clients' first round.
    """
    top, last = 4.0**factor_bits, len(sums)
    if beta2 is None:
        weights = [(1 + 1 / last) ** 2] * last
    else:
        weights = [beta2 ** (last - t) * (1 - beta2**t) / (1 - beta2**last) for t in range(1, last + 1)]
    largest = tree.scale(sums[0].second, weights[0] / (top * sums[0].total))
    for each, weight in zip(sums[1:], weights[1:]):
        scale = weight / (top * each.total)
        largest = tree.map(lambda most, v, scale=scale: torch.maximum(most, v * scale), largest, each.second)
    return largest


def first_over_rounds(sums: Masked, second: Params) -> Params:
    """Mean first moments of a round: its ratio times the root of the known second moments; float64."""
    return tree.map(lambda ratio, v: ratio * v.sqrt(), sums.ratio(2), second)


def gradient_over_rounds(before: Masked, last: Masked, second: Params, *, round: int, beta1: float) -> Params:
    """The clients' mean gradient in round t = `round` (from 1), from first moments of rounds t - 1 and t; float64.

    g_t = (M_t - beta1 M_(t-1)) / (1 - beta1), with M = (1 - beta1^t) m. An error of v in a coordinate is the same in
    both rounds, so the relative error of g is that of m.
    """
    new, old = (
        tree.scale(first_over_rounds(sums, second), 1 - beta1**t) for sums, t in ((last, round), (before, round - 1))
    )
    return tree.map(lambda m, before: (m - beta1 * before) / (1 - beta1), new, old)


# --- observations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cohort:
    """The clients of one round: the upload of each, which only it knows, and what each remembers."""

    task: Task
    weights: Params
    defence: Defence
    uploads: tuple[Upload, ...]
    memories: tuple[Tree, ...]
    round: int = 0
    key: str = "cohort"

    @property
    def sizes(self) -> list[int]:
        return [upload.num_examples for upload in self.uploads]

    def observed(self, update: Params | None = None, *, clients: Sequence[int] | None = None) -> Observation:
        """What the server sees: `update`, or what the defence reveals of the sums.

        `clients`: whose examples are in it; None: all. Attacks then search for that many examples.
        """
        chosen = range(len(self.uploads)) if clients is None else clients
        if update is None:
            update = self.defence.reveal([self.uploads[c] for c in chosen], [self.sizes[c] for c in chosen])
        like = tree.like(self.weights)
        return Observation(
            weights=self.weights,
            update=tree.to(tree.detach(update), like.device, like.dtype),
            num_examples=sum(self.sizes[c] for c in chosen),
            clients=len(chosen),
            round=self.round,
            key=self.key,
            buffers=self.task.buffers() or None,
        )


@dataclass(frozen=True, eq=False)
class CohortRound:
    """One round of a cohort: what it trains, from where, and its random numbers.

    batches    one per client, of equal size
    memories   what each client remembers from the round before (`Cohort.memories`)
    """

    task: Task
    batches: Sequence[Batch]
    training: LocalTraining
    defence: Defence | None = None
    _: KW_ONLY
    weights: Params | None = None
    memories: Sequence[Tree] | None = None
    round: int = 0
    key: str = "cohort"
    seed: int = 0

    def __post_init__(self) -> None:
        if len({tree.length(batch) for batch in self.batches}) != 1:
            raise ValueError("The clients of a cohort must have equally many examples.")

    def keys(self) -> Tensor:
        """A random key per client."""
        names = (self.key, self.seed, self.round)
        return torch.stack([randomness.key("client", *names, number) for number in range(len(self.batches))])


@takes(CohortRound)
def cohort(run: CohortRound) -> Cohort:
    """Let every client train on its batch, all as one vmapped run; `CohortRound` lists the arguments."""
    task, defence = run.task, run.defence or Defence()
    weights = task.weights() if run.weights is None else run.weights
    extras = defence.broadcast(weights, {})
    sizes: list[int] = []

    def one(batch: Batch, key: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        state = ClientState(memory=memory, extras=extras, key=key)
        sent, after = run.training.run(task, weights, batch, defence, state)
        sizes.append(sent.num_examples)
        return sent.payload, after.memory

    before: Tree = {}
    if run.memories and run.memories[0]:
        before = tree.map(lambda *values: torch.stack(values), *run.memories)
    with float32_products(), PlainForms(), torch.no_grad():
        keys = run.keys().to(tree.like(weights).device)
        sent, after = vmap(one)(stack(list(run.batches)), keys, before)
    each = [tree.map(lambda value, i=i: value[i], {"sent": sent, "after": after}) for i in range(len(run.batches))]
    uploads = tuple(Upload(client["sent"], sizes[0]) for client in each)
    return Cohort(task, weights, defence, uploads, tuple(client["after"] for client in each), run.round, run.key)


@takes(CohortRound)
def observed(run: CohortRound) -> Observation:
    """What the server sees of these clients' sum: without a defence plain secure aggregation, their mean update."""
    return cohort(run).observed()


def masked_first(group: Cohort, *, factor_bits: int = FACTOR_BITS, seed: int = 0) -> Params:
    """The server's estimate of the mean first moment before it divides: r sum m / (n E[r]).

    r is unknown but uniform in 1 ... 2^bits, so most of its values have the same size: r m has a cosine of about
    sqrt(3/4) = 0.87 with m, and the right signs.
    """
    sums = in_floats(weighted(group.uploads, group.sizes), factor_bits=factor_bits, seed=seed)
    mean = (2**factor_bits + 1) / 2
    return tree.scale(sums.first, 1 / (mean * sums.clients))


def cosine(a: Params, b: Params) -> float:
    """The cosine between two trees, over all entries."""
    a, b = (tree.to(each, "cpu", torch.float64) for each in (a, b))
    length = math.sqrt(float(tree.squared_norm(a)) * float(tree.squared_norm(b)))
    return float(tree.dot(a, b)) / length if length else 0.0


def with_update(observation: Observation, update: Params) -> Observation:
    """The same observation with another update, such as `masked_first`."""
    return replace(observation, update=tree.map(lambda value, like: value.to(like), update, observation.update))
