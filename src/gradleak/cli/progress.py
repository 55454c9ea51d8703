"""Progress of a run: bars on a terminal, one line per cell anywhere else.

An audit calls `start`, then for each cell `cell`, any number of `share` and `finished` (only `finished` for cells that
an earlier run completed), and `note` for messages. The search reports its objective now and then (`listeners.py`),
which is drawn as a small curve. Nothing here changes what is computed.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TextIO

from gradleak.cli.formatting import counted
from gradleak.core.durations import duration

if TYPE_CHECKING:
    from gradleak.core.listeners import Progress

LINE_EVERY = 30.0  # seconds between two plain lines of one long cell: shows life without filling a log
BLOCKS, LETTERS = "▁▂▃▄▅▆▇█", "_.-=+*%#"  # LETTERS: for streams that cannot write the blocks
WIDTH = 16  # characters of a curve
FIXED = 4 + 5 + 8 + WIDTH + 10  # columns of gaps, percentage, clock, and the curve with its value


class Curve:
    """The objective during one cell's search, as a line of small bars; on a log scale while it is positive."""

    def __init__(self, bars: str = BLOCKS) -> None:
        self.bars = bars
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)

    def __str__(self) -> str:
        """The curve and its last value: `█▇▅▃▂▁ 3.1e-03`; empty before the first value."""
        if not self.values:
            return ""
        size = min(WIDTH, len(self.values))
        ends = [round((place + 1) * len(self.values) / size) for place in range(size)]
        values = [self.values[end - 1] for end in ends]
        heights = [math.log(value) for value in values] if min(values) > 0 else values
        low, high = min(heights), max(heights)
        scale = (len(self.bars) - 1) / (high - low) if high > low else 0.0
        line = "".join(self.bars[round((height - low) * scale)] for height in heights)
        return f"{line} {self.values[-1]:.1e}"


def bars_for(stream: IO[str]) -> str:
    """The characters of a curve that this stream can write."""
    try:
        BLOCKS.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return LETTERS
    return BLOCKS


class _Clock:
    """Counts finished cells, and extrapolates the time left from the time spent.

    Cells that an earlier run finished take no time, so they do not enter the extrapolation.
    """

    def __init__(self) -> None:
        self.total = self.done = self.resumed = 0
        self.began = time.monotonic()
        self.latest: Any = None  # the running cell that began last
        self.running: dict[int, float] = {}  # start times by id of the cell: workers may run several at a time

    def start(self, total: int) -> None:
        self.total, self.began = total, time.monotonic()

    def enter(self, cell: Any) -> None:
        self.latest = cell
        self.running[id(cell)] = time.monotonic()

    def leave(self, cell: Any) -> str:
        """Count a finished cell, and say how long it took, or that an earlier run finished it."""
        self.done += 1
        began = self.running.pop(id(cell), None)
        if began is None:
            self.resumed += 1
            return "kept from before"
        self.latest = None if self.latest is cell else self.latest
        return f"in {duration(time.monotonic() - began)}"

    def time_left(self, share: float) -> str:
        """The time left in words; empty before any work is done."""
        worked = self.done - self.resumed + share
        if worked <= 0.0:
            return ""
        return f"about {duration((time.monotonic() - self.began) / worked * (self.total - self.done - share))} left"


class Lines:
    """Plain lines, for logs, pipes and CI: one for each finished cell, and one now and then during a long cell."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.clock = _Clock()
        self.last_line = 0.0
        self.objective: float | None = None

    def start(self, total_cells: int) -> None:
        self.clock.start(total_cells)

    def cell(self, cell: Any, index: int) -> None:
        self.clock.enter(cell)
        self.last_line = time.monotonic()
        self.objective = None

    def hear(self, objective: float) -> None:
        self.objective = objective

    def share(self, fraction: float) -> None:
        if time.monotonic() - self.last_line < LINE_EVERY:
            return
        self.last_line = time.monotonic()
        objective = "" if self.objective is None else f"objective {self.objective:.1e}"
        state = ", ".join(filter(None, (f"{fraction:.0%}", objective, self.clock.time_left(fraction))))
        self.note(f"{self._place(self.clock.done + 1)} {self.clock.latest}: {state}")

    def finished(self, cell: Any, rows: Sequence[Any]) -> None:
        timing = self.clock.leave(cell)
        self.note(f"{self._place(self.clock.done)} {cell}: {outcome(rows)}, {timing}")

    def note(self, text: str) -> None:
        print(text, file=self.stream or sys.stderr, flush=True)

    def _place(self, number: int) -> str:
        return f"[{number:{len(str(self.clock.total))}d}/{self.clock.total}]"


class Bars:
    """Two rich bars: the whole run with the time left, and the current cell with the curve of its objective.

    Finished cells scroll by above them.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self.console = Console(file=stream or sys.stderr)
        name, suffix = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[suffix]}"))
        width = min(40, max(8, self.console.width // 6))
        self.name_width = max(16, self.console.width - width - FIXED)
        columns = (name, BarColumn(width), TaskProgressColumn(), TimeElapsedColumn(), suffix)
        self.bars = Progress(*columns, console=self.console, transient=True)
        self.clock = _Clock()
        self.curve = Curve(bars_for(self.console.file))
        self.overall = self.bars.add_task("", total=None, suffix="")
        self.current = self.bars.add_task("", total=1.0, suffix="", visible=False)

    def start(self, total_cells: int) -> None:
        self.clock.start(total_cells)
        self.bars.update(self.overall, total=max(total_cells, 1))
        self.bars.start()

    def cell(self, cell: Any, index: int) -> None:
        self.clock.enter(cell)
        self.curve = Curve(self.curve.bars)
        self.bars.update(self.overall, description=f"cell {self.clock.done + 1} of {self.clock.total}")
        name = str(cell) if len(str(cell)) <= self.name_width else f"{str(cell)[: self.name_width - 3]}..."
        self.bars.reset(self.current, total=1.0, description=name, suffix="", visible=True)

    def hear(self, objective: float) -> None:
        self.curve.add(objective)
        self.bars.update(self.current, suffix=str(self.curve))

    def share(self, fraction: float) -> None:
        self.bars.update(self.overall, completed=self.clock.done + fraction, suffix=self.clock.time_left(fraction))
        self.bars.update(self.current, completed=fraction)

    def finished(self, cell: Any, rows: Sequence[Any]) -> None:
        timing = self.clock.leave(cell)
        self.bars.update(self.overall, completed=self.clock.done)
        self.note(f"{cell}: {outcome(rows)}, {timing}")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.bars.stop()


def is_plain(stream: TextIO) -> bool:
    """Should this stream get plain lines? Yes if it is no terminal, a dumb one, or if NO_COLOR is set."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def display(plain: bool = False) -> Iterator[Progress]:
    """The progress display that fits standard error, removed at the end; `plain`: lines in any case."""
    from gradleak.core.listeners import listening

    stream = sys.stderr
    if plain or is_plain(stream):
        lines = Lines(stream)
        with listening(lines.hear):
            yield lines
        return
    bars = Bars(stream)
    try:
        with listening(bars.hear):
            yield bars
    finally:
        bars.close()


@contextmanager
def single_job(name: str, plain: bool) -> Iterator[Progress]:
    """The display of a command that does one thing: a run of one cell."""
    with display(plain) as progress:
        progress.start(1)
        progress.cell(name, 0)
        yield progress


def outcome(rows: Sequence[Mapping[str, Any]]) -> str:
    """One cell's rows in a few words: why it failed, or how many targets and their mean score."""
    failed = [row for row in rows if row.get("status") == "failed"]
    if failed:
        return f"FAILED ({failed[0].get('error')})"
    from gradleak.scenario.kinds import KINDS  # imports torch

    measure = KINDS[next((row["kind"] for row in rows if "kind" in row), "image")]().headline
    values = [value for row in rows for value in (row.get("scores") or {}).get(measure.name) or () if value is not None]
    mean = f", mean {measure.label} {measure.format(sum(values) / len(values))}" if values else ""
    return f"{counted(len(rows), 'target')}{mean}"
