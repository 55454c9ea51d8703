"""Several rounds of one client, attacked as one target: fresh noise averages out, and every round's weights count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
import gradleak.parts.fields
import gradleak.parts.matches
import gradleak.parts.optimisers
import gradleak.parts.predictions
import gradleak.parts.spaces
from gradleak.core import tree
from gradleak.scenario.observation import Track

TRAINING = gl.LocalTraining(lr=1.0)
SHAPE = (2, 6, 6)


@pytest.fixture(scope="module")
def task() -> gl.Task:
    make = torch.Generator().manual_seed(0)
    model = gl.models.lenet_zhu(shape=SHAPE, width=4, generator=make).double()
    like = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model, F.cross_entropy, like=like)


def picture(seed: int = 0) -> Tensor:
    coarse = torch.rand(1, SHAPE[0], 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.interpolate(coarse, size=SHAPE[1:], mode="bilinear")


def moved(task: gl.Task, number: int) -> dict[str, Tensor]:
    """Weights as a training would have moved them by this round."""
    make = torch.Generator().manual_seed(number)
    return {
        name: value + 0.02 * torch.randn(value.shape, generator=make, dtype=value.dtype)
        for name, value in task.weights().items()
    }


def track(task: gl.Task, rounds: int, defence: gl.Defence | None = None, seed: int = 0, moving: bool = True) -> Track:
    """A client that trains on the same image in every round."""
    batch = {"x": picture(seed), "y": torch.tensor([seed + 1])}
    seen = []
    for number in range(rounds):
        weights = moved(task, number) if moving else task.weights()
        upload = gl.observe(task, batch, TRAINING, defence, weights=weights, key=f"{seed}/{number}", seed=number)
        seen.append(replace(upload, round=number))
    return Track(tuple(seen))


def psnr(found: gl.Reconstruction, seeds: tuple[int, ...] = (0,)) -> float:
    truth = {"x": torch.stack([picture(s) for s in seeds]), "y": torch.tensor([[s + 1] for s in seeds])}
    return float(gl.metrics.compare(found, truth).psnr.mean())


DOUBLE = gl.Engine(precision="double")


def still(start: Any, match: Any) -> gl.Composed:
    """An attack that begins somewhere and stays there."""
    space, rule = gl.parts.spaces.Pixels(start), gl.parts.fields.Labels(gl.parts.fields.label_rule("auto"))
    stage = gl.Stage(space, gl.parts.predictions.Replay(), match, (), gl.parts.optimisers.Adam(lr=1e-12, steps=2))
    return gl.Composed("still", (stage,), rule)


def test_local_noise_averages_out_over_rounds() -> None:
    """The error of an unbiased estimate falls with the number of rounds: ten of them bring about 10 dB."""
    make = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 32), nn.Sigmoid(), nn.Linear(32, 10)).double()
    for value in model.parameters():
        nn.init.uniform_(value, -0.1, 0.1, generator=make)
    like = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))
    task = gl.Task.supervised(model, F.cross_entropy, like=like)
    noise = gl.defences.LocalGaussian(sigma=3e-4)
    knows = gl.Knowledge(training=TRAINING, defence=noise)
    attack = gl.attacks.get("second-order", certify=False)
    one, many = (psnr(attack.run(task, track(task, rounds, noise), knows)) for rounds in (1, 10))
    assert many > one + 8


def test_a_track_of_one_round_is_that_round(task: gl.Task) -> None:
    attack, knows = gl.attacks.get("ig", steps=5), gl.Knowledge(training=TRAINING)
    alone = track(task, 1)
    both = [attack.run(task, seen, knows) for seen in (alone, alone.last)]
    assert torch.equal(both[0].batch["x"], both[1].batch["x"])


def test_rounds_that_repeat_an_update_change_nothing(task: gl.Task) -> None:
    """For a cosine: the same update three times has the direction that it has once."""
    attack, knows = gl.attacks.get("ig", steps=5, keep="last"), gl.Knowledge(training=TRAINING)
    alone = track(task, 1, moving=False).last
    thrice = Track(tuple(replace(alone, round=number) for number in range(3)))
    found = [attack.run(task, seen, knows, engine=gl.Engine(precision="double")) for seen in (alone, thrice)]
    torch.testing.assert_close(found[0].match, found[1].match, rtol=1e-9, atol=0)


def test_tracks_together_are_tracks_alone(task: gl.Task) -> None:
    attack, knows = gl.attacks.get("ig", steps=8), gl.Knowledge(training=TRAINING)
    targets = [track(task, 3, seed=seed) for seed in (0, 1)]
    double = gl.Engine(precision="double")
    together = attack.run(task, targets, knows, engine=double)
    for row, target in enumerate(targets):
        alone = attack.run(task, target, knows, engine=double)
        torch.testing.assert_close(together.batch["x"][row], alone.batch["x"][0], rtol=0, atol=1e-9)


def test_the_truth_matches_in_every_round(task: gl.Task) -> None:
    """Exact recovery from two rounds, and none where one of them is of another client."""
    attack, knows = gl.attacks.get("second-order", certify=False), gl.Knowledge(training=TRAINING)
    mine, other = track(task, 2), track(task, 2, seed=1)
    assert psnr(attack.run(task, mine, knows)) > 100
    mixed = Track((other.observations[0], mine.observations[1]))
    assert float(attack.run(task, mixed, knows).match) > 1e-4


def test_rounds_of_unequal_tracks_are_not_stacked(task: gl.Task) -> None:
    attack, knows = gl.attacks.get("ig", steps=3), gl.Knowledge(training=TRAINING)
    targets = [track(task, 3), track(task, 2, seed=1), track(task, 3, seed=2, moving=False)]
    found = attack.run(task, targets, knows, engine=gl.Engine(precision="double"))
    for row, target in enumerate(targets):
        alone = attack.run(task, target, knows, engine=gl.Engine(precision="double"))
        torch.testing.assert_close(found.batch["x"][row], alone.batch["x"][0], rtol=0, atol=1e-9)


def test_masks_are_read_off_each_round(task: gl.Task) -> None:
    """A pruning client sends other entries in every round: together they determine what one leaves open."""
    pruning = gl.defences.Pruning(keep=0.05)
    knows = gl.Knowledge(training=TRAINING, defence=pruning)
    seen = track(task, 3, pruning)
    sent = [tree.flatten(each.update) != 0 for each in seen.observations]
    assert not torch.equal(sent[0], sent[1])
    attack = gl.attacks.get("second-order", certify=False)
    assert psnr(attack.run(task, seen, knows)) > psnr(attack.run(task, seen.last, knows)) + 6


def test_an_attack_that_ends_at_the_noise_is_not_called_unfitted(task: gl.Task) -> None:
    """Noise is most of what a bad guess leaves unexplained: the match cannot be halved, and all else is fitted."""
    signal = float(tree.norm(track(task, 1).last.update)) / tree.size(task.weights()) ** 0.5
    noise = gl.defences.LocalGaussian(sigma=0.25 * signal)
    attack, seen = gl.attacks.get("ig", steps=200), track(task, 1, noise)
    aware, naive = (
        attack.run(task, seen, gl.Knowledge(training=TRAINING, defence=known)).checks for known in (noise, None)
    )
    assert [check.name for check in aware.found] == ["at the noise"]
    assert "not fitted" in [check.name for check in naive.found]


def test_noise_that_covers_a_blank_guess_excuses_nothing(task: gl.Task) -> None:
    noise = gl.defences.LocalGaussian(sigma=1.0)
    knows = gl.Knowledge(training=TRAINING, defence=noise)
    found = gl.attacks.get("idlg", steps=60).run(task, track(task, 1, noise), knows)
    assert "at the noise" not in [check.name for check in found.checks.found]
    brief = gl.attacks.get("idlg", steps=2).run(task, track(task, 1, gl.defences.LocalGaussian(sigma=1e-3)), knows)
    assert "at the noise" not in [check.name for check in brief.checks.found]


@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.0])
def test_the_level_of_the_noise_is_that_of_the_truth(task: gl.Task, ratio: float) -> None:
    """For a match of directions too: what the truth would score against what was observed."""
    signal = float(tree.norm(track(task, 1).last.update)) / tree.size(task.weights()) ** 0.5
    noise = gl.defences.LocalGaussian(sigma=ratio * signal)
    seen = track(task, 1, noise)
    start = gl.parts.spaces.Surrogate(picture()[0][None])
    for match in (gl.parts.matches.Cosine(), gl.parts.matches.Relative(whole=True)):
        found = still(start, match).run(task, seen, gl.Knowledge(training=TRAINING, defence=noise), engine=DOUBLE)
        assert found.noise is not None
        assert float(found.noise) == pytest.approx(float(found.match), rel=0.25)
