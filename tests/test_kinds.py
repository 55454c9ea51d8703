"""Kinds of data: scores, baselines and pictures of each, and attacks that search any of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from gradleak.core import registry
from gradleak.scenario.fields import Field, TaskError, UnsupportedTask
from gradleak.scenario.kinds import (
    KINDS,
    Category,
    ClassMap,
    Codes,
    Column,
    Image,
    Mask,
    MultiLabel,
    Series,
    Table,
    Tokens,
    Value,
    Vector,
)
from gradleak.scenario.task import Supervised, Task

FREE = (-math.inf, math.inf)
COLUMNS = (
    Column("age", mean=40, std=10, low=17, high=90, whole=True),
    Column("sex", ("m", "f")),
    Column("job", ("a", "b", "c")),
)
TABLE = Table(COLUMNS)
CODES = Codes(tuple(Column(name, tuple("abcdefghi"[:size])) for name, size in (("job", 5), ("sex", 2), ("state", 9))))
ROWS = torch.tensor([[0.1, 1, 0, 0, 1, 0], [1.0, 0, 1, 0, 0, 1], [-2.0, 1, 0, 1, 0, 0]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EXAMPLES: dict[str, tuple[Field, Tensor]] = {
    "image": (Field((3, 8, 8)), normal(3, 3, 8, 8).sigmoid()),
    "vector": (Field((7,), FREE), normal(3, 7)),
    "table": (Field((6,), TABLE.limits(), kind=TABLE), ROWS),
    "series": (Field((2, 16), FREE), normal(3, 2, 16).cumsum(-1)),
    "tokens": (
        Field((5,), classes=20, kind=Tokens(padding=0)),
        torch.tensor([[1, 2, 2, 3, 0], [4] * 5, [7, 8, 9, 1, 2]]),
    ),
    "codes": (Field((3,), classes=9, kind=CODES), torch.tensor([[0, 1, 7], [4, 0, 8], [2, 1, 0]])),
    "category": (Field((), classes=4), torch.tensor([0, 3, 1])),
    "multi-label": (Field((4,), kind=MultiLabel()), (normal(3, 4) > 0).float()),
    "class-map": (Field((6, 6), classes=3), torch.randint(3, (3, 6, 6), generator=torch.Generator().manual_seed(1))),
    "value": (Field((), FREE, kind=Value()), normal(3)),
    "mask": (Field((5,), classes=2, kind=Mask()), torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]])),
}


@pytest.fixture(params=EXAMPLES)
def named(request: pytest.FixtureRequest) -> tuple[Field, Tensor]:
    return EXAMPLES[request.param]


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) == set(KINDS)
    assert all(field.kind.name == name for name, (field, _) in EXAMPLES.items())


def test_the_truth_scores_best_and_is_matched_to_itself(named: tuple[Field, Tensor]) -> None:
    field, value = named
    kind = field.kind
    real = kind.comparable(value, field)
    scores = kind.scores(real, real)
    assert set(scores) >= {measure.name for measure in kind.measures}
    for measure in kind.measures:
        other = kind.scores(real.roll(1, 0), real)[measure.name]
        assert (scores[measure.name] >= other).all() if measure.higher else (scores[measure.name] <= other).all()
    assert kind.distance(real, real).argmin(1).tolist() == [0, 1, 2]
    assert kind.look_up(real, real).argmin(1).tolist() == [0, 1, 2]
    assert kind.same(real, real).tolist() == torch.eye(3, dtype=torch.bool).tolist()
    hits = kind.hits(scores, torch.ones(3, dtype=torch.bool))
    assert hits["recovered"].all()
    assert not kind.hits(scores, torch.zeros(3, dtype=torch.bool))["recovered"].any()
    assert "recovered" not in kind.hits(scores, None)


def test_a_wrong_example_is_not_recovered(named: tuple[Field, Tensor]) -> None:
    field, value = named
    real = field.kind.comparable(value, field)
    wrong = field.kind.scores(real.roll(1, 0), real)
    assert not field.kind.hits(wrong, torch.ones(3, dtype=torch.bool))["recovered"].any()


def test_settings_survive_a_file(named: tuple[Field, Tensor]) -> None:
    kind = named[0].kind
    assert KINDS[kind.name].of(kind.settings()) == kind


def test_reports_show_every_kind(named: tuple[Field, Tensor]) -> None:
    field, value = named
    real = field.kind.comparable(value, field)
    shown = field.kind.exhibit(real[0], real[1], field)
    assert shown.pictures is not None or shown.cells or shown.curves is not None
    alike = field.kind.exhibit(real[0], real[0], field)
    assert all(cell.right and cell.true == cell.found for cell in alike.cells)


def test_guesses_without_the_update_are_worse_than_the_truth(named: tuple[Field, Tensor]) -> None:
    field, value = named
    real = field.kind.comparable(value, field)
    for guess in field.kind.guesses(real, real).values():
        measure = field.kind.headline
        scores = field.kind.scores(guess.expand_as(real), real)[measure.name]
        best = field.kind.scores(real, real)[measure.name]
        assert (scores <= best).all() if measure.higher else (scores >= best).all()
        assert scores.shape == (3,)


def test_values_that_are_not_finite_can_be_compared() -> None:
    for name in ("image", "vector", "table", "series", "value"):
        field, value = EXAMPLES[name]
        broken = value.clone()
        broken[0] = math.nan
        scores = field.kind.scores(field.kind.comparable(broken, field), field.kind.comparable(value, field))
        assert all(score.isfinite().all() or name == "series" for score in scores.values())


def test_places_without_a_class_count_nowhere() -> None:
    """Ignored places of the truth are left out; places that were not found are wrong, and not class 0."""
    kind = ClassMap(ignored=255)
    field = Field((2, 2), classes=3, kind=kind)
    truth = kind.comparable(torch.tensor([[[0, 1], [255, 255]]]), field)
    scores = {name: float(value) for name, value in kind.scores(torch.tensor([[[0, -1], [2, 0]]]), truth).items()}
    assert scores == {"right": 0.5, "iou": 0.5}
    nothing = torch.full((1, 2, 2), -1)
    assert [float(value) for value in kind.scores(nothing, nothing).values()] == [0, 0]
    shown, _ = kind.exhibit(truth[0], truth[0], field).pictures or ()
    assert shown.tolist() == [[[0, 0.5], [0, 0]]]
    tags = torch.tensor([2, -1, 0])
    assert [cell.name for cell in kind.exhibit(tags, tags, field).cells] == ["0", "2"]
    others = kind.comparable(torch.tensor([[[255, 1]], [[255, 1]], [[2, 0]]]), field)
    assert kind.guesses(others[:1], others)["most frequent"].tolist() == [[[2, 1]]]
    assert ClassMap.of(kind.settings()) == kind
    assert (kind.settings(), ClassMap().settings()) == ({"ignored": 255}, {})


def test_a_kind_follows_from_the_shape_where_none_is_declared() -> None:
    kinds = {
        Image: Field((3, 8, 8)),
        Vector: Field((3, 8, 8), FREE),
        Series: Field((2, 9), FREE),
        Value: Field((), FREE),
        Category: Field((), classes=3),
        ClassMap: Field((8, 8), classes=3),
    }
    for kind, field in kinds.items():
        assert type(field.kind) is kind


# --- single kinds -----------------------------------------------------------------------------------------------------


def test_a_column_is_right_within_its_tolerance() -> None:
    field = EXAMPLES["table"][0]
    near, far = ROWS.clone(), ROWS.clone()
    near[:, 0] += 0.3
    far[:, 0] += 0.33
    real = TABLE.comparable(ROWS, field)
    assert TABLE.scores(TABLE.comparable(near, field), real)["right"].tolist() == [1, 1, 1]
    scores = TABLE.scores(TABLE.comparable(far, field), real)
    assert scores["right"] == pytest.approx(torch.full((3,), 2 / 3).double())
    assert scores["categorical"].tolist() == [1, 1, 1]
    assert scores["numeric"].tolist() == [0, 0, 0]


def test_a_relaxed_row_is_read_by_its_largest_entries_and_its_bounds() -> None:
    field = EXAMPLES["table"][0]
    soft = torch.tensor([[99.0, 0.4, 0.3, 0.1, 0.2, 0.0]])
    assert TABLE.comparable(soft, field).tolist() == [[5.0, 1, 0, 0, 1, 0]]  # age 90 is five deviations above 40
    [age, sex, job] = TABLE.exhibit(TABLE.comparable(ROWS, field)[0], TABLE.comparable(soft, field)[0], field).cells
    assert (age.true, age.found, age.right) == ("41", "90", False)
    assert (sex.true, job.found) == ("m", "b")


def test_rows_that_are_not_one_hot_are_named() -> None:
    field = EXAMPLES["table"][0]
    assert TABLE.allowed(ROWS, field) == ""
    odd = ROWS.clone()
    odd[0, 1] = 0.5
    assert "'sex'" in TABLE.allowed(odd, field)


def test_a_table_must_fit_its_columns() -> None:
    with pytest.raises(TaskError, match="take 6 entries, but an example has shape"):
        Field((5,), kind=TABLE)


def test_bags_and_orders_of_tokens_are_told_apart() -> None:
    field, ids = EXAMPLES["tokens"]
    kind = field.kind
    real = kind.comparable(ids[:1], field)
    swapped = kind.comparable(torch.tensor([[2, 1, 3, 2, 9]]), field)
    scores = kind.scores(swapped, real)
    assert scores["bag"].tolist() == [1.0]
    assert scores["order"].tolist() == [0.0]
    once = kind.scores(kind.comparable(torch.tensor([[1, 2, 9, 9, 9]]), field), real)
    assert once["bag"].tolist() == [0.5]  # 1 and one of two 2s, of four tokens: padding does not count


def test_ids_outside_the_vocabulary_are_named() -> None:
    field, _ = EXAMPLES["tokens"]
    assert "3 to 20; the vocabulary has 20" in field.kind.allowed(torch.tensor([[3, 20]]), field)
    masked = Tokens(ignored=-100)
    assert masked.allowed(torch.tensor([[-100, 3]]), Field((2,), classes=5, kind=masked)) == ""


def test_numbers_are_measured_by_the_spread_of_other_people() -> None:
    field = Field((1,), FREE)
    others = torch.tensor([[0.0], [200.0]])  # standard deviation 100
    near, real = (field.kind.comparable(torch.tensor([[v]]), field, others) for v in (110.0, 100.0))
    assert field.kind.scores(near, real)["rmse"].tolist() == pytest.approx([0.1])


def test_bounds_may_differ_by_column() -> None:
    field = Field((2,), ((0.0, 1.0), (-5.0, 5.0)))
    low, high = field.limits(torch.zeros(()))
    assert (low.tolist(), high.tolist()) == ([0, -5], [1, 5])
    assert field.unit(torch.tensor([[0.5, 0.0]])).tolist() == [[0.5, 0.5]]
    half = Field((2,), ((0.0, 1.0), FREE))
    assert not half.bounded
    assert [side.tolist() for side in half.extent(torch.zeros(()))] == [[0, -2], [1, 2]]


# --- attacks on every continuous kind ---------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """A classifier of two private vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 32), nn.Linear(4, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + self.second(z)))


def of_both(call: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(call(batch["x"], batch["z"]), batch["y"])


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, outputs))


def series_net() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 8, 5, padding=2), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 24, 5))


LABEL = torch.tensor([1])
VECTOR = Field((12,), FREE)
CASES: dict[str, tuple[nn.Module, Any, dict[str, Field], dict[str, Tensor]]] = {
    "vector": (
        *(mlp(12, 3), Supervised(F.cross_entropy), {"x": VECTOR, "y": Field((), classes=3)}),
        {"x": normal(1, 12), "y": LABEL},
    ),
    "regression": (
        *(mlp(12, 1), Supervised(lambda o, y: F.mse_loss(o[:, 0], y)), {"x": VECTOR, "y": Field((), FREE)}),
        {"x": normal(1, 12), "y": torch.tensor([0.7])},
    ),
    "multi-label": (
        *(mlp(12, 4), Supervised(F.binary_cross_entropy_with_logits)),
        {"x": VECTOR, "y": Field((4,), kind=MultiLabel())},
        {"x": normal(1, 12), "y": torch.tensor([[1.0, 0, 0, 1]])},
    ),
    "table": (
        *(mlp(6, 2), Supervised(F.cross_entropy), {"x": EXAMPLES["table"][0], "y": Field((), classes=2)}),
        {"x": ROWS[:1], "y": LABEL},
    ),
    "series": (
        *(series_net(), Supervised(F.cross_entropy), {"x": Field((2, 24), FREE), "y": Field((), classes=5)}),
        {"x": normal(1, 2, 24).cumsum(-1) * 0.3, "y": LABEL},
    ),
    "two inputs": (
        *(TwoInputs(), of_both, {"x": Field((8,), FREE), "z": Field((4,), FREE), "y": Field((), classes=3)}),
        {"x": normal(1, 8), "z": normal(1, 4, seed=1), "y": LABEL},
    ),
}
RECIPE = gl.LocalTraining(lr=0.1)


def case(name: str) -> tuple[Task, dict[str, Tensor]]:
    network, objective, fields, batch = CASES[name]
    return Task(seeded(network), objective, fields), batch


def seeded(network: nn.Module) -> nn.Module:
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draws) * (0.5 / max(weight.shape[-1], 1) ** 0.5))
    return network


@pytest.mark.parametrize("name", CASES)
def test_second_order_is_exact_on_every_continuous_kind(name: str) -> None:
    task, batch = case(name)
    seen = gl.observe(task, batch, RECIPE)
    result = gl.attacks.get("second-order").run(task, seen, gl.Knowledge(training=RECIPE))
    assert result.batch.keys() == batch.keys()
    for field in batch.keys() - {"y"}:
        assert result.batch[field][0].double() == pytest.approx(batch[field].double(), abs=1e-3)
    assert result.certificates is not None
    assert result.certificates[0].verdict == "determined"


@pytest.mark.parametrize("name", ["regression", "multi-label"])
def test_targets_that_no_rule_reads_are_searched_for_with_the_example(name: str) -> None:
    task, batch = case(name)
    seen = gl.observe(task, batch, RECIPE)
    result = gl.attacks.get("dlg", steps=400, restarts=2).run(task, seen, gl.Knowledge(training=RECIPE))
    assert result.batch["x"][0] == pytest.approx(batch["x"], abs=2e-2)
    target = task.fields["y"]
    guess = target.kind.comparable(result.batch["y"][0], target)
    assert guess == pytest.approx(target.kind.comparable(batch["y"], target), abs=2e-2)


GENERIC = ("cpl", "idlg", "ig", "ig-modern", "ig-tanh", "gi", "gi-lazy", "sme", "nl-sme", "coarse-replay", "ig-ms")
GENERIC += ("dlg-ms", "fedleak", "sign-matching")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("attack", GENERIC)
def test_generic_attacks_lower_their_objective_on_every_continuous_kind(attack: str, name: str) -> None:
    task, batch = case(name)
    seen = gl.observe(task, batch, RECIPE)
    found = registry.get("attack", attack, steps=30).run(task, seen, gl.Knowledge(training=RECIPE))
    curve = found.trace["match"][:, 0].amin(1)
    assert found.batch.keys() == batch.keys()
    assert found.batch["x"].isfinite().all()
    assert curve.min() < curve[0]


def test_given_fields_are_used_and_not_searched_for() -> None:
    task, batch = case("two inputs")
    seen, knows = gl.observe(task, batch, RECIPE), gl.Knowledge(training=RECIPE, given={"z": batch["z"]})
    result = gl.attacks.get("ig", steps=300).run(task, seen, knows)
    assert torch.equal(result.batch["z"][0], batch["z"])
    assert result.batch["x"][0] == pytest.approx(batch["x"], abs=0.05)


@pytest.mark.parametrize("attack", ["spectral", "gias", "representation"])
def test_attacks_say_what_they_cannot_attack(attack: str) -> None:
    task, batch = case("regression")
    seen = gl.observe(task, batch, RECIPE)
    made = registry.get("attack", attack)
    reason = made.refuses(task)
    assert reason
    with pytest.raises(UnsupportedTask, match=f"unsupported: {attack} cannot attack this task"):
        made.run(task, seen, gl.Knowledge(training=RECIPE, generator=object()))


def test_every_attack_answers_for_every_case() -> None:
    for name in CASES:
        task, _ = case(name)
        for entry in registry.entries("attack"):
            assert isinstance(registry.get("attack", entry.name).refuses(task), str)


# --- tokens -----------------------------------------------------------------------------------------------------------


class TextClassifier(nn.Module):
    """An embedding, an LSTM and a linear layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.memory, self.last = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 3)
        self.output = nn.Linear(16, 50, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        states = self.memory(self.embedding(ids))[0][:, -1]
        return self.last(states) + 0 * self.output(states).sum(-1, keepdim=True)


def text_task(tied: bool = False) -> Task:
    torch.manual_seed(0)
    fields = {"x": Field((9,), classes=50, kind=Tokens(padding=0)), "y": Field((), classes=3)}
    return Task(TextClassifier(tied), Supervised(F.cross_entropy), fields)


def test_the_rows_of_an_embedding_are_the_bag_of_tokens() -> None:
    task = text_task()
    batch = {"x": torch.tensor([[4, 8, 3, 3, 17, 22, 0, 0, 0]]), "y": torch.tensor([2])}
    seen = gl.observe(task, batch, RECIPE)
    found = gl.attacks.get("token-rows").run(task, seen, gl.Knowledge(training=RECIPE))
    ids = found.batch["x"][0, 0]
    assert sorted(ids[ids >= 0].tolist()) == [3, 4, 8, 17, 22]
    assert found.batch["y"].tolist() == [[2]]
    assert found.checks.converged == (True,)


def test_several_texts_share_one_bag() -> None:
    task = text_task()
    batch = {
        "x": torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(0)),
        "y": torch.tensor([0, 1, 2]),
    }
    seen = gl.observe(task, batch, RECIPE)
    ids = gl.attacks.get("token-rows").run(task, seen, gl.Knowledge(training=RECIPE)).batch["x"]
    assert set(ids[ids >= 0].tolist()) == set(batch["x"].flatten().tolist())


def test_tied_and_frozen_embeddings_are_refused() -> None:
    attack = gl.attacks.get("token-rows")
    assert "also the output layer" in attack.refuses(text_task(tied=True))
    task = text_task()
    task.model.get_submodule("embedding").requires_grad_(False)
    assert "frozen" in attack.refuses(task)
    assert "x holds images" in attack.refuses(Task(nn.Flatten(), Supervised(F.cross_entropy), {"x": Field((1, 4, 4))}))


def test_text_is_nothing_that_a_gradient_moves() -> None:
    for name in ("ig", "dlg", "second-order", "analytic", "sme"):
        assert "x holds texts" in registry.get("attack", name).refuses(text_task())


# --- ids beside numbers -----------------------------------------------------------------------------------------------


class EmbeddedTable(nn.Module):
    """Numbers and categorical columns, each with an embedding of its own."""

    def __init__(self, sizes: tuple[int, ...] = (5, 2, 9)) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.hidden, self.last = nn.Linear(6 + 4 * len(sizes), 48), nn.Linear(48, 2)

    def forward(self, codes: Tensor, numbers: Tensor) -> Tensor:
        columns = [embedding(codes[:, place]) for place, embedding in enumerate(self.embeddings)]
        return self.last(torch.tanh(self.hidden(torch.cat([numbers, *columns], 1))))


def embedded_table() -> Task:
    torch.manual_seed(0)
    fields = {"codes": EXAMPLES["codes"][0], "numbers": Field((6,), FREE)}
    batch = {"codes": torch.zeros(2, 3, dtype=torch.long), "numbers": torch.zeros(2, 6), "y": torch.zeros(2).long()}
    fields["y"] = Field((), classes=2)
    task = gl.Task.from_batch(EmbeddedTable(), lambda out, b: F.cross_entropy(out, b["y"]), batch, fields=fields)
    assert set(task.fields) == {"codes", "x", "y"}  # numbers can be moved, so they are x
    return task


def test_codes_are_read_off_their_embeddings_and_numbers_searched_for() -> None:
    task = embedded_table()
    batch = {"codes": torch.tensor([[3, 1, 7]]), "x": normal(1, 6), "y": torch.tensor([1])}
    seen = gl.observe(task, batch, RECIPE)
    for attack in ("ig", "second-order"):
        settings = {"steps": 400} if attack == "ig" else {}
        found = registry.get("attack", attack, **settings).run(task, seen, gl.Knowledge(training=RECIPE))
        assert found.batch["codes"].tolist() == [[[3, 1, 7]]]
        assert found.batch["x"][0].float() == pytest.approx(batch["x"], abs=0.05)


def test_an_embedded_table_is_read_off_its_model() -> None:
    torch.manual_seed(0)
    like = (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 6)), torch.zeros(2).long()
    task = gl.Task.supervised(EmbeddedTable(), F.cross_entropy, like=like)
    codes = task.fields["x1"]
    assert isinstance(codes.kind, Codes)
    assert codes.classes == 9
    assert [(column.name, column.width) for column in codes.kind.columns] == [("0", 5), ("1", 2), ("2", 9)]
    batch = {"x1": torch.tensor([[3, 1, 7]]), "x": normal(1, 6), "y": torch.tensor([1])}
    seen = gl.observe(task, batch, RECIPE)
    found = registry.get("attack", "ig", steps=400).run(task, seen, gl.Knowledge(training=RECIPE))
    assert found.batch["x1"].tolist() == [[[3, 1, 7]]]


def test_codes_out_of_range_name_their_column() -> None:
    field, codes = EXAMPLES["codes"]
    assert field.kind.allowed(codes, field) == ""
    assert "'sex' holds 0 to 2 of 2" in field.kind.allowed(torch.tensor([[0, 0, 0], [0, 2, 0]]), field)
    [job, _, state] = field.kind.exhibit(codes[0], codes[1], field).cells
    assert (job.name, job.true, job.found, job.right) == ("job", "a", "e", False)
    assert state.true == "h"
