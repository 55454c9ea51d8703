"""Gradient inversion of diffusion models: GIDM and the baselines of its paper, DLG-dm and InvG-dm."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gradleak.attack import Attack, Composed, Reconstruction, require
from gradleak.attacks.gidm.sampled import Refined, Sampled
from gradleak.core.listeners import Share
from gradleak.core.registry import did_you_mean, named
from gradleak.core.settings import takes
from gradleak.parts.coarse import Onwards, OnwardsWindow
from gradleak.parts.fields import Nothing
from gradleak.parts.matches import Cosine, Relative
from gradleak.parts.optimisers import Adam, CosineDecay, OddBlocks, constant, plain, sign
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import TotalVariation
from gradleak.parts.protocols import FieldRule, Match, Needs, Prior, Space
from gradleak.parts.residual import FreeNoise, NoisedResidual, NoiseShell
from gradleak.parts.spaces import JointSpace, Pixels, Uniform
from gradleak.parts.stage import Stage
from gradleak.parts.steps import (
    Drawn,
    Granted,
    ReadSteps,
    SettledSteps,
    SoftSteps,
    StraightThrough,
    evidence,
    step_count,
)
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Seen, Track, as_targets
from gradleak.scenario.task import Task

PAPER = "Huang, Hong, Roos, Chen, Gradient Inversion of Federated Diffusion Models, ARES 2025"
DISTANCES: dict[str, Match] = {"l2": Relative(whole=True), "cosine": Cosine()}
NOISES = ("given", "unknown", "random")
STEPS = ("given", "analytic", "candidates", "soft", "straight-through", "grid", "random")
PARAMETERS = ("x0_eps", "xt_q")
TRIAL = 50  # search steps of the first round of trials; each round doubles them
SETTLED = 0.2  # last share of a phase that searches for the step: it goes on with the best one


@dataclass(frozen=True)
class Preset:
    """Steps of both phases and of the sampler, rates (`t_lr`: of t's scores), the last temperature, how t is found."""

    generative: int
    fine: int
    sampler: int
    lr: float
    t_lr: float
    last: float
    t: str = "analytic"


PRESETS = {
    "paper": Preset(5000, 1500, 16, 0.01, t_lr=0.01, last=1.0, t="soft"),
    "fast32": Preset(2000, 1500, 16, 0.01, t_lr=0.1, last=0.1),
    "smoke": Preset(40, 200, 4, 0.1, t_lr=0.1, last=0.1),
}


@dataclass(frozen=True)
class Plan:
    """What is known, what is searched for, and how. It makes the stages of a phase and says what the attack needs."""

    noise: str
    t: str
    param: str = "x0_eps"
    interval: int = 50
    shell: float = 0.0
    lr: float = 0.01
    decay: bool = False
    signed: bool = False
    distance: str = "l2"
    tv: float = 0.0
    t_lr: float = 0.1
    first: float = 1.0
    last: float = 0.1

    def __post_init__(self) -> None:
        for name, known in (("noise", NOISES), ("t", STEPS), ("param", PARAMETERS), ("distance", tuple(DISTANCES))):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} cannot be {value!r}.{did_you_mean(value, known)}")
        if self.param == "xt_q" and self.noise != "unknown":
            raise ValueError(
                f"param='xt_q' has the noise among its unknowns: use it with noise='unknown'; given {self.noise!r}."
            )

    @property
    def speed(self) -> float:
        """How much faster scores of t move than the unknown that stands for them."""
        return self.t_lr / self.lr

    @property
    def searched(self) -> bool:
        """Is the step an unknown of the stages themselves?"""
        return self.t in ("soft", "straight-through")

    def fields(self, *also: str) -> FieldRule:
        needs = {name for name in ("noise", "t") if getattr(self, name) == "given"}
        return Granted(frozenset({*needs, *also}), ReadSteps() if self.t == "analytic" else Nothing())

    def phase(self, image: Space, steps: int, begin: Space | None = None) -> tuple[Stage, ...]:
        """The stages of one phase: two where the step is an unknown, the second with the step settled.

        Rates fall and blocks are counted over the phase as a whole.
        """
        if not self.searched:
            return (self._stage(image, Drawn("t") if self.t == "random" else SettledSteps(), steps, begin),)
        kind = SoftSteps if self.t == "soft" else StraightThrough
        settled = max(1, round(SETTLED * steps))
        before = max(1, steps - settled)
        return (
            self._stage(image, kind(self.speed, self.first, self.last), before, begin, total=before + settled),
            self._stage(image, SettledSteps(self.speed), settled, begin, done=before, total=before + settled),
        )

    def space(self, image: Space, steps: Space) -> JointSpace:
        """The joint space of image, noise and step."""
        noise: dict[str, tuple[Space, ...]] = {"given": (), "unknown": (FreeNoise(),), "random": (Drawn("noise"),)}
        return JointSpace((image, *noise[self.noise], steps))

    def _stage(
        self, image: Space, steps: Space, count: int, begin: Space | None, done: int = 0, total: int | None = None
    ) -> Stage:
        """One stage of `count` steps, after `done` of the `total` steps of its phase."""
        free, residual = self.noise == "unknown", self.param == "xt_q"
        priors: list[Prior] = [TotalVariation(self.tv)] if self.tv else []
        if self.shell and free:
            priors.append(NoiseShell(self.shell))
        optimiser = Adam(
            lr=self.lr,
            steps=count,
            schedule=Onwards(CosineDecay(), done, total or count) if self.decay else constant,
            windows={"noise": OnwardsWindow(OddBlocks(self.interval), done)}
            if self.interval and free and not residual
            else {},
            transform=sign if self.signed else plain,
        )
        space = NoisedResidual(steps, begin) if residual else self.space(image, steps)
        return Stage(space, Replay(), DISTANCES[self.distance], tuple(priors), optimiser)


def _plan(settings: BaselineSettings | GIDMSettings, **other: Any) -> Plan:
    """The plan of these settings, field by field; `other` replaces or adds to them."""
    names, values = {field.name for field in fields(Plan)}, {**asdict(settings), **other}
    return Plan(**{name: value for name, value in values.items() if name in names})


def _attack(name: str, plan: Plan, stages: Sequence[Stage], restarts: int, keep: str, *also: str) -> Attack:
    """The composition; where steps are tried out, a search for the step comes first."""
    if plan.t not in ("grid", "candidates"):
        return Composed(name, tuple(stages), plan.fields(*also), restarts=restarts, keep=keep)
    known = replace(plan, t="given")
    whole = Composed(name, tuple(stages), known.fields(*also), restarts=restarts, keep=keep)
    trial = Composed(name, known.phase(Pixels(Uniform(), boxed=True), TRIAL), known.fields(), restarts=1)
    return StepSearch(whole, trial, read=plan.t == "candidates")


@dataclass(frozen=True)
class BaselineSettings:
    """Steps and rate, what is known of noise and step, and when unknown noise moves."""

    steps: int = 6500
    lr: float = 0.01
    noise: str = "given"
    t: str = "given"
    interval: int = 50
    decay: bool = False
    _: KW_ONLY
    restarts: int = 1
    keep: str = "best_match"


@dataclass(frozen=True, kw_only=True)
class DLGDMSettings(BaselineSettings):
    """As `BaselineSettings`, with the choice of unknowns and distance, and the weight of the noise's length."""

    param: str = "x0_eps"
    shell: float = 0.0
    distance: str = "l2"


@named("dlg-dm", kind="attack", paper=PAPER)
@takes(DLGDMSettings)
def dlg_dm(settings: DLGDMSettings) -> Attack:
    """DLG on a denoiser: the pixels whose gradient, at the client's noise and step, is the observed one.

    min over x of ||grad(x, noise, t) - observed||^2 / ||observed||^2, Adam, x from U[-1, 1], no box. What is `given`
    comes from Knowledge.given. An attacker without it has noise="random", t="random" (drawn once: the floor), or
    searches for them as `gidm` does, with its settings.

    param       "xt_q": with noise="unknown", search for the noised image and the residual instead of image and noise
    interval    unknown noise moves only in every second block of so many steps; 0: always
    shell       weight of (||noise||^2 / m - 1)^2

    Differs: 6,500 steps, the sum of GIDM's phases, since the paper gives no number. It gives its baselines the true
    noise and step in one sentence and random ones in another; these are the two modes.
    """
    plan = _plan(settings)
    return _attack("dlg-dm", plan, plan.phase(Pixels(Uniform()), settings.steps), settings.restarts, settings.keep)


@dataclass(frozen=True, kw_only=True)
class InvGDMSettings(BaselineSettings):
    """As `BaselineSettings`, with the weight of the total variation and signed steps."""

    tv: float = 1e-4
    signed: bool = False


@named("invg-dm", kind="attack", paper=PAPER)
@takes(InvGDMSettings)
def invg_dm(settings: InvGDMSettings) -> Attack:
    """Inverting Gradients on a denoiser: the direction of the gradient, total variation, pixels in their box.

    min over x of 1 - cos(grad(x, noise, t), observed) + tv * TV(x), Adam on the raw gradient (`signed`: on its sign),
    x clamped to [-1, 1]. Knowledge as in `dlg-dm`.

    Differs: the paper states cosine and Adam alone; tv and clamp are IG's, and steps as in `dlg-dm`.
    """
    plan = _plan(settings, distance="cosine")
    stages = plan.phase(Pixels(Uniform(), boxed=True), settings.steps)
    return _attack("invg-dm", plan, stages, settings.restarts, settings.keep)


@dataclass(frozen=True, kw_only=True)
class GIDMSettings:
    """The preset and what replaces its parts, the sampler, what is known, the objective, and the restarts."""

    preset: str = "fast32"
    steps: int | None = None
    fine_steps: int | None = None
    sampler_steps: int | None = None
    sampler_start: float = 1.0
    sampler_last: int | None = None
    recompute: bool = True
    lr: float | None = None
    noise: str = "unknown"
    t: str | None = None
    param: str = "x0_eps"
    interval: int = 50
    shell: float = 0.0
    distance: str = "l2"
    tv: float = 0.0
    decay: bool = False
    restarts: int | None = None
    keep: str = "best_match"

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"There is no preset {self.preset!r}.{did_you_mean(self.preset, PRESETS)}")
        if self.chosen.generative <= 0 and self.chosen.fine <= 0:
            raise ValueError("steps and fine_steps are both 0: there is nothing to search.")

    @property
    def chosen(self) -> Preset:
        """The preset, with the parts that other settings replace."""
        steps = {"generative": self.steps, "fine": self.fine_steps, "sampler": self.sampler_steps}
        parts: dict[str, Any] = {**steps, "lr": self.lr, "t": self.t}
        return replace(PRESETS[self.preset], **{name: value for name, value in parts.items() if value is not None})


@named("gidm", kind="attack", paper=PAPER)
@takes(GIDMSettings)
def gidm(settings: GIDMSettings) -> Attack:
    """First an image that the trained model can produce, then its pixels; image, noise and step found together.

    Phase 1: min over z (noise, t) of ||grad(D(z), noise, t) - observed||^2 / ||observed||^2, D the deterministic
    sampler of `Knowledge.generator`, the model at the end of its training. Phase 2: pixels, from D(z), clamped, with
    noise and step from phase 1. One Adam moves all; noise only in every second block of `interval` steps.

    preset          "fast32", "paper" (5,000 + 1,500 steps, one rate for all, t="soft" without annealing) or "smoke" for
                    toys; steps (of phase 1; 0: none), fine_steps (0: none), sampler_steps, lr and t replace single ones
    noise           "unknown", "given" (Knowledge.given) or "random" (drawn once, never moved)
    t               "analytic", read off the time MLP; "candidates", the ten best of these tried out; "soft", shares of
                    all steps that sharpen; "straight-through"; "grid", tried out; "given"; "random". None: the
                    preset's, "analytic" except for "paper"
    param           "xt_q": phase 2 searches for noised image and residual, and so for the noise, given or not
    sampler_start   below 1: a shorter sampler, from an image noised to that share of the schedule. Not the paper's
    sampler_last    differentiate the network only in this many last steps of the sampler. Not the paper's either
    recompute       hold no graph of the sampler: memory of one step instead of all, for a third more time
    restarts        None: four where the noise is unknown, which has many minima, else one

    Noise and step that Knowledge gives are used, not searched for, unless "random".

    Differs: a sampler of 16 steps, where the paper writes of all 1,000 in every iteration, which cannot have been run;
    it does not depend on t. The paper's argmax over scores passes no gradient: shares do. Errors are relative.
    """
    chosen = settings.chosen
    plan = _plan(settings, t=chosen.t, lr=chosen.lr, t_lr=chosen.t_lr, last=chosen.last)
    sampled = Sampled(chosen.sampler, settings.recompute, settings.sampler_start, settings.sampler_last)
    stages: tuple[Stage, ...] = ()
    if chosen.generative > 0:
        stages = replace(plan, param="x0_eps").phase(sampled, chosen.generative)
    if chosen.fine > 0:
        begin = plan.space(sampled, SettledSteps(plan.speed)) if stages else None
        warm = replace(plan, first=plan.last) if stages else plan  # scores are carried over: no second annealing
        stages += warm.phase(Refined(sampler=sampled), chosen.fine, begin)
    restarts = settings.restarts if settings.restarts is not None else 4 if settings.noise == "unknown" else 1
    return _attack("gidm", plan, stages, restarts, settings.keep, "generator")


@dataclass(frozen=True)
class StepSearch(Attack):
    """Try out steps in short searches, keep those that match best, and attack with the winner. One example a target.

    Candidates are the ten steps that explain the time MLP's gradient best (`read`), or, for networks whose time MLP
    tells nothing, 32 steps at growing distances, then finer grids around the best. Each round of trials is as long as
    all before it; a quarter of the candidates goes on, later half of them. All trials of a round are lanes.
    """

    whole: Composed
    trial: Composed
    read: bool
    width: int = 32
    read_width: int = 10

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def needs(self) -> Needs:
        return self.whole.needs - {"t"}

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        return self.whole.refuses(task, {*given, "t"})

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
        require(self, knows)
        targets = as_targets(seen)
        if "t" in knows.given:
            return self.whole.run(task, targets, knows, seed, engine=engine, progress=progress)
        if any(target.num_examples > 1 for target in targets):
            raise MissingKnowledge(
                f"Steps are tried out for one example; a target has {max(t.num_examples for t in targets)}. Read them "
                "off (t='analytic') or search for them (t='soft')."
            )
        count = step_count(task)
        if self.read:
            scores = [evidence(TargetView.of(task, target, knows)) for target in targets]
            tried = torch.stack([each.topk(min(self.read_width, count)).indices for each in scores])
            chosen = self._winner(tried, task, targets, knows, seed, engine)
        else:
            powers = torch.logspace(0, math.log10(count), min(self.width, count), dtype=torch.float64)
            tried = (powers.round().long() - 1).unique().expand(len(targets), -1)
            chosen = self._narrowed(tried, count, task, targets, knows, seed, engine)
        given = {**knows.given, "t": chosen[:, None]}
        result = self.whole.run(task, targets, replace(knows, given=given), seed, engine=engine, progress=progress)
        return replace(result, settings={**result.settings, "attack": repr(self)})

    def _narrowed(self, tried: Tensor, count: int, *rest: Any) -> Tensor:
        """The winners of ever finer grids, each around the winner of the last; (targets, candidates) -> (targets,)."""
        winner = self._winner(tried, *rest)
        reach = int((tried - winner[:, None]).abs().masked_fill(tried == winner[:, None], count).amin(1).max())
        while reach > 0:
            offsets = torch.linspace(-reach, reach, 9).round().long().unique()
            tried = (winner[:, None] + offsets).clamp(0, count - 1)
            winner, reach = self._winner(tried, *rest), 0 if reach == 1 else max(1, reach // 4)
        return winner

    def _winner(
        self, tried: Tensor, task: Task, targets: Sequence[Track], knows: Knowledge, seed: int, engine: Any
    ) -> Tensor:
        """The step of each target that matches best after its trials, (targets,)."""
        length = self.trial.stages[0].optimiser.steps
        while tried.shape[1] > 1:
            width = tried.shape[1]
            stage = self.trial.stages[0]
            trial = replace(self.trial, stages=(replace(stage, optimiser=replace(stage.optimiser, steps=length)),))  # type: ignore[type-var]
            lanes = [_renamed(target, place) for target in targets for place in range(width)]
            given = {name: _each(value, task, name, len(targets), width) for name, value in knows.given.items()}
            given["t"] = tried.reshape(-1, 1)
            match = trial.run(task, lanes, replace(knows, given=given), seed, engine=engine).match
            match = torch.where(match.isnan(), torch.inf, match).amin(1).reshape(len(targets), width)
            best = match.argsort(1)[:, : max(1, width // 4 if width > 16 else width // 2)]
            tried, length = tried.gather(1, best), 2 * length
        return tried[:, 0]


def _renamed(target: Track, place: int) -> Track:
    """The same target under another key, so that its lanes are separate."""
    return Track(tuple(replace(observation, key=f"{observation.key}/{place}") for observation in target.observations))


def _each(value: Tensor, task: Task, name: str, targets: int, width: int) -> Tensor:
    """A given field, shared or one for each target, as one for every trial: (targets * width, examples, ...)."""
    values = value if value.dim() == 2 + len(task.fields[name].shape) else value.expand(targets, *value.shape)
    return values.repeat_interleave(width, dim=0)
