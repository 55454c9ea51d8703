"""`gradleak analyse`: curvature, and what it has to do with leakage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.options import DataName, Device, OneByOne, Plain
from gradleak.cli.root import tell


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
    plain: Plain = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; the same one resumes.")] = None,
) -> None:
    """Measure curvature at any checkpoint, and hold it against the PSNR of an audit, on one page.

    Without any argument: the built-in LeNet on real handwritten digits, untrained, on a CPU in about half a minute.
    """
    from gradleak.cli import loading
    from gradleak.cli.analysing import StudyRequest
    from gradleak.cli.progress import shown
    from gradleak.curvature.study import Lanczos, estimate

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
    tell(f"{estimate(planned, folder)}\nInto {folder}. Ctrl-C is safe: the same command resumes.")
    with shown(plain) as progress:
        result = request.run(planned, out, progress)
    typer.echo(result.table())
    typer.echo(f"\nFigures: {result.folder}/analysis.json   Page: {result.folder}/analysis.html")
