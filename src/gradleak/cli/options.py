"""Options as objects: each command takes one frozen dataclass, whose fields carry typer's metadata.

A field is one option (`Annotated[..., typer.Option(...)]`) or a group of options, itself such a dataclass. Commands
share groups and single options, so that each is written once. `takes` shows typer the flat list of options.
Nothing here imports torch before a command runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gradleak.cli.root import LoadError, log
from gradleak.core.settings import Group

if TYPE_CHECKING:
    from gradleak.core.listeners import Progress
    from gradleak.engine import Engine
    from gradleak.scenario.client import LocalTraining

Result = TypeVar("Result")


def _precisions() -> list[str]:
    return ["strict", "fast", "double"]


TaskReference = Annotated[
    str, typer.Option("--task", "-t", metavar="FILE.py:NAME", help="The Task of the model that was sent.")
]
DataName = Annotated[
    str,
    typer.Option(
        "--data",
        help="A name (gradleak data list), a folder of images, an .npz, .csv, .parquet or .txt, or FILE.py:NAME.",
    ),
]
Size = Annotated[
    int | None, typer.Option(min=1, help="Crop images centrally to a square, and resize them to this side.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... ; auto: CUDA if there is one.")]
Precision = Annotated[
    str,
    typer.Option(help="strict (float32), fast (TF32 allowed) or double (float64).", autocompletion=_precisions),
]
OneByOne = Annotated[
    bool, typer.Option("--one-by-one", help="No lanes: slow, for models that vmap rejects (see gradleak check).")
]
LocalSteps = Annotated[int | None, typer.Option("--steps", min=1, help="Local steps of the client in a round.")]
Plain = Annotated[
    bool,
    typer.Option("--plain", envvar="GRADLEAK_PLAIN", help="As in a pipe: lines instead of bars, the whole table."),
]


@dataclass(frozen=True)
class DataOptions(Group):
    """Which examples are used, and how they are read. What is empty is not stated."""

    data: DataName = ""
    size: Size = None
    target: Annotated[
        str, typer.Option(metavar="COLUMN", help="For tables: the column that is predicted; default: the last.")
    ] = ""
    columns: Annotated[
        str, typer.Option(metavar="NAME:KIND,...", help="For tables: age:number,zip:category,id:drop; others by value.")
    ] = ""
    classes: Annotated[
        str, typer.Option(metavar="COUNT|regression", help="Classes of the target; default: by its values.")
    ] = ""
    missing: Annotated[
        str,
        typer.Option(metavar="category|drop", help="For tables: drop leaves out rows with a missing value."),
    ] = ""
    bounds: Annotated[
        str,
        typer.Option(metavar="yes|SHARE", help="For tables: the attacker knows the range of numbers, or quantiles."),
    ] = ""
    tokenizer: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help='For texts: has encode(text); default, or "bytes": UTF-8.')
    ] = ""

    @property
    def stated(self) -> dict[str, str]:
        """Every stated option as text, for [origin] of a run; `DataOptions.of` reads it back."""
        values = {each.name: getattr(self, each.name) for each in fields(DataOptions)}
        return {name: str(value) for name, value in values.items() if value not in ("", None)}

    @staticmethod
    def of(origin: Mapping[str, Any]) -> DataOptions:
        """The options that an [origin] names."""
        named = {each.name: str(origin[each.name]) for each in fields(DataOptions) if each.name in origin}
        size = named.pop("size", "")
        if size and not size.isdecimal():
            raise LoadError(f"size in [origin] must be a whole number; it is {size!r:.40}.")
        return DataOptions(**named, size=int(size) if size else None)

    def load(self, split: str | None = None) -> Any:
        """The data: `Images`, `Records`, `Texts`, or the object of FILE.py:NAME."""
        from gradleak.cli.loading import examples

        return examples(self, split)


@dataclass(frozen=True)
class Recipe(Group):
    """The client's training rule, as far as the attacker knows it."""

    lr: Annotated[float | None, typer.Option("--lr", help="The client's learning rate.")] = None
    steps: LocalSteps = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Local epochs, instead of --steps.")] = None
    batch_size: Annotated[int | None, typer.Option(min=1, help="Size of the client's local batches.")] = None

    def training(self) -> LocalTraining | None:
        """The rule; None if no learning rate is given."""
        from gradleak.scenario.client import LocalTraining

        if self.lr is not None:
            return LocalTraining(lr=self.lr, steps=self.steps, epochs=self.epochs, batch_size=self.batch_size)
        if self.steps or self.epochs or self.batch_size:
            raise LoadError("--steps, --epochs and --batch-size describe the client's training, which needs --lr too.")
        return None


@dataclass(frozen=True)
class EngineOptions(Group):
    """Where and how attacks are computed. Empty text: not stated."""

    device: Device = "auto"
    precision: Precision = "strict"
    one_by_one: OneByOne = False

    def engine(self) -> Engine:
        """An engine whose device can be used; what is not stated has its default."""
        from gradleak.cli.loading import engine

        return engine(self.device or "auto", self.precision or "strict", self.one_by_one)


@dataclass(frozen=True)
class Output(Group):
    """Where a run is stored, and how its progress is shown."""

    plain: Plain = False
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run; the same one resumes.")] = None

    def announce(self, default: Path) -> None:
        log(f"Into {self.out or default}. Ctrl-C is safe: the same command resumes.")

    def run(self, default: Path, run: Callable[[Path], Result], what: str, progress: Progress) -> Result:
        """Run into `--out`; else into `default` or, if that holds another run, the first numbered one that does not."""
        from gradleak.core.folder import FolderInUse

        if self.out is not None:
            return run(self.out)
        folder = default
        for number in count(2):
            try:
                return run(folder)
            except FolderInUse:
                folder = default.with_name(f"{default.name}-{number}")
                progress.note(f"There is another {what} already; this one goes into {folder}.")
        raise AssertionError("count does not end")
