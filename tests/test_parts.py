"""Matches, priors, starts, spaces and predictions, each by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import CLASSES, SHAPE, largest_difference, moment, network, private, scene_of, tiny
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.parts.matches import Cosine, LayerNorms, Relative, RowCosine, Scaled, SquaredError
from gradleak.parts.predictions import Replay, ReplayedGradient, Representation, gradient
from gradleak.parts.priors import (
    BatchNormStatistics,
    FeatureDistance,
    GroupConsistency,
    ImageNorm,
    LabelDistance,
    OpponentVariation,
    SummedVariation,
    TotalVariation,
)
from gradleak.parts.spaces import JointSpace, Mosaic, Normal, Pixels, SoftField, Solid, Surrogate, Tiled, Uniform
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge, MissingKnowledge
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch

A = {"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "b": torch.tensor([0.0, 12.0])}
B = {"w": torch.tensor([[1.0, 2.0], [0.0, 4.0]]), "b": torch.tensor([1.0, 10.0])}


def scored(match: object, predicted: tree.Params, observed: tree.Params) -> Tensor:
    return match.reduce(match.residual(predicted, match.prepare(observed)))


# --- matches ----------------------------------------------------------------------------------------------------------


def test_squared_error_is_a_plain_sum() -> None:
    assert scored(SquaredError(), A, B) == 4 + 4 + 1 + 4


def test_layer_norms_are_summed_without_squares() -> None:
    torch.testing.assert_close(scored(LayerNorms(), A, B), torch.tensor(8.0).sqrt() + torch.tensor(5.0).sqrt())
    assert grad(lambda a: scored(LayerNorms(), a, A))(A)["b"].isfinite().all()


def test_scaled_is_a_factor() -> None:
    assert scored(Scaled(SquaredError(), 0.1), A, B) == pytest.approx(1.3)
    assert Scaled(Cosine(), 0.1).scale_free
    assert not Scaled(SquaredError(), 0.1).scale_free


def test_cosine_is_one_minus_the_cosine_of_everything_together() -> None:
    a, b = tree.flatten(A), tree.flatten(B)
    torch.testing.assert_close(scored(Cosine(), A, B), 1 - a @ b / (a.norm() * b.norm()))


def test_cosine_is_blind_to_scale_and_bounded() -> None:
    torch.testing.assert_close(scored(Cosine(), tree.scale(A, 1e-3), tree.scale(B, 7.0)), scored(Cosine(), A, B))
    assert scored(Cosine(), A, tree.scale(A, -2.0)) == pytest.approx(2)


def test_cosine_survives_an_update_of_zeros() -> None:
    assert scored(Cosine(), A, tree.zeros_like(A)) == pytest.approx(0.5)
    assert tree.finite(grad(lambda a: scored(Cosine(), a, B))(tree.zeros_like(A)))


def test_cosine_keeps_its_digits_in_float32() -> None:
    """At an angle of 1e-5 the cosine is 1 - 5e-11: in float32, 1 - cos has no digit of it."""
    source = Draws(draws.key("digits"))
    exact = source.normal((1000,), dtype=torch.float64)
    beside = exact + 1e-5 * source.normal((1000,), stream=1, dtype=torch.float64)
    expected = 0.5 * (exact / exact.norm() - beside / beside.norm()).square().sum()
    short, near = {"g": exact.float()}, {"g": beside.float()}
    assert float(scored(Cosine(), near, short)) == pytest.approx(float(expected), rel=0.02)
    naive = 1 - torch.dot(short["g"], near["g"]) / (short["g"].norm() * near["g"].norm())
    assert float(naive) != pytest.approx(float(expected), rel=0.02)


def test_squares_of_the_residual_are_the_match_where_it_says_so() -> None:
    for match in (SquaredError(), Cosine(), Relative(), Scaled(Cosine(), 3.0), Scaled(SquaredError(), 0.5)):
        assert match.squares
        squares = tree.squared_norm(match.residual(A, match.prepare(B)))
        torch.testing.assert_close(scored(match, A, B), squares)
        torch.testing.assert_close(match.distance(A, match.prepare(B)), squares)


def test_row_cosine_takes_the_mean_over_examples() -> None:
    rows = {"features": torch.tensor([[1.0, 0.0], [0.0, -2.0]])}
    observed = {"features": torch.tensor([[3.0, 0.0], [0.0, 1.0]])}
    assert scored(RowCosine(), rows, observed) == pytest.approx((0 + 2) / 2)
    assert scored(RowCosine(absolute=True), rows, observed) == pytest.approx(0)


# --- predictions ------------------------------------------------------------------------------------------------------


def seen_by(task: gl.Task, batch: Batch, **settings: object) -> tuple[gl.Observation, LocalTraining]:
    training = LocalTraining(**{"lr": 0.5, **settings})
    return gl.observe(task, batch, training), training


def test_a_replay_without_a_recipe_is_the_plain_gradient() -> None:
    task, batch = tiny(), private(2)
    scene = scene_of(task, seen_by(task, batch)[0])
    assert largest_difference(Replay()(batch, {}, scene, moment()), task.gradient(task.weights(), batch)) == 0


def test_a_replays_own_recipe_goes_before_the_known_one() -> None:
    task, batch = tiny(), private(2)
    seen, training = seen_by(task, batch, steps=3)
    known = scene_of(task, seen, gl.Knowledge(training=training))
    assert largest_difference(Replay()(batch, {}, known, moment()), seen.update) < 1e-15
    coarse = Replay(LocalTraining(lr=1.5))(batch, {}, known, moment())
    assert largest_difference(coarse, tree.scale(task.gradient(task.weights(), batch), 1.5)) < 1e-15


def test_only_a_match_that_sees_the_scale_needs_the_recipe() -> None:
    assert Replay().needs_for_scale == {"training"}
    assert Replay(LocalTraining(lr=1.0)).needs_for_scale == frozenset()
    assert gl.attacks.get("ig").needs == frozenset()
    assert gl.attacks.get("idlg").needs == {"training"}


def test_the_observed_update_becomes_a_gradient_by_the_clients_rates() -> None:
    task, batch = tiny(), private(2)
    seen, training = seen_by(task, batch)
    scene = scene_of(task, seen, gl.Knowledge(training=training))
    assert largest_difference(gradient(scene), task.gradient(task.weights(), batch)) < 1e-15


@pytest.mark.parametrize(
    "settings", [{"lr": 0.01}, {"lr": torch.tensor(0.2)}, {"optimiser": SGD(momentum=0.9, nesterov=True)}]
)
def test_a_replayed_gradient_is_the_gradient_whatever_the_clients_rate(settings: dict) -> None:
    task, batch = tiny(), private(2)
    seen, training = seen_by(task, batch, **settings)
    scene, own = scene_of(task, seen, gl.Knowledge(training=training)), task.gradient(task.weights(), batch)
    assert largest_difference(ReplayedGradient().target(scene), own) < 1e-7
    assert largest_difference(ReplayedGradient()(batch, {}, scene, moment()), own) < 1e-7
    unknown = scene_of(task, seen)
    assert largest_difference(ReplayedGradient().target(unknown), Replay().target(unknown)) == 0


def test_noise_is_replayed_in_the_unit_of_a_gradient_too() -> None:
    task, batch = tiny(), private(2)
    seen, training = seen_by(task, batch, lr=0.01)
    knows = gl.Knowledge(training=training, defence=gl.registry.get("defence", "local-gaussian", sigma=0.1))
    scene, source = scene_of(task, seen, knows), Draws(draws.key("noise"))
    plain, scaled = (each.disturbed(scene, source) for each in (Replay(), ReplayedGradient()))
    assert largest_difference(scaled, tree.scale(plain, 100.0)) < 1e-12


def test_a_single_examples_features_are_the_negative_gradient_row_of_its_label() -> None:
    task, batch = tiny(), private(1)
    seen, training = seen_by(task, batch)
    scene = scene_of(task, seen, gl.Knowledge(training=training), y=batch["y"])
    predict = Representation()
    assert scored(RowCosine(), predict(batch, {}, scene, moment()), predict.target(scene)) < 1e-15
    against = Representation(signed=False)
    assert scored(RowCosine(), against(batch, {}, scene, moment()), against.target(scene)) == pytest.approx(2)
    assert scored(RowCosine(absolute=True), against(batch, {}, scene, moment()), against.target(scene)) < 1e-15


# --- priors -----------------------------------------------------------------------------------------------------------


def image(*rows: list[float]) -> Batch:
    return {"x": torch.tensor(rows)[None, None]}


STEPS = image([0.0, 1.0, 3.0], [0.0, 2.0, 2.0])  # across: 1, 2, 2, 0; down: 0, 1, -1


def any_scene() -> TargetView:
    task = tiny()
    return scene_of(task, seen_by(task, private(1))[0])


def test_total_variation_by_hand() -> None:
    value = TotalVariation(2.0)(STEPS, {}, any_scene(), moment())
    assert value == pytest.approx(2 * ((1 + 2 + 2 + 0) / 4 + (0 + 1 + 1) / 3))


def test_summed_variation_by_hand() -> None:
    assert SummedVariation(first=1.0)(STEPS, {}, any_scene(), moment()) == 5 + 2
    assert SummedVariation(second=1.0)(STEPS, {}, any_scene(), moment()) == 9 + 2
    assert SummedVariation()(STEPS, {}, any_scene(), moment()) == 0


def test_opponent_variation_by_hand() -> None:
    grey = {"x": torch.zeros(1, 1, 2, 2)}
    grey["x"][..., 0, 1], grey["x"][..., 1, 0] = 3.0, 4.0
    assert OpponentVariation(2.0)(grey, {}, any_scene(), moment()) == pytest.approx(2 * 5.0)
    # A grey step in three equal channels: the three colour differences are flat and halve the mean.
    colour = {"x": grey["x"].expand(1, 3, 2, 2)}
    assert OpponentVariation(2.0)(colour, {}, any_scene(), moment()) == pytest.approx(5.0, rel=1e-3)
    two = {"x": torch.cat([colour["x"], torch.zeros(1, 3, 2, 2)])}  # images apart: a flat one beside it halves the mean
    assert OpponentVariation(2.0)(two, {}, any_scene(), moment()) == pytest.approx(2.5, rel=1e-3)


def test_image_norm_is_per_image_and_per_pixel_where_asked() -> None:
    batch = {"x": torch.tensor([3.0, 4.0, 0.0, 0.0, 6.0, 8.0, 0.0, 0.0]).reshape(2, 1, 2, 2)}
    assert ImageNorm(1.0)(batch, {}, any_scene(), moment()) == 15
    assert ImageNorm(1.0, per_pixel=True)(batch, {}, any_scene(), moment()) == 15 / 4
    scene = any_scene()
    assert grad(lambda x: ImageNorm(1.0)({"x": x}, {}, scene, moment()))(torch.zeros(1, 1, 2, 2)).isfinite().all()


@pytest.mark.parametrize("norm", ["eval", "train"])
def test_batch_norm_statistics_by_hand(norm: str) -> None:
    task, batch = tiny(norm=norm), private(3)
    scene = scene_of(task, seen_by(task, batch)[0], y=batch["y"])
    inputs, layer = task.model[0](batch["x"]), task.model[1]
    mean, var = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), correction=0)
    expected = (mean - layer.running_mean).norm() + (var - layer.running_var).norm()
    value = BatchNormStatistics(0.1, first=10.0)(batch, {}, scene, moment())
    torch.testing.assert_close(value, 0.1 * 10 * expected)


def test_returned_statistics_are_those_of_the_client() -> None:
    """Held statistics, momentum and the unbiased variance are taken off: at the true batch nothing is left."""
    model = network(norm="train")
    model[1].momentum = 0.3
    task = gl.Task.supervised(model, cross_entropy, like=(torch.zeros(1, *SHAPE), torch.zeros(1).long()))
    batch = private(4)
    seen, _ = seen_by(task, batch)
    scene = scene_of(task, seen, y=batch["y"])
    held, returned = (BatchNormStatistics(1.0, returned=r)(batch, {}, scene, moment()) for r in (False, True))
    assert returned < 1e-12 < held
    other = replace(scene, knows=Knowledge(training=gl.LocalTraining(lr=1.0, steps=2)))
    with pytest.raises(MissingKnowledge, match="after ONE step"):
        BatchNormStatistics(1.0, returned=True)(batch, {}, other, moment())


def test_a_network_without_batch_norm_has_no_such_prior() -> None:
    task = tiny()
    scene = scene_of(task, seen_by(task, private(1))[0])
    assert BatchNormStatistics(1.0)(private(1), {}, scene, moment()) == 0


@pytest.mark.parametrize("norm", [None, "train"])
def test_label_distance_by_hand(norm: str | None) -> None:
    task, batch = tiny(norm=norm), private(2)
    scene = scene_of(task, seen_by(task, batch)[0], y=batch["y"])
    p = task.call(task.weights())(batch["x"]).softmax(-1)
    expected = (p - torch.eye(CLASSES, dtype=p.dtype)[batch["y"]]).square().sum()
    torch.testing.assert_close(LabelDistance(0.5)(batch, {}, scene, moment()), 0.5 * expected)


def test_priors_leave_running_statistics_alone() -> None:
    """In training mode every forward pass writes into the buffers it is given."""
    task, batch = tiny(norm="train"), private(2)
    scene = scene_of(task, seen_by(task, batch)[0], y=batch["y"])
    held = tree.detach(scene.buffers)
    for prior in (LabelDistance(1.0), BatchNormStatistics(1.0), FeatureDistance(1.0)):
        value = grad(lambda x, prior=prior: prior({**batch, "x": x}, {}, scene, moment()))(batch["x"])
        assert value.isfinite().all()
        assert largest_difference(scene.buffers, held) == 0


def test_feature_distance_is_zero_at_the_single_true_example() -> None:
    task, batch = tiny(), private(1)
    scene = scene_of(task, seen_by(task, batch)[0], y=batch["y"])
    assert FeatureDistance(1.0)(batch, {}, scene, moment()) < 1e-28
    assert FeatureDistance(1.0)(private(1, seed=1), {}, scene, moment()) > 1e-6


@pytest.mark.parametrize(
    "prior",
    [TotalVariation(1.0), OpponentVariation(1.0), SummedVariation(1.0, 1.0), ImageNorm(1.0), BatchNormStatistics(1.0),
     LabelDistance(1.0)],
    ids=lambda prior: type(prior).__name__,
)  # fmt: skip
def test_priors_do_not_depend_on_the_order_of_the_examples(prior: object) -> None:
    task, batch = tiny(norm="train"), private(4)
    scene = scene_of(task, seen_by(task, batch)[0])
    permuted = {name: value[[2, 0, 3, 1]] for name, value in batch.items()}
    torch.testing.assert_close(prior(permuted, {}, scene, moment()), prior(batch, {}, scene, moment()))


# --- group consistency ------------------------------------------------------------------------------------------------


def test_the_consensus_is_the_mean_of_a_targets_restarts() -> None:
    x = torch.arange(12.0).reshape(6, 1, 1, 1, 2)  # two targets of three restarts
    consensus = GroupConsistency(1.0).refresh({"x": x}, (2, 3))["consensus"]
    assert consensus.shape == x.shape
    assert consensus[:3].flatten().tolist() == [2, 3] * 3
    assert consensus[3:].flatten().tolist() == [8, 9] * 3


def test_the_consensus_is_refreshed_at_its_start_and_every_interval() -> None:
    prior = GroupConsistency(1.0, start=5, interval=3)
    assert [step for step in range(15) if prior.due(step)] == [5, 8, 11, 14]


def test_the_pull_begins_with_the_consensus() -> None:
    prior, x = GroupConsistency(2.0, start=5), torch.zeros(2, 1, 2, 2)
    x[0, 0, 0, 0], x[1, 0, 0, 0] = 3.0, 4.0
    scene = replace(any_scene(), shared={"consensus": torch.zeros_like(x), "several": torch.ones(())})
    assert prior({"x": x}, {}, scene, moment(4)) == 0
    assert prior({"x": x}, {}, scene, moment(5)) == 2 * (3 + 4)
    assert GroupConsistency(2.0, start=5, per_pixel=True)({"x": x}, {}, scene, moment(5)) == 2 * (3 + 4) / 4


def test_registration_undoes_a_shift() -> None:
    """Nine restarts agree and one is shifted: registered, the consensus is the image itself."""
    picture = Draws(draws.key("picture")).uniform((1, 3, 8, 8), dtype=torch.float64)
    shifted = picture.roll((2, 3), dims=(-2, -1))
    x = torch.stack([*[picture] * 9, shifted])
    plain = GroupConsistency(1.0).refresh({"x": x}, (1, 10))["consensus"]
    registered = GroupConsistency(1.0, register=True).refresh({"x": x}, (1, 10))["consensus"]
    assert largest_difference(registered[0], picture) < 1e-12
    assert largest_difference(plain[0], picture) > 1e-2


def test_registration_moves_each_image_of_a_batch_by_itself() -> None:
    pictures = Draws(draws.key("pictures")).uniform((2, 1, 8, 8), dtype=torch.float64)
    shifted = torch.stack([pictures[0].roll(2, dims=-1), pictures[1].roll(-3, dims=-2)])
    x = torch.stack([*[pictures] * 6, shifted])
    registered = GroupConsistency(1.0, register=True).refresh({"x": x}, (1, 7))["consensus"]
    assert largest_difference(registered[0], pictures) < 1e-12


# --- starts and spaces ------------------------------------------------------------------------------------------------

COLOUR = (3, 8, 8)


def colour_scene(examples: int = 2, mean: float = 0.5, std: float = 0.25) -> TargetView:
    """A task of 3 x 8 x 8 images whose model-input space is not that of the pictures."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES)).double()
    like = (torch.zeros(1, *COLOUR), torch.zeros(1).long())
    task = gl.Task.supervised(model, cross_entropy, like=like, mean=mean, std=std)
    seen = gl.Observation(task.weights(), task.weights(), examples)
    return scene_of(task, seen)


def start_of(start: object, scene: TargetView | None = None) -> Tensor:
    """The first guess, as pictures in [0, 1]."""
    scene = scene or colour_scene()
    x = start(scene, Draws(draws.key("start")), "x")
    assert x.shape == (scene.num_examples, *COLOUR)
    assert x.dtype == torch.float64
    return scene.task.fields["x"].unit(x)


def test_tiles_repeat() -> None:
    picture = start_of(Tiled(2))
    assert torch.equal(picture[..., :4, :4], picture[..., 4:, 4:])
    assert torch.equal(picture[..., :4, :4], picture[..., :4, 4:])
    assert picture[0, 0, :4, :4].unique().numel() == 16
    assert 0 < picture.min() < picture.max() < 1
    assert not torch.equal(picture[0], picture[1])


def test_tiles_that_do_not_fit_are_cut() -> None:
    picture = start_of(Tiled(3))  # tiles of 3: 3 + 3 + 2
    assert torch.equal(picture[..., :3], picture[..., 3:6])
    assert torch.equal(picture[..., :2], picture[..., 6:])


def test_normal_tiles_live_in_model_input_space() -> None:
    scene = colour_scene()
    x = Tiled(2, normal=True)(scene, Draws(draws.key("start")), "x")
    assert x.min() < -1
    assert torch.equal(x[..., :4], x[..., 4:])


def test_a_mosaic_enlarges_the_pixels_of_a_coarse_image() -> None:
    picture = start_of(Mosaic(4))
    blocks = picture.unfold(2, 4, 4).unfold(3, 4, 4).flatten(-2)
    assert (blocks.amax(-1) == blocks.amin(-1)).all()
    assert picture.unique().numel() == 2 * 3 * 2 * 2
    assert start_of(Mosaic(3)).unique().numel() == 2 * 3 * 3 * 3


def test_a_solid_start_has_the_named_colour_in_pixels() -> None:
    assert start_of(Solid(1.0)).unique().tolist() == [1]
    red = start_of(Solid((1.0, 0.0, 0.0)))
    assert [channel.unique().tolist() for channel in red[0]] == [[1], [0], [0]]
    with pytest.raises(ValueError, match="2 colours for 3 channels"):
        start_of(Solid((1.0, 0.0)))


def test_a_surrogate_starts_at_the_given_pictures() -> None:
    pictures = Draws(draws.key("own")).uniform((2, *COLOUR), dtype=torch.float64)
    torch.testing.assert_close(start_of(Surrogate(pictures)), pictures)
    with pytest.raises(ValueError, match="wanted"):
        start_of(Surrogate(pictures[:1]))


def test_uniform_and_normal_starts_follow_their_laws() -> None:
    picture = start_of(Uniform(), colour_scene(50))
    assert 0 < picture.min() < picture.max() < 1
    assert abs(picture.mean() - 0.5) < 0.02
    scene = colour_scene(50)
    x = Normal()(scene, Draws(draws.key("start")), "x")
    assert abs(x.mean()) < 0.05
    assert abs(x.std() - 1) < 0.05
    clipped = start_of(Normal(mean=0.5, std=0.5, unit=True, clip=True), scene)
    assert clipped.min() == 0
    assert clipped.max() == 1


@pytest.mark.parametrize("start", [Normal(), Uniform(), Tiled(2), Mosaic(4), Solid(0.3)], ids=repr)
def test_a_start_is_the_same_alone_and_in_company(start: object) -> None:
    scene = colour_scene(1)
    keys = torch.stack([draws.key(lane) for lane in range(3)])
    together = vmap(lambda key: start(scene, Draws(key), "x"))(keys)
    alone = torch.stack([start(scene, Draws(key), "x") for key in keys])
    assert largest_difference(together, alone) == 0


def test_a_box_holds_in_model_input_space() -> None:
    scene = colour_scene()
    wild = {"x": 9 * Draws(draws.key("wild")).normal((2, *COLOUR), dtype=torch.float64), "other": torch.ones(1)}
    boxed = Pixels(boxed=True).project(wild, scene, moment())
    assert (boxed["x"].min(), boxed["x"].max()) == (-2, 2)  # (0 - 0.5) / 0.25 and (1 - 0.5) / 0.25
    assert boxed["other"] is wild["other"]
    assert Pixels().project(wild, scene, moment()) is wild


def test_a_stage_starts_where_the_last_one_stopped() -> None:
    before = {"x": torch.ones(2, *COLOUR)}
    scene = colour_scene()
    assert Pixels().variables(scene, Draws(draws.key("a")), before)["x"] is before["x"]
    assert Pixels().variables(scene, Draws(draws.key("a")), {"latent": torch.ones(1)})["x"].shape == (2, *COLOUR)


def test_soft_categories_are_a_simplex_of_their_own_numbers() -> None:
    scene, source = colour_scene(), Draws(draws.key("a"))
    space = JointSpace((Pixels(), SoftField()))
    v = space.variables(scene, source, None)
    batch = space.decode(v, scene, moment())
    assert batch["y"].shape == (2, CLASSES)
    torch.testing.assert_close(batch["y"].sum(-1), torch.ones(2, dtype=torch.float64))
    assert batch["x"] is v["x"]
    assert not torch.equal(v["y"].flatten(), v["x"].flatten()[: v["y"].numel()])
