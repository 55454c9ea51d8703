"""`gradleak audit`: every attack against every defence, and what leaks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradleak.cli.options import (
    BatchSize,
    DataName,
    Epochs,
    LearningRate,
    LocalSteps,
    OneByOne,
    OtherDevice,
    OtherPrecision,
    Plain,
)
from gradleak.cli.root import CROSSED, tell


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
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE.xml", help="Write a JUnit file too: one test case for each cell.")
    ] = None,
    plain: Plain = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run; the same one resumes.")] = None,
) -> None:
    """Attack a training set-up with every attack, against every defence, and say what leaks.

    Without any argument: the built-in audit on real images, on a CPU in about two minutes.
    """
    from gradleak.cli import loading
    from gradleak.cli.recorded import RecordedRequest
    from gradleak.cli.request import Request

    if reference and task:
        raise loading.LoadError(f"{reference} and --task {task} both name the task: give one of them.")
    if junit is not None and not junit.absolute().parent.is_dir():
        raise loading.LoadError(f"--junit {junit}: there is no folder {junit.parent} to write it into.")
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
            for option, value in {"--ray": ray or None, "--fail-above": fail_above, "--junit": junit}.items():
                if value is not None:
                    raise loading.LoadError(f"{option} needs scores, and so --truth: without it nothing is scored.")
            _blind(recorded, model, found, out, plain)
            return
        request: Any = recorded
        planned: Any = recorded.audit(model, found)
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
    result = _run(request, planned, out, plain, loading.workers(ray, ray_gpus))
    if ablate:
        _ablated(planned, result, plain)
    _told(result, fail_above, junit, plain)


def _run(request: Any, planned: Any, out: Path | None, plain: bool, workers: Any) -> Any:
    """Show what is going to be run and what that costs, and run it."""
    from gradleak.audit import estimate
    from gradleak.cli.progress import shown
    from gradleak.report.terminal import plan

    folder = out or request.folder
    for line in plan(planned, folder, lambda: str(estimate(planned, out=folder))):
        tell(line)
    with shown(plain) as progress, workers as cluster:
        return request.run(planned, out, progress, workers=cluster)


def _ablated(planned: Any, result: Any, plain: bool) -> None:
    """The same audit without each capability of the attacker, and what that changes."""
    from gradleak.audit.assumptions import ablation
    from gradleak.cli.progress import shown

    with shown(plain) as progress:
        found = ablation(planned, result.folder, whole=result, progress=progress)
    typer.echo(f"What each capability of the attacker is worth:\n{found.table()}\n")


def _only_for_made_updates(given: dict[str, Any]) -> None:
    from gradleak.cli.loading import LoadError

    for option, value in given.items():
        if value is not None:
            raise LoadError(f"{option} is for audits that make their own updates; --observations takes recorded ones.")


def _blind(request: Any, model: Any, found: Any, out: Path | None, plain: bool) -> None:
    """An audit of recorded observations without any truth."""
    from gradleak.audit.recorded import summary
    from gradleak.cli.progress import shown

    with shown(plain) as progress:
        findings, folder = request.blind(model, found, out, progress)
    typer.echo(summary(findings))
    for name in dict.fromkeys(name for row in findings for name in row["files"]):
        typer.echo(f"wrote {folder / name}")


def _told(result: Any, fail_above: float | None, junit: Path | None, plain: bool) -> None:
    """Print table, verdict and where the report is; exit 1 where a stated threshold is crossed."""
    from gradleak.cli import loading
    from gradleak.report.terminal import fitted
    from gradleak.report.threshold import crossed

    narrow = sys.stdout.isatty() and not plain
    reason = "" if fail_above is None else crossed(result, fail_above)
    typer.echo(fitted(result, shutil.get_terminal_size().columns if narrow else None))
    typer.echo(f"\n{result.verdict}")
    typer.echo(f"\nReport: {result.report((result.folder or Path()) / 'report.html')}")
    result.write_verdict((result.folder or Path()) / "verdict.json")
    if junit is not None:
        junit.write_text(result.junit(fail_above, reason), encoding="utf-8")
    if len(result.failed) == len(result.rows):
        first = loading.sentence(result.failed[0]["error"])
        raise ValueError(f"every cell failed, the first with: {first} Where: see rows.jsonl.")
    if reason:
        tell(f"gradleak: {reason}")
        raise typer.Exit(CROSSED)
