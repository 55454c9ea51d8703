"""The private side of an audit: the data, the attacked batches, the clients' uploads. Attack code never imports this.

Private tensors leave it in two ways only: as `Observation`s for the attacker, and as truth for the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradleak.audit.rows import Trained
from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.assignment import pairwise_mse
from gradleak.core.configuration import digest
from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.data import Images, load
from gradleak.engine import Engine
from gradleak.federation import Examples, Federation, Remembered, Snapshot, with_buffers
from gradleak.federation.checkpoints import Checkpoints
from gradleak.metrics import EXACT
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Defence
from gradleak.scenario.guarantee import Guarantee
from gradleak.scenario.observation import Observation, Track, stack
from gradleak.scenario.task import Batch, Task

SIGNAL = 8  # targets at most whose updates are measured for their size
GALLERY = 200  # images at most, if the gallery is the rest of the data: a guess identifies one image in 200


class AuditError(ValueError):
    """An audit that cannot be run as it was configured."""


# --- data in model-input space --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stored:
    """Examples as tensors. `marks`: their classes, for splits by class of a task without labels."""

    tensors: Batch
    marks: Tensor | None = None

    def __len__(self) -> int:
        return tree.length(self.tensors)

    def batch(self, rows: Tensor) -> Batch:
        return {name: value[rows.to(value.device)] for name, value in self.tensors.items()}

    @property
    def labels(self) -> Tensor | None:
        return self.tensors.get("y", self.marks)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Stored:
        moved = {
            name: value.to(device, dtype if value.is_floating_point() else None) for name, value in self.tensors.items()
        }
        return self if all(moved[name] is value for name, value in self.tensors.items()) else Stored(moved, self.marks)

    @cached_property
    def fingerprint(self) -> str:
        return digest(self.tensors if self.marks is None else [self.tensors, self.marks])


@dataclass(frozen=True, eq=False)
class Read:
    """Examples that a dataset reads when they are needed, after its own transforms: (x, y), or the task's fields.

    If the client draws all other fields of the task, items are x alone, or (x, ...) whose rest is ignored.
    """

    dataset: Any
    names: tuple[str, ...]
    like: Tensor

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, rows: Tensor) -> Batch:
        items = [self.dataset[int(row)] for row in rows]
        if self.names == ("x",):
            items = [tuple(item[:1]) if isinstance(item, (tuple, list)) else (item,) for item in items]
        for item in items:
            if not isinstance(item, (tuple, list)) or len(item) != len(self.names) or not isinstance(item[0], Tensor):
                raise AuditError(
                    f"The data set gives {item!r:.60}; wanted ({', '.join(self.names)}) with x a tensor. For pictures "
                    "use gradleak.data.from_dataset(data)."
                )
        columns = {name: torch.stack([torch.as_tensor(item[i]) for item in items]) for i, name in enumerate(self.names)}
        return {name: _placed(value, self.like) for name, value in columns.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of 64 examples: reading all of them may take hours."""
        rows = torch.linspace(0, len(self) - 1, min(64, len(self))).long()
        return digest([type(self.dataset).__name__, len(self), self.batch(rows)])


def examples_of(data: Any, task: Task, what: str = "data") -> Stored | Read:
    """Data in any of the accepted forms, in model-input space, on the device and in the type of the model.

    `Images` hold pixels in [0, 1] and are normalised here. Tensors and datasets are taken as the client's pipeline
    gives them; their range shows if the task lacks its mean and std. Fields that a client draws itself (the step and
    the noise of a denoiser) may be missing.
    """
    like = tree.like(task.weights())
    names = tuple(name for name in task.fields if name not in task.drawn)
    if isinstance(data, Images):
        _demand_shape(data.x, task, what)
        x = {"x": task.fields["x"].model(_placed(data.x, like))}
        return Stored({**x, "y": data.y.to(like.device)}) if "y" in task.fields else Stored(x, data.y)
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, Tensor) for part in data):
        data = dict(zip(names, data, strict=False))
    if isinstance(data, Mapping):
        tensors = {name: _placed(value, like) for name, value in data.items()}
        if "x" not in tensors or len({len(value) for value in tensors.values()}) != 1:
            shapes = {name: tuple(value.shape) for name, value in tensors.items()}
            raise AuditError(f"{what} needs x, and as many of every field; given {shapes}.")
        _demand_shape(tensors["x"], task, what)
        marks = None if "y" in task.fields else tensors.pop("y", None)
        return Stored(tensors, marks)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return Read(data, names, like)
    raise AuditError(
        f"{what} is {type(data).__name__}; give Images, {{'x': tensor, 'y': tensor}}, (x, y) or a Dataset."
    )


def _placed(value: Tensor, like: Tensor) -> Tensor:
    return value.detach().to(like.device, like.dtype if value.is_floating_point() else None)


def _demand_shape(x: Tensor, task: Task, what: str) -> None:
    shape = task.fields["x"].shape
    if tuple(x.shape[1:]) != shape:
        raise AuditError(f"{what} has examples of shape {tuple(x.shape[1:])}; the task wants {shape}.")


def _demand_range(batch: Batch, task: Task, what: str) -> None:
    """Checked before the first cell, since every cell would fail or mislead."""
    _demand_shape(batch["x"], task, what)
    for name, classes in ((name, each.classes) for name, each in task.fields.items()):
        if classes is not None and name in batch and not batch[name].is_floating_point():
            least, most = int(batch[name].min()), int(batch[name].max())
            if least < 0 or most >= classes:
                raise AuditError(f"{what}: {name} runs from {least} to {most}; the task has {classes} classes.")
    if not task.fields["x"].bounded:
        return
    unit = task.fields["x"].unit(batch["x"])
    low, high = float(unit.min()), float(unit.max())
    if not (low > -1e-3 and high < 1 + 1e-3):
        raise AuditError(
            f"{what} leaves the bounds of the task: in units of those bounds it runs from {low:.3g} to {high:.3g}. "
            "Give Task.supervised the mean, std and bounds of the client's input pipeline, or give Images in [0, 1]."
        )


# --- targets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Victims:
    """What one cell attacks: observations of its targets and of unrelated clients, and the truth about them."""

    seen: Sequence[Observation | Track]
    unrelated: Sequence[Observation | Track]
    truth: Batch  # (targets, examples, ...); for metrics only
    others: Batch = field(default_factory=dict)  # the truth of the unrelated clients

    def given(self, names: Iterable[str]) -> Batch:
        """The fields that a threat model grants, for all clients: (targets and unrelated, examples, ...)."""
        missing = [name for name in names if name not in self.truth]
        if missing:
            raise AuditError(
                f"{missing[0]} cannot be granted: a client that takes several steps draws it anew in each."
            )
        return {name: torch.cat([self.truth[name], *([self.others[name]] if self.unrelated else [])]) for name in names}


@dataclass(frozen=True, eq=False)
class PrivateSide:
    """Draws targets, trains where later rounds are audited, and lets clients upload."""

    task: Task
    data: Stored | Read
    targets: int
    unrelated: int
    given_gallery: Stored | Read | None = None
    trained: Checkpoints | None = None  # where weights of later rounds come from; None: from a training here
    engine: Engine | None = None  # of the training here
    _trained: dict[Any, dict[int, Snapshot]] = field(default_factory=dict)
    _signals: dict[Any, float] = field(default_factory=dict)
    _random: dict[Any, bool] = field(default_factory=dict)

    def count(self, federation: Federation) -> int:
        """Targets of a cell."""
        return self.targets

    def truth(self, federation: Federation) -> Batch:
        """The batches of all targets, (targets, examples, ...).

        They include the fields that a client draws, if it draws them once: drawn here, used by the client, and kept
        for the scores. A client with several steps draws anew in each, and nobody keeps those.
        """
        _size(federation)
        rows = torch.stack([federation.target(self.data, index).rows for index in range(self.targets)])
        flat = self.data.batch(rows.flatten())
        _demand_range(flat, self.task, "data")
        whole = {name: value.reshape(*rows.shape, *value.shape[1:]) for name, value in flat.items()}
        each = [{name: value[index] for name, value in whole.items()} for index in range(self.targets)]
        return stack([self._sealed(batch, federation, index) for index, batch in enumerate(each)])

    def _sealed(self, batch: Batch, federation: Federation, *who: object) -> Batch:
        if not self.task.drawn or len(federation.training.order(_size(federation))) > 1:
            return batch
        return self.task.completed(batch, Draws(randomness.key("audit", "drawn", *who).to(batch["x"].device)))

    def rest(self, federations: Iterable[Federation]) -> Tensor:
        """Rows that no target of these federations uses, in random order."""
        used = [f.target(self.data, index).rows for f in federations for index in range(self.targets)]
        free = torch.ones(len(self.data), dtype=torch.bool)
        free[torch.cat(used)] = False
        rows = free.nonzero().flatten()
        return rows[torch.randperm(len(rows), generator=_generator("rest"))]

    def gallery(self, federations: Iterable[Federation]) -> Batch:
        """Real images that are not the clients', for re-identification: the given ones, else the rest of the data."""
        federations = list(federations)
        truths = [self.truth(federation) for federation in federations]
        if self.given_gallery is not None:
            batch = self.given_gallery.batch(torch.arange(len(self.given_gallery)))
        else:
            batch = self.data.batch(rows) if len(rows := self.rest(federations)[:GALLERY]) else {}
        if not batch:
            raise AuditError(
                f"All {len(self.data)} examples are targets, so none is left for the gallery. Pass gallery= (real "
                "images that are not the clients'), or fewer targets."
            )
        _demand_range({"x": batch["x"]}, self.task, "gallery")
        for federation, truth in zip(federations, truths, strict=True):
            self._unrelated(federation, truth)  # so that errors in the data come before the first cell
        return batch

    def victims(
        self,
        federation: Federation,
        defence: Defence | None,
        round: int,
        rounds: tuple[int, ...],
        seed: int,
        repeats: int = 1,
    ) -> Victims:
        """Let every target upload once, or `repeats` times. Keys name client, round and target, nothing else."""
        snapshot = self._snapshots(federation, defence, rounds)[round]
        task, truth = with_buffers(self.task, snapshot.buffers), self.truth(federation)
        # All uploads follow the recipe of the attacked round: the attacker knows that one.
        federation = replace(federation, training=federation.training_at(round), averaging=None)

        def once(batch: Batch, key: str, memory: Tree | None, number: int) -> Observation:
            """Number 0 is the upload of a single attacked round; the others draw noise of their own."""
            name = f"{key}/again{number}" if number else key
            sent, when, remembered = snapshot.weights, round + number, Remembered(memory, dict(snapshot.server))
            return federation.observe(
                task, batch, sent, defence, key=name, round=when, seed=seed, remembered=remembered
            )

        def upload(batch: Batch, key: str, memory: Tree | None = None) -> Observation | Track:
            uploads = [once(batch, key, memory, number) for number in range(repeats)]
            return uploads[0] if repeats == 1 else Track(tuple(uploads))

        owners = [federation.target(self.data, index).client for index in range(self.targets)]
        observations = [
            upload(
                {name: value[index] for name, value in truth.items()},
                f"client{owner}/round{round}/target{index}",
                snapshot.memories.get(owner),
            )
            for index, owner in enumerate(owners)
        ]
        others = self._unrelated(federation, truth)
        blind = [upload(other, f"unrelated{i}/round{round}") for i, other in enumerate(others)]
        return Victims(observations, blind, truth, stack(others) if others else {})

    def random(self, federation: Federation, defence: Defence) -> bool:
        """Does the defence upload something else for the same examples each time? One plain step, without a shuffle."""
        key = digest([federation, defence])
        if key not in self._random:
            plain = replace(federation, training=LocalTraining(lr=federation.training.lr))
            batch, sent = {name: value[0] for name, value in self.truth(federation).items()}, self.task.weights()
            first, again = (
                plain.observe(self.task, batch, sent, defence, key="trial", round=0, seed=seed).update
                for seed in (0, 1)
            )
            self._random[key] = any(not torch.equal(first[name], again[name]) for name in first)
        return self._random[key]

    def try_out(self, federation: Federation, defence: Defence) -> None:
        """Make one upload and drop it, so that a defence that does not fit model or recipe fails before any cell."""
        defence.demand(self.task, {"load": load})
        batch = {name: value[0] for name, value in self.truth(federation).items()}
        federation.observe(self.task, batch, self.task.weights(), defence, key="trial", round=0, seed=0)

    # --- what is proved, and what it costs -------------------------------------------------------------------------

    def guarantee(
        self, federation: Federation, defence: Defence, round: int, rounds: tuple[int, ...], repeats: int = 1
    ) -> Guarantee:
        """The guarantee for a client that takes part up to the attacked round or, with a training, in all its rounds.

        `repeats`: how often the attacker saw the client at the attacked round.
        """
        trained, releases = self.trained, round + repeats
        if trained is not None:
            releases = max(self._rounds_trained, releases, *(number + 1 for number in rounds))
        signal = self._signal(federation, defence, round, rounds)
        proved = defence.guarantee(replace(federation.exposure(releases, self.data), signal=signal))
        if trained is None or proved.epsilon is None or trained.settings["fingerprint"]["defence"] == digest(defence):
            return proved
        without = "the weights come from a training without it: holds for one that uses it in every round"
        return replace(proved, caveats=(*proved.caveats, without))

    def utility(self, round: int) -> Trained | None:
        """How good the attacked model is; None without a training."""
        if self.trained is None:
            return None
        row = next((row for row in self.trained.metrics if row.get("round") == round), {})
        tested = {name: row.get(name) for name in ("test_loss", "test_accuracy")}
        return Trained(self._rounds_trained, str(self.trained.settings.get("defence", "none")), **tested)

    @cached_property
    def _rounds_trained(self) -> int:
        return 0 if self.trained is None else self.trained.done

    def _signal(self, federation: Federation, defence: Defence, round: int, rounds: tuple[int, ...]) -> float:
        """Root mean square of the entries of undefended updates, from the weights that the defended clients get."""
        key = digest([federation, defence, round, rounds])
        if key not in self._signals:
            sent = self._snapshots(federation, defence, rounds)[round]
            task, truth = with_buffers(self.task, sent.buffers), self.truth(federation)
            batches = [{name: value[index] for name, value in truth.items()} for index in range(len(truth["x"]))]
            plain = [
                federation.observe(task, batch, sent.weights, None, key="signal", round=round, seed=0).update
                for batch in batches[:SIGNAL]
            ]
            squares = [float(tree.squared_norm(update)) / tree.size(update) for update in plain]
            self._signals[key] = math.sqrt(sum(squares) / len(squares))
        return self._signals[key]

    def _snapshots(
        self, federation: Federation, defence: Defence | None, rounds: tuple[int, ...]
    ) -> dict[int, Snapshot]:
        if self.trained is not None:
            like = tree.like(self.task.weights())

            def placed(part: Any) -> Any:
                return tree.to(part, like.device, like.dtype)

            return {number: Snapshot(*map(placed, self.trained.at(number))) for number in rounds}
        key = digest([federation, defence, rounds])
        if key not in self._trained:
            # On a copy: the clients' passes leave nothing in the task that attacks get.
            task = self.task.copied()
            self._trained[key] = federation.weights_at(task, self.data, rounds, defence, self.engine)
        return self._trained[key]

    def _unrelated(self, federation: Federation, truth: Batch) -> list[Batch]:
        """Batches of images that are nobody's target: reconstructions from them owe nothing to the targets."""
        if not self.unrelated:
            return []
        size, pool = _size(federation), self._pool(federation, truth)
        count = min(self.unrelated, len(pool) // size)
        if not count:
            raise AuditError(
                f"The no-gradient baseline needs {size} images that are not targets; there are {len(pool)}. Pass a "
                "larger gallery=, more data, or unrelated=0 to go without the baseline."
            )
        batches = [pool.batch(torch.arange(i * size, (i + 1) * size)) for i in range(count)]
        return [self._sealed(batch, federation, "unrelated", i) for i, batch in enumerate(batches)]

    def _pool(self, federation: Federation, truth: Batch) -> Examples:
        rows, size = self.rest([federation]), _size(federation)
        named = set(self.task.fields) - self.task.drawn
        if len(rows) >= size or self.given_gallery is None or not named <= {"x", "y"}:
            return Stored(self.data.batch(rows[: self.unrelated * size]) if len(rows) else {"x": rows})
        # All data are targets: use the gallery without copies of them. Its classes may differ, so draw labels.
        x = self.given_gallery.batch(torch.arange(len(self.given_gallery)))["x"]
        x = x[pairwise_mse(x, truth["x"].flatten(0, 1)).amin(1) > EXACT]
        if "y" not in named:
            return Stored({"x": x})
        y = torch.randint(self.task.fields["y"].classes or 1, (len(x),), generator=_generator("unrelated labels"))
        return Stored({"x": x, "y": y.to(x.device)})


def _size(federation: Federation) -> int:
    """Examples of one target."""
    if federation.examples is None:
        raise AuditError(
            "An audit attacks batches of a stated size: give Federation(examples=...). Weights of a training on whole "
            "shares come from its checkpoints: Audit(trained=Checkpoints(folder))."
        )
    return federation.examples


def _generator(*purpose: object) -> torch.Generator:
    return torch.Generator().manual_seed(int(randomness.key("audit", *purpose)[0]))
