"""A second guess of what a defence noised, from a candidate.

Some defences noise a few channels and release the rest exactly (`tip`). They do not say which. The first guess is read
off the update, and is often wrong where the noise is the smaller part of it. A candidate that is nearly right explains
most of the update and little of the noise: the remainder shows where the noise is.
"""

from __future__ import annotations

from dataclasses import replace

from gradleak.auto.traits import Case
from gradleak.core.tree import Params
from gradleak.parts.predictions import assumed_in
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState, Order
from gradleak.scenario.task import Batch

SOLVER = "second-order"  # the member that solves again: only an exact solution counts
LOOKS = 3  # a better candidate shows more


def reconsidered_case(case: Case, row: int, candidate: Batch, order: Order | None) -> Case:
    """The case of this target alone, with the defence as this candidate shows it."""
    target, knows = case.targets[row], case.about([row])
    scene = TargetView.of(case.task, target.last, knows)
    assert knows.defence is not None
    defence = knows.defence.reconsidered(scene, _predicted(scene, candidate, order))
    return Case(case.task, (target,), replace(knows, defence=defence), case.engine)


def _predicted(scene: TargetView, candidate: Batch, order: Order | None) -> Params:
    """The update of this candidate, without noise, in all coordinates: as `Replay`, before `visible`."""
    training, defence = scene.knows.training, assumed_in(scene)
    assert training is not None
    like = scene.like
    batch = {
        name: value.to(like.device, like.dtype if value.is_floating_point() else None)
        for name, value in candidate.items()
    }
    client = ClientState(buffers=scene.buffers, extras=scene.extras)
    upload, _ = training.public.run(scene.task, scene.weights, batch, defence, client, order)
    return defence.reveal([upload], [upload.num_examples])
