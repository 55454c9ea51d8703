"""What a person sees while a run goes on: bars on a terminal, one line per cell anywhere else.

An audit calls `start`, then for each cell `cell`, any number of `share` and `finished`; `note` whenever there is
something to say. Nothing here changes what is computed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

SPEAK_EVERY = 30.0  # seconds between two plain lines of one long cell: enough to see life, not enough to fill a log


class Progress(Protocol):
    """What an audit tells while it runs."""

    def start(self, total_cells: int) -> None: ...

    def cell(self, cell: Any, index: int) -> None: ...

    def share(self, fraction: float) -> None: ...

    def finished(self, cell: Any, rows: Sequence[Any]) -> None: ...

    def note(self, text: str) -> None: ...


def duration(seconds: float) -> str:
    """Seconds as people say them: 0.4 s, 12 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Clock:
    """How long a run has taken and how long it may still take, by the share of its cells that is done.

    Cells that were already there when the run was resumed take no time, so they count in neither number.
    """

    def __init__(self) -> None:
        self.total = 0
        self.began = self.cell_began = time.monotonic()
        self.position = 0
        self.first: int | None = None

    def start(self, total: int) -> None:
        self.total, self.began = total, time.monotonic()

    def enter(self, position: int) -> None:
        self.position, self.cell_began = position, time.monotonic()
        if self.first is None:
            self.first = position

    def remaining(self, share: float) -> float | None:
        done = self.position - (self.first or 0) + share
        if done <= 0.0:
            return None
        return (time.monotonic() - self.began) / done * (self.total - self.position - share)


class Lines:
    """Plain lines, for logs, pipes and CI: one when a cell is done, and one now and then while a long one runs."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.clock = _Clock()
        self.spoken = 0.0
        self.current = ""

    def _say(self, text: str) -> None:
        print(text, file=self.stream or sys.stderr, flush=True)

    def _place(self) -> str:
        width = len(str(self.clock.total))
        return f"[{self.clock.position + 1:{width}d}/{self.clock.total}]"

    def start(self, total_cells: int) -> None:
        self.clock.start(total_cells)

    def cell(self, cell: Any, index: int) -> None:
        self.clock.enter(index)
        self.current, self.spoken = str(cell), time.monotonic()

    def share(self, fraction: float) -> None:
        if time.monotonic() - self.spoken < SPEAK_EVERY:
            return
        self.spoken = time.monotonic()
        left = self.clock.remaining(fraction)
        hint = f", about {duration(left)} left" if left is not None else ""
        self._say(f"{self._place()} {self.current}: {fraction:.0%}{hint}")

    def finished(self, cell: Any, rows: Sequence[Any]) -> None:
        self._say(f"{self._place()} {cell}: {_outcome(rows)} in {duration(time.monotonic() - self.clock.cell_began)}")

    def note(self, text: str) -> None:
        self._say(text)


class Bars:
    """Two rich bars, the whole run and the present cell, with the time left; finished cells scroll by above them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self.console = Console(file=stream or sys.stderr)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, TextColumn("{task.fields[left]}", markup=False), console=self.console, transient=True)
        self.clock = _Clock()
        self.overall: Any = None
        self.present: Any = None

    def start(self, total_cells: int) -> None:
        self.clock.start(total_cells)
        self.overall = self.bars.add_task("audit", total=max(total_cells, 1), left="")
        self.present = self.bars.add_task("", total=1.0, left="")
        self.bars.start()

    def cell(self, cell: Any, index: int) -> None:
        self.clock.enter(index)
        self.bars.update(self.overall, completed=index, description=f"cell {index + 1} of {self.clock.total}")
        self.bars.reset(self.present, total=1.0, description=str(cell), left="")

    def share(self, fraction: float) -> None:
        left = self.clock.remaining(fraction)
        self.bars.update(self.overall, completed=self.clock.position + fraction)
        self.bars.update(self.present, completed=fraction, left="" if left is None else f"{duration(left)} left in all")

    def finished(self, cell: Any, rows: Sequence[Any]) -> None:
        self.bars.update(self.overall, completed=self.clock.position + 1)
        spent = duration(time.monotonic() - self.clock.cell_began)
        self.console.print(f"{cell}: {_outcome(rows)} in {spent}", markup=False, highlight=False)

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.bars.stop()


def plain(stream: TextIO) -> bool:
    """Not a terminal, a dumb one, or a person who asked for no colours: write plain lines."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def shown(stream: TextIO | None = None) -> Iterator[Progress]:
    """The progress display that fits the stream (standard error by default), taken down again in any event."""
    stream = stream or sys.stderr
    if plain(stream):
        yield Lines(stream)
        return
    bars = Bars(stream)
    try:
        yield bars
    finally:
        bars.close()


def _outcome(rows: Sequence[Any]) -> str:
    """One cell's rows in a few words: failed, or how many targets and their mean PSNR."""
    failed = [row for row in rows if _entry(row, "status") == "failed"]
    if failed:
        return f"FAILED ({_entry(failed[0], 'error') or 'see rows.jsonl'})"
    scores = [value for row in rows if isinstance(value := _entry(row, "psnr"), (int, float))]
    mean = f", mean PSNR {sum(scores) / len(scores):.1f} dB" if scores else ""
    return f"{len(rows)} targets{mean}"


def _entry(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, dict) else getattr(row, name, None)
