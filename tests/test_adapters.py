"""What other frameworks keep of a round, as observations: state_dicts, differences, npz, lists of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import largest_difference, private, tiny
from gradleak import adapters
from gradleak.scenario.observation import BadObservation

LIKE = (torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.long))


class Tied(nn.Module):
    """One matrix used twice, under two names; a frozen layer; running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1)).sigmoid()
        return self.head(self.frozen(self.norm(self.second(x)).sigmoid()))


def tied() -> gl.Task:
    torch.manual_seed(0)
    return gl.Task.supervised(Tied().double().train(), cross_entropy, like=LIKE)


def trained(task: gl.Task) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """A real torch client: the state_dict before and after a step of SGD, and its batch."""
    model, batch = task.model, private(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimiser.step()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    return before, after, batch


@pytest.mark.parametrize("make", [tied, lambda: tiny(norm="train"), tiny], ids=["tied", "batchnorm", "plain"])
@pytest.mark.parametrize("known", [True, False], ids=["task", "names"])
def test_a_torch_client_is_what_the_client_rule_says(make: Any, known: bool) -> None:
    """torch.optim, state_dict and all: the same observation as `observe` makes; without the task after `fitted`."""
    task = make()
    before, after, batch = trained(task)
    seen = adapters.from_state_dicts(before, after, 4, task=task if known else None, round=3, key="client")
    seen = seen if known else adapters.fitted(seen, task)
    expected = gl.observe(task, batch, gl.LocalTraining(lr=0.1), wire="weights")
    assert seen.weights.keys() == expected.weights.keys()
    assert largest_difference(seen.update, expected.update) < 1e-12
    assert (seen.num_examples, seen.round, seen.key) == (4, 3, "client")
    if expected.returned_buffers:
        assert seen.returned_buffers is not None
        assert seen.returned_buffers.keys() == expected.returned_buffers.keys()
        assert largest_difference(seen.returned_buffers, expected.returned_buffers) < 1e-12
    found = gl.identify.replay_error(task, seen, batch, gl.LocalTraining(lr=0.1))
    assert found.relative < 1e-9


def test_tied_weights_that_were_recorded_with_the_task_are_sorted_later() -> None:
    """A tap that knows the task has the second name among the buffers, exactly; the weight is known to rounding."""
    torch.manual_seed(0)
    task = gl.Task.supervised(Tied().train(), cross_entropy, like=LIKE)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    after = {name: value.clone() for name, value in before.items()}
    after["first.weight"] = torch.randn(16, 16)
    rounded = before["first.weight"] - (before["first.weight"] - after["first.weight"])
    assert not torch.equal(rounded, after["first.weight"])  # what this is about
    after["second.weight"] = after["first.weight"].clone()
    weights = task.weights()
    seen = gl.Observation(
        weights={name: before[name] for name in weights},
        update={name: before[name] - after[name] for name in weights},
        num_examples=1,
        buffers={name: value for name, value in before.items() if name not in weights},
        returned_buffers={name: value for name, value in after.items() if name not in weights},
    )
    found = adapters.fitted(seen, task)
    assert found.weights.keys() == weights.keys()
    assert found.buffers is not None
    assert "second.weight" not in found.buffers


def test_masks_are_buffers_that_nothing_subtracts() -> None:
    """A frozen layer, so that the tensors have to be sorted, and a buffer of truth values."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3))
    model[1].requires_grad_(False)
    model.register_buffer("mask", torch.tensor([True, False]))
    task = gl.Task.supervised(model, cross_entropy, like=LIKE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = {**before, "2.bias": before["2.bias"] + 1}
    found = adapters.fitted(adapters.from_state_dicts(before, after, 1), task)
    assert set(found.weights) == {"2.weight", "2.bias"}
    assert found.buffers is not None
    assert torch.equal(found.buffers["mask"], before["mask"])


def test_a_difference_keeps_the_digits_that_weights_round_off() -> None:
    task = tiny(dtype=torch.float32)
    batch = private(1, dtype=torch.float32)
    exact = gl.observe(task, batch, gl.LocalTraining(lr=1e-4))
    before = dict(task.model.state_dict())
    moved = {name: -value.numpy() for name, value in exact.update.items()}  # after - before, as NVFlare sends it
    seen = adapters.from_difference(before, moved, 1, task=task)
    assert largest_difference(seen.update, exact.update) == 0
    after = {name: before[name].numpy() + moved[name] for name in before}
    rounded = adapters.from_state_dicts(before, after, 1, task=task)
    assert largest_difference(rounded.update, exact.update) > 0
    part = adapters.from_difference(before, {"0.bias": moved["0.bias"]}, 1, task=task)  # the rest did not change
    assert not part.update["0.weight"].any()
    with pytest.raises(BadObservation, match="which the model that was sent does not"):
        adapters.from_difference(before, {"other": moved["0.bias"]}, 1)


def test_npz_and_names_of_wrappers(tmp_path: Path) -> None:
    task = tiny(norm="train")
    before, after, batch = trained(task)
    for prefix in ("", "module.", "_module.", "_orig_mod."):
        for name, state in (("before", before), ("after", after)):
            np.savez(tmp_path / f"{name}.npz", **{prefix + key: value.numpy() for key, value in state.items()})
        seen = adapters.from_npz(tmp_path / "before.npz", tmp_path / "after.npz", 4, task=task)
        assert gl.identify.replay_error(task, seen, batch, gl.LocalTraining(lr=0.1)).relative < 1e-9


def test_lists_of_arrays_are_taken_in_the_order_of_the_model() -> None:
    task = tiny(norm="train")
    before, after, batch = trained(task)
    numbers = [{str(n): value for n, value in enumerate(state.values())} for state in (before, after)]
    seen = adapters.fitted(adapters.from_state_dicts(*numbers, 4), task)
    assert gl.identify.replay_error(task, seen, batch, gl.LocalTraining(lr=0.1)).relative < 1e-9
    with pytest.raises(BadObservation, match="without names"):
        adapters.from_state_dicts({"0": numbers[0]["0"]}, {"0": numbers[1]["0"]}, 4, task=task)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    task = tied()
    before, after, _ = trained(task)
    with pytest.raises(BadObservation, match="is only in `after`"):
        adapters.from_state_dicts({}, after, 4)
    with pytest.raises(BadObservation, match="is not that of the task: it lacks"):
        adapters.from_state_dicts({"head.bias": before["head.bias"]}, {"head.bias": after["head.bias"]}, 4, task=task)
    apart = {**after, "second.weight": after["second.weight"] + 1}
    with pytest.raises(BadObservation, match="changed apart"):
        adapters.from_state_dicts(before, apart, 4, task=task)
    with pytest.raises(BadObservation, match="before and .* after"):
        adapters.from_state_dicts({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, 1)
    with pytest.raises(BadObservation, match="not numbers"):
        adapters.from_state_dicts({"a": np.array(["x"])}, {"a": np.array(["x"])}, 1)
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, a=np.array([{}], dtype=object))
    with pytest.raises(BadObservation, match="np.savez"):
        adapters.read_npz(pickled)
    np.save(tmp_path / "one.npy", np.zeros(2))
    with pytest.raises(BadObservation, match="one array"):
        adapters.read_npz(tmp_path / "one.npy")
    with pytest.raises(BadObservation, match="There is no file"):
        adapters.read_npz(tmp_path / "none.npz")
