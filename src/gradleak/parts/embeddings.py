"""Ids read off an update: the rows of an embedding that it changes are those of the client's ids.

    dL/dE_v = sum over the places with id v of dL/d(embedded place)

A row is zero where its id does not appear. Of more rows than places the longest are taken, which is what noise leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradleak.core import random as randomness
from gradleak.core.random import Draws
from gradleak.parts.predictions import gradient
from gradleak.parts.view import TargetView
from gradleak.scenario.kinds import Codes
from gradleak.scenario.task import Batch, Task

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
COLUMNS = 32  # examples of a probe: so many random ids tell columns apart
LEAST = 1e-6  # of the longest row: a shorter one counts as zero


def embeddings_of(task: Task, name: str) -> dict[str, tuple[int, ...]]:
    """Every embedding that sees ids of this field, with the places of an example that it sees.

    Found by running the model once on ids that tell the places apart, and remembered: every part of an attack asks. A
    shared one sees all places; in a table each column may have its own.
    """
    key = "embeddings", name
    if key not in task.remembered:
        task.remembered[key] = _embeddings_of(task, name)
    return dict(task.remembered[key])


def _embeddings_of(task: Task, name: str) -> dict[str, tuple[int, ...]]:
    layers = [layer for layer, module in task.model.named_modules() if isinstance(module, EMBEDDINGS)]
    if not layers:
        return {}
    ids = _distinct(task, name)
    batch = {**task.blank(len(ids)), name: ids}
    seen: dict[str, tuple[int, ...]] = {}
    for layer, value in task.inputs_of(layers, task.weights(), batch).items():
        if value.shape == ids.shape and torch.equal(value, ids):
            return {layer: tuple(range(ids.shape[1]))}
        column = value.reshape(len(value), -1)
        if len(column) == len(ids) and column.shape[1] == 1:
            places = [place for place in range(ids.shape[1]) if torch.equal(column[:, 0], ids[:, place])]
            seen |= {layer: tuple(places)} if places else {}
    return seen


def _distinct(task: Task, name: str) -> Tensor:
    """Ids (examples, places) of which no two columns are equal."""
    field = task.fields[name]
    kind, like = field.kind, task.blank(1)[name]
    if not isinstance(kind, Codes):
        ids = torch.arange(2 * field.shape[0], device=like.device).reshape(2, -1)
        return ids % (field.classes or 1)
    widths = torch.tensor([column.width for column in kind.columns] or [field.classes] * field.shape[0])
    draws = Draws(randomness.key("embeddings")).uniform((COLUMNS, len(widths)), dtype=torch.float64)
    return (draws * widths).long().to(like.device)


def tied(task: Task, layer: str) -> bool:
    """Is the embedding used as another layer too, so that every row of its gradient changes?"""
    weight = task.model.get_submodule(layer).weight
    return sum(p is weight for module in task.model.modules() for p in module.parameters(recurse=False)) > 1


def unread(task: Task, name: str) -> str:
    """Why the ids of a field cannot be read off an update; empty if they can."""
    layers = embeddings_of(task, name)
    if {place for places in layers.values() for place in places} != set(range(task.fields[name].shape[0])):
        return f"no embedding sees the ids of {name}"
    for layer in layers:
        if not task.model.get_submodule(layer).weight.requires_grad:
            return f"the embedding {layer!r} is frozen, so no update holds its rows"
        if tied(task, layer):
            return f"the embedding {layer!r} is also the output layer, so every row changes"
    return ""


def bag_of(scene: TargetView, name: str) -> tuple[Tensor, float]:
    """Ids (examples, places) by length of their rows, and the share of the gradient in rows that are not among them.

    Which example, and of a shared embedding which place, has which id is not read: places are filled in turn, and what
    is left over is -1. One example of columns with embeddings of their own is read as it is.
    """
    field, count = scene.task.fields[name], scene.num_examples
    ids = torch.full((count, field.shape[0]), -1, dtype=torch.long)
    observed, left, total = gradient(scene), 0.0, 0.0
    for layer, places in embeddings_of(scene.task, name).items():
        energy = observed[f"{layer}.weight"].detach().double().cpu().square().sum(1)
        module = scene.task.model.get_submodule(layer)
        if isinstance(module, EMBEDDINGS) and module.padding_idx is not None:
            energy[module.padding_idx] = 0
        rows = energy.argsort(descending=True, stable=True)[: count * len(places)]
        rows = rows[energy[rows] > LEAST**2 * energy.max()]
        filled = torch.full((count * len(places),), -1, dtype=torch.long)
        filled[: len(rows)] = rows
        ids[:, list(places)] = filled.reshape(count, len(places))
        left, total = left + float(energy.sum() - energy[rows].sum()), total + float(energy.sum())
    return ids, max(left, 0.0) / total if total else 0.0


def readable(task: Task) -> frozenset[str]:
    """The private fields of ids beside x that an update shows."""
    names = (name for name, f in task.fields.items() if name != "x" and not f.public and f.kind.embedded)
    return frozenset(name for name in names if not unread(task, name))


def read(scene: TargetView) -> Batch:
    """The ids of those fields, for a search that needs some: a blank id where nothing was read."""
    blank = scene.task.blank(scene.num_examples)
    bags = {name: bag_of(scene, name)[0].to(blank[name]) for name in readable(scene.task) - scene.fields.keys()}
    return {name: torch.where(ids < 0, blank[name], ids) for name, ids in bags.items()}
