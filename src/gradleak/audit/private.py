"""The private side of an audit: the data, the attacked batches, the clients' uploads. Attack code never imports this.

Private tensors leave it in two ways only: as `Observation`s for the attacker, and as truth for the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gradleak.audit.rows import Trained
from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.configuration import digest
from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.data import (
    DataError,
    Images,
    Records,
    Texts,
    fields_of,
    from_huggingface,
    from_loader,
    is_huggingface,
    load,
)
from gradleak.engine import Engine
from gradleak.federation import Examples, Federation, Remembered, Snapshot, with_buffers
from gradleak.federation.checkpoints import Checkpoints
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Defence
from gradleak.scenario.fields import Field
from gradleak.scenario.guarantee import Guarantee
from gradleak.scenario.inspection import data_problems
from gradleak.scenario.kinds import Category, Tokens
from gradleak.scenario.observation import Observation, Track, stack
from gradleak.scenario.task import Batch, Task

SIGNAL = 8  # targets at most whose updates are measured for their size
FEW = 64  # examples that a check looks at
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
        """The class of every example; None where targets are no class indices."""
        y = self.tensors.get("y", self.marks)
        return y if y is not None and y.dim() == 1 and not y.is_floating_point() else None

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
    """Examples that a dataset reads when they are needed, after its own transforms: tuples of the task's fields, or
    dicts (`gradleak.data.fields_of`).

    If the client draws all other fields of the task, items are x alone, or (x, ...) whose rest is ignored.
    `collate`: of a DataLoader, makes a batch of several items. `own`: the client's own names for fields, in dicts.
    """

    dataset: Any
    fields: Mapping[str, Field]  # those that the data have to give
    like: Tensor
    collate: Callable[[list[Any]], Any] | None = None
    own: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, rows: Tensor) -> Batch:
        items = [self.dataset[int(row)] for row in rows]
        if self.collate is not None:
            return self._placed(fields_of(self.collate(items), tuple(self.fields), self.own))
        examples = [self._example(item) for item in items]
        return self._placed({name: _stacked(name, [each[name] for each in examples]) for name in self.fields})

    def _example(self, item: Any) -> dict[str, Any]:
        names = tuple(self.fields)
        try:
            example = fields_of(item, names, self.own)
        except DataError:
            example = {}
        if not isinstance(example.get("x"), Tensor | np.ndarray) or not set(names) <= example.keys():
            entries = f"a dict of {', '.join(item)}" if isinstance(item, Mapping) else f"{item!r:.60}"
            raise AuditError(
                f"The data set gives {entries}; wanted ({', '.join(names)}) with x a tensor. For pictures "
                "use gradleak.data.from_dataset(data)."
            )
        return example

    def _placed(self, batch: Mapping[str, Any]) -> Batch:
        lacking = [name for name in self.fields if name not in batch]
        if lacking:
            raise AuditError(f"The data give {', '.join(batch)}; the task needs {lacking[0]} too.")
        return {name: _placed(torch.as_tensor(batch[name]), self.like, field) for name, field in self.fields.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of 64 examples: reading all of them may take hours."""
        rows = torch.linspace(0, len(self) - 1, min(64, len(self))).long()
        return digest([type(self.dataset).__name__, len(self), self.batch(rows)])


def few_of(examples: Examples) -> Batch:
    """Some examples, for a check of their values."""
    return examples.batch(torch.arange(min(FEW, len(examples))))


def examples_of(data: Any, task: Task, what: str = "data") -> Stored | Read:
    """Data in any of the accepted forms, in model-input space, on the device and in the type of the model.

    `Images` hold pixels in [0, 1] and are normalised here; `Records` are rows of a table, `Texts` ids. Tensors,
    datasets and loaders are taken as the client's pipeline gives them; their range shows if the task lacks its mean and
    std. Fields that a client draws itself (the step and the noise of a denoiser) may be missing.
    """
    like = tree.like(task.weights())
    fields = {name: each for name, each in task.fields.items() if name not in task.drawn}
    if isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset):
        data = from_loader(data, names=tuple(fields), own=task.own_names)
    elif isinstance(data, DataLoader):  # by rows: a loader may shuffle, and targets are the same in every run
        collate = None if data.batch_sampler is None else data.collate_fn
        return Read(data.dataset, fields, like, collate, task.own_names)
    elif is_huggingface(data):
        data = from_huggingface(data)
    if isinstance(data, Images):
        _demand_shape("x", data.x, task, what)
        x = {"x": task.fields["x"].model(_placed(data.x, like))}
        return Stored({**x, "y": data.y.to(like.device)}) if "y" in task.fields else Stored(x, data.y)
    if isinstance(data, Records):
        data = {"x": data.x, "y": data.y}
    if isinstance(data, Texts):
        data = data.fields(fields)
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, Tensor) for part in data):
        data = dict(zip(fields, data, strict=False))
    elif isinstance(data, (tuple, list)) and data and isinstance(data[-1], Tensor):  # ((x1, x2), y)
        data = fields_of(data, tuple(fields))
    if isinstance(data, Mapping):
        return _stored(fields_of(data, tuple(fields), task.own_names), task, what, like)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return Read(data, fields, like, own=task.own_names)
    raise AuditError(
        f"{what} is {type(data).__name__}; give Images, Records, Texts, {{'x': tensor, 'y': tensor}}, (x, y), a "
        "Dataset or a DataLoader."
    )


def words_of(task: Task, *sources: Any) -> dict[str, tuple[str, ...]]:
    """The text of each id, by field: what the task names, else what the data do. Only fields of tokens have some."""
    known = next((each.words for each in sources if isinstance(each, Texts)), ())
    kinds = {name: each.kind for name, each in task.fields.items() if isinstance(each.kind, Tokens)}
    named = {name: kind.words or known for name, kind in kinds.items()}
    return {name: words for name, words in named.items() if words}


def _stored(batch: Mapping[str, Any], task: Task, what: str, like: Tensor) -> Stored:
    """Tensors by field; y of a task without labels marks the classes, for splits by class."""
    tensors = {name: _placed(value, like, task.fields.get(name)) for name, value in batch.items()}
    if "x" not in tensors or len({len(value) for value in tensors.values()}) != 1:
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        raise AuditError(f"{what} needs x, and as many of every field; given {shapes}.")
    marks = None if "y" in task.fields else tensors.pop("y", None)
    for name in tensors.keys() & task.fields.keys():
        _demand_shape(name, tensors[name], task, what)
    return Stored(tensors, marks)


def _placed(value: Tensor, like: Tensor, field: Field | None = None) -> Tensor:
    """On the device of the model; numbers, and whole numbers where the field is a number, in its type."""
    number = value.is_floating_point() or (field is not None and field.continuous)
    return value.detach().to(like.device, like.dtype if number else None)


def _stacked(name: str, values: list[Any]) -> Tensor:
    tensors = [torch.as_tensor(value) for value in values]
    shapes = {tuple(value.shape) for value in tensors}
    if len(shapes) > 1:
        some = ", ".join(map(str, sorted(shapes)[:4]))
        raise AuditError(f"Examples of {name} differ in shape ({some}). Resize, cut or pad them to one shape.")
    return torch.stack(tensors)


def _demand_shape(name: str, value: Tensor, task: Task, what: str) -> None:
    """A class may be given as its probabilities too."""
    wanted, classes = task.fields[name].shape, task.fields[name].classes
    shapes = [wanted, *([(*wanted, classes)] if classes is not None and value.is_floating_point() else [])]
    if tuple(value.shape[1:]) not in shapes:
        examples = "examples" if name == "x" else f"examples of {name}"
        texts = isinstance(task.fields[name].kind, Tokens) and value.is_floating_point()
        fix = ' Texts in a column of a table need a tokenizer: tokenizer="bytes", or --tokenizer.' if texts else ""
        raise AuditError(f"{what} has {examples} of shape {tuple(value.shape[1:])}; the task wants {wanted}.{fix}")


def _demand_range(batch: Batch, task: Task, what: str) -> None:
    """Checked before the first cell, since every cell would fail or mislead: the words are those of `Task.check`."""
    for name in batch.keys() & task.fields.keys():
        _demand_shape(name, batch[name], task, what)
    for problem in data_problems(task, batch):
        if problem.severity == "error":
            raise AuditError(f"{what}: {problem.what} -> {problem.fix}.")


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
        lacking = [name for name in self.task.fields if name not in flat and name not in self.task.drawn]
        if lacking:
            raise AuditError(f"data has {', '.join(flat)}; the task needs {lacking[0]} too.")
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
        """Real examples that are not the clients', for re-identification: the given ones, else the rest of the data."""
        federations = list(federations)
        truths = [self.truth(federation) for federation in federations]
        if self.given_gallery is not None:
            batch = self.given_gallery.batch(torch.arange(len(self.given_gallery)))
        else:
            batch = self.data.batch(rows) if len(rows := self.rest(federations)[:GALLERY]) else {}
        if not batch:
            raise AuditError(
                f"All {len(self.data)} examples are targets, so none is left for the gallery. Pass gallery= (real "
                f"{self._noun} that are not the clients'), or fewer targets."
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

    @property
    def _noun(self) -> str:
        return self.task.fields["x"].kind.noun[1]

    def _unrelated(self, federation: Federation, truth: Batch) -> list[Batch]:
        """Batches of examples that are nobody's target: reconstructions from them owe nothing to the targets."""
        if not self.unrelated:
            return []
        size, pool = _size(federation), self._pool(federation, truth)
        count = min(self.unrelated, len(pool) // size)
        if not count:
            raise AuditError(
                f"The no-gradient baseline needs {size} {self._noun} that are not targets; there are {len(pool)}. Pass "
                "a larger gallery=, more data, or unrelated=0 to go without the baseline."
            )
        batches = [pool.batch(torch.arange(i * size, (i + 1) * size)) for i in range(count)]
        return [self._sealed(batch, federation, "unrelated", i) for i, batch in enumerate(batches)]

    def _pool(self, federation: Federation, truth: Batch) -> Examples:
        rows, size = self.rest([federation]), _size(federation)
        wanted = [name for name in self.task.fields if name not in self.task.drawn]
        rest = Stored(self.data.batch(rows[: self.unrelated * size]) if len(rows) else {"x": rows})
        if len(rows) >= size or self.given_gallery is None:
            return rest
        # All data are targets: use the gallery without copies of them. Its classes may differ, so draw labels.
        batch, label = self.given_gallery.batch(torch.arange(len(self.given_gallery))), self.task.fields.get("y")
        drawn = {"y"} if label is not None and isinstance(label.kind, Category) and not label.shape else set()
        if not set(wanted) - drawn <= batch.keys():
            return rest
        apart = ~self._copies(batch["x"], truth["x"].flatten(0, 1))
        others = {name: batch[name][apart] for name in wanted if name not in drawn}
        if drawn and label is not None:
            y = torch.randint(label.classes or 1, (int(apart.sum()),), generator=_generator("unrelated labels"))
            others["y"] = y.to(batch["x"].device)
        return Stored(others)

    def _copies(self, x: Tensor, truth: Tensor) -> Tensor:
        """Which examples are copies of one of the targets."""
        each = self.task.fields["x"]
        first, second = (each.kind.comparable(value, each, x) for value in (x, truth))
        return each.kind.same(first, second).any(1)


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
