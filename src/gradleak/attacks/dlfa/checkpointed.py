"""A whole local training inside the attack: its backward pass holds weights at checkpoints, not every step's graph.

`trained` is the client rule (`LocalTraining.run`) one step at a time under `recompute.rollout`, through the hooks of a
defence as far as it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradleak.core import tree
from gradleak.core.recompute import rollout
from gradleak.core.tree import Params, Tree
from gradleak.parts.predictions import assumed_in
from gradleak.parts.protocols import Footprint
from gradleak.parts.view import TargetView
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Client, Compute, Defence, Upload
from gradleak.scenario.task import Batch


def footprint(passes: Sequence[float], every: int) -> Footprint:
    """Memory of steps with these shares of a pass each: all graphs, or one step's, and weights at checkpoints."""
    return Footprint(sum(passes) if every == 0 else max(passes), len(passes) / max(1, every) + every)


def trained(
    training: LocalTraining,
    scene: TargetView,
    parts: Sequence[Batch],
    lengths: Sequence[float],
    whole: Batch,
    every: int = 1,
) -> Params:
    """The visible update of a client that trains on these parts in turn: `LocalTraining.run`, one step at a time.

    lengths     factors of the learning rate for each step, instead of the recipe's schedule
    whole       the client's batch for the defence's hook for the upload
    every       as in `recompute.rollout`
    """
    # A step may close over nothing of a lane: only the recipe without its rate, the task, and the threat model.
    recipe, task, knows = replace(training.public, lr=1.0), scene.task, scene.knows
    bare = TargetView(task, knows, {}, {}, scene.num_examples)
    moving = {name for name, _ in task.model.named_buffers()}
    buffers = scene.buffers or {}
    running = {name: value for name, value in buffers.items() if name in moving}
    frozen = {name: value for name, value in buffers.items() if name not in moving}
    observed: Tree = {
        "update": scene.update,
        "buffers": buffers,
        "returned_buffers": scene.returned_buffers,
        "extras": scene.extras,
        "fields": scene.fields,
    }
    defended = knows.defence is not None
    common: Tree = {"lr": training.lr, "frozen": frozen}
    common |= {"start": scene.weights, "observed": observed} if defended else {"start": {}, "observed": {}}

    def step(carry: Tree, turn: Tree, common: Tree) -> tuple[Tree, Tree]:
        # The observation and running statistics are constant: detached, they cost no derivatives.
        view = replace(bare, weights=common["start"], **tree.map(_detached, common["observed"]))
        rule = replace(recipe, lr=common["lr"], schedule=lambda *_: turn["length"])
        buffers = tree.map(_detached, {**common["frozen"], **carry["buffers"]})
        client = ClientState(optimiser=carry["state"], buffers=buffers, extras=view.extras)
        hooks = _StepOnly(assumed_in(view), common["start"])
        upload, after = rule.run(task, carry["weights"], turn["batch"], hooks, client, order=[None])
        decrease = upload.payload["update"]
        moved = {
            "weights": tree.subtract(carry["weights"], decrease),
            "state": after.optimiser,
            "buffers": {name: value for name, value in (after.buffers or {}).items() if name in moving},
        }
        return moved, decrease

    start: Tree = {"weights": scene.weights, "state": recipe.optimiser.init(scene.weights), "buffers": running}
    each: list[Tree] = [{"batch": part, "length": length} for part, length in zip(parts, lengths, strict=True)]
    end, moved = rollout(step, start, each, common, every=every)

    defence = assumed_in(scene)
    plain = Upload({"update": moved}, scene.num_examples, {**frozen, **end["buffers"]} or None)
    sent = defence.upload(plain, Client(task, scene.weights, moved, whole, end["state"], scene.extras, {}, None))
    return defence.visible(defence.reveal([sent], [sent.num_examples]), scene)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class _StepOnly(Defence):
    """A defence's hook for single steps, with the start of the whole training; its other hooks run at the end."""

    defence: Defence
    start: Params

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        return self.defence.gradient(compute, weights, batch, replace(client, start=self.start))
