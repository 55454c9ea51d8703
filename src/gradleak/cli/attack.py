"""`gradleak attack`: updates that were recorded anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.options import (
    BatchSize,
    Device,
    Epochs,
    LearningRate,
    LocalSteps,
    OneByOne,
    Plain,
    Precision,
    Reference,
)


def attack(
    context: typer.Context,
    observations: Annotated[
        list[Path], typer.Argument(metavar="OBSERVATION.safetensors...", help="What a server saw.")
    ],
    task: Reference,
    attack: Annotated[
        str, typer.Option("--attack", "-a", help="Its name, with settings: ig:steps=2000,restarts=8.")
    ] = "ig",
    lr: LearningRate = None,
    steps: LocalSteps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    track: Annotated[
        bool, typer.Option("--track", help="The files are rounds of ONE client on the same examples: one target.")
    ] = False,
    labels: Annotated[str, typer.Option(help="The labels, where the threat model grants them: 3,5,5,9.")] = "",
    defence: Annotated[str, typer.Option(help="The defence, where the threat model grants it.")] = "",
    seed: Annotated[int, typer.Option(help="Of the attack's random starts.")] = 0,
    device: Device = "auto",
    precision: Precision = "strict",
    one_by_one: OneByOne = False,
    plain: Plain = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures and tensors.")] = Path(
        "runs/attack"
    ),
) -> None:
    """Attack updates recorded anywhere. Needs no private data, so it tells how well it fitted, not how close it is."""
    from gradleak.attack import output as reconstruction
    from gradleak.attack.checks import observation_checks
    from gradleak.cli import loading
    from gradleak.cli.progress import shown
    from gradleak.core import registry
    from gradleak.scenario.observation import Track

    loading.leave_room()
    seen = loading.observations(observations)
    method = registry.parse("attack", attack)
    model = loading.task(task)
    knows = loading.knowledge(lr, steps, epochs, batch_size, labels, defence)
    engine = loading.engine(device, precision, one_by_one)
    for target in seen:
        for odd in observation_checks(target, model):
            typer.echo(f"{target.key}: {odd}")
    context.find_root().obj = "Interrupted; nothing was written."
    targets = [Track(tuple(sorted(seen, key=lambda each: each.round)))] if track else seen
    with shown(plain) as progress:
        progress.start(1)
        progress.cell(f"{attack} on {loading.counted(len(targets), 'target')}", 0)
        found = method.run(model, targets, knows, seed=seed, engine=engine, progress=progress.share)
    typer.echo(reconstruction.describe(found))
    for path in reconstruction.write(found, out):
        typer.echo(f"wrote {path}")
