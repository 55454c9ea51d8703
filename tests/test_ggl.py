"""GGL: a latent found without second derivatives, through what a defence shows; and the prior alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import CLASSES, largest_difference, perceptron, scene_of
from gradleak.attacks.generative.cma import CMAES
from gradleak.core import tree
from gradleak.engine import Engine
from gradleak.engine.search import StageObjective
from gradleak.generators import images_of
from gradleak.parts.matches import MeanSquaredError
from gradleak.parts.partial import AsObserved
from gradleak.parts.predictions import Replay
from test_engine import gate, searches
from test_latent import TRAINING, Toy, knowing, made, observed

SEARCHES = {
    "cma": {"search": "cma", "steps": 40, "population": 20},
    "random": {"search": "random", "steps": 10, "population": 20},
    "adam": {"search": "adam", "steps": 60, "kl": 1e-6},  # matches are of that size here
}


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_beats_the_prior(name: str, double: Engine) -> None:
    generator = Toy(CLASSES)
    task, seen, truth = observed(generator, targets=4)
    attack = gl.attacks.get("ggl", **SEARCHES[name], restarts=2)
    found = attack.run(task, seen, knowing(generator), engine=double)
    control = gl.attacks.get("prior-only").run(task, seen, knowing(generator), engine=double)
    assert found.batch["y"].tolist() == truth["y"].tolist()
    apart, random = ((run.batch["x"] - truth["x"]).square().flatten(1).mean(1) for run in (found, control))
    assert apart.mean() < 0.5 * random.mean()
    assert (found.match <= found.trace["match"][0]).all()
    assert found.match.mean() < 0.5 * found.trace["match"][0].mean()
    wanted = {"cma": 800, "random": 200, "adam": 60}
    assert found.evaluations == wanted[name]
    assert not found.diverged.any()


def test_cma_es_finds_more_than_chance(double: Engine) -> None:
    generator = Toy(CLASSES)
    task, seen, _ = observed(generator, targets=4)
    searches = {name: {**SEARCHES[name], "steps": 40, "population": 20} for name in ("cma", "random")}
    found = {
        name: gl.attacks.get("ggl", **settings).run(task, seen, knowing(generator), engine=double).match
        for name, settings in searches.items()
    }
    assert (found["cma"] < found["random"]).sum() >= 3


@pytest.mark.parametrize("name", ["cma", "random"])
def test_nothing_is_differentiated_twice(name: str, double: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a second derivative was asked for")

    monkeypatch.setattr(StageObjective, "value_and_grad", refused)
    task, seen, _ = observed(Toy())
    gl.attacks.get("ggl", **SEARCHES[name]).run(task, seen, knowing(Toy()), engine=double)
    with pytest.raises(AssertionError, match="second derivative"):
        gl.attacks.get("ggl", **SEARCHES["adam"]).run(task, seen, knowing(Toy()), engine=double)


@pytest.mark.parametrize("name", SEARCHES)
def test_lanes_together_are_lanes_alone(name: str, double: Engine) -> None:
    generator = Toy(CLASSES)
    task, seen, _ = observed(generator, targets=3)
    attack = gl.attacks.get("ggl", **{**SEARCHES[name], "steps": 8}, restarts=2)
    together = attack.run(task, seen, knowing(generator), engine=double)
    chunks = attack.run(task, seen, knowing(generator), engine=replace(double, chunk=2))
    alone = [attack.run(task, each, knowing(generator), engine=double).candidates["x"] for each in seen]
    one_by_one = attack.run(task, seen[:1], knowing(generator), engine=replace(double, batched=False))
    assert largest_difference(torch.cat(alone), together.candidates["x"]) < 1e-8
    assert largest_difference(chunks.candidates["x"], together.candidates["x"]) < 1e-8
    assert largest_difference(one_by_one.candidates["x"], together.candidates["x"][:1]) < 1e-8
    assert largest_difference(together.candidates["x"][:, 0], together.candidates["x"][:, 1]) > 1e-3


@pytest.mark.parametrize("name", SEARCHES)
def test_a_step_reads_nothing_on_the_host(name: str, double: Engine) -> None:
    """Not even that of CMA-ES, which is not captured for other reasons."""
    task, seen, _ = observed(Toy(CLASSES))
    attack = gl.attacks.get("ggl", **SEARCHES[name])
    for search in searches(attack, task, seen[0], knowing(Toy(CLASSES)), double):
        assert search.stage.optimiser.graphable == (name != "cma")
        gate(search)


def test_the_squashed_latent_has_no_kl_term() -> None:
    made = {name: gl.attacks.get("ggl", **settings).stages[0] for name, settings in SEARCHES.items()}
    assert [stage.space.squash for stage in made.values()] == [True, False, False]
    assert [len(stage.priors) for stage in made.values()] == [0, 0, 1]
    assert isinstance(made["cma"].optimiser, CMAES)
    assert gl.attacks.get("ggl").stages[0].optimiser.evaluations == 25000
    assert not gl.attacks.get("ggl", search="adam", kl=0.0).stages[0].priors
    with pytest.raises(ValueError, match="search cannot be 'cmaes'.*'cma'"):
        gl.attacks.get("ggl", search="cmaes")


# --- through a defence ------------------------------------------------------------------------------------------------

DEFENCES: dict[str, gl.Defence] = {
    "pruning": gl.defences.Pruning(keep=0.3),
    "clipping": gl.defences.Clipping(norm=0.01),
    "soteria": gl.defences.Soteria(rate=50.0),
}


@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize("estimate", [True, False])
def test_the_truth_matches_through_a_known_defence(defence: str, estimate: bool) -> None:
    generator, task = Toy(CLASSES), perceptron()
    batch = made(generator)
    seen = gl.observe(task, batch, TRAINING, DEFENCES[defence])
    match = gl.attacks.get("ggl", estimate=estimate).stages[0].match
    distances = {}
    for who, known in (("naive", None), ("adaptive", DEFENCES[defence])):
        scene = scene_of(task, seen, knowing(generator, defence=known), y=batch["y"])
        observation = match.prepare(Replay().target(scene))
        predicted = Replay()(batch, {}, scene, None)  # type: ignore[arg-type]
        distances[who] = float(match.distance(predicted, observation) / tree.squared_norm(observation))
    assert distances["adaptive"] < 1e-10
    # What shows in the update needs no knowledge of the defence; without the estimate the truth does not fit.
    assert distances["naive"] < 1e-10 if estimate else distances["naive"] > 1e-3


@pytest.mark.parametrize("defence", DEFENCES)
def test_it_searches_through_a_defence(defence: str, double: Engine) -> None:
    generator, task = Toy(CLASSES), perceptron()
    batches = [made(generator, seed=seed) for seed in range(4)]
    seen = [gl.observe(task, b, TRAINING, DEFENCES[defence], key=f"t{i}") for i, b in enumerate(batches)]
    y = torch.stack([batch["y"] for batch in batches])
    x = torch.stack([batch["x"] for batch in batches])
    knows = knowing(generator, defence=DEFENCES[defence], given={"y": y})
    found = gl.attacks.get("ggl", **SEARCHES["cma"]).run(task, seen, knows, engine=double)
    control = gl.attacks.get("prior-only").run(task, seen, knows, engine=double)
    apart, random = ((run.batch["x"] - x).square().mean() for run in (found, control))
    assert apart < 0.7 * random


def test_the_estimate_leaves_the_true_update_alone() -> None:
    update = {"a": torch.tensor([1.0, 0.0, -2.0]), "b": torch.tensor([[0.5]])}
    match = AsObserved(MeanSquaredError())
    assert torch.equal(match.compared(update, update)["a"], update["a"])
    longer = {"a": torch.tensor([2.0, 5.0, -4.0]), "b": torch.tensor([[1.0]])}
    cut = match.compared(longer, update)
    torch.testing.assert_close(cut, update)
    shorter = tree.scale(update, 0.5)
    torch.testing.assert_close(match.compared(shorter, update), shorter)
    assert match.compared({**update, "a": torch.tensor([1.0, torch.nan, 1.0])}, update)["a"].isnan().any()
    assert float(match.distance(shorter, update)) == pytest.approx(0.25 * (5 + 0.25) / 2)
    residual = match.residual(shorter, update)
    assert float(match.reduce(residual)) == pytest.approx(float(match.distance(shorter, update)))


# --- the prior alone --------------------------------------------------------------------------------------------------


def test_the_prior_alone_is_a_random_image_of_the_label(double: Engine) -> None:
    generator = Toy(CLASSES)
    task, seen, truth = observed(generator, examples=2, targets=2)
    found = gl.attacks.get("prior-only").run(task, seen, knowing(generator), engine=double)
    with torch.no_grad():
        for target in range(2):
            wanted = images_of(generator.double(), found.unknowns["z"][target, 0], truth["y"][target])
            torch.testing.assert_close(found.batch["x"][target], wanted)
    assert (found.evaluations, found.match.shape) == (1, (2, 1))
    assert largest_difference(found.batch["x"][0], found.batch["x"][1]) > 1e-3
    assert [check for check in found.checks.found if check.severity == "error"] == []


def test_the_prior_alone_owes_nothing_to_the_update(double: Engine) -> None:
    """Another update with the same label gives the same image."""
    generator, task = Toy(CLASSES), perceptron()
    seen = [gl.observe(task, made(generator, seed=seed), TRAINING, key="same") for seed in (0, CLASSES)]
    runs = [gl.attacks.get("prior-only").run(task, each, knowing(generator), engine=double) for each in seen]
    assert torch.equal(runs[0].batch["x"], runs[1].batch["x"])
    assert runs[0].match != runs[1].match
    other = gl.attacks.get("prior-only", shift=1).run(task, seen[0], knowing(generator), engine=double)
    assert largest_difference(other.batch["x"], runs[0].batch["x"]) > 1e-3


def test_a_random_search_returns_its_best_or_nothing() -> None:
    with pytest.raises(ValueError, match="best_match"):
        gl.attacks.get("ggl", search="random", keep="last")
