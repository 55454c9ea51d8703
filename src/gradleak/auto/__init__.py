"""The parameter-free standard: run every attack that applies, measure all by one residual, return the best per target.

traits.py       what a server can tell of an observation
members.py      the table: which attack applies when, and its budget
residual.py     the one measure, and how noise changes it
second_look.py  a second guess of what a defence noised
polish.py       second-order steps from the best candidate
tuning.py       settings chosen on the attacker's own clients
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradleak.attack import Attack, Reconstruction, require
from gradleak.attack.checks import Check, Checks, checks_of
from gradleak.auto.members import MEMBERS, POLISH, PRESETS, Member
from gradleak.auto.polish import polished
from gradleak.auto.residual import Residual, alike, residuals
from gradleak.auto.second_look import LOOKS, SOLVER, reconsidered_case
from gradleak.auto.traits import Case
from gradleak.auto.tuning import tuned
from gradleak.core.listeners import Share
from gradleak.core.registry import did_you_mean, named
from gradleak.engine import Engine, EngineError, memory_of
from gradleak.identify.certificates import Certificate, certify
from gradleak.parts.fields import RuleDoesNotApply
from gradleak.parts.protocols import Needs
from gradleak.scenario.defence import overrides
from gradleak.scenario.forms import AttackerForm
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Seen, as_targets
from gradleak.scenario.task import Batch, Task, TaskError

VERSION = "auto-2026.1"
CERTIFIED = {"quick": 1024, "standard": 4096, "thorough": 12_288}  # the most unknowns of a certified result
REFUSALS = (MissingKnowledge, TaskError, RuleDoesNotApply, EngineError)  # raised by a member that cannot attack this

__all__ = ["MEMBERS", "PRESETS", "VERSION", "Auto", "Case", "Ensemble", "Member", "OutOfTime"]


class OutOfTime(Exception):
    """The time limit `seconds` is over; raised inside a member's search."""


@dataclass(frozen=True, eq=False)
class Ensemble(Reconstruction):
    """The result of `auto`. `match` is the common residual; along `trace` it is that of the best so far.

    `by`: for each target the winner's reconstruction of it. The checks judge the winner's search.
    """

    by: tuple[Reconstruction, ...] = ()

    @property
    def checks(self) -> Checks:
        """The winners' checks, target by target: the common residual over several searches has no shape to judge."""
        checks: list[Check] = []
        converged: list[bool] = []
        for target, winner in enumerate(self.by):
            certificates = None if self.certificates is None else (self.certificates[target],)
            judged = checks_of(replace(winner, certificates=certificates))
            checks += [replace(check, target=target) for check in judged.found]
            converged += judged.converged
        order = ("error", "warning", "note")
        return Checks(tuple(sorted(checks, key=lambda check: order.index(check.severity))), tuple(converged))


@dataclass(frozen=True, eq=False)
class _Best:
    """The best candidate of one target so far. `knows`: the knowledge after a second look at this target."""

    batch: Batch
    residual: Residual
    member: str
    by: Reconstruction | None
    knows: Knowledge | None = None


@named("auto", kind="attack", paper=f"gradleak's own, version {VERSION}; after AutoAttack, Croce and Hein, ICML 2020")
@dataclass(frozen=True)
class Auto(Attack):
    """Run every attack that applies to this observation, and return for each target what explains the update best.

    Uses only the observation, the task and the knowledge. The table of members (`auto.MEMBERS`) says when each applies.
    Members run in its order with the settings of the preset, on the targets that no earlier one solved to rounding.
    Candidates are compared by one residual (`auto.residual`): the relative length of the part of the update that a
    replay through the known defence does not explain. `settings["tried"]` of the result lists what ran, with its
    settings, residual and time, and what was left out, and why.

    preset     quick (seconds for a LeNet on a CPU), standard, thorough (the papers' own budgets)
    tune       choose settings of some members on this many synthetic clients, made of `Knowledge.public` with the same
               recipe, defence and weights: data that the attacker owns. 0: the fixed settings
    seconds    stop after this time; the result of the member that is running is lost. Results depend on the machine
    steps      the most steps of every member: for trials
    certify    say for each target whether the update determines it, up to a size that grows with the preset
    """

    preset: str = "standard"
    tune: int = 0
    seconds: float | None = None
    steps: int | None = None
    certify: bool = True

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"preset cannot be {self.preset!r}.{did_you_mean(self.preset, PRESETS)}")
        for name, least in (("tune", 0), ("steps", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}; given {value}.")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be above 0; given {self.seconds}.")

    @property
    def name(self) -> str:
        return "auto"

    @property
    def needs(self) -> Needs:
        """Nothing: members that need more than is granted are left out. Only tuning needs public data."""
        return frozenset({"public"} if self.tune else ())

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        """It can attack what any of its members can."""
        first = ""
        for member in MEMBERS:
            reason = "" if member.attack == POLISH else member.make({}).refuses(task, given)
            if member.attack != POLISH and not reason:
                return ""
            first = first or reason
        return f"none of its members can; the first says: {first}"

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Share | None = None,
    ) -> Ensemble:
        require(self, knows)
        began = time.perf_counter()
        case = Case(task, tuple(as_targets(seen)), knows, engine or Engine())
        search = _Search(self, case, seed, began, progress)
        turns = turns_of(case, self.preset)
        for place, (member, form) in enumerate(turns):
            if member.attack == POLISH:
                search.look_again()
            search.attempt(member, form, (place, len(turns)))
        return search.result()


def turns_of(case: Case, preset: str) -> list[tuple[Member, AttackerForm]]:
    """Who runs, in order: all members with all that is known of the defence, then with less of it, then polish.

    An attacker who knows a defence may still match as if there were none (A0), or only weigh out what was noised or
    dropped (A1): the search may be easier. All results are measured by the same residual, through the defence.
    """
    most, *less = case.forms
    able = [member for member in MEMBERS if member.fits(case, preset)]
    last = [(member, most) for member in able if member.attack == POLISH]
    first = [(member, most) for member in able if member.attack != POLISH]
    return [*first, *((member, form) for form in less for member in able if preset in member.forms), *last]


@dataclass(eq=False)
class _Search:
    """One run through the table, with the best candidate of every target so far."""

    auto: Auto
    case: Case
    seed: int
    began: float
    progress: Share | None
    best: dict[int, _Best] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)  # residuals of the best so far, after each member that ran
    evaluations: int = 0
    tuned: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.curve.append([each.value for each in self._blank()])

    def _blank(self) -> list[Residual]:
        """The residuals of mid-grey images, the reference of every member. Fields that are read off are guessed."""
        blanks = [self.case.task.blank(target.num_examples) for target in self.case.targets]
        return residuals(self.case, self._every, blanks)

    def attempt(self, member: Member, form: AttackerForm, turn: tuple[int, int]) -> None:
        """Run one member, as an attacker of this form, on the targets that are not solved yet."""
        case = self.case
        rows = [row for row in self._every if row not in self.best or not self.best[row].residual.solved]
        entry: dict[str, Any] = {"member": member.name, "attack": member.attack, "form": form.value, "targets": rows}
        if self._left_out(entry):
            return
        began = time.perf_counter()
        try:
            settings = self._settings(member)
            entry |= {"settings": settings}
            parts = self._run(member, settings, rows, case.taking(form), self._share(*turn))
        except (*REFUSALS, OutOfTime) as reason:
            self._ended(entry, reason)
            return
        name = member.name if form is case.forms[0] else f"{member.name} ({form})"
        reached: dict[int, float] = {}
        for targets, result in parts:
            reached |= self._take(name, targets, result)
        seconds = round(time.perf_counter() - began, 3)
        values = [reached.get(row) for row in rows]
        self.tried.append({**entry, "outcome": "ran", "residual": values, "seconds": seconds})
        self._note()

    def look_again(self) -> None:
        """Where a defence guesses what it noised: let it guess again from the best candidate, and solve again.

        Another guess compares other coordinates, so residuals cannot be set against each other. A candidate therefore
        counts only where it is solved to rounding, which the first guess was not: a wrong one leaves noise to explain.
        """
        case, auto = self.case, self.auto
        [member] = [each for each in MEMBERS if each.name == SOLVER]
        known = case.knows.defence
        if known is None or not overrides(known, "reconsidered") or not member.fits(case, auto.preset):
            return
        rows = [
            row
            for row, best in self.best.items()
            if not best.residual.solved and len(case.targets[row].observations) == 1
        ]
        form = case.forms[0].value
        entry: dict[str, Any] = {"member": "second look", "attack": member.attack, "form": form, "targets": rows}
        if self._left_out(entry):
            return
        began, settings = time.perf_counter(), self._settings(member)
        try:
            reached = [self._second_look(row, member, settings) for row in rows]
        except (*REFUSALS, OutOfTime) as reason:  # earlier rows keep their results
            self._ended(entry, reason)
            return
        seconds = round(time.perf_counter() - began, 3)
        self.tried.append({**entry, "settings": settings, "outcome": "ran", "residual": reached, "seconds": seconds})
        self._note()

    def _second_look(self, row: int, member: Member, settings: Mapping[str, Any]) -> float:
        """Solve one target with better and better guesses of the noise, until one is exact; its last residual."""
        best, guess = self.best[row], self.best[row].batch
        for _ in range(LOOKS):
            case = reconsidered_case(self.case, row, guess, best.residual.order)
            result = member.make(settings).run(
                case.task, case.targets[0], case.knows, self.seed, engine=case.engine, progress=self._share(0, 1)
            )
            guess = result.target(0)
            [residual] = residuals(case, [0], [guess])
            self.evaluations += result.evaluations
            if residual.solved:
                self.best[row] = _Best(guess, residual, "second look", result, case.knows)
                break
        return residual.value

    def _left_out(self, entry: dict[str, Any]) -> bool:
        """Note that a turn is left out, if nothing is to be solved or the time is over."""
        if entry["targets"] and not self._over:
            return False
        why = f"the {self.auto.seconds} s are over" if entry["targets"] else "every target is solved to rounding"
        self.tried.append({**entry, "outcome": "left out", "why": why})
        return True

    def _ended(self, entry: dict[str, Any], reason: Exception) -> None:
        """Note that a turn ended without a result."""
        late = isinstance(reason, OutOfTime)
        why = f"the {self.auto.seconds} s were over" if late else str(reason)
        self.tried.append({**entry, "outcome": "stopped" if late else "refused", "why": why})

    def _note(self) -> None:
        """Add the residual of every target's best candidate to the curve."""
        self.curve.append(
            [self.best[row].residual.value if row in self.best else self.curve[-1][row] for row in self._every]
        )

    @property
    def _every(self) -> range:
        return range(len(self.case.targets))

    @property
    def _over(self) -> bool:
        return self.auto.seconds is not None and time.perf_counter() - self.began > self.auto.seconds

    def _settings(self, member: Member) -> dict[str, Any]:
        auto = self.auto
        chosen = dict(member.read(self.case))
        if auto.tune and member.tried:
            chosen |= self._tuned(member)
        return member.settings(auto.preset, auto.steps, **chosen)

    def _tuned(self, member: Member) -> Mapping[str, Any]:
        """The member's settings by its error on the proxies; computed once for all forms."""
        auto = self.auto
        if member.name not in self.tuned:
            self.tuned[member.name] = tuned(
                self.case, member, auto.preset, auto.tune, auto.steps, self.seed, self._share(0, 1)
            )
        return self.tuned[member.name]

    def _run(
        self, member: Member, settings: Mapping[str, Any], rows: list[int], case: Case, share: Share
    ) -> list[tuple[list[int], Reconstruction]]:
        """The reconstructions of these targets, in groups that share an order of the client's minibatches."""
        if member.attack != POLISH:
            attack = member.make(settings)
            require(attack, case.knows)
            targets, knows = [case.targets[row] for row in rows], case.about(rows)
            return [(rows, attack.run(case.task, targets, knows, self.seed, engine=case.engine, progress=share))]
        candidates = [(row, self.best[row].residual) for row in rows if row in self.best]
        ready = [row for row, residual in candidates if residual.value > residual.noise]
        if not ready:
            raise MissingKnowledge("there is nothing to polish: no candidate, or all of them at the level of the noise")
        groups: dict[str, list[int]] = {}
        for row in ready:
            groups.setdefault(repr(self.best[row].residual.order), []).append(row)
        return [
            (
                group,
                polished(
                    case,
                    group,
                    [self.best[row].batch for row in group],
                    self.best[group[0]].residual.order,
                    settings["steps"],
                    self.seed,
                    share,
                ),
            )
            for group in groups.values()
        ]

    def _share(self, place: int, places: int) -> Share:
        """A listener to the progress within one member; it also watches the clock."""

        def listen(share: float) -> None:
            if self._over:
                raise OutOfTime
            if self.progress is not None:
                self.progress(min(1.0, (place + share) / places))

        return listen

    def _take(self, name: str, rows: Sequence[int], result: Reconstruction) -> dict[int, float]:
        """Measure a member's result, and keep what is better than all before it."""
        batches = [result.target(place) for place in range(len(rows))]
        measured = residuals(self.case, rows, batches)
        self.evaluations += result.evaluations
        for place, (row, batch, residual) in enumerate(zip(rows, batches, measured, strict=True)):
            best = self.best.get(row)
            if best is None or residual.rank < best.residual.rank:
                self.best[row] = _Best(batch, residual, name, _of_target(result, place))
        return {row: residual.value for row, residual in zip(rows, measured, strict=True)}

    # --- the answer --------------------------------------------------------------------------------------------------

    def result(self) -> Ensemble:
        if missing := [row for row in self._every if row not in self.best]:
            reasons = "; ".join(f"{each['member']}: {each['why']}" for each in self.tried if "why" in each)
            raise MissingKnowledge(
                f"No attack could be run on {self.case.targets[missing[0]].key!r}. "
                f"{reasons or 'None of those that gradleak has applies to such a task.'}"
            )
        if self.progress is not None:
            self.progress(1.0)
        case = self.case
        best = [self.best[row] for row in self._every]
        best = [replace(each, batch=batch) for each, batch in zip(best, alike([b.batch for b in best]), strict=True)]
        batch = _stacked([each.batch for each in best])
        match = torch.tensor([[each.residual.value] for each in best], dtype=torch.float64)
        curve = torch.tensor(self.curve, dtype=torch.float64)[:, :, None]  # (points, targets, 1)
        return Ensemble(
            batch=batch,
            candidates={name: value[:, None].clone() for name, value in batch.items()},
            objective=match.clone(),
            match=match,
            chosen=torch.zeros(len(best), dtype=torch.long),
            diverged=torch.tensor([[each.by is not None and bool(each.by.diverged.all())] for each in best]),
            trace={"step": torch.arange(len(curve)), "objective": curve.clone(), "match": curve},
            fields=case.task.fields,
            keys=tuple(target.key for target in case.targets),
            examples=tuple(target.num_examples for target in case.targets),
            seconds=time.perf_counter() - self.began,
            evaluations=self.evaluations,
            settings={
                "attack": repr(self.auto),
                "version": VERSION,
                "seed": self.seed,
                "engine": repr(case.engine),
                "tried": self.tried,
                "winner": [each.member for each in best],
                **_spans(best),
            },
            certificates=self._certificates(best),
            noise=torch.tensor([[each.residual.noise] for each in best], dtype=torch.float64),
            snapshots=_snapshots(best, batch["x"].shape[1], case.engine.snapshots),
            by=tuple(each.by for each in best if each.by is not None),
        )

    def _certificates(self, best: Sequence[_Best]) -> tuple[Certificate, ...] | None:
        """What the update determines at the result; None where that is too much work, or no replay can follow."""
        case, auto = self.case, self.auto
        if (
            not auto.certify
            or case.text  # tokens are no numbers to be determined
            or self._over
            or not case.followed
            or case.unknowns > CERTIFIED[auto.preset]
            or 8 * case.unknowns * case.equations > 0.4 * memory_of(case.engine)
            or any(len(target.observations) > 1 for target in case.targets)
        ):
            return None
        return tuple(
            certify(
                case.task,
                target.last,
                each.batch,
                each.knows or case.about([row]),
                engine=case.engine,
                order=each.residual.order,
            )
            for row, (target, each) in enumerate(zip(case.targets, best, strict=True))
        )


def _of_target(result: Reconstruction, place: int) -> Reconstruction:
    """The part of a reconstruction that is about one target."""
    one = slice(place, place + 1)
    spans = {"spans": result.settings["spans"][one]} if "spans" in result.settings else {}
    return replace(
        result,
        batch={name: value[one] for name, value in result.batch.items()},
        candidates={name: value[one] for name, value in result.candidates.items()},
        objective=result.objective[one],
        match=result.match[one],
        chosen=result.chosen[one],
        diverged=result.diverged[one],
        trace={name: value if name == "step" else value[:, one] for name, value in result.trace.items()},
        keys=result.keys[one],
        examples=result.examples[one],
        settings={**result.settings, **spans},
        certificates=None if result.certificates is None else result.certificates[one],
        noise=None if result.noise is None else result.noise[one],
        unknowns={name: value[one] for name, value in result.unknowns.items()},
        snapshots={name: value[one] for name, value in result.snapshots.items()},
    )


def _spans(best: Sequence[_Best]) -> dict[str, Any]:
    """What the layers told each target's winner; None for winners that use no spans, and nothing if all are such."""
    spans = [None if each.by is None else each.by.settings.get("spans", [None])[0] for each in best]
    return {"spans": spans} if any(spans) else {}


def _snapshots(best: Sequence[_Best], examples: int, count: int) -> dict[str, Tensor]:
    """The snapshots of each target's winner. One that made no steps, such as a grey image, repeats its result."""
    if not count:
        return {}
    shape = (len(best), count, examples, *best[0].batch["x"].shape[1:])
    steps, moments = torch.zeros(shape[:2], dtype=torch.long), torch.full(shape, torch.nan, dtype=torch.float16)
    for row, each in enumerate(best):
        images = each.batch["x"][None].half()
        if each.by is not None and each.by.snapshots:
            images = each.by.snapshots["x"][0]
            steps[row] = each.by.snapshots["step"][0]
        moments[row, :, : images.shape[1]] = images
    return {"step": steps, "x": moments}


def _stacked(batches: Sequence[Batch]) -> Batch:
    """One batch of all targets, (targets, examples, ...), padded with NaN, or -1, where some have fewer examples."""
    most = max(batch["x"].shape[0] for batch in batches)
    stacked: Batch = {}
    for name in batches[0]:
        values: list[Tensor] = [batch[name].cpu() for batch in batches]
        floating = values[0].is_floating_point()
        kind = torch.float64 if floating else values[0].dtype
        stacked[name] = torch.full((len(values), most, *values[0].shape[1:]), torch.nan if floating else -1, dtype=kind)
        for row, value in enumerate(values):
            stacked[name][row, : len(value)] = value.to(kind)
    return stacked
