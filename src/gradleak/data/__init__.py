"""Real data by name, from a file, a folder or another library's data set: `Images`, `Records` of a table, `Texts`.

`cifar10-samples`, `faces`, `photographs`, `digits` and the like are files of an installed package (the package itself
is not imported), and so are the tables `breast-cancer`, `wine` and `diabetes`; the texts `moby-dick-samples` are a file
of this one. Every other name is searched in
`$GRADLEAK_DATA/NAME.npz`, then in the full set that `get` fetched into `cache_folder()`, then in
`$GRADLEAK_DATA/mini/NAME_mini.npz`. `writers` gives images by writer, as the clients of the multi-step papers have
them; `from_loader` reads a DataLoader.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradleak.core.registry import UnknownName, did_you_mean
from gradleak.core.settings import takes
from gradleak.data.fetch import DataError, cache_folder, get
from gradleak.data.leaf import Writers, enhanced, is_leaf, open_leaf, pseudo_writers, writers
from gradleak.data.loaders import fields_of, from_loader
from gradleak.data.records import RawTable, Records, TableSpec, encode, selected
from gradleak.data.sources import SOURCES, Array, Pool, Size, Source, class_names, open_folder, open_npz, pixels
from gradleak.data.tables import (
    PARQUET_FILES,
    SUFFIXES,
    TABLES,
    TableSource,
    open_csv,
    open_huggingface,
    open_parquet,
)
from gradleak.data.texts import TEXT_SUFFIXES, TEXTS, Texts, TextSource, texts

__all__ = ["SOURCES", "DataError", "Images", "Listing", "Source", "Writers", "available", "cache_folder", "enhanced"]
__all__ += ["from_dataset", "from_huggingface", "from_loader", "from_torchvision", "get", "is_huggingface", "load"]
__all__ += ["TABLES", "Records", "TableSource", "TableSpec", "fields_of", "load_images", "pseudo_writers", "writers"]
__all__ += ["TEXTS", "TextSource", "Texts", "texts"]


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
        chosen = selected(rows, self.x.device)
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

    def listing(name: str, source: Source | TableSource | TextSource) -> Listing:
        place = source.where()
        return Listing(name, source.description, source.licence, place, "" if place else source.needs)

    return tuple(listing(name, source) for name, source in _NAMES.items())


Labelled = TypeVar("Labelled", Records, Texts)

_NAMES: dict[str, Source | TableSource | TextSource] = {**SOURCES, **TABLES, **TEXTS}


@takes(TableSpec)
def load(
    name_or_path: str | os.PathLike[str],
    *,
    split: str | None = None,
    size: Size | None = None,
    limit: int | None = None,
    tokenizer: Any = None,
    table: TableSpec,
) -> Images | Records | Texts:
    """Images, a table or texts by name (see `available`) or from files.

    Images: a `.npz` (train_x/train_y/test_x/test_y or x/y), a folder, or LEAF files. Tables: `.csv`, `.tsv`,
    `.parquet`; which column is what is said by target, columns, classes, missing and bounds (`TableSpec`). Texts: a
    `.txt` with one text a line or, with a tokenizer, a CSV whose target is the label (`texts`).

        load("people.csv", target="income", columns="id:drop,zip:category")

    split: "train" or "test"; None: the training part if the source has parts, else everything. If the source has no
        parts, every fifth example is "test".
    size: side, or (height, width): images are cropped centrally to that shape and resized.
    limit: the most examples, taken from each class in turn, so that few examples still cover many classes.
    tokenizer: of texts: has encode(text), or "bytes" (`texts`).
    """
    name = os.fspath(name_or_path)
    if split not in (None, "train", "test"):
        raise DataError(f"split is {split!r}. Give 'train', 'test' or None.")
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}. Give at least 1, or None for all.")
    path = Path(name).expanduser()
    if name in TEXTS or path.suffix.lower() in TEXT_SUFFIXES or tokenizer is not None:
        if size is not None:
            raise DataError(f"{name} holds texts; size (--size) is for images.")
        return _limited_texts(_texts(name, tokenizer, table), split, limit)
    if name not in SOURCES and (name in TABLES or (path.suffix.lower() in SUFFIXES and path.is_file())):
        if size is not None:
            raise DataError(f"{name} is a table; size (--size) is for images.")
        raw, source = _raw_table(name, path, table)
        return _limited(encode(raw, table, source, split), split, limit)
    images = _load_images(name, split, size, limit)
    stated = sorted(_stated(table))
    if stated and stated != ["classes"] or table.regression:
        raise DataError(f"{stated[0]} (--{stated[0]}) is for tables (.csv, .parquet); {name} holds images.")
    return images if table.count is None else _with_classes(images, table.count)


def load_images(
    name_or_path: str | os.PathLike[str],
    *,
    split: str | None = None,
    size: Size | None = None,
    limit: int | None = None,
) -> Images:
    """`load`, where only images will do."""
    loaded = load(name_or_path, split=split, size=size, limit=limit)
    if isinstance(loaded, Images):
        return loaded
    kind = "holds texts" if isinstance(loaded, Texts) else "is a table"
    raise DataError(f"{os.fspath(name_or_path)} {kind}; images are wanted here.")


def _load_images(name: str, split: str | None, size: Size | None, limit: int | None) -> Images:
    source, path = SOURCES.get(name), Path(name).expanduser()
    if source is not None:
        place = _place(name, source)
        provenance = f"{name}: {source.description}, from {place.parent.name}/{place.name}"
        return _images(source.open(place, split), provenance, split, source.size if size is None else size, limit)
    if is_leaf(path):
        return _images(open_leaf(path, split), name, split, size, limit)
    if path.is_dir():
        return _images(open_folder(path, split), name, split, size, limit)
    if path.is_file() and path.suffix == ".npz":
        return _images(open_npz(path, split), name, split, size, limit)
    if path.exists():
        raise DataError(
            f"{name} is neither a .npz file nor a folder of images, nor a table ({', '.join(SUFFIXES)}) or texts "
            f"({', '.join(TEXT_SUFFIXES)}). Give one of those, or a name."
        )
    if path.suffix or len(path.parts) > 1:
        raise DataError(f"There is no file or folder {name} (looked from {Path.cwd()}).")
    raise UnknownName(f"Unknown data {name!r}: neither a name nor a path.{did_you_mean(name, _NAMES)}")


def _raw_table(name: str, path: Path, table: TableSpec) -> tuple[RawTable, str]:
    """A named table or a file, and its origin in words."""
    if name in TABLES:
        return TABLES[name].open(_place(name, TABLES[name])), name
    if path.suffix.lower() in PARQUET_FILES:
        return open_parquet(path, _dropped(table)), name
    return open_csv(path), name


def _texts(name: str, tokenizer: Any, table: TableSpec) -> Texts:
    if stated := _stated(table) - {"target"}:
        raise DataError(f"{min(stated)} (--{min(stated)}) is for tables; {name} is read as texts.")
    if name not in TEXTS:
        return texts(name, tokenizer=tokenizer, label=table.target)
    return replace(texts(TEXTS[name].lines(), tokenizer=tokenizer), source=name)


def _limited_texts(found: Texts, split: str | None, limit: int | None) -> Texts:
    rows = torch.arange(len(found))
    rows = rows if split is None else rows[(rows % 5 == 4) == (split == "test")]
    return _limited(found[rows], split, limit)


def _stated(table: TableSpec) -> set[str]:
    """The settings that are not the default."""
    return {each.name for each in fields(TableSpec) if getattr(table, each.name) != each.default}


def _dropped(table: TableSpec) -> set[str]:
    return {column for column, kind in table.kinds().items() if kind == "drop"}


def _place(name: str, source: Source | TableSource) -> Path:
    place = source.where()
    if place is None:
        folder = os.environ.get("GRADLEAK_DATA") or "not set"
        raise DataError(f"{name!r} is not on this machine: {source.needs}. (GRADLEAK_DATA is {folder}.)")
    return place


def _limited(found: Labelled, split: str | None, limit: int | None) -> Labelled:
    """The first rows or texts, each class in turn where there are classes."""
    if not len(found):
        raise DataError(f"{found.source} holds no rows{f' in split {split!r}' if split else ''}.")
    if limit is None:
        return found
    if found.classes is None or found.y is None:
        return found[:limit]
    return found[torch.from_numpy(_in_turn(found.y.numpy())[:limit])]


def _with_classes(images: Images, count: int) -> Images:
    """The images of a set with more classes than they show."""
    if count < images.classes:
        raise DataError(f"{images.source} has {images.classes} classes, more than classes={count} (--classes).")
    names = (*images.names, *(f"class {number}" for number in range(images.classes, count)))
    return replace(images, classes=count, names=names)


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


_LISTS = {"Sequence", "List", "LargeList", "Array2D", "Array3D", "Array4D"}
_FEATURES = {"Value", "ClassLabel", "Image", *_LISTS}


def is_huggingface(dataset: Any) -> bool:
    """Is this one split of a Hugging Face data set? Told by the types of its features: nothing is imported."""
    features = getattr(dataset, "features", None)
    return isinstance(features, Mapping) and any(type(each).__name__ in _FEATURES for each in features.values())


@takes(TableSpec)
def from_huggingface(
    dataset: Any,
    *,
    image: str | None = None,
    label: str | None = None,
    size: Size | None = None,
    limit: int | None = None,
    table: TableSpec,
) -> Images | Records | dict[str, Tensor]:
    """One split of a Hugging Face data set: images; rows of numbers and text as `Records`; token ids as tensors.

    Columns are found by type, or named by the caller: image and label; for rows what `TableSpec` says. A split
    with columns of lists, such as `input_ids`, gives tensors by field, as `from_loader` does.
    """
    if not is_huggingface(dataset):
        raise DataError(f"{type(dataset).__name__} has no features. Give one split, as in load_dataset(name)['train'].")
    features: Mapping[str, Any] = dataset.features
    source = f"Hugging Face {getattr(getattr(dataset, 'info', None), 'dataset_name', None) or type(dataset).__name__}"
    types = {type(feature).__name__ for feature in features.values()}
    try:
        if image is not None or "Image" in types:
            return _hugging_images(dataset, (image, label), source, size, limit)
        if types & _LISTS:
            return _hugging_tensors(dataset, source, limit)
        table = replace(table, target=label or table.target)
        raw = open_huggingface(dataset, label, source, _dropped(table))
        return _limited(encode(raw, table, source), None, limit)
    except (ImportError, RuntimeError, OSError) as problem:
        raise DataError(f"{source} could not be read: {problem}. Columns: {', '.join(features)}.") from problem


def _hugging_images(
    dataset: Any, names: tuple[str | None, str | None], source: str, size: Size | None, limit: int | None
) -> Images:
    features: Mapping[str, Any] = dataset.features

    def column(wanted: str | None, kind: str) -> str:
        matching = [
            key for key, feature in features.items() if (key == wanted if wanted else type(feature).__name__ == kind)
        ]
        if not matching:
            sought = repr(wanted) if wanted else f"of type {kind}"
            raise DataError(f"No column {sought}. Give image= and label=. Columns: {', '.join(features)}.")
        return matching[0]

    image, label = column(names[0], "Image"), column(names[1], "ClassLabel")
    labels = np.asarray(list(dataset[label]))
    known = class_names(getattr(features[label], "names", None), labels, source)
    pool = Pool(labels, lambda rows: [pixels(dataset[int(row)][image]) for row in rows], known)
    return _images(pool, source, None, size, limit)


def _hugging_tensors(dataset: Any, source: str, limit: int | None) -> dict[str, Tensor]:
    """Columns of numbers and of equally long lists of numbers; text is left out."""
    columns = {name: list(dataset[name])[:limit] for name in dataset.features}
    tensors = {}
    for name, values in columns.items():
        if values and isinstance(values[0], str):
            continue
        try:
            tensors[name] = torch.stack([torch.as_tensor(value) for value in values])
        except (ValueError, TypeError, RuntimeError):
            raise DataError(
                f"{source}: examples of {name!r} differ in length. Tokenise with padding='max_length' and "
                "truncation, or give gradleak.data.texts(split[:], padding=...)."
            ) from None
    return fields_of(tensors)


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
