"""A folder of what a server saw: observations, written tensor by tensor, and a line for every chosen client.

recording.json              software, strategy, and what its privacy wrappers prove
record.jsonl                one line per round and client: its status
round0001-nodeN.safetensors an Observation (docs/observations.md)

The folder can be as sensitive as the clients' data. Only its owner can read it.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from numpy.typing import NDArray

from gradleak.adapters import is_weight
from gradleak.flower.records import FlowerError, owners
from gradleak.scenario.observation import FORMAT, VERSION

SENSITIVE = (
    "Recorded observations can be as sensitive as the clients' data: an update may give its examples back. Keep the "
    "folder as the data are kept, and delete it after the audit."
)
_KINDS = {"float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "int16": "I16"}
_KINDS |= {"int8": "I8", "uint8": "U8", "bool": "BOOL"}  # NumPy's names, and those of safetensors
HEADER = 8  # bytes of the header's length; the header is padded to a multiple of it


class SensitiveRecording(UserWarning):
    """The recording can be as sensitive as the clients' data."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a file. `get(scratch)` returns its values, computed in that memory if they need any."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    get: Callable[[NDArray[np.uint8]], NDArray[Any]]

    @property
    def size(self) -> int:
        """Bytes."""
        return _bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Written:
    """A written file: seconds of computing, and of writing to the disk."""

    file: str
    seconds: float
    disk_seconds: float


class Recording:
    """The folder, made at the first line. If it holds another recording, FOLDER-2, FOLDER-3, ... is used."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.wanted = Path(folder)
        self._folder: Path | None = None
        self._warned = False

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        if self._folder is None:
            places = (self.wanted, *(self.wanted.with_name(f"{self.wanted.name}-{n}") for n in range(2, 10_000)))
            self._folder = next(place for place in places if not (place / "record.jsonl").exists())
        return self._folder

    def _ready(self) -> Path:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, mode=0o700)
        if not self._warned:
            with open(self.folder / "record.jsonl", "ab", opener=owners):
                pass  # from now on the folder is in use, even if the server dies before its first line
            self._warned = True
            warnings.warn(f"{SENSITIVE} ({self.folder})", SensitiveRecording, stacklevel=5)
        return self.folder

    def describe(self, about: Mapping[str, Any]) -> None:
        """Replace recording.json."""
        folder = self._ready()
        partial = folder / "recording.json.part"
        with open(partial, "w", encoding="utf-8", opener=owners) as file:
            file.write(json.dumps({**about, "sensitive": SENSITIVE}, indent=2) + "\n")
        os.replace(partial, folder / "recording.json")

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append lines. Only the last one can be cut off, if the process dies."""
        folder = self._ready()
        with open(folder / "record.jsonl", "ab", opener=owners) as file:
            file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    def write(self, stem: str, header: Mapping[str, Any], entries: Iterable[Entry]) -> Written:
        """Write an observation tensor by tensor: this needs memory for one tensor beyond what the server has."""
        name = f"{stem}.safetensors"
        seconds, disk = _stream(self._ready() / name, header, list(entries))
        return Written(name, seconds, disk)


def rows_of(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a recording, without one that was cut off."""
    path = Path(folder) / "record.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def entries_of(
    sent: ArrayRecord, returned: ArrayRecord, extras: Mapping[str, ArrayRecord], trained: frozenset[str] | None = None
) -> list[Entry]:
    """The tensors of an observation, from a model as it was sent and as it came back.

    `trained`: the names of trained tensors, if known. Everything but the numbers themselves is checked here.
    """
    if odd := sorted(sent.keys() ^ returned.keys()):
        raise FlowerError(f"the model that came back {'lacks' if odd[0] in sent else 'has an unknown'} {odd[0]!r}")
    for name, array in sent.items():
        if tuple(array.shape) != tuple(returned[name].shape):
            raise FlowerError(f"{name!r} came back as {tuple(returned[name].shape)}, and was {tuple(array.shape)}")
        if array.dtype not in _KINDS or returned[name].dtype not in _KINDS:
            raise FlowerError(f"{name!r} is {array.dtype}, which an observation cannot hold")
    weights = [
        name
        for name, array in sent.items()
        if (name in trained if trained is not None else is_weight(name, array.dtype.startswith("float")))
    ]
    if not weights:
        raise FlowerError("the model has no trained weights of floating point")
    entries = [_entry(f"weights/{name}", sent, name) for name in weights]
    entries += [_difference(f"update/{name}", sent, returned, name) for name in weights]
    others = [name for name in sent if name not in set(weights)]
    entries += [_entry(f"buffers/{name}", sent, name) for name in others]
    entries += [_entry(f"returned_buffers/{name}", returned, name) for name in others]
    for what, record in extras.items():
        entries += [_entry(f"extras/{what}/{name}", record, name) for name in record]
    return entries


def _entry(name: str, record: ArrayRecord, key: str) -> Entry:
    array = record[key]
    return Entry(name, array.dtype, tuple(array.shape), lambda scratch: _view(array))


def _difference(name: str, sent: ArrayRecord, returned: ArrayRecord, key: str) -> Entry:
    one, other = sent[key], returned[key]

    def difference(scratch: NDArray[np.uint8]) -> NDArray[Any]:
        a, b = _view(one), _view(other)
        return np.subtract(a, b, out=scratch[: a.nbytes].view(a.dtype).reshape(a.shape), casting="same_kind")

    return Entry(name, one.dtype, tuple(one.shape), difference)


def _view(array: Array) -> NDArray[Any]:
    """The array, read-only; without a copy if Flower's bytes are a plain .npy in C order.

    NumPy's parser of the header would take longer than all the rest, so the header is compared as bytes.
    """
    size, dtype = _bytes(array.dtype, tuple(array.shape)), np.dtype(array.dtype)
    head = array.data[:128] if array.stype == SType.NUMPY else b""
    begin = 10 + int.from_bytes(head[8:10], "little")  # magic, version 1.0 and the length of the header come first
    expected = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {tuple(array.shape)}, }}".encode()
    if head.startswith(b"\x93NUMPY\x01\x00" + head[8:10] + expected) and 0 < size == len(array.data) - begin:
        return np.frombuffer(array.data, dtype, offset=begin).reshape(array.shape)
    values = np.asarray(array.numpy())
    if values.shape != tuple(array.shape):
        raise FlowerError(f"an array of shape {values.shape} came where {tuple(array.shape)} was announced")
    return values


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.dtype(dtype).itemsize) * math.prod(shape)


def _stream(path: Path, header: Mapping[str, Any], entries: list[Entry]) -> tuple[float, float]:
    """Write a safetensors file without holding it in memory.

    The format (https://github.com/huggingface/safetensors, "Format"): the length of the header in 8 bytes, little
    endian; the header, a JSON object of name -> dtype, shape, begin and end; the bytes of all tensors, one by one.
    """
    began, disk, place = time.perf_counter(), 0.0, 0
    metadata = {"format": FORMAT, "version": str(VERSION), "observation": json.dumps(header)}
    table: dict[str, Any] = {"__metadata__": metadata}
    for entry in entries:
        span = [place, place := place + entry.size]
        table[entry.name] = {"dtype": _KINDS[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % HEADER)
    partial = path.with_name(path.name + ".part")
    try:
        with open(partial, "wb", opener=owners) as file:
            file.write(len(text).to_bytes(HEADER, "little") + text)
            for entry, values in _in_turn(entries):
                start = time.perf_counter()
                file.write(values.data if values.ndim else values.tobytes())
                disk += time.perf_counter() - start
                if values.nbytes != entry.size:
                    raise FlowerError(f"{entry.name} has {values.nbytes} bytes where {entry.size} were announced")
        start = time.perf_counter()
        os.replace(partial, path)  # a reader never sees half a file
        disk += time.perf_counter() - start
    finally:
        partial.unlink(missing_ok=True)
    return time.perf_counter() - began - disk, disk


def _in_turn(entries: list[Entry]) -> Iterator[tuple[Entry, NDArray[Any]]]:
    scratch = np.empty(max(entry.size for entry in entries), np.uint8)  # one for all: new memory is slow
    for entry in entries:
        values = np.ascontiguousarray(entry.get(scratch)).reshape(entry.shape)
        # Weights need no check: if they are not finite, neither are the updates.
        sent = entry.name.startswith("weights/")
        if not sent and values.dtype.kind == "f" and not np.isfinite(values.sum()) and not np.isfinite(values).all():
            raise FlowerError(f"{entry.name} holds NaN or infinity: the client's training diverged")
        yield entry, values
