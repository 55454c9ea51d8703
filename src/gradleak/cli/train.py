"""`gradleak train`: clients, rounds and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.options import DataName, Device, LocalSteps, OneByOne, Plain, Precision
from gradleak.cli.root import tell


def train(
    context: typer.Context,
    reference: Annotated[
        str,
        typer.Argument(
            metavar="[FILE.py:NAME]",
            help="A Task, or a model's or a task's name (ddpm:base=32); nothing: LeNet on handwritten digits.",
        ),
    ] = "",
    task: Annotated[
        str, typer.Option("--task", "-t", metavar="NAME", help="The same, as an option: --task ddpm.")
    ] = "",
    data: DataName = "",
    size: Annotated[
        int | None, typer.Option(min=1, help="Crop images centrally to a square, and resize them to this side.")
    ] = None,
    test_data: Annotated[str, typer.Option(help="Test on these (their test part), named as --data.")] = "",
    holdout: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.9, metavar="SHARE", help="Of --data, to test on instead; default 0.1."),
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients that share the data.")] = 10,
    per_round: Annotated[
        int | None, typer.Option(min=1, help="Clients in a round, without replacement; default: half of them.")
    ] = None,
    poisson: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, metavar="RATE", help="Instead: each client with this probability.")
    ] = None,
    partition: Annotated[
        str, typer.Option(help="iid, iid_balanced, dir_class:alpha=0.5,min_size=10, dir_client:alpha=0.5 or in_order.")
    ] = "iid",
    examples: Annotated[int | None, typer.Option(min=1, help="Examples of a client in a round; default: all.")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds in all; more than before goes on.")] = 20,
    lr: Annotated[
        float | None,
        typer.Option("--lr", help="The clients' learning rate; default 0.1, 0.5 for the digits, 0.0002 for ddpm."),
    ] = None,
    optimiser: Annotated[str, typer.Option(help="The clients': sgd or adam; default sgd, and adam for ddpm.")] = "",
    steps: LocalSteps = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Local epochs, instead of --steps; default 5.")] = None,
    batch_size: Annotated[int, typer.Option(min=0, help="Size of local batches; 0: all examples at once.")] = 32,
    server_lr: Annotated[float, typer.Option(help="The server's learning rate; 1 is FedAvg.")] = 1.0,
    weighting: Annotated[str, typer.Option(help="Clients count by their examples, or uniform.")] = "examples",
    averaging: Annotated[
        str,
        typer.Option(
            help="Also test an average of models, which is never sent: swa:start=15,every=5, ema:decay=0.99; none. "
            "Default: ema for ddpm."
        ),
    ] = "",
    shared_draws: Annotated[
        bool, typer.Option("--shared-draws", help="Of denoisers: the server draws steps and noise for all clients.")
    ] = False,
    samples: Annotated[
        int, typer.Option(min=0, help="Of denoisers: pictures from fixed latents at every checkpoint.")
    ] = 8,
    defence: Annotated[
        str, typer.Option("--defence", "-d", help="NAME:setting=value (gradleak list defences).")
    ] = "none",
    seed: Annotated[int, typer.Option(help="Of the split, of who takes part, of shuffles and noise.")] = 0,
    checkpoints: Annotated[str, typer.Option(help="Rounds to keep for audits: 0,50,100; 0 and the last anyway.")] = "",
    every: Annotated[int, typer.Option(min=1, help="Rounds between two tests.")] = 1,
    device: Device = "auto",
    precision: Precision = "strict",
    one_by_one: OneByOne = False,
    plain: Plain = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; the same one goes on.")] = None,
) -> None:
    """Train a model with simulated clients (FedAvg), and keep checkpoints for `gradleak audit --from`.

    Without any argument: LeNet on real handwritten digits, 20 rounds, on a CPU in less than a minute.
    """
    from gradleak.cli import loading
    from gradleak.cli.progress import shown
    from gradleak.cli.tasks import usual
    from gradleak.cli.training import TrainingRequest
    from gradleak.core import registry
    from gradleak.federation import Everyone, Federation, Fixed, Poisson

    if task and reference:
        raise loading.LoadError(f"{reference} and --task {task} both say what is trained: give one of them.")
    reference, wonted = task or reference, usual(task or reference)
    if per_round is not None and poisson is not None:
        raise loading.LoadError("--per-round and --poisson both say who takes part: give one of them.")
    chosen = Everyone() if clients == 1 else Fixed(per_round or -(-clients // 2))
    rate = 0.5 if lr is None and not reference and not data else lr  # sigmoids are slow
    recipe = wonted.recipe(rate, optimiser, steps, epochs if steps or epochs else 5, batch_size or None)
    mean = averaging or wonted.averaging
    request = TrainingRequest(
        Federation(
            clients=clients,
            training=recipe,
            examples=examples,
            seed=seed,
            split=registry.parse("partition", partition),
            participation=chosen if poisson is None else Poisson(poisson),
            server_lr=server_lr,
            weighting=weighting,
            averaging=registry.parse("averaging", mean) if mean not in ("", "none") else None,
        ),
        reference=reference,
        data=data,
        test_data=test_data,
        holdout=holdout,
        size=size,
        shared=shared_draws,
        samples=samples,
        rounds=rounds,
        checkpoints=loading.numbers(checkpoints, "--checkpoints") if checkpoints else (),
        every=every,
        defence=defence,
        engine=loading.engine(device, precision, one_by_one),
    )
    context.find_root().obj = "Interrupted before the first round; nothing was written."
    loading.leave_room()
    planned = request.planned()
    folder = out or request.folder
    tell(f"{planned.estimate(folder)}\nInto {folder}. Ctrl-C is safe: the same command goes on.")
    with shown(plain) as progress:
        progress.start(1)
        progress.cell(f"training, {rounds} rounds", 0)
        done = request.run(planned, out, progress)
    typer.echo(done.table())
    if (late := planned.federation.averaging) is not None and late.start > rounds:
        typer.echo(f"\nNothing is averaged yet: that begins after round {late.start}.")
    left_out = sum(len(row["excluded"]) for row in done.metrics)
    if left_out:
        typer.echo(f"\n{loading.counted(left_out, 'upload')} left out; metrics.jsonl says whose and why.")
    if planned.defence is not None:
        proved = planned.defence.guarantee(planned.federation.exposure(rounds, planned.data))
        typer.echo(f"\n{defence}: {proved}")
    typer.echo(f"\nMetrics: {done.folder}/metrics.jsonl   Curves: {done.folder}/curves.svg")
    if planned.samples is not None:
        typer.echo(f"Samples over rounds: {done.folder}/samples.png")
    typer.echo(f"Attack it: gradleak audit --from {done.folder} --rounds {','.join(map(str, done.checkpoints))}")
