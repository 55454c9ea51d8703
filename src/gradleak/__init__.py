"""gradleak: what can a federated-learning server see of its clients' data?

    import gradleak as gl

Every public name loads its module on first use (PEP 562), so that `import gradleak` and `gradleak --help` cost next to
nothing. `__init__.pyi` tells type checkers and editors the same names; a test holds the two together.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradleak import compat

__version__ = "0.2.0.dev0"

__all__ = [
    # what is trained, and what the server sees of it
    "Task", "Field", "Batch", "Observation", "Track", "Knowledge",
    # the client, and what protects it
    "LocalTraining", "ClientState", "observe", "Defence", "Chain", "OnlyVisible", "Noiseless",
    "Upload", "Exposure", "Guarantee",
    # attacks
    "Attack", "Composed", "Stage", "TargetView", "Reconstruction", "Engine",
    # the experiment
    "Audit", "AuditResult", "Federation", "Study", "StudyResult",
    # modules
    "adapters", "assignment", "attacks", "audit", "auto", "checks", "curvature", "data", "defences", "federation",
    "flower", "gate", "generators", "identify", "kinds", "metrics", "models", "parts", "ray", "registry", "report",
    "rules", "secure", "tree",
]  # fmt: skip

# Where each name lives. A module that is not here is a folder or file of the package itself.
_homes = {
    "scenario.task": ("Task", "Field", "Batch"),
    "scenario.observation": ("Observation", "Track", "Knowledge"),
    "scenario.client": ("LocalTraining", "ClientState", "observe"),
    "scenario.defence": ("Defence", "Chain", "OnlyVisible", "Noiseless", "Upload"),
    "scenario.guarantee": ("Exposure", "Guarantee"),
    "attack": ("Attack", "Composed", "Reconstruction", "checks"),
    "parts.stage": ("Stage",),
    "parts.view": ("TargetView",),
    "engine": ("Engine",),
    "audit": ("Audit", "AuditResult", "gate"),
    "federation": ("Federation",),
    "curvature.study": ("Study", "StudyResult"),
    "core": ("assignment", "registry", "tree"),
    "scenario": ("rules", "kinds"),
}
_home = {name: home for home, names in _homes.items() for name in names}

compat.install()


def __getattr__(name: str) -> Any:
    if name in _home:
        home = f"gradleak.{_home[name]}"
        module = import_module(home)
        value = getattr(module, name) if hasattr(module, name) else import_module(f"{home}.{name}")
        globals()[name] = value  # the next look finds it without a call
        return value
    if (old := compat.attribute(name)) is not None:
        return old
    if not name.startswith("_") and find_spec(f"gradleak.{name}") is not None:
        return import_module(f"gradleak.{name}")
    raise AttributeError(f"module 'gradleak' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
