"""What the server sends: the LeNet federations of the paper, each trained once and kept in a folder.

10 clients, 5 in a round, 5 epochs in batches of 64, SGD with weight decay 5e-4, IID; one method in all rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import prior_of
from torch import Tensor

import gradleak as gl
from gradleak.audit.private import Stored, examples_of
from gradleak.core import tree
from gradleak.core.configuration import digest
from gradleak.core.folder import FolderInUse
from gradleak.data import DataError, Images
from gradleak.defences import FedASAM, FedGF, FedSAI, FedSAM
from gradleak.federation import Federation, Fixed, Snapshot
from gradleak.federation.checkpoints import Checkpoints
from gradleak.federation.training import Trained
from gradleak.generators.files import fingerprints
from gradleak.scenario.defence import Defence
from gradleak.scenario.task import Batch, Task

METHODS = ("FedAvg", "FedSAM", "FedASAM", "FedGF", "FedSAI")
CLIENTS, PER_ROUND, EPOCHS, BATCH_SIZE, DECAY = 10, 5, 5, 64, 5e-4
RATE, HIGH_RATE = 0.01, 0.9  # the paper's table of settings, and its text
ATTACKED = (0, 100, 200)  # rounds of the paper's table
SHORT, LONG = 200, 1000  # rounds of the comparison of methods, and of FedAvg alone
RHO, RHO_ADAPTIVE, MIXING = 0.2, 0.3, 0.1
TEN = 10  # targets of the paper


@dataclass(frozen=True)
class Effort:
    """How much of it is computed, and where. The defaults are for a GPU; `small` is a LeNet of 4 channels."""

    images: int = 60  # targets of first-order attacks; the first ten of them stand for the paper's
    exact: int = 10  # targets of the second-order attack
    steps: int = 4800  # of IG and GI; iDLG has a quarter more evaluations
    rounds: int = SHORT  # every round of the paper is scaled by rounds / 200
    attacks: str = "idlg,gi,ig"  # of the tables
    methods: str = ""  # only these of a table beside FedAvg, separated by commas; all if empty
    restarts: int = 0  # of every attack; 0: as many as it usually has
    along: str = "ig"  # of the curves over rounds
    init: str = "uniform05"  # or torch
    eta: float = 0.2  # of FedASAM, as in its released code
    seed: int = 0  # of weights, split, clients and attacks
    curved: int = 100  # examples of the Hessian
    probes: int = 10
    lanczos: int = 100  # steps, doubled up to four times as many while the quadrature has not converged
    released: int = 512  # releases of the channel bound
    small: int = 0
    lpips: int = 1
    data: str = ""  # cifar10, or cifar10-mini where that is not found
    public: str = ""  # of FedSAI: cifar100, or cifar100-mini
    generator: str = ""  # file of one, for gias and gifd; targets are then images that it has not seen
    work: str = "runs/flat_minima"  # trainings are kept here and used again
    pictures: str = ""  # a folder for image grids; none if empty
    device: str = "auto"

    @property
    def engine(self) -> gl.Engine:
        return gl.Engine(device=self.device)

    def at(self, number: int) -> int:
        """The round that stands for this round of the paper."""
        return round(number * self.rounds / SHORT)

    def every(self, step: int, until: int) -> list[int]:
        return sorted({self.at(number) for number in range(0, until + 1, step)})


# --- images and network -----------------------------------------------------------------------------------------------


@cache
def images(name: str, split: str, limit: int | None = None) -> Images:
    return gl.data.load(name, split=split, limit=limit)


@cache
def found(given: str, usual: str) -> str:
    """The name of the data: as given, else the usual set or its small pack."""
    if given:
        return given
    try:
        images(usual, "train", 1)
    except DataError:
        return f"{usual}-mini"
    return usual


def private(effort: Effort, split: str = "train") -> Images:
    return images(found(effort.data, "cifar10"), split)


@cache
def public(name: str) -> Images:
    """Both parts of a set together: the pack of CIFAR-100 has 6,000 and 1,000 images, the paper takes 10,000."""
    parts = [images(name, split) for split in ("train", "test")]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    return replace(parts[0], x=x, y=y, source=f"{parts[0].source}, both parts, {len(x)} images")


@cache
def task_of(effort: Effort) -> Task:
    """The LeNet of DLG (Zhu et al., 2019), 15,826 weights, drawn from the seed; images in [0, 1], not normalised."""
    own = private(effort)
    model = gl.models.lenet_zhu(
        shape=tuple(own.x.shape[1:]),
        classes=own.classes,
        width=4 if effort.small else 12,
        init=effort.init,
        generator=torch.Generator().manual_seed(effort.seed),
    )
    return Task.supervised(model, F.cross_entropy, like=(own.x[:1], own.y[:1]))


@cache
def examples(effort: Effort, split: str) -> Stored:
    held = examples_of(private(effort, split), task_of(effort))
    assert isinstance(held, Stored)
    return held


# --- methods ----------------------------------------------------------------------------------------------------------


def method(name: str, effort: Effort) -> Defence | None:
    """A line of the paper's table."""
    made: dict[str, Callable[[], Defence | None]] = {
        "FedAvg": lambda: None,
        "FedSAM": lambda: FedSAM(RHO),
        "FedASAM": lambda: FedASAM(RHO_ADAPTIVE, eta=effort.eta),
        "FedGF": lambda: FedGF(RHO, c=MIXING),
        "FedSAI": lambda: FedSAI(RHO, public=public(found(effort.public, "cifar100")), images=None),
    }
    return made[name]()


@dataclass(frozen=True)
class Course:
    """One federated training: a method, or FedSAM with another rho, at a learning rate."""

    name: str
    rate: float = RATE
    rho: float | None = None

    def defence(self, effort: Effort) -> Defence | None:
        if self.rho is None:
            return method(self.name, effort)
        return FedSAM(self.rho) if self.rho else None  # rho = 0 is FedAvg

    def federation(self, effort: Effort) -> Federation:
        recipe = gl.LocalTraining(
            self.rate, epochs=EPOCHS, batch_size=BATCH_SIZE, optimiser=gl.rules.SGD(weight_decay=DECAY)
        )
        return Federation(CLIENTS, recipe, examples=None, seed=effort.seed, participation=Fixed(PER_ROUND))

    def trained(self, effort: Effort, until: int) -> Trained:
        """Trained until this round, or as far as the folder of the training already is."""
        held = TRAINED.get((self, effort))
        if held is None or held.state.round < until:
            held = TRAINED[self, effort] = patiently(lambda: self._trained(effort, until))
        return held

    def _trained(self, effort: Effort, until: int) -> Trained:
        own, task, data = self.federation(effort), task_of(effort), examples(effort, "train")
        defence = self.defence(effort)
        # Named by all that determines it, so that other settings find another folder.
        name = "fedavg" if defence is None else type(defence).__name__.lower()
        mark = digest([repr(defence), effort.init, task, data.fingerprint])[:8]
        folder = Path(effort.work) / f"{name}-lr{self.rate:g}-seed{effort.seed}-{effort.rounds}rounds-{mark}"
        done = Checkpoints(folder).done if (folder / "training.toml").exists() else 0
        end = max(until, done)
        kept = {*effort.every(10, SHORT), *effort.every(100, LONG)}
        return own.train(
            task,
            data,
            end,
            defence=defence,
            test=examples(effort, "test"),
            every=effort.at(10) if effort.rounds % 20 == 0 else 1,  # every round that is attacked is tested
            checkpoints=sorted(number for number in kept if number <= end),
            out=folder,
            engine=effort.engine,
        )

    def sent(self, effort: Effort, number: int) -> Snapshot:
        """What the server sends at this round of the training, beside what it remembers."""
        return self.trained(effort, number).at(number)

    def described(self, effort: Effort, number: int) -> dict[str, Any]:
        """Settings, and how well the model of a round does."""
        rows = [row for row in self.trained(effort, number).metrics if row["round"] == number]
        measured = {name: rows[0].get(name) for name in ("test_accuracy", "test_loss")}
        return {"defence": repr(self.defence(effort)), "rate": self.rate, **measured}


def patiently(work: Callable[[], Trained], seconds: float = 600) -> Trained:
    """Rows that run beside each other share trainings: whoever comes second waits, and finds it done."""
    until = time.monotonic() + seconds
    while True:
        try:
            return work()
        except FolderInUse:
            if time.monotonic() > until:
                raise
            time.sleep(1)


TRAINED: dict[tuple[Course, Effort], Trained] = {}  # of this process: opening a folder checks all that is in it


# --- whose images are attacked ----------------------------------------------------------------------------------------


def targets(effort: Effort, count: int, size: int = 1) -> Batch:
    """Batches of client 0's own training images, the same for every method and round: (targets, size, ...).

    Fewer where the client holds no more, or where a generator that is asked has seen the others.
    """
    data = examples(effort, "train")
    rows = unseen(effort, Course("FedAvg").federation(effort).partition(data)[0])
    count = min(count, len(rows) // size)
    return tree.map(lambda value: value.unflatten(0, (count, size)), data.batch(rows[: count * size]))


def unseen(effort: Effort, rows: Tensor) -> Tensor:
    """Those that the generator was not trained on; all, if there is none."""
    if not effort.generator:
        return rows
    card = prior_of(effort.generator)[1]
    if card.images is None:
        raise ValueError(f"{effort.generator} does not tell which images it was trained on: it may have seen targets.")
    return rows[~torch.isin(fingerprints(private(effort).x[rows]), card.images)]
