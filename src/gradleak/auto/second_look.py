"""A second look at a defence that guesses what it noised, with a candidate in hand.

Some defences noise a few channels and release the rest exactly (`tip`). Which ones is not told; the first guess is read
off the update, and is often wrong where the noise is the smaller part of it. A candidate that is nearly right explains
most of the update, and of the noise little: what is left over shows where it is.
"""

from __future__ import annotations

from dataclasses import replace

from gradleak.auto.traits import Case
from gradleak.core.tree import Params
from gradleak.parts.predictions import assumed_in
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState, Order
from gradleak.scenario.task import Batch

AGAIN = "second-order"  # who solves anew: nothing short of an exact solution counts
LOOKS = 3  # a better candidate shows more


def looked_again(case: Case, row: int, candidate: Batch, order: Order | None) -> Case:
    """This target alone, to an attacker who takes the defence for what this candidate shows of it."""
    target, knows = case.targets[row], case.about([row])
    scene = TargetView.of(case.task, target.last, knows)
    known = knows.defence
    assert known is not None
    return Case(
        case.task,
        (target,),
        replace(knows, defence=known.reconsidered(scene, _predicted(scene, candidate, order))),
        case.engine,
    )


def _predicted(scene: TargetView, candidate: Batch, order: Order | None) -> Params:
    """The update that this candidate gives, without noise, in all coordinates: as `Replay`, before `visible`."""
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
