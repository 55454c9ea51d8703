"""Which labels a client's examples had, read off the gradient of its last layer.

With logits W h + b, mean cross-entropy over B examples and p_i the softmax of example i

    dL/db_c = 1/B sum_i (p_ic - [y_i = c])            dL/dW_c = 1/B sum_i (p_ic - [y_i = c]) h_i

so a class pulls its own row down by one share per example that carries it, while every other class pushes up a little.
Each rule reads the counts of the classes off these rows, never the order of the examples: a batch has none.

Spec: the label section of "attacks_single_step", which numbers the rules; every rule names its own paper below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradleak import draws as randomness
from gradleak import tree
from gradleak.attack import Needs, Scene
from gradleak.draws import Draws
from gradleak.observation import MissingKnowledge
from gradleak.parts.predictions import gradient
from gradleak.registry import did_you_mean, named
from gradleak.rules import SGD
from gradleak.task import Batch


class RuleDoesNotApply(ValueError):
    """A label rule outside its premises; the message names the rules that do apply."""


class LabelRule(Protocol):
    """Reads the label counts off an observation: `counts(scene)` -> (classes,) whole numbers that sum to B."""

    @property
    def needs(self) -> Needs: ...

    def counts(self, scene: Scene) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Reading:
    """What a rule found, and how far it is from finding something else.

    `margin`: 1 is what an undefended client of the rule's premises gives, 0 is a toss-up. Label smoothing, mixup, noise
    and clipping with noise lower it; a low margin says that the labels are a guess.
    """

    counts: Tensor  # (classes,), whole, sum B
    margin: Tensor  # 0-d, in [0, 1]


@dataclass(frozen=True)
class Rule:
    """What all rules here share. A rule implements `read`."""

    needs: ClassVar[Needs] = frozenset()

    def read(self, scene: Scene) -> Reading:
        raise NotImplementedError

    def counts(self, scene: Scene) -> Tensor:
        return self.read(scene).counts.to(next(tree.leaves(scene.weights)).device)

    def margin(self, scene: Scene) -> Tensor:
        return self.read(scene).margin


# --- the last layer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The classifier and its mean gradient, on the CPU in double precision: rules are small and run once."""

    weight: Tensor  # (classes, features)
    rows: Tensor  # its gradient
    bias: Tensor | None  # (classes,)
    deltas: Tensor | None  # its gradient
    examples: int


def last_layer(scene: Scene) -> LastLayer:
    layer, examples = scene.task.classifier, scene.num_examples
    if layer.weight not in scene.update:
        raise RuleDoesNotApply(
            f"The client does not train the classifier {layer.weight!r}, so its labels cannot be read off its gradient: "
            "give them in Knowledge(given={'y': ...}), or use an attack that optimises them (dlg)."
        )
    names = [name for name in (layer.weight, layer.bias) if name in scene.update]
    seen = gradient(replace(scene, update={name: scene.update[name] for name in names}))
    sent, seen = (tree.to({n: values[n].detach() for n in names}, "cpu", torch.float64) for values in (scene.weights, seen))
    bias = names[1] if len(names) > 1 else None
    return LastLayer(
        weight=sent[names[0]],
        rows=seen[names[0]],
        bias=None if bias is None else sent[bias],
        deltas=None if bias is None else seen[bias],
        examples=examples,
    )


def bias_gradient(scene: Scene, rule: str) -> Tensor:
    deltas = last_layer(scene).deltas
    if deltas is None:
        raise RuleDoesNotApply(
            f"Label rule {rule!r} reads the gradient of the classifier's bias, and {scene.task.classifier.module!r} has "
            "none that is trained. Without it: 'row-products' or 'row-sum' (one example), 'llg', 'llg-star', 'llg-plus', "
            "'row-minimum'; 'auto' picks one."
        )
    return deltas


def _one_example(scene: Scene, rule: str) -> None:
    if scene.num_examples != 1:
        raise RuleDoesNotApply(
            f"Label rule {rule!r} holds for one example; this client has {scene.num_examples}. For several: 'ilrg', "
            "'bias-corrected', 'llg', 'llg-star', 'row-minimum', 'bias-sign'; 'auto' picks one."
        )


# --- from scores to counts --------------------------------------------------------------------------------------------


def _in_turn(scores: Tensor, candidates: int, examples: int) -> Reading:
    """One label each to the lowest-scored `candidates` classes, lowest first, and again from the start until B."""
    lowest, order = scores.sort(stable=True)
    candidates = max(1, candidates)
    counts = torch.zeros(scores.shape[0], dtype=torch.long)
    counts[order[:candidates]] = examples // candidates
    counts[order[: examples % candidates]] += 1
    named = min(examples, candidates)
    return Reading(counts, _gap(lowest, named))


def _gap(lowest: Tensor, named: int) -> Tensor:
    """From the last class named to the first not named, in units of the former: 1 where the latter is not negative."""
    if named == lowest.shape[0]:
        return lowest.new_ones(())
    last, following = lowest[named - 1], lowest[named]
    return torch.where(last < 0, (following - last) / -last, 0.0).nan_to_num().clamp(0, 1)


def _greedy(scores: Tensor, raw: Tensor, impact: Tensor, examples: int) -> Reading:
    """LLG's two steps: every class with raw < 0 once, most negative first; then, until B, always the lowest score.

    Every emission raises the score of its class by -impact > 0, so the t-th label of class c is worth
    scores_c - t * impact, and taking the lowest again and again is taking the lowest entries of that table.
    """
    classes, step = scores.shape[0], -impact.clamp(max=0)
    order = torch.where(raw < 0, scores, torch.inf).argsort(stable=True)
    first = order[: min(examples, int((raw < 0).sum()))]
    counts = torch.zeros(classes, dtype=torch.long)
    counts[first] = 1
    left = examples - len(first)
    table = (scores + counts * step)[:, None] + torch.arange(left + 1) * step  # (classes, left + 1)
    values, entries = table.flatten().sort(stable=True)
    counts += torch.bincount(entries[:left] // (left + 1), minlength=classes)
    # How much nearer the last label named was than the next one would be, in shares of one example.
    last = values[left - 1] if left else scores[first].max()
    margin = torch.where(step > 0, (values[left] - last) / step, 0.0).nan_to_num().clamp(0, 1)
    return Reading(counts, margin)


# --- one example ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BiasMinimum(Rule):
    """Rule A: y = argmin_c dL/db_c; only the true class is negative, p_y - 1 < 0 < p_c. Always exact for a hard label."""

    def read(self, scene: Scene) -> Reading:
        _one_example(scene, "bias-minimum")
        return _in_turn(bias_gradient(scene, "bias-minimum"), 1, 1)


@dataclass(frozen=True)
class RowProducts(Rule):
    """Rule B: y is the class whose row gradient has a non-positive inner product with that of every other class.

    dL/dW_c = (p_c - [y = c]) h, so the true row points against all others. Whatever the sign of h, and without a bias.
    Differs: cosines, so that rows of tiny probability count; where several rows qualify (all but two vanish), the
    longest is the true one, since |p_y - 1| is the sum of all other p_c.
    """

    def read(self, scene: Scene) -> Reading:
        _one_example(scene, "row-products")
        rows = last_layer(scene).rows
        if rows.shape[0] < 3:
            raise RuleDoesNotApply(
                "Label rule 'row-products' needs three classes: the gradient rows of two are each other's negative. Use "
                "'bias-minimum', or 'row-sum' where the features are positive."
            )
        lengths = rows.norm(dim=1)
        units = rows / lengths.clamp_min(torch.finfo(rows.dtype).tiny)[:, None]
        worst = (units @ units.T).fill_diagonal_(-torch.inf).amax(1)  # (classes,): the least opposed other row
        worst = torch.where(lengths > 0, worst, torch.inf)
        longest = torch.where(worst <= 0, -1 - lengths / lengths.max(), worst)
        counts = torch.zeros(rows.shape[0], dtype=torch.long)
        counts[longest.argmin()] = 1
        first, second = longest.sort().values[:2].clamp(-1, 1)
        return Reading(counts, ((second - first) / 2).nan_to_num())


@dataclass(frozen=True)
class RowSum(Rule):
    """Rule C: y = argmin_c sum_m dL/dW_cm, as the code of iDLG, IG, GIAS, CPL, GGL and GIFD has it.

    Valid only where sum_m h_m > 0 (sigmoid, ReLU): wrong for tanh, ELU, GELU or normalised features. For comparisons.
    """

    def read(self, scene: Scene) -> Reading:
        _one_example(scene, "row-sum")
        return _in_turn(last_layer(scene).rows.sum(1), 1, 1)


# --- several examples -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowMinimum(Rule):
    """The B classes with the smallest min_m dL/dW_cm. Assumes features h >= 0 and no label twice.

    Differs: with more examples than classes, which the paper excludes, every class is named in turn, lowest first.
    """

    def read(self, scene: Scene) -> Reading:
        lowest = last_layer(scene).rows.amin(1)
        return _in_turn(lowest, lowest.shape[0], scene.num_examples)


@dataclass(frozen=True)
class BiasSign(Rule):
    """All classes with dL/db_c < 0; the most negative B of them where there are more.

    Differs from the `breaching` library, which fills up with random classes: here the negative ones are named again in
    turn, most negative first, so that a run repeats.
    """

    def read(self, scene: Scene) -> Reading:
        deltas = bias_gradient(scene, "bias-sign")
        return _in_turn(deltas, int((deltas < 0).sum()), scene.num_examples)


@dataclass(frozen=True)
class BiasCorrected(Rule):
    """LLG on the bias: scores dL/db_c, impact sum_{c: dL/db_c < 0} dL/db_c / B. Blind to the scale of the update."""

    def read(self, scene: Scene) -> Reading:
        deltas = bias_gradient(scene, "bias-corrected")
        impact = deltas.clamp(max=0).sum() / scene.num_examples
        return _greedy(deltas, deltas, impact, scene.num_examples)


@dataclass(frozen=True)
class LLG(Rule):
    """Label leakage from gradients: row sums s_c = sum_m dL/dW_cm, each example of c worth the impact m.

    m = 1/B (1 + 1/C) sum_{c: s_c < 0} s_c. Every class with s_c < 0 is named once and s_c <- s_c - m; then, until B,
    the class of the lowest s_c is named and s_c <- s_c - m. Assumes sum_m h_m > 0; blind to the scale of the update.
    """

    def read(self, scene: Scene) -> Reading:
        sums = last_layer(scene).rows.sum(1)
        impact = sums.clamp(max=0).sum() / scene.num_examples * (1 + 1 / sums.shape[0])
        return _greedy(sums, sums, impact, scene.num_examples)


def _calibrated(scene: Scene, labels: Tensor, sums: Tensor) -> Reading:
    """LLG with impact and offset measured by the attacker; sums (labels, classes), one row per batch of one label.

    m = (1 + 1/C) mean_c s_c(batch of c) / B and o_c = mean of s_c over batches of other labels; scores are s - o, and
    the first step still looks at the sign of s itself. m and o have the client's own scale: `training` is needed.
    """
    own = last_layer(scene).rows.sum(1)
    classes = own.shape[0]
    sums = sums.to("cpu", torch.float64)
    mine = torch.zeros_like(sums, dtype=torch.bool)
    mine[torch.arange(len(labels)), labels.cpu()] = True
    impact = sums[mine].mean() / scene.num_examples * (1 + 1 / classes)
    offset = sums.masked_fill(mine, 0).sum(0) / (~mine).sum(0).clamp_min(1)
    return _greedy(own - offset, own, impact, scene.num_examples)


def _row_sums(scene: Scene, batch: Batch) -> Tensor:
    """s_c of the gradient that this batch would give, (classes,)."""
    name = scene.task.classifier.weight
    rest = {key: value for key, value in scene.weights.items() if key != name}

    def loss(weight: Tensor) -> Tensor:
        return scene.task.loss({**rest, name: weight}, batch, scene.buffers)[0]

    return grad(loss)(scene.weights[name]).sum(1)


DUMMIES: dict[str, Callable[[tuple[int, ...], Draws], Tensor]] = {
    "zeros": lambda shape, draws: torch.zeros(shape),
    "ones": lambda shape, draws: torch.ones(shape),
    "random": lambda shape, draws: draws.uniform(shape),
}


@dataclass(frozen=True)
class LLGStar(Rule):
    """LLG*: impact and offset measured on the client's model with dummy images, one batch of B for every class.

    Differs: the same dummies carry each label in turn, so one forward pass serves all classes.
    """

    needs: ClassVar[Needs] = frozenset({"training"})
    dummy: str = "random"
    repeats: int = 10

    def read(self, scene: Scene) -> Reading:
        _scaled(scene, "llg-star")
        weight = scene.weights[scene.task.classifier.weight]
        labels = torch.arange(weight.shape[0], device=weight.device)
        chunk = max(1, 2**25 // weight.numel())  # labels at a time: each has a gradient of the classifier's size
        total = weight.new_zeros(())
        for repeat in range(self.repeats if self.dummy == "random" else 1):
            batch = self.images(scene, Draws(randomness.key("llg-star", repeat)))
            alike = lambda y, batch=batch: _row_sums(scene, {**batch, "y": y.expand(scene.num_examples)})  # noqa: E731
            total = total + vmap(alike, chunk_size=chunk)(labels)  # (classes, classes): label, s_c
        return _calibrated(scene, labels, total / (self.repeats if self.dummy == "random" else 1))

    def images(self, scene: Scene, source: Draws) -> Batch:
        batch = scene.task.blank(scene.num_examples)
        for name, (low, high) in scene.limits.items():
            batch[name] = low + DUMMIES[self.dummy](tuple(batch[name].shape), source).to(low) * (high - low)
        return batch


@dataclass(frozen=True)
class LLGPlus(Rule):
    """LLG+: impact and offset measured on labelled images of the attacker's own, `Knowledge(public=...)`.

    `public` has `x` (N, ...) in [0, 1] and `y` (N,), as `gradleak.data.load` gives them. Differs: instead of repeated
    draws of B images of a class, the mean over up to `examples` of them, which is what the draws estimate.
    """

    needs: ClassVar[Needs] = frozenset({"training", "public"})
    examples: int = 64

    def read(self, scene: Scene) -> Reading:
        _scaled(scene, "llg-plus")
        public: Any = scene.knows.public
        if not (hasattr(public, "x") and hasattr(public, "y")):
            raise MissingKnowledge(
                "Label rule 'llg-plus' needs labelled images of the attacker's own: Knowledge(public=...) with x (N, ...) "
                f"in [0, 1] and y (N,), as gradleak.data.load gives them; given {type(public).__name__}."
            )
        weight = scene.weights[scene.task.classifier.weight]
        labels = public.y.unique()
        low, high = scene.limits["x"]
        sums = []
        for label in labels:
            images = public.x[public.y == label][: self.examples].to(weight)
            batch = {"x": low + images * (high - low), "y": torch.full((len(images),), int(label), device=weight.device)}
            sums.append(_row_sums(scene, batch))
        return _calibrated(scene, labels, torch.stack(sums))


def _scaled(scene: Scene, rule: str) -> None:
    if scene.knows.training is None:
        raise MissingKnowledge(
            f"Label rule {rule!r} compares absolute values, and an update is lr times a gradient: pass "
            "Knowledge(training=LocalTraining(lr=...)), or use 'bias-corrected' or 'llg', which are blind to the scale."
        )


@dataclass(frozen=True)
class ILRG(Rule):
    """Instance-wise label restoration: counts from the probabilities that each class's mean feature gives.

    1. Mean feature of class c:  h_c = (dL/dW_c) / (dL/db_c)
    2. Its probabilities:        p_c = softmax(W h_c + b)
    3. Least squares for k:      sum_j k_j = B  and, for every class i,  sum_j k_j p_j[i] - k_i = B dL/db_i
    4. Whole numbers:            negatives are 0; round; more than B is 0; then repair the sum

    Differs: the repair takes from the entries rounded up furthest and gives to those rounded down furthest, in both
    directions and as often as it takes (the authors' code slices wrongly where the sum is too small).
    """

    needs: ClassVar[Needs] = frozenset({"training"})
    limit: float = 1e10  # of a mean feature: a row whose bias gradient vanishes says nothing, and must not overflow

    def read(self, scene: Scene) -> Reading:
        deltas = bias_gradient(scene, "ilrg")
        _scaled(scene, "ilrg")
        layer, examples, classes = last_layer(scene), scene.num_examples, deltas.shape[0]
        assert layer.bias is not None  # as there is a gradient of it
        divisors = torch.where(deltas == 0, 1e-64, deltas)
        features = (layer.rows / divisors[:, None]).clamp(-self.limit, self.limit)  # (classes, features)
        probabilities = (features @ layer.weight.T + layer.bias).softmax(1)  # (classes, classes)
        system = torch.cat([probabilities.T - torch.eye(classes), torch.ones(1, classes)])
        wanted = torch.cat([examples * deltas, deltas.new_tensor([examples])])
        real = torch.linalg.lstsq(system, wanted[:, None], driver="gelsd").solution[:, 0]
        counts = whole_counts(real, examples)
        return Reading(counts, (1 - 2 * (real - counts).abs().max()).clamp(0, 1))


def whole_counts(real: Tensor, examples: int) -> Tensor:
    """The whole, non-negative numbers with sum B that iLRG makes of real ones, (classes,)."""
    rounded = real.clamp_min(0).round()
    rounded = torch.where(rounded > examples, 0.0, rounded)
    short = examples - int(rounded.sum())
    if short == 0:
        return rounded.long()
    # The t-th unit given to (taken from) an entry moves its error to rounded +- t - real: take the best units of all.
    units = torch.arange(short if short > 0 else int(rounded.max()))
    error = (rounded - real)[:, None]
    cost = error + units if short > 0 else torch.where(units < rounded[:, None], units - error, torch.inf)
    best = cost.flatten().argsort(stable=True)[: abs(short)] // len(units)
    change = torch.bincount(best, minlength=len(real))
    return rounded.long() + (change if short > 0 else -change)
