"""What attacks recovered at the checkpoints: PSNR over rounds, read from the folder of an audit.

Only the scores are read, which the audit computed with the truth. No attack is run here, and no image is opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gradleak.audit.result import AuditResult, Summary
from gradleak.audit.rows import FORMS
from gradleak.audit.ruling import CONVERGED
from gradleak.audit.summary import SMALL
from gradleak.core.configuration import digest
from gradleak.federation.checkpoints import Checkpoints
from gradleak.federation.partition import FederationError
from gradleak.scenario.task import Task


class OtherAudit(ValueError):
    """An audit that attacked other weights than those of the study."""


@dataclass(frozen=True)
class Leakage:
    """One attack against one defence, by one kind of attacker: a point for every round that was attacked.

    psnr       mean over targets; each target is a mean over its seeds and examples
    error      standard error over targets; None for one target
    targets    number of scored targets
    baseline   mean PSNR of the same attack on an unrelated update; None where there was none
    converged  share of targets on which the attack converged: below 80 % its failure says nothing
    audit      the folder's name
    """

    attack: str
    defence: str
    form: str
    examples: int
    audit: str
    rounds: tuple[int, ...]
    psnr: tuple[float, ...]
    error: tuple[float | None, ...]
    targets: tuple[int, ...]
    baseline: tuple[float | None, ...]
    converged: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What audits of the same kind share."""
        return (self.attack, self.defence, self.form, self.examples)

    @property
    def name(self) -> str:
        """`ig against fedsam, adaptive, B = 1`."""
        against = "undefended" if self.form == FORMS[0] else f"against {self.defence}, {self.form}"
        return f"{self.attack} {against}, B = {self.examples}"

    @property
    def small(self) -> bool:
        return min(self.targets) < SMALL

    @property
    def doubtful(self) -> tuple[int, ...]:
        """Rounds at which the attack converged on fewer than 80 % of the targets: its PSNR is only a lower bound."""
        return tuple(n for n, share in zip(self.rounds, self.converged, strict=True) if share < CONVERGED)

    def at(self, number: int) -> float | None:
        return self.psnr[self.rounds.index(number)] if number in self.rounds else None

    def record(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self), "doubtful": list(self.doubtful)}


def distinct_names(every: Sequence[Leakage]) -> list[str]:
    """Their names, with the name of the audit if there are several audits."""
    several = len({one.audit for one in every}) > 1
    return [f"{one.name} ({one.audit})" if several else one.name for one in every]


def once(folders: Sequence[str | Path]) -> list[str | Path]:
    """Each folder once, however its path is written: the same scores are no second curve."""
    unique: dict[Path, str | Path] = {}
    for each in folders:
        unique.setdefault(Path(each).resolve(), each)
    return list(unique.values())


def read(audits: Sequence[AuditResult]) -> list[Leakage]:
    """The curves of several audits. Folders with the same name are distinguished by their paths."""
    names = [audit.folder.name for audit in audits if audit.folder is not None]
    curves = []
    for audit in audits:
        twice = audit.folder is not None and names.count(audit.folder.name) > 1
        new = leakages(audit)
        curves += [replace(one, audit=str(audit.folder)) for one in new] if twice else new
    return curves


def leakages(audit: AuditResult) -> list[Leakage]:
    """A curve for every attack, defence, attacker and batch size. Cells that failed leave a gap."""
    curves: dict[tuple[str, str, str, int], list[Summary]] = {}
    for line in audit.summaries:
        if line.targets and math.isfinite(line.means.get("psnr", math.nan)):
            curves.setdefault((line.attack, line.defence, line.form, line.examples), []).append(line)
    return [_curve(audit, sorted(lines, key=lambda line: line.round)) for lines in curves.values()]


def _curve(audit: AuditResult, lines: Sequence[Summary]) -> Leakage:
    targets = [_targets(audit, line) for line in lines]
    first = lines[0]
    return Leakage(
        first.attack,
        first.defence,
        first.form,
        first.examples,
        "" if audit.folder is None else audit.folder.name,
        tuple(line.round for line in lines),
        tuple(fmean(values) for values in targets),
        tuple(stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None for values in targets),
        tuple(map(len, targets)),
        tuple(line.baseline.get("psnr") for line in lines),
        tuple(line.converged for line in lines),
    )


def _targets(audit: AuditResult, line: Summary) -> list[float]:
    """The mean PSNR of each target."""
    scores: dict[int, list[float]] = {}
    for row in audit.rows:
        if row["cell"] in line.cells and row["status"] == "done":
            scores.setdefault(row["target"], []).extend(v for v in row["scores"]["psnr"] if v is not None)
    return [fmean(values) for values in scores.values() if values]


def opened(folder: str | Path, task: Task, trained: Checkpoints | None) -> AuditResult:
    """The audit in a folder, if it attacked these very weights."""
    audit = AuditResult.load(folder)
    fingerprint = audit.settings.get("fingerprint", {})
    if trained is None:
        if "trained" in fingerprint:
            raise OtherAudit(f"{folder} attacked the checkpoints of a training: say which with --from, or trained=.")
        if fingerprint.get("task") != digest(task):
            raise OtherAudit(f"{folder} attacked another task: its PSNR says nothing about this one.")
        return audit
    if "trained" not in fingerprint:
        raise OtherAudit(
            f"{folder} attacked weights of its own, not those of {trained.folder}. Attack these: "
            f"gradleak audit --from {trained.folder}."
        )
    rounds = sorted({0, *map(int, audit.settings.get("rounds", ()))})
    try:
        same = trained.fingerprint(rounds) == fingerprint["trained"]
    except FederationError:  # a round that this training does not have
        same = False
    if not same:
        raise OtherAudit(
            f"{folder} attacked other weights than those of {trained.folder}: another task or another training. "
            f"Attack these: gradleak audit --from {trained.folder}."
        )
    return audit


def caveats(audit: AuditResult) -> Iterator[str]:
    """Reasons not to rely on the figures of an audit."""
    name = audit.folder or "The audit"
    if audit.trial:
        yield f"{name} is a quick run: its PSNR means nothing."
    if not audit.complete:
        yield f"{name} is incomplete: rounds may be missing."
    if not audit.positive_control.passed:
        yield f"{name}: the positive control failed, so that its attacks show nothing."
    if audit.failed:
        count = len({row["cell"] for row in audit.failed})
        yield f"{name}: {count} cell{'s' * (count != 1)} failed and left gaps."


def unsettled(every: Sequence[Leakage]) -> Iterator[str]:
    """Attacks that did not converge, and where: their low PSNR says little."""
    for one, name in zip(every, distinct_names(every), strict=True):
        if one.doubtful:
            rounds = f"round{'s' * (len(one.doubtful) > 1)} {', '.join(map(str, one.doubtful))}"
            yield (
                f"{name}: converged on fewer than {CONVERGED:.0%} of its targets at {rounds}, where a low PSNR may be "
                "the attack's failure; correlations count these rounds."
            )
