"""Images by writer: LEAF's FEMNIST from its JSON files, and pseudo-writers of the EMNIST letters as a stand-in.

A client of the multi-step papers is one writer with the first N of its images; writers with fewer are left out.

    clients = gl.data.writers("femnist").first(50)                 # or a folder, or a .json file of LEAF's
    task = gl.Task.supervised(model, loss, like=(...), mean=FEMNIST_MEAN, std=FEMNIST_STD)
    clients[0].batch(slice(None))                                  # the private tensors of one client
    gl.Federation(clients=len(clients), examples=50, split="in_order")     # with clients.images as data

LEAF: Caldas et al., LEAF: A Benchmark for Federated Settings, 2018. Its own script makes its files, for the multi-step
papers with `preprocess.sh -s niid --sf 0.05 -k 0 -t sample`. They are read as JSON, and all sizes, types, lengths and
ranges are checked.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradleak.data.fetch import DataError, cache_folder
from gradleak.data.sources import SOURCES, Array, Pool, Source, open_npz

if TYPE_CHECKING:
    from gradleak.data import Images

FEMNIST_NAMES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)  # 62 classes in LEAF's order
FEMNIST_MEAN, FEMNIST_STD = 0.9642384386, 0.1576784320  # of [0, 1] pixels on white, as SME normalises them
SIDE = 28
MOST_FILE, MOST_ALL = 512 * 2**20, 4 * 2**30  # bytes; Python needs about six for each while it reads a file


@dataclass(frozen=True, eq=False)
class Writers:
    """Images in the order of their writers, `sizes[i]` of them by writer `names[i]`."""

    images: Images
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or sum(self.sizes) != len(self.images):
            raise DataError(
                f"{len(self.names)} writers with sizes that sum to {sum(self.sizes)} do not divide "
                f"{len(self.images)} images. Give one size per writer, and as many images in their order."
            )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, writer: int) -> Images:
        """All images of one writer."""
        return self.images[self._rows(range(len(self))[writer])]

    def first(self, examples: int) -> Writers:
        """The first N images of each writer; writers with fewer are left out, so that all clients have equal sizes."""
        if examples < 1:
            raise DataError(f"examples is {examples}. Give at least 1.")
        large = [writer for writer, size in enumerate(self.sizes) if size >= examples]
        if not large:
            raise DataError(
                f"{self.images.source}: none of {len(self)} writers has {examples} images; the most is "
                f"{max(self.sizes, default=0)}. Ask for fewer, or read more of the set."
            )
        rows = torch.cat([self._rows(writer)[:examples] for writer in large])
        return Writers(self.images[rows], tuple(self.names[writer] for writer in large), (examples,) * len(large))

    def of(self, writers: Sequence[int]) -> Writers:
        """Some of the writers, in this order."""
        known = [range(len(self))[writer] for writer in writers]
        rows = torch.cat([self._rows(writer) for writer in known]) if known else torch.zeros(0, dtype=torch.long)
        return Writers(
            self.images[rows], tuple(self.names[writer] for writer in known), tuple(self.sizes[w] for w in known)
        )

    def _rows(self, writer: int) -> Tensor:
        start = sum(self.sizes[:writer])
        return torch.arange(start, start + self.sizes[writer])


def writers(name_or_path: str | os.PathLike[str] = "femnist", *, split: str | None = None) -> Writers:
    """The writers of "femnist", of LEAF files elsewhere, or of "emnist-writers", in the order of their names.

    split: "train" or "test", LEAF's own; None: the training part if there are two.
    """
    from gradleak.data import Images, load_images

    name = os.fspath(name_or_path)
    if split not in (None, "train", "test"):
        raise DataError(f"split is {split!r}. Give 'train', 'test' or None.")
    if name == "emnist-writers":
        return pseudo_writers(load_images("emnist-letters", split=split))
    place = SOURCES["femnist"].where() if name == "femnist" else Path(name).expanduser()
    if place is None:
        raise DataError(f"'femnist' is not on this machine: {SOURCES['femnist'].needs}.")
    if not is_leaf(place):
        raise DataError(
            f"{name} holds no LEAF files. Give 'femnist', 'emnist-writers', a .json file of LEAF's, or a folder of "
            "them (with train/ and test/, or without)."
        )
    x, y, names, sizes = read_leaf(place, split)
    images = Images(torch.from_numpy(x), torch.from_numpy(y), len(FEMNIST_NAMES), FEMNIST_NAMES, f"FEMNIST, {name}")
    return Writers(images, names, sizes)


# --- LEAF's files -----------------------------------------------------------------------------------------------------


def _parts(place: Path) -> dict[str, Path]:
    """The folders of the two parts, if there are two; LEAF's script puts them below `data`."""
    for home in (place, place / "data"):
        if (home / "train").is_dir() and (home / "test").is_dir():
            return {"train": home / "train", "test": home / "test"}
    return {}


def _files(place: Path, split: str | None) -> list[Path]:
    home = _parts(place).get(split or "train", place)
    return [home] if home.is_file() else sorted(path for path in home.glob("*.json") if path.is_file())


def is_leaf(place: Path) -> bool:
    """Whether this is a .json file, a folder of them, or a folder with train/ and test/ full of them."""
    return place.suffix == ".json" if place.is_file() else place.is_dir() and bool(_files(place, None))


def read_leaf(place: Path, split: str | None) -> tuple[Array, Array, tuple[str, ...], tuple[int, ...]]:
    """x float32 (N, 1, 28, 28), y int64 (N,), writers in alphabetical order, and how many images each has."""
    files = _files(place, split)
    sizes = [path.stat().st_size for path in files]
    for path, size in zip(files, sizes):
        if size > MOST_FILE:
            raise DataError(
                f"{path} has {size / 2**20:,.0f} MiB; at most {MOST_FILE / 2**20:,.0f} are read at once. Let LEAF "
                "write smaller files, or sample a smaller share of the set (--sf)."
            )
    if sum(sizes) > MOST_ALL:
        raise DataError(
            f"{place} has {sum(sizes) / 2**30:.1f} GiB of JSON; at most {MOST_ALL / 2**30:.0f} are read. Sample a "
            "smaller share of the set (--sf)."
        )
    by_writer: dict[str, tuple[Array, Array]] = {}
    for path in files:
        for name, arrays in _writers_of(path):
            if name in by_writer:
                raise DataError(f"{path}: writer {name!r} is in another file too. Keep one of them.")
            by_writer[name] = arrays
    names = tuple(sorted(name for name, (x, _) in by_writer.items() if len(x)))
    if not names:
        raise DataError(f"{place} holds no images{f' in split {split!r}' if split else ''}.")
    x, y = (np.concatenate([by_writer[name][column] for name in names]) for column in (0, 1))
    return x.reshape(-1, 1, SIDE, SIDE), y, names, tuple(len(by_writer[name][0]) for name in names)


def _no_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}, which is not a JSON number")


def _writers_of(path: Path) -> Iterable[tuple[str, tuple[Array, Array]]]:
    """Name and (x (n, 784) float32, y (n,) int64) of each writer of one file."""
    try:
        content = json.loads(path.read_bytes(), parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as problem:
        raise DataError(f"{path} is not readable as JSON: {problem}. Make it again with LEAF's script.") from problem

    def demand(holds: bool, message: str) -> None:
        if not holds:
            raise DataError(f"{path} is not a FEMNIST file of LEAF's: {message}.")

    demand(isinstance(content, dict), "it holds no object")
    data = content.get("user_data")
    demand(isinstance(data, dict), "it has no object 'user_data'")
    users, counts = content.get("users"), content.get("num_samples")
    demand(isinstance(users, list) and all(isinstance(user, str) for user in users), "it has no list 'users' of names")
    demand(sorted(users) == sorted(data), "'users' and 'user_data' do not name the same writers")
    demand(isinstance(counts, list) and len(counts) == len(users), "it has no 'num_samples' for each writer")
    for user, count in zip(users, counts):
        user_arrays = data[user]
        demand(isinstance(user_arrays, dict) and {"x", "y"} <= user_arrays.keys(), f"writer {user!r} has no x and y")
        where = f"writer {user!r}"
        for key in ("x", "y"):
            demand(
                _numeric(user_arrays[key]), f"{key} of {where} must be a list of numbers, or of lists of equal length"
            )
        x, y = (np.asarray(user_arrays[key]) for key in ("x", "y"))
        demand(len(x) == len(y) == count, f"{where} has {len(x)} images, {len(y)} labels and says {count}")
        if not len(x):
            continue
        demand(x.ndim == 2 and x.shape[1] == SIDE**2, f"images of {where} are {x.shape[1:]} numbers, not {SIDE**2}")
        demand(bool((x >= 0).all() and (x <= 1).all()), f"pixels of {where} are not within [0, 1]")
        demand(y.ndim == 1 and y.dtype.kind in "iu", f"labels of {where} are no whole numbers")
        last = len(FEMNIST_NAMES) - 1
        demand(y.min() >= 0 and y.max() <= last, f"labels of {where} run from {y.min()} to {y.max()}, not 0 to {last}")
        yield user, (x.astype(np.float32), y.astype(np.int64))


def _numeric(values: Any) -> bool:
    """Whether these are numbers in lists of equal length: no text, truth values or integers beyond 64 bits."""
    try:
        return isinstance(values, list) and (not values or np.asarray(values).dtype.kind in "iuf")
    except (ValueError, OverflowError):  # ragged lists
        return False


def open_leaf(place: Path, split: str | None) -> Pool:
    """LEAF files as a plain set of images, in the order of the writers; `writers` says who wrote what."""
    x, y, _, _ = read_leaf(place, split)
    return Pool(y, lambda rows: x[rows], FEMNIST_NAMES, bool(_parts(place)))


# --- pseudo-writers ---------------------------------------------------------------------------------------------------


def pseudo_writers(images: Images, count: int = 10, *, seed: int = 0) -> Writers:
    """Divide the images among `count` made-up writers, each with its own slant, stroke width and size.

    A stand-in for real writers if a set names none: say so wherever it is used. Slants run from -0.35 to 0.35
    (columns per row), sizes from 0.8 to 1.05, strokes from 0.6 of an erosion by a pixel to 0.8 of a dilation, each in
    equal steps that the seed assigns to the writers. Ink must be bright on black, as in EMNIST.
    """
    from gradleak.data import Images

    if not 1 <= count <= len(images):
        raise DataError(f"count is {count}. Give from 1 to {len(images)}, the number of images.")
    shuffled, rows, styles = _dealt(len(images), count, seed)
    x = _styled(images.x[shuffled[rows]], *(style[rows % count] for style in styles))
    source = f"{count} pseudo-writers (made up: slant, stroke, size) of {images.source}"
    dealt = Images(x, images.y[shuffled[rows]], images.classes, images.names, source)
    names = tuple(f"pseudo-writer {writer}" for writer in range(count))
    return Writers(dealt, names, tuple(len(range(writer, len(images), count)) for writer in range(count)))


def _dealt(images: int, count: int, seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A shuffle; the places in it by writer (place p is of writer p % count); slant, size, stroke of each writer."""
    generator = torch.Generator().manual_seed(seed)
    ranges = ((-0.35, 0.35), (0.8, 1.05), (-0.6, 0.8))
    styles = [torch.linspace(*ends, count)[torch.randperm(count, generator=generator)] for ends in ranges]
    shuffled = torch.randperm(images, generator=generator)
    return shuffled, torch.cat([torch.arange(writer, images, count) for writer in range(count)]), styles


def _styled(x: Tensor, slant: Tensor, size: Tensor, stroke: Tensor) -> Tensor:
    """Images (N, C, H, W) with the slant, size and stroke of each, (N,)."""
    zero = torch.zeros_like(slant)
    maps = torch.stack([torch.stack([1 / size, slant / size, zero], 1), torch.stack([zero, 1 / size, zero], 1)], 1)
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)  # (N, H, W, 2): where each pixel comes from
    x = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    wide, thin = F.max_pool2d(x, 3, 1, 1), -F.max_pool2d(-x, 3, 1, 1)
    weight = stroke[:, None, None, None]
    return torch.where(weight > 0, x.lerp(wide, weight.abs()), x.lerp(thin, weight.abs())).clamp(0, 1)


def _open_pseudo_writers(place: Path, split: str | None) -> Pool:
    from gradleak.data import load_images

    dealt = pseudo_writers(load_images(place, split=split)).images
    return Pool(dealt.y.numpy(), lambda rows: dealt.x.numpy()[rows], dealt.names, open_npz(place, split).divided)


# --- the "Enhanced" clients of NL-SME ---------------------------------------------------------------------------------


def detail(x: Tensor) -> Tensor:
    """Amount of detail in images (N, C, H, W): z(pixel variance) + z(mean Sobel magnitude), (N,)."""
    kernel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]).to(x)
    grey = x.mean(1, keepdim=True)
    edges = F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), torch.stack([kernel, kernel.T])[:, None])
    scores = grey.flatten(1).var(1), edges.norm(dim=1).flatten(1).mean(1)
    return torch.stack([(score - score.mean()) / score.std(correction=0).clamp_min(1e-12) for score in scores]).sum(0)


def enhanced(source: Writers, examples: int = 50, *, writers: int = 5, seed: int = 0, each: bool = False) -> Images:
    """The images with most `detail` of some random writers, pooled: a client of NL-SME's "Enhanced" setting.

    each: the same number from every writer, instead of the most detailed of all. The paper states neither the score
    nor the rule (arXiv 2509.22082): both are ours. Results are not comparable with those of a writer's first N images.
    """
    if not 1 <= writers <= len(source):
        raise DataError(f"writers is {writers}. Give from 1 to {len(source)}, the number of writers.")
    if each and examples % writers:
        raise DataError(f"{examples} examples cannot be the same number from each of {writers} writers.")
    drawn = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))[:writers].tolist()
    pool = source.of(drawn)
    scores = detail(pool.images.x)
    groups, share = (pool.sizes, examples // writers) if each else ((len(pool.images),), examples)
    if min(groups) < share:
        raise DataError(f"{share} images are asked of {min(groups)}: ask for fewer examples or more writers.")
    starts = [sum(groups[:group]) for group in range(len(groups))]
    best = [
        start + scores[start : start + size].argsort(descending=True, stable=True)[:share]
        for start, size in zip(starts, groups)
    ]
    return pool.images[torch.cat(best)]


# --- names ------------------------------------------------------------------------------------------------------------


def _femnist() -> Path | None:
    folder = os.environ.get("GRADLEAK_DATA")
    places = [Path(folder).expanduser() / "femnist"] if folder else []
    return next((place for place in (*places, cache_folder() / "femnist") if is_leaf(place)), None)


SOURCES["femnist"] = Source(
    description="FEMNIST by LEAF, 28x28 grey, 62 classes, in the order of its writers",
    licence="LEAF is BSD-2; images from NIST SD19 (US government)",
    needs="run LEAF's data/femnist/preprocess.sh -s niid --sf 0.05 -k 0 -t sample, and set GRADLEAK_DATA to a folder "
    "that holds its train/ and test/ as femnist/train and femnist/test",
    where=_femnist,
    open=open_leaf,
)
SOURCES["emnist-writers"] = Source(
    description="EMNIST letters by 10 pseudo-writers (made up: a slant, stroke and size each), 28x28 grey, 26 classes",
    licence=SOURCES["emnist-letters"].licence,
    needs=SOURCES["emnist-letters"].needs,
    where=SOURCES["emnist-letters"].where,
    open=_open_pseudo_writers,
)
