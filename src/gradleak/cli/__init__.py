"""The command `gradleak`. Commands are thin: they turn words into objects, call the library and print what it says.

Exit codes: 0 done; 1 a stated threshold was crossed, or `check` found errors; 2 it could not run, and the message says
why; 70 a defect of gradleak itself; 130 interrupted.

Everything that needs torch is imported inside the commands.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gradleak.cli.gate import gate
from gradleak.cli.priors import app as prior_app

DEFECT = 70  # EX_SOFTWARE of sysexits.h: must not be taken for a crossed threshold (1)


class Commands(TyperGroup):
    """Turns every expected error into one message and exit code 2. GRADLEAK_DEBUG=1 shows where it was raised."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `gradleak list | head`: typer knows
        except KeyboardInterrupt as stop:
            from gradleak.cli.loading import command_line

            kept = f"{stop} Go on with: {command_line()}" if str(stop) else ctx.obj or "Interrupted."
            _tell(kept)
            raise typer.Exit(130) from None
        except (ValueError, LookupError, TypeError, OSError, RuntimeError, ImportError) as problem:
            if not _expected(problem):
                raise
            if os.environ.get("GRADLEAK_DEBUG"):
                traceback.print_exc()
            _tell(f"gradleak: {_message(problem)}")
            raise typer.Exit(2) from None


def _expected(problem: Exception) -> bool:
    """Errors of what was given. The rest are ours: they keep their traceback."""
    from gradleak.engine import EngineError
    from gradleak.registry import BadSetting, UnknownName

    return isinstance(problem, (ValueError, OSError, UnknownName, BadSetting, EngineError, ModuleNotFoundError))


# What a message of the library asks for, and how it is said on the command line.
OPTIONS = {
    "Knowledge(training=": "--lr, with --steps or --epochs",
    "Knowledge(given={'y'": "--labels",
    "Engine(batched=False)": "--one-by-one",
}


def _message(problem: Exception) -> str:
    from gradleak.cli.loading import sentence

    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}." if problem.filename else f"{problem.strerror}."
    if isinstance(problem, ModuleNotFoundError):
        return f"{sentence(problem)} Install it, or the extra of gradleak that brings it (see README.md)."
    told = str(problem)
    said = [option for asked, option in OPTIONS.items() if asked in told]
    return f"{sentence(told)} On the command line: {'; '.join(said)}." if said else told


def _tell(text: str) -> None:
    typer.echo(text, err=True)


app = typer.Typer(
    name="gradleak",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What can a federated-learning server see of its clients' data?",
    epilog="Audit only models, data and clients that you are authorised to audit.",
)
data_app = typer.Typer(no_args_is_help=True, help="Real images: what there is, and how to get the full sets.")
bench_app = typer.Typer(invoke_without_command=True, help="Measure speed on this machine; alone: the engine.")
app.add_typer(data_app, name="data")
app.add_typer(prior_app, name="prior")
app.command()(gate)
app.add_typer(bench_app, name="bench")

Reference = Annotated[
    str, typer.Option("--task", "-t", metavar="FILE.py:NAME", help="The Task of the model that was sent.")
]
DEVICES = "cpu, cuda, cuda:1, ... ; auto takes CUDA where there is one."
PRECISIONS = "strict (float32), fast (TF32 allowed) or double (float64)."
DataName = Annotated[
    str, typer.Option("--data", help="Images by name (gradleak data list), an .npz, a folder or FILE.py:NAME.")
]
Device = Annotated[str, typer.Option(help=DEVICES)]
Precision = Annotated[str, typer.Option(help=PRECISIONS)]
OtherDevice = Annotated[str | None, typer.Option("--device", help=DEVICES)]  # None: the configuration's
OtherPrecision = Annotated[str | None, typer.Option("--precision", help=PRECISIONS)]
OneByOne = Annotated[
    bool, typer.Option("--one-by-one", help="No lanes: slow, for models that vmap rejects (gradleak check tells).")
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="The client's learning rate.")]
LocalSteps = Annotated[int | None, typer.Option("--steps", min=1, help="Local steps of the client in a round.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Local epochs, instead of --steps.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Size of the client's local batches.")]


def _version(wanted: bool) -> None:
    if wanted:
        from gradleak import __version__

        typer.echo(f"gradleak {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


@app.command()
def audit(
    context: typer.Context,
    reference: Annotated[
        str,
        typer.Argument(
            metavar="[FILE.py:NAME]", help="A Task, an Audit or a model's name; nothing: the built-in audit."
        ),
    ] = "",
    config: Annotated[Path | None, typer.Option(help="A run.toml to repeat; other options change it.")] = None,
    attack: Annotated[
        list[str] | None, typer.Option("--attack", "-a", help="ig,dlg:steps=300 (gradleak list attacks).")
    ] = None,
    defence: Annotated[
        list[str] | None,
        typer.Option("--defence", "-d", help="none,NAME:setting=value,'A + B' (gradleak list defences)."),
    ] = None,
    trained: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Attack the checkpoints of this `gradleak train`.")
    ] = None,
    generator: Annotated[
        Path | None,
        typer.Option(metavar="FILE.safetensors", help="For gias, gifd, ggl: a generator (gradleak prior train)."),
    ] = None,
    observations: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Attack what was recorded there, such as by flower.Tap.")
    ] = None,
    task: Annotated[
        str, typer.Option("--task", "-t", metavar="FILE.py:NAME", help="The Task, as an option: for --observations.")
    ] = "",
    truth: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --observations: the examples of clients whose data are yours."),
    ] = None,
    rounds: Annotated[str, typer.Option(help="Rounds at which to attack: 0,50; with --from: all there are.")] = "",
    targets: Annotated[int | None, typer.Option(min=1, help="Updates attacked in each cell.")] = None,
    seeds: Annotated[str, typer.Option(help="Of the attacks' random starts: 0,1,2 or 0-2.")] = "",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds of a client that are averaged against fresh noise; 1: never.")
    ] = None,
    given: Annotated[
        str, typer.Option(help="Fields that the attacker is granted: y; of a denoiser's clients t,noise.")
    ] = "",
    data: DataName = "",
    clients: Annotated[int | None, typer.Option(min=1, help="Clients that share the data.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Examples of a client in a round.")] = None,
    lr: LearningRate = None,
    steps: LocalSteps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two steps on one target: does everything run?")] = False,
    device: OtherDevice = None,
    precision: OtherPrecision = None,
    one_by_one: OneByOne = False,
    ray: Annotated[
        str, typer.Option(metavar="auto|ADDRESS", help="Attack cells on a Ray cluster; auto: one here, or its own.")
    ] = "",
    ray_gpus: Annotated[float, typer.Option(min=0.0, metavar="SHARE", help="With --ray: GPUs of a cell: 0.5.")] = 0.0,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Run it again without each capability that the attacker was granted.")
    ] = False,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, metavar="SHARE", help="Exit 1 where more than this share is recovered."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run; the same one resumes.")] = None,
) -> None:
    """Attack a training set-up with every attack, against every defence, and say what leaks.

    Without any argument: the built-in audit on real images, on a CPU in about two minutes.
    """
    from gradleak.audit import estimate
    from gradleak.cli import loading
    from gradleak.cli.progress import shown
    from gradleak.cli.recorded import RecordedRequest
    from gradleak.cli.request import Request

    if reference and task:
        raise loading.LoadError(f"{reference} and --task {task} both name the task: give one of them.")
    words: dict[str, Any] = {
        "reference": reference or task,
        "attacks": loading.methods(attack or ()),
        "defences": loading.methods(defence or ()),
        "rounds": loading.numbers(rounds, "--rounds") if rounds else (),
        "seeds": loading.numbers(seeds, "--seeds") if seeds else (),
        "given": loading.fields(given),
        "data": data,
        "training": loading.recipe(lr, steps, epochs, batch_size),
        "quick": quick,
    }
    context.find_root().obj = "Interrupted before the first cell; nothing was written."
    loading.leave_room()
    if observations is not None:
        _only_for_made_updates({"--config": config, "--from": trained, "--targets": targets, "--repeats": repeats})
        _only_for_made_updates({"--clients": clients, "--examples": examples, "--generator": generator})
        engine = loading.engine(device or "auto", precision or "strict", one_by_one)
        recorded = RecordedRequest(observations, truth=truth, engine=engine, **words)
        model = recorded.task
        found = recorded.read(model)
        typer.echo("\n".join(recorded.heading(model, found)))
        if truth is None:
            for option, value in {"--ray": ray or None, "--fail-above": fail_above}.items():
                if value is not None:
                    raise loading.LoadError(f"{option} needs scores, and so --truth: without it nothing is scored.")
            _blind(recorded, model, found, out)
            return
        request: Any = recorded
        planned: Any = recorded.audit(model, found)
        folder = out or recorded.out
    else:
        if truth is not None:
            raise loading.LoadError("--truth goes with --observations: an audit of its own updates knows the truth.")
        request = Request(
            config=config,
            trained=trained,
            targets=targets,
            repeats=repeats,
            generator=generator,
            clients=clients,
            examples=examples,
            device=device or "",
            precision=precision or "",
            one_by_one=one_by_one,
            **words,
        )
        planned = request.audit()
        folder = out or request.folder
    _tell(f"{estimate(planned, out=folder)}\nInto {folder}. Ctrl-C is safe: the same command resumes.")
    with shown() as progress, loading.workers(ray, ray_gpus) as cluster:
        result = request.run(planned, out, progress, workers=cluster)
    if ablate:
        _ablated(planned, result)
    _told(result, fail_above)


def _ablated(planned: Any, result: Any) -> None:
    """The same audit without each capability of the attacker, and what that changes."""
    from gradleak.audit.ablation import ablation
    from gradleak.cli.progress import shown

    with shown() as progress:
        found = ablation(planned, result.folder, whole=result, progress=progress)
    typer.echo(f"What each capability of the attacker is worth:\n{found.table()}\n")


def _only_for_made_updates(given: dict[str, Any]) -> None:
    from gradleak.cli.loading import LoadError

    for option, value in given.items():
        if value is not None:
            raise LoadError(f"{option} is for audits that make their own updates; --observations takes recorded ones.")


def _blind(request: Any, model: Any, found: Any, out: Path | None) -> None:
    """An audit of recorded observations without any truth."""
    from gradleak.audit.recorded import summary
    from gradleak.cli.progress import shown

    with shown() as progress:
        findings, folder = request.blind(model, found, out, progress)
    typer.echo(summary(findings))
    for name in dict.fromkeys(name for row in findings for name in row["files"]):
        typer.echo(f"wrote {folder / name}")


def _told(result: Any, fail_above: float | None) -> None:
    """Print table, verdict and where the report is; exit 1 where a stated threshold is crossed."""
    from gradleak.cli import loading
    from gradleak.report.terminal import fitted
    from gradleak.report.threshold import crossed

    typer.echo(fitted(result, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    typer.echo(f"\n{result.verdict}")
    typer.echo(f"\nReport: {result.report((result.folder or Path()) / 'report.html')}")
    result.write_verdict((result.folder or Path()) / "verdict.json")
    if len(result.failed) == len(result.rows):
        first = loading.sentence(result.failed[0]["error"])
        raise ValueError(f"every cell failed, the first with: {first} Where: see rows.jsonl.")
    if fail_above is not None and (reason := crossed(result, fail_above)):
        _tell(f"gradleak: {reason}")
        raise typer.Exit(1)


@app.command()
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
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; the same one goes on.")] = None,
) -> None:
    """Train a model with simulated clients (FedAvg), and keep checkpoints for `gradleak audit --from`.

    Without any argument: LeNet on real handwritten digits, 20 rounds, on a CPU in less than a minute.
    """
    from gradleak import registry
    from gradleak.cli import loading
    from gradleak.cli.progress import shown
    from gradleak.cli.tasks import usual
    from gradleak.cli.training import TrainingRequest
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
    _tell(f"{planned.estimate(folder)}\nInto {folder}. Ctrl-C is safe: the same command goes on.")
    with shown() as progress:
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


@app.command()
def analyse(
    context: typer.Context,
    reference: Annotated[
        str,
        typer.Argument(
            metavar="[FILE.py:NAME]", help="A Task or a model's name; nothing: that of --from, or LeNet on digits."
        ),
    ] = "",
    data: DataName = "",
    trained: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Analyse the checkpoints of this `gradleak train`.")
    ] = None,
    rounds: Annotated[str, typer.Option(help="Rounds to analyse, of those that were kept: 0,50; default: all.")] = "",
    audits: Annotated[
        list[Path] | None, typer.Option("--audit", metavar="DIR", help="An audit of the same training: its PSNR.")
    ] = None,
    examples: Annotated[int, typer.Option(min=2, help="Examples at which curvature is measured.")] = 100,
    probes: Annotated[int, typer.Option(min=2, help="Random vectors.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Lanczos steps of each; they double where too few.")] = 100,
    most_steps: Annotated[int, typer.Option(min=1, help="Up to so many.")] = 400,
    damping: Annotated[float, typer.Option(help="Of the log-determinant, in squared units of curvature.")] = 1e-3,
    gauss_newton: Annotated[
        bool, typer.Option("--gauss-newton", help="Measure the Gauss-Newton (Fisher) matrix too.")
    ] = False,
    information: Annotated[
        bool, typer.Option("--information", help="Channel bound, sharpness and the test of covariance = H / B too.")
    ] = False,
    defence: Annotated[
        str, typer.Option("--defence", "-d", help="With --information: of the clients (gradleak list defences).")
    ] = "none",
    rho: Annotated[float, typer.Option(help="With --information: radius of the ball of sharpness.")] = 0.2,
    releases: Annotated[int, typer.Option(min=2, help="With --information: releases of the channel bound.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the examples and of the random vectors.")] = 0,
    device: Device = "auto",
    one_by_one: OneByOne = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; the same one resumes.")] = None,
) -> None:
    """Measure curvature at any checkpoint, and hold it against the PSNR of an audit, on one page.

    Without any argument: the built-in LeNet on real handwritten digits, untrained, on a CPU in about half a minute.
    """
    from gradleak.cli import loading
    from gradleak.cli.analysing import StudyRequest
    from gradleak.cli.progress import shown
    from gradleak.study import Lanczos, estimate

    request = StudyRequest(
        reference=reference,
        data=data,
        trained=trained,
        rounds=rounds,
        audits=tuple(audits or ()),
        examples=examples,
        lanczos=Lanczos(probes, steps, max(steps, most_steps), damping, seed),
        gauss_newton=gauss_newton,
        information=information,
        defence=defence,
        rho=rho,
        releases=releases,
        engine=loading.engine(device, "double", one_by_one),
    )
    context.find_root().obj = "Interrupted before the first round; nothing was written."
    loading.leave_room()
    planned = request.study()
    folder = out or request.folder
    _tell(f"{estimate(planned, folder)}\nInto {folder}. Ctrl-C is safe: the same command resumes.")
    with shown() as progress:
        result = request.run(planned, out, progress)
    typer.echo(result.table())
    typer.echo(f"\nFigures: {result.folder}/analysis.json   Page: {result.folder}/analysis.html")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The HTML file; default: report.html in the folder.")
    ] = None,
) -> None:
    """Write a run's report again. Runs no attack."""
    from gradleak.results import AuditResult

    typer.echo(AuditResult.load(run).report(out or run / "report.html"))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of another.")],
) -> None:
    """What changed from one run to another, line by line."""
    from gradleak.results import AuditResult

    typer.echo(str(AuditResult.load(first).compare(AuditResult.load(second))))


@app.command()
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
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures and tensors.")] = Path(
        "runs/attack"
    ),
) -> None:
    """Attack updates recorded anywhere. Needs no private data, so it tells how well it fitted, not how close it is."""
    from gradleak import registry
    from gradleak.checks import observation_checks
    from gradleak.cli import loading
    from gradleak.cli.progress import shown
    from gradleak.observation import Track
    from gradleak.report import reconstruction

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
    with shown() as progress:
        progress.start(1)
        progress.cell(f"{attack} on {loading.counted(len(targets), 'target')}", 0)
        found = method.run(model, targets, knows, seed=seed, engine=engine, progress=progress.share)
    typer.echo(reconstruction.describe(found))
    for path in reconstruction.write(found, out):
        typer.echo(f"wrote {path}")


@app.command()
def check(
    reference: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="A Task; FILE.py alone means FILE.py:task.")],
    data: Annotated[str, typer.Option(help="Check these too: images by name, an .npz, a folder or FILE.py:NAME.")] = "",
) -> None:
    """Can this model be attacked as it stands? Every problem at once, each with a fix; exit code 1 on errors."""
    from gradleak.cli import loading

    task = loading.task(reference)
    problems = task.check(loading.a_few(task, data) if data else None)
    for problem in problems:
        typer.echo(f"{problem.severity:8}{problem.what}\n{'':8}-> {problem.fix}")
    errors = sum(problem.severity == "error" for problem in problems)
    found = f"{loading.counted(len(problems), 'finding')}, {loading.counted(errors, 'error')}"
    typer.echo(f"{reference}: {found if problems else 'no problems found'}.")
    if errors:
        raise typer.Exit(1)


@app.command(name="list")
def list_methods(
    kind: Annotated[
        str,
        typer.Argument(
            help="attacks, defences, models, tasks, labels, partitions, participation, averaging or data; nothing: all."
        ),
    ] = "",
    pattern: Annotated[str, typer.Argument(help="Only names that match, such as 'ig*'.")] = "*",
) -> None:
    """What there is by name: its paper, whether its figures were checked, its settings."""
    from gradleak import registry
    from gradleak.cli import loading

    if not kind:
        for plural, singular in loading.KINDS.items():
            typer.echo(f"{plural + ':':15}{', '.join(entry.name for entry in registry.entries(singular)) or 'none'}")
        typer.echo("\nMore about each: gradleak list attacks, gradleak list defences, ...; images: gradleak list data")
        return
    if kind == "data":
        data_list(pattern)
        return
    found = [entry for entry in registry.entries(loading.kind(kind)) if fnmatch.fnmatch(entry.name, pattern)]
    for entry in found:
        settings = ", ".join(f"{name}={value!r}" for name, value in entry.settings.items() if name != "generator")
        typer.echo(f"{entry.name}  [{entry.status}]" if entry.status else entry.name)
        told = [entry.summary, entry.paper, settings]
        if entry.kind == "defence" and not entry.required:
            place, proved = loading.about(entry.make())
            told += [f"sits in: {place}", f"with these settings, in one round: {proved}"]
        for line in filter(None, told):
            typer.echo(f"    {line}")
    if not found:
        typer.echo(f"No {kind} {f'match {pattern!r}' if pattern != '*' else 'are registered'}.")


@data_app.command("list")
def data_list(pattern: Annotated[str, typer.Argument(help="Only names that match.")] = "*") -> None:
    """Every name that --data takes, whether it is on this machine and, if not, what to do."""
    from gradleak.data import available

    for entry in available():
        if fnmatch.fnmatch(entry.name, pattern):
            typer.echo(f"{entry.name}  [{'present' if entry.present else 'absent'}]")
            advice = f"to have it: {entry.advice}" if entry.advice else ""
            for line in filter(None, (entry.description, f"terms: {entry.licence}", advice)):
                typer.echo(f"    {line}")


@data_app.command("get")
def data_get(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="cifar10 or mnist.")],
    into: Annotated[Path | None, typer.Option(help="Folder to keep it in; default: the cache folder.")] = None,
) -> None:
    """Fetch a full public data set once, checked by SHA-256; running it again resumes or does nothing."""
    from gradleak.cli.progress import shown
    from gradleak.data import get

    context.find_root().obj = f"Interrupted; what has arrived is kept. Go on with: gradleak data get {name}"
    with shown() as progress:
        progress.start(1)
        progress.cell(f"fetching {name}", 0)
        path = get(name, into, lambda have, size: progress.share(have / size))
    typer.echo(f"{name} is at {path}")


@bench_app.callback()
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        bench_engine()


@bench_app.command("engine")
def bench_engine(
    networks: Annotated[str, typer.Option(help="lenet,convnet64,resnet18")] = "lenet,convnet64,resnet18",
    lanes: Annotated[
        str, typer.Option(help="Reconstructions solved together, one measurement for each.")
    ] = "1,32,128,512",
    precision: Annotated[str, typer.Option(help="fast, strict, double")] = "fast,strict",
    seconds: Annotated[float, typer.Option(help="How long to measure each.")] = 2.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the rows as JSON.")] = None,
) -> None:
    """Images x iterations per second of gradient matching, over networks, lanes and precision."""
    from gradleak import bench
    from gradleak.cli import loading

    bench.engine(
        loading.names(networks, bench.NETWORKS, "network"),
        loading.numbers(lanes, "--lanes"),
        loading.names(precision, ("fast", "strict", "double"), "precision"),
        out,
        seconds,
        show=lambda row: typer.echo(loading.measured(row)),
    )


def main() -> None:
    """The entry point. What the commands let through is a defect of gradleak, and must not look like a leak in CI."""
    try:
        app()
    except Exception:
        traceback.print_exc()
        _tell("gradleak: this is a defect of gradleak, not of your model. Please report it with the lines above.")
        sys.exit(DEFECT)
