"""Defences that mask, that noise what is important, or that change the data; and attackers that know them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy, interpolate

import gradleak as gl
from conftest import CLASSES, SHAPE, largest_difference, moment, perceptron, private, scene_of, tiny
from gradleak.attack import Composed
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.defences import AGP, PGD, TIP, MixUp, Pruning, Soteria, gradcam
from gradleak.defences.mixup import _log_gamma_variate, beta
from gradleak.defences.tip import filtered, mask, scale_of, spectral
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.predictions import Replay
from gradleak.parts.spaces import Pixels, Uniform
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState, LocalTraining, Order
from gradleak.scenario.defence import Defence
from gradleak.scenario.task import Batch, Task, TaskError

TRAINING = LocalTraining(lr=0.5)
DEFENCES: dict[str, Defence] = {
    "pruning": Pruning(keep=0.5),
    "pruning of the whole": Pruning(keep=0.3, per="update"),
    "pruning with residual": Pruning(keep=0.5, residual=True),
    "soteria": Soteria(),
    "tip": TIP(proportion=0.5),
    "tip as printed": TIP(center="real"),
    "agp": AGP(sigma=0.5, clip=0.3, layers="0"),
    "agp, other reading": AGP(sigma=0.5, clip=0.3, layers="0", reading="important"),
    "pgd": PGD(),
    "mixup": MixUp(),
}
RANDOM = [name for name, defence in DEFENCES.items() if isinstance(defence, TIP | AGP | MixUp)]
REPLAYED = [name for name in DEFENCES if name != "mixup"]
KEY = draws.key("client")


def run(
    defence: Defence | None,
    batch: Batch,
    training: LocalTraining = TRAINING,
    task: Task | None = None,
    order: Order | None = None,
) -> Params:
    task = task or tiny()
    upload, _ = training.run(task, task.weights(), batch, defence, ClientState(key=KEY), order)
    return upload.payload["update"]


def attacked(name: str, task: Task, seen: list[gl.Observation], truth: Batch, defence: Defence | None) -> Tensor:
    """The PSNR of every target."""
    engine = gl.Engine(device="cpu", precision="double")
    knows = gl.Knowledge(given={"y": truth["y"]}, training=TRAINING, defence=defence)
    found = gl.registry.parse("attack", name).run(task, seen, knows, engine=engine)
    return gl.metrics.compare(found, truth).psnr.flatten()


def targets(defence: Defence, count: int = 3, task: Task | None = None) -> tuple[list[gl.Observation], Batch]:
    batches = [private(1, seed=seed) for seed in range(count)]
    seen = [gl.observe(task or tiny(), b, TRAINING, defence, key=f"t{n}") for n, b in enumerate(batches)]
    return seen, {name: torch.stack([batch[name] for batch in batches]) for name in ("x", "y")}


# --- all of them ------------------------------------------------------------------------------------------------------


def test_the_table_holds_every_defence_of_these_files() -> None:
    files = {"agp", "mixup", "pgd", "pruning", "soteria", "tip"}
    entries = {entry.name: entry for entry in gl.registry.entries("defence")}
    assert files <= entries.keys()
    assert {entries[name].make for name in files} == {type(defence) for defence in DEFENCES.values()}
    assert all(entries[name].paper and entries[name].status == "unverified" for name in files)


@pytest.mark.parametrize(
    ("text", "defence"),
    [
        ("pruning:keep=0.01,per=update,residual=true", Pruning(0.01, "update", True)),
        ("soteria:rate=80", Soteria(rate=80)),
        ("tip:beta=0.02,center=real", TIP(beta=0.02, center="real")),
        ("agp:sigma=0.1,layers=body.3", AGP(sigma=0.1, layers="body.3")),
        ("pgd:epsilon=0.1,step=0.01", PGD(epsilon=0.1, step=0.01)),
        ("mixup:alpha=0.2", MixUp(0.2)),
    ],
)
def test_a_defence_can_be_spelled(text: str, defence: Defence) -> None:
    assert gl.registry.parse("defence", text) == defence


@pytest.mark.parametrize("name", DEFENCES)
def test_none_of_them_proves_anything(name: str) -> None:
    label = str(DEFENCES[name].guarantee(gl.Exposure(rounds=3, signal=0.25)))
    assert label.startswith("no formal guarantee (")
    if isinstance(DEFENCES[name], TIP):
        assert label == "no formal guarantee (heuristic noise, sigma=0.1, noise/signal=0.4)"
    if isinstance(DEFENCES[name], AGP):
        assert label == "no formal guarantee (heuristic noise, sigma=0.5, noise/signal=2)"


@pytest.mark.parametrize("norm", [None, "eval", "train"])
@pytest.mark.parametrize("recipe", [TRAINING, LocalTraining(lr=0.2, epochs=2, batch_size=2)], ids=["step", "epochs"])
@pytest.mark.parametrize("name", REPLAYED)
def test_what_the_adaptive_attacker_compares_is_exact_at_the_truth(
    name: str, recipe: LocalTraining, norm: str | None
) -> None:
    """With the client's order, and the noise of the client in place: its coordinates are not compared."""
    defence, task, batch = DEFENCES[name], tiny(norm=norm), private(4)
    order = recipe.order(4, torch.Generator().manual_seed(3))
    seen = gl.Observation(task.weights(), run(defence, batch, recipe, task, order), 4, buffers=task.buffers() or None)
    scene = scene_of(task, seen, gl.Knowledge(training=recipe, defence=defence))
    predict = Replay(order=order)
    at = lambda guess: float(SquaredError().distance(predict(guess, {}, scene, moment()), predict.target(scene)))  # noqa: E731
    assert at(batch) < 1e-24
    assert at({**batch, "x": private(4, seed=1)["x"]}) > 1e-9


@pytest.mark.parametrize("name", [name for name in REPLAYED if name != "pgd" and not name.startswith("agp")])
def test_so_is_what_the_half_informed_attacker_compares(name: str) -> None:
    """Where a plain prediction is right in all that it looks at: PGD moves the images, AGP clips."""
    defence, task, batch = DEFENCES[name], tiny(), private(4)
    seen = gl.Observation(task.weights(), run(defence, batch), 4)
    scene = scene_of(task, seen, gl.Knowledge(training=TRAINING, defence=gl.OnlyVisible(defence)))
    observed, predicted = Replay().target(scene), Replay()(batch, {}, scene, moment())
    assert tree.norm(observed) > 1e-3
    assert largest_difference(predicted, observed) < 1e-15


@pytest.mark.parametrize("name", RANDOM)
def test_noise_comes_from_the_client_alone(name: str) -> None:
    defence, task, batch = DEFENCES[name], tiny(), private(3)
    with pytest.raises(ValueError, match=f"{defence.name} draws random numbers"):
        TRAINING.run(task, task.weights(), batch, defence)
    other = ClientState(key=draws.key("another client"))
    upload, _ = TRAINING.run(task, task.weights(), batch, defence, other)
    assert largest_difference(upload.payload["update"], run(defence, batch)) > 1e-3
    assert largest_difference(run(defence, batch), run(defence, batch)) == 0


@pytest.mark.parametrize("name", DEFENCES)
def test_the_attackers_version_asks_for_no_random_numbers(name: str) -> None:
    task, seen = tiny(), gl.observe(tiny(), private(2), TRAINING, DEFENCES[name])
    scene = scene_of(task, seen, gl.Knowledge(training=TRAINING, defence=DEFENCES[name]))
    assumed = DEFENCES[name].assumed(scene, task)
    TRAINING.run(task, task.weights(), private(2, seed=5), assumed, ClientState(key=None))
    guess = private(2, seed=5)
    assert tree.finite(Replay()(guess, {}, scene, moment()))


@pytest.mark.parametrize("name", DEFENCES)
def test_clients_together_are_clients_alone(name: str) -> None:
    task, y = tiny(norm="eval"), private(4)["y"]
    x = torch.stack([private(4, seed=seed)["x"] for seed in range(3)])
    keys = torch.stack([draws.key("lane", number) for number in range(3)])
    # A hook that draws tells steps apart by their weights, whose last digits differ between one lane and many.
    training = LocalTraining(lr=0.3, steps=2)

    def one(x: Tensor, key: Tensor) -> Params:
        batch = {"x": x, "y": y}
        upload, _ = training.run(task, task.weights(), batch, DEFENCES[name], ClientState(key=key))
        return upload.payload["update"]

    together = vmap(one)(x, keys)
    for number in range(3):
        alone = one(x[number], keys[number])
        assert largest_difference({key: value[number] for key, value in together.items()}, alone) < 1e-14


@pytest.mark.parametrize("name", DEFENCES)
def test_lanes_together_are_lanes_alone(name: str, double: gl.Engine) -> None:
    """Two targets, attacked together by an attacker that reads each one's mask off its own observation."""
    seen, truth = targets(DEFENCES[name], 2)
    knows = gl.Knowledge(training=TRAINING, defence=DEFENCES[name], given={"y": truth["y"]})
    attack = gl.attacks.get("ig", steps=3)
    together = attack.run(tiny(), seen, knows, engine=double)
    for position, target in enumerate(seen):
        alone = attack.run(tiny(), target, replace(knows, given={"y": truth["y"][position]}), engine=double)
        assert largest_difference(together.batch["x"][position], alone.batch["x"][0]) < 1e-9


@pytest.mark.parametrize("name", DEFENCES)
def test_lanes_of_a_network_with_batch_normalisation_are_lanes_alone(name: str, double: gl.Engine) -> None:
    """In training mode, whose statistics are every lane's own; half and fully informed."""
    task, batches = tiny(norm="train"), [private(2, seed=seed) for seed in range(2)]
    seen = [gl.observe(task, b, TRAINING, DEFENCES[name], key=f"t{n}") for n, b in enumerate(batches)]
    attack = gl.attacks.get("ig", steps=2)
    for known in (DEFENCES[name], gl.OnlyVisible(DEFENCES[name])):
        knows = gl.Knowledge(training=TRAINING, defence=known, given={"y": batches[0]["y"]})
        together = attack.run(task, seen, knows, engine=double)
        alone = attack.run(task, seen[1], knows, engine=double)
        assert largest_difference(together.batch["x"][1], alone.batch["x"][0]) < 1e-9


@pytest.mark.parametrize(
    "nothing",
    [Pruning(keep=1.0), Soteria(rate=0), TIP(beta=0.0), AGP(sigma=0.0, clip=1e6, layers="0"), PGD(epsilon=0.0)],
    ids=lambda defence: defence.name,
)
def test_without_its_effect_a_defence_is_plain_training(nothing: Defence) -> None:
    batch = private(3)
    assert largest_difference(run(nothing, batch), run(None, batch)) < 1e-16


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pruning(keep=0),
        lambda: Pruning(per="tensor"),
        lambda: Soteria(rate=100),
        lambda: Soteria(offset=-1),
        lambda: TIP(beta=-0.1),
        lambda: TIP(proportion=0),
        lambda: TIP(center="middle"),
        lambda: AGP(clip=0),
        lambda: AGP(noised=1.5),
        lambda: AGP(reading="other"),
        lambda: PGD(epsilon=-1),
        lambda: MixUp(alpha=0),
    ],
)
def test_impossible_settings_are_refused_with_what_was_given(make: Any) -> None:
    with pytest.raises(ValueError, match="given"):
        make()


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.5, 0.9])
def test_the_wanted_share_of_every_layer_is_sent_and_it_is_the_largest(keep: float) -> None:
    batch = private(3)
    whole, sent = run(None, batch), run(Pruning(keep=keep), batch)
    for name, value in sent.items():
        kept = value != 0
        assert abs(int(kept.sum()) - keep * value.numel()) <= 1
        assert torch.equal(value[kept], whole[name][kept])
        if not kept.all():
            assert whole[name][~kept].abs().max() <= value[kept].abs().min()


def test_one_threshold_for_the_whole_update_empties_some_layers() -> None:
    batch = private(3)
    whole, sent = tree.flatten(run(None, batch)), tree.flatten(run(Pruning(keep=0.1, per="update"), batch))
    assert abs(int((sent != 0).sum()) - 0.1 * len(sent)) <= 1
    assert whole[sent == 0].abs().max() <= sent[sent != 0].abs().min()


@pytest.mark.parametrize("per", ["layer", "update"])
def test_what_was_not_sent_is_sent_later(per: str) -> None:
    """In every round: all that was sent, and what is still held back, is the sum of the updates."""
    task, defence = tiny(), Pruning(keep=0.2, per=per, residual=True)
    client, sent, moved = ClientState(), tree.zeros_like(task.weights()), tree.zeros_like(task.weights())
    for number in range(4):
        batch = private(2, seed=number)
        upload, client = TRAINING.run(task, task.weights(), batch, defence, client)
        sent, moved = tree.add(sent, upload.payload["update"]), tree.add(moved, run(None, batch))
        assert largest_difference(tree.add(sent, client.memory["unsent"]), moved) < 1e-15
    plain, _ = TRAINING.run(task, task.weights(), private(2), Pruning(keep=0.2, per=per), client)
    assert largest_difference(plain.payload["update"], run(Pruning(keep=0.2, per=per), private(2))) > 0


def test_without_residual_nothing_is_remembered() -> None:
    _, client = TRAINING.run(tiny(), tiny().weights(), private(2), Pruning())
    assert client.memory == {}


@pytest.mark.parametrize("per", ["layer", "update"])
def test_a_dropped_entry_says_that_it_was_small_and_no_more(per: str) -> None:
    task, defence, batch = tiny(), Pruning(keep=0.4, per=per), private(2)
    sent = run(defence, batch)
    scene = scene_of(task, gl.Observation(task.weights(), sent, 2))
    assumed = defence.assumed(scene, task)
    assert not any(value.any() for value in assumed.noise_variance(scene).values())
    least = {name: value[value != 0].abs().min() if value.any() else torch.tensor(0.0) for name, value in sent.items()}
    if per == "update":
        least = dict.fromkeys(sent, min(value for value in least.values() if value > 0))

    def passed(factor: float) -> Params:
        """What becomes of an update whose every entry is so many times the threshold."""
        update = {name: torch.full_like(value, -factor) * least[name] for name, value in sent.items()}
        return assumed.upload(gl.Upload({"update": update}, 2), None).payload["update"]

    for name, value in sent.items():
        assert torch.equal(passed(0.99)[name][value == 0], torch.zeros_like(value[value == 0]))
        beyond = passed(3.0)[name]
        assert largest_difference(beyond[value == 0], -2.0 * least[name].expand_as(beyond[value == 0])) < 1e-15
        assert largest_difference(beyond[value != 0], -3.0 * least[name].expand_as(beyond[value != 0])) < 1e-15


def test_a_layer_of_zeros_says_that_every_entry_was_zero() -> None:
    """Its largest entry would have been sent."""
    task, defence = tiny(), Pruning(keep=0.4)
    sent = {**run(defence, private(2)), "0.bias": torch.zeros(4).double()}
    assumed = defence.assumed(scene_of(task, gl.Observation(task.weights(), sent, 2)), task)
    guess = run(None, private(2))
    passed = assumed.upload(gl.Upload({"update": guess}, 2), None).payload["update"]
    assert torch.equal(passed["0.bias"], guess["0.bias"])


def test_with_residual_a_dropped_entry_says_nothing() -> None:
    task, defence = tiny(), Pruning(keep=0.4, residual=True)
    scene = scene_of(task, gl.Observation(task.weights(), run(defence, private(2)), 2))
    variance = tree.flatten(defence.assumed(scene, task).noise_variance(scene))
    assert torch.equal(variance.isinf(), tree.flatten(scene.update) == 0)
    assert not variance[~variance.isinf()].any()


@dataclass(frozen=True)
class Naive(Pruning):
    """An attacker that prunes the guess by the guess's own threshold."""

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        return self


@pytest.mark.parametrize("per", ["layer", "update"])
def test_behind_a_frozen_mask_every_target_is_recovered(per: str) -> None:
    defence = Pruning(keep=0.5, per=per)
    seen, truth = targets(defence, 4)
    assert attacked("second-order:certify=false", tiny(), seen, truth, defence).min() > 100
    assert attacked("second-order:certify=false", tiny(), seen, truth, gl.OnlyVisible(defence)).min() > 100
    assert attacked("second-order:certify=false", tiny(), seen, truth, None).max() < 30


def test_where_little_is_sent_the_guesss_own_mask_misleads() -> None:
    """Nine entries of 99: too few to determine sixteen pixels, enough to see the difference."""
    seen, truth = targets(Pruning(keep=0.1), 6)
    frozen, own = (
        attacked("second-order:certify=false", tiny(), seen, truth, known) for known in (Pruning(0.1), Naive(0.1))
    )
    assert float(frozen.mean()) > float(own.mean()) + 3


# --- Soteria ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1, 60, 80])
def test_soteria_cuts_whole_columns_of_exactly_one_tensor(rate: float) -> None:
    batch = private(3)
    whole, sent = run(None, batch), run(Soteria(rate=rate), batch)
    assert [name for name in whole if not torch.equal(whole[name], sent[name])] == ["3.weight"]
    same = sent["3.weight"] == whole["3.weight"]
    cut = (sent["3.weight"] == 0).all(0)
    assert torch.equal(same.all(0), ~cut)
    assert abs(int(cut.sum()) - rate / 100 * 16) <= 1


@pytest.mark.parametrize("offset", [0.1, 0.0])
def test_the_scores_of_features_are_those_of_one_derivative_after_the_other(offset: float) -> None:
    task, batch = tiny(), private(3)
    x = batch["x"].clone().requires_grad_()
    features = task.model[:3](x)
    expected = []
    for i in range(16):
        total = 0.0
        for row in range(3):
            [slope] = torch.autograd.grad(features[row, i], x, retain_graph=True)
            total += float(slope.norm() / (features[row, i].detach().abs() + offset))
        expected.append(total)
    found = Soteria(offset=offset).scores(task, task.weights(), batch)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    threshold = sorted(expected)[math.ceil(0.6 * 15)]
    cut = (run(Soteria(offset=offset), batch)["3.weight"] == 0).all(0)
    assert torch.equal(cut, torch.tensor(expected) < threshold)


def test_the_features_that_count_are_those_of_the_weights_that_were_sent() -> None:
    """And not of the weights after several, here very long, local steps."""
    task, batch, training = tiny(), private(2), LocalTraining(lr=20.0, steps=3)
    end = tree.subtract(task.weights(), run(None, batch, training))
    cut = (run(Soteria(), batch, training)["3.weight"] == 0).all(0)
    start, later = (Soteria().scores(task, weights, batch) for weights in (task.weights(), end))
    assert torch.equal(cut, start < start.sort().values[9])
    assert not torch.equal(cut, later < later.sort().values[9])


def test_a_dead_feature_has_a_score_even_without_offset() -> None:
    task, batch = tiny(), private(2)
    model = nn.Sequential(task.model[0], nn.ReLU(), *task.model[2:])
    model[0].bias.data.fill_(-100.0)
    dead = Task(model, task.objective, task.fields)
    assert Soteria(offset=0).scores(dead, dead.weights(), batch).tolist() == [0.0] * 16


def test_without_the_cut_layer_reconstruction_is_as_good_as_ever() -> None:
    seen, truth = targets(Soteria(rate=60))
    attack = "second-order:certify=false"
    assert attacked("idlg:steps=60", tiny(), seen, truth, None).max() < 30
    assert attacked(attack, tiny(), seen, truth, gl.OnlyVisible(Soteria())).min() > 100
    assert attacked(attack, tiny(), seen, truth, Soteria()).min() > 100


# --- TIP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "radius", "center", "passing"),
    [
        (3, 0.5, "int", 8),
        (5, 0.5, "int", 24),
        (7, 0.5, "int", 48),
        (1, 0.5, "int", 0),
        (3, 0.5, "real", 9),
        (5, 0.5, "real", 25),
        (1, 0.5, "real", 1),
        (3, 1.0, "int", 8),
        (3, 1.2, "int", 4),
        (3, math.sqrt(2), "int", 4),
        (3, 1.5, "int", 0),
    ],
)
def test_the_mask_passes_as_many_frequencies_as_computed_by_hand(
    side: int, radius: float, center: str, passing: int
) -> None:
    assert int(mask(side, side, radius, center).sum()) == passing


@pytest.mark.parametrize("size", [(3, 3), (5, 5), (2, 4), (1, 3)])
def test_the_noise_is_white_noise_minus_its_mean(size: tuple[int, int]) -> None:
    noise = Draws(draws.key("noise")).normal((6, 2, *size), dtype=torch.float64)
    assert largest_difference(spectral(noise), noise - noise.mean((-2, -1), keepdim=True)) < 1e-12
    if size[0] % 2 and size[1] % 2:
        assert largest_difference(spectral(noise, center="real"), noise) < 1e-12


@pytest.mark.parametrize("center", ["int", "real"])
@pytest.mark.parametrize("radius", [0.5, 1.0, 1.2, math.sqrt(2), 5.0])
@pytest.mark.parametrize("size", [(3, 3), (1, 1), (5, 5), (4, 4), (2, 3)])
def test_where_the_filter_needs_no_transform_it_is_the_same(size: tuple[int, int], radius: float, center: str) -> None:
    noise = Draws(draws.key("noise")).normal((6, 2, *size), dtype=torch.float64)
    assert largest_difference(filtered(noise, radius, center), spectral(noise, radius, center)) < 1e-12


@pytest.mark.parametrize("radius", [0.5, 1.2])
def test_the_filter_is_an_orthogonal_projection(radius: float) -> None:
    noise = Draws(draws.key("noise")).normal((6, 2, 3, 3), dtype=torch.float64)
    once = filtered(noise, radius)
    assert largest_difference(filtered(once, radius), once) < 1e-12
    assert abs(float((once * (noise - once)).sum())) < 1e-12


def deep(activation: type[nn.Module] = nn.Sigmoid) -> Task:
    """Convolutions of 3 x 3, 1 x 1 and 3 x 3, ten channels each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 10, 3), activation(), nn.Conv2d(10, 10, 1), activation(), nn.Conv2d(10, 10, 2)]
        model = nn.Sequential(*layers, activation(), nn.Flatten(), nn.Linear(10, CLASSES)).double()
    return Task.supervised(model, cross_entropy, like=(torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long)))


def noised_channels(task: Task, defence: Defence, batch: Batch) -> dict[str, Tensor]:
    difference = tree.subtract(run(defence, batch, task=task), run(None, batch, task=task))
    return {name: value.flatten(1).any(1) if value.dim() > 1 else value != 0 for name, value in difference.items()}


@pytest.mark.parametrize(("center", "touched"), [("int", 0), ("real", 2)])
def test_tip_noises_the_top_channels_of_convolutions_and_nothing_else(center: str, touched: int) -> None:
    """1 x 1 kernels are only their mean: untouched around it, noised by the printed formula."""
    found = noised_channels(deep(), TIP(proportion=0.2, center=center), private(3))
    counts = {name: int(channels.sum()) for name, channels in found.items()}
    assert counts == {"0.weight": 2, "2.weight": touched, "4.weight": 2} | dict.fromkeys(
        ("0.bias", "2.bias", "4.bias", "7.weight", "7.bias"), 0
    )


def test_at_least_one_channel_is_noised() -> None:
    assert [TIP(proportion=0.1).count(channels) for channels in (4, 10, 12, 30, 64)] == [1, 1, 1, 3, 6]


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_the_noise_is_beta_times_the_clients_own_in_the_most_important_channels(absolute: bool, single: bool) -> None:
    task, batch, source = deep(), private(3), Draws(KEY)
    defence = TIP(beta=0.3, proportion=0.2, absolute=absolute, repo_single_guidance=single)
    plain = run(None, batch, task=task)
    chosen = gradcam.guidance(batch, source, single=single)
    assert chosen.sum() == (1 if single else 3)
    end = tree.subtract(task.weights(), plain)  # importance is that of the trained weights
    importance = gradcam.channel_importance(task, end, batch, chosen, absolute=absolute)
    added = tree.subtract(plain, run(defence, batch, task=task))  # to the weights: start minus update
    for stream, layer in enumerate(["0", "2", "4"], start=1):
        kernels = added[f"{layer}.weight"]
        noise = source.normal(tuple(kernels.shape), stream=stream, dtype=torch.float64)
        top = importance[layer].argsort(descending=True)[:2]
        expected = torch.zeros_like(kernels)
        expected[top] = 0.3 * (noise - noise.mean((-2, -1), keepdim=True))[top]
        assert largest_difference(kernels, expected) < 1e-12


def test_the_authors_scales() -> None:
    assert scale_of(1, steps=4, lr=1e-3) == pytest.approx(0.0969, abs=5e-5)
    assert scale_of(1, steps=4, lr=1e-3, layers=17) == pytest.approx(0.0057, abs=5e-5)
    assert scale_of(5, steps=4, lr=1e-3, layers=17) == pytest.approx(0.00114, abs=5e-6)
    assert scale_of(5, steps=4, lr=1e-3) == pytest.approx(AGP().sigma, abs=5e-7)
    assert scale_of(5, steps=32, lr=1e-3, batch_size=32) == pytest.approx(0.0048448, abs=5e-8)
    with pytest.raises(ValueError, match="given 0"):
        scale_of(0, steps=1, lr=1.0)


def test_the_noise_is_not_small_beside_the_weights() -> None:
    """64 to 512 channels of 3 x 3, He initialisation: 1.6 to 4.6 standard deviations at the authors' scale."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(width, width, 3, bias=False) for width in (64, 512)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight)
    task = Task(nn.Sequential(*layers), lambda call, batch: call(batch["x"]).sum(), {})
    ratios = TIP(beta=0.0969).ratios(task)
    assert list(ratios.values()) == pytest.approx([1.64, 4.65], abs=0.02)


@pytest.mark.parametrize("center", ["int", "real"])
def test_noised_channels_are_found_in_the_observation_and_their_means_are_exact(center: str) -> None:
    task, batch, defence = deep(), private(1), TIP(beta=1.0, proportion=0.2, center=center)
    sent = run(defence, batch, task=task)
    scene = scene_of(task, gl.Observation(task.weights(), sent, 1))
    variance, truth = defence.noise_variance(scene), noised_channels(task, defence, batch)
    for name, value in variance.items():
        channels = truth[name].reshape(-1, *[1] * (value.dim() - 1)).expand_as(value)
        assert torch.equal(value, torch.where(channels, torch.inf, 0.0).to(value)), name
    adaptive = defence.assumed(scene, task)
    kept = adaptive.visible(sent, scene)
    plain = run(None, batch, task=task)
    expected = plain["0.weight"].clone()
    means = expected.mean((-2, -1), keepdim=True).expand_as(expected) * (center == "int")
    expected[truth["0.weight"]] = means[truth["0.weight"]]
    assert largest_difference(kept["0.weight"], expected) < 1e-12
    assert largest_difference(adaptive.visible(plain, scene), kept) < 1e-12  # the observation and the truth alike


def test_what_is_compared_is_linear_in_the_update() -> None:
    task, defence = deep(), TIP(beta=1.0, proportion=0.2)
    scene = scene_of(task, gl.Observation(task.weights(), run(defence, private(1), task=task), 1))
    adaptive = defence.assumed(scene, task)
    one, two = (run(None, private(1, seed=seed), task=task) for seed in (3, 4))
    both = adaptive.visible(tree.add(one, two, 2.0), scene)
    apart = tree.add(adaptive.visible(one, scene), adaptive.visible(two, scene), 2.0)
    assert largest_difference(both, apart) < 1e-14


def tip_on_lenet(side: int, steps: int, beta: float, seed: int) -> dict[str, float]:
    """PSNR of LeNet's update with 1 of 12 channels noised: L-BFGS on the cosine, as in the specification."""
    generator = torch.Generator().manual_seed(seed)
    model = gl.models.lenet_zhu(shape=(3, side, side), generator=generator).double()
    coarse = Draws(draws.key("image")).uniform((1, 3, 4, 4), dtype=torch.float64)
    batch = {"x": interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1), "y": torch.tensor([3])}
    task = Task.supervised(model, cross_entropy, like=(batch["x"], batch["y"]))
    training, defence = LocalTraining(lr=1e-3), TIP(beta=beta)
    stage = Stage(Pixels(Uniform()), Replay(), Cosine(), (), LBFGS(steps=steps))
    attack = Composed("cosine", (stage,), Labels(label_rule("auto")))
    plain, seen = (gl.observe(task, batch, training, known) for known in (None, defence))
    scores = {}
    for level, target, known in (
        ("undefended", plain, None),
        ("A0", seen, None),
        ("A1", seen, gl.OnlyVisible(defence)),
        ("A2", seen, defence),
    ):
        knows = gl.Knowledge(given={"y": batch["y"]}, training=training, defence=known)
        found = attack.run(task, target, knows, engine=gl.Engine(device="cpu", precision="double"))
        scores[level] = float(gl.metrics.compare(found, batch).psnr)
    return scores


def test_an_attacker_that_drops_noised_channels_does_not_notice_tip() -> None:
    scores = tip_on_lenet(8, 60, 0.1, 3)
    assert scores["undefended"] > 25
    assert scores["A0"] < 8
    assert min(scores["A1"], scores["A2"]) >= 0.85 * scores["undefended"]


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.1, 0.0057])
@pytest.mark.parametrize("seed", [2, 3])
def test_nor_at_full_size(seed: int, beta: float) -> None:
    scores = tip_on_lenet(32, 800, beta, seed)
    assert scores["undefended"] > 20
    assert scores["A0"] < 8
    assert min(scores["A1"], scores["A2"]) >= 0.85 * scores["undefended"]


def test_tip_needs_convolutions() -> None:
    with pytest.raises(TaskError, match=r"no trained nn\.Conv2d"):
        run(TIP(), private(1), task=perceptron())


# --- AGP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("absolute", "single"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("reading", "noised"), [("noised", 2), ("important", 8)])
def test_agp_noises_everything_but_channels_of_its_target_layers(
    reading: str, noised: int, absolute: bool, single: bool
) -> None:
    task, batch = deep(), private(3)
    defence = AGP(0.2, 100, layers="4", reading=reading, absolute=absolute, repo_single_guidance=single)
    found = noised_channels(task, defence, batch)
    assert {name: int(channels.sum()) for name, channels in found.items() if not channels.all()} == {
        "4.weight": noised,
        "4.bias": noised,
    }
    end = tree.subtract(task.weights(), run(None, batch, task=task))
    chosen = gradcam.guidance(batch, Draws(KEY), single=single)
    least = gradcam.channel_importance(task, end, batch, chosen, absolute=absolute)["4"].argsort()[:noised]
    assert found["4.weight"].nonzero().flatten().tolist() == sorted(least.tolist())


def test_agp_clips_the_gradient_of_every_batch() -> None:
    batch = private(3)
    norm = tree.norm(run(None, batch)) / TRAINING.lr
    clipped = run(AGP(sigma=0, clip=float(norm) / 4, layers="0"), batch)
    assert largest_difference(clipped, tree.scale(run(None, batch), 0.25)) < 1e-15


def test_the_noise_of_agp_has_its_standard_deviation() -> None:
    task, batch = deep(), private(2)
    defence = AGP(sigma=0.2, clip=100, layers="0")
    noise = tree.flatten(tree.subtract(run(defence, batch, task=task), run(None, batch, task=task)))
    noise = noise[noise != 0]
    assert len(noise) > 400
    assert float(noise.std()) == pytest.approx(0.2, rel=0.1)


def test_target_layers_are_found_by_the_end_of_their_name_or_a_pattern() -> None:
    model = gl.models.resnet((1, 1), 8, shape=(1, 8, 8), classes=CLASSES, generator=torch.Generator().manual_seed(0))
    like = (torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
    task = Task.supervised(model, cross_entropy, like=like)
    last = ["features.3.body.3", "features.4.body.3"]
    assert AGP(layers="body.3").targets(task) == AGP(layers="*.body.3").targets(task) == last
    with pytest.raises(TaskError, match=r"no convolution named 'conv2'.*features\.3\.body\.3"):
        AGP().targets(task)


@pytest.mark.parametrize("reading", ["noised", "important"])
def test_exact_channels_are_enough_to_recover_the_image(reading: str) -> None:
    """With noise well above the update, which shows where it is."""
    defence = AGP(sigma=0.2, noised=0.5, layers="0", reading=reading)
    seen, truth = targets(defence)
    assert attacked("second-order:certify=false", tiny(), seen, truth, defence).min() > 100
    assert attacked("idlg:steps=60", tiny(), seen, truth, None).max() < 20


def test_where_no_channel_is_exact_the_noise_is_weighed_and_not_dropped() -> None:
    task, defence = tiny(), AGP(sigma=0.2, noised=1.0, layers="0")
    scene = scene_of(task, gl.Observation(task.weights(), run(defence, private(1)), 1))
    assert torch.allclose(tree.flatten(defence.noise_variance(scene)), torch.tensor(0.04).double())


@pytest.mark.parametrize(("share", "sure"), [(0.9, True), (1.1, False)])
def test_channels_are_taken_for_exact_only_where_noise_alone_would_have_more_energy(share: float, sure: bool) -> None:
    """Else all coordinates count as noised: a wrong guess drops exact channels and fits the noise of others."""
    defence = AGP(sigma=0.2, noised=0.25, layers="0")
    least = 0.2 * chi2.ppf(1e-3, 9) ** 0.5  # noise of nine entries is shorter once in a thousand times
    update = tree.map(torch.ones_like, tiny().weights())
    update["0.weight"] = torch.full((4, 1, 3, 3), share * least / 3, dtype=torch.float64)
    update["0.weight"][2] = 1.0
    variance = defence.noise_variance(scene_of(tiny(), gl.Observation(tiny().weights(), update, 1)))
    exact = torch.tensor([sure, sure, False, sure])
    assert torch.equal(variance["0.bias"] == 0, exact)
    assert torch.equal(variance["0.weight"] == 0, exact[:, None, None, None].expand(4, 1, 3, 3))
    left = torch.cat([variance["0.bias"][~exact], tree.flatten({n: v for n, v in variance.items() if n[0] != "0"})])
    assert bool((left == torch.inf).all()) if sure else torch.allclose(left, torch.tensor(0.04).double())


def test_one_sure_layer_is_enough_and_the_other_is_dropped() -> None:
    task, defence = deep(), AGP(sigma=0.2, layers="[04]")
    update = tree.map(torch.ones_like, task.weights())
    update["4.weight"][:8] = 0.01
    variance = defence.noise_variance(scene_of(task, gl.Observation(task.weights(), update, 1)))
    assert {name for name, value in variance.items() if bool((value == 0).any())} == {"4.weight", "4.bias"}
    assert bool((variance["4.weight"][:8] == 0).all())
    assert bool((variance["0.weight"] == torch.inf).all())


def test_below_the_update_noise_is_weighed_and_an_informed_attacker_is_no_weaker() -> None:
    """The energy of the observed channels does not show which are noised: who trusts it stays below 20 dB here."""
    defence = AGP(sigma=3e-4, noised=0.5, layers="0", clip=0.3)
    seen, truth = targets(defence)
    informed, naive = (attacked("second-order:certify=false", tiny(), seen, truth, d) for d in (defence, None))
    assert informed.min() > 28
    assert naive.max() < 10  # it does not replay the clipping


# --- PGD --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.45, 0.25)])
@pytest.mark.parametrize("epsilon", [4 / 255, 0.2])
def test_adversarial_images_stay_in_their_box_and_in_the_valid_range(epsilon: float, mean: float, std: float) -> None:
    task, batch = tiny(mean=mean, std=std), private(3)
    field = task.fields["x"]
    batch = {**batch, "x": field.model(batch["x"])}
    worst = PGD(epsilon=epsilon).worst(task, task.weights(), batch)
    moved = field.unit(worst["x"]) - field.unit(batch["x"])
    assert float(moved.abs().max()) <= epsilon + 1e-12
    assert float(moved.abs().max()) > 0.9 * epsilon  # 3 steps of 2/3 epsilon reach the wall
    assert -1e-12 <= float(field.unit(worst["x"]).min()) <= float(field.unit(worst["x"]).max()) <= 1 + 1e-12
    loss = lambda on: float(task.loss(task.weights(), on)[0])  # noqa: E731
    assert loss(worst) > loss(batch)
    assert torch.equal(worst["y"], batch["y"])


def test_one_step_is_the_sign_of_the_slope() -> None:
    task, batch = tiny(), private(2)
    x = batch["x"].clone().requires_grad_()
    [slope] = torch.autograd.grad(cross_entropy(task.model(x), batch["y"]), x)
    expected = (batch["x"] + 0.01 * slope.sign()).clamp(0, 1)
    found = PGD(epsilon=0.5, step=0.01, steps=1).worst(task, task.weights(), batch)["x"]
    assert largest_difference(found, expected) < 1e-15


def test_a_step_is_two_thirds_of_the_box_unless_given() -> None:
    batch = {**private(2), "x": 0.3 + 0.4 * private(2)["x"]}  # far from 0 and 1
    moved = PGD(epsilon=0.06, steps=1).worst(tiny(), tiny().weights(), batch)["x"] - batch["x"]
    assert moved.abs().flatten().tolist() == pytest.approx([0.04] * 32)


def test_what_is_sent_is_the_gradient_of_the_moved_images() -> None:
    task, batch, defence = tiny(), private(2), PGD()
    expected = task.gradient(task.weights(), defence.worst(task, task.weights(), batch))
    assert largest_difference(run(defence, batch), tree.scale(expected, TRAINING.lr)) < 1e-16


def test_unrolled_pgd_gives_the_images_and_ignored_pgd_the_moved_ones() -> None:
    seen, truth = targets(PGD())
    attack = "second-order:certify=false"
    assert attacked(attack, tiny(), seen, truth, PGD()).min() > 100
    ignored = attacked(attack, tiny(), seen, truth, None)
    assert ignored.min() >= 36.08  # 20 log10(255 / 4) = 36.09, less what the search leaves
    assert ignored.max() < 40


# --- MixUp ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    keys = torch.stack([draws.key("beta", number) for number in range(4000)])
    shares = vmap(lambda key: beta(alpha, Draws(key)))(keys)
    assert bool(((shares >= 0) & (shares <= 1)).all())
    law = torch.distributions.Beta(torch.tensor(alpha).double(), torch.tensor(alpha).double())
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(shares.var()) == pytest.approx(float(law.variance), rel=0.08)
    kurtosis = (shares - 0.5).pow(4).mean() / shares.var().square()
    assert float(kurtosis) == pytest.approx(3 - 6 / (2 * alpha + 3), rel=0.1)


@pytest.mark.parametrize("shape", [0.2, 1.0, 4.0])
def test_the_variates_behind_the_shares_follow_the_gamma_distribution(shape: float) -> None:
    """Of its logarithm, which small shapes need: mean psi(a), variance psi'(a)."""
    keys = torch.stack([draws.key("gamma", number) for number in range(4000)])
    logs = vmap(lambda key: _log_gamma_variate(shape, Draws(key), 1))(keys)
    mean, variance = (float(torch.polygamma(order, torch.tensor(shape).double())) for order in (0, 1))
    assert float(logs.mean()) == pytest.approx(mean, abs=4 * (variance / 4000) ** 0.5)
    assert float(logs.var()) == pytest.approx(variance, rel=0.12)


def test_images_and_labels_are_mixed_alike() -> None:
    task, batch = tiny(), private(3)  # classes 0, 1, 2: the labels tell who was mixed, and how
    mixed = MixUp().mixed(batch, task, Draws(draws.key("three", 1)))
    assert mixed["y"].shape == (3, CLASSES)
    assert largest_difference(mixed["y"].sum(1), torch.ones(3).double()) < 1e-15
    expected = (mixed["y"] @ batch["x"].flatten(1)).reshape(mixed["x"].shape)
    assert largest_difference(mixed["x"], expected) < 1e-15
    assert largest_difference(mixed["x"], batch["x"]) > 1e-3


def test_one_example_is_mixed_with_itself() -> None:
    assert largest_difference(run(MixUp(), private(1)), run(None, private(1))) < 1e-15


def test_every_step_mixes_anew() -> None:
    class Recorded(MixUp):
        def mixed(self, batch: Batch, task: Task, draws: Draws) -> Batch:
            taken.append(super().mixed(batch, task, draws)["y"])
            return super().mixed(batch, task, draws)

    taken: list[Tensor] = []
    run(Recorded(), private(3), LocalTraining(lr=0.1, steps=3))
    assert len(taken) == 3
    assert min(largest_difference(taken[i], taken[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-4


def test_the_attacker_of_mixup_finds_the_mixture() -> None:
    """The match is zero at the mixed images with their mixed labels, and not at the client's own."""
    task, batch, defence = tiny(), private(5), MixUp()
    seen = gl.Observation(task.weights(), run(defence, batch), 5)
    scene = scene_of(task, seen, gl.Knowledge(training=TRAINING, defence=defence))
    at = lambda guess: float(SquaredError().distance(Replay()(guess, {}, scene, moment()), seen.update))  # noqa: E731
    assert at(defence.mixed(batch, task, Draws(KEY).child(1 << 17))) < 1e-28
    assert at(batch) > 1e-6
