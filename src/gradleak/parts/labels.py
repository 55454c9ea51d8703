"""Which labels a client's examples had, read off the gradient of its last layer.

With logits W h + b, mean cross-entropy over B examples and p_i the softmax of example i

    dL/db_c = 1/B sum_i (p_ic - [y_i = c])            dL/dW_c = 1/B sum_i (p_ic - [y_i = c]) h_i

so an example pulls the row of its own class down and pushes every other row up a little. The rules read off how many
examples each of the C classes has, never which example has which label: a batch has no order.

Share of labels found (LeNet-5, 64 images of CIFAR-100) on the untrained network, and on one trained to 13, 43 and 97 %
accuracy on these images: iLRG 1.00, 0.70, 0.61, 0.18; bias-counts 1.00, 0.98, 0.86, 0.55; bias-corrected 0.98, 0.94,
0.81, 0.47; LLG 0.90, 0.84, 0.80, 0.48; row-minimum 0.74, 0.74, 0.74, 0.71. `auto` chooses accordingly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradleak import draws as randomness
from gradleak import tree
from gradleak.draws import Draws
from gradleak.observation import MissingKnowledge
from gradleak.parts.fields import RuleDoesNotApply, last_layer
from gradleak.registry import did_you_mean, named
from gradleak.rules import SGD
from gradleak.scene import Needs, Scene
from gradleak.task import Batch

IDLG = "Zhao, Mopuri, Bilen, iDLG: Improved Deep Leakage from Gradients, 2020"
LEAKAGE = "Wainakh et al., User-Level Label Leakage from Gradients in Federated Learning, PoPETs 2022"
RESTORATION = "Ma et al., Instance-wise Batch Label Restoration via Gradients in Federated Learning, ICLR 2023"


@dataclass(frozen=True, eq=False)
class Reading:
    """What a rule found, and how far it is from finding something else.

    `margin`: 1 is what clients that meet the rule's premises give, 0 is a toss-up. Label smoothing, mixup, noise, and
    clipping with noise lower it.
    """

    counts: Tensor  # (classes,), whole, sum B
    margin: Tensor  # 0-d, in [0, 1]


@dataclass(frozen=True)
class Rule:
    """What all rules share. Each implements `read`; `counts` is what a `LabelRule` promises."""

    needs: ClassVar[Needs] = frozenset()

    def read(self, scene: Scene) -> Reading:
        raise NotImplementedError

    def counts(self, scene: Scene) -> Tensor:
        return self.read(scene).counts.to(next(tree.leaves(scene.weights)).device)

    def margin(self, scene: Scene) -> Tensor:
        return self.read(scene).margin


# --- premises ---------------------------------------------------------------------------------------------------------


def _bias_gradient(scene: Scene, rule: str) -> Tensor:
    deltas = last_layer(scene).deltas
    if deltas is None:
        raise RuleDoesNotApply(
            f"Label rule {rule!r} reads the gradient of the classifier's bias, and {scene.task.classifier.module!r} "
            "has none that is trained. Rules that do without: 'row-products' and 'row-sum' (one example), "
            "'row-minimum', 'llg', 'llg-star', 'llg-plus'; 'auto' picks one."
        )
    return deltas


def _demand_one_example(scene: Scene, rule: str) -> None:
    if scene.num_examples != 1:
        raise RuleDoesNotApply(
            f"Label rule {rule!r} holds for one example; this client has {scene.num_examples}. Rules for several: "
            "'ilrg', 'bias-counts', 'bias-corrected', 'bias-sign', 'llg', 'llg-star', 'llg-plus', 'row-minimum'; "
            "'auto' picks one."
        )


def _demand_training(scene: Scene, rule: str) -> None:
    if scene.knows.training is None:
        raise MissingKnowledge(
            f"Label rule {rule!r} compares absolute values, and an update is lr times a gradient: pass "
            "Knowledge(training=LocalTraining(lr=...)), or use 'bias-counts', 'bias-corrected' or 'llg'."
        )


def _scale_is_known(scene: Scene) -> bool:
    """Whether `gradient(scene)` is a mean gradient in absolute terms, as far as the attacker can tell."""
    training = scene.knows.training
    if training is None or scene.knows.defence is not None or not isinstance(training.optimiser, SGD):
        return False
    return not training.optimiser.momentum or len(training.order(scene.num_examples)) == 1


# --- from scores to counts --------------------------------------------------------------------------------------------


def _in_turn(scores: Tensor, candidates: int, examples: int) -> Reading:
    """One label each to the lowest-scored `candidates` classes, lowest first, and again from the start until B.

    Margin: from the last class named to the first not named, in units of the former; 1 where the latter is positive.
    """
    lowest, order = scores.sort(stable=True)
    counts = torch.zeros_like(order)
    counts[order[:candidates]] = examples // candidates
    counts[order[: examples % candidates]] += 1
    named = int((counts > 0).sum())
    if named == len(lowest):
        return Reading(counts, lowest.new_ones(()))
    last, following = lowest[named - 1], lowest[named]
    return Reading(counts, torch.where(last < 0, (following - last) / -last, 0.0).nan_to_num().clamp(0, 1))


def _greedy(scores: Tensor, raw: Tensor, impact: Tensor, examples: int) -> Reading:
    """LLG's two steps: every class with raw < 0 once, most negative first; then, until B, always the lowest score.

    Each label raises the score of its class by -impact > 0, so the t-th one of class c is worth scores_c - t * impact,
    and taking the lowest score B times is taking the B lowest entries of that table.
    Margin: from the last label named to the next one, in shares of one example.
    """
    step = -impact.clamp(max=0)
    first = raw.argsort(stable=True)[: min(examples, int((raw < 0).sum()))]
    counts = torch.zeros_like(raw, dtype=torch.long)
    counts[first] = 1
    left = examples - len(first)
    table = (scores + counts * step)[:, None] + torch.arange(left + 1) * step  # (classes, left + 1)
    values, entries = table.flatten().sort(stable=True)
    counts += torch.bincount(entries[:left] // (left + 1), minlength=len(raw))
    last = values[left - 1] if left else scores[first].max()
    return Reading(counts, torch.where(step > 0, (values[left] - last) / step, 0.0).nan_to_num().clamp(0, 1))


def _rounded(real: Tensor, examples: int) -> Reading:
    """Margin: 1 where the real counts are whole, 0 where one of them is half a label or more away from its whole."""
    counts = whole_counts(real, examples)
    return Reading(counts, (1 - 2 * (real - counts).abs().max()).clamp(0, 1))


def whole_counts(real: Tensor, examples: int) -> Tensor:
    """iLRG's whole numbers: negatives are 0; round; more than B is 0; then repair the sum to B. (classes,)

    The repair takes from the entries that were rounded up furthest, or gives to those rounded down furthest, one unit
    at a time: the t-th unit moves the error of an entry to rounded +- t - real, and the best units are moved.
    """
    rounded = real.clamp_min(0).round()
    rounded = torch.where(rounded > examples, 0.0, rounded)
    missing = examples - int(rounded.sum())
    error = (rounded - real)[:, None]
    units = torch.arange(max(missing, int(rounded.max()), 1))
    if missing > 0:
        cost, sign = error + units, 1
    else:
        cost, sign = torch.where(units < rounded[:, None], units - error, torch.inf), -1  # below 0 nothing is taken
    moved = cost.flatten().argsort(stable=True)[: abs(missing)] // len(units)
    return rounded.long() + sign * torch.bincount(moved, minlength=len(real))


# --- one example ------------------------------------------------------------------------------------------------------


@named("bias-minimum", kind="labels", paper=IDLG, status="verified")
@dataclass(frozen=True)
class BiasMinimum(Rule):
    """Rule A, one example: y = argmin_c dL/db_c.

    Only the true class is negative, p_y - 1 < 0 < p_c. Always exact for a hard label.
    """

    def read(self, scene: Scene) -> Reading:
        _demand_one_example(scene, "bias-minimum")
        return _in_turn(_bias_gradient(scene, "bias-minimum"), 1, 1)


@named("row-products", kind="labels", paper=IDLG, status="verified")
@dataclass(frozen=True)
class RowProducts(Rule):
    """Rule B, one example: the class whose gradient row has no positive inner product with any other row.

    dL/dW_c = (p_c - [y = c]) h, so the true row points against all others, whatever the sign of h; no bias is needed.
    Differs: cosines, so that rows of tiny probability count; where several rows qualify (all but two vanish), the
    longest is the true one, since 1 - p_y is the sum of all other p_c.
    """

    def read(self, scene: Scene) -> Reading:
        _demand_one_example(scene, "row-products")
        rows = last_layer(scene).rows
        if rows.shape[0] < 3:
            raise RuleDoesNotApply(
                "Label rule 'row-products' needs three classes: with two, each gradient row is the other's negative. "
                "Use 'bias-minimum', or 'row-sum' where the features are positive."
            )
        lengths = rows.norm(dim=1)
        units = rows / lengths.clamp_min(torch.finfo(rows.dtype).tiny)[:, None]
        nearest = (units @ units.T).fill_diagonal_(-torch.inf).amax(1)  # (classes,): cosine to the least opposed row
        nearest = torch.where(lengths > 0, nearest, torch.inf)
        scores = torch.where(nearest <= 0, -1 - lengths / lengths.max(), nearest)
        counts = torch.zeros_like(scores, dtype=torch.long)
        counts[scores.argmin()] = 1
        first, second = scores.sort().values[:2].clamp(-1, 1)
        return Reading(counts, (second - first) / 2)


@named("row-sum", kind="labels", paper=IDLG, status="verified")
@dataclass(frozen=True)
class RowSum(Rule):
    """Rule C, one example: y = argmin_c sum_m dL/dW_cm, as the code of iDLG, IG, GIAS, CPL, GGL and GIFD has it.

    Valid only where sum_m h_m > 0 (sigmoid, ReLU): wrong for tanh, ELU, GELU or normalised features. For comparisons.
    """

    def read(self, scene: Scene) -> Reading:
        _demand_one_example(scene, "row-sum")
        return _in_turn(last_layer(scene).rows.sum(1), 1, 1)


# --- which classes are present ----------------------------------------------------------------------------------------


@named("row-minimum", kind="labels", paper="Yin et al., See through Gradients (GradInversion), CVPR 2021")
@dataclass(frozen=True)
class RowMinimum(Rule):
    """The B classes with the smallest min_m dL/dW_cm. Assumes features h >= 0 and no label twice.

    Differs: with more examples than classes, which the paper excludes, every class is named in turn, lowest first.
    """

    def read(self, scene: Scene) -> Reading:
        lowest = last_layer(scene).rows.amin(1)
        return _in_turn(lowest, len(lowest), scene.num_examples)


@named("lowest-sums", kind="labels", paper=f"{IDLG}; its rule for several examples")
@dataclass(frozen=True)
class LowestSums(Rule):
    """The B classes with the smallest sum_m dL/dW_cm: iDLG's rule for several. Assumes sum_m h_m > 0, no label twice.

    With more examples than classes every class is named in turn, lowest first, as `row-minimum` does.
    """

    def read(self, scene: Scene) -> Reading:
        sums = last_layer(scene).rows.sum(1)
        return _in_turn(sums, len(sums), scene.num_examples)


@named("bias-sign", kind="labels", paper="the rule 'analytic' of the breaching library")
@dataclass(frozen=True)
class BiasSign(Rule):
    """All classes with dL/db_c < 0; the most negative B of them where there are more.

    Differs: the library fills up with random classes; here the negative ones are named again in turn, most negative
    first, so that a run repeats.
    """

    def read(self, scene: Scene) -> Reading:
        deltas = _bias_gradient(scene, "bias-sign")
        return _in_turn(deltas, max(1, int((deltas < 0).sum())), scene.num_examples)


# --- how many of each: LLG and its kin --------------------------------------------------------------------------------


@named("llg", kind="labels", paper=LEAKAGE)
@dataclass(frozen=True)
class LLG(Rule):
    """Label leakage from gradients: row sums s_c = sum_m dL/dW_cm, each example of a class worth the impact m.

    m = 1/B (1 + 1/C) sum_{c: s_c < 0} s_c. Every class with s_c < 0 is named once and s_c <- s_c - m; then, until B,
    the class of the lowest s_c is named and s_c <- s_c - m. Assumes sum_m h_m > 0; blind to the scale of the update.
    """

    def read(self, scene: Scene) -> Reading:
        sums = last_layer(scene).rows.sum(1)
        impact = sums.clamp(max=0).sum() / scene.num_examples * (1 + 1 / len(sums))
        return _greedy(sums, sums, impact, scene.num_examples)


@named("bias-corrected", kind="labels", paper=f"{LEAKAGE}; on the bias, as in the breaching library")
@dataclass(frozen=True)
class BiasCorrected(Rule):
    """LLG on the bias: scores dL/db_c, impact sum_{c: dL/db_c < 0} dL/db_c / B. Blind to the scale of the update."""

    def read(self, scene: Scene) -> Reading:
        deltas = _bias_gradient(scene, "bias-corrected")
        impact = deltas.clamp(max=0).sum() / scene.num_examples
        return _greedy(deltas, deltas, impact, scene.num_examples)


DUMMIES: dict[str, Callable[[tuple[int, ...], Draws], Tensor]] = {
    "zeros": lambda shape, draws: torch.zeros(shape),
    "ones": lambda shape, draws: torch.ones(shape),
    "random": lambda shape, draws: draws.uniform(shape),
}


@named("llg-star", kind="labels", paper=LEAKAGE)
@dataclass(frozen=True)
class LLGStar(Rule):
    """LLG*: impact and offset measured on the client's model with dummy images, a batch of B for every class.

    `dummy`: "zeros", "ones" or "random" images. Differs: the same dummies carry each label in turn, so that one forward
    pass serves all classes.
    """

    needs: ClassVar[Needs] = frozenset({"training"})
    dummy: str = "random"
    repeats: int = 10

    def __post_init__(self) -> None:
        if self.dummy not in DUMMIES:
            raise ValueError(f"Unknown dummy {self.dummy!r}.{did_you_mean(self.dummy, DUMMIES)}")

    def read(self, scene: Scene) -> Reading:
        _demand_training(scene, "llg-star")
        weight = scene.weights[scene.task.classifier.weight]
        labels = torch.arange(weight.shape[0], device=weight.device)
        at_once = max(1, 2**25 // weight.numel())  # labels: each has a gradient of the classifier's size
        total = weight.new_zeros(())
        for repeat in range(self.repeats):
            batch = self._images(scene, Draws(randomness.key("llg-star", repeat)))
            alike = lambda y, batch=batch: _row_sums(scene, {**batch, "y": y.expand(scene.num_examples)})  # noqa: E731
            total = total + vmap(alike, chunk_size=at_once)(labels)  # (classes, classes): label, s_c
        return _calibrated(scene, labels, total / self.repeats)

    def _images(self, scene: Scene, source: Draws) -> Batch:
        batch = scene.task.blank(scene.num_examples)
        for name, (low, high) in scene.limits.items():
            batch[name] = low + DUMMIES[self.dummy](tuple(batch[name].shape), source).to(low) * (high - low)
        return batch


@named("llg-plus", kind="labels", paper=LEAKAGE)
@dataclass(frozen=True)
class LLGPlus(Rule):
    """LLG+: impact and offset measured on labelled images of the attacker's own, `Knowledge(public=...)`.

    `public` has `x` (N, ...) in [0, 1] and `y` (N,), as `gradleak.data.load` gives them. Differs: not the mean over
    repeated draws of B images of a class, but what it estimates, the mean over up to `examples` of them.
    """

    needs: ClassVar[Needs] = frozenset({"training", "public"})
    examples: int = 64

    def read(self, scene: Scene) -> Reading:
        _demand_training(scene, "llg-plus")
        public: Any = scene.knows.public
        if not (hasattr(public, "x") and hasattr(public, "y")):
            raise MissingKnowledge(
                "Label rule 'llg-plus' needs labelled images of the attacker's own: Knowledge(public=...) with x "
                f"(N, ...) in [0, 1] and y (N,), as gradleak.data.load gives them; given {type(public).__name__}."
            )
        labels, (low, high) = public.y.unique(), scene.limits["x"]
        sums = []
        for label in labels:
            images = public.x[public.y == label][: self.examples].to(low)
            y = torch.full((len(images),), int(label), device=low.device)
            sums.append(_row_sums(scene, {"x": low + images * (high - low), "y": y}))
        return _calibrated(scene, labels, torch.stack(sums))


def _row_sums(scene: Scene, batch: Batch) -> Tensor:
    """s_c of the gradient that this batch would give, (classes,)."""
    name = scene.task.classifier.weight
    loss = lambda weight: scene.task.loss({**scene.weights, name: weight}, batch, scene.buffers)[0]  # noqa: E731
    return grad(loss)(scene.weights[name]).sum(1)


def _calibrated(scene: Scene, labels: Tensor, sums: Tensor) -> Reading:
    """LLG with impact and offset measured by the attacker; sums (labels, classes), one row per batch of one label.

    m = (1 + 1/C) mean_c s_c(batch of c) / B and o_c = mean of s_c over the batches of other labels; scores are s - o,
    while the first step still looks at the sign of s itself. m and o are absolute: the client's scale must be known.
    """
    own = last_layer(scene).rows.sum(1)
    sums = sums.to("cpu", torch.float64)
    same = labels.cpu()[:, None] == torch.arange(len(own))
    impact = sums[same].mean() / scene.num_examples * (1 + 1 / len(own))
    offset = sums.masked_fill(same, 0).sum(0) / (~same).sum(0).clamp_min(1)
    return _greedy(own - offset, own, impact, scene.num_examples)


# --- how many of each: the identity solved for the counts -------------------------------------------------------------


@named("ilrg", kind="labels", paper=RESTORATION, status="verified")
@dataclass(frozen=True)
class ILRG(Rule):
    """Instance-wise label restoration: counts from the probabilities that each class's mean feature gives.

    1. Mean feature of class c:  h_c = (dL/dW_c) / (dL/db_c)
    2. Its probabilities:        p_c = softmax(W h_c + b)
    3. Least squares for k:      sum_j k_j = B  and, for every class i,  sum_j k_j p_j[i] - k_i = B dL/db_i
    4. Whole numbers:            `whole_counts`

    Differs: the repair of the sum works in both directions (the authors' code slices wrongly where it is too small).
    `ridge` (ours, off by default) tames step 1 where n_c / B is close to the mean probability of c, so that the divisor
    all but vanishes, as happens with more examples than classes: with l = ridge / B and h the mean of all h_c weighted
    by |dL/db_c|, h_c <- (|dL/db_c| h_c + l h) / (|dL/db_c| + l). On the untrained LeNet-5 and 1024 images of CIFAR-100,
    ridge 1 finds all counts in every batch instead of in 5 % of them.
    """

    needs: ClassVar[Needs] = frozenset({"training"})
    ridge: float = 0.0
    limit: float = 1e10  # of a mean feature: a row whose bias gradient vanishes says nothing, and must not overflow

    def read(self, scene: Scene) -> Reading:
        return _rounded(self.solution(scene), scene.num_examples)

    def solution(self, scene: Scene) -> Tensor:
        """The real counts k of step 3, (classes,)."""
        deltas = _bias_gradient(scene, "ilrg")
        _demand_training(scene, "ilrg")
        layer, classes = last_layer(scene), len(deltas)
        assert layer.bias is not None  # there is a gradient of it
        signs = torch.where(deltas < 0, -1.0, 1.0)
        rows, sizes = signs[:, None] * layer.rows, deltas.abs().clamp_min(1e-64)
        mean, ridge = rows.sum(0) / sizes.sum(), self.ridge / scene.num_examples
        features = (rows + ridge * mean) / (sizes + ridge)[:, None]  # (classes, features)
        features = features.clamp(-self.limit, self.limit)
        probabilities = (features @ layer.weight.T + layer.bias).softmax(1)  # (classes, classes)
        system = torch.cat([probabilities.T - torch.eye(classes), torch.ones(1, classes)])
        wanted = scene.num_examples * torch.cat([deltas, deltas.new_ones(1)])
        # By singular values, like the authors' pseudo-inverse: sharp probabilities make the system rank-deficient.
        return torch.linalg.lstsq(system, wanted[:, None], driver="gelsd").solution[:, 0]


@named("bias-counts", kind="labels", paper="ours")
@dataclass(frozen=True)
class BiasCounts(Rule):
    """The bias identity solved for the counts, with a uniform mean prediction: n_c = B (1/C - dL/db_c / a).

    a = 1 where the client's recipe gives the gradient its absolute scale. Elsewhere it is read off the negative entries
    N: were they all the classes present and the mean prediction uniform, sum_N dL/db_c = -a (1 - |N| / C).

    An example is thus worth 1/B, what it adds to the identity; LLG's impact is (1 - sum_N p_c) / B, half of it where
    half of the classes are present. On trained networks this holds up better than iLRG: there the probabilities of a
    mean feature are no longer the mean of the probabilities.
    """

    def read(self, scene: Scene) -> Reading:
        deltas = _bias_gradient(scene, "bias-counts")
        classes, negative = len(deltas), deltas < 0
        scale = deltas.new_ones(())
        if not _scale_is_known(scene) and negative.any():
            scale = -deltas[negative].sum() / (1 - negative.sum() / classes).clamp_min(1 / classes)
        return _rounded(scene.num_examples * (1 / classes - deltas / scale), scene.num_examples)


# --- the choice -------------------------------------------------------------------------------------------------------


@named("auto", kind="labels", paper="ours")
@dataclass(frozen=True)
class Auto(Rule):
    """The strongest rule that applies, by what the observation and the threat model offer.

    One example: bias-minimum; without a bias row-products (row-sum for two classes). Several, and several steps by a
    recipe that is known: path-bias (`label_counts.path_rule`). Several otherwise: iLRG where the scale is known and its
    solution makes sense, with a ridge; else bias-counts; without a bias LLG.

    iLRG makes sense where hardly any of its real counts are negative. They sum to less than 0.002 B on untrained
    networks, where it is exact, and to 0.02 B and far more on trained ones, where it fails (8 to 1024 examples). In
    small batches less than a quarter of one label is taken for rounding.
    """

    negative: float = 0.01  # share of B that negative counts may make up
    ridge: float = 1.0

    def rule(self, scene: Scene) -> Rule:
        """The rule that reads this observation."""
        layer = last_layer(scene)
        if scene.num_examples == 1:
            return BiasMinimum() if layer.deltas is not None else RowProducts() if len(layer.rows) > 2 else RowSum()
        if along := _label_counts.path_rule(scene):
            return along
        if layer.deltas is None:
            return LLG()
        sensible = _scale_is_known(scene) and self.sensible(ILRG().solution(scene), scene.num_examples)
        return ILRG(ridge=self.ridge) if sensible else BiasCounts()

    def sensible(self, real: Tensor, examples: int) -> bool:
        return bool(-real.clamp(max=0).sum() <= max(self.negative * examples, 0.25))  # a quarter label says nothing

    def read(self, scene: Scene) -> Reading:
        return self.rule(scene).read(scene)


# Rules for updates of many steps, and for signs, register themselves. Last, since they build on what is above.
from gradleak.parts import label_counts as _label_counts  # noqa: E402, F401
from gradleak.parts import sign_labels as _sign_labels  # noqa: E402, F401
