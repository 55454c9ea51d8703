"""The client's side of Flower: the full client rule (`train`), or a mod that defends the upload of any training."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from logging import ERROR
from pathlib import Path
from typing import Any, NoReturn

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.supercore import log

from gradleak.adapters import sorted_state
from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.federation.clients import evaluating, examples_in, flat, unflat
from gradleak.federation.rounds import Snapshot, measured
from gradleak.flower.records import (
    EXAMPLES,
    MEMORY,
    FlowerError,
    answered,
    examples_of,
    extras_of,
    model_record,
    owners,
    params_of,
    placed,
    record_of,
    round_of,
)
from gradleak.scenario.client import ClientState, LocalTraining, fitting
from gradleak.scenario.defence import Client, Defence, Upload, overrides
from gradleak.scenario.derivatives import PlainForms
from gradleak.scenario.guarantee import Exposure
from gradleak.scenario.task import Batch, Task, TaskError, float32_products

LOSS = "train_loss"


def train(
    message: Message,
    context: Context,
    task: Task,
    data: Mapping[str, torch.Tensor],
    training: LocalTraining,
    defence: Defence | None = None,
    *,
    seed: int | None = None,
) -> Message:
    """Answer a train message by the client rule: the same as a simulated client, and as attackers replay it.

    data      the examples of this round, in model-input space, by field or in the client's own names (`Task.as_batch`)
    defence   with all of its client-side hooks; its memory is in `context.state`. A defence that also acts on the
              server needs `Defended` there
    seed      None: noise and shuffles come from secret numbers. A number: they are those of `Federation(seed=...)` for
              client partition-id, so that a simulation repeats them; not for real clients

    The reply holds the trained weights under the record name of the message, num-examples, and train_loss (of the model
    as it was sent, in evaluation mode). The loss carries no noise: if the defence proves an epsilon for the upload
    (local model), it is not sent, unless `seed` makes this a simulation.
    """
    name, record = model_record(message.content)
    sent = params_of(record)
    like = tree.like(task.weights())
    weights, buffers = (placed(part, like) for part in sorted_state(sent, task))
    try:
        batch = placed(task.as_batch(data), like)
        fitting(task, batch)
    except TaskError as problem:  # its text names labels, and errors travel to the server
        log(ERROR, "%s", problem)
        raise FlowerError(
            "The examples do not have the task's fields, shapes or classes: see this node's log."
        ) from None
    count, number = examples_in(batch), round_of(message) - 1
    key, shuffle = _randomness(seed, context, number, like)
    state = ClientState(
        memory=_recalled(context, like),
        buffers={**task.buffers(), **buffers},
        extras={what: placed(part, like) for what, part in extras_of(message.content).items()},
        key=key,
    )
    loss, _ = measured(evaluating(task), Snapshot(weights, {**task.buffers(), **buffers}), batch, Draws(key))
    with torch.no_grad(), float32_products(), PlainForms():
        upload, after = training.run(task, weights, batch, defence, state, order=training.order(count, shuffle))
    _keep(context, after.memory)
    arrays = answered(record, sent, weights, upload, buffers, task)
    proved = seed is None and defence is not None and _proved(defence, count, training)
    reported = {} if proved else {LOSS: float(loss) / count}
    metrics = MetricRecord({EXAMPLES: upload.num_examples, **reported})
    return Message(RecordDict({name: arrays, "metrics": metrics}), reply_to=message)


def _proved(defence: Defence, examples: int, training: LocalTraining) -> bool:
    """Whether the defence claims an epsilon for what the client itself sends."""
    label = defence.guarantee(Exposure(examples=examples, training=training))
    return label.epsilon is not None and label.model != "central"


def keep_truth(
    folder: str | os.PathLike[str], message: Message, context: Context, batch: Mapping[str, torch.Tensor]
) -> Path:
    """Write this client's examples of this round for the auditor, under the name that `Tap` gives the observation.

    `batch`: by field, or in the client's own names, such as input_ids; the audit gives them the names of the fields.
    For clients whose data are the auditor's own (canaries). Never call it in anybody else's client.
    """
    from safetensors.torch import save

    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = home / f"round{round_of(message):04d}-node{context.node_id}.safetensors"
    content = save({name: value.detach().cpu().contiguous().clone() for name, value in batch.items()})
    with open(path, "wb", opener=owners) as file:
        file.write(content)
    return path


# --- an upload-level defence as a mod ---------------------------------------------------------------------------------


class UploadDefence:
    """A client mod that runs the `upload` hook of a defence on the result of any training: clipping, noise, pruning.

        @app.train(mods=[UploadDefence(Pruning(keep=0.1), task)])

    task      of the model: says which tensors are trained; with it the defence is tried out at once
    seed      as in `train`

    A defence that changes the gradients of local steps, or looks at the examples, cannot act from outside the training
    and is refused: use `flower.train`. A defence that also acts on the server needs `Defended` there.
    """

    def __init__(self, defence: Defence, task: Task | None = None, *, seed: int | None = None) -> None:
        name = defence.name
        if overrides(defence, "gradient") and not _idle_gradient(defence):
            raise FlowerError(
                f"{name} changes the gradients of local steps, which a mod never sees. Let the client train with it: "
                f"flower.train(message, context, task, data, training, defence={defence!r})."
            )
        if not overrides(defence, "upload"):
            raise FlowerError(
                f"{name} does nothing to an upload. A defence of the server goes around the strategy: "
                "flower.Defended(strategy, task, defence); others into flower.train(...)."
            )
        if any(overrides(defence, hook) for hook in ("initial", "broadcast", "aggregate", "advance", "idle")):
            warnings.warn(
                f"{name} also acts on the server: wrap the strategy there, flower.Defended(strategy, task, defence). "
                "This mod does the client's part alone.",
                stacklevel=2,
            )
        self.defence, self.task, self.seed = defence, task, seed
        if task is not None:
            self._try(task)

    def _try(self, task: Task) -> None:
        """Defend one upload of noise, so that errors of the defence come before the first round."""
        source = Draws(randomness.key("flower", "trial"))
        weights = task.weights()
        update = tree.scale(
            {n: source.normal(tuple(w.shape), stream=i).to(w) for i, (n, w) in enumerate(weights.items())}, 1e-2
        )
        self._sent(weights, Upload({"update": update}, 1, task.buffers() or None), {}, {}, source)

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        name, record = model_record(message.content)
        before = params_of(record)
        extras = extras_of(message.content)
        number = round_of(message) - 1
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        back, returned = model_record(reply.content, name)
        weights, buffers = sorted_state(before, self.task)
        new_weights, new_buffers = sorted_state(params_of(returned), self.task)
        like = tree.like(weights)
        update = tree.subtract(weights, new_weights)
        plain = Upload({"update": update}, examples_of(reply.content), new_buffers or None)
        key, _ = _randomness(self.seed, context, number, like)
        sent, memory = self._sent(weights, plain, extras, _recalled(context, like), Draws(key))
        _keep(context, memory)
        reply.content[back] = answered(record, before, weights, sent, buffers, self.task)
        return reply

    def _sent(
        self, weights: Params, plain: Upload, extras: dict[str, Params], memory: Tree, source: Draws
    ) -> tuple[Upload, Tree]:
        advice = f"{self.defence.name} looks at {{}}, which a mod never sees: use flower.train(...), which runs it."
        view = Client(
            task=self.task or _Absent(f"{self.defence.name} looks at the model: give UploadDefence(defence, task)."),  # type: ignore[arg-type]
            start=weights,
            moved=plain.payload["update"],
            batch=_Absent(advice.format("the client's examples")),  # type: ignore[arg-type]
            optimiser=_Absent(advice.format("the client's optimiser")),  # type: ignore[arg-type]
            extras=extras,
            memory=memory,
            draws=source,
        )
        with torch.no_grad():
            sent = self.defence.upload(plain, view)
            return sent, self.defence.remember(plain, sent, view)


class _Absent:
    """Stands for what a mod does not have; any use raises an error that says what to do instead."""

    def __init__(self, advice: str) -> None:
        self.__dict__["advice"] = advice

    def _refuse(self, *_: Any) -> NoReturn:
        raise FlowerError(self.__dict__["advice"])

    __getitem__ = __iter__ = __len__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


def _idle_gradient(defence: Defence) -> bool:
    """Whether the hook returns the gradient unchanged, as some defences do (clipping of updates)."""
    weights, batch, gradient = {"": torch.zeros(1)}, {"": torch.zeros(1, 1)}, {"": torch.zeros(1)}
    calls: list[bool] = []

    def compute(at: Params, on: Batch, *, statistics: bool = True) -> Params:
        calls.append(at is weights and on is batch)
        return gradient

    absent: Any = _Absent("")
    try:
        result = defence.gradient(compute, weights, batch, Client(absent, weights, {}, batch, {}, {}, {}, None))
    except Exception:  # it used the model or drew noise, so it is not idle
        return False
    return result is gradient and calls == [True]


# --- what both share --------------------------------------------------------------------------------------------------


def _randomness(
    seed: int | None, context: Context, number: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Generator]:
    """The random key of this client in this round, and the source of its shuffles: secret, or those of a simulation."""
    if seed is None:
        words = [secrets.randbits(32), secrets.randbits(32)]
        return torch.tensor(words).to(like.device), torch.Generator().manual_seed(secrets.randbits(63))
    client = context.node_config.get("partition-id", context.node_id)
    order = randomness.key("federation", seed, "order", client, number)
    key = randomness.key("federation", seed, client, number).to(like.device)
    return key, torch.Generator().manual_seed(int(order[0]))


def _recalled(context: Context, like: torch.Tensor) -> Tree:
    record = context.state.array_records.get(MEMORY)
    return {} if record is None else unflat(placed(params_of(record), like))


def _keep(context: Context, memory: Tree) -> None:
    tensors = {name: torch.as_tensor(value) for name, value in flat(memory).items()}
    if tensors:
        context.state[MEMORY] = record_of(tensors)
    elif MEMORY in context.state:
        del context.state[MEMORY]
