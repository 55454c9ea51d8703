"""Images by writer: LEAF's files, believed in nothing; pseudo-writers; clients that are writers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradleak as gl
from gradleak import data
from gradleak.core import registry
from gradleak.data import DataError, Images, leaf
from gradleak.federation import Federation, FederationError

SIDE = 28


def image(value: float) -> list[float]:
    """White paper with one pixel of this value, as LEAF writes it: one flat list."""
    pixels = [1.0] * SIDE**2
    pixels[SIDE + 2] = value
    return pixels


def content(**sizes: int) -> dict[str, Any]:
    """A hand-made file: writer i has so many images, of values and labels that tell them apart."""
    users = list(sizes)
    return {
        "users": users,
        "num_samples": list(sizes.values()),
        "user_data": {
            user: {
                "x": [image((10 * number + k) / 100) for k in range(sizes[user])],
                "y": [10 * number + k for k in range(sizes[user])],
            }
            for number, user in enumerate(users)
        },
    }


def save(path: Path, held: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    return path


# ---- reading


def test_one_file(tmp_path: Path) -> None:
    path = save(tmp_path / "all_data_0.json", content(f0002_b=3, f0001_a=2))
    found = data.writers(path)
    assert found.names == ("f0001_a", "f0002_b")  # by name, as the papers' code has them
    assert found.sizes == (2, 3)
    assert len(found) == 2
    assert found.images.x.shape == (5, 1, 28, 28)
    assert found.images.classes == 62
    assert found[0].y.tolist() == [10, 11]
    assert found[1].y.tolist() == found[-1].y.tolist() == [0, 1, 2]
    torch.testing.assert_close(found[0].x[:, 0, 1, 2], torch.tensor([0.10, 0.11]))
    assert found[0].x.sum() == pytest.approx(2 * 783 + 0.21, rel=1e-6)
    with pytest.raises(IndexError):
        found[2]
    assert "writer" not in repr(found.images)
    plain = data.load(path)
    assert torch.equal(plain.x, found.images.x)
    assert (plain.names[0], plain.names[10], plain.names[36], plain.names[61]) == ("0", "A", "a", "z")
    assert data.load(path, size=14, limit=2).x.shape == (2, 1, 14, 14)


@pytest.mark.parametrize("below", ["", "data"])
def test_folders_of_files_in_two_parts_and_in_one(tmp_path: Path, below: str) -> None:
    save(tmp_path / below / "train" / "a.json", content(w1=2))
    save(tmp_path / below / "train" / "b.json", content(w0=1))
    save(tmp_path / below / "train" / "notes.txt", "no data")
    save(tmp_path / below / "test" / "a.json", content(w1=1))
    assert data.writers(tmp_path).names == data.writers(tmp_path, split="train").names == ("w0", "w1")
    assert data.writers(tmp_path, split="test").sizes == (1,)
    assert len(data.load(tmp_path)) == 3
    assert len(data.load(tmp_path, split="test")) == 1
    assert len(data.writers(tmp_path / below / "train").images) == 3
    with pytest.raises(DataError, match="split is 'val'"):
        data.writers(tmp_path, split="val")


def test_femnist_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADLEAK_DATA", str(tmp_path))
    monkeypatch.setenv("GRADLEAK_CACHE", str(tmp_path / "cache"))
    for ask in (lambda: data.load("femnist"), lambda: data.writers()):
        with pytest.raises(DataError, match="'femnist' is not on this machine.*preprocess.sh.*femnist/train"):
            ask()
    save(tmp_path / "femnist" / "train" / "a.json", content(w0=2))
    save(tmp_path / "femnist" / "test" / "a.json", content(w0=1))
    assert data.writers().sizes == (2,)
    assert len(data.load("femnist", split="test")) == 1
    line = next(line for line in data.available() if line.name == "femnist")
    assert line.location == tmp_path / "femnist"
    save(tmp_path / "cache" / "femnist" / "a.json", content(w0=5))
    assert data.writers().sizes == (2,)  # the pack comes before the cache


def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    held = content(w=2)
    change(held)
    return held


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ("{", "not readable as JSON.*LEAF's script"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"user_data": NaN}', "holds NaN"),
        ("1" * 5000, "not readable as JSON"),
        ("[]", "it holds no object"),
        ("{}", "no object 'user_data'"),
        (broken(lambda f: f.pop("users")), "no list 'users'"),
        (broken(lambda f: f["users"].append("v")), "do not name the same writers"),
        (broken(lambda f: f.update(users=[1])), "no list 'users' of names"),
        (broken(lambda f: f.pop("num_samples")), "no 'num_samples'"),
        (broken(lambda f: f.update(num_samples=[3])), "2 images, 2 labels and says 3"),
        (broken(lambda f: f["user_data"].update(w=[])), "writer 'w' has no x and y"),
        (broken(lambda f: f["user_data"]["w"].pop("y")), "writer 'w' has no x and y"),
        (broken(lambda f: f["user_data"]["w"].update(x="img.jpg")), "x of writer 'w' must be a list of numbers"),
        (broken(lambda f: f["user_data"]["w"].update(x=["a.jpg", "b.jpg"])), "must be a list of numbers"),
        (broken(lambda f: f["user_data"]["w"]["x"][0].append(1.0)), "lists of equal length"),
        (broken(lambda f: f["user_data"]["w"].update(y=[True, False])), "y of writer 'w' must be"),
        (broken(lambda f: f["user_data"]["w"].update(y=[1, 10**30])), "y of writer 'w' must be"),
        (broken(lambda f: f["user_data"]["w"].update(y=[0.5, 1])), "no whole numbers"),
        (broken(lambda f: f["user_data"]["w"].update(y=[0, 62])), "labels of writer 'w' run from 0 to 62, not 0 to 61"),
        (broken(lambda f: f["user_data"]["w"].update(y=[-1, 0])), "run from -1 to 0"),
        (broken(lambda f: f["user_data"]["w"].update(y=[0])), "2 images, 1 labels"),
        (broken(lambda f: f["user_data"]["w"].update(x=[[0.0] * 9] * 2)), "not 784"),
        (broken(lambda f: f["user_data"]["w"].update(x=[0.5, 0.5])), "not 784"),
        (broken(lambda f: f["user_data"]["w"]["x"][1].__setitem__(5, 255)), r"not within \[0, 1\]"),
        (broken(lambda f: f["user_data"]["w"]["x"][1].__setitem__(5, -0.1)), r"not within \[0, 1\]"),
        ({"users": [], "num_samples": [], "user_data": {}}, "holds no images"),
        ({"users": ["w"], "num_samples": [0], "user_data": {"w": {"x": [], "y": []}}}, "holds no images"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, held: Any, message: str) -> None:
    path = save(tmp_path / "bad.json", held)
    for read in (data.writers, data.load):
        with pytest.raises(DataError, match=message):
            read(path)


def test_infinite_pixels_are_refused(tmp_path: Path) -> None:
    text = json.dumps(content(w=1)).replace("1.0", "1e999", 1)
    with pytest.raises(DataError, match=r"not within \[0, 1\]"):
        data.writers(save(tmp_path / "a.json", text))


def test_a_writer_in_two_files_and_files_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.json", content(w0=1))
    save(tmp_path / "b.json", content(w0=1))
    with pytest.raises(DataError, match="'w0' is in another file too"):
        data.writers(tmp_path)
    size = os.path.getsize(tmp_path / "a.json")
    monkeypatch.setattr(leaf, "MOST_ALL", 2 * size - 1)
    with pytest.raises(DataError, match="GiB of JSON; at most"):
        data.writers(tmp_path)
    monkeypatch.setattr(leaf, "MOST_FILE", size - 1)
    with pytest.raises(DataError, match=r"a\.json has 0 MiB; at most 0 are read at once"):
        data.writers(tmp_path)


def test_places_that_hold_no_leaf_files(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent", save(tmp_path / "notes.txt", "hello")):
        with pytest.raises(DataError, match="holds no LEAF files.*emnist-writers"):
            data.writers(place)


# ---- writers as clients


def made(*sizes: int) -> data.Writers:
    count = sum(sizes)
    x = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images = Images(x, torch.arange(count) % 3, 3, ("a", "b", "c"), "a test")
    return data.Writers(images, tuple(f"w{number}" for number in range(len(sizes))), sizes)


def test_a_client_is_the_first_images_of_a_writer() -> None:
    found = made(3, 1, 5)
    clients = found.first(3)
    assert clients.names == ("w0", "w2")
    assert clients.sizes == (3, 3)
    assert torch.equal(clients[1].x, found[2].x[:3])
    federation = Federation(clients=2, examples=3, split="in_order")
    for client in range(2):
        target = federation.target(clients.images, client)
        assert target.client == client
        assert torch.equal(clients.images[target.rows].x, clients[client].x)
    with pytest.raises(DataError, match="none of 3 writers has 6 images; the most is 5"):
        found.first(6)
    with pytest.raises(DataError, match="examples is 0"):
        found.first(0)
    with pytest.raises(DataError, match="sum to 3 do not divide 4 images"):
        data.Writers(made(4).images, ("w",), (3,))


def test_in_order_needs_clients_of_one_size() -> None:
    federation = Federation(clients=4, examples=1, split="in_order")
    assert [rows.tolist() for rows in federation.partition(8)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(FederationError, match="4 clients do not divide 9"):
        federation.partition(9)
    assert registry.spelled(federation.split) == "in_order"
    assert registry.parse("partition", "in_order") == federation.split


# ---- pseudo-writers


def strokes(count: int) -> Images:
    """An upright bar of three columns, bright on black."""
    x = torch.zeros(count, 1, 28, 28)
    x[:, :, 6:22, 13:16] = 1.0
    return Images(x, torch.arange(count) % 2, 2, ("a", "b"), "bars")


def slant(x: torch.Tensor) -> float:
    """Columns per row of the ink's centre line."""
    rows = torch.arange(10, 18)
    centres = (x[0, rows] * torch.arange(28.0)).sum(1) / x[0, rows].sum(1)
    return float(np.polyfit(rows.numpy(), centres.numpy(), 1)[0])


def test_every_pseudo_writer_has_a_hand_of_its_own() -> None:
    found = data.pseudo_writers(strokes(43), 10)
    assert found.sizes == (5, 5, 5, 4, 4, 4, 4, 4, 4, 4)
    assert "pseudo-writers (made up" in found.images.source
    assert found.names[3] == "pseudo-writer 3"
    assert all((found[w].x == found[w].x[:1]).all() for w in range(10))  # fixed for a writer: bars are all alike
    slants = sorted(slant(found[writer].x[0]) for writer in range(10))
    torch.testing.assert_close(torch.tensor(slants), torch.linspace(-0.35, 0.35, 10), atol=0.05, rtol=0)
    ink = torch.stack([found[writer].x[0].sum() for writer in range(10)])
    assert ink.max() > 1.5 * ink.min()
    again, other = data.pseudo_writers(strokes(43), 10), data.pseudo_writers(strokes(43), 10, seed=1)
    assert torch.equal(found.images.x, again.images.x)
    assert not torch.equal(found.images.x, other.images.x)


def test_pseudo_writers_deal_each_image_once() -> None:
    images = strokes(20)
    images = Images(images.x, torch.arange(20), 20, tuple(map(str, range(20))), "numbered")
    found = data.pseudo_writers(images, 3)
    assert sorted(found.images.y.tolist()) == list(range(20))
    for count in (0, 21):
        with pytest.raises(DataError, match="Give from 1 to 20"):
            data.pseudo_writers(images, count)


def test_thin_and_wide_strokes_and_no_style_at_all() -> None:
    x, one = strokes(1).x, torch.ones(1)
    plain = leaf._styled(x, 0 * one, one, 0 * one)
    torch.testing.assert_close(plain, x, atol=1e-5, rtol=0)
    wide, thin = (leaf._styled(x, 0 * one, one, sign * one) for sign in (1, -1))
    assert wide.sum() == pytest.approx(18 * 5, rel=1e-5)  # a pixel on every side
    assert thin.sum() == pytest.approx(14 * 1, rel=1e-5)
    small = leaf._styled(x, 0 * one, 0.5 * one, 0 * one)
    assert small.sum() == pytest.approx(float(x.sum()) / 4, rel=0.05)


def test_emnist_writers_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADLEAK_DATA", str(tmp_path))
    monkeypatch.setenv("GRADLEAK_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="emnist_letters.npz"):
        data.load("emnist-writers")
    bars = (strokes(50).x[:, 0, :, :, None].numpy() * 255).astype(np.uint8)
    arrays = {"train_x": bars, "train_y": np.arange(50) % 26, "test_x": bars[:10], "test_y": np.arange(10)}
    np.savez(tmp_path / "emnist_letters.npz", **arrays, classes=np.array(list("abcdefghijklmnopqrstuvwxyz")))
    found = data.writers("emnist-writers")
    assert (len(found), found.sizes[0], found.images.classes) == (10, 5, 26)
    plain = data.load("emnist-writers")
    assert torch.equal(plain.x, found.images.x)
    assert torch.equal(plain.y, found.images.y)
    assert "pseudo-writers" in plain.source
    assert data.writers("emnist-writers", split="test").sizes == (1,) * 10
    assert len(data.load("emnist-writers", split="test")) == 10


# ---- "Enhanced"


def test_detail_ranks_flat_smooth_and_busy_images() -> None:
    flat, busy = torch.full((1, 1, 16, 16), 0.5), (torch.arange(256) // 2 % 2).float().reshape(1, 1, 16, 16)
    ramp = torch.linspace(0, 1, 16).expand(1, 1, 16, 16)
    scores = leaf.detail(torch.cat([ramp, flat, busy]))
    assert scores.argsort().tolist() == [1, 0, 2]
    assert float(scores.sum()) == pytest.approx(0, abs=1e-5)
    assert leaf.detail(busy).tolist() == [0]  # one image: nothing to compare it with
    assert leaf.detail(flat.expand(3, -1, -1, -1)).tolist() == [0, 0, 0]


def test_enhanced_takes_the_most_detailed_of_some_writers() -> None:
    found = made(8, 8, 8, 8)
    chosen = data.enhanced(found, 6, writers=2, seed=3)
    drawn = torch.randperm(4, generator=torch.Generator().manual_seed(3))[:2].tolist()
    pool = torch.cat([found[writer].x for writer in drawn])
    best = leaf.detail(pool).argsort(descending=True)[:6]
    assert torch.equal(chosen.x, pool[best])
    equal = data.enhanced(found, 6, writers=2, seed=3, each=True)
    from_first = (equal.x[:, None] == found[drawn[0]].x[None]).flatten(2).all(2).any(1)
    assert from_first.tolist() == [True] * 3 + [False] * 3
    for wrong, message in (
        ({"writers": 5}, "from 1 to 4"),
        ({"examples": 7, "writers": 2, "each": True}, "same number from each"),
        ({"examples": 17, "writers": 2}, "17 images are asked of 16"),
    ):
        with pytest.raises(DataError, match=message):
            data.enhanced(found, **{"examples": 6, **wrong})


def test_a_writer_is_attacked() -> None:
    """From a file to a score: the client of the multi-step papers, in small."""
    clients = data.pseudo_writers(strokes(20), 4).first(5)
    batch = clients[2].batch(slice(None))
    model = gl.models.cnn_mnist(classes=2, widths=(2, 2), hidden=8, generator=torch.Generator().manual_seed(0))
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(batch["x"], batch["y"]))
    training = gl.LocalTraining(lr=0.004, epochs=2, batch_size=2)
    seen = gl.observe(task, batch, training)
    knows = gl.Knowledge(training=training)
    found = gl.attacks.get("ig", steps=2, labels="path-bias").run(task, seen, knows)
    assert found.batch["y"][0].tolist() == sorted(batch["y"].tolist())
