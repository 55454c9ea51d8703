"""What is attacked and trained: data, networks, the algorithms of the paper's tables; how much of it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from gradleak.audit.private import Stored, examples_of
from gradleak.defences import PGD, DPFedAvgLewis, DPSecAdam, SecAdam
from gradleak.scenario.defence import Defence
from gradleak.scenario.task import Batch, Task

GRADIENT = gl.LocalTraining(lr=1.0)
TRAINED_ON = 128  # images in a step of the training that makes the attacked networks


@dataclass(frozen=True)
class Effort:
    """How much of it is computed, and where. The defaults are for a GPU; `small` is for a minute a row on a CPU.

    `small`: thin ConvNeXts and ResNets, 400 images to train on, whatever the data.
    """

    runs: int = 30  # victim batches, the paper's; 100 in its ablation
    steps: int = 1000  # iterations of an attack
    trained: int = 2000  # steps of the training of an attacked network; the paper: 100 epochs
    rounds: int = 3000  # of federated training
    clients: int = 50  # the largest cohort that is attacked
    seed: int = 0
    small: int = 0
    data: str = ""  # an .npz or a name, instead of each row's own
    precision: str = "strict"
    device: str = "auto"

    @property
    def engine(self) -> gl.Engine:
        return gl.Engine(device=self.device, precision=self.precision)

    @property
    def training(self) -> Effort:
        """What the training of a network depends on, and nothing else."""
        names = ("trained", "seed", "small", "data", "precision", "device")
        return Effort(**{name: getattr(self, name) for name in names})


# --- data and networks ------------------------------------------------------------------------------------------------

Make = Callable[..., nn.Module]
LENET: dict[str, Any] = {"pool": "avg", "padding": (0, 2), "init": "lecun"}


def _small_convnext(**like: Any) -> nn.Module:
    return gl.models.convnext((1, 1), (16, 32), **like)


def _small_resnet(**like: Any) -> nn.Module:
    return gl.models.resnetv2((1, 1), 8, **like)


MODELS: dict[tuple[str, bool], Make] = {
    ("lenet", False): lambda **like: gl.models.lenet5(**LENET, **like),
    ("cnn", False): gl.models.cnn_lewis,
    ("lenet-zhu", False): gl.models.lenet_zhu,
    ("convnext", False): gl.models.convnext,
    ("resnetv2", False): gl.models.resnetv2,
    ("convnext", True): _small_convnext,
    ("resnetv2", True): _small_resnet,
}
RATES = {"fashion-mnist": 1e-3, "cifar10": 1e-3}  # 1e-4 for the others


@cache
def images(name: str, split: str, limit: int | None) -> gl.data.Images:
    return gl.data.load(name, split=split, limit=limit)  # unpacking takes seconds


@dataclass(frozen=True)
class Network:
    """A network for a data set on plain [0, 1] pixels; trained with Adam, on adversarial images, or untrained."""

    data: str = "fashion-mnist"
    model: str = "lenet"
    trained: bool = True
    options: tuple[tuple[str, Any], ...] = ()  # of the network
    recipe: str = "adam"  # or "sgd": the ablation's, 8 images a step, without adversarial images
    length: float = 1.0  # of the training, in units of the effort's
    shrunk: int = 1  # by this factor along each side

    def images(self, effort: Effort, split: str) -> gl.data.Images:
        held = images(effort.data or self.data, split, 400 if effort.small else None)
        return held if self.shrunk == 1 else replace(held, x=F.avg_pool2d(held.x, self.shrunk))

    def task(self, effort: Effort) -> Task:
        return _task(self, effort.training)

    def stored(self, effort: Effort, split: str) -> Stored:
        held = examples_of(self.images(effort, split), self.task(effort))
        assert isinstance(held, Stored)
        return held

    def victims(self, effort: Effort, examples: int) -> Batch:
        """Batches of the training images, drawn with replacement as the paper's are, (runs, examples, ...)."""
        data = self.stored(effort, "train")
        draw = torch.Generator().manual_seed(effort.seed + 1)
        rows = torch.randint(len(data), (effort.runs, examples), generator=draw)
        flat = data.batch(rows.flatten())
        return {name: value.reshape(*rows.shape, *value.shape[1:]) for name, value in flat.items()}

    def accuracy(self, effort: Effort) -> float:
        task, data = self.task(effort), self.stored(effort, "test")
        with torch.no_grad():
            parts = [task.model(x) for x in data.tensors["x"].split(256)]
        return float((torch.cat(parts).argmax(1) == data.tensors["y"]).double().mean())

    def described(self, effort: Effort) -> dict[str, Any]:
        return {
            "data": self.images(effort, "train").source,
            "network": repr(self),
            "parameters": sum(p.numel() for p in self.task(effort).model.parameters()),
            "trained_steps": round(effort.trained * self.length) if self.trained else 0,
            "test_accuracy": self.accuracy(effort),
        }


@cache
def _task(network: Network, effort: Effort) -> Task:
    held = network.images(effort, "train")
    small = bool(effort.small) and (network.model, True) in MODELS
    like = {"shape": tuple(held.x.shape[1:]), "classes": held.classes}
    generator = torch.Generator().manual_seed(effort.seed)
    model = MODELS[network.model, small](**like, **dict(network.options), generator=generator)
    task = Task.supervised(model.to(effort.engine.where), F.cross_entropy, like=(held.x[:1], held.y[:1]))
    if network.trained:
        _train(task, network, effort)
    task.model.eval()
    return task


def _train(task: Task, network: Network, effort: Effort) -> None:
    """In place. Adam on images moved by PGD (not for SVHN), as the attacked networks of the paper; or plain SGD."""
    data = examples_of(network.images(effort, "train"), task)
    assert isinstance(data, Stored)
    plain, where = network.recipe == "sgd", effort.engine.where
    data = data.to(where, torch.float32)
    rate = 1e-3 if plain else RATES.get(network.data, 1e-4)
    make = torch.optim.SGD if plain else torch.optim.Adam
    optimiser = make(task.model.parameters(), lr=rate)
    worst = None if plain or network.data == "svhn" else PGD()
    count, size = round(effort.trained * network.length), 8 if plain else min(TRAINED_ON, len(data))
    draw = torch.Generator().manual_seed(effort.seed)
    rows = torch.randint(len(data), (count, size), generator=draw).to(where)
    turn = torch.zeros(1, dtype=torch.long, device=where)

    def step() -> None:
        batch = data.batch(rows.index_select(0, turn)[0])
        turn.add_(1)
        if worst is not None:
            batch = worst.worst(task, task.weights(), batch)
        optimiser.zero_grad()
        F.cross_entropy(task.model(batch["x"]), batch["y"]).backward()
        optimiser.step()

    # Steps of eight images wait for Python; those of the others are long, and Adam counts its own.
    _repeated(step, count, captured=plain and where.type == "cuda")


def _repeated(step: Callable[[], None], count: int, captured: bool) -> None:
    """Call it so many times; `captured`: as a CUDA graph, after three calls as torch asks for."""
    by_hand = min(3, count) if captured else count
    if captured:
        torch.cuda.synchronize()  # what is on its way to the device is not of the new stream
    with torch.cuda.stream(torch.cuda.Stream()) if captured else nullcontext():
        for _ in range(by_hand):
            step()
    if captured:
        torch.cuda.synchronize()
    if by_hand < count:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(by_hand, count):
            graph.replay()


# --- the columns of the tables ----------------------------------------------------------------------------------------


def algorithms() -> dict[str, Defence | None]:
    """As attacked: what a single client's update shows. C = 10 and noise 0.001 are the text's."""
    return {
        "FedAVG": None,
        "SecAdam": SecAdam(),
        "DP-FedAVG": DPFedAvgLewis(clip=10.0, noise=1e-3),
        "DP-SecAdam": DPSecAdam(clip=10.0, noise=1e-3),
    }


def single(batch: Mapping[str, Tensor], run: int) -> Batch:
    return {name: value[run] for name, value in batch.items()}
