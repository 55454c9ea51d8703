"""What the server sees: validation, files, and a thousand damaged files."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gradleak as gl
from conftest import largest_difference, private, tiny
from gradleak.engine import EngineError
from gradleak.scenario.observation import BadObservation, Knowledge, MissingKnowledge, Observation, Track, as_targets

ONE = {"w": torch.ones(2, 2), "b": torch.zeros(2)}


def example(**settings: object) -> Observation:
    return Observation(**{"weights": ONE, "update": ONE, "num_examples": 1, **settings})


# --- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_examples": 0}, "num_examples must be a whole number from 1 to 1000000000; given 0"),
        ({"num_examples": 10**30}, "num_examples must be a whole number from 1 to 1000000000"),
        ({"num_examples": 2.0}, "num_examples must be a whole number"),
        ({"num_examples": True}, "num_examples must be a whole number"),
        ({"round": -1}, "round must be a whole number from 0"),
        ({"clients": 0}, "clients must be"),
        ({"key": 3}, "key must be text; given int"),
        ({"weights": {}}, "weights are empty"),
        ({"update": {"w": torch.ones(2, 2)}}, "name different parameters: 'b'"),
        ({"update": {**ONE, "b": torch.ones(3)}}, r"'b' has shape \(2,\) in weights and \(3,\) in update"),
        ({"update": {**ONE, "b": torch.ones(2).long()}}, "'b' is torch.int64, not floating point"),
        ({"update": {**ONE, "b": torch.tensor([0.0, torch.nan])}}, "update holds NaN or infinity in 'b'"),
        ({"weights": {**ONE, "w": torch.full((2, 2), torch.inf)}}, "weights holds NaN or infinity in 'w'"),
    ],
)
def test_what_no_server_can_have_seen_is_refused(settings: dict, told: str) -> None:
    with pytest.raises(BadObservation, match=told):
        example(**settings)


def test_a_track_is_one_client_in_rising_rounds() -> None:
    Track((example(round=1), example(round=4)))
    with pytest.raises(BadObservation, match="rounds must increase"):
        Track((example(round=1), example(round=1)))
    with pytest.raises(BadObservation, match="at least one"):
        Track(())
    with pytest.raises(BadObservation, match=r"same examples each time; given \[1, 2\]"):
        Track((example(round=1), replace(example(round=2), num_examples=2)))


def test_independent_targets_need_keys_of_their_own() -> None:
    assert [target.key for target in as_targets([example(key="a"), example(key="b")])] == ["a", "b"]
    assert len(as_targets(example())) == 1
    with pytest.raises(BadObservation, match="share a key.*'target'"):
        as_targets([example(), example()])
    with pytest.raises(BadObservation, match="no observation"):
        as_targets([])
    assert as_targets([Track((example(round=1, key="a"), example(round=2, key="b")))])[0].key == "b"


def test_knowledge_says_what_it_grants() -> None:
    nothing, labels = Knowledge(), Knowledge(given={"y": torch.tensor([1])})
    training = Knowledge(training=gl.LocalTraining(lr=1.0))
    assert nothing.grants == frozenset()
    assert labels.grants == {"y"}
    assert training.grants == {"training"}
    assert [know.level[0] for know in (nothing, training, Knowledge(public=[]), Knowledge(generator=print))] == list(
        "BCDE"
    )


# --- files ------------------------------------------------------------------------------------------------------------


def full() -> Observation:
    task = tiny(norm="train")
    seen = gl.observe(task, private(2), gl.LocalTraining(lr=0.1, steps=2), key="client 7: äöü")
    extras = {"perturbed": task.weights(), "c": {"c": torch.tensor(0.1)}}
    return Observation(seen.weights, seen.update, 2, 3, 5, seen.key, seen.buffers, seen.returned_buffers, extras)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    before = full()
    after = Observation.load(before.save(tmp_path / "seen.safetensors"))
    for name in ("num_examples", "round", "clients", "key"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("weights", "update", "buffers", "returned_buffers"):
        held, read = getattr(before, name), getattr(after, name)
        assert {key: value.dtype for key, value in held.items()} == {key: value.dtype for key, value in read.items()}
        assert largest_difference(held, read) == 0
    assert largest_difference(after.extras, before.extras) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["seen.safetensors"]


def test_absent_parts_stay_absent(tmp_path: Path) -> None:
    after = Observation.load(example().save(tmp_path / "seen"))
    assert after.buffers is None
    assert after.returned_buffers is None
    assert after.extras == {}


def test_a_file_attacks_like_the_observation_it_was_saved_from(tmp_path: Path) -> None:
    """The names come back in another order; nothing may depend on it."""
    task, training = tiny(dtype=torch.float32), gl.LocalTraining(lr=1.0)
    seen = gl.observe(task, private(1, dtype=torch.float32), training)
    read = Observation.load(seen.save(tmp_path / "seen"))
    attack = gl.attacks.get("idlg", steps=5)
    ours, theirs = (attack.run(task, given, Knowledge(training=training)) for given in (seen, read))
    assert largest_difference(ours.batch["x"], theirs.batch["x"]) < 1e-5


HEADER = {"num_examples": 1, "round": 0, "clients": 1, "key": "target"}
TENSORS = {"weights/w": torch.ones(2), "update/w": torch.ones(2)}


def write(path: Path, tensors: dict | None = None, metadata: dict | None = None, **header: object) -> Path:
    """A file as `save` writes it, with some of it replaced."""
    told = {"format": "gradleak.observation", "version": "1", "observation": json.dumps({**HEADER, **header})}
    save_file(TENSORS if tensors is None else tensors, path, metadata={**told, **(metadata or {})})
    return path


def holding(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: p, "There is no file"),
        (lambda p: holding(p, b""), "not a readable observation"),
        (lambda p: holding(p, b"\x80\x04 pickled"), "not a readable observation"),
        (lambda p: write(p, metadata={"format": "pt"}), "not an observation"),
        (lambda p: write(p, metadata={"version": "99"}), "version '99'; this gradleak reads 1"),
        (lambda p: write(p, metadata={"observation": "{"}), "not a readable observation"),
        (lambda p: write(p, metadata={"observation": "[]"}), "header holds list"),
        (lambda p: write(p, metadata={"observation": "{}"}), "no num_examples"),
        (lambda p: write(p, surprise=1), "unknown entries 'surprise'"),
        (lambda p: write(p, num_examples="many"), "num_examples must be a whole number"),
        (lambda p: write(p, num_examples=1e400), "num_examples must be a whole number"),
        (lambda p: write(p, key=None), "key must be text"),
        (lambda p: write(p, key="\ud800"), "key must be text that can be written"),
        (lambda p: write(p, {"weights/w": torch.ones(2)}), "name different parameters"),
        (lambda p: write(p, {**TENSORS, "truth/x": torch.ones(2)}), "'truth/x' belongs to none of"),
        (lambda p: write(p, {**TENSORS, "extras/x": torch.ones(2)}), "'extras/x' belongs to none of"),
        (lambda p: write(p, {**TENSORS, "update/w": torch.ones(3)}), "has shape"),
        (lambda p: write(p, {**TENSORS, "update/w": torch.ones(2) / 0}), "NaN or infinity"),
        (
            lambda p: write(p, {name: value.to(torch.complex64) for name, value in TENSORS.items()}),
            "not floating point",
        ),
        (
            lambda p: write(p, {name: value.to(torch.float8_e4m3fn) for name, value in TENSORS.items()}),
            "float8_e4m3fn, not floating point of 16",
        ),
        (lambda p: p.mkdir() or p, "not a readable observation"),
    ],
)
def test_each_defect_is_one_message(tmp_path: Path, make: Callable[[Path], Path], told: str) -> None:
    with pytest.raises(BadObservation, match=told) as raised:
        Observation.load(make(tmp_path / "seen.safetensors"))
    assert "\n" not in str(raised.value)
    assert "seen.safetensors" in str(raised.value)


# --- a thousand damaged files -----------------------------------------------------------------------------------------


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


WORDS = ["", "F64", "F8_E5M2", "BOOL", "weights/w", "../../etc/passwd", "__proto__", "\ud800", "NaN", "x" * 5000]
NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1e308, float("nan")]


def junk(random_: random.Random, depth: int = 0) -> object:
    kinds = [lambda: random_.choice(WORDS), lambda: random_.choice(NUMBERS), lambda: None, lambda: True]
    if depth < 2:
        kinds += [lambda: [junk(random_, depth + 1) for _ in range(random_.randrange(4))]]
        kinds += [lambda: {random_.choice(WORDS): junk(random_, depth + 1) for _ in range(random_.randrange(3))}]
    return random_.choice(kinds)()


def edited(random_: random.Random, header: dict) -> dict:
    """The JSON header with one thing in it replaced: a size, an offset, a type, a name, or an entry of ours."""
    header = json.loads(json.dumps(header))
    name = random_.choice([key for key in header if key != "__metadata__"])
    choice = random_.randrange(6)
    if choice == 0:
        header[name]["shape"] = random_.choice([junk(random_), [0, 2**62], [2**40, 2**40], [2**63], [], [-2]])
    elif choice == 1:
        header[name]["data_offsets"] = random_.choice([junk(random_), [0, 2**60], [8, 0], [0, 0], [-8, 8]])
    elif choice == 2:
        header[name]["dtype"] = random_.choice(["F64", "F8_E4M3", "F4", "BF16", "I64", "U16", "C64", "BOOL", "pickle"])
    elif choice == 3:
        header[random_.choice(WORDS)] = header.pop(name)
    elif choice == 4:
        header["__metadata__"]["observation"] = json.dumps(junk(random_))
    else:
        held = json.loads(header["__metadata__"]["observation"])
        held[random_.choice([*held, "extra"])] = junk(random_)
        header["__metadata__"]["observation"] = json.dumps(held)
    return header


def odd_but_consistent(random_: random.Random, header: dict) -> tuple[dict, bytes]:
    """Every size fits, so the file opens; but the numbers, types and shapes are strange."""
    bits = random_.choice(
        [("F8_E4M3", 8), ("F8_E5M2", 8), ("F16", 16), ("BF16", 16), ("F64", 64), ("U16", 16), ("BOOL", 8)]
    )
    shape = random_.choice([[2], [0, 2**62], [0], [], [1] * 70, [2**31, 0, 2**31]])
    count = 0 if 0 in shape else 2 if shape == [2] else 1
    size, at = count * bits[1] // 8, 0
    for name in header:
        if name != "__metadata__":
            header[name] = {"dtype": bits[0], "shape": shape, "data_offsets": [at, at + size]}
            at += size
    return header, random_.randbytes(at)


def damaged(random_: random.Random, sound: bytes, payloads: list[bytes]) -> bytes:
    """One of many ways to spoil a file."""
    length = struct.unpack("<Q", sound[:8])[0]
    header, rest = json.loads(sound[8 : 8 + length]), sound[8 + length :]
    choice = random_.randrange(9)
    if choice == 0:  # bit flips, mostly in the header, where they matter
        data = bytearray(sound)
        for _ in range(random_.randint(1, 8)):
            position = random_.randrange(8 + length if random_.random() < 0.8 else len(data))
            data[position] ^= 1 << random_.randrange(8)
        return bytes(data)
    if choice == 1:
        return sound[: random_.randrange(len(sound))]
    if choice == 2:
        return sound + random_.randbytes(random_.randint(1, 100))
    if choice == 3:
        return random_.randbytes(random_.randrange(400))
    if choice == 4:  # a header that claims to be huge
        return struct.pack("<Q", random_.choice([2**63, 2**40, 10**8, length * 10, 2**64 - 1])) + sound[8:]
    if choice == 5:  # code in place of the file, of the header or of the data
        payload = random_.choice(payloads)
        return random_.choice([payload, struct.pack("<Q", len(payload)) + payload, sound[: 8 + length] + payload])
    if choice == 6:  # deep nesting, long numbers
        text = random_.choice([b"[" * 20000, b'{"a":' * 20000, b'{"a": ' + b"9" * 20000 + b"}", b"{}", b"null"])
        return struct.pack("<Q", len(text)) + text + rest
    if choice == 7:
        header, rest = odd_but_consistent(random_, header)
    else:
        header = edited(random_, header)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + rest


def corpus(marker: Path) -> Iterator[bytes]:
    random_ = random.Random(0)
    seen = example(buffers={"n": torch.tensor(3)}, extras={"c": {"c": torch.tensor(0.1)}})
    sound = seen.save(marker.with_name("sound")).read_bytes()
    payloads = [pickle.dumps(Payload(str(marker)), protocol=p) for p in (0, 2, 4)]
    for _ in range(1000):
        yield damaged(random_, sound, payloads)


def test_the_payload_would_run_if_anything_unpickled_it(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(str(tmp_path / "ran"))))
    assert (tmp_path / "ran").exists()


class Named(nn.Module):
    """The model that the example observation is of."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(ONE["w"].clone()), nn.Parameter(ONE["b"].clone())
        self.register_buffer("n", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) @ self.w.T + self.b


def test_a_thousand_damaged_files_raise_nothing_else_and_run_nothing(tmp_path: Path) -> None:
    """Also not when what loads is attacked: it runs, or one clear error says why not."""
    path, marker = tmp_path / "seen.safetensors", tmp_path / "ran"
    like = (torch.zeros(1, 2), torch.zeros(1).long())
    task = gl.Task.supervised(Named(), nn.functional.cross_entropy, like=like)
    attack, knows = gl.attacks.get("dlg", steps=1), gl.Knowledge(training=gl.LocalTraining(lr=1.0))
    refused = attacked = 0
    for data in corpus(marker):
        path.write_bytes(data)
        try:
            seen = Observation.load(path)
        except BadObservation:
            refused += 1
            continue
        with contextlib.suppress(MissingKnowledge, EngineError):
            attack.run(task, seen, knows)
            attacked += 1
    assert refused > 800  # a flipped bit in a weight is a sound file
    assert attacked > 0
    assert not marker.exists()
