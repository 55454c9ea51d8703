"""Flower's records as dicts of tensors and back, and the identity of a sender."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from gradleak.adapters import own_names, tied
from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.scenario.defence import Upload
from gradleak.scenario.task import Task

EXTRAS = "gradleak.extras."  # array records of a message: what the server broadcasts beside the model
MEMORY = "gradleak.memory"  # array record of a client's state: what a defence keeps between rounds
EXAMPLES = "num-examples"
ROUND = "server-round"


class FlowerError(ValueError):
    """A message, strategy or defence that cannot be used as requested."""


def model_record(content: RecordDict, key: str = "arrays") -> tuple[str, ArrayRecord]:
    """Name and record of the model in a message: the record called `key`, else the only one that is not gradleak's."""
    records = {name: record for name, record in content.array_records.items() if not name.startswith("gradleak.")}
    if key in records:
        return key, records[key]
    if len(records) != 1:
        names = ", ".join(sorted(records)) or "none"
        raise FlowerError(f"A message should hold the model as its array record {key!r}; it has: {names}.")
    return next(iter(records.items()))


def params_of(record: ArrayRecord) -> Params:
    """The arrays as tensors."""
    return dict(record.to_torch_state_dict())


def record_of(params: Params) -> ArrayRecord:
    """Parameters as Flower sends them; the inverse of `params_of`."""
    return ArrayRecord({name: value.detach().cpu() for name, value in params.items()})


def extras_of(content: RecordDict) -> dict[str, Params]:
    """What the server broadcast beside the model (`Defended`)."""
    return {what: params_of(record) for what, record in extra_records(content).items()}


def extra_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """The array records that the server broadcast beside the model, without their prefix."""
    records = content.array_records.items()
    return {name[len(EXTRAS) :]: record for name, record in records if name.startswith(EXTRAS)}


def answered(
    record: ArrayRecord, sent: Params, weights: Params, upload: Upload, buffers: Params, task: Task | None
) -> ArrayRecord:
    """The client's answer: the weights minus the update, in the names, order and dtypes in which they came.

    Buffers that the defence withholds go back as they were sent: strategies need the whole model.
    """
    if upload.payload.keys() != {"update"}:
        others = ", ".join(sorted(upload.payload.keys() - {"update"})) or "no update"
        raise FlowerError(
            f"The defence sends {others}; a Flower strategy averages weights, and nothing else can be sent through it."
        )
    after = tree.subtract(weights, upload.payload["update"])
    return replaced(record, sent, {**buffers, **(upload.buffers or {}), **after}, task)


def replaced(record: ArrayRecord, state: Params, new: Params, task: Task | None) -> ArrayRecord:
    """The model `state` of a record with new tensors by the task's names, in the record's names, order and dtypes."""
    names = {name: name for name in state} if task is None else own_names(state, task)
    after: Params = {names[name]: value for name, value in state.items()} | new
    if task is not None:
        after |= {name: after[first] for name, first in tied(task).items() if first in after}
    return ArrayRecord({name: after[names[name]].detach().cpu().to(state[name].dtype) for name in record})


def round_of(message: Message) -> int:
    """Flower's number of the round, from 1; 1 if the message does not say."""
    for config in message.content.config_records.values():
        if ROUND in config:
            return int(config[ROUND])  # type: ignore[arg-type]
    return 1


def examples_of(content: RecordDict, key: str = EXAMPLES) -> int:
    """The number of examples that a client reports."""
    for metrics in content.metric_records.values():
        if key in metrics:
            value: Any = metrics[key]
            if isinstance(value, (int, float)) and math.isfinite(value) and value == int(value) and value >= 1:
                return int(value)
            raise FlowerError(f"{key} should be a whole number of at least 1; it is {value!r}.")
    raise FlowerError(f"The reply has no metric {key!r}: put it into its MetricRecord, as FedAvg needs it too.")


def owners(name: str, flags: int) -> int:
    """An opener of files that only their owner can read, in any folder."""
    return os.open(name, flags, 0o600)


def placed(params: Params, like: torch.Tensor) -> Params:
    """These tensors on the device of a model and, if they are floating point, in its dtype."""
    return tree.to(params, like.device, like.dtype)


def identify(run: int) -> None:
    """Give this process an identity unless Flower has: outside a run it refuses to make messages."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, 1
