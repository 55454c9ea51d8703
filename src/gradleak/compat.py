"""Import paths and names of release 0.1, kept for one release: `gradleak.local` warns and gives `scenario.client`.

Remove this module, and its uses in `__init__.py`, with release 0.3.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# New folder: the old modules whose names are there now. "old=new" where the file has another name, "old=" where the
# folder itself has the names. An old module may appear twice: its names are looked up in that order.
_MOVED = """
attack: cascade checks
attacks: attacks.span=spans.denoisers
attacks.dlfa: parts.checkpointed parts.epochs
attacks.fedleak: parts.blended
attacks.generative: attacks.ggl attacks.gias attacks.gifd parts.cma parts.latent parts.projections
attacks.gidm: parts.sampled
attacks.second_order: parts.chain parts.krylov parts.peeling parts.quadratic parts.smoothing
attacks.sign_matching: parts.cohorts
audit: audit.ablation=assumptions gate report.reconstruction=output results=result results=
  results.certificate=summary results.comparison results.headline=verdict results.intervals
  results.junit=formats results.labels=rows results.ledger=assumptions
  results.notebook=formats results.rows results.ruling results.schema=rows results.scoring results.store
  results.summary results.tables=formats results.verdict
auto: auto.again=second_look auto.case=traits
core: assignment draws=random environment environment=durations linear metrics.similarity recompute registry tree
  watching=listeners
  report.pictures results.code results.configuration results=files results.rows=files results.resumable=folder
  results.resumable=files
curvature: analysis.association analysis.ball analysis.channel analysis.gradcam analysis.hessian analysis.index
  analysis.information analysis.lanczos analysis.point analysis.spectrum report.study=page study study= study.folder
  study.leakage study.measure study.result
defences: gradcam
engine: convolution layers search
identify: analysis= analysis.identifiability=certificates analysis.identifiability=floors analysis.local=floors
  analysis.recipe analysis.risk analysis.rounding
parts: parts.spans=row_space scene=view scene=protocols
parts.labels: parts.label_counts=counts parts.label_readings=readings parts.llg parts.sign_labels=signs
priors: generators.augmentation generators.discriminators generators.game=trainer generators.recipes generators.score
  generators.splits generators.training
report: report.certificate=proofs
scenario: accounting audit.probe=probe defence dropout guarantee inspection local=client observation rules task
scenario.inspection: inspection.batch inspection.model inspection.objective inspection.subject
"""
# Old class or function -> its name now; with its module where others had the name too. Several: the first there is.
RENAMED = {
    "analysis.association.Estimate": "IntervalEstimate",
    "analysis.lanczos.Lanczos": "LanczosRun",
    "analysis.spectrum.Estimate": "SampleMean",
    "attacks.analytic.Evaluate": "Still",
    "audit.recorded.told": "replay_text",
    "auto.again.looked_again": "reconsidered_case",
    "data.fetch.Progress": "BytesReceived",
    "Game": "GANTrainer",
    "Gathered": "SpreadRule",
    "HELD_AGAINST": "COMPARED",
    "Held": "CoarseRule",
    "ISSUED": "IN_TERMINAL",
    "Measured": "Measurement",
    "Now": "Step",
    "parts.matches.Difference": "Match",
    "parts.spans.shown": "as_sent",
    "parts.spans.telling": "spanning_layers",
    "recompute.Step": "StepFunction",
    "results.labels.record": "guarantee_record",
    "results.notebook.shown": "notebook_of",
    "scene.Problem": "LaneObjective",  # that of Task.check keeps its name
    "search.LaneProblem": "StageObjective",
    "study.told": "format_row",
    "Scene": "TargetView",
    "Sent": "GradientAtStart",
    "Together": "JointSpace",
    "told_apart": "distinct_names",
    "Waves": "EscalatingRestarts",
}
# Modules that stayed, and where names that they lost are now.
_LOST = {
    "attack": ("parts.stage", "scenario.fit", "core.listeners"),
    "attacks.analytic": ("parts.optimisers",),
    "audit": ("audit.grid", "auto.defaults"),
    "audit.recorded": ("audit.recorded",),
    "data.fetch": ("data.fetch",),
    "data.leaf": ("federation.partition",),
    "engine": ("engine.lanes",),
    "defences.noise": ("defences.settings",),
    "parts.coarse": ("parts.coarse",),
    "parts.matches": ("parts.protocols",),
    "parts.spaces": ("parts.spaces",),
    "parts.surrogates": ("parts.surrogates", "attacks.sme"),
}
_GONE = {
    "bench": "Benchmarks are outside the package now: run `python -m benchmarks` in a clone of the repository.",
    "analysis.trajectory": "It serves one paper and is beside it now: papers/nl_sme/trajectory.py.",
}


def _homes() -> dict[str, tuple[str, ...]]:
    homes: dict[str, tuple[str, ...]] = {"distributed": ("ray",), "analysis": ("identify", "curvature")}
    for entry in _MOVED.strip().replace("\n  ", " ").splitlines():
        folder, _, modules = entry.partition(": ")
        for module in modules.split():
            old, equals, new = module.partition("=")
            name = new if equals else old.rpartition(".")[2]
            homes[old] = tuple(dict.fromkeys((*homes.get(old, ()), f"{folder}.{name}".rstrip("."))))
    return homes


MOVED = _homes()
"""Old module -> the modules that have its names now, without `gradleak.`."""


def _lookup(module: ModuleType, homes: tuple[str, ...], name: str) -> Any:
    """A name of release 0.1, from the first home that has it."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    modules = [import_module(f"gradleak.{home}") for home in homes]
    if name == "__all__":  # for `from gradleak.task import *`
        return [each for home in modules for each in getattr(home, "__all__", vars(home)) if not each.startswith("_")]
    old = f"{module.__name__.removeprefix('gradleak.')}.{name}"
    spellings = [RENAMED[old]] if old in RENAMED else [name, RENAMED.get(name, name)]
    for home in modules:
        for spelling in spellings:
            if spelling in vars(home):
                _warn(f"{module.__name__}.{name}", f"{home.__name__}.{spelling}")
                return vars(home)[spelling]
    raise AttributeError(f"{module.__name__} has no {name!r}; its names are in {_spelled(homes)} now.")


def _spelled(homes: tuple[str, ...]) -> str:
    return " and ".join(f"gradleak.{home}" for home in homes)


def _warn(old: str, new: str) -> None:
    """Point at the line that wrote the old name: frames of importlib and of our own two modules are skipped."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        "importlib" in frame.f_code.co_filename or frame.f_globals.get("__name__") in (__name__, "gradleak")
    ):
        frame = frame.f_back
    place = frame.f_globals
    warnings.warn_explicit(
        f"{old} is now {new}. The old spelling goes with release 0.3.",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=place.get("__name__", "<unknown>"),
        registry=place.setdefault("__warningregistry__", {}),
    )


class _OldModule(Loader):
    """An empty module that looks every name up where it is now."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix("gradleak.")
        module.__dict__["__getattr__"] = partial(_lookup, module, MOVED[name])
        _warn(module.__name__, _spelled(MOVED[name]))
        if name in sys.modules["gradleak"].__all__:  # `gl.tree` stays: the import must not put an old module there
            sys.modules[module.__name__] = import_module(f"gradleak.{MOVED[name][0]}")


class _OldNames(SourceFileLoader):
    """A module that stayed, with a look at the homes of the names that it lost."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        homes = _LOST[module.__name__.removeprefix("gradleak.")]
        module.__dict__["__getattr__"] = partial(_lookup, module, homes)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "gradleak":
            return None
        if name in MOVED:
            inside = any(old.startswith(f"{name}.") for old in MOVED)
            return ModuleSpec(fullname, _OldModule(), is_package=inside)
        if name in _LOST:
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and type(spec.loader) is SourceFileLoader:
                spec.loader = _OldNames(spec.loader.name, spec.loader.path)
            return spec
        if name in _GONE and PathFinder.find_spec(fullname, path) is None:
            raise ModuleNotFoundError(f"There is no {fullname} any more. {_GONE[name]}", name=fullname)
        return None


def attribute(name: str) -> Any:
    """`gradleak.name` of release 0.1: a module that moved or a class with another name; None for other names."""
    if name in MOVED or name in _GONE:
        return import_module(f"gradleak.{name}")
    return getattr(import_module("gradleak.scene"), name) if name == "Scene" else None


def install() -> None:
    """Before all other finders: an old name is never also a new one."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
