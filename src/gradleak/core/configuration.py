"""A stable description of what was configured: equal settings give equal text, on every machine and in every process.

`repr` does not: it prints addresses of functions and rounds tensors. Users' own code is described by its byte code too
(code.py), which is equal only under the same version of Python.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradleak.core.code import code_of, code_text, is_foreign


def digest(value: Any) -> str:
    """16 hexadecimal digits that name a configuration."""
    text = json.dumps(described(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def described(value: Any) -> Any:
    """Plain JSON that tells two configurations apart. Tensors and networks are named by a hash of their contents."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return repr(value)  # JSON has no infinities
    for kind, describe in _DESCRIPTIONS:
        if isinstance(value, kind):
            return describe(value)
    names = [f.name for f in fields(value)] if is_dataclass(value) else getattr(value, "__dict__", {})
    return {"": _class(type(value)), **{name: described(getattr(value, name)) for name in names}}


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _class(value: type) -> Any:
    """By name, and by the code of its methods where a user wrote some."""
    return [_name(value), *code] if (code := code_of(*value.__mro__)) else _name(value)


def _function(value: FunctionType) -> Any:
    """By name, by what its closure holds, and, for a user's function or a lambda, by its code."""
    closure = [described(cell.cell_contents) for cell in value.__closure__ or () if cell.cell_contents is not value]
    defaults = described([value.__defaults__, value.__kwdefaults__])
    # Names identify our own functions, all but lambdas.
    lambdas = code_text(value.__code__) if "<" in value.__qualname__ else ""
    code = code_of(value) if is_foreign(value) else lambdas
    return {"": _name(value), "closure": closure, "defaults": defaults, "code": code}


def _tensor(value: Tensor) -> str:
    plain = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # one element may keep a stride
    content = hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return f"{plain.dtype} {tuple(plain.shape)} {content}"


def _module(value: nn.Module) -> Any:
    training = [name for name, module in value.named_modules() if module.training]
    frozen = [name for name, parameter in value.named_parameters() if not parameter.requires_grad]
    code = code_of(*dict.fromkeys(type(module) for module in value.modules()))
    state = described(dict(value.state_dict()))
    return {"": str(value), "training": training, "frozen": frozen, "state": state, "code": code}


# The first that fits.
_DESCRIPTIONS: tuple[tuple[Any, Any], ...] = (
    (Tensor, _tensor),
    (nn.Module, _module),
    (FunctionType, _function),
    (MethodType, lambda value: [described(value.__self__), _name(value.__func__)]),
    (BuiltinFunctionType, lambda value: f"{value.__module__}.{value.__name__}"),
    (functools.partial, lambda value: described([value.func, value.args, value.keywords])),
    (type, _class),
    ((torch.dtype, torch.device), str),
    (np.ndarray, lambda value: [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()[:16]]),
    (Mapping, lambda value: {str(name): described(member) for name, member in value.items()}),
    ((set, frozenset), lambda value: sorted(json.dumps(described(member), sort_keys=True) for member in value)),
    (Sequence, lambda value: [described(member) for member in value]),
)


# --- TOML -----------------------------------------------------------------------------------------------------------


def to_toml(settings: Mapping[str, Any], comment: str = "") -> str:
    """Nested tables as text, without None: TOML has no such value."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]

    def table(name: str, entries: Mapping[str, Any]) -> None:
        if name:
            lines.extend(["", f"[{name}]"])
        inner = {key: value for key, value in entries.items() if isinstance(value, Mapping)}
        lines.extend(
            f"{_key(key)} = {_toml(value)}" for key, value in entries.items() if key not in inner and value is not None
        )
        for key, value in inner.items():
            table(f"{name}.{_key(key)}" if name else _key(key), value)

    table("", settings)
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):  # an entry of a list
        return f"{{{', '.join(f'{_key(key)} = {_toml(entry)}' for key, entry in value.items() if entry is not None)}}}"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return repr(value)  # int and float: TOML spells them as Python does


def from_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; also on Python 3.10, which has no tomllib."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads(text)
