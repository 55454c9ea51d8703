"""Which images a generator is trained on. All others stay unseen, and its card says which they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradleak.data import DataError, Images, load_images
from gradleak.generators.files import fingerprints


@dataclass(frozen=True)
class Split:
    """Some of the images of a name or path.

    data        as for `gradleak.data.load`
    part        "train" or "test"
    rows        of that part; None: all
    held_out    share of them that is held out at random, by `seed`
    exclude     names of data: no image with the same pixels as one of theirs, in either part, is used
    size        to which images are cropped and resized
    """

    data: str
    part: str = "train"
    rows: Sequence[int] | None = None
    held_out: float = 0.0
    seed: int = 0
    exclude: Sequence[str] = ()
    size: int | None = None

    def __post_init__(self) -> None:
        if self.part not in ("train", "test"):
            raise DataError(f"part must be train or test; given {self.part!r}.")
        if not 0 <= self.held_out < 1:
            raise DataError(f"The share that is held out must lie between 0 and 1; given {self.held_out}.")

    def taken(self) -> tuple[Images, dict[str, Any]]:
        """The images, and a description of which they are, for `Card.split`."""
        images = load_images(self.data, split=self.part, size=self.size)
        chosen = range(len(images)) if self.rows is None else self.rows
        if not chosen or min(chosen) < 0 or max(chosen) >= len(images):
            raise DataError(
                f"Rows {ranges(chosen)} are not among the {len(images)} images of {self.data}, {self.part}."
            )
        rows = torch.tensor(sorted(set(chosen)))
        card: dict[str, Any] = {"data": self.data, "part": self.part, "of": len(images), "asked_for": ranges(chosen)}
        if self.held_out:
            shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))
            back = round(self.held_out * len(rows))
            unseen = ranges(rows[shuffled[:back]].tolist())
            card["held_out"] = {"share": self.held_out, "seed": self.seed, "rows": unseen}
            rows = rows[shuffled[back:]].sort().values
        for name in self.exclude:
            theirs = [load_images(name, split=part, size=self.size).x for part in ("train", "test")]
            same = torch.isin(fingerprints(images.x[rows]), torch.cat([fingerprints(x) for x in theirs]))
            card.setdefault("excluded", {})[name] = int(same.sum())
            rows = rows[~same]
        if not len(rows):
            raise DataError(f"Nothing is left of {self.data}: exclude or hold out less, or take other rows.")
        return images[rows], {**card, "used": len(rows), "used_rows": ranges(rows.tolist())}


def ranges(rows: Sequence[int], most: int = 20_000) -> str:
    """`[0, 1, 2, 7]` -> `"0-2,7"`; if that is too long, their number and a hash."""
    pieces: list[tuple[int, int]] = []
    for row in sorted(rows):
        if pieces and pieces[-1][1] == row - 1:
            pieces[-1] = (pieces[-1][0], row)
        else:
            pieces.append((row, row))
    text = ",".join(f"{low}-{high}" if high > low else str(low) for low, high in pieces)
    if len(text) <= most:
        return text
    return f"{len(rows)} rows, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
