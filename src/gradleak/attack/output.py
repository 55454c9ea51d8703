"""The result of one attack for a person: a few lines, a sheet of pictures, and the tensors. Needs no truth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from gradleak.attack import Reconstruction
from gradleak.core.pictures import drawable, png, sheet

SHOWN = 16  # examples of one target on the sheet
UNCERTAIN = (
    "Without the private data nobody can tell how close this is: a low match says that these examples explain the "
    "update, not that they are the only ones that do."
)
LOCAL = (
    "Determined means that no other examples near these explain the update; others far away are not excluded, and "
    "labels are taken as they stand."
)


def inferred(found: Reconstruction, target: int) -> dict[str, list[int]]:
    """The categorical fields of a target as indices: the labels that the attack read off or optimised."""
    batch = found.target(target)
    categorical = [name for name, field in found.fields.items() if field.classes is not None and name in batch]
    return {name: _indices(batch[name]).reshape(-1).tolist() for name in categorical}


def _indices(values: Tensor) -> Tensor:
    return values.argmax(-1) if values.is_floating_point() else values


def describe(found: Reconstruction) -> str:
    """For each target the labels, objective and match of the chosen restart; then the checks of the attack."""
    lines: list[str] = []
    for target, key in enumerate(found.keys):
        restart = int(found.chosen[target])
        numbers = f"objective {found.objective[target, restart]:.4g}, match {found.match[target, restart]:.4g}"
        of = f" (restart {restart + 1} of {found.match.shape[1]}, chosen by match)" if found.match.shape[1] > 1 else ""
        lines.append(f"{key}: {numbers}{of}")
        lines += [f"    {name}: {', '.join(map(str, values))}" for name, values in inferred(found, target).items()]
        stopped = int(found.diverged[target].sum())
        if stopped:
            lines.append(f"    {stopped} of {found.diverged.shape[1]} restarts diverged")
        if found.certificates is not None:
            lines.append(f"    {found.certificates[target]}")
    lines.append(str(found.checks))
    lines.append(UNCERTAIN if found.certificates is None else LOCAL)
    return "\n".join(lines)


def write(found: Reconstruction, folder: str | os.PathLike[str]) -> list[Path]:
    """`reconstruction.safetensors` (the chosen batch of every target) and, where `x` is an image, a sheet as PNG."""
    from safetensors.torch import save_file

    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {
        "keys": found.keys,
        "examples": found.examples,
        "seconds": found.seconds,
        **found.settings,
    }
    tensors = {**found.batch, "objective": found.objective, "match": found.match, "chosen": found.chosen}
    place = home / "reconstruction.safetensors"
    metadata = {"format": "gradleak.reconstruction", "version": "1", "reconstruction": json.dumps(header, default=str)}
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, place, metadata)
    written = [place]
    if "x" in found.batch and drawable(found.fields["x"].shape):
        unit = found.fields["x"].unit
        rows = [(key, list(unit(found.target(row)["x"][:SHOWN]))) for row, key in enumerate(found.keys)]
        written.append(home / "reconstruction.png")
        written[-1].write_bytes(png(sheet(rows)))
    return written
