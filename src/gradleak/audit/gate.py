"""A client-side check of an update before it is sent: allow, noise or block. In doubt it blocks.

    policy = Policy.load("policy.toml")
    decision = check(task, seen, policy, knows=Knowledge(training=training), batch=batch, seconds=20)
    if decision.action == "block": ...                      # else send decision.update

The client attacks its own update with `auto`, as a server that knows the recipe would. With its batch at hand it
compares example by example. Without, an update counts as inverted if a search explains all but a tenth of it: that may
be another example, and in doubt nothing is sent. The gate fails closed: an error, or no decision in time, is
"undecided", for which a policy cannot say "allow".

What it cannot do: an update that passes has withstood these attacks for that long, on this machine. That is no proof of
safety; a server has more time. Only differential privacy with a stated epsilon proves anything.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from gradleak import metrics
from gradleak.attack import Attack, no_gradients, too_many
from gradleak.attack.checks import observation_checks
from gradleak.auto import PRESETS, Auto, Case, OutOfTime
from gradleak.auto.residual import residuals
from gradleak.core import registry, tree
from gradleak.core.configuration import from_toml
from gradleak.core.files import without_values
from gradleak.core.listeners import Share
from gradleak.core.registry import did_you_mean
from gradleak.core.tree import Params
from gradleak.engine import Engine
from gradleak.identify.recipe import replay_error
from gradleak.identify.risk import risk
from gradleak.scenario.client import fitting
from gradleak.scenario.defence import Chain
from gradleak.scenario.kinds import Tokens
from gradleak.scenario.observation import Knowledge, Observation, Track
from gradleak.scenario.task import Batch, Task

ALLOW, NOISE, BLOCK = "allow", "noise", "block"
SLACK = 1e-3  # how far examples may leave their bounds, in units of them
STRANGE = 0.1  # share of the update that the client's own examples may leave unexplained


class BadPolicy(ValueError):
    """A policy that cannot be read, or that would let undecided updates pass."""


@dataclass(frozen=True)
class Policy:
    """What a client lets out. In TOML each setting by its name, at the top of the file.

    on_leak      "noise" or "block", if the update gives examples away
    undecided    "noise" or "block", if the check failed, found no working attack, or ran out of time
    psnr, ssim   with the batch at hand: an image counts as given away above both; other kinds of data have
                 thresholds of their own (`scenario.kinds`)
    tokens       with it, of texts: given away too where more than this share of the tokens is found, in whatever place
    residual     without it: given away if a search leaves at most this share of the update unexplained
    most_bits    without it: block from this risk score on (bits per pixel, column entry, ...); None: no risk score
    noise        standard deviation of the added noise, as a multiple of the update's root mean square
    preset       of `auto`
    """

    on_leak: str = BLOCK
    undecided: str = BLOCK
    psnr: float = 18.0
    ssim: float = 0.5
    tokens: float = 0.9
    residual: float = 0.1
    most_bits: float | None = None
    noise: float = 1.0
    preset: str = "quick"

    def __post_init__(self) -> None:
        for name in ("on_leak", "undecided"):
            if getattr(self, name) not in (NOISE, BLOCK):
                raise BadPolicy(
                    f"{name} must be 'noise' or 'block'; given {getattr(self, name)!r}. A gate fails closed."
                )
        if self.preset not in PRESETS:
            raise BadPolicy(f"preset cannot be {self.preset!r}.{did_you_mean(str(self.preset), PRESETS)}")
        for name in ("psnr", "ssim", "tokens", "residual", "noise", "most_bits"):
            value = getattr(self, name)
            numeric = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not numeric and not (name == "most_bits" and value is None):
                raise BadPolicy(f"{name} must be a finite number; given {value!r}.")
        if self.noise <= 0:
            raise BadPolicy(f"noise must be above 0; given {self.noise}.")
        # Beyond these, nothing would count as given away:
        for name, most in (("residual", 1), ("ssim", 1), ("tokens", 1), ("psnr", 60)):
            if not 0 < getattr(self, name) < most:
                raise BadPolicy(f"{name} must lie between 0 and {most}; given {getattr(self, name)}.")

    @staticmethod
    def load(path: str | Path) -> Policy:
        """From a TOML file; an unknown setting is an error that names the nearest."""
        try:
            settings: Mapping[str, Any] = from_toml(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise BadPolicy(f"{path} cannot be read as a policy: {problem}.") from None
        known = [entry.name for entry in fields(Policy)]
        if odd := [name for name in settings if name not in known]:
            raise BadPolicy(f"{path} has no setting {odd[0]!r}.{did_you_mean(odd[0], known)}")
        return Policy(**settings)


@dataclass(frozen=True, eq=False)
class Decision:
    """`action` with its reason. `update`: what may be sent; None if nothing may. `figures`: what was measured."""

    action: str
    reason: str
    update: Params | None
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.action.upper()}. {self.reason} ({self.seconds:.1f} s)"

    def record(self) -> dict[str, Any]:
        return {"action": self.action, "reason": self.reason, "seconds": self.seconds, "figures": self.figures}


@dataclass(frozen=True)
class Finding:
    """What an attack on the client's own update showed. `leaks`: None if that could not be decided."""

    leaks: bool | None
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Update:
    """One update with everything that the gate judges it by."""

    task: Task
    seen: Observation
    policy: Policy
    knows: Knowledge
    batch: Batch | None
    seed: int
    engine: Engine | None


def check(
    task: Task,
    seen: Observation,
    policy: Policy | None = None,
    *,
    knows: Knowledge = Knowledge(),
    batch: Batch | None = None,
    seconds: float = 20.0,
    seed: int = 0,
    engine: Engine | None = None,
) -> Decision:
    """Decide on one update. `batch`: the client's own examples, which make the decision sharper and stay here.

    Noise is drawn afresh from the system's random source. The noised update is attacked again in the remaining time, by
    an attacker who knows how much noise there is; if it still leaks, or is not decided, it is blocked. Without examples
    it is always blocked: noise alone keeps an attack from explaining an update, whatever its examples show.
    """
    began, policy = time.perf_counter(), policy or Policy()
    update = Update(task, seen, policy, knows, batch, seed, engine)
    first = _finding(update, seconds)
    action = {False: ALLOW, True: policy.on_leak, None: policy.undecided}[first.leaks]
    spent = time.perf_counter() - began
    if action == NOISE and batch is None:
        text = f"{first.text} Whether noise would help cannot be judged without the client's examples."
        return Decision(BLOCK, text, None, spent, first.figures)
    if action != NOISE:
        return Decision(action, first.text, seen.update if action == ALLOW else None, spent, first.figures)
    noised, std = _noised(seen.update, policy.noise)
    added = registry.get("defence", "local-gaussian", sigma=std)
    again = _finding(
        replace(
            update,
            seen=replace(seen, update=noised),
            policy=replace(policy, most_bits=None),
            knows=replace(knows, defence=added if knows.defence is None else Chain(knows.defence, added)),
        ),
        max(0.01, seconds - spent),
    )
    figures = {"before": first.figures, "after": again.figures, "noise": std}
    spent = time.perf_counter() - began
    if again.leaks is False:
        text = f"{first.text} With noise of {policy.noise:g} times its root mean square: {again.text}"
        return Decision(NOISE, text, noised, spent, figures)
    why = "it still leaks" if again.leaks else "it could not be decided"
    return Decision(BLOCK, f"{first.text} With noise {why}: {again.text}", None, spent, figures)


def _finding(update: Update, seconds: float) -> Finding:
    """What an attack shows of this update within `seconds`. An error is no answer, and never a pass."""
    began = time.perf_counter()
    try:
        if odd := _odd(update.task, update.seen, update.batch):
            return Finding(None, f"The update cannot be judged: {odd}.")
        return _attacked(update, began, seconds)
    except Exception as problem:
        # No error may let an update pass: it is the same as no answer.
        first = without_values(str(problem).partition("\n")[0])
        return Finding(None, f"The check could not be made ({type(problem).__name__}: {first}).")


def _odd(task: Task, observation: Observation, batch: Batch | None) -> str | None:
    """Why this update cannot be judged, or not with these examples: scores against others would let it pass."""
    if errors := [check for check in observation_checks(observation, task) if check.severity == "error"]:
        return errors[0].text
    if batch is None:
        return None
    fitting(task, batch)
    count = tree.length(batch)
    if count != observation.num_examples:
        return f"it is of {observation.num_examples} examples, and {count} were given to compare with"
    for name, value in batch.items():
        field = task.fields[name]
        if not bool(value.isfinite().all()):
            return f"{name} of the examples is not finite"
        if field.classes is None and field.bounded:
            unit = field.unit(value)
            if float(unit.min()) < -SLACK or float(unit.max()) > 1 + SLACK:
                return f"{name} of the examples lies outside the task's bounds: give them as the model receives them"
    return None


def _attacked(update: Update, began: float, seconds: float) -> Finding:
    task, observation, policy, knows, batch = update.task, update.seen, update.policy, update.knows, update.batch
    figures: dict[str, Any] = {}
    if batch is None and policy.most_bits is not None:
        figures["risk"] = risk(task, observation, knows, engine=update.engine).record()
        if not figures["risk"]["score"] < policy.most_bits:
            unit = task.fields["x"].kind.entries
            bits = f"{figures['risk']['score']:.1f} bits per {unit}, {policy.most_bits:g} are the most allowed"
            return Finding(True, f"The update says too much: {bits}.", figures)
    auto = Auto(preset=policy.preset, certify=False)
    texts = isinstance(task.fields["x"].kind, Tokens)
    read = _read(update, began, seconds, figures) if texts else None
    if read is not None and (read.leaks or auto.refuses(task, knows.grants)):
        return read
    auto = replace(auto, seconds=max(0.01, seconds - (time.perf_counter() - began)))
    result = auto.run(task, observation, knows, update.seed, engine=update.engine)
    tried = result.settings["tried"]
    figures |= {"residual": float(result.match), "winner": result.settings["winner"][0]}
    figures["tried"] = [{name: each.get(name) for name in ("member", "outcome")} for each in tried]
    cut = any(each["outcome"] == "stopped" or "are over" in each.get("why", "") for each in tried)
    one, many = task.fields["x"].kind.noun
    leak = _inverted(policy, figures, many) if batch is None else _compared(result, batch, policy, figures)
    if leak is not None:
        return Finding(True, leak, figures)
    if batch is not None and _strange(update, batch, figures):
        text = f"The examples given do not make this update, and other {many} were found that do"
        return Finding(None, f"{text}: they are not those of this round.", figures)
    if texts and batch is not None and _unlike(update, batch, figures):
        return Finding(None, f"The {many} given do not make this update: they are not those of this round.", figures)
    if cut:
        return Finding(None, f"Not decided in {seconds:.0f} s: not all attacks were run.", figures)
    if time.perf_counter() - began > seconds:
        return Finding(None, f"Not decided in {seconds:.0f} s: the attacks ended later.", figures)
    if not result.checks.converged[0]:
        return Finding(None, "No attack worked as an optimiser, which shows nothing.", figures)
    return Finding(False, f"Attacks that converged gave no {one} away; that is no proof of safety.", figures)


def _read(update: Update, began: float, seconds: float, figures: dict[str, Any]) -> Finding:
    """What every attack in closed form reads off an update of texts, before any search.

    With the examples at hand they are compared. Without, an attack that worked and names anything gives it away.
    """
    task, seen, knows, batch = update.task, update.seen, update.knows, update.batch
    one, many = task.fields["x"].kind.noun
    able = _able(task, seen, knows)
    figures["tried"], worked = [], False
    for name, attack in able:
        if time.perf_counter() - began > seconds:
            return Finding(None, f"Not decided in {seconds:.0f} s: {name} was not run.", figures)
        try:
            result = attack.run(task, seen, knows, update.seed, engine=update.engine, progress=_until(began + seconds))
        except OutOfTime:
            return Finding(None, f"Not decided in {seconds:.0f} s: {name} was stopped.", figures)
        figures["tried"].append({"member": name, "outcome": "ran"})
        worked |= result.checks.converged[0]
        figures |= {"winner": name, "match": float(result.match[0, int(result.chosen[0])])}
        if batch is not None:
            leak = _compared(result, batch, update.policy, figures)
        else:
            count = int((result.target(0)["x"] >= 0).sum()) if result.checks.converged[0] else 0
            leak = f"{name} names {count} {task.fields['x'].kind.entries}s of its {many}." if count else None
        if leak is not None:
            return Finding(True, leak, figures)
    if not able:
        return Finding(None, f"No attack applies to these {many}, which shows nothing.", figures)
    if time.perf_counter() - began > seconds:
        return Finding(None, f"Not decided in {seconds:.0f} s: the attacks ended later.", figures)
    if batch is not None and _unlike(update, batch, figures):
        return Finding(None, f"The {many} given do not make this update: they are not those of this round.", figures)
    if not worked:
        return Finding(None, "No attack worked on this update, which shows nothing.", figures)
    names = ", ".join(name for name, _ in able)
    return Finding(False, f"{names} gave no {one} away; that is no proof of safety.", figures)


def _unlike(update: Update, batch: Batch, figures: dict[str, Any]) -> bool:
    """Does a replay of these examples leave much of the update unexplained? Unknown without recipe, or with noise."""
    case = Case(update.task, (Track((update.seen,)),), update.knows, update.engine or Engine())
    if not case.followed or update.knows.training is None or update.knows.defence is not None:
        return False
    error = replay_error(update.task, update.seen, batch, update.knows.training)
    figures["residual of the examples"] = error.relative
    return error.relative > STRANGE


def _able(task: Task, seen: Observation, knows: Knowledge) -> list[tuple[str, Attack]]:
    """The registered attacks in closed form that can attack this update."""
    every = [(entry.name, registry.get("attack", entry.name)) for entry in registry.entries("attack")]
    examples, training = seen.num_examples, knows.training
    return [
        (name, attack)
        for name, attack in every
        if isinstance(attack, Attack)
        and attack.work_on(examples) == 0
        and not attack.refuses(task, knows.grants)
        and not no_gradients(attack, training)
        and not too_many(attack, examples, task, training)
        and attack.needs_on(examples) <= knows.grants
    ]


def _until(end: float) -> Share:
    """A progress that ends a search when the time is over."""

    def tick(share: float) -> None:
        if time.perf_counter() > end and share < 1:
            raise OutOfTime

    return tick


def _compared(result: Any, batch: Batch, policy: Policy, figures: dict[str, Any]) -> str | None:
    """With the client's own examples: does any of them come back? The policy sets the thresholds of images."""
    scores, limits = metrics.compare(result, batch), {"psnr": policy.psnr, "ssim": policy.ssim}
    kind = scores.kind
    needed = [
        replace(each, least=limits.get(each.measure, each.least))
        for each in kind.thresholds
        if each.name in kind.needed
    ]
    names = {each.measure for each in needed}
    if not all(bool(scores.values[name].isfinite().all()) for name in names):
        raise ValueError("the scores of the reconstruction are not finite")
    recovered = torch.stack([each.passed(scores.values) for each in needed]).all(0)
    if (bag := scores.values.get("bag")) is not None:  # of texts: tokens without their places say enough
        names, recovered = {*names, "bag"}, recovered | (bag > policy.tokens)
    names |= {kind.headline.name, kind.control_measure.name}
    best = {each.name: scores.values[each.name] for each in kind.measures if each.name in names}
    figures |= {name: float(values.max()) for name, values in best.items()} | {"shown": int(recovered.sum())}
    if not bool(recovered.any()):
        return None
    told = kind.headline.format if kind.headline.unit else kind.headline.stated  # a unit says what is measured
    measure = kind.control_measure
    besides = "" if measure is kind.headline else f" and {measure.stated(figures[measure.name])}"
    return (
        f"{int(recovered.sum())} of {recovered.numel()} {kind.noun[1]} come back from this update, the clearest with "
        f"{told(figures[kind.headline.name])}{besides}."
    )


def _inverted(policy: Policy, figures: dict[str, Any], many: str) -> str | None:
    """Without them: examples that explain nearly all of the update count as the client's. `many`: what they are."""
    if figures["residual"] > policy.residual:
        return None
    return f"{figures['winner']} reproduces the update to {figures['residual']:.0e}: {many} were found that give it."


def _strange(update: Update, batch: Batch, figures: dict[str, Any]) -> bool:
    """Are these the wrong examples? They leave much of the update unexplained, and the reconstruction a tenth of it."""
    case = Case(update.task, (Track((update.seen,)),), update.knows, update.engine or Engine())
    if not case.followed or not update.task.fields.keys() <= batch.keys():
        return False
    [residual] = residuals(case, [0], [batch])
    figures["residual of the examples"] = residual.value
    return residual.value > STRANGE and figures["residual"] < STRANGE * residual.value


def _noised(update: Params, share: float) -> tuple[Params, float]:
    """The update with fresh noise, and its standard deviation. The system gives the seed, so no server can know it."""
    std = share * float(tree.norm(update)) / math.sqrt(tree.size(update))
    source = torch.Generator().manual_seed(secrets.randbits(63))
    noise = {
        name: torch.randn(value.shape, generator=source, dtype=torch.float64).to(value)
        for name, value in update.items()
    }
    return tree.map(lambda value, drawn: value + std * drawn, update, noise), std
