"""The client rule: one step is the gradient, many steps are torch's, and all of it can be differentiated."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from conftest import largest_difference, private, tiny
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.dropout import Dropping
from gradleak.scenario.rules import SGD, Adam, cosine_decay
from gradleak.scenario.task import Batch


def trained_by_torch(
    model: nn.Module, batch: Batch, optimiser: torch.optim.Optimizer, order: list[Tensor | None]
) -> dict[str, Tensor]:
    """The loop everybody writes; returns weights and buffers afterwards."""
    for rows in order:
        part = batch if rows is None else {name: value[rows] for name, value in batch.items()}
        optimiser.zero_grad()
        F.cross_entropy(model(part["x"]), part["y"]).backward()
        optimiser.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [5]),
        ({"steps": 3}, [5, 5, 5]),
        ({"steps": 4, "batch_size": 2}, [2, 2, 1, 2]),
        ({"epochs": 2}, [5, 5]),
        ({"epochs": 2, "batch_size": 2}, [2, 2, 1, 2, 2, 1]),
        ({"epochs": 1, "batch_size": 9}, [5]),
    ],
)
def test_steps_and_epochs_fix_the_rows_of_each_step(settings: dict, sizes: list[int]) -> None:
    training = LocalTraining(lr=1.0, **settings)
    assert [5 if rows is None else len(torch.arange(5)[rows]) for rows in training.order(5)] == sizes
    assert training.passes(5) == -(-sum(sizes) // 5)


def test_every_epoch_sees_every_example_in_a_new_order() -> None:
    plan = LocalTraining(lr=1.0, epochs=2, batch_size=4).order(12, torch.Generator().manual_seed(0))
    first, second = torch.cat(plan[:3]), torch.cat(plan[3:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(12))
    assert first.tolist() != second.tolist()


def test_without_a_generator_the_order_stands() -> None:
    plan = LocalTraining(lr=1.0, epochs=1, batch_size=2).order(5)
    assert torch.cat([torch.arange(5)[rows] for rows in plan]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": 1.0, "steps": 1, "epochs": 1}, "not both"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": 1.0, "batch_size": 2}, "batch_size needs steps or epochs"),
        ({"lr": -1.0}, "lr must be positive"),
        ({"lr": 1.0, "steps": 0}, "steps must be at least 1"),
        ({"lr": 1.0, "batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_impossible_recipes_are_refused(settings: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LocalTraining(**settings)


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [1.0, 0.03])
@pytest.mark.parametrize("norm", [None, "eval", "train"])
def test_one_replayed_step_is_lr_times_the_gradient(lr: float, norm: str | None) -> None:
    task, batch = tiny(norm=norm), private(3)
    upload, _ = LocalTraining(lr=lr).run(task, task.weights(), batch)
    expected = tree.scale(task.gradient(task.weights(), batch), lr)
    assert largest_difference(upload.payload["update"], expected) < 1e-16
    assert upload.num_examples == 3


@pytest.mark.parametrize("norm", [None, "train"])
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(momentum=0.9, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01)),
        (Adam(eps=1e-4), lambda p: torch.optim.Adam(p, 0.1, eps=1e-4)),
    ],
    ids=["sgd", "adam"],
)
def test_local_epochs_are_those_of_a_torch_loop(norm: str | None, rule: object, make: object) -> None:
    """Weights, running statistics and the order of the mini-batches."""
    task, batch = tiny(norm=norm), private(4)
    training = LocalTraining(lr=0.1, epochs=2, batch_size=2, optimiser=rule)
    order = training.order(4, torch.Generator().manual_seed(3))
    upload, state = training.run(task, task.weights(), batch, order=order)

    model = copy.deepcopy(task.model)
    theirs = trained_by_torch(model, batch, make(list(model.parameters())), order)
    ours = {**tree.subtract(task.weights(), upload.payload["update"]), **state.buffers}
    assert (
        largest_difference({name: value.double() for name, value in ours.items()}, tree.to(theirs, None, None)) < 1e-10
    )


def test_two_rounds_with_kept_state_are_one_round_of_two_steps() -> None:
    task, batch = tiny(norm="train"), private(3)
    rule = SGD(momentum=0.9)
    both, _ = LocalTraining(lr=0.1, steps=2, optimiser=rule).run(task, task.weights(), batch)
    once = LocalTraining(lr=0.1, optimiser=rule)
    first, client = once.run(task, task.weights(), batch)
    weights = tree.subtract(task.weights(), first.payload["update"])
    second, _ = once.run(task, weights, batch, client=client)
    summed = tree.add(first.payload["update"], second.payload["update"])
    assert largest_difference(both.payload["update"], summed) < 1e-15


def test_the_schedule_multiplies_the_rate() -> None:
    task, batch = tiny(), private(2)
    weights = task.weights()
    upload, _ = LocalTraining(lr=0.2, steps=2, schedule=cosine_decay).run(task, weights, batch)
    first = tree.scale(task.gradient(weights, batch), 0.2)
    second = tree.scale(task.gradient(tree.subtract(weights, first), batch), 0.1)
    assert largest_difference(upload.payload["update"], tree.add(first, second)) < 1e-15


def test_training_mode_statistics_are_threaded_through_every_step() -> None:
    task, batch = tiny(norm="train"), private(3)
    upload, _ = LocalTraining(lr=0.1, steps=3).run(task, task.weights(), batch)
    assert upload.buffers["1.num_batches_tracked"] == task.buffers()["1.num_batches_tracked"] + 3


def test_running_touches_nothing_it_was_given() -> None:
    task, batch = tiny(norm="train"), private(3)
    weights = task.weights()
    held = tree.detach({"batch": batch, "weights": weights, "model": dict(task.model.state_dict())})
    LocalTraining(lr=0.1, steps=2, optimiser=Adam()).run(task, weights, batch)
    assert largest_difference({"batch": batch, "weights": weights, "model": dict(task.model.state_dict())}, held) == 0


def test_three_adam_steps_have_the_derivative_of_finite_differences() -> None:
    """By the images, through the moments and the changing weights."""
    task, batch = tiny(), private(2)
    training = LocalTraining(lr=0.05, steps=3, optimiser=Adam(eps=1e-3))
    weights = task.weights()
    direction = Draws(draws.key("direction"))
    mask = tree.map(lambda w: direction.normal(tuple(w.shape), dtype=w.dtype), weights)

    def moved(x: Tensor) -> Tensor:
        upload, _ = training.run(task, weights, {**batch, "x": x})
        return tree.dot(mask, upload.payload["update"])

    slope = torch.func.grad(moved)(batch["x"])
    nudge = direction.normal(tuple(batch["x"].shape), stream=1, dtype=torch.float64)
    step = 1e-5
    difference = (moved(batch["x"] + step * nudge) - moved(batch["x"] - step * nudge)) / (2 * step)
    assert float((slope * nudge).sum()) == pytest.approx(float(difference), rel=1e-6)
    assert torch.autograd.gradcheck(moved, batch["x"].clone().requires_grad_(), eps=1e-5, atol=1e-6)


# --- augmentation -----------------------------------------------------------------------------------------------------


def shifted(batch: Batch, source: Draws, step: int) -> Batch:
    return {**batch, "x": batch["x"] + source.normal(tuple(batch["x"].shape), step=step, dtype=batch["x"].dtype)}


def test_augmentation_draws_from_the_clients_own_key() -> None:
    task, batch = tiny(), private(2)
    training = LocalTraining(lr=0.1, steps=2, augmentation=shifted)
    first, again, other = (
        training.run(task, task.weights(), batch, client=ClientState(key=draws.key(name)))[0].payload["update"]
        for name in ("a", "a", "b")
    )
    assert largest_difference(first, again) == 0
    assert largest_difference(first, other) > 1e-4
    with pytest.raises(ValueError, match=r"augmentation draws.*ClientState\(key="):
        training.run(task, task.weights(), batch)


def test_augmentation_and_defence_never_draw_the_same_numbers() -> None:
    drawn: list[Tensor] = []

    def note(batch: Batch, source: Draws, step: int) -> Batch:
        drawn.append(source.normal((50,)))
        return batch

    class Noise(gl.Defence):
        def upload(self, upload: gl.Upload, client: object) -> gl.Upload:
            drawn.append(client.draws.normal((50,)))
            return upload

    task, key = tiny(), draws.key("client")
    training = LocalTraining(lr=0.1, augmentation=note)
    for defence in (Noise(), gl.Chain(Noise(), gl.Defence())):
        training.run(task, task.weights(), private(2), defence, ClientState(key=key))
    correlation = torch.corrcoef(torch.stack([drawn[0], drawn[1], drawn[3]])) - torch.eye(3)
    assert correlation.abs().max() < 0.6


# --- observe ----------------------------------------------------------------------------------------------------------


def test_an_observation_is_what_the_server_can_subtract() -> None:
    task, batch = tiny(), private(3)
    seen = gl.observe(task, batch, LocalTraining(lr=0.5), key="me")
    assert largest_difference(seen.weights, task.weights()) == 0
    assert largest_difference(seen.update, tree.scale(task.gradient(task.weights(), batch), 0.5)) < 1e-16
    assert (seen.num_examples, seen.key, seen.buffers) == (3, "me", None)


def test_training_mode_returns_changed_statistics_and_evaluation_mode_does_not() -> None:
    live, still = (gl.observe(tiny(norm=norm), private(3), LocalTraining(lr=0.5)) for norm in ("train", "eval"))
    assert largest_difference(live.buffers["1.running_mean"], live.returned_buffers["1.running_mean"]) > 1e-3
    assert largest_difference(still.buffers, still.returned_buffers) == 0


@pytest.mark.parametrize("lr", [1.0, 1e-3])
def test_returned_float32_weights_lose_the_digits_that_they_cannot_hold(lr: float) -> None:
    task, batch = tiny(dtype=torch.float32), private(2, dtype=torch.float32)
    exact = gl.observe(task, batch, LocalTraining(lr=lr))
    wire = gl.observe(task, batch, LocalTraining(lr=lr), wire="weights")
    returned = tree.subtract(exact.weights, exact.update)
    assert largest_difference(wire.update, tree.subtract(exact.weights, returned)) == 0
    lost = largest_difference(wire.update, exact.update)
    assert 0 < lost < torch.finfo(torch.float32).eps
    with pytest.raises(ValueError, match="wire must be"):
        gl.observe(task, batch, LocalTraining(lr=lr), wire="pigeon")


def test_the_shuffle_belongs_to_key_and_seed() -> None:
    task, batch, training = tiny(), private(6), LocalTraining(lr=0.5, epochs=1, batch_size=2)
    first, again = (gl.observe(task, batch, training, key="a").update for _ in range(2))
    others = [
        gl.observe(task, batch, training, key="b").update,
        gl.observe(task, batch, training, key="a", seed=1).update,
    ]
    assert largest_difference(first, again) == 0
    assert all(largest_difference(first, other) > 1e-6 for other in others)


def test_other_weights_can_be_sent() -> None:
    task = tiny()
    sent = tree.scale(task.weights(), 0.5)
    seen = gl.observe(task, private(2), LocalTraining(lr=1.0), weights=sent)
    assert largest_difference(seen.update, task.gradient(sent, private(2))) < 1e-16


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropping(layer: nn.Module) -> gl.Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten(), nn.Linear(144, 3))
    like = (torch.zeros(1, 1, 8, 8).double(), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model.double().eval(), F.cross_entropy, like=like)


def pictures(examples: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    return {
        "x": torch.rand(examples, 1, 8, 8, generator=source, dtype=torch.float64),
        "y": torch.arange(examples) % 3,
    }


def test_dropout_masks_belong_to_the_client_and_to_the_pass() -> None:
    task, batch = dropping(nn.Dropout(0.5)), pictures(2)
    plain, dropped = LocalTraining(lr=0.1, steps=2), LocalTraining(lr=0.1, steps=2, dropout=True)
    first, again = (gl.observe(task, batch, dropped, key="a").update for _ in range(2))
    other, none = gl.observe(task, batch, dropped, key="b").update, gl.observe(task, batch, plain, key="a").update
    assert largest_difference(first, again) == 0
    assert largest_difference(first, other) > 1e-4
    assert largest_difference(first, none) > 1e-4
    # Two steps of one and the same mask would give twice the first; each pass has its own.
    once = gl.observe(task, batch, LocalTraining(lr=1e-9, dropout=True), key="a").update
    twice = gl.observe(task, batch, LocalTraining(lr=1e-9, steps=2, dropout=True), key="a").update
    assert largest_difference(twice, tree.scale(once, 2.0)) > 1e-2 * float(tree.norm(once))
    with pytest.raises(ValueError, match="dropout draws"):
        dropped.run(task, task.weights(), batch)


def test_dropout_keeps_the_right_share_and_the_mean() -> None:
    source = draws.Draws(draws.key("mask"))
    ones = torch.ones(64, 8, 6, 6)
    with Dropping(source):
        entries, channels = F.dropout(ones, 0.3), F.dropout2d(ones, 0.3)
        gone = F.dropout(ones, 1.0)
    for shown in (entries, channels):
        assert shown.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert (entries == 0).float().mean() == pytest.approx(0.3, abs=0.02)
    assert (channels.flatten(2).std(-1) == 0).all()  # a channel is kept or dropped as a whole
    assert (channels[:, :, 0, 0] == 0).float().mean() == pytest.approx(0.3, abs=0.07)
    assert (gone == 0).all()
    with pytest.raises(NotImplementedError, match="alpha_dropout"), Dropping(source):
        F.alpha_dropout(ones)


def test_dropout_drops_lane_by_lane_under_vmap() -> None:
    task, batch = dropping(nn.Dropout2d(0.5)), pictures(2)
    weights, training = task.weights(), LocalTraining(lr=0.1, dropout=True)
    keys = torch.stack([draws.key("a"), draws.key("b")])

    def update(key: Tensor) -> dict[str, Tensor]:
        return training.run(task, weights, batch, None, ClientState(key=key))[0].payload["update"]

    together = torch.func.vmap(update)(keys)
    for lane, key in enumerate(keys):
        assert largest_difference({name: value[lane] for name, value in together.items()}, update(key)) < 1e-15


def test_a_replay_follows_what_is_public_of_a_recipe() -> None:
    noisy = LocalTraining(lr=0.5, augmentation=lambda batch, draws, step: batch, dropout=True)
    assert noisy.public.augmentation is None
    assert not noisy.public.dropout
    assert noisy.public.lr == 0.5


class Attentive(nn.Module):
    """Dropout where no mask of ours reaches: inside attention."""

    def __init__(self, p: float, own: float = 0.0) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True), nn.Linear(8, 3)
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2)  # (N, 8, 8)
        out: Tensor = self.head(torch.dropout(self.attention(rows, rows, rows)[0].mean(1), self.own, self.training))
        return out


def test_dropout_that_would_not_drop_is_refused() -> None:
    batch, like = pictures(2), (pictures(1)["x"], pictures(1)["y"])
    dropped = LocalTraining(lr=0.1, dropout=True)
    hidden, own = (
        gl.Task.supervised(model.double().eval(), F.cross_entropy, like=like)
        for model in (Attentive(0.5), Attentive(0.0, own=0.5))
    )
    with pytest.raises(NotImplementedError, match="multi_head_attention"):
        gl.observe(hidden, batch, dropped)
    first, second = (gl.observe(own, batch, dropped, key=key).update for key in "ab")
    assert largest_difference(first, second) > 1e-4  # torch.dropout is masked too
    none = dropping(nn.Identity())
    with pytest.raises(ValueError, match="never calls dropout"):
        gl.observe(none, batch, dropped)
