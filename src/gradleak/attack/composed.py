"""What an attack is: stages made of parts (`parts.protocols`), solved over lanes, chosen by the match alone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.listeners import Share
from gradleak.engine.lanes import Engine, solve
from gradleak.parts import embeddings
from gradleak.parts.fields import label_rule
from gradleak.parts.protocols import NOTHING, FieldRule, Needs
from gradleak.parts.spaces import JointSpace, SoftField
from gradleak.parts.stage import Stage, demand_part
from gradleak.parts.view import TargetView, in_turn
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Seen, Track, as_targets
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch, Field, Task

if TYPE_CHECKING:
    from gradleak.identify.certificates import Certificate

# --- composition ----------------------------------------------------------------------------------------------------


DRAWN = frozenset({"t", "noise"})  # what the client of a denoiser draws


def lowest_match(match: Tensor) -> Tensor:
    """The restart with the lowest match; NaN never wins. (targets, restarts) -> (targets,)"""
    return torch.where(match.isnan(), torch.inf, match).argmin(dim=1)


class Attack:
    """What every attack has, composed of stages or not. An own one defines `name` and `run`, and what it changes.

    gradients_only   it reads gradients: clients of other rules than SGD send something else
    most_examples    it can attack updates of at most so many examples, whatever the task; None: any number
    """

    gradients_only: ClassVar[bool] = False
    most_examples: ClassVar[int | None] = None

    if TYPE_CHECKING:  # a field of some attacks, a property of others

        @property
        def name(self) -> str:
            """Its name in tables and errors."""

    @property
    def needs(self) -> Needs:
        """What `Knowledge` must grant."""
        return NOTHING

    @property
    def search_needs(self) -> Needs:
        """What it must grant if the labels are given."""
        return self.needs

    def most(self, task: Task, training: LocalTraining | None = None) -> int | None:
        """The most examples in an update of this task that it can attack; None: any number.

        training   the clients' recipe; None: any
        """
        return self.most_examples

    @property
    def work(self) -> int | None:
        """Gradient evaluations of a target, in all restarts; 0: a closed form, None: not known beforehand."""
        return None

    def needs_on(self, examples: int | None) -> Needs:
        """`needs` for updates of so many examples; None: any number."""
        return self.needs

    def work_on(self, examples: int | None) -> int | None:
        """`work` for updates of so many examples; None: any number."""
        return self.work

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        """Why it cannot attack this task, in words that follow "unsupported: "; empty if it can.

        given   names of the fields that the threat model grants
        """
        return ""

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Any = None,
        progress: Share | None = None,
    ) -> Reconstruction:
        """Attack one target or several independent ones."""
        raise NotImplementedError


@dataclass(frozen=True)
class ReadOff(Attack):
    """An attack that reads examples off the update, and labels by a rule: it needs what the rule needs."""

    labels: str = "auto"

    @property
    def search_needs(self) -> Needs:
        return NOTHING

    @property
    def needs(self) -> Needs:
        return label_rule(self.labels).needs

    def answer(
        self, task: Task, targets: Sequence[Track], batches: Sequence[Batch], match: Sequence[float]
    ) -> Reconstruction:
        """The reconstruction of ids that were read off: one restart, no steps, -1 where nothing was found."""
        batch, values = _padded(batches), torch.tensor(match, dtype=torch.float64)[:, None]  # (targets, 1)
        return Reconstruction(
            batch=batch,
            candidates={name: value[:, None] for name, value in batch.items()},
            objective=values.clone(),
            match=values,
            chosen=torch.zeros(len(targets), dtype=torch.long),
            diverged=torch.zeros_like(values, dtype=torch.bool),
            trace={"step": torch.zeros(1, dtype=torch.long), "objective": values[None], "match": values[None]},
            fields=task.fields,
            keys=tuple(target.key for target in targets),
            examples=tuple(target.num_examples for target in targets),
            seconds=0.0,
            evaluations=0,
            settings={"attack": repr(self)},
        )


def _padded(batches: Sequence[Batch]) -> Batch:
    """One batch of all targets, (targets, examples, ...), padded with -1 where some have fewer examples."""
    most = max(batch["x"].shape[0] for batch in batches)
    grown = [
        {
            name: torch.cat([value.cpu(), value.cpu().new_full((most - len(value), *value.shape[1:]), -1)])
            for name, value in batch.items()
        }
        for batch in batches
    ]
    return {name: torch.stack([batch[name] for batch in grown]) for name in grown[0]}


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The result of an attack. Shapes: T targets, R restarts, B examples (padded with NaN or -1 where targets differ).

    `unknowns`: those of the last stage that are no field of the batch, such as alpha, at the kept iterate. Parts of a
    nested one are called NAME/PART. One that is too large to keep (a control point is as large as the network) is
    given by its root mean square, as NAME_rms. If lanes return their best stage: `stage`, its number, from 0.
    """

    batch: Batch  # (T, B, ...) of the chosen restart
    candidates: Batch  # (T, R, B, ...) of every restart
    objective: Tensor  # (T, R) at the kept iterate, priors included
    match: Tensor  # (T, R) at the kept iterate
    chosen: Tensor  # (T,)
    diverged: Tensor  # (T, R) was the lane frozen because something was not finite?
    trace: dict[str, Tensor]  # "step" (P,), "objective" and "match" (P, T, R)
    fields: dict[str, Field]
    keys: tuple[str, ...]
    examples: tuple[int, ...]
    seconds: float
    evaluations: int  # gradient evaluations per lane
    settings: dict[str, Any] = field(default_factory=dict)
    certificates: tuple[Certificate, ...] | None = None  # per target; None for attacks that make none
    noise: Tensor | None = None  # (T, R) about the match of the truth under the noise of the known defence
    unknowns: dict[str, Tensor] = field(default_factory=dict)  # each (T, R, ...), padded with NaN
    snapshots: dict[str, Tensor] = field(default_factory=dict)  # Engine(snapshots=S): "step" (T, S), "x" (T, S, B, ...)

    @property
    def checks(self) -> Any:
        """Did the attack work as an optimiser?"""
        from gradleak.attack.checks import checks_of

        return checks_of(self)

    def target(self, index: int) -> Batch:
        """The batch of one target, without padding."""
        return {name: value[index, : self.examples[index]] for name, value in self.batch.items()}


@dataclass(frozen=True)
class Composed(Attack):
    """An attack made of stages: it reads fields (such as labels), runs every stage over all lanes, then chooses."""

    name: str
    stages: tuple[Stage, ...]
    fields: FieldRule
    restarts: int = 1
    keep: str = "best_match"  # or "last": the final iterate, as in some papers
    choose: Callable[[Tensor], Tensor] = lowest_match
    output: str = "last_stage"  # or "best_stage": each lane returns the stage that matches best

    def __post_init__(self) -> None:
        if self.keep not in ("best_match", "last"):
            raise ValueError(f"keep must be 'best_match' or 'last'; given {self.keep!r}.")
        if self.restarts < 1:
            raise ValueError(f"restarts must be at least 1; given {self.restarts}.")
        if self.output not in ("last_stage", "best_stage"):
            raise ValueError(f"output must be 'last_stage' or 'best_stage'; given {self.output!r}.")
        demand_part("fields", self.fields, FieldRule)
        measures = {repr((stage.predict, stage.match, stage.view)) for stage in self.stages}
        if self.output == "best_stage" and len(measures) > 1:
            raise ValueError(
                "output='best_stage' compares the matches of stages, so all must have the same prediction, match and "
                f"view; given {len(measures)} different ones."
            )

    @property
    def search_needs(self) -> Needs:
        """What the stages need: enough if the labels are given."""
        return frozenset().union(*(stage.needs for stage in self.stages))

    @property
    def needs(self) -> Needs:
        """What the stages and the rule that reads the labels need."""
        return self.search_needs | self.fields.needs

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        """The first reason of a part, or a field that nothing can supply."""
        rules = (self.fields.reads(task), *(stage.space.decoded for stage in self.stages))
        supplied = frozenset().union(*rules, given, self.needs)  # what it needs to know is not for this to say
        wanted = supplied & DRAWN
        if odd := sorted(wanted - task.fields.keys()):
            return f"it is made for denoisers, whose clients draw {' and '.join(odd)}"
        if drawn := sorted(task.drawn - supplied):
            return f"the client draws {' and '.join(drawn)}, and it does not search for that; dlg-dm and span-dm do"
        parts = [self.fields, *(part for stage in self.stages for part in stage.parts)]
        unknown = [SoftField(name) for name in missing_fields(task, supplied)]
        if given:  # what is given is no unknown: parts see it as public
            fields = {name: replace(f, public=f.public or name in given) for name, f in task.fields.items()}
            task = replace(task, fields=fields)
        return next((reason for part in (*parts, *unknown) if (reason := part.refuses(task))), "")

    @property
    def evaluations(self) -> int:
        """Gradient evaluations of a lane, in all stages."""
        return sum(stage.optimiser.evaluations for stage in self.stages)

    @property
    def work(self) -> int:
        return self.evaluations * self.restarts

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Any = None,
        progress: Share | None = None,
        begin: Batch | None = None,
    ) -> Reconstruction:
        """Attack one target or several independent ones. Nothing here, or below, has access to the private batch.

        begin   the result of another attack, (targets, examples, ...): the first stage starts from it
        """
        engine = engine or Engine()
        targets = as_targets(seen)
        supported(self, task, knows)
        require(self, knows)
        fits(task, [observation for target in targets for observation in target.observations])
        began = time.perf_counter()
        with engine.settings():
            work = task.to(engine.where, engine.dtype)
            scenes = scenes_of(work, targets, knows, self.fields)
            keys = [
                [randomness.lane_key(target.key, seed, restart) for restart in range(self.restarts)]
                for target in targets
            ]
            stages = [completed(stage, scenes) for stage in self.stages]
            pieces = list(solve(stages, scenes, keys, self.keep, engine, progress, self.output, begin))
        return _collect(self, task, targets, pieces, time.perf_counter() - began, engine, seed)


def missing_fields(task: Task, supplied: Collection[str]) -> list[str]:
    """The private fields that a search must find: not supplied, not drawn by the client, and shown by no embedding."""
    known = {*supplied, *task.drawn, *embeddings.readable(task)}
    return [name for name in task.fields if name not in known]


def completed(stage: Stage, scenes: Sequence[TargetView]) -> Stage:
    """The stage, with a search for every field that is not given, read off or among its unknowns already."""
    supplied = frozenset.intersection(*(frozenset(scene.fields) for scene in scenes)) | stage.space.decoded
    extra = [SoftField(name) for name in missing_fields(scenes[0].task, supplied)]
    return replace(stage, space=JointSpace((stage.space, *extra))) if extra else stage


def supported(attack: Attack, task: Task, knows: Knowledge) -> None:
    """Refuse a task, or clients, that the attack cannot attack, before any work."""
    if not isinstance(attack, Attack):  # anything else with a name, needs and run is taken at its word
        return
    if reason := attack.refuses(task, knows.given) or no_gradients(attack, knows.training):
        raise UnsupportedTask(f"unsupported: {attack.name} cannot attack this task: {reason}.")


def no_gradients(attack: Attack, training: LocalTraining | None) -> str:
    """Why an attack that reads gradients refuses clients of this recipe; empty if it does not."""
    if not attack.gradients_only or training is None or isinstance(training.optimiser, SGD):
        return ""
    return f"it reads gradients, and these clients send what {type(training.optimiser).__name__} makes of them"


def too_many(attack: Attack, examples: int | None, task: Task, training: LocalTraining | None = None) -> str:
    """Why an attack refuses updates of so many examples (None: any number); empty if it does not."""
    if examples is None or (most := attack.most(task, training)) is None or examples <= most:
        return ""
    return f"it attacks updates of at most {most} example(s), and these hold {examples}"


def require(attack: Attack, knows: Knowledge) -> None:
    """Refuse to run without the knowledge that the attack needs. If labels are given, no label rule has to run."""
    given = "y" in knows.grants and isinstance(attack, Attack)
    needs = attack.search_needs if given else attack.needs
    missing = sorted(needs - knows.grants)
    if missing:
        how = {
            "training": "Knowledge(training=LocalTraining(lr=...)): the update is lr times the gradient, and this "
            "attack compares absolute values",
            "y": "Knowledge(given={'y': labels}), or an attack that recovers them",
            "t": "Knowledge(given={'t': steps}), or t='analytic'",
            "noise": "Knowledge(given={'noise': noise}), or noise='unknown'",
            "generator": "Knowledge(generator=...): a trained generator of images, as `gradleak.generators` has them "
            "(gidm: a denoiser)",
        }
        advice = "; ".join(how.get(name, f"Knowledge({name}=...)") for name in missing)
        raise MissingKnowledge(
            f"{attack.name} needs {', '.join(missing)}, which the threat model does not grant. Pass {advice}."
        )


def scenes_of(task: Task, targets: Sequence[Track], knows: Knowledge, fields: FieldRule) -> list[TargetView]:
    """The targets as parts see them, with the fields that Knowledge gives and those that the rule reads off."""
    scenes = [_scene(task, target, knows, position, len(targets)) for position, target in enumerate(targets)]
    return [
        replace(scene, fields={**embeddings.read(_averaged(there)), **fields(_averaged(there)), **scene.fields})
        for scene, there in zip(scenes, in_turn(scenes), strict=True)
    ]


def _averaged(scene: TargetView) -> TargetView:
    """A track as one round with the mean update, which has less noise: fields are read off this one."""
    if not scene.earlier:
        return scene
    mean = tree.map(lambda *updates: torch.stack(updates).mean(0), *(each.update for each in scene.rounds))
    return replace(scene, update=mean, earlier=())


def _scene(task: Task, target: Track, knows: Knowledge, position: int, targets: int) -> TargetView:
    scene = TargetView.waiting(task, target, knows)
    like = next(p for p in task.model.parameters() if p.requires_grad)
    given: Batch = {}
    for name, value in knows.given.items():
        if name not in task.fields:
            raise MissingKnowledge(f"Knowledge.given names {name!r}; the task's fields are {', '.join(task.fields)}.")
        if not isinstance(value, Tensor):
            raise MissingKnowledge(f"Knowledge.given[{name!r}] must be a tensor; given {type(value).__name__}.")
        known = task.fields[name]
        # Targets with fewer examples are padded with -1 or NaN, as in a Reconstruction: the padding is cut off here.
        rows = value[position][: scene.num_examples] if of_each(known, value, targets) else value
        filled = bool(rows.isfinite().all()) if rows.is_floating_point() else bool((rows >= 0).all())
        if rows.dim() != _rank(known, value) or rows.shape[0] != scene.num_examples or not filled:
            raise MissingKnowledge(
                f"Knowledge.given[{name!r}] has shape {tuple(value.shape)}; wanted ({scene.num_examples}, ...) or one "
                f"such per target ({targets}, {scene.num_examples}, ...), with no padding among the examples."
            )
        if known.classes is not None and not rows.is_floating_point() and int(rows.max()) >= known.classes:
            raise MissingKnowledge(
                f"Knowledge.given[{name!r}] holds {int(rows.max())}; the model has classes 0 to {known.classes - 1}."
            )
        given[name] = rows.to(like.device, like.dtype if rows.is_floating_point() else None)
    return replace(scene, fields=given)


def of_each(field: Field, value: Tensor, targets: int) -> bool:
    """Is a given field (targets, examples, ...), one value for each target? Else it is (examples, ...), for all."""
    return value.dim() == _rank(field, value) + 1 and value.shape[0] == targets


def _rank(field: Field, value: Tensor) -> int:
    """Dimensions of a field of a batch. Shares of categories have one more than whole categories."""
    return 1 + len(field.shape) + (field.classes is not None and value.is_floating_point())


def _configuration(attack: Composed) -> str:
    """The repr of the attack without addresses of functions: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(attack))


def _collect(
    attack: Composed, task: Task, targets: list[Track], pieces: list[Any], seconds: float, engine: Any, seed: int
) -> Reconstruction:
    """Put the solved chunks back into the order of the targets, and choose a restart for each by its match."""
    count, restarts = len(targets), attack.restarts
    most = max(target.num_examples for target in targets)
    curves = ("objective", "match")
    numbers = {name: torch.full((count, restarts), torch.nan, dtype=torch.float64) for name in (*curves, "noise")}
    diverged = torch.zeros((count, restarts), dtype=torch.bool)
    steps = pieces[0].trace["step"]
    trace = {name: torch.full((len(steps), count, restarts), torch.nan, dtype=torch.float64) for name in curves}
    for piece in pieces:
        rows = torch.tensor(piece.targets)
        for name, value in {"objective": piece.objective, "match": piece.match, "noise": piece.noise}.items():
            numbers[name][rows] = value.reshape(len(rows), restarts).double()
        for name in curves:
            trace[name][:, rows] = piece.trace[name].reshape(-1, len(rows), restarts).double()
        diverged[rows] = piece.diverged.reshape(len(rows), restarts)
    chosen = attack.choose(numbers["match"])
    pick = chosen[:, None].expand(count, most)  # which restart each example comes from, (T, B)
    if all(piece.each is not None for piece in pieces):
        each = torch.full((count, restarts, most), torch.inf)
        for piece in pieces:
            rows, size = torch.tensor(piece.targets), piece.each.shape[1]
            each[rows, :, :size] = piece.each.reshape(-1, restarts, size).float()
        pick = torch.where(each.isnan(), torch.inf, each).argmin(dim=1)
    row, column = torch.arange(count)[:, None], torch.arange(most)
    candidates = _gathered([(piece.targets, piece.batch) for piece in pieces], count, restarts)
    snapshots: dict[str, Tensor] = {}
    if moments := pieces[0].moments:
        images = _gathered([(piece.targets, {"x": piece.snapshots}) for piece in pieces], count, restarts)["x"]
        chosen_images = images[row, pick, :, column].movedim(2, 1)  # (T, B, S, ...) to (T, S, B, ...)
        snapshots = {"step": torch.tensor(moments).expand(count, -1).clone(), "x": chosen_images}
    return Reconstruction(
        batch={name: value[row, pick, column] for name, value in candidates.items()},
        candidates=candidates,
        unknowns=_gathered([(piece.targets, piece.unknowns) for piece in pieces], count, restarts),
        snapshots=snapshots,
        objective=numbers["objective"],
        match=numbers["match"],
        noise=numbers["noise"],
        chosen=chosen,
        diverged=diverged,
        trace={"step": steps, **trace},
        fields=task.fields,
        keys=tuple(target.key for target in targets),
        examples=tuple(target.num_examples for target in targets),
        seconds=seconds,
        evaluations=attack.evaluations,
        settings={
            "attack": _configuration(attack),
            "seed": seed,
            "engine": repr(engine),
            "chunks": [p.lanes for p in pieces],
        },
    )


def _gathered(
    pieces: Sequence[tuple[Sequence[int], Mapping[str, Tensor]]], count: int, restarts: int
) -> dict[str, Tensor]:
    """(lanes, ...) of all chunks by name, as (targets, restarts, ...) in the order of the targets.

    Padded with NaN or -1 where a target has no value of that name, or a smaller one: fewer examples, rounds, copies.
    """
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for targets, named in pieces:
        for name, value in named.items():
            by_restart = value.reshape(-1, restarts, *value.shape[1:])
            parts.setdefault(name, []).append((torch.tensor(targets), by_restart))
    whole: dict[str, Tensor] = {}
    for name, values in parts.items():
        most = [max(sizes) for sizes in zip(*(value.shape[2:] for _, value in values), strict=True)]
        first = values[0][1]
        filler = torch.nan if first.is_floating_point() else -1
        whole[name] = first.new_full((count, restarts, *most), filler)
        for rows, value in values:
            corner: list[Any] = [rows, slice(None), *(slice(size) for size in value.shape[2:])]
            whole[name][tuple(corner)] = value
    return whole
