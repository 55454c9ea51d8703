"""`span`: the maps that a convolution saw in closed form, the images behind them, and their labels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss

import gradleak as gl
from conftest import normal, private, scene_of, tiny, uniform
from gradleak.attacks.spans import classifiers, maps
from gradleak.attacks.spans.classifiers import Span, labelled
from gradleak.attacks.spans.inversion import lasting, repaired
from gradleak.attacks.spans.maps import Maps, separated, solve_maps
from gradleak.attacks.spans.telling import Told, layers_of, span_of, tells, told_by
from gradleak.auto.members import MEMBERS, PRESETS
from gradleak.auto.traits import Case
from gradleak.core.random import Draws, key
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.row_space import rows
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.observation import Observation
from gradleak.scenario.rules import SGD, Adam
from gradleak.scenario.task import Batch, Task, TaskError

GRADIENT = gl.LocalTraining(lr=1.0)
KNOWS = gl.Knowledge(training=GRADIENT)
CLASSES, WIDTH = 5, 64
SECOND = "2"  # the convolution behind the first ReLU


@cache
def net(stride: int = 1, norm: bool = False, width: int = WIDTH, first: int = 16) -> Task:
    """Three convolutions on 3 x 8 x 8; the first halves the image, the second sees maps of 16 x 4 x 4."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, first, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(first, width, 3, stride=stride, padding=1), nn.BatchNorm2d(width) if norm else nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES),
        )  # fmt: skip
    like = (torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model.double().eval(), cross_entropy, like=like)


def pictures(examples: int, seed: int = 0) -> Batch:
    """Smooth images, each of a class of its own."""
    coarse = uniform(examples, 3, 4, 4, seed=seed)
    return {"x": interpolate(coarse, size=(8, 8), mode="bicubic").clamp(0, 1), "y": torch.arange(examples) % CLASSES}


def seen(task: Task, batch: Batch) -> Observation:
    return gl.observe(task, batch, GRADIENT, key="target")


def without_classifier(observed: Observation) -> Observation:
    withheld = {name: torch.zeros_like(u) if name.startswith("8.") else u for name, u in observed.update.items()}
    return replace(observed, update=withheld)


def maps_of(task: Task, batch: Batch, name: str = SECOND) -> Tensor:
    """The true maps before this convolution, (examples, features), of unit length."""
    caught = task.inputs_of([name], task.weights(), batch)[name].detach().flatten(1)
    return caught / caught.norm(dim=1, keepdim=True)


def solved(task: Task, batch: Batch, name: str = SECOND) -> Maps:
    """What the gradient of this convolution gives."""
    layer = task.model.get_submodule(name)
    assert isinstance(layer, nn.Conv2d)
    examples = len(batch["x"])
    (own,) = [each for each in layers_of(task, examples) if each.name == name]
    shape = tuple(task.inputs_of([name], task.weights(), batch)[name].shape[1:])
    update = seen(task, batch).update[f"{name}.weight"]
    return solve_maps(layer, span_of(update, own.rows, 1e-12), shape, examples, Draws(key("maps")))


def fields_of(told: Told, example: int) -> Batch:
    """The scene fields of the search for one example."""
    return told.of_example(example, {layer: flat for layer in told.layers for flat in told.flat_of(layer)})


def outside(rows: Tensor, basis: Tensor) -> float:
    """How far the worst row lies outside of the span, as a length."""
    return float((rows - (rows @ basis.T) @ basis).norm(dim=1).max())


# --- maps in closed form ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("name", [SECOND, "4"])
def test_the_maps_of_all_examples_follow_from_a_gradient(
    examples: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps, "SETTLED", 0.0)  # to the last digit
    found = solved(net(), pictures(examples), name)
    assert found.determined
    assert float(found.levels[:examples].max()) < 1e-12
    assert float(found.levels[examples]) > 1e-3
    torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(examples).double())
    assert outside(maps_of(net(), pictures(examples), name), found.basis) < 1e-8


def test_the_iteration_stops_when_they_are_close_enough() -> None:
    found = solved(net(), pictures(3))
    assert found.determined
    assert found.level < 1e-8 < 1e-3 < float(found.levels[3])
    assert outside(maps_of(net(), pictures(3)), found.basis) < 1e-3


@pytest.mark.parametrize("examples", [1, 3])
def test_behind_a_stride_shifted_maps_solve_the_equations_too(examples: int) -> None:
    assert not solved(net(stride=2), pictures(examples)).determined


def test_a_layer_with_more_places_than_outputs_is_not_used() -> None:
    assert [layer.name for layer in layers_of(net(), 4)] == [SECOND, "4"]  # 4 x 16 places, 64 outputs
    assert layers_of(net(), 5) == ()
    assert layers_of(net(width=63), 4) == ()


def test_one_layer_that_tells_is_left_where_places_get_fewer() -> None:
    assert [layer.name for layer in layers_of(net(stride=2), 5)] == [SECOND, "4"]
    observed = without_classifier(seen(net(stride=2), pictures(2)))  # else its maps are peeled
    result = told_by(scene_of(net(stride=2), observed, KNOWS), 5, 1e-10, Draws(key("")))
    assert [layer.whole for layer in result.layers] == [False, True]  # a span of patches, and maps
    assert [set(entry) for entry in result.record] == [
        {"layer", "rank", "rows"},
        {"layer", "rank", "rows", "level", "gap"},
    ]


@pytest.mark.parametrize("change", ["order", "labels"])
def test_maps_depend_neither_on_labels_nor_on_the_order(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "SETTLED", 0.0)
    batch = pictures(3)
    if change == "order":
        other = {name: value[torch.tensor([2, 0, 1])] for name, value in batch.items()}
    else:
        other = {**batch, "y": torch.tensor([4, 4, 2])}
    one, two = solved(net(), batch), solved(net(), other)
    assert outside(two.basis, one.basis) < 1e-7
    assert outside(one.basis, two.basis) < 1e-7


# --- examples apart ---------------------------------------------------------------------------------------------------


def mixed_and_parted(true: Tensor) -> tuple[Tensor, Tensor]:
    """What is found in a random mixture of these maps, and its cosines to them, (found, true)."""
    true = true / true.norm(dim=1, keepdim=True)
    mixed = torch.linalg.qr((normal(len(true), len(true), seed=1) @ true).T)[0].T
    found = separated(mixed)
    return found, found @ true.T


@pytest.mark.parametrize("examples", [1, 3])
def test_relu_parts_the_examples_of_a_mixture(examples: int) -> None:
    true = normal(examples, 256).relu()
    found, cosines = mixed_and_parted(true)
    assert found.shape == true.shape
    assert float(cosines.max(1).values.min()) > 0.9999
    assert sorted(cosines.argmax(1).tolist()) == list(range(examples))  # each once


def test_mixtures_of_nearly_collinear_maps_are_not_taken_for_examples() -> None:
    """Maps of an untrained network are zero at nearly the same places."""
    _, cosines = mixed_and_parted(maps_of(net(), pictures(3)))
    assert float(cosines.max(1).values.min()) > 0.9999


def test_mixtures_without_zeros_are_not_taken_for_examples() -> None:
    """Maps behind no ReLU have both signs everywhere."""
    basis = torch.linalg.qr(normal(256, 3))[0].T
    assert len(separated(basis)) == 0


def test_an_example_is_searched_for_with_its_own_map() -> None:
    batch = {**pictures(3), "x": 3 * normal(3, 3, 8, 8)}  # maps that differ, as a trained network's do
    result = told_by(scene_of(net(), seen(net(), batch), KNOWS), 5, 1e-10, Draws(key("")))
    assert result.found == 3
    assert len(result.own) == 2  # the deep layer's maps, and those peeled off the layer before it
    assert max(result.peeled.values()) < 1e-8
    for name, own in result.own.items():
        own = own / own.norm(dim=1, keepdim=True)
        assert float((own @ maps_of(net(), batch, name).T).max(1).values.min()) > 0.999
        fields = fields_of(result, 1)
        torch.testing.assert_close(fields[f"span {name}"][0], result.own[name][1])  # a point: its scale is known
        assert not bool(fields[f"span {name}"][1:].any())
    assert any(float(fields[f"weight {name}"]) > 0.9 for name in result.own)  # exact maps count


def test_maps_are_told_where_no_classifier_gives_deltas() -> None:
    """No class, or a classifier whose gradient was withheld: closed form, and nothing peeled."""
    batch = {**pictures(3), "x": 3 * normal(3, 3, 8, 8)}
    regression = gl.Task.supervised(net().model, mse_loss, like=(torch.zeros(1, 3, 8, 8), torch.zeros(1, CLASSES)))
    values = {"x": batch["x"], "y": normal(3, CLASSES)}
    for task, each in (
        (net(), without_classifier(seen(net(), batch))),
        (regression, gl.observe(regression, values, GRADIENT, key="target")),
    ):
        result = told_by(scene_of(task, each, KNOWS), 5, 1e-10, Draws(key("")))
        assert not result.peeled
        assert result.found == 3


def test_after_several_local_steps_true_rows_lie_in_the_span_of_all_passes(double: gl.Engine) -> None:
    """At the weights that were sent: a span of so many directions as one step would have does not hold them."""
    batch, other = pictures(1), pictures(1, seed=7)
    training = gl.LocalTraining(lr=0.3, epochs=3, batch_size=1, optimiser=SGD(momentum=0.5))
    observed, knows = gl.observe(net(), batch, training, key="target"), gl.Knowledge(training=training)
    told = told_by(scene_of(net(), observed, knows), 5, 1e-12, Draws(key("")))
    (layer,) = lasting(told.layers)
    (start,) = (each for each in told.layers if each.start)
    assert (layer.name, layer.rows, start.name, start.whole) == (SECOND, 3 * 16, "4", True)

    def share(x: Tensor, directions: Tensor) -> float:
        inputs = net().inputs_of([SECOND], net().weights(), {**batch, "x": x})[SECOND].detach()
        table = rows(net().model.get_submodule(SECOND), inputs)
        return outside(table, directions) / float(table.norm())

    wide, narrow = told.flats[SECOND][1:], span_of(observed.update[f"{SECOND}.weight"], 16, 1e-12)
    assert share(batch["x"], wide) < 1e-12
    assert share(batch["x"], narrow) > 1e-3
    assert share(other["x"], wide) > 1e-3
    attack = gl.attacks.get("span", steps=150, repairs=0, fine_steps=0)
    found = attack.run(net(), observed, knows, engine=double)
    grey = -10 * (batch["x"] - 0.5).square().mean().log10()
    assert float(gl.metrics.compare(found, batch).psnr) > float(grey) + 3


def test_without_room_for_rows_that_moved_spans_are_those_of_one_step() -> None:
    batch = pictures(2)
    training = gl.LocalTraining(lr=1e-3, epochs=3)
    observed = gl.observe(net(), batch, training, key="target")
    told = told_by(scene_of(net(), observed, gl.Knowledge(training=training)), 5, 1e-12, Draws(key("")))
    assert {line["layer"]: line["rows"] for line in told.record}[SECOND] == 2 * 16
    assert not any(layer.start for layer in told.layers)


# --- labels -----------------------------------------------------------------------------------------------------------


def test_labels_of_known_images_are_read() -> None:
    batch = {**pictures(3), "y": torch.tensor([3, 1, 3])}
    scene = scene_of(net(), seen(net(), batch), KNOWS)
    order = torch.tensor([1, 2, 0])
    y, kept = labelled(scene, batch["x"][order], Labels(label_rule("auto")))
    assert y["y"].tolist() == batch["y"][order].tolist()
    assert kept.tolist() == [0, 1, 2]


def test_given_labels_order_the_images() -> None:
    batch = {**pictures(3), "y": torch.tensor([3, 1, 0])}
    scene = scene_of(net(), seen(net(), batch), KNOWS, y=batch["y"])
    shuffled = batch["x"][torch.tensor([1, 2, 0])]
    y, order = labelled(scene, shuffled, Labels(label_rule("auto")))
    assert torch.equal(y["y"], batch["y"])
    torch.testing.assert_close(shuffled[order], batch["x"])


# --- the attack -------------------------------------------------------------------------------------------------------


def attacked(batch: Batch, engine: gl.Engine, knows: gl.Knowledge = KNOWS, **settings: float) -> gl.Reconstruction:
    attack = gl.attacks.get("span", **{"steps": 60, "repairs": 0, "fine_steps": 0, **settings})
    return attack.run(net(), seen(net(), batch), knows, engine=engine)


@pytest.mark.parametrize("examples", [1, 2])
def test_images_and_labels_come_out_of_a_gradient_alone(examples: int, double: gl.Engine) -> None:
    batch = pictures(examples, seed=examples)
    short, long = attacked(batch, double, steps=3), attacked(batch, double)
    assert max(long.settings["outside"][0]) < 0.5 * max(short.settings["outside"][0])
    truth = {name: value[None] for name, value in batch.items()}
    grey = -10 * (batch["x"] - 0.5).square().mean((1, 2, 3)).log10()
    assert float(gl.metrics.compare(long, truth).psnr.min()) > float(grey.max()) + 3
    assert sorted(long.batch["y"][0].tolist()) == batch["y"].tolist()
    assert long.settings["apart"] == [examples]
    assert [entry["layer"] for entry in long.settings["told"][0]][-2:] == [SECOND, "4"]
    assert len(long.settings["outside"][0]) == examples
    assert long.settings["attack"].startswith("Span(")


def test_given_labels_stay_in_their_order(double: gl.Engine) -> None:
    batch = {**pictures(2, seed=2), "y": torch.tensor([4, 1])}
    result = attacked(batch, double, replace(KNOWS, given={"y": batch["y"]}))
    assert result.batch["y"][0].tolist() == [4, 1]
    errors = (result.batch["x"][0][:, None] - batch["x"]).square().flatten(2).mean(2)  # (found, true)
    assert errors.argmin(1).tolist() == [0, 1]


def test_several_targets_are_searched_for_together(double: gl.Engine) -> None:
    batches = [pictures(2, seed=2), pictures(2, seed=3)]
    targets = [gl.observe(net(), each, GRADIENT, key=str(row)) for row, each in enumerate(batches)]
    result = gl.attacks.get("span", steps=6, repairs=1, fine_steps=0).run(net(), targets, KNOWS, engine=double)
    assert result.batch["x"].shape == (2, 2, 3, 8, 8)
    assert [len(each) for each in result.settings["outside"]] == [2, 2]


def test_gradient_matching_takes_over_only_with_a_lower_match(double: gl.Engine) -> None:
    batch = pictures(1, seed=1)
    alone, both = attacked(batch, double, steps=6), attacked(batch, double, steps=6, fine_steps=20)
    assert float(both.match.min()) <= float(alone.match.min())


def test_images_that_do_not_explain_the_update_are_matched_too(
    double: gl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right maps do not always tell the image: those of an untrained network are nearly the same for all."""
    batch = pictures(1, seed=1)
    first = attacked(batch, double, steps=3, solved=1e9)
    monkeypatch.setattr(classifiers, "UNEXPLAINED", float(first.match.min()) / 2)
    both = attacked(batch, double, steps=3, solved=1e9, fine_steps=60)
    assert both.settings["matched"] == [True]
    assert float(both.match.min()) < float(first.match.min())


def test_a_repair_never_makes_it_worse(double: gl.Engine) -> None:
    batch = pictures(1, seed=1)
    alone, both = attacked(batch, double, steps=30), attacked(batch, double, steps=30, repairs=2)
    assert both.settings["outside"][0][0] <= alone.settings["outside"][0][0]


def test_a_repair_leaves_places_without_doubt_as_they_are() -> None:
    batch = pictures(1, seed=1)
    scene = scene_of(net(), seen(net(), batch), KNOWS)
    result = told_by(scene, 5, 1e-10, Draws(key("")))
    flats, x = fields_of(result, 0), batch["x"]
    broken = x.clone()
    broken[..., :2, :2] = 1 - broken[..., :2, :2]
    mended = repaired(scene, result.layers, flats, broken, Draws(key("repair")))
    assert float((mended - broken)[..., :4, :4].abs().max()) > 0.05
    torch.testing.assert_close(mended[..., -1, -1], broken[..., -1, -1])
    even = (1 + 0.05 * normal(1, 3, 8, 8)) * x  # as wrong everywhere: no place stands out
    assert float((repaired(scene, result.layers, flats, even, Draws(key("repair"))) - even).abs().mean()) < 0.1


@pytest.mark.parametrize(
    ("task", "batch", "runs"),
    [
        (net(), pictures(1), True),
        (net(), pictures(4), True),
        (net(), pictures(5), False),  # more places than outputs
        (tiny(), private(1), False),  # its only convolution sees the image itself: the scale stays open
    ],
)
def test_auto_runs_it_where_a_convolution_tells(task: Task, batch: Batch, runs: bool) -> None:
    assert tells(task, len(batch["x"])) == runs
    (member,) = [each for each in MEMBERS if each.name == "span"]
    case = Case(task, (gl.Track((seen(task, batch),)),), KNOWS, gl.Engine("cpu"))
    assert all(member.fits(case, preset) == runs for preset in PRESETS)
    adam = replace(case, knows=gl.Knowledge(training=replace(GRADIENT, optimiser=Adam())))
    assert not member.fits(adam, "quick")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_networks_and_batches_that_no_layer_tells_are_refused_with_what_to_do() -> None:
    narrow = net(width=12, first=8)
    assert "no convolution" in Span().refuses(narrow)
    with pytest.raises(UnsupportedTask, match="no convolution"):
        Span().run(narrow, seen(narrow, pictures(1)), KNOWS)
    with pytest.raises(TaskError, match=r"for 5 examples in an update.*gradleak check.*'ig'"):
        Span().run(net(), seen(net(), pictures(5)), KNOWS)


def test_what_adam_makes_of_gradients_is_refused() -> None:
    knows = gl.Knowledge(training=replace(GRADIENT, optimiser=Adam()))
    with pytest.raises(UnsupportedTask, match="reads gradients, and these clients send what Adam makes"):
        Span().run(net(), seen(net(), pictures(1)), knows)


def test_targets_that_are_no_class_are_refused_unless_given() -> None:
    like = (torch.zeros(1, 3, 8, 8), torch.zeros(1, CLASSES))
    task = gl.Task.supervised(net().model, mse_loss, like=like)
    assert "y is none; give it" in Span().refuses(task)
    assert not Span().refuses(task, {"y"})


@pytest.mark.parametrize(
    "settings", [{"steps": 0}, {"layers": 0}, {"restarts": 0}, {"repairs": -1}, {"fine_steps": -1}, {"tv": -1.0}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        gl.attacks.get("span", **settings)
