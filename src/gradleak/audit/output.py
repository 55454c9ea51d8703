"""The result of one attack for a person: a few lines, a sheet of pictures or the texts, and the tensors.

Needs no truth. Texts go into files alone, never into what is printed: printed lines end in logs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from gradleak.attack import Reconstruction
from gradleak.core.pictures import drawable, png, sheet
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import Tokens

SHOWN = 16  # examples of one target on the sheet
UNCERTAIN = (
    "Without the private data nobody can tell how close this is: a low match says that these examples explain the "
    "update, not that they are the only ones that do."
)
LOCAL = (
    "Determined means that no other examples near these explain the update; others far away are not excluded, and "
    "labels are taken as they stand."
)


def inferred(result: Reconstruction, target: int) -> dict[str, list[int]]:
    """The classes of a target as indices: the labels that the attack read off or optimised. No texts, no codes."""
    batch = result.target(target)
    categorical = [
        name
        for name, field in result.fields.items()
        if field.classes is not None and not (field.kind.embedded or field.public) and name in batch
    ]
    return {name: _indices(batch[name]).reshape(-1).tolist() for name in categorical}


def counted_texts(result: Reconstruction, target: int) -> dict[str, str]:
    """Of each field of texts, how many tokens were named: a terminal keeps what is printed, so they are not."""
    batch = result.target(target)
    texts = {
        name: _indices(batch[name])
        for name, field in result.fields.items()
        if isinstance(field.kind, Tokens) and name in batch
    }
    return {
        name: f"{int((ids >= 0).sum())} tokens named in {len(ids)} {result.fields[name].kind.noun[len(ids) != 1]}, "
        f"{len(ids[ids >= 0].unique())} of them different"
        for name, ids in texts.items()
    }


def _indices(values: Tensor) -> Tensor:
    return values.argmax(-1) if values.is_floating_point() else values


def describe(result: Reconstruction) -> str:
    """For each target the labels, objective and match of the chosen restart; then the checks of the attack."""
    lines: list[str] = []
    for target, key in enumerate(result.keys):
        restart = int(result.chosen[target])
        numbers = f"objective {result.objective[target, restart]:.4g}, match {result.match[target, restart]:.4g}"
        restarts = result.match.shape[1]
        of = f" (restart {restart + 1} of {restarts}, chosen by match)" if restarts > 1 else ""
        lines.append(f"{key}: {numbers}{of}")
        lines += [f"    {name}: {', '.join(map(str, values))}" for name, values in inferred(result, target).items()]
        lines += [f"    {text} ({name})" for name, text in counted_texts(result, target).items()]
        stopped = int(result.diverged[target].sum())
        if stopped:
            lines.append(f"    {stopped} of {restarts} restarts diverged")
        if result.certificates is not None:
            lines.append(f"    {result.certificates[target]}")
    lines.append(str(result.checks))
    lines.append(UNCERTAIN if result.certificates is None else LOCAL)
    return "\n".join(lines)


def write(result: Reconstruction, folder: str | os.PathLike[str]) -> list[Path]:
    """`reconstruction.safetensors` (the chosen batch of every target), and `x` as a PNG of pictures or as text.

    `reconstruction.txt` has the key of each target and, below it, one line for each example.
    """
    from safetensors.torch import save_file

    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {
        "keys": result.keys,
        "examples": result.examples,
        "seconds": result.seconds,
        **result.settings,
    }
    tensors = {**result.batch, "objective": result.objective, "match": result.match, "chosen": result.chosen}
    place = home / "reconstruction.safetensors"
    metadata = {"format": "gradleak.reconstruction", "version": "1", "reconstruction": json.dumps(header, default=str)}
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, place, metadata)
    written = [place]
    field = result.fields.get("x")
    if field is not None and "x" in result.batch and field.kind.pictures and drawable(field.shape):
        rows = [(key, list(field.unit(result.target(row)["x"][:SHOWN]))) for row, key in enumerate(result.keys)]
        written.append(home / "reconstruction.png")
        written[-1].write_bytes(png(sheet(rows)))
    if field is not None and "x" in result.batch and (lines := _texts(result, field)):
        written.append(home / "reconstruction.txt")
        written[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return written


def _texts(result: Reconstruction, field: Field) -> list[str]:
    """The key of each target and its examples as running text; nothing where examples are no texts."""
    texts = [[field.kind.text(example) for example in result.target(row)["x"]] for row in range(len(result.keys))]
    if not any(map(any, texts)):
        return []
    return [line for key, found in zip(result.keys, texts, strict=True) for line in (key, *(f"    {t}" for t in found))]
