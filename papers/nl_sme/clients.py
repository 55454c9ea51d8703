"""Whose updates are attacked: the clients of SME and NL-SME, as they train, and what the server sees of them.

Plain SGD with learning rate 0.004 from a fresh network in evaluation mode, reshuffled each epoch, last short batch kept
(Zhu, Yao, Blaschko, ICML 2023). CIFAR-100 is split at random into clients of N; the letters of EMNIST stand in for
FEMNIST, which has to be made with LEAF's own script (`--letters femnist`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gradleak as gl
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.data import DataError, Images, Writers
from gradleak.scenario.rules import SGD, Adam, cosine_decay
from gradleak.scenario.task import Batch, Task

APART = 10  # clients from this one on are in no table: settings are tuned on them
SOURCES = 10  # pseudo-writers
RATE = 0.004


# Rules of clients as they really train; their rates are ours, those of SGD the papers'.
def flipped(batch: Batch, draws: Draws, step: int) -> Batch:
    """Each image of a step mirrored or not, by a coin of the client's."""
    x = batch["x"]
    coin = draws.uniform((len(x), 1, 1, 1), step=step, dtype=x.dtype) < 0.5
    return {**batch, "x": torch.where(coin, x.flip(-1), x)}


RECIPES: dict[str, gl.LocalTraining] = {
    "sgd": gl.LocalTraining(RATE),
    "momentum": gl.LocalTraining(0.001, optimiser=SGD(momentum=0.9)),
    "weight decay": gl.LocalTraining(RATE, optimiser=SGD(weight_decay=5e-4)),
    "momentum and weight decay": gl.LocalTraining(0.001, optimiser=SGD(momentum=0.9, weight_decay=5e-4)),
    "adam": gl.LocalTraining(1e-4, optimiser=Adam()),
    "falling rate": gl.LocalTraining(2 * RATE, schedule=cosine_decay),
    "mirrored images": gl.LocalTraining(RATE, augmentation=flipped),
    "dropout": gl.LocalTraining(RATE, dropout=True),
}
# Of SME's code for CIFAR-100, and of LEAF's FEMNIST; of other sets their own are taken.
KNOWN: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "cifar100": ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)),
    "femnist": ((0.9642384386,), (0.1576784320,)),
}


@dataclass(frozen=True)
class Effort:
    """How much of it is computed, and where. The defaults are for a GPU; `small` is thin networks and short clients."""

    clients: int = 10
    steps: int = 1000  # of every attack; DLFA has 0.4 of them, as in its scripts
    coarse: int = 20  # K of coarse replay
    coarse_tv: float = 0.005  # weight of total variation in coarse replay
    first: int = 0  # the first client that is attacked
    methods: str = ""  # only these of a row, by name
    seed: int = 0  # of split, network, shuffles and attacks
    small: int = 0
    data: str = ""  # cifar100, or cifar100-mini where that is not found
    letters: str = ""  # emnist-letters; femnist where LEAF's files are at hand
    precision: str = "strict"
    pictures: str = ""  # a folder for image grids; none if empty
    device: str = "auto"

    @property
    def engine(self) -> gl.Engine:
        return gl.Engine(device=self.device, precision=self.precision)


# --- images -----------------------------------------------------------------------------------------------------------


@cache
def images(name: str) -> Images:
    return gl.data.load(name, split="train")


@cache
def found(given: str, usual: str) -> str:
    """The name of the data: as given, else the usual set, else its small pack."""
    if given:
        return given
    try:
        images(usual)
    except DataError:
        return f"{usual}-mini"
    return usual


def characters(effort: Effort) -> str:
    return effort.letters or "emnist-letters"


@cache
def written(name: str, seed: int) -> Writers:
    """Real writers where the set names them, else made-up ones; their names say which."""
    return gl.data.writers(name) if name == "femnist" else gl.data.pseudo_writers(images(name), SOURCES, seed=seed)


def _split(own: Images, setting: Setting, effort: Effort) -> list[Images]:
    """A random equal split: client i holds places i N to (i + 1) N of one shuffle."""
    size = setting.size(effort)
    rows = torch.randperm(len(own), generator=torch.Generator().manual_seed(effort.seed))
    return [own[share] for share in rows.split(size) if len(share) == size]


def _colour(setting: Setting, effort: Effort) -> list[Images]:
    return _split(images(found(effort.data, "cifar100")), setting, effort)


def _letters(setting: Setting, effort: Effort) -> list[Images]:
    name = characters(effort)
    return _original(setting, effort) if name == "femnist" else _split(images(name), setting, effort)


def _original(setting: Setting, effort: Effort) -> list[Images]:
    """The first N images of each writer."""
    held = written(characters(effort), effort.seed).first(setting.size(effort))
    return [held[writer] for writer in range(len(held))]


def _enhanced(setting: Setting, effort: Effort) -> list[Images]:
    """Of five random writers the images with most detail, for each client other five.

    Every writer's images are dealt out first: no image belongs to two clients, which would not be two samples.
    """
    held = written(characters(effort), effort.seed)
    last = effort.first + effort.clients
    return [
        gl.data.enhanced(dealt(held, client, last), setting.size(effort), writers=5, seed=client)
        for client in range(last)
    ]


def dealt(held: Writers, client: int, clients: int) -> Writers:
    """One client's share of every writer: each `clients`-th image."""
    starts = [sum(held.sizes[:writer]) for writer in range(len(held))]
    rows = [torch.arange(start + client, start + size, clients) for start, size in zip(starts, held.sizes)]
    return Writers(held.images[torch.cat(rows)], held.names, tuple(len(own) for own in rows))


SPLITS: dict[str, Callable[[Setting, Effort], list[Images]]] = {
    "cifar100": _colour,
    "letters": _letters,
    "original": _original,
    "enhanced": _enhanced,
}


# --- a setting --------------------------------------------------------------------------------------------------------

THIN: Mapping[str, Callable[..., nn.Module]] = {
    "cnn-cifar": partial(gl.models.cnn_mnist, widths=(8, 16), hidden=24),
    "cnn-mnist": partial(gl.models.cnn_mnist, widths=(8, 16), hidden=24),
    "mlp-sme": partial(gl.models.mlp, widths=(48, 48)),
    "vit-sme": partial(gl.models.vit, patch=4, width=16, heads=2, depth=1),
    "vit": partial(gl.models.vit, patch=7, width=16, heads=2, depth=1),
}


@dataclass(frozen=True)
class Setting:
    """Data, network and recipe of the clients.

    With `small`: thin networks, half the epochs, a fifth of examples and batch size, five times the learning rate.
    """

    data: str = "cifar100"
    model: str = "cnn-cifar"
    epochs: int = 20
    examples: int = 50
    batch_size: int = 10
    rule: str = "sgd"

    def size(self, effort: Effort) -> int:
        return max(4, self.examples // 5) if effort.small else self.examples

    def recipe(self, effort: Effort) -> gl.LocalTraining:
        own, epochs, size = RECIPES[self.rule], self.epochs, self.batch_size
        if effort.small:
            own, epochs, size = replace(own, lr=5 * own.lr), max(2, epochs // 2), max(1, size // 5)
        return replace(own, epochs=epochs, batch_size=size)

    def steps(self, effort: Effort) -> int:
        """T, the client's local steps."""
        return len(self.recipe(effort).order(self.size(effort)))

    def clients(self, effort: Effort) -> list[Images]:
        """Those that are attacked; fewer where the data has no more."""
        return _clients(self, effort)

    def task(self, effort: Effort) -> Task:
        """The fresh network, in evaluation mode, on the device."""
        own = (self.data, self.model, RECIPES[self.rule].dropout)
        return _task(*own, effort.seed, effort.small, effort.device, effort.data, effort.letters)

    def batches(self, effort: Effort) -> list[Batch]:
        """What each client holds, in model-input space."""
        task = self.task(effort)
        where = tree.like(task.weights()).device
        own = [{"x": task.fields["x"].model(each.x), "y": each.y} for each in self.clients(effort)]
        return [tree.to(batch, where, torch.float32) for batch in own]

    def truth(self, effort: Effort) -> Batch:
        """What all of them hold: (clients, N, ...)."""
        return tree.map(lambda *each: torch.stack(each), *self.batches(effort))

    def observed(self, effort: Effort) -> list[gl.Observation]:
        """What the server sees of each client."""
        return _observed(self, effort)

    def key(self, effort: Effort, number: int) -> str:
        """The name of the client, which seeds its shuffles and the starts of attacks on it."""
        return f"client {effort.first + number}"

    def described(self, effort: Effort) -> dict[str, Any]:
        task, clients, recipe = self.task(effort), self.clients(effort), self.recipe(effort)
        return {
            "data": clients[0].source,
            "clients": len(clients),
            "first_client": effort.first,
            "examples": self.size(effort),
            "epochs": recipe.epochs,
            "batch_size": recipe.batch_size,
            "local_steps": self.steps(effort),
            "client_rule": f"{recipe.optimiser!r}, lr {recipe.lr}" + ("" if self.rule == "sgd" else f" ({self.rule})"),
            "model": self.model if not effort.small or self.model not in THIN else f"{self.model}, thin",
            "parameters": tree.size(task.weights()),
            "mode": "evaluation (BatchNorm statistics as they begin)",
            "seed": effort.seed,
            "small": effort.small,
        }


@cache
def _task(data: str, model: str, drops: bool, seed: int, small: int, device: str, given: str, letters: str) -> Task:
    effort = Effort(seed=seed, data=given, letters=letters)
    name = found(given, "cifar100") if data == "cifar100" else characters(effort)
    own = written(name, seed).images if name == "femnist" else images(name)
    make = THIN[model] if small and model in THIN else partial(gl.registry.get, "model", model)
    network = make(
        shape=tuple(own.x.shape[1:]), classes=own.classes, generator=torch.Generator().manual_seed(seed)
    ).eval()
    if drops:  # half of what the last layer sees is dropped, in each step another half
        *body, last = network
        network = nn.Sequential(*body, nn.Dropout(0.5), last).eval()
    mean, std = KNOWN.get(name.removesuffix("-mini"), (None, None))
    if mean is None or std is None:
        mean, std = own.x.mean((0, 2, 3)).tolist(), own.x.std((0, 2, 3)).tolist()
    task = Task.supervised(network, F.cross_entropy, like=(own.x[:1], own.y[:1]), mean=mean, std=std)
    return task.to(gl.Engine(device=device).where, torch.float32)


@lru_cache(maxsize=2)
def _clients(setting: Setting, effort: Effort) -> list[Images]:
    chosen = SPLITS[setting.data](setting, effort)[effort.first : effort.first + effort.clients]
    if not chosen:
        raise DataError(
            f"{setting.data} has no client {effort.first} of {setting.size(effort)} examples: give a lower --first, "
            "or more images."
        )
    return chosen


@lru_cache(maxsize=2)
def _observed(setting: Setting, effort: Effort) -> list[gl.Observation]:
    task, recipe = setting.task(effort), setting.recipe(effort)
    weights = task.weights()  # one snapshot: lanes share it
    return [
        gl.observe(task, batch, recipe, weights=weights, key=setting.key(effort, number), seed=effort.seed)
        for number, batch in enumerate(setting.batches(effort))
    ]


def apart(effort: Effort) -> Effort:
    """One client that is in no table."""
    return replace(effort, first=APART, clients=1)
