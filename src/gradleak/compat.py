"""Import paths of release 0.1, kept for one release: the module `local` warns and gives `scenario.client`.

Remove this module, and its two uses in `__init__.py`, with release 0.3.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old module -> where its names are now, the first that has one. A module "a.b" covers "a.b.c" unless that is here too.
MOVED: dict[str, tuple[str, ...]] = {
    "accounting": ("scenario.accounting",),
    "analysis": ("identify", "curvature"),
    "analysis.identifiability": ("identify.certificates",),
    "analysis.local": ("identify.floors",),
    "assignment": ("core.assignment",),
    "cascade": ("attack.cascade",),
    "checks": ("attack.checks",),
    "defence": ("scenario.defence",),
    "distributed": ("ray",),
    "draws": ("core.random",),
    "environment": ("core.environment",),
    "gate": ("audit.gate",),
    "guarantee": ("scenario.guarantee",),
    "local": ("scenario.client",),
    "observation": ("scenario.observation",),
    "registry": ("core.registry",),
    "results": ("audit.result", "audit"),
    "rules": ("scenario.rules",),
    "scene": ("parts.view", "parts.protocols"),
    "study": ("curvature.study", "curvature"),
    "task": ("scenario.task",),
    "tree": ("core.tree",),
    "watching": ("core.listeners",),
}
RENAMED = {"Scene": "TargetView", "Now": "Step", "Together": "JointSpace", "Waves": "EscalatingRestarts"}


class _Forwarding(ModuleType):
    """A module of release 0.1: every name is looked up where it is now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        homes = self.__dict__["_homes"]
        for home in homes:
            module = importlib.import_module(f"gradleak.{home}")
            for spelling in (name, RENAMED.get(name, name)):
                if hasattr(module, spelling):
                    return getattr(module, spelling)
        now = " and ".join(f"gradleak.{home}" for home in homes)
        raise AttributeError(f"{self.__name__} is now {now}, where there is no {name!r}.")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("gradleak.") or _homes_of(fullname[len("gradleak.") :]) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Forwarding(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        homes = _homes_of(module.__name__[len("gradleak.") :])
        assert homes is not None  # it was found by that
        module.__dict__["_homes"] = homes
        now = " and ".join(f"gradleak.{home}" for home in homes)
        warnings.warn(
            f"{module.__name__} is now {now}; the old import path goes with release 0.3.",
            DeprecationWarning,
            stacklevel=_outside(),
        )


def _homes_of(old: str) -> tuple[str, ...] | None:
    """Where an old module is now; a module inside a moved folder is inside the new one, or beside it."""
    if old in MOVED:
        return MOVED[old]
    parent, _, leaf = old.rpartition(".")
    if parent not in MOVED:
        return None
    packages = {home if _is_package(home) else home.rpartition(".")[0] for home in MOVED[parent]}
    homes = [f"{package}.{leaf}" for package in sorted(packages)]
    found = tuple(home for home in homes if importlib.util.find_spec(f"gradleak.{home}") is not None)
    return found or None


def _is_package(home: str) -> bool:
    spec = importlib.util.find_spec(f"gradleak.{home}")
    return spec is not None and spec.submodule_search_locations is not None


def _outside() -> int:
    """The stack level of whoever wrote the import: importlib's own frames are left out."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and ("importlib" in frame.f_code.co_filename or frame.f_globals is globals()):
        level, frame = level + 1, frame.f_back
    return max(level - 1, 1)


def install() -> None:
    """After all other finders: only what is not found otherwise is looked up here."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
