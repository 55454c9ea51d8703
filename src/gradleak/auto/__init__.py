"""The parameter-free standard: every attack that applies, measured by one residual, the best of them for each target.

case.py       what a server can tell of an observation
members.py    the table: which attack applies when, and what it may spend
residual.py   the one measure, and what noise does to it
again.py      a second look at what a defence has noised
polish.py     second-order steps from the best candidate
tuning.py     choosing settings on clients of the attacker's own
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradleak.attack import Reconstruction, require
from gradleak.attack.checks import Check, Checks, checks_of
from gradleak.auto.members import MEMBERS, POLISH, PRESETS, Member
from gradleak.auto.polish import polished
from gradleak.auto.residual import Residual, alike, residuals
from gradleak.auto.second_look import AGAIN, LOOKS, looked_again
from gradleak.auto.traits import Case
from gradleak.auto.tuning import tuned
from gradleak.core.listeners import Share
from gradleak.core.registry import did_you_mean, named
from gradleak.engine import Engine, EngineError, memory_of
from gradleak.identify.certificates import Certificate, certify
from gradleak.parts.fields import RuleDoesNotApply
from gradleak.parts.protocols import Needs
from gradleak.scenario.defence import overrides
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Seen, as_targets
from gradleak.scenario.task import Batch, Task, TaskError

VERSION = "auto-2026.1"
CERTIFIED = {"quick": 1024, "standard": 4096, "thorough": 12_288}  # unknowns up to which the answer is certified
REFUSALS = (MissingKnowledge, TaskError, RuleDoesNotApply, EngineError)  # a member that cannot attack this says so

__all__ = ["MEMBERS", "PRESETS", "VERSION", "Auto", "Case", "Ensemble", "Member", "OutOfTime"]


class OutOfTime(Exception):
    """The time that `seconds` grants is over; raised out of a member's search."""


@dataclass(frozen=True, eq=False)
class Ensemble(Reconstruction):
    """What `auto` found. `match` is the common residual; along `trace` it is that of the best so far.

    `by`: for each target the part of the winner's own reconstruction, whose search the checks are about.
    """

    by: tuple[Reconstruction, ...] = ()

    @property
    def checks(self) -> Checks:
        """Those of the member that won, target by target: the residual of several searches has no shape to judge."""
        found: list[Check] = []
        converged: list[bool] = []
        for target, own in enumerate(self.by):
            held = None if self.certificates is None else (self.certificates[target],)
            told = checks_of(replace(own, certificates=held))
            found += [replace(check, target=target) for check in told.found]
            converged += told.converged
        order = ("error", "warning", "note")
        return Checks(tuple(sorted(found, key=lambda check: order.index(check.severity))), tuple(converged))


@dataclass(frozen=True, eq=False)
class _Best:
    """The best candidate of one target so far. `knows`: what was assumed of this target alone, after a second look."""

    batch: Batch
    residual: Residual
    member: str
    by: Reconstruction | None
    knows: Knowledge | None = None


@named("auto", kind="attack", paper=f"gradleak's own, version {VERSION}; after AutoAttack, Croce and Hein, ICML 2020")
@dataclass(frozen=True)
class Auto:
    """Run every attack that applies to this observation, and return for each target what explains the update best.

    Looks at the observation, the task and the knowledge alone. Members (`auto.MEMBERS`) say themselves when they
    apply; each runs with settings that are fixed by the preset, in the order of the table, on the targets that none
    before has solved to rounding. Candidates are compared by one residual (`auto.residual`): the relative length of
    what a replay through the known defence leaves unexplained. `settings["tried"]` of the result tells what was run,
    with which settings, how far it came and how long it took, and what was left out, and why.

    preset     quick (seconds for a LeNet on a CPU), standard, thorough (the papers' own budgets)
    tune       settings of some members are chosen on this many synthetic clients, made of `Knowledge.public` with the
               same recipe, defence and weights: data that the attacker owns. 0: the fixed rule
    seconds    no member goes on after so many; what it had found is lost. Results then depend on the machine
    steps      at most so many for every member: for trials
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
        """Nothing: members that need more than is granted are left out. Tuning needs data of the attacker's own."""
        return frozenset({"public"} if self.tune else ())

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


def turns_of(case: Case, preset: str) -> list[tuple[Member, str]]:
    """Who runs, in order: all members with all that is known of the defence, then with less of it, then polish.

    An attacker who knows a defence may still match as if there were none (A0), or only weigh out what was noised or
    dropped (A1): the search may be easier. What comes of it is measured by the same residual, through the defence.
    """
    most, *less = case.forms
    able = [member for member in MEMBERS if member.fits(case, preset)]
    last = [(member, most) for member in able if member.attack == POLISH]
    first = [(member, most) for member in able if member.attack != POLISH]
    return [*first, *((member, form) for form in less for member in able if preset in member.forms), *last]


@dataclass(eq=False)
class _Search:
    """One run: the table from top to bottom, the best of every target on the way."""

    auto: Auto
    case: Case
    seed: int
    began: float
    progress: Share | None
    best: dict[int, _Best] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)  # residuals of the best so far, after every member that ran
    evaluations: int = 0
    tuned: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.curve.append([each.value for each in self._blank()])

    def _blank(self) -> list[Residual]:
        """What mid-grey images explain: where every member begins from. Fields that are read off are guessed."""
        rows = range(len(self.case.targets))
        blanks = [self.case.task.blank(self.case.targets[row].num_examples) for row in rows]
        return residuals(self.case, rows, blanks)

    def attempt(self, member: Member, form: str, turn: tuple[int, int]) -> None:
        """Run one member, as an attacker who takes the defence for `form`, on the targets that are not solved yet."""
        case, auto = self.case, self.auto
        rows = [row for row in range(len(case.targets)) if row not in self.best or not self.best[row].residual.solved]
        told: dict[str, Any] = {"member": member.name, "attack": member.attack, "form": form, "targets": rows}
        if not rows:
            self.tried.append({**told, "outcome": "left out", "why": "every target is solved to rounding"})
            return
        if self._over:
            self.tried.append({**told, "outcome": "left out", "why": f"the {auto.seconds} s are over"})
            return
        began = time.perf_counter()
        try:
            settings = self._settings(member)
            told |= {"settings": settings}
            parts = self._run(member, settings, rows, case.taking(form), self._share(*turn))
        except REFUSALS as refusal:
            self.tried.append({**told, "outcome": "refused", "why": str(refusal)})
            return
        except OutOfTime:
            self.tried.append({**told, "outcome": "stopped", "why": f"the {auto.seconds} s were over"})
            return
        name = member.name if form == next(iter(case.forms)) else f"{member.name} ({form})"
        reached: dict[int, float] = {}
        for own, found in parts:
            reached |= self._take(name, own, found)
        seconds = round(time.perf_counter() - began, 3)
        ordered = [reached.get(row) for row in rows]
        self.tried.append({**told, "outcome": "ran", "residual": ordered, "seconds": seconds})
        self._note()

    def look_again(self) -> None:
        """Where a defence guesses what it noised: ask it again with the best candidate in hand, and solve anew.

        Another guess compares other coordinates, so residuals cannot be set against each other. A candidate therefore
        counts only where it is solved to rounding, which the first guess was not: a wrong one leaves noise to explain.
        """
        case, auto = self.case, self.auto
        [member] = [each for each in MEMBERS if each.name == AGAIN]
        known = case.knows.defence
        if known is None or not overrides(known, "reconsidered") or not member.fits(case, auto.preset):
            return
        rows = [
            row
            for row, held in self.best.items()
            if not held.residual.solved and len(case.targets[row].observations) == 1
        ]
        form = next(iter(case.forms))
        told: dict[str, Any] = {"member": "second look", "attack": member.attack, "form": form, "targets": rows}
        if not rows:
            self.tried.append({**told, "outcome": "left out", "why": "every target is solved to rounding"})
            return
        if self._over:
            self.tried.append({**told, "outcome": "left out", "why": f"the {auto.seconds} s are over"})
            return
        began, reached = time.perf_counter(), []
        settings = self._settings(member)
        try:
            for row in rows:
                held, guess = self.best[row], self.best[row].batch
                for _ in range(LOOKS):
                    own = looked_again(case, row, guess, held.residual.order)
                    found = member.make(settings).run(
                        own.task, own.targets[0], own.knows, self.seed, engine=case.engine, progress=self._share(0, 1)
                    )
                    guess = found.target(0)
                    [now] = residuals(own, [0], [guess])
                    self.evaluations += found.evaluations
                    if now.solved:
                        self.best[row] = _Best(guess, now, "second look", found, own.knows)
                        break
                reached.append(now.value)
        except REFUSALS as refusal:  # what was found before stays
            self.tried.append({**told, "outcome": "refused", "why": str(refusal)})
            return
        except OutOfTime:
            self.tried.append({**told, "outcome": "stopped", "why": f"the {auto.seconds} s were over"})
            return
        seconds = round(time.perf_counter() - began, 3)
        self.tried.append({**told, "settings": settings, "outcome": "ran", "residual": reached, "seconds": seconds})
        self._note()

    def _note(self) -> None:
        """How far every target is now."""
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
        """What the proxies say of this member; asked once, whatever its form."""
        auto = self.auto
        if member.name not in self.tuned:
            self.tuned[member.name] = tuned(
                self.case, member, auto.preset, auto.tune, auto.steps, self.seed, self._share(0, 1)
            )
        return self.tuned[member.name]

    def _run(
        self, member: Member, settings: Mapping[str, Any], rows: list[int], case: Case, share: Share
    ) -> list[tuple[list[int], Reconstruction]]:
        """The reconstructions of these targets, in parts that share an order of the client's minibatches."""
        if member.attack != POLISH:
            attack = member.make(settings)
            require(attack, case.knows)
            seen = [case.targets[row] for row in rows]
            found = attack.run(case.task, seen, case.about(rows), self.seed, engine=case.engine, progress=share)
            return [(rows, found)]
        ready = [row for row in rows if row in self.best and self.best[row].residual.value > self._floor(row)]
        if not ready:
            raise MissingKnowledge("there is nothing to polish: no candidate, or all of them at the level of the noise")
        groups: dict[str, list[int]] = {}
        for row in ready:
            groups.setdefault(repr(self.best[row].residual.order), []).append(row)
        return [
            (
                own,
                polished(
                    case,
                    own,
                    [self.best[row].batch for row in own],
                    self.best[own[0]].residual.order,
                    settings["steps"],
                    self.seed,
                    share,
                ),
            )
            for own in groups.values()
        ]

    def _floor(self, row: int) -> float:
        return self.best[row].residual.noise

    def _share(self, place: int, places: int) -> Share:
        """Share within one member; the clock is looked at on the way."""

        def told(share: float) -> None:
            if self._over:
                raise OutOfTime
            if self.progress is not None:
                self.progress(min(1.0, (place + share) / places))

        return told

    def _take(self, name: str, rows: Sequence[int], found: Reconstruction) -> dict[int, float]:
        """Measure what a member found, and keep what is better than all before it."""
        batches = [found.target(place) for place in range(len(rows))]
        measured = residuals(self.case, rows, batches)
        self.evaluations += found.evaluations
        for place, (row, batch, now) in enumerate(zip(rows, batches, measured, strict=True)):
            held = self.best.get(row)
            if held is None or now.rank < held.residual.rank:
                self.best[row] = _Best(batch, now, name, _of_target(found, place))
        return {row: now.value for row, now in zip(rows, measured, strict=True)}

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
        held = [replace(each, batch=batch) for each, batch in zip(best, alike([b.batch for b in best]), strict=True)]
        batch = _stacked([each.batch for each in held])
        match = torch.tensor([[each.residual.value] for each in held], dtype=torch.float64)
        curve = torch.tensor(self.curve, dtype=torch.float64)[:, :, None]  # (points, targets, 1)
        return Ensemble(
            batch=batch,
            candidates={name: value[:, None].clone() for name, value in batch.items()},
            objective=match.clone(),
            match=match,
            chosen=torch.zeros(len(held), dtype=torch.long),
            diverged=torch.tensor([[each.by is not None and bool(each.by.diverged.all())] for each in held]),
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
                "winner": [each.member for each in held],
            },
            certificates=self._certificates(held),
            noise=torch.tensor([[each.residual.noise] for each in held], dtype=torch.float64),
            snapshots=_snapshots(held, batch["x"].shape[1], case.engine.snapshots),
            by=tuple(each.by for each in held if each.by is not None),
        )

    def _certificates(self, held: Sequence[_Best]) -> tuple[Certificate, ...] | None:
        """What the update determines at the answer; None where that would be too much work, or cannot be asked."""
        case, auto = self.case, self.auto
        if (
            not auto.certify
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
            for row, (target, each) in enumerate(zip(case.targets, held, strict=True))
        )


def _of_target(found: Reconstruction, place: int) -> Reconstruction:
    """The part of a reconstruction that is about one target."""
    own = slice(place, place + 1)
    return replace(
        found,
        batch={name: value[own] for name, value in found.batch.items()},
        candidates={name: value[own] for name, value in found.candidates.items()},
        objective=found.objective[own],
        match=found.match[own],
        chosen=found.chosen[own],
        diverged=found.diverged[own],
        trace={name: value if name == "step" else value[:, own] for name, value in found.trace.items()},
        keys=found.keys[own],
        examples=found.examples[own],
        certificates=None if found.certificates is None else found.certificates[own],
        noise=None if found.noise is None else found.noise[own],
        unknowns={name: value[own] for name, value in found.unknowns.items()},
        snapshots={name: value[own] for name, value in found.snapshots.items()},
    )


def _snapshots(held: Sequence[_Best], examples: int, kept: int) -> dict[str, Tensor]:
    """The way of each target's winner. One that made no steps, such as a grey image, shows its result all along."""
    if not kept:
        return {}
    shape = (len(held), kept, examples, *held[0].batch["x"].shape[1:])
    shown = {"step": torch.zeros(shape[:2], dtype=torch.long), "x": torch.full(shape, torch.nan, dtype=torch.float16)}
    for row, each in enumerate(held):
        images = each.batch["x"][None].half()
        if each.by is not None and each.by.snapshots:
            images = each.by.snapshots["x"][0]
            shown["step"][row] = each.by.snapshots["step"][0]
        shown["x"][row, :, : images.shape[1]] = images
    return shown


def _stacked(batches: Sequence[Batch]) -> Batch:
    """One batch of all targets, (targets, examples, ...), padded with NaN, or -1, where some have fewer examples."""
    most = max(batch["x"].shape[0] for batch in batches)
    found: Batch = {}
    for name in batches[0]:
        values: list[Tensor] = [batch[name].cpu() for batch in batches]
        floating = values[0].is_floating_point()
        kind = torch.float64 if floating else values[0].dtype
        found[name] = torch.full((len(values), most, *values[0].shape[1:]), torch.nan if floating else -1, dtype=kind)
        for row, value in enumerate(values):
            found[name][row, : len(value)] = value.to(kind)
    return found
