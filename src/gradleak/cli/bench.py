"""`gradleak bench`: speed on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(invoke_without_command=True, help="Measure speed on this machine; alone: the engine.")


@app.callback()
def alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        engine()


@app.command("engine")
def engine(
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
