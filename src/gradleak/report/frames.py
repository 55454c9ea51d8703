"""Pictures along an attack's search and of its other restarts, where a run kept them: optional arrays of a cell.

snapshots/step   (targets, S) int64, ascending: the steps before which pictures were kept (`auto`: those of the winner)
snapshots/x      (S, targets, examples, C, h, w) uint8: iterates of the chosen restart at those steps
restarts/x       (targets, restarts, examples, C, h, w) uint8: what each restart ended with
restarts/match   (targets, restarts): its match, by which one of them was chosen

Pictures are small (64 pixels a side are enough), in 0 to 255 as a person sees them, and examples in the order of
`found/x`. A run without them has a report without pictures along the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gradleak.core import pictures
from gradleak.core.files import BadRun, Row


@dataclass(frozen=True)
class Strip:
    """Several pictures side by side in one image; `words` says what each of them is."""

    uri: str
    words: tuple[str, ...]


def snapshots(held: Mapping[str, Tensor], row: Row, example: int) -> Strip | None:
    """The search for one example; words are the steps. None where it made none: a picture that never changes."""
    if "snapshots/x" not in held:
        return None
    kept, moments = held["snapshots/x"], held.get("snapshots/step")
    number = kept.shape[0]
    _demand(moments is not None and moments.shape == (row["targets"], number), row, "snapshots/step")
    _demand(_fits(kept, row, (number, row["targets"], row["examples"])), row, "snapshots/x")
    steps: list[int] = moments[row["target"]].tolist()  # type: ignore[index]
    ahead = [place for place, step in enumerate(steps) if not place or step > steps[place - 1]]
    if len(ahead) < 2:
        return None
    own = kept[ahead, row["target"], row["assignment"][example]]
    return Strip(pictures.strip(own), tuple(str(steps[place]) for place in ahead))


def restarts(held: Mapping[str, Tensor], row: Row, example: int) -> Strip | None:
    """Every restart of one example; words are their matches. None where there was one."""
    kept, match = held.get("restarts/x"), held.get("restarts/match")
    if kept is None or kept.dim() < 2 or kept.shape[1] < 2:
        return None
    number = kept.shape[1]
    _demand(match is not None and match.shape == (row["targets"], number), row, "restarts/match")
    _demand(_fits(kept, row, (row["targets"], number, row["examples"])), row, "restarts/x")
    _demand(0 <= int(row["restart"]) < number, row, "restarts/x")
    own = kept[row["target"], :, row["assignment"][example]]
    levels = match[row["target"]].tolist()  # type: ignore[index]
    return Strip(pictures.strip(own), tuple(f"{level:.2g}" for level in levels))


def _fits(kept: Tensor, row: Row, lead: tuple[int, ...]) -> bool:
    return kept.dim() == 6 and tuple(kept.shape[:3]) == lead and pictures.drawable(kept.shape[3:])


def _demand(holds: bool, row: Row, name: str) -> None:
    if not holds:
        raise BadRun(f"The arrays of cell {row['cell']} do not fit its rows: {name} has an odd shape.")
