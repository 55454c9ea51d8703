"""Did the attack work as an optimiser, and can the observation be attacked at all?

A defence must not look good because the attack diverged. Nothing here reads the truth: an attacker can run every check.

name                 raised when                                                        severity
diverged             lanes met a number that is not finite and were frozen              warning; error if all did
flat                 the match never changed, or was zero from the start                error
not fitted           the match stayed above half of its first value                     error
stuck                the match fell at the start and by less than 1 % after that        error
at the noise         the match fell to the level of the noise that the defence adds     note
not converged        the second half of the steps still lowered the match by over 10 %,
                     or there were fewer than 50 steps                                  warning
not all found        a closed form says which examples are certain, and not all are    warning
restarts disagree    no other restart looks like the chosen one                         warning
zero update          the update is zero everywhere                                      error
constant update      every tensor of the update holds one value only                    error
sparse update        over half of the update is exactly zero                            note
tiny update          the update is within 1000 roundings of the weights                 warning
unclear label        the classifier's bias does not single out one label (one example)  warning
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradleak.attack import Reconstruction
from gradleak.core import tree
from gradleak.core.assignment import cost_matrix, match
from gradleak.scenario.observation import Observation
from gradleak.scenario.task import Task, TaskError

FITTED = 0.5  # of the first match: above this, the attack has explained less than half of the update
SOLVED = 1e-6  # of the first match: below this, the search is done, even if the match still falls
# Share of the match that must be lost after the first traced step: that one may fall by the projection onto the box.
STUCK = 0.01
# Share of the match lost over the second half of the steps. With a shorter tail, every schedule that ends in tiny steps
# would count as converged.
STILL_FALLING = 0.1
# Share of the first match above the level of the noise: a search that ends below it has fitted the update.
LEFT = 0.25
ABOVE = 1.05  # times the level of the noise: a start below it looks like the truth, and the search shows nothing
SHORT = 50  # steps: a shorter search has no tail to judge
ALIKE = 0.15  # root mean square of pixels in [0, 1], about 16 dB: restarts nearer than this show the same picture

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Check:
    """Something that limits what a result means. `target`: its number in the reconstruction; None: all targets."""

    name: str
    severity: str
    text: str
    fix: str
    target: int | None = None

    def __str__(self) -> str:
        where = "" if self.target is None else f"target {self.target}: "
        return f"{self.severity}: {where}{self.text} -> {self.fix}"


@dataclass(frozen=True)
class Checks:
    """All checks of a reconstruction, errors first. `ok`: nothing worse than a note. `converged`: per target."""

    found: tuple[Check, ...]
    converged: tuple[bool, ...]

    @property
    def ok(self) -> bool:
        return all(check.severity == "note" for check in self.found)

    def of(self, target: int) -> tuple[Check, ...]:
        """The checks of one target."""
        return tuple(check for check in self.found if check.target in (target, None))

    def __str__(self) -> str:
        head = f"checks: {sum(self.converged)} of {len(self.converged)} targets converged"
        return "\n".join([head if self.found else f"{head}, nothing to report", *map(str, self.found)])


def checks_of(reconstruction: Reconstruction) -> Checks:
    """Every check of a result, from its trace, its restarts and its frozen lanes."""
    checks: list[Check] = []
    converged: list[bool] = []
    for target in range(len(reconstruction.keys)):
        of_target = list(_target(reconstruction, target))
        checks += of_target
        converged.append(not any(check.severity == "error" or check.name == "not converged" for check in of_target))
    return Checks(tuple(sorted(checks, key=lambda check: SEVERITIES.index(check.severity))), tuple(converged))


def _target(reconstruction: Reconstruction, target: int) -> Iterator[Check]:
    chosen = int(reconstruction.chosen[target])
    diverged = reconstruction.diverged[target]
    curve = reconstruction.trace["match"][:, target, chosen]
    end = float(reconstruction.match[target, chosen])
    # The chosen lane may be frozen and still hold a good iterate.
    if bool(diverged.all()):
        yield Check(
            "diverged",
            "error",
            f"all {len(diverged)} restarts met numbers that are not finite and were frozen there",
            "lower the learning rate, or use Engine(precision='double')",
            target,
        )
    elif bool(diverged.any()):
        yield Check(
            "diverged",
            "warning",
            f"{int(diverged.sum())} of {len(diverged)} restarts met numbers that are not finite",
            "the other restarts were used; lower the learning rate to use all",
            target,
        )
    # A certificate of a solution stands above the curve: the search may have started there.
    curve = curve[curve.isfinite()]
    noise = 0.0 if reconstruction.noise is None else float(reconstruction.noise[target, chosen])
    start = float(curve[0]) if len(curve) > 1 else 0.0
    fitted = end - noise <= LEFT * (start - noise)
    if 0.0 < ABOVE * noise < start and fitted and reconstruction.evaluations >= SHORT:
        yield Check(
            "at the noise",
            "note",
            f"the match ended at {end:.3g}; the defence's noise alone makes {noise:.3g}",
            "several rounds of the same client (Track) average it out",
            target,
        )
    elif reconstruction.certificates is None or not reconstruction.certificates[target].solved:
        yield from _fall(curve, end, reconstruction.evaluations, target)
    if "certain" in reconstruction.unknowns:
        yield from _certainty(reconstruction.unknowns["certain"][target, chosen], target)
    if reconstruction.candidates.get("x") is not None and diverged.shape[0] > 1:
        yield from _agreement(reconstruction, target, chosen)


def _fall(curve: Tensor, end: float, steps: int, target: int) -> Iterator[Check]:
    """From the match along the steps (finite points only) and the match of the kept iterate."""
    if len(curve) < 2:
        return  # a closed form: there was no search
    start = float(curve[0])
    if start == 0 or float(curve.max() - curve.min()) <= 1e-12 * abs(start):
        yield Check(
            "flat",
            "error",
            f"the match did not change from {start:.3g}: the search had no slope to follow",
            "look at observation_checks(seen, task); the update may be zero, or not depend on the images",
            target,
        )
        return
    if not end < FITTED * start:  # also true where the kept match is not finite
        yield Check(
            "not fitted",
            "error",
            f"the match only went from {start:.3g} to {end:.3g}, so the result does not explain the update",
            "more steps or restarts, another attack, or Knowledge that fits the client (training, defence)",
            target,
        )
        return
    second = float(curve[1])
    if len(curve) > 2 and end > SOLVED * start and second - end < STUCK * second:
        yield Check(
            "stuck",
            "error",
            f"after the first steps the match only fell from {second:.3g} to {end:.3g}",
            "a larger learning rate, another start or another attack: this search did not move",
            target,
        )
        return
    if end > SOLVED * start and steps < SHORT:
        yield Check(
            "not converged",
            "warning",
            f"{steps} steps are too few to tell",
            f"at least {SHORT} steps: the result is a lower bound of what leaks",
            target,
        )
        return
    best = curve.cummin(0).values
    late = float(best[len(best) // 2])
    if end > SOLVED * start and late - end > STILL_FALLING * late:
        yield Check(
            "not converged",
            "warning",
            f"the second half of the steps still lowered the match by {(late - end) / late:.0%}",
            "more steps: the result is a lower bound of what leaks",
            target,
        )


def _certainty(certain: Tensor, target: int) -> Iterator[Check]:
    """From a closed form's own word on each example, 1 or 0, padded with NaN."""
    examples, sure = int(certain.isfinite().sum()), int((certain == 1).sum())
    if sure < examples:
        yield Check(
            "not all found",
            "warning",
            f"{sure} of {examples} examples are certain; the others are approximate, or were not found and are blank",
            "more waves or another attack; after several local steps the examples may be exact all the same",
            target,
        )


def _agreement(reconstruction: Reconstruction, target: int, chosen: int) -> Iterator[Check]:
    examples = reconstruction.examples[target]
    field = reconstruction.fields["x"]
    if not field.continuous:
        return
    pictures = field.relative(reconstruction.candidates["x"][target, :, :examples])
    pictures = pictures.clamp(0, 1) if field.bounded else pictures
    ours = pictures[chosen].flatten(1).double()  # (B, pixels)
    distances = []
    for restart, other in enumerate(pictures.flatten(2).double()):
        if restart == chosen or not bool(other.isfinite().all()) or not bool(ours.isfinite().all()):
            continue
        cost = cost_matrix(ours, other)  # the examples of a batch have no order
        distances.append(float(cost[torch.arange(examples), match(cost)].mean().sqrt()))
    if distances and min(distances) > ALIKE:
        yield Check(
            "restarts disagree",
            "warning",
            f"no other restart looks like the chosen one (root mean square at least {min(distances):.2f})",
            "more restarts; if images differ and matches agree, the update does not determine the image",
            target,
        )


def observation_checks(seen: Observation, task: Task) -> list[Check]:
    """What is unusual about an update, before any attack."""
    return [check for test in (_empty, _sparse, _tiny, _label) for check in test(seen, task)]


def _empty(observation: Observation, task: Task) -> Iterator[Check]:
    if not any(bool(value.any()) for value in tree.leaves(observation.update)):
        yield Check(
            "zero update",
            "error",
            "the update is zero everywhere: there is nothing to invert",
            "record a round in which the client trained; an update is weights sent minus weights returned",
        )
    elif all(bool((value == value.reshape(-1)[0]).all()) for value in tree.leaves(observation.update)):
        yield Check(
            "constant update",
            "error",
            "every tensor of the update holds a single value: it carries no picture",
            "check how the update was recorded",
        )


def _sparse(observation: Observation, task: Task) -> Iterator[Check]:
    zeros = sum(int((value == 0).sum()) for value in tree.leaves(observation.update)) / tree.size(observation.update)
    if 0.5 < zeros < 1:
        yield Check(
            "sparse update",
            "note",
            f"{zeros:.0%} of the update is exactly zero: pruned before the upload, or many dead units",
            "if the client prunes, name that defence in Knowledge(defence=...): the attack then weighs the zeros out",
        )


def _tiny(observation: Observation, task: Task) -> Iterator[Check]:
    size = tree.size(observation.update)
    update = float(tree.norm(observation.update)) / size**0.5
    weights = float(tree.norm(observation.weights)) / size**0.5
    rounding = torch.finfo(tree.like(observation.update).dtype).eps * weights
    if 0 < update < 1e3 * rounding:
        yield Check(
            "tiny update",
            "warning",
            f"the update ({update:.1e}) is only {update / rounding:.0f} times the rounding of the weights",
            "if the client returned weights, digits are lost for good; record updates instead",
        )


def _label(observation: Observation, task: Task) -> Iterator[Check]:
    """For one example the bias gradient is p - onehot(y): one negative entry, and all sum to zero."""
    if observation.num_examples != 1:
        return
    try:
        name = task.classifier.bias
    except TaskError:
        name = None
    if name is None or name not in observation.update:
        return
    bias = observation.update[name].double()
    negative = int((bias < 0).sum())
    if negative != 1 and bool(bias.any()):
        yield Check(
            "unclear label",
            "warning",
            f"{negative} entries of the classifier's bias update are negative; one example makes exactly one negative",
            "the label may be wrong: several local steps, smoothing or a defence; try Knowledge(given={'y': ...})",
        )
