"""Options that several commands share, with one wording."""

from __future__ import annotations

from typing import Annotated

import typer

DEVICES = "cpu, cuda, cuda:1, ... ; auto takes CUDA where there is one."
PRECISIONS = "strict (float32), fast (TF32 allowed) or double (float64)."


def _precisions() -> list[str]:
    return ["strict", "fast", "double"]


Reference = Annotated[
    str, typer.Option("--task", "-t", metavar="FILE.py:NAME", help="The Task of the model that was sent.")
]
DataName = Annotated[
    str, typer.Option("--data", help="Images by name (gradleak data list), an .npz, a folder or FILE.py:NAME.")
]
Device = Annotated[str, typer.Option(help=DEVICES)]
Precision = Annotated[str, typer.Option(help=PRECISIONS, autocompletion=_precisions)]
OtherDevice = Annotated[str | None, typer.Option("--device", help=DEVICES)]  # None: the configuration's
OtherPrecision = Annotated[str | None, typer.Option("--precision", help=PRECISIONS, autocompletion=_precisions)]
OneByOne = Annotated[
    bool, typer.Option("--one-by-one", help="No lanes: slow, for models that vmap rejects (gradleak check tells).")
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="The client's learning rate.")]
LocalSteps = Annotated[int | None, typer.Option("--steps", min=1, help="Local steps of the client in a round.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Local epochs, instead of --steps.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Size of the client's local batches.")]
Plain = Annotated[
    bool,
    typer.Option("--plain", envvar="GRADLEAK_PLAIN", help="As in a pipe: lines instead of bars, the whole table."),
]
