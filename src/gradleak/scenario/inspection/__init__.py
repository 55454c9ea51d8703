"""`Task.check` finds in a second what would make an attack fail or mislead.

Each check is a small function that yields problems. All of them look at a `Subject`: a private copy of the model, one
recorded pass of the objective over a blank batch, and one real attempt at what every gradient-matching attack needs
(two lanes of a second derivative under vmap). The user's model, its mode and the global random state are not touched.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from gradleak.scenario.derivatives import double_backward_safe
from gradleak.scenario.inspection import batch as data
from gradleak.scenario.inspection import model, objective
from gradleak.scenario.inspection.subject import Check, Subject, device_of, examples_in, first_line
from gradleak.scenario.task import Batch, Problem, Task

_ORDER = {"error": 0, "warning": 1, "note": 2}

CHECKS: tuple[Check, ...] = (
    model.parameters_exist,
    model.parameters_are_finite,
    model.parameters_are_floats,
    objective.model_accepts_the_shapes,
    objective.objective_is_scalar,
    objective.other_precisions,
    objective.outputs_and_classes,
    model.dropout_is_off,
    objective.second_derivative,
    objective.own_functions,
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


@dataclass(frozen=True)
class Examination:
    """What was found, errors first.

    batched   lanes can be solved together; else attacks take one after the other
    seconds   one evaluation of a gradient-matching objective took, for one lane and two examples; None: not timed
    """

    problems: tuple[Problem, ...]
    batched: bool = True
    seconds: float | None = None

    @property
    def errors(self) -> tuple[Problem, ...]:
        """What makes attacks fail."""
        return tuple(problem for problem in self.problems if problem.severity == "error")


def data_problems(task: Task, batch: Batch) -> list[Problem]:
    """What is wrong with the values of a batch of the auditor's own; no model runs."""
    subject = Subject(task, batch)
    return [problem for check in (data.continuous_values, data.labels) for problem in check(subject)]


def inspect(task: Task, batch: Batch | None = None, fewest: int | None = None) -> Examination:
    """Every problem at once, errors first.

    batch    the auditor's own data, checked against the declared fields
    fewest   examples of the smallest batch that the model must take; None: those of `batch`
    """
    try:
        copied = replace(task, model=copy.deepcopy(task.model))
    except Exception as problem:  # whatever a user's own __deepcopy__ raises
        return Examination(
            (
                Problem(
                    "error",
                    f"the model cannot be copied ({first_line(problem)}), and attacks work on a copy",
                    "make copy.deepcopy(model) work: no tensors with a history as attributes, no open files",
                ),
            )
        )
    device = device_of(copied)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), double_backward_safe():
        subject = Subject(copied, batch, fewest or examples_in(batch or {}))
        problems = [problem for check in CHECKS for problem in check(subject)]
    problems.sort(key=lambda problem: _ORDER[problem.severity])
    return Examination(tuple(problems), subject.batched, subject.seconds)
