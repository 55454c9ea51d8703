"""One round after the other: who takes part, what they send, what the server makes of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.data import load
from gradleak.engine import Engine
from gradleak.federation.clients import Clients, Work, evaluating, flat, unflat
from gradleak.federation.uploads import ExcludedClient, accepted, mean_buffers
from gradleak.scenario.defence import Defence, Upload
from gradleak.scenario.task import Batch, Task, float32_products

if TYPE_CHECKING:
    from gradleak.federation import Federation

AT_ONCE, ENTRIES = 1024, 2**22  # examples, and pixels, of one forward pass where only loss and accuracy are wanted


class Examples(Protocol):
    """Data that clients can be given, in model-input space."""

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor) -> Batch: ...


class Snapshot(NamedTuple):
    """What the server sends at a round, and beside it what each client, and the server, has kept until then."""

    weights: Params
    buffers: Params
    memories: Mapping[int, Tree] = MappingProxyType({})
    server: Mapping[str, Any] = MappingProxyType({})  # what `Defence.advance` returned last


@dataclass(frozen=True, eq=False)
class State:
    """Everything that the next round depends on besides the configuration. `round`: how many are done."""

    round: int
    weights: Params
    buffers: Params
    memories: Mapping[int, Params]  # of clients that remember something, flat: see `clients.flat`
    server: Params = field(default_factory=dict)  # what the server remembers, flat
    average: Params = field(default_factory=dict)  # of models, flat: see `swa.Averaging`; never sent

    @property
    def snapshot(self) -> Snapshot:
        memories = {client: unflat(held) for client, held in self.memories.items()}
        return Snapshot(self.weights, self.buffers, memories, unflat(self.server))

    @property
    def averaged(self) -> State | None:
        """This state with the averaged model in the place of the trained one, to be evaluated; None: there is none."""
        if not self.average:
            return None
        held = unflat(self.average)
        return replace(self, weights=held["weights"], buffers=held.get("buffers", {}))


@dataclass(frozen=True)
class Round:
    """What happened in a round. `round` counts from 1: this many are done after it.

    loss         mean over the examples that took part, at the weights they were sent, the model in evaluation mode
    clients      whose uploads were aggregated
    excluded     who else was asked, and why the server did not take what they sent
    skipped      why the weights stayed as they were; empty where they moved
    """

    round: int
    loss: float | None
    clients: tuple[int, ...]
    excluded: Mapping[int, str]
    skipped: str = ""


class Rounds:
    """A federation at work on one task and its data: `first` gives the state before training, `after` the next one.

    Trains on the engine's device, in the task's own type (float64 where the engine's precision is "double").
    """

    def __init__(
        self,
        federation: Federation,
        task: Task,
        data: Examples,
        defence: Defence | None = None,
        engine: Engine | None = None,
        measure: bool = True,
    ) -> None:
        like = next(tree.leaves(task.weights()))
        engine = Engine(device=str(like.device)) if engine is None else engine
        dtype = torch.float64 if engine.precision == "double" else like.dtype
        self.federation, self.defence, self.engine = federation, defence or Defence(), engine
        same = (like.device, like.dtype) == (engine.where, dtype)
        self.task = task.copied() if same else task.to(engine.where, dtype)  # clients leave nothing in the user's model
        self.data = _placed(data, engine.where, dtype)
        self.shares = federation.partition(data)
        self.clients = Clients(self.task, federation.training, self.defence, engine)
        self._evaluating = evaluating(self.task) if measure else None

    def first(self) -> State:
        """Before training: the weights as the defence has them, and what the server remembers from the start."""
        weights = self.task.weights()
        with torch.no_grad(), self.engine.settings():
            server = {**self._server("initial", 0), "task": self.task, "load": load}
            found = self.defence.initial(weights, server)
        buffers = {name: found.get(name, value) for name, value in self.task.buffers().items()}
        return self._begun({name: found[name] for name in weights}, buffers)

    def unprepared(self) -> State:
        """The state before training without what the defence does first, which may be long: for timing."""
        return self._begun(self.task.weights(), self.task.buffers())

    def _begun(self, weights: Params, buffers: Params) -> State:
        return self._after(State(-1, weights, buffers, {}), weights, buffers, ())

    def restored(self, state: State) -> State:
        """A state that was kept elsewhere, on the device and in the type of this training."""
        move = partial(moved, like=self.task.weights())
        memories = {client: move(memory) for client, memory in state.memories.items()}
        held = (state.weights, state.buffers, state.server, state.average)
        weights, buffers, server, average = map(move, held)
        return State(state.round, weights, buffers, memories, server, average)

    def after(self, state: State) -> tuple[State, Round]:
        """One round. The state is not changed; a client that is left out keeps what it remembered before."""
        number, federation = state.round, self.federation
        chosen = federation.participation.chosen(federation.clients, federation.generator("participation", number))
        idle = {client: "it holds no examples" for client in chosen if not len(self.shares[client])}
        work = [self._work(client, state) for client in chosen if client not in idle]
        loss = self._loss(work, state)
        extras = self.defence.broadcast(state.weights, self._server("broadcast", number, state))
        done = self.clients.run(work, state.weights, state.buffers, extras, federation.lr_at(number))
        sizes = {own.client: len(next(iter(own.batch.values()))) for own in work}
        taken = accepted({client: result.upload for client, result in done.items()}, state.weights, sizes)
        excluded = {**idle, **taken.excluded}
        for client, reason in excluded.items():
            warnings.warn(f"Client {client} is left out of round {number + 1}: {reason}.", ExcludedClient, stacklevel=2)
        told = Round(number + 1, None if loss is None else float(loss), tuple(taken.uploads), excluded)
        server = {**self._server("aggregate", number, state), "weights": state.weights}
        if not taken.uploads:
            why = "every client was left out" if chosen else "no client was drawn"
            step = self.defence.idle(server)
            weights = state.weights if step is None else self._moved(state, step)
            told = replace(told, skipped=why) if step is None else told
            return self._after(state, weights, state.buffers, ()), told
        uploads = list(taken.uploads.values())
        counts = [upload.num_examples if federation.weighting == "examples" else 1 for upload in uploads]
        with torch.no_grad(), float32_products():
            weights = self._moved(state, self.defence.aggregate(uploads, counts, server))
            buffers = mean_buffers(uploads, counts, state.buffers)
        memories = {**state.memories, **{client: done[client].memory for client in taken.uploads}}
        kept = {client: memory for client, memory in memories.items() if memory}
        return self._after(replace(state, memories=kept), weights, buffers, uploads), told

    def _after(self, state: State, weights: Params, buffers: Params, uploads: Sequence[Upload]) -> State:
        """The state after a round that ended with these weights, and what the server keeps of it."""
        number, averaging = state.round + 1, self.federation.averaging
        average = unflat(state.average)
        with torch.no_grad(), float32_products():
            server = self._server("advance", state.round, state)
            held = flat(self.defence.advance(state.weights, weights, uploads, server))
            average = {} if averaging is None else averaging.after(number, average, weights, buffers)
        kept = {name: torch.as_tensor(value, device=self.engine.where).detach() for name, value in held.items()}
        return State(number, weights, buffers, state.memories, kept, flat(average))

    def _moved(self, state: State, step: Params) -> Params:
        return tree.detach(tree.subtract(state.weights, tree.scale(step, self.federation.server_lr)))

    def _server(self, hook: str, number: int, state: State | None = None) -> Tree:
        server = self.federation.server(hook, number, None if state is None else unflat(state.server))
        return {**server, "key": server["key"].to(self.engine.where)}

    def _work(self, client: int, state: State) -> Work:
        """The client's rows, shuffles and random key of this round: each a function of (seed, client, round) alone."""
        federation, share, number = self.federation, self.shares[client], state.round
        size = len(share) if federation.examples is None else min(federation.examples, len(share))
        rows = share[(torch.arange(size) + number * size) % len(share)]
        plan = federation.training.order(size, federation.generator("order", client, number))
        order = None if plan[0] is None else torch.cat([step for step in plan if isinstance(step, Tensor)])
        where = self.engine.where
        batch = moved(self.data.batch(rows), state.weights)
        key = randomness.key("federation", federation.seed, client, number).to(where)
        return Work(
            client, batch, dict(state.memories.get(client, {})), key, None if order is None else order.to(where)
        )

    def _loss(self, work: list[Work], state: State) -> Tensor | None:
        if self._evaluating is None or not work:
            return None
        sizes = [_size(own.batch) for own in work]
        together = max(1, at_once(self._evaluating) // max(sizes))  # clients in one forward pass
        total = []
        for start in range(0, len(work), together):
            batches = [self._completed(own, state.round) for own in work[start : start + together]]
            whole = tree.map(lambda *values: torch.cat(values), *batches) if len(batches) > 1 else batches[0]
            total.append(measured(self._evaluating, state.snapshot, whole)[0])
        return torch.stack(total).sum() / sum(sizes)

    def _completed(self, own: Work, number: int) -> Batch:
        """With what the client would draw itself, for the loss that is told."""
        assert self._evaluating is not None
        key = randomness.key("federation", self.federation.seed, "loss", own.client, number).to(self.engine.where)
        return self._evaluating.completed(own.batch, Draws(key))

    def evaluate(self, state: State, data: Examples) -> dict[str, float]:
        """Loss and, for a classification, accuracy on these data, the model in evaluation mode.

        What a client would draw itself (step and noise of a denoiser) is drawn here, for an example the same in every
        round, so that rounds can be compared.
        """
        task = self._evaluating or evaluating(self.task)
        found, some = [], at_once(task)
        for start in range(0, len(data), some):
            rows = torch.arange(start, min(start + some, len(data)))
            drawn = Draws(randomness.key("federation", "test", start).to(self.engine.where))
            found.append(torch.stack(measured(task, state.snapshot, moved(data.batch(rows), state.weights), drawn)))
        loss, hits = (torch.stack(found).double().sum(0) / len(data)).tolist()
        return {"test_loss": loss, **({} if hits != hits else {"test_accuracy": hits})}


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def at_once(task: Task) -> int:
    """Examples of one forward pass."""
    largest = max(math.prod(held.shape) for held in task.fields.values())
    return max(1, min(AT_ONCE, ENTRIES // max(1, largest)))


def measured(task: Task, sent: Snapshot, batch: Batch, source: Draws | None = None) -> tuple[Tensor, Tensor]:
    """Sums over the examples: of the objective, and of right classifications (NaN where the task has no such thing).

    `source`: of what a client would draw itself; without it the batch has to be complete.
    """
    outputs: list[Any] = []

    def call(*inputs: Any, **named: Any) -> Any:
        outputs.append(model(*inputs, **named))
        return outputs[-1]

    losses, hits, some = [], [], at_once(task)
    batch = batch if source is None else task.completed(batch, source)
    with torch.no_grad(), float32_products():
        model: Callable[..., Any] = task.call(
            sent.weights, {name: value.clone() for name, value in sent.buffers.items()}
        )
        for start in range(0, len(next(iter(batch.values()))), some):
            part = {name: value[start : start + some] for name, value in batch.items()}
            count = len(next(iter(part.values())))
            outputs.clear()
            losses.append(task.objective(call, part).detach().double() * count)
            hits.append(_hits(outputs, part, losses[-1]))
    return torch.stack(losses).sum(), torch.stack(hits).sum()


def _hits(outputs: list[Any], batch: Batch, like: Tensor) -> Tensor:
    y = batch.get("y")
    logits = outputs[0] if outputs and isinstance(outputs[0], Tensor) else None
    if y is None or y.dim() != 1 or y.is_floating_point() or logits is None or logits.shape[:-1] != y.shape:
        return torch.full_like(like, torch.nan)
    return (logits.argmax(-1) == y).sum().to(like.dtype)


def _placed(data: Examples, device: torch.device, dtype: torch.dtype) -> Examples:
    """Data that are held as tensors move to the device once; others are moved batch by batch."""
    move = getattr(data, "to", None)
    return data if move is None else move(device, dtype)


def moved(values: Mapping[str, Tensor], like: Params) -> Params:
    """These tensors on the device and, where they hold fractions, in the type of `like`."""
    first = next(tree.leaves(like))
    return tree.to(values, first.device, first.dtype)
