"""gradleak: what can a federated-learning server see of its clients' data?

    import gradleak as gl

The public names, grouped. Submodules that need more than torch and numpy load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gradleak import tree
from gradleak.attack import Attack, Composed, Reconstruction, Stage
from gradleak.defence import Chain, Defence, Noiseless, OnlyVisible, Upload
from gradleak.engine import Engine
from gradleak.guarantee import Exposure, Guarantee
from gradleak.local import ClientState, LocalTraining, observe
from gradleak.observation import Knowledge, Observation, Track
from gradleak.scene import Scene
from gradleak.task import Batch, Field, Task

__version__ = "0.1.0"

# Loaded on first use: `gl.attacks`, `gl.Audit`, ...
_modules: tuple[str, ...] = ("adapters", "analysis", "assignment", "attacks", "audit", "auto", "bench", "checks")
_modules += ("data", "defences", "distributed", "federation", "flower", "gate", "generators", "metrics", "models")
_modules += ("parts", "registry", "report", "results", "rules", "secure", "study")
_names = {"Audit": "audit", "AuditResult": "results", "Federation": "federation"}
_names |= {"Study": "study", "StudyResult": "study"}

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
    # arithmetic on parameters
    "tree",
    *_modules,
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _names:
        return getattr(import_module(f"gradleak.{_names[name]}"), name)
    if name in _modules:
        return import_module(f"gradleak.{name}")
    raise AttributeError(f"module 'gradleak' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
