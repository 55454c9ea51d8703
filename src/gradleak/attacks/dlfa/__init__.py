"""DLFA: simulate the client's whole local training on a copy of the data for every epoch, and differentiate it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradleak.attack import Attack, Composed, Reconstruction
from gradleak.attacks.dlfa.epochs import (
    Copies,
    LocalSteps,
    Mixed,
    OrderInvariance,
    Over,
    Plan,
    Ramp,
    Times,
    a_copy_an_epoch,
    a_step_an_epoch,
    epochs,
    one_copy,
    one_step,
    settled,
)
from gradleak.core.listeners import Share
from gradleak.core.registry import did_you_mean, named
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import LayerWeighted
from gradleak.parts.optimisers import Adam, ExponentialDecay
from gradleak.parts.priors import Box, CircularVariation
from gradleak.parts.protocols import Space
from gradleak.parts.spaces import Normal, Pixels
from gradleak.parts.stage import Stage
from gradleak.scenario.observation import Knowledge, Seen
from gradleak.scenario.task import Batch, Task

PAPER = "Dimitrov, Balunovic, Konstantinov, Vechev, Data Leakage in Federated Averaging (DLFA), TMLR 10/2022"


@dataclass(frozen=True)
class Settings:
    """What the authors set for one kind of data; priors for batches of 5 and 10 epochs.

    prior       the order-invariant prior that did best
    weights     of all of them, by (over, of, power)
    """

    lr: float
    decay: ExponentialDecay
    ramp: Ramp
    tv: float
    clip: float
    prior: OrderInvariance
    weights: Mapping[tuple[str, str, int], float]


def _weights(*pixels_then_features: float) -> dict[tuple[str, str, int], float]:
    """In the order: max, mean to the power 1; max, mean to the power 2; of pixels, then of features, each."""
    kinds = [(over, of, power) for power in (1, 2) for over in ("max", "mean") for of in ("pixels", "features")]
    return dict(zip(kinds, pixels_then_features, strict=True))


PRESETS = {
    "femnist": Settings(
        0.4, ExponentialDecay(0.995, 10), Ramp(1.0, 2.0), 1e-3, 2.0, OrderInvariance(1000.0),
        _weights(77.298, 81.365, 250.846, 263.623, 92.378, 97.776, 1000.0, 1054.413),
    ),
    "cifar100": Settings(
        0.1, ExponentialDecay(0.997, 20), Ramp(4.0, 2.0), 2e-4, 10.0, OrderInvariance(6.075, "max", "features"),
        _weights(4.848, 5.0, 15.708, 16.206, 5.814, 6.075, 62.675, 65.573),
    ),
}  # fmt: skip

VARIANTS: dict[str, tuple[Space, Plan]] = {
    "full_many": (Copies(Normal()), a_copy_an_epoch),
    "full": (Pixels(Normal()), one_copy),
    "none_epoch": (Pixels(Normal()), a_step_an_epoch),
    "none": (Pixels(Normal()), one_step),
}


@named("dlfa", kind="attack", paper=PAPER)
def dlfa(
    *,
    preset: str = "cifar100",
    variant: str = "full_many",
    steps: int = 400,
    lr: float | None = None,
    tv: float | None = None,
    clip: float | None = None,
    invariance: float | None = None,
    over: str | None = None,
    of: str | None = None,
    power: int | None = None,
    most_steps: int = 100,
    checkpoint: int = 1,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """Simulate all local steps of the client, with a copy of the data for every epoch, and match the update.

    min over X (epochs, N, ...) of f / batches * sum over layers of exp(1 - l) ||simulated - observed update||^2 / lr^2
    + tv * TV^2(X) + clip * squared distance to the box + `OrderInvariance`(X), Adam. In the end every copy is matched
    to the first, image by image, and their mean is returned. Needs the client's learning rate, batch size and epochs;
    its order may be unknown, and labels are needed by number only: those read off come in a random order (`Mixed`),
    given ones as they are.

    preset      "femnist" or "cifar100": the paper's settings, for small grey characters and for coloured photographs.
                Those given here replace single ones
    variant     "full_many" is the method. "full" has one copy, in one order; "none_epoch" makes one full step an epoch;
                "none" one step in all, which is dlg-ms with this objective
    over, of, power     the order-invariant prior: "mean" or "max" over images, of "pixels" or "features", 1 or 2
    invariance  its weight; None: the authors' for this prior, batches of 5 and 10 epochs. With batches of 1 or 10 the
                usual prior of "femnist" has 100
    most_steps  refuse a client of more local steps: an iteration costs as much as all of them
    checkpoint  hold the weights at every so many local steps, and run the steps again on the way back; 0 holds it all

    Differs: the paper returns the last iterate (keep="last"); layers are in forward order, not by name. Momentum and
    Adam clients are simulated by their own rule.
    """
    for given, known, name in ((preset, PRESETS, "preset"), (variant, VARIANTS, "variant")):
        if given not in known:
            raise ValueError(f"{name} must be one of those of the paper; given {given!r}.{did_you_mean(given, known)}")
    chosen, (space, plan) = PRESETS[preset], VARIANTS[variant]
    wanted: dict[str, Any] = {"over": over, "of": of, "power": power}
    alike = replace(chosen.prior, **{name: value for name, value in wanted.items() if value is not None})
    usual = chosen.weights[alike.over, alike.of, alike.power]
    alike = replace(alike, weight=usual if invariance is None else invariance)
    priors = (
        CircularVariation(chosen.tv if tv is None else tv),
        Box(chosen.clip if clip is None else clip, summed=True),
        *((alike,) if isinstance(space, Copies) else ()),
    )
    optimiser = Adam(
        lr=chosen.lr if lr is None else lr, steps=steps, schedule=chosen.decay, transform=Times(chosen.ramp)
    )
    stage = Stage(
        space,
        LocalSteps(plan, every=checkpoint, most=most_steps),
        LayerWeighted(),
        tuple(Over(prior, chosen.ramp) for prior in priors),
        optimiser,
    )
    make = Settled if isinstance(space, Copies) else Composed
    return make("dlfa", (stage,), Mixed(Labels(label_rule(labels))), restarts=restarts, keep=keep)


@dataclass(frozen=True)
class Settled(Composed):
    """A composition whose last space holds copies: of what it found, one batch is made in the end (`settled`)."""

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
        found = super().run(task, seen, knows, seed, engine=engine, progress=progress, begin=begin)
        assert knows.training is not None  # the search needed it
        whole = [epochs(knows.training, examples)[1] for examples in found.examples]

        def one(name: str, value: Tensor) -> Tensor:
            """(targets, restarts, N, copies, ...) -> (targets, restarts, N, ...); fields without copies as they are."""
            known = task.fields[name]
            if known.classes is not None or value.dim() == 3 + len(known.shape):
                return value
            merged = torch.full_like(value[:, :, :, 0], torch.nan)  # padding stays
            for target, examples in enumerate(found.examples):
                for restart, lane in enumerate(value[target, :, :examples]):
                    merged[target, restart, :examples] = settled(lane, known, whole[target])
            return merged

        candidates = {name: one(name, value) for name, value in found.candidates.items()}
        picked = {name: value[torch.arange(len(found.chosen)), found.chosen] for name, value in candidates.items()}
        shown = {**found.snapshots}  # for the eye: the mean of an example's copies, (targets, moments, N, copies, ...)
        if shown:
            shown["x"] = shown["x"].float().mean(dim=3).half()
        return replace(found, candidates=candidates, batch=picked, snapshots=shown)
