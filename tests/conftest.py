"""Tiny tasks in float64 that every test can afford, and the ways to observe and attack them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import sys
from argparse import Namespace
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import gradleak as gl
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.task import Batch, TaskError

torch.set_num_threads(1)  # two test workers share two cores

SHAPE, CLASSES = (1, 4, 4), 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in an order of their own")


def pytest_configure(config: pytest.Config) -> None:
    """With --dist loadgroup, xdist writes a group's name into the id of a test: refuse a pytest that does not read it.

    Such a one (9.2) deals the tests of a group out to all workers, and nobody is told.
    """
    if config.getoption("dist", "no") != "loadgroup":
        return
    try:
        kept = pytest.Item.nodeid.fget(SimpleNamespace(_nodeid="test@group")) == "test@group"  # type: ignore[attr-defined]
    except AttributeError:
        kept = False
    if not kept:
        raise pytest.UsageError(
            f"pytest {pytest.__version__} and this pytest-xdist do not keep the tests of a group together. Install the "
            "versions of constraints.txt."
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)


@pytest.fixture(autouse=True)
def same_draws_every_time() -> None:
    """A test draws the same numbers alone, in any order and in any worker."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def network(*, norm: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Convolution, sigmoid, linear: 91 weights, smooth, with bias. `norm`: None, "eval" or "train" BatchNorm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Conv2d(1, 4, 3, stride=2, padding=1)]
        if norm is not None:
            layers.append(nn.BatchNorm2d(4))
        model = nn.Sequential(*layers, nn.Sigmoid(), nn.Flatten(), nn.Linear(16, CLASSES)).to(dtype)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                nn.init.uniform_(buffer, 0.5 if name.endswith("var") else -0.2, 1.5 if name.endswith("var") else 0.2)
    return model.train(norm == "train")


def tiny(*, norm: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> gl.Task:
    """A classification task of 1 x 4 x 4 images in 3 classes."""
    like = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(network(norm=norm, seed=seed, dtype=dtype), cross_entropy, like=like, **settings)


def perceptron(
    *, seed: int = 0, dtype: torch.dtype = torch.float64, activation: type[nn.Module] = nn.Sigmoid, **settings: Any
) -> gl.Task:
    """Two biased linear layers: a task that nearly every registered attack applies to; `sparse-span` with a ReLU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), activation(), nn.Linear(24, CLASSES)).to(dtype)
    like = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model, cross_entropy, like=like, **settings)


def convolved(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> gl.Task:
    """Two convolutions with few places and many outputs, for `span`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, CLASSES)).to(dtype)
    like = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model, cross_entropy, like=like)


def private(examples: int = 2, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Images in (0, 1) and labels that belong to nobody."""
    source = draws.Draws(draws.key("private", seed))
    y = (torch.arange(examples) + seed) % CLASSES
    return {"x": source.uniform((examples, *SHAPE), dtype=dtype), "y": y}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=seeded(seed), dtype=torch.float64)


class Linear(nn.Module):
    """<w, A x>, so that the gradient of an example is A x: an update that is linear in the data."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.weight = nn.Parameter(normal(len(matrix), seed=9))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.matrix.T) @ self.weight


@cache
def clients(training: gl.LocalTraining, side: int, count: int) -> tuple[gl.Task, list[gl.Observation], Batch]:
    """A small convolutional network, and clients of ten smooth images each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(side * side, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip
    like = (torch.zeros(1, 1, side, side), torch.zeros(1, dtype=torch.long))
    task = gl.Task.supervised(model, cross_entropy, like=like, mean=0.5, std=0.25)
    batches = []
    for seed in range(count):
        make = seeded(seed)
        pictures = interpolate(torch.rand(10, 1, 4, 4, generator=make), size=(side, side), mode="bicubic").clamp(0, 1)
        batches.append({"x": task.fields["x"].model(pictures), "y": torch.randint(0, 10, (10,), generator=make)})
    seen = [gl.observe(task, batch, training, key=f"client {i}", seed=i) for i, batch in enumerate(batches)]
    return task, seen, {name: torch.stack([batch[name] for batch in batches]) for name in ("x", "y")}


def scene_of(task: gl.Task, seen: gl.Observation, knows: gl.Knowledge | None = None, **fields: Tensor) -> TargetView:
    """What one lane's parts look at, outside the engine."""
    scene = TargetView.of(task, seen, knows or gl.Knowledge())
    return replace(scene, fields=fields, draws=draws.Draws(draws.key("lane", 0)))


def moment(step: int = 0, total: int = 10) -> Step:
    return Step(torch.tensor(float(step)), total)


def largest_difference(a: Any, b: Any) -> float:
    """The largest absolute difference between two trees or tensors."""
    if isinstance(a, Tensor):
        a, b = {"": a}, {"": b}
    return max(float(gap.detach().abs().max()) if gap.numel() else 0.0 for gap in tree.leaves(tree.subtract(a, b)))


def short(name: str, **settings: Any) -> gl.Attack:
    """A registered attack with few steps and two restarts, where it has such settings."""
    known = gl.registry.entry("attack", name).settings
    return gl.attacks.get(name, **{key: value for key, value in {"restarts": 2, **settings}.items() if key in known})


@cache
def on_classifiers() -> dict[str, gl.Reconstruction]:
    """What each attack finds in five steps on a tiny classifier, by name, for those that do not refuse it.

    Attacks on denoisers, and those that need a generator, refuse; they have tests of their own. Which they are is asked
    of the attacks, so a new one is in these tables by itself.
    """
    training = gl.LocalTraining(lr=0.5)
    task, found = perceptron(), {}
    seen = gl.observe(task, private(1), training)
    for name in gl.attacks.names():
        with contextlib.suppress(MissingKnowledge, TaskError):
            found[name] = short(name, steps=5).run(
                task, seen, gl.Knowledge(training=training), engine=gl.Engine(device="cpu")
            )
    return found


@pytest.fixture
def double() -> gl.Engine:
    return gl.Engine(device="cpu", precision="double")


# --- scripts ----------------------------------------------------------------------------------------------------------


def script(path: str) -> ModuleType:
    """A file of the repository that is no part of the package, as a module: benchmarks/peers.py."""
    file = Path(__file__).parents[1] / path
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def reproduction(folder: str, name: str = "run") -> ModuleType:
    """A script of papers/, as a module."""
    return script(f"papers/{folder}/{name}.py")


def measured(paper: ModuleType, options: Namespace) -> dict[str, Any]:
    """The rows of a script of papers/ that its options pick: what its `main` records."""
    record = importlib.import_module("record")  # the script has put its folder on the path
    return record.with_effort(options, paper.Effort, paper.rows(), paper.told_in_a_line)


def blobs(path: Path, side: int, train: int, test: int = 8) -> Path:
    """Images of four classes, made here: blobs in colours that tell the class."""
    source = np.random.default_rng(0)
    where = np.linspace(-1, 1, side)

    def some(count: int) -> tuple[Any, Any]:
        y = np.arange(count) % 4
        middle = source.uniform(-0.5, 0.5, (count, 2, 1, 1))
        blob = np.exp(-4 * ((where[:, None] - middle[:, 0]) ** 2 + (where - middle[:, 1]) ** 2))
        tint = np.eye(4)[y][:, None, None, :3] * 0.5 + 0.4
        return (255 * blob[..., None] * tint).astype(np.uint8), y

    (x, y), (test_x, test_y) = some(train), some(test)
    np.savez(path, train_x=x, train_y=y, test_x=test_x, test_y=test_y)
    return path
