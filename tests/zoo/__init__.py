"""Models that people train, each small, with data of its kind: `victim(name)` for a name of `ZOO`."""

from __future__ import annotations

from zoo.models import ZOO, Victim, victim

__all__ = ["ZOO", "Victim", "victim"]
