"""GIAS: the latent, then weights; the second stage begins where the first one ended, at its best restart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradleak as gl
from conftest import CLASSES, largest_difference, perceptron, private, tiny
from gradleak.attacks.generative.latent import Weights
from gradleak.engine import Engine
from gradleak.generators import DCGAN, StyleGAN2
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Still
from gradleak.parts.partial import Strongest
from gradleak.parts.priors import GroupConsistency
from gradleak.scenario.observation import MissingKnowledge
from test_latent import TRAINING, Toy, knowing, matched, observed

SHORT = {"steps": 40, "weight_steps": 30, "restarts": 3}


def test_a_second_stage_that_does_not_move_is_the_first(double: Engine) -> None:
    generator = Toy(CLASSES)
    task, seen, _ = observed(generator, examples=2, targets=2)
    first = gl.attacks.get("gias", **{**SHORT, "weight_steps": 0}).run(task, seen, knowing(generator), engine=double)
    whole = gl.attacks.get("gias", **SHORT, jitter=0.0)
    still = replace(whole, stages=(whole.stages[0], replace(whole.stages[1], optimiser=Still())))
    found = still.run(task, seen, knowing(generator), engine=double)
    best = first.candidates["x"][torch.arange(2), first.match.argmin(1)]
    assert largest_difference(found.batch["x"], best) < 1e-12
    assert largest_difference(found.candidates["x"], best[:, None].expand_as(found.candidates["x"])) < 1e-12
    assert largest_difference(found.match, first.match.amin(1, keepdim=True).expand(2, 3)) < 1e-12
    assert first.evaluations == 40


def test_weights_match_what_the_latent_cannot(double: Engine) -> None:
    """Images that the generator does not make: its range ends where the second stage begins to help."""
    generator, task = Toy(CLASSES), perceptron()
    seen = [gl.observe(task, private(1, seed=s), TRAINING, key=f"t{s}") for s in range(2)]
    latent, both = (
        gl.attacks.get("gias", **{**SHORT, "weight_lr": 1e-2, "weight_steps": steps}).run(
            task, seen, knowing(generator), engine=double
        )
        for steps in (0, 60)
    )
    assert (both.match.amin(1) < 0.5 * latent.match.amin(1)).all()
    assert both.evaluations == 100
    for target, own in enumerate(seen):
        x, y = both.batch["x"][target], both.batch["y"][target]
        assert matched(task, own, x, y) == pytest.approx(float(both.match[target].min()), abs=1e-12)


def test_restarts_of_the_second_stage_differ_by_their_jitter(double: Engine) -> None:
    generator = Toy()
    task, seen, _ = observed(generator)
    apart = [
        gl.attacks.get("gias", **SHORT, jitter=jitter).run(task, seen, knowing(generator), engine=double)
        for jitter in (0.0, 1e-2)
    ]
    gaps = [largest_difference(run.candidates["x"][:, 0], run.candidates["x"][:, 1]) for run in apart]
    assert gaps[0] == 0
    assert gaps[1] > 1e-5


def test_left_out_entries_are_the_smallest_of_every_tensor(double: Engine) -> None:
    match = gl.attacks.get("gias", left_out=0.95).stages[0].match
    assert isinstance(match, Strongest)
    assert (match.match, match.per) == (Cosine(), "tensor")
    assert match.share == pytest.approx(0.05)
    assert gl.attacks.get("gias").stages[1].match == Cosine()
    update = {"a": torch.arange(1.0, 41.0), "b": torch.tensor([3.0, -1.0])}
    kept = match.prepare(update)
    assert {name: int((value != 0).sum()) for name, value in kept.items()} == {"a": 2, "b": 1}
    assert float(match.distance({"a": update["a"] * 0, "b": update["b"]}, kept)) > 0.5


def test_priors_are_those_that_are_asked_for() -> None:
    def names(**settings: float) -> list[list[str]]:
        stages = gl.attacks.get("gias", **settings).stages
        return [[type(prior).__name__ for prior in stage.priors] for stage in stages]

    assert names() == [["TotalVariation"], ["TotalVariation"]]
    shared = ["TotalVariation", "BatchNormStatistics", "GroupConsistency"]
    assert names(norm=0.1, batch_norm=0.1, group=0.1) == [[*shared, "LatentNorm"], shared]
    # Per pixel, as the paper's code has it: the plain norm of 3 x 32 x 32 values would outweigh any cosine.
    assert gl.attacks.get("gias", group=0.1).stages[0].priors[1] == GroupConsistency(0.1, per_pixel=True)


def test_all_priors_together_run(double: Engine) -> None:
    generator, task = Toy(CLASSES), tiny(norm="eval")
    seen = gl.observe(task, private(2), TRAINING)
    attack = gl.attacks.get("gias", **SHORT, norm=1e-3, batch_norm=1e-3, group=1e-3, left_out=0.5)
    found = attack.run(task, seen, knowing(generator), engine=double)
    assert (found.match < found.trace["match"][0]).all()
    assert not found.diverged.any()


@pytest.mark.parametrize("name", ["dcgan", "stylegan2"])
@pytest.mark.parametrize("examples", [1, 2])
def test_it_runs_on_real_generators(name: str, examples: int) -> None:
    seed = torch.Generator().manual_seed(0)
    generator = (
        DCGAN((1, 8, 8), width=4, generator=seed)
        if name == "dcgan"
        else StyleGAN2((1, 8, 8), latent=4, style=4, widths=(4, 4), generator=seed)
    )
    task = perceptron(dtype=torch.float32)
    seen = gl.observe(task, private(examples, dtype=torch.float32), TRAINING)
    attack = gl.attacks.get("gias", steps=10, weight_steps=10, restarts=2)
    found = attack.run(task, seen, knowing(generator), engine=Engine(device="cpu"))
    assert found.batch["x"].shape == (1, examples, 1, 4, 4)
    assert (found.match < found.trace["match"][0]).all()
    assert not found.diverged.any()
    assert isinstance(attack.stages[1].space, Weights)


def test_it_asks_for_a_generator() -> None:
    task, seen, _ = observed(Toy())
    with pytest.raises(MissingKnowledge, match=r"gias needs generator.*a trained generator of images"):
        gl.attacks.get("gias", **SHORT).run(task, seen, knowing(None))
