"""LocalTraining: THE client rule. Simulation, Flower and attackers that replay a client all call this one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.settings import takes
from gradleak.core.tree import Params, Tree
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.derivatives import PlainForms
from gradleak.scenario.dropout import Dropping
from gradleak.scenario.observation import Observation
from gradleak.scenario.rules import SGD, Rule, Schedule, constant
from gradleak.scenario.task import Batch, Task, TaskError, float32_products

SHARED = "draws"
"""Name in the server's broadcast of a key from which ALL clients draw the fields that each would draw by itself."""

Order: TypeAlias = Sequence[Tensor | slice | None]
"""Rows of the batch that each step uses; None means all of them."""


@dataclass(frozen=True, eq=False)
class ClientState:
    """What a client keeps between rounds, and its random key. A run returns a new one and never mutates it."""

    optimiser: Tree | None = None  # None: the rule starts anew
    memory: Tree = field(default_factory=dict)
    buffers: Params | None = None
    extras: dict[str, Params] = field(default_factory=dict)  # what the server broadcast this round
    key: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """The client's recipe, pure and differentiable. With neither steps nor epochs: one step.

    steps        that many steps; with `batch_size` they cycle through the examples
    epochs       passes over the examples in batches of `batch_size` (None: all at once)
    augmentation random changes of the examples of a step
    dropout      the model's dropout layers drop, with the client's own masks; keep the model in evaluation mode

    Fields that a client draws itself (`Task.drawn`), if its batch lacks them, are drawn from its key in every step.
    """

    lr: float | Tensor
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    optimiser: Rule = SGD()
    schedule: Schedule = constant
    augmentation: Callable[[Batch, Draws, int], Batch] | None = None
    dropout: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("Give steps or epochs, not both: they fix the same number.")
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; given {value}.")
        if self.batch_size is not None and self.steps is None and self.epochs is None:
            raise ValueError("batch_size needs steps or epochs: one step on one batch would leave examples unused.")
        if not isinstance(self.lr, Tensor) and not self.lr > 0:
            raise ValueError(f"lr must be positive; given {self.lr}.")

    @property
    def public(self) -> LocalTraining:
        """The recipe without the client's own randomness: what a replay can follow."""
        return replace(self, augmentation=None, dropout=False)

    def factors(self, examples: int) -> list[float]:
        """The schedule's factor on the learning rate in each step."""
        steps = len(self.order(examples))
        return [self.schedule(step, steps) for step in range(steps)]

    def passes(self, examples: int) -> int:
        """How often the steps see the data, each pass at weights that have moved; a part of one counts as one."""
        per_pass = -(-examples // (self.batch_size or examples))
        return self.epochs or -(-(self.steps or 1) // per_pass)

    def order(self, examples: int, generator: torch.Generator | None = None) -> list[Tensor | slice | None]:
        """The rows of each step: in order, or, with a generator, shuffled anew in each epoch."""
        size = self.batch_size or examples
        whole = size >= examples
        per_epoch = 1 if whole else -(-examples // size)
        total = self.steps if self.steps is not None else (self.epochs or 1) * (per_epoch if self.epochs else 1)
        plan: list[Tensor | slice | None] = []
        while len(plan) < total:
            if whole:
                plan.append(None)
                continue
            if generator is None:  # slices: a replay's step holds no index tensor that would have to be moved
                plan.extend(slice(start, start + size) for start in range(0, examples, size))
            else:
                plan.extend(torch.randperm(examples, generator=generator).split(size))
        return plan[:total]

    def run(
        self,
        task: Task,
        weights: Params,
        batch: Batch,
        defence: Defence | None = None,
        client: ClientState | None = None,
        order: Order | None = None,
    ) -> tuple[Upload, ClientState]:
        """Train from `weights` on `batch`; return what is uploaded and the client's next state.

        `order` is the private shuffle. It never enters Knowledge: an attacker that replays does so in its own order.
        """
        defence, client = defence or Defence(), client or ClientState()
        examples = tree.length(batch)
        plan = self.order(examples) if order is None else order
        state = self.optimiser.init(weights) if client.optimiser is None else client.optimiser
        buffers = task.buffers() if client.buffers is None else client.buffers
        source = None if client.key is None else Draws(client.key)
        moved: Params = {}
        passes = 0
        view = Client(task, weights, moved, batch, state, client.extras, client.memory, source)

        for step, rows in enumerate(plan):
            part = part_of(batch, rows)
            if self.augmentation is not None:
                # A child: a defence that draws from the client's source must not meet the same numbers.
                part = self.augmentation(part, _required(source, "augmentation").child(1 << 16), step)

            if missing := task.drawn - part.keys():
                part = _completed(task, part, missing, source, client.extras, step)

            def compute(at: Params, on: Batch, *, statistics: bool = True) -> Params:
                # Every forward pass of a real client updates the running statistics, if it may, and draws new masks.
                nonlocal buffers, passes
                passes += 1
                with self._masks(source, passes):
                    gradient, after = task.gradient_and_buffers(at, on, buffers)
                buffers = after if statistics else buffers
                return gradient

            # A source for each step: a hook that draws must not meet the numbers of the step before.
            step_source = None if source is None else source.child((1 << 17) + step)
            gradient = defence.gradient(
                compute, weights, part, replace(view, optimiser=state, batch=part, draws=step_source)
            )
            decrease, state = self.optimiser.step(weights, gradient, state, self.lr * self.schedule(step, len(plan)))
            moved = decrease if step == 0 else tree.add(moved, decrease)
            if step + 1 < len(plan):  # a replayed single step never needs the new weights: one pass per lane saved
                weights = tree.subtract(weights, decrease)

        plain = Upload({"update": moved}, examples, buffers or None)
        view = replace(view, moved=moved, optimiser=state)
        sent = defence.upload(plain, view)
        memory = defence.remember(plain, sent, view)
        return sent, replace(client, optimiser=state, memory=memory, buffers=buffers)

    def _masks(self, source: Draws | None, number: int) -> AbstractContextManager[Any]:
        """The context in which the client's `number`-th forward pass runs."""
        return Dropping(_required(source, "dropout").child((1 << 18) + number)) if self.dropout else nullcontext()


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientRound:
    """One round of one client: where it starts, and how its update travels.

    weights   the model that the server sends: a snapshot, such as `task.weights()` returns; None: the task's own
    key       names the observation; with `seed` it fixes the client's random numbers
    wire      "update": the update travels as computed. "weights": the client returns weights in their own precision, so
              the update loses the digits that float32 weights cannot hold (about 1e-7 of the weight, at any rate)
    memory    what the client kept from earlier rounds (`Defence.remember`)
    server    what the server's hooks look at
    """

    weights: Params | None = None
    key: str = "target"
    seed: int = 0
    wire: str = "update"
    memory: Tree | None = None
    server: Tree | None = None

    def __post_init__(self) -> None:
        if self.wire not in ("update", "weights"):
            raise ValueError(f"wire must be 'update' or 'weights'; given {self.wire!r}.")


@takes(ClientRound)
def observe(
    task: Task, batch: Batch, training: LocalTraining, defence: Defence | None = None, *, client_round: ClientRound
) -> Observation:
    """Run one client and keep what the server sees of it: `observe(task, batch, training, key="image 3", seed=1)`.

    The other keywords are the fields of `ClientRound`. Fields that the client draws (`Task.drawn`) may be missing: then
    only the client knows them. To keep them for the score, draw them first (`Task.completed`) and pass the whole batch.
    """
    fitting(task, batch)
    defence = defence or Defence()
    weights = task.weights() if client_round.weights is None else client_round.weights
    examples = tree.length(batch)
    extras = defence.broadcast(weights, client_round.server or {})
    # The client's randomness has a name of its own, so that no attacker's lane can draw the same numbers.
    key = randomness.key(randomness.CLIENT, client_round.key, client_round.seed)
    device = tree.like(weights).device
    # The client works on copies. Otherwise what a model, a hook or an augmentation stores, or changes in place, would
    # reach the task that attackers get, the server's message, or the truth that reconstructions are scored by.
    client = ClientState(memory=client_round.memory or {}, extras=tree.detach(extras), key=key.to(device))
    shuffle, copies = torch.Generator().manual_seed(int(key[0])), (tree.detach(weights), tree.detach(batch))
    with float32_products(), PlainForms():
        upload, _ = training.run(task.copied(), *copies, defence, client, order=training.order(examples, shuffle))
    update = tree.detach(defence.reveal([upload], [upload.num_examples]))
    if client_round.wire == "weights":
        update = tree.map(lambda w, u: w - (w - u), weights, update)
    return Observation(
        weights=weights,
        update=update,
        num_examples=examples,
        key=client_round.key,
        buffers=task.buffers() or None,
        returned_buffers=tree.detach(upload.buffers) if upload.buffers else None,
        extras=extras,
    )


def fitting(task: Task, batch: Batch) -> None:
    """The client's batch must have the task's fields, shapes and classes: torch's own errors do not say which."""
    if batch.keys() - task.fields.keys() or task.fields.keys() - batch.keys() - task.drawn:
        raise TaskError(
            f"The batch has fields {', '.join(sorted(batch))}; the task has {', '.join(sorted(task.fields))}."
        )
    counts = {name: value.shape[0] if value.dim() else 0 for name, value in batch.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise TaskError(f"Every field needs the same number of examples, at least one; given {counts}.")
    for name, field_ in task.fields.items():
        if name not in batch:  # the client draws it
            continue
        value = batch[name]
        soft = field_.classes is not None and field_.kind.soft and value.is_floating_point()
        wanted = (*field_.shape, field_.classes) if soft else field_.shape
        if tuple(value.shape[1:]) != wanted:
            raise TaskError(f"Field {name!r} has examples of shape {tuple(value.shape[1:])}; the task has {wanted}.")
        if problem := field_.kind.allowed(value, field_):
            raise TaskError(f"Field {name!r} does not fit the task: {problem}.")


def _completed(
    task: Task, part: Batch, missing: frozenset[str], source: Draws | None, extras: dict[str, Params], step: int
) -> Batch:
    """The batch of a step with the fields that a client draws: from its own key, or from the server's shared one."""
    if SHARED in extras:
        source = Draws(extras[SHARED]["key"])
    elif source is None:
        raise ValueError(
            f"The batch lacks {' and '.join(sorted(missing))}, which a client draws from its own key: pass "
            "ClientState(key=...). An attacker has no such key: it guesses these fields, or is given them in "
            "Knowledge(given={...})."
        )
    return task.completed(part, drawing(source, step))


def drawing(source: Draws, step: int) -> Draws:
    """The source of the fields that a client draws in a step; augmentations, hooks and masks have other sources."""
    return source.child((1 << 19) + step)


def part_of(batch: Batch, rows: Tensor | slice | None) -> Batch:
    """The rows of a batch that one step uses; None: all of them."""
    if rows is None:
        return batch
    return {name: value[rows if isinstance(rows, slice) else rows.to(value.device)] for name, value in batch.items()}


def _required(source: Draws | None, what: str) -> Draws:
    if source is None:
        raise ValueError(f"{what} draws random numbers: pass ClientState(key=...), which names the client's stream.")
    return source
