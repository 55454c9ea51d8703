"""References to Python objects: `FILE.py:NAME` and `module:NAME`.

A reference runs the file it names, as `python FILE.py` would (with `__name__` other than "__main__"): give only files
that you would run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gradleak.cli.root import LoadError
from gradleak.core.registry import did_you_mean

BUILTIN = "builtin"  # the task of commands without any argument
MOST_NAMES = 40  # of a module that an error message lists


def is_reference(text: str) -> bool:
    """Is this `FILE.py`, `FILE.py:NAME` or `module:NAME`, rather than a registered name or a path to data?"""
    place, colon, name = text.rpartition(":")
    return text.endswith(".py") or (bool(colon) and name.isidentifier() and (place.endswith(".py") or _dotted(place)))


def stem(reference: str) -> str:
    """A name for the folder of a run: `train.py:task` -> `train`, `ddpm:base=32` -> `ddpm`; nothing: `builtin`."""
    place = reference.rpartition(":")[0] if is_reference(reference) else reference.partition(":")[0]
    return Path(place or reference or BUILTIN).stem


def load_object(reference: str, default: str) -> Any:
    """The object of a reference; `default`: its name if none is given. A function is called without arguments."""
    place, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():  # also C:\train.py, where the colon belongs to the path
        place, name = reference, default
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place, reference)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        hint = did_you_mean(name, public) if len(public) <= MOST_NAMES else ""
        raise LoadError(f"{place} has no {name!r}.{hint}")
    value = getattr(module, name)
    return _run_user_code(value, place) if inspect.isfunction(value) else value


def _dotted(text: str) -> bool:
    return bool(text) and all(part.isidentifier() for part in text.split("."))


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LoadError(f"There is no file {path} (looked from {Path.cwd()}).")
    path = path.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the file may import its neighbours, as when Python runs it
    name = f"gradleak_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    loader = spec.loader
    _run_user_code(lambda: loader.exec_module(module), str(path))
    return module


def _from_name(name: str, reference: str) -> ModuleType:
    if not _dotted(name):
        raise LoadError(f"{reference!r} names neither a file nor a module. Write FILE.py:NAME, such as train.py:task.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise LoadError(f"There is no module {name!r} (for {reference!r}). For a file, write FILE.py:NAME.")
    module = _run_user_code(lambda: importlib.import_module(name), name)
    assert isinstance(module, ModuleType)
    return module


def _run_user_code(run: Callable[[], Any], place: str) -> Any:
    """Run the user's code; whatever it raises becomes one message that says where in the user's file it happened."""
    try:
        return run()
    except (Exception, SystemExit) as problem:
        frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
        user_frames = [frame for frame in frames if Path(frame.filename).name == Path(place).name]
        last_line = user_frames[-1].lineno if user_frames else None
        line = problem.lineno if isinstance(problem, SyntaxError) else last_line
        where = f"{place}, line {line}" if line else place
        raise LoadError(f"{where} raised {type(problem).__name__}: {problem}") from problem
