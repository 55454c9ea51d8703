"""Which labels a client's examples had, read off the gradient of its last layer.

With logits W h + b, mean cross-entropy over B examples and p_i the softmax of example i

    dL/db_c = 1/B sum_i (p_ic - [y_i = c])            dL/dW_c = 1/B sum_i (p_ic - [y_i = c]) h_i

so an example lowers the row of its own class and raises every other row a little. The rules read off how many examples
each of the C classes has, never which example has which label: a batch has no order.

Share of labels found (LeNet-5, 64 images of CIFAR-100) on the untrained network, and on one trained to 13, 43 and 97 %
accuracy on these images: iLRG 1.00, 0.70, 0.61, 0.18; bias-counts 1.00, 0.98, 0.86, 0.55; bias-corrected 0.98, 0.94,
0.81, 0.47; LLG 0.90, 0.84, 0.80, 0.48; row-minimum 0.74, 0.74, 0.74, 0.71. `auto` chooses accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradleak.core.registry import named
from gradleak.parts.fields import RuleDoesNotApply, last_layer
from gradleak.parts.labels import signs as _sign_labels  # noqa: F401 (its rules register themselves)
from gradleak.parts.labels.counts import path_rule
from gradleak.parts.labels.llg import LLG
from gradleak.parts.labels.readings import (
    Reading,
    Rule,
    bias_gradient,
    demand_one_example,
    demand_training,
    in_turn,
    rounded_counts,
    scale_is_known,
)
from gradleak.parts.protocols import Needs
from gradleak.parts.view import TargetView

IDLG = "Zhao, Mopuri, Bilen, iDLG: Improved Deep Leakage from Gradients, 2020"
RESTORATION = "Ma et al., Instance-wise Batch Label Restoration via Gradients in Federated Learning, ICLR 2023"


# --- one example ------------------------------------------------------------------------------------------------------


@named("bias-minimum", kind="labels", paper=IDLG, status="verified")
@dataclass(frozen=True)
class BiasMinimum(Rule):
    """Rule A, one example: y = argmin_c dL/db_c.

    Only the true class is negative, p_y - 1 < 0 < p_c. Always exact for a hard label.
    """

    def read(self, scene: TargetView) -> Reading:
        demand_one_example(scene, "bias-minimum")
        return in_turn(bias_gradient(scene, "bias-minimum"), 1, 1)


@named("row-products", kind="labels", paper=IDLG, status="verified")
@dataclass(frozen=True)
class RowProducts(Rule):
    """Rule B, one example: the class whose gradient row has no positive inner product with any other row.

    dL/dW_c = (p_c - [y = c]) h, so the true row points against all others, whatever the sign of h; no bias is needed.
    Differs: cosines, so that rows of tiny probability count; where several rows qualify (all but two vanish), the
    longest is the true one, since 1 - p_y is the sum of all other p_c.
    """

    def read(self, scene: TargetView) -> Reading:
        demand_one_example(scene, "row-products")
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

    def read(self, scene: TargetView) -> Reading:
        demand_one_example(scene, "row-sum")
        return in_turn(last_layer(scene).rows.sum(1), 1, 1)


# --- which classes are present ----------------------------------------------------------------------------------------


@named("row-minimum", kind="labels", paper="Yin et al., See through Gradients (GradInversion), CVPR 2021")
@dataclass(frozen=True)
class RowMinimum(Rule):
    """The B classes with the smallest min_m dL/dW_cm. Assumes features h >= 0 and no label twice.

    Differs: with more examples than classes, which the paper excludes, every class is named in turn, lowest first.
    """

    def read(self, scene: TargetView) -> Reading:
        lowest = last_layer(scene).rows.amin(1)
        return in_turn(lowest, len(lowest), scene.num_examples)


@named("lowest-sums", kind="labels", paper=f"{IDLG}; its rule for several examples")
@dataclass(frozen=True)
class LowestSums(Rule):
    """The B classes with the smallest sum_m dL/dW_cm: iDLG's rule for several. Assumes sum_m h_m > 0, no label twice.

    With more examples than classes every class is named in turn, lowest first, as `row-minimum` does.
    """

    def read(self, scene: TargetView) -> Reading:
        sums = last_layer(scene).rows.sum(1)
        return in_turn(sums, len(sums), scene.num_examples)


@named("bias-sign", kind="labels", paper="the rule 'analytic' of the breaching library")
@dataclass(frozen=True)
class BiasSign(Rule):
    """All classes with dL/db_c < 0; the most negative B of them where there are more.

    Differs: the library fills up with random classes; here the negative ones are named again in turn, most negative
    first, so that a run repeats.
    """

    def read(self, scene: TargetView) -> Reading:
        deltas = bias_gradient(scene, "bias-sign")
        return in_turn(deltas, max(1, int((deltas < 0).sum())), scene.num_examples)


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

    def read(self, scene: TargetView) -> Reading:
        return rounded_counts(self.solution(scene), scene.num_examples)

    def solution(self, scene: TargetView) -> Tensor:
        """The real counts k of step 3, (classes,)."""
        deltas = bias_gradient(scene, "ilrg")
        demand_training(scene, "ilrg")
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

    def read(self, scene: TargetView) -> Reading:
        deltas = bias_gradient(scene, "bias-counts")
        classes, negative = len(deltas), deltas < 0
        scale = deltas.new_ones(())
        if not scale_is_known(scene) and negative.any():
            scale = -deltas[negative].sum() / (1 - negative.sum() / classes).clamp_min(1 / classes)
        return rounded_counts(scene.num_examples * (1 / classes - deltas / scale), scene.num_examples)


# --- the choice -------------------------------------------------------------------------------------------------------


@named("auto", kind="labels", paper="ours")
@dataclass(frozen=True)
class Auto(Rule):
    """The strongest rule that applies, by what the observation and the threat model offer.

    One example: bias-minimum; without a bias row-products (row-sum for two classes). Several, and several steps by a
    recipe that is known: path-bias (`counts.path_rule`). Several otherwise: iLRG where the scale is known and its
    solution makes sense, with a ridge; else bias-counts; without a bias LLG.

    iLRG makes sense where hardly any of its real counts are negative. They sum to less than 0.002 B on untrained
    networks, where it is exact, and to 0.02 B and far more on trained ones, where it fails (8 to 1024 examples). In
    small batches less than a quarter of one label is taken for rounding.
    """

    negative: float = 0.01  # share of B that negative counts may make up
    ridge: float = 1.0

    def rule(self, scene: TargetView) -> Rule:
        """The rule that reads this observation."""
        layer = last_layer(scene)
        if scene.num_examples == 1:
            return BiasMinimum() if layer.deltas is not None else RowProducts() if len(layer.rows) > 2 else RowSum()
        if along := path_rule(scene):
            return along
        if layer.deltas is None:
            return LLG()
        sensible = scale_is_known(scene) and self.sensible(ILRG().solution(scene), scene.num_examples)
        return ILRG(ridge=self.ridge) if sensible else BiasCounts()

    def sensible(self, real: Tensor, examples: int) -> bool:
        return bool(-real.clamp(max=0).sum() <= max(self.negative * examples, 0.25))  # a quarter label says nothing

    def read(self, scene: TargetView) -> Reading:
        return self.rule(scene).read(scene)
