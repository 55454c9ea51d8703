"""TabLeak: rows of a table by relaxed categories and bounded numbers, pooled over restarts, with a confidence."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import gradleak as gl
from conftest import moment, perceptron, private, scene_of, seeded
from gradleak.attack import lowest_match
from gradleak.attacks.tableak import Layout, SoftRows, aligned, certain, pooled, uncertainty, valid
from gradleak.core.assignment import match
from gradleak.engine import Engine
from gradleak.parts.matches import Cosine
from gradleak.parts.predictions import Replay
from gradleak.scenario.fields import UNBOUNDED, Field
from gradleak.scenario.kinds import Column, Table
from gradleak.scenario.task import Batch, Supervised, Task, TaskError

TABLE = Table(
    (
        Column("age", mean=40.0, std=10.0, low=17.0, high=90.0, whole=True),
        Column("work", ("private", "state", "self", "none")),
        Column("income", mean=1.0, std=2.0),
        Column("sex", ("f", "m")),
        Column("share", mean=0.5, std=0.25, low=0.0, high=1.0),
    )
)
TRAINING = gl.LocalTraining(lr=0.5)
LAYOUT = Layout.of(TABLE, math.inf, torch.device("cpu"), torch.float64)


@cache
def task(
    width: int = 48,
    classes: int = 2,
    dtype: torch.dtype = torch.float64,
    activation: type[nn.Module] = nn.ReLU,
) -> Task:
    """A perceptron with two hidden layers on rows of the table."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = (nn.Linear(TABLE.width, width), activation(), nn.Linear(width, width), activation())
        model = nn.Sequential(*hidden, nn.Linear(width, classes)).to(dtype)
    fields = {"x": Field((TABLE.width,), UNBOUNDED, kind=TABLE), "y": Field((), classes=classes)}
    return Task(model, Supervised(cross_entropy), fields)


def rows(count: int, seed: int = 0) -> Batch:
    """Rows that belong to nobody."""
    make = seeded(seed)
    age = (torch.randint(17, 91, (count, 1), generator=make).double() - 40) / 10
    work, sex = (one_hot(torch.randint(size, (count,), generator=make), size).double() for size in (4, 2))
    income = torch.randn(count, 1, generator=make).double()
    share = 4 * torch.rand(count, 1, generator=make).double() - 2
    return {"x": torch.cat([age, work, income, sex, share], 1), "y": torch.arange(count) % 2}


def attacked(batch: Batch, knows: gl.Knowledge | None = None, **settings: Any) -> gl.Reconstruction:
    seen = gl.observe(task(), batch, TRAINING)
    attack = gl.attacks.get("tableak", **{"exact": False, **settings})
    return attack.run(task(), seen, knows or gl.Knowledge(training=TRAINING), engine=Engine(device="cpu"))


def scores(found: Tensor, truth: Tensor) -> dict[str, Tensor]:
    field = task().fields["x"]
    found, truth = TABLE.comparable(found, field), TABLE.comparable(truth, field)
    return TABLE.scores(found[match(TABLE.distance(truth, found))], truth)


# --- the space --------------------------------------------------------------------------------------------------------


def test_decoded_rows_are_shares_and_numbers_inside_their_bounds() -> None:
    decoded = LAYOUT.decode(30 * torch.randn(200, TABLE.width, generator=seeded(), dtype=torch.float64))
    for place in TABLE.blocks:
        assert bool((decoded[:, place] >= 0).all())
        assert torch.allclose(decoded[:, place].sum(1), torch.ones(200, dtype=torch.float64))
    low, high = torch.tensor(TABLE.limits(), dtype=torch.float64).unbind(1)
    assert bool(((decoded >= low) & (decoded <= high)).all())


def test_decoding_is_the_softmax_of_each_block_and_the_sigmoid_of_each_bounded_number() -> None:
    z = torch.randn(5, TABLE.width, generator=seeded(), dtype=torch.float64)
    decoded = LAYOUT.decode(z)
    age, work, income, sex, share = (place for _, place in TABLE.places)
    assert torch.allclose(decoded[:, work], z[:, work].softmax(1))
    assert torch.allclose(decoded[:, sex], z[:, sex].softmax(1))
    assert torch.allclose(decoded[:, age], -2.3 + 7.3 * z[:, age].sigmoid())
    assert torch.allclose(decoded[:, share], 4 * z[:, share].sigmoid() - 2)
    assert torch.equal(decoded[:, income], z[:, income])  # no bounds, no sigmoid


def test_bounds_that_are_too_wide_get_no_sigmoid() -> None:
    layout = Layout.of(TABLE, 5.0, torch.device("cpu"), torch.float64)
    z = torch.randn(5, TABLE.width, generator=seeded(), dtype=torch.float64)
    assert torch.equal(layout.decode(z)[:, 0], z[:, 0])  # 7.3 standard deviations
    assert torch.equal(layout.decode(z)[:, -1], LAYOUT.decode(z)[:, -1])  # 4


@pytest.mark.parametrize("columns", [TABLE.columns[:1], TABLE.columns[1:2]], ids=["numbers only", "categories only"])
def test_tables_of_one_sort_of_column_decode_too(columns: tuple[Column, ...]) -> None:
    table = Table(columns)
    layout = Layout.of(table, math.inf, torch.device("cpu"), torch.float64)
    decoded = layout.decode(torch.zeros(3, table.width, dtype=torch.float64))
    middle = 1.35 if table.numbers else 0.25
    assert torch.allclose(decoded, torch.full_like(decoded, middle))


def test_the_match_is_zero_at_the_true_rows() -> None:
    batch = rows(4)
    seen = gl.observe(task(), batch, TRAINING)
    scene = scene_of(task(), seen, gl.Knowledge(training=TRAINING), y=batch["y"])
    z = 100 * batch["x"].clone()  # the softmax of a one-hot block times 100 is the block itself
    low, high = torch.tensor(TABLE.limits(), dtype=torch.float64).unbind(1)
    for entry in TABLE.numbers:
        inside = (batch["x"][:, entry] - low[entry]) / (high[entry] - low[entry])
        z[:, entry] = inside.logit() if high[entry].isfinite() else batch["x"][:, entry]
    guess = SoftRows(LAYOUT).decode({"z": z}, scene, moment())
    assert torch.allclose(guess["x"], batch["x"], atol=1e-12)
    predicted = Replay()({**guess, "y": batch["y"]}, {}, scene, moment())
    assert float(Cosine().distance(predicted, Cosine().prepare(Replay().target(scene)))) < 1e-12


def test_certain_rows_stay_as_they_are() -> None:
    batch = rows(3)
    known = {"x": batch["x"].clone(), "certain": torch.tensor([True, False, True])}
    seen = gl.observe(task(), batch, TRAINING)
    scene = scene_of(task(), seen)
    space = SoftRows(LAYOUT)
    assert space.constants(scene, scene.draws, None) == {}
    scene = replace(scene, constants=space.constants(scene, scene.draws, known))
    start = space.variables(scene, scene.draws, known)
    assert float(start["z"].abs().max()) <= 1
    x = space.decode(start, scene, moment())["x"]
    assert torch.equal(x[[0, 2]], batch["x"][[0, 2]])
    assert not torch.allclose(x[1], batch["x"][1], atol=0.1)


# --- pooling ----------------------------------------------------------------------------------------------------------


def disturbed(x: Tensor, restarts: int, size: float) -> Tensor:
    noise = torch.randn(restarts, *x.shape, generator=seeded(5), dtype=torch.float64)
    return x + size * noise


def test_restarts_in_any_order_give_the_same_pooled_rows() -> None:
    x, labels = rows(6)["x"], torch.zeros(6, dtype=torch.long)
    each = disturbed(x, 7, 0.05)
    mixed = torch.stack([rows_[torch.randperm(6, generator=seeded(i))] for i, rows_ in enumerate(each)])
    mixed[2] = each[2]
    assert not torch.equal(mixed, each)
    assert torch.equal(aligned(TABLE, mixed, 2, labels), each)
    assert torch.equal(pooled(aligned(TABLE, mixed, 2, labels)), each.median(0).values)
    assert bool((scores(valid(TABLE, pooled(each)), x)["right"] == 1).all())


def test_rows_of_different_labels_are_never_put_in_each_others_place() -> None:
    x = rows(2)["x"]
    swapped = torch.stack([x, x.flip(0)])
    assert torch.equal(aligned(TABLE, swapped, 0, torch.tensor([0, 0])), torch.stack([x, x]))
    assert torch.equal(aligned(TABLE, swapped, 0, torch.tensor([0, 1])), swapped)


def test_valid_rows_have_one_category_and_rounded_whole_numbers() -> None:
    x = valid(TABLE, 3 * torch.randn(50, TABLE.width, generator=seeded(), dtype=torch.float64))
    field = task().fields["x"]
    assert TABLE.allowed(x, field) == ""
    ages = 10 * x[:, 0] + 40
    assert torch.allclose(ages, ages.round(), atol=1e-9)
    assert float(ages.min()) >= 17
    assert bool((x[:, -1].abs() <= 2).all())
    assert torch.allclose(valid(TABLE, x), x)  # already valid


def test_uncertainty_is_zero_where_restarts_agree_and_one_where_they_know_nothing() -> None:
    x = rows(3)["x"]
    sure = uncertainty(TABLE, x.expand(5, *x.shape))
    assert torch.allclose(sure[:, [1, 3]], torch.zeros(3, 2, dtype=torch.float64))
    assert bool((sure[:, [0, 2, 4]] < -10).all())
    even = x.clone()
    for place in TABLE.blocks:
        even[:, place] = 1 / (place.stop - place.start)
    unsure = uncertainty(TABLE, even.expand(5, *x.shape))
    assert torch.allclose(unsure[:, [1, 3]], torch.ones(3, 2, dtype=torch.float64))


def test_uncertainty_of_a_number_is_the_entropy_of_a_normal_law() -> None:
    x = rows(3)["x"].expand(20_000, -1, -1)
    spread = uncertainty(TABLE, x + 0.5 * torch.randn(20_000, 3, 1, generator=seeded(), dtype=torch.float64))
    assert torch.allclose(spread[:, 2], torch.tensor(0.5 * math.log(2 * math.pi * math.e * 0.25)).double(), atol=0.02)


def test_one_restart_says_nothing_about_the_spread_of_a_number() -> None:
    alone = uncertainty(TABLE, rows(3)["x"][None])
    assert bool(alone[:, [0, 2, 4]].isnan().all())
    assert bool(alone[:, [1, 3]].isfinite().all())


# --- the attack -------------------------------------------------------------------------------------------------------


@cache
def found(examples: int, restarts: int = 8, steps: int = 400) -> tuple[Batch, gl.Reconstruction]:
    batch = rows(examples, seed=examples)
    knows = gl.Knowledge(training=TRAINING, given={"y": batch["y"]})
    return batch, attacked(batch, knows, restarts=restarts, steps=steps)


def test_one_row_is_found_exactly() -> None:
    batch, result = found(1)
    assert bool((scores(result.batch["x"][0], batch["x"])["right"] == 1).all())
    age = 10 * result.batch["x"][0, 0, 0] + 40
    assert float(age) == pytest.approx(float(10 * batch["x"][0, 0] + 40), abs=1e-3)  # a whole number


def test_of_four_rows_most_columns_are_right() -> None:
    batch, result = found(4)
    assert float(scores(result.batch["x"][0], batch["x"])["right"].mean()) > 0.8


def test_labels_that_are_not_given_are_read_off() -> None:
    batch = rows(1, seed=3)
    result = attacked(batch, restarts=4, steps=300)
    assert torch.equal(result.batch["y"][0], batch["y"])
    assert float(scores(result.batch["x"][0], batch["x"])["right"]) == 1


def test_a_result_is_valid_rows_of_the_restart_that_matches_best() -> None:
    batch, result = found(4)
    assert torch.equal(result.chosen, lowest_match(result.match))
    assert torch.equal(result.batch["x"][0], result.candidates["x"][0, result.chosen[0]])
    assert TABLE.allowed(result.candidates["x"].flatten(0, 2), task().fields["x"]) == ""
    assert result.match.shape == (1, 8)
    doubts = result.unknowns["uncertainty"]
    assert doubts.shape == (1, 8, 4, len(TABLE.columns))
    assert list(result.settings["uncertainty"]) == [column.name for column in TABLE.columns]
    assert result.settings["uncertainty"]["sex"] == pytest.approx(float(doubts[0, 0, :, 3].mean()))


def test_the_match_of_a_result_is_that_of_its_rows() -> None:
    """Of the valid rows, not of the relaxed ones that the search ended with."""
    batch, result = found(4)
    scene = scene_of(task(), gl.observe(task(), batch, TRAINING), gl.Knowledge(training=TRAINING))
    guess = {"x": result.batch["x"][0].double(), "y": batch["y"]}
    expected = Cosine().distance(Replay()(guess, {}, scene, moment()), Cosine().prepare(Replay().target(scene)))
    assert float(result.match.min()) == pytest.approx(float(expected), rel=1e-3, abs=1e-6)


def test_wrong_entries_are_less_sure_than_right_ones() -> None:
    """On average over batches that are too large for the network, categories and numbers apart."""
    sums = {(sort, wrong): [0.0, 0] for sort in ("categories", "numbers") for wrong in (True, False)}
    for seed in range(3):
        batch = rows(16, seed=20 + seed)
        knows = gl.Knowledge(training=TRAINING, given={"y": batch["y"]})
        result = attacked(batch, knows, restarts=10, steps=200)
        x = result.batch["x"][0].double()
        order = match(TABLE.distance(batch["x"], x))
        errors = TABLE.wrong(x[order], batch["x"])
        doubts = result.unknowns["uncertainty"][0, 0][order]
        for at, column in enumerate(TABLE.columns):
            for wrong in (True, False):
                values = doubts[errors[:, at] == wrong, at]
                total = sums["categories" if column.categories else "numbers", wrong]
                total[0] += float(values.sum())
                total[1] += len(values)
    assert min(count for _, count in sums.values()) > 5
    mean = {key: total / count for key, (total, count) in sums.items()}
    assert mean["categories", True] > mean["categories", False] + 0.1
    assert mean["numbers", True] > mean["numbers", False] + 0.1


def test_the_answer_may_always_be_the_pooled_batch() -> None:
    batch = rows(8, seed=8)
    knows = gl.Knowledge(training=TRAINING, given={"y": batch["y"]})
    by_match, always = (attacked(batch, knows, restarts=4, steps=60, answer=answer) for answer in ("match", "pooled"))
    assert by_match.settings["pooled"] == [False]
    assert always.settings["pooled"] == [True]
    assert torch.equal(by_match.chosen, always.chosen)
    assert not torch.equal(by_match.batch["x"], always.batch["x"])
    assert float(always.match[0, always.chosen[0]]) > float(by_match.match.min())
    with pytest.raises(ValueError, match="answer must be 'match' or 'pooled'; given 'best'"):
        gl.attacks.get("tableak", answer="best")


def test_rows_that_are_known_are_returned_and_help_the_others() -> None:
    batch = rows(6, seed=1)
    seen = gl.observe(task(), batch, TRAINING)
    knows = gl.Knowledge(training=TRAINING, given={"y": batch["y"]})
    certain = torch.tensor([[True, True, False, True, True, False]])
    attack = gl.attacks.get("tableak", restarts=4, steps=300)
    result = attack.run(
        task(), seen, knows, engine=Engine(device="cpu"), begin={"x": batch["x"][None], "certain": certain}
    )
    assert torch.allclose(result.batch["x"][0][certain[0]].double(), batch["x"][certain[0]], atol=1e-5)
    rest = ~certain[0]
    assert float(scores(result.batch["x"][0][rest], batch["x"][rest])["right"].mean()) == 1


def test_rows_that_spear_is_certain_of_are_exact_and_need_no_search() -> None:
    """Labels are read off too, in the order of its rows."""
    wide, batch = task(96), rows(4, seed=2)
    seen = gl.observe(wide, batch, TRAINING)
    attack = gl.attacks.get("tableak", restarts=2, steps=200)
    result = attack.run(wide, seen, gl.Knowledge(training=TRAINING), engine=Engine(device="cpu"))
    assert result.settings["certain"] == [4]
    assert result.evaluations == 1
    x = result.batch["x"][0].double()
    order = match(TABLE.distance(batch["x"], x))
    assert torch.allclose(x[order], batch["x"], atol=1e-4)
    assert torch.equal(result.batch["y"][0][order], batch["y"])
    assert float(result.match.min()) < 1e-6


def test_a_partly_certain_batch_is_searched_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, sure = rows(4, seed=2), torch.tensor([True, False, True, True])
    monkeypatch.setattr("gradleak.attacks.tableak.certain", lambda table, x, agreement: sure.expand(agreement.shape))
    seen = gl.observe(task(96), batch, TRAINING)
    knows = gl.Knowledge(training=TRAINING, given={"y": batch["y"]})
    attack = gl.attacks.get("tableak", restarts=2, steps=200)
    result = attack.run(task(96), seen, knows, engine=Engine(device="cpu"))
    assert result.settings["certain"] == [3]
    assert result.evaluations == 200
    assert torch.equal(result.batch["y"][0], batch["y"])
    right = scores(result.batch["x"][0], batch["x"])["right"]
    assert bool((right == 1).all())


def test_where_spear_does_not_apply_the_search_is_for_all_rows() -> None:
    smooth, batch = task(activation=nn.Sigmoid), rows(2)
    seen = gl.observe(smooth, batch, TRAINING)
    attack = gl.attacks.get("tableak", restarts=2, steps=3)
    result = attack.run(smooth, seen, gl.Knowledge(training=TRAINING), engine=Engine(device="cpu"))
    assert result.settings["certain"] == [0]
    assert result.settings["exact"].startswith("sparse-span does not apply: ")
    assert result.evaluations == 3


def test_a_mixture_of_rows_is_never_certain() -> None:
    x = rows(2)["x"]
    mixed = torch.stack([x[0], x.mean(0), x[1]])
    assert certain(TABLE, mixed, torch.tensor([1.0, 1.0, 0.95])).tolist() == [True, False, True]
    assert certain(TABLE, x, torch.tensor([0.5, torch.nan])).tolist() == [False, False]
    numbers = Table(TABLE.columns[:1])  # no block tells a row from a mixture
    assert certain(numbers, x[:, :1], torch.tensor([1.0, 0.95])).tolist() == [True, False]


def test_targets_of_different_sizes_are_attacked_together() -> None:
    sizes = (1, 3)
    seen = [gl.observe(task(), rows(size, seed=size), TRAINING, key=f"client {size}") for size in sizes]
    attack = gl.attacks.get("tableak", restarts=2, steps=3, exact=False)
    result = attack.run(task(), seen, gl.Knowledge(training=TRAINING), engine=Engine(device="cpu"))
    assert result.examples == sizes
    assert bool(result.batch["x"][0, 1:].isnan().all())
    assert bool(result.target(0)["x"].isfinite().all())
    assert bool(result.unknowns["uncertainty"][0, :, 1:].isnan().all())
    alone = attack.run(task(), seen[0], gl.Knowledge(training=TRAINING), engine=Engine(device="cpu"))
    assert torch.allclose(alone.batch["x"][0], result.target(0)["x"], atol=1e-5)


def test_one_step_is_enough_to_run() -> None:
    result = attacked(rows(2), restarts=1, steps=1)
    assert result.batch["x"].shape == (1, 2, TABLE.width)
    assert bool(result.match.isfinite().all())


def test_what_is_no_table_is_refused_in_plain_words() -> None:
    images = perceptron()
    seen = gl.observe(images, private(1), TRAINING)
    with pytest.raises(TaskError, match="unsupported: tableak cannot attack this task: it recovers rows of a table"):
        gl.attacks.get("tableak").run(images, seen, gl.Knowledge(training=TRAINING))


@pytest.mark.parametrize("setting", ["steps", "restarts", "waves", "lr", "widest"])
def test_settings_that_make_no_sense_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be a positive"):
        gl.attacks.get("tableak", **{setting: 0})
