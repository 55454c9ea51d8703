"""gradleak: what can a federated-learning server see of its clients' data?

    import gradleak as gl

Every public name loads its module on first use (PEP 562), so that `import gradleak` and `gradleak --help` cost next to
nothing. `__init__.pyi` tells type checkers and editors the same names; a test holds the two together.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0"

__all__ = [
    # what is trained, and what the server sees of it
    "Task", "Field", "Batch", "Observation", "Track", "Knowledge",
    # the client, and what protects it
    "LocalTraining", "ClientState", "observe", "Defence", "Chain", "OnlyVisible", "Noiseless",
    "Upload", "Exposure", "Guarantee",
    # attacks
    "Attack", "Composed", "Stage", "Scene", "Reconstruction", "Engine",
    # the experiment
    "Audit", "AuditResult", "Federation", "Study", "StudyResult",
    # modules
    "adapters", "analysis", "assignment", "attacks", "audit", "auto", "checks", "data", "defences",
    "distributed", "federation", "flower", "gate", "generators", "metrics", "models", "parts", "registry", "report",
    "results", "rules", "secure", "study", "tree",
]  # fmt: skip

# Where each name lives. Names that are not here are modules.
_homes = {
    "task": ("Task", "Field", "Batch"),
    "observation": ("Observation", "Track", "Knowledge"),
    "local": ("LocalTraining", "ClientState", "observe"),
    "defence": ("Defence", "Chain", "OnlyVisible", "Noiseless", "Upload"),
    "guarantee": ("Exposure", "Guarantee"),
    "attack": ("Attack", "Composed", "Stage", "Reconstruction"),
    "scene": ("Scene",),
    "engine": ("Engine",),
    "audit": ("Audit",),
    "results": ("AuditResult",),
    "federation": ("Federation",),
    "study": ("Study", "StudyResult"),
}
_home = {name: home for home, names in _homes.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _home:
        found = getattr(import_module(f"gradleak.{_home[name]}"), name)
        globals()[name] = found  # the next look finds it without a call
        return found
    if not name.startswith("_") and find_spec(f"gradleak.{name}") is not None:
        return import_module(f"gradleak.{name}")
    raise AttributeError(f"module 'gradleak' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
