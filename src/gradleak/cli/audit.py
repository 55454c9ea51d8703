"""`gradleak audit`: every attack against every defence, and what leaks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.formatting import sentence
from gradleak.cli.options import DataOptions, EngineOptions, Output, Recipe
from gradleak.cli.references import stem
from gradleak.cli.root import CROSSED, LoadError, log, on_interrupt, spare_a_core
from gradleak.core.registry import pieces
from gradleak.core.settings import Group, takes

if TYPE_CHECKING:
    from gradleak.audit import Audit
    from gradleak.audit.result import AuditResult


@dataclass(frozen=True)
class Cluster(Group):
    """The Ray cluster on which cells are attacked, if any."""

    ray: Annotated[
        str,
        typer.Option(metavar="auto|ADDRESS", help="Attack cells on a Ray cluster; auto: a running one, or a new one."),
    ] = ""
    ray_gpus: Annotated[
        float, typer.Option(min=0.0, metavar="SHARE", help="With --ray: GPUs for each cell, such as 0.5.")
    ] = 0.0

    @contextmanager
    def workers(self) -> Iterator[Any]:
        """The workers of the cluster, for as long as a run lasts; None: cells run in this process."""
        if not self.ray:
            if self.ray_gpus:
                raise LoadError("--ray-gpus says what a cell gets of a Ray cluster: give --ray auto or an address too.")
            yield None
            return
        from gradleak.ray import RayWorkers

        with RayWorkers(self.ray, gpus=self.ray_gpus) as workers:
            yield workers


@dataclass(frozen=True)
class AuditOptions:
    """The options of `gradleak audit`. None or empty: not stated, so the configuration or the default holds."""

    reference: Annotated[
        str,
        typer.Argument(
            metavar="[FILE.py:NAME]", help="A Task, an Audit or a model's name; nothing: the built-in audit."
        ),
    ] = ""
    config: Annotated[Path | None, typer.Option(help="A run.toml to repeat; other options change it.")] = None
    attack: Annotated[
        list[str] | None, typer.Option("--attack", "-a", help="Attacks: ig,dlg:steps=300 (gradleak list attacks).")
    ] = None
    defence: Annotated[
        list[str] | None,
        typer.Option("--defence", "-d", help="Defences: none,NAME:setting=value,'A + B' (gradleak list defences)."),
    ] = None
    trained: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Attack the checkpoints of this `gradleak train`.")
    ] = None
    generator: Annotated[
        Path | None,
        typer.Option(metavar="FILE.safetensors", help="For gias, gifd, ggl: a generator (gradleak prior train)."),
    ] = None
    observations: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Attack updates recorded there, such as by flower.Tap.")
    ] = None
    task: Annotated[
        str, typer.Option("--task", "-t", metavar="FILE.py:NAME", help="The Task, as an option: for --observations.")
    ] = ""
    truth: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --observations: the examples of clients whose data are yours."),
    ] = None
    rounds: Annotated[str, typer.Option(help="Rounds to attack: 0,50; default with --from: all checkpoints.")] = ""
    targets: Annotated[int | None, typer.Option(min=1, help="Updates attacked in each cell.")] = None
    seeds: Annotated[str, typer.Option(help="Seeds of the attacks' random starts: 0,1,2 or 0-2.")] = ""
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds of a client that are averaged against fresh noise; 1: never.")
    ] = None
    given: Annotated[
        str, typer.Option(help="Fields that the attacker knows: y; for clients of a denoiser t,noise.")
    ] = ""
    data: DataOptions = DataOptions()
    clients: Annotated[int | None, typer.Option(min=1, help="Clients that share the data.")] = None
    examples: Annotated[int | None, typer.Option(min=1, help="Examples of a client in a round.")] = None
    recipe: Recipe = Recipe()
    quick: Annotated[bool, typer.Option("--quick", help="Two steps on one target: does everything run?")] = False
    engine: EngineOptions = EngineOptions(device="", precision="")
    cluster: Cluster = Cluster()
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Repeat the audit without each capability that the attacker has.")
    ] = False
    fail_above: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, metavar="SHARE", help="Exit 1 where more than this share is recovered."),
    ] = None
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE.xml", help="Write a JUnit file too: one test case for each cell.")
    ] = None
    output: Output = Output()

    @property
    def model(self) -> str:
        """The task, audit or model, by either option; empty: the built-in one."""
        return self.reference or self.task

    @property
    def known_fields(self) -> tuple[str, ...]:
        """The fields that the attacker knows: `"t,noise"` -> `("t", "noise")`. An audit checks them."""
        return tuple(dict.fromkeys(pieces(self.given)))

    @property
    def folder(self) -> Path:
        """Folder of the run without --out: the same options find, and resume, the same run."""
        suffix = "-quick" if self.quick else ""
        if self.observations is not None:
            return Path("runs") / f"audit-{self.observations.resolve().name}"
        if self.config is not None:
            return self.config.parent if self.config.name == "run.toml" else Path("runs") / self.config.stem
        if self.trained is not None:
            return Path("runs") / f"audit-{self.trained.name}{suffix}"
        return Path("runs") / f"{stem(self.model)}{suffix}"


@takes(AuditOptions)
def audit(options: AuditOptions) -> None:
    """Attack a training set-up with every attack, against every defence, and say what leaks.

    Without any argument: the built-in audit on real images, on a CPU in about two minutes.
    """
    if options.reference and options.task:
        raise LoadError(f"{options.reference} and --task {options.task} both name the task: give one of them.")
    if options.junit is not None and not options.junit.absolute().parent.is_dir():
        raise LoadError(f"--junit {options.junit}: there is no folder {options.junit.parent} to write it into.")
    on_interrupt("Interrupted before the first cell; nothing was written.")
    spare_a_core()
    if options.observations is None:
        from gradleak.cli.planning import plan_audit

        planned = plan_audit(options)
    else:
        from gradleak.cli.recorded import RecordedRun

        recorded = RecordedRun.load(options)
        typer.echo("\n".join(recorded.heading()))
        if options.truth is None:
            _print_findings(recorded)
            return
        planned = recorded.audit()
    result = _run(planned, options)
    if options.ablate:
        _print_ablation(planned, result, options.output.plain)
    _print_result(result, options)


def _run(planned: Audit, options: AuditOptions) -> AuditResult:
    """Refuse what `gradleak check` refuses; else show the plan and its cost, and run it."""
    from gradleak.audit import estimate
    from gradleak.cli.progress import display
    from gradleak.report.terminal import plan

    folder = options.output.out or options.folder
    _ = planned.examined  # refuses what cannot be attacked, before anything is shown or written
    for line in plan(planned, folder, lambda: str(estimate(planned, out=folder))):
        log(line)
    with display(options.output.plain) as progress, options.cluster.workers() as workers:

        def run(folder: Path) -> AuditResult:
            return planned.run(folder, progress=progress, workers=workers)

        return options.output.run(options.folder, run, "run", progress)


def _print_ablation(planned: Audit, result: AuditResult, plain: bool) -> None:
    """Repeat the audit without each capability of the attacker, and print what that changes."""
    from gradleak.audit.assumptions import ablation
    from gradleak.cli.progress import display

    with display(plain) as progress:
        table = ablation(planned, result.folder, whole=result, progress=progress).table()
    typer.echo(f"What each capability of the attacker is worth:\n{table}\n")


def _print_findings(recorded: Any) -> None:
    """Attack recorded observations whose examples nobody knows, and print what was found."""
    from gradleak.audit.recorded import summary
    from gradleak.cli.progress import display

    output = recorded.options.output
    folder = output.out or recorded.options.folder
    with display(output.plain) as progress:
        findings = recorded.attack_without_truth(folder, progress)
    typer.echo(summary(findings))
    for name in dict.fromkeys(name for row in findings for name in row["files"]):
        typer.echo(f"wrote {folder / name}")


def _print_result(result: AuditResult, options: AuditOptions) -> None:
    """Print table, verdict and where the report is; exit 1 where a stated threshold is crossed."""
    from gradleak.report.terminal import fitted
    from gradleak.report.threshold import crossed

    folder = result.folder or Path()
    narrow = sys.stdout.isatty() and not options.output.plain
    reason = "" if options.fail_above is None else crossed(result, options.fail_above)
    typer.echo(fitted(result, shutil.get_terminal_size().columns if narrow else None))
    typer.echo(f"\n{result.verdict}")
    typer.echo(f"\nReport: {result.report(folder / 'report.html')}")
    result.write_verdict(folder / "verdict.json")
    if options.junit is not None:
        options.junit.write_text(result.junit(options.fail_above, reason), encoding="utf-8")
    if len(result.failed) == len(result.rows):
        first = sentence(result.failed[0]["error"])
        raise ValueError(f"every cell failed, the first with: {first} Where: see rows.jsonl.")
    if reason:
        log(f"gradleak: {reason}")
        raise typer.Exit(CROSSED)
