"""The span that a layer's gradient tells of its inputs, and the attack on denoisers that is made of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradleak as gl
from conftest import moment, normal, scene_of
from gradleak.attack import Composed
from gradleak.attacks.gidm import Plan
from gradleak.attacks.spans.denoisers import NoiseBehind, SpanDM
from gradleak.attacks.spectral import Spectral, SpectralPair, coefficients, frequencies, pixels
from gradleak.audit import default_attacks
from gradleak.core.random import Draws, key
from gradleak.diffusion import Denoising, Schedule, denoising
from gradleak.parts.fields import RuleDoesNotApply
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Relative
from gradleak.parts.predictions import Replay
from gradleak.parts.row_space import Outside, Spans, as_sent, rows, spanning_layers
from gradleak.parts.stage import Stage
from gradleak.scenario.observation import Observation
from gradleak.scenario.rules import SGD, Adam
from gradleak.scenario.task import Batch, Task, TaskError
from test_steps import drawn, toy

GRADIENT = gl.LocalTraining(lr=1.0)
KNOWS = gl.Knowledge(training=GRADIENT)
SCHEDULE = Schedule(100, first=1e-3, last=0.2)


@cache
def net(base: int = 8, target: str = "eps", seed: int = 0) -> Task:
    """A U-Net of two levels on 1 x 8 x 8: 16 places on the lower one, which has twice as many channels as the base."""
    model = gl.models.unet(
        shape=(1, 8, 8), base=base, multipliers=(1, 2), blocks=1, groups=4, heads=1, steps=100,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return denoising(model.double().eval(), like=torch.zeros(1, 1, 8, 8), schedule=SCHEDULE, target=target)


def seen(task: Task, batch: Batch, name: str = "target") -> Observation:
    return gl.observe(task, batch, GRADIENT, key=name)


def scored(found: Any, batch: Batch) -> float:
    return float(gl.metrics.compare(found, {name: value[None] for name, value in batch.items()}).psnr.min())


# --- which layers tell ------------------------------------------------------------------------------------------------


def test_layers_tell_that_have_few_places_and_see_the_whole_image() -> None:
    names = [layer.name for layer in spanning_layers(net(), 1)]
    assert names[0] == "down.1.blocks.0.before.2"  # 8 channels on 16 places, 16 outputs
    assert "down.0.smaller" not in names  # 16 places, 8 outputs
    assert all(layer.rows == 16 for layer in spanning_layers(net(), 1))
    assert {layer.rows for layer in spanning_layers(net(16), 2)} == {32}
    assert not any(name.startswith(("time", "stem", "down.0", "up.1", "out")) for name in names)
    assert not any(".time." in name for name in names)  # told the step, which no image moves
    assert [layer.name for layer in spanning_layers(net(16), 1)][0] == "down.0.smaller"  # 16 outputs
    assert spanning_layers(net(), 2) == ()  # twice as many places as outputs


def test_a_layer_that_sees_fewer_numbers_than_the_image_has_tells_too_little() -> None:
    task = denoising(
        gl.models.unet(shape=(3, 8, 8), base=8, multipliers=(1, 2), blocks=1, groups=4, heads=1, steps=100).eval(),
        like=torch.zeros(1, 3, 8, 8),
        schedule=SCHEDULE,
    )
    names = [layer.name for layer in spanning_layers(task, 1)]
    assert "down.1.blocks.0.before.2" not in names  # 8 x 4 x 4 numbers of an image of 192
    assert "down.1.blocks.0.after.1" in names


def test_layers_that_run_twice_are_frozen_or_are_cut_into_groups_tell_nothing() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Flatten()
            self.plain, self.frozen, self.twice = nn.Linear(4, 8), nn.Linear(8, 9), nn.Linear(9, 9)
            self.frozen.requires_grad_(False)
            self.grouped = nn.Conv2d(9, 9, 1, groups=3)
            self.head = nn.Linear(9, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.twice(self.twice(self.frozen(self.plain(self.flat(x)))))
            out: Tensor = self.head(self.flat(self.grouped(hidden[:, :, None, None])))
            return out

    like = (torch.zeros(2, 1, 2, 2), torch.zeros(2, dtype=torch.long))
    task = gl.Task.supervised(Net(), nn.functional.cross_entropy, like=like)
    assert [layer.name for layer in spanning_layers(task, 1)] == ["plain", "head"]
    assert [layer.name for layer in spanning_layers(task, 2)] == [
        "head"
    ]  # four numbers of each image, in a flat of one dimension


def test_a_layer_that_leaves_more_open_than_the_image_has_tells_too_little() -> None:
    class Patches(nn.Module):
        """Four patches of 4 x 4: 16 numbers each, in a flat of 3 dimensions."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Conv2d(1, 64, 4, 4), nn.Linear(64, 64), nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.mix(self.embed(x).flatten(2).transpose(1, 2).sigmoid()).sigmoid()
            out: Tensor = self.head(tokens.mean(1))
            return out

    like = (torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
    task = gl.Task.supervised(Patches(), nn.functional.cross_entropy, like=like)
    assert spanning_layers(task, 1)[0].name == "mix"  # at embed 52 equations, for an image of 64 numbers


def test_only_plain_layers_with_a_weight_of_their_own_tell() -> None:
    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.square())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 9))
            self.other, self.tied, self.again, self.head = (
                Other(9, 9),
                nn.Linear(9, 9),
                nn.Linear(9, 9),
                nn.Linear(9, 9),
            )
            self.again.weight = self.tied.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.again(self.tied(self.other(self.normed(x.flatten(1))))))
            return out

    like = (torch.zeros(1, 2, 2, 2), torch.zeros(1, dtype=torch.long))
    task = gl.Task.supervised(Net(), nn.functional.cross_entropy, like=like)
    assert [layer.name for layer in spanning_layers(task, 1)] == ["head"]


def test_what_was_not_sent_is_not_used() -> None:
    task = net()
    layer, update = spanning_layers(task, 1)[0], seen(task, drawn(40)).update
    weight, bias = f"{layer.name}.weight", f"{layer.name}.bias"
    assert as_sent(layer, [update, update]) == layer
    assert as_sent(layer, [update, {**update, bias: 0 * update[bias]}]) == replace(layer, bias=False)
    assert as_sent(layer, [update, {**update, weight: 0 * update[weight]}]) is None
    # As behind a norm of each channel, where the delta_p add up to zero.
    assert as_sent(layer, [{**update, bias: 1e-9 * update[bias]}]) is None
    less = update[weight] - update[weight].mean(0)
    assert as_sent(replace(layer, bias=False), [{**update, weight: less}]) is None


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(2, 5, 3, stride=2, padding=1), nn.Conv2d(2, 5, (1, 3), dilation=(1, 2)), nn.Linear(6, 5)],
    ids=["stride", "dilation", "linear"],
)
def test_rows_are_what_outputs_are_made_from(layer: Any) -> None:
    inputs = normal(3, 2, 7, 6).float()
    made = rows(layer, inputs) @ layer.weight.flatten(1).T + layer.bias
    out = layer(inputs)
    places = out.flatten(0, -2) if isinstance(layer, nn.Linear) else out.flatten(2).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(made, places, rtol=1e-4, atol=1e-5)


# --- the match --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("t", [0, 50, 99])
def test_the_private_image_and_no_other_lies_in_the_span(t: int, bias: bool) -> None:
    task, batch = net(), drawn(t)
    layer = spanning_layers(task, 1)[0]
    scene = scene_of(task, seen(task, batch), KNOWS, t=batch["t"])
    layer = replace(layer, bias=bias)
    predict, match = Spans((layer,)), Outside()
    flat = match.prepare(predict.target(scene))
    own = flat[layer.name]
    assert own.shape == (1 + 16, 8 * 9)
    known = 15 if bias else 16
    torch.testing.assert_close(own[1 : known + 1] @ own[1 : known + 1].T, torch.eye(known, dtype=torch.float64))
    assert float((own[1:] @ own[0]).abs().max()) < 1e-12
    assert bool(own[0].any()) == bias

    def away(noise: Tensor) -> float:
        guess = {**batch, "noise": noise}
        return float(match.distance(predict(guess, {}, scene, moment()), flat))

    assert away(batch["noise"]) < 1e-20
    assert away(batch["noise"] + 0.1 * normal(1, 1, 8, 8, seed=5)) > 1e-6


def test_weight_decay_is_taken_off() -> None:
    task, batch = net(), drawn(40)
    layer, training = spanning_layers(task, 1)[0], replace(GRADIENT, optimiser=SGD(weight_decay=0.01))
    scene = scene_of(task, gl.observe(task, batch, training), gl.Knowledge(training=training), t=batch["t"])
    flat = Outside().prepare(Spans((layer,)).target(scene))
    assert float(Outside().distance(Spans((layer,))(batch, {}, scene, moment()), flat)) < 1e-20


def test_a_span_does_not_depend_on_what_the_network_should_have_said() -> None:
    task, batch = net(), drawn(40)
    layer = spanning_layers(task, 1)[0]
    image, noise = SCHEDULE.scales(batch["t"], batch["x"])
    other = batch["noise"] + normal(1, 1, 8, 8, seed=3)
    moved = {**batch, "noise": other, "x": batch["x"] - noise / image * (other - batch["noise"])}  # the same x_t
    flats = [Spans((layer,)).target(scene_of(task, seen(task, own), KNOWS, t=batch["t"])) for own in (batch, moved)]
    spans = [own[layer.name][1:16] for own in flats]
    torch.testing.assert_close(spans[0].T @ spans[0], spans[1].T @ spans[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flats[0][layer.name][0], flats[1][layer.name][0], rtol=1e-5, atol=1e-6)


def test_only_the_layers_before_are_run() -> None:
    task, batch = net(), drawn(40)
    layer = spanning_layers(task, 1)[0]
    ran: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        for name, module in task.model.named_modules()
    ]
    scene = scene_of(task, seen(task, batch), KNOWS)
    ran.clear()
    try:
        Spans((layer,))(batch, {}, scene, moment())
    finally:
        for handle in handles:
            handle.remove()
    assert layer.name in ran
    assert not any(name.startswith(("before", "after", "up", "out")) for name in ran)


# --- coordinates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_coefficients_are_the_inverse_of_pixels(channels: int) -> None:
    image = normal(2, channels, 6, 5)
    torch.testing.assert_close(pixels(coefficients(image)), image)
    torch.testing.assert_close(coefficients(pixels(image)), image)
    assert frequencies(image).shape == (6, 5)
    assert float(frequencies(image)[3, 4]) == 5.0


@pytest.mark.parametrize("given", [(), ("noise",)])
def test_a_search_goes_on_from_an_image_and_a_noise(given: tuple[str, ...]) -> None:
    task, batch = net(), drawn(40)
    space = SpectralPair(Spectral())
    scene = scene_of(task, seen(task, batch), KNOWS, t=batch["t"], **{name: batch[name] for name in given})
    v = space.variables(scene, Draws(key("start")), {"x": batch["x"], "noise": batch["noise"]})
    assert set(v) == ({"z"} if given else {"z", "w"})
    for name, value in space.decode(v, scene, moment()).items():
        torch.testing.assert_close(value, batch[name])


def test_an_attack_begins_with_what_another_one_found(double: gl.Engine) -> None:
    task, batches = net(), [drawn(40), drawn(40, seed=1)]
    plan, fields = SpectralPair(Spectral()), Plan("unknown", "analytic").fields()
    stage = Stage(plan, Replay(), Relative(whole=True), (), LBFGS(steps=1))
    begin = {name: torch.stack([batch[name] for batch in batches]) for name in ("x", "noise")}
    made = Composed("again", (stage,), fields, restarts=2)
    found = made.run(
        task, [seen(task, each, str(row)) for row, each in enumerate(batches)], KNOWS, engine=double, begin=begin
    )
    assert float(found.match.max()) < 1e-20
    torch.testing.assert_close(found.batch["x"], begin["x"])


@pytest.mark.parametrize("target", ["eps", "v"])
def test_behind_a_known_x_t_the_gradient_is_linear_in_the_noise(target: str) -> None:
    task, batch = net(target=target), drawn(40)
    plain = scene_of(task, seen(task, batch), KNOWS, t=batch["t"])
    before = {"x": batch["x"], "noise": batch["noise"]}
    space = NoiseBehind()
    held = space.constants(plain, Draws(key("")), before)
    scene = replace(plain, constants=held)
    x_t = task.objective.noised(batch)
    torch.testing.assert_close(held["x_t"], x_t)

    def gradient(e: Tensor) -> Tensor:
        made = {**scene.fields, **space.decode({"e": e}, scene, moment())}
        alone = {name: made[name] for name in task.fields}
        torch.testing.assert_close(task.objective.noised(alone), x_t)
        update = Replay()(made, {}, scene, moment())
        other = Replay()(alone, {}, plain, moment())
        torch.testing.assert_close(update, other)  # the client's own gradient of that image and noise
        return torch.cat([value.flatten() for value in update.values()])

    zero, first, second = torch.zeros(1, 1, 8, 8).double(), normal(1, 1, 8, 8), normal(1, 1, 8, 8, seed=2)
    both = gradient(first) + gradient(second) - gradient(zero)
    torch.testing.assert_close(gradient(first + second), both)


# --- the attack -------------------------------------------------------------------------------------------------------


def test_image_and_noise_come_out_of_a_gradient_alone(double: gl.Engine) -> None:
    task, batch = net(16), drawn(20)
    found = gl.attacks.get("span-dm", steps=60, fine_steps=60, restarts=1).run(
        task, seen(task, batch), KNOWS, engine=double
    )
    assert scored(found, batch) > 60
    assert found.batch["t"][0].tolist() == [20]
    noise = (found.batch["noise"][0].flatten(), batch["noise"].flatten().double())
    assert float(torch.cosine_similarity(*noise, dim=0)) > 0.999
    assert set(found.batch) == set(found.candidates) == set(task.fields)
    assert found.settings["layers"] == ["down.0.smaller"]
    assert found.settings["outside"][0] < 1e-8
    assert found.evaluations >= 120


def test_images_and_noise_of_batches_come_out_one_by_one(double: gl.Engine) -> None:
    task, batches = net(16), [drawn(20, 60), drawn(30, 80, seed=1)]
    targets = [seen(task, batch, f"target {row}") for row, batch in enumerate(batches)]
    found = gl.attacks.get("span-dm", steps=60, fine_steps=60, restarts=1).run(task, targets, KNOWS, engine=double)
    truth = {name: torch.stack([batch[name] for batch in batches]) for name in task.fields}
    assert float(gl.metrics.compare(found, truth).psnr.min()) > 60
    assert found.batch["t"].tolist() == [[20, 60], [30, 80]]
    assert len(found.settings["starts"]) == len(found.settings["outside"]) == 4


def test_of_a_track_the_last_round_shows_x_t(double: gl.Engine) -> None:
    task, batch = net(16), drawn(20)
    track = gl.Track(tuple(replace(seen(task, batch), round=number) for number in (0, 1)))
    found = gl.attacks.get("span-dm", steps=60, fine_steps=30, restarts=1).run(task, track, KNOWS, engine=double)
    assert found.settings["outside"][0] < 1e-8
    assert scored(found, batch) > 30


def test_it_finds_the_same_in_single_precision() -> None:
    task = net(16).to("cpu", torch.float32)
    batch = {name: value.float() if value.is_floating_point() else value for name, value in drawn(20).items()}
    found = gl.attacks.get("span-dm", steps=60, fine_steps=60, restarts=1).run(
        task, seen(task, batch), KNOWS, engine=gl.Engine("cpu", precision="strict")
    )
    assert scored(found, batch) > 40


def behind(task: Task, batch: Batch, upload: Observation, knows: gl.Knowledge, engine: gl.Engine) -> float:
    """PSNR of the search for the noise alone, from another noise behind the same x_t."""
    image, noise = SCHEDULE.scales(batch["t"], batch["x"])
    other = normal(1, 1, 8, 8, seed=3)
    begin = {"x": batch["x"] - noise / image * (other - batch["noise"]), "noise": other}
    attack = SpanDM(fine_steps=60)._behind(shell=knows.defence is not None)
    begun = {name: value[None] for name, value in begin.items()}
    return scored(attack.run(task, upload, knows, engine=engine, begin=begun), batch)


def test_an_objective_of_ones_own_is_used_as_it_is(double: gl.Engine) -> None:
    class Weighted(Denoising):
        def weight(self, batch: Batch) -> Tensor:
            return 5 * self.schedule.at(batch["t"], batch["x"])

    task, batch = replace(net(), objective=Weighted(SCHEDULE, table=net().model.table)), drawn(20)
    assert behind(task, batch, seen(task, batch), KNOWS, double) > 60


def test_the_length_that_clipping_took_is_that_of_noise(double: gl.Engine) -> None:
    """The residual's length is lost with the gradient's; that of the noise is known, about."""
    task, batch, clipping = net(), drawn(60), gl.defences.Clipping(norm=0.01)
    clipped = gl.observe(task, batch, GRADIENT, clipping, key="target")
    informed = behind(task, batch, clipped, gl.Knowledge(training=GRADIENT, defence=clipping), double)
    naive = behind(task, batch, clipped, KNOWS, double)
    assert informed > naive + 3


def test_noise_that_is_given_is_used(double: gl.Engine) -> None:
    task, batch = net(), drawn(60)
    knows = gl.Knowledge(training=GRADIENT, given={"noise": batch["noise"]})
    found = gl.attacks.get("span-dm", steps=60, fine_steps=20).run(task, seen(task, batch), knows, engine=double)
    assert scored(found, batch) > 60
    torch.testing.assert_close(found.batch["noise"][0], batch["noise"])


def test_audits_run_it_where_a_layer_tells() -> None:
    def named(*how: Any) -> list[str]:
        return [method.partition(":")[0] for method in default_attacks(gl.Engine("cpu"), *how)]

    usual = ["dlg-dm", "dlg-dm", "spectral-dm"]
    assert named(net()) == named(net(), 1, GRADIENT) == [*usual, "span-dm"]
    assert named(toy()) == named(net(), 2) == usual
    assert named(net(16), 2) == [*usual, "span-dm"]
    assert named(net(), None) == named(net(), 1, replace(GRADIENT, optimiser=Adam())) == usual
    assert named(net(), 1, replace(GRADIENT, steps=3)) == ["dlg-dm", "dlg-dm"]
    assert "span-dm" not in named()


def test_what_it_cannot_attack_it_refuses_with_what_to_use_instead() -> None:
    attack = gl.attacks.get("span-dm")
    with pytest.raises(TaskError, match=r"the same number of examples in every target; given \[1, 2\]"):
        attack.run(net(), [seen(net(), drawn(3), "one"), seen(net(), drawn(3, 60), "two")], KNOWS)
    with pytest.raises(TaskError, match=r"No layer of this network reveals.*an update: 2.*spectral-dm"):
        attack.run(net(), seen(net(), drawn(3, 60)), KNOWS)
    with pytest.raises(TaskError, match=r"No layer of this network reveals.*spectral-dm"):
        attack.run(toy(), seen(toy(), drawn(3)), KNOWS)
    adam = replace(GRADIENT, optimiser=Adam())
    with pytest.raises(TaskError, match=r"reads a gradient; these clients send what Adam.*dlg-dm"):
        attack.run(net(), seen(net(), drawn(3)), gl.Knowledge(training=adam))
    two = gl.Knowledge(training=GRADIENT, given={"noise": drawn(3, 60)["noise"]})
    with pytest.raises(RuleDoesNotApply, match="steps that are read off have no order"):
        attack.run(net(16), seen(net(16), drawn(3, 60)), two)
    with pytest.raises(ValueError, match="layers"):
        gl.attacks.get("span-dm", layers=0)
