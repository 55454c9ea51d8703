"""Does an observation fit a task: same names, same shapes, few enough examples?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradleak.scenario.dropout import drops
from gradleak.scenario.observation import MissingKnowledge, Observation
from gradleak.scenario.task import Task, TaskError

MOST_ENTRIES = 10**8  # unknowns of one target; 224 x 224 colour images reach it at 660 examples


def fits(task: Task, targets: Sequence[Observation]) -> None:
    """The observation must be of this model: same names, same shapes, and few enough examples to hold in memory."""
    dropout = [name for name, m in task.model.named_modules() if drops(m)]
    if dropout:
        raise TaskError(
            f"Dropout is active ({', '.join(dropout[:3])}): the client's masks are its own secret, and a replay with "
            "others matches nothing. Put the model, and so the attacker's replay, in evaluation mode: model.eval(). A "
            "client that trains with dropout is LocalTraining(dropout=True)."
        )
    entries = sum(math.prod(field.shape) for field in task.fields.values() if field.continuous and not field.public)
    buffers = {name: tuple(b.shape) for name, b in task.buffers().items()}
    expected = {name: tuple(p.shape) for name, p in task.model.named_parameters() if p.requires_grad}
    for target in targets:
        shapes = {name: tuple(value.shape) for name, value in target.weights.items()}
        if shapes != expected:
            odd = sorted(set(shapes.items()) ^ set(expected.items()))[:3]
            gap = ", ".join(f"{name} {shape}" for name, shape in odd)
            raise MissingKnowledge(
                f"Observation {target.key!r} is not of this model: they differ at {gap}. Build the task from the "
                "model the server sent, with the same number of classes."
            )
        for name, value in (*(target.buffers or {}).items(), *(target.returned_buffers or {}).items()):
            if buffers.get(name) != tuple(value.shape):
                raise MissingKnowledge(
                    f"Observation {target.key!r} has a buffer {name} of shape {tuple(value.shape)}; this model has "
                    f"{buffers.get(name, 'none of that name')}. Build the task from the model the server sent."
                )
        if target.num_examples * entries > MOST_ENTRIES:
            raise MissingKnowledge(
                f"Observation {target.key!r} says {target.num_examples} examples: {target.num_examples * entries:.1e} "
                f"unknowns are more than the {MOST_ENTRIES:.0e} that one attack takes on. Is the number right?"
            )
