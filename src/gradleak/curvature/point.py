"""A model at one point of its weights, in float64, for many lanes at once: clients, or starts of a search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.curvature.hessian import demand_fitting
from gradleak.engine import Engine, EngineError
from gradleak.scenario.task import Batch, Task


@dataclass(frozen=True, eq=False)
class Point:
    """Task, weights and examples on the engine's device. The model keeps its mode.

    shared        buffers that no forward pass changes: equal in all lanes
    statistics    buffers that a pass may change, such as running means: every lane has its own (`lanes`)
    """

    task: Task
    weights: Params
    batch: Batch
    shared: Params
    statistics: Params

    @staticmethod
    def at(task: Task, weights: Params, batch: Batch, buffers: Params | None, engine: Engine) -> Point:
        """`buffers` replace the task's own, by name."""
        demand_fitting(task, weights, batch)
        every = {**task.buffers(), **(buffers or {})}
        running = {name for name, _ in task.model.named_buffers()}
        parts = (
            weights,
            {name: batch[name] for name in task.fields},
            {name: value for name, value in every.items() if name not in running},
            {name: value for name, value in every.items() if name in running},
        )
        return Point(task.to(engine.where, torch.float64), *(tree.to(p, engine.where, torch.float64) for p in parts))

    @property
    def size(self) -> int:
        """Number of weights."""
        return tree.size(self.weights)

    def lanes(self, count: int) -> Params:
        """The statistics, repeated for this many lanes."""
        return {name: value.expand(count, *value.shape) for name, value in self.statistics.items()}


@contextmanager
def explained() -> Iterator[None]:
    """Turn what torch refuses under vmap into errors that say what to change."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        reason = str(problem).partition("\n")[0]
        raise EngineError(
            f"Out of memory: pass a smaller block, of clients at a time, or fewer starts. ({reason})"
        ) from problem
    except RuntimeError as problem:
        reason = str(problem).partition("\n")[0]
        if "random" in reason:
            raise EngineError(
                "The model draws random numbers in its forward pass (dropout?), which vmap rejects, and no two passes "
                f"would agree. Put those layers into evaluation mode: model.eval() before the task is made. ({reason})"
            ) from problem
        if any(word in reason for word in ("vmap", "atching rule", "functorch", "data-dependent")):
            raise EngineError(
                f"This model or defence cannot run under vmap, under which all clients and starts go at once: {reason}"
            ) from problem
        raise
