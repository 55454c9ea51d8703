"""What a person sees while a run goes on: bars on a terminal, one line per cell anywhere else.

An audit calls `start`, then for each cell `cell`, any number of `share` and `finished` (only `finished` for cells that
an earlier run completed), and `note` whenever there is something to say. The search itself tells its objective now and
then (`watching.py`), which is drawn as a small curve. Nothing here changes what is computed.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TextIO

from gradleak.core.durations import duration

if TYPE_CHECKING:
    from gradleak.core.listeners import Progress

SPEAK_EVERY = 30.0  # seconds between two plain lines of one long cell: enough to see life, not enough to fill a log


BLOCKS, LETTERS = "▁▂▃▄▅▆▇█", "_.-=+*%#"  # the second where a stream cannot write the first
WIDTH = 16  # characters of a curve
FIXED = 4 + 5 + 8 + WIDTH + 10  # beside name and bar: gaps, percentage, clock, the curve with its value


class Curve:
    """An objective over the search of one cell, as a line of small bars: on a log scale, as long as it is positive."""

    def __init__(self, bars: str = BLOCKS) -> None:
        self.bars = bars
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)

    def __str__(self) -> str:
        """The curve and where it stands: `█▇▅▃▂▁ 3.1e-03`; nothing before the first value."""
        if not self.values:
            return ""
        size = min(WIDTH, len(self.values))
        ends = [round((place + 1) * len(self.values) / size) for place in range(size)]
        shown = [self.values[end - 1] for end in ends]
        heights = [math.log(value) for value in shown] if min(shown) > 0 else shown
        low, high = min(heights), max(heights)
        scale = (len(self.bars) - 1) / (high - low) if high > low else 0.0
        drawn = "".join(self.bars[round((height - low) * scale)] for height in heights)
        return f"{drawn} {self.values[-1]:.1e}"


def bars_for(stream: IO[str]) -> str:
    """The characters of a curve that this stream can write."""
    try:
        BLOCKS.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return LETTERS
    return BLOCKS


class _Clock:
    """Where a run stands, and how long it may still take by what it has done so far.

    Cells that an earlier run left finished take no time, so they count in neither number.
    """

    def __init__(self) -> None:
        self.total = self.done = self.kept = 0
        self.began = time.monotonic()
        self.running: Any = None  # the one that began last
        self.begun: dict[int, float] = {}  # when, of all that are running: workers may take several at a time

    def start(self, total: int) -> None:
        self.total, self.began = total, time.monotonic()

    def enter(self, cell: Any) -> None:
        self.running = cell
        self.begun[id(cell)] = time.monotonic()

    def leave(self, cell: Any) -> str:
        """Count a finished cell; the time it took in words, or that it was there before."""
        self.done += 1
        began = self.begun.pop(id(cell), None)
        if began is None:
            self.kept += 1
            return "kept from before"
        self.running = None if self.running is cell else self.running
        return f"in {duration(time.monotonic() - began)}"

    def left(self, share: float) -> str:
        """The time left in words, or nothing while it cannot be told."""
        worked = self.done - self.kept + share
        if worked <= 0.0:
            return ""
        return f"about {duration((time.monotonic() - self.began) / worked * (self.total - self.done - share))} left"


class Lines:
    """Plain lines, for logs, pipes and CI: one when a cell is done, and one now and then while a long one runs."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.clock = _Clock()
        self.spoken = 0.0
        self.objective: float | None = None

    def start(self, total_cells: int) -> None:
        self.clock.start(total_cells)

    def cell(self, cell: Any, index: int) -> None:
        self.clock.enter(cell)
        self.spoken = time.monotonic()
        self.objective = None

    def hear(self, objective: float) -> None:
        self.objective = objective

    def share(self, fraction: float) -> None:
        if time.monotonic() - self.spoken < SPEAK_EVERY:
            return
        self.spoken = time.monotonic()
        stands = "" if self.objective is None else f"objective {self.objective:.1e}"
        told = ", ".join(filter(None, (f"{fraction:.0%}", stands, self.clock.left(fraction))))
        self.note(f"{self._place(self.clock.done + 1)} {self.clock.running}: {told}")

    def finished(self, cell: Any, rows: Sequence[Any]) -> None:
        when = self.clock.leave(cell)
        self.note(f"{self._place(self.clock.done)} {cell}: {outcome(rows)}, {when}")

    def note(self, text: str) -> None:
        print(text, file=self.stream or sys.stderr, flush=True)

    def _place(self, number: int) -> str:
        return f"[{number:{len(str(self.clock.total))}d}/{self.clock.total}]"


class Bars:
    """Two rich bars: the whole run with the time left, and the present cell with the curve of its objective.

    Finished cells scroll by above them.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self.console = Console(file=stream or sys.stderr)
        name, left = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[left]}", markup=False)
        width = min(40, max(8, self.console.width // 6))
        self.room = max(16, self.console.width - width - FIXED)
        columns = (name, BarColumn(width), TaskProgressColumn(), TimeElapsedColumn(), left)
        self.bars = Progress(*columns, console=self.console, transient=True)
        self.clock = _Clock()
        self.curve = Curve(bars_for(self.console.file))
        self.overall = self.bars.add_task("", total=None, left="")
        self.present = self.bars.add_task("", total=1.0, left="", visible=False)

    def start(self, total_cells: int) -> None:
        self.clock.start(total_cells)
        self.bars.update(self.overall, total=max(total_cells, 1))
        self.bars.start()

    def cell(self, cell: Any, index: int) -> None:
        self.clock.enter(cell)
        self.curve = Curve(self.curve.bars)
        self.bars.update(self.overall, description=f"cell {self.clock.done + 1} of {self.clock.total}")
        name = str(cell) if len(str(cell)) <= self.room else f"{str(cell)[: self.room - 3]}..."
        self.bars.reset(self.present, total=1.0, description=name, left="", visible=True)

    def hear(self, objective: float) -> None:
        self.curve.add(objective)
        self.bars.update(self.present, left=str(self.curve))

    def share(self, fraction: float) -> None:
        self.bars.update(self.overall, completed=self.clock.done + fraction, left=self.clock.left(fraction))
        self.bars.update(self.present, completed=fraction)

    def finished(self, cell: Any, rows: Sequence[Any]) -> None:
        when = self.clock.leave(cell)
        self.bars.update(self.overall, completed=self.clock.done)
        self.note(f"{cell}: {outcome(rows)}, {when}")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.bars.stop()


def plain(stream: TextIO) -> bool:
    """Not a terminal, a dumb one, or a person who asked for no colours: write plain lines."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def shown(lines: bool = False) -> Iterator[Progress]:
    """The progress display that fits standard error, taken down again in any event.

    `lines`: plain lines, wherever it is.
    """
    from gradleak.core.listeners import listening

    stream = sys.stderr
    if lines or plain(stream):
        display = Lines(stream)
        with listening(display.hear):
            yield display
        return
    bars = Bars(stream)
    try:
        with listening(bars.hear):
            yield bars
    finally:
        bars.close()


def outcome(rows: Sequence[Mapping[str, Any]]) -> str:
    """One cell's rows in a few words: failed and why, or how many targets and their mean PSNR."""
    failed = [row for row in rows if row.get("status") == "failed"]
    if failed:
        return f"FAILED ({failed[0].get('error')})"
    scores = [value for row in rows for value in (row.get("scores") or {}).get("psnr") or () if value is not None]
    mean = f", mean PSNR {sum(scores) / len(scores):.1f} dB" if scores else ""
    return f"{len(rows)} target{'' if len(rows) == 1 else 's'}{mean}"
