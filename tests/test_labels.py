"""Label rules: identities, hand-computed cases, the anchors of the papers, and properties that hold for any update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from gradleak import Knowledge, LocalTraining, Task, attacks, observe
from gradleak.core import registry
from gradleak.metrics import label_scores
from gradleak.models import cnn_mnist, lenet5, lenet_zhu, mlp, resnet8
from gradleak.parts import labels as rules
from gradleak.parts.fields import Labels, RuleDoesNotApply, label_rule, last_layer
from gradleak.parts.labels import counts as label_counts
from gradleak.parts.labels.llg import LLGStar
from gradleak.parts.labels.readings import greedy, whole_counts
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Defence
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.rules import SGD, Adam

ONE = ["bias-minimum", "row-products", "row-sum"]
BIASED = ["bias-minimum", "bias-sign", "bias-corrected", "bias-counts", "ilrg", "path-bias"]
SEVERAL = ["row-minimum", "bias-sign", "bias-corrected", "bias-counts", "llg", "llg-star", "llg-plus", "ilrg", "auto"]
SEVERAL += ["lowest-sums", "path-bias", "path-rows"]


@dataclass(frozen=True)
class Public:
    x: Tensor
    y: Tensor


def images(count: int, shape: tuple[int, ...] = (3, 32, 32), seed: int = 0) -> Tensor:
    """Synthetic pictures with structure: smooth random fields in [0, 1]."""
    coarse = torch.rand((count, shape[0], 8, 8), generator=Generator().manual_seed(seed))
    return F.interpolate(coarse, shape[1:], mode="bilinear")


def scene_of(
    model: nn.Module, x: Tensor, y: Tensor, training: LocalTraining | None = None, *, told: bool = True, **knows: Any
) -> TargetView:
    training = training or LocalTraining(lr=0.1)
    task = Task.supervised(model, F.cross_entropy, like=(x, y))
    return TargetView.of(
        task, observe(task, {"x": x, "y": y}, training), Knowledge(training=training if told else None, **knows)
    )


def linear_scene(rows: Tensor, bias: Tensor | None = None, examples: int = 1, **knows: Any) -> TargetView:
    """A scene with this gradient of a linear classifier, (classes, features)."""
    classes, features = rows.shape
    model = nn.Linear(features, classes, bias=bias is not None)
    task = Task.supervised(model, F.cross_entropy, like=(torch.zeros(1, features), torch.zeros(1, dtype=torch.long)))
    update = {"weight": rows.float()} if bias is None else {"weight": rows.float(), "bias": bias.float()}
    knows.setdefault("training", LocalTraining(lr=1.0))
    return TargetView(
        task, Knowledge(**knows), task.weights(), update, examples, limits={"x": task.fields["x"].limits(rows.float())}
    )


def counts_of(y: Tensor, classes: int) -> list[int]:
    return torch.bincount(y, minlength=classes).tolist()


# --- the identities everything rests on -------------------------------------------------------------------------------


def test_gradients_of_the_last_layer_are_those_of_the_docstring() -> None:
    x, y = images(5).double(), torch.tensor([1, 4, 4, 0, 9])
    model = lenet5(generator=Generator().manual_seed(0)).double()
    scene = scene_of(model, x, y, LocalTraining(lr=0.25))
    layer, features = last_layer(scene), model.features(x).detach()
    excess = model(x).softmax(1).detach() - F.one_hot(y, 10)
    torch.testing.assert_close(layer.deltas, excess.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.rows, excess.T @ features / 5, rtol=0, atol=1e-6)


# --- one example: anchor (b) ------------------------------------------------------------------------------------------


def thousand_pairs(activation: str) -> tuple[Task, dict[str, Tensor], Tensor]:
    """Classifier gradients of a thousand freshly drawn LeNets, each on a picture and a label of its own, in float64."""
    source = Generator().manual_seed(1)
    model = lenet_zhu(shape=(1, 16, 16), activation=activation).double()
    drawn = {
        name: torch.rand((1000, *value.shape), generator=source, dtype=torch.float64) - 0.5
        for name, value in model.named_parameters()
    }
    y = torch.randint(10, (1000,), generator=source)
    head = {name: drawn.pop(name) for name in ("classifier.weight", "classifier.bias")}

    def loss(head: dict[str, Tensor], rest: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, {**rest, **head}, (x[None],)), y[None])

    gradients = vmap(grad(loss))(head, drawn, images(1000, (1, 16, 16)).double(), y)
    return Task.supervised(model, F.cross_entropy, like=(images(1, (1, 16, 16)), y)), gradients, y


def share_right(rule: str, pairs: tuple[Task, dict[str, Tensor], Tensor]) -> float:
    task, gradients, y = pairs
    chosen, weights = label_rule(rule), task.weights()
    found = [
        chosen.counts(
            TargetView(task, Knowledge(), weights, {name: value[i] for name, value in gradients.items()}, 1)
        ).argmax()
        for i in range(len(y))
    ]
    return float((torch.stack(found) == y).double().mean())


@pytest.mark.parametrize("activation", ["sigmoid", "tanh"])
def test_rules_for_one_example_over_a_thousand_networks(activation: str) -> None:
    pairs = thousand_pairs(activation)
    assert share_right("bias-minimum", pairs) == 1
    assert share_right("row-products", pairs) == 1
    assert share_right("auto", pairs) == 1
    row_sum = share_right("row-sum", pairs)
    assert row_sum == 1 if activation == "sigmoid" else row_sum < 1


def test_row_products_when_all_but_two_rows_vanish() -> None:
    h = torch.tensor([0.3, -2.0, 0.5])
    rows = torch.stack([0 * h, 0.2 * h, -0.2 * h - 1e-6 * h, 1e-6 * h])
    assert label_rule("row-products").counts(linear_scene(rows)).tolist() == [0, 0, 1, 0]


def test_two_classes_have_symmetric_rows() -> None:
    rows = torch.tensor([[0.5, 0.1], [-0.5, -0.1]])
    with pytest.raises(RuleDoesNotApply, match="three classes"):
        label_rule("row-products").counts(linear_scene(rows))
    assert label_rule("auto").counts(linear_scene(rows)).tolist() == [0, 1]


@pytest.mark.parametrize("rule", ONE)
def test_rules_for_one_example_refuse_several(rule: str) -> None:
    with pytest.raises(RuleDoesNotApply, match="holds for one example; this client has 2.*'ilrg'"):
        label_rule(rule).counts(linear_scene(torch.eye(4), torch.zeros(4), examples=2))


# --- several examples: by hand ----------------------------------------------------------------------------------------


def test_llg_by_hand() -> None:
    # B = 4, C = 3: m = 1/4 * 4/3 * -0.8 = -0.267. Named once: 0 and 2, leaving (-0.253, 0.1, -0.013); then 0, leaving
    # +0.013; then 2. Without the factor 4/3 the last would be 0 again.
    sums = torch.tensor([-0.52, 0.1, -0.28])
    scene = linear_scene(torch.stack([sums / 2, sums / 2], 1), examples=4)
    assert label_rule("llg").counts(scene).tolist() == [2, 0, 2]


def test_llg_star_by_hand() -> None:
    # Two features, both 1 in the client's images and in the dummies; weights such that p = (0.8, 0.1, 0.1). A batch of
    # label l has s = 2 (p - [l]): o = (1.6, 0.2, 0.2), own -0.4, -1.8, -1.8, so m = -1.333 * 4/3 / 3 = -0.593.
    # The client's labels 0, 0, 1 give s = (0.267, -0.467, 0.2) and s - o = (-1.333, -0.667, 0). Class 1 as s < 0,
    # leaving -0.074; then 0, leaving -0.741; then 0. Without the offset it would be 1, 1, 2.
    p, share = torch.tensor([0.8, 0.1, 0.1]), torch.tensor([2.0, 1.0, 0.0]) / 3
    scene = linear_scene(torch.stack([p - share, p - share], 1), examples=3)
    scene = replace(scene, weights={"weight": torch.stack([p.log(), torch.zeros(3)], 1)})
    assert LLGStar(dummy="ones", repeats=1).counts(scene).tolist() == [2, 1, 0]
    assert rules.LLG().counts(scene).tolist() != [2, 1, 0]


def test_bias_corrected_by_hand() -> None:
    # Negative sum -0.9, B = 3: m = -0.3. Named once: 1 and 3, leaving (-0.4, +0.1); the third is 1 again.
    bias = torch.tensor([0.5, -0.7, 0.4, -0.2])
    assert label_rule("bias-corrected").counts(linear_scene(torch.eye(4), bias, 3)).tolist() == [0, 2, 0, 1]


def test_bias_sign_pads_with_the_most_negative_in_turn_and_cuts() -> None:
    bias = torch.tensor([0.5, -0.7, 0.4, -0.2])
    assert label_rule("bias-sign").counts(linear_scene(torch.eye(4), bias, 5)).tolist() == [0, 3, 0, 2]
    assert label_rule("bias-sign").counts(linear_scene(torch.eye(4), bias, 1)).tolist() == [0, 1, 0, 0]


def test_row_minimum_names_the_lowest_and_cycles_beyond_the_classes() -> None:
    rows = torch.tensor([[0.1, -0.3], [0.5, 0.2], [-0.9, 4.0]])
    assert label_rule("row-minimum").counts(linear_scene(rows, examples=2)).tolist() == [1, 0, 1]
    assert label_rule("row-minimum").counts(linear_scene(rows, examples=5)).tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("real", "examples", "whole"),
    [
        ([0.6, 0.7, 0.8, 1.0], 2, [0, 0, 1, 1]),  # sum too large: the furthest rounded up lose one
        ([1.4, 0.3, 0.45, 0.0], 3, [2, 0, 1, 0]),  # too small: the furthest rounded down gain one
        ([5.4, 0.2], 9, [7, 2]),  # ... as often as it takes
        ([2.4, 2.3, 0.6], 2, [1, 1, 0]),
        ([-3.0, 2.0, 1.0], 3, [0, 2, 1]),  # negatives are zero
        ([9.0, 1.0, 1.0], 3, [1, 1, 1]),  # more than B is zero first; then it is the furthest rounded down
        ([0.5, 1.5, 2.5], 4, [0, 2, 2]),  # ties to even, as torch rounds
    ],
)
def test_whole_counts_by_hand(real: list[float], examples: int, whole: list[int]) -> None:
    assert whole_counts(torch.tensor(real).double(), examples).tolist() == whole


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5, 30), min_size=2, max_size=6), st.integers(1, 12))
def test_whole_counts_sum_to_b_and_the_repair_is_optimal_unit_by_unit(real: list[float], examples: int) -> None:
    values = torch.tensor(real).double()
    counts = whole_counts(values, examples)
    assert counts.sum() == examples
    assert counts.min() >= 0
    rounded = torch.where((start := values.clamp_min(0).round()) > examples, 0.0, start)
    while rounded.sum() > examples:  # the same, one unit at a time
        rounded[torch.where(rounded > 0, rounded - values, -torch.inf).argmax()] -= 1
    while rounded.sum() < examples:
        rounded[(rounded - values).argmin()] += 1
    torch.testing.assert_close((counts - values).square().sum(), (rounded - values).square().sum())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=6), st.integers(1, 12))
def test_the_greedy_table_is_llg_s_loop(scores: list[float], examples: int) -> None:
    sums = torch.tensor(scores).double()
    impact = sums.clamp(max=0).sum() / examples * (1 + 1 / len(sums))
    left, s, emitted = examples, sums.clone(), [0] * len(sums)
    for c in sums.argsort(stable=True).tolist():
        if sums[c] < 0 and left:
            emitted[c], left, s[c] = 1, left - 1, s[c] - impact
    for _ in range(left):
        c = int(s.argmin())
        emitted[c], s[c] = emitted[c] + 1, s[c] - impact
    found = greedy(sums, sums, impact, examples)
    worth = lambda n: sum(sums[c] * k - impact * k * (k - 1) / 2 for c, k in enumerate(n))  # noqa: E731  equal up to ties
    assert float(worth(found.counts.tolist())) == pytest.approx(float(worth(emitted)), abs=1e-9)


# --- several examples: networks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["ilrg", "bias-counts", "auto"])
def test_exact_counts_on_an_untrained_lenet5_with_a_hundred_classes(rule: str) -> None:
    scores = []
    for trial in range(8):
        source = Generator().manual_seed(trial)
        y = torch.randint(100, (32,), generator=source)
        scene = scene_of(lenet5(classes=100, generator=source), images(32, seed=trial), y)
        scores.append(label_scores(Labels(label_rule(rule))(scene)["y"], y, 100))
    for name in ("lnacc", "lnacc_present", "leacc", "irec"):
        assert torch.stack([score[name] for score in scores]).mean() >= 0.99, name


def test_llg_family_finds_most_labels_of_an_untrained_lenet5() -> None:
    found: dict[str, list[float]] = {"llg": [], "llg-star": [], "llg-plus": [], "row-minimum": [], "bias-corrected": []}
    for trial in range(4):
        source = Generator().manual_seed(trial)
        y = torch.randint(100, (32,), generator=source)
        public = Public(images(200, seed=100 + trial), torch.arange(200) % 100)
        scene = scene_of(lenet5(classes=100, generator=source), images(32, seed=trial), y, public=public)
        for rule, scores in found.items():
            scores.append(float(label_scores(Labels(label_rule(rule))(scene)["y"], y, 100)["irec"]))
    means = {rule: sum(scores) / len(scores) for rule, scores in found.items()}
    assert all(mean > 0.75 for mean in means.values()), means
    assert means["llg-plus"] > 0.9  # its images are of the client's kind


@pytest.mark.parametrize("labels", [[3, 3, 3, 7], [5, 5, 5, 5, 5], [0, 1, 0, 1, 9, 9]])
@pytest.mark.parametrize("rule", ["ilrg", "bias-counts", "auto", "bias-corrected"])
def test_repeated_labels(labels: list[int], rule: str) -> None:
    y = torch.tensor(labels)
    scene = scene_of(lenet5(generator=Generator().manual_seed(2)), images(len(y)), y)
    assert label_rule(rule).counts(scene).tolist() == counts_of(y, 10)


def test_more_examples_than_classes() -> None:
    y = torch.randint(10, (47,), generator=Generator().manual_seed(3))
    scene = scene_of(lenet5(generator=Generator().manual_seed(3)), images(47), y)
    for rule in ("ilrg", "auto"):
        assert label_rule(rule).counts(scene).tolist() == counts_of(y, 10), rule


def test_a_ridge_keeps_ilrg_exact_where_a_bias_gradient_vanishes() -> None:
    exact = []
    for trial in range(4):
        source = Generator().manual_seed(trial)
        y = torch.randint(10, (60,), generator=source)  # some class is near six of sixty, its bias gradient near zero
        scene = scene_of(mlp(shape=(3, 32, 32), widths=(50, 50), generator=source), images(60, seed=trial), y)
        counts = [label_rule("ilrg", ridge=ridge).counts(scene).tolist() == counts_of(y, 10) for ridge in (0.0, 1.0)]
        exact.append(counts)
    plain, ridge = (sum(column) for column in zip(*exact))
    assert ridge == 4 >= plain


def test_ilrg_survives_rows_that_say_nothing() -> None:
    bias = torch.tensor([-0.5, 0.5, 0.0, 0.0])
    rows = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [3.0, -2.0], [0.0, 0.0]])
    counts = label_rule("ilrg").counts(linear_scene(rows, bias, 2))
    assert counts.sum() == 2


# --- the client's recipe, the defence, the given labels ---------------------------------------------------------------


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(lr=0.01, steps=4),
        LocalTraining(lr=0.01, epochs=2, batch_size=4),
        LocalTraining(lr=torch.tensor(0.02), steps=3, schedule=lambda step, total: 1 - step / total),
        LocalTraining(lr=3.0),
        LocalTraining(lr=0.01, optimiser=SGD(momentum=0.9)),
    ],
)
@pytest.mark.parametrize("rule", ["ilrg", "bias-counts"])
def test_the_scale_of_several_steps(training: LocalTraining, rule: str) -> None:
    y = torch.tensor([0, 0, 1, 5, 5, 5, 8, 9])
    scene = scene_of(lenet5(generator=Generator().manual_seed(4)), images(8), y, training)
    assert label_rule(rule).counts(scene).tolist() == counts_of(y, 10)


def test_what_does_without_the_recipe() -> None:
    y = torch.tensor([0, 1, 5, 8])
    scene = scene_of(lenet5(generator=Generator().manual_seed(4)), images(4), y, told=False)
    for rule in ("bias-counts", "bias-corrected", "bias-sign", "auto"):
        assert label_rule(rule).needs == frozenset()
        assert label_rule(rule).counts(scene).tolist() == counts_of(y, 10), rule
    for rule in ("ilrg", "llg-star", "llg-plus"):
        assert "training" in label_rule(rule).needs
        with pytest.raises(MissingKnowledge, match=f"{rule}.*LocalTraining"):
            label_rule(rule).counts(scene)


def test_auto_chooses_by_what_there_is() -> None:
    auto, x, y = rules.Auto(), images(4), torch.tensor([0, 1, 5, 8])
    model, source = lenet5(generator=Generator().manual_seed(4)), Generator().manual_seed(5)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False))
    ilrg, several = rules.ILRG(ridge=1.0), LocalTraining(lr=0.01, steps=2, optimiser=SGD(momentum=0.9))
    along = label_counts.PathBias()
    cases = [
        (scene_of(model, x[:1], y[:1]), rules.BiasMinimum()),
        (scene_of(plain, x[:1], y[:1]), rules.RowProducts()),
        (scene_of(model, x, y), ilrg),
        (scene_of(model, x, y, replace(several, steps=1)), ilrg),  # momentum begins with the second step
        (scene_of(plain, x, y), rules.LLG()),
        (scene_of(model, x, y, told=False), rules.BiasCounts()),
        (scene_of(model, x, y, defence=Defence()), rules.BiasCounts()),  # it may have clipped
        (scene_of(model, x, y, LocalTraining(lr=0.1, optimiser=Adam())), rules.BiasCounts()),
        (scene_of(model, x, y, several), along),
        (scene_of(plain, x, y, several), rules.LLG()),
        (scene_of(model, x[:1], y[:1], several), rules.BiasMinimum()),  # always exact
        (scene_of(model, x, y, several, told=False), rules.BiasCounts()),
        (scene_of(model, x, y, several, defence=Defence()), rules.BiasCounts()),
    ]
    assert [auto.rule(scene) for scene, _ in cases] == [rule for _, rule in cases]
    # A network that is sure of itself: sharp probabilities make iLRG's solution senseless.
    sharp = mlp(shape=(3, 32, 32), widths=(50,), init=0.5, generator=source)
    assert auto.rule(scene_of(sharp, images(32), torch.arange(32) % 10)) == rules.BiasCounts()


@pytest.mark.parametrize("rule", BIASED)
def test_rules_that_need_a_bias_say_so(rule: str) -> None:
    with pytest.raises(RuleDoesNotApply, match=f"'{rule}' reads the gradient of the classifier's bias.*'llg'"):
        label_rule(rule).counts(linear_scene(torch.eye(4)))


def test_a_classifier_that_is_not_trained() -> None:
    model = lenet5(generator=Generator().manual_seed(4))
    for parameter in model.classifier.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(RuleDoesNotApply, match="does not train the classifier"):
        label_rule("auto").counts(scene_of(model, images(1), torch.tensor([1])))


def test_llg_plus_asks_for_labelled_images() -> None:
    assert label_rule("llg-plus").needs == {"training", "public"}
    with pytest.raises(MissingKnowledge, match="x .* and y .*given str"):
        label_rule("llg-plus").counts(linear_scene(torch.eye(4), public="cifar10"))


def test_unknown_dummies_and_rules() -> None:
    with pytest.raises(ValueError, match="Did you mean 'zeros'"):
        label_rule("llg-star", dummy="zero")
    with pytest.raises(registry.UnknownName, match="ilrg"):
        label_rule("irlg")


def test_labels_are_ascending_and_given_ones_win() -> None:
    y = torch.tensor([8, 0, 5, 0])
    scene = scene_of(lenet5(generator=Generator().manual_seed(4)), images(4), y)
    assert Labels(label_rule("auto"))(scene)["y"].tolist() == [0, 0, 5, 8]
    assert Labels(label_rule("auto"))(replace(scene, fields={"y": y})) == {}
    found = attacks.get("ig", steps=1).run(
        scene.task, observe(scene.task, {"x": images(4), "y": y}, LocalTraining(lr=0.1)), Knowledge(given={"y": y})
    )
    assert found.batch["y"][0].tolist() == [8, 0, 5, 0]


# --- updates of many steps -------------------------------------------------------------------------------------------


def skewed(classes: int, examples: int, seed: int) -> Tensor:
    """Labels of a client that has a few classes only, unevenly."""
    source = Generator().manual_seed(seed)
    few = torch.randperm(classes, generator=source)[: max(3, classes // 8)]
    return few[torch.multinomial(torch.arange(1.0, len(few) + 1), examples, replacement=True, generator=source)]


def misplaced(rule: str, scene: TargetView, y: Tensor, **settings: Any) -> float:
    """Labels in the wrong place, sum_c |found_c - n_c| / 2; as the metrics have it, B (1 - multiset_accuracy)."""
    counts, classes = label_rule(rule, **settings).counts(scene), scene.task.fields["y"].classes
    wrong = 0.5 * float((counts - torch.bincount(y, minlength=classes)).abs().sum())
    found = torch.arange(classes).repeat_interleave(counts)
    assert len(y) * (1 - float(label_scores(found, y, classes)["multiset_accuracy"])) == pytest.approx(wrong)
    return wrong


FEMNIST = {
    "few steps": LocalTraining(lr=0.01, epochs=1, batch_size=5),
    "short last batch": LocalTraining(lr=0.004, epochs=10, batch_size=12),
    "E=20, B=10": LocalTraining(lr=0.004, epochs=20, batch_size=10),
    "momentum": LocalTraining(lr=0.001, epochs=8, batch_size=10, optimiser=SGD(momentum=0.9)),
    "nesterov, decay, schedule": LocalTraining(
        lr=0.002,
        epochs=8,
        batch_size=10,
        optimiser=SGD(momentum=0.5, nesterov=True, weight_decay=0.05),
        schedule=lambda step, total: 1 - 0.5 * step / total,
    ),
}


@pytest.mark.parametrize("recipe", FEMNIST)
def test_counts_of_clients_that_train_for_a_while(recipe: str) -> None:
    """40 synthetic examples in minibatches: path-bias misplaces at most a tenth, be the classes many or few."""
    wrong: dict[str, list[float]] = {"path-bias": [], "path-rows": [], "bias-counts": [], "lowest-sums": []}
    for trial in range(2):
        source = Generator().manual_seed(trial)
        for y in (torch.randint(26, (40,), generator=source), skewed(26, 40, trial)):
            x = images(40, (1, 28, 28), seed=trial)
            model = cnn_mnist(classes=26, widths=(8, 16), generator=source)
            scene = scene_of(model, x, y, FEMNIST[recipe])
            for rule, found in wrong.items():
                settings = {"dummies": 100} if rule.startswith("path") else {}
                found.append(misplaced(rule, scene, y, **settings))
    means = {rule: sum(found) / len(found) for rule, found in wrong.items()}
    assert means["path-bias"] <= 4, means
    assert means["path-bias"] <= means["bias-counts"], means
    assert means["path-bias"] < means["lowest-sums"], means  # which cannot repeat a label
    assert means["path-rows"] < 0.5 * 40, means


@pytest.mark.parametrize("at", ["average", "fit", "start", "end"])
def test_where_on_the_way_the_prediction_is_taken(at: str) -> None:
    y = skewed(26, 40, 0)
    model = cnn_mnist(classes=26, widths=(8, 16), generator=Generator().manual_seed(0))
    scene = scene_of(model, images(40, (1, 28, 28)), y, LocalTraining(lr=0.03, epochs=15, batch_size=10))
    wrong = misplaced("path-bias", scene, y, at=at, dummies=100)
    from_start = misplaced("path-bias", scene, y, at="start", dummies=100)
    assert wrong < 0.5 * from_start or at == "start"  # the prediction has moved: w0 alone does not say where to
    assert from_start > 5


def test_counts_are_exact_on_a_linear_model_with_known_predictions_and_sums() -> None:
    """p and O as they were at every step, of inputs that all sum to 3: the identity has nothing left to estimate."""
    source, n, classes = Generator().manual_seed(0), 12, 5
    x = torch.rand(n, 7, generator=source, dtype=torch.float64)
    x, y = 3 * x / x.sum(1, keepdim=True), torch.randint(classes, (n,), generator=source)
    model = nn.Linear(7, classes).double()
    training = LocalTraining(lr=0.7, steps=9)
    scene = scene_of(model, x, y, training)
    weight, bias, predicted = scene.weights["weight"], scene.weights["bias"], []
    for _ in range(9):
        p = (x @ weight.T + bias).softmax(1)
        excess = p - F.one_hot(y, classes)
        predicted.append(p.mean(0))
        weight, bias = weight - 0.7 * excess.T @ x / n, bias - 0.7 * excess.mean(0)
    layer, p = last_layer(scene), torch.stack(predicted).mean(0)
    true = torch.bincount(y, minlength=classes).double()
    torch.testing.assert_close(label_counts.real_counts(layer.rows.sum(1), p, 3.0, n), true)
    torch.testing.assert_close(label_counts.real_counts(layer.deltas, p, 1.0, n), true)
    assert label_counts.floored_counts(label_counts.real_counts(layer.deltas, p, 1.0, n), n).tolist() == true.tolist()


@pytest.mark.parametrize(
    ("real", "examples", "whole"),
    [
        ([1.9, 0.8, 0.3], 3, [2, 1, 0]),  # missing units go to the largest fractional parts
        ([-0.1, 1.2, 1.9], 3, [0, 1, 2]),  # a negative count has no fractional part to speak of
        ([3.1, 2.9, -3.0], 3, [2, 1, 0]),  # too many: from the smallest parts, one each
        ([5.5, 0.2, 4.0], 2, [1, 0, 1]),  # above B is B first
        ([3.0, 3.0], 3, [1, 2]),  # ... and again
        ([0.0, 0.0, 0.0], 4, [2, 1, 1]),  # more missing than classes
        ([float("nan"), float("inf"), 1.0], 2, [0, 1, 1]),
    ],
)
def test_floored_counts_by_hand(real: list[float], examples: int, whole: list[int]) -> None:
    assert label_counts.floored_counts(torch.tensor(real), examples).tolist() == whole


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 30), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(1, 12))
def test_floored_counts_sum_to_b_and_rows_do_not_meet(real: list[list[float]], examples: int) -> None:
    values = torch.tensor(real).double()
    counts = label_counts.floored_counts(values, examples)
    assert (counts.sum(-1) == examples).all()
    assert counts.min() >= 0
    assert torch.equal(counts, torch.stack([label_counts.floored_counts(row, examples) for row in values]))
    whole = label_counts.floored_counts(counts.double(), examples)
    assert torch.equal(whole, counts)


@pytest.mark.parametrize("rule", ["path-bias", "path-rows"])
def test_many_targets_at_once_are_read_as_one_by_one(rule: str) -> None:
    """Weights that targets share, weights that they do not, and BatchNorm whose buffers each client returns."""
    x, made = images(6, (1, 28, 28)), Generator().manual_seed(0)
    for model in (cnn_mnist(classes=10, widths=(4, 8), generator=made), resnet8(classes=10, generator=made).train()):
        task = Task.supervised(model, F.cross_entropy, like=(x, torch.zeros(6, dtype=torch.long)))
        training, sent = LocalTraining(lr=0.02, epochs=2, batch_size=3), task.weights()
        other = {name: value * 1.1 for name, value in sent.items()}
        scenes = []
        for number, weights in enumerate((sent, sent, other)):
            y = torch.randint(10, (6,), generator=made)
            seen = observe(task, {"x": x, "y": y}, training, weights=weights, key=str(number))
            scenes.append(TargetView.of(task, seen, Knowledge(training=training)))
        chosen = registry.get("labels", rule, dummies=20)
        together = chosen.read_all(scenes)
        for scene, reading in zip(scenes, together, strict=True):
            alone = chosen.read(scene)
            assert torch.equal(reading.counts, alone.counts)
            assert float(reading.margin) == pytest.approx(float(alone.margin), abs=1e-3)


def test_public_images_as_dummies() -> None:
    """With the client's own images in the attacker's hands, the end of the way is known as it is."""
    y, x = skewed(26, 40, 1), images(40, (1, 28, 28), seed=1)
    model = cnn_mnist(classes=26, widths=(8, 16), generator=Generator().manual_seed(1))
    training = LocalTraining(lr=0.03, epochs=15, batch_size=10)
    scene = scene_of(model, x, y, training, public=Public(x, y))
    rule = label_counts.PathBias(dummy="public")
    predicted, sums = rule._ends([scene])
    after = {name: value - scene.update[name] for name, value in scene.weights.items()}
    logits = functional_call(model, after, (x,))
    torch.testing.assert_close(predicted[1, 0].float(), logits.softmax(1).mean(0).detach())
    torch.testing.assert_close(sums[0, 0, 0].float(), model.features(x).sum(1).mean().detach())
    assert misplaced("path-bias", scene, y, dummy="public") <= 4
    with pytest.raises(MissingKnowledge, match="'path-bias' with dummy='public'.*given NoneType"):
        label_rule("path-bias", dummy="public").counts(linear_scene(torch.eye(4), torch.zeros(4), 2))


def test_a_client_without_most_classes_is_not_taken_for_one_that_has_each_once() -> None:
    away = torch.tensor([5.0, 1.0, 3.0, 4.0, 1.6, 3.0, 2.5, 6.0])
    assert label_counts._nearest_whole(away) == 4  # the last minimum within twice the lowest; 2.5 is not
    assert label_counts._nearest_whole(torch.tensor([3.0, 2.0, 1.0])) == 2
    y = skewed(26, 40, 0)
    model = cnn_mnist(classes=26, widths=(8, 16), generator=Generator().manual_seed(0))
    scene = scene_of(model, images(40, (1, 28, 28)), y, LocalTraining(lr=0.2, epochs=15, batch_size=10))
    assert misplaced("path-bias", scene, y, dummies=100) <= 4


def test_path_rules_say_what_they_cannot_do() -> None:
    model, x, y = lenet5(generator=Generator().manual_seed(4)), images(4), torch.tensor([0, 1, 5, 8])
    with pytest.raises(MissingKnowledge, match="'path-rows'.*LocalTraining"):
        label_rule("path-rows").counts(scene_of(model, x, y, told=False))
    with pytest.raises(RuleDoesNotApply, match="sum of gradients; this one uses Adam.*'llg'"):
        label_rule("path-bias").counts(scene_of(model, x, y, LocalTraining(lr=0.1, steps=2, optimiser=Adam())))
    for wrong in ({"at": "middle"}, {"dummy": "zeros"}, {"dummies": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            label_rule("path-bias", **wrong)


def test_path_rules_are_for_several_steps_of_a_known_recipe() -> None:
    x, y = images(4), torch.tensor([0, 1, 5, 8])
    model = lenet5(generator=Generator().manual_seed(4))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False))
    several = LocalTraining(lr=0.01, epochs=2, batch_size=2, optimiser=SGD(momentum=0.9))
    chosen = [
        label_counts.path_rule(scene)
        for scene in (
            scene_of(model, x, y, several),
            scene_of(plain, x, y, several),
            scene_of(model, x, y, several, public=Public(x, y)),
            scene_of(model, x, y),  # one step
            scene_of(model, x, y, several, told=False),
            scene_of(model, x, y, several, defence=Defence()),
            scene_of(model, x, y, LocalTraining(lr=0.1, steps=3, optimiser=Adam())),
        )
    ]
    bias, public = label_counts.PathBias(), label_counts.PathBias(dummy="public")
    assert chosen == [bias, None, public, None, None, None, None]


def test_auto_reads_a_long_training_better_than_a_rule_for_one_step_would() -> None:
    """A client of few classes: counts of single gradients spread its labels over the others."""
    y = skewed(26, 40, 0)
    model = cnn_mnist(classes=26, widths=(8, 16), generator=Generator().manual_seed(0))
    scene = scene_of(model, images(40, (1, 28, 28)), y, LocalTraining(lr=0.03, epochs=15, batch_size=10))
    assert misplaced("auto", scene, y) <= 4
    assert misplaced("bias-counts", scene, y) > 8


def test_lowest_sums_by_hand() -> None:
    rows = torch.tensor([[0.1, -0.3], [0.5, 0.2], [-0.9, 4.0]])
    assert label_rule("lowest-sums").counts(linear_scene(rows, examples=2)).tolist() == [1, 1, 0]
    assert label_rule("lowest-sums").counts(linear_scene(rows, examples=5)).tolist() == [2, 2, 1]


def test_labels_that_are_given_or_the_attack_does_not_run() -> None:
    y = torch.tensor([8, 0, 5, 0])
    scene = scene_of(lenet5(generator=Generator().manual_seed(4)), images(4), y)
    assert label_rule("given").counts(replace(scene, fields={"y": y})).tolist() == counts_of(y, 10)
    with pytest.raises(MissingKnowledge, match=r"'given' reads Knowledge\(given"):
        label_rule("given").counts(scene)
    with pytest.raises(RuleDoesNotApply, match="probabilities"):
        label_rule("given").counts(replace(scene, fields={"y": torch.eye(4)}))
    seen = observe(scene.task, {"x": images(4), "y": y}, LocalTraining(lr=0.1))
    attack = attacks.get("ig", steps=1, labels="given")
    with pytest.raises(MissingKnowledge, match="needs y"):
        attack.run(scene.task, seen, Knowledge())
    assert attack.run(scene.task, seen, Knowledge(given={"y": y})).batch["y"][0].tolist() == y.tolist()


# --- margins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*ONE, "auto"])
def test_a_hard_label_has_margin_one_and_a_mixed_one_less(rule: str) -> None:
    model = lenet5(generator=Generator().manual_seed(6))
    scene = scene_of(model, images(1), torch.tensor([4]))
    assert float(registry.get("labels", rule).margin(scene)) == pytest.approx(1)
    mixed = torch.tensor([[0.0, 0, 0, 0, 0.55, 0, 0, 0.45, 0, 0]])
    task = Task.supervised(model, F.cross_entropy, like=(images(1), mixed))
    seen = observe(task, {"x": images(1), "y": mixed}, LocalTraining(lr=0.1))
    assert float(registry.get("labels", rule).margin(TargetView.of(task, seen, Knowledge()))) < 0.5


@pytest.mark.parametrize("rule", ["ilrg", "bias-counts", "bias-corrected", "llg"])
def test_noise_lowers_the_margin(rule: str) -> None:
    y = torch.tensor([0, 1, 5, 8])
    scene = scene_of(lenet5(generator=Generator().manual_seed(4)), images(4), y)
    source = Generator().manual_seed(0)
    noisy = {name: value + 0.02 * torch.randn(value.shape, generator=source) for name, value in scene.update.items()}
    margin = registry.get("labels", rule).margin
    assert 0 <= float(margin(replace(scene, update=noisy))) < float(margin(scene)) <= 1


# --- any update at all ------------------------------------------------------------------------------------------------


def test_every_rule_is_in_the_registry() -> None:
    assert {entry.name for entry in registry.entries("labels")} >= {*ONE, *SEVERAL}
    assert all(entry.summary for entry in registry.entries("labels"))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 6),
    st.integers(1, 9),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6]),
    st.booleans(),
)
def test_counts_are_whole_and_sum_to_b(classes: int, examples: int, seed: int, scale: float, coarse: bool) -> None:
    """For noise, for ties and zeros (`coarse`), at any scale: every rule that applies returns B labels, repeatably."""
    source = Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=source) * (1 if not coarse else 0.7)  # noqa: E731
    shape = lambda value: scale * (value.round() if coarse else value)  # noqa: E731
    public = Public(torch.rand(7, 3, generator=source), torch.arange(7) % 2)
    scene = linear_scene(shape(draw(classes, 3)), shape(draw(classes)), examples, public=public)
    for rule in SEVERAL + (ONE if examples == 1 else []):
        few = {"dummies": 20} if rule.startswith("path") else {}
        reading = registry.get("labels", rule, **few).read(scene)
        assert reading.counts.dtype == torch.long, rule
        assert reading.counts.shape == (classes,), rule
        assert reading.counts.min() >= 0, rule
        assert reading.counts.sum() == examples, rule
        assert 0 <= float(reading.margin) <= 1, rule
        assert torch.equal(reading.counts, registry.get("labels", rule, **few).counts(scene)), rule
