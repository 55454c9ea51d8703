"""Lanes: targets and restarts as one tensor program (`lanes`), one stage of it (`search`), and layers made for it."""

from gradleak.engine.lanes import (
    Engine,
    Solved,
    activations,
    chunk_size,
    lanes_of,
    memory_of,
    moments_of,
    solve,
)
from gradleak.engine.search import EngineError, Search
from gradleak.parts.spaces import unknowns_of

__all__ = ["Engine", "EngineError", "Search", "Solved", "activations", "chunk_size", "lanes_of", "memory_of"]
__all__ += ["moments_of", "solve", "unknowns_of"]
