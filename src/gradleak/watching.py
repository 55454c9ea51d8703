"""How a search is going, for whoever looks on: the objective now and then, read only where somebody listens.

    with listening(lambda objective: print(objective)):
        attack.run(...)

A listener changes nothing of what is computed. A search `tell`s the last objective of its lanes at the points of its
trace; without a listener nothing is read, so that a GPU does not wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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
