"""DataLoaders and Datasets of other people: tuples or dicts, brought to the names of a task's fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gradleak.data.fetch import DataError

ALIASES = {
    "x": ("pixel_values", "image", "images", "img", "input_ids", "input_values", "input_features", "inputs", "input")
    + ("features", "data"),
    "y": ("labels", "label", "targets", "target"),
}
"""What others call the first input and the target, most telling first."""

CHUNK = 256  # examples of a Dataset that are read at once


def fields_of(item: Any, names: Sequence[str] = (), own: Mapping[str, str] | None = None) -> dict[str, Any]:
    """An item of a data set, or a batch of a loader, by the names of a task's fields.

    names   the task's fields. A tuple is taken in their order (default: x, y); several inputs may be a tuple of their
            own, ((x1, x2), y). In a dict they stay what they are; of the other keys the first input
            becomes "x" and the target "y" (`ALIASES`), and the rest keep their names.
    own     the client's own names for fields of the task (`Task.own_names`); they come before the aliases
    """
    if isinstance(item, Mapping):
        renamed = {name: field for name, field in (own or {}).items() if name in item and field not in item}
        entries = {renamed.get(name, str(name)): value for name, value in item.items()}
        for field, aliases in ALIASES.items():
            alias = next((alias for alias in aliases if alias in entries and alias not in names), None)
            if alias is not None and field not in entries:
                entries = {field if name == alias else name: value for name, value in entries.items()}
        return entries
    parts = list(item) if isinstance(item, (tuple, list)) else [item]
    if len(parts) == 2 and isinstance(parts[0], (tuple, list)):
        parts = [*parts[0], parts[1]]
    names = names or ("x", "y")[: len(parts)]
    if list(names) == ["x"]:
        return {"x": parts[0]}
    if len(parts) != len(names):
        raise DataError(
            f"An item of the data has {len(parts)} parts; wanted are {len(names)}: {', '.join(names)}. Give dicts with "
            "these names, or tuples in this order."
        )
    return dict(zip(names, parts, strict=True))


def from_loader(
    loader: Iterable[Any] | Dataset[Any],
    *,
    limit: int | None = None,
    names: Sequence[str] = (),
    own: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """All examples of a DataLoader or a Dataset of tuples or dicts, as tensors by field: "x", "y", others by name.

    limit   the most examples
    names, own   the fields of the task, and the client's names for them (`fields_of`); entries of a dict that are
                 neither tensors nor fields are left out
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}. Give at least 1, or None for all.")
    batches: Any = loader
    if isinstance(loader, Dataset) and not isinstance(loader, torch.utils.data.IterableDataset):
        batches = DataLoader(loader, batch_size=CHUNK)
    parts: list[dict[str, Tensor]] = []
    count = 0
    for batch in batches:
        parts.append(_tensors(fields_of(batch, names, own), names, type(loader).__name__))
        count += len(next(iter(parts[-1].values())))
        if limit is not None and count >= limit:
            break
    if not parts:
        raise DataError(f"{type(loader).__name__} gives no batches. Give one with at least one example.")
    return {name: _joined(name, [part[name] for part in parts if name in part])[:limit] for name in parts[0]}


def _tensors(batch: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, Tensor]:
    """The fields of a batch that are tensors or arrays."""
    entries = {name: torch.as_tensor(value) for name, value in batch.items() if hasattr(value, "__array__")}
    lacking = [name for name in (names or ("x",)) if name not in entries and name in batch]
    if lacking or "x" not in entries:
        name = lacking[0] if lacking else "x"
        entry = f"is a {type(batch[name]).__name__}" if name in batch else f"is not among {', '.join(batch) or 'them'}"
        raise DataError(f"{source}: the field {name!r} {entry}. Give tensors, as a model takes them.")
    if len({len(value) if value.ndim else 0 for value in entries.values()}) != 1:
        shapes = {name: tuple(value.shape) for name, value in entries.items()}
        raise DataError(f"{source}: fields differ in how many examples they have: {shapes}.")
    return entries


def _joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        some = ", ".join(str(shape) for shape in sorted(shapes)[:4])
        raise DataError(f"Batches of {name!r} differ in shape ({some}). Resize, cut or pad examples to one length.")
    return torch.cat(list(parts))
