"""The pictures: for each defence every private image once, as the strongest attack recovered it, clearest first.

The page holds all pictures; a browser decodes one when it comes into view, since it does not lay out cards out of view
(content-visibility). It also draws the difference from the two pictures, so that costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradleak.core import pictures
from gradleak.core.files import BadRun
from gradleak.report.frames import Strip, restarts, snapshots
from gradleak.report.grid import Value, number, tone

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult, Row

SHOWN = 12  # pictures of each defence that are open; the others are folded
ROOM = 13_500_000  # bytes of pictures in a page, shared by its defences: small enough to send
POINTS = 25  # of the curve of a search


@dataclass(frozen=True)
class Search:
    """The match along the search: the curve in a box of 100 x 24, and its points as `step:match`."""

    path: str
    points: str


@dataclass(frozen=True)
class Shot:
    """A private image, what was recovered of it, and how the search went. `anchor` is its address in the page."""

    anchor: str
    attack: str
    settings: str
    defence: str
    form: str
    key: str
    detail: str
    outcome: str
    tone: str
    scores: Mapping[str, float | None]
    alt: str
    true: str
    found: str
    width: int
    height: int
    search: Search | None = None
    steps: Strip | None = None
    restarts: Strip | None = None
    chosen: int = 0

    @property
    def size(self) -> int:
        return len(self.true) + len(self.found)

    @property
    def extra(self) -> int:
        return sum(len(strip.uri) for strip in (self.steps, self.restarts) if strip is not None)


@dataclass(frozen=True)
class Group:
    """The pictures of one defence, clearest first."""

    name: str
    defence: str
    verdict: Value
    shots: tuple[Shot, ...]
    left_out: int

    @property
    def first(self) -> tuple[Shot, ...]:
        return self.shots[:SHOWN]

    @property
    def more(self) -> tuple[Shot, ...]:
        return self.shots[SHOWN:]


@dataclass(frozen=True)
class Gallery:
    """Truths beside reconstructions, in groups, with what the filters offer."""

    groups: tuple[Group, ...]

    @property
    def shots(self) -> tuple[Shot, ...]:
        return tuple(shot for group in self.groups for shot in group.shots)

    def named(self, what: str) -> list[str]:
        """The values that a filter offers."""
        return list(dict.fromkeys(getattr(shot, what) for shot in self.shots))

    @property
    def moving(self) -> bool:
        """Are there pictures of the searches?"""
        return any(shot.steps for shot in self.shots)


def gallery(result: AuditResult, grid: Sequence[Row]) -> Gallery | None:
    """None if there is no picture to show."""
    read, best = Reader(result), _strongest(grid)
    groups = []
    for defence in sorted(best, key=lambda name: (name != "none", name)):
        order = sorted(best[defence].values(), key=lambda entry: -entry[0])
        shots = tuple(_within(read, order, ROOM // len(best)))
        if shots:
            verdict = result.verdicts.get(defence)
            word = Value(verdict.word, tone(verdict.word)) if verdict else Value("")
            name = "Undefended" if defence == "none" else f"Defence: {defence}"
            groups.append(Group(name, defence, word, shots, len(order) - len(shots)))
    return Gallery(tuple(groups)) if groups else None


def _strongest(grid: Sequence[Row]) -> dict[str, dict[tuple[Any, ...], tuple[float, Row, int]]]:
    """By defence and private image: PSNR, row and example of the nearest reconstruction."""
    best: dict[str, dict[tuple[Any, ...], tuple[float, Row, int]]] = {}
    for row in grid:
        for example, psnr in enumerate((row.get("scores") or {}).get("psnr") or ()):
            image = (row["round"], row["seed"], row["observation"], example)
            nearest = best.setdefault(str(row["defence"]), {})
            if psnr is not None and (image not in nearest or psnr > nearest[image][0]):
                nearest[image] = (psnr, row, example)
    return best


def _within(read: Reader, order: Sequence[tuple[float, Row, int]], room: int) -> Iterator[Shot]:
    """As many as there is room for; the clearest also with pictures of the search, in the room that remains."""
    shots: list[tuple[Shot, Row, int]] = []
    for _, row, example in order:
        if (shot := read.shot(row, example)) is None:
            continue
        if shot.size > room:
            break
        room -= shot.size
        shots.append((shot, row, example))
    for shot, row, example in shots:
        if room > 0:
            shot = read.moving(shot, row, example)
            room -= shot.extra
        yield shot


class Reader:
    """Makes shots from the arrays of a run; reads each cell once."""

    def __init__(self, result: AuditResult) -> None:
        self._images = _quiet(result.images)
        self._trace = _quiet(result.trace)
        self._arrays = _quiet(result.store.arrays)

    def shot(self, row: Row, example: int) -> Shot | None:
        """None if the arrays are gone or hold no pictures."""
        images = self._images(row["cell"])
        if images is None or not pictures.drawable(images["true"].shape[2:]):
            return None
        target = int(row["target"])
        true, reconstruction = images["true"][target, example], images["found"][target, example]
        scores = {name: values[example] for name, values in row["scores"].items() if values}
        outcome, colour = _outcome(row, example)
        attack, _, settings = str(row["attack"]).partition(":")
        of_batch = f", example {example + 1} of {row['examples']}" if row["examples"] > 1 else ""
        seeded = f", seed {row['seed']}" if row["seed"] else ""
        place = f", round {row['round']}" if row["round"] else ""
        return Shot(
            anchor=f"target-{row['cell']}-{target}-{example}",
            attack=attack,
            settings=settings,
            defence=str(row["defence"]),
            form="" if row["form"] == "undefended" else str(row["form"]),
            key=f"{row['observation']}{of_batch}{place}{seeded}",
            detail=f"PSNR {number(scores.get('psnr'), 1)} dB, SSIM {number(scores.get('ssim'), 2)}",
            outcome=outcome,
            tone=colour,
            scores={name: scores.get(name) for name in ("psnr", "ssim")},
            alt=f"example {example + 1} of target {row['observation']}",
            true=pictures.data_uri(true),
            found=pictures.data_uri(reconstruction),
            width=true.shape[-1],
            height=true.shape[-2],
            search=self._search(row, target),
        )

    def moving(self, shot: Shot, row: Row, example: int) -> Shot:
        """The same with pictures of the search and of the other restarts, if the run kept them."""
        arrays, chosen = self._arrays(row["cell"]) or {}, int(row.get("restart") or 0)
        steps, others = snapshots(arrays, row, example), restarts(arrays, row, example)
        return replace(shot, steps=steps, restarts=others, chosen=chosen)

    def _search(self, row: Row, target: int) -> Search | None:
        trace = self._trace(row["cell"])
        if trace is None or not len(trace["step"]):
            return None
        if trace["match"].dim() != 2 or trace["match"].shape[1] <= target:
            raise BadRun(f"The arrays of cell {row['cell']} do not fit its rows: trace/match has no target {target}.")
        steps, values = trace["step"].tolist(), trace["match"][:, target].tolist()
        pairs = [(int(step), value) for step, value in zip(steps, values) if math.isfinite(value)]
        if len(pairs) < 2:
            return None
        count = min(POINTS, len(pairs))
        pairs = [pairs[round(place * (len(pairs) - 1) / (count - 1))] for place in range(count)]
        return Search(_path([value for _, value in pairs]), " ".join(f"{step}:{value:.2g}" for step, value in pairs))


def _path(values: Sequence[float]) -> str:
    """On a logarithmic scale, since a match falls over many powers of ten. Values of 0 or less are at the bottom."""
    least = min((value for value in values if value > 0), default=1.0)
    logs = [math.log10(max(value, least)) for value in values]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0
    across = 100 / (len(logs) - 1)
    heights = [22 - 20 * (level - low) / span for level in logs]
    return "M" + "L".join(f"{place * across:.0f} {height:.0f}" for place, height in enumerate(heights))


def _outcome(row: Row, example: int) -> tuple[str, str]:
    """The outcome in words, and its tone. A search that did not converge shows nothing by not recovering an image."""
    hits = (row.get("hits") or {}).get("recovered")
    if hits and hits[example]:
        return "recovered", "bad"
    if row.get("diverged"):
        return "diverged", "hatched"
    return ("not recovered", "void") if row.get("converged") else ("did not converge", "hatched")


def _quiet(read: Callable[[str], Mapping[str, Tensor]]) -> Callable[[str], Mapping[str, Tensor] | None]:
    """`read`, once for each cell; None if the arrays were deleted, which is sensible for private images."""

    @cache
    def arrays(cell: str) -> Mapping[str, Tensor] | None:
        try:
            return read(cell)
        except BadRun:
            return None

    return arrays


@dataclass(frozen=True)
class Control:
    """The positive control, with a few of its pictures."""

    word: str
    tone: str
    text: str
    shots: tuple[Shot, ...]


def control(result: AuditResult) -> Control:
    """The positive control: did an attack that must succeed succeed? With up to three of its pictures."""
    outcome = result.positive_control
    rows = [row for row in result.rows if row.get("cell") == outcome.cell and row.get("status") != "failed"]
    read = Reader(result)
    shots = [shot for row in rows[:3] if (shot := read.shot(row, 0)) is not None]
    word, colour = ("passed", "good") if outcome.passed else ("failed: this run shows nothing", "bad")
    return Control(word, colour, outcome.text.partition(": ")[2] or outcome.text, tuple(shots))
