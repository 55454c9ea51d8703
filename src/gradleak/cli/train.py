"""`gradleak train`: clients, rounds and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.formatting import counted
from gradleak.cli.options import DataOptions, EngineOptions, LocalSteps, Output
from gradleak.cli.references import BUILTIN, stem
from gradleak.cli.root import LoadError, log, on_interrupt, spare_a_core
from gradleak.core.settings import Group, takes

if TYPE_CHECKING:
    from gradleak.cli.tasks import TrainingDefaults
    from gradleak.core.durations import Estimate
    from gradleak.core.listeners import Progress
    from gradleak.federation import Federation
    from gradleak.federation.participation import Participation
    from gradleak.federation.training import Trained, TrainingRun
    from gradleak.scenario.client import LocalTraining

HOLDOUT = 0.1  # share of the data that is tested on if no test data are named
EPOCHS = 5  # local epochs if neither --steps nor --epochs is given
DIGITS_LR = 0.5  # of the built-in LeNet: networks of sigmoids learn slowly


@dataclass(frozen=True)
class TrainingData(Group):
    """What clients train on, and what is tested on."""

    examples: DataOptions = DataOptions()
    test_data: Annotated[str, typer.Option(help="Test on these (their test part), named as --data.")] = ""
    holdout: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.9, metavar="SHARE", help="Share of --data to test on instead; default 0.1."),
    ] = None

    def origin(self, task: str) -> dict[str, Any]:
        """[origin] of a training.toml: where task and data are found."""
        from gradleak.cli.loading import BUILTIN_DATA, DATA_FORMS

        if self.test_data and self.holdout:
            raise LoadError("--test-data and --holdout both say what is tested on: give one of them.")
        if task and not self.examples.data:
            raise LoadError(f"Say which data {task} is trained on: {DATA_FORMS}.")
        origin: dict[str, Any] = {"task": task or BUILTIN, "data": BUILTIN_DATA, **self.examples.stated}
        if self.test_data:
            origin["test"] = self.test_data
        else:
            origin["holdout"] = HOLDOUT if self.holdout is None else self.holdout
        return origin if self.examples.size is None else {**origin, "size": self.examples.size}


@dataclass(frozen=True)
class Clients(Group):
    """How many clients there are, and who takes part in a round."""

    clients: Annotated[int, typer.Option(min=1, help="Clients that share the data.")] = 10
    per_round: Annotated[
        int | None, typer.Option(min=1, help="Clients in a round, without replacement; default: half of them.")
    ] = None
    poisson: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, metavar="RATE", help="Instead of --per-round: each client with this probability."
        ),
    ] = None

    def participation(self) -> Participation:
        from gradleak.federation import Everyone, Fixed, Poisson

        if self.per_round is not None and self.poisson is not None:
            raise LoadError("--per-round and --poisson both say who takes part: give one of them.")
        if self.poisson is not None:
            return Poisson(self.poisson)
        return Everyone() if self.clients == 1 else Fixed(self.per_round or -(-self.clients // 2))


@dataclass(frozen=True)
class ClientRecipe(Group):
    """How clients train; what is not stated depends on the task."""

    lr: Annotated[
        float | None,
        typer.Option("--lr", help="The clients' learning rate; default 0.1, 0.5 for the digits, 0.0002 for ddpm."),
    ] = None
    optimiser: Annotated[str, typer.Option(help="The clients' optimiser: sgd or adam; default sgd, adam for ddpm.")] = (
        ""
    )
    steps: LocalSteps = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Local epochs, instead of --steps; default 5.")] = None
    batch_size: Annotated[int, typer.Option(min=0, help="Size of local batches; 0: all examples at once.")] = 32

    def training(self, defaults: TrainingDefaults) -> LocalTraining:
        from gradleak.core.registry import UnknownName, did_you_mean
        from gradleak.scenario.client import LocalTraining
        from gradleak.scenario.rules import SGD, Adam, Rule

        rules: dict[str, Rule] = {"sgd": SGD(), "adam": Adam()}
        name = self.optimiser or defaults.optimiser
        if name not in rules:
            raise UnknownName(f"Unknown optimiser {name!r}.{did_you_mean(name, rules)}")
        epochs = self.epochs if self.steps or self.epochs else EPOCHS
        lr = defaults.lr if self.lr is None else self.lr
        return LocalTraining(lr, self.steps, epochs, self.batch_size or None, rules[name])


@dataclass(frozen=True)
class TrainOptions:
    """The options of `gradleak train`."""

    reference: Annotated[
        str,
        typer.Argument(
            metavar="[FILE.py:NAME]",
            help="A Task, or a model's or a task's name (ddpm:base=32); nothing: LeNet on handwritten digits.",
        ),
    ] = ""
    task: Annotated[str, typer.Option("--task", "-t", metavar="NAME", help="The same, as an option: --task ddpm.")] = ""
    data: TrainingData = TrainingData()
    clients: Clients = Clients()
    partition: Annotated[
        str,
        typer.Option(
            help="Split: iid, iid_balanced, dir_class:alpha=0.5,min_size=10, dir_client:alpha=0.5 or in_order."
        ),
    ] = "iid"
    examples: Annotated[int | None, typer.Option(min=1, help="Examples of a client in a round; default: all.")] = None
    rounds: Annotated[int, typer.Option(min=0, help="Rounds in all; more than before resumes.")] = 20
    recipe: ClientRecipe = ClientRecipe()
    server_lr: Annotated[float, typer.Option(help="The server's learning rate; 1 is FedAvg.")] = 1.0
    weighting: Annotated[str, typer.Option(help="Weight of a client: examples (their number) or uniform.")] = "examples"
    averaging: Annotated[
        str,
        typer.Option(
            help="Also test an average of models, which is never sent: swa:start=15,every=5, ema:decay=0.99; none. "
            "Default: ema for ddpm."
        ),
    ] = ""
    shared_draws: Annotated[
        bool, typer.Option("--shared-draws", help="Denoisers only: the server draws steps and noise for all clients.")
    ] = False
    samples: Annotated[
        int, typer.Option(min=0, help="Denoisers only: pictures from fixed latents at every checkpoint.")
    ] = 8
    defence: Annotated[
        str, typer.Option("--defence", "-d", help="The clients' defence: NAME:setting=value (gradleak list defences).")
    ] = "none"
    seed: Annotated[int, typer.Option(help="Seed of the split, of who takes part, of shuffles and noise.")] = 0
    checkpoints: Annotated[
        str, typer.Option(help="Rounds to store for audits: 0,50,100; 0 and the last are always stored.")
    ] = ""
    every: Annotated[int, typer.Option(min=1, help="Rounds between two tests.")] = 1
    engine: EngineOptions = EngineOptions()
    output: Output = Output()

    @property
    def model(self) -> str:
        """The task or model, by either option; empty: the built-in one."""
        return self.reference or self.task

    @property
    def folder(self) -> Path:
        """Folder of the training without --out: the same options find, and resume, the same one."""
        return Path("runs") / f"train-{stem(self.model)}"

    def federation(self) -> Federation:
        from gradleak.cli.tasks import training_defaults
        from gradleak.core import registry
        from gradleak.federation import Federation

        defaults = training_defaults(self.model)
        if not self.model and not self.data.examples.data:
            defaults = replace(defaults, lr=DIGITS_LR)
        averaging = self.averaging or defaults.averaging
        return Federation(
            clients=self.clients.clients,
            training=self.recipe.training(defaults),
            examples=self.examples,
            seed=self.seed,
            split=registry.parse("partition", self.partition),
            participation=self.clients.participation(),
            server_lr=self.server_lr,
            weighting=self.weighting,
            averaging=registry.parse("averaging", averaging) if averaging not in ("", "none") else None,
        )


def estimate_training(run: TrainingRun, folder: Path) -> Estimate:
    """How long the remaining rounds will take; rounds that the folder holds are not counted."""
    from gradleak.federation.checkpoints import Checkpoints
    from gradleak.federation.training import estimate

    done = Checkpoints(folder).done if (folder / "training.toml").exists() else 0
    return estimate(run.federation, run.task, run.data, max(0, run.rounds - done), run.defence, run.engine)


def run_training(run: TrainingRun, folder: Path, progress: Progress) -> Trained:
    """Train into the folder, and report progress and excluded clients."""
    from gradleak.federation.training import train

    def show_round(row: dict[str, Any]) -> None:
        progress.share(row["round"] / run.rounds)

    with _exclusions_as_notes(progress):
        return train(replace(run, out=folder, progress=show_round))


def plan_training(options: TrainOptions) -> TrainingRun:
    """Load task and data, and check the options against them."""
    from gradleak.audit.cells import defence_of
    from gradleak.audit.private import examples_of
    from gradleak.cli.loading import fitted, optional_numbers, task_for, training_data
    from gradleak.diffusion import Denoising, SharedDraws
    from gradleak.federation.samples import Samples
    from gradleak.federation.training import TrainingRun, demand_rounds

    if options.reference and options.task:
        raise LoadError(f"{options.reference} and --task {options.task} both say what is trained: give one of them.")
    federation = options.federation()
    checkpoints = optional_numbers(options.checkpoints, "--checkpoints")
    engine = options.engine.engine()
    origin = options.data.origin(options.model)
    demand_rounds(options.rounds, options.every, checkpoints)
    examples, test_examples = training_data(origin)
    task = task_for(origin["task"], examples)
    denoiser = isinstance(task.objective, Denoising)
    if options.shared_draws and (not denoiser or options.defence != "none"):
        raise LoadError("--shared-draws is for denoisers, and without --defence: the server hands out their noise.")
    return TrainingRun(
        federation,
        task,
        examples_of(fitted(examples, task), task),
        options.rounds,
        defence=SharedDraws(options.seed) if options.shared_draws else defence_of(options.defence),
        test=None if test_examples is None else examples_of(fitted(test_examples, task), task, "test data"),
        every=options.every,
        checkpoints=checkpoints,
        engine=engine,
        origin=origin,
        samples=Samples(options.samples) if denoiser and options.samples else None,
    )


@takes(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a model with simulated clients (FedAvg), and store checkpoints for `gradleak audit --from`.

    Without any argument: LeNet on real handwritten digits, 20 rounds, on a CPU in less than a minute.
    """
    from gradleak.cli.progress import single_job

    on_interrupt("Interrupted before the first round; nothing was written.")
    spare_a_core()
    planned = plan_training(options)
    log(str(estimate_training(planned, options.output.out or options.folder)))
    options.output.announce(options.folder)
    with single_job(f"training, {options.rounds} rounds", options.output.plain) as progress:
        trained = options.output.run(
            options.folder, lambda folder: run_training(planned, folder, progress), "training", progress
        )
    _print_training(planned, trained, options.defence)


def _print_training(planned: TrainingRun, trained: Trained, defence: str) -> None:
    """Print metrics, excluded uploads, the guarantee of the defence, and where everything is."""
    typer.echo(trained.table())
    averaging = planned.federation.averaging
    if averaging is not None and averaging.start > planned.rounds:
        typer.echo(f"\nNothing is averaged yet: averaging begins after round {averaging.start}.")
    excluded = sum(len(row["excluded"]) for row in trained.metrics)
    if excluded:
        typer.echo(f"\n{counted(excluded, 'upload')} left out; metrics.jsonl says whose and why.")
    if planned.defence is not None:
        guarantee = planned.defence.guarantee(planned.federation.exposure(planned.rounds, planned.data))
        typer.echo(f"\n{defence}: {guarantee}")
    typer.echo(f"\nMetrics: {trained.folder}/metrics.jsonl   Curves: {trained.folder}/curves.svg")
    if planned.samples is not None:
        typer.echo(f"Samples over rounds: {trained.folder}/samples.png")
    typer.echo(f"Attack it: gradleak audit --from {trained.folder} --rounds {','.join(map(str, trained.checkpoints))}")


@contextmanager
def _exclusions_as_notes(progress: Progress) -> Iterator[None]:
    """Show the warning about an excluded client as a note of the progress display."""
    from gradleak.federation import ExcludedClient

    with warnings.catch_warnings():
        warnings.simplefilter("always", ExcludedClient)
        warnings.showwarning = lambda message, *_, **__: progress.note(str(message))
        yield
