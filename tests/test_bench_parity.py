"""Lanes are measured against the plain loop, so both must compute the same: every registered attack, by enumeration.

In double precision every objective on the way is the loop's to 1e-8 (`second-order` to 1e-6: its systems are badly
conditioned); in float32 the first one is, to 1e-3 of itself (later ones are not held to it: signs and line searches
amplify what rounding leaves).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gradleak as gl
from conftest import CLASSES, perceptron, private, short
from gradleak.attack import Reconstruction
from gradleak.engine import Engine
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Observation
from gradleak.scenario.task import TaskError
from test_kinds import text_task
from test_latent import TRAINING, Toy, knowing, observed
from test_spans import net
from test_steps import TRAINING as DIFFUSION
from test_steps import drawn, toy
from test_tableak import rows as table_rows
from test_tableak import task as tabular
from test_vit import made as transformer
from test_vit import picture, task_of

NAMES = gl.attacks.names()
FEW: dict[str, int] = {"steps": 5, "weight_steps": 4, "fine_steps": 4, "sampler_steps": 2, "features": 2}
FEW |= {"candidates": 3, "starts": 3}
TRACED = ("objective", "match")
CLOSE = {"second-order": 1e-6}  # relative; else 1e-8


World = tuple[gl.Task, list[Observation], Knowledge]


def classifier(activation: type[nn.Module] = nn.Sigmoid) -> World:
    """Two targets of one example each, as in every world here."""
    task = perceptron(activation=activation)
    seen = [gl.observe(task, private(1, seed=seed), TRAINING, key=f"t{seed}") for seed in range(2)]
    return task, seen, Knowledge(training=TRAINING)


def with_generator() -> World:
    generator = Toy(CLASSES)
    task, seen, _ = observed(generator, targets=2)
    return task, seen, knowing(generator)


def denoiser(task: gl.Task) -> World:
    batches = [drawn(t, seed=place) for place, t in enumerate((30, 60))]
    seen = [gl.observe(task, batch, DIFFUSION, key=f"t{place}") for place, batch in enumerate(batches)]
    given = {field: torch.stack([batch[field] for batch in batches]) for field in ("noise", "t")}
    return task, seen, Knowledge(training=DIFFUSION, generator=task.model, given=given)


def of_rows() -> World:
    task = tabular(24)
    seen = [gl.observe(task, table_rows(1, seed=seed), TRAINING, key=f"t{seed}") for seed in range(2)]
    return task, seen, Knowledge(training=TRAINING)


def of_texts() -> World:
    task = text_task()
    texts = [{"x": torch.tensor([[4, 8, 3, 3, 17, 22, 0, 0, place]]), "y": torch.tensor([place])} for place in (1, 2)]
    seen = [gl.observe(task, text, TRAINING, key=f"t{place}") for place, text in enumerate(texts)]
    return task, seen, Knowledge(training=TRAINING)


def of_patches() -> World:
    task = task_of(transformer(), picture())
    batches = [{"x": picture(seed), "y": torch.tensor([seed])} for seed in range(2)]
    seen = [gl.observe(task, batch, TRAINING, key=f"t{place}") for place, batch in enumerate(batches)]
    return task, seen, Knowledge(training=TRAINING)


WORLDS = (classifier, lambda: classifier(nn.ReLU), with_generator, lambda: denoiser(toy()), lambda: denoiser(net()))
WORLDS += (of_rows, of_texts, of_patches)


def case(name: str) -> World:
    """The first world that the attack does not refuse, with all that it may need to know."""
    for world in WORLDS:
        task, seen, knows = world()
        try:
            short(name, **{**FEW, "steps": 1}).run(task, seen, knows, engine=Engine("cpu"))
        except (MissingKnowledge, TaskError):
            continue
        return task, seen, knows
    raise AssertionError(f"{name} runs in no world of this file: add one that has what it needs.")


def both(name: str, precision: str, **settings: Any) -> tuple[Reconstruction, Reconstruction]:
    """As lanes, and lane after lane."""
    task, seen, knows = case(name)
    attack, engine = short(name, **{**FEW, **settings}), Engine("cpu", precision)
    lanes, loop = (attack.run(task, seen, knows, engine=replace(engine, batched=flag)) for flag in (True, False))
    return lanes, loop


@pytest.mark.parametrize("name", NAMES)
def test_lanes_and_loop_have_the_same_objectives(name: str) -> None:
    (lanes, loop), close = both(name, "double"), CLOSE.get(name, 1e-8)
    for curve in TRACED:
        own, its = lanes.trace[curve], loop.trace[curve]
        assert own.shape == its.shape
        assert own.isfinite().any()
        torch.testing.assert_close(own, its, rtol=close, atol=close / 100, equal_nan=True)
    torch.testing.assert_close(lanes.objective, loop.objective, rtol=close, atol=close / 100)
    torch.testing.assert_close(lanes.candidates["x"], loop.candidates["x"], rtol=0, atol=1e-6)
    if lanes.trace["match"].shape[0] > 1:  # two targets: had lanes been mixed up, this would have shown above
        first = lanes.trace["match"][0]
        assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("name", NAMES)
def test_lanes_and_loop_begin_alike_in_float32(name: str) -> None:
    lanes, loop = both(name, "strict", steps=2)
    for curve in TRACED:
        torch.testing.assert_close(lanes.trace[curve][0], loop.trace[curve][0], rtol=1e-3, atol=1e-5, equal_nan=True)
