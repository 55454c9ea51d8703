"""The gallery: for each defence every private example once, as the strongest attack recovered it, clearest first.

What a card shows of an example is up to its kind (exhibits.py). The page holds all pictures; a browser decodes one when
it comes into view, since it does not lay out cards out of view (content-visibility). It also draws the difference from
the two pictures, so that costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradleak.core.files import BadRun
from gradleak.report.exhibits import Further, View, drawn, further
from gradleak.report.frames import Strip, restarts, snapshots
from gradleak.report.grid import Value, stated, tone
from gradleak.report.words import Words

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult, Row
    from gradleak.scenario.kinds import Measure

SHOWN = 12  # cards of each defence that are open; the others are folded
ROOM = 13_500_000  # bytes of cards in a page, shared by its defences: small enough to send
POINTS = 25  # of the curve of a search


@dataclass(frozen=True)
class Search:
    """The match along the search: the curve in a box of 100 x 24, and its points as `step:match`."""

    path: str
    points: str


@dataclass(frozen=True)
class Shot:
    """A private example, what was recovered of it, and how the search went. `anchor` is its address in the page."""

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
    one: str
    view: View
    further: tuple[Further, ...] = ()
    search: Search | None = None
    steps: Strip | None = None
    restarts: Strip | None = None
    chosen: int = 0

    @property
    def size(self) -> int:
        return self.view.size + sum(each.view.size for each in self.further if each.view is not None)

    @property
    def beside(self) -> tuple[Shot, ...]:
        """Its other fields that are drawn too."""
        return tuple(
            replace(self, one=each.name, detail=each.text, view=each.view, further=())
            for each in self.further
            if each.view is not None
        )

    @property
    def lines(self) -> tuple[Further, ...]:
        """Its other fields in words."""
        return tuple(each for each in self.further if each.view is None)

    @property
    def extra(self) -> int:
        return sum(len(strip.uri) for strip in (self.steps, self.restarts) if strip is not None)


@dataclass(frozen=True)
class Group:
    """The examples of one defence, clearest first."""

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
    words: Words

    @property
    def shots(self) -> tuple[Shot, ...]:
        return tuple(shot for group in self.groups for shot in group.shots)

    def named(self, what: str) -> list[str]:
        """The values that a filter offers."""
        return list(dict.fromkeys(getattr(shot, what) for shot in self.shots))

    @property
    def reading(self) -> str:
        """How to read a card."""
        return self.shots[0].view.reading

    @property
    def orders(self) -> tuple[Measure, ...]:
        """Scores besides the headline that cards can be sorted by."""
        scored = {name for shot in self.shots for name, score in shot.scores.items() if score is not None}
        return tuple(each for each in self.words.measures[1:] if each.higher and each.name in scored)

    @property
    def moving(self) -> bool:
        """Are there pictures of the searches?"""
        return any(shot.steps for shot in self.shots)


def gallery(result: AuditResult, grid: Sequence[Row]) -> Gallery | None:
    """None if there is no example to show."""
    read, best = Reader(result), _strongest(grid, result.kind.headline)
    groups = []
    for defence in sorted(best, key=lambda name: (name != "none", name)):
        order = sorted(best[defence].values(), key=lambda entry: -entry[0])
        shots = tuple(_within(read, order, ROOM // len(best)))
        if shots:
            verdict = result.verdicts.get(defence)
            word = Value(verdict.word, tone(verdict.word)) if verdict else Value("")
            name = "Undefended" if defence == "none" else f"Defence: {defence}"
            groups.append(Group(name, defence, word, shots, len(order) - len(shots)))
    return Gallery(tuple(groups), Words(result.kind)) if groups else None


def _strongest(grid: Sequence[Row], measure: Measure) -> dict[str, dict[tuple[Any, ...], tuple[float, Row, int]]]:
    """By defence and private example: how near the nearest reconstruction is, its row and its place there."""
    best: dict[str, dict[tuple[Any, ...], tuple[float, Row, int]]] = {}
    for row in grid:
        for example, score in enumerate((row.get("scores") or {}).get(measure.name) or ()):
            private = (row["round"], row["seed"], row["observation"], example)
            nearest = best.setdefault(str(row["defence"]), {})
            if score is not None and (private not in nearest or measure.sign * score > nearest[private][0]):
                nearest[private] = (measure.sign * score, row, example)
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
        self._words, self._fields = Words(result.kind), result.fields
        self._granted = frozenset(result.settings.get("given", ()))
        self._pairs = _quiet(result.pairs)
        self._trace = _quiet(result.trace)
        self._arrays = _quiet(result.store.arrays)

    def shot(self, row: Row, example: int) -> Shot | None:
        """None if the arrays are gone, or hold nothing that can be drawn."""
        if (pair := self._pairs(row["cell"], "x")) is None:
            return None
        target, private = int(row["target"]), self._fields["x"]
        true, reconstruction = pair["true"][target, example], pair["found"][target, example]
        if (view := drawn(private.kind.exhibit(true, reconstruction, private))) is None:
            return None
        scores = {name: values[example] for name, values in row["scores"].items() if values}
        first, *others = self._words.measures
        stating = [first, *(measure for measure in others if scores.get(measure.name) is not None)]
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
            detail=", ".join(stated(measure, scores.get(measure.name)) for measure in stating),
            outcome=outcome,
            tone=colour,
            scores={measure.name: scores.get(measure.name) for measure in self._words.measures},
            alt=f"example {example + 1} of target {row['observation']}",
            one=self._words.one,
            view=view,
            further=tuple(self._further(row["cell"], target, example)),
            search=self._search(row, target),
        )

    def _further(self, cell: str, target: int, example: int) -> Iterator[Further]:
        """The other fields that were searched for. A picture's class is left out: "labels right" scores it."""
        for name, field in self._fields.items():
            is_class = not field.shape and not field.continuous
            if name == "x" or name in self._granted or field.public or (is_class and self._fields["x"].kind.pictures):
                continue
            if (pair := self._pairs(cell, name)) is not None:
                yield further(name, pair["true"][target, example], pair["found"][target, example], field)

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
    """The outcome in words, and its tone. A search that did not converge shows nothing by not recovering an example."""
    hits = (row.get("hits") or {}).get("recovered")
    if hits and hits[example]:
        return "recovered", "bad"
    if row.get("diverged"):
        return "diverged", "hatched"
    return ("not recovered", "void") if row.get("converged") else ("did not converge", "hatched")


def _quiet(read: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Mapping[str, Tensor] | None]:
    """`read`, once for each cell; None if the arrays were deleted, which is sensible for private data."""

    @cache
    def arrays(*names: str) -> Mapping[str, Tensor] | None:
        try:
            return read(*names)
        except BadRun:
            return None

    return arrays


@dataclass(frozen=True)
class Control:
    """The positive control, with a few of its examples."""

    word: str
    tone: str
    text: str
    shots: tuple[Shot, ...]


def control(result: AuditResult) -> Control:
    """The positive control: did an attack that must succeed succeed? With up to three of its examples."""
    outcome = result.positive_control
    rows = [row for row in result.rows if row.get("cell") == outcome.cell and row.get("status") != "failed"]
    read = Reader(result)
    shots = [shot for row in rows[:3] if (shot := read.shot(row, 0)) is not None]
    word, colour = ("passed", "good") if outcome.passed else ("failed: this run shows nothing", "bad")
    return Control(word, colour, outcome.text.partition(": ")[2] or outcome.text, tuple(shots))
