"""DLFA: the client's local training simulated on a copy of the data for every epoch, float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

import gradleak as gl
from conftest import largest_difference, moment, perceptron, private, scene_of, tiny
from gradleak.attack import Composed
from gradleak.attacks.dlfa import PRESETS, dlfa
from gradleak.attacks.dlfa.checkpointed import trained
from gradleak.attacks.dlfa.epochs import (
    Copies,
    LocalSteps,
    Mixed,
    OrderInvariance,
    Over,
    Ramp,
    Times,
    Turn,
    a_copy_an_epoch,
    a_step_an_epoch,
    copies_of,
    epochs,
    kernels,
    one_copy,
    one_step,
    settled,
)
from gradleak.core import tree
from gradleak.core.random import Draws, key
from gradleak.core.tree import Params, Tree
from gradleak.engine import Engine
from gradleak.engine.search import StageObjective
from gradleak.parts.matches import Cosine, LayerWeighted, SquaredError, layers_of
from gradleak.parts.optimisers import Adam
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import Box, CircularVariation
from gradleak.parts.spaces import Normal
from gradleak.parts.surrogates import GradientAtStart, Line
from gradleak.parts.view import TargetView
from gradleak.scenario import rules
from gradleak.scenario.client import LocalTraining, part_of
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Observation
from gradleak.scenario.task import Batch, TaskError

EPOCHS = LocalTraining(lr=0.3, epochs=3, batch_size=2)


def drawn(*shape: int, name: str = "drawn") -> Tensor:
    return Draws(key(name)).uniform(shape, dtype=torch.float64)


def trained_on(order: Tensor, recipe: LocalTraining, batch: Batch, norm: str | None = None) -> TargetView:
    """What a lane sees of a client that went through its examples in this order, (epochs, N)."""
    task, size = tiny(norm=norm), recipe.batch_size
    assert size is not None
    plan = [rows for epoch in order for rows in epoch.split(size)][: len(recipe.order(order.shape[1]))]
    upload, _ = recipe.run(task, task.weights(), batch, order=plan)
    seen = Observation(weights=task.weights(), update=upload.payload["update"], num_examples=order.shape[1])
    return scene_of(task, replace(seen, buffers=task.buffers() or None), Knowledge(training=recipe), y=batch["y"])


def distance(predict: Any, match: Any, batch: Batch, scene: TargetView) -> float:
    observed = match.prepare(predict.target(scene))
    return float(match.distance(predict(batch, {}, scene, moment()), observed))


# --- the simulation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        EPOCHS,
        replace(EPOCHS, optimiser=rules.SGD(momentum=0.9, weight_decay=0.01), schedule=rules.cosine_decay),
        replace(EPOCHS, optimiser=rules.Adam(), lr=0.02),
        replace(EPOCHS, epochs=None, steps=4),  # the second epoch is cut short
    ],
    ids=["sgd", "momentum", "adam", "cut"],
)
@pytest.mark.parametrize("norm", [None, "train"])
def test_the_true_data_in_the_true_order_match_exactly(recipe: LocalTraining, norm: str | None) -> None:
    batch, order = (
        private(5),
        torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(k)) for k in range(3)]),
    )
    passes = epochs(recipe, 5)[0]
    scene = trained_on(order, recipe, batch, norm)
    copies = {name: torch.stack([value[rows] for rows in order[:passes]], dim=1) for name, value in batch.items()}
    steps = LocalSteps()
    assert distance(steps, LayerWeighted(), copies, scene) < 1e-24
    # The same images in another order do not: the order is what the copies are for.
    assert distance(steps, LayerWeighted(), {**copies, "x": copies["x"].flip(0)}, scene) > 1e-6


@pytest.mark.parametrize(
    ("recipe", "defence", "norm"),
    [
        (EPOCHS, None, None),
        (replace(EPOCHS, optimiser=rules.SGD(momentum=0.9, nesterov=True), schedule=rules.cosine_decay), None, "train"),
        (replace(EPOCHS, optimiser=rules.Adam(weight_decay=0.1)), None, "eval"),
        (replace(EPOCHS, lr=torch.tensor(0.3, dtype=torch.float64)), gl.defences.FedSAM(rho=0.2), None),
        (EPOCHS, gl.scenario.defence.Chain(gl.defences.FedSAM(rho=0.2), gl.defences.Pruning(keep=0.5)), "eval"),
    ],
    ids=["sgd", "nesterov", "adam", "fedsam", "pruned"],
)
@pytest.mark.parametrize("every", [1, 4])
def test_with_checkpoints_a_replay_has_the_same_values_and_derivatives(
    recipe: LocalTraining, defence: Any, norm: str | None, every: int
) -> None:
    task, batch = tiny(norm=norm), private(5)
    seen = gl.observe(task, batch, recipe, defence)
    guess = torch.stack([private(5, seed=seed)["x"] for seed in (1, 2)])  # two lanes

    def plain(training: LocalTraining, whole: Batch, scene: TargetView) -> Params:
        return Replay(training)(whole, {}, scene, moment())

    def lean(training: LocalTraining, whole: Batch, scene: TargetView) -> Params:
        plan = training.order(5)
        lengths = [training.schedule(step, len(plan)) for step in range(len(plan))]
        return trained(training, scene, [part_of(whole, rows) for rows in plan], lengths, whole, every)

    def loss(x: Tensor, own: Tree, predict: Any) -> Tensor:
        # A lane's own rate, running statistics, and update, of which a defence reads its masks.
        scene = scene_of(task, seen, Knowledge(training=recipe, defence=defence), y=batch["y"])
        scene = replace(scene, update=own["update"], buffers=own["buffers"])
        found = predict(replace(recipe, lr=own["lr"]), {"x": x, "y": batch["y"]}, scene)
        return SquaredError().distance(found, tree.scale(own["update"], 0.7))

    two = lambda held: tree.map(lambda value: torch.stack([value, value.flip(0)]), held)  # noqa: E731
    own = {"update": two(seen.update), "buffers": two(task.buffers()), "lr": torch.tensor([0.3, 0.2]).double()}

    def run(predict: Any) -> Any:
        def both(x: Tensor, own: Tree) -> Any:
            moved = lambda x, lr: loss(x, {**own, "lr": lr}, predict)  # noqa: E731
            return grad_and_value(moved, argnums=(0, 1))(x, own["lr"])

        return vmap(both)(guess, own)

    (dx, dlr), value = run(plain)
    (lean_dx, lean_dlr), same = run(lean)
    assert dx.abs().max() > 1e-6
    assert largest_difference(same, value) < 1e-12
    assert largest_difference(lean_dx, dx) < 1e-12
    assert largest_difference(lean_dlr, dlr) < 1e-11


def test_one_full_step_is_the_problem_of_the_other_attacks() -> None:
    """E = 1, B = N: DLFA, IG and SME (alpha = 0) on updates agree for any guess, and the truth matches."""
    recipe, batch = LocalTraining(lr=0.3, epochs=1, batch_size=3), private(3)
    scene = trained_on(torch.arange(3)[None], recipe, batch)
    for guess in (private(3, seed=5)["x"], batch["x"]):
        shared, one = {"x": guess, "y": batch["y"]}, {"x": guess[:, None], "y": batch["y"]}
        for match in (Cosine(), SquaredError()):
            ours = distance(LocalSteps(), match, one, scene)
            assert ours == pytest.approx(distance(GradientAtStart(), match, shared, scene), rel=1e-12, abs=1e-28)
            at_start = {"alpha": torch.zeros(1, dtype=torch.float64)}
            line = match.distance(Line()(shared, at_start, scene, moment()), match.prepare(Line().target(scene)))
            assert ours == pytest.approx(float(line), rel=1e-12, abs=1e-28)
            assert (ours < 1e-24) == (guess is batch["x"])


def test_the_plans_of_the_variants() -> None:
    recipe = LocalTraining(lr=0.1, epochs=2, batch_size=2)
    halves, rest = [slice(0, 2), slice(2, 4)], slice(4, 6)
    assert a_copy_an_epoch(recipe, 5) == [Turn(e, rows, 1.0) for e in (0, 1) for rows in (*halves, rest)]
    assert one_copy(recipe, 5) == [Turn(0, rows, 1.0) for _ in (0, 1) for rows in (*halves, rest)]
    assert a_step_an_epoch(recipe, 5) == [Turn(0, None, 3.0)] * 2
    assert one_step(recipe, 5) == [Turn(0, None, 6.0)]
    falling = replace(recipe, schedule=rules.cosine_decay)
    total = sum(rules.cosine_decay(step, 6) for step in range(6))
    assert one_step(falling, 5)[0].length == pytest.approx(total)
    assert sum(turn.length for turn in a_step_an_epoch(falling, 5)) == pytest.approx(total)
    assert epochs(recipe, 5) == (2, 2)
    assert epochs(LocalTraining(lr=0.1, steps=4, batch_size=2), 5) == (2, 1)
    assert epochs(LocalTraining(lr=0.1, steps=3), 5) == (3, 3)  # all at once: each step is a pass


def test_what_the_variants_predict() -> None:
    """In units of the learning rate and of the root of the batches: the objective is that of the paper."""
    recipe, batch = EPOCHS, private(5)
    scene = trained_on(torch.arange(5).repeat(3, 1), recipe, batch)
    task, weights, lr = scene.task, scene.weights, 0.3

    def found(plan: Any) -> dict[str, Tensor]:
        batches = math.ceil(5 / 2)
        return tree.scale(LocalSteps(plan)(batch, {}, scene, moment()), math.sqrt(batches))

    gradient = task.gradient(weights, batch)
    assert largest_difference(found(one_step), tree.scale(gradient, 9.0)) < 1e-12
    at, total = weights, tree.zeros_like(weights)
    for _ in range(3):
        step = tree.scale(task.gradient(at, batch), 3.0)
        at, total = tree.add(at, step, -lr), tree.add(total, step)
    assert largest_difference(found(a_step_an_epoch), total) < 1e-12
    assert largest_difference(found(one_copy), tree.scale(scene.update, 1 / lr)) < 1e-12
    copies = {**batch, "x": batch["x"][:, None].repeat_interleave(3, 1)}
    many = LocalSteps()(copies, {}, scene, moment())
    assert largest_difference(tree.scale(many, math.sqrt(math.ceil(15 / 2))), found(one_copy)) < 1e-12


@pytest.mark.parametrize(
    "rule", [rules.SGD(), rules.SGD(momentum=0.9), rules.SGD(momentum=0.9, dampening=0.3, weight_decay=0.01)]
)
def test_one_step_in_all_is_dlg_on_updates_whatever_the_momentum(rule: rules.SGD) -> None:
    recipe, batch = replace(EPOCHS, optimiser=rule, schedule=rules.cosine_decay), private(5)
    scene = trained_on(torch.arange(5).repeat(3, 1), recipe, batch)
    guess = {"x": private(5, seed=5)["x"], "y": batch["y"]}
    steps, sent = LocalSteps(one_step), GradientAtStart()
    ours, theirs = (part(guess, {}, scene, moment()) for part in (steps, sent))
    seen, known = steps.target(scene), sent.target(scene)
    factor = float(tree.norm(seen) / tree.norm(known))  # of the units
    assert largest_difference(ours, tree.scale(theirs, factor)) < 1e-12


# --- the copies -------------------------------------------------------------------------------------------------------


def test_the_space_holds_a_copy_for_every_epoch() -> None:
    scene = trained_on(torch.arange(5).repeat(3, 1), EPOCHS, private(5))
    source = scene.draws
    assert source is not None
    x = Copies(Normal()).variables(scene, source, None)["x"]
    assert x.shape == (5, 3, 1, 4, 4)
    assert len(set(x.flatten(2)[..., 0].flatten().tolist())) == 15  # every copy starts elsewhere
    carried = Copies(Normal()).variables(scene, source, {"x": x[:, 0]})["x"]
    assert largest_difference(carried, x[:, :1].expand_as(x)) == 0
    assert [part.shape for part in copies_of({"x": x, "y": scene.fields["y"]}, scene)["x"]] == [(5, 1, 4, 4)] * 3


def test_labels_that_are_read_off_come_in_no_order() -> None:
    """Sorted, every simulated batch would be of one class: with the true images, less of the update is explained."""
    attack = dlfa()
    assert isinstance(attack, Composed)
    task, recipe = pictures(8)[0], LocalTraining(lr=0.2, epochs=5, batch_size=5)
    left: dict[str, list[float]] = {"sorted": [], "mixed": []}
    for seed in range(4):
        source = Draws(key("client", seed))
        y = (source.uniform((20,), stream=1) * 4).long()
        coarse = source.uniform((20, 1, 4, 4), stream=2, dtype=torch.float64)
        batch = {"x": task.fields["x"].model(F.interpolate(coarse, size=(8, 8), mode="bilinear")), "y": y}
        scene = scene_of(task, gl.observe(task, batch, recipe, key=f"{seed}"), Knowledge(training=recipe))
        mixed = Mixed(lambda scene, y=y: {"y": y.sort().values})(scene)["y"]
        assert mixed.sort().values.tolist() == y.sort().values.tolist()
        for name, labels in (("sorted", y.sort().values), ("mixed", mixed)):
            rows = y.argsort(stable=True)[labels.argsort(stable=True).argsort()]  # an image of each label
            assert torch.equal(y[rows], labels)
            copies = {"x": batch["x"][rows][:, None].repeat_interleave(5, 1), "y": labels}
            observed = tree.squared_norm(LocalSteps().target(scene))
            left[name].append(distance(LocalSteps(), SquaredError(), copies, scene) / float(observed))
    assert all(mixed < ordered for mixed, ordered in zip(left["mixed"], left["sorted"], strict=True))
    assert sum(left["mixed"]) < 0.5 * sum(left["sorted"])
    read = attack.fields(scene)["y"]
    assert not torch.equal(read, read.sort().values)
    assert torch.equal(read, attack.fields(scene)["y"])
    assert Mixed(attack.fields).needs == attack.fields.needs
    given = {"y": torch.arange(20) // 5}
    found = dlfa(steps=1).run(task, gl.observe(task, batch, recipe), Knowledge(training=recipe, given=given))
    assert torch.equal(found.batch["y"][0], given["y"])


def test_copies_are_matched_to_the_first_and_averaged() -> None:
    field = tiny(mean=0.4, std=0.3).fields["x"]
    truth = field.model(drawn(6, 1, 4, 4))
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    noise = 0.1 * (drawn(4, 6, 1, 4, 4, name="noise") - 0.5)
    copies = torch.stack([truth[order] + noise[e] for e, order in enumerate(orders)], dim=1)
    found = settled(copies, field)
    expected = sum(truth + noise[e][order.argsort()] for e, order in enumerate(orders)) / 4
    assert largest_difference(found, expected[orders[0]]) < 1e-12  # in the order of the first copy
    assert largest_difference(copies.mean(1), expected[orders[0]]) > 0.1  # row by row would blur them
    assert largest_difference(settled(copies, field, 1), copies[:, 0]) == 0
    assert largest_difference(settled(copies, field, 0), copies[:, 0]) == 0  # not one epoch: there is no other
    spoilt = copies.clone()
    spoilt[:, 3] = 100.0  # an epoch that was cut short has nothing to say
    assert largest_difference(settled(spoilt, field, 3), settled(copies[:, :3], field)) == 0


def test_an_image_that_is_not_finite_leaves_the_others_as_they_are() -> None:
    """A search that diverged for one row of one epoch: the other rows are still matched and averaged."""
    field = tiny(mean=0.4, std=0.3).fields["x"]
    truth = field.model(drawn(4, 1, 4, 4))
    order = torch.tensor([2, 0, 3, 1])
    copies = torch.stack([truth, truth[order]], dim=1)
    copies[0, 1] = math.nan  # image 2 in the second epoch
    found = settled(copies, field)
    assert bool(found[2].isnan().all())
    assert largest_difference(found[[0, 1, 3]], truth[[0, 1, 3]]) < 1e-12


def test_images_on_the_way_are_means_of_copies() -> None:
    """What a report shows of the search has one image for each example, at the start the mean of noise over copies."""
    recipe = LocalTraining(lr=0.1, epochs=4, batch_size=2)
    task, batch = tiny(), private(4)
    seen = gl.observe(task, batch, recipe)
    attack = gl.attacks.get("dlfa", steps=2)
    found = attack.run(
        task, seen, gl.Knowledge(training=recipe), engine=gl.Engine(device="cpu", precision="double", snapshots=3)
    )
    shown = found.snapshots["x"]
    assert shown.shape == (1, 3, 4, 1, 4, 4)
    one = gl.attacks.get("dlfa", steps=2).run(
        task,
        gl.observe(task, batch, LocalTraining(lr=0.1, epochs=1, batch_size=2)),
        gl.Knowledge(training=LocalTraining(lr=0.1, epochs=1, batch_size=2)),
        engine=gl.Engine(device="cpu", precision="double", snapshots=3),
    )
    spread = [float(each.snapshots["x"][0, 0].float().std()) for each in (one, found)]
    assert 0.3 < spread[1] / spread[0] < 0.8  # four copies halve the spread of their mean


# --- match and priors -------------------------------------------------------------------------------------------------


def test_layers_count_less_the_later_they_come() -> None:
    names = ["conv.weight", "conv.bias", "block.0.weight", "fc.weight", "fc.bias"]
    assert list(layers_of({name: torch.zeros(1) for name in names}).values()) == [0, 0, 1, 2, 2]
    rounds = {f"{number}/{name}": torch.zeros(1) for number in (0, 1) for name in names}
    assert list(layers_of(rounds).values()) == [0, 0, 1, 2, 2] * 2
    ones, zeros = ({name: torch.full((2,), value) for name in names} for value in (1.0, 0.0))
    wanted = 2 * (2 + math.exp(-1) + 2 * math.exp(-2))
    assert float(LayerWeighted().distance(ones, zeros)) == pytest.approx(wanted, rel=1e-6)
    assert float(LayerWeighted(0.0).distance(ones, zeros)) == 10


@pytest.mark.parametrize(
    ("over", "of", "power"), list(itertools.product(("mean", "max"), ("pixels", "features"), (1, 2)))
)
def test_the_order_of_an_epoch_is_no_matter_and_its_images_are(over: str, of: str, power: int) -> None:
    scene = trained_on(torch.arange(5).repeat(3, 1), EPOCHS, private(5))
    prior = OrderInvariance(2.0, over, of, power)
    value = lambda x: prior({"x": x}, {}, scene, moment())  # noqa: E731
    x = drawn(5, 3, 1, 4, 4)
    mixed = x.clone()
    mixed[:, 1] = x[torch.tensor([3, 0, 4, 1, 2]), 1]
    assert float(value(mixed)) == pytest.approx(float(value(x)), rel=1e-12)
    assert float(value(x)) > 1e-3  # different images in each epoch
    same = x[:, :1].expand_as(x).clone()
    same[:, 2] = same[torch.tensor([3, 0, 4, 1, 2]), 2]
    assert float(value(same)) < 1e-14

    # As it is written: all pairs of epochs.
    shown = x.transpose(0, 1)  # (E, N, ...)
    if of == "features":
        assert kernels(1, x.device, x.dtype).shape == (96, 1, 3, 3)
        shown = torch.stack([F.conv2d(e, kernels(1, x.device, x.dtype), padding=1) for e in shown])
    phi = shown.mean(1) if over == "mean" else shown.amax(1)
    pairs = sum((a - b).abs().pow(power).mean() for a in phi for b in phi) / 9
    assert float(value(x)) == pytest.approx(2 * float(pairs), rel=1e-12)
    lanes = torch.stack([x, mixed + 0.1 * drawn(*x.shape, name="other")])
    assert largest_difference(vmap(grad(value))(lanes), torch.stack([grad(value)(lane) for lane in lanes])) < 1e-14


@pytest.mark.parametrize("preset", PRESETS)
def test_every_prior_has_its_own_weight(preset: str) -> None:
    """The authors tuned all eight: mean-squared gaps of means count ten times as much as those of maxima."""

    def prior(**settings: Any) -> OrderInvariance:
        attack = dlfa(preset=preset, **settings)
        assert isinstance(attack, Composed)
        held = attack.stages[0].priors[-1]
        assert isinstance(held, Over)
        assert isinstance(held.prior, OrderInvariance)
        return held.prior

    assert prior() == PRESETS[preset].prior
    others = list(itertools.product(("mean", "max"), ("pixels", "features"), (1, 2)))
    found = {kind: prior(over=kind[0], of=kind[1], power=kind[2]).weight for kind in others}
    assert found == PRESETS[preset].weights
    assert len(set(found.values())) == 8
    assert found["mean", "pixels", 2] == {"femnist": 1000.0, "cifar100": 62.675}[preset]
    assert found["max", "features", 1] == {"femnist": 81.365, "cifar100": 5.0}[preset]
    assert prior(over="mean", invariance=3.0).weight == 3.0


def test_variation_and_box_of_all_copies() -> None:
    task = tiny(mean=0.5, std=0.25)
    seen = gl.observe(task, private(5), EPOCHS)
    scene = scene_of(task, seen, Knowledge(training=EPOCHS))
    x = 6 * drawn(5, 3, 1, 4, 4) - 3
    tv = pixels_out = 0.0
    for image in x.reshape(15, 4, 4):
        for i, j in itertools.product(range(4), range(4)):
            across, down = image[i, (j + 1) % 4] - image[i, j], image[(i + 1) % 4, j] - image[i, j]
            tv += float(across**2 + down**2) + 1e-7
            pixel = float(image[i, j]) * 0.25 + 0.5
            pixels_out += (pixel - min(max(pixel, 0.0), 1.0)) ** 2
    told = [float(prior({"x": x}, {}, scene, moment())) for prior in (CircularVariation(3.0), Box(2.0, summed=True))]
    assert told == pytest.approx([3 * tv / 15, 2 * pixels_out / 15], rel=1e-12)
    assert pixels_out > 1


# --- the search -------------------------------------------------------------------------------------------------------


def test_the_ramp() -> None:
    ramp = Ramp(4.0, 2.0)
    assert [float(ramp(moment(k, 400))) for k in (0, 100, 200, 399)] == pytest.approx([4, 8**0.5, 2, 2])
    assert float(PRESETS["femnist"].decay(moment(20, 400))) == pytest.approx(0.995**2)
    assert float(PRESETS["cifar100"].decay(moment(30, 400))) == pytest.approx(0.997**1.5)


def test_settings_are_those_of_the_public_code() -> None:
    for preset, rate, ramp, tv, clip in (
        ("femnist", 0.4, Ramp(1.0, 2.0, 200), 1e-3, 2.0),
        ("cifar100", 0.1, Ramp(4.0, 2.0, 200), 2e-4, 10.0),
    ):
        attack = dlfa(preset=preset)
        assert isinstance(attack, Composed)
        [stage] = attack.stages
        assert (stage.optimiser.lr, stage.optimiser.steps, attack.restarts) == (rate, 400, 1)
        assert stage.priors[:2] == (Over(CircularVariation(tv), ramp), Over(Box(clip, summed=True), ramp))
        assert stage.space == Copies(Normal(), boxed=False)
        assert stage.match == LayerWeighted(1.0)


def test_the_steps_are_those_of_the_ramped_objective() -> None:
    """The ramp is on the priors and on the gradient, so that matches compare; Adam must not notice."""
    batch = private(4)
    scene = trained_on(torch.arange(4).repeat(3, 1), EPOCHS, batch)
    attack = dlfa(steps=3)
    assert isinstance(attack, Composed)
    chosen, ramp = PRESETS["cifar100"], Ramp(4.0, 2.0, over=2)
    priors = (CircularVariation(chosen.tv), Box(chosen.clip, summed=True), chosen.prior)
    stage = attack.stages[0]
    assert stage.priors == tuple(Over(prior, chosen.ramp) for prior in priors)
    assert isinstance(stage.optimiser, Adam)
    assert stage.optimiser.transform == Times(chosen.ramp)
    optimiser = replace(stage.optimiser, transform=Times(ramp))
    stage = replace(stage, priors=tuple(Over(prior, ramp) for prior in priors), optimiser=optimiser)
    source = scene.draws
    assert source is not None
    v = {"x": stage.space.variables(scene, source, None)["x"].contiguous()}
    observed = stage.match.prepare(stage.predict.target(scene))
    at = lambda step: StageObjective(stage, scene, observed, moment(step, 3))  # noqa: E731
    state = stage.optimiser.init(at(0), v)
    leaf = v["x"].clone().requires_grad_()
    plain = torch.optim.Adam([leaf], lr=chosen.lr)
    for step, f in enumerate((4.0, math.sqrt(8), 2.0)):
        plain.param_groups[0]["lr"] = chosen.lr * 0.997 ** (step / 20)
        inside = {"x": leaf, "y": batch["y"]}
        predicted = LocalSteps(every=0)(inside, {}, scene, moment())
        loss = f * LayerWeighted().distance(predicted, observed)
        for prior in priors:
            loss = loss + prior(inside, {}, scene, moment())
        plain.zero_grad()
        loss.backward()
        plain.step()
        v, state, scored = stage.optimiser.step(at(step), v, state, moment(step, 3))
        assert largest_difference(v["x"], leaf) < 1e-7  # the step, and so the schedule, is float32
        assert float(scored.objective) == pytest.approx(float(loss.detach()) / f)


def pictures(count: int) -> tuple[gl.Task, Batch]:
    """Smooth images of 8 x 8, and a small convolutional network for them."""
    coarse = drawn(count, 1, 4, 4, name="pictures")
    x = F.interpolate(coarse, size=(8, 8), mode="bilinear", align_corners=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(128, 4)
        model = nn.Sequential(*layers).double()
    y = torch.arange(count) % 4
    task = gl.Task.supervised(model, F.cross_entropy, like=(x, y), mean=0.5, std=0.5)
    return task, {"x": task.fields["x"].model(x), "y": y}


def test_it_sees_more_than_one_large_step_does(double: Engine) -> None:
    task, batch = pictures(4)
    recipe = LocalTraining(lr=0.2, epochs=3, batch_size=2)
    seen, knows = gl.observe(task, batch, recipe), Knowledge(given={"y": batch["y"]}, training=recipe)

    def psnr(name: str, **settings: Any) -> float:
        found = gl.attacks.get(name, **settings).run(task, seen, knows, engine=double)
        assert found.batch["x"].shape == (1, *batch["x"].shape)
        assert found.candidates["x"].shape == (1, 1, *batch["x"].shape)
        return float(gl.metrics.compare(found, batch).psnr.mean())

    # Steps and the pixels' prior were chosen with these scores in view: it works here, which says not how well.
    simulated = psnr("dlfa", steps=80, of="pixels", checkpoint=0)
    at_once = psnr("dlg-ms", steps=80, lr=0.1)  # its best of 0.03, 0.1 and 0.3 here
    assert simulated > at_once + 2


@pytest.mark.parametrize("steps", [4, 6])  # two epochs begun by both, or three by the smaller and two by the larger
def test_targets_of_different_sizes_and_several_restarts(steps: int, double: Engine) -> None:
    """Cut-short epochs, padding, restarts: one batch of every target, that of the chosen restart."""
    task, recipe = tiny(), LocalTraining(lr=0.3, steps=steps, batch_size=2)
    seen = [gl.observe(task, private(size, seed=size), recipe, key=f"of {size}") for size in (3, 5)]
    found = dlfa(steps=2, restarts=2).run(task, seen, Knowledge(training=recipe), engine=double)
    assert found.candidates["x"].shape == (2, 2, 5, 1, 4, 4)
    assert found.batch["x"].shape == (2, 5, 1, 4, 4)
    assert bool(found.batch["x"][0, 3:].isnan().all())
    assert bool(found.batch["x"][0, :3].isfinite().all())
    for target in (0, 1):
        chosen = found.candidates["x"][target, found.chosen[target]]
        torch.testing.assert_close(found.batch["x"][target], chosen, rtol=0, atol=0, equal_nan=True)
    assert found.checks is not None


@pytest.mark.parametrize("variant", ["full", "none_epoch", "none"])
def test_the_other_variants_hold_one_copy(variant: str, double: Engine) -> None:
    task = tiny()
    seen = gl.observe(task, private(4), EPOCHS)
    found = dlfa(steps=2, variant=variant).run(task, seen, Knowledge(training=EPOCHS), engine=double)
    assert found.batch["x"].shape == (1, 4, 1, 4, 4)


def test_a_lane_is_the_same_with_and_without_checkpoints(double: Engine) -> None:
    task = tiny(norm="train")
    seen, knows = gl.observe(task, private(5), EPOCHS), Knowledge(training=EPOCHS)
    found = [dlfa(steps=3, restarts=2, checkpoint=each).run(task, seen, knows, engine=double) for each in (0, 1, 4)]
    single = dlfa(steps=3, restarts=2).run(task, seen, knows, engine=replace(double, batched=False))
    for other in (*found[1:], single):
        assert largest_difference(other.candidates["x"], found[0].candidates["x"]) < 1e-9


def test_errors(double: Engine) -> None:
    task, long = tiny(), LocalTraining(lr=0.1, epochs=51, batch_size=2)
    seen = gl.observe(task, private(4), long)
    with pytest.raises(ValueError, match="102 local steps.*most_steps"):
        dlfa(steps=1).run(task, seen, Knowledge(training=long), engine=double)
    dlfa(steps=1, variant="none").run(task, seen, Knowledge(training=long), engine=double)  # one step in all
    with pytest.raises(MissingKnowledge, match="training"):
        dlfa(steps=1).run(task, seen, engine=double)
    with pytest.raises(ValueError, match="Did you mean 'femnist'"):
        dlfa(preset="femnst")
    with pytest.raises(ValueError, match="Did you mean 'full_many'"):
        dlfa(variant="full_man")
    with pytest.raises(ValueError, match="'mean' or 'max'; given 'median'"):
        dlfa(over="median")
    with pytest.raises(ValueError, match="most"):
        dlfa(most_steps=0)
    with pytest.raises(ValueError, match="given -1"):
        dlfa(checkpoint=-1)
    flat = perceptron()
    vectors = replace(flat, fields={**flat.fields, "x": replace(flat.fields["x"], shape=(16,), kind=None)})
    seen = gl.observe(vectors, {**private(2), "x": private(2)["x"].flatten(1)}, EPOCHS)
    with pytest.raises(TaskError, match="unsupported: dlfa cannot .* its prior convolves images.* x holds vectors"):
        dlfa(steps=1).run(vectors, seen, Knowledge(training=EPOCHS), engine=double)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_captured_step_recomputes_too() -> None:
    """Convolutions by patches reach the recomputation, which runs in autograd's own thread; memory stays bounded."""
    task, batch = pictures(4)
    recipe = LocalTraining(lr=0.2, epochs=3, batch_size=2)
    seen, knows = gl.observe(task, batch, recipe), Knowledge(given={"y": batch["y"]}, training=recipe)
    runs = [
        dlfa(steps=20, restarts=2, checkpoint=each).run(
            task, seen, knows, engine=Engine(precision="double", graph=graph)
        )
        for each, graph in ((1, True), (1, False), (0, True), (2, True))
    ]
    for other in runs[1:]:
        torch.testing.assert_close(other.trace["match"], runs[0].trace["match"], rtol=1e-6, atol=1e-10)

    model = gl.registry.get("model", "cnn-mnist")
    x, y = torch.rand(50, 1, 28, 28), torch.arange(50)
    task, recipe = (
        gl.Task.supervised(model, F.cross_entropy, like=(x, y)),
        LocalTraining(lr=0.004, epochs=20, batch_size=10),
    )
    seen = gl.observe(task, {"x": x, "y": y}, recipe)
    torch.cuda.reset_peak_memory_stats()
    dlfa(preset="femnist", steps=8).run(task, seen, Knowledge(given={"y": y}, training=recipe))
    assert torch.cuda.max_memory_allocated() < 24 * 2**30
