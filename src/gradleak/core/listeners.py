"""How work is going, for whoever looks on: the cells of a run, and the objective of a search now and then.

    with listening(lambda objective: print(objective)):
        attack.run(...)

A listener changes nothing of what is computed. A search `tell`s the last objective of its lanes at the points of its
trace; without a listener nothing is read, so that a GPU does not wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

from gradleak.core.files import Row

Share: TypeAlias = Callable[[float], None]  # is called with how much of the work is done, from 0 to 1

_listener: ContextVar[Callable[[float], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(hear: Callable[[float], None]) -> Iterator[None]:
    """`hear` gets the median objective over lanes, where it is finite."""
    before = _listener.set(hear)
    try:
        yield
    finally:
        _listener.reset(before)


def tell(objective: Any) -> None:
    """Of a search: the objective of every lane, a tensor (lanes,)."""
    hear = _listener.get()
    if hear is None:
        return
    sound = objective[objective.isfinite()]
    if len(sound):
        hear(float(sound.median()))


class Progress(Protocol):
    """What an audit tells while it runs: `start`; per cell `cell`, any number of `share`, `finished`; and `note`."""

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
