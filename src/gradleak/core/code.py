"""What a user's functions and classes do, as plain text: an edited body is another configuration.

A name is not enough: an edited `forward` keeps its name. Code of torch, numpy, gradleak and the standard library counts
by its module name only. Other code is followed through the functions, classes and constants that it uses; in installed
packages only the objects themselves are read. Docstrings, comments and line numbers do not count. The text depends on
the byte code, and so on the version of Python.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor

KNOWN = frozenset({"torch", "numpy", "gradleak", *sys.stdlib_module_names} - {"__main__", "__mp_main__", "this"})


def is_foreign(value: Any) -> bool:
    """Was this function or class written outside torch, numpy, gradleak and the standard library?"""
    return str(value.__module__).partition(".")[0] not in KNOWN


def code_of(*roots: Any) -> list[str]:
    """One line for every foreign function and class that these use, each once, in alphabetical order."""
    waiting = [part for root in roots for part in _parts(root)]
    visited: set[int] = set()
    lines: set[str] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in visited or not is_foreign(value):
            continue
        visited.add(id(value))
        used = dict(_members(value) if isinstance(value, type) else _used(value))
        if isinstance(value, type):
            waiting += value.__mro__[1:]
            body = ""
        else:
            body = code_text(value.__code__, value.__doc__)
        waiting += [part for member in used.values() for part in _parts(member)]
        plain = sorted(f"{name}={text}" for name, member in used.items() if (text := _plain(member)) is not None)
        lines.add(f"{value.__module__}.{value.__qualname__} {body} {hashlib.sha256(repr(plain).encode()).hexdigest()}")
    return sorted(lines)


def code_text(code: CodeType, doc: str | None = None) -> str:
    """A hash of what a function does: its instructions, the constants and names that they use, inner functions too."""
    constants = [
        code_text(constant) if isinstance(constant, CodeType) else _plain(constant)
        for constant in code.co_consts
        if doc is None or constant != doc
    ]
    names = (code.co_names, code.co_freevars, code.co_cellvars, code.co_argcount, code.co_kwonlyargcount, code.co_flags)
    return hashlib.sha256(repr((code.co_code.hex(), constants, names)).encode()).hexdigest()


def _parts(value: Any) -> list[Any]:
    """The functions and classes in a value that wraps some."""
    if isinstance(value, (FunctionType, type)):
        return [value]
    if isinstance(value, property):
        return [part for accessor in (value.fget, value.fset) for part in _parts(accessor)]
    if isinstance(value, functools.partial):
        return [part for bound in (value.func, *value.args, *value.keywords.values()) for part in _parts(bound)]
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return _parts(value.__func__)
    if isinstance(value, functools.cached_property):
        return _parts(value.func)
    return _parts(value.__wrapped__) if isinstance(value, functools._lru_cache_wrapper) else []


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods and class attributes, without the methods that a dataclass generates: they follow from its fields."""
    for name, member in vars(kind).items():
        special = name.startswith("__")
        code = getattr(member, "__code__", None)
        generated = special and "__dataclass_fields__" in vars(kind) and getattr(code, "co_filename", "") == "<string>"
        method = isinstance(member, (FunctionType, staticmethod, classmethod))
        if not generated and not name.startswith("__annotate") and (method or not special):
            yield name, member


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Defaults, what the closure holds and, outside installed packages, the globals that it names."""
    yield from ((f"default {index}", value) for index, value in enumerate(function.__defaults__ or ()))
    yield from ((f"default {name}", value) for name, value in (function.__kwdefaults__ or {}).items())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"closure {name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    filename = function.__code__.co_filename
    if "site-packages" in filename or "dist-packages" in filename:
        return
    for name in _names(function.__code__):
        if name in function.__globals__ and not name.startswith("__"):
            yield f"global {name}", function.__globals__[name]


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _plain(value: Any) -> str | None:
    """The text of a value that cannot change by itself; None for others, such as lists that collect."""
    if value is None or value is ... or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(str(_plain(member)) for member in value)})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(str(_plain(member)) for member in value))}}}"
    if isinstance(value, (Tensor, np.ndarray)):
        from gradleak.core.configuration import described

        return repr(described(value))
    return None
