"""From what a person types to objects: `train.py:task`, `ig,dlg:steps=10`, `cifar10`, `0,50`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from gradleak import data
from gradleak.audit.private import examples_of, few_of
from gradleak.cli.formatting import sentence
from gradleak.cli.options import DataOptions
from gradleak.cli.references import BUILTIN, is_reference, load_object
from gradleak.cli.root import LoadError, log
from gradleak.cli.tasks import is_task
from gradleak.core import registry
from gradleak.core.registry import BadSetting, pieces
from gradleak.engine import Engine
from gradleak.scenario.fields import UNBOUNDED, Field
from gradleak.scenario.kinds import Tokens, Value
from gradleak.scenario.observation import Observation
from gradleak.scenario.task import Batch, Supervised, Task

BUILTIN_MODEL = "lenet-zhu"
BUILTIN_DATA = "digits"  # the only embedded set with enough images for a network to learn from
TABLE_MODEL = "mlp"  # what the built-in model is for a table
DATA_FORMS = (
    "--data NAME, a folder, a file (.npz, .csv, .parquet, .txt) or FILE.py:NAME (gradleak data list shows the names)"
)


def methods(texts: Iterable[str]) -> tuple[str, ...]:
    """`["ig,dlg:steps=10,history=5", "gi"]` -> `("ig", "dlg:steps=10,history=5", "gi")`.

    A comma separates methods, and settings of one method: a piece that reads `setting=value` belongs to the method
    before it. Commas inside brackets belong to a value.
    """
    parsed: list[str] = []
    for text in texts:
        for position, piece in enumerate(pieces(text)):
            name, equals, _ = piece.partition("=")
            if not equals or ":" in name:
                parsed.append(piece)
            elif position == 0:
                raise BadSetting(f"{piece!r} is a setting without a method. Write method:{piece}.")
            else:
                parsed[-1] += f"{',' if ':' in parsed[-1] else ':'}{piece}"
    return tuple(parsed)


def numbers(text: str, option: str, unique: bool = True) -> tuple[int, ...]:
    """`"0,50"` -> `(0, 50)`; `"0-3"` -> `(0, 1, 2, 3)`; with `unique`, each once."""
    parsed: list[int] = []
    try:
        for piece in pieces(text):
            low, dash, high = piece.partition("-")
            parsed.extend(range(int(low), int(high) + 1) if dash else [int(low)])
    except ValueError:
        raise LoadError(f"{option} must be whole numbers such as 0,50 or 0-3; given {text!r}.") from None
    if not parsed:
        raise LoadError(f"{option} is empty: give whole numbers such as 0,50 or 0-3.")
    return tuple(dict.fromkeys(parsed)) if unique else tuple(parsed)


def optional_numbers(text: str, option: str) -> tuple[int, ...]:
    """The same; no text: no numbers."""
    return numbers(text, option) if text else ()


def engine(device: str, precision: str, one_by_one: bool = False) -> Engine:
    """An Engine whose device can be used."""
    return usable(Engine(device=device, precision=precision, batched=not one_by_one))


def usable(engine: Engine) -> Engine:
    """The engine itself, if its device can be used."""
    try:
        torch.empty(0, device=engine.where)
    except (RuntimeError, AssertionError) as problem:  # torch without CUDA asserts
        raise LoadError(
            f"The device {engine.device!r} cannot be used: {sentence(str(problem).splitlines()[0])} Try --device cpu."
        ) from None
    return engine


def observations(paths: Sequence[Path]) -> list[Observation]:
    """Observations from files. Those that share a key are named after their files: a key names one target."""
    loaded = [Observation.load(path) for path in paths]
    uses = Counter(observation.key for observation in loaded)
    taken = {key for key, times in uses.items() if times == 1}
    for position, (path, observation) in enumerate(zip(paths, loaded, strict=True)):
        if uses[observation.key] > 1:
            candidates = chain([path.stem], (f"{path.stem}-{number}" for number in count(2)))
            key = next(name for name in candidates if name not in taken)
            loaded[position] = replace(observation, key=key)
            taken.add(key)
    return loaded


def task(reference: str) -> Task:
    """The Task of `FILE.py:NAME` or `module:NAME` (`FILE.py` alone means `FILE.py:task`)."""
    return as_task(load_object(reference, "task"), reference)


def as_task(value: Any, reference: str) -> Task:
    """The value of a reference, if it is a Task."""
    if isinstance(value, Task):
        return value
    raise LoadError(
        f"{reference} is a {type(value).__name__}, not a gradleak.Task. In that file write: "
        "task = gradleak.Task.supervised(model, torch.nn.functional.cross_entropy, like=(x, y))."
    )


def task_for(name: str, examples: Any) -> Task:
    """The Task of a reference, or a registered task or model built to fit these data: untrained, always the same."""
    if is_reference(name):
        return task(name)
    if isinstance(examples, data.Records):
        return _task_of_table(name, examples)
    if not isinstance(examples, data.Images):
        raise LoadError(
            f"The model {name} is built to fit images or a table; --data gives {type(examples).__name__}. Name a set "
            "of images or a table."
        )
    if is_task(name):
        built: Task = registry.parse("task", name).of(examples)
        return built
    network = _model(BUILTIN_MODEL if name == BUILTIN else name, tuple(examples.x.shape[1:]), examples.classes)
    return Task.supervised(network, torch.nn.functional.cross_entropy, like=(examples.x[:1], examples.y[:1]))


def _model(name: str, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    network: torch.nn.Module = registry.parse("model", name, shape=shape, classes=classes, generator=generator)
    return network


def _task_of_table(name: str, records: data.Records) -> Task:
    """A model for the rows of a table: cross-entropy for classes, squared error for a regression."""
    if is_task(name):
        raise LoadError(f"The task {name} is for images; --data gives a table: {records.source}.")
    name = TABLE_MODEL if name == BUILTIN else name
    try:
        network = _model(name, (records.kind.width,), records.classes or 1)
    except (ValueError, IndexError, TypeError) as problem:
        raise LoadError(
            f"The model {name} cannot be built for rows of a table: {sentence(problem)} Name {TABLE_MODEL}, such as "
            f"'{TABLE_MODEL}:widths=(100,100)', or your own task as FILE.py:task."
        ) from None
    if records.classes is None:
        target = Field((), bounds=UNBOUNDED, kind=Value())
        return Task(network, Supervised(squared_error), {"x": records.field, "y": target})
    loss = Supervised(torch.nn.functional.cross_entropy)
    return Task(network, loss, {"x": records.field, "y": Field((), classes=records.classes)})


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error of one output for each example."""
    return torch.nn.functional.mse_loss(output.squeeze(-1), y)


def examples(options: DataOptions, split: str | None = None) -> Any:
    """Data by name or path (`gradleak.data.load`), or the object of FILE.py:NAME."""
    how: dict[str, Any] = {name: value for name, value in options.stated.items() if name != "data"}
    if is_reference(options.data):
        if how:
            name = next(iter(how))
            raise LoadError(
                f"--{name} is for data by name or from files; {options.data} is made in Python: set it there."
            )
        return load_object(options.data, "data")
    if "bounds" in how:
        how["bounds"] = _bounds(how["bounds"])
    if is_reference(options.tokenizer):
        how["tokenizer"] = load_object(options.tokenizer, "tokenizer")
    loaded = data.load(options.data, split=split, **{**how, "size": options.size})
    for note in loaded.notes if isinstance(loaded, data.Texts) else ():
        log(f"{loaded.source}: {note}")
    return loaded


def _bounds(text: str) -> bool | float:
    words = {"yes": True, "no": False}
    try:
        return words[text] if text in words else float(text)
    except ValueError:
        raise LoadError(f"--bounds must be yes, or a share such as 0.01 for quantiles; given {text!r}.") from None


def images(text: str, split: str | None = None, size: int | None = None) -> Any:
    """The same, with nothing stated but a name or path, and a size."""
    return examples(DataOptions(text, size), split)


def few_examples(task: Task, examples: Any) -> Batch:
    """Some examples of loaded data, in model-input space, for `Task.check`."""
    if "x" not in task.fields:
        raise LoadError(f"--data is checked against a field x; the task's fields are {', '.join(task.fields)}.")
    return few_of(examples_of(fitted(examples, task), task))


def fitted(examples: Any, task: Task) -> Any:
    """Texts in the length of the task, with a note on those that are cut; other data as they are."""
    field = task.fields.get("x")
    if not isinstance(examples, data.Texts) or field is None or not isinstance(field.kind, Tokens):
        return examples
    whole = examples.fitted(field.shape[-1], field.kind.padding)
    for note in whole.notes[len(examples.notes) :]:
        log(f"{examples.source}: {note}")
    return whole


def training_data(origin: Mapping[str, Any]) -> tuple[Any, Any]:
    """The data that clients train on and the data that they are tested on, by [origin] of a training.toml.

    Test data are the test part of the set that is named; if clients train on the same set, they get its training part.
    Without test data the share `holdout` is tested on, the same rows every time; a share of 0: None.
    """
    options, test_name, share = DataOptions.of(origin), str(origin.get("test", "")), float(origin.get("holdout", 0.0))
    if test_name:
        part = "train" if test_name == options.data else None
        return options.load(part), replace(options, data=test_name).load("test")
    loaded = options.load()
    return hold_out(loaded, share) if share else (loaded, None)


def hold_out(examples: Any, share: float) -> tuple[Any, Any]:
    """Split data at random: the rest, and this share."""
    if not 0 < share < 1:
        raise LoadError(f"--holdout must lie between 0 and 1; given {share}.")
    mapping = isinstance(examples, Mapping)
    tensors = mapping or (isinstance(examples, (tuple, list)) and isinstance(examples[0], torch.Tensor))
    total = len(next(iter(examples.values())) if mapping else examples[0] if tensors else examples)
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    tested = max(1, round(share * total))

    def part(rows: torch.Tensor) -> Any:
        if isinstance(examples, (data.Images, data.Records, data.Texts)):
            return examples[rows]
        if isinstance(examples, Mapping):
            return {name: value[rows] for name, value in examples.items()}
        if tensors:
            return tuple(value[rows] for value in examples)
        return torch.utils.data.Subset(examples, rows.tolist())

    return part(shuffled[tested:]), part(shuffled[:tested])
