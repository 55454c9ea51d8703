"""The result of one attack for a person: a few lines, a sheet of pictures, and the tensors. Needs no truth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from gradleak.attack import Reconstruction
from gradleak.core.pictures import drawable, png, sheet
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
    """The categorical fields of a target as indices: the labels that the attack read off or optimised. No texts."""
    batch = result.target(target)
    categorical = [
        name
        for name, field in result.fields.items()
        if field.classes is not None and name in batch and not isinstance(field.kind, Tokens)
    ]
    return {name: _indices(batch[name]).reshape(-1).tolist() for name in categorical}


def counted_texts(result: Reconstruction, target: int) -> dict[str, str]:
    """Of each field of texts, how many tokens were named: a terminal keeps what is printed, so they are not."""
    batch = result.target(target)
    texts = {name: batch[name] for name, field in result.fields.items() if isinstance(field.kind, Tokens)}
    return {
        name: f"{int((ids >= 0).sum())} tokens, {len(ids[ids >= 0].unique())} of them different, in {len(ids)} "
        f"{result.fields[name].kind.noun[len(ids) != 1]}"
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
        lines += [f"    {name}: {text}" for name, text in counted_texts(result, target).items()]
        stopped = int(result.diverged[target].sum())
        if stopped:
            lines.append(f"    {stopped} of {restarts} restarts diverged")
        if result.certificates is not None:
            lines.append(f"    {result.certificates[target]}")
    lines.append(str(result.checks))
    lines.append(UNCERTAIN if result.certificates is None else LOCAL)
    return "\n".join(lines)


def write(result: Reconstruction, folder: str | os.PathLike[str]) -> list[Path]:
    """`reconstruction.safetensors` (the chosen batch of every target) and what can be looked at.

    An image becomes a sheet as PNG; of texts whose words are known, `reconstruction.txt` has a line for each.
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
    if field is not None and "x" in result.batch and isinstance(field.kind, Tokens) and field.kind.words:
        words = field.kind.words
        lines = [
            f"{key}\t{_line(ids.tolist(), words)}"
            for row, key in enumerate(result.keys)
            for ids in result.target(row)["x"]
        ]
        written.append(home / "reconstruction.txt")
        written[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return written


def _line(ids: list[int], words: tuple[str, ...]) -> str:
    """A text in one line; a place without a token is an underscore."""
    found = "".join(words[each] if 0 <= each < len(words) else "_" for each in ids)
    return found.replace("\n", " ")
