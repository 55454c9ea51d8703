"""Where images come from: one `Source` per name, and a reader for each kind of place.

A new name is one entry of `SOURCES`. Packages with images are read as files and never imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradleak.data.fetch import CIFAR10_NAMES, DOWNLOADS, DataError, cache_folder

Size = int | tuple[int, int]
Array = NDArray[Any]


@dataclass(frozen=True)
class Pool:
    """A source before decoding: all labels, and a reader of chosen rows.

    The reader gives one array, uint8 (N, H, W, C) or float (N, C, H, W), or an iterator of single images: two hundred
    thousand photographs do not fit into memory before they are reduced.
    """

    labels: Array
    read: Callable[[Array], Array | Iterable[Array]]
    names: tuple[str, ...]
    divided: bool = False  # the source has its own train and test parts, and this is one of them


@dataclass(frozen=True)
class Source:
    """A named set of images: what it is, its licence, how to get it, where it lies and how to open it."""

    description: str
    licence: str
    needs: str  # how to get it
    where: Callable[[], Path | None]
    open: Callable[[Path, str | None], Pool]
    size: Size | None = None  # used when the caller gives none and the images differ in size


def class_names(known: Iterable[Any] | None, labels: Array, source: str) -> tuple[str, ...]:
    """Class names, or the numbers 0 .. largest label if the source has no names."""
    if known is not None:
        return tuple(str(name) for name in known)
    if not labels.size or labels.dtype.kind not in "iu":
        raise DataError(f"{source}: labels must be whole numbers, at least one, not {labels.dtype} {labels.shape}.")
    return tuple(str(number) for number in range(int(labels.max()) + 1))


def pixels(image: Any) -> Array:
    """One image as uint8 (H, W, C) or float (C, H, W)."""
    if isinstance(image, Tensor):
        values = image.detach().cpu().numpy()
        return np.moveaxis(values, 0, -1) if values.dtype == np.uint8 and values.ndim == 3 else values
    if isinstance(image, np.ndarray):
        return image
    if not hasattr(image, "convert"):
        raise DataError(f"An image is a {type(image).__name__}. Give a PIL picture, a tensor or an array.")
    if image.mode.startswith(("I", "F")):
        raise DataError(f"A picture has mode {image.mode!r} (more than 8 bits a channel). Convert it to 8 bits first.")
    grey = image.mode in ("1", "L", "LA")
    return np.asarray(image.convert("L" if grey else "RGB")).reshape(image.height, image.width, 1 if grey else 3)


def _picture(path: Path) -> Any:
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise DataError(
            f"{path.name} is a picture file, and Pillow, which reads those, is not installed: pip install pillow."
        ) from None
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image)  # a copy: decoded here, so that the error names a broken file
    except (OSError, SyntaxError, ValueError) as problem:  # Pillow raises SyntaxError for a broken PNG
        raise DataError(f"{path} is not a readable image: {problem}. Remove or replace it.") from problem


def open_npz(path: Path, split: str | None) -> Pool:
    """Arrays `x` and `y` of a .npz file, or `train_x`, `test_x` and so on if it has parts."""
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a .npz file (a zip of arrays). Save it with numpy.savez.")
    try:
        with np.load(path, allow_pickle=False) as file:
            divided = "train_x" in file.files
            part = f"{split or 'train'}_" if divided else ""
            missing = [key for key in (f"{part}x", f"{part}y") if key not in file.files]
            if missing:
                raise DataError(
                    f"{path} has no {' and no '.join(missing)}; it holds {', '.join(file.files) or 'nothing'}. "
                    "It needs train_x, train_y (and test_x, test_y), or x, y."
                )
            x, y = file[f"{part}x"], file[f"{part}y"]
            every = np.concatenate([file[key].ravel() for key in file.files if key in ("train_y", "test_y", "y")])
            names = class_names(file["classes"] if "classes" in file.files else None, every, str(path))
    except DataError:
        raise
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as problem:
        raise DataError(f"{path} is not readable: {problem} Save it with numpy.savez, without objects.") from problem
    if y.ndim != 1 or x.shape[:1] != y.shape:
        raise DataError(f"{path} holds {part}x {x.shape} and {part}y {y.shape}. Give one label per image.")
    return Pool(y, lambda rows: x[rows], names, divided)


_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"))


def open_folder(folder: Path, split: str | None) -> Pool:
    """One class per subfolder; a flat folder is one class; `train/` and `test/` (or `val/`) inside are two parts.

    Also reads the layouts of CelebA and LSUN: see `_open_celeba` and `_open_lsun`.
    """
    if (folder / CELEBA_IMAGES).is_dir():
        return _open_celeba(folder, split)
    if (folder / "data.mdb").is_file() or any(folder.glob("*_lmdb/data.mdb")):
        raise DataError(
            f"{folder} is an LMDB database, as LSUN is downloaded. Export its images first (`data.py export` of LSUN's "
            "own scripts) and give the folder of images."
        )
    if categories := _lsun_categories(folder):
        return _open_lsun(folder, categories, split)
    tests = [part for name in ("test", "val") if (part := folder / name).is_dir()]
    parts = {"train": folder / "train", "test": tests[0]} if tests and (folder / "train").is_dir() else {}
    root = parts.get(split or "train", folder)
    inside = {path.name for part in parts.values() or [folder] for path in part.iterdir() if path.is_dir()}
    classes = sorted(name for name in inside if not name.startswith("."))  # of both parts, so that labels agree
    homes = [root / name for name in classes] or [root]
    labelled = [(path, label) for label, home in enumerate(homes) if home.is_dir() for path in sorted(home.iterdir())]
    files = [(path, label) for path, label in labelled if path.suffix.lower() in _SUFFIXES]
    if not files and (below := _pictures_in(root, deep=True)):  # sorted by the first letters of their names
        return _one_class(below, folder.resolve().name, root, divided=bool(parts))
    if not files:
        raise DataError(f"{root} holds no images ({', '.join(sorted(_SUFFIXES))}), nor do its subfolders.")
    return Pool(
        labels=np.asarray([label for _, label in files]),
        read=lambda rows: _read([files[int(row)][0] for row in rows]),
        names=tuple(classes) or (folder.resolve().name,),
        divided=bool(parts),
    )


def _read(files: Iterable[Path]) -> Iterator[Array]:
    return (pixels(_picture(path)) for path in files)


CELEBA_IMAGES, CELEBA_PARTS = "img_align_celeba", "list_eval_partition.txt"


def _open_celeba(folder: Path, split: str | None) -> Pool:
    """CelebA in its authors' layout: `img_align_celeba/000001.jpg` and, beside or in it, the official parts.

    A line of `list_eval_partition.txt` is a file's name and 0 (train), 1 (validation) or 2 (test). Without that file
    there are no parts. The faces are one class. Reference: Liu, Luo, Wang, Tang, ICCV 2015.
    """
    files = _pictures_in(folder / CELEBA_IMAGES)
    listed = [
        place for home in (folder, folder / "Eval", folder / CELEBA_IMAGES) if (place := home / CELEBA_PARTS).is_file()
    ]
    if listed:
        try:
            parts = {
                name: int(part) for name, part in (line.split() for line in listed[0].read_text().splitlines() if line)
            }
        except ValueError:
            raise DataError(
                f"{listed[0]} should have lines such as '000001.jpg 0'. Take it from CelebA again."
            ) from None
        wanted = 2 if split == "test" else 0
        files = [path for path in files if parts.get(path.name) == wanted]
    return _one_class(files, "face", folder, divided=bool(listed))


def _lsun_categories(folder: Path) -> list[str]:
    """Categories with both `NAME_train/` and `NAME_val/`."""
    names = (path.name.removesuffix("_train") for path in folder.glob("*_train") if path.is_dir())
    return sorted(name for name in names if (folder / f"{name}_val").is_dir())


def _open_lsun(folder: Path, categories: list[str], split: str | None) -> Pool:
    """Exported LSUN: `bedroom_train/` and `bedroom_val/`, images at any depth below. One class.

    LSUN's exporter sorts images into folders by the first letters of their names (`a/b/c/NAME.webp`), or into none.
    Reference: Yu et al., LSUN, arXiv:1506.03365.
    """
    if len(categories) > 1:
        some = ", ".join(categories[:4])
        raise DataError(f"{folder} holds several categories ({some}): give one folder for each, or one of these.")
    root = folder / f"{categories[0]}_{'val' if split == 'test' else 'train'}"
    return _one_class(_pictures_in(root, deep=True), categories[0], root, divided=True)


def _pictures_in(folder: Path, deep: bool = False) -> list[Path]:
    return sorted(path for path in folder.glob("**/*" if deep else "*") if path.suffix.lower() in _SUFFIXES)


def _one_class(files: list[Path], name: str, folder: Path, divided: bool = False) -> Pool:
    if not files:
        raise DataError(f"{folder} holds no images ({', '.join(sorted(_SUFFIXES))}).")
    labels = np.zeros(len(files), dtype=np.int64)
    return Pool(labels, lambda rows: _read([files[int(row)] for row in rows]), (name,), divided)


def _open_samples(folder: Path, split: str | None, *, prefix: str, names: tuple[str, ...]) -> Pool:
    """foolbox's samples: `PREFIX_NUMBER_LABEL.png` or `.jpg`."""
    matches = [re.fullmatch(rf"{prefix}_\d+_(\d+)\.(?:png|jpg)", path.name) for path in sorted(folder.iterdir())]
    files = [(folder / match[0], int(match[1])) for match in matches if match]
    labels = np.asarray([label for _, label in files], dtype=np.int64)
    return Pool(labels, lambda rows: [pixels(_picture(files[int(row)][0])) for row in rows], names)


def _open_faces(path: Path, split: str | None) -> Pool:
    x = np.load(path, allow_pickle=False)[:, None]
    return Pool(np.repeat([0, 1], 100), lambda rows: x[rows], ("face", "no face"))


def _open_digits(path: Path, split: str | None) -> Pool:
    table = np.loadtxt(path, delimiter=",")
    x = table[:, :64].reshape(-1, 1, 8, 8) / 16
    return Pool(table[:, 64].astype(np.int64), lambda rows: x[rows], tuple("0123456789"))


_PHOTOGRAPHS = ["astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg"]
_PHOTOGRAPHS += ["ihc.png", "retina.jpg", "rocket.jpg"]


def _open_photographs(folder: Path, split: str | None) -> Pool:
    """32x32 tiles of each photograph after reducing its shorter side to 256; flat tiles are left out."""
    patches: list[Array] = []
    labels: list[int] = []
    for label, name in enumerate(_PHOTOGRAPHS):
        picture = _picture(folder / name).convert("RGB")
        scale = 256 / min(picture.size)
        values = np.asarray(picture.resize((round(picture.width * scale), round(picture.height * scale))))
        rows, columns = values.shape[0] // 32, values.shape[1] // 32
        grid = values[: rows * 32, : columns * 32].reshape(rows, 32, columns, 32, 3)
        tiles = grid.swapaxes(1, 2).reshape(-1, 32, 32, 3)
        busy = tiles[tiles.std(axis=(1, 2)).max(axis=1) > 16]  # of 255: clear sky and blank slides show nothing
        patches.append(busy)
        labels += [label] * len(busy)
    x = np.concatenate(patches)
    return Pool(np.asarray(labels), lambda rows: x[rows], tuple(Path(name).stem for name in _PHOTOGRAPHS))


# ---- the names


def in_package(package: str, *parts: str) -> Path | None:
    """A file or folder of an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    place = Path(spec.origin).parent.joinpath(*parts) if spec is not None and spec.origin else None
    return place if place is not None and place.exists() else None


def pack_folder() -> Path | None:
    """The user's folder of data, `GRADLEAK_DATA`."""
    folder = os.environ.get("GRADLEAK_DATA")
    return Path(folder).expanduser() if folder else None


def _in_pack(name: str, stem: str, mini_only: bool = False) -> Path | None:
    places = [] if mini_only else [cache_folder() / f"{name}.npz"]
    if pack := pack_folder():
        places = [*([] if mini_only else [pack / f"{stem}.npz"]), *places, pack / "mini" / f"{stem}_mini.npz"]
    return next((place for place in places if place.is_file()), None)


def _samples(title: str, prefix: str, names: tuple[str, ...], size: Size | None = None) -> Source:
    return Source(
        description=f"20 {title} images that foolbox brings",
        licence="foolbox is MIT; the images carry the terms of their data set",
        needs="pip install foolbox",
        where=partial(in_package, "foolbox", "data"),
        open=partial(_open_samples, prefix=prefix, names=names),
        size=size,
    )


def _pack(name: str, stem: str, title: str, licence: str) -> Source:
    mini = name.endswith("-mini")
    file = f"mini/{stem}_mini.npz" if mini else f"{stem}.npz (or mini/{stem}_mini.npz)"
    fetch = f"run `gradleak data get {name}`, or " if name in DOWNLOADS else ""
    needs = f"{fetch}set GRADLEAK_DATA to a folder that holds {file}"
    return Source(title, licence, needs, partial(_in_pack, name, stem, mini), open_npz)


_NO_LICENCE = "no formal licence; cite its authors, do not redistribute"
_RESEARCH = "non-commercial research only"
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""
_PACK = (
    ("cifar10", "cifar10", "CIFAR-10, 32x32 colour, 10 classes", _NO_LICENCE),
    ("cifar10-mini", "cifar10", "CIFAR-10, 2,000 + 500 images", _NO_LICENCE),
    ("cifar100", "cifar100", "CIFAR-100, 32x32 colour, 100 classes", _NO_LICENCE),
    ("cifar100-mini", "cifar100", "CIFAR-100, 2,000 + 500 images", _NO_LICENCE),
    ("svhn", "svhn_test5k", "SVHN, 5,000 of its test part, 32x32 colour, 10 classes", "non-commercial use only"),
    ("fashion-mnist", "fashion_mnist", "Fashion-MNIST, 28x28 grey, 10 classes", "MIT"),
    ("mnist", "mnist", "MNIST, 28x28 grey, 10 classes", _NO_LICENCE),
    ("emnist-letters", "emnist_letters", "EMNIST letters, 28x28 grey, 26 classes", "from NIST SD19 (US government)"),
    ("tiny-imagenet", "tiny_imagenet", "Tiny ImageNet, 64x64 colour, 200 classes", _RESEARCH),
    ("tiny-imagenet-mini", "tiny_imagenet", "Tiny ImageNet, 400 + 200 images", _RESEARCH),
    ("celeba", "celeba64", "CelebA faces, 64x64 colour, without labels", _RESEARCH),
    ("houses", "houses64", "rooms and fronts of houses, 64x64 colour, 4 classes", "cite Ahmed & Moustafa 2016"),
    ("celeba64", "celeba64", "the same as celeba, by the name of its file", _RESEARCH),
    ("houses64", "houses64", "the same as houses, by the name of its file", "cite Ahmed & Moustafa 2016"),
)

SOURCES: dict[str, Source] = {
    "cifar10-samples": _samples("CIFAR-10", "cifar10", CIFAR10_NAMES),
    "cifar100-samples": _samples("CIFAR-100", "cifar100", tuple(_CIFAR100.split())),
    "mnist-samples": _samples("MNIST", "mnist", tuple("0123456789")),
    "fashion-mnist-samples": _samples("Fashion-MNIST", "fashionMNIST", _CLOTHES),
    "imagenet-samples": _samples("ImageNet", "imagenet", tuple(f"class {label}" for label in range(1000)), size=224),
    "faces": Source(
        description="100 faces and 100 other patches of LFW photographs, 25x25 grey, that scikit-image brings",
        licence="scikit-image is BSD-3; the faces are of Labeled Faces in the Wild, for research",
        needs="pip install scikit-image",
        where=partial(in_package, "skimage", "data", "lfw_subset.npy"),
        open=_open_faces,
    ),
    "photographs": Source(
        description="32x32 colour tiles of seven photographs that scikit-image brings, one class each",
        licence="CC0, public domain or without known restrictions, each as scikit-image states it",
        needs="pip install scikit-image",
        where=partial(in_package, "skimage", "data"),
        open=_open_photographs,
    ),
    "digits": Source(
        description="1,797 handwritten digits, 8x8 grey, that scikit-learn brings",
        licence="scikit-learn is BSD-3; digits of the UCI repository (CC BY 4.0)",
        needs="pip install scikit-learn",
        where=partial(in_package, "sklearn", "datasets", "data", "digits.csv.gz"),
        open=_open_digits,
    ),
    **{name: _pack(name, stem, title, licence) for name, stem, title, licence in _PACK},
}
