"""How many examples of each class a client had, read off an update of many steps.

Along local training from w0 to wT the mean prediction p moves, so that the average gradient of the classifier,

    dL/db_c = p_c - n_c / N            sum_m dL/dW_cm = (p_c - n_c / N) O

(n_c of N examples have class c; O is the mean sum of the classifier's inputs; the second line takes p and O to be
independent), depends on p and O along the path. The attacker knows neither the images nor the path, but both of its
ends: it measures p and O at w0 and at wT on dummy images, and interpolates linearly. Then

    n_c = N p_c - N dL/db_c             or             n_c = N p_c - N sum_m dL/dW_cm / O.

Labels in the wrong place, sum_c |found_c - n_c| / 2, of N = 50 examples after E epochs in batches of 10; mean over
three clients with examples of any class / three with an eighth of the classes only (untrained networks; EMNIST letters
on cnn-mnist, CIFAR-100 on cnn-cifar, there with 500 dummies for path-rows):

                               EMNIST                                  CIFAR-100
    lr, E                      0.004, 20    0.004, 50    0.05, 20      0.004, 20    0.004, 50    0.05, 20
    path-bias                  0.0 / 1.3    0.7 / 12.7   14.7 / 17.0   0.0 / 0.3    1.7 / 4.3    9.3 / 14.3
    path-bias:at=average       0.0 / 2.7    1.0 / 13.7   11.0 / 22.0   0.0 / 0.0    1.3 / 5.0    8.7 / 20.0
    path-bias:dummy=public     0.0 / 1.3    0.3 / 3.3    13.7 / 12.3   0.0 / 0.0    1.7 / 5.0    10.0 / 6.0
    path-rows (DLFA's)         2.3 / 2.3    3.0 / 16.0   13.0 / 20.0   5.7 / 4.0    6.7 / 8.3    7.0 / 14.0
    iLRG or bias-counts        0.0 / 15.0   1.3 / 29.0   12.0 / 35.3   0.0 / 3.0    2.7 / 23.3   13.0 / 33.3
    bias-counts                0.0 / 18.7   3.7 / 33.0   12.0 / 41.0   0.0 / 4.3    5.3 / 25.7   13.0 / 35.0
    lowest-sums                13.0 / 44.0  13.0 / 44.0  13.0 / 44.0   11.0 / 38.0  11.3 / 38.0  11.0 / 38.0

("iLRG or bias-counts": what `auto` chooses between for a single step.) How `at="fit"` chooses was settled with clients
like these in view. A client that fits its examples (the rate of 0.05) hides its labels from all of these rules.

So does a trained network, whose prediction for noise says little about the one for images. Mean over clients of any and
of few classes and over six recipes, 2 to 100 steps (EMNIST letters, 50 examples, a small cnn-mnist trained to these
accuracies, about; without a bias: the same network without that of its classifier):

    accuracy                      0.03    0.16    0.46    0.70    0.84
    iLRG or bias-counts            3.9     7.5    17.2    21.5    25.5
    path-bias                      2.2     3.3    16.2    22.3    27.0
    path-bias:dummy=public         1.3     1.7    10.0    21.0    25.5
    without a bias: llg            9.5    10.3    14.1    13.6    17.8
    without a bias: path-rows      5.0     7.9    18.2    19.2    22.6

The scores are those of `gradleak.metrics.label_scores`: N (1 - multiset_accuracy) labels are in the wrong place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.registry import did_you_mean, named
from gradleak.core.tree import Params
from gradleak.parts.fields import LastLayer, RuleDoesNotApply, last_layer
from gradleak.parts.labels.readings import Reading, Rule, demand_training
from gradleak.parts.protocols import Needs
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch

COUNTS = "Dimitrov et al., Data Leakage in Federated Averaging, TMLR 2022, after Geng et al., 2021"
AT_ONCE = 250  # dummy images in a forward pass
POINTS = 41  # points of the path, among which `at="fit"` chooses


@named("given", kind="labels", status="")
@dataclass(frozen=True)
class Given(Rule):
    """The labels that the threat model grants, as SME and NL-SME have them; without them the attack does not run."""

    needs: ClassVar[Needs] = frozenset({"y"})

    def read(self, scene: TargetView) -> Reading:
        if "y" not in scene.fields:
            raise MissingKnowledge("Label rule 'given' reads Knowledge(given={'y': labels}), and none are given.")
        y, classes = scene.fields["y"].cpu(), scene.task.fields["y"].classes
        if y.is_floating_point():
            raise RuleDoesNotApply("Label rule 'given' counts indices; the labels given are probabilities.")
        return Reading(torch.bincount(y.flatten(), minlength=classes or 0), torch.ones(()).double())


# --- from real counts to whole ones -----------------------------------------------------------------------------------


def floored_counts(real: Tensor, examples: int) -> Tensor:
    """Whole counts (..., classes) that sum to N: negatives are 0; floor; then hand out, or take back, single units.

    Missing units go to the largest fractional parts; units too many are taken from the smallest ones, one from each
    class that has any, and again until none is left over.
    """
    real = real.double().nan_to_num(0.0).clamp(0, examples)
    whole = real.floor()
    part, classes = real - whole, real.shape[-1]
    missing = examples - whole.sum(-1, keepdim=True)  # (..., 1)
    short, over = missing.clamp_min(0), (-missing).clamp_min(0)
    place = part.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    counts = whole + short // classes + (place < short % classes)
    if bool((over > 0).any()):
        units = torch.arange(int(whole.max()), device=real.device)
        cost = torch.where(units < whole[..., None], part[..., None] + units, torch.inf)  # (..., classes, units)
        order = cost.flatten(-2).argsort(dim=-1, stable=True).argsort(-1)
        counts = counts - (order < over).unflatten(-1, (classes, len(units))).sum(-1)
    return counts.long()


def real_counts(slopes: Tensor, predicted: Tensor, sums: Tensor | float, examples: int) -> Tensor:
    """n_c = N (p_c - slope_c / O) for slopes and p (..., classes) and O (..., 1); O = 1 for the slopes of the bias."""
    return examples * (predicted - slopes / sums)


def _nearest_whole(away: Tensor) -> int:
    """The last minimum, along the way, of the distance to whole counts (points,) that is within twice the lowest.

    If a client lacks many classes, their counts fall together, and pass 1 before they reach 0: so the last minimum.
    """
    beside = torch.full_like(away[:1], torch.inf)
    before, after = torch.cat([beside, away[:-1]]), torch.cat([away[1:], beside])
    lowest = (away <= before) & (away <= after) & (away <= 2 * away.min())
    return int(lowest.nonzero().max())


# --- the way from w0 to wT --------------------------------------------------------------------------------------------


def _normal(shape: tuple[int, ...], source: Draws, stream: int, limits: tuple[Tensor, Tensor]) -> Tensor:
    return source.normal(shape, stream=stream).to(limits[0])


def _uniform(shape: tuple[int, ...], source: Draws, stream: int, limits: tuple[Tensor, Tensor]) -> Tensor:
    low, high = limits
    return low + source.uniform(shape, stream=stream).to(low) * (high - low)


DRAWN = {"normal": _normal, "uniform": _uniform}


@dataclass(frozen=True)
class Path(Rule):
    """What the rules share that look along the path.

    at        "fit": the point of the path whose counts are nearest to whole ones; "average": the mean over as many
              points as there were steps; "start" or "end": that point alone
    dummy     "normal": N(0, 1) in model-input space, as DLFA; "uniform" within the bounds; "public": the images of
              Knowledge(public=...), x (N, ...) in [0, 1]
    dummies   how many
    """

    needs: ClassVar[Needs] = frozenset({"training"})
    rule: ClassVar[str]
    at: str = "fit"
    dummy: str = "normal"
    dummies: int = 3000

    def __post_init__(self) -> None:
        for what, known in (("at", ("average", "end", "fit", "start")), ("dummy", (*DRAWN, "public"))):
            if getattr(self, what) not in known:
                raise ValueError(f"Unknown {what} {getattr(self, what)!r}.{did_you_mean(getattr(self, what), known)}")
        if self.dummies < 1:
            raise ValueError(f"dummies must be at least 1; given {self.dummies}.")

    def slopes(self, layer: LastLayer) -> Tensor:
        """The mean slope of each class, (classes,)."""
        raise NotImplementedError

    def divisor(self, sums: Tensor) -> Tensor | float:
        raise NotImplementedError

    def read(self, scene: TargetView) -> Reading:
        return self.read_all([scene])[0]

    def read_all(self, scenes: Sequence[TargetView]) -> list[Reading]:
        """The readings of many targets of one task: shared weights are measured once, returned ones together.

        If the images are public, they must be the same for all.
        """
        slopes = [self.slopes(_mean_layer(scene, self.rule)) for scene in scenes]
        predicted, sums = self._ends(scenes)
        targets = zip(scenes, slopes, predicted.unbind(1), sums.unbind(1))
        return [self._reading(scene, slope, *ends) for scene, slope, *ends in targets]

    def _reading(self, scene: TargetView, slopes: Tensor, predicted: Tensor, sums: Tensor) -> Reading:
        """The reading of one target, from p (2, classes) and O (2, 1) at the ends."""
        points = self._points(scene)[:, None]
        between = lambda ends: (1 - points) * ends[0] + points * ends[1]  # noqa: E731  (points, classes or 1)
        real = real_counts(slopes, between(predicted), self.divisor(between(sums)), scene.num_examples).nan_to_num(0.0)
        if self.at == "fit":
            real = real[_nearest_whole((real - floored_counts(real, scene.num_examples)).square().sum(-1))]
        else:
            real = real.mean(0)
        counts = floored_counts(real, scene.num_examples)
        return Reading(counts, (1 - 2 * (real - counts).abs().max()).clamp(0, 1))

    def _points(self, scene: TargetView) -> Tensor:
        if self.at in ("start", "end"):
            return torch.tensor([float(self.at == "end")]).double()
        if self.at == "fit":
            return torch.linspace(0, 1, POINTS).double()
        assert scene.knows.training is not None  # `_mean_layer` asked for it
        steps = len(scene.knows.training.order(scene.num_examples))
        return torch.arange(steps).double() / steps

    @torch.no_grad()
    def _ends(self, scenes: Sequence[TargetView]) -> tuple[Tensor, Tensor]:
        """p (2, targets, classes) and O (2, targets, 1) at w0 and wT, on the CPU in double precision.

        Forward passes only. Returned weights differ between targets: their passes run under vmap.
        """
        images, first = self._images(scenes[0]), scenes[0]
        known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        starts = []
        for scene in scenes:
            sent = (*scene.weights.values(), *(scene.buffers or {}).values())
            addresses = tuple(value.data_ptr() for value in sent)
            if addresses not in known:
                known[addresses] = _measured(scene, scene.weights, scene.buffers or {}, images)
            starts.append(known[addresses])
        after = [tree.subtract(scene.weights, scene.update) for scene in scenes]
        buffers = [{**(scene.buffers or {}), **(scene.returned_buffers or {})} for scene in scenes]
        stacked = (tree.map(lambda *values: torch.stack(values), *each) for each in (after, buffers))
        entries = sum(value.numel() for value in after[0].values())
        at_once = max(1, 2**26 // max(entries, 2**20))  # targets: the activations of each count like a million weights
        ends = vmap(lambda weights, buffers: _measured(first, weights, buffers, images), chunk_size=at_once)(*stacked)
        pairs = zip((torch.stack(values) for values in zip(*starts)), ends)
        predicted, sums = (torch.stack(pair).to("cpu", torch.float64) for pair in pairs)
        return predicted, sums[..., None]

    def _images(self, scene: TargetView) -> list[Batch]:
        """The dummies, in batches of at most AT_ONCE."""
        sizes = [min(AT_ONCE, self.dummies - start) for start in range(0, self.dummies, AT_ONCE)]
        if self.dummy == "public":
            public: Any = scene.knows.public
            if not hasattr(public, "x"):
                raise MissingKnowledge(
                    f"Label rule {self.rule!r} with dummy='public' needs images of the attacker's own: "
                    "Knowledge(public=...) with x (N, ...) in [0, 1], as gradleak.data.load gives them; given "
                    f"{type(public).__name__}."
                )
            low, high = scene.limits["x"]
            parts = public.x[: self.dummies].to(low).split(AT_ONCE)
            return [{**scene.task.blank(len(part)), "x": low + part * (high - low)} for part in parts]
        device = scene.like.device
        source, batches = Draws(randomness.key("label counts").to(device)), []
        for stream, size in enumerate(sizes):
            batch = scene.task.blank(size)
            for number, (name, limits) in enumerate(scene.limits.items()):
                shape = tuple(batch[name].shape)
                batch[name] = DRAWN[self.dummy](shape, source.child(number), stream, limits)
            batches.append(batch)
        return batches


def _measured(scene: TargetView, weights: Params, buffers: Params, images: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Mean softmax (classes,) and mean sum of the classifier's inputs, 0-d, over all dummies."""
    layer = scene.task.classifier
    bias = weights[layer.bias] if layer.bias in weights else buffers.get(layer.bias or "")
    predicted, sums = [], []
    for batch in images:
        features = scene.task.inputs_of([layer.module], weights, batch, buffers)[layer.module]  # (dummies, features)
        logits = torch.nn.functional.linear(features, weights[layer.weight], bias)
        predicted.append(logits.softmax(-1).sum(0))
        sums.append(features.sum())
    count = sum(tree.length(batch) for batch in images)
    return torch.stack(predicted).sum(0) / count, torch.stack(sums).sum() / count


def _mean_layer(scene: TargetView, rule: str) -> LastLayer:
    """The classifier with the mean gradient of the client's steps, without momentum and weight decay."""
    training = demand_training(scene, rule)
    if not isinstance(training.optimiser, SGD):
        raise RuleDoesNotApply(
            f"Label rule {rule!r} needs a client whose update is a sum of gradients; this one uses "
            f"{type(training.optimiser).__name__}. Rules that look at signs and order only: 'bias-corrected', 'llg'."
        )
    layer, factors = last_layer(scene), training.factors(scene.num_examples)
    if len(factors) == 1:
        return layer
    # With momentum every gradient acts again in later steps.
    gain, decay = training.optimiser.way(factors) / sum(factors), training.optimiser.weight_decay

    def mean(gradient: Tensor, name: str) -> Tensor:
        middle = scene.weights[name] - 0.5 * scene.update[name]
        return gradient / gain - decay * middle.detach().to(gradient)

    names = scene.task.classifier
    deltas = None if layer.deltas is None else mean(layer.deltas, names.bias or "")
    return replace(layer, rows=mean(layer.rows, names.weight), deltas=deltas)


@named("path-rows", kind="labels", paper=COUNTS)
@dataclass(frozen=True)
class PathRows(Path):
    """Counts from the rows of the classifier's weight, with p and O measured on noise at both ends of the training.

    Assumes sum_m h_m > 0 on average (sigmoid, ReLU). Differs: negative counts are set to 0 before their fractional
    parts are looked at.
    """

    rule: ClassVar[str] = "path-rows"
    at: str = "average"

    def slopes(self, layer: LastLayer) -> Tensor:
        return layer.rows.sum(1)

    def divisor(self, sums: Tensor) -> Tensor | float:
        return sums


@named("path-bias", kind="labels", paper=f"ours; {COUNTS}, on the bias")
@dataclass(frozen=True)
class PathBias(Path):
    """Counts from the classifier's bias, with p measured on noise at both ends of the training; needs no O.

    Which point between the ends has the average p depends on how soon the client fits its examples. The counts
    themselves tell: they are whole only there (`at="fit"`).
    """

    rule: ClassVar[str] = "path-bias"
    dummies: int = 300  # 100 do as well: p is a mean of probabilities

    def slopes(self, layer: LastLayer) -> Tensor:
        if layer.deltas is None:
            raise RuleDoesNotApply(
                "Label rule 'path-bias' reads the gradient of the classifier's bias, and none is trained. "
                "Rules that do without: 'path-rows', 'row-minimum', 'llg'; 'auto' picks one."
            )
        return layer.deltas

    def divisor(self, sums: Tensor) -> Tensor | float:
        return 1.0


def path_rule(scene: TargetView) -> Path | None:
    """The rule for an update of several steps of a known recipe, by the bias.

    None if a rule for single gradients has to do: for one step, for an update that is no sum of gradients of known
    scale (an optimiser other than SGD, a defence), or without a bias, where the table above is undecided. Dummies are
    the attacker's public images, if there are any.
    """
    training = scene.knows.training
    if training is None or scene.knows.defence is not None or not isinstance(training.optimiser, SGD):
        return None
    if len(training.order(scene.num_examples)) == 1 or last_layer(scene).deltas is None:
        return None
    return PathBias(dummy="public" if hasattr(scene.knows.public, "x") else "normal")
