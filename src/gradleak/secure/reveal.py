"""What the server of SecAdam or SecLion has in the end: two masked sums, and what it, or a traitor, makes of them.

Clients send first and second moments (`defences.SecAdam`). The server gets r * sum_i m_i and r^2 * sum_i v_i, with r a
positive whole number per coordinate that all clients share (`SharedSeed`), and computes sum m / sqrt(n sum v).

    in_ring     the real protocol, in fixed point
    in_floats   the same sums with masks in float64: a simulation for audits, which protects nobody
    observed    what the server sees of a cohort of clients, as an `Observation` for attacks
    second_over_rounds   mean second moments, read off the sums of many rounds; `first_over_rounds` the first ones
    Traitor     a client that tells the server the shared seed; `uncovered` is what the server then knows
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Defence, Upload
from gradleak.scenario.observation import Observation, stack
from gradleak.scenario.task import Batch, Task, float32_products
from gradleak.secure.client import Client, Member
from gradleak.secure.plan import Plan, Roster
from gradleak.secure.ring import FixedPoint, Part
from gradleak.secure.seed import SharedSeed
from gradleak.secure.simulation import flat, restored, simulate
from gradleak.secure.stages import Stage

FIRST, SECOND = "first", "second"  # the trees of an upload of moments
FACTOR_BITS = 8


@dataclass(frozen=True, eq=False)
class Masked:
    """The sums as the server has them, in float64: r^a * sum of the first, r^b * sum of the second moments."""

    first: Params
    second: Params
    clients: int
    survivors: tuple[int, ...]
    plan: Plan | None = None
    costs: Any = None
    weight: float = 0.0  # what the shares of those in the sums come to; 0: as many as they are

    @property
    def total(self) -> float:
        """What the sums are divided by: after dropouts of unequal clients this is not their number."""
        return self.weight or float(self.clients)

    def ratio(self, root: int) -> Params:
        """mean(first) / mean(second)^(1/root): root 2 for SecAdam, 1 for SecLion. The factor cancels."""

        def divided(first: Tensor, second: Tensor) -> Tensor:
            return (first / self.total) / (second / self.total) ** (1 / root)

        return tree.map(divided, self.first, self.second)


def shares(sizes: Sequence[int]) -> list[float]:
    """Of every client in the sums: 1 where all have as many examples, and 1 in the mean. The server knows them."""
    return [len(sizes) * size / sum(sizes) for size in sizes]


def weighted(uploads: Sequence[Upload], sizes: Sequence[int]) -> dict[int, Tree]:
    """What clients put in, by number: their moments times their share, so that sums over n clients are n means."""
    return {
        number: {name: tree.scale(held, share) for name, held in upload.payload.items()}
        for number, (upload, share) in enumerate(zip(uploads, shares(sizes), strict=True))
    }


def in_ring(
    values: Mapping[int, Tree],
    *,
    clip: float | None = None,
    largest: float | None = None,
    powers: tuple[int, int] = (1, 2),
    factor_bits: int = FACTOR_BITS,
    ring_bits: int = 64,
    minimum: int = 3,
    threshold: int | None = None,
    dropouts: Mapping[int, Stage] | None = None,
    members: Sequence[Member] | None = None,
    session: bytes | None = None,
    round: int = 0,
    sizes: Sequence[int] | None = None,
) -> Masked:
    """One round of secure aggregation of moments, {client: {"first": ..., "second": ...}}, by the real protocol.

    clip       of first moments, largest of second ones: entries beyond are refused. None: the largest entry there is,
               which real clients would have to agree on beforehand
    powers     of the shared factor: (1, 2) for SecAdam, (1, 1) for SecLion; (0, 0) without one
    sizes      what values were `weighted` with, in their order; None: equally. Means after dropouts are of who is left

    Sums are exact without a factor. With one they are off by up to half a unit a client, which hides the factor: whole
    multiples would give it away (`ring.blurred`).

    Second moments below the unit of their fixed-point numbers are raised to it: v is a square, a 64-bit ring with
    factors of 8 bits leaves some 30 binary digits after the point, and a sum that is rounded to 0 could not be divided
    by. Gradients below about 1e-5 of the largest then count less than they would in floating point.
    """
    numbers = list(values)
    like = values[numbers[0]][FIRST]
    vectors = {client: {name: flat(held[name]) for name in (FIRST, SECOND)} for client, held in values.items()}
    bounds = [
        limit or max(float(np.abs(held[name]).max()) for held in vectors.values()) or 1.0
        for name, limit in ((FIRST, clip), (SECOND, largest))
    ]
    codings = [
        FixedPoint.finest(bound, len(values), ring_bits=ring_bits, factor_bits=power * factor_bits)
        for bound, power in zip(bounds, powers)
    ]
    for held in vectors.values():
        held[SECOND] = np.maximum(held[SECOND], codings[1].unit)
    members = [Member(client) for client in numbers] if members is None else members
    plan = Plan(
        Roster.of({member.number: member.identity.public for member in members}),
        tuple(Part(n, tree.size(like), c, factor=p) for n, c, p in zip((FIRST, SECOND), codings, powers)),
        session or secrets.token_bytes(16),
        round,
        minimum=minimum,
        threshold=threshold,
        factor_bits=factor_bits,
        ring_bits=ring_bits,
    )
    done = simulate(plan, members, vectors, dropouts)
    first, second = (restored(done.sums[name], like) for name in (FIRST, SECOND))
    share = dict(zip(numbers, shares([1] * len(numbers) if sizes is None else sizes), strict=True))
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
    """What a server has of these uploads of moments after one round of `in_ring`.

    largest   entry of the second moments of a client with the mean number of examples; None: read off the uploads
    """
    most = None if largest is None else largest * max(shares(sizes))  # a client with many examples puts in more
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

    Such masks hide imperfectly and the generator is no cipher: nothing here protects anybody. Raises where the masks
    do not cancel to 1e-6.
    """
    numbers = list(values)
    like = values[numbers[0]][FIRST]
    size = tree.size(like)
    factor = factors(size, factor_bits, seed)
    found = {}
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
        left = total - torch.stack([value * factor**power for value in plain.values()]).sum(0)
        if not float(left.abs().max()) < 1e-6:
            raise ArithmeticError(f"Masks left {float(left.abs().max()):.1e} behind: use a smaller spread.")
        found[name] = tree.unflatten(total, like)
    return Masked(found[FIRST], found[SECOND], len(numbers), tuple(numbers))


def factors(size: int, bits: int, seed: int) -> Tensor:
    """Shared factors as `SharedSeed` makes them, uniform in 1 ... 2^bits, of a seed for simulations; float64."""
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


def uncovered(seen: Masked, seed: SharedSeed, own: Tree | None = None, *, share: float = 1.0) -> tuple[Params, Params]:
    """Mean first and second moments of the OTHER clients, which the shared seed and a traitor's own values give away.

    own: what the traitor itself put in, {"first": ..., "second": ...}; None: it stays in the means. With two clients
    these are the other one's moments; with n they are means over n - 1, as plain secure aggregation would show.
    share: the traitor's own (`shares`), where clients are not equal.
    """
    assert seen.plan is not None, "the seed is of a round of the real protocol"
    found = []
    for part, total in zip(seen.plan.parts, (seen.first, seen.second)):
        r = torch.from_numpy(seed.factors(part.size, seen.plan.factor_bits).astype(np.float64))
        sums = tree.flatten(total) / r**part.factor
        if own is not None:
            sums = sums - torch.from_numpy(flat(own[part.name]))
        found.append(tree.unflatten(sums / (seen.total - (share if own is not None else 0.0)), total))
    return found[0], found[1]


# --- many rounds ------------------------------------------------------------------------------------------------------


def second_over_rounds(seen: Sequence[Masked], *, factor_bits: int = FACTOR_BITS, beta2: float | None = None) -> Params:
    """Mean second moments in the LAST of these rounds, as a server reads them off the sums r_t^2 v_t of all; float64.

    r_t is fresh in every round and never above 2^bits; v_t is a mean over some 1 / (1 - beta2) rounds and hardly moves.
    None: the largest (r_t / 2^bits)^2 v_t, as if v stood still, times ((T + 1) / T)^2 for what the largest of T uniform
    numbers lacks. The first rounds move v most: leave them out. With beta2: what v_T is AT LEAST, whatever the clients
    had, since v forgets no faster than beta2^t; `seen` must then begin with the first round, of clients that all began
    in it.
    """
    top, last = 4.0**factor_bits, len(seen)
    if beta2 is None:
        weights = [(1 + 1 / last) ** 2] * last
    else:
        weights = [beta2 ** (last - t) * (1 - beta2**t) / (1 - beta2**last) for t in range(1, last + 1)]
    found = tree.scale(seen[0].second, weights[0] / (top * seen[0].total))
    for each, weight in zip(seen[1:], weights[1:]):
        scale = weight / (top * each.total)
        found = tree.map(lambda most, held, scale=scale: torch.maximum(most, held * scale), found, each.second)
    return found


def first_over_rounds(seen: Masked, second: Params) -> Params:
    """Mean first moments of a round: its ratio times the root of what second moments are known to be; float64."""
    return tree.map(lambda ratio, v: ratio * v.sqrt(), seen.ratio(2), second)


def gradient_over_rounds(before: Masked, last: Masked, second: Params, *, round: int, beta1: float) -> Params:
    """The mean gradient of clients in round t = `round` (from 1), of first moments of rounds t - 1 and t; float64.

    g_t = (M_t - beta1 M_(t-1)) / (1 - beta1), with M = (1 - beta1^t) m. A wrong size of v in a coordinate is the same
    in both, so it makes g as wrong as m and not worse.
    """
    new, old = (
        tree.scale(first_over_rounds(seen, second), 1 - beta1**t) for seen, t in ((last, round), (before, round - 1))
    )
    return tree.map(lambda m, held: (m - beta1 * held) / (1 - beta1), new, old)


# --- observations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cohort:
    """The clients of one round: what each would upload, which nobody but it knows, and what each remembers."""

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
        """What the server sees: what the defence reveals of the sums, unless something else is given.

        `clients`: of whom it tells, where those are not all; attacks then look for so many examples.
        """
        chosen = range(len(self.uploads)) if clients is None else clients
        if update is None:
            update = self.defence.reveal([self.uploads[c] for c in chosen], [self.sizes[c] for c in chosen])
        like = next(tree.leaves(self.weights))
        return Observation(
            weights=self.weights,
            update=tree.to(tree.detach(update), like.device, like.dtype),
            num_examples=sum(self.sizes[c] for c in chosen),
            clients=len(chosen),
            round=self.round,
            key=self.key,
            buffers=self.task.buffers() or None,
        )


def cohort(
    task: Task,
    batches: Sequence[Batch],
    training: LocalTraining,
    defence: Defence | None = None,
    *,
    weights: Params | None = None,
    memories: Sequence[Tree] | None = None,
    round: int = 0,
    key: str = "cohort",
    seed: int = 0,
) -> Cohort:
    """Let every client train on its batch, all as one vmapped run; batches must be of equal size.

    `memories`: what each kept from the round before (`Cohort.memories`).
    """
    defence = defence or Defence()
    weights = task.weights() if weights is None else weights
    if len({len(next(iter(batch.values()))) for batch in batches}) != 1:
        raise ValueError("The clients of a cohort must have equally many examples.")
    where = next(tree.leaves(weights)).device
    keys = torch.stack([randomness.key("client", key, seed, round, number) for number in range(len(batches))]).to(where)
    extras = defence.broadcast(weights, {})
    sizes: list[int] = []

    def one(batch: Batch, own: Tensor, memory: Tree) -> tuple[Tree, Tree]:
        state = ClientState(memory=memory, extras=extras, key=own)
        sent, after = training.run(task, weights, batch, defence, state)
        sizes.append(sent.num_examples)
        return sent.payload, after.memory

    held = {} if not memories or not memories[0] else tree.map(lambda *values: torch.stack(values), *memories)
    with float32_products(), torch.no_grad():
        sent, after = vmap(one)(stack(list(batches)), keys, held)
    each = [tree.map(lambda value, i=i: value[i], {"sent": sent, "after": after}) for i in range(len(batches))]
    uploads = tuple(Upload(own["sent"], sizes[0]) for own in each)
    return Cohort(task, weights, defence, uploads, tuple(own["after"] for own in each), round, key)


def observed(
    task: Task,
    batches: Sequence[Batch],
    training: LocalTraining,
    defence: Defence | None = None,
    *,
    weights: Params | None = None,
    key: str = "cohort",
    seed: int = 0,
) -> Observation:
    """What the server sees of these clients' sum: without a defence plain secure aggregation, their mean update."""
    return cohort(task, batches, training, defence, weights=weights, key=key, seed=seed).observed()


def masked_first(group: Cohort, *, factor_bits: int = FACTOR_BITS, seed: int = 0) -> Params:
    """The estimate of the mean first moment that the server has before it divides: r sum m / (n E[r]).

    r is unknown but uniform in 1 ... 2^bits, so most of its values have the same size: r m has a cosine of about
    sqrt(3/4) = 0.87 with m, and the right signs.
    """
    seen = in_floats(weighted(group.uploads, group.sizes), factor_bits=factor_bits, seed=seed)
    mean = (2**factor_bits + 1) / 2
    return tree.scale(seen.first, 1 / (mean * seen.clients))


def cosine(a: Params, b: Params) -> float:
    """Between two trees, over all entries."""
    a, b = (tree.to(each, "cpu", torch.float64) for each in (a, b))
    length = math.sqrt(float(tree.squared_norm(a)) * float(tree.squared_norm(b)))
    return float(tree.dot(a, b)) / length if length else 0.0


def with_update(seen: Observation, update: Params) -> Observation:
    """The same observation with another update, such as `masked_first`."""
    return replace(seen, update=tree.map(lambda found, like: found.to(like), update, seen.update))
