"""The stages of a round, in their order."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """What a client sends next, or the server waits for."""

    ADVERTISE = "advertise keys"
    SHARE = "share keys"
    MASK = "masked input"
    UNMASK = "unmasking"
    DONE = "done"
