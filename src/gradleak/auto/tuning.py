"""Settings chosen on the attacker's own clients: public images, the same weights, recipe and defence.

The attacker makes proxy clients from images that it owns, and takes for each member the settings whose results come
nearest to these images. Of the target it uses only what the server sent and the number of examples.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gradleak.attack import Reconstruction, require
from gradleak.auto.members import Member
from gradleak.auto.traits import Case
from gradleak.core import assignment, tree
from gradleak.core.listeners import Share
from gradleak.scenario.client import observe
from gradleak.scenario.observation import MissingKnowledge, Observation
from gradleak.scenario.task import Batch, Field


def tuned(
    case: Case, member: Member, preset: str, count: int, steps: int | None, seed: int, progress: Share | None
) -> dict[str, Any]:
    """The combination of the member's `tried` settings with the smallest error on the proxies."""
    grid = [dict(zip(member.tried, values, strict=True)) for values in product(*member.tried.values())]
    observations, truth = proxies(case, count, seed)
    knows = replace(case.knows, given=_given(case, truth))
    errors: list[tuple[float, dict[str, Any]]] = []
    for settings in grid:
        attack = member.make(member.settings(preset, steps, **settings))
        require(attack, knows)
        result = attack.run(case.task, observations, knows, seed, engine=case.engine, progress=progress)
        errors.append((error(result, truth, case.task.fields["x"]), settings))
    return min(errors, key=lambda each: each[0])[1]


def proxies(case: Case, count: int, seed: int) -> tuple[list[Observation], list[Batch]]:
    """Observations of clients like the first target's, on public examples; and the examples of each."""
    x, y = _public(case)
    size, last = case.targets[0].num_examples, case.targets[0].last
    if len(x) < count * size:
        raise MissingKnowledge(
            f"Tuning on {count} proxy clients of {size} examples needs {count * size} public ones; there are {len(x)}. "
            "Give more in Knowledge(public=...), or fewer proxies."
        )
    training = case.knows.training
    if training is None:
        raise MissingKnowledge("Proxy clients are trained as the real ones: tuning needs Knowledge(training=...).")
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: count * size].reshape(count, size)
    like = tree.like(last.weights)
    batches: list[Batch] = []
    for row in rows:
        batch: Batch = {"x": x[row].to(like)}
        if "y" in case.task.fields:
            batch["y"] = y[row].to(like.device)
        batches.append(batch)
    observations = [
        replace(
            observe(case.task, batch, training, case.knows.defence, weights=last.weights, key=f"proxy{number}"),
            round=last.round,
        )
        for number, batch in enumerate(batches)
    ]
    return observations, batches


def error(result: Reconstruction, truth: list[Batch], field: Field) -> float:
    """Mean squared error after one-to-one matching, over all proxies, in units of the field's extent.

    A missing example counts as 1.
    """
    total = 0.0
    for target, batch in enumerate(truth):
        real, guess = (v.double().cpu() for v in (batch["x"], result.target(target)["x"]))
        if not bool(guess.isfinite().all()):
            total += 1.0
            continue
        guess = guess.clamp(*field.limits(guess))  # where there are no bounds, nothing is cut off
        cost = assignment.cost_matrix(*(field.relative(value).flatten(1) for value in (real, guess)))
        total += float(cost[torch.arange(len(real)), assignment.match(cost)].mean())
    return total / len(truth)


def _given(case: Case, truth: list[Batch]) -> Batch:
    """What the threat model grants for a target is granted for a proxy too."""
    return {name: torch.stack([batch[name] for batch in truth]) for name in case.knows.given if name in truth[0]}


def _public(case: Case) -> tuple[Tensor, Tensor]:
    """Examples in model-input space, and labels: from {"x", "y"} or (x, y) as they are, or images with .x in [0, 1]."""
    public: Any = case.knows.public
    if isinstance(public, dict):
        x, y = public.get("x"), public.get("y")
    elif isinstance(public, tuple | list) and len(public) == 2:
        x, y = public
    else:
        x, y = getattr(public, "x", None), getattr(public, "y", None)
        x = case.task.fields["x"].model(x) if isinstance(x, Tensor) else None
    if not isinstance(x, Tensor) or tuple(x.shape[1:]) != case.task.fields["x"].shape:
        raise MissingKnowledge(
            "Tuning needs public examples of the task's shape in Knowledge(public=...): {'x': ..., 'y': ...} or (x, y) "
            f"in model-input space, or images with .x in [0, 1]; given {type(public).__name__}."
        )
    if y is None:
        if "y" in case.task.fields:
            raise MissingKnowledge(
                "Public examples of a classifier need labels: Knowledge(public={'x': ..., 'y': ...})."
            )
        y = torch.zeros(len(x), dtype=torch.long)
    return x, y
