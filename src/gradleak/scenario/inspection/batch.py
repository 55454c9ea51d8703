"""Checks of the auditor's own batch against the declared fields."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradleak.scenario.inspection.subject import Subject, declared, is_simplex, some
from gradleak.scenario.task import Field, Problem

SLACK = 1e-3  # of the width of the bounds: rounding of the client's own normalisation


def batch_has_the_fields(subject: Subject) -> Iterator[Problem]:
    """The batch must name the fields of the task, all with as many examples."""
    if subject.data is None:
        return
    names, declared_names = subject.data.keys(), subject.task.fields.keys()
    if names - declared_names or declared_names - names - subject.task.drawn:
        yield Problem(
            "error",
            f"the batch has fields {some(names) or 'none'}; the task declares {some(declared_names)}",
            "name the batch's tensors as the task's fields",
        )
    sizes = {name: value.shape[0] for name, value in subject.data.items() if value.dim()}
    if len(set(sizes.values())) > 1:
        yield Problem(
            "error", f"the fields have different numbers of examples: {sizes}", "examples come first in every field"
        )


def continuous_values(subject: Subject) -> Iterator[Problem]:
    """Values must be finite, of the declared shape, and inside their bounds."""
    for name, value, kind in declared(subject):
        if kind.classes is not None:
            continue
        yield from _form(name, value, kind, subject)
        if not value.is_floating_point():
            continue
        if not value.isfinite().all():
            yield Problem("error", f"batch[{name!r}] holds NaN or infinity", "remove these examples")
        elif tuple(value.shape[1:]) == kind.shape and value.numel():
            if reason := kind.kind.allowed(value, kind):
                yield Problem("error", f"batch[{name!r}]: {reason}", "encode it as the task's columns say")
            if kind.bounded:
                yield from _range(name, value, kind)


def labels(subject: Subject) -> Iterator[Problem]:
    """Labels must be class indices within range, or probabilities."""
    for name, value, kind in declared(subject):
        if kind.classes is None:
            continue
        shape = tuple(value.shape[1:])
        if value.is_floating_point():
            if shape != (*kind.shape, kind.classes) or not is_simplex(value):
                yield Problem(
                    "error",
                    f"batch[{name!r}], {value.dtype} of shape {tuple(value.shape)}, is neither class indices nor "
                    "probabilities",
                    f"give indices as int64, or rows of {kind.classes} probabilities that sum to 1",
                )
            continue
        if value.dtype != torch.int64:
            yield Problem(
                "error", f"batch[{name!r}] is {value.dtype}; class indices are int64", f"batch[{name!r}].long()"
            )
        if shape != kind.shape:
            yield Problem(
                "error",
                f"batch[{name!r}] has shape {tuple(value.shape)}; the task declares (examples, *{kind.shape})",
                "squeeze an extra axis, or declare the shape in the Field",
            )
        elif reason := kind.kind.allowed(value, kind):
            yield Problem(
                "error",
                f"batch[{name!r}]: {reason}",
                "count labels from 0, or declare more classes (and as many outputs of the model)",
            )


def _form(name: str, value: Tensor, kind: Field, subject: Subject) -> Iterator[Problem]:
    """Type, device and shape of a continuous field."""
    like = subject.blank[name]
    if not value.is_floating_point():
        bytes_ = value.dtype == torch.uint8
        yield Problem(
            "error",
            f"batch[{name!r}] is {value.dtype}, not floating point" + (" (raw image bytes)" if bytes_ else ""),
            "x.float() / 255, then the client's mean and std"
            if bytes_
            else "convert it as the client's input pipeline does",
        )
    elif value.dtype != like.dtype:
        yield Problem(
            "error", f"batch[{name!r}] is {value.dtype}, the model {like.dtype}", f"batch[{name!r}].to({like.dtype})"
        )
    if value.device != like.device:
        yield Problem(
            "error", f"batch[{name!r}] is on {value.device}, the model on {like.device}", "move one to the other"
        )
    if tuple(value.shape[1:]) != kind.shape:
        last = len(kind.shape) == 3 and tuple(value.shape[1:]) == (*kind.shape[1:], kind.shape[0])
        yield Problem(
            "error",
            f"batch[{name!r}] has shape {tuple(value.shape)}; the task declares (examples, *{kind.shape})",
            "channels come first: x.permute(0, 3, 1, 2)"
            if last
            else "resize the data, or declare its shape with like=(x, y)",
        )


def _range(name: str, value: Tensor, kind: Field) -> Iterator[Problem]:
    """Do the values lie in the declared box, and do they use it?"""
    unit = kind.unit(value.double())
    low, high = float(unit.min()), float(unit.max())
    plain = set(kind.mean) == {0.0} and set(kind.std) == {1.0}
    extent = f"batch[{name!r}] runs from {float(value.min()):.4g} to {float(value.max()):.4g}"
    if low < -SLACK or high > 1 + SLACK:
        share = float(((unit < -SLACK) | (unit > 1 + SLACK)).double().mean())
        what = f"{extent}; {share:.0%} of it lies outside the declared bounds {kind.bounds}"
        what += f" (mean {kind.mean}, std {kind.std})" if not plain else ""
        if plain and kind.bounds == (0.0, 1.0) and value.min() >= 0 and value.max() > 2:
            what, fix = f"{what}: it looks like 0-255 data", "divide by 255, or pass bounds=(0, 255)"
        elif plain and value.min() < 0:
            what, fix = (
                f"{what}: it looks normalised",
                "pass the mean= and std= of the client's input pipeline to the task",
            )
        else:
            fix = "correct bounds, mean and std: boxed attacks cannot leave the bounds, and metrics scale by them"
        yield Problem("error", what, fix)
    elif high - low < 0.02:
        yield Problem(
            "warning",
            f"{extent}, less than 2% of the declared bounds {kind.bounds}: metrics would call any grey image a success",
            "correct bounds, mean and std (0-1 data with bounds=(0, 255)?)",
        )
