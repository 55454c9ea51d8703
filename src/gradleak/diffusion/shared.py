"""Steps and noise from the server: the easier of the two regimes of federated diffusion.

In the private regime every client draws its own step and noise. Here the server broadcasts a key from which all clients
draw the same ones, anew in each local step; so the server knows them. Reference: Huang, Hong, Roos, Chen, ARES 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.scenario.client import SHARED, drawing
from gradleak.scenario.defence import Defence
from gradleak.scenario.observation import BadObservation, Observation
from gradleak.scenario.task import Batch, Task


@dataclass(frozen=True)
class SharedDraws(Defence):
    """A training regime rather than a defence: the server broadcasts the key of this round's steps and noise."""

    seed: int = 0

    def demand(self, task: Task, server: Tree) -> None:
        """An audit grants the draws instead: there is no defence in them to attack."""
        raise ValueError(
            "It only says who draws steps and noise; an attacker that knows them is Audit(given=('t', 'noise'))."
        )

    def broadcast(self, weights: Params, server: Tree) -> dict[str, Params]:
        key = randomness.key("shared draws", self.seed, server.get("round", 0))
        return {SHARED: {"key": key.to(tree.like(weights).device)}}


def handed_out(task: Task, seen: Observation, step: int = 0) -> Batch:
    """The fields that the server itself chose for a client's local step, for `Knowledge.given`.

    Computed from the broadcast alone, for a client whose steps use all its examples.
    """
    if SHARED not in seen.extras:
        raise BadObservation(
            f"{seen.key!r} holds no key that the server handed out (extras[{SHARED!r}]): the client drew these "
            "fields itself, and only the client knows them."
        )
    blank = task.blank(seen.num_examples)
    known = {name: value for name, value in blank.items() if name not in task.drawn}
    device = tree.like(blank).device
    drawn = task.completed(known, drawing(Draws(seen.extras[SHARED]["key"].to(device)), step))
    return {name: drawn[name] for name in task.drawn}
