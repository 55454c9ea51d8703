"""The differential-privacy family: what they send, what an attacker assumes of them, and what they may print."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import largest_difference, moment, network, private, scene_of, tiny
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.defences.clipping import Clipping, clip, clipped_mean, gradients_of_examples
from gradleak.defences.dp_fedavg import DPFedAvg
from gradleak.defences.dp_lewis import DPFedAvgLewis
from gradleak.defences.dp_sgd import DPSGD
from gradleak.defences.gaussian import LocalGaussian
from gradleak.defences.geyer import Geyer
from gradleak.defences.tip_dp_baseline import TIPBaseline
from gradleak.parts.predictions import Replay
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Client, Defence
from gradleak.scenario.guarantee import Exposure, Guarantee, accounted
from gradleak.scenario.rules import SGD, Adam
from gradleak.scenario.task import TaskError

# Each as it is, and the same without noise. The bounds are low enough to clip: updates have norms of about 0.5.
FAMILY: dict[str, tuple[Defence, Defence]] = {
    "clip update": (Clipping(0.1), Clipping(0.1)),
    "clip nothing": (Clipping(100.0), Clipping(100.0)),
    "clip layers": (Clipping(0.1, "layer"), Clipping(0.1, "layer")),
    "clip examples": (Clipping(0.1, "example"), Clipping(0.1, "example")),
    "local gaussian": (LocalGaussian(0.1, 0.5), LocalGaussian(0.1, 0.0)),
    "heuristic": (LocalGaussian(sigma=0.05), LocalGaussian(sigma=0.0)),
    "dp-fedavg central": (DPFedAvg(0.1, 0.5), DPFedAvg(0.1, 0.0)),
    "dp-fedavg distributed": (
        DPFedAvg(0.1, 0.5, model="distributed", threshold=4),
        DPFedAvg(0.1, 0.0, model="distributed", threshold=4),
    ),
    "geyer": (Geyer(0.5), Geyer(0.0)),
    "dp-sgd": (DPSGD(0.1, 0.5), DPSGD(0.1, 0.0)),
    "tip-dp-baseline": (TIPBaseline(clip=0.1), TIPBaseline(clip=0.1, epsilon=math.inf)),
}
RECIPES = {
    "one step": LocalTraining(lr=0.7),
    "epochs": LocalTraining(lr=0.3, epochs=2, batch_size=2),
    "adam": LocalTraining(lr=0.05, steps=3, optimiser=Adam()),
}
CENTRAL = ("dp-fedavg central", "geyer")  # noise that is not in an upload
NOISY = [name for name, (loud, quiet) in FAMILY.items() if loud != quiet and name not in CENTRAL]


def sent(
    defence: Defence, training: LocalTraining, *, task: gl.Task | None = None, examples: int = 4, key: str = "a"
) -> Params:
    task = task or tiny()
    state = ClientState(key=draws.key("client", key))
    upload, _ = training.run(task, task.weights(), private(examples), defence, state)
    return upload.payload["update"]


def seen_by_server(defence: Defence, training: LocalTraining, known: Defence | None = None) -> TargetView:
    task = tiny()
    observation = gl.Observation(task.weights(), tree.detach(sent(defence, training)), 4)
    return scene_of(task, observation, gl.Knowledge(training=training, defence=known))


def plain(training: LocalTraining | None = None) -> Params:
    return sent(Defence(), training or LocalTraining(lr=1.0))


# --- all of them ------------------------------------------------------------------------------------------------------


def test_the_table_holds_every_registered_defence_of_the_family() -> None:
    here = {type(loud) for loud, _ in FAMILY.values()}
    names = {"clipping", "local-gaussian", "dp-fedavg", "geyer", "dp-sgd", "tip-dp-baseline"}
    entries = {entry.name: entry for entry in gl.registry.entries("defence")}
    assert {entries[name].make for name in names} == here
    for name in names:
        made = gl.registry.get("defence", name)
        assert all(isinstance(value, (int, float, str, type(None))) for value in vars(made).values())
        assert entries[name].paper
        assert inspect.getdoc(entries[name].make)


def test_settings_are_read_from_the_command_lines_spelling() -> None:
    assert gl.registry.parse("defence", "clipping:norm=0.5,per=layer") == Clipping(0.5, "layer")
    assert gl.registry.parse("defence", "local-gaussian:sigma=0.01") == LocalGaussian(sigma=0.01)
    made = gl.registry.parse("defence", "dp-fedavg:model=distributed,threshold=10")
    assert made == DPFedAvg(model="distributed", threshold=10)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FAMILY)
def test_without_noise_the_replay_gives_the_observation_at_the_truth_and_not_beside_it(name: str, recipe: str) -> None:
    training, quiet = RECIPES[recipe], FAMILY[name][1]
    scene = seen_by_server(quiet, training, quiet)
    predict, batch = Replay(), private(4)
    target = predict.target(scene)
    gap = tree.norm(tree.subtract(predict(batch, {}, scene, moment()), target)) / tree.norm(target)
    assert gap < 1e-12
    beside = {**batch, "x": batch["x"] + 0.1 * private(4, seed=1)["x"]}
    gap = tree.norm(tree.subtract(predict(beside, {}, scene, moment()), target)) / tree.norm(target)
    assert gap > 1e-6


@pytest.mark.parametrize("name", NOISY)
def test_the_attacker_replays_without_noise_and_keeps_its_variance(name: str) -> None:
    """`assumed` never asks for the client's random numbers, and says how noisy the observation was."""
    training, (loud, quiet) = RECIPES["one step"], FAMILY[name]
    scene = seen_by_server(loud, training)
    task = scene.task
    believed = loud.assumed(scene, task)
    upload, _ = training.run(task, task.weights(), private(4), believed, ClientState())  # no key: no draws
    assert largest_difference(upload.payload["update"], sent(quiet, training)) == 0
    variance = believed.noise_variance(scene)
    assert largest_difference(variance, loud.noise_variance(scene)) == 0
    assert all(bool((value > 0).all()) for value in variance.values())
    assert "without noise" in believed.name


@pytest.mark.parametrize("recipe", ["one step", "epochs"])
@pytest.mark.parametrize("name", NOISY)
def test_the_variance_is_that_of_the_updates_a_client_sends(name: str, recipe: str) -> None:
    training, (loud, quiet) = RECIPES[recipe], FAMILY[name]
    if name == "dp-sgd":  # small noise: what later gradients make of earlier noise is left out of the formula
        loud = replace(loud, noise_multiplier=0.01)
    scene = seen_by_server(loud, training)
    task, batch = scene.task, private(4)

    def one(key: Tensor) -> Params:
        upload, _ = training.run(task, task.weights(), batch, loud, ClientState(key=key))
        return upload.payload["update"]

    many = vmap(one)(torch.stack([draws.key("variance", n) for n in range(200)]))
    noise = torch.stack([tree.flatten({k: v[n] for k, v in many.items()}) for n in range(200)])
    noise = noise - tree.flatten(sent(quiet, training))
    stated = tree.flatten(loud.noise_variance(scene))
    assert float((noise.square() / stated).mean()) == pytest.approx(1, rel=0.05)  # 18,200 squares: 3 errors are 3 %
    assert noise.mean().abs() < 4 * float(stated.mean().sqrt()) / math.sqrt(noise.numel())
    correlation = torch.corrcoef(noise) - torch.eye(200)
    assert correlation.abs().max() < 0.6  # clients do not share their noise


@pytest.mark.parametrize("name", FAMILY)
def test_lanes_together_end_where_each_ends_alone(name: str, double: gl.Engine) -> None:
    task, training, defence = tiny(), RECIPES["one step"], FAMILY[name][0]
    seen = [gl.observe(task, private(2, seed=s), training, defence, key=f"t{s}") for s in range(2)]
    labels = torch.stack([private(2, seed=s)["y"] for s in range(2)])
    knows = gl.Knowledge(training=training, defence=defence, given={"y": labels})
    attack = gl.attacks.get("ig", steps=4)
    together = attack.run(task, seen, knows, engine=double)
    for position, target in enumerate(seen):
        alone = attack.run(task, target, replace(knows, given={"y": labels[position]}), engine=double)
        assert largest_difference(together.batch["x"][position], alone.batch["x"][0]) < 1e-9


@pytest.mark.parametrize("name", ["clip update", "clip layers", "clip examples", "dp-sgd", "tip-dp-baseline"])
def test_the_replay_has_forward_derivatives_inside_lanes(name: str) -> None:
    """What second-order attacks ask: jvp inside vmap, around the per-example vmap of the defence itself."""
    training, defence = RECIPES["epochs"], FAMILY[name][0]
    scene = seen_by_server(defence, training, defence)
    batch = private(4)

    def predicted(x: Tensor) -> Tensor:
        return tree.flatten(Replay()({**batch, "x": x}, {}, scene, moment()))

    directions = torch.stack([private(4, seed=s)["x"] - 0.5 for s in (1, 2, 3)])
    found = vmap(lambda direction: jvp(predicted, (batch["x"],), (direction,))[1])(directions)
    for direction, tangent in zip(directions, found, strict=True):
        step = 1e-5 * direction
        numerical = (predicted(batch["x"] + step) - predicted(batch["x"] - step)) / 2e-5
        assert largest_difference(tangent, numerical) < 1e-7 * float(tangent.abs().max()) + 1e-9


SOME = Exposure(rounds=10, clients=100, participation=0.1, sampling="poisson", examples=4, training=RECIPES["epochs"])
LABELS = {
    "clip update": "no formal guarantee (clipping adds no noise)",
    "clip nothing": "no formal guarantee (clipping adds no noise)",
    "clip layers": "no formal guarantee (clipping adds no noise)",
    "clip examples": "no formal guarantee (clipping adds no noise)",
    "local gaussian": "(134, 1e-05)-differential privacy of one client (local model, against the server and everybody "
    "else); vacuous in practice\nexact Gaussian composition over 10 releases; the server knows who takes part: not "
    "amplified",
    "heuristic": "no formal guarantee (heuristic noise, sigma=0.05, noise/signal=not measured)",
    "dp-fedavg central": "(12.3, 1e-05)-differential privacy of one client (central model, against other clients and "
    "whoever sees the model); does not protect against the aggregating server (the GIA adversary)\n"
    "PLD (dp-accounting), checked against RDP (Opacus) over 10 releases; Poisson sampling of clients with "
    "probability 0.1; neighbours: one client more or less",
    "dp-fedavg distributed": "(46.3, 1e-05)-differential privacy of one client (distributed model, against a server "
    "that sees only sums over at least 4 clients, by secure aggregation); vacuous in practice\n",
    "geyer": "no formal guarantee (central noise; does not protect against the aggregating server (the GIA adversary)",
    "dp-sgd": "(77.4, 1e-05)-differential privacy of one example (local model, against the server and everybody else); "
    "vacuous in practice\nexact Gaussian composition over 20 releases; shuffled batches of fixed size: not amplified",
    "tip-dp-baseline": "no formal guarantee (as published, sigma=9.69e-05: (i)",
}


@pytest.mark.parametrize("name", FAMILY)
def test_what_each_may_print(name: str) -> None:
    label = str(FAMILY[name][0].guarantee(SOME))
    assert label.startswith(LABELS[name]), label
    assert label.count("\n") <= 1


@pytest.mark.parametrize("name", FAMILY)
def test_an_epsilon_says_what_it_takes_for_granted(name: str) -> None:
    """What else leaves a client, and is not noised, is no part of what was counted."""
    found = FAMILY[name][0].guarantee(SOME)
    for assumed in ("public example counts", "no losses or other metrics sent", "not tuned on private data"):
        assert (assumed in str(found)) == (found.epsilon is not None)


@pytest.mark.parametrize("name", FAMILY)
def test_nothing_is_guaranteed_without_noise(name: str) -> None:
    assert FAMILY[name][1].guarantee(SOME).epsilon is None


# --- clipping ---------------------------------------------------------------------------------------------------------


def test_an_update_is_clipped_to_the_norm_and_keeps_its_direction() -> None:
    found, whole = sent(Clipping(0.1), LocalTraining(lr=1.0)), plain()
    assert float(tree.norm(found)) == pytest.approx(0.1)
    assert largest_difference(found, tree.scale(whole, 0.1 / tree.norm(whole))) < 1e-16
    assert largest_difference(sent(Clipping(100.0), LocalTraining(lr=1.0)), whole) == 0


def test_layers_are_clipped_each_to_the_norm() -> None:
    found, whole = sent(Clipping(0.1, "layer"), LocalTraining(lr=1.0)), plain()
    for name, value in found.items():
        assert float(value.norm()) == pytest.approx(min(0.1, float(whole[name].norm())))


def test_examples_are_clipped_before_they_are_averaged() -> None:
    task, batch = tiny(), private(3)
    each = [task.gradient(task.weights(), {k: v[i : i + 1] for k, v in batch.items()}) for i in range(3)]
    norms = [float(tree.norm(gradient)) for gradient in each]
    bound = sorted(norms)[1]  # clips one, touches one, leaves one
    expected = tree.zeros_like(task.weights())
    for gradient in each:
        expected = tree.add(expected, clip(gradient, bound), 1 / 3)
    found = sent(Clipping(bound, "example"), LocalTraining(lr=1.0), examples=3)
    assert largest_difference(found, expected) < 1e-15
    loose = sent(Clipping(100.0, "example"), LocalTraining(lr=1.0), examples=3)
    assert largest_difference(loose, sent(Defence(), LocalTraining(lr=1.0), examples=3)) < 1e-15


@pytest.mark.parametrize("per", ["update", "layer"])
def test_where_the_clip_was_active_every_prediction_is_scaled_to_it(per: str) -> None:
    """Also one that is shorter than the bound: the clip's own kink would stop an optimiser there."""
    training, defence = LocalTraining(lr=1.0), Clipping(0.1, per)
    scene = seen_by_server(defence, training)
    believed = defence.assumed(scene, scene.task)
    small = gl.Upload({"update": tree.scale(scene.update, 1e-3)}, 4)
    found = believed.upload(small, None).payload["update"]
    for name, value in found.items():
        clipped = per == "update" or float(plain()[name].norm()) > 0.1
        assert largest_difference(value, scene.update[name] if clipped else 1e-3 * scene.update[name]) < 1e-15


@pytest.mark.parametrize("per", ["update", "layer"])
def test_an_active_clip_is_seen_through_the_rounding_of_float32_weights(per: str) -> None:
    task, training, bound = tiny(dtype=torch.float32), LocalTraining(lr=1e-3), 4e-5  # all layers are longer
    seen = gl.observe(task, private(4, dtype=torch.float32), training, Clipping(bound, per), wire="weights")
    scene = scene_of(task, seen)
    norms = [tree.norm(scene.update)] if per == "update" else [value.norm() for value in scene.update.values()]
    assert max(abs(float(norm) / bound - 1) for norm in norms) > 1e-6  # the rounding is there
    double = gl.Upload({"update": tree.scale(scene.update, 2.0)}, 4)
    found = Clipping(bound, per).assumed(scene, task).upload(double, None).payload["update"]
    assert largest_difference(found, scene.update) < 1e-10


@pytest.mark.parametrize("defence", [Clipping(0.1), Clipping(0.1, "layer"), DPFedAvg(0.1, 5.0)])
def test_an_attacker_who_knows_the_clip_is_not_hindered_by_it(defence: Defence, double: gl.Engine) -> None:
    """Central noise included: it is not in the upload."""
    task, training, batch = tiny(), LocalTraining(lr=1.0), private(1)
    seen = gl.observe(task, batch, training, defence)
    attack = gl.attacks.get("second-order", certify=False)
    naive, adaptive = (
        attack.run(task, seen, gl.Knowledge(training=training, defence=known), engine=double)
        for known in (None, defence)
    )
    assert largest_difference(adaptive.batch["x"].reshape(-1), batch["x"].reshape(-1)) < 1e-9
    assert largest_difference(naive.batch["x"].reshape(-1), batch["x"].reshape(-1)) > 0.1


def test_where_the_clip_was_not_active_predictions_are_left_alone() -> None:
    defence = Clipping(100.0)
    scene = seen_by_server(defence, LocalTraining(lr=1.0))
    large = gl.Upload({"update": tree.scale(scene.update, 1e4)}, 4)
    assert largest_difference(defence.assumed(scene, scene.task).upload(large, None).payload, large.payload) == 0


def test_an_update_of_zeros_stays_one_with_finite_derivatives() -> None:
    zero = {"w": torch.zeros(3, dtype=torch.float64)}
    for bound in (clip, lambda u, c: Clipping(c).upload(gl.Upload({"update": u}, 1), None).payload["update"]):
        value, slope = jvp(lambda w, bound=bound: bound({"w": w}, 1.0)["w"], (zero["w"],), (torch.ones(3).double(),))
        assert value.abs().max() == 0
        assert slope.isfinite().all()


# --- examples on their own: beside Opacus -----------------------------------------------------------------------------


def wrapped(model: nn.Module) -> nn.Module:
    opacus = pytest.importorskip("opacus")
    return opacus.GradSampleModule(copy.deepcopy(model).train())


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_gradients_of_examples_are_those_of_opacus() -> None:
    task, batch = tiny(), private(5)
    module = wrapped(task.model)
    cross_entropy(module(batch["x"]), batch["y"]).backward()
    ours = gradients_of_examples(task.gradient, task.weights(), batch, task)
    for name, parameter in module._module.named_parameters():
        assert largest_difference(ours[name], parameter.grad_sample) < 1e-12


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_step_without_noise_is_that_of_opacus() -> None:
    """Opacus divides by the norm plus 1e-6, hence the tolerance."""
    task, batch, bound = tiny(), private(5), 0.3
    module = wrapped(task.model)
    from opacus.optimizers import DPOptimizer

    optimiser = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.7), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=5
    )
    cross_entropy(module(batch["x"]), batch["y"]).backward()
    optimiser.step()
    theirs = {name: task.weights()[name] - p.detach() for name, p in module._module.named_parameters()}
    ours = sent(DPSGD(bound, 0.0), LocalTraining(lr=0.7), examples=5)
    assert largest_difference(ours, theirs) < 1e-6
    assert largest_difference(ours, sent(Defence(), LocalTraining(lr=0.7), examples=5)) > 1e-3  # the clip did something


def test_frozen_statistics_are_no_obstacle() -> None:
    task, batch = tiny(norm="eval"), private(3)
    mean = clipped_mean(task.gradient, task.weights(), batch, task, 1e6)
    assert largest_difference(mean, task.gradient(task.weights(), batch)) < 1e-15
    upload, state = RECIPES["epochs"].run(task, task.weights(), batch, DPSGD(noise_multiplier=0.0))
    assert upload.buffers is None
    assert largest_difference(state.buffers, task.buffers()) == 0


@pytest.mark.parametrize("defence", [DPSGD(), Clipping(per="example")])
def test_layers_that_see_the_whole_batch_are_refused(defence: Defence) -> None:
    with pytest.raises(TaskError, match="Layer '1' .BatchNorm2d. uses statistics of the whole batch.*GroupNorm"):
        sent(defence, LocalTraining(lr=1.0), task=tiny(norm="train"))
    like = (torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.long))
    model = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), network()).eval().double()
    with pytest.raises(TaskError, match="Layer '0'"):
        sent(defence, LocalTraining(lr=1.0), task=gl.Task.supervised(model, cross_entropy, like=like))


# --- noise ------------------------------------------------------------------------------------------------------------


def test_every_local_step_draws_noise_of_its_own() -> None:
    """With a learning rate that hardly moves anything, equal noise in 4 steps would add up to 4, not to 2."""
    one = sent(DPSGD(1.0, 1.0), LocalTraining(lr=1e-9))
    four = sent(DPSGD(1.0, 1.0), LocalTraining(lr=1e-9, steps=4))
    assert float(tree.norm(four) / tree.norm(one)) == pytest.approx(2, rel=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounds_and_clients_draw_noise_of_their_own(dtype: torch.dtype) -> None:
    task = tiny(dtype=dtype)
    training, batch = LocalTraining(lr=1.0), private(4, dtype=dtype)

    def of(key: str) -> Params:
        state = ClientState(key=draws.key("client", key))
        return training.run(task, task.weights(), batch, DPSGD(), state)[0].payload["update"]

    first, second, again = of("a"), of("b"), of("a")
    assert largest_difference(first, again) == 0
    assert largest_difference(first, second) > 0.1


def test_noise_without_a_source_is_an_error_that_says_so() -> None:
    task = tiny()
    for name in NOISY:
        with pytest.raises(ValueError, match=r"ClientState\(key=...\)"):
            LocalTraining(lr=1.0).run(task, task.weights(), private(2), FAMILY[name][0])


def test_momentum_is_part_of_the_variance() -> None:
    """Two steps: the first step's noise moves the weights by 1 and then by 0.9 again."""
    rule = SGD(momentum=0.9)
    scene = seen_by_server(DPSGD(1.0, 1.0), LocalTraining(lr=0.5, steps=2, optimiser=rule))
    expected = (0.5 / 4) ** 2 * (1.9**2 + 1)
    assert float(DPSGD(1.0, 1.0).noise_variance(scene)["0.bias"][0]) == pytest.approx(expected)


@pytest.mark.parametrize(
    "rule", [SGD(momentum=0.9), SGD(momentum=0.9, dampening=0.5), SGD(momentum=0.9, nesterov=True)], ids=repr
)
@pytest.mark.parametrize("defence", [DPSGD(0.1, 0.01), DPFedAvgLewis(0.1, 1e-4)], ids=lambda defence: defence.name)
def test_so_it_is_for_noise_in_every_step_whatever_the_momentum(defence: Defence, rule: SGD) -> None:
    training, batch = LocalTraining(lr=0.3, steps=3, optimiser=rule), private(4)
    scene = seen_by_server(defence, training, defence)
    task, quiet = scene.task, defence.assumed(scene, scene.task)

    def one(key: Tensor) -> Tensor:
        upload, _ = training.run(task, task.weights(), batch, defence, ClientState(key=key))
        return tree.flatten(upload.payload["update"])

    noise = vmap(one)(torch.stack([draws.key("variance", n) for n in range(200)])) - tree.flatten(sent(quiet, training))
    stated = tree.flatten(defence.noise_variance(scene))
    assert float((noise.square() / stated).mean()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("defence", [DPSGD(1.0, 1.0), DPFedAvgLewis(1.0, 0.1)], ids=lambda defence: defence.name)
def test_under_adam_all_of_the_update_may_be_noise(defence: Defence) -> None:
    scene = seen_by_server(defence, RECIPES["adam"], defence)
    mean_square = float(tree.squared_norm(scene.update) / tree.size(scene.update))
    assert float(defence.noise_variance(scene)["0.bias"][0]) == pytest.approx(mean_square)


@pytest.mark.parametrize("name", ["local gaussian", "dp-fedavg central", "dp-fedavg distributed", "dp-sgd"])
def test_statistics_do_not_leave_without_noise(name: str) -> None:
    task = tiny(norm="eval")
    state = ClientState(key=draws.key("client"))
    upload, _ = LocalTraining(lr=1.0).run(task, task.weights(), private(2), FAMILY[name][0], state)
    assert upload.buffers is None
    two = gl.Upload({"update": plain(), "moment": plain()}, 2)
    with pytest.raises(ValueError, match="the upload also holds moment"):
        FAMILY[name][0].upload(two, None)


def test_two_trees_get_heuristic_noise_of_their_own() -> None:
    client = Client(tiny(), {}, {}, {}, {}, {}, {}, draws.Draws(draws.key("client")))
    two = gl.Upload({"update": tree.zeros_like(plain()), "moment": tree.zeros_like(plain())}, 2)
    noise = LocalGaussian(sigma=1.0).upload(two, client).payload
    assert largest_difference(noise["update"], noise["moment"]) > 0.5


# --- servers ----------------------------------------------------------------------------------------------------------


def uploads(count: int, size: int = 2000) -> list[gl.Upload]:
    source = draws.Draws(draws.key("uploads"))
    return [
        gl.Upload({"update": {"w": (k + 1) * source.normal((size,), stream=k, dtype=torch.float64) / size**0.5}}, 2)
        for k in range(count)
    ]


SERVER = {"key": draws.key("server"), "round": 3, "clients": 20, "participation": 0.25}


def test_dp_fedavg_divides_by_the_expected_number_of_clients() -> None:
    """Three clients came, five were expected: the sum is divided by five, whoever came and however much they hold."""
    three = uploads(3)
    total = sum(upload.payload["update"]["w"] for upload in three)
    found = DPFedAvg(1.0, 0.0).aggregate(three, [1, 50, 7], SERVER)["w"]
    assert largest_difference(found, total / 5) < 1e-15


def test_the_servers_noise_has_the_stated_size_and_is_fresh_in_every_round() -> None:
    three, quiet = uploads(3), DPFedAvg(0.5, 0.0).aggregate(uploads(3), [2] * 3, SERVER)["w"]
    first, second = (
        DPFedAvg(0.5, 2.0).aggregate(three, [2] * 3, {**SERVER, "round": number})["w"] - quiet for number in (3, 4)
    )
    assert float(first.std()) == pytest.approx(0.5 * 2.0 / 5, rel=0.06)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.1


def test_noise_of_threshold_clients_makes_up_the_central_noise() -> None:
    defence = DPFedAvg(1.0, 2.0, model="distributed", threshold=4)
    zero = gl.Upload({"update": {"w": torch.zeros(4000, dtype=torch.float64)}}, 2)
    clients = [Client(tiny(), {}, {}, {}, {}, {}, {}, draws.Draws(draws.key("client", k))) for k in range(4)]
    four = [defence.upload(zero, client) for client in clients]
    found = defence.aggregate(four, [2] * 4, {"clients": 4, "participation": 1.0})["w"]  # the server adds none: no key
    assert float(found.std()) == pytest.approx(2.0 / 4, rel=0.05)


def test_a_round_of_too_few_clients_to_make_up_the_noise_is_dropped() -> None:
    """Their sum would hold less noise than was promised: the server steps nowhere."""
    server = {"clients": 4, "participation": 1.0}
    for came, steps in ((3, False), (4, True)):
        found = DPFedAvg(1.0, 2.0, model="distributed", threshold=4).aggregate(uploads(came), [2] * came, server)["w"]
        assert bool(found.any()) is steps


def test_geyer_without_a_scale_steps_nowhere() -> None:
    """Most clients sent nothing, so the median of their norms is zero; the step is zero, and no division by it."""
    nothing, one = [gl.Upload(tree.zeros_like(upload.payload), 2) for upload in uploads(2)], uploads(1)
    assert not Geyer(1.0).aggregate([*nothing, *one], [2] * 3, SERVER)["w"].any()


def test_geyer_clips_to_the_median_and_averages() -> None:
    three = uploads(3)
    updates = [upload.payload["update"] for upload in three]
    norms = [float(tree.norm(update)) for update in updates]
    bound = sorted(norms)[1]
    expected = sum(clip(update, bound)["w"] for update in updates) / 3
    assert largest_difference(Geyer(0.0).aggregate(three, [2] * 3, {})["w"], expected) < 1e-15
    noise = Geyer(2.0).aggregate(three, [2] * 3, SERVER)["w"] - expected
    assert float(noise.std()) == pytest.approx(2.0 * bound / 3, rel=0.06)


def test_a_server_that_sees_raw_updates_is_attacked_as_such() -> None:
    """Central noise changes neither the upload nor what an attacker assumes."""
    assert largest_difference(sent(Geyer(), LocalTraining(lr=1.0)), plain()) == 0
    scene = seen_by_server(DPFedAvg(0.1, 5.0), LocalTraining(lr=1.0))
    assert largest_difference(DPFedAvg(0.1, 5.0).noise_variance(scene), tree.zeros_like(scene.update)) == 0
    assert float(tree.norm(scene.update)) == pytest.approx(0.1)


def test_a_server_without_what_it_needs_is_told() -> None:
    with pytest.raises(ValueError, match=r"server\['clients'\] and server\['participation'\]"):
        DPFedAvg().aggregate(uploads(2), [2, 2], {})
    with pytest.raises(ValueError, match=r"needs server\['key'\].*given clients, participation"):
        DPFedAvg().aggregate(uploads(2), [2, 2], {"clients": 2, "participation": 1.0})
    with pytest.raises(ValueError, match=r"Geyer adds the server's noise.*given nothing"):
        Geyer().aggregate(uploads(2), [2, 2], {})


# --- the baseline of TIP ----------------------------------------------------------------------------------------------


def test_the_published_noise_scales_are_reproduced() -> None:
    assert TIPBaseline().sigma == pytest.approx(0.0048448, abs=5e-8)
    assert TIPBaseline(epochs=1, batches=4, batch_size=1).sigma == pytest.approx(0.019379, abs=5e-7)


def test_the_baseline_clips_the_mean_of_a_batch_and_noises_the_weights() -> None:
    quiet = TIPBaseline(clip=0.1, epsilon=math.inf)
    assert largest_difference(sent(quiet, LocalTraining(lr=1.0)), clip(plain(), 0.1)) < 1e-16
    loud = TIPBaseline(clip=0.1)
    source = draws.Draws(draws.key("client", "a"))
    first = source.normal((4, 1, 3, 3), stream=0, dtype=torch.float64)
    noise = tree.subtract(sent(loud, LocalTraining(lr=1.0)), sent(quiet, LocalTraining(lr=1.0)))
    assert largest_difference(noise["0.weight"], -loud.sigma * first) < 1e-15  # weights are the start minus the update


def test_the_baselines_label_gives_its_three_errors() -> None:
    label = str(TIPBaseline().guarantee(SOME))
    assert label.startswith("no formal guarantee (as published")
    for reason in ("(i) clipping the mean of a batch", "(ii) the rule for sigma", "(iii) rounds are not composed"):
        assert reason in label


# --- labels -----------------------------------------------------------------------------------------------------------


def test_heuristic_noise_is_measured_against_the_signal() -> None:
    label = str(LocalGaussian(sigma=0.01).guarantee(Exposure(signal=0.02)))
    assert label == "no formal guarantee (heuristic noise, sigma=0.01, noise/signal=0.5)"


def test_local_privacy_compares_any_two_data_sets() -> None:
    """Two clipped updates can lie 2 C apart, so noise of 2 C is worth what noise of C is against a missing update."""
    local = LocalGaussian(1.0, 2.0).guarantee(Exposure()).epsilon
    assert local == pytest.approx(4.377, abs=1e-3)
    assert DPFedAvg(1.0, 1.0).guarantee(Exposure()).epsilon == pytest.approx(local)


def test_only_poisson_sampling_hidden_from_the_adversary_amplifies() -> None:
    """Fixed cohorts are not amplified by the Poisson formula, and a server knows whom it asked."""
    fixed = replace(SOME, sampling="fixed")
    everybody = replace(SOME, sampling="all", participation=1.0)
    central = DPFedAvg()
    assert central.guarantee(SOME).epsilon < 0.3 * central.guarantee(fixed).epsilon
    assert central.guarantee(fixed).epsilon == central.guarantee(everybody).epsilon
    assert "not amplified" in str(central.guarantee(fixed))
    for defence in (LocalGaussian(), DPSGD(), DPFedAvg(model="distributed", threshold=4)):
        assert defence.guarantee(SOME).epsilon == defence.guarantee(everybody).epsilon


@pytest.mark.parametrize(
    ("training", "examples", "passes"),
    [
        (LocalTraining(lr=1.0), 4, 1),
        (LocalTraining(lr=1.0, steps=3), 4, 3),
        (LocalTraining(lr=1.0, epochs=2, batch_size=2), 5, 2),
        (LocalTraining(lr=1.0, steps=4, batch_size=2), 5, 2),  # three steps a pass: the fourth begins another
        (LocalTraining(lr=1.0, steps=3, batch_size=2), 5, 1),
    ],
)
def test_an_example_is_counted_once_in_every_pass(training: LocalTraining, examples: int, passes: int) -> None:
    exposure = Exposure(rounds=7, examples=examples, training=training)
    assert exposure.passes == passes
    assert DPSGD().guarantee(exposure).releases == 7 * passes
    rows = [torch.arange(examples) if r is None else r for r in training.order(examples, torch.Generator())]
    assert int(torch.cat(rows).bincount().max()) == passes


def test_steps_that_cannot_be_counted_give_no_epsilon() -> None:
    label = str(DPSGD().guarantee(Exposure()))
    assert label == "no formal guarantee (the client's local training is not known, so its steps cannot be counted)"


def test_too_few_clients_for_the_noise_give_no_epsilon() -> None:
    label = str(DPFedAvg(model="distributed", threshold=11).guarantee(SOME))
    assert label == "no formal guarantee (10 clients in a round, fewer than the 11 whose noise makes up the total)"


def test_distributed_noise_says_what_an_upload_alone_is_worth() -> None:
    label = str(DPFedAvg(1.0, 4.0, model="distributed", threshold=4).guarantee(replace(SOME, rounds=1)))
    assert "without secure aggregation each upload alone has epsilon 4.38 (local model)" in label


def test_without_the_accountant_no_epsilon_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    label = str(DPFedAvg(noise_multiplier=1.0123).guarantee(SOME))
    assert label.startswith("no formal guarantee (not accounted for: Accounting for Poisson sampling needs dp-acc")
    assert DPFedAvg().guarantee(Exposure()).epsilon is not None  # no sampling: no library


def test_a_label_rounds_up() -> None:
    cases = {3.0: "3", 1.2341: "1.24", 0.0010001: "0.00101", 96.42: "96.5", 0.0: "0", 5421.0: "5.43e+03"}
    for epsilon, told in cases.items():
        assert str(Guarantee(epsilon, 1e-5)).startswith(f"({told}, 1e-05)-differential privacy")


def test_a_large_epsilon_is_called_vacuous() -> None:
    assert "vacuous" not in str(Guarantee(20.0, 1e-5))
    assert str(Guarantee(20.1, 1e-5)) == "(20.1, 1e-05)-differential privacy; vacuous in practice"


def test_a_requirement_that_is_not_met_takes_the_epsilon_away() -> None:
    whole: dict[str, Any] = {"noise_multiplier": 1.0, "releases": 1, "unit": "client", "model": "local"}
    whole |= {"covers": "the server", "neighbours": "any two data sets"}
    assert accounted(Exposure(), **whole).epsilon == pytest.approx(4.377, abs=1e-3)
    label = str(accounted(Exposure(), **whole, lacks=["the seed is shared", "biases carry no noise"]))
    assert label == "no formal guarantee (the seed is shared; biases carry no noise)"


def test_a_label_is_given_whole_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="lacks unit, covers, accountant, sampling, releases, neighbours"):
        Guarantee(1.0, 1e-5, model="central")
    with pytest.raises(ValueError, match="has a delta below 1; given 1.0, None"):
        Guarantee(1.0)


def test_the_reconstruction_bound_stands_beside_the_epsilon() -> None:
    found = LocalGaussian(1.0, 2.0).guarantee(Exposure(prior=1e-6))
    assert found.reconstruction is not None
    assert found.reconstruction[1] == pytest.approx(8.72e-5, rel=1e-2)
    told = "theory: a guess right with probability 1e-06 becomes a reconstruction right with at most 8.8e-05"
    assert told in str(found)
    amplified = DPFedAvg(1.0, 1.0).guarantee(SOME)
    assert amplified.reconstruction is not None
    assert 1e-6 < amplified.reconstruction[1] < 1e-2


def test_a_chain_prints_the_epsilon_of_its_last_member_only() -> None:
    assert gl.Chain(Defence(), LocalGaussian()).guarantee(Exposure()).epsilon is not None
    assert gl.Chain(LocalGaussian(), Clipping()).guarantee(Exposure()).epsilon is None


# --- bad settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Clipping(0.0), "norm must be above 0.0; given 0.0"),
        (lambda: Clipping(per="pixel"), "per must be 'update', 'layer' or 'example'; given 'pixel'"),
        (lambda: LocalGaussian(clip=1.0, sigma=0.1), "Give sigma alone, or clip and noise_multiplier"),
        (lambda: LocalGaussian(noise_multiplier=-1.0), "noise_multiplier must be at least 0.0; given -1.0"),
        (lambda: DPFedAvg(model="federal"), "model must be 'central' or 'distributed'; given 'federal'"),
        (lambda: DPFedAvg(threshold=3), "model='distributed' only"),
        (lambda: DPSGD(clip=math.nan), "clip must be above 0.0; given nan"),
        (lambda: Geyer(-1.0), "sigma must be at least 0.0; given -1.0"),
        (lambda: TIPBaseline(delta=2.0), "delta must lie between 0 and 1.*given 2.0"),
        (lambda: TIPBaseline(batches=0), "batches must be at least 1; given 0"),
        (lambda: Exposure(sampling="random"), "sampling must be 'all', 'fixed', 'poisson'; given 'random'"),
        (lambda: Exposure(participation=0.5), "With participation 0.5, say how the clients of a round are chosen"),
        (lambda: Exposure(rounds=0), "rounds must be at least 1; given 0"),
        (lambda: Exposure(delta=0.0), "delta must lie between 0 and 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
