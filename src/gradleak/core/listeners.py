"""Progress of running work: the cells of a run, and the objective of a search from time to time.

    with listening(lambda objective: print(objective)):
        attack.run(...)

A listener does not change what is computed. A search `tell`s the last objective of its lanes at the points of its
trace. Without a listener it reads nothing, so that a GPU does not wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

from gradleak.core.files import Row

Share: TypeAlias = Callable[[float], None]  # called with the share of the work that is done, from 0 to 1

_listener: ContextVar[Callable[[float], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(hear: Callable[[float], None]) -> Iterator[None]:
    """While this is open, `hear` gets the median objective over the lanes where it is finite."""
    before = _listener.set(hear)
    try:
        yield
    finally:
        _listener.reset(before)


def tell(objective: Any) -> None:
    """Called by a search with the objective of every lane, a tensor (lanes,)."""
    hear = _listener.get()
    if hear is None:
        return
    finite = objective[objective.isfinite()]
    if len(finite):
        hear(float(finite.median()))


class Progress(Protocol):
    """What an audit calls while it runs: `start`; per cell `cell`, any number of `share`, `finished`; and `note`."""

    def start(self, total_cells: int) -> None: ...

    def cell(self, cell: object, index: int) -> None: ...

    def share(self, fraction: float) -> None: ...

    def finished(self, cell: object, rows: Sequence[Row]) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """The default progress: says nothing."""

    def start(self, total_cells: int) -> None: ...

    def cell(self, cell: object, index: int) -> None: ...

    def share(self, fraction: float) -> None: ...

    def finished(self, cell: object, rows: Sequence[Row]) -> None: ...

    def note(self, text: str) -> None: ...
