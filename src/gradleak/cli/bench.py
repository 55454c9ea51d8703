"""`gradleak bench`: speed on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(invoke_without_command=True, help="Measure speed on this machine; alone: everything there is.")

Networks = Annotated[str | None, typer.Option(help="lenet,convnet64,resnet18,vit,unet; not given: all of them.")]
Lanes = Annotated[
    str | None,
    typer.Option(help="Reconstructions solved together, one measurement for each. Not given: 1,8,32,128,512."),
]
Precision = Annotated[str | None, typer.Option(help="fast, strict, double; not given: fast,strict, on a CPU strict.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the rows as JSON.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@app.callback()
def everything(
    context: typer.Context,
    only: Annotated[
        str | None,
        typer.Option(help="Some of engine,roofline,memory,quality,cost,chunks,peer; not given: all of them."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="LeNet alone, and briefly: does it run?")] = False,
    networks: Networks = None,
    lanes: Lanes = None,
    precision: Precision = None,
    seconds: Annotated[float | None, typer.Option(help="How long to measure each.")] = None,
    device: Device = "auto",
    out: Out = None,
    against: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A stored result of this machine: exit code 1 where a ratio fell by more than 15 %.",
        ),
    ] = None,
) -> None:
    """Measure speed on this machine; alone: everything there is."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import replace

    from gradleak import bench
    from gradleak.cli import loading

    plan = bench.Plan.of(device, quick=quick)
    if networks is not None:
        chosen = tuple(loading.names(networks, bench.NETWORKS, "network"))
        classifiers = tuple(name for name in chosen if name != "unet")
        searched = tuple((name, "ig") for name in classifiers)
        plan = replace(plan, networks=chosen, searched=searched, peer_networks=classifiers)
    if lanes is not None:
        given = tuple(loading.numbers(lanes, "--lanes"))
        plan = replace(plan, lanes=given, peer_lanes=given)
    if precision is not None:
        plan = replace(plan, precisions=tuple(loading.names(precision, ("fast", "strict", "double"), "precision")))
    if seconds is not None:
        plan = replace(plan, seconds=seconds)
    sections = [] if only is None else loading.names(only, bench.SECTIONS, "section")
    stored = None if against is None else json.loads(against.read_text(encoding="utf-8"))
    held = bench.measure(plan, sections, out, lambda section, row: typer.echo(bench.told(section, row)))
    for section, why in held["left_out"].items():
        typer.echo(f"{section}: left out. {why}", err=True)
    if held["failed"]:
        raise loading.LoadError("; ".join(f"{section}: {why}" for section, why in held["failed"].items()))
    if stored is not None:
        _judged(held, stored, plan)


def _judged(held: dict[str, object], stored: dict[str, object], plan: object) -> None:
    from gradleak import bench
    from gradleak.cli.loading import LoadError

    assert isinstance(plan, bench.Plan)
    try:
        slower = bench.fallen(held, stored, plan)
    except bench.OtherMachine as problem:
        raise LoadError(str(problem)) from problem
    for one in slower:
        typer.echo(f"slower: {one}")
    count = bench.compared(held, stored)
    if not count:
        raise LoadError("The stored result shares no measurement with this run: choose the same networks and lanes.")
    typer.echo(f"{count} ratios compared, {len(slower)} fell by more than 15 % twice.")
    if slower:
        raise typer.Exit(1)


@app.command("engine")
def engine(
    networks: Networks = None,
    lanes: Lanes = None,
    precision: Precision = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each.")] = 2.0,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Images x iterations per second of gradient matching, over networks, lanes and precision."""
    from gradleak import bench
    from gradleak.cli import loading

    plan = bench.Plan.of(device)
    bench.engine(
        plan.networks if networks is None else loading.names(networks, bench.NETWORKS, "network"),
        plan.lanes if lanes is None else loading.numbers(lanes, "--lanes"),
        plan.precisions if precision is None else loading.names(precision, ("fast", "strict", "double"), "precision"),
        out,
        seconds,
        show=lambda row: typer.echo(loading.measured(row)),
        device=device,
    )
