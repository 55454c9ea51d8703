"""GIFD: its stages, its balls, its schedule; one stage is a latent search, step for step."""

from __future__ import annotations

import math

import pytest
import torch

import gradleak as gl
from conftest import CLASSES, largest_difference, perceptron, private
from gradleak.attacks.generative.latent import Features, Latent
from gradleak.core import tree
from gradleak.engine import Engine
from gradleak.generators import DCGAN, StyleGAN2, images_of
from test_latent import TRAINING, Toy, knowing, matched, observed


def by_hand(generator: Toy, task: gl.Task, seen: gl.Observation, z: torch.Tensor, y: torch.Tensor, steps: int):
    """Adam on the latent, on its sphere, with GIFD's rate and priors: written out, one step after the other."""
    generator, length = generator.double(), z.norm(dim=-1, keepdim=True)
    target = tree.flatten(seen.update)
    z, first, second = z.clone(), torch.zeros_like(z), torch.zeros_like(z)
    curve = []
    for number in range(steps):
        z = z.detach().requires_grad_()
        x = images_of(generator, z, y)
        loss = torch.nn.functional.cross_entropy(
            torch.func.functional_call(
                task.model, weights := {n: p.requires_grad_() for n, p in seen.weights.items()}, x
            ),
            y,
        )
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(weights.values()), create_graph=True)]
        )
        match = 1 - torch.cosine_similarity(gradient, target, dim=0)
        variation = (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
        objective = match + 1e-4 * variation + 1e-6 * x.flatten(1).norm(dim=1).sum() / 16
        [slope] = torch.autograd.grad(objective, z)
        t = number / steps
        rate = 0.1 * (0.5 - 0.5 * math.cos(math.pi * min(1.0, (1 - t) / 0.75))) * min(1.0, t / 0.05)
        first = 0.9 * first + 0.1 * slope
        second = 0.999 * second + 0.001 * slope.square()
        step = first / (1 - 0.9 ** (number + 1)) / ((second / (1 - 0.999 ** (number + 1))).sqrt() + 1e-8)
        z = z.detach() - rate * step
        z = z * length / z.norm(dim=-1, keepdim=True)
        curve.append((match.item(), objective.item()))
    return z, torch.tensor(curve, dtype=torch.float64)


def test_one_stage_is_a_latent_search_step_for_step(double: Engine) -> None:
    generator, steps = Toy(CLASSES), 40
    task, seen, truth = observed(generator)
    attack = gl.attacks.get("gifd", steps=steps, features=0, restarts=1, keep="last")
    still = gl.attacks.get("prior-only").run(task, seen, knowing(generator), engine=double)
    found = attack.run(task, seen, knowing(generator), engine=double)
    z, curve = by_hand(generator, task, seen[0], still.unknowns["z"][0, 0], truth["y"][0], steps)
    torch.testing.assert_close(found.trace["match"][:, 0, 0], curve[:, 0], rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found.trace["objective"][:, 0, 0], curve[:, 1], rtol=1e-7, atol=1e-10)
    with torch.no_grad():
        x = images_of(generator, z, truth["y"][0])
    torch.testing.assert_close(found.batch["x"][0], x, rtol=1e-7, atol=1e-9)
    assert curve[-1, 0] < 0.5 * curve[0, 0]


def test_the_stages_are_latent_then_block_after_block() -> None:
    attack = gl.attacks.get("gifd", features=3, radius=0.2)
    spaces = [stage.space for stage in attack.stages]
    assert isinstance(spaces[0], Latent)
    assert spaces[0].sphere
    assert all(isinstance(space, Features) for space in spaces[1:])
    assert [space.stage for space in spaces[1:]] == [1, 2, 3]
    assert {(space.radius, space.relative) for space in spaces[1:]} == {(0.2, True)}
    assert (attack.output, attack.restarts) == ("best_stage", 4)
    given = gl.attacks.get("gifd", features=2, radii=(2000.0, 2500.0))
    assert [(s.space.radius, s.space.relative) for s in given.stages[1:]] == [(2000.0, False), (2500.0, False)]
    with pytest.raises(ValueError, match="one for each of the 3 feature stages; given 2"):
        gl.attacks.get("gifd", features=3, radii=(1.0, 2.0))


@pytest.mark.parametrize("styled", [False, True])
def test_it_matches_better_than_its_first_stage_and_the_prior(styled: bool, double: Engine) -> None:
    generator = Toy(CLASSES, styled=styled)
    task, seen, truth = observed(generator, targets=3)
    runs = {
        name: gl.attacks.get(name, **settings).run(task, seen, knowing(generator), engine=double)
        for name, settings in (("prior-only", {}), ("gifd", {"steps": 60, "features": 2, "restarts": 2}))
    }
    first = gl.attacks.get("gifd", steps=60, features=0, restarts=2).run(task, seen, knowing(generator), engine=double)
    found = runs["gifd"]
    assert (found.match <= first.match + 1e-12).all()
    assert found.match.amin(1).mean() < 0.2 * runs["prior-only"].match.mean()
    apart = {name: (run.batch["x"] - truth["x"]).square().mean() for name, run in runs.items()}
    assert apart["gifd"] < 0.5 * apart["prior-only"]
    for target, own in enumerate(seen):
        x, y = found.batch["x"][target], found.batch["y"][target]
        assert matched(task, own, x, y) == pytest.approx(float(found.match[target].min()), abs=1e-12)
    assert found.evaluations == 180
    assert set(found.unknowns["stage"].flatten().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("name", ["dcgan", "stylegan2"])
def test_it_runs_on_real_generators(name: str, conditional: bool) -> None:
    classes = CLASSES if conditional else None
    seed = torch.Generator().manual_seed(0)
    generator = (
        DCGAN((1, 8, 8), classes=classes, width=4, generator=seed)
        if name == "dcgan"
        else StyleGAN2((1, 8, 8), classes=classes, latent=4, style=4, widths=(4, 4), generator=seed)
    )
    task = perceptron(dtype=torch.float32)
    seen = [gl.observe(task, private(2, seed=s, dtype=torch.float32), TRAINING, key=f"t{s}") for s in range(2)]
    attack = gl.attacks.get("gifd", steps=12, features=generator.blocks, restarts=2)
    found = attack.run(task, seen, knowing(generator), engine=Engine(device="cpu"))
    assert found.batch["x"].shape == (2, 2, 1, 4, 4)
    assert not found.diverged.any()
    assert (found.match < found.trace["match"][0]).all()


def test_more_features_than_blocks_are_refused(double: Engine) -> None:
    task, seen, _ = observed(Toy())
    with pytest.raises(ValueError, match="has 2 blocks.*Search at most 2 features"):
        gl.attacks.get("gifd", steps=2, features=3).run(task, seen, knowing(Toy()), engine=double)


def test_the_wrong_class_is_another_search(double: Engine) -> None:
    generator = Toy(CLASSES)
    task, seen, _ = observed(generator)
    right, wrong = (
        gl.attacks.get("gifd", steps=3, features=1, restarts=1, shift=shift).run(
            task, seen, knowing(generator), engine=double
        )
        for shift in (0, 1)
    )
    assert torch.equal(right.batch["y"], wrong.batch["y"])  # the label of the client stays what was found
    assert largest_difference(right.batch["x"], wrong.batch["x"]) > 1e-3


def test_chunks_do_not_mix_targets(double: Engine) -> None:
    generator = Toy(CLASSES)
    task, seen, _ = observed(generator, targets=3)
    attack = gl.attacks.get("gifd", steps=6, features=2, restarts=2)
    runs = [attack.run(task, seen, knowing(generator), engine=Engine("cpu", "double", chunk=c)) for c in (None, 2)]
    assert largest_difference(runs[0].candidates["x"], runs[1].candidates["x"]) < 1e-9
    assert runs[1].settings["chunks"] == [2, 2, 2]
