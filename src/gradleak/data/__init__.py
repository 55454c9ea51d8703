"""Real images by name, from a file, a folder or another library's data set, always in the same form: `Images`.

`cifar10-samples`, `faces`, `photographs`, `digits` and the like are files of an installed package (the package itself
is not imported). Every other name is searched in `$GRADLEAK_DATA/NAME.npz`, then in the full set that `get` fetched
into `cache_folder()`, then in `$GRADLEAK_DATA/mini/NAME_mini.npz`. `writers` gives images by writer, as the clients of
the multi-step papers have them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradleak.core.registry import UnknownName, did_you_mean
from gradleak.data.fetch import DataError, cache_folder, get
from gradleak.data.leaf import Writers, enhanced, is_leaf, open_leaf, pseudo_writers, writers
from gradleak.data.sources import SOURCES, Array, Pool, Size, Source, class_names, open_folder, open_npz, pixels

__all__ = ["SOURCES", "DataError", "Images", "Listing", "Source", "Writers", "available", "cache_folder", "enhanced"]
__all__ += ["from_dataset", "from_huggingface", "from_torchvision", "get", "load", "pseudo_writers", "writers"]


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images: `x` float32 (N, C, H, W) in [0, 1], `y` int64 (N,), one of `names` per class."""

    x: Tensor
    y: Tensor
    classes: int
    names: tuple[str, ...]
    source: str  # their origin, for people

    def __post_init__(self) -> None:
        def demand(holds: bool, message: str) -> None:
            if not holds:
                raise DataError(f"Images from {self.source}: {message}")

        x, y = self.x, self.y
        shape = tuple(x.shape)
        demand(x.dtype == torch.float32 and x.ndim == 4, f"x must be float32 (N, C, H, W), not {x.dtype} {shape}.")
        demand(
            y.dtype == torch.int64 and y.shape == x.shape[:1],
            f"y must be int64 ({len(x)},), not {y.dtype} {tuple(y.shape)}.",
        )
        demand(len(self.names) == self.classes, f"{len(self.names)} class names for {self.classes} classes.")
        if not x.numel():
            return
        low, high = x.min().item(), x.max().item()  # a NaN anywhere makes both NaN and fails here too
        demand(
            low >= 0 and high <= 1,
            f"values run from {low:.3g} to {high:.3g}, not within [0, 1]. Give raw pixels; remove Normalize.",
        )
        least, most = int(y.min()), int(y.max())
        demand(
            least >= 0 and most < self.classes,
            f"labels run from {least} to {most}, not within 0 .. {self.classes - 1}.",
        )

    def __repr__(self) -> str:  # never the pixels: they are private
        sizes = "x".join(str(side) for side in self.x.shape[1:])
        return f"Images({len(self)} of {sizes}, {self.classes} classes, {self.source!r})"

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> Images:
        """Some of the images, as `Images`; one index gives one image, still with its leading dimension."""
        chosen = rows if isinstance(rows, slice) else torch.as_tensor(rows, device=self.x.device).reshape(-1)
        if isinstance(chosen, Tensor) and not chosen.numel():
            chosen = chosen.long()  # torch makes an empty list a float tensor
        return replace(self, x=self.x[chosen], y=self.y[chosen])

    def batch(self, indices: int | slice | Sequence[int] | Tensor) -> dict[str, Tensor]:
        """The private tensors of one client: `{"x": ..., "y": ...}`."""
        chosen = self[indices]
        return {"x": chosen.x, "y": chosen.y}


@dataclass(frozen=True)
class Listing:
    """One line of `available()`."""

    name: str
    description: str
    licence: str
    location: Path | None  # None: not on this machine
    advice: str  # how to get it; empty if it is there

    @property
    def present(self) -> bool:
        return self.location is not None


def available() -> tuple[Listing, ...]:
    """Every name that `load` knows, whether it is on this machine and, if not, how to get it."""

    def listing(name: str, source: Source) -> Listing:
        place = source.where()
        return Listing(name, source.description, source.licence, place, "" if place else source.needs)

    return tuple(listing(name, source) for name, source in SOURCES.items())


def load(
    name_or_path: str | os.PathLike[str],
    *,
    split: str | None = None,
    size: Size | None = None,
    limit: int | None = None,
) -> Images:
    """Images by name (see `available`), from a `.npz` (train_x/train_y/test_x/test_y or x/y), a folder, or LEAF files.

    split: "train" or "test"; None: the training part if the source has parts, else everything. If the source has no
        parts, every fifth image is "test".
    size: side, or (height, width): images are cropped centrally to that shape and resized.
    limit: the most images, taken from each class in turn, so that few images still cover many classes.
    """
    name = os.fspath(name_or_path)
    if split not in (None, "train", "test"):
        raise DataError(f"split is {split!r}. Give 'train', 'test' or None.")
    source = SOURCES.get(name)
    if source is not None:
        place = source.where()
        if place is None:
            folder = os.environ.get("GRADLEAK_DATA") or "not set"
            raise DataError(f"{name!r} is not on this machine: {source.needs}. (GRADLEAK_DATA is {folder}.)")
        provenance = f"{name}: {source.description}, from {place.parent.name}/{place.name}"
        return _images(source.open(place, split), provenance, split, source.size if size is None else size, limit)
    path = Path(name).expanduser()
    if is_leaf(path):
        return _images(open_leaf(path, split), name, split, size, limit)
    if path.is_dir():
        return _images(open_folder(path, split), name, split, size, limit)
    if path.is_file() and path.suffix == ".npz":
        return _images(open_npz(path, split), name, split, size, limit)
    if path.exists():
        raise DataError(f"{name} is neither a .npz file nor a folder of images. Give one of those, or a name.")
    if path.suffix or len(path.parts) > 1:
        raise DataError(f"There is no file or folder {name} (looked from {Path.cwd()}).")
    raise UnknownName(f"Unknown data {name!r}: neither a name nor a path.{did_you_mean(name, SOURCES)}")


def from_dataset(
    dataset: Any,
    *,
    names: Sequence[str] | None = None,
    source: str = "",
    size: Size | None = None,
    limit: int | None = None,
) -> Images:
    """Images from any sequence of (image, label); an image is a PIL picture, or a uint8 or float tensor or array.

    Labels come from the set's `targets` or `labels`; if it has neither, every item is read once for its label.
    """
    source = source or type(dataset).__name__
    try:
        stored = [getattr(dataset, key) for key in ("targets", "labels") if hasattr(dataset, key)]
        if stored and getattr(dataset, "target_transform", None) is None:  # it would change what is stored
            labels = np.asarray(stored[0])
        else:
            labels = np.asarray([dataset[row][1] for row in range(len(dataset))])
        known = class_names(names or getattr(dataset, "classes", None), labels, source)
        pool = Pool(labels, lambda rows: [pixels(dataset[int(row)][0]) for row in rows], known)
        return _images(pool, source, None, size, limit)
    except (ImportError, RuntimeError, OSError) as problem:  # torchvision raises RuntimeError when its build is broken
        raise DataError(f"{source} could not be read: {problem}. Check its installation and its files.") from problem


def from_torchvision(dataset: Any, *, size: Size | None = None, limit: int | None = None) -> Images:
    """Images from a torchvision data set, built without Normalize (no transform, or ToTensor)."""
    return from_dataset(dataset, source=f"torchvision {type(dataset).__name__}", size=size, limit=limit)


def from_huggingface(
    dataset: Any,
    *,
    image: str | None = None,
    label: str | None = None,
    size: Size | None = None,
    limit: int | None = None,
) -> Images:
    """Images from one split of a Hugging Face data set; columns are found by type, or named by the caller."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping):
        raise DataError(f"{type(dataset).__name__} has no features. Give one split, as in load_dataset(name)['train'].")

    def column(wanted: str | None, kind: str) -> str:
        matching = [
            key for key, feature in features.items() if (key == wanted if wanted else type(feature).__name__ == kind)
        ]
        if not matching:
            sought = repr(wanted) if wanted else f"of type {kind}"
            raise DataError(f"No column {sought}. Give image= and label=. Columns: {', '.join(features)}.")
        return matching[0]

    image, label = column(image, "Image"), column(label, "ClassLabel")
    source = f"Hugging Face {getattr(getattr(dataset, 'info', None), 'dataset_name', None) or type(dataset).__name__}"
    try:
        labels = np.asarray(list(dataset[label]))
        names = class_names(getattr(features[label], "names", None), labels, source)
        pool = Pool(labels, lambda rows: [pixels(dataset[int(row)][image]) for row in rows], names)
        return _images(pool, source, None, size, limit)
    except (ImportError, RuntimeError, OSError) as problem:
        raise DataError(f"{source} could not be read: {problem}. Columns: {', '.join(features)}.") from problem


# ---- from a pool to Images


def _images(pool: Pool, source: str, split: str | None, size: Size | None, limit: int | None) -> Images:
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}. Give at least 1, or None for all.")
    labels = pool.labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{source}: labels must be whole numbers, one per image, not {labels.dtype} {labels.shape}.")
    rows = np.arange(len(labels))
    if split is not None and not pool.divided:
        rows = rows[(rows % 5 == 4) == (split == "test")]
    if limit is not None:
        rows = rows[_in_turn(labels[rows])[:limit]]
    if not len(rows):
        raise DataError(f"{source} holds no images{f' in split {split!r}' if split else ''}.")
    read = pool.read(rows)
    stacks = [read] if isinstance(read, np.ndarray) else (image[None] for image in read)
    parts = [_reduced(_floats(stack, source), size) for stack in stacks]
    shapes = {tuple(part.shape[2:]) for part in parts}
    if len(shapes) > 1:
        some = ", ".join(f"{height}x{width}" for height, width in sorted(shapes)[:4])
        raise DataError(f"{source}: images differ in size ({some}, ...). Give size=.")
    channels = max(part.shape[1] for part in parts)
    parts = [part.expand(-1, channels, -1, -1) if part.shape[1] == 1 else part for part in parts]  # grey among colour
    x = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
    y = torch.from_numpy(labels[rows].astype(np.int64))
    return Images(x, y, len(pool.names), pool.names, source)


def _in_turn(labels: Array) -> Array:
    """Row numbers in which every class comes once before any comes twice; otherwise the order stays."""
    place_in_class = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        place_in_class[members] = np.arange(len(members))
    return np.argsort(place_in_class, kind="stable")


def _floats(images: Array, source: str) -> Tensor:
    """(N, C, H, W) float32 in [0, 1] from uint8 (N, H, W[, C]) or float (N, C, H, W)."""
    if images.dtype == np.uint8 and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))):
        channels_last = torch.from_numpy(np.array(images if images.ndim == 4 else images[..., None]))
        return channels_last.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    if images.dtype.kind == "f" and images.ndim == 4 and images.shape[1] in (1, 3):
        return torch.from_numpy(np.array(images, dtype=np.float32))  # a copy: the caller's pixels stay the caller's
    raise DataError(
        f"{source}: images are {images.dtype} {images.shape}. "
        "Give uint8 (N, H, W, C) or float (N, C, H, W) in [0, 1], with C = 1 or 3."
    )


def _reduced(x: Tensor, size: Size | None) -> Tensor:
    """Cropped centrally to the shape of `size` and resized to it; None: unchanged."""
    if size is None:
        return x
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1:
        raise DataError(f"size is {size}. Give a side, or (height, width), of at least one pixel.")
    scale = min(x.shape[2] / height, x.shape[3] / width)
    crop = (max(1, round(height * scale)), max(1, round(width * scale)))
    top, side = (x.shape[2] - crop[0]) // 2, (x.shape[3] - crop[1]) // 2
    x = x[:, :, top : top + crop[0], side : side + crop[1]]
    if crop == (height, width):
        return x
    smooth = torch.nn.functional.interpolate(x, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return smooth.clamp_(0, 1)
