"""`gradleak attack`: updates that were recorded anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.formatting import counted
from gradleak.cli.options import EngineOptions, Plain, Recipe, TaskReference
from gradleak.cli.root import on_interrupt, spare_a_core
from gradleak.core.settings import takes

if TYPE_CHECKING:
    from gradleak.scenario.observation import Knowledge


@dataclass(frozen=True)
class AttackOptions:
    """The options of `gradleak attack`."""

    observations: Annotated[list[Path], typer.Argument(metavar="OBSERVATION.safetensors...", help="What a server saw.")]
    task: TaskReference
    attack: Annotated[
        str, typer.Option("--attack", "-a", help="The attack, with settings: ig:steps=2000,restarts=8.")
    ] = "ig"
    recipe: Recipe = Recipe()
    track: Annotated[
        bool, typer.Option("--track", help="The files are rounds of ONE client on the same examples: one target.")
    ] = False
    labels: Annotated[str, typer.Option(help="The labels, if the attacker knows them: 3,5,5,9.")] = ""
    defence: Annotated[str, typer.Option(help="The defence, if the attacker knows it.")] = ""
    seed: Annotated[int, typer.Option(help="Seed of the attack's random starts.")] = 0
    engine: EngineOptions = EngineOptions()
    plain: Plain = False
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures and tensors.")] = Path("runs/attack")

    def knowledge(self) -> Knowledge:
        """The threat model that the options describe."""
        import torch

        from gradleak.audit.cells import defence_of
        from gradleak.cli.loading import numbers
        from gradleak.scenario.observation import Knowledge

        return Knowledge(
            given={"y": torch.tensor(numbers(self.labels, "--labels", unique=False))} if self.labels else {},
            training=self.recipe.training(),
            defence=defence_of(self.defence or "none"),
        )


@takes(AttackOptions)
def attack(options: AttackOptions) -> None:
    """Attack updates recorded anywhere. Needs no private data, so it says how well it fitted, not how close it is."""
    from gradleak.attack.checks import observation_checks
    from gradleak.audit import output as reconstruction
    from gradleak.cli import loading
    from gradleak.cli.progress import single_job
    from gradleak.core import registry
    from gradleak.scenario.observation import Track

    spare_a_core()
    observations = loading.observations(options.observations)
    method = registry.parse("attack", options.attack)
    task = loading.task(options.task)
    knowledge = options.knowledge()
    engine = options.engine.engine()
    for observation in observations:
        for problem in observation_checks(observation, task):
            typer.echo(f"{observation.key}: {problem}")
    on_interrupt("Interrupted; nothing was written.")
    in_order = sorted(observations, key=lambda observation: observation.round)
    targets = [Track(tuple(in_order))] if options.track else observations
    with single_job(f"{options.attack} on {counted(len(targets), 'target')}", options.plain) as progress:
        result = method.run(task, targets, knowledge, seed=options.seed, engine=engine, progress=progress.share)
    typer.echo(reconstruction.describe(result))
    for path in reconstruction.write(result, options.out):
        typer.echo(f"wrote {path}")
