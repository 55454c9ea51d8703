"""Curves over rounds, or over another measure: paths and ticks of a chart, which `chart` of parts.html.j2 draws.

Colours come from the style sheet, so that a chart follows light and dark mode. Lines also differ by their dashes, and
`Chart.text` has all values, for readers who do not see the chart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 34
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2")  # then they repeat
COLOURS = 6  # --line-0 to --line-5 of curves.css


@dataclass(frozen=True)
class Series:
    """One line: a value for every x, and a band around it. `doubtful`: which values did not settle."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    doubtful: Sequence[bool] = ()
    faint: bool = False  # a reference, drawn thinner and without marks


@dataclass(frozen=True)
class Mark:
    """A value, hollow if it did not settle. `whisker`: its low and high end, if the series has no band."""

    x: float
    y: float
    hollow: bool
    whisker: tuple[float, float] | None = None


@dataclass(frozen=True)
class Drawn:
    """A series in the units of the picture."""

    name: str
    colour: int
    dash: str
    line: str
    band: str
    marks: tuple[Mark, ...]
    faint: bool


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: where, in pixels, and its label."""

    place: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A picture, ready to be drawn."""

    title: str
    caption: str
    text: str
    lines: tuple[Drawn, ...]
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    floor: Tick | None = None
    across: str = "round"  # what the x axis measures
    width: int = field(default=WIDTH)
    height: int = field(default=HEIGHT)
    left: int = field(default=LEFT)
    right: int = field(default=WIDTH - RIGHT)
    top: int = field(default=TOP)
    bottom: int = field(default=HEIGHT - BOTTOM)


def chart(
    title: str,
    series: Sequence[Series],
    *,
    caption: str = "",
    floor: tuple[float, str] | None = None,
    across: str = "round",
    within: tuple[float, ...] = (),
) -> Chart:
    """Lay series out in one picture. `floor`: a level with its name, drawn across the picture.

    `across`: what the x axis measures; ticks are at the rounds, or evenly spaced for other measures. `within`: levels
    that the y axis must reach, such as 0 and 100 for percentages.
    """
    series = [one for one in series if len(one.x)]
    if not series:
        raise ValueError(f"The chart {title!r} has no values.")
    along = _Axis.of([x for one in series for x in one.x], LEFT, WIDTH - RIGHT, room=0.04)
    heights = [y for one in series for values in (one.y, one.low, one.high) for y in values]
    # The name of a floor is below it, where no line can be.
    levels, room = ([], 0.06) if floor is None else ([floor[0]], 0.1)
    up = _Axis.of([*heights, *levels, *within], HEIGHT - BOTTOM, TOP, room)
    places = _rounds(sorted({x for one in series for x in one.x})) if across == "round" else along.ticks
    return Chart(
        title,
        caption,
        _in_words(title, series, floor, across),
        tuple(_drawn(one, number, along, up) for number, one in enumerate(series)),
        tuple(Tick(along(x), f"{x:.6g}") for x in places),
        tuple(Tick(up(y), _text(y, up.step)) for y in up.ticks),
        None if floor is None else Tick(up(floor[0]), floor[1]),
        across,
    )


@dataclass(frozen=True)
class _Axis:
    """From values to places between `begin` and `end`."""

    low: float
    high: float
    begin: float
    end: float
    step: float

    @staticmethod
    def of(values: Sequence[float], begin: float, end: float, room: float) -> _Axis:
        low, high = min(values), max(values)
        if low == high:  # one value is in the middle
            margin = abs(low) * 0.5 or 1.0
            low, high = low - margin, high + margin
        margin = room * (high - low)
        return _Axis(low - margin, high + margin, begin, end, _step(high - low))

    def __call__(self, value: float) -> float:
        return round(self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step), math.floor(self.high / self.step)
        return [number * self.step for number in range(first, last + 1)]


def _step(span: float) -> float:
    """The distance between ticks: 1, 2 or 5 times a power of ten, for four to nine ticks."""
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next((digit for digit in (1, 2, 5) if digit * power >= rough), 10)


def _text(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step)))
    return f"{value:.{digits}f}" if digits <= 4 and abs(value) < 1e7 else f"{value:.3g}"


def _rounds(values: Sequence[float], most: int = 8) -> list[float]:
    """At most `most` of these rounds, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def _drawn(one: Series, number: int, across: _Axis, up: _Axis) -> Drawn:
    places = [(across(x), up(y)) for x, y in zip(one.x, one.y, strict=True)]
    banded = len(one.low) == len(one.y) == len(one.high) and any(h > v for h, v in zip(one.high, one.low))
    edges = [(up(low), up(high)) for low, high in zip(one.low, one.high)] if banded else []
    band = ""
    if banded and len(places) > 1:
        upper = [f"{x:g},{top:g}" for (x, _), (_, top) in zip(places, edges)]
        lower = [f"{x:g},{bottom:g}" for (x, _), (bottom, _) in zip(reversed(places), reversed(edges))]
        band = f"M{' L'.join([*upper, *lower])}Z"
    hollow = [bool(flag) for flag in one.doubtful] or [False] * len(places)
    marks = tuple(
        Mark(x, y, hollow[place], edges[place] if banded and len(places) == 1 else None)
        for place, (x, y) in enumerate(places)
    )
    line = f"M{' L'.join(f'{x:g},{y:g}' for x, y in places)}" if len(places) > 1 else ""
    return Drawn(
        one.name,
        number % COLOURS,
        "1 4" if one.faint else DASHES[number % len(DASHES)],
        line,
        "" if one.faint else band,
        () if one.faint else marks,
        one.faint,
    )


def _in_words(title: str, series: Sequence[Series], floor: tuple[float, str] | None, across: str) -> str:
    """The chart in words."""
    lines = [
        f"{one.name}: " + ", ".join(f"{y:.5g} at {across} {x:g}" for x, y in zip(one.x, one.y, strict=True))
        for one in series
    ]
    return f"{title}. {'; '.join(lines)}." + ("" if floor is None else f" {floor[1]}.")
