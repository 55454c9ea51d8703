"""The study: curvature and information at the checkpoints of a training, beside what attacks recovered there.

    study = Study(task, images, trained=Checkpoints("runs/lenet"))
    result = study.run("runs/lenet-analysis", audits=["runs/audit-lenet"])
    print(result.table())

Flat minima are said to leak less. This measures the curves behind the claim, with the error of every estimate, and
correlates them with the PSNR of an audit, by ranks and given gradient norm and round. It runs no attack; it reads an
audit's scores, not its images.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gradleak import __version__
from gradleak.audit.private import Read, Stored, examples_of
from gradleak.core import tree
from gradleak.core.configuration import digest, from_toml, to_toml
from gradleak.core.durations import Estimate, about
from gradleak.core.environment import describe
from gradleak.core.folder import FolderInUse, Interrupted, made_by_another_version
from gradleak.core.listeners import Progress, Silent
from gradleak.core.random import Draws, key
from gradleak.curvature.folder import StudyFolder, rows_in
from gradleak.curvature.hessian import ggn
from gradleak.curvature.lanczos import Lanczos, signs
from gradleak.curvature.leakage import Leakage, OtherAudit, leakages, once, opened
from gradleak.curvature.measure import VERSION, Information, Measurement, Row, fingerprint
from gradleak.curvature.result import Associated, Curve, StudyResult, associated
from gradleak.engine import Engine, EngineError
from gradleak.federation import Snapshot
from gradleak.federation.checkpoints import Checkpoints
from gradleak.scenario.defence import Defence, overrides
from gradleak.scenario.task import Batch, Task, TaskError

__all__ = ["Associated", "Curve", "Information", "Lanczos", "Leakage", "OtherAudit", "Study", "StudyError"]
__all__ += ["StudyResult", "associated", "estimate", "leakages"]

EXAMPLES = 100


class StudyError(ValueError):
    """A study that cannot be run as it was configured."""


@dataclass(frozen=True, eq=False)
class Study:
    """What is measured, and where.

    data          as an audit takes them: Images, tensors {"x", "y"}, (x, y), or a Dataset of (x, y)
    trained       checkpoints of a training of this task on these data; None: the task's own weights, as round 0
    rounds        of those that were kept; empty: all
    examples      number of examples for curvature, drawn once by the seed and the same in all rounds; all examples, if
                  there are fewer
    lanczos       how eigenvalues are computed, and the damping of the log det
    gauss_newton  measure the Gauss-Newton matrix too: positive, and the Fisher matrix where the loss is cross-entropy
    information   channel bound, sharpness, the published index, the test of Sigma_G = H / B; None: none of it
    origin        where the command line found task and data, for analysis.toml
    """

    task: Task
    data: Any
    trained: Checkpoints | None = None
    rounds: Sequence[int] = ()
    examples: int = EXAMPLES
    lanczos: Lanczos = Lanczos()
    gauss_newton: bool = False
    information: Information | None = None
    engine: Engine = Engine()
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.examples < 2:
            raise StudyError(f"examples must be at least 2; given {self.examples}.")
        if odd := [number for number in self.rounds if type(number) is not int or number < 0]:
            raise StudyError(f"rounds must be whole numbers from 0; given {odd[0]!r}.")

    # --- the plan ----------------------------------------------------------------------------------------------------

    @cached_property
    def planned(self) -> tuple[int, ...]:
        """The rounds to measure, in order; each has a checkpoint."""
        if self.trained is None:
            if set(self.rounds) - {0}:
                later = sorted(set(self.rounds) - {0})
                raise StudyError(
                    f"Without a training there is only round 0, the task's own weights; given {later[0]}. Name "
                    "the folder of a training: --from, or trained=Checkpoints(folder)."
                )
            return (0,)
        stored = self.trained.rounds
        if not stored:
            raise StudyError(f"{self.trained.folder} holds no checkpoints. Train with `gradleak train --checkpoints`.")
        for number in self.rounds:
            if number not in stored:
                self.trained.at(number)  # its error lists the rounds there are
        return tuple(sorted(set(self.rounds))) or tuple(stored)

    def sent(self, number: int) -> Snapshot:
        """What the server sends at a round."""
        if self.trained is None:
            return Snapshot(tree.detach(self.task.weights()), tree.detach(self.task.buffers()))
        return self.trained.at(number)

    @cached_property
    def held(self) -> Stored | Read:
        return examples_of(self.data, self.task)

    @cached_property
    def measured(self) -> Measurement:
        """Everything but the weights."""
        rows = torch.randperm(len(self.held), generator=torch.Generator().manual_seed(self.lanczos.seed))
        if len(rows) < 2:
            raise StudyError(f"The data hold {len(rows)} example: curvature of a mean needs two or more.")
        information = self.information
        return Measurement(
            self.task,
            self._batch(rows[: self.examples]),
            self.lanczos,
            self.gauss_newton,
            information,
            None if information is None else self._batch(rows[: information.releases]),
            self.engine,
        )

    def _batch(self, rows: torch.Tensor) -> Batch:
        stored = self.held.batch(rows)
        batch = {name: stored[name] for name in self.task.fields if name in stored}
        # Fields that clients of a diffusion model draw themselves are drawn once here, and are the same in all rounds.
        return self.task.completed(batch, Draws(key("study", self.lanczos.seed)))

    def settings(self) -> dict[str, Any]:
        """The content of analysis.toml."""
        information = self.information
        settings = {
            "version": VERSION,
            "gradleak": __version__,
            "examples": self.examples,
            "gauss_newton": self.gauss_newton,
            "lanczos": asdict(self.lanczos),
            "information": None
            if information is None
            else {
                "defence": "none" if information.defence is None else repr(information.defence),
                "rho": information.rho,
                "releases": information.releases,
            },
            "origin": {
                **self.origin,
                **({} if self.trained is None else {"trained_with": str(self.trained.settings.get("defence", "none"))}),
            },
            "plan": {"rounds": list(self.planned)},
            "engine": {"device": self.engine.device, "batched": self.engine.batched},
            "fingerprint": {
                "task": digest(self.task),
                "data": self.held.fingerprint,
                "defence": digest(None if information is None else information.defence),
            },
        }
        settings = {name: value for name, value in settings.items() if value is not None}
        return from_toml(to_toml(settings))  # so that it compares equal to what is read back

    def check(self) -> None:
        """Raise StudyError for a request that cannot be measured, before anything is."""
        if self.trained is not None:
            stored = self.trained.settings.get("fingerprint", {})
            for name, current in (("task", digest(self.task)), ("data", self.held.fingerprint)):
                if stored.get(name) != current:
                    raise StudyError(
                        f"{self.trained.folder} is a training of another {name}: analyse what was trained there."
                        f"{made_by_another_version(self.trained.settings)}"
                    )
        if self.information is not None:
            if not self.engine.batched:
                raise StudyError(
                    "What clients release is computed under vmap: leave --information or --one-by-one out."
                )
            if self.trained is not None and self.information.defence is not None:
                demand_trained_with(self.trained, self.information.defence)
            self._try_releases()
        if self.gauss_newton:
            try:
                ggn(self.task, self.task.weights(), self.measured.batch, engine=self.engine)
            except TaskError as problem:
                raise StudyError(f"This task has no Gauss-Newton matrix. {problem}") from problem

    def _try_releases(self) -> None:
        """Try two clients at the first round: an error should not come after hours of curvature."""
        number = self.planned[0]
        try:
            self.measured.channel(number, self.sent(number), clients=2)
        except EngineError as problem:
            raise StudyError(
                f"What clients release cannot be measured. {problem} Or leave --information out."
            ) from problem
        except ValueError as problem:
            if "more than 1 value per channel" not in str(problem):
                return  # only these weights fail, such as diverged ones: reported with their round
            raise StudyError(
                "A client with one example cannot train this model: BatchNorm in training mode takes its statistics "
                "from the examples of a batch, and here one example leaves one value per channel. Put the model into "
                "evaluation mode before the task is made, or leave --information out."
            ) from problem

    # --- running -----------------------------------------------------------------------------------------------------

    def run(
        self,
        out: str | Path | None = None,
        *,
        audits: Sequence[str | Path] = (),
        progress: Progress | None = None,
    ) -> StudyResult:
        """Measure every round that `out` does not hold yet, and write analysis.json and analysis.html.

        `audits`: folders of audits of the same weights, whose PSNR is correlated with the curves.
        """
        progress, folder = progress or Silent(), None if out is None else Path(out)
        rounds = self.planned
        self.check()
        results = [opened(each, self.task, self.trained) for each in once(audits)]
        settings, environment = self.settings(), describe()
        keeper = None if folder is None else StudyFolder(folder)
        rows: list[Row] = []
        if keeper is not None:
            rows, environment = keeper.open(settings, environment)
        try:
            self._loop(rounds, rows, keeper, progress)
            result = StudyResult.of(rows, settings, environment, folder, results)
            if keeper is not None and folder is not None:
                keeper.write("analysis.json", result.json())
                result.report(folder / "analysis.html")
        except KeyboardInterrupt:
            saved = f"{len({row['round'] for row in rows} & set(rounds))} of {len(rounds)} rounds are kept in {folder}"
            message = f"{saved}; the same command resumes" if folder else "nothing is kept without a folder"
            raise Interrupted(f"Interrupted: {message}.") from None
        finally:
            if keeper is not None:
                keeper.close()
        return result

    def _loop(self, rounds: Sequence[int], rows: list[Row], keeper: StudyFolder | None, progress: Progress) -> None:
        """Appends the measured rounds to `rows`."""
        stored = {row["round"]: row for row in rows}
        progress.start(1)
        progress.cell(f"analysing {len(rounds)} round{'s' * (len(rounds) != 1)}", 0)
        if len(self.held) < self.examples:
            progress.note(f"The data hold {len(self.held)} examples: curvature is measured on all of them.")
        for done, number in enumerate(rounds):
            sent = self.sent(number)
            if number in stored:
                if stored[number]["weights"] != fingerprint(sent):
                    raise FolderInUse(
                        f"{keeper.path if keeper else 'The study'} has measured other weights at round {number}: the "
                        "training was repeated. Choose another folder."
                    )
                progress.note(f"round {number}: kept from before")
            else:
                began = time.perf_counter()
                row = self._row(number, sent)
                if keeper is not None:
                    keeper.add(row)
                rows.append(row)
                progress.note(f"{format_row(row)}, in {time.perf_counter() - began:.1f} s")
            progress.share((done + 1) / len(rounds))

    def _row(self, number: int, sent: Snapshot) -> Row:
        try:
            return self.measured.at(number, sent)
        except ValueError as problem:  # TaskError too: a training that diverged has no curvature
            raise StudyError(
                f"Round {number} cannot be measured. {problem} To leave it out, name the others with --rounds."
            ) from problem


def demand_trained_with(trained: Checkpoints, defence: Defence) -> None:
    """Refuse a defence that steers a training from the server if the checkpoints were trained without it.

    As in an audit: the server's memory is stored with the weights, and another defence cannot use it.
    """
    steers = any(overrides(defence, hook) for hook in ("initial", "advance"))
    if steers and trained.settings.get("fingerprint", {}).get("defence") != digest(defence):
        used = str(trained.settings.get("defence", "none"))
        raise StudyError(
            f"{defence!r} changes the weights before training, or what the server sends along in a round, and "
            f"{trained.folder} was trained with {'no defence' if used == 'none' else used}: analyse a training with "
            "the same one, or leave the defence out."
        )


def format_row(row: Row) -> str:
    """One round in a line."""
    figures = row["curvature"]
    log_det = figures["log_determinant"]
    return (
        f"round {row['round']}: log det {log_det['value']:.1f} +- {log_det['error']:.1f}"
        f"{'' if log_det['converged'] else ' (NOT converged)'}, lambda_max {figures['extremes']['highest']:.4g}, trace "
        f"{figures['trace']['value']:.4g}, gradient norm {figures['gradient_norm']:.4g}"
    )


def estimate(study: Study, out: str | Path | None = None) -> Estimate:
    """Of the rounds that `out` does not hold yet. What information asks for comes on top, and is little beside it."""
    measured_rounds = {row["round"] for row in rows_in(Path(out))} if out is not None else set()
    remaining = [number for number in study.planned if number not in measured_rounds]
    measured, how = study.measured, study.lanczos
    size, examples = tree.size(study.task.weights()), tree.length(measured.batch)
    counts = {"rounds": len(remaining), "weights": size, "examples": examples}
    if not remaining:
        return Estimate("Every round has been measured before.", 0.0, counts)
    operator = measured.operator(study.sent(remaining[0]))
    vectors = signs(operator, how.probes, how.seed)
    spent = 0.0
    for _ in range(2):  # the first one also prepares
        began = time.perf_counter()
        operator(vectors)
        if study.engine.where.type == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - began
    seconds = spent / how.probes * measured.products() * len(remaining)
    longest = seconds * how.most_steps / how.steps
    longer = "" if longest <= seconds else f" (up to {about(longest)} where steps have to double)"
    work = f"{len(remaining)} checkpoint{'s' * (len(remaining) != 1)} of {size:,} weights, {examples} examples"
    return Estimate(f"{work}: {about(seconds)}{longer} on {study.engine.where}, by timed products.", seconds, counts)
