"""What an update says about the client's recipe, and how far a guess of the recipe is off.

For an attacker, and for an auditor who asks what an attacker could know: nothing here reads the truth.

    replay_error    how well a recipe, replayed on given images, reproduces the update
    linearity       is the update a sum of gradients (SGD, with or without momentum)? how strong was weight decay?
    way             the client's total way S = sum of its learning rates, from the classifier and the label counts alone
    way_on          the same from images, such as those of an attack that needs no recipe (SME, IG): replay to fit
    recipes         learning rates, epochs and batch sizes that agree with a way and with what is known

What can be inferred. To first order a client of plain SGD follows the gradient flow of all its examples for a time
S = lr x steps. The update shows S, but not lr and steps separately; batch size and order show only if the images are
known exactly. Momentum makes S about 1 / (1 - momentum) times as long and looks like a larger learning rate. Weight
decay shows exactly, as the product S x decay. Adam shows only as an update that is no sum of gradients. A client that
fits its examples stops moving: from then on the update hardly depends on S, and only a lower bound remains.

`way`: estimate / S of two clients each, and the lower bound / S of the first. 50 examples of any class, or of an eighth
of the classes only, in batches of 10; untrained networks, 100 dummies of noise. EMNIST letters on cnn-mnist, CIFAR-100
on cnn-cifar. A dash means that no estimate was given; AWAY was chosen with these clients in view:

    lr, epochs               0.004, 5           0.004, 20          0.004, 50          0.05, 20
    EMNIST, any class        1.01 1.00 (0.99)   0.99 0.99 (0.93)   0.95 0.95 (0.71)   -    -    (0.19)
    EMNIST, an eighth        1.00 1.00 (0.98)   -    -    (0.57)   -    -    (0.22)   -    -    (0.09)
    CIFAR-100, any class     1.00 1.00 (0.99)   1.00 1.00 (0.98)   -    1.03 (0.67)   -    -    (0.30)
    CIFAR-100, an eighth     1.00 1.00 (0.99)   0.96 1.02 (0.76)   -    -    (0.37)   -    -    (0.18)

`way_on`, one client each, on its own images blurred by 3 x 3 (CIFAR-100: any class only): 1.04 to 1.14 up to 20 epochs,
1.14 and 0.97 at 50; 0.98 where the classifier alone gave no estimate (EMNIST, an eighth, 20 epochs), and no estimate at
50 epochs there, nor for the rate of 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import linear

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.identify.rounding import rounding_of
from gradleak.parts.predictions import Replay
from gradleak.parts.surrogates import gauss_legendre
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import ClientState, LocalTraining, Order
from gradleak.scenario.defence import Defence
from gradleak.scenario.derivatives import PlainForms
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.rules import SGD, Rule, Schedule, constant
from gradleak.scenario.task import Batch, Task, TaskError, float32_products

NODES = 8  # of the segment from w0 to wT
DUMMIES = 300
AWAY = 3.0  # times the lowest way: beyond this, the classifier has stopped moving somewhere on the segment
LINEAR = 1e-3  # of the classifier's update: smaller sums over the classes are zero. Adam's and Lion's are near 0.5
EXPLAINED = 0.5  # relative error of a walk: below, its minimum was within a fifth of S in trials; above, anywhere
BATCH_SIZES = (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128)
EPOCHS = (1, 2, 3, 5, 10, 20, 50, 100)


# --- how far a recipe is off ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Apart:
    """A predicted update against the observed one: ||predicted - observed|| / ||observed||, their cosine and lengths.

    `scale` is ||predicted|| / ||observed||. The relative error of an observed update of zero is inf, or 0 if the
    prediction is zero too.
    """

    relative: float
    cosine: float
    scale: float

    def __str__(self) -> str:
        return f"relative error {self.relative:.1e}, cosine {self.cosine:.4f}, {self.scale:.2f} times as long"


@dataclass(frozen=True)
class ReplayError:
    """What a replay leaves unexplained, of all tensors together and of each.

    Zero up to rounding: recipe, images and order are the client's, or equivalent. Larger: something is wrong, but the
    replay does not say what. `worst` is the tensor of the largest relative error.
    """

    total: Apart
    tensors: dict[str, Apart]

    @property
    def relative(self) -> float:
        return self.total.relative

    @property
    def cosine(self) -> float:
        return self.total.cosine

    @property
    def worst(self) -> str:
        return max(self.tensors, key=lambda name: self.tensors[name].relative)

    def __str__(self) -> str:
        return f"{self.total}; worst in {self.worst} ({self.tensors[self.worst].relative:.1e})"


def replay_error(
    task: Task,
    seen: Observation,
    batch: Batch,
    training: LocalTraining,
    *,
    defence: Defence | None = None,
    order: Order | None = None,
) -> ReplayError:
    """Replay `training` on `batch` from the weights sent, in float64, and compare with the update.

    As attacks do, it leaves out random augmentations, assumes a known `defence`, and takes batches in the order of the
    rows unless `order` says otherwise. A model with active dropout is refused: put it in evaluation mode; the error
    then shows the effect of the client's masks.
    """
    fits(task, [seen])
    scene, batch = _doubled(task, seen, batch, Knowledge(training=training, defence=defence))
    predict = Replay(training, order)
    with float32_products(), PlainForms(), torch.no_grad():
        predicted = predict(batch, {}, scene, Step(torch.zeros(()), 1))
        return _apart(predicted, predict.target(scene))


def ranked(
    task: Task, seen: Observation, batch: Batch, trainings: Iterable[LocalTraining]
) -> list[tuple[LocalTraining, ReplayError]]:
    """The recipes by how well they reproduce the update on these images, best first.

    Recipes of the same way give similar errors: read the errors, not only the order.
    """
    errors = [(training, replay_error(task, seen, batch, training)) for training in trainings]
    return sorted(errors, key=lambda pair: pair[1].relative)


def _apart(predicted: Params, observed: Params) -> ReplayError:
    def of(names: Sequence[str]) -> Apart:
        a, b = ({name: each[name] for name in names} for each in (predicted, observed))
        if not tree.finite(a):  # the recipe diverges on this batch
            return Apart(relative=math.inf, cosine=math.nan, scale=math.nan)
        off, length, other = (float(tree.norm(each)) for each in (tree.subtract(a, b), b, a))
        both = float(tree.dot(a, b))
        nothing = 0.0 if off == 0 else math.inf
        return Apart(
            relative=off / length if length else nothing,
            cosine=both / (length * other) if length and other else math.nan,
            scale=other / length if length else math.nan,
        )

    return ReplayError(of(list(observed)), {name: of([name]) for name in observed})


# --- which family of rules --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linearity:
    """The sums over the classes of the classifier's update, as a test of the client's rule.

    left        ||sum over classes of u_W, minus what shrinking explains|| / (sqrt(classes) ||u_W||)
    shrunk      the share that the sums of the classifier's weights have lost; 0 without weight decay
    tolerance   below this `left` is zero: 1e-3, or what the digits of the update allow

    Softmax and cross-entropy give a gradient whose rows sum to zero over the classes, whatever the images, labels,
    dropout masks, batches and momentum. So a sum of gradients contributes nothing to these sums, and all that they show
    is weight decay, exactly: 1 - shrunk = (1 - lr x decay)^steps for SGD without momentum.
    """

    left: float
    shrunk: float
    tolerance: float = LINEAR

    @property
    def linear(self) -> bool:
        """Is the update a sum of gradients? If not: Adam, Lion, noise, pruning, or another loss than cross-entropy."""
        return self.left < self.tolerance

    @property
    def decay(self) -> float:
        """Way times weight decay, -log(1 - shrunk); nan if the update is no sum of gradients."""
        return -math.log1p(-self.shrunk) if self.linear and self.shrunk < 1 else math.nan

    def __str__(self) -> str:
        if not self.linear:
            return f"no sum of gradients: {self.left:.1e} of the classifier's update moves all classes at once"
        decay = f"weight decay took {self.shrunk:.1e} of the weights" if abs(self.shrunk) > 1e-6 else "no weight decay"
        return f"a sum of gradients; {decay}"


def linearity(task: Task, seen: Observation) -> Linearity:
    """Is the client's rule SGD, with or without momentum, and how strong was its weight decay?"""
    fits(task, [seen])
    name = task.classifier.weight
    if name not in seen.update:
        raise TaskError(
            f"The client does not train the classifier {name!r}, so its rule cannot be read off. Compare recipes by "
            "`replay_error`."
        )
    blank = task.gradient(task.weights(), task.blank(2))[name].double()
    if blank.sum(0).norm() > 1e-4 * blank.norm():
        raise TaskError(
            "The gradient's rows do not sum to zero over the classes, as they do for softmax with cross-entropy, so "
            "these sums do not show the client's rule. Compare recipes by `replay_error`."
        )
    update, weight = seen.update[name].double(), seen.weights[name].double()
    moved, before = update.sum(0), weight.sum(0)
    unit = float(update.norm()) * math.sqrt(update.shape[0])
    if unit == 0:
        raise TaskError(
            f"The update of the classifier {name!r} is zero, so it does not show the client's rule. Use another round."
        )
    shrunk = float((moved * before).sum() / before.square().sum()) if bool(before.any()) else 0.0
    tolerance = max(LINEAR, rounding_of(seen).residual)
    return Linearity(float((moved - shrunk * before).norm()) / unit, shrunk, tolerance)


# --- the total way ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """The sum of a client's learning rates, S: an estimate, and bounds.

    The bounds are no confidence interval: they hold if the classifier moves straight from w0 to wT, and if predictions
    on the dummies change as those on the client's examples do. estimate = nan and high = inf: the client has fitted its
    examples, or nearly, and only `low` is informative.
    """

    estimate: float
    low: float
    high: float
    by: str

    @property
    def known(self) -> bool:
        return math.isfinite(self.estimate)

    def __str__(self) -> str:
        if not self.known:
            return f"a way of at least {self.low:.3g} (by {self.by}): no upper bound"
        return f"a way of {self.estimate:.3g}, between {self.low:.3g} and {self.high:.3g} (by {self.by})"


def way(task: Task, seen: Observation, counts: Tensor, *, images: Tensor | None = None) -> Way:
    """S from the classifier's bias, w0, wT and how many examples each class has, (classes,); no images needed.

    u_b = integral of d over the way, d = p - counts / N, p the mean prediction. Along the segment from w0 to wT, where
    u_b dalpha = d dS, so that S = integral over alpha of |u_b|^2 / <u_b, d(alpha)>; p is measured on dummies, N(0, 1)
    in model-input space, or on the attacker's own `images` (M, ...). Bounds: as if d were always the largest, or the
    smallest, of the segment; for the lower one p at w0 fits u_b best. Without a trained bias the rows of the
    classifier's weight are used, with the mean sum of its inputs, and the error of that sum on dummies carries over.

    A momentum of m counts as a way 1 / (1 - m) times as long, nearly; for rules other than SGD S means nothing (see
    `linearity`).
    """
    fits(task, [seen])
    classes = task.fields["y"].classes
    if tuple(counts.shape) != (classes,) or int(counts.sum()) != seen.num_examples or bool((counts < 0).any()):
        raise ValueError(
            f"counts must hold the number of examples of each of {classes} classes, {seen.num_examples} in all; given "
            f"shape {tuple(counts.shape)} with sum {float(counts.sum()):g}."
        )
    scene, _ = _doubled(task, seen, {}, Knowledge())
    layer = task.classifier
    if layer.weight not in scene.update:
        raise TaskError(f"The client does not train the classifier {layer.weight!r}: use `way_on` with images.")
    biased = layer.bias in scene.update
    moved = scene.update[layer.bias or ""] if biased else scene.update[layer.weight].sum(1)
    shares = counts.to(moved) / seen.num_examples
    nodes = [(0.0, 0.0), *gauss_legendre(NODES), (0.0, 1.0)]
    weights, points = torch.tensor(nodes, dtype=torch.float64, device=moved.device).unbind(1)
    predicted, sums = _along(scene, points, _dummies(scene) if images is None else images.to(moved))
    slopes = (predicted - shares) * (1.0 if biased else sums[:, None])  # (points, classes)
    inner = slopes @ moved
    local = torch.where(inner > 0, moved.square().sum() / inner, torch.inf)  # (points,)
    first = (inner[0] / slopes[0].square().sum()).clamp_min(0)  # never above local[0]: Cauchy and Schwarz
    low, high = float(torch.minimum(first, local.min())), float(local.max())
    settled = bool((local <= AWAY * low).all())
    estimate = float((weights * local)[1:-1].sum()) if settled else math.nan
    return Way(estimate, low, high if settled else math.inf, "bias" if biased else "rows")


@dataclass(frozen=True, eq=False)
class Walk:
    """A replay compared with the observed update after each step (K,): way so far, relative error and cosine."""

    ways: Tensor
    relative: Tensor
    cosine: Tensor

    @property
    def steps(self) -> int:
        """The number of steps after which the replay is nearest to the update."""
        return int(self.relative.argmin()) + 1

    @property
    def error(self) -> float:
        return float(self.relative.min())


def walk(task: Task, seen: Observation, batch: Batch, training: LocalTraining) -> Walk:
    """Replay `training` on `batch` and compare with the update after every step: how many steps did the client make?

    For any rule, also momentum and Adam. Ways are sums of learning rates.
    """
    fits(task, [seen])
    scene, batch = _doubled(task, seen, batch, Knowledge())
    plan = training.order(seen.num_examples)
    state, weights, moved = ClientState(buffers=scene.buffers), scene.weights, tree.zeros_like(scene.update)
    rows, total = [], 0.0
    with float32_products(), PlainForms(), torch.no_grad():
        for step, some in enumerate(plan):
            rate = float(training.lr) * training.schedule(step, len(plan))
            one = LocalTraining(lr=rate, optimiser=training.optimiser) if rate > 0 else None
            if one is not None:  # a schedule may end at zero
                upload, state = one.run(scene.task, weights, batch, client=state, order=[some])
                moved = tree.add(moved, upload.payload["update"])
                weights = tree.subtract(weights, upload.payload["update"])
            total += rate
            error = _apart({"": tree.flatten(moved)}, {"": tree.flatten(scene.update)}).total
            rows.append((total, error.relative, error.cosine))
    return Walk(*torch.tensor(rows, dtype=torch.float64).unbind(1))


def way_on(task: Task, seen: Observation, batch: Batch, *, start: float, steps: int = 60, fine: int = 10) -> Way:
    """S from images with their labels, a reconstruction: full-batch steps from w0 until the update is nearest.

    `start` is a first idea of S, such as `way(...).low` or `.estimate`; the walk takes `fine` steps for it and `steps`
    in all, and the estimate is the minimum of a parabola through the three best. Bounds: where the error is within a
    tenth of its lowest. No estimate if the error still falls at the end, or stays above a half: then images, rule or
    premise are wrong, or the client has fitted its examples; `walk` shows the curve.
    """
    if not 0 < start < math.inf:
        raise ValueError(f"start must be a positive, finite sum of learning rates; given {start}.")
    if not 1 <= fine <= steps - 2:
        raise ValueError(f"fine must be at least 1 and at most steps - 2; given {fine} of {steps}.")
    curve = walk(task, seen, batch, LocalTraining(lr=start / fine, steps=steps))
    errors, best = curve.relative.nan_to_num(torch.inf), curve.steps - 1
    near = (errors <= 1.1 * errors[best]).nonzero()[:, 0]
    low, high = float(curve.ways[near[0]]), float(curve.ways[near[-1]])
    if best == len(errors) - 1 or float(errors[best]) > EXPLAINED:
        return Way(math.nan, low if best else 0.0, math.inf, "images")
    left = errors[best - 1] if best else torch.ones((), dtype=torch.float64)
    middle, right = errors[best], errors[best + 1]
    bend = left - 2 * middle + right
    shift = float(0.5 * (left - right) / bend) if bend > 0 else 0.0
    unit = start / fine
    return Way(float(curve.ways[best]) + unit * shift, low - unit, high + unit, "images")


# --- recipes ----------------------------------------------------------------------------------------------------------


def way_of(training: LocalTraining, examples: int) -> float:
    """The way of a known recipe: how far its SGD goes along a constant gradient of length one."""
    rule = training.optimiser
    if not isinstance(rule, SGD):
        raise ValueError(f"Only SGD has a way along a gradient; given {type(rule).__name__}, which scales its steps.")
    return float(training.lr) * rule.way(training.factors(examples))


def recipes(
    found: Way,
    examples: int,
    *,
    lr: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    optimiser: Rule | None = None,
    schedule: Schedule = constant,
) -> list[LocalTraining]:
    """Recipes that agree with a way and with what is known; unknown settings take common values.

    With a known learning rate: those whose way is within the bounds, nearest to the estimate first. Otherwise every
    recipe can agree, and gets the rate that makes its way the estimate. The way does not tell which of them it was;
    `ranked` on a reconstruction tells a little. If nothing is known, LocalTraining(lr=estimate / K, steps=K) is as good
    as any, with K large enough for a smooth path.
    """
    if not found.known:
        raise ValueError(f"No recipe follows from {found}. Use a reconstruction (`way_on`), or try recipes (`ranked`).")
    sizes = [batch_size] if batch_size else [size for size in BATCH_SIZES if size < examples] + [examples]
    candidates = []
    for size in sizes:
        unit = LocalTraining(lr=1.0, epochs=1, batch_size=size, optimiser=optimiser or SGD(), schedule=schedule)
        if epochs is not None:
            passes: Iterable[int] = (epochs,)
        elif lr is None:
            passes = EPOCHS
        else:
            one = lr * way_of(unit, examples)
            passes = range(1, math.ceil(found.high / one) + 1)
        for number in passes:
            length = way_of(replace(unit, epochs=number), examples)
            rate = found.estimate / length if lr is None else lr
            if lr is None or found.low <= rate * length <= found.high:
                candidates.append((abs(rate * length - found.estimate), replace(unit, epochs=number, lr=rate)))
    return [training for _, training in sorted(candidates, key=lambda pair: pair[0])]


# --- measuring --------------------------------------------------------------------------------------------------------


def _doubled(task: Task, observation: Observation, batch: Batch, knows: Knowledge) -> tuple[TargetView, Batch]:
    """The scene and the batch in float64, where the task is."""
    like = tree.like(task.weights())
    work = task.to(like.device, torch.float64)
    missing = task.fields.keys() - batch.keys() if batch else set()
    if missing:
        raise TaskError(f"The batch lacks {', '.join(sorted(missing))}: a replay needs every field of the task.")
    sizes = {name: value.shape[0] for name, value in batch.items()}
    if batch and set(sizes.values()) != {observation.num_examples}:
        raise TaskError(f"The client had {observation.num_examples} examples; the batch has {sizes}.")
    return TargetView.of(work, observation, knows), tree.to(batch, like.device, torch.float64)


def _dummies(scene: TargetView) -> Tensor:
    """N(0, 1) in model-input space, (DUMMIES, ...), for an attacker without images."""
    low, _ = scene.limits["x"]
    source = Draws(randomness.key("recipe").to(low.device))
    return source.normal((DUMMIES, *scene.task.fields["x"].shape), dtype=low.dtype)


@torch.no_grad()
def _along(scene: TargetView, points: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean prediction (points, classes) and mean sum of the classifier's inputs (points,) on the segment w0 to wT."""
    layer, batch = scene.task.classifier, {**scene.task.blank(len(images)), "x": images}

    def at(point: Tensor) -> tuple[Tensor, Tensor]:
        weights = tree.add(scene.weights, scene.update, -point)
        features = scene.task.inputs_of([layer.module], weights, batch, scene.buffers)[layer.module]
        bias = weights.get(layer.bias or "", (scene.buffers or {}).get(layer.bias or ""))
        logits = linear(features, weights[layer.weight], bias)
        return logits.softmax(-1).mean(0), features.sum(-1).mean()

    with PlainForms():
        predicted, sums = vmap(at, chunk_size=1)(points)  # one after another: every point holds all activations
    return predicted, sums
