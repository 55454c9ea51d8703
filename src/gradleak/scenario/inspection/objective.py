"""Checks of the objective: shapes, precision, labels, and the second derivative under vmap."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradleak.scenario.inspection.subject import Failed, Pass, Subject, continuous, device_of, hard_targets, some
from gradleak.scenario.task import Problem


def model_accepts_the_shapes(subject: Subject) -> Iterator[Problem]:
    """The objective must run on a blank batch of the declared shapes."""
    if isinstance(subject.forward, Failed):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in subject.blank.items())
        yield Problem(
            "error",
            f"the objective fails on a blank batch ({shapes}): {subject.forward.why}",
            "check the shapes of the fields (channels first, no batch axis) and the number of classes",
        )


def objective_is_scalar(subject: Subject) -> Iterator[Problem]:
    """Gradients are of one number per batch."""
    if not isinstance(subject.forward, Pass) or subject.scalar:
        return
    value = subject.forward.value
    if not isinstance(value, Tensor):
        what, fix = f"returns {type(value).__name__}", "return the loss as a tensor"
    elif value.dim() > 0:
        what, fix = f"returns shape {tuple(value.shape)}", 'return a scalar: reduction="mean", or .mean()'
    elif not value.is_floating_point():
        what, fix = f"returns {value.dtype}", "return a floating-point loss"
    elif not any(p.requires_grad for p in subject.task.model.parameters()):
        return  # another check says so
    else:
        what, fix = (
            "does not depend on the weights",
            "remove torch.no_grad(), .detach() and .item() from model and loss",
        )
    yield Problem("error", f"the objective {what}, so it has no gradient to upload", fix)


def other_precisions(subject: Subject) -> Iterator[Problem]:
    """Attacks run in float32 or float64, on a copy of the model; a tensor inside the loss is not part of the model."""
    for dtype in (torch.float32, torch.float64):
        attempt = Subject(subject.task.to(device_of(subject.task), dtype)).forward
        if isinstance(attempt, Failed) and isinstance(subject.forward, Pass):
            yield Problem(
                "warning",
                f"the objective fails where attacks convert the model to {dtype}: {attempt.why}",
                "convert the loss's own tensors in each call, such as cross_entropy(out, y, weight=w.to(out))",
            )


def outputs_and_classes(subject: Subject) -> Iterator[Problem]:
    """The model must have an output for every declared class."""
    task = subject.task
    labels = [("y", task.fields["y"].classes)] if task.class_index else []
    outputs = subject.forward.outputs[-1] if isinstance(subject.forward, Pass) and subject.forward.outputs else None
    if len(labels) != 1 or not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    name, classes = labels[0]
    if classes is None or classes in (outputs.shape[1], outputs.shape[-1]):
        return
    yield Problem(
        "error" if outputs.shape[-1] < classes else "warning",
        f"the model has {outputs.shape[-1]} outputs, but field {name!r} declares {classes} classes",
        f"pass classes={outputs.shape[-1]}, or give the model a last layer of {classes} outputs",
    )


def soft_labels(subject: Subject) -> Iterator[Problem]:
    """Attacks that search for labels need a loss that takes probabilities."""
    if subject.scalar and (why := hard_targets(subject.task)):
        yield Problem(
            "note",
            f"{why}, so attacks that optimise the label with the example (dlg) cannot run",
            "use attacks that read the label off the update (idlg, ig), or a loss that takes probabilities "
            "(cross_entropy)",
        )


def second_derivative(subject: Subject) -> Iterator[Problem]:
    """Really take it, two lanes at once."""
    if not subject.scalar or not continuous(subject.task):
        return
    lanes = subject.lanes
    if isinstance(lanes, Tensor):
        if not lanes.isfinite().all():
            yield Problem(
                "warning",
                "the second derivative is not finite at a blank example: lanes that start there freeze at once",
                "look for sqrt, norm, log or division at zero in model and loss; add a small constant inside them",
            )
    elif isinstance(subject.one_by_one, Failed):
        yield Problem(
            "error",
            f"the gradient cannot be differentiated again: {subject.one_by_one.why}",
            "replace the operation that has no double backward (a custom autograd.Function, a fused kernel)",
        )
    else:
        yield Problem(
            "warning",
            f"vmap rejects the second derivative: {lanes.why}. Audits attack lane after lane, which is slower",
            "to keep the speed, remove .item(), branches on values, random layers and in-place writes into tensors "
            "made inside forward; in Python pass Engine(batched=False)",
        )


def own_functions(subject: Subject) -> Iterator[Problem]:
    """A wrong second derivative raises nothing: it makes attacks weak, and that looks like safety."""
    differentiable = isinstance(subject.lanes, Tensor) or isinstance(subject.one_by_one, Tensor)
    if not subject.scalar or not continuous(subject.task) or not subject.own_functions or not differentiable:
        return
    if not subject.true_slope():
        yield Problem(
            "error",
            f"the gradient cannot be differentiated again: the second derivative through {some(subject.own_functions)} "
            "(autograd.Function) is not the slope of the first",
            "write its backward with torch operations that autograd can follow: no once_differentiable, no .data, no "
            "numpy; or replace it by plain torch operations",
        )
