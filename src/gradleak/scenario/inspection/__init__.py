"""`Task.check` finds in a second what would make an attack fail or mislead.

Each check is a small function that yields problems. All of them look at a `Subject`: a private copy of the model, one
recorded pass of the objective over a blank batch, and one real attempt at what every gradient-matching attack needs
(two lanes of a second derivative under vmap). The user's model, its mode and the global random state are not touched.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from gradleak.scenario.derivatives import double_backward_safe
from gradleak.scenario.inspection import batch as data
from gradleak.scenario.inspection import model, objective
from gradleak.scenario.inspection.subject import Check, Subject, device_of, first_line
from gradleak.scenario.task import Batch, Problem, Task

_ORDER = {"error": 0, "warning": 1, "note": 2}

CHECKS: tuple[Check, ...] = (
    model.parameters_exist,
    model.parameters_are_finite,
    model.parameters_are_floats,
    objective.model_accepts_the_shapes,
    objective.objective_is_scalar,
    objective.other_precisions,
    objective.fields_are_images,
    objective.outputs_and_classes,
    model.dropout_is_off,
    objective.second_derivative,
    model.batch_norm_mode,
    objective.soft_labels,
    model.exact_formulas,
    model.recurrent_layers,
    model.fused_attention,
    model.in_place_operations,
    model.kinks,
    data.batch_has_the_fields,
    data.continuous_values,
    data.labels,
)


def inspect(task: Task, batch: Batch | None = None) -> list[Problem]:
    """Every problem at once, errors first. `batch` (the auditor's own data) is checked against the declared fields."""
    try:
        copied = replace(task, model=copy.deepcopy(task.model))
    except Exception as problem:  # whatever a user's own __deepcopy__ raises
        return [
            Problem(
                "error",
                f"the model cannot be copied ({first_line(problem)}), and attacks work on a copy",
                "make copy.deepcopy(model) work: no tensors with a history as attributes, no open files",
            )
        ]
    device = device_of(copied)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), double_backward_safe():
        subject = Subject(copied, batch)
        problems = [problem for check in CHECKS for problem in check(subject)]
    return sorted(problems, key=lambda problem: _ORDER[problem.severity])
