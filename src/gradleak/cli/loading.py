"""From what a person types to objects: `train.py:task`, `ig,dlg:steps=10`, `cifar10`, `0,50`.

A reference runs the file it names, as `python train.py` would (with `__name__` other than "__main__"): give only files
that you would run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import shlex
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gradleak import data
from gradleak.audit.cells import defence_of
from gradleak.cli import tasks  # noqa: F401 (registers them)
from gradleak.core.folder import FolderInUse
from gradleak.core.registry import BadSetting, did_you_mean, pieces
from gradleak.engine import Engine
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Defence, overrides
from gradleak.scenario.guarantee import Exposure
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.task import Batch, Task

if TYPE_CHECKING:
    from gradleak.core.listeners import Progress

Kept = TypeVar("Kept")

FEW = 64  # examples that `gradleak check --data` looks at
IDLE = 0.5  # programs that want a core at a time, in the mean of the last minute: fewer is nobody


class LoadError(ValueError):
    """A reference, a file or a number on the command line that does not give what is wanted."""


def methods(given: Iterable[str]) -> tuple[str, ...]:
    """`["ig,dlg:steps=10,history=5", "gi"]` -> `("ig", "dlg:steps=10,history=5", "gi")`.

    A comma separates methods, and settings of one method: a piece that reads `setting=value` belongs to the method
    before it. Commas inside brackets belong to a value.
    """
    found: list[str] = []
    for text in given:
        for position, piece in enumerate(pieces(text)):
            name, equals, _ = piece.partition("=")
            if not equals or ":" in name:
                found.append(piece)
            elif position == 0:
                raise BadSetting(f"{piece!r} is a setting without a method. Write method:{piece}.")
            else:
                found[-1] += f"{',' if ':' in found[-1] else ':'}{piece}"
    return tuple(found)


def kept_in(out: Path | None, folder: Path, run: Callable[[Path], Kept], what: str, progress: Progress) -> Kept:
    """Run into `out`; where none was named into `folder` or, if that holds another run, the next that does not."""
    if out is not None:
        return run(out)
    place = folder
    for number in count(2):
        try:
            return run(place)
        except FolderInUse:
            place = folder.with_name(f"{folder.name}-{number}")
            progress.note(f"There is another {what} already; this one goes into {place}.")
    raise AssertionError("count does not end")


HOOKS = {"initial": "before training", "broadcast": "broadcast", "gradient": "local step", "upload": "upload"}
HOOKS |= {"aggregate": "server"}


def about(defence: Defence) -> tuple[str, str]:
    """Where a defence sits, and what it proves about a client that takes one plain step on one example."""
    places = ", ".join(place for hook, place in HOOKS.items() if overrides(defence, hook)) or "nowhere"
    proved = defence.guarantee(Exposure(training=LocalTraining(lr=1.0)))
    return places, str(proved).partition("\n")[0]


def sentence(text: object) -> str:
    """With a full stop at the end, once."""
    told = str(text).rstrip()
    return told if told.endswith((".", "!", "?")) else f"{told}."


def counted(number: int, what: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def numbers(text: str, what: str, unique: bool = True) -> tuple[int, ...]:
    """`"0,50"` -> `(0, 50)`; `"0-3"` -> `(0, 1, 2, 3)`; with `unique`, each once."""
    found: list[int] = []
    try:
        for piece in pieces(text):
            low, dash, high = piece.partition("-")
            found.extend(range(int(low), int(high) + 1) if dash else [int(low)])
    except ValueError:
        raise LoadError(f"{what} must be whole numbers such as 0,50 or 0-3; given {text!r}.") from None
    if not found:
        raise LoadError(f"{what} is empty: give whole numbers such as 0,50 or 0-3.")
    return tuple(dict.fromkeys(found)) if unique else tuple(found)


def fields(text: str) -> tuple[str, ...]:
    """`"t,noise"` -> `("t", "noise")`; an audit checks them against its task."""
    return tuple(dict.fromkeys(pieces(text)))


def recipe(lr: float | None, steps: int | None, epochs: int | None, batch_size: int | None) -> LocalTraining | None:
    """The client's training rule, where its learning rate is given."""
    if lr is not None:
        return LocalTraining(lr=lr, steps=steps, epochs=epochs, batch_size=batch_size)
    if steps or epochs or batch_size:
        raise LoadError("--steps, --epochs and --batch-size describe the client's training, which needs --lr too.")
    return None


def knowledge(
    lr: float | None, steps: int | None, epochs: int | None, batch_size: int | None, labels: str, defence: str
) -> Knowledge:
    """The threat model that the options of `gradleak attack` grant."""
    return Knowledge(
        given={"y": torch.tensor(numbers(labels, "--labels", unique=False))} if labels else {},
        training=recipe(lr, steps, epochs, batch_size),
        defence=defence_of(defence) if defence else None,
    )


def observations(paths: Sequence[Path]) -> list[Observation]:
    """Observations from files. Those that share a key are named after their files: a key names one target."""
    seen = [Observation.load(path) for path in paths]
    uses = Counter(target.key for target in seen)
    taken = {key for key, times in uses.items() if times == 1}
    for position, (path, target) in enumerate(zip(paths, seen, strict=True)):
        if uses[target.key] > 1:
            names = chain([path.stem], (f"{path.stem}-{number}" for number in count(2)))
            key = next(name for name in names if name not in taken)
            seen[position] = replace(target, key=key)
            taken.add(key)
    return seen


def engine(device: str, precision: str, one_by_one: bool = False) -> Engine:
    """An Engine whose device exists."""
    made = Engine(device=device, precision=precision, batched=not one_by_one)
    try:
        torch.empty(0, device=made.where)
    except (RuntimeError, AssertionError) as problem:  # torch without CUDA asserts
        raise LoadError(
            f"The device {device!r} cannot be used: {sentence(str(problem).splitlines()[0])} Try --device cpu."
        ) from None
    return made


@contextmanager
def workers(address: str, gpus: float) -> Iterator[Any]:
    """The Ray cluster that --ray names, for as long as a run lasts; nothing was named: None, and cells run here."""
    if not address:
        if gpus:
            raise LoadError("--ray-gpus says what a cell gets of a Ray cluster: give --ray auto or an address too.")
        yield None
        return
    from gradleak.ray import RayWorkers

    with RayWorkers(address, gpus=gpus) as cluster:
        yield cluster


def images(text: str, split: str | None = None, size: int | None = None) -> Any:
    """Data by name or path (`gradleak.data.load`), or the object that FILE.py:name names."""
    if not is_reference(text):
        return data.load(text, split=split, size=size)
    if size is not None:
        raise LoadError(f"--size is for images by name or from files; {text} is made in Python: resize them there.")
    return named_object(text, "data")


def training_data(origin: Mapping[str, Any]) -> tuple[Any, Any]:
    """What clients are trained on and what they are tested on, by [origin] of a training.toml; no test data: None.

    Test data are the test part of what they name; where that is also what clients are trained on, those get the
    training part. Without test data the share `holdout` of the data is kept back, the same rows every time.
    """
    named, tested, share = str(origin["data"]), str(origin.get("test", "")), float(origin.get("holdout", 0.0))
    size = int(origin["size"]) if "size" in origin else None
    if tested:
        part = "train" if tested == named else None
        return images(named, part, size), images(tested, "test", size)
    held = images(named, size=size)
    return held_out(held, share) if share else (held, None)


def held_out(given: Any, share: float) -> tuple[Any, Any]:
    """Data without a random share of them, and that share."""
    if not 0 < share < 1:
        raise LoadError(f"--holdout must lie between 0 and 1; given {share}.")
    tensors = isinstance(given, Mapping) or (isinstance(given, (tuple, list)) and isinstance(given[0], torch.Tensor))
    count = len(next(iter(given.values())) if isinstance(given, Mapping) else given[0] if tensors else given)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    kept = max(1, round(share * count))

    def part(rows: torch.Tensor) -> Any:
        if isinstance(given, data.Images):
            return given[rows]
        if isinstance(given, Mapping):
            return {name: value[rows] for name, value in given.items()}
        if tensors:
            return tuple(value[rows] for value in given)
        return torch.utils.data.Subset(given, rows.tolist())

    return part(shuffled[kept:]), part(shuffled[:kept])


def a_few(task: Task, text: str) -> Batch:
    """Some examples of the data that the text names, in model-input space, for `Task.check`."""
    from gradleak.audit.private import examples_of

    if "x" not in task.fields:
        raise LoadError(f"--data is checked against a field x; the task's fields are {', '.join(task.fields)}.")
    held = examples_of(images(text), task)
    return held.batch(torch.arange(min(FEW, len(held))))


def command_line() -> str:
    """What was typed, to be typed again."""
    return shlex.join(["gradleak", *sys.argv[1:]])


def leave_room() -> None:
    """On a busy machine use one thread fewer than torch would, unless OMP_NUM_THREADS says how many.

    Steps are many and small, and all threads wait for the slowest after each, so a core that another program uses holds
    up all of them. On a shared machine of two cores `estimate` of the built-in audit was 5 to 26 times higher with two
    threads than with one (four pairs); on an idle one its second-order cells took 20 s with two and 26 to 28 with one.
    """
    alone = hasattr(os, "getloadavg") and os.getloadavg()[0] < IDLE  # Windows does not tell
    if "OMP_NUM_THREADS" not in os.environ and not alone:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def task(reference: str) -> Task:
    """The Task that `FILE.py:name` or `module:name` names (`FILE.py` alone means `FILE.py:task`)."""
    return a_task(named_object(reference, "task"), reference)


def a_task(found: Any, reference: str) -> Task:
    """What a reference led to, if it is a Task."""
    if isinstance(found, Task):
        return found
    raise LoadError(
        f"{reference} is a {type(found).__name__}, not a gradleak.Task. In that file write: "
        "task = gradleak.Task.supervised(model, torch.nn.functional.cross_entropy, like=(x, y))."
    )


def is_reference(text: str) -> bool:
    """Does this read as `FILE.py`, `FILE.py:name` or `module:name` rather than as a name or a path to data?"""
    place, colon, name = text.rpartition(":")
    return text.endswith(".py") or (bool(colon) and name.isidentifier() and (place.endswith(".py") or _dotted(place)))


def named_object(reference: str, default: str) -> Any:
    """The object a reference names; a function of no arguments is called for it, so that a file may build it late."""
    place, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():  # also C:\train.py, where the colon belongs to the path
        place, name = reference, default
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place, reference)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise LoadError(f"{place} has no {name!r}.{_some_names(name, public)}")
    found = getattr(module, name)
    return _guarded(found, place) if inspect.isfunction(found) else found


def _some_names(name: str, public: list[str]) -> str:
    return did_you_mean(name, public) if len(public) <= 40 else did_you_mean(name, [])


def _dotted(text: str) -> bool:
    return bool(text) and all(part.isidentifier() for part in text.split("."))


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LoadError(f"There is no file {path} (looked from {Path.cwd()}).")
    path = path.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the file may import its neighbours, as it can when Python runs it
    name = f"gradleak_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    loader = spec.loader
    _guarded(lambda: loader.exec_module(module), str(path))
    return module


def _from_name(name: str, reference: str) -> ModuleType:
    if not _dotted(name):
        raise LoadError(f"{reference!r} names neither a file nor a module. Write FILE.py:name, such as train.py:task.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise LoadError(f"There is no module {name!r} (for {reference!r}). For a file, write FILE.py:name.")
    module = _guarded(lambda: importlib.import_module(name), name)
    assert isinstance(module, ModuleType)
    return module


def _guarded(run: Callable[[], Any], place: str) -> Any:
    """Run the user's code; whatever it raises becomes one message that says where in the user's file it happened."""
    try:
        return run()
    except (Exception, SystemExit) as problem:
        frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
        own = [frame for frame in frames if Path(frame.filename).name == Path(place).name]
        line = problem.lineno if isinstance(problem, SyntaxError) else own[-1].lineno if own else None
        where = f"{place}, line {line}" if line else place
        raise LoadError(f"{where} raised {type(problem).__name__}: {problem}") from problem
