"""Pictures along an attack's search and of its other restarts, if a run kept them: optional arrays of a cell.

snapshots/step   (targets, S) int64, ascending: the steps before which pictures were kept (`auto`: those of the winner)
snapshots/x      (S, targets, examples, C, h, w) uint8: iterates of the chosen restart at those steps
restarts/x       (targets, restarts, examples, C, h, w) uint8: the result of each restart
restarts/match   (targets, restarts): its match, by which one of them was chosen

Pictures are small (64 pixels a side), in 0 to 255, with examples in the order of `found/x`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradleak.core import pictures
from gradleak.core.files import BadRun, Row


@dataclass(frozen=True)
class Strip:
    """Several pictures side by side in one image; `words` has a caption for each."""

    uri: str
    words: tuple[str, ...]


def snapshots(arrays: Mapping[str, Tensor], row: Row, example: int) -> Strip | None:
    """The search for one example; words are the steps. None without steps: a picture that never changes."""
    if "snapshots/x" not in arrays:
        return None
    images, moments = arrays["snapshots/x"], arrays.get("snapshots/step")
    number = images.shape[0]
    _demand(moments is not None and moments.shape == (row["targets"], number), row, "snapshots/step")
    _demand(_fits(images, row, (number, row["targets"], row["examples"])), row, "snapshots/x")
    steps: list[int] = moments[row["target"]].tolist()  # type: ignore[index]
    ahead = [place for place, step in enumerate(steps) if not place or step > steps[place - 1]]
    if len(ahead) < 2:
        return None
    search = images[ahead, row["target"], row["assignment"][example]]
    return Strip(pictures.strip(search), tuple(str(steps[place]) for place in ahead))


def restarts(arrays: Mapping[str, Tensor], row: Row, example: int) -> Strip | None:
    """Every restart of one example; words are their matches. None if there was one."""
    images, match = arrays.get("restarts/x"), arrays.get("restarts/match")
    if images is None or images.dim() < 2 or images.shape[1] < 2:
        return None
    number = images.shape[1]
    _demand(match is not None and match.shape == (row["targets"], number), row, "restarts/match")
    _demand(_fits(images, row, (row["targets"], number, row["examples"])), row, "restarts/x")
    _demand(0 <= int(row["restart"]) < number, row, "restarts/x")
    ends = images[row["target"], :, row["assignment"][example]]
    levels = match[row["target"]].tolist()  # type: ignore[index]
    return Strip(pictures.strip(ends), tuple(f"{level:.2g}" for level in levels))


def _fits(images: Tensor, row: Row, lead: tuple[int, ...]) -> bool:
    return images.dim() == 6 and tuple(images.shape[:3]) == lead and pictures.drawable(images.shape[3:])


def _demand(holds: bool, row: Row, name: str) -> None:
    if not holds:
        raise BadRun(f"The arrays of cell {row['cell']} do not fit its rows: {name} has an odd shape.")
