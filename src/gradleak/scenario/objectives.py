"""Objectives of ordinary training: call the model with its inputs, pick the prediction, meet the target, take the loss.

Batches hold canonical fields ("x", "y", further inputs by name); an objective knows by which argument each one enters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.scenario.fields import TaskError

PREDICTIONS = ("logits", "out")  # Hugging Face; segmentation models of torchvision
IGNORED = -100  # torch's own ignore_index

Meet = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(prediction, target) -> what the loss is called with."""


@dataclass(frozen=True)
class Input:
    """A field that enters the model: by position (`argument` None), or as a keyword; `boolean`: as True and False."""

    field: str
    argument: str | None = None
    boolean: bool = False

    def value(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch[self.field].bool() if self.boolean else batch[self.field]


@dataclass(frozen=True, eq=False)
class ModelLoss:
    """A loss of the model's output. A loss with tensors of its own (class weights) travels with the task.

    label   the client's own name for the target, if its batches are dicts
    """

    loss: Any
    inputs: tuple[Input, ...] = (Input("x"),)
    label: str | None = None

    def output(self, call: Callable[..., Any], batch: Mapping[str, Tensor]) -> Any:
        """What the model returns for a batch."""
        ordered = [each.value(batch) for each in self.inputs if each.argument is None]
        named = {each.argument: each.value(batch) for each in self.inputs if each.argument is not None}
        return call(*ordered, **named)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> ModelLoss:
        """The same with the loss's own tensors on a device and in a type."""
        return replace(self, loss=_moved(self.loss, device, dtype))

    @property
    def own_names(self) -> dict[str, str]:
        """The client's own names for fields, where its batches are dicts: {"input_ids": "x", "labels": "y"}."""
        names = {each.argument: each.field for each in self.inputs} | {self.label: "y"}
        return {name: field for name, field in names.items() if name is not None}

    def as_batch(self, batch: Any, fields: Sequence[str]) -> dict[str, Tensor]:
        """A batch of the client's own form by field names; what is no field, such as labels that repeat x, is left."""
        values = dict(batch) if isinstance(batch, Mapping) else self._named(batch)
        own = {field: name for name, field in self.own_names.items()}
        named = {field: own.get(field) if own.get(field) in values else field for field in fields}
        if missing := [name for name in named.values() if name not in values]:
            raise TaskError(f"The batch lacks {', '.join(map(str, missing))}; it has {', '.join(map(str, values))}.")
        return {field: values[name] for field, name in named.items()}

    def _named(self, batch: Any) -> dict[str | None, Tensor]:
        inputs, target = pair_of(batch)
        if not isinstance(inputs, Mapping):
            inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
            inputs = {each.field: value for each, value in zip(self.inputs, inputs, strict=True)}
        return {**inputs, **({} if target is None else {"y": target})}


@dataclass(frozen=True, eq=False)
class Supervised(ModelLoss):
    """The objective loss(model(x), y).

    The prediction is the model's output, the first tensor of a tuple, or the logits of a dict (`prediction_of`).

    target   the field that the prediction is compared with: y, or x itself where a language model predicts it
    meet     how prediction and target are brought together; None: as they are
    """

    target: str = "y"
    meet: Meet | None = None

    def __call__(self, call: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
        prediction, target = prediction_of(self.output(call, batch)), batch[self.target]
        if self.meet is not None:
            prediction, target = self.meet(prediction, target)
        return self.loss(prediction, target)


@dataclass(frozen=True, eq=False)
class BatchLoss(ModelLoss):
    """The objective loss(model's output, batch) with the client's own names; without a loss, the model's own.

    names   every field and the client's own name for it
    """

    names: tuple[tuple[str, str], ...] = ()

    def __call__(self, call: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
        output = self.output(call, batch)
        if self.loss is None:
            return own_loss_of(output)
        return self.loss(output, {name: batch[field] for field, name in self.names if field in batch})

    @property
    def own_names(self) -> dict[str, str]:
        return {name: field for field, name in self.names}


# --- what a model returns ---------------------------------------------------------------------------------------------


def prediction_of(output: Any) -> Tensor:
    """The tensor that the loss looks at.

    A tensor is itself. Of a tuple it is the first tensor, of a dict or a Hugging Face output "logits", "out", or the
    one tensor in it.
    """
    if isinstance(output, Tensor):
        return output
    named = output if isinstance(output, Mapping) else {}
    for name in PREDICTIONS:
        if isinstance(named.get(name), Tensor):
            return named[name]
    values = list(named.values()) if named else list(output) if isinstance(output, tuple | list) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or (named and len(tensors) > 1):
        what = f"a dict of {', '.join(map(str, named))}" if named else type(output).__name__
        raise TaskError(
            f"The model returns {what}: which of it the loss looks at is not clear. Return a tensor or a dict with "
            "'logits', or use Task.from_batch(model, loss, batch), whose loss(output, batch) sees the whole output."
        )
    return tensors[0]


def own_loss_of(output: Any) -> Tensor:
    """The loss that a model computed itself: output["loss"], output.loss, or a scalar."""
    loss = output.get("loss") if isinstance(output, Mapping) else output if isinstance(output, Tensor) else None
    if loss is None:
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise TaskError(
            f"Without a loss the model must return one itself, as output['loss']; it returns {type(output).__name__} "
            "without it. Give the batch its labels, or pass loss(output, batch)."
        )
    return loss


# --- how prediction and target meet -----------------------------------------------------------------------------------


def as_numbers(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers beside numbers: the prediction in the target's shape, the target in the prediction's type.

    A prediction (B, 1) beside a target (B,) would be broadcast to (B, B) by torch, every example beside every other;
    shapes that differ by axes of length 1 are made equal instead.
    """
    return prediction.reshape(target.shape), target.to(prediction.dtype)


@dataclass(frozen=True)
class ClassesMeet:
    """Class scores beside class indices, or beside probabilities with the classes last, as a search has them.

    torch takes the classes in axis 1 of both. `last`: the model has them in its last axis, as language models do.
    """

    last: bool = False

    def __call__(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        prediction = prediction.movedim(-1, 1) if self.last else prediction
        return prediction, target.movedim(-1, 1) if target.is_floating_point() else target


@dataclass(frozen=True)
class NextToken:
    """The scores at each place beside the token at the next one.

    padding    the id of places that do not count; they become `ignored`, which the loss leaves out
    classes_first   the loss takes (B, vocabulary, length), as torch's do; otherwise (B, length, vocabulary)
    """

    padding: int | None = None
    ignored: int = IGNORED
    classes_first: bool = True

    def __call__(self, prediction: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        following = ids[:, 1:]
        if self.padding is not None:
            following = following.masked_fill(following == self.padding, self.ignored)
        scores = prediction[:, :-1]
        return scores.movedim(-1, 1) if self.classes_first else scores, following


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Inputs and target of a batch (inputs, target), (inputs,) or inputs."""
    if isinstance(batch, Tensor):
        return batch, None
    if len(batch) not in (1, 2):
        raise TaskError(
            f"A batch is (inputs, target); given {len(batch)} entries. Several inputs are a tuple or dict of their "
            "own: ((x1, x2), y)."
        )
    return batch[0], batch[1] if len(batch) == 2 else None


def _moved(loss: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).to(device=device, dtype=dtype)
    if isinstance(loss, Tensor):
        return loss.to(device, dtype if loss.is_floating_point() else None)
    if isinstance(loss, partial):
        named = {name: _moved(value, device, dtype) for name, value in loss.keywords.items()}
        return partial(
            _moved(loss.func, device, dtype), *(_moved(value, device, dtype) for value in loss.args), **named
        )
    return loss
