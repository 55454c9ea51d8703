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
from gradleak.attacks.settings import SearchSettings
from gradleak.core.listeners import Share
from gradleak.core.registry import did_you_mean, named
from gradleak.core.settings import takes
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
class Preset:
    """The authors' settings for one kind of data; priors for batches of 5 and 10 epochs.

    prior       the order-invariant prior that did best
    weights     of all these priors, by (over, of, power)
    """

    lr: float
    decay: ExponentialDecay
    ramp: Ramp
    tv: float
    clip: float
    prior: OrderInvariance
    weights: Mapping[tuple[str, str, int], float]


def _weights(*pixels_then_features: float) -> dict[tuple[str, str, int], float]:
    """By (over, of, power); for each power max, then mean; for each of these pixels, then features."""
    kinds = [(over, of, power) for power in (1, 2) for over in ("max", "mean") for of in ("pixels", "features")]
    return dict(zip(kinds, pixels_then_features, strict=True))


PRESETS = {
    "femnist": Preset(
        0.4, ExponentialDecay(0.995, 10), Ramp(1.0, 2.0), 1e-3, 2.0, OrderInvariance(1000.0),
        _weights(77.298, 81.365, 250.846, 263.623, 92.378, 97.776, 1000.0, 1054.413),
    ),
    "cifar100": Preset(
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


@dataclass(frozen=True, kw_only=True)
class DLFASettings(SearchSettings):
    """The preset and what replaces its parts, the variant of the simulation, and its limits."""

    preset: str = "cifar100"
    variant: str = "full_many"
    steps: int = 400
    lr: float | None = None
    tv: float | None = None
    clip: float | None = None
    invariance: float | None = None
    over: str | None = None
    of: str | None = None
    power: int | None = None
    most_steps: int = 100
    checkpoint: int = 1

    def __post_init__(self) -> None:
        for name, known in (("preset", PRESETS), ("variant", VARIANTS)):
            if (value := getattr(self, name)) not in known:
                hint = did_you_mean(value, known)
                raise ValueError(f"{name} must be one that the paper names; given {value!r}.{hint}")

    def replaced(self, *names: str) -> dict[str, Any]:
        """The settings of these names that replace the preset's."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def chosen(self) -> Preset:
        """The preset with its replaced parts; the weight of the prior is the authors' unless `invariance` sets it."""
        preset = replace(PRESETS[self.preset], **self.replaced("lr", "tv", "clip"))
        prior = replace(preset.prior, **self.replaced("over", "of", "power"))
        weight = preset.weights[prior.over, prior.of, prior.power]
        return replace(preset, prior=replace(prior, weight=weight if self.invariance is None else self.invariance))


@named("dlfa", kind="attack", paper=PAPER)
@takes(DLFASettings)
def dlfa(settings: DLFASettings) -> Attack:
    """Simulate all local steps of the client, with a copy of the data for every epoch, and match the update.

    min over X (epochs, N, ...) of f / batches * sum over layers of exp(1 - l) ||simulated - observed update||^2 / lr^2
    + tv * TV^2(X) + clip * squared distance to the box + `OrderInvariance`(X), Adam. At the end every copy is matched
    to the first, image by image, and their mean is returned. Needs the client's learning rate, batch size and epochs;
    its order may be unknown. Of the labels only the counts are needed: labels that are read off come in a random order
    (`Mixed`), given ones as they are.

    preset      "femnist" or "cifar100": the paper's settings, for small grey characters and for coloured photographs;
                `lr`, `tv`, `clip`, `over`, `of`, `power` and `invariance` replace single ones
    variant     "full_many" is the method. "full" has one copy, in one order; "none_epoch" makes one full step an epoch;
                "none" one step in all, which is dlg-ms with this objective
    over, of, power     the order-invariant prior: "mean" or "max" over images, of "pixels" or "features", 1 or 2
    invariance  its weight; None: the authors' for this prior, batches of 5 and 10 epochs. For batches of 1 or 10 they
                use 100 with the usual prior of "femnist"
    most_steps  refuse a client of more local steps: an iteration costs as much as all of them
    checkpoint  hold the weights at every so many local steps, and recompute the steps in the backward pass; 0 holds all

    Differs: the paper returns the last iterate (keep="last"); layers are in forward order, not by name. Momentum and
    Adam clients are simulated by their own rule.
    """
    preset, (space, plan) = settings.chosen, VARIANTS[settings.variant]
    copies = isinstance(space, Copies)
    priors = (CircularVariation(preset.tv), Box(preset.clip, summed=True), *((preset.prior,) if copies else ()))
    stage = Stage(
        space,
        LocalSteps(plan, every=settings.checkpoint, most=settings.most_steps),
        LayerWeighted(),
        tuple(Over(prior, preset.ramp) for prior in priors),
        Adam(lr=preset.lr, steps=settings.steps, schedule=preset.decay, transform=Times(preset.ramp)),
    )
    make, fields = Settled if copies else Composed, Mixed(Labels(label_rule(settings.labels)))
    return make("dlfa", (stage,), fields, restarts=settings.restarts, keep=settings.keep)


@dataclass(frozen=True)
class Settled(Composed):
    """A composition whose last space holds copies of every example: at the end they become one batch (`settled`)."""

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
        result = super().run(task, seen, knows, seed, engine=engine, progress=progress, begin=begin)
        assert knows.training is not None  # the search needed it
        counts = [epochs(knows.training, examples)[1] for examples in result.examples]

        def merge(name: str, value: Tensor) -> Tensor:
            """(targets, restarts, N, copies, ...) -> (targets, restarts, N, ...); fields without copies as they are."""
            field = task.fields[name]
            if field.classes is not None or value.dim() == 3 + len(field.shape):
                return value
            merged = torch.full_like(value[:, :, :, 0], torch.nan)  # padding stays
            for target, examples in enumerate(result.examples):
                for restart, lane in enumerate(value[target, :, :examples]):
                    merged[target, restart, :examples] = settled(lane, field, counts[target])
            return merged

        candidates = {name: merge(name, value) for name, value in result.candidates.items()}
        batch = {name: value[torch.arange(len(result.chosen)), result.chosen] for name, value in candidates.items()}
        snapshots = {**result.snapshots}
        if snapshots:  # the mean of an example's copies, (targets, moments, N, copies, ...)
            snapshots["x"] = snapshots["x"].float().mean(dim=3).half()
        return replace(result, candidates=candidates, batch=batch, snapshots=snapshots)
