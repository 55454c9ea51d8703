"""`gradleak analyse`: curvature, and what it has to do with leakage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.options import DataName, Device, OneByOne, Output
from gradleak.cli.references import BUILTIN, stem
from gradleak.cli.root import LoadError, log, on_interrupt, spare_a_core
from gradleak.core.settings import Group, takes

if TYPE_CHECKING:
    from gradleak.curvature.study import Information, Lanczos, Study, StudyResult
    from gradleak.federation.checkpoints import Checkpoints


@dataclass(frozen=True)
class LanczosOptions(Group):
    """How spectra are estimated."""

    probes: Annotated[int, typer.Option(min=2, help="Number of random vectors.")] = 10
    steps: Annotated[int, typer.Option(min=1, help="Lanczos steps of each; doubled where they are too few.")] = 100
    most_steps: Annotated[int, typer.Option(min=1, help="Largest number of Lanczos steps.")] = 400
    damping: Annotated[float, typer.Option(help="Damping of the log-determinant, in squared units of curvature.")] = (
        1e-3
    )

    def lanczos(self, seed: int) -> Lanczos:
        from gradleak.curvature.study import Lanczos

        return Lanczos(self.probes, self.steps, max(self.steps, self.most_steps), self.damping, seed)


@dataclass(frozen=True)
class InformationOptions(Group):
    """What a release tells about the data; measured only with --information."""

    information: Annotated[
        bool, typer.Option("--information", help="Channel bound, sharpness and the test of covariance = H / B too.")
    ] = False
    defence: Annotated[
        str, typer.Option("--defence", "-d", help="With --information: the clients' defence (gradleak list defences).")
    ] = "none"
    rho: Annotated[float, typer.Option(help="With --information: radius of the ball of sharpness.")] = 0.2
    releases: Annotated[int, typer.Option(min=2, help="With --information: releases of the channel bound.")] = 512

    def build(self) -> Information | None:
        """The settings; None if --information is not given, which its settings need."""
        from gradleak.audit.cells import defence_of
        from gradleak.curvature.study import Information

        if self.information:
            return Information(defence_of(self.defence), self.rho, self.releases)
        if self.defence != "none":
            raise LoadError("--defence says what clients release, which only --information looks at: give both.")
        defaults = InformationOptions()
        for option, value, default in (
            ("--rho", self.rho, defaults.rho),
            ("--releases", self.releases, defaults.releases),
        ):
            if value != default:
                raise LoadError(f"{option} {value} is a setting of --information, which was not asked for: give both.")
        return None


@dataclass(frozen=True)
class AnalyseOptions:
    """The options of `gradleak analyse`."""

    reference: Annotated[
        str,
        typer.Argument(
            metavar="[FILE.py:NAME]", help="A Task or a model's name; nothing: that of --from, or LeNet on digits."
        ),
    ] = ""
    data: DataName = ""
    trained: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Analyse the checkpoints of this `gradleak train`.")
    ] = None
    rounds: Annotated[str, typer.Option(help="Rounds to analyse: 0,50; default: all checkpoints.")] = ""
    audits: Annotated[
        list[Path] | None,
        typer.Option("--audit", metavar="DIR", help="An audit of the same training, to compare with its PSNR."),
    ] = None
    examples: Annotated[int, typer.Option(min=2, help="Examples at which curvature is measured.")] = 100
    spectra: LanczosOptions = LanczosOptions()
    gauss_newton: Annotated[
        bool, typer.Option("--gauss-newton", help="Measure the Gauss-Newton (Fisher) matrix too.")
    ] = False
    release: InformationOptions = InformationOptions()
    seed: Annotated[int, typer.Option(help="Seed of the examples and of the random vectors.")] = 0
    device: Device = "auto"
    one_by_one: OneByOne = False
    output: Output = Output()

    @property
    def folder(self) -> Path:
        """Folder of the analysis without --out: the same options find, and resume, the same one."""
        name = self.trained.name if self.trained is not None else stem(self.reference)
        return Path("runs") / f"analysis-{name}"


def plan_study(options: AnalyseOptions) -> Study:
    """Load checkpoints, task and data, and check the options against them."""
    from gradleak.cli.loading import engine, numbers, task_for
    from gradleak.curvature.study import Study

    where = engine(options.device, "double", options.one_by_one)
    information = options.release.build()
    trained, origin, examples = _load_inputs(options)
    return Study(
        task_for(origin["task"], examples),
        examples,
        trained,
        () if options.rounds in ("", "all") else numbers(options.rounds, "--rounds"),
        options.examples,
        options.spectra.lanczos(options.seed),
        options.gauss_newton,
        information,
        where,
        origin,
    )


def _load_inputs(options: AnalyseOptions) -> tuple[Checkpoints | None, dict[str, Any], Any]:
    """The checkpoints, [origin] with where task and data are found, and the data."""
    from gradleak.cli.loading import BUILTIN_DATA, DATA_FORMS, images, training_data
    from gradleak.federation.checkpoints import Checkpoints

    if options.trained is None:
        if options.reference and not options.data:
            raise LoadError(
                f"Say on which images {options.reference} is analysed: {DATA_FORMS}; or name a training with --from."
            )
        origin = {"task": options.reference or BUILTIN, "data": options.data or BUILTIN_DATA}
        return None, origin, images(origin["data"])
    trained = Checkpoints(options.trained)
    stored: dict[str, Any] = trained.settings.get("origin") or {}
    if "data" in stored and options.data:
        raise LoadError(f"--from takes the data that {options.trained} was trained on: leave --data out.")
    reference, data = options.reference or stored.get("task", ""), stored.get("data") or options.data
    if not reference or not data:
        raise LoadError(
            f"{options.trained} does not say where its task and data are found: the training was started from Python. "
            "Name them: gradleak analyse FILE.py:task --data FILE.py:data --from ..."
        )
    examples = training_data(stored)[0] if "data" in stored else images(data)
    return trained, {**stored, "task": reference, "data": data, "trained": str(options.trained)}, examples


@takes(AnalyseOptions)
def analyse(options: AnalyseOptions) -> None:
    """Measure curvature at any checkpoint, and compare it with the PSNR of an audit, on one page.

    Without any argument: the built-in LeNet on real handwritten digits, untrained, on a CPU in about half a minute.
    """
    from gradleak.cli.progress import display
    from gradleak.curvature.study import estimate

    on_interrupt("Interrupted before the first round; nothing was written.")
    spare_a_core()
    study = plan_study(options)
    log(str(estimate(study, options.output.out or options.folder)))
    options.output.announce(options.folder)
    with display(options.output.plain) as progress:

        def run(folder: Path) -> StudyResult:
            return study.run(folder, audits=tuple(options.audits or ()), progress=progress)

        result = options.output.run(options.folder, run, "analysis", progress)
    typer.echo(result.table())
    typer.echo(f"\nFigures: {result.folder}/analysis.json   Page: {result.folder}/analysis.html")
