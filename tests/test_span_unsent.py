"""`span` where a known defence drops entries or adds noise: what was sent tells the rest."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import gradleak as gl
from conftest import normal, scene_of, uniform
from gradleak.attacks.spans import telling
from gradleak.attacks.spans.telling import Told, told_by
from gradleak.attacks.spans.unsent import by_columns, by_rows, completed, unknown
from gradleak.core.random import Draws, key
from gradleak.parts.predictions import sent_entries
from gradleak.scenario.defence import Chain, Defence, OnlyVisible
from gradleak.scenario.task import Batch, Task

GRADIENT = gl.LocalTraining(lr=1.0)
RANK = 4


def part_of(matrix: Tensor, keep: float, seed: int = 1) -> Tensor:
    return torch.where(uniform(*matrix.shape, seed=seed) < keep, matrix, torch.nan)


def low_rank() -> Tensor:
    """Directions of very different size, as in gradients."""
    return (normal(60, RANK) * torch.logspace(0, -2, RANK, dtype=torch.float64)) @ normal(RANK, 200, seed=2)


def off(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


# --- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.9, 0.4])
def test_few_entries_tell_a_matrix_of_low_rank(keep: float) -> None:
    found = completed(part_of(low_rank(), keep), RANK, Draws(key("")))
    assert found is not None
    assert off(found, low_rank()) < 1e-6


@pytest.mark.parametrize(
    ("matrix", "keep"), [(low_rank(), 0.1), (normal(60, 200), 0.4)], ids=["too few entries", "another rank"]
)
def test_what_entries_do_not_tell_is_not_made_up(matrix: Tensor, keep: float) -> None:
    assert completed(part_of(matrix, keep), RANK, Draws(key(""))) is None


def test_a_column_with_too_few_entries_stays_open() -> None:
    part = part_of(low_rank(), 0.5)
    part[5:, 7] = torch.nan
    found = completed(part, RANK, Draws(key("")))
    assert found is not None
    assert found.isnan().any(0).nonzero().tolist() == [[7]]


def test_a_row_of_a_convolution_without_entries_is_zero() -> None:
    sent = uniform(64, 8, 3, 3) < 0.5
    sent[3], sent[:, 2, 1, 1] = False, False
    values = {"conv": torch.where(sent, 1.0, 0.0), "linear": torch.where(sent[:, 0, 0], 1.0, 0.0)}
    found = unknown(values, {"conv": sent, "linear": sent[:, 0, 0]})
    assert torch.equal(found["linear"].isnan(), ~sent[:, 0, 0])
    assert not found["conv"][3].any()
    assert not found["conv"][:, 2, 1, 1].any()
    sent[3], sent[:, 2, 1, 1] = True, True
    assert torch.equal(found["conv"].isnan(), ~sent)


def test_known_factors_tell_rows_and_columns() -> None:
    inputs, hat = normal(3, 40), torch.linalg.qr(normal(40, 3))[0]
    rows, columns = normal(5, 3) @ inputs, hat @ normal(3, 6)
    torch.testing.assert_close(by_rows(part_of(rows, 0.4), inputs), rows)
    torch.testing.assert_close(by_columns(part_of(columns, 0.4), hat), columns)
    assert by_columns(part_of(columns, 0.05), hat) is None


# --- what a known defence leaves --------------------------------------------------------------------------------------


@cache
def net() -> Task:
    """Four convolutions on 3 x 8 x 8 with more outputs than places."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5),
        )  # fmt: skip
    like = (torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model.double().eval(), cross_entropy, like=like)


def pictures() -> Batch:
    coarse = uniform(1, 3, 4, 4, seed=3)
    return {"x": interpolate(coarse, size=(8, 8), mode="bicubic").clamp(0, 1), "y": torch.tensor([1])}


def told(defence: Defence | None, known: Defence | None) -> Told:
    observed = gl.observe(net(), pictures(), GRADIENT, defence, key="target")
    knows = gl.Knowledge(training=GRADIENT, defence=known)
    return told_by(scene_of(net(), observed, knows), 5, 1e-10, Draws(key("")))


def true_maps(name: str) -> Tensor:
    return net().inputs_of([name], net().weights(), pictures())[name].flatten(1)


@pytest.mark.parametrize("form", [lambda defence: defence, OnlyVisible], ids=["A2", "A1"])
@pytest.mark.parametrize("spec", ["random-mask:keep=0.8", "withholding:layer=10"])
def test_maps_are_peeled_in_spite_of_entries_that_were_not_sent(spec: str, form: type[OnlyVisible]) -> None:
    defence = gl.core.registry.parse("defence", spec)
    found = told(defence, form(defence))
    assert {"2", "4"} <= set(found.own)
    assert max(off(found.own[name], true_maps(name)) for name in found.own) < 1e-5


def test_an_attacker_who_does_not_know_the_defence_takes_zeros_for_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "completed", None)
    found = told(gl.core.registry.parse("defence", "random-mask:keep=0.6"), None)
    assert all(not float(errors) < 1e-2 for errors in found.errors.values())


def test_an_update_that_was_sent_whole_is_read_as_without_a_defence() -> None:
    clipped, plain = told(gl.defences.Clipping(1e9), gl.defences.Clipping(1e9)), told(None, None)
    assert clipped.record == plain.record
    assert all(torch.equal(clipped.own[name], plain.own[name]) for name in plain.own)


def test_noise_of_a_known_defence_is_no_direction() -> None:
    noise = gl.defences.LocalGaussian(sigma=1e-4)
    known = {line["layer"]: line for line in told(noise, noise).record}
    blind = {line["layer"]: line for line in told(noise, None).record}
    plain = {line["layer"]: line for line in told(None, None).record}
    assert all(known[name]["rank"] <= plain[name]["rank"] for name in known)
    assert sum(line["rank"] for line in known.values()) < sum(line["rank"] for line in blind.values())


def test_an_attacker_who_replays_pruning_knows_what_was_dropped() -> None:
    pruning = gl.defences.Pruning(keep=0.5)
    observed = gl.observe(net(), pictures(), GRADIENT, pruning, key="target")
    for known in (pruning, OnlyVisible(pruning), Chain(pruning)):
        sent = sent_entries(scene_of(net(), observed, gl.Knowledge(training=GRADIENT, defence=known)))
        assert all(torch.equal(sent[name], observed.update[name] != 0) for name in sent)
