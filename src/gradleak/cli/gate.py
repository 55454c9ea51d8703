"""`gradleak gate`: may this update be sent?"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def gate(
    observation: Annotated[
        Path, typer.Argument(metavar="FILE", help="The update as the server would see it (Observation.save).")
    ],
    task: Annotated[str, typer.Option("--task", "-t", metavar="FILE.py:NAME", help="The Task of the model.")],
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="Time for the check; what is not decided is closed.")
    ] = 20,
    policy: Annotated[
        Path | None, typer.Option(help="A TOML file (docs/gate.md); nothing: block what leaks or is not decided.")
    ] = None,
    data: Annotated[
        str, typer.Option(help="The client's own examples of this round, FILE.py:NAME: {'x': ..., 'y': ...}.")
    ] = "",
    lr: Annotated[float | None, typer.Option("--lr", help="The client's learning rate.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Local steps of the client in a round.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Local epochs, instead of --steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Size of the client's local batches.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes CUDA where there is one.")] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write what may be sent: as it is, or with noise.")
    ] = None,
) -> None:
    """Attack an update before it leaves the client: allow, noise or block. In doubt it blocks.

    Exit code 0: what may be sent is at --out (or is FILE itself, where it is allowed as it is); 1: do not send.
    """
    from gradleak.audit.gate import ALLOW, BLOCK, NOISE, Policy, check
    from gradleak.cli import loading

    loading.leave_room()
    rules = Policy() if policy is None else Policy.load(policy)
    [seen] = loading.observations([observation])
    model = loading.task(task)
    knows = loading.knowledge(lr, steps, epochs, batch_size, "", "")
    batch = loading.named_object(data, "batch") if data else None
    decision = check(
        model,
        seen,
        rules,
        knows=knows,
        batch=batch,
        seconds=max_seconds,
        engine=loading.engine(device, "strict", False),
    )
    typer.echo(str(decision))
    if out is not None and decision.update is not None:
        if decision.action == ALLOW:
            shutil.copyfile(observation, out)
        else:
            # BatchNorm statistics of the examples have no noise on them: they do not leave.
            replace(seen, update=decision.update, returned_buffers=None).save(out)
        out.with_suffix(".json").write_text(json.dumps(decision.record(), indent=1) + "\n", encoding="utf-8")
    if decision.action == BLOCK or (decision.action == NOISE and out is None):
        if decision.action == NOISE:
            typer.echo("The noised update was not written: name a file with --out.", err=True)
        raise typer.Exit(1)
