"""Settings chosen on clients of the attacker's own: public images, the same weights, recipe and defence.

The attacker makes proxy clients, knows their images since they are its own, and takes for each member the settings that
come nearest to them. Nothing of the target is used beyond what the server sent and how many examples there were.
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
from gradleak.core import assignment
from gradleak.core.listeners import Share
from gradleak.scenario.client import observe
from gradleak.scenario.observation import MissingKnowledge, Observation
from gradleak.scenario.task import Batch, Field


def tuned(
    case: Case, member: Member, preset: str, count: int, steps: int | None, seed: int, progress: Share | None
) -> dict[str, Any]:
    """Of all combinations of what the member may try, the one with the smallest error on the proxies."""
    grid = [dict(zip(member.tried, values, strict=True)) for values in product(*member.tried.values())]
    seen, truth = proxies(case, count, seed)
    knows = replace(case.knows, given=_given(case, truth))
    found: list[tuple[float, dict[str, Any]]] = []
    for settings in grid:
        attack = member.make(member.settings(preset, steps, **settings))
        require(attack, knows)
        result = attack.run(case.task, seen, knows, seed, engine=case.engine, progress=progress)
        found.append((error(result, truth, case.task.fields["x"]), settings))
    return min(found, key=lambda each: each[0])[1]


def proxies(case: Case, count: int, seed: int) -> tuple[list[Observation], list[Batch]]:
    """Clients like those of the first target, on public examples, and what each of them holds."""
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
    like = next(iter(last.weights.values()))
    batches: list[Batch] = []
    for own in rows:
        batch: Batch = {"x": x[own].to(like)}
        if "y" in case.task.fields:
            batch["y"] = y[own].to(like.device)
        batches.append(batch)
    seen = [
        replace(
            observe(case.task, batch, training, case.knows.defence, weights=last.weights, key=f"proxy{number}"),
            round=last.round,
        )
        for number, batch in enumerate(batches)
    ]
    return seen, batches


def error(found: Reconstruction, truth: list[Batch], field: Field) -> float:
    """Mean squared error in [0, 1] pixels after one-to-one matching, over all proxies; a missing image counts as 1."""
    total = 0.0
    for target, batch in enumerate(truth):
        real, guess = (field.unit(v.double().cpu()).flatten(1) for v in (batch["x"], found.target(target)["x"]))
        if not bool(guess.isfinite().all()):
            total += 1.0
            continue
        cost = assignment.cost_matrix(real, guess.clamp(0, 1))
        total += float(cost[torch.arange(len(real)), assignment.match(cost)].mean())
    return total / len(truth)


def _given(case: Case, truth: list[Batch]) -> Batch:
    """What the threat model grants of a target is granted of a proxy too."""
    return {name: torch.stack([batch[name] for batch in truth]) for name in case.knows.given if name in truth[0]}


def _public(case: Case) -> tuple[Tensor, Tensor]:
    """Examples in model-input space, and labels: {"x", "y"} or (x, y) there already, or images with .x in [0, 1]."""
    held: Any = case.knows.public
    if isinstance(held, dict):
        x, y = held.get("x"), held.get("y")
    elif isinstance(held, tuple | list) and len(held) == 2:
        x, y = held
    else:
        x, y = getattr(held, "x", None), getattr(held, "y", None)
        x = case.task.fields["x"].model(x) if isinstance(x, Tensor) else None
    if not isinstance(x, Tensor) or tuple(x.shape[1:]) != case.task.fields["x"].shape:
        raise MissingKnowledge(
            "Tuning needs public examples of the task's shape in Knowledge(public=...): {'x': ..., 'y': ...} or (x, y) "
            f"in model-input space, or images with .x in [0, 1]; given {type(held).__name__}."
        )
    if y is None:
        if "y" in case.task.fields:
            raise MissingKnowledge(
                "Public examples of a classifier need labels: Knowledge(public={'x': ..., 'y': ...})."
            )
        y = torch.zeros(len(x), dtype=torch.long)
    return x, y
