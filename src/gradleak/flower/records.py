"""Between Flower's records and dicts of tensors, and who sends a message."""

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
    """A message, a strategy or a defence that does not fit what is asked of it."""


def model_record(content: RecordDict, key: str = "arrays") -> tuple[str, ArrayRecord]:
    """The model in a message, and under which name: the record called `key`, else the only one that is not ours."""
    held = {name: record for name, record in content.array_records.items() if not name.startswith("gradleak.")}
    if key in held:
        return key, held[key]
    if len(held) != 1:
        found = ", ".join(sorted(held)) or "none"
        raise FlowerError(f"A message should hold the model as its array record {key!r}; it has: {found}.")
    return next(iter(held.items()))


def params_of(record: ArrayRecord) -> Params:
    """The arrays as tensors."""
    return dict(record.to_torch_state_dict())


def record_of(params: Params) -> ArrayRecord:
    """Parameters as Flower sends them; the inverse of `params_of`."""
    return ArrayRecord({name: value.detach().cpu() for name, value in params.items()})


def extras_of(content: RecordDict) -> dict[str, Params]:
    """What the server broadcast beside the model (`Defended`)."""
    found = content.array_records.items()
    return {name[len(EXTRAS) :]: params_of(record) for name, record in found if name.startswith(EXTRAS)}


def answered(
    record: ArrayRecord, sent: Params, weights: Params, upload: Upload, buffers: Params, task: Task | None
) -> ArrayRecord:
    """The model that leaves: the weights less the update, in the names, order and types in which they came.

    Buffers that the defence withholds go back as they were sent: strategies want the whole model.
    """
    if upload.payload.keys() != {"update"}:
        others = ", ".join(sorted(upload.payload.keys() - {"update"})) or "no update"
        raise FlowerError(
            f"The defence sends {others}; a Flower strategy averages weights, and nothing else can be sent through it."
        )
    names = {name: name for name in sent} if task is None else own_names(sent, task)
    after: Params = {names[name]: value for name, value in sent.items()} | buffers | (upload.buffers or {})
    after |= tree.subtract(weights, upload.payload["update"])
    if task is not None:
        after |= {name: after[first] for name, first in tied(task).items()}
    return ArrayRecord({name: after[names[name]].detach().cpu().to(sent[name].dtype) for name in record})


def round_of(message: Message) -> int:
    """Flower's number of the round, from 1; 1 where the message does not say."""
    for config in message.content.config_records.values():
        if ROUND in config:
            return int(config[ROUND])  # type: ignore[arg-type]
    return 1


def examples_of(content: RecordDict, key: str = EXAMPLES) -> int:
    """How many examples a client says it trained on."""
    for metrics in content.metric_records.values():
        if key in metrics:
            value: Any = metrics[key]
            if isinstance(value, (int, float)) and math.isfinite(value) and value == int(value) and value >= 1:
                return int(value)
            raise FlowerError(f"{key} should be a whole number of at least 1; it is {value!r}.")
    raise FlowerError(f"The reply has no metric {key!r}: put it into its MetricRecord, as FedAvg needs it too.")


def owners(name: str, flags: int) -> int:
    """An opener of files that are for their owner alone, whatever folder they lie in."""
    return os.open(name, flags, 0o600)


def placed(params: Params, like: torch.Tensor) -> Params:
    """On the device of a model; numbers with fractions in its type."""
    return {
        name: value.to(like.device, like.dtype if value.is_floating_point() else None) for name, value in params.items()
    }


def identify(run: int) -> None:
    """Say who makes messages in this process, where Flower has not: outside a run it refuses to make any."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, 1
