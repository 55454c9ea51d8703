"""`gradleak gate`: may this update be sent?"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.options import Device, Recipe, TaskReference
from gradleak.cli.root import CROSSED, log, spare_a_core
from gradleak.core.settings import takes

if TYPE_CHECKING:
    from gradleak.audit.gate import Decision
    from gradleak.scenario.observation import Observation


@dataclass(frozen=True)
class GateOptions:
    """The options of `gradleak gate`."""

    observation: Annotated[
        Path, typer.Argument(metavar="FILE", help="The update as the server would see it (Observation.save).")
    ]
    task: TaskReference
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="Time for the check; an undecided update is never allowed.")
    ] = 20
    policy: Annotated[
        Path | None, typer.Option(help="A TOML file (docs/gate.md); default: block what leaks or is undecided.")
    ] = None
    data: Annotated[
        str, typer.Option(help="The client's own examples of this round, FILE.py:NAME: {'x': ..., 'y': ...}.")
    ] = ""
    recipe: Recipe = Recipe()
    device: Device = "auto"
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write what may be sent: as it is, or with noise.")
    ] = None


@takes(GateOptions)
def gate(options: GateOptions) -> None:
    """Attack an update before it leaves the client: allow, noise or block. In doubt it blocks.

    Exit code 0: what may be sent is at --out (or is FILE itself, where it is allowed as it is); 1: do not send.
    """
    from gradleak.audit.gate import BLOCK, NOISE, Policy, check
    from gradleak.cli import loading
    from gradleak.cli.references import load_object
    from gradleak.scenario.observation import Knowledge

    spare_a_core()
    policy = Policy() if options.policy is None else Policy.load(options.policy)
    [observation] = loading.observations([options.observation])
    decision = check(
        loading.task(options.task),
        observation,
        policy,
        knows=Knowledge(training=options.recipe.training()),
        batch=load_object(options.data, "batch") if options.data else None,
        seconds=options.max_seconds,
        engine=loading.engine(options.device, "strict"),
    )
    typer.echo(str(decision))
    if options.out is not None and decision.update is not None:
        _write(decision, observation, options.observation, options.out)
    if decision.action == NOISE and options.out is None:
        log("The noised update was not written: name a file with --out.")
        raise typer.Exit(CROSSED)
    if decision.action == BLOCK:
        raise typer.Exit(CROSSED)


def _write(decision: Decision, observation: Observation, source: Path, out: Path) -> None:
    """Write the update that may be sent, and the decision beside it."""
    from gradleak.audit.gate import ALLOW

    assert decision.update is not None
    if decision.action == ALLOW:
        shutil.copyfile(source, out)
    else:
        # BatchNorm statistics of the examples have no noise on them: they do not leave.
        replace(observation, update=decision.update, returned_buffers=None).save(out)
    out.with_suffix(".json").write_text(json.dumps(decision.record(), indent=1) + "\n", encoding="utf-8")
