"""One round of federated training: who takes part, what they send, how the server aggregates it."""

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
from gradleak.federation.clients import Clients, Work, evaluating, examples_in, flat, unflat
from gradleak.federation.uploads import ExcludedClient, accepted, mean_buffers
from gradleak.scenario.defence import Defence, Upload
from gradleak.scenario.objectives import prediction_of
from gradleak.scenario.task import Batch, Task, TaskError, float32_products

if TYPE_CHECKING:
    from gradleak.federation import Federation

AT_ONCE, ENTRIES = 1024, 2**22  # most examples, and most pixels, of one forward pass in evaluation


class Examples(Protocol):
    """Data for clients, in model-input space."""

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor) -> Batch: ...


class Snapshot(NamedTuple):
    """What the server sends at a round, and what clients and server remember by then."""

    weights: Params
    buffers: Params
    memories: Mapping[int, Tree] = MappingProxyType({})
    server: Mapping[str, Any] = MappingProxyType({})  # what `Defence.advance` returned last


class Remembered(NamedTuple):
    """What one client (`Snapshot.memories`) and the server (`Snapshot.server`) bring from earlier rounds."""

    client: Tree | None = None
    server: Tree | None = None


@dataclass(frozen=True, eq=False)
class State:
    """Everything that the next round depends on besides the configuration. `round`: how many are done."""

    round: int
    weights: Params
    buffers: Params
    memories: Mapping[int, Params]  # by client, if it remembers anything; flat, see `clients.flat`
    server: Params = field(default_factory=dict)  # what the server remembers, flat
    average: Params = field(default_factory=dict)  # of models (`swa.Averaging`), flat; never sent

    @property
    def snapshot(self) -> Snapshot:
        memories = {client: unflat(memory) for client, memory in self.memories.items()}
        return Snapshot(self.weights, self.buffers, memories, unflat(self.server))

    @property
    def averaged(self) -> State | None:
        """This state with the average of models as its weights, for evaluation; None: there is no average."""
        if not self.average:
            return None
        average = unflat(self.average)
        return replace(self, weights=average["weights"], buffers=average.get("buffers", {}))


@dataclass(frozen=True)
class Round:
    """What happened in a round. `round` counts from 1: this many are done after it.

    loss         mean over the examples of the round, at the weights that were sent, the model in evaluation mode
    clients      whose uploads were aggregated
    excluded     the other chosen clients, with the reason why their upload was not aggregated
    skipped      why the weights did not change; empty if they did
    """

    round: int
    loss: float | None
    clients: tuple[int, ...]
    excluded: Mapping[int, str]
    skipped: str = ""


class Rounds:
    """The rounds of one task and its data: `first` gives the state before training, `after` the next one.

    Trains on the engine's device, in the task's dtype (float64 if the engine's precision is "double").
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
        like = tree.like(task.weights())
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
        """The state before training: the defence may change the weights and what the server remembers."""
        weights = self.task.weights()
        with torch.no_grad(), self.engine.settings():
            server = {**self._server("initial", 0), "task": self.task, "load": load}
            initial = self.defence.initial(weights, server)
        buffers = {name: initial.get(name, value) for name, value in self.task.buffers().items()}
        return self._begun({name: initial[name] for name in weights}, buffers)

    def unprepared(self) -> State:
        """The state before training without the defence's preparation, which may be long: for timing."""
        return self._begun(self.task.weights(), self.task.buffers())

    def _begun(self, weights: Params, buffers: Params) -> State:
        return self._after(State(-1, weights, buffers, {}), weights, buffers, ())

    def restored(self, state: State) -> State:
        """A saved state, on the device and in the dtype of this training."""
        move = partial(moved, like=self.task.weights())
        memories = {client: move(memory) for client, memory in state.memories.items()}
        weights, buffers, server, average = map(move, (state.weights, state.buffers, state.server, state.average))
        return State(state.round, weights, buffers, memories, server, average)

    def after(self, state: State) -> tuple[State, Round]:
        """One round. The state is not changed; an excluded client keeps its old memory."""
        number, federation = state.round, self.federation
        chosen = federation.participation.chosen(federation.clients, federation.generator("participation", number))
        idle = {client: "it holds no examples" for client in chosen if not len(self.shares[client])}
        work = [self._work(client, state) for client in chosen if client not in idle]
        loss = self._loss(work, state)
        extras = self.defence.broadcast(state.weights, self._server("broadcast", number, state))
        done = self.clients.run(work, state.weights, state.buffers, extras, federation.lr_at(number))
        sizes = {one.client: examples_in(one.batch) for one in work}
        taken = accepted({client: result.upload for client, result in done.items()}, state.weights, sizes)
        excluded = {**idle, **taken.excluded}
        for client, reason in excluded.items():
            warnings.warn(f"Client {client} is left out of round {number + 1}: {reason}.", ExcludedClient, stacklevel=2)
        outcome = Round(number + 1, None if loss is None else float(loss), tuple(taken.uploads), excluded)
        server = {**self._server("aggregate", number, state), "weights": state.weights}
        if not taken.uploads:
            why = "every client was left out" if chosen else "no client was drawn"
            step = self.defence.idle(server)
            weights = state.weights if step is None else self._moved(state, step)
            outcome = replace(outcome, skipped=why) if step is None else outcome
            return self._after(state, weights, state.buffers, ()), outcome
        uploads = list(taken.uploads.values())
        counts = [upload.num_examples if federation.weighting == "examples" else 1 for upload in uploads]
        with torch.no_grad(), float32_products():
            weights = self._moved(state, self.defence.aggregate(uploads, counts, server))
            buffers = mean_buffers(uploads, counts, state.buffers)
        memories = {**state.memories, **{client: done[client].memory for client in taken.uploads}}
        memories = {client: memory for client, memory in memories.items() if memory}
        return self._after(replace(state, memories=memories), weights, buffers, uploads), outcome

    def _after(self, state: State, weights: Params, buffers: Params, uploads: Sequence[Upload]) -> State:
        """The state after a round that ended with these weights, with the server's memory and average brought up."""
        number, averaging = state.round + 1, self.federation.averaging
        average = unflat(state.average)
        with torch.no_grad(), float32_products():
            server = self._server("advance", state.round, state)
            remembered = flat(self.defence.advance(state.weights, weights, uploads, server))
            average = {} if averaging is None else averaging.after(number, average, weights, buffers)
        memory = {name: torch.as_tensor(value, device=self.engine.where).detach() for name, value in remembered.items()}
        return State(number, weights, buffers, state.memories, memory, flat(average))

    def _moved(self, state: State, step: Params) -> Params:
        return tree.detach(tree.subtract(state.weights, tree.scale(step, self.federation.server_lr)))

    def _server(self, hook: str, number: int, state: State | None = None) -> Tree:
        server = self.federation.server(hook, number, None if state is None else unflat(state.server))
        return {**server, "key": server["key"].to(self.engine.where)}

    def _work(self, client: int, state: State) -> Work:
        """The client's rows, shuffles and random key in this round: each depends on (seed, client, round) alone."""
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
        sizes = [examples_in(one.batch) for one in work]
        together = max(1, at_once(self._evaluating) // max(sizes))  # clients in one forward pass
        total = []
        for start in range(0, len(work), together):
            batches = [self._completed(one, state.round) for one in work[start : start + together]]
            whole = tree.map(lambda *values: torch.cat(values), *batches) if len(batches) > 1 else batches[0]
            total.append(measured(self._evaluating, state.snapshot, whole)[0])
        return torch.stack(total).sum() / sum(sizes)

    def _completed(self, one: Work, number: int) -> Batch:
        """The batch with the fields that the client draws itself, for the reported loss."""
        assert self._evaluating is not None
        key = randomness.key("federation", self.federation.seed, "loss", one.client, number).to(self.engine.where)
        return self._evaluating.completed(one.batch, Draws(key))

    def evaluate(self, state: State, data: Examples) -> dict[str, float]:
        """Loss and, for a classification, accuracy on these data, the model in evaluation mode.

        Fields that a client draws itself (step and noise of a denoiser) are drawn here: the same for an example in
        every round, so that rounds can be compared.
        """
        task = self._evaluating or evaluating(self.task)
        sums, some = [], at_once(task)
        for start in range(0, len(data), some):
            rows = torch.arange(start, min(start + some, len(data)))
            drawn = Draws(randomness.key("federation", "test", start).to(self.engine.where))
            sums.append(torch.stack(measured(task, state.snapshot, moved(data.batch(rows), state.weights), drawn)))
        loss, hits = (torch.stack(sums).double().sum(0) / len(data)).tolist()
        return {"test_loss": loss, **({} if hits != hits else {"test_accuracy": hits})}


def at_once(task: Task) -> int:
    """Number of examples in one forward pass."""
    largest = max(math.prod(field.shape) for field in task.fields.values())
    return max(1, min(AT_ONCE, ENTRIES // max(1, largest)))


def measured(task: Task, sent: Snapshot, batch: Batch, source: Draws | None = None) -> tuple[Tensor, Tensor]:
    """Sums over the examples: of the objective, and of right classifications (NaN if the task is no classification).

    `source` draws the fields that a client draws itself; without it the batch must be complete.
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
        for start in range(0, examples_in(batch), some):
            part = {name: value[start : start + some] for name, value in batch.items()}
            outputs.clear()
            losses.append(task.objective(call, part).detach().double() * examples_in(part))
            hits.append(_hits(outputs, part, losses[-1]))
    return torch.stack(losses).sum(), torch.stack(hits).sum()


def _hits(outputs: list[Any], batch: Batch, like: Tensor) -> Tensor:
    y = batch.get("y")
    if y is None or y.dim() != 1 or y.is_floating_point() or not outputs:
        return torch.full_like(like, torch.nan)
    try:
        logits = prediction_of(outputs[0])
    except TaskError:  # an objective of the user's own looks at something else
        return torch.full_like(like, torch.nan)
    if logits.shape[:-1] != y.shape:
        return torch.full_like(like, torch.nan)
    return (logits.argmax(-1) == y).sum().to(like.dtype)


def _placed(data: Examples, device: torch.device, dtype: torch.dtype) -> Examples:
    """Data in tensors move to the device once; others are moved batch by batch."""
    move = getattr(data, "to", None)
    return data if move is None else move(device, dtype)


def moved(values: Mapping[str, Tensor], like: Params) -> Params:
    """These tensors on the device of `like` and, if they are floating point, in its dtype."""
    first = tree.like(like)
    return tree.to(values, first.device, first.dtype)
